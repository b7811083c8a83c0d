"""Opening what somebody else has left: files with an end, inside of the folder that was given, and no more than needed.

A pipe without a writer is waited for forever, a device never ends, a link may lead to anybody's file, and a test that
prints in a loop leaves a log of gigabytes. So nothing of an evidence folder, and no path of a caller's, is opened
otherwise than here.

Not here: what a file means.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from harness.errors import UnreadableError

NO_FILE = "is no regular file"


def open_regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading, without ever waiting. OSError for anything else, as `open` raises it."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(opened, "rb")
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NO_FILE, str(path))


def read_bytes(path: Path) -> bytes:
    """All of a regular file."""
    with open_regular(path) as stream:
        return stream.read()


def read_text(path: Path) -> str:
    """All of a regular file, which is UTF-8."""
    return read_bytes(path).decode("utf-8")


def tail(path: Path, size: int) -> bytes:
    """The last bytes of a regular file, `size` at most."""
    with open_regular(path) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
        return stream.read(size)


def check_inside(folder: Path, names: Iterable[str]) -> None:
    """UnreadableError when one of these, or anything below it, is no regular file or leads out of the folder."""
    try:
        root = folder.resolve()
        for path in (found for name in names for found in _below(folder / name)):
            if not path.resolve().is_relative_to(root):
                what, wanted = f"{path} leads outside of the evidence folder", "what the run itself has written"
                raise UnreadableError(what, wanted, "copy the folder as it was")
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise UnreadableError(f"{path} {NO_FILE}", "what the run itself has written", "run again")
    except (OSError, RuntimeError) as error:  # a link to nowhere, a loop of links
        raise UnreadableError(f"{folder} cannot be read ({error})", "whole evidence", "run again") from None


def _below(path: Path) -> Iterator[Path]:
    """A path, where there is one, and everything below it. Links are named and not followed."""
    if os.path.lexists(path):
        yield path
    if path.is_dir() and not path.is_symlink():
        for parent, folders, names in os.walk(path):
            yield from (Path(parent) / name for name in (*folders, *names))
