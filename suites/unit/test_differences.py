"""`fp8ci diff`: every kind of change between two runs is one line that names the test; no change is said too."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness import cli, differences
from harness.errors import Verdict
from harness.result import Result
from suites.unit.built_evidence import CODEGEN_TEST, LOSS_TEST, NUMERICS_TEST, Built, facts, good, isa_file, loss_file

GONE = "numerics/test_formats::test_golden[gone]"
NEW = "numerics/test_formats::test_golden[new]"
SKIPPED = "numerics/test_gpu::test_gpu[a]"


def pair(folder: Path) -> tuple[Built, Built]:
    """Two good runs of one tree."""
    return good(folder / "a"), good(folder / "b")


def told(first: Built, second: Built) -> differences.Difference:
    return differences.between(first.write(), second.write())


def test_nothing_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one tree: another run id and other times are no difference."""
    first, second = pair(tmp_path)
    second.run.update(run_id="beef", started="2027-02-03T04:05:06+00:00")
    second.session_ids = dict.fromkeys(second.suites, "beef")
    a, b = str(first.write()), str(second.write())
    assert cli.main(["diff", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "from  cpu at bbbbbbbbbbbb, run cafe0001: exit 0"
    assert lines[2] == "executed 3 -> 3, skipped 0 -> 0, missing 0 -> 0, vanished 0, new 0"
    assert lines[-1] == "nothing changed"
    assert cli.main(["diff", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["Tests"] == []


def test_tests(tmp_path: Path) -> None:
    """Vanished, new, and with another verdict; counted as executed and skipped."""
    first, second = pair(tmp_path)
    first.test(GONE).test(SKIPPED).baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    second.test(NEW).test(SKIPPED, "skipped", "requires 4 gpus; this is cpu with 0")
    second.test(NUMERICS_TEST, "failed", "3 of 9 differ").baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    found = told(first, second)
    assert (found.vanished, found.new) == ((GONE,), (NEW,))
    assert found.verdicts == (
        f"{NUMERICS_TEST}: PASS -> FAIL: 3 of 9 differ",
        f"{SKIPPED}: PASS -> SKIP: requires 4 gpus; this is cpu with 0",
    )
    assert found.counts == "executed 5 -> 4, skipped 0 -> 1, missing 0 -> 0, vanished 1, new 1"


def test_conditions(tmp_path: Path) -> None:
    """What explains the rest: versions, commit, device."""
    first, second = pair(tmp_path)
    second.run["versions"]["torch"] = "2.14.0"
    second.run["commit"] = "c" * 40
    second.run["host"]["cpu"] = "Another CPU"
    assert told(first, second).conditions == (
        f"commit: '{'b' * 40}' -> '{'c' * 40}'",
        "host.cpu: 'A CPU' -> 'Another CPU'",
        "versions.torch: '2.13.0' -> '2.14.0'",
    )


def test_numbers(tmp_path: Path) -> None:
    """Properties, by how much, the largest change first; a number that appears or goes is told too."""
    first, second = pair(tmp_path)
    first.test(NUMERICS_TEST, max_ulp=2, sqnr_db=31.0, device="a", gone=1)
    second.test(NUMERICS_TEST, max_ulp=3, sqnr_db=30.69, device="b")
    assert told(first, second).numbers == (
        f"{NUMERICS_TEST}: device a -> b",
        f"{NUMERICS_TEST}: gone 1 -> absent",
        f"{NUMERICS_TEST}: max_ulp 2 -> 3 (+50 %)",
        f"{NUMERICS_TEST}: sqnr_db 31.0 -> 30.69 (-1 %)",
    )


def test_curves(tmp_path: Path) -> None:
    """The first step that differs and the one that differs most; a NaN is a difference and the largest."""
    first, second = pair(tmp_path)
    content = loss_file()
    for step in content["steps"][40:]:
        step["loss"] *= 1 + step["step"] * 1e-6
    (line,) = told(first, second.loss(content)).curves
    assert line == (
        f"{LOSS_TEST}: loss first differs at step 41 by 4.10e-05, most at step 100 by 1.00e-04, of 100 steps"
    )
    content["steps"][60]["grad_norm"] = math.nan
    curves = told(first, second.loss(content)).curves
    assert curves[1] == f"{LOSS_TEST}: grad_norm first differs at step 61 by nan, most at step 61 by nan, of 100 steps"


def test_a_curve_that_is_unreadable(tmp_path: Path) -> None:
    """One side's file is cut: a line that says so, in place of a comparison."""
    first, second = pair(tmp_path)
    a, b = first.write(), second.write()
    (b / str(second.tests[LOSS_TEST]["properties"]["loss_file"])).write_text("{", encoding="ascii")
    (line,) = differences.between(a, b).curves
    assert line.startswith(f"{LOSS_TEST}: llama3-tiny-rowwise-e4m3fnuz.json: ")


def test_machine_code(tmp_path: Path) -> None:
    """Fact by fact; another listing with equal facts is said as that."""
    first, second = pair(tmp_path)
    found = told(first, second.isa(isa_file(facts=facts(vgprs=20), config={"BLOCK_K": 512, "num_warps": 4})))
    assert found.facts == (f"{CODEGEN_TEST}: config BLOCK_K: 1024 -> 512", f"{CODEGEN_TEST}: vgprs: 16 -> 20")
    found = told(first, second.isa(isa_file(listing_hash="beef")))
    assert found.facts == (f"{CODEGEN_TEST}: another listing, with every fact equal",)


def test_against_the_base_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`gate --base`: the summary ends in executed, skipped and vanished counts since the base commit's evidence."""
    first, second = pair(tmp_path)
    first.test(GONE).baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    a, b = str(first.write()), str(second.write())
    assert cli.main(["gate", b, "--base", a]) == 0
    text = capsys.readouterr().out
    assert text.startswith("PASS exit 0: ")
    assert "executed 4 -> 3, skipped 0 -> 0, missing 0 -> 0, vanished 1, new 0" in text
    assert f"- vanished: {GONE}" in text


def test_what_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit 2."""
    assert cli.main(["diff", str(good(tmp_path / "a").write()), str(tmp_path)]) == 2
    assert "is no evidence" in capsys.readouterr().err


def test_speed() -> None:
    """A row that moved, beside what its reference did; one that did not is left out, and so is one without a time."""

    def row(name: str, ns: float | None, ratio: float | None) -> Result:
        told = {"kind": "perf", "median_ns": ns, "ratio": ratio}
        return Result(id=f"perf/test_speed::test_time[{name}]", suite="perf", verdict=Verdict.PASS, baseline=told)

    pairs = [
        (row("a", 200e3, 0.5), row("a", 220e3, 0.5)),
        (row("b", 200e3, 0.5), row("b", 100e3, 0.25)),
        (row("c", 200e3, 0.5), row("c", 201e3, 0.5)),
        (row("d", 200e3, 0.5), row("d", None, None)),
    ]
    assert list(differences._speeds(pairs)) == [
        "perf/test_speed::test_time[b]: 200.0 -> 100.0 us (-50.0 %), by the reference of each run -50.0 %",
        "perf/test_speed::test_time[a]: 200.0 -> 220.0 us (+10.0 %), by the reference of each run +0.0 %",
    ]
