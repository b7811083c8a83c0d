"""The local executor ends what it started, says how it ended, and keeps the log whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.errors import InfraError
from harness.executor import Command, Ended, signal_name
from harness.local import LocalExecutor


def run(folder: Path, source: str, *, deadline: float = 30.0, cancel_after: float | None = None) -> tuple[Ended, str]:
    """How a Python program ended, and its log."""
    cancelled = threading.Event()
    if cancel_after is not None:
        threading.Timer(cancel_after, cancelled.set).start()
    log = folder / "logs" / "x.log"
    command = Command((sys.executable, "-S", "-c", source), dict(os.environ), folder, deadline, log)
    ended = LocalExecutor(grace=0.3).run(command, cancelled=cancelled)
    return ended, log.read_text(encoding="utf-8", errors="replace")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that waits for its parent does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("source", "rc", "signal_name"),
    [
        pytest.param("raise SystemExit(0)", 0, None, id="good"),
        pytest.param("raise SystemExit(5)", 5, None, id="exit-5"),
        pytest.param("import os; os._exit(0)", 0, None, id="hard-exit"),
        pytest.param("import os; os.kill(os.getpid(), 9)", None, "SIGKILL", id="sigkill"),
        pytest.param("import os; os.kill(os.getpid(), 11)", None, "SIGSEGV", id="sigsegv"),
        pytest.param("import os; os.abort()", None, "SIGABRT", id="abort"),
        pytest.param("raise SystemExit(137)", 137, None, id="exit-137-is-no-signal"),
    ],
)
def test_how_it_ended(source: str, rc: int | None, signal_name: str | None, tmp_path: Path) -> None:
    """An exit code or a signal, never one dressed as the other, and not by us."""
    ended, _ = run(tmp_path, source)
    assert (ended.rc, ended.signal, ended.killed_by) == (rc, signal_name, None)


def test_both_streams_are_in_the_log(tmp_path: Path) -> None:
    """stdout and stderr, in one file, in bytes that need not be text."""
    _, log = run(tmp_path, r"import os; os.write(1, b'out \xff\n'); os.write(2, b'err\n')")
    assert log == "out \ufffd\nerr\n"


def test_a_deadline_is_sigterm(tmp_path: Path) -> None:
    """A program that can be asked to stop is asked."""
    began = time.monotonic()
    ended, _ = run(tmp_path, "import time; time.sleep(60)", deadline=0.3)
    assert (ended.rc, ended.signal, ended.killed_by) == (None, "SIGTERM", "deadline")
    assert time.monotonic() - began < 5


def test_a_deadline_ends_what_does_not_listen(tmp_path: Path) -> None:
    """SIGKILL follows after the grace."""
    source = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    ended, _ = run(tmp_path, source, deadline=0.5)
    assert (ended.signal, ended.killed_by) == ("SIGKILL", "deadline")
    assert 0.8 <= ended.seconds < 10


def test_cancellation_is_an_interrupt(tmp_path: Path) -> None:
    """The caller's event ends the command at once."""
    ended, _ = run(tmp_path, "import time; time.sleep(60)", cancel_after=0.3)
    assert (ended.signal, ended.killed_by) == ("SIGTERM", "interrupt")
    assert ended.seconds < 5


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(60)"])
def test_nothing_is_left_running(end: str, tmp_path: Path) -> None:
    """A grandchild that ignores SIGTERM and holds the log open dies with the command, however that ended."""
    source = f"""
import os, signal, time
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
print(child, flush=True)
{end}
"""
    ended, log = run(tmp_path, source, deadline=2.0)
    assert ended.seconds < 8
    pid = int(log)
    until = time.monotonic() + 5
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(pid)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """That nothing could be started is the machine's or the caller's fault, with the path in the message."""
    command = Command(("/nowhere/python",), {}, tmp_path, 5.0, tmp_path / "x.log")
    with pytest.raises(InfraError, match="/nowhere/python cannot be started"):
        LocalExecutor().run(command, cancelled=threading.Event())


def test_output_is_followed_without_cutting_characters(tmp_path: Path) -> None:
    """A rocket that arrives byte by byte is one rocket; what an earlier attempt wrote is not told again."""
    heard: list[str] = []
    source = (
        "import os, time\nfor byte in 'a\U0001f680b'.encode():\n os.write(1, bytes([byte])); time.sleep(0.05)\n"
        "os.write(1, b'\\xf0')"
    )
    log = tmp_path / "x.log"
    log.write_text("earlier\n", encoding="ascii")
    command = Command((sys.executable, "-S", "-c", source), dict(os.environ), tmp_path, 30.0, log)
    LocalExecutor().run(command, cancelled=threading.Event(), on_output=heard.append)
    assert "".join(heard) == "a\U0001f680b\ufffd"
    assert len(heard) > 1
    assert log.read_bytes().startswith(b"earlier\na")


def test_signal_names() -> None:
    """Real-time signals have numbers only."""
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(63) == "signal 63"
