"""The rows of the speed gate: what is timed, beside which reference and which probe, on which seeded data.

    kernels      every row of suites/perf/kernels.py, in its format; reference: the compiled chain; probe: a copy
    gemm         our grouped product; reference: torch's bf16 one; probe: a dense FP8 GEMM
    linear       a compiled dense layer, forward and backward; reference: bf16; probe: a dense bf16 GEMM
    layer        a compiled MoE layer, the same
    trainer      a step of fp8stack.train on one GPU; reference: the same in bf16; probe: a dense bf16 GEMM

A row is (op, case, format, arch) and its case id names the test, the file of samples and the baseline row. `make` does
all that takes memory, so that a launch holds one row at a time. Counts and compile time are rows of one size of an op:
they do not depend on it.

Not here: timing (timing.py), launches (launch.py), verdicts (harness/speed.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8stack import device, formats
from harness.samples import Kind, Launch, Samples
from suites.perf import grouped_gemm, kernels, moe, timing

BLOCKS = 10
TRAINER_BLOCKS = 6
# Two trainers side by side: an eighth of the layers of Llama 8B and its embeddings take 31 GB each, and activations.
TRAINERS = tuple(("llama3-8b", 4, recipe, 8192) for recipe in ("rowwise_with_gw_hp", "rowwise", "tensorwise"))
PROBE_SIZE = 8192  # of a dense GEMM: 1.1 TFLOP, long past its launch


@dataclass(frozen=True)
class Made:
    """A row with its memory. input_spread: standard deviation of the data that is timed."""

    candidate: timing.Candidate
    reference: timing.Candidate | None
    input_spread: float | None


@dataclass(frozen=True)
class Row:
    """One row. work: bytes beside a copy, floating-point operations beside a GEMM; 0: no rate to compare."""

    case: str
    op: str
    format: str
    probe: str
    work: int
    reference: str
    config: Mapping[str, Any]
    make: Callable[[torch.device], Made] = field(compare=False)
    blocks: int = BLOCKS


def spread(x: torch.Tensor) -> float:
    """Standard deviation, in float32."""
    return float(x.float().std())


def probe(name: str, where: torch.device) -> tuple[timing.Candidate, int]:
    """A probe and its work a call: bytes of a copy, or floating-point operations of a dense GEMM."""
    if name == "copy":
        copy = timing.copy_probe(where)
        return copy, copy.bytes_moved
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    sides = [torch.randn((PROBE_SIZE, PROBE_SIZE), device=where, generator=generator).bfloat16() for _ in range(2)]
    work = 2 * PROBE_SIZE**3
    if name == "bf16":
        a, b = sides
        return timing.Candidate("bf16", [lambda: a @ b], 4 * PROBE_SIZE**2), work
    fmt = formats.get(device.detect(where).arch.e4m3)
    a, b = (x.clamp(-fmt.max, fmt.max).to(fmt.dtype) for x in sides)
    one = torch.ones((), device=where)
    call = functools.partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return timing.Candidate("fp8", [call], 2 * PROBE_SIZE**2), work


def samples(row: Row, kind: Kind, launches: Sequence[Launch], resolution_ns: float) -> Samples:
    """What a row leaves in the evidence."""
    timed = kind == "time"
    work = {"": 0, "copy": 2 * timing.COPY_BYTES}.get(row.probe, 2 * PROBE_SIZE**3)
    return Samples(
        kind=kind,
        case=row.case,
        op=row.op,
        format=row.format,
        arch=device.detect().arch.name,
        config=dict(row.config),
        work=row.work if timed else 0,
        probe=row.probe if timed else "",  # type: ignore[arg-type]
        probe_work=work if timed else 0,
        reference=row.reference if timed else "",
        resolution_ns=resolution_ns,
        most={"synchronisations": 0} if kind == "counts" else {},
        launches=list(launches),
    )


def of_kernel(row: kernels.Row, fmt: str) -> Row:
    """A row of the kernels' table."""
    op = kernels.OPS[row.op]
    moved = op.bytes_moved(row)

    def make(where: torch.device) -> Made:
        generator = torch.Generator(device=where).manual_seed(kernels.SEED)
        sets = [op.inputs(row, generator) for _ in range(timing.rotations(moved))]
        ours = timing.Candidate("candidate", [lambda x=x: op.call(x, fmt) for x in sets], moved)
        chain, spec = torch.compile(op.chain, fullgraph=True), formats.get(fmt)
        theirs = timing.Candidate("reference", [lambda x=x: chain(x, spec) for x in sets], moved)
        return Made(ours, theirs, spread(sets[0][0]))

    dtype = str(row.dtype).removeprefix("torch.")
    config = {"shape": list(row.shape), "dtype": dtype, "seed": kernels.SEED, "rotate_bytes": timing.ROTATE_BYTES}
    return Row(row.case(fmt), row.op, fmt, "copy", moved, "compiled chain", config, make)


def of_gemm(shape: grouped_gemm.Shape, gemm: str, fmt: str) -> Row:
    """A grouped product with fast accumulation, as the recipe runs its forward one."""
    e, m, k, n = shape

    def make(where: torch.device) -> Made:
        generator = torch.Generator(device=where).manual_seed(kernels.SEED)
        first = grouped_gemm.operands(shape, gemm, fmt, generator)
        moved = first.a.numel() + first.b.numel()
        more = timing.rotations(moved) - 1
        sets = [first, *(grouped_gemm.operands(shape, gemm, fmt, generator) for _ in range(more))]
        call = grouped_gemm.ours(True, 16)
        ours = timing.Candidate("candidate", [lambda x=x: call(x) for x in sets], moved)
        theirs = timing.Candidate("reference", [lambda x=x: grouped_gemm.torch_bf16(x) for x in sets], moved)
        return Made(ours, theirs, spread(first.a_bf16))

    config = {"shape": list(shape), "gemm": gemm, "seed": kernels.SEED, "rotate_bytes": timing.ROTATE_BYTES}
    case = f"grouped_gemm-{gemm}-{fmt}-e{e}-m{m}-k{k}-n{n}"
    return Row(case, "grouped_gemm", fmt, "fp8", 2 * m * k * n, "torch's grouped product in bf16", config, make)


def of_linear(shape: tuple[int, int], recipe: str, fmt: str) -> Row:
    """A dense layer, forward and backward."""
    k, n = shape
    moved = 2 * (moe.TOKENS * (k + n) + n * k)

    def make(where: torch.device) -> Made:
        found, count = device.detect(where), timing.rotations(moved)
        ours = timing.Candidate("candidate", moe.linear_steps(shape, recipe, count, found, where), moved)
        theirs = timing.Candidate("reference", moe.linear_steps(shape, "bf16", count, found, where), moved)
        return Made(ours, theirs, None)

    config = {"shape": [moe.TOKENS, k, n], "recipe": recipe, "seed": kernels.SEED, "rotate_bytes": timing.ROTATE_BYTES}
    case = f"linear-{recipe}-{fmt}-m{moe.TOKENS}-k{k}-n{n}"
    return Row(case, "linear", fmt, "bf16", 0, "the layer in bf16", config, make)


def of_layer(name: str, fmt: str) -> Row:
    """A MoE layer, forward and backward; its weights are larger than any cache."""
    size = moe.LAYERS[name]
    moved = 6 * size.routing.experts * size.dim * size.ffn

    def make(where: torch.device) -> Made:
        ours = timing.Candidate("candidate", [moe.compiled_step(size, {}, where)], moved)
        theirs = timing.Candidate("reference", [moe.compiled_step(size, None, where)], moved)
        return Made(ours, theirs, None)

    config = {"layer": name, "tokens": size.tokens, "recipe": "rowwise", "seed": kernels.SEED}
    return Row(f"moe-{name}-rowwise-{fmt}", "moe", fmt, "bf16", 0, "the layer in bf16", config, make)


def of_trainer(model: str, layers: int, recipe: str, seq: int, fmt: str) -> Row:
    """A whole training step. It reads its loss, so it cannot be captured, and it is long: fewer blocks."""

    def make(where: torch.device) -> Made:
        from suites.perf import trainer  # which is nobody else's concern here

        sides = {
            name: timing.Candidate(name, [trainer.Stepped(trainer.row_config(model, layers, its, seq))], 0, False)
            for name, its in (("candidate", recipe), ("reference", "bf16"))
        }
        return Made(sides["candidate"], sides["reference"], None)

    config = {"model": model, "layers": layers, "recipe": recipe, "batch": 1, "seq": seq}
    case = f"trainer-{model}-l{layers}-{recipe}-{fmt}"
    return Row(case, "trainer", fmt, "bf16", 0, "the trainer in bf16", config, make, TRAINER_BLOCKS)


def trainers(fmt: str) -> Sequence[Row]:
    """End to end: rows of their own test, since one takes as long as many of the others."""
    return tuple(of_trainer(*one, fmt) for one in TRAINERS)


def rows(fmt: str) -> Sequence[Row]:
    """All rows of a format but the trainers, in the order in which they are timed."""
    return (
        *(of_kernel(row, fmt) for row in kernels.ROWS),
        *(of_gemm(shape, gemm, fmt) for shape in grouped_gemm.SHAPES for gemm in grouped_gemm.GEMMS),
        *(of_linear(shape, recipe, fmt) for shape, recipes in moe.LINEARS.items() for recipe in recipes),
        *(of_layer(name, fmt) for name in moe.LAYERS),
    )


def first_of_each_op(fmt: str) -> Sequence[Row]:
    """One row of each kernel's op, of each grouped product, and of each recipe of a layer: what is counted and compiled
    once. A trainer is not among them: its step reads the loss, so that the host waits.
    """
    found: dict[tuple[object, ...], Row] = {}
    for row in rows(fmt):
        found.setdefault((row.op, row.config.get("gemm"), row.config.get("recipe")), row)
    return tuple(found.values())


def by_case(fmt: str) -> Mapping[str, Row]:
    """The same, by case id."""
    return {row.case: row for row in (*rows(fmt), *trainers(fmt))}
