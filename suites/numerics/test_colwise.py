"""quantize_colwise_grouped and its pair: codes, inverse scales and padded offs of groups of columns, bit by bit.

The golden rows of rowwise decide here too: a column of a group is the same scaling unit. A second opinion (oracle.py)
judges the reference where groups start, end and are padded; everything else is compared with the reference. Ops go by
the word that a case id begins with; what is said of one tensor holds for each of a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import colwise, launch
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

# The interpreter multiplies and divides with NumPy, which warns where a NaN column is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# Word of the case id -> name of the op; its function and its reference are found by it.
OPS = {"colwise": "quantize_colwise_grouped", "colwise_pair": "quantize_colwise_grouped_pair"}
RESULTS = {
    "colwise": ("codes", "inverse scale", "padded offs"),
    "colwise_pair": ("x codes", "x inverse scale", "y codes", "y inverse scale", "padded offs"),
}
MODES = {"pow2": True, "plain": False}
Op = Callable[..., tuple[torch.Tensor, ...]]

# Widths that divide no block of columns, in either class of the launch tables.
WIDTHS = (1, 13, 17, 24, 40, 80, 100, 127, 129)


def inputs_of(op: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of an op: x; for a pair also its last columns in reverse, one more than half of them."""
    return (x,) if op == "colwise" else (x, x.flip(1)[:, : x.shape[1] // 2 + 1])


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """An op by its word, on this device, with what ran on record; tensors may lie on the CPU."""

    def call(
        op: str, inputs: tuple[torch.Tensor, ...], offs: torch.Tensor, fmt: str, pow2: bool = True, alignment: int = 16
    ) -> tuple[torch.Tensor, ...]:
        here = [tensor if tensor.device.type == device else tensor.to(device) for tensor in (*inputs, offs)]
        result: tuple[torch.Tensor, ...] = call_op(
            OPS[op], getattr(colwise, OPS[op]), *here, fmt, pow2=pow2, alignment=alignment
        )
        return result

    return call


def assert_equals_reference(
    op: str,
    inputs: tuple[torch.Tensor, ...],
    offs: torch.Tensor,
    fmt: str,
    result: tuple[torch.Tensor, ...],
    pow2: bool = True,
    alignment: int = 16,
) -> None:
    """All results have the reference's bits, shapes and dtypes; codes are column-major, the others contiguous."""
    __tracebackhide__ = True
    expected = getattr(colwise, f"{OPS[op]}_reference")(*inputs, offs, fmt, pow2=pow2, alignment=alignment)
    # Where groups are, then the scales, then the codes: each is wrong where the one before it is, and says less.
    for what, wanted, found in reversed(list(zip(RESULTS[op], expected, result, strict=True))):
        assert_bits_equal(wanted, found, f"{fmt} {what}")
        dense = found.t() if what.endswith("codes") else found
        assert dense.is_contiguous(), f"{what} have strides {found.stride()}"


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


def grouped(groups: str, width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows of the groups, width) and offs of GROUPS; rows that belong to no group hold infinity.

    Every other column has the largest element of each group in the group's last row.
    """
    rows, ends = GROUPS[groups]
    x = random_normal((rows, width), dtype, seed)
    x[[end - 1 for end in ends if 0 < end <= rows], ::2] *= 128
    x[min(max((*ends, 0)), rows) :] = torch.inf
    return x, offsets(groups)


# --- against the golden rows and the second opinion -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "mode"),
    [
        *cases("golden-pow2", ops=("colwise",), dtypes=("bf16",)),
        *cases("golden-plain", ops=("colwise",), dtypes=("fp32",)),
    ],
)
def test_golden(op: str, fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, a column of two groups (padded with zeros: same amax), has its golden codes in both."""
    pow2 = mode == "golden-pow2"
    units = [unit for unit in loader.units("rowwise", fmt) if unit.dtype == dtype and unit.pow2 == pow2]
    size = max(len(unit.x[0]) for unit in units) + 1
    names = [unit.name for unit in units]
    x = torch.stack([from_bits([*unit.x[0], *[0] * (size - len(unit.x[0]))], DTYPES[dtype]) for unit in units])
    offs = torch.tensor([size, size, 2 * size], dtype=torch.int32)
    codes, inverse, padded_offs = quantize(op, (torch.cat([x.t(), x.t().flip(0)]),), offs, fmt, pow2)
    expected = torch.zeros((len(units), size), dtype=torch.uint8)
    for column, unit in enumerate(units):
        expected[column] = formats.get(fmt).nan_code if unit.scale == 0x7FC00000 else 0
        expected[column, : len(unit.codes[0])] = torch.tensor(unit.codes[0], dtype=torch.uint8)
    padded = -(-size // 16) * 16
    assert padded_offs.tolist() == [padded, padded, 2 * padded]
    expected_inverse = from_bits([unit.inverse_scale for unit in units], torch.float32)
    for group, start, wanted in ((0, 0, expected), (2, padded, expected.flip(1))):
        assert_bits_equal(expected_inverse, inverse[group], f"{fmt} inverse scale", names)
        found = codes.view(torch.uint8).t()[:, start : start + size]
        assert_bits_equal(wanted, found, f"{fmt} codes of group {group}", names)
    assert inverse[1].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("fmt", "groups"),
    [pytest.param(fmt, groups, id=f"colwise-{fmt}-bf16-oracle-{groups}") for fmt in FORMATS for groups in GROUPS],
)
def test_reference_against_oracle(fmt: str, groups: str, seed: int) -> None:
    """The reference gives what a loop over units in plain Python gives, that shares no line with it."""
    x, offs = grouped(groups, 3, torch.bfloat16, seed)
    for pow2, alignment in ((True, 16), (False, 32)):
        codes, inverse, padded_offs = colwise.quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment)
        expected, expected_inverse, expected_offs = oracle.quantize_groups(x, offs.tolist(), fmt, pow2, alignment)
        assert padded_offs.tolist() == expected_offs
        assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale")
        assert_bits_equal(expected, codes.view(torch.uint8), f"{fmt} codes")


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [pytest.param(fmt, dtype, id=f"colwise-{fmt}-{dtype}-oracle-contract") for fmt in FORMATS for dtype in DTYPES],
)
def test_reference_of_contract_rows_against_oracle(fmt: str, dtype: str, seed: int) -> None:
    """The same for every contract row, as a column of a group between two others."""
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed)
    x, offs = rows.x.t().repeat(3, 1), torch.tensor([17, 34, 51], dtype=torch.int32)
    for pow2 in MODES.values():
        codes, inverse, _ = colwise.quantize_colwise_grouped_reference(x, offs, fmt, pow2)
        expected, expected_inverse, _ = oracle.quantize_groups(x, offs.tolist(), fmt, pow2, 16)
        assert_bits_equal(expected_inverse.t(), inverse.t(), f"{fmt} inverse scale", rows.names)
        assert_bits_equal(expected.t(), codes.view(torch.uint8).t(), f"{fmt} codes", rows.names)


# --- against the reference: contract rows, groups, shapes, layouts ----------------------------------------------------


@pytest.mark.parametrize(("op", "fmt", "dtype", "mode"), cases("contract-pow2", "contract-plain"))
def test_contract_rows(op: str, fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, as the columns of a group of 17 rows: equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    inputs = inputs_of(op, contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed).x.t())
    offs = torch.tensor([17], dtype=torch.int32)
    assert_equals_reference(op, inputs, offs, fmt, quantize(op, inputs, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "groups"),
    [
        *cases(*GROUPS, ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("empty-middle", "longer-than-the-mean", ops=("colwise",), formats_=("e4m3fn",), dtypes=("fp32",)),
        *cases("empty-middle", ops=("colwise",), formats_=("e4m3fn", "e5m2", "e5m2fnuz"), dtypes=("bf16",)),
        *cases("empty-first", "no-rows", "tail", "negative", ops=("colwise_pair",), formats_=("e4m3fnuz",)),
    ],
)
def test_groups(
    op: str, fmt: str, dtype: str, groups: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]
) -> None:
    """Groups that are empty, single rows, long, followed by rows of none, or nonsense; nothing around is written."""
    x, offs = grouped(groups, 24, DTYPES[dtype], seed)
    inputs = inputs_of(op, x)
    result = quantize(op, inputs, offs, fmt)
    guarded_outputs()
    assert_equals_reference(op, inputs, offs, fmt, result)


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "alignment"),
    cases("32", "128", ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("bf16",)),
)
def test_alignments(op: str, fmt: str, dtype: str, alignment: str, seed: int, quantize: Op) -> None:
    """Groups start at multiples of the alignment; what is in between, and the tail, holds zero codes."""
    for groups in ("empty-middle", "nothing-right"):
        x, offs = grouped(groups, 24, DTYPES[dtype], seed)
        result = quantize(op, (x,), offs, fmt, alignment=int(alignment))
        assert result[2].remainder(int(alignment)).unique().tolist() == [0]
        assert_equals_reference(op, (x,), offs, fmt, result, alignment=int(alignment))


@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-e4m3fn-bf16-by-hand") for op in OPS])
def test_by_hand(op: str, quantize: Op) -> None:
    """3 and 2 rows around an empty group, one row of no group, to multiples of 16: every byte, written out."""
    x = torch.tensor([[1, 448], [2, -448], [448, 1], [0, -224], [-0.0, 448], [torch.inf, torch.nan]])
    inputs = inputs_of(op, x.to(torch.bfloat16))
    codes, inverse, *_, padded_offs = quantize(op, inputs, torch.tensor([3, 3, 5], dtype=torch.int32), "e4m3fn")
    assert padded_offs.tolist() == [16, 16, 32]
    assert inverse.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert codes.view(torch.uint8).t().tolist() == [
        [0x38, 0x40, 0x7E, *[0] * 13, 0x00, 0x80, *[0] * 14, *[0] * 16],
        [0x7E, 0xFE, 0x38, *[0] * 13, 0xF6, 0x7E, *[0] * 14, *[0] * 16],
    ]


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "width"),
    [
        *cases(*map(str, (0, *WIDTHS)), ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("13", "80", "129", ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("fp32",)),
        *cases("0", "1", "129", ops=("colwise_pair",), formats_=("e4m3fnuz",), dtypes=("bf16",)),
    ],
)
def test_widths(
    op: str, fmt: str, dtype: str, width: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]
) -> None:
    """Awkward widths: pytorch/ao#4627 stored the scales of a partial tile over the next columns' and past the end."""
    inputs = inputs_of(op, random_normal((21, int(width)), DTYPES[dtype], seed))
    offs = torch.tensor([18, 21], dtype=torch.int32)
    result = quantize(op, inputs, offs, fmt)
    guarded_outputs()
    assert_equals_reference(op, inputs, offs, fmt, result)


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "rows"), cases("1200", ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("bf16",))
)
def test_long_group(op: str, fmt: str, dtype: str, rows: str, seed: int, quantize: Op) -> None:
    """A group of 1,150 rows, more than any program holds, after one of 50; with a NaN in its last row."""
    x = random_normal((int(rows), 3), DTYPES[dtype], seed)
    x[-1, 1] = torch.nan
    offs = torch.tensor([50, 1200], dtype=torch.int32)
    assert_equals_reference(op, (x,), offs, fmt, quantize(op, (x,), offs, fmt))


# (rows, width, groups): sizes of models, for GPUs.
SCALES = {"16640x520-e64": (16640, 520, 64), "4100x2056-e3": (4100, 2056, 3)}


@pytest.mark.requires(gpus=1)
@pytest.mark.parametrize(("op", "fmt", "dtype", "scale"), cases(*SCALES))
def test_at_scale(op: str, fmt: str, dtype: str, scale: str, seed: int, quantize: Op, device: str) -> None:
    """Thousands of rows in groups of any size, a NaN and an infinity among them."""
    rows, width, e = SCALES[scale]
    x = random_normal((rows, width), DTYPES[dtype], seed)
    x[rows // 3, 5], x[rows // 2, width - 1] = torch.nan, -torch.inf
    cuts = torch.randint(0, rows, (e,), generator=torch.Generator().manual_seed(seed))
    offs = cuts.sort().values.to(torch.int32).to(device)
    inputs = inputs_of(op, x.to(device))
    for pow2 in MODES.values():
        assert_equals_reference(op, inputs, offs, fmt, quantize(op, inputs, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "layout"),
    [
        *cases(*LAYOUTS, ops=("colwise",), formats_=("e4m3fnuz",)),
        *cases("transposed", ops=("colwise_pair",), formats_=("e4m3fnuz",), dtypes=("bf16",)),
    ],
)
def test_layouts(op: str, fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((19, 40), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    others = inputs_of(op, x)[1:]
    offs = torch.tensor([18, 19], dtype=torch.int32)
    assert_equals_reference(op, (x, *others), offs, fmt, quantize(op, (held.view, *others), offs, fmt))
    held.assert_untouched()


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "word"), cases("odd-strides", ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("bf16",))
)
def test_odd_strides(op: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded gradient), a start that no vector load likes, offs that are a view."""
    x = random_normal((35, 70), DTYPES[dtype], seed).to(device)
    offs = torch.tensor([7, -9, 20, -9], dtype=torch.int32, device=device)[::2]
    for view in (x[:1].expand(33, -1), x[:, :1].expand(-1, 33), x[1:, 1:], x[:, 1::2]):
        assert_equals_reference(op, (view,), offs, fmt, quantize(op, (view,), offs, fmt))


@pytest.mark.parametrize(
    ("op", "width"),
    [pytest.param(op, width, id=f"{op}-e4m3fnuz-tail-{width}") for op in OPS for width in TAIL_WIDTHS],
)
def test_tail_lanes_are_neutral(op: str, width: int, quantize: Op, device: str) -> None:
    """All values -3 has amax 3 in any number of rows and columns, among infinities (ROCm/aiter#4288)."""
    held = guarded(torch.full((width, width), -3.0, dtype=torch.bfloat16), "row-pitch", device)
    result = quantize(op, inputs_of(op, held.view), torch.tensor([width], dtype=torch.int32), "e4m3fnuz")
    for codes, inverse in zip(result[:-1:2], result[1:-1:2], strict=True):
        back = formats.decode(codes[:width], "e4m3fnuz") * inverse
        assert back.unique().tolist() == [-3.0]


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, id=f"colwise-{fmt}-fp32-pow2-ladder") for fmt in ("e4m3fnuz", "e5m2")]
)
def test_pow2_ladder(fmt: str, quantize: Op) -> None:
    """amax = MAX * 2^-k for k = -100..40, and one float32 ulp to either side, each a column of its own."""
    exact = formats.get(fmt).max * torch.exp2(-torch.arange(-100, 41, dtype=torch.float64)).to(torch.float32)
    bits = exact.view(torch.int32)
    x = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)]).reshape(1, -1)
    offs = torch.tensor([1], dtype=torch.int32)
    for pow2 in MODES.values():
        assert_equals_reference("colwise", (x,), offs, fmt, quantize("colwise", (x,), offs, fmt, pow2), pow2)


# --- what a unit does to its neighbours -------------------------------------------------------------------------------

SPOILS: dict[str, float] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "neginf": float("-inf"),
    "zero": 0.0,
    "negzero": -0.0,
}


@pytest.mark.parametrize(
    ("op", "fmt", "dtype", "word"),
    [
        *cases("nan", "neginf", "negzero", ops=("colwise",), formats_=("e4m3fn",), dtypes=("bf16",)),
        *cases("nan", "negzero", ops=("colwise",), formats_=("e4m3fnuz",), dtypes=("fp32",)),
        *cases("inf", "zero", ops=("colwise",), formats_=("e5m2",), dtypes=("bf16",)),
        *cases("nan", ops=("colwise_pair",), formats_=("e5m2fnuz",), dtypes=("bf16",)),
    ],
)
def test_neighbours(op: str, fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their column of their group, but not the gap after it; zeros have scale 1.

    Every other unit is bit-unchanged. The group has more rows than the interpreter's programs hold.
    """
    clean = random_normal((90, 24), DTYPES[dtype], seed)
    x, row, column = clean.clone(), 80, 17
    x[slice(5, 86) if SPOILS[word] == 0 else row, column] = SPOILS[word]
    offs = torch.tensor([5, 86, 90], dtype=torch.int32)
    results = quantize(op, inputs_of(op, x), offs, fmt)
    clean_results = quantize(op, inputs_of(op, clean), offs, fmt)
    start, size = 16, 81
    code = 0x80 if word == "negzero" and formats.get(fmt).negative_zero else 0x00
    for place, spoilt in zip(range(0, len(results) - 1, 2), (column, 24 - 1 - column), strict=False):
        expected, expected_inverse = clean_results[place].view(torch.uint8).clone(), clean_results[place + 1].clone()
        expected[start : start + size, spoilt] = code if SPOILS[word] == 0 else formats.get(fmt).nan_code
        expected_inverse[1, spoilt] = 1.0 if SPOILS[word] == 0 else from_bits([0x7FC00000], torch.float32)[0]
        assert_bits_equal(expected_inverse, results[place + 1], "inverse scale")
        assert_bits_equal(expected.t(), results[place].view(torch.uint8).t(), "codes")


# --- size, determinism, refusals --------------------------------------------------------------------------------------


# (rows, columns, elements from row to row, end of the first group, transposed): the start of a group, a block of rows,
# a row in a block, a chunk of rows and a column are beyond 2^31 elements.
FAR: dict[str, tuple[int, int, int, int, bool]] = {
    "rows": (19, 5, 2**27, 17, False),
    "parts": (11, 5, 2**28, 9, False),
    "chunks": (70, 3, 2**25, 67, False),
    "chunks-of-1024": (1030, 3, 2**21, 1027, False),
    "columns": (3, 5, 2**30, 4, True),
}


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize(
    ("op", "far"),
    [
        # A GPU's chunks are longer; faulting in a thousand pages of a sparse file is slow.
        pytest.param(
            *(op, far),
            id=f"{op}-{far}-offsets-past-2e31",
            marks=[pytest.mark.requires(gpus=1)] if far == "chunks-of-1024" else [],
        )
        for op, far in (*(("colwise", far) for far in FAR), ("colwise_pair", "rows"), ("colwise_pair", "columns"))
    ],
)
def test_offsets_past_2e31(op: str, far: str, quantize: Op, device: str, tmp_path: Path) -> None:
    """Rows and columns whose offset passes 2^31 elements are found: index arithmetic has 64 bits."""
    rows, columns, pitch, end, transposed = FAR[far]
    near = random_normal((rows, columns), torch.bfloat16, seed=5)
    view = far_apart(near, pitch, device, tmp_path)
    near, view = (near.t(), view.t()) if transposed else (near, view)
    offs = torch.tensor([end, near.shape[0]], dtype=torch.int32)
    count = len(inputs_of(op, near))
    result = quantize(op, (view,) * count, offs, "e4m3fnuz")
    assert_equals_reference(op, (near,) * count, offs, "e4m3fnuz", result)


@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-e4m3fnuz-bf16-repeatable") for op in OPS])
def test_repeatable(op: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    inputs = inputs_of(op, random_normal((90, 50), torch.bfloat16, seed))
    offs = torch.tensor([80, 90], dtype=torch.int32)
    before = [tensor.clone() for tensor in (*inputs, offs)]
    first = quantize(op, inputs, offs, "e4m3fnuz")
    for expected, actual in zip(first, quantize(op, inputs, offs, "e4m3fnuz"), strict=True):
        assert_bits_equal(expected, actual, "second run")
    for expected, actual in zip(before, (*inputs, offs), strict=True):
        assert_bits_equal(expected, actual, "input after the op")


@pytest.mark.parametrize("op", [pytest.param(op, id=f"{op}-e4m3fnuz-opcheck") for op in OPS])
def test_opcheck(op: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views, for one group and no rows too."""
    overload = getattr(torch.ops.fp8stack, OPS[op]).default
    x, offs = torch.randn((19, 7), device=device), torch.tensor([3, 7], dtype=torch.int32, device=device)
    torch.library.opcheck(overload, (*inputs_of(op, x.to(torch.bfloat16).t()), offs, "e4m3fnuz", True, 32))
    for view in (x[:1], x[:0], x[:, :0]):
        assert_fake_agrees(overload, (*inputs_of(op, view), offs[:1], "e4m3fn", True, 128))


GOOD = (torch.zeros((2, 2)), torch.tensor([1, 2], dtype=torch.int32), 16)


@pytest.mark.parametrize(
    ("x", "offs", "alignment", "error", "words"),
    [
        pytest.param(GOOD[0].to(torch.float16), *GOOD[1:], UnsupportedDtype, "float16", id="colwise-refuses-fp16"),
        pytest.param(GOOD[0].to(torch.int32), *GOOD[1:], UnsupportedDtype, "int32", id="colwise-refuses-int32"),
        pytest.param(torch.zeros(4), *GOOD[1:], ValueError, "two dimensions", id="colwise-refuses-1d"),
        pytest.param(torch.zeros((1, 2, 3)), *GOOD[1:], ValueError, "two dimensions", id="colwise-refuses-3d"),
        pytest.param(GOOD[0], GOOD[1].long(), 16, ValueError, r"int64.*to\(torch.int32\)", id="colwise-refuses-int64"),
        pytest.param(GOOD[0], GOOD[1].reshape(1, 2), 16, ValueError, r"\(E,\)", id="colwise-refuses-2d-offs"),
        pytest.param(GOOD[0], GOOD[1][:0], 16, ValueError, "E >= 1", id="colwise-refuses-no-groups"),
        pytest.param(*GOOD[:2], 8, ValueError, "multiple of 16", id="colwise-refuses-alignment-8"),
        pytest.param(*GOOD[:2], 24, ValueError, "multiple of 16", id="colwise-refuses-alignment-24"),
        pytest.param(*GOOD[:2], 0, ValueError, "multiple of 16", id="colwise-refuses-alignment-0"),
    ],
)
def test_refuses(
    x: torch.Tensor, offs: torch.Tensor, alignment: int, error: type[Exception], words: str, device: str
) -> None:
    """Other dtypes, ranks, offs and alignments are refused by name, by each op."""
    for count, name in enumerate(OPS.values(), start=1):
        with pytest.raises(error, match=words):
            getattr(colwise, name)(*[x.to(device)] * count, offs.to(device), "e4m3fn", alignment=alignment)


@pytest.mark.requires(gpus=1)
def test_refuses_offs_elsewhere(device: str) -> None:
    """offs on the host beside x on the device would be a hidden synchronisation."""
    for count, name in enumerate(OPS.values(), start=1):
        with pytest.raises(ValueError, match=f"expected int32.* on {device}"):
            getattr(colwise, name)(*[GOOD[0].to(device)] * count, GOOD[1], "e4m3fn")


@pytest.mark.parametrize(
    "y",
    [
        pytest.param(torch.zeros((3, 2)), id="colwise_pair-refuses-other-rows"),
        pytest.param(torch.zeros((2, 2), dtype=torch.bfloat16), id="colwise_pair-refuses-other-dtype"),
    ],
)
def test_pair_refuses(y: torch.Tensor, device: str) -> None:
    """The two tensors of a pair have the same rows and dtype."""
    x, offs, _ = GOOD
    with pytest.raises(ValueError, match="the same rows, dtype and device"):
        colwise.quantize_colwise_grouped_pair(x.to(device), y.to(device), offs.to(device), "e4m3fn")


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, every size class; a chunk's parts divide its rows, for float32 too."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for e in (1, 32, 33, 256):
            row = launch.config(colwise.COLWISE_CONFIGS, arch, colwise.size_class(e))
            assert row.rows // 2 % row.parts == row.columns % 8 == 0
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(colwise.COLWISE_CONFIGS, "gfx9-4-generic", colwise.size_class(1))
