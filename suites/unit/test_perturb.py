"""Evidence made wrong by the self-test: the gate says what it must, one that says yes is found out, drifts are seen."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec
import pytest

from harness import bands, baselines, cli, gate, junit, manifest, perturb, platforms, power, rebuilt, samples
from harness.errors import MissingError, Verdict
from harness.perturb import PERTURBATIONS
from harness.result import Judgement
from suites.unit import built_samples as speeds
from suites.unit import tiny_checkout
from suites.unit.built_evidence import (
    BF16_TEST,
    CODEGEN_TEST,
    CONFIG,
    LOSS_CASE,
    LOSS_TEST,
    NUMERICS_TEST,
    Built,
    good,
    loss_baseline_rows,
    loss_file,
    loss_run,
)

CPU = platforms.PLATFORMS["cpu"]
OF_SPEED = ("slower-row", "nan-sample", "zero-time", "constant-data", "two-launches", "inserted-wait")
OTHER_TEST = "numerics/test_formats::test_golden[formats-e5m2]"


def evidence(folder: Path) -> Path:
    """A good run with two curves, so that they can be swapped, and two plain tests, so that one may go."""
    config = {**CONFIG, "recipe": "bf16", "model": "another"}
    changed = {"case": "llama3-tiny-bf16", "config": config, "recipe": "bf16", "format": None}
    built = good(folder).test(OTHER_TEST).loss(loss_file(**changed), BF16_TEST).baseline()
    rows = [*loss_baseline_rows(), *(loss_run(n, n * 1e-5, **changed, test=BF16_TEST) for n in range(6))]
    baselines.write_atomic(folder / "judged-with/cpu/loss.json", baselines.encode_loss("cpu", rows))
    built.write()
    junit.write(gate.judge(folder), gate.read_run(folder), folder / "junit.xml")
    assert gate.judge(folder).exit_code == 0
    return folder


def test_every_perturbation(tmp_path: Path) -> None:
    """Each is red with its verdict and its exit code, and the evidence itself is left as it was."""
    folder = evidence(tmp_path / "evidence")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = list(perturb.execute(folder, tmp_path))
    assert [(outcome.name, outcome.verdict, outcome.message) for outcome in found if outcome.name not in OF_SPEED] == [
        (row.name, Verdict.PASS, f"red as {row.verdict} and exit {row.exit_code}")
        for row in PERTURBATIONS
        if row.name not in OF_SPEED
    ]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["evidence"]


def speed_evidence(folder: Path) -> Path:
    """A run of an H200 with a timed and a counted row, both recorded before."""
    counted = [samples.Launch(number=n, device=speeds.DEVICE, counts={"kernels": 2}) for n in (1, 2, 3)]
    rows = {
        speeds.TEST: (speeds.run(random.Random(5)), speeds.recorded(random.Random(6))),
        speeds.TEST.replace("test_time", "test_counts"): (speeds.samples(counted, kind="counts"), []),
    }
    made = Built(folder, ("perf",))
    made.run |= {"platform": "h200", "arch": "sm_90"}
    made.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": speeds.DEVICE, "gpus": 1}
    (folder / "samples").mkdir(parents=True)
    recorded = []
    for number, (test, (now, before)) in enumerate(rows.items()):
        made.test(test, samples_file=f"samples/{number}.json", op="rowwise", format="e4m3fn")
        (folder / "samples" / f"{number}.json").write_text(json.dumps(msgspec.to_builtins(now)))
        recorded += before or [samples.PerfRun(test=test, samples=now, provenance=speeds.provenance())]
    (folder / "judged-with" / "h200").mkdir(parents=True)
    (folder / "judged-with" / "h200" / samples.PERF_FILE).write_text(samples.encode("h200", recorded))
    manifest.write(folder / "judged-with" / "h200" / "manifest.txt", [*rows])
    return made.write()


def test_every_perturbation_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On evidence of the perf suite: each is red as it must be, and where no runs are recorded yet nothing is shown."""
    folder = speed_evidence(tmp_path / "evidence")
    assert gate.judge(folder).exit_code == 0
    found = list(perturb.execute(folder, tmp_path, OF_SPEED))
    assert [(outcome.name, outcome.verdict, outcome.message) for outcome in found] == [
        (row.name, Verdict.PASS, f"red as {row.verdict} and exit {row.exit_code}")
        for row in PERTURBATIONS
        if row.name in OF_SPEED
    ]
    speeds.uncalibrate(monkeypatch)
    (folder / "judged-with" / "h200" / samples.PERF_FILE).unlink()
    (outcome,) = perturb.execute(folder, tmp_path, ["slower-row"])
    assert outcome.verdict is Verdict.SKIP


def test_a_gate_that_says_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands that let everything pass: the perturbations that only they see are FAIL, the others stay as they are."""
    folder = evidence(tmp_path / "evidence")
    monkeypatch.setattr(bands, "compare", lambda *_: bands.Comparison((), ()))
    monkeypatch.setattr(bands, "compare_paired", lambda *_: bands.Comparison((), ()))
    found = {outcome.name: outcome for outcome in perturb.execute(folder, tmp_path)}
    missed = [name for name, outcome in found.items() if outcome.verdict is Verdict.FAIL]
    curves = ["shift-one-step", "drop-a-step", "short-curve", "nan-in-the-curve"]
    assert missed == [*curves, "ten-percent", "one-percent-late", "one-weight-gradient"]
    assert found["ten-percent"].message == ("the gate must say REGRESSION and exit 1, and says exit 0 with nothing red")


def test_evidence_that_is_red_already(tmp_path: Path) -> None:
    """Nothing can be shown on it: MISSING for each, not a pass."""
    folder = good(tmp_path / "e").test(NUMERICS_TEST, "failed", "wrong").write()
    (outcome,) = perturb.execute(folder, tmp_path, ["ten-percent"])
    assert (outcome.verdict, outcome.message) == (
        Verdict.MISSING,
        "the evidence itself is exit 1: nothing can be shown on it",
    )


def test_evidence_without_a_curve(tmp_path: Path) -> None:
    """What this evidence does not have is SKIP with the reason."""
    built = Built(tmp_path / "e", ("numerics",)).test(NUMERICS_TEST)
    folder = built.baseline(loss=False, codegen=False).write()
    found = {outcome.name: outcome.verdict for outcome in perturb.execute(folder, tmp_path)}
    assert found["ten-percent"] is found["byte-stores"] is found["gone-blind"] is Verdict.SKIP
    assert found["a-failure"] is found["vanished"] is Verdict.PASS


def test_rebuilt_from_baselines(tmp_path: Path) -> None:
    """A run that measured what was recorded: green, with its curve and its machine code judged."""
    built = Built(tmp_path / "unused")
    built.baselines = tmp_path / "baselines"
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    folder = rebuilt.rebuild(tmp_path, CPU, tmp_path / "evidence")
    judgement = gate.judge(folder)
    assert (judgement.exit_code, judgement.counts) == (0, {"PASS": 3})
    assert {result.id for result in judgement.results if result.baseline} == {CODEGEN_TEST, LOSS_TEST}
    with pytest.raises(MissingError, match="h200 has no manifest"):
        rebuilt.rebuild(tmp_path, platforms.PLATFORMS["h200"], tmp_path / "other")


def test_power(tmp_path: Path) -> None:
    """The bands of six runs that differ by 5e-5 at the last step: a drift of 5e-5 all along is what step 1 allows."""
    path = tmp_path / "baselines/cpu/loss.json"
    baselines.write_atomic(path, baselines.encode_loss("cpu", loss_baseline_rows()))
    (found,) = power.of_platform(tmp_path, CPU)
    assert found.case == LOSS_CASE
    assert found.constant == pytest.approx(5e-5, rel=0.02)
    assert 5e-5 < found.growing <= 2.6e-4
    assert found.text.startswith(f"{LOSS_CASE}: smallest constant drift caught: 0.005 %; growing from 0, ")
    wide = [loss_run(), *(loss_run(nudge, nudge * 1e-3) for nudge in range(1, 6))]
    baselines.write_atomic(path, baselines.encode_loss("cpu", wide))
    assert power.of_platform(tmp_path, CPU)[0].constant > 2 * found.constant
    assert power.smallest(lambda drift: False) == math.inf


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, on rebuilt or on given evidence; data on stdout; the exit code of a gate that misses one."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(tiny_checkout.FACTS))
    (tmp_path / "suites").mkdir()
    built = Built(tmp_path / "unused")
    built.baselines = tmp_path / "baselines"
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    common = ["selftest", "--platform", "cpu", "--root", str(tmp_path), "--only", "ten-percent,byte-stores"]
    assert cli.main(common) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:3] == [
        "ten-percent  red as REGRESSION and exit 1",
        "byte-stores  red as REGRESSION and exit 1",
        "evidence made wrong: 2/2 seen by the gate",
    ]
    assert captured.out.splitlines()[3].startswith(f"{LOSS_CASE}: smallest constant drift caught: ")
    assert "ten-percent: PASS: red as" in captured.err
    given = str(evidence(tmp_path / "given"))
    assert cli.main([*common, "--json", "--quiet", "--evidence", given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in told["evidence"]] == ["PASS", "PASS"]
    assert told["power"][0]["constant"] < 1e-3
    monkeypatch.setattr(gate, "judge", lambda *_, **__: Judgement((), 0, {}))
    assert cli.main([*common, "--quiet", "--evidence", given]) == 3  # nothing that can be shown on it
