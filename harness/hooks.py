"""What the pytest plugin does in a session that belongs to a run: select, skip with a reason, and record.

Two roles, which are one process without pytest-xdist and several with it. `Selector` works where tests run: it
deselects by `--fp8-case`, turns `requires` marks into skips before anything runs, and makes properties safe to report.
`Recorder` works where results arrive (the controller, or the only process) and appends to the journal; a worker never
writes there, so its death cannot cut a line.

A property that is not str, int or float fails its test. pytest-xdist would lose the whole worker over it instead, and
with the worker the results of other tests.

Imports that only some sessions need are in the functions that need them: a session of trivial tests must not notice us.

Not here: the journal's format (journal.py), what a skip or a death means (gate.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import journal, manifest
from harness.errors import DiskError, HarnessError

if TYPE_CHECKING:
    from harness import capabilities

WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
MESSAGE_LIMIT = 400

#: What a report carries beside its outcome: the outcome as our own hook has seen it, and what the phase raised.
OUTCOME, RAISED = "fp8_outcome", "fp8_raised"
#: Key of what a worker tells the controller when it ends: how many tests it deselected.
DESELECTED = "fp8_deselected"
SEVERITY = {"passed": 0, "skipped": 1, "failed": 2}


CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def separate_worker() -> None:
    """Give this process its own compile caches, and its own GPU where `FP8CI_WORKER_DEVICES` lists several.

    Neither Triton's cache nor Inductor's is safe between processes that purge or race in it; a shared one has broken
    parallel suites.
    """
    worker = os.environ.get(WORKER_VARIABLE)
    if not worker:
        return
    from harness.platforms import DEVICES_VARIABLE

    for variable in CACHE_VARIABLES:
        cache = os.environ.get(variable)
        if cache:
            os.environ[variable] = str(Path(cache) / worker)
    name, _, devices = os.environ.get(DEVICES_VARIABLE, "").partition("=")
    if name and devices:
        listed = devices.split(",")
        os.environ[name] = listed[int(worker.removeprefix("gw")) % len(listed)]


def install(config: pytest.Config) -> None:
    """Register the roles that this process has."""
    settings = Settings(config)
    config.pluginmanager.register(Selector(config, settings), "fp8-selector")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config, settings), "fp8-recorder")
    _stacks_on_termination(config)


def _stacks_on_termination(config: pytest.Config) -> None:
    """On SIGTERM (a deadline) write the stack of every thread to the log, then die of it as before.

    Works while native code holds the interpreter lock, which is how a hung kernel looks.
    """
    stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    faulthandler.register(signal.SIGTERM, file=stderr, all_threads=True, chain=True)

    def undo() -> None:
        faulthandler.unregister(signal.SIGTERM)
        stderr.close()

    config.add_cleanup(undo)


class Settings:
    """The options of a session, checked. pytest.UsageError (exit 4) when one is missing."""

    def __init__(self, config: pytest.Config) -> None:
        self.out = Path(str(config.getoption("--fp8-out"))).absolute()
        self.suite = self._required(config, "--fp8-suite")
        self.platform = self._required(config, "--fp8-platform")
        self.run_id = self._required(config, "--fp8-run-id")
        self.case: str | None = config.getoption("--fp8-case")
        self.capabilities: str | None = config.getoption("--fp8-capabilities")

    @staticmethod
    def _required(config: pytest.Config, name: str) -> str:
        value = config.getoption(name)
        if not value:
            raise pytest.UsageError(f"--fp8-out is given without {name}; expected both; run `fp8ci run` instead")
        return str(value)

    def machine(self) -> capabilities.Capabilities:
        """What this machine can do: from the file that the run wrote, else probed now."""
        from harness import capabilities

        if self.capabilities:
            return capabilities.load(Path(self.capabilities))
        return capabilities.probe()


class Selector:
    """Deselects, skips, and checks properties, in the process that runs the tests."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self.machine: capabilities.Capabilities | None = None
        self.modules = manifest.modules_of(settings.case, settings.suite)
        self.told: dict[str, Any] | None = getattr(config, "workeroutput", None)
        if self.told is not None:
            self.told[DESELECTED] = 0

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """In a worker: what the controller does not see is counted here, and told when the session ends."""
        if self.told is not None:
            self.told[DESELECTED] += len(items)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Import no file of which `--fp8-case` names no test, where it names whole ids."""
        if not self.modules or collection_path.suffix != ".py":
            return None
        module = manifest.from_node_id(collection_path.as_posix(), self.settings.suite).partition("/")[2]
        return None if module in self.modules else True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests whose case matches; mark as skipped those that require what this machine lacks."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            test_id = manifest.from_node_id(item.nodeid, self.settings.suite)
            (kept if manifest.case_matches(test_id, self.settings.case) else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept
        for item in items:
            reason = self._lacks(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def _lacks(self, item: pytest.Item) -> str:
        """`requires X; this is Y`, or nothing when the test can run here."""
        marks = list(item.iter_markers("requires"))
        if not marks:
            return ""
        from harness import capabilities

        try:
            if self.machine is None:
                self.machine = self.settings.machine()
            for mark in marks:
                decision = capabilities.decide(capabilities.parse(*mark.args, **mark.kwargs), self.machine)
                if isinstance(decision, capabilities.Skip):
                    return decision.reason
        except HarnessError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error
        return ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Make the properties plain values before the report copies them; one that cannot be fails the test.

        So does a phase that raised and that a conftest or a plugin calls passed, or skipped.
        """
        refused: list[str] = []
        for position in range(len(item.user_properties) - 1, -1, -1):
            name, value = item.user_properties[position]
            plain = journal.plain_value(value)
            if plain is None:
                refused.append(f"property {name!r} is a {type(value).__name__}")
                del item.user_properties[position]
            else:
                item.user_properties[position] = (str(name), plain)
        report = yield
        raised = "" if call.excinfo is None else call.excinfo.exconly().strip()
        skips = call.excinfo is not None and isinstance(call.excinfo.value, pytest.skip.Exception)
        if raised and (report.passed or (report.skipped and not skips and not hasattr(report, "wasxfail"))):
            report.longrepr = _lied(report, raised)
            report.outcome = "failed"
        if refused and not report.failed:
            report.outcome = "failed"
            report.longrepr = f"{'; '.join(refused)}; expected str, int or float; record one number or text a property"
        # Whoever changes the report after this is found out where it is recorded, in whichever process.
        vars(report).update({OUTCOME: report.outcome, RAISED: raised})
        return report


class Recorder:
    """Appends what happens in a session to the journal, in the process where results arrive."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self.writer = journal.JournalWriter(settings.out / journal.FILE_NAME)
        config.add_cleanup(self.writer.close)
        self._deselected: int | None = 0
        self._collected = False
        self._stopped = ""
        self._interrupted = False
        self._reported: dict[str, int] = {}
        self._dead: dict[str, tuple[str | None, str]] = {}
        self._last_id = ("", "")

    def pytest_sessionstart(self) -> None:
        """The session has begun."""
        self._write("session", run_id=self.settings.run_id, pid=os.getpid(), time=time.time())

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count what `--fp8-case` or pytest's own -k and -m left out."""
        self._deselected = (self._deselected or 0) + len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected, or that skips itself as a whole, leaves no test to report it."""
        if report.passed:
            return
        message, detail = _describe(report)
        self._write(
            "collect-error" if report.failed else "collect-skip", path=report.nodeid, message=message, detail=detail
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The ids that will run, and the skips that are known beforehand (without pytest-xdist)."""
        skips: dict[str, str] = {}
        for item in session.items:
            mark = item.get_closest_marker("skip")
            if mark is not None:
                reason = mark.kwargs.get("reason") or (mark.args[0] if mark.args else "unconditional skip")
                skips[self._id(item.nodeid)] = str(reason)
        self._record_ids([item.nodeid for item in session.items], skips)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """The ids that will run, from the first worker that has them (pytest-xdist itself compares the workers)."""
        if not self._collected:
            self._deselected = None  # until a worker has ended and says it
            self._record_ids(ids, {})

    def _record_ids(self, node_ids: Sequence[str], skips: dict[str, str]) -> None:
        self._collected = True
        ids = [self._id(node_id) for node_id in node_ids]
        self._write("collected", ids=ids, skips=skips, deselected=self._deselected)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test is about to run."""
        self._write("start", id=self._id(nodeid), time=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase has ended. Properties are written once each; a worker's death comes through another hook."""
        if report.when not in ("setup", "call", "teardown"):
            return
        ended = vars(report).get(OUTCOME, report.outcome)
        if SEVERITY.get(ended, 0) > SEVERITY.get(report.outcome, len(SEVERITY)):
            report.longrepr = _lied(report, vars(report).get(RAISED) or f"{ended} it")
            report.outcome = "failed"
        known = self._reported.get(report.nodeid, 0)
        properties: dict[str, Any] = dict(report.user_properties[known:])
        self._reported[report.nodeid] = len(report.user_properties)
        if report.when == "teardown":
            self._reported.pop(report.nodeid, None)
        fields: dict[str, Any] = {}
        if report.outcome != "passed":
            fields["message"], fields["detail"] = _describe(report)
        if properties:
            fields["properties"] = properties
        worker = getattr(report, "worker_id", "")
        if worker and worker != "master":
            fields["worker"] = worker
        self._write(
            "phase",
            id=self._id(report.nodeid),
            phase=report.when,
            outcome=report.outcome,
            seconds=round(report.duration, 6),
            **fields,
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker is gone. When it died, remember how: the hook below says what it was running."""
        told = getattr(node, "workeroutput", None) or {}
        self._deselected = told.get(DESELECTED, self._deselected)
        self._interrupted = self._interrupted or told.get("exitstatus") == pytest.ExitCode.INTERRUPTED
        if error:
            self._dead[node.gateway.id] = (_signal_of(node), str(error))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A worker died in this test."""
        worker = str(report.node.gateway.id)
        ended_by, message = self._dead.pop(worker, (None, str(report.longrepr)))
        self._write_crash(self._id(crashitem), worker, ended_by, message)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C is a KeyboardInterrupt; an end that pytest or pytest-xdist itself decided on is a subclass of it."""
        value = excinfo.value
        if isinstance(value, KeyboardInterrupt) and type(value) is not KeyboardInterrupt and not self._interrupted:
            self._stopped = _first_line(str(value))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The session has reached its end by itself."""
        fields: dict[str, Any] = {"stopped": self._stopped} if self._stopped else {}
        self._write("session-end", rc=int(exitstatus), deselected=self._deselected, **fields)

    def _write(self, event: str, /, **fields: Any) -> None:
        """Append an event. A disk that is full ends the session with an exit code of its own: no test can say that."""
        try:
            while self._dead:  # nobody said what these were running: they died between tests, or while collecting
                worker, (ended_by, message) = self._dead.popitem()
                self._write_crash("", worker, ended_by, message)
            self.writer.write(event, suite=self.settings.suite, **fields)
        except DiskError as error:
            if not journal.disk_full(error):
                raise
            raise pytest.exit.Exception(str(error), returncode=journal.DISK_FULL_EXIT) from None

    def _write_crash(self, test_id: str, worker: str, ended_by: str | None, message: str) -> None:
        self.writer.write(
            "worker-crash",
            suite=self.settings.suite,
            id=test_id,
            worker=worker,
            signal=ended_by,
            message=_first_line(message),
        )

    def _id(self, node_id: str) -> str:
        if node_id != self._last_id[0]:  # four events a test ask for the same one
            self._last_id = (node_id, manifest.from_node_id(node_id, self.settings.suite))
        return self._last_id[1]


def _signal_of(node: Any) -> str | None:
    """The signal that ended a worker's process, e.g. `SIGKILL`; None when it exited by itself or cannot be asked."""
    from harness.executor import signal_name

    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if process is None:
        return None
    try:
        code = process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return None
    return signal_name(-code) if code < 0 else None


def _lied(report: pytest.TestReport, raised: str) -> str:
    """What is recorded of a phase that raised and that a conftest or a plugin calls otherwise."""
    return f"a plugin calls {report.when} {report.outcome}, which raised {raised}; expected the outcome it had"


def _describe(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """(one line that says what went wrong, traceback and captured output)."""
    expected_failure = getattr(report, "wasxfail", None)
    if report.skipped and expected_failure is not None:
        return f"expected failure: {expected_failure}", ""
    if isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        return _first_line(str(reason).removeprefix("Skipped: ")), f"{path}:{line}"
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if report.longrepr is not None else ""
    told = str(crash.message) if crash is not None else _last_error(text)
    captured = "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections)
    return _first_line(told.removeprefix("AssertionError: ").removeprefix("Failed: ")), journal.shorten(text + captured)


def _last_error(text: str) -> str:
    """The last line that pytest marks as the error (`E   ...`), else the first line: for tracebacks kept as text."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else text


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."
