"""`fp8ci gate DIR --judge-with CHECKOUT`: another checkout judges: its harness, baselines, manifest and waivers.

A change could loosen its own gate: delete a manifest line, widen a band, add a waiver, or make the gate say yes. So the
evidence of a change is judged by the base branch as well. The base's harness runs in a process of its own, from the
base's folder, and nothing of the change is imported there; what it reads of the change is the evidence alone. It also
insists on the whole selection of its platform: a run of half the suites proves half.

Both judgements count: the process exits with the worse of the two, and every verdict that differs is told first. A base
that cannot judge (older than `gate --json`, or broken) is red with its own words.

Not here: which checkout is the base (the workflow says it), verdicts (gate.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import gate
from harness.errors import EXIT_MEANINGS, HarnessError, UnreadableError, UsageError, worst_exit

DEADLINE = 600.0
"""Seconds for the other checkout's judgement, which takes a few."""

SHOWN = 15


@dataclass(frozen=True)
class Both:
    """Two judgements of one evidence folder. `own` is None where the evidence cannot be judged by its own files."""

    base: dict[str, Any]
    own: dict[str, Any] | None
    error: str
    differences: tuple[str, ...]
    exit_code: int
    checkout: Path

    @property
    def text(self) -> str:
        """What differs first, then the other checkout's summary."""
        own = f"exit {self.own['exit_code']}" if self.own is not None else f"refused: {self.error}"
        lines = [f"exit {self.exit_code}: {EXIT_MEANINGS[self.exit_code]}", ""]
        lines += [f"## Judged by {self.checkout}: exit {self.base['exit_code']}; by its own files: {own}", ""]
        lines += [f"- differs: {line}" for line in self.differences[:SHOWN]] or ["both say the same of every test"]
        if len(self.differences) > SHOWN:
            lines.append(f"- ... and {len(self.differences) - SHOWN} more")
        return "\n".join([*lines, "", str(self.base.get("summary", ""))])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "exit_code": self.exit_code,
            "base": self.base,
            "own": self.own,
            "error": self.error,
            "differences": list(self.differences),
        }


def judge(evidence: Path, checkout: Path) -> Both:
    """Both judgements.

    Raises:
        UsageError: `checkout` holds no harness, baselines or suites.
        UnreadableError: its harness gave no judgement.
    """
    # Without these files Python would take the harness from elsewhere, perhaps from the change.
    for part in ("harness/__main__.py", "harness/__init__.py", "baselines", "suites"):
        if not (checkout / part).exists():
            raise UsageError(f"{checkout} has no {part}", "a checkout of the base branch", "correct --judge-with")
    base = _ask(evidence.absolute(), checkout.absolute())
    own: dict[str, Any] | None = None
    error = ""
    codes = [int(base["exit_code"])]
    try:
        judgement = gate.judge(evidence, whole=True)
        own = judgement.as_dict()
        codes.append(judgement.exit_code)
    except HarnessError as refused:
        error = str(refused)
        codes.append(refused.exit_code)
    differences = gate.differing(_verdicts(own), _verdicts(base), "its own files", "the base")
    return Both(base, own, error, differences, worst_exit(codes), checkout)


def _verdicts(told: dict[str, Any] | None) -> dict[str, str]:
    return {} if told is None else {str(result["id"]): str(result["verdict"]) for result in told["results"]}


def _ask(evidence: Path, checkout: Path) -> dict[str, Any]:
    """The other harness's judgement: `python -m harness gate` in its folder, which is then first on its path."""
    argv = [sys.executable, "-m", "harness", "gate", str(evidence), "--json", "--whole", "--current"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [*argv, "--root", str(checkout)],
            cwd=checkout,
            env={**environment, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreadableError(
            f"{checkout} has not judged within {DEADLINE:.0f} s", "a judgement", "run again"
        ) from None
    try:
        told = json.loads(done.stdout)
        if told["exit_code"] == done.returncode and isinstance(told["results"], list):
            return dict(told)
        said = f"exit {done.returncode}, and says {told['exit_code']}"
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        said = f"exit {done.returncode}: {lines[-1]}"
    raise UnreadableError(f"{checkout} gave no judgement ({said})", "one JSON object", "look at its harness")
