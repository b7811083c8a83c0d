"""`fp8ci baseline propose`: what a recording would change, for a person to read before it is written.

For each file the lines that go and come, cut to their beginning (a row is one long line, sorted by its key); what
becomes more tolerant, one line each; and a field for the reason, which `--write --loosen REASON` fills in.

A band that is widened by a little every month ends up wide. So every loosening is added up: LOG.md holds each of them
with its old and new value, and a new one is told, and logged, with where it stood at the first baseline.

Not here: running, merging and writing (record.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from harness import manifest
from harness.record import LOG_FILE, Change

WIDTH = 140
SHOWN = 40
"""Changed lines of one file that are shown."""

_ENTRY = re.compile(r"^- (?P<what>.+) (?P<old>[-+.\w]+) -> (?P<new>[-+.\w]+)(?: \(since .*\))?$")


def render(root: Path, recorded: Sequence[Change]) -> str:
    """The proposal as text. Nothing is written."""
    lines: list[str] = []
    for change in recorded:
        name = change.path.relative_to(root).as_posix() if change.path.is_relative_to(root) else str(change.path)
        lines += [f"## {name}", "", *(f"- {text}" for text in change.told)]
        lines += [f"- more tolerant: {text}" for text in change.loosened]
        lines += ["", *_diff(change), ""]
    loosened = sum(len(change.loosened) for change in recorded)
    if loosened:
        lines += [f"{loosened} entries make the gate more tolerant. With the reason filled in:", ""]
        lines += ["    reason:", "    fp8ci baseline propose ... --write --loosen 'REASON'"]
    else:
        lines.append("Nothing becomes more tolerant. Write it: `fp8ci baseline propose ... --write`")
    return "\n".join(lines) + "\n"


def _diff(change: Change) -> list[str]:
    before = change.path.read_text(encoding="utf-8").splitlines() if change.path.exists() else []
    after = change.text.splitlines()
    if change.path.name == "manifest.txt":
        before = list(manifest.read(change.path)) if before else []
    listed = difflib.unified_diff(before, after, "recorded", "proposed", n=0, lineterm="")
    moved = [line for line in listed if not line.startswith(("---", "+++", "@@"))]
    shown = [line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..." for line in moved[:SHOWN]]
    more = [f"... and {len(moved) - SHOWN} lines more"] if len(moved) > SHOWN else []
    return [*(shown or ["(no line changes)"]), *more]


def add_up(root: Path, recorded: Sequence[Change]) -> None:
    """Complete each loosening that is a number by where that number stood at the first baseline, from LOG.md."""
    path = root / "baselines" / LOG_FILE
    first = _first_values(path.read_text(encoding="utf-8") if path.exists() else "")
    for change in recorded:
        name = change.path.relative_to(root / "baselines").as_posix()
        change.loosened = [_added_up(f"{name}: {text}", text, first) for text in change.loosened]


def _first_values(log: str) -> dict[str, tuple[str, int]]:
    """What was loosened -> (its value before the first time, how often)."""
    found: dict[str, tuple[str, int]] = {}
    for line in log.splitlines():
        match = _ENTRY.match(line)
        if match and _number(match["old"]) is not None:
            value, times = found.get(match["what"], (match["old"], 0))
            found[match["what"]] = (value, times + 1)
    return found


def _added_up(entry: str, text: str, first: dict[str, tuple[str, int]]) -> str:
    match = _ENTRY.match(f"- {entry}")
    if match is None or match["what"] not in first:
        return text
    value, times = first[match["what"]]
    start, now = _number(value), _number(match["new"])
    if start is None or now is None:
        return text
    factor = f", x {now / start:.3g}" if start else ""
    return f"{text} (since the first baseline {value} -> {match['new']}{factor}, {times + 1} times)"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
