"""The baseline files: strict decoding, one-line errors that name file and key, exact numbers, one row a line."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import baselines
from harness.baselines import CodegenBlock
from harness.errors import ConfigError, UnreadableError
from suites.unit.built_evidence import LOSS_CASE, codegen_row, isa_file, loss_baseline_rows, loss_file, loss_run

ROOT = Path(__file__).resolve().parents[2]


def loss_text() -> str:
    return baselines.encode_loss("cpu", loss_baseline_rows())


def codegen_text() -> str:
    return baselines.encode_codegen("gfx942", [CodegenBlock(triton="3.9", rows=[codegen_row()])])


def write(folder: Path, text: str, name: str = "loss.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """What is written is read back bit for bit, and written again it is the same text."""
    path = write(tmp_path, loss_text())
    read = baselines.load_loss(path, "cpu")
    assert read.rows == sorted(loss_baseline_rows(), key=lambda row: row.key)
    assert baselines.encode_loss("cpu", read.rows) == path.read_text()


def test_one_row_a_line_sorted() -> None:
    """Each run is one line, in the order of its key whatever the order it came in; so a diff reads."""
    rows = loss_baseline_rows()
    assert baselines.encode_loss("cpu", rows) == baselines.encode_loss("cpu", reversed(rows))
    lines = loss_text().splitlines()[1:-1]
    assert [json.loads(line.rstrip(","))["nudge"] for line in lines] == [0, 1, 2, 3, 4, 5]


def edited(edit: Callable[[dict[str, Any]], None]) -> str:
    value = json.loads(loss_text())
    edit(value)
    return json.dumps(value)


def set_row(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["rows"][0].update(changed)


MALFORMED = {
    "unknown-field": (edited(lambda value: value.update(limit=3)), "unknown field `limit`"),
    "unknown-row-field": (edited(set_row(threshold=1)), "`threshold`"),
    "missing-field": (edited(lambda value: value["rows"][0].pop("config_hash")), "`config_hash`"),
    "nan": (re.sub(r'"loss":\[[\d.]+', '"loss":[NaN', loss_text(), count=1), "key 'loss' holds NaN"),
    "infinity": (re.sub(r'"grad_norm":\[[\d.]+', '"grad_norm":[Infinity', loss_text(), count=1), "'grad_norm'"),
    "too-large": (re.sub(r'"loss":\[[\d.]+', '"loss":[1e999', loss_text(), count=1), "out of range"),
    "cut": (loss_text()[:700], "truncated"),
    "empty": ("", "truncated"),
    "html": ("<html>502</html>", "malformed"),
    "wrong-suite": (loss_text().replace('"suite":"loss"', '"suite":"perf"'), "'perf'"),
    "schema": (loss_text().replace('"schema":1', '"schema":2'), "schema"),
    "copied": (
        loss_text().replace('"platform":"cpu","rows"', '"platform":"mi300x","rows"'),
        "'mi300x', expected 'cpu'",
    ),
    "twice": (edited(lambda value: value["rows"].append(value["rows"][0])), "appears twice"),
    "lengths": (edited(set_row(grad_norm=[1.0])), "'grad_norm' has 1 values but 'loss' has 100"),
    "printed": (edited(set_row(loss=[round(5 - i / 33, 4) for i in range(100)])), "printed, not recorded"),
    "no-provenance": (edited(lambda value: value["rows"][0]["provenance"].update(commit="")), "provenance"),
    "digest-shape": (edited(set_row(digests={"1": {"w": [1.0]}})), "digests"),
}


@pytest.mark.parametrize(("text", "told"), MALFORMED.values(), ids=[f"baselines-{name}" for name in MALFORMED])
def test_malformed(text: str, told: str, tmp_path: Path) -> None:
    """Each malformed kind is one line with the file, what is wrong and the way out, and exit 2."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        baselines.load_loss(path, "cpu")
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert str(path) in message
    assert told in message
    assert "record again" in message
    assert "\n" not in message


def test_codegen_round_trip_and_blocks(tmp_path: Path) -> None:
    """A block is found by Triton's minor version, and a version without a block gives None."""
    baseline = baselines.load_codegen(write(tmp_path, codegen_text()), "gfx942")
    block = baseline.block("3.9.0+git123")
    assert block is not None
    assert block.rows == [codegen_row()]
    assert baseline.block("3.10.0") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"arch":"gfx942","blocks"', '"arch":"gfx950","blocks"'),
        ('"triton":"3.9","rows"', '"triton":"3.9.0","rows"'),
        ('"format":"e4m3fnuz","arch":"gfx942"', '"format":"e4m3fnuz","arch":"gfx950"'),
        ('"facts":{', '"spare":1,"facts":{'),
    ],
    ids=["baselines-file-arch", "baselines-full-version", "baselines-row-arch", "baselines-field"],
)
def test_codegen_malformed(old: str, new: str, tmp_path: Path) -> None:
    """A copied file, a full version as a block's name, a row of another arch, an unknown field: refused."""
    text = codegen_text()
    assert old in text
    with pytest.raises(ConfigError):
        baselines.load_codegen(write(tmp_path, text.replace(old, new)), "gfx942")


def test_evidence_may_hold_nan(tmp_path: Path) -> None:
    """A diverged run is a result: a bare NaN in a loss file is read, a cut file is UNREADABLE."""
    content = loss_file()
    content["steps"][4]["loss"] = float("nan")
    read = baselines.read_loss_evidence(write(tmp_path, json.dumps(content)))
    assert read.steps[4].loss != read.steps[4].loss
    for text in (json.dumps(content)[:300], "", "[]", json.dumps({"schema": 1})):
        with pytest.raises(UnreadableError):
            baselines.read_loss_evidence(write(tmp_path, text))


def test_isa_evidence(tmp_path: Path) -> None:
    """Facts keep their types; a fact that is a list is UNREADABLE."""
    read = baselines.read_isa_evidence(write(tmp_path, json.dumps(isa_file())))
    assert read.facts["fp8_encode"] == "native-f32"
    with pytest.raises(UnreadableError):
        baselines.read_isa_evidence(write(tmp_path, json.dumps(isa_file(facts={"vgprs": [1]}))))


def test_reference_is_the_earliest_run_as_configured() -> None:
    """Nudged runs and variants are never run 0; of two runs as configured the earlier one is."""
    nudged, variant, run = loss_run(1), loss_run(variant="threads=2"), loss_run()
    assert baselines.reference_run([nudged, variant, run]) is run
    assert baselines.reference_run([nudged, variant]) is None
    assert run.case == LOSS_CASE


def test_differing_keys() -> None:
    """The keys that differ are named with both values, nested ones by their path."""
    now, before = {"a": 1, "sizes": {"dim": 256, "heads": 4}}, {"a": 1, "sizes": {"dim": 128, "heads": 4}, "b": 2}
    assert baselines.differing_keys(now, before) == ("b: 2 -> None", "sizes.dim: 128 -> 256")


def test_write_is_atomic(tmp_path: Path) -> None:
    """A failed write leaves the old file and nothing beside it."""
    path = write(tmp_path, "old")
    with pytest.raises(UnicodeEncodeError):
        baselines.write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["loss.json"]


def test_every_file_is_in_the_readme() -> None:
    """The table of baselines/README.md has a row for each file there: what it holds, and how it is judged."""
    lines = (ROOT / "baselines" / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    patterns = [
        re.sub("<[^>]+>", "*", name.rpartition("/")[2]) for cell in cells for name in re.findall("`(.+?)`", cell)
    ]
    files = [path.name for path in (ROOT / "baselines").glob("*/*")]
    assert len(files) > 50
    assert [name for name in files if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == []
