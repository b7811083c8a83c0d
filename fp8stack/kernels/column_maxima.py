"""Rows quantised, and on the way the maxima of their columns: the first half of quantising a tensor both ways.

    codes and inverse scales of rows     as rowwise.py
    partial[program, k]                  = max|bits| of column k over the rows of one program, as wide as the elements
    scale[k], inverse scale[k]           from all partial maxima of an expert or a group

experts.py and rowwise_and_colwise.py want rows and columns of the same tensor. Column codes need the column's maximum
first, so x is read twice in any case; the question is who reads it for the maxima. Here it is the kernel that quantises
the rows, which reads x anyway; what is left for the columns is a cast with known scales, turned (tile.py, colwise.py):

    bytes an element (bf16 in): rows read 2, write 1; columns read 2, write 1; so 6, and 4 / span for partial maxima

Two kernels that each find their own maxima move 7, if a second read hits the cache, or 8. One launch of both, in an
order of work that lets the columns of a group or an expert follow its rows through the cache, was built and measured
on an H200 (torch 2.11, Triton 3.6): best of 60 configurations 0.518 (E16 N5120 K8192) and 0.501 (E32 N7168 K2048) of a
copy, at 4 bytes an element, as if the cache were not there. On the same machine rows alone run at 0.95 to 1.0 of a
copy, a turned cast with a known scale at 0.93.

A program takes `span` consecutive rows, a few at a time, which it holds in registers between maximum and cast. So wide
a chunk of a row spreads over all threads of the program that each has the same columns of every row: a column's maximum
is found within the thread and stays there until the program's last row. No atomics, nothing to clear first, the same
bits every time. A row that registers do not hold is read twice; its program takes all its rows at once, chunk by chunk.

Maxima are compared as integers, in the elements' own width: bits without the sign grow as magnitudes do, and those of
NaN and Inf are above all others. Not as float32 bits, which the cast needs too: the compiler would keep both till then.

Not here: the turned cast, experts and groups.
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats
from fp8stack._triton import jit, tl
from fp8stack.kernels import cast, launch, tile


@dataclass(frozen=True)
class BothConfig:
    """How to launch an op that quantises rows and columns, for one size class.

    span: rows of a program for rows. row_rows, row_block: it takes them row_rows at a time, in chunks of row_block
    elements. row_warps: of it. ahead: it loads the next rows before it casts these. hints: it tells the cache that row
    codes are not read again. rows, columns, parts (tile.py), num_warps, programs (launch.options): a tile of the turned
    cast; rows is that of bf16, float32 has half as many. measured: what says so. Where every number is 0 the op is two
    launches that know nothing of each other, with the rows of their own tables (apart).
    """

    span: int
    row_rows: int
    row_block: int
    row_warps: int
    ahead: bool
    hints: bool
    rows: int
    columns: int
    parts: int
    num_warps: int
    programs: int
    measured: str

    @property
    def apart(self) -> bool:
        """Whether rows and columns are quantised by two launches that each read x."""
        return self.span == 0

    def row_constexprs(self, k: int, dtype: torch.dtype) -> dict[str, object]:
        """What the kernel for rows of k elements is compiled for, beside the format."""
        return {
            "SPAN": self.span_of(k, dtype),
            "ROWS": self.row_rows,
            "BLOCK": self.row_block,
            "CHUNKS": -(-k // self.row_block),
            "HELD": holds(k, dtype),
            "AHEAD": self.ahead,
            "HINTS": self.hints,
        }

    def span_of(self, k: int, dtype: torch.dtype) -> int:
        """Rows of a program, for rows of k elements."""
        return self.span if holds(k, dtype) else self.row_rows

    def tile_rows(self, dtype: torch.dtype) -> int:
        """Rows of a tile of the turned cast."""
        return self.rows if dtype.itemsize == 2 else self.rows // 2

    def turned_options(self, fmt: formats.Format, target: str) -> dict[str, int]:
        """Launch options of the turned cast. NVIDIA's integer encoder needs registers more than it needs company."""
        limited = cast.constants(fmt, target)["NATIVE"] is not None or device.lookup(target).vendor != "nvidia"
        return launch.options(self.num_warps, self.programs if limited else 0, target)


_WIDTHS = (2048, 8192, 16384)
_HELD = _WIDTHS[-1]


def width_class(k: int, dtype: torch.dtype) -> str:
    """The size class of rows of k elements, such as "k<=2048"; a float32 counts twice; "k>16384" is read twice."""
    k = k * dtype.itemsize // 2
    return next((f"k<={limit}" for limit in _WIDTHS if k <= limit), f"k>{_HELD}")


WIDTH_CLASSES = (*(f"k<={limit}" for limit in _WIDTHS), f"k>{_HELD}")


def holds(k: int, dtype: torch.dtype) -> bool:
    """Whether rows of k elements stay in registers between the maximum and the cast."""
    return k * dtype.itemsize // 2 <= _HELD


@jit
def _magnitudes(elements):
    """Absolute bits of elements as loaded: int16 or int32, like them."""
    MAGNITUDE: tl.constexpr = 0x7FFF if elements.dtype == tl.int16 else 0x7FFFFFFF
    return elements & MAGNITUDE


@jit
def _load_rows(
    x,
    rows,
    count,
    K,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """Whole rows as loaded, in CHUNKS tiles; rows from count on are 0. All loads start before one is waited for."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        elements = tile.load_tile(x, rows, at, count, K, row_stride, column_stride, UNIT_STRIDE, "")
        chunks = chunks + (elements,)  # noqa: RUF005 - Triton compiles no starred expression
    return chunks


@jit
def _store_codes(
    q_rows,
    elements,
    scale,
    at,
    in_rows,
    K,
    HINTS: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """Codes of one chunk of rows, given as loaded. scale: bits (rows,)."""
    FIRST: tl.constexpr = "evict_first" if HINTS else ""
    y = cast.float_bits(elements).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, None]
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN)
    tl.store(q_rows + at[None, :], codes, mask=in_rows[:, None] & (at < K)[None, :], eviction_policy=FIRST)


@jit
def quantize_rows(
    x,
    q,
    inverse_scale,
    partial,
    first_row,
    count,
    K,
    row_stride,
    column_stride,
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
    """The work of one program: count rows from first_row (int64) on, count > 0; not HELD: at most ROWS of them.

    q: codes of row 0. inverse_scale: of row 0. partial: the program's own K maxima.
    """
    x += first_row * row_stride
    q += first_row * K
    inverse_scale += first_row
    rows = tl.arange(0, ROWS).to(tl.int64)

    if HELD:
        maxima = ()
        for _chunk in tl.static_range(CHUNKS):
            maxima = maxima + (tl.zeros((BLOCK,), x.dtype.element_ty),)  # noqa: RUF005 - as above
        if AHEAD:
            held = _load_rows(x, rows, count, K, row_stride, column_stride, BLOCK, CHUNKS, UNIT_STRIDE)
        for at in range(0, count, ROWS):
            if AHEAD:
                chunks = held
                held = _load_rows(
                    x, rows + (at + ROWS), count, K, row_stride, column_stride, BLOCK, CHUNKS, UNIT_STRIDE
                )
            else:
                chunks = _load_rows(x, rows + at, count, K, row_stride, column_stride, BLOCK, CHUNKS, UNIT_STRIDE)
            in_rows = rows + at < count
            largest = _magnitudes(chunks[0])
            for chunk in tl.static_range(1, CHUNKS):
                largest = tl.maximum(largest, _magnitudes(chunks[chunk]))
            grown = ()
            for chunk in tl.static_range(CHUNKS):
                highest = tl.max(_magnitudes(chunks[chunk]), axis=0).to(x.dtype.element_ty)
                grown = grown + (tl.maximum(maxima[chunk], highest),)  # noqa: RUF005 - as above
            maxima = grown
            scale = cast.scale_bits(tl.max(cast.float_bits(largest), axis=1), MAX, POW2)
            inverse = cast.inverse_bits(scale).to(tl.float32, bitcast=True)
            tl.store(inverse_scale + rows + at, inverse, mask=in_rows)
            q_rows = q + (rows + at)[:, None] * K
            for chunk in tl.static_range(CHUNKS):
                _store_codes(
                    q_rows, chunks[chunk], scale, chunk * BLOCK + tl.arange(0, BLOCK), in_rows, K,
                    HINTS, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
                )  # fmt: skip
        for chunk in tl.static_range(CHUNKS):
            at = chunk * BLOCK + tl.arange(0, BLOCK)
            tl.store(partial + at, maxima[chunk], mask=at < K)
    else:
        largest = tl.zeros((ROWS, BLOCK), x.dtype.element_ty)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + tl.arange(0, BLOCK)
            elements = tile.load_tile(x, rows, at, count, K, row_stride, column_stride, UNIT_STRIDE, "")
            largest = tl.maximum(largest, _magnitudes(elements))
            highest = tl.max(_magnitudes(elements), axis=0).to(x.dtype.element_ty)
            tl.store(partial + at, highest, mask=at < K)
        scale = cast.scale_bits(tl.max(cast.float_bits(largest), axis=1), MAX, POW2)
        for back in range(CHUNKS):  # backwards: what was read last is the likeliest to be in the cache
            at = (CHUNKS - 1 - back) * BLOCK + tl.arange(0, BLOCK)
            elements = tile.load_tile(x, rows, at, count, K, row_stride, column_stride, UNIT_STRIDE, "")
            _store_codes(
                q + rows[:, None] * K, elements, scale, at, rows < count, K,
                HINTS, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
            )  # fmt: skip
        inverse = cast.inverse_bits(scale).to(tl.float32, bitcast=True)
        tl.store(inverse_scale + rows, inverse, mask=rows < count)


@jit
def store_scales(
    partial,
    count,
    scale,
    inverse_scale,
    block,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
):
    """Scales and inverse scales of a block of COLUMNS columns, from count rows of partial maxima; 1 from none."""
    at = block * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    largest = tl.zeros((ROWS, COLUMNS), partial.dtype.element_ty)
    for first in range(0, count, ROWS):
        pointers = partial + (first + rows).to(tl.int64)[:, None] * K + at[None, :]
        mask = (first + rows < count)[:, None] & (at < K)[None, :]
        largest = tl.maximum(largest, tl.load(pointers, mask=mask, other=0))
    bits = cast.scale_bits(tl.max(cast.float_bits(largest), axis=0), MAX, POW2)
    tl.store(scale + at, bits.to(tl.float32, bitcast=True), mask=at < K)
    tl.store(inverse_scale + at, cast.inverse_bits(bits).to(tl.float32, bitcast=True), mask=at < K)


SCALE_ROWS = 16
SCALE_COLUMNS = 256
SCALE_WARPS = 4
"""Partial maxima that a program of the kernel for scales reads at a time, and its warps: a small part of the time."""
