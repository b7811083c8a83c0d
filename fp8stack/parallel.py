"""How the model is spread and how its memory is saved: ranks, FSDP2, activation checkpointing, compile per block.

In the trainer they are applied in this order, each around the one before:

    checkpoint_activations(blocks)     a block's forward becomes checkpoint(forward)
    compile_blocks(blocks)             which becomes one compiled graph
    shard(model)                       whose parameters FSDP2 gathers before it and frees after it

**Ranks.** One process is world size 1 and takes the same path as N under torchrun: a process group of gloo on a CPU,
of NCCL (RCCL) and gloo on a GPU. At world size 1 FSDP2 communicates nothing.

**FSDP2.** The embedding, each block, and norm with head are one unit each; the root comes last and owns nothing.
Master weights are float32, a row-shard a rank; a unit is gathered as bf16 and its gradients are reduced, summed, in
float32: the loss is already divided by the tokens of all ranks. The one exception: on a CPU the embedding is gathered
as float32, because torch's CPU kernel adds the gradients of a repeated token one by one, in the weight's dtype. Where
asked for, weights of FP8 linears are gathered as codes instead (all_gather.py): the bits of training are the same.
No input of a unit is cast: rotary tables are float32 on purpose.

**Expert parallelism.** Of a degree N, N neighbouring ranks hold a layer's experts between them and send each other
tokens (moe.py). The same ranks in another mesh: ranks / N groups of N. Experts are one unit more of a block, sharded
over the ranks that hold the same ones; a parameter of theirs is a DTensor over both dimensions of that mesh, so
checkpoints, digests and weights see the whole one. **Their gradients need no factor**: a rank's gradient of an expert
is the sum over the tokens of its N ranks, what is reduced is the sum over the rest, and every loss is divided by the
tokens of all. Whoever averages instead divides by ranks / N where the rest of the model divides by ranks, and the
gradients of experts come out N times too large, which no loss curve shows (AdamW divides by their size).

A block that is recomputed exchanges its rows again. Rows of an expert's weight are sharded, not experts, where ranks
divide the rows and not the experts: otherwise some ranks would hold more than others, or nothing.

**Activation checkpointing.** `full` recomputes a block's forward in its backward pass. `selective` decides op by op:
attention is kept, and every second of the block's linear GEMMs, in their order; the rest is recomputed. `GEMMS` names
every spelling of a matrix product, high precision and FP8 alike, so a comparison of recipes recomputes the same
products. A custom op hides what it calls, from the policy as from everything else: an FP8 product is `scaled_mm` of
this package, and the `_scaled_mm` in it is invisible. Counting codes, and tokens of experts, is never repeated, in
either mode.

**Counting GEMMs.** `GemmCounter` watches a step through torch's profiler, which sees ops inside custom ops too: an
instrument that does not share the policy's blindness. It counts the outermost known product; a product that the policy
did not see, or an op that looks like one and is not in `GEMMS`, is an error.

**Compile.** Each block's forward, as one graph (fullgraph, static shapes). `Compiler.graphs` counts what was compiled;
a graph beyond the first step's is a recompile. Inductor gets `inductor.options()`, without which its gradients can be
wrong, silently; whoever compiles by himself passes them too.

Where experts are on other ranks a block is no one graph: how many rows arrive is read on the host, and FSDP2 gathers
the experts in the middle. So it is cut in three (`cut_blocks`): two graphs, until rows leave and from when they are
back, and between them the exchange and the experts as they are, but for the plain operators between their products,
which are a graph for any number of rows from two. Each third is checkpointed by itself; what passes between them is
kept, and `selective` counts linear GEMMs from one in each.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8stack import inductor
from fp8stack.config import ConfigError
from fp8stack.models import LatentBlock, Transformer
from fp8stack.moe import MoE


# ---------------------------------------------------------------------------------------------------------------- ranks
@dataclass(frozen=True)
class World:
    """The ranks of a run and this one's place among them.

    shards: the mesh that parameters are sharded over. Under expert parallelism, else None: expert_shards, the ranks
    that hold the same experts as this one; experts, those that hold them all between them. plays: of a dry run, the
    device type whose path it takes.
    """

    rank: int
    size: int
    device: torch.device
    shards: DeviceMesh
    expert_shards: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    plays: str | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` summed over all ranks, in place, returned. Collective."""
        dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), in the order of ranks. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def join(device: str, expert_parallel: int = 1) -> World:
    """Take this process's place: the one that torchrun gave it, or world size 1.

    Raises ConfigError where the environment says a place that cannot be taken, the device is not here, or is named by
    number under torchrun, or the degree of expert parallelism does not divide the ranks.
    """
    ranks = _ranks_started() if "RANK" in os.environ else 1
    found = _resolve_device(device, ranks)
    if found.type == "cuda":
        torch.cuda.set_device(found)
        # cuBLAS is deterministic only so, and torch insists on it in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if found.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return place(found, expert_parallel)


def _ranks_started() -> int:
    """How many ranks the environment speaks of, where it speaks of them as torchrun does."""
    how = "as torchrun sets it; start the command with torchrun, or unset RANK"
    meeting = () if dist.is_initialized() else ("MASTER_ADDR", "MASTER_PORT")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *meeting):
        value = os.environ.get(name, "0" if name == "LOCAL_RANK" else None)
        if value is None:
            raise ConfigError(f"RANK is set and {name} is not; expected it {how}")
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise ConfigError(f"{name} is '{value}'; expected a whole number, {how}")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= ranks:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {ranks}; expected a rank below it, {how}")
    return ranks


def place(device: torch.device, expert_parallel: int, plays: str | None = None) -> World:
    """This rank's place in the process group that is there. ConfigError where the degree does not divide the ranks."""
    size = dist.get_world_size()
    check_degree(expert_parallel, size)
    shards = init_device_mesh(device.type, (size,), mesh_dim_names=("shards",))
    if expert_parallel == 1:
        return World(dist.get_rank(), size, device, shards, plays=plays)
    names = ("expert_shards", "experts")
    mesh = init_device_mesh(device.type, (size // expert_parallel, expert_parallel), mesh_dim_names=names)
    return World(dist.get_rank(), size, device, shards, mesh[names[0]], mesh[names[1]], plays)


def check_degree(expert_parallel: int, ranks: int) -> None:
    """ConfigError where the degree does not divide the ranks."""
    if ranks % expert_parallel:
        raise ConfigError(
            f"expert_parallel is {expert_parallel}, which does not divide {ranks} rank{'' if ranks == 1 else 's'}; "
            "expected a divisor; correct --expert-parallel"
        )


def leave() -> None:
    """Close the process group. The end of a program; a process that trains once more joins again."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _resolve_device(name: str, ranks: int) -> torch.device:
    """'auto' is the GPU if there is one, under torchrun that of the local rank; anything else must be usable here."""
    local = int(os.environ.get("LOCAL_RANK", "0")) if ranks > 1 else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is unknown; expected auto, cpu, cuda or cuda:N; correct --device")
    if device.type == "cpu":
        return device
    if device.index is not None and ranks > 1:
        raise ConfigError(
            f"device '{name}' is one GPU, but torchrun started {ranks} ranks; each takes the GPU of its local rank; "
            "use --device cuda"
        )
    index = device.index if device.index is not None else local
    if (index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device 'cuda:{index or 0}' is not here; this machine has {torch.cuda.device_count()} GPUs; use --device "
            "cpu, or fewer ranks a machine"
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


# ---------------------------------------------------------------------------------------------------------------- FSDP2
def shard(model: Transformer, world: World, reshard: bool = True) -> None:
    """`fully_shard` the model, in place; see the header for the units and dtypes.

    reshard: free a block's gathered weights between its forward and its backward pass.
    """
    # Of in-place ops on a unit's output that is a view (torch 2.13). There are none.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    # Of gathers of experts that are sharded over both dimensions of their mesh, one after the other (torch 2.13). Only
    # digests and exported weights gather so.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gathered = MixedPrecisionPolicy(
        param_dtype=model.dtype, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )
    embedding = gathered
    if (world.plays or world.device.type) == "cpu":
        embedding = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def unit(modules: nn.Module | list[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
        fully_shard(modules, mesh=mesh, **options)
        for module in modules if isinstance(modules, list) else [modules]:
            assert isinstance(module, FSDPModule)
            module.set_force_sum_reduction_for_comms(True)
            # A factor of 1 divides nothing where gradients are summed over ranks. Over one rank it does: a quotient and
            # a copy of it are written (torch 2.13), where there is only the copy without a factor.
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)

    unit(model.tok_embeddings, world.shards, mp_policy=embedding)
    blocks: dict[str, Any] = {"mp_policy": gathered, "reshard_after_forward": reshard}
    for block in model.layers:
        moe = getattr(block, "moe", None)
        if isinstance(moe, MoE) and world.experts is not None and world.expert_shards is not None:
            _divide_experts(moe, world.experts)
            placement = _placement_over(world.expert_shards.size())
            unit(moe.experts, world.expert_shards, shard_placement_fn=placement, **blocks)
        unit(block, world.shards, shard_placement_fn=_placement_over(world.size), **blocks)
    # Their backward pass comes at once: freeing them in between would gather the head twice.
    unit([model.norm, model.output], world.shards, mp_policy=gathered, reshard_after_forward=False)
    unit(model, world.shards, mp_policy=gathered)


def _divide_experts(moe: MoE, mesh: DeviceMesh) -> None:
    """Keep this rank's experts, as its part of the whole parameters."""
    moe.expert_parallel(mesh.get_group())
    for name, parameter in list(moe.experts.named_parameters()):
        part = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        setattr(moe.experts, name, nn.Parameter(part))


def _placement_over(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Which dimension of a parameter is sharded over so many ranks: the first, but see the header."""

    def placement(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        by_rows = local.ndim == 3 and local.shape[0] % ranks > 0 and local.shape[1] % ranks == 0
        return Shard(1 if by_rows else 0)

    return placement


# --------------------------------------------------------------------------------------------- activation checkpointing
# Every spelling of a matrix product, by the name of its schema. "linear": in `selective`, every second one is kept.
# "attention": always kept. bmm and baddbmm are attention written out (on a CPU).
GEMMS: dict[str, str] = {
    "aten::mm": "linear",
    "aten::addmm": "linear",
    "aten::_scaled_mm": "linear",
    "aten::_scaled_mm_v2": "linear",
    "aten::_grouped_mm": "linear",
    "aten::_scaled_grouped_mm": "linear",
    "aten::_scaled_grouped_mm_v2": "linear",
    "fp8stack::scaled_mm": "linear",
    "fp8stack::grouped_scaled_mm": "linear",
    "fp8stack::grouped_mm": "linear",
    "fp8stack::grouped_mxfp8_mm": "linear",
    "aten::bmm": "attention",
    "aten::baddbmm": "attention",
    **{
        f"aten::_scaled_dot_product_{kind}": "attention"
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
}

# Marks of torch's profiler are no computation. FSDP2 makes other ones around a unit within a block, as experts under
# expert parallelism are, when the block is recomputed, and torch 2.13 refuses a region that is not repeated op by op.
SAC_IGNORED_OPS.update(
    (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
)

# Ops that run once a step whatever is recomputed.
ONCE = ("fp8stack::count_codes", "fp8stack::count_load")

_CHECKPOINTED, _RECOMPUTED = "fp8stack.checkpointed", "fp8stack.recomputed"


@dataclass
class Decisions:
    """What the policies of all blocks saw in the forward pass, by spelling, since the last `clear`."""

    seen: collections.Counter[str] = field(default_factory=collections.Counter)

    def policy(self, keep_gemms: bool) -> Callable[..., CheckpointPolicy]:
        """The decision for one run through one block: which ops' results are kept."""
        linears = {False: 0, True: 0}

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            schema = getattr(op, "_schema", None)
            name = schema.name if schema is not None else str(op)
            kind = GEMMS.get(name)
            if kind is not None and not context.is_recompute:
                self.seen[name] += 1
            if kind == "linear":
                linears[context.is_recompute] += 1
            odd = linears[context.is_recompute] % 2 == 1
            kept = keep_gemms and (kind == "attention" or (kind == "linear" and odd))
            return CheckpointPolicy.MUST_SAVE if kept or name in ONCE else CheckpointPolicy.PREFER_RECOMPUTE

        return decide


# What of a block that is cut in three becomes a graph, and what cannot.
GRAPHS, EAGER = ("until_experts", "after_experts"), "through_experts"


def cut_blocks(blocks: nn.ModuleList) -> None:
    """Cut the forward of each block with experts in three, in place: for experts on other ranks, and compile."""
    for block in blocks:
        if isinstance(block, LatentBlock) and not block.dense:
            block.forward = block.forward_in_three


def _parts(block: nn.Module) -> tuple[str, ...]:
    """The methods that make up a block's forward, each checkpointed by itself."""
    cut = isinstance(block, LatentBlock) and block.forward == block.forward_in_three
    return (*GRAPHS, EAGER) if cut else ("forward",)


def checkpoint_activations(blocks: nn.ModuleList, mode: str, compiled: bool) -> Decisions | None:
    """Wrap the forward of each block, in place. mode: none, full or selective. Returns what the policy saw, or None.

    compiled: the blocks will be; the marks that GemmCounter reads do not go into a graph.
    """
    if mode == "none":
        return None
    decisions = Decisions()

    def plain() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return create_selective_checkpoint_contexts(decisions.policy(mode == "selective"))

    def marked() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recompute = plain()
        return _marked(_CHECKPOINTED, forward), _marked(_RECOMPUTED, recompute)

    for block in blocks:
        for part in _parts(block):
            contexts = plain if compiled and part != EAGER else marked
            of_block = functools.partial(
                checkpoint, getattr(block, part), use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
            setattr(block, part, of_block)
    return decisions


_recomputing = False


def recomputing() -> bool:
    """Whether a block's forward runs for its backward pass. Not known of compiled blocks."""
    return _recomputing


@contextmanager
def _marked(name: str, inner: AbstractContextManager[Any]) -> Iterator[None]:
    global _recomputing
    before, _recomputing = _recomputing, name == _RECOMPUTED
    try:
        with record_function(name), inner:
            yield
    finally:
        _recomputing = before


# ------------------------------------------------------------------------------------------------------------- counting
FORWARD, BACKWARD = "fp8stack.forward", "fp8stack.backward"

# Names that a matrix product could have. Composite ones hold a known product and so are not reported; matmul and linear
# are always composite, and the product of a matrix and a vector, of which they may consist, is none.
_LOOKS_LIKE_A_GEMM = re.compile(
    r"^\w+::(\w*_)?(b|add|badd|baddb|addb)?(mm|gemm)(_|$)|^\w+::\w*attention$|^\w+::_?conv(olution|[0-9])"
)


class UnseenGemm(RuntimeError):
    """A matrix product ran that GEMMS does not name, or that the checkpointing policy did not see."""


@dataclass(frozen=True)
class GemmCounts:
    """Matrix products of one step on this rank, by spelling.

    Those that a graph recomputes are within `backward`.
    """

    forward: dict[str, int]
    recompute: dict[str, int]
    backward: dict[str, int]

    @property
    def recomputed(self) -> int:
        """How many linear products the backward pass ran beyond the two that each one of the forward pass needs.

        An inference, where `recompute` is an observation; it holds under compile too.
        """
        linear = [sum(n for name, n in part.items() if GEMMS[name] == "linear") for part in self._parts()]
        return linear[1] + linear[2] - 2 * linear[0]

    def _parts(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        return self.forward, self.recompute, self.backward

    def as_json(self) -> dict[str, Any]:
        """For a metrics line: the spellings without their namespace where that is torch's."""
        named = [{name.removeprefix("aten::"): n for name, n in sorted(part.items())} for part in self._parts()]
        return dict(zip(("forward", "recompute", "backward"), named, strict=True)) | {"recomputed": self.recomputed}


class GemmCounter:
    """Counts the matrix products of what runs inside it (`with counter:`), forward and backward marked by the trainer.

    Args:
        decisions: of `checkpoint_activations`; what they saw is compared with what ran.
        compiled: blocks are graphs: their policies ran when they were compiled and are not compared.
    """

    def __init__(self, decisions: Decisions | None, compiled: bool) -> None:
        self._decisions, self._compiled = decisions, compiled
        self._stack = ExitStack()

    def __enter__(self) -> GemmCounter:
        if self._decisions is not None:
            self._decisions.seen.clear()
        self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def counts(self) -> GemmCounts:
        """After the block: what was counted. UnseenGemm where it is not what the policy saw."""
        # The raw events: making torch's FunctionEvents of them takes seconds for a step of emulated FP8.
        raw = self._profile.profiler.kineto_results.events()
        events = [(e.start_thread_id(), e.start_ns(), -e.duration_ns(), e.name()) for e in raw]
        backward = [(start, start - minus) for _, start, minus, name in events if name == BACKWARD]
        counted: dict[str, collections.Counter[str]] = {p: collections.Counter() for p in ("forward", "again", "back")}
        checkpointed: collections.Counter[str] = collections.Counter()
        hosts: dict[str, set[str]] = collections.defaultdict(set)
        for name, start, around, again in _outermost_gemms(events):
            if _RECOMPUTED in around and not again:
                continue  # the policy handed out the kept result; computing it is a second call, within the first
            late = any(begin <= start <= end for begin, end in backward)
            part = "again" if _RECOMPUTED in around else "back" if late else "forward"
            counted[part][name] += 1
            if part == "forward" and _CHECKPOINTED in around:
                checkpointed[name] += 1
                hosts[name].update(op for op in around if "::" in op and not op.startswith("aten::"))
        if self._decisions is not None and not self._compiled:
            for name in checkpointed | self._decisions.seen:
                if checkpointed[name] != self._decisions.seen[name]:
                    inside = f" (some inside {', '.join(sorted(hosts[name]))})" if hosts[name] else ""
                    raise UnseenGemm(
                        f"{checkpointed[name]} {name}{inside} ran in checkpointed blocks and the policy saw "
                        f"{self._decisions.seen[name]}; expected it to see all; name the custom op that hides them in "
                        "parallel.GEMMS"
                    )
        return GemmCounts(*(dict(part) for part in counted.values()))


def _outermost_gemms(events: list[tuple[int, int, int, str]]) -> Iterator[tuple[str, int, tuple[str, ...], bool]]:
    """(spelling, start, names of the ops around it, whether it calls itself) of every product that no other contains.

    events: (thread, start, minus its duration, name). UnseenGemm for an op that looks like a product, is not named in
    GEMMS and neither holds one that is nor is inside one.
    """
    stack: list[list[Any]] = []  # thread, end, start, name, spelling of the product or "", it calls itself, suspect
    for thread, start, minus, name in [*sorted(events), (-1, 0, 0, "")]:
        while stack and (stack[-1][0] != thread or stack[-1][1] < start - minus):
            _, _, began, op, spelling, again, suspect = stack.pop()
            if suspect:
                raise UnseenGemm(
                    f"op {op} looks like a matrix product and parallel.GEMMS does not name it; expected every spelling "
                    "there; add it, so that checkpointing treats it as the others"
                )
            if spelling:
                yield spelling, began, tuple(above[3] for above in stack), again
        inside = next((above for above in stack if above[4]), None)
        base = name.removesuffix("_backward")
        spelling = base if base in GEMMS and inside is None else ""
        if inside is not None and name == inside[3]:
            inside[5] = True
        if spelling:
            for above in stack:
                above[6] = False
        suspect = inside is None and not spelling and bool(_LOOKS_LIKE_A_GEMM.search(name))
        stack.append([thread, start - minus, start, name, spelling, False, suspect])


# -------------------------------------------------------------------------------------------------------------- compile
class Compiler:
    """The backend of torch.compile, with a count of the graphs that were compiled."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.graphs = 0
        self._codes: dict[str, types.CodeType] = {}
        self._call = torch._dynamo.lookup_backend(
            # The plain aot_eager has no partitioner, so it would ignore what activation checkpointing wants.
            "aot_eager_decomp_partition" if backend == "aot_eager" else backend
        )
        try:
            self._keywords = {"config_patches": inductor.options()} if backend == "inductor" else {}
        except inductor.UnknownGenerator as error:
            raise ConfigError(str(error)) from error

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """What torch.compile asks of a backend."""
        self.graphs += 1
        return self._call(graph, inputs, **self._keywords)

    def compiled(self, name: str, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """`function` as one graph, or the graph that another function of this name has, if that fits it.

        Dynamo keeps the graphs of a code object, whoever asked for them, and refuses the ninth. Code of this compiler's
        own: trainers of one process would share a count, and the ninth could not be made.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__code__ = self._codes.setdefault(name, call.__code__.replace(co_name=name))
        return torch.compile(call, backend=self, fullgraph=True, dynamic=dynamic)


def compile_blocks(blocks: nn.ModuleList, backend: str) -> Compiler | None:
    """Compile the forward of each block, in place: FSDP2's hooks stay outside. backend: none, inductor or aot_eager."""
    if backend == "none":
        return None
    compiler = Compiler(backend)
    for block in blocks:
        for part in _parts(block):
            if part != EAGER:
                setattr(block, part, compiler.compiled(part, getattr(block, part)))
            else:  # of its plain operators what is worth it; how many rows there are differs from step to step
                experts = block.moe.experts
                experts.middle = _of_many_rows(
                    compiler.compiled("middle", experts.middle, dynamic=True), experts.middle
                )
    return compiler


def _of_many_rows(
    graph: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The graph, but for no row and for one: Dynamo makes graphs of their own for these, while other ranks wait."""

    def either(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
        return (graph if len(gate_RF) > 1 else plain)(gate_RF, up_RF)

    return either


def compile_loss(loss: Callable[..., torch.Tensor], compiler: Compiler | None) -> Callable[..., torch.Tensor]:
    """The loss as one graph where Inductor compiles: its cast, sum and gradient read and write the logits once each.

    Other backends fuse nothing, and what they decompose the loss into has other bits than the eager operators.
    """
    if compiler is None or compiler.backend != "inductor":
        return loss
    return compiler.compiled("loss", loss)
