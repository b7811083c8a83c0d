"""Every launch configuration that fits this GPU, timed: `python -m suites.perf.sweep OP [--shapes MxK ...]`.

The space is not a hand list: the powers of two for tiles and warps, cut by what the arch allows (device.ARCHS: lanes a
wave, threads a block, registers of a thread and of all that run together, LDS for a tile that leaves turned). Each
configuration is compiled, by several processes at once into Triton's cache, checked bit-equal to the reference once,
then timed in turns with a copy. Printed and, with `--json FILE`, written: the best configuration a shape, and the best
compromise a size class, which is the smallest geometric mean of slowdown against each shape's best. The tables in
fp8stack/kernels come from such files and name them (tables.py).

Without a GPU, `--static ARCH` ranks the same space by the machine code that the configurations compile to (ranks.py).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fp8stack import _triton, device, formats
from fp8stack.command import show
from fp8stack.kernels import (
    blockwise,
    column_maxima,
    colwise,
    experts,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
)
from harness.isa import occupancy
from suites.perf import kernels, processes, timing

MAX_ELEMENTS_A_THREAD = 128  # held as loaded, two bf16 a register; beyond it an sm_90 thread (255 registers) spills
MIN_ELEMENTS_A_CHUNK = 16  # of a thread: below it no thread can issue one 16-byte store of codes
LOADED = 8  # bf16 elements of one 16-byte load
CODE_REGISTERS = 56  # what a transposing kernel needs beside the tiles that it holds; found by cross-compiling

Shape = tuple[int, ...]
Config = Any  # the dataclass of a kernel's launch table


@dataclass(frozen=True)
class Space:
    """What an op can be launched with.

    module, table: the file of its kernel and the name of its launch table there. configs: of a shape and the arch's
    limits, in a fixed order. launch: of inputs, format, configuration, target. sample: fewer inputs that need the same
    kernel, for the comparison with the reference. shapes: the op's own list. ocp: its codes are OCP on every arch.
    """

    module: ModuleType
    table: str
    configs: Callable[[Shape, device.Arch], Iterator[Config]]
    launch: Callable[[kernels.Inputs, formats.Format, Config, str], kernels.Inputs]
    reference: Callable[[kernels.Inputs, formats.Format], kernels.Inputs]
    sample: Callable[[kernels.Inputs], kernels.Inputs]
    size_class: Callable[[Shape], str]
    shapes: tuple[Shape, ...]
    ocp: bool = False

    @property
    def rows(self) -> dict[tuple[str, str], Config]:
        """The launch table: (target, size class) -> configuration."""
        return getattr(self.module, self.table)

    @property
    def make(self) -> Callable[..., Config]:
        """The dataclass of its configurations."""
        return type(next(iter(self.rows.values())))

    def fmt(self, arch: device.Arch) -> str:
        """The format that it is swept with."""
        return "e4m3fn" if self.ocp else arch.e4m3


def _rowwise_configs(shape: Shape, arch: device.Arch) -> Iterator[rowwise.RowwiseConfig]:
    k = shape[-1]
    whole = 1 << (k - 1).bit_length()
    for block in (512 << n for n in range(6)):
        chunks = -(-k // block)
        for rows in (1, 2, 4, 8, 16):
            for warps in (1, 2, 4, 8, 16):
                threads = warps * arch.wave_size
                a_chunk = rows * block / threads
                fits = threads <= arch.threads and a_chunk >= MIN_ELEMENTS_A_CHUNK
                if block <= whole and fits and a_chunk * chunks <= MAX_ELEMENTS_A_THREAD:
                    yield rowwise.RowwiseConfig(rows, block, warps, "")


def _transposed_configs(shape: Shape, arch: device.Arch) -> Iterator[experts.TransposedConfig]:
    """A thread has one 16-byte load a part of each chunk; what it holds must leave registers for the code."""
    n = shape[1]
    for columns in (16, 32, 64, 128):
        for parts in (8, 16):
            for warps in (4, 8, 16):
                threads = warps * arch.wave_size
                rows = parts * threads * LOADED // columns
                chunks = -(-n // rows)
                if rows >= 2 * n or threads > arch.threads or rows * columns > arch.lds_bytes:
                    continue
                registers = parts * LOADED // 2  # of a thread for a chunk of bf16
                for held in sorted({0, min(chunks, 1), min(chunks, 64 // registers), min(chunks, 96 // registers)}):
                    for programs in (0, 1, 2, 3, 4):
                        a_thread = min(arch.registers // max(programs, 1) // threads, arch.thread_registers)
                        fits = registers * max(held, 1) + CODE_REGISTERS <= a_thread
                        if not fits or (programs and a_thread == arch.thread_registers):
                            continue
                        for hints in (False, True) if chunks > held else (False,):
                            yield experts.TransposedConfig(columns, rows, parts, held, warps, programs, hints, "")


def _column_maxima_configs(k: int, turned: Sequence[Config], arch: device.Arch) -> Iterator[column_maxima.BothConfig]:
    """Launches follow one another, so the best of each is the best of all: rows vary beside one tile of the turned cast
    (of its own configurations), then tiles beside one way to take rows. A thread has 16 elements of each chunk.
    """
    rows = []
    for warps in (1, 2, 4, 8, 16):
        threads = warps * arch.wave_size
        block = MIN_ELEMENTS_A_CHUNK * threads
        chunks = -(-k // block)
        a_row = MIN_ELEMENTS_A_CHUNK * chunks  # elements of a thread, whose maxima take a register each
        if threads > arch.threads or block * chunks >= 2 * k + 512:
            continue
        for row_rows in (1, 2, 4, 8):
            for ahead in (False, True):
                held = row_rows * (a_row // 2 * (1 + ahead) + MIN_ELEMENTS_A_CHUNK // 2)
                if a_row + held + CODE_REGISTERS <= min(arch.registers // threads, 224):
                    rows.append((row_rows, block, warps, ahead))
    tile = min(turned, key=lambda t: (abs(t.rows * t.columns - 16384), abs(t.columns - 64), -t.parts, t.programs))
    beside = min(rows, key=lambda row: (abs(row[2] - 4), row))
    for span in (16, 32, 64, 128):
        for row in rows:
            for hints in (False, True):
                yield _both_config(span, row, hints, tile)
    for other in turned:
        if other is not tile:
            yield _both_config(64, beside, False, other)


def _both_config(span: int, row: tuple[int, int, int, bool], hints: bool, tile: Config) -> column_maxima.BothConfig:
    return column_maxima.BothConfig(
        span, *row, hints, tile.rows, tile.columns, tile.parts, tile.num_warps, tile.programs, ""
    )


def _both_configs(shape: Shape, arch: device.Arch) -> Iterator[column_maxima.BothConfig]:
    turned = [tile for tile in _turned_configs(shape, arch) if tile.rows >= 64 and not tile.hints]
    return _column_maxima_configs(shape[2], turned, arch)


def _tensorwise_configs(shape: Shape, arch: device.Arch) -> Iterator[tensorwise.TensorwiseConfig]:
    for amax_elements in (4096, 8192, 16384, 32768):
        for amax_warps in (4, 8, 16):
            if not MIN_ELEMENTS_A_CHUNK <= amax_elements / amax_warps / arch.wave_size <= MAX_ELEMENTS_A_THREAD:
                continue
            for fused in (False, True):
                for elements in (4096, 8192, 16384):
                    for warps in (2, 4, 8):
                        if not MIN_ELEMENTS_A_CHUNK <= elements / warps / arch.wave_size <= MAX_ELEMENTS_A_THREAD // 2:
                            continue
                        for hints in (False, True):
                            yield tensorwise.TensorwiseConfig(
                                amax_elements, amax_warps, fused, 1, elements, 1, warps, 0, hints, ""
                            )


def _turned_configs(shape: Shape, arch: device.Arch) -> Iterator[tensorwise.TensorwiseConfig]:
    for columns in (32, 64, 128):
        for parts in (8, 16):
            for warps in (2, 4, 8):
                for programs in (0, 4, 6, 8):
                    if programs and arch.registers // programs // (warps * arch.wave_size) < 64 + CODE_REGISTERS:
                        continue
                    for loads in (1, 2):  # 16-byte loads of a thread a part
                        rows = loads * parts * warps * arch.wave_size * LOADED // columns
                        if loads * parts > 16 or rows > 1024 or rows * columns > arch.lds_bytes:
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
        tensorwise,
        "TENSORWISE_CONFIGS",
        _tensorwise_configs if layout == "row" else _turned_configs,
        launch,
        reference,
        _few_rows,
        lambda shape: layout,
        ((14336, 4096), (8192, 4096), (8192, 14336), (16640, 5120)) if layout == "row" else ((14336, 4096),),
    )


def _colwise_configs(shape: Shape, arch: device.Arch) -> Iterator[colwise.ColwiseConfig]:
    """A thread has one 16-byte load a part of each chunk; held chunks must leave registers for the code."""
    for columns in (32, 64, 128):
        for warps in (2, 4, 8, 16):
            for parts in (8, 16):
                threads = warps * arch.wave_size
                rows = parts * threads * LOADED // columns
                if threads > arch.threads or rows < 64 or rows > 2048:
                    continue
                registers = parts * LOADED // 2
                for held in (0, 1, 2, 3):
                    for programs in sorted({limit // threads for limit in (256, 384, 512, 768) if limit >= threads}):
                        a_thread = min(arch.registers // (programs * threads), arch.thread_registers)
                        if registers * max(held, 1) + CODE_REGISTERS <= a_thread:
                            yield colwise.ColwiseConfig(columns, rows, parts, held, warps, programs, "")


def _block_configs(
    make: Callable[..., Config], rows: int, columns: int, turned: bool
) -> Callable[..., Iterator[Config]]:
    """Tiles of whole blocks of rows x columns, whatever the shape."""

    def configs(shape: Shape, arch: device.Arch) -> Iterator[Config]:
        for tile_rows in (1 << n for n in range(9)):
            for tile_columns in (1 << n for n in range(5, 12)):
                if tile_rows % rows or tile_columns % columns or (turned and tile_rows < 64):
                    continue
                if turned and tile_rows * tile_columns > arch.lds_bytes:
                    continue
                for parts in (4, 8, 16) if turned else (1,):
                    for warps in (1, 2, 4, 8, 16):
                        threads = warps * arch.wave_size
                        if threads > arch.threads:
                            continue
                        a_thread = tile_rows * tile_columns / threads
                        loads = a_thread / LOADED / parts  # of a thread a part
                        if a_thread > MAX_ELEMENTS_A_THREAD or a_thread < MIN_ELEMENTS_A_CHUNK or loads < 1:
                            continue
                        for programs in (0, 4, 6, 8):
                            a_register = arch.registers // max(programs, 1) // threads
                            if programs and (a_register < a_thread + CODE_REGISTERS / 2 or a_register > 200):
                                continue
                            yield make(tile_rows, tile_columns, parts, warps, programs, "")

    return configs


def _blockwise_space(unit: str, column_major: bool, shapes: tuple[Shape, ...]) -> Space:
    return Space(
        blockwise,
        "BLOCKWISE_CONFIGS",
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
        mxfp8,
        "MXFP8_CONFIGS",
        _block_configs(mxfp8.Mxfp8Config, *unit, dim == 0),
        lambda inputs, fmt, config, target: mxfp8.launch_mxfp8(*inputs, fmt, "floor", dim, config, target),
        lambda inputs, fmt: mxfp8.quantize_mxfp8_reference(*inputs, fmt, "floor", dim),
        _few_rows,
        lambda shape: mxfp8.DIRECTIONS[dim],
        _ACTIVATIONS,
        ocp=True,
    )


def _rowwise_grouped_configs(shape: Shape, arch: device.Arch) -> Iterator[rowwise_grouped.RowwiseGroupedConfig]:
    """A thread has 16 neighbouring elements, or some times as many, of each chunk that is held."""
    for block in (128, 256, 512):
        for warps in (1, 2, 4):
            for elements in (16, 32, 64):
                rows = warps * arch.wave_size * elements // block
                for held in (1, 2, 4, 8):
                    registers = elements * held // 2  # of a thread for bf16
                    for threads in (512, 768, 1024) if rows else ():
                        fits = registers + CODE_REGISTERS / 2 <= arch.registers // threads and block * held <= 2048
                        if fits:
                            programs = threads // (warps * arch.wave_size)
                            yield rowwise_grouped.RowwiseGroupedConfig(rows, block, held, warps, programs, "")


def _rowwise_and_colwise_configs(shape: Shape, arch: device.Arch) -> Iterator[column_maxima.BothConfig]:
    """As for experts; but colwise.py's tiles exchange nothing between threads, so 16 codes need 16 parts."""
    turned = [tile for tile in _turned_configs(shape, arch) if tile.rows >= 64 and tile.parts == 16 and not tile.hints]
    yield column_maxima.BothConfig(0, 0, 0, 0, False, False, 0, 0, 0, 0, 0, "")  # apart
    yield from _column_maxima_configs(shape[1], turned, arch)


def _few_rows(inputs: kernels.Inputs) -> kernels.Inputs:
    return (inputs[0][:992],)


def _all(inputs: kernels.Inputs) -> kernels.Inputs:
    return inputs


def _two_experts(inputs: kernels.Inputs) -> kernels.Inputs:
    return (inputs[0][:2],)


_EXPERTS = ((64, 1408, 2048), (64, 2048, 1408), (16, 5120, 8192), (32, 2048, 7168), (32, 7168, 2048))
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
        rowwise,
        "ROWWISE_CONFIGS",
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
    # rowwise's kernel, over E * N rows
    "experts": Space(
        rowwise,
        "ROWWISE_CONFIGS",
        _rowwise_configs,
        lambda inputs, fmt, config, target: rowwise.launch_rowwise(inputs[0].flatten(0, 1), fmt, True, config, target),
        lambda inputs, fmt: rowwise.quantize_rowwise_reference(inputs[0].flatten(0, 1), fmt),
        _two_experts,
        lambda shape: rowwise.size_class(shape[2]),
        _EXPERTS,
    ),
    "colwise": Space(
        colwise,
        "COLWISE_CONFIGS",
        _colwise_configs,
        lambda inputs, fmt, config, target: colwise.launch_colwise_grouped(*inputs, fmt, True, 16, config, target),
        lambda inputs, fmt: colwise.quantize_colwise_grouped_reference(*inputs, fmt),
        _all,
        lambda shape: colwise.size_class(shape[2]),
        ((16640, 2048, 64), (16640, 5120, 64), (16640, 5120, 128), (32768, 7168, 32)),
    ),
    "colwise_pair": Space(
        colwise,
        "COLWISE_CONFIGS",
        _colwise_configs,
        lambda inputs, fmt, config, target: colwise.launch_colwise_grouped_pair(*inputs, fmt, True, 16, config, target),
        lambda inputs, fmt: colwise.quantize_colwise_grouped_pair_reference(*inputs, fmt),
        _all,
        lambda shape: colwise.size_class(shape[2]),
        ((16640, 2048, 64), (16640, 5120, 64), (16640, 5120, 128), (32768, 7168, 32)),
    ),
    "rowwise_grouped": Space(
        rowwise_grouped,
        "ROWWISE_GROUPED_CONFIGS",
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
        rowwise_and_colwise,
        "ROWWISE_AND_COLWISE_CONFIGS",
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
        experts,
        "TRANSPOSED_CONFIGS",
        _transposed_configs,
        lambda inputs, fmt, config, target: experts.launch_transposed(*inputs, fmt, True, config, target),
        lambda inputs, fmt: experts.quantize_experts_transposed_reference(*inputs, fmt),
        _two_experts,
        lambda shape: experts.size_class(shape[1]),
        _EXPERTS,
    ),
    "experts_both": Space(
        experts,
        "BOTH_CONFIGS",
        _both_configs,
        lambda inputs, fmt, config, target: experts.launch_both(*inputs, fmt, True, config, target),
        lambda inputs, fmt: experts.quantize_experts_both_reference(*inputs, fmt),
        _two_experts,
        lambda shape: column_maxima.width_class(shape[2], torch.bfloat16),
        _EXPERTS,
    ),
}


def differs(
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


def compile_configs(op: str, shape: Shape, fmt: str, configs: Sequence[Config]) -> None:
    """In a process of its own: launch each configuration once, for what that leaves in Triton's cache."""
    where = torch.device("cuda", torch.cuda.current_device())
    space = SPACES[op]
    inputs = space.sample(inputs_of(op, shape, where, 1)[0])
    target = device.detect(where).target.name
    for config in configs:
        try:
            space.launch(inputs, formats.get(fmt), config, target)
            torch.cuda.synchronize()
        except Exception as error:  # the process that times it meets it again, and reports it
            print(f"{op} {config}: {type(error).__name__}", file=sys.stderr)


def inputs_of(op: str, shape: Shape, where: torch.device, count: int) -> list[kernels.Inputs]:
    """`count` sets of seeded bf16 inputs."""
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    row = kernels.Row(op, shape, torch.bfloat16, None, None)
    return [kernels.OPS[op].inputs(row, generator) for _ in range(count)]


def sampled(space: Space, shapes: Sequence[Shape], arch: device.Arch, most: int) -> list[Config]:
    """The configurations to try on the shapes of one size class: today's row, and those that every shape allows.

    Of more than `most` the first and a seeded sample, the same for each shape: a compromise is among those that ran on
    all of them.
    """
    allowed = [set(map(_fields, space.configs(shape, arch))) for shape in shapes]
    every = [one for one in map(_fields, space.configs(shapes[0], arch)) if all(one in among for among in allowed)]
    if len(every) > most:
        kept = random.Random(kernels.SEED).sample(range(len(every)), most)
        every = [every[place] for place in sorted({0, *kept})]
    today = _fields(space.rows[arch.name, space.size_class(shapes[0])])
    return [space.make(**dict(one), measured="") for one in dict.fromkeys([today, *every])]


def _fields(config: Config) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in asdict(config).items() if name != "measured")


def fields(config: Config) -> dict[str, int]:
    """A configuration without its `measured`."""
    return dict(_fields(config))


def sweep_shape(
    op: str,
    shape: Shape,
    where: torch.device,
    found: device.Detected,
    every: Sequence[Config],
    rounds: int,
    jobs: int,
) -> list[dict[str, object]]:
    """Time configurations on bf16 inputs of a shape: rows of {config, us, share_of_copy}, fastest first.

    One that this GPU refuses (registers, shared memory) is named on stderr and left out; one that gives wrong bits
    raises AssertionError.
    """
    space = SPACES[op]
    fmt = formats.get(space.fmt(found.arch))
    moved = kernels.OPS[op].bytes_moved(kernels.Row(op, shape, torch.bfloat16, None, None))
    target = found.target.name
    if jobs > 1:
        with processes.pool(jobs) as pool:
            list(
                pool.map(
                    compile_configs, *zip(*((op, shape, fmt.name, every[n::jobs]) for n in range(jobs)), strict=True)
                )
            )
    inputs = inputs_of(op, shape, where, timing.rotations(moved))
    sample = space.sample(inputs[0])
    expected = space.reference(sample, fmt)
    copy = timing.copy_probe(where)
    candidates, configs = [copy], {}
    for config in every:
        name = _name(config)
        try:
            wrong = differs(space, sample, expected, fmt, config)
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
            "config": fields(configs[c.name]),
            "us": timed[c.name].median_ns / 1e3,
            "share_of_copy": timing.share_of_copy(timed[c.name], moved, timed["copy"], copy.bytes_moved),
        }
        for c in candidates[1:]
    ]
    return sorted(rows, key=lambda row: row["us"])


def by_slowdown(shapes: Sequence[list[dict[str, object]]]) -> list[tuple[dict[str, object], float]]:
    """Configurations that ran on every shape, with their geometric mean of slowdown against its best; best first."""
    slowdowns: dict[str, list[float]] = {}
    for rows in shapes:
        for row in rows:
            slowdowns.setdefault(json.dumps(row["config"]), []).append(row["us"] / rows[0]["us"])
    means = {
        name: math.exp(sum(math.log(s) for s in found) / len(shapes))
        for name, found in slowdowns.items()
        if len(found) == len(shapes)
    }
    return [(json.loads(name), means[name]) for name in sorted(means, key=means.__getitem__)]


def compromise(shapes: Sequence[list[dict[str, object]]]) -> dict[str, object]:
    """The configuration whose geometric mean of slowdown against each shape's best is smallest."""
    config, mean = by_slowdown(shapes)[0]
    return {"config": config, "geomean_slowdown": mean}


def as_text(document: dict[str, object]) -> str:
    """A sweep as JSON, a row a line: an object that begins with its configuration stands on one."""
    rows = re.compile(r'\{\n *"config": \{[^}]*\}[^{}]*\}')
    return rows.sub(lambda found: " ".join(found.group().split()), json.dumps(document, indent=1)) + "\n"


def _name(config: Config) -> str:
    """A configuration's values in the order of its fields: 32/512/16/1/4/0/0."""
    return "/".join(str(int(value)) for value in fields(config).values())


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
    readable = [name for name in _triton.TARGETS if name in occupancy.UNITS]
    parser.add_argument("--static", metavar="ARCH", choices=readable, help="no GPU: rank by machine code for ARCH")
    options = parser.parse_args(argv)
    if options.static:
        from suites.perf import ranks  # which imports this module

        return ranks.main(
            options.op, options.static, options.shapes, options.most, options.jobs, options.shown, options.json
        )
    if not torch.cuda.is_available():
        print("no GPU is visible; configurations are timed on one; --static ARCH ranks without one", file=sys.stderr)
        return 4
    where = torch.device("cuda", torch.cuda.current_device())
    found = device.detect(where)
    space = SPACES[options.op]
    by_class: dict[str, list[Shape]] = {}
    for shape in options.shapes or space.shapes:
        by_class.setdefault(space.size_class(shape), []).append(shape)
    results, timed = [], {}
    for name, shapes in by_class.items():
        every = sampled(space, shapes, found.target, options.most)
        for shape in shapes:
            rows = sweep_shape(options.op, shape, where, found, every, options.rounds, options.jobs)
            timed.setdefault(name, []).append(rows)
            results.append({"shape": list(shape), "rows": rows})
            case = kernels.Row(options.op, shape, torch.bfloat16, None, None).case(space.fmt(found.arch))
            show(f"{case}: {len(rows)} configurations, worst {rows[-1]['us']:.1f} us; {', '.join(rows[0]['config'])}")
            for row in rows[: options.shown]:
                values = "/".join(str(int(value)) for value in row["config"].values())
                show(f"    {values:32} {row['us']:8.1f} us {row['share_of_copy']:.3f} of copy")
    best = {name: compromise(shapes) for name, shapes in timed.items()}
    for name, row in best.items():
        show(f"{options.op} {name}: {row['config']}, {row['geomean_slowdown']:.3f} of each shape's best")
    if options.json:
        document = {
            "provenance": kernels.provenance(where, found),
            "op": options.op,
            "target": found.target.name,
            "format": space.fmt(found.arch),
            "shapes": results,
            "compromise": best,
        }
        options.json.write_text(as_text(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
