"""FP8 quantisation of expert weights: one scale for each row, or each column, of each expert's matrix, or both.

    quantize_experts             scale[e, n] = pow2_floor(FP8_MAX / max|w[e, n, :]|)    for the forward GEMM
    quantize_experts_transposed  scale[e, k] = pow2_floor(FP8_MAX / max|w[e, :, k]|)    for the input gradient
    quantize_experts_both        the two above from one launch

The exact rules are scaling.py's.

Traffic (bf16 in): each of the first two reads 2*E*N*K and writes E*N*K + 4*E*N (E*K) bytes; both together read 2 and
write 2 bytes an element if the second read hits the cache, else read 4.
Layout: w (E, N, K), read in place where rows have unit stride (transposed), or where experts and rows follow each other
as in a contiguous tensor (the other two); anything else is copied first. Codes (E, N, K) contiguous; transposed codes
(E, K, N) contiguous, so that each expert's view as (N, K) is column-major; inverse scales float32 (E, N) and (E, K).

quantize_experts is quantize_rowwise over E * N rows, the same kernel.

quantize_experts_transposed: a program takes one expert and a block of columns, over all N rows, so no other program
works on its scales: no atomics, no second launch. The rows are taken in chunks. The last `held` chunks stay in
registers as loaded; the chunks before them are read twice, the second time backwards, so that what was read last, and
is most likely still cached, is read first. How codes leave transposed is tile.py's matter.

quantize_experts_both: programs start in the order of their number, so the programs that quantise an expert's rows stand
right before those that quantise its columns, which then find it in the cache, if an expert is smaller than that.

Not here: activations, whose groups are ranges of rows (colwise.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, launch, rowwise, tile


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


@dataclass(frozen=True)
class BothConfig:
    """How to launch quantize_experts_both: the columns as TransposedConfig, and for the rows:

    row_rows: rows a program. row_block: elements a chunk of a row. experts: whose rows are quantised before the columns
    of the first one are.
    """

    row_rows: int
    row_block: int
    experts: int
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
}

BOTH_CONFIGS: dict[tuple[str, str], BothConfig] = {
    **_rows_of(
        _NVIDIA,
        BothConfig(2, 2048, 1, 32, 512, 8, 1, 8, 2, False, _UNMEASURED),
        BothConfig(2, 2048, 1, 32, 512, 8, 2, 8, 2, False, _UNMEASURED),
        BothConfig(1, 2048, 1, 32, 512, 8, 1, 8, 2, True, _UNMEASURED),
        BothConfig(1, 2048, 1, 32, 512, 8, 1, 8, 2, True, _UNMEASURED),
        BothConfig(2, 2048, 1, 128, 256, 8, 0, 16, 0, False, _UNMEASURED),
        BothConfig(2, 2048, 1, 128, 256, 8, 0, 16, 0, False, _UNMEASURED),
    ),
    **_rows_of(
        _CDNA,
        BothConfig(2, 4096, 1, 64, 256, 8, 2, 4, 0, False, _UNMEASURED),
        BothConfig(2, 4096, 1, 32, 512, 8, 2, 4, 0, False, _UNMEASURED),
        *(BothConfig(2, 4096, 1, 64, 256, 8, 1, 4, 0, False, _UNMEASURED) for _ in _CLASSES[2:]),
    ),
    **_rows_of(
        _RDNA,
        *(BothConfig(1, 2048, 1, 32, 512, 16, 1, 4, 0, False, _UNMEASURED) for _ in _CLASSES),
    ),
    **_rows_of(
        ("cpu",),
        *(BothConfig(256, 512, 2, 64, max(limit // 4, 128), 2, 2, 1, 0, False, _INTERPRETER) for limit in _LENGTHS),
        BothConfig(256, 512, 2, 64, 4096, 2, 1, 1, 0, False, _INTERPRETER),
    ),
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
def _quantize_experts_both_kernel(
    w,
    q,
    inverse_scale,
    q_transposed,
    inverse_scale_transposed,
    E,
    N,
    K,
    row_programs,
    blocks,
    ROW_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    ROW_HELD: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    HINTS: tl.constexpr,
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
    """For EXPERTS experts at a time: row_programs programs for their rows, then blocks programs an expert."""
    a_turn = row_programs + EXPERTS * blocks
    first_expert = (tl.program_id(0) // a_turn).to(tl.int64) * EXPERTS
    place = tl.program_id(0) % a_turn
    if place < row_programs:
        rowwise.quantize_rows(
            first_expert * N + place * ROW_ROWS,
            w,
            q,
            inverse_scale,
            tl.minimum(first_expert + EXPERTS, E) * N,
            K,
            K,
            1,
            ROW_ROWS,
            ROW_BLOCK,
            ROW_CHUNKS,
            ROW_HELD,
            True,
            POW2,
            MAX,
            BIAS,
            MANTISSA_BITS,
            NAN_CODE,
            NEGATIVE_ZERO,
            NATIVE,
            NATIVE_NAN,
        )
    else:
        place -= row_programs
        expert = first_expert + place // blocks
        if expert < E:
            _quantize_columns(
                expert,
                place % blocks,
                w,
                q_transposed,
                inverse_scale_transposed,
                N,
                K,
                tl.cast(N, tl.int64) * K,
                K,
                1,
                COLUMNS,
                ROWS,
                PARTS,
                CHUNKS,
                HELD,
                HINTS,
                True,
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
    """Launch the kernel for both outputs with a given configuration."""
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
        row_programs = -(-row.experts * n // row.row_rows)
        blocks = -(-k // row.columns)
        turns = -(-e // row.experts)
        with launch.on_device(w):
            _quantize_experts_both_kernel[(turns * (row_programs + row.experts * blocks),)](
                w.view(cast.INPUTS[w.dtype]),
                q,
                inverse_scale,
                q_transposed,
                inverse_scale_transposed,
                e,
                n,
                k,
                row_programs,
                blocks,
                **_row_constexprs(row, k),
                **_column_constexprs(row, n),
                POW2=pow2,
                **cast.constants(fmt, target),
                NAN_APART=cast.nan_apart(fmt, target),
                **_options(row, fmt, target),
                **LAUNCH_OPTIONS,
            )
    return q.view(fmt.dtype), inverse_scale, q_transposed.view(fmt.dtype), inverse_scale_transposed


def _column_constexprs(row: TransposedConfig | BothConfig, n: int) -> dict[str, object]:
    chunks = -(-n // row.rows)
    return {
        "COLUMNS": row.columns,
        "ROWS": row.rows,
        "PARTS": row.parts,
        "CHUNKS": chunks,
        "HELD": min(row.held, chunks),
        "HINTS": row.hints,
    }


def _options(row: TransposedConfig | BothConfig, fmt: formats.Format, target: str) -> dict[str, int]:
    """Launch options. The integer encoder, for a format that the target lacks, needs registers more than company."""
    native = cast.constants(fmt, target)["NATIVE"] is not None
    return launch.options(row.num_warps, row.programs if native else 0, target)


def _row_constexprs(row: BothConfig, k: int) -> dict[str, object]:
    return {
        "ROW_ROWS": row.row_rows,
        "ROW_BLOCK": row.row_block,
        "ROW_CHUNKS": -(-k // row.row_block),
        "ROW_HELD": rowwise.holds(k),
        "EXPERTS": row.experts,
    }


def _begin(op: str, w: torch.Tensor) -> str | None:
    """Record what runs; the target of a launch, None for the reference."""
    which = launch.implementation(w)
    launch.record(op, which)
    return None if which == "reference" else device.detect(w.device).target.name


@torch.library.custom_op(
    "fp8stack::quantize_experts", mutates_args=(), schema="(Tensor w, str fmt, bool pow2) -> (Tensor, Tensor)"
)
def _quantize_experts(w, fmt, pow2):
    target = _begin("quantize_experts", w)
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
    if target is None:
        return quantize_experts_both_reference(w, fmt, pow2)
    row = launch.config(BOTH_CONFIGS, target, size_class(w.shape[1]))
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
    """What quantize_experts and quantize_experts_transposed return, in this order, from one launch.

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
    lacks, which goes through the integer encoder. quantize_experts runs rowwise.py's kernel, which is compiled there.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        (row.e4m3, torch.bfloat16, 2048, 7168),
        (row.e4m3, torch.bfloat16, 7168, 2048),
        (row.e4m3, torch.float32, 2048, 7168),
        (foreign, torch.bfloat16, 2048, 7168),
    ]
    return [
        make(formats.get(fmt), dtype, n, k, row.name)
        for fmt, dtype, n, k in cases
        for make in (_transposed_spec, _both_spec)
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


def _both_spec(fmt: formats.Format, dtype: torch.dtype, n: int, k: int, target: str) -> CompileSpec:
    row = launch.config(BOTH_CONFIGS, target, size_class(n))
    constants = cast.constants(fmt, target)
    options = _options(row, fmt, target)
    outputs = ("q", "inverse_scale", "q_transposed", "inverse_scale_transposed")
    return CompileSpec(
        kernel=_quantize_experts_both_kernel,
        case=f"experts-both-{fmt.name}-{_INPUT_NAMES[dtype]}-n{n}-k{k}",
        fmt=fmt.name,
        signature={
            "w": _POINTERS[dtype],
            **{name: "*u8" if name.startswith("q") else "*fp32" for name in outputs},
            **dict.fromkeys(("E", "N", "K", "row_programs", "blocks"), "i32"),
        },
        constexprs={
            "POW2": True,
            **_row_constexprs(row, k),
            **_column_constexprs(row, n),
            **constants,
            "NAN_APART": cast.nan_apart(fmt, target),
        },
        num_warps=options.pop("num_warps"),
        divisible=("w", *outputs, "E", "N", "K", "row_programs", "blocks"),
        within_2gb=("w", *outputs),
        native=constants["NATIVE"] is not None,
        options=options,
    )
