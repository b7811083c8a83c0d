"""What it means to run a command: with a deadline, its output in a log, and an answer to how it ended.

`Executor` is all that run.py knows. `local.py` keeps the promise with a process group on this machine, a container
engine keeps it with a container; neither the plan nor the journal nor the gate can tell which one it was.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness.errors import Verdict
from harness.memory import Struck

KilledBy = Literal["deadline", "interrupt"]


@dataclass(frozen=True)
class Command:
    """What to run. `environment` is the whole environment. `deadline` in seconds. `log` takes stdout and stderr.

    `writable`: the folders that it may write to, for an executor that can keep it out of the others.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    deadline: float
    log: Path
    writable: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Fault:
    """What the place knows of an end that exit code and signal do not say: a memory limit, an engine that went away."""

    verdict: Verdict
    message: str
    """One line, without a full stop."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code or the signal that ended it, who on our side ended it, and after how long.

    `rc` is None exactly when `signal` is set. `killed_by` is None when it ended without our doing. `pid` is what the
    log or the engine calls it. `oom`: meanwhile the kernel killed for memory, at the run's own limit or on the host.
    """

    rc: int | None
    signal: str | None
    killed_by: KilledBy | None
    seconds: float
    pid: int
    oom: Struck | None = None
    fault: Fault | None = None


@dataclass(frozen=True)
class Place:
    """What a command line must know of where it will run.

    `python`: the interpreter that has torch there. `plugin_installed`: whether pytest finds our plugin by its entry
    point. `environment`: what a process starts from there.
    """

    python: str
    plugin_installed: bool
    environment: Mapping[str, str]


def here() -> Place:
    """This machine, this interpreter, this environment."""
    installed = any(entry.value == "harness.plugin" for entry in importlib.metadata.entry_points(group="pytest11"))
    return Place(sys.executable, installed, os.environ)


class Executor(Protocol):
    """Runs one command at a time a thread; several threads may run commands side by side."""

    def run(
        self,
        command: Command,
        *,
        cancelled: threading.Event,
        on_output: Callable[[str], None] | None = None,
    ) -> Ended:
        """Run to the end, the deadline or cancellation. InfraError when it cannot be started at all.

        After it returns nothing that the command started is left running.
        """
        ...


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 64` where the number has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
