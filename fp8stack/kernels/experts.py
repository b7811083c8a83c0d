"""FP8 quantisation of expert weights: one scale for each row, or each column, of each expert's matrix, or both.

    quantize_experts             scale[e, n] = pow2_floor(FP8_MAX / max|w[e, n, :]|)    for the forward GEMM
    quantize_experts_transposed  scale[e, k] = pow2_floor(FP8_MAX / max|w[e, :, k]|)    for the input gradient
    quantize_experts_both        the two above from one read less

The exact rules are scaling.py's.

Traffic (bf16 in): each of the first two reads 2*E*N*K and writes E*N*K + 4*E*N (E*K) bytes; both together read 4*E*N*K
and write 2*E*N*K, the inverse scales, and 4*E*N*K / span of partial maxima (column_maxima.py).
Layout: w (E, N, K), read in place by quantize_experts where experts and rows follow each other as in a contiguous
tensor, by quantize_experts_both where rows have unit stride, else copied first; by quantize_experts_transposed always.
Codes (E, N, K) contiguous; transposed codes (E, K, N) contiguous, so that each expert's view as (N, K) is column-major;
inverse scales float32 (E, N) and (E, K).

quantize_experts is quantize_rowwise over E * N rows, the same kernel.

quantize_experts_transposed: a program takes one expert and a block of columns, over all N rows, so no other program
works on its scales: no atomics, no second launch. The rows are taken in chunks. The last `held` chunks stay in
registers as loaded; the chunks before them are read twice, the second time backwards, so that what was read last, and
is most likely still cached, is read first. How codes leave transposed is tile.py's matter.

quantize_experts_both: three launches. The rows, which leave behind the maxima of their columns over `span` rows at a
time (column_maxima.py, which also says what else was tried); the scales of all columns, from these; and the turned cast
with known scales, in tiles, the last one first: what the rows read last is still in the cache.

Not here: activations, whose groups are ranges of rows (colwise.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, column_maxima, launch, rowwise, tile, unfused
from fp8stack.kernels.column_maxima import BothConfig


@dataclass(frozen=True)
class TransposedConfig:
    """How to launch quantize_experts_transposed for one size class.

    columns: of a program. rows: a chunk. parts: neighbouring rows of a thread (tile.py). held: chunks that stay in
    registers. programs: see launch.options. hints: tell the cache what is read again. measured: what says so.
    """

    columns: int
    rows: int
    parts: int
    held: int
    num_warps: int
    programs: int
    hints: bool
    measured: str


_LENGTHS = (512, 1024, 2048, 4096, 8192)


def size_class(n: int) -> str:
    """The size class of a reduction over n rows, such as "n<=2048"; "n>8192" holds the rest."""
    return next((f"n<={limit}" for limit in _LENGTHS if n <= limit), f"n>{_LENGTHS[-1]}")


_CLASSES = tuple(size_class(n) for n in (*_LENGTHS, _LENGTHS[-1] + 1))


def _rows_of(targets: tuple[str, ...], *configs):
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"
_NVIDIA = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70")
_CDNA = ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908")
_RDNA = ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153)))

# (target, size class) -> configuration. rows * columns of a chunk: parts times 16 bytes a thread.
TRANSPOSED_CONFIGS: dict[tuple[str, str], TransposedConfig] = {
    **_rows_of(
        _NVIDIA,
        TransposedConfig(32, 512, 8, 1, 8, 2, False, _UNMEASURED),
        TransposedConfig(32, 512, 8, 2, 8, 2, False, _UNMEASURED),
        TransposedConfig(32, 512, 8, 1, 8, 2, True, _UNMEASURED),
        TransposedConfig(32, 512, 8, 1, 8, 2, True, _UNMEASURED),
        TransposedConfig(128, 256, 8, 0, 16, 0, False, _UNMEASURED),
        TransposedConfig(128, 256, 8, 0, 16, 0, False, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        _CDNA,
        TransposedConfig(64, 256, 8, 2, 4, 0, False, _UNMEASURED),
        TransposedConfig(32, 512, 8, 2, 4, 0, False, _UNMEASURED),
        *(TransposedConfig(64, 256, 8, 1, 4, 0, False, _UNMEASURED) for _ in _CLASSES[2:]),
    ),
    # Waves of 32.
    **_rows_of(
        _RDNA,
        *(TransposedConfig(32, 512, 16, 1, 4, 0, False, _UNMEASURED) for _ in _CLASSES),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk, held and not held.
    **_rows_of(
        ("cpu",),
        *(TransposedConfig(64, max(limit // 4, 128), 2, 2, 1, 0, False, _INTERPRETER) for limit in _LENGTHS),
        TransposedConfig(64, 4096, 2, 1, 1, 0, False, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "n<=2048"): TransposedConfig(
        64, 256, 8, 1, 4, 0, False, "not timed: gfx942/sweep-experts_transposed.json"
    ),
    ("gfx942", "n<=8192"): TransposedConfig(
        64, 256, 8, 1, 4, 0, False, "not timed: gfx942/sweep-experts_transposed.json"
    ),
    ("gfx950", "n<=2048"): TransposedConfig(
        64, 256, 8, 1, 4, 0, False, "not timed: gfx950/sweep-experts_transposed.json"
    ),
    ("gfx950", "n<=8192"): TransposedConfig(
        64, 256, 8, 1, 4, 0, False, "not timed: gfx950/sweep-experts_transposed.json"
    ),
    ("sm_90", "n<=2048"): TransposedConfig(
        64, 512, 16, 0, 8, 0, True, "0.71 of a copy: h200/sweep-experts_transposed.json"
    ),
    ("sm_90", "n<=8192"): TransposedConfig(
        64, 256, 8, 1, 8, 2, False, "0.61 to 0.62 of a copy: h200/sweep-experts_transposed.json"
    ),
    # End of the swept rows.
}


def _both_rows_of(targets: tuple[str, ...], *configs: BothConfig) -> dict[tuple[str, str], BothConfig]:
    classes = column_maxima.WIDTH_CLASSES
    return {(target, name): row for target in targets for name, row in zip(classes, configs, strict=True)}


# (target, column_maxima.width_class) -> configuration. A chunk of a row: 16 elements a thread, or a multiple.
BOTH_CONFIGS: dict[tuple[str, str], BothConfig] = {
    **_both_rows_of(
        _NVIDIA,
        BothConfig(64, 2, 2048, 4, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
    ),
    # Waves of 64.
    **_both_rows_of(
        _CDNA,
        BothConfig(64, 2, 2048, 2, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, _UNMEASURED),
        BothConfig(8, 8, 1024, 4, False, False, 256, 64, 16, 2, 0, _UNMEASURED),
    ),
    # Waves of 32.
    **_both_rows_of(
        _RDNA,
        BothConfig(64, 2, 2048, 4, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 8, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(64, 1, 4096, 8, True, False, 256, 64, 16, 4, 0, _UNMEASURED),
        BothConfig(16, 16, 1024, 8, False, False, 256, 64, 16, 4, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs; but more than one chunk, turn and span.
    **_both_rows_of(
        ("cpu",),
        BothConfig(256, 128, 64, 1, True, True, 256, 64, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 2, 4096, 1, False, False, 128, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(8, 2, 8192, 1, True, False, 128, 1024, 2, 1, 0, _INTERPRETER),
        BothConfig(4, 4, 8192, 1, False, False, 128, 1024, 2, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "k<=2048"): BothConfig(
        64, 2, 2048, 2, True, False, 256, 64, 16, 2, 0, "not timed: gfx942/sweep-experts_both.json"
    ),
    ("gfx942", "k<=8192"): BothConfig(
        64, 1, 4096, 4, False, False, 1024, 32, 8, 4, 0, "not timed: gfx942/sweep-experts_both.json"
    ),
    ("gfx950", "k<=2048"): BothConfig(
        64, 2, 2048, 2, True, False, 256, 64, 16, 2, 0, "not timed: gfx950/sweep-experts_both.json"
    ),
    ("gfx950", "k<=8192"): BothConfig(
        64, 1, 4096, 4, True, False, 256, 64, 16, 2, 0, "not timed: gfx950/sweep-experts_both.json"
    ),
    ("sm_90", "k<=2048"): BothConfig(
        32, 4, 2048, 4, True, False, 256, 64, 16, 4, 0, "0.63 to 0.64 of a copy: h200/sweep-experts_both.json"
    ),
    ("sm_90", "k<=8192"): BothConfig(
        64, 2, 4096, 8, False, False, 256, 64, 16, 4, 0, "0.64 of a copy: h200/sweep-experts_both.json"
    ),
    # End of the swept rows.
}


def quantize_experts_reference(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_experts."""
    codes, inverse_scale = scaling.quantize_reference(w, fmt, dim=2, pow2=pow2)
    return _dense(codes), inverse_scale.clone(memory_format=torch.contiguous_format)


def quantize_experts_transposed_reference(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_experts_transposed."""
    codes, inverse_scale = scaling.quantize_reference(w, fmt, dim=1, pow2=pow2)
    return _dense(codes.transpose(1, 2)), inverse_scale.clone(memory_format=torch.contiguous_format)


def quantize_experts_both_reference(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_experts_both."""
    return *quantize_experts_reference(w, fmt, pow2), *quantize_experts_transposed_reference(w, fmt, pow2)


def _dense(codes: torch.Tensor) -> torch.Tensor:
    """Codes with the strides of a new tensor, also where a size is 0 or 1 and .contiguous() keeps what there is."""
    return codes.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(codes.dtype)


@jit
def _store_turned(
    q_columns,
    parts,
    factor,
    first_row,
    in_columns,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    NAN_APART: tl.constexpr,
):
    """Scale, turn, encode and store one chunk, given as loaded. q_columns: pointers (COLUMNS, 1) to code columns."""
    y = tile.turned(tile.scaled(parts, factor, PARTS), ROWS, COLUMNS, PARTS)
    codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART)
    at = first_row + tl.arange(0, ROWS)
    tl.store(q_columns + at[None, :], codes, mask=in_columns[:, None] & (at < N)[None, :])


@jit
def _store_nan_codes(
    q_columns,
    scale,
    in_columns,
    N,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """Over what was stored, NaN codes in the columns whose scale (bits) is NaN, if there is one."""
    if tl.max(scale, axis=0) > 0x7F800000:
        mask = (in_columns & (scale > 0x7F800000))[:, None]
        for chunk in range(CHUNKS):
            at = chunk * ROWS + tl.arange(0, ROWS)
            tile.store_nan_codes(q_columns + at[None, :], mask & (at < N)[None, :], NAN_CODE)


@jit
def _quantize_columns(
    expert,
    block,
    w,
    q,
    inverse_scale,
    N,
    K,
    expert_stride,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
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
    NAN_APART: tl.constexpr,
):
    """The work of one program: a block of COLUMNS columns of an expert (int64), over all its rows."""
    AGAIN: tl.constexpr = CHUNKS - HELD  # chunks that are read twice
    KEEP: tl.constexpr = "evict_last" if HINTS else ""
    DROP: tl.constexpr = "evict_first" if HINTS else ""
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < K
    w_expert = w + expert * expert_stride
    q_columns = q + (expert * K + columns)[:, None] * N
    largest = tl.zeros((ROWS // PARTS, COLUMNS), tl.int32)

    for chunk in range(AGAIN):
        parts = tile.load_parts(
            w_expert, chunk * ROWS, columns, N, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, KEEP
        )
        largest = tl.maximum(largest, tile.largest_of(parts, PARTS))
    held = ()
    for chunk in tl.static_range(AGAIN, CHUNKS):
        held = held + tile.load_parts(
            w_expert, chunk * ROWS, columns, N, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, DROP
        )
    if HELD:
        largest = tl.maximum(largest, tile.largest_of(held, HELD * PARTS))
    scale = cast.scale_bits(tl.max(largest, axis=0), MAX, POW2)
    factor = scale.to(tl.float32, bitcast=True)[None, :]

    for chunk in tl.static_range(HELD):
        parts = ()
        for part in tl.static_range(PARTS):
            parts = parts + (held[chunk * PARTS + part],)  # noqa: RUF005 - Triton compiles no starred expression
        _store_turned(
            q_columns,
            parts,
            factor,
            (AGAIN + chunk) * ROWS,
            in_columns,
            N,
            ROWS,
            COLUMNS,
            PARTS,
            MAX,
            BIAS,
            MANTISSA_BITS,
            NAN_CODE,
            NEGATIVE_ZERO,
            NATIVE,
            NATIVE_NAN,
            NAN_APART,
        )
    for back in range(AGAIN):
        first_row = (AGAIN - 1 - back) * ROWS
        parts = tile.load_parts(
            w_expert, first_row, columns, N, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, DROP
        )
        _store_turned(
            q_columns,
            parts,
            factor,
            first_row,
            in_columns,
            N,
            ROWS,
            COLUMNS,
            PARTS,
            MAX,
            BIAS,
            MANTISSA_BITS,
            NAN_CODE,
            NEGATIVE_ZERO,
            NATIVE,
            NATIVE_NAN,
            NAN_APART,
        )
    inverse = cast.inverse_bits(scale).to(tl.float32, bitcast=True)
    tl.store(inverse_scale + expert * K + columns, inverse, mask=in_columns)

    if NAN_APART:
        _store_nan_codes(q_columns, scale, in_columns, N, ROWS, CHUNKS, NAN_CODE)


@jit
def _quantize_experts_transposed_kernel(
    w,
    q,
    inverse_scale,
    N,
    K,
    expert_stride,
    row_stride,
    column_stride,
    blocks,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
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
    NAN_APART: tl.constexpr,
):
    # Blocks of one expert are neighbours: they run together and share the lines of memory at their borders.
    _quantize_columns(
        (tl.program_id(0) // blocks).to(tl.int64),
        tl.program_id(0) % blocks,
        w,
        q,
        inverse_scale,
        N,
        K,
        expert_stride,
        row_stride,
        column_stride,
        COLUMNS,
        ROWS,
        PARTS,
        CHUNKS,
        HELD,
        HINTS,
        UNIT_STRIDE,
        POW2,
        MAX,
        BIAS,
        MANTISSA_BITS,
        NAN_CODE,
        NEGATIVE_ZERO,
        NATIVE,
        NATIVE_NAN,
        NAN_APART,
    )


@jit
def _quantize_experts_rows_kernel(
    w,
    q,
    inverse_scale,
    partial,
    N,
    K,
    expert_stride,
    row_stride,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    HINTS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    """SPAN rows of an expert, and partial[program, :]: the maxima of their columns."""
    program = tl.program_id(0).to(tl.int64)
    spans = tl.cdiv(N, SPAN)
    expert = program // spans
    first_row = (program % spans).to(tl.int32) * SPAN
    column_maxima.quantize_rows(
        w + expert * expert_stride, q + expert * N * K, inverse_scale + expert * N, partial + program * K,
        first_row.to(tl.int64), tl.minimum(N - first_row, SPAN), K, row_stride, 1, ROWS, BLOCK, CHUNKS, HELD, AHEAD,
        HINTS, True, POW2, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN,
    )  # fmt: skip


@jit
def _column_scales_kernel(
    partial,
    scale,
    inverse_scale,
    N,
    K,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    MAX: tl.constexpr,
):
    """Scales of a block of columns of an expert."""
    block, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.cdiv(N, SPAN)
    column_maxima.store_scales(
        partial + expert * spans * K, spans, scale + expert * K, inverse_scale + expert * K, block, K, ROWS, COLUMNS,
        POW2, MAX,
    )  # fmt: skip


# The number of tiles follows the number of experts, which must not compile anew either.
@jit(do_not_specialize=["tiles"])
def _cast_columns_kernel(
    w,
    q,
    scale,
    N,
    K,
    expert_stride,
    row_stride,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    NAN_APART: tl.constexpr,
):
    """Transposed codes of a tile of an expert with known scales, the last tile first."""
    at = tiles - 1 - tl.program_id(0)
    blocks = tl.cdiv(K, COLUMNS)
    bands = tl.cdiv(N, ROWS)
    columns = at % blocks * COLUMNS + tl.arange(0, COLUMNS)
    band = at // blocks
    expert = (band // bands).to(tl.int64)
    first_row = band % bands * ROWS
    in_columns = columns < K
    parts = tile.load_parts(w + expert * expert_stride, first_row, columns, N, K, row_stride, 1, ROWS, PARTS, True, "")
    factor = tl.load(scale + expert * K + columns, mask=in_columns, other=1.0)
    q_columns = q + (expert * K + columns)[:, None] * N
    _store_turned(
        q_columns, parts, factor[None, :], first_row, in_columns, N, ROWS, COLUMNS, PARTS,
        MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, NAN_APART,
    )  # fmt: skip
    if NAN_APART:
        bits = factor.to(tl.int32, bitcast=True)
        _store_nan_codes(q_columns + first_row, bits, in_columns, N - first_row, ROWS, 1, NAN_CODE)


def launch_transposed(
    w: torch.Tensor, fmt: formats.Format, pow2: bool, row: TransposedConfig, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the transposed kernel with a given configuration."""
    e, n, k = w.shape
    q = torch.empty((e, k, n), dtype=torch.uint8, device=w.device)
    inverse_scale = torch.empty((e, k), dtype=torch.float32, device=w.device)
    if n == 0:
        inverse_scale.fill_(1.0)  # the amax of nothing is 0
    elif e and k:
        blocks = -(-k // row.columns)
        with launch.on_device(w):
            _quantize_experts_transposed_kernel[(e * blocks,)](
                w.view(cast.INPUTS[w.dtype]),
                q,
                inverse_scale,
                n,
                k,
                *w.stride(),
                blocks,
                UNIT_STRIDE=w.stride(2) == 1,
                **_column_constexprs(row, n),
                POW2=pow2,
                **cast.constants(fmt, target),
                NAN_APART=cast.nan_apart(fmt, target),
                **_options(row, fmt, target),
                **LAUNCH_OPTIONS,
            )
    return q.view(fmt.dtype), inverse_scale


def launch_both(
    w: torch.Tensor, fmt: formats.Format, pow2: bool, row: BothConfig, target: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernels for both outputs with a given configuration."""
    if w.stride(2) != 1:
        w = w.contiguous()
    e, n, k = w.shape
    q = torch.empty((e, n, k), dtype=torch.uint8, device=w.device)
    inverse_scale = torch.empty((e, n), dtype=torch.float32, device=w.device)
    q_transposed = torch.empty((e, k, n), dtype=torch.uint8, device=w.device)
    inverse_scale_transposed = torch.empty((e, k), dtype=torch.float32, device=w.device)
    if n == 0 or k == 0:
        inverse_scale.fill_(1.0)
        inverse_scale_transposed.fill_(1.0)
    elif e:
        elements = w.view(cast.INPUTS[w.dtype])
        spans = -(-n // row.span_of(k, w.dtype))
        partial = torch.empty((e * spans, k), dtype=elements.dtype, device=w.device)
        scale = torch.empty((e, k), dtype=torch.float32, device=w.device)
        row_constexprs, turned_constexprs = _both_constexprs(k, w.dtype, fmt, pow2, row, target)
        with launch.on_device(w):
            _quantize_experts_rows_kernel[(e * spans,)](
                elements,
                q,
                inverse_scale,
                partial,
                n,
                k,
                w.stride(0),
                w.stride(1),
                **row_constexprs,
                num_warps=row.row_warps,
                **LAUNCH_OPTIONS,
            )
            _column_scales_kernel[(-(-k // column_maxima.SCALE_COLUMNS), e)](
                partial,
                scale,
                inverse_scale_transposed,
                n,
                k,
                SPAN=row.span_of(k, w.dtype),
                ROWS=column_maxima.SCALE_ROWS,
                COLUMNS=column_maxima.SCALE_COLUMNS,
                POW2=pow2,
                MAX=fmt.max,
                num_warps=column_maxima.SCALE_WARPS,
                **LAUNCH_OPTIONS,
            )
            tiles = e * -(-n // row.tile_rows(w.dtype)) * -(-k // row.columns)
            _cast_columns_kernel[(tiles,)](
                elements,
                q_transposed,
                scale,
                n,
                k,
                w.stride(0),
                w.stride(1),
                tiles,
                **turned_constexprs,
                **row.turned_options(fmt, target),
                **LAUNCH_OPTIONS,
            )
    return q.view(fmt.dtype), inverse_scale, q_transposed.view(fmt.dtype), inverse_scale_transposed


def _both_constexprs(
    k: int, dtype: torch.dtype, fmt: formats.Format, pow2: bool, row: BothConfig, target: str
) -> tuple[dict[str, object], dict[str, object]]:
    """What the kernel for rows and the turned cast are compiled for."""
    constants = cast.constants(fmt, target)
    turned = {
        "ROWS": row.tile_rows(dtype),
        "COLUMNS": row.columns,
        "PARTS": row.parts,
        **constants,
        "NAN_APART": cast.nan_apart(fmt, target),
    }
    return {**row.row_constexprs(k, dtype), "POW2": pow2, **constants}, turned


def _column_constexprs(row: TransposedConfig, n: int) -> dict[str, object]:
    chunks = -(-n // row.rows)
    return {
        "COLUMNS": row.columns,
        "ROWS": row.rows,
        "PARTS": row.parts,
        "CHUNKS": chunks,
        "HELD": min(row.held, chunks),
        "HINTS": row.hints,
    }


def _options(row: TransposedConfig, fmt: formats.Format, target: str) -> dict[str, int]:
    """Launch options. The integer encoder, for a format that the target lacks, needs registers more than company."""
    native = cast.constants(fmt, target)["NATIVE"] is not None
    return launch.options(row.num_warps, row.programs if native else 0, target)


def _begin(op: str, w: torch.Tensor) -> str | None:
    """Record what runs; the target of a launch, None for the reference, "unfused" for the chain."""
    which = launch.implementation(w, chain=True)
    launch.record(op, which)
    if which == "unfused":
        return which
    return None if which == "reference" else device.detect(w.device).target.name


@torch.library.custom_op(
    "fp8stack::quantize_experts", mutates_args=(), schema="(Tensor w, str fmt, bool pow2) -> (Tensor, Tensor)"
)
def _quantize_experts(w, fmt, pow2):
    target = _begin("quantize_experts", w)
    if target == "unfused":
        return unfused.experts(w, fmt, pow2)
    if target is None:
        return quantize_experts_reference(w, fmt, pow2)
    e, n, k = w.shape
    row = launch.config(rowwise.ROWWISE_CONFIGS, target, rowwise.size_class(k))
    codes, inverse_scale = rowwise.launch_rowwise(w.reshape(e * n, k), formats.get(fmt), pow2, row, target)
    return codes.view(e, n, k), inverse_scale.view(e, n)


@_quantize_experts.register_fake
def _(w, fmt, pow2):
    e, n, k = w.shape
    q = torch.empty((e, n, k), dtype=formats.get(fmt).dtype, device=w.device)
    return q, torch.empty((e, n), dtype=torch.float32, device=w.device)


@torch.library.custom_op(
    "fp8stack::quantize_experts_transposed",
    mutates_args=(),
    schema="(Tensor w, str fmt, bool pow2) -> (Tensor, Tensor)",
)
def _quantize_experts_transposed(w, fmt, pow2):
    target = _begin("quantize_experts_transposed", w)
    if target == "unfused":
        return unfused.experts_transposed(w, fmt, pow2)
    if target is None:
        return quantize_experts_transposed_reference(w, fmt, pow2)
    row = launch.config(TRANSPOSED_CONFIGS, target, size_class(w.shape[1]))
    return launch_transposed(w, formats.get(fmt), pow2, row, target)


@_quantize_experts_transposed.register_fake
def _(w, fmt, pow2):
    e, n, k = w.shape
    q = torch.empty((e, k, n), dtype=formats.get(fmt).dtype, device=w.device)
    return q, torch.empty((e, k), dtype=torch.float32, device=w.device)


@torch.library.custom_op(
    "fp8stack::quantize_experts_both",
    mutates_args=(),
    schema="(Tensor w, str fmt, bool pow2) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _quantize_experts_both(w, fmt, pow2):
    target = _begin("quantize_experts_both", w)
    if target == "unfused":
        return *unfused.experts(w, fmt, pow2), *unfused.experts_transposed(w, fmt, pow2)
    if target is None:
        return quantize_experts_both_reference(w, fmt, pow2)
    row = launch.config(BOTH_CONFIGS, target, column_maxima.width_class(w.shape[2], w.dtype))
    return launch_both(w, formats.get(fmt), pow2, row, target)


@_quantize_experts_both.register_fake
def _(w, fmt, pow2):
    e, n, k = w.shape
    dtype = formats.get(fmt).dtype
    return (
        torch.empty((e, n, k), dtype=dtype, device=w.device),
        torch.empty((e, n), dtype=torch.float32, device=w.device),
        torch.empty((e, k, n), dtype=dtype, device=w.device),
        torch.empty((e, k), dtype=torch.float32, device=w.device),
    )


def _require_experts(w: torch.Tensor, op: str) -> None:
    cast.require_input(w, op)
    if w.dim() != 3:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; expected three dimensions (E, N, K); for one expert pass w.unsqueeze(0)"
        )


def quantize_experts(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of each expert with its own scale: the maximum is over K.

    w: (E, N, K), bfloat16 or float32, any strides. pow2: round scales down to powers of two.
    Returns codes (E, N, K) of fmt.dtype, contiguous, and the inverse scale (E, N), float32: 1 for a row of zeros.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks.
    """
    _require_experts(w, "quantize_experts")
    return _quantize_experts(w, formats.get(fmt).name, pow2)


def quantize_experts_transposed(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each column of each expert with its own scale, and transpose: the maximum is over N.

    w: (E, N, K), bfloat16 or float32, any strides. pow2: round scales down to powers of two.
    Returns codes (E, K, N) of fmt.dtype, contiguous, and the inverse scale (E, K), float32: 1 for a column of zeros.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks.
    """
    _require_experts(w, "quantize_experts_transposed")
    return _quantize_experts_transposed(w, formats.get(fmt).name, pow2)


def quantize_experts_both(
    w: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What quantize_experts and quantize_experts_transposed return, in this order, with one read of w less.

    w: (E, N, K), bfloat16 or float32, any strides. pow2: round scales down to powers of two.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks.
    """
    _require_experts(w, "quantize_experts_both")
    return _quantize_experts_both(w, formats.get(fmt).name, pow2)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the transposing kernels on an arch, for the codegen suite.

    The arch's own e4m3 at expert sizes of DeepSeek (two size classes), float32 input, and one format that the arch
    lacks, which goes through the integer encoder; of the kernels for both outputs also rows that registers do not hold.
    quantize_experts runs rowwise.py's kernel, which is compiled there.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        (row.e4m3, torch.bfloat16, 2048, 7168),
        (row.e4m3, torch.bfloat16, 7168, 2048),
        (row.e4m3, torch.float32, 2048, 7168),
        (foreign, torch.bfloat16, 2048, 7168),
    ]
    wide = (row.e4m3, torch.bfloat16, 5120, 28672)
    return [
        *(_transposed_spec(formats.get(fmt), dtype, n, k, row.name) for fmt, dtype, n, k in cases),
        *(_both_rows_spec(formats.get(fmt), dtype, k, row.name) for fmt, dtype, _, k in (*cases, wide)),
        *(_both_columns_spec(formats.get(fmt), dtype, k, row.name) for fmt, dtype, _, k in cases),
        _both_scales_spec(row.e4m3, 7168, row.name),
    ]


def _transposed_spec(fmt: formats.Format, dtype: torch.dtype, n: int, k: int, target: str) -> CompileSpec:
    row = launch.config(TRANSPOSED_CONFIGS, target, size_class(n))
    constants = cast.constants(fmt, target)
    options = _options(row, fmt, target)
    return CompileSpec(
        kernel=_quantize_experts_transposed_kernel,
        case=f"experts-transposed-{fmt.name}-{_INPUT_NAMES[dtype]}-n{n}-k{k}",
        fmt=fmt.name,
        signature={
            "w": _POINTERS[dtype],
            "q": "*u8",
            "inverse_scale": "*fp32",
            **dict.fromkeys(("N", "K", "expert_stride", "row_stride", "blocks"), "i32"),
        },
        constexprs={
            "column_stride": 1,
            "UNIT_STRIDE": True,
            "POW2": True,
            **_column_constexprs(row, n),
            **constants,
            "NAN_APART": cast.nan_apart(fmt, target),
        },
        num_warps=options.pop("num_warps"),
        divisible=("w", "q", "inverse_scale", "N", "K", "expert_stride", "row_stride", "blocks"),
        within_2gb=("w", "q", "inverse_scale"),
        native=constants["NATIVE"] is not None,
        options=options,
    )


def _both_rows_spec(fmt: formats.Format, dtype: torch.dtype, k: int, target: str) -> CompileSpec:
    row = launch.config(BOTH_CONFIGS, target, column_maxima.width_class(k, dtype))
    constexprs, _ = _both_constexprs(k, dtype, fmt, True, row, target)
    pointers = {"w": _POINTERS[dtype], "q": "*u8", "inverse_scale": "*fp32", "partial": _POINTERS[dtype]}
    sizes = ("N", "K", "expert_stride", "row_stride")
    return CompileSpec(
        kernel=_quantize_experts_rows_kernel,
        case=f"experts-both-rows-{fmt.name}-{_INPUT_NAMES[dtype]}-k{k}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(sizes, "i32")},
        constexprs=constexprs,
        num_warps=row.row_warps,
        divisible=(*pointers, *sizes),
        within_2gb=tuple(pointers),
        native=constexprs["NATIVE"] is not None,
    )


def _both_columns_spec(fmt: formats.Format, dtype: torch.dtype, k: int, target: str) -> CompileSpec:
    row = launch.config(BOTH_CONFIGS, target, column_maxima.width_class(k, dtype))
    _, constexprs = _both_constexprs(k, dtype, fmt, True, row, target)
    options = row.turned_options(fmt, target)
    pointers = {"w": _POINTERS[dtype], "q": "*u8", "scale": "*fp32"}
    sizes = ("N", "K", "expert_stride", "row_stride")
    return CompileSpec(
        kernel=_cast_columns_kernel,
        case=f"experts-both-columns-{fmt.name}-{_INPUT_NAMES[dtype]}-k{k}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys((*sizes, "tiles"), "i32")},
        constexprs=constexprs,
        num_warps=options.pop("num_warps"),
        divisible=(*pointers, *sizes),
        within_2gb=tuple(pointers),
        native=constexprs["NATIVE"] is not None,
        options=options,
    )


def _both_scales_spec(fmt: str, k: int, target: str) -> CompileSpec:
    row = launch.config(BOTH_CONFIGS, target, column_maxima.width_class(k, torch.bfloat16))
    pointers = {"partial": "*i16", "scale": "*fp32", "inverse_scale": "*fp32"}
    return CompileSpec(
        kernel=_column_scales_kernel,
        case=f"experts-both-scales-{fmt}-bf16-k{k}",
        fmt=fmt,
        signature={**pointers, "N": "i32", "K": "i32"},
        constexprs={
            "SPAN": row.span_of(k, torch.bfloat16),
            "ROWS": column_maxima.SCALE_ROWS,
            "COLUMNS": column_maxima.SCALE_COLUMNS,
            "POW2": True,
            "MAX": formats.get(fmt).max,
        },
        num_warps=column_maxima.SCALE_WARPS,
        divisible=(*pointers, "N", "K"),
        within_2gb=tuple(pointers),
        encodes=False,
    )
