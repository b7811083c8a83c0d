"""The fixtures of suites/conftest.py (evidence, seed, poison), and the ids that every suite collects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from suites.cases import poison_value

ROOT = Path(__file__).resolve().parents[2]


def test_evidence_writes(evidence: Any) -> None:
    """A file is written whole, its folders made, and the name for the record is the one that was given."""
    assert evidence.write_json("losses/a.json", {"b": 1.5}) == "losses/a.json"
    assert json.loads((evidence.out / "losses/a.json").read_text()) == {"b": 1.5}
    evidence.write_text("isa/a.s", "text")
    evidence.write_text("isa/a.s", "newer")
    assert (evidence.out / "isa/a.s").read_text() == "newer"
    assert [path.name for path in (evidence.out / "isa").iterdir()] == ["a.s"]


def test_evidence_refuses(evidence: Any, tmp_path: Path) -> None:
    """NaN is no JSON, and a name that leaves the folder is no name: both are refused and nothing is written."""
    with pytest.raises(ValueError, match="JSON"):
        evidence.write_json("a.json", {"loss": math.nan})
    for name in ("../a.txt", "/tmp/a.txt", "."):
        with pytest.raises(ValueError, match="evidence folder"):
            evidence.write_text(name, "text")
    assert not (evidence.out / "a.json").exists()
    assert not (evidence.out.parent / "a.txt").exists()


def test_seed_belongs_to_the_test(seed: int, request: pytest.FixtureRequest) -> None:
    """The seed depends on the test's id alone (no hash that changes by process), and is in the properties."""
    assert seed == zlib.crc32(b"test_seed_belongs_to_the_test") & 0x7FFFFFFF
    assert ("seed", seed) in request.node.user_properties


FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, id=f"compare-poison-{str(dtype).removeprefix('torch.')}")
        for dtype in (torch.uint8, torch.int32, torch.float32, torch.bfloat16, *FP8)
    ],
)
def test_poison(dtype: torch.dtype, poison: None) -> None:
    """Uninitialised memory of any dtype, on any path to it, holds the poison and not an old result."""
    expected = poison_value(dtype)
    for made in (torch.empty(5, dtype=dtype), torch.empty_strided((2, 3), (1, 2), dtype=dtype)):
        for value in made.to(torch.float64).reshape(-1).tolist():
            assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_poison_ends_with_its_test() -> None:
    """Outside of the fixture torch is as it was."""
    assert not torch.are_deterministic_algorithms_enabled()


def _collected(suite: str, hash_seed: int) -> list[str]:
    """The test ids that pytest collects for a suite in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    for variable in ("TRITON_INTERPRET", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(variable, None)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", f"suites/{suite}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


SUITES = sorted(
    path.name for path in (ROOT / "suites").iterdir() if any(path.glob("test_*.py")) and path.name != "perf"
)


@pytest.mark.parametrize("suite", [pytest.param(suite, id=f"compare-collected-{suite}") for suite in SUITES])
def test_collection_is_the_same_everywhere(suite: str) -> None:
    """Two processes with different hash seeds collect the same ids in the same order, each once, ASCII and readable.

    xdist's workers must agree on the list (pytest-dev/pytest-xdist#432), and an id is a key of manifests and baselines.
    """
    ids = _collected(suite, 0)
    assert ids == _collected(suite, 4)
    assert len(set(ids)) == len(ids) > 0
    for test in ids:
        module, _, rest = test.partition("::")
        name = f"{Path(module).stem}::{rest}"
        assert name.isascii(), test
        assert len(name) <= 150, f"{test} has {len(name)} characters; expected at most 150"
        assert " at 0x" not in test, f"{test} holds an address"
