"""The machine code of every kernel at its production configurations, for archs that need not be here.

Every kernel family (a module of fp8stack.kernels with `compile_specs(arch)`) is compiled for every arch below, the
listing is read (harness/isa) and two things come of it: hard rules that hold whatever was recorded before
(machine_code.py, RULES), and facts in `isa/<case>.json`, which the gate compares with `baselines/<arch>/codegen.json`
in the block of this Triton's minor version.

Triton's compile cache is used as the environment gives it (TRITON_CACHE_DIR): the harness picks the folder, and no test
here shares, chooses or purges one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import fp8stack.kernels
from fp8stack import _triton
from fp8stack._triton import CompileSpec
from suites.codegen.machine_code import broken_rules, machine_code

ARCHS = ("gfx942", "gfx950", "sm_90")
"""Archs with baselines of machine code."""


def _families() -> dict[str, Callable[[str], list[CompileSpec]]]:
    """Family name -> its compile_specs, sorted by name: a new family is checked as soon as it has one."""
    names = sorted(module.name for module in pkgutil.iter_modules(fp8stack.kernels.__path__))
    modules = {name: importlib.import_module(f"fp8stack.kernels.{name}") for name in names}
    return {name: module.compile_specs for name, module in modules.items() if hasattr(module, "compile_specs")}


def _cases() -> Iterator[Any]:
    for specs_of in _families().values():
        for arch in ARCHS:
            for spec in sorted(specs_of(arch), key=lambda spec: spec.case):
                yield pytest.param(spec, arch, id=f"{spec.case}-{arch}")


def _plain(value: object) -> bool | int | float | str | None:
    """A configuration value as JSON holds it; a Triton type by its name."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _config(spec: CompileSpec) -> dict[str, Any]:
    """What the kernel was compiled with: a baseline of another configuration is stale, not worse."""
    return {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "signature": dict(sorted(spec.signature.items())),
        "constexprs": {name: _plain(value) for name, value in sorted(spec.constexprs.items())},
        "divisible": sorted(spec.divisible),
        "within_2gb": sorted(spec.within_2gb),
        "options": {name: _plain(value) for name, value in sorted({**_triton.LAUNCH_OPTIONS, **spec.options}.items())},
    }


@pytest.mark.parametrize(("spec", "arch"), list(_cases()))
def test_machine_code(
    spec: CompileSpec, arch: str, evidence: Any, record_property: Callable[[str, object], None]
) -> None:
    """Native conversion where the arch has it, 16-byte loads and stores, no narrow access, spill, scratch or fence."""
    case = f"{spec.case}-{arch}"
    record_property("arch", arch)
    record_property("format", spec.fmt)
    code = machine_code(spec, arch)
    assert _triton.TRITON_VERSION is not None
    version = ".".join(map(str, _triton.TRITON_VERSION))
    record_property("triton", version)
    listing = evidence.write_text(f"isa/{case}.s", code.text)
    record_property(
        "isa_file",
        evidence.write_json(
            f"isa/{case}.json",
            {
                "schema": 1,
                "case": case,
                "arch": arch,
                "triton": version,
                "format": spec.fmt,
                "kernel": code.listing.kernel,
                "config": _config(spec),
                "facts": code.facts,
                "listing_hash": code.listing.digest,
                "listing": listing,
            },
        ),
    )
    broken = broken_rules(code)
    assert not broken, "\n".join([f"{listing} breaks a rule of machine code:", *broken])


BLOCK_SCALED = {
    "scaled_mm-e4m3fn-mxfp8": "scaled_kernel",
    "grouped_mxfp8-e4m3fn-rows": "grouped_mxfp8",
    "grouped_mxfp8-e4m3fn-contraction": "grouped_mxfp8",
}


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case}-block-scaled-gfx950") for case in BLOCK_SCALED])
def test_block_scaled(case: str) -> None:
    """On gfx950 MXFP8 operands go as they are into the matrix instruction that takes E8M0 scales, and into no other."""
    specs = {spec.case: spec for spec in _families()[BLOCK_SCALED[case]]("gfx950")}
    opcodes = machine_code(specs[case], "gfx950").facts["matrix_opcodes"].split("+")
    assert opcodes
    assert all(opcode.startswith("v_mfma_scale_f32_") for opcode in opcodes), opcodes


def _kernels() -> Iterator[Any]:
    """Every kernel of every family once, at its first configuration for sm_90."""
    seen: set[str] = set()
    for specs_of in _families().values():
        for spec in specs_of("sm_90"):
            name = spec.kernel.__name__
            if name not in seen:
                seen.add(name)
                yield pytest.param(spec, id=f"{spec.case.split('-')[0]}-sizes-of-one{name}")


@pytest.mark.parametrize("spec", list(_kernels()))
def test_sizes_of_one(spec: CompileSpec) -> None:
    """A kernel compiles where its sizes and strides are 1, which a launch makes constants; the interpreter does not."""
    kept = set(spec.kernel.do_not_specialize or ())
    ones = [name for name, kind in spec.signature.items() if kind in ("i32", "i64") and name not in kept]
    assert ones, f"{spec.case} has no size that a launch specialises on"
    signature = {name: kind for name, kind in spec.signature.items() if name not in ones}
    constexprs = {**spec.constexprs, **dict.fromkeys(ones, 1)}
    hints = tuple(name for name in spec.divisible if name in signature)
    _triton.cross_compile(
        replace(spec, case="sizes-of-one", signature=signature, constexprs=constexprs, divisible=hints), "sm_90"
    )


def test_families() -> None:
    """At least the rowwise family is compiled, case ids are unique, and the order is the same each time."""
    assert "rowwise" in _families()
    ids = [case.id for case in _cases()]
    assert len(ids) == len(set(ids))
    assert ids == [case.id for case in _cases()]
    assert {arch: sum(name.endswith(arch) for name in ids) > 0 for arch in ARCHS} == dict.fromkeys(ARCHS, True)
