"""The trainer: config -> ranks -> model -> FP8 -> checkpointing -> compile -> FSDP2 -> weights -> optimiser -> loop.

    python -m fp8stack.train --model llama3-tiny --recipe rowwise --steps 100 --seed 0 --out DIR
    torchrun --nproc-per-node 8 -m fp8stack.train --model llama3-8b --recipe rowwise_with_gw_hp ...

One readable path, no registry and no callbacks; one process takes the same one as a thousand. A run is a pure function
of its configuration and its arch: weights, tokens and nudges come from integers (data.py), the order of operations is
fixed, nothing reads the clock or torch's generators, so a rerun on one machine gives the same bits.

Two machines may not, and a baseline must know how far apart two harmless runs may be. `--nudge i` makes a harmless
difference: it flips a mantissa bit of one in a thousand initial weights, chosen by i: the last one that bf16, the dtype
of the products, keeps. (The last bit of the float32 master is rounded away before the first product: such runs came
out identical to run 0, bit by bit.) So run i begins where a harmless change of an operation's order leads: a few
results in a thousand at the other bf16 neighbour. Run 0 is the configuration as it is.

The loss is the sum over valid tokens of all ranks and microbatches, divided by their number: never a mean of means. A
step reads the device once, after the backward pass: loss, gradient norm and code counts, summed over the ranks, in one
vector. A non-finite loss or norm stops every rank before the optimiser sees it. The step is then repeated with a watch
on every module (the run is deterministic, so it fails the same way) and the first module whose output, or failing
that whose gradient, is not finite is named, whichever rank saw it. Normal steps pay nothing for this.

Exit codes: 0 done; 1 stopped, by a non-finite value or by something that could not be written; 2 bad input (one line:
what, expected, what next).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from fp8stack import checkpoint, command, dryrun, parallel, weights
from fp8stack import device as devices
from fp8stack.blame import NonFiniteError, first_non_finite
from fp8stack.checkpoint import CheckpointError, Checkpoints
from fp8stack.config import BF16, ConfigError, TrainConfig, learning_rate
from fp8stack.data import (
    SYNTHETIC,
    Batch,
    DataError,
    SyntheticTokens,
    Text,
    TokenFile,
    batches,
    random_bits,
    random_signs,
)
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch
from fp8stack.linear import (
    Conversion,
    Float8Linear,
    convert_to_float8,
    device_type,
    fp8_all_gather,
    recipe_named,
    wide_dtype,
)
from fp8stack.metrics import CodeCounter, GradientDigests, JsonLines, MetricsError, drain, write_whole
from fp8stack.models import HIGH_PRECISION, Transformer, balancing_biases, held, local_runs
from fp8stack.moe import GroupedExperts
from fp8stack.options import parser
from fp8stack.parallel import GemmCounter, GemmCounts, World
from fp8stack.profile import TraceError, Tracing
from fp8stack.utilisation import ImplausibleUtilisation, flops_a_token, utilisation
from fp8stack.weights import WeightsError

DIGEST_STEPS = (1, 2, 3)
# In --out, beside checkpoints.
METRICS, RUN = "metrics.jsonl", "run.json"
# What a resumed run keeps of run.json: both by step.
KEPT = ("digests", "saturated_by_layer")
# How long other ranks leave it to rank 0 to say what all of them refuse; torchrun ends them when it has.
SECONDS_FOR_RANK_0 = 10.0
# What ends a run that had begun: exit 1.
STOPPED = (NonFiniteError, CheckpointError, MetricsError, WeightsError, ImplausibleUtilisation, TraceError)
IGNORED_LABEL = -100
# One in so many weights is nudged.
NUDGE_PERIOD = 1000
# The last mantissa bit of bf16, counted in float32.
NUDGED_BIT = 16
# float32 weight, gradient and two AdamW moments.
BYTES_A_PARAMETER = 16


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True)
class StepRecord:
    """One step (from 1). Loss in nats a token, before the update; gradient norm before clipping; FP8 code counts.

    The counts are None where the configuration asked for none. They depend on the number of ranks: metrics.py.
    """

    step: int
    loss: float
    grad_norm: float
    saturated: int | None
    nan: int | None


@dataclass
class Result:
    """A finished run."""

    config: TrainConfig
    arch: str
    arch_reason: str
    format: str  # the e4m3 format of the recipe, or bf16
    conversion: Conversion | None
    steps: list[StepRecord] = field(default_factory=list)
    digests: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    seconds: float = 0.0

    def loss_file(self, case: str) -> dict[str, Any]:
        """The content of losses/<case>.json: what the loss gate reads."""
        return {
            "schema": 1,
            "case": case,
            "config_hash": self.config.hash,
            "config": self.config.hashed(),
            "recipe": self.config.recipe,
            "format": self.format,
            "arch": self.arch,
            "seed": self.config.seed,
            "nudge": self.config.nudge,
            "threads": torch.get_num_threads(),
            "versions": {
                "torch": torch.__version__,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
                "aten_cpu_capability": os.environ.get("ATEN_CPU_CAPABILITY", ""),
            },
            "steps": [dataclasses.asdict(record) for record in self.steps],
            "digests": self.digests,
        }


# -------------------------------------------------------------------------------------------------------------- trainer
class Trainer:
    """A model, an optimiser and a stream of tokens, ready for step 1. `run` below is the usual way in.

    Raises ConfigError where the device is not here or too small or the ranks do not divide the batch, UnknownArch where
    the device has no row of formats.
    """

    def __init__(self, config: TrainConfig, world: World | None = None) -> None:
        self.config = config
        self.world = world or parallel.join(config.device, config.expert_parallel)
        dry = self.world.plays is not None
        self.device = self.world.device
        self.detected = devices.detect(self.device)
        _check_shares(config, self.world.size)
        if not dry:
            _check_memory(config, self.world)
        self.data = _text(config)
        # In a dry run tensors are fake, but not those of the meta device, on which a model is built: cutting one into
        # a thousand fake pieces takes longer than all the rest, and a mesh cannot look up ranks among fake ones.
        with unset_fake_temporarily(), torch.device("meta"):
            self.model = Transformer(config.size)
        self.counters: dict[str, CodeCounter] = {}
        self.conversion: Conversion | None = None
        if config.recipe != BF16:
            recipe = dataclasses.replace(recipe_named(config.recipe), fp8_all_gather=config.fp8_all_gather)
            self.conversion = convert_to_float8(self.model, recipe, filter=HIGH_PRECISION, detected=self.detected)
            if config.code_counts:
                self.counters = count_codes(self.model, self.device)
        # A dry run, which looks at every op, compiles nothing; but what is cut for it communicates and recomputes else.
        backend = "none" if dry else config.compile
        if config.compile != "none" and config.expert_parallel > 1:
            parallel.cut_blocks(self.model.layers)
        self.decisions = parallel.checkpoint_activations(self.model.layers, config.recompute, backend != "none")
        self.compiler = parallel.compile_blocks(self.model.layers, backend)
        self._summed_loss = parallel.compile_loss(summed_loss, self.compiler)
        with unset_fake_temporarily():
            parallel.shard(self.model, self.world, config.reshard)
        self.model.to_empty(device=self.device)
        self.fp8_all_gather = fp8_all_gather(self.model)
        self.model.reset_routers()
        if dry:
            self.origin = "no weights"
        elif config.init_from:
            self.origin = weights.read(Path(config.init_from), self.model, config.size)
        else:
            self.model.init_weights(config.seed)
            self.origin = f"weights from seed {config.seed}"
        nudge_weights(self.model, config.nudge)
        self.optimiser = torch.optim.AdamW(
            _groups(self.model, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.step = 0  # of the last update
        self.digests = GradientDigests(self.model, random_signs)
        self.gemms: GemmCounts | None = None  # of the step that was counted
        self.saturated_by_layer: dict[str, int] = {}  # of the last step
        self.measured: dict[str, Any] = {}  # of the last step: time, memory, utilisation, products, recompiles
        native = not self.detected.simulated and self.detected.target.native_fp8_matmul
        self.flops = flops_a_token(config.size, config.seq, config.recipe, native)

    def run(
        self,
        on_step: Callable[[StepRecord], None] | None = None,
        checkpoints: Checkpoints | None = None,
        every: int = 0,
        profile_to: Path | None = None,
        profiled: range | None = None,
    ) -> Result:
        """The steps that are left of the configuration. NonFiniteError stops it.

        on_step: gets each record as it is made. checkpoints, every: one is saved after each `every` steps and after the
        last; where an error stops the run, one may still be being written: `Checkpoints.settle`. profile_to: folder for
        a trace of the steps `profiled`, or of those that profiled_steps says.
        """
        result = Result(
            config=self.config,
            arch=self.detected.arch.name,
            arch_reason=self.detected.reason,
            format=self.conversion.e4m3 if self.conversion else BF16,
            conversion=self.conversion,
        )
        self.result = result
        # Compiling is not training: where blocks are compiled, the second step is counted.
        self._counted_step = self.step + (2 if self.compiler else 1)
        began = time.perf_counter()
        quantisation = launch.unfused(self.config.quantisation == "unfused")
        with _deterministic(self.config.deterministic), quantisation, Garbage(self.device.type == "cuda") as garbage:
            share = self.config.batch // self.world.size
            left = range(self.step, self.config.steps)
            shares = batches(self.data, left, share, self.world.rank, self.world.size, self.config.workers)
            start = time.perf_counter()
            tracing = None
            if profile_to is not None and self.world.rank == 0:
                traced = profiled or profiled_steps(self.config, self.step)
                tracing = Tracing(profile_to, traced, self.device.type == "cuda")
            for step, batch in enumerate(shares, start=self.step + 1):
                if tracing is not None:
                    tracing.before(step)
                graphs = self.compiler.graphs if self.compiler else 0
                record = self._step(step, batch, result)
                garbage.after_step()
                self.step, end = step, time.perf_counter()
                self.measured = self._measure(end - start, graphs)
                start = end
                result.steps.append(record)
                if tracing is not None:
                    tracing.after(step)
                if on_step is not None:
                    on_step(record)
                if checkpoints is not None and every and (step % every == 0 or step == self.config.steps):
                    checkpoints.save(step, self.state(), self.facts())
            if checkpoints is not None:
                checkpoints.wait()
        result.seconds = time.perf_counter() - began
        return result

    def _step(self, step: int, batch: Batch, result: Result) -> StepRecord:
        parts = self._microbatches(batch)
        valid = self._valid_tokens(parts)
        self._precompute()
        self.optimiser.zero_grad(set_to_none=True)
        counting = GemmCounter(self.decisions, self.compiler is not None) if step == self._counted_step else None
        with counting or nullcontext():
            loss = self._gradients(parts, valid)
        if counting is not None:
            self.gemms = counting.counts()
        value, norm, saturated, nan = self._read(loss)
        if not math.isfinite(value):
            raise self._blamed(step, "the loss", parts, valid)
        if not math.isfinite(norm):
            raise self._blamed(step, "the gradient norm", parts, valid)
        if step in DIGEST_STEPS and self.config.digests:
            result.digests[str(step)] = self.digests.take()
        if norm > self.config.clip:
            torch._foreach_mul_(list(_gradients(self.model)), self.config.clip / norm)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimiser.step()
        self.model.balance(self.config.balance_rate, self.world.sum)
        return StepRecord(step, value, norm, saturated, nan)

    def _measure(self, seconds: float, graphs: int) -> dict[str, Any]:
        """What the step of this rank cost. seconds: since the last one ended. graphs: compiled before it began."""
        tokens = self.config.batch * self.config.seq
        if self.device.type == "cuda":
            name, peak = torch.cuda.get_device_name(self.device), torch.cuda.max_memory_allocated(self.device)
        else:
            name, peak = self.device.type, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        compiled = self.compiler.graphs - graphs if self.compiler else 0
        return {
            "step_seconds": seconds,
            "tokens_a_second": tokens / seconds,
            **utilisation(self.flops, tokens // self.world.size, seconds, name),
            "peak_memory_bytes": peak,
            "gemms": self.gemms.as_json() if self.gemms else None,
            "recompiles": compiled if graphs else 0,  # the first graph is no recompile
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on and that its number does not give: plain float32 tensors by name."""
        state = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimiser.state[parameter]
            if not moments:  # AdamW makes them at its first step; a checkpoint may be loaded before
                moments["step"] = torch.zeros((), dtype=torch.float32, device=self.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            state[f"model/{name}"] = parameter.detach()
            state[f"exp_avg/{name}"], state[f"exp_avg_sq/{name}"] = moments["exp_avg"], moments["exp_avg_sq"]
            state["adam_step"] = moments["step"]  # equal for all
        return state | {f"model/{name}": bias for name, bias in balancing_biases(self.model).items()}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return {
            "step": self.step,
            "config_hash": self.config.hash,
            "config": self.config.hashed(),
            "arch": self.detected.arch.name,
            "ranks": self.world.size,
            "torch": torch.__version__,
        }

    def restore(self, folder: Path) -> None:
        """Continue after the step of a checkpoint. CheckpointError where it is of another configuration. Collective."""
        facts = checkpoint.read_facts(folder)
        mine = self.facts()
        if facts["config_hash"] != mine["config_hash"]:
            ours, theirs = mine["config"], facts["config"]
            differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise CheckpointError(
                f"{folder} was written by another configuration: {', '.join(differ)} differ; expected the options that "
                "it was started with; give those, or start anew in another --out"
            )
        if facts["arch"] != mine["arch"]:
            raise CheckpointError(
                f"{folder} was written with the formats of {facts['arch']}, these are those of {mine['arch']}; "
                f"expected the same; set {devices.OVERRIDE}={facts['arch']}"
            )
        state = self.state()
        checkpoint.load(folder, state)
        for moments in self.optimiser.state.values():
            moments["step"].copy_(state["adam_step"])
        self.step = facts["step"]

    def _precompute(self) -> None:
        """The scales of weights that travel as FP8 codes: of what the last update, a checkpoint or a seed left."""
        if self.fp8_all_gather is not None:
            self.fp8_all_gather.precompute()

    def _microbatches(self, batch: Batch) -> list[Batch]:
        """This rank's share of a step on its device, cut into `accumulate` parts."""
        on_gpu = self.device.type == "cuda"
        # From pinned memory a copy does not wait for what the GPU has to do before it: the last step's optimiser.
        given = (t.pin_memory() if on_gpu else t for t in (batch.tokens, batch.labels))
        parts = (t.to(self.device, non_blocking=on_gpu).chunk(self.config.accumulate) for t in given)
        return [Batch(tokens, labels) for tokens, labels in zip(*parts, strict=True)]

    def _valid_tokens(self, parts: list[Batch]) -> torch.Tensor:
        """Labels that count in the loss, over all ranks and microbatches. 1 without any: the loss is 0, not 0/0."""
        own = torch.stack([(part.labels != IGNORED_LABEL).sum() for part in parts]).sum()
        return self.world.sum(own).clamp(min=1)

    def _gradients(self, parts: list[Batch], valid: torch.Tensor) -> torch.Tensor:
        """Forward and backward of each microbatch; returns this rank's part of the loss, () in the wide dtype.

        The backward pass runs in this thread: handing it to autograd's own for a GPU costs, as pytorch/pytorch#192004
        has it, caches and context switches. Launches of an FP8 step took 520 ms there and 320 here (16 layers, H200).
        """
        losses = []
        for part in parts:
            with record_function(parallel.FORWARD):
                loss = self._loss(part, valid)
            with record_function(parallel.BACKWARD), torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _loss(self, batch: Batch, valid: torch.Tensor) -> torch.Tensor:
        """Sum over the batch's valid tokens / number of valid tokens of the step, () in the wide dtype."""
        return self._summed_loss(self.model(batch.tokens), batch.labels) / valid

    def _read(self, loss: torch.Tensor) -> tuple[float, float, int | None, int | None]:
        """Loss, gradient norm, saturated and NaN codes, over all ranks: the one time that a step reads the device."""
        value, square, *counts = self._numbers(loss).tolist()
        self.saturated_by_layer = dict(zip(self.counters, map(int, counts[::2]), strict=True))
        norm = _float32(math.sqrt(square)) if square >= 0 else math.nan  # NaN compares false
        if self.conversion is not None and not self.counters:
            return _float32(value), norm, None, None
        return _float32(value), norm, int(sum(counts[::2])), int(sum(counts[1::2]))

    def _numbers(self, loss: torch.Tensor) -> torch.Tensor:
        """Loss, squared gradient norm and code counts a layer, summed over the ranks, float64 on the device."""
        numbers = [loss.double().view(1), squared_norm(self.model).view(1)]
        if self.counters:
            numbers.append(drain(list(self.counters.values())).double().flatten())
        return self.world.sum(torch.cat(numbers))

    def _blamed(self, step: int, what: str, parts: list[Batch], valid: torch.Tensor) -> NonFiniteError:
        """The error of a step that is not finite, with the module that began it."""

        def again() -> None:
            self.optimiser.zero_grad(set_to_none=True)
            self._gradients(parts, valid)

        return NonFiniteError(step, what, *first_non_finite(self.model, self.world, again))

    def dry_step(self) -> None:
        """A step whose numbers nobody reads: for a dry run, where there are none."""
        share = self.config.batch // self.world.size
        parts = self._microbatches(self.data.batch(0, share, self.world.rank, self.world.size))
        valid = self._valid_tokens(parts)
        self._precompute()
        self.optimiser.zero_grad(set_to_none=True)
        self._numbers(self._gradients(parts, valid))
        self.optimiser.step()
        self.model.balance(self.config.balance_rate, self.world.sum)


class Garbage:
    """Keeps Python's collector from walking the whole heap in the middle of a step, while a GPU waits for launches.

    After the second step what there is (modules, graphs, kernels: millions of objects) is collected once and set
    aside. Cycles made later are collected as ever; at the end what was set aside is again.
    """

    def __init__(self, wanted: bool) -> None:
        self._steps, self._wanted, self._aside = 0, wanted, False

    def __enter__(self) -> Garbage:
        return self

    def after_step(self) -> None:
        """Called after each step."""
        self._steps += 1
        if self._wanted and self._steps == 2:
            gc.collect()
            gc.freeze()
            self._aside = True

    def __exit__(self, *error: object) -> None:
        if self._aside:
            gc.unfreeze()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over valid tokens, () in the wide dtype: logits (batch, seq, vocab), labels (batch, seq)."""
    logits = logits.to(wide_dtype(logits))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def profiled_steps(config: TrainConfig, done: int) -> range:
    """Three steps after ten (compiling, growing caches), or the last three of a short run.

    Raises ConfigError where fewer than six steps are left.
    """
    if config.steps - done < 6:
        raise ConfigError(
            f"--profile needs 6 steps, 3 of them to warm up; {config.steps - done} are left; raise --steps"
        )
    first = min(done + 11, config.steps - 2)
    return range(first, first + 3)


def run(config: TrainConfig, on_step: Callable[[StepRecord], None] | None = None) -> Result:
    """Train `config` from scratch in this process; `on_step` gets each record as it is made.

    Raises as Trainer does, and NonFiniteError where a loss or a gradient norm is not finite.
    """
    return Trainer(config).run(on_step)


def _groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The optimiser's groups: matrices decay, vectors do not; what lives on another mesh, as experts may, is apart."""
    groups: dict[tuple[Any, bool], list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, parameter.ndim >= 2), []).append(parameter)
    return [{"params": found, "weight_decay": weight_decay * decays} for (_, decays), found in groups.items()]


def _float32(value: float) -> float:
    """The nearest float32, as reported: the last bits of a float64 sum depend on its order."""
    return torch.tensor(value, dtype=torch.float32).item()


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The gradients that this rank holds, parameter by parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield held(parameter.grad)


@torch.no_grad()
def squared_norm(model: torch.nn.Module) -> torch.Tensor:
    """Sum of squares over the gradients that this rank holds, float64 (). Their sum over ranks is the global norm's."""
    gradients = list(_gradients(model))
    if device_type(gradients[0]) == "cpu":
        return torch.stack([g.double().square().sum() for g in gradients]).sum()
    # Reads each gradient once and widens what it has read. linalg.vector_norm writes a float64 copy first (torch 2.13).
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def count_codes(model: torch.nn.Module, device: torch.device) -> dict[str, CodeCounter]:
    """Give every FP8 linear, and the experts of every layer, a counter of their own; by the name of the layer."""
    counters = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            counters[name] = CodeCounter()
            counters[name].prepare(device, module.plan.e4m3, module.plan.e5m2)
            module.plan = dataclasses.replace(module.plan, counter=counters[name])
        elif isinstance(module, GroupedExperts) and module.plan is not None:
            counters[name] = CodeCounter()
            counters[name].prepare(device, module.plan.fmt)
            module.plan = dataclasses.replace(module.plan, counter=counters[name])
    return counters


@torch.no_grad()
def nudge_weights(model: torch.nn.Module, nudge: int) -> int:
    """Flip the last mantissa bit that bf16 keeps of one in a thousand float32 weights, chosen by `nudge` (0: none).

    Returns how many on this rank. Element j of a parameter is chosen when a hash of (nudge, name, j) is a multiple of
    1000: integers only, so the same elements everywhere. Raises ValueError for a parameter that is not float32.
    """
    if nudge == 0:
        return 0
    flipped = 0
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter '{name}' is {parameter.dtype}; nudges flip bits of float32 masters; keep them float32"
            )
        for local, first in local_runs(parameter):
            index = torch.arange(first, first + local.numel(), device=local.device)
            chosen = random_bits(nudge, f"nudge/{name}", index) % NUDGE_PERIOD == 0
            bits = local.view(torch.int32).view(-1)
            bits ^= chosen.to(torch.int32) << NUDGED_BIT
            flipped += int(chosen.sum())
    return flipped


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms for the length of a run, if wanted; the caller's settings afterwards.

    Without the filling of fresh memory that this mode adds by default: it took a quarter of a step on a CPU, and our
    own outputs are written in full.
    """
    algorithms, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _text(config: TrainConfig) -> Text:
    """The text that the configuration names."""
    if config.data == SYNTHETIC:
        return SyntheticTokens(config.size.vocab, config.seq, config.seed)
    return TokenFile(config.data, config.data_dtype, config.size.vocab, config.seq, config.seed, config.batch)


def _check_shares(config: TrainConfig, ranks: int) -> None:
    """Refuse a batch that ranks and microbatches do not divide, and ranks that expert parallelism does not."""
    parallel.check_degree(config.expert_parallel, ranks)
    if config.batch % (ranks * config.accumulate):
        raise ConfigError(
            f"batch {config.batch} cannot be shared by {ranks} rank{'' if ranks == 1 else 's'} in "
            f"{config.accumulate} microbatches each; "
            f"expected a multiple of {ranks * config.accumulate}; change --batch or --accumulate"
        )


def _check_memory(config: TrainConfig, world: World) -> None:
    """Refuse a model, or a batch, whose tensors must exceed the memory of the device.

    Only what certainly exists is counted: this rank's weights, gradients and optimiser state; the logits of a
    microbatch in bf16 and in the wide dtype; on a CPU, where attention is written out, the scores of one layer. A run
    that passes may still fail.
    """
    size, cpu = config.size, world.device.type == "cpu"
    state = size.parameters * BYTES_A_PARAMETER // world.size
    wide = 8 if cpu else 4
    sequences = config.batch // (world.size * config.accumulate)
    step = sequences * config.seq * size.vocab * (2 + wide)
    if cpu:
        step += sequences * size.heads * config.seq**2 * wide
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        have = torch.cuda.get_device_properties(world.device).total_memory
    if state > have:
        raise ConfigError(
            f"model '{config.model}' needs {state / 2**30:.1f} GiB a rank for weights and optimiser; {world.device} "
            f"has {have / 2**30:.1f} GiB; choose a smaller model, --layers, or more ranks"
        )
    if state + step > have:
        raise ConfigError(
            f"batch {config.batch} x seq {config.seq} needs {step / 2**30:.1f} GiB a microbatch beside "
            f"{state / 2**30:.1f} GiB of weights; {world.device} has {have / 2**30:.1f} GiB; lower --batch or "
            "--seq, or raise --accumulate"
        )


# ------------------------------------------------------------------------------------------------------------------ CLI
def _check_dry(arguments: dict[str, Any]) -> None:
    """Refuse options of the dry run without it, and with it those of a run."""
    dry = arguments["dry_run"]
    for option, unused in (
        *(("world_size", 1), ("device_name", "cpu"), ("topology", None), ("json", False)),
        *(("checkpoint_every", 0), ("resume", False), ("export", None), ("profile", None), ("out", None)),
    ):
        if arguments[option] != unused and dry == (option not in ("world_size", "device_name", "topology", "json")):
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{name} does nothing {'in' if dry else 'without'} a dry run; expected it only "
                f"{'without' if dry else 'with'} --dry-run; drop {name}"
            )


def _dry_run(config: TrainConfig, arguments: dict[str, Any]) -> int:
    """Print the dry run. ConfigError as everywhere."""
    ranks = arguments["world_size"]
    if ranks < 1:
        raise ConfigError(f"--world-size is {ranks}; expected a whole number from 1; correct --world-size")
    _check_shares(config, ranks)
    if "RANK" in os.environ:
        raise ConfigError("--dry-run plays one rank; expected one process; start it without torchrun")

    def make(trimmed: TrainConfig, world: World) -> Any:
        trainer = Trainer(trimmed, world)
        return trainer.dry_step, trainer.model, trainer.optimiser

    report = dryrun.dry_run(config, ranks, arguments["device_name"], arguments["topology"], make)
    return 0 if command.show(json.dumps(report, indent=1) if arguments["json"] else dryrun.text(report)) else 1


def _check_out(arguments: dict[str, Any]) -> None:
    """Refuse an --out that holds a run, or with --resume one that holds none, before anything is made or changed.

    Every rank looks before it joins the others, so before rank 0 writes.
    """
    out, every, keep, resume = (arguments[name] for name in ("out", "checkpoint_every", "keep", "resume"))
    for option, value, low in (("--checkpoint-every", every, 0), ("--keep", keep, 1)):
        if value < low:
            raise ConfigError(f"{option} is {value}; expected a whole number from {low}; correct {option}")
    if out is None:
        if every or resume:
            option = "--resume" if resume else "--checkpoint-every"
            raise ConfigError(f"{option} needs a folder; expected --out; add --out")
        return
    folder, files = out / "checkpoints", [out / name for name in (METRICS, RUN)]
    try:
        done, cut = checkpoint.complete(folder), checkpoint.incomplete(folder)
        left = [file.name for file in files if file.exists() and file.stat().st_size]
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be read ({error.strerror}); expected a folder; choose another") from None
    if not resume:
        if done:
            raise ConfigError(
                f"{folder} already holds {done[-1].name}; expected none at the start of a run; add --resume to "
                "continue, or choose another --out"
            )
        if left:
            raise ConfigError(
                f"--out {out} already holds {' and '.join(left)} of a run; expected none at the start of one; choose "
                "another --out"
            )
    elif not done:
        broken = f" ({', '.join(cut)}: cut off, and left as it is)" if cut else ""
        raise ConfigError(
            f"{folder} holds no complete checkpoint{broken}; expected one to resume from; drop --resume and begin in "
            "an --out without a run"
        )
    else:
        _read_run(out / RUN)


def _open_checkpoints(arguments: dict[str, Any], trainer: Trainer) -> Checkpoints | None:
    """The checkpoints of --out, if any are to be written or read; resumes. Room for one more must be there."""
    out, every, keep, resume = (arguments[name] for name in ("out", "checkpoint_every", "keep", "resume"))
    if not (every or resume):
        return None
    folder = out / "checkpoints"
    try:
        checkpoints = Checkpoints(folder, keep)
        newest = checkpoints.newest()
        need, free = checkpoint.needed_bytes(trainer.state()), checkpoints.free_bytes()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); expected a folder; choose another --out"
        ) from None
    if every and need > free:
        raise ConfigError(
            f"a checkpoint takes {need / 2**30:.2f} GiB and {folder} has {free / 2**30:.2f} GiB free; expected room "
            "for one; free space or choose another --out"
        )
    if not resume:
        return checkpoints
    assert newest is not None  # _check_out saw one
    trainer.restore(newest)
    if trainer.world.rank == 0:
        lost = (
            f"; {', '.join(checkpoints.ignored)} was incomplete and goes with the next" if checkpoints.ignored else ""
        )
        print(f"resuming after step {trainer.step} from {newest}{lost}", file=sys.stderr)
    return checkpoints


def _open_metrics(out: Path | None, trainer: Trainer) -> JsonLines | None:
    """Where rank 0 writes its lines; those of steps after the one resumed from go."""
    if trainer.world.rank != 0:
        return None
    if out is None:
        return JsonLines(sys.stdout)
    _make_folder("--out", out)
    try:
        return JsonLines(out / METRICS, keep=trainer.step)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}); expected a folder; choose another"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{out / METRICS} cannot be read ({error}); expected the UTF-8 lines that a run writes; mend or move it: "
            "only the lines of steps already done go with it"
        ) from None


def _make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} cannot be written ({error.strerror}); expected a folder; choose another"
        ) from None


def _shown(count: int | None) -> str:
    return "not counted" if count is None else str(count)


def _read_run(file: Path) -> dict[str, Any]:
    """What run.json holds, or nothing where there is none. ConfigError where it cannot be read."""
    try:
        run = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not isinstance(run, dict) or not all(isinstance(run.get(name, {}), dict) for name in KEPT):
            raise ValueError("not what a run writes")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); expected the JSON that a run writes; remove it: only the gradient "
            "digests and the counts a layer of steps already done go with it"
        ) from None
    return run


def _write_run(file: Path, step: int, trainer: Trainer) -> None:
    """run.json: what a run was and what is too long for a line a step; a resumed run keeps what it had."""
    kept = _read_run(file) if step != 1 else {}
    result = trainer.result
    found = result.digests, {str(step): trainer.saturated_by_layer}
    run = {
        **trainer.facts(),
        "format": result.format,
        "recipe": trainer.config.recipe,
        "quantisation": trainer.config.quantisation,
        **({"fp8_all_gather": True} if trainer.config.fp8_all_gather else {}),
        **{name: {**kept.get(name, {}), **new} for name, new in zip(KEPT, found, strict=True)},
    }
    write_whole(file, json.dumps(run, indent=1, allow_nan=False) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Parse, train, print. Returns the exit code."""
    first = os.environ.get("RANK", "0") == "0"  # of several ranks that refuse the same options one says so
    try:
        arguments = vars(parser().parse_args(argv))
        names = {entry.name for entry in dataclasses.fields(TrainConfig)}
        config = TrainConfig(**{name: value for name, value in arguments.items() if name in names})
        _check_dry(arguments)
        if arguments["dry_run"]:
            return _dry_run(config, arguments)
        _check_out(arguments)
        trainer = Trainer(config)
        checkpoints = _open_checkpoints(arguments, trainer)
        if arguments["profile"] is not None:
            profiled_steps(config, trainer.step)
            _make_folder("--profile", arguments["profile"])
        if arguments["export"] is not None and trainer.world.rank == 0:
            weights.check_writable(arguments["export"])
        # Last: it removes lines of steps that will be done again.
        metrics = _open_metrics(arguments["out"], trainer)
    except (ConfigError, DataError, CheckpointError, WeightsError, devices.UnknownArch, UnsupportedDtype) as error:
        if first:
            print(f"train: {error}", file=sys.stderr)
            return 2
        if isinstance(error, ConfigError):  # most likely rank 0's too; if this rank's alone, it is still here then
            time.sleep(SECONDS_FOR_RANK_0)
        print(f"train, rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 2
    first = trainer.world.rank == 0
    every = max(1, config.steps // 10)
    if first:
        print(
            f"{config.model}, {config.recipe}, {config.steps} steps of {config.batch} x {config.seq} tokens on "
            f"{trainer.world.size} x {trainer.device}; arch {trainer.detected.arch.name} ({trainer.detected.reason}); "
            f"config {config.hash}; {trainer.origin}"
            + (f"; entropy floor {SyntheticTokens.entropy_floor_nats:.4f} nats" if config.data == SYNTHETIC else ""),
            file=sys.stderr,
        )
        if trainer.conversion:
            print(trainer.conversion, file=sys.stderr)
    began = time.perf_counter()

    def report(record: StepRecord) -> None:
        if metrics is None:
            return
        seconds = time.perf_counter() - began
        line = {**dataclasses.asdict(record), "lr": learning_rate(config, record.step), "seconds": round(seconds, 3)}
        try:
            metrics.write({**line, **trainer.measured})
            if arguments["out"] is not None and (record.step in DIGEST_STEPS or record.step == config.steps):
                _write_run(arguments["out"] / RUN, record.step, trainer)
        except OSError as error:
            raise MetricsError(
                f"step {record.step} could not be written to {arguments['out'] or 'stdout'} ({error.strerror}); "
                "expected room, and a reader of stdout; free space, or give --out"
            ) from None
        if record.step == 1 or record.step % every == 0:
            print(
                f"step {record.step}/{config.steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
                f"saturated {_shown(record.saturated)}  nan {_shown(record.nan)}  {seconds:.1f} s",
                file=sys.stderr,
            )

    try:
        trainer.run(report, checkpoints, arguments["checkpoint_every"], arguments["profile"])
        if arguments["export"] is not None:
            weights.write(arguments["export"], trainer.model, config.size)
    except (*STOPPED, DataError) as error:
        tells = first or isinstance(error, DataError)
        if tells:
            print(f"train: {error}", file=sys.stderr)
        lost = checkpoints.settle(together=isinstance(error, NonFiniteError)) if checkpoints is not None else None
        if tells and lost:
            print(f"train: {lost}", file=sys.stderr)
        return 2 if isinstance(error, DataError) else 1
    finally:
        if metrics is not None:
            metrics.close()
        if "RANK" in os.environ or trainer.device.type == "cuda":  # NCCL complains of an exit without
            if first and checkpoints is not None and (lost := checkpoints.abandon()):  # Ctrl-C, a rank that died
                print(f"train: {lost}", file=sys.stderr)
            parallel.leave()
    return 0


if __name__ == "__main__":
    sys.exit(command.run("train", main))
