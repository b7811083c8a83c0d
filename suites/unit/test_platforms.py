"""Which platform a machine is: by whole names, with a reason, and never by falling through."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness import platforms
from harness.errors import InfraError, UsageError

KNOWN = {"mi300x", "mi325x", "mi350x", "mi355x", "h100", "h200", "b200", "cpu"}


def facts(vendor: str, name: str) -> dict[str, Any]:
    return {"vendor": vendor, "device_name": name}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("AMD Instinct MI300X", "mi300x", id="mi300x"),
        pytest.param("AMD Instinct MI300X VF", "mi300x", id="mi300x-virtual-function"),
        pytest.param("AMD Instinct MI300A", None, id="mi300a-is-not-mi300x"),
        pytest.param("AMD Instinct MI300", None, id="mi300-is-a-prefix"),
        pytest.param("AMD Instinct MI325X", "mi325x", id="mi325x"),
        pytest.param("AMD Instinct MI355X", "mi355x", id="mi355x"),
        pytest.param("NVIDIA H200", "h200", id="h200"),
        pytest.param("NVIDIA H20", None, id="h20-is-a-prefix-of-h200"),
        pytest.param("NVIDIA GH200 480GB", None, id="gh200-holds-h200"),
        pytest.param("NVIDIA H100 80GB HBM3", "h100", id="h100-sxm"),
        pytest.param("NVIDIA H100 PCIe", None, id="h100-pcie-has-other-rates"),
        pytest.param("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, id="a-slice-is-not-the-whole"),
        pytest.param("NVIDIA B200", "b200", id="b200"),
        pytest.param("NVIDIA GB200", None, id="gb200-holds-b200"),
        pytest.param("", None, id="no-name"),
    ],
)
def test_device_names_match_whole(name: str, expected: str | None) -> None:
    """A name that merely contains a platform's name is another device."""
    found = platforms.of_device(name)
    assert (found.id if found else None) == expected


def test_no_device_name_is_claimed_twice() -> None:
    """Every plain name in the table belongs to one platform."""
    assert set(platforms.PLATFORMS) == KNOWN
    for platform in platforms.PLATFORMS.values():
        for pattern in platform.device_names:
            name = pattern.partition("(")[0]
            assert [row.id for row in platforms.PLATFORMS.values() if row.names(name)] == [platform.id]


def test_what_platforms_gate() -> None:
    """What must run and what must have a baseline; of GPUs, some of which are timed, one has its loss curves.

    A GPU's shared curve is held against the CPU's, so its evidence takes that along.
    """
    cpu = platforms.PLATFORMS["cpu"]
    assert cpu.suites == ("numerics", "codegen", "loss")
    assert cpu.calibrated == ("codegen", "loss")
    assert cpu.codegen_archs == ("gfx942", "gfx950", "sm_90")
    calibrated = {row.id: row.calibrated for row in platforms.PLATFORMS.values() if row.calibrated and row is not cpu}
    assert calibrated == {"h200": ("loss", "perf")}
    assert set(cpu.baseline_files) == {
        "cpu/manifest.txt",
        "cpu/loss.json",
        "gfx942/codegen.json",
        "gfx950/codegen.json",
        "sm_90/codegen.json",
        "waivers.toml",
    }
    h200 = platforms.PLATFORMS["h200"]
    assert h200.suites == ("numerics", "loss", "perf")
    measure = {row.id for row in platforms.PLATFORMS.values() if "perf" in row.suites}
    assert measure == {"h200", "mi300x", "mi325x", "mi350x", "mi355x"}
    speed = {"h200/perf.json", "h200/published.json"}
    assert len(set(h200.baseline_files)) == len(h200.baseline_files)
    assert set(h200.baseline_files) == {"h200/manifest.txt", "h200/loss.json", "cpu/loss.json", "waivers.toml"} | speed


def test_every_platform_has_settings_for_its_suites() -> None:
    """A suite that must run somewhere has environment, workers and a deadline there."""
    for platform in platforms.PLATFORMS.values():
        for suite in platform.suites:
            execution = platforms.EXECUTION[platform.vendor, suite]
            assert execution.deadline > 0
            assert "PYTHONHASHSEED" in execution.unset
            assert execution.environment["TRITON_DEFAULT_FP_FUSION"]
            interprets = execution.environment.get("TRITON_INTERPRET") == "1"
            assert interprets == ((platform.vendor, suite) == ("cpu", "numerics"))
            assert interprets or "TRITON_INTERPRET" in execution.unset


def test_the_products_own_tests_run_when_named() -> None:
    """The unit suite is no part of a gate; the self-test names tests of it, on a CPU."""
    cpu = platforms.PLATFORMS["cpu"]
    assert platforms.select_suites(cpu, ("unit",)) == ("unit",)
    assert platforms.select_suites(cpu, ()) == cpu.suites == ("numerics", "codegen", "loss")
    with pytest.raises(UsageError, match="there is no suite 'unit' on mi300x"):
        platforms.select_suites(platforms.PLATFORMS["mi300x"], ("unit",))


@pytest.mark.parametrize(
    ("spec", "vendor", "name", "expected", "reason"),
    [
        pytest.param("auto", "amd", "AMD Instinct MI300X", "mi300x", "auto found AMD Instinct MI300X", id="auto-amd"),
        pytest.param("auto:rocm", "amd", "AMD Instinct MI355X", "mi355x", "auto:rocm found", id="auto-rocm"),
        pytest.param("auto:cuda", "nvidia", "NVIDIA H200", "h200", "auto:cuda found NVIDIA H200", id="auto-cuda"),
        pytest.param("auto", "cpu", "x86_64", "cpu", "auto found no GPU", id="auto-without-gpu"),
        pytest.param("h100", "cpu", "x86_64", "h100", "h100 was named by the caller", id="named"),
    ],
)
def test_resolve(spec: str, vendor: str, name: str, expected: str, reason: str) -> None:
    """A platform is found with the reason that log, skip text and report print."""
    platform, why = platforms.resolve(spec, facts(vendor, name))
    assert platform.id == expected
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("spec", "vendor", "name", "message"),
    [
        pytest.param("mi300", "cpu", "x86_64", "no platform 'mi300'; expected one of mi300x, .*cpu", id="unknown-id"),
        pytest.param("auto", "nvidia", "NVIDIA H20", "'NVIDIA H20' that no platform names", id="unknown-device"),
        pytest.param("auto:rocm", "nvidia", "NVIDIA H200", "auto:rocm finds nvidia", id="other-vendor"),
        pytest.param("auto:cuda", "cpu", "x86_64", "auto:cuda finds cpu", id="no-gpu"),
    ],
)
def test_resolve_never_falls_through(spec: str, vendor: str, name: str, message: str) -> None:
    """What no row names is an error that names it."""
    with pytest.raises(UsageError, match=message):
        platforms.resolve(spec, facts(vendor, name))


def test_the_short_table_of_speed() -> None:
    """It selects rows of the perf suite alone, and nothing where cases are named."""
    assert platforms.case_of("perf", None, "short") == platforms.SHORT_SPEED
    assert platforms.case_of("perf", None, "long") is None
    assert platforms.case_of("numerics", None, "short") is None
    assert platforms.case_of("perf", "rowwise*", "short") == "rowwise*"


def test_select_suites() -> None:
    """No names means those that must run; the order is the platform's; an unknown one is named."""
    cpu = platforms.PLATFORMS["cpu"]
    assert platforms.select_suites(cpu, ()) == cpu.suites
    assert platforms.select_suites(cpu, ("loss", "numerics")) == ("numerics", "loss")
    with pytest.raises(UsageError, match="no suite 'numeric' on cpu; expected some of numerics, codegen, loss"):
        platforms.select_suites(cpu, ("numeric",))


def answering(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let a shell script stand in for the interpreter that asks the device."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_the_device_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second question gets the first answer."""
    answering(monkeypatch, tmp_path, f'echo x >> {tmp_path}/asked; echo \'{{"vendor": "cpu"}}\'')
    assert platforms.ask_device({"ASKED": "once"}) == platforms.ask_device({"ASKED": "once"}) == {"vendor": "cpu"}
    assert (tmp_path / "asked").read_text(encoding="ascii") == "x\n"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        pytest.param("echo \"arch 'gfx9' is unknown\" >&2; exit 2", UsageError, "arch 'gfx9' is unknown", id="refuses"),
        pytest.param("echo boom >&2; exit 1", InfraError, r"ended with 1 \(boom\)", id="fails"),
        pytest.param("kill -SEGV $$", InfraError, r"ended with -11 \(no message\)", id="segfault"),
        pytest.param("echo hello", InfraError, "printed 'hello", id="no-json"),
        pytest.param("exec sleep 30", InfraError, "has not answered for 1 s", id="hangs"),
    ],
)
def test_a_device_that_does_not_answer(
    script: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A refusal is the caller's mistake; a crash, a hang or nonsense is the machine's."""
    answering(monkeypatch, tmp_path, script)
    with pytest.raises(kind, match=message):
        platforms.ask_device({"CASE": script}, deadline=1.0)
