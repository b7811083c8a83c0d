"""The saturating cast on every path: torch, torch.compile, and the Triton kernel (interpreted, or on the GPU).

Scales chosen from an amax never send a value beyond the maximum, so no quantisation test sees a missing clamp: these
rows do. Each is a case of its own by path, format and value, because "+Inf became NaN, but only compiled, only in
FNUZ" is what a report of the field looks like (pytorch/ao#1912, pytorch/pytorch#178817).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import cast
from suites.cases import DTYPES, FORMATS, LAYOUTS, from_bits, guarded, random_normal
from suites.compare import assert_bits_equal
from suites.numerics import oracle
from suites.numerics.golden import loader

PATHS = ("torch", "compiled", "kernel")

# The value of each row by the word of its case id, and the code it must become, typed per format.
ROWS: dict[str, float] = {
    "449": 449.0,
    "464": 464.0,
    "465": 465.0,
    "1000": 1000.0,
    "neg1000": -1000.0,
    "1e6": 1e6,
    "neg1e6": -1e6,
    "inf": math.inf,
    "neginf": -math.inf,
    "nan": math.nan,
    "248": 248.0,
    "neg0": -0.0,
    "neg1e-20": -1e-20,
}
CODES: dict[str, dict[str, int]] = {
    "e4m3fn": dict.fromkeys(("449", "464", "465", "1000", "1e6", "inf"), 0x7E)
    | dict.fromkeys(("neg1000", "neg1e6", "neginf"), 0xFE)
    | {"nan": 0x7F, "248": 0x78, "neg0": 0x80, "neg1e-20": 0x80},
    "e4m3fnuz": dict.fromkeys(("449", "464", "465", "1000", "1e6", "inf", "248"), 0x7F)
    | dict.fromkeys(("neg1000", "neg1e6", "neginf"), 0xFF)
    | {"nan": 0x80, "neg0": 0x00, "neg1e-20": 0x00},
    "e5m2": {"449": 0x5F, "464": 0x5F, "465": 0x5F, "1000": 0x64, "neg1000": 0xE4, "248": 0x5C}
    | {"1e6": 0x7B, "neg1e6": 0xFB, "inf": 0x7B, "neginf": 0xFB, "nan": 0x7F, "neg0": 0x80, "neg1e-20": 0x80},
    "e5m2fnuz": {"449": 0x63, "464": 0x63, "465": 0x63, "1000": 0x68, "neg1000": 0xE8, "248": 0x60}
    | {"1e6": 0x7F, "neg1e6": 0xFF, "inf": 0x7F, "neginf": 0xFF, "nan": 0x80, "neg0": 0x00, "neg1e-20": 0x00},
}


def row_input() -> torch.Tensor:
    """float32 (1, rows): the values of ROWS in order."""
    return torch.tensor([list(ROWS.values())])


def golden_input(fmt: str) -> torch.Tensor:
    """float32 (1, rows): the inputs of the golden encode rows."""
    return from_bits([row.bits for row in loader.encodes(fmt)], torch.float32).unsqueeze(0)


@cache
def compiled_codes(wrap: Callable[..., Any], device: str) -> dict[tuple[str, str], torch.Tensor]:
    """(input, format) -> uint8 codes by torch.compile, on the CPU. All in one graph: compiling costs seconds, running
    none.

    The inputs are "rows", "bf16" (all 65,536) and "golden".
    """
    narrow = oracle.all_bf16().to(device)
    rows = row_input()
    wide = [torch.cat([rows, golden_input(fmt)], dim=1).to(device) for fmt in FORMATS]

    def everything(narrow: torch.Tensor, wide: list[torch.Tensor]) -> list[torch.Tensor]:
        return [formats.encode(x, fmt) for fmt, x in zip(FORMATS, wide, strict=True)] + [
            formats.encode(narrow, fmt) for fmt in FORMATS
        ]

    codes = [result.cpu() for result in wrap(everything)(narrow, wide)]
    found: dict[tuple[str, str], torch.Tensor] = {}
    for index, fmt in enumerate(FORMATS):
        found["rows", fmt], found["golden", fmt] = codes[index].tensor_split([rows.shape[1]], dim=1)
        found["bf16", fmt] = codes[index + len(FORMATS)]
    return found


@pytest.fixture
def codes_by(request: pytest.FixtureRequest, device: str, call_op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``codes_by(path, name, fmt, x)``: uint8 codes of x by a path, on the CPU."""

    def codes(path: str, name: str, fmt: str, x: torch.Tensor) -> torch.Tensor:
        if path == "compiled":
            return compiled_codes(request.getfixturevalue("compiled"), device)[name, fmt]
        if path == "torch":
            return formats.cast(x.to(device), fmt).view(torch.uint8).cpu()
        return call_op("cast_saturating", cast.cast_saturating, x.to(device), fmt).view(torch.uint8).cpu()

    return codes


@pytest.mark.parametrize(
    ("fmt", "path", "word"),
    [
        pytest.param(fmt, path, word, id=f"cast-{fmt}-{path}-{word}")
        for path in PATHS
        for fmt in FORMATS
        for word in ROWS
    ],
)
def test_cast_rows(fmt: str, path: str, word: str, codes_by: Callable[..., torch.Tensor]) -> None:
    """Beyond the range the cast gives +-MAX, also for +-Inf; NaN becomes the NaN code; -0 exists in OCP only."""
    actual = codes_by(path, "rows", fmt, row_input())
    column = list(ROWS).index(word)
    expected = torch.tensor([CODES[fmt][word]], dtype=torch.uint8)
    assert_bits_equal(expected, actual[0, column : column + 1], f"code of {word} in {fmt} by {path}")


@pytest.mark.parametrize(
    ("fmt", "path"), [pytest.param(fmt, path, id=f"cast-{fmt}-{path}-golden") for path in PATHS for fmt in FORMATS]
)
def test_cast_golden(fmt: str, path: str, codes_by: Callable[..., torch.Tensor]) -> None:
    """Every midpoint and one float32 ulp to either side, both signs, and the named rows, become the golden codes."""
    actual = codes_by(path, "golden", fmt, golden_input(fmt))
    expected = torch.tensor([row.code for row in loader.encodes(fmt)], dtype=torch.uint8)
    assert_bits_equal(expected, actual[0], f"{fmt} codes by {path}", [row.name for row in loader.encodes(fmt)])


@pytest.mark.parametrize(
    ("fmt", "path"), [pytest.param(fmt, path, id=f"cast-{fmt}-{path}-all-bf16") for path in PATHS for fmt in FORMATS]
)
def test_cast_all_bf16(fmt: str, path: str, codes_by: Callable[..., torch.Tensor]) -> None:
    """All 65,536 bf16 values, subnormals and every NaN included; the coordinate is (high byte, low byte).

    Triton's interpreter adds bf16 as raw integers and rounds FP8 casts wrongly (triton-lang/triton#8322, #10945,
    #11584): every kernel widens bf16 with cast.float_bits, which is what is seen here, and casts on integers.
    """
    x = oracle.all_bf16()
    assert_bits_equal(oracle.codes(x, fmt), codes_by(path, "bf16", fmt, x), f"{fmt} codes by {path}")


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"cast-{fmt}-kernel-random") for fmt in FORMATS])
def test_cast_random(fmt: str, seed: int, codes_by: Callable[..., torch.Tensor]) -> None:
    """100,000 float32 bit patterns, uniform over all patterns: no sign, exponent or mantissa is special."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (100, 1000), generator=generator, dtype=torch.int64).to(torch.int32)
    x = x.view(torch.float32)
    assert_bits_equal(oracle.codes(x, fmt), codes_by("kernel", "", fmt, x), f"{fmt} codes")


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"cast-{fmt}-kernel-decode") for fmt in FORMATS])
def test_decode_kernel(fmt: str, device: str, call_op: Callable[..., Any]) -> None:
    """The kernel's decoder gives the golden value of all 256 codes; NaN is 0x7FC00000 (the interpreter says 480)."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for given in (codes, codes.view(formats.get(fmt).dtype)):
        assert_bits_equal(oracle.decode_table(fmt), call_op("decode_codes", cast.decode_codes, given, fmt), fmt)


@pytest.mark.parametrize(
    ("fmt", "layout"),
    [
        pytest.param(fmt, layout, id=f"cast-{fmt}-{layout}")
        for layout in LAYOUTS
        for fmt in (FORMATS if layout == "transposed" else FORMATS[1:2])
    ],
)
def test_cast_layout(fmt: str, layout: str, seed: int, device: str, call_op: Callable[..., Any]) -> None:
    """A view gives the codes of its values in row-major order, and nothing around it is read or written."""
    for dtype in DTYPES.values():
        held = guarded(random_normal((5, 129), dtype, seed, spread=8.0), layout, device)
        actual = call_op("cast_saturating", cast.cast_saturating, held.view, fmt)
        assert_bits_equal(oracle.codes(held.view, fmt), actual.view(torch.uint8), f"{fmt} codes of a {layout} view")
        assert actual.is_contiguous()
        held.assert_untouched()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((), id="cast-e4m3fnuz-scalar"),
        pytest.param((0,), id="cast-e4m3fnuz-no-elements"),
        pytest.param((0, 7), id="cast-e4m3fnuz-no-rows"),
        pytest.param((1,), id="cast-e4m3fnuz-one-element"),
        pytest.param((4097,), id="cast-e4m3fnuz-one-past-a-block"),
        pytest.param((3, 5, 7), id="cast-e4m3fnuz-3d"),
    ],
)
def test_cast_shape(shape: tuple[int, ...], seed: int, device: str, call_op: Callable[..., Any]) -> None:
    """Any shape, one element past a block and none at all included."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    actual = call_op("cast_saturating", cast.cast_saturating, x.to(device), "e4m3fnuz")
    assert_bits_equal(oracle.codes(x, "e4m3fnuz"), actual.view(torch.uint8), "e4m3fnuz codes")


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"cast-{fmt}-opcheck") for fmt in FORMATS])
def test_cast_opcheck(fmt: str, device: str) -> None:
    """The custom ops pass torch's own checks: schema, fake against real (also for views and no elements), tracing."""
    x = torch.randn((3, 17), device=device)
    for given in (x, x.to(torch.bfloat16).t(), x[:0]):
        torch.library.opcheck(torch.ops.fp8stack.cast_saturating.default, (given, fmt))
        torch.library.opcheck(torch.ops.fp8stack.decode_codes.default, (formats.encode(given, fmt), fmt))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float16, id="cast-unsupported-fp16"),
        pytest.param(torch.float64, id="cast-unsupported-fp64"),
        pytest.param(torch.int8, id="cast-unsupported-int8"),
        pytest.param(torch.float8_e4m3fn, id="cast-unsupported-e4m3fn"),
    ],
)
def test_cast_unsupported(dtype: torch.dtype, device: str) -> None:
    """What the kernel cannot load is refused by name before anything is launched."""
    x = torch.zeros((2, 2), dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device)
    with pytest.raises(UnsupportedDtype, match=str(dtype).replace(".", r"\.")):
        cast.cast_saturating(x.view(dtype), "e4m3fn")
