"""What an instruction does to memory, in words that every dialect shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """One memory access of one lane.

    Attributes:
        space: `global` (device memory, also through buffer and flat addressing), `lds` (shared memory), `scratch`
            (a lane's stack: spills), `constant` (kernel arguments and other scalar or uniform loads).
        kind: `load`, `store`, `atomic`, or `copy` (device memory to LDS or back without registers).
        width: bytes a lane.
    """

    space: str
    kind: str
    width: int

    @property
    def reads_global(self) -> bool:
        """Whether it brings data in from device memory."""
        return self.space == "global" and self.kind in ("load", "copy")

    @property
    def narrow(self) -> bool:
        """1 or 2 bytes a lane."""
        return self.width <= 2
