"""The perf suite runs alone: pytest-xdist is refused, since two processes on one device time each other.

pytest-benchmark would only switch itself off under xdist, with a warning, and gate nothing. So `-n` is an error here,
also where somebody's configuration holds it.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """pytest.UsageError (exit 4) under pytest-xdist."""
    workers = config.getoption("numprocesses", default=None)
    spread = config.getoption("dist", default="no") not in (None, "no")
    if hasattr(config, "workerinput") or workers not in (None, 0, "0") or spread:
        raise pytest.UsageError(
            "the perf suite runs in one process, and pytest-xdist is on; expected no -n: processes on one device time "
            "each other; leave it out, or add `-n 0` where a configuration file or PYTEST_ADDOPTS sets it"
        )
