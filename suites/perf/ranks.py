"""Launch configurations ranked without a GPU, by their machine code: `python -m suites.perf.sweep OP --static ARCH`.

The space is the one that a GPU would be swept with, for that arch. Of each size class a seeded sample, and the row that
the table has today, is compiled at the class's first shape, with the Triton that is installed; the best of them at its
other shapes too, where the worst counts. What the compiler refuses, and what no compute unit can hold, is counted and
left out. The rest is ranked by, in this order:

    spilled registers                      fewer
    1- and 2-byte memory instructions      fewer in the hot loop (harness/isa: the loops that touch device memory, or
                                           a kernel without one as a whole)
    bytes a memory instruction             more, loads and stores of the hot loop together, to the nearest 4: the store
                                           of a scale beside eight of codes makes those no narrower
    waves a SIMD                           more, as registers and LDS allow
    chunks held in registers               more: they are read once, others twice
    instructions a byte loaded             fewer in the hot loop, to the nearest tenth

Of equals today's row goes first, so that a table changes for a reason. An op of several kernels has the sum of what is
counted and the least of the waves. None of this is a time: a rank says that nothing known to be slow is in the code,
and "done" for speed is only what a GPU has timed.
"""

from __future__ import annotations

import datetime
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8stack import device
from fp8stack.command import show
from harness.run import checkout_state
from suites.perf import kernels, static, sweep

KEPT = 10  # rows a size class in the file, and configurations that are compiled at every shape


@dataclass(frozen=True)
class Rank:
    """What a configuration is ranked by, and beside it the registers and LDS that its waves follow from."""

    spills: int
    narrow: int
    bytes_an_access: float
    waves: float
    held: int
    instructions_a_byte: float
    registers: int
    lds_bytes: int

    @property
    def key(self) -> tuple[float, ...]:
        """Smaller is better."""
        wide, work = round(self.bytes_an_access / 4), round(self.instructions_a_byte, 1)
        return (self.spills, self.narrow, -wide, -self.waves, -self.held, work)

    def worst(self, other: Rank) -> Rank:
        """The worse of each, for a configuration at two shapes."""
        return Rank(
            max(self.spills, other.spills),
            max(self.narrow, other.narrow),
            min(self.bytes_an_access, other.bytes_an_access),
            min(self.waves, other.waves),
            min(self.held, other.held),
            max(self.instructions_a_byte, other.instructions_a_byte),
            max(self.registers, other.registers),
            max(self.lds_bytes, other.lds_bytes),
        )


def rank(codes: Sequence[static.Code], config: Mapping[str, int]) -> Rank:
    """The rank of the kernels of one launch with a configuration."""
    facts = [code.facts for code in codes]

    def total(*names: str) -> int:
        return sum(fact[name] for fact in facts for name in names)

    loaded = sum(fact["mean_load_bytes"] * fact["load_instructions"] for fact in facts)
    stored = sum(fact["mean_store_bytes"] * fact["store_instructions"] for fact in facts)
    return Rank(
        spills=total("vgpr_spills", "sgpr_spills"),
        narrow=total("narrow_memory_instructions"),
        bytes_an_access=round((loaded + stored) / total("load_instructions", "store_instructions"), 2),
        waves=min(fact["waves_per_simd"] for fact in facts),
        held=config.get("held", 0),
        instructions_a_byte=round(total("region_instructions") / loaded, 3),
        registers=max(fact["vgprs"] for fact in facts),
        lds_bytes=max(fact["lds_bytes"] for fact in facts),
    )


def rejected(answer: static.Answer, arch: device.Arch) -> str | None:
    """Why a configuration cannot run on the arch: the compiler, or a limit of the arch; None where it can."""
    if answer.refused is not None:
        return f"the compiler: {answer.refused}"
    for code in answer.codes:
        limits = {"vgprs": arch.thread_registers, "lds_bytes": arch.lds_bytes}
        for fact, limit in limits.items():
            if code.facts[fact] > limit:
                return f"{fact} above {limit}"
        if not code.facts["waves_per_simd"]:
            return "no compute unit holds a group of it"
    return None


@dataclass(frozen=True)
class Ranked:
    """One size class. rows: (configuration, rank), best first. rejected: reason -> how many. compiled: of how many."""

    shapes: list[sweep.Shape]
    rows: list[tuple[dict[str, int], Rank]]
    rejected: Counter[str]
    compiled: int
    triton: str


def rank_class(op: str, shapes: list[sweep.Shape], arch: device.Arch, most: int, jobs: int) -> Ranked:
    """Rank a sample of the configurations of a size class."""
    space = sweep.SPACES[op]

    def ask(shape: sweep.Shape, configs: Sequence[dict[str, int]]) -> list[static.Answer]:
        return static.compile_all(
            [static.Job(op, shape, "bf16", space.fmt(arch), config, arch.name) for config in configs], jobs
        )

    configs = [sweep.fields(config) for config in sweep.sampled(space, shapes, arch, most)]
    answers = ask(shapes[0], configs)
    reasons = [rejected(answer, arch) for answer in answers]
    rows = [
        (config, rank(answer.codes, config))
        for config, answer, reason in zip(configs, answers, reasons, strict=True)
        if reason is None
    ]
    rows = sorted(rows, key=lambda row: row[1].key)[:KEPT]
    for shape in shapes[1:]:
        again = ask(shape, [config for config, _ in rows])
        reasons += [rejected(answer, arch) for answer in again]
        rows = [
            (config, before.worst(rank(answer.codes, config)))
            for (config, before), answer in zip(rows, again, strict=True)
            if rejected(answer, arch) is None
        ]
    assert rows, f"{op} {shapes}: nothing is left of {len(configs)} configurations: {Counter(filter(None, reasons))}"
    return Ranked(
        shapes,
        sorted(rows, key=lambda row: row[1].key),
        Counter(reason for reason in reasons if reason is not None),
        len(configs),
        next(answer.triton for answer in answers if answer.refused is None),
    )


def _provenance(arch: device.Arch, triton: str) -> dict[str, object]:
    commit, dirty = checkout_state(static.ROOT)
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "arch": arch.name,
        "torch": torch.__version__,
        "triton": triton,
        "seed": kernels.SEED,
    }


def _told(config: dict[str, int], found: Rank) -> str:
    values = "/".join(str(int(value)) for value in config.values())
    return (
        f"    {values:32} {found.spills:3} spills {found.narrow:3} narrow {found.bytes_an_access:6.2f} bytes an access "
        f"{found.waves:5.2f} waves {found.instructions_a_byte:6.3f} instructions a byte"
    )


def main(
    op: str, arch_name: str, shapes: Sequence[sweep.Shape], most: int, jobs: int, shown: int, file: Path | None
) -> int:
    """Rank, print and write; the part of sweep.main() that needs no GPU."""
    arch, space = device.lookup(arch_name), sweep.SPACES[op]
    by_class: dict[str, list[sweep.Shape]] = {}
    for shape in shapes or space.shapes:
        by_class.setdefault(space.size_class(shape), []).append(shape)
    found: dict[str, Ranked] = {}
    for name, members in by_class.items():
        found[name] = one = rank_class(op, members, arch, most, jobs)
        sizes = ", ".join("x".join(map(str, shape)) for shape in members)
        show(f"{op} {name} ({sizes}), {arch.name}: {one.compiled} configurations; {', '.join(one.rows[0][0])}")
        for reason, count in one.rejected.most_common():
            print(f"    {count} rejected: {reason}", file=sys.stderr)
        for row in one.rows[:shown]:
            show(_told(*row))
    for name, one in found.items():
        show(f"{op} {name}: {one.rows[0][0]}, not timed")
    if file:
        document = {
            "kind": "static",
            "provenance": _provenance(arch, next(iter(found.values())).triton),
            "op": op,
            "target": arch.name,
            "format": space.fmt(arch),
            "shapes": [{"shape": list(shape)} for members in by_class.values() for shape in members],
            "classes": {
                name: {
                    "compiled": one.compiled,
                    "rejected": dict(one.rejected),
                    "rows": [{"config": config, **asdict(best)} for config, best in one.rows],
                }
                for name, one in found.items()
            },
            "compromise": {name: {"config": one.rows[0][0], **asdict(one.rows[0][1])} for name, one in found.items()},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(sweep.as_text(document), encoding="utf-8")
    return 0
