"""100-step loss curves, dense and with experts, in bf16 and FP8: small models on a CPU, larger ones on a GPU.

On a CPU each curve has the numerics of a simulated arch: FNUZ formats come from the arch override. On a GPU they are
the device's own, and blocks are compiled. One curve is shared: `llama3-tiny-bf16` runs everywhere, and on a GPU the
gate holds it against the CPU's too, as a second opinion.

Each curve is the trainer's, in this process, at a fixed configuration. A test asserts what holds without a baseline:
all steps there and finite, a loss that has learnt and has not learnt too much, no NaN code. The curve itself (loss,
gradient norm, digests, counts) goes into losses/<case>.json, and the gate compares it with the recorded one and FP8
with bf16 (harness/bands.py). For recording the spread the environment asks for nudged runs (runs.py). Threads and
instruction-set limits come from the environment too; all of it is written into the loss file.

100 steps cannot show late divergence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from fp8stack.data import SyntheticTokens
from fp8stack.device import OVERRIDE
from fp8stack.train import Result, StepRecord, TrainConfig, run
from suites.loss.runs import NUDGE, NUDGES, Runs, asked

Record = Callable[[str, object], None]

# The configuration of the curves on a CPU, and of those on a GPU. Anything in it changes the hash and with it every
# baseline.
STEPS = 100
CONFIG = TrainConfig(model="llama3-tiny", steps=STEPS, seed=0, batch=8, seq=128, device="cpu")
# A step is 2,048 tokens. In products, forward and backward: 80 GFLOP of the dense model (39 MFLOP a token: 34 for its
# 5.6 M weights and 5 for attention), 430 GFLOP of the one with experts (210 MFLOP a token: 165 for the 27 M weights
# that a token meets, 47 for attention). That is 0.4 and 2 ms at 200 TFLOPS: launches take the time of such a step.
GPU_CONFIG = TrainConfig(model="llama3-debug", steps=STEPS, seed=0, batch=8, seq=256, device="cuda", compile="inductor")
# The loss of the model with experts falls so fast at 3e-3 that a flipped bit moves it by 9 % in steps 21 to 40 (bf16),
# at 1e-3 by 8 %, at 5e-4 by 0.1 %.
GPU_CHANGES: dict[str, dict[str, Any]] = {"llama3-debug": {}, "dsv3-debug": {"lr": 5e-4}}

# case -> (model, recipe, arch whose formats are trained with, the e4m3 format that must come of it).
CURVES: dict[str, tuple[str, str, str, str]] = {
    "llama3-tiny-bf16": ("llama3-tiny", "bf16", "cpu", "bf16"),
    "llama3-tiny-rowwise-e4m3fn": ("llama3-tiny", "rowwise", "gfx950", "e4m3fn"),
    "llama3-tiny-rowwise-e4m3fnuz": ("llama3-tiny", "rowwise", "gfx942", "e4m3fnuz"),
    "llama3-tiny-rowwise_with_gw_hp-e4m3fnuz": ("llama3-tiny", "rowwise_with_gw_hp", "gfx942", "e4m3fnuz"),
    "llama3-tiny-tensorwise-e4m3fnuz": ("llama3-tiny", "tensorwise", "gfx942", "e4m3fnuz"),
    "dsv3-tiny-bf16": ("dsv3-tiny", "bf16", "cpu", "bf16"),
    "dsv3-tiny-rowwise-e4m3fn": ("dsv3-tiny", "rowwise", "gfx950", "e4m3fn"),
    "dsv3-tiny-rowwise-e4m3fnuz": ("dsv3-tiny", "rowwise", "gfx942", "e4m3fnuz"),
}
# The curve that every platform has: of one configuration, on the same tokens and weights.
SHARED = "llama3-tiny-bf16"
# case -> (model, recipe).
GPU_CURVES: dict[str, tuple[str, str]] = {
    f"{model}-{recipe}": (model, recipe)
    for model in ("llama3-debug", "dsv3-debug")
    for recipe in ("bf16", "rowwise", "rowwise_with_gw_hp")
}
# arch of a GPU -> the e4m3 format that its FP8 products take.
GPU_FORMATS = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn", "sm_90": "e4m3fn", "sm_100": "e4m3fn"}

ON_A_CPU, ON_A_GPU = pytest.mark.requires("vendor:cpu"), pytest.mark.requires(gpus=1)

# Mean of the last 20 losses, nats, by model. A model that knows only which 256 symbols exist is at 5.55, one that also
# knows the 20 successors of each at 2.69. Recorded curves of tiny models end near 3.33, of llama3-debug (H200) at 2.97
# and of dsv3-debug at 3.26.
LEARNT_BY = {"llama3-tiny": 3.6, "dsv3-tiny": 3.6, "llama3-debug": 3.3, "dsv3-debug": 3.4}


def configuration(**changes: Any) -> TrainConfig:
    """CONFIG with changes."""
    return dataclasses.replace(CONFIG, **changes)


def gpu_configuration(model: str, recipe: str) -> TrainConfig:
    """That of a curve on a GPU."""
    return dataclasses.replace(GPU_CONFIG, model=model, recipe=recipe, **GPU_CHANGES[model])


@pytest.fixture(scope="module")
def compiled_runs() -> Callable[[TrainConfig], Runs]:
    """The runs of a configuration; one that a test has asked for before is not compiled again."""
    made: dict[str, Runs] = {}

    def of(config: TrainConfig) -> Runs:
        if config.hash not in made:
            made[config.hash] = Runs(config)
        return made[config.hash]

    return of


def assert_curve(result: Result, steps: int = STEPS) -> None:
    """What every curve must be, whatever the recipe."""
    losses = [record.loss for record in result.steps]
    assert [record.step for record in result.steps] == list(range(1, steps + 1))
    for record in result.steps:
        assert math.isfinite(record.loss), f"loss {record.loss} at step {record.step}"
        assert math.isfinite(record.grad_norm), f"gradient norm {record.grad_norm} at step {record.step}"
        assert record.nan == 0, f"{record.nan} NaN codes at step {record.step}"
    tail, learnt = math.fsum(losses[-20:]) / 20, LEARNT_BY[result.config.model]
    assert tail <= learnt, f"mean of the last 20 losses is {tail:.4f}; expected at most {learnt}"
    floor = SyntheticTokens.entropy_floor_nats
    assert min(losses) > floor, f"loss {min(losses):.4f} is below the entropy of the text, {floor:.4f}: a label leaks"


def measure(case: str, runs: Runs, evidence: Any, record_property: Record) -> Result:
    """Train the curve and leave its file; and the nudged runs that the environment asks for, each with its own."""
    record_property("seed", runs.config.seed)
    record_property("config_hash", runs.config.hash)
    nudge, nudges = asked(NUDGE), asked(NUDGES)

    def progress(record: StepRecord) -> None:
        if record.step % 20 == 0:
            print(f"step {record.step}/{STEPS} loss {record.loss:.4f}", flush=True)

    result = runs.run(nudge, on_step=progress)
    record_property("arch", result.arch)
    record_property("format", result.format)
    record_property("loss_file", evidence.write_json(f"losses/{case}.json", result.loss_file(case)))
    losses = [record.loss for record in result.steps]
    record_property("first_loss_nats", losses[0])
    record_property("tail_loss_nats", math.fsum(losses[-20:]) / 20)
    record_property("saturated_codes", sum(record.saturated or 0 for record in result.steps))
    record_property("trainer_seconds", round(result.seconds, 1))
    assert_curve(result)
    files = []
    for i in range(nudge + 1, nudge + 1 + nudges):
        nudged = runs.run(i)
        print(f"nudged run {i}: loss {nudged.steps[-1].loss:.4f} after {nudged.seconds:.1f} s", flush=True)
        assert_curve(nudged)
        files.append(evidence.write_json(f"losses/nudged/{case}-{i}.json", nudged.loss_file(case)))
    if files:
        record_property("nudged_files", " ".join(files))
    return result


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case, marks=() if case == SHARED else ON_A_CPU) for case in CURVES]
)
def test_loss_curve(
    case: str, device: str, evidence: Any, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curve is complete, finite and learnt; its file is left for the gate."""
    model, recipe, arch, fmt = CURVES[case]
    if device == "cpu":
        monkeypatch.setenv(OVERRIDE, arch)
    runs = Runs(configuration(model=model, recipe=recipe, device=device))
    result = measure(case, runs, evidence, record_property)
    assert result.format == fmt
    assert result.arch == arch or (case, device) == (SHARED, "cuda")


@ON_A_GPU
@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in GPU_CURVES])
def test_gpu_loss_curve(
    case: str, compiled_runs: Callable[[TrainConfig], Runs], evidence: Any, record_property: Record
) -> None:
    """The curve of a larger model with this device's own formats, in compiled blocks."""
    model, recipe = GPU_CURVES[case]
    runs = compiled_runs(gpu_configuration(model, recipe))
    result = measure(case, runs, evidence, record_property)
    assert result.format == ("bf16" if recipe == "bf16" else GPU_FORMATS[result.arch])


DETERMINISM_STEPS = 5


@ON_A_CPU
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llama3-tiny", id="llama3-tiny-rowwise-e4m3fnuz-twice"),
        pytest.param("dsv3-tiny", id="dsv3-tiny-rowwise-e4m3fnuz-twice"),
    ],
)
def test_determinism(model: str, record_property: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plain runs are equal to the last bit: losses, gradient norms, digests and counts."""
    monkeypatch.setenv(OVERRIDE, "gfx942")
    config = configuration(model=model, recipe="rowwise", steps=DETERMINISM_STEPS)
    one, two = run(config), run(config)
    record_property("arch", one.arch)
    record_property("format", one.format)
    assert_equal(one, two)


@ON_A_GPU
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llama3-debug", id="llama3-debug-rowwise-twice"),
        pytest.param("dsv3-debug", id="dsv3-debug-rowwise-twice"),
    ],
)
def test_gpu_determinism(model: str, compiled_runs: Callable[[TrainConfig], Runs], record_property: Record) -> None:
    """As above, of one compiled model that starts again."""
    runs = compiled_runs(gpu_configuration(model, "rowwise"))
    one, two = runs.run(steps=DETERMINISM_STEPS), runs.run(steps=DETERMINISM_STEPS)
    record_property("arch", one.arch)
    record_property("format", one.format)
    assert_equal(one, two)


def assert_equal(one: Result, two: Result) -> None:
    """Two runs are one, step by step, and in every digest."""
    assert [record.step for record in one.steps] == list(range(1, DETERMINISM_STEPS + 1))
    for first, second in zip(one.steps, two.steps, strict=True):
        assert first == second, f"two runs of one configuration part at step {first.step}: {first} and {second}"
    assert one.digests == two.digests
