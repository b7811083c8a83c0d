"""scaled_mm: every granularity by every backend of this device, against float64 on the dequantised operands.

Operands are quantised by the references, so that what lies between the expected value and a result is the accumulation
and one rounding; the bound is products.py's, for every element. Sizes are those that neither tiles nor blocks divide.
Whatever is written to has been poisoned (conftest.py).

On a GPU the table's own configurations run; in the interpreter those of its rows. Not here: which backend is chosen,
refusals, what torch is called with (unit/test_scaled_mm.py); layers (test_linear.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from fp8stack import _triton, formats, scaling
from fp8stack.device import OVERRIDE, detect
from fp8stack.kernels import launch, scaled_kernel
from fp8stack.kernels.blockwise import UNITS, quantize_blockwise_reference
from fp8stack.kernels.mxfp8 import quantize_mxfp8_reference
from fp8stack.kernels.scaled_mm import GRANULARITIES, scaled_mm
from suites.compare import assert_bits_equal, assert_sqnr, values
from suites.numerics.products import Record, accumulation, assert_within
from suites.numerics.thresholds import GEMM_FLOORS, GEMM_SIZES, GEMM_SQNR_DB

# The interpreter multiplies with NumPy, which warns where a NaN is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ARCH_OF = {"e4m3fn": "gfx950", "e5m2": "gfx950", "e4m3fnuz": "gfx942", "e5m2fnuz": "gfx942"}

# (M, N, K): one row and one step; a short last block of each dimension; tiles of rows and columns, and whole steps.
SIZES = {"one": (1, 16, 16), "ragged": (5, 144, 400), "tiles": (130, 80, 256)}


@pytest.fixture
def backends(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> tuple[str, ...]:
    """The backends that this device has for the case's format and granularity, the arch overridden where it is due."""
    fmt, granularity = (str(request.getfixturevalue(name)) for name in ("fmt", "granularity"))
    whole = granularity in GRANULARITIES[:2]
    target = detect(device).target
    native = target.native_fp8_matmul and fmt in (target.e4m3, target.e5m2)
    if not native:
        monkeypatch.setenv(OVERRIDE, ARCH_OF[fmt])
    if device == "cpu":
        kernel = ("triton", "emulated") if granularity == "1x32" else ("triton",)
        here = (*(kernel if _triton.INTERPRETING else ()), "simulated")
    elif not native:
        here = ("simulated",)
    elif granularity == "1x32" and not scaled_kernel.scales_in_unit(target.name):
        here = ("emulated",)
    else:
        # torch multiplies no e5m2 by e5m2, and with scales of blocks on sm_90 alone.
        torch_too = fmt.startswith("e4m3") and (whole or (target.name == "sm_90" and granularity != "1x32"))
        here = ("torch", "triton") if torch_too else ("triton",)
    record_property("arch", detect(device).arch.name)
    record_property("backend", "+".join((*here, "reference")))
    return (*here, "reference")


def cases(
    *suffixes: str, formats_: tuple[str, ...] = ("e4m3fn", "e4m3fnuz"), granularities: tuple[str, ...] = GRANULARITIES
) -> pytest.MarkDecorator:
    """Every granularity in every format, but 1x32 in OCP's alone; one id a case."""
    return pytest.mark.parametrize(
        ("granularity", "fmt", "suffix"),
        [
            pytest.param(granularity, fmt, suffix, id=f"scaled_mm-{fmt}-{granularity.replace(' ', '-')}-{suffix}")
            for granularity in granularities
            for fmt in formats_
            for suffix in suffixes
            if not (granularity == "1x32" and fmt.endswith("fnuz"))
        ],
    )


@dataclass(frozen=True)
class Problem:
    """Operands of one call, the exact product, and the product of absolute values (float64, on the CPU)."""

    a: torch.Tensor
    b: torch.Tensor
    inverse_a: torch.Tensor
    inverse_b: torch.Tensor
    expected: torch.Tensor
    magnitude: torch.Tensor
    high_precision: torch.Tensor

    def to(self, device: str) -> tuple[torch.Tensor, ...]:
        """Operands and inverse scales on a device; through bytes, as float8 tensors copy strides badly."""
        moved = [x.view(torch.uint8).to(device).view(x.dtype) for x in (self.a, self.b)]
        return (*moved, self.inverse_a.to(device), self.inverse_b.to(device))


def quantised(x: torch.Tensor, unit: str, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of x, their inverse scales and what they stand for in float64; E8M0 scales alone are powers of two."""
    if unit in ("tensor", "row"):
        dim = 1 if unit == "row" else None
        codes, inverse = scaling.quantize_reference(x, fmt, dim=dim, pow2=False)
        factor = inverse.double() if dim is None else inverse.double().unsqueeze(1)
    else:
        if unit == "1x32":
            codes, inverse = quantize_mxfp8_reference(x, fmt, "rceil")
            factor, block = torch.exp2(inverse.double() - 127), (1, 32)
        else:
            codes, inverse = quantize_blockwise_reference(x, fmt, unit)
            factor, block = inverse.double(), UNITS[unit]
        factor = factor.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: x.shape[0], : x.shape[1]]
    return codes, inverse, formats.decode(codes, fmt).double() * factor


def problem(granularity: str, m: int, n: int, k: int, fmt: str, seed: int, even: bool = False) -> Problem:
    """x (m, k) by w (n, k), normal; blocks differ in size unless `even`, so that a neighbour's scale shows."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn((rows, k), generator=generator) for rows in (m, n))
    if not even:
        for operand in (x, w):
            rows, columns = operand.shape
            size = torch.rand((rows, -(-columns // 32)), generator=generator) * 6 - 3
            operand *= torch.exp2(size).repeat_interleave(32, 1)[:, :columns]
    x, w = x.bfloat16(), w.bfloat16()
    left, *_, right = granularity.split() if " " in granularity else (granularity, granularity)
    a, inverse_a, wide_a = quantised(x, left, fmt)
    b, inverse_b, wide_b = quantised(w, right, fmt)
    inverse_b = inverse_b.t() if inverse_b.dim() == 2 else inverse_b
    return Problem(
        a,
        b.t(),
        inverse_a,
        inverse_b,
        wide_a @ wide_b.t(),
        wide_a.abs() @ wide_b.abs().t(),
        x.double() @ w.double().t(),
    )


def multiply(
    backend: str,
    device: str,
    given: Problem,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """The op by a backend, which must be the one that ran."""
    with launch.recording() as ran:
        out = scaled_mm(*given.to(device), out_dtype=out_dtype, bias=bias, backend=backend, fast_accum=fast_accum)
    assert ran == {"scaled_mm": backend}
    return out


def apart(backends: tuple[str, ...], granularity: str) -> tuple[str, ...]:
    """Those that differ: with scales of blocks the interpreter runs one kernel, in one way, by three names."""
    if not _triton.INTERPRETING or granularity in GRANULARITIES[:2]:
        return backends
    return tuple(backend for backend in backends if backend not in ("emulated", "simulated"))


def allowed(backend: str, device: str) -> float:
    """The row of products.ACCUMULATION; what emulates E8M0 scales is the kernel."""
    return accumulation("triton" if backend == "emulated" else backend, device, fp8=True)


@cases(*SIZES)
def test_products(
    granularity: str,
    fmt: str,
    suffix: str,
    device: str,
    seed: int,
    backends: tuple[str, ...],
    guarded_outputs: Callable[[], None],
    record_property: Record,
) -> None:
    """Every element is the exact product, scaled block by block and rounded once; nothing else is written."""
    given = problem(granularity, *SIZES[suffix], fmt, seed)
    for backend in backends:
        # torch gives bf16 alone with scales of rows.
        dtype = torch.bfloat16 if backend == "torch" or suffix == "ragged" else torch.float32
        out = multiply(backend, device, given, dtype)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert_within(given.expected, given.magnitude, out, allowed(backend, device), backend, record_property)
        if backend in ("triton", "emulated"):
            guarded_outputs()


@cases("bias")
def test_bias(
    granularity: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """The bias of a column is added before the one rounding."""
    given = problem(granularity, 33, 80, 160, fmt, seed)
    bias = (torch.randn(80, generator=torch.Generator().manual_seed(seed)) * 8).bfloat16()
    expected = replace(given, expected=given.expected + bias.double(), magnitude=given.magnitude + bias.double().abs())
    for backend in backends:
        out = multiply(backend, device, given, bias=bias.to(device))
        assert_within(expected.expected, expected.magnitude, out, allowed(backend, device), backend, record_property)


@cases("small", "deep", formats_=tuple(ARCH_OF))
def test_sqnr(
    granularity: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """Against float64 without quantisation each backend keeps the SQNR of its format, granularity and size."""
    row = GEMM_SQNR_DB[fmt, granularity, suffix]
    assert row.at_least >= GEMM_FLOORS[fmt[:4]]
    given = problem(granularity, *GEMM_SIZES[suffix], fmt, seed, even=True)
    for backend in apart(backends, granularity):
        measured = assert_sqnr(given.high_precision, multiply(backend, device, given), row.at_least, backend)
        record_property(f"{backend}_sqnr_db", measured)


@cases("nan")
def test_nan(granularity: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...]) -> None:
    """A NaN code makes NaN of its row (left) or of its column (right), and leaves every other element's bits alone."""
    given = problem(granularity, 70, 80, 272, fmt, seed)
    code = formats.get(fmt).nan_code
    for backend in apart(backends, granularity):
        clean = multiply(backend, device, given)
        for side, at, hit in (("a", (66, 270), (66, slice(None))), ("b", (3, 79), (slice(None), 79))):
            spoilt = getattr(given, side).view(torch.uint8).clone()
            spoilt[at] = code
            out = multiply(backend, device, replace(given, **{side: spoilt.view(given.a.dtype)}))
            expected = clean.clone()
            expected[hit] = math.nan
            assert bool(out[hit].isnan().all()), f"{backend}: a NaN of {side} did not arrive"
            assert_bits_equal(expected.nan_to_num(nan=-1.0), out.nan_to_num(nan=-1.0), f"{backend}, NaN in {side}")


@cases("scales", granularities=("1x128 128x128", "1x128 1x128", "1x32"), formats_=("e4m3fn",))
def test_scales_of_extreme_size(
    granularity: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """Gradients of 1e-32 by weights of 1e-6, and 1e30 by 1e-30: the product of their scales alone would lose bits."""
    generator = torch.Generator().manual_seed(seed)
    for left, right in ((1e-32, 1e-6), (1e30, 1e-30)):
        x = torch.randn((16, 256), generator=generator) * left
        w = torch.randn((32, 256), generator=generator) * right
        units = granularity.split() if " " in granularity else (granularity, granularity)
        (a, inverse_a, wide_a), (b, inverse_b, wide_b) = (
            quantised(y, unit, fmt) for y, unit in zip((x, w), units, strict=True)
        )
        exact, magnitude = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
        given = Problem(a, b.t(), inverse_a, inverse_b.t(), exact, magnitude, exact)
        for backend in backends:
            if backend == "torch" or (backend == "simulated" and not _triton.INTERPRETING and device == "cpu"):
                continue  # the former's bf16 hides them; plain torch decodes and scales first, where some are subnormal
            # Not assert_within, whose bound has an absolute part that is large here.
            error = (values(multiply(backend, device, given, torch.float32)) - exact).abs() / magnitude
            worst = float(error.max())
            record_property(f"{backend}_error_{left:g}", worst)
            assert worst <= allowed(backend, device) + 2.0**-24, f"{backend}: {left:g} by {right:g} is {worst:.3g} off"


def test_scales_in_the_unit(device: str, seed: int, record_property: Record) -> None:
    """The kernel hands each row's E8M0 scales to the matrix instruction: the products of the decoded operands.

    In the interpreter of Triton 3.9, the first that multiplies so; its own decoding is right for finite codes. On a GPU
    with the instruction the rows above run this kernel.
    """
    if not _triton.INTERPRETING:
        pytest.skip("tl.dot_scaled in the interpreter: this process does not interpret (TRITON_INTERPRET=1)")
    if _triton.TRITON_VERSION < (3, 9):
        pytest.skip(f"tl.dot_scaled in the interpreter: Triton {_triton.TRITON_VERSION} has none; 3.9 does")
    row = scaled_kernel.ScaledConfig(64, 64, 128, 1, 1, 2, "of this test")
    for fmt in ("e4m3fn", "e5m2"):
        for shape in ((70, 80, 272), (5, 144, 512)):  # bytes one by one, and four at a time
            given = problem("1x32", *shape, fmt, seed)
            out = scaled_kernel.launch_scaled(
                given.a,
                given.b,
                given.inverse_a,
                given.inverse_b.t().contiguous(),
                torch.float32,
                None,
                "unit",
                1,
                False,
                False,
                row,
                "cpu",
            )
            assert_within(given.expected, given.magnitude, out, 2.0**-18, f"{fmt}", record_property)
