"""quantize_rowwise_grouped: codes, inverse scales and padded offs of rows of groups of columns, bit by bit.

The golden rows of rowwise decide here too: a row of a group is the same scaling unit. A second opinion (oracle.py)
judges the reference where groups start, end and are padded; everything else is compared with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch, rowwise_grouped
from fp8stack.kernels.rowwise_grouped import quantize_rowwise_grouped, quantize_rowwise_grouped_reference
from suites.cases import (
    DTYPES,
    FORMATS,
    GROUPS,
    LAYOUTS,
    TAIL_WIDTHS,
    contract_rows,
    far_apart,
    from_bits,
    guarded,
    offsets,
    random_normal,
)
from suites.compare import assert_bits_equal, assert_fake_agrees
from suites.numerics import oracle
from suites.numerics.golden import loader

# The interpreter multiplies and divides with NumPy, which warns where a NaN row is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

RESULTS = ("codes", "inverse scale", "padded offs")
MODES = {"pow2": True, "plain": False}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# Rows, of which no block of a program is a multiple.
HEIGHTS = (0, 1, 13, 24, 40, 127, 129)


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; tensors may lie on the CPU."""

    def call(
        x: torch.Tensor, offs: torch.Tensor, fmt: str, pow2: bool = True, alignment: int = 16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = [tensor if tensor.device.type == device else tensor.to(device) for tensor in (x, offs)]
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = call_op(
            "quantize_rowwise_grouped", quantize_rowwise_grouped, *here, fmt, pow2=pow2, alignment=alignment
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str,
    result: tuple[torch.Tensor, ...],
    pow2: bool = True,
    alignment: int = 16,
) -> None:
    """All results have the reference's bits, shapes and dtypes, and are contiguous."""
    __tracebackhide__ = True
    expected = quantize_rowwise_grouped_reference(x, offs, fmt, pow2=pow2, alignment=alignment)
    # Where groups are, then the scales, then the codes: each is wrong where the one before it is, and says less.
    for what, wanted, found in reversed(list(zip(RESULTS, expected, result, strict=True))):
        assert_bits_equal(wanted, found, f"{fmt} {what}")
        assert found.is_contiguous(), f"{what} have strides {found.stride()}; expected contiguous"


def cases(*suffixes: str, formats_: tuple[str, ...] = FORMATS, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    """(format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(fmt, dtype, suffix, id=f"rowwise_grouped-{fmt}-{dtype}-{suffix}")
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


def grouped(groups: str, height: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (height, columns of the groups) and offs of GROUPS; columns that belong to no group hold infinity.

    Every other row has the largest element of each group in the group's last column.
    """
    columns, ends = GROUPS[groups]
    x = random_normal((height, columns), dtype, seed)
    x[::2, [end - 1 for end in ends if 0 < end <= columns]] *= 128
    x[:, min(max((*ends, 0)), columns) :] = torch.inf
    return x, offsets(groups)


# --- against the golden rows and the second opinion -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "dtype", "mode"), [*cases("golden-pow2", dtypes=("bf16",)), *cases("golden-plain", dtypes=("fp32",))]
)
def test_golden(fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, a row of two groups (padded with zeros: same amax), has its golden codes in both."""
    pow2 = mode == "golden-pow2"
    units = [unit for unit in loader.units("rowwise", fmt) if unit.dtype == dtype and unit.pow2 == pow2]
    size = max(len(unit.x[0]) for unit in units) + 1
    names = [unit.name for unit in units]
    x = torch.stack([from_bits([*unit.x[0], *[0] * (size - len(unit.x[0]))], DTYPES[dtype]) for unit in units])
    offs = torch.tensor([size, size, 2 * size], dtype=torch.int32)
    codes, inverse, padded_offs = quantize(torch.cat([x, x.flip(1)], dim=1), offs, fmt, pow2)
    expected = torch.zeros((len(units), size), dtype=torch.uint8)
    for row, unit in enumerate(units):
        expected[row] = formats.get(fmt).nan_code if unit.scale == 0x7FC00000 else 0
        expected[row, : len(unit.codes[0])] = torch.tensor(unit.codes[0], dtype=torch.uint8)
    padded = -(-size // 16) * 16
    assert padded_offs.tolist() == [padded, padded, 2 * padded]
    expected_inverse = from_bits([unit.inverse_scale for unit in units], torch.float32)
    for group, start, wanted in ((0, 0, expected), (2, padded, expected.flip(1))):
        assert_bits_equal(expected_inverse, inverse[group], f"{fmt} inverse scale", names)
        found = codes.view(torch.uint8)[:, start : start + size]
        assert_bits_equal(wanted, found, f"{fmt} codes of group {group}", names)
    assert inverse[1].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("fmt", "groups"),
    [
        pytest.param(fmt, groups, id=f"rowwise_grouped-{fmt}-bf16-oracle-{groups}")
        for fmt in FORMATS
        for groups in GROUPS
    ],
)
def test_reference_against_oracle(fmt: str, groups: str, seed: int) -> None:
    """The reference gives what a loop over units in plain Python gives, that shares no line with it."""
    x, offs = grouped(groups, 3, torch.bfloat16, seed)
    for pow2, alignment in ((True, 16), (False, 32)):
        codes, inverse, padded_offs = quantize_rowwise_grouped_reference(x, offs, fmt, pow2, alignment)
        expected, expected_inverse, expected_offs = oracle.quantize_groups(x.t(), offs.tolist(), fmt, pow2, alignment)
        assert padded_offs.tolist() == expected_offs
        assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale")
        assert_bits_equal(expected.t(), codes.view(torch.uint8), f"{fmt} codes")


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        pytest.param(fmt, dtype, id=f"rowwise_grouped-{fmt}-{dtype}-oracle-contract")
        for fmt in FORMATS
        for dtype in DTYPES
    ],
)
def test_reference_of_contract_rows_against_oracle(fmt: str, dtype: str, seed: int) -> None:
    """The same for every contract row, as a row of a group between two others."""
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed)
    x, offs = rows.x.repeat(1, 3), torch.tensor([17, 34, 51], dtype=torch.int32)
    for pow2 in MODES.values():
        codes, inverse, _ = quantize_rowwise_grouped_reference(x, offs, fmt, pow2)
        expected, expected_inverse, _ = oracle.quantize_groups(x.t(), offs.tolist(), fmt, pow2, 16)
        assert_bits_equal(expected_inverse.t(), inverse.t(), f"{fmt} inverse scale", rows.names)
        assert_bits_equal(expected.t(), codes.view(torch.uint8), f"{fmt} codes", rows.names)


# --- against the reference: contract rows, groups, shapes, layouts ----------------------------------------------------


@pytest.mark.parametrize(("fmt", "dtype", "mode"), cases("contract-pow2", "contract-plain"))
def test_contract_rows(fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, as the rows of a group of 17 columns: equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    x = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed).x
    offs = torch.tensor([17], dtype=torch.int32)
    assert_equals_reference(x, offs, fmt, quantize(x, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(
    ("fmt", "dtype", "groups"),
    [
        *cases(*GROUPS, formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("empty-first", "longer-than-the-mean", "multiples-of-16", formats_=("e4m3fn",), dtypes=("fp32",)),
        *cases("empty-middle", formats_=("e4m3fn", "e5m2", "e5m2fnuz"), dtypes=("bf16",)),
    ],
)
def test_groups(
    fmt: str, dtype: str, groups: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]
) -> None:
    """Groups that are empty, single columns, long, followed by columns of none, or nonsense; all in bounds.

    Their starts are odd, even, and multiples of 16; so are the rows' lengths.
    """
    x, offs = grouped(groups, 5, DTYPES[dtype], seed)
    result = quantize(x, offs, fmt)
    guarded_outputs()
    assert_equals_reference(x, offs, fmt, result)


@pytest.mark.parametrize(("fmt", "dtype", "alignment"), cases("32", "128", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_alignments(fmt: str, dtype: str, alignment: str, seed: int, quantize: Op) -> None:
    """Groups start at multiples of the alignment; what is in between, and the tail, holds zero codes."""
    for groups in ("empty-middle", "nothing-right"):
        x, offs = grouped(groups, 5, DTYPES[dtype], seed)
        result = quantize(x, offs, fmt, alignment=int(alignment))
        assert result[2].remainder(int(alignment)).unique().tolist() == [0]
        assert_equals_reference(x, offs, fmt, result, alignment=int(alignment))


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fn", id="rowwise_grouped-e4m3fn-bf16-by-hand")])
def test_by_hand(fmt: str, quantize: Op) -> None:
    """3 and 2 columns around an empty group, one of no group, to multiples of 16: every byte, written out."""
    x = torch.tensor([[1, 2, 448, 0, -0.0, torch.inf], [448, -448, 1, -224, 448, torch.nan]], dtype=torch.bfloat16)
    codes, inverse, padded_offs = quantize(x, torch.tensor([3, 3, 5], dtype=torch.int32), fmt)
    assert padded_offs.tolist() == [16, 16, 32]
    assert inverse.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert codes.view(torch.uint8).tolist() == [
        [0x38, 0x40, 0x7E, *[0] * 13, 0x00, 0x80, *[0] * 14, *[0] * 16],
        [0x7E, 0xFE, 0x38, *[0] * 13, 0xF6, 0x7E, *[0] * 14, *[0] * 16],
    ]


@pytest.mark.parametrize(
    ("fmt", "dtype", "height"),
    [
        *cases(*map(str, HEIGHTS), formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("40", "129", formats_=("e4m3fnuz",), dtypes=("fp32",)),
    ],
)
def test_heights(
    fmt: str, dtype: str, height: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]
) -> None:
    """Awkward numbers of rows: pytorch/ao#4627 stored the scales of a partial tile over others, and past the end."""
    x = random_normal((int(height), 21), DTYPES[dtype], seed)
    offs = torch.tensor([18, 21], dtype=torch.int32)
    result = quantize(x, offs, fmt)
    guarded_outputs()
    assert_equals_reference(x, offs, fmt, result)


@pytest.mark.parametrize(("fmt", "dtype", "columns"), cases("1200", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_long_group(fmt: str, dtype: str, columns: str, seed: int, quantize: Op) -> None:
    """A group of 1,150 columns, more than any program holds, after one of 50; with a NaN in its last column."""
    x = random_normal((3, int(columns)), DTYPES[dtype], seed)
    x[1, -1] = torch.nan
    offs = torch.tensor([50, 1200], dtype=torch.int32)
    assert_equals_reference(x, offs, fmt, quantize(x, offs, fmt))


# (rows, columns, groups, all groups multiples of): sizes of models, for GPUs.
SCALES = {
    "520x16640-e64": (520, 16640, 64, 1),
    "2056x4101-e3": (2056, 4101, 3, 1),
    "520x16640-e64-aligned": (520, 16640, 64, 16),
}


@pytest.mark.requires(gpus=1)
@pytest.mark.parametrize(("fmt", "dtype", "scale"), cases(*SCALES))
def test_at_scale(fmt: str, dtype: str, scale: str, seed: int, quantize: Op, device: str) -> None:
    """Thousands of columns in groups of any size, a NaN and an infinity among them."""
    rows, columns, e, multiple = SCALES[scale]
    x = random_normal((rows, columns), DTYPES[dtype], seed)
    x[5, columns // 3], x[rows - 1, columns // 2] = torch.nan, -torch.inf
    cuts = torch.randint(0, columns // multiple, (e,), generator=torch.Generator().manual_seed(seed)) * multiple
    offs = cuts.sort().values.to(torch.int32).to(device)
    for pow2 in MODES.values():
        assert_equals_reference(x.to(device), offs, fmt, quantize(x, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(("fmt", "dtype", "layout"), cases(*LAYOUTS, formats_=("e4m3fnuz",)))
def test_layouts(fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((11, 50), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    offs = torch.tensor([33, 50], dtype=torch.int32)
    assert_equals_reference(x, offs, fmt, quantize(held.view, offs, fmt))
    held.assert_untouched()


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_odd_strides(fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero, a start that is in the middle of a word, offs that are a view."""
    x = random_normal((35, 70), DTYPES[dtype], seed).to(device)
    offs = torch.tensor([7, -9, 20, -9], dtype=torch.int32, device=device)[::2]
    for view in (x[:1].expand(33, -1), x[:, :1].expand(-1, 33), x[1:, 1:], x[:, 1:69], x[:, 1::2]):
        assert_equals_reference(view, offs, fmt, quantize(view, offs, fmt))


@pytest.mark.parametrize(
    "width", [pytest.param(width, id=f"rowwise_grouped-e4m3fnuz-tail-{width}") for width in TAIL_WIDTHS]
)
def test_tail_lanes_are_neutral(width: int, quantize: Op, device: str) -> None:
    """All values -3 has amax 3 in any number of rows and columns, among infinities (ROCm/aiter#4288)."""
    held = guarded(torch.full((width, width), -3.0, dtype=torch.bfloat16), "row-pitch", device)
    codes, inverse, _ = quantize(held.view, torch.tensor([width], dtype=torch.int32), "e4m3fnuz")
    back = formats.decode(codes[:, :width], "e4m3fnuz") * inverse.t()
    assert back.unique().tolist() == [-3.0]


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, id=f"rowwise_grouped-{fmt}-fp32-pow2-ladder") for fmt in ("e4m3fnuz", "e5m2")]
)
def test_pow2_ladder(fmt: str, quantize: Op) -> None:
    """amax = MAX * 2^-k for k = -100..40, and one float32 ulp to either side, each a row of its own."""
    exact = formats.get(fmt).max * torch.exp2(-torch.arange(-100, 41, dtype=torch.float64)).to(torch.float32)
    bits = exact.view(torch.int32)
    x = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)]).unsqueeze(1)
    offs = torch.tensor([1], dtype=torch.int32)
    for pow2 in MODES.values():
        assert_equals_reference(x, offs, fmt, quantize(x, offs, fmt, pow2), pow2)


# --- what a unit does to its neighbours -------------------------------------------------------------------------------

SPOILS: dict[str, float] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "neginf": float("-inf"),
    "zero": 0.0,
    "negzero": -0.0,
}


@pytest.mark.parametrize(
    ("fmt", "dtype", "word"),
    [
        *cases("nan", "neginf", "negzero", formats_=("e4m3fn",), dtypes=("bf16",)),
        *cases("nan", "negzero", formats_=("e4m3fnuz",), dtypes=("fp32",)),
        *cases("inf", "zero", formats_=("e5m2",), dtypes=("bf16",)),
        *cases("nan", formats_=("e5m2fnuz",), dtypes=("bf16",)),
    ],
)
def test_neighbours(fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their row of their group, but not the gap after it; zeros have scale 1.

    Every other unit is bit-unchanged. The group has more columns than the interpreter's programs hold.
    """
    clean = random_normal((24, 90), DTYPES[dtype], seed)
    x, row, column = clean.clone(), 17, 80
    x[row, slice(5, 86) if SPOILS[word] == 0 else column] = SPOILS[word]
    offs = torch.tensor([5, 86, 90], dtype=torch.int32)
    codes, inverse, _ = quantize(x, offs, fmt)
    clean_codes, clean_inverse, _ = quantize(clean, offs, fmt)
    code = 0x80 if word == "negzero" and formats.get(fmt).negative_zero else 0x00
    expected, expected_inverse = clean_codes.view(torch.uint8).clone(), clean_inverse.clone()
    expected[row, 16 : 16 + 81] = code if SPOILS[word] == 0 else formats.get(fmt).nan_code
    expected_inverse[1, row] = 1.0 if SPOILS[word] == 0 else from_bits([0x7FC00000], torch.float32)[0]
    assert_bits_equal(expected_inverse, inverse, "inverse scale")
    assert_bits_equal(expected, codes.view(torch.uint8), "codes")


# --- size, determinism, refusals --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize(
    "transposed",
    [
        pytest.param(False, id="rowwise_grouped-rows-offsets-past-2e31"),
        pytest.param(True, id="rowwise_grouped-columns-offsets-past-2e31"),
    ],
)
def test_offsets_past_2e31(transposed: bool, quantize: Op, device: str, tmp_path: Path) -> None:
    """Rows and columns whose offset passes 2^31 elements are found: index arithmetic has 64 bits."""
    near = random_normal((3, 33), torch.bfloat16, seed=5)
    view = far_apart(near, 2**30, device, tmp_path)
    near, view = (near.t(), view.t()) if transposed else (near, view)
    offs = torch.tensor([1, near.shape[1]], dtype=torch.int32)
    assert_equals_reference(near, offs, "e4m3fnuz", quantize(view, offs, "e4m3fnuz"))


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="rowwise_grouped-e4m3fnuz-bf16-repeatable")])
def test_repeatable(fmt: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    x, offs = random_normal((50, 90), torch.bfloat16, seed), torch.tensor([80, 90], dtype=torch.int32)
    before = x.clone(), offs.clone()
    first = quantize(x, offs, fmt)
    for expected, actual in zip(first, quantize(x, offs, fmt), strict=True):
        assert_bits_equal(expected, actual, "second run")
    for expected, actual in zip(before, (x, offs), strict=True):
        assert_bits_equal(expected, actual, "input after the op")


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="rowwise_grouped-e4m3fnuz-opcheck")])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views, for one group and no rows too."""
    overload = torch.ops.fp8stack.quantize_rowwise_grouped.default
    x, offs = torch.randn((7, 19), device=device), torch.tensor([3, 7], dtype=torch.int32, device=device)
    torch.library.opcheck(overload, (x.to(torch.bfloat16).t(), offs, fmt, True, 32))
    for view in (x[:1], x[:0], x[:, :0]):
        assert_fake_agrees(overload, (view, offs[:1], fmt, True, 128))


GOOD = (torch.zeros((2, 2)), torch.tensor([1, 2], dtype=torch.int32), 16)


@pytest.mark.parametrize(
    ("x", "offs", "alignment", "error", "words"),
    [
        pytest.param(*(GOOD[0].half(), *GOOD[1:]), UnsupportedDtype, "float16", id="rowwise_grouped-refuses-fp16"),
        pytest.param(*(GOOD[0].int(), *GOOD[1:]), UnsupportedDtype, "int32", id="rowwise_grouped-refuses-int32"),
        pytest.param(*(torch.zeros(4), *GOOD[1:]), ValueError, "two dimensions", id="rowwise_grouped-refuses-1d"),
        pytest.param(*(GOOD[0], GOOD[1].long(), 16), ValueError, "int64", id="rowwise_grouped-refuses-int64"),
        pytest.param(*(GOOD[0], GOOD[1][:0], 16), ValueError, "E >= 1", id="rowwise_grouped-refuses-no-groups"),
        pytest.param(*(*GOOD[:2], 24), ValueError, "multiple of 16", id="rowwise_grouped-refuses-alignment-24"),
    ],
)
def test_refuses(
    x: torch.Tensor, offs: torch.Tensor, alignment: int, error: type[Exception], words: str, device: str
) -> None:
    """Other dtypes, ranks, offs and alignments are refused by name."""
    with pytest.raises(error, match=words):
        quantize_rowwise_grouped(x.to(device), offs.to(device), "e4m3fn", alignment=alignment)


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, every size class; a chunk of float32 too is a power of two."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for e in (1, 32, 33, 256):
            row = launch.config(rowwise_grouped.ROWWISE_GROUPED_CONFIGS, arch, rowwise_grouped.size_class(e))
            assert row.block // 2 == 1 << (row.block // 2).bit_length() - 1 >= 16
            assert row.rows == 1 << row.rows.bit_length() - 1
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(rowwise_grouped.ROWWISE_GROUPED_CONFIGS, "gfx9-4-generic", rowwise_grouped.size_class(1))
