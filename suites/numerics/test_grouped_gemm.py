"""grouped_scaled_mm and grouped_mm: every backend of this device, against float64 on the dequantised operands.

Operands are quantised by the references (scaling.py and the ops' own), so that what lies between the expected value and
a result is the accumulation and one rounding; the bound is products.py's, for every element. Sizes of groups are the
awkward ones of public reports, and a tile of the interpreter has 32 rows, so that groups begin, end and hide inside of
one. Whatever is written to has been poisoned (conftest.py).

On a GPU the tables' own configurations run; in the interpreter those of its rows, and every other way through the
kernel by configurations of their own. Not here: which backend is chosen, refusals (unit/test_grouped_gemm.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8stack import _triton, formats, scaling
from fp8stack.device import OVERRIDE, detect
from fp8stack.kernels import grouped_kernel, launch
from fp8stack.kernels.colwise import quantize_colwise_grouped_reference
from fp8stack.kernels.experts import quantize_experts_reference
from fp8stack.kernels.grouped_gemm import (
    CHECK,
    grouped_mm,
    grouped_mm_reference,
    grouped_scaled_mm,
    grouped_scaled_mm_reference,
)
from suites.compare import assert_bits_equal, assert_sqnr
from suites.numerics.products import Record, accumulation, assert_within
from suites.numerics.thresholds import GROUPED_FLOOR_DB, GROUPED_SIZES, GROUPED_SQNR_DB

# The interpreter multiplies with NumPy, which warns where a NaN is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ARCH_OF = {"e4m3fn": "gfx950", "e4m3fnuz": "gfx942"}

# Name -> sizes of the groups, and rows past the last. Empty groups in front, in the middle, at the end, all but one
# (MSLK#158, pytorch#172439); bounds inside of tiles (DeepGEMM#450); groups of one row (DeepGEMM#268); one that is
# larger than a tile; no rows at all (pytorch#192497).
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "ragged": ((6, 0, 32, 5, 0, 1), 7),
    "inside-tiles": ((32, 34, 17), 0),
    "one-row": ((1,) * 8, 3),
    "all-in-one": ((0, 70, 0, 0), 0),
    "one-group": ((40,), 1),
    "no-rows": ((0, 0, 0), 0),
    "no-rows-but-a-tail": ((0, 0), 5),
}
N, K = 80, 96  # neither divides a tile


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad offs raise, as they do wherever FP8STACK_CHECK=1."""
    monkeypatch.setenv(CHECK, "1")


@pytest.fixture
def backends(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> tuple[str, ...]:
    """The backends that this device has for the case's format, the arch overridden where it speaks another."""
    fmt = str(request.getfixturevalue("fmt"))
    here = ("triton",) if device == "cuda" or _triton.INTERPRETING else ()
    native = device == "cuda" and detect(device).target.native_fp8_matmul and detect(device).target.e4m3 == fmt
    if not native:
        monkeypatch.setenv(OVERRIDE, ARCH_OF[fmt])
    if device == "cuda":
        here = ("torch", *here) if native else ("simulated",)
    else:
        here = (*here, "simulated")
    record_property("arch", detect(device).arch.name)
    record_property("backend", "+".join((*here, "reference")))
    return (*here, "reference")


def cases(*suffixes: str, formats_: tuple[str, ...] = tuple(ARCH_OF)) -> pytest.MarkDecorator:
    """Both forms in both dialects; one id a case."""
    return pytest.mark.parametrize(
        ("form", "fmt", "suffix"),
        [
            pytest.param(form, fmt, suffix, id=f"grouped_gemm-{fmt}-{form}-{suffix}")
            for form in ("rows", "contraction")
            for fmt in formats_
            for suffix in suffixes
        ],
    )


@dataclass(frozen=True)
class Problem:
    """Operands of one call, the exact product, and the product of absolute values (float64, on the CPU)."""

    a: torch.Tensor
    b: torch.Tensor
    inverse_a: torch.Tensor
    inverse_b: torch.Tensor
    offs: torch.Tensor
    expected: torch.Tensor
    magnitude: torch.Tensor
    high_precision: torch.Tensor

    def to(self, device: str) -> tuple[torch.Tensor, ...]:
        """Operands, inverse scales and offs, on a device; through bytes, as float8 tensors copy strides badly."""
        moved = [x.view(torch.uint8).to(device).view(x.dtype) for x in (self.a, self.b)]
        return (*moved, self.inverse_a.to(device), self.inverse_b.to(device), self.offs.to(device))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """bf16; rows differ in size, so that a scale taken from a neighbour shows."""
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.rand((*shape[:-1], 1), generator=generator) * 6 - 3)).to(torch.bfloat16)


def ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_group(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, in_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact products of float64 operands a group, and those of their absolute values; zero where no rows are."""
    shape = (left.shape[0], right.shape[-1]) if in_rows else (len(offs), left.shape[0], right.shape[-1])
    out, magnitude = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    start = 0
    for group, end in enumerate(offs.tolist()):
        for to, x, y in ((out, left, right), (magnitude, left.abs(), right.abs())):
            if in_rows:
                to[start:end] = x[start:end] @ y[group]
            else:
                to[group] = x[:, start:end] @ y[start:end]
        start = end
    return out, magnitude


def rows_problem(sizes: tuple[int, ...], tail: int, n: int, k: int, fmt: str, seed: int) -> Problem:
    """x (M,K) by W (E,N,K): a scale a row of each, not powers of two."""
    generator = torch.Generator().manual_seed(seed)
    offs, m = ends(sizes), sum(sizes) + tail
    x, w = normal((m, k), generator), normal((len(sizes), n, k), generator)
    a, inverse_a = scaling.quantize_reference(x, fmt, dim=1, pow2=False)
    b, inverse_b = quantize_experts_reference(w, fmt, pow2=False)
    left = formats.decode(a, fmt).double() * inverse_a[:, None].double()
    right = (formats.decode(b, fmt).double() * inverse_b[..., None].double()).transpose(1, 2)
    expected, magnitude = by_group(left, right, offs, True)
    exact = by_group(x.double(), w.double().transpose(1, 2), offs, True)[0]
    return Problem(a, b.transpose(1, 2), inverse_a, inverse_b, offs, expected, magnitude, exact)


def contraction_problem(
    sizes: tuple[int, ...], tail: int, n: int, k: int, fmt: str, seed: int, alignment: int = 16
) -> Problem:
    """dY^T (N,M) by x (M,K): a scale a column of each group, groups padded as the quantiser writes them."""
    generator = torch.Generator().manual_seed(seed)
    offs, m = ends(sizes), sum(sizes) + tail
    dy, x = normal((m, n), generator), normal((m, k), generator)
    a, inverse_a, padded = quantize_colwise_grouped_reference(dy, offs, fmt, pow2=False, alignment=alignment)
    b, inverse_b, _ = quantize_colwise_grouped_reference(x, offs, fmt, pow2=False, alignment=alignment)
    left, right = formats.decode(a, fmt).double().t(), formats.decode(b, fmt).double()
    expected, magnitude = by_group(left, right, padded, False)
    factor = inverse_a[:, :, None].double() * inverse_b[:, None, :].double()
    exact = by_group(dy.double().t(), x.double(), offs, False)[0]
    return Problem(a.t(), b, inverse_a, inverse_b, padded, expected * factor, magnitude * factor, exact)


def without_gaps(given: Problem, sizes: tuple[int, ...], tail: int) -> Problem:
    """A contraction_problem with groups one after the other, and `tail` rows of the first group past the last end."""
    starts = [0, *given.offs.tolist()][:-1]
    kept = [start + row for start, size in zip(starts, sizes, strict=True) for row in range(size)]
    index = torch.tensor(kept + kept[:tail])
    a, b = given.a.view(torch.uint8)[:, index], given.b.view(torch.uint8)[index]
    return replace(given, a=a.view(given.a.dtype), b=b.view(given.b.dtype), offs=ends(sizes))


def problem(form: str, *arguments: Any) -> Problem:
    return rows_problem(*arguments) if form == "rows" else contraction_problem(*arguments)


def multiply(backend: str, device: str, given: Problem, **options: Any) -> torch.Tensor:
    """The op by a backend, which must be the one that ran."""
    with launch.recording() as ran:
        out = grouped_scaled_mm(*given.to(device), backend=backend, **options)
    assert ran == {"grouped_scaled_mm": backend}
    return out


# --- the product ------------------------------------------------------------------------------------------------------


@cases(*GROUPS)
def test_products(
    form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """Every element is the exact product of its group, scaled and rounded once; zero where no rows are."""
    sizes, tail = GROUPS[suffix]
    given = problem(form, sizes, tail, N, K, fmt, seed)
    for backend in backends:
        dtype = torch.bfloat16 if backend == "torch" or suffix == "ragged" else torch.float32
        out = multiply(backend, device, given, out_dtype=dtype)
        assert out.dtype == dtype
        assert out.is_contiguous()
        allowed = accumulation(backend, device, fp8=True)
        assert_within(given.expected, given.magnitude, out, allowed, backend, record_property)
        if form == "rows":
            assert int(torch.count_nonzero(out[sum(sizes) :])) == 0, "rows past the last end are not zero"
        else:
            empty = [group for group, size in enumerate(sizes) if size == 0]
            assert int(torch.count_nonzero(out[empty])) == 0, "an expert without rows has a gradient"


@cases("sqnr")
def test_sqnr(
    form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """Against float64 without quantisation each backend keeps the SQNR of its format."""
    rows = {size: row for (*key, size), row in GROUPED_SQNR_DB.items() if key == [fmt, form]}
    assert rows
    for size, row in rows.items():
        assert row.at_least >= GROUPED_FLOOR_DB
        m, n, k = GROUPED_SIZES[size]
        given = problem(form, (m // 4, 0, m // 4, m // 2), 0, n, k, fmt, seed)
        for backend in backends:
            out = multiply(backend, device, given)
            measured = assert_sqnr(given.high_precision, out, row.at_least, f"{backend}, {size}")
            record_property(f"{backend}_{size}_sqnr_db", measured)


@cases("modes", formats_=("e4m3fn",))
def test_fast_accumulation(
    form: str,
    fmt: str,
    suffix: str,
    device: str,
    seed: int,
    backends: tuple[str, ...],
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fast accumulation or not: both within the bound of a short sum; each by the kernel's configuration of its own.

    Where sums are float32 anyway, the same bits.
    """
    launched: list[tuple[bool, grouped_kernel.GroupedConfig]] = []
    real = grouped_kernel.launch_grouped

    def launch_grouped(*arguments: Any) -> torch.Tensor:
        launched.append((arguments[7], arguments[8]))
        return real(*arguments)

    monkeypatch.setattr(grouped_kernel, "launch_grouped", launch_grouped)
    given = problem(form, (48, 16, 0, 33), 0, N, 160, fmt, seed)
    target, table = detect(device).target.name, grouped_kernel.GROUPED_CONFIGS
    for backend in backends:
        launched.clear()
        results = [
            multiply(backend, device, given, fast_accum=fast, out_dtype=torch.bfloat16) for fast in (False, True)
        ]
        for out in results:
            assert_within(
                given.expected,
                given.magnitude,
                out,
                accumulation(backend, device, fp8=True),
                backend,
                record_property,
            )
        if backend == "triton":
            kinds = [(True, "fp8-exact"), (False, "fp8")]
            expected = [
                (exact, table[target, grouped_kernel.size_class(form == "rows", kind)]) for exact, kind in kinds
            ]
            assert expected == launched
        if backend in ("reference", "simulated"):
            assert_bits_equal(*results, f"{backend} with and without fast accumulation")


@cases("long", formats_=("e4m3fn",))
def test_exact_accumulation(
    form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record
) -> None:
    """Without fast accumulation a sum of 2048 terms of one sign is as good as one of 128 (products.py, "fp8-exact").

    A unit that keeps 14 bits to the end drops what is small beside the sum, always to the same side: 4 % in all.
    """
    sizes, k = ((48, 0, 17), 2048) if form == "rows" else ((2048, 0, 17), 64)
    given = problem(form, sizes, 0, N, k, fmt, seed)
    a, b = ((x.view(torch.uint8) & 0x7F).view(x.dtype) for x in (given.a, given.b))
    given = replace(given, a=a, b=b)
    for backend in backends:
        out = multiply(backend, device, given, out_dtype=torch.bfloat16 if backend == "torch" else torch.float32)
        allowed = accumulation(backend, device, fp8=True, long=True)
        assert_within(given.magnitude, given.magnitude, out, allowed, backend, record_property)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"grouped_gemm-{fmt}-mixed") for fmt in ARCH_OF])
def test_mixed_formats(fmt: str, device: str, seed: int, backends: tuple[str, ...], record_property: Record) -> None:
    """e5m2 by e4m3 and e5m2 by e5m2, which torch's grouped products do not take."""
    e5m2 = {"e4m3fn": "e5m2", "e4m3fnuz": "e5m2fnuz"}[fmt]
    for left, right in ((e5m2, fmt), (e5m2, e5m2)):
        given = rows_problem((5, 0, 12), 2, 48, 64, right, seed)
        codes, inverse = scaling.quantize_reference(
            normal((19, 64), torch.Generator().manual_seed(seed)), left, dim=1, pow2=False
        )
        decoded = [formats.decode(codes, left).double(), formats.decode(given.b.transpose(1, 2), right).double()]
        scaled = [decoded[0] * inverse[:, None].double(), decoded[1] * given.inverse_b[..., None].double()]
        expected, magnitude = by_group(scaled[0], scaled[1].transpose(1, 2), given.offs, True)
        given = replace(given, a=codes, inverse_a=inverse)
        for backend in backends:
            if backend != "torch":
                out = multiply(backend, device, given, out_dtype=torch.float32)
                allowed = accumulation(backend, device, fp8=True)
                assert_within(expected, magnitude, out, allowed, backend, record_property)


# --- every way through the kernel -------------------------------------------------------------------------------------


def paths() -> list[Any]:
    """(kind, whether groups are in the rows, a and b contiguous along the contraction, changes to a configuration)."""
    found = []
    for kind, in_rows, along in (
        ("fp8", True, (True, True)),
        ("fp8", False, (True, True)),
        ("bf16", True, (True, True)),
        ("bf16", True, (True, False)),
        ("bf16", False, (False, False)),
        ("bf16", False, (True, False)),
        ("bf16", False, (False, True)),
        ("bf16", False, (True, True)),
    ):
        for tma in (True, False):
            layout = "".join("k" if one else "m" for one in along)
            name = f"grouped_gemm-{kind}-{'rows' if in_rows else 'contraction'}-{layout}-{'tma' if tma else 'plain'}"
            found.append(pytest.param(kind, in_rows, along, tma, id=name))
    return found


@pytest.mark.skipif(not _triton.INTERPRETING, reason="configurations of the interpreter; on a GPU the tables' own run")
@pytest.mark.parametrize(("kind", "in_rows", "along", "tma"), paths())
def test_paths(
    kind: str, in_rows: bool, along: tuple[bool, bool], tma: bool, seed: int, record_property: Record
) -> None:
    """Both loaders, both layouts, whole and partial steps, one and two stores a tile: all give the product.

    N = 80 and K = 96 under tiles of 64 (huggingface/kernels-community#1158, #1159 bounded M alone: an overhang of N
    went into the next token's row, and the next token's row into a sum over K).

    Of bf16 along the contraction the groups end anywhere, and the rows are a multiple of 8: nothing has to be copied.
    """
    sizes, tail = ((9, 0, 20, 16), 3) if kind == "bf16" and not in_rows else ((16, 0, 48), 5)
    row = grouped_kernel.GROUPED_CONFIGS["cpu", grouped_kernel.size_class(in_rows, kind)]
    for block_k, split in ((32, 1), (64, 2)):  # 96 and 16 are no multiples of 64; N and K none of a tile
        changed = replace(row, block_m=32, block_n=64, block_k=block_k, tma=tma, flatten=tma, split=split)
        for alignment in (16,) if in_rows else (16, 64) if kind == "fp8" else (1,):
            arguments = (sizes, tail, N, K, "e4m3fnuz", seed)
            given = rows_problem(*arguments) if in_rows else contraction_problem(*arguments, alignment)
            a, b, expected, magnitude = given.a, given.b, given.expected, given.magnitude
            scales: tuple[torch.Tensor | None, ...] = (given.inverse_a, given.inverse_b)
            offs = given.offs
            if kind == "bf16":
                a, b = (formats.decode(x, "e4m3fnuz").bfloat16() for x in (a, b))
                if not in_rows:
                    a, b, offs = a[:, : sum(sizes) + tail], b[: sum(sizes) + tail], ends(sizes)
                expected, magnitude = by_group(a.double(), b.double(), offs, in_rows)
                a = a.contiguous() if along[0] else a.t().contiguous().t()
                b = b.transpose(-2, -1).contiguous().transpose(-2, -1) if along[1] else b.contiguous()
                scales = (None, None)
            out = grouped_kernel.launch_grouped(a, b, *scales, offs, torch.float32, alignment, False, changed, "cpu")
            allowed = accumulation("triton", "cpu", fp8=True)
            assert_within(expected, magnitude, out, allowed, f"{block_k}_{split}_{alignment}", record_property)


@pytest.mark.skipif(not _triton.INTERPRETING, reason="on a GPU an unaligned group of codes is the op's to refuse")
def test_unaligned_groups_come_out_as_nan(seed: int) -> None:
    """A group along the contraction that breaks the promise is NaN in the kernel's result; the others are right."""
    given = contraction_problem((16, 32, 16, 0), 0, 48, 64, "e4m3fn", seed)
    offs = torch.tensor([16, 44, 64, 64], dtype=torch.int32)
    for tma in (True, False):
        row = replace(grouped_kernel.GROUPED_CONFIGS["cpu", "contraction fp8"], tma=tma, flatten=tma)
        out = grouped_kernel.launch_grouped(
            given.a, given.b, given.inverse_a, given.inverse_b, offs, torch.float32, 16, False, row, "cpu"
        )
        assert bool(out[1:3].isnan().all())
        assert_within(given.expected[:1], given.magnitude[:1], out[:1], 2.0**-18, "first", lambda name, value: None)
        assert int(torch.count_nonzero(out[3])) == 0


# --- what one unit does to its neighbours -----------------------------------------------------------------------------


@cases("nan", formats_=("e4m3fnuz",))
def test_nan_stays_in_its_unit(
    form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...]
) -> None:
    """NaN codes and a NaN scale of one unit leave every other unit's bits alone, and never become a number."""
    given = problem(form, (16, 0, 16, 32), 3, 48, 64, fmt, seed)
    code = formats.get(fmt).nan_code
    a, inverse = given.a.clone(), given.inverse_a.clone()
    if form == "rows":
        a.view(torch.uint8)[20] = code  # a row of group 2
        inverse[20] = math.nan
        hit: Any = (20,)
    else:
        a.view(torch.uint8)[5, 16:32] = code  # row 5 of the gradient of group 2, beside groups in one step
        inverse[2, 5] = math.nan
        hit = (2, 5)
    spoilt = replace(given, a=a, inverse_a=inverse)
    for backend in backends:
        clean, out = (multiply(backend, device, one).clone() for one in (given, spoilt))
        assert bool(out[hit].isnan().all()), backend
        clean[hit] = out[hit] = 0.0
        assert_bits_equal(clean, out, f"other units by {backend}")


@cases("guards", formats_=("e4m3fn",))
def test_reads_nothing_else(
    form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...]
) -> None:
    """Operands and scales inside of larger buffers full of NaN: the bits of the contiguous call (pytorch/ao#4634)."""
    given = problem(form, (7, 0, 33), 0, 144, 80, fmt, seed)
    code = formats.get(fmt).nan_code

    def inside(x: torch.Tensor) -> torch.Tensor:
        """A 2-D view with NaN rows above and below and 16 NaN columns to either side."""
        flat = x.reshape(-1, x.shape[-1])
        fill = float("nan") if x.dtype == torch.float32 else code
        bits = flat if x.dtype == torch.float32 else flat.view(torch.uint8)
        buffer = torch.full((flat.shape[0] + 2, flat.shape[1] + 32), fill, dtype=bits.dtype, device=device)
        buffer[1:-1, 16:-16] = bits.to(device)
        return buffer[1:-1, 16:-16].view(x.dtype)

    a, b, inverse_a, inverse_b, offs = given.to(device)
    guarded = inside(a)
    scale_a = torch.full((inverse_a.numel() + 6,), math.nan, device=device)
    scale_a[3:-3] = inverse_a.reshape(-1)
    turned = b.transpose(-2, -1).contiguous()
    right = inside(turned).view(turned.shape) if turned.dim() == 2 else torch.stack([inside(one) for one in turned])
    for backend in backends:
        expected = grouped_scaled_mm(a, b, inverse_a, inverse_b, offs, backend=backend)
        out = grouped_scaled_mm(
            guarded, right.transpose(-2, -1), scale_a[3:-3].view(inverse_a.shape), inverse_b, offs, backend=backend
        )
        assert_bits_equal(expected, out, f"product by {backend}")


@pytest.mark.skipif(not _triton.INTERPRETING, reason="every address is seen in the interpreter only")
@cases("addresses", formats_=("e4m3fn",))
def test_touches_nothing_else(
    form: str, fmt: str, suffix: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lane reads or writes past an operand, a scale or offs, whichever way operands are loaded (FBGEMM#6158).

    Values cannot show it: what is read beyond the last row is computed with and thrown away.
    """
    from triton.runtime import interpreter

    given = problem(form, (7, 0, 33), 0, N, K, fmt, seed)
    tensors = (given.a, given.b, given.inverse_a, given.inverse_b, given.offs)
    apart = [torch.zeros(x.numel() * x.itemsize + 8192, dtype=torch.uint8) for x in tensors]  # guards to either side
    moved = []
    for x, buffer in zip(tensors, apart, strict=True):
        turned = x.transpose(-2, -1) if x is given.b else x
        inside = buffer[4096:-4096].view(turned.dtype).view(turned.shape).copy_(turned)
        moved.append(inside.transpose(-2, -1) if x is given.b else inside)
    guards = [(buffer.data_ptr(), buffer.numel()) for buffer in apart]
    seen: list[int] = []

    def watched(name: str, real: Any) -> Any:
        def access(pointers: Any, *rest: Any) -> Any:
            addresses = pointers[rest[0 if name == "load" else 1]].astype("int64")
            for base, size in guards:
                beside = (addresses >= base) & (addresses < base + size)
                beside &= (addresses < base + 4096) | (addresses >= base + size - 4096)
                seen.append(int(beside.sum()))
            return real(pointers, *rest)

        return access

    real = interpreter._interpreter
    fake = SimpleNamespace(**{name: getattr(real, name) for name in dir(real)})
    fake.load, fake.store = watched("load", real.load), watched("store", real.store)
    monkeypatch.setattr(interpreter, "_interpreter", fake)
    row = grouped_kernel.GROUPED_CONFIGS["cpu", grouped_kernel.size_class(form == "rows", "fp8")]
    for tma in (True, False):
        changed = replace(row, tma=tma, flatten=tma, block_k=64)  # divides neither K nor a group
        grouped_kernel.launch_grouped(*moved, torch.float32, 16, False, changed, "cpu")
    assert len(seen) > 50
    assert sum(seen) == 0, f"{sum(seen)} accesses beside an operand"


@cases("twice", formats_=("e4m3fn",))
def test_twice_the_same(form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...]) -> None:
    """The second call has the bits of the first (triton#4217)."""
    given = problem(form, GROUPS["ragged"][0], 3, 48, 64, fmt, seed)
    for backend in backends:
        assert_bits_equal(multiply(backend, device, given), multiply(backend, device, given), backend)


# --- offs that nobody has checked -------------------------------------------------------------------------------------

BAD_OFFS: dict[str, tuple[list[int], list[int], str]] = {
    # ends of groups of 64 rows (96 with the padding), as clamped, what a check says
    "decreasing": ([32, 16, 48], [32, 32, 48], "group 1 ends at 16, but the group before it ends at 32"),
    "negative": ([-16, 16, 64], [0, 16, 64], "group 0 ends at -16, but the first group starts at 0"),
    "out-of-range": ([16, 128, 144], [16, 128, 128], "group 1 ends at 128, but there are (64|96) rows"),
}


@cases(*BAD_OFFS, formats_=("e4m3fn",))
def test_bad_offs(
    form: str,
    fmt: str,
    suffix: str,
    device: str,
    seed: int,
    backends: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checked, bad ends are a ValueError that names the group; unchecked, every backend sees them clamped."""
    bad, clamped, words = BAD_OFFS[suffix]
    given = problem(form, (16, 16, 32), 0, 48, 64, fmt, seed)
    wrong = replace(given, offs=torch.tensor(bad, dtype=torch.int32))
    right = replace(given, offs=torch.tensor(clamped, dtype=torch.int32).clamp(max=given.a.shape[form != "rows"]))
    for backend in backends:
        with pytest.raises(ValueError, match=words) as caught:
            multiply(backend, device, wrong)
        assert str(caught.value).count("; ") == 2, "what; expected; what next"
    monkeypatch.delenv(CHECK)
    for backend in backends:
        assert_bits_equal(multiply(backend, device, right), multiply(backend, device, wrong), backend)


# --- bf16 -------------------------------------------------------------------------------------------------------------


def bf16_backends(device: str) -> tuple[str, ...]:
    return ("torch", "triton", "reference") if device == "cuda" or _triton.INTERPRETING else ("torch", "reference")


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        pytest.param(form, suffix, id=f"grouped_mm-bf16-{form}-{suffix}")
        for form in ("rows", "contraction")
        for suffix in GROUPS
    ],
)
def test_bf16_products(form: str, suffix: str, device: str, seed: int, record_property: Record) -> None:
    """bf16 in the layouts of a layer; groups along the contraction of any size; the same contract."""
    sizes, tail = GROUPS[suffix]
    generator = torch.Generator().manual_seed(seed)
    m, e = sum(sizes) + tail, len(sizes)
    if form == "rows":
        a, b = normal((m, K), generator), normal((e, N, K), generator).transpose(1, 2)
    else:
        a, b = normal((m, N), generator).t(), normal((m, K), generator)
    expected, magnitude = by_group(a.double(), b.double(), ends(sizes), form == "rows")
    for backend in bf16_backends(device):
        with launch.recording() as ran:
            out = grouped_mm(a.to(device), b.to(device), ends(sizes).to(device), backend=backend)
        assert ran == {"grouped_mm": backend}
        assert_within(expected, magnitude, out, accumulation(backend, device, fp8=False), backend, record_property)
        if form == "rows":
            assert int(torch.count_nonzero(out[sum(sizes) :])) == 0
        else:
            assert int(torch.count_nonzero(out[[size == 0 for size in sizes]])) == 0


@pytest.mark.parametrize(
    ("sizes", "tail", "pad"),
    [
        pytest.param(sizes, tail, pad, id=f"grouped_mm-bf16-{name}{'-pad' if pad else ''}")
        for name, sizes, tail in (("k-aligned", (9, 0, 20, 16), 3), ("k-copied", (9, 0, 20, 16), 0))
        for pad in (False, True)
    ],
)
def test_bf16_contiguous_along_the_contraction(
    sizes: tuple[int, ...], tail: int, pad: bool, device: str, seed: int, record_property: Record
) -> None:
    """Operands that are contiguous along the contraction, or that pad=True makes so: groups still end where they do.

    Rows that are a multiple of 8 are read as they lie, others are copied first.
    """
    generator = torch.Generator().manual_seed(seed)
    m, n, k = sum(sizes) + tail, N - 3 * pad, K - 3 * pad
    a, b = normal((n, m), generator), normal((k, m), generator).t()
    expected, magnitude = by_group(a.double(), b.double(), ends(sizes), False)
    for backend in bf16_backends(device):
        for layout, left in (("k", a), ("m", a.t().contiguous().t())):
            out = grouped_mm(left.to(device), b.to(device), ends(sizes).to(device), backend=backend, pad=pad)
            allowed = accumulation(backend, device, fp8=False)
            assert_within(expected, magnitude, out, allowed, f"{backend}_{layout}", record_property)


@pytest.mark.parametrize(
    "backend", [pytest.param(name, id=f"grouped_mm-bf16-{name}-nan") for name in ("ours", "torch")]
)
def test_bf16_nan_stays_in_its_group(backend: str, device: str, seed: int) -> None:
    """Groups meet inside of one step of the contraction: a NaN in one leaves the others' bits alone."""
    backend = bf16_backends(device)[-2] if backend == "ours" else "torch"
    generator = torch.Generator().manual_seed(seed)
    a, b, offs = normal((40, 48), generator).t(), normal((40, 64), generator), ends((9, 0, 20, 11))
    spoilt = a.clone()
    spoilt[7, 12] = math.nan
    clean, out = (grouped_mm(x.to(device), b.to(device), offs.to(device), backend=backend).cpu() for x in (a, spoilt))
    assert bool(out[2, 7].isnan().all())
    clean[2, 7] = out[2, 7] = 0.0
    assert_bits_equal(clean, out, "other groups")


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k"),
    [pytest.param(n, k, id=f"grouped_gemm-{n}x{k}-any-size") for n, k in ((10, 20), (1, 1), (17, 1), (1, 33))],
)
def test_any_size(n: int, k: int, device: str, seed: int, record_property: Record) -> None:
    """The references take any N and K (pytorch#172440), and pad=True lets every backend, and any groups."""
    record: Record = record_property
    sizes, tail = (3, 0, 18), 2
    for form in ("rows", "contraction"):
        given = problem(form, sizes, tail, n, k, "e4m3fn", seed)
        if form == "contraction":  # codes of a tail are not zero: they must not be read
            given = without_gaps(given, sizes, tail)
        out = grouped_scaled_mm_reference(given.a, given.b, given.inverse_a, given.inverse_b, given.offs, torch.float32)
        assert_within(given.expected, given.magnitude, out, 2.0**-22, f"{form}_reference", record)
        out = grouped_scaled_mm(*given.to(device), out_dtype=torch.float32, pad=True)
        allowed = accumulation("triton", device, fp8=True)
        assert_within(given.expected, given.magnitude, out, allowed, f"{form}_padded", record)
        wide = [formats.decode(x, "e4m3fn") for x in (given.a, given.b)]
        expected, magnitude = by_group(wide[0].double(), wide[1].double(), given.offs, form == "rows")
        out = grouped_mm_reference(*wide, given.offs)
        assert_within(expected, magnitude, out, 2.0**-22, f"{form}_high_precision", record)


@cases("compiled", formats_=("e4m3fn",))
def test_compiled(form: str, fmt: str, suffix: str, device: str, seed: int, backends: tuple[str, ...]) -> None:
    """In a graph without breaks the op has the eager call's bits, also where there is nothing to contract (#192497)."""
    # Not by Inductor, which would see one opaque call; a layer is compiled by it in test_moe.py.
    compiled = torch.compile(grouped_scaled_mm, fullgraph=True, dynamic=False, backend="aot_eager")
    for sizes in ((6, 0, 10), (0, 0)):
        arguments = problem(form, sizes, 0, 48, 64, fmt, seed).to(device)
        assert_bits_equal(grouped_scaled_mm(*arguments), compiled(*arguments), "compiled")
