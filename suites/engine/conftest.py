"""A real container engine, which the tests start themselves, stop themselves, and share with nobody.

`daemon` starts `dockerd` with folders and a socket of its own and no network. No registry is asked: the base image is
imported from a debootstrap tree, and the CPU image is built on it from a folder of wheels. Both are kept, with the
engine's data, below FP8CI_ENGINE_CACHE (default: ~/.cache/fp8ci/engine): the first session takes minutes, later ones
seconds. DEVELOPERS.md says what a machine needs; where it has that not, every test here is skipped with the reason,
or is an error where FP8CI_ENGINE=required.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness import engine, images

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python3-dev,g++,ca-certificates"
BASE = f"fp8ci-test-base:{hashlib.sha256(PACKAGES.encode()).hexdigest()[:12]}"


@dataclass
class Daemon:
    """One dockerd. `folder` keeps its data, `runtime` what goes with it."""

    folder: Path
    runtime: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return f"unix://{self.runtime}/sock"

    def start(self) -> None:
        """Start it and wait until it answers; RuntimeError with the end of its log where it does not."""
        command = ["dockerd", "--data-root", str(self.folder), "--exec-root", str(self.runtime / "exec")]
        command += ["-H", self.host, "--pidfile", str(self.runtime / "pid"), "--bridge=none", "--iptables=false"]
        for left in ("pid", "exec/containerd/containerd.pid"):  # of one that was killed: its numbers are others' now
            (self.runtime / left).unlink(missing_ok=True)
        with (self.runtime / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.options], stdout=log, stderr=log, start_new_session=True, env={**os.environ}
            )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                self.client().close()
                return
            except Exception:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        tail = (self.runtime / "log").read_text(errors="replace").splitlines()[-5:]
        raise RuntimeError("dockerd does not start: " + " | ".join(tail))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End this daemon, by its own number, and wait for it."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def clear(self) -> None:
        """Stop it, and leave nothing of it but its data: one that was killed has left mounts."""
        self.stop()
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed(mounts):
            if Path(mount) == self.folder or Path(mount).is_relative_to(self.runtime):
                subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def client(self) -> Any:
        from docker.client import DockerClient

        client = DockerClient(base_url=self.host, version="auto", timeout=60)
        client.ping()
        return client


def why_not() -> str | None:
    """What this machine lacks to have an engine, or None."""
    if sys.platform != "linux":
        return "a Linux machine"
    if os.getuid() != 0:
        return "root, to start dockerd"
    for program, package in (("dockerd", "docker.io"), ("debootstrap", "debootstrap"), ("iptables", "iptables")):
        if shutil.which(program) is None:
            return f"{program} (apt-get install {package})"
    try:
        import docker.client  # noqa: F401
    except ImportError:
        return "the docker SDK (pip install 'fp8stack[docker]')"
    return None


def not_to_be_had(what: str) -> NoReturn:
    """Skip, saying what this machine lacks; fail where the environment says that it must have it."""
    told = f"no container engine can be had: it takes {what}; see DEVELOPERS.md"
    if os.environ.get("FP8CI_ENGINE") == "required":
        pytest.fail(told, pytrace=False)
    pytest.skip(told)


@pytest.fixture(scope="session")
def engine_folder() -> Iterator[Path]:
    """What is kept between sessions; held by this one alone."""
    missing = why_not()
    if missing:
        not_to_be_had(missing)
    folder = Path(os.environ.get("FP8CI_ENGINE_CACHE") or Path.home() / ".cache/fp8ci/engine")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def daemon(engine_folder: Path) -> Iterator[Daemon]:
    """The engine, running. A test that stops it starts it again."""
    runtime = Path(tempfile.mkdtemp(prefix="fp8ci-engine-", dir="/tmp"))  # a socket's path has to be short
    running = Daemon(engine_folder / "data", runtime)
    try:
        running.start()
    except RuntimeError as error:
        running.clear()
        not_to_be_had(f"rights that this machine does not give ({error})")
    for row in running.client().api.containers(all=True):  # of a session that was killed
        engine.remove(running.client(), row["Id"])
    try:
        yield running
    finally:
        running.clear()


@pytest.fixture(scope="session")
def base(daemon: Daemon, engine_folder: Path) -> str:
    """The base image: Debian with Python, imported from a tree that debootstrap has made."""
    client = daemon.client()
    if images.describe(client, BASE) is None:
        tree, made = engine_folder / "tree", engine_folder / "tree.of"
        if not made.exists() or made.read_text() != BASE:
            made.unlink(missing_ok=True)
            shutil.rmtree(tree, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tree), _mirror()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode != 0:
                not_to_be_had(f"a Debian mirror ({' | '.join((done.stdout + done.stderr).splitlines()[-3:])})")
            made.write_text(BASE)
        archive = engine_folder / "base.tar"
        subprocess.run(
            ["tar", "-C", str(tree), "--exclude=./var/cache/apt/archives/*.deb", "-cf", str(archive), "."], check=True
        )
        repository, _, tag = BASE.partition(":")
        client.api.import_image(src=str(archive), repository=repository, tag=tag)
        archive.unlink()
    return BASE


def _mirror() -> str:
    """The mirror that apt itself uses."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(CODENAME)"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return next((row[0] for row in rows if row[1:] == ["Debian", SUITE]), "http://deb.debian.org/debian")


@pytest.fixture(scope="session")
def wheels(engine_folder: Path) -> Path:
    """Everything that the CPU image installs, as wheels for the base's Python; pip's own settings say where from."""
    folder = engine_folder / "wheels"
    inputs = images.inputs(ROOT, BASE)
    stamp = folder / "inputs"
    if not stamp.exists() or stamp.read_text() != inputs:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
        command += ["--only-binary=:all:", "--python-version=3.11", "-c", "docker/cpu-constraints.txt"]
        command += ["-r", "docker/requirements.txt", "torch", "triton", "numpy"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        stamp.write_text(inputs)
    return folder


@pytest.fixture(scope="session")
def image(daemon: Daemon, base: str, wheels: Path) -> str:
    """The CPU image of this checkout, on that base; built once for each state of docker/."""
    client = daemon.client()
    wanted = images.get(ROOT, "cpu", base)
    images.build(client, ROOT, wanted, wheels=wheels)
    return wanted.tag


@pytest.fixture
def clean(daemon: Daemon) -> Iterator[None]:
    """Whatever a test does: no container of ours is left when it ends."""
    yield
    client = daemon.client()
    left = [name for _, name, _ in engine.ours(client)]
    for container, _, _ in list(engine.ours(client)):
        engine.remove(client, container)
    assert left == []
