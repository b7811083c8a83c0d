"""Machine-code gate: the facts of one kernel beside the baseline's, two-sided.

Compilation is deterministic for one Triton version, so there is no band: a fact that moved, moved. What that means is
the fact's own direction (harness/isa/facts.py): `lower` and `higher` name the better side, `equal` must not move,
`informational` is listed only. Worse is REGRESSION even when another fact improved: a wider store does not pay for a
spill. Better alone is IMPROVED, which prints the patch so that the gain becomes the new floor.

A fact on one side only is no comparison: missing here, the reader went blind (UNREADABLE); missing in the baseline, it
was recorded by an older reader (STALE_BASELINE).

Not here: which row is the baseline (gate.py); what a fact is (harness/isa).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.baselines import Fact
from harness.errors import UnreadableError, Verdict
from harness.isa import FACTS

#: direction -> whether (now, before) is better, for facts that moved.
BETTER: dict[str, Callable[[Any, Any], bool]] = {
    "lower": operator.lt,
    "higher": operator.gt,
    "equal": lambda now, before: False,
}
INFORMATIONAL = "informational"


@dataclass(frozen=True)
class FactRow:
    """One line of the table. `state`: same, better, worse, listed (informational and moved), absent."""

    name: str
    unit: str
    now: Fact | None
    before: Fact | None
    state: str


@dataclass(frozen=True)
class FactComparison:
    """All facts of one kernel; gated ones first decide the verdict."""

    rows: tuple[FactRow, ...]
    verdict: Verdict
    message: str

    @property
    def moved(self) -> bool:
        """Whether any gated fact moved."""
        return any(row.state in ("better", "worse") for row in self.rows)

    @property
    def patch(self) -> str:
        """The better facts as lines of a patch."""
        return "\n".join(
            f"-  {row.name}: {row.before}\n+  {row.name}: {row.now}" for row in self.rows if row.state == "better"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "kind": "codegen",
            "rows": [
                {"name": row.name, "unit": row.unit, "now": row.now, "before": row.before, "state": row.state}
                for row in self.rows
            ],
        }


def check_known(facts: Mapping[str, Fact]) -> None:
    """UnreadableError for a fact that the table does not hold: it would be gated by nothing."""
    unknown = sorted(set(facts) - set(FACTS))
    if unknown:
        raise UnreadableError(f"fact {unknown[0]!r} has no direction", "a fact of harness/isa/facts.py", "add its row")


def compare(now: Mapping[str, Fact], before: Mapping[str, Fact]) -> FactComparison:
    """Compare the facts of a run with the baseline's, in the order of the table.

    Raises:
        UnreadableError: a fact is unknown, or its type changed so that `better` has no meaning.
    """
    check_known(now)
    rows: list[FactRow] = []
    for name, fact in FACTS.items():
        here, there = now.get(name), before.get(name)
        if here is None and there is None:
            continue
        rows.append(FactRow(name, fact.unit, here, there, _state(name, fact.direction, here, there)))
    lost = [row.name for row in rows if row.state == "absent" and row.now is None]
    fresh = [row.name for row in rows if row.state == "absent" and row.now is not None]
    worse = [_told(row) for row in rows if row.state == "worse"]
    better = [_told(row) for row in rows if row.state == "better"]
    if lost:
        verdict, message = Verdict.UNREADABLE, f"facts of the baseline are no longer read: {', '.join(lost)}"
    elif worse:
        also = f" (better: {'; '.join(better)})" if better else ""
        verdict, message = Verdict.REGRESSION, f"machine code is worse: {'; '.join(worse)}{also}"
    elif fresh:
        verdict, message = Verdict.STALE_BASELINE, f"the baseline was recorded without {', '.join(fresh)}"
    elif better:
        verdict, message = Verdict.IMPROVED, f"machine code is better: {'; '.join(better)}"
    else:
        verdict, message = Verdict.PASS, ""
    return FactComparison(tuple(rows), verdict, message)


def _state(name: str, direction: str, now: Fact | None, before: Fact | None) -> str:
    if now == before:
        return "same"
    if direction == INFORMATIONAL:
        return "listed"
    if now is None or before is None:
        return "absent"
    if direction != "equal" and (isinstance(now, str) or isinstance(before, str)):
        raise UnreadableError(f"fact {name} is {now!r}, the baseline's is {before!r}", "two numbers", "record again")
    return "better" if BETTER[direction](now, before) else "worse"


def _told(row: FactRow) -> str:
    unit = f" {row.unit}" if row.unit else ""
    return f"{row.name} {row.before} -> {row.now}{unit}"


def unjudged(facts: Mapping[str, Fact]) -> dict[str, Any]:
    """The table of a kernel that has no baseline: what was measured, nothing beside it."""
    check_known(facts)
    rows = [
        {"name": name, "unit": fact.unit, "now": facts[name], "before": None, "state": "unjudged"}
        for name, fact in FACTS.items()
        if name in facts
    ]
    return {"kind": "codegen", "rows": rows}
