"""`fp8ci diff DIR_A DIR_B`: what changed between two runs: conditions, tests and numbers. No verdict follows from it.

Both folders are judged by their own files, and then compared from the outside in, since what comes first explains what
comes after: the conditions (platform, commit, versions, device), the tests (which executed, vanished, are new, changed
their verdict), and the numbers: what tests reported, loss curves step by step, machine code fact by fact, speed rows
beside their references. Times of tests are left out: they differ in any two runs.

Not here: whether a difference is too large (bands.py, machinecode.py, gate.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import baselines, gate
from harness.bands import Curve, relative
from harness.errors import UnreadableError, Verdict
from harness.result import Judgement, Result

SHOWN = 30
"""Lines of one kind that the text shows; the JSON has all."""

SPEED_MOVED = 0.01
"""Relative change of a time below which two runs are level."""

#: Keys of run.json that are conditions; everything else there is another in any two runs.
CONDITIONS = (
    "platform", "arch", "target", "commit", "dirty", "suites", "case", "full", "pytest_args", "policy", "versions",
)  # fmt: skip
HOST = ("cpu", "cores", "system", "python")
NOT_RUN = frozenset({Verdict.SKIP, Verdict.MISSING})


@dataclass(frozen=True)
class Side:
    """One run: its folder, its run.json, its judgement."""

    folder: Path
    run: Mapping[str, Any]
    judgement: Judgement

    @property
    def by_id(self) -> dict[str, Result]:
        """Test id -> result."""
        return {result.id: result for result in self.judgement.results}

    @property
    def title(self) -> str:
        """`cpu at 0123456789ab, run cafe0001: exit 0`."""
        commit = str(self.run.get("commit") or "unknown")[:12]
        return f"{self.run['platform']} at {commit}, run {self.run['run_id']}: exit {self.judgement.exit_code}"

    def count(self, *verdicts: Verdict) -> int:
        """How many tests have one of these verdicts."""
        return sum(result.verdict in verdicts for result in self.judgement.results)


@dataclass(frozen=True)
class Difference:
    """What changed from `before` to `after`; each entry is a line's worth of plain data."""

    before: Side
    after: Side
    conditions: tuple[str, ...]
    vanished: tuple[str, ...]
    new: tuple[str, ...]
    verdicts: tuple[str, ...]
    numbers: tuple[str, ...]
    curves: tuple[str, ...]
    facts: tuple[str, ...]
    speeds: tuple[str, ...]

    @property
    def counts(self) -> str:
        """Executed, skipped, vanished and new, in one line."""
        sides = (self.before, self.after)
        executed = [len(side.judgement.results) - side.count(*NOT_RUN) for side in sides]
        skipped = [side.count(Verdict.SKIP) for side in sides]
        missing = [side.count(Verdict.MISSING) for side in sides]
        told = [f"executed {executed[0]} -> {executed[1]}", f"skipped {skipped[0]} -> {skipped[1]}"]
        told.append(f"missing {missing[0]} -> {missing[1]}")
        return ", ".join([*told, f"vanished {len(self.vanished)}", f"new {len(self.new)}"])

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """Title -> lines, in the order in which they explain each other."""
        tests = (*(f"vanished: {i}" for i in self.vanished), *(f"new: {i}" for i in self.new), *self.verdicts)
        return {
            "Conditions": self.conditions,
            "Tests": tests,
            "Numbers that tests reported": self.numbers,
            "Loss curves": self.curves,
            "Machine code": self.facts,
            "Speed": self.speeds,
        }

    @property
    def text(self) -> str:
        """For a person."""
        lines = [f"from  {self.before.title}", f"to    {self.after.title}", self.counts]
        for title, entries in self.sections.items():
            if entries:
                lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries[:SHOWN])]
                if len(entries) > SHOWN:
                    lines.append(f"- ... and {len(entries) - SHOWN} more")
        if not any(self.sections.values()):
            lines += ["", "nothing changed"]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        sides = {"from": self.before.title, "to": self.after.title, "counts": self.counts}
        return {**sides, **{title: list(entries) for title, entries in self.sections.items()}}


def between(before: Path, after: Path) -> Difference:
    """Compare two evidence folders. Errors are those of `gate.judge`: what cannot be judged cannot be compared."""
    first, second = _side(before), _side(after)
    old, new = first.by_id, second.by_id
    both = [test_id for test_id in old if test_id in new]
    return Difference(
        first,
        second,
        tuple(_conditions(first.run, second.run)),
        tuple(sorted(set(old) - set(new))),
        tuple(sorted(set(new) - set(old))),
        tuple(_verdicts([(old[test_id], new[test_id]) for test_id in both])),
        tuple(_numbers([(old[test_id], new[test_id]) for test_id in both])),
        tuple(line for test_id in both for line in _curves(first, second, old[test_id], new[test_id])),
        tuple(line for test_id in both for line in _facts(first, second, old[test_id], new[test_id])),
        tuple(_speeds([(old[test_id], new[test_id]) for test_id in both])),
    )


def _side(folder: Path) -> Side:
    return Side(folder, gate.read_run(folder), gate.judge(folder))


def _conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    def of(run: Mapping[str, Any]) -> dict[str, Any]:
        host = run.get("host") or {}
        machine = run.get("capabilities") or {}
        device = {"device": machine.get("device_name"), "gpus": machine.get("gpus")}
        return {**{k: run.get(k) for k in CONDITIONS}, "host": {k: host.get(k) for k in HOST}, **device}

    yield from baselines.differing_keys(of(after), of(before))


def _verdicts(pairs: Sequence[tuple[Result, Result]]) -> Iterator[str]:
    changed = [(old, new) for old, new in pairs if old.verdict is not new.verdict]
    for old, new in sorted(changed, key=lambda pair: pair[1].order):
        told = new.message or old.message
        yield f"{new.id}: {old.verdict} -> {new.verdict}{f': {told}' if told else ''}"


def _numbers(pairs: Sequence[tuple[Result, Result]]) -> Iterator[str]:
    """Properties that are numbers in both runs and differ, the largest relative change first; then other properties."""
    found: list[tuple[float, str]] = []
    for old, new in pairs:
        for name in sorted({*old.properties, *new.properties}):
            was, now = old.properties.get(name), new.properties.get(name)
            if was == now:
                continue
            told = f"{new.id}: {name} {'absent' if was is None else was} -> {'absent' if now is None else now}"
            if isinstance(was, int | float) and isinstance(now, int | float):
                change = (now - was) / abs(was) if was else math.inf
                found.append((abs(change), f"{told} ({100 * change:+.3g} %)" if was else told))
            else:
                found.append((math.inf, told))
    yield from (told for _, told in sorted(found, key=lambda entry: (-entry[0], entry[1])))


def _curves(first: Side, second: Side, old: Result, new: Result) -> Iterator[str]:
    """For each metric: the first step that differs, and the step that differs most."""
    if "loss_file" not in old.properties or "loss_file" not in new.properties:
        return
    try:
        sides = [
            Curve.of_evidence(baselines.read_loss_evidence(gate.file_of(side.folder, result, "loss_file")))
            for side, result in ((first, old), (second, new))
        ]
    except UnreadableError as error:
        yield f"{new.id}: {error}"
        return
    for metric in ("loss", "grad_norm"):
        was, now = (getattr(side, metric) for side in sides)
        steps = sorted({*was, *now})
        differences = {step: relative(now.get(step, math.nan), was.get(step, math.nan)) for step in steps}
        moved = [step for step in steps if not differences[step] <= 0.0]
        if not moved:
            continue
        worst = max(moved, key=lambda step: math.inf if math.isnan(differences[step]) else differences[step])
        told = f"first differs at step {moved[0]} by {differences[moved[0]]:.2e}"
        yield f"{new.id}: {metric} {told}, most at step {worst} by {differences[worst]:.2e}, of {len(steps)} steps"


def _speeds(pairs: Sequence[tuple[Result, Result]]) -> Iterator[str]:
    """Rows whose time moved by more than 1 %, the largest change first, beside their ratio to the reference."""
    found: list[tuple[float, str]] = []
    for old, new in pairs:
        was, now = old.baseline or {}, new.baseline or {}
        if (
            was.get("kind") != "perf"
            or now.get("kind") != "perf"
            or not (was.get("median_ns") and now.get("median_ns"))
        ):
            continue
        change = now["median_ns"] / was["median_ns"] - 1
        told = f"{new.id}: {was['median_ns'] / 1e3:.1f} -> {now['median_ns'] / 1e3:.1f} us ({100 * change:+.1f} %)"
        if was.get("ratio") and now.get("ratio"):
            against = 100 * (now["ratio"] / was["ratio"] - 1)
            told += f", by the reference of each run {against:+.1f} %"
        if abs(change) > SPEED_MOVED:
            found.append((abs(change), told))
    yield from (told for _, told in sorted(found, key=lambda entry: (-entry[0], entry[1])))


def _facts(first: Side, second: Side, old: Result, new: Result) -> Iterator[str]:
    if "isa_file" not in old.properties or "isa_file" not in new.properties:
        return
    try:
        was, now = (
            baselines.read_isa_evidence(gate.file_of(side.folder, result, "isa_file"))
            for side, result in ((first, old), (second, new))
        )
    except UnreadableError as error:
        yield f"{new.id}: {error}"
        return
    for what, before, after in (("config", was.config, now.config), ("", was.facts, now.facts)):
        for line in baselines.differing_keys(after, before):
            yield f"{new.id}: {f'{what} ' if what else ''}{line}"
    if was.facts == now.facts and was.listing_hash != now.listing_hash:
        yield f"{new.id}: another listing, with every fact equal"
