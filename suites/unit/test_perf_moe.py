"""The timing of layers, `python -m suites.perf.moe`: every part of it runs on a CPU, small, with a false clock.

What is timed must be right first, so wrong results are named; what misses a bar is said, and what counts launches sees
the ops of a layer. Times themselves need a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from fp8stack import device, linear
from fp8stack import moe as layers
from fp8stack.kernels import colwise
from suites.perf import moe, timing

CPU = torch.device("cpu")
SHAPE = (3, 96, 64, 32)
LAYER = moe.Layer(24, 64, 48, layers.Routing(4, 2, "sigmoid", 2, 2, normalise=True, scale=2.5), 1)


def false_clock(candidates: Sequence[timing.Candidate], rounds: int = 1) -> dict[str, timing.Timed]:
    """Runs each call once; bf16 takes 1.2 ms, whatever is called fast 1 ms, the rest 2 ms."""
    for candidate in candidates:
        for call in candidate.calls:
            call()
    ns = {c.name: 1.2e6 if c.name == "bf16" else 1e6 if "fast" in c.name else 2e6 for c in candidates}
    return {name: timing.Timed(name, (value,) * rounds) for name, value in ns.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sizes, a false clock, no compiler behind torch.compile, no peer."""
    monkeypatch.setattr(timing, "measure", false_clock)
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(moe, "OPS", {SHAPE: (moe.Bar(1.15, 1.35), moe.Bar(1.05))})
    monkeypatch.setattr(moe, "LAYERS", {"dsv3": LAYER})
    monkeypatch.setattr(moe, "LINEARS", {(64, 48): {"rowwise": moe.Bar(1.4)}})
    monkeypatch.setattr(moe, "TOKENS", 32)
    monkeypatch.setattr(moe, "_compiled", lambda module: module)
    monkeypatch.setattr(moe, "_torchao", lambda: None)


def rows(section: str, **sizes: object) -> list[moe.Row]:
    part = moe.Part(section, **sizes)
    return moe.rows_of(part, ("rowwise", "rowwise_with_gw_hp"), device.detect(CPU), CPU, rounds=2)


def test_op() -> None:
    """Every recipe of the op is right against bf16, and its ratio stands against the bar of its own name."""
    row, groups = rows("op", shape=SHAPE)
    assert row.wrong == {}
    assert list(row.speedup) == ["bf16", "fp8 fast", "fp8", "fp8 fast codes", "fp8 gw_hp", "fp8 fast each", "mxfp8"]
    assert row.speedup["fp8 fast"] == pytest.approx(1.2)
    assert row.below() == ["E3 M96 K64 N32: fp8 is 0.600x bf16, bar 1.05"]
    assert list(groups.speedup) == ["aligned", "unaligned"]
    assert groups.below() == []
    text = moe.render([row, groups])
    assert "fp8 fast" in text
    assert "bar 1.15 goal 1.35" in text


def test_groups_of_any_size() -> None:
    """Their ends are random, in order, the last is the number of rows, and some group is no multiple of 16."""
    ends = moe.unaligned_ends((96, 5), torch.Generator().manual_seed(1)).tolist()
    assert ends == sorted(ends)
    assert ends[-1] == 96
    assert any(end % 16 for end in ends)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda y: y * torch.tensor([1.0, float("nan")]).repeat(y.shape[1] // 2), "nan dB", id="nan"),
        pytest.param(lambda y: y.roll(1, 0), "SQNR of the output is -", id="rows-of-others"),
    ],
)
def test_wrong_results_are_not_timed(
    spoil: Callable[[torch.Tensor], torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that gives other rows, or a NaN, is named with its SQNR and has no time; the others have theirs."""
    real = layers.fp8_grouped_mm

    def spoilt(x, weights, offs, plan):
        outputs = real(x, weights, offs, plan)
        return (spoil(outputs[0]),) if plan.recipe.fast_accum_gradients else outputs

    monkeypatch.setattr(layers, "fp8_grouped_mm", spoilt)
    row = rows("op", shape=SHAPE)[0]
    assert set(row.wrong) == {"fp8 fast", "fp8 fast codes", "fp8 fast each"}
    assert words in row.wrong["fp8 fast"]
    assert set(row.speedup) == {"bf16", "fp8", "fp8 gw_hp", "mxfp8"}
    assert "WRONG" in moe.render([row])


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both passes quantise, in one launch, from one read and by two kernels; bits that differ are named."""
    found = rows("choices", shape=SHAPE)
    passes = ["forward", "forward, weights both ways", "backward"]
    assert [row.case for row in found] == [f"E3 M96 K64 N32 {phase}" for phase in passes]
    for row in found:
        assert row.wrong == {}
        assert list(row.speedup) == list(moe.WAYS)
    real = colwise.quantize_colwise_grouped
    monkeypatch.setattr(layers, "quantize_colwise_grouped", lambda x, *rest: real(-x, *rest))
    assert rows("choices", shape=SHAPE)[0].wrong == {"each, two kernels": "its bits are not those of one launch"}


@pytest.mark.parametrize("compiled", [pytest.param(True, id="compiled"), pytest.param(False, id="eager")])
def test_layer(compiled: bool) -> None:
    """A layer in FP8 is right against its bf16 twin, of equal weights, router and shared experts included."""
    (row,) = rows("layer", name="dsv3", compiled=compiled)
    assert row.wrong == {}
    assert set(row.speedup) == set(moe.layer_kinds(compiled))
    layer = moe.make_layer(LAYER, {"saved_weight": "codes"}, device.detect(CPU), CPU)
    assert layer.experts.plan.recipe.saved_weight == "codes"
    assert isinstance(layer.shared.w1, linear.Float8Linear)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}


def test_launches() -> None:
    """Without kernels the profiler shows the ops that quantise; of copies those that happen, where they are large."""
    found = rows("launches", name="dsv3")
    for row in found[:2]:
        together = {"fp8stack::quantize_together": 2}
        assert row.counts["ops, forward"] == row.counts["ops, backward"] == together, row.case
    assert [sum(row.counts["ops, forward"].values()) for row in found] == [2, 2, 5, 7]
    assert [sum(row.counts["ops, backward"].values()) for row in found] == [2, 2, 6, 9]
    x = torch.zeros(8, 16)
    seen = moe.traced(lambda: (x.t().contiguous(), x.contiguous(), x[:2].t().contiguous()), CPU, 8 * 16)
    assert seen.copies == {"aten::clone 16x8": 1}
    assert not seen.on_device
    assert {"_quantize_rowwise_kernel", "_column_scales_kernel"} <= moe.quantising_kernels()


def test_launches_are_judged() -> None:
    """Three launches that quantise in a pass are one too many, a copy is one too many, ops are for reading."""
    row = moe.Row("launches", "a layer", "", most_counts=2)
    row.counts = {"quantise, forward": {"a": 2, "b": 1}, "quantise, backward": {"a": 2}, "ops, forward": {"a": 9}}
    row.counts |= {"copy, forward": {}, "copy, backward": {"aten::clone 16x8": 1}}
    assert row.below() == ["a layer: 3 in quantise, forward, bar 2", "a layer: copy, backward"]


def test_memory_is_judged() -> None:
    """A peak beyond 1.02 of bf16's is said, one at it is not."""
    row = moe.Row("layer", "a layer", "bf16", most_memory=1.02)
    row.peak_bytes = {"bf16": 1000, "fp8": 1020, "fp8 fast": 1021}
    assert row.below() == ["a layer: fp8 fast needs 1.021 of the memory, bar 1.02"]


def test_linear() -> None:
    """Each recipe of a dense layer against torch's own bf16 linear."""
    (row,) = rows("linear", shape=(64, 48))
    assert row.wrong == {}
    assert set(row.speedup) == {"bf16", "rowwise", "rowwise_with_gw_hp"}
    assert row.below() == ["64->48 M32: rowwise is 0.600x bf16, bar 1.4"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command without a GPU says so; with one it writes what it measured, and --gate fails it below a bar."""
    assert moe.main(["--only", "linear"]) == 4
    with pytest.raises(SystemExit) as stopped:
        moe.main(["--only", "linear,nothing"])
    assert stopped.value.code == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(moe, "this_gpu", lambda: CPU)
    monkeypatch.setattr(moe, "_free", lambda: None)
    monkeypatch.setattr(moe.kernels, "provenance", lambda *_: {"seed": 1})
    monkeypatch.setattr(moe.kernels, "run_cases", lambda *_: 1)
    assert moe.main(["--only", "linear"]) == 1
    assert "nothing was timed" in capsys.readouterr().err
    path = tmp_path / "moe.json"
    arguments = ["--only", "linear,launches", "--unchecked", "--rounds", "1", "--json", str(path)]
    assert moe.main(arguments) == 0
    assert moe.main([*arguments, "--gate"]) == 1
    written = json.loads(path.read_text())
    assert [row["section"] for row in written["rows"]] == ["launches"] * 4 + ["linear"]
    assert written["rows"][-1]["bars"] == {"rowwise": {"bar": 1.4, "goal": None}}
    assert "beyond the bar: 64->48" in capsys.readouterr().err
