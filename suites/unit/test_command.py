"""Command lines of fp8stack whose output nobody reads, or that somebody stops."""

from __future__ import annotations

import ast
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8stack import compare, device, profile, train
from suites.perf import tables

ROOT = Path(__file__).parents[2]
STEPS = ["--steps", "3", "--layers", "1", "--batch", "1", "--seq", "8", "--device", "cpu"]


class Broken(io.TextIOBase):
    """A stream that takes nothing."""

    encoding = "utf-8"

    def __init__(self, error: OSError) -> None:
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def a_trace(folder: Path) -> list[str]:
    """A trace of one step without any work."""
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [mark]}))
    return [str(folder)]


def two_runs(folder: Path) -> list[str]:
    """A run, twice."""
    assert train.main([*STEPS, "--out", str(folder / "a")]) == 0
    return [str(folder / "a")] * 2


COMMANDS: dict[str, Callable[[Path], int]] = {
    "device": lambda folder: device.main(),
    "compare": lambda folder: compare.main(two_runs(folder)),
    "profile": lambda folder: profile.main(a_trace(folder)),
}
"""Each prints once, at its end; what it returns otherwise is 0."""


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in COMMANDS])
def test_a_reader_that_has_gone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`... | head -1`: no traceback, and the exit code is what it would be."""
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(32, "Broken pipe")))
    assert COMMANDS[name](tmp_path) == 0


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in COMMANDS])
def test_a_full_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for is lost: one line, and never 0."""
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    assert COMMANDS[name](tmp_path) == (2 if name == "compare" else 1)  # 1: outside its band
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "stdout cannot be written (No space left on device); expected room; free some, or write elsewhere"


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(32, "Broken pipe"), 0), (OSError(28, "No space"), 1)])
def test_a_dry_run_that_nobody_reads(error: OSError, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of the trainer's one page."""
    monkeypatch.setattr(train.dryrun, "dry_run", lambda *_: {})
    monkeypatch.setattr(sys, "stdout", Broken(error))
    assert train.main(["--dry-run", "--json", *STEPS]) == code


@pytest.mark.parametrize(("redirect", "code"), [("| true", 0), ("> /dev/full", 1), (">&-", 0)])
def test_streams_of_a_shell(redirect: str, code: int) -> None:
    """The same with real ones, to the end of the process: Python writes at its exit what a stream still holds."""
    body = "import sys, time; from fp8stack import command; time.sleep(0.3); sys.exit(not command.show('x' * 99999))"
    line = f'set -o pipefail; {sys.executable} -c "{body}" {redirect}'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == (code != 0), done.stderr


def test_no_reader_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of suites/perf say what they measure with the same function: a GPU's minutes outlive a pager."""
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(32, "Broken pipe")))
    assert tables.main(["ROWWISE_CONFIGS"]) == 0
    for name in ("kernels", "grouped_gemm", "moe", "prove", "ranks", "sweep", "tables", "trainer"):
        calls = [
            node
            for node in ast.walk(ast.parse((ROOT / "suites" / "perf" / f"{name}.py").read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        bare = [node.lineno for node in calls if not any(word.arg == "file" for word in node.keywords)]
        assert not bare, f"suites/perf/{name}.py prints in lines {bare}"


def test_a_stopped_command() -> None:
    """Ctrl-C: one line, and the exit code of an interrupt."""
    # A shell in the background hands on a SIGINT that is ignored, and Python leaves it so.
    code = (
        "import signal, time; from fp8stack import command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def main():\n    print('on', flush=True)\n    time.sleep(60)\n"
        "raise SystemExit(command.run('train', main))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "train: interrupted\n")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["train", "compare", "profile", "device"])
def test_every_command_can_be_stopped(name: str) -> None:
    """Each module that is a command is started by command.run."""
    text = (ROOT / "fp8stack" / f"{name}.py").read_text(encoding="utf-8")
    assert text.endswith(f'if __name__ == "__main__":\n    sys.exit(command.run("{name}", main))\n')
