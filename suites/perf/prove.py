"""Whether the gate of speed holds on this GPU: `python -m suites.perf.prove --out DIR [--launches 12]`.

Launches a few rows of the perf suite from this checkout and from copies of it that were made worse on purpose, and
judges the samples as the gate would (harness/speed.py), in ten tries each:

    same     this checkout against itself: no try may be a REGRESSION, and most are a PASS
    slower   each kernel with a launch configuration that is 10 % slower here: REGRESSION in nine of ten tries (the row
             of the linear layer has none: its products are the library's)
    probe    a copy loop beside the launches: no row may be a REGRESSION, and some row shows that it was there
    sync     an op that waits for the device: REGRESSION by its count

A try is three launches and, where these raise a suspicion, three more; it is judged against the launches of this
checkout that it does not hold, as recorded runs, and against as many of them, as pairs. Tries share launches: with 12
of each side every launch is in several of the ten.

Correct first: each row's result is compared with the reference, or with torch's product, before anything is timed, and
so is each slower configuration. Those come from the sweeps in baselines/ where there is one, and are timed here beside
the table's own: taken is the one that is slower by 10 % or more, and the least so.

DIR gets, each as soon as it is known: `launches.json`, `probe.json`, `sync.json` with raw launches, `<stage>.json` with
the verdict of each try, and `verdicts.json`, which is the table that ends the output. With --seconds, launches of the
first two stages end early enough for the others; their tries are judged last. What was cut off goes on with --resume,
from DIR's configurations and launches, where code and GPU are the same, or is judged as it is with --again, without a
GPU. Errors of launches that --resume has replaced are told, and are none any more.

Compile caches are kept for the next run in fp8ci-prove-UID of the temporary folder (TMPDIR), or where TRITON_CACHE_DIR
and TORCHINDUCTOR_CACHE_DIR say.
Exit codes: 0 all hold, 1 one does not, or a launch takes longer than 12 s, 2 usage, 4 no GPU.

Not here: timing (timing.py), launches (launch.py, processes.py), verdicts (harness/speed.py).
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import math
import os
import platform as host
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fp8stack import device, formats
from fp8stack.command import show
from fp8stack.kernels import grouped_kernel
from harness import speed
from harness.baselines import Provenance
from harness.errors import Verdict
from harness.samples import Launch, PerfRun, Samples
from suites.perf import grouped_gemm, kernels, moe, processes, rows, sweep, timing

STAGES = ("same", "slower", "probe", "sync")
TRIES = 10
LEAST_SLOWER = 1.10
SLOWER = (1.06, 1.25)
"""Of recorded sweeps: configurations between these are tried here."""
TRIED = 6
BASELINES = processes.ROOT / "baselines"
ABOVE_NS = 40_000.0
"""Below, the floor of 2 us rules."""

OPS = {
    "rowwise": (32768, 7168),
    "colwise": (32768, 7168, 32),
    "experts": (32, 2048, 7168),
}
SHORT = ("rowwise", (16640, 2048))
GEMM = ((32, 32768, 7168, 2048), "forward")
LINEAR = ((4096, 14336), "rowwise_with_gw_hp")
SYNCED = "rowwise"
WHOLE = 2 * speed.LEAST_LAUNCHES + speed.NOISE_LAUNCHES
"""Launches of a side, at least: a try, and as many others as make its noise known."""
VERDICTS = "verdicts.json"
NO_SLOWER = "its products are the library's, which has no launch configuration to make worse; not in stage slower"
"""Of the row of the linear layer."""
LAUNCH_DEADLINE = 120.0
LAUNCH_SECONDS = 12.0
"""What a launch of the six rows may take."""
LEFT_LAUNCHES = 12
"""The stages after `same` and `slower` take as long as so many of their launches, and the verdicts half a minute."""
LEFT_SECONDS = 30.0
ODD = frozenset({Verdict.REGRESSION, Verdict.FAIL, Verdict.MISSING, Verdict.IMPLAUSIBLE, Verdict.UNMEASURABLE})
"""What no try of an unchanged checkout may say."""
UNDISTURBED = frozenset({Verdict.INCONCLUSIVE, Verdict.INFRA, Verdict.PASS})
"""What may be said beside a copy loop: PASS of a row whose probe it has not moved."""
LEAST_PASSED = TRIES // 2 + 1
"""Of an unchanged checkout: where most tries say nothing, no false alarm proves nothing."""
CONFIGURATIONS = "configurations.json"
LATE = "too long: "
"""Begins a problem that is none of the verdicts'."""


def chosen(fmt: str) -> list[rows.Row]:
    """The six rows: kernels and a grouped product of DeepSeek 671B, a dense layer of Llama 8B, and a short kernel."""

    def kernel(op: str, shape: tuple[int, ...]) -> rows.Row:
        return rows.of_kernel(kernels.Row(op, shape, torch.bfloat16, None, None), fmt)

    return [
        *(kernel(op, shape) for op, shape in OPS.items()),
        kernel(*SHORT),
        rows.of_gemm(*GEMM, fmt),
        rows.of_linear(*LINEAR, fmt),
    ]


# Correct first, and what is slower ----------------------------------------------------------------------------------


def check(fmt: str) -> list[str]:
    """What is wrong with the results of the six rows."""
    where = torch.device("cuda", torch.cuda.current_device())
    found: list[str] = []
    for op, shape in [*OPS.items(), SHORT]:
        space = sweep.SPACES[op]
        inputs = space.sample(sweep.inputs_of(op, shape, where, 1)[0])
        table = space.rows[device.detect(where).target.name, space.size_class(shape)]
        if sweep.differs(space, inputs, space.reference(inputs, formats.get(fmt)), formats.get(fmt), table):
            found.append(f"{op} {shape} differs from its reference")
    given = grouped_gemm.operands(*GEMM, fmt, torch.Generator(device=where).manual_seed(kernels.SEED))
    wrong = grouped_gemm.wrong(grouped_gemm.torch_fp8(given), grouped_gemm.ours(True, 16)(given))
    found += [f"grouped product: {wrong}"] if wrong else []
    results = [
        [one.detach() for one in moe.linear_steps(LINEAR[0], name, 1, device.detect(where), where)[0]()]
        for name in ("bf16", LINEAR[1])
    ]
    wrong = moe.wrong(*results)
    return found + ([f"linear: {wrong}"] if wrong else [])


@dataclass(frozen=True)
class Slower:
    """A configuration of a launch table, and how much slower it is here than the table's own."""

    module: str
    table: str
    key: tuple[str, str]
    make: str
    config: dict[str, Any]
    factor: float

    @property
    def enough(self) -> bool:
        """Whether it is as slow as the gate must show."""
        return self.factor >= LEAST_SLOWER

    @property
    def line(self) -> str:
        """What puts it into the table, at the end of the kernel's file."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        return f'{self.table}[{self.key!r}] = {self.make}({given}, measured="slower, on purpose")\n'


def recorded(op: str, shape: Sequence[int], platform: str) -> list[dict[str, Any]]:
    """Configurations that a sweep of this platform found slower, from a little below 10 % on; the nearest first."""
    name = "grouped_gemm-fp8-rows" if op == "grouped_gemm" else f"sweep-{op}"
    path = BASELINES / platform / f"{name}.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    for one in document.get("shapes", document.get("results", ())):
        its = one["shape"] if "shape" in one else (one["m"], one["k"])
        if tuple(its) == tuple(shape) and one.get("gemm", GEMM[1]) == GEMM[1]:
            best = one["rows"][0]["us"]
            near = [row for row in one["rows"] if SLOWER[0] <= row["us"] / best <= SLOWER[1]]
            return [row["config"] for row in sorted(near, key=lambda row: abs(row["us"] / best - 1.12))[:TRIED]]
    return []


def slow_kernel(shapes: Sequence[tuple[str, tuple[int, ...]]], fmt: str, platform: str) -> Slower | None:
    """A slower configuration of a quantising kernel, right and timed; for several ops, those of one table's row."""
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    op, shape = shapes[0]
    space = sweep.SPACES[op]
    key = (found.target.name, space.size_class(shape))
    every = [space.make(**config, measured="") for config in recorded(op, shape, platform)]
    every = every or sweep.sampled(space, [shape], found.arch, 2 * TRIED)[1:]
    factors: dict[int, float] = dict.fromkeys(range(len(every)), math.inf)
    for op, shape in shapes:
        for number, factor in _factors(op, shape, fmt, space.rows[key], every).items():
            factors[number] = min(factors[number], factor)
    best = _least({number: factor for number, factor in factors.items() if math.isfinite(factor)})
    if best is None:
        return None
    one = every[best]
    return Slower(space.module.__name__, space.table, key, type(one).__name__, sweep.fields(one), factors[best])


def _factors(op: str, shape: tuple[int, ...], fmt: str, own: Any, every: Sequence[Any]) -> dict[int, float]:
    """How much slower each right configuration is than the table's own, by its place."""
    where = torch.device("cuda", torch.cuda.current_device())
    space, target = sweep.SPACES[op], device.detect(where).target.name
    moved = kernels.OPS[op].bytes_moved(kernels.Row(op, shape, torch.bfloat16, None, None))
    inputs = sweep.inputs_of(op, shape, where, timing.rotations(moved))
    sample = space.sample(inputs[0])
    expected = space.reference(sample, formats.get(fmt))

    def candidate(name: str, config: Any) -> timing.Candidate:
        calls = [lambda x=x: space.launch(x, formats.get(fmt), config, target) for x in inputs]
        return timing.Candidate(name, calls, moved)

    right: list[int] = []
    for number, config in enumerate(every):
        try:
            if not sweep.differs(space, sample, expected, formats.get(fmt), config):
                right.append(number)
        except Exception as error:  # more registers or shared memory than this GPU has; Triton's is no RuntimeError
            print(f"{op} {config}: {type(error).__name__}", file=sys.stderr)
    told = timing.measure([candidate("table", own), *(candidate(str(number), every[number]) for number in right)], 10)
    return {number: told[str(number)].median_ns / told["table"].median_ns for number in right}


def slow_product(fmt: str, platform: str) -> Slower | None:
    """The same of the grouped product, through its table."""
    where = torch.device("cuda", torch.cuda.current_device())
    key = (device.detect(where).target.name, grouped_kernel.size_class(True, "fp8"))
    table = grouped_kernel.GROUPED_CONFIGS
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    given = [grouped_gemm.operands(*GEMM, fmt, generator) for _ in range(2)]
    own, call = table[key], grouped_gemm.ours(True, 16)
    expected = grouped_gemm.torch_fp8(given[0])
    every = [type(own)(**config, measured="") for config in recorded("grouped_gemm", GEMM[0], platform)]
    blocks: dict[str, Any] = {}
    try:
        for name, config in [("table", own), *((str(n), c) for n, c in enumerate(every))]:
            table[key] = config
            try:
                wrong = grouped_gemm.wrong(expected, call(given[0]))
            except Exception as error:
                print(f"grouped_gemm {config}: {type(error).__name__}", file=sys.stderr)
                continue
            if wrong is None:
                blocks[name] = (timing.captured([lambda x=x: call(x) for x in given]), config)
    finally:
        table[key] = own
    told = timing.replayed({name: block for name, (block, _) in blocks.items()}, 10)
    factors = {name: told[name] / told["table"] for name in blocks if name != "table"}
    name = _least(factors)
    if name is None:
        return None
    config = blocks[name][1]
    return Slower(
        grouped_kernel.__name__, "GROUPED_CONFIGS", key, type(config).__name__, sweep.fields(config), factors[name]
    )


def compile_one(op: str, shape: tuple[int, ...], fmt: str, config: dict[str, Any]) -> None:
    """In a process of its own: launch a configuration once, for what that leaves in Triton's cache."""
    where = torch.device("cuda", torch.cuda.current_device())
    if op != "grouped_gemm":
        sweep.compile_configs(op, shape, fmt, [sweep.SPACES[op].make(**config, measured="")])
        return
    table = grouped_kernel.GROUPED_CONFIGS
    key = (device.detect(where).target.name, grouped_kernel.size_class(True, "fp8"))
    table[key] = type(table[key])(**config, measured="")
    e, _, k, n = shape
    few = grouped_gemm.operands((e, 32 * e, k, n), GEMM[1], fmt, torch.Generator(device=where).manual_seed(0))
    try:
        grouped_gemm.ours(True, 16)(few)
    except Exception as error:  # the process that times it meets it again
        print(f"{op} {config}: {type(error).__name__}", file=sys.stderr)


def compile_all(fmt: str, platform: str, jobs: int) -> None:
    """What `survey` will time, side by side."""
    asked = [("rowwise", OPS["rowwise"]), ("colwise", OPS["colwise"]), SHORT, ("grouped_gemm", GEMM[0])]
    work = [(op, shape, fmt, config) for op, shape in asked for config in recorded(op, shape, platform)]
    with processes.pool(jobs, own_cache()) as pool:
        for done in [pool.submit(compile_one, *one) for one in work]:
            error = done.exception()  # only time is lost: `survey` compiles what is not there
            if error is not None:
                print(f"compiling: {type(error).__name__} {error}", file=sys.stderr)


def _least(factors: Mapping[Any, float]) -> Any:
    """The slower one that is the least slower; else the slowest, which is not slow enough; None of none."""
    enough = [name for name in factors if factors[name] >= LEAST_SLOWER]
    if enough:
        return min(enough, key=lambda name: factors[name])
    return max(factors, key=lambda name: factors[name], default=None)


def survey(fmt: str, platform: str, slower: bool) -> tuple[list[str], dict[str, Slower | None]]:
    """In a process of its own: (what is wrong, slower configurations by op where they are asked for)."""
    wrong = check(fmt)
    if wrong or not slower:
        return wrong, {}
    one_table = [("rowwise", OPS["rowwise"]), ("experts", OPS["experts"])]
    asked: dict[str, Callable[[], Slower | None]] = {
        "rowwise, experts": lambda: slow_kernel(one_table, fmt, platform),
        "colwise": lambda: slow_kernel([("colwise", OPS["colwise"])], fmt, platform),
        "short rowwise": lambda: slow_kernel([SHORT], fmt, platform),
        "grouped_gemm": lambda: slow_product(fmt, platform),
    }
    found: dict[str, Slower | None] = {}
    for name, look in asked.items():
        try:
            found[name] = look()
        except Exception as error:  # the others go on; without a slower kernel this one's tries are red
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            found[name] = None
        gc.collect()
        torch.cuda.empty_cache()
    return [], found


def own_cache() -> dict[str, str]:
    """Inductor's folder for what is compiled of this checkout, as in its launches."""
    return {processes.INDUCTOR: processes.inductor_cache(None)}


def surveyed(fmt: str, platform: str, slower: bool) -> tuple[list[str], dict[str, Slower | None]]:
    """`survey` in a process that gives the device back, after what it needs was compiled side by side."""
    if slower:
        compile_all(fmt, platform, processes.jobs())
    with processes.pool(1, own_cache()) as pool:
        return pool.submit(survey, fmt, platform, slower).result()


def kept(out: Path) -> dict[str, Slower | None]:
    """The slower configurations that an earlier run has found; it wrote them when its results were right."""
    found = json.loads((out / CONFIGURATIONS).read_text(encoding="utf-8"))
    return {op: Slower(**{**one, "key": tuple(one["key"])}) if one else None for op, one in found.items()}


# Copies of this checkout that are worse -----------------------------------------------------------------------------

SYNC = """
_launched = launch_rowwise


def launch_rowwise(*arguments, **options):
    result = _launched(*arguments, **options)
    torch.cuda.synchronize()
    return result
"""


def worse_tree(folder: Path, added: Mapping[str, str]) -> Path:
    """A copy of fp8stack with text added at the end of modules, by their names; returns its checkout."""
    shutil.copytree(
        processes.ROOT / "fp8stack", folder / "fp8stack", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
    )
    for module, text in added.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    return folder


def lacking(slow: Mapping[str, Slower | None]) -> dict[str, str]:
    """Op -> why its kernel is not slower in the slower copy."""
    found: dict[str, str] = {}
    for ops, one in slow.items():
        if one is None or not one.enough:
            best = "no configuration could be timed" if one is None else f"at best {one.factor:.3f}x"
            found |= dict.fromkeys(ops.split(", "), f"nothing slower was found, {best}, expected {LEAST_SLOWER:.2f}x")
    return found


def lines_of(slow: Mapping[str, Slower | None]) -> dict[str, str]:
    """Module -> the lines that make it slower."""
    found: dict[str, str] = {}
    for one in slow.values():
        if one is not None and one.enough:
            found[one.module] = found.get(one.module, "\n# Slower, on purpose.\n") + one.line
    return found


# Launches -----------------------------------------------------------------------------------------------------------


def launches(
    kind: str, sides: Sequence[tuple[str, Sequence[str], str | None]], ahead: bool = True
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """(side, document) of each launch in turn. While one is measured the next one starts, up to the device's lock."""
    running: list[tuple[str, processes.Running]] = []
    try:
        for side, cases, tree in sides:
            running.append((side, processes.start(kind, cases, tree)))
            if len(running) > (1 if ahead else 0):
                name, first = running.pop(0)
                yield name, first.collect(LAUNCH_DEADLINE)
        while running:
            name, first = running.pop(0)
            yield name, first.collect(LAUNCH_DEADLINE)
    finally:
        for _, one in running:
            one.cancel()
            one.collect(LAUNCH_DEADLINE)


class Measured:
    """Launches by side and case, as they came."""

    def __init__(self, table: Sequence[rows.Row], kind: str = "time") -> None:
        self.table, self.kind = {row.case: row for row in table}, kind
        self.of: dict[str, dict[str, list[Launch]]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.parts: dict[str, list[dict[str, float]]] = {}
        self.errors: list[str] = []
        self.earlier: list[str] = []
        """Errors of runs that this one goes on from: it has launched again what they had lost."""
        self.machine: dict[str, str] = {}
        self.resolution_ns = 0.0

    def add(self, side: str, document: Mapping[str, Any]) -> None:
        if "uuid" in document:
            self.machine = {name: document[name] for name in ("host", "device", "uuid")}
        self.seconds.setdefault(side, []).append(round(document.get("seconds", 0.0), 2))
        self.parts.setdefault(side, []).append(document.get("parts", {}))
        self.resolution_ns = float(document.get("resolution_ns", self.resolution_ns))
        for case, message in document["errors"].items():
            self.errors.append(f"{side}: {case}: {message}")
        for case, fields in document["rows"].items():
            mine = self.of.setdefault(side, {}).setdefault(case, [])
            mine.append(msgspec.convert({**fields, "number": len(mine) + 1}, Launch))

    def samples(self, case: str, launched: Sequence[Launch]) -> Samples:
        return rows.samples(self.table[case], self.kind, launched, self.resolution_ns)

    def made(self, side: str) -> int:
        """How many launches of a side have measured every row of it."""
        return min(map(len, self.of.get(side, {}).values()), default=0)

    @staticmethod
    def read(out: Path, table: Sequence[rows.Row]) -> Measured:
        """What an earlier run has left in `launches.json`."""
        document = json.loads((out / "launches.json").read_text(encoding="utf-8"))
        measured = Measured(table)
        measured.of = msgspec.convert(document["launches"], dict[str, dict[str, list[Launch]]])
        measured.seconds, measured.errors = document["seconds_a_launch"], document["errors"]
        measured.earlier, measured.machine = document.get("earlier_errors", []), document.get("machine", {})
        measured.parts = document.get("parts_of_a_launch", {})
        measured.resolution_ns = document["resolution_ns"]
        return measured


def numbered(launched: Sequence[Launch], side: str = "candidate") -> list[Launch]:
    """Three launches of the first stage, the others of the second."""
    least = speed.LEAST_LAUNCHES
    return [
        msgspec.structs.replace(one, number=place % least + 1, stage=1 + place // least, side=side)
        for place, one in enumerate(launched)
    ]


def judge(
    measured: Measured, case: str, mine: Sequence[Launch], before: Sequence[Launch], pairs: bool
) -> speed.Comparison:
    """The verdict on three launches, and on three more where they raise a suspicion."""

    def judged(count: int) -> speed.Comparison:
        now, runs = numbered(mine[:count]), []
        if pairs:
            now = [*now, *numbered(before[:count], "base")]
        else:
            runs = [PerfRun(test=case, samples=measured.samples(case, before), provenance=SOMEWHERE)]
        return speed.judge(measured.samples(case, now), runs)

    first = judged(speed.LEAST_LAUNCHES)
    return judged(2 * speed.LEAST_LAUNCHES) if first.suspected else first


SOMEWHERE = Provenance(
    when="now", commit="this", dirty=False, platform="this", device="this", python="", torch=None, triton=None
)


def turned(launched: Sequence[Launch], first: int, count: int) -> list[Launch]:
    """`count` launches from `first` on, round and round."""
    return [launched[(first + place) % len(launched)] for place in range(count)]


def tries(measured: Measured, case: str, side: str) -> dict[str, list[speed.Comparison]]:
    """Ten tries of a side against this checkout's launches: as recorded runs, and as pairs."""
    mine, ours = measured.of[side][case], measured.of["same"][case]
    whole = 2 * speed.LEAST_LAUNCHES
    found: dict[str, list[speed.Comparison]] = {"recorded": [], "pairs": []}
    for first in range(TRIES):
        taken = turned(mine, first, whole)
        before = ours if side != "same" else turned(ours, first + whole, len(ours) - whole)
        found["recorded"].append(judge(measured, case, taken, before, pairs=False))
        beside = turned(ours, first + (whole if side == "same" else 0), whole)
        found["pairs"].append(judge(measured, case, taken, beside, pairs=True))
    return found


# Stages -------------------------------------------------------------------------------------------------------------


@contextmanager
def disturbed() -> Iterator[None]:
    """A process that copies memory in a loop until the block ends."""
    code = (
        "import sys, threading, torch\n"
        "ended = threading.Event()\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()\n"
        "source = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "target = torch.empty_like(source)\n"
        "print('copying', flush=True)\n"
        "while not ended.is_set():\n"
        "    for _ in range(16):\n"
        "        target.copy_(source)\n"
        "    torch.cuda.synchronize()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loop:
        assert loop.stdin is not None
        assert loop.stdout is not None
        try:
            if loop.stdout.readline().strip() != b"copying":
                raise RuntimeError("the copy loop did not start")
            yield
            if loop.poll() is not None:
                raise RuntimeError(f"the copy loop ended with {loop.returncode} before the launches beside it did")
        finally:
            loop.stdin.close()
            try:
                loop.wait(timeout=30)
            except subprocess.TimeoutExpired:
                loop.kill()


@functools.cache
def code() -> str:
    """Names the code that is timed and the code that times: runs of two commits are no one proof."""
    digest = hashlib.sha256()
    for folder in ("fp8stack", "suites/perf"):
        for path in sorted((processes.ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, str]:
    """Where launches of this process take place, as they say it themselves."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"host": host.node(), "device": gpu.name, "uuid": str(getattr(gpu, "uuid", ""))}


def same_machine(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """By the GPU's UUID, also where containers of one host have names of their own; by the names without one."""
    names = ("device", "uuid") if one["uuid"] and other["uuid"] else ("device", "host")
    return all(one[name] == other[name] for name in names)


def write(out: Path, name: str, measured: Measured, told: Mapping[str, Any]) -> None:
    document = {
        "code": code(),
        **told,
        "seconds_a_launch": measured.seconds,
        "parts_of_a_launch": measured.parts,
        "errors": measured.errors,
        "earlier_errors": measured.earlier,
        "machine": measured.machine,
        "resolution_ns": measured.resolution_ns,
        "launches": msgspec.to_builtins(measured.of),
    }
    whole = out / f"{name}.part"  # a run that is cut off here keeps what it had
    whole.write_text(json.dumps(document, allow_nan=True) + "\n", encoding="utf-8")
    whole.replace(out / f"{name}.json")


def say(text: str) -> None:
    show(text)


def words(problem: str) -> str:
    return problem if problem.startswith(LATE) else f"does not hold: {problem}"


def counted(found: Sequence[speed.Comparison]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(Counter(one.verdict for one in found).items()))


def line_of(case: str, how: str, found: Sequence[speed.Comparison]) -> str:
    last = found[-1]
    by = ", ".join(f"{one.yardstick} {one.percent:+.1f} %" for one in last.effects)
    smallest = "-" if last.smallest is None else f"{last.smallest:.1%}"
    us = "-" if last.median_ns is None else f"{last.median_ns / 1e3:.1f}"
    return f"  {case:44} {how:9} {counted(found):44} {us:>8} us, can show {smallest}; last: {by or last.message}"


def as_dicts(found: Sequence[speed.Comparison]) -> list[dict[str, Any]]:
    return [{"verdict": str(one.verdict), "message": one.message, **one.as_dict()} for one in found]


def note(out: Path, case: str, **told: object) -> None:
    """Put what is known of a row into verdicts.json."""
    path = out / VERDICTS
    known: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known.setdefault(case, {}).update(told)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def table_of(out: Path) -> list[str]:
    """The rows of verdicts.json as lines: time, noise, the smallest effect that can be shown, the stages' verdicts."""
    path = out / VERDICTS
    known: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    columns = ("same", "slower", "probe", "sync")
    lines = [f"{'row':46} {'us':>8} {'noise':>6} {'shows':>6}  " + "  ".join(f"{name:28}" for name in columns)]
    for case, told in known.items():
        us, noise, least = told.get("us"), told.get("noise"), told.get("smallest")
        head = f"{case:46} {'-' if us is None else f'{us:.1f}':>8} {'-' if noise is None else f'{noise:.2%}':>6} "
        head += f"{'-' if least is None else f'{least:.1%}':>6}  "
        lines.append((head + "  ".join(f"{told.get(name, '-'):28}" for name in columns)).rstrip())
    return lines


def breakdown(measured: Measured, side: str) -> list[str]:
    """Where the seconds of a launch go, as medians: its parts, and those of each of its rows."""

    def told(parts: Sequence[Mapping[str, float]]) -> str:
        names = dict.fromkeys(name for one in parts for name in one)
        middle = {name: statistics.median(one.get(name, 0.0) for one in parts) for name in names}
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in middle.items()) or "parts unknown"

    seconds = statistics.median(measured.seconds[side])
    lines = [f"  a launch of {side}: {seconds:.2f} s ({told(measured.parts.get(side, []))})"]
    for case, launched in measured.of.get(side, {}).items():
        seconds = statistics.median(one.seconds for one in launched)
        lines.append(f"    {case}: {seconds:.2f} s ({told([one.parts for one in launched])})")
    return lines


def measure_times(
    out: Path, measured: Measured, slow_tree: Path | None, count: int, ahead: bool, until: float, later: int
) -> None:
    """Launches of this checkout and of the slower copy in turns, as many as leave time for the other stages.

    later: how many launches the other stages take as long as.
    """
    mine = list(measured.table)
    moved = [row.case for row in measured.table.values() if row.op != "linear"]
    order: list[tuple[str, Sequence[str], str | None]] = []
    for number in range(count):
        pair = [("same", mine, None), ("slower", moved, str(slow_tree))]
        order += (pair if number % 2 == 0 else pair[::-1]) if slow_tree else pair[:1]
    known = {side: measured.made(side) for side in ("same", "slower")}  # by an earlier run
    place = Counter[str]()
    left_over = []
    for one in order:
        place[one[0]] += 1
        if place[one[0]] > known[one[0]]:
            left_over.append(one)
    order = left_over
    begun = time.monotonic()
    with closing(launches("time", order, ahead)) as found:
        for number, (side, document) in enumerate(found, 1):
            measured.add(side, document)
            spent = time.monotonic() - begun
            each = spent / number
            if number in (2, 6):
                say(f"  {number} of {len(order)} launches in {spent:.0f} s; all would take {each * len(order):.0f} s")
            write(out, "launches", measured, {})
            if not measured.of:
                raise RuntimeError(
                    f"the first launch measured nothing: {measured.errors[0]}; expected samples of a row; mend that, "
                    f"or try {processes.FRESH_VARIABLE}=1, for launches that are no forks of what has imported torch"
                )
            left = until - time.monotonic()
            if left < (2 + later) * each + LEFT_SECONDS and (number % 2 == 0 or not slow_tree):
                say(f"  no more launches: {number} of {len(order)} were made, and {left:.0f} s are left")
                break


def judge_times(out: Path, measured: Measured) -> list[str]:
    """Ten tries of each side; returns what does not hold."""
    problems = measured.errors[:10]
    for one in measured.earlier:
        say(f"  of an earlier run, launched again since: {one}")
    why = lacking(kept(out)) if (out / CONFIGURATIONS).exists() else {}
    say(f"  seconds a launch: {measured.seconds}")
    for side, seconds in measured.seconds.items():
        say("\n".join(breakdown(measured, side)))
        if statistics.median(seconds) > LAUNCH_SECONDS:
            spent = statistics.median(seconds)
            problems.append(f"{LATE}a launch of {side} takes {spent:.1f} s, expected {LAUNCH_SECONDS:.0f} s at most")
    for side in measured.of:
        told: dict[str, Any] = {}
        expected = [row.case for row in measured.table.values() if side == "same" or row.op != "linear"]
        problems += [f"{side}: {case} was not launched" for case in expected if case not in measured.of[side]]
        say(f"{side}: {TRIES} tries")
        for case, launched in measured.of[side].items():
            ours = measured.of.get("same", {}).get(case, [])
            if min(len(launched), len(ours)) < WHOLE:
                problems.append(f"{side}: {case} has {len(launched)} launches beside {len(ours)}, expected {WHOLE}")
            if min(len(launched), len(ours)) < 2 * speed.LEAST_LAUNCHES:
                note(out, case, **{side: f"{len(launched)} launches"})
                continue
            found = tries(measured, case, side)
            told[case] = {how: as_dicts(some) for how, some in found.items()}
            for how, some in found.items():
                say(line_of(case, how, some))
                red = sum(one.verdict is Verdict.REGRESSION for one in some)
                median = some[0].median_ns
                short = median is not None and median <= ABOVE_NS
                odd = [one for one in some if one.verdict in ODD]
                if side == "same" and odd:
                    problems.append(
                        f"same: {case}, {how}: {len(odd)} of {TRIES} are {odd[0].verdict}: {odd[0].message}"
                    )
                passed = sum(one.verdict is Verdict.PASS for one in some)
                if side == "same" and passed < LEAST_PASSED:
                    problems.append(f"same: {case}, {how}: only {passed} of {TRIES} are PASS: {counted(some)}")
                if side == "slower" and not short and red < 9:
                    cause = f"; {why[measured.table[case].op]}" if measured.table[case].op in why else ""
                    problems.append(f"slower: {case}, {how}: only {red} of {TRIES} are REGRESSION{cause}")
            last = found["recorded"][-1]
            if side == "same":
                us = None if last.median_ns is None else last.median_ns / 1e3
                spread = speed.noise(_runs(measured, case))
                note(out, case, us=us, noise=spread, smallest=last.smallest)
            note(out, case, **{side: " / ".join(counted(some) for some in found.values())})
        (out / f"{side}.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    return problems


def prove_probe(out: Path, table: Sequence[rows.Row], ahead: bool) -> list[str]:
    """Stage `probe`: this checkout with a copy loop beside, against its launches without one."""
    measured = Measured(table)
    measured.of["same"] = Measured.read(out, table).of["same"]
    mine = [row.case for row in table]

    def launch(cases: Sequence[str]) -> None:
        for side, document in launches("time", [("probe", cases, None)] * speed.LEAST_LAUNCHES, ahead):
            measured.add(side, document)
            write(out, "probe", measured, {})

    with disturbed():
        launch(mine)
        suspects = [
            case
            for case, launched in measured.of.get("probe", {}).items()
            if speed.suspected(measured.samples(case, numbered(launched)), _runs(measured, case))
        ]
        if suspects:
            launch(suspects)
    say("probe: with a copy loop beside")
    problems, told = measured.errors[:10], {}
    for case, launched in measured.of.get("probe", {}).items():
        found = speed.judge(measured.samples(case, numbered(launched)), _runs(measured, case))
        told[case] = as_dicts([found])
        say(f"{line_of(case, 'recorded', [found])}; {found.message}")
        note(out, case, probe=f"{found.verdict} {found.cause}".strip())
        if found.verdict not in UNDISTURBED:
            problems.append(f"probe: {case} is {found.verdict} beside a copy loop: {found.message}")
    missing = [row.case for row in table if row.case not in told]
    problems += [f"probe: {case} has no launch" for case in missing]
    if all(one["verdict"] == Verdict.PASS for found in told.values() for one in found):
        problems.append("probe: the copy loop has moved no row: expected one at least that is INCONCLUSIVE or INFRA")
    write(out, "probe", measured, {"verdicts": told})
    return problems


def _runs(measured: Measured, case: str) -> list[PerfRun]:
    return [PerfRun(test=case, samples=measured.samples(case, measured.of["same"][case]), provenance=SOMEWHERE)]


def prove_sync(out: Path, table: Sequence[rows.Row], tree: Path, ahead: bool) -> list[str]:
    """Stage `sync`: counts of this checkout, and of one whose op waits for the device."""
    row = next(row for row in table if row.op == SYNCED)
    measured = Measured([row], "counts")
    for side, document in launches("counts", [("same", [row.case], None), ("sync", [row.case], str(tree))], ahead):
        measured.add(side, document)
    say("sync: an inserted wait")
    problems, verdicts = list(measured.errors), {}
    before = [PerfRun(test=row.case, samples=measured.samples(row.case, launched), provenance=SOMEWHERE)
              for launched in [measured.of.get("same", {}).get(row.case, [])] if launched]  # fmt: skip
    for side, expected in (("same", Verdict.PASS), ("sync", Verdict.REGRESSION)):
        launched = measured.of.get(side, {}).get(row.case, [])
        found = speed.judge(measured.samples(row.case, launched), before)
        verdicts[side] = as_dicts([found])
        say(f"  {row.case} {side}: {found.verdict} {found.message} {[one.counts for one in launched]}")
        note(out, row.case, sync=f"{verdicts['same'][0]['verdict']} / {found.verdict}")
        if found.verdict is not expected:
            problems.append(f"sync: {side} is {found.verdict}, expected {expected}: {found.message}")
    write(out, "sync", measured, {"verdicts": verdicts})
    return problems


def execute(
    out: Path,
    stages: Sequence[str],
    count: int,
    platform: str,
    ahead: bool,
    seconds: float = math.inf,
    resume: bool = False,
) -> list[str]:
    """What does not hold."""
    begun = time.monotonic()
    if not resume:
        for name in (VERDICTS, CONFIGURATIONS, *(f"{name}.json" for name in ("launches", *STAGES))):
            (out / name).unlink(missing_ok=True)

    def spent() -> str:
        return f"[{time.monotonic() - begun:.0f} s]"

    fmt = device.detect().arch.e4m3
    table = chosen(fmt)
    problems: list[str] = []
    wrong: list[str] = []
    slow: Mapping[str, Slower | None] = {}
    known = resume and (out / CONFIGURATIONS).exists() and (out / "launches.json").exists()
    try:
        wrong, slow = ([], kept(out)) if known else surveyed(fmt, platform, "slower" in stages)
    except Exception as error:  # what needs no slower kernel goes on
        traceback.print_exc()
        problems.append(f"survey: {type(error).__name__}: {error}")
    if wrong:
        return [f"wrong results, and nothing was timed: {problem}" for problem in wrong]
    say(f"{spent()} {'not known whether results are right' if problems else 'results are right'}; slower here:")
    for op, one in slow.items():
        told = "" if one is None or one.enough else ", which is not slower enough, and is left out"
        say(f"  {op}: " + ("nothing found" if one is None else f"{one.factor:.3f}x, {one.config}{told}"))
    if slow and not known:
        (out / CONFIGURATIONS).write_text(
            json.dumps({op: asdict(one) if one else None for op, one in slow.items()}, indent=1) + "\n"
        )
    say(f"  linear: {NO_SLOWER}")
    added = lines_of(slow)
    if "slower" in stages and not added:
        why = "; ".join(f"{op}: {cause}" for op, cause in lacking(slow).items())
        problems.append("slower: no slower configuration was found" + (f": {why}" if why else ""))
    measured = Measured.read(out, table) if resume and (out / "launches.json").exists() else Measured(table)
    if not measured.of:  # nothing of a run that could measure nothing
        measured = Measured(table)
    if measured.errors:  # what they cost is launched again, or is missed by its count
        measured.earlier, measured.errors = [*measured.earlier, *measured.errors], []
        write(out, "launches", measured, {})
    judged = bool({"same", "slower"} & set(stages))
    with tempfile.TemporaryDirectory(prefix="fp8ci-prove-") as name:
        folder = Path(name)
        slow_tree = worse_tree(folder / "slower", added) if "slower" in stages and added else None
        for tree in [None, slow_tree] if slow_tree else [None]:
            cases = [row.case for row in table if tree is None or row.op != "linear"]
            told = processes.prepare(cases, str(tree) if tree else None)
            say(f"{spent()} compiled {tree or 'this checkout'} {told}")

        def times() -> list[str]:
            wanted = count if judged else speed.NOISE_LAUNCHES
            later = LEFT_LAUNCHES if {"probe", "sync"} & set(stages) else 0
            measure_times(out, measured, slow_tree, wanted, ahead, begun + seconds, later)
            return []

        steps: dict[str, Callable[[], list[str]]] = {
            "same": times,
            "probe": lambda: prove_probe(out, table, ahead),
            "sync": lambda: prove_sync(out, table, worse_tree(folder / "sync", {SYNC_MODULE: SYNC}), ahead),
            "tries": lambda: judge_times(out, measured),
        }
        asked = {*stages, *(("same",) if judged or "probe" in stages else ()), *(("tries",) if judged else ())}
        for stage, step in steps.items():
            if stage in asked:
                try:
                    found = step()
                except Exception as error:  # the other stages go on
                    traceback.print_exc()
                    found = [f"{stage}: {type(error).__name__}: {error}"]
                say(f"{spent()} {stage} done" + "".join(f"\n  {words(problem)}" for problem in found))
                problems += found
    return problems


def again(out: Path) -> list[str]:
    """What does not hold, of the launches that an earlier run has left."""
    return judge_times(out, Measured.read(out, chosen("e4m3fn")))


SYNC_MODULE = "fp8stack.kernels.rowwise"


def elsewhere(earlier: Path) -> str:
    """Why launches that were made earlier are no part of this run's proof; empty where they are."""
    if not earlier.exists():
        return ""
    document = json.loads(earlier.read_text(encoding="utf-8"))
    if document["code"] != code():
        return f"{earlier} is of other code; expected launches of this checkout"
    theirs = document.get("machine")
    if theirs and not same_machine(theirs, ours := machine()):
        its, here = (f"{one['device']} {one['uuid']} in {one['host']}" for one in (theirs, ours))
        return f"{earlier} was measured on {its}; expected launches of {here}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m suites.perf.prove",
        description=__doc__.splitlines()[0],
        epilog=f"Compile caches are kept in fp8ci-prove-UID of the temporary folder, or where {processes.TRITON} and "
        f"{processes.INDUCTOR} say.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for what was measured")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one; may be repeated")
    parser.add_argument("--launches", type=int, default=12, metavar="N", help="of each side, 11 at least (default: 12)")
    parser.add_argument("--platform", default="h200", metavar="ID", help="whose recorded sweeps to look into")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="end within about so many")
    parser.add_argument("--again", action="store_true", help="judge what an earlier run has left in DIR; needs no GPU")
    parser.add_argument(
        "--resume", action="store_true", help="go on from what an earlier run of this code on this GPU left there"
    )
    parser.add_argument("--one-by-one", action="store_true", help="start no launch while another one is measured")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    if not (options.again or torch.cuda.is_available()):
        print("no GPU is visible; speed is measured on one; run this on a GPU", file=sys.stderr)
        return 4
    if options.launches < WHOLE:
        print(f"prove: --launches is {options.launches}; expected {WHOLE} or more; correct it", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    foreign = "" if options.again or not options.resume else elsewhere(options.out / "launches.json")
    if foreign:
        print(f"prove: {foreign}; leave --resume out, or name another --out", file=sys.stderr)
        return 2
    caches = Path(tempfile.gettempdir()) / f"fp8ci-prove-{os.getuid()}"
    os.environ.setdefault(processes.TRITON, str(caches / "triton"))
    os.environ.setdefault(processes.INDUCTOR, str(caches / "inductor"))
    if options.again:
        problems = again(options.out)
    else:
        stages, ahead = options.stage or STAGES, not options.one_by_one
        problems = execute(
            options.out, stages, options.launches, options.platform, ahead, options.seconds, options.resume
        )
    say("\n".join(table_of(options.out)))
    for problem in problems:
        say(words(problem))
    if all(problem.startswith(LATE) for problem in problems):
        say("the gate of speed holds here" + (", but its launches take too long" if problems else ""))
    else:
        say("the gate of speed does not hold here")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
