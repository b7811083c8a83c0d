"""The report on speed: what the summary's table, the roofline's table and its chart say of a run."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness import gate, samples
from harness.report import roofline, summary
from suites.unit import built_samples as built
from suites.unit.test_speed_baseline import evidence


def judged(folder: Path, slower: float = 1.0) -> tuple[Path, gate.Judgement]:
    """A run of one row on an H200, judged with recorded runs."""
    made = evidence(folder, built.run(random.Random(1), {"candidate": slower}, stages=2))
    target = made / "judged-with" / "h200"
    target.mkdir(parents=True, exist_ok=True)
    (target / samples.PERF_FILE).write_text(samples.encode("h200", built.recorded(random.Random(100))))
    return made, gate.judge(made)


def test_the_summary_tells_the_smallest_slow_down(tmp_path: Path) -> None:
    """Time, share of the probe, the change by each yardstick, and what the row could show."""
    folder, judgement = judged(tmp_path, 1.25)
    text = summary.render(judgement, gate.read_run(folder))
    line = next(line for line in text.splitlines() if line.startswith(f"| {built.CASE}: REGRESSION"))
    assert "(reference)" in line
    assert "(probe)" in line
    assert "smallest seen" in text
    (result,) = [result for result in judgement.results if result.id == built.TEST]
    assert result.baseline is not None
    assert f"{result.baseline['smallest']:.1%}" in line


def test_table_and_chart(tmp_path: Path) -> None:
    """A rate in TB/s beside the data sheet's, one point under the roofs; the SVG is well-formed."""
    folder, judgement = judged(tmp_path)
    assert roofline.write(folder, judgement, "h200") == [roofline.TABLE, roofline.CHART]
    (row,) = roofline.rows_of(folder, judgement)
    assert row.rate == pytest.approx(built.WORK / row.median_ns * 1e9)
    text = (folder / roofline.TABLE).read_text()
    assert f"{row.rate / 1e12:.2f} TB/s" in text
    assert f"{row.rate / 4.8e12:.3f}" in text
    root = ET.parse(folder / roofline.CHART).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 1
    assert len(root.findall(f"{space}polyline")) == 2


def test_a_platform_without_peaks_says_so(tmp_path: Path) -> None:
    """No nearest data sheet is borrowed."""
    folder, judgement = judged(tmp_path)
    roofline.write(folder, judgement, "b300")
    assert "b300 has no peaks" in (folder / roofline.TABLE).read_text()
    assert "no peaks are known of b300" in (folder / roofline.CHART).read_text()


def test_operations_a_byte() -> None:
    """A grouped product by its sizes: 2 M N K over its operands and its result."""
    shape = [32, 32768, 7168, 2048]
    e, m, k, n = shape
    config = {"shape": shape, "gemm": "forward"}
    row = built.samples([], config=config, probe="fp8", work=2 * m * n * k)
    made = roofline.Row(None, row, 1e6, None, None, 1.0)  # type: ignore[arg-type]
    assert roofline.intensity(made) == pytest.approx(2 * m * n * k / (m * k + e * k * n + 2 * m * n))


def test_a_run_without_speed_has_no_chart(tmp_path: Path) -> None:
    """Nothing is drawn of nothing."""
    folder = evidence(tmp_path, built.samples([]))
    assert roofline.write(folder, gate.judge(folder), "h200") == []
