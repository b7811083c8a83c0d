"""Speed of layers on this GPU, forward and backward: `python -m suites.perf.moe [--only op linear ...] [--json FILE]`.

    op        the grouped product of one expert weight, FP8 against torch's bf16 one, in random groups; beside it groups
              of any size (a ratio to those of multiples of 16), and torchao's where it is installed
    choices   the ways to quantise what a product needs: in one launch (moe.ONE_LAUNCH), or each tensor by kernels of
              its own, both its codes from one read (moe.ONE_READ) or from two kernels
    configs   launch configurations of the one launch (together.TOGETHER_CONFIGS), for what both passes of a product
              need; not among the default
    layer     router, dispatch, experts, shared experts: FP8 against bf16, speed and peak memory, eager and compiled
    launches  kernels that quantise, and copies of weights and activations, in a layer's forward and backward pass, as
              torch's profiler counts them
    linear    a dense layer, compiled: recipes against bf16

Correct first: the numerics cases of these layers run through pytest, and every candidate's result is held to the bf16
one's; a row with a wrong result is reported as wrong, and not timed. Candidates of a row take turns, so that a figure
is a ratio within one run: the median over rounds of (time of bf16 / time of the candidate). Times are of the device:
steps are replayed from a graph. `bar` and `goal` are the specification's for an H200.

`fast` means fast accumulation in all three GEMMs, as torchao runs; without the word only the forward one has it, which
is the default recipe. `codes` keeps column codes of weights for the backward pass (ExpertRecipe.saved_weight).

With `--jobs N` kernels are compiled in N processes before anything is timed. Exit codes: 0 timed, 1 a wrong result, a
red numerics case, or with `--gate` a row beyond its bar; 2 usage; 4 no GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from fp8stack import device, formats, inductor, linear, moe
from fp8stack.command import show
from fp8stack.kernels import (
    blockwise,
    colwise,
    experts,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
    together,
)
from fp8stack.kernels.grouped_gemm import CHECK, preferred_alignment
from fp8stack.kernels.together import Together
from suites.perf import kernels, processes, timing

Shape = tuple[int, int, int, int]  # E, M, K, N
Quantised = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]  # rows, columns, weights
Step = Callable[[], tuple[torch.Tensor, ...]]  # forward and backward: the output, then gradients

SECTIONS = ("op", "choices", "layer", "launches", "linear")
EXTRA = ("configs",)  # only where asked for


@dataclass(frozen=True)
class Bar:
    """What the specification asks of a candidate on an H200: at least `bar` times as fast as bf16; the goal."""

    bar: float
    goal: float | None = None


# Shape -> bar and goal with fast accumulation in all three GEMMs; bar of the default recipe. DeepSeek 671B at expert
# parallel 8, gate or up, and down; Llama 4; DeepSeek 16B.
OPS: dict[Shape, tuple[Bar, Bar]] = {
    (32, 32768, 7168, 2048): (Bar(1.15, 1.35), Bar(1.05)),
    (32, 32768, 2048, 7168): (Bar(1.15, 1.35), Bar(1.08)),
    (16, 32768, 5120, 8192): (Bar(1.30, 1.50), Bar(1.25)),
    (64, 16640, 2048, 1408): (Bar(0.85, 1.05), Bar(0.80)),
}
UNALIGNED = 0.97  # of the speed in aligned groups


@dataclass(frozen=True)
class Layer:
    """Sizes of one MoE layer: T tokens, D model width, F width of an expert, and its routing."""

    tokens: int
    dim: int
    ffn: int
    routing: moe.Routing
    shared: int


# DeepSeek-V3 at expert parallel 8, a rank's experts; DeepSeek 16B. As many groups of experts as the model has.
LAYERS: dict[str, Layer] = {
    "dsv3": Layer(4096, 7168, 2048, moe.Routing(32, 8, "sigmoid", 8, 4, normalise=True, scale=2.5), 1),
    "dsv2-16b": Layer(4096, 2048, 1408, moe.Routing(64, 6, "softmax"), 2),
}
LAYER = Bar(1.05, 1.25)
LAYER_MEMORY = 1.02  # of bf16's peak, at most
NOT_HELD = ("codes", "each")  # candidates, by the end of their names, whose memory is for comparison
LAUNCHES = 2  # that quantise, a pass, at most


# Dense: (in features, out features) -> recipe -> bar. 8192 tokens.
TOKENS = 8192
_WIDE = {"rowwise_with_gw_hp": Bar(1.30), "rowwise": Bar(1.40)}
LINEARS: dict[tuple[int, int], dict[str, Bar]] = {
    (4096, 14336): _WIDE,
    (14336, 4096): _WIDE,
    (4096, 4096): {"rowwise_with_gw_hp": Bar(0.98), "rowwise": Bar(0.98)},
}

# Of outputs and gradients against bf16's: three products deep FP8 leaves 19 to 28 dB, a wrong row or scale far less.
SQNR_DB = 15.0


@dataclass
class Row:
    """One row of results: a ratio for each candidate, against `base`, and what the specification asks of it."""

    section: str
    case: str
    base: str
    bars: dict[str, Bar] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)
    median_us: dict[str, float] = field(default_factory=dict)
    samples_ns: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    most_memory: float | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    most_counts: int | None = None
    wrong: dict[str, str] = field(default_factory=dict)

    def below(self) -> list[str]:
        """What misses its bar, in words."""
        found = [
            f"{self.case}: {name} is {self.speedup[name]:.3f}x {self.base}, bar {bar.bar}"
            for name, bar in self.bars.items()
            if name in self.speedup and not self.speedup[name] >= bar.bar
        ]
        if self.most_memory is not None and self.base in self.peak_bytes:
            limit = self.most_memory * self.peak_bytes[self.base]
            found += [
                f"{self.case}: {name} needs {size / limit * self.most_memory:.3f} of the memory, bar {self.most_memory}"
                for name, size in self.peak_bytes.items()
                if size > limit and not name.endswith(NOT_HELD)
            ]
        if self.most_counts is not None:
            found += [
                f"{self.case}: {sum(names.values())} in {what}, bar {self.most_counts}"
                for what, names in self.counts.items()
                if what.startswith("quantise") and sum(names.values()) > self.most_counts
            ]
            found += [
                f"{self.case}: {what}" for what, names in self.counts.items() if what.startswith("copy") and names
            ]
        return found


@dataclass(frozen=True)
class Steps:
    """A candidate of a row: equivalent steps on different operands. captured: see timing.Candidate."""

    name: str
    steps: Sequence[Step]
    captured: bool = True


# -------------------------------------------------------------------------------------------------------------- timing
def wrong(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str | None:
    """What is wrong with the output and the gradients of a step, None if nothing."""
    for place, (left, right) in enumerate(zip(expected, found, strict=True)):
        what = "the output" if place == 0 else f"gradient {place}"
        error, power = left.float() - right.float(), left.float().square().mean(dtype=torch.float64)
        sqnr = float(10 * torch.log10(power / error.square().mean(dtype=torch.float64).clamp(min=1e-30)))
        if not sqnr >= SQNR_DB:  # a NaN is not
            return f"SQNR of {what} is {sqnr:.1f} dB; expected at least {SQNR_DB}"
    return None


def compare(row: Row, candidates: Sequence[Steps], rounds: int, moved: int) -> Row:
    """Check every candidate against the row's base, then time those that are right, in turns; fills the row."""
    (base,) = (c for c in candidates if c.name == row.base)
    expected = base.steps[0]()
    right = []
    for candidate in candidates:
        try:
            problem = wrong(expected, candidate.steps[0]())
        except Exception as error:  # of a peer, or of what this GPU refuses
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem is None:
            right.append(candidate)
        else:
            row.wrong[candidate.name] = problem
    del expected
    timed = timing.measure([timing.Candidate(c.name, c.steps, moved, c.captured) for c in right], rounds)
    for name, found in timed.items():
        ratios = (base_ns / ns for base_ns, ns in zip(timed[row.base].ns, found.ns, strict=True))
        row.speedup[name] = statistics.median(ratios)
        row.median_us[name] = found.median_ns / 1e3
        row.samples_ns[name] = list(found.ns)
    return row


def differentiated(
    call: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The output of `call` and the gradients of `inputs`: nothing is accumulated."""
    y = call()
    return (y.detach(), *torch.autograd.grad(y, inputs, grad))


def peak_bytes(where: torch.device, step: Step, resident: int = 0) -> int | None:
    """The most memory that a step allocates, beside the `resident` bytes of what it works on; None on a CPU."""
    step()  # what is allocated once, by libraries
    if where.type != "cuda":
        return None
    _free()
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    step()
    torch.cuda.synchronize(where)
    return torch.cuda.max_memory_allocated(where) - before + resident


def _allocated(where: torch.device) -> int:
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else 0


def this_gpu() -> torch.device:
    """The current one."""
    return torch.device("cuda", torch.cuda.current_device())


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=generator.device, generator=generator, dtype=torch.float32).bfloat16()


def _generator(where: torch.device) -> torch.Generator:
    return torch.Generator(device=where).manual_seed(kernels.SEED)


# ------------------------------------------------------------------------------------------------------------------ op
def unaligned_ends(sizes: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """As kernels.random_ends, of groups of any size."""
    m, e = sizes
    ends = torch.randperm(m - 1, device=generator.device, generator=generator)[: e - 1] + 1
    return torch.cat([ends.sort().values, ends.new_full((1,), m)]).to(torch.int32)


@dataclass(frozen=True)
class Operands:
    """Of one grouped product: x (M,K) and w (E,N,K), which want gradients, dy (M,N), aligned ends and any ends."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    offs: torch.Tensor
    any_offs: torch.Tensor


def operands(shape: Shape, generator: torch.Generator) -> Operands:
    """Seeded normal data; weights of a fan-in scale."""
    e, m, k, n = shape
    return Operands(
        _normal(generator, m, k).requires_grad_(),
        (_normal(generator, e, n, k) * k**-0.5).requires_grad_(),
        _normal(generator, m, n),
        kernels.random_ends((m, e), generator),
        unaligned_ends((m, e), generator),
    )


def _bf16(given: Operands) -> torch.Tensor:
    return torch._grouped_mm(given.x, given.w.transpose(1, 2), offs=given.offs, out_dtype=torch.bfloat16)


def _torchao() -> Callable[[Operands], torch.Tensor] | None:
    """torchao's differentiable grouped product, where it is installed under a known name."""
    if importlib.util.find_spec("torchao") is None:
        return None
    for module in ("fp8_grouped_mm", "scaled_grouped_mm"):
        try:
            product = importlib.import_module(f"torchao.prototype.moe_training.{module}")
        except ImportError:
            continue
        call = getattr(product, "_to_fp8_rowwise_then_scaled_grouped_mm", None)
        if call is not None:
            padding = {} if "pad_token_groups" not in str(call.__code__.co_varnames) else {
                "pad_token_groups_for_grouped_mm": False
            }  # fmt: skip
            return lambda given: call(given.x, given.w.transpose(1, 2), given.offs, **padding)
    return None


def op_plans(found: device.Detected) -> dict[str, moe.ExpertPlan]:
    """The plans that the op is timed with, by name."""
    default = moe.EXPERT_RECIPES["rowwise"]
    fast = replace(default, fast_accum_gradients=True)
    recipes = {
        "fp8 fast": fast,
        "fp8": default,
        "fp8 fast codes": replace(fast, saved_weight="codes"),
        "fp8 gw_hp": moe.EXPERT_RECIPES["rowwise_with_gw_hp"],
    }
    fmt, target = formats.get(found.arch.e4m3), found.target.name
    choose(target)
    plans = {name: moe.ExpertPlan(recipe, fmt, target) for name, recipe in recipes.items()}
    each = replace(fast, alignment=preferred_alignment(target, fast_accum=True))
    plans["fp8 fast each"] = moe.ExpertPlan(each, fmt, target + " one read")
    if fmt.name == "e4m3fn":  # MX formats are OCP's
        plans["mxfp8"] = moe.ExpertPlan(moe.EXPERT_RECIPES["mxfp8"], fmt, target)
    return plans


def op_candidates(sets: Sequence[Operands], found: device.Detected) -> Iterator[Steps]:
    """Every way to compute the op: forward, and the gradients of x and w."""
    calls: dict[str, Callable[[Operands], torch.Tensor]] = {"bf16": _bf16}
    for name, plan in op_plans(found).items():
        calls[name] = lambda given, plan=plan: moe.fp8_grouped_mm(given.x, (given.w,), given.offs, plan)[0]
    peer = _torchao()
    if peer is not None:
        calls["torchao"] = peer
    for name, call in calls.items():
        # A peer may wait for the device, which a graph does not take; at milliseconds a step launches do not show.
        yield Steps(
            name,
            [lambda x=x, call=call: differentiated(lambda: call(x), (x.x, x.w), x.dy) for x in sets],
            captured=name != "torchao",
        )


def time_op(shape: Shape, found: device.Detected, where: torch.device, rounds: int) -> list[Row]:
    """The grouped product of one weight: FP8 against bf16, and in groups of any size against aligned ones."""
    e, m, k, n = shape
    moved = 2 * (m * k + e * n * k + m * n)
    generator = _generator(where)
    sets = [operands(shape, generator) for _ in range(timing.rotations(moved))]
    name = f"E{e} M{m} K{k} N{n}"
    fast, default = OPS.get(shape, (Bar(0.0), Bar(0.0)))
    row = Row("op", name, "bf16", {"fp8 fast": fast, "fp8": default})
    candidates = list(op_candidates(sets, found))
    compare(row, candidates, rounds, moved)
    for candidate in candidates:
        most = None if candidate.name in row.wrong else peak_bytes(where, candidate.steps[0])
        if most is not None:
            row.peak_bytes[candidate.name] = most
    del candidates
    plan = op_plans(found)["fp8 fast"]

    def groups_of(given: Operands, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return differentiated(
            lambda: moe.fp8_grouped_mm(given.x, (given.w,), offs, plan)[0], (given.x, given.w), given.dy
        )

    # Their results are those of other groups, so they are not compared: the numerics cases did that.
    timed = timing.measure(
        [
            timing.Candidate("aligned", [lambda x=x: groups_of(x, x.offs) for x in sets], moved),
            timing.Candidate("unaligned", [lambda x=x: groups_of(x, x.any_offs) for x in sets], moved),
        ],
        rounds,
    )
    other = Row("op", f"{name} groups of any size", "aligned", {"unaligned": Bar(UNALIGNED)})
    for label, one in timed.items():
        other.speedup[label] = statistics.median(a / b for a, b in zip(timed["aligned"].ns, one.ns, strict=True))
        other.median_us[label], other.samples_ns[label] = one.median_ns / 1e3, list(one.ns)
    del sets
    _free()
    return [row, other]


# ------------------------------------------------------------------------------------------------------------- choices
WAYS = {"one launch": "", "each, one read": " one read", "each, two kernels": " two kernels"}
"""How a product's tensors are quantised, and what is put behind the target's name for moe.py's tables to choose it."""


def choose(target: str) -> None:
    """Enter these targets into moe.py's tables; the target itself keeps its own rows."""
    moe.ONE_LAUNCH[target + " one read"] = moe.ONE_LAUNCH[target + " two kernels"] = False
    for what in ("tokens", "weights"):
        moe.ONE_READ[target + " one read", what] = True
        moe.ONE_READ[target + " two kernels", what] = False
    moe.ONE_LAUNCH[target + " one launch"] = True


def time_choices(shape: Shape, found: device.Detected, where: torch.device, rounds: int) -> list[Row]:
    """What the product of two weights has quantised, forward and backward, in each of WAYS."""
    e, m, k, n = shape
    plan = op_plans(found)["fp8"]
    choose(found.target.name)
    passes, offs, moved = products(shape, where)
    name = f"E{e} M{m} K{k} N{n}"
    return [_choice(f"{name} {phase}", plan, given, offs, rounds, moved) for phase, given in passes.items()]


def products(shape: Shape, where: torch.device) -> tuple[dict[str, list[Quantised]], torch.Tensor, int]:
    """What the product of two weights has quantised in each pass, on enough operands; offs; bytes that are read."""
    e, m, k, n = shape
    generator = _generator(where)
    offs = kernels.random_ends((m, e), generator)
    moved = 4 * (m * k + 2 * e * n * k)
    sets = []
    for _ in range(timing.rotations(moved)):
        weights = [_normal(generator, e, n, k) for _ in range(2)]
        sets.append((_normal(generator, m, k), weights, [_normal(generator, m, n) for _ in range(2)]))
    passes: dict[str, list[Quantised]] = {
        "forward": [((x, *w), (x,), ()) for x, w, _ in sets],
        "forward, weights both ways": [((x, *w), (x,), w) for x, w, _ in sets],
        "backward": [(dy, dy, w) for _, w, dy in sets],
    }
    return passes, offs, moved


def together_configs() -> Iterator[together.TogetherConfig]:
    """Configurations worth a try: a thread has 16 parts of 16 bytes; rows of 16 elements a thread, or twice that."""
    tiles = {2: ((32, 256), (64, 128)), 4: ((64, 256), (32, 512)), 8: ((64, 512), (32, 1024), (128, 256))}
    for warps, blocks in tiles.items():
        for columns, rows in blocks:
            for held, programs in (
                (0, 12 // warps),
                (1, 12 // warps),
                (1, 16 // warps),
                (1, 8 // warps),
                (2, 8 // warps),
            ):
                block = 512 * warps
                yield together.TogetherConfig(
                    2048 // block or 1, max(block, 1024), columns, rows, 16, held, warps, programs, ""
                )


def config_name(row: together.TogetherConfig) -> str:
    """A configuration's values in the order of its fields."""
    return "/".join(str(value) for name, value in vars(row).items() if name != "measured")


def _with_config(
    row: together.TogetherConfig, plan: moe.ExpertPlan, given: Quantised, offs: torch.Tensor
) -> list[torch.Tensor]:
    return together.launch_together(*given, offs, plan.fmt, plan.recipe.pow2, plan.alignment, row, plan.target)


def time_configs(shape: Shape, found: device.Detected, where: torch.device, rounds: int) -> list[Row]:
    """Every configuration on what both passes quantise, against the table's; the fastest first."""
    plan = op_plans(found)["fp8"]
    table = together.TOGETHER_CONFIGS[found.target.name, colwise.size_class(shape[0])]
    passes, offs, moved = products(shape, where)
    e, m, k, n = shape
    rows = []
    for phase in ("forward", "backward"):
        row = Row("configs", f"E{e} M{m} K{k} N{n} {phase}", "table")
        given = passes[phase]
        expected = _with_config(table, plan, given[0], offs)
        right = {"table": table}
        for config in together_configs():
            name = config_name(config)
            try:
                same = zip(expected, _with_config(config, plan, given[0], offs), strict=True)
                if all(torch.equal(left.view(torch.uint8), other.view(torch.uint8)) for left, other in same):
                    right[name] = config
                else:
                    row.wrong[name] = "its bits are not those of the table's"
            except RuntimeError as error:  # too many registers, too much shared memory
                print(f"{name} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
        timed = timing.measure(
            [
                timing.Candidate(name, [lambda x=x, c=c: _with_config(c, plan, x, offs) for x in given], moved)
                for name, c in right.items()
            ],
            rounds,
        )
        for name in sorted(timed, key=lambda name: timed[name].median_ns):
            row.speedup[name] = statistics.median(a / b for a, b in zip(timed["table"].ns, timed[name].ns, strict=True))
            row.median_us[name], row.samples_ns[name] = timed[name].median_ns / 1e3, list(timed[name].ns)
        rows.append(row)
    _free()
    return rows


def _choice(
    case: str, plan: moe.ExpertPlan, given: Sequence[Quantised], offs: torch.Tensor, rounds: int, moved: int
) -> Row:
    row = Row("choices", case, "one launch")
    plans = {name: replace(plan, target=plan.target + (suffix or " one launch")) for name, suffix in WAYS.items()}

    def flat(codes: Together) -> list[torch.Tensor]:
        return [part for pair in (*codes.rows, *codes.columns, *codes.weights) for part in pair]

    expected = flat(plans["one launch"].quantise(*given[0], offs))
    for name, way in plans.items():
        same = zip(expected, flat(way.quantise(*given[0], offs)), strict=True)
        if not all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in same):
            row.wrong[name] = "its bits are not those of one launch"
    timed = timing.measure(
        [
            timing.Candidate(name, [lambda x=x, way=way: way.quantise(*x, offs) for x in given], moved)
            for name, way in plans.items()
            if name not in row.wrong
        ],
        rounds,
    )
    for name, one in timed.items():
        row.speedup[name] = statistics.median(a / b for a, b in zip(timed["one launch"].ns, one.ns, strict=True))
        row.median_us[name], row.samples_ns[name] = one.median_ns / 1e3, list(one.ns)
    return row


# --------------------------------------------------------------------------------------------------------------- layer
def layer_kinds(compiled: bool) -> dict[str, dict[str, object] | None]:
    """Name -> fields of the experts' recipe that differ from rowwise's, and `way` of WAYS; None: in bf16."""
    kinds: dict[str, dict[str, object] | None] = {
        "bf16": None,
        "fp8": {},
        "fp8 fast": {"fast_accum_gradients": True},
        "fp8 fast each": {"fast_accum_gradients": True, "way": " one read"},
    }
    if not compiled:
        kinds["fp8 fast codes"] = {"fast_accum_gradients": True, "saved_weight": "codes"}
    return kinds


def make_layer(size: Layer, fields: dict[str, object] | None, found: device.Detected, where: torch.device) -> moe.MoE:
    """A layer with seeded bf16 weights; in FP8 (rowwise) unless fields is None."""
    with torch.device("meta"):
        layer = moe.MoE(size.dim, size.ffn, size.routing, size.shared)
    layer.to_empty(device=where)
    layer.router.reset()
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=torch.bfloat16)))
    generator = _generator(where)
    with torch.no_grad():
        for parameter in layer.parameters():
            for part in parameter if parameter.dim() == 3 else (parameter,):
                part.copy_(torch.randn(part.shape, device=where, generator=generator) * parameter.shape[-1] ** -0.5)
    if fields is not None:
        linear.convert_to_float8(nn.Sequential(layer), "rowwise", detected=found)
        layer.experts.keep(**{name: value for name, value in fields.items() if name != "way"})
        choose(found.target.name)
        layer.experts.plan = replace(layer.experts.plan, target=found.target.name + str(fields.get("way", "")))
    return layer


def layer_step(
    size: Layer, layer: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, where: torch.device
) -> Step:
    """Forward and backward of a layer, on fixed tokens."""
    generator = _generator(where)
    x = _normal(generator, size.tokens, size.dim).requires_grad_()
    dy = _normal(generator, size.tokens, size.dim)
    parameters = list(module.parameters())
    return lambda: differentiated(lambda: layer(x), (x, *parameters), dy)


def compiled_step(size: Layer, fields: dict[str, object] | None, where: torch.device) -> Step:
    """Forward and backward of a compiled layer, in FP8 unless fields is None (make_layer)."""
    module = make_layer(size, fields, device.detect(where), where)
    return layer_step(size, _compiled(module), module, where)


def _compiled(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(module, fullgraph=True, dynamic=False, options=inductor.options())


def time_layer(name: str, compiled: bool, found: device.Detected, where: torch.device, rounds: int) -> list[Row]:
    """A whole layer, FP8 against bf16: speed, and peak memory of each alone."""
    size = LAYERS[name]
    case = f"{name} T{size.tokens} D{size.dim} F{size.ffn} E{size.routing.experts} K{size.routing.top_k}"
    row = Row("layer", f"{case} {'compiled' if compiled else 'eager'}", "bf16", most_memory=LAYER_MEMORY)
    row.bars = {"fp8 fast": LAYER, "fp8": LAYER} if compiled else {}

    def make(fields: dict[str, object] | None) -> Step:
        module = make_layer(size, fields, found, where)
        return layer_step(size, _compiled(module) if compiled else module, module, where)

    torch._dynamo.reset()
    candidates = []
    for label, fields in layer_kinds(compiled).items():
        _free()
        before = _allocated(where)
        step = make(fields)
        # A layer's weights are larger than any cache: one set of operands.
        candidates.append(Steps(label, [step]))
        most = peak_bytes(where, step, _allocated(where) - before)
        if most is not None:
            row.peak_bytes[label] = most
    compare(row, candidates, rounds, 6 * size.routing.experts * size.dim * size.ffn)
    del candidates, step
    _free()
    return [row]


# ------------------------------------------------------------------------------------------------------------ launches
_QUANTISERS = (
    blockwise,
    colwise,
    experts,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
    together,
)


def quantising_kernels() -> frozenset[str]:
    """Names of all kernels that quantise, as the codegen suite knows them."""
    return frozenset(
        getattr(spec.kernel, "__name__", str(spec.kernel))
        for family in _QUANTISERS
        for spec in family.compile_specs("sm_90")
    )


@dataclass(frozen=True)
class Traced:
    """What the profiler saw of one pass: launches of kernels that quantise, by name; ops that quantise, by name; and
    copies of tensors of at least `large` elements, by op and shape. on_device: it saw kernels of a GPU at all."""

    kernels: dict[str, int]
    ops: dict[str, int]
    copies: dict[str, int]
    on_device: bool


def traced(call: Callable[[], object], where: torch.device, large: int) -> Traced:
    """Run `call` under torch's profiler."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if where.type == "cuda" else [])
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    quantising = quantising_kernels()
    launches: dict[str, int] = {}
    ops: dict[str, int] = {}
    copies: dict[str, int] = {}
    on_device = False
    for event in events:
        name, category = str(event.get("name")), event.get("cat")
        if category == "kernel":
            on_device = True
            if name in quantising:
                launches[name] = launches.get(name, 0) + 1
        elif category == "cpu_op" and name.startswith("fp8stack::quantize"):
            ops[name] = ops.get(name, 0) + 1
        elif category == "cpu_op" and name in ("aten::clone", "aten::cat"):  # contiguous() is a clone where it copies
            dims = (event.get("args") or {}).get("Input Dims") or [[]]
            shape = dims[0] if dims and all(isinstance(d, int) for d in dims[0]) else []
            if shape and torch.Size(shape).numel() >= large:
                what = f"{name} {'x'.join(map(str, shape))}"
                copies[what] = copies.get(what, 0) + 1
    return Traced(launches, ops, copies, on_device)


def count_launches(name: str, found: device.Detected, where: torch.device) -> list[Row]:
    """Kernels that quantise, and copies of weights and activations, in each pass of a layer in FP8 without a compiler.

    Shared experts are dense linears, which quantise for themselves: they are left out. Copies: of at least as many
    elements as the smaller of a weight's and an activation's.
    """
    kinds: dict[str, dict[str, object]] = {
        "fp8": {},
        "fp8 codes": {"saved_weight": "codes"},
        "fp8 each, one read": {"way": " one read"},
        "fp8 each, two kernels": {"way": " two kernels"},
    }
    rows = [_count_launches(f"{name} {label}", LAYERS[name], kinds[label], found, where) for label in kinds]
    for row in rows[2:]:  # for comparison
        row.most_counts = None
    _free()
    return rows


def _count_launches(
    case: str, size: Layer, fields: dict[str, object], found: device.Detected, where: torch.device
) -> Row:
    layer = make_layer(replace(size, shared=0), fields, found, where)
    generator = _generator(where)
    x = _normal(generator, size.tokens, size.dim).requires_grad_()
    dy = _normal(generator, size.tokens, size.dim)
    parameters = (x, *layer.parameters())
    large = min(size.tokens * size.dim, size.routing.experts * size.ffn * size.dim)
    torch.autograd.grad(layer(x), parameters, dy)  # kernels are compiled, libraries loaded
    traced(lambda: x + 1, where, large)  # the profiler's own first time
    outputs: list[torch.Tensor] = []
    seen = {
        "forward": traced(lambda: outputs.append(layer(x)), where, large),
        "backward": traced(lambda: torch.autograd.grad(outputs[0], parameters, dy), where, large),
    }
    row = Row("launches", case, "", most_counts=LAUNCHES)
    for phase, one in seen.items():
        if where.type == "cuda":
            row.counts[f"quantise, {phase}"] = one.kernels
            if not one.on_device:
                row.wrong[phase] = "torch's profiler shows no kernel of the GPU; set KINETO_LOG_LEVEL=0 to read why"
        row.counts[f"ops, {phase}"] = one.ops
        row.counts[f"copy, {phase}"] = one.copies
    return row


# -------------------------------------------------------------------------------------------------------------- linear
def time_linear(
    shape: tuple[int, int], recipes: Sequence[str], found: device.Detected, where: torch.device, rounds: int
) -> list[Row]:
    """A dense layer of TOKENS tokens, compiled, each recipe against torch's nn.Linear in bf16."""
    k, n = shape
    moved = 2 * (TOKENS * (k + n) + n * k)
    torch._dynamo.reset()
    row = Row(
        "linear", f"{k}->{n} M{TOKENS}", "bf16", {r: b for r, b in LINEARS.get(shape, {}).items() if r in recipes}
    )
    candidates = [
        Steps(name, linear_steps(shape, name, timing.rotations(moved), found, where)) for name in ("bf16", *recipes)
    ]
    compare(row, candidates, rounds, moved)
    del candidates
    _free()
    return [row]


def linear_steps(
    shape: tuple[int, int], name: str, count: int, found: device.Detected, where: torch.device
) -> list[Step]:
    """Forward and backward of one dense layer, compiled, on `count` sets of operands; name: a recipe or bf16."""
    k, n = shape
    generator = _generator(where)
    model = nn.Sequential(nn.Linear(k, n, bias=False, device=where, dtype=torch.bfloat16))
    with torch.no_grad():
        next(model.parameters()).copy_(_normal(generator, n, k) * k**-0.5)
    if name != "bf16":
        linear.convert_to_float8(model, name, detected=found)
    call = _compiled(model)
    (weight,) = model.parameters()
    sets = [(_normal(generator, TOKENS, k).requires_grad_(), _normal(generator, TOKENS, n)) for _ in range(count)]
    return [lambda x=x, dy=dy: differentiated(lambda: call(x), (x, weight), dy) for x, dy in sets]


# ------------------------------------------------------------------------------------------------------------- command
@dataclass(frozen=True)
class Part:
    """What one process compiles, and the rows that come of it: a section and what of it."""

    section: str
    shape: tuple[int, ...] = ()
    name: str = ""
    compiled: bool = False
    share: tuple[int, int] = (0, 1)  # of its candidates, where several processes compile them


def parts(only: Sequence[str], shapes: Sequence[Shape], layers: Sequence[str], eager: bool) -> list[Part]:
    """The work, in the order in which it is reported."""
    found = [Part(section, shape) for section in ("op", "choices", "configs") if section in only for shape in shapes]
    for name in layers:
        if "layer" in only:
            found += [Part("layer", name=name, compiled=True)] + ([Part("layer", name=name)] if eager else [])
        if "launches" in only:
            found.append(Part("launches", name=name))
    return found + [Part("linear", shape) for shape in LINEARS if "linear" in only]


def compile_part(part: Part, recipes: Sequence[str]) -> None:
    """In a process of its own: run a part once, for what that leaves in the caches of Triton and of torch.compile."""
    where = this_gpu()
    found = device.detect(where)
    try:
        if part.section == "op":
            e, _, k, n = part.shape
            for candidate in op_candidates([operands((e, 32 * e, k, n), _generator(where))], found):
                candidate.steps[0]()
        elif part.section == "choices":
            e, _, k, n = part.shape
            plan, generator = op_plans(found)["fp8"], _generator(where)
            choose(found.target.name)
            offs = kernels.random_ends((32 * e, e), generator)
            x, w, dy = _normal(generator, 32 * e, k), _normal(generator, e, n, k), _normal(generator, 32 * e, n)
            for suffix in WAYS.values():
                way = replace(plan, target=plan.target + (suffix or " one launch"))
                way.quantise((x, w, w), (x,), (w, w), offs)
                way.quantise((x, w, w), (x,), (), offs)
                way.quantise((dy, dy), (dy, dy), (w, w), offs)
        elif part.section == "configs":
            e, _, k, n = part.shape
            plan = op_plans(found)["fp8"]
            passes, offs, _ = products((e, 32 * e, k, n), where)
            for config in list(together_configs())[part.share[0] :: part.share[1]]:
                for phase in ("forward", "backward"):
                    _with_config(config, plan, passes[phase][0], offs)
        elif part.section in ("layer", "launches"):
            size = LAYERS[part.name]
            for fields in list(layer_kinds(part.compiled).values())[part.share[0] :: part.share[1]]:
                module = make_layer(size, fields, found, where)
                layer_step(size, _compiled(module) if part.compiled else module, module, where)()
                del module
                _free()
        else:
            for name in ("bf16", *recipes):
                linear_steps((part.shape[0], part.shape[1]), name, 1, found, where)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # the process that times it meets it again, and reports it
        print(f"{part}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def rows_of(part: Part, recipes: Sequence[str], found: device.Detected, where: torch.device, rounds: int) -> list[Row]:
    """The rows of a part."""
    if part.section in ("op", "choices", "configs"):
        e, m, k, n = part.shape
        time = {"op": time_op, "choices": time_choices, "configs": time_configs}[part.section]
        return time((e, m, k, n), found, where, rounds)
    if part.section == "layer":
        return time_layer(part.name, part.compiled, found, where, rounds)
    if part.section == "launches":
        return count_launches(part.name, found, where)
    return time_linear((part.shape[0], part.shape[1]), recipes, found, where, rounds)


def render(rows: Sequence[Row]) -> str:
    """For people: a line a candidate; times, the ratio to the base beside bar and goal, memory; then counts."""
    lines = []
    for row in rows:
        lines.append(f"{row.section}: {row.case}")
        for name, us in row.median_us.items():
            bar = row.bars.get(name)
            asked = "" if bar is None else f"  bar {bar.bar:.2f}" + (f" goal {bar.goal:.2f}" if bar.goal else "")
            memory = ""
            if name in row.peak_bytes:
                share = row.peak_bytes[name] / row.peak_bytes.get(row.base, row.peak_bytes[name])
                memory = f"  {row.peak_bytes[name] / 2**30:6.2f} GiB, {share:.3f} of {row.base}'s"
            lines.append(f"    {name:22} {us:10.1f} us {row.speedup[name]:7.3f}x {row.base}{asked}{memory}")
        for what, names in row.counts.items():
            text = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
            lines.append(f"    {what}: {sum(names.values())}{f' ({text})' if text else ''}")
        lines.extend(f"    {name:22} WRONG: {problem}" for name, problem in row.wrong.items())
    return "\n".join(lines)


def as_json(row: Row) -> dict[str, object]:
    """A row as it is written to a file."""
    return {
        **{name: value for name, value in vars(row).items() if name != "bars"},
        "bars": {name: {"bar": bar.bar, "goal": bar.goal} for name, bar in row.bars.items()},
        "below": row.below(),
    }


def _shape(text: str) -> Shape:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text} is no ExMxKxN")
    return sizes


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {*SECTIONS, *EXTRA}:
        raise argparse.ArgumentTypeError(f"{text}: expected some of {', '.join((*SECTIONS, *EXTRA))}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.moe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=_sections, default=list(SECTIONS), metavar=",".join(SECTIONS), help="default: all of them"
    )
    parser.add_argument("--shape", nargs="+", type=_shape, metavar="ExMxKxN", default=list(OPS))
    parser.add_argument("--layer", nargs="+", choices=sorted(LAYERS), default=["dsv3"])
    parser.add_argument(
        "--recipe", nargs="+", choices=sorted(linear.RECIPES), default=["rowwise", "rowwise_with_gw_hp"]
    )
    parser.add_argument("--no-eager", action="store_true", help="time the layer compiled only")
    parser.add_argument("--rounds", type=int, default=15, help="samples a candidate (default 15)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile, and check the numerics (default 1)"
    )
    parser.add_argument("--json", type=Path, help="write raw samples and provenance to this file")
    parser.add_argument(
        "--unchecked", action="store_true", help="skip the numerics cases (each result is still checked)"
    )
    parser.add_argument("--gate", action="store_true", help="exit 1 if a row is beyond its bar")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; on a CPU run `fp8ci run --platform cpu`", file=sys.stderr)
        return 4
    os.environ.pop(CHECK, None)  # it waits for the device, which a graph does not take
    where = this_gpu()
    found = device.detect(where)
    if not options.unchecked and kernels.run_cases("test_moe or test_linear", options.jobs) != 0:
        print("a numerics case of these layers is red; nothing was timed; mend it first", file=sys.stderr)
        return 1
    work = parts(options.only, options.shape, options.layer, not options.no_eager)
    if options.jobs > 1:
        # A process each for the longest first.
        longest = ("layer", "linear", "op", "configs", "launches", "choices")
        order = sorted(work, key=lambda part: longest.index(part.section))
        shares = {"configs": options.jobs, "layer": 4}
        order = [
            replace(part, share=(n, count))
            for part in order
            for count in [shares.get(part.section, 1)]
            for n in range(count)
        ]
        with processes.pool(options.jobs) as pool:
            list(pool.map(compile_part, order, [options.recipe] * len(order)))
    rows: list[Row] = []
    for part in work:
        found_rows = rows_of(part, options.recipe, found, where, options.rounds)
        rows += found_rows
        show(render(found_rows))
        if options.json:  # after each part: what was measured is kept if a later one fails
            document = {"provenance": kernels.provenance(where, found), "rows": [as_json(row) for row in rows]}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    beyond = [line for row in rows for line in row.below()]
    for line in beyond:
        print(f"beyond the bar: {line}", file=sys.stderr)
    if any(row.wrong for row in rows):
        return 1
    return 1 if beyond and options.gate else 0


if __name__ == "__main__":
    sys.exit(main())
