"""The local executor: a command in a process group of its own on this machine.

Output goes straight into the log file, not through a pipe: a pipe that nobody reads stops the child, and one that a
grandchild keeps open outlives it. Whoever wants to watch gets the same bytes by reading along in the file.

The end is noticed without reaping (`waitid` with WNOWAIT): as long as the leader is unreaped its process group number
cannot go to anybody else, so the group can be killed safely, and whatever the command left behind (an xdist worker, a
trainer's rank) goes with it. A deadline or a cancellation is SIGTERM to the group, then SIGKILL after `GRACE` seconds.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from harness import memory
from harness.errors import InfraError
from harness.executor import Command, Ended, KilledBy, signal_name

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL: time for pytest to print stacks, short enough for a cancelled CI job."""

POLL = 0.02


class LocalExecutor:
    """Runs commands as process groups of this machine."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace

    def run(
        self,
        command: Command,
        *,
        cancelled: threading.Event,
        on_output: Callable[[str], None] | None = None,
    ) -> Ended:
        """As `Executor.run` says. `on_output` gets the log's text as it grows, whole characters only."""
        command.log.parent.mkdir(parents=True, exist_ok=True)
        started, before = time.monotonic(), memory.kills()
        with command.log.open("ab") as log, command.log.open("rb") as written:
            written.seek(0, os.SEEK_END)
            follow = _Follower(written, on_output)
            try:
                process = subprocess.Popen(
                    command.argv,
                    cwd=command.folder,
                    env=dict(command.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise InfraError(
                    f"{command.argv[0]} cannot be started ({error})", "a program that runs here", "check the path"
                ) from error
            killed_by = self._wait(process.pid, started + command.deadline, cancelled, follow)
            _kill_group(process.pid, signal.SIGKILL)
            code = process.wait()
            follow.read(last=True)
        return Ended(
            rc=code if code >= 0 else None,
            signal=signal_name(-code) if code < 0 else None,
            killed_by=killed_by,
            seconds=time.monotonic() - started,
            pid=process.pid,
            oom=memory.kills().since(before),
        )

    def _wait(self, pid: int, deadline: float, cancelled: threading.Event, follow: _Follower) -> KilledBy | None:
        """Wait until the leader has ended; end it when it must. Returns why we ended it, if we did."""
        killed_by: KilledBy | None = None
        kill_at = float("inf")
        while not _has_ended(pid):
            now = time.monotonic()
            if killed_by is None and (cancelled.is_set() or now >= deadline):
                killed_by = "interrupt" if cancelled.is_set() else "deadline"
                _kill_group(pid, signal.SIGTERM)
                kill_at = now + self.grace
            elif now >= kill_at:
                _kill_group(pid, signal.SIGKILL)
            follow.read()
            time.sleep(POLL)
        return killed_by


class _Follower:
    """Hands on what a log gains, decoded as UTF-8 without cutting a character."""

    def __init__(self, stream: BinaryIO, on_output: Callable[[str], None] | None) -> None:
        self._stream = stream
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, last: bool = False) -> None:
        if self._on_output is None:
            return
        text = self._decoder.decode(self._stream.read(), last)
        if text:
            self._on_output(text)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays unreaped, so its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # everybody has gone already
        os.killpg(pid, number)
