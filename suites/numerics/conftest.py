"""What every numerics test gets: kernels (interpreted where there is no GPU), poisoned memory, its case on record.

TRITON_INTERPRET must be chosen before the first import of triton. `fp8ci` chooses it for the suite's process; for a
plain `pytest suites/numerics` it is chosen here, unless the environment already says 0 or 1. It holds for the whole
process, so the codegen suite, which compiles, does not run in the same one.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from suites.cases import FORMATS

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def recorded_case(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None], device: str, poison: None
) -> None:
    """Record arch and format of every row, with uninitialised memory poisoned while it runs."""
    from fp8stack.device import detect

    record_property("arch", detect(device).arch.name)
    callspec = getattr(request.node, "callspec", None)
    words = callspec.id.split("-") if callspec is not None else []
    for word in words:
        if word in FORMATS:
            record_property("format", word)
            break


@pytest.fixture
def large_memory(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For a test of tensors past 2^31 elements: on a GPU, no other worker runs one meanwhile, and all is given back.

    Fifteen workers that each keep 10 GiB in their allocator's cache are more than one GPU has.
    """
    if device == "cpu":
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "large-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


_GUARD_BYTES = 256
_GUARD, _POISON = 0xA5, 0xFF  # four bytes of poison are a NaN, and an offset of -1


@pytest.fixture
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What the test allocates is poisoned and lies between guards; the result, called, fails if a guard is changed.

    An op allocates its outputs itself (torch.empty with dtype and device, torch.empty_like), so there is no other way
    to see what it writes past their ends.
    """
    empty = torch.empty
    guards: list[torch.Tensor] = []

    def between_guards(*size: Any, **named: Any) -> torch.Tensor:
        if set(named) != {"dtype", "device"}:
            return empty(*size, **named)
        shape = torch.Size(*size)
        used = shape.numel() * named["dtype"].itemsize
        buffer = empty(_GUARD_BYTES + used + _GUARD_BYTES, dtype=torch.uint8, device=named["device"]).fill_(_GUARD)
        guards.extend((buffer[:_GUARD_BYTES], buffer[_GUARD_BYTES + used :]))
        return buffer[_GUARD_BYTES : _GUARD_BYTES + used].fill_(_POISON).view(named["dtype"]).view(shape)

    def check() -> None:
        __tracebackhide__ = True
        assert guards, "the op allocated nothing with torch.empty; expected its outputs; guard what allocates them"
        changed = [int((guard != _GUARD).sum()) for guard in guards]
        assert not any(changed), f"bytes written around the outputs, before and after each: {changed}"

    monkeypatch.setattr(torch, "empty", between_guards)
    monkeypatch.setattr(torch, "empty_like", lambda x: between_guards(x.shape, dtype=x.dtype, device=x.device))
    return check


@pytest.fixture(scope="session")
def compiled(device: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """torch.compile with fullgraph, where its backend can work: Inductor needs a C++ compiler on a CPU.

    A session's compilations share nothing with the user's settings but the cache folder (TORCHINDUCTOR_CACHE_DIR).
    """
    if device == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            pytest.skip(f"torch.compile needs a C++ compiler on a CPU: {type(error).__name__}; install g++ or set CXX")

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        return torch.compile(function, fullgraph=True, dynamic=False)

    return wrap
