"""`fp8ci run --suite perf --against BASE`: a checkout of the merge base, for launches in turns with this commit's.

A change is held against where it left its base, not against what others have put there since: the merge base of HEAD
and BASE. The perf suite reads where it lies from FP8CI_AGAINST and times its fp8stack with the measuring code of this
checkout, so that only the product differs between the two sides of a pair.

Not here: launches (suites/perf), the comparison (speed.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness import listings
from harness.errors import UsageError

VARIABLE = "FP8CI_AGAINST"
COMMIT_VARIABLE = "FP8CI_AGAINST_COMMIT"


def merge_base(root: Path, name: str) -> str:
    """The commit where HEAD left `name`. UsageError where the two have none, or git does not know the name."""
    commit = listings.revision(root, name)
    done = subprocess.run(
        ["git", "-C", str(root), "merge-base", "HEAD", commit], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise UsageError(
            f"HEAD and {name} have no common commit", "a branch that this one began from", "fetch its history"
        )
    return done.stdout.strip()


@contextmanager
def base(root: Path, name: str) -> Iterator[Mapping[str, str]]:
    """The environment of a run whose launches take turns with the merge base, in a worktree that goes with it."""
    commit = merge_base(root, name)
    with listings.worktree(root, commit) as folder:
        yield {VARIABLE: str(folder), COMMIT_VARIABLE: commit}
