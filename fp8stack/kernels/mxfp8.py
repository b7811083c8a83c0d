"""MXFP8 quantisation: one power-of-two scale, an E8M0 byte, for each 32 elements along rows or down columns.

    byte[i, j] = clamp(E, -127, 127) + 127      q = saturate(x * 2^-E of its block)

E comes from amax, the block's largest magnitude, in one of four rounding modes, which is part of the data's meaning:

    floor   floor(log2 amax) - emax            clips: codes of a block may saturate
    ceil    ceil(log2 amax) - emax             never clips
    even    floor(log2 of amax rounded half-up to the element's mantissa) - emax
    rceil   ceil(log2(RN32(amax * RN32(1 / MAX))))
    emax    8 for e4m3fn, 15 for e5m2: the exponent of MAX

amax 0 gives byte 0, which means 2^-127 (a float32 subnormal: there is no zero); a NaN or infinity gives byte 0xFF and
NaN codes. Logarithms are exponent fields, so nothing is rounded that should not be. OCP formats only: MX is theirs.

Traffic (bf16 in): reads 2*M*K, writes M*K bytes and 1 byte a block; x is read once.
Layout: x any strides, fastest with unit stride along one dimension. Codes (M, K) are contiguous along the blocks, as
both operands of a GEMM are along its contraction: row-major for blocks along rows (dim 1), column-major for blocks down
columns (dim 0). Scales are plain row-major: uint8 (M, ceil(K/32)) or (K, ceil(M/32)), rows of the codes as they lie;
swizzling belongs to the GEMM's launcher. A block at the edge holds what there is.

The kernel is blockwise.py's, but for the scale. Four neighbouring scale bytes are written as one word where rows of
scales are multiples of 4 bytes.

Not here: groups of rows along the contraction.
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, launch, tile

BLOCK = 32
"""Elements that share a scale."""

MODES = ("floor", "ceil", "even", "rceil")
"""Rounding modes of the scale."""

_EMAX = {"e4m3fn": 8, "e5m2": 15}
FORMATS = tuple(_EMAX)
"""Element formats: OCP's."""


@dataclass(frozen=True)
class Mxfp8Config:
    """How to launch, by direction. A tile of rows x columns a program: columns (rows) are multiples of the block.

    parts: neighbouring rows of a thread where codes leave transposed (tile.py), else 1. programs: see launch.options.
    measured: what says so.
    """

    rows: int
    columns: int
    parts: int
    num_warps: int
    programs: int
    measured: str


DIRECTIONS = ("columns", "rows")
"""Size classes of the launch table, by dim: the sizes themselves are token counts."""

_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def _rows_of(targets: tuple[str, ...], *configs: Mxfp8Config) -> dict[tuple[str, str], Mxfp8Config]:
    return {(target, name): row for target in targets for name, row in zip(DIRECTIONS, configs, strict=True)}


# (target, direction) -> configuration: down columns, along rows.
MXFP8_CONFIGS: dict[tuple[str, str], Mxfp8Config] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        Mxfp8Config(256, 64, 16, 4, 0, _UNMEASURED),
        Mxfp8Config(4, 1024, 1, 4, 0, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        Mxfp8Config(128, 128, 16, 2, 0, _UNMEASURED),
        Mxfp8Config(4, 1024, 1, 4, 0, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        Mxfp8Config(128, 128, 16, 4, 0, _UNMEASURED),
        Mxfp8Config(4, 1024, 1, 4, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs, large tiles.
    **_rows_of(
        ("cpu",),
        Mxfp8Config(256, 128, 4, 1, 0, _INTERPRETER),
        Mxfp8Config(64, 512, 1, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "columns"): Mxfp8Config(128, 32, 4, 1, 0, "not timed: gfx942/sweep-mxfp8_columns.json"),
    ("gfx942", "rows"): Mxfp8Config(32, 256, 1, 2, 0, "not timed: gfx942/sweep-mxfp8_rows.json"),
    ("gfx950", "columns"): Mxfp8Config(128, 32, 4, 1, 0, "not timed: gfx950/sweep-mxfp8_columns.json"),
    ("gfx950", "rows"): Mxfp8Config(32, 256, 1, 2, 0, "not timed: gfx950/sweep-mxfp8_rows.json"),
    ("sm_90", "columns"): Mxfp8Config(128, 64, 16, 2, 0, "0.88 to 0.91 of a copy: h200/sweep-mxfp8_columns.json"),
    ("sm_90", "rows"): Mxfp8Config(2, 2048, 1, 4, 4, "0.98 to 1.06 of a copy: h200/sweep-mxfp8_rows.json"),
    # End of the swept rows.
}


def exponent_reference(amax: torch.Tensor, fmt: str | torch.dtype | formats.Format, mode: str) -> torch.Tensor:
    """clamp(E, -127, 127), int32, for amax (float32, positive and finite): the specification of the rounding modes."""
    fmt = formats.get(fmt)
    emax = _EMAX[fmt.name]
    value = amax.to(torch.float64)
    if mode == "rceil":
        value, emax = (amax * torch.tensor(1.0 / fmt.max, dtype=torch.float32)).to(torch.float64), 0
    # value = mantissa * 2^exponent with 0.5 <= mantissa < 1, exact for float32 subnormals too.
    mantissa, exponent = torch.frexp(value)
    floor = exponent - 1
    if mode == "even":
        steps = 2.0 ** (fmt.mantissa_bits + 1)
        floor = floor + (torch.floor(mantissa * steps + 0.5) == steps).to(torch.int32)
    elif mode in ("ceil", "rceil"):
        floor = floor + (mantissa != 0.5).to(torch.int32)
    floor = torch.where(value == 0, -127 + emax, floor)  # rceil's product can vanish: log2 0, clamped
    return (floor - emax).clamp(-127, 127).to(torch.int32)


def quantize_mxfp8_reference(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, mode: str, dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_mxfp8."""
    fmt = formats.get(fmt)
    if dim == 0:
        codes, byte = quantize_mxfp8_reference(x.t(), fmt, mode, 1)
        return codes.t(), byte
    m, k = x.shape
    blocks = -(-k // BLOCK)
    # Blocks at the edge are filled up with zeros: the maximum is the same.
    whole = x.new_zeros((m, blocks * BLOCK))
    whole[:, :k] = x
    amax = scaling.amax(whole.view(m, blocks, BLOCK), dim=2)
    finite = amax.isfinite()
    positive = finite & (amax > 0)
    byte = exponent_reference(torch.where(positive, amax, 1.0), fmt, mode) + 127
    byte = torch.where(positive, byte, 0)
    factor = torch.exp2((127 - byte).to(torch.float64)).to(torch.float32)
    factor = torch.where(finite, factor, torch.nan).repeat_interleave(BLOCK, 1)[:, :k]
    codes = formats.encode(x.to(torch.float32) * factor, fmt)
    byte = torch.where(finite, byte, 255).to(torch.uint8)
    contiguous = torch.contiguous_format
    return codes.clone(memory_format=contiguous).view(fmt.dtype), byte.clone(memory_format=contiguous)


@jit
def scale_byte(amax_bits, MODE: tl.constexpr, MAX: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """The E8M0 byte (int32) from the bits of amax (int32), the twin of exponent_reference; not of a NaN or infinity.

    byte = E + 127, and the exponent field of a number is floor(log2) + 127: for a subnormal it is 0, which is more than
    the truth and is clamped to the same byte, as long as there is an EMAX to subtract.
    """
    if MODE == "rceil":
        inverse = tl.full(amax_bits.shape, 1.0 / MAX, tl.float32)
        product = (amax_bits.to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
        # Nothing is subtracted here, so subnormals count: up to 2^-127, half of the smallest normal, the byte is 0.
        above = tl.where(product < 0x00800000, product > 0x00400000, (product & 0x007FFFFF) != 0)
        byte = (product >> 23) + above.to(tl.int32)
    elif MODE == "ceil":
        byte = (amax_bits >> 23) + ((amax_bits & 0x007FFFFF) != 0).to(tl.int32) - EMAX
    elif MODE == "even":
        byte = ((amax_bits + (1 << (22 - MANTISSA_BITS))) >> 23) - EMAX
    else:
        tl.static_assert(MODE == "floor")
        byte = (amax_bits >> 23) - EMAX
    return tl.where(amax_bits == 0, 0, tl.maximum(byte, 0))


@jit
def _store_bytes(
    scales,
    byte,
    first,
    limit,
    along,
    along_limit,
    stride,
    LINES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Store scale bytes (LINES, BLOCKS) of lines `along`, from block `first` on. WORDS: `limit` is a multiple of 4.

    stride: bytes of a line of scales.
    """
    in_lines = (along < along_limit)[:, None]
    lines = scales + along[:, None].to(tl.int64) * stride
    if WORDS:
        shift = 8 * tl.arange(0, 4)
        word = tl.sum(tl.reshape(byte, (LINES, BLOCKS // 4, 4)) << shift[None, None, :], axis=2)
        at = first + 4 * tl.arange(0, BLOCKS // 4)
        pointers = (lines + at[None, :]).to(tl.pointer_type(tl.int32))
        tl.store(pointers, word, mask=in_lines & (at < limit)[None, :])
    else:
        at = first + tl.arange(0, BLOCKS)
        tl.store(lines + at[None, :], byte.to(tl.uint8), mask=in_lines & (at < limit)[None, :])


# M is the number of tokens: not specialised, or each divisibility by 16 would compile anew; nor what follows from it.
@jit(do_not_specialize=["M", "scale_stride"])
def _quantize_mxfp8_kernel(
    x,
    q,
    scales,
    M,
    K,
    row_stride,
    column_stride,
    scale_stride,
    column_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    MODE: tl.constexpr,
    EMAX: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    NAN_APART: tl.constexpr,
):
    """One tile, its blocks along rows, or down columns where codes leave TURNED. ALIGNED: M is a multiple of 16.

    WORDS: a line of scales is a multiple of 4 bytes. scale_stride: bytes of a line of scales.
    """
    UNIT_ROWS: tl.constexpr = BLOCK // PARTS if TURNED else 1
    UNIT_COLUMNS: tl.constexpr = 1 if TURNED else BLOCK
    R: tl.constexpr = ROWS // PARTS
    if ALIGNED:
        M = M // 16 * 16  # as the compiler sees it: tl.multiple_of says nothing about an argument
    if WORDS:
        scale_stride = scale_stride // 4 * 4
    block = tl.program_id(0).to(tl.int64)
    first_row = block // column_blocks * ROWS
    first_column = block % column_blocks * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    rows = first_row + tl.arange(0, ROWS)
    parts = tile.load_parts(x, first_row, columns, M, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, "")

    # The parts interleave, so a block down columns has BLOCK / PARTS rows of each.
    largest = tile.unit_largest(tile.largest_of(parts, PARTS), R, COLUMNS, UNIT_ROWS, UNIT_COLUMNS)
    non_finite = largest >= 0x7F800000
    byte = scale_byte(largest, MODE, MAX, EMAX, MANTISSA_BITS)
    # 2^-E, a normal number: E + 127 is at most 254 - EMAX.
    factor = tl.where(non_finite, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    factor = tile.spread(factor, R, COLUMNS, UNIT_ROWS, UNIT_COLUMNS)
    scaled = tile.scaled(parts, factor, PARTS)
    byte = tl.where(non_finite, 255, byte)

    if TURNED:
        first_block = first_row // BLOCK
        _store_bytes(
            scales,
            tl.trans(byte),
            first_block,
            scale_stride,
            columns,
            K,
            scale_stride,
            COLUMNS,
            ROWS // BLOCK,
            WORDS,
        )
        y = tile.turned(scaled, ROWS, COLUMNS, PARTS)
        codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART)
        mask = (columns < K)[:, None] & (rows < M)[None, :]
        pointers = q + columns[:, None] * M + rows[None, :]
        tl.store(pointers, codes, mask=mask)
        if NAN_APART:
            tile.store_nan_units(pointers, mask, tl.trans(largest), COLUMNS, ROWS, 1, BLOCK, NAN_CODE)
    else:
        first_block = first_column // BLOCK
        _store_bytes(
            scales,
            byte,
            first_block,
            scale_stride,
            rows,
            M,
            scale_stride,
            ROWS,
            COLUMNS // BLOCK,
            WORDS,
        )
        codes = cast.encode(
            scaled[0], MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART
        )
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        pointers = q + rows[:, None] * K + columns[None, :]
        tl.store(pointers, codes, mask=mask)
        if NAN_APART:
            tile.store_nan_units(pointers, mask, largest, ROWS, COLUMNS, 1, BLOCK, NAN_CODE)


def launch_mxfp8(
    x: torch.Tensor, fmt: formats.Format, mode: str, dim: int, row: Mxfp8Config | None, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration, or with the table's."""
    lines, length = x.shape if dim == 1 else x.t().shape
    q = torch.empty((lines, length), dtype=torch.uint8, device=x.device)
    scales = torch.empty((lines, -(-length // BLOCK)), dtype=torch.uint8, device=x.device)
    if x.numel():
        # Read along the unit stride: a column-major x is its row-major transpose, with its blocks the other way.
        turned = dim == 0
        if x.stride(0) == 1 and x.stride(1) != 1:
            x, turned = x.t(), not turned
        if row is None:
            row = launch.config(MXFP8_CONFIGS, target, DIRECTIONS[0 if turned else 1])
        m, k = x.shape
        column_blocks = -(-k // row.columns)
        with launch.on_device(x):
            _quantize_mxfp8_kernel[(-(-m // row.rows) * column_blocks,)](
                x.view(cast.INPUTS[x.dtype]),
                q,
                scales,
                m,
                k,
                *x.stride(),
                scales.shape[1],
                column_blocks,
                **_constexprs(row, turned, fmt, mode),
                ALIGNED=turned and m % 16 == 0,
                WORDS=scales.shape[1] % 4 == 0,
                UNIT_STRIDE=x.stride(1) == 1,
                **cast.constants(fmt, target),
                NAN_APART=cast.nan_apart(fmt, target),
                **launch.options(row.num_warps, row.programs, target),
                **LAUNCH_OPTIONS,
            )
    q = q.view(fmt.dtype)
    return (q if dim == 1 else q.t()), scales


def _constexprs(row: Mxfp8Config, turned: bool, fmt: formats.Format, mode: str) -> dict[str, object]:
    return {
        "ROWS": row.rows,
        "COLUMNS": row.columns,
        "PARTS": row.parts,
        "BLOCK": BLOCK,
        "TURNED": turned,
        "MODE": mode,
        "EMAX": _EMAX[fmt.name],
    }


@torch.library.custom_op(
    "fp8stack::quantize_mxfp8", mutates_args=(), schema="(Tensor x, str fmt, str mode, int dim) -> (Tensor, Tensor)"
)
def _quantize_mxfp8(x, fmt, mode, dim):
    which = launch.implementation(x)
    launch.record("quantize_mxfp8", which)
    if which == "reference":
        return quantize_mxfp8_reference(x, fmt, mode, dim)
    return launch_mxfp8(x, formats.get(fmt), mode, dim, None, device.detect(x.device).target.name)


@_quantize_mxfp8.register_fake
def _(x, fmt, mode, dim):
    m, k = x.shape
    lines, length = (m, k) if dim == 1 else (k, m)
    q = torch.empty((lines, length), dtype=formats.get(fmt).dtype, device=x.device)
    scales = torch.empty((lines, -(-length // BLOCK)), dtype=torch.uint8, device=x.device)
    return (q if dim == 1 else q.t()), scales


def quantize_mxfp8(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, mode: str, dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x with one E8M0 scale for each 32 elements along `dim`.

    x: (M, K), bfloat16 or float32, any strides. mode: how the scale is rounded, one of MODES; there is no default, as
    data of different modes must not be mixed. dim: 1, blocks along rows; 0, blocks down columns.
    Returns codes (M, K) of fmt.dtype, row-major (dim 1) or column-major (dim 0), and the scales as E8M0 bytes, uint8,
    row-major: (M, ceil(K/32)) for dim 1, (K, ceil(M/32)) for dim 0. x is about codes * 2^(byte - 127).
    Raises UnsupportedDtype for other dtypes and for FNUZ formats, ValueError for other ranks, modes and dims.
    """
    cast.require_input(x, "quantize_mxfp8")
    fmt = formats.get(fmt)
    if fmt.name not in _EMAX:
        raise formats.UnsupportedDtype(
            f"quantize_mxfp8 cannot make {fmt.name} on {x.device.type}; expected one of {', '.join(_EMAX)}: MX formats "
            "are OCP's; on a FNUZ device use the rowwise or blockwise recipe"
        )
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}: how a scale is rounded to 2^E")
    if dim not in (0, 1):
        raise ValueError(f"dim is {dim}; expected 1, blocks along rows, or 0, blocks down columns")
    return _quantize_mxfp8(x, fmt.name, mode, dim)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite: both directions, the OCP formats.

    On an arch whose formats are FNUZ the codes go through the integer encoder.
    """
    name = device.lookup(arch).name
    cases = [
        *(("e4m3fn", torch.bfloat16, "rceil", turned) for turned in (False, True)),
        ("e4m3fn", torch.bfloat16, "floor", False),
        ("e4m3fn", torch.float32, "rceil", True),
        ("e5m2", torch.bfloat16, "rceil", False),
    ]
    return [_compile_spec(formats.get(fmt), dtype, mode, turned, name) for fmt, dtype, mode, turned in cases]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, mode: str, turned: bool, target: str) -> CompileSpec:
    direction = DIRECTIONS[0 if turned else 1]
    row = launch.config(MXFP8_CONFIGS, target, direction)
    constants = cast.constants(fmt, target)
    options = launch.options(row.num_warps, row.programs, target)
    return CompileSpec(
        kernel=_quantize_mxfp8_kernel,
        case=f"mxfp8-{direction}-{mode}-{fmt.name}-{_INPUT_NAMES[dtype]}",
        fmt=fmt.name,
        signature={
            "x": _POINTERS[dtype],
            "q": "*u8",
            "scales": "*u8",
            **dict.fromkeys(("M", "K", "row_stride", "scale_stride", "column_blocks"), "i32"),
        },
        constexprs={
            "column_stride": 1,
            "ALIGNED": turned,
            "WORDS": True,
            "UNIT_STRIDE": True,
            **_constexprs(row, turned, fmt, mode),
            **constants,
            "NAN_APART": cast.nan_apart(fmt, target),
        },
        num_warps=options.pop("num_warps"),
        divisible=("x", "q", "scales", "K", "row_stride"),
        within_2gb=("x", "q", "scales"),
        native=constants["NATIVE"] is not None,
        options=options,
    )
