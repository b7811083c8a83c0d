"""PTX (Triton's `asm["ptx"]`) -> a Listing, and what each opcode does to memory.

PTX says what was asked of ptxas, not what came out: conversions by their names (`cvt.rn.satfinite.e4m3x2.f32`) and the
number of threads are read here; registers, spills and widths that count come from SASS (sass.py).

Source: "PTX ISA", NVIDIA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.isa.access import Access
from harness.isa.listing import Flow, Instruction, Label, Listing, ListingError, build, split_operands

_ACCESS = re.compile(r"(ld|ldu|st|atom|red)\.(.+)")
_SPACES = {"global": "global", "shared": "lds", "local": "scratch", "param": "constant", "const": "constant"}
_ENCODE = re.compile(r"cvt\.[\w.]*?(?:e4m3x2|e5m2x2|e4m3x4|e5m2x4)\.(f32|f16x2|bf16x2)")
_DECODE = re.compile(r"cvt\.[\w.]*?(?:f16x2|bf16x2)\.(?:e4m3x2|e5m2x2)")


def fence(instruction: Instruction) -> bool:
    """Whether it orders memory (the fence of the async proxy is part of a bulk copy)."""
    return instruction.opcode.startswith(("membar.", "fence.")) and not instruction.opcode.startswith("fence.proxy")


def encode_source(instruction: Instruction) -> str | None:
    """The type that a hardware conversion to FP8 reads (`f32`, `f16`, `bf16`); None for any other instruction."""
    match = _ENCODE.fullmatch(instruction.opcode)
    return match.group(1).removesuffix("x2") if match else None


def decodes(instruction: Instruction) -> bool:
    """Whether it is a hardware conversion from FP8."""
    return _DECODE.fullmatch(instruction.opcode) is not None


def matrix(instruction: Instruction) -> bool:
    """Whether it is a tensor-core instruction."""
    return instruction.opcode.startswith(("mma.", "wmma.mma", "wgmma.mma_async", "tcgen05.mma"))


def matrix_fp8(instruction: Instruction) -> bool:
    """Whether it is a tensor-core instruction on FP8 operands."""
    return matrix(instruction) and re.search(r"e4m3|e5m2|f8f6f4", instruction.opcode) is not None


def call(instruction: Instruction) -> bool:
    """Whether it calls a function."""
    return instruction.opcode.split(".")[0] == "call"


def access(instruction: Instruction) -> Access | None:
    """What it does to memory; None if nothing.

    Raises:
        ListingError: a load or store without a type.
    """
    if instruction.opcode.startswith("cp.async"):
        sizes = [int(operand, 0) for operand in instruction.operands if re.fullmatch(r"0x[0-9a-f]+|\d+", operand)]
        return Access("global", "copy", sizes[0] if sizes and ".bulk" not in instruction.opcode else 16)
    match = _ACCESS.fullmatch(instruction.opcode)
    if match is None:
        return None
    parts = match.group(2).replace("::", ".").split(".")
    space = next((_SPACES[part] for part in parts if part in _SPACES), "global")
    width = re.fullmatch(r"[busf](\d+)|(?:bf16|f16)(?:x2)?", parts[-1])
    if width is None:
        raise ListingError(
            f"line {instruction.line}: {instruction.text!r} is a memory instruction without a known type; expected a "
            "last suffix such as .b32; add it to harness/isa/ptx.py"
        )
    bits = int(width.group(1)) if width.group(1) else (32 if parts[-1].endswith("x2") else 16)
    lanes = next((int(part[1:]) for part in parts if re.fullmatch(r"v[248]", part)), 1)
    kind = {"ld": "load", "ldu": "load", "st": "store"}.get(match.group(1), "atomic")
    return Access(space, kind, lanes * bits // 8)


def flow(instruction: Instruction) -> Flow:
    """Where control goes: `bra` by label, falling through when predicated; `ret` and `exit` leave."""
    head = instruction.opcode.split(".")[0]
    if head == "bra":
        return Flow((instruction.operands[-1],), bool(instruction.predicate))
    if head == "brx":
        raise ListingError(
            f"line {instruction.line}: {instruction.text!r} is an indexed branch, which this reader does not follow; "
            "expected branches by label; read the SASS instead"
        )
    if head in ("ret", "exit", "trap"):
        return Flow(falls_through=bool(instruction.predicate))
    return Flow()


def _items(body: str, first_line: int, kernel: str) -> Iterator[Label | Instruction]:
    statement = ""
    started = first_line
    for number, raw in enumerate(body.splitlines(), start=first_line):
        line = raw.split("//", 1)[0]
        if re.match(r"\s*\.(?:loc|file|pragma)\b", line):
            continue
        for character in line + "\n":
            if not statement.strip():
                started = number
            if character == ":" and re.fullmatch(r"\s*[$%_A-Za-z][$\w]*", statement):
                yield Label(statement.strip())
                statement = ""
            elif character in "{}" and not statement.strip():
                continue  # a scope of inline assembly
            elif character == ";":
                text = " ".join(statement.split())
                statement = ""
                if text and not text.startswith("."):
                    match = re.fullmatch(r"(?:(@!?%?\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", text)
                    if match is None:
                        raise ListingError(
                            f"line {started}: {text!r} is no PTX statement; expected an opcode such as ld.global.b32; "
                            'pass asm["ptx"] as Triton gives it'
                        )
                    predicate, opcode, operands = match.groups()
                    yield Instruction(
                        opcode, split_operands(operands or ""), predicate or "", started, text, None, kernel
                    )
            else:
                statement += character


def read_ptx(text: str) -> Listing:
    """Read one kernel; `resources` holds `threads` (of `.reqntid` or `.maxntid`, 0 if neither is there).

    Raises:
        ListingError: no kernel or more than one, or a statement that is no PTX.
    """
    entries = list(re.finditer(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)", text, re.MULTILINE))
    target = re.search(r"^\s*\.target\s+(sm_\d+)", text, re.MULTILINE)
    opening = re.compile(r"^\{", re.MULTILINE).search(text, entries[0].end()) if entries else None
    closing = re.compile(r"^\}", re.MULTILINE).search(text, opening.end()) if opening else None
    if len(entries) != 1 or target is None or opening is None or closing is None:
        raise ListingError(
            f"found {len(entries)} kernels and {'a' if target else 'no'} target in {len(text)} characters; expected "
            'one .entry with its body and one .target; pass asm["ptx"] of one compiled kernel, uncut'
        )
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", text)
    body = text[opening.end() : closing.start()]
    first_line = text.count("\n", 0, opening.end()) + 1
    kernel = entries[0].group(1)
    resources = {"threads": int(threads.group(1)) if threads else 0}
    return build("ptx", kernel, target.group(1), _items(body, first_line, kernel), flow, resources)
