"""The hot loops of a listing for a person to read: line by line, each with a word on what it does.

What is shown is what is counted (facts.py): the loops that touch device memory, or the whole kernel where none does.
The word names what the facts are made of: `load 16`, `store 1!` (bytes a lane; 1 and 2 are narrow and marked),
`to fp8`, `matrix`, `fence`. Beside the line as it stands there is a plain one for comparing two compilations:
registers and labels without their numbers, since one instruction more renumbers all that follow.

Not here: how many of each there are (facts.py), the text that is printed (harness/report/isa.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.isa.facts import DIALECTS, hot_loops
from harness.isa.listing import Instruction, Listing


@dataclass(frozen=True)
class Line:
    """A label or an instruction. text: as it stands, labels renamed. plain: for a comparison. opcode: empty for labels.

    word: what it does to memory, FP8 or control; empty for arithmetic.
    """

    text: str
    plain: str
    opcode: str
    word: str


@dataclass(frozen=True)
class Part:
    """A hot loop, or the whole kernel. name: `loop 1 of 2` or `kernel`."""

    name: str
    lines: tuple[Line, ...]

    @property
    def instructions(self) -> int:
        """Lines that are instructions."""
        return sum(bool(line.opcode) for line in self.lines)


@dataclass(frozen=True)
class Kernel:
    """One kernel as it was compiled.

    about: its format, num_warps, options and constants. triton: the version that compiled it. parts: see hot().
    """

    case: str
    arch: str
    triton: str
    about: Mapping[str, Any]
    facts: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of every part."""
        return tuple(line for part in self.parts for line in part.lines)

    @property
    def opcodes(self) -> Counter[str]:
        """Opcode -> how many, in the parts."""
        return Counter(line.opcode for line in self.lines if line.opcode)

    @property
    def words(self) -> Counter[str]:
        """`load 16` -> how many, in the parts; arithmetic is left out."""
        return Counter(line.word for line in self.lines if line.word)


def hot(listing: Listing) -> tuple[Part, ...]:
    """The parts of a kernel that its facts are counted in, in the order of the text."""
    loops = hot_loops(listing)
    if not loops:
        return (Part("kernel", _lines(listing, sorted(listing.reachable))),)
    return tuple(
        Part(f"loop {number} of {len(loops)}", _lines(listing, sorted(loop)))
        for number, loop in enumerate(loops, start=1)
    )


def _lines(listing: Listing, blocks: Iterable[int]) -> tuple[Line, ...]:
    """The lines of these blocks.

    Labels that something jumps to are numbered by their place in the part; one of another part reads `outside`.
    """
    chosen = list(blocks)
    flow = DIALECTS[listing.dialect].flow
    targets = {target for i in listing.within(listing.reachable) for target in flow(i).targets}
    names: dict[str, str] = {}
    for index in chosen:
        if wanted := targets.intersection(listing.blocks[index].labels):
            names.update(dict.fromkeys(wanted, f"L{len(set(names.values()))}"))
    shown = {**dict.fromkeys(targets, "outside"), **names}
    word = re.compile(r"[A-Za-z_$.][\w$.]*")
    lines: list[Line] = []
    for index in chosen:
        block = listing.blocks[index]
        if label := next((names[name] for name in block.labels if name in names), ""):
            lines.append(Line(f"{label}:", "L:", "", ""))
        for instruction in block.instructions:
            whole = f"{instruction.predicate} {instruction.opcode} {', '.join(instruction.operands)}".strip()
            text = word.sub(lambda match: shown.get(match[0], match[0]), whole)
            plain = word.sub(lambda match: "L" if match[0] in names else shown.get(match[0], match[0]), whole)
            lines.append(Line(text, _plain(listing.dialect, plain), instruction.opcode, _word(listing, instruction)))
    return tuple(lines)


_AMD = re.compile(r"\b([vsa])(?:\d+\b|\[(\d+):(\d+)\])")
_NVIDIA = re.compile(r"\b(U?[RP])\d+\b")


def _plain(dialect: str, text: str) -> str:
    """Registers without their numbers, but how many there are: `v[0:3]` -> `v[4]`, `R12` -> `R`."""

    def width(match: re.Match[str]) -> str:
        kind, first, last = match.groups()
        return kind if first is None else f"{kind}[{int(last) - int(first) + 1}]"

    return _AMD.sub(width, text) if dialect == "amdgcn" else _NVIDIA.sub(r"\1", text)


def _word(listing: Listing, instruction: Instruction) -> str:
    dialect = DIALECTS[listing.dialect]
    found = dialect.access(instruction)
    if found is not None and found.space != "constant":
        space = "" if found.space == "global" else f"{found.space} "
        counted = found.space != "scratch" and found.kind != "atomic"
        return f"{space}{found.kind} {found.width}{'!' if found.narrow and counted else ''}"
    if found is not None:
        return "constant"
    tests = {
        "to fp8": dialect.encode_source(instruction) is not None,
        "from fp8": dialect.decodes(instruction),
        "matrix": dialect.matrix(instruction),
        "fence": dialect.fence(instruction),
        "call": dialect.call(instruction),
        "jump": bool(dialect.flow(instruction).targets),
    }
    return next((name for name, holds in tests.items() if holds), "")
