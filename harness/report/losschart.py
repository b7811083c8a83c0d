"""A loss curve as a picture: the recorded band, the run, the first step outside, and how far it is from run 0.

    charts/<case>.svg      one for each judged curve of an evidence folder

Three panels over one axis of steps, which is logarithmic, because the windows of the gate are (harness/bands.py):

    loss             run 0 with its band, the nudged runs behind it, this run in front
    loss, residual   |run - run 0| / run 0 of every step on a logarithmic axis, beside the limit of each window. A step
    norm, residual   without a difference has no point: a run with the bits of run 0 says so in words

The first finding, which explains the rest, is a line at its step in the first panel and the sentence under the title;
in a residual panel the line is at the first step outside of its own limits. Gradient digests are no curve: their
numbers stand under the title.

SVG written here and not by a plotting library: a chart must come out of every run, also on a runner that has what
`fp8ci gate` needs and nothing else. Browsers, editors and GitHub show it.

Not here: limits and findings (bands.py), what is red (gate.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from harness import bands, baselines, manifest
from harness.bands import Curve
from harness.errors import HarnessError
from harness.platforms import PLATFORMS
from harness.result import Judgement, Result

FOLDER = "charts"

WIDTH, LEFT, RIGHT, TOP = 960, 86, 24, 92
LOSS_HEIGHT, RESIDUAL_HEIGHT, GAP, BOTTOM = 280, 170, 44, 46
#: Lowest relative difference of a residual panel; below are the last bits of a float32.
LOWEST = 1e-8
BAND, RUN, REFERENCE, NUDGED, LIMIT, OUTSIDE, FRAME = (
    "#cfe0f5", "#1447a8", "#5b6472", "#9aa3b0", "#a15c07", "#b3121d", "#c9ced6",
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """What a chart shows. Without `reference` there is no baseline, and only the run is drawn."""

    title: str
    verdict: str
    told: Sequence[str]
    run: Curve
    reference: Curve | None = None
    spread: Sequence[Curve] = ()
    nudged: int = 0
    findings: Sequence[bands.Finding] = ()
    """In layer order, so that the first one explains the rest."""
    red: bool = False


def write(evidence: Path, judgement: Judgement, platform: str) -> list[str]:
    """Draw every curve that a run has measured; returns the files' names in the folder.

    A curve that cannot be read has its verdict already and gets no chart.
    """
    names: list[str] = []
    for result in judgement.results:
        if "loss_file" not in result.properties:
            continue
        try:
            drawn = _of_result(evidence, result, platform)
        except HarnessError:
            continue
        name = f"{FOLDER}/{manifest.parse(result.id).case}.svg"
        baselines.write_atomic(evidence / name, render(drawn))
        names.append(name)
    return names


def _of_result(evidence: Path, result: Result, platform: str) -> Drawn:
    found = baselines.read_loss_evidence(evidence / str(result.properties["loss_file"]))
    run = Curve.of_evidence(found)
    table = result.baseline or {"rows": [], "findings": []}
    told = [f"{result.verdict}: {result.message}" if result.message else str(result.verdict)]
    digests = [row for row in table["rows"] if row["layer"] == "digests"]
    if digests:
        shown = "; ".join(f"{row['window']} {row['measured']:.1e} of {row['allowed']:.0e}" for row in digests)
        told.append(f"gradient digests, largest difference: {shown}")
    title = f"{found.case} on {platform}, config {found.config_hash}"
    path = evidence / "judged-with" / PLATFORMS[platform].id / baselines.LOSS_FILE
    rows = baselines.load_loss(path, platform).of_config(found.case, found.config_hash) if path.exists() else ()
    recorded = baselines.reference_run(rows)
    if recorded is None:
        return Drawn(
            title, str(result.verdict), [*told, "no baseline: nothing to compare it with"], run, red=result.red
        )
    reference, spread = Curve.of_run(recorded), [Curve.of_run(row) for row in rows if row is not recorded]
    nudged = bands.counted(recorded, rows)
    findings = bands.compare(run, reference, spread, nudged).findings
    return Drawn(title, str(result.verdict), told, run, reference, spread, nudged, findings, result.red)


# Drawing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A frame with its axes: steps 1 ... last from left to right, low ... high from bottom to top."""

    top: float
    height: float
    last: int
    low: float
    high: float
    logarithmic: bool
    parts: list[str] = field(default_factory=list)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(step) / math.log(self.last) if self.last > 1 else 0.5)

    def y(self, value: float) -> float:
        """Held inside of the frame: a value beyond it lies on its edge."""
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.logarithmic else value
        return self.top + self.height * (1 - min(1.0, max(0.0, (at - low) / (high - low))))

    def line(self, series: Mapping[int, float], colour: str, width: float = 1.2, dashes: str = "") -> None:
        """A line through a series; it breaks where a step is missing or not finite, and a lone step is a dot."""
        for piece in _pieces(series, self.last):
            points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in piece)
            if len(piece) == 1:
                x, y = points.split(",")
                self.parts.append(f'<circle cx="{x}" cy="{y}" r="{width + 0.6}" fill="{colour}"/>')
                continue
            dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
            drawn = f'fill="none" stroke="{colour}" stroke-width="{width}"{dashed}'
            self.parts.append(f'<polyline points="{points}" {drawn} stroke-linejoin="round"/>')

    def between(self, low: Mapping[int, float], high: Mapping[int, float], colour: str) -> None:
        """The area between two complete series."""
        there = [(step, high[step]) for step in sorted(high)]
        back = [(step, low[step]) for step in sorted(low, reverse=True)]
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in (*there, *back))
        self.parts.append(f'<polygon points="{points}" fill="{colour}" stroke="none"/>')

    def text(
        self, x: float, y: float, text: str, colour: str = "#1f2430", anchor: str = "start", size: int = 12
    ) -> None:
        placed = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
        self.parts.append(f"<text {placed}>{escape(text)}</text>")

    def frame(self, name: str, ticks: Sequence[tuple[float, str]]) -> None:
        right = WIDTH - RIGHT
        for value, label in ticks:
            y = self.y(value)
            self.parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e7eaee"/>')
            self.text(LEFT - 8, y + 4, label, "#4a5160", "end", 11)
        for first, _ in bands.clipped_windows(self.last):
            x = self.x(first)
            bottom = self.top + self.height
            self.parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}" stroke="#e7eaee"/>')
            self.text(x, bottom + 15, str(first), "#4a5160", "middle", 11)
        self.text(right, self.top + self.height + 15, str(self.last), "#4a5160", "middle", 11)
        box = f'x="{LEFT}" y="{self.top}" width="{right - LEFT}" height="{self.height}"'
        self.parts.append(f'<rect {box} fill="none" stroke="{FRAME}"/>')
        self.text(LEFT, self.top - 8, name, size=13)

    def mark(self, step: int, label: str) -> None:
        """The first step outside."""
        x, right = self.x(min(max(step, 1), self.last)), WIDTH - RIGHT
        ends = f'y1="{self.top}" y2="{self.top + self.height}"'
        self.parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{OUTSIDE}" stroke-width="1.6"/>')
        beside, anchor = (x + 6, "start") if x < right - 260 else (x - 6, "end")
        self.text(beside, self.top + (0.45 * self.height if self.height == LOSS_HEIGHT else 18), label, OUTSIDE, anchor)


def _pieces(series: Mapping[int, float], last: int) -> Iterator[list[tuple[int, float]]]:
    piece: list[tuple[int, float]] = []
    for step in range(1, last + 1):
        value = series.get(step, math.nan)
        if math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def render(drawn: Drawn) -> str:
    """The chart as the text of an SVG file."""
    run, reference = drawn.run, drawn.reference
    last = reference.last_step if reference else max(1, run.last_step)
    loss_limits = bands.limits("loss", reference, drawn.spread, drawn.nudged) if reference else None
    panels = [_loss_panel(drawn, last, loss_limits)]
    top = TOP + LOSS_HEIGHT + GAP
    if reference:
        for metric, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
            limits = bands.limits(metric, reference, drawn.spread, drawn.nudged)
            panels.append(_residual_panel(drawn, metric, f"{name}: relative difference to run 0", top, last, limits))
            top += RESIDUAL_HEIGHT + GAP
    if drawn.findings:
        first = drawn.findings[0]
        panels[0].mark(first.step, f"first: {first.layer}, step {first.step}")
        for panel, metric in zip(panels[1:], ("loss", "grad_norm"), strict=False):
            outside = [finding.step for finding in drawn.findings if finding.metric == metric]
            if outside:
                panel.mark(min(outside), f"first step outside: {min(outside)}")
    height = top - GAP + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif">',
        f"<title>{escape(drawn.title)}: {escape(drawn.verdict)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600" fill="#1f2430">{escape(drawn.title)}</text>',
    ]
    colour = OUTSIDE if drawn.red else "#1f2430"
    for position, text in enumerate(drawn.told[:2]):
        shown = text if len(text) <= 140 else text[:137] + "..."
        fill = colour if position == 0 else "#4a5160"
        lines.append(f'<text x="{LEFT}" y="{44 + 17 * position}" font-size="12" fill="{fill}">{escape(shown)}</text>')
    for panel in panels:
        lines += panel.parts
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{height - 10}" font-size="12" fill="#4a5160" text-anchor="middle">step (windows of the '
        "gate begin at the numbers)</text>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _loss_panel(drawn: Drawn, last: int, limits: bands.Limits | None) -> Panel:
    run, reference = drawn.run.loss, drawn.reference
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    if reference is not None and limits is not None:
        for (first, end), limit in limits.windows.items():
            for step in range(first, end + 1):
                allowed = limit if math.isfinite(limit) else 0.0
                low[step] = reference.loss[step] * (1 - allowed)
                high[step] = reference.loss[step] * (1 + allowed)
    values = [value for value in (*run.values(), *low.values(), *high.values()) if math.isfinite(value)] or [0.0]
    margin = 0.04 * (max(values) - min(values)) or 1.0
    panel = Panel(TOP, LOSS_HEIGHT, last, min(values) - margin, max(values) + margin, logarithmic=False)
    panel.frame("loss, nats a token", _linear_ticks(panel.low, panel.high))
    legend = [("this run", RUN, 2.0, "")]
    if reference is not None:
        panel.between(low, high, BAND)
        for other in drawn.spread:
            panel.line(other.loss, NUDGED, 0.6)
        panel.line(reference.loss, REFERENCE, 1.4, "5 4")
        several = f"{drawn.nudged} nudged runs count, K = {bands.factor(drawn.nudged)}"
        legend += [("run 0 and its band", REFERENCE, 1.4, "5 4"), (several, NUDGED, 1.0, "")]
        legend.append(("limit", LIMIT, 1.4, ""))
    panel.line(run, RUN, 2.0)
    broken = [step for step in range(1, last + 1) if not math.isfinite(run.get(step, math.nan))]
    if broken:
        told = f"{len(broken)} steps missing or not finite, first step {broken[0]}"
        panel.text(WIDTH - RIGHT - 8, panel.top + 20, told, OUTSIDE, "end")
    for position, (name, colour, width, dashes) in enumerate(legend):
        y, x = panel.top + panel.height - 12 - 17 * (len(legend) - 1 - position), LEFT + 14
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        ends = f'x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}"'
        panel.parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width}"{dashed}/>')
        panel.text(x + 34, y, name)
    return panel


def _residual_panel(drawn: Drawn, metric: str, name: str, top: float, last: int, limits: bands.Limits) -> Panel:
    assert drawn.reference is not None
    base: Mapping[int, float] = getattr(drawn.reference, metric)

    def residual(curve: Curve) -> dict[int, float]:
        series: Mapping[int, float] = getattr(curve, metric)
        found = {step: bands.relative(series.get(step, math.nan), base[step]) for step in range(1, last + 1)}
        return {step: value for step, value in found.items() if value > 0.0}

    own, others = residual(drawn.run), [residual(curve) for curve in drawn.spread]
    allowed = [limit for limit in limits.windows.values() if math.isfinite(limit)]
    shown = [value for series in (own, *others) for value in series.values() if math.isfinite(value)]
    high = 10 ** math.ceil(math.log10(2 * max([*allowed, *shown, bands.FLOOR])))
    low = 10 ** math.floor(math.log10(max(LOWEST, min([*shown, bands.FLOOR / 10]))))
    panel = Panel(top, RESIDUAL_HEIGHT, last, low, high, logarithmic=True)
    exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
    panel.frame(name, [(10.0**exponent, f"1e{exponent}") for exponent in exponents])
    for series in others:
        panel.line(series, NUDGED, 0.6)
    for (first, end), limit in limits.windows.items():
        if math.isfinite(limit):
            y, x1, x2 = panel.y(limit), panel.x(first), panel.x(min(end + 1, last))
            ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            panel.parts.append(f'<line {ends} stroke="{LIMIT}" stroke-width="2"/>')
    panel.line(own, RUN, 1.8)
    if not own:
        panel.text(LEFT + 10, top + 20, "every step that is there has the bits of run 0", RUN)
    return panel


def _linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers between two values, five or so."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    values = [step * number for number in range(first, math.floor(high / step) + 1)]
    digits = max(0, -math.floor(math.log10(step)))
    return [(value, f"{value:.{digits}f}") for value in values]
