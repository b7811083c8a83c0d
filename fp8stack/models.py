"""Llama 3 and DeepSeek-V3, from one table of sizes.

Shape suffixes, used throughout: a tensor's name ends with its dimensions.

    B batch    S sequence    T tokens = B*S    D model width    F feed-forward width
    H query heads    N = B*H    G key and value heads (grouped-query attention: each serves H/G query heads)
    K width of a head of queries and keys    L that of values    C latent of keys and values    R rotary part of a head
    V vocabulary

A block is x + attention(norm(x)), then x + feed_forward(norm(x)); norms are RMSNorm, positions are rotary, the feed-
forward is SwiGLU: w2(silu(w1 x) * (w3 x)). Weight names are those of Meta's release and of torchtitan.

DeepSeek-V3 (arXiv:2412.19437; V2, arXiv:2405.04434, is the same with softmax scores) differs in two places:

    attention      queries, and keys with values, come from narrow latents: W_b norm(W_a x). A head is a part without
                   positions, made from the latent, and a rotary part; the rotary part of the key is one for all heads
    feed-forward   of all but the first layers: experts (moe.py). After each step the trainer moves the bias that their
                   choice is balanced with, so a model of experts has state that no gradient changes: `balance`

Precision: the residual stream is bf16, as under mixed-precision FSDP2. Norms, softmax, SwiGLU and the loss are
computed in a wide dtype and rounded to bf16 once: float32 on a GPU, float64 on a CPU, for the reason given in
linear.py: no CPU may differ from another by the order of its sums or by its exponential. Rotations and residual sums
need no more than float32: they are single operations, exact by IEEE 754. Master weights stay float32 and are cast
where they are used. On a CPU attention is written out: scores stay wide through mask and softmax, probabilities are
rounded to bf16 (the operand of the second product), the output is rounded once: what fused attention kernels do. On a
GPU it is `scaled_dot_product_attention`.

Initial weights come from `data.random_bits`, not from torch's generators, whose bits depend on the CPU's vector
width. A weight is the sum of four uniform 16-bit integers, centred and scaled: a bell of the wanted standard
deviation, cut at 3.46 of them. Embedding 1; every linear 1/sqrt(fan in); the two that write to the residual stream a
further 1/sqrt(2 * layers).

FP8 replaces the linears and experts of the blocks. The embedding is no product, the output head stays in bf16: its
gradient sees every logit, and torchao, torchtitan and Megatron leave it too. So does the router of experts.

Sharding, activation checkpointing and compile happen around these modules (parallel.py). A sharded parameter is filled
by each rank with its own part of the same numbers.

Not here: YaRN, which DeepSeek's released weights were stretched with after training; multi-token prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8stack.data import random_bits
from fp8stack.linear import ALIGNMENT, Linear, device_type, wide_dtype
from fp8stack.moe import MoE, Order, Router, Routing, swiglu

# Names of the modules that stay in high precision, for `convert_to_float8(filter=)`.
HIGH_PRECISION = ("output",)

# Weights that write to the residual stream.
_RESIDUAL = ("attention.wo.weight", "feed_forward.w2.weight", "moe.experts.w2", "moe.shared.w2.weight")

_INIT_STD_OF_SUM = math.sqrt(4 * (65536**2 - 1) / 12)  # of the sum of four uniform integers in [0, 65535]
_INIT_MEAN_OF_SUM = 4 * 65535 / 2
_INIT_CHUNK = 1 << 22  # elements at a time: the int64 temporaries stay under 200 MB for any matrix


@dataclass(frozen=True)
class Llama:
    """Sizes of one model. `dim`, `ffn`, `vocab` in elements, `rope_theta` the base of the rotary wavelengths."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of a head (K)."""
        return self.dim // self.heads

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that has positions: all of it."""
        return self.head_dim

    @property
    def experts(self) -> int:
        """Routed experts a layer: a dense model has none."""
        return 0

    @property
    def dense_layers(self) -> int:
        """How many of the layers have no experts: all."""
        return self.layers

    @property
    def parameters(self) -> int:
        """Number of parameters, embedding and output head included (not tied)."""
        norms = (2 * self.layers + 1) * self.dim
        return 2 * self.vocab * self.dim + self.block_matmul_parameters + norms

    @property
    def block_matmul_parameters(self) -> int:
        """Weights of the matrix products of the blocks: what FP8 recipes convert."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.dim * self.ffn)

    @property
    def routed_matmul_parameters(self) -> int:
        """Those of them that are of experts that were chosen for a token: none."""
        return 0

    @property
    def high_precision_matmul_parameters(self) -> int:
        """Weights of the output head, which stays in bf16. The embedding multiplies nothing."""
        return self.vocab * self.dim

    def attention_flops_a_token(self, seq: int) -> int:
        """6 x layers x heads x (width of q and k + width of v) x sequence: forward and backward, the mask not used."""
        return 6 * self.layers * self.heads * (2 * self.head_dim) * seq

    def check(self) -> None:
        """Raise ValueError, by name, for sizes that FP8 GEMMs or the heads cannot take."""
        _check_multiples(dim=self.dim, ffn=self.ffn, vocab=self.vocab)
        if self.dim % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads, {self.kv_heads} kv heads and dim {self.dim} do not fit; expected dim a "
                "multiple of 2 * heads and heads a multiple of kv heads; choose another size"
            )


@dataclass(frozen=True)
class DeepSeek:
    """Sizes of one model. Widths in elements.

    dense_layers: how many of `layers`, the first, have a feed-forward of width `ffn` and no experts. q_lora, kv_lora:
    widths of the latents; q_lora 0: queries come from x at once. nope_dim, rope_dim: the parts of a head of queries and
    keys without and with positions; v_dim: of values. expert_ffn: width of an expert; shared: how many of that width
    every token passes.
    """

    dim: int
    layers: int
    dense_layers: int
    heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    ffn: int
    expert_ffn: int
    shared: int
    routing: Routing
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys (K)."""
        return self.nope_dim + self.rope_dim

    @property
    def experts(self) -> int:
        """Routed experts a layer."""
        return self.routing.experts

    @property
    def expert_layers(self) -> int:
        """How many layers have experts; none where depth was trimmed to the dense ones."""
        return max(0, self.layers - self.dense_layers)

    @property
    def _attention_parameters(self) -> int:
        """Weights of the products of attention in one layer."""
        queries = self.heads * self.head_dim
        q = self.q_lora * (self.dim + queries) if self.q_lora else self.dim * queries
        kv = self.dim * (self.kv_lora + self.rope_dim) + self.kv_lora * self.heads * (self.nope_dim + self.v_dim)
        return q + kv + self.heads * self.v_dim * self.dim

    def _block_parameters(self, experts: int) -> int:
        """Weights of the products of the blocks with so many routed experts a layer, without routers."""
        dense = self.layers - self.expert_layers
        widths = dense * self.ffn + self.expert_layers * (experts + self.shared) * self.expert_ffn
        return self.layers * self._attention_parameters + 3 * self.dim * widths

    @property
    def _router_parameters(self) -> int:
        return self.expert_layers * self.experts * self.dim

    @property
    def parameters(self) -> int:
        """Number of parameters, embedding and output head included (not tied); without the balancing biases."""
        norms = self.dim + self.layers * (2 * self.dim + self.q_lora + self.kv_lora)
        return 2 * self.vocab * self.dim + self._block_parameters(self.experts) + self._router_parameters + norms

    @property
    def block_matmul_parameters(self) -> int:
        """Weights that a token meets in matrix products of the blocks that FP8 recipes convert: its own experts'."""
        return self._block_parameters(self.routing.top_k)

    @property
    def routed_matmul_parameters(self) -> int:
        """Those of them that are of experts that were chosen for a token, which not every recipe converts."""
        return self._block_parameters(self.routing.top_k) - self._block_parameters(0)

    @property
    def high_precision_matmul_parameters(self) -> int:
        """Weights of the output head and the routers, which are not converted."""
        return self.vocab * self.dim + self._router_parameters

    def attention_flops_a_token(self, seq: int) -> int:
        """As Llama's; values have a width of their own."""
        return 6 * self.layers * self.heads * (self.head_dim + self.v_dim) * seq

    def check(self) -> None:
        """Raise ValueError, by name, for sizes that FP8 GEMMs or rotary positions cannot take."""
        _check_multiples(
            dim=self.dim,
            ffn=self.ffn,
            expert_ffn=self.expert_ffn,
            vocab=self.vocab,
            q_lora=self.q_lora,
            kv_lora=self.kv_lora,
            rope_dim=self.rope_dim,
            nope_dim=self.nope_dim,
            v_dim=self.v_dim,
        )


Sizes = Llama | DeepSeek


def _check_multiples(**sizes: int) -> None:
    for label, value in sizes.items():
        if value % ALIGNMENT:
            raise ValueError(f"{label} is {value}; FP8 GEMMs need a multiple of {ALIGNMENT}; choose another size")


# tiny is this project's own, for CPUs; debug is torchtitan's debug model; the others are Meta's Llama 3 and 3.1 (1b:
# 3.2, whose released weights tie head and embedding; here they are two tensors), and DeepSeek-V2-Lite, V2 and V3.
MODELS: dict[str, Sizes] = {
    "llama3-tiny": Llama(dim=128, layers=4, heads=2, kv_heads=1, ffn=352, vocab=768),
    "llama3-debug": Llama(dim=256, layers=6, heads=16, kv_heads=16, ffn=768, vocab=2048),
    "llama3-1b": Llama(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "llama3-8b": Llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama3-70b": Llama(dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "llama3-405b": Llama(dim=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    "dsv3-tiny": DeepSeek(
        dim=128, layers=4, dense_layers=1, heads=2, q_lora=64, kv_lora=64, nope_dim=32, rope_dim=16, v_dim=32,
        ffn=352, expert_ffn=64, shared=1, vocab=768,
        routing=Routing(8, 2, "sigmoid", groups=4, limited=2, normalise=True, scale=2.5),
    ),
    "dsv3-debug": DeepSeek(
        dim=256, layers=6, dense_layers=1, heads=16, q_lora=0, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        ffn=1024, expert_ffn=256, shared=2, vocab=2048, routing=Routing(8, 3, "softmax"),
    ),
    "dsv3-16b": DeepSeek(
        dim=2048, layers=27, dense_layers=1, heads=16, q_lora=0, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        ffn=10944, expert_ffn=1408, shared=2, vocab=102400, routing=Routing(64, 6, "softmax"),
    ),
    "dsv3-236b": DeepSeek(
        dim=5120, layers=60, dense_layers=1, heads=128, q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        ffn=12288, expert_ffn=1536, shared=2, vocab=102400,
        routing=Routing(160, 6, "softmax", groups=8, limited=3, scale=16.0),
    ),
    "dsv3-671b": DeepSeek(
        dim=7168, layers=61, dense_layers=3, heads=128, q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        ffn=18432, expert_ffn=2048, shared=1, vocab=129280,
        routing=Routing(256, 8, "sigmoid", groups=8, limited=4, normalise=True, scale=2.5),
    ),
}  # fmt: skip


def model_named(name: str) -> Sizes:
    """The sizes of that name; ValueError naming those that exist."""
    if name not in MODELS:
        raise ValueError(f"model '{name}' does not exist; expected one of: {', '.join(MODELS)}; choose one of these")
    return MODELS[name]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the wide dtype, rounded to x's dtype once."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Any float dtype, same shape and dtype out."""
        wide = x_BSD.to(wide_dtype(x_BSD))
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * self.weight.to(x_BSD.dtype)).to(x_BSD.dtype)


def rope_table(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 (S, K/2) each; from float64, so that a platform's float32 cosine does not matter."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x_BSHK: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate element i of each head with element i + K/2 (Hugging Face's layout), in float32, rounded once."""
    cosine, sine = (part[:, None, :] for part in table)
    left, right = x_BSHK.float().chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1).to(x_BSHK.dtype)


def unpaired(x: torch.Tensor) -> torch.Tensor:
    """Elements 0, 2, 4, ... of the last dimension, then 1, 3, 5, ...: DeepSeek's weights rotate i with i + 1.

    Queries and keys are permuted alike, so their product is what it was.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def causal_attention(q_BHSK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSL: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(K) + causal mask) v, (B,H,S,L). Precision: see the header."""
    if device_type(q_BHSK) != "cpu":
        # Flash kernels want one width of all three: DeepSeek's values get zeros, which come out as zeros and go.
        missing = q_BHSK.shape[-1] - v_BHSL.shape[-1]
        v_BHSK = F.pad(v_BHSL, (0, missing)) if missing else v_BHSL
        y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        return y_BHSK[..., :-missing] if missing else y_BHSK
    seq, head_dim = q_BHSK.shape[-2:]
    wide = wide_dtype(q_BHSK)
    q_NSK, k_NSK, v_NSL = (t.to(wide).flatten(0, 1) for t in (q_BHSK, k_BHSK, v_BHSL))
    future_SS = torch.full((seq, seq), -math.inf, dtype=wide).triu(diagonal=1)
    scores_NSS = torch.baddbmm(future_SS, q_NSK, k_NSK.transpose(1, 2), alpha=head_dim**-0.5)
    probabilities_NSS = scores_NSS.softmax(dim=-1).to(v_BHSL.dtype)
    return torch.bmm(probabilities_NSS.to(wide), v_NSL).to(v_BHSL.dtype).view(v_BHSL.shape)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.head_dim
        self.wq = Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.wk = Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.wv = Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.wo = Linear(size.heads * size.head_dim, size.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        batch, seq, _ = x_BSD.shape
        q_BSHK = rotate(self.wq(x_BSD).view(batch, seq, self.heads, self.head_dim), table)
        k_BSGK = rotate(self.wk(x_BSD).view(batch, seq, self.kv_heads, self.head_dim), table)
        v_BSGK = self.wv(x_BSD).view(batch, seq, self.kv_heads, self.head_dim)
        repeats = self.heads // self.kv_heads
        k_BHSK, v_BHSK = (t.transpose(1, 2).repeat_interleave(repeats, dim=1) for t in (k_BSGK, v_BSGK))
        y_BHSK = causal_attention(q_BSHK.transpose(1, 2), k_BHSK, v_BHSK)
        return self.wo(y_BHSK.transpose(1, 2).reshape(batch, seq, -1))


class LatentAttention(nn.Module):
    """DeepSeek's attention: latents of queries and of keys with values, rotary parts beside them (see the header)."""

    def __init__(self, size: DeepSeek) -> None:
        super().__init__()
        self.size = size
        queries = size.heads * size.head_dim
        if size.q_lora:
            self.wq_a = Linear(size.dim, size.q_lora, bias=False)
            self.q_norm = RMSNorm(size.q_lora, size.norm_eps)
            self.wq_b = Linear(size.q_lora, queries, bias=False)
        else:
            self.wq = Linear(size.dim, queries, bias=False)
        self.wkv_a = Linear(size.dim, size.kv_lora + size.rope_dim, bias=False)
        self.kv_norm = RMSNorm(size.kv_lora, size.norm_eps)
        self.wkv_b = Linear(size.kv_lora, size.heads * (size.nope_dim + size.v_dim), bias=False)
        self.wo = Linear(size.heads * size.v_dim, size.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        size, (batch, seq, _) = self.size, x_BSD.shape
        q_BSN = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if size.q_lora else self.wq(x_BSD)
        q_BSHK = q_BSN.view(batch, seq, size.heads, size.head_dim)
        q_nope_BSHK, q_rope_BSHR = q_BSHK.split([size.nope_dim, size.rope_dim], dim=-1)
        latent_BSC, k_rope_BSR = self.wkv_a(x_BSD).split([size.kv_lora, size.rope_dim], dim=-1)
        kv_BSHK = self.wkv_b(self.kv_norm(latent_BSC)).view(batch, seq, size.heads, size.nope_dim + size.v_dim)
        k_nope_BSHK, v_BSHL = kv_BSHK.split([size.nope_dim, size.v_dim], dim=-1)
        k_rope_BS1R = rotate(unpaired(k_rope_BSR.unsqueeze(2)), table)
        q_BSHK = torch.cat([q_nope_BSHK, rotate(unpaired(q_rope_BSHR), table)], dim=-1)
        k_BSHK = torch.cat([k_nope_BSHK, k_rope_BS1R.expand(-1, -1, size.heads, -1)], dim=-1)
        y_BHSL = causal_attention(q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHL.transpose(1, 2))
        return self.wo(y_BHSL.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * (w3 x))."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.w1 = Linear(size.dim, size.ffn, bias=False)
        self.w2 = Linear(size.ffn, size.dim, bias=False)
        self.w3 = Linear(size.dim, size.ffn, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        return self.w2(swiglu(self.w1(x_BSD), self.w3(x_BSD)))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind its norm and beside the residual stream."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.dim, size.norm_eps)
        self.attention = Attention(size)
        self.ffn_norm = RMSNorm(size.dim, size.norm_eps)
        self.feed_forward = FeedForward(size)

    def forward(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class LatentBlock(nn.Module):
    """One layer of DeepSeek: a Block with its attention, and with experts (`moe`) where `dense` is False."""

    def __init__(self, size: DeepSeek, dense: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.dim, size.norm_eps)
        self.attention = LatentAttention(size)
        self.ffn_norm = RMSNorm(size.dim, size.norm_eps)
        self.dense = dense
        if dense:
            self.feed_forward = FeedForward(size)
        else:
            self.moe = MoE(size.dim, size.expert_ffn, size.routing, size.shared)

    def forward(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table)
        normed_BSD = self.ffn_norm(x_BSD)
        return x_BSD + (self.feed_forward(normed_BSD) if self.dense else self.moe(normed_BSD))

    def forward_in_three(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`forward` of a block with experts, cut where rows leave for other ranks: parallel.py compiles the rest."""
        x_BSD, normed_BSD, rows_RD, *choice = self.until_experts(x_BSD, table)
        return self.after_experts(x_BSD, normed_BSD, self.through_experts(rows_RD, choice[-1]), *choice)

    def until_experts(self, x_BSD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The residual stream and its norm, rows in the order of experts, weights, and the order's three tensors."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table)
        normed_BSD = self.ffn_norm(x_BSD)
        rows_RD, weights_TK, order = self.moe.dispatched(normed_BSD)
        return x_BSD, normed_BSD, rows_RD, weights_TK, order.order_R, order.inverse_R, order.offs_E

    def through_experts(self, rows_RD: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
        """(R,D) -> (R,D)."""
        return self.moe.through_experts(rows_RD, offs_E)

    def after_experts(
        self, x_BSD: torch.Tensor, normed_BSD: torch.Tensor, y_RD: torch.Tensor, *choice: torch.Tensor
    ) -> torch.Tensor:
        """Rows of experts back in the residual stream. choice: weights, and the order's three tensors."""
        weights_TK, *order = choice
        return x_BSD + self.moe.combined(normed_BSD, y_RD, weights_TK, Order(*order))


def _blocks(size: Sizes) -> Iterator[nn.Module]:
    """The layers of a model, first to last."""
    for layer in range(size.layers):
        yield Block(size) if isinstance(size, Llama) else LatentBlock(size, dense=layer < size.dense_layers)


class Transformer(nn.Module):
    """Tokens to logits. Weights are uninitialised until `init_weights` (meta construction skips them)."""

    def __init__(self, size: Sizes, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        size.check()
        self.size, self.dtype = size, dtype
        self.tok_embeddings = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(_blocks(size))
        self.norm = RMSNorm(size.dim, size.norm_eps)
        self.output = Linear(size.dim, size.vocab, bias=False)
        self._table: tuple[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] | None = None

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """int64 (B,S) -> logits (B,S,V) in the model's compute dtype."""
        table = self._rope_table(tokens_BS.shape[1], tokens_BS.device)
        x_BSD = self.tok_embeddings(tokens_BS).to(self.dtype)
        for block in self.layers:
            x_BSD = block(x_BSD, table)
        return self.output(self.norm(x_BSD))

    def _rope_table(self, seq: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """That of the last call where it fits: a float64 one of 8192 positions takes a CPU 10 ms, and a GPU waits."""
        key = (seq, device)
        if self._table is None or self._table[0] != key:
            self._table = key, rope_table(seq, self.size.rope_dim, self.size.rope_theta, device)
        return self._table[1]

    @property
    def routers(self) -> list[Router]:
        """The routers of the layers that have experts, first to last."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its own name: independent of order, sharding, device and platform."""
        for name, parameter in self.named_parameters():
            for local, first in local_runs(parameter):
                if parameter.ndim == 1:
                    local.fill_(1.0)
                else:
                    std = self._init_std(name, parameter)
                    local.copy_(initial_weight(seed, name, local.shape, std, first, local.device))

    def _init_std(self, name: str, parameter: torch.Tensor) -> float:
        if name == "tok_embeddings.weight":
            return 1.0
        residual = name.endswith(_RESIDUAL)
        return parameter.shape[-1] ** -0.5 * ((2 * self.size.layers) ** -0.5 if residual else 1.0)

    def reset_routers(self) -> None:
        """Balancing biases and loads to zero: they are no parameters, and meta construction leaves them undefined."""
        for router in self.routers:
            router.reset()

    @torch.no_grad()
    def balance(self, rate: float, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move every router's bias by `rate` towards equal loads. Once a step; nothing where there are no experts.

        total: sums a tensor over all ranks. Loads are integers, and all of them go in one call.
        """
        routers = self.routers
        if not routers:
            return
        loads = total(torch.stack([router.load for router in routers]))
        for router, load in zip(routers, loads, strict=True):
            router.load.copy_(load)
            router.balance(rate)


def balancing_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model consists of beside its parameters, by name; the same on every rank."""
    return {f"{name}.bias": module.bias for name, module in model.named_modules() if isinstance(module, Router)}


def held(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `parameter` or of its gradient: contiguous rows; all of it where it is not sharded."""
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def local_place(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """`held`, and where in the whole it begins, an index a dimension. Of a rank that holds nothing: all zeros."""
    local = held(parameter)
    if not isinstance(parameter, DTensor) or not local.numel():
        return local, (0,) * local.ndim
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return local, tuple(offset)


def local_runs(parameter: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """`held` in views whose elements follow one another in the whole, each with the index of its first one there.

    One run where rows are sharded; one an expert where the rows of each are (parallel.py).
    """
    local, offset = local_place(parameter)
    whole = parameter.shape
    row = math.prod(whole[1:])
    if local.shape[1:] == whole[1:]:
        return [(local, offset[0] * row)]
    assert local.shape[2:] == whole[2:], f"{tuple(local.shape)} of {tuple(whole)}: sharded beyond the second dimension"
    inner = offset[1] * math.prod(whole[2:])
    return [(local[i], (offset[0] + i) * row + inner) for i in range(len(local))]


def initial_weight(
    seed: int, name: str, shape: torch.Size, std: float, first: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Elements `first`, `first` + 1, ... of the parameter called `name`, as float32 of `shape`.

    Standard deviation `std`; from integers (see the header), computed on `device`: every device gives the same bits.
    """
    weight = torch.empty(shape.numel(), dtype=torch.float32, device=device)
    for start in range(0, weight.numel(), _INIT_CHUNK):
        stop = min(start + _INIT_CHUNK, weight.numel())
        index = torch.arange(first + start, first + stop, device=device)
        total = torch.zeros_like(index)
        for half in ("a", "b"):
            bits = random_bits(seed, f"init/{name}/{half}", index)
            total += (bits & 0xFFFF) + (bits >> 16)
        weight[start:stop] = (total.double() - _INIT_MEAN_OF_SUM) * (std / _INIT_STD_OF_SUM)
    return weight.view(shape)
