"""A change is judged by the base: whatever it does to its own gate, the base's harness and baselines decide as well.

The evidence in these tests is green by its own files, because the change loosened them; the base sees what it is. The
base's harness is a copy of this one in a folder of its own, and really runs there.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import baselines, cli, gate, judged_with
from harness.errors import UnreadableError
from suites.unit.built_evidence import (
    CODEGEN_TEST,
    LOSS_TEST,
    NUMERICS_TEST,
    Built,
    good,
    loss_baseline_rows,
    loss_file,
    loss_run,
)

ROOT = Path(__file__).resolve().parents[2]
DELETED = "numerics/test_formats::test_golden[formats-e5m2]"
WAIVER = f"""[[waiver]]
id = "{NUMERICS_TEST}"
platform = "cpu"
reason = "too hard"
issue = "https://example.org/1"
owner = "someone"
expires = {datetime.date.today() + datetime.timedelta(days=30)}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the base branch: harness, baselines with every test in the manifest, and a suites folder."""
    root = tmp_path_factory.mktemp("base")
    shutil.copytree(ROOT / "harness", root / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "suites").mkdir()
    built = Built(root / "unused")
    built.baselines = root / "baselines"
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST, DELETED])
    return root


def nothing(built: Built) -> None:
    built.test(DELETED).baseline()


def manifest_line(built: Built) -> None:
    """The test is gone, and so is its line."""


def band(built: Built) -> None:
    nothing(built)
    rows = [*loss_baseline_rows(), loss_run(6, 0.05)]
    baselines.write_atomic(built.baselines / "cpu/loss.json", baselines.encode_loss("cpu", rows))
    built.loss(loss_file(0.01))


def waiver(built: Built) -> None:
    nothing(built)
    built.test(NUMERICS_TEST, "failed", "3 of 9 differ").waiver(WAIVER)
    built.run["started"] = datetime.datetime.now(datetime.UTC).isoformat()


def all_of_them(built: Built) -> None:
    waiver(built)
    band(built)
    del built.tests[DELETED]
    ids = [NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST]
    manifest = built.baselines / "cpu/manifest.txt"
    manifest.write_text("".join(f"{test_id}\n" for test_id in sorted(ids)), encoding="ascii")


@pytest.mark.parametrize(
    ("loosen", "exit_code", "differs"),
    [
        (nothing, 0, []),
        (manifest_line, 3, [f"{DELETED}: absent by its own files, MISSING by the base"]),
        (band, 1, [f"{LOSS_TEST}: PASS by its own files, REGRESSION by the base"]),
        (waiver, 1, [f"{NUMERICS_TEST}: WAIVED by its own files, FAIL by the base"]),
        (
            all_of_them,
            3,
            [
                f"{LOSS_TEST}: PASS by its own files, REGRESSION by the base",
                f"{NUMERICS_TEST}: WAIVED by its own files, FAIL by the base",
                f"{DELETED}: absent by its own files, MISSING by the base",
            ],
        ),
    ],
    ids=["base-same", "base-manifest", "base-band", "base-waiver", "base-all"],
)
def test_a_change_that_loosens_its_gate(
    loosen: Callable[[Built], None],
    exit_code: int,
    differs: list[str],
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Green by its own files, red by the base's; each difference is told first, by its test."""
    built = good(tmp_path)
    loosen(built)
    evidence = built.write()
    assert gate.judge(evidence).exit_code == 0
    assert cli.main(["gate", str(evidence), "--judge-with", str(base)]) == exit_code
    text = capsys.readouterr().out
    told = [line.removeprefix("- differs: ") for line in text.splitlines() if line.startswith("- differs: ")]
    assert sorted(told) == sorted(differs)
    assert text.splitlines()[2] == f"## Judged by {base}: exit {exit_code}; by its own files: exit 0"


def test_a_change_that_empties_the_gate(base: Path, tmp_path: Path) -> None:
    """Its harness says yes to everything. Asked by that harness or by its own, the base's says what it is."""
    candidate = tmp_path / "candidate"
    shutil.copytree(base / "harness", candidate / "harness")
    with (candidate / "harness/gate.py").open("a", encoding="utf-8") as stream:
        stream.write("\n\ndef judge(evidence, *_, **__):\n    return Judgement((), 0, {'PASS': 1})\n")
    built = good(tmp_path / "evidence")
    all_of_them(built)
    built.test(CODEGEN_TEST, "failed", "1-byte stores")
    evidence = str(built.write())

    def fp8ci(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "harness", "gate", evidence, *arguments],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert fp8ci(candidate).returncode == 0
    for root in (candidate, base):
        done = fp8ci(root, "--judge-with", str(base), "--json")
        assert done.returncode == 3, done.stderr
        told = json.loads(done.stdout)["base"]
        verdicts = {result["id"]: result["verdict"] for result in told["results"]}
        assert (verdicts[CODEGEN_TEST], verdicts[LOSS_TEST], verdicts[DELETED]) == ("FAIL", "REGRESSION", "MISSING")


def test_a_change_that_narrows_its_run(base: Path, tmp_path: Path) -> None:
    """One suite, or `--case`: what was selected is green, and the base asks for the whole."""
    built = Built(tmp_path, ("numerics",)).test(NUMERICS_TEST).test(DELETED).baseline(loss=False, codegen=False)
    evidence = built.write()
    assert gate.judge(evidence).exit_code == 0
    both = judged_with.judge(evidence, base)
    assert both.exit_code == 3
    assert "codegen, loss must run on cpu too" in json.dumps(both.base)


def test_a_change_that_tightens_and_fails(base: Path, tmp_path: Path) -> None:
    """The base would let it pass; its own baselines do not: red all the same."""
    built = good(tmp_path)
    nothing(built)
    built.baseline(loss=False)
    (built.baselines / "cpu/loss.json").unlink()
    both = judged_with.judge(built.write(), base)
    assert (both.base["exit_code"], both.exit_code) == (0, 5)


def test_evidence_whose_own_files_are_broken(base: Path, tmp_path: Path) -> None:
    """It is refused by its own files, which is said, and judged by the base."""
    built = good(tmp_path)
    nothing(built)
    evidence = built.write()
    (built.baselines / "cpu/loss.json").write_text("{", encoding="ascii")
    both = judged_with.judge(evidence, base)
    assert (both.base["exit_code"], both.exit_code, both.own) == (0, 2, None)
    assert "loss.json" in both.text.splitlines()[2]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import sys; sys.exit(0)", "exit 0: nothing on stderr"),
        ("raise SystemExit('too old')", "exit 1: too old"),
        ('print(\'{"exit_code": 0, "results": []}\'); raise SystemExit(3)', "exit 3, and says 0"),
        ("import time; time.sleep(60)", "has not judged within"),
    ],
    ids=["base-silent", "base-old", "base-lies", "base-hangs"],
)
def test_a_base_that_gives_no_judgement(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No answer is no yes: exit 3, with what it said."""
    monkeypatch.setattr(judged_with, "DEADLINE", 2.0)
    for part in ("harness", "baselines", "suites"):
        (tmp_path / "base" / part).mkdir(parents=True)
    (tmp_path / "base/harness/__init__.py").touch()
    (tmp_path / "base/harness/__main__.py").write_text(code, encoding="utf-8")
    evidence = good(tmp_path / "evidence").write()
    with pytest.raises(UnreadableError, match=told):
        judged_with.judge(evidence, tmp_path / "base")
    assert cli.main(["gate", str(evidence), "--judge-with", str(tmp_path)]) == 2
    assert "has no harness/__main__.py" in capsys.readouterr().err
