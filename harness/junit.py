"""JUnit: the report that other people's tools read, written so that every one of them reads the same.

Readers disagree: the same file is red in one viewer and green in the next (a failure together with a skip, nested
suites, counts that only the attributes hold, a missing name). So the contract is narrow: one <testsuite> a (suite,
platform), classname `fp8.<suite>.<platform>`, name `<module>::<test>[<case>]` in ASCII and at most 150 characters,
unique; at most one result element a case, the final verdict; counts that equal the elements; at least one case a suite.
Product problems are `failure`, whatever makes the evidence untrustworthy is `error`; both have the verdict as type.

junitparser's xunit2 classes write the file, with one pass before and one after it that are ours: characters that XML
cannot hold are made visible first (its ElementTree back end writes an unreadable file without a word, its lxml one
raises), and update_statistics replaces a suite's wall time by the sum of its cases, so the wall time is set afterwards.
Then the file is read again and compared with what was meant.

Not here: verdicts (gate.py); reading and merging other people's files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import files
from harness.errors import DiskError, UnreadableError
from harness.result import Judgement, Result, suite_rank

NAME_LIMIT = 150
#: Characters of a message (an attribute) and of a text node. lxml refuses text nodes over 10 MB.
MESSAGE_LIMIT = 1_000
TEXT_LIMIT = 65_536

# What XML 1.0 cannot hold: controls but tab and line feed, surrogates, the two non-characters. Carriage return is legal
# and normalised away by every parser, so it is shown as well; C1 controls are legal and terminals obey them.
_UNHOLDABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Text that survives any XML round trip: each character that would not is shown as `#x1B`, as pytest shows it."""
    return _UNHOLDABLE.sub(lambda match: f"#x{ord(match.group()):02X}", text)


def clean_line(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """One line of clean text, cut at `limit` characters."""
    line = " ".join(clean(text.replace("\r\n", "\n")).split())
    return line if len(line) <= limit else line[: limit - 4] + " ..."


def case_name(test_id: str) -> str:
    """`<suite>/<module>::<test>[<case>]` -> its JUnit name: without the suite, ASCII, at most 150 characters.

    A name that is too long keeps its beginning and ends in eight digits of its hash, so that it stays unique.
    """
    name = test_id.partition("/")[2] or test_id
    name = clean(name).replace("\n", "#x0A").replace("\t", "#x09").encode("ascii", "backslashreplace").decode("ascii")
    if len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: NAME_LIMIT - 9]}~{digest}"


def class_name(suite: str, platform: str) -> str:
    return f"fp8.{suite}.{platform}"


def write(judgement: Judgement, run: Mapping[str, Any], path: Path) -> None:
    """Write `junit.xml` and read it back.

    Args:
        run: run.json as a dict: platform, arch, commit, versions, started, finished, attempts.

    Raises:
        DiskError: it cannot be written.
        UnreadableError: what was written does not say what was meant.
    """
    from junitparser import xunit2

    platform = str(run.get("platform", "unknown"))
    root = xunit2.JUnitXml(name=clean_line(f"fp8ci {platform}"))
    for suite in sorted({result.suite for result in judgement.results}, key=suite_rank):
        root.add_testsuite(_suite(suite, platform, judgement, run))
    root.update_statistics()  # type: ignore[no-untyped-call]
    walls = _wall_seconds(run)
    for element in root:
        suite = element.name.split(".")[1]
        if suite in walls:
            element.time = round(walls[suite], 3)
    root.time = round(sum(element.time or 0.0 for element in root), 3)
    save(root, path)
    check(path, judgement, platform)


def save(root: Any, path: Path) -> None:
    """Write a JUnitXml whole or not at all. Raises DiskError."""
    try:
        if path.exists() and not path.is_file():  # renaming would take the place of a device, or of a pipe
            raise DiskError(f"{path} {files.NO_FILE}", "a file to be written anew", "name another")
        partial = path.with_name(path.name + ".partial")
        root.write(str(partial), pretty=True)
        os.replace(partial, path)
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written ({error})", "a writable folder with room", "name another, or free space"
        ) from error


def _suite(suite: str, platform: str, judgement: Judgement, run: Mapping[str, Any]) -> Any:
    from junitparser import xunit2

    element = xunit2.TestSuite(class_name(suite, platform))  # type: ignore[no-untyped-call]
    if run.get("started"):
        element.timestamp = clean_line(str(run["started"]))
    for name, value in _suite_properties(run):
        element.add_property(name, value)
    used: set[str] = set()
    mine = [result for result in judgement.results if result.suite == suite]
    names = [unique(case_name(result.id), used) for result in mine]
    # All at once: junitparser's add_testcase counts the whole suite again for each case, which is quadratic.
    element.add_testcases(
        [case(result, name, class_name(suite, platform)) for result, name in zip(mine, names, strict=True)]
    )
    return element


def unique(name: str, used: set[str]) -> str:
    """Two ids that became one name (both cut, or both made visible) are told apart; nothing is dropped."""
    candidate, number = name, 1
    while candidate in used:
        number += 1
        candidate = f"{name[: NAME_LIMIT - 8]}~{number}"
    used.add(candidate)
    return candidate


def case(result: Result, name: str, classname: str) -> Any:
    """One testcase by the contract, as junitparser's xunit2 has it."""
    from junitparser import Error, Failure, Skipped, xunit2

    made = xunit2.TestCase(name, classname, round(result.seconds, 6))
    elements = {"skipped": Skipped, "failure": Failure, "error": Error}
    if result.junit in elements:
        outcome = elements[result.junit](clean_line(f"{result.verdict}: {result.message}"), str(result.verdict))
        text = clean(result.detail)
        if text:
            outcome.text = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "\n[cut; the journal has all of it]"
        made.result = [outcome]
    if result.attempts:  # as text: readers disagree on rerunFailure and flakyFailure
        told = "\n".join(f"attempt {number}: {ended}" for number, ended in enumerate(result.attempts, start=1))
        made.system_out = clean(told)
    made.add_property("verdict", str(result.verdict))
    for key, value in sorted(result.properties.items()):
        if key != "verdict":
            made.add_property(clean_line(key, NAME_LIMIT), clean_line(str(value)))
    return made


def _suite_properties(run: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key in ("platform", "arch", "run_id", "commit", "dirty", "policy", "case", "full", "image_digest", "partition"):
        if run.get(key) is not None:
            yield key, clean_line(str(run[key]))
    versions = run.get("versions")
    if isinstance(versions, Mapping):
        for key in sorted(versions):
            yield f"version.{clean_line(str(key), NAME_LIMIT)}", clean_line(str(versions[key]))


def _wall_seconds(run: Mapping[str, Any]) -> dict[str, float]:
    """Suite -> wall seconds of its processes, all attempts together."""
    walls: dict[str, float] = {}
    attempts = run.get("attempts")
    for attempt in attempts if isinstance(attempts, list) else []:
        if isinstance(attempt, Mapping) and isinstance(attempt.get("seconds"), int | float):
            suite = str(attempt.get("suite"))
            walls[suite] = walls.get(suite, 0.0) + float(attempt["seconds"])
    return walls


def _root(path: Path) -> ElementTree.Element:
    """The root of a report of ours. Raises UnreadableError for what is no XML."""
    try:
        with files.open_regular(path) as stream:
            return ElementTree.parse(stream).getroot()
    except (ElementTree.ParseError, OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read ({error})", "the report of this run", "run again") from None


def run_ids(path: Path) -> set[str]:
    """The runs that a report of ours names: one id, or none in a report that somebody else wrote.

    Raises:
        UnreadableError: it is no XML.
    """
    root = _root(path)
    return {
        str(item.get("value")) for item in root.findall("testsuite/properties/property") if item.get("name") == "run_id"
    }


def verdicts(path: Path) -> dict[tuple[str, str], str]:
    """(suite, name) -> the verdict that a report of ours says of each of its cases.

    Raises:
        UnreadableError: it is no XML.
    """
    root = _root(path)
    found: dict[tuple[str, str], str] = {}
    for case in root.iterfind("testsuite/testcase"):
        suite = str(case.get("classname")).split(".")[1:2]
        told = [item.get("value") for item in case.iterfind("properties/property") if item.get("name") == "verdict"]
        element = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), None)
        said = str(told[0]) if told else ""
        # A verdict that its element does not bear out counts as what the element says: that is what tools look at.
        if (said == "PASS") != (element is None) and said != "IMPROVED":
            said = {None: "PASS", "failure": "FAIL"}.get(element, str(element))
        found["".join(suite), str(case.get("name"))] = said
    return found


def numbered(name: str) -> bool:
    """Whether a name may be one that `unique` has given."""
    return re.search(r"~\d+$", name) is not None


def check(path: Path, judgement: Judgement, platform: str) -> None:
    """Read the file back as any consumer would: names unique, one result element each, counts equal elements."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise UnreadableError(f"{path} does not read back ({error})", "the report just written") from error
    problems: list[str] = []
    total = 0
    for suite in root:
        cases = suite.findall("testcase")
        total += len(cases)
        names = {(case.get("classname"), case.get("name")) for case in cases}
        if len(names) != len(cases):
            problems.append(f"{suite.get('name')} repeats a name")
        found = {"tests": len(cases), "failures": 0, "errors": 0, "skipped": 0}
        for case in cases:
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            if len(kinds) > 1:
                problems.append(f"{case.get('name')} has {len(kinds)} result elements")
            for kind in kinds:
                found[{"failure": "failures", "error": "errors"}.get(kind, kind)] += 1
        for attribute, count in found.items():
            if suite.get(attribute) != str(count):
                problems.append(f"{suite.get('name')} says {attribute}={suite.get(attribute)}, has {count}")
    red = sum(result.junit in ("failure", "error") for result in judgement.results)
    written = sum(len(root.findall(f"testsuite/testcase/{kind}")) for kind in ("failure", "error"))
    if total != len(judgement.results) or written != red:
        problems.append(f"{total} cases with {written} red, expected {len(judgement.results)} with {red}")
    if problems:
        raise UnreadableError(f"{path} for {platform} reads back differently: {problems[0]}", "what was judged")
