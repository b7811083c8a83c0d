"""scaled_mm: which backend a pair of formats gets, what is refused and how, and the arithmetic on a CPU.

Whole layers are held to float64 in numerics/test_linear.py. Here stands what a layer never does: sizes and layouts that
hardware cannot take, the other backends, formats that a device lacks.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fp8stack import device, formats
from fp8stack.device import Detected
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch
from fp8stack.kernels.blockwise import quantize_blockwise
from fp8stack.kernels.mxfp8 import quantize_mxfp8
from fp8stack.kernels.scaled_mm import choose_backend, scaled_mm, scaled_mm_reference
from suites.cases import FORMATS, from_bits
from suites.compare import assert_bits_equal, assert_within_ulps

ONE = torch.tensor(1.0)


def codes(rows: int, columns: int, fmt: str, seed: int = 0) -> torch.Tensor:
    """Seeded normal values as FP8 codes, (rows, columns) row-major."""
    return formats.cast(torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)), fmt)


def scales(count: int, seed: int = 0) -> torch.Tensor:
    """Inverse scales that are no powers of two, float32 (count,)."""
    return torch.rand((count,), generator=torch.Generator().manual_seed(seed)) + 0.1


def operands(granularity: str, m: int, n: int, k: int, fmt: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """a (m, k), b (k, n), their scales of blocks, and what they stand for in float64, from normal numbers.

    Blocks differ in size, so that a scale taken from a neighbour shows.
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn((rows, k), generator=generator) * torch.exp2(torch.randint(-4, 5, (rows, k), generator=generator))
        for rows in (m, n)
    )
    if granularity == "1x32":
        (a, inverse_a), (b, inverse_b) = (quantize_mxfp8(x, fmt, "rceil") for x in (left, right))
        block, factors = (1, 32), [torch.exp2(x.double() - 127) for x in (inverse_a, inverse_b)]
    else:
        unit = granularity.split()[1]
        (a, inverse_a), (b, inverse_b) = quantize_blockwise(left, fmt), quantize_blockwise(right, fmt, unit)
        block, factors = (128 if unit == "128x128" else 1, 128), [inverse_a.double(), inverse_b.double()]
    wide_a = factors[0].repeat_interleave(block[1], 1)[:, :k] * formats.decode(a, fmt).double()
    wide_b = factors[1].repeat_interleave(block[1], 1)[:, :k].repeat_interleave(block[0], 0)[:n]
    return a, b.t(), inverse_a, inverse_b.t(), wide_a, (wide_b * formats.decode(b, fmt).double()).t()


# --- the backend ------------------------------------------------------------------------------------------------------

# (target, arch by override or None, format of a, format of b[, granularity]) -> backend; None: UnsupportedDtype.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "own-e4m3": ("sm_90", None, "e4m3fn", "e4m3fn", "torch"),
    "own-mixed": ("gfx942", None, "e5m2fnuz", "e4m3fnuz", "torch"),
    "own-e5m2": ("sm_90", None, "e5m2", "e5m2", "triton"),
    "emulated": ("gfx90a", None, "e4m3fn", "e5m2", "reference"),
    "foreign": ("sm_90", None, "e4m3fnuz", "e4m3fnuz", None),
    "foreign-right": ("gfx942", None, "e4m3fnuz", "e4m3fn", None),
    "foreign-emulated": ("gfx90a", None, "e4m3fnuz", "e4m3fnuz", None),
    "simulated": ("sm_90", "gfx942", "e4m3fnuz", "e4m3fnuz", "simulated"),
    "simulated-mixed": ("gfx942", "gfx950", "e5m2", "e4m3fn", "simulated"),
    "simulated-own": ("sm_90", "gfx942", "e4m3fn", "e4m3fn", "torch"),
    "simulated-two-dialects": ("sm_90", "gfx942", "e4m3fnuz", "e4m3fn", None),
    "cpu": ("cpu", None, "e4m3fn", "e4m3fn", "reference"),
    "cpu-foreign": ("cpu", None, "e4m3fnuz", "e5m2", "reference"),
    "cpu-simulated": ("cpu", "gfx942", "e4m3fnuz", "e4m3fnuz", "reference"),
    "blocks": ("gfx942", None, "e4m3fnuz", "e4m3fnuz", "1x128 128x128", "triton"),
    "blocks-gradient": ("sm_90", None, "e4m3fn", "e5m2", "1x128 1x128", "triton"),
    "blocks-emulated-arch": ("gfx90a", None, "e4m3fn", "e4m3fn", "1x128 1x128", "reference"),
    "blocks-foreign": ("sm_90", None, "e4m3fnuz", "e4m3fnuz", "1x128 128x128", None),
    "blocks-simulated": ("sm_90", "gfx942", "e4m3fnuz", "e4m3fnuz", "1x128 128x128", "simulated"),
    "blocks-cpu": ("cpu", None, "e4m3fn", "e4m3fn", "1x128 128x128", "reference"),
    "mx-gfx950": ("gfx950", None, "e4m3fn", "e4m3fn", "1x32", "triton"),
    "mx-sm_100": ("sm_100", None, "e4m3fn", "e5m2", "1x32", "triton"),
    "mx-sm_90": ("sm_90", None, "e4m3fn", "e4m3fn", "1x32", "emulated"),
    "mx-gfx90a": ("gfx90a", None, "e4m3fn", "e4m3fn", "1x32", "emulated"),
    "mx-simulated": ("gfx942", "gfx950", "e4m3fn", "e4m3fn", "1x32", "simulated"),
    "mx-cpu": ("cpu", "gfx950", "e4m3fn", "e4m3fn", "1x32", "reference"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"scaled_mm-backend-{name}") for name in CHOICES])
def test_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One table decides; a format that the device lacks runs only where the override asks for it, else it is named."""
    target, override, left, right, *granularity, expected = CHOICES[name]
    found = Detected(device.lookup(override or target), device.lookup(target), "chosen by the test", bool(override))
    monkeypatch.setattr(device, "detect", lambda where=None: found)
    a, b = codes(16, 16, left), codes(16, 16, right).t()
    if expected is not None:
        assert expected == choose_backend(a, b, *granularity)
        return
    with pytest.raises(UnsupportedDtype) as caught:
        choose_backend(a, b, *granularity)
    for word in (str(a.dtype), str(b.dtype), target, "; expected", "FP8STACK_ARCH", "chosen by the test"):
        assert word in str(caught.value)


def test_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown backend is named; `simulated` needs an override that sets another arch than the device's."""
    a, b = codes(16, 16, "e4m3fn"), codes(16, 16, "e4m3fn").t()
    with pytest.raises(ValueError, match=r"backend is 'cublas'; expected one of torch, triton, emulated, .*; pass one"):
        scaled_mm(a, b, ONE, ONE, backend="cublas")
    monkeypatch.delenv("FP8STACK_ARCH", raising=False)
    with pytest.raises(ValueError, match="FP8STACK_ARCH=gfx942"):
        scaled_mm(a, b, ONE, ONE, backend="simulated")


@pytest.mark.parametrize(
    "backend", [pytest.param(name, id=f"scaled_mm-recorded-{name}") for name in ("reference", "simulated")]
)
def test_backends_agree(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and scales that float32 holds exactly: our own backends give the same bits and are on record."""
    monkeypatch.setenv("FP8STACK_ARCH", "gfx950")
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (rows, 32), generator=generator).float() for rows in (5, 48))
    inverse_a, inverse_b = torch.exp2(torch.arange(5.0) - 2), torch.exp2(torch.arange(48.0) % 5)
    expected = ((a @ b.t()) * inverse_a[:, None] * inverse_b).to(torch.bfloat16)
    with launch.recording() as ran:
        actual = scaled_mm(
            formats.cast(a, "e4m3fn"), formats.cast(b, "e4m3fn").t(), inverse_a, inverse_b, backend=backend
        )
    assert ran == {"scaled_mm": backend}
    assert_bits_equal(expected, actual, f"product by {backend}")


@pytest.mark.parametrize(
    ("left", "right"), [pytest.param(a, b, id=f"scaled_mm-{a}-{b}") for a in FORMATS for b in FORMATS]
)
@pytest.mark.parametrize("arch", [pytest.param(arch, id=arch) for arch in ("cpu", "gfx942", "gfx950", "sm_90")])
def test_every_pair_of_formats(left: str, right: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU multiplies any two formats under any override: the product of the decoded values (pytorch/ao#1066)."""
    monkeypatch.setenv("FP8STACK_ARCH", arch)
    a, b = codes(3, 16, left, 1), codes(16, 16, right, 2)
    actual = scaled_mm(a, b.t(), ONE, ONE, out_dtype=torch.float32)
    exact = formats.decode(a, left).double() @ formats.decode(b, right).double().t()
    assert_bits_equal(exact.to(torch.float32), actual, f"{left} by {right}")


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def _nearest_float32(exact: Fraction) -> Fraction:
    """The float32 nearest to a number, ties to even: the best of three neighbours."""
    bits = int(torch.tensor(float(exact), dtype=torch.float32).view(torch.int32))
    near = {bits + step: Fraction(from_bits([(bits + step) & 0xFFFFFFFF], torch.float32).item()) for step in (-1, 0, 1)}
    return near[min(near, key=lambda pattern: (abs(near[pattern] - exact), pattern & 1))]


def test_scales_one_after_the_other() -> None:
    """The product times one inverse scale, rounded, times the other, rounded, plus the bias, rounded; not otherwise."""
    a, b = codes(5, 32, "e4m3fnuz", 3), codes(16, 32, "e4m3fnuz", 4)
    inverse_a, inverse_b, bias = scales(5, 5), scales(16, 6), scales(16, 7)
    actual = scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=torch.float32, bias=bias)
    left, right = (formats.decode(x, "e4m3fnuz").tolist() for x in (a, b))
    expected = torch.empty(5, 16)
    for m in range(5):
        for n in range(16):
            exact = sum(Fraction(x) * Fraction(y) for x, y in zip(left[m], right[n], strict=True))
            product = _nearest_float32(exact)
            once = _nearest_float32(product * Fraction(inverse_a[m].item()))
            twice = _nearest_float32(once * Fraction(inverse_b[n].item()))
            expected[m, n] = float(_nearest_float32(twice + Fraction(bias[n].item())))
    assert_bits_equal(expected, actual, "product")


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"scaled_mm-{fmt}-order") for fmt in ("e4m3fn", "e4m3fnuz")])
def test_reference_has_no_order(fmt: str) -> None:
    """Reversing the contraction changes no bit: the reference's sums of e4m3 products are exact."""
    a, b = codes(33, 512, fmt, 1), codes(16, 512, fmt, 2)
    backwards = torch.arange(511, -1, -1)
    turned = [x.view(torch.uint8)[:, backwards].view(x.dtype) for x in (a, b)]
    one = scaled_mm(a, b.t(), scales(33), scales(16), out_dtype=torch.float32)
    other = scaled_mm(turned[0], turned[1].t(), scales(33), scales(16), out_dtype=torch.float32)
    assert_bits_equal(one, other, "product, contraction reversed")


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        pytest.param((), (), id="scaled_mm-scales-tensor"),
        pytest.param((7,), (48,), id="scaled_mm-scales-rows"),
        pytest.param((7, 1), (1, 48), id="scaled_mm-scales-2d"),
        pytest.param((7,), (), id="scaled_mm-scales-row-and-tensor"),
    ],
)
def test_scale_shapes(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    """One scale in all, one a row or column, flat or 2-D, one of each kind: each multiplies what it belongs to."""
    a, b = codes(7, 32, "e4m3fn", 1), codes(48, 32, "e4m3fn", 2)
    inverse_a = scales(7, 3).reshape(shape_a) if shape_a else torch.tensor(0.3)
    inverse_b = scales(48, 4).reshape(shape_b) if shape_b else torch.tensor(0.7)
    exact = formats.decode(a, "e4m3fn").double() @ formats.decode(b, "e4m3fn").double().t()
    full_a = inverse_a.reshape(-1, 1).expand(7, 1)
    expected = (exact.to(torch.float32) * full_a * inverse_b.reshape(1, -1).expand(1, 48)).to(torch.bfloat16)
    assert_bits_equal(expected, scaled_mm(a, b.t(), inverse_a, inverse_b), "product")


@pytest.mark.parametrize("bias", [pytest.param(False, id="scaled_mm-pad"), pytest.param(True, id="scaled_mm-pad-bias")])
def test_pad(bias: bool) -> None:
    """pad=True takes any K and N: the values of the product of what was given, contiguous; row-major input or not."""
    a, b = codes(5, 37, "e4m3fnuz", 1), codes(21, 37, "e4m3fnuz", 2)
    inverse_a, inverse_b = scales(5, 3), scales(21, 4)
    offset = scales(21, 5) if bias else None
    product = (formats.decode(a, "e4m3fnuz").double() @ formats.decode(b, "e4m3fnuz").double().t()).to(torch.float32)
    expected = product * inverse_a[:, None] * inverse_b
    expected = expected if offset is None else expected + offset
    across = b.view(torch.uint8).t().contiguous().view(b.dtype)  # b as row-major (K, N)
    for given in (b.t(), across):
        actual = scaled_mm(a, given, inverse_a, inverse_b, torch.float32, bias=offset, pad=True)
        assert_bits_equal(expected, actual, "padded product")
        assert actual.is_contiguous()


def test_nothing_to_multiply() -> None:
    """No rows give no rows; a contraction over nothing gives zeros, or the bias (libraries refuse it)."""
    bias = scales(16)
    empty = scaled_mm(codes(0, 32, "e4m3fn"), codes(16, 32, "e4m3fn").t(), ONE, ONE)
    assert (tuple(empty.shape), empty.dtype) == ((0, 16), torch.bfloat16)
    a, b = codes(3, 0, "e4m3fn"), codes(16, 0, "e4m3fn").t()
    assert_bits_equal(torch.zeros(3, 16), scaled_mm(a, b, ONE, ONE, torch.float32), "product over nothing")
    expected = bias.expand(3, 16)
    assert_bits_equal(expected, scaled_mm(a, b, ONE, ONE, torch.float32, bias=bias), "bias alone")


def test_nan_stays_in_its_row_and_column() -> None:
    """A NaN code makes NaN of its row (left) or its column (right) and of nothing else."""
    a, b = codes(4, 16, "e4m3fnuz", 1), codes(16, 16, "e4m3fnuz", 2)
    for operand, at, hit in ((a, (1, 3), (1, slice(None))), (b, (5, 0), (slice(None), 5))):
        spoilt = operand.clone().view(torch.uint8)
        spoilt[at] = 0x80
        given = [spoilt.view(operand.dtype) if x is operand else x for x in (a, b)]
        isnan = scaled_mm(given[0], given[1].t(), ONE, ONE).isnan()
        expected = torch.zeros_like(isnan)
        expected[hit] = True
        assert torch.equal(expected, isnan)


def test_opcheck() -> None:
    """The custom op passes torch's own checks; fake and real agree in shape, dtype and stride, also for no rows."""
    op = torch.ops.fp8stack.scaled_mm.default
    a, b = (codes(rows, 32, "e4m3fn", rows).view(torch.uint8) for rows in (5, 48))
    for given, inverse, dtype, bias in (
        (a, ONE, torch.bfloat16, None),
        (a, scales(5), torch.float32, scales(48)),
        (a[:1], scales(1), torch.bfloat16, None),
        (a[:0], scales(0), torch.bfloat16, scales(48)),
    ):
        inverse_b = ONE if inverse.dim() == 0 else scales(48)
        granularity = "row" if inverse.dim() else "tensor"
        arguments = (given, "e4m3fn", b.t(), "e4m3fn", inverse, inverse_b, granularity, dtype, bias, None, False)
        torch.library.opcheck(op, arguments)
    for name in ("1x128 128x128", "1x32"):
        given = operands(name, 5, 48, 272, "e4m3fn")
        left, right = (x.view(torch.uint8) for x in given[:2])
        arguments = (left, "e4m3fn", right, "e4m3fn", *given[2:4], name, torch.bfloat16, None, None, False)
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(1, 16, 16, id="scaled_mm-blocks-one-block"),
        pytest.param(5, 144, 400, id="scaled_mm-blocks-last-block-short"),
        pytest.param(130, 16, 256, id="scaled_mm-blocks-whole"),
    ],
)
@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=fmt) for fmt in FORMATS])
@pytest.mark.parametrize(
    "granularity", [pytest.param(name, id=name.replace(" ", "-")) for name in ("1x128 128x128", "1x128 1x128", "1x32")]
)
def test_blocks(granularity: str, fmt: str, m: int, n: int, k: int) -> None:
    """A scale of a block multiplies what it belongs to, in the last one too; the bias is added before the rounding."""
    if granularity == "1x32" and fmt.endswith("fnuz"):
        with pytest.raises(UnsupportedDtype, match=r"E8M0 scales .*; expected e4m3fn or e5m2: .*; on a FNUZ"):
            scaled_mm(
                codes(m, k, fmt),
                codes(n, k, fmt).t(),
                torch.zeros((m, -(-k // 32)), dtype=torch.uint8),
                torch.zeros((-(-k // 32), n), dtype=torch.uint8),
            )
        return
    a, b, inverse_a, inverse_b, left, right = operands(granularity, m, n, k, fmt)
    bias = scales(n)
    expected = ((left @ right).to(torch.float32) + bias).to(torch.bfloat16)
    assert_bits_equal(expected, scaled_mm(a, b, inverse_a, inverse_b, bias=bias), "product")
    if granularity == "1x32":
        e8m0 = [x.view(torch.float8_e8m0fnu) for x in (inverse_a, inverse_b)]
        assert_bits_equal(expected, scaled_mm(a, b, *e8m0, bias=bias), "product by float8_e8m0fnu scales")


@pytest.mark.parametrize(
    "granularity",
    [
        pytest.param(name, id=f"scaled_mm-pad-{name.replace(' ', '-')}")
        for name in ("1x128 128x128", "1x128 1x128", "1x32")
    ],
)
def test_pad_blocks(granularity: str) -> None:
    """pad=True takes any K and N with scales of blocks: a block that the padding fills up keeps its scale."""
    a, b, inverse_a, inverse_b, left, right = operands(granularity, 5, 131, 133, "e4m3fn")
    expected = (left @ right).to(torch.float32)
    assert_bits_equal(expected, scaled_mm(a, b, inverse_a, inverse_b, torch.float32, pad=True), "padded product")


@pytest.mark.parametrize(
    ("n", "k"),
    [pytest.param(n, k, id=f"scaled_mm-reference-n{n}-k{k}") for n, k in ((1, 1), (17, 24), (16, 1), (1, 16))],
)
def test_reference_takes_any_size(n: int, k: int) -> None:
    """The reference by name multiplies what no hardware takes: K and N of 1, no multiples of 16 (no padding either)."""
    a, b = codes(3, k, "e4m3fnuz", 1), codes(n, k, "e4m3fnuz", 2)
    exact = formats.decode(a, "e4m3fnuz").double() @ formats.decode(b, "e4m3fnuz").double().t()
    actual = scaled_mm(a, b.t(), ONE, ONE, torch.float32, backend="reference")
    assert_bits_equal(exact.to(torch.float32), actual, "product by the reference")
    for name in ("1x128 128x128", "1x32"):
        given = operands(name, 3, n, k, "e4m3fn")
        actual = scaled_mm(*given[:4], torch.float32, backend="reference")
        # Where a block holds all of K its scale may count as a row's, and is multiplied in float32.
        assert_within_ulps((given[4] @ given[5]).to(torch.float32), actual, 1, f"product by the reference, {name}")


# --- refusals ---------------------------------------------------------------------------------------------------------


REFUSALS: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str]] = {
    "k": (codes(4, 24, "e4m3fn"), codes(16, 24, "e4m3fn").t(), ONE, ONE, r"^K is 24, not a multiple of 16.*pad=True"),
    "n": (codes(4, 16, "e4m3fn"), codes(17, 16, "e4m3fn").t(), ONE, ONE, r"^N is 17, not a multiple of 16.*pad=True"),
    "inner": (codes(4, 16, "e4m3fn"), codes(16, 32, "e4m3fn").t(), ONE, ONE, r"shape \(4, 16\) and b \(32, 16\)"),
    "rank": (codes(4, 16, "e4m3fn")[0], codes(16, 16, "e4m3fn").t(), ONE, ONE, r"expected \(M, K\) and \(K, N\)"),
    "left-layout": (codes(16, 32, "e4m3fn").t(), codes(16, 16, "e4m3fn").t(), ONE, ONE, "^a has strides .*row-major"),
    "right-layout": (codes(4, 16, "e4m3fn"), codes(16, 32, "e4m3fn"), ONE, ONE, "^b has strides .*column-major"),
    "left-scale": (codes(4, 16, "e4m3fn"), codes(16, 16, "e4m3fn").t(), scales(5), ONE, r"^inverse_scale_a .*\(4, 1\)"),
    "right-scale": (
        codes(4, 16, "e4m3fn"),
        codes(16, 16, "e4m3fn").t(),
        ONE,
        scales(16).unsqueeze(1),
        r"^inverse_scale_b .*\(1, 16\)",
    ),
    "scale-dtype": (
        codes(4, 16, "e4m3fn"),
        codes(16, 16, "e4m3fn").t(),
        ONE.double(),
        ONE,
        "^inverse_scale_a is torch.float64",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"scaled_mm-refuses-{name}") for name in REFUSALS])
def test_refuses(name: str) -> None:
    """What hardware cannot take is a ValueError that names the operand or dimension, on a CPU too."""
    a, b, inverse_a, inverse_b, words = REFUSALS[name]
    with pytest.raises(ValueError, match=words) as caught:
        scaled_mm(a, b, inverse_a, inverse_b)
    assert str(caught.value).count("; ") == 2, "what; expected; what next"


def test_refuses_what_is_not_fp8() -> None:
    """An operand of another dtype is UnsupportedDtype that names it."""
    with pytest.raises(UnsupportedDtype, match=r"torch\.bfloat16"):
        scaled_mm(torch.zeros(16, 16, dtype=torch.bfloat16), codes(16, 16, "e4m3fn").t(), ONE, ONE)


@pytest.mark.parametrize(
    ("by_row_a", "by_row_b"),
    [
        pytest.param(False, False, id="scaled_mm-torch-tensor-scales"),
        pytest.param(True, True, id="scaled_mm-torch-row-scales"),
        pytest.param(True, False, id="scaled_mm-torch-row-and-tensor-scale"),
    ],
)
def test_what_torch_is_called_with(by_row_a: bool, by_row_b: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row-major by column-major; scales () each or (M, 1) and (1, N), contiguous float32: torch takes no mixture."""
    seen: list[dict[str, object]] = []

    def product(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append({"a": a, "b": b, **options})
        return torch.zeros((a.shape[0], b.shape[1]), dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    a, b = codes(4, 32, "e4m3fn"), codes(16, 32, "e4m3fn").t()
    given_a, given_b = scales(4) if by_row_a else ONE * 0.25, scales(16) if by_row_b else ONE * 0.5
    bias = torch.ones(16, dtype=torch.bfloat16)
    scaled_mm(a, b, given_a, given_b, bias=bias, backend="torch", fast_accum=True)
    call = seen[0]
    left, right, scale_a, scale_b = (call[name] for name in ("a", "b", "scale_a", "scale_b"))
    assert (left.dtype, left.stride(), right.dtype, right.stride()) == (a.dtype, (32, 1), b.dtype, (1, 32))
    rows = by_row_a or by_row_b
    for scale, given, shape in ((scale_a, given_a, (4, 1)), (scale_b, given_b, (1, 16))):
        expected = given.reshape(-1).expand(max(shape)).reshape(shape) if rows else given
        assert_bits_equal(expected, scale, "scale that torch is given")
        assert scale.is_contiguous()
    assert (call["out_dtype"], call["use_fast_accum"]) == (torch.bfloat16, True)
    assert_bits_equal(bias, call["bias"], "bias that torch is given")


def on_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every device that target, as far as decisions go."""
    found = Detected(device.lookup(target), device.lookup(target), "chosen by the test", False)
    monkeypatch.setattr(device, "detect", lambda where=None: found)


# The private op decides what it multiplies by shapes and strides of the scales: aten's rules, ScaledBlas.cpp.
TORCH_BLOCKS = {"1x128-128x128": ("sm_90", "1x128 128x128"), "1x128-1x128": ("sm_90", "1x128 1x128")}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"scaled_mm-torch-{name}") for name in TORCH_BLOCKS])
@pytest.mark.parametrize(
    ("m", "k"), [pytest.param(m, k, id=f"m{m}-k{k}") for m, k in ((1, 1408), (64, 1152), (5, 272))]
)
def test_what_torch_is_called_with_for_blocks(name: str, m: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in cuBLASLt's order, a multiple of four along K, zero codes up to there: the product stays what it was."""
    target, granularity = TORCH_BLOCKS[name]
    seen: list[tuple[torch.Tensor, ...]] = []

    def product(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        seen.append((a, b, scale_a, scale_b))
        return scaled_mm_reference(a, b, scale_a, scale_b, out_dtype, bias, granularity)

    a, b, inverse_a, inverse_b, left, right = operands(granularity, m, 144, k, "e4m3fn")
    on_target(target, monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    out = scaled_mm(a, b, inverse_a, inverse_b, backend="torch", fast_accum=True)
    assert_bits_equal((left @ right).to(torch.float32).to(torch.bfloat16), out, "product")
    given_a, given_b, scale_a, scale_b = seen[0]
    rows, depth = given_a.shape
    blocks = depth // 128
    assert depth % 512 == rows % 4 == 0
    assert (given_a.stride(), given_b.stride()) == ((depth, 1), (1, depth))
    assert (scale_a.shape, scale_a.stride()) == ((rows, blocks), (1, rows))
    if granularity == "1x128 128x128":
        assert (scale_b.shape, scale_b.stride()) == ((blocks, 2), (1, blocks))
    else:
        assert (scale_b.shape, scale_b.stride()) == ((blocks, 144), (144, 1))
    meta = [x.to("meta") for x in seen[0]]
    monkeypatch.undo()
    # The private op's own meta kernel takes the shapes: its scales of a CUDA device, told apart by shape alone.
    made = torch._scaled_mm(*meta[:2], scale_a=meta[2], scale_b=meta[3], out_dtype=torch.bfloat16)
    assert made.shape == (rows, 144)


def test_what_torch_is_called_with_for_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """E8M0 scales in cuBLASLt's tiles of 128 rows by 4: (r, c) of a tile is at 16 * (r % 32) + 4 * (r // 32) + c."""
    seen: list[tuple[torch.Tensor, ...]] = []

    def product(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        seen.append((a, b, scale_a, scale_b))
        return torch.zeros((a.shape[0], b.shape[1]), dtype=out_dtype)

    a, b, inverse_a, inverse_b, *_ = operands("1x32", 130, 144, 272, "e4m3fn")
    on_target("sm_100", monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    scaled_mm(a, b, inverse_a, inverse_b, backend="torch")
    given_a, given_b, *found = seen[0]
    assert (given_a.shape, given_b.shape) == ((130, 384), (384, 144))
    for scale, given in zip(found, (inverse_a, inverse_b.t()), strict=True):
        assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e8m0fnu, (256 * 12,))
        flat, rows, blocks = scale.view(torch.uint8).tolist(), *given.shape
        for r in (0, 1, 31, 32, 127, 128, rows - 1):
            for c in range(blocks):
                tile = r // 128 * 3 + c // 4
                assert flat[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] == int(given[r, c]), (r, c)
    meta = [x.to("meta") for x in seen[0]]
    monkeypatch.undo()
    made = torch._scaled_mm(*meta[:2], scale_a=meta[2], scale_b=meta[3], out_dtype=torch.bfloat16)
    assert made.shape == (130, 144)


# (target, backend, granularity) -> the error and its words.
CANNOT: dict[str, tuple[str, str, str, type[Exception], str]] = {
    "triton-cpu": ("cpu", "triton", "1x128 128x128", ValueError, "on a CPU that does not interpret; expected a GPU"),
    "emulated-cpu": ("cpu", "emulated", "1x32", ValueError, "on a CPU that does not interpret; expected a GPU"),
    "emulated-blocks": ("sm_90", "emulated", "1x128 1x128", ValueError, "expected scales of 1x32"),
    "torch-blocks-rocm": ("gfx942", "torch", "1x128 128x128", ValueError, "on gfx942; expected .* on sm_90"),
    "torch-mx-sm_90": ("sm_90", "torch", "1x32", ValueError, "on sm_90; expected .* 1x32 on sm_100"),
    "torch-blocks-cpu": ("cpu", "torch", "1x128 1x128", ValueError, "on cpu; expected .* on sm_90"),
    "triton-mx-sm_90": ("sm_90", "triton", "1x32", ValueError, "expected 'emulated' there"),
    "triton-foreign": ("gfx942", "triton", "1x128 128x128", UnsupportedDtype, "by .* on gfx942; expected formats"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"scaled_mm-cannot-{name}") for name in CANNOT])
def test_backend_that_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that was asked for by name and has no such product there is refused in words, and nothing else runs."""
    target, backend, granularity, kind, words = CANNOT[name]
    given = operands(granularity, 16, 16, 256, "e4m3fn")[:4]
    on_target(target, monkeypatch)
    with pytest.raises(kind, match=words) as caught:
        scaled_mm(*given, backend=backend)
    assert str(caught.value).count("; ") == 2, "what; expected; what next"


def test_granularity_by_name() -> None:
    """One block along K: scales of rows by their shape, of blocks for who says so; a name they do not tell fails."""
    a, b, inverse_a, inverse_b, left, right = operands("1x128 1x128", 5, 32, 96, "e4m3fn")
    expected = (left @ right).to(torch.float32)
    for name in (None, "row", "1x128 1x128"):
        actual = scaled_mm(a, b, inverse_a, inverse_b, torch.float32, granularity=name)
        assert_within_ulps(expected, actual, 2, f"product, granularity {name}")
    with pytest.raises(
        ValueError, match=r"of row and inverse_scale_b of row; expected '1x128 128x128', for both; "
    ) as caught:
        scaled_mm(a, b, inverse_a, inverse_b, granularity="1x128 128x128")
    assert str(caught.value).count("; ") == 2, "what; expected; what next"


def test_unknown_granularity() -> None:
    """A granularity that does not exist is answered with those that do."""
    with pytest.raises(ValueError, match=r"^granularity is 'foo'; expected one of: tensor, row, 1x128 128x128, .*; "):
        scaled_mm(codes(16, 16, "e4m3fn"), codes(16, 16, "e4m3fn").t(), ONE, ONE, granularity="foo")


@pytest.mark.parametrize(
    "elsewhere",
    [pytest.param(name, id=f"scaled_mm-on-meta-{name}") for name in ("a", "b", "scale_a", "scale_b", "bias")],
)
def test_devices_that_differ(elsewhere: str) -> None:
    """One operand on meta and the rest on a CPU would be memory nobody wrote: a ValueError names both devices."""
    given = {
        "a": codes(16, 16, "e4m3fn"),
        "b": codes(16, 16, "e4m3fn").t(),
        "scale_a": scales(16),
        "scale_b": scales(16),
        "bias": scales(16),
    }
    given[elsewhere] = given[elsewhere].to("meta")
    named = {"a": "b is on cpu and a on meta"}.get(elsewhere, f"{elsewhere} is on meta and a on cpu")
    with pytest.raises(ValueError, match=f"{named}; expected one device; move .* there"):
        scaled_mm(given["a"], given["b"], given["scale_a"], given["scale_b"], bias=given["bias"])


def test_scales_that_do_not_belong_together() -> None:
    """Two granularities that no product takes together, or a shape that is none, are named with what there is."""
    a, b, inverse_a, inverse_b, *_ = operands("1x128 128x128", 16, 32, 256, "e4m3fn")
    for left, right, words in (
        (inverse_a, scales(32), "inverse_scale_a has scales of 1x128 and inverse_scale_b of row; expected one of"),
        (scales(16).unsqueeze(1), inverse_b, "inverse_scale_a has scales of row and inverse_scale_b of 128x128"),
        (
            inverse_a,
            inverse_b.t(),
            r"inverse_scale_b is torch.float32 of shape \(1, 2\); expected .*\(2, 32\), \(2, 1\)",
        ),
        (inverse_a.to(torch.uint8), inverse_b, r"inverse_scale_a is torch.uint8 .* E8M0 bytes of shape \(16, 8\)"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            scaled_mm(a, b, left, right)
        assert str(caught.value).count("; ") == 2, "what; expected; what next"


def test_torch_backend_gives_bf16_with_row_scales() -> None:
    """torch's product with a scale for each row gives bfloat16 only; the refusal says what to do."""
    a, b = codes(4, 16, "e4m3fn"), codes(16, 16, "e4m3fn").t()
    with pytest.raises(ValueError, match=r"torch\.float32.*backend='reference'"):
        scaled_mm(a, b, scales(4), scales(16), out_dtype=torch.float32, backend="torch")


def test_refused_bias_and_output() -> None:
    """A bias that would broadcast some other way, and an output dtype that nothing computes, are errors."""
    a = formats.cast(torch.ones(16, 32), "e4m3fn")
    one = torch.ones(())
    for bias in (torch.ones(()), torch.ones(1), torch.ones(16, 1)):
        with pytest.raises(ValueError, match="bias has shape"):
            scaled_mm(a, a.view(torch.uint8).t().view(a.dtype), one, one, bias=bias)
    with pytest.raises(ValueError, match=r"^bias is torch\.int64; expected bfloat16, .*; convert"):
        scaled_mm(a, codes(16, 32, "e4m3fn").t(), one, one, bias=torch.ones(16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"out_dtype is torch\.int32"):
        scaled_mm(a, a.view(torch.uint8).t().view(a.dtype), one, one, out_dtype=torch.int32)
