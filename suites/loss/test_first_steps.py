"""The first three steps of a curve against the recorded ones: what the curves tell in minutes, in seconds.

Gradient digests, loss, gradient norm and code counts of steps 1 to 3, by the rule of the gate (harness/bands.py) cut to
these steps. A fault in a gradient, a scale or a route is outside here already; `fp8ci selftest` seeds some. What only
adds up over a hundred steps is the business of test_loss.py.

One curve in bf16, one in FP8, one with experts in each: the smallest set in which every module of the trainer, and
every quantiser, has a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8stack.device import OVERRIDE
from fp8stack.train import Result
from harness import bands, baselines
from suites.loss.runs import Runs, curve_of
from suites.loss.test_loss import CURVES, ON_A_CPU, configuration

Record = Callable[[str, object], None]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
CASES = ("llama3-tiny-bf16", "llama3-tiny-rowwise-e4m3fnuz", "dsv3-tiny-bf16", "dsv3-tiny-rowwise-e4m3fnuz")


def first_steps(curve: bands.Curve, steps: int = STEPS) -> bands.Curve:
    """The curve as if it had ended after `steps`."""
    series = ("loss", "grad_norm", "saturated", "nan", "digests")
    cut = {name: {step: value for step, value in getattr(curve, name).items() if step <= steps} for name in series}
    return dataclasses.replace(curve, **cut)


def judged(case: str, nudge: int = 0, **changes: Any) -> tuple[Result, bands.Comparison]:
    """Train three steps of a case, in formats of the arch that the environment names, against what is recorded of it.

    changes: fields of the configuration that must not matter (harmless.py); the recorded runs are those without them.
    """
    model, recipe, _, _ = CURVES[case]
    config = configuration(model=model, recipe=recipe)
    runs = baselines.load_loss(ROOT / "baselines" / "cpu" / baselines.LOSS_FILE, "cpu").of_config(case, config.hash)
    reference = baselines.reference_run(runs)
    assert reference is not None, f"no run 0 of {case} with config {config.hash} is recorded"
    result = Runs(dataclasses.replace(config, **changes)).run(nudge, STEPS)
    spread = [first_steps(bands.Curve.of_run(run)) for run in runs if run is not reference]
    known = first_steps(bands.Curve.of_run(reference))
    return result, bands.compare(curve_of(result), known, spread, bands.counted(reference, runs))


@ON_A_CPU
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case}-first-steps") for case in CASES])
def test_first_steps(case: str, record_property: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of the loss gate that three steps have: digests, windows, tail, saturation."""
    _, _, arch, fmt = CURVES[case]
    monkeypatch.setenv(OVERRIDE, arch)
    result, found = judged(case)
    record_property("arch", result.arch)
    record_property("format", result.format)
    for row in found.rows:
        print(f"{row.layer}: {row.metric} {row.window}: {row.measured:.2e} of {row.allowed:.2e}")
    assert result.format == fmt
    assert found.ok, "; ".join(f"{finding.layer}: {finding.message}" for finding in found.findings)
