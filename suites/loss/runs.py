"""Runs of one configuration in one process: as configured and nudged, after one compile.

A band needs several runs of a curve (harness/bands.py). Compiling a model takes longer than training it for 100 steps,
so on a GPU all of them come from one trainer. Before each run the trainer's state is put back to the copy that was
taken before the first step: all that a step depends on, by `Trainer.state`. The bits are those of a trainer made anew
(suites/unit/test_loss_runs.py).

FP8STACK_NUDGE=i    the curve is that of the i-th harmlessly changed run, for recording one run a process (CPU)
FP8STACK_NUDGES=N   after the curve as configured, runs 1 to N follow, into losses/nudged/ (`fp8ci baseline record`)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

import torch

from fp8stack.config import TrainConfig
from fp8stack.metrics import drain
from fp8stack.train import Result, StepRecord, Trainer, nudge_weights
from harness import bands

NUDGE, NUDGES = "FP8STACK_NUDGE", "FP8STACK_NUDGES"


class Runs:
    """A trainer that can start again. `config` without its nudge: which one is said for each run."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = dataclasses.replace(config, nudge=0)
        self.trainer = Trainer(self.config)
        self._start = {name: value.clone() for name, value in self.trainer.state().items()}

    def run(
        self, nudge: int = 0, steps: int | None = None, on_step: Callable[[StepRecord], None] | None = None
    ) -> Result:
        """One run from the initial weights; `steps` in place of the configuration's."""
        trainer = self.trainer
        with torch.no_grad():
            for name, value in trainer.state().items():
                value.copy_(self._start[name])
        for moments in trainer.optimiser.state.values():  # the state has one for all
            moments["step"].zero_()
        if trainer.counters:
            drain(list(trainer.counters.values()))  # what a run that was stopped has left
        trainer.step = 0
        trainer.config = dataclasses.replace(self.config, nudge=nudge, steps=steps or self.config.steps)
        nudge_weights(trainer.model, nudge)
        return trainer.run(on_step)


def curve_of(result: Result) -> bands.Curve:
    """A run as the loss gate sees it."""
    return bands.Curve(
        loss={record.step: record.loss for record in result.steps},
        grad_norm={record.step: record.grad_norm for record in result.steps},
        saturated={record.step: record.saturated or 0 for record in result.steps},
        nan={record.step: record.nan or 0 for record in result.steps},
        digests={int(step): parameters for step, parameters in result.digests.items()},
    )


def asked(name: str, environment: Mapping[str, str] = os.environ) -> int:
    """The whole number that an environment variable holds; 0 without it. ValueError for anything else."""
    text = environment.get(name, "0")
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r}; expected a whole number from 0; unset it for the run as configured")
    return int(text)
