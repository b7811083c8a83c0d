"""The self-test goes red for a fault that nobody sees, and for everything that only looks as if somebody had.

Its judgement is tried on a tree of two files, where one run has every way for a fault to end. The faults of this
checkout are only looked at: that each applies, and names tests that exist (`fp8ci selftest` tries them).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from harness import cli, manifest, platforms, selftest
from harness.errors import ConfigError, UsageError, Verdict
from harness.selftest import Fault, Outcome, SelfTest
from suites.unit import tiny_checkout

ROOT = Path(__file__).resolve().parents[2]
CPU = platforms.PLATFORMS["cpu"]

# --- a tree of its own ------------------------------------------------------------------------------------------------

PRODUCT = """\
MAXIMUM = 240
MINIMUM = -240
SECONDS = 0
SKIPPED = False
"""

TESTS = """
    import sys, time
    from pathlib import Path
    import pytest

    PRODUCT = {}
    exec((Path(__file__).parents[2] / "fp8stack/product.py").read_text(), PRODUCT)

    @pytest.mark.skipif(PRODUCT["SKIPPED"], reason="the product says so")
    def test_maximum():
        time.sleep(PRODUCT["SECONDS"])
        assert PRODUCT["MAXIMUM"] == 240

    @pytest.mark.skipif(PRODUCT["SKIPPED"], reason="the product says so")
    def test_unlisted():
        assert True

    def test_other():
        assert True

    def test_red():
        assert False, "red with and without"
"""

MAXIMUM, OTHER, RED, UNLISTED = (f"numerics/test_tiny::test_{name}" for name in ("maximum", "other", "red", "unlisted"))


def patch(old: str, new: str) -> str:
    """A patch of one line of the product."""
    lines = PRODUCT.splitlines()
    place = lines.index(old)
    before, after = lines[:place], lines[place + 1 :]
    body = [*(f" {line}" for line in before), f"-{old}", f"+{new}", *(f" {line}" for line in after)]
    head = ["# A fault.", "--- a/fp8stack/product.py", "+++ b/fp8stack/product.py", "@@ -1,4 +1,4 @@"]
    return "\n".join([*head, *body]) + "\n"


# name -> its patch, the tests that must see it, what becomes of it, words of its message
FAULTS: dict[str, tuple[str, tuple[str, ...], Verdict, str]] = {
    "seen": (patch("MAXIMUM = 240", "MAXIMUM = 448"), (MAXIMUM,), Verdict.PASS, ""),
    "seen-by-one-of-two": (
        patch("MAXIMUM = 240", "MAXIMUM = 224"),
        (MAXIMUM, OTHER),
        Verdict.FAIL,
        f"not seen by {OTHER}",
    ),
    "invisible": (patch("MINIMUM = -240", "MINIMUM = 0"), (MAXIMUM,), Verdict.FAIL, f"not seen by {MAXIMUM}"),
    "aged": (
        patch("MAXIMUM = 240", "MAXIMUM = 448").replace("MINIMUM = -240", "MINIMUM = -448"),
        (MAXIMUM,),
        Verdict.FAIL,
        "the patch no longer applies: patch failed: fp8stack/product.py:1",
    ),
    "no-patch": ("# Nothing.\n", (MAXIMUM,), Verdict.FAIL, "the patch no longer applies: "),
    "raises": (
        patch("MAXIMUM = 240", "del MAXIMUM"),
        (MAXIMUM,),
        Verdict.MISSING,
        "did not fail by an assertion: MISSING: in baselines/cpu/manifest.txt, and not collected",
    ),
    "raises-in-the-test": (
        patch("SECONDS = 0", "SECONDS = 'none'"),
        (MAXIMUM,),
        Verdict.FAIL,
        f"{MAXIMUM} did not fail by an assertion: FAIL: TypeError: ",
    ),
    "skips": (patch("SKIPPED = False", "SKIPPED = True"), (MAXIMUM,), Verdict.MISSING, "was skipped"),
    "skips-what-need-not-run": (
        patch("SKIPPED = False", "SKIPPED = True"),
        (UNLISTED,),
        Verdict.MISSING,
        "did not fail by an assertion: SKIP: the product says so",
    ),
    "hangs": (patch("SECONDS = 0", "SECONDS = 60"), (MAXIMUM,), Verdict.TIMEOUT, "did not end within its deadline"),
    "red-without-it": (
        patch("MAXIMUM = 240", "MAXIMUM = 448"),
        (MAXIMUM, RED),
        Verdict.FAIL,
        f"{RED} must pass without the fault, and is FAIL: red with and without",
    ),
    "elsewhere": (patch("MAXIMUM = 240", "MAXIMUM = 448"), (MAXIMUM,), Verdict.SKIP, "requires 8 gpus; this is cpu"),
}


def make(root: Path, names: tuple[str, ...] = tuple(FAULTS), **changed: Any) -> Path:
    """A checkout with some of FAULTS; `changed` replaces fields of every row."""
    tiny_checkout.make(root, {"numerics/test_tiny": TESTS}, [MAXIMUM, OTHER, RED])
    (root / "fp8stack").mkdir()
    (root / "fp8stack" / "product.py").write_text(PRODUCT, encoding="ascii")
    folder = root / selftest.FOLDER
    folder.mkdir()
    rows = []
    for name in names:
        text, red, _, _ = FAULTS[name]
        (folder / f"{name}.patch").write_text(text, encoding="ascii")
        row = {"name": name, "claim": "the maximum is 240", "archs": ["cpu"], "red": list(red), **changed}
        if name == "elsewhere":
            row["requires"] = ["gpus>=8"]
        rows.append("[[fault]]\n" + "".join(f"{key} = {value!r}\n" for key, value in row.items()))
    (folder / selftest.TABLE).write_text("\n".join(rows), encoding="ascii")
    return root


def contents(root: Path) -> dict[str, str]:
    """Every file of a tree."""
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that answers at once, forks of nothing but pytest, and temporary files where they can be counted."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_: dict(tiny_checkout.FACTS))
    monkeypatch.setattr(selftest, "SLOW_IMPORTS", ("pytest",))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))


# The plugin of this checkout and no other: pytest starts in a third of the time.
BARE: dict[str, Any] = {
    "pytest_args": ("-p", "harness.plugin"),
    "environment": {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
}


def test_every_way_for_a_fault_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PASS for the one that its tests see, something red for each of the others; nothing of it reaches the checkout."""
    monkeypatch.setattr(selftest, "DEADLINE", 1.5)
    root = make(tmp_path / "checkout")
    before = contents(root)
    said: list[str] = []
    tested = selftest.execute(root, CPU, out=tmp_path / "evidence", say=said.append, **BARE)
    assert [outcome.fault.name for outcome in tested.outcomes] == list(FAULTS)
    for outcome in tested.outcomes:
        _, _, verdict, words = FAULTS[outcome.fault.name]
        assert (outcome.verdict, words in outcome.message) == (verdict, True), outcome
    assert (tested.detected, tested.tried, tested.exit_code) == (1, len(FAULTS) - 1, 3)
    assert sorted(said) == sorted(
        f"{place}/{tested.tried} {outcome.fault.name}: {selftest.told(outcome)}"
        for place, outcome in enumerate((o for o in tested.outcomes if o.verdict is not Verdict.SKIP), start=1)
    )
    # What was judged is what `fp8ci run` writes.
    assert 'type="FAIL"' in (tmp_path / "evidence/seen/junit.xml").read_text()
    assert cli.main(["gate", str(tmp_path / "evidence/seen")]) == 1
    assert MAXIMUM in capsys.readouterr().out
    assert contents(root) == before
    assert not list((tmp_path / "temporary").iterdir())


def test_only(tmp_path: Path) -> None:
    """One fault by its name, and exit 0 when it is seen; a name that is none is said to be none."""
    root = make(tmp_path / "checkout")
    tested = selftest.execute(root, CPU, only=("seen",), **BARE)
    assert ([o.fault.name for o in tested.outcomes], tested.detected, tested.exit_code) == (["seen"], 1, 0)
    with pytest.raises(UsageError, match=r"'sean'; expected names such as seen; suites/mutations/faults\.toml") as no:
        selftest.execute(root, CPU, only=("sean",), **BARE)
    assert "of evidence: shift-one-step, drop-a-step, " in str(no.value)
    with pytest.raises(UsageError, match="expected names such as nan-in-the-curve;"):
        selftest.execute(root, CPU, only=("nan-in-curve",), **BARE)


def test_a_name_that_two_faults_have() -> None:
    """`byte-stores` is made wrong in evidence, and is a fault of code: asked for, both are tried."""
    names = ("byte-stores", "spills", "killed", "nobody")
    assert selftest.named(ROOT, names) == (("byte-stores", "killed"), ("byte-stores", "spills", "nobody"))


def test_nothing_tried_is_not_success(tmp_path: Path) -> None:
    """A machine that can see no fault has proved nothing: exit 3."""
    tested = selftest.execute(make(tmp_path / "checkout", ("elsewhere",)), CPU, **BARE)
    assert ([o.verdict for o in tested.outcomes], tested.tried, tested.exit_code) == ([Verdict.SKIP], 0, 3)


def test_a_suite_that_does_not_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault whose tests are of a suite that the platform has not is skipped, with the reason."""
    facts = {**tiny_checkout.FACTS, "vendor": "nvidia", "device_name": "NVIDIA H200"}
    monkeypatch.setattr(platforms, "ask_device", lambda *_: facts)
    root = make(tmp_path / "checkout", ("seen",), red=["unit/test_tiny::test_maximum"])
    (outcome,) = selftest.execute(root, platforms.PLATFORMS["h200"], **BARE).outcomes
    assert outcome.verdict is Verdict.SKIP
    assert outcome.message == "its tests are of suite unit, which does not run on h200"


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C stops the tests that run and tries no further fault: exit 130, no file left, the checkout as it was."""
    root = make(tmp_path / "checkout", ("hangs", "seen"))
    before = contents(root)
    ready = threading.Event()

    def interrupt() -> None:
        journal = tmp_path / "evidence" / "hangs" / "journal.jsonl"
        while not ready.is_set() and not (journal.exists() and '"start"' in journal.read_text()):
            ready.wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("harness.plan.usable_cores", lambda: 1)
        try:
            tested = selftest.execute(root, CPU, out=tmp_path / "evidence", **BARE)
        finally:
            ready.set()
            thread.join()
    assert [outcome.verdict for outcome in tested.outcomes] == [Verdict.INTERRUPTED] * 2
    assert tested.exit_code == 130
    assert tested.seconds < 30
    assert contents(root) == before
    assert not list((tmp_path / "temporary").iterdir())


# --- the table and the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"claims": "x"}, "unknown field `claims`", id="selftest-field"),
        pytest.param({"archs": "cpu"}, "Expected `array`, got `str`", id="selftest-kind"),
        pytest.param({"claim": " "}, "seen has an empty claim", id="selftest-claim"),
        pytest.param(
            {"archs": ["gfx9"]}, r"seen has archs \['gfx9'\]; expected some of cpu, gfx942", id="selftest-arch"
        ),
        pytest.param({"archs": []}, r"seen has archs \[\]", id="selftest-no-arch"),
        pytest.param({"red": []}, "seen names no test", id="selftest-no-test"),
        pytest.param({"red": [MAXIMUM, MAXIMUM]}, "seen names a test twice", id="selftest-test-twice"),
        pytest.param({"red": ["test_maximum"]}, "'test_maximum' is not a test id", id="selftest-no-id"),
        pytest.param({"requires": ["gpu"]}, "'gpu' is not a requirement", id="selftest-requirement"),
        pytest.param({"layer": "tail"}, "seen has a layer and no test of it", id="selftest-layer"),
        pytest.param({"red": ["loss/test_a::test_b"]}, "seen names a test of the loss suite", id="selftest-no-layer"),
        pytest.param({"name": "other"}, "the patches beside it differ in other, seen", id="selftest-no-patch"),
    ],
)
def test_malformed_table(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Each is one line that names the file, the fault and what is wrong; exit 2."""
    with pytest.raises(ConfigError, match=message) as caught:
        selftest.load(make(tmp_path / "checkout", ("seen",), **changed))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        pytest.param("digests: gradient digest of w (norm) at step 1", Verdict.PASS, id="selftest-its-layer"),
        pytest.param("windows: loss first leaves its band at step 1", Verdict.FAIL, id="selftest-another-layer"),
        pytest.param("digests are missing", Verdict.FAIL, id="selftest-a-word-like-it"),
    ],
)
def test_layer(message: str, verdict: Verdict) -> None:
    """A loss test that is red at another layer than the one listed has seen something else; other suites have none."""
    seen = [selftest.Seen("loss/test_a::test_b", Verdict.FAIL, message), selftest.Seen(MAXIMUM, Verdict.FAIL, "wrong")]
    found, told = selftest._verdict(seen, "digests")
    assert found is verdict
    assert told == ("" if verdict is Verdict.PASS else f"seen by loss/test_a::test_b, not at layer digests: {message}")


def test_unreadable_table(tmp_path: Path) -> None:
    """A table that is gone, or no TOML, or lacks a patch's row."""
    root = make(tmp_path / "checkout", ("seen", "aged"))
    path = root / selftest.FOLDER / selftest.TABLE
    text = path.read_text()
    path.write_text(text[: text.rindex("[[fault]]")])
    with pytest.raises(ConfigError, match="differ in aged; expected one row a patch"):
        selftest.load(root)
    path.write_text("[[fault]")
    with pytest.raises(ConfigError, match="is not TOML"):
        selftest.load(root)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        selftest.load(root)


def test_a_patch_beside_a_repository(tmp_path: Path) -> None:
    """A temporary folder inside of a repository: git would skip the paths outside of it and say that all is well."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = tmp_path / "temporary" / "tree"
    shutil.copytree(make(tmp_path / "checkout", ("seen",)), tree)
    path = selftest.patch_of(tree, "seen")
    head = (
        "diff --git a/fp8stack/product.py b/fp8stack/product.py\n"  # as git writes it, and takes it for a repository's
    )
    path.write_text(path.read_text().replace("---", f"{head}---", 1))
    assert selftest.apply(path, tree, check=True) == ""
    assert (tree / "fp8stack/product.py").read_text() == PRODUCT
    assert selftest.apply(path, tree) == ""
    assert (tree / "fp8stack/product.py").read_text() == PRODUCT.replace("MAXIMUM = 240", "MAXIMUM = 448")


@pytest.mark.parametrize("as_json", [pytest.param(False, id="selftest-text"), pytest.param(True, id="selftest-json")])
def test_command(as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Data on stdout, talk on stderr, the exit code of the worst fault."""
    fault = Fault(name="maximum", claim="it is 240", archs=("cpu",), red=(MAXIMUM, OTHER))
    seen = (selftest.Seen(MAXIMUM, Verdict.FAIL, "448"), selftest.Seen(OTHER, Verdict.FAIL, "449"))
    outcomes = (
        Outcome(fault, Verdict.PASS, "", seen, 1.0),
        Outcome(fault, Verdict.FAIL, f"not seen by {OTHER}", seen[:1], 2.0),
        Outcome(fault, Verdict.SKIP, "requires 8 gpus; this is cpu with 0"),
    )

    def execute(root: Path, platform: Any, only: tuple[str, ...], out: Any, say: Any) -> SelfTest:
        assert (root, platform, only, out) == (ROOT, CPU, ("a", "b", "c"), None)
        say("talk")
        return SelfTest(outcomes, 3.0)

    monkeypatch.setattr(selftest, "execute", execute)
    arguments = ["selftest", "--platform", "cpu", "--root", str(ROOT), "--only", "a,b", "--only", "c"]
    assert cli.main([*arguments, *(["--json", "--quiet"] if as_json else [])]) == 1
    captured = capsys.readouterr()
    if as_json:
        assert captured.err == ""
        assert '"detected": 1,\n "tried": 2' in captured.out
        assert f'"message": "not seen by {OTHER}"' in captured.out
    else:
        assert captured.err == "talk\n"
        assert captured.out.splitlines() == [
            f"maximum  seen by {MAXIMUM} and 1 more",
            f"maximum  FAIL: not seen by {OTHER}",
            "maximum  not tried: requires 8 gpus; this is cpu with 0",
            "detection power 1/2 in 3 s",
        ]
    assert cli.main(["selftest", "--platform", "cpu", "--root", str(ROOT), "--only", "a,"]) == 2


# --- the faults of this checkout --------------------------------------------------------------------------------------


def test_every_patch_applies() -> None:
    """A patch whose lines have changed is brought up to date with them; its first line says what the fault is."""
    for fault in selftest.load(ROOT):
        path = selftest.patch_of(ROOT, fault.name)
        assert selftest.apply(path, ROOT, check=True) == "", f"{path.name} no longer applies; bring it up to date"
        assert re.match(r"# \w.{20,}\n", path.read_text(encoding="utf-8")), f"{path.name} does not say what it is"


def test_no_fault_is_in_a_test() -> None:
    """A patch changes the product, the harness or a yardstick, never a test that judges it nor what was recorded."""
    for fault in selftest.load(ROOT):
        text = selftest.patch_of(ROOT, fault.name).read_text(encoding="utf-8")
        changed = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
        assert changed
        for name in changed:
            allowed = name.startswith(("fp8stack/", "harness/")) or name == "suites/compare.py"
            assert allowed, f"{fault.name} changes {name}"


def test_every_named_test_exists() -> None:
    """Of each id, the manifest knows it, or pytest collects it (the product's own tests, and what needs a GPU)."""
    named = {test_id for fault in selftest.load(ROOT) for test_id in fault.red}
    unknown = named - set(manifest.read(ROOT / "baselines" / "cpu" / "manifest.txt"))
    files = sorted({manifest.to_node_id(test_id).partition("::")[0] for test_id in unknown})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:hypothesispytest", *files],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    collected = {
        manifest.from_node_id(line, line.split("/")[1])
        for line in done.stdout.splitlines()
        if line.startswith("suites/")
    }
    assert unknown <= collected, (
        f"no such test: {sorted(unknown - collected)}\n{done.stdout[-500:]}{done.stderr[-500:]}"
    )
