"""The journal survives its writer, and reading it says what is there and what is damaged."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import DiskError, MissingError, UnreadableError
from harness.journal import JournalWriter, plain_value, shorten
from harness.journal_reader import Journal, JournalTail

A = "numerics/test_a::test_a"
B = "numerics/test_a::test_b"


def written(path: Path, *events: dict[str, object]) -> Journal:
    with JournalWriter(path) as writer:
        for event in events:
            fields = dict(event)
            writer.write(str(fields.pop("event")), **fields)
    return Journal.read(path)


def phase(test_id: str, name: str, outcome: str = "passed", **fields: object) -> dict[str, object]:
    return {"event": "phase", "id": test_id, "phase": name, "outcome": outcome, "seconds": 0.5, **fields}


def start(test_id: str) -> dict[str, object]:
    return {"event": "start", "id": test_id, "time": 1.0}


def test_states(tmp_path: Path) -> None:
    """A test is what its phases say, running until its teardown has ended, not-run until it starts."""
    ids = [f"numerics/test_a::test_{letter}" for letter in "abcdefg"]
    told = written(
        tmp_path / "j",
        {"event": "collected", "suite": "numerics", "ids": ids},
        *[start(test_id) for test_id in ids[:6]],
        *[phase(ids[0], name) for name in ("setup", "call", "teardown")],
        *[phase(ids[1], "setup"), phase(ids[1], "call", "failed", message="m", detail="d"), phase(ids[1], "teardown")],
        *[phase(ids[2], "setup", "skipped", message="requires X; this is Y"), phase(ids[2], "teardown")],
        phase(ids[3], "setup"),
        *[phase(ids[4], "setup"), phase(ids[4], "call"), phase(ids[4], "teardown", "failed", message="leak")],
        *[phase(ids[5], "setup"), phase(ids[5], "call")],
    )
    states = ["passed", "failed", "skipped", "running", "failed", "running", "not-run"]
    assert [told.tests[test_id].state for test_id in ids] == states
    assert told.tests[ids[1]].message == "m"
    assert told.tests[ids[1]].detail == "d"
    assert told.tests[ids[0]].seconds == 1.5
    assert told.tests[ids[4]].failed_phase == "teardown"
    assert told.tests[ids[2]].message == "requires X; this is Y"
    assert told.damage == []


def test_a_second_attempt_replaces_the_first_and_remembers_it(tmp_path: Path) -> None:
    """Properties and phases are the last attempt's; how the first ended stays visible."""
    told = written(
        tmp_path / "j",
        *[start(A), phase(A, "call", "failed", properties={"x": 1}), phase(A, "teardown")],
        *[start(A), phase(A, "call", properties={"y": 2}), phase(A, "teardown")],
    )
    assert told.tests[A].state == "passed"
    assert told.tests[A].earlier == ["failed"]
    assert told.tests[A].properties == {"y": 2}


def test_processes_sessions_and_crashes(tmp_path: Path) -> None:
    """What the harness and the controller add around the tests."""
    told = written(
        tmp_path / "j",
        {"event": "process-start", "suite": "loss", "attempt": 1, "argv": ["x"]},
        {"event": "session", "suite": "loss", "run_id": "r", "pid": 7, "time": 1.0},
        {"event": "collect-error", "suite": "loss", "path": "p", "message": "m"},
        {"event": "worker-crash", "suite": "loss", "id": A, "worker": "gw0", "signal": "SIGSEGV", "message": "gone"},
        {"event": "session-end", "suite": "loss", "rc": 1},
        {
            "event": "process-end",
            "suite": "loss",
            "attempt": 1,
            "rc": 1,
            "signal": None,
            "killed_by": None,
            "seconds": 2,
        },
        {"event": "process-start", "suite": "loss", "attempt": 2, "argv": ["x"]},
    )
    first, second = told.processes
    assert (first.ended, first.rc, first.signal, first.killed_by, first.seconds) == (True, 1, None, None, 2.0)
    assert not second.ended
    assert [session.rc for session in told.sessions] == [1]
    assert told.run_ids == {"r"}
    assert told.crashes[0].signal == "SIGSEGV"
    assert told.collect_errors[0].path == "p"


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_a_cut_last_line(keep: int, tmp_path: Path) -> None:
    """Everything before the cut is read, and the cut is reported; appending afterwards loses nothing more."""
    path = tmp_path / "j"
    written(path, start(A), phase(A, "call"), phase(A, "teardown"), start(B))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-1][:keep])
    told = Journal.read(path)
    assert told.tests[A].state == "passed"
    assert B not in told.tests
    assert len(told.damage) == 1
    assert "line 4 is cut" in told.damage[0]
    again = written(path, {"event": "process-start", "suite": "numerics", "attempt": 1, "argv": []})
    assert len(again.processes) == 1
    assert again.tests[A].state == "passed"
    assert len(again.damage) == 1


@pytest.mark.parametrize(
    "line",
    [b"\x00\xff\n", b"[1]\n", b'{"event": "made-up"}\n', b'{"event": "phase", "id": 3}\n', b'{"event": "collected"}\n'],
)
def test_what_is_no_event_is_damage(line: bytes, tmp_path: Path) -> None:
    """It is reported and passed over, whatever it is."""
    path = tmp_path / "j"
    written(path, start(A), phase(A, "call"), phase(A, "teardown"))
    path.write_bytes(line + path.read_bytes())
    told = Journal.read(path)
    assert told.tests[A].state == "passed"
    assert len(told.damage) == 1


def test_no_journal_is_an_error(tmp_path: Path) -> None:
    """Absence is not an empty run."""
    with pytest.raises(MissingError, match="does not exist"):
        Journal.read(tmp_path / "journal.jsonl")


class Text(str):
    """A text of a class of its own, as a plugin may hand it on."""

    __slots__ = ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\ud800 \x00 \x1b[31m ]]> 🚀 \u2028 \r\n", id="a lone surrogate"),
        pytest.param("\x00 \x1b[31m ]]> 🚀 \u2028 \r\n", id="no ASCII"),
        pytest.param("\x00 \x1b[31m ]]> \r\n", id="ASCII"),
        pytest.param(Text("x"), id="a subclass of str"),
    ],
)
def test_any_text_survives(tmp_path: Path, text: str) -> None:
    """Lone surrogates, control characters and emoji come back, on one ASCII line."""
    told = written(tmp_path / "j", start(A), phase(A, "call", "failed", message=text))
    assert told.tests[A].message == text
    assert (tmp_path / "j").read_bytes().isascii()


def test_a_killed_writer_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    """SIGKILL right after a write: the line is there, without a flush or a close."""
    path = tmp_path / "j"
    source = (
        "import os, signal, sys; from pathlib import Path; from harness.journal import JournalWriter;"
        f"w = JournalWriter(Path({str(path)!r}));"
        f"[w.write('start', id='numerics/test_a::test_%d' % i, time=0.0) for i in range(50)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", source], cwd=root, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    told = Journal.read(path)
    assert len(told.tests) == 50
    assert told.damage == []


def test_writers_side_by_side_do_not_mix_lines(tmp_path: Path) -> None:
    """Two processes append long lines to one journal: each line is whole."""
    path = tmp_path / "j"
    source = (
        "import sys; from pathlib import Path; from harness.journal import JournalWriter;"
        f"w = JournalWriter(Path({str(path)!r}));"
        "ids = ['numerics/test_a::test_%s_%d' % (sys.argv[1], i) for i in range(40)];"
        "[w.write('start', id=i, time=0.0, pad='x' * 20000) for i in ids]"
    )
    root = Path(__file__).resolve().parents[2]
    children = [subprocess.Popen([sys.executable, "-c", source, name], cwd=root) for name in "ab"]
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    told = Journal.read(path)
    assert len(told.tests) == 80
    assert told.damage == []


def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    """A line that the file system takes in part raises; reading reports the part."""
    path = tmp_path / "j"
    pid = os.fork()
    if pid == 0:  # the limit holds for this child only
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            writer = JournalWriter(path)
            writer.write("start", id=A, time=1.0)
            writer.write("start", id=B, time=1.0, pad="x" * 2000)
        except DiskError as error:
            os._exit(42 if "1000" not in str(error) and "took" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    told = Journal.read(path)
    assert set(told.tests) == {A}
    assert "cut" in told.damage[0]


def test_reading_along(tmp_path: Path) -> None:
    """The tail gives whole events only, and each once."""
    path = tmp_path / "j"
    tail = JournalTail(path)
    assert tail.read() == []
    with JournalWriter(path) as writer:
        writer.write("start", id=A, time=1.0)
        half, rest = b'{"event": "sta', b'rt", "id": "b"}\n'
        with path.open("ab") as other:
            other.write(half)
        assert [event["id"] for event in tail.read()] == [A]
        with path.open("ab") as other:
            other.write(rest)
        assert [event["id"] for event in tail.read()] == ["b"]
        assert tail.read() == []


class Metres(float):
    """A float that execnet would refuse, like NumPy's."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Metres(1.5), 1.5),
        (True, 1),
        (7, 7),
        ("x", "x"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (None, None),
        ([1], None),
        (b"x", None),
    ],
)
def test_plain_value(value: object, expected: object) -> None:
    """Exactly str, int or float, and JSON can hold it."""
    plain = plain_value(value)
    assert plain == expected
    assert type(plain) is type(expected)
    json.dumps(plain, allow_nan=False)


def test_shorten() -> None:
    """The beginning and more of the end stay; the gap says how much went."""
    text = shorten("a" * 100 + "b" * 900, 200)
    assert text.startswith("a" * 50 + "\n[... 800 characters left out ...]\n")
    assert text.endswith("b" * 150)
    assert shorten("short") == "short"


def test_a_call_that_did_not_run_passed_nothing(tmp_path: Path) -> None:
    """`--setup-only` reports set-up and teardown as passed; the test itself never ran."""
    told = written(tmp_path / "j", start(A), phase(A, "setup"), phase(A, "teardown"))
    assert told.tests[A].state == "not-run"


@pytest.mark.parametrize("attempts", [(1, 1), (2,), (1, 3)], ids=["twice", "headless", "gap"])
def test_attempts_that_do_not_follow_each_other(attempts: Sequence[int], tmp_path: Path) -> None:
    """A journal that is there twice, or has lost its beginning, is no run that was repeated."""
    begun = [{"event": "process-start", "suite": "loss", "attempt": number, "argv": []} for number in attempts]
    told = written(tmp_path / "j", *begun)
    assert told.damage == [f"attempt {attempts[-1]} of loss does not follow the one before it"]


def test_an_attempt_that_a_plugin_repeats_is_kept(tmp_path: Path) -> None:
    """pytest-rerunfailures reports `rerun` and starts again without saying so; the failure stays visible."""
    told = written(
        tmp_path / "j",
        *[start(A), phase(A, "setup"), phase(A, "call", "rerun"), phase(A, "teardown")],
        *[phase(A, "setup"), phase(A, "call"), phase(A, "teardown")],
    )
    assert (told.tests[A].state, told.tests[A].earlier) == ("passed", ["failed"])


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            b'{"event": "phase", "id": "a/b::c", "phase": "call", "outcome": "green", "seconds": 1}', id="outcome"
        ),
        pytest.param(
            b'{"event": "phase", "id": "a/b::c", "phase": "call", "outcome": "passed", "seconds": NaN}', id="nan"
        ),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_values_that_mean_nothing_are_damage(line: bytes, tmp_path: Path) -> None:
    """An outcome that is none, a time that is none, and brackets that exhaust the parser."""
    path = tmp_path / "j"
    path.write_bytes(line + b"\n")
    told = Journal.read(path)
    assert len(told.damage) == 1
    assert told.tests == {}


def test_a_process_end_with_other_types(tmp_path: Path) -> None:
    """An exit code that is no number leaves the process without an end; a signal may be a number."""
    begun = {"event": "process-start", "suite": "loss", "attempt": 1, "argv": []}
    end = {"event": "process-end", "suite": "loss", "attempt": 1, "killed_by": None, "seconds": 1}
    told = written(tmp_path / "j", begun, {**end, "rc": "zero", "signal": None})
    assert not told.processes[0].ended
    assert written(tmp_path / "k", begun, {**end, "rc": None, "signal": 9}).processes[0].signal == "9"


def test_a_journal_that_is_a_folder(tmp_path: Path) -> None:
    """One line, no traceback."""
    with pytest.raises(UnreadableError, match="cannot be read"):
        Journal.read(tmp_path)
