"""Detection power: how small a drift of a recorded curve the bands still catch.

A band says what is allowed, window by window; a person wants to know what would be missed. So each recorded run 0 is
drifted, all along by a constant factor, or growing from nothing at the start to its full size at the last step, and the
smallest drift that turns the comparison red is found by bisection, to a hundredth of itself.

Not here: the bands (bands.py). Nor drifts of gradients alone, whose digests have limits of their own there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import bands, baselines
from harness.baselines import LossRun
from harness.platforms import Platform


@dataclass(frozen=True)
class Power:
    """The smallest drifts of one recorded curve that its bands catch, relative: all along, and growing to the end."""

    case: str
    constant: float
    growing: float

    @property
    def text(self) -> str:
        """One line."""
        told = f"smallest constant drift caught: {100 * self.constant:.2g} %"
        return f"{self.case}: {told}; growing from 0, {100 * self.growing:.2g} % at the last step"


def of_platform(root: Path, platform: Platform) -> tuple[Power, ...]:
    """The detection power of each curve in a checkout's loss baseline; none where there is no such file."""
    path = root / "baselines" / platform.id / baselines.LOSS_FILE
    rows = baselines.load_loss(path, platform.id).rows if path.exists() else []
    cases = dict.fromkeys(row.case for row in rows)
    found = (_of_case(case, [row for row in rows if row.case == case]) for case in cases)
    return tuple(power for power in found if power is not None)


def _of_case(case: str, rows: Sequence[LossRun]) -> Power | None:
    """None where there is no run 0: nothing is judged by such rows."""
    reference = baselines.reference_run(rows)
    if reference is None:
        return None
    curve = bands.Curve.of_run(reference)
    spread = [bands.Curve.of_run(row) for row in rows if row is not reference]
    nudged = bands.counted(reference, rows)

    def caught(growth: Callable[[int], float], drift: float) -> bool:
        loss = {step: value * (1 + drift * growth(step)) for step, value in curve.loss.items()}
        return not bands.compare(replace(curve, loss=loss), curve, spread, nudged).ok

    constant = smallest(lambda drift: caught(lambda step: 1.0, drift))
    return Power(case, constant, smallest(lambda drift: caught(lambda step: step / curve.last_step, drift)))


def smallest(caught: Callable[[float], bool]) -> float:
    """The smallest relative drift that is caught; infinite where doubling the loss is not."""
    low, high = 1e-9, 1.0
    if not caught(high):
        return math.inf
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high
