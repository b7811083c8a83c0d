"""The chart of a loss curve: band, run, first step outside and residuals are in it, whatever the evidence holds."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import gate
from harness.report import losschart
from suites.unit.built_evidence import LOSS_CASE, LOSS_TEST, Built, loss_file

SVG = "{http://www.w3.org/2000/svg}"
CHART = f"charts/{LOSS_CASE}.svg"


def draw(folder: Path, content: Mapping[str, Any], baseline: bool = True) -> ET.Element:
    """The parsed chart of one judged curve."""
    built = Built(folder, suites=("loss",)).loss(content, LOSS_TEST)
    if baseline:
        built.baseline(codegen=False)
    built.write()
    assert losschart.write(folder, gate.judge(folder), "cpu") == [CHART]
    return ET.parse(folder / CHART).getroot()


def texts(chart: ET.Element) -> str:
    return "\n".join(str(element.text) for element in chart.iter(f"{SVG}text"))


def lines(chart: ET.Element, colour: str) -> list[ET.Element]:
    return [line for line in chart.iter(f"{SVG}polyline") if line.get("stroke") == colour]


def test_a_curve_outside_of_its_band(tmp_path: Path) -> None:
    """Band, run 0, five nudged runs, this run and two residuals are drawn; the first step outside is marked thrice."""
    chart = draw(tmp_path, loss_file(9e-4))
    assert len(chart.findall(f"{SVG}polygon")) == 1
    assert len(lines(chart, losschart.RUN)) == 3
    assert len(lines(chart, losschart.REFERENCE)) == 1
    assert len(lines(chart, losschart.NUDGED)) == 3 * 5
    told = texts(chart)
    assert f"{LOSS_CASE} on cpu" in told
    assert "REGRESSION: windows: loss first leaves its band at step 6" in told
    assert "first: windows, step 6" in told
    assert told.count("first step outside: 6") == 2
    assert "5 nudged runs count, K = 5" in told
    assert "gradient digests, largest difference: step 1 0.0e+00 of 2e-03" in told
    marks = [line for line in chart.iter(f"{SVG}line") if line.get("stroke") == losschart.OUTSIDE]
    assert len({mark.get("x1") for mark in marks}) == 1
    limits = [line for line in chart.iter(f"{SVG}line") if line.get("stroke") == losschart.LIMIT]
    assert len(limits) == 2 * 6 + 1  # and the legend's


def test_residuals_stand_where_their_limits_do(tmp_path: Path) -> None:
    """The run lies above the limit from the marked step on and below it before: the panels tell the truth."""
    chart = draw(tmp_path, loss_file(9e-4))
    run = lines(chart, losschart.RUN)[1]
    points = [tuple(map(float, point.split(","))) for point in str(run.get("points")).split()]
    limits = [line for line in chart.iter(f"{SVG}line") if line.get("stroke") == losschart.LIMIT][1:7]
    assert len(points) == 100
    for step, (x, y) in enumerate(points, 1):
        limit = next(line for line in reversed(limits) if float(str(line.get("x1"))) <= x + 0.05)
        assert (y < float(str(limit.get("y1")))) == (step >= 6), step


def test_the_bits_of_run_0(tmp_path: Path) -> None:
    """A run without a difference has nothing to draw in the residual panels, and the chart says why."""
    chart = draw(tmp_path, loss_file())
    assert len(lines(chart, losschart.RUN)) == 1
    assert texts(chart).count("every step that is there has the bits of run 0") == 2
    assert "first" not in texts(chart)


def test_a_curve_that_ends_in_nan(tmp_path: Path) -> None:
    """What is missing or not finite breaks the line and is told; the chart is drawn all the same."""
    content = loss_file(1e-6)
    content["steps"] = content["steps"][:80]
    content["steps"][39]["loss"] = math.nan
    chart = draw(tmp_path, content)
    assert "21 steps missing or not finite, first step 40" in texts(chart)
    assert "first: completeness, step 40" in texts(chart)
    assert len(lines(chart, losschart.RUN)) == 2 + 2 + 1


def test_without_a_baseline(tmp_path: Path) -> None:
    """The run alone, and that there was nothing to compare it with."""
    chart = draw(tmp_path, loss_file(), baseline=False)
    assert len(lines(chart, losschart.RUN)) == 1
    assert not chart.findall(f"{SVG}polygon")
    assert "NO_BASELINE" in texts(chart)
    assert "no baseline: nothing to compare it with" in texts(chart)


@pytest.mark.parametrize("steps", [0, 1], ids=["no-step", "one-step"])
def test_hardly_a_curve(steps: int, tmp_path: Path) -> None:
    """No step at all, or one: a chart that parses."""
    content = loss_file()
    content["steps"] = content["steps"][:steps]
    for folder, baseline in (("with", True), ("without", False)):
        draw(tmp_path / folder, content, baseline)


def test_a_file_that_cannot_be_read_has_no_chart(tmp_path: Path) -> None:
    """Its verdict says so; the charts of the others are drawn."""
    built = Built(tmp_path, suites=("loss",)).loss().baseline(codegen=False)
    built.file(f"losses/{LOSS_CASE}.json", "{").write()
    assert losschart.write(tmp_path, gate.judge(tmp_path), "cpu") == []
