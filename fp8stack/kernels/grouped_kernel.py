"""The Triton kernel behind grouped_gemm.py: one persistent kernel for products in groups, FP8 or bf16.

    rows          out[m, n]    = sum_k a[m, k] * b[e, k, n]                     row m belongs to group e
    contraction   out[e, r, c] = sum over the m of group e of a[r, m] * b[m, c]

each times the inverse scale of its row, then of its column, in float32, and rounded once. Here a has ROWS, b has
COLUMNS, and what they share is the DEPTH; groups divide the ROWS of a, or the DEPTH.

Who computes what. The grid is as large as the GPU, and programs walk over tiles of all groups. Where groups end is
known on the device only, so a first small kernel, _list_tiles_kernel, writes down for each program the tiles that it
will do (LISTED words each), and clears the rows that belong to no group. It could be part of the main kernel, but for
one thing: a warp-specialised loop (`specialize`) takes no scan beside it (Triton 3.6).

Order of tiles: group by group; in a group the columns sweep over panels of `panel` row tiles, so that the programs
that run at one time share few rows of a and few columns of b, which stay in the L2. Where a GPU has several dies,
neighbours in this order are on one die.

How operands arrive.
    tma            bulk tensor copies, sm_90 and later. What lies outside of a tensor arrives as zero, so no mask is
                   needed; rows of the next group are computed with and not stored. Groups along the contraction must
                   not be read past their end: either each is a whole number of steps (`alignment`), or each tile makes
                   descriptors that end with its group
    plain loads    everywhere else: 16 bytes a lane, along the contraction masked only where a step may pass the end;
                   rows past the last are replaced by the last one, not masked
FP8 operands must be contiguous along the contraction: matrix units take no others. bf16 ones may be either way.

FP8 on sm_90 is summed with about 14 bits by the matrix unit itself. fast_accum leaves it at that; otherwise the sum of
every 128 terms is added to a float32 one, for which the tile must leave registers: a configuration of its own
("fp8-exact"). With every 256 instead, sums of 2,048 terms of one sign were off by up to 2^-8.2 on an H200.

In the interpreter (numerics.md, section 7) codes are decoded by our own decoder and dots are float32; results leave as
float32 and are rounded afterwards. Not here: the contract and its checks, other backends (grouped_gemm.py).
"""

import functools
from dataclasses import dataclass, replace

import torch

from fp8stack import _triton, device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, groups, launch

LISTED = 8
"""int32 words of a listed tile: group, start and size of the group, row tile, column tile, fill, unused, tiles."""

_CHUNK = 64  # tiles that a program lists at a time
_CLEARED = 4096  # elements of a store of zeros
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class GroupedConfig:
    """How to launch for one size class.

    block_m, block_n, block_k: rows, columns and depth of a tile. stages: of the pipeline of loads. tma: load by bulk
    tensor copies. flatten: overlap the end of one tile with the loads of the next. specialize: warps of their own for
    the loads (4 warps; two groups of 4 multiply). split: parts in which a tile is stored. panel: row tiles that columns
    sweep over together. programs: a multiprocessor. measured: what says so.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    tma: bool
    flatten: bool
    specialize: bool
    split: int
    panel: int
    programs: int
    measured: str


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"
KINDS = ("fp8", "fp8-exact", "bf16")
"""What is multiplied: FP8 with fast accumulation, FP8 with a float32 sum of each step, bf16."""


def size_class(in_rows: bool, kind: str) -> str:
    """The size class of a product: groups in the rows or along the contraction; one of KINDS.

    Not of the number of tokens, which must not choose a kernel.
    """
    return f"{'rows' if in_rows else 'contraction'} {kind}"


_CLASSES = tuple(size_class(in_rows, kind) for in_rows in (True, False) for kind in KINDS)


def _rows_of(targets: tuple[str, ...], *configs: GroupedConfig) -> dict[tuple[str, str], GroupedConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


def _tma(block_m: int, block_n: int, block_k: int, stages: int, split: int) -> GroupedConfig:
    return GroupedConfig(block_m, block_n, block_k, 8, stages, True, True, False, split, 16, 1, _UNMEASURED)


def _plain(block_m: int, block_n: int, block_k: int, stages: int) -> GroupedConfig:
    return GroupedConfig(block_m, block_n, block_k, 8, stages, False, False, False, 1, 16, 1, _UNMEASURED)


def _interpreted(block_k: int, tma: bool, split: int) -> GroupedConfig:
    return GroupedConfig(64, 128, block_k, 1, 1, tma, tma, False, split, 2, 3, _INTERPRETER)


# (target, size class) -> configuration, in the order of _CLASSES.
GROUPED_CONFIGS: dict[tuple[str, str], GroupedConfig] = {
    # 128x256 is the largest tile that registers hold, and four steps of 48 KiB fill the shared memory. A float32 sum
    # beside that of the matrix unit leaves room for half the columns.
    **_rows_of(
        ("sm_90", "sm_100", "sm_103"),
        _tma(128, 256, 128, 4, 2),
        _tma(128, 128, 128, 4, 1),
        _tma(128, 256, 64, 4, 2),
        _tma(128, 256, 128, 4, 2),
        _tma(128, 128, 128, 4, 1),
        _plain(128, 256, 64, 3),
    ),
    # Swept on an H200, torch 2.11, Triton 3.6; each file in baselines/ has the other configurations.
    ("sm_90", "rows fp8"): GroupedConfig(
        128, 256, 128, 8, 4, True, True, False, 2, 32, 1, "1.39 to 1.42x torch: h200/grouped_gemm-fp8-rows.json"
    ),
    ("sm_90", "rows fp8-exact"): GroupedConfig(
        128,
        128,
        256,
        8,
        3,
        True,
        True,
        False,
        1,
        32,
        1,
        "0.94 and 3.3x torch exact: h200/exact-products.json",
    ),
    # Specialised loops were 5 to 13 % faster here, but Triton 3.6 makes wrong sums of some of their siblings, and
    # without whole steps such a row is four warps that spill.
    ("sm_90", "contraction fp8"): GroupedConfig(
        128,
        256,
        128,
        8,
        3,
        True,
        True,
        False,
        1,
        8,
        1,
        "1.08 to 1.22x torch in groups of 128: h200/grouped_gemm-fp8-contraction.json",
    ),
    ("sm_90", "contraction fp8-exact"): GroupedConfig(
        128,
        128,
        256,
        8,
        3,
        True,
        True,
        False,
        1,
        32,
        1,
        "0.95 and 2x torch exact: h200/exact-products.json",
    ),
    ("sm_90", "contraction bf16"): GroupedConfig(
        128, 256, 64, 8, 3, True, True, False, 1, 32, 1, "0.91 to 0.92x torch: h200/grouped_gemm-bf16-contraction.json"
    ),
    # 100 KiB of shared memory.
    **_rows_of(
        ("sm_120", "sm_89", "sm_87", "sm_86", "sm_80"),
        _plain(128, 128, 64, 3),
        _plain(128, 128, 64, 3),
        _plain(128, 128, 32, 3),
        _plain(128, 128, 64, 3),
        _plain(128, 128, 64, 3),
        _plain(128, 128, 32, 3),
    ),
    # Two stages are one in LDS and one in registers; larger tiles spill.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        _plain(128, 256, 128, 2),
        _plain(128, 256, 128, 2),
        _plain(128, 256, 64, 2),
        _plain(128, 256, 128, 2),
        _plain(128, 256, 128, 2),
        _plain(128, 128, 64, 2),
    ),
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        _plain(128, 128, 64, 2),
        _plain(128, 128, 64, 2),
        _plain(128, 128, 32, 2),
        _plain(128, 128, 64, 2),
        _plain(128, 128, 64, 2),
        _plain(128, 128, 32, 2),
    ),
    # The interpreter runs program after program in Python: few programs and steps; both ways to load, both to store.
    **_rows_of(
        ("cpu",),
        _interpreted(64, True, 2),
        _interpreted(64, False, 1),
        _interpreted(32, True, 1),
        _interpreted(32, True, 2),
        _interpreted(32, False, 1),
        _interpreted(32, False, 1),
    ),
}

# Dies of a GPU, between which programs are dealt in turn ("AMD CDNA 3" and "CDNA 4" white papers). Where they do not
# divide the programs (MI300A has 6) the order is left as it is.
_DIES = {"gfx942": 8, "gfx950": 8}


@jit
def _program(DIES: tl.constexpr):
    """This program's place in the order of tiles, and the number of programs: neighbours are on one die."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if DIES > 1:  # noqa: SIM102 - a constant for the compiler, and a number that it does not know
        if programs % DIES == 0:
            program = program % DIES * (programs // DIES) + program // DIES
    return program, programs


@jit
def clear_rows(out, first, ROWS, COLUMNS, program, programs, CLEARED: tl.constexpr):
    """Zeros in the rows of out from first on, this program's share of them."""
    start = out + first.to(tl.int64) * COLUMNS
    count = (ROWS - first).to(tl.int64) * COLUMNS
    lanes = tl.arange(0, CLEARED).to(tl.int64)
    for block in range(program, tl.cdiv(count, CLEARED), programs):
        at = tl.cast(block, tl.int64) * CLEARED + lanes
        tl.store(start + at, tl.zeros((CLEARED,), out.dtype.element_ty), mask=at < count)


@jit(do_not_specialize=["ROWS", "DEPTH", "E", "capacity"])
def _list_tiles_kernel(
    offs,
    listed,
    out,
    ROWS,
    COLUMNS,
    DEPTH,
    E,
    capacity,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PANEL: tl.constexpr,
    IN_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    CLEARED: tl.constexpr,
    LISTED: tl.constexpr,
    DIES: tl.constexpr,
):
    program, programs = _program(DIES)
    lanes = tl.arange(0, LANES)
    column_tiles = tl.cdiv(COLUMNS, BLOCK_N)
    fill = tl.zeros((LANES,), tl.int32)
    if IN_ROWS:
        starts, sizes = groups.extents(offs, ROWS, E, LANES)
        row_tiles = (sizes + (BLOCK_M - 1)) // BLOCK_M
    else:
        starts, sizes = groups.extents(offs, DEPTH, E, LANES)
        row_tiles = tl.where(lanes < E, tl.cdiv(ROWS, BLOCK_M), 0)
        # A group that breaks the promise comes out as NaN, and is not read.
        broken = (starts % ALIGNMENT != 0) | (sizes % ALIGNMENT != 0)
        fill = tl.where(broken & (sizes > 0), 0x7FC00000, 0)
        sizes = tl.where(broken, 0, sizes)
        starts = starts // ALIGNMENT * ALIGNMENT
    tiles = row_tiles * column_tiles
    ends = tl.cumsum(tiles, 0)
    mine = tl.maximum(tl.cdiv(tl.max(ends, 0) - program, programs), 0)
    listed += tl.cast(program, tl.int64) * capacity * LISTED
    tl.store(listed + 7, mine)
    for first in range(0, mine, CHUNK):
        place = first + tl.arange(0, CHUNK)
        tile = program + place * programs
        group = tl.sum(tl.where(ends[None, :] <= tile[:, None], 1, 0), 1)
        here = lanes[None, :] == group[:, None]
        start = tl.sum(tl.where(here, starts[None, :], 0), 1)
        size = tl.sum(tl.where(here, sizes[None, :], 0), 1)
        filled = tl.sum(tl.where(here, fill[None, :], 0), 1)
        height = tl.sum(tl.where(here, row_tiles[None, :], 0), 1)
        within = tile - tl.sum(tl.where(here, (ends - tiles)[None, :], 0), 1)
        panel = within // (PANEL * column_tiles)
        within -= panel * (PANEL * column_tiles)
        panel_rows = tl.maximum(tl.minimum(height - panel * PANEL, PANEL), 1)
        to = listed + place * LISTED
        inside = place < mine
        tl.store(to, group, mask=inside)
        tl.store(to + 1, start, mask=inside)
        tl.store(to + 2, size, mask=inside)
        tl.store(to + 3, panel * PANEL + within % panel_rows, mask=inside)
        tl.store(to + 4, within // panel_rows, mask=inside)
        tl.store(to + 5, filled, mask=inside)
    if IN_ROWS:
        clear_rows(out, tl.max(starts + sizes, 0), ROWS, COLUMNS, program, programs, CLEARED)


@jit
def _values(elements, DECODE: tl.constexpr):
    """What a dot takes: the elements, or in the interpreter float32 of codes (DECODE their format) or of bf16."""
    if DECODE is not None:
        if elements.dtype == tl.uint8:
            elements = cast.decode(elements, DECODE[0], DECODE[1], DECODE[2], DECODE[3], DECODE[4])
        else:
            elements = cast.float_bits(elements).to(tl.float32, bitcast=True)
    return elements


@jit
def _typed(pointer, TYPE: tl.constexpr):
    """A pointer to codes or bf16 bits as a pointer to what they are; unchanged in the interpreter (None)."""
    if TYPE is not None:
        pointer = pointer.to(tl.pointer_type(TYPE), bitcast=True)
    return pointer


@jit
def _descriptor(pointer, outer, depth, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, ALONG: tl.constexpr):
    """A descriptor of tiles (BLOCK, BLOCK_K) of a tensor (outer, depth), contiguous ALONG the depth, or transposed."""
    if ALONG:
        return tl.make_tensor_descriptor(
            pointer, shape=[outer, depth], strides=[stride, 1], block_shape=[BLOCK, BLOCK_K]
        )
    else:
        return tl.make_tensor_descriptor(
            pointer, shape=[depth, outer], strides=[stride, 1], block_shape=[BLOCK_K, BLOCK]
        )


@jit
def _pointers(pointer, outer, depth, limit, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, ALONG: tl.constexpr):
    """Pointers to a tile like _descriptor's, at element (outer, depth); beyond `limit` more rows, the last one again.

    A 64-bit start and 32-bit steps. Where the contraction is not contiguous, what is beyond the limit is masked.
    """
    across, along = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    if ALONG:
        start = pointer + (tl.cast(outer, tl.int64) * stride + depth)
        return start + (tl.minimum(across, limit - 1)[:, None] * stride + along[None, :])
    else:
        start = pointer + (tl.cast(depth, tl.int64) * stride + outer)
        return start + (along[:, None] * stride + across[None, :])


@jit
def _load_step(
    pointers, left, limit, UNIT: tl.constexpr, DEPTH_UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    ALONG: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The tile at pointers, zero from depth `left` on, and as _pointers says. DEPTH_UNIT divides `left`."""
    if ALONG:
        if WHOLE:
            return tl.load(pointers)
        else:
            inside = tl.arange(0, BLOCK_K) < left // DEPTH_UNIT * DEPTH_UNIT
            return tl.load(pointers, mask=inside[None, :], other=0.0)
    else:
        inside = tl.arange(0, BLOCK) < limit // UNIT * UNIT
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_K) < left)[:, None] & inside[None, :], other=0.0)


@jit(do_not_specialize=["ROWS", "DEPTH", "E", "capacity", "a_pitch", "b_pitch"])
def _grouped_kernel(
    a,
    b,
    inverse_scale_a,
    inverse_scale_b,
    listed,
    out,
    ROWS,
    COLUMNS,
    DEPTH,
    E,
    capacity,
    a_pitch,
    b_pitch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNIT: tl.constexpr,
    A_TYPE: tl.constexpr,
    B_TYPE: tl.constexpr,
    A_DECODE: tl.constexpr,
    B_DECODE: tl.constexpr,
    A_ALONG: tl.constexpr,
    B_ALONG: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    LISTED: tl.constexpr,
    DIES: tl.constexpr,
):
    """TMA: "none"; "tensor", descriptors of the whole tensors; "group", of a tile's group. WHOLE: no step of BLOCK_K
    passes the end of the contraction. UNIT: elements of 16 bytes, which divide pitches and, in the rows, depths."""
    # Groups of bf16 along the contraction end anywhere: a mask in whole units would lose their last rows.
    DEPTH_UNIT: tl.constexpr = UNIT if IN_ROWS or ALIGNMENT % UNIT == 0 else 1
    program, _ = _program(DIES)
    listed += tl.cast(program, tl.int64) * capacity * LISTED
    mine = tl.load(listed + 7)
    a_stride, b_stride = a_pitch * UNIT, b_pitch * UNIT
    a, b = _typed(a, A_TYPE), _typed(b, B_TYPE)
    if TMA == "tensor":
        a_tiles = _descriptor(a, ROWS, DEPTH, a_stride, BLOCK_M, BLOCK_K, A_ALONG)
        # Experts lie one after the other: along their columns, or along their depth.
        if B_ALONG:
            b_tiles = _descriptor(b, COLUMNS * (E if IN_ROWS else 1), DEPTH, b_stride, BLOCK_N, BLOCK_K, True)
        else:
            b_tiles = _descriptor(b, COLUMNS, DEPTH * (E if IN_ROWS else 1), b_stride, BLOCK_N, BLOCK_K, False)
    if IN_ROWS:
        steps = tl.cdiv(DEPTH, BLOCK_K)
        if FLATTEN:
            tl.assume(steps > 0)  # one loop, without a second version for nothing to contract
    across_m = tl.arange(0, BLOCK_M)
    for place in tl.range(0, mine, flatten=FLATTEN, warp_specialize=SPECIALIZE):
        entry = listed + place * LISTED
        group, start, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row, column = tl.load(entry + 3) * BLOCK_M, tl.load(entry + 4) * BLOCK_N
        if IN_ROWS:
            a_row, first, depth = start + row, 0, DEPTH
        else:
            # Multiples of ALIGNMENT as they are listed; the compiler is to know it.
            a_row, first, depth = row, start // ALIGNMENT * ALIGNMENT, size // ALIGNMENT * ALIGNMENT
            steps = tl.cdiv(depth, BLOCK_K)
            if FLATTEN:
                steps = tl.maximum(steps, 1)  # a group without rows reads the next one's; see `fill`
                tl.assume(steps > 0)
        if TMA == "group":
            end = tl.maximum(first + depth, 1)  # a descriptor has no empty dimension
            a_tiles = _descriptor(a, ROWS, end, a_stride, BLOCK_M, BLOCK_K, A_ALONG)
            b_tiles = _descriptor(b, COLUMNS, end, b_stride, BLOCK_N, BLOCK_K, B_ALONG)
        if TMA == "none":
            a_at = _pointers(a, a_row, first, ROWS - a_row, a_stride, BLOCK_M, BLOCK_K, A_ALONG)
            if not IN_ROWS:
                b_at = _pointers(b, column, first, COLUMNS - column, b_stride, BLOCK_N, BLOCK_K, B_ALONG)
            elif B_ALONG:
                expert = b + tl.cast(group, tl.int64) * COLUMNS * b_stride
                b_at = _pointers(expert, column, 0, COLUMNS - column, b_stride, BLOCK_N, BLOCK_K, True)
            else:
                expert = b + tl.cast(group, tl.int64) * DEPTH * b_stride
                b_at = _pointers(expert, column, 0, COLUMNS - column, b_stride, BLOCK_N, BLOCK_K, False)

        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            at = step * BLOCK_K
            if TMA == "none":
                left = _load_step(a_at, depth - at, ROWS - a_row, UNIT, DEPTH_UNIT, BLOCK_M, BLOCK_K, A_ALONG, WHOLE)
                right = _load_step(
                    b_at, depth - at, COLUMNS - column, UNIT, DEPTH_UNIT, BLOCK_N, BLOCK_K, B_ALONG, WHOLE
                )
                a_at += BLOCK_K if A_ALONG else BLOCK_K * a_stride
                b_at += BLOCK_K if B_ALONG else BLOCK_K * b_stride
            else:
                left = a_tiles.load([a_row, first + at] if A_ALONG else [first + at, a_row])
                if not IN_ROWS:
                    right = b_tiles.load([column, first + at] if B_ALONG else [first + at, column])
                elif B_ALONG:
                    right = b_tiles.load([group * COLUMNS + column, at])
                else:
                    right = b_tiles.load([group * DEPTH + at, column])
            left, right = _values(left, A_DECODE), _values(right, B_DECODE)
            left = left if A_ALONG else left.T
            right = right.T if B_ALONG else right
            if EXACT:
                total = tl.dot(left, right, total, max_num_imprecise_acc=128 if BLOCK_K > 128 else BLOCK_K)
            else:
                total = tl.dot(left, right, total)

        if IN_ROWS:
            inside = row + across_m < size
            scales = inverse_scale_a + (a_row + across_m)
            to = out + (tl.cast(a_row, tl.int64) * COLUMNS + column)
        else:
            inside = row + across_m < ROWS
            scales = inverse_scale_a + (group * ROWS + row + across_m)
            to = out + ((tl.cast(group, tl.int64) * ROWS + row) * COLUMNS + column)
        if SCALED:
            total = total * tl.load(scales, mask=inside, other=0.0)[:, None]
        PART: tl.constexpr = BLOCK_N // SPLIT
        if SPLIT == 1:
            parts = (total,)
        else:
            parts = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, PART)), (0, 2, 1)))
        for part in tl.static_range(SPLIT):
            columns = part * PART + tl.arange(0, PART)
            exists = columns < COLUMNS - column
            y = parts[part]
            if SCALED:
                scales = inverse_scale_b + (group * COLUMNS + column + columns)
                y = y * tl.load(scales, mask=exists, other=0.0)[None, :]
            if not IN_ROWS:
                y = tl.where(size > 0, y, tl.load(entry + 5).to(tl.float32, bitcast=True))
            pointers = to + (across_m[:, None] * COLUMNS + columns[None, :])
            tl.store(pointers, y.to(out.dtype.element_ty), mask=inside[:, None] & exists[None, :])


def operand(x: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """x (..., outer, depth) as the kernel reads it: the tensor, whether it is contiguous along the depth, its pitch.

    The pitch, in elements, and the address are multiples of 16 bytes, and experts lie one after the other; a tensor of
    another layout is copied. FP8 is contiguous along the depth.
    """
    unit = 16 // x.itemsize

    def pitch(across: torch.Tensor) -> int | None:
        rows, width = across.shape[-2:]
        found = across.stride(-2) if rows > 1 else -(-width // unit) * unit
        one_by_one = across.dim() == 2 or across.shape[0] == 1 or across.stride(0) == rows * found
        fits = (across.stride(-1) == 1 or width == 1) and found >= width and found % unit == 0
        return found if fits and one_by_one and across.data_ptr() % 16 == 0 else None

    for along in (True,) if x.itemsize == 1 else (True, False):
        found = pitch(x if along else x.transpose(-2, -1))
        if found is not None:
            return x, along, found
    along = x.shape[-1] % unit == 0
    copy = (x if along else x.transpose(-2, -1)).clone(memory_format=torch.contiguous_format)
    return copy if along else copy.transpose(-2, -1), along, copy.shape[-1]


def _element(dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is compiled for, for an operand of that dtype: its type, or in the interpreter how to decode."""
    if dtype == torch.bfloat16:
        return {"TYPE": None, "DECODE": (0,)} if _triton.INTERPRETING else {"TYPE": tl.bfloat16, "DECODE": None}
    fmt = formats.get(dtype)
    if not _triton.INTERPRETING:
        return {"TYPE": cast.native_type(fmt), "DECODE": None}
    infinity = fmt.inf_codes[0] if fmt.inf_codes else 0x80
    return {"TYPE": None, "DECODE": (fmt.bias, fmt.mantissa_bits, fmt.nan_codes[0], infinity, fmt.nan_code)}


def _tma_mode(row: GroupedConfig, in_rows: bool, b_along: bool, whole: bool, starts_apart: bool) -> str:
    """The kernel's TMA: whole tensors where no step passes the end of what it may read, else a group at a time.

    starts_apart: a contiguous contraction whose groups do not start at multiples of 16 bytes; Triton's descriptors do.
    """
    if not row.tma or starts_apart:
        return "none"
    if in_rows:
        return "tensor" if b_along or whole else "none"
    return "tensor" if whole else "group"


def _constexprs(
    a: torch.dtype,
    b: torch.dtype,
    row: GroupedConfig,
    target: str,
    *,
    in_rows: bool,
    a_along: bool,
    b_along: bool,
    whole: bool,
    scaled: bool,
    exact: bool,
    alignment: int,
) -> dict[str, object]:
    """What _grouped_kernel is compiled for."""
    starts_apart = not in_rows and (a_along or b_along) and alignment * a.itemsize % 16 != 0
    tma = _tma_mode(row, in_rows, b_along, whole, starts_apart)
    return {
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "BLOCK_K": row.block_k,
        "IN_ROWS": in_rows,
        "ALIGNMENT": alignment,
        "UNIT": 16 // a.itemsize,
        **{f"A_{name}": value for name, value in _element(a).items()},
        **{f"B_{name}": value for name, value in _element(b).items()},
        "A_ALONG": a_along,
        "B_ALONG": b_along,
        "SCALED": scaled,
        "WHOLE": whole,
        "TMA": tma,
        # A loop that loads plainly would read past the end of an empty group's tensor.
        "FLATTEN": row.flatten and tma != "none",
        # Two tiles' descriptors would share one place in memory.
        "SPECIALIZE": row.specialize and tma == "tensor",
        "SPLIT": row.split,
        "EXACT": exact and a.itemsize == 1,
        "LISTED": LISTED,
        "DIES": _DIES.get(target, 1),
    }


def _list_constexprs(e: int, row: GroupedConfig, target: str, in_rows: bool, alignment: int) -> dict[str, object]:
    return {
        "LANES": groups.lanes(e),
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "PANEL": row.panel,
        "IN_ROWS": in_rows,
        "ALIGNMENT": alignment,
        "CHUNK": _CHUNK,
        "CLEARED": _CLEARED,
        "LISTED": LISTED,
        "DIES": _DIES.get(target, 1),
    }


def _fitted(row: GroupedConfig, out_dtype: torch.dtype, itemsize: int) -> GroupedConfig:
    """The row, for operands of itemsize bytes.

    A float32 tile takes twice the shared memory on its way out: it leaves in more parts, and at the cost of stages.
    """
    if out_dtype != torch.float32 or not row.tma:
        return row
    split = max(row.split, 2)
    more, a_stage = row.block_m * row.block_n * 2 // split, (row.block_m + row.block_n) * row.block_k * itemsize
    return replace(row, split=split, stages=max(row.stages - -(-more // a_stage), min(row.stages, 2)))


def _options(row: GroupedConfig, target: str) -> dict[str, int]:
    options = {"num_warps": row.num_warps, "num_stages": row.stages}
    if target.startswith("gfx9"):
        options["matrix_instr_nonkdim"] = 16
    if target.startswith("gfx94"):
        options["kpack"] = 2
    return options


@functools.cache
def _multiprocessors(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 1


def launch_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor | None,
    inverse_scale_b: torch.Tensor | None,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    alignment: int,
    exact: bool,
    row: GroupedConfig,
    target: str,
) -> torch.Tensor:
    """Launch both kernels with a given configuration. For the ops, and for timing one row against another.

    a (ROWS, DEPTH); b (E, DEPTH, COLUMNS), or (DEPTH, COLUMNS) for groups along the contraction; both FP8 or both bf16,
    none empty. Inverse scales: contiguous, (ROWS,) or (E, ROWS), and (E, COLUMNS), or none. exact: see KINDS.
    """
    row = _fitted(row, out_dtype, a.itemsize)
    in_rows, e = b.dim() == 3, offs.shape[0]
    (rows, depth), columns = a.shape, b.shape[-1]
    a, a_along, a_pitch = operand(a)
    b, b_along, b_pitch = operand(b.transpose(-2, -1))
    if max(row.block_m, row.block_n, row.block_k) * max(a_pitch, b_pitch) > _INT32_MAX:
        raise ValueError(
            f"rows are {max(a_pitch, b_pitch)} elements apart; expected at most 2^31 / {row.block_n}: steps inside a "
            "tile are 32 bits wide; pass contiguous tensors, or fewer rows at a time"
        )
    if in_rows and not a_along:
        a, a_along, a_pitch = operand(a.clone(memory_format=torch.contiguous_format))
    shape = (rows, columns) if in_rows else (e, rows, columns)
    # The interpreter truncates what it stores as bf16.
    out = torch.empty(shape, dtype=torch.float32 if _triton.INTERPRETING else out_dtype, device=a.device)
    whole = (depth if in_rows else alignment) % row.block_k == 0
    row_tiles = rows // row.block_m + e if in_rows else e * -(-rows // row.block_m)
    tiles = row_tiles * -(-columns // row.block_n)
    programs = min(_multiprocessors(a.device) * row.programs, tiles)
    capacity = -(-tiles // programs)
    listed = torch.empty((programs, capacity, LISTED), dtype=torch.int32, device=a.device)
    integers = torch.uint8 if a.itemsize == 1 else torch.int16
    launch.allow_descriptors(a)
    with launch.on_device(a):
        _list_tiles_kernel[(programs,)](
            offs.contiguous(),
            listed,
            out,
            rows,
            columns,
            depth,
            e,
            capacity,
            **_list_constexprs(e, row, target, in_rows, alignment),
            **LAUNCH_OPTIONS,
        )
        _grouped_kernel[(programs,)](
            a.view(integers),
            b.view(integers),
            inverse_scale_a if inverse_scale_a is not None else listed,
            inverse_scale_b if inverse_scale_b is not None else listed,
            listed,
            out,
            rows,
            columns,
            depth,
            e,
            capacity,
            a_pitch * a.itemsize // 16,
            b_pitch * b.itemsize // 16,
            **_constexprs(
                a.dtype,
                b.dtype,
                row,
                target,
                in_rows=in_rows,
                a_along=a_along,
                b_along=b_along,
                whole=whole,
                scaled=inverse_scale_a is not None,
                exact=exact,
                alignment=alignment,
            ),
            **_options(row, target),
            **LAUNCH_OPTIONS,
        )
    return out.to(out_dtype)


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernels on an arch, for the codegen suite.

    Both forms in the arch's own e4m3, with and without a float32 sum where that is another kernel, with float32 output,
    and in bf16 with the layouts of a layer: weights as they are stored, gradients of them from row-major tokens. K is
    7168; groups along the contraction are padded to 16, in bf16 not at all.
    """
    name = device.lookup(arch).name
    fp8 = formats.get(device.lookup(arch).e4m3).dtype
    kinds = [*(["fp8"] if device.lookup(arch).native_fp8_matmul else []), "bf16"]
    kinds += ["fp8-exact"] if name.startswith("sm_") and "fp8" in kinds else []
    specs = []
    for in_rows in (True, False):
        for kind in kinds:
            dtype = torch.bfloat16 if kind == "bf16" else fp8
            row = launch.config(GROUPED_CONFIGS, name, size_class(in_rows, kind))
            alignment = 1 if kind == "bf16" else groups.MULTIPLE
            specs.append(_compile_spec(name, dtype, row, in_rows, kind, alignment, torch.bfloat16))
            if row.tma or (in_rows and kind == kinds[0]):
                specs.append(_compile_spec(name, dtype, row, in_rows, kind, alignment, torch.float32))
            if not in_rows and kind != "bf16" and row.tma:
                specs.append(_compile_spec(name, dtype, row, in_rows, kind, row.block_k, torch.bfloat16))
    specs.append(_list_compile_spec(name, launch.config(GROUPED_CONFIGS, name, size_class(True, "fp8"))))
    return specs


def _compile_spec(
    target: str,
    dtype: torch.dtype,
    row: GroupedConfig,
    in_rows: bool,
    kind: str,
    alignment: int,
    out_dtype: torch.dtype,
) -> CompileSpec:
    fmt = "bf16" if kind == "bf16" else formats.get(dtype).name
    row = _fitted(row, out_dtype, dtype.itemsize)
    options = _options(row, target)
    wide = out_dtype == torch.float32
    name = (
        f"{'rows' if in_rows else 'contraction'}{'-exact' if kind == 'fp8-exact' else ''}{'-float32' if wide else ''}"
        f"{'-whole-steps' if alignment == row.block_k else ''}"
    )
    integers = "*i16" if kind == "bf16" else "*u8"
    scales = {} if kind == "bf16" else {"inverse_scale_a": "*fp32", "inverse_scale_b": "*fp32"}
    unscaled = {} if scales else dict.fromkeys(("inverse_scale_a", "inverse_scale_b"), "*i32")
    pointers = {
        "a": integers,
        "b": integers,
        **scales,
        **unscaled,
        "listed": "*i32",
        "out": "*fp32" if wide else "*bf16",
    }
    numbers = ("ROWS", "COLUMNS", "DEPTH", "E", "capacity", "a_pitch", "b_pitch")
    along = in_rows or kind != "bf16"
    return CompileSpec(
        kernel=_grouped_kernel,
        case=f"grouped_gemm-{fmt}-{name}",
        fmt=fmt,
        signature={**pointers, **dict.fromkeys(numbers, "i32")},
        constexprs=_constexprs(
            dtype,
            dtype,
            row,
            target,
            in_rows=in_rows,
            a_along=along,
            b_along=along,
            whole=in_rows or alignment % row.block_k == 0,
            scaled=bool(scales),
            exact=kind == "fp8-exact",
            alignment=alignment,
        ),
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        divisible=(*pointers, "COLUMNS"),
        within_2gb=tuple(pointers),
        encodes=False,
        multiplies="bf16" if kind == "bf16" else "fp8",
        options=options,
    )


def _list_compile_spec(target: str, row: GroupedConfig) -> CompileSpec:
    pointers = {"offs": "*i32", "listed": "*i32", "out": "*bf16"}
    return CompileSpec(
        kernel=_list_tiles_kernel,
        case="grouped_gemm-list-e32",
        fmt="bf16",
        signature={**pointers, **dict.fromkeys(("ROWS", "COLUMNS", "DEPTH", "E", "capacity"), "i32")},
        constexprs=_list_constexprs(32, row, target, True, groups.MULTIPLE),
        divisible=(*pointers, "COLUMNS"),
        within_2gb=tuple(pointers),
        wide_bytes=0,  # it reads offs, once
        encodes=False,
    )
