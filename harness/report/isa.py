"""What `fp8ci isa show` prints: the hot loop of a kernel and its facts, or what changed in both against a revision.

Every number comes from the facts (harness/isa/facts.py) and has their name, so that one grep finds the rule that gates
it. A comparison is by plain lines (harness/isa/hot.py): opcodes, widths and constants count, register numbers do not.

Not here: compiling (harness/listings.py). No verdict either: the gate gives those, against baselines.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import isa, machinecode
from harness.isa import Kernel

WIDTH = 100
OPCODES_SHOWN = 10
CONTEXT = 2


def report(
    now: Mapping[str, Kernel], before: Mapping[str, Kernel] | None, revision: str | None, plain_data: bool
) -> str:
    """Every kernel by case: as it is, or with a revision what changed since; as text or as a JSON array."""
    texts: list[str] = []
    data: list[dict[str, Any]] = []
    for case in sorted({*now, *(before or {})}):
        ours, theirs = now.get(case), (before or {}).get(case)
        if ours is not None and (before is None or revision is None):
            texts.append(show(ours))
            data.append(as_dict(ours))
        elif ours is not None and theirs is not None and revision is not None:
            texts.append(show_change(ours, theirs, revision))
            data.append(change_as_dict(ours, theirs, revision))
        else:
            where = f"not in {revision}" if theirs is None else f"only in {revision}"
            texts.append(f"{case}: {where}\n")
            data.append({"case": case, "against": revision, "only": "now" if theirs is None else "before"})
    return json.dumps(data, indent=1) + "\n" if plain_data else "\n".join(texts)


def show(kernel: Kernel) -> str:
    """The whole of one kernel: what it does in a few lines, the facts, the hot loop."""
    lines = [_title(kernel), *_launch(kernel), ""]
    lines += _wrapped("does", [*_counted(_in_order(kernel.words)), "in bytes a lane"])
    lines += _wrapped("opcodes", _counted(kernel.opcodes, OPCODES_SHOWN))
    lines += ["", *_facts(kernel.facts), ""]
    for part in kernel.parts:
        note = " (no loop touches device memory: all of it counts)" if part.name == "kernel" else ""
        lines.append(f"{part.name}: {part.instructions} instructions{note}")
        lines += [f"{line.word:>14}  {'' if not line.opcode else '  '}{line.text}".rstrip() for line in part.lines]
        lines.append("")
    return "\n".join(lines)


def as_dict(kernel: Kernel) -> dict[str, Any]:
    """One kernel as plain data."""
    return {
        "case": kernel.case,
        "arch": kernel.arch,
        "triton": kernel.triton,
        "launch": {name: value for name, value in kernel.about.items() if name != "case"},
        "facts": dict(kernel.facts),
        "does": dict(kernel.words.most_common()),
        "opcodes": dict(kernel.opcodes.most_common()),
        "parts": [
            {"name": part.name, "lines": [{"does": line.word, "text": line.text} for line in part.lines]}
            for part in kernel.parts
        ],
    }


@dataclass(frozen=True)
class Change:
    """One kernel on two sides. facts: those that moved. does, opcodes: name -> (before, now). diff: of plain lines."""

    facts: tuple[machinecode.FactRow, ...]
    does: Mapping[str, tuple[int, int]]
    opcodes: Mapping[str, tuple[int, int]]
    launch: Mapping[str, tuple[Any, Any]]
    diff: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        """Whether both are the same as far as is looked at."""
        return not (self.facts or self.opcodes or self.launch or self.diff)


def change(now: Kernel, before: Kernel, revision: str) -> Change:
    """What is different now."""
    moved = [row for row in machinecode.compare(now.facts, before.facts).rows if row.state != "same"]
    diff: list[str] = []
    for ours, theirs in _pairs(now.parts, before.parts):
        names = [part.name if part else "no such part" for part in (theirs, ours)]
        texts = [[line.plain for line in part.lines] if part else [] for part in (theirs, ours)]
        heads = f"{revision} {names[0]}", f"now {names[1]}"
        diff += difflib.unified_diff(texts[0], texts[1], heads[0], heads[1], n=CONTEXT, lineterm="")
    return Change(
        tuple(moved),
        _moved(before.words, now.words),
        _moved(before.opcodes, now.opcodes),
        _moved(_flat(before.about), _flat(now.about)),
        tuple(diff),
    )


def show_change(now: Kernel, before: Kernel, revision: str) -> str:
    """What changed in one kernel; a line that says so where nothing did."""
    found = change(now, before, revision)
    title = f"{_title(now)}, against {revision}"
    if now.triton != before.triton:
        title += f" (compiled by Triton {before.triton})"
    if found.nothing:
        return f"{title}\nthe same facts and the same instructions\n"
    lines = [title]
    lines += _wrapped("launch", [f"{name} {was} -> {is_}" for name, (was, is_) in found.launch.items()])
    lines += _wrapped("does", [f"{name}: {was} -> {is_}" for name, (was, is_) in found.does.items()])
    lines += _wrapped("opcodes", [f"{name} {was} -> {is_}" for name, (was, is_) in found.opcodes.items()])
    if found.facts:
        lines.append("")
        lines.append(f"{'fact':36}{'before':>12}{'now':>12}")
        for row in found.facts:
            state = "" if row.state == "listed" else row.state
            lines.append(f"{row.name:36}{row.before!s:>12}{row.now!s:>12}  {row.unit:14}{state}".rstrip())
    if found.diff:
        lines += ["", *found.diff]
    return "\n".join(lines) + "\n"


def change_as_dict(now: Kernel, before: Kernel, revision: str) -> dict[str, Any]:
    """The same as plain data."""
    found = change(now, before, revision)
    return {
        "case": now.case,
        "arch": now.arch,
        "triton": {"before": before.triton, "now": now.triton},
        "against": revision,
        "launch": {name: {"before": was, "now": is_} for name, (was, is_) in found.launch.items()},
        "facts": {row.name: {"before": row.before, "now": row.now, "state": row.state} for row in found.facts},
        "does": {name: {"before": was, "now": is_} for name, (was, is_) in found.does.items()},
        "opcodes": {name: {"before": was, "now": is_} for name, (was, is_) in found.opcodes.items()},
        "diff": list(found.diff),
    }


def _title(kernel: Kernel) -> str:
    return f"{kernel.case} for {kernel.arch}, Triton {kernel.triton}"


def _launch(kernel: Kernel) -> list[str]:
    values = _flat(kernel.about)
    return _wrapped("launch", [f"{name} {value}" for name, value in values.items()])


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel was compiled with, without the words for groups of it."""
    named = {"num_warps": about["num_warps"], **about.get("options", {}), **about.get("constants", {})}
    return {"format": about["format"], **named}


def _in_order(words: Counter[str]) -> Counter[str]:
    """Device memory first, then LDS, conversions and the rest; jumps and kernel arguments are no news."""
    order = ("load", "copy", "store", "atomic", "lds", "scratch", "to", "from", "matrix", "fence", "call")
    told = [word for word in words if word.split()[0] in order]
    wider = sorted(told, key=lambda word: (order.index(word.split()[0]), word.split()[:-1], -_bytes(word)))
    return Counter({word: words[word] for word in wider})


def _bytes(word: str) -> int:
    last = word.split()[-1].rstrip("!")
    return int(last) if last.isdigit() else 0


def _counted(counts: Counter[str], most: int | None = None) -> list[str]:
    shown = [f"{count} x {name}" for name, count in (counts.items() if most is None else counts.most_common(most))]
    left = len(counts) - len(shown)
    return [*shown, *([f"{left} others"] if left else [])] or ["nothing"]


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """A line a fact, with its unit; those that are gated first."""
    gated = [name for name, fact in isa.FACTS.items() if fact.direction != machinecode.INFORMATIONAL]
    for name in sorted(isa.FACTS, key=lambda name: name not in gated):
        better = {"lower": "lower is better", "higher": "higher is better", "equal": "must not move"}
        direction = better.get(isa.FACTS[name].direction, "")
        yield f"{name:36}{facts[name]!s:>12}  {isa.FACTS[name].unit:14}{direction}".rstrip()


def _wrapped(name: str, words: Sequence[str]) -> list[str]:
    """`name` and the words, none of them broken, wrapped; no line where there are none."""
    text = ", ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, WIDTH, initial_indent=f"{name:10}", subsequent_indent=" " * 10) if words else []
    return [line.replace("\0", " ") for line in lines]


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    nothing: Any = 0 if isinstance(now, Counter) else "-"
    names = dict.fromkeys([*now, *before])
    pairs = {name: (before.get(name, nothing), now.get(name, nothing)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _pairs(now: Sequence[isa.Part], before: Sequence[isa.Part]) -> Iterator[tuple[isa.Part | None, isa.Part | None]]:
    """The parts of both sides in order, a longer side against None."""
    for place in range(max(len(now), len(before))):
        yield (now[place] if place < len(now) else None), (before[place] if place < len(before) else None)
