"""Test ids, and the manifest: the exact ids that must execute on a platform.

A suite whose file was deleted, renamed or never collected passes pytest quietly. The manifest is the list that it is
compared with: `baselines/<platform>/manifest.txt`, one id a line, sorted, written by `fp8ci baseline record
--manifest` and never typed. Lines that start with `#` are comments.

A test id is `<suite>/<module>::<test>[<case>]`, for instance
`numerics/test_rowwise::test_rowwise_bits[rowwise-e4m3fnuz-bf16-1823x781]`. It maps one to one to pytest's node id
`suites/numerics/test_rowwise.py::test_rowwise_bits[rowwise-e4m3fnuz-bf16-1823x781]` and is the key of the journal,
the manifest, the ledger and the verdicts. A test without parameters has its function's name without `test_` as case.

Not here: whether a missing id is red (gate.py).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from harness import files
from harness.errors import ConfigError

_ID = re.compile(r"(?P<suite>[a-z]+)/(?P<module>[\w/]+)::(?P<test>\w+)(?:\[(?P<case>.+)\])?", re.ASCII | re.DOTALL)


class TestId(NamedTuple):
    """The parts of a test id; `case` is never empty."""

    suite: str
    module: str
    test: str
    case: str

    @property
    def key(self) -> tuple[str, str, str]:
        """(module, test, case): how baselines name a row."""
        return (self.module, self.test, self.case)


def parse(test_id: str) -> TestId:
    """Split a test id; ConfigError when it is none."""
    match = _ID.fullmatch(test_id)
    if match is None:
        raise ConfigError(
            f"{test_id!r} is not a test id", "<suite>/<module>::<test>[<case>]", "take it from `fp8ci plan`"
        )
    return TestId(match["suite"], match["module"], match["test"], match["case"] or match["test"].removeprefix("test_"))


def is_test(test_id: str) -> bool:
    """Whether an id is a test's, and not that of a finding about a suite, a process or a module as a whole."""
    return test_id.partition("[")[0].rpartition("::")[2].startswith("test")


def from_node_id(node_id: str, suite: str) -> str:
    """pytest's node id -> test id. Folders above `suites/<suite>/` and the `.py` go, classes stay as they are."""
    path, separator, rest = node_id.partition("::")
    marker = f"suites/{suite}/"
    inside = path.rpartition(marker)[2] if marker in path else path.rpartition("/")[2]
    return f"{suite}/{inside.removesuffix('.py')}{separator}{rest}"


def to_node_id(test_id: str) -> str:
    """Test id -> pytest's node id relative to the checkout, to paste after `pytest`."""
    head, separator, rest = test_id.partition("::")
    return f"suites/{head}.py{separator}{rest}"


def case_matches(test_id: str, glob: str | None) -> bool:
    """Whether `--case GLOB,...` selects this test; no glob selects every test. Brackets in the case are plain text.

    A whole test id, as reports print it, selects that test.
    """
    if glob is None or glob == test_id:
        return True
    name, bracket, case = test_id.partition("::")[2].partition("[")
    case = case.removesuffix("]") if bracket else name.rpartition("::")[2].removeprefix("test_")
    return any(item == test_id or fnmatch.fnmatchcase(case, item) for item in glob.split(","))


def modules_of(glob: str | None, suite: str) -> frozenset[str]:
    """The modules of a suite in which `--case` can select anything; none where it may be all of them.

    That is known of whole test ids only. It saves the import of every other module.
    """
    found = [_ID.fullmatch(item) for item in (glob or "").split(",")]
    return (
        frozenset(match["module"] for match in found if match and match["suite"] == suite)
        if all(found)
        else frozenset()
    )


def read(path: Path) -> tuple[str, ...]:
    """The ids of a manifest, in its order.

    ConfigError for a missing file, a line that is no id, a duplicate, or ids out of order: the file is written by a
    command, so any of these means that somebody edited it.
    """
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist",
            "the list of test ids that must run",
            "write it: `fp8ci baseline record --manifest`",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "a UTF-8 text file", "restore it from git") from error
    ids: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if _ID.fullmatch(line) is None:
            raise ConfigError(
                f"{path}:{number}: {line!r} is not a test id", "<suite>/<module>::<test>[<case>]", _REWRITE
            )
        if ids and line <= ids[-1]:
            kind = "a duplicate" if line == ids[-1] else "out of order"
            raise ConfigError(f"{path}:{number}: {line!r} is {kind}", "unique ids in sorted order", _REWRITE)
        ids.append(line)
    return tuple(ids)


def write(path: Path, ids: Iterable[str]) -> None:
    """Write a manifest: unique, sorted, one id a line, replaced at once. ConfigError for anything that is no id."""
    unique = sorted(set(ids))
    for test_id in unique:
        parse(test_id)
        if "\n" in test_id or not test_id.isascii():
            raise ConfigError(f"{test_id!r} is not a test id", "one line of ASCII", "give the case an explicit id")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(_HEADER + "".join(f"{test_id}\n" for test_id in unique), encoding="utf-8")
    partial.replace(path)


_REWRITE = "write it by `fp8ci baseline record --manifest`"
_HEADER = "# Test ids that must execute here. Written by `fp8ci baseline record --manifest`; do not edit.\n"
