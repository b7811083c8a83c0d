"""The processes of the perf suite: launches of suites/perf/launch.py, each fresh, and what compiles for them before.

A launch is a process with a CUDA context, an allocator and compiled code of its own. It is a fork of one that has
imported torch, its compiler and Triton (preload.py) and has never touched CUDA: those imports are seconds of every
launch that measure nothing. With FP8CI_PERF_FRESH=1 it is a fork of a bare interpreter, and imports them itself.

With `tree`, a launch times that checkout's fp8stack under this one's measuring code: the two sides of a comparison
differ in the product alone. Each content of fp8stack has a folder of its own in TORCHINDUCTOR_CACHE_DIR: Inductor's key
covers neither our sources nor what our ops say of their results, and what another tree has left there fails.

What a run starts ends with it, however it ends: a launch with its nursery, `prepare` with its reader, a worker of a
`pool` with the process that has the pool. Nothing stays behind that holds memory of the device.

Not here: what a launch does (launch.py), how many there are (test_speed.py, prove.py).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from harness.errors import InfraError
from harness.executor import Command, Ended
from harness.forked import ForkedExecutor

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 1800.0
MEMORY_A_JOB = 16 << 30  # of the device: the largest rows, a layer in FP8 and in bf16, need that
PRELOAD = "suites.perf.preload"
FRESH_VARIABLE = "FP8CI_PERF_FRESH"
SIDE_BY_SIDE = 2
"""Launches at once: one is measured, the next one waits for the device."""
ENVIRONMENT: Mapping[str, str] = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Of a launch: everything is compiled, and starting Inductor's pool of compilers would take seconds."""
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def folder_of(folder: Path, tree: str | None) -> Path:
    """Where a launch is started, which is where it looks first: this checkout, or one with `tree`'s fp8stack alone."""
    if tree is None:
        return ROOT
    (folder / "base").mkdir()
    (folder / "base" / "fp8stack").symlink_to(Path(tree).resolve() / "fp8stack")
    return folder / "base"


def search_path() -> str:
    """PYTHONPATH of a launch: this checkout, and what the caller's holds besides a checkout."""
    told = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    beyond = [entry for entry in told if not (Path(entry) / "fp8stack").exists()]  # packages that were not installed
    return os.pathsep.join([str(ROOT), *beyond])


def inductor_cache(tree: str | None) -> str:
    """Inductor's folder for that checkout's fp8stack: the same at each launch, another one for other sources."""
    package, digest = Path(tree or ROOT) / "fp8stack", hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    given = os.environ.get(INDUCTOR) or Path(tempfile.gettempdir()) / f"fp8ci-inductor-{os.getuid()}"
    return os.path.abspath(Path(given) / digest.hexdigest()[:16])


def environment(tree: str | None = None) -> dict[str, str]:
    """Of a launch, and of what compiles for it: the same in every test, so that all are forks of one process, but for
    the compile caches. Those are absolute, since each launch of a tree has a working folder of its own.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    caches = {INDUCTOR: inductor_cache(tree)}
    if own.get(TRITON):  # keyed by the source: trees may share it
        caches[TRITON] = os.path.abspath(own[TRITON])
    return {**own, **ENVIRONMENT, "PYTHONPATH": search_path(), **caches}


def preloaded() -> tuple[str, ...]:
    """What processes that use the device are forks of: one that has imported this."""
    return () if os.environ.get(FRESH_VARIABLE) == "1" else (PRELOAD,)


def forks() -> ForkServerContext:
    """For a pool of such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded()))
    return context


def pool(count: int, environment: Mapping[str, str] | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """So many of them, which end when this process does; `environment` comes on top of its own."""
    given = dict(environment or {})
    return concurrent.futures.ProcessPoolExecutor(count, forks(), initializer=_begin, initargs=(given,))


def _begin(environment: Mapping[str, str]) -> None:
    """In a worker. Its parent is the fork server, which goes on as long as a worker does: the pipe to the process that
    has the pool says when that ends.
    """
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_reader() -> None:
    """End this process as soon as nobody can read its stdout any more; where it leads a process group, all of that."""
    said = select.poll()
    said.register(1, 0)  # errors alone: of a pipe, that its reader has gone

    def watch() -> None:
        while not any(event & (select.POLLERR | select.POLLHUP) for _, event in said.poll()):
            time.sleep(1)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.cache
def _executor(modules: tuple[str, ...]) -> ForkedExecutor:
    executor = ForkedExecutor(modules)
    atexit.register(executor.close)
    return executor


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE, "fp8ci-launch")


@dataclass
class Running:
    """A launch that has been started; `collect` waits for it."""

    cases: Sequence[str]
    tree: str | None
    out: Path
    ended: concurrent.futures.Future[tuple[Ended, float]]
    cancelled: threading.Event
    stack: ExitStack

    def cancel(self) -> None:
        """End it soon; `collect` says that it was."""
        self.cancelled.set()

    def collect(self, deadline: float = DEADLINE) -> dict[str, Any]:
        """Its document; every case that it does not hold is an error in it. `seconds`: of the whole process, without
        the wait for the device.
        """
        with self.stack:
            try:
                if concurrent.futures.wait([self.ended], deadline).not_done:
                    self.cancel()
                how, finished = self.ended.result()
            except InfraError as error:
                return {"rows": {}, "errors": dict.fromkeys(self.cases, str(error))}
            ended = f"the launch ended with {how.rc if how.signal is None else how.signal}"
            log = self.out.with_suffix(".log")
            if not self.out.exists():
                told = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
                last = (told.strip().splitlines() or ["it printed nothing"])[-1]
                return {"rows": {}, "errors": dict.fromkeys(self.cases, f"{ended}: {last}")}
            document: dict[str, Any] = json.loads(self.out.read_text(encoding="utf-8"))
        document["seconds"] = how.seconds - document.get("waited", 0.0)
        if "ended" in document:
            start, end = document["entered"] - (finished - how.seconds), finished - document["ended"]
            document["parts"] = {"start": round(start, 3), **document["parts"], "end": round(end, 3)}
        for case in self.cases:
            if case not in document["rows"]:
                document["errors"].setdefault(case, f"{ended} before this row")
        wanted = Path(self.tree or ROOT).resolve()
        if Path(document["tree"]) != wanted:
            document["rows"] = {}
            document["errors"] = dict.fromkeys(self.cases, f"fp8stack came from {document['tree']}, expected {wanted}")
        return document


def start(kind: str, cases: Sequence[str], tree: str | None) -> Running:
    """Start a launch; it waits until the device is free."""
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8ci-launch-")))
    out = folder / "launch.json"
    where, given = folder_of(folder, tree), environment(tree)
    executor, cancelled = _executor(preloaded()), threading.Event()

    def run() -> tuple[Ended, float]:
        argv = (sys.executable, "-m", "suites.perf.launch", "--kind", kind, "--out", str(out), *cases)
        command = Command(argv, given, where, DEADLINE, out.with_suffix(".log"))
        return executor.run(command, cancelled=cancelled), time.monotonic()

    return Running(cases, tree, out, _pool().submit(run), cancelled, stack)


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
        command = [sys.executable, "-m", "suites.perf.launch", "--prepare", "--jobs", str(jobs()), *cases]
        where = folder_of(Path(name), tree)
        with subprocess.Popen(
            command, env=environment(tree), cwd=where, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                told, errors = process.communicate(timeout=DEADLINE)
            except BaseException:  # its workers would go on, with the memory of the device that they hold
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    return f"{told}\n{errors if process.returncode else ''}".strip()
