"""`execute`: plan -> evidence folder. Runs the suites and records what happened; gives no verdict.

The folder is written so that it can be judged whatever stops the run, and when: run.json before the first test, the
journal event by event, each process's start and end around it. Results of an earlier run in the same folder go first,
since a stale junit.xml next to a run that died is the oldest way to turn green by accident. What the run is judged with
(baselines, manifest, ledger) is copied beside it: a gate elsewhere, or next year, reaches the same verdict.

SIGINT, SIGTERM and SIGHUP stop the test processes (SIGTERM, then SIGKILL), and the folder is finished as it is: the
journal's `process-end` says `interrupt`, run.json says `"interrupted": true`.

Not here: what runs where (plan.py), verdicts (gate.py), junit.xml and summary.md (written by the command line).
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform as host
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from harness import canary, capabilities, devices, files, journal, journal_reader, plan, platforms, progress
from harness.errors import DiskError, HarnessError, InterruptedRun, UsageError
from harness.executor import Command, Ended, Executor, Place
from harness.local import LocalExecutor
from harness.plan import Job, Lanes
from harness.platforms import Platform, SpeedTable

SCHEMA = 1
RUN_FILE = "run.json"
CAPABILITIES_FILE = "capabilities.json"
JUDGED_WITH = "judged-with"
LOG_BYTES = 1_000_000
"""How much of a log's end may accuse the GPU: what a driver writes on its way down comes last."""

RESERVE = ".reserve"
RESERVED = 4 << 20
"""Bytes kept free in the evidence folder, so that a test which fills its disk can still be reported: junit.xml and
report.html of the CPU's main job (2,984 checks) are 1.2 and 1.1 MB, each of its eight charts 55 kB."""
EVENT_ROOM = 64 << 10
"""Bytes of the reserve that the end of one test process may take."""

_OWN_FILES = (RUN_FILE, CAPABILITIES_FILE, journal.FILE_NAME, "junit.xml", "summary.md", "report.html", RESERVE)
_OWN_FOLDERS = ("logs", "losses", "isa", "samples", "launches", "charts", JUDGED_WITH)


@dataclass(frozen=True)
class RunRequest:
    """What to run. Empty `suites` are those that must run on the platform.

    `case` is what `--case` takes (manifest.case_matches), `speed` the table of the perf suite, `full` adds the rows of
    the night, `out` is the evidence folder (default: evidence/<platform>-<UTC time>-<run id> in the checkout),
    `pytest_args` go to every suite's pytest, `env_overrides` win over everything the platform sets.
    `deadline` replaces the suites' own, in seconds. `cores` replaces the count of usable ones.
    `machine_failed` says of an evidence folder and a suite whether the machine ended its last attempt: then, and only
    then, the suite runs again, up to `retries` times; every attempt stays in the journal.
    `beside` are evidence folders of the same command: what lies in them makes the checkout no more dirty than `out`.
    For an executor that is not this machine: `place`, how to `ask` the device there, and what run.json says of it
    (`told`).
    """

    root: Path
    platform: Platform
    platform_reason: str
    suites: tuple[str, ...] = ()
    case: str | None = None
    speed: SpeedTable = "long"
    full: bool = False
    out: Path | None = None
    beside: tuple[Path, ...] = ()
    pytest_args: tuple[str, ...] = ()
    policy: str = "pull-request"
    env_overrides: Mapping[str, str] = field(default_factory=dict)
    progress: bool = True
    deadline: float | None = None
    cores: int | None = None
    retries: int = 0
    machine_failed: Callable[[Path, str], bool] = lambda evidence, suite: False
    place: Place | None = None
    ask: Callable[[Mapping[str, str]], Mapping[str, Any]] | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


def execute(request: RunRequest, executor: Executor | None = None) -> Path:
    """Run the suites; returns the evidence folder, complete up to whatever ended the run.

    UsageError for a suite or platform that cannot run here, a case that selects nothing, or an output folder that
    holds something else. InterruptedRun when it was stopped before the first test process. InfraError when the device
    does not answer or a process cannot be started.
    """
    plan.check_root(request.root)
    suites = platforms.select_suites(request.platform, request.suites)
    run_id = secrets.token_hex(4)
    started = _now()
    stamp = started.strftime("%Y%m%dT%H%M%SZ")
    default = request.root / "evidence" / f"{request.platform.id}-{stamp}-{run_id}"
    out = (request.out or default).absolute()
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with _only_run_in(out), stop_signals() as stopped:
        prepare_folder(out)
        _keep_room(out)
        try:
            machine = _probe(request, stopped)
        except HarnessError:
            if made:  # a run that never was: `fp8ci gate evidence/*` must not find it, nor what was made to hold it
                shutil.rmtree(out, ignore_errors=True)
            for folder in made[1:]:
                with suppress(OSError):
                    folder.rmdir()
            raise
        (out / CAPABILITIES_FILE).write_text(machine.to_json() + "\n", encoding="utf-8")
        _copy_judged_with(request, out)
        run = _describe(request, suites, machine, out, run_id, started)
        with triton_cache() as cache, tempfile.TemporaryDirectory(prefix="fp8ci-inductor-") as inductor:
            caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": inductor}
            lanes = _lanes(request, suites, machine, out, run_id, caches)
            run["jobs"] = [
                {"suite": job.suite, "lane": number, "workers": job.workers, "threads": job.threads}
                for number, lane in enumerate(lanes)
                for job in lane
            ]
            _write_json(out / RUN_FILE, run)
            errors = _run_lanes(request, executor or LocalExecutor(), lanes, out, stopped)
        (out / RESERVE).unlink(missing_ok=True)
        told = journal_reader.Journal.read(out / journal.FILE_NAME)
        run["finished"] = _text(_now())
        run["interrupted"] = stopped.is_set()
        run["attempts"] = [
            {
                "suite": process.suite,
                "attempt": process.attempt,
                "rc": process.rc,
                "signal": process.signal,
                "killed_by": process.killed_by,
                "seconds": process.seconds,
            }
            for process in told.processes
        ]
        _write_json(out / RUN_FILE, run)
    if errors:
        raise errors[0]
    if stopped.is_set() and not told.processes:
        raise InterruptedRun("stopped before the first test", next_step="run again")
    _check_case(request, suites, told)
    return out


@contextmanager
def _only_run_in(out: Path) -> Iterator[None]:
    """The folder belongs to this run until it ends, however it ends; UsageError while another run has it.

    Two runs in one folder would remove and then continue each other's journal.
    """
    if out.exists() and not out.is_dir():
        yield  # prepare_folder says it
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DiskError(f"{out} cannot be written ({error})", "a writable folder with room", "name another") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run writes to {out}", "a folder of its own", "wait, or name another") from None
        except OSError:
            pass  # a file system without locks (some network mounts)
        yield
    finally:
        os.close(folder)


@contextmanager
def triton_cache() -> Iterator[str]:
    """The folder for Triton's compile cache of one run: below the user's cache folder, kept for the next run.

    Entries are keyed by the source, so an old one is never wrong, only unused. Two runs never write to it at once
    (triton-lang/triton#2688, #4295): while another has it, or where it cannot be had, the run gets a folder that goes
    with it.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        kept = Path(base) / "fp8ci" / "triton"
        kept.mkdir(parents=True, exist_ok=True)
        folder = os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # no home, or none that can be written
        with tempfile.TemporaryDirectory(prefix="fp8ci-triton-") as own:
            yield own
        return
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another run's, or a file system without locks
            with tempfile.TemporaryDirectory(prefix="fp8ci-triton-") as own:
                yield own
            return
        yield str(kept)
    finally:
        os.close(folder)


def prepare_folder(out: Path) -> Path:
    """An empty evidence folder; an older run's results in it are removed, anything else in it is left alone.

    UsageError for a folder that holds other things and is no evidence; DiskError when it cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "a folder for the evidence", "name another with --out")
    evidence = (out / RUN_FILE).exists() or (out / journal.FILE_NAME).exists()
    if out.exists() and any(out.iterdir()) and not evidence:
        raise UsageError(f"{out} is not empty and no evidence", "a new, empty or evidence folder", "name another")
    try:
        for name in _OWN_FILES:
            (out / name).unlink(missing_ok=True)
        for name in _OWN_FOLDERS:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
        (out / "logs").mkdir(parents=True)
        (out / journal.FILE_NAME).touch()
    except OSError as error:
        raise DiskError(f"{out} cannot be written ({error})", "a writable folder with room", "name another") from error
    return out


def _probe(request: RunRequest, stopped: threading.Event) -> capabilities.Capabilities:
    """What this machine can do. UsageError when it is not the platform that the run names."""
    override = request.env_overrides.get("FP8STACK_ARCH")
    environment = {**request.platform.environment, **({"FP8STACK_ARCH": override} if override else {})}
    try:
        facts = (request.ask or platforms.ask_device)(environment)
    except HarnessError:
        if stopped.is_set():
            raise InterruptedRun("stopped while the device was asked", next_step="run again") from None
        raise
    machine = capabilities.from_facts(facts, request.platform.id)
    if request.platform.vendor != "cpu":
        found = platforms.of_device(machine.device_name)
        if found is not request.platform:
            raise UsageError(
                f"platform {request.platform.id} is asked for and this machine has {machine.device_name}",
                "a device of that platform",
                "use --platform auto, or run it there",
            )
    return machine


def _copy_judged_with(request: RunRequest, out: Path) -> None:
    """Copies keep their paths below baselines/. What does not exist is not copied: the gate says what that means."""
    for name in request.platform.baseline_files:
        source = request.root / "baselines" / name
        if source.is_file():
            target = out / JUDGED_WITH / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _describe(
    request: RunRequest,
    suites: tuple[str, ...],
    machine: capabilities.Capabilities,
    out: Path,
    run_id: str,
    started: datetime.datetime,
) -> dict[str, Any]:
    """run.json, as far as it is known before the first test."""
    commit, dirty = checkout_state(request.root, (out, *request.beside))
    versions = dict(machine.versions)
    for name in ("fp8stack", "pytest", "pytest-xdist"):
        versions[name] = _version(name)
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "platform": request.platform.id,
        "platform_reason": request.platform_reason,
        "arch": machine.arch,
        "target": machine.target,
        "arch_reason": machine.reason,
        "suites": list(suites),
        "case": request.case,
        "speed": request.speed,
        "full": request.full,
        "pytest_args": list(request.pytest_args),
        "policy": request.policy,
        "commit": commit,
        "dirty": dirty,
        "versions": versions,
        "image_digest": None,
        "partition": devices.partition(devices.find(request.platform.vendor)),
        "capabilities": json.loads(machine.to_json()),
        "environment": dict(request.env_overrides),
        "ignored_environment": sorted(name for name in platforms.NEVER_SET if name in os.environ),
        "host": {
            "name": host.node(),
            "system": host.platform(),
            "python": host.python_version(),
            "cores": plan.usable_cores(),
            "cpu": _cpu_model(),
        },
        "started": _text(started),
        "finished": None,
        "interrupted": False,
        "attempts": [],
        **request.told,
    }


def _lanes(
    request: RunRequest,
    suites: tuple[str, ...],
    machine: capabilities.Capabilities,
    out: Path,
    run_id: str,
    caches: Mapping[str, str],
) -> Lanes:
    """The jobs of this run. No other run has its compile caches, and each worker takes a folder of its own in them.

    Inductor's starts empty: one that other environments had filled gave kernels that refused their arguments.
    """
    options = ["--fp8-out", str(out), "--fp8-platform", request.platform.id, "--fp8-run-id", run_id]
    options += ["--fp8-capabilities", str(out / CAPABILITIES_FILE)]
    if request.case is not None:
        options += ["--fp8-case", request.case]
    return plan.lanes(
        request.root,
        request.platform,
        suites,
        case=request.case,
        options=options,
        pytest_args=request.pytest_args,
        environment={**caches, **request.env_overrides},
        gpus=machine.gpus,
        cores=request.cores,
        full=request.full,
        place=request.place,
        speed=request.speed,
    )


def _run_lanes(
    request: RunRequest, executor: Executor, lanes: Lanes, out: Path, stopped: threading.Event
) -> list[HarnessError]:
    """Run every lane to its end, showing progress; returns the errors that kept a job from running."""
    errors: list[HarnessError] = []
    threads = [
        threading.Thread(target=_run_lane, args=(request, executor, lane, out, stopped, errors), name=f"lane-{number}")
        for number, lane in enumerate(lanes)
    ]
    display = progress.choose(journal_reader.JournalTail(out / journal.FILE_NAME), lanes, request.progress)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            try:
                display.update()
            except OSError:  # nobody reads stderr any more (`fp8ci run 2>&1 | head`): no reason to stop the tests
                display = progress.Silent()
            time.sleep(0.1)
    except BaseException:
        stopped.set()
        raise
    finally:
        for thread in threads:
            thread.join()
        with suppress(OSError):
            display.close()
    return errors


def _run_lane(
    request: RunRequest,
    executor: Executor,
    lane: tuple[Job, ...],
    out: Path,
    stopped: threading.Event,
    errors: list[HarnessError],
) -> None:
    """One job after the other. One that the machine failed is tried again, `request.retries` times at most."""
    for job in lane:
        if stopped.is_set():
            return
        try:
            for attempt in range(1, request.retries + 2):
                _attempt(request, executor, job, attempt, out, stopped)
                if stopped.is_set() or not request.machine_failed(out, job.suite):
                    break
        except HarnessError as error:
            errors.append(error)
            return
        except OSError as error:
            what = f"{job.suite} cannot be run ({error})"
            errors.append(DiskError(what, "a writable evidence folder", "free space, or name another with --out"))
            return


def _attempt(
    request: RunRequest, executor: Executor, job: Job, attempt: int, out: Path, stopped: threading.Event
) -> None:
    """One test process between its two events in the journal, and the canary where the GPU is suspect.

    The log of an earlier attempt is kept under its number: what it says must not be taken for this one's.
    """
    log = out / "logs" / f"{job.suite}.log"
    if attempt > 1:
        log.replace(log.with_name(f"{job.suite}.{attempt - 1}.log"))
    name = {"suite": job.suite, "attempt": attempt}
    command = Command(
        argv=job.argv,
        environment=job.environment,
        folder=request.root,
        deadline=request.deadline or job.deadline,
        log=log,
        writable=(out,),
    )
    with journal.JournalWriter(out / journal.FILE_NAME) as writer:
        writer.write("process-start", **name, argv=list(job.argv), workers=job.workers, time=time.time())
    ended = executor.run(command, cancelled=stopped)
    _make_room(out)
    with journal.JournalWriter(out / journal.FILE_NAME) as writer:
        writer.write(
            "process-end",
            **name,
            rc=ended.rc,
            signal=ended.signal,
            killed_by=ended.killed_by,
            seconds=round(ended.seconds, 3),
            pid=ended.pid,
            oom=ended.oom,
            fault=str(ended.fault.verdict) if ended.fault else None,
            fault_message=ended.fault.message if ended.fault else None,
        )
    if request.platform.vendor != "cpu" and _suspect(ended, log):
        own = log.with_name(f"{job.suite}.canary.{attempt}.log")
        answer = executor.run(canary.command(job.argv[0], job.environment, request.root, own), cancelled=stopped)
        with journal.JournalWriter(out / journal.FILE_NAME) as writer:
            writer.write("canary", **name, message=canary.told(answer, own.read_text("utf-8", "replace")))


def _keep_room(out: Path) -> None:
    """Keep the reserve; on a small disk a quarter of it, so that this is no part of the trouble."""
    with suppress(OSError):
        (out / RESERVE).write_bytes(bytes(min(RESERVED, shutil.disk_usage(out).free // 4)))


def _make_room(out: Path) -> None:
    """Give up a piece of what was kept free, where a test has left less than that: the event that follows fits in it.

    Only a piece, since the next attempt, or the next suite, may fill that too; the rest is the report's.
    """
    reserve = out / RESERVE
    with suppress(OSError):
        if shutil.disk_usage(out).free < RESERVED:
            os.truncate(reserve, max(0, reserve.stat().st_size - EVENT_ROOM))


def _suspect(ended: Ended, log: Path) -> bool:
    """Whether the GPU may be at fault: a deadline of ours, or a log that says so of a process that did not end well."""
    if ended.killed_by is not None:
        return ended.killed_by == "deadline"
    return ended.rc != 0 and canary.suspected(files.tail(log, LOG_BYTES).decode("utf-8", "replace")) is not None


def _check_case(request: RunRequest, suites: tuple[str, ...], told: journal_reader.Journal) -> None:
    """UsageError when `--case` selected nothing in any suite, though each could be collected.

    Not where the manifest knows such cases: then they have vanished, which the gate says by name.
    """
    if (
        request.case is None
        or any(plan.expected_tests(request.root, request.platform, suite, request.case) for suite in suites)
        or any(told.collected.values())
        or told.collect_errors
        or set(told.collected) != set(suites)
    ):
        return
    raise UsageError(
        f"no case of {', '.join(suites)} matches {request.case!r}",
        "a glob such as 'rowwise*'",
        "`fp8ci plan` lists the cases, with --full those of the night too",
    )


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, instead of raising somewhere between two writes.

    Outside the main thread Python allows no handlers; there the caller's own stay in force.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def checkout_state(root: Path, evidence: Sequence[Path] = ()) -> tuple[str | None, bool | None]:
    """(commit, whether the tree differs from it). Outside git the commit is GITHUB_SHA, or None, and so the second.

    A copy that lies in the working tree of something else, where git knows no suites of it, is outside git: that commit
    is not its own. What a run writes into its evidence folder is no difference while git does not know it. What else
    lies there is one.
    """

    def ask(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(root), *arguments],
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                timeout=30.0,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if not commit or not ask("ls-tree", "--name-only", "HEAD", "suites/"):  # a checkout copied without its .git
        return os.environ.get("GITHUB_SHA") or None, None
    top, changes = ask("rev-parse", "--show-toplevel"), ask("status", "--porcelain", "-z", "--untracked-files=all")
    if top is None or changes is None:
        return commit, None
    own = [folder.resolve() / name for folder in evidence for name in (*_OWN_FILES, *_OWN_FOLDERS)]

    def counts(entry: str) -> bool:
        path = Path(top, entry.removeprefix("?? "))
        return not entry.startswith("?? ") or not any(path.is_relative_to(mine) for mine in own)

    return commit, any(counts(entry) for entry in changes.split("\0") if entry)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return host.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), host.processor())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _text(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaced at once, so that a reader never sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
