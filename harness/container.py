"""The container executor: a command in one container, with a deadline that holds, on an engine that may go away.

Every path means the same inside as outside: the checkout is mounted read-only and the evidence folder writable, each
where it is on the host, so that a command line, a log and a traceback can be taken from one to the other. Nothing else
of the host is there: no network, no privileges, the caller's user number, and an environment of which only the names in
`CROSSING` come in. Memory, processes and shared memory are limited below the host's, so that a test that eats all it
can get leaves the CI's agent alive.

    end                                             how it is known                                   says
    deadline, Ctrl-C                                our own record of the kill                        killed_by
    memory limit, by the test or a child of it      the engine's flag; the control group's counters   OOM
    memory of the host                              a kill for memory that met no limit of ours       HOST_OOM
    pids limit                                      the control group's counters                      PIDS
    removed by somebody else                        the engine knows it no more                       KILLED
    engine stopped, died or hung                    no answer to a question with a deadline           INFRA
    the image lacks the program (126, 127)          the exit code of harness/inside.py                CONFIG
    any other signal or exit                        exit code: what deaths.py makes of a process      (nothing)

137 alone says nothing. A wait that ends in an error of the client says nothing either (its time limit surfaces as a
lost connection): the engine is asked what the container does, and only when *that* is not answered is the engine gone.

The log is read from the engine as frames and written as bytes. A stream that ends is believed only when the container
has ended too; a broken one is taken up again where it stopped, also after the engine was started anew.

Not here: which GPU a run gets (devices.py), whose a container is (engine.py), images (images.py).
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pwd
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any

from harness import devices, engine, inside
from harness.devices import Gpu
from harness.engine import Engine
from harness.errors import InfraError, Verdict
from harness.executor import Command, Ended, Fault, KilledBy, Place, signal_name
from harness.platforms import DEVICES_VARIABLE, FULL_VARIABLE, Vendor

PYTHON = "/usr/local/bin/fp8ci-python"
"""The interpreter that has torch, in every image of ours."""

HOME = "/tmp/fp8ci"
"""Home and caches, in the container's own file system: they start empty and go with it."""

CROSSING = (
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", DEVICES_VARIABLE, FULL_VARIABLE,
    "FP8STACK_", "TRITON_", "ONEDNN_", "MKL_", "NCCL_", "RCCL_", "TORCH_",
)  # fmt: skip
"""Environment variables that come in: by whole name, or where it ends in `_` by its beginning."""

CODE = Path(__file__).resolve().parents[1]
"""Where this harness, and the fp8stack beside it, were imported from."""
BROUGHT = "/opt/fp8ci"
"""Where they are inside, for a checkout that is not theirs (somebody else's library under these suites)."""

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cache"}

GIB = 1 << 30
PIDS = 4096
GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL, as of the local executor."""
GONE = 10.0
"""Seconds that a killed container may take to be gone. Longer, and the engine has lost it."""
ENGINE_PATIENCE = 60.0
"""Seconds that an engine which went away may take to come back before the run goes on without it."""
FAREWELL = 2.0
"""Seconds in which an engine that stops goes away after it has stopped the containers."""
POLL = 0.05
ENDED_BY_ENGINE = (137, 143, 255)
"""Exit codes of containers that an engine ends when it stops, or finds again when it starts."""


@dataclass(frozen=True)
class Limits:
    """What one container may take of the host: bytes of memory and of /dev/shm, processes, and a share of the CPUs."""

    memory: int
    shm: int
    pids: int = PIDS
    cpu_shares: int = 512

    @classmethod
    def of_host(cls, memory: int, containers: int) -> Limits:
        """For `containers` side by side: a tenth of the host's memory, and at least 1 GiB, stays with the host."""
        each = max(GIB, (memory - max(GIB, memory // 10)) // max(1, containers))
        return cls(each, min(16 * GIB, each // 2))


@dataclass(frozen=True)
class Spec:
    """What is the same for every container of a run. `groups` are numbers; `gpus` those that are given to the run."""

    image: str
    root: Path
    vendor: Vendor
    engine: Engine
    limits: Limits
    gpus: tuple[Gpu, ...] = ()
    groups: tuple[int | str, ...] = ()
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    owner: str = field(default_factory=lambda: engine.ourselves().to_label())


def crosses(name: str) -> bool:
    """Whether an environment variable of a command comes into the container."""
    return any(name == word or (word.endswith("_") and name.startswith(word)) for word in CROSSING)


def place(environment: Mapping[str, str]) -> Place:
    """Where a command line of this run will run: the image's interpreter, the checkout's plugin, few variables."""
    return Place(PYTHON, False, {name: value for name, value in environment.items() if crosses(name)})


# The payload -------------------------------------------------------------------------------------------------------


def environment_of(spec: Spec, command: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a container, sorted."""
    told = {name: value for name, value in command.items() if crosses(name)}
    if spec.vendor == "cpu":
        told |= {name: "-1" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
    told |= _user(spec)
    told |= {name: f"{HOME}/{folder}" for name, folder in CACHES.items()}
    # The checkout is read-only; and no process of a test may leave its folder behind as something to import from.
    told |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": _import_path(spec.root), "FP8CI_IN": "local"}
    if spec.vendor == "amd":
        told["ROCR_VISIBLE_DEVICES"] = _rocr(spec.gpus)
    return dict(sorted(told.items()))


def _import_path(root: Path) -> str:
    return str(root) if root == CODE else f"{root}:{BROUGHT}"


def _user(spec: Spec) -> dict[str, str]:
    """HOME, USER and LOGNAME: the number is in no passwd of the image, and getpass and torch ask by these."""
    try:
        name = pwd.getpwuid(spec.uid).pw_name
    except KeyError:
        name = f"user{spec.uid}"
    return {"HOME": HOME, "USER": name, "LOGNAME": name}


def _rocr(gpus: Sequence[Gpu]) -> str:
    """UUIDs where each GPU has one of its own. Else positions, which count what the device nodes leave visible.

    The partitions of one GPU share its UUID.
    """
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    if len(set(uuids)) == len(gpus):
        return ",".join(uuids)
    return ",".join(str(position) for position in range(len(gpus)))


def payload(spec: Spec, command: Command, report: Path | None = None, suite: str = "") -> dict[str, Any]:
    """The body of the engine's request that creates the container, in the words of the Engine API."""
    environment = environment_of(spec, command.environment)
    if report is not None:
        environment[inside.REPORT] = str(report)
    mounts = [_bind(spec.root, read_only=True)]
    if spec.root != CODE:
        brought = [name for name in ("harness", "fp8stack") if (CODE / name).is_dir()]
        mounts += [{**_bind(CODE / name, read_only=True), "Target": f"{BROUGHT}/{name}"} for name in brought]
    mounts += [_bind(folder, read_only=False) for folder in command.writable]
    host: dict[str, Any] = {
        "Init": True,
        "Privileged": False,
        "AutoRemove": False,  # it takes the exit code along
        "RestartPolicy": {"Name": "no"},
        "NetworkMode": "none",
        "Mounts": mounts,
        "CapDrop": ["ALL"],
        "CapAdd": ["SYS_NICE"] if spec.vendor == "amd" else [],  # moby's seccomp profile allows mbind only with it
        "SecurityOpt": ["no-new-privileges"],
        "ShmSize": spec.limits.shm,
        "CpuShares": spec.limits.cpu_shares,
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "LogConfig": {"Type": "json-file", "Config": {}},
    }
    if "memory" in spec.engine.limits:
        host["Memory"] = spec.limits.memory
        if "swap" in spec.engine.limits:
            host["MemorySwap"] = spec.limits.memory  # the sum of both: no swap
    if "pids" in spec.engine.limits:
        host["PidsLimit"] = spec.limits.pids
    if spec.engine.user_namespaces and not spec.engine.rootless:
        host["UsernsMode"] = "host"  # else files belong to a number that nobody on the host has
    host |= _devices(spec)
    return {
        "Image": spec.image,
        "Entrypoint": [],
        "Cmd": [PYTHON, "-m", "harness.inside", *command.argv],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        # Without root a rootless engine maps the caller to number 0 inside, and every other number to nobody outside.
        "User": "0:0" if spec.engine.rootless else f"{spec.uid}:{spec.gid}",
        "WorkingDir": str(command.folder),
        "Labels": {engine.OWNER: spec.owner, engine.RUN: spec.run_id, engine.SUITE: suite},
        "HostConfig": host,
    }


def _bind(folder: Path, *, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(folder), "Target": str(folder), "ReadOnly": read_only}


def _devices(spec: Spec) -> dict[str, Any]:
    """Device nodes and groups for ROCm; a device request, through CDI where the engine knows the GPUs, for CUDA."""
    if spec.vendor == "amd":
        nodes = [devices.KFD, *(gpu.node for gpu in spec.gpus)]
        told: dict[str, Any] = {
            "Devices": [{"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rwm"} for node in nodes]
        }
        if spec.groups and not spec.engine.rootless:  # whose groups are other numbers, and give no right to a node
            told["GroupAdd"] = [str(group) for group in spec.groups]
        return told
    if spec.vendor == "nvidia":
        indices = [str(gpu.index) for gpu in spec.gpus]
        if any(name.startswith("nvidia.com/gpu") for name in spec.engine.cdi):
            names = [f"nvidia.com/gpu={index}" for index in indices]
            return {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": names}]}
        # The driver by name: by capability alone the engine takes any that has it, in no order.
        request = {"Driver": "nvidia", "DeviceIDs": indices, "Capabilities": [["gpu", "compute", "utility"]]}
        return {"DeviceRequests": [request]}
    return {"GroupAdd": [str(group) for group in spec.groups]} if spec.groups else {}


def run_line(config: Mapping[str, Any], name: str | None = None) -> str:
    """The payload as a `docker run` that a person can paste: the same container, whose output comes to the terminal.

    It carries no owner's label, so that no run reaps it.
    """
    host = config["HostConfig"]
    words = ["docker", "run", "--rm"]
    words += ["--name", name] if name else []
    words += ["--init", "--network", host["NetworkMode"], "--user", config["User"], "--workdir", config["WorkingDir"]]
    for mount in host["Mounts"]:
        tail = ",readonly" if mount["ReadOnly"] else ""
        words += ["--mount", f"type=bind,source={mount['Source']},target={mount['Target']}{tail}"]
    words += [f"--cap-drop={name}" for name in host["CapDrop"]] + [f"--cap-add={name}" for name in host["CapAdd"]]
    words += [f"--security-opt={option}" for option in host["SecurityOpt"]]
    words += [f"--group-add={group}" for group in host.get("GroupAdd", ())]
    words += [f"--device={device['PathOnHost']}" for device in host.get("Devices", ())]
    for request in host.get("DeviceRequests", ()):
        if request["Driver"] == "cdi":
            words += [f"--device={name}" for name in request["DeviceIDs"]]
        else:
            words += ["--gpus", f'"device={",".join(request["DeviceIDs"])}"']
    for option, key in (("--memory", "Memory"), ("--memory-swap", "MemorySwap"), ("--pids-limit", "PidsLimit")):
        words += [f"{option}={host[key]}"] if key in host else []
    words += [f"--shm-size={host['ShmSize']}", f"--cpu-shares={host['CpuShares']}", "--ulimit=core=0:0"]
    words += [f"--userns={host['UsernsMode']}"] if host.get("UsernsMode") else []
    for item in config["Env"]:
        words += [] if item.startswith(f"{inside.REPORT}=") else ["--env", item]
    return shlex.join([*words, "--entrypoint=", config["Image"], *config["Cmd"]])


# How it ended ------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What was seen of a container's end. `state` is the engine's, None where it knows the container no more."""

    state: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    killed_by: KilledBy | None = None
    removed: bool = False
    engine_lost: str = ""
    oom_event: bool = False


def fault_of(seen: Seen, limits: Limits) -> Fault | None:
    """What the engine and the control group say beyond the exit code; None where that says it all."""
    if seen.killed_by is not None:
        return None
    state = seen.state or {}
    code = state.get("ExitCode")
    if seen.counters.get("oom_kills") or state.get("OOMKilled") or seen.oom_event:
        # The engine's flag is set by kills of both kinds. Only the counters, where they could be read, tell them apart.
        ours = seen.counters.get("limit_hits", 1) > 0
        limit = f"at the container's memory limit of {limits.memory / GIB:.3g} GiB"
        whose = limit if ours else "while the host, not the container, was out of it"
        how = "a process of the test was killed for memory" if code == 0 else "it was killed for memory"
        return Fault(Verdict.OOM if ours else Verdict.HOST_OOM, f"{how} {whose}")
    if seen.engine_lost:
        return Fault(Verdict.INFRA, f"the container engine went away ({seen.engine_lost}) and took the container along")
    if seen.removed:
        return Fault(Verdict.KILLED, "the container was removed by somebody else")
    if seen.counters.get("pids_hits"):
        refused = f"{seen.counters['pids_hits']} processes or threads were refused"
        return Fault(Verdict.PIDS, f"{refused} at the container's limit of {limits.pids}")
    if code == 125 or state.get("Error"):
        return Fault(Verdict.INFRA, f"the container could not be started: {state.get('Error') or 'exit code 125'}")
    if code in (126, 127):
        return Fault(Verdict.CONFIG, f"the image has no program that can be started (exit code {code}); see the log")
    return None


def _ended(seen: Seen, limits: Limits, seconds: float, pid: int, fault: Fault | None) -> Ended:
    """`128 + n` of the program that stands between is the signal n of the command."""
    code = int((seen.state or {}).get("ExitCode") or 0) if seen.state is not None else None
    name = None
    if code is None:
        name = "SIGKILL"
    elif 128 < code <= 128 + 64 and signal_name(code - 128).startswith("SIG"):
        name, code = signal_name(code - 128), None
    return Ended(code, name, seen.killed_by, seconds, pid, fault=fault or fault_of(seen, limits))


# The log -----------------------------------------------------------------------------------------------------------


class Frames:
    """Takes the stream of a container's output apart: a header of eight bytes (stream, length) before each piece.

    Pieces arrive cut anywhere. `partial` says that the stream has ended inside one.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """The output in `data`, without the headers; what of a header is not complete yet is kept."""
        self._buffer += data
        out = []
        while self._buffer:
            if self._left:
                piece = self._buffer[: self._left]
                self._buffer = self._buffer[len(piece) :]
                self._left -= len(piece)
                out.append(piece)
            elif len(self._buffer) >= 8:
                self._left = int.from_bytes(self._buffer[4:8], "big")
                self._buffer = self._buffer[8:]
            else:
                break
        return b"".join(out)

    @property
    def partial(self) -> bool:
        return bool(self._buffer or self._left)


class _Log(threading.Thread):
    """Writes a container's output into a file while it runs; `finish` completes it when the container has ended."""

    def __init__(self, client: Any, container: str, stream: RawIOBase, on_output: Callable[[str], None] | None) -> None:
        super().__init__(name=f"log-{container[:12]}", daemon=True)
        self._api, self._container = client.api, container
        self._stream, self._on_output = stream, on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._written = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.full: OSError | None = None

    def run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(Exception):  # a broken stream is taken up again, and completed by `finish`
                self._copy(follow=True)
            self._ended.wait(0.2)

    def finish(self) -> None:
        """After the container's end: stop following, and fetch what a broken stream has left out."""
        self._ended.set()
        self.join(5.0)
        with contextlib.suppress(Exception):  # the engine is gone, or the container: there is nothing more to be had
            self._copy(follow=False)
        with self._lock:
            self._hand_on(b"", last=True)

    def _copy(self, follow: bool) -> None:
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{self._container}/logs"
        wanted = {"stdout": 1, "stderr": 1, "follow": int(follow)}
        with self._api.get(url, params=wanted, stream=True, timeout=(10.0, None if follow else 30.0)) as answer:
            answer.raise_for_status()
            frames, position = Frames(), 0
            while data := answer.raw.read1(65536) if hasattr(answer.raw, "read1") else answer.raw.read(1):
                piece = frames.feed(data)
                with self._lock:
                    fresh = piece[max(0, self._written - position) :]
                    position += len(piece)
                    if fresh:
                        self._write(fresh)

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self._hand_on(data, last=False)
        if self.full is None:
            try:
                while data:
                    data = data[self._stream.write(data) :]
            except OSError as error:
                self.full = error

    def _hand_on(self, data: bytes, last: bool) -> None:
        text = self._decoder.decode(data, last)
        if text and self._on_output is not None:
            self._on_output(text)


# The executor ------------------------------------------------------------------------------------------------------


class ContainerExecutor:
    """Runs commands as containers of one engine; several at a time."""

    def __init__(self, client: Any, spec: Spec, *, grace: float = GRACE, patience: float = ENGINE_PATIENCE) -> None:
        self._client, self.spec = client, spec
        self.grace, self.patience = grace, patience

    def run(
        self,
        command: Command,
        *,
        cancelled: threading.Event,
        on_output: Callable[[str], None] | None = None,
    ) -> Ended:
        """As `Executor.run` says. A container that cannot be created or started is an end with a fault, and no error.

        InfraError when a container could not be ended: then something is left running, and the message names it.
        """
        command.log.parent.mkdir(parents=True, exist_ok=True)
        suite = command.log.name.partition(".")[0]
        name = f"fp8ci-{self.spec.run_id}-{suite}-{secrets.token_hex(4)}"
        report = command.log.with_name(f"{name}.end.json") if command.writable else None
        config = payload(self.spec, command, report, suite)
        started = time.monotonic()
        seen = Seen()
        container, pid, fault = None, 0, None
        with command.log.open("ab", buffering=0) as stream:  # a full disk is noticed at the write, not when it closes
            try:
                try:
                    container = self._client.api.create_container_from_config(config, name)["Id"]
                    self._client.api.start(container)
                except Exception as error:
                    failed = engine.failure(error, f"no container of {self.spec.image} can be started")
                    stream.write(f"{failed}\n".encode())
                    return Ended(
                        125, None, None, time.monotonic() - started, 0, fault=Fault(failed.verdict, str(failed))
                    )
                log = _Log(self._client, container, stream, on_output)
                log.start()
                pid = self._pid(container)
                self._watch(container, started + command.deadline, cancelled, seen)
                log.finish()
                seen.counters = _counters(report)
                if log.full is not None:
                    fault = Fault(Verdict.DISK, f"the log could not be written ({log.full.strerror})")
            finally:
                if report is not None:
                    with contextlib.suppress(OSError):
                        report.unlink(missing_ok=True)
                gone = self._remove(container, name)
        if not gone and not seen.engine_lost:
            raise InfraError(
                f"container {name} could not be ended and removed", "an engine that ends what it runs", "restart it"
            )
        return _ended(seen, self.spec.limits, time.monotonic() - started, pid, fault)

    def _remove(self, container: str | None, name: str) -> bool:
        """Remove by name where no id came back: the request may have been carried out before its answer was lost."""
        return engine.remove(self._client, container or name, patience=GONE)

    def _pid(self, container: str) -> int:
        state = self._state(container)
        return int(state.get("Pid", 0)) if isinstance(state, Mapping) else 0

    def _watch(self, container: str, deadline: float, cancelled: threading.Event, seen: Seen) -> None:
        """Wait for the end; bring it about at the deadline or when cancelled. What was seen is in `seen`."""
        done = threading.Event()
        waiter = threading.Thread(target=self._await_end, args=(container, seen, done), daemon=True)
        waiter.start()
        kill_at = give_up_at = float("inf")
        while not done.wait(POLL):
            now = time.monotonic()
            if seen.killed_by is None and (cancelled.is_set() or now >= deadline):
                seen.killed_by = "interrupt" if cancelled.is_set() else "deadline"
                self._kill(container, signal.SIGTERM)
                kill_at, give_up_at = now + self.grace, now + self.grace + GONE
            elif now >= give_up_at:
                return  # the removal that follows is the last means, and says whether it helped
            elif now >= kill_at:
                self._kill(container, signal.SIGKILL)
                kill_at = now + 1.0

    def _kill(self, container: str, number: signal.Signals) -> None:
        with contextlib.suppress(Exception):  # it has ended, or the engine does not answer: both are seen elsewhere
            self._client.api.kill(container, number.name)

    def _await_end(self, container: str, seen: Seen, done: threading.Event) -> None:
        """Wait in short requests. After each that fails, ask what the container does: never trust the failure."""
        from docker.errors import NotFound

        lost_since: float | None = None
        try:
            while True:
                lost = ""
                try:
                    self._client.api.wait(container, timeout=5.0 if lost_since is None else 1.0)
                except NotFound:
                    pass  # asked once more below
                except Exception as error:
                    lost = engine.reason(error)
                state = self._state(container)
                if state == "gone":
                    seen.removed = seen.killed_by is None
                    return
                if state is None:
                    lost_since = lost_since or time.monotonic()
                    seen.engine_lost = lost or seen.engine_lost or "it does not answer"
                    if time.monotonic() - lost_since > self.patience:
                        return
                    time.sleep(0.3)
                    continue
                assert isinstance(state, Mapping)
                if state.get("Running"):
                    if lost_since is not None:  # it came back, and the container has lived through it
                        lost_since, seen.engine_lost = None, ""
                    continue
                seen.state = state
                if state.get("ExitCode") not in ENDED_BY_ENGINE:
                    seen.engine_lost = ""  # it ended by itself, before or while the engine was away
                elif not seen.engine_lost and not seen.killed_by:
                    seen.engine_lost = self._farewell()
                    if self._state(container) == "gone":  # a removal ends it first, and takes it away then
                        seen.removed = not seen.engine_lost
                return
        finally:
            done.set()

    def _farewell(self) -> str:
        """Why the engine goes away just now, or nothing: one that stops ends its containers first, then itself."""
        until = time.monotonic() + FAREWELL
        while time.monotonic() < until:
            try:
                self._client.api.ping()
            except Exception as error:
                back = time.monotonic() + self.patience
                while time.monotonic() < back:  # a run that goes on needs it again
                    with contextlib.suppress(Exception):
                        self._client.api.ping()
                        break
                    time.sleep(0.3)
                return engine.reason(error)
            time.sleep(0.1)
        return ""

    def _state(self, container: str) -> Mapping[str, Any] | str | None:
        """The engine's word on a container: its state, "gone", or None when the engine does not answer."""
        from docker.errors import NotFound

        try:
            answer: Mapping[str, Any] = self._client.api.inspect_container(container)["State"]
        except NotFound:
            return "gone"
        except Exception:
            return None
        return answer


def _counters(report: Path | None) -> Mapping[str, int]:
    """What harness/inside.py wrote; empty where it could not."""
    if report is None:
        return {}
    try:
        value = json.loads(report.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return {key: count for key, count in value.items() if isinstance(count, int)} if isinstance(value, dict) else {}
