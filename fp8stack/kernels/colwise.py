"""Column-wise FP8 quantisation of groups of rows: one scale for each column of each group, output padded, transposed.

    scale[e, n] = pow2_floor(FP8_MAX / max|x[rows of e, n]|)       q[rows of e, n] = saturate(x[...] * scale[e, n])

The exact rules are scaling.py's; where groups start is groups.py's. The weight gradient contracts over tokens, so it
wants both operands with scales along the tokens, the tokens contiguous, and each expert's tokens at a multiple of 16.
quantize_colwise_grouped does that for one tensor, quantize_colwise_grouped_pair for both in one launch.

Traffic (bf16 in): reads 2*M*N, writes N*M_pad + 4*E*N bytes, as far as groups are held in registers between the maximum
and the cast. Rows that are not held are read twice, the second time backwards: what was read last is in the cache.
Layout: x any strides, fastest with unit stride along N; q (M_pad, N) column-major, that is a contiguous (N, M_pad) with
M_pad = groups.padded_rows(M, E, alignment); inverse scale float32 (E, N), 1 for an empty group; padded offs int32 (E,).
Gaps between groups and everything past the last one hold zero codes, also where a unit is NaN.

A program takes one group and a block of columns, in chunks of rows. How a chunk is spread over threads decides what the
transposition costs. It is loaded as PARTS tiles: tile p has row p of every block of PARTS neighbouring rows, and is

    (column in 16 bytes, block of rows, block of columns)

The compiler gives the contiguous dimension to a thread's registers and spreads the others over the lanes, so a thread
has 16 bytes of PARTS neighbouring rows. Joined along a new innermost dimension the tiles become PARTS neighbouring
codes of each of these columns, in the same thread: it packs them into words as it encodes and stores 16 bytes a column.
So both sides are 16 bytes wide, nothing is exchanged between threads, and no byte is ever picked out of a word. (Which
of the other dimensions the lanes take first depends on Triton's version: LANES_LAST.)

Nothing is NaN until the cast, and codes of rows past a group's end are zero because their input is, unless a scale is
NaN. So columns are first written as if none were, and a program that has a non-finite one writes its codes once more.
Masks in every tile, and NaN codes put into words of codes, would cost as much as the rest of the cast.

Not here: rows with groups along K.
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, TRITON_VERSION, CompileSpec, jit, tl
from fp8stack.kernels import cast, groups, launch, unfused


@dataclass(frozen=True)
class ColwiseConfig:
    """How to launch for one size class.

    columns: of a program. rows: of a chunk of bf16; a chunk of float32 has half as many. parts: neighbouring rows of a
    thread. held: chunks of a group that stay in registers and are read once. programs: see launch.options. measured:
    what says so.
    """

    columns: int
    rows: int
    parts: int
    held: int
    num_warps: int
    programs: int
    measured: str


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"
_CLASSES = ("e<=32", "e>32")


def size_class(e: int) -> str:
    """The size class of e groups. Not of the number of rows: that is a token count, and must not choose a kernel."""
    return _CLASSES[0] if e <= 32 else _CLASSES[1]


def _rows_of(targets: tuple[str, ...], *configs: ColwiseConfig) -> dict[tuple[str, str], ColwiseConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


# (target, size class) -> configuration. A thread has one 16-byte load a part: columns * rows = 8 * parts * threads.
COLWISE_CONFIGS: dict[tuple[str, str], ColwiseConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        ColwiseConfig(32, 1024, 16, 1, 8, 2, _UNMEASURED),
        ColwiseConfig(64, 256, 16, 1, 4, 3, _UNMEASURED),
    ),
    # Waves of 64. Chosen by what the compiler makes of them: no spills, 16-byte accesses, two waves a SIMD.
    **_rows_of(
        ("gfx942", "gfx940", "gfx941", "gfx90a", "gfx908"),
        ColwiseConfig(32, 1024, 16, 1, 4, 2, _UNMEASURED),
        ColwiseConfig(64, 256, 16, 1, 2, 4, _UNMEASURED),
    ),
    **_rows_of(
        ("gfx950",),
        ColwiseConfig(32, 1024, 16, 1, 4, 2, _UNMEASURED),
        ColwiseConfig(32, 1024, 16, 1, 4, 2, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        ColwiseConfig(32, 512, 16, 1, 4, 0, _UNMEASURED),
        ColwiseConfig(32, 512, 16, 1, 4, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk, held and not held.
    **_rows_of(
        ("cpu",),
        ColwiseConfig(128, 64, 2, 1, 1, 0, _INTERPRETER),
        ColwiseConfig(128, 32, 2, 1, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "e<=32"): ColwiseConfig(32, 1024, 16, 1, 4, 2, "not timed: gfx942/sweep-colwise.json"),
    ("gfx942", "e>32"): ColwiseConfig(64, 256, 16, 1, 2, 4, "not timed: gfx942/sweep-colwise.json"),
    ("gfx950", "e<=32"): ColwiseConfig(32, 1024, 16, 1, 4, 2, "not timed: gfx950/sweep-colwise.json"),
    ("sm_90", "e<=32"): ColwiseConfig(64, 512, 16, 2, 8, 1, "0.63 of a copy: h200/sweep-colwise.json"),
    ("sm_90", "e>32"): ColwiseConfig(32, 256, 16, 1, 2, 6, "0.53 to 0.63 of a copy: h200/sweep-colwise.json"),
    # End of the swept rows.
}


def quantize_colwise_grouped_reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_colwise_grouped. Reads offs on the host."""
    (m, n), e = x.shape, offs.shape[0]
    starts, ends, padded_offs = groups.bounds_reference(offs, m, alignment)
    q = torch.zeros((n, groups.padded_rows(m, e, alignment)), dtype=torch.uint8, device=x.device)
    inverse_scale = torch.empty((e, n), dtype=torch.float32, device=x.device)
    to = 0
    for group, (start, end, padded_end) in enumerate(
        zip(starts.tolist(), ends.tolist(), padded_offs.tolist(), strict=True)
    ):
        codes, inverse_scale[group] = scaling.quantize_reference(x[start:end], fmt, dim=0, pow2=pow2)
        q[:, to : to + end - start] = codes.view(torch.uint8).t()
        to = padded_end
    return q.view(formats.get(fmt).dtype).t(), inverse_scale, padded_offs


def quantize_colwise_grouped_pair_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_colwise_grouped_pair."""
    x_q, x_inverse, padded_offs = quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment)
    y_q, y_inverse, _ = quantize_colwise_grouped_reference(y, offs, fmt, pow2, alignment)
    return x_q, x_inverse, y_q, y_inverse, padded_offs


@jit
def along(values, AXIS: tl.constexpr, LANES_LAST: tl.constexpr):
    """A 1-D tensor as a tile, along 0: column in 16 bytes, 1: row block, 2: column block."""
    DIM: tl.constexpr = AXIS if LANES_LAST else 2 - AXIS
    if DIM == 0:
        return values[:, None, None]
    elif DIM == 1:
        return values[None, :, None]
    else:
        return values[None, None, :]


@jit
def column_tile(block, COLUMNS: tl.constexpr, C: tl.constexpr, LANES_LAST: tl.constexpr):
    """Columns of a block as a tile of one row block; C neighbours are one 16-byte load."""
    blocks = block * COLUMNS + C * along(tl.arange(0, COLUMNS // C), 2, LANES_LAST)
    return blocks + along(tl.arange(0, C), 0, LANES_LAST)


@jit
def row_tile(ROWS: tl.constexpr, PARTS: tl.constexpr, LANES_LAST: tl.constexpr):
    """First rows of the blocks of PARTS rows of a chunk, as a tile of one column."""
    return PARTS * along(tl.arange(0, ROWS // PARTS), 1, LANES_LAST)


@jit
def load_parts(
    x_group,
    at,
    size,
    columns,
    N,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
):
    """The ROWS rows from at of a group that has size rows, as loaded; past size, and past N, they are 0.

    PARTS tiles: part p has row p of each row block. x_group: the group's first row. columns: from column_tile.
    """
    blocks = row_tile(ROWS, PARTS, LANES_LAST)
    pointers = x_group + tl.cast(at, tl.int64) * row_stride + blocks.to(tl.int64) * row_stride
    if UNIT_STRIDE:
        pointers += columns
    else:
        pointers += columns.to(tl.int64) * column_stride
    left = tl.where(columns < N, size - at - blocks, 0)
    parts = ()
    for part in tl.static_range(PARTS):
        element = tl.load(pointers + tl.cast(part, tl.int64) * row_stride, mask=left > part, other=0)
        parts = parts + (element,)  # noqa: RUF005 - Triton compiles no starred expression
    return parts


@jit
def largest_of(parts, COUNT: tl.constexpr):
    """Element-wise largest absolute float32 bits of COUNT parts.

    Not by way of the float32 bits of each element, which the cast needs too: the compiler would keep both until then.
    """
    MAGNITUDE: tl.constexpr = 0x7FFF if parts[0].dtype == tl.int16 else 0x7FFFFFFF
    largest = parts[0] & MAGNITUDE
    for part in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, parts[part] & MAGNITUDE)
    return cast.float_bits(largest)


@jit
def _joined(parts, COUNT: tl.constexpr):
    """COUNT tiles as one with new dimensions (2, 2 ...) at the end, the part's number in binary along them."""
    if COUNT == 1:
        return parts[0]
    else:
        HALF: tl.constexpr = COUNT // 2
        pairs = ()
        for part in tl.static_range(HALF):
            pairs = pairs + (tl.join(parts[part], parts[part + HALF]),)  # noqa: RUF005 - as above
        return _joined(pairs, HALF)


@jit
def store_parts(
    q_group,
    parts,
    scale,
    at,
    size,
    padded_size,
    columns,
    N,
    m_pad,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    POISONED: tl.constexpr,
    LANES_LAST: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """Codes of the parts of a chunk to q_group, which is at the group's first padded row. scale: a tile of one row.

    POISONED: a scale is NaN: NaN codes are put in, and rows past size have to be set to zero instead of being so.
    """
    blocks = row_tile(ROWS, PARTS, LANES_LAST)
    scaled = ()
    for part in tl.static_range(PARTS):
        y = cast.float_bits(parts[part]).to(tl.float32, bitcast=True) * scale
        if POISONED:
            y = tl.where(blocks < size - at - part, y, 0.0)
        scaled = scaled + (y,)  # noqa: RUF005 - as above
    shape: tl.constexpr = [scaled[0].shape[0], scaled[0].shape[1], scaled[0].shape[2], PARTS]
    y = tl.reshape(_joined(scaled, PARTS), shape)
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, POISONED)
    pointers = q_group + at + columns.to(tl.int64) * m_pad + blocks
    mask = (blocks < padded_size - at) & (columns < N)
    tl.store(pointers[:, :, :, None] + tl.arange(0, PARTS)[None, None, None, :], codes, mask=mask[:, :, :, None])


@jit
def clear_rows(q, first, end, columns, N, m_pad, ROWS: tl.constexpr, PARTS: tl.constexpr, LANES_LAST: tl.constexpr):
    """Zero codes for the rows from first to end of q, both multiples of 16."""
    blocks = row_tile(ROWS, PARTS, LANES_LAST)
    for at in range(first, end, ROWS):
        pointers = q + at + columns.to(tl.int64) * m_pad + blocks
        pointers = pointers[:, :, :, None] + tl.arange(0, PARTS)[None, None, None, :]
        mask = (blocks < end - at) & (columns < N)
        tl.store(pointers, tl.zeros(pointers.shape, tl.uint8), mask=mask[:, :, :, None])


@jit
def quantize_columns(
    x,
    q,
    inverse_scale,
    group,
    block,
    start,
    size,
    padded_start,
    padded_size,
    tail,
    tail_end,
    N,
    m_pad,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    C: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """One group of one block of columns; and zero codes from tail to tail_end, rows that count from padded_start."""
    columns = column_tile(block, COLUMNS, C, LANES_LAST)
    # 64 bits: rows * stride passes 2^31 from 2 GiB of codes on.
    x_group = x + start.to(tl.int64) * row_stride
    q_group = q + padded_start

    # All loads of the held rows are issued before the first is waited for.
    held = ()
    for chunk in tl.static_range(HELD):
        held = held + load_parts(
            x_group, chunk * ROWS, size, columns, N, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, LANES_LAST
        )
    if LANES_LAST:
        largest = tl.zeros((C, ROWS // PARTS, COLUMNS // C), tl.int32)
    else:
        largest = tl.zeros((COLUMNS // C, ROWS // PARTS, C), tl.int32)
    if HELD:
        largest = largest_of(held, HELD * PARTS)
    for at in range(HELD * ROWS, size, ROWS):
        parts = load_parts(
            x_group, at, size, columns, N, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, LANES_LAST
        )
        largest = tl.maximum(largest, largest_of(parts, PARTS))
    amax = tl.max(largest, axis=1)
    bits = cast.scale_bits(amax, MAX, POW2)
    scale = bits.to(tl.float32, bitcast=True)[:, None, :]
    inverse = cast.inverse_bits(bits).to(tl.float32, bitcast=True)[:, None, :]
    tl.store(inverse_scale + group.to(tl.int64) * N + columns, inverse, mask=columns < N)

    for chunk in tl.static_range(HELD):
        if chunk * ROWS < padded_size:
            once = ()
            for part in tl.static_range(PARTS):
                once = once + (held[chunk * PARTS + part],)  # noqa: RUF005 - as above
            store_parts(
                q_group, once, scale, chunk * ROWS, size, padded_size, columns, N, m_pad, ROWS, PARTS, False,
                LANES_LAST, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
            )  # fmt: skip
    # The rest backwards: what was read last is the likeliest to be in the cache.
    rest = tl.cdiv(tl.maximum(padded_size - HELD * ROWS, 0), ROWS)
    for back in range(rest):
        at = (HELD + rest - 1 - back) * ROWS
        again = load_parts(
            x_group, at, size, columns, N, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, LANES_LAST
        )
        store_parts(
            q_group, again, scale, at, size, padded_size, columns, N, m_pad, ROWS, PARTS, False, LANES_LAST,
            MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
    if (tl.max(tl.max(amax, axis=1), axis=0) >= 0x7F800000) & (size > 0):
        # Once more: NaN codes where the cast gives others, and zero codes in the gap, which holds 0 * NaN. Few rows a
        # thread, to need no more registers than above; the barrier keeps the two stores of a byte in order.
        tl.debug_barrier()
        FEW: tl.constexpr = min(PARTS, 4)
        FEW_ROWS: tl.constexpr = ROWS // PARTS * FEW
        for at in range(0, padded_size, FEW_ROWS):
            gap = load_parts(
                x_group, at, size, columns, N, row_stride, column_stride, FEW_ROWS, FEW, UNIT_STRIDE, LANES_LAST
            )
            store_parts(
                q_group, gap, scale, at, size, padded_size, columns, N, m_pad, FEW_ROWS, FEW, True, LANES_LAST,
                MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
            )  # fmt: skip
    clear_rows(q_group, tail, tail_end, columns, N, m_pad, ROWS, PARTS, LANES_LAST)


# M and m_pad are token counts: not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["M", "m_pad_blocks", "E", "column_stride"])
def _quantize_colwise_grouped_kernel(
    x,
    q,
    inverse_scale,
    offs,
    padded_offs,
    M,
    N,
    E,
    m_pad_blocks,
    row_stride,
    column_stride,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    C: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    # Neighbouring programs take neighbouring columns of one group: whole rows are read at about the same time.
    block, group = tl.program_id(0), tl.program_id(1)
    start, size, padded_start, padded_size, total = groups.bounds(offs, group, M, E, LANES, ALIGNMENT)
    if block == 0:
        tl.store(padded_offs + group, padded_start + padded_size)
    tail, tail_end = groups.share_of_tail(group, total, m_pad_blocks * 16, E)
    tail, tail_end = tail - padded_start, tail_end - padded_start
    quantize_columns(
        x, q, inverse_scale, group, block, start, size, padded_start, padded_size, tail, tail_end, N, m_pad_blocks * 16,
        row_stride, column_stride, COLUMNS, ROWS, PARTS, HELD, C, UNIT_STRIDE, LANES_LAST, POW2,
        MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
    )  # fmt: skip


@jit(do_not_specialize=["M", "m_pad_blocks", "E", "x_column_stride", "y_column_stride"])
def _quantize_colwise_grouped_pair_kernel(
    x,
    x_q,
    x_inverse_scale,
    y,
    y_q,
    y_inverse_scale,
    offs,
    padded_offs,
    M,
    X_N,
    Y_N,
    E,
    m_pad_blocks,
    x_row_stride,
    x_column_stride,
    y_row_stride,
    y_column_stride,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    C: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    # The blocks of both tensors for one group, then those for the next; one copy of the code, which compiles once.
    block, group = tl.program_id(0), tl.program_id(1)
    start, size, padded_start, padded_size, total = groups.bounds(offs, group, M, E, LANES, ALIGNMENT)
    if block == 0:
        tl.store(padded_offs + group, padded_start + padded_size)
    tail, tail_end = groups.share_of_tail(group, total, m_pad_blocks * 16, E)
    tail, tail_end = tail - padded_start, tail_end - padded_start
    x_blocks = tl.maximum(tl.cdiv(X_N, COLUMNS), 1)
    second = block >= x_blocks
    # Not `if second:`. A stride of 1 is a constant to the compiler, and a branch cannot make it another value.
    x, x_q = tl.where(second, y, x), tl.where(second, y_q, x_q)
    x_inverse_scale, n = tl.where(second, y_inverse_scale, x_inverse_scale), tl.where(second, Y_N, X_N)
    row_stride = tl.where(second, y_row_stride, x_row_stride)
    column_stride = tl.where(second, y_column_stride, x_column_stride)
    block = tl.where(second, block - x_blocks, block)
    quantize_columns(
        x, x_q, x_inverse_scale, group, block, start, size, padded_start, padded_size, tail, tail_end, n,
        m_pad_blocks * 16, row_stride, column_stride, COLUMNS, ROWS, PARTS, HELD, C, UNIT_STRIDE, LANES_LAST,
        POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
    )  # fmt: skip


# Which of two dimensions without contiguity the compiler gives to the lanes first: up to 3.6 the first, then the last.
_LANES_LAST = TRITON_VERSION is None or TRITON_VERSION >= (3, 7)


def constexprs(
    x: torch.dtype, e: int, fmt: formats.Format, pow2: bool, alignment: int, row: ColwiseConfig, target: str
) -> dict[str, object]:
    """What both kernels are compiled for; beside it, whether the strides along N are 1."""
    return {
        "LANES": groups.lanes(e),
        "ALIGNMENT": alignment,
        "COLUMNS": row.columns,
        "ROWS": row.rows if x.itemsize == 2 else row.rows // 2,
        "PARTS": row.parts,
        "HELD": row.held,
        "C": 16 // x.itemsize,
        "LANES_LAST": _LANES_LAST,
        "POW2": pow2,
        **cast.constants(fmt, target),
    }


def options(fmt: formats.Format, row: ColwiseConfig, target: str) -> dict[str, int]:
    """Launch options. The integer encoder, for a format that the target lacks, needs registers more than company."""
    native = cast.constants(fmt, target)["NATIVE"] is not None
    return launch.options(row.num_warps, row.programs if native else 0, target)


def launch_colwise_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: ColwiseConfig,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration. For the op, and for timing one row against another."""
    (m, n), e = x.shape, offs.shape[0]
    m_pad = groups.padded_rows(m, e, alignment)
    q = torch.empty((n, m_pad), dtype=torch.uint8, device=x.device)
    inverse_scale = torch.empty((e, n), dtype=torch.float32, device=x.device)
    padded_offs = torch.empty_like(offs)
    with launch.on_device(x):
        _quantize_colwise_grouped_kernel[(max(-(-n // row.columns), 1), e)](
            x.view(cast.INPUTS[x.dtype]),
            q,
            inverse_scale,
            offs.contiguous(),
            padded_offs,
            m,
            n,
            e,
            m_pad // 16,
            x.stride(0),
            x.stride(1),
            UNIT_STRIDE=x.stride(1) == 1,
            **constexprs(x.dtype, e, fmt, pow2, alignment, row, target),
            **options(fmt, row, target),
            **LAUNCH_OPTIONS,
        )
    return q.view(fmt.dtype).t(), inverse_scale, padded_offs


def launch_colwise_grouped_pair(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: ColwiseConfig,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel for two tensors with a given configuration."""
    (m, x_n), y_n, e = x.shape, y.shape[1], offs.shape[0]
    m_pad = groups.padded_rows(m, e, alignment)
    codes = [torch.empty((n, m_pad), dtype=torch.uint8, device=x.device) for n in (x_n, y_n)]
    inverse_scales = [torch.empty((e, n), dtype=torch.float32, device=x.device) for n in (x_n, y_n)]
    padded_offs = torch.empty_like(offs)
    blocks = max(-(-x_n // row.columns), 1) + -(-y_n // row.columns)
    with launch.on_device(x):
        _quantize_colwise_grouped_pair_kernel[(blocks, e)](
            x.view(cast.INPUTS[x.dtype]),
            codes[0],
            inverse_scales[0],
            y.view(cast.INPUTS[y.dtype]),
            codes[1],
            inverse_scales[1],
            offs.contiguous(),
            padded_offs,
            m,
            x_n,
            y_n,
            e,
            m_pad // 16,
            *x.stride(),
            *y.stride(),
            UNIT_STRIDE=x.stride(1) == 1 and y.stride(1) == 1,
            **constexprs(x.dtype, e, fmt, pow2, alignment, row, target),
            **options(fmt, row, target),
            **LAUNCH_OPTIONS,
        )
    x_q, y_q = (q.view(fmt.dtype).t() for q in codes)
    return x_q, inverse_scales[0], y_q, inverse_scales[1], padded_offs


@torch.library.custom_op(
    "fp8stack::quantize_colwise_grouped",
    mutates_args=(),
    schema="(Tensor x, Tensor offs, str fmt, bool pow2, int alignment) -> (Tensor, Tensor, Tensor)",
)
def _quantize_colwise_grouped(x, offs, fmt, pow2, alignment):
    which = launch.implementation(x, chain=True)
    launch.record("quantize_colwise_grouped", which)
    if which == "unfused":
        return unfused.colwise_grouped(x, offs, fmt, pow2, alignment)
    if which == "reference":
        return quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment)
    target = device.detect(x.device).target.name
    row = launch.config(COLWISE_CONFIGS, target, size_class(offs.shape[0]))
    return launch_colwise_grouped(x, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_colwise_grouped.register_fake
def _(x, offs, fmt, pow2, alignment):
    return _empty_results(x, offs, fmt, alignment)


def _empty_results(x, offs, fmt, alignment):
    (m, n), e = x.shape, offs.shape[0]
    q = torch.empty((n, groups.padded_rows(m, e, alignment)), dtype=formats.get(fmt).dtype, device=x.device)
    return q.t(), torch.empty((e, n), dtype=torch.float32, device=x.device), offs.new_empty((e,))


def quantize_colwise_grouped(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise each column of each group of rows with its own scale; groups padded, codes column-major.

    x: (M, N), bfloat16 or float32, any strides. offs: int32 (E,), cumulative end row of each group, read on the device;
    bad ones are clamped (groups.py). pow2: round scales down to powers of two. alignment: groups start at multiples.
    Returns codes (M_pad, N) of fmt.dtype, column-major, zero in gaps and tail; the inverse scale (E, N), float32, 1 for
    an empty group; padded offs, int32 (E,).
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks, offs or alignments.
    """
    cast.require_input(x, "quantize_colwise_grouped")
    _require_2d(x, "x")
    groups.require_offs(offs, x, alignment)
    return _quantize_colwise_grouped(x, offs, formats.get(fmt).name, pow2, alignment)


@torch.library.custom_op(
    "fp8stack::quantize_colwise_grouped_pair",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor y, Tensor offs, str fmt, bool pow2, int alignment) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _quantize_colwise_grouped_pair(x, y, offs, fmt, pow2, alignment):
    which = launch.implementation(x, chain=True)
    launch.record("quantize_colwise_grouped_pair", which)
    if which == "unfused":
        left, right = (unfused.colwise_grouped(t, offs, fmt, pow2, alignment) for t in (x, y))
        return *left[:2], *right
    if which == "reference":
        return quantize_colwise_grouped_pair_reference(x, y, offs, fmt, pow2, alignment)
    target = device.detect(x.device).target.name
    row = launch.config(COLWISE_CONFIGS, target, size_class(offs.shape[0]))
    return launch_colwise_grouped_pair(x, y, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_colwise_grouped_pair.register_fake
def _(x, y, offs, fmt, pow2, alignment):
    x_q, x_inverse, padded_offs = _empty_results(x, offs, fmt, alignment)
    y_q, y_inverse, _ = _empty_results(y, offs, fmt, alignment)
    return x_q, x_inverse, y_q, y_inverse, padded_offs


def quantize_colwise_grouped_pair(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_colwise_grouped of two tensors with the same rows and groups, from one launch.

    x, y: (M, X_N) and (M, Y_N), both bfloat16 or both float32, any strides. The rest as quantize_colwise_grouped.
    Returns codes and inverse scale of x, codes and inverse scale of y, padded offs.
    """
    for tensor, name in ((x, "x"), (y, "y")):
        cast.require_input(tensor, "quantize_colwise_grouped_pair")
        _require_2d(tensor, name)
    if x.shape[0] != y.shape[0] or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)} on {x.device}, y {y.dtype} of shape {tuple(y.shape)} on "
            f"{y.device}; expected the same rows, dtype and device; call quantize_colwise_grouped for each"
        )
    groups.require_offs(offs, x, alignment)
    return _quantize_colwise_grouped_pair(x, y, offs, formats.get(fmt).name, pow2, alignment)


def _require_2d(x: torch.Tensor, name: str) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected two dimensions (M, N); flatten the leading ones")


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernels on an arch, for the codegen suite.

    The arch's own formats for 32 and 128 groups, float32 input, and one format that the arch lacks.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        (row.e4m3, torch.bfloat16, 32),
        (row.e4m3, torch.bfloat16, 128),
        (row.e4m3, torch.float32, 32),
        (row.e5m2, torch.bfloat16, 32),
        (foreign, torch.bfloat16, 32),
    ]
    specs = [_compile_spec(formats.get(fmt), dtype, e, row.name) for fmt, dtype, e in cases]
    return specs + [
        _pair_compile_spec(formats.get(fmt), dtype, e, row.name) for fmt, dtype, e in cases if fmt != foreign
    ]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, e: int, target: str) -> CompileSpec:
    tensors = {"x": _POINTERS[dtype], "q": "*u8", "inverse_scale": "*fp32"}
    unit = {"column_stride": 1, "UNIT_STRIDE": True}
    return _spec(_quantize_colwise_grouped_kernel, "colwise", tensors, ("N", "row_stride"), unit, fmt, dtype, e, target)


def _pair_compile_spec(fmt: formats.Format, dtype: torch.dtype, e: int, target: str) -> CompileSpec:
    tensors = {
        f"{name}{of}": kind
        for name in ("x", "y")
        for of, kind in (("", _POINTERS[dtype]), ("_q", "*u8"), ("_inverse_scale", "*fp32"))
    }
    sizes = ("X_N", "Y_N", "x_row_stride", "y_row_stride")
    unit = {"x_column_stride": 1, "y_column_stride": 1, "UNIT_STRIDE": True}
    kernel = _quantize_colwise_grouped_pair_kernel
    return _spec(kernel, "colwise-pair", tensors, sizes, unit, fmt, dtype, e, target)


def _spec(kernel, op, tensors, sizes, unit, fmt, dtype, e, target) -> CompileSpec:
    row = launch.config(COLWISE_CONFIGS, target, size_class(e))
    launched = options(fmt, row, target)
    pointers = {**tensors, "offs": "*i32", "padded_offs": "*i32"}
    return CompileSpec(
        kernel=kernel,
        case=f"{op}-{fmt.name}-{_INPUT_NAMES[dtype]}-e{e}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(("M", *sizes, "E", "m_pad_blocks"), "i32")},
        constexprs={**unit, **constexprs(dtype, e, fmt, True, groups.MULTIPLE, row, target)},
        num_warps=launched.pop("num_warps"),
        divisible=(*pointers, *sizes),
        within_2gb=tuple(pointers),
        native=cast.constants(fmt, target)["NATIVE"] is not None,
        options=launched,
    )
