"""Speed gate: from the recorded samples of one row, and nothing else, to a verdict that names its cause.

A clock that ramps, a neighbour that copies, a node that is 4 % faster than the next one: a time by itself proves
little. So every launch times the candidate in turns with a *reference* (the operators that it replaces) and a *probe*
(a copy, or a GEMM of the library), and a row is slower only where every yardstick says so:

    against a base (A/B)    launches of both commits in turns on one node. Effect: log(candidate / the base's candidate)
                            of each pair; nodes and days cancel. Reference and probe must have stood still meanwhile.
    against recorded runs   other days, other nodes. Effect: log(candidate / reference) and log(candidate / probe), each
                            within its launch and less what was recorded; both must agree. A reference that moved alone
                            is named and is no finding; a probe that moved alone means that nothing can be said.

An effect counts when it exceeds the limit and the floor of 2 us, its 95 % interval excludes zero, and every launch
shows at least half of the limit. The limit is max(3 %, 3 x the row's noise), 8 % while the row has fewer than
`NOISE_LAUNCHES` recorded launches. The interval is a two-level bootstrap (launches, then blocks), and below five
launches never narrower than Student's t over the launches. A first stage only *suspects*, from three quarters of the
limit on; a second stage of as many launches decides: REGRESSION (IMPROVED) is what both stages together show, with
every launch of both. So a slow-down that is a little above the limit is not lost to a first stage just below it.

Within a launch the median over blocks decides: outliers of a few per cent of the samples move it by nothing. Seeded, in
pure Python and in a fixed order, so that any machine replays the same verdict.

Counts (host synchronisations, kernel launches) are deterministic: one more is a REGRESSION, without an interval.
Compile time has no yardstick: 25 % and a second.

Not here: files (samples.py), which recorded runs belong to a row (speedgate.py), timing (suites/perf).
"""

from __future__ import annotations

import math
import random
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import Verdict
from harness.samples import Launch, PerfRun, Samples

LEAST = 0.03
"""The least relative effect that can be a finding."""
NOISE_FACTOR = 3.0
UNCALIBRATED_LIMIT = 0.08
NOISE_LAUNCHES = 5
"""Recorded launches from which a row's noise is known."""
TOO_NOISY = 0.25
"""A limit beyond this gates nothing: the row is listed as too noisy."""
FLOOR_NS = 2_000.0
SUSPICION = 0.75
"""Share of the limit from which on a first stage asks for a second."""
COMPILE_LIMIT = 0.25
COMPILE_FLOOR_NS = 1e9
LEAST_LAUNCHES = 3
LEAST_BLOCKS = 5
CONFIDENCE = 0.95
RESAMPLES = 1_000
FEW_LAUNCHES = 5
#: Two-sided 95 % quantiles of Student's t by degrees of freedom; from FEW_LAUNCHES launches on the bootstrap decides.
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
#: Of the two sides of a pair on one node, and of launches of one run: their launches differ by 1.5 %.
MOVED_ON_NODE = 0.04
#: Of runs on other days and nodes, which differ by 4 %.
MOVED_SINCE = 0.12
#: A probe that moves this far between launches of one run measures somebody else.
DRIFT = 0.10
IMPLAUSIBLE_SHARE = 1.10
TIMER_STEPS = 10


@dataclass(frozen=True)
class Effect:
    """How much slower (positive), as logarithms: the mean over launches, its interval, and each launch's own."""

    yardstick: str
    value: float
    low: float
    high: float
    launches: tuple[float, ...]

    @property
    def percent(self) -> float:
        return 100 * math.expm1(self.value)

    @property
    def interval(self) -> tuple[float, float]:
        """In per cent."""
        return 100 * math.expm1(self.low), 100 * math.expm1(self.high)

    def direction(self, limit: float) -> str:
        """`slower`, `faster`, `within` the limit, or `unclear`: beyond it, and launches or interval disagree."""
        if not math.isfinite(self.value):
            return "unclear"
        if abs(math.expm1(self.value)) <= limit:
            return "within"
        sign = 1.0 if self.value > 0 else -1.0
        agree = all(sign * one >= math.log1p(limit) / 2 for one in self.launches)
        outside = (self.low if sign > 0 else -self.high) > 0
        if not (agree and outside):
            return "unclear"
        return "slower" if sign > 0 else "faster"

    def told(self, limit: float) -> str:
        """`+12.4 % against 8 % allowed, 95 % interval [10.9, 13.8], 3 of 3 launches`."""
        sign = 1.0 if self.value > 0 else -1.0
        agree = sum(sign * one >= math.log1p(limit) / 2 for one in self.launches)
        low, high = self.interval
        return (
            f"{self.percent:+.1f} % against {100 * limit:.3g} % allowed, 95 % interval [{low:.1f}, {high:.1f}], "
            f"{agree} of {len(self.launches)} launches"
        )


@dataclass(frozen=True)
class Comparison:
    """What is said of one row. `cause`: candidate, reference, probe, environment, or nothing."""

    verdict: Verdict
    message: str
    cause: str = ""
    effects: tuple[Effect, ...] = ()
    limit: float = UNCALIBRATED_LIMIT
    smallest: float | None = None
    """The smallest relative effect that this row can show: its limit, or the floor where that is more."""
    median_ns: float | None = None
    p20_ns: float | None = None
    share: float | None = None
    """Of the probe's rate."""
    ratio: float | None = None
    """Candidate / reference."""
    suspected: bool = False
    """A second stage of launches would decide."""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        effects = [
            {
                "yardstick": one.yardstick,
                "percent": one.percent,
                "interval": list(one.interval),
                "launches": [100 * math.expm1(value) for value in one.launches],
            }
            for one in self.effects
        ]
        return {
            "kind": "perf",
            "cause": self.cause,
            "limit": self.limit,
            "smallest": self.smallest,
            "median_ns": self.median_ns,
            "p20_ns": self.p20_ns,
            "share": self.share,
            "ratio": self.ratio,
            "effects": effects,
            "notes": list(self.notes),
        }


# Statistics --------------------------------------------------------------------------------------------------------

Unit = Sequence[tuple[float, Sequence[float]]]
"""What is resampled as one: (sign, logarithms of its blocks) of each part. Its value is the signed sum of medians."""


def blocks(values: Sequence[float], throttled: Sequence[bool] = ()) -> list[float]:
    """The logarithm of each block: of the geometric mean of its two samples; throttled blocks left out."""
    pairs = zip(values[::2], values[1::2], strict=True)
    kept = [pair for number, pair in enumerate(pairs) if not (number < len(throttled) and throttled[number])]
    return [(math.log(first) + math.log(second)) / 2 for first, second in kept]


def against(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Block by block: the logarithm of a ratio."""
    return [one - other for one, other in zip(over, under, strict=True)]


def _value(unit: Unit) -> float:
    return sum(sign * statistics.median(part) for sign, part in unit)


def effect(
    yardstick: str, units: Sequence[Unit], recorded: Sequence[float] = (), seed: int = 0, resamples: int = RESAMPLES
) -> Effect:
    """Mean over units less the mean of what was recorded, with its interval.

    Args:
        units: a launch each, or a pair of launches.
        recorded: the value of each recorded launch; empty for pairs, which need none.
    """
    zero = statistics.fmean(recorded) if recorded else 0.0
    values = tuple(_value(unit) - zero for unit in units)
    mean = statistics.fmean(values)
    low, high = _student(values, recorded, mean)
    drawn = _bootstrap(units, recorded, seed, resamples)
    if drawn is not None:
        low, high = min(low, drawn[0]), max(high, drawn[1])
    return Effect(yardstick, mean, low, high, values)


def _student(values: Sequence[float], recorded: Sequence[float], mean: float) -> tuple[float, float]:
    """The t interval over launches, where there are few of them; empty (so that the other decides) where many."""
    count = len(values)
    if count >= FEW_LAUNCHES:
        return math.inf, -math.inf
    if count < 2:
        return -math.inf, math.inf
    error = statistics.variance(values) / count
    if len(recorded) > 1:
        error += statistics.variance(recorded) / len(recorded)
    half = T_QUANTILE[count - 1] * math.sqrt(error)
    return mean - half, mean + half


def _bootstrap(
    units: Sequence[Unit], recorded: Sequence[float], seed: int, resamples: int
) -> tuple[float, float] | None:
    """Percentile interval: launches drawn again, and within each its blocks."""
    if len(units) < 2 or resamples < 1:
        return None
    draw = random.Random(seed)
    found: list[float] = []
    for _ in range(resamples):
        chosen = draw.choices(units, k=len(units))
        total = 0.0
        for unit in chosen:
            for sign, part in unit:
                count = len(part)
                total += sign * statistics.median([part[int(draw.random() * count)] for _ in range(count)])
        mean = total / len(units)
        if recorded:
            mean -= statistics.fmean(draw.choices(recorded, k=len(recorded)))
        found.append(mean)
    found.sort()
    tail = (1 - CONFIDENCE) / 2
    return found[int(tail * resamples)], found[min(resamples - 1, math.ceil((1 - tail) * resamples) - 1)]


@dataclass(frozen=True)
class Logs:
    """One launch as logarithms a block."""

    candidate: list[float]
    reference: list[float]
    probe: list[float]

    @staticmethod
    def of(launch: Launch) -> Logs:
        hot = launch.throttled
        return Logs(blocks(launch.candidate, hot), blocks(launch.reference, hot), blocks(launch.probe, hot))

    @property
    def by_reference(self) -> list[float]:
        return against(self.candidate, self.reference) if self.reference else []

    @property
    def by_probe(self) -> list[float]:
        return against(self.candidate, self.probe)


def launch_values(runs: Sequence[PerfRun], yardstick: str) -> list[float]:
    """Median log ratio to a yardstick (`reference`, `probe`) of every recorded launch."""
    logs = [Logs.of(launch) for run in runs for launch in run.samples.launches]
    parts = [one.by_reference if yardstick == "reference" else one.by_probe for one in logs]
    return [statistics.median(part) for part in parts if part]


def noise(runs: Sequence[PerfRun]) -> float | None:
    """Standard deviation of a row between launches, of the noisier yardstick; None below NOISE_LAUNCHES launches."""
    spreads = [
        statistics.stdev(values)
        for yardstick in ("reference", "probe")
        if len(values := launch_values(runs, yardstick)) >= NOISE_LAUNCHES
    ]
    return max(spreads, default=None)


def limit_of(runs: Sequence[PerfRun]) -> tuple[float, float | None]:
    """(relative limit of a row, its noise or None where it is not calibrated)."""
    spread = noise(runs)
    return (UNCALIBRATED_LIMIT if spread is None else max(LEAST, NOISE_FACTOR * spread)), spread


def smallest_effect(limit: float, median_ns: float, floor_ns: float = FLOOR_NS) -> float:
    """The smallest relative slow-down of a row of this length that can be a finding."""
    return max(limit, floor_ns / median_ns)


# Verdicts ----------------------------------------------------------------------------------------------------------


def judge(
    now: Samples,
    runs: Sequence[PerfRun] = (),
    missing: Verdict = Verdict.UNCALIBRATED,
    resamples: int = RESAMPLES,
) -> Comparison:
    """The verdict on one row.

    Args:
        now: its samples; with launches of a base in them, the two are compared as well.
        runs: recorded runs of the same configuration, on the same device.
        missing: what is said where there is neither a base nor a recorded run.
    """
    if now.kind == "counts":
        return _judge_counts(now, runs, missing)
    if now.kind == "compile":
        return _judge_compile(now, runs, missing, resamples)
    broken = _broken(now, runs)
    if broken is not None:
        return broken
    limit, spread = limit_of(runs)
    whole = _described(now, limit)
    still = _environment(now) or _too_fast(now, runs)
    if still is not None:
        return _with(whole, *still)
    compared: list[Comparison] = []
    if now.of("base"):
        compared.append(_against_base(now, whole, resamples))
    if runs:
        if limit > TOO_NOISY:
            told = f"too noisy to gate: launches differ by {100 * (spread or 0):.1f} %, which would allow {limit:.0%}"
            compared.append(_with(whole, Verdict.INCONCLUSIVE, told, "environment"))
        else:
            compared.append(_against_runs(now, runs, whole, resamples))
    if not compared:
        return _with(whole, missing, "no recorded run of this row and no base to compare it with", "")
    return min(compared, key=_severity)


_SEVERITY = (Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.PASS)


def _severity(found: Comparison) -> int:
    return _SEVERITY.index(found.verdict)


def suspected(now: Samples, runs: Sequence[PerfRun] = (), resamples: int = RESAMPLES) -> bool:
    """Whether the first stage has found something that a second one must confirm."""
    return judge(now, runs, resamples=resamples).suspected


def _with(whole: Comparison, verdict: Verdict, message: str, cause: str, **more: Any) -> Comparison:
    return Comparison(**{**vars(whole), "verdict": verdict, "message": message, "cause": cause, **more})


def _broken(now: Samples, runs: Sequence[PerfRun]) -> Comparison | None:
    """What cannot be a measurement: red with or without a baseline."""

    def red(verdict: Verdict, message: str) -> Comparison:
        return Comparison(verdict, message, "candidate")

    mine = now.of("candidate")
    if not mine:
        return red(Verdict.MISSING, "no launch has measured this row")
    for one in now.launches:
        where = f"launch {one.number} of the {one.side}"
        names = ("candidate", "probe", "reference") if now.reference else ("candidate", "probe")
        for name in names:
            values: list[float] = getattr(one, name)
            if len(values) < 2 * LEAST_BLOCKS or len(values) != len(one.candidate) or len(values) % 2:
                wanted = f"two samples a block, of {LEAST_BLOCKS} blocks at least, as many as of the candidate"
                return red(Verdict.MISSING, f"{where} has {len(values)} samples of the {name}; expected {wanted}")
            bad = next((value for value in values if math.isnan(value) or math.isinf(value)), None)
            if bad is not None:
                return red(Verdict.FAIL, f"{where} has a sample of the {name} that is {bad}; expected a finite time")
            low = min(values)
            if not low > 0:
                return red(Verdict.IMPLAUSIBLE, f"{where} has a sample of the {name} of {low:g} ns")
        if one.input_spread is not None and not one.input_spread > 0:
            told = f"timed on constant data (standard deviation {one.input_spread:g}); expected seeded normal data"
            return red(Verdict.FAIL, f"{where} was {told}: caches and clocks treat it otherwise")
    samples = [value for one in mine for value in one.candidate]
    if len(set(samples)) == 1:
        return red(Verdict.IMPLAUSIBLE, f"all {len(samples)} samples are {samples[0]:g} ns: the timer repeats itself")
    median = statistics.median(samples)
    calls = mine[0].calls
    if now.resolution_ns and median * calls < TIMER_STEPS * now.resolution_ns:
        told = f"a sample lasts {median * calls:.0f} ns and the timer's step is {now.resolution_ns:.0f} ns"
        return Comparison(Verdict.UNMEASURABLE, f"too short to time: {told}; expected {TIMER_STEPS} steps at least")
    fast = _too_fast(now, runs)
    if fast is not None and fast[0] is Verdict.IMPLAUSIBLE:
        return Comparison(*fast)
    if len(now.of("candidate", 1)) < LEAST_LAUNCHES:
        told = f"{len(now.of('candidate', 1))} launches; expected {LEAST_LAUNCHES} at least"
        return red(Verdict.MISSING, f"{told}: `fp8ci run --suite perf` makes them")
    return None


def _too_fast(now: Samples, runs: Sequence[PerfRun]) -> tuple[Verdict, str, str] | None:
    """A rate beyond the probe's: impossible beside the fastest probe that is known of this row, in launches of this run
    and in recorded ones. Beside that of its own launch alone, the probe was held up, and nothing is known.
    """
    mine = now.of("candidate")
    best = max((share for one in mine if (share := _share(now, one)) is not None), default=0.0)
    if not best > IMPLAUSIBLE_SHARE:
        return None
    told = f"{best:.2f} x the {now.probe} probe of its launch, at most {IMPLAUSIBLE_SHARE} is possible"
    known = [*now.launches, *(one for run in runs for one in run.samples.launches)]
    fastest = min(statistics.median(blocks(one.probe)) for one in known)
    quickest = min(statistics.median(blocks(one.candidate)) for one in mine)
    possible = now.work / now.probe_work / math.exp(quickest - fastest)
    if possible > IMPLAUSIBLE_SHARE:
        return Verdict.IMPLAUSIBLE, f"faster than the device can be: {told}", "candidate"
    told = f"{told}, and it is {possible:.2f} x the fastest launch of the probe"
    return Verdict.INCONCLUSIVE, f"something held the probe up: {told}", "probe"


def _share(now: Samples, launch: Launch) -> float | None:
    """Rate of the candidate / rate of the probe: the median over blocks."""
    if not (now.work and now.probe_work and now.probe):
        return None
    ratio = statistics.median(against(blocks(launch.candidate), blocks(launch.probe)))
    return now.work / now.probe_work / math.exp(ratio)


def _described(now: Samples, limit: float) -> Comparison:
    """Everything about a row that needs no baseline."""
    mine = now.of("candidate")
    samples = sorted(value for one in mine for value in one.candidate)
    median = statistics.median(samples)
    shares = [share for one in mine if (share := _share(now, one)) is not None]
    ratios = [against(blocks(one.candidate), blocks(one.reference)) for one in mine if one.reference]
    return Comparison(
        Verdict.PASS,
        "",
        limit=limit,
        smallest=smallest_effect(limit, median),
        median_ns=median,
        p20_ns=samples[len(samples) // 5],
        share=statistics.median(shares) if shares else None,
        ratio=math.exp(statistics.median(statistics.median(one) for one in ratios)) if ratios else None,
    )


def _environment(now: Samples) -> tuple[Verdict, str, str] | None:
    """What the machine did that forbids a verdict: clocks held down, a probe that drifts within the run."""
    for side in ("candidate", "base"):
        for one in now.launches:
            if one.side != side or not any(one.throttled):
                continue
            kept = len(one.candidate) // 2 - sum(one.throttled)
            if kept < LEAST_BLOCKS:
                told = f"{sum(one.throttled)} of {len(one.candidate) // 2} blocks of launch {one.number} were throttled"
                return Verdict.INCONCLUSIVE, f"{told}: the device held its clocks down", "environment"
    probes = [statistics.median(blocks(one.probe, one.throttled)) for one in now.launches]
    drift = math.expm1(max(probes) - min(probes))
    if drift > DRIFT:
        told = f"the {now.probe} probe differs by {100 * drift:.0f} % between launches of one run"
        return Verdict.INCONCLUSIVE, f"{told}, {100 * DRIFT:.0f} % is allowed: something else used the device", "probe"
    return None


def _stages(now: Samples) -> list[tuple[Launch, ...]]:
    """The launches that decide: those of the first stage, then all of them if there is a second one."""
    first, second = now.of("candidate", 1), now.of("candidate", 2)
    return [first, (*first, *second)] if second else [first]


def _seed(now: Samples) -> int:
    return zlib.crc32(f"{now.case}/{now.format}/{now.arch}".encode())


def _against_base(now: Samples, whole: Comparison, resamples: int) -> Comparison:
    """The same-node comparison: pairs of launches of this commit and of its base."""
    base = {(one.stage, one.number): one for one in now.of("base")}
    alone = [one.number for one in now.of("candidate") if (one.stage, one.number) not in base]
    if alone:
        told = f"launch {alone[0]} has no launch of the base beside it; expected pairs"
        return _with(whole, Verdict.INCONCLUSIVE, told, "environment")
    found: list[Comparison] = []
    for launches in _stages(now):
        pairs = [(Logs.of(one), Logs.of(base[one.stage, one.number])) for one in launches]
        mine = effect("base", [_pair(a.candidate, b.candidate) for a, b in pairs], (), _seed(now), resamples)
        moved = _moved_on_node(pairs, bool(now.reference))
        slower = _slower_ns(whole, mine.value)
        found.append(_decided(whole, (mine,), mine.direction(whole.limit), moved, slower))
    return _two_stages(whole, found, len(now.of("candidate", 2)))


def _pair(now: list[float], before: list[float]) -> Unit:
    return ((1.0, now), (-1.0, before))


def _moved_on_node(pairs: Sequence[tuple[Logs, Logs]], has_reference: bool) -> tuple[str, str] | None:
    """(cause, sentence) where probe or reference did not stand still between the sides of a comparison."""
    for cause in ("probe", "reference") if has_reference else ("probe",):
        change = statistics.fmean(_value(_pair(getattr(a, cause), getattr(b, cause))) for a, b in pairs)
        if abs(math.expm1(change)) > MOVED_ON_NODE:
            told = f"the {cause} moved by {100 * math.expm1(change):+.1f} % between the commits"
            return cause, f"{told}, which share a node: {100 * MOVED_ON_NODE:.0f} % is allowed"
    return None


def _slower_ns(whole: Comparison, value: float) -> float:
    """How much longer a call takes than it would without the effect."""
    return (whole.median_ns or 0.0) * -math.expm1(-value)


def _decided(
    whole: Comparison,
    effects: tuple[Effect, ...],
    direction: str,
    moved: tuple[str, str] | None,
    slower_ns: float,
    floor_ns: float = FLOOR_NS,
) -> Comparison:
    """One stage: what its direction means, unless the machine moved or the change is below the floor."""
    told = effects[0].told(whole.limit)
    if moved is not None:
        return _with(whole, Verdict.INCONCLUSIVE, f"{moved[1]}; the row: {told}", moved[0], effects=effects)
    if direction == "within":
        near = abs(effects[0].value) > math.log1p(SUSPICION * whole.limit) and abs(slower_ns) > floor_ns
        return _with(whole, Verdict.PASS, "", "", effects=effects, suspected=near)
    if abs(slower_ns) <= floor_ns:
        told = f"{told}, but {slower_ns / 1e3:+.2f} us is below the floor of {floor_ns / 1e3:g} us"
        return _with(whole, Verdict.PASS, told, "", effects=effects)
    if direction == "unclear":
        return _with(whole, Verdict.INCONCLUSIVE, f"noise: {told}", "environment", effects=effects, suspected=True)
    verdict = Verdict.REGRESSION if direction == "slower" else Verdict.IMPROVED
    word = "slower" if direction == "slower" else "faster"
    message = f"{word} than the {'base' if effects[0].yardstick == 'base' else 'recorded runs'}: {told}"
    return _with(whole, verdict, message, "candidate", effects=effects)


def _two_stages(whole: Comparison, found: Sequence[Comparison], confirming: int) -> Comparison:
    """A finding of the first stage counts when it holds over both stages; without a second one it is a suspicion."""
    first, last = found[0], found[-1]
    if first.verdict not in (Verdict.REGRESSION, Verdict.IMPROVED) and not first.suspected:
        return first
    if len(found) == 1 and first.verdict is Verdict.PASS:
        return first
    if len(found) == 1:
        told = first.message if first.suspected else f"not confirmed by a second stage: {first.message}"
        return _with(
            whole, Verdict.INCONCLUSIVE, told, first.cause, effects=first.effects, suspected=True, notes=first.notes
        )
    if last.verdict is Verdict.PASS:
        told = last.message or last.effects[0].told(whole.limit)
        return _with(
            whole, Verdict.PASS, f"suspected, and {confirming} launches more do not show it: {told}", "",
            effects=last.effects,
        )  # fmt: skip
    return _with(last, last.verdict, last.message, last.cause, suspected=False)


def _against_runs(now: Samples, runs: Sequence[PerfRun], whole: Comparison, resamples: int) -> Comparison:
    """Against recorded runs of other days and nodes, by both yardsticks."""
    found: list[Comparison] = []
    yardsticks = ("reference", "probe") if now.reference else ("probe",)
    recorded = {name: launch_values(runs, name) for name in yardsticks}
    launches_before = [one for run in runs for one in run.samples.launches]
    before = statistics.fmean(statistics.median(blocks(one.probe, one.throttled)) for one in launches_before)
    for launches in _stages(now):
        logs = [Logs.of(one) for one in launches]
        effects: list[Effect] = []
        for name in yardsticks:
            parts = [one.by_reference if name == "reference" else one.by_probe for one in logs]
            units: list[Unit] = [((1.0, part),) for part in parts]
            effects.append(effect(name, units, recorded[name], _seed(now), resamples))
        probe = statistics.fmean(statistics.median(one.probe) for one in logs) - before
        found.append(_by_yardsticks(whole, tuple(effects), math.expm1(probe)))
    return _two_stages(whole, found, len(now.of("candidate", 2)))


def _by_yardsticks(whole: Comparison, effects: tuple[Effect, ...], probe: float) -> Comparison:
    """The row is slower where every yardstick says so; one that moved alone is named.

    Args:
        probe: relative change of the probe's own time since it was recorded.
    """
    directions = {one.yardstick: one.direction(whole.limit) for one in effects}
    weakest = min(effects, key=lambda one: abs(one.value))
    ordered = (weakest, *(one for one in effects if one is not weakest))
    slower = _slower_ns(whole, weakest.value)
    if abs(probe) > MOVED_SINCE:
        told = f"the probe moved by {100 * probe:+.0f} % since it was recorded, {100 * MOVED_SINCE:.0f} % is allowed"
        return _decided(whole, ordered, directions[weakest.yardstick], ("probe", told), slower)
    kinds = set(directions.values())
    if len(kinds) == 1:
        return _decided(whole, ordered, kinds.pop(), None, slower)
    by_name = {one.yardstick: one.value for one in effects}
    moved = math.expm1(by_name["probe"] - by_name["reference"])
    if "within" in kinds and (abs(moved) <= whole.limit / 2 or "unclear" in kinds):
        return _decided(whole, ordered, "within", None, slower)
    if directions["probe"] == "within":
        told = f"the reference moved by {100 * moved:+.1f} %, the row did not: by the probe {_by(effects, 'probe')}"
        return _with(whole, Verdict.PASS, told, "reference", effects=ordered, notes=(told,))
    if directions["reference"] == "within":
        told = f"row and reference moved together, against the probe by {_by(effects, 'probe')}"
        return _with(whole, Verdict.INCONCLUSIVE, told, "environment", effects=ordered)
    told = "; ".join(f"by the {one.yardstick} {one.percent:+.1f} %" for one in effects)
    if "slower" in kinds and "faster" in kinds:
        told = f"the yardsticks contradict each other: {told}"
        return _with(whole, Verdict.INCONCLUSIVE, told, "environment", effects=ordered)
    return _decided(whole, ordered, "unclear", None, slower)


def _by(effects: Sequence[Effect], yardstick: str) -> str:
    return next(f"{one.percent:+.1f} %" for one in effects if one.yardstick == yardstick)


# Counts and compile time -------------------------------------------------------------------------------------------


def _judge_counts(now: Samples, runs: Sequence[PerfRun], missing: Verdict) -> Comparison:
    """Deterministic, so equal in every launch and never more than the base, the baseline or the row itself allow."""
    mine = now.of("candidate")
    if not mine or not mine[0].counts:
        return Comparison(Verdict.MISSING, "nothing was counted", "candidate")
    counts = mine[0].counts
    other = next((one for one in mine if one.counts != counts), None)
    if other is not None:
        told = f"launch {mine[0].number} counts {_counted(counts)}, launch {other.number} {_counted(other.counts)}"
        return Comparison(Verdict.FLAKY, told, "candidate")
    over = [f"{name} {counts.get(name, 0)}, at most {most}" for name, most in sorted(now.most.items())
            if not counts.get(name, 0) <= most]  # fmt: skip
    if over:
        return Comparison(Verdict.REGRESSION, f"counted more than the row allows: {'; '.join(over)}", "candidate")
    before: list[tuple[str, dict[str, int]]] = [("base", one.counts) for one in now.of("base")[:1]]
    latest = max(runs, key=lambda run: run.provenance.when, default=None)
    if latest is not None:
        before.append(("recorded run", latest.samples.launches[0].counts))
    if not before:
        return Comparison(missing, f"no recorded run of this row; counted {_counted(counts)}")
    better: list[str] = []
    for what, counted in before:
        lost = sorted(counted.keys() - counts.keys())
        if lost:
            return Comparison(Verdict.MISSING, f"{lost[0]} is no longer counted; the {what} has {counted[lost[0]]}")
        worse = [f"{name} {counted.get(name, 0)} -> {value}" for name, value in sorted(counts.items())
                 if value > counted.get(name, 0)]  # fmt: skip
        if worse:
            return Comparison(Verdict.REGRESSION, f"more than the {what}: {'; '.join(worse)}", "candidate")
        better += [f"{name} {counted[name]} -> {value}" for name, value in sorted(counts.items())
                   if name in counted and value < counted[name]]  # fmt: skip
    if better:
        return Comparison(Verdict.IMPROVED, f"fewer: {'; '.join(dict.fromkeys(better))}", "candidate")
    return Comparison(Verdict.PASS, "")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(counts.items()))


def _judge_compile(now: Samples, runs: Sequence[PerfRun], missing: Verdict, resamples: int) -> Comparison:
    """Seconds of compilation from an empty cache, one value a launch; no yardstick, so a wide limit and a floor."""

    def logs(launches: Sequence[Launch]) -> list[float]:
        return [math.log(one.compile_seconds) for one in launches if one.compile_seconds]

    mine = now.of("candidate")
    values = [one.compile_seconds for one in mine]
    bad = [value for value in values if value is None or not (math.isfinite(value) and value > 0)]
    if not mine or bad:
        what = f"a launch says {bad[0]}" if bad else "no launch"
        return Comparison(Verdict.MISSING, f"compile time: {what}; expected seconds in every launch", "candidate")
    seconds = statistics.median(value for value in values if value is not None)
    whole = Comparison(
        Verdict.PASS, "", limit=COMPILE_LIMIT, median_ns=seconds * 1e9,
        smallest=smallest_effect(COMPILE_LIMIT, seconds * 1e9, COMPILE_FLOOR_NS),
    )  # fmt: skip
    base = logs(now.of("base"))
    recorded = base or logs([one for run in runs for one in run.samples.launches])
    if not recorded:
        return _with(whole, missing, "no recorded run of this row and no base to compare it with", "")
    name = "base" if base else "recorded"
    units: list[Unit] = [((1.0, [value]),) for value in logs(mine)]
    mine_effect = effect(name, units, recorded, _seed(now), resamples)
    slower = _slower_ns(whole, mine_effect.value)
    return _decided(whole, (mine_effect,), mine_effect.direction(COMPILE_LIMIT), None, slower, COMPILE_FLOOR_NS)
