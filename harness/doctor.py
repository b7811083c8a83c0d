"""Preflight: would a run start here, and if not, what to do. Every check has a name, a finding and advice.

A run looks at the same checks before it starts anything and ends with the first that fails; `fp8ci doctor` prints them
all. `fail` means that a run would end with exit 4 (2 for what is configured wrong), `warn` that it would start and may
be disturbed. What does not apply here (no GPU, no engine asked for) is left out, so that a laptop shows a short list.

Everything is read from /proc, /sys and /dev, below a root that tests replace. A vendor's tool is asked only for what
the kernel does not say, and never without a deadline: one that hangs is a finding (pytorch#94026).

Not here: doing anything about it, except that a run reaps its dead predecessors' containers (engine.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import devices, engine, images, platforms
from harness.devices import Gpu
from harness.engine import Engine
from harness.errors import DiskError, GpuHangError, HarnessError, InfraError, UsageError
from harness.platforms import Vendor

State = Literal["ok", "warn", "fail"]
GIB = 1 << 30
DISK = 2 * GIB
"""Free bytes that a run's evidence and caches may need: the listings of one run are 200 MB."""
MEMORY = 4 * GIB
SHM = 1 * GIB
TOOL = 20.0
"""Seconds that a vendor's tool may take to answer."""
OLDEST = (20, 10)
"""The oldest engine that this was tried with."""


@dataclass(frozen=True)
class Check:
    """One finding. `advice` is empty where there is nothing to do; `error` is what a run would end with."""

    name: str
    state: State
    found: str
    advice: str = ""
    error: HarnessError | None = None

    def as_dict(self) -> dict[str, str]:
        """Plain data, for a machine to read."""
        told = {"name": self.name, "state": self.state, "found": self.found, "advice": self.advice}
        return {**told, "verdict": str(self.error.verdict) if self.error else ""}


def passed(name: str, found: str) -> Check:
    """A check that holds."""
    return Check(name, "ok", found)


def failed(name: str, error: HarnessError) -> Check:
    """A check that would end a run with `error`."""
    return Check(name, "fail", error.what, error.next_step or error.expected, error)


@dataclass(frozen=True)
class Asked:
    """What a run would need. `spec` is what --platform takes, `image` overrides the one of the checkout."""

    root: Path
    spec: str = "auto"
    docker: bool = False
    gpus: int = 1
    image: str | None = None
    out: Path | None = None


def vendor_asked(spec: str, fs: Path = Path("/")) -> Vendor:
    """Whose GPU a --platform wants, without asking the device: `auto` takes what the host has."""
    if spec == "auto":
        return devices.vendor_of(fs)
    families: dict[str, Vendor] = {"auto:rocm": "amd", "auto:cuda": "nvidia"}
    return families.get(spec) or platforms.get(spec).vendor


_WANTED = {"amd": ("an AMD GPU", devices.KFD, "amdgpu"), "nvidia": ("an NVIDIA GPU", devices.NVIDIA_CONTROL, "nvidia")}


def require_vendor(spec: str, fs: Path = Path("/")) -> Vendor:
    """As `vendor_asked`; InfraError, in one line, where this host has no GPU of that vendor."""
    vendor = vendor_asked(spec, fs)
    if vendor == "cpu":
        return vendor
    what, control, driver = _WANTED[vendor]
    if not (fs / control.lstrip("/")).exists():
        raise InfraError(
            f"{spec} needs {what} and this host has none ({control} does not exist)",
            f"a host with the {driver} driver loaded",
            "run it on such a runner, or --platform cpu here",
        )
    if not devices.find(vendor, fs):
        raise InfraError(
            f"{spec} needs {what}: {control} exists and no GPU has a device node",
            "one or more GPUs in /sys and /dev",
            f"check `dmesg` for {driver}; inside a container pass the nodes on",
        )
    return vendor


def examine(asked: Asked, fs: Path = Path("/"), client: Any = None) -> Iterator[Check]:
    """Every check that applies, in the order in which a run meets them. `client` spares a second connection."""
    vendor: Vendor = "cpu"
    try:
        vendor = require_vendor(asked.spec, fs)
        yield passed("platform", f"{asked.spec}: {'no GPU' if vendor == 'cpu' else _WANTED[vendor][0]}")
    except HarnessError as error:
        yield failed("platform", error)
    if asked.docker:
        yield from _engine(asked, vendor, fs, client)
    if vendor != "cpu":
        yield from _gpus(asked, vendor, fs)
    yield from _machine(asked, fs)


def require(checks: Sequence[Check]) -> None:
    """Raise the first failure's error."""
    for check in checks:
        if check.error is not None:
            raise check.error


# The engine --------------------------------------------------------------------------------------------------------


def _engine(asked: Asked, vendor: Vendor, fs: Path, client: Any) -> Iterator[Check]:
    try:
        client = client or engine.connect()
        told = engine.from_info(client.info(), fs)
    except HarnessError as error:
        yield failed("engine", error)
        return
    how = "rootless" if told.rootless else "user namespaces" if told.user_namespaces else "rootful"
    found = f"{told.version} on {told.machine}, {told.storage}, {how}"
    numbers = tuple(int(word) for word in told.version.split("+")[0].split(".")[:2] if word.isdigit())
    old = numbers < OLDEST
    yield Check("engine", "warn" if old else "ok", found, "take 20.10 or later" if old else "")
    missing = sorted({"memory", "pids"} - told.limits)
    if missing:
        advice = "a test may take all of the host: delegate the controllers to the engine (cgroup v2, systemd)"
        yield Check("limits", "warn", f"the engine cannot limit {' and '.join(missing)}", advice)
    else:
        yield passed("limits", "memory and processes can be limited")
    yield _image(asked, vendor, told, client)
    yield from _left(client)
    if told.root and Path(told.root).is_dir():
        yield _disk("engine-disk", Path(told.root), "where the engine keeps its data")
    if vendor == "nvidia" and not told.nvidia_runtime and not told.cdi:
        what = "the engine knows neither NVIDIA's runtime nor CDI"
        advice = "install it, then `nvidia-ctk cdi generate`"
        yield failed("toolkit", InfraError(what, "NVIDIA's container toolkit", advice))


def image_name(root: Path, vendor: Vendor) -> str:
    """The row of docker/images.toml for a vendor, as the platforms name it."""
    return next(row.image for row in platforms.PLATFORMS.values() if row.vendor == vendor)


def _image(asked: Asked, vendor: Vendor, told: Engine, client: Any) -> Check:
    name = image_name(asked.root, vendor)
    try:
        tag = asked.image or images.get(asked.root, name).tag
        return passed("image", f"{tag} is {images.require(client, tag, told.machine, name)[:19]}")
    except HarnessError as error:
        return failed("image", error)


def _left(client: Any) -> Iterator[Check]:
    us = engine.ourselves()
    dead = [name for _, name, owner in engine.ours(client) if engine.dead(owner, us)]
    if dead:
        found = f"{len(dead)} containers of dead runs: {', '.join(dead[:5])}"
        yield Check("left-over", "warn", found, "the next run removes them")


# GPUs --------------------------------------------------------------------------------------------------------------


def _gpus(asked: Asked, vendor: Vendor, fs: Path) -> Iterator[Check]:
    gpus = devices.find(vendor, fs)
    if not gpus:
        return  # the platform check has said it
    if asked.gpus > len(gpus):
        what = f"{asked.gpus} GPUs are asked for and this host has {len(gpus)}"
        yield failed("gpus", InfraError(what, f"{len(gpus)} or fewer", "correct --gpus"))
    else:
        yield passed("gpus", ", ".join(gpu.node for gpu in gpus))
    yield _access(vendor, gpus, fs)
    yield _partition(vendor, gpus)
    yield from _users(vendor, fs)
    yield from _answers(vendor)
    clocks = _clocks(gpus, fs)
    if clocks:
        yield passed("clocks", clocks)


def _access(vendor: Vendor, gpus: Sequence[Gpu], fs: Path) -> Check:
    """Whether this user reaches the nodes; a container gets the owning groups by number, and needs them too."""
    groups = devices.groups(gpus, fs)
    told = f"groups {', '.join(map(str, groups))}" if groups else "no group but root's"
    nodes = [*([devices.KFD] if vendor == "amd" else []), *(gpu.node for gpu in gpus)]
    closed = [node for node in nodes if not os.access(fs / node.lstrip("/"), os.R_OK | os.W_OK)]
    if closed:
        advice = f"usermod -aG {groups[0] if groups else 'render'} USER; a rootless engine needs it"
        return Check("access", "warn", f"{closed[0]} is not open to this user ({told})", advice)
    return passed("access", f"device nodes are open; {told}")


def _partition(vendor: Vendor, gpus: Sequence[Gpu]) -> Check:
    mode = devices.partition(gpus)
    if vendor == "amd" and mode and " and " in mode:
        return Check("partition", "warn", f"GPUs differ in their partition mode: {mode}", "set one for all")
    return passed("partition", mode or "not told by the driver")


def _users(vendor: Vendor, fs: Path) -> Iterator[Check]:
    """Processes that have a compute context; the kernel lists AMD's, NVIDIA's tool its own."""
    if vendor == "amd":
        folder = fs / "sys/class/kfd/kfd/proc"
        if folder.is_dir():
            holders = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            yield _busy(holders, fs)
        return
    answer = _tool(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"])
    if isinstance(answer, str):
        yield _busy(sorted(int(line) for line in answer.split() if line.isdigit()), fs)


def _busy(pids: Sequence[int], fs: Path) -> Check:
    if not pids:
        return passed("gpu-users", "nobody uses the GPUs")
    names = [f"{pid} ({_command(pid, fs)})" for pid in pids[:5]]
    return Check("gpu-users", "warn", f"in use by process {', '.join(names)}", "until they end no speed can be trusted")


def _command(pid: int, fs: Path) -> str:
    try:
        return (fs / f"proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "of another namespace"


def _answers(vendor: Vendor) -> Iterator[Check]:
    """Whether the driver's tool answers within its deadline; no tool is no finding."""
    for command in (["amd-smi", "version"], ["rocm-smi", "--showid"]) if vendor == "amd" else (["nvidia-smi", "-L"],):
        answer = _tool(command)
        if answer is None:
            continue
        if isinstance(answer, HarnessError):
            yield failed("gpu-answers", answer)
        else:
            yield passed("gpu-answers", f"`{' '.join(command)}` answers")
        return


def _tool(command: Sequence[str]) -> str | HarnessError | None:
    """What a tool printed; None where there is none, an error where it hangs or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL, check=False)
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        what = f"`{' '.join(command)}` has not answered for {TOOL:.0f} s"
        return GpuHangError(what, "an answer within a second", "the GPU or its driver hangs: take the runner offline")
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines()
        what = f"`{' '.join(command)}` ended with {done.returncode} ({told[-1] if told else 'no message'})"
        return InfraError(what, "exit 0", "check the driver")
    return done.stdout


def _clocks(gpus: Sequence[Gpu], fs: Path) -> str:
    """The active step of each AMD GPU's clocks, as the driver marks it with a star."""
    found = []
    for gpu in gpus:
        folder = fs / f"sys/class/drm/{Path(gpu.node).name}/device"
        for name in ("sclk", "mclk"):
            try:
                lines = (folder / f"pp_dpm_{name}").read_text(encoding="ascii", errors="replace").splitlines()
            except OSError:
                continue
            active = [line.split(":")[1].strip(" *") for line in lines if line.endswith("*") and ":" in line]
            found += [f"{Path(gpu.node).name} {name} {active[0]}"] if active else []
    return ", ".join(found)


# The machine -------------------------------------------------------------------------------------------------------


def _machine(asked: Asked, fs: Path) -> Iterator[Check]:
    out = asked.out or asked.root
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    yield _disk("disk", existing, "for the evidence")
    memory = _memory(fs)
    if memory is not None:
        free = f"{memory / GIB:.1f} GiB of memory available"
        low = memory < MEMORY
        advice = f"free some: a run wants {MEMORY // GIB} GiB"
        yield Check("memory", "warn" if low else "ok", free, advice if low else "")
    if not asked.docker:  # a container gets one of its own
        shm = fs / "dev/shm"
        room = shutil.disk_usage(shm).free if shm.is_dir() else 0
        low = room < SHM
        advice = "give /dev/shm 1 GiB or more: processes of torch share tensors through it"
        yield Check("shm", "warn" if low else "ok", f"{room / GIB:.1f} GiB free in /dev/shm", advice if low else "")


def _disk(name: str, folder: Path, what: str) -> Check:
    free = shutil.disk_usage(folder).free
    told = f"{free / GIB:.1f} GiB free at {folder}, {what}"
    if free < DISK:
        return failed(name, DiskError(told, f"{DISK // GIB} GiB", "free space, or name another folder"))
    if not os.access(folder, os.W_OK) and name == "disk":
        return failed(name, DiskError(f"{folder} cannot be written", "a writable folder", "name another with --out"))
    return passed(name, told)


def _memory(fs: Path) -> int | None:
    try:
        text = (fs / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("MemAvailable:")), None)
    return int(line.split()[1]) * 1024 if line else None


def render(checks: Sequence[Check]) -> str:
    """A line a check, and what to do below those that do not hold."""
    lines = []
    for check in checks:
        lines.append(f"{check.state:5} {check.name:12} {check.found}")
        lines += [f"{'':18} -> {check.advice}"] if check.advice else []
    return "\n".join(lines) + "\n"


def check_gpus(count: int) -> None:
    """UsageError for a --gpus that is no count."""
    if count < 1:
        raise UsageError(f"--gpus is {count}", "1 or more", "correct it")
