"""Llama 3 and DeepSeek-V3 from the table: parameter counts, initial weights, causality, the arithmetic of CPUs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from fp8stack.linear import Linear, product, widened
from fp8stack.models import (
    MODELS,
    DeepSeek,
    Llama,
    RMSNorm,
    Transformer,
    causal_attention,
    initial_weight,
    model_named,
    rotate,
)
from fp8stack.models import rope_table as table_of
from fp8stack.moe import Routing

TINY = MODELS["llama3-tiny"]


def tiny(seed: int = 0) -> Transformer:
    model = Transformer(TINY)
    model.init_weights(seed)
    return model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("llama3-tiny", 935_040, id="models-tiny"),
        # Published: 8.03 B, 70.6 B and 405.9 B; 1b as released ties 262.7 M of embedding (1.236 B there).
        pytest.param("llama3-1b", 1_498_482_688, id="models-1b"),
        pytest.param("llama3-8b", 8_030_261_248, id="models-8b"),
        pytest.param("llama3-70b", 70_553_706_496, id="models-70b"),
        pytest.param("llama3-405b", 405_853_388_800, id="models-405b"),
        pytest.param("dsv3-tiny", 1_163_904, id="models-dsv3-tiny"),
        # As published for V2-Lite and V2; V3 has 14,848 balancing biases more, which are no parameters here.
        pytest.param("dsv3-16b", 15_706_484_224, id="models-dsv3-16b"),
        pytest.param("dsv3-236b", 235_741_434_880, id="models-dsv3-236b"),
        pytest.param("dsv3-671b", 671_026_419_200 - 58 * 256, id="models-dsv3-671b"),
    ],
)
def test_parameter_count(name: str, parameters: int) -> None:
    """The formula gives the published sizes, and a model built on the meta device has that many."""
    assert parameters == MODELS[name].parameters
    with torch.device("meta"):
        model = Transformer(MODELS[name])
    assert parameters == sum(parameter.numel() for parameter in model.parameters())


def test_unknown_model() -> None:
    """The error lists the models that exist."""
    with pytest.raises(ValueError, match=r"llama3-tinny.*llama3-tiny"):
        model_named("llama3-tinny")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"ffn": 350}, "ffn is 350", id="models-odd-ffn"),
        pytest.param({"vocab": 770}, "vocab is 770", id="models-odd-vocab"),
        pytest.param({"kv_heads": 3}, "kv heads", id="models-odd-kv-heads"),
    ],
)
def test_bad_sizes(change: dict[str, int], word: str) -> None:
    """Sizes that FP8 GEMMs or the heads cannot take are refused by name."""
    sizes = {"dim": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 352, "vocab": 768, **change}
    with pytest.raises(ValueError, match=word):
        Transformer(Llama(**sizes))


@pytest.mark.parametrize("field", ["ffn", "expert_ffn", "vocab", "q_lora", "kv_lora", "rope_dim", "nope_dim", "v_dim"])
def test_bad_sizes_of_deepseek(field: str) -> None:
    """Every width that a product has is refused by name where FP8 GEMMs cannot take it."""
    size = MODELS["dsv3-tiny"]
    with pytest.raises(ValueError, match=f"^{field} is"):
        Transformer(dataclasses.replace(size, **{field: getattr(size, field) + 8}))


def test_initial_weights_depend_on_name_and_seed_only() -> None:
    """The same bits whatever was built before and whatever torch's generators hold; another seed, other bits."""
    one = {name: p.detach().clone() for name, p in tiny().named_parameters()}
    torch.manual_seed(1)
    torch.randn(7)
    two = dict(tiny().named_parameters())
    other = dict(tiny(seed=1).named_parameters())
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name
        assert weight.dtype == torch.float32
        if weight.ndim == 2:
            assert not torch.equal(weight, other[name]), name


def test_initial_weight_is_a_bell() -> None:
    """Mean 0 and the wanted deviation within four sigma; cut at 3.46 deviations; chunks leave no seam."""
    weight = initial_weight(0, "bell", torch.Size((512, 512)), 0.5)
    assert abs(float(weight.mean())) < 4 * 0.5 / 512
    assert float(weight.std()) == pytest.approx(0.5, rel=0.01)
    assert float(weight.abs().max()) <= 0.5 * math.sqrt(12)
    assert torch.equal(weight[:3], initial_weight(0, "bell", torch.Size((3, 512)), 0.5))


def test_golden_weights() -> None:
    """The first weights of llama3-tiny, as float32 numbers written down once."""
    weight = initial_weight(0, "layers.0.attention.wq.weight", torch.Size((128, 128)), 128**-0.5)
    assert weight[0, :4].tolist() == [
        -0.0656537115573883,
        -0.12313604354858398,
        -0.07633397728204727,
        0.14851918816566467,
    ]


def test_causal() -> None:
    """Changing a token changes no logit before it."""
    model = tiny()
    tokens = (torch.arange(32) * 7 % 768)[None]
    changed = tokens.clone()
    changed[0, 20] = 5
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert tuple(before.shape) == (1, 32, 768)
    assert torch.bfloat16 == before.dtype
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def _plain_transformer(weights: dict[str, torch.Tensor], size: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (S,V) of Llama 3 as its paper has it, in float64, for one sequence; shares only names with models.py."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + size.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        """Element i and i + K/2 of a head are one complex number, turned by position * theta^(-2i/K)."""
        half = size.head_dim // 2
        angle = torch.arange(len(x)).double()[:, None] * size.rope_theta ** (-torch.arange(half).double() / half)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], dim=1)

    x = weights["tok_embeddings.weight"][tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for layer in range(size.layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        normed = norm(x, f"layers.{layer}.attention_norm")
        heads = []
        for head in range(size.heads):
            own = slice(head * size.head_dim, (head + 1) * size.head_dim)
            group = head * size.kv_heads // size.heads
            shared = slice(group * size.head_dim, (group + 1) * size.head_dim)
            query = turned(normed @ w["attention.wq.weight"][own].t())
            key = turned(normed @ w["attention.wk.weight"][shared].t())
            value = normed @ w["attention.wv.weight"][shared].t()
            scores = (query @ key.t() / math.sqrt(size.head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ value)
        x = x + torch.cat(heads, dim=1) @ w["attention.wo.weight"].t()
        normed = norm(x, f"layers.{layer}.ffn_norm")
        gate = normed @ w["feed_forward.w1.weight"].t()
        x = x + (gate * gate.sigmoid() * (normed @ w["feed_forward.w3.weight"].t())) @ w["feed_forward.w2.weight"].t()
    return norm(x, "norm") @ weights["output.weight"].t()


def test_transformer_is_llama() -> None:
    """The logits of a model with shared key heads are those of a plain float64 Llama, up to bf16's roundings."""
    size = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=64)
    model = Transformer(size)
    model.init_weights(3)
    with torch.no_grad():  # norms that do something
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.sin(torch.arange(len(parameter)).float() + len(name)))
    tokens = torch.arange(24) * 29 % 64
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    expected = _plain_transformer(weights, size, tokens)
    with torch.no_grad():
        actual = model(tokens[None])[0].double()
    error = float((expected - actual).norm() / expected.norm())
    assert error < 0.02, f"logits differ by {error:.3g} of their norm; expected bf16's roundings, about 0.005"


def _plain_deepseek(weights: dict[str, torch.Tensor], size: DeepSeek, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (S,V) of DeepSeek-V3 as its report has it, in float64, for one sequence: loops over heads and tokens."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + size.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        """Element 2i and 2i + 1 are one complex number, turned by position * theta^(-2i/R)."""
        half = size.rope_dim // 2
        angle = torch.arange(len(x)).double()[:, None] * size.rope_theta ** (-torch.arange(half).double() / half)
        z = torch.view_as_complex(x.reshape(len(x), half, 2)) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(z).flatten(1)

    def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        gate = w1 @ x
        return w2 @ (gate * gate.sigmoid() * (w3 @ x))

    x = weights["tok_embeddings.weight"][tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    nope, rope, width = size.nope_dim, size.rope_dim, size.nope_dim + size.v_dim
    for layer in range(size.layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        normed = norm(x, f"layers.{layer}.attention_norm")
        if size.q_lora:
            latent = norm(normed @ w["attention.wq_a.weight"].t(), f"layers.{layer}.attention.q_norm")
            queries = latent @ w["attention.wq_b.weight"].t()
        else:
            queries = normed @ w["attention.wq.weight"].t()
        compressed = normed @ w["attention.wkv_a.weight"].t()
        shared_key = turned(compressed[:, size.kv_lora :])
        latent = norm(compressed[:, : size.kv_lora], f"layers.{layer}.attention.kv_norm")
        up = latent @ w["attention.wkv_b.weight"].t()
        heads = []
        for head in range(size.heads):
            query = queries[:, head * (nope + rope) : (head + 1) * (nope + rope)]
            query = torch.cat([query[:, :nope], turned(query[:, nope:])], dim=1)
            key = torch.cat([up[:, head * width : head * width + nope], shared_key], dim=1)
            value = up[:, head * width + nope : (head + 1) * width]
            scores = (query @ key.t() / math.sqrt(nope + rope)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ value)
        x = x + torch.cat(heads, dim=1) @ w["attention.wo.weight"].t()
        normed = norm(x, f"layers.{layer}.ffn_norm")
        if layer < size.dense_layers:
            ffn = [w[f"feed_forward.w{i}.weight"] for i in (1, 2, 3)]
            x = x + torch.stack([swiglu(token, *ffn) for token in normed])
            continue
        scores = normed @ w["moe.router.weight"].t()
        scores = scores.sigmoid() if size.routing.score == "sigmoid" else scores.softmax(-1)
        shared = [w[f"moe.shared.w{i}.weight"] for i in (1, 2, 3)]
        experts = [w[f"moe.experts.w{i}"] for i in (1, 2, 3)]
        rows = []
        for token, row in zip(normed, scores, strict=True):
            chosen = row.topk(size.routing.top_k).indices  # of all experts: these sizes limit no groups
            parts = torch.stack([swiglu(token, *(part[e] for part in experts)) for e in chosen])
            share = row[chosen] / row[chosen].sum() if size.routing.normalise else row[chosen]
            rows.append(swiglu(token, *shared) + size.routing.scale * (share[:, None] * parts).sum(0))
        x = x + torch.stack(rows)
    return norm(x, "norm") @ weights["output.weight"].t()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="models-dsv3-sigmoid"),
        pytest.param({"q_lora": 0, "shared": 2, "routing": Routing(4, 2, "softmax")}, id="models-dsv3-softmax"),
    ],
)
def test_transformer_is_deepseek(change: dict[str, object]) -> None:
    """The logits are those of a plain float64 DeepSeek, up to bf16's roundings, where every token's choice is clear.

    Groups of experts are test_moe.py's; a choice that bf16 may turn over would be no fault, so routers are sharpened.
    """
    size = DeepSeek(
        dim=64, layers=3, dense_layers=1, heads=2, q_lora=48, kv_lora=32, nope_dim=32, rope_dim=16, v_dim=48, ffn=96,
        expert_ffn=32, shared=1, vocab=64, routing=Routing(4, 2, "sigmoid", normalise=True, scale=2.5),
    )  # fmt: skip
    size = dataclasses.replace(size, **change)
    model = Transformer(size)
    model.init_weights(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.sin(torch.arange(len(parameter)).float() + len(name)))
            elif "router" in name:
                parameter.mul_(2.0)
    tokens = torch.arange(24) * 29 % 64
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    expected = _plain_deepseek(weights, size, tokens)
    with torch.no_grad():
        actual = model(tokens[None])[0].double()
    errors = (expected - actual).norm(dim=1) / expected.norm(dim=1)
    error = float(errors.median())
    assert error < 0.02, f"logits differ by {error:.3g} of their norm; expected bf16's roundings, about 0.006"
    assert int((errors > 0.02).sum()) <= 3, "more than a few choices of experts were turned over by rounding"


def test_attention_is_torchs() -> None:
    """The written-out attention equals torch's in float64 up to its own roundings."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 16, generator=generator).bfloat16() for _ in range(3))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    error = (causal_attention(q, k, v).double() - expected).abs()
    assert float((error / (expected.abs() + v.double().abs().amax())).max()) < 2**-8


def test_rotation_keeps_length_and_relative_position() -> None:
    """Rotary positions change no norm, and a product depends on the distance of two positions only."""
    table = table_of(64, 16, 500_000.0, torch.device("cpu"))
    x = torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(1, 64, 1, 16)
    turned = rotate(x, table)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    scores = turned[0, :, 0] @ turned[0, :, 0].t()
    assert torch.allclose(scores[3, 1], scores[40, 38], rtol=1e-4)
    assert torch.equal(turned[0, 0], x[0, 0])


def test_norm() -> None:
    """RMSNorm equals torch's in float32."""
    norm = RMSNorm(32, 1e-5)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(F.rms_norm(x, (32,), norm.weight, 1e-5), norm(x), rtol=1e-6)


def test_cpu_linear_has_no_order() -> None:
    """A bf16 linear on a CPU is the exact product, rounded: reversing the order of its sums changes no bit."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(3))
    backwards = torch.arange(63, -1, -1)
    results = []
    for order in (torch.arange(64), backwards):
        linear = Linear(64, 64)
        with torch.no_grad():
            linear.weight.copy_(weight[:, order])
            linear.bias.copy_(weight[0])
        mine = x[:, order].clone().requires_grad_()
        y = linear(mine)
        y.backward(grad)
        results.append((y, mine.grad[:, order], linear.weight.grad[:, order]))
    exact = x.double() @ weight.double().t() + weight[0].double()
    assert torch.equal(exact.float().bfloat16(), results[0][0])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_widened_is_exact() -> None:
    """bf16 on a CPU is widened to float64, anything else is left to its device; a product rounds to what is asked."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x.bfloat16().double(), widened(x.bfloat16()))
    assert widened(x) is x
    assert torch.float64 == widened(x.bfloat16()).dtype
    assert torch.equal((x @ x).bfloat16(), product(x, x, torch.bfloat16))


def test_linear_gradients() -> None:
    """Our linear's gradients are nn.Linear's: equal in float32, one bf16 rounding apart in bf16."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        generator = torch.Generator().manual_seed(0)
        ours = Linear(48, 32)
        x, grad = torch.randn(2, 9, 48, generator=generator), torch.randn(2, 9, 32, generator=generator)
        mine = x.to(dtype, copy=True).requires_grad_()
        ours(mine).backward(grad.to(dtype))
        theirs = x.to(dtype, copy=True).double().detach().requires_grad_()
        weight, bias = (p.detach().to(dtype).double().detach().requires_grad_() for p in (ours.weight, ours.bias))
        F.linear(theirs, weight, bias).backward(grad.to(dtype).double())
        for expected, actual in (
            (theirs.grad, mine.grad),
            (weight.grad, ours.weight.grad),
            (bias.grad, ours.bias.grad),
        ):
            assert float((expected - actual.double()).norm() / expected.norm()) < tolerance
