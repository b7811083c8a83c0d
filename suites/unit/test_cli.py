"""`fp8ci` from the outside: commands, exit codes, one line an error; and runs with real test processes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import cli, platforms
from harness import record as recording
from harness import run as running
from harness.errors import VERDICTS, UsageError, Verdict
from suites.unit import tiny_checkout
from suites.unit.built_evidence import good

ROOT = Path(__file__).resolve().parents[2]
PASSING = "import pytest\n@pytest.mark.parametrize('x', ['a', 'b'], ids=['tiny-a', 'tiny-b'])\ndef test_it(x): pass\n"
IDS = ["numerics/test_tiny::test_it[tiny-a]", "numerics/test_tiny::test_it[tiny-b]"]


def make(root: Path, files: dict[str, str], manifest: Sequence[str] = ()) -> Path:
    """A tiny checkout whose pytest leaves Hypothesis's plugin out: it costs a second at the end of every session."""
    tiny_checkout.make(root, files, manifest)
    path = root / "pyproject.toml"
    path.write_text(path.read_text().replace("--strict-markers", "-p no:hypothesispytest --strict-markers"))
    return root


def fp8ci(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one passing numerics module with its manifest, on a machine that answers at once."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(tiny_checkout.FACTS))
    return make(tmp_path, {"numerics/test_tiny": PASSING}, IDS)


def run(checkout: Path, *arguments: str) -> int:
    common = ["run", "--platform", "cpu", "--suite", "numerics", "--quiet"]
    return cli.main([*common, "--root", str(checkout), "--out", str(checkout / "out"), *arguments])


def cases(checkout: Path) -> dict[str, str]:
    """Name -> tag and message of its result element in junit.xml, or "" for a pass."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(checkout / "out/junit.xml").getroot().iter("testcase"):
        element = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found[str(case.get("name"))] = "" if element is None else f"{element.tag} {element.get('message')}"
    return found


# Help and bad input ------------------------------------------------------------------------------------------------


def test_help_is_quick() -> None:
    """`fp8ci --help` answers in under 0.3 s (best of 3) and imports nothing that a light path does not need."""
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        done = fp8ci("--help")
        seconds.append(time.monotonic() - started)
        assert done.returncode == 0
        assert "exit codes:" in done.stdout
    assert min(seconds) < 0.3
    heavy = "{'msgspec', 'junitparser', 'rich', 'pytest', 'torch', 'subprocess'}"
    code = f"import sys, harness.cli; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "COMMAND"),
        (["bogus"], "invalid choice: 'bogus'"),
        (["run", "--platform", "mi999"], "there is no platform 'mi999'; expected one of mi300x"),
        (["run", "--platform", "cpu", "--suite", "numeric"], "there is no suite 'numeric' on cpu"),
        (["run", "--platform", "cpu", "--suite", "numerics,"], "empty suite"),
        (["run", "--platform", "cpu", "--root", "/"], "has no baselines/"),
        (["run", "--in", "vm"], "invalid choice: 'vm'"),
        (["plan", "--platform", "mi999"], "there is no platform 'mi999'"),
        (["gate", "/nonexistent"], "is no folder; expected a folder that `fp8ci run` has written"),
        (["gate", "suites"], "is no evidence"),
        (["gate"], "required: PATH"),
        (["gate", "suites", "--", "-k", "x"], "takes nothing after --"),
        (["explain", "GREEN"], "there is no verdict 'GREEN'; expected one of PASS"),
        (["baseline", "record", "--platform", "cpu", "--runs", "0"], "--runs is 0"),
        (["baseline", "record", "--platform", "cpu", "--runs", "many"], "invalid int value"),
        (["baseline", "record", "--from", "suites"], "is no evidence"),
    ],
    ids=[
        "cli-nothing",
        "cli-command",
        "cli-platform",
        "cli-suite",
        "cli-empty-suite",
        "cli-root",
        "cli-place",
        "cli-plan-platform",
        "cli-gate-nowhere",
        "cli-gate-no-evidence",
        "cli-gate-nothing",
        "cli-gate-dashes",
        "cli-explain",
        "cli-runs-0",
        "cli-runs-word",
        "cli-from",
    ],
)
def test_bad_input(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake is one line on stderr, nothing on stdout, exit 2, no traceback."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert captured.err.count("\n") == 1


def test_unknown_arch_is_refused_up_front(tmp_path: Path) -> None:
    """FP8STACK_ARCH=gfx9-4-generic: one line that names it, exit 2, before any test."""
    checkout = make(tmp_path, {"numerics/test_tiny": PASSING}, IDS)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "--platform", "cpu", "--suite", "numerics", "--root", str(checkout)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FP8STACK_ARCH": "gfx9-4-generic"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "gfx9-4-generic" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_explain_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Every verdict has its meaning, exit code and next step; the name may be written in lower case."""
    for verdict in Verdict:
        assert cli.main(["explain", verdict.lower()]) == 0
        told = " ".join(capsys.readouterr().out.split())
        rule = VERDICTS[verdict]
        assert told.startswith(f"{verdict}: {rule.meaning}.")
        assert f"Exit code {rule.exit_code}" in told
        assert f"Next: {rule.advice}." in told


def test_platforms_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`fp8ci platforms --json` is one JSON array with id, labels and suites of every platform."""
    assert cli.main(["platforms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in rows} == set(platforms.PLATFORMS)
    assert all(row["runner_labels"] and row["suites"] for row in rows)


@pytest.mark.parametrize(
    ("event", "ref", "expected"),
    [
        ("pull_request", "refs/pull/1/merge", "pull-request"),
        ("merge_group", "refs/heads/gh-readonly-queue/main/pr-1", "pull-request"),
        ("push", "refs/heads/main", "main"),
        ("push", "refs/heads/topic", "pull-request"),
        ("schedule", "refs/heads/main", "main"),
        ("", "", "pull-request"),
    ],
    ids=["cli-pr", "cli-queue", "cli-push-main", "cli-push-topic", "cli-nightly", "cli-local"],
)
def test_policy(event: str, ref: str, expected: str) -> None:
    """The policy follows GITHUB_EVENT_NAME and GITHUB_REF; without them it is the lenient one."""
    assert cli.policy_of({"GITHUB_EVENT_NAME": event, "GITHUB_REF": ref}) == expected


def test_an_unknown_place_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8CI_IN=podman is an error, never quietly a run on the machine itself; docker without an engine is one too."""
    monkeypatch.setenv("FP8CI_IN", "podman")
    assert cli.main(["run", "--platform", "cpu"]) == 2
    assert "FP8CI_IN is 'podman'; expected local or docker" in capsys.readouterr().err
    monkeypatch.setenv("FP8CI_IN", "docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    assert cli.main(["run", "--platform", "cpu"]) == 4
    assert "container" in capsys.readouterr().err


# Real runs ---------------------------------------------------------------------------------------------------------


def test_green_run_and_its_gate(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run: exit 0, the evidence complete, the summary on stdout and in summary.md; the gate says the same."""
    assert run(checkout) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("PASS exit 0: 2 checks: 2 PASS")
    out = checkout / "out"
    assert {"run.json", "journal.jsonl", "junit.xml", "summary.md", "judged-with"} <= {p.name for p in out.iterdir()}
    assert (out / "summary.md").read_text() == captured.out
    assert cases(checkout) == {"test_tiny::test_it[tiny-a]": "", "test_tiny::test_it[tiny-b]": ""}
    assert cli.main(["gate", str(out)]) == 0
    assert capsys.readouterr().out == captured.out
    assert cli.main(["gate", str(out), "--current", "--root", str(checkout)]) == 0
    assert "no verdict differs" in capsys.readouterr().out


def test_full_run(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--full` adds what test_full.py holds, is said in run.json, and is no ground for a manifest."""
    monkeypatch.setenv("FP8CI_FULL", "1")  # of somebody's shell: it asks for nothing
    conftest = (ROOT / "suites/conftest.py").read_text(encoding="utf-8")
    make(checkout, {"conftest": conftest, "numerics/test_full": "def test_of_the_night(): pass\n"})
    night = "test_full::test_of_the_night"
    for arguments, full in (((), False), (("--full",), True)):
        assert run(checkout, *arguments) == 0
        assert (night in cases(checkout)) == full
        described = json.loads((checkout / "out/run.json").read_text())
        assert described["full"] is full
        assert "FP8CI_FULL" in described["ignored_environment"]
        assert f'name="full" value="{full}"' in (checkout / "out/junit.xml").read_text()
        capsys.readouterr()
        assert cli.main(["plan", "--platform", "cpu", "--suite", "numerics", "--root", str(checkout), *arguments]) == 0
        assert (f"numerics/{night}" in capsys.readouterr().out) == full
    before = (checkout / "baselines/cpu/manifest.txt").read_text()
    assert record(checkout, "--suite", "numerics", "--manifest", "--from", str(checkout / "out")) == 2
    assert "is a run with --full" in capsys.readouterr().err
    assert (checkout / "baselines/cpu/manifest.txt").read_text() == before
    assert run(checkout, "--case", "*night") == 2
    assert "with --full those of the night too" in capsys.readouterr().err


def test_failing_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed assertion: exit 1, named in the first line, a failure in junit.xml."""
    make(checkout, {"numerics/test_tiny": PASSING.replace("pass", "assert x == 'a', 'b is not a'")}, IDS)
    assert run(checkout) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("FAIL exit 1: numerics test_tiny::test_it[tiny-b] - ")
    assert "b is not a" in first
    assert cases(checkout)["test_tiny::test_it[tiny-b]"].startswith("failure FAIL: ")


def test_deleted_test_file(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deleted test file is exit 3, its tests named as missing."""
    (checkout / "suites/numerics/test_tiny.py").unlink()
    make(checkout, {"numerics/test_other": "def test_other(): pass\n"})
    assert run(checkout) == 3
    assert capsys.readouterr().out.startswith("MISSING exit 3: numerics ")
    assert cases(checkout)["test_tiny::test_it[tiny-a]"].startswith("error MISSING: ")


DEATHS = {
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", Verdict.KILLED, "SIGKILL"),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", Verdict.CRASH, "SIGSEGV"),
    "abort": ("os.abort()", Verdict.CRASH, "SIGABRT"),
    "exit-0": ("os._exit(0)", Verdict.CRASH, "exited with 0"),
    "exit-1": ("os._exit(1)", Verdict.CRASH, "exited with 1"),
}


@pytest.mark.parametrize(("death", "verdict", "told"), DEATHS.values(), ids=[f"cli-{name}" for name in DEATHS])
def test_real_deaths(death: str, verdict: Verdict, told: str, checkout: Path) -> None:
    """A process that really dies: the finished test in junit.xml as it ended, the running one how it died, the rest."""
    source = f"import os, signal\ndef test_1_first(): pass\ndef test_2_dies(): {death}\ndef test_3_last(): pass\n"
    ids = [f"numerics/test_tiny::{name}" for name in ("test_1_first", "test_2_dies", "test_3_last")]
    make(checkout, {"numerics/test_tiny": source}, ids)
    assert run(checkout) == 3
    found = cases(checkout)
    assert found["test_tiny::test_1_first"] == ""
    assert f"{verdict}: " in found["test_tiny::test_2_dies"]
    assert told in found["test_tiny::test_2_dies"]
    assert found["test_tiny::test_3_last"].startswith("error MISSING: not run: ")


def test_case_that_matches_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--case` without a match: one line, exit 2, for run and for plan."""
    assert run(checkout, "--case", "nothing*") == 2
    common = ["plan", "--platform", "cpu", "--suite", "numerics", "--root", str(checkout)]
    assert cli.main([*common, "--case", "nothing*"]) == 2
    err = capsys.readouterr().err
    assert err.count("'nothing*'") == 2
    assert "Traceback" not in err


def test_pytest_refuses_its_arguments(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-- --bogus`: pytest's usage error is exit 2."""
    assert run(checkout, "--", "--bogus") == 2
    out = capsys.readouterr().out
    assert out.startswith("USAGE exit 2: ")
    assert "refused its arguments: unrecognized arguments: --bogus" in out


def test_plan(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan lists every test with its fate, and as JSON; nothing has run."""
    make(checkout, {}, [*IDS, "numerics/test_gone::test_gone"])
    common = ["plan", "--platform", "cpu", "--suite", "numerics", "--root", str(checkout)]
    assert cli.main(common) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"run     {IDS[0]}") for line in lines)
    assert any(line.startswith("missing numerics/test_gone::test_gone") for line in lines)
    assert cli.main([*common, "--json"]) == 0
    fates = {test["id"]: test["fate"] for test in json.loads(capsys.readouterr().out)["tests"]}
    assert fates == {IDS[0]: "run", IDS[1]: "run", "numerics/test_gone::test_gone": "missing"}


# Recording ---------------------------------------------------------------------------------------------------------


def record(checkout: Path, *arguments: str) -> int:
    common = ["baseline", "record", "--platform", "cpu", "--quiet", "--root", str(checkout)]
    return cli.main([*common, *arguments])


def git(checkout: Path) -> None:
    environment = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(
            ["git", "-c", "commit.gpgsign=false", *arguments],
            cwd=checkout,
            env={**os.environ, **environment, "GIT_COMMITTER_EMAIL": "a@b"},
            check=True,
        )


def test_record_a_manifest(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--manifest` writes the ids that ran; one that disappears needs --loosen and is logged with its reason."""
    path = checkout / "baselines/cpu/manifest.txt"
    path.unlink()
    git(checkout)
    arguments = ("--suite", "numerics", "--manifest")
    assert record(checkout, *arguments, "--out", str(checkout / "r1")) == 0
    assert [line for line in path.read_text().splitlines() if not line.startswith("#")] == IDS
    before = path.read_text()
    make(
        checkout,
        {"numerics/test_tiny": PASSING.replace("['a', 'b'], ids=['tiny-a', 'tiny-b']", "['a'], ids=['tiny-a']")},
    )
    assert record(checkout, *arguments, "--out", str(checkout / "r2")) == 2
    assert path.read_text() == before
    assert "makes the gate more tolerant" in capsys.readouterr().err
    assert record(checkout, *arguments, "--from", str(checkout / "r2/run-0"), "--loosen", "b is gone for good") == 0
    assert IDS[1] not in path.read_text()
    log = (checkout / "baselines/LOG.md").read_text()
    assert "Reason: b is gone for good" in log
    assert f"- cpu/manifest.txt: {IDS[1]}: no longer must run" in log


def test_what_a_recording_leaves_can_be_judged(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fp8ci gate evidence/*` after `record`: no folder in it that is no evidence."""
    git(checkout)
    assert record(checkout, "--suite", "numerics", "--manifest") == 0
    (folder,) = (checkout / "evidence").iterdir()
    assert re.fullmatch(r"record-cpu-\d{8}T\d{6}Z-[0-9a-f]{8}-run-0", folder.name)
    assert cli.main(["gate", str(folder), str(folder)]) == 0
    capsys.readouterr()


def test_runs_that_are_not_judged_as_configured(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nudged runs and variants, which every gate calls stale, lie inside run 0's folder, or where --out says."""
    made: list[tuple[Path, tuple[Path, ...]]] = []

    def execute(request: running.RunRequest) -> Path:
        assert request.out is not None
        made.append((request.out, request.beside))
        return request.out

    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(cli, "_report", lambda evidence: None)
    cpu = platforms.get("cpu")
    for out in (None, checkout / "r"):
        made.clear()
        options = argparse.Namespace(out=out, case=None, quiet=True)
        execute_one = cli._executed(options, checkout, cpu, "named", cli._folders(options, checkout, cpu, "record"))
        for name in ("run-0", "nudge-1", "threads-1"):
            execute_one(("loss",), {}, (), name)
        first = made[0][0]
        assert first.parent == (out or checkout / "evidence")
        inside = out or first
        assert [folder for folder, _ in made] == [first, inside / "nudge-1", inside / "threads-1"]
        assert [beside for _, beside in made] == [(), (first,), (first, inside / "nudge-1")]


def test_record_refuses_a_failed_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a failed test is no ground for a baseline: exit 2, nothing written."""
    make(checkout, {"numerics/test_tiny": PASSING.replace("pass", "assert x == 'a'")})
    git(checkout)
    before = (checkout / "baselines/cpu/manifest.txt").read_text()
    assert record(checkout, "--suite", "numerics", "--manifest", "--out", str(checkout / "r")) == 2
    assert "no ground for a baseline" in capsys.readouterr().err
    assert (checkout / "baselines/cpu/manifest.txt").read_text() == before


CURVES = """
import json, os, pathlib
def write(record_property, pytestconfig, case, wobble):
    nudge = int(os.environ.get("FP8STACK_NUDGE", "0"))
    scale = 1 + wobble * nudge
    loss = [(5.0123457 - i / 40) * scale for i in range(100)]
    steps = [{"step": i + 1, "loss": v, "grad_norm": v / 7, "saturated": 3, "nan": 0} for i, v in enumerate(loss)]
    content = {"schema": 1, "case": case, "config_hash": CONFIG, "config": {"seed": CONFIG}, "recipe": "rowwise",
               "format": "e4m3fn", "arch": "cpu", "seed": 0, "nudge": nudge, "threads": 1,
               "versions": {"onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "")}, "steps": steps,
               "digests": {str(s): {"w": [1.0, 0.0, 0.5, 0.5]} for s in (1, 2, 3)}}
    out = pathlib.Path(pytestconfig.getoption("fp8_out"))
    (out / "losses").mkdir(exist_ok=True)
    (out / "losses" / f"{case}.json").write_text(json.dumps(content))
    record_property("loss_file", f"losses/{case}.json")
def test_curve(record_property, pytestconfig): write(record_property, pytestconfig, "curve", WOBBLE)
def test_without_a_curve(): assert "FP8STACK_NUDGE" not in os.environ, "nudged though it measures nothing"
"""


def test_record_and_judge_a_curve(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording runs the loss suite as configured, nudged and in its variants; a run is judged against that.

    A wider spread, and another configuration, need --loosen.
    """

    def write(config: str = "'c1'", wobble: float = 1e-6) -> None:
        source = CURVES.replace("CONFIG", config).replace("WOBBLE", str(wobble))
        make(checkout, {"loss/test_curves": source})

    write()
    git(checkout)
    assert record(checkout, "--suite", "loss", "--runs", "2", "--manifest", "--out", str(checkout / "r1")) == 0
    rows = json.loads((checkout / "baselines/cpu/loss.json").read_text())["rows"]
    assert [(row["nudge"], row["variant"]) for row in rows] == [
        (0, ""),
        (0, "isa=AVX512_CORE"),
        (0, "threads=1"),
        (0, "threads=2"),
        (1, ""),
        (2, ""),
    ]
    assert [bool(row["digests"]) for row in rows] == [True, False, False, False, True, True]
    arguments = ["run", "--platform", "cpu", "--suite", "loss", "--quiet", "--root", str(checkout)]
    assert cli.main([*arguments, "--out", str(checkout / "out")]) == 0
    (checkout / "suites/loss/test_curves.py").write_text(
        (checkout / "suites/loss/test_curves.py").read_text().replace("scale = 1", "scale = 1.001")
    )
    capsys.readouterr()
    assert cli.main([*arguments, "--out", str(checkout / "out")]) == 1
    assert "loss first leaves its band at step 1 (step 1): 1.00e-03" in capsys.readouterr().out
    monkeypatch.setattr(recording, "VARIANTS", ())
    write(wobble=1e-3)
    assert record(checkout, "--suite", "loss", "--runs", "1", "--out", str(checkout / "r2")) == 2
    assert "makes the gate more tolerant: curve: loss steps 1-1" in capsys.readouterr().err
    write(config="'c2'")
    assert record(checkout, "--suite", "loss", "--runs", "1", "--out", str(checkout / "r3")) == 2
    assert "another configuration in place of" in capsys.readouterr().err
    folders = [str(path) for path in sorted((checkout / "r3").iterdir())]
    sources = [argument for folder in folders for argument in ("--from", folder)]
    assert record(checkout, *sources, "--suite", "loss", "--loosen", "c2 is right") == 0
    assert "c2 is right" in (checkout / "baselines/LOG.md").read_text()


def test_lint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Baselines that hold together: exit 0; a row that no manifest knows: exit 1 with its id."""
    built = good(tmp_path / "evidence")
    (tmp_path / "suites").mkdir()
    built.baselines = tmp_path / "baselines"
    built.baseline()
    assert cli.main(["baseline", "lint", "--root", str(tmp_path)]) == 0
    built.baseline(ids=[])
    built.baseline(ids=["numerics/test_a::test_b"])
    assert cli.main(["baseline", "lint", "--root", str(tmp_path)]) == 1
    assert "is orphaned" in capsys.readouterr().out


# Broken streams, files and environments ----------------------------------------------------------------------------


@pytest.mark.parametrize("redirect", ["| true", ">&-", "> /dev/full", "2>&-", "2>&1 | true"])
def test_a_stream_that_breaks_changes_no_verdict(redirect: str, tmp_path: Path) -> None:
    """Nobody reads the summary; the exit code still says what it said."""
    folder = good(tmp_path).test("numerics/test_a::test_a", "failed", "wrong").baseline().write()
    line = f"set -o pipefail; sleep 0; {sys.executable} -m harness gate {folder} {redirect}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_progress_that_nobody_reads_stops_no_test(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr breaks in mid-run: the tests run on, and the verdict is theirs."""

    class Broken:
        def update(self) -> None:
            raise BrokenPipeError

        close = update

    monkeypatch.setattr("harness.progress.choose", lambda *_: Broken())
    assert run(checkout) == 0
    assert set(cases(checkout).values()) == {""}


def test_assertions_hold_under_pythonoptimize(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONOPTIMIZE strips assertions from what tests call; a run takes it away."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    (checkout / "comparing.py").write_text("def equal(a, b):\n    assert a == b\n")
    text = PASSING.replace("pass", "__import__('comparing').equal(1, 2)")
    (checkout / "suites/numerics/test_tiny.py").write_text(text)
    assert run(checkout) == 1


def test_setup_only_is_no_run(checkout: Path) -> None:
    """pytest calls it `passed`; nothing was called."""
    assert run(checkout, "--", "--setup-only") == 3


def test_options_of_the_plugin_are_ours(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-- --fp8-case x` would narrow the run without run.json saying so."""
    assert run(checkout, "--", "--fp8-case", "tiny-a") == 2
    assert "--fp8-case is set by `fp8ci run` itself" in capsys.readouterr().err


def test_the_environment_overrides_in(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a container FP8CI_IN decides, whatever the command line was made for."""
    monkeypatch.setenv("FP8CI_IN", "podman")
    assert run(checkout, "--in", "local") == 2


def test_a_malformed_baseline_costs_no_run(checkout: Path) -> None:
    """It is read before the first test."""
    (checkout / "baselines/cpu/loss.json").write_text("{")
    assert run(checkout) == 2
    assert not (checkout / "out").exists()


def test_a_path_that_no_file_system_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback."""
    assert cli.main(["gate", "x" * 300]) == 4
    assert "too long" in capsys.readouterr().err


def test_speed_without_a_gpu(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit 4, as every command that measures says it; no row is skipped one by one, no folder is left."""
    assert cli.main(["run", "--suite", "perf", "--platform", "cpu", "--root", str(checkout)]) == 4
    err = capsys.readouterr().err
    assert "the perf suite measures on a GPU" in err
    assert len(err.splitlines()) == 1
    assert not (checkout / "evidence").exists()


def test_a_recording_is_of_one_platform() -> None:
    """Runs of two machines make no baseline of either."""
    with pytest.raises(UsageError, match="of cpu and h200; expected one platform; take them one"):
        cli._one_platform([{"platform": "h200"}, {"platform": "cpu"}], "auto")
    with pytest.raises(UsageError, match="--platform is mi300x and the evidence is of h200"):
        cli._one_platform([{"platform": "h200"}], "mi300x")
    for asked in ("auto", "auto:cuda", "h200"):
        assert cli._one_platform([{"platform": "h200"}] * 2, asked).id == "h200"


@pytest.mark.parametrize("verb", ["record", "calibrate"])
def test_runs_of_a_recording(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--runs 0, and --runs beside runs that exist, are refused before anything runs."""
    assert cli.main(["baseline", verb, "--platform", "h200", "--runs", "0"]) == 2
    assert "--runs is 0" in capsys.readouterr().err
    assert cli.main(["baseline", verb, "--runs", "2", "--from", "somewhere"]) == 2
    assert "--runs and --from exclude each other" in capsys.readouterr().err
