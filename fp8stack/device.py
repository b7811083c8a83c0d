"""Which chip is this, which FP8 formats does it speak, and how do we know.

FP8 comes in two dialects. MI300A, MI300X and MI325X (gfx940 to gfx942) multiply FNUZ codes, whose e4m3 ends at 240;
MI350X and MI355X (gfx950) and all of NVIDIA multiply OCP codes, whose e4m3 ends at 448. Picking the wrong dialect
gives no error: it clips or doubles activations. So the choice is a table row found by exact match, and a chip without a
row is an error, never a default.

    arch    decides the *formats*: the numbers a model is trained with
    target  is what code is compiled for: cast instructions, launch configuration, GEMM backend

The two are the same unless FP8STACK_ARCH is set. The override changes the arch and leaves the target: on a CPU it
trains with MI300X numerics, on an H200 it keeps compiling for sm_90.

On AMD the name is the *current* device's `gcnArchName` up to the first ':' ("gfx942:sramecc+:xnack-" is gfx942). The
capability tuple is not asked there, because gfx90a reports 9.0 and would pass for a Hopper; device 0 is not asked,
because nodes can be mixed. Nothing here runs at import: importing this module initialises no GPU.

`python -m fp8stack.device` prints one JSON object for the harness, which itself never imports torch.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fp8stack import command

OVERRIDE = "FP8STACK_ARCH"

KIB = 1024


class UnknownArch(ValueError):
    """The chip, or the name in FP8STACK_ARCH, has no row in ARCHS."""


@dataclass(frozen=True)
class Arch:
    """One row of the arch table.

    name: as the vendor's compiler spells it. vendor: "amd", "nvidia" or "cpu".
    e4m3, e5m2: names of the formats (fp8stack.formats) that training uses on this arch.
    native_fp8_matmul: it has FP8 matrix instructions; without them FP8 is emulated.
    wave_size: threads that run in step. lds_bytes: LDS a compute unit, or shared memory an SM, in bytes.
    registers: 32-bit vector registers of a compute unit or SM. thread_registers: most that one thread can have.
    threads: most of one workgroup or block.
    """

    name: str
    vendor: str
    e4m3: str
    e5m2: str
    native_fp8_matmul: bool
    wave_size: int
    lds_bytes: int
    registers: int
    thread_registers: int
    threads: int


@dataclass(frozen=True)
class Detected:
    """What detect() found. `reason` is the string that logs, skips and reports print, unchanged."""

    arch: Arch
    target: Arch
    reason: str
    simulated: bool


def _rows(
    names: Iterable[str],
    vendor: str,
    e4m3: str,
    e5m2: str,
    native: bool,
    wave_size: int,
    lds_kib: int,
    kiregisters: int,
    thread_registers: int,
) -> Iterable[tuple[str, Arch]]:
    sizes = (wave_size, lds_kib * KIB, kiregisters * KIB, thread_registers, 0 if vendor == "cpu" else 1024)
    return [(name, Arch(name, vendor, e4m3, e5m2, native, *sizes)) for name in names]


# Formats: AMD's CDNA 3 and CDNA 4 instruction set manuals, NVIDIA's PTX ISA (cvt, mma). LDS and shared memory: the same
# manuals, and the compute capability table of the CUDA programming guide. Registers and threads: that table, and LLVM's
# AMDGPUBaseInfo (getTotalNumVGPRs, getAddressableNumVGPRs): lanes times the VGPRs of a SIMD, on 4 SIMDs a compute unit
# of CDNA and 2 of RDNA. From gfx90a on a thread addresses 256 accumulation registers of the same file too.
ARCHS: dict[str, Arch] = dict(
    [
        # MI300A, MI300X, MI325X
        *_rows(("gfx940", "gfx941", "gfx942"), "amd", "e4m3fnuz", "e5m2fnuz", True, 64, 64, 128, 512),
        # MI350X, MI355X
        *_rows(("gfx950",), "amd", "e4m3fn", "e5m2", True, 64, 160, 128, 512),
        # RDNA 4
        *_rows(("gfx1200", "gfx1201"), "amd", "e4m3fn", "e5m2", True, 32, 64, 96, 256),
        # MI100, MI200, RDNA 3, RDNA 3.5: no FP8 matrix instructions
        *_rows(("gfx908",), "amd", "e4m3fn", "e5m2", False, 64, 64, 64, 256),
        *_rows(("gfx90a",), "amd", "e4m3fn", "e5m2", False, 64, 64, 128, 512),
        *_rows(("gfx1100", "gfx1101", "gfx1151"), "amd", "e4m3fn", "e5m2", False, 32, 64, 96, 256),
        *_rows(
            ("gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153"), "amd", "e4m3fn", "e5m2", False, 32, 64, 64, 256
        ),
        # Hopper, Blackwell
        *_rows(("sm_90", "sm_100", "sm_103"), "nvidia", "e4m3fn", "e5m2", True, 32, 228, 64, 255),
        # Ada, Blackwell for workstations
        *_rows(("sm_89",), "nvidia", "e4m3fn", "e5m2", True, 32, 100, 64, 255),
        *_rows(("sm_120",), "nvidia", "e4m3fn", "e5m2", True, 32, 100, 64, 255),
        # before Ada: no FP8 matrix instructions
        *_rows(("sm_70",), "nvidia", "e4m3fn", "e5m2", False, 32, 96, 64, 255),
        *_rows(("sm_75",), "nvidia", "e4m3fn", "e5m2", False, 32, 64, 64, 255),
        *_rows(("sm_80", "sm_87"), "nvidia", "e4m3fn", "e5m2", False, 32, 164, 64, 255),
        *_rows(("sm_86",), "nvidia", "e4m3fn", "e5m2", False, 32, 100, 64, 255),
        # OCP unless FP8STACK_ARCH says otherwise
        *_rows(("cpu",), "cpu", "e4m3fn", "e5m2", False, 1, 0, 0, 0),
    ]
)


def lookup(name: str) -> Arch:
    """The row of an arch name; what follows the first ':' (feature flags) is ignored.

    Raises UnknownArch for anything else: no substring, family or nearest match is tried.
    """
    arch = ARCHS.get(name.split(":", 1)[0])
    if arch is None:
        raise UnknownArch(
            f"arch {name!r} is not in the table; known: {', '.join(ARCHS)}; "
            f"set {OVERRIDE} to one of them (for example {OVERRIDE}=gfx942) or add a row to fp8stack/device.py"
        )
    return arch


def _hardware(device: torch.device | str | int | None) -> tuple[Arch, str]:
    """The target and the reason, from the hardware alone."""
    if device is None:
        if not torch.cuda.is_available():
            return ARCHS["cpu"], f"torch {torch.__version__} sees no GPU"
        where = torch.device("cuda")
    else:
        where = torch.device(device)
    if where.type == "cpu":
        return ARCHS["cpu"], "the device is the CPU"
    if where.type != "cuda":
        raise UnknownArch(
            f"device {where} is neither a CPU nor a ROCm or CUDA device; expected cpu or cuda[:n]; "
            f"{OVERRIDE} chooses formats, not devices: move the tensors"
        )
    index = where.index
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _of_gpu(where, index)


@functools.cache  # every launch asks; what a GPU is does not change
def _of_gpu(where: torch.device, index: int | None) -> tuple[Arch, str]:
    if not torch.cuda.is_available():
        raise UnknownArch(
            f"device {where} was asked for, but torch {torch.__version__} sees no GPU; expected a ROCm or CUDA build "
            f"of torch and a visible device; to simulate a GPU's formats on the CPU set {OVERRIDE}, such as to gfx942"
        )
    if torch.version.hip:
        properties = torch.cuda.get_device_properties(index)
        return lookup(properties.gcnArchName), f"gcnArchName of cuda:{index} is {properties.gcnArchName}"
    major, minor = torch.cuda.get_device_capability(index)
    return lookup(f"sm_{major}{minor}"), f"compute capability of cuda:{index} is {major}.{minor}"


def detect(device: torch.device | str | int | None = None) -> Detected:
    """Arch, target and the reason, for a device; without one, for the current GPU, or the CPU where there is none.

    Reads FP8STACK_ARCH at each call. Raises UnknownArch for a chip or an override without a row (an override that is
    set but empty too: unset it instead).
    """
    target, reason = _hardware(device)
    override = os.environ.get(OVERRIDE)
    if override is None:
        return Detected(target, target, f"{target.name}: {reason}", simulated=False)
    arch = lookup(override)
    return Detected(
        arch,
        target,
        f"{arch.name}: {OVERRIDE}={override} chooses the formats; the target stays {target.name}: {reason}",
        simulated=arch != target,
    )


def describe() -> dict[str, object]:
    """What the harness wants to know about this machine, as JSON-able values. Initialises the GPU if there is one.

    Raises UnknownArch as detect() does.
    """
    from fp8stack import _triton  # here, so that detect() needs no triton

    found = detect()
    name, count, memory_gib = platform.processor() or platform.machine(), 0, 0.0
    if found.target.vendor != "cpu":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, count = properties.name, torch.cuda.device_count()
        memory_gib = round(properties.total_memory / 2**30, 1)
    return {
        "arch": found.arch.name,
        "target": found.target.name,
        "reason": found.reason,
        "simulated": found.simulated,
        "vendor": found.target.vendor,
        "device_name": name,
        "device_count": count,
        "memory_gib": memory_gib,
        "e4m3": found.arch.e4m3,
        "e5m2": found.arch.e5m2,
        "native_fp8_matmul": found.target.native_fp8_matmul,
        "wave_size": found.target.wave_size,
        "lds_bytes": found.target.lds_bytes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": None if _triton.triton is None else _triton.triton.__version__,
        "interpreting": _triton.INTERPRETING,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    """Print describe() as one JSON object; an unknown arch is one line on stderr and exit status 2."""
    try:
        told = json.dumps(describe())
    except UnknownArch as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if command.show(told) else 1


if __name__ == "__main__":
    sys.exit(command.run("device", main))
