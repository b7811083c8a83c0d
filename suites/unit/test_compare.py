"""suites.compare: the yardstick itself. A comparison that cannot fail, or that crashes on FP8, proves nothing."""

from __future__ import annotations

import math

import pytest
import torch

from suites import compare
from suites.cases import DTYPES, FORMATS, LAYOUTS, contract_rows, guarded, next_down, next_up

FP8 = {name: getattr(torch, f"float8_{name}") for name in FORMATS}


def _codes(fmt: str, *codes: int) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(FP8[fmt])


@pytest.mark.parametrize("fmt", [pytest.param(name, id=f"compare-{name}-all-codes") for name in FORMATS])
def test_every_code_equals_itself_only(fmt: str) -> None:
    """All 256 codes of a format: equal to themselves, NaN codes included, and different from every other code."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8[fmt])
    compare.assert_bits_equal(codes, codes.clone())
    shifted = torch.arange(256, dtype=torch.uint8).roll(1).view(FP8[fmt])
    difference = compare.first_difference(codes, shifted)
    assert difference is not None
    assert difference.count == 256


@pytest.mark.parametrize("fmt", [pytest.param(name, id=f"compare-{name}-0x80") for name in FORMATS])
def test_0x80_is_reported(fmt: str) -> None:
    """0x80 (NaN in FNUZ, -0 in OCP) against 0x00 is a report, not a crash (isinf, equal, max raise on FNUZ)."""
    expected = _codes(fmt, 0x00, 0x00, 0x40).reshape(1, 3)
    actual = _codes(fmt, 0x00, 0x80, 0x40).reshape(1, 3)
    with pytest.raises(AssertionError) as caught:
        compare.assert_bits_equal(expected, actual, what="codes", rows=["zero-row"])
    text = str(caught.value)
    assert text.startswith("codes: 1 of 3 differ, first at [0, 1] (row zero-row): expected 0.0 (0x00), got ")
    assert "(0x80)" in text
    assert ("nan" in text) == fmt.endswith("fnuz")
    assert ("ulp apart" in text) != fmt.endswith("fnuz")


def test_nan_payloads_and_signs_differ() -> None:
    """Two NaN with different bits are different: the specification names the bits."""
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    compare.assert_bits_equal(quiet, quiet.clone())
    with pytest.raises(AssertionError, match=r"0x7fc00000.*0x7fffffff.*NaN on one side or both"):
        compare.assert_bits_equal(quiet, payload)
    with pytest.raises(AssertionError, match=r"0x00000000.*0x80000000.*0 ulp apart"):
        compare.assert_bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_shape_and_dtype_are_part_of_the_value() -> None:
    """A shape that would broadcast, and equal bits under another dtype, are differences."""
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_bits_equal(torch.zeros(3), torch.zeros(1, 3))
    with pytest.raises(AssertionError, match="dtype"):
        compare.assert_bits_equal(_codes("e4m3fn", 1), _codes("e4m3fnuz", 1))
    compare.assert_bits_equal(torch.zeros(0, 4), torch.zeros(0, 4))
    with pytest.raises(AssertionError, match=r"first at \[\]"):
        compare.assert_bits_equal(torch.tensor(1.0), torch.tensor(2.0))


def test_strides_do_not_matter() -> None:
    """A transposed view equals its contiguous copy; the coordinate is that of the view."""
    x = torch.arange(6.0).reshape(2, 3)
    compare.assert_bits_equal(x.t().contiguous(), x.t())
    y = x.clone()
    y[1, 2] = 7.0
    difference = compare.first_difference(x.t(), y.t())
    assert difference is not None
    assert difference.coordinate == (2, 1)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"compare-ulps-{name}") for name in (*DTYPES, *FORMATS)])
def test_ulps(name: str) -> None:
    """Neighbours are 1 apart, also across zero; +0 and -0 are 0 apart."""
    dtype = DTYPES.get(name) or FP8[name]
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    pattern = torch.arange(0, 100, dtype=integer)
    up = (pattern + 1).view(dtype)
    assert compare.ulp_distance(pattern.view(dtype), up).tolist() == [1] * 100
    if not name.endswith("fnuz"):
        one = pattern[1:2].view(dtype)
        negative = torch.tensor([-float(one.float())], dtype=torch.float32).to(dtype)
        assert compare.ulp_distance(one, negative).item() == 2
        zero = torch.zeros(1, dtype=torch.float32)
        assert compare.ulp_distance(zero.to(dtype), (-zero).to(dtype)).item() == 0


def test_within_ulps() -> None:
    """A tolerance in ulps lets that much through, and never a NaN on one side."""
    one = torch.tensor([1.0, math.nan])
    near = torch.tensor([next_up(1.0, torch.float32), math.nan])
    compare.assert_within_ulps(one, near, 1)
    with pytest.raises(AssertionError, match="1 ulp apart; allowed: 0 ulp"):
        compare.assert_within_ulps(one, near, 0)
    with pytest.raises(AssertionError, match="NaN on one side"):
        compare.assert_within_ulps(torch.tensor([1.0]), torch.tensor([math.nan]), 10)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        pytest.param([1.0, 2.0], [1.0, math.nan], id="compare-sqnr-nan-in-actual"),
        pytest.param([1.0, math.nan], [1.0, math.nan], id="compare-sqnr-nan-in-both"),
        pytest.param([1.0, math.inf], [1.0, 2.0], id="compare-sqnr-inf-in-expected"),
        pytest.param([1.0, math.inf], [1.0, math.inf], id="compare-sqnr-inf-in-both"),
        pytest.param([0.0, 0.0], [0.0, 0.0], id="compare-sqnr-no-signal"),
        pytest.param([], [], id="compare-sqnr-empty"),
        pytest.param([1.0, 2.0], [1.0], id="compare-sqnr-shape"),
    ],
)
def test_sqnr_nan_fails(expected: list[float], actual: list[float]) -> None:
    """What is no number is no quality: the SQNR is NaN and fails even a threshold of minus infinity."""
    left, right = torch.tensor(expected), torch.tensor(actual)
    assert math.isnan(compare.sqnr_db(left, right))
    with pytest.raises(AssertionError, match="SQNR nan dB"):
        compare.assert_sqnr(left, right, at_least=-math.inf)


def test_sqnr_value() -> None:
    """An error of a tenth of the signal is 20 dB; no error is infinitely many; the threshold is a floor."""
    signal = torch.full((8,), 10.0)
    assert compare.sqnr_db(signal, signal + 1.0) == pytest.approx(20.0)
    assert compare.sqnr_db(signal, signal) == math.inf
    assert compare.assert_sqnr(signal, signal + 1.0, at_least=19.9) == pytest.approx(20.0)
    with pytest.raises(AssertionError, match=r"20\.00 dB; expected at least 20\.10 dB"):
        compare.assert_sqnr(signal, signal + 1.0, at_least=20.1)


@pytest.mark.parametrize("layout", [pytest.param(name, id=f"compare-guard-{name}") for name in sorted(LAYOUTS)])
def test_guarded_view(layout: str) -> None:
    """A guarded view holds its values, and a write outside of it (or into it) is seen."""
    x = torch.arange(15.0).reshape(3, 5)
    held = guarded(x, layout)
    compare.assert_bits_equal(x, held.view)
    held.assert_untouched()
    held.buffer[0, 0] = 1.0
    with pytest.raises(AssertionError, match="input buffer after the op"):
        held.assert_untouched()


@pytest.mark.parametrize("dtype", [pytest.param(name, id=f"compare-rows-{name}") for name in sorted(DTYPES)])
def test_contract_rows_are_what_they_say(dtype: str) -> None:
    """The named rows hold their named amax exactly; names are unique; the same seed gives the same rows."""
    rows = contract_rows(DTYPES[dtype], 240.0, 17, seed=3)
    amax = dict(zip(rows.names, rows.x.to(torch.float64).abs().amax(1).tolist(), strict=True))
    assert len(amax) == len(rows.names) == rows.x.shape[0]
    assert amax["maximum"] == amax["neg-maximum"] == 240.0
    assert amax["maximum-ulp-up"] == next_up(240.0, DTYPES[dtype]) > 240.0 > next_down(240.0, DTYPES[dtype])
    assert amax["amax-2e-100-ulp-down"] < 2.0**-100 < amax["amax-2e-100-ulp-up"]
    assert amax["zeros"] == amax["negzeros"] == 0.0
    assert math.isnan(amax["nan"])
    assert amax["inf"] == math.inf
    assert 0 < amax["smallest-subnormal-amax"] < 2.0**-126
    compare.assert_bits_equal(rows.x, contract_rows(DTYPES[dtype], 240.0, 17, seed=3).x)
