"""One launch of the perf suite, a fresh process: `python -m suites.perf.launch --out FILE CASE ...`.

Holds the device's lock, so that two launches never share it; takes the cases one after the other, and after each writes
all that it has so far: a launch that dies keeps the rows before. One JSON object: {tree, host, device, uuid (of the
device; empty where torch has none), rows: {case: fields of harness.samples.Launch}, errors: {case: message}, waited:
seconds until the device was free, parts: seconds of cuda, context and rows, entered and ended: when, as
time.monotonic(); before `entered` are the process and its imports}.

    --kind time      blocks of probe, reference, candidate, candidate, reference, probe (timing.interleaved)
    --kind counts    kernels that a call launches and host synchronisations that it makes, warm, as the profiler saw
    --kind compile   seconds from an empty cache to the first result; a child process a case, with caches of its own
    --prepare        time nothing: call everything once, for what that leaves in the caches of Triton and Inductor; no
                     lock, and `--jobs` processes at once; it ends when nobody reads its stdout any more

What is measured is the fp8stack that Python finds, and `tree` says where: for the base of a comparison the caller puts
its folder first. The measuring code is that of one tree for both sides.

Exit codes: 0 written (also with errors in it), 2 usage, 4 no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fcntl
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack import device
from suites.perf import clocks, processes, rows, timing

COMPILE_DEADLINE = 600.0
TIMER_NS = 500.0  # of device events: both vendors' documentation says half a microsecond


@contextmanager
def device_lock(name: str) -> Iterator[None]:
    """One launch at a time on a device, whoever starts it; the lock goes with the process."""
    path = Path(tempfile.gettempdir()) / f"fp8ci-perf-{name}.lock"
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Laps:
    """Seconds of each part of some work, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        """The part of that name ends here."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def timed(row: rows.Row, where: torch.device, warm_up: float = timing.WARM_UP_SECONDS) -> dict[str, Any]:
    """One row's samples, after so many seconds of busy warm-up."""
    lap = Laps()
    torch._dynamo.reset()
    made = row.make(where)
    probe, _ = rows.probe(row.probe, where)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    lap("data")
    watch = clocks.Watch.of(where)
    before = watch.read()
    held: list[bool] = []

    def after_block() -> None:
        held.append(watch.held_down())

    found = timing.interleaved(made.candidate, made.reference, probe, row.blocks, warm_up, after_block, lap)
    after = watch.read()
    return {
        "candidate": list(found["candidate"].ns),
        "reference": list(found["reference"].ns),
        "probe": list(found["probe"].ns),
        "throttled": held if watch.known else [],
        "clocks": {f"{name}_{when}": value for when, one in (("before", before), ("after", after))
                   for name, value in one.items()},
        "calls": timing.calls_of(made.candidate),
        "input_spread": made.input_spread,
        "parts": lap.seconds,
    }  # fmt: skip


def counted(row: rows.Row, where: torch.device) -> dict[str, Any]:
    """Kernels and host synchronisations of one warm call."""
    torch._dynamo.reset()
    call = row.make(where).candidate.calls[0]
    return {"counts": count(call, where)}


def count(call: Callable[[], object], where: torch.device) -> dict[str, int]:
    """What a warm call launches, and how often the host waits for the device, between two marks of the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    for _ in range(2):
        call()
    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(where)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as traced:
        with record_function("fp8ci-counted"):
            call()
        if on_gpu:
            torch.cuda.synchronize(where)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = counts_of(events)
    if on_gpu and not found["kernels"]:
        raise RuntimeError(
            "the trace holds no kernel; expected those of the call; the profiler does not see this device"
        )
    return found


def counts_of(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    """From the events of a trace. A kernel counts wherever it ran, a synchronisation within the mark.

    The profiler's own wait, and ours, lie behind the mark. RuntimeError for a trace without one.
    """
    mark = next(
        (one for one in events if one.get("name") == "fp8ci-counted" and one.get("cat") == "user_annotation"), None
    )
    if mark is None:
        raise RuntimeError("the trace does not hold the mark of the call; expected it; the profiler saw nothing")
    start, end = float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])
    waits = [
        one
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver", "hip_runtime")
        and "Synchronize" in str(one.get("name"))
        and start <= float(one["ts"]) <= end
    ]
    return {"kernels": sum(one.get("cat") == "kernel" for one in events), "synchronisations": len(waits)}


def compile_jobs() -> int:
    """Children that compile side by side: each has a core, and a quarter of them is left to the machine."""
    return max(1, len(os.sched_getaffinity(0)) // 4)


def compiled(row: rows.Row) -> dict[str, Any]:
    """Seconds of the first call with empty caches, in a child process."""
    with tempfile.TemporaryDirectory(prefix="fp8ci-cache-") as folder:
        caches = {name: folder for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        command = [sys.executable, "-m", "suites.perf.launch", "--first-call", row.case]
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=COMPILE_DEADLINE, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{row.case} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return {"compile_seconds": float(done.stdout.split()[-1])}


def first_call(row: rows.Row, where: torch.device) -> float:
    """Seconds of the first call; its inputs exist before."""
    call = row.make(where).candidate.calls[0]
    torch.cuda.synchronize(where)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(where)
    return time.perf_counter() - start


def measure(row: rows.Row, kind: str, where: torch.device, first: bool) -> dict[str, Any]:
    """The fields of one row's launch. The first row of a process warms the device up for longer."""
    if kind == "compile":
        return compiled(row)
    if kind == "time":
        found = timed(row, where, timing.WARM_UP_SECONDS if first else timing.warm_up_again())
    else:
        found = counted(row, where)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def prepare(case: str) -> str:
    """In a process of its own: call candidate, reference and probe of a row once; what went wrong, or nothing."""
    where = torch.device("cuda", torch.cuda.current_device())
    try:
        made = rows.by_case(device.detect(where).arch.e4m3)[case].make(where)
        for one in (made.candidate, made.reference):
            if one is not None:
                one.calls[0]()
        torch.cuda.synchronize(where)
    except Exception as error:  # the launch that times it meets it again, and reports it
        return f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        made = one = None  # type: ignore[assignment]
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return ""


def prepare_all(cases: Sequence[str], jobs: int) -> None:
    """Compile rows in `jobs` processes side by side, and print what could not. A trainer has the device alone."""
    alone = [case for case in cases if case.startswith("trainer-")]
    for some, count in (([case for case in cases if case not in alone], jobs), (alone, 1)):
        if some:
            with processes.pool(count) as pool:
                for problem in pool.map(prepare, some):
                    if problem:
                        print(problem, flush=True)


def taken(row: rows.Row, kind: str, where: torch.device, first: bool = False) -> dict[str, Any] | str:
    """A row's launch, or what went wrong: the other rows go on, and this one is red."""
    begun, started = time.perf_counter(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        fields = measure(row, kind, where, first)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    seconds = time.perf_counter() - begun
    if "parts" in fields:
        fields["parts"]["rest"] = round(seconds - sum(fields["parts"].values()), 3)
    print(f"{row.case} {kind} {seconds:.2f} s", file=sys.stderr, flush=True)
    return {**fields, "started": started, "seconds": seconds, "device": torch.cuda.get_device_name(where)}


def keep(document: dict[str, Any], case: str, told: dict[str, Any] | str, out: Path) -> None:
    """Put a row into the document, and the document into its file."""
    document["errors" if isinstance(told, str) else "rows"][case] = told
    save(document, out)


def save(document: dict[str, Any], out: Path) -> None:
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    entered, lap = time.monotonic(), Laps()
    parser = argparse.ArgumentParser(prog="python -m suites.perf.launch", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--kind", choices=("time", "counts", "compile"), default="time")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--prepare", action="store_true", help="compile only, for the launches that follow")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that --prepare (default: 1)")
    parser.add_argument("--first-call", metavar="CASE", help="print the seconds of its first call, and stop")
    options = parser.parse_args(argv)
    if torch.cuda._is_in_bad_fork():
        print("this process is a fork of one that had touched CUDA; expected a device; "
              f"set {processes.FRESH_VARIABLE}=1, for launches that are no forks", file=sys.stderr)  # fmt: skip
        return 4
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; run this on a GPU", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    known = rows.by_case(device.detect(where).arch.e4m3)
    asked = [options.first_call] if options.first_call else options.cases
    unknown = [case for case in asked if case not in known]
    if unknown or not asked or (options.out is None and not (options.first_call or options.prepare)):
        told = f"there is no row {unknown[0]!r}" if unknown else "no CASE or no --out was given"
        print(f"launch: {told}; expected case ids of the perf suite and a file; correct them", file=sys.stderr)
        return 2
    if options.first_call:
        print(first_call(known[options.first_call], where))
        return 0
    if options.prepare:
        processes.end_with_reader()
        prepare_all(asked, max(1, options.jobs))
        return 0
    name = torch.cuda.get_device_properties(where)
    document: dict[str, Any] = {
        "tree": str(Path(fp8stack.__file__ or "").resolve().parents[1]),
        "host": platform.node(),
        "device": name.name,
        "uuid": str(getattr(name, "uuid", "")),
        "resolution_ns": TIMER_NS,
        "rows": {},
        "errors": {},
        "waited": 0.0,
        "parts": lap.seconds,
        "entered": entered,
    }
    gc.collect()
    gc.freeze()  # what has been imported stays: no row need look through it for garbage
    lap("cuda")
    with device_lock(str(getattr(name, "uuid", where.index))):
        lap("waited")
        document["waited"] = lap.seconds.pop("waited")
        torch.empty(1, device=where)
        torch.cuda.synchronize(where)
        lap("context")
        if options.kind == "compile":
            with concurrent.futures.ThreadPoolExecutor(compile_jobs()) as pool:
                for case, told in zip(
                    asked, pool.map(lambda one: taken(known[one], "compile", where), asked), strict=True
                ):
                    keep(document, case, told, options.out)
        else:
            for number, case in enumerate(asked):
                keep(document, case, taken(known[case], options.kind, where, number == 0), options.out)
    lap("rows")
    save({**document, "ended": time.monotonic()}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
