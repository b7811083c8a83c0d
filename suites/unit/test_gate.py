"""The gate: what each kind of evidence is judged as, and with which exit code. Nothing absent reads as a pass."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import deaths, gate, journal, junit, ledger, machinecode
from harness.errors import VERDICTS, ConfigError, UnreadableError, UsageError, Verdict
from harness.result import Judgement, Result
from suites.unit.built_evidence import (
    BF16_TEST,
    CODEGEN_TEST,
    CONFIG,
    LOSS_TEST,
    NUMERICS_TEST,
    RUN_ID,
    Built,
    codegen_row,
    facts,
    good,
    isa_file,
    loss_file,
)

ROOT = Path(__file__).resolve().parents[2]
OTHER_TEST = "numerics/test_formats::test_golden[formats-e5m2]"


@pytest.fixture(autouse=True)
def _the_day_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence made by hand is of 2026-02-03, and is judged on that day where a test says nothing else."""
    monkeypatch.setattr(ledger, "today", lambda: datetime.date(2026, 2, 3), raising=False)


def verdict(judgement: Judgement, test_id: str) -> Verdict:
    return of(judgement, test_id).verdict


def of(judgement: Judgement, test_id: str) -> Result:
    (result,) = [result for result in judgement.results if result.id == test_id]
    return result


def test_a_good_run(tmp_path: Path) -> None:
    """One test a suite, each as recorded: PASS, exit 0, and each measured test carries its table."""
    judgement = gate.judge(good(tmp_path).write())
    assert judgement.exit_code == 0
    assert judgement.counts == {"PASS": 3}
    assert of(judgement, LOSS_TEST).baseline is not None
    assert of(judgement, CODEGEN_TEST).baseline is not None
    assert judgement.notes == ()


# Measured against recorded ---------------------------------------------------------------------------------------

CODEGEN_CHANGES: dict[str, tuple[dict[str, Any], Verdict, int]] = {
    "worse": ({"facts": facts(vgpr_spills=17)}, Verdict.REGRESSION, 1),
    "narrower": ({"facts": facts(widest_store_bytes=1)}, Verdict.REGRESSION, 1),
    "software": ({"facts": facts(fp8_encode="software")}, Verdict.REGRESSION, 1),
    "worse-and-better": ({"facts": facts(vgpr_spills=17, vgprs=8)}, Verdict.REGRESSION, 1),
    "better": ({"facts": facts(vgprs=8)}, Verdict.IMPROVED, 0),
    "informational": ({"facts": facts(instructions=99), "listing_hash": "beef"}, Verdict.PASS, 0),
    "listing": ({"listing_hash": "beef"}, Verdict.PASS, 0),
    "fact-lost": ({"facts": {k: v for k, v in facts().items() if k != "vgprs"}}, Verdict.UNREADABLE, 3),
    "fact-unknown": ({"facts": facts(speed=1)}, Verdict.UNREADABLE, 3),
    "config": ({"config": {"BLOCK_K": 2048, "num_warps": 4}}, Verdict.STALE_BASELINE, 5),
    "triton": ({"triton": "3.10.0"}, Verdict.NO_BASELINE, 5),
    "patch-release": ({"triton": "3.9.1"}, Verdict.PASS, 0),
    "format-without-row": ({"format": "e5m2"}, Verdict.NO_BASELINE, 5),
    "arch-without-file": ({"arch": "gfx950"}, Verdict.NO_BASELINE, 5),
    "swapped": ({"case": "rowwise-e4m3fn-bf16-k7168-gfx950"}, Verdict.DISAGREE, 3),
}


@pytest.mark.parametrize(
    ("changed", "expected", "exit_code"), CODEGEN_CHANGES.values(), ids=[f"gate-isa-{name}" for name in CODEGEN_CHANGES]
)
def test_machine_code(changed: dict[str, Any], expected: Verdict, exit_code: int, tmp_path: Path) -> None:
    """Two-sided: worse is REGRESSION, better IMPROVED, what cannot be compared is never a pass."""
    built = good(tmp_path).isa(isa_file(**changed))
    judgement = gate.judge(built.write())
    assert (verdict(judgement, CODEGEN_TEST), judgement.exit_code) == (expected, exit_code)


def test_improved_prints_the_patch_and_is_red_on_main(tmp_path: Path) -> None:
    """A gain that nobody records is lost: green on a pull request with the patch, red on main."""
    built = good(tmp_path).isa(isa_file(facts=facts(vgprs=8)))
    result = of(gate.judge(built.write()), CODEGEN_TEST)
    assert "-  vgprs: 16\n+  vgprs: 8" in result.detail
    assert result.junit == "none"
    built.run["policy"] = "main"
    judgement = gate.judge(built.write())
    assert (judgement.exit_code, of(judgement, CODEGEN_TEST).junit) == (1, "failure")


def test_a_changed_listing_is_listed(tmp_path: Path) -> None:
    """A hash of the listing never gates; it is in the notes."""
    judgement = gate.judge(good(tmp_path).isa(isa_file(listing_hash="beef")).write())
    assert any("the listing of" in note for note in judgement.notes)


def test_facts_have_a_direction_each() -> None:
    """Every direction of harness/isa is one the gate knows: none would be compared by nothing."""
    known = {*machinecode.BETTER, machinecode.INFORMATIONAL}
    assert {fact.direction for fact in machinecode.FACTS.values()} <= known


LOSS_CHANGES: dict[str, tuple[dict[str, Any], Verdict, int]] = {
    "inside": ({**loss_file(2e-5)}, Verdict.PASS, 0),
    "outside": ({**loss_file(0.01)}, Verdict.REGRESSION, 1),
    "short": ({**loss_file(), "steps": loss_file()["steps"][:99]}, Verdict.REGRESSION, 1),
    "empty": ({**loss_file(), "steps": []}, Verdict.REGRESSION, 1),
    "config": ({**loss_file(), "config_hash": "f" * 16, "config": {**CONFIG, "seed": 1}}, Verdict.STALE_BASELINE, 5),
    "other-case": ({**loss_file(), "case": "llama3-tiny-bf16"}, Verdict.DISAGREE, 3),
    "nudged": ({**loss_file(), "nudge": 2}, Verdict.DISAGREE, 3),
    "shape": ({"schema": 1}, Verdict.UNREADABLE, 3),
}


@pytest.mark.parametrize(
    ("content", "expected", "exit_code"), LOSS_CHANGES.values(), ids=[f"gate-loss-{name}" for name in LOSS_CHANGES]
)
def test_loss(content: dict[str, Any], expected: Verdict, exit_code: int, tmp_path: Path) -> None:
    """A loss test that ran to its end is PASS only if its own curve, of its own configuration, is inside the bands."""
    judgement = gate.judge(good(tmp_path).loss(content).write())
    assert (verdict(judgement, LOSS_TEST), judgement.exit_code) == (expected, exit_code)


def test_stale_names_the_key(tmp_path: Path) -> None:
    """STALE_BASELINE says which key of the configuration differs, with both values."""
    content = loss_file(config_hash="f" * 16, config={**CONFIG, "seed": 1})
    assert "seed: 0 -> 1" in of(gate.judge(good(tmp_path).loss(content).write()), LOSS_TEST).message


def test_a_nan_in_the_curve(tmp_path: Path) -> None:
    """A bare NaN in the loss file is a REGRESSION with its step, not an unreadable file and not a pass."""
    content = loss_file()
    content["steps"][41]["loss"] = math.nan
    result = of(gate.judge(good(tmp_path).loss(content).write()), LOSS_TEST)
    assert result.verdict is Verdict.REGRESSION
    assert "nan at step 42" in result.message


@pytest.mark.parametrize("key", ["format", "arch"], ids=["gate-format", "gate-arch"])
def test_swapped_by_property(key: str, tmp_path: Path) -> None:
    """What the test reported and what its file says must agree: a curve of another format is DISAGREE."""
    built = good(tmp_path).loss(loss_file(), **{key: "something-else"})
    assert verdict(gate.judge(built.write()), LOSS_TEST) is Verdict.DISAGREE


def test_a_file_outside_of_the_evidence(tmp_path: Path) -> None:
    """A loss_file that points out of the folder is UNREADABLE: evidence must be whole when it travels."""
    built = good(tmp_path / "evidence").test(LOSS_TEST, loss_file="../elsewhere.json")
    (tmp_path / "elsewhere.json").write_text(json.dumps(loss_file()))
    assert verdict(gate.judge(built.write()), LOSS_TEST) is Verdict.UNREADABLE


def test_paired_with_bf16(tmp_path: Path) -> None:
    """An FP8 curve 1 % above the bf16 one of the same run is red even where its own baseline drifted along."""
    built = good(tmp_path)
    content = loss_file(config={**CONFIG, "recipe": "bf16"}, case="llama3-tiny-bf16", recipe="bf16", format="bf16")
    for step in content["steps"]:
        step["loss"] *= 0.99
    judgement = gate.judge(built.loss(content, BF16_TEST).baseline().write())
    assert verdict(judgement, BF16_TEST) is Verdict.NO_BASELINE
    assert verdict(judgement, LOSS_TEST) is Verdict.REGRESSION
    assert of(judgement, LOSS_TEST).message.startswith("paired: FP8 against bf16")


def test_failed_test_keeps_its_verdict(tmp_path: Path) -> None:
    """A red loss test stays FAIL with its own message, whatever its curve says."""
    built = good(tmp_path)
    built.tests[LOSS_TEST].update(outcome="failed", message="step 3: the loss is not finite")
    result = of(gate.judge(built.write()), LOSS_TEST)
    assert (result.verdict, result.message) == (Verdict.FAIL, "step 3: the loss is not finite")


# Absent things ---------------------------------------------------------------------------------------------------


def no_loss(built: Built) -> None:
    (built.baselines / "cpu/loss.json").unlink()


def no_codegen(built: Built) -> None:
    (built.baselines / "gfx942/codegen.json").unlink()


def no_manifest(built: Built) -> None:
    (built.baselines / "cpu/manifest.txt").unlink()


@pytest.mark.parametrize("remove", [no_loss, no_codegen, no_manifest], ids=["gate-loss", "gate-codegen", "gate-ids"])
def test_deleted_baseline(remove: Callable[[Built], None], tmp_path: Path) -> None:
    """Deleting any baseline file of a calibrated platform is exit 5."""
    built = good(tmp_path)
    remove(built)
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 5
    assert judgement.counts["NO_BASELINE"] == 1


def test_uncalibrated_platform(tmp_path: Path) -> None:
    """On a platform that declares no baselines the rows are UNCALIBRATED: exit 0, skipped in JUnit, not a pass."""
    built = Built(tmp_path, ("codegen", "loss")).loss().isa()
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 0
    assert judgement.counts == {"UNCALIBRATED": 2}
    assert {result.junit for result in judgement.results} == {"skipped"}


def test_in_the_manifest_and_not_there(tmp_path: Path) -> None:
    """A deleted test file: its ids are MISSING by name, exit 3, though everything that ran passed."""
    built = good(tmp_path).baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST, OTHER_TEST])
    judgement = gate.judge(built.write())
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (Verdict.MISSING, 3)


def test_skipped_and_in_the_manifest(tmp_path: Path) -> None:
    """A skip is SKIP and exit 0, unless the manifest says that the test must run here: MISSING, exit 3."""
    built = good(tmp_path).test(OTHER_TEST, "skipped", "requires 4 gpus; this is cpu with 0")
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    assert gate.judge(built.write()).exit_code == 0
    judgement = gate.judge(built.baseline().write())
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (Verdict.MISSING, 3)
    assert "requires 4 gpus; this is cpu with 0" in of(judgement, OTHER_TEST).message


def test_new_test_is_listed(tmp_path: Path) -> None:
    """A test that the manifest does not know yet is judged and listed as new, not red."""
    built = good(tmp_path).test(OTHER_TEST)
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 0
    assert any(note.startswith("new: 1 tests") and OTHER_TEST in note for note in judgement.notes)


@pytest.mark.parametrize("said", [True, False, None], ids=["full", "not-full", "of-old"])
def test_rows_of_the_night_are_new_to_the_manifest(said: bool | None, tmp_path: Path) -> None:
    """In a full run the note says that the manifest has none of them; a run that does not say is not a full one."""
    built = good(tmp_path).test(OTHER_TEST)
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    if said is None:
        del built.run["full"]
    else:
        built.run["full"] = said
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 0
    [note] = [note for note in judgement.notes if note.startswith("new: ")]
    assert ("(rows of the night are in none)" in note) == (said is True)


def test_selection_restricts_the_manifest(tmp_path: Path) -> None:
    """With --suite and --case only what they select must have run; the rest of the manifest is not missing."""
    built = Built(tmp_path, ("numerics",)).test(NUMERICS_TEST)
    built.baseline(ids=[NUMERICS_TEST, OTHER_TEST, CODEGEN_TEST, LOSS_TEST])
    assert gate.judge(built.write()).exit_code == 3
    built.run["case"] = "formats-e4m3*"
    assert gate.judge(built.write()).exit_code == 0


def test_a_suite_of_which_the_case_selects_nothing(tmp_path: Path) -> None:
    """`--case 'formats*'` over three suites: those without such a case are no finding; without --case they are."""
    built = good(tmp_path)
    built.tests = {NUMERICS_TEST: built.tests[NUMERICS_TEST]}
    built.run["case"] = "formats*"
    built.deselected = {"codegen": 1, "loss": 1}
    assert gate.judge(built.write()).exit_code == 0
    built.run["case"] = None
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 3
    assert verdict(judgement, "loss/suite::collection") is Verdict.MISSING


def test_measured_nothing(tmp_path: Path) -> None:
    """A test that passes and stops writing its evidence is a gate gone blind: MISSING for the recorded row."""
    for test_id, what in ((LOSS_TEST, "loss curve"), (CODEGEN_TEST, "machine code")):
        built = good(tmp_path / what.split()[0])
        built.test(test_id)
        judgement = gate.judge(built.write())
        (blind,) = [result for result in judgement.results if "was not measured" in result.message]
        assert blind.verdict is Verdict.MISSING
        assert what in blind.message


def test_nothing_was_judged(tmp_path: Path) -> None:
    """An empty run is exit 3: no results are no success."""
    with pytest.raises(UnreadableError) as raised:
        gate.judge(Built(tmp_path, ()).baseline(ids=[]).write())
    assert raised.value.exit_code == 3


# Deaths and contradictions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "expected", "exit_code"),
    [
        ({"rc": None, "signal": "SIGKILL"}, Verdict.KILLED, 3),
        ({"rc": None, "signal": "SIGTERM"}, Verdict.KILLED, 3),
        ({"rc": 137}, Verdict.KILLED, 3),
        ({"rc": None, "signal": "SIGSEGV"}, Verdict.CRASH, 3),
        ({"rc": 134}, Verdict.CRASH, 3),
        ({"rc": 0}, Verdict.CRASH, 3),
        ({"rc": None, "signal": "SIGKILL", "killed_by": "deadline"}, Verdict.TIMEOUT, 3),
        ({"rc": None, "signal": "SIGTERM", "killed_by": "interrupt"}, Verdict.INTERRUPTED, 130),
        ({"rc": None}, Verdict.KILLED, 3),
    ],
    ids=[
        "gate-died-kill",
        "gate-died-term",
        "gate-died-137",
        "gate-died-segv",
        "gate-died-abort",
        "gate-died-exit-0",
        "gate-died-deadline",
        "gate-died-interrupt",
        "gate-died-harness",
    ],
)
def test_death_in_the_middle(end: dict[str, Any], expected: Verdict, exit_code: int, tmp_path: Path) -> None:
    """The finished test keeps its verdict, the running one gets how it died, the rest is MISSING as `not run`."""
    running, rest = OTHER_TEST, "numerics/test_formats::test_golden[formats-e5m2fnuz]"
    built = good(tmp_path).test(running, "running").test(rest, "not-run").process("numerics", **end)
    built.session_rc["numerics"] = None
    judgement = gate.judge(built.baseline().write())
    assert verdict(judgement, NUMERICS_TEST) is Verdict.PASS
    assert verdict(judgement, running) is expected
    assert "log of numerics" in of(judgement, running).detail
    assert verdict(judgement, rest) is Verdict.MISSING
    assert of(judgement, rest).message.startswith("not run: ")
    assert judgement.exit_code == exit_code


def test_crash_of_the_last_test_is_exit_1(tmp_path: Path) -> None:
    """With nothing left unrun, a crash is the product's: exit 1."""
    built = good(tmp_path).test(OTHER_TEST, "running").process("numerics", rc=None, signal="SIGSEGV")
    judgement = gate.judge(built.baseline().write())
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (Verdict.CRASH, 1)


def test_worker_crash(tmp_path: Path) -> None:
    """Under xdist the test of a dead worker is CRASH, by SIGKILL KILLED; the others keep their outcomes."""
    for signal, expected in (("SIGSEGV", Verdict.CRASH), ("SIGKILL", Verdict.KILLED), (None, Verdict.CRASH)):
        built = good(tmp_path / str(signal)).test(OTHER_TEST, "failed", "worker 'gw0' crashed")
        crash = {"id": OTHER_TEST, "worker": "gw0", "signal": signal, "message": "", "suite": "numerics"}
        built.extra_events.append(("worker-crash", crash))
        judgement = gate.judge(built.baseline().write())
        assert verdict(judgement, OTHER_TEST) is expected
        assert verdict(judgement, NUMERICS_TEST) is Verdict.PASS


def test_disk_full_is_the_machine(tmp_path: Path) -> None:
    """The plugin whose own write met a full disk ends its process with a code that says so: exit 4 for its test."""
    built = good(tmp_path).test(OTHER_TEST, "running").process("numerics", rc=journal.DISK_FULL_EXIT)
    built.session_rc["numerics"] = None
    judgement = gate.judge(built.baseline().write())
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (Verdict.DISK, 4)


PRINTED = {
    "disk": "OSError: [Errno 28] No space left on device",
    "shm": "Bus error: nonexistent physical address",
    "pids": "bash: fork: retry: Resource temporarily unavailable",
}


@pytest.mark.parametrize("text", PRINTED.values(), ids=PRINTED)
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"rc": 1}, Verdict.CRASH),
        ({"rc": None, "signal": "SIGSEGV"}, Verdict.CRASH),
        ({"rc": None, "signal": "SIGKILL"}, Verdict.KILLED),
    ],
    ids=["exit", "sigsegv", "sigkill"],
)
def test_a_log_alone_accuses_no_machine(text: str, end: dict[str, Any], expected: Verdict, tmp_path: Path) -> None:
    """A test may print anything: without evidence of the machine's own its death is its own, and is not retried."""
    built = good(tmp_path).test(OTHER_TEST, "running").process("numerics", **end)
    built.session_rc["numerics"] = None
    built.baseline().write()
    built.file("logs/numerics.log", f"{text}\n")
    judgement = gate.judge(tmp_path)
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (expected, VERDICTS[expected].exit_code)
    assert not deaths.machine_failed(tmp_path, "numerics")
    assert text in of(judgement, OTHER_TEST).detail
    worker = {"id": OTHER_TEST, "worker": "gw0", "signal": end.get("signal"), "message": "", "suite": "numerics"}
    built = good(tmp_path / "xdist").test(OTHER_TEST, "failed", "worker 'gw0' crashed")
    built.extra_events.append(("worker-crash", worker))
    built.baseline().write()
    built.file("logs/numerics.log", f"{text}\n")
    assert verdict(gate.judge(built.folder), OTHER_TEST) is expected


def test_a_bus_error_for_want_of_memory(tmp_path: Path) -> None:
    """The signal and the handler's words together: /dev/shm is too small."""
    built = good(tmp_path).test(OTHER_TEST, "running").process("numerics", rc=None, signal="SIGBUS").baseline()
    built.write()
    assert verdict(gate.judge(tmp_path), OTHER_TEST) is Verdict.CRASH
    built.file("logs/numerics.log", "Caught signal 7 (Bus error: nonexistent physical address)\n")
    assert verdict(gate.judge(tmp_path), OTHER_TEST) is Verdict.SHM


@pytest.mark.parametrize(
    ("process", "session", "outcome"),
    [(0, 0, "failed"), (1, 1, "passed"), (0, 1, "failed"), (7, 0, "passed"), (3, 3, "passed")],
    ids=["gate-rc0-with-failure", "gate-rc1-without", "gate-rc-hidden", "gate-rc-changed-late", "gate-internal-error"],
)
def test_exit_code_and_journal_disagree(process: int, session: int, outcome: str, tmp_path: Path) -> None:
    """Exit code 0 with a failure, 1 without one, an exit code changed at exit, an internal error: DISAGREE, exit 3."""
    built = good(tmp_path).test(NUMERICS_TEST, outcome, "wrong").process("numerics", rc=process)
    built.session_rc["numerics"] = session
    judgement = gate.judge(built.write())
    assert judgement.counts["DISAGREE"] == 1
    assert judgement.exit_code == 3


def test_stale_run_id(tmp_path: Path) -> None:
    """A journal of another run in the folder is DISAGREE, exit 3, however green it is."""
    built = good(tmp_path)
    built.session_ids["loss"] = "0ld"
    judgement = gate.judge(built.write())
    assert (judgement.counts["DISAGREE"], judgement.exit_code) == (1, 3)


def test_damaged_journal(tmp_path: Path) -> None:
    """A cut last line after a death is a note; a damaged journal of a run that ended in order is UNREADABLE."""
    good(tmp_path).write()
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write('{"event":"phase","id":"nume')
    assert gate.judge(tmp_path).counts["UNREADABLE"] == 1


def test_collection_error(tmp_path: Path) -> None:
    """A module that cannot be imported is FAIL by its own name, its tests MISSING."""
    built = good(tmp_path)
    del built.tests[NUMERICS_TEST]
    error = {"suite": "numerics", "path": "suites/numerics/test_formats.py", "message": "ImportError: no", "detail": ""}
    built.extra_events.append(("collect-error", error))
    built.process("numerics", rc=2)
    judgement = gate.judge(built.write())
    assert verdict(judgement, "numerics/test_formats::collection") is Verdict.FAIL
    assert verdict(judgement, NUMERICS_TEST) is Verdict.MISSING


SITUATIONS: dict[str, tuple[list[str], int, int, int]] = {
    # name: outcomes, pytest's exit code, deselected, expected exit code
    "all-pass": (["passed"], 0, 0, 0),
    "one-fails": (["passed", "failed"], 1, 0, 1),
    "all-marked-skip": (["skipped"], 0, 0, 3),
    "modules-skip-themselves": ([], 5, 0, 3),
    "all-deselected": ([], 5, 4, 3),
    "none-collected": ([], 5, 0, 3),
}


@pytest.mark.parametrize(
    ("outcomes", "rc", "deselected", "expected"), SITUATIONS.values(), ids=[f"gate-exit-{name}" for name in SITUATIONS]
)
def test_counts_decide_and_not_the_exit_code(
    outcomes: list[str], rc: int, deselected: int, expected: int, tmp_path: Path
) -> None:
    """pytest-dev/pytest#812, #2393: exit 5 forgiven or 0 for all-skipped; the manifest decides here."""
    built = Built(tmp_path, ("numerics",))
    for test_id, outcome in zip([NUMERICS_TEST, OTHER_TEST], outcomes, strict=False):
        built.test(test_id, outcome, "told")
    built.deselected["numerics"] = deselected
    built.process("numerics", rc=rc).baseline(ids=[NUMERICS_TEST])
    assert gate.judge(built.write()).exit_code == expected


def test_flaky(tmp_path: Path) -> None:
    """pytest-dev/pytest-rerunfailures#170: a test that failed and then passed is FLAKY, not two passes."""
    built = good(tmp_path)
    again = {"id": NUMERICS_TEST}
    built.tests[NUMERICS_TEST].update(outcome="failed", message="first attempt")
    passed = {"outcome": "passed", "seconds": 0.1}
    built.extra_events += [
        ("start", {**again, "time": 9.0}),
        *[("phase", {**again, "phase": phase, **passed}) for phase in ("setup", "call", "teardown")],
    ]
    judgement = gate.judge(built.process("numerics", rc=0).write())
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (Verdict.FLAKY, 1)


def test_a_message_that_ends_in_a_colon(tmp_path: Path) -> None:
    """A first line that only announces is completed by the next one: the summary has one line to tell what is wrong."""
    detail = "E   AssertionError: a.s breaks a rule of machine code:\nE     widest_store_bytes is 8\nE     line 614"
    built = good(tmp_path).test(NUMERICS_TEST, "failed", "a.s breaks a rule of machine code:")
    built.tests[NUMERICS_TEST]["detail"] = detail
    result = of(gate.judge(built.write()), NUMERICS_TEST)
    assert result.message == "a.s breaks a rule of machine code: widest_store_bytes is 8"


def test_out_of_memory(tmp_path: Path) -> None:
    """torch.OutOfMemoryError is OOM, exit 1: the test asked for too much, the host is well."""
    built = good(tmp_path).test(NUMERICS_TEST, "failed", "torch.OutOfMemoryError: CUDA out of memory")
    assert verdict(gate.judge(built.write()), NUMERICS_TEST) is Verdict.OOM


# Waivers -----------------------------------------------------------------------------------------------------------


def waiver(expires: str = "2026-03-01", test_id: str = NUMERICS_TEST) -> str:
    return (
        f'[[waiver]]\nid = "{test_id}"\nplatform = "cpu"\nreason = "known"\n'
        f'issue = "https://example.org/1"\nowner = "someone"\nexpires = {expires}\n'
    )


@pytest.mark.parametrize(
    ("outcome", "expires", "expected", "exit_code"),
    [
        ("failed", "2026-03-01", Verdict.WAIVED, 0),
        ("failed", "2026-02-03", Verdict.WAIVED, 0),
        ("failed", "2026-02-02", Verdict.WAIVER_EXPIRED, 1),
        ("passed", "2026-03-01", Verdict.WAIVER_UNUSED, 1),
    ],
    ids=["gate-in-force", "gate-last-day", "gate-expired", "gate-unused"],
)
def test_waivers(outcome: str, expires: str, expected: Verdict, exit_code: int, tmp_path: Path) -> None:
    """In force (up to its date) WAIVED; past it WAIVER_EXPIRED; covering a test that passes WAIVER_UNUSED."""
    built = good(tmp_path).test(NUMERICS_TEST, outcome, "wrong").waiver(waiver(expires))
    judgement = gate.judge(built.write())
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (expected, exit_code)


def test_a_waiver_for_no_test(tmp_path: Path) -> None:
    """A waiver whose test no longer exists is WAIVER_UNUSED."""
    built = good(tmp_path).waiver(waiver(test_id=OTHER_TEST))
    assert verdict(gate.judge(built.write()), OTHER_TEST) is Verdict.WAIVER_UNUSED


@pytest.mark.parametrize(
    ("started", "today", "expected", "told"),
    [
        ("2026-02-03T04:05:06+00:00", "2026-03-01", Verdict.WAIVED, "until 2026-03-01"),
        (
            "2026-02-03T04:05:06+00:00",
            "2026-03-02",
            Verdict.WAIVER_EXPIRED,
            "on 2026-03-01, after the run of 2026-02-03",
        ),
        ("2026-03-02T00:00:00+00:00", "2026-02-03", Verdict.WAIVER_EXPIRED, "expired on 2026-03-01: "),
        ("2036-02-03T04:05:06+00:00", "2026-02-03", Verdict.WAIVER_EXPIRED, "expired on 2026-03-01: "),
        ("2026-03-01T23:30:00-05:00", "2026-02-03", Verdict.WAIVER_EXPIRED, "expired on 2026-03-01: "),
        ("soon", "2026-03-02", Verdict.WAIVER_EXPIRED, "expired on 2026-03-01: "),
    ],
    ids=["last-day", "day-after", "run-later", "far-future", "time-zone", "no-date"],
)
def test_no_clock_revives_a_waiver(
    started: str, today: str, expected: Verdict, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its date has passed for the run or for the judgement: what run.json says of its time makes it no younger."""
    monkeypatch.setattr(ledger, "today", lambda: datetime.date.fromisoformat(today))
    built = good(tmp_path / "evidence").test(NUMERICS_TEST, "failed", "wrong")
    built.run["started"] = started
    folder = built.waiver(waiver("2026-03-01")).write()
    current = shutil.copytree(built.baselines, tmp_path / "baselines")
    for judgement in (gate.judge(folder), gate.against(folder, current)[0]):
        result = of(judgement, NUMERICS_TEST)
        assert (result.verdict, judgement.exit_code) == (expected, 0 if expected is Verdict.WAIVED else 1)
        assert told in result.message


def test_a_run_of_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten years before its waiver's end that waiver is too long; by a checkout's ledger it has expired."""
    monkeypatch.setattr(ledger, "today", lambda: datetime.date(2026, 3, 2))
    built = good(tmp_path / "evidence").test(NUMERICS_TEST, "failed", "wrong")
    built.run["started"] = "2016-02-03T04:05:06+00:00"
    folder = built.waiver(waiver("2026-03-01")).write()
    with pytest.raises(ConfigError, match="expected a date up to 2016-05-03"):
        gate.judge(folder)
    judgement, _ = gate.against(folder, shutil.copytree(built.baselines, tmp_path / "baselines"))
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (Verdict.WAIVER_EXPIRED, 1)


def test_a_waiver_of_today_for_the_run_of_yesterday(tmp_path: Path) -> None:
    """`--current` judges by the ledger of today: 90 days from now are not too long because the run is a day older."""
    built = good(tmp_path / "evidence").test(NUMERICS_TEST, "failed", "wrong")
    built.run["started"] = "2026-02-02T04:05:06+00:00"
    folder = built.write()
    other = good(tmp_path / "checkout").waiver(waiver("2026-05-04"))  # 90 days after 2026-02-03
    judgement, differences = gate.against(folder, other.baselines)
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (Verdict.WAIVED, 0)
    assert differences == (f"{NUMERICS_TEST}: FAIL by the run's own files, WAIVED by these",)
    other.waiver(waiver("2026-05-05"))
    with pytest.raises(ConfigError, match="expected a date up to 2026-05-04"):
        gate.against(folder, other.baselines)


# The folder itself -------------------------------------------------------------------------------------------------


def test_no_evidence(tmp_path: Path) -> None:
    """A folder that is no evidence, or none at all: one line, exit 2."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError) as raised:
            gate.judge(folder)
        assert raised.value.exit_code == 2


def test_cut_run_json(tmp_path: Path) -> None:
    """Evidence whose run.json is cut, incomplete or absent beside a journal is exit 3."""
    folder = good(tmp_path).write()
    text = (folder / "run.json").read_text()
    for broken in (text[:40], "{}", "[]"):
        (folder / "run.json").write_text(broken)
        with pytest.raises(UnreadableError):
            gate.judge(folder)
    (folder / "run.json").unlink()
    with pytest.raises(UnreadableError):
        gate.judge(folder)


def test_malformed_baseline_is_usage(tmp_path: Path) -> None:
    """A baseline with an unknown field is exit 2, whatever the tests say."""
    folder = good(tmp_path).write()
    path = folder / "judged-with/cpu/loss.json"
    path.write_text(path.read_text().replace('"schema":1', '"schema":1,"tolerance":9', 1))
    with pytest.raises(ConfigError) as raised:
        gate.judge(folder)
    assert raised.value.exit_code == 2


def test_current_says_what_differs(tmp_path: Path) -> None:
    """Judged with another checkout's baselines, the verdicts that differ are named."""
    folder = good(tmp_path / "evidence").write()
    other = Built(tmp_path / "checkout")
    other.baselines = tmp_path / "checkout/baselines"
    other.baseline(loss=False, ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    judgement, differences = gate.against(folder, other.baselines)
    assert judgement.exit_code == 5
    assert differences == (f"{LOSS_TEST}: PASS by the run's own files, NO_BASELINE by these",)


def test_without_torch(tmp_path: Path) -> None:
    """`fp8ci gate` gives the same verdict where torch, triton, numpy, fp8stack and pytest do not import."""
    folder = good(tmp_path).isa(isa_file(facts=facts(vgprs=99))).write()
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'numpy', 'fp8stack', 'pytest', 'suites'): sys.modules[name] = None\n"
        "from harness.cli import main\n"
        f"sys.exit(main(['gate', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == gate.judge(folder).exit_code == 1, done.stderr
    assert done.stdout.startswith("REGRESSION exit 1: codegen test_rowwise")


def test_order_of_findings() -> None:
    """Worst first; at equal severity numerics before codegen before loss."""
    ids = (LOSS_TEST, CODEGEN_TEST, NUMERICS_TEST)
    failed = [Result(test_id, test_id.partition("/")[0], Verdict.FAIL) for test_id in ids]
    regression = Result(OTHER_TEST, "numerics", Verdict.REGRESSION)
    judgement = Judgement((regression, *failed), 1, {})
    assert [result.suite for result in judgement.worst_first] == ["numerics", "codegen", "loss", "numerics"]


def test_row_of_another_kernel(tmp_path: Path) -> None:
    """Facts are compared only with the row of the same kernel and configuration."""
    assert codegen_row().test_id == CODEGEN_TEST
    built = good(tmp_path).isa(isa_file(kernel="another"))
    result = of(gate.judge(built.write()), CODEGEN_TEST)
    assert result.verdict is Verdict.STALE_BASELINE
    assert "kernel: '_quantize_rowwise_kernel' -> 'another'" in result.message


# Green by accident -------------------------------------------------------------------------------------------------


def test_a_manifest_that_lists_nothing_of_a_suite(tmp_path: Path) -> None:
    """An emptied manifest requires nothing: NO_BASELINE for each suite that must run here, not a pass."""
    judgement = gate.judge(good(tmp_path).baseline(ids=[]).write())
    assert (judgement.exit_code, judgement.counts["NO_BASELINE"]) == (5, 3)
    judgement = gate.judge(good(tmp_path).baseline(ids=[NUMERICS_TEST, CODEGEN_TEST]).write())
    assert verdict(judgement, "loss/suite::manifest") is Verdict.NO_BASELINE


def test_every_test_was_skipped(tmp_path: Path) -> None:
    """On a platform without a manifest too, a suite of which nothing ran is MISSING; under --case, a run."""
    built = Built(tmp_path, ("numerics",)).test(NUMERICS_TEST, "skipped", "requires 4 gpus; this is mi300x with 1")
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    for case in (None, "formats*"):
        built.run["case"] = case
        judgement = gate.judge(built.write())
        assert (verdict(judgement, "numerics/suite::skipped"), judgement.exit_code) == (Verdict.MISSING, 3)
    assert gate.judge(built.test(OTHER_TEST).write()).exit_code == 0


def test_a_module_that_skips_itself_is_listed(tmp_path: Path) -> None:
    """Its ids are unknown, so the manifest alone may not be what notices."""
    built = good(tmp_path)
    skip = {"suite": "numerics", "path": "suites/numerics/test_x.py", "message": "no scipy"}
    built.extra_events.append(("collect-skip", skip))
    assert verdict(gate.judge(built.write()), "numerics/test_x::collection") is Verdict.SKIP


def test_a_worker_that_died_beside_its_tests(tmp_path: Path) -> None:
    """After the last report of its test, or between tests: red, though every outcome in the journal is a pass."""
    for test_id, told in ((NUMERICS_TEST, NUMERICS_TEST), ("", "numerics/suite::worker-gw0")):
        built = good(tmp_path / (test_id or "none").replace("/", "-"))
        crash = {"id": test_id, "worker": "gw0", "signal": "SIGKILL", "message": "gone", "suite": "numerics"}
        built.extra_events.append(("worker-crash", crash))
        judgement = gate.judge(built.write())
        assert (verdict(judgement, told), judgement.exit_code) == (Verdict.KILLED, 3)


@pytest.mark.parametrize("rc", [4, 5, 7], ids=["gate-usage", "gate-nothing-ran", "gate-unknown"])
def test_an_exit_code_that_both_tell_and_no_pass_has(rc: int, tmp_path: Path) -> None:
    """Process and session agree on a code that a run of passed tests cannot end with."""
    judgement = gate.judge(good(tmp_path).process("numerics", rc=rc).write())
    assert judgement.exit_code == (2 if rc == 4 else 3)


def test_a_suite_folder_that_is_gone_is_no_usage_error(tmp_path: Path) -> None:
    """pytest calls it a wrong argument; the argument is ours and the folder is missing: exit 3."""
    built = good(tmp_path).process("numerics", rc=4)
    del built.tests[NUMERICS_TEST]
    folder = built.write()
    built.file("logs/numerics.log", "ERROR: file or directory not found: suites/numerics\n")
    judgement = gate.judge(folder)
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (Verdict.MISSING, 3)


def test_a_conftest_that_raises(tmp_path: Path) -> None:
    """pytest's exit code is that of a wrong argument; the findings name the file and the error."""
    built = good(tmp_path).process("numerics", rc=4)
    del built.tests[NUMERICS_TEST]
    built.write()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    dropped = ('"event":"session', '"event":"collected')
    kept = [line for line in lines if '"suite":"numerics"' not in line or not any(word in line for word in dropped)]
    (tmp_path / "journal.jsonl").write_text("".join(kept))
    log = "ImportError while loading conftest '/x/conftest.py'.\nconftest.py:1: in <module>\nE   No module named 'y'\n"
    built.file("logs/numerics.log", log)
    judgement = gate.judge(tmp_path)
    assert verdict(judgement, "numerics/suite::process") is Verdict.FAIL
    assert of(judgement, NUMERICS_TEST).message.endswith("'/x/conftest.py': No module named 'y'")
    assert judgement.exit_code == 3


def test_a_waiver_hides_no_missing_evidence(tmp_path: Path) -> None:
    """A waived test that was deleted, or killed from outside, is as red as any other."""
    built = good(tmp_path / "deleted").baseline(ids=[NUMERICS_TEST, OTHER_TEST, CODEGEN_TEST, LOSS_TEST])
    judgement = gate.judge(built.waiver(waiver(test_id=OTHER_TEST)).write())
    assert (verdict(judgement, OTHER_TEST), judgement.exit_code) == (Verdict.MISSING, 3)
    built = good(tmp_path / "killed").test(NUMERICS_TEST, "running").process("numerics", rc=None, signal="SIGKILL")
    judgement = gate.judge(built.waiver(waiver()).write())
    assert (verdict(judgement, NUMERICS_TEST), judgement.exit_code) == (Verdict.KILLED, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("suites", []),
        ("suites", [1]),
        ("case", 5),
        ("full", "yes"),
        ("policy", "MAIN"),
        ("policy", None),
    ],
)
def test_run_json_says_something_else(key: str, value: object, tmp_path: Path) -> None:
    """One line and exit 3; never a default in its place."""
    built = good(tmp_path)
    built.run[key] = value
    with pytest.raises(UnreadableError, match=key):
        gate.judge(built.write())


def test_another_platform_in_run_json(tmp_path: Path) -> None:
    """Evidence of one machine under another platform's name would be judged by that platform's manifest, or by none."""
    built = good(tmp_path)
    built.run["platform"] = "mi300x"
    judgement = gate.judge(built.write())
    assert (verdict(judgement, "numerics/suite::platform"), judgement.exit_code) == (Verdict.DISAGREE, 3)


def test_junit_of_another_run(tmp_path: Path) -> None:
    """A junit.xml that is cut, or names another run than the journal, is a finding."""
    folder = good(tmp_path).file("junit.xml", "<testsuites>").write()
    assert verdict(gate.judge(folder), "numerics/suite::junit") is Verdict.UNREADABLE
    stale = (
        '<testsuites><testsuite><properties><property name="run_id" value="{}"/></properties></testsuite></testsuites>'
    )
    (folder / "junit.xml").write_text(stale.format("0ld"))
    assert verdict(gate.judge(folder), "numerics/suite::junit") is Verdict.DISAGREE
    (folder / "junit.xml").write_text(stale.format(RUN_ID))  # the right run, and no case at all
    assert verdict(gate.judge(folder), "numerics/suite::junit") is Verdict.DISAGREE


@pytest.mark.parametrize(
    ("outcome", "file", "old", "new", "told"),
    [
        ("failed", "journal.jsonl", ('"failed"', '"rc":1'), ('"passed"', '"rc":0'), "says FAIL of numerics/"),
        ("failed", "junit.xml", ("failure",), ("property",), "says PASS of numerics/"),
        ("passed", "junit.xml", ("[formats-e5m2]",), ("[formats-e5m3]",), "and junit.xml does not"),
        ("passed", "journal.jsonl", (), (), "and the journal holds no such test"),
        ("passed", "junit.xml", ('value="PASS"',), ('value="FAIL"',), ""),
    ],
    ids=["journal-flipped", "report-flipped", "report-lacks-a-row", "journal-lacks-a-row", "report-says-it-badly"],
)
def test_a_report_that_says_otherwise(
    outcome: str, file: str, old: Sequence[str], new: Sequence[str], told: str, tmp_path: Path
) -> None:
    """junit.xml and journal are of one run: a verdict flipped or a row gone in one of them is seen."""
    folder = good(tmp_path).test(OTHER_TEST, outcome, "3 of 9 differ").baseline(ids=[]).write()
    judgement = gate.judge(folder)
    junit.write(judgement, gate.read_run(folder), folder / "junit.xml")
    assert gate.judge(folder).counts == judgement.counts
    text = (folder / file).read_text()
    for before, now in zip(old, new, strict=True):
        assert before in text
        text = text.replace(before, now)
    if not old:  # every line of it goes
        assert f',"{OTHER_TEST}"' in text
        lines = text.replace(f',"{OTHER_TEST}"', "").splitlines(keepends=True)
        text = "".join(line for line in lines if OTHER_TEST not in line)
    (folder / file).write_text(text)
    after = gate.judge(folder)
    if not told:  # what tools look at is the element
        assert after.counts == judgement.counts
        return
    assert verdict(after, "numerics/suite::junit") is Verdict.DISAGREE
    assert told in of(after, "numerics/suite::junit").message
    assert after.exit_code == 3


def test_a_suite_that_run_json_forgets(tmp_path: Path) -> None:
    """Its process died before it collected anything, and run.json does not name it: nothing may hide it."""
    built = good(tmp_path)
    del built.tests[LOSS_TEST]
    folder = built.process("loss", rc=None, signal="SIGSEGV").baseline(loss=False).write()
    assert gate.judge(folder).exit_code != 0
    (folder / "run.json").write_text(json.dumps({**built.run, "suites": ["numerics", "codegen"]}))
    judgement = gate.judge(folder)
    assert (verdict(judgement, "loss/suite::selection"), judgement.exit_code) == (Verdict.DISAGREE, 3)


@pytest.mark.parametrize("key", ["platform", "case", "run_id"])
def test_run_json_says_what_nobody_asked_for(key: str, tmp_path: Path) -> None:
    """What pytest was told stands in the journal: evidence under another platform's name is seen in both places."""
    built = good(tmp_path)
    folder = built.write()
    argv = ["pytest", "--fp8-out", "x", "--fp8-platform", "cpu", "--fp8-run-id", RUN_ID]
    path = folder / "journal.jsonl"
    path.write_text(path.read_text().replace('["pytest"]', json.dumps(argv)))
    assert gate.judge(folder).exit_code == 0
    value = {"platform": "mi300x", "case": "formats*", "run_id": "0ld"}[key]
    machine = {**built.run["capabilities"], "platform": value if key == "platform" else "cpu"}
    (folder / "run.json").write_text(json.dumps({**built.run, key: value, "capabilities": machine}))
    judgement = gate.judge(folder)
    assert (verdict(judgement, "numerics/suite::arguments"), judgement.exit_code) == (Verdict.DISAGREE, 3)


def test_no_case_was_selected(tmp_path: Path) -> None:
    """What a run with a glob that matches nothing has left: red by name, also when it is judged among others."""
    built = Built(tmp_path, ("numerics", "codegen"))
    built.run["case"] = "nosuch"
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    built.deselected.update(numerics=500, codegen=20)
    judgement = gate.judge(built.write())
    assert [result.id for result in judgement.results] == ["numerics/suite::cases"]
    assert "no case of numerics, codegen matches 'nosuch'" in judgement.results[0].message
    assert judgement.exit_code == 3


def test_nobody_counted_what_was_deselected(tmp_path: Path) -> None:
    """Workers that never came to their end say no count: unknown, which is not none."""
    built = good(tmp_path)
    built.deselected["numerics"] = None
    folder = built.write()
    assert gate.judge(folder).exit_code == 0
    judgement = gate.judge(folder, whole=True)
    assert (verdict(judgement, "numerics/suite::deselected"), judgement.exit_code) == (Verdict.MISSING, 3)
    assert "nobody counted" in of(judgement, "numerics/suite::deselected").message


def test_deselected_by_an_argument_of_pytest(tmp_path: Path) -> None:
    """`-- -k one`: no manifest names what is gone, and the run is not the whole."""
    built = Built(tmp_path, ("numerics", "codegen")).test(NUMERICS_TEST).test("codegen/test_a::test_a")
    built.deselected["numerics"] = 500
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"
    folder = built.write()
    assert gate.judge(folder).exit_code == 0
    judgement = gate.judge(folder, whole=True)
    assert (verdict(judgement, "numerics/suite::deselected"), judgement.exit_code) == (Verdict.MISSING, 3)


WAIVER = """[[waiver]]
id = "{}"
platform = "cpu"
reason = "too hard"
issue = "https://example.org/1"
owner = "someone"
expires = 2026-03-01
"""


@pytest.mark.parametrize("finding", ["manifest", "collection"])
def test_a_waiver_speaks_of_a_test(finding: str, tmp_path: Path) -> None:
    """One for what is said of a whole suite would let its manifest be deleted."""
    built = good(tmp_path).waiver(WAIVER.format(f"numerics/suite::{finding}"))
    (built.baselines / "cpu/manifest.txt").unlink()
    judgement = gate.judge(built.write())
    assert verdict(judgement, "numerics/suite::manifest") is Verdict.NO_BASELINE
    assert judgement.exit_code != 0


def test_stopped_after_a_deadline(tmp_path: Path) -> None:
    """A suite that we stopped at its deadline does not hide that the run was stopped afterwards."""
    built = good(tmp_path).process("numerics", rc=None, signal="SIGTERM", killed_by="deadline")
    built.run["interrupted"] = True
    assert gate.judge(built.write()).exit_code == 130


def test_a_file_name_with_a_null_byte(tmp_path: Path) -> None:
    """It is unreadable, not a traceback."""
    built = good(tmp_path).test(LOSS_TEST, loss_file="losses/\0")
    assert verdict(gate.judge(built.write()), LOSS_TEST) is Verdict.UNREADABLE


@pytest.mark.parametrize(
    ("said", "exit_code", "element"),
    [("UNMEASURABLE", 0, "skipped"), ("INCONCLUSIVE", 3, "error"), ("IMPLAUSIBLE", 1, "failure"), ("PASS", 3, "error")],
)
def test_a_verdict_that_a_test_gives_itself(said: str, exit_code: int, element: str, tmp_path: Path) -> None:
    """It ran and held, and says that it proves nothing: never a pass. A pass is not a test's to give."""
    built = good(tmp_path).test(NUMERICS_TEST, verdict=said, reason="0.4 us at a timer of 1 us").test(OTHER_TEST)
    judgement = gate.judge(built.write())
    result = of(judgement, NUMERICS_TEST)
    assert result.verdict == (said if said != "PASS" else "DISAGREE")
    assert (judgement.exit_code, result.junit) == (exit_code, element)
    assert said == "PASS" or result.message == "0.4 us at a timer of 1 us"


def test_a_suite_of_which_nothing_counts(tmp_path: Path) -> None:
    """Every test says that it was too short to time, or was skipped: nothing was judged, which is no success."""
    built = good(tmp_path).test(NUMERICS_TEST, verdict="UNMEASURABLE", reason="0.4 us").test(OTHER_TEST, "skipped")
    judgement = gate.judge(built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST]).write())
    assert (verdict(judgement, "numerics/suite::skipped"), judgement.exit_code) == (Verdict.MISSING, 3)


@pytest.mark.parametrize(("noisy", "exit_code"), [(1, 0), (2, 3)], ids=["gate-within-budget", "gate-beyond-budget"])
@pytest.mark.parametrize("policy", ["pull-request", "main"])
def test_the_budget_of_noise(noisy: int, exit_code: int, policy: str, tmp_path: Path) -> None:
    """One of twenty rows may be INCONCLUSIVE, listed and not a pass; two are a machine too noisy to judge, exit 3."""
    built = Built(tmp_path, ("numerics",))
    for number in range(20):
        said = {"verdict": "INCONCLUSIVE", "reason": "the probe moved"} if number < noisy else {}
        built.test(f"numerics/test_a::test_a[{number:02}]", **said)
    built.run["policy"] = policy
    judgement = gate.judge(built.baseline(loss=False, codegen=False).write())
    assert (judgement.exit_code, judgement.counts["INCONCLUSIVE"]) == (exit_code, noisy)
