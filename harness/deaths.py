"""How the processes of a run ended, and what that says about the tests: KILLED, CRASH, TIMEOUT, DISAGREE, MISSING.

A test process that dies leaves no report of its own; its exit code alone is ambiguous (137 is a memory limit, an
operator or our own deadline; 0 may be a test's os._exit(0); 5 is "nothing collected" and also "every module skipped
itself"). So the verdict comes from what agrees: our own kill record, the signal, the journal to its last line, the log.

    killed by our deadline                                  TIMEOUT      the running test
    stopped by Ctrl-C or the CI                             INTERRUPTED  the running test
    SIGKILL while the kernel's OOM killer struck            OOM          the running test, at the run's own limit
                                                            HOST_OOM     the running test, elsewhere on the host
    a signal that only somebody else sends (KILL, TERM)     KILLED       the running test
    any other signal, or an exit without a session end      CRASH        the running test
    an exit that a time limit of pytest's announces         TIMEOUT      the running test
    any of these, after which a known-good kernel fails     GPU_HANG     the running test
    what the container engine says of it                    OOM, PIDS .. the running test
    an xdist worker that died                               KILLED or CRASH, by its signal, the test it ran
    exit code, session and outcomes that contradict         DISAGREE     the suite
    nothing collected                                       MISSING      the suite

    our own write met a full disk, by the exit code         DISK         the running test
    a failure, after which pytest was to stop (--maxfail)   FAIL         that test; the rest did not run

Tests that never started because of it are MISSING with the words `not run`. A test may print anything, so what the log
says of a machine at fault counts only together with the signal that belongs to it.

Not here: whether an id had to run (manifest, gate.py).
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import files
from harness.errors import MACHINE, VERDICTS, Verdict
from harness.journal import (
    DISK_FULL_EXIT,
    PYTEST_INTERNAL,
    PYTEST_INTERRUPTED,
    PYTEST_NOTHING,
    PYTEST_USAGE,
)
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal_reader import Journal, ProcessRecord, SessionRecord, TestRecord
from harness.result import Result

#: Lines of logs/<suite>.log that a dead test's report carries.
LOG_LINES = 200

#: Signals that a process does not send itself by crashing: somebody else ended it.
FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"})

#: killed_by of a process-end event -> verdict.
KILLED_BY = {"deadline": Verdict.TIMEOUT, "interrupt": Verdict.INTERRUPTED}

#: oom of a process-end event -> verdict of what SIGKILL ended meanwhile, and the words for it.
OOM_KILLED = {
    "limit": (Verdict.OOM, "the run is at its own memory limit"),
    "host": (Verdict.HOST_OOM, "the host is out of memory"),
}

#: What the log of a process that a signal ended says when the machine is at fault. Text alone accuses no machine.
SIGNATURES: tuple[tuple[str, str, Verdict], ...] = (("Bus error: nonexistent physical address", "SIGBUS", Verdict.SHM),)

#: What pytest-timeout (method `thread`) and pytest's faulthandler_exit_on_timeout print before they end the process.
WATCHDOGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^\++ Timeout \++$", re.MULTILINE), "pytest-timeout"),
    (re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!$", re.MULTILINE), "faulthandler_timeout"),
)

#: How the message of a test begins that pytest-timeout (method `signal`) has failed.
TIMED_OUT = re.compile(r"Timeout \(>[\d.]+s\) from pytest-timeout")

#: How pytest's log begins when a conftest.py raised, which it tells with the exit code of a wrong argument.
CONFTEST = "ImportError while loading conftest"


@dataclass(frozen=True)
class Death:
    """How a suite's process ended before its time."""

    verdict: Verdict
    message: str
    """One line; goes behind `not run:` of the tests that never started."""


def log_tail(evidence: Path, suite: str, lines: int = LOG_LINES) -> str:
    """The last lines of the suite's log; a note where there is none."""
    path = evidence / "logs" / f"{suite}.log"
    try:
        text = files.tail(path, 256 * lines).decode("utf-8", "replace")
    except OSError as error:
        return f"(logs/{suite}.log cannot be read: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:])


def signal_of(process: ProcessRecord) -> str | None:
    """Name of the signal that ended the process, also where a shell in between turned it into 128 + n."""
    if process.signal:
        return process.signal if process.signal.startswith("SIG") else f"SIG{process.signal}"
    code = process.rc if process.rc is not None else 0
    number = -code if code < 0 else code - 128 if code > 128 else 0
    return signals.Signals(number).name if number in {member.value for member in signals.Signals} else None


def watchdog(log: str) -> str | None:
    """Which time limit the log says has ended a process by an exit, or None."""
    return next((name for pattern, name in WATCHDOGS if pattern.search(log)), None)


def death_of(process: ProcessRecord, session: SessionRecord | None, log: str) -> Death | None:
    """How this process died, or None where its session came to its end."""
    ended = f"after {process.seconds:.1f} s"
    if not process.ended:
        return Death(Verdict.KILLED, "the harness ended before the test process did")
    if process.canary:
        what = f"the test process died {ended}, and a known-good kernel fails"
        return Death(Verdict.GPU_HANG, f"{what}: {process.canary}")
    if process.killed_by in KILLED_BY:
        how = "did not end within its deadline and was stopped" if process.killed_by == "deadline" else "was stopped"
        return Death(KILLED_BY[process.killed_by], f"the test process {how} {ended}")
    if process.killed_by is not None:
        return Death(Verdict.KILLED, f"the test process was stopped by the harness ({process.killed_by}) {ended}")
    fault = fault_of(process)
    if fault is not None:
        return fault
    name = signal_of(process)
    if process.rc != DISK_FULL_EXIT and name is None and session is not None and session.rc is not None:
        return None
    if process.rc == DISK_FULL_EXIT:
        return Death(Verdict.DISK, f"the test process ended {ended}: No space left on device for its journal")
    for signature, needed, verdict in SIGNATURES:
        if name == needed and signature in log:
            return Death(verdict, f"the test process died of {name} {ended}; its log says `{signature}`")
    if name == "SIGKILL" and process.oom in OOM_KILLED:
        verdict, whose = OOM_KILLED[process.oom]
        return Death(verdict, f"the test process was killed {ended} by the kernel: {whose}")
    if name in FROM_OUTSIDE:
        return Death(Verdict.KILLED, f"the test process was killed from outside by {name} {ended}")
    if name is not None:
        return Death(Verdict.CRASH, f"the test process died of {name} {ended}")
    if session is None and process.rc == PYTEST_USAGE and CONFTEST in log:
        lines = log[log.index(CONFTEST) :].splitlines()
        said = next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), "see its log")
        return Death(Verdict.FAIL, f"{lines[0].removesuffix('.').rstrip(':')}: {said}")
    if session is None and process.rc == PYTEST_USAGE:
        return Death(Verdict.USAGE, f"pytest refused its arguments: {_refusal(log)}")
    limit = watchdog(log) if process.rc == 1 else None
    if limit is not None:
        return Death(Verdict.TIMEOUT, f"the test process was ended {ended} by its time limit ({limit})")
    if session is None:
        return Death(Verdict.CRASH, f"the test process exited with {process.rc} {ended} before its session began")
    return Death(Verdict.CRASH, f"the test process exited with {process.rc} {ended} before its session had ended")


def fault_of(process: ProcessRecord | None) -> Death | None:
    """What the container engine said of this end, or None. A name that is no verdict is contradicting evidence."""
    if process is None or process.fault is None:
        return None
    known = Verdict(process.fault) if process.fault in Verdict.__members__ else Verdict.DISAGREE
    return Death(known, process.fault_message or f"the engine says {process.fault}")


def _refusal(log: str) -> str:
    """What pytest said when it ended with the exit code of a wrong argument."""
    lines = [line for line in log.splitlines() if line.startswith("ERROR: ") or "pytest: error: " in line]
    return lines[-1].rpartition("pytest: error: ")[2].removeprefix("ERROR: ") if lines else "see its log"


def last_of(journal: Journal, suite: str) -> tuple[ProcessRecord | None, SessionRecord | None]:
    """The last attempt of a suite: its process, and its pytest session if that one began."""
    processes = [process for process in journal.processes if process.suite == suite]
    sessions = [session for session in journal.sessions if session.suite == suite]
    if not processes:
        return None, sessions[-1] if sessions else None
    process = processes[-1]
    # A session belongs to the attempt that started before it; an attempt that died early has none.
    if sessions and (len(sessions) >= len(processes) or not process.started or sessions[-1].time >= process.started):
        return process, sessions[-1]
    return process, None


def of_suite(journal: Journal, suite: str, evidence: Path) -> Death | None:
    """How the last process of a suite died; None where it did not, or never started."""
    process, session = last_of(journal, suite)
    return death_of(process, session, log_tail(evidence, suite)) if process is not None else None


def stop_of(journal: Journal, suite: str, session: SessionRecord) -> Death | None:
    """What a session with the exit code of an interrupt left undone, and why; None for any other exit code.

    pytest-xdist ends it so after `--maxfail` failures. Where nothing had failed it is an interrupt, whoever caused it.
    """
    if session.rc != PYTEST_INTERRUPTED:
        return None
    if _stopped(journal, suite, session):
        return Death(Verdict.MISSING, f"pytest stopped early ({session.stopped})")
    return Death(Verdict.INTERRUPTED, "pytest was interrupted")


def _stopped(journal: Journal, suite: str, session: SessionRecord) -> bool:
    """Whether pytest itself ended a session early, and something is red for it."""
    failed = any(record.suite == suite and record.state == "failed" for record in journal.tests.values())
    return bool(session.stopped) and (failed or any(crash.suite == suite and crash.id for crash in journal.crashes))


def machine_failed(evidence: Path, suite: str) -> bool:
    """Whether the machine, and not a test, ended the last attempt of a suite: the only thing that may be retried."""
    journal = Journal.read(evidence / JOURNAL_FILE)
    death = of_suite(journal, suite, evidence)
    crashed = crashed_tests(journal, suite, log_tail(evidence, suite)).values()
    return any(VERDICTS[found.verdict].exit_code == MACHINE for found in (*crashed, *([death] if death else [])))


def suite_result(suite: str, what: str, verdict: Verdict, message: str, detail: str = "") -> Result:
    """A result about a suite as a whole; its id is `<suite>/suite::<what>`."""
    return Result(f"{suite}/suite::{what}", suite, verdict, message, detail)


def crashed_tests(journal: Journal, suite: str, log: str) -> dict[str, Death]:
    """Test id -> how its xdist worker died."""
    crashed: dict[str, Death] = {}
    process, _ = last_of(journal, suite)
    for crash in journal.crashes:
        if crash.suite != suite or not crash.id or crash.attempt != journal.attempt(suite):
            continue
        verdict, how = _worker_end(crash.signal)
        seen = (infra for text, needed, infra in SIGNATURES if crash.signal == needed and text in log)
        verdict = next(seen, verdict)
        if process is not None and process.oom in OOM_KILLED and crash.signal == "SIGKILL":
            verdict, whose = OOM_KILLED[process.oom]
            how = f"was killed by the kernel, {whose},"
        fault = fault_of(process)
        if fault is not None:
            verdict, how = fault.verdict, f"{how} ({fault.message})"
        if crash.signal is None and watchdog(log):
            verdict, how = Verdict.TIMEOUT, f"was ended by its time limit ({watchdog(log)})"
        if process is not None and process.canary:
            verdict, how = Verdict.GPU_HANG, f"{how}, and a known-good kernel fails ({process.canary}),"
        crashed[crash.id] = Death(verdict, f"worker {crash.worker} {how} while it ran this test")
    return crashed


def _worker_end(signal: str | None) -> tuple[Verdict, str]:
    """What the signal that ended an xdist worker says, and the words for it."""
    name = signal if not signal or signal.startswith("SIG") else f"SIG{signal}"
    return (Verdict.KILLED if name in FROM_OUTSIDE else Verdict.CRASH), f"died of {name}" if name else "died"


def findings(journal: Journal, suite: str, evidence: Path, case: str | None = None) -> Iterator[Result]:
    """Suite-level findings: never started, died between tests, collected nothing, collection errors, contradictions.

    `case` is the run's --case: a suite of which it selects nothing is no finding (the manifest says what it should have
    selected, and an error of the whole run when no suite has such a case).
    """
    process, session = last_of(journal, suite)
    records = [record for record in journal.tests.values() if record.suite == suite]
    last = journal.attempt(suite)
    errors = [error for error in journal.collect_errors if (error.suite, error.attempt) == (suite, last)]
    log = log_tail(evidence, suite)
    for error in errors:
        module = Path(error.path).stem
        message = f"{error.path} cannot be collected: {error.message}"
        yield Result(f"{suite}/{module}::collection", suite, Verdict.FAIL, message, error.detail)
    if process is None:
        yield suite_result(suite, "process", Verdict.MISSING, "the suite was selected and its process never started")
        return
    death = death_of(process, session, log)
    if death is not None:
        if not any(record.state == "running" for record in records):
            yield suite_result(suite, "process", death.verdict, f"{death.message}, with no test running", log)
        return
    assert session is not None
    for crash in journal.crashes:
        if (crash.suite, crash.attempt) == (suite, last) and not crash.id:
            verdict, how = _worker_end(crash.signal)
            what = f"worker {crash.worker} {how} while it ran no test: {crash.message}"
            yield suite_result(suite, f"worker-{crash.worker}", verdict, what, log)
    for skip in journal.collect_skips:
        if (skip.suite, skip.attempt) == (suite, last) and records:
            message = f"{skip.path} skipped itself as a whole: {skip.message}"
            yield Result(f"{suite}/{Path(skip.path).stem}::collection", suite, Verdict.SKIP, message)
    if session.rc == PYTEST_INTERNAL:
        yield suite_result(suite, "process", Verdict.DISAGREE, "pytest ended with an internal error (exit 3)", log)
    elif not records and not errors and not (case is not None and journal.deselected.get(suite)):
        yield suite_result(suite, "collection", Verdict.MISSING, _why_nothing(journal, suite, session), log)
    yield from _contradictions(journal, suite, process, session, records, bool(errors), log)


def _why_nothing(journal: Journal, suite: str, session: SessionRecord) -> str:
    skipped = [skip for skip in journal.collect_skips if skip.suite == suite]
    if skipped:
        return f"the suite collected nothing: {len(skipped)} modules skipped themselves, {skipped[0].message}"
    deselected = journal.deselected.get(suite, 0)
    if deselected:
        return f"the suite selected nothing: all {deselected} tests were deselected"
    return f"the suite collected nothing (pytest's exit code {session.rc})"


def _contradictions(
    journal: Journal,
    suite: str,
    process: ProcessRecord,
    session: SessionRecord,
    records: list[TestRecord],
    collect_errors: bool,
    log: str,
) -> Iterator[Result]:
    red = [record.id for record in records if record.state == "failed"]
    last = journal.attempt(suite)
    crashed = [crash for crash in journal.crashes if (crash.suite, crash.attempt) in (("", last), (suite, last))]
    told = f"exit code {process.rc}, session {session.rc}, {len(red)} failed tests in the journal"
    if process.rc != session.rc:
        yield suite_result(suite, "agreement", Verdict.DISAGREE, f"the process changed its exit code late: {told}", log)
    elif process.rc == 0 and (red or collect_errors):
        yield suite_result(suite, "agreement", Verdict.DISAGREE, f"exit code 0 with failures: {told}", log)
    elif process.rc == 1 and not (red or collect_errors or crashed):
        yield suite_result(suite, "agreement", Verdict.DISAGREE, f"exit code 1 without a failure: {told}", log)
    elif process.rc == PYTEST_INTERRUPTED and not collect_errors and not _stopped(journal, suite, session):
        yield suite_result(suite, "agreement", Verdict.INTERRUPTED, f"pytest was interrupted: {told}", log)
    elif process.rc == PYTEST_USAGE and f"not found: suites/{suite}\n" not in f"{log}\n":  # a suite that is gone
        what = f"pytest refused its arguments: {_refusal(log)}"
        yield suite_result(suite, "arguments", Verdict.USAGE, what, log)
    elif process.rc not in (0, 1, PYTEST_INTERRUPTED, PYTEST_INTERNAL, PYTEST_USAGE, PYTEST_NOTHING):
        yield suite_result(suite, "agreement", Verdict.DISAGREE, f"an exit code that pytest does not have: {told}", log)
    elif process.rc == PYTEST_NOTHING and records:
        yield suite_result(suite, "agreement", Verdict.DISAGREE, f"`nothing ran`, after tests had run: {told}", log)
