"""How many waves (warps) one SIMD (scheduler) can hold at a kernel's use of registers and LDS (shared memory).

waves a SIMD = groups that fit on a compute unit * waves a group / SIMDs a compute unit, where the groups are limited by
vector registers, scalar registers, LDS and the hardware's own limits. A group here is a workgroup or thread block.
A number below 1 says that a group's waves do not even reach every SIMD.

Not here: whether more waves make a kernel faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeUnit:
    """Limits of one compute unit (AMD) or streaming multiprocessor (NVIDIA).

    Attributes:
        lanes: lanes a wave.
        simds: SIMDs or schedulers.
        waves: most waves on the unit.
        groups: most groups; on AMD barriers set the limit, so groups of one wave are free of it.
        registers: vector registers a SIMD for one wave-wide register each (AMD), or 32-bit registers a unit (NVIDIA).
        register_granule: registers are allotted to a wave in multiples of this (NVIDIA: per wave, lanes included).
        lds_bytes: LDS a unit. lds_group_bytes: most that one group may have. lds_granule: allotment, bytes.
        reserved_bytes: LDS that the system takes from each group on top.
        source: where the figures are from.
    """

    lanes: int
    simds: int
    waves: int
    groups: int
    registers: int
    register_granule: int
    lds_bytes: int
    lds_group_bytes: int
    lds_granule: int
    reserved_bytes: int
    source: str


_CDNA3 = "LLVM AMDGPUBaseInfo: 512 unified VGPRs, granule 8, 8 waves an EU, 16 groups; CDNA3 ISA guide: 64 KiB of LDS"
_CDNA4 = "as CDNA3; LLVM FeatureAddressableLocalMemorySize163840: 160 KiB of LDS, granule 1280 bytes"
_CUDA = "CUDA C++ Programming Guide, technical specifications per compute capability"

UNITS: dict[str, ComputeUnit] = {
    "gfx90a": ComputeUnit(64, 4, 32, 16, 512, 8, 64 * 1024, 64 * 1024, 512, 0, _CDNA3),
    "gfx942": ComputeUnit(64, 4, 32, 16, 512, 8, 64 * 1024, 64 * 1024, 512, 0, _CDNA3),
    "gfx950": ComputeUnit(64, 4, 32, 16, 512, 8, 160 * 1024, 160 * 1024, 1280, 0, _CDNA4),
    "sm_80": ComputeUnit(32, 4, 64, 32, 65536, 256, 164 * 1024, 163 * 1024, 128, 1024, _CUDA),
    "sm_89": ComputeUnit(32, 4, 48, 24, 65536, 256, 100 * 1024, 99 * 1024, 128, 1024, _CUDA),
    "sm_90": ComputeUnit(32, 4, 64, 32, 65536, 256, 228 * 1024, 227 * 1024, 128, 1024, _CUDA),
    "sm_100": ComputeUnit(32, 4, 64, 32, 65536, 256, 228 * 1024, 227 * 1024, 128, 1024, _CUDA),
    "sm_103": ComputeUnit(32, 4, 64, 32, 65536, 256, 228 * 1024, 227 * 1024, 128, 1024, _CUDA),
    "sm_120": ComputeUnit(32, 4, 48, 24, 65536, 256, 100 * 1024, 99 * 1024, 128, 1024, _CUDA),
}

SGPR_WAVES = ((80, 10), (88, 9), (100, 8))
"""gfx9: with at most this many SGPRs a wave, this many waves a SIMD; 7 beyond (LLVM, getOccupancyWithNumSGPRs)."""


def round_up(value: int, granule: int) -> int:
    """The next multiple of `granule`."""
    return -(-value // granule) * granule


def unit(arch: str) -> ComputeUnit:
    """The row of an arch.

    Raises:
        ValueError: an arch without a row; names the ones there are.
    """
    if arch not in UNITS:
        raise ValueError(
            f"no occupancy figures for {arch!r}; expected one of {', '.join(UNITS)}; "
            "add a row to harness/isa/occupancy.py"
        )
    return UNITS[arch]


def _groups(limits: ComputeUnit, waves_a_group: int, most: int, waves_by_registers: int, lds_bytes: int) -> int:
    found = [min(limits.waves, waves_by_registers) // waves_a_group, most]
    taken = round_up(lds_bytes, limits.lds_granule) + limits.reserved_bytes
    if taken:
        found.append(limits.lds_bytes // taken)
    return min(found)


def waves_amd(arch: str, resources: Mapping[str, int], lds_bytes: int) -> float:
    """Waves a SIMD of a gfx9 kernel with unified registers.

    Args:
        resources: `vgpr_count` (accumulation registers included), `sgpr_count`, `max_flat_workgroup_size`,
            `wavefront_size`.
        lds_bytes: static and dynamic LDS of one group.
    """
    limits = unit(arch)
    waves_a_group = max(1, resources["max_flat_workgroup_size"] // resources["wavefront_size"])
    allotted = round_up(max(resources["vgpr_count"], 1), limits.register_granule)
    by_sgprs = next((waves for sgprs, waves in SGPR_WAVES if resources["sgpr_count"] <= sgprs), 7)
    a_simd = min(limits.waves // limits.simds, limits.registers // allotted, by_sgprs)
    most = limits.groups if waves_a_group > 1 else limits.waves
    groups = _groups(limits, waves_a_group, most, a_simd * limits.simds, lds_bytes)
    return groups * waves_a_group / limits.simds


def waves_nvidia(arch: str, registers: int, waves_a_group: int, lds_bytes: int) -> float:
    """Warps a scheduler.

    Args:
        registers: of one thread. waves_a_group: warps a block. lds_bytes: shared memory of one block.
    """
    limits = unit(arch)
    allotted = round_up(max(registers, 1) * limits.lanes, limits.register_granule)
    a_scheduler = limits.registers // limits.simds // allotted
    groups = _groups(limits, waves_a_group, limits.groups, a_scheduler * limits.simds, lds_bytes)
    return groups * waves_a_group / limits.simds
