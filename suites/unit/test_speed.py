"""The speed gate from recorded samples: what is a regression, what only looks like one, and who is to blame."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import gate, manifest, platforms, samples, speed, speedgate
from harness.errors import ConfigError, UnreadableError, Verdict
from harness.report import summary
from harness.samples import Launch, PerfRun, Samples
from suites.unit import built_samples as built
from suites.unit.built_evidence import Built

FEW = 200  # resamples: an interval that a test looks at roughly


def draw(seed: int = 1) -> random.Random:
    return random.Random(seed)


def judged(now: Samples, runs: list[PerfRun] | None = None, **more: Any) -> speed.Comparison:
    return speed.judge(now, runs or (), resamples=FEW, **more)


# Against recorded runs ---------------------------------------------------------------------------------------------


def runs() -> list[PerfRun]:
    return built.recorded(draw(100))


def test_the_same_commit_on_another_day() -> None:
    """Nodes and days differ by 4 %, the ratio within a launch does not: PASS, with a median and what can be seen."""
    found = judged(built.run(draw()), runs())
    assert (found.verdict, found.cause) == (Verdict.PASS, "")
    assert found.median_ns == pytest.approx(built.CANDIDATE_NS, rel=0.15)
    assert found.smallest is not None
    assert found.smallest >= speed.LEAST


def test_a_slower_candidate_is_a_regression_in_two_stages() -> None:
    """+20 %: suspected by the first stage, REGRESSION once a second one shows it, with numbers in the message."""
    first = judged(built.run(draw(), {"candidate": 1.20}), runs())
    assert (first.verdict, first.suspected) == (Verdict.INCONCLUSIVE, True)
    assert "not confirmed" in first.message
    both = judged(built.run(draw(), {"candidate": 1.20}, stages=2), runs())
    assert (both.verdict, both.cause) == (Verdict.REGRESSION, "candidate")
    assert "6 of 6 launches" in both.message
    assert "95 % interval" in both.message


def test_a_suspicion_that_the_second_stage_does_not_show() -> None:
    """Three slow launches and three good ones are no regression."""
    where = built.Machine(draw())
    slow = [where.launch(n, slower={"candidate": 1.12}) for n in (1, 2, 3)]
    good = [where.launch(n, stage=2, slower={"candidate": 0.99}) for n in (1, 2, 3)]
    found = judged(built.samples(slow + good), runs())
    assert found.verdict is Verdict.PASS
    assert "3 launches more do not show it" in found.message


def test_an_improved_row() -> None:
    """-20 % is IMPROVED, with the same two stages."""
    found = judged(built.run(draw(), {"candidate": 0.80}, stages=2), runs())
    assert (found.verdict, found.cause) == (Verdict.IMPROVED, "candidate")


def test_a_reference_that_moved_is_named_and_is_no_finding() -> None:
    """A new torch makes the chain 25 % faster: the ratio to it is worse, the row is not."""
    found = judged(built.run(draw(), {"reference": 0.75}, stages=2), runs())
    assert (found.verdict, found.cause) == (Verdict.PASS, "reference")
    moved = float(found.message.partition("the reference moved by ")[2].split()[0])
    assert moved == pytest.approx(-25, abs=4)


def test_a_row_that_slows_down_with_its_reference_is_not_blamed() -> None:
    """Something made both slower, and not the probe: nobody can say that it was the candidate."""
    found = judged(built.run(draw(), {"candidate": 1.25, "reference": 1.25}, stages=2), runs())
    assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, "environment")


@pytest.mark.parametrize("rest", [1.0, 1.3], ids=["probe-alone", "all-of-it"])
def test_a_slower_probe_is_never_a_regression(rest: float) -> None:
    """A copy loop beside the run: INCONCLUSIVE, the probe is named, whether or not the row suffered too."""
    slower = {"candidate": rest, "reference": rest, "probe": 1.3}
    found = judged(built.run(draw(), slower, stages=2), runs())
    assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, "probe")
    assert not found.suspected


def test_a_probe_that_drifts_within_the_run() -> None:
    """The neighbour came after the first launch."""
    where = built.Machine(draw())
    made = [where.launch(n, slower={"probe": 1.0 if n == 1 else 1.3}) for n in (1, 2, 3)]
    found = judged(built.samples(made), runs())
    assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, "probe")
    assert "something else used the device" in found.message


def test_throttled_blocks() -> None:
    """Single throttled blocks are left out; a launch that has little else proves nothing."""
    where = built.Machine(draw())
    few = [where.launch(n, throttled=[True] * 2 + [False] * 8) for n in (1, 2, 3)]
    slow = [
        msgspec.structs.replace(one, candidate=[v * 3 for v in one.candidate[:4]] + one.candidate[4:]) for one in few
    ]
    assert judged(built.samples(slow), runs()).verdict is Verdict.PASS
    every = [where.launch(n, throttled=[True] * 10, slower={"candidate": 1.4}) for n in (1, 2, 3)]
    found = judged(built.samples(every), runs())
    assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, "environment")
    assert "10 of 10 blocks" in found.message


def test_a_tiny_kernel_under_the_floor() -> None:
    """4 us + 40 % is 1.6 us: below the floor of 2 us it is no finding, and the row says how much it could show."""
    levels = {"candidate": 4_000 / built.CANDIDATE_NS}
    tiny = built.recorded(draw(7), work=built.WORK // 50)
    tiny = [msgspec.structs.replace(run, samples=built.scaled(run.samples, **levels)) for run in tiny]
    now = built.scaled(built.run(draw(), {"candidate": 1.40}, stages=2, work=built.WORK // 50), **levels)
    found = judged(now, tiny)
    assert found.verdict is Verdict.PASS
    assert "below the floor of 2 us" in found.message
    assert found.smallest == pytest.approx(2_000 / 5_600, rel=0.2)


def test_one_row_15_percent_slower_under_a_rising_geomean() -> None:
    """Rows are judged one by one: three that gain 20 % do not pay for one that lost 15 % of its speed."""
    verdicts = [
        judged(built.run(draw(seed), {"candidate": factor}, stages=2), built.recorded(draw(50 + seed))).verdict
        for seed, factor in ((1, 0.8), (2, 0.8), (3, 0.8), (4, 1 / 0.85))
    ]
    assert (1 / 0.8) ** 3 * 0.85 > 1
    assert verdicts == [*[Verdict.IMPROVED] * 3, Verdict.REGRESSION]


def test_limits_come_from_the_recorded_noise() -> None:
    """8 % with few launches; then three times the spread, never below 3 %; and a row that is too noisy is listed."""
    assert speed.limit_of(built.recorded(draw(), days=1, launches=4)) == (speed.UNCALIBRATED_LIMIT, None)
    limit, spread = speed.limit_of(runs())
    assert spread is not None
    assert limit == pytest.approx(3 * spread)
    flat = [_flat(run) for run in runs()]
    assert speed.limit_of(flat) == (speed.LEAST, pytest.approx(0.0, abs=1e-9))
    wild = runs()
    launches = [
        msgspec.structs.replace(one, candidate=[v * (1 + 0.2 * (number % 2)) for v in one.candidate])
        for number, one in enumerate(wild[0].samples.launches)
    ]
    wild = [msgspec.structs.replace(wild[0], samples=built.samples(launches))]
    found = judged(built.run(draw()), wild)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "too noisy to gate" in found.message


def _flat(run: PerfRun) -> PerfRun:
    launches = [
        msgspec.structs.replace(one, candidate=[100e3] * 20, reference=[200e3] * 20, probe=[300e3] * 20)
        for one in run.samples.launches
    ]
    return msgspec.structs.replace(run, samples=msgspec.structs.replace(run.samples, launches=launches))


def test_launches_that_disagree_are_noise() -> None:
    """Two of three launches are 30 % slower, one is not: beyond the limit, and no finding."""
    where = built.Machine(draw())
    made = [where.launch(n, slower={"candidate": 1.0 if n == 2 else 1.3}) for n in (1, 2, 3)]
    found = judged(built.samples(made), runs())
    assert (found.verdict, found.cause, found.suspected) == (Verdict.INCONCLUSIVE, "environment", True)
    assert "2 of 3 launches" in found.message


def test_one_launch_of_six_that_disagrees() -> None:
    """Both stages, the interval far from zero: one launch that does not show it is enough to say nothing."""
    where = built.Machine(draw())
    made = [
        where.launch(n, stage=stage, slower={"candidate": 1.0 if (n, stage) == (2, 2) else 1.3})
        for stage in (1, 2)
        for n in (1, 2, 3)
    ]
    found = judged(built.samples(made), runs())
    assert (found.verdict, found.suspected) == (Verdict.INCONCLUSIVE, False)
    assert found.effects[0].low > 0
    assert "5 of 6 launches" in found.message


def test_one_outlier_in_a_launch_moves_nothing() -> None:
    """One block of ten that took a hundred times as long: the median over blocks does not see it."""
    now = built.run(draw(), machine=built.Machine(draw()))
    before = judged(now, runs()).effects[0].value
    launches = [
        msgspec.structs.replace(one, candidate=[one.candidate[0] * 100, *one.candidate[1:]]) for one in now.launches
    ]
    after = judged(built.samples(launches), runs())
    assert after.verdict is Verdict.PASS
    assert after.effects[0].value == pytest.approx(before, abs=0.01)


# Against a base ----------------------------------------------------------------------------------------------------


def test_pairs_need_no_recorded_run() -> None:
    """The same commit twice is a PASS, although nothing was ever recorded on this platform."""
    found = judged(built.pairs(draw()))
    assert found.verdict is Verdict.PASS
    assert found.effects[0].yardstick == "base"


def test_a_slower_candidate_against_its_base() -> None:
    """+15 % on one node: REGRESSION after the second stage, INCONCLUSIVE and suspected before it."""
    assert speed.suspected(built.pairs(draw(), {"candidate": 1.15}), resamples=FEW)
    assert not speed.suspected(built.pairs(draw()), resamples=FEW)
    found = judged(built.pairs(draw(), {"candidate": 1.15}, stages=2))
    assert (found.verdict, found.cause) == (Verdict.REGRESSION, "candidate")
    assert found.message.startswith("slower than the base: +1")


@pytest.mark.parametrize("cause", ["probe", "reference"])
def test_a_yardstick_that_moved_between_the_commits(cause: str) -> None:
    """Only the candidate may differ between two launches on one node; who else moved is named."""
    slower = {"candidate": 1.15, cause: 1.08}
    found = judged(built.pairs(draw(3), slower, stages=2))
    assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, cause)


def test_a_pair_without_its_other_half() -> None:
    """A launch of the base that is missing makes no pair, and no verdict."""
    now = built.pairs(draw())
    cut = msgspec.structs.replace(now, launches=now.launches[:-1])
    assert judged(cut).verdict is Verdict.INCONCLUSIVE


def test_creeping_regressions_are_seen_by_the_recorded_runs() -> None:
    """Level with its base, 20 % behind the record: the worse of both verdicts is the verdict."""
    now = built.pairs(draw(), stages=2)
    now = built.scaled(built.scaled(now, "candidate", candidate=1.2), "base", candidate=1.2)
    assert judged(now).verdict is Verdict.PASS
    assert judged(now, runs()).verdict is Verdict.REGRESSION


# What is no measurement --------------------------------------------------------------------------------------------


def _first(row: Samples, **changed: Any) -> Samples:
    first = msgspec.structs.replace(row.launches[0], **changed)
    return msgspec.structs.replace(row, launches=[first, *row.launches[1:]])


BROKEN: dict[str, tuple[Callable[[Samples], Samples], Verdict, str]] = {
    "nan": (lambda row: _first(row, candidate=[math.nan, *row.launches[0].candidate[1:]]), Verdict.FAIL, "nan"),
    "nan-probe": (lambda row: _first(row, probe=[math.nan, *row.launches[0].probe[1:]]), Verdict.FAIL, "probe"),
    "infinite": (lambda row: _first(row, candidate=[math.inf, *row.launches[0].candidate[1:]]), Verdict.FAIL, "inf"),
    "zero": (lambda row: _first(row, candidate=[0.0, *row.launches[0].candidate[1:]]), Verdict.IMPLAUSIBLE, "0 ns"),
    "negative": (lambda row: _first(row, candidate=[-5.0, *row.launches[0].candidate[1:]]), Verdict.IMPLAUSIBLE, "-5"),
    "no-launch": (lambda row: msgspec.structs.replace(row, launches=[]), Verdict.MISSING, "no launch"),
    "no-samples": (lambda row: _first(row, candidate=[]), Verdict.MISSING, "0 samples"),
    "probe-missing": (lambda row: _first(row, probe=row.launches[0].probe[:-2]), Verdict.MISSING, "18 samples"),
    "reference-missing": (lambda row: _first(row, reference=[]), Verdict.MISSING, "reference"),
    "two-launches": (
        lambda row: msgspec.structs.replace(row, launches=row.launches[:2]),
        Verdict.MISSING,
        "2 launches",
    ),
    "constant-input": (lambda row: _first(row, input_spread=0.0), Verdict.FAIL, "constant data"),
    "nan-input": (lambda row: _first(row, input_spread=math.nan), Verdict.FAIL, "constant data"),
    "implausible": (lambda row: built.scaled(row, candidate=0.5), Verdict.IMPLAUSIBLE, "faster than the device"),
    "stuck-timer": (
        lambda row: msgspec.structs.replace(
            row, launches=[msgspec.structs.replace(one, candidate=[220e3] * 20) for one in row.launches]
        ),
        Verdict.IMPLAUSIBLE,
        "repeats itself",
    ),
    "too-short": (lambda row: msgspec.structs.replace(row, resolution_ns=50e3), Verdict.UNMEASURABLE, "timer's step"),
}


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize(("change", "expected", "told"), BROKEN.values(), ids=BROKEN)
def test_no_measurement(change: Callable[[Samples], Samples], expected: Verdict, told: str, calibrated: bool) -> None:
    """What cannot be a time is red with and without a baseline, and the message says what was found."""
    found = judged(change(built.run(draw())), runs() if calibrated else None)
    assert found.verdict is expected
    assert told in found.message


@pytest.mark.parametrize(("held_up", "expected"), [(2.6, Verdict.INCONCLUSIVE), (1.0, Verdict.IMPLAUSIBLE)])
def test_faster_than_a_probe_that_was_held_up(held_up: float, expected: Verdict) -> None:
    """Beside a neighbour a row may pass the probe of its launches; what the recorded probe leaves possible, decides."""
    row = built.scaled(built.run(draw()), candidate=1.0 if held_up > 1 else 0.5, probe=held_up)
    found = judged(row, runs())
    assert (found.verdict, found.cause) == (expected, "probe" if held_up > 1 else "candidate")
    assert "x the copy probe of its launch, at most 1.1 is possible" in found.message


# Counts and compile time -------------------------------------------------------------------------------------------


def counted(launches: int = 3, runs_counts: dict[str, int] | None = None, **counts: int) -> Samples:
    made = [samples.Launch(number=n + 1, device=built.DEVICE, counts=dict(counts)) for n in range(launches)]
    if runs_counts is not None:
        made.append(samples.Launch(number=1, side="base", device=built.DEVICE, counts=runs_counts))
    return built.samples(made, kind="counts", most={"synchronisations": 0})


def count_run(**counts: int) -> PerfRun:
    return PerfRun(test=built.TEST, samples=counted(**counts), provenance=built.provenance())


COUNTS: dict[str, tuple[Samples, list[PerfRun], Verdict]] = {
    "same": (counted(launches_=2), [count_run(launches_=2)], Verdict.PASS),
    "more": (counted(launches_=3), [count_run(launches_=2)], Verdict.REGRESSION),
    "fewer": (counted(launches_=1), [count_run(launches_=2)], Verdict.IMPROVED),
    "uncalibrated": (counted(launches_=2), [], Verdict.UNCALIBRATED),
    "synchronises": (counted(launches_=2, synchronisations=1), [], Verdict.REGRESSION),
    "more-than-base": (counted(runs_counts={"launches_": 2}, launches_=3), [], Verdict.REGRESSION),
    "new-kind": (counted(launches_=2, copies=1), [count_run(launches_=2)], Verdict.REGRESSION),
    "no-longer-counted": (counted(launches_=2), [count_run(launches_=2, copies=1)], Verdict.MISSING),
    "nothing": (counted(), [count_run(launches_=2)], Verdict.MISSING),
}


@pytest.mark.parametrize(("now", "before", "expected"), COUNTS.values(), ids=COUNTS)
def test_counts(now: Samples, before: list[PerfRun], expected: Verdict) -> None:
    """Deterministic, so one more is red; an inserted synchronisation even where nothing was recorded."""
    assert judged(now, before).verdict is expected


def test_counts_that_differ_between_launches() -> None:
    """What should be deterministic and is not is FLAKY."""
    row = counted(launches_=2)
    assert judged(_first(row, counts={"launches_": 3})).verdict is Verdict.FLAKY


def compiled(seconds: float, side: str | None = None) -> Samples:
    made = [samples.Launch(number=n, device=built.DEVICE, compile_seconds=seconds * (1 + 0.01 * n)) for n in (1, 2, 3)]
    return built.samples(made, kind="compile")


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (10.0, 10.0, Verdict.PASS),
        (20.0, 10.0, Verdict.REGRESSION),
        (5.0, 10.0, Verdict.IMPROVED),
        (1.2, 0.5, Verdict.PASS),  # below the floor of a second
        (10.0, None, Verdict.UNCALIBRATED),
        (0.0, 10.0, Verdict.MISSING),
    ],
)
def test_compile_time(now: float, before: float | None, expected: Verdict) -> None:
    """A quarter more, and a second more."""
    runs = [] if before is None else [
        PerfRun(test=built.TEST, samples=compiled(before), provenance=built.provenance())
    ]  # fmt: skip
    assert judged(compiled(now), runs).verdict is expected


# Which runs judge a row --------------------------------------------------------------------------------------------


def judge_of(
    folder: Path, rows: list[PerfRun] | None, device: str = built.DEVICE, platform: platforms.Platform | None = None
) -> speedgate.SpeedJudge:
    """The judge of a run on an H200, which is calibrated, or on another platform."""
    if rows is not None:
        (folder / "h200").mkdir(exist_ok=True)
        (folder / "h200" / samples.PERF_FILE).write_text(samples.encode("h200", rows))
    run = {"capabilities": {"device_name": device}, "versions": {"torch": "2.13.0"}}
    return speedgate.SpeedJudge(platform or platforms.get("h200"), folder, run)


PROPERTIES = {"samples_file": f"samples/{built.CASE}.json", "format": "e4m3fn", "op": "rowwise"}


@pytest.mark.parametrize(
    ("platform", "expected"), [("h200", Verdict.NO_BASELINE), ("mi300x", Verdict.UNCALIBRATED)], ids=["h200", "mi300x"]
)
def test_without_a_baseline(platform: str, expected: Verdict, tmp_path: Path) -> None:
    """No file and no base: never a pass, red on a calibrated platform; the command that makes it is named."""
    judge = judge_of(tmp_path, None, platform=platforms.get(platform))
    found = judge.judge(built.TEST, PROPERTIES, built.run(draw()))
    assert found.verdict is expected
    assert f"fp8ci baseline calibrate --platform {platform}" in found.message


def test_a_renamed_row(tmp_path: Path) -> None:
    """The new name has no row; the old one is among those that must be measured (the gate reports it MISSING)."""
    judge = judge_of(tmp_path, runs())
    renamed = built.TEST.replace("rowwise", "by-row")
    now = built.run(draw(), case=built.CASE.replace("rowwise", "by-row"))
    found = judge.judge(renamed, {"samples_file": "x"}, now)
    assert found.verdict is Verdict.NO_BASELINE
    assert judge.rows == [(built.TEST, f"speed of {built.CASE}")]


def test_a_baseline_of_another_device(tmp_path: Path) -> None:
    """An H100's times say nothing about an H200: STALE_BASELINE, both names in the message."""
    other = [
        msgspec.structs.replace(run, provenance=built.provenance(device="NVIDIA H100 80GB HBM3")) for run in runs()[:1]
    ]
    found = judge_of(tmp_path, other).judge(built.TEST, PROPERTIES, built.run(draw()))
    assert found.verdict is Verdict.STALE_BASELINE
    assert "NVIDIA H100 80GB HBM3 -> NVIDIA H200" in found.message


def test_a_baseline_of_another_configuration(tmp_path: Path) -> None:
    """Another seed is another measurement: STALE_BASELINE, and the key is named."""
    now = built.run(draw(), config={"shape": [32768, 7168], "dtype": "bf16", "seed": 1})
    found = judge_of(tmp_path, runs()).judge(built.TEST, PROPERTIES, now)
    assert found.verdict is Verdict.STALE_BASELINE
    assert "seed: 20250 -> 1" in found.message


def test_a_stale_baseline_hides_no_regression(tmp_path: Path) -> None:
    """What the base shows beside it stays red."""
    now = built.pairs(draw(), {"candidate": 1.2}, stages=2, config={"seed": 1})
    assert judge_of(tmp_path, runs()).judge(built.TEST, PROPERTIES, now).verdict is Verdict.REGRESSION


def test_samples_of_another_test_or_device(tmp_path: Path) -> None:
    """A file that was renamed, and launches of another device, must not pass."""
    judge = judge_of(tmp_path, runs())
    assert judge.judge(built.TEST, PROPERTIES, built.run(draw(), case="other")).verdict is Verdict.DISAGREE
    assert judge.judge(built.TEST, PROPERTIES, built.run(draw(), format="e5m2")).verdict is Verdict.DISAGREE
    elsewhere = _first(built.run(draw()), device="NVIDIA H100 80GB HBM3")
    assert judge.judge(built.TEST, PROPERTIES, elsewhere).verdict is Verdict.DISAGREE


def test_published_figures_never_gate(tmp_path: Path) -> None:
    """A published target that is ten times faster changes no verdict; it is told beside the row."""
    row = {"source": "published", "case": built.CASE, "metric": "time", "value": 17.0, "unit": "us"}
    row |= {"where": "owner/name#1", "conditions": "another machine"}
    (tmp_path / "h200").mkdir()
    file = {"schema": 1, "suite": "perf", "platform": "h200", "rows": [row]}
    (tmp_path / "h200" / samples.PUBLISHED_FILE).write_text(json.dumps(file))
    now = built.run(draw())
    judge = judge_of(tmp_path, None)
    assert judge.judge(built.TEST, PROPERTIES, now).verdict is Verdict.NO_BASELINE
    assert judge_of(tmp_path, runs()).judge(built.TEST, PROPERTIES, now).verdict is Verdict.PASS
    assert "never a limit" in judge.targets(now)[0]


@pytest.mark.parametrize("platform", ["mi300x", "mi325x"])
def test_the_published_targets_of_the_checkout(platform: str) -> None:
    """The two platforms with published figures have their file; no platform has one among its measurements."""
    folder = Path(__file__).resolve().parents[2] / "baselines"
    rows = samples.load_published(folder / platform / samples.PUBLISHED_FILE, platform).rows
    assert rows
    assert all(row.source == "published" and "#" in row.where for row in rows)


@pytest.mark.parametrize("platform", ["mi300x", "mi325x", "mi350x", "mi355x"])
def test_amd_is_uncalibrated_until_somebody_calibrates_it(platform: str) -> None:
    """With the checkout's own files, published targets or none: no verdict on a row, and the command that makes one."""
    here = {"capabilities": {"device_name": "AMD Instinct", "gpus": 1}, "versions": {}}
    checkout = Path(__file__).resolve().parents[2]
    judge = speedgate.SpeedJudge(platforms.get(platform), checkout / "baselines", here)
    launches = [msgspec.structs.replace(one, device="AMD Instinct") for one in built.run(draw()).launches]
    now = built.samples(launches, format="e4m3fnuz", arch="gfx942")
    found = judge.judge(built.TEST, {}, now)
    assert found.verdict is Verdict.UNCALIBRATED
    assert f"`fp8ci baseline calibrate --platform {platform}` on such a machine makes it" in found.message
    slower = judge.judge(built.TEST, {}, built.scaled(now, candidate=3.0))
    assert slower.verdict is Verdict.UNCALIBRATED
    assert (judge.baseline, judge.rows) == (None, [])


# Files and the gate ------------------------------------------------------------------------------------------------


def test_a_baseline_reads_back(tmp_path: Path) -> None:
    """What is written is read, bit for bit; a file of another platform, and rows that are none, are refused."""
    path = tmp_path / samples.PERF_FILE
    path.write_text(samples.encode("h200", runs()))
    assert samples.load(path, "h200").rows == sorted(runs(), key=lambda run: run.key)
    with pytest.raises(ConfigError, match="expected 'mi300x'"):
        samples.load(path, "mi300x")


BAD_ROWS: dict[str, tuple[Callable[[PerfRun], PerfRun], str]] = {
    "twice": (lambda run: run, "appears twice"),
    "no-device": (lambda run: msgspec.structs.replace(run, provenance=built.provenance(device=" ")), "provenance"),
    "elsewhere": (lambda run: msgspec.structs.replace(run, provenance=built.provenance(platform="h100")), "h100"),
    "zero": (
        lambda run: msgspec.structs.replace(run, samples=built.scaled(run.samples, candidate=0.0)),
        "not a positive number",
    ),
    "base": (lambda run: msgspec.structs.replace(run, samples=built.pairs(draw())), "no baseline"),
    "no-probe": (
        lambda run: msgspec.structs.replace(run, samples=_first(run.samples, probe=[])),
        "lacks samples",
    ),
    "no-launches": (lambda run: msgspec.structs.replace(run, samples=built.samples([])), "empty"),
    "throttled": (
        lambda run: msgspec.structs.replace(run, samples=_first(run.samples, throttled=[True] * built.BLOCKS)),
        "every block of a launch was throttled",
    ),
    "no-reference": (
        lambda run: msgspec.structs.replace(run, samples=_first(run.samples, reference=[])),
        "samples of the reference, or names one",
    ),
    "uneven": (
        lambda run: msgspec.structs.replace(run, samples=_first(run.samples, probe=[1.0, 2.0])),
        "two samples a block",
    ),
    "nothing-counted": (
        lambda run: msgspec.structs.replace(run, samples=msgspec.structs.replace(run.samples, kind="counts")),
        "counted nothing",
    ),
    "no-compile-time": (
        lambda run: msgspec.structs.replace(run, samples=msgspec.structs.replace(run.samples, kind="compile")),
        "lacks its compile time",
    ),
}


def test_a_row_without_a_reference() -> None:
    """It is judged by its probe alone, and its noise is the probe's."""

    def alone(row: Samples) -> Samples:
        bare = [msgspec.structs.replace(one, reference=[]) for one in row.launches]
        return msgspec.structs.replace(row, reference="", launches=bare)

    recorded = [msgspec.structs.replace(run, samples=alone(run.samples)) for run in runs()]
    for slower, verdict in ((1.0, Verdict.PASS), (1.3, Verdict.REGRESSION)):
        found = speed.judge(alone(built.run(draw(), {"candidate": slower}, stages=2)), recorded)
        assert (found.verdict, [one.yardstick for one in found.effects]) == (verdict, ["probe"])


@pytest.mark.parametrize(("change", "told"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_are_refused(change: Callable[[PerfRun], PerfRun], told: str, tmp_path: Path) -> None:
    """A recorded row is a measurement with a place of origin, or the file is malformed."""
    good = runs()[0]
    rows = [good, good] if told == "appears twice" else [change(good)]
    path = tmp_path / samples.PERF_FILE
    path.write_text(samples.encode("h200", rows))
    with pytest.raises(ConfigError, match=told):
        samples.load(path, "h200")


def evidence(folder: Path, now: Samples | None, rows: list[PerfRun] | None, test_id: str = built.TEST) -> Path:
    """An evidence folder of a perf run on an H200 with one row."""
    made = Built(folder, ("perf",))
    made.run |= {"platform": "h200", "arch": "sm_90"}
    made.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": built.DEVICE, "gpus": 1}
    properties = {} if now is None else {**PROPERTIES, "samples_file": "samples/row.json"}
    made.test(test_id, **properties)
    written = made.write()
    (folder / "samples").mkdir(exist_ok=True)
    if now is not None:
        (folder / "samples" / "row.json").write_text(json.dumps(msgspec.to_builtins(now)))
    target = folder / "judged-with" / "h200"
    target.mkdir(parents=True, exist_ok=True)
    manifest.write(target / "manifest.txt", [built.TEST])
    if rows is not None:
        (target / samples.PERF_FILE).write_text(samples.encode("h200", rows))
    return written


def of(judgement: gate.Judgement, test_id: str = built.TEST) -> gate.Result:
    (result,) = [result for result in judgement.results if result.id == test_id]
    return result


def test_the_gate_replays_a_regression(tmp_path: Path) -> None:
    """`fp8ci gate` on a folder: REGRESSION, exit 1, twice with the same words."""
    folder = evidence(tmp_path, built.run(draw(), {"candidate": 1.2}, stages=2), runs())
    first, again = gate.judge(folder), gate.judge(folder)
    assert (of(first).verdict, first.exit_code) == (Verdict.REGRESSION, 1)
    assert of(first) == of(again)
    table = of(first).baseline
    assert table is not None
    assert (table["kind"], table["cause"]) == ("perf", "candidate")


def test_the_gate_passes_a_row_as_recorded(tmp_path: Path) -> None:
    """PASS, exit 0."""
    judgement = gate.judge(evidence(tmp_path, built.run(draw()), runs()))
    assert (of(judgement).verdict, judgement.exit_code) == (Verdict.PASS, 0)


def test_a_compile_time_is_named_in_the_table(tmp_path: Path) -> None:
    """It has the case of the row's time, and thousands of times its microseconds."""
    launches = [Launch(number=n, device=built.DEVICE, compile_seconds=1.5 + n / 100) for n in (1, 2, 3)]
    compiled = built.samples(launches, kind="compile", reference="", probe="", work=0, probe_work=0)
    folder = evidence(tmp_path / "compile", compiled, None, built.TEST.replace("test_time", "test_compile"))
    text = summary.render(gate.judge(folder), gate.read_run(folder))
    assert f"| compile {built.CASE}: NO_BASELINE" in text
    assert "| 1520000.0 |" in text
    again = evidence(tmp_path / "time", built.run(draw()), runs())
    timed = summary.render(gate.judge(again), gate.read_run(again))
    assert f"| {built.CASE}: PASS" in timed


def test_the_gate_without_a_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_BASELINE and exit 5 where the platform is calibrated; elsewhere UNCALIBRATED, skipped in JUnit, no pass."""
    judgement = gate.judge(evidence(tmp_path / "calibrated", built.run(draw()), None))
    assert (of(judgement).verdict, of(judgement).junit, judgement.exit_code) == (Verdict.NO_BASELINE, "error", 5)
    built.uncalibrate(monkeypatch)
    judgement = gate.judge(evidence(tmp_path / "not", built.run(draw()), None))
    assert (of(judgement).verdict, of(judgement).junit, judgement.exit_code) == (Verdict.UNCALIBRATED, "skipped", 0)


def test_a_recorded_row_that_nobody_measured(tmp_path: Path) -> None:
    """Its test ran and left no samples, or was renamed: MISSING, exit 3."""
    judgement = gate.judge(evidence(tmp_path / "a", None, runs()))
    assert judgement.exit_code == 3
    renamed = built.TEST.replace("rowwise", "by-row")
    now = built.run(draw(), case=built.CASE.replace("rowwise", "by-row"), op="rowwise")
    judgement = gate.judge(evidence(tmp_path / "b", now, runs(), renamed))
    assert (of(judgement).verdict, judgement.exit_code) == (Verdict.MISSING, 3)


def test_samples_that_cannot_be_read(tmp_path: Path) -> None:
    """A cut file and a field that nobody knows are UNREADABLE; a bare NaN is read, and judged."""
    folder = evidence(tmp_path, built.run(draw()), None)
    path = folder / "samples" / "row.json"
    whole = path.read_text()
    for text in (whole[:-40], whole.replace('"resolution_ns"', '"speed"')):
        path.write_text(text)
        assert of(gate.judge(folder)).verdict is Verdict.UNREADABLE
    with pytest.raises(UnreadableError):
        samples.read(tmp_path / "absent.json")
    bare = msgspec.to_builtins(_first(built.run(draw()), candidate=[math.nan] * 20))
    path.write_text(json.dumps(bare))
    assert of(gate.judge(folder)).verdict is Verdict.FAIL
