"""Other people's JUnit: each malformed file of the corpus is repaired and said, or rejected by name; none is a pass.

suites/unit/corpus/ holds one tiny file a kind. Whatever is wrong with a file, what it says of tests that passed or
failed is kept. `fp8ci merge` makes one file of all of them that needs no repair and has the same verdicts.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import cli, combine, gate, junit, junit_merge, junit_reader
from harness.errors import DiskError, UnreadableError, Verdict
from suites.unit.built_evidence import NUMERICS_TEST, Built, good

CORPUS = Path(__file__).with_name("corpus")
ROOT = Path(__file__).resolve().parents[2]

ONE_RED = {"PASS": 1, "FAIL": 1}
UNREADABLE = {"UNREADABLE": 1}

#: Name -> verdicts, exit code, what must be said (in a note or a message).
FILES: dict[str, tuple[dict[str, int], int, str]] = {
    "plain": (ONE_RED, 1, "1 of 9 differs"),
    # Rejected: nobody can say what such a file means. What was whole in it is kept.
    "empty": (UNREADABLE, 3, "is empty"),
    "nul": (UNREADABLE, 3, "holds 64 bytes and no text"),
    "blank": (UNREADABLE, 3, "and no text"),
    "cut": ({"PASS": 1, "UNREADABLE": 1}, 3, "1 whole cases before that"),
    "cut-in-a-name": ({"PASS": 1, "UNREADABLE": 1}, 3, "1 whole cases before that"),
    "html": (UNREADABLE, 3, "is HTML"),
    "json": (UNREADABLE, 3, "is no XML"),
    "another-root": (UNREADABLE, 3, "its root is <coverage>"),
    "billion-laughs": (UNREADABLE, 3, "declares entities"),
    "external-entity": (UNREADABLE, 3, "declares entities"),
    "entity-behind-a-comment": (UNREADABLE, 3, "declares entities"),
    "external-dtd": (UNREADABLE, 3, "declares entities or an external DTD"),
    "two-documents": ({**ONE_RED, "UNREADABLE": 1}, 3, "2 whole cases before that"),
    "bare-ampersand": ({"PASS": 1, "UNREADABLE": 1}, 3, "1 whole cases before that"),
    "unknown-entity": ({"PASS": 1, "UNREADABLE": 1}, 3, "1 whole cases before that"),
    # Absence.
    "no-suites": ({"MISSING": 1}, 3, "holds no test case"),
    "no-cases": ({"MISSING": 1}, 3, "holds no test case"),
    "attributes-only": ({"MISSING": 1, "DISAGREE": 2}, 3, "s says failures=11 and holds 0"),
    "all-skipped": ({"SKIP": 1, "MISSING": 1}, 3, "nothing ran: all 1 were skipped, the first because: no GPU"),
    "status-not-run": ({"SKIP": 1, "MISSING": 1}, 3, "its status is 'notrun'"),
    # Counts.
    "failures-without-elements": ({"PASS": 1, "DISAGREE": 1}, 3, "s says failures=11 and holds 0"),
    "more-tests-than-cases": ({"PASS": 1, "DISAGREE": 1}, 3, "s says tests=6 and holds 1"),
    "root-counts-lie": ({"PASS": 1, "DISAGREE": 1}, 3, "testsuites says failures=1 and holds 0"),
    "counts-no-number": ({"PASS": 1, "DISAGREE": 2}, 3, "s says tests='3.0', which is no number"),
    "suite-aborted": ({"PASS": 1, "DISAGREE": 1}, 3, "s says aborted='true', and what is in it may not be all"),
    "suite-not-aborted": (ONE_RED, 1, "1 of 9 differs"),
    "suite-status-failed": ({"PASS": 1, "DISAGREE": 1}, 3, "s says status='failed' and holds nothing that failed"),
    "suite-status-failed-truly": (ONE_RED, 1, "1 of 9 differs"),
    "fewer-failures-than-elements": (ONE_RED, 1, "repaired: s says failures=0 and holds 1"),
    # Structure.
    "nested": (ONE_RED, 1, "nested suites are laid side by side"),
    "namespace": (ONE_RED, 1, "namespaces are ignored"),
    "cases-at-the-root": (ONE_RED, 1, "outside of any testsuite"),
    "single-suite-root": (ONE_RED, 1, "1 of 9 differs"),
    "suite-error": ({"PASS": 1, "FAIL": 1}, 1, "suite error: setUpClass failed"),
    "skip-in-a-failure": (ONE_RED, 1, "a case both failed and skipped counts as failed"),
    "failure-in-capitals": (ONE_RED, 1, "elements in capitals"),
    "all-in-capitals": (ONE_RED, 1, "elements in capitals are read as their small twins (4 times)"),
    "failed-in-other-words": (ONE_RED, 1, "<failed> in a case is read as <failure>"),
    "result-in-an-unknown-element": (
        {"PASS": 1, "DISAGREE": 1},
        3,
        "<test-case> is no element of JUnit, and carries result='Failed'",
    ),
    "results-behind-an-unknown-element": (
        {"PASS": 1, "DISAGREE": 1},
        3,
        "<step> is no element of JUnit, and carries outcome='Passed' (2 times)",
    ),
    "unknown-elements": (ONE_RED, 1, "1 of 9 differs"),
    "case-in-a-case": (ONE_RED, 1, "a testcase inside of a testcase"),
    # Names.
    "no-name": ({"PASS": 1, "UNREADABLE": 1}, 3, "a testcase without a name"),
    "no-name-failed": (ONE_RED, 1, "who am I"),
    "no-suite-name": (ONE_RED, 1, "a suite without a name has the file's"),
    "no-classname": (ONE_RED, 1, "s/s::fails"),
    # Times.
    "time-grouped": (ONE_RED, 1, "time '1,024.5' is read with its comma"),
    "time-european": (ONE_RED, 1, "time '1.024,12' is read with its comma"),
    "time-decimal-comma": (ONE_RED, 1, "time '0,5' is read with its comma"),
    "time-missing": (ONE_RED, 1, "a case without a time"),
    "time-empty": (ONE_RED, 1, "time '' is no time"),
    "time-nan": (ONE_RED, 1, "time 'NaN' is no time"),
    "time-infinite": (ONE_RED, 1, "time 'inf' is no time"),
    "time-negative": (ONE_RED, 1, "time '-1' is no time"),
    "time-words": (ONE_RED, 1, "time '2 minutes' is no time"),
    "suite-time-nan": (ONE_RED, 1, "suite time 'nan' is no time"),
    # Characters.
    "control-characters": (ONE_RED, 1, "3 characters that XML cannot hold"),
    "character-references": (ONE_RED, 1, "3 references to characters that XML cannot hold, such as &#x1b;"),
    "lone-surrogate": (ONE_RED, 1, "1 characters that XML cannot hold"),
    "noncharacter": (ONE_RED, 1, "1 characters that XML cannot hold"),
    "latin-1-said-utf-8": (ONE_RED, 1, "is not utf-8; what is not is shown as U+FFFD"),
    "latin-1-declared": (ONE_RED, 1, "encoded as iso-8859-1"),
    "utf-16": (ONE_RED, 1, "encoded as utf-16"),
    "encoding-of-no-text": (ONE_RED, 1, "'hex' is none of text"),
    "encoding-undefined": (ONE_RED, 1, "'undefined' is none of text"),
    "unknown-encoding": (ONE_RED, 1, "'klingon' does not exist"),
    "space-before-declaration": (ONE_RED, 1, "white space before the XML declaration"),
    "byte-order-mark": (ONE_RED, 1, "1 of 9 differs"),
    "markup-in-text": (ONE_RED, 1, "]]> | `x`"),
    # Outcomes.
    "failed-and-skipped": (ONE_RED, 1, "both failed and skipped counts as failed"),
    "skipped-and-failed": (ONE_RED, 1, "both failed and skipped counts as failed"),
    "two-failures": (ONE_RED, 1, "several failures is one case"),
    "duplicate-fail-pass": ({"FLAKY": 1}, 1, "ended differently: red, PASS"),
    "duplicate-pass-fail": ({"FLAKY": 1}, 1, "ended differently: PASS, red"),
    "duplicate-fail-fail": ({"FAIL": 1}, 1, "s/t::fails is there 2 times"),
    "duplicate-pass-pass": (ONE_RED, 1, "s/t::passes is there 2 times"),
    "duplicate-setup-error": ({"FLAKY": 1}, 1, "failed on setup"),
    "flaky-failure": ({"FLAKY": 1}, 1, "flakyFailure: first try"),
    "rerun-failure": (ONE_RED, 1, ""),
    "status-failed": (ONE_RED, 1, "its status is 'failed'"),
    "status-run-result-failed": (ONE_RED, 1, "its status is 'failed'"),
    "status-timeout": (ONE_RED, 1, "its status is 'timeout'"),
    "outcome-failed": (ONE_RED, 1, "its status is 'failed'"),
    "case-timed-out": (ONE_RED, 1, "its status is 'timedout'"),
    "success-false": (ONE_RED, 1, "its status is 'failed'"),
    "property-text": (ONE_RED, 1, "1 of 9 differs"),
    # Our own report, tampered with.
    "verdict-contradicts": ({"DISAGREE": 1}, 3, "its property says PASS, its element is failure"),
    "verdict-hides": ({"DISAGREE": 1}, 3, "its property says FAIL, its element is none"),
}


def said(judgement: combine.Judgement) -> str:
    """Everything that a person reads of it."""
    lines = [f"{result.id} {result.message}" for result in judgement.results]
    return "\n".join([*lines, *judgement.notes])


def test_the_corpus_is_the_table() -> None:
    """No file without its row, no row without its file."""
    assert sorted(path.stem for path in CORPUS.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"report-{name}") for name in FILES])
def test_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdicts, exit code and words for one kind; merged it is by the contract, and judged the same."""
    verdicts, exit_code, words = FILES[name]
    path = CORPUS / f"{name}.xml"
    judgement, _ = combine.judge([path])
    assert (judgement.counts, judgement.exit_code) == (verdicts, exit_code), said(judgement)
    assert words in said(judgement)
    assert cli.main(["gate", str(path)]) == exit_code
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{judgement.red[0].verdict} exit {exit_code}: ")

    once, twice = tmp_path / "once.xml", tmp_path / "twice.xml"
    junit_merge.merge([path], once)
    merged, _ = combine.judge([once])
    assert (merged.counts, merged.exit_code, merged.notes) == (verdicts, exit_code, ())
    root = ElementTree.parse(once).getroot()
    for suite in root:
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases)) != "0"
        names = [(case.get("classname"), case.get("name")) for case in cases]
        assert len(set(names)) == len(names)
        for case in cases:
            assert case.get("classname")
            assert str(case.get("name")).isascii()
            assert len([child for child in case if child.tag in ("failure", "error", "skipped")]) <= 1
    junit_merge.merge([once], twice)
    assert twice.read_text() == once.read_text()


@pytest.mark.parametrize("where", ["<testsuites", "<testsuite "])
@pytest.mark.parametrize("said", ['aborted="True"', 'timedOut="1"', 'timed-out="yes"', 'interrupted="TRUE"',
                                  'incomplete="incomplete"', 'Cancelled="3"'])  # fmt: skip
def test_a_suite_that_did_not_end_is_no_pass(said: str, where: str, tmp_path: Path) -> None:
    """However it spells it, and wherever: the cases that are there passed, and nobody knows of the others."""
    text = '<testsuites><testsuite name="s"><testcase classname="t" name="a"/></testsuite></testsuites>'
    path = tmp_path / "report.xml"
    path.write_text(text)
    assert combine.judge([path])[0].exit_code == 0
    path.write_text(text.replace(where, f"{where} {said} ", 1))
    judgement, _ = combine.judge([path])
    assert (judgement.counts, judgement.exit_code) == ({"DISAGREE": 1, "PASS": 1}, 3), said
    assert {result.id for result in judgement.red} == {"report.xml/report::agreement-1"}


def test_the_rest_still_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All files of the corpus in one: each bad one is an error case by its name, and no good case is lost."""
    paths = sorted(CORPUS.iterdir())
    out = tmp_path / "merged.xml"
    assert cli.main(["merge", *map(str, paths), "--out", str(out)]) == 3
    captured = capsys.readouterr()
    expected: Counter[str] = Counter()
    for verdicts, _, _ in FILES.values():
        expected.update(verdicts)
    merged, _ = combine.judge([out])
    assert merged.counts == dict(sorted(expected.items()))
    assert f"{len(merged.results)} cases of {len(paths)} files: " in captured.out
    assert "nested.xml: repaired: nested suites are laid side by side" in captured.err
    for name in ("empty", "html", "cut", "billion-laughs"):
        assert f"{name}.xml: " in said(merged)


def test_merge_of_good_files_is_0(tmp_path: Path) -> None:
    """Red tests are for the gate to judge: a merge that could read everything is exit 0. A missing file is not."""
    target = str(tmp_path / "o.xml")
    assert cli.main(["merge", str(CORPUS / "plain.xml"), "--out", target]) == 0
    assert cli.main(["gate", target]) == 1
    assert cli.main(["merge", str(CORPUS / "plain.xml"), str(tmp_path / "none.xml"), "--out", target]) == 3
    assert combine.judge([Path(target)])[0].counts == {**ONE_RED, "UNREADABLE": 1}


def test_a_merge_says_what_it_could_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number alone names no file; nor is space what a folder lacks that is not there."""
    missing, target = tmp_path / "none.xml", tmp_path / "no" / "out.xml"
    assert cli.main(["merge", str(missing), "--out", str(tmp_path / "out.xml")]) == 3
    assert "UNREADABLE: none.xml: cannot be read (" in capsys.readouterr().err
    assert cli.main(["merge", str(CORPUS / "plain.xml"), "--out", str(target)]) == 4
    assert "name another" in capsys.readouterr().err


def test_what_a_merge_keeps(tmp_path: Path) -> None:
    """Wall time, host, timestamp, properties, all lost by junitparser's `+`; two suites of one name stay two."""
    text = (
        '<testsuites><testsuite name="pytest" hostname="h{0}" timestamp="2026-01-0{0}T00:00:00" time="9.0" tests="1">'
        '<properties><property name="host" value="mi300x-{0}"/></properties>'
        '<testcase classname="t" name="a" time="1.5"><properties><property name="tflops" value="612"/></properties>'
        "<system-out>said {0}</system-out></testcase></testsuite></testsuites>"
    )
    for number in (1, 2):
        (tmp_path / f"{number}.xml").write_text(text.format(number), encoding="utf-8")
    out = tmp_path / "merged.xml"
    junit_merge.merge([tmp_path / "1.xml", tmp_path / "2.xml"], out)
    root = ElementTree.parse(out).getroot()
    assert [suite.get("name") for suite in root] == ["pytest", "pytest~2"]
    assert [suite.get("hostname") for suite in root] == ["h1", "h2"]
    assert [suite.get("timestamp") for suite in root] == ["2026-01-01T00:00:00", "2026-01-02T00:00:00"]
    assert [suite.get("time") for suite in root] == ["9.0", "9.0"]
    assert (root.get("time"), root.get("tests")) == ("18.0", "2")
    values = [item.get("value") for item in root.findall("testsuite/properties/property")]
    assert values == ["mi300x-1", "mi300x-2"]
    assert [case.get("time") for case in root.iter("testcase")] == ["1.5", "1.5"]
    assert [item.text for item in root.iter("system-out")] == ["said 1", "said 2"]
    assert {p.get("name") for p in root.findall("testsuite/testcase/properties/property")} == {"tflops", "verdict"}


def test_twelve_megabytes_of_output(tmp_path: Path) -> None:
    """lxml refuses such a text node and junitparser with it; here it is cut, said, and the outcome stands."""
    path, out = tmp_path / "big.xml", tmp_path / "merged.xml"
    text = (CORPUS / "plain.xml").read_text(encoding="utf-8")
    path.write_text(text.replace("</failure>", "</failure><system-out>" + "x" * 12_000_000 + "</system-out>"))
    judgement, _ = combine.judge([path])
    assert (judgement.counts, judgement.exit_code) == (ONE_RED, 1)
    assert "big.xml: repaired: long output is cut" in judgement.notes
    junit_merge.merge([path], out)
    assert out.stat().st_size < 100_000


def test_suites_in_suites_without_end(tmp_path: Path) -> None:
    """50,000 deep: refused in a moment, with what was whole before; as deep as anybody nests is read."""
    path = tmp_path / "deep.xml"
    for depth, verdicts, exit_code in ((30, ONE_RED, 1), (50_000, {"PASS": 1, "UNREADABLE": 1}, 3)):
        head = '<testsuite name="s"><testcase classname="t" name="first"/>' + '<testsuite name="s">' * (depth - 1)
        last = '<testcase classname="t" name="last"><failure message="wrong"/></testcase>'
        path.write_text(head + last + "</testsuite>" * depth)
        started = time.monotonic()
        judgement, _ = combine.judge([path])
        assert time.monotonic() - started < 5
        assert (judgement.counts, judgement.exit_code) == (verdicts, exit_code), said(judgement)
    assert "testsuites are nested more than 64 deep; 1 whole cases before that" in said(judgement)
    elements = "<properties>" * 50_000
    path.write_text(f'<testsuite name="s"><testcase name="a">{elements}')
    assert combine.judge([path])[0].counts == UNREADABLE


def test_two_hundred_megabytes(tmp_path: Path) -> None:
    """More than anybody's viewer takes: refused by its size, unread."""
    path = tmp_path / "huge.xml"
    with path.open("wb") as stream:
        stream.truncate(200_000_000)
    judgement, _ = combine.judge([path])
    assert (judgement.counts, judgement.exit_code) == (UNREADABLE, 3)
    assert "200000000 bytes are more than" in said(judgement)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    """A file that is not there, a folder that is no evidence, a link to itself: each red, and the rest is judged."""
    (tmp_path / "loop.xml").symlink_to("loop.xml")
    (tmp_path / "folder").mkdir()
    paths = [CORPUS / "plain.xml", tmp_path / "none.xml", tmp_path / "loop.xml", tmp_path / "folder"]
    judgement, pieces = combine.judge(paths)
    assert judgement.counts == {**ONE_RED, "UNREADABLE": 2, "USAGE": 1}
    assert [piece.judgement.exit_code for piece in pieces] == [1, 3, 3, 2]


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    """One line, exit 4; and a writer that went wrong does not leave a file that says something else."""
    with pytest.raises(DiskError):
        junit_merge.merge([CORPUS / "plain.xml"], tmp_path / "nowhere" / "out.xml")


def test_a_merge_reads_back_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that collide would be taken for two attempts of one test: found at once."""
    monkeypatch.setattr(junit, "unique", lambda name, used: "the same")
    with pytest.raises(UnreadableError, match="reads back differently"):
        junit_merge.merge([CORPUS / "plain.xml"], tmp_path / "out.xml")


# Several pieces, and what is expected -------------------------------------------------------------------------------


def reported(folder: Path, built: Built) -> Path:
    """An evidence folder with its junit.xml; returns the folder."""
    evidence = built.write()
    junit.write(gate.judge(evidence), gate.read_run(evidence), evidence / "junit.xml")
    return evidence


def test_our_own_report_reads_as_it_was_meant(tmp_path: Path) -> None:
    """junit.xml of a run, read as anybody's file: the same ids, verdicts and exit code as its evidence."""
    built = good(tmp_path).test("numerics/test_a::test_a", "failed", "wrong")
    built.test("numerics/test_a::test_b", "skipped", "requires 4 gpus; this is cpu with 0")
    evidence = reported(tmp_path, built)
    meant, (read) = gate.judge(evidence), combine.judge([evidence / "junit.xml"])[0]
    told = [[(r.id, r.verdict, r.message) for r in one.results] for one in (meant, read)]
    assert told[0] == told[1]
    assert (meant.exit_code, meant.counts) == (read.exit_code, read.counts)


def test_expected_platforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """actions/runner#4337: a job that was skipped is a success there. Here its platform is red by name."""
    evidence = str(reported(tmp_path / "cpu", good(tmp_path / "cpu")))
    assert cli.main(["gate", evidence, "--expect", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("PASS exit 0: 4 checks: 4 PASS")
    assert cli.main(["gate", f"{evidence}/junit.xml", "--expect", "cpu"]) == 0
    capsys.readouterr()
    assert cli.main(["gate", evidence, "--expect", "cpu,mi300x"]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("MISSING exit 3: gate expected::mi300x - mi300x is expected, and nothing of it is there")
    assert cli.main(["gate", "--expect", "mi300x"]) == 3
    assert "mi300x is expected" in capsys.readouterr().out
    assert cli.main(["gate", evidence, "--expect", "mi300"]) == 2
    assert "there is no platform 'mi300'" in capsys.readouterr().err


def test_a_report_alone_is_no_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One pass and the rest skipped, in a report of ours without its run: nothing there says what had to run."""
    built = good(tmp_path / "cpu").test("numerics/test_a::test_a", "skipped", "requires 4 gpus; this is cpu with 0")
    alone = tmp_path / "report.xml"
    alone.write_text((reported(tmp_path / "cpu", built) / "junit.xml").read_text())
    assert cli.main(["gate", str(alone)]) == 0
    capsys.readouterr()
    assert cli.main(["gate", str(alone), "--expect", "cpu"]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    told = "cpu is expected, and of it there is only report.xml, without run.json and journal.jsonl beside it: nothing"
    assert told in first
    # Beside another run's folder it proves no more than that folder does.
    (tmp_path / "cpu" / "shard.xml").write_text(alone.read_text())
    assert cli.main(["gate", str(tmp_path / "cpu" / "shard.xml"), "--expect", "cpu"]) == 3


def test_the_report_of_a_folder_stands_for_the_folder(tmp_path: Path) -> None:
    """Where junit.xml has its run beside it, the run is judged: what the report leaves out is red."""
    evidence = reported(tmp_path / "cpu", good(tmp_path / "cpu"))
    text = (evidence / "junit.xml").read_text()
    begin = text.index("<testcase", text.index('name="fp8.loss.cpu"'))
    suite = text[text.rindex("<testsuite ", 0, begin) : text.index("</testsuite>", begin) + len("</testsuite>")]
    for change in (text.replace(suite, ""), text.replace("cafe0001", "cafe0002")):
        assert change != text
        (evidence / "junit.xml").write_text(change)
        assert combine.judge([evidence / "junit.xml"], ["cpu"])[0].exit_code == 3
    (evidence / "junit.xml").write_text(text)
    assert combine.judge([evidence / "junit.xml"], ["cpu"])[0].exit_code == 0


def test_an_expected_platform_without_a_manifest(tmp_path: Path) -> None:
    """A platform that declares nothing calibrated and has no list of what must run: green alone, not as expected."""
    built = Built(tmp_path, ("numerics", "loss", "perf")).test(NUMERICS_TEST)
    built.test("loss/test_a::test_a").test("perf/test_a::test_a")
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    assert gate.judge(built.write()).exit_code == 0
    judgement, _ = combine.judge([tmp_path], ["mi300x"])
    (told,) = judgement.red
    assert (told.id, told.verdict) == ("gate/expected::mi300x", Verdict.MISSING)
    assert "judged-with/mi300x/manifest.txt is missing: nothing says what must run there" in told.message


@pytest.mark.parametrize("again", ["same", "link", "copy", "report"])
def test_evidence_that_is_given_twice(again: str, tmp_path: Path) -> None:
    """It counts once, and that is said: by its path, through a link, as a copy, or by the report inside of it."""
    evidence = reported(tmp_path / "cpu", good(tmp_path / "cpu"))
    other = tmp_path / "again"
    if again == "link":
        other.symlink_to(evidence)
    elif again == "copy":
        shutil.copytree(evidence, other)
    else:
        other = evidence / "junit.xml" if again == "report" else tmp_path / "nowhere" / ".." / "cpu"
    (tmp_path / "nowhere").mkdir()
    judgement, pieces = combine.judge([evidence, other], ["cpu"])
    assert (judgement.counts, judgement.exit_code, len(pieces)) == ({"PASS": 4}, 0, 1)
    assert any("is there twice, and counts once" in note for note in judgement.notes)
    judgement, pieces = combine.judge([CORPUS / "plain.xml", CORPUS / "plain.xml"])
    assert (judgement.counts, len(pieces)) == (ONE_RED, 1)


def test_two_folders_of_one_run_that_differ(tmp_path: Path) -> None:
    """One of them is not what that run left: red, and neither is dropped."""
    good(tmp_path / "a").write()
    good(tmp_path / "b").test(NUMERICS_TEST, "failed", "wrong").write()
    for paths in ([tmp_path / "a", tmp_path / "b"], [tmp_path / "b", tmp_path / "a"]):
        judgement, pieces = combine.judge(paths)
        assert (judgement.exit_code, len(pieces)) == (3, 2)
        assert (judgement.counts["DISAGREE"], judgement.counts["FAIL"]) == (1, 1)
        assert "both of run cafe0001 on cpu, and say different things" in said(judgement)


def test_a_waiver_that_a_report_claims(tmp_path: Path) -> None:
    """Waivers come from a ledger at judgement; a file that calls itself waived is red. A merge keeps it."""
    path, out = tmp_path / "report.xml", tmp_path / "merged.xml"
    path.write_text(
        '<testsuite name="s"><testcase classname="t" name="a"/><testcase classname="t" name="b"><skipped '
        'type="WAIVED" message="WAIVED: known"/><properties><property name="verdict" value="WAIVED"/></properties>'
        "</testcase></testsuite>"
    )
    judgement, _ = combine.judge([path])
    assert (judgement.counts, judgement.exit_code) == (ONE_RED, 1)
    assert "waived by the report itself (known); a waiver counts in the ledger that a run is judged with" in said(
        judgement
    )
    junit_merge.merge([path], out)
    assert 'type="WAIVED"' in out.read_text()
    assert combine.judge([out])[0].exit_code == 1


def test_a_report_of_which_nothing_counts(tmp_path: Path) -> None:
    """Skipped, or too short to time: nothing was tested there either."""
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuite name="s"><testcase classname="t" name="a"><skipped/></testcase><testcase classname="t" name="b">'
        '<skipped type="UNMEASURABLE"/><properties><property name="verdict" value="UNMEASURABLE"/></properties>'
        "</testcase></testsuite>"
    )
    judgement, _ = combine.judge([path])
    assert (judgement.exit_code, "nothing ran: all 2 were skipped" in said(judgement)) == (3, True)


def test_a_platform_that_is_expected_twice(tmp_path: Path) -> None:
    """It is one platform, and one check."""
    judgement, _ = combine.judge([good(tmp_path).write()], ["cpu", "cpu"])
    assert [result.id for result in judgement.results if result.suite == "gate"] == ["gate/expected::cpu"]


def test_an_expected_platform_that_only_skipped(tmp_path: Path) -> None:
    """Evidence is there, and nothing in it ran."""
    built = Built(tmp_path, ("numerics",)).test(NUMERICS_TEST, "skipped", "requires 4 gpus; this is mi300x with 1")
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    judgement, _ = combine.judge([built.write()], ["mi300x"])
    (told,) = [result for result in judgement.results if result.id == "gate/expected::mi300x"]
    assert (told.verdict, "nothing of it ran" in told.message) == (Verdict.MISSING, True)


@pytest.mark.parametrize("narrow", ["case", "suite"])
def test_expected_means_whole(narrow: str, tmp_path: Path) -> None:
    """A run of one suite, or with `--case`, is green on its own; where its platform is expected it is MISSING."""
    built = good(tmp_path)
    if narrow == "case":
        built.run["case"] = "*"
    else:
        built = Built(tmp_path, ("numerics",)).test(NUMERICS_TEST)
        built.baseline(ids=[NUMERICS_TEST])
    evidence = reported(tmp_path, built)
    assert gate.judge(evidence).exit_code == 0
    judgement, _ = combine.judge([evidence], ["cpu"])
    assert (judgement.exit_code, judgement.counts["MISSING"]) == (3, 1)
    assert cli.main(["gate", str(evidence), "--whole"]) == 3
    assert cli.main(["gate", str(evidence), str(evidence), "--whole"]) == 3
    # The report alone says it too.
    judgement, _ = combine.judge([evidence / "junit.xml"], ["cpu"])
    assert (judgement.exit_code, judgement.counts["MISSING"]) == (3, 1)


def test_several_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two folders and two files: one table, the worst first with its platform, the exit code of the worst."""
    red = good(tmp_path / "red").test(NUMERICS_TEST, "failed", "7 ulps")
    red.run["platform"] = red.run["capabilities"]["platform"] = "mi300x"
    paths = [str(good(tmp_path / "green").write()), str(red.write())]
    paths += [str(CORPUS / "plain.xml"), str(CORPUS / "empty.xml")]
    assert cli.main(["gate", *paths]) == 3
    text = capsys.readouterr().out
    assert text.startswith("UNREADABLE exit 3: empty.xml on empty.xml ")
    assert "- FAIL: numerics on mi300x test_formats::test_golden[formats-e4m3fnuz] - 7 ulps" in text
    assert "| cpu       | exit 0 | 3 checks: 3 PASS" in text
    for alone in (["--current"], ["--base", paths[0]], ["--judge-with", str(ROOT)]):
        assert cli.main(["gate", *paths[:2], *alone]) == 2
    capsys.readouterr()
    assert cli.main(["gate", *paths, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3


def test_reports_of_two_platforms_are_not_attempts_of_one(tmp_path: Path) -> None:
    """The same ids on two platforms, merged: a pass there and a failure here are no flake."""
    paths = []
    for name, outcome in (("cpu", "passed"), ("mi300x", "failed")):
        built = good(tmp_path / name).test(NUMERICS_TEST, outcome, "wrong")
        built.run["platform"] = built.run["capabilities"]["platform"] = name
        paths.append(reported(tmp_path / name, built) / "junit.xml")
    out = tmp_path / "merged.xml"
    junit_merge.merge(paths, out)
    judgement, _ = combine.judge([out], ["cpu", "mi300x"])
    assert "FLAKY" not in judgement.counts
    assert judgement.counts["FAIL"] == 1
    assert {r.id for r in judgement.results if r.verdict is Verdict.FAIL} == {
        "numerics.mi300x/test_formats::test_golden[formats-e4m3fnuz]"
    }


def test_times() -> None:
    """apache/maven-surefire#2707: locale formats; what is no time is None, never NaN."""
    table = {"1,024.5": 1024.5, "1.024,12": 1024.12, "1,024": 1024.0, "0,5": 0.5, "1,5": 1.5, "12": 12.0, " 3 ": 3.0}
    assert {text: junit_reader.read_time(text)[0] for text in table} == table
    for text in ("NaN", "inf", "-inf", "-1", "", "1h", "1,2,3", None):
        assert junit_reader.read_time(text)[0] is None


def test_reading_leaves_no_file_open_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An external entity is refused before anything could open what it names."""
    opened: list[object] = []
    real = os.open

    def watching(path: object, *arguments: int, **options: int) -> int:
        opened.append(path)
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", watching)
    report = junit_reader.read(CORPUS / "external-entity.xml")
    assert "declares entities" in report.rejected
    assert not any("passwd" in str(path) for path in opened)
