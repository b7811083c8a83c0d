"""Tiles that leave transposed: read along one dimension and written along the other, 16 bytes wide on both sides.

A thread reads 16 neighbouring bytes of a row. If it is to write 16 neighbouring codes of a column too, it needs 16
neighbouring rows. So a tile of ROWS rows is read as PARTS (16, 8, 4 ... or 1) smaller tiles, of which part p holds rows
p, PARTS + p, 2 * PARTS + p ...: all parts are spread over the threads alike, so a thread has the same columns of PARTS
neighbouring rows. `turned` joins them, the parts innermost, and only then are they encoded: the conversion packs
neighbours of a column into one word, and the exchange between threads that makes stores contiguous moves PARTS bytes at
a time. (Joined after the cast instead, or transposed as a plain tile, each byte is picked out of a word by itself.)

Not here: what the tiles are reduced over, and scales.
"""

from fp8stack._triton import jit, tl
from fp8stack.kernels import cast


@jit
def load_tile(x, rows, columns, M, K, row_stride, column_stride, UNIT_STRIDE: tl.constexpr, EVICTION: tl.constexpr):
    """Elements (rows, columns) as loaded; 0 from row M and column K on. rows: int64, as rows * stride can pass 2^31."""
    if UNIT_STRIDE:
        pointers = x + rows[:, None] * row_stride + columns[None, :]
    else:
        pointers = x + rows[:, None] * row_stride + columns[None, :].to(tl.int64) * column_stride
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    return tl.load(pointers, mask=mask, other=0, eviction_policy=EVICTION)


@jit
def load_parts(
    x,
    first_row,
    columns,
    M,
    K,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The PARTS tiles (ROWS / PARTS, columns) of rows from first_row on, as loaded; 0 from row M and column K on.

    64 bits: rows * stride can pass 2^31.
    """
    rows = first_row + tl.arange(0, ROWS // PARTS).to(tl.int64) * PARTS
    parts = ()
    for part in tl.static_range(PARTS):
        # The part's rows as a step from the first part's: one product a row, not one a row and part. A stride of 1
        # arrives as a constant, which has no .to.
        elements = load_tile(
            x + part * tl.cast(row_stride, tl.int64),
            rows,
            columns,
            M - part,
            K,
            row_stride,
            column_stride,
            UNIT_STRIDE,
            EVICTION,
        )
        parts = parts + (elements,)  # noqa: RUF005 - Triton compiles no starred expression
    return parts


@jit
def scaled(parts, factor, COUNT: tl.constexpr):
    """COUNT tiles, as loaded, in float32 and times a factor."""
    products = ()
    for part in tl.static_range(COUNT):
        y = cast.float_bits(parts[part]).to(tl.float32, bitcast=True) * factor
        products = products + (y,)  # noqa: RUF005 - Triton compiles no starred expression
    return products


@jit
def largest_of(parts, COUNT: tl.constexpr):
    """Element-wise largest absolute float32 bits (int32) of COUNT tiles of one shape, as loaded."""
    largest = cast.float_bits(parts[0]) & 0x7FFFFFFF
    for part in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, cast.float_bits(parts[part]) & 0x7FFFFFFF)
    return largest


@jit
def unit_largest(bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT_ROWS: tl.constexpr, UNIT_COLUMNS: tl.constexpr):
    """Largest of each UNIT_ROWS x UNIT_COLUMNS block of an int32 tile: (ROWS / UNIT_ROWS, COLUMNS / UNIT_COLUMNS)."""
    blocks = tl.reshape(bits, (ROWS // UNIT_ROWS, UNIT_ROWS, COLUMNS // UNIT_COLUMNS, UNIT_COLUMNS))
    return tl.max(tl.max(blocks, axis=3), axis=1)


@jit
def spread(units, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT_ROWS: tl.constexpr, UNIT_COLUMNS: tl.constexpr):
    """Each value of unit_largest's result at all elements of its block: (ROWS, COLUMNS)."""
    blocks = tl.broadcast_to(
        units[:, None, :, None], (ROWS // UNIT_ROWS, UNIT_ROWS, COLUMNS // UNIT_COLUMNS, UNIT_COLUMNS)
    )
    return tl.reshape(blocks, (ROWS, COLUMNS))


@jit
def _joined(parts, COUNT: tl.constexpr):
    """COUNT tiles (R, C) as one (R, C, 2, 2 ...), the part's number in binary along the new dimensions."""
    if COUNT == 1:
        return parts[0]
    else:
        HALF: tl.constexpr = COUNT // 2
        pairs = ()
        for part in tl.static_range(HALF):
            pairs = pairs + (tl.join(parts[part], parts[part + HALF]),)  # noqa: RUF005 - as above
        return _joined(pairs, HALF)


@jit
def turned(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tiles (ROWS / PARTS, COLUMNS) as one (COLUMNS, ROWS) tile: the transposed tile, rows in their order."""
    tile = tl.reshape(_joined(parts, PARTS), (ROWS // PARTS, COLUMNS, PARTS))
    return tl.reshape(tl.trans(tile, (1, 0, 2)), (COLUMNS, ROWS))


@jit
def store_nan_codes(pointers, mask, NAN_CODE: tl.constexpr):
    """NaN codes over codes that this program stored before, where mask says."""
    tl.debug_barrier()  # those may have been other threads'
    tl.store(pointers, tl.full(mask.shape, NAN_CODE, tl.uint8), mask=mask)


@jit
def store_nan_units(
    pointers,
    mask,
    largest,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """store_nan_codes for the blocks of a tile (ROWS, COLUMNS) whose largest bits are not finite, if there is one."""
    if tl.max(tl.max(largest, axis=1), axis=0) >= 0x7F800000:
        non_finite = spread(largest, ROWS, COLUMNS, UNIT_ROWS, UNIT_COLUMNS) >= 0x7F800000
        store_nan_codes(pointers, mask & non_finite, NAN_CODE)
