"""The workflows and the tox environments hold the rules that keep a gate from turning green by accident."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import platforms
from harness.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
GATE = WORKFLOWS["gate"]
TOX = (ROOT / "tox.ini").read_text(encoding="utf-8")


def job(name: str, text: str = GATE) -> str:
    """The text of one job."""
    found = re.search(rf"^  {name}:\n(.*?)(?=^  \w+:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def test_verdict_always_runs_and_needs_every_job() -> None:
    """A skipped or cancelled job must meet a verdict that names it (ruby-git#1675): always(), and what is expected."""
    jobs = re.findall(r"^  (\w+):\n    name:", GATE, re.MULTILINE)
    verdict = job("verdict")
    assert "    if: always()\n" in verdict
    needs = re.search(r"needs: \[(.*)\]", verdict)
    assert needs
    assert {name.strip() for name in needs[1].split(",")} == set(jobs) - {"verdict"}
    assert '--expect "$EXPECTED"' in verdict
    assert "github.event.pull_request.base.sha" in verdict
    assert "pipefail" in verdict  # tee must not swallow the exit code


def test_evidence_is_uploaded_whatever_happened() -> None:
    """Also of a run that failed or was cancelled; and nothing to upload is an error."""
    upload = job("run").partition("- if: always()\n")[2]
    assert "actions/upload-artifact@" in upload
    assert "if-no-files-found: error" in upload


@pytest.mark.parametrize("name", [pytest.param(name, id=f"workflow-{name}") for name in sorted(WORKFLOWS)])
def test_actions_are_pinned_and_without_rights(name: str) -> None:
    """Actions by SHA, no permission but reading, no credentials left behind, no pull_request_target."""
    text = WORKFLOWS[name]
    uses = re.findall(r"uses: (\S+)", text)
    assert uses
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in uses)
    assert text.count("persist-credentials: false") == sum("checkout@" in action for action in uses)
    assert "\npermissions: {}\n" in text
    assert "\nconcurrency:\n" in text
    assert "pull_request_target" not in text
    assert set(re.findall(r"^\s+(\w+): (?:read|write)", text, re.MULTILINE)) == {"contents"}
    assert "write" not in re.findall(r"permissions:\n(.*?)\n", text)


def test_triggers() -> None:
    """The gate runs before a merge, also in a queue; nothing else does, so that nothing waits for it."""
    triggers = {
        name: set(re.findall(r"^  (\w+):", text.partition("\non:\n")[2].partition("\n\n")[0], re.MULTILINE))
        for name, text in WORKFLOWS.items()
    }
    assert triggers == {
        "gate": {"pull_request", "merge_group"},
        "nightly": {"schedule", "workflow_dispatch"},
        "images": {"push", "schedule", "workflow_dispatch"},
    }


def test_a_fork_waits_for_a_reviewer() -> None:
    """Its code reaches a runner only through an environment, and only where that is known to have reviewers."""
    condition = job("run").partition("    if: >-\n")[2].partition("    environment:")[0]
    assert "(!github.event.pull_request.head.repo.fork || vars.FP8CI_FORKS == 'reviewed')" in condition
    assert "environment: ${{ github.event.pull_request.head.repo.fork && 'forks' || '' }}" in job("run")


@pytest.mark.parametrize("name", [pytest.param(name, id=f"image-before-{name}") for name in ("gate", "nightly")])
def test_an_image_is_built_before_it_is_needed(name: str) -> None:
    """A run in a container finds the image of its own checkout: without this step a change of docker/ never could."""
    steps = job("run", WORKFLOWS[name])
    build = steps.index("""      - if: matrix.env != 'cpu'\n        run: .venv/bin/tox -e "image-$TOX_ENV"\n""")
    assert build < steps.index("""tox -e "$TOX_ENV" """)
    for image in {row.image for row in platforms.PLATFORMS.values()}:
        assert re.search(rf"^    {image}: fp8ci image build {image} ", TOX, re.MULTILINE), image


def test_speed_is_short_before_a_merge_and_long_at_night() -> None:
    """A pull request without the label has the short table; a queue, a label and the night have all rows."""
    run = " ".join(job("run").split())
    assert (
        "SPEED: >- ${{ github.event_name == 'pull_request' && "
        "!contains(github.event.pull_request.labels.*.name, 'all speed rows') && 'short' || 'long' }}"
    ) in run
    assert """tox -e "$TOX_ENV" -- --out "$FP8CI_OUT" --speed "$SPEED"
""" in job("run")
    assert """ --out "$FP8CI_OUT" --speed long
""" in job("run", WORKFLOWS["nightly"])


def test_drift_pins_nothing() -> None:
    """The lane of the newest versions takes no constraint, in an environment of its own, and judges as the main job."""
    section = TOX.partition("[testenv:drift]\n")[2].partition("\n[")[0]
    assert "    torch\n" in section
    assert "--upgrade --no-deps triton\n" in section
    assert "constraints" not in section
    assert "env_dir" not in section
    assert "fp8ci run --platform cpu {posargs}" in section
    assert "tox -e drift " in job("drift", WORKFLOWS["nightly"])


def test_the_night_is_a_full_run() -> None:
    """Every platform's whole product at night, and the gate without it: a pull request does not wait for it."""
    assert 'tox -e "$TOX_ENV" -- --full --out "$FP8CI_OUT" ' in job("run", WORKFLOWS["nightly"])
    assert "--full" not in GATE
    assert "--full" not in TOX


def test_code_owners_cover_what_judges() -> None:
    """A change of the judge needs an owner."""
    owned = {line.split()[0] for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines() if line.startswith("/")}
    assert {"/baselines/", "/harness/", "/docker/", "/.github/"} <= owned


def test_matrix_of_platforms() -> None:
    """A row a platform, on its own labels; none is an empty matrix that says so; an unknown one is an error."""
    told = platforms.matrix("mi300x, cpu")
    [first, second] = json.loads(told["rows"])
    assert first == {"id": "mi300x", "env": "rocm", "labels": ["self-hosted", "linux", "rocm", "mi300x"]}
    assert second["env"] == "cpu"
    assert (told["has_rows"], told["expected"]) == ("true", "mi300x,cpu")
    assert platforms.matrix("") == {"rows": "[]", "has_rows": "false", "expected": ""}
    with pytest.raises(UsageError, match="there is no platform 'mi3000'"):
        platforms.matrix("mi3000")


def test_every_row_of_the_matrix_is_a_tox_environment() -> None:
    """The environment named by a platform's image exists, and no command ignores its exit code (tox#2206)."""
    rows = json.loads(platforms.matrix(",".join(platforms.PLATFORMS))["rows"])
    for name in {row["env"] for row in rows} | {f"{image}-{suite}" for image in ("rocm", "cuda") for suite in SUITES}:
        assert re.search(rf"^    {name}: fp8ci run ", TOX, re.MULTILINE) or f"[testenv:{name}]" in TOX, name
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(TOX)
    commands = [
        line.strip()
        for section in parser.values()
        for line in section.get("commands", "").splitlines()
    ]  # fmt: skip
    assert not [line for line in commands if line.startswith("-") or ": -" in line]


SUITES = ("numerics", "perf", "loss")


def test_devices_are_passed_on_to_tox() -> None:
    """The choice of GPUs and of the engine reaches the run (tox passes no variable on by itself)."""
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "DOCKER_HOST", "FP8CI_*"):
        assert f"    {name}\n" in TOX


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="requires no AMD GPU; this host has one")
def test_rocm_run_without_such_a_gpu() -> None:
    """What `tox -e rocm-perf` calls ends with exit 4 and one clear line on a machine without an AMD GPU."""
    line = next(line for line in TOX.splitlines() if line.strip().startswith("rocm-perf:"))
    words = line.split(":", 1)[1].replace("{posargs}", "").split()
    assert words[0] == "fp8ci"
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "auto:rocm needs an AMD GPU and this host has none (/dev/kfd does not exist)" in done.stderr
