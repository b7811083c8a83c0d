"""The container engine: reaching it, what it is, the containers that are ours, and clearing away what dead runs left.

Reached through the docker SDK at DOCKER_HOST or the engine's usual socket; never through the client's *context*, which
would make a run depend on what somebody once chose with `docker context use`. Every request has a deadline.

A container of ours carries labels: `fp8ci.owner` says which process of which boot of which machine started it. It is
reaped only if that process is dead for certain: same machine, and either another boot, or the same process namespace
without a process of that number and start time. Everything else stays: a container without our label, another
machine's on a shared engine, and one whose owner lives in a namespace that cannot be looked into.

Not here: what a container of ours looks like, and running it (container.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import DiskError, HarnessError, InfraError, PullError

OWNER = "fp8ci.owner"
RUN = "fp8ci.run"
SUITE = "fp8ci.suite"

REQUEST = 30.0
"""Seconds that the engine may take for one request. Creating a container on a loaded disk takes several."""

NO_SPACE = ("no space left on device", "disk quota exceeded")


@dataclass(frozen=True)
class Engine:
    """What the engine said of itself, as far as something depends on it.

    `machine`: architecture as the kernel names it. `memory` in bytes. `cdi`: names of CDI devices. `root`: where it
    keeps images and containers. `limits`: which limits it can set ("memory", "swap", "pids").
    """

    version: str
    machine: str
    memory: int
    root: str
    storage: str
    rootless: bool
    user_namespaces: bool
    limits: frozenset[str]
    cdi: tuple[str, ...]
    nvidia_runtime: bool


def from_info(info: Mapping[str, Any], root: Path = Path("/")) -> Engine:
    """The engine's `info` -> Engine. CDI devices are those it lists, or where it lists none, of the files it reads."""
    security = tuple(str(item) for item in info.get("SecurityOptions") or ())
    supported = {"memory": "MemoryLimit", "swap": "SwapLimit", "pids": "PidsLimit"}
    return Engine(
        version=str(info.get("ServerVersion", "unknown")),
        machine=str(info.get("Architecture", "")),
        memory=int(info.get("MemTotal") or 0),
        root=str(info.get("DockerRootDir", "")),
        storage=str(info.get("Driver", "")),
        rootless=any("rootless" in item for item in security),
        user_namespaces=any("name=userns" in item for item in security),
        limits=frozenset(name for name, key in supported.items() if info.get(key)),
        cdi=_cdi(info, root),
        nvidia_runtime="nvidia" in (info.get("Runtimes") or {}),
    )


def _cdi(info: Mapping[str, Any], root: Path) -> tuple[str, ...]:
    listed = [str(item.get("ID")) for item in info.get("DiscoveredDevices") or () if item.get("Source") == "cdi"]
    if listed:
        return tuple(sorted(listed))
    kinds = set()
    for folder in info.get("CDISpecDirs") or ():
        for path in sorted((root / str(folder).lstrip("/")).glob("*")):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = path.read_text(encoding="utf-8").replace('"', "").replace("'", "")
                kinds |= {kind for kind in ("nvidia.com/gpu", "amd.com/gpu") if f"kind: {kind}" in text}
    return tuple(sorted(kinds))


def connect(timeout: float = REQUEST) -> Any:
    """A `docker.DockerClient` whose engine has answered; InfraError where there is none, with what to do."""
    try:
        from docker.client import DockerClient
    except ImportError:
        raise InfraError(
            "no container can be had without the docker SDK", "the package docker", "pip install 'fp8stack[docker]'"
        ) from None
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        client = DockerClient(base_url=where, version="auto", timeout=timeout)
        client.ping()
    except Exception as error:  # the SDK lets those of requests and of urllib3 through as well
        raise InfraError(
            f"no container engine answers at {where} ({reason(error)})",
            "a Docker engine that this user may use",
            "start it, set DOCKER_HOST, or add the user to the engine's group",
        ) from error
    return client


def reason(error: BaseException) -> str:
    """What an exception of the SDK says, in one short line."""
    told = getattr(error, "explanation", None)
    text = told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told or error)
    if "PermissionError" in text or "Permission denied" in text:
        return "permission denied"
    if "FileNotFoundError" in text or "No such file" in text:
        return "no such socket"
    if "ConnectionRefused" in text or "Connection refused" in text:
        return "connection refused"
    return " ".join(text.split())[:300] or type(error).__name__


def failure(error: Exception, doing: str) -> HarnessError:
    """An exception of the SDK -> the kind of machine failure that it is. `doing` begins the line."""
    told = reason(error)
    if any(word in told.lower() for word in NO_SPACE):
        return DiskError(f"{doing}: {told}", "free space where the engine keeps its data", "free some, then run again")
    if type(error).__name__ == "ImageNotFound":
        return PullError(f"{doing}: {told}", "the image on this engine", "`fp8ci image build` makes it")
    if "gathering device information" in told:
        return InfraError(f"{doing}: {told}", "the device node on its host", "`fp8ci doctor` names what is missing")
    if "unable to find group" in told.lower():
        return InfraError(f"{doing}: {told}", "numeric groups", "take the group's number from the device node")
    if "could not select device driver" in told:
        return InfraError(f"{doing}: {told}", "NVIDIA's container toolkit or CDI", "install it, then `fp8ci doctor`")
    return InfraError(f"{doing}: {told}", "an engine that starts containers", "read the engine's log")


# Whose a container is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """A process, beyond doubt: machine, boot, process namespace, number and start time (in ticks since the boot)."""

    machine: str
    boot: str
    namespace: str
    pid: int
    start: int

    def to_label(self) -> str:
        """The value of the label `fp8ci.owner`."""
        return json.dumps(self.__dict__, sort_keys=True)


def ourselves() -> Owner:
    """This process."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    return Owner(_machine(), boot, _namespace(), os.getpid(), start_of(os.getpid()) or 0)


def from_label(text: str) -> Owner | None:
    """The owner that a label names, None where it names none."""
    try:
        value = json.loads(text)
        return Owner(
            str(value["machine"]), str(value["boot"]), str(value["namespace"]), int(value["pid"]), int(value["start"])
        )
    except (ValueError, TypeError, KeyError):
        return None


def dead(owner: Owner | None, us: Owner) -> bool:
    """Whether an owner has ended for certain. Whoever cannot be judged from here lives."""
    if owner is None or owner.machine != us.machine:
        return False
    if owner.boot != us.boot:
        return True
    return owner.namespace == us.namespace and start_of(owner.pid) != owner.start


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None where there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _machine() -> str:
    return _read("/etc/machine-id") or platform.node()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def ours(client: Any) -> Iterator[tuple[str, str, Owner | None]]:
    """(id, name, owner) of every container with our label, running or not."""
    for row in client.api.containers(all=True, filters={"label": OWNER}):
        labels = row.get("Labels") or {}
        yield row["Id"], ",".join(row.get("Names") or ()).lstrip("/"), from_label(labels.get(OWNER, ""))


def reap(client: Any) -> tuple[str, ...]:
    """Remove what dead runs have left; returns the names. Another run that does the same at this moment is no error."""
    us = ourselves()
    removed = []
    for container, name, owner in ours(client):
        if dead(owner, us) and remove(client, container):
            removed.append(name)
    return tuple(removed)


def remove(client: Any, container: str, patience: float = 10.0) -> bool:
    """Remove a container, running or not, and see that it is gone; False where it could not be within `patience`."""
    from docker.errors import NotFound

    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(Exception):  # in use, being removed by somebody else, an engine that hangs: seen below
            client.api.remove_container(container, v=True, force=True)
        try:
            client.api.inspect_container(container)
        except NotFound:
            return True
        except Exception:  # no answer is no proof
            pass
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
