"""quantize_mxfp8: codes and E8M0 bytes in four rounding modes, bit by bit, against the golden blocks and the reference.

Modes differ for most inputs, so each contract row runs in all of them. Blocks along rows and down columns are the same
cases: an input is turned, and so is what is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch, mxfp8
from fp8stack.kernels.mxfp8 import MODES, quantize_mxfp8, quantize_mxfp8_reference
from suites.cases import DTYPES, LAYOUTS, SHAPES, TAIL_WIDTHS, contract_rows, from_bits, guarded, random_normal
from suites.compare import assert_bits_equal
from suites.numerics.golden import loader

# The interpreter multiplies and divides with NumPy, which warns where a NaN block is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

FORMATS = loader.MX_FORMATS
DIRECTIONS = {"columns": 0, "rows": 1}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Edges of blocks, words of scales and tiles in both directions, with and without rows that are multiples of 16.
MX_SHAPES: dict[str, tuple[int, int]] = {
    "32x32": (32, 32),
    "33x31": (33, 31),
    "24x40": (24, 40),
    "40x24": (40, 24),
    "80x130": (80, 130),
    "128x128": (128, 128),
    "129x513": (129, 513),
    "272x160": (272, 160),
}


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; the input may lie on the CPU."""

    def call(x: torch.Tensor, fmt: str, mode: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, torch.Tensor] = call_op(
            "quantize_mxfp8", quantize_mxfp8, on_device, fmt, mode=mode, dim=dim
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor, fmt: str, mode: str, dim: int, result: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Codes and bytes have the reference's bits, shapes and dtypes; codes are contiguous along the blocks."""
    __tracebackhide__ = True
    expected_codes, expected_bytes = quantize_mxfp8_reference(x, fmt, mode, dim)
    codes, scales = result
    # The scale first: where it is wrong, every code of the block is, and says less.
    assert_bits_equal(expected_bytes, scales, f"{fmt} {mode} bytes")
    assert_bits_equal(expected_codes, codes, f"{fmt} {mode} codes")
    assert (codes if dim == 1 else codes.t()).is_contiguous(), f"codes have strides {codes.stride()} for dim {dim}"
    assert scales.is_contiguous(), f"bytes have strides {scales.stride()}; expected row-major"


def cases(*suffixes: str, formats_: tuple[str, ...] = FORMATS, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    """(dim, format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(dim, fmt, dtype, suffix, id=f"mxfp8-{direction}-{fmt}-{dtype}-{suffix}")
        for direction, dim in DIRECTIONS.items()
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


# --- against the golden blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "fmt", "dtype", "mode"), cases(*MODES))
def test_golden(dim: int, fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden block (padded with zeros: same amax) has its golden codes and byte, from reference and op alike."""
    blocks = [block for block in loader.blocks(fmt) if block.dtype == dtype and block.mode == mode]
    names = [block.name for block in blocks]
    x = torch.stack([from_bits([*block.x, *[0] * (32 - len(block.x))], DTYPES[dtype]) for block in blocks])
    expected = torch.zeros(x.shape, dtype=torch.uint8)
    for row, block in enumerate(blocks):
        if block.byte == 0xFF:
            expected[row] = formats.get(fmt).nan_code
        expected[row, : len(block.codes)] = torch.tensor(block.codes, dtype=torch.uint8)
    expected_bytes = torch.tensor([[block.byte] for block in blocks], dtype=torch.uint8)
    turned = x if dim == 1 else x.t().contiguous()
    for codes, scales in (quantize_mxfp8_reference(turned, fmt, mode, dim), quantize(turned, fmt, mode, dim)):
        assert_bits_equal(expected_bytes, scales, f"{fmt} {mode} byte", names)
        codes = codes if dim == 1 else codes.t()
        assert_bits_equal(expected, codes.view(torch.uint8), f"{fmt} {mode} codes", names)


def test_golden_floor() -> None:
    """At least 60 golden blocks a format, each in four modes, and the modes disagree where they should."""
    for fmt in FORMATS:
        blocks = loader.blocks(fmt)
        assert len(blocks) >= 60 * len(MODES)
        by_name = {(block.name, block.mode): block.byte for block in blocks if block.dtype == "fp32"}
        six = [by_name["mx-6", mode] for mode in MODES]
        emax = {"e4m3fn": 8, "e5m2": 15}[fmt]
        # 6 = 1.5 * 2^2. MAX is 1.75 * 2^emax, so 6 / MAX lies below 2^(2 - emax): rceil as floor, neither clips.
        assert six == [129 - emax, 130 - emax, 129 - emax, 129 - emax]


# --- against the reference: contract rows, shapes, layouts ------------------------------------------------------------


@pytest.mark.parametrize(("dim", "fmt", "dtype", "mode"), cases(*MODES))
def test_contract_rows(dim: int, fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, at a width inside a block: equal to the reference bit by bit."""
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed)
    x = rows.x if dim == 1 else rows.x.t().contiguous()
    assert_equals_reference(x, fmt, mode, dim, quantize(x, fmt, mode, dim))


@pytest.mark.parametrize(
    ("dim", "fmt", "dtype", "shape"),
    [
        *cases(*SHAPES, *MX_SHAPES, formats_=("e4m3fn",), dtypes=("bf16",)),
        *cases(*MX_SHAPES, formats_=("e5m2",), dtypes=("fp32",)),
        *cases("1x10944", "2x5120", formats_=("e4m3fn",), dtypes=("bf16",)),
    ],
)
def test_shapes(dim: int, fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: no rows, one element, blocks that end at the edge, rows of scales that are no whole words."""
    wide = {"1x10944": (1, 10944), "2x5120": (2, 5120)}
    x = random_normal((SHAPES | MX_SHAPES | wide)[shape], DTYPES[dtype], seed)
    assert_equals_reference(x, fmt, "rceil", dim, quantize(x, fmt, "rceil", dim))


@pytest.mark.parametrize(("dim", "fmt", "dtype", "layout"), cases(*LAYOUTS, formats_=("e4m3fn",)))
def test_layouts(dim: int, fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((13, 129), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    assert_equals_reference(x, fmt, "even", dim, quantize(held.view, fmt, "even", dim))
    held.assert_untouched()


@pytest.mark.parametrize(("dim", "fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fn",), dtypes=("bf16",)))
def test_odd_strides(dim: int, fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded row, an expanded column) and a start that no vector load likes."""
    x = random_normal((35, 70), DTYPES[dtype], seed).to(device)
    for view in (x[:1].expand(40, -1), x[:, :1].expand(-1, 33), x[1:, 1:], x[:, 1::2]):
        assert_equals_reference(view, fmt, "ceil", dim, quantize(view, fmt, "ceil", dim))


@pytest.mark.parametrize(
    ("dim", "width"),
    [
        pytest.param(dim, width, id=f"mxfp8-{direction}-e4m3fn-tail-{width}")
        for direction, dim in DIRECTIONS.items()
        for width in TAIL_WIDTHS
    ],
)
def test_tail_lanes_are_neutral(dim: int, width: int, quantize: Op, device: str) -> None:
    """All values -3 has one byte in every block of any width, among infinities (ROCm/aiter#4288)."""
    x = torch.full((3, width), -3.0, dtype=torch.bfloat16)
    held = guarded(x, "row-pitch", device)
    view = held.view if dim == 1 else held.view.t()
    codes, scales = quantize(view, "e4m3fn", "floor", dim)
    assert scales.unique().tolist() == [127 + 1 - 8]  # floor(log2 3) - emax
    assert formats.decode(codes, "e4m3fn").unique().tolist() == [-3.0 * 2.0**7]


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"mxfp8-{fmt}-fp32-every-exponent") for fmt in FORMATS])
def test_every_exponent(fmt: str, quantize: Op) -> None:
    """Every float32 exponent, subnormals included, at 8 mantissas and one ulp beside each: no approximate logarithm."""
    exponent = torch.arange(0, 255, dtype=torch.int64)[:, None] << 23
    mantissa = torch.tensor([0, 1, 0x400000, 0x700000, 0x780000, 0x600000, 0x7FFFFF, 0x249249])
    bits = torch.cat([exponent + mantissa + step for step in (-1, 0, 1)]).clamp(0, 0x7F7FFFFF)
    x = torch.zeros((bits.shape[0], 8 * mxfp8.BLOCK))
    x[:, :: mxfp8.BLOCK] = bits.to(torch.int32).view(torch.float32)  # each in a block of its own
    for mode in MODES:
        assert_equals_reference(x, fmt, mode, 1, quantize(x, fmt, mode, 1))


# --- what a byte means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"mxfp8-{fmt}-clips") for fmt in FORMATS])
def test_clips(fmt: str, quantize: Op) -> None:
    """floor may clip the largest element, ceil and rceil never (jax-ml/ml_dtypes#298, pytorch/ao#1643)."""
    maximum = formats.get(fmt).max
    # Just above MAX times a power of two: floor's scale is too small for it.
    x = torch.tensor([[maximum * 2.0**-9 * 1.1, 0.3], [6.0, 0.3]], dtype=torch.float32)
    clipped = {}
    for mode in MODES:
        codes, scales = quantize(x, fmt, mode, 1)
        back = formats.decode(codes, fmt).cpu() * formats.decode_e8m0(scales).cpu()
        clipped[mode] = bool((back[0, 0] < x[0, 0] * (1 - 1 / 16)).item())
    assert clipped == {"floor": True, "ceil": False, "even": clipped["even"], "rceil": False}


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"mxfp8-{fmt}-byte-zero") for fmt in FORMATS])
def test_byte_zero(fmt: str, quantize: Op) -> None:
    """amax 0 and amax far below the range have byte 0, which decodes to 2^-127 and not to 0 (pytorch/ao#4725)."""
    x = torch.tensor([[0.0, -0.0], [2.0**-140, -(2.0**-141)], [2.0**127, 1.0], [3e38, -1.0]], dtype=torch.float32)
    for mode in MODES:
        codes, scales = quantize(x, fmt, mode, 1)
        assert scales[:2].flatten().tolist() == [0, 0]
        back = formats.decode(codes, fmt).cpu() * formats.decode_e8m0(scales).cpu()
        assert back[0].tolist() == [0.0, 0.0]
        assert codes[0].view(torch.uint8).tolist() == [0x00, 0x80]
        assert bool(back.isfinite().all())
        assert float(back[2, 0]) == 2.0**127


@pytest.mark.parametrize(
    ("dim", "fmt", "dtype", "word"), cases("nan", "inf", "neginf", formats_=FORMATS, dtypes=("bf16",))
)
def test_neighbours(dim: int, fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf give byte 0xFF and NaN codes to their block, and leave every other block bit-unchanged."""
    clean = random_normal((40, 100), DTYPES[dtype], seed)
    x = clean.clone()
    x[5, 70] = {"nan": torch.nan, "inf": torch.inf, "neginf": -torch.inf}[word]
    if dim == 0:
        clean, x = clean.t().contiguous(), x.t().contiguous()
    codes, scales = quantize(x, fmt, "rceil", dim)
    clean_codes, clean_scales = quantize(clean, fmt, "rceil", dim)
    if dim == 0:
        codes, clean_codes = codes.t(), clean_codes.t()
    expected_codes, expected_scales = clean_codes.view(torch.uint8).clone(), clean_scales.clone()
    expected_codes[5, 64:96] = formats.get(fmt).nan_code
    expected_scales[5, 2] = 0xFF
    assert_bits_equal(expected_scales, scales, "bytes")
    assert_bits_equal(expected_codes, codes.view(torch.uint8), "codes")


# --- size, determinism, refusals --------------------------------------------------------------------------------------


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
    for dim in DIRECTIONS.values():
        assert_equals_reference(x, "e4m3fn", "floor", dim, quantize(view, "e4m3fn", "floor", dim))


@pytest.mark.parametrize(
    "dim", [pytest.param(dim, id=f"mxfp8-{direction}-e4m3fn-bf16-repeatable") for direction, dim in DIRECTIONS.items()]
)
def test_repeatable(dim: int, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    x = random_normal((70, 150), torch.bfloat16, seed)
    before = x.clone()
    first = quantize(x, "e4m3fn", "even", dim)
    for expected, actual in zip(first, quantize(x, "e4m3fn", "even", dim), strict=True):
        assert_bits_equal(expected, actual, "second run")
    assert_bits_equal(before, x, "input after the op")


@pytest.mark.parametrize(
    "dim", [pytest.param(dim, id=f"mxfp8-{direction}-opcheck") for direction, dim in DIRECTIONS.items()]
)
def test_opcheck(dim: int, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views and empty sizes too."""
    x = torch.randn((3, 40), device=device)
    for given in (x, x.to(torch.bfloat16).t(), x[:0], x[:1], x[:, :0]):
        torch.library.opcheck(torch.ops.fp8stack.quantize_mxfp8.default, (given, "e4m3fn", "floor", dim))


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, id=f"mxfp8-refuses-{fmt}") for fmt in formats.FORMATS if fmt not in FORMATS]
)
def test_refuses_fnuz(fmt: str, device: str) -> None:
    """MX formats are OCP's: a FNUZ format is refused by name before anything is compiled (pytorch/ao#2957)."""
    with pytest.raises(UnsupportedDtype, match=fmt):
        quantize_mxfp8(torch.ones((1, 32), device=device), fmt, "floor")


@pytest.mark.parametrize(
    ("x", "arguments", "error", "words"),
    [
        pytest.param(
            torch.zeros((2, 2), dtype=torch.float16), {}, UnsupportedDtype, "float16", id="mxfp8-refuses-fp16"
        ),
        pytest.param(torch.zeros(4), {}, ValueError, "two dimensions", id="mxfp8-refuses-1d"),
        pytest.param(torch.zeros((2, 2)), {"mode": "nearest"}, ValueError, "rceil", id="mxfp8-refuses-mode"),
        pytest.param(torch.zeros((2, 2)), {"dim": -1}, ValueError, "dim is -1", id="mxfp8-refuses-dim"),
    ],
)
def test_refuses(x: torch.Tensor, arguments: dict[str, Any], error: type[Exception], words: str, device: str) -> None:
    """Other dtypes, ranks, modes and dims are refused by name."""
    with pytest.raises(error, match=words):
        quantize_mxfp8(x.to(device), "e4m3fn", **{"mode": "floor", **arguments})


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total, and a tile holds whole blocks and whole words of scales."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for direction, dim in DIRECTIONS.items():
            row = launch.config(mxfp8.MXFP8_CONFIGS, arch, mxfp8.DIRECTIONS[dim])
            assert mxfp8.DIRECTIONS[dim] == direction
            assert (row.columns if dim == 1 else row.rows) % (4 * mxfp8.BLOCK) == 0
            assert row.rows % row.parts == 0 == mxfp8.BLOCK % row.parts
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(mxfp8.MXFP8_CONFIGS, "gfx9-4-generic", "rows")
