"""The Triton kernel behind scaled_mm.py: the product of two FP8 matrices, its scales applied as it goes.

    out[m, n] = RN( sum over blocks of the contraction ( sum_k a[m, k] * b[k, n] ) * scale_a * scale_b  +  bias[n] )

How scales are applied decides the loop, a tile of BLOCK_M x BLOCK_N numbers held in float32:

    after   one scale a row and a column (or a tensor): all steps add up, scales come last
    block   float32 scales, one for 128 elements of the contraction: a step is 128 long, its product starts from zero,
            is multiplied by the scale of its rows, then by that of its columns, and added. This is also what keeps FP8
            sums exact on sm_90, whose matrix unit keeps about 14 bits: it never sums more than 128 terms
    bytes   E8M0 scales, one for 32 elements: as `block`, a step of 32
    unit    E8M0 scales in the matrix unit itself (tl.dot_scaled), where the target has such an instruction

Operands whose format the target's matrix units lack are decoded to bf16 on the way (`wide`), which holds every FP8
value exactly: so FNUZ codes multiply on an NVIDIA GPU, and OCP codes on MI300X.

Layout: a (M, K) and b transposed (N, K), both contiguous along the contraction and read 16 bytes a lane; rows past the
last are the last one again, and not stored. Scales lie as the quantisers write them, blocks of a row one after the
other: (M, blocks), and (N, blocks) or (ceil(N/128), blocks). Sizes are any multiples of 16; a step may pass the end of
the contraction, where codes are read as zero.

Traffic: a is read once for each tile of columns and b once for each tile of rows, from the L2 where a panel of tiles
shares them; scales are 1/32 of the codes at most. In the interpreter (numerics.md, section 7) codes are decoded by our
own decoder, dots are float32 and results leave as float32.

Not here: the contract and its checks, other backends (scaled_mm.py), groups (grouped_kernel.py).
"""

from dataclasses import dataclass

import torch

from fp8stack import _triton, device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import blockwise, cast, launch, mxfp8
from fp8stack.kernels.grouped_kernel import operand

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ScaledConfig:
    """How to launch for one size class.

    block_m, block_n, block_k: rows, columns and depth of a tile. stages: of the pipeline of loads. panel: row tiles
    that columns sweep over together. measured: what says so.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    panel: int
    measured: str


SCALES = ("after", "block", "bytes", "unit")
"""When scales are applied; see the header."""

_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"


def size_class(scales: str, wide: bool) -> str:
    """The size class of a product: one of SCALES, and whether its codes are decoded first. Sizes are token counts."""
    return f"{scales}{'-wide' if wide else ''}"


_CLASSES = ("after", "block", "bytes", "after-wide", "block-wide", "bytes-wide")


def _rows_of(targets: tuple[str, ...], *configs: ScaledConfig) -> dict[tuple[str, str], ScaledConfig]:
    return {(target, name): row for target in targets for name, row in zip(_CLASSES, configs, strict=True)}


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, stages: int) -> ScaledConfig:
    return ScaledConfig(block_m, block_n, block_k, num_warps, stages, 8, _UNMEASURED)


# (target, size class) -> configuration, in the order of _CLASSES. A step of `block` is 128 long, one of `bytes` 32.
SCALED_CONFIGS: dict[tuple[str, str], ScaledConfig] = {
    **_rows_of(
        ("sm_90", "sm_100", "sm_103"),
        _config(128, 128, 128, 8, 4),
        _config(128, 128, 128, 8, 4),
        _config(128, 128, 32, 8, 4),
        _config(128, 128, 64, 8, 3),
        _config(128, 64, 128, 8, 2),
        _config(128, 128, 32, 8, 3),
    ),
    # 100 KiB of shared memory.
    **_rows_of(
        ("sm_120", "sm_89", "sm_87", "sm_86", "sm_80"),
        _config(128, 128, 64, 8, 3),
        _config(128, 128, 128, 8, 2),
        _config(128, 128, 32, 8, 3),
        _config(128, 128, 32, 8, 2),
        _config(64, 64, 128, 4, 2),
        _config(128, 128, 32, 8, 2),
    ),
    **_rows_of(
        ("gfx942", "gfx950", "gfx940", "gfx941", "gfx90a", "gfx908"),
        _config(128, 128, 128, 8, 2),
        _config(128, 128, 128, 8, 2),
        _config(128, 128, 32, 4, 2),
        _config(128, 128, 64, 8, 2),
        _config(64, 64, 128, 4, 2),
        _config(128, 128, 32, 4, 2),
    ),
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        _config(128, 128, 64, 8, 2),
        _config(128, 64, 128, 8, 2),
        _config(128, 128, 32, 8, 2),
        _config(64, 64, 64, 4, 2),
        _config(64, 64, 128, 4, 2),
        _config(64, 64, 32, 4, 2),
    ),
    # The interpreter runs program after program in Python: few programs, large tiles.
    **_rows_of(
        ("cpu",),
        *(
            ScaledConfig(64, 64, depth, 1, 1, 2, _INTERPRETER)
            for depth in (64, blockwise.BLOCK, mxfp8.BLOCK, 64, blockwise.BLOCK, mxfp8.BLOCK)
        ),
    ),
    # A product from zero is another tile of registers beside the sum: with 128 columns they spill.
    ("sm_100", "block"): _config(128, 64, 128, 8, 4),
    ("sm_103", "block"): _config(128, 64, 128, 8, 4),
    # A matrix instruction of gfx950 takes 128 elements and their four scales.
    ("gfx950", "unit"): _config(128, 128, 128, 8, 2),
    ("sm_100", "unit"): _config(128, 128, 128, 8, 3),
    ("sm_103", "unit"): _config(128, 128, 128, 8, 3),
}


def scales_in_unit(target: str) -> bool:
    """Whether the target has a matrix instruction that takes E8M0 scales (and this process compiles for it)."""
    return (target, "unit") in SCALED_CONFIGS and not _triton.INTERPRETING


@jit
def _pointers(pointer, first, limit, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers to BLOCK rows from `first` on; beyond `limit` more rows, the last one again. A 64-bit start."""
    across, along = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    start = pointer + tl.cast(first, tl.int64) * stride
    return start + (tl.minimum(across, limit - 1)[:, None] * stride + along[None, :])


@jit
def _load_step(pointers, left, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """The tile at pointers, zero from depth `left` on, which is a multiple of 16. WHOLE: no step passes the end."""
    if WHOLE:
        return tl.load(pointers)
    else:
        inside = tl.arange(0, BLOCK_K) < left // 16 * 16
        return tl.load(pointers, mask=inside[None, :], other=0.0)


@jit
def _values(elements, DECODE: tl.constexpr, BF16: tl.constexpr):
    """What a dot takes: the elements, or what their codes stand for (DECODE their format), as float32 or BF16."""
    if DECODE is not None:
        elements = cast.decode(elements, DECODE[0], DECODE[1], DECODE[2], DECODE[3], DECODE[4])
        if BF16:
            elements = elements.to(tl.bfloat16)
    return elements


@jit
def _power(byte):
    """2^(byte - 127) in float32, byte 0 a subnormal; 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@jit
def _lines(first, limit, blocks, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Where the scales of BLOCK rows from `first` on begin, as 32-bit steps from the first; one place if they share it.

    UNIT: rows that share a scale. Beyond `limit` more rows, the last one again.
    """
    if UNIT % BLOCK == 0:
        return 0
    else:
        return tl.minimum(tl.arange(0, BLOCK), limit - 1) // UNIT * blocks


@jit
def _step_scale(scales, lines, step, BYTES: tl.constexpr, WORDS: tl.constexpr):
    """float32 scales of a step of one scale, of the rows whose `lines` begin there.

    BYTES: they are E8M0. WORDS: those of a row are a multiple of 4, and are read 4 at a time: no access is a byte wide.
    """
    if not BYTES:
        return tl.load(scales + step + lines)
    elif WORDS:
        words = (scales + step // 4 * 4).to(tl.pointer_type(tl.int32))
        return _power(tl.load(words + lines // 4) >> (8 * (step % 4)) & 0xFF)
    else:
        return _power(tl.load(scales + step + lines))


@jit
def _step_bytes(scales, lines, step, left, BLOCK: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """E8M0 bytes (BLOCK, COUNT) of a step of COUNT scales, as _step_scale; 1 from depth `left` on."""
    if WORDS:
        words = (scales + step * COUNT).to(tl.pointer_type(tl.int32))
        found = tl.load(words + (lines // 4)[:, None] + tl.arange(0, COUNT // 4)[None, :])
        found = found[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
        return tl.reshape(found & 0xFF, (BLOCK, COUNT)).to(tl.uint8)
    else:
        at = tl.arange(0, COUNT)
        return tl.load(scales + step * COUNT + lines[:, None] + at[None, :], mask=(32 * at < left)[None, :], other=127)


# M or K is the number of tokens: not specialised, or each divisibility by 16 would compile anew; nor what follows.
@jit(do_not_specialize=["M", "K", "blocks", "a_pitch", "b_pitch"])
def _scaled_kernel(
    a,
    b,
    inverse_scale_a,
    inverse_scale_b,
    bias,
    out,
    M,
    N,
    K,
    blocks,
    a_pitch,
    b_pitch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PANEL: tl.constexpr,
    SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    WORDS: tl.constexpr,
    A_TYPE: tl.constexpr,
    B_TYPE: tl.constexpr,
    A_DECODE: tl.constexpr,
    B_DECODE: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile. blocks: scales of a row. a_pitch, b_pitch: rows are so many 16 bytes apart.

    SHARED: columns of b that share a scale. WORDS: E8M0 scales of a row are a multiple of 4. A_TYPE, B_TYPE: what codes
    are read as, None for integers; for SCALES == "unit" the names of their formats. EXACT: SCALES == "after" with a
    float32 sum of each step.
    """
    # Columns sweep over panels of PANEL row tiles: what runs at one time shares few rows of a and few columns of b.
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    panel = tile // (PANEL * column_tiles)
    tile -= panel * (PANEL * column_tiles)
    height = tl.minimum(row_tiles - panel * PANEL, PANEL)
    row, column = (panel * PANEL + tile % height) * BLOCK_M, tile // height * BLOCK_N

    if A_TYPE is not None and SCALES != "unit":
        a = a.to(tl.pointer_type(A_TYPE), bitcast=True)
        b = b.to(tl.pointer_type(B_TYPE), bitcast=True)
    a_at = _pointers(a, row, M - row, a_pitch * 16, BLOCK_M, BLOCK_K)
    b_at = _pointers(b, column, N - column, b_pitch * 16, BLOCK_N, BLOCK_K)
    if WORDS:
        blocks = blocks // 4 * 4  # as the compiler sees it
    scale_a = inverse_scale_a + tl.cast(row, tl.int64) * blocks
    scale_b = inverse_scale_b + tl.cast(column // SHARED, tl.int64) * blocks
    lines_a = _lines(row, M - row, blocks, BLOCK_M, 1)
    lines_b = _lines(column, N - column, blocks, BLOCK_N, SHARED)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        x = _values(_load_step(a_at, left, BLOCK_K, WHOLE), A_DECODE, BF16)
        y = _values(_load_step(b_at, left, BLOCK_K, WHOLE), B_DECODE, BF16)
        a_at += BLOCK_K
        b_at += BLOCK_K
        if SCALES == "after":
            if EXACT:
                total = tl.dot(x, y.T, total, max_num_imprecise_acc=BLOCK_K)
            else:
                total = tl.dot(x, y.T, total)
        elif SCALES == "unit":
            scale_x = _step_bytes(scale_a, lines_a, step, left, BLOCK_M, BLOCK_K // 32, WORDS)
            scale_y = _step_bytes(scale_b, lines_b, step, left, BLOCK_N, BLOCK_K // 32, WORDS)
            total = tl.dot_scaled(x, scale_x, A_TYPE, y.T, scale_y, B_TYPE, total)
        else:
            scale_x = _step_scale(scale_a, lines_a, step, SCALES == "bytes", WORDS)
            scale_y = _step_scale(scale_b, lines_b, step, SCALES == "bytes", WORDS)
            if SHARED % BLOCK_N != 0:
                scale_y = scale_y[None, :]
            # One after the other: of a small gradient and a small weight, the product of the scales alone is zero.
            part = tl.dot(x, y.T) * scale_x[:, None]
            total = tl.fma(part, tl.broadcast_to(scale_y, (BLOCK_M, BLOCK_N)), total)

    across_m, across_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if SCALES == "after":
        total = total * tl.load(inverse_scale_a + row + across_m, mask=across_m < M - row, other=0.0)[:, None]
        total = total * tl.load(inverse_scale_b + column + across_n, mask=across_n < N - column, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + column + across_n, mask=across_n < N - column, other=0.0)[None, :]
    to = out + (tl.cast(row, tl.int64) * N + column)
    inside = (across_m < M - row)[:, None] & (across_n < N - column)[None, :]
    tl.store(to + (across_m[:, None] * N + across_n[None, :]), total.to(out.dtype.element_ty), mask=inside)


def _element(fmt: formats.Format, scales: str, wide: bool) -> dict[str, object]:
    """What the kernel is compiled for, for an operand of that format: its type, or how to decode its codes."""
    if scales == "unit":
        return {"TYPE": fmt.name[:4], "DECODE": None}
    if wide or _triton.INTERPRETING:
        infinity = fmt.inf_codes[0] if fmt.inf_codes else 0x80
        return {"TYPE": None, "DECODE": (fmt.bias, fmt.mantissa_bits, fmt.nan_codes[0], infinity, fmt.nan_code)}
    return {"TYPE": cast.native_type(fmt), "DECODE": None}


def _constexprs(
    a: formats.Format,
    b: formats.Format,
    row: ScaledConfig,
    scales: str,
    *,
    shared: int,
    words: bool,
    wide: bool,
    bias: bool,
    whole: bool,
    exact: bool,
) -> dict[str, object]:
    """What _scaled_kernel is compiled for."""
    return {
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "BLOCK_K": row.block_k,
        "PANEL": row.panel,
        "SCALES": scales,
        "SHARED": shared,
        "WORDS": words,
        **{f"A_{name}": value for name, value in _element(a, scales, wide).items()},
        **{f"B_{name}": value for name, value in _element(b, scales, wide).items()},
        "BF16": wide and not _triton.INTERPRETING,
        "BIAS": bias,
        "WHOLE": whole,
        "EXACT": exact and scales == "after" and not wide,
    }


def _options(row: ScaledConfig, target: str) -> dict[str, int]:
    options = {"num_warps": row.num_warps, "num_stages": row.stages}
    if target.startswith("gfx9"):
        options["matrix_instr_nonkdim"] = 16
    if target.startswith("gfx94"):
        options["kpack"] = 2
    return options


def launch_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    scales: str,
    shared: int,
    wide: bool,
    exact: bool,
    row: ScaledConfig,
    target: str,
) -> torch.Tensor:
    """Launch the kernel with a given configuration. For the op, and for timing one row against another.

    a (M, K), b (K, N): FP8, not empty. Inverse scales by `scales`, contiguous: "after" float32 (M,) and (N,); "block"
    float32, "bytes" and "unit" uint8, (M, blocks) and (ceil(N/shared), blocks). shared: columns of b that share a
    scale. wide: decode to bf16 first. exact: no fast accumulation.
    """
    (m, k), n = a.shape, b.shape[1]
    fmt_a, fmt_b = formats.get(a.dtype), formats.get(b.dtype)
    a, _, a_pitch = operand(a)
    b, _, b_pitch = operand(b.t())
    height, pitch = max(row.block_m, row.block_n), max(a_pitch, b_pitch)
    if height * max(pitch, n) > _INT32_MAX:
        raise ValueError(
            f"rows are {max(pitch, n)} elements apart; expected at most 2^31 / {height}: steps inside a tile are 32 "
            "bits wide; pass contiguous tensors, or fewer columns at a time"
        )
    # The interpreter truncates what it stores as bf16.
    out = torch.empty((m, n), dtype=torch.float32 if _triton.INTERPRETING else out_dtype, device=a.device)
    whole, blocks = k % row.block_k == 0, inverse_scale_a.shape[1] if scales != "after" else 0
    aligned = inverse_scale_a.data_ptr() % 4 == inverse_scale_b.data_ptr() % 4 == 0
    words = scales in ("bytes", "unit") and blocks % 4 == 0 and whole and aligned
    with launch.on_device(a):
        _scaled_kernel[(-(-m // row.block_m) * -(-n // row.block_n),)](
            a.view(torch.uint8),
            b.view(torch.uint8),
            inverse_scale_a,
            inverse_scale_b,
            out if bias is None else bias.to(torch.float32),
            out,
            m,
            n,
            k,
            blocks,
            a_pitch // 16,
            b_pitch // 16,
            **_constexprs(
                fmt_a,
                fmt_b,
                row,
                scales,
                shared=shared,
                words=words,
                wide=wide,
                bias=bias is not None,
                whole=whole,
                exact=exact,
            ),
            **_options(row, target),
            **LAUNCH_OPTIONS,
        )
    return out.to(out_dtype)


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite.

    Products of the arch's own e4m3 with scales of blocks, for a weight and for a gradient of one, and with scales of
    rows, float32 output; MXFP8 by the way the arch has, which is decoded codes where it has no e4m3fn.
    """
    found = device.lookup(arch)
    name, own = found.name, formats.get(found.e4m3)
    mx = formats.get("e4m3fn")
    specs = []
    if found.native_fp8_matmul:
        specs += [
            _compile_spec(name, own, "block", blockwise.BLOCK, False, "weight", torch.bfloat16),
            _compile_spec(name, own, "block", 1, False, "gradient", torch.bfloat16),
            _compile_spec(name, own, "after", 1, False, "rows", torch.float32),
        ]
    scales = "unit" if (name, "unit") in SCALED_CONFIGS else "bytes"
    wide = not (found.native_fp8_matmul and own == mx)
    specs.append(_compile_spec(name, mx, scales, 1, wide, "mxfp8", torch.bfloat16))
    return specs


def _compile_spec(
    target: str, fmt: formats.Format, scales: str, shared: int, wide: bool, case: str, out_dtype: torch.dtype
) -> CompileSpec:
    row = launch.config(SCALED_CONFIGS, target, size_class(scales, wide))
    options = _options(row, target)
    scale = "*u8" if scales in ("bytes", "unit") else "*fp32"
    out = "*bf16" if out_dtype == torch.bfloat16 else "*fp32"
    pointers = {"a": "*u8", "b": "*u8", "inverse_scale_a": scale, "inverse_scale_b": scale, "bias": out, "out": out}
    return CompileSpec(
        kernel=_scaled_kernel,
        case=f"scaled_mm-{fmt.name}-{case}",
        fmt=fmt.name,
        signature={**pointers, **dict.fromkeys(("M", "N", "K", "blocks", "a_pitch", "b_pitch"), "i32")},
        constexprs=_constexprs(
            fmt,
            fmt,
            row,
            scales,
            shared=shared,
            words=scales in ("bytes", "unit"),
            wide=wide,
            bias=False,
            whole=True,
            exact=scales == "after",
        ),
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        divisible=(*pointers, "N"),
        within_2gb=tuple(pointers),
        encodes=False,
        multiplies="bf16" if wide else "mxfp8" if scales == "unit" else "fp8",
        options=options,
    )
