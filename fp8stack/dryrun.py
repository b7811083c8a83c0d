"""A training run without a cluster: one rank of any number, on tensors without storage, over a fake process group.

What is measured here is what the trainer does, not what somebody computed on paper: its own step runs, in torch's
FakeTensorMode, and every collective that FSDP2 and the trainer issue is written down with its size. Against real gloo
runs of 2 and 4 ranks counts and bytes are equal (suites/unit/test_dryrun.py).

    sizes          parameters, FLOPs a token (utilisation.py), and those that activation checkpointing repeats, counted
    collectives    of the second step (FSDP2 learns its order in the first): op, ranks in the group, count, bytes.
                   Bytes are those of the whole: what an all-gather returns, what a reduce-scatter takes
    memory         a rank's peak in the third step by class, from torch's FSDP2 memory tracker. What a recomputed block
                   holds is "temporary" there
    peak rates     of --device-name, or null and why

Blocks repeat. A model of more than `_WHOLE` is run with `_SHORT` and `_SHORT` + 1 blocks, and the difference is added
for each further one: exact for counts, bytes and every class of memory that grows with depth. Of a model with experts
the further ones are blocks of experts: `_SHORT` holds its dense ones and at least one of those.

The peak of a deep model may be at another moment than that of a short one: where the backward pass begins, activations
of all blocks are there, where it ends, gradients are. Each such moment is extended by itself, and the largest counts.

Nothing is compiled here. Where blocks are cut for that (parallel.py), the parts run as they are.

Experts are assumed to be chosen equally often, so that every rank sends and receives the rows of its own tokens. A real
router's ranks receive more or fewer; over all ranks the bytes are these.

The device's arithmetic is played: on a CPU the model writes attention out in float64 (models.py); for a GPU's name it
takes the GPU's path. A recipe that the device cannot do is refused as there, and where it has no FP8 instructions every
FLOP is one of BF16.

**Simulated, not measured:** with a topology file, step time and weak scaling (tokens a rank constant). A collective
over n ranks takes log2(n) latencies and moves (n-1)/n of its bytes (twice that for an all-reduce), at the rate of a
node's links within a node, of the network beyond. Computing is all products, repeated ones among them, at the device's
peak rates times the topology's efficiency. Communication hides behind it except for the first unit's. No contention, no
stragglers, no congestion: an upper bound of the speed, good for comparing plans. The degree of expert parallelism
stays; of a cluster with fewer GPUs than that there is no row. Where a rank shares its weights with no other (one rank,
or as many as the degree), nothing is gathered: collectives of the table are then those of twice the degree.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack import device as devices
from fp8stack import linear
from fp8stack.config import ConfigError, TrainConfig
from fp8stack.data import SYNTHETIC
from fp8stack.device import Detected
from fp8stack.models import HIGH_PRECISION, Transformer
from fp8stack.parallel import GEMMS, World, place, recomputing
from fp8stack.utilisation import Peaks, flops_a_token, peaks_of

_WHOLE, _SHORT = 8, 4

# c10d op -> (what people call it, which argument holds the whole).
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
}

Key = tuple[str, int]  # collective, ranks in its group


class CollectiveRecorder(TorchDispatchMode):
    """Writes down every collective that is issued inside it: `found[op, ranks] == [count, bytes]`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Key, list[int]] = collections.defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every op."""
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            if name not in _COLLECTIVES:
                raise NotImplementedError(
                    f"collective {name} is not known; expected one of {', '.join(_COLLECTIVES)}; add it to "
                    "fp8stack/dryrun.py with the argument that holds the whole"
                )
            op, place = _COLLECTIVES[name]
            whole = args[place]
            tensors = whole if isinstance(whole, list | tuple) else [whole]
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            counted = self.found[op, group.size()]
            counted[0] += 1
            counted[1] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


class RecomputedProducts(TorchDispatchMode):
    """Adds up the FLOPs of products that run inside it because a block is recomputed, by the peak that bounds them."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = {"bf16": 0, "fp8": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every op."""
        kind = GEMMS.get(func._schema.name) if recomputing() else None
        if kind is not None:
            fp8 = "scaled" in func._schema.name or "fp8" in func._schema.name.partition("::")[2]
            self.flops["fp8" if fp8 and kind == "linear" else "bf16"] += _product_flops(func._schema.name, args)
        return func(*args, **(kwargs or {}))


def _product_flops(name: str, args: Any) -> int:
    """2 for each multiplication and its addition; of attention without the mask, as in utilisation.py."""
    if name.startswith("aten::_scaled_dot_product"):
        q, k, v = args[:3]
        return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    left, right = tensors[1:3] if name in ("aten::addmm", "aten::baddbmm") else tensors[:2]
    return 2 * left.numel() * right.shape[-1]


@dataclass(frozen=True)
class Measured:
    """One step of one rank: collectives (count, bytes), and memory at its peak by class, bytes.

    moments: memory by class at the peak of each of a few moments, of a model to be extended. recomputed: FLOPs.
    """

    collectives: dict[Key, tuple[int, int]]
    memory: dict[str, int]
    moments: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    recomputed: dict[str, int] = dataclasses.field(default_factory=lambda: {"bf16": 0, "fp8": 0})

    def extended(self, longer: Measured, blocks: int) -> Measured:
        """`longer`, which has one block more than this, with `blocks` further ones."""

        def line(a: int, b: int) -> int:
            return b + (b - a) * blocks

        def lines(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            return {key: line(a.get(key, 0), size) for key, size in b.items()}

        memory = lines(self.memory, longer.memory)
        moments = {name: lines(at, longer.moments[name]) for name, at in self.moments.items() if name in longer.moments}
        return Measured(
            {
                key: (
                    line(self.collectives.get(key, (0, 0))[0], count),
                    line(self.collectives.get(key, (0, 0))[1], size),
                )
                for key, (count, size) in longer.collectives.items()
            },
            max((memory, *moments.values()), key=lambda classes: classes["total"]),
            moments,
            lines(self.recomputed, longer.recomputed),
        )


# What makes a trainer for a configuration and a place and returns a function that does one step: train.py's.
Maker = Callable[[TrainConfig, World], tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]]


def measure(config: TrainConfig, ranks: int, device_type: str, make: Maker) -> Measured:
    """One rank of `ranks` on fake tensors. The process must have no process group, and has none afterwards.

    Raises ConfigError where the configuration cannot run on so many ranks.
    """
    config = dataclasses.replace(config, data=SYNTHETIC, init_from="", nudge=0, device="cpu")
    size = config.size.layers
    if size <= _WHOLE:
        return _measure(config, ranks, device_type, make)
    few = max(_SHORT, config.size.dense_layers + 2) if config.size.experts else _SHORT
    short, longer = (
        _measure(dataclasses.replace(config, layers=layers), ranks, device_type, make) for layers in (few, few + 1)
    )
    return short.extended(longer, size - few - 1)


def _measure(config: TrainConfig, ranks: int, device_type: str, make: Maker) -> Measured:
    # Private to torch, as its memory tracker is: there is no public way to have many ranks in one process.
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("--dry-run needs a process of its own; expected no process group; start it without torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = place(torch.device("cpu"), config.expert_parallel, plays=device_type)
        recorder, products = CollectiveRecorder(), RecomputedProducts()
        with FakeTensorMode(allow_non_fake_inputs=True), linear.playing(device_type):
            step, model, optimiser = make(config, world)
            step()
            with recorder, products:
                step()
            # In a step of its own: its hooks replace FSDP2's, and it gathers norm and head twice (torch 2.13).
            tracker = FSDPMemTracker(model, optimiser)
            with tracker:
                step()
        memory = _by_class(tracker.get_tracker_snapshot("peak"))
        moments = _moments(tracker, model)
    finally:
        dist.destroy_process_group()
    collectives = {key: (count, size) for key, (count, size) in sorted(recorder.found.items())}
    return Measured(collectives, memory, moments, products.flops)


def _by_class(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    """A snapshot of torch's memory tracker, of the one device there is, in the words of the report."""
    return {_CLASSES[str(getattr(kind, "value", kind))]: size for kind, size in next(iter(snapshot.values())).items()}


def _moments(tracker: Any, model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Memory at the peak of the backward pass of the head, of the last block, of the first and of the embedding."""
    units: dict[str, tuple[torch.nn.Module, ...]] = {
        "head": (model.norm, model.output),
        "last block": (model.layers[-1],),
        "first block": (model.layers[0],),
        "embedding": (model.tok_embeddings,),
    }
    found = {}
    for name, modules in units.items():
        for module in modules:  # of norm and head, which are one unit, one is on record
            stats = tracker.memory_tracking.get(module)
            for state, snapshots in stats.snapshots.items() if stats is not None else ():
                if state.name == "PEAK_BW":
                    found[name] = max(map(_by_class, snapshots), key=lambda classes: classes["total"])
    return found


_CLASSES = {
    "Sharded Param": "parameters (shard)",
    "Unsharded Param": "parameters (gathered)",
    "Buffer": "buffers",
    "Sharded Grad": "gradients (shard)",
    "Unsharded Grad": "gradients (whole)",
    "Activation": "activations",
    "Temp": "temporary",
    "All Gather": "all-gather buffers",
    "Reduce Scatter": "reduce-scatter buffers",
    "OptState": "optimiser",
    "Inputs": "inputs",
    "Total": "total",
}


# ------------------------------------------------------------------------------------------------------------- topology
@dataclass(frozen=True)
class Topology:
    """A cluster, for the simulation. Bandwidths in GB/s a GPU and direction, latencies in us."""

    gpus_a_node: int
    node_gb_s: float
    network_gb_s: float
    node_latency_us: float
    network_latency_us: float
    compute_efficiency: float  # share of their peak that products reach when nothing is waited for

    def seconds(self, op: str, ranks: int, size: int, extent: int = 0) -> float:
        """Of one collective over `ranks` ranks; size: bytes of the whole.

        extent: how many neighbouring GPUs these ranks are among, if they are not all of them neighbours.
        """
        if ranks == 1:
            return 0.0
        inside = max(ranks, extent) <= self.gpus_a_node
        bandwidth = (self.node_gb_s if inside else self.network_gb_s) * 1e9
        latency = (self.node_latency_us if inside else self.network_latency_us) * 1e-6
        moved = size * (ranks - 1) / ranks * (2 if op == "all-reduce" else 1)
        return math.ceil(math.log2(ranks)) * latency + moved / bandwidth


def read_topology(file: Path) -> Topology:
    """A TOML file with exactly the fields of Topology. Raises ConfigError naming what is wrong."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--topology {file} cannot be read ({error}); expected TOML; correct the file") from None
    names = [entry.name for entry in dataclasses.fields(Topology)]
    odd = sorted(set(found) ^ set(names))
    if odd:
        raise ConfigError(
            f"--topology {file} has or lacks {', '.join(odd)}; expected exactly {', '.join(names)}; correct the file"
        )
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"--topology {file}: {name} is {value!r}; expected a positive number; correct the file")
    if found["compute_efficiency"] > 1 or int(found["gpus_a_node"]) != found["gpus_a_node"]:
        raise ConfigError(
            f"--topology {file}: expected a whole gpus_a_node and a compute_efficiency of at most 1; correct the file"
        )
    return Topology(**{**found, "gpus_a_node": int(found["gpus_a_node"])})


def weak_scaling(
    measured: Measured,
    ranks: int,
    expert_parallel: int,
    compute_seconds: float,
    units: int,
    tokens: int,
    topology: Topology,
) -> list[dict[str, float]]:
    """Simulated step times from 8 to 4,096 GPUs with the tokens a rank of `measured`; see the header.

    compute_seconds: of one step at the peak rates. units: of FSDP2; the first one's gather hides behind nothing.
    """
    rows: list[dict[str, float]] = []
    compute = compute_seconds / topology.compute_efficiency
    for gpus in (8 << n for n in range(10)):
        if gpus < expert_parallel:
            continue
        # Rows are exchanged among neighbours, as many as the degree, whatever the number of GPUs. Other groups grow
        # with it, and have members all over the cluster.
        communication = sum(
            count
            * (
                topology.seconds(op, group, size // max(1, count))
                if op == "all-to-all"
                else topology.seconds(op, group * gpus // ranks, size // max(1, count), extent=gpus)
            )
            for (op, group), (count, size) in measured.collectives.items()
        )
        step = max(compute, communication) + communication / units / 2
        rows.append({"gpus": gpus, "compute_s": compute, "communication_s": communication, "step_s": step})
        rows[-1]["tokens_a_second"] = gpus * tokens / step
        rows[-1]["efficiency"] = rows[0]["step_s"] / step
    return rows


# --------------------------------------------------------------------------------------------------------------- report
# SKU of utilisation.PEAKS -> arch of device.ARCHS.
ARCH_OF = {
    "MI300X": "gfx942",
    "MI325X": "gfx942",
    "MI350X": "gfx950",
    "MI355X": "gfx950",
    "H100 SXM": "sm_90",
    "H200": "sm_90",
    "B200": "sm_100",
    "MI250X (one die)": "gfx90a",
}


def detected_as(device_name: str) -> Detected | None:
    """What `device.detect` would answer on a device of this name; None where no row has it. Raises UnknownArch."""
    peaks = peaks_of(device_name)
    if device_name != "cpu" and not isinstance(peaks, Peaks):
        return None
    target = devices.lookup(ARCH_OF[peaks.sku] if isinstance(peaks, Peaks) else device_name)
    arch = devices.lookup(os.environ.get(devices.OVERRIDE, target.name))
    return Detected(arch, target, f"--device-name is {device_name}", simulated=arch != target)


def _native(detected: Detected) -> bool:
    return not detected.simulated and detected.target.native_fp8_matmul


def _check_recipe(config: TrainConfig, detected: Detected) -> None:
    """Refuse what a run on that device refuses, with its words: UnsupportedDtype."""
    layers = config.size.dense_layers + 1 if config.size.experts else 1
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config.size, layers=min(layers, config.size.layers)))
    linear.convert_to_float8(model, config.recipe, filter=HIGH_PRECISION, detected=detected)


def dry_run(
    config: TrainConfig, ranks: int, device_name: str, topology_file: Path | None, make: Maker
) -> dict[str, Any]:
    """Everything of the header, as plain data. Raises ConfigError."""
    topology = read_topology(topology_file) if topology_file else None
    peaks = peaks_of(device_name)
    detected = detected_as(device_name)
    if detected is not None and config.recipe in linear.RECIPES:
        _check_recipe(config, detected)
    measured = measure(config, ranks, "cpu" if device_name == "cpu" else "cuda", make)
    known = isinstance(peaks, Peaks)
    flops = flops_a_token(config.size, config.seq, config.recipe, detected is None or _native(detected))
    report: dict[str, Any] = {
        "model": config.model,
        "recipe": config.recipe,
        "config_hash": config.hash,
        "ranks": ranks,
        "expert_parallel": config.expert_parallel,
        "layers": config.size.layers,
        "parameters": config.size.parameters,
        "tokens_a_step": config.batch * config.seq,
        "flops_a_token": flops.total,
        "flops_a_token_fp8": flops.fp8,
        "flops_a_token_recomputed": sum(measured.recomputed.values()) * ranks / (config.batch * config.seq),
        "device_name": device_name,
        "peak_bf16_tflops": peaks.bf16_tflops if known else None,
        "peak_fp8_tflops": peaks.fp8_tflops if known else None,
        "peak_reason": None if known else peaks,
        "collectives": [
            {"op": op, "group": group, "count": count, "bytes": size}
            for (op, group), (count, size) in measured.collectives.items()
        ],
        "memory_bytes": measured.memory,
    }
    if topology is not None:
        if not known:
            raise ConfigError(f"--topology needs peak rates: {peaks}; expected a known device; correct --device-name")
        tokens = config.batch * config.seq // ranks
        bf16 = peaks.bf16_tflops * 1e12
        fp8 = (peaks.fp8_tflops or peaks.bf16_tflops) * 1e12 if detected is None or _native(detected) else bf16
        again = measured.recomputed
        # Fewer ranks have nobody to gather from; of more the table is the same.
        enough = max(ranks, 2 * config.expert_parallel)
        if enough > ranks:
            wider = dataclasses.replace(config, batch=config.batch // ranks * enough)
            measured = measure(wider, enough, "cpu" if device_name == "cpu" else "cuda", make)
        seconds = (tokens * flops.bf16 + again["bf16"]) / bf16 + (tokens * flops.fp8 + again["fp8"]) / fp8
        report["simulated"] = {
            "topology": str(topology_file),
            "collectives_of_ranks": enough,
            "weak_scaling": weak_scaling(
                measured, enough, config.expert_parallel, seconds, config.size.layers + 2, tokens, topology
            ),
        }
    return report


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    degree = report["expert_parallel"]
    lines = [
        f"{report['model']}, {report['layers']} layers, {report['recipe']}, "
        f"{report['ranks']} rank{'' if report['ranks'] == 1 else 's'}"
        f"{f', experts over {degree}' if degree > 1 else ''} (dry run: one rank, on fake tensors)",
        f"parameters           {report['parameters']:,}",
        f"tokens a step        {report['tokens_a_step']:,}",
        f"FLOPs a token        {report['flops_a_token']:,.0f}, of which in FP8 {report['flops_a_token_fp8']:,.0f}"
        f"; recomputed {report['flops_a_token_recomputed']:,.0f}",
    ]
    if report["peak_reason"] is None:
        fp8 = report["peak_fp8_tflops"]
        lines.append(
            f"peak rates           {report['device_name']}: BF16 {report['peak_bf16_tflops']} TFLOPS, FP8 "
            f"{'null (no FP8 instructions)' if fp8 is None else f'{fp8} TFLOPS'}"
        )
    else:
        lines.append(f"peak rates           null: {report['peak_reason']}")
    lines += ["", "collectives of a step", f"  {'op':16}{'group':>8}{'count':>8}{'bytes':>20}"]
    lines += [
        f"  {entry['op']:16}{entry['group']:>8}{entry['count']:>8}{entry['bytes']:>20,}"
        for entry in report["collectives"]
    ] or ["  none"]
    lines += ["", "memory of a rank at its peak, GiB"]
    lines += [f"  {name:28}{size / 2**30:>10.3f}" for name, size in report["memory_bytes"].items()]
    if "simulated" in report:
        lines += ["", f"SIMULATED weak scaling, from {report['simulated']['topology']} (no run was made)"]
        enough = report["simulated"]["collectives_of_ranks"]
        if enough != report["ranks"]:
            lines.append(f"  collectives as measured at {enough} ranks: with {report['ranks']} some are not issued")
        lines.append(
            f"  {'GPUs':>6}{'compute s':>12}{'communic. s':>13}{'step s':>10}{'tokens/s':>16}{'efficiency':>12}"
        )
        lines += [
            f"  {row['gpus']:>6}{row['compute_s']:>12.4f}{row['communication_s']:>13.4f}{row['step_s']:>10.4f}"
            f"{row['tokens_a_second']:>16,.0f}{row['efficiency']:>12.1%}"
            for row in report["simulated"]["weak_scaling"]
        ]
    return "\n".join(lines)
