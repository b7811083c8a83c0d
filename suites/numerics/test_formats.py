"""The formats: what every byte means and which byte every awkward float32 becomes.

Three parties are each held to the golden tables: fp8stack.formats, torch's own casts, and ml_dtypes. torch and
ml_dtypes may differ where ML_DTYPES and TORCH say so, and must: a difference that is not listed is red, and so is a
listed one that no longer occurs. torch's behaviour beyond the range changed between versions, so its rows carry the
versions they were seen with; on a version without a row only unlisted differences are red.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from suites.cases import FORMATS, from_bits
from suites.compare import assert_bits_equal
from suites.numerics import oracle
from suites.numerics.golden import generate, loader

EACH_FORMAT = [pytest.param(name, id=f"formats-{name}") for name in FORMATS]


def golden_inputs(fmt: str, device: str = "cpu") -> torch.Tensor:
    """float32 (rows,): the inputs of the golden encode rows."""
    return from_bits([row.bits for row in loader.encodes(fmt)], torch.float32).to(device)


def golden_codes(fmt: str) -> torch.Tensor:
    """uint8 (rows,): the codes of the golden encode rows."""
    return torch.tensor([row.code for row in loader.encodes(fmt)], dtype=torch.uint8)


def golden_names(fmt: str) -> list[str]:
    """The names of the golden encode rows."""
    return [row.name for row in loader.encodes(fmt)]


# --- fp8stack.formats against the golden tables -----------------------------------------------------------------------


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_decode(fmt: str, device: str) -> None:
    """All 256 codes decode to the golden values, bit by bit, as uint8 and as the torch dtype; NaN codes to a NaN."""
    expected = oracle.decode_table(fmt)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for given in (codes, codes.view(formats.get(fmt).dtype)):
        actual = formats.decode(given, fmt)
        assert actual.isnan().cpu().tolist() == expected.isnan().tolist()
        assert_bits_equal(expected.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), _without_nan(actual), fmt)


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, x)


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_encode(fmt: str, device: str) -> None:
    """Every midpoint and its float32 neighbours, both signs, and the cast rows, become the golden codes."""
    actual = formats.encode(golden_inputs(fmt, device), fmt)
    assert_bits_equal(golden_codes(fmt), actual, f"{fmt} codes", golden_names(fmt))


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_encode_parameter(fmt: str, device: str) -> None:
    """A Parameter, and any other subclass of Tensor, takes whatever path it must to the same golden codes."""
    x = torch.nn.Parameter(golden_inputs(fmt, device), requires_grad=False)
    assert_bits_equal(golden_codes(fmt), formats.encode(x, fmt), f"{fmt} codes", golden_names(fmt))


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_round_trip(fmt: str, device: str) -> None:
    """encode(decode(code)) is the code, but for NaN and infinite codes, which become the NaN code and +-max."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    row = formats.get(fmt)
    back = formats.encode(formats.decode(codes, fmt), fmt).cpu().tolist()
    largest = 0x7F if fmt.endswith("fnuz") else {"e4m3fn": 0x7E, "e5m2": 0x7B}[fmt]
    for code, got in enumerate(back):
        expected = code
        if code in row.nan_codes:
            expected = row.nan_code
        elif code in row.inf_codes:
            expected = largest | (code & 0x80)
        assert got == expected, f"{fmt} code {code:#04x} came back as {got:#04x}; expected {expected:#04x}"


# Typed from the definitions of the formats, not copied from fp8stack: max, bias, smallest normal, smallest subnormal,
# NaN codes, infinities, code that a NaN becomes, -0 exists.
FACTS = {
    "e4m3fn": (448.0, 7, 2.0**-6, 2.0**-9, (0x7F, 0xFF), (), 0x7F, True),
    "e5m2": (57344.0, 15, 2.0**-14, 2.0**-16, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC), 0x7F, True),
    "e4m3fnuz": (240.0, 8, 2.0**-7, 2.0**-10, (0x80,), (), 0x80, False),
    "e5m2fnuz": (57344.0, 16, 2.0**-15, 2.0**-17, (0x80,), (), 0x80, False),
}


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_facts(fmt: str) -> None:
    """The row of the format table says what the format's definition says, and what the golden decodes show."""
    row = formats.get(fmt)
    said = (
        row.max,
        row.bias,
        row.smallest_normal,
        row.smallest_subnormal,
        tuple(sorted(row.nan_codes)),
        tuple(sorted(row.inf_codes)),
        row.nan_code,
        row.negative_zero,
    )
    assert FACTS[fmt] == said
    table = oracle.decode_table(fmt)
    finite = table[table.isfinite()]
    assert row.max == float(finite.max()) == -float(finite.min()) == torch.finfo(row.dtype).max
    assert row.smallest_subnormal == float(finite[finite > 0].min())
    assert row.smallest_normal == torch.finfo(row.dtype).tiny
    assert row.exponent_bits + row.mantissa_bits == 7
    assert float(table[1 << row.mantissa_bits]) == row.smallest_normal
    assert float(table[row.bias << row.mantissa_bits]) == 1.0


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_oracle(fmt: str) -> None:
    """The suite's own look-up cast equals the golden rows, so that it may judge where they stop."""
    assert_bits_equal(golden_codes(fmt), oracle.codes(golden_inputs(fmt), fmt), f"{fmt} codes", golden_names(fmt))


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        pytest.param(fmt, dtype, id=f"formats-{fmt}-{word}")
        for fmt in FORMATS
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    ],
)
def test_encode_narrow(fmt: str, dtype: torch.dtype, device: str) -> None:
    """A 16-bit input is encoded as its exact float32 value: all 65,536 of them."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_bits_equal(oracle.codes(x, fmt), formats.encode(x.to(device), fmt), f"{fmt} codes")


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_cast_is_encode(fmt: str, device: str) -> None:
    """cast() is encode() under the torch dtype: same codes, same shape, for views too and for no elements at all."""
    x = golden_inputs(fmt, device)[:700].reshape(20, 35).t()[::2]
    expected = oracle.codes(x, fmt).view(formats.get(fmt).dtype)
    assert_bits_equal(expected, formats.cast(x, fmt), f"{fmt} codes")
    assert formats.encode(x[:0], fmt).shape == x[:0].shape
    assert formats.cast(torch.tensor(1.0, device=device), fmt).shape == ()


# --- names and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_get(fmt: str) -> None:
    """A format is found by its name, its torch dtype and itself, for all four dtypes alike."""
    row = formats.get(fmt)
    assert (row.name, row.dtype) == (fmt, getattr(torch, f"float8_{fmt}"))
    assert formats.get(row.dtype) is row
    assert formats.get(row) is row


@pytest.mark.parametrize(
    "given",
    [
        pytest.param("e4m3", id="formats-unsupported-e4m3"),
        pytest.param("", id="formats-unsupported-empty"),
        pytest.param("float8_e4m3fn", id="formats-unsupported-torch-name"),
        pytest.param(torch.bfloat16, id="formats-unsupported-bf16"),
        pytest.param(torch.uint8, id="formats-unsupported-uint8"),
        pytest.param(torch.float8_e8m0fnu, id="formats-unsupported-e8m0fnu"),
        pytest.param(None, id="formats-unsupported-none"),
    ],
)
def test_get_unsupported(given: object) -> None:
    """Anything else is UnsupportedDtype that names the formats; never a KeyError (pytorch/ao#1066)."""
    with pytest.raises(UnsupportedDtype, match="e4m3fnuz"):
        formats.get(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float64, id="formats-encode-fp64"), pytest.param(torch.int32, id="formats-encode-int32")],
)
def test_encode_unsupported(dtype: torch.dtype) -> None:
    """float64 would round twice, integers have no place here: both are refused by name."""
    with pytest.raises(UnsupportedDtype, match=str(dtype).replace(".", r"\.")):
        formats.encode(torch.ones(2, dtype=dtype), "e4m3fn")


def test_decode_unsupported() -> None:
    """Codes of another format are not read as this one by accident."""
    with pytest.raises(UnsupportedDtype, match="e4m3fnuz"):
        formats.decode(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn), "e4m3fnuz")


# --- torch and ml_dtypes against the golden tables --------------------------------------------------------------------

# What happens to an input, by kind: the last midpoint is where rounding leaves the range.
KINDS = ("finite", "overflow-tie", "overflow", "infinity", "nan", "negative-nan")

# What the other library writes instead.
NAN, SIGNED_NAN, OTHER_NAN, INF = (
    "the NaN code",
    "the NaN code with the input's sign",
    "another NaN code",
    "an infinity",
)

FNUZ_OVERFLOW = {"overflow-tie": NAN, "overflow": NAN, "infinity": NAN}
E5M2_OVERFLOW = {"overflow-tie": INF, "overflow": INF, "infinity": INF}

# (library, format) -> kind -> what it writes. ml_dtypes 0.5 and 0.6.
ML_DTYPES: dict[str, dict[str, str]] = {
    "e4m3fn": {"overflow": SIGNED_NAN, "infinity": SIGNED_NAN, "negative-nan": SIGNED_NAN},
    "e4m3fnuz": FNUZ_OVERFLOW,
    "e5m2": E5M2_OVERFLOW | {"nan": OTHER_NAN, "negative-nan": OTHER_NAN},
    "e5m2fnuz": FNUZ_OVERFLOW,
}

# torch: what every version does, then (minor version, device) -> what that one adds. 2.13 saturates e4m3fn.
TORCH: dict[str, dict[str, str]] = {
    "e4m3fn": {"negative-nan": SIGNED_NAN},
    "e4m3fnuz": FNUZ_OVERFLOW,
    "e5m2": E5M2_OVERFLOW | {"negative-nan": SIGNED_NAN},
    "e5m2fnuz": FNUZ_OVERFLOW,
}
TORCH_VERSIONS: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("2.11", "cpu"): {"e4m3fn": {"overflow": SIGNED_NAN, "infinity": SIGNED_NAN}},
    ("2.11", "cuda"): {"e4m3fn": {"overflow": SIGNED_NAN, "infinity": SIGNED_NAN}},
    ("2.13", "cpu"): {},
}


def kind_of(bits: int, fmt: str) -> str:
    """Which of KINDS a float32 is for a format."""
    magnitude, finite = bits & 0x7FFFFFFF, oracle.decode_table(fmt)[:128]
    values = finite[finite.isfinite()]
    last = float(values[-1]) + float(values[-1] - values[-2]) / 2
    if magnitude > 0x7F800000:
        return "negative-nan" if bits >> 31 else "nan"
    if magnitude == 0x7F800000:
        return "infinity"
    value = float(from_bits([magnitude], torch.float32))
    return "overflow" if value > last else "overflow-tie" if value == last else "finite"


def outcome(code: int, bits: int, fmt: str) -> str:
    """What a code of another library is, in the words of the table."""
    _, _, _, _, nan_codes, inf_codes, nan_code, _ = FACTS[fmt]
    if code in inf_codes:
        return INF
    if code not in nan_codes:
        return f"code {code:#04x} for 0x{bits:08x}"
    if fmt.endswith("fnuz"):
        return NAN
    return SIGNED_NAN if code == nan_code | (0x80 if bits >> 31 else 0) else OTHER_NAN


def differences(codes: list[int], fmt: str) -> dict[str, str]:
    """kind -> outcome, over the golden rows where another library's code is not the golden one."""
    found: dict[str, set[str]] = {}
    for row, code in zip(loader.encodes(fmt), codes, strict=True):
        if row.code != code:
            found.setdefault(kind_of(row.bits, fmt), set()).add(outcome(code, row.bits, fmt))
    return {kind: "; ".join(sorted(outcomes)) for kind, outcomes in found.items()}


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_decode_against_ml_dtypes(fmt: str) -> None:
    """ml_dtypes decodes all 256 codes to the golden values; no difference is listed."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np = pytest.importorskip("numpy")
    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, f"float8_{fmt}")).astype(np.float32)
    actual = torch.from_numpy(values)
    assert actual.isnan().tolist() == oracle.decode_table(fmt).isnan().tolist()
    assert_bits_equal(_without_nan(oracle.decode_table(fmt)), _without_nan(actual), fmt)


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_decode_against_torch(fmt: str, device: str) -> None:
    """torch converts all 256 codes to the golden values; no difference is listed."""
    actual = torch.arange(256, dtype=torch.uint8, device=device).view(formats.get(fmt).dtype).to(torch.float32)
    assert actual.isnan().cpu().tolist() == oracle.decode_table(fmt).isnan().tolist()
    assert_bits_equal(_without_nan(oracle.decode_table(fmt)), _without_nan(actual), fmt)


@pytest.mark.parametrize("fmt", EACH_FORMAT)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_cast_against_ml_dtypes(fmt: str) -> None:
    """ml_dtypes' cast differs from the golden codes exactly as listed."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np = pytest.importorskip("numpy")
    inputs = np.array([row.bits for row in loader.encodes(fmt)], dtype=np.uint32).view(np.float32)
    codes = inputs.astype(getattr(ml_dtypes, f"float8_{fmt}")).view(np.uint8).tolist()
    assert ML_DTYPES[fmt] == differences(codes, fmt)


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_cast_against_torch(fmt: str, device: str) -> None:
    """torch's cast differs from the golden codes exactly as listed for this version and device."""
    codes = golden_inputs(fmt, device).to(formats.get(fmt).dtype).view(torch.uint8).cpu().tolist()
    found = differences(codes, fmt)
    version = ".".join(torch.__version__.split(".")[:2])
    if (version, device) in TORCH_VERSIONS:
        assert TORCH[fmt] | TORCH_VERSIONS[version, device].get(fmt, {}) == found
        return
    listed = [TORCH[fmt], *(rows.get(fmt, {}) for rows in TORCH_VERSIONS.values())]
    known = {(kind, what) for rows in listed for kind, what in rows.items()}
    unlisted = set(found.items()) - known
    assert not unlisted, (
        f"torch {version} on {device} adds {sorted(unlisted)}; add them to TORCH_VERSIONS if it is right"
    )


# --- E8M0 -------------------------------------------------------------------------------------------------------------


def test_e8m0_decode(device: str) -> None:
    """All 256 bytes decode to the golden powers of two; byte 0 is 2^-127, not 0; byte 255 is NaN."""
    expected = from_bits(list(loader.decodes("e8m0fnu")), torch.float32)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    actual = formats.decode_e8m0(codes)
    assert_bits_equal(_without_nan(expected), _without_nan(actual), "e8m0fnu")
    assert actual.isnan().cpu().tolist() == [False] * 255 + [True]
    assert_bits_equal(actual, formats.decode_e8m0(codes.view(torch.float8_e8m0fnu)), "e8m0fnu from its dtype")


def test_e8m0_round_trip(device: str) -> None:
    """Every byte comes back from its power of two; NaN from any NaN, and infinity, are byte 255."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    assert_bits_equal(codes, formats.encode_e8m0(formats.decode_e8m0(codes)), "e8m0fnu bytes")
    special = torch.tensor([torch.inf, torch.nan, -torch.nan], device=device)
    assert formats.encode_e8m0(special).tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        pytest.param(2.0**-149, 0, id="formats-e8m0-2e-149"),
        pytest.param(2.0**-140, 0, id="formats-e8m0-2e-140"),
        pytest.param(2.0**-128, 0, id="formats-e8m0-2e-128"),
        pytest.param(2.0**-127, 0, id="formats-e8m0-2e-127"),
        pytest.param(2.0**-126, 1, id="formats-e8m0-2e-126"),
        pytest.param(1.0, 127, id="formats-e8m0-1"),
        pytest.param(2.0**127, 254, id="formats-e8m0-2e127"),
    ],
)
def test_e8m0_encode(value: float, byte: int, device: str) -> None:
    """Powers of two become their byte; those below 2^-127 become byte 0, which means 2^-127."""
    assert formats.encode_e8m0(torch.tensor([value], device=device)).tolist() == [byte]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(-1.0, id="formats-e8m0-refuses-negative"),
        pytest.param(-torch.inf, id="formats-e8m0-refuses-neginf"),
        pytest.param(0.0, id="formats-e8m0-refuses-zero"),
        pytest.param(-0.0, id="formats-e8m0-refuses-negzero"),
        pytest.param(3.0, id="formats-e8m0-refuses-3"),
        pytest.param(3e38, id="formats-e8m0-refuses-3e38"),
        pytest.param(2.0**-126 * 1.5, id="formats-e8m0-refuses-1.5x2e-126"),
        pytest.param(2.0**-127 * 1.5, id="formats-e8m0-refuses-subnormal"),
    ],
)
def test_e8m0_refuses(value: float, device: str) -> None:
    """What is no positive power of two is refused with its place; torch stores -1.0 as 1.0 and 3.0 as 4.0."""
    scales = torch.tensor([[1.0, 2.0], [value, 4.0]], device=device)
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        formats.encode_e8m0(scales)


def test_e8m0_smallest_scale_times_half(device: str) -> None:
    """bf16 0.5 under the scale of byte 0 is 2^-128: tiny and positive, not zero and not minus infinity."""
    scale = formats.decode_e8m0(torch.zeros(1, dtype=torch.uint8)).to(torch.float64)
    assert (torch.tensor([0.5], dtype=torch.bfloat16).to(torch.float64) * scale).item() == 2.0**-128


# torch's and ml_dtypes' float8_e8m0fnu, where they differ from ours: input -> the byte they write. Ours refuses each.
E8M0_DIFFERENCES = {"zero": (0.0, 0), "negative": (-1.0, 127), "1.5": (1.5, 128), "3": (3.0, 129)}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"formats-e8m0-torch-{name}") for name in E8M0_DIFFERENCES])
def test_e8m0_against_torch(name: str) -> None:
    """torch's cast takes what ours refuses, as listed; on every power of two from 2^-127 the two agree."""
    value, byte = E8M0_DIFFERENCES[name]
    cast = torch.tensor([value]).to(torch.float8_e8m0fnu).view(torch.uint8)
    assert cast.tolist() == [byte]
    powers = from_bits(list(loader.decodes("e8m0fnu")[:255]), torch.float32)
    assert_bits_equal(powers.to(torch.float8_e8m0fnu).view(torch.uint8), formats.encode_e8m0(powers), "e8m0fnu bytes")


def test_e8m0_against_ml_dtypes() -> None:
    """ml_dtypes decodes all 256 bytes to the golden powers of two."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np = pytest.importorskip("numpy")
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = from_bits(list(loader.decodes("e8m0fnu")), torch.float32)
    assert_bits_equal(_without_nan(expected), _without_nan(torch.from_numpy(values)), "e8m0fnu")


# --- the golden tables themselves -------------------------------------------------------------------------------------


def test_golden_tables_are_regenerated_bit_by_bit() -> None:
    """The generator makes exactly the files that lie here: no row was typed, none is stale."""
    made = generate.files()
    present = {path.name: path.read_text(encoding="ascii") for path in loader.HERE.glob("*.csv")}
    present["INDEX.json"] = (loader.HERE / "INDEX.json").read_text(encoding="ascii")
    assert sorted(made) == sorted(present)
    assert [name for name in sorted(made) if made[name] != present[name]] == []


def test_golden_generator_imports_nothing_under_test() -> None:
    """The generator knows neither fp8stack nor anybody's FP8: its source imports the standard library only."""
    import ast
    import sys

    tree = ast.parse(Path(generate.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"formats-golden-{name}") for name in sorted(generate.files())])
def test_golden_row_deleted(name: str, tmp_path: Path) -> None:
    """A table that lost a row, had a digit changed, or is gone, is refused by the loader."""
    if name == "INDEX.json":
        with pytest.raises(loader.GoldenError, match=r"no-such-table\.csv is not in INDEX"):
            loader.read_rows("no-such-table.csv")
        return
    for source in loader.HERE.iterdir():
        if source.is_file():
            shutil.copy(source, tmp_path)
    rows = loader.read_rows(name, tmp_path)
    assert rows == loader.read_rows(name)
    path = tmp_path / name
    whole = path.read_text(encoding="ascii")
    path.write_text("\n".join(line for i, line in enumerate(whole.splitlines()) if i != 7) + "\n", encoding="ascii")
    with pytest.raises(loader.GoldenError, match="rows; expected"):
        loader.read_rows(name, tmp_path)
    last = "0" if whole[-2] != "0" else "1"
    path.write_text(whole[:-2] + last + "\n", encoding="ascii")
    with pytest.raises(loader.GoldenError, match="SHA-256"):
        loader.read_rows(name, tmp_path)
    path.unlink()
    with pytest.raises(loader.GoldenError, match="missing"):
        loader.read_rows(name, tmp_path)


@pytest.mark.parametrize("fmt", EACH_FORMAT)
def test_golden_floors(fmt: str) -> None:
    """256 decodes; three float32 and two signs a midpoint; at least 60 rows an op; amax at the maximum is scale 1."""
    finite = sum(1 for bits in loader.decodes(fmt)[:128] if bits & 0x7F800000 != 0x7F800000)
    assert len(loader.decodes(fmt)) == 256
    assert sum(1 for row in loader.encodes(fmt) if row.name.startswith(("mid-", "up-", "down-"))) == 6 * finite
    for op in loader.OPS:
        assert len(loader.units(op, fmt)) >= 60
    unit = next(u for u in loader.units("rowwise", fmt) if u.name == "maximum" and u.pow2)
    assert (unit.scale, unit.inverse_scale) == (0x3F800000, 0x3F800000)
