"""What every unit test begins with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8stack import device


@pytest.fixture(autouse=True)
def no_known_gpu() -> Iterator[None]:
    """No GPU that another test has made up is remembered."""
    device._of_gpu.cache_clear()
    yield
    device._of_gpu.cache_clear()
