"""quantize_blockwise: codes and inverse scales of 1x128, 128x1 and 128x128 blocks, bit by bit.

The golden rows of rowwise decide here too: a block is the same scaling unit, whatever its shape. Everything else is
compared with the reference, which takes blocks apart in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import blockwise, launch
from fp8stack.kernels.blockwise import UNITS, quantize_blockwise, quantize_blockwise_reference
from suites.cases import DTYPES, FORMATS, LAYOUTS, SHAPES, TAIL_WIDTHS, contract_rows, from_bits, guarded, random_normal
from suites.compare import assert_bits_equal
from suites.numerics.golden import loader

# The interpreter multiplies and divides with NumPy, which warns where a NaN block is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

MODES = {"plain": False, "pow2": True}
LAYOUT_OF_CODES = {"row": False, "column": True}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Edges of blocks and of tiles in both directions, with and without rows that are multiples of 16.
BLOCK_SHAPES: dict[str, tuple[int, int]] = {
    "24x40": (24, 40),
    "40x24": (40, 24),
    "80x130": (80, 130),
    "128x128": (128, 128),
    "129x257": (129, 257),
    "272x160": (272, 160),
}


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; the input may lie on the CPU."""

    def call(
        x: torch.Tensor, fmt: str, unit: str, column_major: bool = False, pow2: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, torch.Tensor] = call_op(
            "quantize_blockwise", quantize_blockwise, on_device, fmt, unit=unit, column_major=column_major, pow2=pow2
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor, fmt: str, unit: str, column_major: bool, pow2: bool, result: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Codes and inverse scales have the reference's bits, shapes and dtypes, and the layout that was asked for."""
    __tracebackhide__ = True
    expected_codes, expected_inverse = quantize_blockwise_reference(x, fmt, unit, column_major, pow2)
    codes, inverse = result
    # The scale first: where it is wrong, every code of the block is, and says less.
    assert_bits_equal(expected_inverse, inverse, f"{fmt} {unit} inverse scale")
    assert_bits_equal(expected_codes, codes, f"{fmt} {unit} codes")
    assert (codes.t() if column_major else codes).is_contiguous(), f"codes have strides {codes.stride()}"
    assert inverse.is_contiguous(), f"inverse scale has strides {inverse.stride()}; expected row-major"


def cases(
    *suffixes: str,
    units: tuple[str, ...] = tuple(UNITS),
    formats_: tuple[str, ...] = FORMATS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
) -> list[Any]:
    """(unit, format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(unit, fmt, dtype, suffix, id=f"blockwise-{unit}-{fmt}-{dtype}-{suffix}")
        for unit in units
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


def in_blocks(rows: torch.Tensor, unit: str) -> torch.Tensor:
    """A 2-D tensor whose block i holds row i of `rows` (at most 128 wide): along a row, down a column, or in a row."""
    width = rows.shape[1]
    if unit == "1x128":
        return rows
    if unit == "128x1":
        return rows.t().contiguous()
    spread = rows.new_zeros((rows.shape[0], 128, 128))
    spread[:, 77, :width] = rows
    return spread.flatten(0, 1)


def out_of_blocks(codes: torch.Tensor, unit: str, width: int) -> torch.Tensor:
    """The codes of each row that in_blocks placed."""
    if unit == "1x128":
        return codes
    if unit == "128x1":
        return codes.t()
    return codes.unflatten(0, (-1, 128))[:, 77, :width]


# --- against the golden rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "fmt", "dtype", "mode"), cases("golden-plain", "golden-pow2", units=("1x128", "128x1"))
)
def test_golden(unit: str, fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, a block of its own (padded with zeros: amax is the same), has its golden codes."""
    pow2 = mode == "golden-pow2"
    golden = [row for row in loader.units("rowwise", fmt) if row.dtype == dtype and row.pow2 == pow2]
    width = max(len(row.x[0]) for row in golden) + 1
    names = [row.name for row in golden]
    rows = torch.stack([from_bits([*row.x[0], *[0] * (width - len(row.x[0]))], DTYPES[dtype]) for row in golden])
    codes, inverse = quantize(in_blocks(rows, unit), fmt, unit, unit == "128x1", pow2)
    expected_inverse = from_bits([row.inverse_scale for row in golden], torch.float32)
    assert_bits_equal(expected_inverse, inverse.flatten(), f"{fmt} inverse scale", names)
    expected = torch.zeros((len(golden), width), dtype=torch.uint8)
    for place, row in enumerate(golden):
        if row.scale == 0x7FC00000:
            expected[place] = formats.get(fmt).nan_code
        expected[place, : len(row.codes[0])] = torch.tensor(row.codes[0], dtype=torch.uint8)
    found = out_of_blocks(codes.view(torch.uint8), unit, width)
    assert_bits_equal(expected, found, f"{fmt} codes", names)


# --- against the reference: contract rows, shapes, layouts ------------------------------------------------------------


@pytest.mark.parametrize(("unit", "fmt", "dtype", "mode"), cases(*MODES))
def test_contract_rows(unit: str, fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, a block each: equal to the reference bit by bit."""
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed)
    # A 128x128 block is 128 times the work of the others: some of the rows, other ones for each format, dtype and mode.
    part = (4 * list(MODES).index(mode) + 2 * list(DTYPES).index(dtype) + FORMATS.index(fmt)) % 6
    x = in_blocks(rows.x[part::6] if unit == "128x128" else rows.x, unit)
    column_major = mode == "pow2"
    result = quantize(x, fmt, unit, column_major, MODES[mode])
    assert_equals_reference(x, fmt, unit, column_major, MODES[mode], result)


@pytest.mark.parametrize(
    ("unit", "fmt", "dtype", "shape"),
    [
        *cases(*SHAPES, *BLOCK_SHAPES, formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases(*BLOCK_SHAPES, formats_=("e4m3fn",), dtypes=("fp32",)),
        *cases("1x10944", formats_=("e4m3fnuz",), dtypes=("bf16",)),
    ],
)
def test_shapes(unit: str, fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: no rows, one element, and in both layouts, blocks that end at the edge of a row or a column."""
    x = random_normal((SHAPES | BLOCK_SHAPES | {"1x10944": (1, 10944)})[shape], DTYPES[dtype], seed)
    for column_major in LAYOUT_OF_CODES.values() if shape in BLOCK_SHAPES else (shape == "1x10944",):
        result = quantize(x, fmt, unit, column_major)
        assert_equals_reference(x, fmt, unit, column_major, False, result)


@pytest.mark.parametrize(("unit", "fmt", "dtype", "layout"), cases(*LAYOUTS, formats_=("e4m3fnuz",)))
def test_layouts(unit: str, fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((13, 129), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    column_major = dtype == "fp32"
    result = quantize(held.view, fmt, unit, column_major)
    assert_equals_reference(x, fmt, unit, column_major, False, result)
    held.assert_untouched()


@pytest.mark.parametrize(
    ("unit", "fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fnuz",), dtypes=("bf16",))
)
def test_odd_strides(unit: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded row, an expanded column) and a start that no vector load likes."""
    x = random_normal((35, 140), DTYPES[dtype], seed).to(device)
    for view in (x[:1].expand(40, -1), x[:, :1].expand(-1, 33), x[1:, 1:], x[:, 1::2]):
        assert_equals_reference(view, fmt, unit, False, False, quantize(view, fmt, unit))


@pytest.mark.parametrize(
    ("unit", "width"),
    [
        pytest.param(unit, width, id=f"blockwise-{unit}-e4m3fnuz-tail-{width}")
        for unit in UNITS
        for width in TAIL_WIDTHS
    ],
)
def test_tail_lanes_are_neutral(unit: str, width: int, quantize: Op, device: str) -> None:
    """All values -3 has amax 3 in every block of any width, among infinities (ROCm/aiter#4288)."""
    x = torch.full((3, width), -3.0, dtype=torch.bfloat16)
    codes, inverse = quantize(guarded(x, "row-pitch", device).view, "e4m3fnuz", unit)
    expected = quantize_blockwise_reference(x[:1, :1], "e4m3fnuz", unit)[1]
    assert_bits_equal(expected.expand(inverse.shape), inverse, "inverse scale of -3")
    assert codes.view(torch.uint8).unique().tolist() == [0xFF]  # -240, the maximum of e4m3fnuz


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"blockwise-1x128-{fmt}-fp32-pow2-ladder") for fmt in FORMATS])
def test_pow2_ladder(fmt: str, quantize: Op) -> None:
    """amax = MAX * 2^-k for k = -100..40, and one float32 ulp to either side, each a block of its own."""
    exact = formats.get(fmt).max * torch.exp2(-torch.arange(-100, 41, dtype=torch.float64)).to(torch.float32)
    bits = exact.view(torch.int32)
    x = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)]).unsqueeze(1)
    for pow2 in MODES.values():
        assert_equals_reference(x, fmt, "1x128", False, pow2, quantize(x, fmt, "1x128", False, pow2))


# --- what a block does to its neighbours ------------------------------------------------------------------------------

SPOILS: dict[str, float] = {"nan": float("nan"), "inf": float("inf"), "neginf": float("-inf")}


@pytest.mark.parametrize(
    ("unit", "fmt", "dtype", "word"), cases(*SPOILS, formats_=("e4m3fn", "e4m3fnuz"), dtypes=("bf16",))
)
def test_neighbours(unit: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their block whole and leave every other block bit-unchanged."""
    clean = random_normal((140, 150), DTYPES[dtype], seed)
    x = clean.clone()
    x[5, 17] = SPOILS[word]
    rows, columns = UNITS[unit]
    block = (
        slice(5 if rows == 1 else 0, 6 if rows == 1 else 128),
        slice(17 if columns == 1 else 0, 18 if columns == 1 else 128),
    )
    for column_major in LAYOUT_OF_CODES.values():
        codes, inverse = quantize(x, fmt, unit, column_major)
        clean_codes, clean_inverse = quantize(clean, fmt, unit, column_major)
        expected, expected_inverse = clean_codes.view(torch.uint8).clone(), clean_inverse.clone()
        expected[block] = formats.get(fmt).nan_code
        expected_inverse[5 // rows, 17 // columns] = from_bits([0x7FC00000], torch.float32)[0]
        assert_bits_equal(expected_inverse, inverse, "inverse scale")
        assert_bits_equal(expected, codes.view(torch.uint8), "codes")


@pytest.mark.parametrize("unit", [pytest.param(unit, id=f"blockwise-{unit}-e4m3fn-zero-block") for unit in UNITS])
def test_zero_block(unit: str, seed: int, quantize: Op) -> None:
    """A block of zeros has scale 1 and zero codes, with the sign that OCP formats have (pytorch/ao#4713)."""
    x = random_normal((256, 256), torch.bfloat16, seed)
    x[128:, :128], x[128:, 128:] = 0.0, -0.0
    codes, inverse = quantize(x, "e4m3fn", unit)
    codes = codes.view(torch.uint8)
    assert codes[128:, :128].unique().tolist() == [0x00]
    assert codes[128:, 128:].unique().tolist() == [0x80]
    assert inverse[inverse.shape[0] // 2 :].unique().tolist() == [1.0]


# --- size, determinism, refusals --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("unit", [pytest.param(unit, id=f"blockwise-{unit}-offsets-past-2e31") for unit in UNITS])
def test_offsets_past_2e31(unit: str, quantize: Op, device: str, tmp_path: Path) -> None:
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
    for column_major in LAYOUT_OF_CODES.values():
        result = quantize(view, "e4m3fnuz", unit, column_major)
        assert_equals_reference(x, "e4m3fnuz", unit, column_major, False, result)


@pytest.mark.parametrize(
    "unit", [pytest.param(unit, id=f"blockwise-{unit}-e4m3fnuz-bf16-repeatable") for unit in UNITS]
)
def test_repeatable(unit: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    x = random_normal((70, 150), torch.bfloat16, seed)
    before = x.clone()
    first = quantize(x, "e4m3fnuz", unit, True)
    for expected, actual in zip(first, quantize(x, "e4m3fnuz", unit, True), strict=True):
        assert_bits_equal(expected, actual, "second run")
    assert_bits_equal(before, x, "input after the op")


@pytest.mark.parametrize("unit", [pytest.param(unit, id=f"blockwise-{unit}-opcheck") for unit in UNITS])
def test_opcheck(unit: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views and empty sizes too."""
    x = torch.randn((3, 140), device=device)
    for given, column_major in (
        (x, False),
        (x.to(torch.bfloat16).t(), True),
        (x[:0], True),
        (x[:1], True),
        (x[:, :0], False),
    ):
        arguments = (given, "e4m3fnuz", unit, column_major, False)
        torch.library.opcheck(torch.ops.fp8stack.quantize_blockwise.default, arguments)


@pytest.mark.parametrize(
    ("x", "unit", "error", "words"),
    [
        pytest.param(
            torch.zeros((2, 2), dtype=torch.float16), "1x128", UnsupportedDtype, "float16", id="blockwise-refuses-fp16"
        ),
        pytest.param(torch.zeros(4), "1x128", ValueError, "two dimensions", id="blockwise-refuses-1d"),
        pytest.param(torch.zeros((2, 2)), "1x64", ValueError, "128x128", id="blockwise-refuses-unit"),
    ],
)
def test_refuses(x: torch.Tensor, unit: str, error: type[Exception], words: str, device: str) -> None:
    """Other dtypes, ranks and blocks are refused by name."""
    with pytest.raises(error, match=words):
        quantize_blockwise(x.to(device), "e4m3fn", unit)


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, block and direction; a tile holds whole blocks."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for rows, columns in UNITS.values():
            for turned in (False, True):
                row = launch.config(blockwise.BLOCKWISE_CONFIGS, arch, blockwise.size_class((rows, columns), turned))
                assert row.rows % rows == row.columns % columns == row.rows % row.parts == 0
                assert row.parts == 1 or turned
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(blockwise.BLOCKWISE_CONFIGS, "gfx9-4-generic", "1x128")
