"""quantize_rowwise_and_colwise: row codes and padded column codes of groups of rows, bit by bit.

The golden rows of rowwise decide here too: a row of the tensor and a column of a group are the same scaling unit. A
second opinion (oracle.py) judges the reference; everything else is compared with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.device import detect
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import column_maxima, launch, rowwise_and_colwise
from fp8stack.kernels.column_maxima import BothConfig
from fp8stack.kernels.rowwise_and_colwise import (
    launch_rowwise_and_colwise,
    quantize_rowwise_and_colwise,
    quantize_rowwise_and_colwise_reference,
)
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

RESULTS = ("row codes", "row inverse scale", "column codes", "column inverse scale", "padded offs")
MODES = {"pow2": True, "plain": False}
Op = Callable[..., tuple[torch.Tensor, ...]]

# Widths that divide neither a block of columns nor a chunk of a row; the last has more than one of both.
WIDTHS = (0, 1, 17, 40, 129, 300)
# Where groups are is decided by what decides it in colwise.py: those that place programs differently.
SOME_GROUPS = (
    *("one", "one-of-one-row", "no-rows", "all-empty", "empty-first", "all-but-one-empty", "single-rows"),
    *("over-tile-edges", "longer-than-the-mean", "tail", "decreasing", "nothing-right"),
)
# As many programs as any offs can need: both groups, and the rows after them, end in a program with one row of 32.
MOST_PROGRAMS = {"most-programs": (99, (33, 66))}


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; tensors may lie on the CPU."""

    def call(
        x: torch.Tensor, offs: torch.Tensor, fmt: str, pow2: bool = True, alignment: int = 16
    ) -> tuple[torch.Tensor, ...]:
        here = [tensor if tensor.device.type == device else tensor.to(device) for tensor in (x, offs)]
        result: tuple[torch.Tensor, ...] = call_op(
            "quantize_rowwise_and_colwise", quantize_rowwise_and_colwise, *here, fmt, pow2=pow2, alignment=alignment
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
    """All results have the reference's bits, shapes and dtypes; column codes are column-major, the rest contiguous."""
    __tracebackhide__ = True
    expected = quantize_rowwise_and_colwise_reference(x, offs, fmt, pow2=pow2, alignment=alignment)
    # Where groups are, then the scales, then the codes: each is wrong where the one before it is, and says less.
    for what, wanted, found in reversed(list(zip(RESULTS, expected, result, strict=True))):
        assert_bits_equal(wanted, found, f"{fmt} {what}")
        dense = found.t() if what == "column codes" else found
        assert dense.is_contiguous(), f"{what} have strides {found.stride()}"


def cases(*suffixes: str, formats_: tuple[str, ...] = FORMATS, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    """(format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(fmt, dtype, suffix, id=f"rowwise_and_colwise-{fmt}-{dtype}-{suffix}")
        for fmt in formats_
        for dtype in dtypes
        for suffix in suffixes
    ]


def grouped(groups: str, width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows of the groups, width) and offs; every other row that belongs to no group holds an infinity."""
    rows, ends = (GROUPS | MOST_PROGRAMS)[groups]
    x = random_normal((rows, width), dtype, seed)
    x[min(max((*ends, 0)), rows) :: 2, -1:] = torch.inf
    return x, offsets(groups) if groups in GROUPS else torch.tensor(ends, dtype=torch.int32)


# --- against the golden rows and the second opinion -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "dtype", "mode"), [*cases("golden-pow2", dtypes=("bf16",)), *cases("golden-plain", dtypes=("fp32",))]
)
def test_golden(fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit has its golden codes, as a row, and as a column of a group (padded with zeros: same amax)."""
    pow2 = mode == "golden-pow2"
    units = [unit for unit in loader.units("rowwise", fmt) if unit.dtype == dtype and unit.pow2 == pow2]
    size = max(len(unit.x[0]) for unit in units) + 1
    names = [unit.name for unit in units]
    x = torch.stack([from_bits([*unit.x[0], *[0] * (size - len(unit.x[0]))], DTYPES[dtype]) for unit in units])
    expected = torch.zeros((len(units), size), dtype=torch.uint8)
    for row, unit in enumerate(units):
        expected[row] = formats.get(fmt).nan_code if unit.scale == 0x7FC00000 else 0
        expected[row, : len(unit.codes[0])] = torch.tensor(unit.codes[0], dtype=torch.uint8)
    expected_inverse = from_bits([unit.inverse_scale for unit in units], torch.float32)
    row_codes, row_inverse, *_ = quantize(x, torch.tensor([3, len(units)], dtype=torch.int32), fmt, pow2)
    assert_bits_equal(expected_inverse, row_inverse, f"{fmt} row inverse scale", names)
    assert_bits_equal(expected, row_codes.view(torch.uint8), f"{fmt} row codes", names)
    *_, codes, inverse, padded_offs = quantize(x.t(), torch.tensor([0, size], dtype=torch.int32), fmt, pow2)
    assert padded_offs.tolist() == [0, -(-size // 16) * 16]
    assert_bits_equal(expected_inverse, inverse[1], f"{fmt} column inverse scale", names)
    assert_bits_equal(expected, codes.view(torch.uint8).t()[:, :size], f"{fmt} column codes", names)


@pytest.mark.parametrize(
    ("fmt", "groups"),
    [
        pytest.param(fmt, groups, id=f"rowwise_and_colwise-{fmt}-bf16-oracle-{groups}")
        for fmt in FORMATS
        for groups in ("empty-middle", "tail", "no-rows", "decreasing")
    ],
)
def test_reference_against_oracle(fmt: str, groups: str, seed: int) -> None:
    """The reference gives what a loop over units in plain Python gives; rows are the columns of one group, turned."""
    x, offs = grouped(groups, 5, torch.bfloat16, seed)
    for pow2, alignment in ((True, 16), (False, 32)):
        found = quantize_rowwise_and_colwise_reference(x, offs, fmt, pow2, alignment)
        row_codes, row_inverse, _ = oracle.quantize_groups(x.t(), [5], fmt, pow2, 16)
        codes, inverse, padded_offs = oracle.quantize_groups(x, offs.tolist(), fmt, pow2, alignment)
        expected = (row_codes[:5].t(), row_inverse[0], codes, inverse, torch.tensor(padded_offs, dtype=torch.int32))
        for what, wanted, result in zip(RESULTS, expected, found, strict=True):
            bits = result.view(torch.uint8) if what.endswith("codes") else result
            assert_bits_equal(wanted, bits, f"{fmt} {what}")


# --- against the reference: contract rows, groups, shapes, layouts ----------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "dtype", "mode"), [*cases("contract-pow2", dtypes=("bf16",)), *cases("contract-plain", dtypes=("fp32",))]
)
def test_contract_rows(fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows at once, as rows, and as the columns of a group: equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 17, seed).x
    for x in (rows, rows.t()):
        offs = torch.tensor([x.shape[0]], dtype=torch.int32)
        assert_equals_reference(x, offs, fmt, quantize(x, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(
    ("fmt", "dtype", "groups"),
    [
        *cases(*SOME_GROUPS, formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases(*MOST_PROGRAMS, formats_=("e4m3fnuz",)),
        *cases("empty-middle", formats_=("e4m3fn", "e5m2", "e5m2fnuz"), dtypes=("bf16",)),
    ],
)
def test_groups(
    fmt: str, dtype: str, groups: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]
) -> None:
    """Groups that are empty, single rows, long, followed by rows of none, or nonsense; nothing around is written."""
    x, offs = grouped(groups, 24, DTYPES[dtype], seed)
    result = quantize(x, offs, fmt)
    guarded_outputs()
    assert_equals_reference(x, offs, fmt, result)


@pytest.mark.parametrize(("fmt", "dtype", "alignment"), cases("128", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_alignments(fmt: str, dtype: str, alignment: str, seed: int, quantize: Op) -> None:
    """Groups start at multiples of the alignment; what is in between, and the tail, holds zero codes."""
    x, offs = grouped("empty-middle", 24, DTYPES[dtype], seed)
    result = quantize(x, offs, fmt, alignment=int(alignment))
    assert_equals_reference(x, offs, fmt, result, alignment=int(alignment))


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fn", id="rowwise_and_colwise-e4m3fn-bf16-by-hand")])
def test_by_hand(fmt: str, quantize: Op) -> None:
    """3 and 2 rows around an empty group, one row of no group, to multiples of 16: every byte, written out."""
    x = torch.tensor([[1, 448], [2, -448], [448, 1], [0, -224], [-0.0, 448], [7, torch.nan]], dtype=torch.bfloat16)
    offs = torch.tensor([3, 3, 5], dtype=torch.int32)
    row_codes, row_inverse, codes, inverse, padded_offs = quantize(x, offs, fmt)
    assert row_inverse[:5].tolist() == [1.0, 1.0, 1.0, 0.5, 1.0]
    assert row_inverse[5].isnan()
    assert row_codes.view(torch.uint8).tolist() == [
        *([0x38, 0x7E], [0x40, 0xFE], [0x7E, 0x38]),
        *([0x00, 0xFE], [0x80, 0x7E]),
        [0x7F, 0x7F],
    ]
    assert padded_offs.tolist() == [16, 16, 32]
    assert inverse.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert codes.view(torch.uint8).t().tolist() == [
        [0x38, 0x40, 0x7E, *[0] * 13, 0x00, 0x80, *[0] * 14, *[0] * 16],
        [0x7E, 0xFE, 0x38, *[0] * 13, 0xF6, 0x7E, *[0] * 14, *[0] * 16],
    ]


@pytest.mark.parametrize(
    ("fmt", "dtype", "width"),
    [
        *cases(*map(str, WIDTHS), formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("40", "300", formats_=("e4m3fnuz",), dtypes=("fp32",)),
    ],
)
def test_widths(fmt: str, dtype: str, width: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]) -> None:
    """Awkward widths: pytorch/ao#4627 stored the scales of a partial tile over the next columns' and past the end."""
    x = random_normal((21, int(width)), DTYPES[dtype], seed)
    offs = torch.tensor([18], dtype=torch.int32)
    result = quantize(x, offs, fmt)
    guarded_outputs()
    assert_equals_reference(x, offs, fmt, result)


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases("rows-read-twice", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_rows_read_twice(
    fmt: str, dtype: str, word: str, seed: int, quantize: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows too long to stay in registers are read twice; here rows of 300 are too long."""
    monkeypatch.setattr(column_maxima, "_HELD", 256)
    x, offs = random_normal((5, 300), DTYPES[dtype], seed), torch.tensor([2], dtype=torch.int32)
    x[3, 290] = torch.nan
    assert_equals_reference(x, offs, fmt, quantize(x, offs, fmt))


# (rows, width, groups): sizes of models, for GPUs; rows that are held and rows that are not.
SCALES = {"16640x520-e64": (16640, 520, 64), "4100x2056-e3": (4100, 2056, 3), "1025x8200-e33": (1025, 8200, 33)}


@pytest.mark.requires(gpus=1)
@pytest.mark.parametrize(("fmt", "dtype", "scale"), cases(*SCALES))
def test_at_scale(fmt: str, dtype: str, scale: str, seed: int, quantize: Op, device: str) -> None:
    """Thousands of rows in groups of any size, a NaN and an infinity among them."""
    rows, width, e = SCALES[scale]
    x = random_normal((rows, width), DTYPES[dtype], seed)
    x[rows // 3, 5], x[rows // 2, width - 1] = torch.nan, -torch.inf
    cuts = torch.randint(0, rows, (e,), generator=torch.Generator().manual_seed(seed))
    offs = cuts.sort().values.to(torch.int32).to(device)
    for pow2 in MODES.values():
        assert_equals_reference(x.to(device), offs, fmt, quantize(x, offs, fmt, pow2), pow2)


@pytest.mark.parametrize(
    ("fmt", "dtype", "layout"),
    [
        *cases(*LAYOUTS, formats_=("e4m3fnuz",), dtypes=("bf16",)),
        *cases("every-third-column", "transposed", formats_=("e4m3fnuz",), dtypes=("fp32",)),
    ],
)
def test_layouts(fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((19, 40), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    offs = torch.tensor([18, 19], dtype=torch.int32)
    assert_equals_reference(x, offs, fmt, quantize(held.view, offs, fmt))
    held.assert_untouched()


@pytest.mark.parametrize(("fmt", "dtype", "word"), cases("odd-strides", formats_=("e4m3fnuz",), dtypes=("bf16",)))
def test_odd_strides(fmt: str, dtype: str, word: str, seed: int, quantize: Op, device: str) -> None:
    """Strides of zero (an expanded gradient), a start that no vector load likes, offs that are a view."""
    x = random_normal((35, 70), DTYPES[dtype], seed).to(device)
    offs = torch.tensor([7, -9, 20, -9], dtype=torch.int32, device=device)[::2]
    for view in (x[:1].expand(33, -1), x[:, :1].expand(-1, 33), x[1:, 1:]):
        assert_equals_reference(view, offs, fmt, quantize(view, offs, fmt))


@pytest.mark.parametrize(
    "width", [pytest.param(width, id=f"rowwise_and_colwise-e4m3fnuz-tail-{width}") for width in TAIL_WIDTHS]
)
def test_tail_lanes_are_neutral(width: int, quantize: Op, device: str) -> None:
    """All values -3 has amax 3 in any number of rows and columns, among infinities (ROCm/aiter#4288)."""
    held = guarded(torch.full((width, width), -3.0, dtype=torch.bfloat16), "row-pitch", device)
    offs = torch.tensor([width], dtype=torch.int32)
    row_codes, row_inverse, codes, inverse, _ = quantize(held.view, offs, "e4m3fnuz")
    rows = formats.decode(row_codes, "e4m3fnuz") * row_inverse.unsqueeze(1)
    columns = formats.decode(codes[:width], "e4m3fnuz") * inverse
    assert rows.unique().tolist() == columns.unique().tolist() == [-3.0]


# --- what a unit does to its neighbours -------------------------------------------------------------------------------

SPOILS: dict[str, float] = {"nan": float("nan"), "inf": float("inf"), "neginf": float("-inf")}


@pytest.mark.parametrize(
    ("fmt", "dtype", "word"),
    [
        *cases("nan", formats_=("e4m3fn", "e4m3fnuz"), dtypes=("bf16",)),
        *cases("inf", formats_=("e5m2",), dtypes=("fp32",)),
        *cases("neginf", formats_=("e5m2fnuz",), dtypes=("fp32",)),
    ],
)
def test_neighbours(fmt: str, dtype: str, word: str, seed: int, quantize: Op) -> None:
    """NaN and Inf poison their row, and their column of their group but not the gap after it; no other unit."""
    clean = random_normal((90, 24), DTYPES[dtype], seed)
    x, row, column = clean.clone(), 80, 17
    x[row, column] = SPOILS[word]
    offs = torch.tensor([5, 86], dtype=torch.int32)
    results, expected = quantize(x, offs, fmt), quantize(clean, offs, fmt)
    row_codes, row_inverse, codes, inverse, _ = (
        tensor.view(torch.uint8).clone() if what.endswith("codes") else tensor.clone()
        for what, tensor in zip(RESULTS, expected, strict=True)
    )
    nan = from_bits([0x7FC00000], torch.float32)[0]
    row_codes[row], row_inverse[row] = formats.get(fmt).nan_code, nan
    codes[16 : 16 + 81, column], inverse[1, column] = formats.get(fmt).nan_code, nan
    for what, wanted, found in zip(RESULTS, (row_codes, row_inverse, codes, inverse), results[:4], strict=False):
        assert_bits_equal(wanted, found.view(torch.uint8) if what.endswith("codes") else found, what)


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, id=f"rowwise_and_colwise-{fmt}-zeros") for fmt in ("e4m3fn", "e4m3fnuz")]
)
def test_zeros(fmt: str, quantize: Op) -> None:
    """Zero rows and columns have scale 1 and zero codes, with the sign that OCP formats have (pytorch/ao#4713)."""
    x = torch.ones((20, 24), dtype=torch.bfloat16)
    x[3], x[:, 7] = -0.0, -0.0
    row_codes, row_inverse, codes, inverse, _ = quantize(x, torch.tensor([20], dtype=torch.int32), fmt)
    negative = 0x80 if formats.get(fmt).negative_zero else 0x00
    assert (float(row_inverse[3]), float(inverse[0, 7])) == (1.0, 1.0)
    assert row_codes.view(torch.uint8)[3].unique().tolist() == [negative]
    assert codes.view(torch.uint8)[:20, 7].unique().tolist() == [negative]
    assert codes.view(torch.uint8)[20:].unique().tolist() == [0x00]


# Both ways to launch the op, whichever of them the table chose for this machine.
WAYS: dict[str, BothConfig] = {
    "apart": BothConfig(0, 0, 0, 0, False, False, 0, 0, 0, 0, 0, "every number 0: two launches, each reads x"),
    "one-read": BothConfig(32, 2, 512, 1, False, False, 64, 64, 16, 1, 0, "rows leave the maxima of columns behind"),
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [pytest.param(way, dtype, id=f"rowwise_and_colwise-e4m3fnuz-{dtype}-{way}") for way in WAYS for dtype in DTYPES],
)
def test_ways(way: str, dtype: str, seed: int, device: str) -> None:
    """The way to launch changes no bit: groups of no rows, of few, of more than a tile; rows past the last one."""
    x = random_normal((180, 72), DTYPES[dtype], seed)
    offs = torch.tensor([0, 3, 3, 140, 160], dtype=torch.int32)
    target = detect(device).target.name
    result = launch_rowwise_and_colwise(
        x.to(device), offs.to(device), formats.get("e4m3fnuz"), True, 16, WAYS[way], target
    )
    assert_equals_reference(x, offs, "e4m3fnuz", result)


# --- size, determinism, refusals --------------------------------------------------------------------------------------

# (rows, columns, elements from row to row, end of the first group, transposed)
FAR: dict[str, tuple[int, int, int, int, bool]] = {
    "rows": (19, 5, 2**27, 17, False),
    "columns": (3, 5, 2**30, 4, True),
}


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("far", [pytest.param(far, id=f"rowwise_and_colwise-{far}-offsets-past-2e31") for far in FAR])
def test_offsets_past_2e31(far: str, quantize: Op, device: str, tmp_path: Path) -> None:
    """Rows and columns whose offset passes 2^31 elements are found: index arithmetic has 64 bits."""
    rows, columns, pitch, end, transposed = FAR[far]
    near = random_normal((rows, columns), torch.bfloat16, seed=5)
    view = far_apart(near, pitch, device, tmp_path)
    near, view = (near.t(), view.t()) if transposed else (near, view)
    offs = torch.tensor([end], dtype=torch.int32)
    assert_equals_reference(near, offs, "e4m3fnuz", quantize(view, offs, "e4m3fnuz"))


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="rowwise_and_colwise-e4m3fnuz-bf16-repeatable")])
def test_repeatable(fmt: str, seed: int, quantize: Op) -> None:
    """Call 2 gives the bits of call 1 (triton-lang/triton#4217), and the input is not written to."""
    x, offs = random_normal((90, 50), torch.bfloat16, seed), torch.tensor([80], dtype=torch.int32)
    before = x.clone(), offs.clone()
    first = quantize(x, offs, fmt)
    for expected, actual in zip(first, quantize(x, offs, fmt), strict=True):
        assert_bits_equal(expected, actual, "second run")
    for expected, actual in zip(before, (x, offs), strict=True):
        assert_bits_equal(expected, actual, "input after the op")


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="rowwise_and_colwise-e4m3fnuz-opcheck")])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, for views, for one group and no rows too."""
    overload = torch.ops.fp8stack.quantize_rowwise_and_colwise.default
    x, offs = torch.randn((19, 7), device=device), torch.tensor([3, 5], dtype=torch.int32, device=device)
    torch.library.opcheck(overload, (x.to(torch.bfloat16).t(), offs, fmt, True, 32))
    for view in (x[:1], x[:0], x[:, :0]):
        assert_fake_agrees(overload, (view, offs[:1], fmt, True, 128))


GOOD = (torch.zeros((2, 2)), torch.tensor([1, 2], dtype=torch.int32), 16)


@pytest.mark.parametrize(
    ("x", "offs", "alignment", "error", "words"),
    [
        pytest.param(*(GOOD[0].half(), *GOOD[1:]), UnsupportedDtype, "float16", id="rowwise_and_colwise-refuses-fp16"),
        pytest.param(*(torch.zeros(4), *GOOD[1:]), ValueError, "two dimensions", id="rowwise_and_colwise-refuses-1d"),
        pytest.param(*(GOOD[0], GOOD[1].long(), 16), ValueError, "int64", id="rowwise_and_colwise-refuses-int64"),
        pytest.param(*(GOOD[0], GOOD[1][:0], 16), ValueError, "E >= 1", id="rowwise_and_colwise-refuses-no-groups"),
        pytest.param(*(*GOOD[:2], 24), ValueError, "multiple of 16", id="rowwise_and_colwise-refuses-alignment-24"),
    ],
)
def test_refuses(
    x: torch.Tensor, offs: torch.Tensor, alignment: int, error: type[Exception], words: str, device: str
) -> None:
    """Other dtypes, ranks, offs and alignments are refused by name."""
    with pytest.raises(error, match=words):
        quantize_rowwise_and_colwise(x.to(device), offs.to(device), "e4m3fn", alignment=alignment)


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, every size class; a chunk's parts divide its rows, for float32 too."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for e in (1, 32, 33, 256):
            for k in (1, 2049, 8193):
                # A row that says apart has no numbers of its own.
                name = rowwise_and_colwise.size_class(e, k)
                row = launch.config(rowwise_and_colwise.ROWWISE_AND_COLWISE_CONFIGS, arch, name)
                assert row.apart or row.rows // 2 % row.parts == row.columns % 8 == 0
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(rowwise_and_colwise.ROWWISE_AND_COLWISE_CONFIGS, "gfx9-4-generic", "e<=32 k<=2048")
