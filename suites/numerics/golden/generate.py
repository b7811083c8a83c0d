"""Makes the golden tables: what every byte means, and which byte every awkward input becomes.

Why: kernel and reference share their constants, so comparing one with the other cannot see a wrong constant. These
tables are the third opinion. They come from the definition of the formats and of the scales by brute force in whole
numbers: every float32 is an integer multiple of 2^-149, so an input, a decode and a midpoint are plain Python integers,
a quotient is rounded by divmod, and "nearest" is a search over the decodes. Nothing of fp8stack is imported, nor torch,
NumPy or ml_dtypes: their FP8 is under test. "Rule n" below is the scale's rule n as fp8stack/scaling.py lists them.

Files, one row a line, all numbers as hexadecimal bit patterns (INDEX.json: rows and SHA-256 of each file):
    <format>.decode.csv      code, float32 bits (every NaN is written 7fc00000; sign and payload are not promised)
    <format>.encode.csv      name, float32 bits, code: bare saturating casts; every midpoint and one ulp to either side,
                             both signs, then the cast rows by name
    rowwise.<format>.csv     name, dtype, pow2, x, codes, scale, inverse_scale: x is one scaling unit
    tensorwise.<format>.csv  the same, rows of the 2-D x separated by "/"
    mxfp8.<format>.csv       name, dtype, mode, x, codes, byte: x is one block of at most 32, mode rounds its scale
    e8m0fnu.decode.csv       byte, float32 bits

Run `python suites/numerics/golden/generate.py` to write them, with `--check` to compare without writing (exit 1 on a
difference). Not here: reading (loader.py), and every operation that is not one of rules 1 to 7.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent

F32_NAN = 0x7FC00000
F32_INF = 0x7F800000
F32_MAX = 0x7F7FFFFF
SIGN = 0x80000000
UNIT = 149  # values are counted in units of 2^-149, the smallest float32
CAP_SCALE = (127 + 120) << 23  # rule 4: 2^120, so that the scale and its inverse are normal numbers


@dataclass(frozen=True)
class Spec:
    """One row of the format table, typed from the formats' definitions and from nowhere else."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_codes: tuple[int, ...]
    inf_codes: tuple[int, ...]
    nan_code: int  # the one that casts write
    negative_zero: bool
    maximum: int


SPECS = {
    spec.name: spec
    for spec in (
        Spec("e4m3fn", 4, 3, 7, (0x7F, 0xFF), (), 0x7F, True, 448),
        Spec("e4m3fnuz", 4, 3, 8, (0x80,), (), 0x80, False, 240),
        Spec("e5m2", 5, 2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC), 0x7F, True, 57344),
        Spec("e5m2fnuz", 5, 2, 16, (0x80,), (), 0x80, False, 57344),
    )
}


# --- float32 as whole numbers -----------------------------------------------------------------------------------------


def is_finite(bits: int) -> bool:
    """True unless the float32 is an infinity or a NaN."""
    return bits & F32_INF != F32_INF


def magnitude(bits: int) -> int:
    """Absolute value of a finite float32 in units of 2^-149."""
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    return mantissa if exponent == 0 else (mantissa | 1 << 23) << (exponent - 1)


def round_to_float32(numerator: int, denominator: int) -> int:
    """Bits of the rational numerator/denominator >= 0 (units of 2^-149), to nearest, ties to even, overflow to Inf."""
    shift = max(0, (numerator // denominator).bit_length() - 24)
    divisor = denominator << shift
    quotient, rest = divmod(numerator, divisor)
    if 2 * rest > divisor or (2 * rest == divisor and quotient & 1):
        quotient += 1
    return min((shift << 23) + quotient, F32_INF)


def from_units(units: int) -> int:
    """Bits of an integer number of units that float32 holds exactly."""
    bits = round_to_float32(units, 1)
    assert magnitude(bits) == units, units
    return bits


def from_integer(value: int) -> int:
    """Bits of a float32 that holds the integer exactly."""
    return from_units(abs(value) << UNIT) | (SIGN if value < 0 else 0)


def nearest_float32(value: float) -> int:
    """Bits of a Python float rounded to float32."""
    numerator, denominator = abs(value).as_integer_ratio()
    return round_to_float32(numerator << UNIT, denominator) | (SIGN if value < 0 else 0)


def power_of_two(exponent: int) -> int:
    """Bits of 2^exponent, subnormals included."""
    return from_units(1 << (exponent + UNIT))


# --- the formats ------------------------------------------------------------------------------------------------------


def decode(code: int, spec: Spec) -> int:
    """Float32 bits of one code, from the definition of the format."""
    if code in spec.nan_codes:
        return F32_NAN
    sign = SIGN if code & 0x80 else 0
    if code in spec.inf_codes:
        return sign | F32_INF
    exponent = code >> spec.mantissa_bits & (1 << spec.exponent_bits) - 1
    mantissa = code & (1 << spec.mantissa_bits) - 1
    significand = mantissa if exponent == 0 else mantissa | 1 << spec.mantissa_bits
    return sign | from_units(significand << (max(exponent, 1) - spec.bias - spec.mantissa_bits + UNIT))


def magnitudes(spec: Spec) -> dict[int, int]:
    """Code -> magnitude in units of 2^-149, over the finite codes whose sign bit is clear."""
    codes = (code for code in range(0x80) if is_finite(decode(code, spec)))
    return {code: magnitude(decode(code, spec)) for code in codes}


def encode(bits: int, spec: Spec, table: dict[int, int]) -> int:
    """Code of one float32: clamp, then the nearest decode by search, ties to the even code, rule 6 for the rest."""
    if not is_finite(bits) and bits & 0x7FFFFF:
        return spec.nan_code
    limit = max(table.values())
    target = min(magnitude(bits), limit) if is_finite(bits) else limit
    code = min(table, key=lambda candidate: (abs(table[candidate] - target), candidate & 1))
    if code == 0 and not spec.negative_zero:
        return 0
    return code | (0x80 if bits & SIGN else 0)


def midpoints(table: dict[int, int]) -> Iterator[int]:
    """Every midpoint between neighbouring magnitudes, then the one above the maximum, which the clamp must absorb."""
    values = sorted(table.values())
    for low, high in pairwise(values):
        yield (low + high) // 2
    yield values[-1] + (values[-1] - values[-2]) // 2


# Inputs of a bare cast that other libraries are known to get wrong (pytorch/ao#1912, jax-ml/ml_dtypes#400).
CAST_ROWS: tuple[tuple[str, int], ...] = (
    ("zero", 0),
    ("negzero", SIGN),
    ("one", from_integer(1)),
    ("neg1", from_integer(-1)),
    ("124.3", nearest_float32(124.3)),
    ("232", from_integer(232)),
    ("240", from_integer(240)),
    ("247", from_integer(247)),
    ("248", from_integer(248)),
    ("249", from_integer(249)),
    ("448", from_integer(448)),
    ("449", from_integer(449)),
    ("463", from_integer(463)),
    ("464", from_integer(464)),
    ("465", from_integer(465)),
    ("480", from_integer(480)),
    ("1000", from_integer(1000)),
    ("neg1000", from_integer(-1000)),
    ("57344", from_integer(57344)),
    ("61439", from_integer(61439)),
    ("61440", from_integer(61440)),
    ("61441", from_integer(61441)),
    ("65536", from_integer(65536)),
    ("neg100000", from_integer(-100000)),
    ("max-float32", F32_MAX),
    ("neg-max-float32", F32_MAX | SIGN),
    ("inf", F32_INF),
    ("neginf", F32_INF | SIGN),
    ("nan", F32_NAN),
    ("negnan", F32_NAN | SIGN),
    ("signalling-nan", 0x7F800001),
    ("nan-payload", 0x7FFFFFFF),
    ("smallest-subnormal", 1),
    ("neg-smallest-subnormal", 1 | SIGN),
    ("largest-subnormal", 0x7FFFFF),
    ("smallest-normal", 0x800000),
    ("neg-smallest-normal", 0x800000 | SIGN),
    ("1e-20", nearest_float32(1e-20)),
    ("neg1e-20", nearest_float32(-1e-20)),
)


# --- the scales -------------------------------------------------------------------------------------------------------


def scale_from_amax(amax_bits: int, spec: Spec, pow2: bool) -> int:
    """Rules 2 to 5: float32 bits of the scale of a unit whose largest absolute value has these bits."""
    if not is_finite(amax_bits):
        return F32_NAN
    if amax_bits == 0:
        return power_of_two(0)
    quotient = round_to_float32(spec.maximum << UNIT + UNIT, magnitude(amax_bits))
    capped = min(quotient, CAP_SCALE)
    return capped & 0xFF800000 if pow2 else capped


def inverse_scale(scale_bits: int) -> int:
    """Rule 7: float32 bits of 1 / scale, rounded to nearest."""
    if not is_finite(scale_bits):
        return F32_NAN
    return round_to_float32(1 << UNIT + UNIT, magnitude(scale_bits))


def quantize_unit(unit: list[int], spec: Spec, pow2: bool, table: dict[int, int]) -> tuple[list[int], int, int]:
    """(codes, scale bits, inverse scale bits) of one scaling unit given as float32 bits."""
    amax_bits = max(bits & ~SIGN for bits in unit)
    scale = scale_from_amax(amax_bits, spec, pow2)
    if not is_finite(scale):
        return [spec.nan_code] * len(unit), scale, inverse_scale(scale)
    codes = []
    for bits in unit:
        product = round_to_float32(magnitude(bits) * magnitude(scale), 1 << UNIT) | bits & SIGN
        codes.append(encode(product, spec, table))
    return codes, scale, inverse_scale(scale)


MX_FORMATS = ("e4m3fn", "e5m2")
MX_MODES = ("floor", "ceil", "even", "rceil")


def floor_log2(units_: int) -> int:
    """floor(log2) of a positive integer number of units."""
    return units_.bit_length() - 1 - UNIT


def ceil_log2(units_: int) -> int:
    """ceil(log2) of a positive integer number of units."""
    return (units_ - 1).bit_length() - UNIT


def mx_exponent(amax_bits: int, spec: Spec, mode: str) -> int:
    """E of a block with this finite amax, before it is clamped: the scale is 2^E."""
    amax = magnitude(amax_bits)
    emax = spec.maximum.bit_length() - 1
    if amax == 0:
        return -127
    if mode == "floor":
        return floor_log2(amax) - emax
    if mode == "ceil":
        return ceil_log2(amax) - emax
    if mode == "even":
        dropped = max(0, amax.bit_length() - 1 - spec.mantissa_bits)
        half = 1 << dropped >> 1
        return floor_log2((amax + half) >> dropped << dropped) - emax
    inverse = round_to_float32(1 << UNIT, spec.maximum)
    product = magnitude(round_to_float32(amax * magnitude(inverse), 1 << UNIT))
    return ceil_log2(product) if product else -127


def quantize_mx(unit: list[int], spec: Spec, mode: str, table: dict[int, int]) -> tuple[list[int], int]:
    """(codes, E8M0 byte) of one block given as float32 bits."""
    amax_bits = max(bits & ~SIGN for bits in unit)
    if not is_finite(amax_bits):
        return [spec.nan_code] * len(unit), 0xFF
    exponent = min(max(mx_exponent(amax_bits, spec, mode), -127), 127)
    factor = magnitude(power_of_two(-exponent))
    products = [round_to_float32(magnitude(bits) * factor, 1 << UNIT) | bits & SIGN for bits in unit]
    return [encode(product, spec, table) for product in products], exponent + 127


def mx_units(spec: Spec, dtype: str) -> dict[str, list[int]]:
    """The units of the other ops, and amax where the modes differ, where E is clamped, where a product is subnormal."""
    step = 1 if dtype == "fp32" else 1 << 16

    def near(value: float) -> int:
        return nearest_float32(value) & -step

    result = dict(units(spec, dtype))
    amax = {
        "6": near(6.0),
        "0-3": near(0.3),
        "2^-140": power_of_two(-140) & -step,
        "2^-127": power_of_two(-127),
        "2^-126": power_of_two(-126),
        "3e38": near(3e38),
        "rounds-up": near(2.0 - 2.0 ** -(spec.mantissa_bits + 1)),
        "rounds-up-small": near((2.0 - 2.0 ** -(spec.mantissa_bits + 1)) * 2.0**-7),
    }
    for exponent in (-135, -127, -126, -7, 0, 7):
        amax[f"maximum-2^{exponent}"] = near(spec.maximum * 2.0**exponent)
    for name, bits in amax.items():
        for label, by in (("", 0), ("-ulp-up", step), ("-ulp-down", -step)):
            if bits + by >= 0:
                result[f"mx-{name}{label}"] = [bits + by, (max(bits - (1 << 23), 0) & -step) | SIGN, bits // 2 & -step]
    return result


def units(spec: Spec, dtype: str) -> dict[str, list[int]]:
    """Named scaling units of the contract as float32 bits that ``dtype`` holds exactly."""
    step = 1 if dtype == "fp32" else 1 << 16  # one ulp of the input dtype in float32 bits
    top = F32_MAX & -step

    def near(value: float) -> int:
        return nearest_float32(value) & -step | nearest_float32(value) & SIGN

    maximum = from_integer(spec.maximum)
    quarter = power_of_two(-2)
    one = power_of_two(0)
    table = magnitudes(spec)
    exact = [from_units(value) for value in midpoints(table)]
    ties = [bits for bits in exact if bits % step == 0 and bits < maximum]
    smallest = from_units(min(value for value in table.values() if value))
    cap_edge = near(spec.maximum * 2.0**-120)  # amax at which the quotient is 2^120
    result: dict[str, list[int]] = {
        "one": [one],
        "ones": [one] * 5,
        "negative-one": [one | SIGN, quarter],
        "zeros": [0] * 4,
        "negative-zeros": [SIGN] * 4,
        "mixed-zeros": [0, SIGN, 0, SIGN],
        "zero-among-ones": [one, 0, SIGN, one | SIGN],
        "maximum": [maximum, one, quarter | SIGN, 0],
        "negative-maximum": [maximum | SIGN, one | SIGN, quarter, SIGN],
        "maximum-ulp-up": [maximum + step, one, quarter | SIGN],
        "maximum-ulp-down": [maximum - step, one, quarter | SIGN],
        "ocp-maximum": [from_integer(448), from_integer(13), from_integer(-3)],
        "fnuz-maximum": [from_integer(240), from_integer(13), from_integer(-3)],
        "amax-104-5": [near(4.28125), near(1.0703125), near(-3.0)],
        "minus-three": [from_integer(-3)] * 3,
        "smallest-subnormal-code": [maximum, smallest, smallest | SIGN],
        "half-smallest-code": [maximum, smallest - (1 << 23), (smallest - (1 << 23)) | SIGN],
        "above-half-smallest-code": [maximum, smallest - (1 << 23) + step, (smallest - (1 << 23) + step) | SIGN],
        "underflow": [maximum, near(2.0**-30), near(2.0**-30) | SIGN],
        "1e-20": [near(1e-20), near(2.5e-21), near(-7e-21), 0],
        "1e-38": [near(1e-38), near(3e-39), near(-9e-39), 0],
        "1e-6": [near(1e-6), near(-2.2e-7), near(1e-9)],
        "smallest-normal-input": [0x800000, 0x400000, 0x800000 | SIGN],
        "subnormal-input": [0x7F0000, 0x010000, 0x330000 | SIGN],
        "smallest-subnormal-input": [step, 0, step | SIGN],
        "cap-edge": [cap_edge, cap_edge - (1 << 23)],
        "cap-edge-ulp-up": [cap_edge + step, cap_edge - (1 << 23)],
        "cap-edge-ulp-down": [cap_edge - step, cap_edge - (1 << 23)],
        "huge": [top, top - (3 << 23), (top - (1 << 23)) | SIGN],
        "2^127": [power_of_two(127), power_of_two(120) | SIGN, one],
        "nan-first": [F32_NAN, one, one | SIGN],
        "nan-middle": [one, F32_NAN, 0],
        "nan-last": [one, SIGN, F32_NAN],
        "negative-nan": [one, 0xFFC00000, quarter],
        "nan-payload": [one, 0x7FFF0000 if dtype == "bf16" else 0x7F800001, quarter],
        "inf": [one, F32_INF, 0],
        "negative-inf": [SIGN | F32_INF, one, SIGN],
        "inf-and-nan": [F32_INF, F32_NAN, one],
    }
    for exponent in (-60, -10, 0, 7, 60):
        power = power_of_two(exponent)
        tail = [power - (1 << 23) + 5 * step, (power - (2 << 23)) | SIGN]
        result[f"amax-2^{exponent}"] = [power, *tail]
        result[f"amax-2^{exponent}-ulp-up"] = [power + step, *tail]
        result[f"amax-2^{exponent}-ulp-down"] = [power - step, *tail]
    for start in range(
        0, len(ties), 31
    ):  # with amax at the maximum the scale is 1: every tie reaches the encoder as it is
        chunk = ties[start : start + 31]
        result[f"ties-{start}"] = [maximum, *(bits | (SIGN if i & 1 else 0) for i, bits in enumerate(chunk))]
    source = random.Random(f"{spec.name}-{dtype}")
    for index in range(6):
        width = (1, 7, 13, 17, 5, 16)[index]
        result[f"random-{index}"] = [
            (source.getrandbits(1) << 31 | (127 - source.getrandbits(3)) << 23 | source.getrandbits(23)) & -step
            for _ in range(width)
        ]
    return result


# --- the files --------------------------------------------------------------------------------------------------------


def decode_file(spec: Spec) -> list[str]:
    """256 rows: what every code means."""
    return ["code,bits", *(f"{code:02x},{decode(code, spec):08x}" for code in range(256))]


def e8m0_file() -> list[str]:
    """256 rows: byte b is 2^(b - 127), 0xFF is NaN; byte 0 is 2^-127, a float32 subnormal."""
    rows = (f"{byte:02x},{F32_NAN if byte == 0xFF else power_of_two(byte - 127):08x}" for byte in range(256))
    return ["code,bits", *rows]


def encode_file(spec: Spec) -> list[str]:
    """Midpoints, one ulp to either side, both signs; then the cast rows."""
    table = magnitudes(spec)
    rows = ["name,bits,code"]
    for index, units_ in enumerate(midpoints(table)):
        middle = from_units(units_)
        for label, bits in (("mid", middle), ("down", middle - 1), ("up", middle + 1)):
            for sign in (0, SIGN):
                name = f"{label}-{index}{'-neg' if sign else ''}"
                rows.append(f"{name},{bits | sign:08x},{encode(bits | sign, spec, table):02x}")
    rows.extend(f"{name},{bits:08x},{encode(bits, spec, table):02x}" for name, bits in CAST_ROWS)
    return rows


def written(bits: int, dtype: str) -> str:
    """An input as the file shows it: the bits of its own dtype."""
    return f"{bits:08x}" if dtype == "fp32" else f"{bits >> 16:04x}"


def op_file(op: str, spec: Spec) -> list[str]:
    """Rows of one op: name, dtype, pow2, x, codes, scale bits, inverse scale bits."""
    table = magnitudes(spec)
    rows = ["name,dtype,pow2,x,codes,scale,inverse_scale"]
    for dtype in ("bf16", "fp32"):
        for name, unit in units(spec, dtype).items():
            # A tensor with two rows, so that a scale along the wrong axis shows: the amax sits in one of them only.
            lines = [unit] if op == "rowwise" else [unit, [bits & SIGN for bits in unit]]
            flat = [bits for line in lines for bits in line]
            x = "/".join(" ".join(written(bits, dtype) for bits in line) for line in lines)
            for pow2 in (True, False):
                codes, scale, inverse = quantize_unit(flat, spec, pow2, table)
                width = len(unit)
                shown = "/".join(bytes(codes[i : i + width]).hex() for i in range(0, len(codes), width))
                rows.append(f"{name},{dtype},{int(pow2)},{x},{shown},{scale:08x},{inverse:08x}")
    return rows


def mx_file(spec: Spec) -> list[str]:
    """Rows of MXFP8: name, dtype, mode, x, codes, scale byte."""
    table = magnitudes(spec)
    rows = ["name,dtype,mode,x,codes,byte"]
    for dtype in ("bf16", "fp32"):
        for name, unit in mx_units(spec, dtype).items():
            x = " ".join(written(bits, dtype) for bits in unit)
            for mode in MX_MODES:
                codes, byte = quantize_mx(unit, spec, mode, table)
                rows.append(f"{name},{dtype},{mode},{x},{bytes(codes).hex()},{byte:02x}")
    return rows


def files() -> dict[str, str]:
    """File name -> text, the index included."""
    made: dict[str, list[str]] = {"e8m0fnu.decode.csv": e8m0_file()}
    for name, spec in SPECS.items():
        made[f"{name}.decode.csv"] = decode_file(spec)
        made[f"{name}.encode.csv"] = encode_file(spec)
        for op in ("rowwise", "tensorwise"):
            made[f"{op}.{name}.csv"] = op_file(op, spec)
        if name in MX_FORMATS:
            made[f"mxfp8.{name}.csv"] = mx_file(spec)
    texts = {name: "\n".join(lines) + "\n" for name, lines in sorted(made.items())}
    index = {
        name: {"rows": text.count("\n") - 1, "sha256": hashlib.sha256(text.encode("ascii")).hexdigest()}
        for name, text in texts.items()
    }
    return texts | {"INDEX.json": json.dumps(index, indent=1) + "\n"}


def main() -> int:
    """Write the tables, or compare them with what lies here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files here and write nothing")
    arguments = parser.parse_args()
    texts = files()
    stale = [name for name, text in texts.items() if not (HERE / name).is_file() or (HERE / name).read_text() != text]
    if not arguments.check:
        for name in stale:
            (HERE / name).write_text(texts[name])
    for name in stale:
        print(f"{'differs' if arguments.check else 'written'}: {name}", file=sys.stderr)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
