"""`fp8ci history DIR...`: how each speed row moved over several runs, and near which commit it changed.

Folders are put in the order of their runs. A row's figure is its ratio to the reference of its own launches (to the
probe where it has no reference), so that nodes and days cancel. A change point is where the figures before and after it
differ by more than 3 % and by three times their scatter, with two runs at least on either side; the clearest one is
taken first, and each side is looked at again. A change lies between two runs, so it is named `near commit X`, X being
that of the first run after it.

Not here: verdicts (speed.py): a history judges nothing, and ends with 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import gate, samples, speed
from harness.errors import MissingError, UnreadableError
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal_reader import Journal
from harness.samples import Samples

LEAST_SIDE = 2
SCATTER = 3.0
MARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Point:
    """One row in one run."""

    when: str
    commit: str
    median_ns: float
    value: float
    """Logarithm of the ratio to its yardstick."""


@dataclass(frozen=True)
class Change:
    """A change point: relative difference of the levels around it, and the first run after it."""

    position: int
    percent: float
    commit: str


@dataclass(frozen=True)
class Trend:
    """One row over all runs that measured it."""

    test: str
    yardstick: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...]


def of(folders: Sequence[Path]) -> list[Trend]:
    """The trend of each row, by test id.

    Raises:
        MissingError: no folder holds a row.
        UnreadableError: a folder or its samples cannot be read.
    """
    runs = sorted(((gate.read_run(folder), folder) for folder in folders), key=lambda one: str(one[0].get("started")))
    rows: dict[str, list[tuple[str, Point]]] = {}
    for run, folder in runs:
        for record in Journal.read(folder / JOURNAL_FILE).tests.values():
            name = record.properties.get("samples_file")
            if name is None or record.state != "passed":
                continue
            path = folder / str(name)
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UnreadableError(f"{name} lies outside of {folder}", "a path inside of it")
            found = _point(samples.read(path), run)
            if found is not None:
                rows.setdefault(record.id, []).append(found)
    if not rows:
        raise MissingError(
            f"none of {len(folders)} folders holds a timed row", "evidence of the perf suite", "name other folders"
        )
    trends: list[Trend] = []
    for test, entries in sorted(rows.items()):
        points = tuple(point for _, point in entries)
        positions = change_points([point.value for point in points])
        changes = tuple(
            Change(position, 100 * math.expm1(step), points[position].commit) for position, step in positions
        )
        trends.append(Trend(test, entries[-1][0], points, changes))
    return trends


def _point(row: Samples, run: dict[str, Any]) -> tuple[str, Point] | None:
    """(yardstick, point) of a timed row; None for counts, and for samples that are no times."""
    launches = row.of("candidate")
    values = [value for one in launches for value in (*one.candidate, *one.reference, *one.probe)]
    if row.kind != "time" or not launches or not all(math.isfinite(value) and value > 0 for value in values):
        return None
    yardstick = "reference" if row.reference else "probe"
    logs = [speed.Logs.of(one) for one in launches]
    ratios = [part for one in logs if (part := one.by_reference if row.reference else one.by_probe)]
    if not ratios:
        return None
    level = statistics.fmean(statistics.median(part) for part in ratios)
    median = statistics.median(value for one in launches for value in one.candidate)
    return yardstick, Point(str(run.get("started")), str(run.get("commit") or "unknown"), median, level)


def change_points(values: Sequence[float], limit: float = speed.LEAST, start: int = 0) -> list[tuple[int, float]]:
    """(position of the first value after it, step) of each change point, in order; by halves, largest step first."""
    best: tuple[float, int, float] | None = None
    for cut in range(LEAST_SIDE, len(values) - LEAST_SIDE + 1):
        before, after = values[:cut], values[cut:]
        step = statistics.fmean(after) - statistics.fmean(before)
        scatter = math.sqrt((_squares(before) + _squares(after)) / max(1, len(values) - 2))
        score = abs(step) / math.sqrt(1 / len(before) + 1 / len(after))
        if abs(math.expm1(step)) > limit and abs(step) > SCATTER * scatter and (best is None or score > best[0]):
            best = (score, cut, step)
    if best is None:
        return []
    _, cut, step = best
    left, right = change_points(values[:cut], limit, start), change_points(values[cut:], limit, start + cut)
    return [*left, (start + cut, step), *right]


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def render(trends: Sequence[Trend]) -> str:
    """A line a row, with a sparkline of its relative time, and a line a change point."""
    lines: list[str] = []
    for trend in trends:
        first, last = trend.points[0], trend.points[-1]
        change = 100 * math.expm1(last.value - first.value)
        lines.append(
            f"{trend.test}: {len(trend.points)} runs, {last.median_ns / 1e3:.1f} us, {change:+.1f} % since the first "
            f"(by the {trend.yardstick})  {_sparkline([point.value for point in trend.points])}"
        )
        lines += [f"    {one.percent:+.1f} % near commit {one.commit[:12]}" for one in trend.changes]
    moved = sum(bool(trend.changes) for trend in trends)
    lines.append(f"{len(trends)} rows, {moved} with a change point")
    return "\n".join(lines) + "\n"


def _sparkline(values: Sequence[float]) -> str:
    """Taller is slower. A row that moved by less than a per cent is flat, not noise blown up."""
    low, span = min(values), max(max(values) - min(values), 0.01)
    return "".join(MARKS[min(len(MARKS) - 1, int((value - low) / span * len(MARKS)))] for value in values)


def as_dict(trends: Sequence[Trend]) -> list[dict[str, Any]]:
    """Plain data."""
    return [
        {
            "test": trend.test,
            "yardstick": trend.yardstick,
            "points": [
                {"when": p.when, "commit": p.commit, "median_ns": p.median_ns, "ratio": math.exp(p.value)}
                for p in trend.points
            ],
            "changes": [{"percent": c.percent, "commit": c.commit, "position": c.position} for c in trend.changes],
        }
        for trend in trends
    ]
