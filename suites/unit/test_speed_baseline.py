"""Calibration, history and the base of a comparison: what is written, what is refused, what is told of each row."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path

import msgspec
import pytest

from harness import against, calibrate, cli, gate, history, platforms, samples
from harness.errors import ConfigError, MissingError, UsageError, Verdict
from harness.samples import Samples
from suites.unit import built_samples as built
from suites.unit.built_evidence import Built

H200 = platforms.get("h200")
COMMIT = "b" * 40


def evidence(folder: Path, now: Samples, number: int = 1, commit: str = COMMIT, dirty: bool = False) -> Path:
    """Evidence of one row on an H200."""
    made = Built(folder / f"run-{number}", ("perf",))
    made.run |= {"platform": "h200", "arch": "sm_90", "commit": commit, "dirty": dirty}
    made.run |= {"started": f"2026-02-{number:02}T04:05:06+00:00"}
    made.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": built.DEVICE, "gpus": 1}
    made.test(built.TEST, samples_file="samples/row.json", format="e4m3fn", op="rowwise")
    written = made.write()
    (written / "samples").mkdir()
    (written / "samples" / "row.json").write_text(json.dumps(msgspec.to_builtins(now)))
    return written


def several(folder: Path, *slower: float, commits: bool = False) -> list[Path]:
    """Runs on one node, each with its factor on the candidate."""
    draw = random.Random(9)
    return [
        evidence(
            folder,
            built.run(draw, {"candidate": factor}),
            number,
            f"{number:02}".ljust(40, "f") if commits else COMMIT,
        )
        for number, factor in enumerate(slower, 1)
    ]


def checkout(folder: Path) -> Path:
    root = folder / "checkout"
    for name in ("baselines", "suites"):
        (root / name).mkdir(parents=True)
    return root


def test_two_runs_calibrate_a_row(tmp_path: Path) -> None:
    """Six launches: noise, a limit of three times it, and the smallest effect; the file then judges such a run PASS."""
    root = checkout(tmp_path)
    change, (row,) = calibrate.changes(root, H200, several(tmp_path, 1.0, 1.0))
    assert (row.launches, row.test) == (6, built.TEST)
    assert row.noise is not None
    assert row.limit == pytest.approx(max(0.03, 3 * row.noise))
    assert "smallest slow-down that it can show" in row.told
    assert change.loosened == []
    path = tmp_path / samples.PERF_FILE
    path.write_text(change.text)
    assert len(samples.load(path, "h200").rows) == 2


def test_one_run_is_no_calibration(tmp_path: Path) -> None:
    """Three launches are written, and the row is said not to be calibrated yet."""
    _, (row,) = calibrate.changes(checkout(tmp_path), H200, several(tmp_path, 1.0))
    assert row.noise is None
    assert "not calibrated yet" in row.told


def test_a_row_too_noisy_to_gate_is_listed(tmp_path: Path) -> None:
    """Runs that differ by 40 % leave nothing to gate with, in words."""
    _, (row,) = calibrate.changes(checkout(tmp_path), H200, several(tmp_path, 1.0, 1.4))
    assert "too noisy to gate" in row.told


def test_wider_limits_need_a_reason(tmp_path: Path) -> None:
    """New runs that scatter more widen the limit of a calibrated row: that is a loosening."""
    root = checkout(tmp_path)
    first, _ = calibrate.changes(root, H200, several(tmp_path / "a", 1.0, 1.0))
    first.path.parent.mkdir(parents=True)
    first.path.write_text(first.text)
    draw = random.Random(11)
    wild = [
        evidence(tmp_path / "b", built.run(draw, {"candidate": factor}), 9 + n) for n, factor in enumerate((1, 1.2))
    ]
    second, _ = calibrate.changes(root, H200, wild)
    assert len(second.loosened) == 1
    assert " limit 0.0" in second.loosened[0]


def test_what_is_no_calibration(tmp_path: Path) -> None:
    """Two commits, a dirty checkout, a run whose probe drifted, and evidence without samples are refused."""
    root, draw = checkout(tmp_path), random.Random(5)
    with pytest.raises(ConfigError, match="2 commits"):
        calibrate.changes(root, H200, several(tmp_path / "a", 1.0, 1.0, commits=True))
    dirty = evidence(tmp_path / "b", built.run(draw), dirty=True)
    with pytest.raises(ConfigError, match="local changes"):
        calibrate.changes(root, H200, [dirty])
    where = built.Machine(draw)
    drifted = [where.launch(n, slower={"probe": 1.0 if n == 1 else 1.3}) for n in (1, 2, 3)]
    with pytest.raises(ConfigError, match="the copy probe differs by"):
        calibrate.check(evidence(tmp_path / "c", built.samples(drifted)))
    calibrate.check(evidence(tmp_path / "d", built.run(draw)))
    with pytest.raises(MissingError, match="nothing to calibrate"):
        calibrate.changes(root, H200, [Built(tmp_path / "e", ("perf",)).write()])


def test_the_command_from_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fp8ci baseline calibrate --from A --from B`: writes, tells each row, and the gate then knows the row."""
    root = checkout(tmp_path)
    runs = several(tmp_path, 1.0, 1.0)
    sources = [word for folder in runs for word in ("--from", str(folder))]
    assert cli.main(["baseline", "calibrate", "--root", str(root), *sources]) == 0
    assert "smallest slow-down that it can show" in capsys.readouterr().out
    judgement = gate.judge(runs[0], root / "baselines")
    (result,) = [result for result in judgement.results if result.id == built.TEST]
    assert result.verdict is Verdict.PASS
    assert cli.main(["baseline", "lint", "--root", str(root)]) == 0


def test_a_cpu_is_not_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed is not measured on a CPU: exit 2, nothing runs."""
    assert cli.main(["baseline", "calibrate", "--platform", "cpu", "--root", str(checkout(tmp_path))]) == 2
    assert "a platform with a GPU" in capsys.readouterr().err


def test_lint_finds_values_of_another_platform(tmp_path: Path) -> None:
    """The launches of an H200 in the file of an H100 are copied values."""
    root = checkout(tmp_path)
    rows = built.recorded(random.Random(1))
    other = [msgspec.structs.replace(row, provenance=built.provenance(platform="h100")) for row in rows[:1]]
    for platform, mine in (("h100", other), ("h200", rows)):
        (root / "baselines" / platform).mkdir()
        (root / "baselines" / platform / samples.PERF_FILE).write_text(samples.encode(platform, mine))
    assert calibrate.lint(root)[0] == f"h200/{samples.PERF_FILE}: {built.CASE} holds the values of h100"


# History -----------------------------------------------------------------------------------------------------------


def test_a_change_is_near_its_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight runs, +15 % from the fifth on: one change point, at its commit, whatever the order of the folders."""
    runs = several(tmp_path, *[1.0] * 4, *[1.15] * 4, commits=True)
    (trend,) = history.of(runs[::-1])
    assert [point.commit[:2] for point in trend.points] == [f"{n:02}" for n in range(1, 9)]
    ((position, commit),) = [(one.position, one.commit) for one in trend.changes]
    assert (position, commit) == (4, "05".ljust(40, "f"))
    assert trend.changes[0].percent == pytest.approx(15, abs=6)
    assert cli.main(["history", *map(str, runs)]) == 0
    assert "% near commit 05ffffffffff" in capsys.readouterr().out


def test_nothing_changed(tmp_path: Path) -> None:
    """Noise alone has no change point."""
    (trend,) = history.of(several(tmp_path, *[1.0] * 8, commits=True))
    assert trend.changes == ()


def test_change_points() -> None:
    """Two steps are found in order; one odd run is none, since a side needs two."""
    steps = [0.0, 0.001, 0.0, 0.1, 0.101, 0.1, 0.3, 0.301]
    assert [position for position, _ in history.change_points(steps)] == [3, 6]
    assert history.change_points([0.0, 0.0, 0.0, 0.0, 0.0, 0.2]) == []
    assert history.change_points([0.0, 0.0, 0.2, 0.0, 0.0, 0.0]) == []


def test_history_without_rows(tmp_path: Path) -> None:
    """Folders without timed rows, and samples that are no times, are no history."""
    with pytest.raises(MissingError, match="timed row"):
        history.of([Built(tmp_path / "a", ("perf",)).write()])
    first = built.run(random.Random(1))
    bad = msgspec.structs.replace(first.launches[0], candidate=[math.nan] * 20)
    broken = msgspec.structs.replace(first, launches=[bad, *first.launches[1:]])
    with pytest.raises(MissingError, match="timed row"):
        history.of([evidence(tmp_path, broken)])


# The base of a comparison ------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_base_is_where_the_branch_began(tmp_path: Path) -> None:
    """Not what main holds today; its checkout is there while the run lasts, and gone afterwards."""
    git(tmp_path, "init", "-q", "-b", "main")
    for name, branch in (("one", None), ("two", "change"), ("three", "main")):
        if branch is not None:
            git(tmp_path, "checkout", "-q", *(["-b"] if branch == "change" else []), branch)
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", name)
    git(tmp_path, "checkout", "-q", "change")
    with against.base(tmp_path, "main") as environment:
        folder = Path(environment[against.VARIABLE])
        assert environment[against.COMMIT_VARIABLE] == git(tmp_path, "rev-parse", "HEAD~1")
        assert sorted(path.name for path in folder.iterdir() if path.name != ".git") == ["one"]
    assert not folder.exists()
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1
    with pytest.raises(UsageError, match="no revision"):
        against.merge_base(tmp_path, "nowhere")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--suite", "perf", "--", "-n", "2"], "the perf suite runs in one process"),
        (["--suite", "numerics", "--against", "main"], "--against is for the perf suite alone"),
        (["--against", "main"], "--against is for the perf suite alone"),
    ],
)
def test_usage(arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything runs: exit 2."""
    assert cli.main(["run", "--platform", "cpu", "--root", str(checkout(tmp_path)), *arguments]) == 2
    assert told in capsys.readouterr().err
