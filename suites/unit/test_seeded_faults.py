"""The numerics suite goes red for the mistakes it exists for: each is made in a copy of the tree, and must be named.

A suite that stays green under a wrong constant is worse than none. Every fault is one replacement in a source file; a
fault whose text is no longer there is red as well, so the list ages with the code. Each runs only the tests that ought
to see it, in a fresh process, in Triton's interpreter, with the compiled path left out: compiling costs seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CAST = "suites/numerics/test_cast.py"
FORMATS = "suites/numerics/test_formats.py"
ROWWISE = "suites/numerics/test_rowwise.py"
SCALING = "suites/numerics/test_scaling.py"


@dataclass(frozen=True)
class Fault:
    """One wrong edit (the first match of the pattern ``old`` becomes ``new``) and the tests that must name it."""

    file: str
    old: str
    new: str
    selection: tuple[str, ...]
    must_fail: tuple[str, ...]


def _cast_rows(path: str) -> tuple[str, ...]:
    """The rows that a missing clamp spoils. In e4m3fn 449 and 464 round to 448 by themselves."""
    beyond = {
        "e4m3fn": ("465", "1000", "neg1000", "inf", "neginf"),
        "e4m3fnuz": ("248", "449", "464", "465", "1000", "neg1000", "inf", "neginf"),
        "e5m2": ("1e6", "neg1e6", "inf", "neginf"),
        "e5m2fnuz": ("1e6", "neg1e6", "inf", "neginf"),
    }
    return tuple(f"{CAST}::test_cast_rows[cast-{fmt}-{path}-{word}]" for fmt, words in beyond.items() for word in words)


def _maximum(value: str, *also: str) -> Fault:
    return Fault(
        file="fp8stack/formats.py",
        old=r"\bmax=240\.0",
        new=f"max={value}",
        selection=(
            f"{ROWWISE}::test_maximum_row",
            f"{ROWWISE}::test_golden",
            f"{SCALING}::test_scale_of_the_maximum",
            f"{FORMATS}::test_facts",
        ),
        must_fail=(
            f"{ROWWISE}::test_maximum_row[rowwise-e4m3fnuz-bf16-maximum-row]",
            f"{ROWWISE}::test_golden[rowwise-e4m3fnuz-bf16-golden-pow2]",
            f"{ROWWISE}::test_golden[rowwise-e4m3fnuz-fp32-golden-plain]",
            f"{SCALING}::test_scale_of_the_maximum[scaling-e4m3fnuz-plain]",
            f"{FORMATS}::test_facts[formats-e4m3fnuz]",
            *also,
        ),
    )


FAULTS: dict[str, Fault] = {
    # Powers of two hide 448 / 240 = 1.87 in the row of the maximum (other golden rows see it), and show 224 / 240.
    "fnuz-maximum-448": _maximum("448.0"),
    "fnuz-maximum-224": _maximum("224.0", f"{SCALING}::test_scale_of_the_maximum[scaling-e4m3fnuz-pow2]"),
    "torch-cast-without-clamp": Fault(
        file="fp8stack/formats.py",
        old=r"\by = torch\.clamp\(.*\)",
        new="y = x",
        selection=(f"{CAST}::test_cast_rows",),
        must_fail=_cast_rows("torch"),
    ),
    "triton-cast-without-clamp": Fault(
        file="fp8stack/kernels/cast.py",
        old=r"\by = tl\.(clamp|minimum)\(.*\)",
        new="y = x",
        selection=(f"{CAST}::test_cast_rows",),
        must_fail=_cast_rows("kernel"),
    ),
    "kernel-turns-nan-into-a-number": Fault(
        file="fp8stack/kernels/cast.py",
        old=r"tl\.where\(amax_bits >= 0x7F800000, 0x7FC00000, bits\)",
        new="tl.where(amax_bits >= 0x7F800000, 0x3F800000, bits)",
        selection=(f"{ROWWISE}::test_neighbours",),
        must_fail=tuple(
            f"{ROWWISE}::test_neighbours[rowwise-{fmt}-{dtype}-{word}]"
            for fmt in ("e4m3fn", "e4m3fnuz")
            for dtype in ("bf16", "fp32")
            for word in ("nan-row", "all-nan-row", "inf-row")
        ),
    ),
    "rows-that-ran-the-reference": Fault(
        file="fp8stack/kernels/launch.py",
        old=r'return "triton" if _triton\.INTERPRETING else "reference"',
        new='return "reference"',
        selection=(f"{ROWWISE}::test_golden",),
        must_fail=(f"{ROWWISE}::test_golden[rowwise-e4m3fn-bf16-golden-pow2]",),
    ),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the faults are looked for in the interpreter")
@pytest.mark.parametrize("name", [pytest.param(name, id=f"fault-{name}") for name in FAULTS])
def test_fault_is_named(name: str, tmp_path: Path) -> None:
    """The suite is red, and the tests that name the mistake are among the red ones."""
    fault = FAULTS[name]
    for folder in ("fp8stack", "suites"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / fault.file
    edited, count = re.subn(fault.old, lambda _: fault.new, path.read_text(encoding="utf-8"), count=1)
    assert count == 1, f"{fault.file} no longer holds {fault.old!r}; bring the fault up to date"
    path.write_text(edited, encoding="utf-8")

    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **hidden, "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for variable in ("FP8STACK_ARCH", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(variable, None)
    options = ("-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "not compiled")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *fault.selection],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 1, f"pytest ended with {done.returncode}; expected 1, red tests:\n{shown}"
    failed = set(re.findall(r"^FAILED (\S+\[[^\]]+\])", done.stdout, re.MULTILINE))
    unseen = [test for test in fault.must_fail if test not in failed]
    assert not unseen, f"{name} was not seen by {unseen}; red were {sorted(failed)}"
