"""The canary: a tiny known-good kernel, run after a death that may be the GPU's fault or the test's.

A test can hang a GPU, and a sick GPU can kill a test; the log reads the same ("HW Exception ... GPU Hang", exit 134).
So after a death that makes the GPU suspect, or a deadline on a platform that has one, a process of its own multiplies
two small matrices of ones and looks at the sum. If that fails the machine is at fault (GPU_HANG, may be retried
elsewhere), else the test is (CRASH, TIMEOUT), however the log sounds.

The canary has a deadline: on a hung GPU it hangs as well. Not here: what follows from its silence (deaths.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.executor import Command, Ended

#: What the log of a dead process says when the GPU is suspect.
FAULTS = ("HW Exception by GPU", "GPU Hang", "HSA_STATUS_ERROR_EXCEPTION", "Memory access fault by GPU")

DEADLINE = 90.0
"""Seconds: importing torch from a cold disk takes tens of them."""

CODE = """
import torch
ones = torch.ones(256, 256, device="cuda")
total = (ones @ ones).sum().item()
assert total == 256.0**3, total
"""


def suspected(log: str) -> str | None:
    """What in a log makes the GPU suspect, or None."""
    return next((fault for fault in FAULTS if fault in log), None)


def command(python: str, environment: Mapping[str, str], folder: Path, log: Path) -> Command:
    """The canary as a command: interpreter and environment of the process that died, a log of its own."""
    return Command((python, "-c", CODE), environment, folder, DEADLINE, log)


def told(ended: Ended, log: str) -> str:
    """Empty when the canary sang, else why it did not, on one line."""
    if ended.killed_by == "deadline":
        return f"the canary did not end within {DEADLINE:.0f} s"
    if ended.rc == 0:
        return ""
    lines = log.strip().splitlines() or ["no message"]
    how = f"died of {ended.signal}" if ended.signal else f"ended with {ended.rc}"
    return f"the canary {how}: {' '.join(lines[-1].split())[:200]}"
