"""Quantisation as a chain of plain torch operators: what the kernels replace, for `train --quantisation unfused`.

The codes are the kernels' (suites/unit/test_unfused.py); a NaN code may carry a sign, as torch's cast leaves it. What
differs is the work: an operator reads and writes everything that the next one reads again.

    magnitude, maximum        2 to 3 passes over x
    scale and inverse scale   a dozen launches on one number a scaling unit
    times the scale, clamped, cast           3 passes, the first of which widens to float32
    transposed                1 more for codes that a GEMM contracts the other way
    groups of columns         the maximum as a scatter; rows to their padded places by index

Recipes of blockwise and mxfp8 have no chain. Nothing is read back to the host, unlike in the references, which are
written to be checked and not to be fast: they take the groups of columns one by one and cast on integers. A recipe that
runs so is what a training stack does without kernels of its own. Each chain is the body of its op, so torch.compile,
which would fuse some of it, does not see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8stack import formats, scaling
from fp8stack.formats import Format
from fp8stack.kernels import groups


def _cast(x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of x * factor. torch's cast to OCP formats does not saturate: the clamp does."""
    return (x.to(torch.float32) * factor).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _turned(codes: torch.Tensor) -> torch.Tensor:
    """Codes with the last two dimensions exchanged in memory, through bytes: copies of float8 are not everywhere."""
    return codes.view(torch.uint8).transpose(-1, -2).contiguous().view(codes.dtype)


def _dense(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(codes.dtype)


def _along(x: torch.Tensor, fmt: Format, dim: int, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes with a scale for each slice along dim, in the strides of x, and the inverse scale without dim."""
    scale = scaling.scale_from_amax(scaling.amax(x, dim), fmt, pow2)
    return _cast(x, scale.unsqueeze(dim), fmt), scaling.inverse_scale(scale).contiguous()


def rowwise(x: torch.Tensor, fmt: str, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rowwise."""
    codes, inverse_scale = _along(x, formats.get(fmt), 1, pow2)
    return _dense(codes) if not codes.is_contiguous() else codes, inverse_scale


def tensorwise(
    x: torch.Tensor, fmt: str, pow2: bool, scale: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """quantize_tensorwise and its `both`: row-major codes, column-major codes, as far as in the layout."""
    found = formats.get(fmt)
    scale = scaling.scale_from_amax(scaling.amax(x), found, pow2) if scale is None else scale.reshape(())
    codes = _cast(x, scale, found)
    row = _dense(codes) if layout in ("row", "both") else None
    column = _turned(codes).t() if layout in ("column", "both") else None
    return row, column, scaling.inverse_scale(scale)


def colwise_grouped(
    x: torch.Tensor, offs: torch.Tensor, fmt: str, pow2: bool, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_colwise_grouped."""
    found = formats.get(fmt)
    (m, n), e = x.shape, offs.shape[0]
    starts, ends, padded_offs = groups.bounds_reference(offs, m, alignment)
    row = torch.arange(m, device=x.device, dtype=torch.int32)
    group = torch.searchsorted(ends, row, right=True)  # e: of none
    bits = x.to(torch.float32).abs().view(torch.int32)  # their order is that of the numbers: scaling.py
    maxima = torch.zeros((e + 1, n), dtype=torch.int32, device=x.device)
    maxima.scatter_reduce_(0, group[:, None].expand(m, n), bits, "amax")
    scale = scaling.scale_from_amax(maxima.view(torch.float32), found, pow2)
    codes = _cast(x, scale.index_select(0, group), found)
    before = torch.cat([torch.zeros_like(padded_offs[:1]), padded_offs])[:-1]
    rows = groups.padded_rows(m, e, alignment)
    moved = torch.cat([before - starts, torch.zeros_like(before[:1])]).index_select(0, group)
    place = torch.where(group < e, row + moved, rows).long()  # one row more takes what belongs to no group
    q = torch.zeros((rows + 1, n), dtype=torch.uint8, device=x.device).index_copy_(0, place, codes.view(torch.uint8))
    return q[:rows].t().contiguous().view(found.dtype).t(), scaling.inverse_scale(scale[:e]), padded_offs


def experts(w: torch.Tensor, fmt: str, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_experts."""
    codes, inverse_scale = _along(w, formats.get(fmt), 2, pow2)
    return _dense(codes) if not codes.is_contiguous() else codes, inverse_scale


def experts_transposed(w: torch.Tensor, fmt: str, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_experts_transposed."""
    codes, inverse_scale = _along(w, formats.get(fmt), 1, pow2)
    return _turned(codes), inverse_scale


def together(
    rows: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    offs: torch.Tensor,
    fmt: str,
    pow2: bool,
    alignment: int,
) -> list[torch.Tensor]:
    """quantize_together: one chain after another."""
    flat: list[torch.Tensor] = []
    padded_offs = groups.bounds_reference(offs, 0, alignment)[2]
    for x in rows:
        flat += (rowwise if x.dim() == 2 else experts)(x, fmt, pow2)
    for x in columns:
        codes, inverse_scale, padded_offs = colwise_grouped(x, offs, fmt, pow2, alignment)
        flat += codes, inverse_scale
    for w in weights:
        flat += experts_transposed(w, fmt, pow2)
    return [*flat, padded_offs]
