"""Both FP8 quantisations of a tensor with grouped rows: row codes for one GEMM, padded column codes for another.

The results are those of quantize_rowwise and of quantize_colwise_grouped; see rowwise.py and colwise.py. A grouped
linear wants both of its input: rows in the forward, columns of each expert's rows for the weight gradient.

Traffic (bf16 in): reads 4*M*K, writes M*K + K*M_pad bytes, the scales, and 4*M*K / span of partial maxima. Two launches
that know nothing of each other move 2*M*K more. All in one launch, in an order of work meant to let the columns of a
group find its rows in the cache, moved as much; column_maxima.py has the numbers.

Three launches: the rows, `span` of one group at a time, which leave behind the maxima of their columns
(column_maxima.py); the scales of each group's columns, from these; and the cast of the columns with known scales, in
tiles of one group, the last tile first: what the rows read last is still in the cache. How a tile is spread over
threads is colwise.py's matter, and so are gaps and NaN.

Where the table says apart, rowwise.py and colwise.py launch their own kernels instead: 2*M*K bytes more, but two
launches in place of three. On an H200 that is faster for more than 32 groups (baselines/LOG.md).

How many rows a group has is known on the device only. A launch has as many programs as the worst offs need; those that
are left over stop. A program for rows finds its group by counting the programs of the groups before: a scan and some
sums, which is little beside its rows. A tile of the cast is small, and so many wait for the like of it that this would
be a third of their time; so the second launch writes down for each band of tiles where it lies, and a tile reads that.

Rows past the last group are one more group to the first launch, whose maxima nobody reads, and so are the rows of the
output past the last padded group to the third: its input has no rows, so its codes are zero.

Layout: x any strides, fastest with unit stride along K; row codes (M, K) row-major and inverse scale (M,); column codes
(M_pad, K) column-major and inverse scale (E, K); padded offs (E,).
"""

import torch

from fp8stack import device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, column_maxima, colwise, groups, launch, rowwise, unfused
from fp8stack.kernels.column_maxima import BothConfig


def size_class(e: int, k: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """The size class of e groups of rows of k elements, such as "e<=32 k<=8192"."""
    return f"{colwise.size_class(e)} {column_maxima.width_class(k, dtype)}"


_CLASSES = tuple(f"{colwise.size_class(e)} {width}" for e in (32, 33) for width in column_maxima.WIDTH_CLASSES)
_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def _rows_of(targets: tuple[str, ...], *configs: BothConfig) -> dict[tuple[str, str], BothConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


# (target, size class) -> configuration. A chunk of a row: 16 elements a thread, or a multiple.
ROWWISE_AND_COLWISE_CONFIGS: dict[tuple[str, str], BothConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        BothConfig(32, 2, 2048, 4, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 2, 2048, 4, False, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, False, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, False, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 128, 64, 16, 2, 0, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        BothConfig(32, 2, 2048, 2, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(8, 8, 1024, 4, False, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 2, 2048, 2, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(8, 8, 1024, 4, False, False, 256, 64, 16, 2, 0, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        BothConfig(32, 2, 2048, 4, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(32, 2, 2048, 4, True, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, True, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(32, 1, 4096, 8, True, False, 128, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 128, 64, 16, 2, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk, turn, span and tile.
    **_rows_of(
        ("cpu",),
        BothConfig(64, 32, 64, 1, True, True, 64, 128, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 4, 4096, 1, False, False, 64, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 4, 8192, 1, True, False, 64, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(4, 4, 8192, 1, False, False, 64, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(32, 8, 128, 1, False, False, 64, 128, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 4, 4096, 1, True, False, 64, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 4, 8192, 1, False, False, 64, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(4, 4, 8192, 1, False, False, 64, 1024, 2, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "e<=32 k<=8192"): BothConfig(
        64, 1, 8192, 8, False, False, 256, 64, 16, 2, 0, "not timed: gfx942/sweep-rowwise_and_colwise.json"
    ),
    ("gfx942", "e>32 k<=2048"): BothConfig(
        32, 1, 4096, 4, True, True, 256, 64, 16, 2, 0, "not timed: gfx942/sweep-rowwise_and_colwise.json"
    ),
    ("gfx942", "e>32 k<=8192"): BothConfig(
        32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, "not timed: gfx942/sweep-rowwise_and_colwise.json"
    ),
    ("gfx950", "e<=32 k<=8192"): BothConfig(
        64, 1, 8192, 8, False, False, 256, 64, 16, 2, 0, "not timed: gfx950/sweep-rowwise_and_colwise.json"
    ),
    ("gfx950", "e>32 k<=2048"): BothConfig(
        32, 1, 4096, 4, True, True, 256, 64, 16, 2, 0, "not timed: gfx950/sweep-rowwise_and_colwise.json"
    ),
    ("gfx950", "e>32 k<=8192"): BothConfig(
        32, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, "not timed: gfx950/sweep-rowwise_and_colwise.json"
    ),
    ("sm_90", "e<=32 k<=8192"): BothConfig(
        64, 1, 2048, 4, False, False, 512, 32, 16, 4, 4, "0.54 of a copy: h200/sweep-rowwise_and_colwise.json"
    ),
    ("sm_90", "e>32 k<=2048"): BothConfig(
        0, 0, 0, 0, False, False, 0, 0, 0, 0, 0, "0.48 of a copy: h200/sweep-rowwise_and_colwise.json"
    ),
    ("sm_90", "e>32 k<=8192"): BothConfig(
        0, 0, 0, 0, False, False, 0, 0, 0, 0, 0, "0.47 to 0.52 of a copy: h200/sweep-rowwise_and_colwise.json"
    ),
    # End of the swept rows.
}


def quantize_rowwise_and_colwise_reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_rowwise_and_colwise."""
    return (
        *rowwise.quantize_rowwise_reference(x, fmt, pow2),
        *colwise.quantize_colwise_grouped_reference(x, offs, fmt, pow2, alignment),
    )


@jit
def _place(pieces, place, E, LANES: tl.constexpr):
    """Group that has piece number `place`, of (LANES,) pieces a group, and which of its pieces that is. E: past all."""
    group = tl.minimum(tl.sum((tl.cumsum(pieces, 0) <= place).to(tl.int32), 0), E)
    return group, place - tl.sum(tl.where(tl.arange(0, LANES) < group, pieces, 0), 0)


# M and m_pad are token counts: not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["M", "E", "column_stride"])
def _quantize_rows_kernel(
    x,
    q,
    inverse_scale,
    partial,
    offs,
    M,
    K,
    E,
    row_stride,
    column_stride,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    HINTS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """SPAN rows of a group, and partial[program, :]: the maxima of their columns."""
    starts, sizes = groups.extents(offs, M, E, LANES)
    group, place = _place(tl.cdiv(sizes, SPAN), tl.program_id(0), E, LANES)
    inside = tl.arange(0, LANES) == group
    start = tl.sum(tl.where(inside, starts, 0), 0)
    size = tl.sum(tl.where(inside, sizes, 0), 0)
    if group == E:
        start = tl.max(starts + sizes, 0)
        size = M - start
    first_row = place * SPAN
    if first_row < size:
        column_maxima.quantize_rows(
            x, q, inverse_scale, partial + tl.program_id(0).to(tl.int64) * K, (start + first_row).to(tl.int64),
            tl.minimum(size - first_row, SPAN), K, row_stride, column_stride, ROWS, BLOCK, CHUNKS, HELD, AHEAD, HINTS,
            UNIT_STRIDE, POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip


_BAND = tl.constexpr(8)  # int32 a band: group, first row of x, rows left, first row of q, rows left; three are unused


@jit
def _store_bands(bands, first, end, group, start, size, padded_start, padded_size, TILE_ROWS: tl.constexpr):
    """Where the bands from first to end lie: those of one group, and after its last one bands without rows."""
    for at in range(first, end, 128):
        number = at + tl.arange(0, 128)
        mask = number < end
        row = (number - first) * TILE_ROWS
        to = bands + number * _BAND
        tl.store(to, tl.zeros_like(row) + group, mask=mask)
        tl.store(to + 1, start + row, mask=mask)
        tl.store(to + 2, size - row, mask=mask)
        tl.store(to + 3, padded_start + row, mask=mask)
        tl.store(to + 4, padded_size - row, mask=mask)


@jit(do_not_specialize=["M", "E", "m_pad_blocks", "most_bands"])
def _column_scales_kernel(
    partial,
    scale,
    inverse_scale,
    bands,
    offs,
    padded_offs,
    M,
    K,
    E,
    m_pad_blocks,
    most_bands,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SPAN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
):
    """Scales of a block of columns of a group; and once a group its padded end, and where its bands of tiles lie."""
    block, group = tl.program_id(0), tl.program_id(1)
    starts, sizes = groups.extents(offs, M, E, LANES)
    start, size, padded_start, padded_size, total = groups.bounds_of(starts, sizes, group, LANES, ALIGNMENT)
    lanes = tl.arange(0, LANES)
    if block == 0:
        tl.store(padded_offs + group, padded_start + padded_size)
        of_each = tl.cdiv((sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT, TILE_ROWS)
        first = tl.sum(tl.where(lanes < group, of_each, 0), 0)
        end = first + tl.cdiv(padded_size, TILE_ROWS)
        _store_bands(bands, first, end, group, start, size, padded_start, padded_size, TILE_ROWS)
        if group == E - 1:
            _store_bands(bands, end, most_bands, E, M, 0, total, m_pad_blocks * 16 - total, TILE_ROWS)
    before = tl.sum(tl.where(lanes < group, tl.cdiv(sizes, SPAN), 0), 0).to(tl.int64)
    to = group.to(tl.int64) * K
    column_maxima.store_scales(
        partial + before * K, tl.cdiv(size, SPAN), scale + to, inverse_scale + to, block, K, ROWS, COLUMNS, POW2, MAX
    )


@jit
def _store_nan_codes(
    q,
    size,
    padded_size,
    columns,
    poisoned,
    m_pad,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES_LAST: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """Over a stored tile, in its poisoned columns: NaN codes for size rows, zero codes in the gap, now 0 * NaN."""
    tl.debug_barrier()  # what lies there may be other threads'
    blocks = colwise.row_tile(ROWS, PARTS, LANES_LAST)
    within = tl.arange(0, PARTS)[None, None, None, :]
    pointers = (q + columns.to(tl.int64) * m_pad + blocks)[:, :, :, None] + within
    codes = tl.where(blocks[:, :, :, None] + within < size, NAN_CODE, 0).to(tl.uint8)
    mask = poisoned & (blocks < padded_size)
    tl.store(pointers, tl.broadcast_to(codes, pointers.shape), mask=mask[:, :, :, None])


@jit(do_not_specialize=["E", "m_pad_blocks", "tiles", "column_stride"])
def _cast_columns_kernel(
    x,
    q,
    scale,
    bands,
    K,
    E,
    m_pad_blocks,
    tiles,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    LANES_LAST: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """Column codes of a tile of a padded group with known scales, the last tile first."""
    blocks = tl.cdiv(K, COLUMNS)
    number = tiles - 1 - tl.program_id(0)
    band = bands + number // blocks * _BAND
    group, row, size = tl.load(band), tl.load(band + 1), tl.load(band + 2)
    # Multiples of 16 to the compiler too.
    padded_row, padded_size = tl.load(band + 3) // 16 * 16, tl.load(band + 4) // 16 * 16
    m_pad = m_pad_blocks * 16
    if padded_size > 0:
        columns = colwise.column_tile(number % blocks, COLUMNS, C, LANES_LAST)
        x_band = x + row.to(tl.int64) * row_stride
        q_band = q + padded_row
        parts = colwise.load_parts(
            x_band, 0, size, columns, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, LANES_LAST
        )
        mask = columns < tl.where(group < E, K, 0)
        factor = tl.load(scale + group.to(tl.int64) * K + columns, mask=mask, other=1.0)
        colwise.store_parts(
            q_band, parts, factor, 0, size, padded_size, columns, K, m_pad, ROWS, PARTS, False, LANES_LAST,
            MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
        )  # fmt: skip
        bits = factor.to(tl.int32, bitcast=True)
        if tl.max(tl.max(tl.max(bits, axis=2), axis=1), axis=0) > 0x7F800000:
            poisoned = (columns < K) & (bits > 0x7F800000)
            _store_nan_codes(q_band, size, padded_size, columns, poisoned, m_pad, ROWS, PARTS, LANES_LAST, NAN_CODE)


def launch_rowwise_and_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: BothConfig,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernels with a given configuration. For the op, and for timing one row against another."""
    (m, k), e = x.shape, offs.shape[0]
    if row.apart:
        rows_alone = launch.config(rowwise.ROWWISE_CONFIGS, target, rowwise.size_class(k))
        columns_alone = launch.config(colwise.COLWISE_CONFIGS, target, colwise.size_class(e))
        return (
            *rowwise.launch_rowwise(x, fmt, pow2, rows_alone, target),
            *colwise.launch_colwise_grouped(x, offs, fmt, pow2, alignment, columns_alone, target),
        )
    m_pad = groups.padded_rows(m, e, alignment)
    elements = x.view(cast.INPUTS[x.dtype])
    row_q = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    row_inverse_scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    column_q = torch.empty((k, m_pad), dtype=torch.uint8, device=x.device)
    column_inverse_scale = torch.empty((e, k), dtype=torch.float32, device=x.device)
    padded_offs = torch.empty_like(offs)
    offs = offs.contiguous()
    # Each group, and the rows past the last one, can end in a program with few rows, or in a tile with few.
    span = row.span_of(k, x.dtype)
    programs = m // span + e + 1
    most_bands = m_pad // row.tile_rows(x.dtype) + e + 1
    bands = torch.empty((most_bands, _BAND.value), dtype=torch.int32, device=x.device)
    partial = torch.empty((programs, k), dtype=elements.dtype, device=x.device)
    scale = torch.empty((e, k), dtype=torch.float32, device=x.device)
    rows, scales, columns = _constexprs(x.dtype, e, k, fmt, pow2, alignment, row, target)
    with launch.on_device(x):
        if k == 0:
            row_inverse_scale.fill_(1.0)  # the amax of nothing is 0
        elif m:
            _quantize_rows_kernel[(programs,)](
                elements,
                row_q,
                row_inverse_scale,
                partial,
                offs,
                m,
                k,
                e,
                *x.stride(),
                UNIT_STRIDE=x.stride(1) == 1,
                **rows,
                num_warps=row.row_warps,
                **LAUNCH_OPTIONS,
            )
        _column_scales_kernel[(max(-(-k // column_maxima.SCALE_COLUMNS), 1), e)](
            partial,
            scale,
            column_inverse_scale,
            bands,
            offs,
            padded_offs,
            m,
            k,
            e,
            m_pad // 16,
            most_bands,
            **scales,
            num_warps=column_maxima.SCALE_WARPS,
            **LAUNCH_OPTIONS,
        )
        if k and m_pad:
            tiles = most_bands * -(-k // row.columns)
            _cast_columns_kernel[(tiles,)](
                elements,
                column_q,
                scale,
                bands,
                k,
                e,
                m_pad // 16,
                tiles,
                *x.stride(),
                UNIT_STRIDE=x.stride(1) == 1,
                **columns,
                **row.turned_options(fmt, target),
                **LAUNCH_OPTIONS,
            )
    return row_q.view(fmt.dtype), row_inverse_scale, column_q.view(fmt.dtype).t(), column_inverse_scale, padded_offs


def _constexprs(
    dtype: torch.dtype,
    e: int,
    k: int,
    fmt: formats.Format,
    pow2: bool,
    alignment: int,
    row: BothConfig,
    target: str,
) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """What the three kernels are compiled for; beside it, whether the stride along K is 1."""
    as_columns = colwise.ColwiseConfig(row.columns, row.rows, row.parts, 0, row.num_warps, row.programs, row.measured)
    columns = colwise.constexprs(dtype, e, fmt, pow2, alignment, as_columns, target)
    for name in ("HELD", "POW2", "LANES", "ALIGNMENT"):
        del columns[name]
    lanes = groups.lanes(e)
    scales = {
        "LANES": lanes,
        "ALIGNMENT": alignment,
        "SPAN": row.span_of(k, dtype),
        "TILE_ROWS": columns["ROWS"],
        "ROWS": column_maxima.SCALE_ROWS,
        "COLUMNS": column_maxima.SCALE_COLUMNS,
        "POW2": pow2,
        "MAX": fmt.max,
    }
    rows = {"LANES": lanes, **row.row_constexprs(k, dtype), "POW2": pow2, **cast.constants(fmt, target)}
    return rows, scales, columns


@torch.library.custom_op(
    "fp8stack::quantize_rowwise_and_colwise",
    mutates_args=(),
    schema=("(Tensor x, Tensor offs, str fmt, bool pow2, int alignment) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"),
)
def _quantize_rowwise_and_colwise(x, offs, fmt, pow2, alignment):
    which = launch.implementation(x, chain=True)
    launch.record("quantize_rowwise_and_colwise", which)
    if which == "unfused":
        return *unfused.rowwise(x, fmt, pow2), *unfused.colwise_grouped(x, offs, fmt, pow2, alignment)
    if which == "reference":
        return quantize_rowwise_and_colwise_reference(x, offs, fmt, pow2, alignment)
    target = device.detect(x.device).target.name
    row = launch.config(ROWWISE_AND_COLWISE_CONFIGS, target, size_class(offs.shape[0], x.shape[1], x.dtype))
    return launch_rowwise_and_colwise(x, offs, formats.get(fmt), pow2, alignment, row, target)


@_quantize_rowwise_and_colwise.register_fake
def _(x, offs, fmt, pow2, alignment):
    (m, k), e = x.shape, offs.shape[0]
    dtype = formats.get(fmt).dtype
    return (
        torch.empty((m, k), dtype=dtype, device=x.device),
        torch.empty((m,), dtype=torch.float32, device=x.device),
        torch.empty((k, groups.padded_rows(m, e, alignment)), dtype=dtype, device=x.device).t(),
        torch.empty((e, k), dtype=torch.float32, device=x.device),
        offs.new_empty((e,)),
    )


def quantize_rowwise_and_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = True,
    alignment: int = groups.MULTIPLE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What quantize_rowwise(x) and quantize_colwise_grouped(x, offs) return, in this order.

    With one read less where that is faster (BothConfig.apart).

    x: (M, K), bfloat16 or float32, any strides. The rest as quantize_colwise_grouped.
    Returns row codes (M, K) and their inverse scale (M,); column codes (M_pad, K), their inverse scale (E, K), and
    padded offs (E,). Rows past the last group have row codes only.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks, offs or alignments.
    """
    cast.require_input(x, "quantize_rowwise_and_colwise")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    groups.require_offs(offs, x, alignment)
    return _quantize_rowwise_and_colwise(x, offs, formats.get(fmt).name, pow2, alignment)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernels on an arch, for the codegen suite: (groups, width) of the models."""
    row = device.lookup(arch)
    cases = [
        (row.e4m3, torch.bfloat16, 64, 2048),
        (row.e4m3, torch.bfloat16, 128, 5120),
        (row.e4m3, torch.bfloat16, 32, 7168),
        (row.e4m3, torch.float32, 32, 2048),
    ]
    specs = [spec for fmt, dtype, e, k in cases for spec in _compile_specs(formats.get(fmt), dtype, e, k, row.name)]
    return [*specs, *_scales_specs(formats.get(row.e4m3), 32, 7168, row.name)]


def _compile_specs(fmt: formats.Format, dtype: torch.dtype, e: int, k: int, target: str) -> list[CompileSpec]:
    row = launch.config(ROWWISE_AND_COLWISE_CONFIGS, target, size_class(e, k, dtype))
    if row.apart:
        return []  # rowwise.py and colwise.py have them
    rows, _, columns = _constexprs(dtype, e, k, fmt, True, groups.MULTIPLE, row, target)
    row_pointers = {"x": _POINTERS[dtype], "q": "*u8", "inverse_scale": "*fp32", "partial": _POINTERS[dtype]}
    row_pointers["offs"] = "*i32"
    column_pointers = {"x": _POINTERS[dtype], "q": "*u8", "scale": "*fp32", "bands": "*i32"}
    column_sizes = ("K", "E", "m_pad_blocks", "tiles", "row_stride")
    case = f"{fmt.name}-{_INPUT_NAMES[dtype]}-e{e}-k{k}"
    return [
        _spec(
            _quantize_rows_kernel, f"rows-{case}", fmt, target, row_pointers, ("M", "K", "E", "row_stride"), rows,
            {"num_warps": row.row_warps},
        ),
        _spec(
            _cast_columns_kernel, f"columns-{case}", fmt, target, column_pointers, column_sizes, columns,
            row.turned_options(fmt, target),
        ),
    ]  # fmt: skip


def _scales_specs(fmt: formats.Format, e: int, k: int, target: str) -> list[CompileSpec]:
    row = launch.config(ROWWISE_AND_COLWISE_CONFIGS, target, size_class(e, k))
    if row.apart:
        return []
    _, scales, _ = _constexprs(torch.bfloat16, e, k, fmt, True, groups.MULTIPLE, row, target)
    pointers = {"partial": "*i16", "scale": "*fp32", "inverse_scale": "*fp32"}
    pointers.update(dict.fromkeys(("bands", "offs", "padded_offs"), "*i32"))
    spec = CompileSpec(
        kernel=_column_scales_kernel,
        case=f"rowwise-and-colwise-scales-{fmt.name}-bf16-e{e}-k{k}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(("M", "K", "E", "m_pad_blocks", "most_bands"), "i32")},
        constexprs=scales,
        num_warps=column_maxima.SCALE_WARPS,
        divisible=(*pointers, "K"),
        within_2gb=tuple(pointers),
        encodes=False,
    )
    return [spec]


def _spec(kernel, case, fmt, target, pointers, sizes, constexprs, launched) -> CompileSpec:
    return CompileSpec(
        kernel=kernel,
        case=f"rowwise-and-colwise-{case}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(sizes, "i32")},
        constexprs={"column_stride": 1, "UNIT_STRIDE": True, **constexprs},
        num_warps=launched.pop("num_warps"),
        divisible=(*pointers, "K", "row_stride"),
        within_2gb=tuple(pointers),
        native=cast.constants(fmt, target)["NATIVE"] is not None,
        options=launched,
    )
