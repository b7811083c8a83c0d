"""A run in containers: everything between the command line and run.py, and clearing up behind it.

    dead runs' containers reaped -> preflight (doctor.py) -> GPUs claimed -> the device asked, in a container of the
    same image -> the platform that it is -> run.execute with a container executor

The host needs neither torch nor a GPU library: what the device is, is asked where torch is.

Not here: each of these steps.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import container, devices, doctor, engine, images, plan, platforms
from harness.container import ContainerExecutor, Limits, Spec
from harness.errors import ConfigError, InfraError, UsageError, Verdict
from harness.executor import Command, Place
from harness.platforms import Platform

#: The caller's own choice of GPUs, which a run takes as the GPUs that it may choose from.
CHOICE = {"amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "nvidia": ("CUDA_VISIBLE_DEVICES",), "cpu": ()}


@dataclass(frozen=True)
class Contained:
    """What a run in containers needs: where it runs, how to ask the device there, and what run.json says of it."""

    platform: Platform
    reason: str
    executor: ContainerExecutor
    place: Place
    ask: Callable[[Mapping[str, str]], Mapping[str, Any]]
    told: Mapping[str, Any]


@contextmanager
def opened(asked: doctor.Asked, containers: int, say: Callable[[str], None]) -> Iterator[Contained]:
    """Everything that a run of `containers` containers side by side needs, until the block ends.

    The errors are those of the first check that fails: exit 4, and nothing was started.
    """
    vendor = doctor.require_vendor(asked.spec)
    client = engine.connect()
    for name in engine.reap(client):
        say(f"removed container {name}, which a dead run has left")
    checks = list(doctor.examine(asked, client=client))
    doctor.require(checks)
    for check in checks:
        if check.state == "warn":
            say(f"{check.name}: {check.found}; {check.advice}")
    known = engine.from_info(client.info())
    tag = asked.image or images.get(asked.root, doctor.image_name(asked.root, vendor)).tag
    digest = images.require(client, tag, known.machine, doctor.image_name(asked.root, vendor))
    with devices.claim(_choice(vendor), asked.gpus if vendor != "cpu" else 0, say=say) as gpus:
        limits = Limits.of_host(known.memory, containers)
        spec = Spec(tag, asked.root, vendor, known, limits, gpus, devices.groups(gpus))
        executor = ContainerExecutor(client, spec)
        asker = _Asker(executor)
        platform, reason = _platform(asked.spec, vendor, asker)
        told = {"image_digest": digest, "partition": devices.partition(gpus), "container": _told(spec)}
        yield Contained(platform, f"{reason}, in {tag}", executor, container.place(os.environ), asker, told)


def _choice(vendor: platforms.Vendor) -> tuple[devices.Gpu, ...]:
    gpus = devices.find(vendor)
    for name in CHOICE[vendor]:
        gpus = devices.visible(gpus, os.environ.get(name))
    return gpus


def _platform(spec: str, vendor: platforms.Vendor, ask: _Asker) -> tuple[Platform, str]:
    if vendor == "cpu":
        return platforms.resolve(spec if spec != "auto" else "cpu")
    return platforms.resolve(spec, ask({}) if spec.startswith("auto") else None)


def _told(spec: Spec) -> dict[str, Any]:
    return {
        "image": spec.image,
        "engine": spec.engine.version,
        "gpus": [gpu.node for gpu in spec.gpus],
        "memory": spec.limits.memory,
        "pids": spec.limits.pids,
        "shm": spec.limits.shm,
    }


class _Asker:
    """Asks the device in a container, once an environment."""

    def __init__(self, executor: ContainerExecutor) -> None:
        self._executor = executor
        self._answers: dict[tuple[tuple[str, str], ...], Mapping[str, Any]] = {}

    def __call__(self, environment: Mapping[str, str]) -> Mapping[str, Any]:
        key = tuple(sorted(environment.items()))
        if key not in self._answers:
            self._answers[key] = self._ask(environment)
        return self._answers[key]

    def _ask(self, environment: Mapping[str, str]) -> Mapping[str, Any]:
        what = f"`python -m fp8stack.device` in {self._executor.spec.image}"
        with tempfile.TemporaryDirectory(prefix="fp8ci-ask-") as folder:
            log = Path(folder) / "device.log"
            told = {**container.place(os.environ).environment, **environment}
            argv = (container.PYTHON, "-m", "fp8stack.device")
            command = Command(argv, told, self._executor.spec.root, platforms.PROBE_DEADLINE, log)
            ended = self._executor.run(command, cancelled=threading.Event())
            text = log.read_text(encoding="utf-8", errors="replace")
        lines = text.strip().splitlines() or ["no message"]
        if ended.fault is not None and ended.fault.verdict is Verdict.CONFIG:
            said = f"{what}: {ended.fault.message.removesuffix('; see the log')} ({lines[-1]})"
            raise ConfigError(said, "an image of this checkout", "`fp8ci image build` makes one; correct --image")
        if ended.fault is not None:
            raise InfraError(f"{what}: {ended.fault.message}", "an answer", "run `fp8ci doctor --in docker`")
        if ended.killed_by == "deadline":
            raise InfraError(f"{what} has not answered in time", "an answer within seconds", "check the GPU driver")
        if ended.rc == UsageError("").exit_code:
            raise UsageError(lines[-1].removeprefix("error: "))
        if ended.rc != 0:
            raise InfraError(f"{what} ended with {ended.rc or ended.signal} ({lines[-1]})", "exit 0", "run it by hand")
        return _last_object(text, what)


def _last_object(text: str, what: str) -> Mapping[str, Any]:
    """The JSON object that ends a log which may hold warnings before it."""
    start = text.find("{")
    while start != -1:
        try:
            value = json.loads(text[start:])
        except ValueError:
            start = text.find("{", start + 1)
            continue
        if isinstance(value, dict):
            return value
        break
    raise InfraError(f"{what} printed {text[-80:]!r}", "one JSON object at the end", "run it by hand")


def run_lines(
    asked: doctor.Asked, suites: tuple[str, ...], case: str | None, pytest_args: tuple[str, ...], full: bool = False
) -> Iterator[str]:
    """For `fp8ci plan --docker`: the command line of each suite's container, to be pasted; nothing is started.

    The plugin asks the device itself, so that the line needs no file of an earlier run.
    """
    vendor = doctor.vendor_asked(asked.spec)
    platform = platforms.get("cpu") if vendor == "cpu" else _named(asked.spec)
    chosen = platforms.select_suites(platform, suites)
    client = engine.connect()
    known = engine.from_info(client.info())
    tag = asked.image or images.get(asked.root, platform.image).tag
    gpus = _choice(vendor)[: asked.gpus]
    out = (asked.out or asked.root / "evidence" / f"{platform.id}-by-hand").absolute()
    options = ["--fp8-out", str(out), "--fp8-platform", platform.id, "--fp8-run-id", "by-hand"]
    options += ["--fp8-case", case] if case else []
    place = container.place(os.environ)
    lanes = plan.lanes(
        asked.root,
        platform,
        chosen,
        case=case,
        options=options,
        pytest_args=pytest_args,
        gpus=len(gpus),
        full=full,
        place=place,
    )
    spec = Spec(tag, asked.root, vendor, known, Limits.of_host(known.memory, len(lanes)), gpus, devices.groups(gpus))
    yield f"mkdir -p {out}/logs"
    for job in (job for lane in lanes for job in lane):
        command = Command(
            job.argv, job.environment, asked.root, job.deadline, out / "logs" / f"{job.suite}.log", (out,)
        )
        yield container.run_line(container.payload(spec, command, None, job.suite))


def _named(spec: str) -> Platform:
    if spec.startswith("auto"):
        raise UsageError(f"{spec} must ask the device, and plan --docker starts nothing", "a platform's id", "name it")
    return platforms.get(spec)
