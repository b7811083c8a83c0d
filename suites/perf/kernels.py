"""Speed of the quantisation kernels on this GPU, against a copy: `python -m suites.perf.kernels [--op rowwise ...]`.

Correct first: the numerics cases of the chosen ops run through pytest, and nothing is timed if one fails. Then each
row is timed in turns with a copy and with the chain of plain operators under torch.compile, on seeded normal data.
A row's figure is its share of the copy: (bytes it must move / its time) / (bytes of the copy / its time), where the
bytes are each input once and each output once. `bar` and `goal` are the specification's for an H200.

torchao is timed beside it where it is installed. Results go to standard output as a table and, with `--json FILE`, to
a file with raw samples and where they come from. Exit codes: 0 timed, 1 a row below its bar (with `--gate`) or a red
numerics case, 2 usage, 4 no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8stack import device, formats
from fp8stack.kernels import launch, rowwise
from suites.perf import timing

ROOT = Path(__file__).resolve().parents[2]
SEED = 20_250


@dataclass(frozen=True)
class Row:
    """One row of the table: `op` on an (m, k) input of `dtype`."""

    op: str
    m: int
    k: int
    dtype: torch.dtype
    bar: float | None
    goal: float | None

    def case(self, fmt: str) -> str:
        return (
            f"{self.op}-{fmt}-{str(self.dtype).removeprefix('torch.').replace('bfloat16', 'bf16')}-m{self.m}-k{self.k}"
        )


# Shapes: #4069's sweep and DeepSeek-V3 at expert parallel 8. Bars and goals: as specified for an H200.
ROWS = (
    Row("rowwise", 16640, 2048, torch.bfloat16, 0.75, 0.85),
    Row("rowwise", 16640, 5120, torch.bfloat16, 0.88, 0.95),
    Row("rowwise", 32768, 7168, torch.bfloat16, 0.88, 0.95),
    Row("rowwise", 16640, 5120, torch.float32, None, None),
)


def _rowwise_bytes(row: Row) -> int:
    return row.m * row.k * (row.dtype.itemsize + 1) + 4 * row.m


def _rowwise_call(x: torch.Tensor, fmt: str) -> Callable[[], object]:
    return lambda: rowwise.quantize_rowwise(x, fmt)


def _rowwise_chain(x: torch.Tensor, fmt: formats.Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain of plain operators that the kernel replaces, as upstream writes it (power-of-two scales)."""
    amax = x.abs().amax(dim=1, keepdim=True).to(torch.float64)
    scale = torch.exp2(torch.floor(torch.log2((fmt.max / amax.clamp(min=1e-12)).float())))
    q = (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return q, scale.reciprocal()


@dataclass(frozen=True)
class Op:
    """How an op is timed: bytes a call must move, our call, and the plain chain that it replaces."""

    bytes_moved: Callable[[Row], int]
    call: Callable[[torch.Tensor, str], Callable[[], object]]
    chain: Callable[[torch.Tensor, formats.Format], object]


OPS: dict[str, Op] = {"rowwise": Op(_rowwise_bytes, _rowwise_call, _rowwise_chain)}


def _torchao_rowwise() -> Callable[[torch.Tensor, str], Callable[[], object]] | None:
    """torchao's 2-D rowwise kernel, where torchao is installed and still has it under this name."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.prototype.moe_training.kernels import float8_rowwise as peer  # type: ignore[import-not-found]

    quantise = getattr(peer, "triton_fp8_rowwise_2d_scale_and_cast", None)
    if quantise is None:
        return None
    return lambda x, fmt: lambda: quantise(x, output_dtype=formats.get(fmt).dtype, round_scales_to_power_of_2=True)


PEERS: dict[str, Callable[[], Callable[[torch.Tensor, str], Callable[[], object]] | None]] = {
    "rowwise": _torchao_rowwise
}


def check_first(ops: Sequence[str]) -> int:
    """Run the numerics cases of `ops` through pytest on this GPU; pytest's exit code."""
    rules = " or ".join(f"test_{op}" for op in ops)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "suites/numerics", "-k", rules]
    print("correct first:", " ".join(command[1:]), file=sys.stderr, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def time_row(row: Row, fmt: str, where: torch.device, rounds: int) -> dict[str, object]:
    """Time one row in turns with the copy, the compiled chain and, where installed, torchao."""
    op = OPS[row.op]
    moved = op.bytes_moved(row)
    generator = torch.Generator(device=where).manual_seed(SEED)
    inputs = [
        torch.randn(row.m, row.k, device=where, dtype=torch.float32, generator=generator).to(row.dtype)
        for _ in range(timing.rotations(moved))
    ]
    with launch.recording() as ran:
        op.call(inputs[0], fmt)()
    implementation = next(iter(ran.values()))
    copy = timing.copy_probe(where)
    candidates = [copy, timing.Candidate("ours", [op.call(x, fmt) for x in inputs], moved)]
    if formats.get(fmt).name == device.detect(where).target.e4m3:  # else Inductor has no cast to this format
        chain = torch.compile(op.chain, fullgraph=True)
        spec = formats.get(fmt)
        candidates.append(timing.Candidate("compiled chain", [lambda x=x: chain(x, spec) for x in inputs], moved))
        peer = PEERS[row.op]() if row.dtype == torch.bfloat16 else None
        if peer is not None:
            candidates.append(timing.Candidate("torchao", [peer(x, fmt) for x in inputs], moved))
    timed = timing.measure(candidates, rounds)
    shares = {
        c.name: timing.share_of_copy(timed[c.name], c.bytes_moved, timed["copy"], copy.bytes_moved)
        for c in candidates
        if c.name != "copy"
    }
    return {
        "case": row.case(fmt),
        "implementation": implementation,
        "bytes": moved,
        "bar": row.bar,
        "goal": row.goal,
        "copy_gb_per_s": copy.bytes_moved / timed["copy"].median_ns,
        "share_of_copy": shares,
        "median_us": {name: t.median_ns / 1e3 for name, t in timed.items()},
        "samples_ns": {name: list(t.ns) for name, t in timed.items()},
    }


def provenance(where: torch.device, found: device.Detected) -> dict[str, object]:
    """When, what and on which machine: what a baseline must say of itself."""

    def line(*command: str) -> str | None:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() or None if done.returncode == 0 else None

    import triton  # the suite, not the product, asks for its version

    smi = None
    if torch.version.hip is None:
        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,mig.mode.current"
        smi = line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={where.index or 0}")
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": line("git", "rev-parse", "HEAD") or os.environ.get("GITHUB_SHA"),
        "device_name": torch.cuda.get_device_name(where),
        "arch": found.arch.name,
        "target": found.target.name,
        "reason": found.reason,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "smi": smi,
        "seed": SEED,
        "data": "normal, mean 0, standard deviation 1",
    }


def render(rows: Sequence[dict[str, object]]) -> str:
    """The table for people: microseconds, GB/s, share of the copy beside bar and goal, speed-up over the others."""
    lines = [f"{'case':42} {'ran':9} {'us':>8} {'GB/s':>6} {'of copy':>7} {'bar':>5} {'goal':>5}  against"]
    for row in rows:
        us, share = row["median_us"], row["share_of_copy"]
        against = ", ".join(f"{us[n] / us['ours']:.2f}x {n}" for n in us if n not in ("copy", "ours"))
        bar, goal = ("-" if row[n] is None else f"{row[n]:.2f}" for n in ("bar", "goal"))
        lines.append(
            f"{row['case']:42} {row['implementation']:9} {us['ours']:8.1f} {row['bytes'] / us['ours'] / 1e3:6.0f} "
            f"{share['ours']:7.3f} {bar:>5} {goal:>5}  {against or '-'}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="time this op only; may be repeated")
    parser.add_argument("--format", choices=sorted(formats.FORMATS), help="default: the e4m3 format of this arch")
    parser.add_argument("--rounds", type=int, default=30, help="samples a candidate (default 30)")
    parser.add_argument("--json", type=Path, help="write raw samples and provenance to this file")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a row is below its bar")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; on a CPU run `fp8ci run --platform cpu`", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    ops = options.op or sorted(OPS)
    if check_first(ops) != 0:
        print("a numerics case of these ops is red; nothing was timed; mend it first", file=sys.stderr)
        return 1
    fmt = options.format or found.arch.e4m3
    rows = [time_row(row, fmt, where, options.rounds) for row in ROWS if row.op in ops]
    print(render(rows))
    print(f"copy: {rows[0]['copy_gb_per_s']:.0f} GB/s on {torch.cuda.get_device_name(where)}")
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(where, found), "rows": rows}, indent=1) + "\n")
    below = [r["case"] for r in rows if r["bar"] is not None and not r["share_of_copy"]["ours"] >= r["bar"]]
    if below:
        print("below the bar: " + ", ".join(below), file=sys.stderr)
    return 1 if below and options.gate else 0


if __name__ == "__main__":
    sys.exit(main())
