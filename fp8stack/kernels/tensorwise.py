"""Tensorwise FP8 quantisation: one scale for a whole 2-D tensor.

    scale = FP8_MAX / max|x|       q = saturate(x * scale)

The exact rules are scaling.py's. Scales are not powers of two by default, as in the tensorwise recipe.
Traffic (bf16 in): two passes, for the maximum and for the cast: reads 2 * 2*M*K, writes M*K bytes: 5 bytes an element.
Layout: q row-major; inverse scale float32 ().

Not here yet: a kernel. The op runs its reference on every device and is recorded as `reference`. Nor column-major
output, nor quantising with a given scale.
"""

import torch

from fp8stack import formats, scaling
from fp8stack.kernels import cast, launch


def quantize_tensorwise_reference(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch; arguments and results as quantize_tensorwise."""
    codes, inverse_scale = scaling.quantize_reference(x, fmt, dim=None, pow2=pow2)
    return codes.view(torch.uint8).contiguous().view(codes.dtype), inverse_scale


@torch.library.custom_op(
    "fp8stack::quantize_tensorwise", mutates_args=(), schema="(Tensor x, str fmt, bool pow2) -> (Tensor, Tensor)"
)
def _quantize_tensorwise(x, fmt, pow2):
    launch.record("quantize_tensorwise", "reference")
    return quantize_tensorwise_reference(x, fmt, pow2)


@_quantize_tensorwise.register_fake
def _(x, fmt, pow2):
    q = torch.empty(x.shape, dtype=formats.get(fmt).dtype, device=x.device)
    return q, torch.empty((), dtype=torch.float32, device=x.device)


def quantize_tensorwise(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x with one scale.

    x: (M, K), bfloat16 or float32, any strides. pow2: round the scale down to a power of two.
    Returns codes (M, K) of fmt.dtype, row-major, and the inverse scale, float32 (): 1 for a tensor of zeros.
    Raises UnsupportedDtype for other dtypes, ValueError for other ranks.
    """
    cast.require_input(x, "quantize_tensorwise")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected two dimensions (M, K); flatten the leading ones")
    return _quantize_tensorwise(x, formats.get(fmt).name, pow2)
