"""Every public op takes all four formats on every arch, or refuses with a typed error that names dtype and target.

The mistake this looks for is a map with the two OCP names in it: fine on one vendor, a KeyError on the other
(pytorch/ao#1066, #2957, #4135; vllm-project/vllm#33713).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8stack import formats, scaling
from fp8stack.device import ARCHS, detect
from fp8stack.formats import Format, UnsupportedDtype
from fp8stack.kernels import blockwise, cast, experts, launch, mxfp8, rowwise, tensorwise
from suites.cases import FORMATS

ROOT = Path(__file__).resolve().parents[2]

OVERRIDES = ("cpu", "gfx942", "gfx950", "sm_90")

X = torch.tensor([[1.0, -2.0, 3.0, 0.0]], dtype=torch.bfloat16)

# Public op -> a call of it for a format given by name, torch dtype or row.
OPS: dict[str, Callable[[str | torch.dtype | Format], object]] = {
    "get": formats.get,
    "encode": lambda fmt: formats.encode(X, fmt),
    "cast": lambda fmt: formats.cast(X, fmt),
    "decode": lambda fmt: formats.decode(torch.zeros(3, dtype=torch.uint8), fmt),
    "scale": lambda fmt: scaling.scale_from_amax(torch.ones(1), fmt, pow2=True),
    "reference": lambda fmt: scaling.quantize_reference(X, fmt, dim=1, pow2=True),
    "rowwise": lambda fmt: rowwise.quantize_rowwise(X, fmt),
    "rowwise-reference": lambda fmt: rowwise.quantize_rowwise_reference(X, fmt),
    "tensorwise": lambda fmt: tensorwise.quantize_tensorwise(X, fmt),
    "tensorwise-both": lambda fmt: tensorwise.quantize_tensorwise_both(X, fmt),
    "experts": lambda fmt: experts.quantize_experts(X[None], fmt),
    "experts-transposed": lambda fmt: experts.quantize_experts_transposed(X[None], fmt),
    "experts-both": lambda fmt: experts.quantize_experts_both(X[None], fmt),
    "blockwise": lambda fmt: blockwise.quantize_blockwise(X, fmt),
    "mxfp8": lambda fmt: mxfp8.quantize_mxfp8(X, fmt, "floor"),
    "saturating-cast": lambda fmt: cast.cast_saturating(X, fmt),
    "decode-codes": lambda fmt: cast.decode_codes(torch.zeros(3, dtype=torch.uint8), fmt),
}


@pytest.mark.parametrize(
    ("op", "arch"), [pytest.param(op, arch, id=f"formats-{op}-{arch}") for op in OPS for arch in OVERRIDES]
)
def test_every_format_on_every_arch(op: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four formats, by each of their three names: a result, or UnsupportedDtype that names both sides."""
    monkeypatch.setenv("FP8STACK_ARCH", arch)
    for name in FORMATS:
        row = formats.get(name)
        for given in (name, row.dtype, row):
            refusal = None
            try:
                OPS[op](given)
            except UnsupportedDtype as error:
                refusal = str(error)
            assert refusal is None or name in refusal


@pytest.mark.parametrize("op", [pytest.param(op, id=f"formats-{op}-unknown") for op in OPS])
def test_unknown_format(op: str) -> None:
    """A name or dtype that is no FP8 format is UnsupportedDtype in every op, before anything is computed."""
    for given in ("e4m3", "float8", torch.float16, torch.float8_e8m0fnu):
        with pytest.raises(UnsupportedDtype, match="e4m3fnuz"):
            OPS[op](given)


def test_arch_formats_exist() -> None:
    """The format names in the arch table are rows of the format table."""
    for arch in ARCHS.values():
        assert formats.get(arch.e4m3).mantissa_bits == 3
        assert formats.get(arch.e5m2).mantissa_bits == 2


def test_override_chooses_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arch's own format changes with the override; an explicit one does not (vllm-project/vllm#30291)."""
    for arch, maximum in (("gfx942", 240.0), ("gfx950", 448.0), ("sm_90", 448.0), ("cpu", 448.0)):
        monkeypatch.setenv("FP8STACK_ARCH", arch)
        assert formats.get(detect("cpu").arch.e4m3).max == maximum
        _, inverse = rowwise.quantize_rowwise(torch.full((1, 2), 448.0), "e4m3fn")
        assert inverse.tolist() == [1.0]


@pytest.mark.parametrize("target", [pytest.param(arch, id=f"formats-constants-{arch}") for arch in sorted(ARCHS)])
def test_kernel_constants_are_total(target: str) -> None:
    """Every kernel's constants exist for every format and target, and are the format table's numbers."""
    for name in FORMATS:
        row = formats.get(name)
        constants = cast.constants(row, target)
        found = tuple(constants[key] for key in ("MAX", "BIAS", "MANTISSA_BITS", "NAN_CODE", "NEGATIVE_ZERO"))
        assert found == (row.max, row.bias, row.mantissa_bits, row.nan_code, row.negative_zero)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(arch, id=f"formats-compile-specs-{arch}")
        for arch, row in sorted(ARCHS.items())
        if row.vendor != "cpu"
    ],
)
def test_compile_specs_are_total(target: str) -> None:
    """Each GPU arch has its list of production configurations, its own e4m3 first, with distinct case ids."""
    for family in (rowwise, tensorwise, experts, blockwise):
        specs = family.compile_specs(target)
        ids = [spec.case for spec in specs]
        assert len(set(ids)) == len(ids) > 0
        assert specs[0].fmt == ARCHS[target].e4m3
    assert {spec.fmt for spec in mxfp8.compile_specs(target)} == {"e4m3fn", "e5m2"}


def test_tables_survive_a_default_device() -> None:
    """The first cast under another default device (models are built on meta) does not spoil the CPU's later ones."""
    code = (
        "import torch\n"
        "from fp8stack import formats\n"
        "x = torch.tensor([240.0, 1000.0, float('nan')])\n"
        "with torch.device('meta'), torch.inference_mode():\n"
        "    codes = formats.encode(x, 'e4m3fnuz')\n"
        "    values = formats.decode(codes, 'e4m3fnuz')\n"
        "assert codes.tolist() == [0x7F, 0x7F, 0x80], codes\n"
        "assert values.tolist()[:2] == [240.0, 240.0], values\n"
        "assert formats.encode(x, 'e4m3fnuz').tolist() == [0x7F, 0x7F, 0x80]\n"
        "assert formats.decode(codes.clone(), 'e4m3fnuz').tolist()[:2] == [240.0, 240.0]\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_recording_sees_only_its_block() -> None:
    """A recording holds what ran inside it, nested ones too; two implementations under one name equal neither."""
    with launch.recording() as outer:
        rowwise.quantize_rowwise(X, "e4m3fn")
        with launch.recording() as inner:
            tensorwise.quantize_tensorwise(X, "e4m3fn")
        launch.record("quantize_rowwise", "triton-or-something")
    rowwise.quantize_rowwise(X, "e4m3fn")
    assert set(inner) == {"quantize_tensorwise"}
    assert set(outer) == {"quantize_rowwise", "quantize_tensorwise"}
    assert "+" in outer["quantize_rowwise"]
