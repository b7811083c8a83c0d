"""Tensorwise FP8 quantisation: one scale for a whole 2-D tensor, its own or a given one.

    scale = FP8_MAX / max|x|       q = saturate(x * scale)

The exact rules are scaling.py's. Scales are not powers of two by default, as in the tensorwise recipe. A given scale
(FSDP's, from before the all-gather) is taken as it is: only the cast is left, and what lies beyond MAX saturates.

Traffic (bf16 in): two passes, for the maximum and for the cast: reads 2 * 2*M*K, writes M*K bytes: 5 bytes an element;
3 with a given scale; one more for codes in both layouts.
Layout: x any strides, fastest with unit stride along one dimension; codes (M, K) row-major, column-major or both;
inverse scale float32 ().

Launches: each program of the first writes the maximum of its tile; one block reduces these to the scale; the third
casts. No atomics: nothing has to be zeroed first, and the same bits come out every time. Where `fused`, each program of
the cast reduces the maxima itself, which saves a launch and costs a read of all of them. The cast goes through the
tensor backwards: what the first pass read last is still in the cache.

A dense tensor whose rows are multiples of 16 is read as one long row, so no program has a row's tail to idle in.
Column-major x is its row-major transpose with the layouts exchanged.

Not here: sums over the ranks of a process group, which are the caller's.
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, launch, tile, unfused


@dataclass(frozen=True)
class TensorwiseConfig:
    """How to launch, by the layout of the codes.

    amax_elements, amax_warps: a program of the first pass. fused: see above. rows, columns, parts (tile.py), num_warps,
    programs (launch.options): a program of the cast; rows * columns elements in a line where codes are row-major only.
    hints: tell the cache that the cast reads for the last time. measured: what says so.
    """

    amax_elements: int
    amax_warps: int
    fused: bool
    rows: int
    columns: int
    parts: int
    num_warps: int
    programs: int
    hints: bool
    measured: str


LAYOUTS = ("row", "column", "both")
"""Layouts of the codes, and size classes of the launch table: the sizes themselves are token counts."""

_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def _rows_of(targets: tuple[str, ...], *configs: TensorwiseConfig) -> dict[tuple[str, str], TensorwiseConfig]:
    return {(target, name): row for target in targets for name, row in zip(LAYOUTS, configs, strict=True)}


# (target, layout) -> configuration. In a turned tile, rows * columns: parts times 16 bytes a thread.
TENSORWISE_CONFIGS: dict[tuple[str, str], TensorwiseConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        TensorwiseConfig(16384, 8, False, 1, 8192, 1, 8, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 8, False, 256, 64, 16, 4, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 8, False, 128, 128, 8, 4, 0, False, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        TensorwiseConfig(16384, 4, False, 1, 8192, 1, 4, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 4, False, 256, 64, 16, 2, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 4, False, 128, 128, 8, 2, 0, False, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        TensorwiseConfig(16384, 8, False, 1, 8192, 1, 8, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 8, False, 256, 64, 16, 4, 0, False, _UNMEASURED),
        TensorwiseConfig(16384, 8, False, 128, 128, 8, 4, 0, False, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs. Both ways to reduce the maxima.
    **_rows_of(
        ("cpu",),
        TensorwiseConfig(8192, 1, False, 1, 8192, 1, 1, 0, False, _INTERPRETER),
        TensorwiseConfig(8192, 1, True, 128, 128, 2, 1, 0, False, _INTERPRETER),
        TensorwiseConfig(8192, 1, False, 128, 128, 2, 1, 0, False, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "row"): TensorwiseConfig(
        16384, 4, False, 1, 8192, 1, 4, 0, False, "not timed: gfx942/sweep-tensorwise.json"
    ),
    ("gfx950", "row"): TensorwiseConfig(
        16384, 4, False, 1, 8192, 1, 4, 0, False, "not timed: gfx950/sweep-tensorwise.json"
    ),
    ("sm_90", "row"): TensorwiseConfig(
        32768, 16, False, 1, 4096, 1, 4, 0, False, "0.98 to 1.03 of a copy: h200/sweep-tensorwise.json"
    ),
    ("sm_90", "column"): TensorwiseConfig(
        16384, 8, False, 128, 128, 16, 4, 0, False, "0.95 of a copy: h200/sweep-tensorwise_column.json"
    ),
    ("sm_90", "both"): TensorwiseConfig(
        16384, 8, False, 64, 64, 8, 2, 0, False, "0.92 of a copy: h200/sweep-tensorwise_both.json"
    ),
    # End of the swept rows.
}

_PARTIALS = 2048  # maxima that one block reads at a time


def quantize_tensorwise_reference(
    x: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = False,
    scale: torch.Tensor | None = None,
    column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_tensorwise."""
    row_major, turned, inverse_scale = quantize_tensorwise_both_reference(x, fmt, pow2, scale)
    return (turned if column_major else row_major), inverse_scale


def quantize_tensorwise_both_reference(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = False, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_tensorwise_both."""
    fmt = formats.get(fmt)
    if scale is None:
        codes, inverse_scale = scaling.quantize_reference(x, fmt, dim=None, pow2=pow2)
    else:
        scale = scale.reshape(())
        codes, inverse_scale = formats.cast(x.to(torch.float32) * scale, fmt), scaling.inverse_scale(scale)
    codes = codes.view(torch.uint8)
    row_major = codes.clone(memory_format=torch.contiguous_format)
    column_major = codes.t().clone(memory_format=torch.contiguous_format).t()
    return row_major.view(fmt.dtype), column_major.view(fmt.dtype), inverse_scale


# M, the number of tiles and the number of maxima follow the number of tokens: not specialised.
@jit(do_not_specialize=["M", "column_blocks"])
def _partial_amax_kernel(
    x,
    partial,
    M,
    K,
    row_stride,
    column_stride,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
):
    """partial[program]: the largest absolute float32 bits of one tile of ROWS x BLOCK elements."""
    block = tl.program_id(0).to(tl.int64)
    rows = block // column_blocks * ROWS + tl.arange(0, ROWS)
    columns = block % column_blocks * BLOCK + tl.arange(0, BLOCK)
    parts = tile.load_tile(x, rows, columns, M, K, row_stride, column_stride, UNIT_STRIDE, "")
    largest = tl.max(tl.max(cast.float_bits(parts) & 0x7FFFFFFF, axis=1), axis=0)
    tl.store(partial + block, largest)


@jit
def _largest_partial(partial, count, BLOCK: tl.constexpr):
    """The largest of count partial maxima, 0 of none."""
    largest = tl.zeros((BLOCK,), tl.int32)
    at = tl.arange(0, BLOCK)
    while count > 0:
        largest = tl.maximum(largest, tl.load(partial + at, mask=at < count, other=0))
        partial += BLOCK
        count -= BLOCK
    return tl.max(largest, axis=0)


@jit(do_not_specialize=["count"])
def _scale_kernel(partial, scale, count, BLOCK: tl.constexpr, POW2: tl.constexpr, MAX: tl.constexpr):
    """One program: the scale from all partial maxima."""
    bits = cast.scale_bits(_largest_partial(partial, count, BLOCK), MAX, POW2)
    tl.store(scale, bits.to(tl.float32, bitcast=True))


@jit
def _scale_of(source, count, PARTIALS: tl.constexpr, POW2: tl.constexpr, MAX: tl.constexpr):
    """Bits of the scale: from count partial maxima at source, PARTIALS at a time; PARTIALS 0: the float32 at source."""
    if PARTIALS:
        return cast.scale_bits(_largest_partial(source, count, PARTIALS), MAX, POW2)
    else:
        bits = tl.load(source).to(tl.int32, bitcast=True)
        # A given NaN may have any sign and payload.
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@jit
def _store_inverse(inverse_scale, bits):
    if tl.program_id(0) == 0:
        tl.store(inverse_scale, cast.inverse_bits(bits).to(tl.float32, bitcast=True))


@jit
def _store_nan_codes(pointers, mask, bits, NAN_CODE: tl.constexpr):
    """NaN codes over the codes of a tile, if the scale (bits) is NaN."""
    if bits > 0x7F800000:
        tile.store_nan_codes(pointers, mask, NAN_CODE)


@jit(do_not_specialize=["M", "count", "blocks", "column_blocks"])
def _cast_rows_kernel(
    x,
    q,
    source,
    inverse_scale,
    count,
    M,
    K,
    row_stride,
    column_stride,
    blocks,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    HINTS: tl.constexpr,
    PARTIALS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    NAN_APART: tl.constexpr,
):
    """Row-major codes of one tile of ROWS x BLOCK elements, the last tile first."""
    DROP: tl.constexpr = "evict_first" if HINTS else ""
    block = blocks - 1 - tl.program_id(0).to(tl.int64)
    rows = block // column_blocks * ROWS + tl.arange(0, ROWS)
    columns = block % column_blocks * BLOCK + tl.arange(0, BLOCK)
    elements = tile.load_tile(x, rows, columns, M, K, row_stride, column_stride, UNIT_STRIDE, DROP)
    bits = _scale_of(source, count, PARTIALS, POW2, MAX)
    y = cast.float_bits(elements).to(tl.float32, bitcast=True) * bits.to(tl.float32, bitcast=True)
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART)
    pointers = q + rows[:, None] * K + columns[None, :]
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    tl.store(pointers, codes, mask=mask)
    if NAN_APART:
        _store_nan_codes(pointers, mask, bits, NAN_CODE)
    _store_inverse(inverse_scale, bits)


@jit(do_not_specialize=["M", "count", "blocks", "column_blocks"])
def _cast_turned_kernel(
    x,
    q,
    q_turned,
    source,
    inverse_scale,
    count,
    M,
    K,
    row_stride,
    column_stride,
    blocks,
    column_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BOTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    HINTS: tl.constexpr,
    PARTIALS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    NAN_APART: tl.constexpr,
):
    """Column-major codes of one tile, row-major too if BOTH, the last tile first. ALIGNED: M is a multiple of 16."""
    DROP: tl.constexpr = "evict_first" if HINTS else ""
    if ALIGNED:
        M = M // 16 * 16  # as the compiler sees it: tl.multiple_of says nothing about an argument
    block = blocks - 1 - tl.program_id(0).to(tl.int64)
    first_row = block // column_blocks * ROWS
    columns = block % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    parts = tile.load_parts(x, first_row, columns, M, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, DROP)
    bits = _scale_of(source, count, PARTIALS, POW2, MAX)
    scaled = tile.scaled(parts, bits.to(tl.float32, bitcast=True), PARTS)
    if BOTH:
        for part in tl.static_range(PARTS):
            rows = first_row + tl.arange(0, ROWS // PARTS) * PARTS + part
            codes = cast.encode(
                scaled[part], MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART
            )
            mask = (rows < M)[:, None] & (columns < K)[None, :]
            tl.store(q + rows[:, None] * K + columns[None, :], codes, mask=mask)
            if NAN_APART:
                _store_nan_codes(q + rows[:, None] * K + columns[None, :], mask, bits, NAN_CODE)
    y = tile.turned(scaled, ROWS, COLUMNS, PARTS)
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART)
    rows = first_row + tl.arange(0, ROWS)
    pointers = q_turned + columns[:, None] * M + rows[None, :]
    mask = (columns < K)[:, None] & (rows < M)[None, :]
    tl.store(pointers, codes, mask=mask)
    if NAN_APART:
        _store_nan_codes(pointers, mask, bits, NAN_CODE)
    _store_inverse(inverse_scale, bits)


@dataclass(frozen=True)
class _Tiling:
    """How the kernels that keep x's order go through it: as one line where they can, else in tiles of rows.

    A dense x whose rows are multiples of 16 is a line for any number of rows, so that no kernel is compiled for some of
    them only. Short rows share a tile.
    """

    m: int
    k: int
    row_stride: int
    column_stride: int
    rows: int
    block: int

    @property
    def column_blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def tiles(self) -> int:
        return -(-self.m // self.rows) * self.column_blocks


def _tiling(x: torch.Tensor, elements: int) -> _Tiling:
    m, k = x.shape
    if x.is_contiguous() and k % 16 == 0:
        return _Tiling(1, m * k, k, 1, 1, elements)
    block = min(elements, max(16, 1 << (k - 1).bit_length())) if k else 16
    return _Tiling(m, k, *x.stride(), elements // block, block)


def launch_tensorwise(
    x: torch.Tensor,
    fmt: formats.Format,
    pow2: bool,
    scale: torch.Tensor | None,
    layout: str,
    row: TensorwiseConfig,
    target: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Launch the kernels with a given configuration: row-major codes, column-major codes, inverse scale.

    layout: one of LAYOUTS; codes that it does not ask for are None.
    """
    elements, unit_stride = x.view(cast.INPUTS[x.dtype]), x.stride(1) == 1
    with launch.on_device(x):
        source, count = scale, 0
        if scale is None:
            source, count = _partial_amax(elements, unit_stride, row)
            if not row.fused:
                source = _scale_from(source, count, fmt, pow2)
        inverse_scale = torch.empty((), dtype=torch.float32, device=x.device)
        shared = {
            "source": source,
            "inverse_scale": inverse_scale,
            "count": count,
            "UNIT_STRIDE": unit_stride,
            "HINTS": row.hints,
            "PARTIALS": _PARTIALS if row.fused and scale is None else 0,
            "POW2": pow2,
            **cast.constants(fmt, target),
            # A given scale is finite: NaN codes are those of single elements.
            "NAN_APART": scale is None and cast.nan_apart(fmt, target),
            **launch.options(row.num_warps, row.programs, target),
            **LAUNCH_OPTIONS,
        }
        cast_to = _cast_rows if layout == "row" else _cast_turned
        q, q_turned = cast_to(elements, layout, row, shared)
    return (
        None if q is None else q.view(fmt.dtype),
        None if q_turned is None else q_turned.view(fmt.dtype).t(),
        inverse_scale,
    )


def _partial_amax(x: torch.Tensor, unit_stride: bool, row: TensorwiseConfig) -> tuple[torch.Tensor, int]:
    """The maxima of all tiles, int32, and how many."""
    tiling = _tiling(x, row.amax_elements)
    count = tiling.tiles
    partial = torch.empty((max(count, 1),), dtype=torch.int32, device=x.device)
    if count:
        _partial_amax_kernel[(count,)](
            x,
            partial,
            tiling.m,
            tiling.k,
            tiling.row_stride,
            tiling.column_stride,
            tiling.column_blocks,
            ROWS=tiling.rows,
            BLOCK=tiling.block,
            UNIT_STRIDE=unit_stride,
            num_warps=row.amax_warps,
            **LAUNCH_OPTIONS,
        )
    return partial, count


def _scale_from(partial: torch.Tensor, count: int, fmt: formats.Format, pow2: bool) -> torch.Tensor:
    """The scale, float32 (), from count maxima."""
    scale = torch.empty((), dtype=torch.float32, device=partial.device)
    _scale_kernel[(1,)](partial, scale, count, BLOCK=_PARTIALS, POW2=pow2, MAX=fmt.max, num_warps=8, **LAUNCH_OPTIONS)
    return scale


def _cast_rows(
    x: torch.Tensor, layout: str, row: TensorwiseConfig, shared: dict[str, object]
) -> tuple[torch.Tensor, None]:
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    tiling = _tiling(x, row.rows * row.columns)
    blocks = max(tiling.tiles, 1)  # of an empty tensor the inverse scale is still wanted
    _cast_rows_kernel[(blocks,)](
        x=x,
        q=q,
        M=tiling.m,
        K=tiling.k,
        row_stride=tiling.row_stride,
        column_stride=tiling.column_stride,
        blocks=blocks,
        column_blocks=max(tiling.column_blocks, 1),
        ROWS=tiling.rows,
        BLOCK=tiling.block,
        **shared,
    )
    return q, None


def _cast_turned(
    x: torch.Tensor, layout: str, row: TensorwiseConfig, shared: dict[str, object]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    m, k = x.shape
    q_turned = torch.empty((k, m), dtype=torch.uint8, device=x.device)
    q = torch.empty((m, k), dtype=torch.uint8, device=x.device) if layout == "both" else None
    column_blocks = max(-(-k // row.columns), 1)
    blocks = max(-(-m // row.rows) * column_blocks, 1)
    _cast_turned_kernel[(blocks,)](
        x=x,
        q=q_turned if q is None else q,
        q_turned=q_turned,
        M=m,
        K=k,
        row_stride=x.stride(0),
        column_stride=x.stride(1),
        blocks=blocks,
        column_blocks=column_blocks,
        ROWS=row.rows,
        COLUMNS=row.columns,
        PARTS=row.parts,
        BOTH=q is not None,
        ALIGNED=m % 16 == 0,
        **shared,
    )
    return q, q_turned


def _run(op, x, fmt, pow2, scale, layout):
    """Launch or reference, on record: row-major codes, column-major codes (None: not asked for), inverse scale."""
    which = launch.implementation(x, chain=True)
    launch.record(op, which)
    if which == "unfused":
        return unfused.tensorwise(x, fmt, pow2, scale, layout)
    if which == "reference":
        return quantize_tensorwise_both_reference(x, fmt, pow2, scale)
    target = device.detect(x.device).target.name
    column_major = x.stride(0) == 1 and x.stride(1) != 1
    if column_major:
        x, layout = x.t(), {"row": "column", "column": "row", "both": "both"}[layout]
    row = launch.config(TENSORWISE_CONFIGS, target, layout)
    q, q_turned, inverse_scale = launch_tensorwise(x, formats.get(fmt), pow2, scale, layout, row, target)
    if column_major:
        q, q_turned = (None if codes is None else codes.t() for codes in (q_turned, q))
    return q, q_turned, inverse_scale


@torch.library.custom_op(
    "fp8stack::quantize_tensorwise",
    mutates_args=(),
    schema="(Tensor x, str fmt, bool pow2, Tensor? scale, bool column_major) -> (Tensor, Tensor)",
)
def _quantize_tensorwise(x, fmt, pow2, scale, column_major):
    layout = "column" if column_major else "row"
    q, q_column_major, inverse_scale = _run("quantize_tensorwise", x, fmt, pow2, scale, layout)
    return (q_column_major if column_major else q), inverse_scale


@_quantize_tensorwise.register_fake
def _(x, fmt, pow2, scale, column_major):
    m, k = x.shape
    dtype = formats.get(fmt).dtype
    q = torch.empty((k, m) if column_major else (m, k), dtype=dtype, device=x.device)
    return (q.t() if column_major else q), torch.empty((), dtype=torch.float32, device=x.device)


@torch.library.custom_op(
    "fp8stack::quantize_tensorwise_both",
    mutates_args=(),
    schema="(Tensor x, str fmt, bool pow2, Tensor? scale) -> (Tensor, Tensor, Tensor)",
)
def _quantize_tensorwise_both(x, fmt, pow2, scale):
    return _run("quantize_tensorwise_both", x, fmt, pow2, scale, "both")


@_quantize_tensorwise_both.register_fake
def _(x, fmt, pow2, scale):
    m, k = x.shape
    dtype = formats.get(fmt).dtype
    return (
        torch.empty((m, k), dtype=dtype, device=x.device),
        torch.empty((k, m), dtype=dtype, device=x.device).t(),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


def _require(x: torch.Tensor, scale: torch.Tensor | None, op: str) -> None:
    cast.require_input(x, op)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device):
        raise ValueError(
            f"scale is {scale.dtype} of shape {tuple(scale.shape)} on {scale.device}; expected one float32 number on "
            f"{x.device}: the multiplier into FP8, not its inverse; leave it out to have it computed"
        )


def quantize_tensorwise(
    x: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    pow2: bool = False,
    scale: torch.Tensor | None = None,
    column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x with one scale.

    x: (M, K), bfloat16 or float32, any strides. pow2: round the scale down to a power of two. scale: float32 () or (1,)
    on x's device, to be used as it is (pow2 or not) instead of the one from max|x|.
    Returns codes (M, K) of fmt.dtype, row-major or column-major, and the inverse scale, float32 (): 1 for a tensor of
    zeros.
    Raises UnsupportedDtype for other dtypes of x, ValueError for other ranks or another kind of scale.
    """
    _require(x, scale, "quantize_tensorwise")
    return _quantize_tensorwise(x, formats.get(fmt).name, pow2, scale, column_major)


def quantize_tensorwise_both(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = False, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_tensorwise with codes in both layouts, for the two GEMMs that contract x along either dimension.

    Returns codes (M, K) row-major, the same codes (M, K) column-major, and the inverse scale.
    """
    _require(x, scale, "quantize_tensorwise_both")
    return _quantize_tensorwise_both(x, formats.get(fmt).name, pow2, scale)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernels on an arch, for the codegen suite.

    The arch's own e4m3 in every layout, float32 input, its e5m2, and one format that the arch lacks. The one-block
    reduction moves a few kilobytes and is left out.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        *((row.e4m3, torch.bfloat16, layout) for layout in LAYOUTS),
        (row.e4m3, torch.float32, "row"),
        (row.e5m2, torch.bfloat16, "row"),
        (foreign, torch.bfloat16, "column"),
    ]
    specs = [_cast_spec(formats.get(fmt), dtype, layout, row.name) for fmt, dtype, layout in cases]
    return [*(_amax_spec(row.e4m3, dtype, row.name) for dtype in (torch.bfloat16, torch.float32)), *specs]


def _amax_spec(fmt: str, dtype: torch.dtype, target: str) -> CompileSpec:
    row = launch.config(TENSORWISE_CONFIGS, target, "row")
    return CompileSpec(
        kernel=_partial_amax_kernel,
        case=f"tensorwise-amax-{fmt}-{_INPUT_NAMES[dtype]}",
        fmt=fmt,
        signature={
            "x": _POINTERS[dtype],
            "partial": "*i32",
            **dict.fromkeys(("M", "K", "row_stride", "column_blocks"), "i32"),
        },
        constexprs={"column_stride": 1, "ROWS": 1, "BLOCK": row.amax_elements, "UNIT_STRIDE": True},
        num_warps=row.amax_warps,
        divisible=("x", "partial", "K", "row_stride"),
        within_2gb=("x", "partial"),
        encodes=False,
    )


def _cast_spec(fmt: formats.Format, dtype: torch.dtype, layout: str, target: str) -> CompileSpec:
    row = launch.config(TENSORWISE_CONFIGS, target, layout)
    constants = cast.constants(fmt, target)
    options = launch.options(row.num_warps, row.programs, target)
    tile_sizes = (
        {"ROWS": 1, "BLOCK": row.rows * row.columns}
        if layout == "row"
        else {
            "ROWS": row.rows,
            "COLUMNS": row.columns,
            "PARTS": row.parts,
            "BOTH": layout == "both",
            "ALIGNED": True,
        }
    )
    codes = ("q",) if layout == "row" else ("q", "q_turned")
    return CompileSpec(
        kernel=_cast_rows_kernel if layout == "row" else _cast_turned_kernel,
        case=f"tensorwise-{layout}-{fmt.name}-{_INPUT_NAMES[dtype]}",
        fmt=fmt.name,
        signature={
            "x": _POINTERS[dtype],
            **dict.fromkeys(codes, "*u8"),
            "source": "*i32" if row.fused else "*fp32",
            "inverse_scale": "*fp32",
            **dict.fromkeys(("count", "M", "K", "row_stride", "blocks", "column_blocks"), "i32"),
        },
        constexprs={
            "column_stride": 1,
            "UNIT_STRIDE": True,
            "HINTS": row.hints,
            "PARTIALS": _PARTIALS if row.fused else 0,
            "POW2": False,
            **tile_sizes,
            **constants,
            "NAN_APART": cast.nan_apart(fmt, target),
        },
        num_warps=options.pop("num_warps"),
        divisible=("x", *codes, "source", "inverse_scale", "K", "row_stride"),
        within_2gb=("x", *codes, "source", "inverse_scale"),
        native=constants["NATIVE"] is not None,
        options=options,
    )
