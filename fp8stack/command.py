"""Command lines whose errors are one line, like every other bad input, and not argparse's usage and error."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `failure`, with one line, for what it cannot parse. Takes no abbreviations."""

    def __init__(self, failure: type[ValueError], **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._failure = failure

    def error(self, message: str) -> NoReturn:
        """Called by argparse for anything it cannot parse."""
        raise self._failure(f"{message}; expected the options that --help lists; correct the command")
