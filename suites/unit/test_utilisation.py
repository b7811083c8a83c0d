"""Utilisation: peaks by exact name, FLOPs by arithmetic, no default, nothing above 100 %."""

from __future__ import annotations

import pytest

from fp8stack.models import model_named
from fp8stack.utilisation import Flops, ImplausibleUtilisation, Peaks, flops_a_token, peaks_of, utilisation


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        pytest.param("AMD Instinct MI300X", 1307.4, 2614.9, id="mi300x"),
        pytest.param("AMD Instinct MI325X", 1307.4, 2614.9, id="mi325x"),
        pytest.param("AMD Instinct MI350X", 2300.0, 4600.0, id="mi350x"),
        pytest.param("AMD Instinct MI355X", 2500.0, 5000.0, id="mi355x"),
        pytest.param("NVIDIA H200", 989.0, 1979.0, id="h200"),
        pytest.param("H200", 989.0, 1979.0, id="h200-alone"),
        pytest.param("NVIDIA H100 80GB HBM3", 989.0, 1979.0, id="h100"),
        pytest.param("NVIDIA B200", 2250.0, 4500.0, id="b200"),
    ],
)
def test_peaks(name: str, bf16: float, fp8: float) -> None:
    """Each SKU has the dense peaks of its data sheet (torchtitan#920, #2156)."""
    found = peaks_of(name)
    assert isinstance(found, Peaks)
    assert (found.bf16_tflops, found.fp8_tflops) == (bf16, fp8)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA GB300", "B300", "AMD Instinct MI300A", "MI300", "H200 NVL", "cpu", ""],
)
def test_unknown_name(name: str) -> None:
    """A name that is not in the table gives null and says so; part of a known name is not enough (torchtitan#4779)."""
    figures = utilisation(Flops(1e9, 0.0), 8192, 1.0, name)
    assert {key: value for key, value in figures.items() if key != "utilisation_reason"} == {
        "utilisation": None,
        "utilisation_bf16_peak": None,
        "utilisation_fp8_peak": None,
    }
    assert f"'{name}'" in str(figures["utilisation_reason"])


def test_flops_of_llama3_8b() -> None:
    """By hand: 32 x (2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336) + 128256 x 4096 weights, attention at 8192."""
    blocks = 32 * (2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256)
    head = 525_336_576
    attention = 6 * 32 * 32 * 256 * 8192
    assert blocks == 6_979_321_856
    size = model_named("llama3-8b")
    total = 6 * (blocks + head) + attention
    assert total == 57_912_852_480
    assert flops_a_token(size, 8192, "bf16") == Flops(float(total), 0.0)
    assert flops_a_token(size, 8192, "rowwise") == Flops(float(total - 6 * blocks), float(6 * blocks))
    assert flops_a_token(size, 8192, "rowwise_with_gw_hp") == Flops(float(total - 4 * blocks), float(4 * blocks))
    assert flops_a_token(size, 8192, "rowwise", native=False) == Flops(float(total), 0.0)


def test_flops_of_dsv3_671b() -> None:
    """By hand: what a token meets, its 8 of 256 experts, and the routers; attention of heads 192 and 128 wide."""
    q = 7168 * 1536 + 1536 * 128 * 192
    kv = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention = 61 * (q + kv + 128 * 128 * 7168)
    feed_forward = 3 * 3 * 7168 * 18432 + 58 * 9 * 3 * 7168 * 2048
    router, head = 58 * 256 * 7168, 129_280 * 7168
    blocks = attention + feed_forward
    assert blocks + router + head == 36_624_596_992  # 37 B activated, less the embedding
    size = model_named("dsv3-671b")
    total = float(6 * 36_624_596_992 + 6 * 61 * 128 * (192 + 128) * 4096)
    assert flops_a_token(size, 4096, "bf16") == Flops(total, 0.0)
    assert flops_a_token(size, 4096, "rowwise") == Flops(total - 6 * blocks, float(6 * blocks))
    without = blocks - 58 * 8 * 3 * 7168 * 2048  # routed experts stay in bf16 under blockwise
    assert flops_a_token(size, 4096, "blockwise") == Flops(total - 6 * without, float(6 * without))


def test_each_product_against_its_own_peak() -> None:
    """989 TFLOP in bf16 and 1979 in FP8 are two seconds at the peaks of an H200; against one peak they are not."""
    figures = utilisation(Flops(989e9, 1979e9), 1000, 4.0, "NVIDIA H200")
    assert figures["utilisation"] == pytest.approx(0.5)
    assert figures["utilisation_bf16_peak"] == pytest.approx((989 + 1979) / 989 / 4)
    assert figures["utilisation_fp8_peak"] == pytest.approx((989 + 1979) / 1979 / 4)
    assert figures["utilisation_reason"] is None


def test_above_100_percent() -> None:
    """Faster than the peak is an error; so is a NaN (torchtitan#668)."""
    with pytest.raises(ImplausibleUtilisation, match=r"150\.0% of the peak of H200"):
        utilisation(Flops(989e9, 0.0), 1500, 1.0, "NVIDIA H200")
    with pytest.raises(ImplausibleUtilisation):
        utilisation(Flops(float("nan"), 0.0), 1500, 1.0, "NVIDIA H200")
