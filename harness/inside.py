"""Inside a container: runs one command, and at its end writes down what the control group counted.

`python -m harness.inside COMMAND ...` is what a container starts. An engine keeps one exit code and one flag; whether a
*child* met the memory limit, whether it was the run's own limit or the whole host's, and whether a process could not be
started because of the pids limit is known only to the control group, and goes with it. This process outlives the
command by the moment that it takes to read those counters.

Signals are handed to the command's process group, and the group is ended with its leader. The exit code is the
command's own, 128 + n where signal n ended it, 127 or 126 where it could not be started.

Not here: what the counters mean (container.py). Imports the standard library only, and of the harness nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

REPORT = "FP8CI_END"
"""Environment variable: the file that takes the counters."""

FOLDERS = ("HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
"""Environment variables whose folders are made, since the image knows none of them."""


SLACK = 4 << 20
"""Bytes below a memory limit that count as at it: a huge page of 2 MiB is refused before the limit is met."""


def counters(root: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """What the control group of this container has counted, in either layout; a counter that it lacks is left out.

    `oom_kills`: processes ended for memory. `limit_hits`: how often the group's own memory limit was met. `pids_hits`:
    processes and threads that the pids limit refused.
    """
    found: dict[str, int] = {}
    for key, file, word in (
        ("oom_kills", "memory/memory.oom_control", "oom_kill"),
        ("pids_hits", "pids/pids.events", "max"),
        ("oom_kills", "memory.events", "oom_kill"),
        ("limit_hits", "memory.events", "oom"),
        ("pids_hits", "pids.events", "max"),
    ):
        with contextlib.suppress(OSError, ValueError):
            lines = [line.split() for line in (root / file).read_text(encoding="ascii").splitlines()]
            values = [line[-1] for line in lines if not word or line[0] == word]
            if values:
                found[key] = int(values[0])
    with contextlib.suppress(OSError, ValueError):  # the older layout: its own count (failcnt) stays 0 on new kernels
        most, limit = (int((root / f"memory/memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
        found["limit_hits"] = int(most >= limit - SLACK)
    return found


def main(argv: Sequence[str]) -> int:
    """Run `argv` to its end; returns its exit code."""
    report = os.environ.pop(REPORT, None)
    for name in FOLDERS:
        if os.environ.get(name):
            os.makedirs(os.environ[name], exist_ok=True)
    code = _run(argv)
    if report:
        with contextlib.suppress(OSError):  # a full disk, which the log tells
            Path(report).write_text(json.dumps({"rc": code, **counters()}), encoding="ascii")
    return code


def _run(argv: Sequence[str]) -> int:
    # Blocked until the command exists, so that none that arrives in between is lost; the command gets them unblocked.
    handed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
    try:
        child = subprocess.Popen(
            argv, start_new_session=True, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
        )
    except OSError as error:
        print(f"fp8ci: {argv[0]} cannot be started in this image ({error.strerror})", file=sys.stderr, flush=True)
        return 127 if isinstance(error, FileNotFoundError) else 126

    def hand_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    for number in handed_on:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
    # Unreaped, its process group number stays its own: the group can be ended safely.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
