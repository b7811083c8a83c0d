"""The trainer: reproducible, resumable in thought, and clear about what it refuses and why it stops."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import metrics, parallel, train
from fp8stack.config import ALWAYS, IF_SET, NEVER
from fp8stack.data import Batch, SyntheticTokens, random_signs
from fp8stack.linear import RECIPES
from fp8stack.metrics import GradientDigests, JsonLines
from fp8stack.models import MODELS, held
from fp8stack.train import ConfigError, NonFiniteError, TrainConfig, Trainer, learning_rate, nudge_weights, run

# Small enough for a second, large enough for every path: 32 tokens a step.
SHORT = TrainConfig(steps=3, batch=2, seq=16, device="cpu")


def short(**changes: object) -> TrainConfig:
    return dataclasses.replace(SHORT, **changes)


@pytest.mark.parametrize("recipe", [pytest.param(r, id=f"train-{r}") for r in ("bf16", "rowwise", "tensorwise")])
def test_deterministic(recipe: str) -> None:
    """Two runs in one process have the same bits, whatever torch's generators and settings were in between."""
    one = run(short(recipe=recipe))
    torch.manual_seed(99)
    torch.randn(3)
    two = run(short(recipe=recipe))
    assert one.steps == two.steps
    assert one.digests == two.digests
    assert not torch.are_deterministic_algorithms_enabled()


def test_records_and_loss_file() -> None:
    """A record a step, digests of every parameter at steps 1-3, and the loss file that the gate reads."""
    seen: list[train.StepRecord] = []
    result = run(short(recipe="rowwise", steps=4), seen.append)
    assert seen == result.steps
    assert [record.step for record in seen] == [1, 2, 3, 4]
    assert all(math.isfinite(record.loss) and math.isfinite(record.grad_norm) for record in seen)
    assert all(record.saturated > 0 and record.nan == 0 for record in seen)
    file = json.loads(json.dumps(result.loss_file("llama3-tiny-rowwise-e4m3fn"), allow_nan=False))
    assert {
        "schema", "case", "config_hash", "config", "recipe", "format", "arch", "seed", "nudge", "threads", "versions",
        "steps", "digests",
    } == set(file)  # fmt: skip
    assert {"1", "2", "3"} == set(file["digests"])
    names = [name for name, _ in Trainer(SHORT).model.named_parameters()]
    assert names == list(file["digests"]["1"])
    assert all(len(digest) == 4 for digest in file["digests"]["1"].values())
    assert file["config_hash"] == short(recipe="rowwise", steps=4).hash
    assert len(file["config_hash"]) == 16


def test_first_loss_is_that_of_an_ignorant_model() -> None:
    """Before any update the loss is near ln(vocabulary) + 1/2 (unit-variance logits), far above the floor."""
    loss = run(short(steps=1, batch=8, seq=64)).steps[0].loss
    assert loss == pytest.approx(math.log(768) + 0.5, abs=0.15)
    assert loss > SyntheticTokens.entropy_floor_nats


def test_hash_covers_numerics_only(tmp_path: Path) -> None:
    """Every hashed field changes the hash; where and how a run computes does not."""
    always = {
        "model": "llama3-debug", "recipe": "rowwise", "steps": 4, "seed": 1, "batch": 3, "seq": 17, "lr": 1e-3,
        "min_lr_ratio": 0.2, "warmup": 2, "schedule": "constant", "beta1": 0.8, "beta2": 0.9, "eps": 1e-7,
        "weight_decay": 0.0, "clip": 2.0,
    }  # fmt: skip
    tokens = tmp_path / "tokens"
    tokens.write_bytes(bytes(64))
    if_set = {
        "layers": 2, "accumulate": 2, "compile": "aot_eager", "data": str(tokens), "data_dtype": "uint32",
        "init_from": str(tmp_path), "deterministic": False, "balance_rate": 0.01,
    }  # fmt: skip
    fields = {
        when: {f.name for f in dataclasses.fields(TrainConfig) if f.metadata["hashed"] == when}
        for when in (ALWAYS, IF_SET, NEVER)
    }
    assert fields[ALWAYS] == set(always)
    of_experts = {"experts": 4, "dense_layers": 0}
    assert fields[IF_SET] == {*if_set, *of_experts}
    hashes = {name: short(**{name: value}).hash for name, value in {**always, **if_set}.items()}
    hashes |= {name: short(model="dsv3-tiny", **{name: value}).hash for name, value in of_experts.items()}
    assert len({SHORT.hash, short(model="dsv3-tiny").hash, *hashes.values()}) == len(hashes) + 2
    elsewhere = {
        "nudge": 3, "device": "auto", "recompute": "full", "workers": 2, "digests": False, "code_counts": False,
        "quantisation": "unfused", "reshard": False,
    }  # fmt: skip
    assert fields[NEVER] == {*elsewhere, "expert_parallel", "fp8_all_gather"}
    assert SHORT.hash == short(**elsewhere).hash
    assert short(model="dsv3-tiny").hash == short(model="dsv3-tiny", expert_parallel=2).hash
    assert short(recipe="tensorwise").hash == short(recipe="tensorwise", fp8_all_gather=True).hash


def test_hash_of_recorded_curves() -> None:
    """The configuration of the recorded curves keeps its hash when options are added (baselines/cpu/loss.json)."""
    assert (
        TrainConfig(model="llama3-tiny", steps=100, seed=0, batch=8, seq=128, device="cpu").hash == "96847b8a0d48dbfe"
    )


def test_hash_of_files_is_of_their_content(tmp_path: Path) -> None:
    """The same tokens under another name are the same configuration; other tokens under that name are not."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(bytes(64))
    other.write_bytes(bytes(64))
    before = short(data=str(one)).hash
    assert before == short(data=str(other)).hash
    one.write_bytes(bytes(63) + b"1")
    assert before != short(data=str(one)).hash


def test_learning_rate() -> None:
    """Linear warm-up to lr, cosine down to min_lr_ratio * lr at the last step."""
    config = TrainConfig(steps=100, warmup=10, lr=2.0, min_lr_ratio=0.1)
    assert learning_rate(config, 1) == pytest.approx(0.2)
    assert learning_rate(config, 10) == pytest.approx(2.0)
    assert learning_rate(config, 55) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(config, 100) == pytest.approx(0.2)
    assert learning_rate(dataclasses.replace(config, schedule="constant", warmup=0), 1) == 2.0


def test_update_is_adamw() -> None:
    """Three steps are those of AdamW on clipped gradients, written out: warm-up, decay on matrices only, fresh batches.

    In float64 beside the trainer's float32 parameters, from the gradients that the trainer itself had.
    """
    config = short(lr=0.01, warmup=2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, clip=0.5)
    trainer = Trainer(config)
    taken: list[dict[str, torch.Tensor]] = []
    batches: list[torch.Tensor] = []
    loss_of = trainer._loss

    def loss(batch: Batch, valid: torch.Tensor) -> torch.Tensor:
        batches.append(batch.tokens)
        assert all(p.grad is None for p in trainer.model.parameters()), "gradients of the last step are still there"
        return loss_of(batch, valid)

    trainer._loss = loss  # type: ignore[method-assign]
    digest = trainer.digests.take

    def take() -> dict[str, list[float]]:
        taken.append({name: held(p.grad).double() for name, p in trainer.model.named_parameters()})
        return digest()

    trainer.digests.take = take  # type: ignore[method-assign]
    weights = {name: held(p).double() for name, p in trainer.model.named_parameters()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    result = trainer.run()

    assert len(taken) == len(batches) == 3
    for step, gradients in enumerate(taken, start=1):
        assert torch.equal(SyntheticTokens(768, 16, 0).batch(step - 1, 2).tokens, batches[step - 1])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert result.steps[step - 1].grad_norm == pytest.approx(norm, rel=1e-6)
        assert norm > 0.5, "nothing is clipped; choose a lower clip"
        for name, weight in weights.items():
            gradient = gradients[name] * (0.5 / norm)
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient.square()
            update = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            decay = 0.5 if weight.ndim == 2 else 0.0
            rate = {1: 0.005, 2: 0.01, 3: 0.001}[step]
            weights[name] = weight * (1 - rate * decay) - rate * update
    for name, parameter in trainer.model.named_parameters():
        error = float((weights[name] - held(parameter).double()).abs().max())
        assert error < 1e-5, f"{name} is off by {error:.3g}; expected float32's roundings"


def test_nudge_flips_one_bit_of_one_in_a_thousand() -> None:
    """Nudge i changes only bf16's last mantissa bit, of about one weight in a thousand, other ones for another i."""
    plain = Trainer(SHORT)
    flipped: dict[int, set[tuple[str, int]]] = {}
    for nudge in (1, 2):
        nudged = Trainer(short(nudge=nudge))
        changed = set()
        for (name, one), (_, other) in zip(
            plain.model.named_parameters(), nudged.model.named_parameters(), strict=True
        ):
            bits = [held(parameter).view(torch.int32) for parameter in (one, other)]
            difference = (bits[0] ^ bits[1]).flatten()
            assert set(difference.unique().tolist()) <= {0, 1 << 16}
            changed |= {(name, int(index)) for index in difference.nonzero()}
        flipped[nudge] = changed
        assert len(changed) == nudge_weights(Trainer(SHORT).model, nudge)
        assert 935_040 / 1000 * 0.85 < len(changed) < 935_040 / 1000 * 1.15
    assert len(flipped[1] & flipped[2]) < 10
    assert nudge_weights(plain.model, 0) == 0


def test_nudge_golden_count() -> None:
    """The number of flipped bits is the same on every platform."""
    assert [nudge_weights(Trainer(SHORT).model, nudge) for nudge in (1, 2, 3)] == [936, 985, 953]


def _plant_weight(trainer: Trainer) -> None:
    with torch.no_grad():
        held(trainer.model.layers[2].feed_forward.w1.weight)[0, 0] = math.nan


def _plant_huge(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model.layers[2].attention_norm.weight.fill_(3e38)
        trainer.model.layers[2].attention.wq.weight.fill_(1e30)


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        pytest.param(_plant_weight, "layers.2.feed_forward.w1", id="train-nan-weight"),
        pytest.param(_plant_huge, "layers.2.attention_norm", id="train-overflow"),
    ],
)
@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [
        pytest.param("bf16", "none", id="bf16"),
        pytest.param("rowwise", "none", id="rowwise"),
        pytest.param("bf16", "full", id="bf16-full"),
        pytest.param("rowwise", "selective", id="rowwise-selective"),
    ],
)
def test_non_finite_names_the_module(
    recipe: str, recompute: str, plant: Callable[[Trainer], None], module: str
) -> None:
    """A run with a poisoned layer stops before the update and names the first module that produced it.

    With recomputed blocks too, of which torch insists that both times save the same tensors.
    """
    trainer = Trainer(short(recipe=recipe, recompute=recompute))
    plant(trainer)
    before = held(trainer.model.output.weight).clone()
    with pytest.raises(NonFiniteError, match=rf"step 1: the loss is not finite.*'{module}'") as caught:
        trainer.run()
    assert caught.value.module == module
    assert torch.equal(before, held(trainer.model.output.weight))


def test_non_finite_gradient_names_the_module() -> None:
    """A gradient that overflows behind a finite loss is traced to its module too."""
    trainer = Trainer(SHORT)
    w2 = trainer.model.layers[1].feed_forward.w2
    w2.register_forward_pre_hook(lambda module, _: module.weight.register_hook(lambda g: g * math.inf) and None)
    with pytest.raises(NonFiniteError, match=r"the gradient norm is not finite.*'layers\.1\.feed_forward\.w2'"):
        trainer.run()


def test_uneven_valid_tokens() -> None:
    """The loss is the sum over valid tokens over their number; a batch without any has loss 0 (torchtitan#2206)."""
    trainer = Trainer(SHORT)
    batch = trainer.data.batch(0, 2)

    def loss_of(labels: torch.Tensor) -> torch.Tensor:
        part = dataclasses.replace(batch, labels=labels)
        return trainer._loss(part, trainer._valid_tokens([part]))

    whole = loss_of(batch.labels)
    labels = batch.labels.clone()
    labels[0, 5:] = train.IGNORED_LABEL
    partial = loss_of(labels)
    logits = trainer.model(batch.tokens).double()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    kept = (labels != train.IGNORED_LABEL).flatten()
    assert whole.item() == pytest.approx(each.mean().item(), rel=1e-12)
    assert partial.item() == pytest.approx(each[kept].mean().item(), rel=1e-12)
    assert loss_of(torch.full_like(labels, train.IGNORED_LABEL)).item() == 0.0


def test_codes_that_are_not_counted() -> None:
    """Without code counts the numbers are the same and the counts are null, not zero; digests too can be left out."""
    plain, quick = run(short(recipe="rowwise")), run(short(recipe="rowwise", code_counts=False, digests=False))
    assert [(r.loss, r.grad_norm) for r in quick.steps] == [(r.loss, r.grad_norm) for r in plain.steps]
    assert {(r.saturated, r.nan) for r in quick.steps} == {(None, None)}
    assert quick.digests == {}
    assert run(short(code_counts=False)).steps[0].saturated == 0  # bf16 has no codes


@pytest.mark.parametrize("recipe", [pytest.param(r, id=f"train-zero-{r}") for r in ("rowwise", "tensorwise")])
def test_zero_rows_and_weights_stay_finite(recipe: str) -> None:
    """Zero-initialised weights and padding whose embedding is zero need no knob (pytorch/ao#3356)."""
    losses = []
    for name in ("bf16", recipe):
        trainer = Trainer(short(recipe=name, steps=5, layers=2))
        held(trainer.model.tok_embeddings.weight)[int(trainer.data.batch(0, 2).tokens[0, 0])] = 0
        for layer in trainer.model.layers:
            held(layer.feed_forward.w2.weight).zero_()
            held(layer.attention.wo.weight).zero_()
        result = trainer.run()
        assert all(math.isfinite(record.loss) and math.isfinite(record.grad_norm) for record in result.steps)
        assert all(record.nan == 0 for record in result.steps)
        losses.append([record.loss for record in result.steps])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


EXPERTS = TrainConfig(model="dsv3-tiny", steps=3, batch=2, seq=16, device="cpu", layers=2)


@pytest.mark.parametrize("recipe", [pytest.param(r, id=f"train-experts-{r}") for r in ("bf16", *RECIPES)])
def test_experts(recipe: str) -> None:
    """Two runs have the same bits; experts are converted and their codes counted; every parameter has a gradient."""
    config = dataclasses.replace(EXPERTS, recipe=recipe)
    trainer = Trainer(config)
    result = trainer.run()
    again = run(config)
    assert (result.steps, result.digests) == (again.steps, again.digests)
    assert {name for name, _ in trainer.model.named_parameters()} == set(result.digests["1"])
    assert all(norm > 0 for norm, *_ in result.digests["1"].values())
    if recipe == "bf16":
        return
    assert result.conversion is not None
    if recipe == "blockwise":  # of which experts have no GEMM: the report says so, and they stay as they are
        assert result.conversion.experts == ()
        assert set(result.conversion.left) == {"output", "layers.1.moe.experts"}
        return
    assert result.conversion.experts == ("layers.1.moe.experts",)
    assert set(result.conversion.left) == {"output"}
    assert trainer.saturated_by_layer["layers.1.moe.experts"] > 0
    assert all(record.nan == 0 for record in result.steps)


def test_balancing() -> None:
    """After a step every bias has moved by the rate towards equal loads, from all microbatches; a rate of 0 moves none.

    Recomputing a layer does not count again.
    """
    biases = []
    for change in ({}, {"accumulate": 2}, {"recompute": "full"}, {"recompute": "selective"}):
        trainer = Trainer(dataclasses.replace(EXPERTS, steps=1, balance_rate=0.25, **change))
        router = trainer.model.layers[1].moe.router
        loads: list[torch.Tensor] = []
        trainer.optimiser.register_step_post_hook(lambda *_, r=router, found=loads: found.append(r.load.clone()))
        trainer.run()
        assert not bool(router.load.any())
        load = loads[0].double()
        assert float(load.sum()) == 2 * 16 * 2
        assert torch.equal(0.25 * torch.sign(load.mean() - load).float(), router.bias)
        biases.append(router.bias.clone())
    assert all(torch.equal(biases[0], bias) for bias in biases)
    trainer = Trainer(dataclasses.replace(EXPERTS, steps=1, balance_rate=0.0))
    trainer.run()
    assert not bool(trainer.model.layers[1].moe.router.bias.any())


def test_digests_need_every_gradient() -> None:
    """A parameter that took no part is an error, not a missing row."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"idle\.weight"):
        GradientDigests(model, random_signs).take()


def test_digests_hold_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, mean and both dot products are those of the whole gradient; its signs are never there all at once.

    Kept for every parameter they were two bytes a parameter on every rank: 15 GiB of llama3-8b.
    """
    model = torch.nn.Linear(19, 5, bias=False)
    gradient = torch.randn(5, 19, generator=torch.Generator().manual_seed(0))
    model.weight.grad = gradient
    drawn: list[torch.Tensor] = []

    def signs(name: str, index: torch.Tensor) -> torch.Tensor:
        drawn.append(index)
        return random_signs(name, index)

    monkeypatch.setattr(metrics, "PIECE", 16)
    digests = GradientDigests(model, signs)
    flat = gradient.double().reshape(-1)
    dots = random_signs("weight", torch.arange(95)).double() @ flat
    expected = torch.stack([flat.norm(), flat.mean(), *dots]).tolist()
    for _ in range(2):
        drawn.clear()
        assert digests.take()["weight"] == pytest.approx(expected, rel=1e-13)
        assert [len(index) for index in drawn] == [16, 16, 16, 16, 16, 15]


def test_json_lines_refuse_nan() -> None:
    """NaN is no JSON: the writer raises instead of writing what no reader agrees on."""
    stream = io.StringIO()
    lines = JsonLines(stream)
    lines.write({"step": 1})
    with pytest.raises(ValueError, match="JSON"):
        lines.write({"loss": math.nan})
    assert stream.getvalue() == '{"step": 1}\n'


def test_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that ends in its middle, of run.json or of the lines kept by a resume, leaves the file that was there.

    A line whose step is no number is none of those that are kept.
    """
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            metrics.write_whole(file, "{}")
        with pytest.raises(KeyboardInterrupt):
            JsonLines(file, keep=1)
        trainer = Trainer(SHORT)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(lambda record: train._write_run(file, 1, trainer))
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    with file.open("a") as stream:
        stream.write('{"step": "x"}\n{"step": null}\n')
    lines = JsonLines(file, keep=1)
    lines.write({"step": 3})
    lines.close()
    assert file.read_text() == '{"step": 1}\n{"step": 3}\n'


@pytest.mark.parametrize("told", ["No space left on device", "Broken pipe"])
def test_a_step_that_cannot_be_written(told: str) -> None:
    """A full disk, or a reader of stdout that left: exit 1, and nothing but one line after the last step's."""
    command = [sys.executable, "-m", "fp8stack.train", "--steps", "2", "--layers", "1", "--batch", "1", "--seq", "8"]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") if told.startswith("No") else os.fdopen(writer, "w") as out:
        done = subprocess.run([*command, "--device", "cpu"], stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert errors == [done.stderr.splitlines()[-1]]
    assert f"step 1 could not be written to stdout ({told})" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("size", [pytest.param(None, id="missing"), pytest.param(20, id="short")])
def test_tokens_are_looked_at_first(size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of tokens that is not there or too short is refused before any weight is made."""
    file = tmp_path / "tokens"
    if size is not None:
        file.write_bytes(bytes(size))

    def made(*_: object) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(train, "Transformer", made)
    with pytest.raises(train.DataError, match="tokens"):
        Trainer(short(data=str(file)))


BAD = {
    "recipe": (["--recipe", "fp9"], "recipe 'fp9'"),
    "model": (["--model", "llama9"], "model 'llama9'"),
    "schedule": (["--schedule", "step"], "schedule 'step'"),
    "steps": (["--steps", "0"], "--steps"),
    "batch": (["--batch", "-1"], "--batch"),
    "lr": (["--lr", "nan"], "--lr"),
    "clip": (["--clip", "0"], "--clip"),
    "number": (["--seq", "many"], "--seq"),
    "option": (["--recepie", "rowwise"], "--recepie"),
    "device": (["--device", "tpu"], "--device"),
    "memory": (["--model", "llama3-405b", "--device", "cpu"], "llama3-405b"),
    "accumulate": (["--accumulate", "3"], "--accumulate"),
    "layers": (["--layers", "5"], "--layers"),
    "experts-dense": (["--experts", "4"], "drop --experts"),
    "experts": (["--model", "dsv3-tiny", "--experts", "9"], "lower --experts"),
    "experts-groups": (["--model", "dsv3-tiny", "--experts", "6"], "6 experts in 4 groups"),
    "experts-chosen": (["--model", "dsv3-671b", "--experts", "8"], "top_k is 8; expected 1 to 4"),
    "dense-layers": (["--model", "dsv3-tiny", "--layers", "2", "--dense-layers", "3"], "lower --dense-layers"),
    "dense-layers-dense": (["--dense-layers", "0"], "drop --dense-layers"),
    "expert-parallel-trimmed": (
        ["--model", "dsv3-tiny", "--experts", "4", "--expert-parallel", "8"],
        "does not divide the 4 experts",
    ),
    "compile": (["--compile", "gcc"], "compile 'gcc'"),
    "recompute": (["--recompute", "some"], "recompute 'some'"),
    "data-dtype": (["--data-dtype", "int8"], "data_dtype 'int8'"),
    "out": (["--out", "/dev/null/x"], "--out"),
    "export-dry": (["--dry-run", "--export", "x"], "--export"),
    "topology": (["--topology", "x"], "--topology"),
    "world-size": (["--world-size", "8"], "--world-size"),
    "data": (["--data", "/dev/null/x"], "--data"),
    "init-from": (["--init-from", "/dev/null/x"], "--init-from"),
    "quantisation": (["--quantisation", "slow"], "quantisation 'slow'"),
    "unfused-blockwise": (["--recipe", "blockwise", "--quantisation", "unfused"], "--quantisation fused"),
    "balance-rate": (["--balance-rate", "-1"], "--balance-rate"),
    "expert-parallel-0": (["--expert-parallel", "0"], "correct --expert-parallel"),
    "expert-parallel-dense": (["--expert-parallel", "2"], "has no experts"),
    "expert-parallel-experts": (["--model", "dsv3-tiny", "--expert-parallel", "3"], "does not divide the 8 experts"),
    "expert-parallel-ranks": (["--model", "dsv3-tiny", "--expert-parallel", "2"], "does not divide 1 rank;"),
    "expert-parallel-dry": (
        ["--model", "dsv3-tiny", "--expert-parallel", "8", "--dry-run", "--world-size", "4"],
        "--expert-parallel",
    ),
    "batch-of-ranks": (["--dry-run", "--world-size", "3"], "--batch"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"train-bad-{name}") for name in BAD])
def test_bad_input(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line: what, what was expected, what next."""
    arguments, word = BAD[name]
    assert train.main(["--steps", "1", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("train: ")
    assert word in err


def test_batch_beyond_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot fit is one line before anything is allocated, exit 2."""
    assert train.main(["--steps", "1", "--device", "cpu", "--seq", "100000000"]) == 2
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1, err
    assert "lower --batch or --seq" in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help says what each option means, its default, the models and recipes that exist, and the exit codes."""
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for entry in dataclasses.fields(TrainConfig):
        option = f"--{entry.name.replace('_', '-')}"
        value = f", --no-{option[2:]}" if entry.type == "bool" else f" {entry.name.upper()}"
        assert (
            f"{option}{value} {entry.metadata['help']} (default: {'none' if entry.default == '' else entry.default})"
            in told
        )
    assert all(name in told for name in (*MODELS, *RECIPES, "FP8STACK_ARCH", "Exit codes"))
    assert "--checkpoint-every STEPS save after each so many steps, and after the last; 0: no checkpoints" in told


def test_unknown_arch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8STACK_ARCH=gfx9-4-generic: one line that names the override, exit 2."""
    monkeypatch.setenv("FP8STACK_ARCH", "gfx9-4-generic")
    assert train.main(["--steps", "1", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert "gfx9-4-generic" in err


def test_config_refuses_other_types() -> None:
    """A float for steps or a bool for seed is refused: the hash would differ from the integer's."""
    for changes in ({"steps": 3.0}, {"seed": True}):
        with pytest.raises(ConfigError, match="integer"):
            short(**changes)


def test_command_line(tmp_path: Path) -> None:
    """`python -m fp8stack.train` writes a line a step to metrics.jsonl, progress on stderr, exit 0."""
    command = [sys.executable, "-m", "fp8stack.train", "--recipe", "rowwise", "--steps", "2", "--batch", "2"]
    done = subprocess.run(
        [*command, "--seq", "16", "--device", "cpu", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {
        "step", "loss", "grad_norm", "saturated", "nan", "lr", "seconds", "step_seconds", "tokens_a_second",
        "utilisation", "utilisation_bf16_peak", "utilisation_fp8_peak", "utilisation_reason", "peak_memory_bytes",
        "gemms", "recompiles",
    } == set(lines[0])  # fmt: skip
    assert lines[0]["utilisation"] is None
    assert "no peak rates are known for 'cpu'" in lines[0]["utilisation_reason"]
    assert lines[1]["gemms"]["forward"] == {"baddbmm": 4, "bmm": 4, "fp8stack::scaled_mm": 28, "mm": 1}
    assert lines[1]["tokens_a_second"] == pytest.approx(32 / lines[1]["step_seconds"])
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(told["digests"]) == ["1", "2"]
    assert sum(told["saturated_by_layer"]["2"].values()) == lines[1]["saturated"]
    assert len(told["saturated_by_layer"]["2"]) == 28
    assert "step 2/2" in done.stderr
    assert "28 linears run in FP8" in done.stderr


def test_command_line_stops_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that diverges (a decay of 1,000 x 1,000 a step) ends with exit 1 and a last line naming step and module."""
    wild = ["--lr", "1000", "--weight-decay", "1000", "--warmup", "0", "--schedule", "constant"]
    assert train.main(["--steps", "20", "--batch", "2", "--seq", "16", "--device", "cpu", *wild]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train: step ")
    assert "is not finite; the first module that produced it is '" in last


def test_torchrun(tmp_path: Path) -> None:
    """Under torchrun two ranks write one metrics file and one error line: rank 0's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fp8stack.train", "--layers", "1", "--seq", "16", "--device", "cpu", "--steps", "2"]
    done = subprocess.run(
        [*command, "--batch", "2", "--out", str(tmp_path), "--checkpoint-every", "2"],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on 2 x cpu" in done.stderr
    assert done.stderr.count("step 2/2") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(run(short(steps=2, layers=1)).steps[0].loss, rel=1e-6)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "step-00000002").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "facts.json"]


def test_one_of_two_ranks_tells_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank refuses the same option and ends with 2; rank 0 says so at once, another after a while if it lives.

    torchrun ends all ranks when the first has ended, so one that does not wait can end rank 0 before it has said so.
    """
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert capsys.readouterr().err == ""

    monkeypatch.setattr(train.time, "sleep", sleep)
    monkeypatch.setenv("RANK", "1")
    assert train.main(["--recipe", "fp9"]) == 2
    assert capsys.readouterr().err.startswith("train, rank 1: recipe 'fp9'")
    assert waited == [train.SECONDS_FOR_RANK_0]
    monkeypatch.setenv("RANK", "0")
    assert train.main(["--recipe", "fp9"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(waited) == 1


PLACES = {
    "alone": ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
    "size": ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'; expected a whole number"),
    "address": ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set and MASTER_ADDR is not"),
    "port": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "RANK is set and MASTER_PORT is not"),
    "port-word": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
        "MASTER_PORT is 'http'",
    ),
    "rank": ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK is '-1'"),
    "local": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": ""}, "LOCAL_RANK"),
    "beyond": ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK is 2 and WORLD_SIZE is"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"place-{name}") for name in PLACES])
def test_a_place_that_cannot_be_taken(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables of a launcher that are half there, or no numbers: exit 2 and one line that names the first."""
    place, told = PLACES[name]
    for variable in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in place.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(train, "SECONDS_FOR_RANK_0", 0.0)
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: False)  # by a test before this one
    assert train.main(["--steps", "1", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert told in err
    assert "torchrun" in err


@pytest.fixture
def nothing_aside() -> Iterator[None]:
    """No object is set aside from the collector before, and none is left so."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_aside")
def test_the_heap_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second step and until the end, and collected before; a collector that is off stays so."""
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.get_freeze_count()))
    gc.disable()
    try:
        with train.Garbage(wanted=True) as garbage:
            garbage.after_step()
            assert (collected, gc.get_freeze_count()) == ([], 0)
            garbage.after_step()
            assert collected == [0]
            assert gc.get_freeze_count() > 1000
            garbage.after_step()
            assert collected == [0]
        assert gc.get_freeze_count() == 0
        assert not gc.isenabled()
    finally:
        gc.enable()
    with train.Garbage(wanted=True) as garbage:
        garbage.after_step()
    assert collected == [0], "a run of one step collects nothing"


@pytest.mark.usefixtures("nothing_aside")
def test_whose_heap_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a run on a CPU, which waits for no launch. What a run asks for, it gives back when a step fails."""
    aside: list[int] = []
    run(short(layers=1), lambda record: aside.append(gc.get_freeze_count()))
    assert aside == [0, 0, 0]

    genuine, aside = train.Garbage, []
    monkeypatch.setattr(train, "Garbage", lambda wanted: genuine(True))

    def fails(record: Any) -> None:
        aside.append(gc.get_freeze_count())
        if record.step == 3:
            raise OSError("no reader")

    with pytest.raises(OSError, match="no reader"):
        run(short(layers=1), fails)
    assert [count > 0 for count in aside] == [False, True, True]
    assert gc.get_freeze_count() == 0


def test_backward_in_the_trainers_thread() -> None:
    """Autograd may take no other thread in a backward pass, of each microbatch, and may again after it."""
    trainer = Trainer(short(layers=1, steps=1, accumulate=2, recompute="full"))
    allowed: list[bool] = []
    genuine = trainer._loss

    def watched(*arguments: Any) -> torch.Tensor:
        loss = genuine(*arguments)
        allowed.append(torch._C._is_multithreading_enabled())
        loss.register_hook(lambda gradient: allowed.append(torch._C._is_multithreading_enabled()))
        return loss

    trainer._loss = watched
    trainer.run()
    assert allowed == [True, False, True, False]
    assert torch._C._is_multithreading_enabled()
