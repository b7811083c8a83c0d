"""The rows of the night: they exist in a full run and in no other, and their bodies see what they are there for."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8stack.config import TrainConfig
from fp8stack.device import OVERRIDE
from fp8stack.train import Result, run
from harness import bands, baselines
from suites.conftest import Evidence
from suites.loss import test_full as full
from suites.loss import test_ranks
from suites.loss.test_loss import CURVES, LEARNT_BY, configuration
from suites.unit import ranks

ROOT = Path(__file__).resolve().parents[2]
RECORDED = baselines.load_loss(ROOT / "baselines/cpu/loss.json", "cpu")
FOLDER, FILE = "suites/loss", "suites/loss/test_full.py"
OTHERS = [
    f"--ignore={path.relative_to(ROOT)}" for path in (ROOT / FOLDER).glob("test_*.py") if path.name != "test_full.py"
]
FEW = 4
CASE = "llama3-tiny-rowwise_with_gw_hp-e4m3fn"


class Told(dict[str, object]):
    """record_property, as a dictionary."""

    def __call__(self, name: str, value: object) -> None:
        self[name] = value


@pytest.fixture(autouse=True)
def _few_steps_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEARNT_BY, "llama3-tiny", 9.0)


def known(case: str) -> list[bands.Recorded]:
    """The recorded runs of a curve and of bf16 of the same model, bf16 first."""
    found = []
    for name in (f"{CURVES[case][0]}-bf16", case):
        runs = RECORDED.of_case(name)
        reference = baselines.reference_run(runs)
        assert reference is not None
        found.append(bands.recorded(reference, runs))
    return found


def drifted(result: Result, first: int) -> Result:
    """The run with losses from a step on 1 % higher."""
    steps = [dataclasses.replace(one, loss=1.01 * one.loss) if one.step >= first else one for one in result.steps]
    return dataclasses.replace(result, steps=steps)


def risen(curve: bands.Curve, first: int, factor: float = 1.01) -> bands.Curve:
    """The curve with its losses from a step on multiplied."""
    return dataclasses.replace(
        curve, loss={step: loss * (factor if step >= first else 1.0) for step, loss in curve.loss.items()}
    )


def collected(full_run: str | None) -> tuple[int, set[str]]:
    """pytest's exit code, and what it finds in the folder beside the other files, with FP8CI_FULL as given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FP8CI_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER, *OTHERS, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**environment, **({} if full_run is None else {"FP8CI_FULL": full_run})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, {line.removeprefix(f"{FILE}::") for line in done.stdout.splitlines() if "::" in line}


def test_rows_of_the_night() -> None:
    """In a full run: what CURVES leaves out, two ranks, 1,000 steps. In any other they do not exist."""
    assert collected(None) == collected("0") == (5, set())  # nothing was collected
    curves = {f"test_full_curve[{case}]" for case in full.NIGHT}
    assert len(curves) == 6
    assert not full.NIGHT.keys() & CURVES.keys()
    assert {*full.PRODUCT, *(case for case in CURVES if case.endswith("bf16"))} == {*CURVES, *full.NIGHT}
    others = {f"test_full_ranks[{case}-2-ranks]" for case in full.RANKS}
    others |= {f"test_long_curve[llama3-debug-{recipe}-1000-steps]" for recipe in full.LONG}
    assert collected("1") == (0, curves | others)


def test_beside_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps of a curve that no run records stay beside the recorded bf16; 1 % higher at the end they do not.

    File and numbers are left.
    """
    model, recipe, arch, fmt = full.NIGHT[CASE]
    monkeypatch.setenv(OVERRIDE, arch)
    config, told = configuration(model=model, recipe=recipe), Told()
    result = full.beside_recorded(CASE, config, fmt, Evidence(tmp_path), told, FEW)
    assert (result.format, len(result.steps)) == (fmt, FEW)
    written = baselines.read_loss_evidence(tmp_path / str(told["curve_file"]))
    assert (written.case, written.recipe, len(written.steps)) == (CASE, recipe, FEW)
    assert "loss_file" not in told  # the gate has no baseline for it
    assert str(told["paired_window"]).startswith(f"steps 1-{FEW}: ")
    assert str(told["paired_tail"]).startswith(f"mean of the last {FEW}: ")
    monkeypatch.setattr(full, "_trained", lambda *_: drifted(result, FEW // 2 + 1))
    with pytest.raises(AssertionError, match=f"paired: FP8 against bf16, mean log ratio of the loss in steps 1-{FEW}"):
        full.beside_recorded(CASE, config, fmt, Evidence(tmp_path), told, FEW)


@pytest.mark.parametrize("missing", ["llama3-tiny-bf16", "llama3-tiny-rowwise-e4m3fn"], ids=["no-bf16", "no-rowwise"])
def test_without_what_is_recorded_it_is_red(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve that has nothing to be held against is no pass, and is not even trained."""
    folder = tmp_path / "baselines/cpu"
    folder.mkdir(parents=True)
    rows = [row for row in RECORDED.rows if row.case != missing]
    (folder / "loss.json").write_text(baselines.encode_loss("cpu", rows), encoding="ascii")
    monkeypatch.setattr(test_ranks, "ROOT", tmp_path)
    monkeypatch.setattr(full, "_trained", lambda *_: pytest.fail("it was trained"))
    model, recipe, _, fmt = full.NIGHT[CASE]
    config = configuration(model=model, recipe=recipe)
    with pytest.raises(AssertionError, match=f"no run 0 of {missing} with config .* record it on one rank"):
        full.beside_recorded(CASE, config, fmt, Evidence(tmp_path), Told())
    (folder / "loss.json").unlink()
    with pytest.raises(AssertionError, match=r"baselines/cpu/loss\.json is not there"):
        full.beside_recorded(CASE, config, fmt, Evidence(tmp_path), Told())


@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in CURVES if not case.endswith("bf16")])
def test_recorded_curves_beside_bf16(case: str) -> None:
    """Every recorded FP8 curve is green beside bf16, and red when its last 20 steps are 1 % off."""
    (bf16, _, _), (fp8, _, _) = pair = known(case)
    told = Told()
    full.assert_beside(fp8, bf16, pair, told)
    assert {"paired_window", "paired_tail"} <= told.keys()
    for factor in (0.99, 1.01):
        with pytest.raises(AssertionError, match="mean log ratio of the loss in steps 81-100"):
            full.assert_beside(risen(fp8, 81, factor), bf16, pair, Told())


def test_a_hole_in_a_curve_is_red() -> None:
    """NaN in one window: that window is the one which is told, and the row fails."""
    case = "llama3-tiny-rowwise-e4m3fnuz"
    (bf16, _, _), (fp8, _, _) = pair = known(case)
    told = Told()
    with pytest.raises(AssertionError, match="in steps 41-60"):
        full.assert_beside(risen(fp8, 41, float("nan")), bf16, pair, told)
    assert str(told["paired_window"]).startswith("steps 41-60: nan of")


LONG_STEPS = 30
SMALL = TrainConfig(model="llama3-tiny", steps=LONG_STEPS, batch=2, seq=16, layers=1, device="cpu")


@pytest.fixture(scope="module")
def small_bf16() -> Result:
    """bf16, as the night trains it once."""
    return run(SMALL)


def test_beside(small_bf16: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 beside bf16 of the same process, over every window of 20 steps: green, and both files are left."""
    monkeypatch.setenv(OVERRIDE, "gfx942")
    told = Told()
    config = dataclasses.replace(SMALL, recipe="rowwise")
    result = full.beside(small_bf16, config, Evidence(tmp_path), told)
    assert (result.format, len(result.steps)) == ("e4m3fnuz", LONG_STEPS)
    for recipe in ("bf16", "rowwise"):
        assert baselines.read_loss_evidence(tmp_path / f"losses/long/llama3-tiny-{recipe}.json").recipe == recipe
    assert told["curve_file"] == "losses/long/llama3-tiny-rowwise.json"
    assert "loss_file" not in told


@pytest.mark.parametrize(("recipe", "first", "window"), [("rowwise", 21, "21-30"), ("bf16", 1, "1-20")])
def test_beside_a_drift_is_red(
    recipe: str, first: int, window: str, small_bf16: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 % in late steps of FP8, or in all of bf16: red, with the window."""
    plain = drifted(small_bf16, first) if recipe == "bf16" else small_bf16
    other = small_bf16 if recipe == "bf16" else drifted(small_bf16, first)
    monkeypatch.setattr(full, "_trained", lambda *_: other)
    with pytest.raises(AssertionError, match=f"mean log ratio of the loss in steps {window}: .* against 2.00e-03"):
        full.beside(plain, dataclasses.replace(SMALL, recipe="rowwise"), Evidence(tmp_path), Told())


def test_beside_a_short_run_is_red(small_bf16: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of bf16 that ended early cannot stand for the night's."""
    short = dataclasses.replace(small_bf16, steps=small_bf16.steps[:-1])
    monkeypatch.setattr(full, "_trained", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(AssertionError):
        full.beside(short, dataclasses.replace(SMALL, recipe="rowwise"), Evidence(tmp_path), Told())


def test_ranks_have_the_callers_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked from a server that keeps the environment of its start; the arch is that of the call."""
    for arch in ("gfx950", "gfx942"):
        monkeypatch.setenv(OVERRIDE, arch)
        assert ranks.run_ranks(ranks.variable, OVERRIDE, ranks=1) == [arch]
    monkeypatch.delenv(OVERRIDE)
    assert ranks.run_ranks(ranks.variable, OVERRIDE, ranks=1) == [None]


def test_two_ranks_that_differ_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks train and report one curve; a number of one rank alone is red."""
    monkeypatch.setenv(OVERRIDE, "gfx942")
    few = dataclasses.replace(full.RANKS["llama3-tiny-rowwise-e4m3fnuz"], steps=2, batch=2, seq=16, layers=1)
    result = full.trained_by_two("few", few, Evidence(tmp_path), Told())
    assert (result.arch, result.format, len(result.steps)) == ("gfx942", "e4m3fnuz", 2)
    reports = [one.loss_file("few") for one in (result, drifted(result, 2))]
    monkeypatch.setattr(ranks, "run_ranks", lambda *_: reports)
    with pytest.raises(AssertionError, match="ranks: they report different numbers"):
        full.trained_by_two("few", few, Evidence(tmp_path), Told())
