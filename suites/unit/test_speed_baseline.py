"""Calibration, history and the base of a comparison: what is written, what is refused, what is told of each row."""

from __future__ import annotations

import json
import math
import random
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import against, calibrate, cli, gate, history, plan, platforms, record, run, samples
from harness.errors import VERDICTS, ConfigError, MissingError, UsageError, Verdict
from harness.manifest import write as write_manifest
from harness.samples import Samples
from suites.unit import built_samples as built
from suites.unit.built_evidence import Built

H200 = platforms.get("h200")
COMMIT = "b" * 40


def evidence(
    folder: Path,
    now: Samples,
    number: int = 1,
    commit: str = COMMIT,
    dirty: bool | None = False,
    test: str = built.TEST,
    manifest: Sequence[str] = (),
    running: str = "",
    killed: bool = False,
    **told: Any,
) -> Path:
    """Evidence of one row on an H200, judged with a manifest where there is one; `told`: more of run.json.

    `killed` by SIGKILL, while the test `running` ran or none.
    """
    made = Built(folder / f"run-{number}", ("perf",))
    made.run |= {"platform": "h200", "arch": "sm_90", "commit": commit, "dirty": dirty}
    made.run |= {"started": f"2026-02-{number:02}T04:05:06+00:00"}
    made.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": built.DEVICE, "gpus": 1}
    made.run |= told
    made.session_ids["perf"] = made.run["run_id"]
    made.test(test, samples_file="samples/row.json", format="e4m3fn", op=now.op)
    if running:
        made.test(running, "running")
    if killed:
        made.process("perf", rc=None, signal="SIGKILL")
        made.file("launches/time.json", "{}")
    if manifest:
        write_manifest(made.baselines / "h200" / "manifest.txt", manifest)
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


@pytest.mark.parametrize("changed", [{"probe": "bf16"}, {"reference": "another chain"}], ids=["probe", "reference"])
def test_runs_that_the_gate_would_not_compare_are_replaced(changed: dict[str, str], tmp_path: Path) -> None:
    """Another probe or reference is another configuration: that takes a reason, and noise is of the new runs alone."""
    root, draw = checkout(tmp_path), random.Random(9)
    first, _ = calibrate.changes(root, H200, several(tmp_path / "a", 1.0, 1.0))
    first.path.parent.mkdir(parents=True)
    first.path.write_text(first.text)
    other = evidence(tmp_path / "b", built.run(draw, **changed), 9)
    second, (row,) = calibrate.changes(root, H200, [other])
    assert second.loosened == [f"{built.TEST}: another configuration in place of 2 runs"]
    assert (row.launches, row.noise) == (3, None)


def test_what_is_no_calibration(tmp_path: Path) -> None:
    """Two commits, a dirty checkout, a drifting probe, a throttled launch, and evidence without samples are refused."""
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
    hot = [where.launch(n, throttled=[n == 1] * built.BLOCKS) for n in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"every block of a launch was throttled.*--without"):
        calibrate.changes(root, H200, [evidence(tmp_path / "f", built.samples(hot))])
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


def test_speed_is_calibrated_and_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`record` writes none and names the command that does, as does what lacks a baseline. A row of speed that nothing
    can be said of keeps no manifest from being written, and no curve; a red test beside it does.
    """
    root = checkout(tmp_path)
    where = built.Machine(random.Random(5))
    drifted = built.samples([where.launch(n, slower={"probe": 1.0 if n == 1 else 1.3}) for n in (1, 2, 3)])
    noisy = evidence(tmp_path / "a", drifted)
    assert gate.judge(noisy).counts["INCONCLUSIVE"] == 1
    command = ["baseline", "record", "--root", str(root), "--from", str(noisy)]
    assert cli.main(command) == 3
    assert "`fp8ci baseline calibrate`" in capsys.readouterr().err
    assert cli.main([*command, "--manifest"]) == 0
    assert built.TEST in (root / "baselines/h200/manifest.txt").read_text()
    red = Built(tmp_path / "b", ("perf",)).test(built.TEST, "failed", "wrong").write()
    with pytest.raises(ConfigError, match="no ground for a baseline"):
        record.check(red)
    for verdict in (Verdict.NO_BASELINE, Verdict.STALE_BASELINE, Verdict.UNCALIBRATED):
        assert "of speed: `calibrate`" in VERDICTS[verdict].advice


TRAINER = "trainer-llama3-8b-l4-rowwise-e4m3fn"
TRAINER_TEST = f"perf/test_speed::test_trainer[{TRAINER}]"


def test_the_rows_of_several_folders_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of half of the rows each, as two GPUs make them side by side, a trainer's among them: all are recorded.

    Each half is then judged by itself, and lacks nothing of the other one.
    """
    root, draw = checkout(tmp_path), random.Random(7)
    halves = []
    for number in (1, 2):
        halves.append(evidence(tmp_path / "a", built.run(draw), number, case="rowwise*"))
        step = built.run(draw, case=TRAINER, op="trainer", work=0, probe="bf16")
        halves.append(evidence(tmp_path / "b", step, number, test=TRAINER_TEST, case="trainer*"))
    sources = [word for folder in halves for word in ("--from", str(folder))]
    assert cli.main(["baseline", "calibrate", "--root", str(root), *sources]) == 0
    told = capsys.readouterr().out
    assert "4 runs of 2 rows written, 4 runs in all" in told
    assert f"test_trainer[{TRAINER}]: " in told
    assert {row.test for row in samples.load(root / "baselines/h200/perf.json", "h200").rows} == {
        built.TEST, TRAINER_TEST,
    }  # fmt: skip
    write_manifest(root / "baselines/h200/manifest.txt", [built.TEST, TRAINER_TEST])
    for half, test in zip(halves, (built.TEST, TRAINER_TEST), strict=False):
        results = gate.judge(half, root / "baselines").results
        assert [(result.id, result.verdict) for result in results] == [(test, Verdict.PASS)]


def test_one_bad_row_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with what leaves it out; `--case` takes some rows of evidence, and one run is not given twice."""
    root, draw = checkout(tmp_path), random.Random(7)
    drifted = [built.Machine(draw, levels={"probe": 1 + 0.2 * n}).launch(n + 1) for n in range(3)]
    step = built.samples(drifted, case=TRAINER, op="trainer", work=0, probe="bf16")
    good, bad = evidence(tmp_path / "a", built.run(draw)), evidence(tmp_path / "b", step, test=TRAINER_TEST)
    base = ["baseline", "calibrate", "--root", str(root), "--from", str(good)]
    both = [*base, "--from", str(bad)]
    assert cli.main(both) == 2
    assert f"--without {TRAINER_TEST!r}" in capsys.readouterr().err
    for how in (["--without", TRAINER_TEST], ["--without", "trainer-*"], ["--case", "rowwise-*"]):
        assert cli.main([*both, *how]) == 0
        assert re.search("1 runs of 1 rows written(, 1 of them known before)?, 1 runs in all", capsys.readouterr().out)
    assert cli.main([*base, "--from", str(good)]) == 2
    err = capsys.readouterr().err
    assert f"{built.TEST} was measured twice by the run that started at 2026-02-01" in err
    assert "give each folder once" in err
    assert "leave" not in err


@pytest.mark.parametrize("running", ["", TRAINER_TEST], ids=["between-tests", "in-a-row-left-out"])
@pytest.mark.parametrize(
    "selected",
    [
        calibrate.EVERY,
        calibrate.Selected(case="rowwise*"),
        calibrate.Selected(without="perf/suite::process,trainer*"),
        calibrate.Selected(case="rowwise*", without="process"),
    ],
    ids=["every", "case", "without", "both"],
)
def test_a_killed_session_is_of_every_row(selected: calibrate.Selected, running: str, tmp_path: Path) -> None:
    """No selection of rows drops it, nothing offers that, and the message says where what it had timed is."""
    folder = evidence(tmp_path, built.run(random.Random(5)), running=running, killed=True)
    with pytest.raises(ConfigError, match="killed from outside by SIGKILL") as refused:
        calibrate.check(folder, selected)
    assert "--without" not in str(refused.value)
    assert f"what it had timed is in {folder}/launches/, to be read and never recorded" in str(refused.value)


def test_what_no_choice_of_rows_leaves_out_is_said_first(tmp_path: Path) -> None:
    """A row that was killed is worse than a module that cannot be collected, and the advice for it would not do."""
    made = Built(tmp_path, ("perf",)).test(built.TEST, "failed", "wrong").process("perf", rc=1)
    made.extra_events.append(
        ("collect-error", {"suite": "perf", "path": "suites/perf/test_x.py", "message": "m", "detail": "d"})
    )
    made.extra_events.append(
        ("worker-crash", {"suite": "perf", "worker": "gw0", "id": built.TEST, "message": "m", "signal": "SIGKILL"})
    )
    folder = made.write()
    assert gate.judge(folder).worst_first[0].id == built.TEST
    with pytest.raises(ConfigError, match="first perf/test_x::collection: FAIL") as refused:
        calibrate.check(folder)
    assert "--without" not in str(refused.value)


def test_findings_about_more_than_a_test_are_always_selected() -> None:
    """`--without` names tests: a suite, a process, a worker and a module that cannot be collected are none."""
    for finding in ("perf/suite::process", "perf/suite::worker-gw0", "perf/test_speed::collection", "perf/<process>"):
        assert calibrate.Selected(case="rowwise-*", without=finding)(finding)
        assert calibrate.Selected(without=f"*,{finding.rpartition('::')[2]}")(finding)
    assert not calibrate.Selected(without="*")(built.TEST)
    assert not calibrate.Selected(without="x::y*")("perf/test_a::test_a[x::y]")


def test_two_sessions_of_one_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs, one clock: both count. A copy of a run is that run; what was recorded before is not recorded anew."""
    root, draw = checkout(tmp_path), random.Random(7)
    one, other = (evidence(tmp_path / name, built.run(draw)) for name in "ab")
    again = shutil.copytree(one, tmp_path / "again")
    command = ["baseline", "calibrate", "--root", str(root), "--from", str(one)]
    assert cli.main([*command, "--from", str(again)]) == 2
    assert "was measured twice" in capsys.readouterr().err
    for before in ("", ", 2 of them known before"):
        assert cli.main([*command, "--from", str(other)]) == 0
        assert f"2 runs of 1 rows written{before}, 2 runs in all" in capsys.readouterr().out
    rows = samples.load(root / "baselines/h200/perf.json", "h200").rows
    assert len(rows) == 2
    assert len({(row.provenance.when, row.provenance.commit) for row in rows}) == 1


def test_what_is_chosen_of_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A glob that leaves no row, and a platform that is not the evidence's, are named; nothing is written."""
    root, folder = checkout(tmp_path), evidence(tmp_path / "a", built.run(random.Random(7)))
    command = ["baseline", "calibrate", "--root", str(root), "--from", str(folder)]
    for options, told in (
        (["--case", "nosuch"], "no row of these runs is left by --case 'nosuch'"),
        (["--without", "*"], "no row of these runs is left by --without '*'"),
        (["--platform", "mi300x"], "--platform is mi300x and the evidence is of h200"),
    ):
        assert cli.main([*command, *options]) != 0
        assert told in capsys.readouterr().err
    assert not list((root / "baselines").rglob("perf.json"))


@pytest.mark.parametrize("dirty", [False, None], ids=["clean-checkout", "unknown-checkout"])
def test_a_row_says_what_is_known_of_its_checkout(dirty: bool | None, tmp_path: Path) -> None:
    """A copy without .git is neither clean nor dirty: null, in the file too."""
    folder = evidence(tmp_path / "a", built.run(random.Random(7)), dirty=dirty)
    change, _ = calibrate.changes(checkout(tmp_path), H200, [folder])
    assert f'"dirty":{json.dumps(dirty)}' in change.text


OTHER_TEST = built.TEST.replace("m32768", "m16640")


def test_a_platform_without_recorded_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UNCALIBRATED, rows and manifest alike: exit 0, and nowhere a pass. Other suites are asked for no row of speed."""
    built.uncalibrate(monkeypatch)
    numerics = "numerics/test_a::test_a[x]"
    judgement = gate.judge(evidence(tmp_path / "a", built.run(random.Random(1)), manifest=[numerics]))
    assert {result.verdict for result in judgement.results} == {Verdict.UNCALIBRATED}
    assert {result.id for result in judgement.results} == {built.TEST, "perf/suite::manifest"}
    assert judgement.exit_code == 0
    made = Built(tmp_path / "b", ("numerics",)).test(numerics)
    made.run |= {"platform": "h200", "arch": "sm_90"}
    made.run["capabilities"] |= {"platform": "h200", "vendor": "nvidia", "device_name": built.DEVICE, "gpus": 1}
    write_manifest(made.baselines / "h200" / "manifest.txt", [numerics, built.TEST])
    judgement = gate.judge(made.write())
    assert [(result.id, result.verdict) for result in judgement.results] == [(numerics, Verdict.PASS)]


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({"speed": "short"}, set()),
        ({"speed": "long"}, {OTHER_TEST}),
        ({}, {OTHER_TEST}),
        ({"speed": "short", "policy": "main"}, {"perf/suite::rows"}),
        ({"speed": "short", "pytest_args": ["-k", "time"]}, {"perf/suite::deselected"}),
    ],
    ids=["short", "long", "unsaid", "on-main", "more-arguments"],
)
def test_the_short_table_of_speed(told: dict[str, Any], missing: set[str], tmp_path: Path) -> None:
    """A pull request may leave the other rows out, main may not, and no argument of pytest's may hide in it."""
    folder = evidence(tmp_path, built.run(random.Random(1)), manifest=[built.TEST, OTHER_TEST], **told)
    journal = folder / "journal.jsonl"
    if told.get("speed") == "short":
        journal.write_text(journal.read_text().replace('"deselected":0', '"deselected":1'))
        assert '"deselected":1' in journal.read_text()
    judgement = gate.judge(folder, whole=True)
    found = {result.id for result in judgement.results if result.verdict is Verdict.MISSING}
    assert found - {"numerics/suite::selection"} == missing


@pytest.mark.parametrize("asked", ["short", "long"], ids=["asked-short", "asked-long"])
@pytest.mark.parametrize("speed", ["short", "long"], ids=["speed-short", "speed-long"])
def test_the_short_table_is_what_its_process_was_asked_for(
    speed: str, asked: platforms.SpeedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--speed short` reaches pytest as a selection of cases: the same one that run.json means by it, and no other."""
    built.uncalibrate(monkeypatch)
    folder = evidence(tmp_path, built.run(random.Random(1)), speed=speed)
    told = json.loads((folder / "run.json").read_text())
    options = ["--fp8-platform", "h200", "--fp8-run-id", told["run_id"], "--fp8-out", "x"]
    (((job,),)) = plan.lanes(checkout(tmp_path), H200, ("perf",), case=None, options=options, speed=asked)
    journal = folder / "journal.jsonl"
    journal.write_text(journal.read_text().replace('["pytest"]', json.dumps(job.argv)))
    found = {result.verdict for result in gate.judge(folder).results}
    assert found == {Verdict.UNCALIBRATED, *([] if speed == asked else [Verdict.DISAGREE])}


def test_a_cpu_is_not_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed is not measured on a CPU: exit 2, nothing runs."""
    assert cli.main(["baseline", "calibrate", "--platform", "cpu", "--root", str(checkout(tmp_path))]) == 2
    assert "a platform with a GPU" in capsys.readouterr().err


@dataclass
class Runs:
    """In place of running the suite: each run leaves good evidence, with what git then says of the checkout."""

    scratch: Path
    folders: list[Path] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def __call__(self, request: run.RunRequest) -> Path:
        out = request.out
        assert out is not None
        self.folders.append(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "journal.jsonl").touch()  # as a run's folder is when git is asked
        commit, dirty = run.checkout_state(request.root, (out, *request.beside))
        told: dict[str, Any] = {"commit": str(commit), "dirty": bool(dirty), "run_id": secrets.token_hex(4)}
        told["manifest"] = ["numerics/test_a::test_a[x]"]
        made = evidence(self.scratch / str(len(self.folders)), built.run(self.draw), len(self.folders), **told)
        shutil.rmtree(out)
        return made.rename(out)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs(tmp_path / "scratch")
    monkeypatch.setattr(run, "execute", found)
    return found


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A checkout in git."""
    root = checkout(tmp_path)
    (root / "suites" / "a.py").write_text("a = 1\n")
    (root / ".gitignore").write_text("/evidence/\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        git(root, *words)
    return root


def test_a_checkout_is_looked_at_before_the_first_run(
    committed: Path, runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local changes, and a commit that nobody knows, cost no run."""
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    command = ["baseline", "calibrate", "--platform", "h200", "--root", str(committed)]
    (committed / "suites" / "b.py").touch()
    assert cli.main(command) == 2
    assert "has local changes" in capsys.readouterr().err
    (committed / "suites" / "b.py").unlink()
    shutil.rmtree(committed / ".git")
    assert cli.main(command) == 2
    assert "does not say its commit" in capsys.readouterr().err
    assert runs.folders == []
    monkeypatch.setenv("GITHUB_SHA", COMMIT)
    assert cli.main([*command, "--runs", "1"]) == 0


def test_a_checkout_that_becomes_dirty_ends_it(tmp_path: Path) -> None:
    """After the run before which it was changed, not after all of them."""
    folder = evidence(tmp_path, built.run(random.Random(1)), dirty=True)
    made: list[str] = []

    def execute(name: str) -> Path:
        made.append(name)
        return folder

    with pytest.raises(ConfigError, match="run-1 has local changes"):
        calibrate.run_all(4, execute, lambda _: None)
    assert made == ["run-1"]


@pytest.mark.parametrize("out", ["", "proof/here"], ids=["default", "in-the-checkout"])
def test_the_runs_of_a_calibration(
    out: str, committed: Path, runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None makes the next one's checkout dirty; `gate` and `history` take what `evidence/*` then is."""
    built.uncalibrate(monkeypatch)
    monkeypatch.chdir(committed)
    command = ["baseline", "calibrate", "--platform", "h200", "--runs", "2", "--root", str(committed)]
    assert cli.main([*command, *(["--out", out] if out else [])]) == 0
    assert "2 runs of 1 rows written" in capsys.readouterr().out
    names = [(committed / folder).relative_to(committed).as_posix() for folder in runs.folders]
    expected = f"{out}/run-" if out else r"evidence/calibrate-h200-\d{8}T\d{6}Z-[0-9a-f]{8}-run-"
    assert len(names) == 2
    assert all(re.fullmatch(f"{expected}{number}", name) for number, name in enumerate(names, 1)), names
    folders = sorted(str(path) for path in committed.glob(f"{out or 'evidence'}/*"))
    assert [Path(folder).name for folder in folders] == [Path(name).name for name in names]
    assert cli.main(["gate", *folders]) == 0
    assert cli.main(["history", *folders]) == 0
    if out:  # given again, say after an interrupt: what lies there is no change either
        shutil.rmtree(committed / "baselines")
        (committed / "baselines").mkdir()
        assert cli.main([*command, "--out", out]) == 0
        assert len(runs.folders) == 4


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
        (["--speed", "short", "--case", "x"], "--speed short and --case exclude each other"),
    ],
)
def test_usage(arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything runs: exit 2."""
    assert cli.main(["run", "--platform", "cpu", "--root", str(checkout(tmp_path)), *arguments]) == 2
    assert told in capsys.readouterr().err
