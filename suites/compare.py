"""Comparison of tensors that says where they differ: bits, ulps, and the signal-to-noise ratio.

Why not torch.testing: `isinf`, `equal` and `max` raise for some FP8 dtypes (pytorch/pytorch#179159), `assert_close`
calls two different NaN codes equal, and a tolerance hides a rounding that is wrong by one code. Everything here goes
through integer views, so 0x00 and 0x80, 0x7F and 0xFF, and NaN payloads are told apart, for every dtype alike.

The expected value comes first. A failed comparison names the count, the first coordinate (and the row's name where the
caller gave names), both values, both bit patterns and the distance in ulps.

    assert_bits_equal(expected, actual, what="codes", rows=["ones", "nan-row"])
    assert_sqnr(expected, actual, at_least=30.0)

Signal-to-noise: SQNR = 10 log10(sum expected^2 / sum (expected - actual)^2) in dB, over float64. A non-finite value on
either side, or no signal at all, makes it NaN, and NaN never reaches a threshold.

Not here: thresholds (numerics/thresholds.py), inputs (cases.py). Nothing here imports fp8stack: a yardstick that shares
code with what it measures moves with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The integer view of each element size, and the mask that makes its bits unsigned in int64.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns of ``tensor`` as int64 of the same shape on the CPU, non-negative for elements up to 4 bytes."""
    size = tensor.element_size()
    pattern = tensor.detach().contiguous().view(_INTEGERS[size]).cpu().to(torch.int64)
    return pattern if size == 8 else pattern & (1 << 8 * size) - 1


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Values of ``tensor`` as float64 on the CPU (the conversion from FP8 is exact and needs no FP8 comparison)."""
    tensor = tensor.detach().cpu()
    return tensor.to(torch.float32).to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.float64)


def ulp_distance(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Steps between two tensors of one floating dtype on the ordered line of their bit patterns, int64 on the CPU.

    Neighbouring values are 1 apart, +0 and -0 are 0 apart. Meaningless where either side is NaN.
    """
    if expected.dtype != actual.dtype:
        raise ValueError(f"dtypes are {expected.dtype} and {actual.dtype}; ulps need one dtype; convert one side first")
    sign = 1 << 8 * expected.element_size() - 1

    def ordered(pattern: torch.Tensor) -> torch.Tensor:
        return torch.where(pattern >= sign, sign - pattern, pattern)

    return (ordered(bits(expected)) - ordered(bits(actual))).abs()


@dataclass(frozen=True)
class Difference:
    """Where two tensors differ first, and how often."""

    what: str
    count: int
    total: int
    coordinate: tuple[int, ...]
    row: str | None
    expected: float
    actual: float
    expected_bits: str
    actual_bits: str
    ulps: int | None

    def __str__(self) -> str:
        row = "" if self.row is None else f" (row {self.row})"
        ulps = "NaN on one side or both" if self.ulps is None else f"{self.ulps} ulp apart"
        return (
            f"{self.what}: {self.count} of {self.total} differ, first at {list(self.coordinate)}{row}: "
            f"expected {self.expected!r} (0x{self.expected_bits}), "
            f"got {self.actual!r} (0x{self.actual_bits}), {ulps}"
        )


def describe_mismatch(expected: torch.Tensor, actual: torch.Tensor, what: str) -> str | None:
    """What keeps the tensors from being compared at all: shape or dtype. None where nothing does."""
    if tuple(expected.shape) != tuple(actual.shape):
        return f"{what}: shape: expected {list(expected.shape)}, got {list(actual.shape)}"
    if expected.dtype != actual.dtype:
        return f"{what}: dtype: expected {expected.dtype}, got {actual.dtype}"
    return None


def first_difference(
    expected: torch.Tensor, actual: torch.Tensor, what: str = "values", rows: Sequence[str] | None = None
) -> Difference | None:
    """The first bitwise difference in row-major order, or None. Shapes and dtypes must agree (ValueError).

    Args:
        expected: any shape, any dtype of 1, 2, 4 or 8 bytes.
        actual: the same shape and dtype; strides and device are free.
        what: the word that the report begins with.
        rows: names of the entries along dimension 0.
    """
    mismatch = describe_mismatch(expected, actual, what)
    if mismatch is not None:
        raise ValueError(mismatch)
    left, right = bits(expected), bits(actual)
    different = left != right
    count = int(different.sum())
    if count == 0:
        return None
    flat = int(different.reshape(-1).to(torch.uint8).argmax())
    coordinate = (
        tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)) if expected.dim() else ()
    )
    digits = 2 * expected.element_size()
    expected_value = float(values(expected).reshape(-1)[flat])
    actual_value = float(values(actual).reshape(-1)[flat])
    comparable = expected.is_floating_point() and not (math.isnan(expected_value) or math.isnan(actual_value))
    ulps: int | None = None
    if comparable:
        ulps = int(ulp_distance(expected, actual).reshape(-1)[flat])
    elif not expected.is_floating_point():
        ulps = abs(int(left.reshape(-1)[flat]) - int(right.reshape(-1)[flat]))
    return Difference(
        what=what,
        count=count,
        total=expected.numel(),
        coordinate=coordinate,
        row=rows[coordinate[0]] if rows is not None and coordinate else None,
        expected=expected_value,
        actual=actual_value,
        expected_bits=f"{int(left.reshape(-1)[flat]) & (1 << 4 * digits) - 1:0{digits}x}",
        actual_bits=f"{int(right.reshape(-1)[flat]) & (1 << 4 * digits) - 1:0{digits}x}",
        ulps=ulps,
    )


def assert_bits_equal(
    expected: torch.Tensor, actual: torch.Tensor, what: str = "values", rows: Sequence[str] | None = None
) -> None:
    """Fail with one line that locates the first difference, unless shape, dtype and every bit agree."""
    __tracebackhide__ = True
    mismatch = describe_mismatch(expected, actual, what)
    assert mismatch is None, mismatch
    difference = first_difference(expected, actual, what, rows)
    assert difference is None, str(difference)


def assert_within_ulps(
    expected: torch.Tensor,
    actual: torch.Tensor,
    ulps: int,
    what: str = "values",
    rows: Sequence[str] | None = None,
) -> None:
    """Fail where a value is more than ``ulps`` steps away, or where one side only is NaN."""
    __tracebackhide__ = True
    mismatch = describe_mismatch(expected, actual, what)
    assert mismatch is None, mismatch
    left, right = values(expected), values(actual)
    far = ulp_distance(expected, actual) > ulps
    bad = torch.where(left.isnan() | right.isnan(), left.isnan() != right.isnan(), far)
    if bool(bad.any()):
        difference = first_difference(
            torch.where(bad, left, 0.0).to(torch.float32).to(expected.dtype),
            torch.where(bad, right, 0.0).to(torch.float32).to(expected.dtype),
            what,
            rows,
        )
        raise AssertionError(f"{difference}; allowed: {ulps} ulp")


def sqnr_db(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal-to-quantisation-noise ratio in dB; +inf where nothing differs.

    NaN where either side holds a NaN or an infinity, where the shapes differ, or where there is no signal: none of
    these is a quality, and a threshold must not be met by them.
    """
    if tuple(expected.shape) != tuple(actual.shape):
        return math.nan
    left, right = values(expected), values(actual)
    if not (bool(left.isfinite().all()) and bool(right.isfinite().all())):
        return math.nan
    signal = float((left * left).sum())
    noise = float(((left - right) ** 2).sum())
    if signal == 0.0 or not math.isfinite(signal) or not math.isfinite(noise):
        return math.nan
    return math.inf if noise == 0.0 else 10.0 * math.log10(signal / noise)


def assert_sqnr(expected: torch.Tensor, actual: torch.Tensor, at_least: float, what: str = "values") -> float:
    """Fail unless the SQNR reaches ``at_least`` dB (NaN never does); returns the SQNR for the record."""
    __tracebackhide__ = True
    measured = sqnr_db(expected, actual)
    # Written as "reaches", not as "not below": every comparison with NaN is False.
    assert measured >= at_least, f"{what}: SQNR {measured:.2f} dB; expected at least {at_least:.2f} dB"
    return measured


def assert_fake_agrees(op: Callable[..., Any], arguments: Sequence[Any], what: str = "result") -> None:
    """Fail unless an op gives fake tensors the shapes, dtypes and strides that it gives real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    __tracebackhide__ = True
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in arguments))
    for place, (expected, found) in enumerate(zip(real, fake, strict=True)):
        layouts = [(tuple(item.shape), item.stride(), item.dtype) for item in (expected, found)]
        assert layouts[0] == layouts[1], f"{what} {place} is {layouts[0]}; the fake says {layouts[1]}"
