"""How much of a chip's peak rate a training step uses, and the table of peak rates.

    FLOPs a token = 6 x weights of matrix products + 6 x layers x heads x (width of q, k + width of v) x sequence

(2 for a multiply-add, times forward, input gradient and weight gradient; attention without the mask, as is customary;
recomputed products not counted.) Under an FP8 recipe some of these products run at the FP8 peak, the others at the
BF16 peak, so there are three figures:

    utilisation             seconds that the step would take if each product ran at its own peak / seconds that it took
    utilisation_bf16_peak   all FLOPs against the BF16 peak: comparable between recipes, may pass 1 with FP8
    utilisation_fp8_peak    all FLOPs against the FP8 peak

The first cannot pass 1: if it does, a clock, a count or a peak is wrong, and that is an error. A name that is not
in the table has no utilisation, with the reason: never the figure of the nearest name ("H20" is in "H200").
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8stack.linear import RECIPES
from fp8stack.models import Sizes
from fp8stack.moe import EXPERT_RECIPES


class ImplausibleUtilisation(RuntimeError):
    """More than 100 % of the peak."""


@dataclass(frozen=True)
class Peaks:
    """Dense peak rates of one SKU, TFLOPS. fp8_tflops is None where it has no FP8 matrix instructions."""

    sku: str
    bf16_tflops: float
    fp8_tflops: float | None
    names: tuple[str, ...]


# Vendors' data sheets, dense. names: what torch calls the device, without the vendor's words.
PEAKS: tuple[Peaks, ...] = (
    Peaks("MI300X", 1307.4, 2614.9, ("MI300X", "MI300X OAM")),
    Peaks("MI325X", 1307.4, 2614.9, ("MI325X", "MI325X OAM")),
    Peaks("MI350X", 2300.0, 4600.0, ("MI350X", "MI350X OAM")),
    Peaks("MI355X", 2500.0, 5000.0, ("MI355X", "MI355X OAM")),
    Peaks("H100 SXM", 989.0, 1979.0, ("H100 80GB HBM3", "H100 SXM", "H100 SXM5")),
    Peaks("H200", 989.0, 1979.0, ("H200", "H200 SXM")),
    Peaks("B200", 2250.0, 4500.0, ("B200",)),
    Peaks("MI250X (one die)", 191.5, None, ("MI250X", "MI250X/MI250")),
)
_VENDOR_WORDS = ("AMD", "NVIDIA", "INSTINCT")
_BY_NAME = {name.upper(): peaks for peaks in PEAKS for name in peaks.names}


def peaks_of(device_name: str) -> Peaks | str:
    """The row of a device by torch's name for it, matched whole; or the reason why there is none."""
    words = [word for word in device_name.upper().split() if word not in _VENDOR_WORDS]
    found = _BY_NAME.get(" ".join(words))
    if found is None:
        return f"no peak rates are known for '{device_name}'; known: {', '.join(peaks.sku for peaks in PEAKS)}"
    return found


@dataclass(frozen=True)
class Flops:
    """FLOPs a token of a training step, by the peak that bounds them."""

    bf16: float
    fp8: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.bf16 + self.fp8


def flops_a_token(size: Sizes, seq: int, recipe: str, native: bool = True) -> Flops:
    """FLOPs a token of this model under a recipe. native: False where FP8 is simulated, so runs at the BF16 peak."""
    blocks, rest = size.block_matmul_parameters, size.high_precision_matmul_parameters
    fp8 = 0
    if recipe in RECIPES and native:
        row = RECIPES[recipe]
        converted = blocks - (0 if recipe in EXPERT_RECIPES else size.routed_matmul_parameters)
        fp8 = 2 * sum(gemm is not None for gemm in (row.output, row.grad_input, row.grad_weight)) * converted
    return Flops(float(6 * (blocks + rest) + size.attention_flops_a_token(seq) - fp8), float(fp8))


def utilisation(flops: Flops, tokens: int, seconds: float, device_name: str) -> dict[str, float | str | None]:
    """The three figures for `tokens` processed by one device in `seconds`, or nulls and `utilisation_reason`.

    Raises ImplausibleUtilisation above 100 %.
    """
    peaks = peaks_of(device_name)
    if isinstance(peaks, str):
        names = ("utilisation", "utilisation_bf16_peak", "utilisation_fp8_peak")
        return {**dict.fromkeys(names), "utilisation_reason": peaks}
    bf16 = peaks.bf16_tflops * 1e12
    fp8 = (peaks.fp8_tflops or peaks.bf16_tflops) * 1e12
    share = tokens * (flops.bf16 / bf16 + flops.fp8 / fp8) / seconds
    if not share <= 1:
        raise ImplausibleUtilisation(
            f"utilisation is {share:.1%} of the peak of {peaks.sku}; expected at most 100 %; check the step's time "
            f"({seconds:.3g} s for {tokens} tokens) and the peak rates in fp8stack/utilisation.py"
        )
    return {
        "utilisation": share,
        "utilisation_bf16_peak": tokens * flops.total / bf16 / seconds,
        "utilisation_fp8_peak": None if peaks.fp8_tflops is None else tokens * flops.total / fp8 / seconds,
        "utilisation_reason": None,
    }
