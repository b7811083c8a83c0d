"""`execute` leaves an evidence folder that tells what happened, whatever ended the run. The deaths are real."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness import platforms, progress, run
from harness.errors import DiskError, InfraError, InterruptedRun, UsageError
from harness.executor import Command, Ended
from harness.journal import FILE_NAME
from harness.journal_reader import Journal, JournalTail
from suites.unit import tiny_checkout

CHECKOUT = Path(__file__).resolve().parents[2]
CPU = platforms.PLATFORMS["cpu"]
# The plugin of this checkout and no other: pytest starts in a third of the time.
BARE = {"PYTHONPATH": str(CHECKOUT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture(autouse=True)
def _device_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "ask_device", lambda *_: dict(tiny_checkout.FACTS))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def request(root: Path, **options: Any) -> run.RunRequest:
    return run.RunRequest(
        **{
            "root": root,
            "platform": CPU,
            "platform_reason": "named",
            "suites": ("numerics",),
            "out": root / "out",
            "progress": False,
            "pytest_args": ("-p", "harness.plugin"),
            "env_overrides": BARE,
            "cores": 1,
            **options,
        }
    )


def read(out: Path) -> tuple[dict[str, Any], Journal]:
    return json.loads((out / "run.json").read_text(encoding="utf-8")), Journal.read(out / FILE_NAME)


def states(told: Journal) -> dict[str, str]:
    return {test_id.partition("::")[2]: record.state for test_id, record in told.tests.items()}


THREE = """
    import os, signal, time
    def test_first(): pass
    def test_second(): {end}
    def test_third(): pass
"""


def checkout(folder: Path, end: str = "pass") -> Path:
    return tiny_checkout.make(folder, {"numerics/test_a": THREE.format(end=end)})


def test_triton_cache_is_kept_and_never_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next run finds what this one compiled; a run beside it, and one without a home, get a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with run.triton_cache() as first:
        (Path(first) / "compiled").touch()
        with run.triton_cache() as beside:
            assert beside != first
            assert list(Path(beside).iterdir()) == []
        assert not Path(beside).exists()
    with run.triton_cache() as second:
        assert second == first
        assert (Path(second) / "compiled").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with run.triton_cache() as elsewhere:
        assert elsewhere != first


def test_a_run_leaves_its_evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """run.json, journal, log and what to judge with; two suites side by side in one journal."""
    for inherited in ("GITHUB_SHA", *platforms.NEVER_SET):  # of whoever runs this test: tox sets a hash seed
        monkeypatch.delenv(inherited, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    root = checkout(tmp_path)
    tiny_checkout.make(tmp_path, {"codegen/test_c": "def test_c(): pass\n"}, ["numerics/test_a::test_first"])
    (root / "baselines" / "gfx942").mkdir()
    (root / "baselines" / "gfx942" / "codegen.json").write_text("{}", encoding="ascii")
    (root / "baselines" / "h100").mkdir()
    (root / "baselines" / "h100" / "loss.json").write_text("{}", encoding="ascii")
    out = run.execute(request(root, suites=("numerics", "codegen"), cores=2, policy="main"))
    described, told = read(out)
    assert states(told) == dict.fromkeys(["test_first", "test_second", "test_third", "test_c"], "passed")
    assert told.damage == []
    assert {(process.suite, process.rc, process.ended) for process in told.processes} == {
        ("numerics", 0, True),
        ("codegen", 0, True),
    }
    assert told.run_ids == {described["run_id"]}
    assert described["platform"] == "cpu"
    assert described["platform_reason"] == "named"
    assert described["suites"] == ["numerics", "codegen"]
    assert described["policy"] == "main"
    assert described["versions"]["torch"] == "2.13.0+cpu"
    assert described["commit"] is None  # no git here
    assert described["ignored_environment"] == ["PYTEST_ADDOPTS"]
    assert described["finished"] >= described["started"]
    assert {job["lane"] for job in described["jobs"]} == {0, 1}
    copies = {str(path.relative_to(out / "judged-with")) for path in (out / "judged-with").rglob("*") if path.is_file()}
    assert copies == {"cpu/manifest.txt", "gfx942/codegen.json"}
    assert "3 passed" in (out / "logs" / "numerics.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("end", "rc", "by_signal"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", None, "SIGKILL", id="sigkill"),
        pytest.param("os._exit(0)", 0, None, id="hard-exit-0"),
    ],
)
def test_a_test_process_that_dies(end: str, rc: int | None, by_signal: str | None, tmp_path: Path) -> None:
    """How the process ended is beside what its tests had said."""
    _, told = read(run.execute(request(checkout(tmp_path, end))))
    assert states(told) == {"test_first": "passed", "test_second": "running", "test_third": "not-run"}
    (process,) = told.processes
    assert (process.rc, process.signal, process.killed_by) == (rc, by_signal, None)
    assert told.damage == []


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("time.sleep(60)", id="sleeps"),
        pytest.param("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", id="ignores-sigterm"),
        # A loop in C that never gives the interpreter lock back, as a hung kernel launch does.
        pytest.param("import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", id="hangs-in-native-code"),
    ],
)
def test_a_deadline(end: str, tmp_path: Path) -> None:
    """A test that never ends is ended, and the journal says by whom."""
    began = time.monotonic()
    _, told = read(run.execute(request(checkout(tmp_path, end), deadline=6.0)))
    assert time.monotonic() - began < 20
    assert states(told)["test_first"] == "passed"
    assert states(told)["test_second"] == "running"
    assert told.processes[0].killed_by == "deadline"
    assert told.processes[0].signal in ("SIGTERM", "SIGKILL")


def test_a_suite_that_collects_nothing(tmp_path: Path) -> None:
    """A folder without tests and a folder that is not there: recorded as pytest ended, with what it said."""
    root = tiny_checkout.make(tmp_path, {"numerics/nothing": ""})
    _, told = read(run.execute(request(root, suites=("numerics", "loss"))))
    assert {process.suite: process.rc for process in told.processes} == {"numerics": 5, "loss": 4}
    assert told.collected == {"numerics": [], "loss": []}
    assert "suites/loss" in (root / "out" / "logs" / "loss.log").read_text(encoding="utf-8")


def test_a_broken_file_costs_only_its_own_tests(tmp_path: Path) -> None:
    """The others run; the file is named."""
    root = checkout(tmp_path)
    tiny_checkout.make(tmp_path, {"numerics/test_b": "import not_there\n"})
    _, told = read(run.execute(request(root)))
    assert set(states(told).values()) == {"passed"}
    assert [record.path for record in told.collect_errors] == ["suites/numerics/test_b.py"]
    assert told.processes[0].rc == 1


RUNNING = '"event":"start","suite":"numerics","id":"numerics/test_a::test_second"'
DRIVER = """
import sys
from pathlib import Path
from harness import platforms, run
from suites.unit import tiny_checkout
platforms.ask_device = lambda *_: dict(tiny_checkout.FACTS)
root = Path(sys.argv[1])
out = run.execute(run.RunRequest(root, platforms.PLATFORMS["cpu"], "named", ("numerics",), out=root / "out",
                                 pytest_args=("-p", "harness.plugin"), cores=1))
print("done", out)
"""


def driven(root: Path) -> subprocess.Popen[str]:
    """A run in a process of its own, its test in mid-sleep."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(root)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **BARE},
    )
    until = time.monotonic() + 30
    while time.monotonic() < until:
        path = root / "out" / FILE_NAME
        if path.exists() and RUNNING in path.read_text(encoding="ascii"):
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the test never started: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "cancelled-job"])
def test_an_interrupted_run(number: signal.Signals, tmp_path: Path) -> None:
    """The children stop, and the folder says what had happened and that it was stopped."""
    root = checkout(tmp_path, "time.sleep(60)")
    process = driven(root)
    process.send_signal(number)
    output, errors = process.communicate(timeout=15)
    assert process.returncode == 0, errors
    assert output.startswith("done")
    described, told = read(root / "out")
    assert described["interrupted"] is True
    assert states(told) == {"test_first": "passed", "test_second": "running", "test_third": "not-run"}
    assert (told.processes[0].killed_by, told.processes[0].signal) == ("interrupt", "SIGTERM")
    assert "ended by us (interrupt)" in errors
    assert re.search(r"\[1/3\] passed .* numerics/test_a::test_first", errors)


def test_the_harness_itself_is_killed(tmp_path: Path) -> None:
    """What there is can still be read: run.json without an end, a process without an end."""
    root = checkout(tmp_path, "time.sleep(20)")
    process = driven(root)
    pid = Journal.read(root / "out" / FILE_NAME).sessions[0].pid
    process.kill()
    process.communicate(timeout=15)
    os.killpg(pid, signal.SIGKILL)  # nobody else will
    described, told = read(root / "out")
    assert described["finished"] is None
    assert not told.processes[0].ended
    assert states(told)["test_first"] == "passed"


def test_an_interrupt_before_the_first_test(tmp_path: Path) -> None:
    """There is nothing to judge, so it is an error of its own."""

    class Never:
        def run(self, command: Command, **_: object) -> Ended:
            raise AssertionError("nothing must be started")

    root, before = checkout(tmp_path), signal.getsignal(signal.SIGINT)

    def interrupting(*_: object) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return dict(tiny_checkout.FACTS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "ask_device", interrupting)
        with pytest.raises(InterruptedRun):
            run.execute(request(root), Never())
    assert signal.getsignal(signal.SIGINT) is before


def test_an_executor_that_cannot_start(tmp_path: Path) -> None:
    """The other lane still runs to its end, and the error is the run's."""

    class Broken:
        def run(self, command: Command, *, cancelled: threading.Event, **_: object) -> Ended:
            if "suites/numerics" in command.argv:
                raise InfraError("no engine")
            return Ended(5, None, None, 0.0, 1)

    root = checkout(tmp_path)
    with pytest.raises(InfraError, match="no engine"):
        run.execute(request(root, suites=("numerics", "codegen"), cores=2), Broken())
    _, told = read(root / "out")
    assert {process.suite: process.ended for process in told.processes} == {"numerics": False, "codegen": True}


def test_no_case_matches(tmp_path: Path) -> None:
    """A glob that selects nothing is a mistake of the caller, not a green run."""
    with pytest.raises(UsageError, match="no case of numerics matches 'rowwize"):
        run.execute(request(checkout(tmp_path), case="rowwize*"))
    assert states(read(run.execute(request(checkout(tmp_path), case="fir*")))[1]) == {"test_first": "passed"}


def test_a_case_that_vanished_is_no_usage_error(tmp_path: Path) -> None:
    """The manifest knows tests of this case, none is collected: the run ends with evidence, for the gate to judge."""
    root = tiny_checkout.make(tmp_path, {"numerics/test_a": "def test_b(): pass\n"}, ["numerics/test_c::test_gone"])
    described, told = read(run.execute(request(root, case="gone")))
    assert described["case"] == "gone"
    assert told.collected == {"numerics": []}


def test_stale_evidence_goes_and_strange_files_stay(tmp_path: Path) -> None:
    """An older run's results are removed before anything can fail; what is no evidence is not overwritten."""
    out = tmp_path / "out"
    for name in ("losses/a.json", "isa/a.s", "logs/numerics.log", "judged-with/x", "junit.xml", "run.json", "mine.txt",
                 "launches/time.json"):  # fmt: skip
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old", encoding="ascii")
    run.prepare_folder(out)
    assert {str(path.relative_to(out)) for path in out.rglob("*")} == {"mine.txt", "logs", "journal.jsonl"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine", encoding="ascii")
    with pytest.raises(UsageError, match="is not empty and no evidence"):
        run.prepare_folder(other)
    with pytest.raises(UsageError, match="is a file"):
        run.prepare_folder(other / "thesis.txt")


def test_a_platform_that_is_not_this_machine(tmp_path: Path) -> None:
    """Evidence of an MI300X cannot be made on another device."""
    root = checkout(tmp_path)
    with pytest.raises(UsageError, match="platform mi300x is asked for and this machine has x86_64"):
        run.execute(request(root, platform=platforms.PLATFORMS["mi300x"]))
    assert not (root / "out").exists()  # a run that never was: `fp8ci gate evidence/*` must not find it
    with pytest.raises(UsageError, match="no suite 'numeric'"):
        run.execute(request(root, suites=("numeric",)))


def test_plain_progress(tmp_path: Path) -> None:
    """One line a finished test with its count, a heartbeat that names the running one, how the process ended."""
    stream = io.StringIO()
    path = tmp_path / "j"
    job = run.plan.Job("numerics", (), {}, 1, 1, 60.0, 2.0, 0.5)
    watcher = progress.Watcher(JournalTail(path), ((job,),))
    plain = progress.Plain(watcher, stream, heartbeat=0.0)

    def say(event: str, **fields: object) -> None:
        with path.open("a", encoding="ascii") as journal:
            journal.write(json.dumps({"event": event, "suite": "numerics", **fields}) + "\n")

    say("process-start", attempt=1, argv=[])
    say("collected", ids=["numerics/test_a::test_a", "numerics/test_a::test_b"])
    say("start", id="numerics/test_a::test_a")
    plain.update()
    assert re.fullmatch(r"\.\.\. \d+ s: numerics 0 of 2, in numerics/test_a::test_a for 0 s\n", stream.getvalue())
    counts = watcher.counts["numerics"]
    assert (counts.expected(time.monotonic()), counts.doing()) == (3.0, "test_a::test_a")
    say("phase", id="numerics/test_a::test_a", phase="call", outcome="failed", seconds=0.5, message="3 of 9 differ")
    say("phase", id="numerics/test_a::test_a", phase="teardown", outcome="passed", seconds=0.0)
    say("worker-crash", id="numerics/test_a::test_b", worker="gw0", signal="SIGSEGV", message="gone")
    say("process-end", attempt=1, rc=1, signal=None, killed_by=None, seconds=1.0)
    plain.close()
    assert counts.doing() == "done"
    lines = stream.getvalue().splitlines()[1:4]
    assert lines == [
        "[1/2] failed     0.50 s  numerics/test_a::test_a: 3 of 9 differ",
        "[2/2] crashed    0.00 s  numerics/test_a::test_b: SIGSEGV",
        "numerics ended: exit 1, 1.0 s",
    ]
    say("process-end", attempt=1, rc=5, signal=None, killed_by=None, seconds=1.0)  # no exit code of ours
    plain.close()
    assert "numerics ended: exit 5 (pytest had no test to run), 1.0 s\n" in stream.getvalue()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second is refused before it removes anything; the first goes on to its end."""
    root = checkout(tmp_path, "time.sleep(2)")
    process = driven(root)
    with pytest.raises(UsageError, match="another run writes to"):
        run.execute(request(root))
    assert process.communicate(timeout=20)[0].startswith("done")
    assert set(states(read(root / "out")[1]).values()) == {"passed"}


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    """The lane's error is the run's, not a traceback of its thread."""

    class Full:
        def run(self, command: Command, **_: object) -> Ended:
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space left"):
        run.execute(request(checkout(tmp_path)), Full())


def commit(root: Path) -> None:
    """The checkout as one commit, whose git ignores what Python leaves beside sources."""
    (root / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n", encoding="ascii")
    names = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*names, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)


def test_a_run_does_not_make_its_checkout_dirty(tmp_path: Path) -> None:
    """Its folder lies in the checkout and git does not ignore it; what else is there does make it dirty."""
    root = checkout(tmp_path)
    commit(root)
    for number in (1, 2):  # the second time the folder is there already
        described, _ = read(run.execute(request(root, out=root / "proofs" / "one")))
        assert described["dirty"] is False, number
    described, _ = read(run.execute(request(root, out=root / "two", beside=(root / "proofs" / "one",))))
    assert described["dirty"] is False
    described, _ = read(run.execute(request(root, out=root / "three")))
    assert described["dirty"] is True


OTHER = {
    "untracked": ("suites/numerics/test_b.py", True),
    "untracked-in-an-evidence-folder": ("out/test_b.py", True),
    "beside-an-evidence-folder": ("outer/run.json", True),
    "not-ascii": ("suites/\u00e9\udcff.py", True),
    "changed": ("suites/numerics/test_a.py", True),
    "committed-evidence": ("out/losses/a.json", True),
    "its-own-file": ("out/junit.xml", False),
    "its-own-folder": ("out/samples/time-a.json", False),
}


@pytest.mark.parametrize(("name", "dirty"), OTHER.values(), ids=[f"run-{name}" for name in OTHER])
def test_a_dirty_checkout_stays_dirty(name: str, dirty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what git does not know, and only the names that a run writes, are left out of the run's folder."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "status.showUntrackedFiles")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "no")
    root = checkout(tmp_path / "real")
    (tmp_path / "link").symlink_to(root)
    (root / "out/losses").mkdir(parents=True)
    (root / "out/losses/a.json").write_text("{}", encoding="ascii")
    commit(root)
    sha, clean = run.checkout_state(root, (tmp_path / "link/out",))
    assert (len(str(sha)), clean) == (40, False)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("changed = 1\n", encoding="ascii")
    assert run.checkout_state(root, (tmp_path / "link/out",)) == (sha, dirty)


def test_the_commit_of_an_enclosing_repository_is_not_the_copys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy without .git, in a folder that another repository ignores, has not added, or keeps for copies, is outside
    git: GITHUB_SHA names its commit. A checkout that is a committed folder of a larger repository is that repository's.
    """
    outer = checkout(tmp_path / "outer")
    (outer / ".gitignore").write_text("/copy/\n/kept/*\n!/kept/README\n", encoding="ascii")
    (outer / "kept").mkdir()
    (outer / "kept/README").write_text("copies\n", encoding="ascii")
    inner = checkout(outer / "inner")
    commit(outer)
    sha, dirty = run.checkout_state(inner)
    assert (len(str(sha)), dirty) == (40, False)
    for name in ("copy", "added-by-nobody", "kept"):
        monkeypatch.setenv("GITHUB_SHA", "f" * 40)
        copy = checkout(outer / name)
        assert run.checkout_state(copy) == ("f" * 40, None)
        monkeypatch.delenv("GITHUB_SHA")
        assert run.checkout_state(copy) == (None, None)


def test_a_run_that_never_was_leaves_no_folder(tmp_path: Path) -> None:
    """Nor the folders that were made to hold it; one that was there before stays, empty or not."""
    root = checkout(tmp_path)
    (root / "here").mkdir()
    for out in (root / "evidence" / "all" / "run-1", root / "here" / "run-1"):
        with pytest.raises(UsageError, match="platform mi300x is asked for"):
            run.execute(request(root, platform=platforms.PLATFORMS["mi300x"], out=out))
    assert not (root / "evidence").exists()
    assert list((root / "here").iterdir()) == []
