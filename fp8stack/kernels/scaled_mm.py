"""The product of two FP8 matrices, with the scales taken out afterwards.

    out[m, n] = RN( sum_k a[m, k] * b[k, n]  *  inverse_scale_a[m]  *  inverse_scale_b[n]  +  bias[n] )

Backends, of which a table picks one (BACKENDS) and `launch.recording()` tells which it was:

    torch       torch._scaled_mm: hipBLASLt or Composable Kernel on ROCm, cuBLAS or CUTLASS on CUDA
    reference   any device: decode, multiply with float64 sums rounded to float32, then one inverse scale, the other,
                the bias, and one rounding
    simulated   for a format that the hardware lacks, only while FP8STACK_ARCH asks for it: the codes decoded to bf16,
                which holds every FP8 value exactly, and a bf16 product with float32 output; then as the reference

Layout: a (M, K) row-major, b (K, N) column-major, which is what FP8 matrix instructions read. out row-major.
Scales are inverse scales, float32: () for a tensor, (M,) or (M, 1) for the rows of a, (N,) or (1, N) for the columns
of b.

K and N must be multiples of 16: FP8 hardware takes no others, and a CPU that did would hide the error until the first
run on a GPU. pad=True appends zero codes instead.

Not here: groups, blockwise scales, E8M0 scales.
"""

from dataclasses import dataclass

import torch

from fp8stack import device, formats
from fp8stack.kernels import launch

MULTIPLE = 16
"""What K and N must be multiples of: torch._scaled_mm's own rule, from the 16-byte rows of the hardware path."""

BACKENDS = ("torch", "reference", "simulated")


@dataclass(frozen=True)
class _Case:
    """What the choice of a backend depends on.

    hardware: the target has FP8 matrix instructions. own: both formats are the target's. arch: both are the arch's,
    which FP8STACK_ARCH may have set apart from the target. pair: "e4m3 e4m3", or with one or two e5m2.
    """

    hardware: bool
    own: bool
    arch: bool
    pair: str


_MIXED = ("e4m3 e4m3", "e4m3 e5m2", "e5m2 e4m3")

# The first row that matches decides. None: any. A CPU is matched before this table: it runs the reference.
_TABLE: tuple[tuple[bool | None, bool | None, bool | None, tuple[str, ...] | None, str], ...] = (
    # hardware, own, arch, pair -> backend
    (True, True, None, _MIXED, "torch"),
    (True, True, None, ("e5m2 e5m2",), "reference"),  # no library multiplies e5m2 by e5m2
    (False, True, None, None, "reference"),  # emulated arch
    (None, False, True, None, "simulated"),  # the override's formats
)


def _case(a: torch.Tensor, b: torch.Tensor, found: device.Detected) -> _Case:
    names = [formats.get(x.dtype).name for x in (a, b)]
    return _Case(
        hardware=found.target.native_fp8_matmul,
        own=all(name in (found.target.e4m3, found.target.e5m2) for name in names),
        arch=all(name in (found.arch.e4m3, found.arch.e5m2) for name in names),
        pair=" ".join(name[:4] for name in names),
    )


def choose_backend(a: torch.Tensor, b: torch.Tensor) -> str:
    """The backend for two FP8 operands on their device: a CPU runs the reference, elsewhere the table decides.

    Raises UnsupportedDtype for a format that the device lacks, UnknownArch for a device without a row.
    """
    found = device.detect(a.device)
    if found.target.vendor == "cpu":
        return "reference"
    case = _case(a, b, found)
    for hardware, own, arch, pairs, backend in _TABLE:
        if (
            hardware in (None, case.hardware)
            and own in (None, case.own)
            and arch in (None, case.arch)
            and (pairs is None or case.pair in pairs)
        ):
            return backend
    raise formats.UnsupportedDtype(
        f"scaled_mm cannot multiply {a.dtype} by {b.dtype} on {found.target.name}; expected {found.target.e4m3} or "
        f"{found.target.e5m2} there ({found.reason}); to simulate another arch set {device.OVERRIDE}, for example "
        f"{device.OVERRIDE}=gfx942, or pass backend='reference'"
    )


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
) -> torch.Tensor:
    """The specification, in plain torch. Any sizes; inverse scales (), (M,) and (N,); the rest as scaled_mm."""
    # float64: a sum of e4m3 products is exact there and one of e5m2 nearly, so the order of accumulation does not show:
    # the same bits on every CPU, vector width and thread count.
    left, right = (formats.decode(x, x.dtype).to(torch.float64) for x in (a, b))
    product = (left @ right).to(torch.float32)
    return _descale(product, inverse_scale_a, inverse_scale_b, bias, out_dtype)


def _simulated(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias):
    left, right = (formats.decode(x, x.dtype).to(torch.bfloat16) for x in (a, b))
    if a.device.type == "cpu":
        # torch has no bf16 product with float32 output there.
        product = left.to(torch.float32) @ right.to(torch.float32)
    else:
        product = torch.mm(left, right, out_dtype=torch.float32)
    return _descale(product, inverse_scale_a, inverse_scale_b, bias, out_dtype)


def _torch(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, fast_accum):
    if inverse_scale_a.dim() or inverse_scale_b.dim():
        # torch refuses a row scale beside a tensor scale.
        inverse_scale_a = inverse_scale_a.expand(a.shape[0]).unsqueeze(1).contiguous()
        inverse_scale_b = inverse_scale_b.expand(b.shape[1]).unsqueeze(0).contiguous()
        if out_dtype != torch.bfloat16:
            raise ValueError(
                f"out_dtype is {out_dtype}; torch's product with a scale for each row gives bfloat16 only; take "
                "torch.bfloat16, tensor scales, or backend='reference'"
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


@torch.library.custom_op(
    "fp8stack::scaled_mm",
    mutates_args=(),
    schema=(
        "(Tensor a, str fmt_a, Tensor b, str fmt_b, Tensor inverse_scale_a, Tensor inverse_scale_b, "
        "ScalarType out_dtype, Tensor? bias, str? backend, bool fast_accum) -> Tensor"
    ),
)
def _scaled_mm(a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, out_dtype, bias, backend, fast_accum):
    # Codes arrive as uint8: torch.library.opcheck compares inputs with operators that float8 tensors lack (torch 2.13).
    a, b = a.view(formats.get(fmt_a).dtype), b.view(formats.get(fmt_b).dtype)
    backend = backend or choose_backend(a, b)
    launch.record("scaled_mm", backend)
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):  # libraries refuse a zero-length contraction: pytorch/pytorch#192497
        out = torch.zeros((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias.to(out_dtype)
    if backend == "torch":
        return _torch(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias, fast_accum)
    run = _simulated if backend == "simulated" else scaled_mm_reference
    return run(a, b, inverse_scale_a, inverse_scale_b, out_dtype, bias)


@_scaled_mm.register_fake
def _(a, fmt_a, b, fmt_b, inverse_scale_a, inverse_scale_b, out_dtype, bias, backend, fast_accum):
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
) -> torch.Tensor:
    """a @ b, times the inverse scales, plus bias: (M, N) in out_dtype.

    a: (M, K), FP8, row-major. b: (K, N), FP8, column-major. inverse_scale_a: float32 (), (M,) or (M, 1).
    inverse_scale_b: float32 (), (N,) or (1, N). bias: (N,). backend: one of BACKENDS, or None for the table's choice.
    fast_accum: let the hardware accumulate with fewer bits (torch backend). pad: append zero codes up to the next
    multiple of 16 along K and N.

    out_dtype: bfloat16 or float32; with a scale for each row the torch backend gives bfloat16 only.

    Raises ValueError, naming the dimension, for sizes, layouts, scales, a backend and an out_dtype that do not fit;
    UnsupportedDtype for operands that are not FP8 or that the device cannot multiply.
    """
    fmt_a, fmt_b = formats.get(a.dtype).name, formats.get(b.dtype).name
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; expected (M, K) and (K, N); "
            "flatten leading dimensions, and give b transposed"
        )
    if backend is not None:
        _check_backend(backend, a)
    k, n = b.shape
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected (N,) = ({n},), one number a column; reshape or drop it"
        )
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype is {out_dtype}; expected torch.bfloat16 or torch.float32; convert the result afterwards"
        )
    scale_a = _vector(inverse_scale_a, a.shape[0], "inverse_scale_a", "M", column=True)
    scale_b = _vector(inverse_scale_b, n, "inverse_scale_b", "N", column=False)
    if pad:
        a, b = _padded(a, 0, -k % MULTIPLE), _padded(b.t(), -n % MULTIPLE, -k % MULTIPLE).t()
        if scale_b.dim():
            scale_b = torch.nn.functional.pad(scale_b, (0, -n % MULTIPLE), value=1.0)
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, -n % MULTIPLE))
    for name, size in (("K", b.shape[0]), ("N", b.shape[1])):
        if size % MULTIPLE:
            raise ValueError(
                f"{name} is {size}, not a multiple of {MULTIPLE}; FP8 matrix hardware takes multiples of {MULTIPLE} "
                "only; pad the tensors, or pass pad=True"
            )
    if not _row_major(a):
        raise ValueError(f"a has strides {a.stride()}; expected row-major (unit stride along K); pass a.contiguous()")
    if not _row_major(b.t()):
        raise ValueError(
            f"b has strides {b.stride()}; expected column-major (unit stride along K); pass b.t().contiguous().t()"
        )
    a, b = a.view(torch.uint8), b.view(torch.uint8)
    out = _scaled_mm(a, fmt_a, b, fmt_b, scale_a, scale_b, out_dtype, bias, backend, fast_accum)
    return out[:, :n].contiguous() if out.shape[1] != n else out


def _check_backend(backend: str, a: torch.Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}, or None for the table's choice"
        )
    if backend == "simulated" and not device.detect(a.device).simulated:
        raise ValueError(
            f"backend 'simulated' was asked for, but {device.OVERRIDE} does not set another arch than this device's; "
            f"expected it only while simulating; set {device.OVERRIDE}, for example {device.OVERRIDE}=gfx942"
        )


def _row_major(x: torch.Tensor) -> bool:
    """Unit stride along the last dimension (irrelevant where there is nothing to step over)."""
    return x.stride(1) == 1 or x.shape[1] <= 1 or x.numel() == 0


def _vector(scale: torch.Tensor, size: int, name: str, dimension: str, column: bool) -> torch.Tensor:
    """An inverse scale as () or contiguous (size,)."""
    shapes = ((), (size,), (size, 1) if column else (1, size))
    if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        raise ValueError(
            f"{name} is {scale.dtype} of shape {tuple(scale.shape)}; expected float32 of shape (), ({dimension},) = "
            f"({size},) or {shapes[2]}; pass the inverse scale that the quantiser returned"
        )
    return scale if scale.dim() == 0 else scale.reshape(size)


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x (2-D, FP8), row-major, with zero codes appended."""
    codes = torch.nn.functional.pad(x.view(torch.uint8), (0, columns, 0, rows))
    return codes.contiguous().view(x.dtype)
