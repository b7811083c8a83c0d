"""Loss curves of a GPU, without one: what an H200 leaves is recorded with its nudged runs, and judged against them.

The evidence folders are built by hand; the numbers in them are recorded curves of tiny models, whose bf16 and FP8 runs
differ as those of larger ones do.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import baselines, cli, gate, record
from harness.baselines import LossRun
from harness.errors import Verdict
from harness.platforms import PLATFORMS, SECOND_OPINION
from suites.unit.built_evidence import Built

ROOT = Path(__file__).resolve().parents[2]
RECORDED = baselines.load_loss(ROOT / "baselines/cpu/loss.json", "cpu")
H200 = PLATFORMS["h200"]
#: recipe -> whose numbers stand in for it.
STAND_INS = {
    "bf16": "llama3-tiny-bf16",
    "rowwise": "llama3-tiny-rowwise-e4m3fn",
    "rowwise_with_gw_hp": "llama3-tiny-rowwise_with_gw_hp-e4m3fnuz",
}
SHARED = "llama3-tiny-bf16"
CURVE = "loss/test_loss::test_gpu_loss_curve[{}]"
OTHER_CURVE = "loss/test_loss::test_loss_curve[{}]"
NUDGES = 5


def recorded(case: str, nudge: int) -> LossRun:
    return next(row for row in RECORDED.of_case(case) if (row.nudge, row.variant) == (nudge, ""))


def loss_file(recipe: str, nudge: int = 0) -> dict[str, Any]:
    """What a test of `recipe` leaves on an H200."""
    row = recorded(STAND_INS[recipe], nudge)
    config = {**row.config, "model": "llama3-debug", "compile": "inductor", "recipe": recipe}
    return {
        **of_run(row),
        "case": f"llama3-debug-{recipe}",
        "recipe": recipe,
        "config": config,
        "config_hash": f"hash-of-{recipe}",
        "format": "bf16" if recipe == "bf16" else "e4m3fn",
        "arch": "sm_90",
    }


def of_run(row: LossRun) -> dict[str, Any]:
    """A loss file with the numbers of a recorded run."""
    series = zip(row.loss, row.grad_norm, row.saturated, row.nan, strict=True)
    names = ("loss", "grad_norm", "saturated", "nan")
    kept = ("case", "config_hash", "config", "recipe", "format", "arch", "seed", "nudge", "digests")
    return {
        **{name: getattr(row, name) for name in kept},
        "schema": 1,
        "threads": 1,
        "steps": [{"step": step, **dict(zip(names, values, strict=True))} for step, values in enumerate(series, 1)],
    }


def evidence(
    folder: Path,
    nudges: int,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
    only: Callable[[str], bool] = lambda case: True,
) -> Built:
    """The folder of a run of the loss suite on an H200, with the nudged runs that a recording asks for."""
    built = Built(folder, suites=("loss",))
    built.run |= {"platform": "h200", "platform_reason": "auto found NVIDIA H200", "arch": "sm_90"}
    built.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": "NVIDIA H200", "gpus": 1}
    curves = {f"llama3-debug-{recipe}": partial(loss_file, recipe) for recipe in STAND_INS}
    for case, content_of in {
        **curves,
        SHARED: lambda nudge=0: of_run(recorded(SHARED, nudge)) | {"arch": "sm_90"},
    }.items():
        if not only(case):
            continue
        content = content_of() | dict((changed or {}).get(case, {}))
        files = [f"losses/nudged/{case}-{nudge}.json" for nudge in range(1, nudges + 1)]
        for nudge, name in enumerate(files, 1):
            built.file(name, json.dumps(content_of(nudge)))
        claims = {key: content_of()[key] for key in ("arch", "format", "config_hash")}
        test_id = (OTHER_CURVE if case == SHARED else CURVE).format(case)
        built.loss(content, test_id, **claims, **({"nudged_files": " ".join(files)} if files else {}))
    return built


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose baselines know the CPU's shared curve and what an H200 has recorded in one run."""
    root = tmp_path / "checkout"
    (root / "suites").mkdir(parents=True)
    shared = root / "baselines" / SECOND_OPINION / baselines.LOSS_FILE
    baselines.write_atomic(shared, baselines.encode_loss("cpu", RECORDED.of_case(SHARED)))
    folder = evidence(tmp_path / "recording", NUDGES).write()
    arguments = ["--from", str(folder), "--suite", "loss", "--manifest", "--root", str(root)]
    assert cli.main(["baseline", "record", *arguments]) == 0
    return root


def judged(checkout: Path, folder: Path, changed: Mapping[str, Mapping[str, Any]] | None = None) -> gate.Judgement:
    """A later run on an H200, without nudges, judged with a checkout's baselines."""
    evidence(folder, 0, changed).write()
    for name in H200.baseline_files:
        if (checkout / "baselines" / name).exists():
            (folder / "judged-with" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / "baselines" / name, folder / "judged-with" / name)
    return gate.judge(folder)


def verdicts(judgement: gate.Judgement) -> dict[str, tuple[str, str]]:
    return {result.id.partition("[")[2][:-1]: (str(result.verdict), result.message) for result in judgement.results}


def test_one_evidence_folder_is_a_whole_recording(checkout: Path) -> None:
    """Run 0 and five nudged runs of each curve, with their digests, the device and the ids that must run."""
    rows = baselines.load_loss(checkout / "baselines/h200/loss.json", "h200").rows
    cases = [f"llama3-debug-{recipe}" for recipe in sorted(STAND_INS)]
    expected = [(case, nudge) for case in cases for nudge in range(NUDGES + 1)]
    assert [(row.case, row.nudge) for row in rows] == [*expected, *((SHARED, nudge) for nudge in range(NUDGES + 1))]
    assert {row.provenance.device for row in rows} == {"NVIDIA H200"}
    for row in rows:
        known = recorded(STAND_INS.get(row.recipe, "") if row.case != SHARED else SHARED, row.nudge)
        assert (row.loss, row.grad_norm, row.digests) == (known.loss, known.grad_norm, known.digests)
    manifest = (checkout / "baselines/h200/manifest.txt").read_text(encoding="ascii")
    assert all(CURVE.format(case) in manifest for case in cases)
    copied = f"h200/loss.json: {SHARED} holds the values of cpu"  # so it does here
    assert set(record.lint(checkout)) == {copied}


def test_two_recordings_are_one(checkout: Path, tmp_path: Path) -> None:
    """Halves of the curves, recorded side by side on two GPUs: the baseline and the manifest of the whole."""
    root = tmp_path / "halves"
    shared = Path("baselines") / SECOND_OPINION / baselines.LOSS_FILE
    (root / "suites").mkdir(parents=True)
    (root / shared.parent).mkdir(parents=True)
    shutil.copyfile(checkout / shared, root / shared)
    tiny = evidence(tmp_path / "tiny", NUDGES, only=lambda case: case == SHARED).write()
    debug = evidence(tmp_path / "debug", NUDGES, only=lambda case: case != SHARED).write()
    sources = ["--from", str(tiny), "--from", str(debug)]
    assert cli.main(["baseline", "record", *sources, "--suite", "loss", "--manifest", "--root", str(root)]) == 0
    for name in ("manifest.txt", "loss.json"):
        assert (root / "baselines/h200" / name).read_text() == (checkout / "baselines/h200" / name).read_text()


def test_as_recorded_is_green(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four curves pass, FP8 is compared with bf16, the shared curve with the CPU's; `fp8ci gate` says so."""
    judgement = judged(checkout, tmp_path / "run")
    assert judgement.exit_code == 0, verdicts(judgement)
    assert {verdict for verdict, _ in verdicts(judgement).values()} == {"PASS"}
    layers = {
        result.id.partition("[")[2][:-1]: {row["layer"] for row in (result.baseline or {})["rows"]}
        for result in judgement.results
    }
    own = {"digests", "windows", "tail", "saturation"}
    assert layers["llama3-debug-rowwise"] == own | {"paired"}
    assert layers["llama3-debug-bf16"] == own
    assert layers[SHARED] == own | {"shared"}
    assert cli.main(["gate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("PASS exit 0: 4 checks: 4 PASS")


@pytest.mark.parametrize("other", ["bf16", "rowwise_with_gw_hp"])
def test_another_formats_curve_is_red(checkout: Path, tmp_path: Path, other: str) -> None:
    """The numbers of another format under the right names are outside of the band, from step 1."""
    swapped = {name: loss_file(other)[name] for name in ("steps", "digests")}
    judgement = judged(checkout, tmp_path / "run", {"llama3-debug-rowwise": swapped})
    assert judgement.exit_code == 1
    verdict, message = verdicts(judgement)["llama3-debug-rowwise"]
    assert verdict == "REGRESSION"
    assert message.partition(":")[0] in ("digests", "windows")
    assert "at step 1" in message


def test_another_formats_file_is_red(checkout: Path, tmp_path: Path) -> None:
    """A whole file put in another's place: it says what it is, and the test says what it should be."""
    content = loss_file("bf16")
    judgement = judged(checkout, tmp_path / "run", {"llama3-debug-rowwise": content})
    assert judgement.exit_code == 3
    assert verdicts(judgement)["llama3-debug-rowwise"][0] == Verdict.DISAGREE


def test_the_second_opinion_fires(checkout: Path, tmp_path: Path) -> None:
    """A shared curve that this platform's own band would take, and the CPU's does not: red, and named."""
    path = checkout / "baselines" / SECOND_OPINION / baselines.LOSS_FILE
    rows = [msgspec.structs.replace(row, loss=[1.01 * loss for loss in row.loss]) for row in RECORDED.of_case(SHARED)]
    baselines.write_atomic(path, baselines.encode_loss("cpu", rows))
    judgement = judged(checkout, tmp_path / "run")
    assert judgement.exit_code == 1
    verdict, message = verdicts(judgement)[SHARED]
    assert (verdict, message.partition(":")[0]) == ("REGRESSION", "shared")
    assert "loss first leaves its band at step 1" in message
    assert verdicts(judgement)["llama3-debug-bf16"][0] == "PASS"


def test_without_its_baseline_it_is_red(checkout: Path, tmp_path: Path) -> None:
    """An H200 is calibrated: a checkout that has lost the curves cannot judge, and says so."""
    (checkout / "baselines/h200/loss.json").unlink()
    judgement = judged(checkout, tmp_path / "run")
    assert judgement.exit_code == 5
    assert {verdict for verdict, _ in verdicts(judgement).values()} == {"NO_BASELINE"}


def test_without_a_baseline_it_is_uncalibrated(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a platform that is not: listed, never called a pass; FP8 against bf16 and the second opinion are judged."""
    uncalibrated = {**PLATFORMS, "h200": dataclasses.replace(H200, calibrated=())}
    monkeypatch.setattr("harness.platforms.PLATFORMS", uncalibrated)
    (checkout / "baselines/h200/loss.json").unlink()
    judgement = judged(checkout, tmp_path / "run")
    assert judgement.exit_code == 0
    assert {verdict for verdict, _ in verdicts(judgement).values()} == {"UNCALIBRATED"}
    higher = [{**step, "loss": 1.01 * step["loss"]} for step in loss_file("rowwise")["steps"]]
    judgement = judged(checkout, tmp_path / "run-2", {"llama3-debug-rowwise": {"steps": higher}})
    assert verdicts(judgement)["llama3-debug-rowwise"][1].startswith("paired: FP8 against bf16")


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"nudge": 0}, id="as-configured"),
        pytest.param({"config_hash": "another"}, id="another-configuration"),
        pytest.param({"format": "e4m3fnuz"}, id="another-format"),
        pytest.param({"case": "llama3-debug-bf16"}, id="another-case"),
    ],
)
def test_a_nudged_file_of_something_else_is_refused(
    changed: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the folder is recorded: a band from strangers' runs is no band."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "baselines").mkdir()
    built = evidence(tmp_path / "recording", NUDGES)
    built.file("losses/nudged/llama3-debug-rowwise-3.json", json.dumps(loss_file("rowwise", 3) | dict(changed)))
    folder = built.write()
    arguments = ["--from", str(folder), "--suite", "loss", "--root", str(tmp_path)]
    assert cli.main(["baseline", "record", *arguments]) == 2
    assert "llama3-debug-rowwise-3.json is of case" in capsys.readouterr().err
    assert not (tmp_path / "baselines/h200").exists()


def test_recording_on_a_gpu_is_one_run(tmp_path: Path) -> None:
    """The suite runs once, asked for all nudged runs; no variants of a CPU follow."""
    asked: list[tuple[Any, ...]] = []

    def execute(suites: tuple[str, ...], environment: Mapping[str, str], arguments: tuple[str, ...], name: str) -> Path:
        asked.append((suites, dict(environment), arguments, name))
        return evidence(tmp_path / name, NUDGES).write()

    sources = record.run_all(H200, ("loss",), NUDGES, execute, lambda _: None)
    assert asked == [(("loss",), {"FP8STACK_NUDGES": "5"}, (), "run-0")]
    assert [source.evidence.name for source in sources] == ["run-0"]
