"""Speed: one row a test. Samples come from fresh processes, the verdict from the gate (harness/speed.py).

The session launches `suites.perf.launch` for all of its rows at once, FP8CI_LAUNCHES times (default 3), in turns with
the same on the base of a comparison where FP8CI_AGAINST names a checkout; rows that the first stage suspects are
launched as often again. A test then writes its samples into the evidence, and into pytest-benchmark's storage and table
through a timer that replays them. It asserts nothing about time: whether a row is slower is the gate's to say.

Not here: what a row is (rows.py), one launch (launch.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fp8stack import device
from harness import samples, speed
from harness.samples import Launch, PerfRun, Samples
from suites.conftest import ROOT, Evidence
from suites.perf import rows

LAUNCHES_VARIABLE = "FP8CI_LAUNCHES"
AGAINST_VARIABLE = "FP8CI_AGAINST"
COMMIT_VARIABLE = "FP8CI_AGAINST_COMMIT"
DEADLINE = 1800.0

FORMAT = device.detect().arch.e4m3
ROWS = rows.rows(FORMAT)
OF_OPS = rows.first_of_each_op(FORMAT)
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
    start: Callable[..., dict[str, Any]] = field(default_factory=lambda: launch_once)

    def of(self, kind: str, row: rows.Row) -> Samples:
        if kind not in self.done:
            self._launch(kind)
        problem = self.errors.get((kind, row.case))
        assert problem is None, f"{row.case} was not measured: {problem}"
        return self.samples(kind, row)

    def samples(self, kind: str, row: rows.Row) -> Samples:
        copy = rows.timing.COPY_BYTES * 2
        work = {"": 0, "copy": copy}.get(row.probe, 2 * rows.PROBE_SIZE**3)
        timed = kind == "time"
        return Samples(
            kind=kind,
            case=row.case,
            op=row.op,
            format=row.format,
            arch=device.detect().arch.name,
            config=dict(row.config),
            work=row.work if timed else 0,
            probe=row.probe if timed else "",
            probe_work=work if timed else 0,
            reference=row.reference if timed else "",
            resolution_ns=self.resolution_ns,
            most={"synchronisations": 0} if kind == "counts" else {},
            launches=self.done.get(kind, {}).get(row.case, []),
        )

    def _launch(self, kind: str) -> None:
        self.done[kind] = {}
        count = int(os.environ.get(LAUNCHES_VARIABLE, speed.LEAST_LAUNCHES))
        self._stage(kind, self.cases[kind], 1, count)
        if kind == "time":
            by_case = {row.case: row for row in ROWS}
            known = [case for case in self.cases[kind] if case in self.done[kind] and (kind, case) not in self.errors]
            again = [case for case in known if speed.suspected(self.samples(kind, by_case[case]), self.recorded(case))]
            if again:
                self._stage(kind, again, 2, count)

    def _stage(self, kind: str, cases: Sequence[str], stage: int, count: int) -> None:
        base = os.environ.get(AGAINST_VARIABLE)
        sides: list[tuple[str, str | None]] = [("candidate", None), *([("base", base)] if base else [])]
        for number in range(1, count + 1):
            for side, tree in sides if number % 2 else reversed(sides):
                document = self.start(kind, cases, tree)
                self.resolution_ns = float(document.get("resolution_ns", 0.0))
                for case, message in document["errors"].items():
                    self.errors[kind, case] = f"{side}, launch {number}: {message}"
                told: dict[str, Any] = {"number": number, "stage": stage, "side": side}
                if side == "base":
                    told["commit"] = os.environ.get(COMMIT_VARIABLE, "")
                for case, fields in document["rows"].items():
                    one = msgspec.convert({**fields, **told}, Launch)
                    self.done[kind].setdefault(case, []).append(one)


def launch_once(kind: str, cases: Sequence[str], tree: str | None) -> dict[str, Any]:
    """One fresh process; with `tree`, that checkout's fp8stack under this one's measuring code."""
    with tempfile.TemporaryDirectory(prefix="fp8ci-launch-") as name:
        folder = Path(name)
        out = folder / "launch.json"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "suites.perf.launch", "--kind", kind, "--out", str(out), *cases],
            env={**os.environ, "PYTHONPATH": search_path(folder, tree)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        if not out.exists():
            told = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            return {"rows": {}, "errors": dict.fromkeys(cases, f"the launch ended with {done.returncode}: {told}")}
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        for case in cases:
            if case not in document["rows"]:
                document["errors"].setdefault(case, f"the launch ended with {done.returncode} before this row")
        wanted = Path(tree or ROOT).resolve()
        if Path(document["tree"]) != wanted:
            document["errors"] = dict.fromkeys(cases, f"fp8stack came from {document['tree']}, expected {wanted}")
        return document


def search_path(folder: Path, tree: str | None) -> str:
    """PYTHONPATH of a launch: this checkout, with another one's fp8stack before it where `tree` names one."""
    path = [str(ROOT)]
    if tree is not None:
        (folder / "base").mkdir()
        (folder / "base" / "fp8stack").symlink_to(Path(tree).resolve() / "fp8stack")
        path.insert(0, str(folder / "base"))
    return os.pathsep.join(path)


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest) -> Launched:
    """The launches of this session's rows."""
    cases: dict[str, list[str]] = {"time": [], "counts": [], "compile": []}
    for item in request.session.items:
        row = getattr(item, "callspec", None)
        kind = getattr(item, "originalname", "").removeprefix("test_")
        if row is not None and kind in cases:
            cases[kind].append(row.params["row"].case)
    platform = request.config.getoption("fp8_platform", default=None)
    path = ROOT / "baselines" / str(platform) / samples.PERF_FILE
    recorded = samples.load(path, platform).rows if platform and path.exists() else []
    return Launched(cases, lambda case: [run for run in recorded if run.samples.case == case])


def keep(measured: Samples, evidence: Evidence, record_property: Record, kind: str) -> None:
    """Into the evidence, where the gate finds it."""
    name = f"samples/{kind}-{measured.case}.json"
    record_property("samples_file", evidence.write_json(name, msgspec.to_builtins(measured)))
    record_property("op", measured.op)
    record_property("format", str(measured.format))
    record_property("arch", measured.arch)
    record_property("launches", len(measured.of("candidate")))


@pytest.mark.benchmark(timer=replay, warmup=False)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in ROWS])
def test_time(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record, benchmark: Any) -> None:
    """The row's time, beside its reference and its probe."""
    measured = launched.of("time", row)
    keep(measured, evidence, record_property, "time")
    mine = measured.of("candidate")
    ns = [value for one in mine for value in one.candidate]
    replay.load(ns)
    benchmark.extra_info.update({"case": row.case, "launches": len(mine), "unit": "a call on the device"})
    benchmark.pedantic(lambda: None, rounds=len(ns), iterations=1)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in OF_OPS])
def test_counts(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record) -> None:
    """Kernels that a call launches, and host synchronisations, of which there may be none."""
    keep(launched.of("counts", row), evidence, record_property, "counts")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.case) for row in OF_OPS])
def test_compile(row: rows.Row, launched: Launched, evidence: Evidence, record_property: Record) -> None:
    """Seconds from empty caches to the first result."""
    keep(launched.of("compile", row), evidence, record_property, "compile")
