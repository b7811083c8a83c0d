"""The forked executor runs what the local one runs, and starts it from a process that has imported things before."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import InfraError
from harness.executor import Command, Ended
from harness.forked import ForkedExecutor

PRELOADED = ("sqlite3", "there.is.no.such.module")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedExecutor]:
    monkeypatch.setattr("harness.forked.GRACE", 0.3)
    executor = ForkedExecutor(PRELOADED)
    yield executor
    executor.close()


def command(folder: Path, source: str, *arguments: str, deadline: float = 30.0, **environment: str) -> Command:
    (folder / "program.py").write_text(source, encoding="utf-8")
    argv = (sys.executable, "-m", "program", *arguments)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return Command(argv, environment, folder, deadline, folder / "logs" / "x.log")


def run(executor: ForkedExecutor, given: Command, *, cancel_after: float | None = None) -> tuple[Ended, str]:
    """How a program ended, and its log."""
    cancelled = threading.Event()
    if cancel_after is not None:
        threading.Timer(cancel_after, cancelled.set).start()
    return executor.run(given, cancelled=cancelled), given.log.read_text(encoding="utf-8", errors="replace")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that waits for its parent does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def dies(pid: int) -> bool:
    until = time.monotonic() + 5
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_how_it_ended(executor: ForkedExecutor, tmp_path: Path) -> None:
    """An exit code or a signal, as the program said it; one nursery serves them all."""
    for source, expected in (
        ("pass", (0, None)),
        ("raise SystemExit(5)", (5, None)),
        ("raise SystemExit('told')", (1, None)),
        ("raise SystemExit(None)", (0, None)),
        ("1 / 0", (1, None)),
        ("import os; os._exit(7)", (7, None)),
        ("import os; os.kill(os.getpid(), 9)", (None, "SIGKILL")),
        ("import os; os.abort()", (None, "SIGABRT")),
    ):
        ended, _ = run(executor, command(tmp_path, source))
        assert (ended.rc, ended.signal, ended.killed_by) == (*expected, None), source
    assert len(executor._nurseries) == 1


def test_it_is_the_program_that_was_asked_for(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Folder, arguments, environment and log are the command's; nothing of ours is imported with what was asked for."""
    source = """
import atexit, json, os, sys
atexit.register(print, "last words", file=sys.stderr)
ours = [name for name in sys.modules if name.partition(".")[0] in ("harness", "fp8stack", "suites")]
told = {"folder": os.getcwd(), "argv": sys.argv[1:], "name": __name__, "path": sys.path[0], "stdin": sys.stdin.read()}
told["paths"] = [path for path in sys.path if path.endswith("harness")]
told |= {"leader": os.getsid(0) == os.getpid(), "preloaded": "sqlite3" in sys.modules, "ours": ours}
print(json.dumps({**told, "said": os.environ.get("SAID")}))
"""
    for word in ("first", "second"):  # the second from another nursery: its environment is another
        ended, log = run(executor, command(tmp_path, source, "-x", word, SAID=word, TRITON_CACHE_DIR=word))
        assert (ended.rc, log.endswith("last words\n")) == (0, True), log
        assert json.loads(log.splitlines()[-2]) == {
            "folder": str(tmp_path),
            "argv": ["-x", word],
            "name": "__main__",
            "path": str(tmp_path),
            "paths": [],
            "leader": True,
            "preloaded": True,
            "ours": [],
            "said": word,
            "stdin": "",
        }
    assert len(executor._nurseries) == 2


def test_a_runs_own_folders_need_no_nursery(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Cache folders differ from run to run, and nothing that is imported reads them."""
    for folder in ("a", "b"):
        given = command(tmp_path, "import os; print(os.environ['TRITON_CACHE_DIR'])", TRITON_CACHE_DIR=folder)
        assert run(executor, given)[1].endswith(f"{folder}\n")
    assert len(executor._nurseries) == 1


def test_deadline_and_cancellation(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Asked to stop, then stopped; and the next program runs as if nothing had been."""
    sleep = "import time; time.sleep(60)"
    ended, _ = run(executor, command(tmp_path, sleep, deadline=0.3))
    assert (ended.rc, ended.signal, ended.killed_by) == (None, "SIGTERM", "deadline")
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); {sleep}"
    ended, _ = run(executor, command(tmp_path, deaf, deadline=0.5))
    assert (ended.signal, ended.killed_by) == ("SIGKILL", "deadline")
    ended, _ = run(executor, command(tmp_path, sleep), cancel_after=0.3)
    assert (ended.signal, ended.killed_by) == ("SIGTERM", "interrupt")
    assert ended.seconds < 5
    assert run(executor, command(tmp_path, "pass"))[0].rc == 0


def test_nothing_is_left_running(executor: ForkedExecutor, tmp_path: Path) -> None:
    """A grandchild that ignores SIGTERM dies with the program, and with the executor everything does."""
    grandchild = """
import os, signal, time
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
print(child, flush=True)
"""
    _, log = run(executor, command(tmp_path, grandchild))
    assert dies(int(log))
    given = command(tmp_path, f"{grandchild}\ntime.sleep(60)")
    thread = threading.Thread(target=run, args=(executor, given), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        thread.start()
        while len(lines := given.log.read_text(encoding="ascii").splitlines()) < 2:
            time.sleep(0.02)
        executor.close()
        thread.join(5)
    assert dies(int(lines[1]))


def test_a_nursery_that_dies_is_named(executor: ForkedExecutor, tmp_path: Path) -> None:
    """The machine failed, not the test; the next program has a nursery of its own."""
    with pytest.raises(InfraError, match="the process that forks tests ended with -9"):
        run(executor, command(tmp_path, "import os; os.kill(os.getppid(), 9)"))
    assert run(executor, command(tmp_path, "pass"))[0].rc == 0


def test_a_nursery_that_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it died of is told; one that hangs is ended, by its deadline or with what waits for it."""
    (tmp_path / "broken.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    given = command(tmp_path, "pass", PYTHONPATH=str(tmp_path))
    with pytest.raises(InfraError, match=r"ended with 1: OSError: libcuda\.so\.1: cannot open"):
        run(ForkedExecutor(("broken",)), given)
    hangs, cancelled, begun = ForkedExecutor(("hangs",)), threading.Event(), time.monotonic()
    threading.Timer(0.2, cancelled.set).start()
    ended = hangs.run(given, cancelled=cancelled)
    assert (ended.rc, ended.signal, ended.killed_by) == (None, "SIGKILL", "interrupt")
    monkeypatch.setattr("harness.forked.START_DEADLINE", 0.2)
    with pytest.raises(InfraError, match="ended with -9"):
        hangs.run(given, cancelled=threading.Event())
    hangs.close()
    assert time.monotonic() - begun < 10


def test_what_cannot_be_forked(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Only `python -m` of this Python."""
    with pytest.raises(InfraError, match="/bin/true cannot be forked"):
        executor.run(Command(("/bin/true",), {}, tmp_path, 5.0, tmp_path / "x.log"), cancelled=threading.Event())
