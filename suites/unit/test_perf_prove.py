"""The proof of the gate of speed on a CPU: its tries on drawn launches, its slower copies, and what it says of both."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness import manifest, platforms, speed
from harness.errors import Verdict
from harness.samples import Launch
from suites.perf import processes, prove, rows, sweep
from suites.unit import built_samples as built

CASES = [row.case for row in prove.chosen("e4m3fn")]
MACHINE = {"host": "node-1", "device": "NVIDIA H200", "uuid": "1-2-3"}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `main` sets where nothing is set goes with the test."""
    for name in (processes.TRITON, processes.INDUCTOR):
        monkeypatch.setenv(name, str(tmp_path / "caches"))


class Fake:
    """Launches that take no time. `slower`: by side, factors of candidate, reference and probe."""

    def __init__(self, slower: Mapping[str, Mapping[str, float]], waits: int = 1) -> None:
        self.slower, self.waits = slower, waits
        self.machine = built.Machine(random.Random(8))
        self.beside = False
        self.started = 0
        self.prepared: list[tuple[int, bool]] = []

    def prepare(self, cases: Sequence[str], tree: str | None) -> str:
        self.prepared.append((len(cases), tree is not None))
        return ""

    def start(self, kind: str, cases: Sequence[str], tree: str | None) -> Any:
        side = Path(tree).name if tree else "probe" if self.beside else "same"
        self.started += 1
        rows: dict[str, Any] = {}
        for case in cases:
            if kind == "counts":
                counts = {"kernels": 1, "synchronisations": self.waits if tree else 0}
                rows[case] = {"counts": counts, "device": built.DEVICE}
                continue
            factors = dict(self.slower.get(side, {}))
            if case == CASES[3]:  # under 40 us
                factors |= {name: factors.get(name, 1.0) * 0.12 for name in ("candidate", "reference")}
            fields = msgspec.to_builtins(self.machine.launch(1, slower=factors))
            fields |= {"seconds": 0.25, "parts": {"data": 0.05, "warm": 0.2}}
            rows[case] = {name: value for name, value in fields.items() if name not in ("number", "stage", "side")}
        told = {"resolution_ns": 500.0, "seconds": 1.0, "parts": {"start": 0.75, "rows": 0.25}, **MACHINE}
        return Done({"rows": rows, "errors": {}, **told})


class Done:
    """A launch that has ended."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def cancel(self) -> None:
        pass

    def collect(self, deadline: float) -> dict[str, Any]:
        return self.document


def proven(
    fake: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: Sequence[str],
    count: int = 1,
    seconds: float = math.inf,
    surveyed: Callable[..., Any] | None = None,
    resume: bool = False,
) -> list[str]:
    """The stages on the first `count` of the six rows."""
    faked(fake, monkeypatch, count, surveyed)
    return prove.execute(tmp_path, stages, 12, "h200", True, seconds, resume)


def faked(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, count: int = 1, surveyed: Callable[..., Any] | None = None
) -> None:
    class Beside:
        def __enter__(self) -> None:
            fake.beside = True

        def __exit__(self, *told: object) -> None:
            fake.beside = False

    slow = prove.Slower("fp8stack.kernels.rowwise", "ROWWISE_CONFIGS", ("sm_90", "k<=8192"), "RowwiseConfig", {}, 1.1)
    monkeypatch.setattr(processes, "start", fake.start)
    monkeypatch.setattr(processes, "prepare", fake.prepare)
    monkeypatch.setattr(prove, "disturbed", Beside)
    monkeypatch.setattr(prove, "surveyed", surveyed or (lambda fmt, platform, slower: ([], {"rowwise": slow})))
    monkeypatch.setattr(prove, "chosen", lambda fmt, chosen=prove.chosen: chosen("e4m3fn")[:count])
    # The work of the other rows is not that of the drawn one: no rate to compare.
    monkeypatch.setattr(prove.Measured, "samples", _without_work(prove.Measured.samples))


def _without_work(made: Any) -> Any:
    return lambda self, *given: msgspec.structs.replace(made(self, *given), work=0)


def test_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet machine, a slow copy, a busy neighbour, a wait: each stage finds what it should."""
    neighbour = {"candidate": 1.9, "reference": 1.8, "probe": 2.1}
    fake = Fake({"slower": {"candidate": 1.12}, "probe": neighbour})
    assert proven(fake, tmp_path, monkeypatch, prove.STAGES, 6) == []
    assert fake.prepared == [(6, False), (5, True)]  # the linear layer has no slower copy
    told = capsys.readouterr().out
    assert "sync done" in told.partition("same: 10 tries")[0]  # what needs no device comes last
    assert "  a launch of same: 1.00 s (start 0.75, rows 0.25)\n" in told
    assert f"    {CASES[0]}: 0.25 s (data 0.05, warm 0.20)\n" in told
    assert "  linear: its products are the library's" in told
    slow = json.loads((tmp_path / "slower.json").read_text())
    assert {one["verdict"] for one in slow[CASES[0]]["pairs"]} == {"REGRESSION"}
    assert told.count("us, can show ") == 6 * 2 + 5 * 2 + 6
    raw = json.loads((tmp_path / "launches.json").read_text())
    assert len(raw["launches"]["same"][CASES[0]]) == len(raw["launches"]["slower"][CASES[0]]) == 12
    for name in ("launches", "probe", "sync"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["machine"] == MACHINE
    assert "REGRESSION counted more than the row allows" in told
    head, first, *_, linear = prove.table_of(tmp_path)
    assert head.split() == ["row", "us", "noise", "shows", "same", "slower", "probe", "sync"]
    assert re.fullmatch(
        rf"{CASES[0]} +2\d\d\.\d +\d\.\d\d% +\d\.\d%  10 PASS / 10 PASS +10 REGRESSION / 10 REGRESSION +"
        r"INCONCLUSIVE probe +PASS / REGRESSION",
        first,
    )
    assert linear.split()[-4:] == ["-", "INCONCLUSIVE", "probe", "-"]


@pytest.mark.parametrize(
    ("slower", "waits", "told"),
    [
        ({}, 1, "slower: rowwise-e4m3fn-bf16-m32768-k7168, pairs: only 0 of 10 are REGRESSION"),
        ({"slower": {"candidate": 1.12}}, 0, "sync: sync is PASS, expected REGRESSION"),
    ],
    ids=["not-slower", "no-wait"],
)
def test_what_does_not_hold(
    slower: dict[str, dict[str, float]], waits: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that does not find what was put there says so."""
    found = proven(Fake(slower, waits), tmp_path, monkeypatch, ("same", "slower", "sync"))
    assert any(one.startswith(told) for one in found), found


def test_a_false_alarm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of one commit that fall into two halves are what the first stage is there to find."""
    fake = Fake({})
    start, asked = fake.start, []

    def drifting(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        asked.append(kind)
        fake.slower = {"same": {"candidate": 1.3 if len(asked) > 6 else 1.0}}
        return start(kind, cases, tree)

    fake.start = drifting  # type: ignore[method-assign]
    found = proven(fake, tmp_path, monkeypatch, ("same",))
    assert any("of 10 are REGRESSION" in one and one.startswith("same: ") for one in found)


def test_time_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Launches end with as many of both sides, the later stages take place, and what that leaves unknown is red."""
    fake = Fake({"slower": {"candidate": 1.12}})
    found = proven(fake, tmp_path, monkeypatch, prove.STAGES, seconds=20.0)
    assert "no more launches: 2 of 24 were made" in capsys.readouterr().out
    launched = json.loads((tmp_path / "launches.json").read_text())["launches"]
    assert {side: len(cases[CASES[0]]) for side, cases in launched.items()} == {"same": 1, "slower": 1}
    assert f"same: {CASES[0]} has 1 launches beside 1, expected 11" in found
    assert "PASS / REGRESSION" in prove.table_of(tmp_path)[1]


def test_time_is_kept_for_the_stages_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that take a second each, and 60 of them: all 24 where only the verdicts come after."""
    fake, now = Fake({"slower": {"candidate": 1.12}}), [0.0]
    start = fake.start

    def slowly(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        now[0] += 1.0
        return start(kind, cases, tree)

    fake.start = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(prove, "time", argparse.Namespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(prove, "judge_times", lambda out, measured: [str(measured.made("same"))])
    assert proven(fake, tmp_path, monkeypatch, ("same", "slower"), seconds=60.0) == ["12"]
    assert fake.started == 24
    now[0] = 0.0
    assert proven(fake, tmp_path, monkeypatch, prove.STAGES, seconds=60.0)[-1] == "8"


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its configurations and launches: what is missing is launched, the survey is not made again."""
    first, again = Fake({"slower": {"candidate": 1.12}}), Fake({"slower": {"candidate": 1.12}})
    stages = ("same", "slower")
    monkeypatch.setattr(prove, "judge_times", lambda out, measured: ["few"] if measured.made("slower") < 12 else [])
    assert proven(first, tmp_path, monkeypatch, stages, seconds=20.0)
    assert first.started == 3  # one was under way
    assert proven(again, tmp_path, monkeypatch, stages, surveyed=lambda *given: 1 / 0, resume=True) == []
    assert again.started == 22
    launched = json.loads((tmp_path / "launches.json").read_text())["launches"]
    assert {side: len(cases[CASES[0]]) for side, cases in launched.items()} == {"same": 12, "slower": 12}
    assert proven(again, tmp_path, monkeypatch, stages, resume=True) == []
    assert again.started == 22
    again.slower = {"probe": {"candidate": 1.9, "reference": 1.8, "probe": 2.1}}
    assert proven(again, tmp_path, monkeypatch, ("probe", "sync"), resume=True) == []
    assert again.started == 22 + 3 + 2
    assert proven(again, tmp_path, monkeypatch, stages) == []
    assert again.started == 27 + 24


def test_only_launches_of_this_code_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prove, "execute", lambda *given: [])
    (tmp_path / "launches.json").write_text(json.dumps({"code": prove.code()}))
    assert prove.main(["--out", str(tmp_path), "--resume"]) == 0
    (tmp_path / "launches.json").write_text(json.dumps({"code": "another"}))
    assert prove.main(["--out", str(tmp_path), "--resume"]) == 2
    assert "is of other code" in capsys.readouterr().err


HERE = {
    "same": (MACHINE, 0),
    "container": ({**MACHINE, "host": "node-1-again"}, 0),
    "other-gpu": ({**MACHINE, "uuid": "4-5-6"}, 2),
    "other-kind": ({**MACHINE, "device": "NVIDIA H100"}, 2),
    "no-uuid": ({**MACHINE, "uuid": ""}, 0),
    "no-uuid-other-host": ({**MACHINE, "host": "node-2", "uuid": ""}, 2),
}


@pytest.mark.parametrize(("here", "ended"), HERE.values(), ids=HERE)
def test_only_launches_of_this_gpu_go_on(
    here: dict[str, str],
    ended: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pairs of two GPUs are no pairs; by its UUID a GPU is the same one in every container."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prove, "execute", lambda *given: [])
    monkeypatch.setattr(prove, "machine", lambda: here)
    (tmp_path / "launches.json").write_text(json.dumps({"code": prove.code(), "machine": MACHINE}))
    assert prove.main(["--out", str(tmp_path), "--resume"]) == ended
    told = capsys.readouterr().err
    assert ("was measured on NVIDIA H200 1-2-3 in node-1; expected launches of" in told) == (ended == 2)


def test_a_proof_names_its_gpu_as_a_launch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = argparse.Namespace(name="NVIDIA H200", uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: properties)
    assert prove.machine() == {**MACHINE, "host": prove.host.node()}


def test_caches_are_kept_beside_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary folder, for --resume; where the environment says so, there; and DIR is absolute."""
    for name in (processes.TRITON, processes.INDUCTOR):
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[Any] = []
    monkeypatch.setattr(prove, "execute", lambda *told: given.append(told[0]) or [])
    assert prove.main(["--out", "proof"]) == 0
    assert given == [tmp_path / "proof"]
    kept = tmp_path / "temporary" / f"fp8ci-prove-{os.getuid()}"
    assert os.environ[processes.TRITON] == str(kept / "triton")
    assert os.environ[processes.INDUCTOR] == str(kept / "inductor")
    monkeypatch.setenv(processes.TRITON, "/mine")
    assert prove.main(["--out", "proof"]) == 0
    assert os.environ[processes.TRITON] == "/mine"


def test_an_error_that_was_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that lost a row is red; to a run that goes on it is a note, also when that is judged again."""
    fake = Fake({"slower": {"candidate": 1.12}})
    start = fake.start

    def once(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        done = start(kind, cases, tree)
        if fake.started == 5:
            done.document |= {"rows": {}, "errors": {CASES[0]: "the launch ended with SIGKILL before this row"}}
        return done

    fake.start = once  # type: ignore[method-assign]
    lost = f"same: {CASES[0]}: the launch ended with SIGKILL before this row"
    assert proven(fake, tmp_path, monkeypatch, ("same", "slower")) == [lost]
    assert prove.main(["--out", str(tmp_path), "--again"]) == 1
    assert proven(fake, tmp_path, monkeypatch, ("sync",), resume=True) == []
    assert fake.started == 24 + 2  # and the eleven that are left are enough
    assert prove.main(["--out", str(tmp_path), "--again"]) == 0
    capsys.readouterr()
    assert proven(fake, tmp_path, monkeypatch, ("same", "slower"), resume=True) == []
    assert fake.started == 24 + 2 + 1
    assert f"of an earlier run, launched again since: {lost}" in capsys.readouterr().out
    assert prove.main(["--out", str(tmp_path), "--again"]) == 0
    assert lost in capsys.readouterr().out


def test_an_error_that_was_not_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on and loses the same row again has too few launches, and says why."""
    fake = Fake({})
    start = fake.start

    def broken(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        done = start(kind, cases, tree)
        if fake.started > 3:
            del done.document["rows"][CASES[1]]
            done.document["errors"] = {CASES[1]: "OutOfMemoryError"}
        return done

    fake.start = broken  # type: ignore[method-assign]
    assert proven(fake, tmp_path, monkeypatch, ("same",), 2)
    found = proven(fake, tmp_path, monkeypatch, ("same",), 2, resume=True)
    assert found[0] == f"same: {CASES[1]}: OutOfMemoryError"
    assert f"same: {CASES[1]} has 3 launches beside 3, expected 11" in found


def test_launches_that_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is exit 1, in words of its own: the verdicts hold."""
    fake = Fake({"slower": {"candidate": 1.12}})
    start = fake.start

    def slowly(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        done = start(kind, cases, tree)
        done.document["seconds"] = 13.0
        return done

    fake.start = slowly  # type: ignore[method-assign]
    late = [f"too long: a launch of {side} takes 13.0 s, expected 12 s at most" for side in ("same", "slower")]
    assert proven(fake, tmp_path, monkeypatch, ("same", "slower")) == late
    capsys.readouterr()
    assert prove.main(["--out", str(tmp_path), "--again"]) == 1
    told = capsys.readouterr().out
    assert told.splitlines()[-3:] == [*late, "the gate of speed holds here, but its launches take too long"]
    assert "does not hold" not in told


def test_the_commands_of_a_whole_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its command line: two stages within a time, the others after them, and judged again; only results in DIR."""
    fake = Fake({"slower": {"candidate": 1.12}, "probe": {"candidate": 1.9, "reference": 1.8, "probe": 2.1}})
    faked(fake, monkeypatch)
    there = argparse.Namespace(**{**vars(torch), "cuda": argparse.Namespace(is_available=lambda: True)})
    monkeypatch.setattr(prove, "torch", there)
    monkeypatch.setattr(prove, "machine", lambda: MACHINE)
    monkeypatch.chdir(tmp_path)
    assert prove.main(["--out", "proof", "--stage", "same", "--stage", "slower", "--seconds", "900"]) == 0
    assert fake.started == 24
    assert prove.main(["--out", "proof", "--resume", "--stage", "probe", "--stage", "sync", "--seconds", "900"]) == 0
    assert fake.started == 24 + 3 + 2
    monkeypatch.setattr(prove, "torch", torch)
    assert prove.main(["--out", "proof", "--again"]) == 0
    told = capsys.readouterr().out
    assert told.count("the gate of speed holds here\n") == 3
    assert prove.table_of(tmp_path / "proof")[1].split()[-2:] == ["/", "REGRESSION"]
    assert {path.name for path in (tmp_path / "proof").iterdir()} == {
        prove.VERDICTS, prove.CONFIGURATIONS, "launches.json", *(f"{stage}.json" for stage in prove.STAGES),
    }  # fmt: skip


def test_launches_that_measure_nothing_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that no fork can use: said after the first launch, with what to try."""
    fake = Fake({})

    def broken(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        fake.started += 1
        return Done({"rows": {}, "errors": dict.fromkeys(cases, "the launch ended with 4: no device")})

    fake.start = broken  # type: ignore[method-assign]
    found = proven(fake, tmp_path, monkeypatch, ("same", "slower"))
    assert f"the first launch measured nothing: same: {CASES[0]}: the launch ended with 4: no device; " in found[0]
    assert "FP8CI_PERF_FRESH=1" in found[0]
    assert fake.started == 2
    monkeypatch.setattr(prove, "judge_times", lambda out, measured: measured.errors)
    assert proven(Fake({}), tmp_path, monkeypatch, ("same",), resume=True) == []


def test_most_tries_of_the_same_must_say_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds its clocks down all the time has no false alarm, and proves nothing."""
    fake = Fake({})
    start = fake.start

    def hot(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        done = start(kind, cases, tree)
        done.document["rows"][CASES[0]]["throttled"] = [True] * 10
        return done

    fake.start = hot  # type: ignore[method-assign]
    assert proven(fake, tmp_path, monkeypatch, ("same",)) == [
        f"same: {CASES[0]}, {how}: only 0 of 10 are PASS: 10 INCONCLUSIVE" for how in ("recorded", "pairs")
    ]


def test_a_copy_loop_that_nobody_feels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PASS of every row beside it: it was not there."""
    assert proven(Fake({}), tmp_path, monkeypatch, ("probe",)) == [
        "probe: the copy loop has moved no row: expected one at least that is INCONCLUSIVE or INFRA"
    ]


def test_a_row_that_no_launch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed by name, also where nothing said why."""
    fake = Fake({"probe": {"candidate": 1.9, "reference": 1.8, "probe": 2.1}})
    start = fake.start
    fake.start = lambda kind, cases, tree: start(kind, cases[:1], tree)  # type: ignore[method-assign]
    assert proven(fake, tmp_path, monkeypatch, ("same", "probe"), 2) == [
        f"probe: {CASES[1]} has no launch", f"same: {CASES[1]} was not launched",
    ]  # fmt: skip


def test_a_probe_that_is_cut_off_keeps_its_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake({})
    start = fake.start

    def ends(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        if fake.beside and (tmp_path / "probe.json").exists():
            raise KeyboardInterrupt
        return start(kind, cases, tree)

    fake.start = ends  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        proven(fake, tmp_path, monkeypatch, ("probe",))
    assert len(json.loads((tmp_path / "probe.json").read_text())["launches"]["probe"][CASES[0]]) == 1


def test_a_stage_that_dies_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> list[str]:
        raise RuntimeError("the copy loop did not start")

    monkeypatch.setattr(prove, "prove_probe", broken)
    found = proven(Fake({}), tmp_path, monkeypatch, ("same", "probe", "sync"))
    assert found == ["probe: RuntimeError: the copy loop did not start"]
    assert (tmp_path / "sync.json").exists()


CHECK = """
import torch
from suites.perf import grouped_gemm, moe, prove, sweep

class OnCpu:
    def __getattr__(self, name):
        return getattr(torch, name)
    def device(self, *given):
        return torch.device("cpu")

def product(given):
    found, first = [], 0
    for group, last in enumerate(given.offs.tolist()):
        a = given.a[first:last].float() * given.inverse_a[first:last].reshape(-1, 1)
        found.append(a @ (given.b[group].float() * given.inverse_b[group].reshape(1, -1)))
        first = last
    return torch.cat(found).bfloat16()

prove.torch = sweep.torch = OnCpu()
torch.cuda.current_device = lambda: 0
torch.compile = lambda module, **options: module
prove.OPS = {"rowwise": (64, 7168), "colwise": (64, 64, 32), "experts": (2, 16, 7168)}
prove.SHORT, prove.GEMM, prove.LINEAR = ("rowwise", (32, 2048)), ((2, 64, 256, 128), "forward"), ((64, 128), "rowwise")
moe.TOKENS = 32
grouped_gemm.torch_fp8 = product
print(prove.check("e4m3fn"))
grouped_gemm.torch_fp8 = lambda given: 2 * product(given)
print(prove.check("e4m3fn")[0])
"""


def test_the_check_runs_small() -> None:
    """In the interpreter, with the product of the quantised operands in torch's place: right, and wrong where it is."""
    env = {**os.environ, "PYTHONPATH": str(processes.ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    right, wrong = done.stdout.splitlines()
    assert right == "[]"
    assert wrong == "grouped product: SQNR 6.0 dB against torch; expected at least 40.0"


def test_a_survey_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a slower kernel the other stages take place, and the run does not hold."""

    def broken(fmt: str, platform: str, slower: bool) -> Any:
        raise RuntimeError("out of memory")

    found = proven(Fake({}), tmp_path, monkeypatch, prove.STAGES, surveyed=broken)
    assert found[:2] == ["survey: RuntimeError: out of memory", "slower: no slower configuration was found"]
    assert {path.name for path in tmp_path.glob("*.json")} >= {"same.json", "probe.json", "sync.json"}
    assert not (tmp_path / "slower.json").exists()


def test_what_cannot_be_judged_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side whose samples are no measurement, of an unchanged checkout or of a slower one."""
    fake = Fake({})
    start = fake.start

    def nan(kind: str, cases: Sequence[str], tree: str | None) -> Any:
        done = start(kind, cases, tree)
        done.document["rows"][CASES[0]]["candidate"][0] = math.nan
        return done

    fake.start = nan  # type: ignore[method-assign]
    found = proven(fake, tmp_path, monkeypatch, ("same", "slower"))
    assert any(one.startswith(f"same: {CASES[0]}, pairs: 10 of 10 are FAIL") for one in found)
    assert f"slower: {CASES[0]}, pairs: only 0 of 10 are REGRESSION" in found


def test_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run that was cut off has left is judged anywhere."""
    assert proven(Fake({"slower": {"candidate": 1.12}}), tmp_path, monkeypatch, ("same", "slower")) == []
    before = prove.table_of(tmp_path)
    (tmp_path / prove.VERDICTS).unlink()
    capsys.readouterr()
    assert prove.main(["--out", str(tmp_path), "--again"]) == 0
    assert prove.table_of(tmp_path) == before
    assert before[1] in capsys.readouterr().out


def test_configurations_come_from_the_recorded_sweeps() -> None:
    """Those that were slower by about 10 %, as the table takes them; none for a platform without a sweep."""
    for op, shape in [("rowwise", prove.OPS["rowwise"]), ("colwise", prove.OPS["colwise"]), prove.SHORT]:
        found = prove.recorded(op, shape, "h200")
        assert 3 <= len(found) <= prove.TRIED
        assert all(sweep.SPACES[op].make(**config, measured="") for config in found)
    assert prove.recorded("grouped_gemm", prove.GEMM[0], "h200")
    assert prove.recorded("rowwise", prove.OPS["rowwise"], "mi350x") == []


@pytest.mark.parametrize("fmt", ["e4m3fn", "e4m3fnuz"])
def test_the_short_table_of_speed_is_these_rows(fmt: str) -> None:
    """What a pull request times is what the proof is of."""
    chosen = {f"perf/test_speed::test_time[{row.case}]" for row in prove.chosen(fmt)}
    every = [f"perf/test_speed::test_time[{row.case}]" for row in (*rows.rows(fmt), *rows.trainers(fmt))]
    assert {one for one in every if manifest.case_matches(one, platforms.SHORT_SPEED)} == chosen


def test_the_least_slower_one_is_taken() -> None:
    assert prove._least({1: 1.05, 2: 1.2, 3: 1.11}) == 3
    assert prove._least({1: 1.05, 2: 1.02}) == 1
    assert prove._least({}) is None


def test_what_is_not_slower_enough_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without a configuration that is 10 % slower stays as it is; why is beside its red tries."""
    config = prove.recorded("rowwise", prove.OPS["rowwise"], "h200")[0]

    def found(rowwise: float | None, colwise: float) -> Callable[..., Any]:
        def made(factor: float) -> prove.Slower:
            return prove.Slower("fp8stack.kernels.rowwise", "ROWWISE_CONFIGS", ("sm_90", "k"), "R", config, factor)

        slow = {"rowwise, experts": None if rowwise is None else made(rowwise), "colwise": made(colwise)}
        return lambda fmt, platform, slower: ([], slow)

    fake = Fake({})
    told = proven(fake, tmp_path, monkeypatch, ("slower",), surveyed=found(1.08, 1.1))
    assert [one for one in told if one.startswith("slower: ")] == [
        f"slower: {CASES[0]}, {how}: only 0 of 10 are REGRESSION; nothing slower was found, at best 1.080x, "
        "expected 1.10x" for how in ("recorded", "pairs")
    ]  # fmt: skip
    started = fake.started
    told = proven(fake, tmp_path, monkeypatch, ("slower",), surveyed=found(None, 1.09))
    assert [one for one in told if one.startswith("slower: ")] == [
        "slower: no slower configuration was found: rowwise: nothing slower was found, no configuration could be "
        "timed, expected 1.10x; experts: nothing slower was found, no configuration could be timed, expected 1.10x; "
        "colwise: nothing slower was found, at best 1.090x, expected 1.10x"
    ]
    assert fake.started == started + 12  # of this checkout alone


def test_copies_that_are_worse(tmp_path: Path) -> None:
    """A copy imports by itself, with another row in its table, or with an op that waits."""
    config = prove.recorded("rowwise", prove.OPS["rowwise"], "h200")[0]
    space = sweep.SPACES["rowwise"]
    slow = prove.Slower(space.module.__name__, space.table, ("sm_90", "k<=8192"), "RowwiseConfig", config, 1.1)
    added = prove.lines_of({"rowwise": slow, "colwise": None})
    added[prove.SYNC_MODULE] += prove.SYNC
    tree = prove.worse_tree(tmp_path / "worse", added)
    code = (
        "import torch\nfrom fp8stack.kernels import rowwise\n"
        "print(rowwise.__file__)\nprint(rowwise.ROWWISE_CONFIGS['sm_90', 'k<=8192'].measured)\n"
        "rowwise._launched = lambda *given: given\ntorch.cuda.synchronize = lambda: print('waited')\n"
        "print(rowwise.launch_rowwise(1))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        str(tree / "fp8stack" / "kernels" / "rowwise.py"), "slower, on purpose", "waited", "(1,)",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="proves for real on a GPU")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["--out", str(tmp_path)]) == 4
    assert "no GPU is visible" in capsys.readouterr().err


RECORDED = processes.ROOT / "baselines" / "h200" / "prove.json"
"""Launches of an H200: of this product, of slower kernels, beside a copy loop, and counts."""


def recorded(kind: str, part: str) -> prove.Measured:
    """One part of that file, as launches of this process would have left it."""
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    measured = prove.Measured(prove.chosen("e4m3fn"), kind)
    measured.of = msgspec.convert(
        {
            side: {case: [{**one, "number": n} for n, one in enumerate(some, 1)] for case, some in cases.items()}
            for side, cases in document[part].items()
        },
        dict[str, dict[str, list[Launch]]],
    )
    measured.seconds, measured.resolution_ns = document["seconds_a_launch"], document["resolution_ns"]
    return measured


def test_the_recorded_proof(tmp_path: Path) -> None:
    """Of twelve launches of each side, judged anew: ten tries of the same commit give no REGRESSION, all ten of each
    kernel with a launch configuration that is 10 to 15 % slower do, as recorded runs and as pairs.
    """
    assert prove.judge_times(tmp_path, recorded("time", "launches")) == []
    for side, verdict, count in (("same", "PASS", 6), ("slower", "REGRESSION", 5)):
        told = json.loads((tmp_path / f"{side}.json").read_text(encoding="utf-8"))
        assert len(told) == count
        for case, found in told.items():
            for how in ("recorded", "pairs"):
                assert [one["verdict"] for one in found[how]] == [verdict] * prove.TRIES, (side, case, how)


def test_the_recorded_copy_loop() -> None:
    """A neighbour that copies makes every row INCONCLUSIVE by its probe, not one a REGRESSION."""
    measured = recorded("time", "beside_a_copy_loop")
    assert len(measured.of["probe"]) == 6
    for case, launched in measured.of["probe"].items():
        found = speed.judge(measured.samples(case, prove.numbered(launched)), prove._runs(measured, case))
        assert (found.verdict, found.cause) == (Verdict.INCONCLUSIVE, "probe"), case


def test_the_recorded_wait() -> None:
    """One host synchronisation more than a row allows is a REGRESSION by its count, without a time."""
    measured = recorded("counts", "counts")
    (case,) = measured.of["sync"]
    verdicts = [speed.judge(measured.samples(case, measured.of[side][case])).verdict for side in ("same", "sync")]
    assert verdicts == [Verdict.UNCALIBRATED, Verdict.REGRESSION]
