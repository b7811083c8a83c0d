"""What the OOM killer struck, by the kernel's own counters, and the verdict that follows from it.

A process that is really killed for memory needs a control group with a limit, which a test may not make; what is real
here is the kernel's counters and the SIGKILL, and what is written by hand is that the one followed from the other.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from harness import gate, memory
from harness.errors import Verdict
from harness.executor import Command
from harness.local import LocalExecutor
from harness.memory import Kills
from suites.unit.built_evidence import NUMERICS_TEST, Built, good


def test_this_kernel_counts() -> None:
    """/proc/vmstat has its counter since Linux 4.13; reading it twice says that nothing was struck."""
    now = memory.kills()
    assert now.host is not None
    assert now.host >= 0
    assert memory.kills().since(now) is None


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="ascii")


@pytest.mark.parametrize(
    ("cgroup", "file", "own"),
    [
        ("0::/ci/run\n", "ci/run/memory.events", 3),
        ("0::/\n", "memory.events", 3),
        ("4:memory:/ci\n0::/\n", "memory/ci/memory.oom_control", 3),
        ("4:cpu,memory:/ci\n", "memory/ci/memory.oom_control", 3),
        ("0::/ci\n", "elsewhere/memory.events", None),
        ("", "memory.events", None),
    ],
    ids=["memory-v2", "memory-v2-root", "memory-v1", "memory-v1-joint", "memory-no-file", "memory-no-group"],
)
def test_our_own_group(cgroup: str, file: str, own: int | None, tmp_path: Path) -> None:
    """Control groups of both versions; a file that is not there says nothing."""
    write(tmp_path, "proc/self/cgroup", cgroup)
    write(tmp_path, "proc/vmstat", "nr_free 1\noom_kill 7\n")
    write(tmp_path, f"groups/{file}", "low 0\noom 9\noom_kill 3\n")
    assert memory.kills(tmp_path / "proc", tmp_path / "groups") == Kills(own, 7)


def test_no_counters(tmp_path: Path) -> None:
    """Another kernel, another file system: nothing is said."""
    assert memory.kills(tmp_path, tmp_path) == Kills(None, None)


@pytest.mark.parametrize(
    ("before", "after", "struck"),
    [
        (Kills(0, 4), Kills(0, 4), None),
        (Kills(0, 4), Kills(1, 5), "limit"),
        (Kills(0, 4), Kills(0, 5), "host"),
        (Kills(None, 4), Kills(None, 5), "host"),
        (Kills(None, None), Kills(3, 9), None),
    ],
)
def test_since(before: Kills, after: Kills, struck: str | None) -> None:
    """Our own limit explains it first: the host's counter counts that as well."""
    assert after.since(before) == struck


def test_an_executor_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read around the process, so that what struck before it is not its own."""
    counted = iter([Kills(0, 4), Kills(1, 5)])
    monkeypatch.setattr(memory, "kills", lambda: next(counted))
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    command = Command((sys.executable, "-c", code), {}, tmp_path, 20.0, tmp_path / "log")
    ended = LocalExecutor().run(command, cancelled=threading.Event())
    assert (ended.signal, ended.oom) == ("SIGKILL", "limit")


@pytest.mark.parametrize(
    ("oom", "verdict", "exit_code"),
    [("limit", Verdict.OOM, 1), ("host", Verdict.HOST_OOM, 4), (None, Verdict.KILLED, 3)],
    ids=["oom-limit", "oom-host", "oom-not"],
)
@pytest.mark.parametrize("worker", [False, True], ids=["alone", "xdist"])
def test_a_sigkill(worker: bool, oom: str | None, verdict: Verdict, exit_code: int, tmp_path: Path) -> None:
    """taskcluster/taskcluster#7599: never from 137 alone. The product, the host, or somebody else."""
    if worker:
        built = good(tmp_path).test(NUMERICS_TEST, "running").process("numerics", rc=1)
        built.session_rc["numerics"] = 1
        crash = {"id": NUMERICS_TEST, "worker": "gw0", "signal": "SIGKILL", "message": "gone", "suite": "numerics"}
        built.extra_events.append(("worker-crash", crash))
    else:
        built = good(tmp_path).test(NUMERICS_TEST, "running").process("numerics", rc=None, signal="SIGKILL")
    built.processes["numerics"]["oom"] = oom
    judgement = gate.judge(built.write())
    (result,) = [result for result in judgement.results if result.id == NUMERICS_TEST]
    assert (result.verdict, judgement.exit_code) == (verdict, exit_code)


def test_a_child_that_was_killed(tmp_path: Path) -> None:
    """docker: exit 0, and the engine's flag is set, since it was a child's. Every test passed: a note, no verdict."""
    built: Built = good(tmp_path).process("numerics", rc=0)
    built.processes["numerics"]["oom"] = "limit"
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 0
    assert judgement.notes == ("memory: while numerics ran, the kernel killed a process at the run's own limit",)
