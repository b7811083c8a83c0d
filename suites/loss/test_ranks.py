"""Two ranks train the curve that one process trains: within the band that harmless changes of one process have.

On a CPU over gloo, tiny models; on two GPUs over NCCL, the larger models of test_gpu_loss_curve, compiled.

The ranks halve the batch: each rounds its half of a gradient to bf16 before the halves are summed in float32, where
one process rounds the whole. That is a harmless change of an order, so losses, gradient norms and gradient digests must
stay inside the band of the recorded nudged runs. Three steps show a gradient that is not reduced; all 100 the rest.

The ranks of the model with experts share these between them: expert parallelism sends every other token away.

FP8 is not judged so: a weight gradient has one scale a column of *this rank's* tokens, which is another computation.
On GPUs its curves are held to what every curve must be, and their files are left in losses/ranks/.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8stack.config import TrainConfig
from fp8stack.train import Result, StepRecord
from harness import bands, baselines
from suites.loss.runs import curve_of
from suites.loss.test_first_steps import STEPS, first_steps
from suites.loss.test_loss import GPU_CURVES, GPU_FORMATS, assert_curve, gpu_configuration
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
    runs = recorded_runs("cpu", case, config)
    (records, digests), other = ranks.run_ranks(ranks.judged_curve, dataclasses.replace(config, steps=steps))
    assert (records, digests) == other, "ranks: they report different numbers"
    curve = bands.Curve(
        loss={step: loss for step, loss, *_ in records},
        grad_norm={step: norm for step, _, norm, *_ in records},
        saturated={step: saturated for step, *_, saturated, _ in records},
        nan={step: nan for step, *_, nan in records},
        digests={int(step): parameters for step, parameters in digests.items()},
    )
    losses = [loss for _, loss, *_ in records]
    record_property("config_hash", config.hash)
    record_property("ranks", 2)
    record_property("tail_loss_nats", math.fsum(losses[-20:]) / 20)
    assert_in_band(curve, runs, steps)


@pytest.mark.requires(gpus=2)
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case}-2-gpus") for case in GPU_CURVES])
def test_two_gpus(case: str, request: pytest.FixtureRequest, evidence: Any, record_property: Record) -> None:
    """Two ranks report the same, complete, finite and learnt; in bf16 inside this platform's band of one GPU."""
    model, recipe = GPU_CURVES[case]
    config = gpu_configuration(model, recipe)
    runs: tuple[baselines.LossRun, ...] = ()
    if recipe == "bf16":
        platform = request.config.getoption("fp8_platform", default=None)
        assert platform, (
            "whose recorded runs to judge with is not known; expected --fp8-platform; run through fp8ci run"
        )
        runs = recorded_runs(platform, case, config)
    if config.size.experts:
        config = dataclasses.replace(config, expert_parallel=2)
    result = trained_by_two(case, config, evidence, record_property)
    assert result.format == ("bf16" if recipe == "bf16" else GPU_FORMATS[result.arch])
    if runs:
        assert_in_band(curve_of(result), runs, config.steps)


def trained_by_two(case: str, config: TrainConfig, evidence: Any, record_property: Record) -> Result:
    """Two ranks train a configuration and report the same: complete, finite and learnt. Its file is left."""
    one, other = ranks.run_ranks(ranks.loss_file, config, case)
    record_property("config_hash", config.hash)
    record_property("ranks", 2)
    record_property("arch", one["arch"])
    record_property("format", one["format"])
    record_property("ranks_file", evidence.write_json(f"losses/ranks/{case}.json", one))
    assert one == other, "ranks: they report different numbers"
    records = [StepRecord(**step) for step in one["steps"]]
    result = Result(config, one["arch"], "", one["format"], None, records, one["digests"])
    record_property("tail_loss_nats", math.fsum(record.loss for record in records[-20:]) / 20)
    assert_curve(result, config.steps)
    return result


def recorded_runs(platform: str, case: str, config: TrainConfig) -> tuple[baselines.LossRun, ...]:
    """What a platform has recorded of a configuration on one rank, run 0 among it."""
    file = ROOT / "baselines" / platform / baselines.LOSS_FILE
    assert file.exists(), f"baselines/{platform}/{file.name} is not there; expected {case} in it; record it on one rank"
    runs = baselines.load_loss(file, platform).of_config(case, config.hash)
    assert baselines.reference_run(runs) is not None, (
        f"no run 0 of {case} with config {config.hash} in baselines/{platform}/{file.name}; record it on one rank"
    )
    return runs


def assert_in_band(curve: bands.Curve, runs: tuple[baselines.LossRun, ...], steps: int) -> None:
    """Every layer of every window of the first `steps` is inside the band of the recorded runs."""
    reference = baselines.reference_run(runs)
    assert reference is not None
    known = first_steps(bands.Curve.of_run(reference), steps)
    spread = [first_steps(bands.Curve.of_run(run), steps) for run in runs if run is not reference]
    assert_ok(bands.compare(curve, known, spread, bands.counted(reference, runs)))


def assert_ok(found: bands.Comparison) -> None:
    """Every number of a comparison is printed, and allowed."""
    for row in found.rows:
        print(f"{row.layer}: {row.metric} {row.window}: {row.measured:.2e} of {row.allowed:.2e}")
    assert found.ok, "; ".join(f"{finding.layer}: {finding.message}" for finding in found.findings)
