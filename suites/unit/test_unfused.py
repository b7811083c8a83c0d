"""The chains of plain operators quantise as the references do, and a trainer takes them when it is told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8stack.config import UNFUSED_RECIPES
from fp8stack.kernels import launch
from fp8stack.kernels.colwise import quantize_colwise_grouped, quantize_colwise_grouped_pair
from fp8stack.kernels.experts import quantize_experts, quantize_experts_both, quantize_experts_transposed
from fp8stack.kernels.rowwise import quantize_rowwise
from fp8stack.kernels.rowwise_and_colwise import quantize_rowwise_and_colwise
from fp8stack.kernels.tensorwise import quantize_tensorwise, quantize_tensorwise_both
from fp8stack.kernels.together import quantize_together
from fp8stack.train import TrainConfig, Trainer
from suites.compare import assert_bits_equal

# Groups: empty at first and in the middle, of one row, unaligned; rows past the last end.
OFFS = torch.tensor([0, 5, 5, 6, 39], dtype=torch.int32)
# Ends that decrease, are negative and lie past the rows.
BAD = torch.tensor([7, -3, 20, 12, 99], dtype=torch.int32)


def rows(columns: int = 48, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(45, columns) over many orders of magnitude, with zeros of both signs, a zero row and a zero column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(45, columns, generator=generator) * torch.randn(45, columns, generator=generator).mul(6).exp2()
    x[3], x[:, 5], x[7, 9] = 0.0, 0.0, -0.0
    return x.to(dtype)


def weights() -> torch.Tensor:
    """(3, 40, 24)."""
    return torch.stack([rows(24, seed)[:40] for seed in (1, 2, 3)])


CALLS: dict[str, Callable[[str, bool], Any]] = {
    "quantize_rowwise": lambda fmt, pow2: quantize_rowwise(rows(), fmt, pow2),
    "quantize_rowwise-turned": lambda fmt, pow2: quantize_rowwise(rows().t(), fmt, pow2),
    "quantize_rowwise-fp32": lambda fmt, pow2: quantize_rowwise(rows(dtype=torch.float32), fmt, pow2),
    "quantize_rowwise-empty": lambda fmt, pow2: quantize_rowwise(rows()[:0], fmt, pow2),
    "quantize_tensorwise": lambda fmt, pow2: quantize_tensorwise(rows(), fmt, pow2),
    "quantize_tensorwise-column": lambda fmt, pow2: quantize_tensorwise(rows(), fmt, pow2, column_major=True),
    "quantize_tensorwise-scale": lambda fmt, pow2: quantize_tensorwise(rows(), fmt, pow2, scale=torch.tensor(3.0)),
    "quantize_tensorwise_both": lambda fmt, pow2: quantize_tensorwise_both(rows(), fmt, pow2),
    "quantize_colwise_grouped": lambda fmt, pow2: quantize_colwise_grouped(rows(), OFFS, fmt, pow2),
    "quantize_colwise_grouped-bad": lambda fmt, pow2: quantize_colwise_grouped(rows(), BAD, fmt, pow2, 32),
    "quantize_colwise_grouped-fp32": lambda fmt, pow2: quantize_colwise_grouped(
        rows(dtype=torch.float32), OFFS, fmt, pow2
    ),
    "quantize_colwise_grouped_pair": lambda fmt, pow2: quantize_colwise_grouped_pair(
        rows(), rows(32, 4), OFFS, fmt, pow2
    ),
    "quantize_rowwise_and_colwise": lambda fmt, pow2: quantize_rowwise_and_colwise(rows(), OFFS, fmt, pow2),
    "quantize_experts": lambda fmt, pow2: quantize_experts(weights(), fmt, pow2),
    "quantize_experts_transposed": lambda fmt, pow2: quantize_experts_transposed(weights(), fmt, pow2),
    "quantize_experts_both": lambda fmt, pow2: quantize_experts_both(weights(), fmt, pow2),
    "quantize_together": lambda fmt, pow2: _flat(
        quantize_together([rows(32), _square()], [rows(), rows(32)], [_square()], OFFS, fmt, pow2)
    ),
    "quantize_together-weights": lambda fmt, pow2: _flat(quantize_together([], [], [_square()] * 2, OFFS, fmt, pow2)),
}


def _square() -> torch.Tensor:
    """(5, 32, 32): an expert a group."""
    return torch.stack([rows(32, seed)[:32] for seed in range(5)])


def _flat(found: Any) -> list[torch.Tensor]:
    """What quantize_together returns, one tensor after another."""
    return [t for pair in (*found.rows, *found.columns, *found.weights) for t in pair] + [found.padded_offs]


@pytest.mark.parametrize("fmt", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in CALLS])
def test_chain_is_the_reference(name: str, fmt: str) -> None:
    """Codes, inverse scales, padded offsets and strides are the reference's, with scales of both kinds."""
    for pow2 in (True, False):
        expected = CALLS[name](fmt, pow2)
        with launch.recording() as ran, launch.unfused():
            found = CALLS[name](fmt, pow2)
        assert set(ran.values()) == {"unfused"}
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert one.stride() == other.stride()
            assert_bits_equal(one, other)


def test_not_finite() -> None:
    """A NaN or an infinity makes its own scaling unit NaN, and no other."""
    x = rows()
    x[10, 2], x[20, 3] = torch.nan, -torch.inf
    for op in (lambda: quantize_rowwise(x, "e4m3fn"), lambda: quantize_colwise_grouped(x, OFFS, "e4m3fnuz")):
        expected = op()
        with launch.unfused():
            found = op()
        assert torch.equal(expected[0].float().isnan(), found[0].float().isnan())
        assert bool(found[0].float().isnan().any())
        assert_bits_equal(expected[1], found[1])


def test_only_inside() -> None:
    """Nothing is left of it afterwards, and nothing happens where it is not wanted."""
    x = rows()
    for context, which in ((launch.unfused(False), "reference"), (launch.unfused(), "unfused")):
        with launch.recording() as ran:
            with context:
                quantize_rowwise(x, "e4m3fn")
            assert ran == {"quantize_rowwise": which}
    with launch.recording() as ran:
        quantize_rowwise(x, "e4m3fn")
    assert ran == {"quantize_rowwise": "reference"}


@pytest.mark.parametrize("recipe", UNFUSED_RECIPES)
def test_trainer(recipe: str) -> None:
    """--quantisation unfused trains every layer so, experts too, and to the same bits; it is no other configuration."""
    config = TrainConfig(model="dsv3-tiny", recipe=recipe, steps=2, batch=2, seq=16, device="cpu", layers=2)
    unfused = dataclasses.replace(config, quantisation="unfused")
    assert config.hash == unfused.hash
    fused = Trainer(config).run()
    with launch.recording() as ran:
        result = Trainer(unfused).run()
    assert {which for op, which in ran.items() if op.startswith("quantize")} == {"unfused"}
    assert result.steps == fused.steps
    assert result.digests == fused.digests
