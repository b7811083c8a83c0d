"""The least signal-to-noise ratio of each (format, granularity, size class), with the measurement it comes from.

Policy: the worst of 20 seeds minus 1 dB, on normal data, power-of-two scales on and off; never below the floor of the
format. From 64x64 up; below that the element-wise bound decides (a ratio over a few elements is luck, pytorch/ao#4061:
one threshold for two formats was relaxed for one and thereby for both). Relaxing a row leaves every other row alone.

Record: `python -m suites.numerics.thresholds` prints the tables measured here and now. Not here: dense GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass

# What no row may go below, dB, quantised against high precision.
FLOORS = {"e4m3fn": 30.0, "e4m3fnuz": 30.0, "e5m2": 24.0, "e5m2fnuz": 24.0}

SIZE_CLASSES = {"small": (64, 64), "wide": (64, 4096)}
SEEDS = 20
MARGIN_DB = 1.0


@dataclass(frozen=True)
class Threshold:
    """``at_least`` is the gate, ``worst`` the smallest of SEEDS measurements on the reference (both dB)."""

    at_least: float
    worst: float


def _row(worst: float) -> Threshold:
    return Threshold(round(worst - MARGIN_DB, 2), worst)


# (format, granularity, size class) -> threshold. Measured with torch 2.13 on a CPU; bits are equal on every device.
QUANTIZE_SQNR_DB: dict[tuple[str, str, str], Threshold] = {
    ("e4m3fn", "rowwise", "small"): _row(31.38),
    ("e4m3fn", "rowwise", "wide"): _row(31.49),
    ("e4m3fn", "tensorwise", "small"): _row(31.25),
    ("e4m3fn", "tensorwise", "wide"): _row(31.49),
    ("e4m3fnuz", "rowwise", "small"): _row(31.38),
    ("e4m3fnuz", "rowwise", "wide"): _row(31.49),
    ("e4m3fnuz", "tensorwise", "small"): _row(31.27),
    ("e4m3fnuz", "tensorwise", "wide"): _row(31.49),
    ("e5m2", "rowwise", "small"): _row(25.41),
    ("e5m2", "rowwise", "wide"): _row(25.51),
    ("e5m2", "tensorwise", "small"): _row(25.32),
    ("e5m2", "tensorwise", "wide"): _row(25.51),
    ("e5m2fnuz", "rowwise", "small"): _row(25.41),
    ("e5m2fnuz", "rowwise", "wide"): _row(25.51),
    ("e5m2fnuz", "tensorwise", "small"): _row(25.32),
    ("e5m2fnuz", "tensorwise", "wide"): _row(25.51),
}


# (M, N, K) of the grouped products, by size class.
GROUPED_SIZES = {"small": (256, 64, 64), "deep": (256, 64, 1024)}
GROUPED_FLOOR_DB = 27.0  # of two e4m3 operands: what no row may go below

# (format, form, size class) -> threshold, scales not powers of two, four groups of which one is empty.
GROUPED_SQNR_DB: dict[tuple[str, str, str], Threshold] = {
    ("e4m3fn", "rows", "small"): _row(28.29),
    ("e4m3fn", "rows", "deep"): _row(28.28),
    ("e4m3fn", "contraction", "small"): _row(29.15),
    ("e4m3fnuz", "rows", "small"): _row(28.26),
    ("e4m3fnuz", "rows", "deep"): _row(28.31),
    ("e4m3fnuz", "contraction", "small"): _row(29.15),
}


def measure() -> dict[tuple[str, str, str], float]:
    """(format, granularity, size class) -> worst SQNR in dB of the reference over SEEDS seeds and both scale modes."""
    import torch

    from fp8stack import formats, scaling
    from suites.compare import sqnr_db

    worst: dict[tuple[str, str, str], float] = {}
    for fmt in FLOORS:
        for granularity, dim in (("rowwise", 1), ("tensorwise", None)):
            for size, shape in SIZE_CLASSES.items():
                measured = []
                for seed in range(SEEDS):
                    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                    for pow2 in (True, False):
                        q, inverse = scaling.quantize_reference(x, fmt, dim=dim, pow2=pow2)
                        scale = inverse if dim is None else inverse.unsqueeze(dim)
                        measured.append(sqnr_db(x, formats.decode(q, fmt) * scale))
                worst[fmt, granularity, size] = min(measured)
    return worst


def measure_grouped() -> dict[tuple[str, str, str], float]:
    """(format, form, size class) -> worst SQNR in dB of grouped_scaled_mm's reference, bf16 out, over SEEDS seeds."""
    from fp8stack.kernels.grouped_gemm import grouped_scaled_mm_reference
    from suites.compare import sqnr_db
    from suites.numerics.test_grouped_gemm import problem

    worst: dict[tuple[str, str, str], float] = {}
    for fmt in ("e4m3fn", "e4m3fnuz"):
        for form, size in (("rows", "small"), ("rows", "deep"), ("contraction", "small")):
            m, n, k = GROUPED_SIZES[size]
            measured = []
            for seed in range(SEEDS):
                given = problem(form, (m // 4, 0, m // 4, m // 2), 0, n, k, fmt, seed)
                out = grouped_scaled_mm_reference(given.a, given.b, given.inverse_a, given.inverse_b, given.offs)
                measured.append(sqnr_db(given.high_precision, out))
            worst[fmt, form, size] = min(measured)
    return worst


if __name__ == "__main__":
    for table in (measure(), measure_grouped()):
        for key, value in table.items():
            print(f"    {key!r}: _row({value:.2f}),".replace("'", '"'))
