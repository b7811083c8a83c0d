"""report.html: one page that needs nothing else, on which nothing that a test printed is more than text."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness import cli, manifest
from harness.errors import Verdict
from harness.report import page, summary
from harness.result import Judgement, Result
from suites.unit.built_evidence import LOSS_TEST, NUMERICS_TEST, good

HOSTILE = "<script>alert(1)</script> ![x](https://example.org/x.png) [y](javascript:z) *a_b* \"'> \x00\x1b[31m \ud800 é"
SHOWN = HOSTILE.replace("\x00\x1b", "#x00#x1B").replace("\ud800", "#xD800")


class Page(HTMLParser):
    """What a browser makes of a page: its elements, and the text that each of some kinds holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing that is open"

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def rendered(judgement: Judgement, pictures: tuple[tuple[str, bytes], ...] = (), links: tuple[str, ...] = ()) -> Page:
    text = page.render(judgement, summary.render(judgement, {"platform": "cpu"}), pictures, links)
    text.encode("utf-8")
    read = Page(text)
    assert not read.open, f"{read.open} are never closed"
    return read


def judged(*results: Result) -> Judgement:
    counts: dict[str, int] = {}
    for result in results:
        counts[str(result.verdict)] = counts.get(str(result.verdict), 0) + 1
    return Judgement(results, max((r.exit_code for r in results), default=0), counts)


def test_what_a_test_says_is_text() -> None:
    """No element, picture or address comes out of a message, an output, a test's name or a file's."""
    plain = rendered(judged(Result("numerics/a::b[c]", "numerics", Verdict.FAIL, "x", "y")), (("c.svg", b"<svg/>"),))
    result = Result(f"numerics/a::b[{HOSTILE}]", "numerics", Verdict.FAIL, HOSTILE, HOSTILE)
    hostile = rendered(judged(result), ((f"{HOSTILE}.svg", b"<svg/>"),))
    assert [name for name, _ in hostile.elements if name != "br"] == [
        name for name, _ in plain.elements if name != "br"
    ]
    assert hostile.texts["pre"] == [SHOWN]
    assert SHOWN in hostile.texts["h1"][0]
    for tag, attributes in hostile.elements:
        for name, value in attributes.items():
            assert name != "src" or (value or "").startswith("data:image/svg+xml;base64,"), (tag, value)
            assert not name.startswith("on")
            assert name != "href"


def test_nothing_is_fetched() -> None:
    """A browser is told so, and charts are in the file itself."""
    picture = "<svg xmlns='http://www.w3.org/2000/svg'><text>é</text></svg>".encode()
    read = rendered(judged(Result("loss/a::b", "loss", Verdict.PASS)), (("charts/a.svg", picture),), ("junit.xml",))
    [policy] = [one["content"] for one in read.of("meta") if "http-equiv" in one]
    assert policy is not None
    assert "default-src 'none'" in policy
    [image] = read.of("img")
    assert base64.b64decode(str(image["src"]).partition(",")[2]) == picture
    assert image["alt"] == "charts/a.svg"
    assert [one["href"] for one in read.of("a")] == ["junit.xml"]
    assert not read.of("link")


def test_red_tests_show_what_they_said() -> None:
    """Worst first, the first one open; a test without output shows its message; beyond a limit it says how many."""
    many = [
        Result(f"numerics/a::b[{n:03}]", "numerics", Verdict.FAIL, f"message {n}") for n in range(page.RED_SHOWN + 3)
    ]
    crash = Result("loss/a::b", "loss", Verdict.MISSING, "never ran", "line 1\nline 2")
    read = rendered(judged(*many, crash))
    shown = read.of("details")
    assert len(shown) == page.RED_SHOWN
    assert ["open" in one for one in shown] == [True] + [False] * (page.RED_SHOWN - 1)
    assert read.texts["pre"][:2] == ["line 1\nline 2", "message 0"]
    assert "... and 4 more, in the list below and in junit.xml" in read.texts["p"]


def test_every_check_is_listed() -> None:
    """Suites in their order, worst first in each, with verdict, id, seconds and message; how many there are."""
    read = rendered(
        judged(
            Result("loss/a::b", "loss", Verdict.PASS, seconds=1.234),
            Result("numerics/a::b", "numerics", Verdict.PASS),
            Result("numerics/a::c", "numerics", Verdict.SKIP, "requires 1 gpu"),
            Result("numerics/a::d", "numerics", Verdict.FAIL, "no"),
        )
    )
    cells = read.texts["td"][-16:]
    assert [cells[n] for n in range(1, 16, 4)] == ["numerics/a::d", "numerics/a::c", "numerics/a::b", "loss/a::b"]
    assert cells[:4] == ["FAIL", "numerics/a::d", "0.00", "no"]
    assert cells[12:] == ["PASS", "loss/a::b", "1.23", ""]
    assert "4 of 4" in read.texts["span"]


@pytest.mark.parametrize(
    ("verdicts", "colour"),
    [
        ((Verdict.PASS, Verdict.SKIP), "green"),
        ((Verdict.SKIP, Verdict.UNCALIBRATED), "grey"),
        ((Verdict.PASS, Verdict.FAIL), "red"),
        ((), "grey"),
    ],
    ids=["passed", "nothing-judged", "failed", "no-checks"],
)
def test_only_a_pass_is_green(verdicts: tuple[Verdict, ...], colour: str) -> None:
    results = [Result(f"numerics/a::{number}", "numerics", verdict) for number, verdict in enumerate(verdicts)]
    [heading] = rendered(judged(*results)).of("h1")
    assert heading["class"] == colour


def test_a_run_writes_it(tmp_path: Path) -> None:
    """Beside junit.xml and summary.md, with the chart of its curve and links to what lies there."""
    folder = good(tmp_path).test(NUMERICS_TEST, "failed", "3 of 9 differ").file("logs/numerics.log", "x").write()
    judgement, text = cli._report(folder)
    read = Page((folder / page.FILE_NAME).read_text(encoding="utf-8"))
    assert read.texts["h1"] == [text.splitlines()[0]]
    case = manifest.parse(LOSS_TEST).case
    assert [one["alt"] for one in read.of("img")] == [f"charts/{case}.svg"]
    links = [str(one["href"]) for one in read.of("a")]
    assert {"junit.xml", "summary.md", "logs/numerics.log"} <= set(links)
    assert all((folder / link).is_file() for link in links)
    assert judgement.exit_code == 1
