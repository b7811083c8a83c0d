"""Runs of one curve in one process have the bits of trainers made anew, and are recorded as rows of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fp8stack.config import TrainConfig
from fp8stack.device import OVERRIDE
from fp8stack.train import Trainer
from harness import baselines
from suites.loss import harmless
from suites.loss.runs import Runs, asked

ROOT = Path(__file__).resolve().parents[2]

SHORT = TrainConfig(model="llama3-tiny", recipe="rowwise", steps=2, batch=2, seq=16, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SHORT, id="dense"),
        pytest.param(dataclasses.replace(SHORT, model="dsv3-tiny", layers=2, balance_rate=0.5), id="experts"),
        pytest.param(dataclasses.replace(SHORT, layers=1, compile="aot_eager"), id="compiled"),
    ],
)
def test_runs_have_the_bits_of_new_trainers(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nudge 2, then as configured, from one trainer: losses, norms, counts and digests of two trainers."""
    monkeypatch.setenv(OVERRIDE, "gfx942")
    runs = Runs(config)
    graphs = []
    for nudge in (2, 0):
        found = runs.run(nudge)
        graphs.append(runs.trainer.compiler.graphs if runs.trainer.compiler else 0)
        # Not compiled again: compiled blocks have the bits of eager ones (test_parallel.py).
        expected = Trainer(dataclasses.replace(config, nudge=nudge, compile="none")).run()
        assert found.steps == expected.steps
        assert found.digests == expected.digests
        assert found.config == dataclasses.replace(config, nudge=nudge)
    assert len(set(graphs)) == 1, f"graphs after each run: {graphs}; expected one compile for all"


def test_a_run_that_was_stopped_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends in the middle of a step, with codes counted and moments moved, changes no later one."""
    monkeypatch.setenv(OVERRIDE, "gfx942")
    runs = Runs(SHORT)
    expected = runs.run()
    read = runs.trainer._read

    def stop(loss: object) -> None:
        raise RuntimeError("in mid-step")

    runs.trainer._read = stop  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="in mid-step"):
        runs.run(1)
    runs.trainer._read = read  # type: ignore[method-assign]
    found = runs.run()
    assert (found.steps, found.digests) == (expected.steps, expected.digests)


@pytest.mark.parametrize(("text", "number"), [(None, 0), ("0", 0), ("12", 12)])
def test_what_the_environment_asks_for(text: str | None, number: int) -> None:
    """Nothing is 0."""
    assert asked("FP8STACK_NUDGE", {} if text is None else {"FP8STACK_NUDGE": text}) == number


@pytest.mark.parametrize("text", ["", "-1", "two", "1.5"])
def test_what_the_environment_cannot_mean(text: str) -> None:
    """A mistyped nudge would be recorded as run 0."""
    with pytest.raises(ValueError, match=r"FP8STACK_NUDGES is .*; expected a whole number from 0; unset it"):
        asked("FP8STACK_NUDGES", {"FP8STACK_NUDGES": text})


def test_twenty_harmless_changes() -> None:
    """Twenty or more, each with a name of its own; no nudge among them is in the recorded band."""
    assert len({change.name for change in harmless.CHANGES}) == len(harmless.CHANGES) >= 20
    recorded = {row.nudge for row in baselines.load_loss(ROOT / "baselines/cpu/loss.json", "cpu").rows}
    assert recorded.isdisjoint(harmless.UNSEEN)


def test_a_harmless_change_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the names that do, and exit code 2: nothing run is no proof."""
    assert harmless.main(["threads=0"]) == 2
    assert "no change is called 'threads=0'; expected some of nudge=21" in capsys.readouterr().err
