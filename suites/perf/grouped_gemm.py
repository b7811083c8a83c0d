"""Speed of grouped GEMMs on this GPU: `python -m suites.perf.grouped_gemm [--shape ExMxKxN] [--gemm forward ...]`.

Our kernel (grouped_kernel.py), in FP8 with and without fast accumulation and in bf16, takes turns with torch's own
grouped GEMMs, on the three GEMMs of an expert layer: x (M,K) by W (E,N,K). Groups are random, multiples of 16, which
is what torch's products along the contraction take. Times are of the device: calls are replayed from a graph, over
enough operands that no cache holds them. A row's figure is TFLOPS, 2 M N K over the median time. Ours contains the
small kernel that lists the tiles; torch's is the bare call, which as an op of ours has two small kernels more.

Correct first: the numerics cases of grouped GEMMs run through pytest, and every candidate's result of every row is held
to torch's; nothing is reported if one is wrong. `sweep` (`python -m suites.perf.sweep grouped_gemm`) times every
configuration that fits the GPU, with the same check, and names the best for each size class of the launch table.

Exit codes: 0 timed, 1 a wrong result or a red case, 2 usage, 4 no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8stack import device, formats
from fp8stack.command import show
from fp8stack.kernels import colwise, experts, grouped_gemm, grouped_kernel, groups, rowwise
from fp8stack.kernels.grouped_kernel import GroupedConfig
from suites.perf import kernels, processes, timing

Shape = tuple[int, int, int, int]  # E, M, K, N
GEMMS = ("forward", "grad_input", "grad_weight")

# DeepSeek 16B; DeepSeek 671B at expert parallel 8, gate or up, and down; Llama 4.
SHAPES: tuple[Shape, ...] = (
    (64, 16640, 2048, 1408),
    (32, 32768, 7168, 2048),
    (32, 32768, 2048, 7168),
    (16, 32768, 5120, 8192),
)

# Of a result against torch's: bf16 rounding and 14-bit sums on either side leave about 50 dB. A row of a wrong group
# leaves 0, one wrong element in a thousand 30.
SQNR_DB = 40.0
LIMIT = 0.05  # of the root mean square, beside 1/32 of the element: what one element may differ by


@dataclass(frozen=True)
class Operands:
    """One GEMM as grouped_scaled_mm takes it, and the same in bf16; groups of codes may be padded."""

    a: torch.Tensor
    b: torch.Tensor
    inverse_a: torch.Tensor
    inverse_b: torch.Tensor
    offs: torch.Tensor
    a_bf16: torch.Tensor
    b_bf16: torch.Tensor
    offs_bf16: torch.Tensor


def operands(shape: Shape, gemm: str, fmt: str, generator: torch.Generator, alignment: int = 16) -> Operands:
    """Seeded normal data, quantised by our ops as a layer does. alignment: of the groups of a weight gradient."""
    e, m, k, n = shape
    offs = kernels.random_ends((m, e), generator)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=generator.device, generator=generator, dtype=torch.float32).to(torch.bfloat16)

    if gemm == "forward":
        x, w = normal(m, k), normal(e, n, k)
        a, inverse_a = rowwise.quantize_rowwise(x, fmt)
        b, inverse_b = experts.quantize_experts(w, fmt)
        return Operands(a, b.transpose(1, 2), inverse_a, inverse_b, offs, x, w.transpose(1, 2), offs)
    if gemm == "grad_input":
        dy, w = normal(m, n), normal(e, n, k)
        a, inverse_a = rowwise.quantize_rowwise(dy, fmt)
        b, inverse_b = experts.quantize_experts_transposed(w, fmt)
        return Operands(a, b.transpose(1, 2), inverse_a, inverse_b, offs, dy, w, offs)
    dy, x = normal(m, n), normal(m, k)
    a, inverse_a, padded = colwise.quantize_colwise_grouped(dy, offs, fmt, alignment=alignment)
    b, inverse_b, _ = colwise.quantize_colwise_grouped(x, offs, fmt, alignment=alignment)
    return Operands(a.t(), b, inverse_a, inverse_b, padded, dy.t(), x, offs)


def torch_fp8(given: Operands) -> torch.Tensor:
    return grouped_gemm.call_torch(given.a, given.b, given.inverse_a, given.inverse_b, given.offs, True)


def torch_fp8_exact(given: Operands) -> torch.Tensor:
    return grouped_gemm.call_torch(given.a, given.b, given.inverse_a, given.inverse_b, given.offs, False)


def torch_bf16(given: Operands) -> torch.Tensor:
    return torch._grouped_mm(given.a_bf16, given.b_bf16, offs=given.offs_bf16, out_dtype=torch.bfloat16)


def ours(fast: bool, alignment: int) -> Callable[[Operands], torch.Tensor]:
    """Our kernel as a candidate."""
    return lambda given: grouped_gemm.grouped_scaled_mm(
        given.a,
        given.b,
        given.inverse_a,
        given.inverse_b,
        given.offs,
        backend="triton",
        fast_accum=fast,
        alignment=alignment,
    )


def _ours_bf16(given: Operands) -> torch.Tensor:
    return grouped_gemm.grouped_mm(given.a_bf16, given.b_bf16, given.offs_bf16, backend="triton")


def wrong(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    """What is wrong with a result, None if nothing; expected is another bf16 result of the same product."""
    left, right = expected.float(), found.float()
    error = left - right
    power = left.square().mean(dtype=torch.float64)
    sqnr = 10 * torch.log10(power / error.square().mean(dtype=torch.float64).clamp(min=1e-30))
    if not float(sqnr) >= SQNR_DB:  # a NaN is not
        return f"SQNR {float(sqnr):.1f} dB against torch; expected at least {SQNR_DB}"
    beyond = error.abs() > left.abs() / 32 + LIMIT * float(power) ** 0.5
    if bool(beyond.any()):
        where = [int(i) for i in torch.nonzero(beyond)[0]]
        return f"{int(beyond.sum())} elements are wrong, the first at {where}"
    return None


def _bytes(given: Operands) -> int:
    return sum(x.numel() * x.itemsize for x in (given.a, given.b))


def time_gemm(shape: Shape, gemm: str, fmt: str, where: torch.device, rounds: int) -> dict[str, object]:
    """Time one GEMM of a layer, every candidate in turns; its result is checked first."""
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    first = operands(shape, gemm, fmt, generator)
    sets = [first, *(operands(shape, gemm, fmt, generator) for _ in range(timing.rotations(_bytes(first)) - 1))]
    calls: dict[str, Callable[[Operands], torch.Tensor]] = {
        "ours": ours(True, 16),
        "ours exact": ours(False, 16),
        "torch fp8": torch_fp8,
        "torch fp8 exact": torch_fp8_exact,
        "ours bf16": _ours_bf16,
        "torch bf16": torch_bf16,
    }
    problems = {}
    for name, call in calls.items():
        problem = wrong((torch_bf16 if "bf16" in name else torch_fp8)(first), call(first))
        if problem is not None:
            problems[name] = problem
    candidates = [
        timing.Candidate(name, [lambda x=x, call=call: call(x) for x in sets], _bytes(first))
        for name, call in calls.items()
        if name not in problems
    ]
    if gemm == "grad_weight":  # groups at multiples of a whole step need no descriptors of their own
        aligned = [operands(shape, gemm, fmt, generator, alignment=128) for _ in sets]
        problem = wrong(torch_fp8(aligned[0]), ours(True, 128)(aligned[0]))
        if problem is not None:
            problems["ours, groups of 128"] = problem
        else:
            for name, call in (("ours, groups of 128", ours(True, 128)), ("torch fp8, groups of 128", torch_fp8)):
                runs = [lambda x=x, call=call: call(x) for x in aligned]
                candidates.append(timing.Candidate(name, runs, _bytes(aligned[0])))
    timed = timing.measure(candidates, rounds)
    e, m, k, n = shape
    flops = 2 * m * k * n
    return {
        "gemm": gemm,
        "shape": {"E": e, "M": m, "K": k, "N": n},
        "wrong": problems,
        "median_us": {name: t.median_ns / 1e3 for name, t in timed.items()},
        "tflops": {name: flops / t.median_ns / 1e3 for name, t in timed.items()},
        "samples_ns": {name: list(t.ns) for name, t in timed.items()},
    }


def render(rows: Sequence[dict[str, object]]) -> str:
    """For people: a line a candidate, TFLOPS and microseconds, and how ours stands against torch's FP8."""
    lines = []
    for row in rows:
        sizes = " ".join(f"{axis}{size}" for axis, size in row["shape"].items())
        lines.append(f"{row['gemm']} {sizes}")
        us, tflops = row["median_us"], row["tflops"]
        for name in us:
            against = "" if "torch fp8" not in us else f"  {us['torch fp8'] / us[name]:5.2f}x torch fp8"
            lines.append(f"    {name:26} {us[name]:9.1f} us {tflops[name]:8.0f} TFLOPS{against}")
        lines.extend(f"    {name:26} WRONG: {problem}" for name, problem in row["wrong"].items())
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------- sweep
def configs(kind: str, shared_bytes: int) -> Iterator[GroupedConfig]:
    """The configurations worth a try on a GPU with bulk copies, as far as registers and shared memory allow.

    A thread holds at most 128 sums, 64 where a second float32 sum stands beside them; a group of four warps multiplies
    64 rows at a time. As many stages as fit, or one fewer. A specialised loop has two groups of warps that multiply,
    each for half of the rows, and stores a tile in one part.
    """
    element = 2 if kind == "bf16" else 1
    most = 64 if kind == "fp8-exact" else 128
    line = 128 // element  # of 128 bytes, the widest that a bulk copy swizzles
    blocks = [(m, n, k) for m in (64, 128, 256) for n in (128, 256) for k in (line, 2 * line)]
    for (block_m, block_n, block_k), panel in ((block, panel) for block in blocks for panel in (8, 32)):
        tile, step = block_m * block_n, (block_m + block_n) * block_k * element
        for warps, split, programs in ((w, s, p) for w in (4, 8) for s in (1, 2) for p in (1, 2)):
            sums = tile // (warps * 32)
            stages = min((shared_bytes // programs - tile * 2 // split) // step, 6)
            if sums <= most and sums * warps * programs <= 1024 and block_m >= 16 * warps:
                for count in range(max(stages - 1, 2), stages + 1):
                    for tma, flatten in ((True, True), (True, False), (False, False)):
                        yield GroupedConfig(
                            block_m, block_n, block_k, warps, count, tma, flatten, False, split, panel, programs, ""
                        )
        stages = min((shared_bytes - tile) // step, 6)
        if block_m >= 128 and tile // 256 <= most:
            for count in range(max(stages - 1, 2), stages + 1):
                yield GroupedConfig(block_m, block_n, block_k, 4, count, True, False, True, 1, panel, 1, "")


def chosen_configs(kind: str, shared_bytes: int, in_rows: bool, alignment: int, most: int) -> list[GroupedConfig]:
    """`most` of the configurations: those with the largest tiles, and a seeded sample of the others, in their order.

    Without those whose warp specialisation would be off: a tile's own descriptors do not go with it.
    """
    whole = [
        row for row in configs(kind, shared_bytes) if in_rows or alignment % row.block_k == 0 or not row.specialize
    ]
    order = list(range(len(whole)))
    random.Random(kernels.SEED).shuffle(order)
    order.sort(key=lambda n: -whole[n].block_m * whole[n].block_n)
    return [whole[n] for n in sorted(order[:most])]


def _run(given: Operands, kind: str, alignment: int, row: GroupedConfig, target: str) -> torch.Tensor:
    if kind == "bf16":
        return grouped_kernel.launch_grouped(
            given.a_bf16, given.b_bf16, None, None, given.offs_bf16, torch.bfloat16, 1, False, row, target
        )
    return grouped_kernel.launch_grouped(
        given.a,
        given.b,
        given.inverse_a,
        given.inverse_b,
        given.offs,
        torch.bfloat16,
        alignment,
        kind == "fp8-exact",
        row,
        target,
    )


def _compile(shape: Shape, gemm: str, kind: str, alignment: int, fmt: str, rows: Sequence[GroupedConfig]) -> None:
    """In a process of its own: launch each configuration once, for what that leaves in Triton's cache."""
    where = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    e, _, k, n = shape
    given = operands((e, 32 * e, k, n), gemm, fmt, generator, alignment)
    target = device.detect(where).target.name
    for row in rows:
        try:
            _run(given, kind, alignment, row, target)
            torch.cuda.synchronize()
        except Exception as error:  # the process that times it meets it again, and reports it
            print(f"{name(row)}: {type(error).__name__}", file=sys.stderr)


def name(row: GroupedConfig) -> str:
    """A configuration's values in the order of its fields: 128/256/128/8/4/1/1/0/2/16/1."""
    return "/".join(str(int(value)) for field, value in asdict(row).items() if field != "measured")


BATCH = 24  # candidates that are timed in one go: each keeps its outputs


def sweep_gemm(
    shape: Shape,
    gemm: str,
    kind: str,
    alignment: int,
    where: torch.device,
    found: device.Detected,
    rounds: int,
    jobs: int,
    most: int,
) -> dict[str, object]:
    """Time every configuration on one GEMM: rows of {config, us, tflops, against torch}, fastest first; wrong ones."""
    fmt, target = found.arch.e4m3, found.target.name
    in_rows = gemm != "grad_weight"
    shared = torch.cuda.get_device_properties(where).shared_memory_per_block_optin
    every = chosen_configs(kind, shared, in_rows, alignment, most)
    table = grouped_kernel.GROUPED_CONFIGS.get((target, grouped_kernel.size_class(in_rows, kind)))
    if table is not None:
        every.insert(0, table)
    if jobs > 1:
        parts = [(shape, gemm, kind, alignment, fmt, every[n::jobs]) for n in range(jobs)]
        with processes.pool(jobs) as pool:
            list(pool.map(_compile, *zip(*parts, strict=True)))
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    first = operands(shape, gemm, fmt, generator, alignment)
    sets = [first, operands(shape, gemm, fmt, generator, alignment)]
    peer = torch_bf16 if kind == "bf16" else torch_fp8
    expected = peer(first)
    rows: list[dict[str, object]] = []
    bad: list[dict[str, object]] = []
    _, m, k, n = shape
    for start in range(0, len(every), BATCH):
        chosen = {}
        for row in every[start : start + BATCH]:
            try:
                problem = wrong(expected, _run(first, kind, alignment, row, target))
            except Exception as error:
                print(f"{name(row)} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            if problem is not None:
                print(f"{name(row)} is WRONG: {problem}", file=sys.stderr)
                bad.append({"config": asdict(row), "problem": problem})
                continue
            chosen[name(row)] = row
        candidates = [timing.Candidate("torch", [lambda x=x: peer(x) for x in sets], _bytes(first))]
        for label, row in chosen.items():
            calls = [lambda x=x, row=row: _run(x, kind, alignment, row, target) for x in sets]
            candidates.append(timing.Candidate(label, calls, _bytes(first)))
        timed = timing.measure(candidates, rounds)
        for label, row in chosen.items():
            ns = timed[label].median_ns
            rows.append(
                {
                    "config": {field: value for field, value in asdict(row).items() if field != "measured"},
                    "us": ns / 1e3,
                    "tflops": 2 * m * k * n / ns / 1e3,
                    "against_torch": timed["torch"].median_ns / ns,
                }
            )
        torch.cuda.empty_cache()
    rows.sort(key=lambda row: float(str(row["us"])))
    return {"shape": list(shape), "gemm": gemm, "kind": kind, "alignment": alignment, "rows": rows, "wrong": bad}


def _shape(text: str) -> Shape:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text} is no ExMxKxN")
    return sizes


def sweep(argv: Sequence[str]) -> int:
    """`python -m suites.perf.sweep grouped_gemm ...`"""
    parser = argparse.ArgumentParser(prog="python -m suites.perf.sweep grouped_gemm")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="ExMxKxN", default=SHAPES)
    parser.add_argument("--gemm", nargs="+", choices=GEMMS, default=("forward", "grad_weight"))
    parser.add_argument("--kind", nargs="+", choices=grouped_kernel.KINDS, default=("fp8",))
    parser.add_argument("--alignment", type=int, default=groups.MULTIPLE, help="of the groups of a weight gradient")
    parser.add_argument("--rounds", type=int, default=10, help="samples a configuration (default 10)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1)")
    parser.add_argument("--most", type=int, default=120, help="configurations a GEMM, at most (default 120)")
    parser.add_argument("--shown", type=int, default=6, help="configurations to print a GEMM (default 6)")
    parser.add_argument("--json", type=Path, help="write every time and where it comes from to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; configurations are timed on one", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    results: list[dict[str, object]] = []
    slowdowns: dict[str, dict[str, list[float]]] = {}
    for kind in options.kind:
        for gemm in options.gemm:
            for shape in options.shapes:
                result = sweep_gemm(
                    shape, gemm, kind, options.alignment, where, found, options.rounds, options.jobs, options.most
                )
                results.append(result)
                rows = result["rows"]
                assert isinstance(rows, list)
                show(f"{kind} {gemm} {'x'.join(map(str, shape))}: {len(rows)} configurations")
                for row in rows[: options.shown]:
                    values = "/".join(str(int(value)) for value in row["config"].values())
                    show(
                        f"    {values:34} {row['us']:9.1f} us {row['tflops']:7.0f} TFLOPS "
                        f"{row['against_torch']:5.2f}x torch",
                    )
                by_config = slowdowns.setdefault(grouped_kernel.size_class(gemm != "grad_weight", kind), {})
                for row in rows:
                    by_config.setdefault(json.dumps(row["config"]), []).append(row["us"] / rows[0]["us"])
    best = {}
    for size_class, by_config in slowdowns.items():
        most = max(len(s) for s in by_config.values())
        everywhere = {c: math.exp(sum(map(math.log, s)) / most) for c, s in by_config.items() if len(s) == most}
        config = min(everywhere, key=lambda c: everywhere[c])
        best[size_class] = {"config": json.loads(config), "geomean_slowdown": everywhere[config]}
        show(f"{size_class}: {best[size_class]['config']}, {everywhere[config]:.3f} of each one's best")
    if options.json:
        document = {"provenance": kernels.provenance(where, found), "results": results, "compromise": best}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(result["wrong"] for result in results) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.grouped_gemm", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", type=_shape, metavar="ExMxKxN", default=SHAPES)
    parser.add_argument("--gemm", nargs="+", choices=GEMMS, default=GEMMS)
    parser.add_argument("--rounds", type=int, default=30, help="samples a candidate (default 30)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check the numerics first (default 1)")
    parser.add_argument("--json", type=Path, help="write raw samples and provenance to this file")
    parser.add_argument(
        "--unchecked", action="store_true", help="skip the numerics cases (each result is still checked)"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; on a CPU run `fp8ci run --platform cpu`", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    if not options.unchecked and kernels.run_cases("test_grouped_gemm", options.jobs) != 0:
        print("a numerics case of grouped GEMMs is red; nothing was timed; mend it first", file=sys.stderr)
        return 1
    fmt = formats.get(found.arch.e4m3).name
    rows = []
    for shape in options.shape:
        for gemm in options.gemm:
            rows.append(time_gemm(shape, gemm, fmt, where, options.rounds))
            show(render(rows[-1:]))
    if options.json:
        options.json.write_text(
            json.dumps({"provenance": kernels.provenance(where, found), "rows": rows}, indent=1) + "\n"
        )
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
