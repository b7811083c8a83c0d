"""`fp8ci baseline calibrate`: the same commit, launched again and again, into the speed baseline of a platform.

Runs the perf suite several times (or takes `--from` folders of such runs), writes every launch as a recorded run, and
tells of each row its noise and the smallest slow-down that it can show: a limit of three times the noise, never below
3 %, or the floor of 2 us where the row is short. A row whose limit would be beyond 25 % is listed as too noisy to gate.

One run has three launches and noise needs five, so `--runs 2` is the least that calibrates. A second stage that a run
made for a suspicion counts too: it is the same commit.

    fp8ci baseline calibrate --platform mi350x --runs 4        # on the machine, the day that one is there
    fp8ci baseline calibrate --from EVIDENCE --from EVIDENCE   # anywhere, from what such runs have left

What is refused: runs of several commits, a dirty checkout (before the first run), one run given twice, evidence with a
red test other than what a baseline cures. Where one row went wrong the others are good: `--without GLOB` leaves that
one out. A session that was cut off is refused whole. What it had timed is in its `launches/`: times alone, without the
configuration and the work that make a row comparable, so that they are read and never recorded.

Not here: files (samples.py), noise and limits (speed.py), writing (record.py).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import deaths, gate, manifest, record, samples, speed, speedgate
from harness.errors import ConfigError, MissingError, Verdict
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal_reader import Journal
from harness.platforms import Platform
from harness.record import Change
from harness.samples import PerfRun

SUITE = "perf"
DEFAULT_RUNS = 4


@dataclass(frozen=True)
class Calibrated:
    """What is known of one row. `noise` is None below speed.NOISE_LAUNCHES launches."""

    test: str
    launches: int
    median_ns: float | None
    noise: float | None
    limit: float
    smallest: float | None

    @property
    def told(self) -> str:
        name = self.test.partition("/")[2]
        if self.median_ns is None:
            return f"{name}: {self.launches} launches, counted"
        noise = "unknown" if self.noise is None else f"{self.noise:.2%}"
        head = f"{name}: {self.median_ns / 1e3:.1f} us, {self.launches} launches, noise {noise}"
        if self.limit > speed.TOO_NOISY:
            return f"{head}: too noisy to gate (the limit would be {self.limit:.0%})"
        assert self.smallest is not None
        word = "not calibrated yet, " if self.noise is None else ""
        return f"{head}, {word}smallest slow-down that it can show {self.smallest:.1%}"


@dataclass(frozen=True)
class Selected:
    """Which rows of evidence are taken: those of `case`, less those of `without`; both as `--case` takes them.

    What the evidence says of a suite, a process or a module as a whole is of every row.
    """

    case: str | None = None
    without: str | None = None

    def __call__(self, test_id: str) -> bool:
        if not manifest.is_test(test_id):
            return True
        left_out = self.without is not None and manifest.case_matches(test_id, self.without)
        return manifest.case_matches(test_id, self.case) and not left_out


EVERY = Selected()


def run_all(
    runs: int, execute: Callable[[str], Path], say: Callable[[str], None], selected: Selected = EVERY
) -> list[Path]:
    """Run the suite `runs` times; evidence that is no ground for a baseline ends it."""
    found: list[Path] = []
    for number in range(1, runs + 1):
        say(f"calibrating: run {number} of {runs}")
        evidence = execute(f"run-{number}")
        check(evidence, selected)
        found.append(evidence)
    return found


def check(evidence: Path, selected: Selected = EVERY) -> None:
    """ConfigError for a dirty or unknown commit, and for anything red or unclear, among the rows that are taken, that
    is not cured by this.

    A row that is too noisy to gate is cured by more launches, or recorded as what it is. A session that was cut off is
    refused whole, whichever row it was at: what it was cut off by may have slowed what it had timed before.
    """
    run = gate.read_run(evidence)
    check_checkout(f"the checkout of {evidence}", run.get("commit"), run.get("dirty"))
    death = deaths.of_suite(Journal.read(evidence / JOURNAL_FILE), SUITE, evidence)
    if death is not None:
        kept = f"; what it had timed is in {evidence}/launches/, to be read and never recorded"
        raise ConfigError(
            f"{evidence} is of a session that was cut off: {death.message}",
            "one that came to its end",
            f"run again, fewer rows at a time with --case{kept if (evidence / 'launches').is_dir() else ''}",
        )
    curable = record.CURABLE | {Verdict.UNMEASURABLE}
    bad = [
        result
        for result in gate.judge(evidence).worst_first
        if selected(result.id)
        and result.verdict not in curable
        and not (result.verdict is Verdict.INCONCLUSIVE and (result.baseline or {}).get("limit", 0) > speed.TOO_NOISY)
    ]
    bad.sort(key=lambda result: manifest.is_test(result.id))  # what no choice of rows leaves out comes first
    if bad:
        other = f"; or leave the row out, --without {bad[0].id!r}" if manifest.is_test(bad[0].id) else ""
        raise ConfigError(
            f"{evidence} has {len(bad)} findings that are no ground for a baseline, first {bad[0].id}: "
            f"{bad[0].verdict} {bad[0].message}",
            "a run on a machine that held still, in which every row was measured",
            f"read {evidence}/summary.md, and run again{other}",
        )


def check_checkout(what: str, commit: object, dirty: object) -> None:
    """ConfigError for a commit that nobody knows, or a checkout that differs from it. `what` begins the sentence."""
    if not commit:
        raise ConfigError(f"{what} does not say its commit", "a row that can be traced", "calibrate in a git checkout")
    if dirty:
        raise ConfigError(
            f"{what} has local changes", "a commit that can be checked out again", "commit, or remove them; run again"
        )


def rows_of(evidence: Path, selected: Selected = EVERY) -> list[PerfRun]:
    """The rows of one evidence folder. ConfigError for a dirty checkout."""
    run = gate.read_run(evidence)
    check_checkout(f"the checkout of {evidence}", run.get("commit"), run.get("dirty"))
    where = record.provenance(run)
    found: list[PerfRun] = []
    for one in record.measured(Journal.read(evidence / JOURNAL_FILE).tests.values(), "samples_file"):
        if not selected(one.id):
            continue
        measured = samples.read(evidence / str(one.properties["samples_file"]))
        mine = msgspec.structs.replace(measured, launches=list(measured.of("candidate")))
        found.append(PerfRun(test=one.id, samples=mine, provenance=where))
    return found


def changes(
    root: Path, platform: Platform, evidence: Sequence[Path], selected: Selected = EVERY
) -> tuple[Change, list[Calibrated]]:
    """What calibrating would write, and what is known of each row afterwards.

    Raises:
        ConfigError: the runs are of several commits, of a dirty one, or two of them are one; or a row of theirs is
            what no baseline may hold, such as a launch that was throttled in every block.
        MissingError: they measured nothing.
    """
    fresh = [row for folder in evidence for row in rows_of(folder, selected)]
    if not fresh and any(rows_of(folder) for folder in evidence):
        chosen = " and ".join(f"--{name} {glob!r}" for name, glob in vars(selected).items() if glob is not None)
        raise MissingError(
            f"nothing to calibrate: no row of these runs is left by {chosen}", "one row at least", "correct the glob"
        )
    if not fresh:
        raise MissingError("nothing to calibrate: no test left samples", "a run of the perf suite", "run it on a GPU")
    bad = next(((row.test, what) for row in fresh if (what := samples.problem_of(row, platform.id))), None)
    if bad is not None:
        raise ConfigError(
            f"{bad[0]} cannot be recorded: {bad[1]}",
            "a run on a machine that held still, in which every row was measured",
            f"run again; or leave the row out, --without {bad[0]!r}",
        )
    commits = sorted({row.provenance.commit for row in fresh})
    if len(commits) > 1:
        raise ConfigError(
            f"the runs are of {len(commits)} commits, {commits[0][:12]} and {commits[1][:12]}",
            "one: the noise of a row is what differs without a change",
            "calibrate from runs of one commit",
        )
    twice = [key for key, count in Counter(row.key for row in fresh).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{twice[0][0]} was measured twice by the run that started at {twice[0][1]}",
            "each run once, and no copy of it",
            "give each folder once",
        )
    path = root / "baselines" / platform.id / samples.PERF_FILE
    old = samples.load(path, platform.id).rows if path.exists() else []
    change = Change(path, "")
    by_key = {row.key: row for row in old}
    merged = {**by_key, **{row.key: row for row in fresh}}
    tests = sorted({row.test for row in fresh})
    known: list[Calibrated] = []
    for test in tests:
        before = [row for row in old if row.test == test]
        after = _comparable([row for row in merged.values() if row.test == test], fresh, test)
        kept = {one.key for one in after}
        dropped = [row for row in before if row.key not in kept]
        for row in dropped:
            merged.pop(row.key, None)
        if dropped:
            change.loosened.append(f"{test}: another configuration in place of {len(dropped)} runs")
        now = calibrated(test, after)
        known.append(now)
        wider = _wider(test, [row for row in before if row not in dropped], now)
        change.loosened.extend(wider)
    again = sum(row.key in by_key for row in fresh)
    known_before = f", {again} of them known before" if again else ""
    change.told.append(f"{len(fresh)} runs of {len(tests)} rows written{known_before}, {len(merged)} runs in all")
    change.text = samples.encode(platform.id, merged.values())
    return change, known


def _comparable(rows: Sequence[PerfRun], fresh: Sequence[PerfRun], test: str) -> list[PerfRun]:
    """Those that the gate holds beside what was measured now: of its configuration, on its device."""
    now = next(row for row in fresh if row.test == test)
    return [
        row
        for row in rows
        if speedgate.identity(row.samples) == speedgate.identity(now.samples)
        and row.provenance.device == now.provenance.device
    ]


def _wider(test: str, before: Sequence[PerfRun], now: Calibrated) -> list[str]:
    """A limit that the new runs widen: noise that was found later is tolerance all the same."""
    if not before or now.median_ns is None:
        return []
    old = calibrated(test, before)
    if old.noise is None or now.limit <= old.limit:
        return []
    return [f"{test} limit {old.limit:.4f} -> {now.limit:.4f}"]


def calibrated(test: str, rows: Sequence[PerfRun]) -> Calibrated:
    """Noise, limit and smallest effect of one row, from all of its runs."""
    launches = [one for row in rows for one in row.samples.launches]
    kind = rows[0].samples.kind
    if kind == "counts":
        return Calibrated(test, len(launches), None, 0.0, 0.0, None)
    if kind == "compile":
        seconds = statistics.median(one.compile_seconds or 0.0 for one in launches)
        smallest = speed.smallest_effect(speed.COMPILE_LIMIT, max(seconds, 1e-9) * 1e9, speed.COMPILE_FLOOR_NS)
        return Calibrated(test, len(launches), seconds * 1e9, None, speed.COMPILE_LIMIT, smallest)
    median = statistics.median(value for one in launches for value in one.candidate)
    limit, noise = speed.limit_of(rows)
    return Calibrated(test, len(launches), median, noise, limit, speed.smallest_effect(limit, median))


def lint(root: Path) -> list[str]:
    """What is wrong with the speed baselines of a checkout; malformed files raise ConfigError as when judging.

    No values copied between platforms, no recorded figure that somebody else has published.
    """
    problems: list[str] = []
    owners: dict[tuple[float, ...], str] = {}
    for path in sorted((root / "baselines").glob(f"*/{samples.PERF_FILE}")):
        platform = path.parent.name
        for row in samples.load(path, platform).rows:
            for one in row.samples.launches:
                values = tuple(one.candidate)
                owner = owners.setdefault(values, platform) if values else platform
                if owner != platform:
                    problems.append(f"{platform}/{samples.PERF_FILE}: {row.samples.case} holds the values of {owner}")
    for path in sorted((root / "baselines").glob(f"*/{samples.PUBLISHED_FILE}")):
        samples.load_published(path, path.parent.name)
    return problems
