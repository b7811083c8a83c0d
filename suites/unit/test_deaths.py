"""Every way for a run to die, for real: a process is started, ends as said, and verdict, exit code and report follow.

Nothing here is made by hand: `fp8ci run` starts pytest in a checkout of three tests, of which the second ends the
process (or the machine's patience), and what is asserted is what a person and a CI get: the exit code, the verdict of
each test, and junit.xml. Two rules hold in every row and are checked for all of them: the run is red, and what had
passed before the death is still there as passed.

Not here: malformed reports of other people (test_reports.py).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import canary, cli, manifest, platforms
from harness.errors import VERDICTS, Verdict
from harness.local import LocalExecutor
from suites.unit import tiny_checkout

ROOT = Path(__file__).resolve().parents[2]
IDS = [f"numerics/test_tiny::{name}" for name in ("test_1_first", "test_2_dies", "test_3_last")]
THREE = """
import ctypes, os, pathlib, signal, subprocess, sys, time
import pytest
{before}
def test_1_first(): pass
{mark}
def test_2_dies({arguments}):
    {end}
def test_3_last(): pass
{after}
"""

#: Replaces the journal's file, in the process that writes it, by one that is always full: real ENOSPC from then on.
FILL = """
def fill_the_disk():
    full = os.open("/dev/full", os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").endswith("journal.jsonl"):
            os.dup2(full, int(name))
"""

#: A read of address 0, in C; the interpreter lock is held.
SEGV = "ctypes.string_at(0)"
#: A wait in C that gives the interpreter lock back, and one that keeps it.
HANG = "ctypes.CDLL(None).pause()"
HANG_WITH_LOCK = "ctypes.PyDLL(None).pause()"


@dataclass(frozen=True)
class Death:
    """One way to die.

    `verdict` and `told` are of the case named by `what`, `rest` begins what junit.xml says of the test that comes after
    it ("" where it passed). `kept` is false where there was nothing to keep, or where the test destroyed it. `hangs`
    gives it a deadline of HANG_SECONDS from the moment in which it began.
    """

    end: str
    verdict: Verdict
    told: str
    exit_code: int
    rest: str = "error MISSING: not run: "
    what: str = "test_tiny::test_2_dies"
    kept: bool = True
    before: str = ""
    after: str = ""
    mark: str = ""
    arguments: str = ""
    conftest: str = ""
    args: Sequence[str] = ()
    hangs: bool = False


HANG_SECONDS = 0.4
RUNNING = '"event":"start","suite":"numerics","id":"numerics/test_tiny::test_2_dies"'

XDIST = ("-n1",)
BUS = "import mmap; f = open('/dev/shm/fp8ci-bus', 'w+b'); f.truncate(4096); os.unlink('/dev/shm/fp8ci-bus'); "
BUS += "m = mmap.mmap(f.fileno(), 4096); f.truncate(0); m[0]"
RUNS_ON = "while True: time.sleep(1)"
OUT = "pathlib.Path(pytestconfig.getoption('fp8_out'))"

DEATHS: dict[str, Death] = {
    # Signals, in the only process.
    "sigkill": Death("os.kill(os.getpid(), signal.SIGKILL)", Verdict.KILLED, "by SIGKILL", 3),
    "sigterm": Death("os.kill(os.getpid(), signal.SIGTERM)", Verdict.KILLED, "by SIGTERM", 3),
    "sighup": Death("os.kill(os.getpid(), signal.SIGHUP)", Verdict.KILLED, "by SIGHUP", 3),
    "sigsegv": Death(SEGV, Verdict.CRASH, "died of SIGSEGV", 3),
    "sigbus": Death(BUS, Verdict.CRASH, "died of SIGBUS", 3),
    "sigfpe": Death("os.kill(os.getpid(), signal.SIGFPE)", Verdict.CRASH, "died of SIGFPE", 3),
    "abort": Death("os.abort()", Verdict.CRASH, "died of SIGABRT", 3),
    "abort-134": Death("os._exit(134)", Verdict.CRASH, "died of SIGABRT", 3),
    "killed-137": Death("os._exit(137)", Verdict.KILLED, "by SIGKILL", 3),
    # The whole process group, as a container's engine or a shell's kill does it.
    "sigkill-group": Death("os.killpg(0, signal.SIGKILL)", Verdict.KILLED, "by SIGKILL", 3),
    # Exits of its own.
    "exit-0": Death("os._exit(0)", Verdict.CRASH, "exited with 0", 3),
    "exit-1": Death("os._exit(1)", Verdict.CRASH, "exited with 1", 3),
    "exit-0-in-a-fixture": Death(
        "pass",
        Verdict.CRASH,
        "exited with 0",
        3,
        before="@pytest.fixture\ndef leaving():\n    yield\n    os._exit(0)\n",
        arguments="leaving",
    ),
    "exit-0-in-a-thread": Death(
        "threading.Timer(0.1, os._exit, [0]).start(); time.sleep(20)",
        Verdict.CRASH,
        "exited with 0",
        3,
        before="import threading\n",
    ),
    "exit-0-at-import": Death(
        "pass", Verdict.CRASH, "exited with 0", 3, what="suite::process", before="os._exit(0)", kept=False
    ),
    "segv-at-import": Death(
        "pass", Verdict.CRASH, "died of SIGSEGV", 3, what="suite::process", before=SEGV, kept=False
    ),
    "exit-0-in-the-conftest": Death(
        "pass", Verdict.CRASH, "exited with 0", 3, what="suite::process", conftest="os._exit(0)", kept=False
    ),
    "raise-in-the-conftest": Death(
        "pass",
        Verdict.FAIL,
        "No module named 'not_there'",
        3,
        what="suite::process",
        conftest="import not_there",
        kept=False,
    ),
    "pytest-exit-0": Death("pytest.exit('enough', 0)", Verdict.DISAGREE, "neither it nor its process", 3),
    "keyboard-interrupt": Death("raise KeyboardInterrupt", Verdict.INTERRUPTED, "pytest was interrupted", 130),
    "sigint-from-outside": Death(
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", Verdict.INTERRUPTED, "pytest was interrupted", 130
    ),
    "internal-error": Death(
        "pass",
        Verdict.DISAGREE,
        "internal error",
        3,
        what="suite::process",
        conftest="def pytest_runtest_teardown(item):\n    assert '2_dies' not in item.nodeid\n"
        "def pytest_runtest_logfinish(nodeid):\n    assert '2_dies' not in nodeid",
    ),
    # An exit code that lies.
    "exit-0-after-a-failure": Death(
        "assert False, 'wrong'",
        Verdict.FAIL,
        "wrong",
        3,
        rest="",
        conftest="def pytest_unconfigure(): os._exit(0)",
    ),
    "session-says-0": Death(
        "assert False, 'wrong'",
        Verdict.FAIL,
        "wrong",
        3,
        rest="",
        conftest="import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(session): "
        "session.exitstatus = 0",
    ),
    "died-after-the-last-test": Death(
        "pass",
        Verdict.KILLED,
        "with no test running",
        3,
        what="suite::process",
        rest="",
        conftest="import pytest, signal\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(): "
        "os.kill(os.getpid(), signal.SIGKILL)",
    ),
    "maxfail": Death("assert False, 'wrong'", Verdict.FAIL, "wrong", 3, args=("-x",)),
    # Memory, and the disk.
    "out-of-memory": Death("bytearray(1 << 62)", Verdict.OOM, "MemoryError", 1, rest=""),
    "disk-full": Death("fill_the_disk()", Verdict.DISK, "No space left on device", 3, before=FILL),
    "says-that-the-disk-is-full": Death(
        f"os.write(2, b'OSError: [Errno 28] No space left on device\\n'); {SEGV}",
        Verdict.CRASH,
        "died of SIGSEGV",
        3,
        args=("--capture=sys",),
    ),
    "journal-closed": Death("os.closerange(3, 100); os._exit(3)", Verdict.CRASH, "exited with 3", 3),
    "disk-full-in-the-last-test": Death(
        "pass",
        Verdict.DISK,
        "No space left on device",
        4,
        what="test_tiny::test_3_last",
        before=FILL.replace("def fill_the_disk", "@pytest.fixture\ndef fill_the_disk"),
        after="@pytest.fixture(autouse=True)\ndef full(request):\n    "
        "if '3_last' in request.node.nodeid: request.getfixturevalue('fill_the_disk')",
        rest="error DISK: ",
    ),
    # Deadlines.
    "hang-in-python": Death(RUNS_ON, Verdict.TIMEOUT, "did not end within its deadline", 3, hangs=True),
    "hang-in-native-code": Death(HANG, Verdict.TIMEOUT, "did not end within its deadline", 3, hangs=True),
    "hang-with-the-lock": Death(HANG_WITH_LOCK, Verdict.TIMEOUT, "did not end within its deadline", 3, hangs=True),
    "hang-ignoring-sigterm": Death(
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG_WITH_LOCK}",
        Verdict.TIMEOUT,
        "did not end within its deadline",
        3,
        hangs=True,
    ),
    "hang-at-import": Death(
        "pass",
        Verdict.TIMEOUT,
        "did not end within its deadline",
        3,
        what="suite::process",
        before=HANG,
        kept=False,
        hangs=True,
    ),
    "stopped": Death(
        "os.kill(os.getpid(), signal.SIGSTOP)", Verdict.TIMEOUT, "did not end within its deadline", 3, hangs=True
    ),
    "timeout-thread": Death(
        HANG,
        Verdict.TIMEOUT,
        "pytest-timeout",
        3,
        mark="@pytest.mark.timeout(1.0, method='thread')",
        args=("-p", "pytest_timeout"),
    ),
    "timeout-signal": Death(
        RUNS_ON,
        Verdict.TIMEOUT,
        "pytest-timeout",
        1,
        rest="",
        mark="@pytest.mark.timeout(1.0, method='signal')",
        args=("-p", "pytest_timeout"),
    ),
    "timeout-faulthandler": Death(
        HANG_WITH_LOCK,
        Verdict.TIMEOUT,
        "faulthandler",
        3,
        args=("-o", "faulthandler_timeout=1.0", "-o", "faulthandler_exit_on_timeout=true"),
    ),
    # Enough is enough: an orderly end after a failure, which pytest-xdist tells with the exit code of an interrupt.
    "xdist-maxfail": Death(
        "assert False, 'wrong'\n" + "".join(f"def test_2_{name}(): time.sleep(0.3)\n" for name in "efgh"),
        Verdict.FAIL,
        "wrong",
        3,
        rest="error MISSING: not run: pytest stopped early (stopping after 1 failures)",
        args=(*XDIST, "--maxfail=1", "--maxschedchunk=1"),
    ),
    "xdist-maxfail-in-the-last-test": Death(
        "pass",
        Verdict.FAIL,
        "wrong",
        1,
        what="test_tiny::test_3_last",
        rest="failure FAIL: ",
        args=(*XDIST, "--maxfail=1"),
        after="@pytest.fixture(autouse=True)\ndef fail(request): assert '3_last' not in request.node.name, 'wrong'\n",
    ),
    "xdist-interrupt-in-a-worker": Death(
        "raise KeyboardInterrupt",
        Verdict.INTERRUPTED,
        "pytest was interrupted",
        130,
        what="suite::agreement",
        args=XDIST,
    ),
    # pytest-xdist: the worker, the controller, and the words between them.
    "xdist-sigkill": Death(
        "os.kill(os.getpid(), signal.SIGKILL)", Verdict.KILLED, "worker gw0 died of SIGKILL", 3, rest="", args=XDIST
    ),
    "xdist-sigsegv": Death(SEGV, Verdict.CRASH, "worker gw0 died of SIGSEGV", 1, rest="", args=XDIST),
    "xdist-exit-0": Death("os._exit(0)", Verdict.CRASH, "worker gw0 died", 1, rest="", args=XDIST),
    "xdist-no-restart": Death(
        SEGV, Verdict.CRASH, "worker gw0 died of SIGSEGV", 3, args=(*XDIST, "--max-worker-restart=0")
    ),
    "xdist-segv-at-import": Death(
        "pass",
        Verdict.CRASH,
        "died of SIGSEGV",
        3,
        what="suite::worker-gw0",
        before=SEGV,
        kept=False,
        rest="error MISSING: ",
        args=(*XDIST, "--max-worker-restart=0"),
    ),
    "xdist-controller-killed": Death(
        "time.sleep(0.3); os.kill(os.getppid(), signal.SIGKILL)", Verdict.KILLED, "by SIGKILL", 3, args=XDIST
    ),
    "xdist-hang": Death(HANG_WITH_LOCK, Verdict.TIMEOUT, "did not end within its deadline", 3, args=XDIST, hangs=True),
    "xdist-dies-before-it-reports": Death(
        "pass",
        Verdict.CRASH,
        "worker gw0 died of SIGSEGV",
        1,
        rest="",
        args=XDIST,
        conftest=f"import ctypes, pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_logreport(report):\n"
        f"    if os.environ.get('PYTEST_XDIST_WORKER') and '2_dies' in report.nodeid and report.when == 'call': {SEGV}",
    ),
    "xdist-dies-in-mid-report": Death(
        "pass",
        Verdict.CRASH,
        "worker gw0 died",
        1,
        rest="",
        args=XDIST,
        # Half of a message, then nothing: the bytes go out on the pipe that execnet writes to.
        conftest="import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_logreport(report):\n"
        "    if os.environ.get('PYTEST_XDIST_WORKER') and '2_dies' in report.nodeid and report.when == 'call':\n"
        "        import execnet.gateway_base as g\n"
        "        for fd in os.listdir('/proc/self/fd'):\n"
        "            link = os.readlink(f'/proc/self/fd/{fd}') if os.path.islink(f'/proc/self/fd/{fd}') else ''\n"
        "            if link.startswith('pipe:') and int(fd) > 2:\n"
        "                try: os.write(int(fd), b'\\x05\\x00\\x00')\n"
        "                except OSError: pass\n"
        "        os._exit(1)",
    ),
    "xdist-cannot-say-it": Death(
        "pass",
        Verdict.DISAGREE,
        "neither it nor its process",
        3,
        args=XDIST,
        conftest="import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_runtest_makereport(item):\n"
        "    report = yield\n"
        "    if '2_dies' in item.nodeid and report.when == 'call': report.user_properties.append(('x', object()))\n"
        "    return report",
    ),
    # The journal itself.
    "journal-removed": Death(
        f"({OUT} / 'journal.jsonl').unlink()",
        Verdict.MISSING,
        "not collected",
        3,
        kept=False,
        rest="error MISSING: ",
        arguments="pytestconfig",
    ),
    "journal-emptied": Death(
        f"os.truncate({OUT} / 'journal.jsonl', 0)",
        Verdict.MISSING,
        "its process never started",
        3,
        what="suite::process",
        kept=False,
        rest="",
        arguments="pytestconfig",
    ),
    "journal-scribbled-on": Death(
        f"({OUT} / 'journal.jsonl').open('ab').write(b'\\x00\\xff not an event\\n')",
        Verdict.UNREADABLE,
        "is not an event",
        3,
        what="suite::journal",
        rest="",
        arguments="pytestconfig",
    ),
    "evidence-removed": Death(
        f"__import__('shutil').rmtree({OUT})",
        Verdict.MISSING,
        "its process never started",
        3,
        what="suite::process",
        kept=False,
        rest="absent",
        arguments="pytestconfig",
    ),
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that answers at once, pytest with this checkout's plugin alone, and no worker of our own in the way."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(tiny_checkout.FACTS))
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


def cases(out: Path) -> dict[str, str]:
    """Name -> tag and message of its result element in junit.xml, or "" for a pass; the counts of the file hold."""
    found: dict[str, str] = {}
    for suite in ElementTree.parse(out / "junit.xml").getroot():
        elements = [
            [child for child in case if child.tag in ("failure", "error", "skipped")] for case in suite.iter("testcase")
        ]
        assert all(len(listed) <= 1 for listed in elements)
        assert suite.get("tests") == str(len(elements))
        for case, listed in zip(suite.iter("testcase"), elements, strict=True):
            found[str(case.get("name"))] = f"{listed[0].tag} {listed[0].get('message')}" if listed else ""
    return found


def deadline_from(path: Path, begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the clock of the executor's deadline when the journal holds `begun`: a busy machine starts slowly."""
    real = LocalExecutor._wait

    def wait(self: LocalExecutor, pid: int, deadline: float, *rest: Any) -> Any:
        until = time.monotonic() + 30
        while time.monotonic() < until and not (path.exists() and begun in path.read_text(encoding="ascii")):
            time.sleep(0.02)
        return real(self, pid, time.monotonic() + HANG_SECONDS, *rest)

    monkeypatch.setattr(LocalExecutor, "_wait", wait)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"death-{name}") for name in DEATHS])
def test_death(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict, the exit code, what the report says of the test that passed before, of this one, and of the rest."""
    death = DEATHS[name]
    source = THREE.format(
        before=death.before, mark=death.mark, arguments=death.arguments, end=death.end, after=death.after
    )
    files = {"numerics/test_tiny": source}
    if death.conftest:
        files["numerics/conftest"] = f"import os\n{death.conftest}\n"
    root = tiny_checkout.make(tmp_path, files, IDS)
    plugins = ["-p", "harness.plugin", *(["-p", "xdist"] if "-n1" in death.args else [])]
    if death.hangs:
        begun = RUNNING if death.kept else '"event":"session"'
        deadline_from(root / "out" / "journal.jsonl", begun, monkeypatch)
    monkeypatch.setattr(LocalExecutor.__init__, "__defaults__", (0.3,))
    began = time.monotonic()
    common = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root)]
    code = cli.main([*common, "--out", str(root / "out"), "--", *plugins, *death.args])
    assert time.monotonic() - began < 40
    text = capsys.readouterr().out
    found = cases(root / "out")
    assert code == death.exit_code, (text, found)
    assert (found.get("test_tiny::test_1_first", "absent") == "") is death.kept, found
    rule = VERDICTS[death.verdict]
    assert found[death.what].startswith(f"{rule.junit} {death.verdict}: "), found
    assert death.told in found[death.what]
    last = found.get("test_tiny::test_3_last", "absent")
    assert last.startswith(death.rest) if death.rest else not last, found
    # On another machine, from the folder alone: the same.
    assert cli.main(["gate", str(root / "out")]) == code
    assert capsys.readouterr().out == text


# The harness itself -------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from harness import canary, cli, manifest, platforms
from suites.unit import tiny_checkout
platforms.ask_device = lambda *_, **__: dict(tiny_checkout.FACTS)
sys.exit(cli.main(sys.argv[1:]))
"""


def started(root: Path) -> subprocess.Popen[str]:
    """`fp8ci run` in a process of its own, its second test in mid-sleep."""
    arguments = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root)]
    arguments += ["--out", str(root / "out"), "--", "-p", "harness.plugin"]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    until = time.monotonic() + 30
    path = root / "out" / "journal.jsonl"
    while time.monotonic() < until:
        if path.exists() and RUNNING in path.read_text(encoding="ascii"):
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the test never started: {process.communicate()}")


def sleeping(folder: Path) -> Path:
    source = THREE.format(before="", mark="", arguments="", end="time.sleep(60)", after="")
    return tiny_checkout.make(folder, {"numerics/test_tiny": source}, IDS)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    ids=["death-ctrl-c", "death-cancelled-job", "death-terminal-gone"],
)
def test_an_interrupted_run(number: signal.Signals, tmp_path: Path) -> None:
    """The harness is told to stop: it stops the tests, writes the report of what there is, and exits 130."""
    process = started(sleeping(tmp_path))
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert output.startswith("INTERRUPTED exit 130: numerics test_tiny::test_2_dies - ")
    found = cases(tmp_path / "out")
    assert found["test_tiny::test_1_first"] == ""
    assert found["test_tiny::test_2_dies"].startswith("error INTERRUPTED: the test process was stopped")
    assert found["test_tiny::test_3_last"].startswith("error MISSING: not run: ")


def test_the_harness_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody was left to write a report. `fp8ci gate` makes the verdict from the journal: KILLED, exit 3."""
    process = started(sleeping(tmp_path))
    process.kill()
    process.communicate(timeout=20)
    for line in (tmp_path / "out" / "journal.jsonl").read_text(encoding="ascii").splitlines():
        event = json.loads(line)
        if event["event"] == "session":
            os.killpg(event["pid"], signal.SIGKILL)  # nobody else will
    assert not (tmp_path / "out" / "junit.xml").exists()
    assert cli.main(["gate", str(tmp_path / "out")]) == 3
    text = capsys.readouterr().out
    assert text.startswith("KILLED exit 3: numerics test_tiny::test_2_dies - the harness ended before the test process")
    assert "1 PASS" in text.splitlines()[0]


FULL = """
mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && "$@"
echo "exit $?"
cp -r "$OUT" "$COPY"
"""


def on_a_small_disk(tmp_path: Path, size: str, root: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """`fp8ci run` with its evidence on a file system of `size`; what it said, and a copy of the evidence elsewhere."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("requires a mount of its own; this host gives no user namespaces")
    (tmp_path / "disk").mkdir()
    out, copy = tmp_path / "disk" / "out", tmp_path / "copy"
    arguments = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root), "--out", str(out)]
    arguments += ["--", "-p", "harness.plugin", "-p", "xdist", "-n0"]
    mounted = ["unshare", "-rm", "sh", "-c", FULL, "sh", size, str(tmp_path / "disk")]
    done = subprocess.run(
        [*mounted, sys.executable, "-c", DRIVER, *arguments],
        cwd=ROOT,
        env={**os.environ, "OUT": str(out), "COPY": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, copy


def test_the_whole_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only the journal's file: pytest, its log and the harness meet a full file system of 200 KiB together.

    The run says so in one line and exits 4. What had been written can be judged on another disk: finished tests passed.
    """
    source = "import pytest\n@pytest.mark.parametrize('n', range(300))\n"
    source += "def test_it(n, record_property): record_property('pad', 'x' * 2000)\n"
    ids = [f"numerics/test_tiny::test_it[{number}]" for number in range(300)]
    root = tiny_checkout.make(tmp_path / "checkout", {"numerics/test_tiny": source}, ids)
    done, copy = on_a_small_disk(tmp_path, "200k", root)
    assert "exit 4\n" in done.stdout, done
    assert done.stderr.startswith("fp8ci: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert cli.main(["gate", str(copy)]) == 3
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(("DISK exit 3: ", "KILLED exit 3: "))
    passed = re.search(r"(\d+) PASS", line)
    assert passed is not None
    assert int(passed[1]) > 20


@pytest.mark.parametrize("size", ["2m", "6m", "24m"])
def test_a_test_that_fills_the_disk_is_reported(size: str, tmp_path: Path) -> None:
    """What was kept free is enough for the report, also where the whole disk is not much larger than that."""
    fill = f"pathlib.Path({str(tmp_path / 'disk' / 'out' / 'logs' / 'fill')!r}).write_bytes(bytes(64 << 20))"
    line = "record_property('pad', 'x' * 8000)"  # longer than what the journal's last page may have left
    source = f"import pathlib\ndef test_1_first(): pass\ndef test_2_dies(record_property): {line}; {fill}\n"
    root = tiny_checkout.make(tmp_path / "checkout", {"numerics/test_tiny": source}, IDS[:2])
    done, copy = on_a_small_disk(tmp_path, size, root)
    assert done.stdout.splitlines()[-1] in ("exit 3", "exit 4"), done  # 3: what came after it could not be recorded
    found = cases(copy)
    assert found["test_tiny::test_1_first"] == ""
    assert found["test_tiny::test_2_dies"].startswith("error DISK: "), found
    assert (copy / "report.html").exists()


# Absence: pytest ends in order, and nothing was tested ---------------------------------------------------------------

ABSENT: dict[str, tuple[str, tuple[str, ...], str]] = {
    # name: source, pytest arguments, what the summary says
    "all-marked-skip": ("import pytest\n@pytest.mark.skip(reason='no')\ndef test_1_first(): pass\n", (), "MISSING"),
    "module-skips-itself": ("import pytest\npytest.importorskip('not_there')\n", (), "skipped themselves"),
    "all-deselected": ("def test_1_first(): pass\n", ("-k", "nothing"), "were deselected"),
    "no-test": ("x = 1\n", (), "collected nothing"),
    "cannot-be-imported": ("import not_there\n", (), "No module named 'not_there'"),
    "setup-only": ("def test_1_first(): pass\n", ("--setup-only",), "its call never ran"),
    "collect-only": ("def test_1_first(): pass\n", ("--collect-only",), "collected, never started"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"absent-{name}") for name in ABSENT])
def test_absence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pytest-dev/pytest#812, #2393: its exit code is 0 or 5; with and without a manifest this is exit 3."""
    source, arguments, told = ABSENT[name]
    root = tiny_checkout.make(tmp_path, {"numerics/test_tiny": source}, IDS[:1])
    common = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root)]
    code = cli.main([*common, "--out", str(root / "out"), "--", "-p", "harness.plugin", *arguments])
    text = capsys.readouterr().out
    assert (code, told in text) == (3, True), text
    assert "PASS" not in text.splitlines()[0]
    assert cases(root / "out")["test_tiny::test_1_first"].startswith("error MISSING: ")


# The machine ---------------------------------------------------------------------------------------------------------

MI300X = {
    **tiny_checkout.FACTS,
    "arch": "gfx942",
    "vendor": "amd",
    "device_name": "AMD Instinct MI300X",
    "device_count": 1,
    "memory_gib": 191.5,
    "e4m3": "e4m3fnuz",
}
#: As the runtime writes it: past Python, to the file descriptor.
HUNG = "os.write(2, b'HW Exception by GPU node-1 (Agent handle: 0x1) reason :GPU Hang\\n'); os.abort()"


def run_on_mi300x(root: Path, *arguments: str) -> int:
    common = ["run", "--platform", "mi300x", "--suite", "numerics", "--quiet", "--root", str(root)]
    return cli.main([*common, "--out", str(root / "out"), *arguments, "--", "-p", "harness.plugin"])


@pytest.mark.parametrize(
    ("code", "verdict", "told"),
    [
        ("pass", Verdict.CRASH, "died of SIGABRT"),
        ("raise RuntimeError('HIP error: unspecified launch failure')", Verdict.GPU_HANG, "unspecified launch failure"),
        ("import time; time.sleep(60)", Verdict.GPU_HANG, "the canary did not end within 1 s"),
        ("import os; os.abort()", Verdict.GPU_HANG, "the canary died of SIGABRT"),
    ],
    ids=["canary-sings", "canary-fails", "canary-hangs", "canary-dies"],
)
def test_a_gpu_fault(code: str, verdict: Verdict, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log accuses the GPU: a process of its own asks it. Only if that fails is the host at fault."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(MI300X))
    monkeypatch.setattr(canary, "CODE", code)
    monkeypatch.setattr(canary, "DEADLINE", 1.0 if "sleep" in code else 20.0)
    source = THREE.format(before="", mark="", arguments="", end=HUNG, after="")
    root = tiny_checkout.make(tmp_path, {"numerics/test_tiny": source})
    assert run_on_mi300x(root, "--retries", "0") == 3  # the last test never ran
    found = cases(root / "out")
    assert found["test_tiny::test_1_first"] == ""
    assert found["test_tiny::test_2_dies"].startswith(f"{VERDICTS[verdict].junit} {verdict}: ")
    assert told in found["test_tiny::test_2_dies"]


@pytest.mark.parametrize(
    ("end", "attempts", "exit_code"),
    [
        ("os.write(2, b'No space left on device\\n'); os._exit(1)", 1, 3),
        ("fill_the_disk()", 2, 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, 3),
        ("os.abort()", 1, 3),
        ("assert False", 1, 1),
    ],
    ids=["retry-not-printed", "retry-disk", "retry-not-killed", "retry-not-crash", "retry-not-fail"],
)
def test_only_the_machine_is_retried(
    end: str,
    attempts: int,
    exit_code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What goes wrong only once: a full disk is tried again and every attempt kept; a red test stays red."""
    once = f"marker = pathlib.Path({str(tmp_path / 'marker')!r})\n    first = not marker.exists()\n    marker.touch()\n"
    source = THREE.format(before=FILL, mark="", arguments="", end=f"{once}    if first: {end}", after="")
    root = tiny_checkout.make(tmp_path, {"numerics/test_tiny": source}, IDS)
    common = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root)]
    assert cli.main([*common, "--out", str(root / "out"), "--", "-p", "harness.plugin", "--capture=sys"]) == exit_code
    text = capsys.readouterr().out
    described = json.loads((root / "out" / "run.json").read_text(encoding="utf-8"))
    assert [attempt["attempt"] for attempt in described["attempts"]] == list(range(1, attempts + 1))
    assert ("retried: numerics, attempt 1 ended with exit " in text) is (attempts == 2)
    assert (root / "out/logs/numerics.1.log").exists() is (attempts == 2)
    told = [element.text for element in ElementTree.parse(root / "out/junit.xml").getroot().iter("system-out")]
    kept = ["attempt 1: passed\nattempt 2: passed", "attempt 1: running\nattempt 2: passed"]
    assert told == (kept if attempts == 2 else [])


def test_a_machine_that_stays_ill(tmp_path: Path) -> None:
    """Each attempt meets the full disk: the last one is judged, and `--retries` bounds their number."""
    source = THREE.format(before=FILL, mark="", arguments="", end="fill_the_disk()", after="").replace(
        "def test_3", "def t"
    )
    root = tiny_checkout.make(tmp_path, {"numerics/test_tiny": source}, IDS[:2])
    common = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet", "--root", str(root), "--retries", "2"]
    assert cli.main([*common, "--out", str(root / "out"), "--", "-p", "harness.plugin"]) == 4
    assert sorted(path.name for path in (root / "out/logs").iterdir()) == [
        "numerics.1.log",
        "numerics.2.log",
        "numerics.log",
    ]
    assert cases(root / "out")["test_tiny::test_2_dies"].startswith("error DISK: ")


def test_a_test_that_needs_four_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The field's own example: skipped with its reason on a host with one GPU, run where there are four.

    A manifest that lists it turns the host with one red as MISSING, and the same rule written as `not rocm` is refused.
    """
    source = "import pytest\ndef test_plain(): pass\n@pytest.mark.requires(gpus=4)\ndef test_all_gather(): pass\n"
    needs_four = "numerics/test_tiny::test_all_gather"
    reason = "requires 4 gpus; this is mi300x with 1"
    root = tiny_checkout.make(tmp_path, {"numerics/test_tiny": source})
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(MI300X))
    assert run_on_mi300x(root) == 0
    assert f"- 1 x {reason}: {needs_four}" in capsys.readouterr().out
    assert cases(root / "out")["test_tiny::test_all_gather"] == f"skipped SKIP: {reason}"

    (root / "baselines/mi300x").mkdir()
    manifest.write(root / "baselines/mi300x/manifest.txt", [needs_four, "numerics/test_tiny::test_plain"])
    assert run_on_mi300x(root) == 3
    told = f"must run on mi300x and was skipped: {reason}"
    assert cases(root / "out")["test_tiny::test_all_gather"] == f"error MISSING: {told}"

    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: {**MI300X, "device_count": 4})
    monkeypatch.setattr("harness.plan._workers", lambda *_: 1)  # four workers of nothing would take a second each
    assert run_on_mi300x(root) == 0
    assert set(cases(root / "out").values()) == {""}

    waiver = {"id": needs_four, "reason": "no", "issue": "https://example.org/1", "owner": "me"}
    lines = [f'{key} = "{value}"' for key, value in waiver.items()]
    text = "\n".join(["[[waiver]]", *lines, f"expires = {datetime.date.today()}", ""])
    capsys.readouterr()
    for place in ('where = "not rocm"', 'platform = "not rocm"', 'where = "vendor:amd"'):
        (root / "baselines/waivers.toml").write_text(text + place + "\n", encoding="ascii")
        assert run_on_mi300x(root) == 2
        assert "a vendor; expected either a platform or a capability" in capsys.readouterr().err
