"""Two training runs side by side, for people: where their curves part, and which layer began it.

    python -m fp8stack.compare RUN_A RUN_B [--nudged RUN ...] [--unfused RUN]

A run is a folder that `train --out` wrote. Shown are both losses at a few steps; by window of steps the largest
relative difference beside the band, and the first step beyond the limit of a window that is outside; the ratio of
gradient norms a layer in the first steps, where a wrong factor shows before any curve does; saturated codes a layer.

The band, with `--nudged` runs of A's configuration (`train --nudge 1`, 2, ...): in each window K times the largest
relative difference of a nudged run to A, K = 10 below 5 runs, 5 below 10, else 3, and never below 5e-5. Each of them
must have every step of A. Without them, the limits between two formats on one machine: the mean of log(B / A) in each
20 steps at most 2e-3, the last 20 within 5e-3.

Speed is the median of tokens/s after the first 10 steps. With `--unfused`, a run with B's recipe and `--quantisation
unfused`, and A in bf16, the share of the gap that the kernels recover: (B - unfused) / (A - unfused) in tokens/s. 0: no
faster than a chain of plain operators; 1: as fast as bf16; beyond it: faster.

This is for reading. The gate of a CI is `fp8ci`, which judges against recorded baselines.
Exit codes: 0 inside the band, 1 outside, 2 a run that cannot be read.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8stack import command
from fp8stack.command import Parser

# First and last step of each window; the tail is the last 20 steps, whatever their number.
WINDOWS = ((1, 1), (2, 5), (6, 10), (11, 20), (21, 50), (51, 100))
FLOOR = 5e-5
PAIRED_WINDOW, PAIRED_TAIL = 2e-3, 5e-3
# A gradient norm that differs by more is marked: harmless changes stay below 3e-4 in the first step.
GRADIENT_MARK = 2e-3
# Steps that compile and warm up, and the share of the gap that was published for such kernels.
WARM_STEPS = 10
PUBLISHED_SHARE = "DeepSeek-V3 671B, 4 MoE layers, 8 x MI325X: 89 %"


class RunError(ValueError):
    """A folder that is no readable run. The message is one line: what, expected, what next."""


@dataclass(frozen=True)
class Run:
    """What a folder holds: losses, gradient norms and tokens a second by step, and run.json."""

    folder: Path
    loss: dict[int, float]
    grad_norm: dict[int, float]
    told: dict[str, Any]
    rate: dict[int, float] = field(default_factory=dict)

    @property
    def tokens_a_second(self) -> float | None:
        """The median after the first WARM_STEPS of the run, or None without such a step."""
        warm = [rate for step, rate in self.rate.items() if step >= min(self.rate) + WARM_STEPS]
        return statistics.median(warm) if warm else None


def read_run(folder: Path) -> Run:
    """Read a folder that train --out wrote; a line that a kill cut off is left out. Raises RunError."""
    loss, norm, rate = {}, {}, {}
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise ValueError("run.json holds no object")
        _check_by_step(told)
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                if number == len(lines):
                    break
                raise
            loss[int(record["step"])] = float(record["loss"])
            norm[int(record["step"])] = float(record["grad_norm"])
            if "tokens_a_second" in record:
                rate[int(record["step"])] = float(record["tokens_a_second"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RunError(
            f"{folder} cannot be read ({error}); expected a folder that train --out wrote; name one, or train again"
        ) from None
    if not loss:
        raise RunError(f"{folder} holds no step; expected a run of at least one; train longer")
    return Run(folder, loss, norm, told, rate)


def _check_by_step(told: dict[str, Any]) -> None:
    """Make nothing of a null by step and layer. ValueError where it is neither null nor numbers."""

    def numbers(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)

    for key, good in (("digests", numbers), ("saturated_by_layer", lambda value: isinstance(value, int))):
        if told.get(key) is None:
            told[key] = {}
        found = told[key]
        if not isinstance(found, dict) or not all(
            step.isdecimal() and isinstance(named, dict) and all(map(good, named.values()))
            for step, named in found.items()
        ):
            raise ValueError(f"{key} of run.json are no numbers by step and name")


@dataclass(frozen=True)
class Row:
    """One window: its difference, what is allowed, and the first of its steps whose own difference is beyond that."""

    window: str
    difference: float
    step: int | None
    allowed: float

    @property
    def inside(self) -> bool:
        """NaN is outside."""
        return self.difference <= self.allowed


def rows(a: Run, b: Run, nudged: list[Run]) -> list[Row]:
    """By window: the largest relative difference of B's loss to A's, beside the band. Only steps that both have.

    Raises RunError where there is none, and for a nudged run that gives no band in each step of A.
    """
    common = sorted(a.loss.keys() & b.loss.keys())
    if not common:
        raise RunError(
            f"{a.folder} and {b.folder} have no step in common; expected runs of the same steps; name others, or train "
            "one of them further"
        )
    _check_nudged(a, nudged)
    return _against_nudged(a, b, nudged, common) if nudged else _paired(a, b, common)


def _check_nudged(a: Run, nudged: list[Run]) -> None:
    """Refuse what a maximum over runs would pass over: a step that is missing, a difference that is no number."""
    for run in nudged:
        if lacking := sorted(a.loss.keys() - run.loss.keys()):
            raise RunError(
                f"--nudged {run.folder} lacks {len(lacking)} of the {len(a.loss)} steps of {a.folder}, from step "
                f"{lacking[0]}; expected all of them; train it to the end, or drop it"
            )
        odd = [step for step in sorted(a.loss) if not math.isfinite(_relative(a, run, step))]
        if odd:
            raise RunError(
                f"--nudged {run.folder} has loss {run.loss[odd[0]]} in step {odd[0]}, where {a.folder} has "
                f"{a.loss[odd[0]]}; expected finite losses, 0 in both or in none; drop it"
            )


def _windows(last: int) -> list[tuple[int, int]]:
    found = [(first, min(end, last)) for first, end in WINDOWS if first <= last]
    return [*found, *((first, min(first + 99, last)) for first in range(101, last + 1, 100))]


def _against_nudged(a: Run, b: Run, nudged: list[Run], common: list[int]) -> list[Row]:
    factor = 10 if len(nudged) < 5 else 5 if len(nudged) < 10 else 3
    found = []
    for first, end in _windows(common[-1]):
        steps = [step for step in common if first <= step <= end]
        if not steps:
            continue
        spread = max(_relative(a, run, step) for run in nudged for step in steps)
        difference, allowed = max((_relative(a, b, s) for s in steps), key=_order), max(factor * spread, FLOOR)
        found.append(Row(f"{first}-{end}", difference, _first_beyond(a, b, steps, allowed), allowed))
    tail = common[-20:]
    spread = max(_tail(a, run, tail) for run in nudged)
    allowed = max(factor * spread, FLOOR)
    return [*found, Row("tail", _tail(a, b, tail), _first_beyond(a, b, tail, allowed), allowed)]


def _paired(a: Run, b: Run, common: list[int]) -> list[Row]:
    found = []
    for first in range(1, common[-1] + 1, 20):
        steps = [step for step in common if first <= step < first + 20]
        if steps:
            ratio = sum(_log_ratio(a.loss[s], b.loss[s]) for s in steps) / len(steps)
            beyond = _first_beyond(a, b, steps, PAIRED_WINDOW)
            found.append(Row(f"{first}-{steps[-1]}", abs(ratio), beyond, PAIRED_WINDOW))
    tail = common[-20:]
    return [*found, Row("tail", _tail(a, b, tail), _first_beyond(a, b, tail, PAIRED_TAIL), PAIRED_TAIL)]


def _first_beyond(a: Run, b: Run, steps: list[int], allowed: float) -> int | None:
    return next((step for step in steps if not _relative(a, b, step) <= allowed), None)


def _relative(a: Run, b: Run, step: int) -> float:
    return _apart(a.loss[step], b.loss[step])


def _apart(one: float, other: float) -> float:
    """The relative difference to `one`; of a step without a valid token both are 0, and do not differ."""
    return abs(other - one) / abs(one) if one else math.inf if other else 0.0


def _log_ratio(one: float, other: float) -> float:
    """log(other / one), of two zeros 0; infinite where there is none."""
    ratio = other / one if one else math.inf if other else 1.0
    return math.inf if ratio <= 0 else math.log(ratio)


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _tail(a: Run, b: Run, steps: list[int]) -> float:
    return _apart(*(math.fsum(run.loss[s] for s in steps) / len(steps) for run in (a, b)))


def gradient_ratios(a: Run, b: Run) -> dict[str, dict[str, float]]:
    """Step -> layer -> B's gradient norm / A's, over the layer's parameters, from the digests of the first steps."""
    found: dict[str, dict[str, float]] = {}
    for step in sorted(a.told["digests"].keys() & b.told["digests"].keys(), key=int):
        squares: dict[str, list[float]] = {}
        one, other = a.told["digests"][step], b.told["digests"][step]
        for name in one:
            if name in other:
                sums = squares.setdefault(layer_of(name), [0.0, 0.0])
                sums[0] += one[name][0] ** 2
                sums[1] += other[name][0] ** 2
        found[step] = {layer: math.sqrt(y / x) if x else math.nan for layer, (x, y) in squares.items()}
    return found


def saturation(run: Run) -> dict[str, dict[str, int]]:
    """Step -> layer -> saturated codes."""
    found: dict[str, dict[str, int]] = {}
    for step, counts in run.told["saturated_by_layer"].items():
        for name, count in counts.items():
            by_layer = found.setdefault(step, {})
            by_layer[layer_of(name)] = by_layer.get(layer_of(name), 0) + count
    return found


def layer_of(name: str) -> str:
    """'layers.3' of 'layers.3.attention.wq.weight'; of anything else the module."""
    numbered = re.match(r"layers\.\d+", name)
    return numbered[0] if numbered else name.split(".")[0]


def gap_recovered(bf16: Run, unfused: Run, fused: Run) -> float | None:
    """(fused - unfused) / (bf16 - unfused) in tokens/s; None where a speed is missing or unfused is not the slower."""
    fast, slow, mine = (run.tokens_a_second for run in (bf16, unfused, fused))
    if fast is None or slow is None or mine is None or slow >= fast:
        return None
    return (mine - slow) / (fast - slow)


def _speed(a: Run, b: Run, unfused: Run | None) -> list[str]:
    """Lines about tokens/s."""
    lines = ["", f"tokens/s, median after {WARM_STEPS} steps"]
    for label, run in (("A", a), ("B", b), ("unfused", unfused)):
        if run is not None:
            speed, base = run.tokens_a_second, a.tokens_a_second
            ratio = f"{speed / base - 1:>+12.1%} against A" if speed and base and run is not a else ""
            lines.append(f"  {label:20}" + ("none: too few steps" if speed is None else f"{speed:>12,.1f}{ratio}"))
    if unfused is not None:
        share = gap_recovered(a, unfused, b)
        told = "none: unfused is not slower than A" if share is None else f"{share:.1%}"
        lines.append(f"share of the gap recovered: {told}  (published: {PUBLISHED_SHARE})")
    return lines


def _first_outside(outside: list[Row]) -> str:
    """Of the windows that are outside, the first step that is so by itself."""
    if not outside:
        return "none"
    first = min(outside, key=lambda row: math.inf if row.step is None else row.step)
    if first.step is None:  # a mean over steps, by a hair
        return f"steps {first.window}; no single step of them is beyond {first.allowed:.1e}"
    return f"step {first.step} (of steps {first.window}, the first beyond {first.allowed:.1e})"


def report(a: Run, b: Run, nudged: list[Run], unfused: Run | None = None) -> tuple[str, bool]:
    """The text for people, and whether every window is inside its band."""
    lines = [
        f"{label}: {run.folder}  {run.told.get('recipe')} {run.told.get('format')} on {run.told.get('arch')}, "
        f"{run.told.get('ranks')} rank{'' if run.told.get('ranks') == 1 else 's'}, "
        f"config {run.told.get('config_hash')}, {len(run.loss)} steps"
        for label, run in (("A", a), ("B", b))
    ]
    common = sorted(a.loss.keys() & b.loss.keys())
    judged = rows(a, b, nudged)
    lines += ["", f"{'step':>6}{'loss A':>12}{'loss B':>12}{'relative':>12}{'norm A':>12}{'norm B':>12}"]
    shown = [common[round(i * (len(common) - 1) / 11)] for i in range(12)] if len(common) > 12 else common
    for step in shown:
        difference = math.copysign(_relative(a, b, step), b.loss[step] - a.loss[step])
        lines.append(
            f"{step:>6}{a.loss[step]:>12.5f}{b.loss[step]:>12.5f}{difference:>+12.1e}{a.grad_norm[step]:>12.5f}"
            f"{b.grad_norm[step]:>12.5f}"
        )
    band = f"{len(nudged)} nudged runs" if nudged else "limits between two formats (give --nudged for a band)"
    lines += ["", f"by window, against {band}", f"{'steps':>10}{'difference':>14}{'allowed':>12}"]
    lines += [
        f"{row.window:>10}{row.difference:>14.2e}{row.allowed:>12.1e}{'' if row.inside else '   OUTSIDE'}"
        for row in judged
    ]
    outside = [row for row in judged if not row.inside]
    lines += [f"first outside: {_first_outside(outside)}"]
    if missing := sorted(a.loss.keys() ^ b.loss.keys()):
        lines.append(f"steps that only one run has: {len(missing)}, from {missing[0]}; not compared")
    for step, ratios in gradient_ratios(a, b).items():
        lines += ["", f"gradient norm B / A by layer, step {step}"]
        lines += [
            f"  {layer:20}{ratio:>12.6f}{'   differs' if not abs(ratio - 1) <= GRADIENT_MARK else ''}"
            for layer, ratio in ratios.items()
        ]
    counts = saturation(a), saturation(b)
    for step in sorted(counts[0].keys() | counts[1].keys(), key=int):
        one, other = (part.get(step, {}) for part in counts)
        if one or other:
            lines += ["", f"saturated codes by layer, step {step}", f"  {'':20}{'A':>12}{'B':>12}"]
            lines += [f"  {layer:20}{one.get(layer, 0):>12,}{other.get(layer, 0):>12,}" for layer in {**one, **other}]
    if any(part for found in counts for part in found.values()) and a.told.get("ranks") != b.told.get("ranks"):
        lines.append("  each rank counts the codes of the weights that it gathers: other ranks, other counts")
    return "\n".join([*lines, *_speed(a, b, unfused)]), not outside


def _check_unfused(a: Run, b: Run, unfused: Run) -> None:
    """Refuse runs of which the share of the gap would say nothing."""
    for run, key, expected in (
        (a, "recipe", "bf16"),
        (b, "quantisation", "fused"),
        (unfused, "quantisation", "unfused"),
        (unfused, "config_hash", b.told.get("config_hash")),
    ):
        if run.told.get(key) != expected:
            raise RunError(
                f"--unfused: {run.folder} has {key} {run.told.get(key)}; expected {expected}: A in bf16, B in FP8 and "
                "the same as B with --quantisation unfused; choose such runs"
            )


def main(argv: list[str] | None = None) -> int:
    """Parse, read, print. Returns the exit code."""
    parser = Parser(
        RunError,
        prog="python -m fp8stack.compare",
        description="Two runs side by side: curves, band, first step outside, gradient norms and saturation by layer.",
        epilog="Exit codes: 0 inside the band, 1 outside, 2 a run that cannot be read, or no room for what is printed.",
    )
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="folder of the reference run (train --out)")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="folder of the other run")
    parser.add_argument("--nudged", type=Path, nargs="+", default=[], metavar="RUN", help="nudged runs of A: the band")
    parser.add_argument(
        "--unfused", type=Path, metavar="RUN", help="B's recipe with --quantisation unfused: share of the gap recovered"
    )
    try:
        arguments = parser.parse_args(argv)
        a, b, *nudged = (read_run(folder) for folder in (arguments.run_a, arguments.run_b, *arguments.nudged))
        odd = [run.folder for run in nudged if run.told.get("config_hash") != a.told.get("config_hash")]
        if odd:
            raise RunError(
                f"--nudged {odd[0]} is of another configuration than {a.folder}; expected runs of the same; train such "
                "with --nudge, or drop it"
            )
        unfused = read_run(arguments.unfused) if arguments.unfused is not None else None
        if unfused is not None:
            _check_unfused(a, b, unfused)
        text, inside = report(a, b, nudged, unfused)
    except RunError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if not command.show(text):
        return 2
    return 0 if inside else 1


if __name__ == "__main__":
    sys.exit(command.run("compare", main))
