"""The fixtures of suites/conftest.py: evidence, seed, poison."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from suites.cases import poison_value


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
