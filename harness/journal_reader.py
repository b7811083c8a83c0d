"""The journal as it is read: what it says about tests, processes and sessions, whatever ended its writers.

A test that starts again (a retried suite, a rerun plugin) begins a new attempt: `TestRecord` describes the last one and
keeps how the earlier ones ended in `earlier`, because outcomes that differ are a finding of their own (FLAKY).

Apart from journal.py because a test session writes and never reads, and pays for what it imports.

Not here: how events are written (journal.py), what an outcome means (gate.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from harness import files
from harness.errors import MissingError, UnreadableError
from harness.journal import Value

State = Literal["passed", "failed", "skipped", "running", "not-run"]

#: How a plugin that repeats failed tests (pytest-rerunfailures) reports an attempt it does not count.
RERUN = "rerun"
OUTCOMES = frozenset({"passed", "failed", "skipped", RERUN})


@dataclass
class Phase:
    """How one phase of a test ended."""

    phase: str
    outcome: str
    seconds: float
    message: str = ""
    detail: str = ""


@dataclass
class TestRecord:
    """What the journal says about one test: its last attempt, and how earlier ones ended."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    id: str
    suite: str
    started: bool = False
    ended: bool = False
    phases: list[Phase] = field(default_factory=list)
    properties: dict[str, Value] = field(default_factory=dict)
    worker: str = ""
    earlier: list[State] = field(default_factory=list)

    @property
    def state(self) -> State:
        """passed, failed, skipped; running when it had started and not ended; not-run when it never started.

        A failed phase counts at once; passed and skipped only when the teardown has ended too. A test whose call did
        not run (`--setup-only`, `--setup-plan`) passed nothing: it is not-run.
        """
        outcomes = {phase.outcome for phase in self.phases}
        if "failed" in outcomes:
            return "failed"
        if not self.started:
            return "not-run"
        if not self.ended:
            return "running"
        if "skipped" in outcomes:
            return "skipped"
        return "passed" if any(phase.phase == "call" for phase in self.phases) else "not-run"

    @property
    def seconds(self) -> float:
        """Set-up, call and teardown together."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def message(self) -> str:
        """One line: of the first phase that failed, else of the first that was skipped, else empty."""
        return self._telling().message

    @property
    def detail(self) -> str:
        """The traceback and captured output of the same phase as `message`."""
        return self._telling().detail

    @property
    def failed_phase(self) -> str:
        """`setup`, `call` or `teardown` for a failed test, else empty."""
        return next((phase.phase for phase in self.phases if phase.outcome == "failed"), "")

    def _telling(self) -> Phase:
        for outcome in ("failed", "skipped"):
            for phase in self.phases:
                if phase.outcome == outcome:
                    return phase
        return Phase("", "", 0.0)


@dataclass
class ProcessRecord:
    """One test process: how it was started and how it ended. `ended` is False when the harness itself died."""

    suite: str
    attempt: int
    argv: list[str]
    started: float = 0.0
    ended: bool = False
    rc: int | None = None
    signal: str | None = None
    killed_by: str | None = None
    seconds: float = 0.0
    oom: str | None = None
    """Meanwhile the kernel killed for memory: at the run's own `limit`, or on the `host`."""
    canary: str | None = None
    """After a suspected GPU fault: empty when a known-good kernel ran, what went wrong when it did not."""
    fault: str | None = None
    """What the container engine says of the end, where it says more than the exit code: the name of a verdict."""
    fault_message: str = ""


@dataclass(frozen=True)
class CrashRecord:
    """An xdist worker that died, and the test it was running (empty when it ran none)."""

    id: str
    worker: str
    signal: str | None
    message: str
    suite: str
    attempt: int = 1


@dataclass(frozen=True)
class CollectRecord:
    """A file that could not be collected (`collect-error`) or that skipped itself as a whole (`collect-skip`)."""

    suite: str
    path: str
    message: str
    detail: str = ""
    attempt: int = 1


@dataclass(frozen=True)
class SessionRecord:
    """One pytest session. `rc` is None when it did not reach its end."""

    suite: str
    run_id: str
    pid: int
    time: float
    rc: int | None = None
    stopped: str = ""
    """Why pytest itself ended it early, where it did: not an interrupt, whatever its exit code says."""


@dataclass
class Journal:
    """Everything a journal says."""

    tests: dict[str, TestRecord] = field(default_factory=dict)
    collected: dict[str, list[str]] = field(default_factory=dict)
    planned_skips: dict[str, str] = field(default_factory=dict)
    deselected: dict[str, int] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)
    """Suites of which nobody knows how many tests were deselected: their workers have not told it."""
    processes: list[ProcessRecord] = field(default_factory=list)
    crashes: list[CrashRecord] = field(default_factory=list)
    collect_errors: list[CollectRecord] = field(default_factory=list)
    collect_skips: list[CollectRecord] = field(default_factory=list)
    sessions: list[SessionRecord] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    """What could not be read, a sentence each: a cut line, an event that is unknown or lacks a field."""

    @property
    def run_ids(self) -> set[str]:
        """Run ids named by the sessions; more than one, or another than run.json's, means stale evidence."""
        return {session.run_id for session in self.sessions}

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a journal, whatever ended the run. MissingError when there is no such file; damage is listed."""
        journal = cls()
        for event in read_events(path, journal.damage):
            journal.apply(event)
        return journal

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event. An event that lacks a field it must have is noted as damage, an unknown kind too."""
        handler = _HANDLERS.get(str(event.get("event")))
        if handler is None:
            self.damage.append(f"unknown event {event.get('event')!r}")
            return
        try:
            handler(self, event)
        except (KeyError, TypeError, ValueError) as error:
            self.damage.append(f"event {event.get('event')!r} is malformed ({type(error).__name__}: {error})")

    def attempt(self, suite: str) -> int:
        """Which attempt of a suite is the last: 1 where it ran once, and where no process of it is known."""
        return max(1, sum(process.suite == suite for process in self.processes))

    def record(self, test_id: str) -> TestRecord:
        """The record of a test, made when there is none yet. TypeError when the id is no text."""
        if not isinstance(test_id, str):
            raise TypeError(f"id is {test_id!r}")
        known = self.tests.get(test_id)
        if known is None:
            known = self.tests[test_id] = TestRecord(test_id, test_id.partition("/")[0])
        return known

    def _session(self, event: Mapping[str, Any]) -> None:
        self.sessions.append(
            SessionRecord(event["suite"], str(event["run_id"]), int(event["pid"]), float(event.get("time", 0.0)))
        )

    def _collected(self, event: Mapping[str, Any]) -> None:
        ids = [str(test_id) for test_id in event["ids"]]
        self.collected[event["suite"]] = ids
        for test_id in ids:
            self.record(test_id)
        self.planned_skips.update(event.get("skips", {}))
        self._count(event["suite"], event.get("deselected", 0))

    def _count(self, suite: str, deselected: object) -> None:
        if deselected is None:
            self.deselected.pop(suite, None)
            self.uncounted.add(suite)
        else:
            self.deselected[suite] = int(str(deselected))
            self.uncounted.discard(suite)

    def _collect_error(self, event: Mapping[str, Any]) -> None:
        self.collect_errors.append(_collect_record(event, self.attempt(event["suite"])))

    def _collect_skip(self, event: Mapping[str, Any]) -> None:
        self.collect_skips.append(_collect_record(event, self.attempt(event["suite"])))

    def _start(self, event: Mapping[str, Any]) -> None:
        record = self.record(event["id"])
        if record.started:
            record.earlier.append(record.state)
            record.phases, record.properties, record.ended = [], {}, False
        record.started = True

    def _phase(self, event: Mapping[str, Any]) -> None:
        outcome, seconds = str(event["outcome"]), float(event["seconds"])
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome is {outcome!r}")
        if not math.isfinite(seconds):
            raise ValueError(f"seconds is {seconds}")
        ended = Phase(
            str(event["phase"]),
            outcome,
            seconds,
            str(event.get("message", "")),
            str(event.get("detail", "")),
        )
        record = self.record(event["id"])
        record.started = True
        record.worker = str(event.get("worker", ""))
        record.phases.append(ended)
        record.properties.update(event.get("properties", {}))
        if ended.outcome == RERUN:  # a failure that a plugin is about to try again, without another start event
            record.earlier.append("failed")
            record.phases, record.properties, record.ended = [], {}, False
            return
        record.ended = record.ended or ended.phase == "teardown"

    def _worker_crash(self, event: Mapping[str, Any]) -> None:
        test_id = str(event.get("id") or "")
        suite = str(event.get("suite") or test_id.partition("/")[0])
        self.crashes.append(
            CrashRecord(
                test_id,
                str(event.get("worker", "")),
                _text_or_none(event.get("signal")),
                str(event.get("message", "")),
                suite,
                self.attempt(suite),
            )
        )

    def _session_end(self, event: Mapping[str, Any]) -> None:
        for position in range(len(self.sessions) - 1, -1, -1):
            session = self.sessions[position]
            if session.suite == event["suite"] and session.rc is None:
                stopped = str(event.get("stopped") or "")
                self.sessions[position] = replace(session, rc=int(event["rc"]), stopped=stopped)
                if "deselected" in event:
                    self._count(session.suite, event["deselected"])
                return
        self.damage.append(f"the session of {event['suite']} ended without having begun")

    def _process_start(self, event: Mapping[str, Any]) -> None:
        if int(event["attempt"]) != 1 + sum(process.suite == event["suite"] for process in self.processes):
            self.damage.append(f"attempt {event['attempt']} of {event['suite']} does not follow the one before it")
        self.processes.append(
            ProcessRecord(
                event["suite"], int(event["attempt"]), list(event.get("argv", [])), float(event.get("time", 0.0))
            )
        )

    def _process_end(self, event: Mapping[str, Any]) -> None:
        for process in reversed(self.processes):
            if (process.suite, process.attempt) == (event["suite"], event["attempt"]):
                code = None if event["rc"] is None else int(event["rc"])
                process.seconds = float(event["seconds"])
                process.rc, process.signal = code, _text_or_none(event["signal"])
                process.killed_by = _text_or_none(event["killed_by"])
                process.oom = _text_or_none(event.get("oom"))
                process.fault = _text_or_none(event.get("fault"))
                process.fault_message = str(event.get("fault_message") or "")
                process.ended = True
                return
        self.damage.append(f"a process of {event['suite']} ended without having begun")

    def _canary(self, event: Mapping[str, Any]) -> None:
        for process in reversed(self.processes):
            if (process.suite, process.attempt) == (event["suite"], event["attempt"]):
                process.canary = str(event["message"])
                return
        self.damage.append(f"a canary of {event['suite']} without a process")


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _collect_record(event: Mapping[str, Any], attempt: int) -> CollectRecord:
    return CollectRecord(
        str(event["suite"]), str(event["path"]), str(event.get("message", "")), str(event.get("detail", "")), attempt
    )


_HANDLERS = {
    "session": Journal._session,
    "collected": Journal._collected,
    "collect-error": Journal._collect_error,
    "collect-skip": Journal._collect_skip,
    "start": Journal._start,
    "phase": Journal._phase,
    "worker-crash": Journal._worker_crash,
    "session-end": Journal._session_end,
    "process-start": Journal._process_start,
    "process-end": Journal._process_end,
    "canary": Journal._canary,
}


class JournalTail:
    """Reads along in a journal that is being written: each `read` gives the events that are whole by now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """New events since the last call; none while the file does not exist. What is no event is passed over."""
        try:
            with files.open_regular(self._path) as stream:
                stream.seek(self._position)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := decode_line(line)) is not None]


def decode_line(line: bytes) -> dict[str, Any] | None:
    """One line -> its event, None when it is none (cut, or not an object)."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def read_events(path: Path, damage: list[str]) -> Iterator[dict[str, Any]]:
    """The events of a journal in order; what cannot be read is described in `damage` and passed over."""
    try:
        stream = files.open_regular(path)
    except FileNotFoundError:
        raise MissingError(
            f"{path} does not exist", "the journal that every run writes", "name a folder that `fp8ci run` has written"
        ) from None
    except OSError as error:
        raise UnreadableError(
            f"{path} cannot be read ({error.strerror})", "the journal that every run writes", "run again"
        ) from None
    with stream:
        for number, line in enumerate(stream, start=1):
            event = decode_line(line)
            if event is not None:
                yield event
            elif not line.endswith(b"\n"):
                damage.append(
                    f"line {number} is cut after {len(line)} bytes: its writer was killed or the disk was full"
                )
            elif line.strip():
                damage.append(f"line {number} is not an event")
