"""AMD assembly as LLVM writes it: Triton's `asm["amdgcn"]` -> a Listing, and what each opcode does to memory.

Read: the instructions of the text section, the records of the metadata block (registers, spills, LDS, scratch), and
LLVM's own summary comments (code size, occupancy). A memory opcode of unknown width is an error, not a guess: a new
mnemonic must not pass for a wide one.

Sources: opcode names and widths from AMD's "CDNA3" and "CDNA4 Instruction Set Architecture" guides and LLVM's
AMDGPUAsmGFX9xx pages; fences from LLVM's AMDGPUUsage, "Memory Model gfx942" and "gfx90a".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.isa.access import Access
from harness.isa.listing import Flow, Instruction, Label, Listing, ListingError, build, split_operands

METADATA = (
    "agpr_count",
    "vgpr_count",
    "sgpr_count",
    "vgpr_spill_count",
    "sgpr_spill_count",
    "private_segment_fixed_size",
    "group_segment_fixed_size",
    "max_flat_workgroup_size",
    "wavefront_size",
)
"""Records of the metadata block that every kernel has; `agpr_count` is absent on RDNA, which has none."""

COMMENTS = {"code_bytes": r"; codeLenInByte = (\d+)", "llvm_occupancy": r"; Occupancy: (\d+)"}
"""LLVM's summary comments: code size in bytes, and waves a SIMD as far as registers and static LDS decide."""

_WIDTHS = {
    **dict.fromkeys(("ubyte", "sbyte", "byte", "u8", "i8", "b8", "d16_u8", "d16_i8", "d16_hi_u8", "d16_hi_i8"), 1),
    **dict.fromkeys(("ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi", "byte_d16_hi", "d16_hi_b8"), 1),
    **dict.fromkeys(("ushort", "sshort", "short", "u16", "i16", "b16", "d16_b16", "d16_hi_b16"), 2),
    **dict.fromkeys(("short_d16", "short_d16_hi"), 2),
    **{f"dword{suffix}": 4 * count for suffix, count in (("", 1), ("x2", 2), ("x3", 3), ("x4", 4))},
    **{f"b{bits}": bits // 8 for bits in (32, 64, 96, 128)},
}
_VECTOR = re.compile(r"(global|buffer|flat|scratch)_(load|store)_(?:lds_)?(?:tr\d*_)?(?:addtid_)?(\w+)")
_ATOMIC = re.compile(r"(global|buffer|flat)_atomic_\w+")
_LDS = re.compile(r"ds_(read|load|write|store)(2|2st64)?_(?:addtid_)?[biu](8|16|32|64|96|128)(_\w+)?")
FENCES = frozenset(
    (
        *("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_wbinvl1_sc"),
        *("buffer_gl0_inv", "buffer_gl1_inv", "global_inv", "global_wb", "global_wbinv"),
    )
)
_ENCODE = re.compile(r"v_cvt_(?:scalef32_)?(?:sr_)?(?:pk\d*_|sr_)*(?:fp8|bf8)_(f32|f16|bf16)(?:_\w+)?")
_DECODE = re.compile(r"v_cvt_(?:scalef32_)?(?:pk\d*_)*(?:f32|f16|bf16)_(?:fp8|bf8)(?:_\w+)?")
_MATRIX = re.compile(r"v_(?:mfma|smfmac|wmma|swmmac)_\w+")


def fence(instruction: Instruction) -> bool:
    """Whether it writes back or invalidates a cache."""
    return instruction.opcode in FENCES


def encode_source(instruction: Instruction) -> str | None:
    """The type that a hardware conversion to FP8 reads (`f32`, `f16`, `bf16`); None for any other instruction."""
    match = _ENCODE.fullmatch(instruction.opcode)
    return match.group(1) if match else None


def decodes(instruction: Instruction) -> bool:
    """Whether it is a hardware conversion from FP8."""
    return _DECODE.fullmatch(instruction.opcode) is not None


def matrix(instruction: Instruction) -> bool:
    """Whether it is a matrix instruction."""
    return _MATRIX.fullmatch(instruction.opcode) is not None


def matrix_fp8(instruction: Instruction) -> bool:
    """Whether it is a matrix instruction on FP8 operands."""
    return matrix(instruction) and re.search(r"fp8|bf8|f8f6f4", instruction.opcode) is not None


def call(instruction: Instruction) -> bool:
    """Whether it calls a function."""
    return instruction.opcode in ("s_swappc_b64", "s_call_b64")


def access(instruction: Instruction) -> Access | None:
    """What it does to memory; None if nothing. Kernel arguments (scalar loads) are space `constant`.

    Raises:
        ListingError: a memory opcode whose width is not in the table.
    """
    opcode = instruction.opcode
    if match := _VECTOR.fullmatch(opcode):
        space, kind, suffix = match.groups()
        if suffix not in _WIDTHS:
            raise ListingError(
                f"line {instruction.line}: {instruction.text!r} is a memory instruction of unknown width; expected one "
                f"of the suffixes {', '.join(sorted(_WIDTHS))}; add its width to harness/isa/amdgcn.py"
            )
        to_lds = "_lds_" in opcode or re.search(r"\blds\b", instruction.operands[-1]) is not None
        return Access("scratch" if space == "scratch" else "global", "copy" if to_lds else kind, _WIDTHS[suffix])
    if _ATOMIC.fullmatch(opcode):
        return Access("global", "atomic", 8 if opcode.endswith(("x2", "64")) else 4)
    if match := _LDS.fullmatch(opcode):
        kind = "load" if match.group(1) in ("read", "load") else "store"
        return Access("lds", kind, int(match.group(3)) // 8 * (2 if match.group(2) else 1))
    if match := re.fullmatch(r"s_(?:buffer_)?load_(?:dword(x\d+)?|[biu](\d+))", opcode):
        words = int(match.group(1)[1:]) if match.group(1) else 1
        return Access("constant", "load", int(match.group(2)) // 8 if match.group(2) else 4 * words)
    return None


def flow(instruction: Instruction) -> Flow:
    """Where control goes: scalar branches by label; a call returns; `s_setpc_b64` is the return of a function."""
    opcode = instruction.opcode
    if opcode == "s_branch":
        return Flow((instruction.operands[0],), falls_through=False)
    if opcode.startswith("s_cbranch_"):
        return Flow((instruction.operands[-1],))
    if opcode in ("s_endpgm", "s_endpgm_saved", "s_setpc_b64", "s_trap"):
        return Flow(falls_through=opcode == "s_trap")
    return Flow()


def _items(lines: list[str]) -> Iterator[Label | Instruction]:
    section = ""
    function = ""
    for number, raw in enumerate(lines, start=1):
        text = raw.split(";", 1)[0].split("//", 1)[0].strip()
        if not text:
            continue
        if text.startswith((".text", ".section")):
            section = ".text" if text.startswith(".text") else text.split()[1].split(",")[0]
            continue
        if text.startswith(".amdgpu_metadata"):
            return
        if not section.startswith(".text"):
            continue
        if match := re.match(r"([\w.$]+):\s*", text):
            name = match.group(1)
            if not name.startswith(".L"):
                function = name
            yield Label(name)
            text = text[match.end() :]
            if not text:
                continue
        if text.startswith("."):
            continue
        opcode, rest = (*text.split(None, 1), "")[:2]
        if not re.fullmatch(r"[a-z][a-z0-9_]*", opcode):
            raise ListingError(
                f"line {number}: {raw.strip()!r} is no AMD instruction, label or directive; expected an opcode such as "
                'v_add_u32; pass the text of asm["amdgcn"] as Triton gives it'
            )
        yield Instruction(opcode, split_operands(rest), "", number, " ".join(text.split()), None, function)


def read_amdgcn(text: str) -> Listing:
    """Read one kernel's listing.

    Args:
        text: `asm["amdgcn"]` of a compiled kernel.

    Raises:
        ListingError: no kernel or more than one, a missing metadata record, or a line that is no assembly.
    """
    kernels = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    target = re.search(r'^\s*\.amdgcn_target\s+"[^"]*?(gfx\w+)[^"]*"', text, re.MULTILINE)
    if len(kernels) != 1 or target is None:
        raise ListingError(
            f"found {len(kernels)} kernels and {'a' if target else 'no'} target in {len(text)} characters; expected "
            'one .amdhsa_kernel and one .amdgcn_target; pass asm["amdgcn"] of one compiled kernel, uncut'
        )
    resources: dict[str, int] = {}
    for name in METADATA:
        match = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)\s*$", text, re.MULTILINE)
        if match is None and name == "agpr_count" and not target.group(1).startswith("gfx9"):
            resources[name] = 0
        elif match is None:
            raise ListingError(
                f"the metadata of {kernels[0]} has no .{name}; expected every record of an .amdgpu_metadata block; "
                "the listing seems cut off"
            )
        else:
            resources[name] = int(match.group(1))
    for name, pattern in COMMENTS.items():
        if match := re.search(pattern, text):
            resources[name] = int(match.group(1))
    return build("amdgcn", kernels[0], target.group(1), _items(text.splitlines()), flow, resources)
