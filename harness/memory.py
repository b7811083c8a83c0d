"""Who the kernel's OOM killer has struck: a counter of this host, and one of the control group that we live in.

Exit code 137 is a memory limit, an operator, or a harness; it says nothing by itself. The kernel counts what it kills:
on the whole host (/proc/vmstat), and in each control group that has a limit (memory.events, memory.oom_control in
version 1). Read before and after a test process, they tell a run that met its own limit from a host that ran out.

A counter that cannot be read says nothing. Not here: what follows (deaths.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Struck = Literal["limit", "host"]


@dataclass(frozen=True)
class Kills:
    """How often it has struck: in our control group, and on the host. None where nothing says it."""

    own: int | None
    host: int | None

    def since(self, before: Kills) -> Struck | None:
        """Whether it has struck since: at our own limit, or elsewhere on the host."""
        if self.own is not None and before.own is not None and self.own > before.own:
            return "limit"
        if self.host is not None and before.host is not None and self.host > before.host:
            return "host"
        return None


def kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Kills:
    """The counters now."""
    return Kills(_own(proc, groups), _counter(proc / "vmstat"))


def _own(proc: Path, groups: Path) -> int | None:
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            return _counter(groups / "memory" / inside / "memory.oom_control")
        if not controllers and (groups / inside / "memory.events").exists():
            return _counter(groups / inside / "memory.events")
    return None


def _counter(path: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None
