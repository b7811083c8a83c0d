"""Llama 3, from one table of sizes.

Shape suffixes, used throughout: a tensor's name ends with its dimensions.

    B batch    S sequence    T tokens = B*S    D model width    F feed-forward width
    H query heads    N = B*H    G key and value heads (grouped-query attention: each serves H/G query heads)
    K width of a head    V vocabulary

A block is x + attention(norm(x)), then x + feed_forward(norm(x)); norms are RMSNorm, positions are rotary, the feed-
forward is SwiGLU: w2(silu(w1 x) * (w3 x)). Weight names are those of Meta's release and of torchtitan.

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

FP8 replaces the linears of the blocks. The embedding is no product, and the output head stays in bf16: its gradient
sees every logit, and torchao, torchtitan and Megatron leave it too.

Sharding, activation checkpointing and compile happen around these modules (parallel.py). A sharded parameter is filled
by each rank with its own part of the same numbers.

Not here: DeepSeek-V3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8stack.data import random_bits
from fp8stack.linear import Linear, device_type, wide_dtype

# Names of the modules that stay in high precision, for `convert_to_float8(filter=)`.
HIGH_PRECISION = ("output",)

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
    def head_matmul_parameters(self) -> int:
        """Weights of the output head, which stays in bf16. The embedding multiplies nothing."""
        return self.vocab * self.dim

    def attention_flops_a_token(self, seq: int) -> int:
        """6 x layers x heads x (width of q and k + width of v) x sequence: forward and backward, the mask not used."""
        return 6 * self.layers * self.heads * (2 * self.head_dim) * seq


# tiny is this project's own, for CPUs; debug is torchtitan's debug model; the others are Meta's Llama 3 and 3.1 (1b:
# 3.2, whose released weights tie head and embedding; here they are two tensors).
MODELS: dict[str, Llama] = {
    "llama3-tiny": Llama(dim=128, layers=4, heads=2, kv_heads=1, ffn=352, vocab=768),
    "llama3-debug": Llama(dim=256, layers=6, heads=16, kv_heads=16, ffn=768, vocab=2048),
    "llama3-1b": Llama(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "llama3-8b": Llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama3-70b": Llama(dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "llama3-405b": Llama(dim=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256),
}


def model_named(name: str) -> Llama:
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


def causal_attention(q_BHSK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(K) + causal mask) v, (B,H,S,K). Precision: see the header."""
    if device_type(q_BHSK) != "cpu":
        return F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
    seq, head_dim = q_BHSK.shape[-2:]
    wide = wide_dtype(q_BHSK)
    q_NSK, k_NSK, v_NSK = (t.to(wide).flatten(0, 1) for t in (q_BHSK, k_BHSK, v_BHSK))
    future_SS = torch.full((seq, seq), -math.inf, dtype=wide).triu(diagonal=1)
    scores_NSS = torch.baddbmm(future_SS, q_NSK, k_NSK.transpose(1, 2), alpha=head_dim**-0.5)
    probabilities_NSS = scores_NSS.softmax(dim=-1).to(v_BHSK.dtype)
    return torch.bmm(probabilities_NSS.to(wide), v_NSK).to(v_BHSK.dtype).view(q_BHSK.shape)


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


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * (w3 x))."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.w1 = Linear(size.dim, size.ffn, bias=False)
        self.w2 = Linear(size.ffn, size.dim, bias=False)
        self.w3 = Linear(size.dim, size.ffn, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """(B,S,D) -> (B,S,D)."""
        wide = wide_dtype(x_BSD)
        gate_BSF, up_BSF = self.w1(x_BSD).to(wide), self.w3(x_BSD).to(wide)
        return self.w2((F.silu(gate_BSF) * up_BSF).to(x_BSD.dtype))


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


class Transformer(nn.Module):
    """Tokens to logits. Weights are uninitialised until `init_weights` (meta construction skips them)."""

    def __init__(self, size: Llama, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for label, value in (("dim", size.dim), ("ffn", size.ffn), ("vocab", size.vocab)):
            if value % 16:
                raise ValueError(f"{label} is {value}; FP8 GEMMs need a multiple of 16; choose another size")
        if size.dim % (2 * size.heads) or size.heads % size.kv_heads:
            raise ValueError(
                f"{size.heads} heads, {size.kv_heads} kv heads and dim {size.dim} do not fit; expected dim a "
                "multiple of 2 * heads and heads a multiple of kv heads; choose another size"
            )
        self.size, self.dtype = size, dtype
        self.tok_embeddings = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.dim, size.norm_eps)
        self.output = Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """int64 (B,S) -> logits (B,S,V) in the model's compute dtype."""
        table = rope_table(tokens_BS.shape[1], self.size.head_dim, self.size.rope_theta, tokens_BS.device)
        x_BSD = self.tok_embeddings(tokens_BS).to(self.dtype)
        for block in self.layers:
            x_BSD = block(x_BSD, table)
        return self.output(self.norm(x_BSD))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from `seed` and its own name: independent of order, sharding, device and platform."""
        for name, parameter in self.named_parameters():
            local, first = local_part(parameter)
            if parameter.ndim == 1:
                local.fill_(1.0)
            else:
                std = self._init_std(name, parameter)
                local.copy_(initial_weight(seed, name, local.shape, std, first, local.device))

    def _init_std(self, name: str, parameter: torch.Tensor) -> float:
        if name == "tok_embeddings.weight":
            return 1.0
        residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        return parameter.shape[1] ** -0.5 * ((2 * self.size.layers) ** -0.5 if residual else 1.0)


def held(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `parameter` or of its gradient: contiguous rows; all of it where it is not sharded."""
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`held`, and the index of its first element in the whole."""
    local = held(parameter)
    if not isinstance(parameter, DTensor):
        return local, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert not any(offset[1:]), f"parameters are sharded along their first dimension, not at {offset}"
    return local, offset[0] * math.prod(parameter.shape[1:]) if local.numel() else 0


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
