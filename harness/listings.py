"""Machine code on demand: the kernels of a checkout, or of another revision of it, compiled now for an arch.

`suites/codegen/listings.py` compiles, in a process of its own, since the harness imports no torch; this module starts
it and reads what it leaves: text, and what the reader (harness/isa) has to know beside it. The same file of *this*
checkout compiles the other revision too, with that revision's fp8stack on its path, in a git worktree that goes with
the answer.

Not here: what is shown of a listing and how two are compared (harness/report/isa.py).
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import isa
from harness.errors import InfraError, InterruptedRun, UsageError
from harness.executor import Command
from harness.isa import occupancy
from harness.local import LocalExecutor
from harness.run import stop_signals, triton_cache

DEADLINE = 1800.0
"""Seconds for one revision: every kernel of an arch, uncached, on one slow core."""

SHOWN_NAMES = 5


@dataclass(frozen=True)
class Compilation:
    """What one revision gave: every case of the arch, and the matching kernels by case."""

    cases: tuple[str, ...]
    kernels: dict[str, isa.Kernel]


def compile_matching(root: Path, sources: Path, glob: str, arch: str) -> Compilation:
    """Compile the kernels of the checkout `sources` whose case matches, with the tool of the checkout `root`.

    UsageError for an arch that the kernels have no configuration for; InfraError where the child fails otherwise.
    """
    script = root / "suites" / "codegen" / "listings.py"
    if not script.is_file():
        raise UsageError(f"{root} has no suites/codegen/listings.py", "a checkout of this project", "correct --root")
    with tempfile.TemporaryDirectory(prefix="fp8ci-isa-") as name, triton_cache() as cache:
        folder, log = Path(name), Path(name) / "log"
        # The cache may hold what this compiles; a GPU is not looked for; -P: nothing of suites/ is on the path.
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "FP8STACK_ARCH")},
            "PYTHONPATH": str(sources),
            "TRITON_CACHE_DIR": cache,
            "CUDA_VISIBLE_DEVICES": "-1",
            "HIP_VISIBLE_DEVICES": "-1",
        }
        argv = (sys.executable, "-P", str(script), glob, arch, str(folder))
        with stop_signals() as stopped:
            ended = LocalExecutor().run(Command(argv, environment, sources, DEADLINE, log), cancelled=stopped)
        if stopped.is_set():
            raise InterruptedRun(f"stopped while {glob} was compiled", next_step="run again")
        told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = told[-1] if told else "it printed nothing"
        if ended.rc == 2:
            raise UsageError(last)
        if ended.rc != 0:
            how = f"exit code {ended.rc}" if ended.signal is None else ended.signal
            raise InfraError(
                f"compiling {glob} for {arch} in {sources} ended with {how}: {last}",
                "an environment with torch and Triton, and kernels that compile",
                f"run {' '.join(argv[:-1])} DIR with PYTHONPATH={sources} to see all of it",
            )
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        kernels = {entry["case"]: _read(folder, entry, arch, index["triton"]) for entry in index["kernels"]}
    return Compilation(tuple(index["cases"]), kernels)


def _read(folder: Path, entry: dict[str, Any], arch: str, triton: str) -> isa.Kernel:
    """One kernel of the child's index."""
    text = (folder / entry["listing"]).read_text(encoding="utf-8")
    if entry["resource_usage"] is None:
        listing = isa.read_amdgcn(text)
    else:
        listing = isa.read_sass(text, (folder / entry["resource_usage"]).read_text(encoding="utf-8"))
    found = isa.facts(listing, shared_bytes=entry["shared_bytes"], num_warps=entry["num_warps"])
    about = {name: entry[name] for name in ("format", "num_warps", "options", "constants")}
    return isa.Kernel(entry["case"], arch, triton, about, found, isa.hot(listing))


def check_arch(arch: str) -> None:
    """UsageError for an arch that the reader of machine code has no figures for."""
    if arch not in occupancy.UNITS:
        raise UsageError(f"there is no arch {arch!r}", f"one of {', '.join(occupancy.UNITS)}", "")


def check_matched(glob: str, arch: str, found: Sequence[Compilation]) -> None:
    """UsageError, with the names that are nearest, where no revision has a case that matches."""
    if any(compilation.kernels for compilation in found):
        return
    cases = [case for compilation in found for case in compilation.cases]
    near = difflib.get_close_matches(glob.replace("*", ""), cases, n=SHOWN_NAMES, cutoff=0.4)
    near = near or list(dict.fromkeys(f"{case.split('-')[0]}*" for case in cases))
    raise UsageError(
        f"no kernel of {arch} matches {glob!r}",
        f"the id of a case or a glob, such as {', '.join(near)}",
        "`fp8ci plan --suite codegen` lists the cases",
    )


def revision(root: Path, name: str) -> str:
    """The commit that a revision names. UsageError outside git, or for a name that git does not know."""
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if done.returncode:
        raise UsageError(
            f"git in {root} knows no revision {name!r}", "a commit, a branch or a tag", "`git log` lists the commits"
        )
    return done.stdout.strip()


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """A temporary folder with the checkout as it was at a commit; gone afterwards, from git's list too."""
    inside = _git(root, "rev-parse", "--show-prefix").stdout.strip()
    with tempfile.TemporaryDirectory(prefix="fp8ci-base-") as name:
        folder = Path(name) / "checkout"
        done = _git(root, "worktree", "add", "--detach", "--quiet", str(folder), commit)
        try:
            if done.returncode:
                raise InfraError(
                    f"git could not check out {commit[:12]}: {' '.join(done.stderr.split())}",
                    "a repository that takes another worktree",
                    "try `git worktree prune`",
                )
            yield folder / inside
        finally:
            _git(root, "worktree", "remove", "--force", str(folder))


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=120.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfraError(
            f"git cannot be run ({error})", "git on the path", "install it, or leave --against out"
        ) from error
