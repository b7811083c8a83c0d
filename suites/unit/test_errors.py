"""The verdict table says one thing about each verdict, and the exit code follows the fixed order."""

from __future__ import annotations

import itertools

import pytest

from harness import errors
from harness.errors import EXIT_ORDER, VERDICTS, HarnessError, Verdict, worst_exit

# harness.md, section 3, by hand.
EXPECTED = {
    0: "PASS IMPROVED SKIP WAIVED UNCALIBRATED UNMEASURABLE INCONCLUSIVE",
    1: "FAIL REGRESSION IMPLAUSIBLE FLAKY TIMEOUT CRASH OOM WAIVER_EXPIRED WAIVER_UNUSED",
    2: "USAGE CONFIG",
    3: "MISSING KILLED DISAGREE UNREADABLE",
    4: "HOST_OOM GPU_HANG DISK SHM PIDS DIRTY_GPU PULL INFRA",
    5: "NO_BASELINE STALE_BASELINE",
    130: "INTERRUPTED",
}
JUNIT = {1: "failure", 2: "error", 3: "error", 4: "error", 5: "error", 130: "error"}


def test_every_verdict_has_the_exit_code_of_the_specification() -> None:
    """No verdict is left out and none has two codes."""
    expected = {Verdict(name): code for code, names in EXPECTED.items() for name in names.split()}
    assert {verdict: rule.exit_code for verdict, rule in VERDICTS.items()} == expected
    assert set(VERDICTS) == set(Verdict)


def test_junit_element_follows_the_exit_code() -> None:
    """Product problems are failures, problems of evidence, baseline or machine are errors, success is neither."""
    for verdict, rule in VERDICTS.items():
        expected = JUNIT.get(rule.exit_code)
        assert rule.junit == expected if expected else rule.junit in ("none", "skipped"), verdict
    assert {v for v, rule in VERDICTS.items() if rule.junit == "none"} == {Verdict.PASS, Verdict.IMPROVED}


def test_what_is_stricter_elsewhere_is_red_there() -> None:
    """IMPROVED is a failure on main, INCONCLUSIVE an error beyond its budget; nothing else depends on circumstance."""
    stricter = {verdict: rule.stricter for verdict, rule in VERDICTS.items() if rule.stricter}
    assert stricter == {Verdict.IMPROVED: (1, "failure"), Verdict.INCONCLUSIVE: (3, "error")}


def test_ranks_are_unique_and_agree_with_the_exit_order() -> None:
    """Sorting by rank lists the finding that decides the exit code first."""
    by_rank = sorted(VERDICTS.values(), key=lambda rule: rule.rank)
    assert [rule.rank for rule in by_rank] == list(range(len(Verdict)))
    assert [code for code, _ in itertools.groupby(rule.exit_code for rule in by_rank)] == [130, *EXIT_ORDER, 0]


def test_every_verdict_is_explained_in_one_line() -> None:
    """A person who meets a verdict is told what it means and what to do."""
    for verdict, rule in VERDICTS.items():
        for text in (rule.meaning, rule.advice):
            assert text, verdict
            assert "\n" not in text, verdict


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param([0, 0], 0, id="all-good"),
        pytest.param([], 3, id="nothing-judged"),
        pytest.param([4, 5, 1, 3, 2, 0], 2, id="usage-first"),
        pytest.param([4, 5, 1, 3], 3, id="evidence-before-red"),
        pytest.param([4, 5, 1], 1, id="red-before-baseline"),
        pytest.param([4, 5, 0], 5, id="baseline-before-machine"),
        pytest.param([0, 4], 4, id="machine-before-good"),
        pytest.param([2, 130], 130, id="interrupted-above-all"),
    ],
)
def test_worst_exit(codes: list[int], expected: int) -> None:
    """The process exits with the worst code, and having judged nothing is not success."""
    assert worst_exit(codes) == expected


def test_worst_exit_refuses_an_unknown_code() -> None:
    """137 is a death to be classified, not an exit code of ours."""
    with pytest.raises(ValueError, match=r"\[137\] are not in the table"):
        worst_exit([0, 137])


def test_error_message_has_three_parts() -> None:
    """What, expected, what next; a part that is not given leaves no trace."""
    assert str(errors.UsageError("no x", "y", "say y")) == "no x; expected y; say y"
    assert str(errors.InfraError("no x")) == "no x"


def test_every_error_kind_has_an_exit_code_of_the_table() -> None:
    """Each subclass takes its code from its verdict."""
    kinds = HarnessError.__subclasses__()
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind("x").exit_code == VERDICTS[kind.verdict].exit_code != 0
