"""The pieces that all quantisation kernels share, and the bare cast that lets them be tested alone.

    load_bits    bf16 or float32 elements as float32 bits (int32)
    float_bits   the same of elements that were loaded before
    scale_bits   amax -> scale -> bits, the twin of scaling.scale_from_amax
    inverse_bits scale -> inverse scale
    encode       float32 -> codes, the twin of formats.encode
    decode       codes -> float32, the twin of formats.decode

Codes are uint8 in and out and bf16 arrives as int16: Triton's interpreter rounds FP8 casts wrongly, adds bf16 numbers
as raw integers and drops bf16 subnormals (triton-lang/triton#8322, #10945, #11584). With integers in and out, the
interpreter and every GPU compute the same bytes.

encode has two ways to the same bytes. Where the target has the instruction and this Triton emits it
(fp8stack._triton.NATIVE_CASTS), the cast is native: one conversion for two elements. Otherwise it is arithmetic on the
bits, exact everywhere: FNUZ codes on an NVIDIA GPU, OCP codes on MI300X, and the interpreter. Saturation comes before
both, since hardware and compilers disagree about it. The NaN code is put in afterwards, except where the instruction is
known to write it (_NATIVE_NAN): picking single bytes out of packed words costs more than the rest of the cast.

Traffic of cast_saturating (bf16 in): reads 2 bytes and writes 1 an element.
Not here: scales for GEMMs, reductions.
"""

import functools

import torch

from fp8stack import _triton, device, formats
from fp8stack._triton import LAUNCH_OPTIONS, jit, tl
from fp8stack.kernels import launch

_NATIVE_TYPES = {"e4m3fn": "float8e4nv", "e4m3fnuz": "float8e4b8", "e5m2": "float8e5", "e5m2fnuz": "float8e5b16"}

# (target, format) whose native cast writes the format's NaN code for every NaN: NVIDIA's, by the PTX ISA (cvt with
# .satfinite gives the canonical NaN, 0x7F), and FNUZ, which has no other NaN.
_NATIVE_NAN = {
    *((f"sm_{n}", fmt) for n in (89, 90, 100, 120) for fmt in ("e4m3fn", "e5m2")),
    *(("gfx942", fmt) for fmt in ("e4m3fnuz", "e5m2fnuz")),
}

INPUTS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
"""Dtypes that kernels take -> the integers they are loaded as."""


def constants(fmt: formats.Format, target: str) -> dict[str, object]:
    """The constexpr arguments of encode, by parameter name, for a format on a target (an arch name)."""
    return dict(_constants(fmt, target))


@functools.cache  # every launch asks
def _constants(fmt: formats.Format, target: str) -> dict[str, object]:
    native = not _triton.INTERPRETING and _triton.native_cast(target, fmt.name)
    return {
        "MAX": fmt.max,
        "BIAS": fmt.bias,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "NAN_CODE": fmt.nan_code,
        "NEGATIVE_ZERO": fmt.negative_zero,
        "NATIVE": getattr(tl, _NATIVE_TYPES[fmt.name]) if native else None,
        "NATIVE_NAN": native and (target, fmt.name) in _NATIVE_NAN,
    }


def native_type(fmt: formats.Format) -> object:
    """Triton's type of a format. FNUZ types exist on every target but NVIDIA's."""
    return getattr(tl, _NATIVE_TYPES[fmt.name])


def nan_apart(fmt: formats.Format, target: str) -> bool:
    """Whether a kernel whose NaN codes come in whole units should encode as if there were none and write them after.

    True but for NVIDIA's native casts, which keep NaN through clamp and conversion at no cost. Elsewhere NaN takes
    three instructions an element and, on AMD, a pair of scalar registers each.
    """
    return not (target.startswith("sm_") and bool(constants(fmt, target)["NATIVE_NAN"]))


def require_input(x: torch.Tensor, op: str) -> None:
    """Raise UnsupportedDtype, naming dtype and device, for what no kernel takes."""
    if x.dtype not in INPUTS:
        raise formats.UnsupportedDtype(
            f"{op} cannot take {x.dtype} on {x.device.type}; expected bfloat16 or float32; convert the input first"
        )


@jit
def float_bits(elements):
    """float32 bits (int32) of elements as loaded: int16 (bf16) or int32 (float32)."""
    if elements.dtype == tl.int16:
        elements = elements.to(tl.int32) << 16
    return elements


@jit
def load_bits(pointers, mask):
    """float32 bits of the elements at int16 (bf16) or int32 (float32) pointers; masked lanes read +0.0."""
    return float_bits(tl.load(pointers, mask=mask, other=0))


@jit
def scale_bits(amax_bits, MAX: tl.constexpr, POW2: tl.constexpr):
    """Bits of the scale, from the bits of amax (int32, the largest absolute bits of the unit)."""
    maximum = tl.full(amax_bits.shape, MAX, tl.float32)
    # The cap of the scale at 2^120, as a floor of the divisor: the same bits, and the division meets no subnormal.
    smallest = tl.full(amax_bits.shape, MAX * 7.52316384526264e-37, tl.float32)  # MAX * 2^-120, exact
    divisor = tl.maximum(amax_bits, smallest.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    divisor = tl.where(amax_bits == 0, maximum, divisor)  # scale 1
    bits = tl.math.div_rn(maximum, divisor).to(tl.int32, bitcast=True)
    if POW2:
        bits = bits & 0x7F800000
    return tl.where(amax_bits >= 0x7F800000, 0x7FC00000, bits)  # NaN and Inf


@jit
def inverse_bits(bits):
    """Bits of 1 / scale, rounded to nearest, from the bits of the scale."""
    one = tl.full(bits.shape, 1.0, tl.float32)
    inverse = tl.math.div_rn(one, bits.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F800000, 0x7FC00000, inverse)


@jit
def encode(
    x,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
    MAY_BE_NAN: tl.constexpr = True,
):
    """Saturating cast of float32 x to uint8 codes, round to nearest even.

    NATIVE: the FP8 type to cast to, or None. NATIVE_NAN: that cast writes NAN_CODE for a NaN. MAY_BE_NAN: False saves
    what NaN costs, and leaves open which code it becomes: for a caller that writes such codes again.
    """
    # Saturation: the one place in the kernels. NaN passes.
    if MAY_BE_NAN:
        y = tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    else:
        y = tl.clamp(x, -MAX, MAX)

    if NATIVE is not None:
        code = y.to(NATIVE).to(tl.uint8, bitcast=True)
    else:
        # The same steps as formats.encode, where they are explained.
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF

        DROPPED: tl.constexpr = 23 - MANTISSA_BITS
        REBIAS: tl.constexpr = (1 << (DROPPED - 1)) - 1 - ((127 - BIAS) << 23)
        normal = (((magnitude >> DROPPED) & 1) + REBIAS + magnitude) >> DROPPED

        ANCHOR_BITS: tl.constexpr = (151 - BIAS - MANTISSA_BITS) << 23
        anchor = tl.full(bits.shape, ANCHOR_BITS, tl.int32).to(tl.float32, bitcast=True)
        small = tl.minimum(magnitude, (128 - BIAS) << 23).to(tl.float32, bitcast=True)
        subnormal = (small + anchor).to(tl.int32, bitcast=True) - ANCHOR_BITS

        magnitude_code = tl.maximum(normal, subnormal)
        sign = (bits >> 24) & 0x80
        if not NEGATIVE_ZERO:
            sign = tl.where(magnitude_code == 0, 0, sign)
        code = (magnitude_code | sign).to(tl.uint8)

    if MAY_BE_NAN and not NATIVE_NAN:
        code = tl.where(x != x, NAN_CODE, code).to(tl.uint8)
    return code


@jit
def decode(
    codes,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    FIRST_NAN: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """float32 values of uint8 codes. FIRST_NAN: from there up, a code without its sign is NaN (128: none)."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    STEP_BITS: tl.constexpr = (128 - BIAS - MANTISSA_BITS) << 23
    step = tl.full(code.shape, STEP_BITS, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32) * step).to(tl.int32, bitcast=True)
    normal = (magnitude << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23)
    bits = tl.where(magnitude < (1 << MANTISSA_BITS), subnormal, normal)
    bits = tl.where(magnitude == INFINITY_CODE, 0x7F800000, bits) | ((code & 0x80) << 24)
    bits = tl.where((magnitude >= FIRST_NAN) | (code == NAN_CODE), 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@jit
def _cast_saturating_kernel(
    x,
    q,
    count,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    NATIVE_NAN: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    values = load_bits(x + at, mask).to(tl.float32, bitcast=True)
    codes = encode(values, MAX, BIAS, MANTISSA_BITS, NAN_CODE, NEGATIVE_ZERO, NATIVE, NATIVE_NAN)
    tl.store(q + at, codes, mask=mask)


@jit
def _decode_codes_kernel(
    q,
    x,
    count,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    FIRST_NAN: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    codes = tl.load(q + at, mask=mask, other=0)
    tl.store(x + at, decode(codes, BIAS, MANTISSA_BITS, FIRST_NAN, INFINITY_CODE, NAN_CODE), mask=mask)


_BLOCK = 4096


def cast_saturating_reference(x: torch.Tensor, fmt: str | torch.dtype | formats.Format) -> torch.Tensor:
    """formats.cast, row-major."""
    fmt = formats.get(fmt)
    return formats.encode(x, fmt).contiguous().view(fmt.dtype)


@torch.library.custom_op("fp8stack::cast_saturating", mutates_args=(), schema="(Tensor x, str fmt) -> Tensor")
def _cast_saturating(x, fmt):
    which = launch.implementation(x)
    launch.record("cast_saturating", which)
    if which == "reference":
        return cast_saturating_reference(x, fmt)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    fmt = formats.get(fmt)
    if q.numel():
        with launch.on_device(x):
            _cast_saturating_kernel[(-(-x.numel() // _BLOCK),)](
                x.contiguous().view(INPUTS[x.dtype]),
                q,
                x.numel(),
                BLOCK=_BLOCK,
                **constants(fmt, device.detect(x.device).target.name),
                **LAUNCH_OPTIONS,
            )
    return q.view(fmt.dtype)


@_cast_saturating.register_fake
def _(x, fmt):
    return torch.empty(x.shape, dtype=formats.get(fmt).dtype, device=x.device)


def cast_saturating(x: torch.Tensor, fmt: str | torch.dtype | formats.Format) -> torch.Tensor:
    """The bare cast, no scale: x (bfloat16 or float32, any shape and strides) -> codes (fmt.dtype, row-major).

    +-Inf becomes +-MAX, NaN the NaN code. Raises UnsupportedDtype for other inputs.
    """
    require_input(x, "cast_saturating")
    return _cast_saturating(x, formats.get(fmt).name)


@torch.library.custom_op("fp8stack::decode_codes", mutates_args=(), schema="(Tensor codes, str fmt) -> Tensor")
def _decode_codes(codes, fmt):
    which = launch.implementation(codes)
    launch.record("decode_codes", which)
    if which == "reference":
        return formats.decode(codes, fmt).contiguous()
    fmt = formats.get(fmt)
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if x.numel():
        with launch.on_device(codes):
            _decode_codes_kernel[(-(-x.numel() // _BLOCK),)](
                codes.contiguous(),
                x,
                x.numel(),
                BLOCK=_BLOCK,
                BIAS=fmt.bias,
                MANTISSA_BITS=fmt.mantissa_bits,
                FIRST_NAN=fmt.nan_codes[0],
                INFINITY_CODE=fmt.inf_codes[0] if fmt.inf_codes else 0x80,
                NAN_CODE=fmt.nan_code,
                **LAUNCH_OPTIONS,
            )
    return x


@_decode_codes.register_fake
def _(codes, fmt):
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def decode_codes(codes: torch.Tensor, fmt: str | torch.dtype | formats.Format) -> torch.Tensor:
    """float32 values, row-major, of codes (uint8 or fmt.dtype, any shape and strides). Raises UnsupportedDtype."""
    fmt = formats.get(fmt)
    if codes.dtype not in (torch.uint8, fmt.dtype):
        raise formats.UnsupportedDtype(
            f"decode_codes cannot read {codes.dtype} as {fmt.name} on {codes.device.type}; expected uint8 or "
            f"{fmt.dtype}; view the codes as uint8"
        )
    return _decode_codes(codes.view(torch.uint8), fmt.name)
