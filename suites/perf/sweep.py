"""Every launch configuration that fits this GPU, timed: `python -m suites.perf.sweep OP [--shapes MxK ...]`.

The space is not a hand list: the powers of two for tiles and warps, cut by what the arch allows (threads a block,
registers a thread). Each configuration is compiled, by several processes at once into Triton's cache, checked bit-equal
to the reference once, then timed in turns with a copy. Printed and, with `--json FILE`, written: the best configuration
a shape, and the best compromise a size class, which is the smallest geometric mean of slowdown against each shape's
best. The tables in fp8stack/kernels come from such a file and name it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8stack import device, formats
from fp8stack.kernels import (
    blockwise,
    colwise,
    experts,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
)
from suites.perf import kernels, timing

MAX_THREADS = 1024
MAX_ELEMENTS_A_THREAD = 128  # held as loaded, two bf16 a register; beyond it an sm_90 thread (255 registers) spills
MIN_ELEMENTS_A_CHUNK = 16  # of a thread: below it no thread can issue one 16-byte store of codes
LOADED = 8  # bf16 elements of one 16-byte load
REGISTERS = 65536  # of an NVIDIA multiprocessor
CODE_REGISTERS = 56  # what a transposing kernel needs beside the tiles that it holds; found by cross-compiling

Shape = tuple[int, ...]
Config = Any  # the dataclass of a kernel's launch table


@dataclass(frozen=True)
class Space:
    """What an op can be launched with.

    configs: of a shape and the lanes a wave, in a fixed order. launch: of inputs, format, configuration, target.
    sample: fewer inputs that need the same kernel, for the comparison with the reference. shapes: the op's own list.
    """

    configs: Callable[[Shape, int], Iterator[Config]]
    launch: Callable[[kernels.Inputs, formats.Format, Config, str], kernels.Inputs]
    reference: Callable[[kernels.Inputs, formats.Format], kernels.Inputs]
    sample: Callable[[kernels.Inputs], kernels.Inputs]
    size_class: Callable[[Shape], str]
    shapes: tuple[Shape, ...]


def _rowwise_configs(shape: Shape, wave: int) -> Iterator[rowwise.RowwiseConfig]:
    k = shape[-1]
    whole = 1 << (k - 1).bit_length()
    for block in (512 << n for n in range(6)):
        chunks = -(-k // block)
        for rows in (1, 2, 4, 8, 16):
            for warps in (1, 2, 4, 8, 16):
                threads = warps * wave
                a_chunk = rows * block / threads
                fits = threads <= MAX_THREADS and a_chunk >= MIN_ELEMENTS_A_CHUNK
                if block <= whole and fits and a_chunk * chunks <= MAX_ELEMENTS_A_THREAD:
                    yield rowwise.RowwiseConfig(rows, block, warps, "")


def _transposed_configs(shape: Shape, wave: int) -> Iterator[experts.TransposedConfig]:
    """A thread has one 16-byte load a part of each chunk; what it holds must leave registers for the code."""
    n = shape[1]
    for columns in (16, 32, 64, 128):
        for parts in (8, 16):
            for warps in (4, 8, 16):
                threads = warps * wave
                rows = parts * threads * LOADED // columns
                chunks = -(-n // rows)
                if rows >= 2 * n or threads > MAX_THREADS:
                    continue
                registers = parts * LOADED // 2  # of a thread for a chunk of bf16
                for held in sorted({0, min(chunks, 1), min(chunks, 64 // registers), min(chunks, 96 // registers)}):
                    for programs in (0, 1, 2, 3, 4):
                        a_thread = min(REGISTERS // max(programs, 1) // threads, 255)
                        fits = registers * max(held, 1) + CODE_REGISTERS <= a_thread
                        if not fits or (programs and a_thread == 255):
                            continue
                        for hints in (False, True) if chunks > held else (False,):
                            yield experts.TransposedConfig(columns, rows, parts, held, warps, programs, hints, "")


def _both_configs(shape: Shape, wave: int) -> Iterator[experts.BothConfig]:
    k = shape[2]
    for column in _transposed_configs(shape, wave):
        threads = column.num_warps * wave
        if column.columns > 64 or (column.hints and column.parts == 8):
            continue
        for row_rows in (1, 2, 4, 8):
            a_thread = row_rows * 2048 / threads
            if a_thread < MIN_ELEMENTS_A_CHUNK / 2 or row_rows * k / threads > MAX_ELEMENTS_A_THREAD / 2:
                continue
            for together in (1, 4, 1 << 20):
                yield experts.BothConfig(
                    row_rows,
                    2048,
                    min(together, shape[0]),
                    column.columns,
                    column.rows,
                    column.parts,
                    column.held,
                    column.num_warps,
                    column.programs,
                    column.hints,
                    "",
                )


def _tensorwise_configs(shape: Shape, wave: int) -> Iterator[tensorwise.TensorwiseConfig]:
    for amax_elements in (4096, 8192, 16384, 32768):
        for amax_warps in (4, 8, 16):
            if not MIN_ELEMENTS_A_CHUNK <= amax_elements / amax_warps / wave <= MAX_ELEMENTS_A_THREAD:
                continue
            for fused in (False, True):
                for elements in (4096, 8192, 16384):
                    for warps in (2, 4, 8):
                        if not MIN_ELEMENTS_A_CHUNK <= elements / warps / wave <= MAX_ELEMENTS_A_THREAD // 2:
                            continue
                        for hints in (False, True):
                            yield tensorwise.TensorwiseConfig(
                                amax_elements, amax_warps, fused, 1, elements, 1, warps, 0, hints, ""
                            )


def _turned_configs(shape: Shape, wave: int) -> Iterator[tensorwise.TensorwiseConfig]:
    for columns in (32, 64, 128):
        for parts in (8, 16):
            for warps in (2, 4, 8):
                for programs in (0, 4, 6, 8):
                    if programs and REGISTERS // programs // (warps * wave) < 64 + CODE_REGISTERS:
                        continue
                    for loads in (1, 2):  # 16-byte loads of a thread a part
                        rows = loads * parts * warps * wave * LOADED // columns
                        if loads * parts > 16 or rows > 1024:
                            continue
                        for hints in (False, True):
                            yield tensorwise.TensorwiseConfig(
                                16384, 8, False, rows, columns, parts, warps, programs, hints, ""
                            )


def _tensorwise_space(layout: str) -> Space:
    wanted = {"row": (0, 2), "column": (1, 2), "both": (0, 1, 2)}[layout]

    def launch(inputs: kernels.Inputs, fmt: formats.Format, config: Config, target: str) -> kernels.Inputs:
        result = tensorwise.launch_tensorwise(*inputs, fmt, False, None, layout, config, target)
        return tuple(tensor for tensor in result if tensor is not None)

    def reference(inputs: kernels.Inputs, fmt: formats.Format) -> kernels.Inputs:
        result = tensorwise.quantize_tensorwise_both_reference(*inputs, fmt)
        return tuple(result[place] for place in wanted)

    return Space(
        _tensorwise_configs if layout == "row" else _turned_configs,
        launch,
        reference,
        _few_rows,
        lambda shape: layout,
        ((14336, 4096), (8192, 4096), (8192, 14336), (16640, 5120)) if layout == "row" else ((14336, 4096),),
    )


def _colwise_configs(shape: Shape, wave: int) -> Iterator[colwise.ColwiseConfig]:
    """A thread has one 16-byte load a part of each chunk; held chunks must leave registers for the code."""
    for columns in (32, 64, 128):
        for warps in (2, 4, 8, 16):
            for parts in (8, 16):
                threads = warps * wave
                rows = parts * threads * LOADED // columns
                if rows < 64 or rows > 2048:
                    continue
                registers = parts * LOADED // 2
                for held in (0, 1, 2, 3):
                    for programs in sorted({limit // threads for limit in (256, 384, 512, 768) if limit >= threads}):
                        a_thread = min(REGISTERS // (programs * threads), 255)
                        if registers * max(held, 1) + CODE_REGISTERS <= a_thread:
                            yield colwise.ColwiseConfig(columns, rows, parts, held, warps, programs, "")


def _block_configs(
    make: Callable[..., Config], rows: int, columns: int, turned: bool
) -> Callable[..., Iterator[Config]]:
    """Tiles of whole blocks of rows x columns, whatever the shape."""

    def configs(shape: Shape, wave: int) -> Iterator[Config]:
        for tile_rows in (1 << n for n in range(9)):
            for tile_columns in (1 << n for n in range(5, 12)):
                if tile_rows % rows or tile_columns % columns or (turned and tile_rows < 64):
                    continue
                for parts in (4, 8, 16) if turned else (1,):
                    for warps in (1, 2, 4, 8, 16):
                        threads = warps * wave
                        a_thread = tile_rows * tile_columns / threads
                        loads = a_thread / LOADED / parts  # of a thread a part
                        if a_thread > MAX_ELEMENTS_A_THREAD or a_thread < MIN_ELEMENTS_A_CHUNK or loads < 1:
                            continue
                        for programs in (0, 4, 6, 8):
                            a_register = REGISTERS // max(programs, 1) // threads
                            if programs and (a_register < a_thread + CODE_REGISTERS / 2 or a_register > 200):
                                continue
                            yield make(tile_rows, tile_columns, parts, warps, programs, "")

    return configs


def _blockwise_space(unit: str, column_major: bool, shapes: tuple[Shape, ...]) -> Space:
    return Space(
        _block_configs(blockwise.BlockwiseConfig, *blockwise.UNITS[unit], column_major),
        lambda inputs, fmt, config, target: blockwise.launch_blockwise(
            *inputs, fmt, unit, column_major, False, config, target
        ),
        lambda inputs, fmt: blockwise.quantize_blockwise_reference(*inputs, fmt, unit, column_major),
        _few_rows,
        lambda shape: blockwise.size_class(blockwise.UNITS[unit], column_major),
        shapes,
    )


def _mxfp8_space(dim: int) -> Space:
    # A tile holds four blocks along the scales, which are stored as words.
    unit = (1, 4 * mxfp8.BLOCK) if dim == 1 else (4 * mxfp8.BLOCK, 1)
    return Space(
        _block_configs(mxfp8.Mxfp8Config, *unit, dim == 0),
        lambda inputs, fmt, config, target: mxfp8.launch_mxfp8(*inputs, fmt, "floor", dim, config, target),
        lambda inputs, fmt: mxfp8.quantize_mxfp8_reference(*inputs, fmt, "floor", dim),
        _few_rows,
        lambda shape: mxfp8.DIRECTIONS[dim],
        _ACTIVATIONS,
    )


def _rowwise_grouped_configs(shape: Shape, wave: int) -> Iterator[rowwise_grouped.RowwiseGroupedConfig]:
    """A thread has 16 neighbouring elements, or a few times as many, of the chunk that is held."""
    for block in (128, 256, 512, 1024, 2048):
        for warps in (1, 2, 4, 8):
            for elements in (16, 32, 64):
                rows = warps * wave * elements // block
                for threads in (512, 768, 1024) if rows else ():
                    yield rowwise_grouped.RowwiseGroupedConfig(rows, block, warps, threads // (warps * wave), "")


def _rowwise_and_colwise_configs(shape: Shape, wave: int) -> Iterator[rowwise_and_colwise.RowwiseAndColwiseConfig]:
    k = shape[1]
    for column in _colwise_configs(shape, wave):
        if column.parts == 8 or column.columns == 128 or column.held > 1:
            continue
        threads = column.num_warps * wave
        for row_rows in (1, 2, 4, 8):
            for row_block in (1024, 2048, 4096):
                a_chunk = row_rows * row_block / threads
                if a_chunk >= MIN_ELEMENTS_A_CHUNK / 2 and row_rows * k / threads <= MAX_ELEMENTS_A_THREAD / 2:
                    yield rowwise_and_colwise.RowwiseAndColwiseConfig(row_rows, row_block, **asdict(column))


def _few_rows(inputs: kernels.Inputs) -> kernels.Inputs:
    return (inputs[0][:992],)


def _all(inputs: kernels.Inputs) -> kernels.Inputs:
    return inputs


def _two_experts(inputs: kernels.Inputs) -> kernels.Inputs:
    return (inputs[0][:2],)


_ACTIVATIONS = ((16640, 2048), (16640, 5120), (32768, 7168))

SPACES: dict[str, Space] = {
    "blockwise_1x128": _blockwise_space("1x128", False, _ACTIVATIONS),
    "blockwise_128x1": _blockwise_space("128x1", True, _ACTIVATIONS),
    "blockwise_128x128": _blockwise_space("128x128", False, ((14336, 4096), (18432, 7168))),
    "blockwise_128x128_turned": _blockwise_space("128x128", True, ((14336, 4096), (18432, 7168))),
    "mxfp8_rows": _mxfp8_space(1),
    "mxfp8_columns": _mxfp8_space(0),
    "tensorwise": _tensorwise_space("row"),
    "tensorwise_column": _tensorwise_space("column"),
    "tensorwise_both": _tensorwise_space("both"),
    "rowwise": Space(
        _rowwise_configs,
        lambda inputs, fmt, config, target: rowwise.launch_rowwise(*inputs, fmt, True, config, target),
        lambda inputs, fmt: rowwise.quantize_rowwise_reference(*inputs, fmt),
        _few_rows,
        lambda shape: rowwise.size_class(shape[1]),
        (
            (16640, 512),
            (16640, 1024),
            (16640, 2048),
            (32768, 4096),
            (16640, 5120),
            (32768, 7168),
            (8192, 14336),
            (4096, 28672),
        ),
    ),
    "colwise": Space(
        _colwise_configs,
        lambda inputs, fmt, config, target: colwise.launch_colwise_grouped(*inputs, fmt, True, 16, config, target),
        lambda inputs, fmt: colwise.quantize_colwise_grouped_reference(*inputs, fmt),
        _all,
        lambda shape: colwise.size_class(shape[2]),
        ((16640, 2048, 64), (16640, 5120, 64), (16640, 5120, 128), (32768, 7168, 32)),
    ),
    "colwise_pair": Space(
        _colwise_configs,
        lambda inputs, fmt, config, target: colwise.launch_colwise_grouped_pair(*inputs, fmt, True, 16, config, target),
        lambda inputs, fmt: colwise.quantize_colwise_grouped_pair_reference(*inputs, fmt),
        _all,
        lambda shape: colwise.size_class(shape[2]),
        ((16640, 2048, 64), (16640, 5120, 64), (16640, 5120, 128), (32768, 7168, 32)),
    ),
    "rowwise_grouped": Space(
        _rowwise_grouped_configs,
        lambda inputs, fmt, config, target: rowwise_grouped.launch_rowwise_grouped(
            *inputs, fmt, True, 16, config, target
        ),
        lambda inputs, fmt: rowwise_grouped.quantize_rowwise_grouped_reference(*inputs, fmt),
        _all,
        lambda shape: rowwise_grouped.size_class(shape[2]),
        ((2048, 16640, 64), (5120, 16640, 64), (5120, 16640, 128), (7168, 32768, 32)),
    ),
    "rowwise_and_colwise": Space(
        _rowwise_and_colwise_configs,
        lambda inputs, fmt, config, target: rowwise_and_colwise.launch_rowwise_and_colwise(
            *inputs, fmt, True, 16, config, target
        ),
        lambda inputs, fmt: rowwise_and_colwise.quantize_rowwise_and_colwise_reference(*inputs, fmt),
        _all,
        lambda shape: rowwise_and_colwise.size_class(shape[2], shape[1]),
        ((16640, 2048, 64), (16640, 5120, 64), (16640, 5120, 128), (32768, 7168, 32)),
    ),
    "experts_transposed": Space(
        _transposed_configs,
        lambda inputs, fmt, config, target: experts.launch_transposed(*inputs, fmt, True, config, target),
        lambda inputs, fmt: experts.quantize_experts_transposed_reference(*inputs, fmt),
        _two_experts,
        lambda shape: experts.size_class(shape[1]),
        ((64, 1408, 2048), (64, 2048, 1408), (16, 5120, 8192), (32, 2048, 7168), (32, 7168, 2048)),
    ),
    "experts_both": Space(
        _both_configs,
        lambda inputs, fmt, config, target: experts.launch_both(*inputs, fmt, True, config, target),
        lambda inputs, fmt: experts.quantize_experts_both_reference(*inputs, fmt),
        _two_experts,
        lambda shape: experts.size_class(shape[1]),
        ((64, 1408, 2048), (64, 2048, 1408), (16, 5120, 8192), (32, 2048, 7168), (32, 7168, 2048)),
    ),
}


def _differs(
    space: Space, inputs: kernels.Inputs, expected: kernels.Inputs, fmt: formats.Format, config: Config
) -> bool:
    """Whether a launch with the configuration gives other bits than the reference did."""
    target = device.detect(inputs[0].device).target.name
    found = space.launch(inputs, fmt, config, target)
    integers = {1: torch.uint8, 4: torch.int32}
    return not all(
        torch.equal(a.view(integers[a.element_size()]), b.view(integers[b.element_size()]))
        for a, b in zip(expected, found, strict=True)
    )


def _compile(op: str, shape: Shape, fmt: str, configs: Sequence[Config]) -> None:
    """In a process of its own: launch each configuration once, for what that leaves in Triton's cache."""
    where = torch.device("cuda", torch.cuda.current_device())
    space = SPACES[op]
    inputs = space.sample(_inputs(op, shape, where, 1)[0])
    target = device.detect(where).target.name
    for config in configs:
        try:
            space.launch(inputs, formats.get(fmt), config, target)
            torch.cuda.synchronize()
        except Exception as error:  # the process that times it meets it again, and reports it
            print(f"{op} {config}: {type(error).__name__}", file=sys.stderr)


def _inputs(op: str, shape: Shape, where: torch.device, count: int) -> list[kernels.Inputs]:
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    row = kernels.Row(op, shape, torch.bfloat16, None, None)
    return [kernels.OPS[op].inputs(row, generator) for _ in range(count)]


def sweep_shape(
    op: str, shape: Shape, where: torch.device, found: device.Detected, rounds: int, jobs: int, most: int
) -> list[dict[str, object]]:
    """Time every configuration on bf16 inputs of a shape: rows of {config, us, share_of_copy}, fastest first.

    Of more than `most` configurations a seeded sample is taken. One that this GPU refuses (registers, shared memory) is
    named on stderr and left out; one that gives wrong bits raises AssertionError.
    """
    space = SPACES[op]
    fmt = formats.get(found.arch.e4m3)
    target = found.target.name
    moved = kernels.OPS[op].bytes_moved(kernels.Row(op, shape, torch.bfloat16, None, None))
    every = list(space.configs(shape, found.target.wave_size))
    if len(every) > most:
        kept = random.Random(kernels.SEED).sample(range(len(every)), most)
        every = [every[n] for n in sorted(kept)]
    if jobs > 1:
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_compile, *zip(*((op, shape, fmt.name, every[n::jobs]) for n in range(jobs)), strict=True)))
    inputs = _inputs(op, shape, where, timing.rotations(moved))
    sample = space.sample(inputs[0])
    expected = space.reference(sample, fmt)
    copy = timing.copy_probe(where)
    candidates, configs = [copy], {}
    for config in every:
        name = _name(config)
        try:
            wrong = _differs(space, sample, expected, fmt, config)
        except RuntimeError as error:
            print(f"{op} {name} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        assert not wrong, f"{config} differs from the reference on {shape}"
        configs[name] = config
        calls = [lambda x=x, c=config: space.launch(x, fmt, c, target) for x in inputs]
        candidates.append(timing.Candidate(name, calls, moved))
    timed = timing.measure(candidates, rounds)
    rows = [
        {
            "config": {n: v for n, v in asdict(configs[c.name]).items() if n != "measured"},
            "us": timed[c.name].median_ns / 1e3,
            "share_of_copy": timing.share_of_copy(timed[c.name], moved, timed["copy"], copy.bytes_moved),
        }
        for c in candidates[1:]
    ]
    return sorted(rows, key=lambda row: row["us"])


def compromise(shapes: Sequence[list[dict[str, object]]]) -> dict[str, object]:
    """The configuration whose geometric mean of slowdown against each shape's best is smallest."""
    slowdowns: dict[str, list[float]] = {}
    for rows in shapes:
        for row in rows:
            slowdowns.setdefault(json.dumps(row["config"]), []).append(row["us"] / rows[0]["us"])
    everywhere = {name: s for name, s in slowdowns.items() if len(s) == len(shapes)}
    best = min(everywhere, key=lambda name: sum(math.log(s) for s in everywhere[name]))
    mean = math.exp(sum(math.log(s) for s in everywhere[best]) / len(shapes))
    return {"config": json.loads(best), "geomean_slowdown": mean}


def _name(config: Config) -> str:
    """A configuration's values in the order of its fields: 32/512/16/1/4/0/0."""
    return "/".join(str(int(value)) for name, value in asdict(config).items() if name != "measured")


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x"))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["grouped_gemm"]:  # judged by TFLOPS and by a bound, not by bytes and bits
        from suites.perf import grouped_gemm

        return grouped_gemm.sweep(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m suites.perf.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=sorted(SPACES))
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="MxK", help="default: the op's own list")
    parser.add_argument("--rounds", type=int, default=10, help="samples a configuration (default 10)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1)")
    parser.add_argument("--most", type=int, default=120, help="configurations a shape, at most (default 120)")
    parser.add_argument("--shown", type=int, default=6, help="configurations to print a shape (default 6)")
    parser.add_argument("--json", type=Path, help="write every time and where it comes from to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible; configurations are timed on one", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    space = SPACES[options.op]
    by_class: dict[str, list[list[dict[str, object]]]] = {}
    results = []
    for shape in options.shapes or space.shapes:
        rows = sweep_shape(options.op, shape, where, found, options.rounds, options.jobs, options.most)
        by_class.setdefault(space.size_class(shape), []).append(rows)
        results.append({"shape": list(shape), "rows": rows})
        case = kernels.Row(options.op, shape, torch.bfloat16, None, None).case(found.arch.e4m3)
        print(f"{case}: {len(rows)} configurations, worst {rows[-1]['us']:.1f} us; {', '.join(rows[0]['config'])}")
        for row in rows[: options.shown]:
            values = "/".join(str(int(value)) for value in row["config"].values())
            print(f"    {values:32} {row['us']:8.1f} us {row['share_of_copy']:.3f} of copy", flush=True)
    best = {name: compromise(shapes) for name, shapes in by_class.items()}
    for name, row in best.items():
        print(f"{options.op} {name}: {row['config']}, {row['geomean_slowdown']:.3f} of each shape's best")
    if options.json:
        document = {
            "provenance": kernels.provenance(where, found),
            "op": options.op,
            "target": found.target.name,
            "format": found.arch.e4m3,
            "shapes": results,
            "compromise": best,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
