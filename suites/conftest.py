"""Fixtures of every suite: where evidence goes, which device, which seed, which implementation ran.

torch and fp8stack are imported by the fixtures that need them and not by this file, so that the tests of the harness
start without either. Everything that a test wants the journal to keep goes through pytest's `record_property`.

A file test_full.py holds rows of the night, in any suite. Without FP8CI_FULL=1 (`fp8ci run --full`) no run of the suite
collects it, so that its rows neither run nor are skipped, nor missed.

- `evidence`   the run's evidence folder (--fp8-out), else a folder of this test's own; atomic writes.
- `device`     "cuda" where torch sees a GPU (also ROCm), else "cpu".
- `seed`       one number from the test's id: the same in every run, worker and order; printed and recorded.
- `poison`     uninitialised memory holds NaN or the largest integer for the length of the test.
- `call_op`    calls an op, records which implementation ran, and fails if that was the reference on a GPU or in the
               interpreter, where the kernel was to be tested.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The suites import their yardsticks as `suites.compare`, from any working folder and in a copy of the tree.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

Record = Callable[[str, object], None]

# Ops that have no kernel yet, with the reason. Their rows run the reference everywhere, and say so; the day one of them
# runs a kernel its rows turn red until the line here is deleted.
REFERENCE_ONLY: dict[str, str] = {}


# The file of a suite whose rows are the night's.
NIGHT = "test_full.py"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either whole or absent, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the rows of the night, unless the run is a full one."""
    return True if collection_path.name == NIGHT and os.environ.get("FP8CI_FULL") != "1" else None


def pytest_configure(config: pytest.Config) -> None:
    """The mark of harness/plugin.py, for a checkout that is not installed: there pytest does not know the plugin."""
    config.addinivalue_line("markers", "requires(*requirements, **amounts): what the machine must have")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, in a plain `pytest` too: without --fp8-out the plugin ignores `requires`."""
    marked = [(item, list(item.iter_markers("requires"))) for item in items]
    if config.getoption("fp8_out", default=None) or not any(marks for _, marks in marked):
        return
    from harness import capabilities

    machine = capabilities.probe()
    for item, marks in marked:
        for mark in marks:
            decision = capabilities.decide(capabilities.parse(*mark.args, **mark.kwargs), machine)
            if isinstance(decision, capabilities.Skip):
                item.add_marker(pytest.mark.skip(reason=decision.reason))


@dataclass(frozen=True)
class Evidence:
    """The folder that a run leaves behind. ``out`` is its root; names given to the writers are relative to it."""

    out: Path

    def write_text(self, relative: str, text: str) -> str:
        """Write ``relative`` under the evidence folder (parents made, atomic); returns ``relative`` for the record."""
        path = self.out / relative
        if self.out.resolve() not in path.resolve().parents:
            raise ValueError(
                f"{relative} leaves the evidence folder {self.out}; expected a path below it; drop the '..'"
            )
        write_atomically(path, text)
        return relative

    def write_json(self, relative: str, obj: object) -> str:
        """As write_text, for a JSON value; NaN and infinity are refused (ValueError): no reader agrees on them."""
        return self.write_text(relative, json.dumps(obj, indent=1, sort_keys=True, allow_nan=False) + "\n")


@pytest.fixture
def evidence(request: pytest.FixtureRequest, tmp_path: Path) -> Evidence:
    """The run's evidence folder, or this test's temporary folder where pytest runs without one."""
    out = request.config.getoption("fp8_out", default=None)
    return Evidence(Path(out) if out else tmp_path)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def seed(request: pytest.FixtureRequest, record_property: Record) -> int:
    """A seed that belongs to the test's id, printed (pytest shows it with a failure) and recorded."""
    value = zlib.crc32(request.node.name.encode("utf-8")) & 0x7FFFFFFF
    print(f"seed {value}")
    record_property("seed", value)
    return value


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill uninitialised memory (NaN, largest integer), so that an element that an op never wrote shows."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def call_op(device: str, record_property: Record) -> Callable[..., Any]:
    """``call_op(name, op, *args, **kwargs)``: the op's result, on condition that the wanted implementation made it.

    On a GPU, and in Triton's interpreter, a row that ran the reference proves nothing about the kernel: it fails.
    On a CPU without the interpreter the reference is what there is; the property says so.
    """
    from fp8stack import _triton
    from fp8stack.kernels import launch

    here = "triton" if device == "cuda" or _triton.INTERPRETING else "reference"
    seen: set[str] = set()

    def call(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        expected = "reference" if name in REFERENCE_ONLY else here
        with launch.recording() as ran:
            result = op(*args, **kwargs)
        assert name in ran, f"{name} did not say which implementation ran; recorded: {dict(ran)}"
        if ran[name] not in seen:
            seen.add(ran[name])
            record_property("implementation", ran[name])
        assert ran[name] == expected, f"{name} ran its {ran[name]} implementation; expected {expected} on {device}"
        return result

    return call
