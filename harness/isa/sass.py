"""NVIDIA machine code (SASS) as `nvdisasm -c` prints it -> a Listing, and what each opcode does to memory.

The caller runs the tools (the Triton wheel carries `nvdisasm` and `cuobjdump`) and hands in their text:
`nvdisasm -c KERNEL.cubin` for the instructions, `cuobjdump --dump-resource-usage KERNEL.cubin` for registers, stack and
shared memory. PTX is not enough: its registers are virtual, and ptxas may split or merge accesses.

Spills show as local loads and stores (LDL, STL) and as STACK bytes. The 1 KiB of shared memory that the system
reserves per block from sm_90 on is in SHARED; it is taken off (`reserved_bytes` in occupancy.py), so that the figure
means what the kernel asked for.

Sources: "CUDA Binary Utilities", instruction set reference tables for Ampere, Ada, Hopper, Blackwell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.isa.access import Access
from harness.isa.listing import Flow, Instruction, Label, Listing, ListingError, build, split_operands

RESOURCES = ("REG", "STACK", "SHARED", "LOCAL")
"""Records of `--dump-resource-usage` that every function has: registers, then bytes."""

_ACCESSES = {
    "LDG": ("global", "load"),
    "LD": ("global", "load"),
    "STG": ("global", "store"),
    "ST": ("global", "store"),
    "LDS": ("lds", "load"),
    "STS": ("lds", "store"),
    "LDSM": ("lds", "load"),
    "STSM": ("lds", "store"),
    "LDL": ("scratch", "load"),
    "STL": ("scratch", "store"),
    "LDC": ("constant", "load"),
    "ULDC": ("constant", "load"),
    "LDCU": ("constant", "load"),
    "LDGSTS": ("global", "copy"),
    "UBLKCP": ("global", "copy"),
    "UTMALDG": ("global", "copy"),
    "UTMASTG": ("global", "copy"),
    "UTMAREDG": ("global", "atomic"),
    "ATOM": ("global", "atomic"),
    "ATOMG": ("global", "atomic"),
    "RED": ("global", "atomic"),
    "REDG": ("global", "atomic"),
    "ATOMS": ("lds", "atomic"),
}
_BULK = ("UBLKCP", "UTMALDG", "UTMASTG", "UTMAREDG")
_SUFFIX_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "F16": 2, "64": 8, "128": 16, "256": 32}
_UNKNOWN_FAMILY = re.compile(r"(?:U?LD|U?ST|ATOM|RED|UTMA)[A-Z]*")
_NO_MEMORY = frozenset(
    (
        *("LDGDEPBAR", "LDTM", "STTM", "STT", "LDT", "REDUX", "UREDUX"),
        *("UTMACMDFLUSH", "UTMACCTL", "UTMAPF"),
    )
)
_MATRIX = re.compile(r"(?:[HIQDB]G?MMA|OMMA|[HIQ]MMA|UTC[A-Z]*MMA)\b.*")


def _head(instruction: Instruction) -> str:
    return instruction.opcode.split(".", 1)[0]


_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "BF16_V2": "bf16", "E4M3": "e4m3", "E5M2": "e5m2"}
_FP8 = ("e4m3", "e5m2")


def _conversion(instruction: Instruction) -> tuple[str, str] | None:
    """(to, from) of a packed conversion: the types of its suffixes in order; float32 is the source left unsaid."""
    head, *parts = instruction.opcode.split(".")
    types = [_TYPES[part] for part in parts if part in _TYPES]
    return (types[0], types[1] if len(types) > 1 else "f32") if head == "F2FP" and types else None


def fence(instruction: Instruction) -> bool:
    """Whether it orders or invalidates memory beyond the block (the async proxy's fence is part of a bulk copy)."""
    if _head(instruction) == "MEMBAR":
        return not instruction.opcode.endswith(".CTA")
    return _head(instruction) == "ERRBAR" or instruction.opcode.startswith(("CCTL.IVALL", "FENCE.MEMBAR"))


def encode_source(instruction: Instruction) -> str | None:
    """The type that a hardware conversion to FP8 reads (`f32`, `f16`, `bf16`); None for any other instruction."""
    types = _conversion(instruction)
    return types[1] if types and types[0] in _FP8 else None


def decodes(instruction: Instruction) -> bool:
    """Whether it is a hardware conversion from FP8."""
    types = _conversion(instruction)
    return types is not None and types[0] not in _FP8 and types[1] in _FP8


def matrix(instruction: Instruction) -> bool:
    """Whether it is a tensor-core instruction."""
    return _MATRIX.fullmatch(instruction.opcode) is not None


def matrix_fp8(instruction: Instruction) -> bool:
    """Whether it is a tensor-core instruction on FP8 operands."""
    return matrix(instruction) and re.search(r"E4M3|E5M2|^QG?MMA|^UTCQ", instruction.opcode) is not None


def call(instruction: Instruction) -> bool:
    """Whether it calls a function (a division's slow path is one)."""
    return _head(instruction) == "CALL"


def access(instruction: Instruction) -> Access | None:
    """What it does to memory; None if nothing.

    Raises:
        ListingError: an opcode of the load and store families that is not in the table.
    """
    head, *suffixes = instruction.opcode.split(".")
    if head not in _ACCESSES:
        if _UNKNOWN_FAMILY.fullmatch(head) and head not in _NO_MEMORY:
            raise ListingError(
                f"line {instruction.line}: {instruction.text!r} looks like a memory instruction, but {head} is not in "
                f"the table; expected one of {', '.join(sorted(_ACCESSES))}; add it to harness/isa/sass.py"
            )
        return None
    space, kind = _ACCESSES[head]
    if head in _BULK:
        return Access(space, kind, 16)  # a bulk copy moves units of 16 bytes, whatever its size
    if head in ("LDSM", "STSM"):
        return Access(space, kind, 4 * next((int(part) for part in suffixes if part in ("2", "4")), 1))
    return Access(space, kind, next((_SUFFIX_WIDTHS[part] for part in suffixes if part in _SUFFIX_WIDTHS), 4))


def _labels(instruction: Instruction) -> tuple[str, ...]:
    return tuple(re.findall(r"`\(([^)]+)\)", " ".join(instruction.operands)))


def flow(instruction: Instruction) -> Flow:
    """Where control goes.

    A predicated jump falls through, and so does a call (its target is reached as well). BSSY names where its barrier's
    BSYNC continues: an edge from there is what keeps the continuation reachable. RET leaves.
    """
    head = _head(instruction)
    predicated = bool(instruction.predicate) and instruction.predicate != "@PT"
    if head in ("BRA", "BRX", "JMP", "JMX", "BRXU"):
        targets = _labels(instruction)
        conditional = predicated or any(re.fullmatch(r"!?U?P\d", operand) for operand in instruction.operands[:-1])
        if not targets:
            raise ListingError(
                f"line {instruction.line}: {instruction.text!r} jumps to no label; expected labels as `nvdisasm -c` "
                "writes them; pass its output, not cuobjdump's"
            )
        return Flow(targets, conditional or ".DIV" in instruction.opcode)
    if head in ("CALL", "BSSY", "WARPSYNC"):
        return Flow(_labels(instruction))
    if head in ("EXIT", "RET", "KILL", "RTT"):
        return Flow(falls_through=predicated)
    return Flow()


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


def _items(lines: list[str], kernel: str) -> Iterator[Label | Instruction]:
    inside = False
    function = kernel
    for number, raw in enumerate(lines, start=1):
        text = raw.strip()
        if text.startswith(("//-----", ".section ", ".section\t")):
            inside = f".text.{kernel}" in text
            continue
        if not inside or not text:
            continue
        if match := re.fullmatch(r"([.$\w]+):", text):
            name = match.group(1)
            if not name.startswith("."):
                function = name
            yield Label(name)
        elif match := _LINE.match(text):
            address, predicate, opcode, operands = match.groups()
            operands = re.sub(r"\(\*\"BRANCH_TARGETS ([^\"]*)\"\*\)", lambda m: _as_labels(m.group(1)), operands)
            yield Instruction(
                opcode,
                split_operands(operands),
                predicate or "",
                number,
                " ".join(text.split("*/", 1)[1].split()),
                int(address, 16),
                function,
            )
        elif not text.startswith((".", "/")):
            raise ListingError(
                f"line {number}: {text!r} is no SASS instruction, label or directive; expected a line such as "
                "/*0010*/ MOV R1, R2 ;; pass the output of `nvdisasm -c`"
            )


def _as_labels(text: str) -> str:
    return ", ".join(f"`({name.strip()})" for name in text.split(","))


def read_resource_usage(text: str) -> dict[str, dict[str, int]]:
    """Read `cuobjdump --dump-resource-usage`: function -> record -> number.

    Raises:
        ListingError: no function, or a function without one of RESOURCES.
    """
    found: dict[str, dict[str, int]] = {}
    for name, records in re.findall(r"Function ([^\s:]+):\s*\n\s*(\S.*)", text):
        found[name] = {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", records)}
        if missing := [record for record in RESOURCES if record not in found[name]]:
            raise ListingError(
                f"the resource usage of {name} lacks {', '.join(missing)}; expected {', '.join(RESOURCES)}; "
                "pass the output of `cuobjdump --dump-resource-usage`"
            )
    if not found:
        raise ListingError(
            f"no function in {len(text)} characters of resource usage; expected 'Function NAME:' and its records; "
            "pass the output of `cuobjdump --dump-resource-usage`"
        )
    return found


def read_sass(text: str, resource_usage: str) -> Listing:
    """Read one kernel.

    Args:
        text: output of `nvdisasm -c` on a cubin with one kernel.
        resource_usage: output of `cuobjdump --dump-resource-usage` on the same cubin.

    Raises:
        ListingError: no kernel or more than one, no record for it, or a line that is no assembly.
    """
    kernels = re.findall(r"^\s*\.section\s+\.text\.([^\s,]+)", text, re.MULTILINE)
    # Up to sm_89 the cubin names its target among the header flags, from sm_90 on in a directive.
    target = re.search(r"^\s*\.target\s+sm_(\d+)", text, re.MULTILINE) or re.search(r"\bEF_CUDA_SM(\d+)", text)
    if len(kernels) != 1 or target is None:
        raise ListingError(
            f"found {len(kernels)} kernels and {'a' if target else 'no'} target in {len(text)} characters; expected "
            "one .text section and one .target; pass the output of `nvdisasm -c` on the cubin of one kernel"
        )
    usage = read_resource_usage(resource_usage)
    if kernels[0] not in usage:
        raise ListingError(
            f"the resource usage names {', '.join(usage)}, the code is of {kernels[0]}; expected the same kernel; "
            "pass both outputs of one cubin"
        )
    listing = build(
        "sass", kernels[0], f"sm_{target.group(1)}", _items(text.splitlines(), kernels[0]), flow, usage[kernels[0]]
    )
    addresses = [i.address for i in listing.within(listing.reachable) if i.address is not None]
    return Listing(
        listing.dialect,
        listing.kernel,
        listing.arch,
        listing.blocks,
        {**listing.resources, "code_bytes": max(addresses) + 16},  # instructions are 16 bytes since Volta
    )
