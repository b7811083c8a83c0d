"""Tokens a second of the trainer, whole steps: FP8 against bf16, one configuration after another in one process.

    python -m suites.perf.trainer --model llama3-8b --layers 16 --recipes bf16,rowwise_with_gw_hp,rowwise,tensorwise
    python -m suites.perf.trainer --model dsv3-671b --layers 4 --dense-layers 0 --experts 32 \
        --recipes bf16,rowwise:unfused,rowwise:fused
    torchrun --standalone --nproc-per-node 2 -m suites.perf.trainer --model llama3-8b --recipes ...
    torchrun --standalone --nproc-per-node 2 -m suites.perf.trainer --model dsv3-671b --expert-parallel 2 ...

What is timed is fp8stack.train as it is: FSDP2 at any number of ranks, activation checkpointing op by op, a graph a
block. Only what a user would turn off for speed is off: deterministic algorithms, code counts, digests.

How runs are arranged. Every round trains each configuration once, in the order given, and the first one comes again at
the end: bf16 first and last, so that its two speeds show how far the clock of the GPU drifted meanwhile. A run is
--steps steps; those after --warmup are timed, and the median of their tokens/s counts. Three more steps are traced
afterwards (a tracer costs time, so none of them is timed). Between runs everything that the last one had is freed, and
what is still there is in the report.

What is reported, a run: tokens/s and time of a step; of its forward and backward pass, between events on the device;
peak memory of the timed steps; matrix products by backend in forward and backward, and how many were recomputed; kernel
time by class with the three longest kernels of each. Then each configuration against the first one. The comparison is
a fair one only if loss and gradient norm of the first step agree, as many products were recomputed and the peaks are
within 2 %: else it says so, and `--gate` fails.
Of several ranks, rank 0 reports its own times and kernels, communication as a class with the part of it that nothing
else hides, and the highest peak of all ranks. A rank that fails ends at once and torchrun ends the others: no
collective waits for it. FAILED-rankN in --out says why; what earlier runs gave is written.
With bf16, unfused and fused: the share of the gap that the kernels recover, their backward pass against the unfused
one, and the three traces side by side (--out: compare.txt, compare.html).

Results are written after every run, so a run that fails or never ends takes nothing with it. Exit codes: 0; 1 where a
run failed, or with --gate something missed its bar; 2 bad input; 4 no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import gzip
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8stack import data, device, parallel, profile, train
from fp8stack.command import show
from fp8stack.config import BF16, ConfigError, TrainConfig
from fp8stack.data import Batch
from suites.perf import kernels

SECONDS_FOR_RANK_0 = 3.0
PROFILED = 3  # steps that are traced, after one for the tracer itself
MEMORY_BAND = 0.02
FP8_ALL_GATHER = "fp8-all-gather"
# What a variant's loss and gradient norm of the first step may differ by: both have seen the same weights and tokens.
# Formats move them by less than 0.002 and 0.03 (tiny models); a pass that does not reach its layers moves the norm far.
LOSS_BAND, NORM_BAND = 0.01, 0.1


@dataclass(frozen=True)
class Bar:
    """What tokens/s over those of bf16 must reach, and should."""

    bar: float
    goal: float


# (model, variant, ranks) -> bar, of so many H200 of one host. llama3-8b at 2: the whole model; dsv3-671b at 2: expert
# parallel 2.
BARS: dict[tuple[str, str, int], Bar] = {
    ("llama3-8b", "rowwise_with_gw_hp", 1): Bar(1.16, 1.22),
    ("llama3-8b", "rowwise", 1): Bar(1.20, 1.27),
    ("llama3-8b", "tensorwise", 1): Bar(1.26, 1.32),
    ("dsv3-671b", "rowwise", 1): Bar(1.00, 1.20),
    ("llama3-8b", "rowwise_with_gw_hp", 2): Bar(1.18, 1.25),
    ("llama3-8b", "rowwise", 2): Bar(1.22, 1.30),
    ("llama3-8b", "tensorwise", 2): Bar(1.29, 1.35),
    ("dsv3-671b", "rowwise", 2): Bar(1.00, 1.20),
}

# What bf16 itself must reach, or a ratio to it says little: tokens/s a GPU, of 2 x H200 and llama3-8b whole, a sequence
# of 8192 a GPU. 8,650 is what a plain FSDP2 loop around torchao 0.18 (torch 2.11) reached there in one sitting, its
# first and last run at 8,658 and 8,634.
BF16_FLOORS: dict[tuple[str, int], float] = {("llama3-8b", 2): 0.97 * 8650}
BF16_FLOORS_OF = {"seq": 8192, "layers": 0}

# What was published for fusing the quantisation of such models.
PUBLISHED_SHARE = "89 %: DeepSeek-V3 671B, 4 MoE layers, 8 x MI325X"
PUBLISHED_BACKWARD = "4.2x: backward pass of the experts of DeepSeek-MoE-16B, 8 x MI300X"


# ---------------------------------------------------------------------------------------------------------------- a run
@dataclass(frozen=True)
class Variant:
    """A recipe and how it runs: `fused`, its quantisers are kernels; `unfused`, chains of plain operators;
    `fp8-all-gather`, kernels, and weights are gathered as FP8 codes.
    """

    recipe: str
    how: str = "fused"

    @property
    def name(self) -> str:
        return self.recipe if self.how == "fused" else f"{self.recipe}:{self.how}"

    @property
    def fields(self) -> dict[str, Any]:
        """Of TrainConfig."""
        gathered = self.how == FP8_ALL_GATHER
        return {
            "recipe": self.recipe,
            "quantisation": "fused" if gathered else self.how,
            "fp8_all_gather": gathered,
        }


@dataclass
class Run:
    """One run of a variant: a value a timed step, in the order measured; seconds, bytes and tokens a GPU."""

    variant: str
    number: int
    config: dict[str, Any]
    config_hash: str
    resident_bytes: int  # of the runs before it, not freed
    tokens_a_step: int = 0
    ready_seconds: float = 0.0  # model, weights and optimiser made
    warm_seconds: float = 0.0  # the steps that are not timed: compiling
    step_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # of every step
    grad_norm: list[float] = field(default_factory=list)  # of every step
    peak_bytes: int = 0  # of the rank that has the highest
    gemms: dict[str, Any] | None = None
    graphs: int = 0
    recompiles: int = 0  # in timed steps
    utilisation: float | None = None
    kernels: dict[str, Any] | None = None  # class -> time, launches and longest kernels of a traced step
    failed: str | None = None

    @property
    def tokens_a_second(self) -> float:
        """The median of the timed steps, a GPU."""
        return statistics.median(self.tokens_a_step / seconds for seconds in self.step_seconds)


class Clocked(train.Trainer):
    """The trainer with a clock beside each forward and backward pass: events of the device, or on a CPU its time."""

    marks: list[Any]

    def _loss(self, batch: Batch, valid: torch.Tensor) -> torch.Tensor:
        self.marks = [self._mark()]
        loss = super()._loss(batch, valid)
        self.marks.append(self._mark())
        return loss

    def _gradients(self, parts: list[Batch], valid: torch.Tensor) -> torch.Tensor:
        loss = super()._gradients(parts, valid)
        self.marks.append(self._mark())
        return loss

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def phases(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass of the last step, whose loss was read since."""
        start, middle, end = self.marks
        if self.device.type != "cuda":
            return middle - start, end - middle
        return start.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3


class Stepped(train.Trainer):
    """The trainer one step at a time, on the same tokens each time: a call of a speed row."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        world = self.world
        shares = data.batches(self.data, range(1), config.batch // world.size, world.rank, world.size, config.workers)
        self.tokens = next(iter(shares))
        self.result = train.Result(
            config=config,
            arch=self.detected.arch.name,
            arch_reason=self.detected.reason,
            format=self.conversion.e4m3 if self.conversion else BF16,
            conversion=self.conversion,
        )
        self._counted_step = -1  # none: counting products is no part of a step

    def __call__(self) -> None:
        """One update. NonFiniteError as the trainer's own."""
        self.step += 1
        self._step(self.step, self.tokens, self.result)


def row_config(model: str, layers: int, recipe: str, seq: int) -> TrainConfig:
    """What a speed row trains: as `python -m suites.perf.trainer` does, and without an end."""
    return TrainConfig(
        model=model,
        recipe=recipe,
        layers=layers,
        steps=1 << 20,
        batch=1,
        seq=seq,
        recompute="selective",
        compile="inductor",
        lr=1e-4,
        schedule="constant",
        deterministic=False,
        code_counts=False,
        digests=False,
    )


def train_once(run: Run, config: TrainConfig, warmup: int, timed: int, folder: Path | None) -> profile.Kernels | None:
    """Fill `run`; config has the timed steps and, where there is a folder for a trace, those to trace.

    Returns what rank 0 traced.
    """
    began = time.perf_counter()
    trainer = Clocked(config)
    first, on_gpu = trainer.world.rank == 0, trainer.device.type == "cuda"
    run.tokens_a_step = config.batch * config.seq // trainer.world.size
    if on_gpu:
        torch.cuda.synchronize(trainer.device)
    run.ready_seconds = time.perf_counter() - began
    if first and trainer.conversion is not None:
        print(trainer.conversion, file=sys.stderr, flush=True)
    began = time.perf_counter()

    def on_step(record: train.StepRecord) -> None:
        run.loss.append(record.loss)
        run.grad_norm.append(record.grad_norm)
        if record.step == warmup:
            run.warm_seconds = time.perf_counter() - began
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(trainer.device)
        if warmup < record.step <= warmup + timed:
            run.step_seconds.append(trainer.measured["step_seconds"])
            for passes, seconds in zip((run.forward_seconds, run.backward_seconds), trainer.phases(), strict=True):
                passes.append(seconds)
            run.peak_bytes = trainer.measured["peak_memory_bytes"]
            run.recompiles += trainer.measured["recompiles"]
        if record.step == warmup + timed:
            run.gemms, run.graphs = trainer.measured["gemms"], trainer.compiler.graphs if trainer.compiler else 0
            run.utilisation = trainer.measured["utilisation"]
        if first and (record.step in (1, 2, 3) or record.step % 10 == 0):
            print(
                f"  {run.variant}: step {record.step}/{config.steps}  loss {record.loss:.4f}  "
                f"{trainer.measured['step_seconds']:.3f} s",
                file=sys.stderr,
                flush=True,
            )

    traced = range(warmup + timed + 2, warmup + timed + 2 + PROFILED)
    trainer.run(on_step, profile_to=folder, profiled=None if folder is None else traced)
    run.peak_bytes = max(trainer.world.gather(run.peak_bytes))
    if folder is None or not first:
        return None
    traced_kernels = profile.read_trace(folder)
    run.kernels = longest_kernels(traced_kernels)
    compress(folder / "trace-rank0.json")
    return traced_kernels


def longest_kernels(trace: profile.Kernels, most: int = 3) -> dict[str, Any]:
    """Class -> microseconds and launches a step, and its longest kernels."""
    return {
        label: {
            "us": time_us,
            **({"alone_us": trace.alone_us} if label == "communication" else {}),
            "launches": launches,
            "longest": [
                {"name": name[:200], "us": trace.time_us[name], "launches": trace.launches[name]}
                for name in [name for name in trace.longest() if trace.kinds[name] == label][:most]
            ],
        }
        for label, (time_us, launches) in trace.classes().items()
    }


def compress(file: Path) -> None:
    """FILE to FILE.gz: the trace of a step has tens of thousands of events. profile.py and Perfetto read either."""
    with file.open("rb") as source, gzip.open(f"{file}.gz", "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target)
    file.unlink()


def free(where: torch.device) -> int:
    """Drop what a run left behind; returns the bytes on the device that stayed."""
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    return torch.cuda.memory_allocated(where)


# ------------------------------------------------------------------------------------------------------------- verdicts
@dataclass
class Summary:
    """A variant against the first one, over all its runs. below: what misses a bar or makes the comparison unfair."""

    variant: str
    runs: int
    tokens_a_second: float
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    recomputed: int | None
    ratio: float = 1.0
    memory_ratio: float = 1.0
    bar: float | None = None
    goal: float | None = None
    below: list[str] = field(default_factory=list)


def summaries(runs: Sequence[Run], model: str, ranks: int = 1) -> list[Summary]:
    """One for each variant that has a run, in the order of their first runs; medians over all its timed steps."""
    by_variant: dict[str, list[Run]] = {}
    for run in runs:
        if run.failed is None:
            by_variant.setdefault(run.variant, []).append(run)
    found: list[Summary] = []
    for variant, mine in by_variant.items():
        seconds = [one for run in mine for one in run.step_seconds]
        median = statistics.median(seconds)
        row = Summary(
            variant,
            len(mine),
            mine[0].tokens_a_step / median,
            median,
            statistics.median(one for run in mine for one in run.forward_seconds),
            statistics.median(one for run in mine for one in run.backward_seconds),
            max(run.peak_bytes for run in mine),
            mine[0].gemms["recomputed"] if mine[0].gemms else None,
        )
        found.append(row)
        base = found[0]
        row.ratio, row.memory_ratio = row.tokens_a_second / base.tokens_a_second, row.peak_bytes / base.peak_bytes
        floor = BF16_FLOORS.get((model, ranks)) if variant == BF16 else None
        whole = {"batch": ranks, **BF16_FLOORS_OF}
        asked_of_it = floor is not None and all(mine[0].config.get(name, 0) == value for name, value in whole.items())
        if asked_of_it and not row.tokens_a_second >= floor:
            row.below.append(f"{variant} has {row.tokens_a_second:,.0f} tokens/s a GPU, bar {floor:,.0f}")
        asked = BARS.get((model, variant, ranks))
        if asked is not None:
            row.bar, row.goal = asked.bar, asked.goal
            if not row.ratio >= asked.bar:
                row.below.append(f"{variant} is {row.ratio:.3f}x {base.variant}, bar {asked.bar:.2f}")
        for what, band in (("loss", LOSS_BAND), ("grad_norm", NORM_BAND)):
            ours, theirs = getattr(mine[0], what)[0], getattr(by_variant[base.variant][0], what)[0]
            if not abs(ours / theirs - 1) <= band:
                row.below.append(
                    f"{variant} has {what} {ours:.4f} in its first step and {base.variant} {theirs:.4f}, expected them "
                    f"within {band:.0%}: one of them computes something else"
                )
        if row.recomputed != base.recomputed:
            row.below.append(f"{variant} recomputes {row.recomputed} products, {base.variant} {base.recomputed}")
        if not abs(row.memory_ratio - 1) <= MEMORY_BAND and not variant.endswith(":unfused"):
            row.below.append(
                f"{variant} has {row.memory_ratio:.3f} of the peak memory of {base.variant}, expected it within "
                f"{MEMORY_BAND:.0%}"
            )
    return found


def gap(found: Sequence[Summary]) -> dict[str, float | None] | None:
    """Of bf16, a recipe unfused and fused: share of the gap recovered, and backward time unfused / fused."""
    by_name = {row.variant: row for row in found}
    unfused = next((row for row in found if row.variant.endswith(":unfused")), None)
    fused = by_name.get(unfused.variant.removesuffix(":unfused")) if unfused is not None else None
    if unfused is None or fused is None or "bf16" not in by_name:
        return None
    fast, slow = by_name["bf16"].tokens_a_second, unfused.tokens_a_second
    return {
        "share_recovered": None if slow >= fast else (fused.tokens_a_second - slow) / (fast - slow),
        "backward_unfused_over_fused": unfused.backward_seconds / fused.backward_seconds,
    }


def render_run(run: Run) -> str:
    """A run for people: speed, memory, products, and where the time of a step went."""
    if run.failed is not None:
        return f"run {run.number}, {run.variant}: FAILED: {run.failed}"
    forward, backward = statistics.median(run.forward_seconds), statistics.median(run.backward_seconds)
    lines = [
        f"run {run.number}, {run.variant}: {run.tokens_a_second:,.0f} tokens/s a GPU, step "
        f"{statistics.median(run.step_seconds) * 1e3:.1f} ms ({min(run.step_seconds) * 1e3:.1f} to "
        f"{max(run.step_seconds) * 1e3:.1f}), forward {forward * 1e3:.1f}, backward {backward * 1e3:.1f}; peak "
        f"{run.peak_bytes / 2**30:.2f} GiB ({run.resident_bytes / 2**30:.2f} of runs before it); {run.graphs} graphs, "
        f"{run.recompiles} recompiles; ready in {run.ready_seconds:.0f} s, warm in {run.warm_seconds:.0f} s",
    ]
    if run.gemms is not None:
        for part in ("forward", "recompute", "backward"):
            told = ", ".join(f"{count} {name}" for name, count in run.gemms[part].items())
            lines.append(f"    products, {part}: {told or 'none'}")
        lines.append(f"    products recomputed: {run.gemms['recomputed']}")
    for label, row in (run.kernels or {}).items():
        alone = f", {row['alone_us'] / 1e3:.2f} ms of it alone" if row.get("alone_us") else ""
        lines.append(f"    {label:14} {row['us'] / 1e3:9.2f} ms {row['launches']:8.1f} launches a step{alone}")
        lines += [f"        {one['us'] / 1e3:9.2f} ms {one['launches']:8.1f}  {one['name']}" for one in row["longest"]]
    return "\n".join(lines)


def render(runs: Sequence[Run], model: str, ranks: int = 1) -> str:
    """The table for people."""
    found = summaries(runs, model, ranks)
    if not found:
        return "no run ended"
    lines = [
        f"{'variant':26}{'runs':>5}{'tokens/s':>11}{'ratio':>8}{'bar':>6}{'goal':>6}{'step ms':>10}{'forward':>9}"
        f"{'backward':>10}{'peak GiB':>10}{'of base':>9}{'recomputed':>12}"
    ]
    for row in found:
        bar, goal = ("-" if value is None else f"{value:.2f}" for value in (row.bar, row.goal))
        lines.append(
            f"{row.variant:26}{row.runs:>5}{row.tokens_a_second:>11,.0f}{row.ratio:>8.3f}{bar:>6}{goal:>6}"
            f"{row.step_seconds * 1e3:>10.1f}{row.forward_seconds * 1e3:>9.1f}{row.backward_seconds * 1e3:>10.1f}"
            f"{row.peak_bytes / 2**30:>10.2f}{row.memory_ratio:>9.3f}"
            f"{'-' if row.recomputed is None else row.recomputed:>12}"
        )
    again = [run.tokens_a_second for run in runs if run.variant == found[0].variant and run.failed is None]
    if len(again) > 1:
        lines.append(
            f"{found[0].variant} first and last: {again[0]:,.0f}, {again[-1]:,.0f} ({again[-1] / again[0]:.4f})"
        )
    recovered = gap(found)
    if recovered is not None:
        share, backward = recovered["share_recovered"], recovered["backward_unfused_over_fused"]
        told = "none: unfused is not slower than bf16" if share is None else f"{share:.1%}"
        lines.append(f"share of the gap recovered: {told}  (published: {PUBLISHED_SHARE})")
        lines.append(f"backward pass, unfused / fused: {backward:.2f}x  (published: {PUBLISHED_BACKWARD})")
    return "\n".join(lines)


def write(out: Path, runs: Sequence[Run], model: str, provenance: dict[str, object], ranks: int = 1) -> None:
    """OUT/trainer.json: every sample, and what follows from them."""
    found = summaries(runs, model, ranks)
    document = {
        "provenance": provenance,
        "runs": [dataclasses.asdict(run) for run in runs],
        "summary": [dataclasses.asdict(row) for row in found],
        "gap": gap(found),
    }
    (out / "trainer.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def compare_traces(out: Path, traced: dict[str, profile.Kernels]) -> str | None:
    """The traces of bf16, unfused and fused side by side, or of the first three variants; None with fewer than two."""
    unfused = next((name for name in traced if name.endswith(":unfused")), None)
    wanted = [] if unfused is None else ["bf16", unfused, unfused.removesuffix(":unfused")]
    names = wanted if wanted and all(name in traced for name in wanted) else [*traced][:3]
    if len(names) < 2:
        return None
    traces = [traced[name] for name in names]
    text = profile.table(traces)
    (out / "compare.txt").write_text(text + "\n", encoding="utf-8")
    (out / "compare.html").write_text(profile.page(traces), encoding="utf-8")
    return text


# -------------------------------------------------------------------------------------------------------------- command
def variants(text: str) -> list[Variant]:
    """RECIPE or RECIPE:fused, :unfused, :fp8-all-gather, comma between them; what exists TrainConfig knows."""
    found = [Variant(*entry.split(":", 1)) for entry in text.split(",")]
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text} names one twice; the first one comes again by itself, --rounds more")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=0, help="trim the model to so many (default: 0, all of them)")
    parser.add_argument("--experts", type=int, default=0, help="trim a layer to so many (default: 0, all of them)")
    parser.add_argument("--dense-layers", type=int, default=-1, help="layers without experts (default: -1, its own)")
    parser.add_argument(
        "--recipes",
        type=variants,
        default=variants("bf16,rowwise_with_gw_hp,rowwise,tensorwise"),
        metavar="RECIPE[:HOW],...",
        help="HOW: fused, unfused or fp8-all-gather (default: bf16 and three recipes, fused)",
    )
    parser.add_argument("--steps", type=int, default=40, help="of a run, before the traced ones (default: 40)")
    parser.add_argument("--warmup", type=int, default=10, help="how many of them are not timed (default: 10)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each variant is trained (default: 1)")
    parser.add_argument("--batch", type=int, default=1, help="sequences a GPU (default: 1)")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--recompute", default="selective")
    parser.add_argument("--compile", default="inductor")
    parser.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="free gathered weights between forward and backward pass (default: yes)",
    )
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--device", default="cuda", help="cpu: to try the command out (default: cuda)")
    parser.add_argument("--out", type=Path, required=True, help="folder for trainer.json, traces and their comparison")
    parser.add_argument("--no-profile", action="store_true", help="trace nothing")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a variant misses its bar")
    return parser


def configurations(options: argparse.Namespace, ranks: int) -> list[tuple[Variant, TrainConfig]]:
    """Each variant with its configuration. ConfigError for one that cannot run."""
    traced = 0 if options.no_profile else 1 + PROFILED
    return [
        (
            variant,
            TrainConfig(
                model=options.model,
                **variant.fields,
                layers=options.layers,
                experts=options.experts,
                dense_layers=options.dense_layers,
                steps=options.steps + traced,
                batch=options.batch * ranks,
                seq=options.seq,
                recompute=options.recompute,
                compile=options.compile,
                reshard=options.reshard,
                expert_parallel=options.expert_parallel,
                device=options.device,
                lr=1e-4,
                schedule="constant",
                deterministic=False,
                code_counts=False,
                digests=False,
            ),
        )
        for variant in options.recipes
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    first = os.environ.get("RANK", "0") == "0"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; --device cpu only tries the command out", file=sys.stderr)
        return 4
    try:
        if not 0 < options.warmup < options.steps or options.rounds < 1:
            raise ConfigError(
                f"--warmup {options.warmup}, --steps {options.steps}, --rounds {options.rounds}: expected a warm-up of "
                "at least 1 step, more steps than that and at least 1 round; correct them"
            )
        configs = configurations(options, ranks)
        world = parallel.join(options.device, options.expert_parallel)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2
    try:
        return _measure(options, configs, world.device, first)
    finally:
        if "RANK" in os.environ or world.device.type == "cuda":  # NCCL complains of an exit without
            parallel.leave()


def _measure(
    options: argparse.Namespace, configs: list[tuple[Variant, TrainConfig]], where: torch.device, first: bool
) -> int:
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    provenance = {
        **kernels.provenance(where, device.detect(where)),
        "seed": configs[0][1].seed,
        "data": "synthetic tokens",
        "ranks": ranks,
        "expert_parallel": options.expert_parallel,
        "command": [str(word) for word in sys.argv[1:]],
    }
    runs: list[Run] = []
    traced: dict[str, profile.Kernels] = {}
    order = [*configs * options.rounds, configs[0]]
    for number, (variant, config) in enumerate(order, start=1):
        resident = free(where)
        run = Run(variant.name, number, config.hashed(), config.hash, resident)
        runs.append(run)
        if first:
            parameters = config.size.parameters
            show(f"run {number} of {len(order)}: {variant.name}, {parameters / 1e9:.2f} G parameters")
        folder = None if options.no_profile else options.out / f"{number}-{variant.name.replace(':', '-')}"
        if folder is not None:
            folder.mkdir(exist_ok=True)
        try:
            found = train_once(run, config, options.warmup, options.steps - options.warmup, folder)
            if found is not None:
                traced.setdefault(variant.name, found)
        except Exception as error:  # the others go on
            run.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
            traceback.print_exc()
        if first:
            show(render_run(run))
            write(options.out, runs, options.model, provenance, ranks)
        if run.failed is not None and ranks > 1:
            (options.out / f"FAILED-rank{rank}").write_text(f"run {number}, {run.variant}: {run.failed}\n")
            _end_all(first)
    if first:
        told = compare_traces(options.out, traced)
        show("" if told is None else f"\n{told}\n")
        show(render(runs, options.model, ranks))
    if any(run.failed is not None for run in runs):
        return 1
    if not first:  # its times are others: rank 0 judges
        return 0
    below = [line for row in summaries(runs, options.model, ranks) for line in row.below]
    for line in below:
        print(f"beyond the bar: {line}", file=sys.stderr)
    return 1 if below and options.gate else 0


def _end_all(first: bool) -> None:
    """Leave as one rank of several that failed: the others may wait in a collective that it will never enter.

    Without closing the process group, which would wait for them. torchrun sees the exit code and ends them; so others
    leave it to rank 0, where that failed too, to write first.
    """
    if not first:
        time.sleep(SECONDS_FOR_RANK_0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
