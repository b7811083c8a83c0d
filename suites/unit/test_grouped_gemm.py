"""grouped_scaled_mm and grouped_mm: which backend is chosen, what is refused and how, and what libraries are handed.

Values are held to float64 in numerics/test_grouped_gemm.py. Here stands what needs no kernel: the tables, the errors,
layouts, the calls of torch's own grouped GEMMs (asked through their meta kernels, which check as the real ones do), and
what is mended behind them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8stack import device, formats
from fp8stack.device import Detected
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import grouped_gemm, grouped_kernel, launch
from fp8stack.kernels.grouped_gemm import (
    CHECK,
    call_torch,
    choose_backend,
    choose_backend_bf16,
    grouped_mm,
    grouped_mm_reference,
    grouped_scaled_mm,
    grouped_scaled_mm_reference,
    mended,
    pad_groups,
    preferred_alignment,
    settled,
)
from suites.compare import assert_bits_equal
from suites.perf import static
from suites.perf.sweep import compromise

ONE = torch.tensor(1.0)


def codes(*shape: int, fmt: str = "e4m3fn", seed: int = 0) -> torch.Tensor:
    """Seeded normal values as FP8 codes, row-major."""
    return formats.cast(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), fmt)


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


# --- the backend ------------------------------------------------------------------------------------------------------

# (target, arch by override or None, formats of a and b, output) -> backend; None: UnsupportedDtype.
CHOICES: dict[str, tuple[str, str | None, str, str, torch.dtype, str | None]] = {
    "hopper": ("sm_90", None, "e4m3fn", "e4m3fn", torch.bfloat16, "triton"),
    "blackwell": ("sm_100", None, "e4m3fn", "e4m3fn", torch.bfloat16, "torch"),
    "blackwell-float32": ("sm_100", None, "e4m3fn", "e4m3fn", torch.float32, "triton"),
    "hopper-float32": ("sm_90", None, "e4m3fn", "e4m3fn", torch.float32, "triton"),
    "hopper-e5m2": ("sm_90", None, "e5m2", "e4m3fn", torch.bfloat16, "triton"),
    "mi300x": ("gfx942", None, "e4m3fnuz", "e4m3fnuz", torch.bfloat16, "torch"),
    "mi350x": ("gfx950", None, "e4m3fn", "e4m3fn", torch.bfloat16, "torch"),
    "ada": ("sm_89", None, "e4m3fn", "e4m3fn", torch.bfloat16, "triton"),
    "rdna4": ("gfx1201", None, "e4m3fn", "e4m3fn", torch.bfloat16, "triton"),
    "emulated": ("gfx90a", None, "e4m3fn", "e4m3fn", torch.bfloat16, "reference"),
    "foreign": ("sm_90", None, "e4m3fnuz", "e4m3fnuz", torch.bfloat16, None),
    "foreign-right": ("gfx942", None, "e4m3fnuz", "e4m3fn", torch.bfloat16, None),
    "simulated": ("sm_90", "gfx942", "e4m3fnuz", "e4m3fnuz", torch.bfloat16, "simulated"),
    "simulated-own": ("sm_90", "gfx942", "e4m3fn", "e4m3fn", torch.bfloat16, "triton"),
    "simulated-two-dialects": ("sm_90", "gfx942", "e4m3fnuz", "e4m3fn", torch.bfloat16, None),
    "cpu": ("cpu", None, "e4m3fnuz", "e5m2", torch.bfloat16, "reference"),
    "cpu-simulated": ("cpu", "gfx942", "e4m3fnuz", "e4m3fnuz", torch.bfloat16, "reference"),
}


def detected(target: str, override: str | None) -> Detected:
    return Detected(device.lookup(override or target), device.lookup(target), "chosen by the test", bool(override))


@pytest.mark.parametrize("name", [pytest.param(name, id=f"grouped_gemm-backend-{name}") for name in CHOICES])
def test_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One table decides; a format that the device lacks runs only where the override asks for it, else it is named."""
    target, override, left, right, out_dtype, expected = CHOICES[name]
    monkeypatch.setattr(device, "detect", lambda where=None: detected(target, override))
    a, b = codes(16, 16, fmt=left), codes(1, 16, 16, fmt=right).transpose(1, 2)
    if expected is not None:
        assert expected == choose_backend(a, b, out_dtype)
        return
    with pytest.raises(UnsupportedDtype) as caught:
        choose_backend(a, b, out_dtype)
    for word in (str(a.dtype), str(b.dtype), target, "; expected", "FP8STACK_ARCH", "chosen by the test"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("target", "fast_accum", "whole"),
    [
        pytest.param("sm_90", True, 128, id="grouped_gemm-whole-steps-hopper-fast"),
        pytest.param("sm_90", False, 256, id="grouped_gemm-whole-steps-hopper-exact"),
        pytest.param("gfx942", True, 16, id="grouped_gemm-whole-steps-mi300x"),
    ],
)
def test_backend_along_the_contraction(
    target: str, fast_accum: bool, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel is chosen for groups of whole steps of its own; the preferred alignment is such a step, or 16."""
    monkeypatch.setattr(device, "detect", lambda where=None: detected(target, None))
    assert preferred_alignment(target, fast_accum) == whole
    fmt = device.lookup(target).e4m3
    a, b = codes(16, 512, fmt=fmt), codes(16, 512, fmt=fmt).t()
    for alignment in (16, 64, 128, 256, 384, 512):
        expected = "triton" if whole > 16 and alignment % whole == 0 else "torch"
        assert choose_backend(a, b, torch.bfloat16, alignment, fast_accum) == expected, alignment


@pytest.mark.parametrize(
    ("target", "in_rows", "out_dtype", "expected"),
    [
        pytest.param(
            target,
            in_rows,
            out_dtype,
            expected,
            id=f"grouped_mm-backend-{target}-{'rows' if in_rows else 'contraction'}-{str(out_dtype).split('.')[1]}",
        )
        for target, in_rows, out_dtype, expected in (
            ("sm_90", True, torch.bfloat16, "torch"),
            ("sm_90", True, torch.float32, "triton"),  # torch's gives bf16 only
            ("sm_100", True, torch.float32, "triton"),
            (
                "sm_90",
                False,
                torch.bfloat16,
                "triton",
            ),  # torch's asserts on the device unless groups are multiples of 8
            ("gfx942", True, torch.bfloat16, "triton"),
            ("gfx942", False, torch.bfloat16, "triton"),
            ("gfx90a", True, torch.bfloat16, "triton"),
            ("cpu", True, torch.bfloat16, "reference"),
        )
    ],
)
def test_backend_bf16(
    target: str, in_rows: bool, out_dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16: torch where its own rules allow, our kernel elsewhere; float32 the reference everywhere."""
    monkeypatch.setattr(device, "detect", lambda where=None: detected(target, None))
    assert expected == choose_backend_bf16(torch.empty(1, dtype=torch.bfloat16), in_rows, out_dtype)
    assert choose_backend_bf16(torch.empty(1), in_rows, out_dtype) == "reference"


def test_backend_bf16_knows_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm asks for the backend of the output that it was asked for."""
    asked: list[torch.dtype] = []

    def choose(a: torch.Tensor, in_rows: bool, out_dtype: torch.dtype) -> str:
        asked.append(out_dtype)
        return "reference"

    monkeypatch.setattr(grouped_gemm, "choose_backend_bf16", choose)
    a, b = torch.ones(4, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16()
    for out_dtype in (torch.float32, torch.bfloat16):
        assert grouped_mm(a, b, ends(2, 2), out_dtype).dtype == out_dtype
    assert asked == [torch.float32, torch.bfloat16]


def test_backend_whatever_the_default_device() -> None:
    """A model that is built under torch.device("meta") chooses the backend of a CPU for tensors that are on one."""
    a, b = codes(16, 16), codes(1, 16, 16).transpose(1, 2)
    with torch.device("meta"):
        assert choose_backend(a, b) == "reference"
        assert choose_backend_bf16(torch.empty(1, dtype=torch.bfloat16, device="cpu"), True) == "reference"


# (target, backend that was asked for, formats of a and b) -> error and its words; None: it runs.
ASKED_FOR: dict[str, tuple[str, str, str, str, type[Exception] | None, str]] = {
    "cpu-torch": ("cpu", "torch", "e4m3fn", "e4m3fn", ValueError, "FP8 on a CPU"),
    "cpu-triton": ("cpu", "triton", "e4m3fn", "e4m3fn", ValueError, "CPU that does not interpret"),
    "cpu-bf16-triton": ("cpu", "triton", "bf16", "bf16", ValueError, "CPU that does not interpret"),
    "cpu-bf16-torch": ("cpu", "torch", "bf16", "bf16", None, ""),
    "cpu-reference": ("cpu", "reference", "e4m3fnuz", "e5m2", None, ""),
    "hopper-triton-foreign": ("sm_90", "triton", "e4m3fn", "e4m3fnuz", UnsupportedDtype, "float8_e4m3fnuz on sm_90"),
    "mi300x-triton-foreign": (
        "gfx942",
        "triton",
        "e4m3fn",
        "e4m3fn",
        UnsupportedDtype,
        "expected e4m3fnuz or e5m2fnuz",
    ),
    "mi300x-torch-e5m2": ("gfx942", "torch", "e5m2fnuz", "e4m3fnuz", UnsupportedDtype, "expected e4m3fnuz there"),
    "emulated-triton": ("gfx90a", "triton", "e4m3fn", "e4m3fn", ValueError, "'triton' was asked for FP8 on gfx90a"),
    "ada-torch": ("sm_89", "torch", "e4m3fn", "e4m3fn", ValueError, "'torch' was asked for FP8 on sm_89"),
    "foreign-reference": ("sm_90", "reference", "e4m3fnuz", "e4m3fnuz", None, ""),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"grouped_gemm-asked-for-{name}") for name in ASKED_FOR])
def test_backend_that_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is named and cannot run here is refused before anything is launched, and says what would."""
    target, backend, left, right, error, words = ASKED_FOR[name]
    monkeypatch.setattr(device, "detect", lambda where=None: detected(target, None))

    def call() -> torch.Tensor:
        if left == "bf16":
            return grouped_mm(torch.ones(4, 16).bfloat16(), torch.ones(1, 16, 16).bfloat16(), ends(4), backend=backend)
        a, b = codes(4, 16, fmt=left), codes(1, 16, 16, fmt=right).transpose(1, 2)
        return grouped_scaled_mm(a, b, ONE, ONE, ends(4), backend=backend)

    if error is None:
        assert call().shape == (4, 16)
        return
    with pytest.raises(error, match=words) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value).count("; ") == 2, "what; expected; what next"


def test_configurations() -> None:
    """Every target that a table sends to the kernel has its rows; steps in flight fit NVIDIA's shared memory."""
    classes = {grouped_kernel.size_class(in_rows, kind) for in_rows in (True, False) for kind in grouped_kernel.KINDS}
    for name, arch in device.ARCHS.items():
        if arch.native_fp8_matmul:
            assert classes <= {size for target, size in grouped_kernel.GROUPED_CONFIGS if target == name}, name
    for (target, size), row in grouped_kernel.GROUPED_CONFIGS.items():
        if target.startswith("sm_"):
            step = (row.block_m + row.block_n) * row.block_k * (2 if "bf16" in size else 1)
            assert step * row.stages <= (device.lookup(target).lds_bytes - 1024), (target, size)
        assert not row.specialize or (row.tma and row.num_warps == 4 and row.split == 1)


# --- offsets ----------------------------------------------------------------------------------------------------------


def test_unaligned_groups_are_named() -> None:
    """Along the contraction a group that is no multiple of 16 is an error with its number and size (pytorch/ao#2678).

    On a CPU always, as offs costs nothing to read there; pad=True takes any.
    """
    offs, m = ends(44, 20, 0, 1), 80
    a, b, inverse_a, inverse_b = codes(32, m), codes(48, m, seed=1).t(), scales(4, 32), scales(4, 48, seed=1)
    words = r"^group 0 has 44 rows along the contraction, not a multiple of 16; .*; .*pad=True$"
    with pytest.raises(ValueError, match=words):
        grouped_scaled_mm(a, b, inverse_a, inverse_b, offs)
    padded = grouped_scaled_mm(a, b, inverse_a, inverse_b, offs, torch.float32, pad=True)
    expected = grouped_scaled_mm_reference(a, b, inverse_a, inverse_b, offs, torch.float32)
    assert_bits_equal(expected, padded, "groups padded inside")
    for alignment in (16, 128):
        out = grouped_scaled_mm(a, b, inverse_a, inverse_b, offs, torch.float32, pad=True, alignment=alignment)
        assert_bits_equal(expected, out, f"groups padded to {alignment}")
    assert grouped_mm(a.float(), b.float(), offs).shape == (4, 32, 48)  # high precision takes any


def test_bad_offs_are_seen_before_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """pad=True clamps ends as it moves groups: where FP8STACK_CHECK=1 bad ones raise first, in a compiled graph too."""
    bad, m = torch.tensor([32, 16, 200], dtype=torch.int32), 64
    arguments = (codes(16, m), codes(16, m, seed=1).t(), ONE, ONE)

    def padded(offs: torch.Tensor) -> torch.Tensor:
        return grouped_scaled_mm(*arguments, offs, torch.float32, pad=True)

    compiled = torch.compile(padded, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.delenv(CHECK, raising=False)
    expected = padded(torch.tensor([32, 32, 64], dtype=torch.int32))
    for call in (padded, compiled):
        assert_bits_equal(expected, call(bad), "unchecked, as clamped")
    monkeypatch.setenv(CHECK, "1")
    for call in (padded, compiled):
        with pytest.raises(ValueError, match="group 1 ends at 16, but the group before it ends at 32"):
            call(bad)


@pytest.mark.parametrize(
    "given", [pytest.param(name, id=f"grouped_gemm-offs-{name}") for name in ("int64", "length", "2d")]
)
def test_offs_of_another_kind(given: str) -> None:
    """offs of another dtype, length or rank is refused before anything is read."""
    offs = {"int64": ends(4, 4).long(), "length": ends(4, 4, 0), "2d": ends(4, 4)[None]}[given]
    with pytest.raises(ValueError, match="offs") as caught:
        grouped_scaled_mm(codes(8, 16), codes(2, 16, 16).transpose(1, 2), scales(8), scales(2, 16), offs)
    assert str(caught.value).count("; ") >= 2


def test_last_end_equals_the_rows() -> None:
    """offs[-1] == M is the usual case and works (pytorch/pytorch#191018 said it must be less)."""
    a, b = codes(8, 16), codes(2, 16, 16, seed=1).transpose(1, 2)
    out = grouped_scaled_mm(a, b, ONE, ONE, ends(3, 5), torch.float32)
    left, right = formats.decode(a, a.dtype), formats.decode(b.transpose(1, 2), b.dtype)
    assert_bits_equal(left[:3] @ right[0].t(), out[:3], "first group")
    assert_bits_equal(left[3:] @ right[1].t(), out[3:], "second group")


def test_weights_the_other_way() -> None:
    """Square weights passed both ways: one gives the product (E,N,K)^T, the other the product of W (pytorch#190872)."""
    x, w = torch.randn(8, 32).bfloat16(), torch.randn(2, 32, 32).bfloat16()
    given, turned = (grouped_mm(x, one, ends(3, 5)) for one in (w.transpose(1, 2), w))
    expected = torch.cat([x[:3].double() @ w[0].double().t(), x[3:].double() @ w[1].double().t()])
    assert_bits_equal(expected.to(torch.bfloat16), given, "x W^T")
    assert not torch.equal(given, turned)


def test_settled() -> None:
    """Ends in range, never decreasing, rounded down to multiples: what torch may see."""
    offs = torch.tensor([-4, 30, 17, 200, 90], dtype=torch.int32)
    assert settled(offs, 100).tolist() == [0, 30, 30, 100, 100]
    assert settled(offs, 100, 16).tolist() == [0, 16, 16, 96, 96]
    assert settled(offs, 100, 16).dtype == torch.int32


def test_mended() -> None:
    """What a library leaves undone: rows past the end, experts without rows; unaligned groups are NaN, not numbers."""
    out = torch.full((8, 16), 7.0)
    assert mended(out, ends(2, 3), 8, 1).eq(0.0).all(dim=1).tolist() == [False] * 5 + [True] * 3
    out = torch.full((4, 2, 3), 7.0)
    mended(out, ends(16, 0, 20, 12), 64, 16)
    assert [float(one[0, 0]) for one in out[:2]] == [7.0, 0.0]
    assert bool(out[2:].isnan().all())


def test_pad_groups() -> None:
    """Every group at the next multiple, in order, zeros between and after; rows past the last end are left out."""
    a, b = torch.arange(1.0, 8)[None], torch.arange(1.0, 8)[:, None]
    left, right, padded = pad_groups(a, b, ends(3, 0, 2), 4)
    assert padded.tolist() == [4, 4, 8]
    assert left.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0] + [0] * 8]
    assert_bits_equal(left.t(), right, "the same of the right operand")


# --- sizes and layouts ------------------------------------------------------------------------------------------------

# op arguments -> what the message says.
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "k": (
        lambda: grouped_scaled_mm(codes(4, 24), codes(2, 16, 24).transpose(1, 2), ONE, ONE, ends(2, 2)),
        r"^K is 24, not a multiple of 16; .*; .*pad=True",
    ),
    "n": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 20, 16).transpose(1, 2), ONE, ONE, ends(2, 2)),
        r"^N is 20, not a multiple of 16; .*; .*pad=True",
    ),
    "contraction-n": (
        lambda: grouped_scaled_mm(codes(20, 32), codes(16, 32).t(), ONE, ONE, ends(16, 16)),
        r"^N is 20, not a multiple of 16; .*; .*pad=True",
    ),
    "contraction-k": (
        lambda: grouped_scaled_mm(codes(16, 32), codes(20, 32).t(), ONE, ONE, ends(16, 16)),
        r"^K is 20, not a multiple of 16; .*; .*pad=True",
    ),
    "contraction-m": (
        lambda: grouped_scaled_mm(codes(16, 40), codes(16, 40).t(), ONE, ONE, ends(16, 16)),
        r"^M is 40, not a multiple of 16; .*; .*pad=True",
    ),
    "bf16-k": (
        lambda: grouped_mm(torch.ones(4, 20).bfloat16(), torch.ones(2, 20, 16).bfloat16(), ends(2, 2)),
        r"^K is 20, not a multiple of 8; .*; .*pad=True",
    ),
    "inner": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 16, 32).transpose(1, 2), ONE, ONE, ends(2, 2)),
        r"shape \(4, 16\) and b \(2, 32, 16\); expected \(M, K\) and \(E, K, N\)",
    ),
    "not-transposed": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 32, 16), ONE, ONE, ends(2, 2)),
        r"give b transposed",
    ),
    "left-layout": (
        lambda: grouped_scaled_mm(codes(16, 32).t(), codes(2, 16, 16).transpose(1, 2), ONE, ONE, ends(2, 2)),
        r"^a has strides .*row-major",
    ),
    "right-layout": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 16, 16), ONE, ONE, ends(2, 2)),
        r"^b has strides .*column-major",
    ),
    "left-scale": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 16, 16).transpose(1, 2), scales(5), ONE, ends(2, 2)),
        r"^inverse_scale_a .*shape \(4,\)",
    ),
    "right-scale": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE, scales(16), ends(2, 2)),
        r"^inverse_scale_b .*shape \(2, 16\)",
    ),
    "scale-dtype": (
        lambda: grouped_scaled_mm(codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE.double(), ONE, ends(2, 2)),
        r"^inverse_scale_a is torch.float64",
    ),
    "output": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE, ONE, ends(2, 2), out_dtype=torch.float16
        ),
        r"^out_dtype is torch.float16",
    ),
    "backend": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE, ONE, ends(2, 2), backend="cublas"
        ),
        r"^backend is 'cublas'; expected one of torch, triton, reference, simulated",
    ),
    "not-simulated": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE, ONE, ends(2, 2), backend="simulated"
        ),
        r"FP8STACK_ARCH=gfx942",
    ),
    "torch-float32": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), ONE, ONE, ends(2, 2), torch.float32, backend="torch"
        ),
        r"^out_dtype is torch.float32; torch's grouped products give bfloat16 only",
    ),
    "alignment": (
        lambda: grouped_scaled_mm(codes(16, 32), codes(16, 32).t(), ONE, ONE, ends(16, 16), alignment=8),
        r"^alignment is 8; expected a multiple of 16",
    ),
    "left-scale-device": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), scales(4).to("meta"), scales(2, 16), ends(2, 2)
        ),
        r"^inverse_scale_a is on meta and a on cpu; expected one device; move",
    ),
    "right-scale-device": (
        lambda: grouped_scaled_mm(
            codes(4, 16), codes(2, 16, 16).transpose(1, 2), scales(4), scales(2, 16).to("meta"), ends(2, 2)
        ),
        r"^inverse_scale_b is on meta and a on cpu; expected one device; move",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"grouped_gemm-refuses-{name}") for name in REFUSALS])
def test_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hardware cannot take is a ValueError that names the operand or dimension, on a CPU too."""
    monkeypatch.delenv("FP8STACK_ARCH", raising=False)
    call, words = REFUSALS[name]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert str(caught.value).count("; ") >= 2, "what; expected; what next"


def test_refuses_other_dtypes() -> None:
    """Operands that are not FP8, or neither both bf16 nor both float32, are UnsupportedDtype that names them."""
    with pytest.raises(UnsupportedDtype, match=r"torch\.bfloat16"):
        grouped_scaled_mm(torch.zeros(16, 16).bfloat16(), codes(1, 16, 16).transpose(1, 2), ONE, ONE, ends(16))
    for a, b in ((torch.float16, torch.float16), (torch.float32, torch.bfloat16)):
        with pytest.raises(UnsupportedDtype, match=str(a)):
            grouped_mm(torch.zeros(16, 16, dtype=a), torch.zeros(1, 16, 16, dtype=b), ends(16))


@pytest.mark.parametrize(
    "rows", [pytest.param(True, id="grouped_gemm-empty-rows"), pytest.param(False, id="grouped_gemm-empty-contraction")]
)
def test_nothing_to_multiply(rows: bool) -> None:
    """No tokens: no rows, or gradients that are zero; libraries refuse to contract nothing (pytorch/pytorch#192497)."""
    offs = ends(0, 0)
    if rows:
        out = grouped_scaled_mm(codes(0, 32), codes(2, 16, 32).transpose(1, 2), scales(0), scales(2, 16), offs)
        assert tuple(out.shape) == (0, 16)
        return
    out = grouped_scaled_mm(codes(16, 0), codes(32, 0).t(), scales(2, 16), scales(2, 32), offs)
    assert_bits_equal(torch.zeros(2, 16, 32, dtype=torch.bfloat16), out, "gradient of no tokens")
    out = grouped_mm(torch.zeros(0, 16).t(), torch.zeros(0, 32), offs)
    assert_bits_equal(torch.zeros(2, 16, 32), out, "the same in high precision")


def test_references_take_any_size() -> None:
    """K = 20, N = 10, and K = 1: a loop of plain products has no rule of 16 bytes (pytorch/pytorch#172440)."""
    for n, k in ((10, 20), (10, 1), (1, 1)):
        x, w = torch.randn(5, k), torch.randn(2, n, k)
        out = grouped_mm_reference(x, w.transpose(1, 2), ends(2, 3))
        assert_bits_equal((x[:2].double() @ w[0].double().t()).float(), out[:2], f"product, N={n}, K={k}")
        padded = grouped_mm(x, w.transpose(1, 2), ends(2, 3), pad=True)
        assert_bits_equal(out, padded, "the same, padded")


def test_operand_layouts() -> None:
    """The kernel reads 16 bytes at a time: what is not laid out for it is copied, what is stays where it is."""
    x = torch.zeros(6, 64, dtype=torch.uint8)
    found, along, pitch = grouped_kernel.operand(x)
    assert (found.data_ptr(), along, pitch) == (x.data_ptr(), True, 64)
    for odd in (x[:, 1:33], torch.zeros(6, 40, dtype=torch.uint8)[:, :32], x.view(torch.uint8)[:, ::2]):
        found, along, pitch = grouped_kernel.operand(odd)
        assert (found.data_ptr() != odd.data_ptr(), along, pitch) == (True, True, 32)
        assert found.is_contiguous()
    wide = torch.zeros(24, 48, dtype=torch.bfloat16)
    found, along, pitch = grouped_kernel.operand(wide.t())  # tokens of a gradient, row-major
    assert (found.data_ptr(), along, pitch) == (wide.data_ptr(), False, 48)
    experts = torch.zeros(4, 16, 64, dtype=torch.uint8)
    assert grouped_kernel.operand(experts)[0].data_ptr() == experts.data_ptr()
    assert grouped_kernel.operand(experts[:, :8])[0].data_ptr() != experts.data_ptr()  # gaps between experts


# --- torch's own products ---------------------------------------------------------------------------------------------


def test_torch_leaves_a_tail(poison: None) -> None:
    """32 rows of which 24 are in groups: torch leaves 8 as they were, our op clears them (pytorch/pytorch#154557)."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=generator).bfloat16() for shape in ((32, 16), (3, 16, 16)))
    bare = torch._grouped_mm(x, w, offs=ends(8, 0, 16))
    with launch.recording() as ran:
        out = grouped_mm(x, w, ends(8, 0, 16), backend="torch")
    assert ran == {"grouped_mm": "torch"}
    assert_bits_equal(bare[:24], out[:24], "rows of groups")
    assert int(torch.count_nonzero(out[24:])) == 0
    assert bool(bare[24:].isnan().any()), "torch now clears the tail itself: mended() may go"


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(
    params=[pytest.param("cuda", id="grouped_gemm-torch-cuda"), pytest.param("rocm", id="grouped_gemm-torch-rocm")]
)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch as built for a vendor, on its GPU: sm_90, or gfx942."""
    if request.param == "rocm":
        monkeypatch.setattr(torch.version, "hip", "7.2.0")
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)
    return str(request.param)


def test_what_torch_is_called_with(vendor: str) -> None:
    """UNCALIBRATED on ROCm: torch's meta kernel, which checks as the real one does, takes the three GEMMs of a layer.

    dtype of the arch (e4m3fnuz on gfx942), strides, shapes of the scales, offs. No ROCm GPU has run this call here.
    """
    e, m, m_pad, n, k = 4, 40, 96, 32, 64
    fp8 = torch.float8_e4m3fnuz if vendor == "rocm" else torch.float8_e4m3fn
    offs = settled(meta(e, dtype=torch.int32), m, 16)
    assert (offs.dtype, offs.shape, offs.device.type) == (torch.int32, (e,), "meta")
    wide = {"dtype": torch.float32}
    forward = (meta(m, k, dtype=fp8), meta(e, n, k, dtype=fp8).transpose(1, 2), meta(m, **wide), meta(e, n, **wide))
    grad_input = (meta(m, n, dtype=fp8), meta(e, k, n, dtype=fp8).transpose(1, 2), meta(m, **wide), meta(e, k, **wide))
    grad_weight = (
        meta(n, m_pad, dtype=fp8),
        meta(k, m_pad, dtype=fp8).t(),
        meta(e, n, **wide),
        meta(e, k, **wide),
    )
    for operands, shape in ((forward, (m, n)), (grad_input, (m, k)), (grad_weight, (e, n, k))):
        for fast in (False, True):
            out = call_torch(*operands, offs, fast)
            assert (tuple(out.shape), out.dtype, out.is_contiguous()) == (shape, torch.bfloat16, True)

    other = torch.float8_e4m3fn if vendor == "rocm" else torch.float8_e4m3fnuz
    with pytest.raises(RuntimeError, match="E4M3 FP8 type"):
        call_torch(forward[0].to(other), forward[1].to(other), *forward[2:], offs, False)
    with pytest.raises(RuntimeError, match="row major"):
        call_torch(forward[0].t().contiguous().t(), *forward[1:], offs, False)
    with pytest.raises(RuntimeError, match="column major"):
        call_torch(forward[0], forward[1].contiguous(), *forward[2:], offs, False)
    with pytest.raises(RuntimeError, match="elements"):
        call_torch(*grad_weight[:2], meta(n, **wide), meta(e, k, **wide), offs, False)


def test_what_torch_is_called_with_in_bf16(vendor: str) -> None:
    """The bf16 calls, UNCALIBRATED on ROCm: rows, and groups along the contraction after padding to 8."""
    a, b = meta(40, 64, dtype=torch.bfloat16), meta(4, 64, 32, dtype=torch.bfloat16)
    offs = meta(4, dtype=torch.int32)
    assert tuple(call_torch(a, b, None, None, offs, False).shape) == (40, 32)
    left, right = meta(32, 48, dtype=torch.bfloat16), meta(64, 48, dtype=torch.bfloat16).t()
    assert tuple(call_torch(left, right, None, None, offs, False).shape) == (4, 32, 64)


# --- the custom ops ---------------------------------------------------------------------------------------------------


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The custom ops pass torch's own checks; fake and real agree in shape, dtype and stride, for E=1 and M=0 too."""
    monkeypatch.setenv(CHECK, "1")
    op = torch.ops.fp8stack.grouped_scaled_mm.default
    for e, m in ((3, 32), (1, 16), (2, 0)):
        offs = ends(*[m // e // 16 * 16] * e)
        a, b = (x.view(torch.uint8) for x in (codes(m, 32), codes(e, 16, 32, seed=1)))
        rest = (offs, 16, torch.bfloat16, None, False)
        torch.library.opcheck(op, (a, "e4m3fn", b.transpose(1, 2), "e4m3fn", scales(m), scales(e, 16), *rest))
        a, b = (x.view(torch.uint8) for x in (codes(32, m), codes(16, m, seed=1)))
        rest = (offs, 16, torch.float32, "reference", True)
        torch.library.opcheck(op, (a, "e4m3fn", b.t(), "e4m3fn", scales(e, 32), scales(e, 16), *rest))
        op_bf16 = torch.ops.fp8stack.grouped_mm.default
        x, w, dy = torch.ones(m, 16).bfloat16(), torch.ones(e, 16, 8).bfloat16(), torch.ones(m, 8).bfloat16()
        torch.library.opcheck(op_bf16, (x, w, offs, torch.bfloat16, None))
        torch.library.opcheck(op_bf16, (dy.t(), x, offs, torch.float32, None))
        torch.library.opcheck(torch.ops.fp8stack.checked_offs.default, (offs, m))


def test_single_scale_is_spread() -> None:
    """One inverse scale () for all of an operand, as tensorwise weights have it, is that scale everywhere."""
    a, b, offs = codes(8, 32), codes(2, 16, 32, seed=1).transpose(1, 2), ends(3, 5)
    expected = grouped_scaled_mm(a, b, scales(8), torch.full((2, 16), 0.3), offs)
    assert_bits_equal(expected, grouped_scaled_mm(a, b, scales(8)[:, None], torch.tensor(0.3), offs), "product")


def test_scales_one_after_the_other() -> None:
    """The sum times the inverse scale of the row, rounded, times that of the column, rounded, then once to bf16."""
    a, b, offs = codes(8, 32), codes(2, 16, 32, seed=1).transpose(1, 2), ends(3, 5)
    inverse_a, inverse_b = scales(8, seed=2), scales(2, 16, seed=3)
    exact = grouped_scaled_mm(a, b, ONE, ONE, offs, torch.float32)
    factor = torch.cat([inverse_b[:1].expand(3, 16), inverse_b[1:].expand(5, 16)])
    expected = exact * inverse_a[:, None] * factor
    assert_bits_equal(expected, grouped_scaled_mm(a, b, inverse_a, inverse_b, offs, torch.float32), "float32")
    assert_bits_equal(expected.bfloat16(), grouped_scaled_mm(a, b, inverse_a, inverse_b, offs), "bf16")


def test_no_backend_without_a_record() -> None:
    """BACKENDS and the tables name the same backends."""
    named = {row[-1] for row in (*grouped_gemm._TABLE, *grouped_gemm._TABLE_BF16)}
    assert named <= set(grouped_gemm.BACKENDS)


def test_the_timing_script_sees_a_wrong_result() -> None:
    """suites/perf/grouped_gemm.py reports no time for a result with a NaN, a foreign row or one wrong element."""
    from suites.perf import grouped_gemm as perf

    expected = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert perf.wrong(expected, expected.clone()) is None
    assert perf.wrong(expected, (expected.float() * (1 + 2.0**-7)).bfloat16()) is None
    for at, value in (((3, 4), float("nan")), ((3, 4), float(expected[3, 4]) + 0.3), ((7,), 0.0)):
        spoilt = expected.clone()
        spoilt[at] = value
        assert perf.wrong(expected, spoilt) is not None, (at, value)


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"grouped_gemm-sweep-{kind}") for kind in grouped_kernel.KINDS])
def test_the_sweep_has_the_table_s_rows(kind: str) -> None:
    """What is swept fits the shared memory of an H200, contains the table's tile, and names no configuration twice."""
    from suites.perf import grouped_gemm as perf

    for in_rows in (True, False):
        rows = perf.chosen_configs(kind, 227 * 1024, in_rows, 16, 140)
        assert len({perf.name(row) for row in rows}) == len(rows) == 140
        assert in_rows or not any(row.specialize for row in rows)
        table = grouped_kernel.GROUPED_CONFIGS["sm_90", grouped_kernel.size_class(in_rows, kind)]
        assert any((row.block_m, row.block_n) == (table.block_m, table.block_n) for row in rows)
        for row in rows:
            loads = (row.block_m + row.block_n) * row.block_k * row.stages * (2 if kind == "bf16" else 1)
            assert loads * row.programs <= 227 * 1024, row


SWEPT = sorted((static.ROOT / "baselines").glob("*/grouped_gemm-*.json"))


@pytest.mark.parametrize("path", [pytest.param(path, id=f"grouped_gemm-swept-{path.stem}") for path in SWEPT])
def test_swept_rows_are_those_of_their_files(path: Path) -> None:
    """A row of the table that names a file is the best compromise there of those that specialise no warps; each file is
    named by a row.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    name = f"{path.parent.name}/{path.name}"
    named = {key for key, row in grouped_kernel.GROUPED_CONFIGS.items() if name in row.measured}
    (size_class,) = document["compromise"]
    key = document["provenance"]["target"], size_class
    assert named == {key}
    plain = [[row for row in of["rows"] if not row["config"]["specialize"]] for of in document["results"]]
    row = asdict(grouped_kernel.GROUPED_CONFIGS[key])
    assert {field: value for field, value in row.items() if field != "measured"} == compromise(plain)["config"]
