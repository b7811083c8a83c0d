"""Weights as safetensors with Hugging Face names: to start from, and to hand on.

`read` takes a folder as it is published: one `model.safetensors` or several with `model.safetensors.index.json`, any
float dtype, `lm_head.weight` absent where it is tied to the embedding. Each rank reads the rows that it holds. Where
`config.json` is there, the numbers in it that a weight's shape cannot show (bases of the rotary wavelengths, epsilon of
the norms, heads) must be those of the model.

`write` makes such a folder from float32 masters, in files of at most 4 GiB: what was trained, to the last bit.
Rotary positions are laid out as Hugging Face's (models.py), so no weight is permuted either way.

Not here: DeepSeek-V3 names (one more row in `_RULES`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8stack.models import Sizes, local_place

INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 << 30

# Name here -> name there; {layer} stands for the same number in both.
_RULES: dict[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.wk.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.wv.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
    "layers.{layer}.feed_forward.w3.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class WeightsError(ValueError):
    """Weights that cannot be read or written. The message is one line: what, expected, what next."""


def hugging_face_name(name: str) -> str:
    """The published name of a parameter of `models.Transformer`."""
    layer = re.search(r"\.(\d+)\.", name)
    number = layer[1] if layer else ""
    rule = name.replace(f".{number}.", ".{layer}.", 1) if layer else name
    return _RULES[rule].replace("{layer}", number)


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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.dim,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": size.norm_eps,
        "rope_scaling": None,
        "rope_theta": size.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": size.vocab,
    }


# Free to differ: what says nothing about the computation, and the depth, which --layers may trim.
_FREE = ("architectures", "torch_dtype", "tie_word_embeddings", "num_hidden_layers")


@torch.no_grad()
def read(folder: Path, model: nn.Module, size: Sizes) -> str:
    """Fill the parameters of `model` (sharded or not), in place. Returns a sentence about what was found.

    Raises WeightsError for what cannot be read, is not there, or has other sizes, by name.
    """
    safetensors = _safetensors()
    _check_config(folder, size)
    files = _files(folder)
    tied = False
    for name, parameter in model.named_parameters():
        wanted = hugging_face_name(name)
        if wanted == "lm_head.weight" and wanted not in files:
            wanted, tied = hugging_face_name("tok_embeddings.weight"), True
        if wanted not in files:
            raise WeightsError(
                f"{folder} has no tensor '{wanted}'; expected one for each parameter; choose the model that the "
                "weights belong to, or --layers"
            )
        local, offset = local_place(parameter)
        try:
            with safetensors.safe_open(str(files[wanted]), framework="pt") as stream:
                rows = stream.get_slice(wanted)
                if tuple(rows.get_shape()) != tuple(parameter.shape):
                    raise WeightsError(
                        f"'{wanted}' is {tuple(rows.get_shape())} in {folder}; expected {tuple(parameter.shape)}; "
                        "choose the model that the weights belong to"
                    )
                local.copy_(rows[offset[0] : offset[0] + local.shape[0]])
        except (OSError, safetensors.SafetensorError) as error:
            raise WeightsError(
                f"{files[wanted]} cannot be read ({error}); expected a whole safetensors file; copy it again"
            ) from None
    return f"weights from {folder}" + ("; lm_head is tied there: it starts as a copy of the embedding" if tied else "")


def _check_config(folder: Path, size: Sizes) -> None:
    """Refuse weights whose config.json says that they belong to another computation."""
    file = folder / "config.json"
    if not file.exists():
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read ({error}); expected JSON; copy it again, or remove it") from None
    for key, ours in _config(size).items():
        if key not in _FREE and key in found and found[key] != ours:
            raise WeightsError(
                f"{file} says {key} = {found[key]!r}; the model has {ours!r}; choose the model that the weights "
                "belong to"
            )


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it."""
    safetensors = _safetensors()
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder; expected one with safetensors in it; correct --init-from")
    try:
        if (folder / INDEX).exists():
            listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
        found: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safetensors.safe_open(str(file), framework="pt") as stream:
                found.update(dict.fromkeys(stream.keys(), file))
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"{folder} cannot be read ({error}); expected safetensors as Hugging Face lays them out; correct "
            "--init-from"
        ) from None
    if not found:
        raise WeightsError(
            f"{folder} holds no .safetensors file; expected weights as Hugging Face lays them out; correct --init-from"
        )
    return found


@torch.no_grad()
def write(folder: Path, model: nn.Module, size: Sizes) -> None:
    """Write every parameter of `model`, gathered one after another. Collective; rank 0 writes.

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
            total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            for file, content in ((INDEX, index), ("config.json", _config(size))):
                (folder / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"{folder} cannot be written ({error}); expected a folder with room; correct --export"
        ) from None


def _gathered(model: nn.Module, keep: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Whole parameters by published name, on the CPU, in portions of at most _FILE_BYTES; empty where not to `keep`."""
    portion: dict[str, torch.Tensor] = {}
    held = 0
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        size = whole.numel() * whole.element_size()
        if held and held + size > _FILE_BYTES:
            yield portion
            portion, held = {}, 0
        if keep:
            portion[hugging_face_name(name)] = whole.cpu().contiguous()
        held += size
    yield portion
