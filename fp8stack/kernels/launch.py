"""Which implementation runs, with which launch configuration, and the record of both.

An op has a reference (plain torch) and a kernel (Triton). There is one rule, and no way round it:

    GPU tensor                   the kernel; without triton an error, not the slow reference
    CPU tensor, interpreting     the kernel, in Triton's interpreter (TRITON_INTERPRET=1 before triton was imported)
    CPU tensor otherwise         the reference

Inside `unfused()` ops that have one run a chain of plain torch operators instead (unfused.py): asked for, on record as
"unfused", to be compared with.

A test that means to check a kernel and silently checked the reference proves nothing, so each op records what ran:

    with launch.recording() as ran:
        quantize_rowwise(x, "e4m3fnuz")
    assert ran["quantize_rowwise"] == "triton"

Launch configurations are rows of a table in the family's file, keyed by (target, size class): measured once, never
tuned at run time (tuning on token counts cost pytorch/ao#4069 about 100 device synchronisations a step). A target
without a row is an error that says so.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

from fp8stack import _triton

Row = TypeVar("Row")

_REGISTERS = 65536  # 32-bit registers of an NVIDIA multiprocessor, sm_70 to sm_120 (CUDA C programming guide)
_SIMDS = 4  # of an AMD compute unit (CDNA 3 ISA manual)

_recorders: list[dict[str, str]] = []
_lock = threading.Lock()


_unfused = False


@contextlib.contextmanager
def unfused(wanted: bool = True) -> Iterator[None]:
    """Inside, ops that have a chain of plain torch operators run it, in every thread; nothing changes if not wanted."""
    global _unfused
    before, _unfused = _unfused, wanted
    try:
        yield
    finally:
        _unfused = before


def implementation(x: torch.Tensor, chain: bool = False) -> str:
    """What an op on x runs: "triton" or "reference"; "unfused" inside `unfused()`, where the op has such a `chain`.

    Raises fp8stack._triton.TritonUnavailable for a GPU tensor without triton, ValueError for other devices.
    """
    if _unfused and chain:
        return "unfused"
    if x.device.type == "cuda":
        _triton.require(f"an FP8 op on {x.device}")
        return "triton"
    if x.device.type == "cpu":
        return "triton" if _triton.INTERPRETING else "reference"
    raise ValueError(
        f"the tensor is on {x.device}; expected a CPU or a ROCm or CUDA device (torch calls both cuda); move it there"
    )


@contextlib.contextmanager
def recording() -> Iterator[dict[str, str]]:
    """Collect op name -> what ran: an implementation, or the backend of a GEMM.

    An op that ran in two ways is recorded as both, "reference+triton", and so equals neither. Sees every thread, since
    autograd runs the backward in its own.
    """
    ran: dict[str, str] = {}
    with _lock:
        _recorders.append(ran)
    try:
        yield ran
    finally:
        with _lock:
            _recorders[:] = [recorder for recorder in _recorders if recorder is not ran]


def record(op: str, what: str) -> None:
    """Note in every open recording that `op` ran as `what`."""
    if not _recorders:
        return
    with _lock:
        for ran in _recorders:
            seen = set(ran[op].split("+")) if op in ran else set()
            ran[op] = "+".join(sorted(seen | {what}))


def config(table: Mapping[tuple[str, str], Row], target: str, size_class: str) -> Row:
    """The row of a launch table. Raises LookupError, naming the table's targets, where there is none."""
    row = table.get((target, size_class))
    if row is None:
        known = ", ".join(dict.fromkeys(name for name, _ in table))
        raise LookupError(
            f"no launch configuration for target {target}, size class {size_class}; the table has {known}; "
            "add a row, with its measurement, to the table in the kernel's file"
        )
    return row


def options(num_warps: int, programs: int, target: str) -> dict[str, int]:
    """Launch options that leave room for `programs` programs of num_warps on a multiprocessor, 0: the compiler decides.

    A program that holds its tile in registers alternates between reading and writing: a second one beside it keeps the
    memory busy, if the compiler does not spend the registers that it needs.
    """
    if programs == 0:
        return {"num_warps": num_warps}
    if target.startswith("gfx"):
        return {"num_warps": num_warps, "waves_per_eu": max(1, programs * num_warps // _SIMDS)}
    registers = _REGISTERS // (programs * num_warps * 32) // 8 * 8
    return {"num_warps": num_warps, "maxnreg": min(registers, 255)}


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of x current for a launch: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def allow_descriptors(x: torch.Tensor) -> None:
    """Let kernels that this thread launches on the device of x make tensor descriptors: Triton wants memory for them.

    Replaces an allocator that was set before (`triton.set_allocator`), as every library that makes descriptors does.
    """
    if x.device.type == "cuda":
        triton = _triton.require(f"tensor descriptors on {x.device}")
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=x.device))
