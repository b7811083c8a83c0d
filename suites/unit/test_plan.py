"""What will run: jobs, their lanes, workers and environment; and every id's fate before anything runs."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from harness import plan, platforms
from harness.errors import UsageError
from harness.local import LocalExecutor
from suites.unit import tiny_checkout

CPU = platforms.PLATFORMS["cpu"]
MANY = [f"{suite}/test_a::test_b[rowwise-{number}]" for suite in CPU.suites for number in range(200)]


def jobs(root: Path, suites: tuple[str, ...], **options: object) -> list[list[plan.Job]]:
    laid = plan.lanes(root, CPU, suites, **{"case": None, "options": ("--x",), "cores": 2, **options})  # type: ignore[arg-type]
    return [list(lane) for lane in laid]


def test_suites_share_the_cores(tmp_path: Path) -> None:
    """Two lanes on two cores, the suites in their order within a lane, each exactly once, one thread a process."""
    laid = jobs(tiny_checkout.make(tmp_path, {}, MANY), CPU.suites)
    assert len(laid) == 2
    assert sorted(job.suite for lane in laid for job in lane) == ["codegen", "loss", "numerics"]
    for lane in laid:
        assert [job.suite for job in lane] == [suite for suite in CPU.suites if suite in {job.suite for job in lane}]
        for job in lane:
            assert job.threads == 1
            assert job.workers <= 2


def test_the_longer_suite_gets_the_workers(tmp_path: Path) -> None:
    """Beside a short one it may use every core, so that none stands still when the short one has ended."""
    ids = [*(item for item in MANY if item.startswith("numerics")), "codegen/test_a::test_b[rowwise-1]"]
    laid = jobs(tiny_checkout.make(tmp_path, {}, ids), ("numerics", "codegen"))
    assert {job.suite: job.workers for lane in laid for job in lane} == {"numerics": 2, "codegen": 1}


def test_long_suites_side_by_side_take_turns(tmp_path: Path) -> None:
    """Three long suites on two cores have two workers each: whichever ends early, no core stands still."""
    ids = [f"{suite}/test_a::test_b[case-{n}]" for suite in CPU.suites for n in range(400)]
    laid = jobs(tiny_checkout.make(tmp_path, {}, ids), CPU.suites)
    assert {job.suite: job.workers for lane in laid for job in lane} == dict.fromkeys(CPU.suites, 2)
    wide = jobs(tmp_path, CPU.suites, cores=64)
    assert sum(job.workers for lane in wide for job in lane) <= 64 + 2 * len(CPU.suites)


def test_nothing_to_do_is_laid_out_too(tmp_path: Path) -> None:
    """A case that the manifest does not know: every suite is asked, on one process each."""
    laid = jobs(tiny_checkout.make(tmp_path, {}, MANY), CPU.suites, case="nothing*", cores=16)
    assert [[(job.suite, job.workers) for job in lane] for lane in laid] == [
        [("codegen", 1)],
        [("loss", 1)],
        [("numerics", 1)],
    ]


def test_one_suite_takes_every_core(tmp_path: Path) -> None:
    """A long suite alone gets a worker a core; a short selection starts no workers and gets the cores as threads."""
    root = tiny_checkout.make(tmp_path, {}, MANY)
    (((job,),)) = jobs(root, ("numerics",))
    assert (job.workers, job.threads, job.environment["OMP_NUM_THREADS"]) == (2, 1, "1")
    assert job.argv[job.argv.index("-n") + 1] == "2"
    ((short,),) = jobs(root, ("numerics",), case="rowwise-7")
    assert (short.workers, short.threads, "-n" in short.argv) == (1, 2, False)
    ((loss,),) = jobs(root, ("loss",))
    assert (loss.workers, loss.threads) == (2, 1)


def test_no_manifest_yet(tmp_path: Path) -> None:
    """A whole suite counts as long, a selection as short."""
    root = tiny_checkout.make(tmp_path, {})
    assert jobs(root, ("numerics",))[0][0].workers == 2
    assert jobs(root, ("numerics",), case="rowwise*")[0][0].workers == 1


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each suite's interpreter setting holds whatever the caller's shell says; overrides win over everything."""
    for name, value in {
        "TRITON_INTERPRET": "1",
        "PYTHONHASHSEED": "0",
        "PYTEST_ADDOPTS": "-x",
        "OMP_NUM_THREADS": "64",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }.items():
        monkeypatch.setenv(name, value)
    root = tiny_checkout.make(tmp_path, {}, MANY)
    by_suite = {job.suite: job for lane in jobs(root, CPU.suites, environment={"A": "b"}) for job in lane}
    assert by_suite["numerics"].environment["TRITON_INTERPRET"] == "1"
    for suite in ("codegen", "loss"):
        assert "TRITON_INTERPRET" not in by_suite[suite].environment
    for job in by_suite.values():
        assert job.environment["OMP_NUM_THREADS"] == "1"
        assert job.environment["TRITON_DEFAULT_FP_FUSION"] == "0"
        assert job.environment["CUDA_VISIBLE_DEVICES"] == "-1"
        assert job.environment["A"] == "b"
        assert not {"PYTHONHASHSEED", "PYTEST_ADDOPTS"} & job.environment.keys()
    (((alone,),)) = jobs(root, ("numerics",), environment={"OMP_NUM_THREADS": "7"})
    assert (alone.environment["OMP_NUM_THREADS"], alone.workers) == ("7", 1)
    (((shared,),)) = jobs(root, ("numerics",), environment={"OMP_NUM_THREADS": "2"}, cores=8)
    assert (shared.environment["OMP_NUM_THREADS"], shared.workers) == ("2", 4)


def test_rows_of_the_night(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every suite of a full run is told so, and of no other: what the shell holds is taken away."""
    root = tiny_checkout.make(tmp_path, {}, MANY)
    monkeypatch.setenv(platforms.FULL_VARIABLE, "1")
    for full, told in ((False, None), (True, "1")):
        laid = [job for lane in jobs(root, CPU.suites, full=full) for job in lane]
        assert len(laid) == len(CPU.suites)
        assert {job.environment.get("FP8CI_FULL") for job in laid} == {told}


def test_the_callers_workers_win(tmp_path: Path) -> None:
    """-n on the command line is not given twice."""
    root = tiny_checkout.make(tmp_path, {}, MANY)
    (((job,),)) = jobs(root, ("numerics",), pytest_args=("-n0", "-x"))
    assert job.argv[-2:] == ("-n0", "-x")
    assert "-n" not in job.argv


def test_gpus_run_one_suite_at_a_time(tmp_path: Path) -> None:
    """One lane; one worker a GPU, each told which."""
    root = tiny_checkout.make(tmp_path, {}, MANY)
    suites = ("numerics", "codegen")
    laid = plan.lanes(root, platforms.PLATFORMS["mi300x"], suites, case=None, options=(), gpus=4, cores=8)
    assert [[job.suite for job in lane] for lane in laid] == [["numerics", "codegen"]]
    assert laid[0][0].workers == 4
    assert laid[0][0].environment[platforms.DEVICES_VARIABLE] == "HIP_VISIBLE_DEVICES=0,1,2,3"
    assert "TRITON_INTERPRET" not in laid[0][0].environment


def test_the_short_table_of_speed_is_the_perf_suites(tmp_path: Path) -> None:
    """Its rows go to that suite's process alone; the long one, and named cases, need no word there."""
    root = tiny_checkout.make(tmp_path, {}, MANY)

    def told(speed: platforms.SpeedTable, case: str | None = None) -> dict[str, bool]:
        suites = ("numerics", "perf")
        laid = plan.lanes(root, platforms.PLATFORMS["mi300x"], suites, case=case, options=(), speed=speed)
        return {job.suite: platforms.SHORT_SPEED in job.argv for lane in laid for job in lane}

    assert told("short") == {"numerics": False, "perf": True}
    assert told("long") == told("short", "rowwise*") == {"numerics": False, "perf": False}


def test_find_root(tmp_path: Path) -> None:
    """The nearest folder upwards that is a checkout; none is a usage error."""
    root = tiny_checkout.make(tmp_path / "checkout", {"numerics/test_a": ""})
    assert plan.find_root(root / "suites" / "numerics") == root
    with pytest.raises(UsageError, match="is in no checkout"):
        plan.find_root(tmp_path)
    with pytest.raises(UsageError, match="has no baselines/"):
        plan.check_root(tmp_path)


WAIVER = """
[[waiver]]
id = "numerics/test_a::test_case[cast-a]"
platform = "cpu"
reason = "known"
issue = "https://github.com/o/r/issues/1"
owner = "octocat"
expires = {date}
"""


def test_the_fate_of_every_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run, new, skipped with its reason, waived, missing; what cannot be collected is a problem. Nothing runs."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_: dict(tiny_checkout.FACTS))
    ids = ["test_case[rowwise-a]", "test_case[cast-a]", "test_fnuz", "test_gone"]
    root = tiny_checkout.make(
        tmp_path,
        {
            "numerics/test_a": """
                import pytest
                @pytest.mark.parametrize("case", [pytest.param(i, id=i) for i in ("rowwise-a", "cast-a", "new-a")])
                def test_case(case): open("ran", "w")
                @pytest.mark.requires("fp8:fnuz")
                def test_fnuz(): open("ran", "w")
                """,
            "numerics/test_b": "import not_there",
        },
        [f"numerics/test_a::{name}" for name in ids],
    )
    date = datetime.date.today() + datetime.timedelta(days=30)
    (root / "baselines" / "waivers.toml").write_text(WAIVER.format(date=date), encoding="utf-8")
    told = plan.collect(root, CPU, "named", suites=("numerics", "loss"), executor=LocalExecutor())
    assert [(entry.id.partition("::")[2], entry.fate) for entry in told.entries] == [
        ("test_case[rowwise-a]", "run"),
        ("test_case[cast-a]", "waived"),
        ("test_case[new-a]", "run"),
        ("test_fnuz", "skip"),
        ("test_gone", "missing"),
    ]
    reasons = [entry.reason for entry in told.entries]
    assert reasons[0] == ""
    assert reasons[1].startswith(f"until {date}: known")
    assert reasons[2] == "not in the manifest yet"
    assert reasons[3] == "requires fp8:fnuz; this is cpu with fp8:ocp; the manifest says that it must run here"
    assert told.problems == (
        "suites/numerics/test_b.py: ModuleNotFoundError: No module named 'not_there'",
        "suite loss collected nothing",
    )
    assert not (root / "ran").exists()

    date = datetime.date.today() - datetime.timedelta(days=2)
    (root / "baselines" / "waivers.toml").write_text(WAIVER.format(date=date), encoding="utf-8")
    told = plan.collect(root, CPU, "named", suites=("numerics",), case="cast-a", executor=LocalExecutor())
    assert [(entry.fate, entry.reason) for entry in told.entries] == [
        ("run", f"its waiver expired on {date}: known (https://github.com/o/r/issues/1)")
    ]
