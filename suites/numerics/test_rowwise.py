"""quantize_rowwise: codes and inverse scales, bit by bit, against the golden rows and against the reference.

Contract rows are batched: one tensor a format and dtype holds every named row, and a failure names the row. What a row
does to its neighbours, widths, layouts and sizes are cases of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import rowwise
from fp8stack.kernels.rowwise import quantize_rowwise, quantize_rowwise_reference
from suites.cases import (
    BIG_SHAPES,
    DTYPES,
    FORMATS,
    LAYOUTS,
    SHAPES,
    TAIL_WIDTHS,
    WIDE_SHAPES,
    amax_at_the_ends,
    contract_rows,
    from_bits,
    guarded,
    random_normal,
)
from suites.compare import assert_bits_equal, assert_sqnr
from suites.numerics import oracle
from suites.numerics.golden import loader
from suites.numerics.thresholds import QUANTIZE_SQNR_DB, SIZE_CLASSES

# The interpreter multiplies and divides with NumPy, which warns where a NaN row is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

MODES = {"pow2": True, "plain": False}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; the input may lie on the CPU."""

    def call(x: torch.Tensor, fmt: str, pow2: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, torch.Tensor] = call_op(
            "quantize_rowwise", quantize_rowwise, on_device, fmt, pow2=pow2
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor, fmt: str, pow2: bool, result: tuple[torch.Tensor, torch.Tensor], rows: list[str] | None = None
) -> None:
    """Codes and inverse scale have the reference's bits, shapes and dtypes; codes are row-major."""
    __tracebackhide__ = True
    expected_codes, expected_inverse = quantize_rowwise_reference(x, fmt, pow2=pow2)
    codes, inverse = result
    # The scale first: where it is wrong, every code of the row is, and says less.
    assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale", rows)
    assert_bits_equal(expected_codes, codes, f"{fmt} codes", rows)
    assert codes.is_contiguous(), f"codes have strides {codes.stride()}; expected row-major"
    assert inverse.is_contiguous(), f"inverse scale has strides {inverse.stride()}; expected contiguous"


def cases(*suffixes: str, formats_: tuple[str, ...] = FORMATS, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    """(format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(fmt, dtype, suffix, id=f"rowwise-{fmt}-{dtype}-{suffix}")
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


# --- against the golden rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "dtype", "mode"), cases("golden-pow2", "golden-plain"))
def test_golden(fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, one a row (padded with zeros: amax is the same), has its golden codes and inverse scale."""
    pow2 = mode == "golden-pow2"
    units = [unit for unit in loader.units("rowwise", fmt) if unit.dtype == dtype and unit.pow2 == pow2]
    width = max(len(unit.x[0]) for unit in units) + 1
    names = [unit.name for unit in units]
    x = torch.stack([from_bits([*unit.x[0], *[0] * (width - len(unit.x[0]))], DTYPES[dtype]) for unit in units])
    codes, inverse = quantize(x, fmt, pow2)
    expected_inverse = from_bits([unit.inverse_scale for unit in units], torch.float32)
    assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale", names)
    nan_code = formats.get(fmt).nan_code
    padding = [nan_code if unit.scale == 0x7FC00000 else 0 for unit in units]
    expected = torch.tensor(padding, dtype=torch.uint8).unsqueeze(1).repeat(1, width)
    for row, unit in enumerate(units):
        expected[row, : len(unit.codes[0])] = torch.tensor(unit.codes[0], dtype=torch.uint8)
    assert_bits_equal(expected, codes.view(torch.uint8), f"{fmt} codes", names)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-bf16-maximum-row") for fmt in FORMATS])
def test_maximum_row(fmt: str, quantize: Op) -> None:
    """amax = MAX gives inverse scale 1 and the code of MAX, at any place of the row: 240 -> 0x7F in e4m3fnuz."""
    maximum = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "e5m2fnuz": 57344.0}[fmt]
    code = {"e4m3fn": 0x7E, "e4m3fnuz": 0x7F, "e5m2": 0x7B, "e5m2fnuz": 0x7F}[fmt]
    x = torch.eye(17, dtype=torch.bfloat16) * maximum
    x[1::2] *= -1
    for pow2 in MODES.values():
        codes, inverse = quantize(x, fmt, pow2)
        assert_bits_equal(torch.ones(17), inverse, f"{fmt} inverse scale of amax {maximum}")
        assert codes.view(torch.uint8).diagonal()[:2].tolist() == [code, code | 0x80]


# --- against the reference: contract rows, shapes, layouts ------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "dtype", "mode"), cases("contract-pow2", "contract-plain"))
def test_contract_rows(fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, at a width inside a block and at one past it: equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    for width in (17, 129):
        rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, width, seed)
        assert_equals_reference(rows.x, fmt, pow2, quantize(rows.x, fmt, pow2), list(rows.names))


@pytest.mark.parametrize(
    ("fmt", "dtype", "shape"),
    [
        *cases(*SHAPES),
        *cases(*WIDE_SHAPES, dtypes=("bf16",)),
        *cases(*WIDE_SHAPES, formats_=("e4m3fnuz",), dtypes=("fp32",)),
        *cases(*BIG_SHAPES, formats_=("e4m3fn", "e4m3fnuz"), dtypes=("bf16",)),
    ],
)
def test_shapes(fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: one element, no rows, prime rows, odd columns, one past a block, longer than any block.

    In the default mode: how a scale is rounded has nothing to do with a size, and the contract rows see both.
    """
    x = amax_at_the_ends(random_normal((SHAPES | WIDE_SHAPES | BIG_SHAPES)[shape], DTYPES[dtype], seed), -1)
    assert_equals_reference(x, fmt, True, quantize(x, fmt))


@pytest.mark.parametrize(("fmt", "dtype", "layout"), cases(*LAYOUTS))
def test_layouts(fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((13, 129), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    assert_equals_reference(x, fmt, True, quantize(held.view, fmt))
    held.assert_untouched()


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases("expanded", "offset", formats_=("e4m3fn", "e4m3fnuz")))
def test_odd_strides(fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded row, an expanded column) and a start that no vector load likes."""
    x = random_normal((5, 1025), DTYPES[dtype], seed).to(device)
    views = {
        "expanded": [x[:1].expand(7, -1), x[:, :1].expand(-1, 33)],
        "offset": [x[1:, 1:], x[:, 3:20], x[:, 1::2]],
    }[word]
    for view in views:
        assert_equals_reference(view, fmt, True, quantize(view, fmt))


@pytest.mark.parametrize(
    ("fmt", "width"),
    [pytest.param(fmt, width, id=f"rowwise-{fmt}-tail-{width}") for fmt in FORMATS for width in TAIL_WIDTHS],
)
def test_tail_lanes_are_neutral(fmt: str, width: int, quantize: Op, device: str) -> None:
    """All values -3 gives amax 3 at any width, in row 0 as elsewhere, among infinities (ROCm/aiter#4288)."""
    x = torch.full((3, width), -3.0, dtype=torch.bfloat16)
    held = guarded(x, "row-pitch", device)
    codes, inverse = quantize(held.view, fmt)
    assert_bits_equal(
        quantize_rowwise_reference(torch.tensor([[-3.0]] * 3), fmt)[1], inverse, f"{fmt} inverse scale of -3"
    )
    back = formats.decode(codes, fmt) * inverse.unsqueeze(1)
    assert back.cpu().tolist() == [[-3.0] * width] * 3


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-fp32-pow2-ladder") for fmt in FORMATS])
def test_pow2_ladder(fmt: str, quantize: Op) -> None:
    """amax = MAX * 2^-k for k = -100..40, and one float32 ulp to either side: the kernel takes no approximate log2."""
    exact = formats.get(fmt).max * torch.exp2(-torch.arange(-100, 41, dtype=torch.float64)).to(torch.float32)
    bits = exact.view(torch.int32)
    x = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)]).unsqueeze(1)
    names = [f"k={k}{word}" for word in ("-ulp-down", "", "-ulp-up") for k in range(-100, 41)]
    for pow2 in MODES.values():
        assert_equals_reference(x, fmt, pow2, quantize(x, fmt, pow2), names)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-fp32-random-amax") for fmt in FORMATS])
def test_random_amax(fmt: str, seed: int, quantize: Op) -> None:
    """1,000 amax over all binades: the kernel's quotients have the reference's bits (pytorch/pytorch#136181)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 0x7F800000, (1000, 1), generator=generator).to(torch.int32).view(torch.float32)
    names = [f"amax {v!r}" for v in x[:, 0].tolist()]
    assert_equals_reference(x, fmt, False, quantize(x, fmt, False), names)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-bf16-all-bf16") for fmt in FORMATS])
def test_all_bf16(fmt: str, quantize: Op) -> None:
    """All 65,536 bf16 values, 256 a row (one high byte) beside the maximum: the scale is 1 in every row up to there.

    Both signs, and an amax over them, in the interpreter as on a GPU (triton-lang/triton#8322, #10945, #11584).
    """
    values = oracle.all_bf16()
    x = torch.cat([values, torch.full_like(values[:, :1], formats.get(fmt).max)], dim=1)
    names = [f"high byte {byte:#04x}" for byte in range(256)]
    assert_equals_reference(x, fmt, True, quantize(x, fmt), names)


# --- what a row does to its neighbours --------------------------------------------------------------------------------

# Row 3 of an 8x64 tensor is spoilt at one place, or all of it.
SPOILS: dict[str, tuple[float, bool]] = {
    "nan-row": (float("nan"), False),
    "all-nan-row": (float("nan"), True),
    "inf-row": (float("inf"), False),
    "neginf-row": (float("-inf"), False),
    "zero-row": (0.0, True),
    "negzero-row": (-0.0, True),
}


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases(*SPOILS))
def test_neighbours(fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their row whole; a zero row has scale 1 and zero codes; every other row is bit-unchanged."""
    value, whole = SPOILS[word]
    clean = random_normal((8, 64), DTYPES[dtype], seed)
    x = clean.clone()
    x[3, slice(None) if whole else slice(17, 18)] = value
    others = [row for row in range(8) if row != 3]
    row = formats.get(fmt)
    for pow2 in MODES.values():
        codes, inverse = quantize(x, fmt, pow2)
        clean_codes, clean_inverse = quantize(clean, fmt, pow2)
        names = [f"row {other}" for other in others]
        assert_bits_equal(clean_inverse[others], inverse[others], "inverse scale of the other rows", names)
        assert_bits_equal(clean_codes[others], codes[others], "codes of the other rows", names)
        if value == 0.0:
            code = 0x80 if word == "negzero-row" and row.negative_zero else 0x00
            assert_bits_equal(torch.ones(1), inverse[3:4], "inverse scale of the zero row")
        else:
            code = row.nan_code
            nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
            assert_bits_equal(nan, inverse[3:4], f"inverse scale of the {word}")
        expected = torch.full((64,), code, dtype=torch.uint8)
        assert_bits_equal(expected, codes[3].view(torch.uint8), f"codes of the {word}")


# --- size, determinism, quality, refusals -----------------------------------------------------------------------------


@pytest.mark.usefixtures("large_memory")
def test_offsets_past_2e31(quantize: Op, device: str, tmp_path: Path) -> None:
    """Rows whose offset passes 2^31 elements are found: index arithmetic has 64 bits. The buffer (4.3 GB) is sparse."""
    pitch, width = 2**30, 33
    size = 2 * pitch + width
    if device == "cpu":
        buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(size, dtype=torch.bfloat16, device=device)
    view = buffer.as_strided((3, width), (pitch, 1))
    x = random_normal((3, width), torch.bfloat16, seed=5)
    view.copy_(x.to(device))
    assert_equals_reference(x, "e4m3fnuz", True, quantize(view, "e4m3fnuz"))


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-bf16-repeatable") for fmt in FORMATS])
def test_repeatable(fmt: str, seed: int, quantize: Op) -> None:
    """The same input gives the same bits again, and is not written to."""
    x = random_normal((37, 781), torch.bfloat16, seed)
    before = x.clone()
    first = quantize(x, fmt)
    for expected, actual in zip(first, quantize(x, fmt), strict=True):
        assert_bits_equal(expected, actual, "second run")
    assert_bits_equal(before, x, "input after the op")


@pytest.mark.parametrize(("fmt", "dtype", "size"), cases(*(f"sqnr-{size}" for size in SIZE_CLASSES), dtypes=("fp32",)))
def test_sqnr(
    fmt: str, dtype: str, size: str, seed: int, quantize: Op, record_property: Callable[[str, object], None]
) -> None:
    """Quantised normal data keeps the signal-to-noise ratio of its format, in its own row of the table."""
    shape = SIZE_CLASSES[size.removeprefix("sqnr-")]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
    threshold = QUANTIZE_SQNR_DB[fmt, "rowwise", size.removeprefix("sqnr-")]
    for word, pow2 in MODES.items():
        codes, inverse = quantize(x, fmt, pow2)
        back = formats.decode(codes, fmt) * inverse.unsqueeze(1)
        record_property(f"sqnr_{word}_db", assert_sqnr(x, back, threshold.at_least, f"{fmt} {word}"))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, id=f"rowwise-{fmt}-by-{word}")
        for fmt in FORMATS
        for word, given in (("name", fmt), ("dtype", formats.get(fmt).dtype), ("format", formats.get(fmt)))
    ],
)
def test_format_by_any_name(given: str | torch.dtype | formats.Format, quantize: Op) -> None:
    """A format may be given by name, torch dtype or row; the codes have its dtype."""
    codes, _ = quantize(torch.ones((1, 3)), given)  # type: ignore[arg-type]
    assert codes.dtype is formats.get(given).dtype


# One format a dialect: the schema and the fake do not know the others apart.
@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"rowwise-{fmt}-opcheck") for fmt in ("e4m3fn", "e4m3fnuz")])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree in shape, dtype, stride, for views and M = 0 too."""
    x = torch.randn((3, 17), device=device)
    for given in (x, x.to(torch.bfloat16).t(), x[:0], x[:1], x[:, :0]):
        torch.library.opcheck(torch.ops.fp8stack.quantize_rowwise.default, (given, fmt, True))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float16, id="rowwise-unsupported-fp16"),
        pytest.param(torch.float64, id="rowwise-unsupported-fp64"),
        pytest.param(torch.int32, id="rowwise-unsupported-int32"),
        pytest.param(torch.float8_e4m3fnuz, id="rowwise-unsupported-e4m3fnuz"),
    ],
)
def test_unsupported_dtype(dtype: torch.dtype, device: str) -> None:
    """A dtype that no kernel loads is refused by name."""
    x = torch.zeros((2, 2), dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device)
    with pytest.raises(UnsupportedDtype, match=str(dtype).replace(".", r"\.")):
        quantize_rowwise(x.view(dtype), "e4m3fn")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((), id="rowwise-refuses-scalar"),
        pytest.param((4,), id="rowwise-refuses-1d"),
        pytest.param((2, 3, 4), id="rowwise-refuses-3d"),
    ],
)
def test_unsupported_rank(shape: tuple[int, ...], device: str) -> None:
    """Other ranks are a ValueError that says what is expected."""
    with pytest.raises(ValueError, match="two dimensions"):
        quantize_rowwise(torch.zeros(shape, device=device), "e4m3fn")


def test_unsupported_format(device: str) -> None:
    """A name that is no format is UnsupportedDtype with the four names, not a KeyError (pytorch/ao#1066)."""
    with pytest.raises(UnsupportedDtype, match="e5m2fnuz"):
        quantize_rowwise(torch.zeros((1, 1), device=device), "e4m3")


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch of the table, every size class; a missing row is an error that says so."""
    from fp8stack.device import ARCHS
    from fp8stack.kernels import launch

    for arch in ARCHS:
        for k in (1, 513, 1025, 2049, 4097, 8193, 16385, 32769):
            row = launch.config(rowwise.ROWWISE_CONFIGS, arch, rowwise.size_class(k))
            assert row.block >= min(k, row.block) > 0
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(rowwise.ROWWISE_CONFIGS, "gfx9-4-generic", rowwise.size_class(1))
