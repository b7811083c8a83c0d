"""A requirement meets a machine: one function decides, and the text is always `requires X; this is Y`."""

from __future__ import annotations

from typing import Any

import pytest

from harness import capabilities
from harness.capabilities import Run, Skip, decide, parse
from harness.errors import ConfigError, UnreadableError


def machine(**changes: Any) -> capabilities.Capabilities:
    """An MI300X host with one GPU, or what `changes` make of it."""
    facts = {
        "arch": "gfx942",
        "target": "gfx942",
        "vendor": "amd",
        "device_name": "AMD Instinct MI300X",
        "device_count": 1,
        "memory_gib": 191.5,
        "e4m3": "e4m3fnuz",
        "native_fp8_matmul": True,
        "torch": "2.10.0+rocm7.2.4",
        "triton": "3.6.0",
        "hip": "7.2.4",
        "cuda": None,
    }
    return capabilities.from_facts({**facts, **changes})


MI300X = machine()


def test_the_fields_own_example() -> None:
    """A distributed test that needs four GPUs skips where there is one and runs where there are four."""
    assert decide(parse(gpus=4), MI300X) == Skip("requires 4 gpus; this is mi300x with 1")
    assert decide(parse(gpus=4), machine(device_count=4)) == Run()


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        pytest.param(parse("fp8:fnuz"), Run(), id="fnuz"),
        pytest.param(parse("fp8:ocp"), Skip("requires fp8:ocp; this is mi300x with fp8:fnuz"), id="ocp"),
        pytest.param(parse("vendor:amd", "arch:gfx942", gpus=1), Run(), id="several"),
        pytest.param(parse("arch:gfx950"), Skip("requires arch:gfx950; this is mi300x with arch:gfx942"), id="arch"),
        pytest.param(parse("triton>=3.6"), Run(), id="version-equal"),
        pytest.param(
            parse("triton>=3.10"), Skip("requires triton>=3.10; this is mi300x with triton 3.6.0"), id="numbers"
        ),
        pytest.param(parse("torch>=2.9.1"), Run(), id="version-with-local-part"),
        pytest.param(parse("cuda>=12"), Skip("requires cuda>=12; this is mi300x with cuda none"), id="absent-version"),
        pytest.param(parse(memory_gib=40), Run(), id="memory"),
        pytest.param(
            parse(memory_gib=192), Skip("requires 192 GiB a GPU; this is mi300x with 191.5"), id="memory-short"
        ),
        pytest.param(parse(), Run(), id="nothing"),
    ],
)
def test_decide(requirements: tuple[capabilities.Requirement, ...], expected: capabilities.Decision) -> None:
    """Versions compare as numbers, names for equality, the first that fails gives the reason."""
    assert decide(requirements, MI300X) == expected


def test_what_the_probe_cannot_say_is_said() -> None:
    """Unknown is no yes, and the reason does not invent a value."""
    unsure = machine(memory_gib=None, e4m3=None)
    assert decide(parse(memory_gib=1), unsure) == Skip("requires 1 GiB a GPU; this is mi300x with unknown memory_gib")
    assert decide(parse("fp8:ocp"), unsure) == Skip("requires fp8:ocp; this is mi300x with unknown fp8")


@pytest.mark.parametrize(
    "written",
    ["rocm", "fp8:e4m3", "gpu>=2", "gpus:2", "fp8>=2", "triton>=new", "vendor:intel", "not fp8:fnuz", ""],
)
def test_a_requirement_that_is_none_is_an_error(written: str) -> None:
    """A typing mistake must not remove a test from the gate."""
    with pytest.raises(ConfigError, match="requirement"):
        parse(written)


def test_an_unknown_keyword_is_an_error() -> None:
    """So is a keyword that no row names."""
    with pytest.raises(ConfigError, match="'gpu=2' has no known kind; expected one of fp8, "):
        parse(gpu=2)


def test_json_round_trip() -> None:
    """What the run wrote is what the plugin reads."""
    assert capabilities.Capabilities.from_json(MI300X.to_json()) == MI300X
    for text in ("", "{}", "[1]", '{"platform": "cpu"}'):
        with pytest.raises(UnreadableError):
            capabilities.Capabilities.from_json(text)


def test_a_device_without_a_platform_keeps_its_name() -> None:
    """The reason names the device that is there, not the nearest platform."""
    assert machine(device_name="AMD Instinct MI300A").platform == "AMD Instinct MI300A"
    assert capabilities.from_facts({"vendor": "cpu", "device_name": "x86_64"}).platform == "cpu"
    assert capabilities.from_facts({"vendor": "cpu", "device_count": 4}).gpus == 0
