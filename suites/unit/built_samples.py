"""Samples of speed rows as the perf suite would leave them, drawn from the noise that the specification states.

Within a launch a sample varies by 1 %, launches by 1.5 %, nodes and days by 4 %, and how a row answers to a node and a
day by 1.5 %; of the samples 3 % are outliers. A launch's deviation is drawn for each of candidate, reference and
probe: the worst case, since in truth they share a clock. A node and a day move all three alike, a row's answer to them
moves the candidate.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from harness import platforms
from harness.baselines import Provenance
from harness.samples import Launch, PerfRun, Samples

DEVICE = "NVIDIA H200"
CASE = "rowwise-e4m3fn-bf16-m32768-k7168"
TEST = f"perf/test_speed::test_time[{CASE}]"
CANDIDATE_NS, REFERENCE_NS, PROBE_NS = 220_000.0, 590_000.0, 500_000.0
WORK, PROBE_WORK = 32768 * 7168 * 3, 2 << 30
WITHIN, LAUNCH, NODE, ROW = 0.01, 0.015, 0.04, 0.015
OUTLIERS, OUTLIER = 0.03, 1.5
BLOCKS = 10


def uncalibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the platform of these samples is calibrated for nothing."""
    rows = {**platforms.PLATFORMS, "h200": replace(platforms.PLATFORMS["h200"], calibrated=())}
    monkeypatch.setattr("harness.platforms.PLATFORMS", rows)


@dataclass
class Machine:
    """A node on a day; every launch on it draws anew. The levels are factors on the times of this file."""

    draw: random.Random
    node: float = 1.0
    row: float = 1.0
    levels: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def another(draw: random.Random) -> Machine:
        """Another node, or the same one on another day."""
        return Machine(draw, 1 + draw.gauss(0, NODE), 1 + draw.gauss(0, ROW))

    def launch(self, number: int, blocks: int = BLOCKS, **changed: Any) -> Launch:
        """One launch. `slower`: factors of candidate, reference and probe; the rest are fields of Launch."""
        slower: Mapping[str, float] = changed.pop("slower", {})
        values: dict[str, Any] = {"number": number, "device": DEVICE, "commit": "b" * 40, "input_spread": 1.0}
        for name, level in (("candidate", CANDIDATE_NS), ("reference", REFERENCE_NS), ("probe", PROBE_NS)):
            base = level * self.levels.get(name, 1.0) * self.node * (1 + self.draw.gauss(0, LAUNCH))
            base *= slower.get(name, 1.0) * (self.row if name == "candidate" else 1.0)
            values[name] = [
                base * (1 + self.draw.gauss(0, WITHIN)) * (OUTLIER if self.draw.random() < OUTLIERS else 1.0)
                for _ in range(2 * blocks)
            ]
        return Launch(**{**values, **changed})


def samples(launches: list[Launch], **changed: Any) -> Samples:
    """The row of CASE with these launches."""
    values: dict[str, Any] = {
        "case": CASE,
        "op": "rowwise",
        "format": "e4m3fn",
        "arch": "sm_90",
        "config": {"shape": [32768, 7168], "dtype": "bf16", "seed": 20250},
        "work": WORK,
        "probe": "copy",
        "probe_work": PROBE_WORK,
        "reference": "compiled chain",
        "resolution_ns": 500.0,
        "launches": launches,
    }
    return Samples(**{**values, **changed})


def provenance(**changed: Any) -> Provenance:
    values: dict[str, Any] = {
        "when": "2026-01-02T03:04:05+00:00",
        "commit": "a" * 40,
        "dirty": False,
        "platform": "h200",
        "device": DEVICE,
        "python": "3.11.7",
        "torch": "2.13.0",
        "triton": "3.9.0",
    }
    return Provenance(**{**values, **changed})


def recorded(draw: random.Random, days: int = 2, launches: int = 5, **changed: Any) -> list[PerfRun]:
    """Runs of the same commit on several days."""
    found = []
    for day in range(days):
        machine = Machine.another(draw)
        run = samples([machine.launch(number + 1) for number in range(launches)], **changed)
        found.append(PerfRun(test=TEST, samples=run, provenance=provenance(when=f"2026-01-0{day + 2}T00:00:00+00:00")))
    return found


def run(
    draw: random.Random,
    slower: Mapping[str, float] | None = None,
    stages: int = 1,
    machine: Machine | None = None,
    **changed: Any,
) -> Samples:
    """Three launches a stage on one node."""
    where = machine or Machine.another(draw)
    made = [
        where.launch(number, stage=stage, slower=slower or {}) for stage in range(1, stages + 1) for number in (1, 2, 3)
    ]
    return samples(made, **changed)


def pairs(
    draw: random.Random,
    slower: Mapping[str, float] | None = None,
    stages: int = 1,
    machine: Machine | None = None,
    **changed: Any,
) -> Samples:
    """Three pairs of launches a stage on one node: this commit, `slower` than its base."""
    where = machine or Machine.another(draw)
    made = []
    for stage in range(1, stages + 1):
        for number in (1, 2, 3):
            made.append(where.launch(number, stage=stage, slower=slower or {}))
            made.append(where.launch(number, stage=stage, side="base", commit="c" * 40))
    return samples(made, **changed)


def scaled(row: Samples, side: str = "candidate", **factors: float) -> Samples:
    """The row with the times of one side multiplied: `candidate=1.1`."""
    launches = [
        msgspec.structs.replace(
            one, **{name: [value * factor for value in getattr(one, name)] for name, factor in factors.items()}
        )
        if one.side == side
        else one
        for one in row.launches
    ]
    return msgspec.structs.replace(row, launches=launches)
