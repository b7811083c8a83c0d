"""Groups of rows: where each one starts, and where it starts in an output that is padded to a multiple.

offs is int32 (E,): the cumulative *end* row of each group. A router writes it on the device, so nobody on the host
knows it, and nobody has checked it. Every op therefore reads it in one way:

    end[e]          = max over i <= e of clamp(offs[i], 0, M)       never decreasing, never out of range
    start[e]        = end[e - 1], 0 for the first
    padded_size[e]  = end[e] - start[e], rounded up to a multiple of the alignment
    padded_end[e]   = sum over i <= e of padded_size[i]

Good offs come out as they went in. Of bad ones, groups that would lie outside of the rows or before their predecessor
come out shorter, or empty: no row is read twice and none outside of x. Rows past the last end belong to no group.

A grouped GEMM wants groups that are multiples of 16 along its contraction. The ops that quantise along that dimension
write each group at the next multiple instead of having their input padded: the output has padded_rows(M, E, alignment)
rows, a bound that any offs keeps and that needs no look at the device. Every program works its group's bounds out again
from all E offsets: a scan and a few sums over E lanes, less than one more launch would cost.
"""

import torch

from fp8stack._triton import jit, tl

MULTIPLE = 16
"""What an alignment must be a multiple of: 16 codes are the widest store, and the least that a grouped GEMM takes."""


def padded_rows(m: int, e: int, alignment: int) -> int:
    """Rows of an output that holds e groups of m rows in all, each starting at a multiple of alignment."""
    return (m + (alignment - 1) * e) // alignment * alignment


def lanes(e: int) -> int:
    """LANES of `bounds` for e groups."""
    return 1 << (e - 1).bit_length()


def require_offs(offs: torch.Tensor, x: torch.Tensor, alignment: int) -> None:
    """Raise ValueError for offs or an alignment that no grouped op takes. Reads no element: that would synchronise."""
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.shape[0] == 0 or offs.device != x.device:
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)} on {offs.device}; expected int32 (E,), E >= 1, on "
            f"{x.device}: the cumulative end of each group; convert it with .to(torch.int32)"
        )
    if alignment < MULTIPLE or alignment % MULTIPLE:
        raise ValueError(
            f"alignment is {alignment}; expected a multiple of {MULTIPLE}, which a grouped GEMM and 16-byte stores "
            "need; take 16 for row and column scales, 32 for mxfp8, 128 for blockwise"
        )


def bounds_reference(offs: torch.Tensor, m: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """start, end and padded_end of each group, int32 (E,); the specification, in plain torch."""
    ends = offs.clamp(0, m).cummax(0).values
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    padded = (ends - starts + (alignment - 1)) // alignment * alignment
    return starts, ends, padded.cumsum(0, dtype=torch.int32)


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def extents(offs, M, E, LANES: tl.constexpr):
    """start and size of every group, (LANES,). LANES: a power of two, at least E; from E on the sizes are 0."""
    lanes = tl.arange(0, LANES)
    inside = lanes < E
    before = tl.load(offs + lanes - 1, mask=inside & (lanes > 0), other=0)
    ends = tl.load(offs + lanes, mask=inside, other=0)
    starts = tl.associative_scan(tl.minimum(tl.maximum(before, 0), M), 0, _larger)
    ends = tl.maximum(starts, tl.minimum(ends, M))
    return starts, tl.where(inside, ends - starts, 0)


@jit
def _halves(high, low):
    """Two numbers from 0 to 2^31 - 1 in one of 64 bits. Sums of such add both, as long as theirs stay below 2^31."""
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@jit
def bounds_of(starts, sizes, group, LANES: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Scalars of one group: start, size, padded start, padded size; and the padded end of the last group.

    The padded results are multiples of 16 to the compiler too.
    """
    lanes = tl.arange(0, LANES)
    blocks = (sizes + (ALIGNMENT - 1)) // ALIGNMENT
    # Two numbers a sum, in the halves of 64 bits: a sum over warps costs every program a wait for all of them.
    here = tl.sum(tl.where(lanes == group, _halves(starts, sizes), 0), 0)
    before = tl.sum(_halves(tl.where(lanes < group, blocks, 0), blocks), 0)
    start, size = (here >> 32).to(tl.int32), here.to(tl.int32)
    padded_start, total = (before >> 32).to(tl.int32) * ALIGNMENT, before.to(tl.int32) * ALIGNMENT
    return start, size, padded_start, (size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT, total


@jit
def bounds(offs, group, M, E, LANES: tl.constexpr, ALIGNMENT: tl.constexpr):
    """bounds_of a group, from offs."""
    starts, sizes = extents(offs, M, E, LANES)
    return bounds_of(starts, sizes, group, LANES, ALIGNMENT)


@jit
def share_of_tail(group, total, padded, E):
    """First and end row of what this group's programs clear of the rows from total to padded, both multiples of 16.

    At least 128 rows, or none: so that what one program clears of a column of codes are whole lines of the cache.
    """
    share = tl.maximum(tl.cdiv(padded - total, 16 * E) * 16, 128)
    return total + tl.minimum(group * share, padded - total), total + tl.minimum((group + 1) * share, padded - total)
