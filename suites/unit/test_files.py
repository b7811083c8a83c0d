"""What the harness opens is a file with an end, inside of its folder: no pipe, no device, no link to elsewhere.

Each is one clear error at once. A pipe without a writer is waited for forever, so every test here has a few seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import cli, combine, deaths, files, gate, junit, run
from harness.errors import DiskError, UnreadableError, Verdict
from harness.executor import Ended
from harness.journal_reader import Journal, JournalTail
from suites.unit.built_evidence import CODEGEN_CASE, LOSS_CASE, good

CORPUS = Path(__file__).with_name("corpus")


@pytest.fixture(autouse=True)
def _few_seconds() -> Iterator[None]:
    """A hang is a failure of its own test, not of the session."""

    def hung(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


LINKED = ("run.json", "journal.jsonl", "junit.xml", "judged-with", "logs", "judged-with/cpu/manifest.txt")
MEASURED = (f"losses/{LOSS_CASE}.json", f"isa/{CODEGEN_CASE}.json")


@pytest.mark.parametrize("name", [*LINKED, "logs/numerics.log", *MEASURED])
def test_a_link_that_leads_out_of_the_evidence(name: str, tmp_path: Path) -> None:
    """Whatever it leads to is not what the run left. One that stays inside is that file."""
    evidence = tmp_path / "evidence"
    good(evidence).write()
    junit.write(gate.judge(evidence), gate.read_run(evidence), evidence / "junit.xml")
    assert gate.judge(evidence).exit_code == 0
    for target, verdict in ((evidence / "inside", Verdict.PASS), (tmp_path / "outside", Verdict.UNREADABLE)):
        shutil.move(evidence / name, target)
        (evidence / name).symlink_to(target)
        judgement, _ = combine.judge([evidence])
        assert judgement.red[0].verdict is verdict if judgement.red else verdict is Verdict.PASS
        if verdict is Verdict.UNREADABLE:
            assert "outside of the evidence folder" in judgement.red[0].message
            assert cli.main(["gate", str(evidence)]) == 3
        (evidence / name).unlink()
        shutil.move(target, evidence / name)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", [*LINKED[:3], "judged-with/cpu/manifest.txt", "judged-with/waivers.toml", *MEASURED])
def test_evidence_that_is_no_file(kind: str, name: str, tmp_path: Path) -> None:
    """A pipe in place of each file of an evidence folder, and a device by a link."""
    good(tmp_path).write()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).symlink_to("/dev/zero")
    judgement, _ = combine.judge([tmp_path])
    assert (judgement.red[0].verdict, judgement.exit_code) == (Verdict.UNREADABLE, 3)
    assert cli.main(["gate", str(tmp_path)]) == 3


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/null", "/dev/stdin"])
def test_a_path_that_is_no_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given where a folder or a report is expected: an error by name, and the rest is judged."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    given = str(path if kind == "pipe" else kind)
    assert cli.main(["gate", given]) == 2
    assert capsys.readouterr().err.startswith(f"fp8ci: {given} is no folder; expected")
    assert cli.main(["gate", given, "--expect", "cpu"]) == 3
    assert f"{Path(given).name}: cannot be read (is no regular file)" in capsys.readouterr().out
    assert cli.main(["gate", given, str(CORPUS / "plain.xml")]) == 3
    out = str(tmp_path / "out.xml")
    assert cli.main(["merge", given, str(CORPUS / "plain.xml"), "--out", out]) == 3
    assert cli.main(["diff", given, given]) == 2
    assert "is no regular file" in Path(out).read_text()


def test_a_target_that_is_no_file(tmp_path: Path) -> None:
    """A report is put in place by renaming: that would take the place of a device, or of a pipe that somebody reads."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DiskError, match="is no regular file"):
        junit.save(None, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_journal_that_becomes_a_pipe(tmp_path: Path) -> None:
    """A test may do that to the run that reads along: an error, and no wait."""
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(UnreadableError, match="is no regular file"):
        Journal.read(tmp_path / "journal.jsonl")
    with pytest.raises(OSError, match="is no regular file"):
        JournalTail(tmp_path / "journal.jsonl").read()


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    """The usual errors stay what they are."""
    with pytest.raises(FileNotFoundError):
        files.read_text(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)
    (tmp_path / "file").write_text("a\u00e9")
    assert files.read_text(tmp_path / "file") == "a\u00e9"
    assert files.tail(tmp_path / "file", 2) == b"\xc3\xa9"


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    """A log of 300 MB of which the last line accuses the GPU: seen, in a few MB of memory."""
    log = tmp_path / "logs" / "numerics.log"
    log.parent.mkdir()
    with log.open("wb") as stream:
        stream.truncate(300_000_000)
        stream.seek(0, 2)
        stream.write(b"\nHW Exception by GPU node-1\n")
    tracemalloc.start()
    assert deaths.log_tail(tmp_path, "numerics").endswith("HW Exception by GPU node-1")
    assert run._suspect(Ended(rc=None, signal="SIGABRT", killed_by=None, seconds=1.0, pid=1), log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000
