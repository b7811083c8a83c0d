"""Which recorded runs a row of the perf suite is judged with, and what is said where none can be used.

A row belongs to its test id. Recorded runs count when they measured the same configuration on the same kind of device;
another one makes the baseline stale, by name of what differs. Versions of torch, Triton and the runtime are no such
thing: a reference that a new torch makes faster is named by the statistics (speed.py), so a difference is a note.

Published figures (published.json) are read here to be shown beside a row. They judge nothing.

Not here: statistics and verdicts (speed.py); the order of a judgement (gate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import baselines, fingerprint, manifest, samples, speed
from harness.errors import VERDICTS, Verdict
from harness.platforms import Platform
from harness.samples import PerfRun, Samples
from harness.speed import Comparison


class SpeedJudge:
    """The rows of one run, against `<platform>/perf.json` and against the base that was measured beside them."""

    def __init__(self, platform: Platform, folder: Path, run: Mapping[str, Any]) -> None:
        self.platform = platform
        self.name = f"baselines/{platform.id}/{samples.PERF_FILE}"
        path = folder / platform.id / samples.PERF_FILE
        self.baseline = samples.load(path, platform.id) if path.exists() else None
        path = folder / platform.id / samples.PUBLISHED_FILE
        self.published = samples.load_published(path, platform.id).rows if path.exists() else []
        machine = run.get("capabilities")
        self.device = str(machine.get("device_name") or "") if isinstance(machine, Mapping) else ""
        versions = run.get("versions")
        self.fingerprint = fingerprint.of_run(platform.id, versions if isinstance(versions, Mapping) else {}, run)
        self.missing = Verdict.NO_BASELINE if "perf" in platform.calibrated else Verdict.UNCALIBRATED
        self.moved: dict[str, int] = {}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(test id, what) of each recorded row, for the check that all were measured."""
        found = self.baseline.rows if self.baseline else []
        return sorted({(row.test, f"speed of {row.samples.case}") for row in found})

    @property
    def notes(self) -> list[str]:
        """A line for each way in which the recorded runs were made under other versions."""
        return [f"recorded otherwise: {keys}, for {count} rows of perf" for keys, count in self.moved.items()]

    def judge(self, test_id: str, properties: Mapping[str, object], now: Samples) -> Comparison:
        """The verdict on one row."""
        swapped = self._swapped(test_id, properties, now)
        if swapped:
            return Comparison(Verdict.DISAGREE, swapped)
        runs, stale = self._runs(test_id, now)
        found = speed.judge(now, runs, self.missing)
        if stale and (VERDICTS[found.verdict].exit_code == 0 or found.verdict is self.missing):
            return Comparison(**{**vars(found), "verdict": Verdict.STALE_BASELINE, "message": stale})
        if found.verdict is self.missing and not now.of("base"):
            where = f"no row in {self.name}" if self.baseline else f"judged without {self.name}, which did not exist"
            told = f"{where}: `fp8ci baseline calibrate --platform {self.platform.id}` on such a machine makes it"
            return Comparison(**{**vars(found), "message": told})
        return found

    def targets(self, now: Samples) -> list[str]:
        """What others have published of this case, in words."""
        return [
            f"published: {row.metric} {row.value:g} {row.unit} ({row.where}; {row.conditions}); a target, never a limit"
            for row in self.published
            if row.case == now.case
        ]

    def _runs(self, test_id: str, now: Samples) -> tuple[tuple[PerfRun, ...], str]:
        """(recorded runs that can be compared, why there is none although some were recorded)."""
        recorded = self.baseline.of_test(test_id) if self.baseline else ()
        if not recorded:
            return (), ""
        mine = identity(now)
        same = [run for run in recorded if identity(run.samples) == mine]
        if not same:
            keys = baselines.differing_keys(mine, identity(recorded[-1].samples))
            return (), f"recorded for another configuration: {'; '.join(keys[:4])}"
        here = tuple(run for run in same if run.provenance.device == self.device)
        if not here:
            others = ", ".join(sorted({run.provenance.device for run in same}))
            return (), f"recorded on another device: {others} -> {self.device or 'unknown'}"
        latest = max(here, key=lambda run: run.provenance.when)
        moved = fingerprint.differing(self.fingerprint, fingerprint.of_row(latest.provenance))
        if moved:
            told = "; ".join(moved)
            self.moved[told] = self.moved.get(told, 0) + 1
        return here, ""

    def _swapped(self, test_id: str, properties: Mapping[str, object], now: Samples) -> str | None:
        """What tells that the file is not this test's, or that its launches are not of one device; or None."""
        file = str(properties.get("samples_file", ""))
        claims = {"case": (now.case, manifest.parse(test_id).case)}
        for key, value in (("format", now.format), ("arch", now.arch), ("op", now.op)):
            if key in properties:
                claims[key] = (str(value), str(properties[key]))
        for key, (inside, expected) in claims.items():
            if inside != expected:
                return f"{file} says {key} {inside!r}, the test says {expected!r}"
        devices = sorted({one.device for one in now.launches})
        if len(devices) > 1 or (devices and self.device and devices[0] != self.device):
            return f"{file} was measured on {' and '.join(map(repr, devices))}, the run was on {self.device!r}"
        return None


def identity(row: Samples) -> dict[str, Any]:
    """What makes two measurements comparable."""
    return {
        "kind": row.kind,
        "op": row.op,
        "format": row.format,
        "arch": row.arch,
        "probe": row.probe,
        "probe_work": row.probe_work,
        "reference": row.reference,
        **row.config,
    }
