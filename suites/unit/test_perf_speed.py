"""The perf suite on a CPU: its rows, launches made of other stuff, counts from a trace, and that it refuses xdist."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fp8stack.moe import Routing
from harness.executor import Ended
from harness.samples import Launch, PerfRun
from suites.perf import clocks, grouped_gemm, kernels, launch, moe, processes, rows, test_speed, timing
from suites.unit import built_samples as built

ROOT = Path(__file__).resolve().parents[2]
ROW = test_speed.ROWS[0]


def test_rows_are_named_once() -> None:
    """Every kernel, grouped product, linear and MoE layer has a row; ids are unique, ASCII and of the format."""
    for fmt in ("e4m3fn", "e4m3fnuz"):
        table = [*rows.rows(fmt), *rows.trainers(fmt)]
        assert len(rows.by_case(fmt)) == len(table)
        assert {row.op for row in table} > {
            "rowwise",
            "colwise",
            "experts",
            "grouped_gemm",
            "linear",
            "moe",
            "trainer",
        } - {"rowwise"}
        assert all(row.case.isascii() and f"-{fmt}" in row.case and len(row.case) <= 80 for row in table)
        counted = rows.first_of_each_op(fmt)
        assert {row.case for row in counted} <= rows.by_case(fmt).keys()
        assert {row.op for row in counted} == {row.op for row in rows.rows(fmt)}
        kinds = [row.case.split(f"-{fmt}")[0] for row in counted]
        assert len(set(kinds)) == len(kinds)
        assert {f"grouped_gemm-{gemm}" for gemm in grouped_gemm.GEMMS} < set(kinds)
        assert {"linear-rowwise", "linear-rowwise_with_gw_hp", "moe-dsv3-rowwise"} < set(kinds)


class Fake:
    """Launches that take no time: `slower` of the candidate in stage one and two."""

    def __init__(self, *slower: float) -> None:
        self.slower = slower or (1.0,)
        self.calls: list[tuple[str, tuple[str, ...], str | None]] = []
        self.prepared: list[str | None] = []
        self.noted: list[tuple[str, str]] = []
        self.machine = built.Machine(random.Random(4))

    def prepare(self, cases: Sequence[str], tree: str | None) -> str:
        assert not self.calls
        self.prepared.append(tree)
        return ""

    def __call__(self, kind: str, cases: Sequence[str], tree: str | None) -> dict[str, Any]:
        mine = [call for call in self.calls if call[2] is None]
        self.calls.append((kind, tuple(cases), tree))
        factor = 1.0 if tree else self.slower[min(len(mine) // 3, len(self.slower) - 1)]
        document: dict[str, Any] = {"rows": {}, "errors": {}, "resolution_ns": 500.0}
        for case in cases:
            fields = msgspec.to_builtins(self.machine.launch(1, slower={"candidate": factor}))
            document["rows"][case] = {k: v for k, v in fields.items() if k not in ("number", "stage", "side")}
        return document


def launched(fake: Fake, recorded: Sequence[PerfRun] = ()) -> test_speed.Launched:
    return test_speed.Launched(
        {"time": [ROW.case]},
        lambda case: recorded,
        prepare=fake.prepare,
        start=fake,
        note=lambda *told: fake.noted.append(told),
    )


def recorded() -> list[PerfRun]:
    """Runs of that row, as they would have been recorded here."""
    return [
        msgspec.structs.replace(run, samples=rows.samples(ROW, "time", run.samples.launches, 500.0))
        for run in built.recorded(random.Random(3))
    ]


def test_three_launches_and_no_more() -> None:
    """A row that nobody suspects has one stage; all of its launches reach the file."""
    fake = Fake()
    found = launched(fake, recorded()).of("time", ROW)
    assert fake.calls == [("time", (ROW.case,), None)] * 3
    assert fake.prepared == [None]
    assert [(one.number, one.stage) for one in found.of("candidate")] == [(1, 1), (2, 1), (3, 1)]
    assert {name: len(json.loads(text)[ROW.case]) for name, text in fake.noted} == {"launches/time.json": 3}
    assert len(fake.noted) == 3
    assert found.resolution_ns == 500.0


@pytest.mark.parametrize("second", [1.3, 1.0], ids=["confirmed", "refuted"])
def test_a_suspected_row_is_launched_again(second: float) -> None:
    """The second stage happens, whatever it will show; only rows that are suspected take part."""
    fake = Fake(1.3, second)
    found = launched(fake, recorded()).of("time", ROW)
    assert len(fake.calls) == 6
    assert [one.stage for one in found.of("candidate")] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("slower", "calls"), [(1.0, 3), (1.3, 6)], ids=["as-recorded", "slower"])
def test_what_is_suspected_by_its_time(slower: float, calls: int) -> None:
    """Counts and compile times are recorded of the same case, and hold no times; another configuration's are others."""
    times = recorded()
    fields = {"candidate": [], "reference": [], "probe": [], "throttled": []}
    bare = [msgspec.structs.replace(one, **fields) for one in times[0].samples.launches]
    others = [
        msgspec.structs.replace(times[0], samples=msgspec.structs.replace(times[0].samples, kind=kind, launches=bare))
        for kind in ("counts", "compile")
    ]
    half = [
        msgspec.structs.replace(one, candidate=[0.5 * ns for ns in one.candidate]) for one in times[0].samples.launches
    ]
    elsewhere = msgspec.structs.replace(times[0].samples, config={"seed": 1}, launches=half)
    others += [msgspec.structs.replace(times[0], samples=elsewhere)] * 9
    fake = Fake(slower)
    launched(fake, [*others, *times]).of("time", ROW)
    assert len(fake.calls) == calls


def test_pairs_with_a_base_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a base, launches are ours, base; base, ours; ours, base: neither is always the first."""
    monkeypatch.setenv(test_speed.AGAINST_VARIABLE, "/base")
    fake = Fake()
    found = launched(fake).of("time", ROW)
    assert fake.prepared == [None, "/base"]
    assert [tree for _, _, tree in fake.calls] == [None, "/base", "/base", None, None, "/base"]
    assert len(found.of("base")) == len(found.of("candidate")) == 3


def test_what_could_not_be_compiled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each side, and kind of launch, in the evidence."""
    monkeypatch.setenv(test_speed.AGAINST_VARIABLE, "/base")
    fake = Fake()
    made = launched(fake)
    made.cases["trainer"] = [ROW.case]
    made.prepare = lambda cases, tree: f"{cases[0]}: OutOfMemoryError" if tree or len(fake.calls) else ""
    made.of("time", ROW)
    made.of("trainer", ROW)
    told = dict(fake.noted)["launches/prepare.txt"]
    assert told == "".join(
        f"{side}:\n{ROW.case}: OutOfMemoryError\n" for side in ("time, base", "trainer, candidate", "trainer, base")
    )


def test_a_row_that_was_not_measured_fails() -> None:
    """An error of one launch is the test's failure, in its words; one that measures nothing is the last."""
    asked = []

    def broken(kind: str, cases: Sequence[str], tree: str | None) -> dict[str, Any]:
        asked.append(kind)
        return {"rows": {}, "errors": dict.fromkeys(cases, "RuntimeError: out of it")}

    made = test_speed.Launched({"time": [ROW.case]}, lambda case: (), prepare=lambda cases, tree: "", start=broken)
    with pytest.raises(AssertionError, match=r"was not measured: candidate, launch 1: RuntimeError: out of it"):
        made.of("time", ROW)
    assert asked == ["time"]


def test_more_launches_are_for_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of a time; a count and a compile time have no noise that more than three would make known."""
    monkeypatch.setenv(test_speed.LAUNCHES_VARIABLE, "5")
    fake = Fake()
    made = test_speed.Launched(
        {"time": [ROW.case], "counts": [ROW.case]}, lambda case: (), prepare=fake.prepare, start=fake
    )
    assert len(made.of("time", ROW).launches) == 5
    assert len(made.of("counts", ROW).launches) == 3


def test_seconds_are_those_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the least three no launch begins after them, also of a kind that is asked for late."""
    monkeypatch.setenv(test_speed.LAUNCHES_VARIABLE, "5")
    monkeypatch.setenv(test_speed.SECONDS_VARIABLE, "10")
    fake, now = Fake(), [0.0]
    monkeypatch.setattr(test_speed, "time", argparse.Namespace(monotonic=lambda: now[0]))

    def slowly(kind: str, cases: Sequence[str], tree: str | None) -> dict[str, Any]:
        now[0] += 3.0
        return fake(kind, cases, tree)

    cases = {"time": [ROW.case], "trainer": [ROW.case]}
    made = test_speed.Launched(cases, lambda case: (), prepare=lambda cases, tree: "", start=slowly)
    assert len(made.of("time", ROW).launches) == 4
    assert len(made.of("trainer", ROW).launches) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches for real on a GPU")
def test_a_launch_without_a_gpu_says_so() -> None:
    """A real process that ends with exit 4: every row has its last line as the error."""
    document = processes.launch_once("time", [ROW.case], None)
    assert document["errors"] == {
        ROW.case: "the launch ended with 4: no GPU is visible; speed is measured on one; run this on a GPU"
    }


def test_no_fork_has_imported_torch_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8CI_PERF_FRESH=1: of launches, and of the pools that compile for them."""
    told: list[list[str]] = []
    monkeypatch.setattr(processes.multiprocessing.context.ForkServerContext, "set_forkserver_preload",
                        lambda self, modules: told.append(modules))  # fmt: skip
    processes.forks()
    monkeypatch.setenv(processes.FRESH_VARIABLE, "1")
    processes.forks()
    assert told == [[processes.PRELOAD], []]
    assert processes.preloaded() == ()


def sources(folder: Path, text: str) -> str:
    """A checkout whose fp8stack says that."""
    (folder / "fp8stack").mkdir(parents=True)
    (folder / "fp8stack" / "__init__.py").write_text(text)
    return str(folder)


def test_inductor_has_a_folder_for_each_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is in it, wherever it is: the same at each launch. Triton's cache is shared. Both are absolute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(processes.INDUCTOR, "inductor")
    monkeypatch.setenv(processes.TRITON, "triton")
    trees = [None, sources(tmp_path / "a", "1"), sources(tmp_path / "b", "2"), sources(tmp_path / "c", "1")]
    own, a, b, c = (processes.environment(tree) for tree in trees)
    assert {one[processes.TRITON] for one in (own, a, b, c)} == {str(tmp_path / "triton")}
    folders = [Path(one[processes.INDUCTOR]) for one in (own, a, b, c)]
    assert {one.parent for one in folders} == {tmp_path / "inductor"}
    assert len(set(folders[:3])) == 3
    assert folders[1] == folders[3]
    assert processes.environment() == own
    monkeypatch.delenv(processes.INDUCTOR)
    assert Path(processes.inductor_cache(None)).is_relative_to(tempfile.gettempdir())


def imported(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """What launches and their preparation do in torch's place, as soon as they import it."""
    (folder / "beyond" / "torch").mkdir(parents=True)
    (folder / "beyond" / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "beyond"))
    monkeypatch.setenv(processes.FRESH_VARIABLE, "1")


def test_launches_and_what_compiles_for_them_share_inductor_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(monkeypatch, tmp_path, f"import os, sys\nprint(os.environ['{processes.INDUCTOR}'])\nsys.exit(3)\n")
    tree = sources(tmp_path / "a", "1")
    for one in (None, tree):
        expected = processes.inductor_cache(one)
        assert processes.prepare([ROW.case], one) == expected
        told = processes.launch_once("time", [ROW.case], one)["errors"]
        assert told == {ROW.case: f"the launch ended with 3: {expected}"}


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within so many seconds; one that nobody has reaped has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_preparation_that_hangs_is_killed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its deadline, with what it has started."""
    told = tmp_path / "pid"
    code = f"open({str(told)!r}, 'w').write(str(subprocess.Popen(['sleep', '100']).pid))"
    imported(monkeypatch, tmp_path, f"import subprocess, time\n{code}\ntime.sleep(100)\n")
    monkeypatch.setattr(processes, "DEADLINE", 5.0)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.prepare([ROW.case], None)
    assert gone(int(told.read_text()))


POOL = """
import os, sys, time
from suites.perf import processes

if __name__ == "__main__":
    pool = processes.pool(1, {"FP8CI_OF_A_TEST": "given"})
    print(pool.submit(os.getpid).result(), pool.submit(os.getenv, "FP8CI_OF_A_TEST").result(), flush=True)
    pool.submit(time.sleep, 100)
    pool.submit(time.sleep, 100)
    time.sleep(100)
"""
READER = """
import subprocess, time
from suites.perf import processes

print(subprocess.Popen(["sleep", "100"]).pid, "given", flush=True)
processes.end_with_reader()
time.sleep(100)
"""


def said(code: str, tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A process of that code, and the number of the one that it has started."""
    (tmp_path / "it.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT), processes.FRESH_VARIABLE: "1"}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "it.py")], env=env, text=True, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    pid, given = process.stdout.readline().split()
    assert given == "given"
    return process, int(pid)


def test_a_worker_ends_with_its_pool(tmp_path: Path) -> None:
    """Also with work in hand, and where the process that has the pool is killed: nothing keeps the device's memory."""
    process, worker = said(POOL, tmp_path)
    with process:
        process.kill()
    assert gone(worker)


def test_every_pool_is_of_such_workers() -> None:
    """Whatever compiles side by side: a pool of another kind could outlive the run that it compiles for."""
    own = [path.name for path in (processes.ROOT / "suites" / "perf").glob("*.py") if "ProcessPool" in path.read_text()]
    assert own == ["processes.py"]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays"])
def test_a_preparation_ends_with_its_reader(leaves: bool, tmp_path: Path) -> None:
    """With its process group, as soon as nobody reads, and not before."""
    process, child = said(READER, tmp_path)
    with process:
        assert process.stdout is not None
        if leaves:
            process.stdout.close()
        assert gone(child, 20.0 if leaves else 1.5) is leaves
        process.kill()
    if not leaves:
        os.killpg(process.pid, signal.SIGKILL)


def test_prepare_watches_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts any worker."""
    asked: list[str] = []
    monkeypatch.setattr(launch, "torch", OnCpu())
    monkeypatch.setattr(rows, "by_case", lambda fmt: {"small": ROW})
    monkeypatch.setattr(processes, "end_with_reader", lambda: asked.append("watch"))
    monkeypatch.setattr(launch, "prepare_all", lambda cases, jobs: asked.append(f"{cases} {jobs}"))
    assert launch.main(["--prepare", "--jobs", "2", "small"]) == 0
    assert asked == ["watch", "['small'] 2"]


PRELOADED = """
import sys, threading
import torch

def touched(*given):
    raise AssertionError("CUDA was touched")

asked, torch.cuda.device_count, torch.cuda._lazy_init = torch.cuda.is_available, touched, touched
from suites.perf import preload

assert {"torch._inductor.compile_fx", "torch._dynamo.backends.inductor", "triton.compiler"} <= sys.modules.keys()
assert not [name for name in sys.modules if name.startswith(("fp8stack", "harness"))]
assert threading.active_count() == 1
preload.MODULES = ("there_is_none", "asks")
preload.load()
print(torch.cuda.is_available is asked)
"""


def test_what_launches_are_forks_of_has_not_touched_cuda(tmp_path: Path) -> None:
    """It imports the compiler and nothing of ours, starts no thread, and answers itself who asks for a device."""
    (tmp_path / "asks.py").write_text("import torch\nprint('asks', torch.cuda.is_available())\n")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", PRELOADED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["asks True", "True"]


def test_a_fork_of_a_process_that_has_touched_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no device, whatever it is told, and says how to do without forks."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert launch.main([ROW.case, "--out", "none.json"]) == 4
    assert "set FP8CI_PERF_FRESH=1" in capsys.readouterr().err


class Gpu:
    """torch.cuda as far as a launch asks it, on a CPU."""

    def __getattr__(self, name: str) -> Any:
        return {"is_available": lambda: True, "current_device": lambda: 0}.get(name, lambda *given: "NVIDIA H200")

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_device_properties(self, where: object) -> Any:
        return argparse.Namespace(name="NVIDIA H200", uuid="of-a-test")


class OnCpu:
    """torch, whose device is the CPU."""

    cuda = Gpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *given: object) -> torch.device:
        return torch.device("cpu")


def test_the_document_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with their parts, an error of one that fails, and when it began and ended."""
    broken = dataclasses.replace(ROW, case="broken", make=lambda where: 1 / 0)
    monkeypatch.setattr(launch, "torch", OnCpu())
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(rows, "by_case", lambda fmt: {"small": SMALL["kernel"](), "broken": broken})
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(timing, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(timing, "interleaved", false_samples)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of this process, which goes on
    before = time.monotonic()
    assert launch.main(["small", "broken", "--out", str(tmp_path / "launch.json")]) == 0
    document = json.loads((tmp_path / "launch.json").read_text())
    assert document["errors"] == {"broken": "ZeroDivisionError: division by zero"}
    where = {name: document[name] for name in ("host", "device", "uuid")}
    assert where == {"host": platform.node(), "device": "NVIDIA H200", "uuid": "of-a-test"}
    assert before <= document["entered"] <= document["ended"] <= time.monotonic()
    assert list(document["parts"]) == ["cuda", "context", "rows"]
    spent = sum(document["parts"].values()) + document["waited"]
    assert spent == pytest.approx(document["ended"] - document["entered"], abs=0.1)
    (row,) = document["rows"].values()
    assert list(row["parts"]) == ["data", "load", "warm", "samples", "rest"]
    assert sum(row["parts"].values()) == pytest.approx(row["seconds"], abs=0.01)
    assert msgspec.convert({**row, "number": 1}, Launch).parts == row["parts"]


def ended(folder: Path, document: dict[str, Any] | None, **how: Any) -> processes.Running:
    """A launch of a row that has ended at second 110, after ten."""
    out = folder / "launch.json"
    if document is not None:
        out.write_text(json.dumps({"rows": {ROW.case: {}}, "errors": {}, "tree": str(ROOT), **document}))
    future: concurrent.futures.Future[tuple[Ended, float]] = concurrent.futures.Future()
    future.set_result((Ended(**{"rc": 0, "signal": None, "killed_by": None, "seconds": 10.0, "pid": 1, **how}), 110.0))
    return processes.Running([ROW.case], None, out, future, threading.Event(), ExitStack())


def test_the_seconds_of_a_launch_are_its_parts(tmp_path: Path) -> None:
    """From the order to the end, without the wait for the device."""
    told = {"waited": 2.0, "entered": 101.5, "ended": 109.5, "parts": {"cuda": 0.5, "context": 0.5, "rows": 5.0}}
    document = ended(tmp_path, told).collect()
    assert document["seconds"] == 8.0
    assert document["parts"] == {"start": 1.5, "cuda": 0.5, "context": 0.5, "rows": 5.0, "end": 0.5}
    assert sum(document["parts"].values()) == document["seconds"]


def test_a_launch_that_was_killed_keeps_its_rows(tmp_path: Path) -> None:
    """Those that it had written; of the others its signal is told, and without a document its last line."""
    killed = {"rc": None, "signal": "SIGKILL"}
    document = ended(tmp_path, {"rows": {}, "waited": 0.0, "parts": {}}, **killed).collect()
    assert document["errors"] == {ROW.case: "the launch ended with SIGKILL before this row"}
    (tmp_path / "launch.json").unlink()
    assert ended(tmp_path, None, **killed).collect()["errors"] == {
        ROW.case: "the launch ended with SIGKILL: it printed nothing"
    }


def test_a_launch_of_another_tree_has_measured_nothing(tmp_path: Path) -> None:
    """Its rows are errors, and no samples that a later run would take for good ones."""
    document = ended(tmp_path, {"tree": "/other", "parts": {}}).collect()
    assert document["errors"] == {ROW.case: f"fp8stack came from /other, expected {ROOT}"}
    assert document["rows"] == {}


def test_the_base_is_its_own_fp8stack_under_our_suites(tmp_path: Path) -> None:
    """A launch of the base imports that checkout's fp8stack, and the measuring code of this one."""
    base = tmp_path / "checkout"
    for package in ("fp8stack", "suites/perf"):
        (base / package).mkdir(parents=True)
    (base / "fp8stack" / "__init__.py").write_text("")
    code = "import fp8stack, suites.perf; print(fp8stack.__file__); print(list(suites.perf.__path__)[0])"

    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in processes.environment()

    def found(tree: str | None) -> list[str]:
        env, where = processes.environment(), processes.folder_of(tmp_path, tree)
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=where, capture_output=True, text=True, check=True
        )
        return [str(Path(line).resolve()) for line in done.stdout.splitlines()]

    ours = str(ROOT / "suites" / "perf")
    assert found(str(base)) == [str(base / "fp8stack" / "__init__.py"), ours]
    assert found(None) == [str(ROOT / "fp8stack" / "__init__.py"), ours]


def false_samples(
    candidate: timing.Candidate,
    reference: timing.Candidate | None,
    probe: timing.Candidate,
    blocks: int,
    warm_up: float,
    after_block: Callable[[], None],
    lap: Callable[[str], None],
) -> dict[str, timing.Timed]:
    """Calls everything once, and says a millisecond."""
    roles = {"candidate": candidate, "reference": reference, "probe": probe}
    for one in roles.values():
        for call in one.calls if one is not None else ():
            call()
    lap("load")
    lap("warm")
    for _ in range(blocks):
        after_block()
    lap("samples")
    return {name: timing.Timed(name, (1e6,) * (2 * blocks) if one else ()) for name, one in roles.items()}


SMALL: dict[str, Callable[[], rows.Row]] = {
    "kernel": lambda: rows.of_kernel(kernels.Row("rowwise", (64, 32), torch.bfloat16, None, None), "e4m3fn"),
    "grouped-kernel": lambda: rows.of_kernel(kernels.Row("colwise", (64, 32, 2), torch.bfloat16, None, None), "e4m3fn"),
    "linear": lambda: rows.of_linear((64, 48), "rowwise_with_gw_hp", "e4m3fn"),
    "layer": lambda: rows.of_layer("dsv3", "e4m3fn"),
    "trainer": lambda: rows.of_trainer("llama3-tiny", 1, "rowwise_with_gw_hp", 64, "e4m3fn"),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_row_runs_small(make: Callable[[], rows.Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate, reference and probe of a row can be called, and a launch's fields are what the harness reads."""
    size = moe.Layer(24, 64, 48, Routing(4, 2, "sigmoid", 2, 2, normalise=True, scale=2.5), 1)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(timing, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(timing, "interleaved", false_samples)
    monkeypatch.setattr(rows, "PROBE_SIZE", 32)
    monkeypatch.setattr(moe, "LAYERS", {"dsv3": size})
    monkeypatch.setattr(moe, "TOKENS", 32)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    row = make()
    fields = launch.timed(row, torch.device("cpu"))
    one = msgspec.convert({**fields, "number": 1}, Launch)
    assert len(one.candidate) == len(one.reference) == len(one.probe) == 2 * row.blocks
    assert one.throttled == []  # a CPU says nothing of its clocks
    assert one.input_spread is None or one.input_spread == pytest.approx(1.0, abs=0.2)


class Driver:
    """NVIDIA's library as far as it is asked; `reasons`: the bits that it gives, one call after the other."""

    def __init__(self, *reasons: int, broken: str = "") -> None:
        self.reasons, self.broken, self.asked = list(reasons), broken, ""

    def nvmlInit_v2(self) -> int:
        return int(self.broken == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked = uuid.decode()
        return int(self.broken == "handle")

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        value._obj.value = {clocks.SM: 1980, clocks.MEMORY: 3201}[kind]
        return int(self.broken == "clocks")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, value: Any) -> int:
        value._obj.value = self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]
        return int(self.broken == "reasons")


def test_clocks_are_asked_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heat and the hardware's own brake count; an idle device, an application's clocks or the power limit do not."""
    driver = Driver(0, 0x1 | 0x2 | 0x4, 0x20, 0x40, 0x8, 0x80, 0)
    watch = clocks.Watch.opened(driver, "GPU-1")
    assert (watch.known, driver.asked) == (True, "GPU-1")
    assert watch.read() == {"sm_mhz": 1980.0, "mem_mhz": 3201.0}
    assert [watch.held_down() for _ in range(6)] == [False, True, True, True, True, False]
    monkeypatch.setattr(clocks.Watch, "of", lambda where: clocks.Watch.opened(Driver(0, 0x40, 0), "GPU-1"))
    row = SMALL["kernel"]()
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(timing, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(timing, "interleaved", false_samples)
    fields = launch.timed(row, torch.device("cpu"))
    assert fields["throttled"] == [True] + [False] * 9
    assert fields["clocks"]["sm_mhz_after"] == 1980.0


@pytest.mark.parametrize("broken", ["init", "handle", "reasons"])
def test_a_driver_that_does_not_answer(broken: str) -> None:
    """No flags at all, not `never throttled`."""
    watch = clocks.Watch.opened(Driver(0, broken=broken), "GPU-1")
    assert (watch.known, watch.read(), watch.held_down()) == (False, {}, False)


TRACE = [
    {"name": "fp8ci-counted", "cat": "user_annotation", "ts": 100, "dur": 50},
    {"name": "_quantize", "cat": "kernel", "ts": 200, "dur": 9},
    {"name": "_scales", "cat": "kernel", "ts": 190, "dur": 9},
    {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 110, "dur": 1},
    {"name": "cudaDeviceSynchronize", "cat": "cuda_runtime", "ts": 160, "dur": 1},
]


def test_counts_of_a_trace() -> None:
    """Kernels wherever they ran; waits of the host within the call only; a trace without its mark proves nothing."""
    assert launch.counts_of(TRACE) == {"kernels": 2, "synchronisations": 0}
    inserted = {"name": "hipStreamSynchronize", "cat": "hip_runtime", "ts": 120, "dur": 5}
    assert launch.counts_of([*TRACE, inserted]) == {"kernels": 2, "synchronisations": 1}
    with pytest.raises(RuntimeError, match="the profiler saw nothing"):
        launch.counts_of(TRACE[1:])


def test_the_profiler_marks_a_call() -> None:
    """What `counts_of` looks for is what torch's profiler writes."""
    assert launch.count(lambda: torch.ones(4) + 1, torch.device("cpu")) == {"kernels": 0, "synchronisations": 0}


def test_a_profiler_that_sees_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of a call on a GPU: nothing was counted, and that is not zero."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where=None: None)
    with pytest.raises(RuntimeError, match="the trace holds no kernel"):
        launch.count(lambda: None, torch.device("cuda"))


def pytest_in(
    folder: Path, *arguments: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env = {**clean, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)


CONFIGURATIONS = {
    "pytest.ini": "[pytest]\naddopts = -n auto\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-n auto'\n",
    "tox.ini": "[pytest]\naddopts = -n auto\n",
    "setup.cfg": "[tool:pytest]\naddopts = -n auto\n",
}


@pytest.mark.parametrize("how", ["argument", "dist", "environment", *CONFIGURATIONS])
def test_xdist_is_refused(how: str, tmp_path: Path) -> None:
    """`-n 2`, and `-n auto` from somebody's environment or configuration file: exit 4, with what to do.

    It only collects, with a deadline: were it not refused, this would be red in seconds.
    """
    arguments = {"argument": ["-n", "2"], "dist": ["--dist", "load", "--tx", "popen"]}.get(how, [])
    environment = {"PYTEST_ADDOPTS": "-n auto"} if how == "environment" else {}
    if how in CONFIGURATIONS:
        (tmp_path / how).write_text(CONFIGURATIONS[how])
        arguments = ["-c", str(tmp_path / how), f"--rootdir={ROOT}"]
    done = pytest_in(ROOT, "suites/perf", "--collect-only", *arguments, timeout=60, **environment)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "add `-n 0` where a configuration file or PYTEST_ADDOPTS sets it" in done.stderr


def test_samples_reach_the_storage_of_pytest_benchmark(tmp_path: Path) -> None:
    """Through a timer that replays them: its file holds our samples, in seconds and in order."""
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from suites.perf.test_speed import replay\n"
        "@pytest.mark.benchmark(timer=replay, warmup=False)\n"
        "def test_it(benchmark):\n"
        "    replay.load([1500.0, 2500.0, 1000.0])\n"
        "    benchmark.pedantic(lambda: None, rounds=3, iterations=1)\n"
    )
    out = tmp_path / "benchmark.json"
    done = pytest_in(tmp_path, "-p", "no:xdist", f"--benchmark-json={out}", "test_it.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert row["stats"]["data"] == pytest.approx([1.5e-6, 2.5e-6, 1e-6])
