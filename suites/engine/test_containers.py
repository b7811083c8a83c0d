"""What a run in a container leaves of its host, what keeps one from starting, and the line that a person can paste."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from harness import capabilities, container, engine, journal, journal_reader, manifest, plan, platforms
from harness.container import ContainerExecutor, Limits, Spec
from harness.devices import Gpu
from harness.errors import InfraError, Verdict
from harness.executor import Command, Ended
from suites.engine.conftest import ROOT, Daemon
from suites.engine.test_deaths_in_containers import cases
from suites.unit import tiny_checkout
from suites.unit.test_containers import host

UID = 12345
ONE = "numerics/test_launches::test_first_and_last_rows[rowwise-first-and-last]"


@pytest.fixture
def spec(daemon: Daemon, image: str, tmp_path: Path) -> Spec:
    """A run of another user than the one that started it, in a checkout that holds one file."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "source.py").write_text("answer = 42\n")
    known = engine.from_info(daemon.client().info())
    return Spec(image, tmp_path / "checkout", "cpu", known, Limits(256 << 20, 32 << 20, 64), uid=UID, gid=UID)


def run(
    daemon: Daemon, spec: Spec, folder: Path, *argv: str, told: list[str] | None = None, deadline: float = 30.0
) -> tuple[Ended, str]:
    """How a command ended in a container, and its log. `folder`/out is its writable folder."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    os.chown(out, spec.uid, spec.gid)
    log = folder / "logs" / "x.log"
    command = Command(argv, {}, spec.root, deadline, log, (out,))
    executor = ContainerExecutor(daemon.client(), spec)
    ended = executor.run(command, cancelled=threading.Event(), on_output=told.append if told is not None else None)
    assert list(engine.ours(daemon.client())) == []
    return ended, log.read_text(encoding="utf-8", errors="replace")


LEAVES = """
import getpass, os, pathlib, source
assert os.getuid() == 12345 and getpass.getuser() and os.path.isdir(os.environ["HOME"])
pathlib.Path(os.environ["HOME"], "mine").write_text("writable")
pathlib.Path({out!r}, "made").mkdir()
pathlib.Path({out!r}, "made", "file").write_text("x")
for path in ("source.py", "new.py", "__pycache__"):
    try:
        open(path, "w")
    except OSError as error:
        assert error.errno == 30, error
    else:
        raise SystemExit(f"{{path}} of the checkout could be written")
"""


@pytest.mark.parametrize("end", [pytest.param("", id="good"), pytest.param("os.kill(os.getpid(), 9)", id="killed")])
def test_files_are_the_callers_and_the_source_is_untouched(
    end: str, daemon: Daemon, spec: Spec, tmp_path: Path
) -> None:
    """Also of a run that dies: what it wrote is owned by the caller, the checkout is as before (actions/runner#434)."""
    before = sorted(str(path) for path in spec.root.rglob("*"))
    code = LEAVES.format(out=str(tmp_path / "out")) + end
    ended, log = run(daemon, spec, tmp_path, container.PYTHON, "-c", code)
    assert (ended.rc, ended.signal) == ((None, "SIGKILL") if end else (0, None)), log
    written = sorted((tmp_path / "out").rglob("*"))
    assert [path.name for path in written] == ["made", "file"]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in written} == {(UID, UID)}
    assert sorted(str(path) for path in spec.root.rglob("*")) == before
    assert (spec.root / "source.py").read_text() == "answer = 42\n"


def test_nothing_of_the_host_is_there(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """No network but loopback, no capability, no new privileges, the default seccomp filter, shm as it was sized."""
    code = (
        "import json, os; s = dict(l.split(':', 1) for l in open('/proc/self/status') if ':' in l)\n"
        "print(json.dumps({k: s[k].strip() for k in ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp')} |"
        " {'net': sorted(os.listdir('/sys/class/net')), 'shm': os.statvfs('/dev/shm').f_blocks *"
        " os.statvfs('/dev/shm').f_frsize}))"
    )
    ended, log = run(daemon, spec, tmp_path, container.PYTHON, "-c", code)
    assert ended.rc == 0, log
    found = json.loads(log)
    assert found == {
        "CapEff": "0" * 16,
        "CapBnd": "0" * 16,
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "net": ["lo"],
        "shm": 32 << 20,
    }


def test_log_is_whole(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """Bytes that are no text, characters cut between writes, a megabyte without a line end: in the log as written."""
    code = (
        "import os, sys, time\n"
        "for piece in (b'caf\\xc3', b'\\xa9 ', b'\\xff', b' \\xf0\\x9f', b'\\x98\\x80\\n'):\n"
        "    os.write(1, piece); time.sleep(0.05)\n"
        "os.write(2, b'error stream\\n'); time.sleep(0.05)\n"
        "data = b'x' * (1 << 20)\n"
        "while data: data = data[os.write(1, data):]\n"
    )
    told: list[str] = []
    ended, log = run(daemon, spec, tmp_path, container.PYTHON, "-c", code, told=told)
    assert ended.rc == 0
    assert log == "café \ufffd \U0001f600\nerror stream\n" + "x" * (1 << 20)
    assert "".join(told) == log


def test_a_hung_container_is_ended_and_gone(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """Native code that ignores SIGTERM and holds the lock, and a grandchild in a session of its own: none lives on."""
    code = (
        "import ctypes, signal, subprocess\n"
        "subprocess.Popen(['sleep', '987.5'], start_new_session=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ctypes.PyDLL(None).pause()"
    )
    ended, _ = run(daemon, spec, tmp_path, container.PYTHON, "-c", code, deadline=2.0)
    assert ended.killed_by == "deadline"
    assert ended.seconds < 2.0 + container.GRACE + 3.0
    lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    running = []
    for path in lines:
        with contextlib.suppress(OSError):
            running.append(path.read_bytes())
    assert not [line for line in running if b"987.5" in line]


# What keeps a container from starting ------------------------------------------------------------------------------


def test_no_device_node(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """A ROCm container on a host without /dev/kfd: the machine's fault, said, and nothing is left in `created`."""
    gpu = Gpu("amd", 0, "/dev/dri/renderD128", 44, 0o660)
    ended, log = run(daemon, replace(spec, vendor="amd", gpus=(gpu,), groups=(44,)), tmp_path, "true")
    assert ended.fault is not None
    assert ended.fault.verdict is Verdict.INFRA
    assert "/dev/kfd" in ended.fault.message
    assert ended.fault.message in log


def test_unknown_group(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """A group by a name that the image does not know, as `--group-add render` is: said with the cure."""
    ended, _ = run(daemon, replace(spec, groups=("render",)), tmp_path, "true")
    assert ended.fault is not None
    assert ended.fault.verdict is Verdict.INFRA
    assert "expected numeric groups" in ended.fault.message


def test_a_number_without_a_name_is_a_group(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """The same by number, which no image has to know."""
    code = "import os; print(sorted(os.getgroups()))"
    ended, log = run(daemon, replace(spec, groups=(44, 993)), tmp_path, container.PYTHON, "-c", code)
    assert (ended.rc, log) == (0, f"[44, 993, {UID}]\n")


def test_missing_program(daemon: Daemon, spec: Spec, tmp_path: Path) -> None:
    """A program that the image lacks is a matter of configuration, whatever number a shell gives it."""
    ended, log = run(daemon, spec, tmp_path, "no-such-program")
    assert ended.fault is not None
    assert ended.fault.verdict is Verdict.CONFIG
    assert "no-such-program cannot be started" in log


def test_missing_interpreter(daemon: Daemon, spec: Spec, base: str, tmp_path: Path) -> None:
    """An image that is not one of ours has no interpreter of that name: configuration, and the log names it."""
    ended, log = run(daemon, replace(spec, image=base), tmp_path, "true")
    assert ended.fault is not None
    assert ended.fault.verdict is Verdict.CONFIG
    assert container.PYTHON in log


def command_line(daemon: Daemon, folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `fp8ci`, in this process."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": daemon.host, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr + done.stdout


RUN = ("run", "--platform", "cpu", "--in", "docker", "--quiet")


def test_missing_image(daemon: Daemon, tmp_path: Path) -> None:
    """Exit 4 in one line, which says how to make it; nothing is pulled by its name."""
    code, said = command_line(daemon, tmp_path, *RUN, "--image", "fp8ci-cpu:not-built", "--out", str(tmp_path / "out"))
    assert code == 4
    assert said == (
        "fp8ci: the engine has no image fp8ci-cpu:not-built; expected the image of this checkout; "
        "`fp8ci image build cpu` makes it\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def foreign_image(daemon: Daemon) -> Iterator[str]:
    """An image of an architecture that this machine is not."""
    tag = "fp8ci-test-foreign:arm64"
    layer = io.BytesIO()
    tarfile.open(fileobj=layer, mode="w").close()
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "arm64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        listed = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
        files = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(listed).encode()}
        for name, content in {**files, "layer.tar": layer.getvalue()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    client = daemon.client()
    client.api.load_image(whole.getvalue())
    yield tag
    client.api.remove_image(tag)


def test_wrong_architecture(daemon: Daemon, foreign_image: str, tmp_path: Path) -> None:
    """Seen before anything is started, instead of as `exec format error` behind an exit code."""
    code, said = command_line(daemon, tmp_path, *RUN, "--image", foreign_image, "--out", str(tmp_path / "out"))
    assert code == 4
    assert f"image {foreign_image} is for arm64 and the engine is x86_64" in said
    assert not (tmp_path / "out").exists()


def test_no_space_for_the_evidence(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """A disk with less room than a run needs ends it before it begins."""
    out = tmp_path / "small"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(out)], check=True)
    try:
        code, said = command_line(daemon, tmp_path, *RUN, "--image", image, "--out", str(out))
        assert code == 4
        assert "0.0 GiB free" in said
        assert "expected 2 GiB" in said
        assert list(out.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


def test_no_space_in_the_engine(engine_folder: Path, tmp_path: Path) -> None:
    """The engine's own disk is full when a container is created: DISK, not an unknown error."""
    small = tmp_path / "data"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(small)], check=True)
    second = Daemon(small, Path(tempfile.mkdtemp(prefix="fp8ci-small-", dir="/tmp")), ("--storage-driver=vfs",))
    try:
        second.start()
        client = second.client()
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:  # vfs copies an image for each container of it
            entry = tarfile.TarInfo("filler")
            entry.size = 12 << 20
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
        client.api.import_image_from_data(layer.getvalue(), repository="filler", tag="1")
        known = engine.from_info(client.info())
        spec = Spec("filler:1", tmp_path, "cpu", known, Limits(64 << 20, 1 << 20))
        ended, _ = run(second, spec, tmp_path, "true")
        assert ended.fault is not None
        assert ended.fault.verdict is Verdict.DISK
    finally:
        second.clear()  # the small disk too, which is mounted at its data


def test_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine, exit 4 in one line that says what to do."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(InfraError, match=r"no container engine answers at unix:.*no such socket"):
        engine.connect()


# Several on one host -----------------------------------------------------------------------------------------------

#: A run that wants two of the host's GPUs: takes them, and has a container say what it sees of them and of its caches.
TAKES_TWO = """
import dataclasses, json, os, sys, threading
from pathlib import Path
from harness import container, devices, engine
from harness.executor import Command
fs, locks, out, image, code = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]
devices.KFD = str(fs / "dev/kfd")
gpus = tuple(dataclasses.replace(gpu, node=f"{fs}{gpu.node}") for gpu in devices.find("amd", fs))
client = engine.connect()
with devices.claim(gpus, 2, folder=locks, wait=120) as held:
    known = engine.from_info(client.info())
    limits = container.Limits(256 << 20, 32 << 20, 64)
    spec = container.Spec(image, Path.cwd(), "amd", known, limits, held, devices.groups(held))
    log = out / "log"
    command = Command((container.PYTHON, "-c", code, str(fs / "dev/dri")), {}, Path.cwd(), 60.0, log, (out,))
    ended = container.ContainerExecutor(client, spec).run(command, cancelled=threading.Event())
    assert ended.rc == 0, (ended, log.read_text())
    told = {"held": [gpu.node for gpu in held], "uuids": ",".join(str(gpu.uuid) for gpu in held), "run": spec.run_id}
    print(json.dumps(told | json.loads(log.read_text())))
"""
LOOKS = """
import json, os, pathlib, sys, time
began, cache = time.monotonic(), pathlib.Path(os.environ["TRITON_CACHE_DIR"])
found = os.listdir(cache)
(cache / os.uname().nodename).touch()
nodes = sorted(str(path) for path in pathlib.Path(sys.argv[1]).iterdir())
for node in nodes:
    os.close(os.open(node, os.O_RDWR))
time.sleep(1.0)
told = {"nodes": nodes, "visible": os.environ["ROCR_VISIBLE_DEVICES"], "found": found, "left": os.listdir(cache)}
print(json.dumps(told | {"name": os.uname().nodename, "began": began, "ended": time.monotonic()}))
"""


def test_eight_runs_on_one_host(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """Eight runs at once want two of eight GPUs each: a container has the nodes of its run, which no other has at that
    time, and a name and caches of its own."""
    fs = host(tmp_path / "host")
    for node in (fs / "dev/kfd", *(fs / "dev/dri").iterdir()):  # devices that are there, and do nothing
        node.unlink()
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "locks").mkdir()
    runs = []
    for number in range(8):
        out = tmp_path / f"out-{number}"
        out.mkdir()
        command = [sys.executable, "-c", TAKES_TWO, str(fs), str(tmp_path / "locks"), str(out), image, LOOKS]
        environment = {**os.environ, "DOCKER_HOST": daemon.host, "PYTHONPATH": str(ROOT)}
        runs.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=PIPE, stderr=PIPE))
    told = []
    for process in runs:
        stdout, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stderr
        told.append(json.loads(stdout))
    for one in told:
        assert (one["nodes"], len(one["nodes"])) == (one["held"], 2)
        assert one["visible"] == one["uuids"]
        assert (one["found"], one["left"]) == ([], [one["name"]])
        for other in told:
            apart = other["began"] >= one["ended"] or one["began"] >= other["ended"]
            assert other is one or apart or set(one["nodes"]).isdisjoint(other["nodes"]), (one, other)
    assert len({one["run"] for one in told}) == len({one["name"] for one in told}) == 8
    together = max(sum(other["began"] <= one["began"] < other["ended"] for other in told) for one in told)
    assert together > 1  # else nothing was shared
    assert list(engine.ours(daemon.client())) == []


# The line that a person can paste ----------------------------------------------------------------------------------


def test_run_line_can_be_pasted(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """What `fp8ci plan --docker` prints runs in a shell and writes the same ids into a journal."""
    if shutil.which("docker") is None:
        pytest.skip("requires the docker client; this machine has the engine alone")
    out = tmp_path / "out"
    arguments = ["plan", "--platform", "cpu", "--suite", "numerics", "--case", ONE, "--docker"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments, "--image", image, "--root", str(ROOT)],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": daemon.host},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace(str(ROOT / "evidence" / "cpu-by-hand"), str(out)).splitlines()
    assert len(lines) == 2
    pasted = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        env={**os.environ, "DOCKER_HOST": daemon.host},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert "1 passed" in pasted.stdout
    assert list(journal_reader.Journal.read(out / "journal.jsonl").tests) == [ONE]


# The suites inside -------------------------------------------------------------------------------------------------


def must_run() -> list[str]:
    """The ids of numerics that the manifest has from outside."""
    return [item for item in manifest.read(ROOT / "baselines/cpu/manifest.txt") if item.startswith("numerics/")]


def test_ids_inside_are_those_outside(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """What numerics would run in the CPU image is, id by id, what the manifest has from outside."""
    known = engine.from_info(daemon.client().info())
    spec = Spec(image, ROOT, "cpu", known, Limits(2 << 30, 64 << 20))
    machine = capabilities.from_facts(tiny_checkout.FACTS, "cpu")
    (tmp_path / "capabilities.json").write_text(machine.to_json())
    options = ["--fp8-out", str(tmp_path), "--fp8-platform", "cpu", "--fp8-run-id", "ids"]
    options += ["--fp8-capabilities", str(tmp_path / "capabilities.json")]
    platform = platforms.PLATFORMS["cpu"]
    place = container.place(os.environ)
    [[job]] = plan.lanes(ROOT, platform, ("numerics",), case=None, options=options, collect_only=True, place=place)
    command = Command(job.argv, job.environment, ROOT, 120.0, tmp_path / "logs" / "numerics.log", (tmp_path,))
    ended = ContainerExecutor(daemon.client(), spec).run(command, cancelled=threading.Event())
    assert ended.rc == 0, command.log.read_text()
    told = journal_reader.Journal.read(tmp_path / journal.FILE_NAME)
    assert set(told.collected["numerics"]) - set(told.planned_skips) == set(must_run())


def test_numerics_pass_inside(daemon: Daemon, image: str, tmp_path: Path) -> None:
    """The suite itself: a case of every test; every case where FP8CI_ENGINE_WHOLE is set, which takes minutes.

    What passes inside is, id by id, what the manifest has from outside.
    """
    chosen = must_run()
    words = ["--suite", "numerics", "--image", image, "--root", str(ROOT), "--out", str(tmp_path / "out")]
    if not os.environ.get("FP8CI_ENGINE_WHOLE"):
        chosen = list({test_id.partition("[")[0]: test_id for test_id in chosen}.values())
        words += ["--case", ",".join(chosen)]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *RUN, *words],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": daemon.host},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = cases(tmp_path / "out")
    assert {f"numerics/{name}" for name, result in ended.items() if not result} == set(chosen)
    assert {result for result in ended.values() if result} <= {"skipped SKIP: requires 1 gpu; this is cpu with 0"}
    told = json.loads((tmp_path / "out" / "run.json").read_text())
    assert told["container"]["image"] == image
    assert told["image_digest"].startswith("sha256:")
    assert told["versions"]["torch"].startswith("2.13.0")
