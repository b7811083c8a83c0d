"""The journal: one JSON object a line, written at once, so that any death leaves what had happened until then.

pytest writes its JUnit file when the session ends; a killed session leaves none, and a harness that finds no file tends
to find no failure either. Here every event is one `write` to a file opened for appending, before the next test starts.
A line is at most cut, never interleaved, and only the last line of a writer can be cut: `Journal.read` says so in
`damage`.

Events (field `event`): the pytest plugin writes `session`, `collected`, `collect-error`, `collect-skip`, `start`,
`phase`, `worker-crash`, `session-end`; the harness writes `process-start` and `process-end` around each test process,
and `canary` after one that may have hung the GPU.
Under pytest-xdist only the controller writes; what a worker saw arrives there as reports.

Not here: how a journal is read (journal_reader.py), what an outcome means (gate.py).
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from harness.errors import DiskError

FILE_NAME = "journal.jsonl"

DISK_FULL_EXIT = 117
"""How the plugin ends a session whose journal met a full disk: the errno of our own write, told by an exit."""

#: pytest's exit codes that are no outcome of tests.
PYTEST_INTERRUPTED, PYTEST_INTERNAL, PYTEST_USAGE, PYTEST_NOTHING = 2, 3, 4, 5

Value = str | int | float

DETAIL_LIMIT = 32_768
"""Characters of a traceback or of captured output that are kept; the middle goes. The log holds all of it."""


# Four lines a test: msgspec takes a fifth of json's time for one. json writes what msgspec cannot put into ASCII.
_FAST = msgspec.json.Encoder().encode
_EXACT = json.JSONEncoder(allow_nan=False).encode


def _line(event: dict[str, Any]) -> bytes:
    """One event as a line of ASCII. TypeError where it has no JSON; a number that is not finite becomes null."""
    try:
        line = _FAST(event)
    except (TypeError, UnicodeEncodeError):  # a subclass of str, a lone surrogate
        line = b"\xff"
    return (line if line.isascii() else _EXACT(event).encode("ascii")) + b"\n"


def shorten(text: str, limit: int = DETAIL_LIMIT) -> str:
    """`text`, with its middle replaced by a note when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit // 4
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


class JournalWriter:
    """Appends events to a journal. Several processes may append to one file, each line whole."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # an earlier writer died in mid-line: keep its remains apart from our lines

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event. DiskError when the file system takes only part of it or none."""
        line = _line({"event": event, **fields})
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise DiskError(f"{self.path} cannot be appended to ({error})", "a writable disk", "free space") from error
        if written != len(line):
            raise DiskError(f"{self.path} took {written} of {len(line)} bytes", "a disk with room", "free space")

    def close(self) -> None:
        """Close the file; nothing is buffered, so nothing is lost without it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def disk_full(error: DiskError) -> bool:
    """Whether a write failed for want of room: by its errno, or because only part of the line was taken."""
    cause = error.__cause__
    return not isinstance(cause, OSError) or cause.errno in (errno.ENOSPC, errno.EDQUOT)


def plain_value(value: object) -> Value | None:
    """A property's value as exactly str, int or float; None when it is none of these.

    Subclasses become their base (a NumPy float64 is a float, and kills an xdist worker when it is reported as it is);
    a bool becomes 0 or 1; a float that is not finite becomes "nan", "inf" or "-inf", since JSON has no such number.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return None
