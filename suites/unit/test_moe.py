"""Routing, dispatch, combine, conversion and expert parallelism: what of a layer of experts needs no kernel.

Against plain loops over tokens in float64, and against brute force over the experts' scores. FP8 runs its references
here; values of the GEMMs are numerics/test_moe.py's. Expert parallelism runs in two processes over gloo.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn

from fp8stack import device, moe, parallel
from fp8stack.device import Detected
from fp8stack.kernels import groups, launch
from fp8stack.kernels.grouped_gemm import CHECK
from fp8stack.linear import RECIPES, Plan, convert_to_float8
from fp8stack.metrics import CodeCounter, CodeTable
from fp8stack.moe import (
    EXPERT_RECIPES,
    GroupedExperts,
    MoE,
    Router,
    Routing,
    choose,
    combine,
    counted,
    dispatch,
    exchanged_experts,
    sort_by_expert,
)
from suites.compare import assert_bits_equal

SIGMOID = Routing(8, 3, "sigmoid", groups=4, limited=2, normalise=True, scale=2.5)
SOFTMAX = Routing(8, 3, "softmax")


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with seeded normal weights of a fan-in scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(routing: Routing = SIGMOID, shared: int = 0, seed: int = 0, dim: int = 64) -> MoE:
    found = filled(MoE(dim, 48, routing, shared), seed)
    assert isinstance(found, MoE)
    return found


# --- routing ----------------------------------------------------------------------------------------------------------


def by_hand(scores: list[float], routing: Routing) -> list[int]:
    """The experts that a token chooses, best first, in plain Python."""
    width = routing.experts // routing.groups
    grouped = [scores[g * width : (g + 1) * width] for g in range(routing.groups)]
    best = 2 if routing.score == "sigmoid" else 1
    rank = sorted(range(routing.groups), key=lambda g: -sum(sorted(grouped[g])[-best:]))
    allowed = [e for e in range(routing.experts) if e // width in rank[: routing.limited]]
    return sorted(allowed, key=lambda e: -scores[e])[: routing.top_k]


@pytest.mark.parametrize(
    "routing",
    [
        pytest.param(SOFTMAX, id="moe-route-softmax"),
        pytest.param(SIGMOID, id="moe-route-sigmoid-groups"),
        pytest.param(Routing(12, 4, "softmax", groups=3, limited=1), id="moe-route-softmax-one-group"),
        pytest.param(Routing(8, 8, "sigmoid", groups=4, limited=4), id="moe-route-all"),
        pytest.param(Routing(8, 2, "sigmoid", groups=8, limited=3), id="moe-route-groups-of-one"),
        pytest.param(Routing(1, 1), id="moe-route-one-expert"),
    ],
)
def test_choice(routing: Routing) -> None:
    """The K best experts of the best groups, as a loop over tokens finds them; negative scores too."""
    scores = normal(50, routing.experts, dtype=torch.float64)
    expected = [by_hand(row, routing) for row in scores.tolist()]
    assert expected == choose(scores, routing).tolist()


def test_weights() -> None:
    """Sigmoid: the scores of the chosen, without the bias, to sum 1, times the scale. Softmax: scores as they are."""
    x = normal(30, 64)
    for routing in (SIGMOID, SOFTMAX):
        router = filled(Router(64, routing))
        router.bias.copy_(normal(8, seed=5, dtype=torch.float32))
        logits = x.double() @ router.weight.detach().bfloat16().double().t()
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
        chosen, weights = router(x)
        assert chosen.tolist() == choose(scores + router.bias.double(), routing).tolist()
        expected = scores.gather(1, chosen)
        if routing.normalise:
            expected = expected / expected.sum(-1, keepdim=True) * 2.5
        torch.testing.assert_close(weights, expected)


def test_bias_moves_the_choice_alone() -> None:
    """A bias that lifts one expert puts it into every choice, and leaves no trace in weights or gradients of itself."""
    router, x = filled(Router(64, SOFTMAX)), normal(20, 64)
    router.bias[5] = 10.0
    chosen, weights = router(x)
    assert bool((chosen == 5).any(dim=1).all())
    assert float(weights.detach().max()) < 1.0
    weights.sum().backward()
    assert router.weight.grad is not None
    assert router.bias.grad is None


def test_balance() -> None:
    """Experts below the mean load are lifted by the rate, those above lowered, those at it left; then counts begin."""
    router = filled(Router(64, Routing(4, 1)))
    router.load.copy_(torch.tensor([0, 6, 3, 3]))
    router.balance(0.25)
    assert router.bias.tolist() == [0.25, -0.25, 0.0, 0.0]
    router(normal(32, 64))
    assert int(router.load.sum()) == 32
    router.eval()
    router(normal(32, 64))
    assert int(router.load.sum()) == 32, "counted while not training"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"top_k": 0}, "top_k is 0; expected 1 to 8", id="moe-routing-no-choice"),
        pytest.param({"top_k": 5, "groups": 4, "limited": 2}, "expected 1 to 4", id="moe-routing-too-few-candidates"),
        pytest.param({"top_k": 1, "groups": 3}, "groups that divide", id="moe-routing-groups"),
        pytest.param({"top_k": 1, "groups": 2, "limited": 3}, "limit from 1", id="moe-routing-limit"),
        pytest.param({"top_k": 1, "score": "relu"}, "score is 'relu'", id="moe-routing-score"),
    ],
)
def test_refused_routing(fields: dict[str, object], words: str) -> None:
    """A contradiction is named when the routing is written down, not when a token meets it."""
    with pytest.raises(ValueError, match=words) as caught:
        Routing(8, **fields)
    assert str(caught.value).count("; ") == 2


# --- dispatch and combine ---------------------------------------------------------------------------------------------


def test_every_choice_becomes_one_row() -> None:
    """Rows are the tokens of each expert in order, as many as chose it; nobody's choices come last (vllm#35161)."""
    chosen = torch.tensor([[2, 0], [-1, 2], [4, 2], [0, -1]])
    order = sort_by_expert(chosen, 5)
    assert order.offs_E.tolist() == [2, 2, 5, 5, 6]
    assert order.offs_E.dtype == torch.int32
    assert counted(chosen, 5).tolist() == [2, 0, 3, 0, 1]
    x = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    assert dispatch(x, order)[:, 0].tolist() == [0, 3, 0, 1, 2, 2, 1, 3]
    weights = torch.where(chosen < 0, 0.0, 1.0)
    back = combine(dispatch(x, order), weights, order)
    assert back[:, 0].tolist() == [0.0, 1.0, 4.0, 3.0]  # once for each choice


def test_experts_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is no expert's counts as nobody, and no memory beside the counts is written; checked, it raises."""
    monkeypatch.delenv(CHECK, raising=False)
    wrong, right = torch.tensor([[2, 5], [-7, 2], [4, 1 << 40]]), torch.tensor([[2, -1], [-1, 2], [4, -1]])
    calls = (counted, lambda chosen, experts: sort_by_expert(chosen, experts).order_R)
    compiled = [torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager") for call in calls]
    for call in (*calls, *compiled):
        assert call(right, 5).tolist() == call(wrong, 5).tolist()
    assert sort_by_expert(wrong, 5).offs_E.tolist() == [0, 0, 2, 2, 3]
    monkeypatch.setenv(CHECK, "1")
    for call in (*calls, *compiled):
        call(right, 5)
        with pytest.raises(ValueError, match=r"^token 0 chose expert 5 of 5; expected 0 to 4, or -1 for nobody; look"):
            call(wrong, 5)
        with pytest.raises(ValueError, match=r"^token 1 chose expert -7 of 5"):
            call(torch.where(wrong > 4, 0, wrong), 5)
    torch.library.opcheck(torch.ops.fp8stack.settled_choices.default, (right, 5))


@pytest.mark.parametrize("tokens", [pytest.param(4, id="moe-one-expert"), pytest.param(0, id="moe-no-tokens")])
def test_one_expert_and_no_tokens(tokens: int) -> None:
    """All tokens to expert 0 of one, and no tokens at all: rows conserved, gradients of the right shape."""
    found = layer(Routing(1, 1))
    x = normal(tokens, 64).requires_grad_()
    y = found(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert found.experts.w2.grad.shape == found.experts.w2.shape
    assert bool(found.experts.w2.grad.isfinite().all())


def test_gradients_of_dispatch_and_combine() -> None:
    """Both are linear: their gradients are those of indexing and summing, which autograd knows."""
    chosen, weights = torch.tensor([[2, 0], [1, 2], [0, 1]]), normal(3, 2, dtype=torch.float64).requires_grad_()
    x = normal(3, 4, dtype=torch.float32).requires_grad_()
    order = sort_by_expert(chosen, 3)
    scale = torch.arange(1.0, 7)[:, None]
    combine(dispatch(x, order) * scale, weights, order).square().sum().backward()
    found = x.grad.clone(), weights.grad.clone()
    x.grad = weights.grad = None
    rows = (x[order.order_R // 2] * scale)[order.inverse_R].view(3, 2, 4)
    (rows.double() * weights[..., None]).sum(1).float().square().sum().backward()
    torch.testing.assert_close(found[0], x.grad)
    torch.testing.assert_close(found[1], weights.grad)


@pytest.mark.parametrize(
    ("routing", "shared"),
    [
        pytest.param(SIGMOID, 1, id="moe-layer-sigmoid-shared"),
        pytest.param(SOFTMAX, 0, id="moe-layer-softmax"),
    ],
)
def test_layer_against_a_loop(routing: Routing, shared: int) -> None:
    """A float32 layer is, token by token, the weighted sum of its experts plus the shared ones; gradients as well."""
    found = layer(routing, shared)
    x = normal(2, 9, 64, dtype=torch.float32).requires_grad_()
    y = found(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in found.named_parameters()}
    gradients["x"] = x.grad.clone()
    found.zero_grad()
    x.grad = None

    def expert(w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return w2 @ (F.silu(w1 @ token) * (w3 @ token))

    tokens = x.double().view(18, 64)
    chosen, weights = found.router(x.view(18, 64))
    rows = []
    for token, experts, shares in zip(tokens, chosen.tolist(), weights, strict=True):
        weight = [w.double() for w in (found.experts.w1, found.experts.w2, found.experts.w3)]
        row = sum(share * expert(*(w[e] for w in weight), token) for e, share in zip(experts, shares, strict=True))
        if found.shared is not None:
            row = row + expert(*(w.weight.double() for w in (found.shared.w1, found.shared.w2, found.shared.w3)), token)
        rows.append(row)
    expected = torch.stack(rows)
    torch.testing.assert_close(y.view(18, 64), expected.float(), rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    for name, parameter in (*found.named_parameters(), ("x", x)):
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(torch.tensor([0, 7]), id="moe-choices-flat"),
        pytest.param(torch.tensor([[0, 7]], dtype=torch.int32), id="moe-choices-int32"),
    ],
)
def test_refused_choices(chosen: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of another shape or dtype are named, whether their numbers are checked or not."""
    for check in ("0", "1"):
        monkeypatch.setenv(CHECK, check)
        for call in (counted, sort_by_expert):
            with pytest.raises(
                ValueError, match=r"^choices are torch.int\d+ of shape .*; expected int64 \(T, K\), .*; "
            ):
                call(chosen, 8)


def test_refused_width() -> None:
    """A layer names the width that it takes, also where its input has no dimension at all."""
    for x in (normal(5, 32), torch.zeros(())):
        with pytest.raises(
            ValueError, match=r"^input has shape .*; expected \(\.\.\., 64\), .*; check the layer before"
        ):
            layer()(x)


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_router_stays_wide_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices and weights under autocast have the bits of those outside.

    Autocast leaves float64 alone, which is wide on a CPU, so the wide dtype of a GPU is put in its place.
    """
    monkeypatch.setattr(moe, "wide_dtype", lambda x: torch.float32)
    for routing in (SIGMOID, SOFTMAX):
        router, x = filled(Router(64, routing)), normal(200, 64)
        chosen, weights = router(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = router(x)
        assert weights.dtype == found[1].dtype == torch.float32
        assert chosen.tolist() == found[0].tolist()
        assert_bits_equal(weights, found[1], "weights of the chosen")
    with torch.device("meta"):  # which autocast does not know
        assert Router(64, SOFTMAX)(torch.empty(5, 64))[0].shape == (5, 3)


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=f"moe-autocast-{recipe}") for recipe in ("none", "rowwise")]
)
def test_experts_take_the_dtype_of_autocast(recipe: str) -> None:
    """float32 rows under autocast to bf16 are computed as bf16 ones; a layer answers in the dtype of its tokens."""
    found = layer(shared=1)
    if recipe != "none":
        convert_to_float8(nn.Sequential(found), recipe, detected=simulated("gfx942"))
    x, offs = normal(16, 64, dtype=torch.float32), torch.tensor([3, 3, 9, 9, 9, 12, 16, 16], dtype=torch.int32)
    expected = found.experts(x.bfloat16(), offs)
    compiled = torch.compile(found.experts, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (found.experts, compiled):
            assert_bits_equal(expected, call(x, offs), "experts")
        given = x.clone().requires_grad_()
        y = found(given)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    assert given.grad.dtype == torch.float32
    assert bool(given.grad.isfinite().all())


@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=f"moe-half-{recipe}") for recipe in ("none", "rowwise")])
def test_half_experts(recipe: str) -> None:
    """float16 rows, or autocast to it, are computed as float32 ones of their values, and answered in float16."""
    experts = filled(GroupedExperts(3, 64, 48))
    if recipe != "none":
        convert_to_float8(nn.Sequential(experts), recipe, detected=simulated("gfx942"))
    x, offs = normal(16, 64, dtype=torch.float16).requires_grad_(), torch.tensor([3, 3, 14], dtype=torch.int32)
    expected = experts(x.detach().float(), offs).half()
    y = experts(x, offs)
    assert_bits_equal(expected, y, "experts")
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float16
    assert bool(x.grad.isfinite().all())
    assert int(torch.count_nonzero(x.grad)) > 0
    with torch.autocast("cpu", dtype=torch.float16):
        assert_bits_equal(expected, experts(x.detach().float(), offs), "experts under autocast")


# --- conversion -------------------------------------------------------------------------------------------------------


def simulated(arch: str) -> Detected:
    row = device.lookup(arch)
    return Detected(arch=row, target=device.lookup("cpu"), reason="chosen by the test", simulated=True)


CONVERTED = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=f"moe-convert-{recipe}") for recipe in CONVERTED])
def test_conversion(recipe: str) -> None:
    """Experts and shared experts are converted, the router is not; what runs otherwise than it is called is said."""
    model = nn.ModuleDict({"ffn": layer(shared=1)})
    before = {name: parameter for name, parameter in model.named_parameters()}
    report = convert_to_float8(model, recipe, detected=simulated("gfx942"))
    assert report.converted == ("ffn.experts", "ffn.shared.w1", "ffn.shared.w2", "ffn.shared.w3")
    assert report.experts == ("ffn.experts",)
    assert report.left == {}
    assert model["ffn"].experts.plan.fmt.name == "e4m3fnuz"
    assert model["ffn"].experts.plan.recipe == EXPERT_RECIPES[recipe]
    text = str(report)
    assert "3 linears and the experts of 1 layers run in FP8" in text
    if recipe == "tensorwise":
        assert report.notes == {"ffn.experts": "experts run rowwise: tensorwise has no grouped GEMM"}
        assert "ffn.experts: experts run rowwise" in text
    else:
        assert report.notes == {}
    assert {name: id(parameter) for name, parameter in before.items()} == {
        name: id(parameter) for name, parameter in model.named_parameters()
    }


def test_filtered_experts_stay() -> None:
    """A filter keeps experts in high precision, and with `experts` alone there is nothing left to convert."""
    model = nn.ModuleDict({"ffn": layer(shared=1)})
    report = convert_to_float8(model, "rowwise", filter=("experts",), detected=simulated("cpu"))
    assert report.left == {"ffn.experts": "filter 'experts'"}
    assert model["ffn"].experts.plan is None
    assert "experts of" not in str(report)


def test_experts_of_another_recipe_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that has no grouped GEMM leaves experts as they are, and says which it would take."""
    monkeypatch.delitem(EXPERT_RECIPES, "tensorwise")
    model = nn.ModuleDict({"ffn": layer(shared=1)})
    report = convert_to_float8(model, "tensorwise", detected=simulated("cpu"))
    assert report.left == {"ffn.experts": "experts do not run tensorwise, only rowwise, rowwise_with_gw_hp, mxfp8"}


def test_mxfp8_experts() -> None:
    """mxfp8 is for OCP formats and sizes of 32; codes of both ways, scales a block, groups padded to 128."""

    def plan_of(arch: str) -> Plan:
        return Plan(
            RECIPES["mxfp8"], moe.formats.get(device.lookup(arch).e4m3), moe.formats.get(device.lookup(arch).e5m2)
        )

    experts, odd = filled(GroupedExperts(3, 64, 96)), GroupedExperts(3, 64, 48)
    assert experts.refuses(plan_of("gfx942")) == "mxfp8 is for OCP formats, this arch has e4m3fnuz"
    assert odd.refuses(plan_of("gfx950")) == "F = 48 not a multiple of 32"
    assert experts.refuses(plan_of("gfx950")) is None
    assert experts.to_float8(plan_of("gfx950")) is None
    assert (experts.plan.recipe.name, experts.plan.recipe.scale_mode) == ("mxfp8", "rceil")
    x, offs = normal(20, 64).requires_grad_(), torch.tensor([5, 5, 17], dtype=torch.int32)
    codes = experts.plan.quantise((x, experts.w1.bfloat16()), (x,), (experts.w2.bfloat16(),), offs)
    shapes = [[tuple(part.shape) for part in pair] for pair in (*codes.rows, *codes.columns, *codes.weights)]
    assert shapes == [
        [(20, 64), (20, 2)],
        [(3, 96, 64), (3, 96, 2)],
        [(384, 64), (64, 12)],
        [(3, 96, 64), (3, 96, 2)],
    ]
    assert codes.padded_offs.tolist() == [128, 128, 256]
    with launch.recording() as ran:
        experts(x, offs).float().square().sum().backward()
    assert set(ran) == {"quantize_mxfp8", "grouped_mxfp8_mm"}
    assert int(torch.count_nonzero(x.grad[17:])) == 0
    for parameter in experts.parameters():
        assert bool(parameter.grad.isfinite().all())
        assert int(torch.count_nonzero(parameter.grad[1])) == 0
        assert int(torch.count_nonzero(parameter.grad[[0, 2]])) > 0
    with pytest.raises(ValueError, match="alignment is 16; expected None or a multiple of 32"):
        experts.keep(alignment=16)
    with pytest.raises(ValueError, match="N is 48; FP8 GEMMs need a multiple of 32"):
        moe.fp8_grouped_mm(x, (normal(3, 48, 64),), offs, experts.plan)


EMPTY = (
    pytest.param((0, 2, 64, 32), id="moe-empty-rows"),
    pytest.param((5, 2, 0, 32), id="moe-empty-n"),
    pytest.param((5, 2, 32, 0), id="moe-empty-k"),
)


@pytest.mark.parametrize("sizes", EMPTY)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_nothing_to_multiply(recipe: str, sizes: tuple[int, int, int, int]) -> None:
    """No rows, or weights without rows or columns: outputs of the right shape and gradients that are exactly zero."""
    m, e, n, k = sizes
    plan = moe.ExpertPlan(EXPERT_RECIPES[recipe], moe.formats.get("e4m3fn"))
    x, w = normal(m, k).requires_grad_(), normal(e, n, k).requires_grad_()
    (y,) = moe.fp8_grouped_mm(x, (w,), torch.tensor([m // 2, m], dtype=torch.int32), plan)
    assert y.shape == (m, n)
    assert int(torch.count_nonzero(y)) == 0
    y.sum().backward()
    for given in (x, w):
        assert given.grad.shape == given.shape
        assert int(torch.count_nonzero(given.grad)) == 0


@pytest.mark.parametrize("saved_weight", ["codes", "weight"])
def test_weights_of_two_widths(saved_weight: str) -> None:
    """Weights of different N share one input: what the forward pass takes, the backward pass takes, with its bits."""
    plan = moe.ExpertPlan(replace(EXPERT_RECIPES["rowwise"], saved_weight=saved_weight), moe.formats.get("e4m3fn"))
    x, weights = normal(12, 64), [normal(2, 32, 64, seed=2), normal(2, 48, 64, seed=3)]
    offs = torch.tensor([5, 12], dtype=torch.int32)
    found = []
    for call in (weights, *([weight] for weight in weights)):
        given, leaves = x.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in call]
        sum(y.float().square().sum() for y in moe.fp8_grouped_mm(given, leaves, offs, plan)).backward()
        found.append((given.grad, [leaf.grad for leaf in leaves]))
    (both, of_weights), *each = found
    assert_bits_equal(both, each[0][0] + each[1][0], "gradient of x")
    for one, other in zip(of_weights, (gradient for _, (gradient,) in each), strict=True):
        assert_bits_equal(one, other, "gradient of a weight")


def ends_of(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(
    ("offs", "change", "words"),
    [
        pytest.param(ends_of(2, 5)[None], {}, r"^offs is torch.int32 of shape \(1, 2\)", id="moe-offs-matrix"),
        pytest.param(ends_of(5)[0], {}, r"^offs is torch.int32 of shape \(\)", id="moe-offs-number"),
        pytest.param(ends_of(), {}, r"expected int32 \(E,\), E >= 1", id="moe-offs-empty"),
        pytest.param(ends_of(2, 5).long(), {}, r"^offs is torch.int64", id="moe-offs-int64"),
        pytest.param(
            ends_of(2, 4, 5), {}, r"^a weight has 2 matrices and offs 3 ends; .*; pass", id="moe-offs-experts"
        ),
        pytest.param(ends_of(2, 5), {"x": "meta"}, r"^a weight is on cpu and x on meta; .*; move", id="moe-meta-x"),
        pytest.param(
            ends_of(2, 5), {"w": "meta"}, r"^a weight is on meta and x on cpu; .*; move", id="moe-meta-weight"
        ),
        pytest.param(ends_of(2, 5), {"x": "meta", "w": "meta"}, r"on cpu; expected .* on meta", id="moe-meta-both"),
    ],
)
def test_refused_operands(offs: torch.Tensor, change: dict[str, str], words: str) -> None:
    """What does not fit is named before anything is quantised, alike in every recipe and in high precision."""
    x, w = normal(5, 64).to(change.get("x", "cpu")), normal(2, 32, 64).to(change.get("w", "cpu"))
    calls: list[Callable[[], object]] = [lambda: moe.high_precision_grouped_mm(x, (w,), offs)]
    for recipe in ("rowwise", "mxfp8"):
        plan = moe.ExpertPlan(EXPERT_RECIPES[recipe], moe.formats.get("e4m3fn"))
        calls.append(lambda plan=plan: moe.fp8_grouped_mm(x, (w,), offs, plan))
    for call in calls:
        with launch.recording() as ran, pytest.raises(ValueError, match=words) as caught:
            call()
        assert str(caught.value).count("; ") == 2
        assert not ran


def test_emulated_experts() -> None:
    """Experts whose E8M0 scales no instruction of the target takes are reported, linears beside them or not."""
    detected = replace(simulated("sm_90"), target=device.lookup("sm_90"))
    note = "E8M0 scales are emulated: sm_90 has no matrix instruction that takes them"
    for shared, kinds in ((0, ["(experts)"]), (1, ["(linears)", "(experts)"])):
        model = nn.ModuleDict({"ffn": MoE(64, 96, SOFTMAX, shared)})
        report = convert_to_float8(model, "mxfp8", detected=detected)
        assert report.notes == dict.fromkeys(kinds, note)


def test_state_dict_is_plain() -> None:
    """Keys and tensors are the same before and after conversion, the balancing bias among them."""
    model = nn.Sequential(layer())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    after = model.state_dict()
    assert (
        list(before)
        == list(after)
        == [
            "0.router.weight",
            "0.router.bias",
            "0.experts.w1",
            "0.experts.w2",
            "0.experts.w3",
        ]
    )
    for name, tensor in before.items():
        assert type(after[name]) is torch.Tensor
        assert_bits_equal(tensor, after[name], name)


def test_bias_stays_float32() -> None:
    """A model that is cast, moved or emptied keeps the balancing bias in float32, and its bits where it has any.

    A step of 1e-3 on a bias of 2 is less than half a bf16 ulp: rounded, balancing would stop.
    """
    model = nn.Sequential(layer(shared=1))
    router = model[0].router
    router.bias.copy_(torch.arange(8) * 1e-3 + 2)
    before = router.bias.clone()
    for cast in (model.bfloat16, model.half, model.double, lambda: model.to("cpu", torch.bfloat16)):
        cast()
        assert_bits_equal(before, router.bias, "bias")
    assert router.weight.dtype == torch.bfloat16
    assert model.state_dict()["0.router.bias"].dtype == torch.float32
    router.load += torch.tensor([9, 0, 0, 0, 0, 0, 0, 0])
    router.balance(1e-3)
    assert router.bias.tolist() == pytest.approx((before + torch.tensor([-1e-3] + [1e-3] * 7)).tolist(), abs=1e-6)
    assert model.to("meta")[0].router.bias.dtype == torch.float32
    assert model.to_empty(device="cpu")[0].router.bias.dtype == torch.float32


def test_meta_construction() -> None:
    """A layer is built and converted on the meta device, then filled: nothing asks for data on the way."""
    with torch.device("meta"):
        found = MoE(64, 48, SIGMOID, shared=1)
    convert_to_float8(nn.Sequential(found), "rowwise", detected=simulated("cpu"))
    found.to_empty(device="cpu")
    filled(found)
    found.router.reset()
    assert int(torch.count_nonzero(found.router.bias)) == 0
    assert bool(found(normal(5, 64)).isfinite().all())


def test_sizes_are_refused() -> None:
    """A width that FP8 GEMMs do not take is named when the layer is built."""
    for dim, ffn, words in ((72, 48, r"dim \(D\) is 72"), (64, 40, r"ffn \(F\) is 40")):
        with pytest.raises(ValueError, match=words):
            MoE(dim, ffn, SOFTMAX)
    with pytest.raises(ValueError, match="saved_input is 'x'; expected one of: codes, input"):
        moe.ExpertRecipe("rowwise", True, saved_input="x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(
            {"saved_weight": "input"}, "saved_weight is 'input'; expected one of: codes, weight", id="keep-weight"
        ),
        pytest.param({"saved_input": None}, "saved_input is None; expected one of: codes, input", id="keep-input"),
        pytest.param(
            {"unaligned_groups": "cut"}, "unaligned_groups is 'cut'; expected one of: pad, refuse", id="keep-groups"
        ),
        pytest.param(
            {"fast_accum_gradients": "yes"}, "fast_accum_gradients is 'yes'; expected True or False", id="keep-fast"
        ),
        pytest.param({"alignment": 24}, "alignment is 24; expected None or a multiple of 16", id="keep-alignment"),
        pytest.param({"alignment": 0}, "alignment is 0; expected None or a multiple of 16", id="keep-alignment-zero"),
        pytest.param({"saved_wieght": "codes"}, "saved_wieght cannot be changed; expected some of", id="keep-unknown"),
        pytest.param({"grad_weight": False}, "grad_weight cannot be changed; expected some of", id="keep-recipe"),
    ],
)
def test_what_experts_keep_is_checked(fields: dict[str, object], words: str) -> None:
    """A field that does not exist or is the recipe itself, and a wrong value, are named; the plan stays as it was."""
    experts = filled(GroupedExperts(3, 64, 48))
    convert_to_float8(nn.Sequential(experts), "rowwise", detected=simulated("cpu"))
    before = experts.plan
    with pytest.raises(ValueError, match=words):
        experts.keep(**fields)
    assert experts.plan is before


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, [True, False, False], id="moe-fast-default"),
        pytest.param({"fast_accum_gradients": True}, [True, True, True], id="moe-fast-everywhere"),
        pytest.param({"fast_accum": False}, [False, False, False], id="moe-fast-nowhere"),
    ],
)
def test_fast_accumulation(fields: dict[str, object], expected: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the forward GEMM alone accumulates fast; the recipe says otherwise for it and for both gradients."""
    asked: list[bool] = []
    real = moe.grouped_scaled_mm

    def multiply(*operands: torch.Tensor, fast_accum: bool, **named: object) -> torch.Tensor:
        asked.append(fast_accum)
        return real(*operands, fast_accum=fast_accum, **named)

    monkeypatch.setattr(moe, "grouped_scaled_mm", multiply)
    plan = moe.ExpertPlan(replace(EXPERT_RECIPES["rowwise"], **fields), moe.formats.get("e4m3fn"))
    x, w = normal(24, 64).requires_grad_(), normal(2, 48, 64).requires_grad_()
    (y,) = moe.fp8_grouped_mm(x, (w,), torch.tensor([5, 24], dtype=torch.int32), plan)
    y.sum().backward()
    assert asked == expected


def test_refuse_unaligned_groups() -> None:
    """unaligned_groups `refuse`: a group that is no multiple of 16 is named, a good one passes (pytorch/ao#2678)."""
    experts = filled(GroupedExperts(3, 64, 48))
    convert_to_float8(nn.Sequential(experts), "rowwise", detected=simulated("cpu"))
    x = normal(48, 64)
    with pytest.raises(ValueError, match="converted"):
        GroupedExperts(3, 64, 48).keep(unaligned_groups="refuse")
    padded = experts(x, torch.tensor([16, 16, 48], dtype=torch.int32))
    experts.keep(unaligned_groups="refuse")
    assert_bits_equal(padded, experts(x, torch.tensor([16, 16, 48], dtype=torch.int32)), "aligned groups")
    with pytest.raises(
        ValueError,
        match=r"group 1 has 20 rows along the contraction, not a multiple of 16; .*; set unaligned_groups='pad'",
    ):
        experts(x, torch.tensor([16, 36, 48], dtype=torch.int32))


def test_codes_are_counted() -> None:
    """Saturated and NaN codes of experts reach the counter: of tokens, weights and gradients, each both ways, once."""
    seen: list[tuple[int, ...]] = []

    class Counter(CodeCounter):
        def observe(self, codes: torch.Tensor, table: CodeTable, backward: bool = False) -> None:
            seen.append(tuple(codes.shape))
            super().observe(codes, table, backward)

    counter = Counter()
    model = nn.Sequential(layer())
    convert_to_float8(model, "rowwise", detected=simulated("gfx942"), counter=counter)
    y = model(normal(12, 64).requires_grad_())
    rows = 12 * 3
    padded = groups.padded_rows(rows, 8, 16)
    forward = [(rows, 64), (padded, 64), (rows, 48), (padded, 48), (8, 48, 64), (8, 48, 64), (8, 64, 48)]
    assert sorted(seen) == sorted(forward)
    assert not bool(counter.totals[1].any())
    assert counter.take()[1] == 0
    seen.clear()
    y.sum().backward()
    # Gradients of y, gate and up; then weights turned.
    gradients = [(rows, 64), (padded, 64), *[(rows, 48), (padded, 48)] * 2]
    assert sorted(seen) == sorted([*gradients, (8, 64, 48), (8, 64, 48), (8, 48, 64)])
    assert not bool(counter.totals[0].any())
    saturated, nan = counter.take()
    assert saturated > 0
    assert nan == 0
    x = normal(12, 64)
    x[3, 4] = float("nan")
    model(x)
    assert counter.take()[1] > 0


# --- what is kept, and what is compiled -------------------------------------------------------------------------------


def kept_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of a call, parameters not counted."""
    total: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            total[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(total.values())


def test_bytes_that_are_kept() -> None:
    """Column codes of x are kept in its place, at half its bytes; codes of weights are kept only where asked for."""
    rows, experts, dim, ffn = 512, 2, 64, 48
    offs, x = torch.tensor([256, 512], dtype=torch.int32), normal(rows, dim)
    w = normal(experts, ffn, dim).requires_grad_()
    sizes = {}
    for inputs in ("codes", "input"):
        for weights in ("codes", "weight"):
            recipe = moe.ExpertRecipe("rowwise", True, saved_input=inputs, saved_weight=weights)
            plan = moe.ExpertPlan(recipe, moe.formats.get("e4m3fn"))
            given = x.clone().requires_grad_()
            sizes[inputs, weights] = kept_bytes(
                lambda given=given, plan=plan: moe.fp8_grouped_mm(given, (w,), offs, plan)[0]
            )
    assert sizes["input", "weight"] - sizes["codes", "weight"] >= rows * dim * 0.9
    assert sizes["codes", "codes"] < sizes["codes", "weight"], "one byte a weight in the place of two"


@pytest.mark.parametrize(
    ("saved_weight", "one_launch", "one_read", "forward", "backward"),
    [
        pytest.param("weight", True, True, {"quantize_together": 2}, {"quantize_together": 2}, id="moe-one-launch"),
        pytest.param("codes", True, True, {"quantize_together": 2}, {"quantize_together": 2}, id="moe-one-both-ways"),
        pytest.param(
            "weight",
            False,
            True,
            {"quantize_rowwise_and_colwise": 2, "quantize_experts": 3},
            {"quantize_rowwise_and_colwise": 3, "quantize_experts_transposed": 3},
            id="moe-one-read",
        ),
        pytest.param(
            "codes",
            False,
            True,
            {"quantize_rowwise_and_colwise": 2, "quantize_experts_both": 3},
            {"quantize_rowwise_and_colwise": 3},
            id="moe-one-read-codes",
        ),
        pytest.param(
            "weight",
            False,
            False,
            {"quantize_rowwise": 2, "quantize_colwise_grouped": 2, "quantize_experts": 3},
            {"quantize_rowwise": 3, "quantize_colwise_grouped": 3, "quantize_experts_transposed": 3},
            id="moe-each",
        ),
    ],
)
def test_passes_over_tokens_and_weights(
    saved_weight: str,
    one_launch: bool,
    one_read: bool,
    forward: dict[str, int],
    backward: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two GEMMs share one quantisation of x. In one launch: two ops in the forward pass and two in the backward pass.

    The kernels of these ops, one each for quantize_together, are counted in numerics/test_moe.py, on a GPU.
    """
    monkeypatch.setattr(moe, "ONE_LAUNCH", {"cpu": one_launch})
    monkeypatch.setattr(moe, "ONE_READ", {("cpu", what): one_read for what in ("tokens", "weights")})
    experts = filled(GroupedExperts(3, 64, 48))
    convert_to_float8(nn.Sequential(experts), "rowwise", detected=simulated("cpu"))
    experts.keep(saved_weight=saved_weight)
    calls: dict[str, int] = {}
    real = launch.record

    def count(op: str, what: str) -> None:
        calls[op] = calls.get(op, 0) + 1
        real(op, what)

    monkeypatch.setattr(launch, "record", count)
    y = experts(normal(24, 64).requires_grad_(), torch.tensor([5, 5, 24], dtype=torch.int32))
    assert calls == forward | {"grouped_scaled_mm": 3}
    calls.clear()
    y.sum().backward()
    assert calls == backward | {"grouped_scaled_mm": 6}


@pytest.mark.parametrize(
    "one_read", [pytest.param(True, id="moe-graph-one-read"), pytest.param(False, id="moe-graph-each")]
)
def test_one_graph_of_separate_ops(one_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose tensors each have kernels of their own compile to one graph too; with the bits of one launch."""
    torch._dynamo.reset()
    experts = filled(GroupedExperts(3, 64, 48))
    convert_to_float8(nn.Sequential(experts), "rowwise", detected=simulated("cpu"))
    x, offs = normal(24, 64), torch.tensor([5, 5, 24], dtype=torch.int32)
    found = []
    for one_launch in (True, False):
        monkeypatch.setattr(moe, "ONE_LAUNCH", {"cpu": one_launch})
        monkeypatch.setattr(moe, "ONE_READ", {("cpu", what): one_read for what in ("tokens", "weights")})
        call = experts if one_launch else torch.compile(experts, fullgraph=True, dynamic=False, backend="aot_eager")
        given = x.clone().requires_grad_()
        y = call(given, offs)
        y.square().sum().backward()
        found.append((y, given.grad, *(parameter.grad for parameter in experts.parameters())))
        experts.zero_grad()
    for one, other in zip(*found, strict=True):
        assert_bits_equal(one, other, "separate ops")


def test_one_graph_for_many_routings() -> None:
    """A layer compiles to one graph without breaks, gives the eager bits, and ten routings compile nothing more.

    pytorch/torchtitan#1971: token counts of experts vary from step to step, and must not recompile.
    """
    torch._dynamo.reset()
    model = nn.Sequential(layer(shared=1))
    convert_to_float8(model, "rowwise", detected=simulated("gfx942"))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for step in range(10):
        x = normal(16, 64, seed=step)
        found = []
        for call in (compiled, model):
            given = x.clone().requires_grad_()
            y = call(given)
            y.square().sum().backward()
            found.append((y, given.grad, model[0].experts.w1.grad.clone()))
            model.zero_grad()
        for what, one, other in zip(("y", "x", "w1"), *found, strict=True):
            assert_bits_equal(other, one, f"{what}, routing {step}")
    assert len(graphs) == 1


@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=f"moe-frozen-{recipe}") for recipe in ("none", "rowwise")])
def test_one_graph_without_gradients(recipe: str) -> None:
    """Experts compile to one graph where nothing requires a gradient, with eager bits, for any number of weights."""
    torch._dynamo.reset()
    experts, offs, x = filled(GroupedExperts(2, 64, 48)), torch.tensor([2, 5], dtype=torch.int32), normal(5, 64)
    plan = None
    if recipe != "none":
        convert_to_float8(nn.Sequential(experts), recipe, detected=simulated("cpu"))
        plan = experts.plan

    def products(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = (experts.w1.bfloat16(), experts.w3.bfloat16(), experts.w1.bfloat16())
        found = [experts(x, offs)]
        for count in (1, 2, 3):
            if plan is None:
                found += moe.high_precision_grouped_mm(x, weights[:count], offs)
            else:
                found += moe.fp8_grouped_mm(x, weights[:count], offs, plan)
        return tuple(found)

    compiled = torch.compile(products, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        pairs = list(zip(products(x, offs), compiled(x, offs), strict=True))
    experts.requires_grad_(False)
    pairs += zip(products(x, offs), compiled(x, offs), strict=True)
    for one, other in pairs:
        assert_bits_equal(one, other, "without gradients")


# --- expert parallelism -----------------------------------------------------------------------------------------------


def _train(found: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, input gradient and parameters' gradients of one step on tokens x."""
    given = x.clone().requires_grad_()
    y = found(given)
    (y.float().square() * torch.arange(1.0, 65)).sum().backward()
    return {"y": y.detach(), "x": given.grad} | {name: p.grad for name, p in found.named_parameters()}


EXPERT_PARALLEL_RECIPES = ("bf16", "rowwise")

# How far gradients that are summed over ranks may be from one process's, of their norm: in norm, and as vectors. Each
# rank rounds to bf16 and takes the scales of shared experts' gradients from its own tokens. Measured: 4e-4, 2.7e-3.
NORM, DISTANCE = 1e-3, 5e-3


def _layer_and_tokens(recipe: str) -> tuple[MoE, torch.Tensor]:
    """Most tokens are alike and choose the same experts: uneven blocks, and experts of nobody."""
    found = layer(shared=1)
    if recipe != "bf16":
        convert_to_float8(nn.Sequential(found), recipe, detected=simulated("gfx942"))
    x = normal(24, 64)
    x[:14] = x[:1]
    return found, x


def _rank(rank: int, size: int, folder: str) -> None:
    """One process of expert-parallel steps; writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        results = {}
        for recipe in EXPERT_PARALLEL_RECIPES:
            for cut in (True, False):
                found, x = _layer_and_tokens(recipe)
                if cut:
                    found.expert_parallel(dist.group.WORLD)
                gradients = _train(found, x[:16] if rank == 0 else x[16:])
                everybodys = ("router", "shared") if cut else ("router", "shared", "experts")
                for name, gradient in gradients.items():
                    if name.startswith(everybodys):
                        dist.all_reduce(gradient)
                results[recipe, cut] = (gradients, found.router.load)
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _run(ranks: list[multiprocessing.Process]) -> None:
    """The processes, until all have ended; none is left behind by one that fails, nor after three minutes."""
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 180
    try:
        running = dict(enumerate(ranks))
        while running:
            connection.wait([process.sentinel for process in running.values()], max(deadline - time.monotonic(), 0))
            assert time.monotonic() < deadline, f"ranks {list(running)} still run after three minutes"
            for rank, process in list(running.items()):
                if process.exitcode is not None:
                    assert process.exitcode == 0, f"rank {rank} ended with exit code {process.exitcode}"
                    del running[rank]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_ranks_end_together() -> None:
    """A rank that fails takes the others along at once: they would wait for it, and outlive the test."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=time.sleep, args=(600,)), context.Process(target=sys.exit, args=(3,))]
    with pytest.raises(AssertionError, match="rank 1 ended with exit code 3"):
        _run(ranks)
    assert not any(process.is_alive() for process in ranks)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Any]]:
    """What two ranks found, with uneven tokens: (recipe, whether experts were cut) -> gradients and load."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    _run([context.Process(target=_rank, args=(rank, 2, str(folder))) for rank in (0, 1)])
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=f"moe-norms-{recipe}") for recipe in EXPERT_PARALLEL_RECIPES]
)
def test_gradient_norms_of_one_rank_and_of_two(recipe: str, ranks: list[dict[tuple[str, bool], Any]]) -> None:
    """World size 1, 2, and 2 with expert parallelism: the norm of every parameter's gradient, router included, agrees.

    An expert's gradient at expert parallel 2 is held by one rank, whole; the others are sums over ranks.
    """
    found, x = _layer_and_tokens(recipe)
    expected = _train(found, x)
    parameters = [name for name, _ in found.named_parameters()]
    assert "router.weight" in parameters
    for cut in (False, True):
        gradients = [rank[recipe, cut][0] for rank in ranks]
        for name in parameters:
            whole = gradients[0][name]
            if cut and name.startswith("experts"):
                whole = torch.cat([gradient[name] for gradient in gradients])
            norm = float(whole.norm())
            wanted = float(expected[name].norm())
            assert norm == pytest.approx(wanted, rel=NORM), f"{recipe}, cut: {cut}: norm of {name}"


def test_expert_parallel(ranks: list[dict[tuple[str, bool], Any]]) -> None:
    """Two ranks with half of the experts and uneven tokens give one process's outputs and gradients, a parameter each.

    An expert's gradient is the sum over the tokens of both ranks, neither more nor less: multiplied by the degree it
    would leave the loss curve as it is.
    """
    for recipe in EXPERT_PARALLEL_RECIPES:
        found, x = _layer_and_tokens(recipe)
        expected = _train(found, x)
        both, loads = zip(*(results[recipe, True] for results in ranks), strict=True)
        assert (loads[0] + loads[1]).tolist() == found.router.load.tolist()
        for name in ("y", "x", "experts.w1", "experts.w2", "experts.w3"):
            assert_bits_equal(expected[name], torch.cat([rank[name] for rank in both]), f"{recipe}: {name}")
        summed = [name for name in expected if name.startswith(("router", "shared"))]
        assert len(summed) == 4
        for name in summed:
            norm = float(expected[name].norm())
            assert float(both[0][name].norm()) == pytest.approx(norm, rel=NORM), f"{recipe}: norm of {name}"
            apart = float((both[0][name] - expected[name]).norm()) / norm
            assert apart <= DISTANCE, f"{recipe}: {name} is {apart:.4f} of its norm apart"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone; a trainer of another test may have left its own."""
    parallel.leave()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_exchange_of_bad_ends(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends that decrease or leave the rows are clamped as where nothing is exchanged; checked, they raise."""
    monkeypatch.delenv(CHECK, raising=False)
    experts, x = filled(GroupedExperts(4, 64, 48)), normal(12, 64)
    for ends in ((3, 5, 5, 10), (5, 3, 7, 10), (-2, 5, 20, 12)):
        offs = torch.tensor(ends, dtype=torch.int32)
        assert_bits_equal(experts(x, offs), exchanged_experts(x, offs, experts, alone), f"ends {ends}")
    monkeypatch.setenv(CHECK, "1")
    with pytest.raises(ValueError, match="group 1 ends at 3, but the group before it ends at 5"):
        exchanged_experts(x, torch.tensor([5, 3, 7, 10], dtype=torch.int32), experts, alone)


def test_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallelism applied twice would keep a quarter of the experts and lose the others' tokens: refused."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    found = layer()
    found.expert_parallel(object())
    assert found.experts.w1.shape[0] == 4
    with pytest.raises(
        ValueError, match="holds 4 of 8 experts already; expected a whole one; call expert_parallel once"
    ):
        found.expert_parallel(object())
    assert found.experts.w1.shape[0] == 4


def test_degree_that_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight experts over three ranks are refused before a parameter is cut."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(ValueError, match="8 experts do not divide over 3 ranks; expected a multiple; choose another"):
        layer().expert_parallel(object())
