"""Blockwise FP8 quantisation: one scale for each block of 1x128, 128x1 or 128x128 elements of a 2-D tensor.

    scale[i, j] = FP8_MAX / max|x[block i, j]|       q = saturate(x * scale of its block)

The exact rules are scaling.py's. Scales are not powers of two by default, as in the blockwise recipe. A block at the
edge holds what there is: sizes need not be multiples of 128.

Traffic (bf16 in): reads 2*M*K, writes M*K bytes and 4 bytes a block; x is read once.
Layout: x any strides, fastest with unit stride along one dimension; codes (M, K) row-major or column-major; inverse
scale float32, one number a block, row-major: (M, ceil(K/128)), (ceil(M/128), K) or (ceil(M/128), ceil(K/128)). What a
GEMM's backend wants beyond that (another order, padding) is its launcher's business.

    activation, left operand         1x128 of x                              (M, K)
    gradient, left operand of dW     1x128 of dy.t(), read in place          (N, M): dy's columns, "transposed"
    activation, right operand of dW  128x1 of x, column-major                (M, K)
    weight, right operand            128x128 of w                            (N, K)

A program takes one tile of whole blocks and keeps it in registers. The tile is always read along the unit stride: a
column-major x is its row-major transpose, with block, scales and layout of the codes exchanged. Codes whose layout is
not that of x leave as tile.py describes.

Not here: MXFP8's 1x32 blocks (mxfp8.py); groups of rows along the contraction (colwise.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats, scaling
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, launch, tile

BLOCK = 128
"""Elements of a block along each dimension that it extends along."""

UNITS: dict[str, tuple[int, int]] = {"1x128": (1, BLOCK), "128x1": (BLOCK, 1), "128x128": (BLOCK, BLOCK)}
"""Blocks by name -> rows, columns."""


@dataclass(frozen=True)
class BlockwiseConfig:
    """How to launch for one block and direction. A tile of rows x columns a program, multiples of the block.

    parts: neighbouring rows of a thread where codes leave transposed (tile.py), else 1. programs: see launch.options.
    measured: what says so.
    """

    rows: int
    columns: int
    parts: int
    num_warps: int
    programs: int
    measured: str


_CLASSES = ("1x128", "128x1", "128x128", "1x128-turned", "128x1-turned", "128x128-turned")


def size_class(unit: tuple[int, int], turned: bool) -> str:
    """The size class of a block in x as it is read, by whether codes leave transposed. The sizes are token counts."""
    return f"{unit[0]}x{unit[1]}" + ("-turned" if turned else "")


def _rows_of(targets: tuple[str, ...], *configs: BlockwiseConfig) -> dict[tuple[str, str], BlockwiseConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"

# (target, size class) -> configuration.
BLOCKWISE_CONFIGS: dict[tuple[str, str], BlockwiseConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103", "sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"),
        BlockwiseConfig(4, 1024, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 64, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 1, 8, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 4, 0, _UNMEASURED),
        BlockwiseConfig(256, 64, 16, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 4, 0, _UNMEASURED),
    ),
    # Waves of 64.
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        BlockwiseConfig(4, 1024, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 64, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 2, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 2, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 2, 0, _UNMEASURED),
    ),
    # Waves of 32.
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        BlockwiseConfig(4, 1024, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 64, 1, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 1, 8, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 4, 0, _UNMEASURED),
        BlockwiseConfig(128, 128, 16, 4, 0, _UNMEASURED),
    ),
    # The interpreter runs program after program in Python: few programs, large tiles.
    **_rows_of(
        ("cpu",),
        BlockwiseConfig(64, 512, 1, 1, 0, _INTERPRETER),
        BlockwiseConfig(128, 256, 1, 1, 0, _INTERPRETER),
        BlockwiseConfig(128, 256, 1, 1, 0, _INTERPRETER),
        BlockwiseConfig(128, 256, 2, 1, 0, _INTERPRETER),
        BlockwiseConfig(256, 128, 4, 1, 0, _INTERPRETER),
        BlockwiseConfig(256, 128, 2, 1, 0, _INTERPRETER),
    ),
    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`.
    ("gfx942", "1x128"): BlockwiseConfig(32, 256, 1, 2, 0, "not timed: gfx942/sweep-blockwise_1x128.json"),
    ("gfx942", "128x128"): BlockwiseConfig(128, 256, 1, 16, 0, "not timed: gfx942/sweep-blockwise_128x128.json"),
    ("gfx942", "128x1-turned"): BlockwiseConfig(128, 32, 4, 1, 0, "not timed: gfx942/sweep-blockwise_128x1.json"),
    ("gfx950", "1x128"): BlockwiseConfig(32, 256, 1, 2, 0, "not timed: gfx950/sweep-blockwise_1x128.json"),
    ("gfx950", "128x128"): BlockwiseConfig(128, 256, 1, 16, 0, "not timed: gfx950/sweep-blockwise_128x128.json"),
    ("gfx950", "128x1-turned"): BlockwiseConfig(128, 32, 4, 1, 0, "not timed: gfx950/sweep-blockwise_128x1.json"),
    ("sm_90", "1x128"): BlockwiseConfig(2, 2048, 1, 4, 4, "0.95 to 1.02 of a copy: h200/sweep-blockwise_1x128.json"),
    ("sm_90", "128x128"): BlockwiseConfig(
        128, 128, 1, 16, 0, "0.90 to 0.92 of a copy: h200/sweep-blockwise_128x128.json"
    ),
    ("sm_90", "128x1-turned"): BlockwiseConfig(
        128, 32, 4, 2, 0, "0.80 to 0.88 of a copy: h200/sweep-blockwise_128x1.json"
    ),
    ("sm_90", "128x128-turned"): BlockwiseConfig(
        128, 128, 4, 4, 0, "0.84 to 0.88 of a copy: h200/sweep-blockwise_128x128_turned.json"
    ),
    # End of the swept rows.
}


def quantize_blockwise_reference(
    x: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    unit: str = "1x128",
    column_major: bool = False,
    pow2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_blockwise."""
    fmt = formats.get(fmt)
    (m, k), (unit_rows, unit_columns) = x.shape, UNITS[unit]
    blocks_down, blocks_across = -(-m // unit_rows), -(-k // unit_columns)
    # Blocks at the edge are filled up with zeros: the maximum is the same.
    whole = x.new_zeros((blocks_down * unit_rows, blocks_across * unit_columns))
    whole[:m, :k] = x
    blocks = whole.view(blocks_down, unit_rows, blocks_across, unit_columns).permute(0, 2, 1, 3).flatten(2)
    scale = scaling.scale_from_amax(scaling.amax(blocks, dim=2), fmt, pow2)
    factor = scale.repeat_interleave(unit_rows, 0).repeat_interleave(unit_columns, 1)[:m, :k]
    codes = formats.encode(x.to(torch.float32) * factor, fmt)
    codes = codes.t() if column_major else codes
    codes = codes.clone(memory_format=torch.contiguous_format).view(fmt.dtype)
    inverse_scale = scaling.inverse_scale(scale).clone(memory_format=torch.contiguous_format)
    return (codes.t() if column_major else codes), inverse_scale


@jit
def _store_scale(
    inverse_scale, bits, block_rows, block_columns, blocks_down, blocks_across, down_stride, across_stride
):
    at = block_rows[:, None].to(tl.int64) * down_stride + block_columns[None, :].to(tl.int64) * across_stride
    mask = (block_rows < blocks_down)[:, None] & (block_columns < blocks_across)[None, :]
    tl.store(inverse_scale + at, cast.inverse_bits(bits).to(tl.float32, bitcast=True), mask=mask)


# M is the number of tokens: not specialised, or each divisibility by 16 would compile anew; nor what follows from it.
@jit(do_not_specialize=["M", "down_stride", "across_stride"])
def _quantize_blockwise_kernel(
    x,
    q,
    inverse_scale,
    M,
    K,
    row_stride,
    column_stride,
    down_stride,
    across_stride,
    column_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    """One tile. ALIGNED: M is a multiple of 16. down_stride, across_stride: of the inverse scale, in blocks of x."""
    R: tl.constexpr = ROWS // PARTS
    if ALIGNED:
        M = M // 16 * 16  # as the compiler sees it: tl.multiple_of says nothing about an argument
    block = tl.program_id(0).to(tl.int64)
    first_row = block // column_blocks * ROWS
    first_column = block % column_blocks * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    parts = tile.load_parts(x, first_row, columns, M, K, row_stride, column_stride, ROWS, PARTS, UNIT_STRIDE, "")

    blocks_down = (M + UNIT_ROWS - 1) // UNIT_ROWS
    blocks_across = (K + UNIT_COLUMNS - 1) // UNIT_COLUMNS
    block_columns = first_column // UNIT_COLUMNS + tl.arange(0, COLUMNS // UNIT_COLUMNS)
    scaled = ()
    if UNIT_ROWS == 1:
        # A part's rows have scales of their own.
        for part in tl.static_range(PARTS):
            elements = cast.float_bits(parts[part])
            largest = tile.unit_largest(elements & 0x7FFFFFFF, R, COLUMNS, 1, UNIT_COLUMNS)
            bits = cast.scale_bits(largest, MAX, POW2)
            block_rows = first_row + tl.arange(0, R) * PARTS + part
            _store_scale(
                inverse_scale, bits, block_rows, block_columns, blocks_down, blocks_across, down_stride, across_stride
            )
            factor = tile.spread(bits.to(tl.float32, bitcast=True), R, COLUMNS, 1, UNIT_COLUMNS)
            y = elements.to(tl.float32, bitcast=True) * factor
            scaled = scaled + (y,)  # noqa: RUF005 - Triton compiles no starred expression
    else:
        # The parts interleave, so a block has UNIT_ROWS / PARTS rows of each.
        largest = tile.unit_largest(tile.largest_of(parts, PARTS), R, COLUMNS, UNIT_ROWS // PARTS, UNIT_COLUMNS)
        bits = cast.scale_bits(largest, MAX, POW2)
        block_rows = first_row // UNIT_ROWS + tl.arange(0, ROWS // UNIT_ROWS)
        _store_scale(
            inverse_scale, bits, block_rows, block_columns, blocks_down, blocks_across, down_stride, across_stride
        )
        factor = tile.spread(bits.to(tl.float32, bitcast=True), R, COLUMNS, UNIT_ROWS // PARTS, UNIT_COLUMNS)
        scaled = tile.scaled(parts, factor, PARTS)

    rows = first_row + tl.arange(0, ROWS)
    if TURNED:
        y = tile.turned(scaled, ROWS, COLUMNS, PARTS)
        codes = cast.encode(y, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART)
        mask = (columns < K)[:, None] & (rows < M)[None, :]
        pointers = q + columns[:, None] * M + rows[None, :]
        tl.store(pointers, codes, mask=mask)
        if NAN_APART:
            tile.store_nan_units(pointers, mask, tl.trans(largest), COLUMNS, ROWS, UNIT_COLUMNS, UNIT_ROWS, NAN_CODE)
    else:
        codes = cast.encode(
            scaled[0], MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN, not NAN_APART
        )
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        pointers = q + rows[:, None] * K + columns[None, :]
        tl.store(pointers, codes, mask=mask)
        if NAN_APART:
            tile.store_nan_units(pointers, mask, largest, ROWS, COLUMNS, UNIT_ROWS, UNIT_COLUMNS, NAN_CODE)


@dataclass(frozen=True)
class _Reading:
    """How x is read: as it is, or as its transpose where that has the unit stride."""

    x: torch.Tensor
    unit: tuple[int, int]
    turned: bool
    transposed: bool


def _reading(x: torch.Tensor, unit: str, column_major: bool) -> _Reading:
    unit_rows, unit_columns = UNITS[unit]
    if x.stride(0) == 1 and x.stride(1) != 1:
        return _Reading(x.t(), (unit_columns, unit_rows), not column_major, True)
    return _Reading(x, (unit_rows, unit_columns), column_major, False)


def launch_blockwise(
    x: torch.Tensor,
    fmt: formats.Format,
    unit: str,
    column_major: bool,
    pow2: bool,
    row: BlockwiseConfig | None,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel with a given configuration, or with the table's."""
    (m, k), (unit_rows, unit_columns) = x.shape, UNITS[unit]
    q = torch.empty((k, m) if column_major else (m, k), dtype=torch.uint8, device=x.device)
    shape = (-(-m // unit_rows), -(-k // unit_columns))
    inverse_scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if m and k:
        reading = _reading(x, unit, column_major)
        if row is None:
            row = launch.config(BLOCKWISE_CONFIGS, target, size_class(reading.unit, reading.turned))
        read = reading.x
        (m, k), strides = read.shape, inverse_scale.stride()
        column_blocks = -(-k // row.columns)
        with launch.on_device(x):
            _quantize_blockwise_kernel[(-(-m // row.rows) * column_blocks,)](
                read.view(cast.INPUTS[x.dtype]),
                q,
                inverse_scale,
                m,
                k,
                *read.stride(),
                *(reversed(strides) if reading.transposed else strides),
                column_blocks,
                **_constexprs(row, reading.unit, reading.turned),
                ALIGNED=reading.turned and m % 16 == 0,
                UNIT_STRIDE=read.stride(1) == 1,
                POW2=pow2,
                **cast.constants(fmt, target),
                NAN_APART=_nan_apart(reading.unit, reading.turned, fmt, target),
                **launch.options(row.num_warps, row.programs, target),
                **LAUNCH_OPTIONS,
            )
    q = q.view(fmt.dtype)
    return (q.t() if column_major else q), inverse_scale


def _nan_apart(unit: tuple[int, int], turned: bool, fmt: formats.Format, target: str) -> bool:
    """As cast.nan_apart, where neighbouring codes share a scale: else those stores would be a byte wide."""
    return unit[0 if turned else 1] > 1 and cast.nan_apart(fmt, target)


def _constexprs(row: BlockwiseConfig, unit: tuple[int, int], turned: bool) -> dict[str, object]:
    return {
        "ROWS": row.rows,
        "COLUMNS": row.columns,
        "PARTS": row.parts,
        "UNIT_ROWS": unit[0],
        "UNIT_COLUMNS": unit[1],
        "TURNED": turned,
    }


@torch.library.custom_op(
    "fp8stack::quantize_blockwise",
    mutates_args=(),
    schema="(Tensor x, str fmt, str unit, bool column_major, bool pow2) -> (Tensor, Tensor)",
)
def _quantize_blockwise(x, fmt, unit, column_major, pow2):
    which = launch.implementation(x)
    launch.record("quantize_blockwise", which)
    if which == "reference":
        return quantize_blockwise_reference(x, fmt, unit, column_major, pow2)
    target = device.detect(x.device).target.name
    return launch_blockwise(x, formats.get(fmt), unit, column_major, pow2, None, target)


@_quantize_blockwise.register_fake
def _(x, fmt, unit, column_major, pow2):
    (m, k), (unit_rows, unit_columns) = x.shape, UNITS[unit]
    q = torch.empty((k, m) if column_major else (m, k), dtype=formats.get(fmt).dtype, device=x.device)
    shape = (-(-m // unit_rows), -(-k // unit_columns))
    return (q.t() if column_major else q), torch.empty(shape, dtype=torch.float32, device=x.device)


def quantize_blockwise(
    x: torch.Tensor,
    fmt: str | torch.dtype | formats.Format,
    unit: str = "1x128",
    column_major: bool = False,
    pow2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x with one scale a block.

    x: (M, K), bfloat16 or float32, any strides; x.t() of a row-major x is read in place. unit: "1x128", "128x1" or
    "128x128", rows by columns. column_major: layout of the codes. pow2: round scales down to powers of two.
    Returns codes (M, K) of fmt.dtype and the inverse scale, float32, one number a block, row-major: (M, ceil(K/128)),
    (ceil(M/128), K) or (ceil(M/128), ceil(K/128)); 1 for a block of zeros.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks and units.
    """
    cast.require_input(x, "quantize_blockwise")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}, rows by columns; choose one of these")
    return _quantize_blockwise(x, formats.get(fmt).name, unit, column_major, pow2)


_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTERS = {torch.bfloat16: "*i16", torch.float32: "*i32"}


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite.

    The arch's own e4m3 format for every block and direction, float32 input for the two that recipes use most, and one
    format that the arch lacks.
    """
    row = device.lookup(arch)
    foreign = "e4m3fn" if row.e4m3 == "e4m3fnuz" else "e4m3fnuz"
    cases = [
        *((row.e4m3, torch.bfloat16, unit, turned) for turned in (False, True) for unit in UNITS),
        (row.e4m3, torch.float32, "1x128", False),
        (row.e4m3, torch.float32, "128x1", True),
        (foreign, torch.bfloat16, "128x1", True),
    ]
    return [_compile_spec(formats.get(fmt), dtype, unit, turned, row.name) for fmt, dtype, unit, turned in cases]


def _compile_spec(fmt: formats.Format, dtype: torch.dtype, unit: str, turned: bool, target: str) -> CompileSpec:
    name = size_class(UNITS[unit], turned)
    row = launch.config(BLOCKWISE_CONFIGS, target, name)
    constants = cast.constants(fmt, target)
    options = launch.options(row.num_warps, row.programs, target)
    return CompileSpec(
        kernel=_quantize_blockwise_kernel,
        case=f"blockwise-{name}-{fmt.name}-{_INPUT_NAMES[dtype]}",
        fmt=fmt.name,
        signature={
            "x": _POINTERS[dtype],
            "q": "*u8",
            "inverse_scale": "*fp32",
            **dict.fromkeys(("M", "K", "row_stride", "down_stride", "across_stride", "column_blocks"), "i32"),
        },
        constexprs={
            "column_stride": 1,
            "ALIGNED": turned,
            "UNIT_STRIDE": True,
            "POW2": False,
            **_constexprs(row, UNITS[unit], turned),
            **constants,
            "NAN_APART": _nan_apart(UNITS[unit], turned, fmt, target),
        },
        num_warps=options.pop("num_warps"),
        divisible=("x", "q", "inverse_scale", "K", "row_stride"),
        within_2gb=("x", "q", "inverse_scale"),
        native=constants["NATIVE"] is not None,
        options=options,
    )
