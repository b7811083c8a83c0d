"""quantize_experts, its transpose and both at once: codes and inverse scales of expert weights, bit by bit.

The golden rows of rowwise decide here too: a row of an expert, or a column of one, is the same scaling unit. Everything
else is compared with the reference. Ops go by the word that a case id begins with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.device import detect
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import column_maxima, experts, launch, rowwise
from suites.cases import (
    DTYPES,
    FORMATS,
    LAYOUTS,
    TAIL_WIDTHS,
    amax_at_the_ends,
    contract_rows,
    from_bits,
    guarded,
    random_normal,
)
from suites.compare import assert_bits_equal
from suites.numerics.golden import loader

# The interpreter multiplies and divides with NumPy, which warns where a NaN row is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# Word of the case id -> name of the op; its function and its reference are found by it.
OPS = {
    "experts": "quantize_experts",
    "experts_transposed": "quantize_experts_transposed",
    "experts_both": "quantize_experts_both",
}
RESULTS = {
    "experts": ("codes", "inverse scale"),
    "experts_transposed": ("transposed codes", "transposed inverse scale"),
    "experts_both": ("codes", "inverse scale", "transposed codes", "transposed inverse scale"),
}
MODES = {"pow2": True, "plain": False}
Op = Callable[..., tuple[torch.Tensor, ...]]

# (E, N, K): sizes that divide no tile, one expert, one row, one column, nothing at all, more rows than are held.
SHAPES: dict[str, tuple[int, int, int]] = {
    "1x24x40": (1, 24, 40),
    "3x40x24": (3, 40, 24),
    "2x80x13": (2, 80, 13),
    "1x1x17": (1, 1, 17),
    "2x17x1": (2, 17, 1),
    "2x100x127": (2, 100, 127),
    "1x129x100": (1, 129, 100),
    "1x513x66": (1, 513, 66),
    "2x0x5": (2, 0, 5),
    "2x5x0": (2, 5, 0),
    "0x3x4": (0, 3, 4),
}
# Every class of the launch tables, at sizes of models.
LONG_SHAPES: dict[str, tuple[int, int, int]] = {
    "1x1408x96": (1, 1408, 96),
    "1x2048x16": (1, 2048, 16),
    "1x7168x4": (1, 7168, 4),
    "1x8200x4": (1, 8200, 4),
    "1x4x2050": (1, 4, 2050),
    "1x5x8200": (1, 5, 8200),
    "1x5x16400": (1, 5, 16400),
}


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """An op by its word, on this device, with what ran on record; the input may lie on the CPU."""

    def call(op: str, w: torch.Tensor, fmt: str, pow2: bool = True) -> tuple[torch.Tensor, ...]:
        on_device = w if w.device.type == device else w.to(device)
        result: tuple[torch.Tensor, ...] = call_op(OPS[op], getattr(experts, OPS[op]), on_device, fmt, pow2=pow2)
        return result

    return call


def assert_equals_reference(op: str, w: torch.Tensor, fmt: str, pow2: bool, result: tuple[torch.Tensor, ...]) -> None:
    """Codes and inverse scales have the reference's bits, shapes and dtypes, and are contiguous."""
    __tracebackhide__ = True
    expected = getattr(experts, f"{OPS[op]}_reference")(w, fmt, pow2=pow2)
    for what, wanted, found in reversed(list(zip(RESULTS[op], expected, result, strict=True))):
        # The scale first: where it is wrong, every code of the unit is, and says less.
        assert_bits_equal(wanted, found, f"{fmt} {what}")
        assert found.is_contiguous(), f"{what} has strides {found.stride()}; expected contiguous"


def cases(
    *suffixes: str,
    ops: tuple[str, ...] = tuple(OPS),
    formats_: tuple[str, ...] = FORMATS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
) -> list[Any]:
    """(op, format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(op, fmt, dtype, suffix, id=f"{op}-{fmt}-{dtype}-{suffix}")
        for op in ops
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


def along(op: str, units: torch.Tensor) -> list[torch.Tensor]:
    """Weights of two experts whose scaling units are the rows of `units`, up and down; for both: rows, then columns."""
    rows = torch.stack([units, units.flip(0)])
    columns = rows.transpose(1, 2).contiguous()
    return {"experts": [rows], "experts_transposed": [columns], "experts_both": [rows, columns]}[op]


# --- against the golden rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "fmt", "dtype", "mode"), cases("golden-pow2", "golden-plain", ops=tuple(OPS)[:2]))
def test_golden(op: str, fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, as a row or a column of two experts (padded with zeros: same amax), has its golden codes."""
    pow2 = mode == "golden-pow2"
    units = [unit for unit in loader.units("rowwise", fmt) if unit.dtype == dtype and unit.pow2 == pow2]
    width = max(len(unit.x[0]) for unit in units) + 1
    names = [unit.name for unit in units]
    x = torch.stack([from_bits([*unit.x[0], *[0] * (width - len(unit.x[0]))], DTYPES[dtype]) for unit in units])
    (w,) = along(op, x)
    codes, inverse = quantize(op, w, fmt, pow2)
    nan_code = formats.get(fmt).nan_code
    expected = torch.empty((len(units), width), dtype=torch.uint8)
    for row, unit in enumerate(units):
        expected[row] = nan_code if unit.scale == 0x7FC00000 else 0
        expected[row, : len(unit.codes[0])] = torch.tensor(unit.codes[0], dtype=torch.uint8)
    expected_inverse = from_bits([unit.inverse_scale for unit in units], torch.float32)
    for expert, order in ((0, names), (1, names[::-1])):
        flipped = (0,) if expert else ()
        assert_bits_equal(expected_inverse.flip(flipped), inverse[expert], f"{fmt} inverse scale", order)
        assert_bits_equal(expected.flip(flipped), codes[expert].view(torch.uint8), f"{fmt} codes", order)


# --- against the reference: contract rows, shapes, layouts ------------------------------------------------------------


@pytest.mark.parametrize(("op", "fmt", "dtype", "word"), cases("contract"))
def test_contract_rows(op: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, as rows and as columns of two experts: equal to the reference bit by bit."""
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed)
    for pow2 in MODES.values():
        for w in along(op, rows.x):
            assert_equals_reference(op, w, fmt, pow2, quantize(op, w, fmt, pow2))


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "shape"),
    [
        *cases(*SHAPES, formats_=("e4m3fnuz",)),
        *cases("3x40x24", formats_=("e4m3fn", "e5m2", "e5m2fnuz"), dtypes=("bf16",)),
        *cases(*LONG_SHAPES, ops=tuple(OPS)[1:], formats_=("e4m3fnuz",), dtypes=("bf16",)),
    ],
)
def test_shapes(op: str, fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: pytorch/ao#4627 stored the scales of a partial tile over the next columns' and past the end."""
    w = amax_at_the_ends(random_normal((SHAPES | LONG_SHAPES)[shape], DTYPES[dtype], seed), -1, -2)
    assert_equals_reference(op, w, fmt, True, quantize(op, w, fmt, True))


@pytest.mark.parametrize(("op", "fmt", "dtype", "layout"), cases(*LAYOUTS, formats_=("e4m3fnuz",)))
def test_layouts(op: str, fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((2 * 13, 40), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    w = held.view.unflatten(0, (2, 13))
    assert_equals_reference(op, x.unflatten(0, (2, 13)), fmt, True, quantize(op, w, fmt))
    held.assert_untouched()


@pytest.mark.parametrize(("op", "fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_odd_strides(op: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Experts, rows and columns in any order of strides, strides of zero, and a start that no vector load likes."""
    w = random_normal((3, 33, 26), DTYPES[dtype], seed).to(device)
    for view in (
        w.transpose(1, 2),
        w.transpose(0, 1),
        w[:1].expand(4, -1, -1),
        w[:, :1].expand(-1, 5, -1),
        w[1:, 1:, 1:],
    ):
        assert_equals_reference(op, view, fmt, True, quantize(op, view, fmt))


@pytest.mark.parametrize(
    ("op", "width"),
    [pytest.param(op, width, id=f"{op}-e4m3fnuz-tail-{width}") for op in OPS for width in TAIL_WIDTHS],
)
def test_tail_lanes_are_neutral(op: str, width: int, quantize: Op, device: str) -> None:
    """All values -3 gives amax 3 at any number of rows and columns, among infinities (ROCm/aiter#4288)."""
    held = guarded(torch.full((2 * width, width), -3.0, dtype=torch.bfloat16), "row-pitch", device)
    results = quantize(op, held.view.unflatten(0, (2, width)), "e4m3fnuz")
    for codes, inverse in zip(results[::2], results[1::2], strict=True):
        back = formats.decode(codes, "e4m3fnuz") * inverse.unsqueeze(2)
        assert back.unique().tolist() == [-3.0]


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"experts_transposed-{fmt}-fp32-pow2-ladder") for fmt in FORMATS])
def test_pow2_ladder(fmt: str, quantize: Op) -> None:
    """amax = MAX * 2^-k for k = -100..40, and one float32 ulp to either side, each a column of its own."""
    exact = formats.get(fmt).max * torch.exp2(-torch.arange(-100, 41, dtype=torch.float64)).to(torch.float32)
    bits = exact.view(torch.int32)
    w = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)]).reshape(1, 1, -1)
    for pow2 in MODES.values():
        assert_equals_reference("experts_transposed", w, fmt, pow2, quantize("experts_transposed", w, fmt, pow2))


@pytest.mark.parametrize(
    "span", [pytest.param(span, id=f"experts_both-e4m3fnuz-bf16-spans-of-{span}") for span in (1, 4)]
)
def test_every_row_counts(span: int, device: str) -> None:
    """Each column has one element, in a row of its own: no span, and no row of one, is left out of the maxima."""
    w = torch.diag_embed(torch.exp2(torch.arange(1, 38, dtype=torch.float32))).to(torch.bfloat16)[None]
    target = detect(device).target.name
    row = launch.config(experts.BOTH_CONFIGS, target, column_maxima.width_class(w.shape[2], w.dtype))
    row = replace(row, span=span, row_rows=1)
    result = experts.launch_both(w.to(device), formats.get("e4m3fnuz"), True, row, target)
    assert_equals_reference("experts_both", w, "e4m3fnuz", True, result)


# --- what a unit does to its neighbours -------------------------------------------------------------------------------

SPOILS: dict[str, float] = {"nan": float("nan"), "inf": float("inf"), "neginf": float("-inf"), "zero": 0.0}


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "word"), cases(*SPOILS, formats_=("e4m3fn", "e4m3fnuz"), dtypes=("bf16",))
)
def test_neighbours(op: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their row and their column whole; zeros have scale 1; all other units are bit-unchanged."""
    clean = random_normal((3, 20, 24), DTYPES[dtype], seed)
    w = clean.clone()
    row, column = 5, 17
    if word == "zero":
        w[1, row], w[1, :, column] = 0.0, 0.0
    else:
        w[1, row, column] = SPOILS[word]
    results, clean_results = quantize(op, w, fmt), quantize(op, clean, fmt)
    for place in range(0, len(results), 2):
        turned = RESULTS[op][place].startswith("transposed")
        spoilt = column if turned else row
        codes, inverse = results[place].view(torch.uint8), results[place + 1]
        if word == "zero":
            assert float(inverse[1, spoilt]) == 1.0
            assert codes[1, spoilt].unique().tolist() == [0]
            continue  # the other units lost one element each
        assert from_bits([0x7FC00000], torch.float32).view(torch.int32) == inverse[1, spoilt].cpu().view(torch.int32)
        assert codes[1, spoilt].unique().tolist() == [formats.get(fmt).nan_code]
        keep = torch.ones(inverse.shape, dtype=torch.bool)
        keep[1, spoilt] = False
        assert_bits_equal(clean_results[place + 1].cpu()[keep], inverse.cpu()[keep], "inverse scale of the other units")
        assert_bits_equal(
            clean_results[place].view(torch.uint8).cpu()[keep], codes.cpu()[keep], "codes of the other units"
        )


# --- size, determinism, refusals --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-offsets-past-2e31") for op in OPS])
def test_offsets_past_2e31(op: str, quantize: Op, device: str, tmp_path: Path) -> None:
    """Experts whose offset passes 2^31 elements are found: index arithmetic has 64 bits. The buffer is sparse."""
    pitch, (n, k) = 2**30, (3, 33)
    size = 2 * pitch + n * k
    if device == "cpu":
        buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.bfloat16)
    else:
        buffer = torch.zeros(size, dtype=torch.bfloat16, device=device)
    view = buffer.as_strided((3, n, k), (pitch, k, 1))
    w = random_normal((3, n, k), torch.bfloat16, seed=5)
    view.copy_(w.to(device))
    assert_equals_reference(op, w, "e4m3fnuz", True, quantize(op, view, "e4m3fnuz"))


@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-e4m3fnuz-bf16-repeatable") for op in OPS])
def test_repeatable(op: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    w = random_normal((2, 70, 50), torch.bfloat16, seed)
    before = w.clone()
    first = quantize(op, w, "e4m3fnuz")
    for expected, actual in zip(first, quantize(op, w, "e4m3fnuz"), strict=True):
        assert_bits_equal(expected, actual, "second run")
    assert_bits_equal(before, w, "input after the op")


@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-e4m3fnuz-opcheck") for op in OPS])
def test_opcheck(op: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views, one expert and no rows too."""
    w = torch.randn((2, 3, 17), device=device)
    for view in (w, w[:1].to(torch.bfloat16), w.transpose(1, 2), w[:, :0], w[:, :, :0], w[:0]):
        torch.library.opcheck(getattr(torch.ops.fp8stack, OPS[op]).default, (view, "e4m3fnuz", True))


@pytest.mark.parametrize(
    ("w", "error", "words"),
    [
        pytest.param(
            torch.zeros((1, 2, 2), dtype=torch.float16), UnsupportedDtype, "float16", id="experts-refuses-fp16"
        ),
        pytest.param(torch.zeros((1, 2, 2), dtype=torch.int32), UnsupportedDtype, "int32", id="experts-refuses-int32"),
        pytest.param(torch.zeros((2, 2)), ValueError, "three dimensions", id="experts-refuses-2d"),
        pytest.param(torch.zeros((1, 1, 2, 2)), ValueError, "three dimensions", id="experts-refuses-4d"),
    ],
)
def test_refuses(w: torch.Tensor, error: type[Exception], words: str, device: str) -> None:
    """Other dtypes and ranks are refused by name, by each op."""
    for name in OPS.values():
        with pytest.raises(error, match=words):
            getattr(experts, name)(w.to(device), "e4m3fn")


def test_every_arch_has_its_launch_rows() -> None:
    """The launch tables are total: every arch, every size class; a chunk's parts divide its rows."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for n in (1, 513, 1025, 2049, 4097, 8193):
            row = launch.config(experts.TRANSPOSED_CONFIGS, arch, experts.size_class(n))
            assert row.rows % row.parts == 0 < row.columns
        for k in (1, 2049, 8193, 16385):
            for dtype in DTYPES.values():
                both = launch.config(experts.BOTH_CONFIGS, arch, column_maxima.width_class(k, dtype))
                assert both.tile_rows(dtype) % both.parts == 0 < both.columns
                assert both.span % both.row_rows == 0 < both.row_block
        assert launch.config(rowwise.ROWWISE_CONFIGS, arch, rowwise.size_class(2048))
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(experts.BOTH_CONFIGS, "gfx9-4-generic", column_maxima.width_class(1, torch.bfloat16))
