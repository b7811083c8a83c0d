"""Runs in containers without an engine: payloads of hosts that are not at hand, ends, logs, owners, GPUs and locks.

The payloads are compared with `payloads.json`, which was read line by line against harness.md section 10 when it
was recorded: `python -m suites.unit.test_containers` writes it again. What an engine does with them is tested on a real
one (suites/engine).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness import contained, container, devices, doctor, engine, images, inside
from harness.container import Frames, Limits, Seen, Spec
from harness.devices import Gpu
from harness.engine import Engine, Owner
from harness.errors import VERDICTS, ConfigError, DirtyGpuError, HarnessError, InfraError, UsageError, Verdict
from harness.executor import Command

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "payloads.json"
PLAIN = Engine("28.2.2", "x86_64", 512 << 30, "/var/lib/docker", "overlay2", False, False, frozenset(), (), False)
FULL = replace(PLAIN, limits=frozenset({"memory", "swap", "pids"}))


def gpus(vendor: str, count: int, group: int) -> tuple[Gpu, ...]:
    """GPUs as a host shows them: AMD's have UUIDs and a partition mode, NVIDIA's node is named by its index."""
    if vendor == "nvidia":
        return tuple(Gpu("nvidia", i, f"/dev/nvidia{i}", 0, 0o666) for i in range(count))
    return tuple(
        Gpu("amd", i, f"/dev/dri/renderD{128 + i}", group, 0o660, f"GPU-{i + 1:016x}", "SPX/NPS1") for i in range(count)
    )


def spec(vendor: str, held: tuple[Gpu, ...], groups: tuple[int, ...], told: Engine, uid: int = 654321) -> Spec:
    """A run of a user whose number has no name, on a host."""
    limits = Limits.of_host(told.memory, 1)
    root = Path("/srv/checkout")
    image = f"fp8ci-{vendor}:tag"
    return Spec(image, root, vendor, told, limits, held, groups, uid, uid, "run", "owner")  # type: ignore[arg-type]


CPX = tuple(replace(gpu, uuid="GPU-1", partition="CPX/NPS4") for gpu in gpus("amd", 2, 44))
TWO = ("nvidia.com/gpu=0", "nvidia.com/gpu=1")
HOSTS: Mapping[str, Spec] = {
    "cpu": spec("cpu", (), (), FULL),
    "rocm-1-gpu": spec("amd", gpus("amd", 1, 993), (44, 993), FULL),
    "rocm-8-gpus": spec("amd", gpus("amd", 8, 109), (44, 109), FULL),
    # The render group is 992 here, and kfd belongs to it as well.
    "rocm-other-groups": spec("amd", gpus("amd", 8, 992)[3:5], (992,), FULL),
    # CPX: the partitions of one GPU share its UUID, so positions are told instead.
    "rocm-partitioned": spec("amd", CPX, (44,), FULL),
    "rocm-rootless": spec("amd", gpus("amd", 1, 993), (44, 993), replace(PLAIN, rootless=True)),
    "rocm-user-namespaces": spec("amd", gpus("amd", 1, 993), (44, 993), replace(FULL, user_namespaces=True)),
    "cuda-1-gpu": spec("nvidia", gpus("nvidia", 1, 0), (), replace(FULL, nvidia_runtime=True)),
    "cuda-8-gpus": spec("nvidia", gpus("nvidia", 8, 0), (), replace(FULL, nvidia_runtime=True)),
    "cuda-cdi": spec("nvidia", gpus("nvidia", 8, 0)[:2], (), replace(FULL, cdi=TWO)),
    "cuda-rootless-cdi": spec("nvidia", gpus("nvidia", 1, 0), (), replace(PLAIN, rootless=True, cdi=TWO[:1])),
}  # fmt: skip

#: An environment as a developer's shell has it: most of it must stay outside.
SHELL = {
    "PATH": "/home/me/bin:/usr/bin", "HOME": "/home/me", "LD_LIBRARY_PATH": "/opt/x", "PYTHONPATH": "/home/me/lib",
    "GITHUB_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret", "HIP_VISIBLE_DEVICES": "3",
    "CUDA_VISIBLE_DEVICES": "3",
    "OMP_NUM_THREADS": "4", "FP8STACK_ARCH": "gfx942", "TRITON_CACHE_DIR": "/home/me/.triton", "TRITON_INTERPRET": "1",
}  # fmt: skip


def made(name: str) -> dict[str, Any]:
    """The payload for one host."""
    out = Path("/srv/evidence")
    command = Command(
        (container.PYTHON, "-m", "pytest"), SHELL, Path("/srv/checkout"), 60.0, out / "logs/x.log", (out,)
    )
    config = container.payload(HOSTS[name], command, out / "logs/end.json", "numerics")
    line = container.run_line(config)
    return json.loads(json.dumps({"payload": config, "line": line}).replace(str(container.CODE), "/CODE"))


@pytest.mark.parametrize("name", [pytest.param(name, id=f"payload-{name}") for name in HOSTS])
def test_payload(name: str) -> None:
    """The request that creates a container on this host, and the line that a person can paste, are as recorded."""
    assert json.loads(RECORDED.read_text(encoding="ascii"))[name] == made(name)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"rules-{name}") for name in HOSTS])
def test_rules_of_every_payload(name: str) -> None:
    """Never privileged, no host network, no unconfined seccomp, one writable mount, no secret, numeric groups."""
    config = made(name)["payload"]
    host = config["HostConfig"]
    assert host["Privileged"] is False
    assert host["AutoRemove"] is False
    assert host["NetworkMode"] == "none"
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["CapDrop"], set(host["CapAdd"]) <= {"SYS_NICE"}) == (["ALL"], True)
    assert host["Init"] is True
    assert [mount["Source"] for mount in host["Mounts"] if not mount["ReadOnly"]] == ["/srv/evidence"]
    assert all(group.isdigit() for group in host.get("GroupAdd", []))
    names = {item.partition("=")[0] for item in config["Env"]}
    assert {"HOME", "USER", "LOGNAME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= names
    assert names.isdisjoint({"PATH", "LD_LIBRARY_PATH", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY"})
    assert "secret" not in json.dumps(config)
    assert not {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} <= names  # one of them, never both
    if host.get("Memory"):
        assert host["Memory"] < HOSTS[name].engine.memory
        assert host["MemorySwap"] == host["Memory"]
        assert host["PidsLimit"] == container.PIDS


# How it ended ------------------------------------------------------------------------------------------------------

LIMITS = Limits(256 << 20, 32 << 20)
ENDS: Mapping[str, tuple[Seen, Verdict | None, str | None]] = {
    "137-oom": (Seen({"ExitCode": 137, "OOMKilled": True}), Verdict.OOM, "SIGKILL"),
    "137-oom-of-the-host": (
        Seen({"ExitCode": 137, "OOMKilled": True}, {"oom_kills": 1, "limit_hits": 0}), Verdict.HOST_OOM, "SIGKILL",
    ),
    "137-ours": (Seen({"ExitCode": 137, "OOMKilled": False}, killed_by="deadline"), None, "SIGKILL"),
    "137-foreign": (Seen({"ExitCode": 137, "OOMKilled": False}), None, "SIGKILL"),
    "139": (Seen({"ExitCode": 139}), None, "SIGSEGV"),
    "143": (Seen({"ExitCode": 143}), None, "SIGTERM"),
    "125": (Seen({"ExitCode": 125}), Verdict.INFRA, None),
    "126": (Seen({"ExitCode": 126}), Verdict.CONFIG, None),
    "127": (Seen({"ExitCode": 127}), Verdict.CONFIG, None),
    "0-oom-of-a-child": (Seen({"ExitCode": 0, "OOMKilled": True}), Verdict.OOM, None),
    "0-oom-counted": (Seen({"ExitCode": 0}, {"oom_kills": 1, "limit_hits": 7}), Verdict.OOM, None),
    "0-pids": (Seen({"ExitCode": 0}, {"pids_hits": 3}), Verdict.PIDS, None),
    "removed": (Seen(None, removed=True), Verdict.KILLED, "SIGKILL"),
    "engine-gone": (Seen(None, engine_lost="connection refused"), Verdict.INFRA, "SIGKILL"),
    "good": (Seen({"ExitCode": 0, "OOMKilled": False, "Error": ""}, {"oom_kills": 0, "pids_hits": 0}), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, id=f"end-{name}") for name in ENDS])
def test_end(name: str) -> None:
    """Exit code, engine's flag, counters and our own record of a kill: each end of its own (taskcluster#7599)."""
    seen, verdict, signal_name = ENDS[name]
    ended = container._ended(seen, LIMITS, 1.0, 1, None)
    assert (ended.fault.verdict if ended.fault else None, ended.signal) == (verdict, signal_name)
    assert (ended.rc is None) == (ended.signal is not None)
    assert ended.killed_by == seen.killed_by


def frame(data: bytes, stream: int = 1) -> bytes:
    """One piece of output as the engine sends it."""
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000])
def test_frames_cut_anywhere(size: int) -> None:
    """Headers and characters cut at every place: the output is whole, without a byte of a header (docker#2044)."""
    pieces = [b"caf\xc3", b"\xa9", b"\xff", b"", b"x" * 40]
    stream = b"".join(frame(piece, 1 + number % 2) for number, piece in enumerate(pieces))
    frames = Frames()
    got = b"".join(frames.feed(stream[start : start + size]) for start in range(0, len(stream), size))
    assert (got, frames.partial) == (b"".join(pieces), False)
    frames.feed(frame(b"cut off")[:-1])
    assert frames.partial


def test_counters_in_both_layouts(tmp_path: Path) -> None:
    """The control group's files, of the older and of the newer layout; what is not there is not invented."""
    assert inside.counters(tmp_path) == {}
    for name, text in {
        "v1/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "v1/memory/memory.max_usage_in_bytes": "134217728\n",
        "v1/memory/memory.limit_in_bytes": "134217728\n",
        "v1/pids/pids.events": "max 5\n",
        "v2/memory.events": "low 0\nhigh 0\nmax 31\noom 0\noom_kill 1\n",
        "v2/pids.events": "max 0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert inside.counters(tmp_path / "v1") == {"oom_kills": 2, "limit_hits": 1, "pids_hits": 5}
    assert inside.counters(tmp_path / "v2") == {"oom_kills": 1, "limit_hits": 0, "pids_hits": 0}


# Whose a container is ----------------------------------------------------------------------------------------------


def test_only_the_certainly_dead_are_reaped() -> None:
    """This process lives; one of another boot is dead; of another machine or namespace nobody here can say."""
    us = engine.ourselves()
    assert engine.from_label(us.to_label()) == us
    assert not engine.dead(us, us)
    assert engine.dead(replace(us, start=us.start + 1), us)  # the number is somebody else's by now
    assert engine.dead(replace(us, boot="an earlier one"), us)
    assert not engine.dead(replace(us, machine="another", start=1), us)
    assert not engine.dead(replace(us, namespace="pid:[1]", start=1), us)
    for label in ("", "{}", "[]", "not json", '{"machine": 1}'):
        assert not engine.dead(engine.from_label(label), us)


def test_a_process_that_has_ended_is_dead() -> None:
    """Also while it is a zombie, which still has its number and start time."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    us = engine.ourselves()
    start = engine.start_of(child.pid)
    until = time.monotonic() + 10
    while engine.start_of(child.pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.dead(Owner(us.machine, us.boot, us.namespace, child.pid, start or 1), us)
    child.wait()


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        pytest.param("write /var/lib/docker/x: no space left on device", Verdict.DISK, id="disk"),
        pytest.param("error gathering device information while adding custom device", Verdict.INFRA, id="device"),
        pytest.param('could not select device driver "nvidia" with capabilities: [[gpu]]', Verdict.INFRA, id="toolkit"),
        pytest.param("Unable to find group render: no matching entries", Verdict.INFRA, id="group"),
    ],
)
def test_what_an_engine_says(told: str, verdict: Verdict) -> None:
    """The words of an engine that does not start a container become the kind of failure, all of them the machine's."""
    failure = engine.failure(RuntimeError(told), "no container can be started")
    assert failure.verdict is verdict
    assert VERDICTS[verdict].exit_code == 4
    assert told in str(failure)


# GPUs and their locks ----------------------------------------------------------------------------------------------


def host(folder: Path, count: int = 8, partition: str = "SPX", vendor: str = "amd", uuids: bool = True) -> Path:
    """A file system that shows so many GPUs."""
    if vendor == "nvidia":
        (folder / "dev").mkdir(parents=True)
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(count))):
            (folder / "dev" / name).touch()
        return folder
    nodes = folder / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0" / "properties").write_text("cpu_cores_count 96\nsimd_count 0\ndrm_render_minor 0\n")
    (folder / "dev/dri").mkdir(parents=True)
    (folder / "dev/kfd").touch()
    for index in range(count):
        (nodes / str(index + 1)).mkdir()
        unique = 4096 + index if uuids else 0
        text = f"simd_count 1216\ndrm_render_minor {128 + index}\nunique_id {unique}\ngfx_target_version 90402\n"
        (nodes / str(index + 1) / "properties").write_text(text)
        (folder / f"dev/dri/renderD{128 + index}").touch()
        device = folder / f"sys/class/drm/renderD{128 + index}/device"
        device.mkdir(parents=True)
        (device / "current_compute_partition").write_text(f"{partition}\n")
        (device / "current_memory_partition").write_text("NPS1\n")
        (device / "pp_dpm_sclk").write_text("0: 132Mhz\n1: 2100Mhz *\n")
    return folder


def test_gpus_of_a_host(tmp_path: Path) -> None:
    """Nodes in the driver's order, with owning group, UUID and partition mode; the CPU's own node is none."""
    found = devices.find("amd", host(tmp_path / "amd"))
    assert [gpu.node for gpu in found] == [f"/dev/dri/renderD{128 + index}" for index in range(8)]
    assert found[0].uuid == "GPU-0000000000001000"
    assert {gpu.group for gpu in found} == {os.getgid()}
    assert devices.partition(found) == "SPX/NPS1"
    assert devices.partition((found[0], replace(found[1], partition="CPX/NPS4"))) == "CPX/NPS4 and SPX/NPS1"
    assert devices.find("amd", host(tmp_path / "old", uuids=False))[0].uuid is None
    assert [gpu.index for gpu in devices.find("nvidia", host(tmp_path / "nvidia", 12, vendor="nvidia"))] == [*range(12)]
    assert devices.vendor_of(tmp_path) == "cpu"


def test_the_callers_choice(tmp_path: Path) -> None:
    """*_VISIBLE_DEVICES of the caller, by index or UUID, says which GPUs a run may choose from."""
    found = devices.find("amd", host(tmp_path))
    assert devices.visible(found, None) == found
    assert devices.visible(found, "3, 1") == (found[3], found[1])
    assert devices.visible(found, "GPU-0000000000001002") == (found[2],)
    with pytest.raises(UsageError, match="'9' of the visible devices is no GPU"):
        devices.visible(found, "0,9")


def test_eight_runs_share_eight_gpus(tmp_path: Path) -> None:
    """Each of eight processes gets two of eight GPUs, four at a time, and no GPU is in two hands at once."""
    folder = host(tmp_path / "host")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom harness import devices\n"
        "found = devices.find('amd', Path(sys.argv[1]))\n"
        "with devices.claim(found, 2, folder=Path(sys.argv[2]), wait=60) as held:\n"
        "    began = time.monotonic(); time.sleep(0.25)\n"
        "    print(began, time.monotonic(), *(gpu.node for gpu in held))\n"
    )
    (tmp_path / "locks").mkdir()
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "locks")]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    lines = [process.communicate(timeout=60)[0].split() for process in started]
    assert all(len(words) == 4 for words in lines), lines
    spans = [(float(words[0]), float(words[1]), node) for words in lines for node in words[2:]]
    for began, ended, node in spans:
        others = [other for other in spans if other[2] == node and other != (began, ended, node)]
        assert all(other[0] >= ended or other[1] <= began for other in others), (node, others)


def test_claims_are_all_or_nothing_and_end_with_their_holder(tmp_path: Path) -> None:
    """Too many are refused at once, taken ones after the wait by name; the lock of a killed holder is free."""
    found = devices.find("amd", host(tmp_path / "host", 2))
    with pytest.raises(InfraError, match="3 GPUs are asked for and this host has 2"), devices.claim(found, 3):
        pass
    (tmp_path / "locks").mkdir()
    told: list[str] = []
    with devices.claim(found, 1, folder=tmp_path / "locks") as held:
        assert held == (found[0],)
        with (
            pytest.raises(DirtyGpuError, match=f"held by .*process {os.getpid()}"),
            devices.claim(found, 2, folder=tmp_path / "locks", wait=0.3, say=told.append),
        ):
            pass
        assert len(told) == 1
        with devices.claim(found, 1, folder=tmp_path / "locks", wait=0.0) as other:
            assert other == (found[1],)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom harness import devices\n"
        "found = devices.find('amd', Path(sys.argv[1]))\n"
        "with devices.claim(found, 2, folder=Path(sys.argv[2])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "host"), str(tmp_path / "locks")]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    with devices.claim(found, 2, folder=tmp_path / "locks", wait=1.0) as held:
        assert held == found


def test_eight_runs_have_names_and_caches_of_their_own() -> None:
    """Run ids differ, so names do; caches are in the container's own file system, so nobody else's."""
    assert len({Spec("image", ROOT, "cpu", FULL, LIMITS).run_id for _ in range(8)}) == 8
    told = container.environment_of(HOSTS["cpu"], SHELL)
    assert {told[name] for name in container.CACHES} == {f"{container.HOME}/{sub}" for sub in container.CACHES.values()}


def test_a_full_run_is_told_inside() -> None:
    """The rows of the night exist in a container too."""
    assert "FP8CI_FULL" not in container.environment_of(HOSTS["cpu"], SHELL)
    assert container.environment_of(HOSTS["cpu"], {**SHELL, "FP8CI_FULL": "1"})["FP8CI_FULL"] == "1"


# The doctor --------------------------------------------------------------------------------------------------------


def states(asked: doctor.Asked, fs: Path) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(asked, fs)}


def test_doctor_of_an_amd_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes, groups, partition, clocks and users, from files alone."""
    monkeypatch.setattr(doctor, "_tool", lambda command: None)
    fs = host(tmp_path)
    found = states(doctor.Asked(ROOT, "auto:rocm", gpus=8), fs)
    assert {name for name, check in found.items() if check.state == "fail"} == set()
    assert found["partition"].found == "SPX/NPS1"
    assert "renderD128 sclk 2100Mhz" in found["clocks"].found
    (fs / "sys/class/kfd/kfd/proc/4711").mkdir(parents=True)
    (fs / "proc/4711").mkdir(parents=True)
    (fs / "proc/4711/comm").write_text("train\n")
    busy = states(doctor.Asked(ROOT, "auto:rocm"), fs)["gpu-users"]
    assert (busy.state, busy.found) == ("warn", "in use by process 4711 (train)")
    assert states(doctor.Asked(ROOT, "auto:rocm", gpus=9), fs)["gpus"].state == "fail"


def test_doctor_without_a_gpu(tmp_path: Path) -> None:
    """A ROCm run here would end with exit 4, and the line says why; an `auto` one would run on the CPU."""
    check = states(doctor.Asked(ROOT, "auto:rocm"), tmp_path)["platform"]
    assert (check.state, check.error.exit_code if check.error else None) == ("fail", 4)
    assert "/dev/kfd does not exist" in check.found
    assert states(doctor.Asked(ROOT), tmp_path)["platform"].state == "ok"


def test_doctor_sees_a_tool_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's tool that does not answer is the GPU's fault, found within the deadline (pytorch#94026)."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "amd-smi").write_text("#!/bin/sh\nsleep 30\n")
    (tools / "amd-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "TOOL", 0.3)
    check = states(doctor.Asked(ROOT, "auto:rocm"), host(tmp_path / "host"))["gpu-answers"]
    assert check.error is not None
    assert check.error.verdict is Verdict.GPU_HANG


# Images ------------------------------------------------------------------------------------------------------------


def test_every_platform_has_an_image() -> None:
    """Each platform's image is a row, pinned by digest or openly not; the names depend on what goes in."""
    from harness.platforms import PLATFORMS

    rows = images.load(ROOT)
    assert {row.image for row in PLATFORMS.values()} == set(rows)
    tag = images.get(ROOT, "cpu").tag
    assert tag.startswith("fp8ci-cpu:")
    assert images.get(ROOT, "cpu", "another:base").tag != tag
    with pytest.raises(UsageError, match="there is no image 'gpu'"):
        images.get(ROOT, "gpu")


def test_an_input_changes_the_name(tmp_path: Path) -> None:
    """One byte of one file of docker/ makes another image; a README does not."""
    import shutil

    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    before = images.inputs(tmp_path, "base")
    (tmp_path / "docker" / "README.md").write_text("words")
    assert images.inputs(tmp_path, "base") == before
    with (tmp_path / "docker" / "requirements.txt").open("a") as stream:
        stream.write("#\n")
    assert images.inputs(tmp_path, "base") != before


def test_unpinned_is_refused_in_ci() -> None:
    """Without a digest nothing is built in CI, and the message holds the command that pins it. No engine is asked."""
    row = images.Row("docker.io/library/python", "3.11-slim-bookworm", images.UNPINNED, "2.13.0")
    image = images.Image("cpu", row, row.reference, "fp8ci-cpu:x")
    with pytest.raises(ConfigError, match=r"the base of cpu is unpinned; .*docker pull docker.io/library/python:3.11"):
        images.build(None, ROOT, image, in_ci=True)


@pytest.mark.parametrize("digest", ["", "latest", "sha256:abc", "sha256:" + "g" * 64])
def test_a_digest_is_one(digest: str, tmp_path: Path) -> None:
    """What is neither a whole digest nor `unpinned` is a mistake in the table."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/cpu.Dockerfile").touch()
    (tmp_path / "docker/images.toml").write_text(f'[cpu]\nbase = "b"\ntag = "t"\ndigest = "{digest}"\ntorch = "2"\n')
    with pytest.raises(ConfigError, match="has digest"):
        images.load(tmp_path)


def test_the_devices_answer_is_found_behind_warnings() -> None:
    """The last JSON object of a log that libraries have written into before."""
    log = 'warning: {not json}\n{"half": \n{\n "vendor": "amd"\n}\n'
    assert contained._last_object(log, "the probe") == {"vendor": "amd"}
    with pytest.raises(InfraError, match="printed"):
        contained._last_object("nothing", "the probe")


class NotFound(Exception):
    """In place of the SDK's, which need not be here."""


class FakeEngine:
    """The docker SDK's client, of an engine that answers: `start` is what it does, and `state` what became of it."""

    def __init__(self, refuses: Exception | None = None, state: Mapping[str, Any] | None = None, log: str = "") -> None:
        self.api, self.base_url, self.api_version = self, "http://engine", "1.44"
        self._refuses, self._state, self._log = refuses, state, log.encode()
        self._there = False

    def create_container_from_config(self, config: Mapping[str, Any], name: str) -> Mapping[str, str]:
        self._there = True
        return {"Id": name}

    def start(self, container: str) -> None:
        if self._refuses is not None:
            raise self._refuses

    def wait(self, container: str, timeout: float) -> None:
        return None

    def inspect_container(self, container: str) -> Mapping[str, Any]:
        if not self._there:
            raise NotFound("no such container")
        return {"State": self._state}

    def remove_container(self, container: str, **_: object) -> None:
        self._there = False

    @contextlib.contextmanager
    def get(self, url: str, **_: object) -> Iterator[Any]:
        frame = b"\x01\0\0\0" + len(self._log).to_bytes(4, "big") + self._log
        yield SimpleNamespace(raw=io.BytesIO(frame), raise_for_status=lambda: None)


#: What keeps a container from answering -> the engine, exit code, what the line says.
UNANSWERED: Mapping[str, tuple[FakeEngine, int, str]] = {
    "device": (
        FakeEngine(RuntimeError("error gathering device information while adding custom device")),
        4,
        "no container of fp8ci-cpu:tag can be started: error gathering device information",
    ),
    "no-program": (
        FakeEngine(state={"ExitCode": 127}, log="[FATAL tini (7)] exec fp8ci-python failed: No such file\n"),
        2,
        "exec fp8ci-python failed: No such file",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in UNANSWERED])
def test_a_container_that_cannot_start_is_said_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked in a container first: an engine that refuses is exit 4, an image that is not ours exit 2.

    So nothing has been judged by then. One that refuses in mid-run leaves tests that did not run, which is worse.
    """
    monkeypatch.setitem(sys.modules, "docker", ModuleType("docker"))
    errors = ModuleType("docker.errors")
    errors.NotFound = NotFound  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "docker.errors", errors)
    client, code, told = UNANSWERED[name]
    ask = contained._Asker(container.ContainerExecutor(client, replace(HOSTS["cpu"], root=ROOT)))
    with pytest.raises(HarnessError) as raised:
        ask({})
    assert told in str(raised.value)
    assert raised.value.exit_code == code


@pytest.mark.parametrize("required", [pytest.param("", id="skipped"), pytest.param("required", id="required")])
def test_no_engine_is_said(required: str, tmp_path: Path) -> None:
    """Without an engine the tests of suites/engine are skipped and say why; where it is required they are errors."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "suites/engine",
        "-k",
        "test_log_is_whole",
        "-rsE",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PATH": str(tmp_path), "FP8CI_ENGINE": required}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if required else 0), done.stdout
    assert ("1 error" if required else "1 skipped") in done.stdout
    assert "no container engine can be had: it takes " in done.stdout
    assert list(tmp_path.iterdir()) == []


def record() -> None:
    """Write the expectations again, to be read before they are committed."""
    rows = {name: made(name) for name in HOSTS}
    RECORDED.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    record()
