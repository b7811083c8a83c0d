"""Harmless changes, each of which must leave the loss gate green: a count, and how much of a limit each used.

    python -m suites.loss.harmless            all, one after the other: about a minute each on one core
    python -m suites.loss.harmless threads=2  some

A change is an environment, a nudge or fields of the configuration that must not matter. Each runs in a process of its
own, since threads and instruction sets are read once, and trains the first steps of the curves of test_first_steps.py.
Whole curves under unseen nudges are counted by suites/unit/test_loss_baseline.py, from what is recorded; whole curves
whose sums have another order by test_ranks.py.

Exit code 1 where one is red.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8stack.device import OVERRIDE
from suites.loss.test_first_steps import CASES, judged
from suites.loss.test_loss import CURVES


@dataclass(frozen=True)
class Change:
    """What is changed, and must not matter."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    nudge: int = 0
    configuration: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = CASES


# An FP8 weight gradient has a scale a column of the tokens at hand, so with other tokens it is another computation.
IN_BF16 = tuple(case for case in CASES if case.endswith("bf16"))
# No recorded run has one of these nudges.
UNSEEN = range(21, 29)
CHANGES: tuple[Change, ...] = (
    *(Change(f"nudge={nudge}", nudge=nudge) for nudge in UNSEEN),
    *(Change(f"threads={threads}", {"OMP_NUM_THREADS": str(threads)}) for threads in (1, 2, 3)),
    Change("onednn=AVX512_CORE", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    Change("onednn=AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Change("aten=default", {"ATEN_CPU_CAPABILITY": "default"}),
    Change("aten=avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    # Sums in another order: of microbatches, and in a recomputed forward pass.
    Change("accumulate=2", configuration={"accumulate": 2}, cases=IN_BF16),
    Change("accumulate=4", configuration={"accumulate": 4}, cases=IN_BF16),
    Change("recompute=full", configuration={"recompute": "full"}),
    Change("recompute=selective", configuration={"recompute": "selective"}),
    Change("compile=aot_eager", configuration={"compile": "aot_eager"}),
)


def measure(change: Change) -> list[dict[str, Any]]:
    """In this process: what the gate says of each curve."""
    told = []
    for case in change.cases:
        os.environ[OVERRIDE] = CURVES[case][2]
        _, found = judged(case, change.nudge, **change.configuration)
        used = [(row.measured / row.allowed, row) for row in found.rows if row.layer != "saturation"]
        share, row = max(used, key=lambda pair: pair[0])
        told.append(
            {
                "case": case,
                "ok": found.ok,
                "used": share,
                "by": f"{row.layer}, {row.metric} {row.window}",
                "findings": [f"{finding.layer}: {finding.message}" for finding in found.findings],
            }
        )
    return told


def main(names: list[str]) -> int:
    """Run the changes of these names (none: all) and print a table of Markdown; the exit code."""
    known = {change.name: change for change in CHANGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"harmless: no change is called {unknown[0]!r}; expected some of {', '.join(known)}", file=sys.stderr)
        return 2
    green = 0
    chosen = [known[name] for name in names] or list(CHANGES)
    print("| change | " + " | ".join(CASES) + " |\n|---|" + "---|" * len(CASES), flush=True)
    for change in chosen:
        done = subprocess.run(
            [sys.executable, "-m", "suites.loss.harmless", "--measure", json.dumps(dataclasses.asdict(change))],
            env={**os.environ, **change.environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        told = {one["case"]: one for one in json.loads(done.stdout.splitlines()[-1])}
        green += all(one["ok"] for one in told.values())
        print(f"| {change.name} | " + " | ".join(_cell(told.get(case)) for case in CASES) + " |", flush=True)
    print(f"\n{green} of {len(chosen)} green; numbers are the largest share of a limit that was used")
    return 0 if green == len(chosen) else 1


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{one['used']:.2f}" if one["ok"] else f"red: {one['findings'][0]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Change(**json.loads(sys.argv[2])))))
    else:
        sys.exit(main(sys.argv[1:]))
