"""Weights with Hugging Face names: out and in again to the last bit, and refused by name where they do not belong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8stack import train, weights
from fp8stack.config import TrainConfig
from fp8stack.models import Transformer, held, model_named
from fp8stack.moe import Routing
from fp8stack.train import Trainer
from fp8stack.weights import WeightsError, hugging_face_name
from suites.unit import ranks

SHORT = TrainConfig(steps=1, batch=2, seq=16, device="cpu", layers=2)
SIZE = dataclasses.replace(model_named("llama3-tiny"), layers=2)

# As published for Llama 3: hidden 128, 2 heads and 1 of keys and values of width 64, feed-forward 352, vocabulary 768.
PUBLISHED = {
    "model.embed_tokens.weight": (768, 128),
    **{
        f"model.layers.{n}.{name}.weight": shape
        for n in (0, 1)
        for name, shape in {
            "self_attn.q_proj": (128, 128),
            "self_attn.k_proj": (64, 128),
            "self_attn.v_proj": (64, 128),
            "self_attn.o_proj": (128, 128),
            "mlp.gate_proj": (352, 128),
            "mlp.up_proj": (352, 128),
            "mlp.down_proj": (128, 352),
            "input_layernorm": (128,),
            "post_attention_layernorm": (128,),
        }.items()
    },
    "model.norm.weight": (128,),
    "lm_head.weight": (768, 128),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder written with --export after one step, in several files, and what is in it."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_FILE_BYTES", 500_000)
        arguments = ["--layers", "2", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "1"]
        assert train.main([*arguments, "--export", str(folder)]) == 0
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return folder, found


def test_names_and_shapes(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The tensors are those of a published Llama 3 of these sizes; the index names the file of each."""
    folder, found = exported
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == PUBLISHED
    index = json.loads((folder / weights.INDEX).read_text())
    assert set(index["weight_map"]) == set(PUBLISHED)
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in found.values())
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 1
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "not all may be read by the same people"


def test_out_and_in_again(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """--init-from gives every parameter the exported bits."""
    folder, found = exported
    trainer = Trainer(dataclasses.replace(SHORT, init_from=str(folder)))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(held(parameter), found[hugging_face_name(name)]), name
    first = trainer.run().steps[0].loss
    assert first != Trainer(SHORT).run().steps[0].loss


def test_bf16_and_a_tied_head(exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """bf16 weights are widened; an absent lm_head is the embedding, and that is said."""
    _, found = exported
    save_file({n: t.bfloat16() for n, t in found.items() if n != "lm_head.weight"}, tmp_path / "model.safetensors")
    trainer = Trainer(dataclasses.replace(SHORT, init_from=str(tmp_path)))
    assert "tied" in trainer.origin
    head, embedding = (held(module.weight) for module in (trainer.model.output, trainer.model.tok_embeddings))
    assert torch.equal(head, embedding)
    assert torch.equal(embedding, found["model.embed_tokens.weight"].bfloat16().float())
    assert embedding.dtype == torch.float32


# As published for DeepSeek-V3: a dense layer and one of 8 experts, with the widths of dsv3-tiny.
EXPERTS = TrainConfig(model="dsv3-tiny", steps=1, batch=2, seq=16, device="cpu", layers=2)
ATTENTION = {
    "self_attn.q_a_proj.weight": (64, 128),
    "self_attn.q_a_layernorm.weight": (64,),
    "self_attn.q_b_proj.weight": (96, 64),
    "self_attn.kv_a_proj_with_mqa.weight": (80, 128),
    "self_attn.kv_a_layernorm.weight": (64,),
    "self_attn.kv_b_proj.weight": (128, 64),
    "self_attn.o_proj.weight": (128, 64),
    "input_layernorm.weight": (128,),
    "post_attention_layernorm.weight": (128,),
}
PUBLISHED_DEEPSEEK = {
    "model.embed_tokens.weight": (768, 128),
    **{f"model.layers.{n}.{name}": shape for n in (0, 1) for name, shape in ATTENTION.items()},
    "model.layers.0.mlp.gate_proj.weight": (352, 128),
    "model.layers.0.mlp.up_proj.weight": (352, 128),
    "model.layers.0.mlp.down_proj.weight": (128, 352),
    "model.layers.1.mlp.gate.weight": (8, 128),
    "model.layers.1.mlp.gate.e_score_correction_bias": (8,),
    **{
        f"model.layers.1.mlp.{part}.{name}.weight": shape
        for part in (*(f"experts.{e}" for e in range(8)), "shared_experts")
        for name, shape in {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}.items()
    },
    "model.norm.weight": (128,),
    "lm_head.weight": (768, 128),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, float]]:
    """A folder with the weights of EXPERTS after a step, what is in it, and a hash a parameter of the model."""
    folder = tmp_path_factory.mktemp("experts")
    trainer = Trainer(EXPERTS)
    trainer.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_FILE_BYTES", 300_000)  # the experts of a matrix do not fit into one file
        weights.write(folder, trainer.model, EXPERTS.size)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return folder, found, ranks.hashes(trainer.model)


def test_deepseek(experts: tuple[Path, dict[str, torch.Tensor], dict[str, float]]) -> None:
    """Names and shapes are those of a published DeepSeek-V3; all bits come back, the balancing bias with them."""
    folder, found, _ = experts
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == PUBLISHED_DEEPSEEK
    index = json.loads((folder / weights.INDEX).read_text())
    assert set(index["weight_map"]) == set(PUBLISHED_DEEPSEEK)
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in found.values())
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["n_routed_experts"], config["q_lora_rank"]) == ("deepseek_v3", 8, 64)
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert set(bias.abs().tolist()) - {0.0} == {float(torch.tensor(1e-3))}

    model = Trainer(dataclasses.replace(EXPERTS, init_from=str(folder))).model
    assert torch.equal(model.layers[1].moe.router.bias, bias)
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            assert torch.equal(held(parameter), found[hugging_face_name(name)]), name
        else:
            for expert in range(8):
                assert torch.equal(held(parameter)[expert], found[hugging_face_name(name, expert)]), (name, expert)


def test_deepseek_on_ranks(experts: tuple[Path, dict[str, torch.Tensor], dict[str, float]], tmp_path: Path) -> None:
    """Ranks that hold a part of the experts, or of their rows, read what is theirs, and write what was read."""
    folder, found, hashes = experts
    for name, degree, size, by_rows in (("experts", 2, 4, False), ("rows", 1, 2, True)):
        config = dataclasses.replace(EXPERTS, init_from=str(folder), batch=4, expert_parallel=degree)
        out = tmp_path / name
        for read, local in ranks.run_ranks(ranks.read_and_write, config, str(out), by_rows, ranks=size):
            assert read == pytest.approx(hashes, rel=1e-12), name
            assert local == ((8 // degree, 64 // (size // degree), 128) if by_rows else (8 // size, 64, 128)), name
        written: dict[str, torch.Tensor] = {}
        for file in out.glob("*.safetensors"):
            written |= load_file(file)
        assert written.keys() == found.keys()
        for key, tensor in found.items():
            assert torch.equal(written[key], tensor), key


def test_deepseek_refused(experts: tuple[Path, dict[str, torch.Tensor], dict[str, float]], tmp_path: Path) -> None:
    """A missing bias or expert, weights in FP8, stretched positions: one line that names it."""
    _, found, _ = experts
    model = Trainer(EXPERTS).model
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for tensors, config, told in (
        ({n: t for n, t in found.items() if n != name}, {}, f"no tensor '{name}'"),
        ({n: t for n, t in found.items() if n != bias}, {}, f"no tensor '{bias}'"),
        ({**found, name: found[name].to(torch.float8_e4m3fn)}, {}, f"'{name}' is F8_E4M3 .* scales"),
        (found, {"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling of type 'yarn'"),
        (found, {"rope_interleave": False}, "rope_interleave = False"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(WeightsError, match=told):
            weights.read(tmp_path, model, EXPERTS.size)


def test_softmax_models_have_no_bias(tmp_path: Path) -> None:
    """DeepSeek-V2 is published without balancing biases: they stay zero."""
    size = dataclasses.replace(EXPERTS.size, q_lora=0, routing=Routing(8, 2, "softmax"))
    model, again = Transformer(size), Transformer(size)
    model.init_weights(0)
    model.layers[1].moe.router.bias.fill_(1.0)
    weights.write(tmp_path, model, size)
    found: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= load_file(file)
        file.unlink()
    (tmp_path / weights.INDEX).unlink()
    save_file({n: t for n, t in found.items() if "bias" not in n}, tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deepseek_v2"
    weights.read(tmp_path, again, size)
    assert not bool(again.layers[1].moe.router.bias.any())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def _without(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file({n: t for n, t in found.items() if "k_proj" not in n}, folder / "model.safetensors")


def _narrow(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file({**found, "model.norm.weight": torch.ones(64)}, folder / "model.safetensors")


def _cut(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file(found, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])


def _theta(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 10000.0}))


def _empty(folder: Path, found: dict[str, torch.Tensor]) -> None:
    (folder / "notes.txt").write_text("nothing")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(_without, r"no tensor 'model\.layers\.0\.self_attn\.k_proj\.weight'", id="missing"),
        pytest.param(_narrow, r"'model\.norm\.weight' is \(64,\)", id="shape"),
        pytest.param(_cut, "cannot be read", id="cut"),
        pytest.param(_theta, r"rope_theta = 10000\.0; the model has 500000\.0", id="config"),
        pytest.param(_empty, "no .safetensors file", id="empty"),
    ],
)
def test_refused(make: Any, told: str, exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """What does not belong to the model is one line that names it."""
    make(tmp_path, exported[1])
    with pytest.raises(WeightsError, match=told):
        weights.read(tmp_path, Trainer(SHORT).model, SIZE)


# What a config.json may say that makes another computation of the same shapes, and what is told of it.
OTHERS = {
    "theta-of-5": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_theta = 10000.0; the model"),
    "theta-in-both": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta = 10000.0; the model"),
    "llama3-of-5": (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
        "rope_parameters of type 'llama3'",
    ),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'll"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
    "untyped": ({"rope_scaling": {"factor": 2.0}}, "rope_scaling of type 'unnamed'"),
    "by-layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters = {'full_att"),
    "word": ({"rope_parameters": "yarn"}, "rope_parameters = 'yarn'; expected one object"),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5; expected 1.0"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; expected 'silu'"),
    "attention-bias": ({"attention_bias": True}, "attention_bias = True; expected False"),
    "mlp-bias": ({"mlp_bias": True}, "mlp_bias = True; expected False"),
    "number": (5, "config.json holds 5; expected an object"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"config-{name}") for name in OTHERS])
def test_another_computation(
    name: str, exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that fit, with a config.json of another computation: exit 2 and one line that names key and value."""
    said, told = OTHERS[name]
    save_file(exported[1], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))
    arguments = ["--layers", "2", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "1"]
    assert train.main([*arguments, "--init-from", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert told in err
    assert "choose the model" not in err or "the model has" in err


# config.json of Meta-Llama-3-8B, as published and as transformers 5 writes it again.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param({"rope_scaling": None, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}, id="llama3-8b-of-4"),
        pytest.param({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, id="llama3-8b-of-5"),
    ],
)
def test_llama_3_8b(positions: dict[str, Any], tmp_path: Path) -> None:
    """Both spellings of the model's own computation are taken."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, **positions}))
    weights._check_config(tmp_path, model_named("llama3-8b"))


INDEXES = {
    "list": [],
    "no-map": {},
    "map-list": {"weight_map": []},
    "numbers": {"weight_map": {"model.norm.weight": 1}},
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"index-{name}") for name in INDEXES])
def test_damaged_index(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index that does not say which file holds a tensor: exit 2 and one line that names it."""
    (tmp_path / weights.INDEX).write_text(json.dumps(INDEXES[name]))
    assert train.main(["--layers", "1", "--device", "cpu", "--steps", "1", "--init-from", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert f"{tmp_path} cannot be read ({weights.INDEX} has no weight_map" in err


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where safetensors is not installed, one line says which extra brings it."""
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    assert train.main(["--steps", "1", "--device", "cpu", "--init-from", str(tmp_path)]) == 2
    assert "fp8stack[hf]" in capsys.readouterr().err
    shutil.rmtree(tmp_path)
    assert train.main(["--steps", "1", "--device", "cpu", "--init-from", str(tmp_path)]) == 2


@pytest.mark.parametrize("missing", [pytest.param(False, id="unwritable"), pytest.param(True, id="no-package")])
def test_export_is_checked_first(
    missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An --export that cannot be written is one line and exit 2 before the first step, not after the last."""
    folder = "/dev/null/x"
    if missing:
        monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
        folder = str(tmp_path / "export")
    arguments = ["--steps", "1", "--layers", "1", "--batch", "1", "--seq", "4", "--device", "cpu", "--export", folder]
    assert train.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert "--export" in err
