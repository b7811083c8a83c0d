"""One launch of the perf suite, a fresh process: `python -m suites.perf.launch --out FILE CASE ...`.

Holds the device's lock, so that two launches never share it; takes the cases one after the other, and after each writes
all that it has so far: a launch that dies keeps the rows before. One JSON object: {tree, commit, device, rows: {case:
fields of harness.samples.Launch}, errors: {case: message}}.

    --kind time      blocks of probe, reference, candidate, candidate, reference, probe (timing.interleaved)
    --kind counts    kernels that a call launches and host synchronisations that it makes, warm, as the profiler saw
    --kind compile   seconds from an empty cache to the first result; a child process a case, with caches of its own

What is measured is the fp8stack that Python finds, and `tree` says where: for the base of a comparison the caller puts
its folder first. The measuring code is that of one tree for both sides.

Exit codes: 0 written (also with errors in it), 2 usage, 4 no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack import device
from suites.perf import rows, timing

BLOCKS = 10
COMPILE_DEADLINE = 600.0
TIMER_NS = 500.0  # of device events: both vendors' documentation says half a microsecond
CLOCKS = "clocks.sm,clocks.mem,clocks_event_reasons.hw_slowdown,clocks_event_reasons.sw_thermal_slowdown"


@contextmanager
def device_lock(name: str) -> Iterator[None]:
    """One launch at a time on a device, whoever starts it; the lock goes with the process."""
    path = Path(tempfile.gettempdir()) / f"fp8ci-perf-{name}.lock"
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Clocks:
    """What the device says of its clocks; empty where nothing can be asked."""

    values: dict[str, float | str]
    throttled: bool

    @staticmethod
    def now() -> Clocks:
        if torch.version.hip is not None or not torch.cuda.is_available():
            return Clocks({}, False)
        command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]
        command.append(f"--id={torch.cuda.current_device()}")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return Clocks({}, False)
        parts = [part.strip() for part in done.stdout.strip().split(",")]
        if done.returncode or len(parts) != 4:
            return Clocks({}, False)
        core, memory, *reasons = parts
        values: dict[str, float | str] = {"sm_mhz": float(core), "mem_mhz": float(memory)}
        return Clocks(values, any(reason == "Active" for reason in reasons))


def timed(row: rows.Row, where: torch.device) -> dict[str, Any]:
    """One row's samples."""
    torch._dynamo.reset()
    made = row.make(where)
    probe, _ = rows.probe(row.probe, where)
    before = Clocks.now()
    found = timing.interleaved(made.candidate, made.reference, probe, BLOCKS)
    after = Clocks.now()
    clocks = {f"{name}_{when}": value for when, one in (("before", before), ("after", after))
              for name, value in one.values.items()}  # fmt: skip
    hot = before.throttled and after.throttled
    return {
        "candidate": list(found["candidate"].ns),
        "reference": list(found["reference"].ns),
        "probe": list(found["probe"].ns),
        "throttled": [hot] * BLOCKS if before.values else [],
        "clocks": clocks,
        "calls": timing.calls_of(made.candidate),
        "input_spread": made.input_spread,
    }


def counted(row: rows.Row, where: torch.device) -> dict[str, Any]:
    """Kernels and host synchronisations of one warm call."""
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
    return counts_of(events)


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


def compiled(row: rows.Row) -> dict[str, Any]:
    """Seconds of the first call with empty caches, in a child process."""
    with tempfile.TemporaryDirectory(prefix="fp8ci-cache-") as folder:
        caches = {name: folder for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        command = [sys.executable, "-P", "-m", "suites.perf.launch", "--first-call", row.case]
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=COMPILE_DEADLINE, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{row.case} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return {"compile_seconds": float(done.stdout)}


def first_call(row: rows.Row, where: torch.device) -> float:
    """Seconds of the first call; its inputs exist before."""
    call = row.make(where).candidate.calls[0]
    torch.cuda.synchronize(where)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(where)
    return time.perf_counter() - start


def measure(row: rows.Row, kind: str, where: torch.device) -> dict[str, Any]:
    """The fields of one row's launch."""
    if kind == "compile":
        return compiled(row)
    found = timed(row, where) if kind == "time" else counted(row, where)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.launch", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--kind", choices=("time", "counts", "compile"), default="time")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--first-call", metavar="CASE", help="print the seconds of its first call, and stop")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; run this on a GPU", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    known = rows.by_case(device.detect(where).arch.e4m3)
    asked = [options.first_call] if options.first_call else options.cases
    unknown = [case for case in asked if case not in known]
    if unknown or not asked or (options.out is None and not options.first_call):
        told = f"there is no row {unknown[0]!r}" if unknown else "no CASE or no --out was given"
        print(f"launch: {told}; expected case ids of the perf suite and a file; correct them", file=sys.stderr)
        return 2
    if options.first_call:
        print(first_call(known[options.first_call], where))
        return 0
    name = torch.cuda.get_device_properties(where)
    document: dict[str, Any] = {
        "tree": str(Path(fp8stack.__file__ or "").resolve().parents[1]),
        "device": name.name,
        "resolution_ns": TIMER_NS,
        "rows": {},
        "errors": {},
    }
    with device_lock(str(getattr(name, "uuid", where.index))):
        for case in asked:
            begun, started = time.perf_counter(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            try:
                fields = measure(known[case], options.kind, where)
                document["rows"][case] = {
                    **fields, "started": started, "seconds": time.perf_counter() - begun, "device": name.name,
                }  # fmt: skip
            except Exception as error:  # the other rows go on; this one is red
                document["errors"][case] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            temporary = options.out.with_suffix(".part")
            temporary.write_text(json.dumps(document), encoding="utf-8")
            temporary.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
