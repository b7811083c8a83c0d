"""The pytest plugin in real pytest processes: what it records however they end, and that it is silent elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import capabilities
from harness.journal import FILE_NAME
from harness.journal_reader import Journal
from suites.unit import tiny_checkout

CHECKOUT = Path(__file__).resolve().parents[2]
PREFIX = "numerics/test_a::"

PASS_KILL_PASS = """
    import os, signal
    def test_first(record_property):
        record_property("max_ulp", 2)
    def test_second():
        {end}
    def test_third():
        pass
"""


def run_pytest(
    root: Path, *options: str, plugin: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """pytest in a checkout, with our options; without the plugin it is blocked, as if it were not installed."""
    out = root / "out"
    known = root / "capabilities.json"
    known.write_text(capabilities.from_facts(tiny_checkout.FACTS).to_json(), encoding="utf-8")
    ours = ["--fp8-out", str(out), "--fp8-suite", "numerics", "--fp8-platform", "cpu", "--fp8-run-id", "r1"]
    ours += ["--fp8-capabilities", str(known)]
    load = ["-p", "harness.plugin"] if plugin else []
    argv = [
        sys.executable,
        "-m",
        "pytest",
        *load,
        "suites/numerics",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-q",
    ]
    environment = {
        **os.environ,
        # The plugin comes from this checkout, whether or not a distribution is installed.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(CHECKOUT),
        **(environment or {}),
    }
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    if any(option.startswith("-n") for option in options):
        argv += ["-p", "xdist"]
    return subprocess.run(
        [*argv, *(ours if plugin else []), *options],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def read(root: Path) -> Journal:
    return Journal.read(root / "out" / FILE_NAME)


def states(journal: Journal) -> dict[str, str]:
    return {test_id.removeprefix(PREFIX): record.state for test_id, record in journal.tests.items()}


def checkout(folder: Path, source: str) -> Path:
    return tiny_checkout.make(folder, {"numerics/test_a": source})


def test_outcomes_properties_and_messages(tmp_path: Path) -> None:
    """Each outcome arrives with its reason on one line, its traceback, its output and its properties."""
    root = checkout(
        tmp_path,
        """
        import pytest
        @pytest.mark.parametrize("case", [pytest.param(1, id="rowwise-a"), pytest.param(2, id="cast-b")])
        def test_case(case, record_property):
            record_property("max_ulp", case)
            print("printed", case)
            assert case == 1, "3 of 9 differ\\nfirst at (0, 1)"
        @pytest.mark.requires("fp8:fnuz")
        def test_fnuz(): pass
        @pytest.mark.requires("fp8:ocp", "triton>=3.6")
        def test_ocp(): pass
        @pytest.fixture
        def broken():
            yield
            raise RuntimeError("left a mess")
        def test_teardown(broken): pass
        @pytest.mark.xfail(reason="known", strict=True)
        def test_expected(): assert False
        """,
    )
    ended = run_pytest(root)
    told = read(root)
    assert ended.returncode == 1, ended.stdout
    assert states(told) == {
        "test_case[rowwise-a]": "passed",
        "test_case[cast-b]": "failed",
        "test_fnuz": "skipped",
        "test_ocp": "passed",
        "test_teardown": "failed",
        "test_expected": "skipped",
    }
    failed = told.tests[PREFIX + "test_case[cast-b]"]
    assert failed.message == "3 of 9 differ"
    assert "first at (0, 1)" in failed.detail
    assert "printed 2" in failed.detail
    assert failed.properties == {"max_ulp": 2}
    assert told.tests[PREFIX + "test_fnuz"].message == "requires fp8:fnuz; this is cpu with fp8:ocp"
    assert told.planned_skips == {PREFIX + "test_fnuz": "requires fp8:fnuz; this is cpu with fp8:ocp"}
    assert told.tests[PREFIX + "test_teardown"].failed_phase == "teardown"
    assert told.tests[PREFIX + "test_teardown"].message == "RuntimeError: left a mess"
    assert told.tests[PREFIX + "test_expected"].message == "expected failure: known"
    assert told.collected["numerics"] == list(told.tests)
    assert [(session.run_id, session.rc) for session in told.sessions] == [("r1", 1)]
    assert told.damage == []


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="sigkill"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, id="sigsegv"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, id="sigterm"),
        pytest.param("os.abort()", -signal.SIGABRT, id="abort"),
        pytest.param("os._exit(0)", 0, id="hard-exit-0"),
    ],
)
def test_a_process_that_dies_in_a_test(end: str, code: int, tmp_path: Path) -> None:
    """What had ended is kept as it ended, the running one is running, the rest never ran, and no session ended."""
    root = checkout(tmp_path, PASS_KILL_PASS.format(end=end))
    ended = run_pytest(root)
    assert ended.returncode == code
    told = read(root)
    assert states(told) == {"test_first": "passed", "test_second": "running", "test_third": "not-run"}
    assert told.tests[PREFIX + "test_first"].properties == {"max_ulp": 2}
    assert [session.rc for session in told.sessions] == [None]
    assert told.damage == []


def test_sigterm_prints_the_stacks(tmp_path: Path) -> None:
    """A deadline leaves in the log where every thread stood."""
    root = checkout(tmp_path, PASS_KILL_PASS.format(end="os.kill(os.getpid(), signal.SIGTERM)"))
    assert re.search(r"test_a\.py\", line \d+ in test_second", run_pytest(root).stderr)


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Under pytest-xdist the crash, its signal and its test are recorded; the other tests go on."""
    root = checkout(tmp_path, PASS_KILL_PASS.format(end="os.kill(os.getpid(), signal.SIGKILL)"))
    ended = run_pytest(root, "-n1")
    assert ended.returncode == 1
    told = read(root)
    assert states(told) == {"test_first": "passed", "test_second": "running", "test_third": "passed"}
    (crash,) = told.crashes
    assert (crash.id, crash.worker, crash.signal) == (PREFIX + "test_second", "gw0", "SIGKILL")
    assert told.tests[PREFIX + "test_first"].worker == "gw0"
    assert [session.rc for session in told.sessions] == [1]


def test_the_controller_is_killed(tmp_path: Path) -> None:
    """The controller dies in mid-suite: what it had recorded stays, and the journal has no torn line."""
    root = checkout(tmp_path, PASS_KILL_PASS.format(end="os.kill(os.getppid(), signal.SIGKILL)"))
    ended = run_pytest(root, "-n1")
    assert ended.returncode == -signal.SIGKILL
    told = read(root)
    assert states(told)["test_first"] == "passed"
    assert states(told)["test_second"] in ("running", "not-run")  # its start may have died with the controller
    assert states(told)["test_third"] == "not-run"
    assert [session.rc for session in told.sessions] == [None]
    assert told.damage == []


def test_a_worker_that_dies_while_collecting(tmp_path: Path) -> None:
    """pytest-xdist ends this with no test and no failure; the journal has the crash and its signal."""
    root = checkout(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\ndef test_first(): pass\n")
    ended = run_pytest(root, "-n1", "--max-worker-restart=0")
    told = read(root)
    assert ended.returncode != 0
    assert told.tests == {}
    assert [(crash.id, crash.signal) for crash in told.crashes] == [("", "SIGSEGV")]


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["alone", "xdist"])
def test_a_file_that_cannot_be_collected(options: Sequence[str], tmp_path: Path) -> None:
    """The file and the reason are in the journal, though no test can report them; the other file's tests run."""
    root = tiny_checkout.make(
        tmp_path, {"numerics/test_a": "def test_first(): pass\n", "numerics/test_b": "import not_there\n"}
    )
    ended = run_pytest(root, "--continue-on-collection-errors", *options)
    assert ended.returncode == 1
    told = read(root)
    (error,) = told.collect_errors
    assert error.path == "suites/numerics/test_b.py"
    assert error.message == "ModuleNotFoundError: No module named 'not_there'"
    assert states(told) == {"test_first": "passed"}


def test_a_file_that_skips_itself(tmp_path: Path) -> None:
    """pytest calls it `no tests` and exits 5; the journal says which file and why."""
    root = checkout(tmp_path, "import pytest\npytest.importorskip('not_there')\ndef test_first(): pass\n")
    assert run_pytest(root).returncode == 5
    told = read(root)
    assert told.collected == {"numerics": []}
    assert [record.path for record in told.collect_skips] == ["suites/numerics/test_a.py"]
    assert "could not import 'not_there'" in told.collect_skips[0].message


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["alone", "xdist"])
def test_a_property_that_is_no_plain_value(options: Sequence[str], tmp_path: Path) -> None:
    """It fails its own test by name, and costs no other test its result. Subclasses of numbers are made plain."""
    root = checkout(
        tmp_path,
        """
        class Metres(float): pass
        def test_first(record_property): record_property("x", object())
        def test_second(record_property): record_property("x", Metres(1.5))
        def test_third(record_property): record_property("x", float("nan"))
        """,
    )
    assert run_pytest(root, *options).returncode == 1
    told = read(root)
    assert states(told) == {"test_first": "failed", "test_second": "passed", "test_third": "passed"}
    assert told.tests[PREFIX + "test_first"].message.startswith("property 'x' is a object; expected str, int or float")
    assert told.tests[PREFIX + "test_second"].properties == {"x": 1.5}
    assert told.tests[PREFIX + "test_third"].properties == {"x": "nan"}


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["swallow-alone", "swallow-xdist"])
def test_a_plugin_that_swallows_failures(options: Sequence[str], tmp_path: Path) -> None:
    """A conftest that calls what raised passed: it failed, in words that say who lied. An xfail stays what it is."""
    root = checkout(
        tmp_path,
        """
        import pytest
        def test_first(): pass
        def test_second(): raise ValueError("lost")
        @pytest.mark.xfail
        def test_third(): assert False
        """,
    )
    (root / "suites/numerics/conftest.py").write_text(
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item):\n"
        "    report = yield\n    if report.failed: report.outcome, report.longrepr = 'passed', None\n"
        "    return report\n"
    )
    assert run_pytest(root, *options).returncode == 1
    told = read(root)
    assert states(told) == {"test_first": "passed", "test_second": "failed", "test_third": "skipped"}
    message = told.tests[PREFIX + "test_second"].message
    assert message.startswith("a plugin calls call passed, which raised ValueError: lost; expected the outcome")


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["late-alone", "late-xdist"])
@pytest.mark.parametrize("how", ["wrapper", "logreport", "skip"])
def test_a_plugin_that_has_the_last_word(how: str, options: Sequence[str], tmp_path: Path) -> None:
    """Around our own hook, after it, or by calling it skipped: what a phase raised is recorded all the same."""
    root = checkout(
        tmp_path,
        """
        import pytest, unittest
        def test_first(): pass
        def test_second(): raise ValueError("lost")
        def test_third(): pytest.skip("no")
        def test_fourth(): raise unittest.SkipTest("no")
        """,
    )
    change = {
        "wrapper": "@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_runtest_makereport(item):\n"
        "    report = yield\n    report.outcome, report.longrepr = 'passed', None\n    return report\n",
        "logreport": "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_logreport(report):\n"
        "    report.outcome, report.longrepr = 'passed', None\n",
        "skip": "@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item):\n    report = yield\n"
        "    if report.failed: report.outcome, report.longrepr = 'skipped', ('a.py', 1, 'Skipped: no GPU')\n"
        "    return report\n",
    }
    (root / "suites/numerics/conftest.py").write_text(f"import pytest\n{change[how]}")
    run_pytest(root, *options)
    told = read(root)
    skipped = "skipped" if how == "skip" else "failed"  # a skip that is called passed is as untrue
    assert states(told) == {
        "test_first": "passed",
        "test_second": "failed",
        "test_third": skipped,
        "test_fourth": skipped,
    }
    calls = "skipped" if how == "skip" else "passed"
    message = told.tests[PREFIX + "test_second"].message
    assert message.startswith(f"a plugin calls call {calls}, which raised ValueError: lost; expected the outcome")


def test_deselected_under_xdist(tmp_path: Path) -> None:
    """Workers deselect, and only the controller writes: the count arrives when they end; without it, it is unknown."""
    root = checkout(tmp_path, "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    assert run_pytest(root, "-n1", "-k", "test_b").returncode == 0
    assert (read(root).deselected, read(root).uncounted) == ({"numerics": 2}, set())
    (root / "out" / FILE_NAME).unlink()
    assert run_pytest(root, "-n1", "-k", "none").returncode == 5
    assert (read(root).deselected, read(root).uncounted) == ({"numerics": 3}, set())
    (root / "out" / FILE_NAME).unlink()
    (root / "suites/numerics/test_a.py").write_text("import os\ndef test_a(): os._exit(1)\ndef test_b(): pass\n")
    run_pytest(root, "-n1", "--max-worker-restart=0")
    assert (read(root).deselected, read(root).uncounted) == ({}, {"numerics"})


def test_case_selection(tmp_path: Path) -> None:
    """Only matching cases run; how many were left out is recorded."""
    root = checkout(
        tmp_path,
        """
        import pytest
        @pytest.mark.parametrize("case", [pytest.param(i, id=i) for i in ("rowwise-a", "rowwise-b[1]", "cast-a")])
        def test_case(case): pass
        def test_rowwise_whole(): pass
        def test_other(): pass
        """,
    )
    assert run_pytest(root, "--fp8-case", "rowwise*").returncode == 0
    told = read(root)
    assert list(states(told)) == ["test_case[rowwise-a]", "test_case[rowwise-b[1]]", "test_rowwise_whole"]
    assert told.deselected == {"numerics": 2}


def test_selection_by_whole_ids(tmp_path: Path) -> None:
    """A whole id selects its test, and no other file is imported for it; a suite that it is not of selects nothing."""
    files = {"numerics/test_a": "def test_first(): pass\ndef test_second(): pass", "numerics/test_b": "1 / 0"}
    root = tiny_checkout.make(tmp_path, files)
    assert run_pytest(root, "--fp8-case", f"{PREFIX}test_second").returncode == 0
    told = read(root)
    assert states(told) == {"test_second": "passed"}
    assert (told.collect_errors, told.deselected) == ([], {"numerics": 1})
    (root / "suites/numerics/test_b.py").unlink()
    (root / "out" / FILE_NAME).unlink()
    assert run_pytest(root, "--fp8-case", "loss/test_c::test_second").returncode == 5
    assert read(root).deselected == {"numerics": 2}


def test_a_requirement_that_is_none(tmp_path: Path) -> None:
    """A typing mistake stops the session instead of removing the test."""
    root = checkout(tmp_path, "import pytest\n@pytest.mark.requires('fp8:fnux')\ndef test_first(): pass\n")
    ended = run_pytest(root)
    assert ended.returncode == 4
    assert "test_first: requirement 'fp8:fnux' has no known value; expected one of fnuz, ocp" in ended.stderr


def test_options_that_belong_together(tmp_path: Path) -> None:
    """Evidence without a run id could not be told from stale evidence."""
    root = checkout(tmp_path, "def test_first(): pass\n")
    ended = run_pytest(root, "--fp8-out", "out", plugin=False)
    assert ended.returncode == 4  # an unknown option where the plugin is not loaded
    ended = run_pytest(root, "--fp8-run-id", "")
    assert ended.returncode == 4
    assert "--fp8-out is given without --fp8-run-id" in ended.stderr


def test_a_cache_folder_a_worker(tmp_path: Path) -> None:
    """Workers and the lone process compile into folders of their own, set before any test module is imported."""
    root = checkout(
        tmp_path,
        """
        import os
        AT_IMPORT = dict(os.environ)
        def test_first(record_property):
            record_property("triton", AT_IMPORT["TRITON_CACHE_DIR"])
            record_property("inductor", AT_IMPORT["TORCHINDUCTOR_CACHE_DIR"])
        """,
    )
    folders = {"triton": tmp_path / "t", "inductor": tmp_path / "i"}
    cache = {"TRITON_CACHE_DIR": str(folders["triton"]), "TORCHINDUCTOR_CACHE_DIR": str(folders["inductor"])}
    run_pytest(root, environment=cache)
    assert read(root).tests[PREFIX + "test_first"].properties == {k: str(path) for k, path in folders.items()}
    run_pytest(root, "-n1", environment=cache)
    assert read(root).tests[PREFIX + "test_first"].properties == {k: str(path / "gw0") for k, path in folders.items()}


UNRELATED = """
    import pytest
    def test_passes(record_property):
        record_property("anything", [1, 2])
    def test_fails():
        print("text")
        assert 1 == 2
    @pytest.mark.skip(reason="why")
    def test_skips(): pass
    @pytest.mark.xfail
    def test_expected(): assert False
"""


def test_an_unrelated_suite_is_left_alone(tmp_path: Path) -> None:
    """Without --fp8-out: the same output, exit code and JUnit, with and without the plugin, and no file more."""
    root = checkout(tmp_path, UNRELATED)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="ascii")

    def outcome(*options: str) -> tuple[int, str, str, str, list[str]]:
        ended = run_pytest(root, *options, "-v", "-rA", f"--junit-xml={root}/x.xml", plugin=False)
        report = (root / "x.xml").read_text(encoding="utf-8")
        (root / "x.xml").unlink()
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if "__pycache__" not in path.parts)
        return (ended.returncode, _timeless(ended.stdout), ended.stderr, _timeless(report), files)

    without, with_plugin = outcome(), outcome("-p", "harness.plugin")
    assert with_plugin == without
    assert without[0] == 1


def _timeless(text: str) -> str:
    text = re.sub(r'(time|timestamp|hostname)="[^"]*"', "", text)
    return re.sub(r"in \d+\.\d+s", "", text)
