"""junit.xml: the narrow contract that every reader reads alike, and that it reads back as it was meant."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import gate, junit
from harness.errors import VERDICTS, UnreadableError, Verdict
from harness.result import Judgement, Result
from suites.unit.built_evidence import Built, good

RUN = {"platform": "cpu", "arch": "cpu", "run_id": "cafe", "commit": "b" * 40, "versions": {"torch": "2.13.0"}}


def judged(*results: Result) -> Judgement:
    return Judgement(results, max(result.exit_code for result in results), {})


def write(judgement: Judgement, folder: Path, **run: object) -> ElementTree.Element:
    path = folder / "junit.xml"
    junit.write(judgement, {**RUN, **run}, path)
    return ElementTree.parse(path).getroot()


def test_every_verdict_has_its_element(tmp_path: Path) -> None:
    """Each verdict of the table becomes the element that the table says, with the verdict as type; never two."""
    results = [
        Result(f"numerics/test_all::test_verdict[{verdict.lower()}]", "numerics", verdict, "told", "detail")
        for verdict in Verdict
    ]
    root = write(judged(*results), tmp_path)
    for case in root.iter("testcase"):
        verdict = Verdict(str(case.get("name")).partition("[")[2][:-1].upper())
        elements = [child for child in case if child.tag in ("failure", "error", "skipped")]
        expected = VERDICTS[verdict].junit
        assert [element.tag for element in elements] == ([] if expected == "none" else [expected])
        assert [element.get("type") for element in elements] == ([] if expected == "none" else [str(verdict)])
    suite = root.find("testsuite")
    assert suite is not None
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(attribute) == str(len(root.findall(f"testsuite/testcase/{tag}")))
    assert suite.get("tests") == str(len(Verdict))


def test_improved_is_a_failure_on_main(tmp_path: Path) -> None:
    """IMPROVED has no element on a pull request and is a failure on main."""
    result = Result("codegen/test_a::test_b[c]", "codegen", Verdict.IMPROVED, "better")
    assert list(write(judged(result), tmp_path).iter("failure")) == []
    assert len(list(write(judged(dataclasses.replace(result, strict=True)), tmp_path).iter("failure"))) == 1


def test_names(tmp_path: Path) -> None:
    """One testsuite a (suite, platform); classname fp8.<suite>.<platform>; name <module>::<test>[<case>]."""
    folder = good(tmp_path / "evidence").write()
    root = write(gate.judge(folder), tmp_path, **gate.read_run(folder))
    assert [suite.get("name") for suite in root] == ["fp8.numerics.cpu", "fp8.codegen.cpu", "fp8.loss.cpu"]
    case = root.find("testsuite/testcase")
    assert case is not None
    assert case.get("classname") == "fp8.numerics.cpu"
    assert case.get("name") == "test_formats::test_golden[formats-e4m3fnuz]"
    assert case.get("time") == "1.0"


def test_wall_time_is_not_the_sum_of_the_cases(tmp_path: Path) -> None:
    """junitparser's update_statistics replaces a suite's wall time by the sum of its cases: 7.5 stays, 1.0 does not."""
    folder = good(tmp_path / "evidence").write()
    root = write(gate.judge(folder), tmp_path, **gate.read_run(folder))
    assert [suite.get("time") for suite in root] == ["7.5", "7.5", "7.5"]


def test_properties(tmp_path: Path) -> None:
    """Case properties hold verdict and metrics, suite properties platform, arch, commit and versions."""
    result = Result("loss/test_a::test_b[c]", "loss", Verdict.PASS, properties={"loss_nats": 2.5, "arch": "gfx942"})
    root = write(judged(result), tmp_path)
    case = {p.get("name"): p.get("value") for p in root.findall("testsuite/testcase/properties/property")}
    suite = {p.get("name"): p.get("value") for p in root.findall("testsuite/properties/property")}
    assert case == {"verdict": "PASS", "loss_nats": "2.5", "arch": "gfx942"}
    assert suite["platform"] == "cpu"
    assert suite["commit"] == "b" * 40
    assert suite["version.torch"] == "2.13.0"


NASTY = {
    "escape": "\x1b[31mred\x1b[0m",
    "nul": "a\x00b",
    "noncharacter": "a\ufffeb",
    "emoji": "fire \U0001f525",
    "surrogate": "lone \ud800",
    "markup": "<&>\"' ]]> <![CDATA[",
    "c1": "a\x85b\x9bc",
    "return": "a\r\nb\rc",
    "bell-and-delete": "\x07\x7f",
}


@pytest.mark.parametrize("text", NASTY.values(), ids=[f"junit-{name}" for name in NASTY])
def test_characters_that_xml_cannot_hold(text: str, tmp_path: Path) -> None:
    """pytest-dev/pytest#404, #11842: in an id, message, detail, property or skip reason, the file reads back."""
    results = [
        Result(f"numerics/test_a::test_b[{text}{i}]", "numerics", verdict, text, text, properties={"p": text})
        for i, verdict in enumerate((Verdict.FAIL, Verdict.SKIP, Verdict.KILLED, Verdict.PASS))
    ]
    root = write(judged(*results), tmp_path)
    names = [str(case.get("name")) for case in root.iter("testcase")]
    assert len(set(names)) == 4
    assert all(name.isascii() and name.isprintable() for name in names)
    message = next(root.iter("failure")).get("message")
    assert message is not None
    assert "\x1b" not in message


def test_two_ids_that_become_one_name(tmp_path: Path) -> None:
    """Names are cut at 150 characters and stay unique; ids that differ in a hidden character are both there."""
    stem = "numerics/test_a::test_b["
    ids = [f"{stem}{'x' * 200}a]", f"{stem}{'x' * 200}b]", f"{stem}\x1b]", f"{stem}#x1B]"]
    root = write(judged(*(Result(test_id, "numerics", Verdict.PASS) for test_id in ids)), tmp_path)
    names = [str(case.get("name")) for case in root.iter("testcase")]
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 150


def test_a_long_detail_is_cut(tmp_path: Path) -> None:
    """lxml refuses text nodes over 10 MB: 12 MB of captured output are cut, saying so."""
    root = write(
        judged(Result("numerics/test_a::test_b[c]", "numerics", Verdict.FAIL, "m", "x" * 12_000_000)), tmp_path
    )
    text = next(root.iter("failure")).text
    assert text is not None
    assert len(text) < 70_000
    assert text.endswith("the journal has all of it]")


def test_read_back_finds_a_lie(tmp_path: Path) -> None:
    """The check after writing: a wrong count, a second element, a lost case, a cut file are each reported."""
    judgement = judged(*(Result(f"numerics/test_a::test_b[{i}]", "numerics", Verdict.FAIL, "m") for i in range(2)))
    write(judgement, tmp_path)
    path = tmp_path / "junit.xml"
    text = path.read_text()
    lies = (
        text.replace('failures="2"', 'failures="1"'),
        text.replace("</failure>", '</failure><skipped message="x"/>').replace('"FAIL"/>', '"FAIL"/><skipped/>'),
        text.replace("[1]", "[0]"),
        text[: len(text) // 2],
    )
    for lie in lies:
        assert lie != text
        path.write_text(lie)
        with pytest.raises(UnreadableError):
            junit.check(path, judgement, "cpu")


def test_write_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that went wrong (here: names no longer unique) is an error at once, not an unreadable report."""
    monkeypatch.setattr(junit, "unique", lambda name, used: "the same")
    results = (Result(f"numerics/test_a::test_b[{i}]", "numerics", Verdict.PASS) for i in range(2))
    with pytest.raises(UnreadableError, match="repeats a name"):
        write(judged(*results), tmp_path)


def test_killed_run_has_a_report(tmp_path: Path) -> None:
    """pytest-dev/pytest#7087: after a SIGKILL junit.xml holds the finished test, the running one and the rest."""
    built = Built(tmp_path / "evidence", ("numerics",))
    for name, outcome in (("one", "passed"), ("two", "running"), ("three", "not-run"), ("four", "not-run")):
        built.test(f"numerics/test_a::test_b[{name}]", outcome)
    built.process("numerics", rc=None, signal="SIGKILL").baseline(loss=False, codegen=False)
    root = write(gate.judge(built.write()), tmp_path)
    found = {}
    for case in root.iter("testcase"):
        error = case.find("error")
        found[str(case.get("name")).partition("[")[2][:-1]] = "passed" if error is None else str(error.get("message"))
    assert found["one"] == "passed"
    assert found["two"].startswith("KILLED: the test process was killed from outside by SIGKILL")
    assert found["three"].startswith("MISSING: not run: the test process was killed")
    assert found["four"].startswith("MISSING: not run: ")


def test_many_cases(tmp_path: Path) -> None:
    """Writing is linear: 5,000 cases take seconds (junitparser's add_testcase alone would take a minute)."""
    results = [Result(f"numerics/test_a::test_b[{i:05}]", "numerics", Verdict.PASS) for i in range(5000)]
    started = time.monotonic()
    write(judged(*results), tmp_path)
    assert time.monotonic() - started < 10


def test_earlier_attempts_are_text(tmp_path: Path) -> None:
    """The final verdict is the only result element; how earlier attempts ended stands in system-out."""
    failed = Result("numerics/test_a::test_b[c]", "numerics", Verdict.FLAKY, "m", attempts=("failed", "passed"))
    once = Result("numerics/test_a::test_b[d]", "numerics", Verdict.PASS)
    root = write(judged(failed, once), tmp_path)
    assert [element.text for element in root.iter("system-out")] == ["attempt 1: failed\nattempt 2: passed"]
    assert len(list(root.iter("failure"))) == 1
