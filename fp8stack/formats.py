"""The four FP8 formats and E8M0: what their 256 codes mean, and the one saturating cast.

A code is a byte: sign, exponent, mantissa. Two dialects give the bytes different meanings:

    OCP  (e4m3fn, e5m2)          NaN 0x7F/0xFF (e5m2: 0x7D-0x7F, 0xFD-0xFF), e5m2 has infinities, -0 exists
    FNUZ (e4m3fnuz, e5m2fnuz)    one NaN, 0x80, where -0 would be; no infinity; exponent bias one higher

The cast, for every format (numerics: round to nearest even, saturating):

    |x| > MAX, +-Inf -> +-MAX         NaN -> nan_code, sign and payload dropped
    underflow to zero -> 0x00, or 0x80 for a negative x in OCP; always 0x00 in FNUZ

It is written in integer arithmetic instead of torch's own float8 casts: those return NaN, infinity or MAX beyond the
range depending on format, device and torch version (pytorch/ao#1912, pytorch/pytorch#178817), and a format that the
device lacks would not cast at all. Rounding works on the float32 bits: adding half a unit less one plus the lowest kept
bit, then dropping the rest, is round to nearest even, and a carry out of the mantissa is the next exponent by itself.

On a CPU that arithmetic runs once for each of the 65,536 upper halves of a float32, and a tensor is encoded by looking
its halves up, with "something was dropped" folded into their last bit (rounding to odd: exact, as long as two more bits
are kept than the result has). It is 3 to 6 times as fast, and training on a CPU spends most of its time here.

E8M0 is a scale format, not a number format: a byte is a power of two, 2^(byte - 127); 255 is NaN; there is no zero.

FORMATS is the only place where a format's constants are written. Kernels get theirs from it at launch.
Not here: choosing a scale (scaling.py), the kernels' encoder (kernels/cast.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch


class UnsupportedDtype(TypeError):
    """A dtype that an op does not take, or a format that a target cannot run. The message names both."""


@dataclass(frozen=True)
class Format:
    """One FP8 format. Codes are given as unsigned bytes.

    max: largest finite value; codes above it are never produced. bias: exponent field of 1.0.
    nan_code: the NaN that the cast writes. nan_codes, inf_codes: every byte that decodes to NaN, to an infinity.
    negative_zero: byte 0x80 is -0.
    """

    name: str
    dtype: torch.dtype
    max: float
    bias: int
    exponent_bits: int
    mantissa_bits: int
    nan_code: int
    nan_codes: tuple[int, ...]
    inf_codes: tuple[int, ...]
    negative_zero: bool
    smallest_normal: float
    smallest_subnormal: float


# Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3fn, e5m2); "8-bit Numerical Formats for Deep Neural
# Networks", arXiv:2206.02915 (the FNUZ pair).
FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format(
            name="e4m3fn",
            dtype=torch.float8_e4m3fn,
            max=448.0,
            bias=7,
            exponent_bits=4,
            mantissa_bits=3,
            nan_code=0x7F,
            nan_codes=(0x7F, 0xFF),
            inf_codes=(),
            negative_zero=True,
            smallest_normal=2.0**-6,
            smallest_subnormal=2.0**-9,
        ),
        Format(
            name="e4m3fnuz",
            dtype=torch.float8_e4m3fnuz,
            max=240.0,
            bias=8,
            exponent_bits=4,
            mantissa_bits=3,
            nan_code=0x80,
            nan_codes=(0x80,),
            inf_codes=(),
            negative_zero=False,
            smallest_normal=2.0**-7,
            smallest_subnormal=2.0**-10,
        ),
        Format(
            name="e5m2",
            dtype=torch.float8_e5m2,
            max=57344.0,
            bias=15,
            exponent_bits=5,
            mantissa_bits=2,
            nan_code=0x7F,
            nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
            inf_codes=(0x7C, 0xFC),
            negative_zero=True,
            smallest_normal=2.0**-14,
            smallest_subnormal=2.0**-16,
        ),
        Format(
            name="e5m2fnuz",
            dtype=torch.float8_e5m2fnuz,
            max=57344.0,
            bias=16,
            exponent_bits=5,
            mantissa_bits=2,
            nan_code=0x80,
            nan_codes=(0x80,),
            inf_codes=(),
            negative_zero=False,
            smallest_normal=2.0**-15,
            smallest_subnormal=2.0**-17,
        ),
    )
}

_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values()}

# float64 is left out: narrowing it to float32 first would round twice, and nothing here needs it.
_ENCODABLE = (torch.float32, torch.bfloat16, torch.float16)


def get(fmt: str | torch.dtype | Format) -> Format:
    """The format by name ("e4m3fnuz"), by torch dtype, or itself. Raises UnsupportedDtype for anything else."""
    if isinstance(fmt, Format):
        return fmt
    found = _BY_DTYPE.get(fmt) if isinstance(fmt, torch.dtype) else FORMATS.get(fmt) if isinstance(fmt, str) else None
    if found is None:
        raise UnsupportedDtype(
            f"{fmt!r} is not an FP8 format on any target; expected one of {', '.join(FORMATS)} or their torch dtypes; "
            "the arch's own are detect().arch.e4m3 and .e5m2 (fp8stack.device)"
        )
    return found


def encode(x: torch.Tensor, fmt: str | torch.dtype | Format) -> torch.Tensor:
    """Saturating cast of x to uint8 codes, round to nearest even.

    x: float32, bfloat16 or float16 (both widen to float32 exactly), any shape and strides. Returns uint8, same shape.
    Raises UnsupportedDtype for other dtypes; float64 too, since float64 -> float32 -> FP8 would round twice.
    """
    fmt = get(fmt)
    if x.dtype not in _ENCODABLE:
        raise UnsupportedDtype(
            f"cannot encode {x.dtype} as {fmt.name} on {x.device.type}; expected float32, bfloat16 or float16; "
            "convert first, knowing that float64 then rounds twice"
        )
    # Subclasses and compiled code cannot index a constant table; the bytes are the same either way.
    if x.device.type == "cpu" and type(x) is torch.Tensor and not torch.compiler.is_compiling():
        half = _half(x)
        return _codes_of_halves(fmt).index_select(0, half.reshape(-1)).view(half.shape)
    return _encode_bits(x.to(torch.float32), fmt)


def _half(x: torch.Tensor) -> torch.Tensor:
    """int32, the shape of x: the upper half of each float32, its last bit set where the lower half is not zero."""
    if x.dtype == torch.bfloat16:  # which is the upper half
        return x.view(torch.uint16).to(torch.int32)
    bits = x.to(torch.float32).view(torch.int32)
    carry = (bits & 0xFFFF).add_(0xFFFF)  # into bit 16, where any bit of the lower half is set
    return carry.bitwise_or_(bits).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


@functools.cache
def _codes_of_halves(fmt: Format) -> torch.Tensor:
    """uint8 (65536,): the code of the float32 whose upper half is the index and whose lower half is zero."""
    return _encode_bits((torch.arange(65536, dtype=torch.int32, device="cpu") << 16).view(torch.float32), fmt)


def _encode_bits(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The cast itself: float32 x to codes."""
    # Saturation: the one place. Without it codes run into the NaN codes and the sign bit.
    y = torch.clamp(x, -fmt.max, fmt.max)

    bits = y.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - fmt.mantissa_bits

    # Normal results. Re-biasing the exponent is one subtraction on the float32 bits.
    half_less_one = (1 << (dropped - 1)) - 1
    lowest_kept = (magnitude >> dropped).bitwise_and_(1)
    normal = lowest_kept.add_(half_less_one - ((127 - fmt.bias) << 23)).add_(magnitude).bitwise_right_shift_(dropped)

    # Subnormal results are multiples of one step. Adding the float32 whose last bit is worth that step leaves the
    # multiple, rounded to nearest even, in the low bits.
    anchor = 1 - fmt.bias - fmt.mantissa_bits + 23
    small = magnitude.clamp(max=(128 - fmt.bias) << 23).view(torch.float32)  # at most the smallest normal
    subnormal = small.add_(2.0**anchor).view(torch.int32).sub_((anchor + 127) << 23)

    # Below the smallest normal `normal` is too small; from there on `subnormal` stays at that number's code.
    code = torch.maximum(normal, subnormal)
    sign = (bits >> 24).bitwise_and_(0x80)
    if not fmt.negative_zero:
        sign &= -code >> 31  # 0 where the code is 0, else all ones
    return code.bitwise_or_(sign).to(torch.uint8).masked_fill_(torch.isnan(x), fmt.nan_code)


def cast(x: torch.Tensor, fmt: str | torch.dtype | Format) -> torch.Tensor:
    """encode(x, fmt) as a tensor of fmt.dtype: same input, same shape, same errors."""
    fmt = get(fmt)
    return encode(x, fmt).view(fmt.dtype)


def _value(fmt: Format, code: int) -> float:
    """What one code stands for."""
    if code in fmt.nan_codes:
        return math.nan
    sign = -1.0 if code & 0x80 else 1.0
    if code in fmt.inf_codes:
        return sign * math.inf
    exponent, mantissa = (code & 0x7F) >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    if exponent:
        mantissa += 1 << fmt.mantissa_bits
    return sign * math.ldexp(mantissa, max(exponent, 1) - fmt.bias - fmt.mantissa_bits)


@functools.cache
def _values(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """(256,) on the CPU: what each code stands for."""
    return torch.tensor([_value(fmt, code) for code in range(256)], dtype=dtype, device="cpu")


def decode(codes: torch.Tensor, fmt: str | torch.dtype | Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of codes (uint8, or a tensor of fmt.dtype) in dtype, same shape; exact, NaN and Inf included.

    dtype: float32 or float64. On a CPU one indexed load a code; torch's own conversion takes up to five times as long
    there. Elsewhere torch converts, which is exact for all 256 codes of each format. Raises UnsupportedDtype for codes
    of other dtypes, among them another format's.
    """
    fmt = get(fmt)
    if codes.dtype not in (torch.uint8, fmt.dtype):
        raise UnsupportedDtype(
            f"cannot decode {codes.dtype} as {fmt.name} on {codes.device.type}; expected uint8 codes or {fmt.dtype}; "
            "view the codes as uint8 to read them as another format"
        )
    if codes.device.type == "cpu" and type(codes) is torch.Tensor and not torch.compiler.is_compiling():
        index = codes.view(torch.uint8).to(torch.int32)
        return _values(fmt, dtype).index_select(0, index.reshape(-1)).view(index.shape)
    return codes.view(fmt.dtype).to(torch.float32).to(dtype)


def encode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) of powers of two (float32, positive): exponent + 127; NaN and +Inf -> 255.

    2^-127 and the powers below it, all float32 subnormals, give byte 0, which means 2^-127.
    Raises ValueError for a negative, zero or other number (a rounding mode is the caller's choice, made before), which
    reads the tensor back to the host; UnsupportedDtype for another dtype.
    """
    if scale.dtype != torch.float32:
        raise UnsupportedDtype(
            f"cannot encode {scale.dtype} as e8m0fnu on {scale.device.type}; expected float32; convert the scale first"
        )
    bits = scale.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal_power = (bits & 0x007FFFFF) == 0  # +Inf too
    subnormal_power = (bits < 0x00800000) & (bits & (bits - 1) == 0)
    good = torch.isnan(scale) | ((bits > 0) & (normal_power | subnormal_power))
    if not bool(good.all()):
        first = tuple(int(i) for i in torch.nonzero(~good)[0])
        raise ValueError(
            f"scale at {first} is {scale[first].item()!r}, which e8m0fnu cannot hold; expected a positive power of two "
            "or NaN; choose a rounding mode for the scale first"
        )
    return (magnitude >> 23).to(torch.uint8)  # NaN and Inf have exponent 255


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of E8M0 bytes (uint8 or float8_e8m0fnu), same shape: 2^(byte - 127), byte 0 a subnormal; 255 NaN.

    Raises UnsupportedDtype for another dtype.
    """
    if codes.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise UnsupportedDtype(
            f"cannot decode {codes.dtype} as e8m0fnu on {codes.device.type}; expected uint8 or float8_e8m0fnu; "
            "view the bytes as uint8"
        )
    byte = codes.view(torch.uint8).to(torch.int32)
    # Shifting byte 0 into the exponent field would give zero (pytorch/ao#4725): 2^-127 is the mantissa's top bit.
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
