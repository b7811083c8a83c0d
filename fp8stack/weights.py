"""Weights as safetensors with Hugging Face names: to start from, and to hand on.

`read` takes a folder as it is published: one `model.safetensors` or several with `model.safetensors.index.json`, any
float dtype from 16 bits, `lm_head.weight` absent where it is tied to the embedding. Each rank reads the rows that it
holds. Where `config.json` is there, what a weight's shape cannot show (bases of the rotary wavelengths, epsilon of the
norms, heads, activation) must be the model's, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5
(`rope_parameters`). What it does not say is not known: a folder without one is taken for the model.

What loads, so, is Llama 3 of 8B and 70B, weights of the same computation in the sizes of a model here, and what `write`
made. Llama 3.1 and later, and DeepSeek's releases, are refused by name: they scale rotary positions (llama3, YaRN).

`write` makes such a folder from float32 masters, in files of at most 4 GiB: what was trained, to the last bit.
Rotary positions are laid out as Hugging Face's (models.py), so no weight is permuted either way.

DeepSeek: an expert's weights are tensors of their own there and rows of one here. The balancing bias of a router goes
with them as `e_score_correction_bias`; models with softmax scores are published without one, and start from zero.

Not here: rope scaling of any kind; weights in FP8, as DeepSeek-V3's are published, which are refused by name too. A
further layer, of multi-token prediction, is left alone.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8stack.models import DeepSeek, Llama, Sizes, balancing_biases, local_place

INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 << 30

# Name here -> name there; {layer} stands for the same number in both, {expert} for each row here.
_RULES: dict[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.wk.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.wv.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.attention.wq_a.weight": "model.layers.{layer}.self_attn.q_a_proj.weight",
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "layers.{layer}.attention.wq_b.weight": "model.layers.{layer}.self_attn.q_b_proj.weight",
    "layers.{layer}.attention.wkv_a.weight": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{layer}.attention.kv_norm.weight": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    "layers.{layer}.attention.wkv_b.weight": "model.layers.{layer}.self_attn.kv_b_proj.weight",
    "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
    "layers.{layer}.feed_forward.w3.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.moe.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.moe.router.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layers.{layer}.moe.experts.w1": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.{layer}.moe.experts.w2": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "layers.{layer}.moe.experts.w3": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers.{layer}.moe.shared.w1.weight": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "layers.{layer}.moe.shared.w2.weight": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
    "layers.{layer}.moe.shared.w3.weight": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class WeightsError(ValueError):
    """Weights that cannot be read or written. The message is one line: what, expected, what next."""


def hugging_face_name(name: str, expert: int | None = None) -> str:
    """The published name of a parameter of `models.Transformer`; of one expert's row of it, where it is of experts."""
    layer = re.search(r"\.(\d+)\.", name)
    number = layer[1] if layer else ""
    rule = name.replace(f".{number}.", ".{layer}.", 1) if layer else name
    return _RULES[rule].replace("{layer}", number).replace("{expert}", str(expert))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, and what else a model consists of, by name."""
    return [*model.named_parameters(), *balancing_biases(model).items()]


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise WeightsError(
            "the package safetensors is not installed; expected it for --init-from and --export; pip install "
            "'fp8stack[hf]'"
        ) from None
    return safetensors


def _config(size: Sizes) -> dict[str, Any]:
    """config.json of a model of these sizes, as transformers reads it."""
    return {
        **(_llama(size) if isinstance(size, Llama) else _deepseek(size)),
        "hidden_size": size.dim,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "rms_norm_eps": size.norm_eps,
        "rope_scaling": None,
        "rope_theta": size.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": size.vocab,
    }


def _llama(size: Llama) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": size.kv_heads}


def _deepseek(size: DeepSeek) -> dict[str, Any]:
    """V2's where scores are softmax, V3's where they are sigmoid: transformers has a class for each."""
    routing = size.routing
    version = "3" if routing.score == "sigmoid" else "2"
    greedy = "group_limited_greedy" if routing.groups > 1 else "greedy"
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.q_lora or None,
        "kv_lora_rank": size.kv_lora,
        "qk_nope_head_dim": size.nope_dim,
        "qk_rope_head_dim": size.rope_dim,
        "rope_interleave": True,
        "v_head_dim": size.v_dim,
        "first_k_dense_replace": size.dense_layers,
        "moe_intermediate_size": size.expert_ffn,
        "n_shared_experts": size.shared,
        "n_routed_experts": routing.experts,
        "num_experts_per_tok": routing.top_k,
        "n_group": routing.groups,
        "topk_group": routing.limited,
        "scoring_func": routing.score,
        "topk_method": "noaux_tc" if routing.score == "sigmoid" else greedy,
        "norm_topk_prob": routing.normalise,
        "routed_scaling_factor": routing.scale,
    }


# What safetensors calls the dtypes that can be read: FP8 means nothing without its scales.
_WIDE_ENOUGH = ("F64", "F32", "F16", "BF16")

# Free to differ: what says nothing about the computation, and the depth, which --layers may trim.
_FREE = ("architectures", "torch_dtype", "tie_word_embeddings", "num_hidden_layers")

# What every model here computes in one way, where a config.json may say another; and where it says how positions turn.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
_ROPE = ("rope_scaling", "rope_parameters")
_WAY_OUT = "start from weights without it, or drop --init-from and train from the beginning"


@torch.no_grad()
def read(folder: Path, model: nn.Module, size: Sizes) -> str:
    """Fill parameters and balancing biases of `model` (sharded or not), in place. Returns what was found, in words.

    Raises WeightsError for what cannot be read, is not there, or has other sizes, by name.
    """
    _check_config(folder, size)
    files = _files(folder)
    notes: list[str] = []
    for name, tensor in _tensors(model):
        local, offset = local_place(tensor)
        if tensor.ndim == 3:
            for row, expert in enumerate(range(offset[0], offset[0] + len(local))):
                _fill(local[row], offset[1], tuple(tensor.shape[1:]), hugging_face_name(name, expert), folder, files)
            continue
        wanted = hugging_face_name(name)
        if wanted == "lm_head.weight" and wanted not in files:
            wanted = hugging_face_name("tok_embeddings.weight")
            notes.append("lm_head is tied there: it starts as a copy of the embedding")
        if wanted.endswith("bias") and wanted not in files and not _published_with_bias(size):
            continue  # it stays zero
        _fill(local, offset[0], tuple(tensor.shape), wanted, folder, files)
    return "; ".join([f"weights from {folder}", *notes])


def _published_with_bias(size: Sizes) -> bool:
    """Whether models of this kind are published with the balancing biases of their routers."""
    return isinstance(size, DeepSeek) and size.routing.score == "sigmoid"


def _fill(
    local: torch.Tensor, start: int, shape: tuple[int, ...], wanted: str, folder: Path, files: dict[str, Path]
) -> None:
    """Rows `start` and on of the published tensor `wanted`, which must have `shape`, into `local`."""
    safetensors = _safetensors()
    if wanted not in files:
        raise WeightsError(
            f"{folder} has no tensor '{wanted}'; expected one for each parameter; choose the model that the weights "
            "belong to, or --layers"
        )
    try:
        with safetensors.safe_open(str(files[wanted]), framework="pt") as stream:
            rows = stream.get_slice(wanted)
            if tuple(rows.get_shape()) != shape:
                raise WeightsError(
                    f"'{wanted}' is {tuple(rows.get_shape())} in {folder}; expected {shape}; choose the model that the "
                    "weights belong to"
                )
            if rows.get_dtype() not in _WIDE_ENOUGH:
                raise WeightsError(
                    f"'{wanted}' is {rows.get_dtype()} in {folder}; expected one of {', '.join(_WIDE_ENOUGH)}; convert "
                    "the weights, with their scales, to bfloat16 first"
                )
            local.copy_(rows[start : start + local.shape[0]])
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"{files[wanted]} cannot be read ({error}); expected a whole safetensors file; copy it again"
        ) from None


def _check_config(folder: Path, size: Sizes) -> None:
    """Refuse weights whose config.json says that they belong to another computation."""
    file = folder / "config.json"
    if not file.exists():
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read ({error}); expected JSON; copy it again, or remove it") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{file} holds {found!r:.60}; expected an object; copy it again, or remove it")
    found = found | _unscaled(file, found)
    for key, ours in _ONLY.items():
        if found.get(key, ours) != ours:
            raise WeightsError(
                f"{file} says {key} = {found[key]!r}; expected {ours!r}: this trainer computes nothing else; {_WAY_OUT}"
            )
    for key, ours in _config(size).items():
        if key not in (*_FREE, *_ROPE) and key in found and found[key] != ours:
            raise WeightsError(
                f"{file} says {key} = {found[key]!r}; the model has {ours!r}; choose the model that the weights "
                "belong to"
            )


def _unscaled(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of rotary positions in an object of theirs, by the keys of `_config` and `_ONLY`.

    transformers 5 writes {rope_theta, rope_type, ...} as rope_parameters; before, rope_theta was a key of its own and
    rope_scaling null or the rest. WeightsError for any type but the default.
    """
    told: dict[str, Any] = {}
    for key in _ROPE:
        rope = found.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise WeightsError(f"{file} says {key} = {rope!r:.200}; expected one object for all layers; {_WAY_OUT}")
        kind = rope.get("rope_type", rope.get("type", "unnamed" if "factor" in rope else "default"))
        if kind != "default":
            raise WeightsError(
                f"{file} says {key} of type {kind!r}; expected none or 'default': this trainer does not compute scaled "
                f"rotary positions; {_WAY_OUT}"
            )
        told |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return told


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it."""
    safetensors = _safetensors()
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder; expected one with safetensors in it; correct --init-from")
    try:
        if (folder / INDEX).exists():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            listed = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
                raise ValueError(f"{INDEX} has no weight_map from names of tensors to names of files")
            return {name: folder / file for name, file in listed.items()}
        found: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safetensors.safe_open(str(file), framework="pt") as stream:
                found.update(dict.fromkeys(stream.keys(), file))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"{folder} cannot be read ({error}); expected safetensors as Hugging Face lays them out; correct "
            "--init-from"
        ) from None
    if not found:
        raise WeightsError(
            f"{folder} holds no .safetensors file; expected weights as Hugging Face lays them out; correct --init-from"
        )
    return found


def check_writable(folder: Path) -> None:
    """Make `folder` and a file in it, which goes again. Raises WeightsError where `write` would."""
    _safetensors()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_written(folder, error) from None


def _not_written(folder: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{folder} cannot be written ({error}); expected a folder with room; correct --export")


@torch.no_grad()
def write(folder: Path, model: nn.Module, size: Sizes) -> None:
    """Write every parameter and balancing bias of `model`, gathered one after another. Collective; rank 0 writes.

    Raises WeightsError, on rank 0, where the folder cannot be written.
    """
    safetensors = _safetensors()
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        placed: dict[str, str] = {}
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        for number, tensors in enumerate(_gathered(model, first), start=1):
            if first:
                file = f"model-{number:05d}.safetensors"
                safetensors.torch.save_file(tensors, str(folder / file), metadata={"format": "pt"})
                placed.update(dict.fromkeys(tensors, file))
        if first:
            total = sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(model))
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            for file, content in ((INDEX, index), ("config.json", _config(size))):
                (folder / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            for file in set(placed.values()):  # safetensors makes files that only their owner may read
                shutil.copymode(folder / INDEX, folder / file)
    except (OSError, safetensors.SafetensorError) as error:
        raise _not_written(folder, error) from None


def _gathered(model: nn.Module, keep: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors by published name, on the CPU, in portions of at most _FILE_BYTES; empty where not to `keep`."""
    portion: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in _published(model):
        size = tensor.numel() * tensor.element_size()
        if held and held + size > _FILE_BYTES:
            yield portion
            portion, held = {}, 0
        if keep:
            portion[name] = tensor.to("cpu", copy=True).contiguous()
        held += size
    yield portion


def _published(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Published names and whole tensors, one parameter gathered after another; experts one by one. Collective."""
    for name, tensor in _tensors(model):
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if whole.ndim == 3:
            yield from ((hugging_face_name(name, expert), whole[expert]) for expert in range(len(whole)))
        else:
            yield hugging_face_name(name), whole
