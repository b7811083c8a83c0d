"""Other people's JUnit: bytes -> cases, and every oddity of the file in words.

The same file is red in one viewer and green in the next, so nothing here is passed over. What can be understood in one
way only is repaired, and said (`repairs`): a namespace, a control character, a time with a comma, nested suites. What
contradicts itself is a finding (`lies`): counts in attributes that no element bears out, a result in an element that
nobody knows, a suite that says it did not end. What cannot be understood is
rejected (`rejected`): an empty or cut file, HTML, entities; the cases that were whole before the cut are kept.

The pass over the text comes first, since no parser takes what it repairs: encodings, characters that XML cannot hold,
references to them. Then ElementTree's parser feeds a builder of ours. junitparser is not used to read: it recomputes
counters, changes the tree when an absent attribute is asked for, and drops what it has no class for.

Entities are refused before parsing; external ones are never fetched.

Not here: verdicts (combine.py), writing (junit.py, junit_merge.py).
"""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from harness import files
from harness.junit import TEXT_LIMIT

FILE_LIMIT = 100_000_000
"""Bytes of a file that is read at all; GitLab takes 30 MB, and 100 MB a job."""

DEPTH_LIMIT = 64
"""How deep testsuites may be nested: what is deeper is nobody's report, and costs time with the square of it."""

READ_LIMIT = TEXT_LIMIT + 1024
"""Characters of one text that are kept: what is written by us, with its note that it was cut, is kept whole."""

RED = ("failure", "error")
#: Surefire's elements for attempts that were repeated.
REPEATED = ("flakyFailure", "flakyError", "rerunFailure", "rerunError")
#: That a suite or a case did not come to its end: the value of a status attribute, or an attribute of its own.
UNFINISHED = frozenset(
    {"aborted", "cancelled", "canceled", "crashed", "incomplete", "interrupted", "killed", "timedout"}
)
#: What an attribute of RESULTS says where a dialect has no element for it.
BAD_STATUS = UNFINISHED | {
    *("failed", "failure", "error", "errored", "broken", "fail", "false", "not ok", "ko"),
    *("timeout", "timed out", "abort", "crash"),
}
RESULTS = ("status", "result", "outcome", "success")
#: What an attribute of UNFINISHED says where it is not so; anything else is taken for a yes.
NO = frozenset({"", "0", "false", "no", "n", "f", "off", "none", "null"})
IDLE_STATUS = frozenset({"skipped", "notrun", "disabled", "ignored", "pending", "suppressed"})
OWN_NAMES = (
    *("testsuites", "testsuite", "testcase", "properties", "property", "skipped", "system-out", "system-err"),
    *RED,
    *REPEATED,
)
#: Elements of a case that are nobody's contract and cannot mean a pass.
OTHER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("failed", "fail", "failures", "aborted", "timeout", "crashed", "crash"), "failure"),
    **dict.fromkeys(("errored", "errors", "exception"), "error"),
}
#: Elements whose content is text of a test: markup in it is nobody's result.
TEXTS = frozenset({"properties", "skipped", "system-out", "system-err", *RED, *REPEATED})

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
_UNHOLDABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_REFERENCE = re.compile(r"&#(?:x([0-9a-fA-F]{1,8})|([0-9]{1,8}));")
#: What may stand before a DOCTYPE.
_PROLOG = re.compile(r"(?:[\s\ufeff]|<\?.*?\?>|<!--.*?-->)*", re.DOTALL)
_HTML = re.compile(r"\s*(<!doctype\s+html|<html)\b", re.IGNORECASE)


@dataclass
class Element:
    """A failure, an error, a skip, or one of Surefire's."""

    kind: str
    type: str = ""
    message: str = ""
    text: str = ""


@dataclass
class Case:
    """One testcase. `seconds` is None where the file says nothing usable."""

    name: str
    classname: str
    seconds: float | None
    status: str = ""
    elements: list[Element] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    output: str = ""

    def has(self, *kinds: str) -> bool:
        """Whether one of its elements is of these kinds."""
        return any(element.kind in kinds for element in self.elements)


@dataclass
class Suite:
    """One testsuite, flat: the suites inside of it stand beside it. `errors` are its own, outside of any case."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    errors: list[Element] = field(default_factory=list)
    output: str = ""

    @property
    def platform(self) -> str:
        """The platform of a suite of ours; empty in anybody else's."""
        return self.properties.get("platform", "")

    @property
    def seconds(self) -> float | None:
        """Wall time, where the file says it."""
        return read_time(self.attributes.get("time"))[0]


@dataclass
class Report:
    """A file. Where `rejected` is not empty, `suites` holds what was whole before that."""

    path: Path
    suites: list[Suite] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    rejected: str = ""

    @property
    def cases(self) -> Iterator[tuple[Suite, Case]]:
        """Every case with its suite, in the file's order."""
        return ((suite, case) for suite in self.suites for case in suite.cases)

    @property
    def platforms(self) -> frozenset[str]:
        """The platforms that a report of ours names; none in anybody else's."""
        return frozenset(suite.platform for suite in self.suites if suite.platform)


def read(path: Path) -> Report:
    """Read a file, whatever is in it. Nothing is raised for its content, nor for its absence: both are said."""
    report = Report(path)
    try:
        size = path.stat().st_size
        if size > FILE_LIMIT:
            report.rejected = f"{size} bytes are more than the {FILE_LIMIT} that are read"
            return report
        raw = files.read_bytes(path)
    except OSError as error:
        report.rejected = f"cannot be read ({error.strerror})"
        return report
    text = _clean(raw, report)
    if report.rejected:
        return report
    builder = _Builder(report)
    parser = ElementTree.XMLParser(target=builder)
    try:
        parser.feed(text)
        parser.close()
    except (ElementTree.ParseError, _TooDeep) as error:
        kept = sum(len(suite.cases) for suite in builder.suites)
        what = str(error) if isinstance(error, _TooDeep) else f"is no XML, or is cut ({error})"
        report.rejected = f"{what}; {kept} whole cases before that"
    report.suites = [suite for suite in builder.suites if suite.cases or suite.errors or suite.name]
    if not report.rejected and builder.root not in ("testsuites", "testsuite"):
        report.rejected = f"is no JUnit: its root is <{builder.root}>"
    if not report.rejected:
        _counts(builder, report)
    report.repairs += [f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in builder.repairs.items()]
    return report


def _clean(raw: bytes, report: Report) -> str:
    """The text of a file, made such that a parser takes it; what was done is in `repairs`, or `rejected` is set."""
    if not raw.strip(b" \t\r\n\0"):
        report.rejected = "is empty" if not raw else f"holds {len(raw)} bytes and no text"
        return ""
    text = _decode(raw, report)
    if _HTML.match(text):
        report.rejected = "is HTML: the answer of a server, not a report"
        return ""
    prolog = _PROLOG.match(text)
    head = text[prolog.end() if prolog else 0 :]
    if head.startswith("<!DOCTYPE") and ("<!ENTITY" in head or re.match(r"[^>]*\b(SYSTEM|PUBLIC)\b", head)):
        report.rejected = "declares entities or an external DTD; neither is read"
        return ""
    start = len(text) - len(text.lstrip(" \t\r\n\ufeff"))
    if text[:start].strip("\ufeff"):
        report.repairs.append("white space before the XML declaration")
    text = text[start:]
    count = len(_UNHOLDABLE.findall(text))
    if count:
        report.repairs.append(f"{count} characters that XML cannot hold are shown as #xNN")
        text = _UNHOLDABLE.sub(lambda match: f"#x{ord(match.group()):02X}", text)
    bad: list[str] = []

    def shown(match: re.Match[str]) -> str:
        number = int(match[1], 16) if match[1] else int(match[2])
        if number <= 0x10FFFF and not _UNHOLDABLE.match(chr(number)):
            return match.group()
        bad.append(match.group())
        return f"#x{number:02X}"

    text = _REFERENCE.sub(shown, text)
    if bad:
        report.repairs.append(f"{len(bad)} references to characters that XML cannot hold, such as {bad[0]}")
    return text


def _decode(raw: bytes, report: Report) -> str:
    declared = _DECLARED.match(raw)
    name = declared[1].decode("ascii") if declared else "utf-8"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = "utf-16"
    try:
        codecs.lookup(name)
    except LookupError:
        report.repairs.append(f"the declared encoding {name!r} does not exist; read as UTF-8")
        name = "utf-8"
    if codecs.lookup(name).name != "utf-8":
        report.repairs.append(f"encoded as {name}")
    try:
        return _decoded(raw, name, report)
    except (LookupError, UnicodeError):  # `hex` or `undefined`: Python has such a codec, and it makes no text
        report.repairs.append(f"the declared encoding {name!r} is none of text; read as UTF-8")
        return _decoded(raw, "utf-8", report)


def _decoded(raw: bytes, name: str, report: Report) -> str:
    try:
        return raw.decode(name)
    except UnicodeDecodeError:
        pass
    try:
        text = raw.decode(name, "surrogatepass")  # halves of characters, which _clean shows
    except UnicodeDecodeError as error:
        report.repairs.append(f"byte {error.start} is not {name}; what is not is shown as U+FFFD")
        text = raw.decode(name, "replace")
    return text


class _TooDeep(Exception):
    """Testsuites are nested deeper than is read."""


class _Builder:
    """What ElementTree's parser calls. Cases enter their suite when they end, so that a cut file keeps whole ones."""

    def __init__(self, report: Report) -> None:
        self.suites: list[Suite] = []
        self.root = ""
        self.root_attributes: Mapping[str, str] = {}
        self.repairs: Counter[str] = Counter()
        self.inside: dict[int, list[Suite]] = {}
        self.strangers: dict[str, list[str]] = {}
        """Element that is nobody's -> the results that it carries, as written."""
        self._label = report.path.name
        self._tags: list[str] = []
        self._texts = 0
        self._open: list[Suite] = []
        self._loose: Suite | None = None
        self._case: Case | None = None
        self._elements: list[Element] = []
        self._property = ""
        self._text: list[str] = []
        self._length = 0
        self._unnamed = 0

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        """A DOCTYPE that declares nothing."""
        self.repairs["a DOCTYPE is ignored"] += 1

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """An element opens."""
        name = _name(tag)
        if "}" in tag:
            self.repairs["namespaces are ignored"] += 1
        if name != tag.rpartition("}")[2]:
            self.repairs["elements in capitals are read as their small twins"] += 1
        if self._tags[-1:] == ["testcase"] and name in OTHER_WORDS:
            self.repairs[f"<{name}> in a case is read as <{OTHER_WORDS[name]}>"] += 1
            name = OTHER_WORDS[name]
        attributes = {key.rpartition("}")[2]: value for key, value in attributes.items()}
        if not self._tags:
            self.root, self.root_attributes = name, attributes if name == "testsuites" else {}
        self._tags.append(name)
        self._text, self._length = [], 0
        if name == "testsuite":
            self._start_suite(attributes)
        elif name == "testcase":
            self._start_case(attributes)
        elif name == "property":
            self._property = attributes.get("name", "")
            if self._property:
                self._properties()[self._property] = attributes.get("value", "")
        elif name in (*RED, "skipped", *REPEATED):
            self._elements.append(Element(name, attributes.get("type", ""), attributes.get("message", "")))
        elif name not in OWN_NAMES and not self._texts:
            told = [f"{key.lower()}={value[:40]!r}" for key, value in attributes.items() if key.lower() in RESULTS]
            if told:
                self.strangers.setdefault(name, []).append(told[0])
        self._texts += name in TEXTS

    def data(self, text: str) -> None:
        """Text; what is beyond the limit goes, and is said when its element ends."""
        if self._length <= READ_LIMIT:
            self._text.append(text)
        self._length += len(text)

    def end(self, tag: str) -> None:
        """An element closes."""
        name = self._tags.pop()
        self._texts -= name in TEXTS
        text = "".join(self._text)
        if self._length > READ_LIMIT:
            self.repairs["long output is cut"] += 1
            text = f"{text[:TEXT_LIMIT]}\n[cut: {self._length} characters]"
        self._text, self._length = [], 0
        if name == "testsuite" and self._open:
            self._open.pop()
        elif name == "testcase" and self._case is not None:
            self._end_case(self._case)
            self._case = None
        elif name == "property":
            properties = self._properties()
            if self._property and not properties[self._property]:
                properties[self._property] = text.strip()  # testmo's dialect: the value is the element's text
        elif name in (*RED, "skipped", *REPEATED):
            self._end_element(self._elements.pop(), text)
        elif name in ("system-out", "system-err") and text.strip():
            target = self._case or self._suite()
            target.output = f"{target.output}{text}"[:READ_LIMIT]

    def close(self) -> None:
        """The document has ended."""

    def _suite(self) -> Suite:
        """The innermost open suite; one made for it where cases stand outside of any."""
        if self._open:
            return self._open[-1]
        if self._loose is None:
            self.repairs["cases or errors outside of any testsuite"] += 1
            self._loose = Suite(self._label)
            self.suites.append(self._loose)
            self.inside[id(self._loose)] = [self._loose]
        return self._loose

    def _properties(self) -> dict[str, str]:
        if self._case is not None:
            return self._case.properties
        return self._suite().properties if self._open else {self._property: ""}

    def _start_suite(self, attributes: dict[str, str]) -> None:
        if len(self._open) == DEPTH_LIMIT:
            raise _TooDeep(f"testsuites are nested more than {DEPTH_LIMIT} deep")
        if self._open:
            self.repairs["nested suites are laid side by side"] += 1
        name = attributes.get("name", "").strip()
        if not name:
            self.repairs["a suite without a name has the file's"] += 1
        suite = Suite(name or self._label, attributes)
        if "time" in attributes and suite.seconds is None:
            self.repairs[f"suite time {attributes['time'][:40]!r} is no time"] += 1
        self.suites.append(suite)
        self._open.append(suite)
        self.inside[id(suite)] = [suite]
        for outer in self._open[:-1]:
            self.inside[id(outer)].append(suite)

    def _start_case(self, attributes: Mapping[str, str]) -> None:
        if self._case is not None:  # a case in a case: the outer one ends here
            self.repairs["a testcase inside of a testcase"] += 1
            self._end_case(self._case)
        written = attributes.get("time")
        seconds, note = read_time(written)
        if written is None:
            self.repairs["a case without a time"] += 1
        elif note:
            self.repairs[f"time {written[:40]!r} {note}"] += 1
        name = attributes.get("name", "").strip()
        said = [attributes.get(key, "").strip().lower() for key in RESULTS]
        if said.pop() == "false":
            said.insert(0, "failed")
        said += [name for name, _ in _unfinished(attributes)]
        # googletest says status="run" of whatever ran: the worse of the two counts.
        telling = [word for words in (BAD_STATUS, IDLE_STATUS) for word in said if word in words]
        status = next((word for word in (*telling, *said) if word), "")
        self._case = Case(name, attributes.get("classname", "").strip(), seconds, status)

    def _end_case(self, case: Case) -> None:
        if not case.name:
            self._unnamed += 1
            case.name, case.status = f"unnamed-{self._unnamed}", case.status or "unnamed"
        reds = sum(element.kind in RED for element in case.elements)
        if reds and case.has("skipped"):
            self.repairs["a case both failed and skipped counts as failed"] += 1
        if reds > 1:
            self.repairs["a case with several failures is one case"] += 1
        self._suite().cases.append(case)

    def _end_element(self, element: Element, text: str) -> None:
        element.text = text.strip()
        if self._case is not None:
            self._case.elements.append(element)
        elif element.kind in RED:
            self._suite().errors.append(element)


def _unfinished(attributes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name of UNFINISHED, attribute as written) of what says that its suite or case did not come to its end."""
    for key, value in attributes.items():
        name = key.replace("-", "").replace("_", "").lower()
        if name in UNFINISHED and value.strip().lower() not in NO:
            yield name, f"{key}={value[:20]!r}"


def _name(tag: str) -> str:
    """An element's name without its namespace; one that differs from ours in its capitals only is ours."""
    name = tag.rpartition("}")[2]
    return name if name in OWN_NAMES else next((own for own in OWN_NAMES if own.lower() == name.lower()), name.lower())


def read_time(text: str | None) -> tuple[float | None, str]:
    """A time attribute -> (seconds, what was odd about it). NaN, infinite and negative times are no times.

    Where a comma and a point both stand, the last one is the decimal mark; a lone comma before exactly three digits
    groups thousands, any other is a decimal mark.
    """
    if text is None:
        return None, ""
    plain = text.strip()
    note = ""
    if "," in plain:
        note = "is read with its comma"
        if "." in plain and plain.rfind(",") > plain.rfind("."):
            plain = plain.replace(".", "").replace(",", ".")
        elif "." in plain or re.fullmatch(r"\d{1,3}(,\d{3})+", plain):
            plain = plain.replace(",", "")
        else:
            plain = plain.replace(",", ".")
    try:
        seconds = float(plain)
    except ValueError:
        return None, "is no time"
    if not math.isfinite(seconds) or seconds < 0:
        return None, "is no time"
    return seconds, note


#: Attribute -> the elements that it counts.
COUNTED: Mapping[str, tuple[str, ...]] = {
    "tests": (),
    "failures": ("failure",),
    "errors": ("error",),
    "skipped": ("skipped",),
}


def _counts(builder: _Builder, report: Report) -> None:
    """Counts that the attributes claim against what there is. More cases or reds than elements is a lie.

    An outer suite may count its own cases or all below it. Fewer than there are is said and no more: the elements
    stand, and are judged. A suite that says it did not end, or failed without a failure in it, contradicts the cases
    that passed; so does a result in an element that is not counted.
    """
    for name, carried in builder.strangers.items():
        times = f" ({len(carried)} times)" if len(carried) > 1 else ""
        report.lies.append(f"<{name[:40]}> is no element of JUnit, and carries {carried[0]}{times}")
    scopes = [(suite.name, suite.attributes, [suite], builder.inside[id(suite)]) for suite in builder.suites]
    if builder.root == "testsuites":
        scopes.append(("testsuites", dict(builder.root_attributes), builder.suites, builder.suites))
    for name, attributes, alone, inside in scopes:
        for _, told in _unfinished(attributes):
            report.lies.append(f"{name} says {told}, and what is in it may not be all")
        results = [(key, value) for key, value in attributes.items() if key.lower() in RESULTS]
        bad = [f"{key}={value[:20]!r}" for key, value in results if value.strip().lower() in BAD_STATUS]
        if bad and not any(_failed(suite) for suite in inside):
            report.lies.append(f"{name} says {bad[0]} and holds nothing that failed")
        for attribute, kinds in COUNTED.items():
            if attribute not in attributes:
                continue
            try:
                claimed = int(attributes[attribute].replace(",", ""))
            except ValueError:
                report.lies.append(f"{name} says {attribute}={attributes[attribute][:20]!r}, which is no number")
                continue
            own, whole = _count(alone, kinds), _count(inside, kinds)
            if claimed in (own, whole):
                continue
            told = f"{name} says {attribute}={claimed} and holds {whole}"
            if claimed > whole and attribute != "skipped":
                report.lies.append(told)
            else:
                report.repairs.append(told)


def _failed(suite: Suite) -> bool:
    """Whether anything in it is red."""
    return bool(suite.errors) or any(case.has(*RED) or case.status in BAD_STATUS for case in suite.cases)


def _count(suites: list[Suite], kinds: tuple[str, ...]) -> int:
    """Cases, or elements of some kinds; a suite's own errors count as errors."""
    if not kinds:
        return sum(len(suite.cases) for suite in suites)
    return sum(
        sum(element.kind in kinds for case in suite.cases for element in case.elements)
        + sum(element.kind in kinds for element in suite.errors)
        for suite in suites
    )
