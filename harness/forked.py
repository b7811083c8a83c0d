"""The forked executor: test processes that start in a moment, because torch is imported already when they do.

Importing torch and triton takes three seconds of a core. A suite pays them once; the self-test starts dozens of
processes for a second's work each. Here a command `python -m MODULE ...` runs as a fork of a nursery (nursery.py), a
process of the same environment that has imported `modules` and nothing of the checkout. Deadline, cancellation, log and
answer are those of local.py.

A thread has its own nurseries, one for each environment that it meets; `close` ends them all.

Not here: any way for a test to tell the difference. Runs that gate use local.py all the same.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InfraError
from harness.executor import Command, Ended, KilledBy, signal_name

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""

POLL = 0.02

START_DEADLINE = 300.0
"""Seconds that a nursery may take for its imports."""

# Folders that are a run's own. Everything else of an environment may have been read by what is imported.
OWN = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

_NURSERY = Path(__file__).with_name("nursery.py")


class ForkedExecutor:
    """Runs `python -m MODULE ...` in forks of processes that have imported `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self._nurseries: dict[tuple[int, frozenset[tuple[str, str]]], subprocess.Popen[bytes]] = {}

    def run(
        self,
        command: Command,
        *,
        cancelled: threading.Event,
        on_output: Callable[[str], None] | None = None,
    ) -> Ended:
        """As `Executor.run` says, without output on the way. InfraError for a command that is no `python -m`."""
        if command.argv[:2] != (sys.executable, "-m") or on_output is not None:
            raise InfraError(f"{command.argv[0]} cannot be forked", f"{sys.executable} -m MODULE", "run it locally")
        command.log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        nursery = self._nursery(command.environment, cancelled)
        if nursery is None:
            return Ended(None, "SIGKILL", "interrupt", time.monotonic() - begun, 0)
        order = {"argv": command.argv[2:], "environment": dict(command.environment)}
        started = time.monotonic()
        _send(nursery, {**order, "folder": str(command.folder), "log": str(command.log.absolute())})
        pid = int(_receive(nursery)["pid"])
        killed_by: KilledBy | None = None
        kill_at = float("inf")
        while not _has_said(nursery):
            now = time.monotonic()
            if killed_by is None and (cancelled.is_set() or now >= started + command.deadline):
                killed_by = "interrupt" if cancelled.is_set() else "deadline"
                _send(nursery, {"signal": int(signal.SIGTERM)})
                kill_at = now + GRACE
            elif now >= kill_at:
                _send(nursery, {"signal": int(signal.SIGKILL)})
                kill_at = float("inf")
        told = _receive(nursery)
        number = int(told["signal"])
        return Ended(
            rc=None if number else int(told["rc"]),
            signal=signal_name(number) if number else None,
            killed_by=killed_by,
            seconds=time.monotonic() - started,
            pid=pid,
        )

    def close(self) -> None:
        """End every nursery, and with it what still runs."""
        for nursery in self._nurseries.values():
            assert nursery.stdin is not None
            with contextlib.suppress(OSError):
                nursery.stdin.close()
        for nursery in self._nurseries.values():
            assert nursery.stdout is not None
            nursery.wait()
            nursery.stdout.close()
            if nursery.stderr is not None:
                nursery.stderr.close()
        self._nurseries.clear()

    def _nursery(self, environment: Mapping[str, str], cancelled: threading.Event) -> subprocess.Popen[bytes] | None:
        """This thread's nursery for an environment, started where there is none; None where it was cancelled before it
        had imported everything. InfraError for one that does not come so far.
        """
        shared = {name: value for name, value in environment.items() if name not in OWN}
        key = (threading.get_ident(), frozenset(shared.items()))
        nursery = self._nurseries.get(key)
        if nursery is None or nursery.poll() is not None:
            # -P: the script's own folder stays out of sys.path.
            argv = [sys.executable, "-P", str(_NURSERY), *self.modules]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - the nursery's own, for `_gone`; `close` closes it
            nursery = subprocess.Popen(argv, bufsize=0, env=shared, stderr=errors, start_new_session=True, **pipes)
            nursery.stderr = errors
            self._nurseries[key] = nursery
            until = time.monotonic() + START_DEADLINE
            while not _has_said(nursery):
                if cancelled.is_set() or time.monotonic() > until:
                    nursery.kill()
                    if cancelled.is_set():
                        return None
            _receive(nursery)
        return nursery


def _send(nursery: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
    assert nursery.stdin is not None
    try:
        nursery.stdin.write(json.dumps(message).encode() + b"\n")
        nursery.stdin.flush()
    except OSError as error:
        raise _gone(nursery) from error


def _has_said(nursery: subprocess.Popen[bytes]) -> bool:
    assert nursery.stdout is not None
    return bool(select.select([nursery.stdout], [], [], POLL)[0])


def _receive(nursery: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert nursery.stdout is not None
    line = nursery.stdout.readline()
    if not line:
        raise _gone(nursery)
    message: dict[str, Any] = json.loads(line)
    return message


def _gone(nursery: subprocess.Popen[bytes]) -> InfraError:
    ended = nursery.wait()
    said: list[str] = []
    if nursery.stderr is not None:
        nursery.stderr.seek(0)
        said = nursery.stderr.read().decode("utf-8", "replace").strip().splitlines()
    told = f"{ended}: {said[-1]}" if said else str(ended)
    return InfraError(f"the process that forks tests ended with {told}", "one that lives on", "run again")
