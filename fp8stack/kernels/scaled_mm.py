"""The product of two FP8 matrices, with the scales taken out.

    out[m, n] = RN( sum over blocks of K ( sum_k a[m, k] * b[k, n] * scale_a[m, block] * scale_b[block, n] ) + bias[n] )

Granularities, told by the shapes and dtype of the inverse scales (float32, in the layout of their operand):

    | granularity   | scale of a (M, K)    | scale of b (K, N)          | recipes                       |
    | tensor        | ()                   | ()                         | tensorwise                    |
    | row           | (M,), (M, 1) or ()   | (N,), (1, N) or ()         | rowwise; () for one of them   |
    | 1x128 128x128 | (M, ceil(K/128))     | (ceil(K/128), ceil(N/128)) | blockwise: output, grad input |
    | 1x128 1x128   | (M, ceil(K/128))     | (ceil(K/128), N)           | blockwise: grad weight        |
    | 1x32          | (M, ceil(K/32)) E8M0 | (ceil(K/32), N) E8M0       | mxfp8                         |

The scales of b are those of the quantiser that wrote b.t(), transposed. Where one block holds all of K, a scale a row
and a scale a block are the same thing.

Backends, of which a table picks one (_TABLE) and `launch.recording()` tells which it was:

    torch       torch._scaled_mm: hipBLASLt or Composable Kernel on ROCm, cuBLAS or CUTLASS on CUDA. Blocks of 128 on
                sm_90 and 1x32 on sm_100 by name only: UNCALIBRATED, what it is called with is tested, but it has not
                run on such a GPU here
    triton      our own kernel (scaled_kernel.py): every target, pair of formats, granularity and output
    emulated    1x32 by our own kernel where the target has no instruction that takes E8M0 scales
    reference   any device and size: decode, multiply with float64 sums rounded to float32, then one inverse scale, the
                other, the bias, and one rounding; scales of blocks multiply before the sum, in float64
    simulated   for a format that the hardware lacks, only while FP8STACK_ARCH asks for it: the codes decoded to bf16,
                which holds every FP8 value exactly, and a bf16 product with float32 output; then as the reference. With
                scales of blocks by our own kernel, which decodes

Layout: a (M, K) row-major, b (K, N) column-major, which is what FP8 matrix instructions read. out row-major.

K and N must be multiples of 16: FP8 hardware takes no others, and a CPU that did would hide the error until the first
run on a GPU. pad=True appends zero codes instead; the reference, asked for by name, takes any sizes. They need not be
multiples of a block: the last one holds what there is.

Not here: groups (grouped_gemm.py).
"""

from collections.abc import Sequence

import torch

from fp8stack import _triton, device, formats
from fp8stack.kernels import blockwise, launch, mxfp8, scaled_kernel

MULTIPLE = 16
"""What K and N must be multiples of: torch._scaled_mm's own rule, from the 16-byte rows of the hardware path."""

BACKENDS = ("torch", "triton", "emulated", "reference", "simulated")

GRANULARITIES = ("tensor", "row", "1x128 128x128", "1x128 1x128", "1x32")
"""What shares a scale, of a and of b transposed; see the header."""

_WHOLE = GRANULARITIES[:2]  # one scale along all of the contraction
_BLOCKS = GRANULARITIES[2:4]

_MIXED = ("e4m3 e4m3", "e4m3 e5m2", "e5m2 e4m3")

# The first row that matches decides. None: any. A CPU is matched before this table: see choose_backend.
_TABLE: tuple[
    tuple[Sequence[str] | None, bool | None, bool | None, bool | None, bool | None, Sequence[str] | None, str], ...
] = (
    # granularities, matrix instructions, such with E8M0 scales, formats of the target, of the arch, pair -> backend
    (_WHOLE, True, None, True, None, _MIXED, "torch"),
    (_WHOLE, True, None, True, None, None, "triton"),  # no library multiplies e5m2 by e5m2
    (_BLOCKS, True, None, True, None, None, "triton"),
    (("1x32",), True, True, True, None, None, "triton"),
    (("1x32",), None, None, True, None, None, "emulated"),
    (None, False, None, True, None, None, "reference"),  # emulated arch
    (None, None, None, False, True, None, "simulated"),  # the override's formats
)


def choose_backend(a: torch.Tensor, b: torch.Tensor, granularity: str = "row") -> str:
    """The backend for two FP8 operands on their device, by the table.

    A CPU runs the reference where one scale holds along the contraction, and what launch.implementation says otherwise.
    Raises UnsupportedDtype for a format that the device lacks, UnknownArch for a device without a row.
    """
    found = device.detect(a.device)
    if found.target.vendor == "cpu":
        return "reference" if granularity in _WHOLE else _on_cpu()
    names = [formats.get(x.dtype).name for x in (a, b)]
    own = all(name in (found.target.e4m3, found.target.e5m2) for name in names)
    arch = all(name in (found.arch.e4m3, found.arch.e5m2) for name in names)
    pair = " ".join(name[:4] for name in names)
    in_unit = scaled_kernel.scales_in_unit(found.target.name)
    for granularities, hardware, with_scales, of_target, of_arch, pairs, backend in _TABLE:
        if (
            (granularities is None or granularity in granularities)
            and hardware in (None, found.target.native_fp8_matmul)
            and with_scales in (None, in_unit)
            and of_target in (None, own)
            and of_arch in (None, arch)
            and (pairs is None or pair in pairs)
        ):
            return backend
    raise formats.UnsupportedDtype(
        f"scaled_mm cannot multiply {a.dtype} by {b.dtype} on {found.target.name}; expected {found.target.e4m3} or "
        f"{found.target.e5m2} there ({found.reason}); to simulate another arch set {device.OVERRIDE}, for example "
        f"{device.OVERRIDE}=gfx942, or pass backend='reference'"
    )


def _on_cpu() -> str:
    return launch.implementation(torch.empty(0, device="cpu"))  # whatever the default device is


def _descale(
    product: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """float32 product -> out: one inverse scale, then the other, the bias, one rounding. Overwrites product."""
    product *= inverse_scale_a if inverse_scale_a.dim() == 0 else inverse_scale_a.unsqueeze(1)
    product *= inverse_scale_b
    if bias is not None:
        product += bias.to(torch.float32)
    return product.to(out_dtype)


def scaled_mm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    granularity: str = "row",
) -> torch.Tensor:
    """The specification, in plain torch. Any sizes; inverse scales (), (M,) and (N,), or as the header's; as scaled_mm.

    The scales of blocks multiply their codes in float64, which holds such a product exactly.
    """
    # float64: a sum of e4m3 products is exact there and one of e5m2 nearly, so the order of accumulation does not show:
    # the same bits on every CPU, vector width and thread count. With scales of blocks a last bit may.
    left, right = (formats.decode(x, x.dtype, torch.float64) for x in (a, b.t()))
    right = right.t()
    if granularity in _WHOLE:
        product = (left @ right).to(torch.float32)
        return _descale(product, inverse_scale_a, inverse_scale_b, bias, out_dtype)
    left *= _spread(inverse_scale_a, left.shape)
    right *= _spread(inverse_scale_b, right.shape)
    product = (left @ right).to(torch.float32)
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """An inverse scale of blocks at each element of its operand, float64. E8M0 bytes have blocks of 32, others 128."""
    block = mxfp8.BLOCK if scale.dtype == torch.uint8 else blockwise.BLOCK
    values = (formats.decode_e8m0(scale) if scale.dtype == torch.uint8 else scale).to(torch.float64)
    for dim, size in enumerate(shape):
        if values.shape[dim] != size:
            values = values.repeat_interleave(block, dim).narrow(dim, 0, size)
    return values


def _simulated(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias):
    left, right = (formats.decode(x, x.dtype).to(torch.bfloat16) for x in (a, b))
    if a.device.type == "cpu":
        # torch has no bf16 product with float32 output there.
        product = left.to(torch.float32) @ right.to(torch.float32)
    else:
        product = torch.mm(left, right, out_dtype=torch.float32)
    return _descale(product, inverse_scale_a, inverse_scale_b, bias, out_dtype)


def _simulated_blocks(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias):
    """Codes that float32 holds exactly times their scales, and a float32 product: for a CPU that does not interpret."""
    left, right = (formats.decode(x, x.dtype) for x in (a, b))
    left *= _spread(inverse_scale_a, left.shape).to(torch.float32)
    right *= _spread(inverse_scale_b, right.shape).to(torch.float32)
    product = left @ right
    return (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)


def _by_kernel(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, granularity, fast_accum, wide):
    """Our own kernel. wide: decode the codes to bf16 first."""
    target = device.detect(a.device).target
    shared = 1
    if granularity in _WHOLE:
        scales = "after"
        inverse_scale_a = inverse_scale_a.expand(a.shape[0]).contiguous()
        inverse_scale_b = inverse_scale_b.expand(b.shape[1]).contiguous()
    else:
        in_unit = not wide and scaled_kernel.scales_in_unit(target.name)
        scales = "block" if granularity in _BLOCKS else "unit" if in_unit else "bytes"
        shared = blockwise.BLOCK if granularity == "1x128 128x128" else 1
        inverse_scale_a, inverse_scale_b = inverse_scale_a.contiguous(), inverse_scale_b.t().contiguous()
    row = launch.config(scaled_kernel.SCALED_CONFIGS, target.name, scaled_kernel.size_class(scales, wide))
    return scaled_kernel.launch_scaled(
        a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, scales, shared, wide, not fast_accum, row, target.name
    )


def _decoded(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the target's matrix units lack a format, so that codes are decoded."""
    target = device.detect(a.device).target
    return not target.native_fp8_matmul or any(
        formats.get(x.dtype).name not in (target.e4m3, target.e5m2) for x in (a, b)
    )


def _torch(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, granularity, fast_accum):
    if granularity not in _WHOLE:
        return _torch_blocks(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, granularity)
    if granularity == "row":
        # torch refuses a row scale beside a tensor scale.
        inverse_scale_a = _each(inverse_scale_a, a.shape[0]).view(-1, 1)
        inverse_scale_b = _each(inverse_scale_b, b.shape[1]).view(1, -1)
        if out_dtype != torch.bfloat16:
            raise ValueError(
                f"out_dtype is {out_dtype}; torch's product with a scale for each row gives bfloat16 only; take "
                "torch.bfloat16, tensor scales, backend='triton' or backend='reference'"
            )
    return torch._scaled_mm(
        a,
        b,
        scale_a=inverse_scale_a,
        scale_b=inverse_scale_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )


def _each(scale: torch.Tensor, count: int) -> torch.Tensor:
    """One scale for each of `count` rows, contiguous; nothing is launched where it is so already."""
    return (scale if scale.numel() == count else scale.expand(count)).contiguous()


# What cuBLASLt reads scales of 128 in: four of them are 16 bytes.
_SCALES_A_ROW = 4


def _torch_blocks(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, granularity):
    """cuBLASLt's products with scales of blocks, its operands padded with zero codes to where it takes any sizes.

    Blocks of 128: 1x128 scales have unit stride along the rows, 128x128 ones along the contraction, where rows of them
    are a multiple of 16 bytes apart: K = 128128 has 1001 blocks, and torch takes no padded stride before 2.13. So K is
    padded, to a multiple of 512, and the rows of a to one of 4. 1x32: K to a multiple of 128, and the scales in tiles
    (`_swizzled`). _scaled_mm tells the granularity by the shapes, as scaled_mm does, in torch 2.10 to 2.13.
    """
    (m, k), n = a.shape, b.shape[1]
    if granularity == "1x32":
        a, b = _padded(a, 0, -k % 128), _padded(b.t(), 0, -k % 128).t()
        scale_a, scale_b = _swizzled(inverse_scale_a), _swizzled(inverse_scale_b.t())
    else:
        columns = -k % (_SCALES_A_ROW * blockwise.BLOCK)
        blocks = (k + columns) // blockwise.BLOCK - inverse_scale_a.shape[1]
        a, b = _padded(a, -m % _SCALES_A_ROW, columns), _padded(b.t(), 0, columns).t()
        pad = torch.nn.functional.pad
        scale_a = pad(inverse_scale_a.t(), (0, a.shape[0] - m, 0, blocks), value=1.0).contiguous().t()
        scale_b = pad(inverse_scale_b, (0, 0, 0, blocks), value=1.0)
        scale_b = scale_b.t().contiguous().t() if granularity == "1x128 128x128" else scale_b.contiguous()
    out = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=False)
    return out[:m, :n].contiguous() if out.shape != (m, n) else out


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (rows, blocks) as cuBLASLt reads them: tiles of 128 rows by 4 blocks, rows r, r + 32 ... side by side.

    Padded to whole tiles; flat, float8_e8m0fnu. The layout is NVIDIA's, "1D Block Scaling Factors Layout" of cuBLAS.
    """
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)


@torch.library.custom_op(
    "fp8stack::scaled_mm",
    mutates_args=(),
    schema=(
        "(Tensor a, str fmt_a, Tensor b, str fmt_b, Tensor inverse_scale_a, Tensor inverse_scale_b, str granularity, "
        "ScalarType out_dtype, Tensor? bias, str? backend, bool fast_accum) -> Tensor"
    ),
)
def _scaled_mm(a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, granularity, out_dtype, bias, backend, fast_accum):
    # Codes arrive as uint8: torch.library.opcheck compares inputs with operators that float8 tensors lack (torch 2.13).
    a, b = a.view(formats.get(fmt_a).dtype), b.view(formats.get(fmt_b).dtype)
    backend = backend or choose_backend(a, b, granularity)
    launch.record("scaled_mm", backend)
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):  # libraries refuse a zero-length contraction: pytorch/pytorch#192497
        out = torch.zeros((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias.to(out_dtype)
    operands = (a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias)
    if backend == "torch":
        return _torch(*operands, granularity, fast_accum)
    if backend == "simulated" and (granularity in _WHOLE or launch.implementation(a) == "reference"):
        with torch.autocast(a.device.type, enabled=False):  # it would round what is wide on purpose
            return (_simulated if granularity in _WHOLE else _simulated_blocks)(*operands)
    if backend in ("triton", "emulated", "simulated"):
        return _by_kernel(*operands, granularity, fast_accum, wide=backend == "simulated" or _decoded(a, b))
    return scaled_mm_reference(*operands, granularity)


@_scaled_mm.register_fake
def _(a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, granularity, out_dtype, bias, backend, fast_accum):
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
    fast_accum: bool = False,
    pad: bool = False,
    granularity: str | None = None,
) -> torch.Tensor:
    """a @ b, times the inverse scales, plus bias: (M, N) in out_dtype.

    a: (M, K), FP8, row-major. b: (K, N), FP8, column-major. inverse_scale_a, inverse_scale_b: float32, or E8M0 bytes
    (uint8 or float8_e8m0fnu), of the shapes that the header lists by granularity. bias: (N,). backend: one of BACKENDS,
    or None for the table's choice. fast_accum: let the hardware accumulate with fewer bits (torch, and triton with
    scales of rows or tensors). pad: append zero codes up to the next multiple of 16 along K and N. granularity: one of
    GRANULARITIES, or None for what the scales tell; where one block holds all of K they tell rows.

    out_dtype: bfloat16 or float32; with a scale for each row the torch backend gives bfloat16 only.

    Raises ValueError, naming the dimension, for sizes, layouts, devices, scales, a bias, a granularity, a backend and
    an out_dtype that do not fit; UnsupportedDtype for operands that are not FP8 or that the device cannot multiply.
    """
    fmt_a, fmt_b = formats.get(a.dtype).name, formats.get(b.dtype).name
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; expected (M, K) and (K, N); "
            "flatten leading dimensions, and give b transposed"
        )
    k, n = b.shape
    given = {"b": b, "inverse_scale_a": inverse_scale_a, "inverse_scale_b": inverse_scale_b, "bias": bias}
    for name, operand in given.items():
        if operand is not None and operand.device != a.device:
            raise ValueError(
                f"{name} is on {operand.device} and a on {a.device}; expected one device; move {name} there"
            )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected (N,) = ({n},), one number a column; reshape or drop it"
        )
    if bias is not None and bias.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"bias is {bias.dtype}; expected bfloat16, float16 or float32; convert it first")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype is {out_dtype}; expected torch.bfloat16 or torch.float32; convert the result afterwards"
        )
    if granularity not in (None, *GRANULARITIES):
        raise ValueError(
            f"granularity is {granularity!r}; expected one of: {', '.join(GRANULARITIES)}; correct it, or pass None "
            "for what the scales tell"
        )
    granularity, scale_a, scale_b = _told(inverse_scale_a, inverse_scale_b, a.shape[0], n, k, granularity)
    if granularity == "1x32" and not {fmt_a, fmt_b} <= set(mxfp8.FORMATS):
        raise formats.UnsupportedDtype(
            f"scaled_mm cannot multiply {a.dtype} by {b.dtype} with E8M0 scales on {a.device.type}; expected "
            f"{' or '.join(mxfp8.FORMATS)}: MX formats are OCP's; on a FNUZ device use scales of rows or of blocks"
        )
    if backend is not None:
        _check_backend(backend, a, b, granularity)
    if pad:
        a, b = _padded(a, 0, -k % MULTIPLE), _padded(b.t(), -n % MULTIPLE, -k % MULTIPLE).t()
        if scale_b.dim() and scale_b.shape[-1] == n and granularity != "1x128 128x128":
            scale_b = torch.nn.functional.pad(scale_b, (0, -n % MULTIPLE), value=1)
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, -n % MULTIPLE))
    for name, size in (("K", b.shape[0]), ("N", b.shape[1])):
        if size % MULTIPLE and backend != "reference":
            raise ValueError(
                f"{name} is {size}, not a multiple of {MULTIPLE}; FP8 matrix hardware takes multiples of {MULTIPLE} "
                "only; pad the tensors, or pass pad=True, or backend='reference'"
            )
    if not _row_major(a):
        raise ValueError(f"a has strides {a.stride()}; expected row-major (unit stride along K); pass a.contiguous()")
    if not _row_major(b.t()):
        raise ValueError(
            f"b has strides {b.stride()}; expected column-major (unit stride along K); pass b.t().contiguous().t()"
        )
    a, b = a.view(torch.uint8), b.view(torch.uint8)
    out = _scaled_mm(a, fmt_a, b, fmt_b, scale_a, scale_b, granularity, out_dtype, bias, backend, fast_accum)
    return out[:, :n].contiguous() if out.shape[1] != n else out


# Where torch has a product with scales of blocks: target -> granularities.
_TORCH_BLOCKS = {"sm_90": _BLOCKS, **dict.fromkeys(("sm_100", "sm_103", "sm_120"), ("1x32",))}


def _check_backend(backend: str, a: torch.Tensor, b: torch.Tensor, granularity: str) -> None:
    """Raise for a backend that was asked for and that cannot multiply these operands on their device.

    ValueError where it has no product like that at all, UnsupportedDtype where it lacks the formats alone.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}; pass one of these, or None for the "
            "table's choice"
        )
    found = device.detect(a.device)
    if backend == "simulated" and not found.simulated:
        raise ValueError(
            f"backend 'simulated' was asked for, but {device.OVERRIDE} does not set another arch than this device's; "
            f"expected it only while simulating; set {device.OVERRIDE}, for example {device.OVERRIDE}=gfx942"
        )
    if backend == "emulated" and granularity != "1x32":
        raise ValueError(
            f"backend 'emulated' was asked for with scales of {granularity}; expected scales of 1x32, which alone may "
            "lack an instruction; pass backend='triton', or None for the table's choice"
        )
    if backend == "torch" and granularity not in (*_WHOLE, *_TORCH_BLOCKS.get(found.target.name, ())):
        raise ValueError(
            f"backend 'torch' was asked for with scales of {granularity} on {found.target.name}; expected "
            f"{_BLOCKS[0]} or {_BLOCKS[1]} on sm_90, 1x32 on sm_100, sm_103 or sm_120; pass backend='triton' or "
            "'reference', or None for the table's choice"
        )
    if backend not in ("triton", "emulated"):
        return
    if found.target.vendor == "cpu":
        if not _triton.INTERPRETING:
            raise ValueError(
                f"backend '{backend}' was asked for on a CPU that does not interpret; expected a GPU, or "
                "TRITON_INTERPRET=1 before triton is imported; pass backend='reference', or None for the table's choice"
            )
    elif backend == "triton" and granularity == "1x32" and not scaled_kernel.scales_in_unit(found.target.name):
        raise ValueError(
            f"backend 'triton' was asked for with scales of 1x32 on {found.target.name}, which has no instruction that "
            "takes them; expected 'emulated' there; pass that, or None for the table's choice"
        )
    elif backend == "triton" and _decoded(a, b):
        raise formats.UnsupportedDtype(
            f"backend 'triton' cannot multiply {a.dtype} by {b.dtype} on {found.target.name}; expected formats that "
            "its matrix instructions take; pass backend='reference', or None for the table's choice"
        )


def _row_major(x: torch.Tensor) -> bool:
    """Unit stride along the last dimension (irrelevant where there is nothing to step over)."""
    return x.stride(1) == 1 or x.shape[1] <= 1 or x.numel() == 0


_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def _told(
    inverse_scale_a: torch.Tensor, inverse_scale_b: torch.Tensor, m: int, n: int, k: int, wanted: str | None
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The granularity that two inverse scales tell, and the scales: () or flat where they hold along K, else 2-D.

    E8M0 ones as uint8. wanted: what the caller says that they tell.
    """
    blocks, bytes_ = -(-k // blockwise.BLOCK), -(-k // mxfp8.BLOCK)
    across = -(-n // blockwise.BLOCK)
    told: list[str] = []
    for name, scale, whole, block, byte in (
        ("inverse_scale_a", inverse_scale_a, ((), (m,), (m, 1)), ((m, blocks),), (m, bytes_)),
        ("inverse_scale_b", inverse_scale_b, ((), (n,), (1, n)), ((blocks, n), (blocks, across)), (bytes_, n)),
    ):
        shape = tuple(scale.shape)
        if scale.dtype in _E8M0 and shape == byte:
            told.append("1x32")
        elif scale.dtype == torch.float32 and shape in whole:
            told.append("row" if shape else "tensor")
        elif scale.dtype == torch.float32 and shape in block:
            told.append("1x128" if shape == block[0] else "128x128")
        else:
            listed = ", ".join(str(shape) for shape in dict.fromkeys((*whole, *block)))
            raise ValueError(
                f"{name} is {scale.dtype} of shape {shape}; expected float32 of one of the shapes {listed}, or E8M0 "
                f"bytes of shape {byte}; pass the inverse scale that the quantiser returned, that of b transposed"
            )
    scales = (inverse_scale_a, inverse_scale_b)
    if set(told) <= {"tensor", "row"} and wanted not in _BLOCKS:
        scales = tuple(scale if scale.dim() == 0 else scale.reshape(-1) for scale in scales)
        found = "row" if "row" in told else "tensor"
    elif told == ["1x32", "1x32"]:
        scales = tuple(scale.view(torch.uint8) for scale in scales)
        found = "1x32"
    else:
        # Where a block holds all of K, a scale a row is a scale a block.
        one_block = [kind == "row" and scale.dim() == 2 for kind, scale in zip(told, scales, strict=True)]
        if any(one_block) and blocks > 1:
            one_block = [False, False]
        found = " ".join("1x128" if one else kind for kind, one in zip(told, one_block, strict=True))
    if found not in GRANULARITIES or wanted not in (None, found):
        known = repr(wanted) if wanted is not None else f"one of: tensor or row, {', '.join(map(repr, _BLOCKS))}, 1x32"
        raise ValueError(
            f"inverse_scale_a has scales of {told[0]} and inverse_scale_b of {told[1]}; expected {known}, for both; "
            "quantise both operands by one recipe"
        )
    return found, scales[0], scales[1]


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x (2-D, FP8), row-major, with zero codes appended."""
    codes = torch.nn.functional.pad(x.view(torch.uint8), (0, columns, 0, rows))
    return codes.contiguous().view(x.dtype)
