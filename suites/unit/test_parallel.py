"""Ranks, activation checkpointing and compile change how a step is computed, not what; and products are all seen."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fp8stack import formats, linear, moe, parallel, train
from fp8stack.blame import NonFiniteError
from fp8stack.config import TrainConfig
from fp8stack.data import Batch
from fp8stack.models import RMSNorm, Transformer, held
from fp8stack.parallel import GEMMS, UnseenGemm
from fp8stack.train import Trainer, run
from suites.unit import ranks

SHORT = TrainConfig(steps=2, batch=2, seq=16, device="cpu", layers=2)
SHARED = TrainConfig(steps=2, batch=4, seq=32, device="cpu", layers=2, accumulate=2)
LINEARS = 7  # of a block of Llama: q, k, v, o, and three of the feed-forward


def short(**changes: Any) -> TrainConfig:
    return dataclasses.replace(SHORT, **changes)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two gloo ranks answer for SHARED."""
    return ranks.run_ranks(ranks.train_and_fail, SHARED)


@pytest.fixture(scope="module")
def one() -> tuple[Trainer, Any, dict[str, float]]:
    """The same configuration at world size 1, in this process."""
    trainer = Trainer(SHARED)
    weights = ranks.hashes(trainer.model)
    return trainer, trainer.run(), weights


def test_two_ranks_are_one_run(two: list[dict[str, Any]], one: tuple[Trainer, Any, dict[str, float]]) -> None:
    """Both ranks report the same, and what one process reports: weights, first loss, gradients (torchtitan#1720)."""
    _, result, weights = one
    for name in ("weights", "steps", "digests", "gemms"):
        assert two[0][name] == two[1][name], name
    for name, expected in weights.items():
        assert two[0]["weights"][name] == pytest.approx(expected, rel=1e-12), name
    first, (_, loss, norm, *_) = result.steps[0], two[0]["steps"][0]
    assert loss == pytest.approx(first.loss, rel=1e-6)
    assert norm == pytest.approx(first.grad_norm, rel=2e-3)
    assert two[0]["steps"][1][1] == pytest.approx(result.steps[1].loss, rel=2e-4)
    for name, (norm, _, dot1, dot2) in result.digests["1"].items():
        found = two[0]["digests"][name]
        assert found[0] == pytest.approx(norm, rel=5e-3), name
        assert found[2] == pytest.approx(dot1, abs=2e-2 * norm), name
        assert found[3] == pytest.approx(dot2, abs=2e-2 * norm), name


def test_dtypes_of_the_policy(two: list[dict[str, Any]]) -> None:
    """float32 masters, a row-shard a rank, gathered as bf16, gradients back in float32 (pytorch/ao#2455).

    No input is cast: the rotary tables stay float32. A CPU's embedding is gathered as float32 (parallel.py says why).
    """
    for answer in two:
        assert answer["others"] == {"embedding": torch.float32, "stream": torch.bfloat16, "table": torch.float32}
        assert answer["gathered"] == {torch.bfloat16}
        assert answer["master"] == (torch.float32, 352 // 2, torch.float32)


def test_uneven_ranks_equal_one_batch(two: list[dict[str, Any]]) -> None:
    """With 3 of 16, 0 of 16 and all labels valid in the microbatches, loss and gradients are those of one batch.

    pytorch/torchtitan#2206: a mean of means weighs a token by its neighbours.
    """
    trainer = Trainer(dataclasses.replace(SHARED, accumulate=1))
    batch = trainer.data.batch(0, 4)
    labels = batch.labels.clone()
    labels[0] = train.IGNORED_LABEL
    labels[1, 3:] = train.IGNORED_LABEL
    parts = [Batch(batch.tokens, labels)]
    loss = float(trainer._gradients(parts, trainer._valid_tokens(parts)))
    digests = trainer.digests.take()
    for answer in two:
        found, gradients = answer["uneven"]
        assert found == pytest.approx(loss, rel=1e-6)
        for name, (norm, _, dot1, dot2) in digests.items():
            assert gradients[name][0] == pytest.approx(norm, rel=1e-2), name
            assert gradients[name][2] == pytest.approx(dot1, abs=3e-2 * norm), name
            assert gradients[name][3] == pytest.approx(dot2, abs=3e-2 * norm), name


def test_non_finite_stops_every_rank(two: list[dict[str, Any]]) -> None:
    """A NaN weight in one rank's shard, or a fault on one rank only: both stop at step 1 and name the same module."""
    for name, module in (("weight", "layers.1.feed_forward.w1"), ("rank", "layers.0.attention.wo")):
        for answer in two:
            assert answer[name].startswith("step 1: the loss is not finite"), answer[name]
            assert f"'{module}'" in answer[name]


@pytest.mark.parametrize(
    ("recipe", "forward", "gradient"),
    [
        pytest.param("bf16", "mm", ("mm", "mm"), id="bf16"),
        pytest.param("rowwise", "fp8stack::scaled_mm", ("fp8stack::scaled_mm", "fp8stack::scaled_mm"), id="rowwise"),
        pytest.param(
            "rowwise_with_gw_hp", "fp8stack::scaled_mm", ("fp8stack::scaled_mm", "mm"), id="rowwise_with_gw_hp"
        ),
    ],
)
def test_checkpointing_recomputes_the_same_gemms(recipe: str, forward: str, gradient: tuple[str, str]) -> None:
    """Each mode gives the same bits and counts; products, by backend, are those that arithmetic says, FP8 as bf16.

    Selective keeps the first, third, fifth and seventh linear of a block and recomputes the second, fourth and sixth.
    """
    blocks = SHORT.layers
    plain: Any = None
    for mode, again in (("none", 0), ("full", LINEARS), ("selective", LINEARS // 2)):
        trainer = Trainer(short(recipe=recipe, recompute=mode, steps=1))
        result = trainer.run()
        plain = plain or result
        assert result.steps == plain.steps, mode
        assert result.digests == plain.digests, mode
        found = trainer.gemms.as_json()
        backward = {"mm": 2}  # of the head
        for name in gradient:
            backward[name] = backward.get(name, 0) + blocks * LINEARS
        heads = {"mm": 1}
        heads[forward] = heads.get(forward, 0) + blocks * LINEARS
        linear = {
            part: {name: n for name, n in found[part].items() if "bmm" not in name}
            for part in ("forward", "recompute", "backward")
        }
        assert linear == {
            "forward": heads,
            "recompute": {forward: blocks * again} if again else {},
            "backward": backward,
        }, mode
        assert found["recomputed"] == blocks * again
        assert found["forward"]["bmm"] == found["forward"]["baddbmm"] == blocks
        assert ("bmm" in found["recompute"]) == (mode == "full"), "attention is kept, unless everything is recomputed"


@torch.library.custom_op("planted::project", mutates_args=())
def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


@torch.library.custom_op("planted::other_gemm", mutates_args=())
def _other_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x[:, None, :] * weight).sum(dim=-1)


for _op in (_project, _other_gemm):
    _op.register_autograd(lambda ctx, grad: (None, None))


@pytest.mark.parametrize(
    ("op", "told"),
    [
        pytest.param(_project, "14 aten::mm.*planted::project.*the policy saw 13", id="hidden"),
        pytest.param(_other_gemm, "planted::other_gemm looks like a matrix product", id="unknown"),
    ],
)
def test_unseen_gemm(op: Any, told: str) -> None:
    """A product that a custom op hides from the policy, or that is spelt in a new way, stops the run by name."""
    trainer = Trainer(short(recompute="selective"))
    wk = trainer.model.layers[1].attention.wk
    wk.forward = lambda x: op(x.flatten(0, 1).double(), wk.weight.double()).to(x.dtype).view(*x.shape[:-1], -1)
    with pytest.raises(UnseenGemm, match=told):
        trainer.run()


def test_gemms_names_every_spelling() -> None:
    """The spellings of torch 2.10 to 2.13 and of this package are all there."""
    spellings = ("mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
    assert {f"aten::{name}" for name in spellings} <= {name for name, kind in GEMMS.items() if kind == "linear"}
    ours = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp8stack::") and "mm" in name.partition("::")[2]
    }
    assert {name.partition(".")[0] for name in ours} <= set(GEMMS), "a product of this package is not in GEMMS"


def test_compiled_blocks() -> None:
    """One graph serves all blocks and steps; losses, code counts and recomputed products are those of eager mode.

    So is the module that made a NaN, which hooks in a graph that is there already do not see.
    """
    plain = run(short(recipe="rowwise", recompute="selective", steps=3))
    trainer = Trainer(short(recipe="rowwise", recompute="selective", steps=3, compile="aot_eager"))
    result = trainer.run()
    assert result.steps == plain.steps
    assert trainer.compiler.graphs == 1
    assert trainer.gemms.recomputed == SHORT.layers * (LINEARS // 2)
    with torch.no_grad():
        held(trainer.model.layers[1].feed_forward.w1.weight)[0, 0] = math.nan
    trainer.step = 0
    with pytest.raises(NonFiniteError, match=r"'layers\.1\.feed_forward\.w1' \(its output; 1 of its weights"):
        trainer.run()


class Made(TorchFunctionMode):
    """Keeps every tensor that a call inside it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.tensors += [found] if isinstance(found, torch.Tensor) else []
        return found


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32")])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "rowwise_with_gw_hp", "tensorwise"])
@pytest.mark.parametrize("played", ["cpu", "cuda"])
def test_what_a_forward_returns_is_made_once(played: str, recipe: str, dtype: torch.dtype) -> None:
    """No autograd.Function ends with a call that returns the tensor it was given, such as `.to` of its own dtype.

    torch.compile of 2.11 gave all blocks gradients of zero so, under the right loss (pytorch/pytorch#180642).
    """
    context: Any = types.SimpleNamespace(save_for_backward=lambda *_: None, needs_input_grad=(True,) * 6)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    experts, offs = weight.expand(2, 32, 32).contiguous(), torch.tensor([16, 32], dtype=torch.int32)
    order = moe.sort_by_expert(torch.arange(32)[:, None] % 2, 2)
    wide = torch.ones(32, 1, dtype=torch.float64 if played == "cpu" else torch.float32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (moe._Dispatch, (x, order.order_R, order.inverse_R)),
        (moe._Combine, (x, wide, order.order_R, order.inverse_R)),
    ]
    if recipe == "bf16":
        calls += [(linear._HighPrecisionLinear, (x, weight, None)), (linear._HighPrecisionLinear, (x, weight, x[0]))]
        calls += [(moe._HighPrecisionGroupedMM, (x, offs, experts))]
    else:
        row = linear.RECIPES[recipe]
        plan = linear.Plan(row, formats.get("e4m3fn"), formats.get("e5m2"))
        calls += [(linear._Float8LinearFunction, (x, weight, bias, plan)) for bias in (None, x[0])]
        of_experts = moe.ExpertPlan(moe.EXPERT_RECIPES[recipe], plan.e4m3)
        calls += [(moe._Float8GroupedMM, (x, offs, of_experts, True, experts))]
    for function, arguments in calls:
        with linear.playing(played), torch.no_grad(), Made() as made:
            results = function.forward(context, *arguments)
        for result in results if isinstance(results, tuple) else (results,):
            assert sum(tensor is result for tensor in made.tensors) == 1, function.__name__


def test_a_gradient_norm_takes_no_memory_on_a_gpu() -> None:
    """Nor in a dry run that plays one: no float64 copy of a gradient is made. The number is that of a CPU.

    Copies that Python asks for, that is: what a kernel allocates inside, as linalg.vector_norm does on a GPU, does not
    show on a CPU.
    """
    layer = torch.nn.Linear(32, 32, bias=False)
    layer.weight.grad = torch.arange(1024.0).view(32, 32)
    with linear.playing("cuda"), Made() as made:
        found = train.squared_norm(layer)
    assert max(tensor.numel() for tensor in made.tensors if tensor.dtype == torch.float64) == 1
    assert float(found) == pytest.approx(float(train.squared_norm(layer)), rel=1e-14)


@pytest.mark.parametrize("played", ["cpu", "cuda"])
def test_a_gradient_norm_of_any_shard(played: str) -> None:
    """A rank may hold no row of a parameter, or rows in another dtype; 3^2 + 4^2 is 25 all the same."""
    layer = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.tensor(values, dtype=dtype)) for values, dtype in (
            ([3.0], torch.float32), ([], torch.float32), ([4.0], torch.bfloat16),
        )]
    )  # fmt: skip
    for parameter in layer:
        parameter.grad = parameter.detach().clone()
    with linear.playing(played):
        found = train.squared_norm(layer)
    assert (float(found), found.dtype, found.shape) == (25.0, torch.float64, ())


def test_a_gradient_norm_is_of_all_ranks() -> None:
    """Two ranks whose own gradients have norms 3 and 4: both report 5, and both clip by 5 (pytorch/pytorch#170862).

    The norm is the 2-norm, here as in the whole product: there is no inf-norm that could be wrong (torchrec#3199).
    """
    answers = ranks.run_ranks(ranks.step_with_planted_gradients, short(steps=1, clip=0.5, digests=False))
    for rank, (norm, clipped) in enumerate(answers):
        assert norm == 5.0
        assert max(clipped) == pytest.approx((3 + rank) * 0.5 / 5, rel=1e-6)
        assert sum(found > 0 for found in clipped) == 1


def test_rows_of_experts_are_sharded() -> None:
    """Over more ranks than experts the rows within each; experts where they divide, and where rows do not either."""
    experts, rows = torch.nn.Parameter(torch.empty(8, 64, 32)), torch.nn.Parameter(torch.empty(10, 32))
    for ranks_, dim in ((4, 0), (8, 0), (16, 1), (3, 0)):
        assert parallel._placement_over(ranks_)(experts).dim == dim, ranks_
        assert parallel._placement_over(ranks_)(rows).dim == 0


# Of a dense block and one of experts, on few tokens: a rank's half has some of every size.
EXPERTS = TrainConfig(model="dsv3-tiny", steps=2, batch=4, seq=64, layers=2, device="cpu")


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], dict[str, dict[str, list[float]]]]:
    """Steps and digests of EXPERTS on one rank."""
    result = run(EXPERTS)
    return [(r.step, r.loss, r.grad_norm, r.saturated, r.nan) for r in result.steps], result.digests


@pytest.mark.parametrize(
    ("size", "degree"),
    [
        pytest.param(2, 1, id="2-ranks"),
        pytest.param(2, 2, id="2-ranks-expert-parallel"),
        pytest.param(4, 2, id="4-ranks-expert-parallel"),
    ],
)
def test_gradients_of_experts(size: int, degree: int, alone: tuple[list[Any], dict[str, Any]]) -> None:
    """However ranks share the experts, every parameter has the gradient that one rank computes: norms within 1e-3.

    A known fault leaves those of experts multiplied by the degree, under an unchanged loss curve. A norm's weight has
    64 or 128 elements only, over which the roundings of its gradient do not average out so far. Recomputed or not:
    where all ranks share the experts between them, torch 2.13 refused the block for FSDP2's marks in it.
    """
    steps, digests = alone
    recompute = {(2, 1): "none", (2, 2): "full", (4, 2): "selective"}[size, degree]
    config = dataclasses.replace(EXPERTS, expert_parallel=degree, recompute=recompute)
    answers = ranks.run_ranks(ranks.judged_curve, config, ranks=size)
    assert all(answer == answers[0] for answer in answers), "the ranks report different numbers"
    found, gradients = answers[0]
    assert found[0][1] == pytest.approx(steps[0][1], rel=1e-6)
    assert found[0][2] == pytest.approx(steps[0][2], rel=1e-3)
    assert found[1][1] == pytest.approx(steps[1][1], rel=2e-3)
    assert gradients["1"].keys() == digests["1"].keys()
    for name, (norm, _, dot1, dot2) in digests["1"].items():
        assert gradients["1"][name][0] == pytest.approx(norm, rel=3e-3 if "norm" in name else 1e-3), name
        assert gradients["1"][name][2] == pytest.approx(dot1, abs=1e-2 * norm), name
        assert gradients["1"][name][3] == pytest.approx(dot2, abs=1e-2 * norm), name


def test_expert_parallel_needs_ranks() -> None:
    """A degree that does not divide the ranks is refused by the option's name."""
    with pytest.raises(train.ConfigError, match=r"expert_parallel is 2, which does not divide 1 rank;.*--expert-par"):
        Trainer(dataclasses.replace(EXPERTS, expert_parallel=2))


def test_compiled_experts() -> None:
    """A dense block and one of experts are two graphs; numbers, code counts and loads are those of eager mode."""
    config = dataclasses.replace(EXPERTS, batch=2, seq=16, recipe="rowwise", recompute="selective")
    plain, trainer = Trainer(config), Trainer(dataclasses.replace(config, compile="aot_eager"))
    expected, found = plain.run(), trainer.run()
    assert expected.steps == found.steps
    assert expected.digests == found.digests
    assert trainer.compiler.graphs == 2
    biases = [model.layers[1].moe.router.bias for model in (plain.model, trainer.model)]
    assert torch.equal(*biases)
    assert bool(biases[0].any())


def test_compiled_experts_on_other_ranks() -> None:
    """A block with experts is two graphs around the exchange and one within it, for any rows; numbers are the eager's.

    Of a dense block selective recomputes 4 of 8 linears (5 of latent attention, 3 of its feed-forward); of one with
    experts 2 of 5 before the exchange, then 1 of 3, and 1 of 3 of the shared ones.
    """
    config = dataclasses.replace(EXPERTS, recipe="rowwise", recompute="selective", expert_parallel=2, steps=3)
    one, other = ranks.run_ranks(ranks.compiled_experts, config)
    assert one[0] == other[0]
    (compiled, plain), same_digests, graphs, again, recomputed = one
    assert compiled == plain
    assert same_digests
    assert graphs == 4
    assert again == [0, 0, 0]
    assert recomputed == 4 + 2 + 1 + 1


def test_any_number_of_rows_of_a_compiled_block() -> None:
    """Of a block that is cut one graph serves many rows, and neither one nor none needs another.

    A rank whose experts nobody chose would compile in the middle of a run, and the others wait.
    """
    model = Transformer(EXPERTS.size)
    parallel.cut_blocks(model.layers)
    made = parallel.compile_blocks(model.layers, "aot_eager")
    assert made is not None
    experts = model.layers[1].moe.experts
    for rows in (7, 0, 1, 5, 1, 0, 9):
        gate, up = (torch.full((rows, 64), fill, dtype=torch.bfloat16, requires_grad=True) for fill in (0.5, 3.0))
        found = experts.middle(gate, up)
        found.sum().backward()
        assert torch.equal(found, moe.swiglu(gate, up))
        assert gate.grad.shape == up.grad.shape == (rows, 64)
        assert made.graphs == 1, rows


def test_nine_compilers_of_one_process() -> None:
    """Each has graphs of its own: Dynamo refuses the ninth of one code object, and trainers share their code."""
    logits, labels = torch.ones(1, 4, 32, requires_grad=True), torch.zeros(1, 4, dtype=torch.int64)
    for number in range(9):
        compiler = parallel.Compiler("aot_eager")
        compiler.backend = "inductor"
        loss = parallel.compile_loss(train.summed_loss, compiler)
        loss(logits, labels).backward()
        assert compiler.graphs == 1, number
    norms = [RMSNorm(32, 1e-6) for _ in range(3)]
    for norm in norms:
        compiler.compiled("norm", norm.forward)(logits)
    assert compiler.graphs == 2, "one graph serves all modules of a kind"


def test_which_losses_are_compiled() -> None:
    """Inductor's alone; another backend, or none, leaves the function as it is, and so its bits."""
    assert parallel.compile_loss(train.summed_loss, None) is train.summed_loss
    assert parallel.compile_loss(train.summed_loss, parallel.Compiler("aot_eager")) is train.summed_loss
    assert parallel.compile_loss(train.summed_loss, parallel.Compiler("inductor")) is not train.summed_loss


def test_ranks_must_divide_the_batch() -> None:
    """A batch that ranks and microbatches do not divide is refused by the option's name."""
    with pytest.raises(train.ConfigError, match=r"batch 8 .* 3 ranks.*--batch"):
        train._check_shares(TrainConfig(batch=8), 3)


@pytest.mark.parametrize("name", [pytest.param("cuda:1", id="numbered"), pytest.param("tpu", id="unknown")])
def test_devices_under_torchrun(name: str) -> None:
    """One GPU named for all ranks, or a device that does not exist: one line that names the option."""
    with pytest.raises(train.ConfigError, match="--device"):
        parallel._resolve_device(name, 2)
