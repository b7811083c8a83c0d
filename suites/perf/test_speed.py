"""Speed: one row a test. Samples come from fresh processes, the verdict from the gate (harness/speed.py).

The session launches `suites.perf.launch` for all of its rows at once, FP8CI_LAUNCHES times (default 3), in turns with
the same on the base of a comparison where FP8CI_AGAINST names a checkout; rows that the first stage suspects are
launched as often again. Everything is compiled before, side by side. With FP8CI_PERF_SECONDS no launch beyond the least
three begins so many seconds after the session did. Counts and compile times have three launches at most: more are there
for the noise of a time. A test then writes its samples into the evidence, and into pytest-benchmark's storage and table
through a timer that replays them. It asserts nothing about time: whether a row is slower is the gate's to say.

Not here: what a row is (rows.py), one launch (launch.py), its process (processes.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fp8stack import device
from harness import samples, speed, speedgate
from harness.samples import Launch, PerfRun, Samples
from suites.conftest import ROOT, Evidence
from suites.perf import processes, rows

LAUNCHES_VARIABLE = "FP8CI_LAUNCHES"
AGAINST_VARIABLE = "FP8CI_AGAINST"
COMMIT_VARIABLE = "FP8CI_AGAINST_COMMIT"
SECONDS_VARIABLE = "FP8CI_PERF_SECONDS"

FORMAT = device.detect().arch.e4m3
ROWS = rows.rows(FORMAT)
TRAINERS = rows.trainers(FORMAT)
OF_OPS = rows.first_of_each_op(FORMAT)
TIMED = ("time", "trainer")
Record = Callable[[str, object], None]

pytestmark = pytest.mark.requires(gpus=1)


class Replay:
    """A timer for pytest-benchmark that returns times measured elsewhere: a round's duration is the next sample."""

    def __init__(self) -> None:
        self._left: Iterator[float] = iter(())
        self._now = 0.0
        self._running = False

    def load(self, ns: Sequence[float]) -> None:
        self._left, self._now, self._running = iter(ns), 0.0, False

    def __call__(self) -> float:
        if self._running:
            self._now += next(self._left) * 1e-9
        self._running = not self._running
        return self._now


replay = Replay()


@dataclass
class Launched:
    """The launches of a session, made when the first test asks, for all of its rows of one kind."""

    cases: dict[str, list[str]]
    recorded: Callable[[str], Sequence[PerfRun]]
    done: dict[str, dict[str, list[Launch]]] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    resolution_ns: float = 0.0
    until: float = field(default_factory=lambda: time.monotonic() + float(os.environ.get(SECONDS_VARIABLE, "inf")))
    prepare: Callable[..., str] = field(default_factory=lambda: processes.prepare)
    start: Callable[..., dict[str, Any]] = field(default_factory=lambda: processes.launch_once)
    note: Callable[[str, str], object] = lambda name, text: None
    """Writes into the evidence: what a session that is cut off has measured until then."""
    prepared: str = ""
    """What could not be compiled; the launches of those rows say it again, if they come so far."""

    def of(self, kind: str, row: rows.Row) -> Samples:
        if kind not in self.done:
            self._launch(kind)
        problem = self.errors.get((kind, row.case))
        assert problem is None, f"{row.case} was not measured: {problem}"
        return self.samples(kind, row)

    def samples(self, kind: str, row: rows.Row) -> Samples:
        return rows.samples(
            row, "time" if kind in TIMED else kind, self.done.get(kind, {}).get(row.case, []), self.resolution_ns
        )

    def _suspected(self, kind: str, row: rows.Row) -> bool:
        """By the recorded runs that the gate will hold beside it: counts, compile times and other configurations of a
        row have the same case.
        """
        now = self.samples(kind, row)
        mine = speedgate.identity(now)
        return speed.suspected(now, [run for run in self.recorded(row.case) if speedgate.identity(run.samples) == mine])

    def _launch(self, kind: str) -> None:
        self.done[kind] = {}
        count = int(os.environ.get(LAUNCHES_VARIABLE, speed.LEAST_LAUNCHES))
        if kind not in TIMED:  # more are there for the noise of a time
            count = min(count, speed.LEAST_LAUNCHES)
        if kind in TIMED:  # counts need a warm call, and make one themselves
            for tree in dict.fromkeys([None, os.environ.get(AGAINST_VARIABLE)]):
                told = self.prepare(self.cases[kind], tree)
                if told:
                    self.prepared += f"{kind}, {'base' if tree else 'candidate'}:\n{told}\n"
                    self.note("launches/prepare.txt", self.prepared)
        self._stage(kind, self.cases[kind], 1, count)
        if kind in TIMED:
            by_case = rows.by_case(FORMAT)
            known = [case for case in self.cases[kind] if case in self.done[kind] and (kind, case) not in self.errors]
            again = [case for case in known if self._suspected(kind, by_case[case])]
            if again:
                self._stage(kind, again, 2, count)

    def _stage(self, kind: str, cases: Sequence[str], stage: int, count: int) -> None:
        base = os.environ.get(AGAINST_VARIABLE)
        sides: list[tuple[str, str | None]] = [("candidate", None), *([("base", base)] if base else [])]
        for number in range(1, count + 1):
            if number > speed.LEAST_LAUNCHES and time.monotonic() > self.until:
                break
            for side, tree in sides if number % 2 else reversed(sides):
                document = self.start("time" if kind in TIMED else kind, cases, tree)
                self.resolution_ns = float(document.get("resolution_ns", 0.0))
                for case, message in document["errors"].items():
                    self.errors[kind, case] = f"{side}, launch {number}: {message}"
                told: dict[str, Any] = {"number": number, "stage": stage, "side": side}
                if side == "base":
                    told["commit"] = os.environ.get(COMMIT_VARIABLE, "")
                for case, fields in document["rows"].items():
                    one = msgspec.convert({**fields, **told}, Launch)
                    self.done[kind].setdefault(case, []).append(one)
                self.note(f"launches/{kind}.json", json.dumps(msgspec.to_builtins(self.done[kind])))
                if not document["rows"]:  # nor would the next one: its rows are red already
                    return


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest) -> Launched:
    """The launches of this session's rows."""
    cases: dict[str, list[str]] = {"time": [], "trainer": [], "counts": [], "compile": []}
    for item in request.session.items:
        row = getattr(item, "callspec", None)
        kind = getattr(item, "originalname", "").removeprefix("test_")
        if row is not None and kind in cases:
            cases[kind].append(row.params["row"].case)
    platform = request.config.getoption("fp8_platform", default=None)
    path = ROOT / "baselines" / str(platform) / samples.PERF_FILE
    recorded = samples.load(path, platform).rows if platform and path.exists() else []
    out = request.config.getoption("fp8_out", default=None)
    note = Evidence(Path(out)).write_text if out else lambda name, text: None
    return Launched(cases, lambda case: [run for run in recorded if run.samples.case == case], note=note)


def keep(measured: Samples, evidence: Evidence, record_property: Record, kind: str) -> None:
    """Into the evidence, where the gate finds it."""
    name = f"samples/{kind}-{measured.case}.json"
    record_property("samples_file", evidence.write_json(name, msgspec.to_builtins(measured)))
    record_property("op", measured.op)
    record_property("format", str(measured.format))
    record_property("arch", measured.arch)
    record_property("launches", len(measured.of("candidate")))


def take(kind: str, row: rows.Row, launched: Launched, evidence: Evidence, record: Record, benchmark: Any) -> None:
    """A timed row into the evidence, and into pytest-benchmark's storage."""
    measured = launched.of(kind, row)
    keep(measured, evidence, record, "time")
    mine = measured.of("candidate")
    ns = [value for one in mine for value in one.candidate]
    replay.load(ns)
    benchmark.extra_info.update({"case": row.case, "launches": len(mine), "unit": "a call on the device"})
    benchmark.pedantic(lambda: None, rounds=len(ns), iterations=1)


@pytest.mark.benchmark(timer=replay, warmup=False)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in ROWS])
def test_time(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record, benchmark: Any) -> None:
    """The row's time, beside its reference and its probe."""
    take("time", row, launched, evidence, record_property, benchmark)


@pytest.mark.requires(memory_gib=100)
@pytest.mark.benchmark(timer=replay, warmup=False)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in TRAINERS])
def test_trainer(
    row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record, benchmark: Any
) -> None:
    """A training step from end to end, in launches of its own."""
    take("trainer", row, launched, evidence, record_property, benchmark)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in OF_OPS])
def test_counts(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record) -> None:
    """Kernels that a call launches, and host synchronisations, of which there may be none."""
    keep(launched.of("counts", row), evidence, record_property, "counts")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in OF_OPS])
def test_compile(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record) -> None:
    """Seconds from empty caches to the first result."""
    keep(launched.of("compile", row), evidence, record_property, "compile")
