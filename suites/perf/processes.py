"""The processes of the perf suite: launches of suites/perf/launch.py, each fresh, and what compiles for them before.

With `tree`, a launch times that checkout's fp8stack under this one's measuring code: the two sides of a comparison
differ in the product alone.

Not here: what a launch does (launch.py), how many there are (test_speed.py, prove.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 1800.0
MEMORY_A_JOB = 16 << 30  # of the device: the largest rows, a layer in FP8 and in bf16, need that
ENVIRONMENT: Mapping[str, str] = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Of a launch: everything is compiled, and starting Inductor's pool of compilers would take seconds."""


def search_path(folder: Path, tree: str | None) -> str:
    """PYTHONPATH of a launch: this checkout, with another one's fp8stack before it where `tree` names one."""
    path = [str(ROOT)]
    if tree is not None:
        (folder / "base").mkdir()
        (folder / "base" / "fp8stack").symlink_to(Path(tree).resolve() / "fp8stack")
        path.insert(0, str(folder / "base"))
    return os.pathsep.join([*path, *_beyond_this_checkout()])


def _beyond_this_checkout() -> list[str]:
    """What the caller's PYTHONPATH holds besides a checkout: packages that were not installed."""
    told = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [entry for entry in told if not (Path(entry) / "fp8stack").exists()]


@dataclass
class Running:
    """A launch that has been started; `collect` waits for it."""

    cases: Sequence[str]
    tree: str | None
    out: Path
    process: subprocess.Popen[str]
    stack: ExitStack
    begun: float = field(default_factory=time.monotonic)

    def collect(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Its document; every case that it does not hold is an error in it. `seconds`: of the whole process."""
        with self.stack:
            try:
                _, told = self.process.communicate(timeout=deadline)
            except subprocess.TimeoutExpired:
                self.process.kill()
                _, told = self.process.communicate()
            ended = f"the launch ended with {self.process.returncode}"
            if not self.out.exists():
                last = (told.strip().splitlines() or ["it printed nothing"])[-1]
                return {"rows": {}, "errors": dict.fromkeys(self.cases, f"{ended}: {last}")}
            document: dict[str, Any] = json.loads(self.out.read_text(encoding="utf-8"))
        document["seconds"] = time.monotonic() - self.begun - document.get("waited", 0.0)
        for case in self.cases:
            if case not in document["rows"]:
                document["errors"].setdefault(case, f"{ended} before this row")
        wanted = Path(self.tree or ROOT).resolve()
        if Path(document["tree"]) != wanted:
            document["errors"] = dict.fromkeys(self.cases, f"fp8stack came from {document['tree']}, expected {wanted}")
        return document


def start(kind: str, cases: Sequence[str], tree: str | None) -> Running:
    """Start a launch; it waits until the device is free."""
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8ci-launch-")))
    out = folder / "launch.json"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "suites.perf.launch", "--kind", kind, "--out", str(out), *cases],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": search_path(folder, tree)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Running(cases, tree, out, process, stack)


def launch_once(kind: str, cases: Sequence[str], tree: str | None) -> dict[str, Any]:
    """One fresh process, from start to end."""
    return start(kind, cases, tree).collect()


def jobs() -> int:
    """Processes that may compile side by side here: a core each, and room for the row that each holds."""
    import torch

    room = 1
    if torch.cuda.is_available():
        room = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // MEMORY_A_JOB
    return max(1, min(len(os.sched_getaffinity(0)), room))


def prepare(cases: Sequence[str], tree: str | None) -> str:
    """Compile rows for the launches that follow, side by side; what could not be compiled, in words."""
    with tempfile.TemporaryDirectory(prefix="fp8ci-prepare-") as name:
        command = [sys.executable, "-P", "-m", "suites.perf.launch", "--prepare", "--jobs", str(jobs()), *cases]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": search_path(Path(name), tree)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    return f"{done.stdout}\n{done.stderr if done.returncode else ''}".strip()
