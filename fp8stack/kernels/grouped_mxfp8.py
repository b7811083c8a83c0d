"""Products in groups of MXFP8 operands: codes with an E8M0 scale for each 32 elements along the contraction.

    rows          out[m, n]    = sum_k  a[m, k] 2^(sa[m, k/32] - 127) * b[e, k, n] 2^(sb[e, n, k/32] - 127)
    contraction   out[e, r, c] = the same sum over the m of group e, of a[r, m] and b[m, c]

    | GEMM                | left a                   | its scales     | right b                  | its scales       |
    | forward, rows       | x (M,K) row-major        | (M, K/32)      | W^T (E,K,N) column-major | (E, N, K/32)     |
    | grad input, rows    | dY (M,N) row-major       | (M, N/32)      | W (E,N,K) column-major   | (E, K, N/32)     |
    | grad weight, contr. | dY^T (N,M_pad) row-major | (N, M_pad/32)  | x (M_pad,K) column-major | (K, M_pad/32)    |

Scales are uint8, as quantize_mxfp8 gives them (mxfp8.py): plain rows of bytes, nothing swizzled. They lie inside the
sum, so unlike grouped_gemm.py nothing is left to multiply afterwards. Experts of b may lie side by side along the
contraction, as columns of (E*N, K) quantised at once do: expert and pitch are given apart.

Backends, of which one table picks (SCALED_DOT) and `launch.recording()` tells which it was:

    triton      our kernel, `tl.dot_scaled`: the block-scaled matrix instruction of gfx950 and sm_100
    emulated    our kernel on every other GPU, and in the interpreter: codes decoded, by the target where it converts
                the format, else by our decoder; times their scale, to bf16, which holds the result exactly (but below
                2^-126); and a bf16 dot. `tl.dot_scaled` does not compile for gfx942 with Triton 3.6 and 3.7
    reference   a CPU: float64 sums of what the bytes say, rounded to float32, then once more

The contract is grouped_gemm.py's: empty groups, groups of one row, zeros past the last end and for an expert without
rows, bad ends clamped or, where FP8STACK_CHECK=1, raised. Groups along the contraction must be multiples of
`alignment`, itself a multiple of 32 (a block never straddles groups), else their gradient is NaN, on a CPU an error.
`padded_groups` brings tokens there before they are quantised, with one copy: quantize_mxfp8 knows no groups.

Four neighbouring scale bytes of a row are read as one word, a step of 128 elements: byte loads are as many instructions
as the loads of codes. Where the step, or where rows of scales start, is no multiple of that, bytes are read.

The tiles are grouped_kernel.py's, listed by its kernel; operands arrive by plain loads.
"""

from collections.abc import Sequence

import torch

from fp8stack import _triton, device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import cast, grouped_gemm, grouped_kernel, groups, launch
from fp8stack.kernels.grouped_kernel import LISTED, GroupedConfig
from fp8stack.kernels.mxfp8 import BLOCK

MULTIPLE = BLOCK
"""What K, N and groups along the contraction must be multiples of."""

SCALED_DOT = ("gfx950", "sm_100", "sm_103")
"""Targets with a block-scaled matrix instruction (CDNA 4 ISA: v_mfma_scale; PTX ISA: tcgen05.mma.kind::mxf8f6f4)."""

_UNMEASURED = "not measured yet"
_INTERPRETER = "interpreter, not timed"
_CLASSES = ("rows", "contraction")


def _plain(block_m: int, block_n: int, block_k: int, stages: int) -> GroupedConfig:
    return GroupedConfig(block_m, block_n, block_k, 8, stages, False, False, False, 1, 16, 1, _UNMEASURED)


def _rows_of(targets: Sequence[str], row: GroupedConfig) -> dict[tuple[str, str], GroupedConfig]:
    return {(target, name): row for target in targets for name in _CLASSES}


# (target, groups in the rows or along the contraction) -> configuration; see grouped_kernel.py. A step of 128 is the
# instruction's on gfx950. Emulated, codes become bf16 in registers, so tiles are smaller.
GROUPED_MXFP8_CONFIGS: dict[tuple[str, str], GroupedConfig] = {
    **_rows_of(("gfx950",), _plain(128, 128, 128, 2)),
    **_rows_of(("sm_100", "sm_103"), _plain(128, 128, 128, 3)),
    **_rows_of(("sm_90",), _plain(128, 128, 128, 3)),
    **_rows_of(("sm_120", "sm_89", "sm_87", "sm_86", "sm_80", "sm_75", "sm_70"), _plain(64, 128, 128, 2)),
    **_rows_of(("gfx942", "gfx940", "gfx941", "gfx90a", "gfx908"), _plain(128, 64, 128, 2)),
    **_rows_of(
        ("gfx1200", "gfx1201", *(f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153))),
        _plain(64, 64, 128, 2),
    ),
    # The interpreter runs program after program in Python: few programs; more than one step.
    **_rows_of(("cpu",), GroupedConfig(64, 64, 128, 1, 1, False, False, False, 1, 2, 3, _INTERPRETER)),
}


# ----------------------------------------------------------------------------------------------------------- reference
def _values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 of codes (..., L) with a scale each 32 of them."""
    factor = formats.decode_e8m0(scales).double().repeat_interleave(BLOCK, -1)
    return formats.decode(codes, codes.dtype).double() * factor


def grouped_mxfp8_mm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The specification, in plain torch. Arguments and result as grouped_mxfp8_mm. Reads offs on the host."""
    left, right = _values(a, scales_a), _values(b.transpose(-2, -1), scales_b)
    in_rows = b.dim() == 3
    starts, ends, _ = groups.bounds_reference(offs, a.shape[0 if in_rows else 1], 1)
    out = torch.zeros(_shape(a, b, offs), dtype=torch.float32, device=a.device)
    for group, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if in_rows:
            out[start:end] = left[start:end] @ right[group].t()
        elif end > start:
            out[group] = left[:, start:end] @ right[:, start:end].t()
    return out.to(out_dtype)


def padded_groups(x: torch.Tensor, offs: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M,N) with every group of rows at the next multiple of alignment, zeros between; where the groups then end.

    (M_pad,N), M_pad = groups.padded_rows, and int32 (E,). Does not wait for offs.
    """
    m, e = x.shape[0], offs.shape[0]
    starts, ends, padded_ends = groups.bounds_reference(offs, m, alignment)
    m_pad = groups.padded_rows(m, e, alignment)
    if m == 0:
        return x.new_zeros((m_pad, x.shape[1])), padded_ends
    padded_starts = torch.cat([torch.zeros_like(padded_ends[:1]), padded_ends[:-1]])
    place = torch.arange(m_pad, device=x.device, dtype=torch.int32)
    group = torch.searchsorted(padded_ends, place, right=True).clamp(max=e - 1)
    source = place - padded_starts[group] + starts[group]
    exists = (source < ends[group]) & (place < padded_ends[-1])
    rows = x.index_select(0, torch.where(exists, source, 0))
    return torch.where(exists[:, None], rows, torch.zeros((), dtype=x.dtype, device=x.device)), padded_ends


# -------------------------------------------------------------------------------------------------------------- kernel
@jit
def _factor(byte):
    """float32 of E8M0 bytes: 2^(byte - 127), 255 a NaN, 0 a subnormal."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def _widened(
    codes, scales, TYPE: tl.constexpr, DECODE: tl.constexpr, OUTER: tl.constexpr, DEPTH: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """Values of codes (OUTER, DEPTH) times their scales (OUTER, DEPTH / 32): bf16, or float32 in the interpreter.

    TYPE: the Triton type of codes that the target converts; None: by our decoder.
    """
    if TYPE is None:
        value = cast.decode(codes, DECODE[0], DECODE[1], DECODE[2], DECODE[3], DECODE[4])
    else:
        value = codes.to(TYPE, bitcast=True).to(tl.bfloat16)
    factor = _factor(scales)
    if BF16:
        value, factor = value.to(tl.bfloat16), factor.to(tl.bfloat16)
    return tl.reshape(tl.reshape(value, (OUTER, DEPTH // 32, 32)) * factor[:, :, None], (OUTER, DEPTH))


@jit
def _load(pointers, left, UNIT: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of bytes; zero from `left` on, which UNIT divides."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(tl.arange(0, SIZE) < left // UNIT * UNIT)[None, :], other=0)


@jit
def _load_scales(scales, rows, pitch, at, left, UNIT: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """SIZE scales of each of the rows, from scale `at` of a row on; zero from `left` on. UNIT 4: as words."""
    if UNIT == 4:
        tl.static_assert(WHOLE)
        words = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + rows * pitch + at // 4)
        return ((words[:, None] >> (8 * tl.arange(0, SIZE))[None, :]) & 0xFF).to(tl.uint8)
    else:
        pointers = scales + (rows * pitch)[:, None] + at + tl.arange(0, SIZE)[None, :]
        return _load(pointers, left, 1, SIZE, WHOLE)


@jit(
    do_not_specialize=[
        *("ROWS", "DEPTH", "E", "capacity", "a_pitch", "b_pitch", "b_expert"),
        *("a_scale_pitch", "b_scale_pitch", "b_scale_expert"),
    ]
)
def _grouped_mxfp8_kernel(
    a,
    b,
    a_scales,
    b_scales,
    listed,
    out,
    ROWS,
    COLUMNS,
    DEPTH,
    E,
    capacity,
    a_pitch,
    b_pitch,
    b_expert,
    a_scale_pitch,
    b_scale_pitch,
    b_scale_expert,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_TYPE: tl.constexpr,
    B_TYPE: tl.constexpr,
    A_DECODE: tl.constexpr,
    B_DECODE: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    WHOLE: tl.constexpr,
    BF16: tl.constexpr,
    LISTED: tl.constexpr,
    DIES: tl.constexpr,
):
    """Pitches and b_expert are in units of 16 codes, those of scales in units of SCALE_UNIT bytes."""
    SCALES: tl.constexpr = BLOCK_K // 32
    program, _ = grouped_kernel._program(DIES)
    listed += tl.cast(program, tl.int64) * capacity * LISTED
    mine = tl.load(listed + 7)
    across_m, across_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    along = tl.arange(0, BLOCK_K)
    for place in range(0, mine):
        entry = listed + place * LISTED
        group, start, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row, column = tl.load(entry + 3) * BLOCK_M, tl.load(entry + 4) * BLOCK_N
        if IN_ROWS:
            a_row, first, depth, expert = start + row, 0, DEPTH, group.to(tl.int64)
        else:
            # Multiples of ALIGNMENT as they are listed; the compiler is to know it.
            a_row, first, depth = row, start // ALIGNMENT * ALIGNMENT, size // ALIGNMENT * ALIGNMENT
            expert = group.to(tl.int64) * 0
        # Beyond the last row, or column, the last one again: nothing of it is stored.
        a_rows = (a_row + tl.minimum(across_m, ROWS - a_row - 1)).to(tl.int64)
        b_rows = (column + tl.minimum(across_n, COLUMNS - column - 1)).to(tl.int64)
        a_at = a + first + (a_rows * a_pitch * 16)[:, None] + along[None, :]
        b_at = b + first + (expert * b_expert * 16 + b_rows * b_pitch * 16)[:, None] + along[None, :]
        b_scale_expert_at = b_scales + expert * b_scale_expert * SCALE_UNIT
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, depth, BLOCK_K):
            left = _load(a_at + at, depth - at, 16, BLOCK_K, WHOLE)
            right = _load(b_at + at, depth - at, 16, BLOCK_K, WHOLE)
            block, blocks = (first + at) // 32, (depth - at) // 32
            left_scales = _load_scales(a_scales, a_rows, a_scale_pitch, block, blocks, SCALE_UNIT, SCALES, WHOLE)
            right_scales = _load_scales(
                b_scale_expert_at, b_rows, b_scale_pitch, block, blocks, SCALE_UNIT, SCALES, WHOLE
            )
            if SCALED_DOT:
                total = tl.dot_scaled(left, left_scales, A_FORMAT, right.T, right_scales, B_FORMAT, total)
            else:
                left = _widened(left, left_scales, A_TYPE, A_DECODE, BLOCK_M, BLOCK_K, BF16)
                right = _widened(right, right_scales, B_TYPE, B_DECODE, BLOCK_N, BLOCK_K, BF16)
                total = tl.dot(left, right.T, total)
        if IN_ROWS:
            inside = row + across_m < size
            to = out + (tl.cast(a_row, tl.int64) * COLUMNS + column)
        else:
            inside = row + across_m < ROWS
            to = out + ((tl.cast(group, tl.int64) * ROWS + row) * COLUMNS + column)
            total = tl.where(size > 0, total, tl.load(entry + 5).to(tl.float32, bitcast=True))
        exists = across_n < COLUMNS - column
        pointers = to + (across_m[:, None] * COLUMNS + across_n[None, :])
        tl.store(pointers, total.to(out.dtype.element_ty), mask=inside[:, None] & exists[None, :])


def _decode(dtype: torch.dtype) -> tuple[int, ...]:
    """What cast.decode is told of a format."""
    fmt = formats.get(dtype)
    infinity = fmt.inf_codes[0] if fmt.inf_codes else 0x80
    return fmt.bias, fmt.mantissa_bits, fmt.nan_codes[0], infinity, fmt.nan_code


def _type(dtype: torch.dtype, target: str) -> object:
    """The Triton type of a format whose codes the target converts to bf16 with an instruction, or None."""
    fmt = formats.get(dtype)
    native = not _triton.INTERPRETING and _triton.native_cast(target, fmt.name)
    return cast.native_type(fmt) if native else None


_DOT_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _constexprs(
    a: torch.dtype, b: torch.dtype, row: GroupedConfig, target: str, *, in_rows: bool, whole: bool, words: bool,
    alignment: int,
) -> dict[str, object]:  # fmt: skip
    """What the kernel is compiled for."""
    shared = grouped_kernel._list_constexprs(1, row, target, in_rows, alignment)
    return {
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "BLOCK_K": row.block_k,
        "IN_ROWS": in_rows,
        "ALIGNMENT": alignment,
        "SCALE_UNIT": 4 if words else 1,
        "A_FORMAT": _DOT_FORMATS[a],
        "B_FORMAT": _DOT_FORMATS[b],
        "A_TYPE": _type(a, target),
        "B_TYPE": _type(b, target),
        "A_DECODE": _decode(a),
        "B_DECODE": _decode(b),
        "SCALED_DOT": target in SCALED_DOT and not _triton.INTERPRETING,
        "WHOLE": whole,
        "BF16": not _triton.INTERPRETING,
        "LISTED": LISTED,
        "DIES": shared["DIES"],
    }


def _options(row: GroupedConfig, target: str) -> dict[str, int]:
    options = {"num_warps": row.num_warps, "num_stages": row.stages}
    if target.startswith("gfx9"):
        options["matrix_instr_nonkdim"] = 16
    return options


def _strides(x: torch.Tensor, unit: int) -> tuple[torch.Tensor, int, int]:
    """x (..., outer, depth) contiguous along the depth, its pitch and the distance of experts in units; else a copy."""

    def fits(x: torch.Tensor) -> bool:
        steps = [x.stride(-2), *([x.stride(0)] if x.dim() == 3 else [])]
        return x.stride(-1) == 1 and not any(step % unit for step in steps) and x.data_ptr() % unit == 0

    x = x if fits(x) else x.clone(memory_format=torch.contiguous_format)
    return x, x.stride(-2) // unit, x.stride(0) // unit if x.dim() == 3 else 0


def launch_grouped_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    alignment: int,
    row: GroupedConfig,
    target: str,
) -> torch.Tensor:
    """Launch with a given configuration. Operands as grouped_mxfp8_mm's, none empty."""
    in_rows, e = b.dim() == 3, offs.shape[0]
    (rows, depth), columns, dtypes = a.shape, b.shape[-1], (a.dtype, b.dtype)
    a, a_pitch, _ = _strides(a.view(torch.uint8), 16)
    b, b_pitch, b_expert = _strides(b.view(torch.uint8).transpose(-2, -1), 16)
    whole = (depth if in_rows else alignment) % row.block_k == 0
    # Words of four scale bytes, where rows of scales are words.
    scales_a, scales_b = (x if x.stride(-1) == 1 else x.contiguous() for x in (scales_a, scales_b))
    steps = [step for x in (scales_a, scales_b) for step in (*x.stride()[:-1], x.data_ptr())]
    words = whole and row.block_k == 4 * BLOCK and not any(step % 4 for step in steps)
    scales_a, a_scale_pitch, _ = _strides(scales_a, 4 if words else 1)
    scales_b, b_scale_pitch, b_scale_expert = _strides(scales_b, 4 if words else 1)
    shape = (rows, columns) if in_rows else (e, rows, columns)
    # The interpreter truncates what it stores as bf16.
    out = torch.empty(shape, dtype=torch.float32 if _triton.INTERPRETING else out_dtype, device=a.device)
    row_tiles = rows // row.block_m + e if in_rows else e * -(-rows // row.block_m)
    tiles = row_tiles * -(-columns // row.block_n)
    programs = min(grouped_kernel._multiprocessors(a.device) * row.programs, tiles)
    capacity = -(-tiles // programs)
    listed = torch.empty((programs, capacity, LISTED), dtype=torch.int32, device=a.device)
    with launch.on_device(a):
        grouped_kernel._list_tiles_kernel[(programs,)](
            offs.contiguous(),
            listed,
            out,
            rows,
            columns,
            depth,
            e,
            capacity,
            **grouped_kernel._list_constexprs(e, row, target, in_rows, alignment),
            **LAUNCH_OPTIONS,
        )
        _grouped_mxfp8_kernel[(programs,)](
            a,
            b,
            scales_a,
            scales_b,
            listed,
            out,
            rows,
            columns,
            depth,
            e,
            capacity,
            a_pitch,
            b_pitch,
            b_expert,
            a_scale_pitch,
            b_scale_pitch,
            b_scale_expert,
            **_constexprs(
                *dtypes,
                row,
                target,
                in_rows=in_rows,
                whole=whole,
                words=words,
                alignment=alignment,
            ),
            **_options(row, target),
            **LAUNCH_OPTIONS,
        )
    return out.to(out_dtype)


# ------------------------------------------------------------------------------------------------------------------ op
def choose_backend(a: torch.Tensor) -> str:
    """What multiplies on the device of a: `triton`, `emulated` or `reference`; see the header."""
    if launch.implementation(a) == "reference":
        return "reference"
    return "triton" if device.detect(a.device).target.name in SCALED_DOT else "emulated"


def _shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[-1])


@torch.library.custom_op(
    "fp8stack::grouped_mxfp8_mm",
    mutates_args=(),
    schema=(
        "(Tensor a, str fmt_a, Tensor b, str fmt_b, Tensor scales_a, Tensor scales_b, Tensor offs, int alignment, "
        "ScalarType out_dtype, bool reference) -> Tensor"
    ),
)
def _grouped_mxfp8_mm(a, fmt_a, b, fmt_b, scales_a, scales_b, offs, alignment, out_dtype, reference):
    # Codes arrive as uint8, as in grouped_gemm.py.
    a, b = a.view(formats.get(fmt_a).dtype), b.view(formats.get(fmt_b).dtype)
    backend = "reference" if reference else choose_backend(a)
    launch.record("grouped_mxfp8_mm", backend)
    in_rows = b.dim() == 3
    m, alignment = a.shape[0 if in_rows else 1], 1 if in_rows else alignment
    grouped_gemm._check_offs(offs, m, alignment)
    if 0 in (*a.shape, *b.shape):
        return torch.zeros(_shape(a, b, offs), dtype=out_dtype, device=a.device)
    if backend == "reference":
        out = grouped_mxfp8_mm_reference(a, b, scales_a, scales_b, offs, out_dtype)
        return out if in_rows else grouped_gemm.mended(out, offs, m, alignment)
    target = device.detect(a.device).target.name
    row = launch.config(GROUPED_MXFP8_CONFIGS, target, _CLASSES[0 if in_rows else 1])
    return launch_grouped_mxfp8(a, b, scales_a, scales_b, offs, out_dtype, alignment, row, target)


@_grouped_mxfp8_mm.register_fake
def _(a, fmt_a, b, fmt_b, scales_a, scales_b, offs, alignment, out_dtype, reference):
    return torch.empty(_shape(a, b, offs), dtype=out_dtype, device=a.device)


def grouped_mxfp8_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = MULTIPLE,
    reference: bool = False,
) -> torch.Tensor:
    """Products of MXFP8 operands in groups.

    Groups in the rows: a (M,K), b (E,K,N), scales_a (M,K/32), scales_b (E,N,K/32) -> (M,N); rows past offs[-1] are
    zero. Groups along the contraction: a (N,M), b (M,K), scales_a (N,M/32), scales_b (K,M/32) -> (E,N,K). Codes are of
    an OCP format, a row-major and b column-major; scales are uint8. M of a contraction, K and N are multiples of 32.

    offs: int32 (E,), cumulative ends of the groups. out_dtype: bfloat16 or float32. alignment: what groups along the
    contraction are multiples of. reference: the plain torch of the specification, wherever the tensors are.

    Raises ValueError, naming the dimension or the group, for sizes, layouts, scales and offs that do not fit;
    UnsupportedDtype for codes that are not of an OCP format.
    """
    for x in (a, b):
        if x.dtype not in _DOT_FORMATS:
            raise formats.UnsupportedDtype(
                f"grouped_mxfp8_mm cannot multiply {a.dtype} by {b.dtype} on {a.device.type}; expected float8_e4m3fn "
                "or float8_e5m2: MX formats are OCP's; on a FNUZ device use the rowwise recipe"
            )
    grouped_gemm._require_shapes(a, b, offs)
    grouped_gemm._require_out_dtype(out_dtype)
    in_rows, depth = b.dim() == 3, a.shape[1]
    sizes = {"K": depth, "N": b.shape[-1]} if in_rows else {"N": a.shape[0], "K": b.shape[-1], "M": depth}
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ValueError(
                f"{name} is {size}, not a multiple of {MULTIPLE}; a scale belongs to {MULTIPLE} elements; pad the "
                "tensors before they are quantised"
            )
    if alignment < MULTIPLE or alignment % MULTIPLE:
        raise ValueError(
            f"alignment is {alignment}; expected a multiple of {MULTIPLE}; take what the groups were padded to"
        )
    for name, scales, x in (("scales_a", scales_a, a), ("scales_b", scales_b, b.transpose(-2, -1))):
        wanted = (*x.shape[:-1], depth // BLOCK)
        if scales.dtype != torch.uint8 or tuple(scales.shape) != wanted or scales.device != a.device:
            raise ValueError(
                f"{name} is {scales.dtype} of shape {tuple(scales.shape)} on {scales.device}; expected uint8 {wanted} "
                f"on {a.device}; pass the scales that quantize_mxfp8 returned"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise ValueError(
                f"{name[-1]} has strides {(a if x is a else b).stride()}; expected unit stride along the contraction, "
                "as quantize_mxfp8 writes codes; pass a row-major and b column-major"
            )
    names = formats.get(a.dtype).name, formats.get(b.dtype).name
    codes_a, codes_b = a.view(torch.uint8), b.view(torch.uint8)
    return _grouped_mxfp8_mm(
        codes_a, names[0], codes_b, names[1], scales_a, scales_b, offs, alignment, out_dtype, reference
    )


def compile_specs(arch: str) -> list[CompileSpec]:
    """The production configurations of the kernel on an arch, for the codegen suite: e4m3fn, both forms, K 7168.

    Groups along the contraction are multiples of 128, as experts pad them (moe.py).
    """
    name = device.lookup(arch).name
    specs = []
    for in_rows in (True, False):
        row = launch.config(GROUPED_MXFP8_CONFIGS, name, _CLASSES[0 if in_rows else 1])
        options = _options(row, name)
        pointers = {
            **dict.fromkeys(("a", "b", "a_scales", "b_scales"), "*u8"),
            **{"listed": "*i32", "out": "*bf16"},
        }
        numbers = ("ROWS", "COLUMNS", "DEPTH", "E", "capacity", "a_pitch", "b_pitch", "b_expert")
        numbers += ("a_scale_pitch", "b_scale_pitch", "b_scale_expert")
        constexprs = _constexprs(
            *(torch.float8_e4m3fn, torch.float8_e4m3fn, row, name),
            in_rows=in_rows,
            whole=True,
            words=True,
            alignment=1 if in_rows else 128,
        )
        specs.append(
            CompileSpec(
                kernel=_grouped_mxfp8_kernel,
                case=f"grouped_mxfp8-e4m3fn-{_CLASSES[0 if in_rows else 1]}",
                fmt="e4m3fn",
                signature={**pointers, **dict.fromkeys(numbers, "i32")},
                constexprs=constexprs,
                num_warps=options.pop("num_warps"),
                num_stages=options.pop("num_stages"),
                divisible=(*pointers, "COLUMNS"),
                within_2gb=tuple(pointers),
                encodes=False,
                multiplies="fp8" if constexprs["SCALED_DOT"] else "bf16",
                options=options,
            )
        )
    return specs
