"""Loss gate: step-window bands around a recorded curve.

Why bands and not a tolerance. Training is chaotic: one last bit in one weight is a difference of 1e-6 at step 1 and of
1e-4 at step 100, and how fast it grows depends on the model. A flat tolerance is therefore too wide early, where real
faults show first, and too narrow late. So the baseline holds *raw runs*: run 0 as configured, runs 1..N with the last
mantissa bit of one in a thousand initial weights flipped (nudged), and variants of it (thread counts, instruction set).
How far those harmless runs move from run 0 in a window of steps is the noise of that window.

    limit(window) = max(5e-5, K * max over the other runs of difference(run, run 0, window))
    difference    = max over the window's steps of |x - r| / |r|          (windows 1, 2-5, 6-10, 11-20, 21-50, 51-100)
                  = |mean(x) - mean(r)| / |mean(r)| over the last 20      (the tail)
    K = 10 below 5 runs, 5 from 5 to 9, 3 from 10 on, counting nudged runs; few samples underestimate a maximum

Plain reruns are bit-identical on one machine: they would give a spread of zero and, counted, a smaller K. The same
holds for a nudged run that came out bit-identical to run 0 (a flipped last bit that bf16 rounds away again): it says
nothing, and is not counted. Where no run differs, the band is the floor.
The same rule judges the gradient norm. A fault that scales one weight gradient (x 1.02) shows in neither curve, so
per-parameter digests of the gradients (norm, mean, dot products with two seeded +-1 vectors) are compared first:

    limit(step, parameter, number) = max(2e-3 at step 1, 5e-2 at steps 2 and 3; K * noise)
    noise(parameter, number)       = largest difference of a nudged run in the three steps, at least the median
                                     parameter's

relative to the parameter's gradient norm, K as above by the runs whose digests differ from run 0. The two dots are two
samples of one thing and share their noise; the median keeps a parameter that by luck moved little in a few runs from
being held to that. A harmless change of
roundings turns a gradient a little and hardly changes its length: nudged runs of the dense model differ by 3e-4 in the
norm of a typical parameter (2e-3 at most) and by 1e-2 in its dots (3e-2 at most), of the model with experts ten times
that. So the norms find what scales a gradient, the dots what puts another in its place.

Counts of saturated codes are held from both sides: a maximum that is too small (224 for 240) leaves none at +-MAX.

Layers are judged in the order of LAYERS and the first that fired is named, with its first step: a digest that moved
explains a curve that moved, never the other way round. Every comparison asks `difference <= limit` and takes anything
else as red, so a NaN fails. 100 steps cannot show late divergence; the report says so.

Not here: where runs are stored (baselines.py), which verdict follows (gate.py), determinism (a test of the loss suite).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.baselines import LossEvidence, LossRun

#: (first step, last step), both included.
WINDOWS: tuple[tuple[int, int], ...] = ((1, 1), (2, 5), (6, 10), (11, 20), (21, 50), (51, 100))
#: Steps in the mean at the end of a curve.
TAIL_STEPS = 20
#: Relative difference that is never red: below it two correct CPUs may differ at step 1 (1e-5) and rounding dominates.
FLOOR = 5e-5
#: (fewest nudged runs, K). The first row whose count is reached decides.
K_BY_RUNS: tuple[tuple[int, int], ...] = ((10, 3), (5, 5), (0, 10))
#: step -> lowest limit of a digest, relative to the parameter's gradient norm.
DIGEST_LIMITS: dict[int, float] = {1: 2e-3, 2: 5e-2, 3: 5e-2}
#: FP8 against bf16 of the same model, data and platform, at least: |mean log ratio| in each window of so many steps ...
PAIRED_WINDOW_STEPS = 20
PAIRED_WINDOW_LIMIT = 2e-3
#: ... and relative difference of the means of the last 20 steps.
PAIRED_TAIL_LIMIT = 5e-3
#: What the noise of recorded runs may widen either to: 8.1e-3 is the widest of those there are (dsv3-debug, H200). A
#: curve whose harmless runs part further shows no fault of FP8, and a faulty one that was recorded parts further.
PAIRED_CAP = 1e-2
#: Saturated elements over the whole run may leave the recorded runs by this share, up or down. Nudged runs of tiny
#: models differ by less than 1 %, OCP from FNUZ by a quarter; a wrong maximum multiplies the counts or leaves none.
SATURATION_SHARE = 0.1
SATURATION_FLOOR = 16

#: Order of judgement. `completeness` (steps there, values finite) comes first: nothing else can be computed without it.
LAYERS: tuple[str, ...] = ("completeness", "digests", "windows", "tail", "saturation", "paired", "shared")

Digest = Sequence[float]
"""norm, mean, dot with the first and dot with the second seeded +-1 vector, all float64."""


@dataclass(frozen=True)
class Curve:
    """One training run as the gate sees it. Keys are step numbers from 1; nothing is assumed complete or finite."""

    loss: Mapping[int, float]
    grad_norm: Mapping[int, float]
    saturated: Mapping[int, int] = field(default_factory=dict)
    nan: Mapping[int, int] = field(default_factory=dict)
    digests: Mapping[int, Mapping[str, Digest]] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run: LossRun) -> Curve:
        """A recorded run; its series are complete and start at step 1."""
        return cls(
            loss=dict(enumerate(run.loss, 1)),
            grad_norm=dict(enumerate(run.grad_norm, 1)),
            saturated=dict(enumerate(run.saturated, 1)),
            nan=dict(enumerate(run.nan, 1)),
            digests={int(step): parameters for step, parameters in run.digests.items()},
        )

    @classmethod
    def of_evidence(cls, evidence: LossEvidence) -> Curve:
        """What a run left, by the step numbers in its file: a gap stays a gap, of a repeated step the last counts."""
        return cls(
            loss={step.step: step.loss for step in evidence.steps},
            grad_norm={step.step: step.grad_norm for step in evidence.steps},
            saturated={step.step: step.saturated for step in evidence.steps},
            nan={step.step: step.nan for step in evidence.steps},
            digests={int(step): parameters for step, parameters in evidence.digests.items() if step.isdigit()},
        )

    @property
    def last_step(self) -> int:
        return max(self.loss, default=0)


@dataclass(frozen=True)
class Finding:
    """One limit that was exceeded: where, by how much, and against what."""

    layer: str
    metric: str
    step: int
    measured: float
    allowed: float
    message: str


@dataclass(frozen=True)
class Row:
    """One line of the table that the report prints: measured against allowed, whether or not it fired."""

    layer: str
    metric: str
    window: str
    measured: float
    allowed: float
    ok: bool


@dataclass(frozen=True)
class Comparison:
    """Everything the gate learnt about one curve. `findings` is in layer order, so the first one explains the rest."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    def joined(self, other: Comparison) -> Comparison:
        """This comparison with another's rows and findings, in layer order again."""
        findings = sorted((*self.findings, *other.findings), key=lambda f: LAYERS.index(f.layer))
        return Comparison((*self.rows, *other.rows), tuple(findings), (*self.notes, *other.notes))


def factor(nudged_runs: int) -> int:
    """K for this many nudged runs."""
    return next(k for fewest, k in K_BY_RUNS if nudged_runs >= fewest)


def clipped_windows(last_step: int) -> tuple[tuple[int, int], ...]:
    """The windows that a curve of `last_step` steps reaches, the last one cut short or drawn out to its end."""
    windows = [(first, min(last, last_step)) for first, last in WINDOWS if first <= last_step]
    if windows and windows[-1][1] < last_step:
        windows.append((windows[-1][1] + 1, last_step))
    return tuple(windows)


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; NaN where either is not finite, infinite where only the reference is zero."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.nan
    if reference == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return abs(value - reference) / abs(reference)


def worst(values: Iterable[float]) -> float:
    """The largest value, or NaN if any is NaN. Python's max() answers by position there: max(1, nan) is 1."""
    largest = 0.0
    for value in values:
        if math.isnan(value):
            return math.nan
        largest = max(largest, value)
    return largest


def tail_mean(series: Mapping[int, float], last_step: int) -> float:
    """Mean of the last 20 steps up to `last_step`; NaN where one is missing."""
    steps = range(max(1, last_step - TAIL_STEPS + 1), last_step + 1)
    return math.fsum(series.get(step, math.nan) for step in steps) / len(steps) if len(steps) else math.nan


def window_difference(series: Mapping[int, float], reference: Mapping[int, float], first: int, last: int) -> float:
    """Largest relative difference in a window of steps; a missing step is NaN."""
    return worst(relative(series.get(step, math.nan), reference.get(step, math.nan)) for step in range(first, last + 1))


@dataclass(frozen=True)
class Limits:
    """What one metric may differ from run 0, per window and in the tail, with the noise it was computed from."""

    windows: Mapping[tuple[int, int], float]
    tail: float
    factor: int


def limits(metric: str, reference: Curve, spread: Sequence[Curve], nudged_runs: int) -> Limits:
    """The bands of one metric.

    Args:
        metric: "loss" or "grad_norm".
        reference: run 0.
        spread: every other recorded run of the same configuration, nudged or variant.
        nudged_runs: how many of them are nudged; decides K.
    """
    k = factor(nudged_runs)
    base: Mapping[int, float] = getattr(reference, metric)
    others: list[Mapping[int, float]] = [getattr(run, metric) for run in spread]
    last_step = reference.last_step
    base_tail = tail_mean(base, last_step)

    def limit(differences: Iterable[float]) -> float:
        spread_of_window = worst(differences)
        # A recorded run that diverged, or left a reference of zero, is no harmless run: a NaN limit lets nothing pass.
        return max(FLOOR, k * spread_of_window) if math.isfinite(spread_of_window) else math.nan

    return Limits(
        windows={
            window: limit(window_difference(other, base, *window) for other in others)
            for window in clipped_windows(last_step)
        },
        tail=limit(relative(tail_mean(other, last_step), base_tail) for other in others),
        factor=k,
    )


def counted(reference: LossRun, runs: Sequence[LossRun]) -> int:
    """How many nudged runs count for K: those that differ from run 0 in a loss or a gradient norm."""
    return sum(run.nudge > 0 and (run.loss, run.grad_norm) != (reference.loss, reference.grad_norm) for run in runs)


def compare(measured: Curve, reference: Curve, spread: Sequence[Curve], nudged_runs: int) -> Comparison:
    """Judge one curve against run 0 and the recorded spread: completeness, digests, windows, tail, saturation."""
    result = _completeness(measured, reference)
    result = result.joined(_digests(measured, reference, spread))
    for metric in ("loss", "grad_norm"):
        bands = limits(metric, reference, spread, nudged_runs)
        result = result.joined(_windows(metric, measured, reference, bands))
    return result.joined(_saturation(measured, reference, spread, nudged_runs))


def compare_shared(measured: Curve, reference: Curve, spread: Sequence[Curve]) -> Comparison:
    """A curve of this platform against another's runs of the same configuration: a second opinion.

    No run of this platform is among them, so K is the widest there is. Digests are not compared: the products of
    another platform round each by itself.
    """
    result = Comparison((), ())
    for metric in ("loss", "grad_norm"):
        result = result.joined(_windows(metric, measured, reference, limits(metric, reference, spread, 0)))
    return Comparison(
        tuple(replace(row, layer="shared") for row in result.rows),
        tuple(replace(finding, layer="shared") for finding in result.findings),
    )


def _completeness(measured: Curve, reference: Curve) -> Comparison:
    findings: list[Finding] = []
    for metric in ("loss", "grad_norm"):
        series: Mapping[int, float] = getattr(measured, metric)
        steps = range(1, reference.last_step + 1)
        missing = [step for step in steps if step not in series]
        broken = [step for step in sorted(series) if not math.isfinite(series[step])]
        if missing:
            what = f"{metric}: step {missing[0]} is missing ({len(missing)} of {len(steps)} steps of the baseline)"
            findings.append(Finding("completeness", metric, missing[0], len(steps) - len(missing), len(steps), what))
        if broken:
            what = f"{metric} is {series[broken[0]]} at step {broken[0]}"
            findings.append(Finding("completeness", metric, broken[0], series[broken[0]], math.nan, what))
    beyond = measured.last_step - reference.last_step
    notes = (f"{beyond} steps beyond the baseline's {reference.last_step} are not judged",) if beyond > 0 else ()
    findings.sort(key=lambda f: f.step)
    return Comparison((), tuple(findings), notes)


#: The numbers of a digest that are judged, by position. The mean is reported only: for a weight gradient it is a small
#: difference of large sums.
DIGEST_PARTS: dict[str, int] = {"norm": 0, "dot1": 2, "dot2": 3}


def digest_differences(digest: Digest, reference: Digest) -> dict[str, float]:
    """Differences of norm and dots, each relative to the reference's norm; NaN for what is no digest."""
    if len(digest) != 4 or len(reference) != 4:
        return dict.fromkeys(DIGEST_PARTS, math.nan)
    scale = abs(reference[0])
    differences: dict[str, float] = {}
    for part, index in DIGEST_PARTS.items():
        difference = abs(digest[index] - reference[index])
        if scale == 0.0:
            difference = 0.0 if difference == 0.0 else math.nan if math.isnan(difference) else math.inf
        differences[part] = difference / scale if scale else difference
    return differences


def digest_noise(reference: Curve, spread: Sequence[Curve]) -> tuple[Mapping[str, Mapping[str, float]], int]:
    """(parameter -> part -> how far recorded runs are from run 0, how many runs that is of).

    NaN, which lets nothing pass, where a recorded run lacks one of these digests or holds a NaN.
    """
    others = [run.digests for run in spread if run.digests and run.digests != reference.digests]
    noise: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for expected in reference.digests.values() for name in expected):
        seen = [
            digest_differences(other.get(step, {}).get(name, ()), expected[name])
            for other in others
            for step, expected in reference.digests.items()
            if name in expected
        ]
        dots = worst(one[part] for one in seen for part in ("dot1", "dot2"))
        noise[name] = {"norm": worst(one["norm"] for one in seen), "dot1": dots, "dot2": dots}
    typical = {part: _typical([one[part] for one in noise.values()]) for part in DIGEST_PARTS}
    held = {name: {part: worst((value, typical[part])) for part, value in one.items()} for name, one in noise.items()}
    return held, len(others)


def digest_limits(step: int, reference: Curve, spread: Sequence[Curve]) -> Mapping[str, Mapping[str, float]]:
    """parameter -> part -> what its digest at `step` may differ from run 0, by the recorded runs that have digests."""
    noise, runs = digest_noise(reference, spread)
    floor, k = DIGEST_LIMITS[step], factor(runs)
    return {
        name: {part: max(floor, k * value) if math.isfinite(value) else math.nan for part, value in noise[name].items()}
        for name in reference.digests.get(step, {})
    }


def _typical(values: Sequence[float]) -> float:
    """The median; NaN if any is."""
    return math.nan if not values or any(math.isnan(value) for value in values) else statistics.median_low(values)


def _digests(measured: Curve, reference: Curve, spread: Sequence[Curve]) -> Comparison:
    """One row a step: the number that used most of its limit. Finding: that number, its parameter and step."""
    rows: list[Row] = []
    findings: list[Finding] = []
    notes: list[str] = []
    for step, floor in DIGEST_LIMITS.items():
        expected = reference.digests.get(step)
        if expected is None:
            notes.append(f"the baseline has no gradient digests at step {step}")
            continue
        found = measured.digests.get(step, {})
        allowed = digest_limits(step, reference, spread)
        # (share of the limit, parameter, part, difference, limit) of the worst; NaN is worse than any number.
        top = (-1.0, "", "norm", 0.0, floor)
        for name in sorted({*expected, *found}):
            if name not in expected or name not in found:
                part = "missing" if name in expected else "not in the baseline"
                differences = {part: math.nan}
            else:
                differences = digest_differences(found[name], expected[name])
            for part, value in differences.items():
                limit = allowed.get(name, {}).get(part, floor)
                share = value / limit
                if not math.isnan(top[0]) and not share <= top[0]:
                    top = (share, name, part, value, limit)
        share, name, part, value, limit = top
        ok = value <= limit
        rows.append(Row("digests", "gradient digest", f"step {step}", value, limit, ok))
        if not ok:
            what = f"gradient digest of {name} ({part}) at step {step}: {_against(value, limit)}"
            findings.append(Finding("digests", name, step, value, limit, what))
    return Comparison(tuple(rows), tuple(findings), tuple(notes))


def _windows(metric: str, measured: Curve, reference: Curve, bands: Limits) -> Comparison:
    series: Mapping[int, float] = getattr(measured, metric)
    base: Mapping[int, float] = getattr(reference, metric)
    rows: list[Row] = []
    findings: list[Finding] = []
    for (first, last), allowed in bands.windows.items():
        value = window_difference(series, base, first, last)
        ok = value <= allowed
        name = f"step {first}" if first == last else f"steps {first}-{last}"
        rows.append(Row("windows", metric, name, value, allowed, ok))
        if not ok:
            step = next(
                step
                for step in range(first, last + 1)
                if not (relative(series.get(step, math.nan), base.get(step, math.nan)) <= allowed)
            )
            what = f"{metric} first leaves its band at step {step} ({name}): {_against(value, allowed)}"
            findings.append(Finding("windows", metric, step, value, allowed, what))
    last_step = reference.last_step
    value = relative(tail_mean(series, last_step), tail_mean(base, last_step))
    ok = value <= bands.tail
    tail_name = f"mean of the last {min(TAIL_STEPS, last_step)}"
    rows.append(Row("tail", metric, tail_name, value, bands.tail, ok))
    if not ok:
        what = f"{metric}, {tail_name} steps: {_against(value, bands.tail)}"
        findings.append(Finding("tail", metric, max(1, last_step - TAIL_STEPS + 1), value, bands.tail, what))
    return Comparison(tuple(rows), tuple(findings))


def _saturation(measured: Curve, reference: Curve, spread: Sequence[Curve], nudged_runs: int) -> Comparison:
    rows: list[Row] = []
    findings: list[Finding] = []
    recorded = [sum(run.saturated.values()) for run in (reference, *spread)]
    total = sum(measured.saturated.values())
    smallest, largest = min(recorded), max(recorded)
    margin = max(factor(nudged_runs) * (largest - smallest), SATURATION_SHARE * largest, SATURATION_FLOOR)
    lowest, allowed = max(0.0, smallest - margin), largest + margin
    ok = lowest <= total <= allowed
    rows.append(Row("saturation", "saturated elements", "whole run", total, allowed, ok))
    if not ok:
        counts, known = measured.saturated, reference.saturated
        step = next((s for s in sorted(counts) if counts[s] != known.get(s, 0)), 1)
        what = f"{total} saturated elements over the run against {lowest:.0f} to {allowed:.0f} allowed"
        told = f"{what} (recorded: {smallest} to {largest})"
        findings.append(Finding("saturation", "saturated elements", step, total, allowed, told))
    poisoned = [step for step in sorted(measured.nan) if measured.nan[step] > reference.nan.get(step, 0)]
    nans = sum(measured.nan.values())
    rows.append(Row("saturation", "NaN elements", "whole run", nans, sum(reference.nan.values()), not poisoned))
    if poisoned:
        what = f"{measured.nan[poisoned[0]]} NaN elements at step {poisoned[0]}, none in the baseline there"
        findings.append(Finding("saturation", "NaN elements", poisoned[0], nans, 0.0, what))
    return Comparison(tuple(rows), tuple(findings))


Recorded = tuple[Curve, Sequence[Curve], int]
"""Run 0 of a curve, the other runs that were recorded of it, and how many of those count for K."""


def recorded(reference: LossRun, runs: Sequence[LossRun]) -> Recorded:
    """The runs of a curve, of which `reference` is run 0."""
    others = [Curve.of_run(run) for run in runs if run is not reference]
    return Curve.of_run(reference), others, counted(reference, runs)


def compare_paired(fp8: Curve, bf16: Curve, recorded: Sequence[Recorded] = ()) -> Comparison:
    """FP8 against bf16 of the same run: mean log ratio of the loss per 20 steps, and the means of the last 20.

    recorded: the runs of either curve, where there are some. limit = max(2e-3, K * largest of the same number between a
    recorded run and its run 0), and 5e-3 in the tail; at most 1e-2. Harmless runs of a model with experts are 2e-3
    apart by themselves. Without any it still judges, an uncalibrated platform too. Only common steps from 1 are looked
    at; a curve without steps is a finding.
    """
    last_step = max(fp8.last_step, bf16.last_step)
    if last_step == 0:
        what = "the FP8 and the bf16 curve have no steps; 1 or more are needed to pair them"
        return Comparison((), (Finding("paired", "loss", 1, math.nan, PAIRED_WINDOW_LIMIT, what),))
    rows: list[Row] = []
    findings: list[Finding] = []

    def judge(name: str, first: int, told: str, floor: float, number: Callable[[Curve, Curve], float]) -> None:
        noise = [factor(count) * number(run, reference) for reference, runs, count in recorded for run in runs]
        allowed = min(worst((floor, *noise)), PAIRED_CAP)
        value = number(fp8, bf16)
        ok = value <= allowed
        rows.append(Row("paired", "FP8 / bf16 loss", name, value, allowed, ok))
        if not ok:
            what = f"FP8 against bf16, {told}: {_against(value, allowed)}"
            findings.append(Finding("paired", "loss", first, value, allowed, what))

    for first in range(1, last_step + 1, PAIRED_WINDOW_STEPS):
        steps = range(first, min(first + PAIRED_WINDOW_STEPS - 1, last_step) + 1)
        name = f"steps {first}-{steps[-1]}"
        told = f"mean log ratio of the loss in {name}"
        judge(name, first, told, PAIRED_WINDOW_LIMIT, functools.partial(_mean_log_ratio, steps=steps))
    name = f"mean of the last {min(TAIL_STEPS, last_step)}"
    first = max(1, last_step - TAIL_STEPS + 1)
    judge(name, first, f"{name} losses", PAIRED_TAIL_LIMIT, functools.partial(_tail_difference, last_step=last_step))
    return Comparison(tuple(rows), tuple(findings))


def _mean_log_ratio(curve: Curve, other: Curve, steps: Sequence[int]) -> float:
    ratios = [_log_ratio(curve.loss.get(step, math.nan), other.loss.get(step, math.nan)) for step in steps]
    return abs(math.fsum(ratios) / len(ratios))


def _tail_difference(curve: Curve, other: Curve, last_step: int) -> float:
    return relative(tail_mean(curve.loss, last_step), tail_mean(other.loss, last_step))


def _log_ratio(value: float, reference: float) -> float:
    if not (math.isfinite(value) and math.isfinite(reference) and value > 0.0 and reference > 0.0):
        return math.nan
    return math.log(value / reference)


def _against(measured: float, allowed: float) -> str:
    """The numbers of a finding, the same words everywhere."""
    return f"{measured:.2e} against {allowed:.2e} allowed"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain data for the report: the table and the first finding."""
    return {
        "kind": "loss",
        "rows": [
            {
                "layer": row.layer,
                "metric": row.metric,
                "window": row.window,
                "measured": row.measured,
                "allowed": row.allowed,
                "ok": row.ok,
            }
            for row in comparison.rows
        ],
        "findings": [f"{finding.layer}: {finding.message}" for finding in comparison.findings],
        "notes": list(comparison.notes),
    }
