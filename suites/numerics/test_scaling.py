"""From amax to scale: one rule for every scaling unit, the same bits on every path.

Expected bits come from exact arithmetic in whole numbers (golden/generate.py), never from a floating-point quotient of
this process. The kernels repeat these rules; test_rowwise.py and test_tensorwise.py hold them to the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fp8stack import formats, scaling
from fp8stack.formats import UnsupportedDtype
from suites.cases import DTYPES, FORMATS, from_bits, next_down, next_up
from suites.compare import assert_bits_equal
from suites.numerics.golden import generate, loader

EACH_FORMAT = [pytest.param(fmt, id=f"scaling-{fmt}") for fmt in FORMATS]
EACH_MODE = [
    pytest.param(fmt, pow2, id=f"scaling-{fmt}-{word}")
    for fmt in FORMATS
    for word, pow2 in (("pow2", True), ("plain", False))
]


def float32(*patterns: int) -> torch.Tensor:
    """float32 tensor from bit patterns."""
    return from_bits(list(patterns), torch.float32)


def exact_scales(amax_bits: list[int], fmt: str, pow2: bool) -> torch.Tensor:
    """The scales by whole-number arithmetic, float32 (len,)."""
    spec = generate.SPECS[fmt]
    return float32(*(generate.scale_from_amax(bits, spec, pow2) for bits in amax_bits))


def random_amax_bits(count: int, seed: int) -> list[int]:
    """Bit patterns of positive finite float32, uniform over the patterns: every binade, subnormals too."""
    source = random.Random(seed)
    return [source.randrange(1, 0x7F800000) for _ in range(count)]


# --- the rows that name a mistake -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_scale_of_the_maximum(fmt: str, pow2: bool, device: str) -> None:
    """amax = MAX gives scale 1 and the code of MAX: 240 -> 0x7F in e4m3fnuz. The one row that sees a wrong constant."""
    maximum = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "e5m2fnuz": 57344.0}[fmt]
    code = {"e4m3fn": 0x7E, "e4m3fnuz": 0x7F, "e5m2": 0x7B, "e5m2fnuz": 0x7F}[fmt]
    x = torch.tensor([[maximum, 1.0, -maximum]], device=device)
    scale = scaling.scale_from_amax(scaling.amax(x, dim=1), fmt, pow2=pow2)
    assert_bits_equal(float32(0x3F800000), scale, f"{fmt} scale of amax {maximum}")
    codes, inverse = scaling.quantize_reference(x, fmt, dim=1, pow2=pow2)
    assert_bits_equal(float32(0x3F800000), inverse, f"{fmt} inverse scale of amax {maximum}")
    assert codes.view(torch.uint8)[0, ::2].tolist() == [code, code | 0x80]


def test_quotient_is_not_taken_in_bf16(device: str) -> None:
    """bf16 amax 4.28125: the scale is float32 448 / 4.28125 = 0x42D148E0, not 104.5 (pytorch/pytorch#136181)."""
    x = torch.tensor([[4.28125, -1.0]], dtype=torch.bfloat16, device=device)
    scale = scaling.scale_from_amax(scaling.amax(x, dim=1), "e4m3fn", pow2=False)
    assert_bits_equal(float32(0x42D148E0), scale, "scale of amax 4.28125")


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_pow2_ladder(fmt: str, device: str) -> None:
    """amax = MAX * 2^-k, k = -100..40, gives exactly 2^k, an ulp up 2^(k-1), an ulp down 2^k: no log2 drops a step."""
    maximum = formats.get(fmt).max
    names, amax, expected = [], [], []
    for k in range(-100, 41):
        exact = maximum * 2.0**-k
        for word, value, exponent in (
            ("", exact, k),
            ("-ulp-up", next_up(exact, torch.float32), k - 1),
            ("-ulp-down", next_down(exact, torch.float32), k),
        ):
            names.append(f"k={k}{word}")
            amax.append(value)
            expected.append(2.0**exponent)
    actual = scaling.scale_from_amax(torch.tensor(amax, device=device), fmt, pow2=True)
    assert_bits_equal(torch.tensor(expected), actual, f"{fmt} pow2 scale", names)


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_scale_bits(fmt: str, pow2: bool, seed: int, device: str) -> None:
    """The scale has the bits of the correctly rounded, capped quotient: 1,000 amax over all binades, and the edges."""
    edges = [1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F7FFFFE, 0x3F800000, 0x3F7FFFFF, 0x3F800001]
    bits = edges + random_amax_bits(1000, seed)
    actual = scaling.scale_from_amax(float32(*bits).to(device), fmt, pow2=pow2)
    assert_bits_equal(exact_scales(bits, fmt, pow2), actual, f"{fmt} scale", [f"amax 0x{b:08x}" for b in bits])


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_inverse_bits(fmt: str, pow2: bool, seed: int, device: str) -> None:
    """The inverse is 1 / scale rounded to nearest, for the scales of 1,000 amax; exact for powers of two."""
    bits = random_amax_bits(1000, seed)
    scales = exact_scales(bits, fmt, pow2)
    patterns = [int(b) & 0xFFFFFFFF for b in scales.view(torch.int32)]
    expected = float32(*(generate.inverse_scale(b) for b in patterns))
    actual = scaling.inverse_scale(scales.to(device))
    assert_bits_equal(expected, actual, f"{fmt} inverse scale", [f"scale 0x{b:08x}" for b in patterns])
    assert bool((actual.abs() >= 2.0**-126).all()), "an inverse scale is subnormal"
    if pow2:
        assert bool((actual.cpu() * scales == 1.0).all()), "the inverse of a power of two is not exact"


def test_inverse_is_not_amax_over_max() -> None:
    """1 / scale and amax / MAX are two numbers: they differ in about a quarter of all cases."""
    amax = torch.rand(4000, generator=torch.Generator().manual_seed(1)) + 0.5
    inverse = scaling.inverse_scale(scaling.scale_from_amax(amax, "e4m3fn", pow2=False))
    share = float((inverse != (amax.to(torch.float64) / 448.0).to(torch.float32)).to(torch.float32).mean())
    assert 0.1 < share < 0.5, share


# --- zeros, NaN, Inf, the cap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_zero_unit(fmt: str, pow2: bool, device: str) -> None:
    """A zero unit has scale 1 and zero codes; -0 keeps its sign in OCP and has none in FNUZ (pytorch/ao#4713)."""
    x = torch.tensor([[0.0, 0.0], [-0.0, -0.0], [0.0, -0.0]], device=device)
    codes, inverse = scaling.quantize_reference(x, fmt, dim=1, pow2=pow2)
    assert_bits_equal(torch.ones(3), inverse, f"{fmt} inverse scale of zeros")
    negative = 0x00 if fmt.endswith("fnuz") else 0x80
    assert codes.view(torch.uint8).tolist() == [[0, 0], [negative, negative], [0, negative]]


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_non_finite_unit(fmt: str, pow2: bool, device: str) -> None:
    """A NaN or an infinity poisons its unit, all of it, and no other: scale 0x7FC00000, every code the NaN code."""
    clean = torch.tensor([[1.0, 2.0, -3.0]] * 6, device=device)
    x = clean.clone()
    for row, value in ((1, torch.nan), (2, torch.inf), (4, -torch.inf)):
        x[row, row % 3] = value
    x.view(torch.int32)[5, 0] = -1  # a NaN with its sign and every payload bit
    scale = scaling.scale_from_amax(scaling.amax(x, dim=1), fmt, pow2=pow2)
    codes, inverse = scaling.quantize_reference(x, fmt, dim=1, pow2=pow2)
    clean_codes, clean_inverse = scaling.quantize_reference(clean, fmt, dim=1, pow2=pow2)
    bad, good = [1, 2, 4, 5], [0, 3]
    for what, value in (("scale", scale), ("inverse scale", inverse)):
        assert_bits_equal(float32(*[0x7FC00000] * 4), value[bad], f"{fmt} {what} of a non-finite unit")
    nan_code = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e5m2": 0x7F, "e5m2fnuz": 0x80}[fmt]
    assert codes.view(torch.uint8)[bad].tolist() == [[nan_code] * 3] * 4
    assert_bits_equal(clean_codes[good], codes[good], f"{fmt} codes of the other units")
    assert_bits_equal(clean_inverse[good], inverse[good], f"{fmt} inverse scale of the other units")


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_cap(fmt: str, pow2: bool, device: str) -> None:
    """The scale stops at 2^120, and not before: the quotient just below it keeps its bits."""
    edge = formats.get(fmt).max * 2.0**-120
    amax = torch.tensor([2.0**-149, 1e-38, next_down(edge, torch.float32), edge, next_up(edge, torch.float32)])
    scale = scaling.scale_from_amax(amax.to(device), fmt, pow2=pow2).cpu()
    assert scale[:4].tolist() == [2.0**120] * 4
    assert 2.0**119 <= float(scale[4]) < 2.0**120
    assert float(scaling.inverse_scale(scale).min()) == 2.0**-120


@pytest.mark.parametrize(("fmt", "pow2"), EACH_MODE)
def test_no_epsilon(fmt: str, pow2: bool, device: str) -> None:
    """A tiny amax has the scale of its own quotient: no recipe raises it to a floor (ROCm/TransformerEngine#737)."""
    values = [1e-6, 1e-12, 1e-13, 1e-20, 1e-30, 0.0]
    amax = torch.tensor(values)
    bits = [int(b) for b in amax.view(torch.int32)]
    actual = scaling.scale_from_amax(amax.to(device), fmt, pow2=pow2)
    assert_bits_equal(exact_scales(bits, fmt, pow2), actual, f"{fmt} scale", [f"amax {v}" for v in values])
    x = torch.tensor([[1e-20, -5e-21, 0.0]], device=device)
    codes, inverse = scaling.quantize_reference(x, fmt, dim=1, pow2=pow2)
    back = formats.decode(codes, fmt) * inverse.unsqueeze(1)
    assert float((back - x).abs().max()) <= 1e-20 * 2.0**-3, "a gradient of 1e-20 vanished"


# --- amax -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param(name, id=f"scaling-amax-{name}") for name in DTYPES])
def test_amax(dtype: str, seed: int, device: str) -> None:
    """amax is float32 and exact, over a row, a column or all, of views and of subnormals too; NaN and Inf stay."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((5, 13), generator=generator).to(DTYPES[dtype]).to(device)
    x[1] = 2.0**-133
    wide = x.to(torch.float64).abs()
    for dim in (0, 1):
        assert_bits_equal(wide.amax(dim).to(torch.float32), scaling.amax(x, dim=dim), f"amax over dim {dim}")
        assert_bits_equal(wide.t().amax(dim).to(torch.float32), scaling.amax(x.t(), dim=dim), "amax of a view")
    assert_bits_equal(wide.amax().to(torch.float32), scaling.amax(x), "amax over everything")
    x[0, 3], x[2, 1], x[3, 0] = torch.nan, -torch.inf, torch.inf
    rows = scaling.amax(x, dim=1).cpu()
    assert rows.isnan().tolist() == [True, False, False, False, False]
    assert rows[2:4].tolist() == [torch.inf, torch.inf]


def test_amax_of_nothing(device: str) -> None:
    """Over no elements the amax is 0, so the scale is 1; over no rows there is no scale."""
    assert scaling.amax(torch.zeros((3, 0), device=device), dim=1).tolist() == [0.0, 0.0, 0.0]
    assert scaling.amax(torch.zeros((0, 3), device=device), dim=1).shape == (0,)
    assert scaling.amax(torch.zeros((0, 3), device=device)).shape == ()


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.int32, id="scaling-amax-int32"), pytest.param(torch.float64, id="scaling-amax-fp64")],
)
def test_amax_unsupported(dtype: torch.dtype) -> None:
    """Integers and float64 are refused by name."""
    with pytest.raises(UnsupportedDtype, match=str(dtype).replace(".", r"\.")):
        scaling.amax(torch.ones((2, 2), dtype=dtype), dim=1)


# --- golden rows and compiled code ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "fmt"), [pytest.param(op, fmt, id=f"scaling-{fmt}-golden-{op}") for fmt in FORMATS for op in loader.OPS]
)
def test_reference_golden(op: str, fmt: str, device: str) -> None:
    """The reference turns every golden unit into its golden codes and inverse scale."""
    for unit in loader.units(op, fmt):
        dtype = DTYPES[unit.dtype]
        x = torch.stack([from_bits(list(line), dtype) for line in unit.x]).to(device)
        codes, inverse = scaling.quantize_reference(x, fmt, dim=1 if op == "rowwise" else None, pow2=unit.pow2)
        name = f"{op} {fmt} {unit.name} {unit.dtype} pow2={unit.pow2}"
        expected = torch.tensor(unit.codes, dtype=torch.uint8)
        assert_bits_equal(expected, codes.view(torch.uint8), f"codes of {name}")
        shape = (1,) if op == "rowwise" else ()
        assert_bits_equal(float32(unit.inverse_scale).reshape(shape), inverse, f"inverse scale of {name}")


def test_scale_compiled(
    compiled: Callable[[Callable[..., object]], Callable[..., object]], seed: int, device: str
) -> None:
    """1,000 amax: torch.compile gives the scales and inverses of eager mode bit by bit, in every format and mode."""
    bits = [0, 0x7F800000, 0x7FC00000, 1, 0x3F800000, 0x408A0000, *random_amax_bits(994, seed)]
    amax = float32(*bits).to(device)

    def everything(amax: torch.Tensor) -> list[torch.Tensor]:
        scales = [scaling.scale_from_amax(amax, fmt, pow2=pow2) for fmt in FORMATS for pow2 in (True, False)]
        return scales + [scaling.inverse_scale(scale) for scale in scales]

    names = [f"amax 0x{b:08x}" for b in bits]
    for expected, actual in zip(everything(amax), compiled(everything)(amax), strict=True):
        assert_bits_equal(expected, actual, "scale, compiled", names)
