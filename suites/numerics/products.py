"""How far the result of a GEMM may lie from the exact product: its accumulation, and one rounding of the result.

    |out - exact| <= half an ulp of |exact|  +  accumulation * sum |a| |b|

element by element, so that a wrong scale, a swapped operand or a row of the next group, orders of magnitude outside, is
seen wherever it is; a figure over the whole tensor would hide it. The share of the bound that the worst element takes
goes on record.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from suites.compare import values

Record = Callable[[str, object], None]

# Accumulation error allowed, relative to sum |a| |b|. The reference rounds a float64 sum, and multiplies twice. Sums of
# a few hundred terms in float32 elsewhere, but that the FP8 matrix units of sm_90 keep about 14 bits of a sum, between
# promotions to float32 or, with fast accumulation, to the end. "fp8": measured on an H200 with float32 results, sums of
# 32 to 2048 terms whose blocks differ in size up to 64 times: torch's own product up to 1.62 * 2^-11 at 128 and 256
# terms (tensor scales, exact), ours up to 1.30; already 64 terms, two steps of the unit, reach 1.23 and 1.04. Sums
# promoted every 32 terms stay below 0.19. "fp8-exact": thousands of terms of one sign, promoted every 128 or 256 of
# them; by a model of such a unit 2^-10.3 at 2048 terms, and 2^-4.7 with fast accumulation.
ACCUMULATION = {"reference": 2.0**-22, "float32": 2.0**-18, "fp8": 2.0**-10, "fp8-exact": 2.0**-9}
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def accumulation(backend: str, device: str, fp8: bool, long: bool = False) -> float:
    """The row of ACCUMULATION for a backend where it ran. long: thousands of terms of one sign, summed exactly."""
    if backend == "reference":
        return ACCUMULATION["reference"]
    if fp8 and device == "cuda" and backend in ("torch", "triton"):
        return ACCUMULATION["fp8-exact" if long else "fp8"]
    return ACCUMULATION["float32"]


def assert_within(
    expected: torch.Tensor, magnitude: torch.Tensor, actual: torch.Tensor, allowed: float, what: str, record: Record
) -> None:
    """Every element of actual within the bound; expected and magnitude in float64, on the CPU."""
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}; expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    bound = expected.abs() * (HALF_ULP[actual.dtype] * (1 + 2.0**-8)) + magnitude * allowed + 1e-38
    share = (values(actual) - expected).abs() / bound
    worst = float(share.max())
    record(f"{what}_error_share_of_bound", worst)
    assert worst <= 1.0, (  # a NaN is not
        f"{what}: {int((~(share <= 1.0)).sum())} of {share.numel()} elements leave the bound, worst {worst:.3g} times, "
        f"in column {int(share.flatten(0, -2).max(dim=0).values.argmax())}; expected accumulation error and one "
        "rounding only"
    )
