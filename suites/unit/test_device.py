"""fp8stack.device: which row an arch string gets, what the override changes; nothing unknown gets a default."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8stack import device
from fp8stack.device import ARCHS, UnknownArch, detect, lookup
from harness.isa import occupancy

ROOT = Path(__file__).resolve().parents[2]

# Every property that code may ask of an arch, as a predicate. The matrix below is typed from the vendors' tables.
PREDICATES = {
    "amd": lambda arch: arch.vendor == "amd",
    "nvidia": lambda arch: arch.vendor == "nvidia",
    "cpu": lambda arch: arch.vendor == "cpu",
    "fnuz": lambda arch: (arch.e4m3, arch.e5m2) == ("e4m3fnuz", "e5m2fnuz"),
    "ocp": lambda arch: (arch.e4m3, arch.e5m2) == ("e4m3fn", "e5m2"),
    "native": lambda arch: arch.native_fp8_matmul,
    "wave64": lambda arch: arch.wave_size == 64,
}

# arch string -> the predicates that hold; None: no row, UnknownArch.
TRUTH: dict[str, str | None] = {
    "gfx940": "amd fnuz native wave64",
    "gfx941": "amd fnuz native wave64",
    "gfx942": "amd fnuz native wave64",
    "gfx942:sramecc+:xnack-": "amd fnuz native wave64",
    "gfx950": "amd ocp native wave64",
    "gfx950:sramecc+": "amd ocp native wave64",
    "gfx1200": "amd ocp native",
    "gfx1201": "amd ocp native",
    "gfx90a": "amd ocp wave64",
    "gfx90a:sramecc+:xnack-": "amd ocp wave64",
    "gfx908": "amd ocp wave64",
    "gfx1100": "amd ocp",
    "gfx1151": "amd ocp",
    "sm_89": "nvidia ocp native",
    "sm_90": "nvidia ocp native",
    "sm_100": "nvidia ocp native",
    "sm_103": "nvidia ocp native",
    "sm_120": "nvidia ocp native",
    "sm_80": "nvidia ocp",
    "sm_75": "nvidia ocp",
    "cpu": "cpu ocp",
    "": None,
    ":sramecc+": None,
    "gfx": None,
    "gfx9": None,
    "gfx94": None,
    "gfx9420": None,
    "gfx9-4-generic": None,
    "GFX942": None,
    " gfx942": None,
    "gfx942 ": None,
    "sm_9": None,
    "sm90": None,
    "sm_90a": None,
    "9.0": None,
    "NVIDIA H200": None,
    "MI300X": None,
    "cuda": None,
}


def _case(name: str) -> str:
    readable = name.replace(" ", "_").replace(":", ".")
    return f"device-{readable or 'empty'}"


@pytest.mark.parametrize("name", [pytest.param(name, id=_case(name)) for name in TRUTH])
def test_truth_table(name: str) -> None:
    """Every arch string satisfies exactly the predicates of its row; a string without a row is an error."""
    expected = TRUTH[name]
    if expected is None:
        with pytest.raises(UnknownArch):
            lookup(name)
        return
    arch = lookup(name)
    assert expected.split() == [word for word, holds in PREDICATES.items() if holds(arch)]
    assert arch.name == name.split(":")[0]


def test_one_family_each() -> None:
    """Every row of the table belongs to exactly one vendor and exactly one dialect (pytorch/ao#4034: always true)."""
    for arch in ARCHS.values():
        assert sum(PREDICATES[word](arch) for word in ("amd", "nvidia", "cpu")) == 1, arch
        assert sum(PREDICATES[word](arch) for word in ("fnuz", "ocp")) == 1, arch
        assert ARCHS[arch.name] is arch


@pytest.mark.parametrize("name", [pytest.param(name, id=f"device-limits-{name}") for name in occupancy.UNITS])
def test_limits_agree_with_the_occupancy_table(name: str) -> None:
    """What decides which configurations fit is what the reader of machine code counts waves with."""
    arch, unit = lookup(name), occupancy.UNITS[name]
    registers = unit.registers * (unit.lanes * unit.simds if arch.vendor == "amd" else 1)
    assert (arch.wave_size, arch.lds_bytes, arch.registers) == (unit.lanes, unit.lds_bytes, registers)
    assert arch.threads <= unit.waves * unit.lanes
    assert arch.thread_registers * arch.wave_size <= registers


def test_rows_cannot_be_edited() -> None:
    """A row is frozen: nobody patches a maximum or a format from outside."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ARCHS["gfx942"].e4m3 = "e4m3fn"  # type: ignore[misc]


@pytest.fixture
def no_override(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without FP8STACK_ARCH."""
    monkeypatch.delenv("FP8STACK_ARCH", raising=False)
    return monkeypatch


def _fake_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, names: list[str], capability: tuple[int, int], current: int
) -> None:
    """torch as it answers on a node with these GPUs; asking any device but the current one fails the test."""

    def properties(index: object = None) -> SimpleNamespace:
        number = current if index is None else torch.device("cuda", index).index if isinstance(index, int) else index
        number = number.index if isinstance(number, torch.device) else number
        return SimpleNamespace(gcnArchName=names[number], name="fake", total_memory=1 << 30)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)


def test_a_gpu_is_asked_once(no_override: pytest.MonkeyPatch) -> None:
    """Every launch asks what its GPU is, and torch is asked once a GPU; the override is read each time."""
    _fake_gpu(no_override, "6.4", ["gfx942:sramecc+", "gfx950"], (9, 4), current=0)
    asked: list[object] = []
    genuine = torch.cuda.get_device_properties
    no_override.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or genuine(index))
    assert [detect(where).arch.name for where in ("cuda", "cuda", "cuda:1", "cuda:1")] == ["gfx942"] * 2 + [
        "gfx950"
    ] * 2
    assert asked == [0, 1]
    no_override.setattr(torch.cuda, "current_device", lambda: 1)
    assert detect("cuda").arch.name == "gfx950", "the current GPU is another now"
    no_override.setenv("FP8STACK_ARCH", "gfx942")
    assert [detect("cuda:1").arch.name, detect("cuda:1").simulated] == ["gfx942", True]


def test_cpu_without_override(no_override: pytest.MonkeyPatch) -> None:
    """Without a GPU the arch is cpu, OCP formats, and the reason says why."""
    no_override.setattr(torch.cuda, "is_available", lambda: False)
    found = detect()
    assert (found.arch.name, found.target.name, found.simulated) == ("cpu", "cpu", False)
    assert "no GPU" in found.reason


def test_override_on_cpu(no_override: pytest.MonkeyPatch) -> None:
    """FP8STACK_ARCH=gfx942 on a CPU: MI300X formats, target still cpu, and the reason names the variable."""
    no_override.setenv("FP8STACK_ARCH", "gfx942")
    found = detect("cpu")
    assert (found.arch.name, found.target.name, found.simulated) == ("gfx942", "cpu", True)
    assert (found.arch.e4m3, found.arch.e5m2) == ("e4m3fnuz", "e5m2fnuz")
    assert "FP8STACK_ARCH=gfx942" in found.reason


def test_override_keeps_the_target(no_override: pytest.MonkeyPatch) -> None:
    """The override changes the formats and never what code is compiled for: on a Hopper the target stays sm_90."""
    _fake_gpu(no_override, None, [""], (9, 0), 0)
    no_override.setenv("FP8STACK_ARCH", "gfx942")
    found = detect()
    assert (found.arch.name, found.target.name, found.simulated) == ("gfx942", "sm_90", True)


def test_override_that_repeats_the_hardware(no_override: pytest.MonkeyPatch) -> None:
    """An override that names the hardware's own arch simulates nothing."""
    _fake_gpu(no_override, "7.2", ["gfx942:sramecc+:xnack-"], (9, 4), 0)
    no_override.setenv("FP8STACK_ARCH", "gfx942")
    assert detect().simulated is False


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("gfx9-4-generic", id="device-override-gfx9-4-generic"),
        pytest.param("", id="device-override-empty"),
        pytest.param("mi300x", id="device-override-platform-name"),
    ],
)
def test_override_unknown(no_override: pytest.MonkeyPatch, value: str) -> None:
    """An override without a row is an error that names the variable and a value that works; never a default."""
    no_override.setenv("FP8STACK_ARCH", value)
    with pytest.raises(UnknownArch) as caught:
        detect("cpu")
    assert "FP8STACK_ARCH=gfx942" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gcn", "expected"),
    [
        pytest.param("gfx942:sramecc+:xnack-", "gfx942", id="device-hip-gfx942"),
        pytest.param("gfx950:sramecc+:xnack-", "gfx950", id="device-hip-gfx950"),
        pytest.param("gfx90a:sramecc+:xnack-", "gfx90a", id="device-hip-gfx90a"),
        pytest.param("gfx1201", "gfx1201", id="device-hip-gfx1201"),
    ],
)
def test_hip_name_not_capability(no_override: pytest.MonkeyPatch, gcn: str, expected: str) -> None:
    """On ROCm the name decides, not the capability tuple: gfx90a reports 9.0 and is no Hopper."""
    _fake_gpu(no_override, "7.2", [gcn], (9, 0), 0)
    assert expected == detect().arch.name
    assert gcn in detect().reason


def test_current_device_of_a_mixed_node(no_override: pytest.MonkeyPatch) -> None:
    """Device 0 is an MI210, the current device an MI300X: the current one decides; an index asks that one."""
    _fake_gpu(no_override, "7.2", ["gfx90a", "gfx942:sramecc+:xnack-"], (9, 0), 1)
    assert detect().arch.name == "gfx942"
    assert detect("cuda:0").arch.name == "gfx90a"
    assert detect("cuda").arch.name == "gfx942"


@pytest.mark.parametrize(
    ("hip", "gcn", "capability"),
    [
        pytest.param("7.2", "gfx9-4-generic", (9, 4), id="device-unknown-hip"),
        pytest.param("7.2", "", (9, 0), id="device-unknown-hip-empty"),
        pytest.param(None, "", (12, 9), id="device-unknown-cuda"),
    ],
)
def test_unknown_gpu(no_override: pytest.MonkeyPatch, hip: str | None, gcn: str, capability: tuple[int, int]) -> None:
    """A GPU without a row raises and names the override; it does not fall through to OCP."""
    _fake_gpu(no_override, hip, [gcn], capability, 0)
    with pytest.raises(UnknownArch, match="FP8STACK_ARCH"):
        detect()


def _command(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "FP8STACK_ARCH"}
    return subprocess.run(
        [sys.executable, "-m", "fp8stack.device"],
        cwd=ROOT,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_prints_one_object(tmp_path: Path) -> None:
    """`python -m fp8stack.device` prints one JSON object with the keys that the harness reads."""
    done = _command(tmp_path, FP8STACK_ARCH="gfx942")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["arch"], found["target"], found["simulated"]) == ("gfx942", "cpu", True)
    expected = {"reason", "device_name", "device_count", "vendor", "memory_gib", "torch", "triton", "hip", "cuda"}
    assert expected <= found.keys()


def test_command_refuses_an_unknown_arch(tmp_path: Path) -> None:
    """FP8STACK_ARCH=gfx9-4-generic: one line on stderr (what, expected, what next), exit 2, no traceback."""
    done = _command(tmp_path, FP8STACK_ARCH="gfx9-4-generic")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "gfx9-4-generic" in done.stderr
    assert "FP8STACK_ARCH=gfx942" in done.stderr


def test_detection_is_not_at_import() -> None:
    """The module holds no answer: detect() asks each time, so a test (or a mixed node) can change it."""
    assert not [name for name, value in vars(device).items() if isinstance(value, device.Detected)]
