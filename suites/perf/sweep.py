"""Every launch configuration that fits this GPU, timed: `python -m suites.perf.sweep OP [--shapes MxK ...]`.

The space is not a hand list: the powers of two for rows, block and warps, cut by what the arch allows (threads a block,
registers a thread). Each configuration is compiled, checked bit-equal to the reference once, then timed in turns with a
copy. Printed and, with `--json FILE`, written: the best configuration a shape, and the best compromise a size class,
which is the smallest geometric mean of slowdown against each shape's best. The tables in fp8stack/kernels come from
such a file and name it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8stack import device, formats
from fp8stack.kernels import rowwise
from suites.perf import kernels, timing

MAX_THREADS = 1024
MAX_ELEMENTS_A_THREAD = 128  # held as loaded, two bf16 a register; beyond it an sm_90 thread (255 registers) spills
MIN_ELEMENTS_A_CHUNK = 16  # of a thread: below it no thread can issue one 16-byte store of codes


@dataclass(frozen=True)
class Space:
    """What an op can be launched with: `configs(k, wave)` in a fixed order, and `launch(x, fmt, config, target)`."""

    configs: Callable[[int, int], Iterator[rowwise.RowwiseConfig]]
    launch: Callable[[torch.Tensor, formats.Format, rowwise.RowwiseConfig, str], tuple[torch.Tensor, torch.Tensor]]
    reference: Callable[[torch.Tensor, formats.Format], tuple[torch.Tensor, torch.Tensor]]
    size_class: Callable[[int], str]
    shapes: tuple[tuple[int, int], ...]


def _rowwise_configs(k: int, wave: int) -> Iterator[rowwise.RowwiseConfig]:
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


def _launch_rowwise(
    x: torch.Tensor, fmt: formats.Format, config: rowwise.RowwiseConfig, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return rowwise.launch_rowwise(x, fmt, True, config, target)


SPACES: dict[str, Space] = {
    "rowwise": Space(
        _rowwise_configs,
        _launch_rowwise,
        rowwise.quantize_rowwise_reference,
        rowwise.size_class,
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
    )
}


def _check(space: Space, x: torch.Tensor, fmt: formats.Format, config: rowwise.RowwiseConfig, target: str) -> None:
    """Raise AssertionError, naming the configuration, unless it is bit-equal to the reference."""
    expected, expected_scale = space.reference(x, fmt)
    codes, scale = space.launch(x, fmt, config, target)
    same = torch.equal(expected.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(
        expected_scale.view(torch.int32), scale.view(torch.int32)
    )
    assert same, f"{config} differs from the reference on {tuple(x.shape)}"


def sweep_shape(
    space: Space, m: int, k: int, where: torch.device, found: device.Detected, rounds: int
) -> list[dict[str, object]]:
    """Time every configuration on a bf16 (m, k) input: rows of {config, us, share_of_copy}, fastest first."""
    fmt = formats.get(found.arch.e4m3)
    target = found.target.name
    moved = 3 * m * k + 4 * m
    generator = torch.Generator(device=where).manual_seed(kernels.SEED)
    inputs = [
        torch.randn(m, k, device=where, generator=generator).to(torch.bfloat16) for _ in range(timing.rotations(moved))
    ]
    copy = timing.copy_probe(where)
    candidates, configs = [copy], {}
    for config in space.configs(k, found.target.wave_size):
        _check(space, inputs[0][: min(m, 1000)], fmt, config, target)
        name = _name(asdict(config))
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


def _name(config: dict[str, int]) -> str:
    return f"{config['rows']}x{config['block']}/{config['num_warps']}"


def _shape(text: str) -> tuple[int, int]:
    m, _, k = text.partition("x")
    return int(m), int(k)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=sorted(SPACES))
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="MxK", help="default: the op's own list")
    parser.add_argument("--rounds", type=int, default=10, help="samples a configuration (default 10)")
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
    for m, k in options.shapes or space.shapes:
        rows = sweep_shape(space, m, k, where, found, options.rounds)
        by_class.setdefault(space.size_class(k), []).append(rows)
        results.append({"m": m, "k": k, "rows": rows})
        shown = ", ".join(f"{_name(r['config'])} {r['us']:.1f} us {r['share_of_copy']:.3f}" for r in rows[:4])
        print(
            f"{options.op} m{m} k{k} ({len(rows)} configurations): {shown}; worst {rows[-1]['us']:.1f} us", flush=True
        )
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
