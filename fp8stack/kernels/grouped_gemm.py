"""Products in groups: the GEMMs of experts, in FP8 with the scales taken out afterwards, and in bf16.

Tokens are sorted by expert; offs (int32, E) says where the rows of each expert end. An expert layer y = x W^T is three
GEMMs, of which two divide the *rows* into groups and one the *contraction*; b is 3-D in the former, 2-D in the latter:

    rows          out (M,N)   = a (M,K)  . b (E,K,N), each group of rows with its own matrix
    contraction   out (E,N,K) = a (N,M)  . b (M,K), each group of M by itself

    | GEMM                  | left a                  | its scale | right b                       | its scale |
    | forward, rows         | x (M,K) row-major       | (M,)      | W^T (E,K,N) column-major      | (E,N)     |
    | grad input, rows      | dY (M,N) row-major      | (M,)      | W (E,N,K) column-major        | (E,K)     |
    | grad weight, contr.   | dY^T (N,M_pad) row-major| (E,N)     | x (M_pad,K) column-major      | (E,K)     |

    out = RN( sum * inverse_scale_a[row] * inverse_scale_b[column] )        inverse scales, float32, contiguous

Backends, of which a table picks one (_TABLE) and `launch.recording()` tells which it was:

    torch       torch._scaled_grouped_mm, torch._grouped_mm: hipBLASLt or Composable Kernel, CUTLASS. e4m3 by e4m3, bf16
                out. UNCALIBRATED on ROCm: what it is called with is tested, it has not run on such a GPU here
    triton      our own kernel (grouped_kernel.py): every target, pair of formats and output. On an H200 it is 1.08 to
                1.42 times as fast as torch's (baselines/LOG.md), along the contraction in groups of whole steps
                (preferred_alignment)
    reference   any device and size: float64 sums rounded to float32, then one inverse scale, the other, one rounding
    simulated   for a format that the hardware lacks, only while FP8STACK_ARCH asks for it: the codes decoded to bf16,
                which holds every FP8 value exactly, multiplied with float32 output by our kernel

Contract, for all of them. Groups may be empty, anywhere, or of one row. Rows past the last end come out as zero, and so
does the weight gradient of an expert without rows. offs is read as groups.py says: what decreases, is negative or lies
past the rows raises where FP8STACK_CHECK=1, and otherwise is clamped before any backend sees it. K and N must be
multiples of 16 (of 8 for bf16); pad=True appends zeros instead.

Groups along the contraction must be multiples of `alignment`, 16 for FP8: that is how the quantisers write them, and an
unaligned one is a device-side assert inside torch, which ends the process. Here it raises on a CPU and where
FP8STACK_CHECK=1; elsewhere, as nobody can know without waiting for the device, its gradient comes out as NaN, never as
a plausible number. pad=True takes any groups: they are copied to multiples first. bf16 takes any groups anyway.

Not here: one pair of matrices (scaled_mm.py), blockwise and E8M0 scales, the layer (moe.py).
"""

import os
from collections.abc import Sequence

import torch

from fp8stack import device, formats
from fp8stack._triton import LAUNCH_OPTIONS, CompileSpec, jit, tl
from fp8stack.kernels import grouped_kernel, groups, launch

MULTIPLE = 16
"""What K and N must be multiples of in FP8, and groups along the contraction."""

MULTIPLE_BF16 = 8

BACKENDS = ("torch", "triton", "reference", "simulated")

CHECK = "FP8STACK_CHECK"
"""Set to 1, every call looks at its offs first and raises for bad ones. It waits for the device to do so."""

# Where torch has a grouped GEMM that does not read offs back to the host. On ROCm the bf16 one may.
_TORCH_FP8 = ("sm_90", "sm_100", "gfx942", "gfx950")
_TORCH_BF16 = ("sm_90", "sm_100")

# Where our kernel was measured to be the faster, unless a step of its loop may pass the end of a group.
_OURS_FP8 = ("sm_90",)

# FP8: the first row that matches decides. None: any. A CPU is matched before this table: as launch.implementation says.
_Row = tuple[Sequence[str] | None, bool | None, bool | None, bool | None, bool | None, bool | None, str]
_TABLE: tuple[_Row, ...] = (
    # targets, matrix instructions, formats of the target, of the arch, e4m3 by e4m3 to bf16, whole steps -> backend
    (_OURS_FP8, True, True, None, None, True, "triton"),
    (_TORCH_FP8, True, True, None, True, None, "torch"),
    (None, True, True, None, None, None, "triton"),
    (None, False, True, None, None, None, "reference"),  # emulated arch
    (None, None, False, True, None, None, "simulated"),  # the override's formats
)

# bf16, likewise.
_TABLE_BF16: tuple[tuple[Sequence[str] | None, bool | None, bool | None, str], ...] = (
    # targets, groups in the rows, bf16 out -> backend
    (_TORCH_BF16, True, True, "torch"),
    (None, None, None, "triton"),  # torch's product along the contraction asserts unless groups are multiples of 8
)


def _on_cpu() -> str:
    return launch.implementation(torch.empty(0, device="cpu"))  # whatever the default device is


def _step(target: str, exact: bool) -> int:
    """Elements of the contraction that our kernel takes in one step, groups along it."""
    kind = "fp8-exact" if exact else "fp8"
    return launch.config(grouped_kernel.GROUPED_CONFIGS, target, grouped_kernel.size_class(False, kind)).block_k


def preferred_alignment(target: str, fast_accum: bool) -> int:
    """What groups along the contraction are best padded to for a target such as "sm_90": see quantize_colwise_grouped.

    Whole steps where our kernel then is the fastest, else MULTIPLE. Of the target only: padding must not depend on how
    many tokens there are.
    """
    return _step(target, exact=not fast_accum) if target in _OURS_FP8 else MULTIPLE


def choose_backend(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    alignment: int = MULTIPLE,
    fast_accum: bool = False,
) -> str:
    """The backend for two FP8 operands on their device, by the table; on a CPU the kernel while interpreting.

    alignment, fast_accum: as grouped_scaled_mm. Raises UnsupportedDtype for a format that the device lacks, UnknownArch
    for a device without a row.
    """
    found = device.detect(a.device)
    if found.target.vendor == "cpu":
        return _on_cpu()
    names = [formats.get(x.dtype).name for x in (a, b)]
    own = all(name in (found.target.e4m3, found.target.e5m2) for name in names)
    arch = all(name in (found.arch.e4m3, found.arch.e5m2) for name in names)
    plain = all(name.startswith("e4m3") for name in names) and out_dtype == torch.bfloat16
    whole = b.dim() == 3 or alignment % _step(found.target.name, exact=not fast_accum) == 0
    for targets, hardware, of_target, of_arch, is_plain, is_whole, backend in _TABLE:
        if (
            (targets is None or found.target.name in targets)
            and hardware in (None, found.target.native_fp8_matmul)
            and of_target in (None, own)
            and of_arch in (None, arch)
            and is_plain in (None, plain)
            and is_whole in (None, whole)
        ):
            return backend
    raise formats.UnsupportedDtype(
        f"grouped_scaled_mm cannot multiply {a.dtype} by {b.dtype} on {found.target.name}; expected "
        f"{found.target.e4m3} or {found.target.e5m2} there ({found.reason}); to simulate another arch set "
        f"{device.OVERRIDE}, for example {device.OVERRIDE}=gfx942, or pass backend='reference'"
    )


def choose_backend_bf16(a: torch.Tensor, in_rows: bool, out_dtype: torch.dtype = torch.bfloat16) -> str:
    """The backend for two bf16 operands on their device; float32 runs the reference everywhere."""
    if a.dtype == torch.float32:
        return "reference"
    target = device.detect(a.device).target
    if target.vendor == "cpu":
        return _on_cpu()
    narrow = out_dtype == torch.bfloat16
    for targets, rows, is_narrow, backend in _TABLE_BF16:
        if (targets is None or target.name in targets) and rows in (None, in_rows) and is_narrow in (None, narrow):
            return backend
    raise AssertionError("the last row of _TABLE_BF16 matches everything")


# ------------------------------------------------------------------------------------------------------------- offsets
def require_good_offs(offs: torch.Tensor, m: int, alignment: int = 1) -> None:
    """Raise ValueError, naming the group, for ends that decrease, leave [0, m] or are no multiple of alignment.

    Reads offs: on a GPU that waits for it.
    """
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end < start:
            before = f"the group before it ends at {start}" if group else "the first group starts at 0"
            raise ValueError(
                f"group {group} ends at {end}, but {before}; expected ends that never decrease, the first not "
                "negative; pass the cumulative sum of the group sizes"
            )
        if end > m:
            raise ValueError(
                f"group {group} ends at {end}, but there are {m} rows; expected the last end to be at most the number "
                "of rows; check what the sizes were counted on"
            )
        if (end - start) % alignment:
            raise ValueError(
                f"group {group} has {end - start} rows along the contraction, not a multiple of {alignment}; the "
                "matrix hardware takes no others; quantise with quantize_colwise_grouped, which pads, or pass pad=True"
            )


def _check_offs(offs: torch.Tensor, m: int, alignment: int) -> None:
    """What of require_good_offs is due here: everything where FP8STACK_CHECK=1, on a CPU the alignment."""
    if os.environ.get(CHECK) == "1":
        require_good_offs(offs, m, alignment)
    elif offs.device.type == "cpu" and alignment > 1:
        require_good_offs(groups.bounds_reference(offs, m, 1)[1], m, alignment)


@torch.library.custom_op("fp8stack::checked_offs", mutates_args=(), schema="(Tensor offs, int m) -> Tensor")
def _checked_offs(offs, m):
    """offs, after _check_offs of ends alone: an op, so that a compiled graph looks at them too, and when it runs."""
    _check_offs(offs, m, 1)
    return offs.clone()


@_checked_offs.register_fake
def _(offs, m):
    return torch.empty_like(offs)


@jit(do_not_specialize=["M"])
def _settle_offs_kernel(offs, ends, M, E, LANES: tl.constexpr, ALIGNMENT: tl.constexpr):
    lanes = tl.arange(0, LANES)
    starts, sizes = groups.extents(offs, M, E, LANES)
    tl.store(ends + lanes, (starts + sizes) // ALIGNMENT * ALIGNMENT, mask=lanes < E)


def _by_kernel(x: torch.Tensor) -> bool:
    """Whether a small kernel prepares and mends a library's product, or plain torch; on the meta device the latter."""
    return x.device.type != "meta" and launch.implementation(x) == "triton"


def settled(offs: torch.Tensor, m: int, alignment: int = 1) -> torch.Tensor:
    """offs as torch may see them: in [0, m], never decreasing, rounded down to multiples. Works on the device."""
    if not _by_kernel(offs):
        return groups.bounds_reference(offs, m, 1)[1] // alignment * alignment
    ends, e = torch.empty_like(offs), offs.shape[0]
    with launch.on_device(offs):
        _settle_offs_kernel[(1,)](
            offs.contiguous(), ends, m, e, LANES=groups.lanes(e), ALIGNMENT=alignment, num_warps=1, **LAUNCH_OPTIONS
        )
    return ends


@jit(do_not_specialize=["M", "E"])
def _mend_kernel(
    out, offs, M, COLUMNS, GROUP, E, LANES: tl.constexpr, IN_ROWS: tl.constexpr, ALIGNMENT: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, sizes = groups.extents(offs, M, E, LANES)
    if IN_ROWS:
        grouped_kernel.clear_rows(out, tl.max(starts + sizes, 0), M, COLUMNS, program, programs, CLEARED)
    else:
        lanes = tl.arange(0, LANES)
        broken = ((starts % ALIGNMENT != 0) | (sizes % ALIGNMENT != 0)) & (sizes > 0)
        if tl.sum(tl.where((lanes < E) & (broken | (sizes == 0)), 1, 0), 0) > 0:
            for group in range(0, E):
                bits = tl.where(broken, 0x7FC00000, tl.where(sizes == 0, 0, 1))
                bits = tl.sum(tl.where(lanes == group, bits, 0), 0)
                if bits != 1:
                    value = tl.full((CLEARED,), 0, tl.int32) + bits
                    value = value.to(tl.float32, bitcast=True).to(out.dtype.element_ty)
                    first = out + tl.cast(group, tl.int64) * GROUP
                    for block in range(program, tl.cdiv(GROUP, CLEARED), programs):
                        at = tl.cast(block, tl.int64) * CLEARED + tl.arange(0, CLEARED)
                        tl.store(first + at, value, mask=at < GROUP)


_CLEARED = 4096
_MEND_PROGRAMS = 256


def mended(out: torch.Tensor, offs: torch.Tensor, m: int, alignment: int) -> torch.Tensor:
    """out of a library, in place as the contract wants it: zeros where no rows are, NaN for unaligned groups.

    out: (m, N), of groups in the rows, or (E, N, K). Libraries leave there what was in memory (pytorch/pytorch#154557,
    #172439, tgale96/grouped_gemm#36). Nothing is written where nothing has to be.
    """
    in_rows, e = out.dim() == 2, offs.shape[0]
    if not _by_kernel(out):
        starts, ends, _ = groups.bounds_reference(offs, m, 1)
        if in_rows:
            out[int(ends[-1]) :] = 0.0
            return out
        out[ends == starts] = 0.0
        out[(ends > starts) & ((starts % alignment != 0) | (ends % alignment != 0))] = float("nan")
        return out
    assert out.is_contiguous()
    with launch.on_device(out):
        _mend_kernel[(_MEND_PROGRAMS if out.device.type == "cuda" else 2,)](
            out,
            offs.contiguous(),
            m,
            out.shape[-1],
            out[0].numel(),
            e,
            LANES=groups.lanes(e),
            IN_ROWS=in_rows,
            ALIGNMENT=alignment,
            CLEARED=_CLEARED,
            **LAUNCH_OPTIONS,
        )
    return out


def pad_groups(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (N,M) and b (M,K) with every group of M at the next multiple of alignment, zeros between; the ends of that.

    For operands that come unpadded; M at least 1. a comes out row-major, b column-major. Does not wait for offs.
    """
    m, e = a.shape[1], offs.shape[0]
    starts, ends, padded_ends = groups.bounds_reference(offs, m, alignment)
    padded_starts = torch.cat([torch.zeros_like(padded_ends[:1]), padded_ends[:-1]])
    place = torch.arange(groups.padded_rows(m, e, alignment), device=a.device, dtype=torch.int32)
    group = torch.searchsorted(padded_ends, place, right=True).clamp(max=e - 1)
    source = place - padded_starts[group] + starts[group]
    exists = (source < ends[group]) & (place < padded_ends[-1])
    source = torch.where(exists, source, 0)

    def moved(x: torch.Tensor) -> torch.Tensor:
        integers = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
        return torch.where(exists, integers.index_select(1, source), 0).to(integers.dtype).view(x.dtype)

    return moved(a), moved(b.t()).t(), padded_ends


# ----------------------------------------------------------------------------------------------------------- reference
def _products(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, columns: int
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """float32 sums of groups, (M,N) or (E,N,K), zero where no rows are; and the bounds of the groups. Reads offs.

    left: (M,K) or (N,M). right: (E,N,K) or (K,M), contiguous along the contraction. Any float dtype.
    """
    in_rows = right.dim() == 3
    m = left.shape[0 if in_rows else 1]
    starts, ends, _ = groups.bounds_reference(offs, m, 1)
    bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
    shape = (m, columns) if in_rows else (len(bounds), left.shape[0], columns)
    product = torch.zeros(shape, dtype=torch.float32, device=left.device)
    for group, (start, end) in enumerate(bounds):
        if start == end:
            continue
        # float64: a sum of e4m3 products is exact there; see scaled_mm.py. Libraries refuse what is no multiple of 16
        # bytes (pytorch/pytorch#172440): hence plain products, one a group.
        if in_rows:
            product[start:end] = _widened(left[start:end]) @ _widened(right[group]).t()
        else:
            product[group] = _widened(left[:, start:end]) @ _widened(right[:, start:end]).t()
    return product, bounds


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Codes or numbers as float64."""
    return formats.decode(x, x.dtype, torch.float64) if x.itemsize == 1 else x.double()


def grouped_scaled_mm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The specification, in plain torch; any sizes and groups. Arguments and result as grouped_scaled_mm."""
    product, bounds = _products(a, b.transpose(-2, -1), offs, b.shape[-1])
    for group, (start, end) in enumerate(bounds):
        if start == end:
            continue
        if b.dim() == 3:
            product[start:end] *= inverse_scale_a[start:end, None]
            product[start:end] *= inverse_scale_b[group]
        else:
            product[group] *= inverse_scale_a[group, :, None]
            product[group] *= inverse_scale_b[group]
    return product.to(out_dtype)


def grouped_mm_reference(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The specification, in plain torch; any sizes and groups. Arguments and result as grouped_mm."""
    return _products(a, b.transpose(-2, -1), offs, b.shape[-1])[0].to(out_dtype or a.dtype)


# ------------------------------------------------------------------------------------------------------------ backends
def _simulated(a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype, alignment):
    if a.device.type == "cpu":  # float32 sums; torch has no bf16 product with float32 output there
        return grouped_scaled_mm_reference(a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype)
    left, right = (formats.decode(x, x.dtype).to(torch.bfloat16) for x in (a, b.transpose(-2, -1)))
    right = right.transpose(-2, -1)
    return _triton(left, right, inverse_scale_a, inverse_scale_b, offs, out_dtype, alignment, exact=False)


def _triton(a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype, alignment, exact):
    target = device.detect(a.device).target.name
    kind = "bf16" if a.dtype == torch.bfloat16 else "fp8-exact" if exact else "fp8"
    size_class = grouped_kernel.size_class(b.dim() == 3, kind)
    row = launch.config(grouped_kernel.GROUPED_CONFIGS, target, size_class)
    return grouped_kernel.launch_grouped(
        a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype, alignment, exact, row, target
    )


def call_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor | None,
    inverse_scale_b: torch.Tensor | None,
    ends: torch.Tensor,
    fast_accum: bool,
) -> torch.Tensor:
    """torch's grouped GEMM with its own layouts of scales: 1-D where the operand is 2-D. bf16 out, not yet mended."""
    if inverse_scale_a is None or inverse_scale_b is None:
        return torch._grouped_mm(a, b, offs=ends, out_dtype=torch.bfloat16)
    return torch._scaled_grouped_mm(
        a,
        b,
        inverse_scale_a.reshape(-1),
        inverse_scale_b if b.dim() == 3 else inverse_scale_b.reshape(-1),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )


def _torch(a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype, alignment, fast_accum):
    m = a.shape[0] if b.dim() == 3 else a.shape[1]
    a, b = grouped_kernel.operand(a)[0], grouped_kernel.operand(b.transpose(-2, -1))[0].transpose(-2, -1)
    out = call_torch(a, b, inverse_scale_a, inverse_scale_b, settled(offs, m, alignment), fast_accum)
    return mended(out, offs, m, alignment)


def _shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[-1])


@torch.library.custom_op(
    "fp8stack::grouped_scaled_mm",
    mutates_args=(),
    schema=(
        "(Tensor a, str fmt_a, Tensor b, str fmt_b, Tensor inverse_scale_a, Tensor inverse_scale_b, Tensor offs, "
        "int alignment, ScalarType out_dtype, str? backend, bool fast_accum) -> Tensor"
    ),
)
def _grouped_scaled_mm(
    a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, offs, alignment, out_dtype, backend, fast_accum
):
    # Codes arrive as uint8: torch.library.opcheck compares inputs with operators that float8 tensors lack (torch 2.13).
    a, b = a.view(formats.get(fmt_a).dtype), b.view(formats.get(fmt_b).dtype)
    if backend is not None:
        _require_runs(backend, a, b, out_dtype)
    backend = backend or choose_backend(a, b, out_dtype, alignment, fast_accum)
    launch.record("grouped_scaled_mm", backend)
    in_rows = b.dim() == 3
    alignment = 1 if in_rows else alignment
    _check_offs(offs, a.shape[0 if in_rows else 1], alignment)
    if 0 in (*a.shape, *b.shape):  # libraries refuse a zero-length contraction (pytorch/pytorch#192497)
        return torch.zeros(_shape(a, b, offs), dtype=out_dtype, device=a.device)
    operands = (a, b, inverse_scale_a, inverse_scale_b, offs, out_dtype)
    if backend == "torch":
        return _torch(*operands, alignment, fast_accum)
    if backend == "triton":
        return _triton(*operands, alignment, exact=not fast_accum)
    if backend == "simulated":
        return _simulated(*operands, alignment)
    out = grouped_scaled_mm_reference(*operands)
    return out if in_rows else mended(out, offs, a.shape[1], alignment)


@_grouped_scaled_mm.register_fake
def _(a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, offs, alignment, out_dtype, backend, fast_accum):
    return torch.empty(_shape(a, b, offs), dtype=out_dtype, device=a.device)


def grouped_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    fast_accum: bool = False,
    pad: bool = False,
    alignment: int = MULTIPLE,
) -> torch.Tensor:
    """Products of FP8 operands in groups, times their inverse scales.

    Groups in the rows: a (M,K), b (E,K,N), inverse_scale_a (M,) or (M,1), inverse_scale_b (E,N) -> (M,N); rows past
    offs[-1] are zero. Groups along the contraction: a (N,M), b (M,K), inverse_scale_a (E,N), inverse_scale_b (E,K)
    -> (E,N,K). a is row-major, b column-major. Inverse scales are float32; a single one () is spread over all.

    offs: int32 (E,), cumulative ends of the groups. out_dtype: bfloat16 or float32. backend: one of BACKENDS, or None
    for the table's choice. fast_accum: let the hardware accumulate with fewer bits. pad: append zero codes to K and N,
    and move groups along the contraction to multiples. alignment: what those groups are promised to be multiples of;
    with preferred_alignment's the fastest backend can take them.

    Raises ValueError, naming the dimension or the group, for sizes, layouts, scales, offs (see the header), a backend
    and an out_dtype that do not fit; UnsupportedDtype for operands that are not FP8 or that the device cannot multiply.
    """
    fmt_a, fmt_b = formats.get(a.dtype).name, formats.get(b.dtype).name
    _require_shapes(a, b, offs)
    for name, scale in (("inverse_scale_a", inverse_scale_a), ("inverse_scale_b", inverse_scale_b)):
        if scale.device != a.device:
            raise ValueError(f"{name} is on {scale.device} and a on {a.device}; expected one device; move {name} there")
    in_rows = b.dim() == 3
    if backend is not None:
        _check_backend(backend, a)
    _require_out_dtype(out_dtype)
    if alignment < MULTIPLE or alignment % MULTIPLE:
        raise ValueError(
            f"alignment is {alignment}; expected a multiple of {MULTIPLE}; take what the codes were padded to"
        )
    e, n = offs.shape[0], b.shape[-1]
    scale_a = _spread(inverse_scale_a, (a.shape[0],) if in_rows else (e, a.shape[0]), "inverse_scale_a")
    scale_b = _spread(inverse_scale_b, (e, n), "inverse_scale_b")
    rows = a.shape[0]
    if pad:
        a, b, offs = _padded(a, b, offs, MULTIPLE, alignment)
        scale_b = torch.nn.functional.pad(scale_b, (0, b.shape[-1] - n), value=1.0)
        if not in_rows:
            scale_a = torch.nn.functional.pad(scale_a, (0, a.shape[0] - rows), value=1.0)
    _require_multiples(a, b, MULTIPLE)
    if not _contiguous_along(a, -1):
        raise ValueError(
            f"a has strides {a.stride()}; expected row-major (unit stride along the contraction); pass a.contiguous()"
        )
    if not _contiguous_along(b, -2):
        raise ValueError(
            f"b has strides {b.stride()}; expected column-major (unit stride along the contraction); "
            "pass b.transpose(-2, -1).contiguous().transpose(-2, -1)"
        )
    out = _grouped_scaled_mm(
        a.view(torch.uint8), fmt_a, b.view(torch.uint8), fmt_b, scale_a, scale_b, offs, alignment, out_dtype, backend,
        fast_accum,
    )  # fmt: skip
    return _cut(out, rows, n)


@torch.library.custom_op(
    "fp8stack::grouped_mm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor offs, ScalarType out_dtype, str? backend) -> Tensor",
)
def _grouped_mm(a, b, offs, out_dtype, backend):
    in_rows = b.dim() == 3
    if backend is not None:
        _require_runs(backend, a, b, out_dtype)
    backend = backend or choose_backend_bf16(a, in_rows, out_dtype)
    launch.record("grouped_mm", backend)
    _check_offs(offs, a.shape[0 if in_rows else 1], 1)
    if 0 in (*a.shape, *b.shape):
        return torch.zeros(_shape(a, b, offs), dtype=out_dtype, device=a.device)
    if backend == "torch":
        if not in_rows:
            a, b, offs = pad_groups(a, b, offs, MULTIPLE_BF16)
        return _torch(a, b, None, None, offs, out_dtype, 1 if in_rows else MULTIPLE_BF16, False)
    if backend == "triton":
        return _triton(a, b, None, None, offs, out_dtype, 1, exact=False)
    return grouped_mm_reference(a, b, offs, out_dtype)


@_grouped_mm.register_fake
def _(a, b, offs, out_dtype, backend):
    return torch.empty(_shape(a, b, offs), dtype=out_dtype, device=a.device)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    pad: bool = False,
) -> torch.Tensor:
    """Products in groups in high precision, with the contract of grouped_scaled_mm.

    a (M,K), b (E,K,N) -> (M,N), or a (N,M), b (M,K) -> (E,N,K): both bfloat16 or both float32, any strides. Groups
    along the contraction may have any size. offs, backend (torch, triton or reference), pad: as grouped_scaled_mm.
    out_dtype: bfloat16 or float32, by default that of a. The reference's sums are float64, rounded once.

    Raises ValueError as grouped_scaled_mm does, for K and N that are no multiples of 8; UnsupportedDtype for other
    dtypes.
    """
    if a.dtype not in (torch.bfloat16, torch.float32) or a.dtype != b.dtype:
        raise formats.UnsupportedDtype(
            f"grouped_mm cannot multiply {a.dtype} by {b.dtype} on {a.device.type}; expected both bfloat16 or both "
            "float32; convert the operands first"
        )
    _require_shapes(a, b, offs)
    out_dtype = out_dtype or a.dtype
    _require_out_dtype(out_dtype)
    if backend is not None and (backend not in BACKENDS[:3] or (a.dtype == torch.float32 and backend != "reference")):
        raise ValueError(
            f"backend is {backend!r} for {a.dtype}; expected 'reference', or for bfloat16 'torch' or 'triton'; pass "
            "None for the table's choice"
        )
    rows, n = a.shape[0], b.shape[-1]
    if pad:
        a, b, offs = _padded(a, b, offs, MULTIPLE_BF16, 1)
    _require_multiples(a, b, MULTIPLE_BF16)
    return _cut(_grouped_mm(a, b, offs, out_dtype, backend), rows, n)


# -------------------------------------------------------------------------------------------------------------- checks
def _require_shapes(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; expected (M, K) and (E, K, N), or (N, M) and (M, K) "
            "for groups along the contraction; give b transposed"
        )
    groups.require_offs(offs, a, MULTIPLE)
    if b.dim() == 3 and b.shape[0] != offs.shape[0]:
        raise ValueError(
            f"b has {b.shape[0]} matrices and offs {offs.shape[0]} ends; expected one end a matrix; pass the offs of "
            "these experts"
        )
    if b.device != a.device:
        raise ValueError(f"b is on {b.device} and a on {a.device}; expected one device; move b there")


def _require_multiples(a: torch.Tensor, b: torch.Tensor, multiple: int) -> None:
    in_rows = b.dim() == 3
    sizes = {"K": a.shape[1], "N": b.shape[-1]} if in_rows else {"N": a.shape[0], "K": b.shape[-1]}
    if not in_rows and multiple == MULTIPLE:
        sizes["M"] = a.shape[1]
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(
                f"{name} is {size}, not a multiple of {multiple}; matrix hardware takes multiples of {multiple} only; "
                "pad the tensors, or pass pad=True"
            )


def _require_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype is {out_dtype}; expected torch.bfloat16 or torch.float32; convert the result afterwards"
        )


def _check_backend(backend: str, a: torch.Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}, or None for the table's choice; pass one"
        )
    if backend == "simulated" and not device.detect(a.device).simulated:
        raise ValueError(
            f"backend 'simulated' was asked for, but {device.OVERRIDE} does not set another arch than this device's; "
            f"expected it only while simulating; set {device.OVERRIDE}, for example {device.OVERRIDE}=gfx942"
        )


def _require_runs(backend: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Raise for a backend that was asked for and that cannot multiply these operands on their device.

    ValueError where it has no product like that at all, UnsupportedDtype where it lacks the formats alone.
    """
    if backend == "torch" and out_dtype != torch.bfloat16:
        raise ValueError(
            f"out_dtype is {out_dtype}; torch's grouped products give bfloat16 only; take torch.bfloat16, or "
            "backend='triton'"
        )
    if backend not in ("torch", "triton"):
        return
    target, fp8 = device.detect(a.device).target, a.itemsize == 1
    if target.vendor == "cpu":
        if backend == "triton" and _on_cpu() != "triton":
            raise ValueError(
                "backend 'triton' was asked for on a CPU that does not interpret; expected a GPU, or "
                "TRITON_INTERPRET=1 before triton is imported; pass backend='reference', or None for the table's choice"
            )
        if backend == "torch" and fp8:
            raise ValueError(
                "backend 'torch' was asked for FP8 on a CPU, where torch has no such product; expected 'triton' while "
                "interpreting, or 'reference'; pass one, or None for the table's choice"
            )
        return
    if not fp8:
        return
    if not target.native_fp8_matmul or (backend == "torch" and target.name not in _TORCH_FP8):
        raise ValueError(
            f"backend {backend!r} was asked for FP8 on {target.name}, where it has no such product; expected "
            f"{', '.join(_TORCH_FP8) if backend == 'torch' else 'a GPU with FP8 matrix instructions'}; pass None for "
            "the table's choice"
        )
    takes = (target.e4m3,) if backend == "torch" else (target.e4m3, target.e5m2)
    if any(formats.get(x.dtype).name not in takes for x in (a, b)):
        raise formats.UnsupportedDtype(
            f"backend {backend!r} cannot multiply {a.dtype} by {b.dtype} on {target.name}; expected "
            f"{' or '.join(takes)} there; pass backend='reference', or None for the table's choice"
        )


def _contiguous_along(x: torch.Tensor, dim: int) -> bool:
    return x.stride(dim) == 1 or x.shape[dim] <= 1 or x.numel() == 0


def _spread(scale: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """An inverse scale, contiguous in its full shape."""
    column = (*shape, 1) if len(shape) == 1 else shape
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), shape, column):
        raise ValueError(
            f"{name} is {scale.dtype} of shape {tuple(scale.shape)}; expected float32 of shape {shape} or (); pass the "
            "inverse scale that the quantiser returned"
        )
    return (scale.expand(shape) if scale.dim() == 0 else scale.reshape(shape)).contiguous()


def _padded(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, multiple: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands with zeros appended to K and N, in the layouts that FP8 wants; groups along the contraction aligned."""

    def with_zeros(x: torch.Tensor, *sizes: int) -> torch.Tensor:
        integers = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
        return torch.nn.functional.pad(integers, sizes).contiguous().view(x.dtype)

    n = -b.shape[-1] % multiple
    if b.dim() == 3:
        k = -a.shape[1] % multiple
        return with_zeros(a, 0, k), with_zeros(b.transpose(1, 2), 0, k, 0, n).transpose(1, 2), offs
    if alignment > 1 and a.shape[1]:
        # Padding clamps the ends: afterwards nobody sees that they were bad.
        a, b, offs = pad_groups(a, b, _checked_offs(offs, a.shape[1]), alignment)
    return with_zeros(a, 0, 0, 0, -a.shape[0] % multiple), with_zeros(b.t(), 0, 0, 0, n).t(), offs


def _cut(out: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    """out without what _padded appended."""
    if out.shape[-1] == n and out.shape[-2] == rows:
        return out
    return out[..., :rows, :n].contiguous()


def compile_specs(arch: str) -> list[CompileSpec]:
    """The small kernels around a library's product, for the codegen suite; the product's own: grouped_kernel.py."""
    device.lookup(arch)
    pointers, numbers = {"out": "*bf16", "offs": "*i32"}, ("M", "COLUMNS", "GROUP", "E")
    specs = [
        CompileSpec(
            kernel=_settle_offs_kernel,
            case="grouped_gemm-settle-e32",
            fmt="bf16",
            signature={"offs": "*i32", "ends": "*i32", "M": "i32", "E": "i32"},
            constexprs={"LANES": 32, "ALIGNMENT": MULTIPLE},
            num_warps=1,
            divisible=("offs", "ends"),
            within_2gb=("offs", "ends"),
            wide_bytes=0,  # it reads offs, once
            encodes=False,
        )
    ]
    for in_rows in (True, False):
        specs.append(
            CompileSpec(
                kernel=_mend_kernel,
                case=f"grouped_gemm-mend-{'rows' if in_rows else 'contraction'}-e32",
                fmt="bf16",
                signature={**pointers, **dict.fromkeys(numbers, "i32")},
                constexprs={"LANES": 32, "IN_ROWS": in_rows, "ALIGNMENT": MULTIPLE, "CLEARED": _CLEARED},
                divisible=(*pointers, "COLUMNS", "GROUP"),
                within_2gb=tuple(pointers),
                wide_bytes=0,  # it reads offs, and writes where there is something to mend
                encodes=False,
            )
        )
    return specs
