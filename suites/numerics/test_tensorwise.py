"""quantize_tensorwise and quantize_tensorwise_both: one scale for a whole 2-D tensor, its own or a given one.

Bit by bit against the golden units and the reference. A unit is a tensor here, so each is a call of its own: kernels
see many small tensors, and sizes that cross tiles in cases of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats, scaling
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch, tensorwise
from fp8stack.kernels.tensorwise import (
    quantize_tensorwise,
    quantize_tensorwise_both,
    quantize_tensorwise_both_reference,
    quantize_tensorwise_reference,
)
from suites.cases import DTYPES, FORMATS, LAYOUTS, SHAPES, TAIL_WIDTHS, contract_rows, from_bits, guarded, random_normal
from suites.compare import assert_bits_equal, assert_sqnr
from suites.numerics.golden import loader
from suites.numerics.thresholds import QUANTIZE_SQNR_DB, SIZE_CLASSES

# The interpreter multiplies and divides with NumPy, which warns where a NaN or the inverse of 2^-149 is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

MODES = {"plain": False, "pow2": True}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]


# Sizes around a tile, dense and not, with and without rows that are multiples of 16.
TILE_SHAPES: dict[str, tuple[int, int]] = {
    "24x40": (24, 40),
    "80x24": (80, 24),
    "257x300": (257, 300),
    "272x288": (272, 288),
    "16x5120": (16, 5120),
    "33x2049": (33, 2049),
}


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; the input may lie on the CPU."""

    def call(x: torch.Tensor, fmt: str, pow2: bool = False, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, torch.Tensor] = call_op(
            "quantize_tensorwise", quantize_tensorwise, on_device, fmt, pow2=pow2, **arguments
        )
        return result

    return call


@pytest.fixture
def quantize_both(device: str, call_op: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """quantize_tensorwise_both, likewise."""

    def call(x: torch.Tensor, fmt: str, pow2: bool = False, **arguments: Any) -> tuple[torch.Tensor, ...]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, ...] = call_op(
            "quantize_tensorwise_both", quantize_tensorwise_both, on_device, fmt, pow2=pow2, **arguments
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor,
    fmt: str,
    pow2: bool,
    result: tuple[torch.Tensor, torch.Tensor],
    name: str,
    column_major: bool = False,
) -> None:
    """Codes and inverse scale have the reference's bits, shapes and dtypes; codes have the layout asked for."""
    __tracebackhide__ = True
    expected_codes, expected_inverse = quantize_tensorwise_reference(x, fmt, pow2=pow2)
    codes, inverse = result
    assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale of {name}")
    assert_bits_equal(expected_codes, codes, f"{fmt} codes of {name}")
    assert (codes.t() if column_major else codes).is_contiguous(), f"codes have strides {codes.stride()}"


def cases(*suffixes: str, formats_: tuple[str, ...] = FORMATS, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    """(format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(fmt, dtype, suffix, id=f"tensorwise-{fmt}-{dtype}-{suffix}")
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


@pytest.mark.parametrize(
    ("fmt", "dtype", "mode"),
    [
        *cases("golden-plain", dtypes=("fp32",)),
        *cases("golden-pow2", formats_=("e4m3fnuz",), dtypes=("fp32",)),
    ],
)
def test_golden(fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, a tensor each, has its golden codes and inverse scale.

    The reference turns all of them into their codes (test_scaling.py); the kernel is slower to ask.
    """
    pow2 = mode == "golden-pow2"
    for unit in loader.units("tensorwise", fmt):
        if unit.dtype != dtype or unit.pow2 != pow2:
            continue
        x = torch.stack([from_bits(list(line), DTYPES[dtype]) for line in unit.x])
        codes, inverse = quantize(x, fmt, pow2)
        expected_inverse = from_bits([unit.inverse_scale], torch.float32).reshape(())
        assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale of {unit.name}")
        expected = torch.tensor(unit.codes, dtype=torch.uint8)
        assert_bits_equal(expected, codes.view(torch.uint8), f"{fmt} codes of {unit.name}")


@pytest.mark.parametrize(
    ("fmt", "dtype", "mode"),
    [
        *cases("contract-plain", dtypes=("bf16",)),
        *cases("contract-plain", formats_=("e4m3fn", "e4m3fnuz"), dtypes=("fp32",)),
        *cases("contract-pow2", formats_=("e4m3fnuz",), dtypes=("bf16",)),
    ],
)
def test_contract_rows(fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """Every contract row as a tensor of its own (3x17): equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 51, seed)
    for name, row in zip(rows.names, rows.x, strict=True):
        x = row.reshape(3, 17)
        assert_equals_reference(x, fmt, pow2, quantize(x, fmt, pow2), name)


@pytest.mark.parametrize(
    ("fmt", "dtype", "shape"),
    [*cases(*SHAPES), *cases(*TILE_SHAPES, formats_=("e4m3fnuz",)), *cases("272x288", formats_=("e4m3fn", "e5m2"))],
)
def test_shapes(fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: one element, no rows, prime rows, odd columns, one past a tile."""
    x = random_normal((SHAPES | TILE_SHAPES)[shape], DTYPES[dtype], seed)
    assert_equals_reference(x, fmt, False, quantize(x, fmt), shape)


@pytest.mark.parametrize(
    ("fmt", "dtype", "shape"),
    [
        *cases("1x1", "3x17", "2x129", "0x64", *list(TILE_SHAPES)[1:4], formats_=("e4m3fnuz",)),
        *cases("80x24", formats_=("e4m3fn", "e5m2", "e5m2fnuz"), dtypes=("bf16",)),
    ],
)
def test_layouts_of_codes(
    fmt: str,
    dtype: str,
    shape: str,
    seed: int,
    quantize: Op,
    quantize_both: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    """Column-major codes, and both layouts at once, hold what row-major ones hold; of a transposed input too."""
    x = random_normal((SHAPES | TILE_SHAPES)[shape], DTYPES[dtype], seed)
    for view in (x, x.t()):
        result = quantize(view, fmt, column_major=True)
        assert_equals_reference(view, fmt, False, result, shape, column_major=True)
        row_major, column_major, inverse = quantize_both(view, fmt)
        assert_equals_reference(view, fmt, False, (row_major, inverse), shape)
        assert_equals_reference(view, fmt, False, (column_major, inverse), shape, column_major=True)


@pytest.mark.parametrize(("fmt", "dtype", "layout"), cases(*LAYOUTS, formats_=("e4m3fn", "e4m3fnuz")))
def test_layouts(fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((13, 129), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    for column_major in (False, True):
        result = quantize(held.view, fmt, column_major=column_major)
        assert_equals_reference(x, fmt, False, result, layout, column_major)
    held.assert_untouched()


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_odd_strides(fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded gradient) and a start that no vector load likes (ROCm/TransformerEngine#623)."""
    x = random_normal((35, 70), DTYPES[dtype], seed).to(device)
    for view in (x[:1].expand(40, -1), x[:, :1].expand(-1, 33), x[:1, :1].expand(5, 7), x[1:, 1:], x[:, 1::2], x[::2]):
        for column_major in (False, True):
            result = quantize(view, fmt, column_major=column_major)
            assert_equals_reference(view, fmt, False, result, f"{tuple(view.stride())}", column_major)


@pytest.mark.parametrize(
    ("fmt", "width"),
    [pytest.param("e4m3fnuz", width, id=f"tensorwise-e4m3fnuz-tail-{width}") for width in TAIL_WIDTHS],
)
def test_tail_lanes_are_neutral(fmt: str, width: int, quantize: Op, device: str) -> None:
    """All values -3 has amax 3 at any width, among infinities (ROCm/aiter#4288)."""
    held = guarded(torch.full((3, width), -3.0, dtype=torch.bfloat16), "row-pitch", device)
    codes, inverse = quantize(held.view, fmt)
    expected = quantize_tensorwise_reference(torch.tensor([[-3.0]]), fmt)[1]
    assert_bits_equal(expected, inverse, f"{fmt} inverse scale of -3")
    assert codes.view(torch.uint8).unique().tolist() == [0xFF]  # -240


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"tensorwise-{fmt}-fp32-random-amax") for fmt in FORMATS])
def test_random_amax(fmt: str, seed: int, quantize: Op) -> None:
    """25 amax over all binades: the kernel's scales have the reference's bits (pytorch/pytorch#136181)."""
    generator = torch.Generator().manual_seed(seed)
    for bits in torch.randint(1, 0x7F800000, (25,), generator=generator).to(torch.int32):
        x = bits.view(torch.float32).reshape(1, 1)
        assert_equals_reference(x, fmt, False, quantize(x, fmt), f"amax {float(x)!r}")


def test_many_partial_maxima(seed: int, quantize: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The amax is over all partial maxima, also where they are more than one block reads at a time."""
    monkeypatch.setattr(tensorwise, "_PARTIALS", 2)
    x = random_normal((272, 288), torch.bfloat16, seed)
    x[-1, -1] = 1000.0  # in the last of them
    for column_major in (False, True):
        result = quantize(x, "e4m3fnuz", column_major=column_major)
        assert_equals_reference(x, "e4m3fnuz", False, result, "many maxima", column_major)


# --- a given scale ----------------------------------------------------------------------------------------------------

GIVEN = {
    "own": None,  # what the op would have found
    "one": [0x3F800000],
    "saturates": [0x461C4000],  # 10,000: most of it lies beyond MAX
    "tiny": [0x00000001],
    "nan": [0x7FC00000],
    "negative-nan": [0xFFC00001],
}


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases(*GIVEN, dtypes=("bf16",)))
def test_given_scale(
    fmt: str,
    dtype: str,
    word: str,
    seed: int,
    quantize: Op,
    quantize_both: Callable[..., tuple[torch.Tensor, ...]],
    device: str,
) -> None:
    """A given scale is used as it is; amax is not looked at, so NaN and Inf are those of single elements."""
    x = random_normal((40, 64), DTYPES[dtype], seed)
    x[3, 17], x[5, 0], x[6, 1] = torch.nan, torch.inf, -torch.inf
    given = GIVEN[word]
    scale = (
        scaling.scale_from_amax(scaling.amax(x[10:]), fmt, False) if given is None else from_bits(given, torch.float32)
    )
    expected = quantize_tensorwise_both_reference(x, fmt, False, scale)
    if word == "one":
        nan_code, maximum = formats.get(fmt).nan_code, formats.encode(torch.tensor([torch.inf]), fmt)[0]
        assert [int(expected[0].view(torch.uint8)[at]) for at in ((3, 17), (5, 0))] == [nan_code, int(maximum)]
    found = quantize_both(x, fmt, scale=scale.to(device))
    for what, wanted, result in zip(("row-major", "column-major", "inverse"), expected, found, strict=True):
        assert_bits_equal(wanted, result, f"{fmt} {word} {what}")
    for pow2 in MODES.values():
        codes, inverse = quantize(x, fmt, pow2, scale=scale.to(device))
        assert_bits_equal(expected[2], inverse, f"{fmt} {word} inverse scale")
        assert_bits_equal(expected[0], codes, f"{fmt} {word} codes")


def test_given_scale_of_nothing(quantize: Op, device: str) -> None:
    """An empty tensor has codes of its shape, and the inverse of the given scale."""
    scale = torch.tensor([4.0], device=device)
    for shape in ((0, 5), (5, 0)):
        codes, inverse = quantize(torch.zeros(shape), "e4m3fn", scale=scale)
        assert (tuple(codes.shape), float(inverse)) == (shape, 0.25)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"tensorwise-{fmt}-zero-row") for fmt in FORMATS])
def test_zero_row(fmt: str, seed: int, quantize: Op) -> None:
    """A zero row and a -0 row: zero codes there, every other code as without them (pytorch/ao#4713)."""
    x = random_normal((4, 64), torch.bfloat16, seed)
    x[1], x[2] = 0.0, -0.0
    codes, inverse = quantize(x, fmt)
    others, other_inverse = quantize(x[[0, 3]], fmt)
    assert_bits_equal(other_inverse, inverse, "inverse scale")
    assert_bits_equal(others, codes[[0, 3]], "codes of the other rows")
    negative = 0x80 if formats.get(fmt).negative_zero else 0x00
    assert codes.view(torch.uint8)[1:3].unique(dim=1).tolist() == [[0x00], [negative]]
    zeros, one = quantize(torch.zeros((4, 64), dtype=torch.bfloat16), fmt)
    assert (float(one), int(zeros.view(torch.uint8).max())) == (1.0, 0)


@pytest.mark.parametrize(
    ("fmt", "value"),
    [
        pytest.param(fmt, value, id=f"tensorwise-{fmt}-{word}")
        for fmt in FORMATS
        for word, value in (("nan", torch.nan), ("inf", torch.inf), ("neginf", -torch.inf))
    ],
)
def test_non_finite(fmt: str, value: float, seed: int, quantize: Op) -> None:
    """One NaN or infinity poisons the unit, which is the whole tensor: a caller sees it at once."""
    x = random_normal((8, 64), torch.bfloat16, seed)
    x[5, 17] = value
    codes, inverse = quantize(x, fmt)
    assert_bits_equal(from_bits([0x7FC00000], torch.float32).reshape(()), inverse, "inverse scale")
    assert codes.view(torch.uint8).unique().tolist() == [formats.get(fmt).nan_code]


@pytest.mark.parametrize(
    ("fmt", "size"),
    [pytest.param(fmt, size, id=f"tensorwise-{fmt}-fp32-sqnr-{size}") for fmt in FORMATS for size in SIZE_CLASSES],
)
def test_sqnr(fmt: str, size: str, seed: int, quantize: Op, record_property: Callable[[str, object], None]) -> None:
    """Quantised normal data keeps the signal-to-noise ratio of its format, in its own row of the table."""
    x = torch.randn(SIZE_CLASSES[size], generator=torch.Generator().manual_seed(seed))
    threshold = QUANTIZE_SQNR_DB[fmt, "tensorwise", size]
    for word, pow2 in MODES.items():
        codes, inverse = quantize(x, fmt, pow2)
        measured = assert_sqnr(x, formats.decode(codes, fmt) * inverse, threshold.at_least, f"{fmt} {word}")
        record_property(f"sqnr_{word}_db", measured)


@pytest.mark.usefixtures("large_memory")
def test_offsets_past_2e31(quantize: Op, device: str, tmp_path: Path) -> None:
    """Rows whose offset passes 2^31 elements are found: index arithmetic has 64 bits. The buffer is sparse."""
    pitch, width = 2**30, 33
    size = 2 * pitch + width
    if device == "cpu":
        buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(size, dtype=torch.bfloat16, device=device)
    view = buffer.as_strided((3, width), (pitch, 1))
    x = random_normal((3, width), torch.bfloat16, seed=5)
    view.copy_(x.to(device))
    for column_major in (False, True):
        result = quantize(view, "e4m3fnuz", column_major=column_major)
        assert_equals_reference(x, "e4m3fnuz", False, result, "far rows", column_major)


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="tensorwise-e4m3fnuz-bf16-repeatable")])
def test_repeatable(fmt: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    x = random_normal((257, 300), torch.bfloat16, seed)
    before = x.clone()
    first = quantize(x, fmt)
    for expected, actual in zip(first, quantize(x, fmt), strict=True):
        assert_bits_equal(expected, actual, "second run")
    assert_bits_equal(before, x, "input after the op")


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"tensorwise-{fmt}-opcheck") for fmt in ("e4m3fnuz",)])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom ops pass torch's own checks; fake and real agree in shape, dtype, stride, for views and M = 0 too."""
    x = torch.randn((3, 17), device=device)
    scale = torch.tensor(2.0, device=device)
    op, both = torch.ops.fp8stack.quantize_tensorwise.default, torch.ops.fp8stack.quantize_tensorwise_both.default
    for given in (x, x.to(torch.bfloat16).t(), x[:0], x[:1]):
        torch.library.opcheck(op, (given, fmt, False, None, False))
        torch.library.opcheck(op, (given, fmt, False, scale, True))
        torch.library.opcheck(both, (given, fmt, False, None))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        pytest.param(
            torch.zeros((2, 2), dtype=torch.float16), UnsupportedDtype, "float16", id="tensorwise-refuses-fp16"
        ),
        pytest.param(torch.zeros((2, 2), dtype=torch.int32), UnsupportedDtype, "int32", id="tensorwise-refuses-int32"),
        pytest.param(torch.zeros(4), ValueError, "two dimensions", id="tensorwise-refuses-1d"),
        pytest.param(torch.zeros((1, 2, 3)), ValueError, "two dimensions", id="tensorwise-refuses-3d"),
    ],
)
def test_refuses(x: torch.Tensor, error: type[Exception], words: str, device: str) -> None:
    """Other dtypes and ranks are refused by name."""
    with pytest.raises(error, match=words):
        quantize_tensorwise(x.to(device), "e4m3fn")


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(torch.ones(2), id="tensorwise-refuses-two-scales"),
        pytest.param(torch.ones((), dtype=torch.float64), id="tensorwise-refuses-fp64-scale"),
    ],
)
def test_refuses_scale(scale: torch.Tensor, device: str) -> None:
    """A scale that is not one float32 number is refused."""
    with pytest.raises(ValueError, match="one float32 number"):
        quantize_tensorwise(torch.ones((2, 2), device=device), "e4m3fn", scale=scale.to(device))


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, every layout; parts divide the rows of a tile."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for layout in tensorwise.LAYOUTS:
            row = launch.config(tensorwise.TENSORWISE_CONFIGS, arch, layout)
            assert row.rows % row.parts == 0
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(tensorwise.TENSORWISE_CONFIGS, "gfx9-4-generic", "row")


# --- the thresholds ---------------------------------------------------------------------------------------------------


def test_thresholds_are_one_a_key() -> None:
    """Every (format, granularity, size class) has its own row above its floor: relaxing one leaves the rest."""
    from suites.numerics import thresholds

    expected = {(f, g, s) for f in FORMATS for g in ("rowwise", "tensorwise") for s in SIZE_CLASSES}
    assert expected == set(QUANTIZE_SQNR_DB)
    for (fmt, _, _), row in QUANTIZE_SQNR_DB.items():
        assert thresholds.FLOORS[fmt] <= row.at_least == pytest.approx(row.worst - thresholds.MARGIN_DB)
    assert len({id(row) for row in QUANTIZE_SQNR_DB.values()}) == len(QUANTIZE_SQNR_DB)
