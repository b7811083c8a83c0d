"""Every way for a run in a container to die, on a real engine: verdict, exit code, report, and nothing left behind.

`fp8ci run --in docker` runs three tests in the CPU image, of which the second ends its process, eats what it may not
have, or waits for somebody to do something to its container, to the engine or to `fp8ci` itself. As for processes
(suites/unit/test_deaths.py) two rules hold in every row: the run is red, and what had passed before is still a pass.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import cli, container, engine
from harness.errors import VERDICTS, Verdict
from suites.engine.conftest import Daemon
from suites.unit import tiny_checkout

ROOT = Path(__file__).resolve().parents[2]
IDS = [f"numerics/test_tiny::{name}" for name in ("test_1_first", "test_2_dies", "test_3_last")]
THREE = """
import ctypes, os, pathlib, signal, subprocess, sys, time
OUT = {out!r}
def test_1_first(): pass
def test_2_dies():
    {end}
def test_3_last(): pass
"""

#: `fp8ci`, with what would take long replaced: the device's answer, and the limits by small ones. `spec` replaces what
#: a container is told of its host.
DRIVER = """
import dataclasses, json, sys
from harness import cli, contained, container, devices, doctor, platforms
from suites.unit import tiny_checkout
said = json.loads(sys.argv[1])
contained._Asker._ask = lambda self, environment: dict(tiny_checkout.FACTS)
limits = container.Limits(said["memory"] << 20, 32 << 20, said["pids"])
doctor.DISK = said["disk"] << 20
container.Limits.of_host = classmethod(lambda cls, memory, containers: limits)
container.ContainerExecutor.__init__.__kwdefaults__.update(grace=said["grace"], patience=said["patience"])
spec = {name: tuple(value) if isinstance(value, list) else value for name, value in said["spec"].items()}
if "gpus" in spec:
    spec["gpus"] = tuple(devices.Gpu(*row) for row in spec["gpus"])
whole = contained.Spec
contained.Spec = lambda *words: dataclasses.replace(whole(*words), **spec)
row = platforms.EXECUTION["cpu", "numerics"]
changed = {**platforms.EXECUTION, ("cpu", "numerics"): dataclasses.replace(row, deadline=said["deadline"])}
platforms.EXECUTION = changed
sys.exit(cli.main(sys.argv[2:]))
"""

WAITS = "print('waiting', flush=True); time.sleep(60)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ctypes.PyDLL(None).pause()"


@dataclass
class Run:
    """One `fp8ci run`, started."""

    process: subprocess.Popen[str]
    out: Path
    root: Path

    def until_the_second_test(self) -> None:
        """Wait until the journal says that it runs; AssertionError where the run ends before."""
        until = time.monotonic() + 60
        journal = self.out / "journal.jsonl"
        while time.monotonic() < until:
            if journal.exists() and any(
                json.loads(line)["event"] == "start" and "2_dies" in line
                for line in journal.read_text().splitlines()
                if line.endswith("}")
            ):
                time.sleep(0.3)
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError("the second test never started")

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stdout, stderr


def start(
    daemon: Daemon,
    image: str,
    folder: Path,
    end: str,
    *,
    out: Path | None = None,
    args: tuple[str, ...] = (),
    memory: int = 256,
    pids: int = 64,
    deadline: float = 60.0,
    patience: float = 30.0,
    grace: float = 0.5,
    disk: int = 2048,
    spec: Mapping[str, object] | None = None,
) -> Run:
    """Start a run of three tests, of which the second does `end`."""
    out = out or folder / "out"
    root = tiny_checkout.make(folder / "checkout", {"numerics/test_tiny": THREE.format(end=end, out=str(out))}, IDS)
    told = {"memory": memory, "pids": pids, "deadline": deadline, "patience": patience, "grace": grace, "disk": disk}
    said = json.dumps({**told, "spec": spec or {}})
    command = [sys.executable, "-c", DRIVER, said, "run", "--platform", "cpu", "--suite", "numerics", "--in", "docker"]
    command += ["--root", str(root), "--out", str(out), "--image", image, "--quiet", *args]
    environment = {**os.environ, "DOCKER_HOST": daemon.host, "PYTHONPATH": str(ROOT)}
    environment.pop("FP8CI_IN", None)
    pipe = subprocess.PIPE
    return Run(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe), out, root)


def cases(out: Path) -> dict[str, str]:
    """Name -> tag and message of its result element in junit.xml, or "" for a pass."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(out / "junit.xml").getroot().iter("testcase"):
        listed = [child for child in case if child.tag in ("failure", "error", "skipped")]
        assert len(listed) <= 1
        found[str(case.get("name"))] = f"{listed[0].tag} {listed[0].get('message')}" if listed else ""
    return found


def _remove(run: Run, daemon: Daemon) -> None:
    [(container, _, _)] = engine.ours(daemon.client())
    daemon.client().api.remove_container(container, force=True)


def _restart(number: signal.Signals) -> Callable[[Run, Daemon], None]:
    def act(run: Run, daemon: Daemon) -> None:
        daemon.stop(number)
        time.sleep(0.5)
        daemon.start()

    return act


def _interrupt(run: Run, daemon: Daemon) -> None:
    run.process.send_signal(signal.SIGINT)


def _terminate(run: Run, daemon: Daemon) -> None:
    run.process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Death:
    """One way to die; `act` is done to it while the second test runs. `rest` begins what is said of the third."""

    end: str
    verdict: Verdict
    told: str
    exit_code: int
    rest: str = "error MISSING: not run: "
    what: str = "test_tiny::test_2_dies"
    act: Callable[[Run, Daemon], None] | None = None
    deadline: float = 60.0
    within: float = 30.0
    grace: float = 0.5


EAT = "b'x' * (600 << 20)"
DEATHS: Mapping[str, Death] = {
    "killed": Death("os.kill(os.getpid(), signal.SIGKILL)", Verdict.KILLED, "by SIGKILL", 3),
    "segv": Death("ctypes.string_at(0)", Verdict.CRASH, "died of SIGSEGV", 3),
    "exit-0": Death("os._exit(0)", Verdict.CRASH, "exited with 0", 3),
    "memory": Death(EAT, Verdict.OOM, "memory limit of 0.25 GiB", 3),
    "memory-of-a-child": Death(
        f'subprocess.run([sys.executable, "-c", "{EAT}"])',
        Verdict.OOM,
        "a process of the test was killed for memory",
        1,
        what="suite::process",
        rest="",
    ),
    "pids": Death(
        "children = [subprocess.Popen(['sleep', '30']) for _ in range(100)]",
        Verdict.PIDS,
        "Resource temporarily unavailable",
        4,
        rest="",
    ),
    "hang": Death(STUBBORN, Verdict.TIMEOUT, "did not end within its deadline", 3, deadline=4.0),
    "removed": Death(WAITS, Verdict.KILLED, "removed by somebody else", 3, act=_remove),
    "engine-stopped": Death(WAITS, Verdict.INFRA, "engine went away", 3, act=_restart(signal.SIGTERM)),
    "engine-killed": Death(WAITS, Verdict.INFRA, "engine went away", 3, act=_restart(signal.SIGKILL)),
    "ctrl-c": Death(WAITS, Verdict.INTERRUPTED, "was stopped", 130, act=_interrupt, within=10.0),
    # With the grace of a real run: what a CI gives to a cancelled job is ten seconds.
    "ctrl-c-ignored": Death(
        f"print('waiting', flush=True); {STUBBORN}",
        Verdict.INTERRUPTED,
        "was stopped",
        130,
        act=_interrupt,
        within=10.0,
        grace=container.GRACE,
    ),
    "cancelled": Death(WAITS, Verdict.INTERRUPTED, "was stopped", 130, act=_terminate, within=10.0),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", [pytest.param(name, id=f"contained-{name}") for name in DEATHS])
def test_death(name: str, daemon: Daemon, image: str, tmp_path: Path) -> None:
    """Verdict, exit code, junit.xml; the test that had passed stays passed; no container is left; the gate agrees."""
    death = DEATHS[name]
    args = ("--retries", "0")
    run = start(daemon, image, tmp_path, death.end, args=args, deadline=death.deadline, grace=death.grace)
    if death.act is not None:
        run.until_the_second_test()
        death.act(run, daemon)
    began = time.monotonic()
    code, text, said = run.end()
    assert time.monotonic() - began < death.within
    found = cases(run.out)
    assert code == death.exit_code, (found, text, said)
    assert found["test_tiny::test_1_first"] == ""
    assert found[death.what].startswith(f"{VERDICTS[death.verdict].junit} {death.verdict}: "), found
    assert death.told in found[death.what]
    last = found["test_tiny::test_3_last"]
    assert last.startswith(death.rest) if death.rest else not last, found
    assert list(engine.ours(daemon.client())) == []
    assert cli.main(["gate", str(run.out), "--json"]) == code


FAKE = {"vendor": "amd", "gpus": [["amd", 0, "/dev/dri/renderD128", 44, 0o660]], "groups": [44]}
#: What a container is told of a host that is not as the preflight has seen it -> verdict, and what the log says.
HOSTS: Mapping[str, tuple[Mapping[str, object], Verdict, str]] = {
    "no-kfd": (FAKE, Verdict.INFRA, "/dev/kfd"),
    "unknown-group": ({"groups": ["render"]}, Verdict.INFRA, "expected numeric groups"),
    "no-image": ({"image": "fp8ci-cpu:removed"}, Verdict.PULL, "expected the image on this engine"),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", [pytest.param(name, id=f"host-{name}") for name in HOSTS])
def test_container_that_cannot_start(name: str, daemon: Daemon, image: str, tmp_path: Path) -> None:
    """The machine's fault, tried twice, in report and log; what did not run is an error for this reason, none a pass.

    3, not 4: evidence that is missing is worse than a machine that fails (harness/errors.py).
    """
    spec, verdict, told = HOSTS[name]
    run = start(daemon, image, tmp_path, "pass", spec=spec)
    code, text, said = run.end()
    found = cases(run.out)
    assert code == 3, (found, text, said)
    assert found.pop("suite::process").startswith(f"error {verdict}: no container of fp8ci-cpu:")
    assert len(found) == 3
    assert all(message.startswith("error MISSING: not run: no container of") for message in found.values()), found
    assert [attempt["attempt"] for attempt in json.loads((run.out / "run.json").read_text())["attempts"]] == [1, 2]
    assert told in (run.out / "logs" / "numerics.log").read_text()
    assert list(engine.ours(daemon.client())) == []
    assert cli.main(["gate", str(run.out), "--json"]) == code


@pytest.mark.usefixtures("clean")
def test_an_engine_that_comes_back_is_tried_again(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """The machine's fault is retried: the second attempt passes, and both are in the evidence."""
    once = "flag = pathlib.Path(OUT, 'losses'); old = flag.exists(); flag.mkdir(exist_ok=True); old or time.sleep(60)"
    run = start(daemon, image, tmp_path, once)
    run.until_the_second_test()
    _restart(signal.SIGTERM)(run, daemon)
    code, text, said = run.end()
    assert code == 0, (text, said)
    attempts = json.loads((run.out / "run.json").read_text())["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [1, 2]
    assert set(cases(run.out).values()) == {""}


@pytest.mark.usefixtures("clean")
def test_full_output_disk(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """A test fills the disk of the evidence: DISK, and the report is written all the same."""
    out = tmp_path / "small"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(out)], check=True)
    try:
        fill = "pathlib.Path(OUT, 'logs', 'fill').write_bytes(b'x' * (16 << 20))"
        run = start(daemon, image, tmp_path, fill, out=out, args=("--retries", "0"), disk=1)
        code, text, said = run.end()
        assert (out / "junit.xml").exists(), said
        found = cases(out)
        assert code in (3, 4), (found, text, said)  # 3 where what came after it could not be recorded
        assert found["test_tiny::test_1_first"] == ""
        assert any(message.startswith("error DISK: ") for message in found.values()), found
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


@pytest.mark.usefixtures("clean")
def test_killed_harness_is_cleared_away_by_the_next_run(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """`fp8ci` killed by SIGKILL leaves its container; the next run removes that one, and no other."""
    client = daemon.client()
    foreign = client.api.create_container(image, command=["sleep", "60"], labels={"somebody": "else"})["Id"]
    other = engine.Owner("another machine", "boot", "namespace", 1, 1).to_label()
    theirs = client.api.create_container(image, command=["sleep", "60"], labels={engine.OWNER: other})["Id"]
    try:
        run = start(daemon, image, tmp_path / "a", WAITS)
        run.until_the_second_test()
        run.process.kill()
        run.process.wait()
        [mine] = [name for container, name, _ in engine.ours(client) if container != theirs]
        second = start(daemon, image, tmp_path / "b", "pass")
        code, text, said = second.end()
        assert code == 0, (text, said)
        assert f"removed container {mine}, which a dead run has left" in said
        assert [row["Id"] for row in client.api.containers(all=True)] == [theirs, foreign]
    finally:
        engine.remove(client, foreign)
        engine.remove(client, theirs)
