"""The FP8 all-gather: a weight that travels as codes is, byte for byte, the one that is quantised after its gather."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fp8stack import formats, parallel, scaling, train
from fp8stack.all_gather import Fp8AllGather, GatheredWeight
from fp8stack.config import ConfigError, TrainConfig
from fp8stack.device import detect
from fp8stack.kernels.tensorwise import quantize_tensorwise
from fp8stack.linear import RECIPES, Float8Linear, convert_to_float8, fp8_all_gather
from fp8stack.models import held
from fp8stack.train import NonFiniteError, Trainer
from suites.unit import ranks

PLAIN = TrainConfig(recipe="tensorwise", steps=3, batch=4, seq=16, device="cpu", layers=2)
CODES = dataclasses.replace(PLAIN, fp8_all_gather=True)
FMT = formats.get("e4m3fn")
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


@pytest.fixture
def world() -> Iterator[parallel.World]:
    """World size 1 in this process."""
    yield parallel.join("cpu")
    parallel.leave()


def first_difference(without: list[dict[str, Any]], with_codes: list[dict[str, Any]]) -> str | None:
    """The first step and tensor that two runs of ranks.gathered_weights differ in, or None."""
    for step, (plain, found) in enumerate(zip(without, with_codes, strict=True), start=1):
        assert [name for name, *_ in plain["reads"]] == [name for name, *_ in found["reads"]]
        for (name, *one), (_, *other) in zip(plain["reads"], found["reads"], strict=True):
            for what, a, b in zip(("dtype or form", "codes", "inverse scale"), one, other, strict=True):
                if a != b:
                    return f"step {step}, {name}: {what} differ"
        for what in ("loss", "gradients", "counts"):
            if plain[what] != found[what]:
                return f"step {step}: {what} differ"
    return None


def test_two_ranks_read_the_same_codes() -> None:
    """20 steps: bytes and scale bits of each weight, losses, gradients and code counts are those of the flag off.

    pytorch/ao#4300, pytorch/ao#835: losses differed, and nobody could say where.
    """
    for answer in ranks.run_ranks(ranks.gathered_weights, 20, False):
        difference = first_difference(answer[False], answer[True])
        assert difference is None, difference
        for step in answer[True]:
            # Forward in order, backward reversed; the first layer's input needs no gradient.
            names = ["0.weight", "1.weight", "2.weight", "2.weight, turned", "1.weight, turned"]
            assert [name for name, *_ in step["reads"]] == names
            assert {told for _, told, *_ in step["reads"]} == {"torch.float8_e4m3fn, (), ()"}
            assert {dtype for dtype, _ in step["gradients"].values()} == {"torch.float32"}
        assert len({step["loss"] for step in answer[True]}) == 20  # it trains


def test_odd_shards_and_values() -> None:
    """Five ranks, the last of which pads and has no row of one weight; a zero weight, a NaN, an infinity: as inline."""
    answers = ranks.run_ranks(ranks.gathered_weights, 2, True, ranks=5)
    assert [answer[True][0]["rows"] for answer in answers] == [[10, 16, 4]] * 4 + [[8, 16, 0]]
    for answer in answers:
        difference = first_difference(answer[False], answer[True])
        assert difference is None, difference
        zero, nan, infinite = answer[True][0]["reads"][:3]
        assert zero[3] == torch.ones(()).view(torch.int32).item()
        assert {code for row in zero[2] for code in row} == {0}
        for read in (nan, infinite):
            assert read[3] == scaling.NAN_BITS
            assert {code & 0x7F for row in read[2] for code in row} == {0x7F}


@pytest.mark.parametrize("pow2", [pytest.param(False, id="exact"), pytest.param(True, id="pow2")])
def test_scale_bits(pow2: bool, world: parallel.World) -> None:
    """400 weights, amax 4.28125 first: inline, compiled and precomputed scales have the same bits.

    pytorch/pytorch#136181: 448 / 4.28125 is 104.642..., and was 104.5 where the quotient was bf16. Masters are float32,
    with bits that bf16 rounds away, so a scale of the master would differ.
    """
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.rand(400, generator=generator) * 60 - 40)
    masters = torch.randn(400, 16, 16, generator=generator) * sizes[:, None, None]
    masters[0] = masters[0].clamp(-1, 1)
    masters[0, 3, 5] = -4.28125 - 2**-10
    named = {
        f"weight {i}": nn.Parameter(DTensor.from_local(master, world.shards, [Shard(0)]))
        for i, master in enumerate(masters)
    }
    gather = Fp8AllGather(named, FMT, pow2)
    gather.precompute()
    found = torch.stack([shard.scale for shard in gather.shards]).view(torch.int32)
    rounded = masters.bfloat16()

    def scales(weights: torch.Tensor) -> torch.Tensor:
        return scaling.scale_from_amax(scaling.amax(weights.flatten(1), dim=1), FMT, pow2)

    compiled = torch.compile(scales, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(found, scales(rounded).view(torch.int32))
    assert torch.equal(found, compiled(rounded).view(torch.int32))
    assert not torch.equal(found, scales(masters).view(torch.int32)) or pow2
    inline = torch.stack([quantize_tensorwise(weight, FMT, pow2)[1] for weight in rounded])
    inverse = torch.stack([shard.inverse_scale for shard in gather.shards])
    assert torch.equal(inverse.view(torch.int32), inline.view(torch.int32))
    first = gather.shards[0].scale.item()
    assert first == (64.0 if pow2 else torch.tensor(448 / 4.28125, dtype=torch.float32).item())
    assert len(set(found.tolist())) > (20 if pow2 else 300)


def test_compiled_blocks_see_one_form() -> None:
    """Form of codes and scale is the same in steps 1 to 3, nothing is compiled after step 1, and the bits are inline's.

    meta-pytorch/float8_experimental#321: a scale was a scalar at step 1 and (1, 1) at step 2, and a guard failed.
    """
    config = dataclasses.replace(PLAIN, batch=2, layers=1, compile="aot_eager", steps=4)
    found = []
    for flag in (False, True):
        trainer = Trainer(dataclasses.replace(config, fp8_all_gather=flag))
        forms: list[Any] = []
        block = trainer.model.layers[0]

        def look(*_: Any, block: nn.Module = block, forms: list[Any] = forms) -> None:
            weight = block.attention.wq.weight
            tensors = (weight.codes, weight.inverse_scale) if isinstance(weight, GatheredWeight) else ()
            forms.append([(t.shape, t.dtype, t.stride()) for t in tensors])

        block.register_forward_pre_hook(look)
        recompiles: list[int] = []
        result = trainer.run(lambda _, t=trainer, r=recompiles: r.append(t.measured["recompiles"]))
        assert recompiles == [0, 0, 0, 0]
        assert trainer.compiler.graphs == 1
        form = [((128, 128), torch.float8_e4m3fn, (128, 1)), ((), torch.float32, ())]
        assert forms == [form if flag else []] * 4
        found.append((result.steps, result.digests))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"recompute": "full", "accumulate": 2}, id="full"),
        pytest.param({"recompute": "selective", "reshard": False}, id="selective-kept"),
        pytest.param({"model": "dsv3-tiny", "recompute": "selective"}, id="experts"),
        pytest.param({"quantisation": "unfused"}, id="unfused"),
    ],
)
def test_one_process_trains_the_same(changes: dict[str, Any]) -> None:
    """World size 1, recomputed or not: steps, code counts, digests and products are those of the flag off."""
    found = []
    for config in (PLAIN, CODES):
        trainer = Trainer(dataclasses.replace(config, **changes))
        result = trainer.run()
        found.append((result.steps, result.digests, trainer.gemms, result.config.hash))
    assert found[0] == found[1]
    assert found[0][0][0].saturated > 0


def test_two_ranks_train_the_same() -> None:
    """The trainer on two gloo ranks: curves, code counts and digests are those of the flag off."""
    for plain, codes in ranks.run_ranks(ranks.trained_both_ways, CODES):
        assert plain == codes


def test_checkpoints_are_plain_and_resume(tmp_path: Path) -> None:
    """A run with codes, stopped after step 2 of 3 and resumed, with them or without, is the straight run to the bit."""
    common = ["--recipe", "tensorwise", "--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu"]

    def lines(out: Path) -> list[dict[str, Any]]:
        read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{name: line[name] for name in ("step", "loss", "grad_norm", "saturated", "nan")} for line in read]

    out = tmp_path / "out"
    common += ["--steps", "3", "--checkpoint-every", "2", "--out", str(out)]
    assert train.main([*common, "--fp8-all-gather"]) == 0
    straight = lines(out)
    for option in ("--fp8-all-gather", "--no-fp8-all-gather"):
        assert train.main([*common, "--resume", option]) == 0
        assert lines(out) == straight
    [found] = ranks.run_ranks(
        ranks.read_without_the_package, str(out / "checkpoints" / "step-00000002"), str(tmp_path / "one.pt"), ranks=1
    )
    names = [name for name, _ in Trainer(dataclasses.replace(PLAIN, layers=1)).model.named_parameters()]
    assert {name.removeprefix("model/") for name in found if name.startswith("model/")} == set(names)
    assert {(kind, dtype) for kind, dtype, _ in found.values()} == {("Tensor", torch.float32)}


def test_a_nan_master_stops_as_inline() -> None:
    """Step and module of the message are those of the flag off."""
    told = []
    for config in (PLAIN, CODES):
        trainer = Trainer(config)
        held(trainer.model.layers[1].feed_forward.w1.weight)[0, 0] = float("nan")
        with pytest.raises(NonFiniteError) as stopped:
            trainer.run()
        told.append((stopped.value.step, stopped.value.module))
    assert told == [(1, "layers.1.feed_forward.w1")] * 2


def converted(world: parallel.World, policy: MixedPrecisionPolicy = POLICY) -> nn.Sequential:
    """Two linears of 32 x 32 with the FP8 all-gather, sharded."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8(model, recipe(), detected=detect(torch.device("cpu")))
    return fully_shard(model, mesh=world.shards, mp_policy=policy)


def recipe(name: str = "tensorwise", **fields: Any) -> Any:
    return dataclasses.replace(RECIPES[name], fp8_all_gather=True, **fields)


def test_what_is_refused(world: parallel.World) -> None:
    """Other recipes, and weights that FSDP2 does not gather, or gathers otherwise."""
    for name in ("bf16", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        with pytest.raises(ConfigError, match=f"recipe '{name}' .*expected one of: tensorwise; .*--fp8-all-gather"):
            TrainConfig(recipe=name, fp8_all_gather=True)
        if name in RECIPES:
            with pytest.raises(ValueError, match=f"recipe '{name}' has other scales of a weight"):
                recipe(name)
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(32, 32))
    report = convert_to_float8(model, recipe(), detected=detect(torch.device("cpu")))
    assert "those of linears are gathered as FP8 codes" in str(report)
    with pytest.raises(ValueError, match=r"plain torch\.float32; .*call fully_shard"):
        model(x)
    with pytest.raises(ValueError, match=r"'0\.weight' is not sharded; .*call fully_shard"):
        fp8_all_gather(model)
    model = converted(world)
    with pytest.raises(ValueError, match=r"plain torch\.bfloat16; .*then precompute\(\)"):
        model(x)
    model = converted(world, MixedPrecisionPolicy())
    fp8_all_gather(model).precompute()
    with pytest.raises(ValueError, match=r"weight '0\.weight' would be gathered as None .*param_dtype=torch\.bfloat16"):
        model(x)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for at, fields in (("0", {"pow2": True}), ("1", {})):
        left = tuple({"0", "1"} - {at})
        convert_to_float8(model, recipe(**fields), filter=left, detected=detect(torch.device("cpu")))
    fully_shard(model, mesh=world.shards, mp_policy=POLICY)
    with pytest.raises(ValueError, match="2 formats or kinds of scale; expected one"):
        fp8_all_gather(model)
    assert fp8_all_gather(nn.Sequential(nn.Linear(32, 32))) is None


def test_scales_are_of_the_last_update(world: parallel.World) -> None:
    """A second precompute() gives the scale of the weight as it is then, in the tensor that the first one made."""
    model = converted(world)
    gather = fp8_all_gather(model)
    gather.precompute()
    shard = gather.shards[0]
    address = shard.inverse_scale.data_ptr()
    before = shard.inverse_scale.item()
    held(model[0].weight).mul_(4)
    gather.precompute()
    assert shard.inverse_scale.item() == 4 * before
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.inverse_scale))
    model(torch.ones(16, 32, dtype=torch.bfloat16))
    assert seen[0].data_ptr() == address == shard.inverse_scale.data_ptr()


def test_values_of_codes_are_not_read(world: parallel.World) -> None:
    """What arrives says shape and dtype, can be detached, and refuses every op that would need its values."""
    model = converted(world)
    fp8_all_gather(model).precompute()
    seen: list[GatheredWeight] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    y = model(torch.ones(2, 16, 32, dtype=torch.float32))
    assert y.dtype == torch.float32
    y.sum().backward()
    [weight] = seen
    assert isinstance(model[0], Float8Linear)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((32, 32), torch.bfloat16, True)
    assert "float8_e4m3fn" in repr(weight)
    assert isinstance(weight.detach(), GatheredWeight)
    assert torch.zeros_like(weight).dtype == torch.bfloat16
    for op in (torch.sum, lambda w: w + 1, lambda w: w.float(), lambda w: w.clone()):
        with pytest.raises(RuntimeError, match=r"gathered as FP8 codes; expected an FP8 linear alone"):
            op(weight.detach())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not re.search("GatheredWeight", str(model.state_dict()))
