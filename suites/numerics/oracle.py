"""Slow second opinions: the saturating cast by table look-up, and the quantisation of groups, one unit after another.

The cast: the golden decodes, the midpoints between them, and a search. For any input.

The golden encode rows stop at the midpoints; this extends them to whole tensors (all 65,536 bf16 values). It shares
no line with fp8stack: codes come from `torch.searchsorted` among the 256 decodes of the golden table, in float64,
where every float32, every decode and every midpoint is exact. test_formats.py holds it to the golden rows before it
judges anything.

Groups: offs are walked in plain Python, each column of each group is taken out and quantised by itself, in Python's
float64. No group shares an operation with another, so none can be cut short or start where another should.
"""

from __future__ import annotations

import math
import struct
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


def quantize_groups(
    x: torch.Tensor, offs: list[int], fmt: str, pow2: bool, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """uint8 codes (M_pad, N), inverse scale (E, N) and padded offs of the columns of groups of rows of x (M, N).

    offs as they come: each end is taken as the nearest row between the end before and M.
    """
    m, n = x.shape
    wide = x.detach().cpu().to(torch.float32)
    columns, inverses, padded_offs = [[] for _ in range(n)], [], []
    start = 0
    for given in offs:
        end = min(max(given, start), m)
        size = end - start
        gap = -size % alignment
        inverses.append([])
        for column in range(n):
            unit, inverse = _quantize_unit(wide[start:end, column], fmt, pow2)
            columns[column] += [*unit, *[0] * gap]
            inverses[-1].append(inverse)
        padded_offs.append((padded_offs[-1] if padded_offs else 0) + size + gap)
        start = end
    # Rows that any offs fit in.
    rows = (m + (alignment - 1) * len(offs)) // alignment * alignment
    q = torch.zeros((rows, n), dtype=torch.uint8)
    if padded_offs[-1]:
        q[: padded_offs[-1]] = torch.tensor(columns, dtype=torch.uint8).reshape(n, padded_offs[-1]).t()
    inverse_scale = from_bits([bits for row in inverses for bits in row], torch.float32).reshape(len(offs), n)
    return q, inverse_scale, padded_offs


def _quantize_unit(unit: torch.Tensor, fmt: str, pow2: bool) -> tuple[list[int], int]:
    """Codes, and the bits of the inverse scale, of one scaling unit (1-D float32)."""
    values = unit.tolist()
    if not all(math.isfinite(value) for value in values):
        return [NAN_CODE[fmt]] * len(values), 0x7FC00000
    amax = max((abs(value) for value in values), default=0.0)
    maximum = float(_magnitudes(fmt)[0][-1])
    scale = 1.0 if amax == 0 else _float32(min(maximum / amax, 2.0**120))
    if pow2:
        scale = 2.0 ** (math.frexp(scale)[1] - 1)
    # Two float32 numbers have an exact product in float64.
    scaled = torch.tensor([_float32(value * scale) for value in values], dtype=torch.float32)
    inverse = struct.unpack("<I", struct.pack("<f", 1.0 / scale))[0]
    return codes(scaled, fmt).tolist(), inverse


def _float32(value: float) -> float:
    """The nearest float32, ties to even, as Python's struct rounds; what overflows cannot occur here."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
