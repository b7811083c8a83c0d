"""A machine-code listing as data: instructions, basic blocks, loops.

Why own code and not a disassembler's: the text that Triton hands out is already assembly; what a check of machine code
needs beyond it is which instructions run once and which run per tile. That takes the control-flow graph, and nothing
that a dialect (amdgcn.py, sass.py, ptx.py) cannot say with two facts per instruction: where it may jump, and whether
the next instruction can follow.

A loop is a strongly connected component of the blocks that the entry reaches: it needs no dominators, holds for
irreducible graphs too, and leaves out what ptxas appends after the code (an endless branch to itself).

Instructions keep opcode, operands, predicate and address apart, so that a later step can execute them.
Not here: what an opcode means (the dialects), what is good or bad about it (facts.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


class ListingError(ValueError):
    """A listing that cannot be read: says which line, what was expected there, and what to do."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its suffixes, as written: `buffer_store_dwordx4`, `STG.E.128`, `ld.global.v4.b32`.
        operands: split at the top-level commas, modifiers stay with the last one (`0 offen`).
        predicate: `@!P0`, or empty.
        line: 1-based line of the listing's text.
        text: the line without its comment, for messages.
        address: bytes from the start of its section where the listing says so (SASS), else None.
        function: symbol it belongs to: the kernel, or a helper such as a division's slow path.
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str
    line: int
    text: str
    address: int | None = None
    function: str = ""


@dataclass(frozen=True)
class Label:
    """A position that a branch can name."""

    name: str


@dataclass(frozen=True)
class Flow:
    """Where control can go after an instruction: labels, and whether the next instruction is one of the places."""

    targets: tuple[str, ...] = ()
    falls_through: bool = True


@dataclass(frozen=True)
class Block:
    """Instructions that run together, the labels that name the place, and the indices of the blocks that can follow."""

    labels: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """One kernel.

    Attributes:
        dialect: `amdgcn`, `sass` or `ptx`.
        kernel: its symbol.
        arch: `gfx942`, `sm_90`: as the listing says.
        blocks: in the order of the text; block 0 is the entry.
        resources: what the listing's own records say, in the dialect's names (`vgpr_count`, `REG`, ...).
    """

    dialect: str
    kernel: str
    arch: str
    blocks: tuple[Block, ...]
    resources: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions in the order of the text."""
        return tuple(instruction for block in self.blocks for instruction in block.instructions)

    @cached_property
    def reachable(self) -> frozenset[int]:
        """Indices of the blocks that the entry reaches (a called function is reached through its call)."""
        seen: set[int] = set()
        pending = [0] if self.blocks else []
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                pending.extend(self.blocks[index].successors)
        return frozenset(seen)

    @cached_property
    def loops(self) -> tuple[frozenset[int], ...]:
        """The outermost loops, each as the indices of its blocks, in the order of the text."""
        return tuple(sorted(_cycles([block.successors for block in self.blocks], self.reachable), key=min))

    def within(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """The instructions of these blocks, in the order of the text."""
        return tuple(instruction for index in sorted(blocks) for instruction in self.blocks[index].instructions)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the normalised listing.

        Kept: predicates, opcodes, operands, registers, order. Dropped: comments, debug information, paths, metadata,
        addresses, alignment; labels are numbered by appearance and the kernel's symbol is replaced, so a moved source
        line or a renamed kernel does not change it.
        """
        numbers: dict[str, str] = {self.kernel: "KERNEL"}
        for block in self.blocks:
            for label in block.labels:
                numbers.setdefault(label, f"L{len(numbers)}")
        word = re.compile(r"[A-Za-z_$.][\w$.]*")
        lines: list[str] = []
        for index, block in enumerate(self.blocks):
            lines.extend(f"{numbers[label]}:" for label in block.labels)
            if index not in self.reachable:
                continue
            for instruction in block.instructions:
                text = f"{instruction.predicate} {instruction.opcode} {', '.join(instruction.operands)}".strip()
                lines.append(word.sub(lambda match: numbers.get(match.group(), match.group()), text))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _cycles(successors: list[tuple[int, ...]], reachable: frozenset[int]) -> list[frozenset[int]]:
    """Strongly connected components with a cycle (Tarjan, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[frozenset[int]] = []
    for root in sorted(reachable):
        if root in order:
            continue
        work: list[tuple[int, int]] = [(root, 0)]
        while work:
            node, position = work.pop()
            if position == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            descended = False
            for offset, following in enumerate(successors[node][position:], start=position):
                if following not in order:
                    work.append((node, offset + 1))
                    work.append((following, 0))
                    descended = True
                    break
                if following in on_stack:
                    low[node] = min(low[node], order[following])
            if descended:
                continue
            if low[node] == order[node]:
                component: set[int] = set()
                while True:
                    member = stack.pop()
                    on_stack.discard(member)
                    component.add(member)
                    if member == node:
                        break
                if len(component) > 1 or node in successors[node]:
                    found.append(frozenset(component))
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
    return found


def build(
    dialect: str,
    kernel: str,
    arch: str,
    items: Iterable[Label | Instruction],
    flow: Callable[[Instruction], Flow],
    resources: Mapping[str, int],
) -> Listing:
    """Cut the items into basic blocks and connect them.

    Raises:
        ListingError: no instruction at all, or a branch to a label that the text does not hold.
    """
    cut: list[tuple[list[str], list[Instruction]]] = [([], [])]
    for item in items:
        labels, instructions = cut[-1]
        if isinstance(item, Label):
            if instructions:
                cut.append(([item.name], []))
            else:
                labels.append(item.name)
            continue
        instructions.append(item)
        after = flow(item)
        if after.targets or not after.falls_through:
            cut.append(([], []))
    if not any(instructions for _, instructions in cut):
        raise ListingError(
            f"the {dialect} listing of {kernel!r} holds no instruction; expected assembly text with the kernel's body; "
            "pass the text of the kernel's own section"
        )
    places = {label: index for index, (labels, _) in enumerate(cut) for label in labels}
    blocks: list[Block] = []
    for index, (labels, instructions) in enumerate(cut):
        after = flow(instructions[-1]) if instructions else Flow()
        following: list[int] = []
        for target in after.targets:
            if target not in places:
                raise ListingError(
                    f"line {instructions[-1].line}: {instructions[-1].text!r} jumps to {target!r}, which is no label "
                    f"of this listing; expected one of {len(places)} labels; the text seems cut off"
                )
            following.append(places[target])
        if after.falls_through and index + 1 < len(cut):
            following.append(index + 1)
        blocks.append(Block(tuple(labels), tuple(instructions), tuple(dict.fromkeys(following))))
    return Listing(dialect, kernel, arch, tuple(blocks), dict(resources))


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets: `v[0:3], v9, s[4:7], 0 offen` -> four operands."""
    parts: list[str] = []
    depth = 0
    current = ""
    for character in text:
        if character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    return tuple(" ".join(part.split()) for part in parts)


def literals(instruction: Instruction) -> tuple[int, ...]:
    """The integer literals among the operands, as unsigned 32-bit values."""
    found = re.findall(r"(?<![\w.\[:])-?(?:0x[0-9a-fA-F]+|\d+)(?![\w.])", " ".join(instruction.operands))
    return tuple(int(text, 0) & 0xFFFFFFFF for text in found if not re.fullmatch(r"-?0\d+", text))
