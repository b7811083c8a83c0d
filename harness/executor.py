"""What it means to run a command: with a deadline, its output in a log, and an answer to how it ended.

`Executor` is all that run.py knows. `local.py` keeps the promise with a process group on this machine, a container
engine keeps it with a container; neither the plan nor the journal nor the gate can tell which one it was.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness.memory import Struck

KilledBy = Literal["deadline", "interrupt"]


@dataclass(frozen=True)
class Command:
    """What to run. `environment` is the whole environment. `deadline` in seconds. `log` takes stdout and stderr."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    deadline: float
    log: Path


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
