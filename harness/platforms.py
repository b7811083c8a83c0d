"""The platforms: what a runner is, what must run there, under which settings, and which one this machine is.

A platform is a row of `PLATFORMS`; nothing about a platform is decided anywhere else. To add one, add a row (and,
if its suites need other settings, a row of `EXECUTION`), then record its manifest and baselines.

Device names are matched whole. A substring match takes an H20 for part of an H200, a GH200 for an H200, a GB300 for a
B300 and an MI300A for an MI300X, which have other memory, other peak rates and other baselines. A device that no row
names is an error that prints the name; it never becomes the nearest platform, and never `cpu`.

`resolve` asks the hardware through `python -m fp8stack.device` in a process of its own: the harness imports no torch,
and a driver that hangs costs a deadline instead of the run.

Not here: what a machine can do beyond its name (capabilities.py), formats and instructions of an arch (fp8stack).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from harness.errors import InfraError, UsageError

Vendor = Literal["amd", "nvidia", "cpu"]
Share = Literal["cores", "gpus", "one"]


SPEED = "perf"
"""The suite that measures. Rows of a platform that is not calibrated for it are UNCALIBRATED: never red, no pass."""

SpeedTable = Literal["short", "long"]
SHORT_SPEED = (
    "rowwise-*-bf16-m32768-k7168,colwise-*-bf16-m32768-n7168-e32,experts-*-bf16-e32-n2048-k7168,"
    "rowwise-*-bf16-m16640-k2048,grouped_gemm-forward-*-e32-m32768-k7168-n2048,"
    "linear-rowwise_with_gw_hp-*-m8192-k4096-n14336"
)
"""The rows of the short table, as `--case` takes them: what a pull request has time for. The others are nightly."""

SECOND_OPINION = "cpu"
"""The platform whose curve in high precision a shared one is held against everywhere else."""


@dataclass(frozen=True)
class Platform:
    """One kind of runner.

    `device_names`: patterns that match a device's whole name. `suites` must run; those in `calibrated` must also have a
    baseline (a missing one is exit 5). `codegen_archs`: what the codegen suite compiles for there. `image`: row of
    docker/images.toml. `runner_labels`: of the self-hosted runner. `environment`: set for every process of a run.
    """

    id: str
    vendor: Vendor
    arch: str
    device_names: tuple[str, ...]
    image: str
    runner_labels: tuple[str, ...]
    suites: tuple[str, ...]
    calibrated: tuple[str, ...] = ()
    codegen_archs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def runner_label(self) -> str:
        """The label that only this platform's runners carry."""
        return self.runner_labels[-1]

    def names(self, device_name: str) -> bool:
        """Whether a device of this name makes a machine this platform."""
        return any(re.fullmatch(pattern, device_name) for pattern in self.device_names)

    @property
    def baseline_files(self) -> tuple[str, ...]:
        """Files below baselines/ that a run here is judged with, whether or not they exist yet."""
        files = [f"{self.id}/manifest.txt", "waivers.toml"]
        if "codegen" in self.suites:
            files += [f"{arch}/codegen.json" for arch in self.codegen_archs]
        files += [f"{self.id}/{suite}.json" for suite in self.suites if suite not in ("codegen", "numerics", SPEED)]
        if self.vendor != "cpu":  # speed is judged wherever somebody asks for it
            files += [f"{self.id}/perf.json", f"{self.id}/published.json"]
        if "loss" in self.suites and self.id != SECOND_OPINION:
            files.append(f"{SECOND_OPINION}/loss.json")
        return tuple(files)


def _gpu(
    platform_id: str,
    vendor: Vendor,
    arch: str,
    *device_names: str,
    speed: bool = True,
    calibrated: tuple[str, ...] = (),
) -> Platform:
    image = "rocm" if vendor == "amd" else "cuda"
    labels = ("self-hosted", "linux", image, platform_id)
    suites = ("numerics", "loss", *((SPEED,) if speed else ()))
    return Platform(platform_id, vendor, arch, device_names, image, labels, suites, calibrated)


# `OAM` is the module's form factor, `VF` and `HF` are virtual functions in a cloud guest: the same silicon.
_ROWS = (
    _gpu("mi300x", "amd", "gfx942", r"AMD Instinct MI300X( OAM)?( VF| HF)?"),
    _gpu("mi325x", "amd", "gfx942", r"AMD Instinct MI325X( OAM)?( VF)?"),
    _gpu("mi350x", "amd", "gfx950", r"AMD Instinct MI350X( OAM)?( VF)?"),
    _gpu("mi355x", "amd", "gfx950", r"AMD Instinct MI355X( OAM)?( VF)?"),
    # The SXM modules only: PCIe and NVL boards have other clocks and memory, so they need rows of their own.
    _gpu("h100", "nvidia", "sm_90", r"NVIDIA H100 80GB HBM3", speed=False),
    _gpu("h200", "nvidia", "sm_90", r"NVIDIA H200", calibrated=("loss", "perf")),
    _gpu("b200", "nvidia", "sm_100", r"NVIDIA B200", speed=False),
    Platform(
        "cpu",
        "cpu",
        "cpu",
        device_names=(),
        image="cpu",
        runner_labels=("ubuntu-24.04",),
        suites=("numerics", "codegen", "loss"),
        calibrated=("codegen", "loss"),
        codegen_archs=("gfx942", "gfx950", "sm_90"),
        # A GPU in the machine must not turn a CPU run into a GPU run.
        environment=MappingProxyType({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
    ),
)

PLATFORMS: Mapping[str, Platform] = MappingProxyType({row.id: row for row in _ROWS})


@dataclass(frozen=True)
class Execution:
    """How one suite runs on the platforms of one vendor.

    `environment` is set and `unset` removed before the process starts. `workers`: one xdist worker a core or a GPU, or
    one process. `deadline` in seconds, for the whole suite. `seconds_a_test` and `start_seconds` (measured on 2 cores)
    are what a run expects: they size the worker count and the progress display, and decide nothing else.
    """

    environment: Mapping[str, str]
    unset: tuple[str, ...]
    workers: Share
    deadline: float
    seconds_a_test: float
    start_seconds: float


# Triton 3.9 announces that floating-point fusion goes off by default in 3.10; bits and listings depend on it. Off, as
# the kernels ask for at every launch.
_EVERYWHERE = {"TRITON_DEFAULT_FP_FUSION": "0", "PYTHONUNBUFFERED": "1"}
# The interpreter must be chosen before triton is imported, and nothing compiles once it is: it is set or absent for a
# whole process. PYTHONHASHSEED stays random, so that an order that depends on it shows up here first.
_INTERPRETED = MappingProxyType({**_EVERYWHERE, "TRITON_INTERPRET": "1"})
_COMPILED = MappingProxyType(_EVERYWHERE)
FULL_VARIABLE = "FP8CI_FULL"
"""1 in the test processes of a run with `--full`, and absent in all others: the rows of the night exist
(suites/conftest.py)."""

NEVER_SET = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", FULL_VARIABLE)
"""Taken away from every test process: what a shell happens to hold must not choose tests, order or plugins, nor switch
off the assertions of what the tests call (pytest keeps those of test modules only)."""
_NOT_INTERPRETED = (*NEVER_SET, "TRITON_INTERPRET")

_CPU_NUMERICS = Execution(_INTERPRETED, NEVER_SET, "cores", 1800.0, 0.16, 4.0)
_GPU_NUMERICS = Execution(_COMPILED, _NOT_INTERPRETED, "gpus", 1200.0, 0.2, 20.0)
_CODEGEN = Execution(_COMPILED, _NOT_INTERPRETED, "cores", 1800.0, 2.0, 3.0)
_LOSS = Execution(_COMPILED, _NOT_INTERPRETED, "cores", 1800.0, 35.0, 4.0)
# One process: a model is compiled once for its curve, its nudged runs and the check that it repeats itself.
_GPU_LOSS = Execution(_COMPILED, _NOT_INTERPRETED, "one", 1800.0, 20.0, 20.0)
# Alone on the device and in one process: that process starts a fresh one for every launch, one after the other.
_PERF = Execution(_COMPILED, _NOT_INTERPRETED, "one", 3600.0, 5.0, 20.0)
_UNIT = Execution(_COMPILED, _NOT_INTERPRETED, "cores", 900.0, 0.4, 2.0)

DEVICES_VARIABLE = "FP8CI_WORKER_DEVICES"
"""`NAME=0,1,2`: test worker i sees only the i-th of these devices, through the environment variable NAME."""

EXECUTION: Mapping[tuple[Vendor, str], Execution] = MappingProxyType(
    {
        ("cpu", "numerics"): _CPU_NUMERICS,
        ("cpu", "codegen"): _CODEGEN,
        ("cpu", "loss"): _LOSS,
        ("cpu", "perf"): _PERF,
        ("cpu", "unit"): _UNIT,
        ("amd", "numerics"): _GPU_NUMERICS,
        ("amd", "codegen"): _CODEGEN,
        ("amd", "loss"): _GPU_LOSS,
        ("amd", "perf"): _PERF,
        ("nvidia", "numerics"): _GPU_NUMERICS,
        ("nvidia", "codegen"): _CODEGEN,
        ("nvidia", "loss"): _GPU_LOSS,
        ("nvidia", "perf"): _PERF,
    }
)


def get(platform_id: str) -> Platform:
    """The row of a platform; UsageError that lists the known ones when there is none."""
    platform = PLATFORMS.get(platform_id)
    if platform is None:
        raise UsageError(
            f"there is no platform {platform_id!r}",
            f"one of {', '.join(PLATFORMS)}, auto, auto:rocm, auto:cuda",
            "see `fp8ci platforms`",
        )
    return platform


def matrix(wanted: str) -> dict[str, str]:
    """`ID,...` -> what a workflow needs for a job each: `rows` (JSON), `has_rows`, since an empty matrix is an error
    there, and `expected`, the ids again. UsageError for an unknown platform; no id at all is an empty matrix.

    The tox environment is named after the image, and runs what must run on the platform.
    """
    chosen = [get(name.strip()) for name in wanted.split(",") if name.strip()]
    rows = [{"id": row.id, "env": row.image, "labels": list(row.runner_labels)} for row in chosen]
    expected = ",".join(row.id for row in chosen)
    return {"rows": json.dumps(rows), "has_rows": str(bool(rows)).lower(), "expected": expected}


def select_suites(platform: Platform, names: tuple[str, ...]) -> tuple[str, ...]:
    """The suites of a run, in the platform's order; no names selects those that must run. UsageError for others."""
    possible = tuple(suite for vendor, suite in EXECUTION if vendor == platform.vendor)
    for name in names:
        if name not in possible:
            raise UsageError(
                f"there is no suite {name!r} on {platform.id}", f"some of {', '.join(possible)}", "correct --suite"
            )
    return tuple(suite for suite in possible if suite in (names or platform.suites))


def case_of(suite: str, case: str | None, speed: SpeedTable) -> str | None:
    """What is selected of a suite, as `--case` takes it: the short table of speed names its rows itself."""
    return SHORT_SPEED if suite == SPEED and speed == "short" and case is None else case


PROBE_DEADLINE = 120.0
"""Seconds that a machine may take to say what it is. Importing torch from a cold disk takes tens of seconds."""


def ask_device(environment: Mapping[str, str] | None = None, deadline: float = PROBE_DEADLINE) -> dict[str, Any]:
    """What `python -m fp8stack.device` says, asked once per process and environment.

    UsageError when it refuses (an unknown arch: its own line is passed on), InfraError when it does not answer.
    """
    return dict(_ask_device(tuple(sorted((environment or {}).items())), deadline))


@functools.cache
def _ask_device(environment: tuple[tuple[str, str], ...], deadline: float) -> Mapping[str, Any]:
    argv = [sys.executable, "-m", "fp8stack.device"]
    command = "`python -m fp8stack.device`"
    checkout = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    try:
        answer = subprocess.run(
            argv,
            env={**os.environ, "PYTHONPATH": path, **dict(environment)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(
            f"{command} has not answered for {deadline:.0f} s", "an answer within seconds", "check the GPU driver"
        ) from None
    lines = answer.stderr.strip().splitlines()
    last = lines[-1] if lines else "no message"
    if answer.returncode == UsageError("").exit_code:
        raise UsageError(last.removeprefix("error: "))
    if answer.returncode != 0:
        raise InfraError(
            f"{command} ended with {answer.returncode} ({last})", "exit 0 and a JSON object", "run it by hand"
        )
    try:
        facts = json.loads(answer.stdout)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise InfraError(f"{command} printed {answer.stdout[:80]!r}", "one JSON object", "run it by hand")
    return facts


_FAMILIES: Mapping[str, tuple[Vendor, ...]] = MappingProxyType(
    {"auto": ("amd", "nvidia", "cpu"), "auto:rocm": ("amd",), "auto:cuda": ("nvidia",)}
)


def resolve(spec: str, facts: Mapping[str, Any] | None = None) -> tuple[Platform, str]:
    """`auto`, `auto:rocm`, `auto:cuda` or a platform's id -> (platform, why it is this one).

    `facts` is an answer of `ask_device`; without it, and only for the auto forms, the device is asked. UsageError for
    an unknown id, a device that no row names, or a vendor that this machine does not have.
    """
    vendors = _FAMILIES.get(spec)
    if vendors is None:
        return get(spec), f"{spec} was named by the caller"
    found = facts if facts is not None else ask_device()
    vendor, name = str(found.get("vendor", "cpu")), str(found.get("device_name", ""))
    if vendor not in vendors:
        raise UsageError(f"{spec} finds {vendor} ({name})", f"a device of {vendors[0]}", "name the platform by its id")
    if vendor == "cpu":
        return PLATFORMS["cpu"], f"{spec} found no GPU"
    platform = of_device(name)
    if platform is None:
        raise UsageError(
            f"{spec} finds a device {name!r} that no platform names",
            f"one of {', '.join(PLATFORMS)}",
            "add a row to harness/platforms.py, or name the platform by its id",
        )
    return platform, f"{spec} found {name}"


def of_device(device_name: str) -> Platform | None:
    """The platform whose device has exactly this name, None when there is none."""
    return next((platform for platform in PLATFORMS.values() if platform.names(device_name)), None)
