"""Speed rows against what the device can do: a table and a roofline chart of one run.

    charts/roofline.md      time, rate, share of the probe and of the data sheet, smallest slow-down that can be seen
    charts/roofline.svg     log-log: work a second over operations a byte, under the roofs of the platform's data sheet

A row beside a copy is drawn at its bytes a second, a row beside a GEMM at its operations a second; a row without a rate
(a whole layer) is in the table only. Roofs are published peaks, which nothing reaches: what a row is judged by is its
share of the probe in the same launch (harness/speed.py). A platform without a row in PEAKS gets no roof, and says so.

Published figures of others stand beside the row that measures the same thing. They are targets, never limits.

SVG written here, as in losschart.py: a chart must come out of every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from harness import baselines, samples
from harness.errors import HarnessError
from harness.report.summary import table
from harness.result import Judgement, Result
from harness.samples import Samples

CHART = "charts/roofline.svg"
TABLE = "charts/roofline.md"


@dataclass(frozen=True)
class Peak:
    """Dense peaks of a data sheet: operations a second in bf16 and FP8, bytes a second."""

    bf16: float
    fp8: float
    memory: float


#: By platform. MI300X, MI325X, MI350X, MI355X: AMD's data sheets; H100 SXM, H200, B200: NVIDIA's.
PEAKS: dict[str, Peak] = {
    "mi300x": Peak(1307.4e12, 2614.9e12, 5.3e12),
    "mi325x": Peak(1307.4e12, 2614.9e12, 6.0e12),
    "mi350x": Peak(2300e12, 4600e12, 8.0e12),
    "mi355x": Peak(2500e12, 5000e12, 8.0e12),
    "h100": Peak(989e12, 1979e12, 3.35e12),
    "h200": Peak(989e12, 1979e12, 4.8e12),
    "b200": Peak(2250e12, 4500e12, 8.0e12),
}

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 520, 86, 24, 56, 52
#: Operations a byte. A quantising kernel reads an element, takes a maximum, multiplies, clamps and converts.
KERNEL_OPERATIONS = 4 / 3
LOWEST, HIGHEST = 0.5, 20_000.0
MEMORY, GEMM, ROOF, FRAME = "#1447a8", "#0b6b3a", "#5b6472", "#c9ced6"


@dataclass(frozen=True)
class Row:
    """One timed row. rate: bytes or operations a second; None where the row has no work to count."""

    result: Result
    samples: Samples
    median_ns: float
    share: float | None
    smallest: float | None
    rate: float | None
    published: Sequence[str] = ()

    @property
    def in_bytes(self) -> bool:
        return self.samples.probe == "copy"


def rows_of(evidence: Path, judgement: Judgement) -> Iterator[Row]:
    """The timed rows of a run. One that cannot be read has its verdict already."""
    for result in judgement.results:
        told = result.baseline or {}
        if "samples_file" not in result.properties or told.get("kind") != "perf" or not told.get("median_ns"):
            continue
        try:
            measured = samples.read(evidence / str(result.properties["samples_file"]))
        except HarnessError:
            continue
        if measured.kind != "time":
            continue
        median = float(told["median_ns"])
        rate = measured.work / median * 1e9 if measured.work else None
        published = [line for line in result.detail.splitlines() if line.startswith("published: ")]
        yield Row(result, measured, median, told["share"], told["smallest"], rate, published)


def lines(rows: Sequence[Row], platform: str) -> list[str]:
    """The table: time, rate, share of the probe and of the data sheet, and the smallest slow-down that can be seen."""
    if not rows:
        return []
    peak = PEAKS.get(platform)
    cells = []
    for row in rows:
        unit, scale = ("TB/s", 1e12) if row.in_bytes else ("TFLOPS", 1e12)
        top = _roof(row, peak)
        cells.append(
            (
                f"{row.samples.case}: {row.result.verdict}",
                f"{row.median_ns / 1e3:.1f}",
                "-" if row.rate is None else f"{row.rate / scale:.2f} {unit}",
                "-" if row.share is None else f"{row.share:.3f} {row.samples.probe}",
                "-" if row.rate is None or top is None else f"{row.rate / top:.3f}",
                "-" if row.smallest is None else f"{row.smallest:.1%}",
            )
        )
    header = ("row", "us", "rate", "of probe", "of data sheet", "smallest slow-down")
    found = [f"# Speed on {platform}", "", *table(header, cells)]
    if peak is None:
        found.append(f"{platform} has no peaks in harness/report/roofline.py: nothing to hold a rate against")
    found += list(dict.fromkeys(f"{row.samples.case}: {line}" for row in rows for line in row.published))
    return found


def _roof(row: Row, peak: Peak | None) -> float | None:
    if peak is None:
        return None
    return peak.memory if row.in_bytes else peak.fp8 if row.samples.probe == "fp8" else peak.bf16


def write(evidence: Path, judgement: Judgement, platform: str) -> list[str]:
    """Write the table, and draw the chart where a row has a rate; returns the names of the files."""
    rows = list(rows_of(evidence, judgement))
    if not rows:
        return []
    baselines.write_atomic(evidence / TABLE, "\n".join(lines(rows, platform)) + "\n")
    rated = [row for row in rows if row.rate is not None]
    if not rated:
        return [TABLE]
    baselines.write_atomic(evidence / CHART, render(rated, platform))
    return [TABLE, CHART]


def intensity(row: Row) -> float:
    """Operations a byte: of a kernel by its nature, of a GEMM by its sizes, each operand and the result moved once."""
    if row.in_bytes:
        return KERNEL_OPERATIONS
    sizes = row.samples.config.get("shape")
    if not isinstance(sizes, list) or len(sizes) != 4:
        return HIGHEST
    e, m, k, n = sizes
    weights = e * k * n
    moved = m * k + weights + 2 * m * n
    if row.samples.config.get("gemm") == "grad_weight":
        moved = m * k + m * n + 2 * weights
    return float(row.samples.work) / float(moved)


def render(rows: Sequence[Row], platform: str) -> str:
    """The chart as SVG."""
    peak = PEAKS.get(platform)
    rates = [_operations(row) for row in rows]
    high = max([*rates, peak.fp8 if peak else 0.0]) * 2
    low = min(rates) / 4

    def x(value: float) -> float:
        at = math.log(min(HIGHEST, max(LOWEST, value)) / LOWEST) / math.log(HIGHEST / LOWEST)
        return LEFT + (WIDTH - LEFT - RIGHT) * at

    def y(value: float) -> float:
        at = math.log(min(high, max(low, value)) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * at

    def text(at_x: float, at_y: float, words: str, anchor: str = "start") -> str:
        placed = f'x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" font-size="12" fill="#1f2430"'
        return f"<text {placed}>{escape(words)}</text>"

    parts = [
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
        f'fill="none" stroke="{FRAME}"/>',
        text(LEFT, 24, f"Roofline of {platform}: {len(rows)} rows; roofs are the data sheet's, dense"),
        text(LEFT, 42, "blue: rows beside a copy; green: rows beside a GEMM; hollow: not a PASS"),
        text(WIDTH / 2, HEIGHT - 12, "operations a byte", "middle"),
    ]
    for decade in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        parts.append(text(LEFT - 8, y(10.0**decade) + 4, f"{10.0 ** (decade - 12):g} TOPS", "end"))
    for mark in (1, 10, 100, 1000, 10000):
        parts.append(text(x(mark), HEIGHT - BOTTOM + 16, f"{mark}", "middle"))
    if peak is None:
        parts.append(text(WIDTH - RIGHT - 8, TOP + 18, f"no peaks are known of {platform}", "end"))
    else:
        for name, top in (("bf16", peak.bf16), ("FP8", peak.fp8)):
            corner = top / peak.memory
            points = [(LOWEST, peak.memory * LOWEST), (corner, top), (HIGHEST, top)]
            drawn = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
            parts.append(f'<polyline points="{drawn}" fill="none" stroke="{ROOF}" stroke-width="1.4"/>')
            parts.append(text(WIDTH - RIGHT - 8, y(top) - 6, f"{name} {top / 1e12:g} TFLOPS", "end"))
    for row, rate in zip(rows, rates, strict=True):
        colour = MEMORY if row.in_bytes else GEMM
        fill = colour if str(row.result.verdict) == "PASS" else "none"
        told = escape(f"{row.samples.case}: {row.median_ns / 1e3:.1f} us, {row.result.verdict}")
        parts.append(
            f'<circle cx="{x(intensity(row)):.1f}" cy="{y(rate):.1f}" r="4" fill="{fill}" stroke="{colour}">'
            f"<title>{told}</title></circle>"
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _operations(row: Row) -> float:
    """Operations a second, also of a row whose work is bytes."""
    assert row.rate is not None
    return row.rate * (KERNEL_OPERATIONS if row.in_bytes else 1.0)
