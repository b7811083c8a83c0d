"""From amax to scale to codes, in plain torch: the specification that every kernel is compared with, bit by bit.

For a scaling unit (a row, a column, a tensor ...) of x, and MAX of the format:

    amax    = max |x| in float32; a NaN or an infinity in the unit survives as such
    scale   = NaN                       amax is not finite: the whole unit becomes NaN codes, no other unit changes
              1                         amax is 0 (a zero row is no error, pytorch/ao#4713)
              RN32(MAX / amax)          otherwise, at most 2^120 so that the scale and its inverse are normal numbers
    pow2    : clear the mantissa bits of that quotient, which is the power of two below it. No log2, so no rounding
    code    = saturate(RN32(x * scale))
    inverse = RN32(1 / scale)           what a GEMM multiplies its result with

There is no epsilon. A floor under amax, as others have it, makes small gradients vanish.

Why the quotient is taken in float64: a float32 division is approximate in compiled GPU code, and a bf16 one is what
made eager and compiled scales differ (pytorch/pytorch#136181). Rounding the float64 quotient of two float32 numbers to
float32 gives the correctly rounded float32 quotient (53 >= 2 * 24 + 2 bits), the one that kernels get from `div_rn`.

Why amax is an integer maximum: for non-negative floats the order of the bits is the order of the numbers, with infinity
and then NaN on top. A float maximum drops NaN on some targets and keeps it on others.

Granularity is a dimension to reduce, nothing else changes. Not here: MXFP8's power-of-two bytes.
"""

from __future__ import annotations

import torch

from fp8stack import formats

NAN_BITS = 0x7FC00000
"""The NaN that a scale and its inverse hold, as float32 bits."""

MAX_SCALE = 2.0**120
"""Cap of a scale: it and its inverse stay normal float32 numbers."""

_INFINITY_BITS = 0x7F800000
_EXPONENT_BITS = 0x7F800000


def amax(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """max |x| over dim (removed from the shape), or over everything, as float32; 0 over an empty dim.

    x: bfloat16, float16 or float32, any strides. NaN and Inf anywhere in the unit come out as a NaN or Inf.
    Raises UnsupportedDtype for other dtypes.
    """
    if x.dtype == torch.bfloat16:
        magnitude = x.view(torch.int16) & 0x7FFF
    elif x.dtype in (torch.float32, torch.float16):
        magnitude = x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    else:
        raise formats.UnsupportedDtype(
            f"cannot take the amax of {x.dtype} on {x.device.type}; expected bfloat16, float16 or float32; "
            "convert first"
        )
    if dim is None:
        magnitude, dim = magnitude.reshape(-1), 0
    if magnitude.shape[dim] == 0:
        top = magnitude.sum(dim, dtype=torch.int32)
    else:
        top = magnitude.amax(dim).to(torch.int32)
    return (top << 16 if x.dtype == torch.bfloat16 else top).view(torch.float32)


def scale_from_amax(amax: torch.Tensor, fmt: str | torch.dtype | formats.Format, pow2: bool = True) -> torch.Tensor:
    """The multiplier into FP8, float32, same shape as amax (float32, non-negative, or NaN).

    pow2: round down to a power of two. Raises UnsupportedDtype for what is no FP8 format.
    """
    fmt = formats.get(fmt)
    if amax.dtype != torch.float32:
        raise formats.UnsupportedDtype(
            f"cannot take a scale from an amax of {amax.dtype} on {amax.device.type}; expected float32; take it with "
            "scaling.amax, or convert it first"
        )
    quotient = (fmt.max / amax.to(torch.float64)).to(torch.float32)
    bits = quotient.clamp(max=MAX_SCALE).view(torch.int32)
    if pow2:
        bits = bits & _EXPONENT_BITS
    amax_bits = amax.view(torch.int32)
    bits = torch.where(amax_bits == 0, _bits(1.0, bits), bits)
    # As bits, because no two compilers agree on the payload of a NaN.
    bits = torch.where(amax_bits >= _INFINITY_BITS, _bits(NAN_BITS, bits), bits)
    return bits.view(torch.float32)


def inverse_scale(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale (float32, same shape), rounded to nearest; exact for powers of two; a NaN gives the NaN of NAN_BITS.

    Never amax / MAX: that differs from 1 / scale in a quarter of all cases.
    """
    bits = (1.0 / scale.to(torch.float64)).to(torch.float32).view(torch.int32)
    return torch.where(torch.isnan(scale), _bits(NAN_BITS, bits), bits).view(torch.float32)


def _bits(value: int | float, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, float):
        return torch.full((), value, dtype=torch.float32, device=like.device).view(torch.int32)
    return torch.full((), value, dtype=torch.int32, device=like.device)


def quantize_reference(
    x: torch.Tensor, fmt: str | torch.dtype | formats.Format, dim: int | None = None, pow2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x with one scale for each slice along dim, or one for all of x.

    x: bfloat16, float16 or float32, any shape. Returns codes (fmt.dtype, the shape and, where dense, the strides of x)
    and the inverse scale (float32, the shape of x without dim; () without one). Raises UnsupportedDtype for other
    dtypes.
    """
    fmt = formats.get(fmt)
    scale = scale_from_amax(amax(x, dim), fmt, pow2)
    factor = scale if dim is None else scale.unsqueeze(dim)
    # A bf16 number times a power of two is one too, unless it is so small that every format rounds it to zero.
    narrow = torch.bfloat16 if pow2 and x.dtype == torch.bfloat16 else torch.float32
    return formats.cast(x.to(narrow) * factor.to(narrow), fmt), inverse_scale(scale)
