"""The loss gate: windows, K, floor, digests, pairs, and that a NaN never passes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness import bands
from harness.bands import Curve
from suites.unit.built_evidence import DIGESTS, STEPS, loss_baseline_rows, loss_run, series


def curve(wobble: float = 0.0, **changed: object) -> Curve:
    return dataclasses.replace(Curve.of_run(loss_run(0, wobble)), **changed)  # type: ignore[arg-type]


def judge(measured: Curve) -> bands.Comparison:
    reference, *spread = (Curve.of_run(run) for run in loss_baseline_rows())
    return bands.compare(measured, reference, spread, nudged_runs=5)


def with_value(values: dict[int, float], step: int, value: float) -> dict[int, float]:
    return {**values, step: value}


def test_the_recorded_curve_passes() -> None:
    """Run 0 against its own baseline: no finding, and a row for every window, the tail and the digests."""
    comparison = judge(curve())
    assert comparison.ok
    assert [row.window for row in comparison.rows if row.metric == "loss"] == [
        "step 1",
        "steps 2-5",
        "steps 6-10",
        "steps 11-20",
        "steps 21-50",
        "steps 51-100",
        "mean of the last 20",
    ]


@pytest.mark.parametrize(
    ("runs", "factor"),
    [(0, 10), (4, 10), (5, 5), (9, 5), (10, 3), (50, 3)],
    ids=["bands-0", "bands-4", "bands-5", "bands-9", "bands-10", "bands-50"],
)
def test_factor(runs: int, factor: int) -> None:
    """K is 10 below 5 nudged runs, 5 from 5 to 9, 3 from 10 on."""
    assert bands.factor(runs) == factor


def test_a_run_that_is_identical_is_not_counted() -> None:
    """A nudge that rounding removed again gives run 0 once more: five of them are no five samples, K stays 10."""
    assert bands.counted(loss_run(), loss_baseline_rows()) == 5
    assert bands.counted(loss_run(), [loss_run(nudge) for nudge in range(6)]) == 0
    assert bands.counted(loss_run(), [loss_run(variant="threads=2", wobble=1e-5)]) == 0


def test_limit_is_k_times_the_largest_spread() -> None:
    """The widest nudged run is 5e-5 x step/100 away and K is 5: 2.5e-4 in window 51-100, in window 1 the floor."""
    reference, *spread = (Curve.of_run(run) for run in loss_baseline_rows())
    limits = bands.limits("loss", reference, spread, nudged_runs=5)
    assert limits.windows[(51, 100)] == pytest.approx(5 * 5e-5, rel=1e-6)
    assert limits.windows[(21, 50)] == pytest.approx(5 * 2.5e-5, rel=1e-6)
    assert limits.windows[(1, 1)] == bands.FLOOR


@pytest.mark.parametrize(
    ("wobble", "ok"), [(2.4e-4, True), (2.6e-4, False)], ids=["bands-just-inside", "bands-just-outside"]
)
def test_edges_of_a_band(wobble: float, ok: bool) -> None:
    """2.4e-4 at the last step is inside of 2.5e-4, 2.6e-4 is outside: window and first step are named."""
    comparison = judge(curve(wobble))
    assert comparison.ok is ok
    if not ok:
        assert comparison.first is not None
        assert comparison.first.layer == "windows"
        assert comparison.first.step == 20  # the first window that it leaves is 11-20: 5.2e-5 against 5 x 1e-5
        assert "5.20e-05 against 5.00e-05 allowed" in comparison.first.message


@pytest.mark.parametrize("metric", ["loss", "grad_norm"], ids=["bands-loss", "bands-norm"])
def test_each_series_has_its_bands(metric: str) -> None:
    """A difference in one series alone is red and named: the gradient norm is judged like the loss."""
    first = judge(curve(**{metric: getattr(curve(1e-3), metric)})).first
    assert first is not None
    assert (first.layer, first.metric) == ("windows", metric)


def test_golden_losses_of_torchtitan() -> None:
    """pytorch/torchtitan#2156: 8.040756225585938 against 8.040755271911621 is 1.2e-7, below the floor of every band."""
    measured = curve(loss=with_value(dict(enumerate(series(), 1)), 1, 8.040756225585938))
    reference = curve(loss=with_value(dict(enumerate(series(), 1)), 1, 8.040755271911621))
    assert bands.compare(measured, reference, [], 0).ok
    assert measured.loss[1] != reference.loss[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["bands-nan", "bands-inf", "bands-minus-inf"])
@pytest.mark.parametrize("step", [1, 37, STEPS], ids=["bands-first", "bands-middle", "bands-last"])
@pytest.mark.parametrize("metric", ["loss", "grad_norm"], ids=["bands-loss", "bands-norm"])
def test_a_value_that_is_not_finite_fails(metric: str, step: int, value: float) -> None:
    """NaN or infinity at any step of either series is red, and the step is named."""
    measured = curve(**{metric: with_value(dict(getattr(curve(), metric)), step, value)})
    first = judge(measured).first
    assert first is not None
    assert (first.layer, first.step, first.metric) == ("completeness", step, metric)


def test_a_nan_in_the_recorded_spread_lets_nothing_pass() -> None:
    """A nudged run that diverged gives a NaN limit: nothing is `<=` it, so the gate is red and not open."""
    reference, *spread = (Curve.of_run(run) for run in loss_baseline_rows())
    broken = dataclasses.replace(spread[0], loss=with_value(dict(spread[0].loss), 60, math.nan))
    assert not bands.compare(curve(), reference, [broken], 1).ok


def test_fewer_steps_than_the_baseline() -> None:
    """A curve that stops at step 99, or lacks step 40, is red with the missing step named."""
    loss = dict(curve().loss)
    for missing in (STEPS, 40):
        first = judge(curve(loss={step: value for step, value in loss.items() if step != missing})).first
        assert first is not None
        assert (first.layer, first.step) == ("completeness", missing)


def test_no_steps_at_all() -> None:
    """An empty curve is red, never vacuously inside."""
    assert not judge(Curve({}, {})).ok


def test_a_curve_shifted_by_one_step() -> None:
    """Dropping the first step and renumbering is red: every window compares with the wrong step."""
    values = [*series()[1:], series()[-1]]
    assert not judge(curve(loss=dict(enumerate(values, 1)))).ok


def changed_digest(step: str, index: int, factor: float) -> dict[int, dict[str, list[float]]]:
    digests = {int(number): {name: list(d) for name, d in named.items()} for number, named in DIGESTS.items()}
    digests[int(step)]["layers.0.w"][index] *= factor
    return digests


@pytest.mark.parametrize(
    ("step", "index", "factor", "ok"),
    [
        ("1", 0, 1.0003, True),
        ("1", 0, 1.02, False),
        ("1", 0, 0.98, False),
        ("1", 2, 1.02, False),
        ("1", 3, 1.02, False),
        ("2", 0, 1.02, True),
        ("3", 0, 1.06, False),
        ("1", 0, math.nan, False),
    ],
    ids=[
        "bands-harmless",
        "bands-weight-gradient-times-1.02",
        "bands-less",
        "bands-dot1",
        "bands-dot2",
        "bands-step-2",
        "bands-step-3",
        "bands-nan-digest",
    ],
)
def test_digests(step: str, index: int, factor: float, ok: bool) -> None:
    """A weight gradient x 1.02 shows in the digest of step 1 and in no window; steps 2 and 3 are red beyond 5e-2."""
    comparison = judge(curve(digests=changed_digest(step, index, factor)))
    assert comparison.ok is ok
    if not ok:
        assert comparison.first is not None
        assert (comparison.first.layer, comparison.first.step) == ("digests", int(step))
        assert comparison.first.metric == "layers.0.w"


def test_a_parameter_without_its_digest() -> None:
    """A parameter that lost its digest, one that is new, and no digests at all: each is red."""
    full = {int(step): dict(named) for step, named in DIGESTS.items()}
    lost = {**full, 1: {"head.w": full[1]["head.w"]}}
    new = {**full, 1: {**full[1], "extra.w": [1.0, 0.0, 0.0, 0.0]}}
    for digests in (lost, new, {}):
        assert not judge(curve(digests=digests)).ok


def test_digest_explains_the_windows() -> None:
    """When digest and windows both fire, the digest is named first: it is the cause."""
    first = judge(curve(0.01, digests=changed_digest("1", 0, 1.02))).first
    assert first is not None
    assert first.layer == "digests"


def nudged_digests(factor: float) -> list[Curve]:
    """Five nudged runs whose first dot of one parameter is up to `factor` x its norm away, the others at run 0."""
    runs = []
    for i in range(1, 6):
        digests = {int(number): {name: list(d) for name, d in named.items()} for number, named in DIGESTS.items()}
        digests[1]["layers.0.w"][2] += factor * digests[1]["layers.0.w"][0] * i / 5
        runs.append(curve(digests=digests))
    return runs


@pytest.mark.parametrize(
    ("dot", "norm", "ok"),
    [(0.049, 0.0, True), (0.051, 0.0, False), (0.0, 0.0019, True), (0.049, 0.0021, False), (math.nan, 0.0, False)],
    ids=["bands-dot-inside", "bands-dot-outside", "bands-norm-inside", "bands-norm-outside", "bands-dot-nan"],
)
def test_digests_have_bands_too(dot: float, norm: float, ok: bool) -> None:
    """Five nudged runs move one dot by up to 1 % of the norm: 5 % are allowed there, elsewhere the floor of 2e-3."""
    digests = {int(number): {name: list(d) for name, d in named.items()} for number, named in DIGESTS.items()}
    scale = digests[1]["layers.0.w"][0]
    digests[1]["layers.0.w"][2] += dot * scale
    digests[1]["layers.0.w"][0] += norm * scale
    comparison = bands.compare(curve(digests=digests), curve(), nudged_digests(0.01), 5)
    assert comparison.ok is ok
    limits = bands.digest_limits(1, curve(), nudged_digests(0.01))
    assert limits["layers.0.w"] == pytest.approx({"norm": 2e-3, "dot1": 0.05, "dot2": 0.05})
    assert limits["head.w"] == {"norm": 2e-3, "dot1": 2e-3, "dot2": 2e-3}


def test_a_parameter_that_happened_to_hold_still() -> None:
    """Two of three parameters move by 1 % in recorded runs; the third is held to what is typical, not to nothing."""
    still = {step: {name: [1.0, 0.0, 0.5, 0.5] for name in ("a", "b", "c")} for step in (1, 2, 3)}
    moved = [1.0, 0.0, 0.51, 0.5]
    spread = [curve(digests={**still, 1: {"a": moved, "b": moved, "c": still[1]["c"]}})]
    limits = bands.digest_limits(1, curve(digests=still), spread)
    assert {name: parts["dot2"] for name, parts in limits.items()} == pytest.approx(dict.fromkeys("abc", 0.1))


def test_digests_of_run_0_are_no_samples() -> None:
    """Nudged runs with run 0's digests, or none, leave the floor: five times nothing would be nothing."""
    for digests in (curve().digests, {}):
        spread = [curve(wobble, digests=digests) for wobble in (1e-5, 2e-5)]
        assert bands.digest_limits(1, curve(), spread)["head.w"]["norm"] == 2e-3


def test_a_nan_in_recorded_digests_lets_nothing_pass() -> None:
    """Nor does a recorded run that lacks a parameter."""
    broken = {1: {"layers.0.w": [2.0, 0.0, math.nan, 0.0], "head.w": [0.5, 0.0, 0.1, 0.2]}}
    lost = {1: {"head.w": [0.5, 0.0, 0.1, 0.2]}}
    for digests in (broken, lost):
        comparison = bands.compare(curve(), curve(), [curve(digests=digests)], 1)
        assert comparison.first is not None
        assert comparison.first.layer == "digests"


@pytest.mark.parametrize(
    ("count", "ok"), [(11, True), (9, True), (100, False), (8, False), (0, False)], ids="bands-counts-{}".format
)
def test_saturation(count: int, ok: bool) -> None:
    """A tenth more or less than the recorded 10 saturated codes a step is green; ten times as many or none is red."""
    comparison = judge(curve(saturated=dict.fromkeys(range(1, STEPS + 1), count)))
    assert comparison.ok is ok
    if not ok:
        assert comparison.first is not None
        assert (comparison.first.layer, comparison.first.step) == ("saturation", 1)


def test_nan_codes() -> None:
    """One NaN code where the baseline has none is red."""
    first = judge(curve(nan={7: 1})).first
    assert first is not None
    assert (first.layer, first.step) == ("saturation", 7)


def test_a_shared_curve() -> None:
    """Another platform's runs, K = 10: ten times their spread of 5e-5 is inside, more is not; digests do not count."""
    reference, *spread = (Curve.of_run(run) for run in loss_baseline_rows())
    inside = bands.compare_shared(curve(4.9e-4, digests={}), reference, spread)
    assert inside.ok
    assert {row.layer for row in inside.rows} == {"shared"}
    outside = bands.compare_shared(curve(5.1e-4), reference, spread)
    assert outside.first is not None
    assert (outside.first.layer, outside.first.metric) == ("shared", "loss")
    assert not bands.compare_shared(curve(loss={}), reference, spread).ok


def scaled(values: dict[int, float], first: int, last: int, factor: float) -> Curve:
    return curve(loss={step: value * (factor if first <= step <= last else 1) for step, value in values.items()})


@pytest.mark.parametrize(
    ("first", "last", "factor", "ok"),
    [
        (1, 100, 1.0015, True),
        (21, 40, 1.0025, False),
        (21, 40, 0.9975, False),
        (81, 100, 1.006, False),
        (30, 30, math.nan, False),
    ],
    ids=["bands-pair-inside", "bands-pair-above", "bands-pair-below", "bands-pair-tail", "bands-pair-nan"],
)
def test_paired(first: int, last: int, factor: float, ok: bool) -> None:
    """FP8 may be 2e-3 from bf16 in the mean log ratio of each 20 steps, on either side; NaN is outside."""
    base = dict(curve().loss)
    assert bands.compare_paired(scaled(base, first, last, factor), curve()).ok is ok


def test_paired_tail() -> None:
    """The means of the last 20 steps may differ by 5e-3: 4e-3 holds there, 6e-3 does not."""
    base = dict(curve().loss)
    for factor, ok in ((1.004, True), (1.006, False)):
        rows = bands.compare_paired(scaled(base, 81, 100, factor), curve()).rows
        assert [row.ok for row in rows if row.window == "mean of the last 20"] == [ok]


def test_paired_with_noise() -> None:
    """Recorded runs that part by 1e-3 in steps 21 to 40 widen the limit there, K times, and nowhere else."""
    base = dict(curve().loss)
    noisy = scaled(base, 21, 40, 1.001)
    for count, inside, outside in ((10, 1.0029, 1.0031), (5, 1.0049, 1.0051)):
        recorded = [(curve(), [noisy, curve()], count), (curve(), [], 0)]
        for factor, ok in ((inside, True), (outside, False)):
            assert bands.compare_paired(scaled(base, 21, 40, factor), curve(), recorded).ok is ok, (count, factor)
        assert not bands.compare_paired(scaled(base, 41, 60, 1.0025), curve(), recorded).ok
    wild = [(curve(), [scaled(base, 1, 100, 1.02)], 10)]
    assert bands.compare_paired(scaled(base, 21, 40, 1.0099), curve(), wild).ok
    assert not bands.compare_paired(scaled(base, 21, 40, 1.0101), curve(), wild).ok
    assert not bands.compare_paired(scaled(base, 81, 100, 1.0101), curve(), wild).ok
    broken = [(curve(), [curve(loss={1: math.nan})], 10)]
    assert not bands.compare_paired(curve(), curve(), broken).ok


def test_paired_without_steps() -> None:
    """Two empty curves are no agreement."""
    assert not bands.compare_paired(Curve({}, {}), Curve({}, {})).ok


def test_worst_is_not_max() -> None:
    """Python's max() drops a NaN that comes second; worst() never does."""
    assert max([1.0, math.nan]) == 1.0
    assert math.isnan(bands.worst([1.0, math.nan]))
    assert math.isnan(bands.worst([math.nan, 1.0]))


def test_a_reference_of_zero_opens_no_band() -> None:
    """A nudged run that is infinitely far from run 0, relatively, makes a limit that nothing passes."""
    zero = bands.Curve(loss={1: 0.0}, grad_norm={1: 1.0})
    other = bands.Curve(loss={1: 1.0}, grad_norm={1: 1.0})
    assert math.isnan(bands.limits("loss", zero, [other], 1).windows[1, 1])
