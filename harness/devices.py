"""The GPUs of this host as a container needs them: device nodes, numeric groups, partition mode; and who has which.

Read from /sys and /dev alone, so that nothing here hangs with a driver and nothing needs a vendor's tools. Every
function takes the root of the file system, which is how hosts that are not at hand are tested.

AMD: a GPU is a node of the KFD's topology with compute units; its container needs /dev/kfd and its own
/dev/dri/renderD<n>. The groups are those that own the nodes *on the host*, by number: names and numbers differ between
distributions (44, 109, 110, 992, 993 have been seen), and the image knows neither. NVIDIA: /dev/nvidia<n>.

A GPU is given to one run at a time: an exclusive `flock` on a file per GPU, which the kernel drops when its holder
dies, however it dies. The containers of the dead are reaped before anybody takes a lock (engine.py).

Not here: what a container is told of them (container.py), whether somebody else is busy on them (doctor.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import DirtyGpuError, DiskError, InfraError, UsageError
from harness.platforms import Vendor

KFD = "/dev/kfd"
NVIDIA_CONTROL = "/dev/nvidiactl"
WAIT = 600.0
"""Seconds that a run waits for GPUs which other runs have."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index among the vendor's, its device node with owning group and mode, its UUID where it has one.

    `partition`: compute and memory mode of an AMD GPU, such as `SPX/NPS1`; None where the driver does not say.
    """

    vendor: Vendor
    index: int
    node: str
    group: int
    mode: int
    uuid: str | None = None
    partition: str | None = None


def vendor_of(root: Path = Path("/")) -> Vendor:
    """Whose GPUs this host has, by the control node of the driver; `cpu` for none."""
    if _below(root, KFD).exists():
        return "amd"
    return "nvidia" if _below(root, NVIDIA_CONTROL).exists() else "cpu"


def find(vendor: Vendor, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs of a vendor in the order of the driver; none for `cpu`."""
    return _amd(root) if vendor == "amd" else _nvidia(root) if vendor == "nvidia" else ()


def _amd(root: Path) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    nodes = _below(root, "/sys/class/kfd/kfd/topology/nodes")
    for folder in sorted(nodes.glob("[0-9]*"), key=lambda path: int(path.name)):
        facts = dict(line.split(maxsplit=1) for line in _text(folder / "properties").splitlines() if " " in line)
        minor = int(facts.get("drm_render_minor", "0"))
        if int(facts.get("simd_count", "0")) == 0 or minor < 128:
            continue  # the CPU is a node of the topology too
        unique = int(facts.get("unique_id", "0"))
        node = f"/dev/dri/renderD{minor}"
        owner = _stat(root, node)
        if owner is not None:
            uuid, mode = f"GPU-{unique:016x}" if unique else None, _partition(root, minor)
            found.append(Gpu("amd", len(found), node, owner.st_gid, owner.st_mode & 0o777, uuid, mode))
    return tuple(found)


def _partition(root: Path, minor: int) -> str | None:
    device = _below(root, f"/sys/class/drm/renderD{minor}/device")
    modes = [_text(device / f"current_{kind}_partition").strip() for kind in ("compute", "memory")]
    return "/".join(mode for mode in modes if mode) or None


def _nvidia(root: Path) -> tuple[Gpu, ...]:
    names = [path.name for path in _below(root, "/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    found = []
    for name in sorted(names, key=lambda name: int(name.removeprefix("nvidia"))):
        owner = _stat(root, f"/dev/{name}")
        if owner is not None:
            index = int(name.removeprefix("nvidia"))
            found.append(Gpu("nvidia", index, f"/dev/{name}", owner.st_gid, owner.st_mode & 0o777))
    return tuple(found)


def groups(gpus: Sequence[Gpu], root: Path = Path("/")) -> tuple[int, ...]:
    """The numeric groups that own the nodes of these GPUs and the driver's control node, without root's."""
    control = _stat(root, KFD) if any(gpu.vendor == "amd" for gpu in gpus) else None
    return tuple(sorted(({gpu.group for gpu in gpus} | ({control.st_gid} if control else set())) - {0}))


def partition(gpus: Sequence[Gpu]) -> str | None:
    """The partition mode of these GPUs for the fingerprint: one word where they agree, all of them where not."""
    modes = sorted({gpu.partition for gpu in gpus if gpu.partition})
    return " and ".join(modes) or None


def visible(gpus: Sequence[Gpu], environment: str | None) -> tuple[Gpu, ...]:
    """Those of the GPUs that a *_VISIBLE_DEVICES of the caller leaves: indices or UUIDs; all where it is not set.

    UsageError for an entry that names none.
    """
    if environment is None or not environment.strip():
        return tuple(gpus)
    chosen = []
    for word in environment.split(","):
        match = next((gpu for gpu in gpus if word.strip() in (str(gpu.index), gpu.uuid)), None)
        if match is None:
            raise UsageError(f"{word.strip()!r} of the visible devices is no GPU of this host", "an index or UUID", "")
        chosen.append(match)
    return tuple(chosen)


@contextmanager
def claim(
    gpus: Sequence[Gpu],
    count: int,
    *,
    folder: Path | None = None,
    wait: float = WAIT,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Gpu, ...]]:
    """`count` of the GPUs for this process alone until the block ends.

    All or none are taken, so that two runs that want several cannot hold half each. InfraError when the host has fewer;
    DirtyGpuError when other runs still have them after `wait` seconds, with their words.
    """
    if count > len(gpus):
        raise InfraError(f"{count} GPUs are asked for and this host has {len(gpus)}", "fewer", "correct --gpus")
    place = folder or lock_folder()
    until = time.monotonic() + wait
    told = False
    while True:
        held: list[tuple[Gpu, int]] = []
        try:
            for gpu in gpus:
                if len(held) < count:
                    handle = _try_lock(place, gpu)
                    if handle is not None:
                        held.append((gpu, handle))
            if len(held) == count:
                yield tuple(gpu for gpu, _ in held)
                return
        finally:
            for _, handle in held:
                os.close(handle)
        holders = ", ".join(sorted({_text(_lock_file(place, gpu)).strip() or "another run" for gpu in gpus}))
        if time.monotonic() >= until:
            raise DirtyGpuError(
                f"{count} free GPUs were not to be had in {wait:.0f} s", "GPUs that no run has", f"held by {holders}"
            )
        if not told:
            say(f"waiting for {count} of {len(gpus)} GPUs; held by {holders}")
            told = True
        time.sleep(0.2)


def lock_folder() -> Path:
    """Where the locks of this host are: one folder for all its users."""
    named = os.environ.get("FP8CI_LOCKS")
    base = Path("/run/lock") if os.access("/run/lock", os.W_OK) else Path("/tmp")
    folder = Path(named) if named else base / "fp8ci-gpus"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's, who has done it
            folder.chmod(0o1777)
    except OSError as error:
        what = f"{folder} cannot be made ({error.strerror})"
        raise DiskError(what, "a folder for locks", "set FP8CI_LOCKS") from error
    return folder


def _lock_file(folder: Path, gpu: Gpu) -> Path:
    return folder / f"{gpu.vendor}-{Path(gpu.node).name}.lock"


def _try_lock(folder: Path, gpu: Gpu) -> int | None:
    path = _lock_file(folder, gpu)
    try:
        # Without O_CREAT first: the kernel refuses to open another user's file in a sticky folder for creation.
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.fchmod(handle, 0o666)  # whatever the umask says: the next user must be able to lock it
    except OSError as error:
        what = f"{path} cannot be opened ({error.strerror})"
        raise DiskError(what, "a lock file that everybody may open", "remove it") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} of user {os.getuid()}\n".encode())
    return handle


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _stat(root: Path, path: str) -> os.stat_result | None:
    try:
        return _below(root, path).stat()
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
