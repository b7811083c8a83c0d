"""Bodies of tests that need several ranks, and the function that runs them: gloo on a CPU, NCCL on GPUs.

Starting a rank costs an import of torch, seconds; so ranks are forked from a server that has imported it, and each body
asks many questions at once. A body lives here, not in its test module, because the child imports it by name. The server
never touches a GPU, so a rank may, whatever the process that asks has done: `device="cuda"` in a configuration is the
GPU of the rank's number.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 480.0
ARCH = "FP8STACK_ARCH"


def run_ranks(body: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """body(rank, *arguments) in `ranks` processes of one group; what each returned, in order.

    Raises RuntimeError with a rank's traceback, or saying how it died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = context.Queue()
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The server has the environment of the first call, and a test may have chosen another arch since.
    told = {**place, ARCH: os.environ.get(ARCH)}
    processes = [
        context.Process(target=_rank, args=(rank, told, answers, body, arguments), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + SECONDS
    try:
        while len(results) < ranks:
            try:
                rank, good, value = answers.get(timeout=0.5)
            except queue.Empty:
                dead = {r: p.exitcode for r, p in enumerate(processes) if p.exitcode and r not in results}
                if dead or time.monotonic() > deadline:
                    how = f"ranks died: {dead}" if dead else f"no answer within {SECONDS:g} s"
                    raise RuntimeError(f"{body.__name__}: {how}") from None
                continue
            if not good:
                raise RuntimeError(f"{body.__name__}, rank {rank}:\n{value}")
            results[rank] = value
    finally:
        for process in processes:
            process.join(10 if len(results) == ranks else 0)
            process.kill()
    return [results[rank] for rank in range(ranks)]


def _rank(
    rank: int, told: dict[str, str | None], answers: Any, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    for name, value in {"RANK": str(rank), "LOCAL_RANK": str(rank), **told}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, True, body(rank, *arguments)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
    else:
        if torch.cuda.is_initialized() and torch.distributed.is_initialized():  # NCCL complains of an exit without
            torch.distributed.destroy_process_group()


def variable(rank: int, name: str) -> str | None:
    """What a variable of the environment is in this rank."""
    return os.environ.get(name)


def hashes(model: Any) -> dict[str, float]:
    """A number a parameter that any change of a weight changes, from the whole parameter: collective."""
    return {name: float(p.detach().full_tensor().double().square().sum()) for name, p in model.named_parameters()}


def sizes_of(state: dict[str, Any]) -> dict[str, float]:
    """The sum of squares of each tensor, sharded or not: collective."""
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    return {name: float(tensor.double().square().sum()) for name, tensor in whole.items()}


def save_once(rank: int, config: Any, folder: str) -> tuple[dict[str, float], list[float]]:
    """A checkpoint after the first step; `sizes_of` what is in it, and this rank's balancing bias of layer 1."""
    from pathlib import Path

    from fp8stack.checkpoint import Checkpoints
    from fp8stack.train import Trainer

    trainer = Trainer(config)
    found: list[Any] = []

    def look(record: Any) -> None:
        found.extend([sizes_of(trainer.state()), trainer.model.layers[1].moe.router.bias.tolist()])

    trainer.run(look, Checkpoints(Path(folder), keep=5), every=1)
    return found[0], found[1]


def read_and_write(rank: int, config: Any, folder: str, by_rows: bool) -> tuple[dict[str, float], tuple[int, ...]]:
    """The weights that `init_from` gave these ranks, the shape that one holds of experts; all of them written again.

    by_rows: rows of experts are sharded, as many ranks would make it.
    """
    from pathlib import Path

    from torch.distributed.tensor import Shard

    from fp8stack import parallel, weights
    from fp8stack.models import held
    from fp8stack.train import Trainer

    if by_rows:
        parallel._placement_over = lambda ranks: lambda parameter: Shard(1 if parameter.ndim == 3 else 0)
    trainer = Trainer(config)
    weights.write(Path(folder), trainer.model, config.size)
    return hashes(trainer.model), tuple(held(trainer.model.layers[1].moe.experts.w1).shape)


def train_and_fail(rank: int, config: Any) -> dict[str, Any]:
    """What test_parallel asks of two ranks: a run, uneven labels, and two planted faults."""
    import torch

    from fp8stack.models import held
    from fp8stack.train import IGNORED_LABEL, NonFiniteError, Trainer

    trainer = Trainer(config)
    answer: dict[str, Any] = {"weights": hashes(trainer.model)}
    w1 = trainer.model.layers[0].feed_forward.w1
    dtypes: set[torch.dtype] = set()
    w1.register_forward_pre_hook(lambda module, _: dtypes.add(module.weight.dtype))
    others: dict[str, torch.dtype] = {}
    embedding = trainer.model.tok_embeddings
    embedding.register_forward_pre_hook(lambda module, _: others.update(embedding=module.weight.dtype))
    attention = trainer.model.layers[0].attention
    attention.register_forward_pre_hook(
        lambda _, inputs: others.update(stream=inputs[0].dtype, table=inputs[1][0].dtype)
    )
    result = trainer.run()
    answer["gathered"] = dtypes
    answer["others"] = others
    answer["master"] = (w1.weight.dtype, held(w1.weight).shape[0], w1.weight.grad.dtype)
    answer["steps"] = [dataclasses.astuple(record) for record in result.steps]
    answer["digests"] = result.digests["1"]
    answer["gemms"] = trainer.gemms.as_json()

    trainer = Trainer(config)
    batch = trainer.data.batch(0, 2, rank, 2)
    labels = batch.labels.clone()
    if rank == 0:
        labels[0] = IGNORED_LABEL  # one microbatch of rank 0 has no valid token
        labels[1, 3:] = IGNORED_LABEL
    parts = trainer._microbatches(dataclasses.replace(batch, labels=labels))
    loss = trainer._gradients(parts, trainer._valid_tokens(parts))
    answer["uneven"] = (float(trainer.world.sum(loss.clone())), trainer.digests.take())

    for name, plant in (("weight", _plant_weight), ("rank", _plant_on_rank_1)):
        trainer = Trainer(config)
        plant(trainer, rank)
        try:
            trainer.run()
            answer[name] = "finished"
        except NonFiniteError as error:
            answer[name] = str(error)
    return answer


def _plant_weight(trainer: Any, rank: int) -> None:
    from fp8stack.models import held

    if rank == 0:
        held(trainer.model.layers[1].feed_forward.w1.weight)[0, 0] = math.nan


def _plant_on_rank_1(trainer: Any, rank: int) -> None:
    if rank == 1:
        trainer.model.layers[0].attention.wo.register_forward_hook(lambda module, _, y: y * math.inf)


def step_with_planted_gradients(rank: int, config: Any) -> tuple[float, list[float]]:
    """A step in which rank r has a gradient of norm 3 + r: the norm on record, and those of what AdamW got here."""
    import torch

    from fp8stack.models import held
    from fp8stack.train import Trainer

    trainer = Trainer(config)
    parameters = list(trainer.model.parameters())

    def planted(parts: Any, valid: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        held(parameters[1].grad).view(-1)[0] = 3.0 + rank
        return torch.zeros((), dtype=torch.float64)

    trainer._gradients = planted
    [record] = trainer.run().steps
    return record.grad_norm, [float(held(parameter.grad).norm()) for parameter in parameters]


def resume_on_two(rank: int, config: Any, folder: str) -> list[Any]:
    """Restore a checkpoint that one rank wrote; the weights' hashes and the steps that follow."""
    from pathlib import Path

    from fp8stack.train import Trainer

    trainer = Trainer(config)
    trainer.restore(Path(folder))
    restored = hashes(trainer.model)
    return [restored, [dataclasses.astuple(record) for record in trainer.run().steps]]


def killed_in_a_save(rank: int, config: Any, folder: str) -> None:
    """Save after each step, and die by SIGKILL when the second save is written and not yet complete."""
    import signal
    from pathlib import Path

    from fp8stack.checkpoint import Checkpoints
    from fp8stack.train import Trainer

    class Dying(Checkpoints):
        def _complete_one(self, partial: Path, final: Path, facts: dict[str, Any]) -> None:
            if final.name.endswith("2"):
                os.kill(os.getpid(), signal.SIGKILL)
            super()._complete_one(partial, final, facts)

    trainer = Trainer(config)
    trainer.run(None, Dying(Path(folder), keep=5), every=1)


def stopped_in_a_save(rank: int, how: str, writes: bool, folder: str) -> tuple[int | str, str]:
    """The command, whose save of step 2 takes long and is under way when step 3 stops the run, as `how` says.

    writes: False where the save fails at its end. Returns the exit code, or the error that nobody catches, and stderr.
    """
    import contextlib
    import io

    import torch.distributed.checkpoint as dcp

    from fp8stack import train
    from fp8stack.data import DataError
    from fp8stack.models import held

    write, step, line = dcp.FileSystemWriter.write_data, train.Trainer._step, train.JsonLines.write

    def slowly(self: Any, *arguments: Any) -> Any:
        time.sleep(2.0)
        if not writes:
            raise OSError(28, "No space left on device")
        return write(self, *arguments)

    def third(self: Any, number: int, *arguments: Any) -> Any:
        if number == 3 and how == "not-finite":
            held(self.model.norm.weight).fill_(math.nan)
        if number == 3 and how == "data" and rank == 1:
            raise DataError("the tokens are gone")
        return step(self, number, *arguments)

    def told(self: Any, record: dict[str, Any]) -> None:
        if record["step"] == 3 and how == "metrics":
            raise OSError(28, "No space left on device")
        line(self, record)

    dcp.FileSystemWriter.write_data = slowly
    train.Trainer._step, train.JsonLines.write = third, told
    arguments = ["--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "5", "--out", folder]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code: int | str = train.main([*arguments, "--checkpoint-every", "2"])
        except RuntimeError as error:  # of gloo: the other rank has gone
            code = type(error).__name__
    return code, stderr.getvalue()


def read_without_the_package(rank: int, folder: str, file: str) -> dict[str, Any]:
    """A checkpoint as torch alone sees it: names, dtypes and a weight."""
    import sys

    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, file)
    state = torch.load(file, weights_only=True)
    assert not [name for name in sys.modules if name.startswith("fp8stack")]
    flat = {name: tensor for name, tensor in state.items()}
    return {name: (type(t).__name__, t.dtype, float(t.double().square().sum())) for name, t in flat.items()}


def real_collectives(rank: int, config: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """What a real second step issues, written down where torch.distributed's functions are called."""
    [(found, _)] = real_runs(rank, [config])
    return found


def real_runs(rank: int, configs: list[Any]) -> list[tuple[dict[tuple[str, int], tuple[int, int]], list[Any]]]:
    """As real_collectives, and the steps and digests, of each configuration."""
    import torch.distributed as dist

    genuine = {name: function for name, function in vars(dist).items() if callable(function)}
    answers = []
    for config in configs:
        answers.append(_watched_run(config))
        vars(dist).update(genuine)
    return answers


def _watched_run(config: Any) -> tuple[dict[tuple[str, int], tuple[int, int]], list[Any]]:
    import torch.distributed as dist

    from fp8stack.train import Trainer

    trainer = Trainer(config)
    found: dict[tuple[str, int], list[int]] = {}
    inside: list[str] = []  # torch 2.13 has new names, and the old ones call them

    def watched(op: str, function: Any, whole: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return function(*args, **kwargs)
            tensor = whole(*args, **kwargs)
            group = kwargs.get("group")
            counted = found.setdefault((op, dist.get_world_size(group)), [0, 0])
            counted[0] += 1
            counted[1] += tensor.numel() * tensor.element_size()
            inside.append(op)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        return call

    def output(output_tensor: Any, *_: Any, **__: Any) -> Any:
        return output_tensor

    def scattered(*args: Any, **kwargs: Any) -> Any:
        return args[1] if len(args) > 1 else kwargs.get("input_tensor", kwargs.get("input"))

    wholes = {
        "all_gather_into_tensor": ("all-gather", output),
        "all_gather_single": ("all-gather", output),
        "reduce_scatter_tensor": ("reduce-scatter", scattered),
        "reduce_scatter_single": ("reduce-scatter", scattered),
        "all_reduce": ("all-reduce", lambda tensor, *_, **__: tensor),
        "all_to_all_single": ("all-to-all", lambda _, given, *__, **___: given),
    }

    def second(record: Any) -> None:
        if record.step == 1:
            for name, (op, whole) in wholes.items():
                if hasattr(dist, name):
                    setattr(dist, name, watched(op, getattr(dist, name), whole))

    result = trainer.run(second)
    steps = [dataclasses.astuple(record) for record in result.steps]
    return {key: (count, size) for key, (count, size) in found.items()}, [steps, result.digests]


def _dry_step(config: Any, world: Any) -> Any:
    from fp8stack import train

    trainer = train.Trainer(config, world)
    return trainer.dry_step, trainer.model, trainer.optimiser


def dry_collectives(rank: int, cases: list[tuple[Any, int, str]]) -> list[Any]:
    """The dry run's answer for each (configuration, ranks, device type)."""
    import torch.distributed as dist

    from fp8stack import dryrun

    answers = [dryrun.measure(config, ranks, device_type, _dry_step) for config, ranks, device_type in cases]
    assert not dist.is_initialized()
    return [(answer.collectives, answer.memory, answer.moments, answer.recomputed) for answer in answers]


def dry_reports(rank: int, cases: list[tuple[Any, int]], topology: str) -> list[dict[str, Any]]:
    """The whole dry run of each (configuration, ranks) for an MI300X, with weak scaling by the topology file."""
    from pathlib import Path

    from fp8stack import dryrun

    name = "AMD Instinct MI300X"
    return [dryrun.dry_run(config, ranks, name, Path(topology), _dry_step) for config, ranks in cases]


def compiled_experts(rank: int, config: Any) -> Any:
    """As judged_curve, of an aot_eager run and its graphs, recompiles and products recomputed; and of a plain run."""
    from fp8stack.train import Trainer, run

    trainer = Trainer(dataclasses.replace(config, compile="aot_eager"))
    again: list[int] = []
    result = trainer.run(lambda record: again.append(trainer.measured["recompiles"]))
    plain = run(config)
    found = [[dataclasses.astuple(r) for r in one.steps] for one in (result, plain)]
    return found, result.digests == plain.digests, trainer.compiler.graphs, again, trainer.gemms.recomputed


def loss_file(rank: int, config: Any, case: str) -> dict[str, Any]:
    """The loss file of a run on these ranks."""
    from fp8stack.train import run

    return run(config).loss_file(case)


def first_gradients(rank: int, cases: list[tuple[Any, bool]]) -> list[tuple[float, dict[str, list[float]]]]:
    """Loss and gradient digests of the first step of each configuration; True: products in float32 and not in bf16."""
    import torch

    from fp8stack import models, train

    found = []
    for config, in_float32 in cases:
        dtype = torch.float32 if in_float32 else torch.bfloat16
        train.Transformer = lambda size, dtype=dtype: models.Transformer(size, dtype)
        result = train.Trainer(config).run()
        found.append((result.steps[0].loss, result.digests["1"]))
    return found


def judged_curve(rank: int, config: Any) -> Any:
    """The losses, gradient norms and digests of a run on these ranks, as the loss suite compares them."""
    from fp8stack.train import run

    result = run(config)
    return [(r.step, r.loss, r.grad_norm, r.saturated, r.nan) for r in result.steps], result.digests


LINEARS = ((64, 48), (48, 80), (80, 16))  # (K, N); of five ranks the last pads the first, and has no row of the third


def gathered_weights(rank: int, steps: int, planted: bool) -> dict[bool, list[dict[str, Any]]]:
    """Three linears sharded with and without the FP8 all-gather: what their products read, and losses, step by step.

    planted: the first weight is zero, the second has a NaN in the last row, the third an infinity in the first.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from fp8stack import linear, parallel
    from fp8stack.device import detect
    from fp8stack.metrics import CodeCounter

    parallel.join("cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shapes = {(n, k): f"{i}.weight" for i, (k, n) in enumerate(LINEARS)}
    shapes |= {(k, n): f"{i}.weight, turned" for i, (k, n) in enumerate(LINEARS)}
    genuine = linear._gemm
    answer = {}
    for flag in (False, True):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in LINEARS))
        with torch.no_grad():
            for layer in model:
                layer.weight.normal_(std=0.2, generator=generator)
            if planted:
                model[0].weight.zero_()
                model[1].weight[-1, -1] = math.nan
                model[2].weight[0, 0] = math.inf
        counter = CodeCounter()
        recipe = dataclasses.replace(linear.RECIPES["tensorwise"], fp8_all_gather=flag)
        linear.convert_to_float8(model, recipe, detected=detect(torch.device("cpu")), counter=counter)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        gather = linear.fp8_all_gather(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []

        def watched(left: Any, right: Any, *rest: Any, seen: Any = seen) -> Any:
            codes, inverse_scale = right
            name = shapes.get(tuple(codes.shape))
            if name is not None:  # else it is no weight
                metadata = f"{codes.dtype}, {tuple(inverse_scale.shape)}, {inverse_scale.stride()}"
                seen.append((name, metadata, codes.view(torch.uint8).clone(), inverse_scale.view(torch.int32).clone()))
            return genuine(left, right, *rest)

        linear._gemm = watched
        answer[flag] = []
        for _ in range(steps):
            seen.clear()
            if gather is not None:
                gather.precompute()
            x = torch.randn(32, LINEARS[0][0], generator=generator).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
            gradients = {
                name: (p.grad.dtype, p.grad.full_tensor().view(torch.int32)) for name, p in model.named_parameters()
            }
            optimiser.step()
            optimiser.zero_grad()
            answer[flag].append(
                {
                    "reads": [(name, told, *(t.tolist() for t in tensors)) for name, told, *tensors in seen],
                    "loss": loss.detach().view(torch.int32).item(),
                    "gradients": {name: (str(dtype), bits.tolist()) for name, (dtype, bits) in gradients.items()},
                    "counts": counter.take(),
                    "rows": [parameter.to_local().shape[0] for parameter in model.parameters()],
                }
            )
        names = [(name, type(t.to_local()), t.dtype) for name, t in model.state_dict().items()]
        assert names == [(f"{i}.weight", torch.Tensor, torch.float32) for i in range(3)], names
    linear._gemm = genuine
    dist.barrier()
    return answer


def trained_both_ways(rank: int, config: Any) -> list[Any]:
    """As judged_curve, without and with the FP8 all-gather."""
    return [judged_curve(rank, dataclasses.replace(config, fp8_all_gather=flag)) for flag in (False, True)]
