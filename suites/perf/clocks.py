"""What a device says of its clocks while it is timed: how fast they run, and whether it holds them down.

NVIDIA: the driver's own library, asked through ctypes, since a call takes microseconds where `nvidia-smi` takes a
quarter of a second, and a block of samples twelve milliseconds. The device is found by its UUID: CUDA counts only those
that CUDA_VISIBLE_DEVICES leaves, the library counts all. Held down is what hardware or temperature forces; the power
limit, under which large products always run, is not (its effect on candidate and probe is alike, and a clock that moves
is in the probe).

AMD: nothing is asked, and a launch says so by leaving the flags out: the probe alone tells a drift there.

Not here: what a throttled block means (harness/speed.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
SM, MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
HELD_DOWN = 0x8 | 0x20 | 0x40 | 0x80  # hardware slowdown; by temperature, software and hardware; by the power brake


@dataclass(frozen=True)
class Watch:
    """One device's clocks. Without a library that answers, `known` is False and everything is empty."""

    library: Any = None
    handle: Any = None

    @property
    def known(self) -> bool:
        return self.library is not None

    @staticmethod
    def of(where: torch.device) -> Watch:
        if torch.version.hip is not None or where.type != "cuda":
            return Watch()
        try:
            return Watch.opened(ctypes.CDLL(LIBRARY), f"GPU-{torch.cuda.get_device_properties(where).uuid}")
        except (OSError, AttributeError):
            return Watch()

    @staticmethod
    def opened(library: Any, uuid: str) -> Watch:
        """The device of that UUID in a library that was loaded."""
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return Watch()
        watch = Watch(library, handle)
        return watch if watch._reasons() is not None else Watch()

    def read(self) -> dict[str, float | str]:
        """`sm_mhz` and `mem_mhz`; what the device does not say is left out."""
        found: dict[str, float | str] = {}
        if not self.known:
            return found
        for name, kind in (("sm_mhz", SM), ("mem_mhz", MEMORY)):
            value = ctypes.c_uint()
            if self.library.nvmlDeviceGetClockInfo(self.handle, kind, ctypes.byref(value)) == 0:
                found[name] = float(value.value)
        return found

    def held_down(self) -> bool:
        """Whether hardware or temperature hold the clocks down at this moment."""
        return bool((self._reasons() or 0) & HELD_DOWN) if self.known else False

    def _reasons(self) -> int | None:
        """The bits of nvmlClocksEventReasons; None where the device does not answer."""
        value = ctypes.c_ulonglong()
        ask = self.library.nvmlDeviceGetCurrentClocksThrottleReasons  # its name in every driver
        return value.value if ask(self.handle, ctypes.byref(value)) == 0 else None
