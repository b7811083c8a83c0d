"""FP8 experts: outputs and gradients against a float64 oracle, and against their twins in high precision.

The oracle quantises with the references along the dimension that each GEMM contracts, dequantises and multiplies in
float64, group by group; products.py bounds what may lie between. A layer as a whole is compared with its bf16 twin, a
parameter at a time, by SQNR. Sizes are small: in the interpreter every kernel of a layer runs, forward and backward.

Not here: routing, dispatch, conversion, expert parallelism (unit/test_moe.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp8stack import _triton, formats, models, parallel, scaling
from fp8stack.device import OVERRIDE, detect
from fp8stack.kernels import launch
from fp8stack.kernels.colwise import quantize_colwise_grouped_reference
from fp8stack.kernels.experts import quantize_experts_reference, quantize_experts_transposed_reference
from fp8stack.kernels.grouped_gemm import CHECK
from fp8stack.kernels.mxfp8 import quantize_mxfp8_reference
from fp8stack.linear import convert_to_float8
from fp8stack.moe import (
    EXPERT_RECIPES,
    ExpertPlan,
    GroupedExperts,
    MoE,
    Routing,
    fp8_grouped_mm,
    high_precision_grouped_mm,
)
from suites.cases import DTYPES
from suites.compare import assert_bits_equal, assert_sqnr, values
from suites.numerics.products import Record, accumulation, assert_within
from suites.perf import moe as perf

# The interpreter multiplies with NumPy, which warns where a NaN is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ARCH_OF = {"e4m3fn": "gfx950", "e4m3fnuz": "gfx942"}
RECIPES = ("rowwise", "rowwise_with_gw_hp")

# Empty groups in the middle and at the end, one row, and rows of nobody.
SIZES, TAIL = (6, 0, 33, 1, 0), 5
N, K = 48, 64

# dB of a layer of SwiGLU experts against its bf16 twin, three GEMMs deep: worst of 20 seeds, both recipes and dialects,
# minus 1.
SQNR_DB = {
    "output": 21.8,
    "input": 21.9,
    "router.weight": 19.5,
    "experts.w1": 21.5,
    "experts.w2": 21.7,
    "experts.w3": 22.1,
}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK, "1")


@pytest.fixture
def plan(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> ExpertPlan:
    """The plan of the case's recipe and format, the arch overridden where it speaks another."""
    fmt = str(request.getfixturevalue("fmt"))
    if detect(device).arch.e4m3 != fmt:
        monkeypatch.setenv(OVERRIDE, ARCH_OF[fmt])
    found = detect(device)
    record_property("arch", found.arch.name)
    return ExpertPlan(EXPERT_RECIPES[str(request.getfixturevalue("recipe"))], formats.get(fmt), found.target.name)


def cases(
    *suffixes: str, formats_: tuple[str, ...] = tuple(ARCH_OF), recipes: tuple[str, ...] = RECIPES
) -> pytest.MarkDecorator:
    """Every recipe of experts in both dialects; one id a case."""
    return pytest.mark.parametrize(
        ("recipe", "fmt", "suffix"),
        [
            pytest.param(recipe, fmt, suffix, id=f"moe-{recipe}-{fmt}-{suffix}")
            for recipe in recipes
            for fmt in formats_
            for suffix in suffixes
        ],
    )


def normal(shape: tuple[int, ...], device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ends(sizes: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def grouped(sizes: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, size in enumerate(sizes):
        yield group, slice(start, start + size)
        start += size


def expected_backend(device: str, fmt: str) -> str:
    """What the table gives for bf16 layers, by hand."""
    if device == "cuda":
        return "triton" if detect(device).target.e4m3 == fmt else "simulated"
    return "triton" if _triton.INTERPRETING else "reference"


# --- the three GEMMs --------------------------------------------------------------------------------------------------


def oracle(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, plan: ExpertPlan
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Exact output, input and weight gradient of the quantised operands, each with the product of absolute values."""
    fmt, pow2 = plan.fmt, plan.recipe.pow2
    x, w, dy = (t.detach().cpu() for t in (x, w, dy))

    def rows(t: torch.Tensor) -> torch.Tensor:
        codes, inverse = scaling.quantize_reference(t, fmt, dim=1, pow2=pow2)
        return formats.decode(codes, fmt).double() * inverse[:, None].double()

    def columns(t: torch.Tensor) -> torch.Tensor:
        """Unpadded: every group by itself."""
        out = torch.zeros(t.shape, dtype=torch.float64)
        for _, part in grouped(SIZES):
            codes, inverse, _ = quantize_colwise_grouped_reference(
                t[part], torch.tensor([part.stop - part.start], dtype=torch.int32), fmt, pow2
            )
            out[part] = formats.decode(codes, fmt)[: part.stop - part.start].double() * inverse[0].double()
        return out

    w_codes, w_inverse = quantize_experts_reference(w, fmt, pow2)
    turned, turned_inverse = quantize_experts_transposed_reference(w, fmt, pow2)
    w_rows = formats.decode(w_codes, fmt).double() * w_inverse[..., None].double()
    w_columns = (formats.decode(turned, fmt).double() * turned_inverse[..., None].double()).transpose(1, 2)
    left, right = (columns(dy), columns(x)) if plan.recipe.grad_weight else (dy.double(), x.double())
    found = {}
    for name, shape in (("output", (len(x), N)), ("grad_x", (len(x), K)), ("grad_w", w.shape)):
        found[name] = (torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    for place, size in enumerate((lambda t: t, torch.abs)):
        for group, part in grouped(SIZES):
            found["output"][place][part] = size(rows(x)[part]) @ size(w_rows[group]).t()
            found["grad_x"][place][part] = size(rows(dy)[part]) @ size(w_columns[group])
            found["grad_w"][place][group] = size(left[part]).t() @ size(right[part])
    return found


@cases("bf16", "fp32")
def test_gemms(
    recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int, record_property: Record
) -> None:
    """Output, input gradient and weight gradient are the products that the recipe names; zero where no rows are."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[suffix]
    m = sum(SIZES) + TAIL
    x, dy = normal((m, K), device, seed, dtype).requires_grad_(), normal((m, N), device, seed + 1, dtype)
    w = normal((len(SIZES), N, K), device, seed + 2, dtype).requires_grad_()
    with launch.recording() as ran:
        (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
        y.backward(dy)
    backend = ran["grouped_scaled_mm"]
    if dtype == torch.bfloat16:
        assert backend == expected_backend(device, fmt)
    record_property("backend", backend)
    allowed = accumulation(backend, device, fp8=True)
    for name, found in (("output", y), ("grad_x", x.grad), ("grad_w", w.grad)):
        expected, magnitude = oracle(x, w, dy, plan)[name]
        assert_within(expected, magnitude, found, allowed, name, record_property)
        assert found.dtype == dtype
    assert int(torch.count_nonzero(y[sum(SIZES) :])) == 0
    assert int(torch.count_nonzero(x.grad[sum(SIZES) :])) == 0
    assert int(torch.count_nonzero(w.grad[[size == 0 for size in SIZES]])) == 0


@cases("saved", formats_=("e4m3fnuz",))
def test_what_is_kept_changes_no_bit(
    recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes from one launch, one read or two, kept or made again in the backward pass: the same bits."""
    m = sum(SIZES) + TAIL
    dy = [normal((m, N), device, seed + place) for place in (1, 2)]
    results = []
    for inputs, weights, one_launch, one_read in (
        ("codes", "weight", True, True),
        ("input", "codes", True, True),
        ("input", "codes", False, True),
        ("codes", "codes", False, False),
    ):
        monkeypatch.setattr("fp8stack.moe.ONE_LAUNCH", {plan.target: one_launch})
        monkeypatch.setattr("fp8stack.moe.ONE_READ", {(plan.target, what): one_read for what in ("tokens", "weights")})
        changed = replace(plan, recipe=replace(plan.recipe, saved_input=inputs, saved_weight=weights))
        x = normal((m, K), device, seed).requires_grad_()
        w = [normal((len(SIZES), N, K), device, seed + place).requires_grad_() for place in (3, 4)]
        y = fp8_grouped_mm(x, w, ends(SIZES, device), changed)
        torch.autograd.backward(y, dy)
        results.append((*y, x.grad, *(one.grad for one in w)))
    for other in results[1:]:
        for what, one, found in zip(("y1", "y2", "x", "w1", "w2"), results[0], other, strict=True):
            assert_bits_equal(one, found, what)


def launched(call: Callable[[], object], device: str, large: int) -> tuple[dict[str, int], dict[str, int]]:
    """How often each kernel that quantises is launched by a call, and copies of tensors of so many elements.

    By torch's profiler; where kernels are interpreted it sees the copies alone, and the interpreter counts.
    """
    quantising = perf.quantising_kernels()
    if device == "cuda":
        seen = perf.traced(call, torch.device("cuda", torch.cuda.current_device()), large)
        assert seen.on_device, "torch's profiler shows no kernel of the GPU; set KINETO_LOG_LEVEL=0 to read why"
        return seen.kernels, seen.copies
    from triton.runtime.interpreter import GridExecutor

    counts: dict[str, int] = {}
    real = GridExecutor.__call__

    def execute(self: GridExecutor, *arguments: object, **named: object) -> object:
        name = self.fn.__name__
        if name in quantising:
            counts[name] = counts.get(name, 0) + 1
        return real(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", execute)
        copies = perf.traced(call, torch.device("cpu"), large).copies
    return counts, copies


@pytest.mark.skipif(
    not torch.cuda.is_available() and not _triton.INTERPRETING, reason="no kernels here; unit/test_moe.py counts ops"
)
@cases("launches", formats_=("e4m3fnuz",), recipes=("rowwise",))
def test_launches(
    recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of experts launches two kernels that quantise in the forward pass and two in the backward pass.

    No weight and no activation is copied. With kernels for each tensor, which a table may choose, they are nine and
    twelve: the count would see them.
    """
    experts = GroupedExperts(2, 32, 16).to(device)
    with torch.no_grad():
        for place, parameter in enumerate(experts.parameters()):
            parameter.copy_(normal(tuple(parameter.shape), device, seed + place, torch.float32))
    convert_to_float8(nn.Sequential(experts), recipe)
    offs, dy = ends((3, 5), device), normal((8, 32), device, seed + 5)
    for one_launch in (True, False):
        monkeypatch.setattr("fp8stack.moe.ONE_LAUNCH", {plan.target: one_launch})
        x = normal((8, 32), device, seed + 4).requires_grad_()
        if device == "cuda":
            experts(x, offs).backward(dy)  # kernels are compiled
        outputs: list[torch.Tensor] = []
        forward, copied = launched(lambda x=x, outputs=outputs: outputs.append(experts(x, offs)), device, 8 * 16)
        backward, also = launched(lambda outputs=outputs: outputs[0].backward(dy), device, 8 * 16)
        if one_launch:
            assert forward == backward == {"_quantize_together_kernel": 2}
        else:
            assert (sum(forward.values()), sum(backward.values())) == (9, 12)
        assert copied == also == {}


@cases("partial", formats_=("e4m3fn",))
def test_only_what_is_asked(
    recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of x alone, or of weights alone, are those of both; without gradients nothing is kept for them."""
    m = sum(SIZES) + TAIL
    dy = normal((m, N), device, seed + 1)
    found = []
    for need_x, need_w in ((True, True), (True, False), (False, True)):
        x = normal((m, K), device, seed).requires_grad_(need_x)
        w = normal((len(SIZES), N, K), device, seed + 2).requires_grad_(need_w)
        (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
        y.backward(dy)
        found.append((y, x.grad, w.grad))
    assert_bits_equal(found[0][1], found[1][1], "gradient of x alone")
    assert_bits_equal(found[0][2], found[2][2], "gradient of w alone")
    assert found[1][2] is None
    assert found[2][1] is None
    for one_launch, quantisers in ((True, {"quantize_together"}), (False, {"quantize_rowwise", "quantize_experts"})):
        monkeypatch.setattr("fp8stack.moe.ONE_LAUNCH", {plan.target: one_launch})
        with torch.no_grad(), launch.recording() as ran:
            (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
        assert_bits_equal(found[0][0], y, "output without gradients")
        assert set(ran) == {*quantisers, "grouped_scaled_mm"}


@cases("strides", formats_=("e4m3fn",), recipes=("rowwise_with_gw_hp",))
def test_gradient_strides(recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int) -> None:
    """A broadcast or transposed gradient, and a strided input, give the bits of contiguous ones (pytorch/ao#4470)."""
    m = sum(SIZES) + TAIL
    wide = normal((m, 2 * K), device, seed)
    broadcast = torch.ones((), device=device, dtype=torch.bfloat16).expand(m, N)
    for gradient in (broadcast, normal((N, m), device, seed).t()):
        found = []
        for strided in (True, False):
            x = (wide[:, ::2] if strided else wide[:, ::2].contiguous()).detach().requires_grad_()
            w = normal((len(SIZES), N, K), device, seed + 2).requires_grad_()
            (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
            y.backward(gradient if strided else gradient.contiguous())
            found.append((x.grad, w.grad))
        for what, one, other in zip(("x", "w"), *found, strict=True):
            assert_bits_equal(other, one, f"gradient of {what}")


@cases("nan", formats_=("e4m3fn",))
def test_nan_row(recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int) -> None:
    """A NaN in one token makes that row of the output NaN and leaves the others' bits; its expert's gradient has it."""
    x, w = normal((40, K), device, seed), normal((len(SIZES), N, K), device, seed + 1).requires_grad_()
    (clean,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
    x[9, 17] = math.nan
    (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
    assert bool(y[9].isnan().all())
    rest = [row for row in range(40) if row != 9]
    assert_bits_equal(clean[rest].detach(), y[rest].detach(), "other rows")
    y.backward(torch.ones_like(y))
    assert bool(w.grad[2, :, 17].isnan().all())
    assert bool(w.grad[[0, 1, 3, 4]].isfinite().all())


# --- the layer --------------------------------------------------------------------------------------------------------


def layer(device: str, seed: int, recipe: str | None, dim: int = 64, ffn: int = 48) -> MoE:
    """DeepSeek-V3's routing in small, weights of a fan-in scale."""
    generator = torch.Generator().manual_seed(seed)
    moe = MoE(dim, ffn, Routing(6, 2, "sigmoid", groups=3, limited=2, normalise=True, scale=2.5))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model = nn.Sequential(moe.to(device))
    if recipe is not None:
        convert_to_float8(model, recipe)
    return moe


@cases("twin")
def test_gradients_against_the_twin(
    recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int, record_property: Record
) -> None:
    """Output, input gradient and every parameter's gradient of a layer keep their SQNR against the bf16 layer."""
    x, dy = normal((2, 24, 64), device, seed + 1), normal((2, 24, 64), device, seed + 2)
    found: list[dict[str, torch.Tensor]] = []
    for one in (None, recipe):
        moe = layer(device, seed, one)
        given = x.clone().requires_grad_()
        y = moe(given)
        y.backward(dy)
        gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
        found.append({"output": y, "input": given.grad, **gradients})
    assert set(SQNR_DB) == set(found[0])
    for name, at_least in SQNR_DB.items():
        measured = assert_sqnr(values(found[0][name]), found[1][name], at_least, name)
        record_property(f"{name}_sqnr_db", measured)


@cases("steps", formats_=("e4m3fnuz",))
def test_several_steps(recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int) -> None:
    """Steps in poisoned memory, with an expert nobody chooses and one of one row: finite each time (pytorch#154557)."""
    experts = GroupedExperts(len(SIZES), 64, 48).to(device)
    with torch.no_grad():
        for place, parameter in enumerate(experts.parameters()):
            parameter.copy_(normal(tuple(parameter.shape), device, seed + place, torch.float32) * 0.1)
    convert_to_float8(nn.Sequential(experts), recipe)
    before = experts.w1.detach().clone()
    optimiser = torch.optim.SGD(experts.parameters(), lr=0.1)
    for step in range(2):
        x = normal((sum(SIZES) + TAIL, 64), device, seed + 10 + step).requires_grad_()
        y = experts(x, ends(SIZES, device))
        y.float().square().sum().backward()
        assert int(torch.count_nonzero(y[sum(SIZES) :])) == 0
        assert int(torch.count_nonzero(x.grad[sum(SIZES) :])) == 0
        for name, parameter in experts.named_parameters():
            assert bool(parameter.grad.isfinite().all()), (step, name)
            assert int(torch.count_nonzero(parameter.grad[[1, 4]])) == 0, (step, name)
        optimiser.step()
        optimiser.zero_grad()
    moved = (experts.w1.detach() != before).flatten(1).any(dim=1)
    assert moved.tolist() == [True, False, True, True, False]


@cases("zeros", formats_=("e4m3fn",))
def test_zeros(recipe: str, fmt: str, suffix: str, plan: ExpertPlan, device: str, seed: int) -> None:
    """Zero tokens and zero-initialised weights need no knob (pytorch/ao#3356): exact zeros, finite gradients."""
    x = normal((sum(SIZES), K), device, seed)
    x[6:20] = 0.0
    x.requires_grad_()
    w = torch.zeros(len(SIZES), N, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), plan)
    y.backward(normal((sum(SIZES), N), device, seed + 1))
    assert int(torch.count_nonzero(y)) == 0
    assert int(torch.count_nonzero(x.grad)) == 0
    assert bool(w.grad.isfinite().all())
    assert float(w.grad.abs().max()) > 0


# --- mxfp8 ------------------------------------------------------------------------------------------------------------

# As SQNR_DB.
MXFP8_SQNR_DB = {
    "output": 22.0,
    "input": 21.9,
    "router.weight": 18.2,
    "experts.w1": 21.9,
    "experts.w2": 22.2,
    "experts.w3": 22.0,
}


def mxfp8_plan(device: str) -> ExpertPlan:
    found = detect(device)
    return ExpertPlan(EXPERT_RECIPES["mxfp8"], formats.get("e4m3fn"), found.target.name)


def mxfp8_values(t: torch.Tensor, dim: int) -> torch.Tensor:
    """float64 of a matrix quantised in blocks of 32 along dim, the last block as long as there is."""
    codes, scales = quantize_mxfp8_reference(t.detach().cpu(), "e4m3fn", "rceil", dim)
    codes = codes if dim == 1 else codes.t()
    wide = formats.decode_e8m0(scales).double().repeat_interleave(32, 1)[:, : codes.shape[1]]
    found = formats.decode(codes, codes.dtype).double() * wide
    return found if dim == 1 else found.t()


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, id=f"moe-mxfp8-e4m3fn-{name}") for name, dtype in DTYPES.items()]
)
def test_mxfp8_gemms(dtype: torch.dtype, device: str, seed: int, record_property: Record) -> None:
    """Output and both gradients are the products of operands quantised along each contraction, group by group."""
    m, n = sum(SIZES) + TAIL, 96
    x, dy = normal((m, K), device, seed, dtype).requires_grad_(), normal((m, n), device, seed + 1, dtype)
    w = normal((len(SIZES), n, K), device, seed + 2, dtype).requires_grad_()
    with launch.recording() as ran:
        (y,) = fp8_grouped_mm(x, (w,), ends(SIZES, device), mxfp8_plan(device))
        y.backward(dy)
    assert set(ran) == {"quantize_mxfp8", "grouped_mxfp8_mm"}
    record_property("backend", ran["grouped_mxfp8_mm"])
    allowed = accumulation("reference" if ran["grouped_mxfp8_mm"] == "reference" else "triton", device, fp8=False)
    for name, found in (("output", y), ("grad_x", x.grad), ("grad_w", w.grad)):
        expected, magnitude = (torch.zeros(found.shape, dtype=torch.float64) for _ in range(2))
        for group, part in grouped(SIZES):
            if part.start == part.stop:
                continue
            left, right, at = {
                "output": lambda part=part, g=group: (mxfp8_values(x[part], 1), mxfp8_values(w[g], 1).t(), part),
                "grad_x": lambda part=part, g=group: (mxfp8_values(dy[part], 1), mxfp8_values(w[g], 0), part),
                "grad_w": lambda part=part, g=group: (mxfp8_values(dy[part], 0).t(), mxfp8_values(x[part], 0), g),
            }[name]()
            expected[at], magnitude[at] = left @ right, left.abs() @ right.abs()
        assert_within(expected, magnitude, found, allowed, name, record_property)
        assert found.dtype == dtype
    for rows, of in ((slice(sum(SIZES), None), (y, x.grad)), ([size == 0 for size in SIZES], (w.grad,))):
        assert not any(int(torch.count_nonzero(one[rows])) for one in of)


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fn", id="moe-mxfp8-e4m3fn-twin")])
def test_mxfp8_gradients_against_the_twin(fmt: str, device: str, seed: int, record_property: Record) -> None:
    """Output, input gradient and every parameter's gradient of an mxfp8 layer keep their SQNR against bf16's."""
    x, dy = normal((2, 24, 64), device, seed + 1), normal((2, 24, 64), device, seed + 2)
    found: list[dict[str, torch.Tensor]] = []
    for plan in (None, mxfp8_plan(device)):
        moe = layer(device, seed, None, ffn=64)
        moe.experts.plan = plan
        given = x.clone().requires_grad_()
        y = moe(given)
        y.backward(dy)
        found.append({"output": y, "input": given.grad, **{name: p.grad for name, p in moe.named_parameters()}})
    assert set(MXFP8_SQNR_DB) == set(found[0])
    for name, at_least in MXFP8_SQNR_DB.items():
        measured = assert_sqnr(values(found[0][name]), found[1][name], at_least, name)
        record_property(f"{name}_sqnr_db", measured)


@pytest.mark.requires(gpus=1)  # kernels in a graph; on a CPU unit/test_moe.py compiles a layer
@cases("compiled", formats_=("e4m3fnuz",), recipes=("rowwise",))
def test_compiled(
    recipe: str,
    fmt: str,
    suffix: str,
    plan: ExpertPlan,
    device: str,
    seed: int,
    compiled: Callable[[Callable[..., object]], Callable[..., torch.Tensor]],
) -> None:
    """An expert layer compiles to one graph, forward and backward, and gives the eager bits."""
    found = []
    for wrap in (compiled, lambda function: function):
        experts = GroupedExperts(3, 64, 48).to(device)
        with torch.no_grad():
            for place, parameter in enumerate(experts.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), device, seed + place, torch.float32) * 0.1)
        convert_to_float8(nn.Sequential(experts), recipe)
        x = normal((24, 64), device, seed).requires_grad_()
        y = wrap(experts)(x, ends((5, 0, 16), device))
        y.backward(normal((24, 64), device, seed + 5))
        found.append((y, x.grad, experts.w1.grad, experts.w2.grad, experts.w3.grad))
    for what, one, other in zip(("y", "x", "w1", "w2", "w3"), *found, strict=True):
        assert_bits_equal(other, one, what)


@pytest.mark.requires(gpus=1)  # kernels in a graph; on a CPU unit/test_moe.py compiles a layer
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, id=f"moe-{name}-layer-compiled") for name in ("bf16", "rowwise")]
)
def test_compiled_layer(recipe: str, device: str, seed: int) -> None:
    """Router, experts and shared expert as one graph: the eager bits, every gradient included; bf16 is not converted.

    Without Inductor, which sums in another order.
    """
    if recipe == "mxfp8" and detect(device).arch.e4m3.endswith("fnuz"):
        pytest.skip(f"mxfp8 is for OCP formats; {detect(device).arch.name} has {detect(device).arch.e4m3}")
    torch._dynamo.reset()
    found: list[dict[str, torch.Tensor]] = []
    for compiled in (False, True):
        layer = MoE(64, 48, Routing(8, 2, "sigmoid", normalise=True, scale=2.5), shared=1).to(device, torch.bfloat16)
        layer.router.reset()
        with torch.no_grad():
            for place, parameter in enumerate(layer.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), device, seed + place) * 0.1)
        if recipe != "bf16":
            convert_to_float8(nn.Sequential(layer), recipe)
        x = normal((40, 64), device, seed).requires_grad_()
        y = (torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else layer)(x)
        y.backward(normal((40, 64), device, seed + 20))
        found.append({"output": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for what, eager in found[0].items():
        assert bool(eager.count_nonzero()), f"{what} is zero"
        assert_bits_equal(eager, found[1][what], f"{recipe}, {what}")


@pytest.mark.requires(gpus=1)  # Inductor's own kernels
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, id=f"moe-{name}-block-compiled") for name in ("bf16", "rowwise")]
)
def test_compiled_block(recipe: str, device: str, seed: int, record_property: Record) -> None:
    """A block with experts under Inductor, whatever memory held: every gradient is the eager one but for rounding.

    Inductor rounds to bf16 elsewhere, which moves FP8 codes and the choice of experts. How far that may lead is
    measured: at most twice as far as the last bit of half the inputs moves the eager gradient, relative to its norm, or
    2^-6.
    """
    torch._dynamo.reset()
    size = models.MODELS["dsv3-debug"]
    assert isinstance(size, models.DeepSeek)
    table = models.rope_table(256, size.rope_dim, size.rope_theta, torch.device(device))

    def gradients(nudge: int, compiler: parallel.Compiler | None) -> dict[str, torch.Tensor]:
        block = models.LatentBlock(size, dense=False).to(device, torch.bfloat16)
        block.moe.router.reset()
        with torch.no_grad():
            for place, parameter in enumerate(block.parameters()):
                drawn = normal(tuple(parameter.shape), device, seed + place)
                parameter.copy_(1 + 0.1 * drawn if parameter.dim() == 1 else 0.02 * drawn)
        if recipe != "bf16":
            convert_to_float8(nn.Sequential(block), recipe)
        call = block if compiler is None else torch.compile(block, backend=compiler, fullgraph=True, dynamic=False)
        for _ in range(1 if compiler is None else 3):  # once the graph is there, memory is used again
            poison = torch.full((1 << 29,), torch.nan, dtype=torch.bfloat16, device=device)
            del poison
            block.zero_grad()
            x = normal((8, 256, size.dim), device, seed)
            if nudge:
                x.view(torch.int16).bitwise_xor_((normal(tuple(x.shape), device, seed + nudge) > 0).to(torch.int16))
            x.requires_grad_()
            y = call(x, table)
            y.backward(normal((8, 256, size.dim), device, seed + 100))
        return {"output": y.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}

    def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.float() - expected.float()).norm() / expected.float().norm())

    eager, one, two = (gradients(nudge, None) for nudge in (0, 200, 300))
    compiled = gradients(0, parallel.Compiler("inductor"))
    for what, expected in eager.items():
        assert bool(expected.count_nonzero()), f"{what} is zero"
        at_most = max(2.0**-6, 2 * max(relative(one[what], expected), relative(two[what], expected)))
        off = relative(compiled[what], expected)
        record_property(f"{what}_relative", off)
        assert off <= at_most, (
            f"{recipe}, {what}: the compiled one is {off:.3g} of its norm away; at most {at_most:.3g}"
        )


def test_the_twin_is_exact(device: str, seed: int, record_property: Record) -> None:
    """high_precision_grouped_mm: output and gradients are the bf16 products, rounded once; the oracle's oracle."""
    m = sum(SIZES) + TAIL
    x, w = normal((m, K), device, seed).requires_grad_(), normal((len(SIZES), N, K), device, seed + 1).requires_grad_()
    dy = normal((m, N), device, seed + 2)
    (y,) = high_precision_grouped_mm(x, (w,), ends(SIZES, device))
    y.backward(dy)
    x64, w64, dy64 = (t.detach().cpu().double() for t in (x, w, dy))
    for name, found, product in (
        ("output", y, lambda size, part, group: size(x64[part]) @ size(w64[group]).t()),
        ("grad_x", x.grad, lambda size, part, group: size(dy64[part]) @ size(w64[group])),
        ("grad_w", w.grad, lambda size, part, group: size(dy64[part]).t() @ size(x64[part])),
    ):
        expected, magnitude = (torch.zeros(found.shape, dtype=torch.float64) for _ in range(2))
        for group, part in grouped(SIZES):
            at = group if name == "grad_w" else part
            expected[at], magnitude[at] = product(lambda t: t, part, group), product(torch.abs, part, group)
        assert_within(expected, magnitude, found, 2.0**-18, name, record_property)
