"""What a measurement was made with: the keys that can move a number, apart from those that can only move a time.

The bands of a curve hold under another fingerprint only as far as the recorded spread covers it, so a difference is
said beside every verdict that it may explain. It is no verdict of its own: another build of the same version, or
another machine of the same kind, must pass.

Not here: configuration (config hashes: a difference there is STALE_BASELINE), where the values come from (record.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from harness import baselines
from harness.baselines import Provenance

#: Keys of a row's provenance that can move a number.
#: A partition of a GPU has fewer compute units, and libraries choose their kernels by them.
NUMERICS = ("platform", "torch", "triton", "runtime", "image_digest", "partition")
#: Those that can move a time: the same, and what a number does not depend on.
SPEED = (*NUMERICS, "device", "python")


def of_row(provenance: Provenance, keys: Sequence[str] = NUMERICS) -> dict[str, str | None]:
    """The keys that matter of where a row comes from."""
    return {key: getattr(provenance, key) or None for key in keys}


def of_run(
    platform: str, versions: Mapping[str, object], run: Mapping[str, object] = MappingProxyType({})
) -> dict[str, str | None]:
    """The same of a run that is being judged, as far as its run.json says it."""
    known = {key: str(value) for key, value in versions.items() if value}
    runtime = known.get("hip") or known.get("cuda")
    own = {key: str(run[key]) if run.get(key) else None for key in ("image_digest", "partition")}
    return {"platform": platform, "torch": known.get("torch"), "triton": known.get("triton"), "runtime": runtime, **own}


def differing(now: Mapping[str, str | None], before: Mapping[str, str | None]) -> tuple[str, ...]:
    """`key: before -> now` for each key that differs. A key that one side does not know says nothing."""
    known = [key for key in before if now.get(key) and before[key]]
    sides = ({key: str(side[key]).partition("+")[0] for key in known} for side in (now, before))
    return baselines.differing_keys(*sides)
