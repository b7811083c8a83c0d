"""What will run: the processes of a run, and for `fp8ci plan` the fate of every test id before anything runs.

A job is one suite in one test process (which may be pytest-xdist's controller). Jobs are laid into lanes: the jobs of a
lane run one after the other, the lanes run side by side and share the cores, so that a suite that cannot use a second
core does not keep it idle. Nothing here is timed, so sharing the machine costs no verdict; suites that
measure speed must never share it.

Starting pytest-xdist costs each worker an import of torch, about two seconds on its core: a job that is expected to be
short runs in one process.

`collect` asks pytest itself (`--collect-only` with our plugin), because only pytest knows its ids, and compares them
with the manifest and the ledger: run, skip with its reason, waived, or missing.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness import capabilities, journal, journal_reader, ledger, manifest, platforms
from harness.errors import UsageError
from harness.executor import Command, Executor, Place, here
from harness.platforms import DEVICES_VARIABLE, FULL_VARIABLE, Execution, Platform, SpeedTable

SHORT = 8.0
"""Seconds of expected work below which one process beats the start of several."""


@dataclass(frozen=True)
class Job:
    """One suite in one test process. The last two are expectations for the display: start, and then a test."""

    suite: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    workers: int
    threads: int
    deadline: float
    start_seconds: float
    seconds_a_test: float


Lanes = tuple[tuple[Job, ...], ...]


def find_root(start: Path) -> Path:
    """The nearest folder upwards that holds baselines/ and suites/; UsageError when there is none."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / "baselines").is_dir() and (folder / "suites").is_dir():
            return folder
    raise UsageError(f"{start} is in no checkout", "a folder with baselines/ and suites/ at or above it", "use --root")


def usable_cores() -> int:
    """Cores that this process may use: the scheduler's mask, and the quota of the control group where it has one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores  # no such control group: nothing limits us further
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def expected_tests(root: Path, platform: Platform, suite: str, case: str | None) -> int | None:
    """How many tests the manifest leads one to expect; None where the platform has no manifest yet."""
    path = root / "baselines" / platform.id / "manifest.txt"
    if not path.exists():
        return None
    return sum(
        test_id.startswith(f"{suite}/") and manifest.case_matches(test_id, case) for test_id in manifest.read(path)
    )


def lanes(
    root: Path,
    platform: Platform,
    suites: Sequence[str],
    *,
    case: str | None,
    options: Sequence[str],
    pytest_args: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    gpus: int = 0,
    cores: int | None = None,
    collect_only: bool = False,
    full: bool = False,
    place: Place | None = None,
    speed: SpeedTable = "long",
) -> Lanes:
    """The jobs of a run, laid into lanes.

    `options` are our plugin's, `pytest_args` the caller's, `environment` overrides everything else, `full` adds the
    rows of the night, `place` is where they will run (default: here), `speed` the table of the perf suite. On a GPU
    there is one lane: two suites at once would share the device.
    """
    asked = (environment or {}).get("OMP_NUM_THREADS", "")
    # Processes with threads of their own get cores of their own: two of two on two cores take thirty times as long.
    available = max(1, (cores or usable_cores()) // (int(asked) if asked.isdigit() and int(asked) else 1))
    work = {suite: _work(root, platform, suite, case) for suite in suites}
    count = min(len(suites), available) if platform.vendor == "cpu" else 1
    laid: list[list[str]] = [[] for _ in range(max(1, count))]
    for suite in sorted(suites, key=lambda name: (-work[name], name)):  # longest first, onto the emptiest lane
        min(laid, key=lambda lane: (sum(work[name] for name in lane), len(lane))).append(suite)
    beside = sum(work.values()) if count > 1 else 0.0
    workers = {
        suite: _workers(platform, suite, work[suite], beside or work[suite], gpus, available) for suite in suites
    }
    processes = sum(max(workers[suite] for suite in lane) for lane in laid)
    make = _JobMaker(
        root,
        platform,
        options,
        pytest_args,
        environment or {},
        max(1, available // processes),
        collect_only,
        full,
        place or here(),
        None if case is not None else speed,
    )
    order = {suite: position for position, suite in enumerate(suites)}
    return tuple(
        tuple(make.job(suite, workers[suite]) for suite in sorted(lane, key=order.__getitem__)) for lane in laid
    )


def _work(root: Path, platform: Platform, suite: str, case: str | None) -> float:
    """Expected seconds of one core. Without a manifest a whole suite counts as long, a selection of cases as short."""
    execution = platforms.EXECUTION[platform.vendor, suite]
    tests = expected_tests(root, platform, suite, case)
    if tests is None:
        return 10 * SHORT if case is None else SHORT / 2
    return tests * execution.seconds_a_test


def _workers(platform: Platform, suite: str, work: float, beside: float, gpus: int, cores: int) -> int:
    """Test processes of a suite: its part of the work that runs side by side, in cores, rounded up, and one more.

    That puts a few processes more than cores on the machine. Each has one thread, so they only take turns, and no core
    stands still when the suites beside it have ended early: those that compile take a third of the time when Triton's
    cache knows their kernels.
    """
    share = platforms.EXECUTION[platform.vendor, suite].workers
    if share == "gpus":
        return max(1, gpus)
    if share == "one" or work < SHORT:
        return 1
    return min(cores, math.ceil(cores * work / beside) + (work < beside))


@dataclass(frozen=True)
class _JobMaker:
    root: Path
    platform: Platform
    options: Sequence[str]
    pytest_args: Sequence[str]
    overrides: Mapping[str, str]
    threads: int
    collect_only: bool
    full: bool
    place: Place
    speed: SpeedTable | None

    def job(self, suite: str, workers: int) -> Job:
        execution = platforms.EXECUTION[self.platform.vendor, suite]
        # pytest finds our plugin by its entry point where the distribution is installed; in a bare checkout name it.
        plugin = () if self.place.plugin_installed else ("-p", "harness.plugin")
        own_workers = any(item.startswith(("-n", "--numprocesses", "--dist")) for item in self.pytest_args)
        argv = [self.place.python, "-m", "pytest", f"suites/{suite}", "--rootdir", str(self.root)]
        # Hypothesis's plugin costs a second a process, and no suite that is gated draws its inputs from it.
        argv += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-q", "--tb=short", "-rfE"]
        if self.platform.vendor != "cpu":
            # What a GPU's driver writes on its way down must reach the log: pytest's own capture dies with the process.
            argv += ["--capture=sys"]
        # One broken file must not take the results of the others along: it is red by itself, and its ids are missing.
        argv += ["--continue-on-collection-errors", *plugin, "--fp8-suite", suite, *self.options]
        if self.speed and (rows := platforms.case_of(suite, None, self.speed)):
            argv += ["--fp8-case", rows]
        if self.collect_only:
            argv += ["--collect-only"]
        elif workers > 1 and not own_workers:
            argv += ["-n", str(workers)]
        argv += self.pytest_args
        expected = (execution.start_seconds, execution.seconds_a_test / workers)
        environment = self._environment(execution, workers)
        return Job(suite, tuple(argv), environment, workers, self.threads, execution.deadline, *expected)

    def _environment(self, execution: Execution, workers: int) -> dict[str, str]:
        """The whole environment of the process. OMP_NUM_THREADS is only ever lowered by the caller's own value."""
        base = {name: value for name, value in self.place.environment.items() if name not in execution.unset}
        asked = base.get("OMP_NUM_THREADS", "")
        base.update(self.platform.environment)
        base.update(execution.environment)
        base.update({FULL_VARIABLE: "1"} if self.full else {})
        base["OMP_NUM_THREADS"] = str(min(self.threads, int(asked)) if asked.isdigit() and int(asked) else self.threads)
        if execution.workers == "gpus" and workers > 1:
            name = "HIP_VISIBLE_DEVICES" if self.platform.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
            devices = base.get(name) or ",".join(map(str, range(workers)))
            base[DEVICES_VARIABLE] = f"{name}={devices}"
        base.update(self.overrides)
        return base


Fate = Literal["run", "skip", "waived", "missing"]


@dataclass(frozen=True)
class Planned:
    """What will become of one test id. `reason` says why it does not run, or what is unusual about its running."""

    id: str
    suite: str
    fate: Fate
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """What `fp8ci plan` prints. `problems` are files that could not be collected, a sentence each."""

    platform: Platform
    reason: str
    machine: capabilities.Capabilities
    suites: tuple[str, ...]
    entries: tuple[Planned, ...]
    problems: tuple[str, ...]


def collect(
    root: Path,
    platform: Platform,
    reason: str,
    *,
    suites: tuple[str, ...] = (),
    case: str | None = None,
    full: bool = False,
    executor: Executor,
) -> Plan:
    """Ask pytest for the ids of every suite, side by side, and compare them with manifest and ledger; runs no test."""
    chosen = platforms.select_suites(platform, suites)
    machine = capabilities.probe(platform)
    with tempfile.TemporaryDirectory(prefix="fp8ci-plan-") as folder:
        out = Path(folder)
        known = out / "capabilities.json"
        known.write_text(machine.to_json(), encoding="utf-8")
        options = ["--fp8-out", folder, "--fp8-platform", platform.id, "--fp8-run-id", "plan"]
        options += ["--fp8-capabilities", str(known), *(["--fp8-case", case] if case else [])]
        laid = lanes(root, platform, chosen, case=case, options=options, collect_only=True, full=full)
        threads = []
        for lane in laid:
            commands = [
                Command(job.argv, job.environment, root, job.deadline, out / f"{job.suite}.log") for job in lane
            ]
            threads.append(threading.Thread(target=_collect_lane, args=(executor, commands)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        path = out / journal.FILE_NAME
        told = journal_reader.Journal.read(path) if path.exists() else journal_reader.Journal()
    problems = [f"{record.path}: {record.message}" for record in (*told.collect_errors, *told.collect_skips)]
    entries: list[Planned] = []
    for suite in chosen:
        entries += _fates(root, platform, machine, suite, case, told)
        if not told.collected.get(suite) and not told.deselected.get(suite):
            problems.append(f"suite {suite} collected nothing")
    return Plan(platform, reason, machine, chosen, tuple(entries), tuple(problems))


def _collect_lane(executor: Executor, commands: Sequence[Command]) -> None:
    for command in commands:
        executor.run(command, cancelled=threading.Event())


def _fates(
    root: Path,
    platform: Platform,
    machine: capabilities.Capabilities,
    suite: str,
    case: str | None,
    told: journal_reader.Journal,
) -> list[Planned]:
    """One suite's ids: those collected, in pytest's order, then those that only the manifest has."""
    path = root / "baselines" / platform.id / "manifest.txt"
    listed = manifest.read(path) if path.exists() else ()
    required = [item for item in listed if item.startswith(f"{suite}/") and manifest.case_matches(item, case)]
    waivers = ledger.load(root / "baselines" / "waivers.toml")
    collected = told.collected.get(suite, [])
    entries = []
    for test_id in collected:
        waiver = next((item for item in waivers if item.covers(test_id, machine)), None)
        if test_id in told.planned_skips:
            note = "; the manifest says that it must run here" if test_id in required else ""
            entries.append(Planned(test_id, suite, "skip", told.planned_skips[test_id] + note))
        elif waiver is not None and waiver.expired(ledger.today()):
            expired = f"its waiver expired on {waiver.expires}: {waiver.reason} ({waiver.issue})"
            entries.append(Planned(test_id, suite, "run", expired))
        elif waiver is not None:
            entries.append(
                Planned(test_id, suite, "waived", f"until {waiver.expires}: {waiver.reason} ({waiver.issue})")
            )
        else:
            note = "" if test_id in required or not listed else "not in the manifest yet"
            entries.append(Planned(test_id, suite, "run", note))
    present = set(collected)
    lost = "the manifest says that it must run here; it was not collected"
    return entries + [Planned(item, suite, "missing", lost) for item in required if item not in present]


def check_root(root: Path) -> None:
    """UsageError when `root` is no checkout."""
    for name in ("baselines", "suites"):
        if not (root / name).is_dir():
            raise UsageError(f"{root} has no {name}/", "a checkout with baselines/ and suites/", "correct --root")
