"""Rowwise FP8 quantisation: one scale for each row of a 2-D tensor.

    scale[m] = pow2_floor(FP8_MAX / max|x[m, :]|)       q[m, :] = saturate(x[m, :] * scale[m])

The exact rules (zero rows, NaN, cap, rounding) are scaling.py's; reference, interpreter and GPU agree bit by bit.

Traffic (bf16 in): reads 2*M*K, writes M*K + 4*M bytes. The chain of plain operators that this replaces (amax, divide,
multiply, clamp, cast) moves about 13*M*K.
Layout: x any strides, fastest with unit stride along K; q row-major; inverse scale float32 (M,).

A program takes one or a few whole rows, in chunks. A row of up to 32768 elements stays in registers, as loaded, between
the maximum and the cast, so x is read once; a longer row is read twice, the second time mostly from the cache. Chunks
keep the lanes busy where K is no power of two: at K = 5120 one block of 8192 leaves three lanes in eight idle and
reaches 0.95 of a copy on an H200, three chunks of 2048 reach 1.02. A thread owns 16 neighbouring elements of a chunk:
two 16-byte loads of bf16 and one 16-byte store. That needs a unit stride that the compiler knows (UNIT_STRIDE: a
runtime stride gives byte stores, 6.5 times slower on MI300X, triton-lang/triton#9834), and K and the row stride to be
multiples of 16, which Triton finds out at launch.

Not here: groups (colwise.py), expert weights (experts.py: the same kernel), tensor scales (tensorwise.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, launch, unfused


@dataclass(frozen=True)
class RowwiseConfig:
    """How to launch for one size class. rows: rows a program. block: elements a chunk. measured: what says so."""

    rows: int
    block: int
    num_warps: int
    measured: str


_ROW_LIMITS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_HELD = _ROW_LIMITS[-1]


def size_class(k: int) -> str:
    """The size class of rows of k elements, such as "k<=2048"; rows of "k>32768" are read twice."""
    return next((f"k<={limit}" for limit in _ROW_LIMITS if k <= limit), f"k>{_HELD}")


def holds(k: int) -> bool:
    """Whether rows of k elements stay in registers between the maximum and the cast."""
    return k <= _HELD


def _rows_of(targets: tuple[str, ...], *configs: RowwiseConfig) -> dict[tuple[str, str], RowwiseConfig]:
    classes = [size_class(limit) for limit in (*_ROW_LIMITS, _HELD + 1)]
    return {(target, name): row for target in targets for name, row in zip(classes, configs, strict=True)}


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"

# (target, size class) -> configuration. Up to 128 elements a thread, so that a row fits in registers beside its codes.
ROWWISE_CONFIGS: dict[tuple[str, str], RowwiseConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        RowwiseConfig(2, 512, 2, _UNMEASURED),
        RowwiseConfig(2, 512, 2, _UNMEASURED),
        RowwiseConfig(1, 2048, 4, _UNMEASURED),
        RowwiseConfig(1, 2048, 4, _UNMEASURED),
        RowwiseConfig(1, 2048, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        RowwiseConfig(8, 512, 2, _UNMEASURED),
        RowwiseConfig(4, 1024, 2, _UNMEASURED),
        RowwiseConfig(2, 2048, 2, _UNMEASURED),
        RowwiseConfig(1, 4096, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 4, _UNMEASURED),
        RowwiseConfig(1, 8192, 8, _UNMEASURED),
        RowwiseConfig(1, 8192, 8, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        RowwiseConfig(8, 512, 4, _UNMEASURED),
        RowwiseConfig(4, 1024, 4, _UNMEASURED),
        RowwiseConfig(2, 2048, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 4, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
        RowwiseConfig(1, 4096, 8, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: many rows at once, and few chunks, but more than one.
    **_rows_of(
        ("cpu",),
        *(RowwiseConfig(min(64, 2**16 // limit), max(limit // 2, 512), 1, _INTERPRETER) for limit in _ROW_LIMITS),
        RowwiseConfig(2, 16384, 1, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "k<=512"): RowwiseConfig(8, 512, 1, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=1024"): RowwiseConfig(2, 512, 1, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=2048"): RowwiseConfig(1, 1024, 1, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=4096"): RowwiseConfig(1, 2048, 2, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=8192"): RowwiseConfig(1, 4096, 4, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=16384"): RowwiseConfig(2, 8192, 16, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx942", "k<=32768"): RowwiseConfig(1, 16384, 16, "not timed: gfx942/sweep-rowwise.json"),
    ("gfx950", "k<=512"): RowwiseConfig(8, 512, 1, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=1024"): RowwiseConfig(16, 512, 4, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=2048"): RowwiseConfig(16, 1024, 16, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=4096"): RowwiseConfig(1, 2048, 2, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=8192"): RowwiseConfig(1, 4096, 4, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=16384"): RowwiseConfig(1, 4096, 4, "not timed: gfx950/sweep-rowwise.json"),
    ("gfx950", "k<=32768"): RowwiseConfig(1, 8192, 8, "not timed: gfx950/sweep-rowwise.json"),
    ("sm_90", "k<=512"): RowwiseConfig(2, 512, 2, "0.81 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=1024"): RowwiseConfig(2, 512, 2, "0.95 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=2048"): RowwiseConfig(1, 2048, 4, "0.96 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=4096"): RowwiseConfig(2, 2048, 8, "1.04 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=8192"): RowwiseConfig(1, 2048, 4, "1.02 to 1.03 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=16384"): RowwiseConfig(1, 8192, 4, "1.01 of a copy: h200/sweep-rowwise.json"),
    ("sm_90", "k<=32768"): RowwiseConfig(1, 8192, 16, "0.89 of a copy: h200/sweep-rowwise.json"),
    # End of the swept rows.
}


def quantize_rowwise_reference(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_rowwise."""
    codes, inverse_scale = scaling.quantize_reference(x, fmt, dim=1, pow2=pow2)
    return codes.view(torch.uint8).contiguous().view(codes.dtype), inverse_scale


@jit
def _load_elements(x_rows, at, mask, column_stride, UNIT_STRIDE: tl.constexpr):
    """Elements `at` of each row as loaded: int16 (bf16) or int32 (float32) bits; masked lanes read 0."""
    if UNIT_STRIDE:
        pointers = x_rows + at[None, :]
    else:
        pointers = x_rows + at[None, :].to(tl.int64) * column_stride
    return tl.load(pointers, mask=mask, other=0)


@jit
def quantize_rows(
    first_row,
    x,
    q,
    inverse_scale,
    M,
    K,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
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
    """The work of one program: ROWS rows from first_row (int64: rows * stride passes 2^31) on, those below M."""
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    in_rows = (rows < M)[:, None]
    x_rows = x + rows[:, None] * row_stride
    q_rows = q + rows[:, None] * K
    largest = tl.zeros((ROWS, BLOCK), tl.int32)

    if HELD:
        # All loads of the row are issued before the first is waited for.
        held = ()
        for chunk in tl.static_range(CHUNKS):
            at = chunk * BLOCK + columns
            elements = _load_elements(x_rows, at, in_rows & (at < K)[None, :], column_stride, UNIT_STRIDE)
            held = held + (elements,)  # noqa: RUF005 - Triton compiles no starred expression
        for chunk in tl.static_range(CHUNKS):
            largest = tl.maximum(largest, cast.float_bits(held[chunk]) & 0x7FFFFFFF)
        scale = cast.scale_bits(tl.max(largest, axis=1), MAX, POW2)
        for chunk in tl.static_range(CHUNKS):
            at = chunk * BLOCK + columns
            y = cast.float_bits(held[chunk]).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, None]
            codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN)
            tl.store(q_rows + at[None, :], codes, mask=in_rows & (at < K)[None, :])
    else:
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + columns
            elements = _load_elements(x_rows, at, in_rows & (at < K)[None, :], column_stride, UNIT_STRIDE)
            largest = tl.maximum(largest, cast.float_bits(elements) & 0x7FFFFFFF)
        scale = cast.scale_bits(tl.max(largest, axis=1), MAX, POW2)
        for chunk in range(CHUNKS):
            at = chunk * BLOCK + columns
            mask = in_rows & (at < K)[None, :]
            elements = _load_elements(x_rows, at, mask, column_stride, UNIT_STRIDE)
            y = cast.float_bits(elements).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, None]
            codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN)
            tl.store(q_rows + at[None, :], codes, mask=mask)

    tl.store(inverse_scale + rows, cast.inverse_bits(scale).to(tl.float32, bitcast=True), mask=rows < M)


# M is the number of tokens: not specialised, or each divisibility by 16 would compile anew.
@jit(do_not_specialize=["M"])
def _quantize_rowwise_kernel(
    x,
    q,
    inverse_scale,
    M,
    K,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
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
    quantize_rows(
        tl.program_id(0).to(tl.int64) * ROWS,
        x,
        q,
        inverse_scale,
        M,
        K,
        row_stride,
        column_stride,
        ROWS,
        BLOCK,
        CHUNKS,
        HELD,
        UNIT_STRIDE,
        POW2,
        MAX,
        BIAS,
        MANTISSA_BITS,
        NAN_CODE,
        NEGATIVE_ZERO,
        NATIVE,
        NATIVE_NAN,
    )


def launch_rowwise(
    x: torch.Tensor, fmt: formats.Format, pow2: bool, row: RowwiseConfig, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration. For quantize_rowwise, and for timing one row against another."""
    m, k = x.shape
    q = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    inverse_scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    if k == 0:
        inverse_scale.fill_(1.0)  # the amax of nothing is 0
    elif m:
        with launch.on_device(x):
            _quantize_rowwise_kernel[(-(-m // row.rows),)](
                x.view(cast.INPUTS[x.dtype]),
                q,
                inverse_scale,
                m,
                k,
                x.stride(0),
                x.stride(1),
                **_constexprs(fmt, pow2, row, k, unit_stride=x.stride(1) == 1, target=target),
                num_warps=row.num_warps,
                **LAUNCH_OPTIONS,
            )
    return q.view(fmt.dtype), inverse_scale


def _constexprs(
    fmt: formats.Format, pow2: bool, row: RowwiseConfig, k: int, unit_stride: bool, target: str
) -> dict[str, object]:
    return {
        "ROWS": row.rows,
        "BLOCK": row.block,
        "CHUNKS": -(-k // row.block),
        "HELD": holds(k),
        "UNIT_STRIDE": unit_stride,
        "POW2": pow2,
        **cast.constants(fmt, target),
    }


@torch.library.custom_op(
    "fp8stack::quantize_rowwise", mutates_args=(), schema="(Tensor x, str fmt, bool pow2) -> (Tensor, Tensor)"
)
def _quantize_rowwise(x, fmt, pow2):
    which = launch.implementation(x, chain=True)
    launch.record("quantize_rowwise", which)
    if which == "unfused":
        return unfused.rowwise(x, fmt, pow2)
    if which == "reference":
        return quantize_rowwise_reference(x, fmt, pow2)
    target = device.detect(x.device).target.name
    return launch_rowwise(
        x, formats.get(fmt), pow2, launch.config(ROWWISE_CONFIGS, target, size_class(x.shape[1])), target
    )


@_quantize_rowwise.register_fake
def _(x, fmt, pow2):
    m, k = x.shape
    q = torch.empty((m, k), dtype=formats.get(fmt).dtype, device=x.device)
    return q, torch.empty((m,), dtype=torch.float32, device=x.device)


def quantize_rowwise(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of x with its own scale.

    x: (M, K), bfloat16 or float32, any strides. pow2: round scales down to powers of two.
    Returns codes (M, K) of fmt.dtype, row-major, and the inverse scale (M,), float32: 1 for a row of zeros.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks.
    """
    cast.require_input(x, "quantize_rowwise")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    return _quantize_rowwise(x, formats.get(fmt).name, pow2)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite.

    The arch's own formats at the widths of Llama and DeepSeek and at Llama's vocabulary (a row too long for registers),
    float32 input, and one format that the arch lacks, which goes through the integer encoder.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        *((row.e4m3, torch.bfloat16, k) for k in (2048, 5120, 7168, 28672, 128256)),
        (row.e4m3, torch.float32, 5120),
        (row.e5m2, torch.bfloat16, 7168),
        (foreign, torch.bfloat16, 7168),
    ]
    return [_compile_spec(formats.get(fmt), dtype, k, row.name) for fmt, dtype, k in cases]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, k: int, target: str) -> CompileSpec:
    row = launch.config(ROWWISE_CONFIGS, target, size_class(k))
    constexprs = _constexprs(fmt, pow2=True, row=row, k=k, unit_stride=True, target=target)
    return CompileSpec(
        kernel=_quantize_rowwise_kernel,
        case=f"rowwise-{fmt.name}-{_INPUT_NAMES[dtype]}-k{k}",
        fmt=fmt.name,
        signature={
            "x": _POINTERS[dtype],
            "q": "*u8",
            "inverse_scale": "*fp32",
            "M": "i32",
            "K": "i32",
            "row_stride": "i32",
        },
        constexprs={"column_stride": 1, **constexprs},
        num_warps=row.num_warps,
        divisible=("x", "q", "inverse_scale", "K", "row_stride"),
        within_2gb=("x", "q", "inverse_scale"),
        native=constexprs["NATIVE"] is not None,
    )
