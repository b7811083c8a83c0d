"""How a run is going, on stderr: a live display on a terminal, plain lines everywhere else.

Both read along in the journal, so they show what has been recorded and nothing else, whatever executor runs the tests.
Plain lines are one a finished test, and a heartbeat after 30 s of silence that names the running test: a CI log that
stands still for minutes is taken for a hung machine, and often is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TextIO

from harness.journal import PYTEST_NOTHING
from harness.journal_reader import JournalTail
from harness.plan import Lanes

HEARTBEAT = 30.0
"""Seconds of silence after which plain output says what it is waiting for."""


class Progress(Protocol):
    """Shows a run. `update` is called a few times a second, `close` once."""

    def update(self) -> None:
        """Read the journal on and show what is new."""
        ...

    def close(self) -> None:
        """Show the rest."""
        ...


class Silent:
    """Shows nothing."""

    def update(self) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to show."""


@dataclass
class Counts:
    """Where one suite stands."""

    start_seconds: float
    seconds_a_test: float
    total: int | None = None
    done: int = 0
    failed: int = 0
    skipped: int = 0
    began: float | None = None
    ended: float | None = None
    running: dict[str, float] = field(default_factory=dict)

    def elapsed(self, now: float) -> float:
        """Seconds since the suite began, or that it took."""
        return 0.0 if self.began is None else (self.ended or now) - self.began

    def expected(self, now: float) -> float | None:
        """Seconds from the suite's begin to its end: the table's estimate first, then what the pace so far says."""
        if self.total is None:
            return None
        if self.done < max(5, self.total // 10):
            return self.start_seconds + self.total * self.seconds_a_test
        return self.elapsed(now) * self.total / self.done

    def doing(self) -> str:
        """What the suite is at, in a word or by the id of the test that runs."""
        if self.began is None:
            return "waiting"
        if self.ended is not None:
            return "done"
        if self.running:
            return next(iter(self.running)).partition("/")[2]
        return "starting" if not self.done else "ending" if self.done == self.total else "between tests"


class Finished(NamedTuple):
    """A test that has ended; `place` is where in its suite it came, such as `12/200`."""

    id: str
    outcome: str
    seconds: float
    message: str
    place: str


class Watcher:
    """Follows a journal and keeps each suite's counts; `finished` holds the tests that ended since the last look."""

    def __init__(self, tail: JournalTail, lanes: Lanes) -> None:
        self._tail = tail
        self._phases: dict[str, list[Mapping[str, Any]]] = {}
        self.counts = {job.suite: Counts(job.start_seconds, job.seconds_a_test) for lane in lanes for job in lane}
        self.started = time.monotonic()
        self.finished: list[Finished] = []
        self.notes: list[str] = []

    def look(self) -> None:
        """Take in what the journal has gained."""
        self.finished, self.notes = [], []
        for event in self._tail.read():
            counts = self.counts.get(str(event.get("suite")))
            if counts is not None:
                self._take(event, counts)

    def _take(self, event: Mapping[str, Any], counts: Counts) -> None:
        now = time.monotonic()
        match event["event"]:
            case "process-start":
                counts.began = now
            case "process-end":
                counts.ended = now
                counts.running.clear()
                how = event["signal"] or f"exit {event['rc']}"
                how += " (pytest had no test to run)" if event["rc"] == PYTEST_NOTHING else ""
                ours = f", ended by us ({event['killed_by']})" if event["killed_by"] else ""
                self.notes.append(f"{event['suite']} ended: {how}{ours}, {event['seconds']:.1f} s")
            case "collected":
                counts.total = len(event["ids"])
            case "collect-error":
                self.notes.append(f"{event['path']} could not be collected: {event['message']}")
            case "start":
                counts.running[event["id"]] = now
                self._phases[event["id"]] = []
            case "worker-crash":
                self._ended(counts, event["id"], "crashed", 0.0, f"{event['signal'] or 'its process ended'}")
            case "phase":
                self._phases.setdefault(event["id"], []).append(event)
                if event["phase"] == "teardown":
                    self._judge(counts, event["id"])

    def _judge(self, counts: Counts, test_id: str) -> None:
        phases = self._phases.pop(test_id)
        for outcome in ("failed", "skipped", "passed"):
            told = next((phase for phase in phases if phase["outcome"] == outcome), None)
            if told is not None:
                seconds = sum(float(phase["seconds"]) for phase in phases)
                self._ended(counts, test_id, outcome, seconds, str(told.get("message", "")))
                return

    def _ended(self, counts: Counts, test_id: str, outcome: str, seconds: float, message: str) -> None:
        counts.running.pop(test_id, None)
        counts.done += 1
        counts.failed += outcome in ("failed", "crashed")
        counts.skipped += outcome == "skipped"
        self.finished.append(Finished(test_id, outcome, seconds, message, f"{counts.done}/{counts.total or '?'}"))

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started


class Plain:
    """One line a finished test, a heartbeat when there is none for a while."""

    def __init__(self, watcher: Watcher, stream: TextIO, heartbeat: float = HEARTBEAT) -> None:
        self._watcher = watcher
        self._stream = stream
        self._heartbeat = heartbeat
        self._spoke = time.monotonic()

    def update(self) -> None:
        """Print what ended since the last call."""
        self._watcher.look()
        for test in self._watcher.finished:
            told = f": {test.message}" if test.message else ""
            self._say(f"[{test.place}] {test.outcome:7} {test.seconds:7.2f} s  {test.id}{told}")
        for note in self._watcher.notes:
            self._say(note)
        if time.monotonic() - self._spoke >= self._heartbeat:
            self._say(f"... {self._waiting()}")

    def _waiting(self) -> str:
        now = time.monotonic()
        parts = []
        for suite, counts in self._watcher.counts.items():
            if counts.began is None or counts.ended is not None:
                continue
            tests = ", ".join(f"{test_id} for {now - since:.0f} s" for test_id, since in counts.running.items())
            parts.append(f"{suite} {counts.done} of {counts.total or '?'}, in {tests or 'no test'}")
        return f"{self._watcher.elapsed:.0f} s: {'; '.join(parts) or 'starting'}"

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
        self._spoke = time.monotonic()

    def close(self) -> None:
        """Print the rest."""
        self.update()


class Live:
    """One row a suite: bar, counts, elapsed and expected time, running test; failures scroll by above."""

    def __init__(self, watcher: Watcher) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._watcher = watcher
        self._console = Console(stderr=True, highlight=False)
        self._live = RichLive(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def update(self) -> None:
        """Redraw."""
        from rich.text import Text

        self._watcher.look()
        for test in self._watcher.finished:
            if test.outcome in ("failed", "crashed"):
                self._console.print(Text(f"{test.outcome}  {test.id}: {test.message}", style="red"))
        for note in self._watcher.notes:
            self._console.print(Text(note))
        self._live.update(self._table())

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        table = Table.grid(padding=(0, 1))
        for suite, counts in self._watcher.counts.items():
            elapsed = counts.elapsed(now)
            expected = None if counts.ended is not None else counts.expected(now)
            about = "" if expected is None else f" of about {max(elapsed, expected):.0f}"
            red = f", {counts.failed} red" if counts.failed else ""
            table.add_row(
                Text(suite, style="bold"),
                ProgressBar(total=counts.total or 1, completed=counts.done, width=24),
                Text(f"{counts.done}/{counts.total or '?'}{red}", style="red" if red else ""),
                Text(f"{elapsed:.0f}{about} s"),
                Text(counts.doing(), overflow="ellipsis", no_wrap=True),
            )
        return table

    def close(self) -> None:
        """Print the rest and take the display away."""
        self.update()
        self._live.stop()


def choose(tail: JournalTail, lanes: Lanes, wanted: bool, stream: TextIO | None = None) -> Progress:
    """The display for this stderr: none when not wanted (or stderr is closed), live on a terminal, else plain lines."""
    out = stream or sys.stderr
    if not wanted or out is None:
        return Silent()
    watcher = Watcher(tail, lanes)
    if stream is None and out.isatty():
        return Live(watcher)
    return Plain(watcher, out)
