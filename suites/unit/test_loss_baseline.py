"""What the recorded CPU curves say of their own gate: harmless changes stay green, another curve is red.

Pure arithmetic on baselines/cpu/loss.json. A nudged run is judged with a band from which it was left out, so its seed
is one that the band has not seen; a variant (threads, instruction set) with the band of the nudged runs alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import bands, baselines
from harness.baselines import LossRun

ROOT = Path(__file__).resolve().parents[2]
RECORDED = baselines.load_loss(ROOT / "baselines/cpu/loss.json", "cpu")
CASES = sorted({row.case for row in RECORDED.rows})


def judge(measured: LossRun, case: str, left_out: LossRun | None = None) -> bands.Comparison:
    """A recorded run in place of `case`, with the band of its nudged runs but one."""
    rows = RECORDED.of_case(case)
    reference = baselines.reference_run(rows)
    assert reference is not None
    spread = [row for row in rows if row.nudge and row is not left_out]
    curves = [bands.Curve.of_run(row) for row in spread]
    counted = bands.counted(reference, spread)
    return bands.compare(bands.Curve.of_run(measured), bands.Curve.of_run(reference), curves, counted)


@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in CASES])
def test_unseen_nudges_stay_green(case: str) -> None:
    """Every nudged run of the case: loss, gradient norm, digests and counts are inside of the others' band."""
    nudged = [row for row in RECORDED.of_case(case) if row.nudge]
    assert len(nudged) >= 5
    assert all(row.digests for row in nudged)
    red = {row.nudge: found.first.message for row in nudged if (found := judge(row, case, row)).first}
    assert not red, f"{len(red)} of {len(nudged)} unseen nudges are red: {red}"


@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in CASES])
def test_variants_have_the_bits_of_run_0(case: str) -> None:
    """Threads and instruction set: the arithmetic on a CPU depends on neither, so not a bit differs."""
    rows = RECORDED.of_case(case)
    reference = baselines.reference_run(rows)
    assert reference is not None
    for row in rows:
        if row.variant:
            assert (row.loss, row.grad_norm) == (reference.loss, reference.grad_norm), row.variant
            assert (row.saturated, row.nan) == (reference.saturated, reference.nan), row.variant


@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in CASES])
def test_another_curve_is_red(case: str) -> None:
    """The curve of any other format or recipe in its place, as configured: red, whatever it calls itself."""
    for other in CASES:
        measured = baselines.reference_run(RECORDED.of_case(other))
        assert measured is not None
        if other != case:
            assert not judge(measured, case).ok, f"{other} in place of {case} is green"
