"""Loss baselines of several platforms against each other, and the runs of one curve: part of `fp8ci baseline lint`.

A curve that a platform recorded of itself is only as good as the platform: a build that is wrong from the start records
wrong curves, and gates by them for ever. Other platforms train the same case; what they recorded must agree with it, to
ten times the wider of their own bands (hardware reduces in another order, which is more than a nudge and less than a
fault). A constant series is a placeholder, not a measurement.

The runs of one curve share their fingerprint (fingerprint.py), or their spread says something about an upgrade in place
of a nudge.

Not here: what is wrong within one file (baselines.py, record.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness import bands, baselines, fingerprint, platforms
from harness.baselines import LossRun

FACTOR = 10.0
"""How much further apart two platforms may be than the wider of their bands."""


def lint(root: Path) -> list[str]:
    """What is wrong between the loss baselines of a checkout, one line each. ConfigError for a malformed file."""
    problems: list[str] = []
    curves: dict[tuple[str, str], dict[str, list[LossRun]]] = {}
    for path in sorted((root / "baselines").glob(f"*/{baselines.LOSS_FILE}")):
        platform = platforms.get(path.parent.name).id
        for row in baselines.load_loss(path, platform).rows:
            curves.setdefault((row.case, row.config_hash), {}).setdefault(platform, []).append(row)
            problems += [
                f"{platform}/{baselines.LOSS_FILE}: {row.case}: {what}" for what in _row_problems(row, platform)
            ]
    for (case, _), rows in sorted(curves.items()):
        for platform, mine in sorted(rows.items()):
            where = f"{platform}/{baselines.LOSS_FILE}: {case}"
            first = fingerprint.of_row(mine[0].provenance)
            moved = [fingerprint.differing(fingerprint.of_row(row.provenance), first) for row in mine]
            odd = [keys for keys in moved if keys]
            if odd:
                keys = "; ".join(odd[0])
                problems.append(f"{where}: {len(odd)} of {len(mine)} runs have another fingerprint ({keys})")
        problems += [f"{case}: {what}" for what in _disagreements(rows)]
    return problems


def _row_problems(row: LossRun, platform: str) -> Iterator[str]:
    if row.provenance.platform != platform:
        yield f"was recorded on {row.provenance.platform}"
    for name, series in (("loss", row.loss), ("grad_norm", row.grad_norm)):
        if len(series) > 1 and len(set(series)) == 1:
            yield f"{name} is {series[0]} at every step: a placeholder, not a measurement"


def _disagreements(rows: Mapping[str, list[LossRun]]) -> Iterator[str]:
    """Each pair of platforms whose run 0 differ by more than FACTOR times the wider of their bands."""
    judged = {platform: _judged(rows[platform]) for platform in sorted(rows)}
    known = [(platform, *found) for platform, found in judged.items() if found is not None]
    for position, (first, curve, limits) in enumerate(known):
        for second, other, others in known[position + 1 :]:
            for window in limits.windows:
                apart = bands.window_difference(other.loss, curve.loss, *window)
                allowed = FACTOR * max(limits.windows[window], others.windows.get(window, 0.0))
                if not apart <= allowed:
                    steps = f"steps {window[0]}-{window[1]}"
                    yield f"{first} and {second} differ by {apart:.2e} in {steps}, {allowed:.2e} is allowed"
                    break


def _judged(rows: Sequence[LossRun]) -> tuple[bands.Curve, bands.Limits] | None:
    reference = baselines.reference_run(rows)
    if reference is None:
        return None
    curve = bands.Curve.of_run(reference)
    spread = [bands.Curve.of_run(row) for row in rows if row is not reference]
    return curve, bands.limits("loss", curve, spread, bands.counted(reference, rows))
