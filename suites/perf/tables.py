"""The launch tables of the kernels, from the sweeps in baselines/: `python -m suites.perf.tables [--write]`.

A row of a table in fp8stack/kernels is either by hand, and says that nobody measured it, or comes from a file that
sweep.py wrote (`baselines/<platform or arch>/sweep-<op>.json`), and names it. Rows of the second kind stand between two
marker lines at the end of the table, where they replace those above. This command prints them, `--write` puts them
there; suites/unit/test_tables.py makes them again and compares.

Which row. Of several files for a (target, size class) one with times decides before one with static ranks, and of the
ops that share a table the first one in sweep.SPACES. In that file: the best compromise of the class that breaks no
rule of machine code. `--write` compiles each row that the table does not have yet, for every op of the table, in every
format and input type that the codegen suite compiles its kernels for; what breaks a rule goes into the file, under
`refused` with the reason and the Triton that said so, and the next best is tried; where all are refused the row by hand
stays. `--check` compiles the others too. A table is launched with every Triton that is supported: `--python PATH`, once
for each, names the interpreter of another environment, and a row stays that breaks no rule with any of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8stack import device
from fp8stack.command import show
from suites.perf import static, sweep

BASELINES = static.ROOT / "baselines"
BEGIN = "    # Swept, and in place of the rows above: written by `python -m suites.perf.tables --write`."
END = "    # End of the swept rows."
WIDTH = 120

Key = tuple[str, str]  # (target, size class)


@dataclass(frozen=True)
class Candidate:
    """A configuration of a size class: its fields without `measured`, and what the file says of it.

    slowdown: against the best of each shape, where the file has times.
    """

    config: dict[str, int]
    said: str
    slowdown: float | None = None


@dataclass(frozen=True)
class Swept:
    """One file. timed: it has times, not ranks by machine code. classes: candidates a size class, best first."""

    path: Path
    op: str
    target: str
    timed: bool
    shapes: dict[str, list[sweep.Shape]]
    classes: dict[str, list[Candidate]]
    refused: list[dict[str, Any]]

    def chosen(self, size_class: str) -> Candidate | None:
        """The best candidate that was not refused; None where all were: the row by hand stays."""
        no = [row["config"] for row in self.refused if row["size_class"] == size_class]
        return next((candidate for candidate in self.classes[size_class] if candidate.config not in no), None)


def _shares(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.2f}", f"{max(shares):.2f}"
    return f"{low} of a copy" if low == high else f"{low} to {high} of a copy"


def _timed(document: dict[str, Any], by_class: dict[str, list[int]]) -> dict[str, list[Candidate]]:
    """Candidates by times: those that ran on each shape of the class, by the geometric mean of slowdown."""
    found: dict[str, list[Candidate]] = {}
    for name, places in by_class.items():
        shapes = [document["shapes"][place]["rows"] for place in places]
        shares = [{json.dumps(row["config"]): row["share_of_copy"] for row in rows} for rows in shapes]
        found[name] = [
            Candidate(config, _shares([of[json.dumps(config)] for of in shares]), slowdown)
            for config, slowdown in sweep.by_slowdown(shapes)
        ]
    return found


def _ranked(document: dict[str, Any]) -> dict[str, list[Candidate]]:
    """Candidates by static ranks."""
    return {
        name: [Candidate(row["config"], "not timed") for row in found["rows"]]
        for name, found in document["classes"].items()
    }


def read(path: Path) -> Swept:
    """Read what sweep.py wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    op, timed = document["op"], document.get("kind") != "static"
    space = sweep.SPACES[op]
    # The first sweep of rowwise named its sizes m and k.
    shapes = [tuple(row["shape"] if "shape" in row else (row["m"], row["k"])) for row in document["shapes"]]
    places: dict[str, list[int]] = {}
    for place, shape in enumerate(shapes):
        places.setdefault(space.size_class(shape), []).append(place)
    return Swept(
        path=path,
        op=op,
        target=document["target"],
        timed=timed,
        shapes={name: [shapes[place] for place in found] for name, found in places.items()},
        classes=_timed(document, places) if timed else _ranked(document),
        refused=document.get("refused", []),
    )


def files(root: Path = BASELINES) -> list[Swept]:
    """Every sweep below baselines/: those that decide first."""
    order = list(sweep.SPACES)
    found = [read(path) for path in sorted(root.glob("*/sweep-*.json"))]
    timed = [(one.op, one.target) for one in found if one.timed]
    assert len(set(timed)) == len(timed), f"two files have times of one op and target: {sorted(timed)}; remove one"
    return sorted(found, key=lambda one: (not one.timed, order.index(one.op)))


def tables() -> dict[tuple[str, str], sweep.Space]:
    """Every launch table by (module, name), with a space that it belongs to."""
    return {(space.module.__name__, space.table): space for space in sweep.SPACES.values()}


def deciding(space: sweep.Space, found: Sequence[Swept]) -> dict[Key, Swept]:
    """(target, size class) of a table -> the file that decides its row, in the order of the table."""
    decided: dict[Key, Swept] = {}
    for one in found:
        if sweep.SPACES[one.op].rows is space.rows:
            for name in one.classes:
                decided.setdefault((one.target, name), one)
    targets, classes = list(device.ARCHS), list(dict.fromkeys(name for _, name in space.rows))
    return dict(sorted(decided.items(), key=lambda item: (targets.index(item[0][0]), classes.index(item[0][1]))))


def swept(space: sweep.Space, found: Sequence[Swept]) -> dict[Key, Any]:
    """The swept rows of a table.

    Raises TypeError for a file whose configurations have other fields than the table's: the op must be swept again.
    """
    rows = {}
    for key, one in deciding(space, found).items():
        chosen = one.chosen(key[1])
        if chosen is not None:
            rows[key] = space.make(**chosen.config, measured=f"{chosen.said}: {one.path.parent.name}/{one.path.name}")
    return rows


def lines(rows: dict[Key, Any]) -> list[str]:
    """The rows between their markers as `ruff format` leaves them; none where there are no rows."""
    made = []
    for (target, name), row in rows.items():
        values = [f'"{value}"' if isinstance(value, str) else str(value) for value in asdict(row).values()]
        head, inside = f'    ("{target}", "{name}"): {type(row).__name__}(', ", ".join(values)
        if len(head + inside + "),") <= WIDTH:
            made.append(f"{head}{inside}),")
        elif len(inside) + 8 <= WIDTH:
            made += [head, f"        {inside}", "    ),"]
        else:
            made += [head, *(f"        {value}," for value in values), "    ),"]
    return [BEGIN, *made, END] if made else []


def replaced(source: str, table: str, block: Sequence[str]) -> str:
    """The source of a kernel file with that block, and no other, at the end of a table."""
    text = source.split("\n")
    first = next(n for n, line in enumerate(text) if line.startswith(f"{table}: dict["))
    last = next(n for n, line in enumerate(text) if n > first and line == "}")
    inside = text[first:last]
    if BEGIN in inside:
        inside = inside[: inside.index(BEGIN)] + inside[inside.index(END) + 1 :]
    return "\n".join([*text[:first], *inside, *block, *text[last:]])


def _jobs(one: Swept, size_class: str, config: dict[str, int]) -> list[static.Job]:
    """What a row has to compile to: every op that the table is for, at the file's shapes or else at the op's own.

    In bf16 and the arch's format at each shape, and at the first one as the codegen suite compiles the kernels.
    """
    arch, jobs = device.lookup(one.target), []
    for op, space in sweep.SPACES.items():
        if space.rows is not sweep.SPACES[one.op].rows:
            continue
        shapes = one.shapes[size_class] if op == one.op else space.shapes
        made = [
            static.Job(op, shape, "bf16", space.fmt(arch), config, arch.name)
            for shape in shapes
            if space.size_class(shape) == size_class
        ]
        jobs += [*(static.variants(made[0]) if made else []), *made[1:]]
    return jobs


def _broken(one: Swept, size_class: str, config: dict[str, int], jobs: int, python: str) -> tuple[list[str], str]:
    """What rules of machine code a configuration breaks, where, and the Triton, an interpreter's, that says so."""
    asked = _jobs(one, size_class, config)
    answers = static.compile_all(asked, jobs, python)
    told = []
    for job, answer in zip(asked, answers, strict=True):
        where = f"{job.op} {'x'.join(map(str, job.shape))} {job.fmt} {job.dtype}"
        messages = [answer.refused, *(message for code in answer.codes for message in code.broken)]
        told += [f"{where}: {message}" for message in messages if message]
    return told, answers[0].triton


def _refuse(one: Swept, row: dict[str, Any]) -> None:
    """Add a refusal to the file."""
    one.refused.append(row)
    document = json.loads(one.path.read_text(encoding="utf-8"))
    document["refused"] = one.refused
    one.path.write_text(sweep.as_text(document), encoding="utf-8")


def settle(
    space: sweep.Space, found: Sequence[Swept], jobs: int, every: bool, pythons: Sequence[str] = (sys.executable,)
) -> Iterator[str]:
    """Compile the rows that are not in the table yet, or every one, and note what is refused; says what it does.

    pythons: interpreters, each with its Triton; the first that refuses decides.
    """
    for key, one in deciding(space, found).items():
        while True:
            chosen = one.chosen(key[1])
            if chosen is None:
                yield f"{one.op} {' '.join(key)}: all of {len(one.classes[key[1]])} were refused: the row by hand stays"
                break
            config = chosen.config
            if config == sweep.fields(space.rows[key]) and not every:
                break
            for python in pythons:
                broken, triton = _broken(one, key[1], config, jobs, python)
                verdict = broken[0].splitlines()[0] if broken else "breaks no rule"
                yield f"{one.op} {' '.join(key)} {_values(config)}, Triton {triton}: {verdict}"
                if broken:
                    _refuse(one, {"config": config, "size_class": key[1], "triton": triton, "why": verdict})
                    break
            else:
                break


def shared(space: sweep.Space, found: Sequence[Swept]) -> Iterator[str]:
    """How the swept rows do for the other ops that share them, a line each."""
    for (target, name), decided in deciding(space, found).items():
        chosen = decided.chosen(name)
        if chosen is None:
            continue
        for other in found:
            ours = other.target == target and sweep.SPACES[other.op].rows is space.rows
            if other is decided or not other.timed or not ours:
                continue
            for candidate in other.classes.get(name, ()):
                if candidate.config == chosen.config:
                    slowdown = f"{candidate.slowdown:.3f} of its best"
                    yield f"{other.op} {target} {name}: {slowdown} with the row that {decided.op} decided"


def _values(config: dict[str, int]) -> str:
    return "/".join(str(int(value)) for value in config.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.perf.tables", description=__doc__.splitlines()[0])
    names = {name: space for (_, name), space in tables().items()}
    parser.add_argument("table", nargs="*", metavar="TABLE", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write the rows into the kernels' files")
    parser.add_argument("--check", action="store_true", help="compile the rows that the tables have already, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="ask the Triton of this interpreter too"
    )
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.table) - set(names)):
        parser.error(f"there is no table {unknown[0]!r}; expected one of {', '.join(names)}")
    found = files()
    for name in options.table or names:
        space = names[name]
        if options.write or options.check:
            for line in settle(space, found, options.jobs, options.check, [sys.executable, *options.python]):
                print(line, file=sys.stderr, flush=True)
        for line in shared(space, found):
            print(line, file=sys.stderr)
        block = lines(swept(space, found))
        if block:
            show("\n".join([name, *block]))
        if options.write:
            path = Path(space.module.__file__)
            path.write_text(replaced(path.read_text(encoding="utf-8"), name, block), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
