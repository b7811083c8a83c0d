"""FP8 linear layers: all three products against a float64 oracle, and against high precision.

The oracle quantises the operands with the reference (scaling.py) along the dimension that each product contracts,
dequantises them and multiplies in float64. What is left between it and the layer is the accumulation and one rounding
of the result, so a scale along the wrong dimension, a swapped operand or a forgotten inverse scale is orders of
magnitude outside the bound, element by element and column by column. Against high precision the measure is SQNR.

On a GPU the layer's own kernels and backend run; the other dialect's format runs there through the arch override, as
backend `simulated`. Not here: conversion, filters, state dicts (unit/test_linear.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fp8stack import _triton, formats, parallel, train
from fp8stack.device import OVERRIDE, detect
from fp8stack.kernels import launch, scaled_kernel
from fp8stack.kernels.blockwise import UNITS, quantize_blockwise_reference
from fp8stack.kernels.mxfp8 import quantize_mxfp8_reference
from fp8stack.linear import RECIPES, Cast, Float8Linear, Gemm, Linear, convert_to_float8, wide_dtype
from fp8stack.metrics import CodeCounter
from fp8stack.scaling import quantize_reference
from suites.compare import assert_bits_equal, assert_sqnr, values
from suites.numerics.thresholds import BLOCKWISE_DB, LINEAR_FLOORS, LINEAR_SIZES, LINEAR_SQNR_DB

Record = Callable[[str, object], None]

# The arch whose formats are wanted, where the device's own are others.
ARCH_OF = {"e4m3fn": "gfx950", "e4m3fnuz": "gfx942"}

# Accumulation error allowed, relative to sum |a| |b|: float32 sums of a few hundred terms on a CPU; on a GPU the FP8
# matrix units of sm_90 keep about 14 bits between promotions.
ACCUMULATION = {
    "reference": 2.0**-18,
    "simulated": 2.0**-18,
    "torch": 2.0**-11,
    **dict.fromkeys(("triton", "emulated"), 2.0**-18 if _triton.INTERPRETING else 2.0**-11),
}
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}

# M is no multiple of 16: the weight gradient contracts over it and must not lose the tail.
M, N, K = LINEAR_SIZES["small"]


@pytest.fixture
def dialect(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> str:
    """The e4m3 format of the case, made the arch's own by override where it is not."""
    wanted = str(request.getfixturevalue("fmt"))
    if detect(device).arch.e4m3 != wanted:
        monkeypatch.setenv(OVERRIDE, ARCH_OF[wanted])
    found = detect(device)
    assert found.arch.e4m3 == wanted
    record_property("arch", found.arch.name)
    return wanted


def cases(*suffixes: str, recipes: tuple[str, ...] = tuple(RECIPES)) -> pytest.MarkDecorator:
    """Every recipe in both dialects, but mxfp8 in OCP's alone; one id a case."""
    return pytest.mark.parametrize(
        ("recipe", "fmt", "suffix"),
        [
            pytest.param(recipe, fmt, suffix, id=f"linear-{recipe}-{fmt}-{suffix}")
            for recipe in recipes
            for fmt in ARCH_OF
            for suffix in suffixes
            if not (recipe == "mxfp8" and fmt.endswith("fnuz"))
        ],
    )


def layer(recipe: str, device: str, seed: int, n: int = N, k: int = K, bias: bool = True) -> Float8Linear:
    """A converted linear with seeded normal fp32 weights on `device`."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * k**-0.5)
    model = nn.Sequential(linear).to(device)
    convert_to_float8(model, recipe)
    assert isinstance(model[0], Float8Linear)
    return model[0]


def normal(shape: tuple[int, ...], device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded normal values, drawn on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def dequantised(x: torch.Tensor, cast: Cast, fp8: Float8Linear, contraction: int) -> torch.Tensor:
    """float64 values of x after the cast, one scale along `contraction`, of a block or in all; from the references."""
    plan = fp8.plan
    if cast.granularity not in ("row", "tensor"):
        rows = x.detach().cpu().t() if contraction == 0 else x.detach().cpu()
        values = _dequantised_blocks(rows.contiguous(), cast, fp8)
        return values.t() if contraction == 0 else values
    fmt, dim = plan.format_of(cast), contraction if cast.granularity == "row" else None
    codes, inverse = quantize_reference(x.detach().cpu().contiguous(), fmt, dim=dim, pow2=plan.recipe.pow2)
    factor = inverse if dim is None else inverse.unsqueeze(dim)
    return formats.decode(codes, fmt).double() * factor.double()


def _dequantised_blocks(rows: torch.Tensor, cast: Cast, fp8: Float8Linear) -> torch.Tensor:
    """float64 values of rows (R, contraction) after a cast with scales of blocks."""
    fmt, recipe = fp8.plan.format_of(cast), fp8.plan.recipe
    if cast.granularity == "1x32":
        codes, byte = quantize_mxfp8_reference(rows, fmt, recipe.scale_mode)
        factor, unit = torch.exp2(byte.double() - 127), (1, 32)
    else:
        codes, inverse = quantize_blockwise_reference(rows, fmt, cast.granularity, pow2=recipe.pow2)
        factor, unit = inverse.double(), UNITS[cast.granularity]
    factor = factor.repeat_interleave(unit[0], 0).repeat_interleave(unit[1], 1)[: rows.shape[0], : rows.shape[1]]
    return formats.decode(codes, fmt).double() * factor


def expected_backend(recipe: str, fmt: str, device: str) -> str:
    """What scaled_mm has to run here for a recipe: on a GPU, and in the interpreter, the kernel where it is one's."""
    blocks = recipe in ("blockwise", "mxfp8")
    if device == "cpu":
        return "triton" if blocks and _triton.INTERPRETING else "reference"
    target = detect(device).target
    if not (target.native_fp8_matmul and fmt == target.e4m3):
        return "simulated"
    if recipe == "mxfp8" and not scaled_kernel.scales_in_unit(target.name):
        return "emulated"
    return "triton" if blocks else "torch"


def oracle(
    left: torch.Tensor, left_dim: int, right: torch.Tensor, right_dim: int, gemm: Gemm | None, fp8: Float8Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of two tensors over their contraction dimensions in float64, and the same of absolute values."""
    if gemm is None:
        a, b = left.detach().cpu().double(), right.detach().cpu().double()
    else:
        a, b = dequantised(left, gemm.left, fp8, left_dim), dequantised(right, gemm.right, fp8, right_dim)
    a, b = (a if left_dim == 1 else a.t()), (b if right_dim == 0 else b.t())
    return a @ b, a.abs() @ b.abs()


def assert_product(
    expected: torch.Tensor,
    magnitude: torch.Tensor,
    actual: torch.Tensor,
    backend: str,
    what: str,
    record: Record,
    rounded: torch.Tensor | None = None,
) -> None:
    """Every element within the accumulation bound and one rounding; the worst element's share of it goes on record.

    `rounded`: what is rounded, where that is not the expected value itself.
    """
    __tracebackhide__ = True
    half = HALF_ULP[actual.dtype if backend != "torch" else torch.bfloat16]
    allowed = (
        (expected if rounded is None else rounded).abs() * (half * (1 + 2.0**-8))
        + magnitude * ACCUMULATION[backend]
        + 1e-38
    )
    share = (values(actual) - expected).abs() / allowed
    worst = float(share.max())
    record(f"{what}_error_share_of_bound", worst)
    assert worst <= 1.0, (  # a NaN is not
        f"{what}: {int((~(share <= 1.0)).sum())} of {share.numel()} elements leave the bound, worst {worst:.3g} times, "
        f"in column {int(share.max(dim=0).values.argmax())}; expected accumulation error and one rounding only"
    )


@cases("bf16", "fp32")
def test_products(
    recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int, record_property: Record
) -> None:
    """Output, input gradient, weight gradient and bias gradient are the products that the recipe names."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[suffix]
    fp8 = layer(recipe, device, seed)
    x = normal((M, K), device, seed + 1, dtype).requires_grad_()
    grad = normal((M, N), device, seed + 2, dtype)
    with launch.recording() as ran:
        y = fp8(x)
        y.backward(grad)
    backend = ran["scaled_mm"]
    record_property("backend", backend)
    assert backend == expected_backend(recipe, fmt, device), f"scaled_mm ran on {backend}"
    quantisers = {name: which for name, which in ran.items() if name.startswith("quantize_")}
    if device == "cuda" or _triton.INTERPRETING:
        assert quantisers == dict.fromkeys(quantisers, "triton")

    table, weight = fp8.plan.recipe, fp8.weight.detach().to(dtype)
    product, size = oracle(x, 1, weight, 1, table.output, fp8)
    bias = fp8.bias.detach().cpu().to(dtype).double()
    # torch's backend rounds a float32 layer's product before its bias.
    rounded = product.abs() + bias.abs() if backend == "torch" else None
    assert_product(product + bias, size + bias.abs(), y, backend, "output", record_property, rounded)
    expected = oracle(grad, 1, weight, 0, table.grad_input, fp8)
    assert_product(*expected, x.grad, backend, "grad_input", record_property)

    # The gradient of the fp32 master weight is the product rounded to the activations' dtype.
    expected = oracle(grad, 0, x, 0, table.grad_weight, fp8)
    assert_product(*expected, fp8.weight.grad.to(dtype), backend, "grad_weight", record_property)
    assert fp8.weight.grad.dtype == torch.float32
    column = grad.detach().cpu().double()
    assert_product(
        column.sum(0, keepdim=True),
        column.abs().sum(0, keepdim=True),
        fp8.bias.grad.to(dtype)[None],
        "reference",
        "grad_bias",
        record_property,
    )


def _pair(gemm: Gemm | None) -> str:
    return "high precision" if gemm is None else f"{gemm.left.kind} {gemm.right.kind}"


def products_of_layer(
    recipe: str, size: str, device: str, seed: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, float64 product without quantisation, and what a layer of a size class makes of it: for all three."""
    m, n, k = LINEAR_SIZES[size]
    fp8 = layer(recipe, device, seed, n, k, bias=False)
    x = normal((m, k), device, seed + 1).requires_grad_()
    grad = normal((m, n), device, seed + 2)
    y = fp8(x)
    y.backward(grad)
    x64, w64, g64 = values(x), values(fp8.weight.detach().bfloat16()), values(grad)
    yield "output", x64 @ w64.t(), y
    yield "grad_input", g64 @ w64, x.grad
    yield "grad_weight", g64.t() @ x64, fp8.weight.grad


@cases("bf16", "deep")
def test_sqnr(
    recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int, record_property: Record
) -> None:
    """Against float64 without quantisation every product keeps the SQNR of its row (thresholds.py)."""
    size = "deep" if suffix == "deep" else "small"
    for product, expected, actual in products_of_layer(recipe, size, device, seed):
        row = LINEAR_SQNR_DB[fmt, f"{recipe} {product}", size]
        assert row.at_least >= LINEAR_FLOORS[_pair(getattr(RECIPES[recipe], product))]
        record_property(f"{product}_sqnr_db", assert_sqnr(expected, actual, row.at_least, product))


# (M, N, K) that numerics.md names: 1408 and 128128 are odd numbers of blocks, 576 and 10944 end in half of one.
BLOCKWISE_SIZES = ((512, 2048, 1408), (1, 7168, 2048), (4096, 576, 10944), (64, 128, 128128))


@cases(*(f"m{m}-n{n}-k{k}" for m, n, k in BLOCKWISE_SIZES), recipes=("blockwise",))
def test_blockwise_sizes(
    recipe: str,
    fmt: str,
    suffix: str,
    dialect: str,
    device: str,
    seed: int,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blockwise layer reaches 28 dB at every size, in both dialects (upstream's is skipped on ROCm, for 7 dB).

    On a CPU a few thousand numbers of the output, K whole: rows and blocks of columns know nothing of each other. The
    quantiser is its reference there, to whose bits test_blockwise.py holds the kernel.
    """
    m, n, k = (int(word[1:]) for word in suffix.split("-"))
    if device == "cpu":
        m, n = min(m, 64), min(n, 2048 if m == 1 else 64)
        monkeypatch.setattr("fp8stack.linear.quantize_blockwise", quantize_blockwise_reference)
    fp8 = layer(recipe, device, seed, n, k, bias=False)
    x = normal((m, k), device, seed + 1)
    with torch.no_grad(), launch.recording() as ran:
        y = fp8(x)
    assert ran["scaled_mm"] == expected_backend(recipe, fmt, device)
    expected = values(x) @ values(fp8.weight.bfloat16()).t()
    record_property("sqnr_db", assert_sqnr(expected, y, BLOCKWISE_DB, suffix))


@cases("zeros")
def test_zeros(recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int) -> None:
    """Zero rows and a zero-initialised weight need no knob: finite, and exactly zero where they must be (ao#3356)."""
    fp8 = layer(recipe, device, seed, bias=False)
    x = normal((64, K), device, seed + 1)
    x[48:] = 0.0
    x.requires_grad_()
    y = fp8(x)
    y.sum().backward()
    assert int(torch.count_nonzero(y[48:])) == 0
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())
    assert bool(torch.isfinite(fp8.weight.grad).all())

    with torch.no_grad():
        fp8.weight.zero_()
    fp8.weight.grad = x.grad = None
    y = fp8(x)
    y.backward(normal((64, N), device, seed + 2))
    assert int(torch.count_nonzero(y)) == 0
    assert int(torch.count_nonzero(x.grad)) == 0
    assert bool(torch.isfinite(fp8.weight.grad).all())
    assert float(fp8.weight.grad.abs().max()) > 0


@cases("strides")
def test_gradient_strides(recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int) -> None:
    """A broadcast, transposed or sliced gradient gives the bits of its contiguous copy (TransformerEngine#623)."""
    consumers = {
        "sum": (lambda y: y.sum(), lambda y: torch.ones_like(y)),
        "transposed": (
            lambda y: (y.t() * normal((N, 32), device, seed).requires_grad_(False)).sum(),
            lambda y: normal((N, 32), device, seed).t().contiguous(),
        ),
        "every other row": (lambda y: y[::2].sum(), lambda y: _every_other_row(y)),
    }
    for name, (consume, gradient) in consumers.items():
        results = []
        for direct in (True, False):
            fp8 = layer(recipe, device, seed)
            x = normal((32, K), device, seed + 1).requires_grad_()
            y = fp8(x)
            if direct:
                consume(y).backward()
            else:
                y.backward(gradient(y))
            results.append((x.grad, fp8.weight.grad, fp8.bias.grad))
        for what, one, other in zip(("input", "weight", "bias"), *reversed(results), strict=True):
            assert_bits_equal(one, other, f"{what} gradient after {name}")


def _every_other_row(y: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(y)
    gradient[::2] = 1.0
    return gradient


@cases("3d")
def test_leading_dimensions(recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int) -> None:
    """(B, S, K) is (B*S, K), forward and backward, also when the input is a strided view; no rows give no rows."""
    wide = normal((4, 12, 2 * K), device, seed + 1)
    view = wide[:, ::2, :K]
    results = []
    for x in (view.detach().requires_grad_(), view.reshape(24, K).contiguous().requires_grad_()):
        fp8 = layer(recipe, device, seed)
        y = fp8(x)
        assert y.shape == (*x.shape[:-1], N)
        y.backward(normal((24, N), device, seed + 2).view_as(y))
        results.append((y.reshape(24, N), x.grad.reshape(24, K), fp8.weight.grad))
    for what, one, other in zip(("output", "input gradient", "weight gradient"), *results, strict=True):
        assert_bits_equal(other, one, what)

    fp8 = layer(recipe, device, seed)
    x = normal((2, 0, K), device, seed).requires_grad_()
    y = fp8(x)
    assert y.shape == (2, 0, N)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert int(torch.count_nonzero(fp8.weight.grad)) == 0


@cases("nan", recipes=("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"))
def test_nan_row(recipe: str, fmt: str, suffix: str, dialect: str, device: str, seed: int) -> None:
    """A NaN in one row of the input makes that row of the output NaN and leaves every other row's bits alone."""
    fp8 = layer(recipe, device, seed)
    x = normal((32, K), device, seed + 1)
    clean = fp8(x)
    x[5, 17] = math.nan
    y = fp8(x)
    assert bool(y[5].isnan().all())
    rest = [row for row in range(32) if row != 5]
    assert_bits_equal(clean[rest].detach(), y[rest].detach(), "other rows")


@pytest.mark.requires(gpus=1)  # kernels in a graph; on a CPU unit/test_linear.py compiles layers
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        pytest.param(recipe, dtype, id=f"linear-{recipe}-{name}-compiled")
        for recipe in ("bf16", *RECIPES)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    ],
)
def test_compiled(recipe: str, dtype: torch.dtype, device: str, seed: int) -> None:
    """A layer as one graph gives the eager bits, all gradients included; recipe bf16 is the layer not converted.

    Without Inductor, which sums in another order. Compilers lose gradients without a word: linear.rounded says how.
    """
    if recipe == "mxfp8" and detect(device).arch.e4m3.endswith("fnuz"):
        pytest.skip(f"mxfp8 is for OCP formats; {detect(device).arch.name} has {detect(device).arch.e4m3}")
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        layers = nn.Sequential(Linear(K, N)).to(device, dtype)
        with torch.no_grad():
            for place, parameter in enumerate(layers.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), device, seed + place) * 0.1)
        if recipe != "bf16":
            counter = CodeCounter()
            counter.prepare(
                torch.device(device), *(formats.get(name) for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
            )
            convert_to_float8(layers, recipe, counter=counter)
        x = normal((M, K), device, seed + 2).to(dtype).requires_grad_()
        call = torch.compile(layers[0], fullgraph=True, dynamic=False, backend="aot_eager") if compiled else layers[0]
        y = call(x)
        y.backward(normal((M, N), device, seed + 3).to(dtype))
        found.append((y.detach(), x.grad, layers[0].weight.grad, layers[0].bias.grad))
    for what, eager, graph in zip(("output", "input", "weight", "bias"), *found, strict=True):
        assert bool(eager.count_nonzero()), f"{what} is zero"
        assert_bits_equal(eager, graph, f"{recipe}, {what}")


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="loss-bf16-compiled")])
@pytest.mark.usefixtures("compiled")  # which asks for a C++ compiler
def test_compiled_loss(dtype: torch.dtype, device: str, seed: int, record_property: Record) -> None:
    """The trainer's loss under Inductor: sum and gradient of logits are those of float64, labels that do not count out.

    The sum within 1e-6; a gradient within a rounding to `dtype`, and 1e-6 of the largest there can be, 1.
    """
    torch._dynamo.reset()
    logits = (normal((2, 96, 3000), device, seed) * 4).to(dtype).requires_grad_()
    labels = torch.arange(2 * 96, device=device).view(2, 96) * 7 % 3000
    labels[:, ::5] = train.IGNORED_LABEL
    call = parallel.compile_loss(train.summed_loss, parallel.Compiler("inductor"))
    assert call is not train.summed_loss
    total = call(logits, labels)
    (total / 100).backward()
    assert logits.grad is not None
    assert total.dtype == wide_dtype(logits)
    assert logits.grad.dtype == dtype

    exact = logits.detach().double().requires_grad_()
    counts = {"ignore_index": train.IGNORED_LABEL, "reduction": "sum"}
    expected = nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), **counts)
    (expected / 100).backward()
    assert exact.grad is not None
    off = abs(float(total.detach().double() / expected.detach()) - 1)
    record_property("loss_relative", off)
    assert off <= 1e-6
    rounding = torch.finfo(dtype).eps / 2 * exact.grad.abs()
    assert bool(((logits.grad.double() - exact.grad).abs() <= rounding + 1e-6 / 100).all())
    assert not bool(logits.grad[:, ::5].count_nonzero()), "a label that does not count has a gradient"
