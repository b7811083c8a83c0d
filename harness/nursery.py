"""A process that has imported what is slow to import, and forks a test process for each order.

Started by forked.py, by its path: nothing of the checkout that it belongs to, nor of any other, is imported here, so
that the process it forks imports everything of the checkout that it is to test.

    nursery.py MODULE...       imports the modules, those that there are
    stdin   {"argv": ["pytest", ...], "environment": {...}, "folder": "...", "log": "..."}   run `python -m pytest ...`
            {"signal": 15}   for the process group that runs
    stdout  {"ready": true}   {"pid": 4711}   {"rc": 1, "signal": 0}

One line a message, one order at a time. A test process is the leader of a session of its own, and whatever it leaves
behind goes with it. When stdin ends, so does everything.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

POLL = 0.01


def main(modules: list[str]) -> None:
    """Serve orders until stdin ends."""
    for name in modules:
        with contextlib.suppress(ImportError):  # the tests will say that it is missing
            importlib.import_module(name)
    # What is here now stays for ever: the forks need not look through it for garbage.
    gc.collect()
    gc.freeze()
    messages = Messages()
    tell(ready=True)
    while (order := messages.wait()) is not None:
        pid = os.fork()
        if pid == 0:
            become(order)
        tell(pid=pid)
        attend(pid, messages)


def become(order: dict[str, Any]) -> NoReturn:
    """In the fork: be what `python -m MODULE` would be in that folder, with that environment, writing into that log."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path.insert(0, order["folder"])
    sys.argv = list(order["argv"])
    code: object = 1
    try:
        runpy.run_module(order["argv"][0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        # The end of a process, but for taking apart all that was imported: that takes a second.
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code) if isinstance(code, int) else 0 if code is None else 1)


def attend(pid: int, messages: Messages) -> None:
    """Wait for the end of a fork, hand on signals to its group, and say how it ended."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if not messages.ready(POLL):
            continue
        message = messages.wait()
        _kill(pid, signal.SIGKILL if message is None else message["signal"])
        if message is None:
            os._exit(1)
    _kill(pid, signal.SIGKILL)  # unreaped, its number is its own: the group can be nobody else's
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    tell(rc=max(code, 0), signal=max(-code, 0))


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has gone, or has no group yet
        os.killpg(pid, number)


def tell(**message: object) -> None:
    """One message to whoever gave the orders."""
    os.write(1, json.dumps(message).encode() + b"\n")


class Messages:
    """What comes in on stdin, line by line."""

    def __init__(self) -> None:
        self._buffer = b""

    def ready(self, seconds: float) -> bool:
        """Whether `wait` has something to give within so many seconds."""
        return b"\n" in self._buffer or bool(select.select([0], [], [], seconds)[0])

    def wait(self) -> dict[str, Any] | None:
        """The next message; None when there will be no more."""
        while b"\n" not in self._buffer:
            part = os.read(0, 65536)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


if __name__ == "__main__":
    main(sys.argv[1:])
