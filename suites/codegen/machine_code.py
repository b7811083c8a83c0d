"""Kernel -> machine code -> facts, for the tests of this folder; and the rules that no kernel may break.

The gate compares facts with baselines; a rule needs none. It says what is wrong whatever was recorded before: a
conversion in software where the hardware has an instruction, byte stores, spills, fences. Each rule names the fact it
reads, so that the message can show the lines of the listing behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8stack import _triton
from fp8stack._triton import CompileSpec
from harness import isa
from harness.isa import occupancy

SHOWN_LINES = 8


@dataclass(frozen=True)
class MachineCode:
    """What was compiled.

    text: the listing (assembly on AMD, disassembly on NVIDIA). listing: the same, read. facts: harness/isa/facts.py.
    ptx: NVIDIA only: PTX as Triton handed it to ptxas.
    """

    spec: CompileSpec
    arch: str
    text: str
    listing: isa.Listing
    facts: dict[str, Any]
    ptx: str | None = None


def machine_code(spec: CompileSpec, arch: str) -> MachineCode:
    """Compile `spec` for `arch` (from Triton's cache where it is there) and read the listing."""
    compiled = _triton.cross_compile(spec, arch)
    shared = int(compiled.metadata["shared"])
    if "amdgcn" in compiled.asm:
        text = str(compiled.asm["amdgcn"])
        listing = isa.read_amdgcn(text)
        return MachineCode(spec, arch, text, listing, isa.facts(listing, shared_bytes=shared))
    cubin = compiled.asm["cubin"]
    assert isinstance(cubin, bytes)
    text, resource_usage = _triton.disassemble(cubin)
    listing = isa.read_sass(text, resource_usage)
    found = isa.facts(listing, shared_bytes=shared, num_warps=spec.num_warps)
    return MachineCode(spec, arch, text, listing, found, str(compiled.asm["ptx"]))


@dataclass(frozen=True)
class Rule:
    """`wanted(code)` is what fact `fact` has to be, `holds(found, wanted)` whether it is; `advice` what to look at.

    `lines` names the counting fact whose instructions the message shows.
    """

    fact: str
    wanted: Callable[[MachineCode], Any]
    holds: Callable[[Any, Any], bool]
    advice: str
    lines: str | None = None


def _equal(found: Any, wanted: Any) -> bool:
    return bool(found == wanted)


def _at_least(found: Any, wanted: Any) -> bool:
    return bool(found >= wanted)


def _at_most(found: Any, wanted: Any) -> bool:
    return bool(found <= wanted)


def _contains(found: Any, wanted: Any) -> bool:
    return wanted in found


def _zero(code: MachineCode) -> int:
    return 0


RULES: tuple[Rule, ...] = (
    Rule(
        "fp8_encode",
        lambda code: ("native-f32" if code.spec.native else "software") if code.spec.encodes else "none",
        _equal,
        "a software conversion where the arch has an instruction means that the wrong format or cast path was chosen "
        "(fp8stack/_triton.py, NATIVE_CASTS)",
        "software_rounding_instructions",
    ),
    Rule(
        "widest_load_bytes",
        lambda code: code.spec.wide_bytes,
        _at_least,
        "see that offsets are contiguous, row stride and mask bound are multiples of 16, unit strides constexpr",
        "load_instructions",
    ),
    Rule(
        "widest_store_bytes",
        lambda code: code.spec.wide_bytes if code.spec.encodes else 0,
        _at_least,
        "see that each lane holds 16 neighbouring codes and that the bound of the mask is a multiple of 16",
        "store_instructions",
    ),
    Rule(
        "narrow_memory_instructions",
        _zero,
        _equal,
        "1- and 2-byte accesses: a runtime unit stride (triton#9834) or a bound not known to be a multiple of 16",
        "narrow_memory_instructions",
    ),
    Rule(
        "narrow_memory_instructions_kernel",
        _zero,
        _equal,
        "as above, outside the loop",
        "narrow_memory_instructions_kernel",
    ),
    Rule(
        "matrix_instructions",
        lambda code: int(code.spec.multiplies is not None),
        _at_least,
        "tl.dot came out as scalar arithmetic: see that the tile is at least as large as the target's instruction",
    ),
    Rule(
        "fp8_matrix_instructions",
        lambda code: int(code.spec.multiplies in ("fp8", "mxfp8")),
        _at_least,
        "FP8 operands were widened before the matrix instruction: see that the format is the target's own and that the "
        "dot is on FP8 types",
        "matrix_instructions",
    ),
    Rule(
        "matrix_opcodes",
        # NVIDIA's has no name of its own: UTCQMMA, with two more operands.
        lambda code: "scale" if code.spec.multiplies == "mxfp8" and code.arch.startswith("gfx") else "",
        _contains,
        "E8M0 scales were multiplied beside the matrix instruction, not by it: see that tl.dot_scaled gets codes and "
        "bytes, and that a step is as long as the instruction",
        "matrix_instructions",
    ),
    Rule("vgpr_spills", _zero, _equal, "use a smaller tile or more warps", "scratch_instructions"),
    Rule("sgpr_spills", _zero, _equal, "use fewer values that are uniform across the tile"),
    Rule("scratch_bytes", _zero, _equal, "use a smaller tile or more warps", "scratch_instructions"),
    Rule(
        "fence_instructions",
        _zero,
        _equal,
        'atomics default to acquire-release: pass sem="relaxed" unless other data is published through them',
        "fence_instructions",
    ),
    Rule(
        "lds_bytes",
        lambda code: occupancy.unit(code.arch).lds_group_bytes,
        _at_most,
        "the group asks for more LDS (shared memory) than the arch has: use a smaller tile or fewer stages",
    ),
    Rule("waves_per_simd", lambda code: 0.25, _at_least, "a group does not fit on a compute unit: use a smaller tile"),
)


def broken_rules(code: MachineCode) -> list[str]:
    """One message for each broken rule: what, expected, what next, and the first lines behind it."""
    messages: list[str] = []
    for rule in RULES:
        found, wanted = code.facts[rule.fact], rule.wanted(code)
        if rule.holds(found, wanted):
            continue
        comparison = {_equal: "", _at_least: "at least ", _at_most: "at most ", _contains: "one with "}[rule.holds]
        messages.append(
            f"{code.spec.case}-{code.arch}: {rule.fact} is {found}; expected {comparison}{wanted}; {rule.advice}"
        )
        if rule.lines:
            shown = isa.offenders(code.listing, rule.lines)
            messages.extend(f"    line {line.line}: {line.text}" for line in shown[:SHOWN_LINES])
            if len(shown) > SHOWN_LINES:
                messages.append(f"    and {len(shown) - SHOWN_LINES} more")
    return messages
