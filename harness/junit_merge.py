"""`fp8ci merge`: JUnit files of anybody's -> one that every reader reads the same, by the contract of junit.py.

A file that cannot be read becomes an error case in a suite of its own, and the others still merge; so does whatever
else is wrong with a file as a whole. Suites keep their name, host, timestamp, wall time and properties (junitparser's
`+` loses them); cases keep their class, time and properties, and get exactly one result element. Cases of one name
become one, with the worst outcome. Merging the result again gives the same file.

Not here: what a case means (combine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import combine, junit, junit_reader
from harness.combine import Found
from harness.errors import UnreadableError
from harness.junit_reader import Report, Suite
from harness.result import Judgement, Result


def merge(paths: Sequence[Path], target: Path) -> tuple[Judgement, tuple[str, ...]]:
    """Merge files into one; returns the verdicts on all of them, and what was repaired, a line each.

    Raises:
        DiskError: the target cannot be written.
        UnreadableError: it does not read back as it was meant.
    """
    from junitparser import xunit2

    root = xunit2.JUnitXml(name="fp8ci merge")
    names: set[str] = set()
    walls: list[float | None] = []
    results: list[Result] = []
    repairs: list[str] = []
    for path in paths:
        report = junit_reader.read(path)
        found, notes = combine.findings(report, path.name)
        repairs += [f"{path.name}: {note}" for note in notes]
        results += [result for result, _, _ in found]
        for suite, mine in _grouped(report, found):
            name = junit.case_name(f"/{suite.name if suite is not None else path.name}")
            root.add_testsuite(_suite(junit.unique(name, names), suite, mine))
            walls.append(suite.seconds if suite is not None else None)
    root.update_statistics()  # type: ignore[no-untyped-call]
    for element, wall in zip(root, walls, strict=True):
        if wall is not None:
            element.time = round(wall, 6)
    root.time = round(sum(element.time or 0.0 for element in root), 6)
    junit.save(root, target)
    whole = combine.judgement_of(results, tuple(repairs))
    _check(target, whole)
    return whole, tuple(repairs)


def _grouped(report: Report, found: Sequence[Found]) -> list[tuple[Suite | None, list[Found]]]:
    """The results by suite in the file's order; what is about the file itself comes last."""
    groups: dict[int, tuple[Suite | None, list[Found]]] = {id(one): (one, []) for one in (*report.suites, None)}
    for entry in found:
        groups[id(entry[1])][1].append(entry)
    return [group for group in groups.values() if group[1]]


def _suite(name: str, suite: Suite | None, found: Sequence[Found]) -> Any:
    from junitparser import xunit2

    element = xunit2.TestSuite(name)  # type: ignore[no-untyped-call]
    if suite is not None:
        for attribute in ("hostname", "timestamp"):
            if suite.attributes.get(attribute):
                setattr(element, attribute, junit.clean_line(suite.attributes[attribute]))
        for key, value in suite.properties.items():
            element.add_property(junit.clean_line(key, junit.NAME_LIMIT), junit.clean_line(value))
        if suite.output:
            element.system_out = junit.clean(suite.output)
    used: dict[str, set[str]] = {}
    cases = []
    for result, _, case in found:
        classname = junit.case_name(f"/{(case.classname if case else '') or name}")
        written = case.name if case else result.id.rpartition("::")[2]
        unique = junit.unique(junit.case_name(f"/{written}"), used.setdefault(classname, set()))
        made = junit.case(result, unique, classname)
        if case is not None and case.output:
            made.system_out = junit.clean(case.output)
        cases.append(made)
    element.add_testcases(cases)
    return element


def _check(path: Path, judgement: Judgement) -> None:
    """Read the file back: the same verdicts, and nothing left to repair or to doubt."""
    report = junit_reader.read(path)
    found = combine.of_report(report, path.name)
    verdicts = [Counter(str(result.verdict) for result in one.results) for one in (found, judgement)]
    told = [report.rejected] if report.rejected else [*report.lies, *report.repairs]
    if told or verdicts[0] != verdicts[1]:
        what = told[0] if told else f"{dict(verdicts[0])} in place of {dict(verdicts[1])}"
        raise UnreadableError(f"{path} reads back differently: {what}", "what was merged", "report it")
