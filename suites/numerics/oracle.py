"""The saturating cast by table look-up: the golden decodes, the midpoints between them, and a search. For any input.

The golden encode rows stop at the midpoints; this extends them to whole tensors (all 65,536 bf16 values). It shares
no line with fp8stack: codes come from `torch.searchsorted` among the 256 decodes of the golden table, in float64,
where every float32, every decode and every midpoint is exact. test_formats.py holds it to the golden rows before it
judges anything.
"""

from __future__ import annotations

from functools import cache

import torch

from suites.cases import from_bits
from suites.numerics.golden import loader

# Typed again, from the formats' definitions: a mistake here must not follow a mistake in the product.
NAN_CODE = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e5m2": 0x7F, "e5m2fnuz": 0x80}
NEGATIVE_ZERO = {"e4m3fn": True, "e4m3fnuz": False, "e5m2": True, "e5m2fnuz": False}


def decode_table(fmt: str) -> torch.Tensor:
    """float32 (256,): the golden value of every code; NaN is 0x7FC00000."""
    return from_bits(list(loader.decodes(fmt)), torch.float32)


@cache
def _magnitudes(fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(finite magnitudes in code order, midpoints between neighbours), float64."""
    table = decode_table(fmt)[:128].to(torch.float64)
    finite = table[table.isfinite()]
    assert bool((finite.diff() > 0).all()), f"magnitudes of {fmt} do not grow with the code"
    return finite, (finite[1:] + finite[:-1]) / 2


def codes(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """uint8 codes (shape of ``x``, on the CPU) of a saturating cast, nearest, ties to even. x: float32 or narrower."""
    wide = x.detach().cpu().to(torch.float32).to(torch.float64).contiguous()
    finite, midpoints = _magnitudes(fmt)
    # Infinity becomes the maximum here; NaN is overwritten below.
    magnitude = wide.abs().nan_to_num(nan=0.0, posinf=float(finite[-1])).clamp(max=float(finite[-1]))
    low = torch.searchsorted(
        midpoints, magnitude, right=False
    )  # midpoints strictly below: a tie stays at the lower code
    high = torch.searchsorted(midpoints, magnitude, right=True)  # a tie goes to the upper code
    code = torch.where(low % 2 == 0, low, high)
    negative = wide.signbit() & (NEGATIVE_ZERO[fmt] | (code > 0))
    code = torch.where(negative, code | 0x80, code)
    return torch.where(wide.isnan(), NAN_CODE[fmt], code).to(torch.uint8)


def all_bf16() -> torch.Tensor:
    """All 65,536 bf16 values, (256, 256): row r holds the patterns r * 256 to r * 256 + 255."""
    return (
        torch.arange(-32768, 32768, dtype=torch.int32)
        .roll(32768)
        .to(torch.int16)
        .view(torch.bfloat16)
        .reshape(256, 256)
    )
