"""A checkout of three folders, so that tests of the harness run real pytest processes without torch.

`make` writes `suites/numerics/test_<name>.py` files, a pyproject and a manifest into a temporary folder; `facts` is
what the device probe would say of a CPU, so that no process imports torch for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PYPROJECT = """
[tool.pytest.ini_options]
addopts = "--strict-markers --import-mode=importlib"
"""

FACTS: Mapping[str, Any] = {
    "arch": "cpu",
    "target": "cpu",
    "reason": "cpu: said by the test",
    "simulated": False,
    "vendor": "cpu",
    "device_name": "x86_64",
    "device_count": 0,
    "memory_gib": 0.0,
    "e4m3": "e4m3fn",
    "native_fp8_matmul": False,
    "torch": "2.13.0+cpu",
    "triton": "3.9.0",
}


def make(root: Path, files: Mapping[str, str], manifest: Sequence[str] = ()) -> Path:
    """A checkout in `root` whose `suites/<key>.py` files hold the given source; returns `root`."""
    for name, source in files.items():
        path = root / "suites" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    (root / "suites").mkdir(exist_ok=True)
    (root / "baselines" / "cpu").mkdir(parents=True, exist_ok=True)
    if manifest:
        text = "".join(f"{test_id}\n" for test_id in sorted(manifest))
        (root / "baselines" / "cpu" / "manifest.txt").write_text(text, encoding="ascii")
    (root / "pyproject.toml").write_text(PYPROJECT, encoding="ascii")
    return root
