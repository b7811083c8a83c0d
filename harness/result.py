"""What the gate says: one Result a test, and the Judgement of the whole run. Plain data, no policy.

A Result carries the exit code and the JUnit element that apply to it *here*, because two verdicts depend on more than
themselves (IMPROVED is red on main). junit.py and report/ read both and decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import VERDICTS, JUnitElement, Verdict

#: In a tie of severity, and in every listing: what explains the others comes first. A wrong format constant reddens the
#: numerics, and the loss as a consequence.
SUITE_ORDER: tuple[str, ...] = ("numerics", "codegen", "loss", "perf", "unit")


def suite_rank(suite: str) -> tuple[int, str]:
    """Sort key of a suite's name: the order above, unknown ones behind it by name."""
    return (SUITE_ORDER.index(suite) if suite in SUITE_ORDER else len(SUITE_ORDER), suite)


@dataclass(frozen=True)
class Result:
    """The verdict on one test id."""

    id: str
    suite: str
    verdict: Verdict
    message: str = ""
    """One line, with numbers."""
    detail: str = ""
    seconds: float = 0.0
    properties: Mapping[str, str | int | float] = field(default_factory=dict)
    baseline: Mapping[str, Any] | None = None
    """What it was compared with: `kind` is "loss" (bands.as_dict) or "codegen" (facts beside the baseline's)."""
    attempts: tuple[str, ...] = ()
    """How each attempt ended, the last one included; empty where there was one."""
    strict: bool = False
    """The stricter form of the verdict applies (IMPROVED on main)."""

    @property
    def exit_code(self) -> int:
        rule = VERDICTS[self.verdict]
        return rule.stricter[0] if self.strict and rule.stricter else rule.exit_code

    @property
    def junit(self) -> JUnitElement:
        rule = VERDICTS[self.verdict]
        return rule.stricter[1] if self.strict and rule.stricter else rule.junit

    @property
    def red(self) -> bool:
        return self.exit_code != 0

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Worst first: by rank, then suite, then id."""
        return (VERDICTS[self.verdict].rank, *suite_rank(self.suite), self.id)


@dataclass(frozen=True)
class Judgement:
    """All results in the order of their suites and ids, and the exit code that follows."""

    results: tuple[Result, ...]
    exit_code: int
    counts: Mapping[str, int]
    """Verdict -> how many; only verdicts that were given."""
    notes: tuple[str, ...] = ()
    """Things to list that are no verdict: new tests, changed listings, damage in the journal."""
    policy: str = "pull-request"

    @property
    def worst_first(self) -> tuple[Result, ...]:
        return tuple(sorted(self.results, key=lambda result: result.order))

    @property
    def red(self) -> tuple[Result, ...]:
        return tuple(result for result in self.worst_first if result.red)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a machine to read: what was said of each test, in order, and what follows."""
        results = [
            {"id": r.id, "suite": r.suite, "verdict": str(r.verdict), "message": r.message, "red": r.red}
            for r in self.results
        ]
        whole = {"exit_code": self.exit_code, "policy": self.policy, "counts": dict(self.counts)}
        return {**whole, "notes": list(self.notes), "results": results}
