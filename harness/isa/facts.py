"""Listing -> facts: the numbers that a kernel's machine code is gated on (numerics.md, section 8).

Each fact is a row of FACTS with its unit and its direction, which the gate uses two-sided: `lower` and `higher` say
which way is better (worse fails, better proposes a baseline), `equal` must not move, `informational` is recorded only.

The counted region. What a kernel executes per tile decides its speed; what it executes once (a scale's store, the first
address) does not. So accesses are counted in the loops that touch device memory; a kernel without one is its own tile
and is counted whole. The fact `region` says which: `loops` or `kernel`. Widths are the widest in that region, so a wide
access outside cannot hide narrow ones inside.

FP8 encoding. A hardware conversion is counted by its opcode. A software one (Triton's fallback, or the integer encoder
of fp8stack/kernels/cast.py) is recognised by its rounding constant: round-to-nearest-even of a float32 to 3 or 2
mantissa bits adds half a unit less one, 0x7FFFF or 0xFFFFF (with the exponent's rebias in the bits above, if it is done
in the same addition), and nothing else in these kernels uses such literals.
Which one ran is `fp8_encode`: `none`, `native-f32`, `native-f16` (rounds twice if the value was float32), `software`,
or several joined by `+`.

Not here: whether a fact is as good as its baseline (harness/gate.py), the rules no kernel may break (suites/codegen).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from harness.isa import amdgcn, occupancy, ptx, sass
from harness.isa.access import Access
from harness.isa.listing import Instruction, Listing, ListingError, literals

DIALECTS: dict[str, ModuleType] = {"amdgcn": amdgcn, "sass": sass, "ptx": ptx}

_ROUNDING_FLOAT32 = frozenset({0x7FFFF, 0xFFFFF})
_ROUNDING_TWO_FLOAT16 = frozenset({0x3F003F, 0x7F007F})


def _rounds(instruction: Instruction) -> bool:
    """Whether a literal is half a unit less one: of float32 to 3 or 2 mantissa bits, or of two float16 packed."""
    found = literals(instruction)
    return any(value & 0x7FFFFF in _ROUNDING_FLOAT32 or value in _ROUNDING_TWO_FLOAT16 for value in found)


@dataclass(frozen=True)
class Fact:
    """A row of the table: `unit`, `direction` (`lower`, `higher`, `equal`, `informational`), and what it means."""

    unit: str
    direction: str
    meaning: str


FACTS: dict[str, Fact] = {
    "region": Fact("", "informational", "what is counted: the loops that touch device memory, or the whole kernel"),
    "loops": Fact("loops", "informational", "outermost loops"),
    "widest_load_bytes": Fact("bytes", "higher", "widest load of a lane from device memory in the region"),
    "widest_store_bytes": Fact("bytes", "higher", "widest store of a lane to device memory in the region"),
    "mean_load_bytes": Fact("bytes", "higher", "the same, mean over the region's loads: one wide one hides no others"),
    "mean_store_bytes": Fact("bytes", "higher", "the same, mean over the region's stores"),
    "narrow_memory_instructions": Fact("instructions", "lower", "1- and 2-byte device-memory accesses in the region"),
    "narrow_memory_instructions_kernel": Fact("instructions", "lower", "the same in the whole kernel"),
    "narrow_lds_instructions": Fact(
        "instructions", "lower", "1- and 2-byte LDS (shared memory) accesses in the region"
    ),
    "load_instructions": Fact("instructions", "informational", "loads from device memory in the region"),
    "store_instructions": Fact("instructions", "informational", "stores to device memory in the region"),
    "atomic_instructions": Fact("instructions", "informational", "atomics on device memory in the whole kernel"),
    "fence_instructions": Fact("instructions", "lower", "cache write-backs, invalidations and memory barriers"),
    "fp8_encode": Fact("", "equal", "how float becomes FP8: native-f32, native-f16, software, none"),
    "fp8_encode_instructions": Fact("instructions", "informational", "hardware conversions to FP8"),
    "fp8_decode_instructions": Fact("instructions", "informational", "hardware conversions from FP8"),
    "software_rounding_instructions": Fact("instructions", "lower", "instructions with a software encoder's constant"),
    "matrix_opcodes": Fact("", "equal", "the kinds of matrix instruction, `none` or sorted and joined by +"),
    "matrix_instructions": Fact("instructions", "informational", "matrix instructions"),
    "fp8_matrix_instructions": Fact("instructions", "informational", "matrix instructions on FP8 operands"),
    "call_instructions": Fact("instructions", "lower", "function calls (a division's slow path is one)"),
    "scratch_bytes": Fact("bytes", "lower", "stack of a lane"),
    "scratch_instructions": Fact("instructions", "lower", "loads from and stores to the stack"),
    "vgpr_spills": Fact("registers", "lower", "vector registers spilled (NVIDIA: stores to local memory)"),
    "sgpr_spills": Fact("registers", "lower", "scalar registers spilled (NVIDIA: always 0)"),
    "vgprs": Fact(
        "registers", "lower", "vector registers, accumulation registers included (NVIDIA: registers a thread)"
    ),
    "agprs": Fact("registers", "lower", "accumulation registers"),
    "sgprs": Fact("registers", "lower", "scalar registers"),
    "lds_bytes": Fact("bytes", "lower", "LDS (shared memory) of a group, static and dynamic"),
    "waves_per_simd": Fact("waves", "higher", "waves (warps) that a SIMD (scheduler) holds at these registers and LDS"),
    "code_bytes": Fact("bytes", "lower", "machine code, without padding after its end"),
    "instructions": Fact("instructions", "informational", "instructions in the listing"),
}
"""Every fact by name, in the order of reports."""

Value = int | float | str


def hot_loops(listing: Listing) -> tuple[frozenset[int], ...]:
    """The outermost loops that touch device memory, each as the indices of its blocks; none if the kernel is a tile."""
    access = DIALECTS[listing.dialect].access
    return tuple(
        loop
        for loop in listing.loops
        if any((found := access(i)) is not None and found.space == "global" for i in listing.within(loop))
    )


def region(listing: Listing) -> tuple[str, tuple[Instruction, ...]]:
    """(`loops`, the instructions of the loops that touch device memory), or (`kernel`, all reachable ones)."""
    counted = frozenset().union(*hot_loops(listing))
    if counted:
        return "loops", listing.within(counted)
    return "kernel", listing.within(listing.reachable)


def _accesses(dialect: ModuleType, instructions: Iterable[Instruction]) -> list[tuple[Instruction, Access]]:
    return [(i, found) for i in instructions if (found := dialect.access(i)) is not None]


def _of_region(keep: Callable[[Access], bool]) -> Callable[[Listing], list[Instruction]]:
    return lambda listing: [i for i, a in _accesses(DIALECTS[listing.dialect], region(listing)[1]) if keep(a)]


def _of_kernel(keep: Callable[[Access], bool]) -> Callable[[Listing], list[Instruction]]:
    return lambda listing: [
        i for i, a in _accesses(DIALECTS[listing.dialect], listing.within(listing.reachable)) if keep(a)
    ]


def _that(name: str) -> Callable[[Listing], list[Instruction]]:
    def select(listing: Listing) -> list[Instruction]:
        test = getattr(DIALECTS[listing.dialect], name)
        return [i for i in listing.within(listing.reachable) if test(i)]

    return select


COUNTED: dict[str, Callable[[Listing], list[Instruction]]] = {
    "narrow_memory_instructions": _of_region(lambda a: a.space == "global" and a.kind != "atomic" and a.narrow),
    "narrow_memory_instructions_kernel": _of_kernel(lambda a: a.space == "global" and a.kind != "atomic" and a.narrow),
    "narrow_lds_instructions": _of_region(lambda a: a.space == "lds" and a.narrow),
    "load_instructions": _of_region(lambda a: a.reads_global),
    "store_instructions": _of_region(lambda a: a.space == "global" and a.kind == "store"),
    "atomic_instructions": _of_kernel(lambda a: a.space == "global" and a.kind == "atomic"),
    "fence_instructions": _that("fence"),
    "fp8_encode_instructions": _that("encode_source"),
    "fp8_decode_instructions": _that("decodes"),
    "software_rounding_instructions": lambda listing: [i for i in listing.within(listing.reachable) if _rounds(i)],
    "matrix_instructions": _that("matrix"),
    "fp8_matrix_instructions": _that("matrix_fp8"),
    "call_instructions": _that("call"),
    "scratch_instructions": _of_kernel(lambda a: a.space == "scratch"),
    "instructions": lambda listing: list(listing.within(listing.reachable)),
}
"""Facts that count instructions, and which ones: the same rule makes the number and shows the lines behind it."""


def offenders(listing: Listing, name: str) -> list[Instruction]:
    """The instructions that fact `name` counts, for a message.

    Raises:
        KeyError: a fact that counts no instructions.
    """
    return COUNTED[name](listing)


def fp8_encode(listing: Listing) -> str:
    """How the kernel turns float into FP8; see the head of this file."""
    source = DIALECTS[listing.dialect].encode_source
    ways = {f"native-{found}" for i in listing.within(listing.reachable) if (found := source(i)) is not None}
    if offenders(listing, "software_rounding_instructions"):
        ways.add("software")
    return "+".join(sorted(ways)) or "none"


def _resources_amd(listing: Listing, shared_bytes: int) -> dict[str, Value]:
    have = listing.resources
    if "code_bytes" not in have:
        raise ListingError(
            f"the listing of {listing.kernel} has no '; codeLenInByte' comment; expected LLVM's summary; "
            'pass asm["amdgcn"] with its comments'
        )
    # Triton's LDS is dynamic: the metadata says 0, the launch says how much.
    lds = max(have["group_segment_fixed_size"], shared_bytes)
    return {
        "scratch_bytes": have["private_segment_fixed_size"],
        "vgpr_spills": have["vgpr_spill_count"],
        "sgpr_spills": have["sgpr_spill_count"],
        "vgprs": have["vgpr_count"],
        "agprs": have["agpr_count"],
        "sgprs": have["sgpr_count"],
        "lds_bytes": lds,
        "waves_per_simd": occupancy.waves_amd(listing.arch, have, lds),
        "code_bytes": have["code_bytes"],
    }


def _resources_sass(listing: Listing, shared_bytes: int, waves_a_group: int) -> dict[str, Value]:
    have = listing.resources
    reserved = occupancy.unit(listing.arch).reserved_bytes if have["SHARED"] else 0
    lds = max(0, have["SHARED"] - reserved) + shared_bytes
    stores = [
        i for i, a in _accesses(sass, listing.within(listing.reachable)) if (a.space, a.kind) == ("scratch", "store")
    ]
    return {
        "scratch_bytes": have["STACK"] + have["LOCAL"],
        "vgpr_spills": len(stores),
        "sgpr_spills": 0,
        "vgprs": have["REG"],
        "agprs": 0,
        "sgprs": 0,
        "lds_bytes": lds,
        "waves_per_simd": occupancy.waves_nvidia(listing.arch, have["REG"], waves_a_group, lds),
        "code_bytes": have["code_bytes"],
    }


def facts(listing: Listing, *, shared_bytes: int = 0, num_warps: int | None = None) -> dict[str, Value]:
    """All facts of FACTS for one machine-code listing.

    Args:
        listing: of dialect `amdgcn` or `sass`.
        shared_bytes: dynamic LDS or shared memory of the launch, bytes (Triton's metadata `shared`).
        num_warps: waves a group; needed for SASS, read from the listing for amdgcn.

    Raises:
        ListingError: a PTX listing (no registers), a SASS one without num_warps, a memory opcode of unknown width.
        ValueError: an arch without occupancy figures.
    """
    if listing.dialect == "ptx" or (listing.dialect == "sass" and num_warps is None):
        raise ListingError(
            f"facts of {listing.dialect} with num_warps={num_warps}; expected amdgcn, or sass with num_warps; "
            "PTX has virtual registers: disassemble the cubin"
        )
    counted, inside = region(listing)
    widths: dict[str, list[int]] = {"load": [], "store": []}
    for _, access in _accesses(DIALECTS[listing.dialect], inside):
        if access.space == "global" and access.kind != "atomic":
            widths["store" if access.kind == "store" else "load"].append(access.width)
    opcodes = sorted({i.opcode for i in offenders(listing, "matrix_instructions")})
    resources = (
        _resources_amd(listing, shared_bytes)
        if listing.dialect == "amdgcn"
        else _resources_sass(listing, shared_bytes, num_warps or 1)
    )
    values: dict[str, Value] = {
        "region": counted,
        "loops": len(listing.loops),
        **{f"widest_{kind}_bytes": max(found, default=0) for kind, found in widths.items()},
        **{f"mean_{kind}_bytes": round(sum(found) / max(len(found), 1), 2) for kind, found in widths.items()},
        "fp8_encode": fp8_encode(listing),
        "matrix_opcodes": "+".join(opcodes) or "none",
        **{name: len(select(listing)) for name, select in COUNTED.items()},
        **resources,
    }
    return {name: values[name] for name in FACTS}
