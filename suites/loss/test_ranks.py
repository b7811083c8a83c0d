"""Two gloo ranks train the curve that one process trains: within the band that harmless changes of one process have.

The ranks halve the batch: each rounds its half of a gradient to bf16 before the halves are summed in float32, where
one process rounds the whole. That is a harmless change of an order, so losses, gradient norms and gradient digests must
stay inside the band of the recorded nudged runs. Three steps show a gradient that is not reduced; all 100 the rest.

The ranks of the model with experts share these between them: expert parallelism sends every other token away.

FP8 is not judged so: a weight gradient has one scale a column of *this rank's* tokens, which is another computation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8stack.config import TrainConfig
from harness import bands, baselines
from suites.loss.test_first_steps import STEPS, first_steps
from suites.unit import ranks

Record = Callable[[str, object], None]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(model="llama3-tiny", steps=100, seed=0, batch=8, seq=128, device="cpu")
EXPERTS = dataclasses.replace(CONFIG, model="dsv3-tiny", expert_parallel=2)


@pytest.mark.requires("vendor:cpu")
@pytest.mark.parametrize(
    ("case", "config", "steps"),
    [
        pytest.param("llama3-tiny-bf16", CONFIG, 100, id="llama3-tiny-bf16-2-ranks"),
        pytest.param("dsv3-tiny-bf16", EXPERTS, 100, id="dsv3-tiny-bf16-2-ranks"),
        pytest.param("llama3-tiny-bf16", CONFIG, STEPS, id="llama3-tiny-bf16-2-ranks-first-steps"),
    ],
)
def test_two_ranks(
    case: str, config: TrainConfig, steps: int, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks report the same, and every layer of every window is inside the band of world size 1."""
    monkeypatch.delenv("FP8STACK_ARCH", raising=False)
    recorded = baselines.load_loss(ROOT / "baselines" / "cpu" / baselines.LOSS_FILE, "cpu")
    runs = recorded.of_config(case, config.hash)
    reference = baselines.reference_run(runs)
    assert reference is not None, f"no run 0 of {case} with config {config.hash} is recorded"

    (records, digests), other = ranks.run_ranks(ranks.judged_curve, dataclasses.replace(config, steps=steps))
    assert (records, digests) == other, "ranks: they report different numbers"
    curve = bands.Curve(
        loss={step: loss for step, loss, *_ in records},
        grad_norm={step: norm for step, _, norm, *_ in records},
        saturated={step: saturated for step, *_, saturated, _ in records},
        nan={step: nan for step, *_, nan in records},
        digests={int(step): parameters for step, parameters in digests.items()},
    )
    known = first_steps(bands.Curve.of_run(reference), steps)
    spread = [first_steps(bands.Curve.of_run(run), steps) for run in runs if run is not reference]
    found = bands.compare(curve, known, spread, bands.counted(reference, runs))
    losses = [loss for _, loss, *_ in records]
    record_property("config_hash", config.hash)
    record_property("ranks", 2)
    record_property("tail_loss_nats", math.fsum(losses[-20:]) / 20)
    for row in found.rows:
        print(f"{row.layer}: {row.metric} {row.window}: {row.measured:.2e} of {row.allowed:.2e}")
    assert found.ok, "; ".join(f"{finding.layer}: {finding.message}" for finding in found.findings)
