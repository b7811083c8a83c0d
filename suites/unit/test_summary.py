"""summary.md: the first line says it all, worst first, within a CI's byte limit, and no skip is called a pass."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from harness import gate
from harness.errors import Verdict
from harness.report import summary
from harness.result import Judgement, Result
from suites.unit.built_evidence import (
    CODEGEN_CASE,
    CODEGEN_TEST,
    LOSS_TEST,
    NUMERICS_TEST,
    Built,
    facts,
    good,
    isa_file,
    loss_file,
)


def render(built: Built) -> str:
    folder = built.write()
    return summary.render(gate.judge(folder), gate.read_run(folder))


def test_green(tmp_path: Path) -> None:
    """`PASS exit 0:` and the counts; the limits of 100 steps are said wherever a curve was judged."""
    text = render(good(tmp_path))
    assert text.splitlines()[0] == "PASS exit 0: 3 checks: 3 PASS"
    assert "100 steps cannot show late divergence" in text
    assert "platform cpu" in text
    assert "torch 2.13.0, triton 3.9.0" in text


def test_many_chosen_cases(tmp_path: Path) -> None:
    """A run of half a table names three of its rows."""
    built = good(tmp_path)
    folder = built.write()
    run = {**gate.read_run(folder), "case": ",".join(f"row-{number}" for number in range(38))}
    about = next(line for line in summary.render(gate.judge(folder), run).splitlines() if line.startswith("platform"))
    assert about.endswith(", cases row-0, row-1, row-2 and 35 more")


def test_first_line_names_the_worst_finding(tmp_path: Path) -> None:
    """A wrong maximum reddens numerics and loss: the first line names the numerics check and its message."""
    built = good(tmp_path).test(NUMERICS_TEST, "failed", "1 of 256 differs, first [127]: 0x7f is 240.0, not 448.0")
    text = render(built.loss(loss_file(0.01)))
    assert text.splitlines()[0] == (
        "FAIL exit 1: numerics test_formats::test_golden[formats-e4m3fnuz] - 1 of 256 differs, first [127]: 0x7f is "
        "240.0, not 448.0 [3 checks: 1 FAIL, 1 REGRESSION, 1 PASS]"
    )
    findings = [line for line in text.splitlines() if line.startswith("- ")]
    assert [line.split(":")[0] for line in findings] == ["- FAIL", "- REGRESSION"]


def test_loss_table(tmp_path: Path) -> None:
    """Every window of a curve stands in the table as measured / allowed, what exceeds is marked."""
    text = render(good(tmp_path).loss(loss_file(1e-3)))
    assert "| llama3-tiny-rowwise-e4m3fnuz: REGRESSION |" in text
    for window in ("step 1", "steps 2-5", "steps 6-10", "steps 11-20", "steps 21-50", "steps 51-100"):
        assert window in text
    assert "1.0e-03 / 2.5e-04 !" in text


def test_facts_beside_the_baseline(tmp_path: Path) -> None:
    """A run with --case shows each fact beside the baseline's; without it only kernels that moved are shown."""
    built = good(tmp_path)
    assert "widest_store_bytes" not in render(built)
    assert "1 of 1 kernels as recorded" in render(built)
    built.run["case"] = "*"
    assert "| widest_store_bytes                | 16 (16) " in render(built)
    text = render(built.isa(isa_file(facts=facts(vgprs=20))))
    assert "| vgprs                             | 20 (16) !" in text
    assert "0 of 1 kernels as recorded" in text


def test_facts_of_many_kernels(tmp_path: Path) -> None:
    """More than three kernels: a line each with the facts that decide speed, and whatever moved, the worst first."""
    built = good(tmp_path)
    built.run["case"] = "*"
    for number in range(5):
        case = f"rowwise-e4m3fnuz-bf16-k{number}-gfx942"
        built.isa(isa_file(case=case), CODEGEN_TEST.replace(CODEGEN_CASE, case))
    built.isa(isa_file(facts=facts(agprs=17)))
    lines = [line for line in render(built).splitlines() if line.startswith("| rowwise-")]
    assert len(lines) == 6
    header = next(line for line in render(built).splitlines() if line.startswith("| kernel"))
    assert "store B" in header
    assert "agprs" in header
    assert "17 (16) !" in next(line for line in lines if "k7168" in line)


def test_improved_shows_the_patch(tmp_path: Path) -> None:
    """Better machine code: exit 0, IMPROVED on the first line, and the patch."""
    text = render(good(tmp_path).isa(isa_file(facts=facts(vgprs=8))))
    assert text.startswith("IMPROVED exit 0: ")
    assert "+  vgprs: 8" in text


def test_skips_are_listed_and_never_a_pass(tmp_path: Path) -> None:
    """Skipped tests stand under `Not judged, and not a pass`, grouped by reason with a count."""
    built = good(tmp_path)
    for number in range(4):
        built.test(f"numerics/test_gpu::test_gpu[{number}]", "skipped", "requires 4 gpus; this is cpu with 0")
    text = render(built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST]))
    assert "PASS exit 0: 7 checks: 4 SKIP, 3 PASS" in text
    assert "## Not judged, and not a pass" in text
    assert "- 4 x requires 4 gpus; this is cpu with 0: numerics/test_gpu::test_gpu[0]" in text


def many(count: int, skips: int) -> Judgement:
    skipped = [
        Result(f"numerics/test_a::test_é漢字🔥[{i}]", "numerics", Verdict.SKIP, f"requires 漢字🔥 {i}; this is y")
        for i in range(skips)
    ]
    passed = [Result(f"numerics/test_b::test_漢字🔥[{i}]", "numerics", Verdict.PASS) for i in range(count - skips - 1)]
    failure = Result("numerics/test_z::test_the_failure[z]", "numerics", Verdict.FAIL, "the only failure")
    results = (*skipped, *passed, failure)
    return Judgement(results, 1, Counter(str(result.verdict) for result in results))


def test_twenty_thousand_cases_with_multibyte_names() -> None:
    """actions/runner#4337: 20,000 cases and 5,000 skips before the only failure: under 1 MiB, failure in line 1."""
    started = time.monotonic()
    text = summary.render(many(20_000, 5_000), {"platform": "cpu", "suites": ["numerics"]})
    assert time.monotonic() - started < 10
    assert len(text.encode()) <= summary.BYTE_LIMIT < 1 << 20
    assert text.startswith("FAIL exit 1: numerics test_z::test_the_failure[z] - the only failure")


def test_cut_counts_bytes() -> None:
    """The cut is by bytes and at the end of a line; the beginning survives and the cut is said."""
    text = "first line\n" + "漢字🔥 line\n" * 1000
    cut = summary.cut(text, 500)
    assert len(cut.encode()) <= 500
    assert cut.startswith("first line\n")
    assert cut.endswith("(cut here: the rest is in junit.xml and journal.jsonl)\n")
    assert all(line in ("first line", "漢字🔥 line", "") or line.startswith("(cut") for line in cut.splitlines())
    assert summary.cut("short\n", 500) == "short\n"


def test_many_findings_end_in_a_pointer() -> None:
    """Fifteen findings, then how many more there are; the exit code comes from all of them."""
    failures = tuple(Result(f"numerics/test_a::test_b[{i:03}]", "numerics", Verdict.FAIL, "m") for i in range(40))
    text = summary.render(Judgement(failures, 1, {"FAIL": 40}), {})
    assert sum(line.startswith("- FAIL") for line in text.splitlines()) == 15
    assert "- ... and 25 more, all in junit.xml" in text


def test_tests_that_never_ran_are_one_line(tmp_path: Path) -> None:
    """After a kill the running test stands first, then one line for all that never started, then other findings."""
    built = good(tmp_path).test("numerics/test_a::test_b[running]", "running")
    for number in range(30):
        built.test(f"numerics/test_a::test_b[rest-{number:02}]", "not-run")
    built.process("numerics", rc=None, signal="SIGKILL").loss(loss_file(0.01))
    rows = [line for line in render(built.baseline()).splitlines() if line.startswith("- ")]
    assert [row.split(":")[0] for row in rows] == ["- KILLED", "- MISSING", "- REGRESSION"]
    assert rows[1].startswith("- MISSING: 30 tests of numerics - not run: the test process was killed from outside")
    assert "(first test_a::test_b[rest-00])" in rows[1]


def test_pipes_and_backticks_do_not_break_tables() -> None:
    """A cell with a pipe or a backtick stays one cell."""
    lines = summary.table(("a", "b"), [("x | y", "`z`")])
    assert all(line.count("|") == 3 for line in lines)
    assert "`" not in lines[2]


def test_control_characters_do_not_reach_the_terminal() -> None:
    """A message in colour, over several lines, is one plain line."""
    result = Result("numerics/test_a::test_b[c]", "numerics", Verdict.FAIL, "\x1b[31mred\x1b[0m\nsecond")
    text = summary.render(Judgement((result,), 1, {"FAIL": 1}), {})
    assert "\x1b" not in text
    assert "#x1B[31mred#x1B[0m second" in text.splitlines()[0]


def test_what_nobody_judged_is_no_pass() -> None:
    """A run of which every row is uncalibrated exits 0 and says UNCALIBRATED, not PASS."""
    result = Result("loss/test_a::test_a", "loss", Verdict.UNCALIBRATED, "no baseline")
    line = summary.headline(Judgement((result,), 0, {"UNCALIBRATED": 1}))
    assert line.startswith("UNCALIBRATED exit 0: ")
