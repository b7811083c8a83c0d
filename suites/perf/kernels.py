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
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8stack import device, formats
from fp8stack.command import show
from fp8stack.kernels import (
    blockwise,
    colwise,
    experts,
    groups,
    launch,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
)
from harness.run import checkout_state
from suites.perf import processes, timing

ROOT = Path(__file__).resolve().parents[2]
SEED = 20_250

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One row of the table: `op` on an input of this shape (sizes named by OPS[op].axes) and `dtype`."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bar: float | None
    goal: float | None

    def case(self, fmt: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float32", "fp32")
        sizes = (f"{axis}{size}" for axis, size in zip(OPS[self.op].axes, self.shape, strict=True))
        return "-".join((self.op, fmt, dtype, *sizes))


@dataclass(frozen=True)
class Op:
    """How an op is timed.

    axes: a letter a size of the shape. tests: suites/numerics/test_<tests>.py has its cases. bytes_moved: what a call
    must move. call: our op on its inputs. chain: the plain operators that it replaces. inputs: what one call takes.
    """

    axes: str
    tests: str
    bytes_moved: Callable[[Row], int]
    call: Callable[[Inputs, str], object]
    chain: Callable[[Inputs, formats.Format], object]
    inputs: Callable[[Row, torch.Generator], Inputs]


def normal(row: Row, generator: torch.Generator) -> Inputs:
    """One tensor of the row's shape: normal, mean 0, standard deviation 1."""
    x = torch.randn(row.shape, device=generator.device, dtype=torch.float32, generator=generator)
    return (x.to(row.dtype),)


def _normal(row: Row, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=generator.device, dtype=torch.float32, generator=generator).to(row.dtype)


def random_ends(sizes: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """offs of e groups of m rows, sizes being (m, e): random ends, multiples of 16, of which the last is m."""
    m, e = sizes
    ends = torch.randperm(m // 16 - 1, device=generator.device, generator=generator)[: e - 1] + 1
    return torch.cat([ends.sort().values * 16, ends.new_full((1,), m)]).to(torch.int32)


def grouped(row: Row, generator: torch.Generator) -> Inputs:
    """A normal (m, n) tensor and offs of e groups of its rows."""
    m, n, e = row.shape
    return _normal(row, (m, n), generator), random_ends((m, e), generator)


def grouped_pair(row: Row, generator: torch.Generator) -> Inputs:
    """Two such tensors and the offs of both."""
    x, _ = grouped(row, generator)
    return x, *grouped(row, generator)


def _colwise_bytes(row: Row) -> int:
    """Rows of gaps and tail are written too."""
    m, n, e = row.shape
    return m * n * row.dtype.itemsize + groups.padded_rows(m, e, groups.MULTIPLE) * n + 4 * e * n


def _elements(row: Row) -> int:
    return math.prod(row.shape)


def _scale(x: torch.Tensor, fmt: formats.Format, dim: int) -> torch.Tensor:
    """Power-of-two scales as upstream writes them, through log2 and exp2."""
    amax = x.abs().amax(dim=dim, keepdim=True).to(torch.float64)
    return torch.exp2(torch.floor(torch.log2((fmt.max / amax.clamp(min=1e-12)).float())))


def _cast(x: torch.Tensor, scale: torch.Tensor, fmt: formats.Format) -> torch.Tensor:
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _rowwise_chain(inputs: Inputs, fmt: formats.Format) -> object:
    scale = _scale(inputs[0], fmt, -1)
    return _cast(inputs[0], scale, fmt), scale.reciprocal()


def _transposed_chain(inputs: Inputs, fmt: formats.Format) -> object:
    scale = _scale(inputs[0], fmt, -2)
    return _cast(inputs[0], scale, fmt).transpose(-2, -1).contiguous(), scale.reciprocal()


def _both_chain(inputs: Inputs, fmt: formats.Format) -> object:
    return _rowwise_chain(inputs, fmt), _transposed_chain(inputs, fmt)


def _colwise_chain(inputs: Inputs, fmt: formats.Format) -> object:
    """Groups as a segmented maximum; without the padding that our output has."""
    x, offs = inputs
    group = torch.searchsorted(offs, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
    amax = torch.zeros((offs.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    amax = amax.scatter_reduce(0, group[:, None].expand_as(x), x.abs(), "amax").to(torch.float64)
    scale = torch.exp2(torch.floor(torch.log2((fmt.max / amax.clamp(min=1e-12)).float())))
    return _cast(x, scale[group], fmt).t().contiguous().t(), scale.reciprocal()


def _colwise_pair_chain(inputs: Inputs, fmt: formats.Format) -> object:
    x, y, offs = inputs
    return _colwise_chain((x, offs), fmt), _colwise_chain((y, offs), fmt)


def _turned(row: Row) -> Row:
    m, k, e = row.shape
    return replace(row, shape=(k, m, e))


def _rowwise_grouped_chain(inputs: Inputs, fmt: formats.Format) -> object:
    x, offs = inputs
    codes, inverse_scale = _colwise_chain((x.t(), offs), fmt)
    return codes.t(), inverse_scale


def _rowwise_and_colwise_chain(inputs: Inputs, fmt: formats.Format) -> object:
    return _rowwise_chain(inputs[:1], fmt), _colwise_chain(inputs, fmt)


def _tensorwise_chain(inputs: Inputs, fmt: formats.Format) -> tuple[torch.Tensor, torch.Tensor]:
    scale = fmt.max / inputs[0].abs().amax().to(torch.float64).clamp(min=1e-12)
    return _cast(inputs[0], scale.float(), fmt), scale.float().reciprocal()


def _tensorwise_column_chain(inputs: Inputs, fmt: formats.Format) -> object:
    codes, inverse_scale = _tensorwise_chain(inputs, fmt)
    return codes.t().contiguous(), inverse_scale


def _tensorwise_both_chain(inputs: Inputs, fmt: formats.Format) -> object:
    codes, inverse_scale = _tensorwise_chain(inputs, fmt)
    return codes, codes.t().contiguous(), inverse_scale


def _blocks(row: Row, rows: int, columns: int) -> int:
    return -(-row.shape[0] // rows) * -(-row.shape[1] // columns)


def _block_amax(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """max |x| of each block, spread over x again; for sizes that blocks divide."""
    m, k = x.shape
    amax = x.abs().view(m // rows, rows, k // columns, columns).amax(dim=(1, 3))
    return amax.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _blockwise(unit: str, column_major: bool) -> Op:
    rows, columns = blockwise.UNITS[unit]

    def chain(inputs: Inputs, fmt: formats.Format) -> object:
        scale = (fmt.max / _block_amax(*inputs, rows, columns).to(torch.float64).clamp(min=1e-12)).float()
        codes = _cast(*inputs, scale, fmt)
        return (codes.t().contiguous() if column_major else codes), scale[::rows, ::columns].reciprocal()

    return Op(
        axes="mk",
        tests="blockwise",
        bytes_moved=lambda row: _elements(row) * (row.dtype.itemsize + 1) + 4 * _blocks(row, rows, columns),
        call=lambda inputs, fmt: blockwise.quantize_blockwise(*inputs, fmt, unit, column_major),
        chain=chain,
        inputs=normal,
    )


def _mxfp8(dim: int) -> Op:
    rows, columns = (1, mxfp8.BLOCK) if dim == 1 else (mxfp8.BLOCK, 1)

    def chain(inputs: Inputs, fmt: formats.Format) -> object:
        amax = _block_amax(*inputs, rows, columns).float()
        exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-126))) - math.floor(math.log2(fmt.max))
        codes = _cast(*inputs, torch.exp2(-exponent), fmt)
        byte = (exponent[::rows, ::columns] + 127).to(torch.uint8)
        return (codes, byte) if dim == 1 else (codes.t().contiguous(), byte.t().contiguous())

    return Op(
        axes="mk",
        tests="mxfp8",
        bytes_moved=lambda row: _elements(row) * (row.dtype.itemsize + 1) + _blocks(row, rows, columns),
        call=lambda inputs, fmt: mxfp8.quantize_mxfp8(*inputs, fmt, "floor", dim),
        chain=chain,
        inputs=normal,
    )


OPS: dict[str, Op] = {
    "blockwise_1x128": _blockwise("1x128", False),
    "blockwise_128x1": _blockwise("128x1", True),  # the right operand of a weight gradient
    "blockwise_128x128": _blockwise("128x128", False),
    "blockwise_128x128_turned": _blockwise("128x128", True),
    "mxfp8_rows": _mxfp8(1),
    "mxfp8_columns": _mxfp8(0),
    # The maximum and the cast each read the tensor once.
    "tensorwise": Op(
        axes="mk",
        tests="tensorwise",
        bytes_moved=lambda row: _elements(row) * (2 * row.dtype.itemsize + 1),
        call=lambda inputs, fmt: tensorwise.quantize_tensorwise(*inputs, fmt),
        chain=_tensorwise_chain,
        inputs=normal,
    ),
    "tensorwise_column": Op(
        axes="mk",
        tests="tensorwise",
        bytes_moved=lambda row: _elements(row) * (2 * row.dtype.itemsize + 1),
        call=lambda inputs, fmt: tensorwise.quantize_tensorwise(*inputs, fmt, column_major=True),
        chain=_tensorwise_column_chain,
        inputs=normal,
    ),
    "tensorwise_both": Op(
        axes="mk",
        tests="tensorwise",
        bytes_moved=lambda row: _elements(row) * (2 * row.dtype.itemsize + 2),
        call=lambda inputs, fmt: tensorwise.quantize_tensorwise_both(*inputs, fmt),
        chain=_tensorwise_both_chain,
        inputs=normal,
    ),
    "rowwise": Op(
        axes="mk",
        tests="rowwise",
        bytes_moved=lambda row: _elements(row) * (row.dtype.itemsize + 1) + 4 * row.shape[0],
        call=lambda inputs, fmt: rowwise.quantize_rowwise(*inputs, fmt),
        chain=_rowwise_chain,
        inputs=normal,
    ),
    "colwise": Op(
        axes="mne",
        tests="colwise",
        bytes_moved=_colwise_bytes,
        call=lambda inputs, fmt: colwise.quantize_colwise_grouped(*inputs, fmt),
        chain=_colwise_chain,
        inputs=grouped,
    ),
    "colwise_pair": Op(
        axes="mne",
        tests="colwise",
        bytes_moved=lambda row: 2 * _colwise_bytes(row),
        call=lambda inputs, fmt: colwise.quantize_colwise_grouped_pair(*inputs, fmt),
        chain=_colwise_pair_chain,
        inputs=grouped_pair,
    ),
    # The same tensors transposed: k in groups.
    "rowwise_grouped": Op(
        axes="mke",
        tests="rowwise_grouped",
        bytes_moved=lambda row: _colwise_bytes(_turned(row)),
        call=lambda inputs, fmt: rowwise_grouped.quantize_rowwise_grouped(*inputs, fmt),
        chain=_rowwise_grouped_chain,
        inputs=lambda row, generator: (_normal(row, row.shape[:2], generator), random_ends(row.shape[1:], generator)),
    ),
    "rowwise_and_colwise": Op(
        axes="mke",
        tests="rowwise_and_colwise",
        bytes_moved=lambda row: _colwise_bytes(row) + row.shape[0] * (row.shape[1] + 4),
        call=lambda inputs, fmt: rowwise_and_colwise.quantize_rowwise_and_colwise(*inputs, fmt),
        chain=_rowwise_and_colwise_chain,
        inputs=grouped,
    ),
    "experts": Op(
        axes="enk",
        tests="experts",
        bytes_moved=lambda row: _elements(row) * (row.dtype.itemsize + 1) + 4 * row.shape[0] * row.shape[1],
        call=lambda inputs, fmt: experts.quantize_experts(*inputs, fmt),
        chain=_rowwise_chain,
        inputs=normal,
    ),
    "experts_transposed": Op(
        axes="enk",
        tests="experts",
        bytes_moved=lambda row: _elements(row) * (row.dtype.itemsize + 1) + 4 * row.shape[0] * row.shape[2],
        call=lambda inputs, fmt: experts.quantize_experts_transposed(*inputs, fmt),
        chain=_transposed_chain,
        inputs=normal,
    ),
    "experts_both": Op(
        axes="enk",
        tests="experts",
        bytes_moved=lambda row: (
            _elements(row) * (row.dtype.itemsize + 2) + 4 * row.shape[0] * (row.shape[1] + row.shape[2])
        ),
        call=lambda inputs, fmt: experts.quantize_experts_both(*inputs, fmt),
        chain=_both_chain,
        inputs=normal,
    ),
}

# Expert weights (E, N, K): DeepSeek 16B; Llama 4; DeepSeek 671B at expert parallel 8.
_EXPERTS = ((64, 1408, 2048), (64, 2048, 1408), (16, 5120, 8192), (32, 2048, 7168), (32, 7168, 2048))

# Grouped rows (M, N, E), with the bar of the specification.
_GROUPED = (((16640, 2048, 64), 0.45), ((16640, 5120, 64), 0.52), ((16640, 5120, 128), 0.44), ((32768, 7168, 32), 0.56))

_ACTIVATIONS = ((16640, 2048), (16640, 5120), (32768, 7168))

# Shapes: #4069's sweep and DeepSeek-V3 at expert parallel 8. Bars and goals: as specified for an H200.
ROWS = (
    Row("rowwise", (16640, 2048), torch.bfloat16, 0.75, 0.85),
    Row("rowwise", (16640, 5120), torch.bfloat16, 0.88, 0.95),
    Row("rowwise", (32768, 7168), torch.bfloat16, 0.88, 0.95),
    Row("rowwise", (16640, 5120), torch.float32, None, None),
    # Llama 8B: a weight, its inputs.
    *(
        Row("tensorwise", shape, torch.bfloat16, 0.85, 0.92)
        for shape in ((14336, 4096), (8192, 4096), (8192, 14336), (16640, 5120))
    ),
    *(Row("blockwise_1x128", shape, torch.bfloat16, 0.85, 0.93) for shape in _ACTIVATIONS),
    *(Row("blockwise_128x1", shape, torch.bfloat16, 0.60, 0.80) for shape in _ACTIVATIONS),
    *(Row("blockwise_128x128", shape, torch.bfloat16, 0.85, 0.93) for shape in ((14336, 4096), (18432, 7168))),
    Row("blockwise_128x128_turned", (18432, 7168), torch.bfloat16, 0.60, 0.80),
    *(Row("mxfp8_rows", shape, torch.bfloat16, 0.85, 0.93) for shape in _ACTIVATIONS),
    *(Row("mxfp8_columns", shape, torch.bfloat16, 0.60, 0.80) for shape in _ACTIVATIONS),
    Row("tensorwise_column", (14336, 4096), torch.bfloat16, None, None),
    Row("tensorwise_both", (14336, 4096), torch.bfloat16, None, None),
    *(Row(op, shape, torch.bfloat16, bar, 0.70) for op in ("colwise", "colwise_pair") for shape, bar in _GROUPED),
    *(Row("rowwise_grouped", (n, m, e), torch.bfloat16, 0.65, 0.85) for (m, n, e), _ in _GROUPED),
    *(Row("rowwise_and_colwise", shape, torch.bfloat16, 0.55, 0.70) for shape, _ in _GROUPED),
    *(Row("experts", shape, torch.bfloat16, 0.92, 0.97) for shape in _EXPERTS),
    *(Row("experts_transposed", shape, torch.bfloat16, 0.57, 0.75) for shape in _EXPERTS),
    *(Row("experts_both", shape, torch.bfloat16, 0.58, 0.75) for shape in _EXPERTS),
)


@dataclass(frozen=True)
class Peer:
    """torchao's kernel for an op: its name, its module, and the inputs of a row as it takes them."""

    name: str
    module: str
    arguments: Callable[[Inputs], Inputs] = lambda inputs: inputs

    def load(self) -> Callable[[Inputs, str], object] | None:
        """The kernel, where torchao is installed and still has it under this name."""
        if importlib.util.find_spec("torchao") is None:
            return None
        try:
            module = importlib.import_module(f"torchao.prototype.moe_training.kernels.{self.module}")
        except ImportError:
            return None
        quantise = getattr(module, self.name, None)
        if quantise is None:
            return None
        return lambda inputs, fmt: quantise(
            *self.arguments(inputs), output_dtype=formats.get(fmt).dtype, round_scales_to_power_of_2=True
        )


def _turned_weights(inputs: Inputs) -> Inputs:
    return (inputs[0].transpose(-2, -1),)


PEERS: dict[str, Peer] = {
    "rowwise": Peer("triton_fp8_rowwise_2d_scale_and_cast", "float8_rowwise"),
    "colwise": Peer("triton_fp8_per_group_colwise_scales", "jagged_float8_scales"),
    "colwise_pair": Peer("triton_fp8_per_group_colwise_scales_dual", "jagged_float8_scales"),
    "rowwise_grouped": Peer("triton_fp8_per_group_rowwise_scales", "jagged_float8_scales"),
    "experts": Peer("triton_fp8_colwise_3d_scale_and_cast", "float8_rowwise", _turned_weights),
    "experts_transposed": Peer("triton_fp8_rowwise_3d_transpose_rhs", "float8_rowwise", _turned_weights),
}


def check_first(ops: Sequence[str], jobs: int) -> int:
    """Run the numerics cases of `ops` through pytest on this GPU, in `jobs` processes; pytest's exit code."""
    return run_cases(" or ".join(dict.fromkeys(f"test_{OPS[op].tests}" for op in ops)), jobs)


def run_cases(rules: str, jobs: int) -> int:
    """Run the numerics cases that pytest's -k `rules` selects; pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "suites/numerics", "-k", rules]
    if jobs > 1:
        command += ["-n", str(jobs)]
    print("correct first:", " ".join(command[1:]), file=sys.stderr, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def time_row(row: Row, fmt: str, where: torch.device, rounds: int) -> dict[str, object]:
    """Time one row in turns with the copy, the compiled chain and, where installed, torchao."""
    op = OPS[row.op]
    moved = op.bytes_moved(row)
    generator = torch.Generator(device=where).manual_seed(SEED)
    inputs = [op.inputs(row, generator) for _ in range(timing.rotations(moved))]
    with launch.recording() as ran:
        op.call(inputs[0], fmt)
    implementation = next(iter(ran.values()))
    copy = timing.copy_probe(where)
    candidates = [copy, timing.Candidate("ours", [lambda x=x: op.call(x, fmt) for x in inputs], moved)]
    if formats.get(fmt).name == device.detect(where).target.e4m3:  # else Inductor has no cast to this format
        chain = torch.compile(op.chain, fullgraph=True)
        spec = formats.get(fmt)
        candidates.append(timing.Candidate("compiled chain", [lambda x=x: chain(x, spec) for x in inputs], moved))
        peer = PEERS[row.op].load() if row.op in PEERS and row.dtype == torch.bfloat16 else None
        if peer is not None:
            candidates.append(timing.Candidate("torchao", [lambda x=x: peer(x, fmt) for x in inputs], moved))
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
    if torch.version.hip is None and where.type == "cuda":
        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,mig.mode.current"
        smi = line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={where.index or 0}")
    commit, dirty = checkout_state(ROOT)
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "device_name": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
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


def _compile(row: Row, fmt: str) -> None:
    """In a process of its own: time a row once, for what that leaves in the caches of Triton and Inductor."""
    time_row(row, fmt, torch.device("cuda", torch.cuda.current_device()), 1)


def render(rows: Sequence[dict[str, object]], heading: bool = True) -> str:
    """The table for people: microseconds, GB/s, share of the copy beside bar and goal, speed-up over the others."""
    lines = []
    if heading:
        lines.append(f"{'case':54} {'ran':9} {'us':>8} {'GB/s':>6} {'of copy':>7} {'bar':>5} {'goal':>5}  against")
    for row in rows:
        us, share = row["median_us"], row["share_of_copy"]
        against = ", ".join(f"{us[n] / us['ours']:.2f}x {n}" for n in us if n not in ("copy", "ours"))
        bar, goal = ("-" if row[n] is None else f"{row[n]:.2f}" for n in ("bar", "goal"))
        lines.append(
            f"{row['case']:54} {row['implementation']:9} {us['ours']:8.1f} {row['bytes'] / us['ours'] / 1e3:6.0f} "
            f"{share['ours']:7.3f} {bar:>5} {goal:>5}  {against or '-'}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="time this op only; may be repeated")
    parser.add_argument("--format", choices=sorted(formats.FORMATS), help="default: the e4m3 format of this arch")
    parser.add_argument("--rounds", type=int, default=30, help="samples a candidate (default 30)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile, and check the numerics first (default 1)"
    )
    parser.add_argument("--json", type=Path, help="write raw samples and provenance to this file")
    parser.add_argument("--unchecked", action="store_true", help="skip the numerics cases")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a row is below its bar")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; speed is measured on one; on a CPU run `fp8ci run --platform cpu`", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    ops = options.op or sorted(OPS)
    if not options.unchecked and check_first(ops, options.jobs) != 0:
        print("a numerics case of these ops is red; nothing was timed; mend it first", file=sys.stderr)
        return 1
    fmt = options.format or found.arch.e4m3
    asked = [row for row in ROWS if row.op in ops]
    if options.jobs > 1:  # chains and peers of a row take longer to compile than to time
        with processes.pool(options.jobs) as pool:
            list(pool.map(_compile, asked, [fmt] * len(asked)))
    rows: list[dict[str, object]] = []
    for row in asked:
        rows.append(time_row(row, fmt, where, options.rounds))
        show(render(rows[-1:], heading=len(rows) == 1))
        if options.json:  # after each row: what was measured is kept if a later one fails
            document = {"provenance": provenance(where, found), "rows": rows}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    show(f"copy: {rows[0]['copy_gb_per_s']:.0f} GB/s on {torch.cuda.get_device_name(where)}")
    below = [r["case"] for r in rows if r["bar"] is not None and not r["share_of_copy"]["ours"] >= r["bar"]]
    if below:
        print("below the bar: " + ", ".join(below), file=sys.stderr)
    return 1 if below and options.gate else 0


if __name__ == "__main__":
    sys.exit(main())
