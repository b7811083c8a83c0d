"""What the commands of fp8stack share: errors in one line, output that nobody reads, and Ctrl-C.

Errors of a command line are one line, like every other bad input, and not argparse's usage and error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code of a command that was stopped by Ctrl-C, as of a shell."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `failure`, with one line, for what it cannot parse. Takes no abbreviations."""

    def __init__(self, failure: type[ValueError], **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._failure = failure

    def error(self, message: str) -> NoReturn:
        """Called by argparse for anything it cannot parse."""
        raise self._failure(f"{message}; expected the options that --help lists; correct the command")


def show(text: str) -> bool:
    """Print data on stdout. False, after a line on stderr, where it cannot be written.

    A reader that has gone (`... | head`) or a closed stdout wanted no more of it, which is no error.
    """
    if sys.stdout is None:
        return True
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # In its place, since Python writes what the old one still holds when it exits.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if isinstance(error, BrokenPipeError):
            return True
        told = f"stdout cannot be written ({error.strerror}); expected room; free some, or write elsewhere"
        print(told, file=sys.stderr)
        return False
    return True


def run(name: str, main: Callable[[], int]) -> int:
    """Run a command; returns its exit code. Ctrl-C is one line and INTERRUPTED, not a traceback."""
    try:
        return main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
