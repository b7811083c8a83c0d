"""The launch tables against the sweeps in baselines/: made again and compared; and what a launch would compile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fp8stack import device
from fp8stack._triton import CompileSpec
from fp8stack.kernels import rowwise
from suites.perf import static, sweep, tables

BY_HAND = {"not measured yet", "interpreter, not timed"}
TABLES = tables.tables()
FILES = sorted(tables.BASELINES.glob("*/sweep-*.json"))


@pytest.fixture(scope="module")
def found() -> list[tables.Swept]:
    return tables.files()


@pytest.mark.parametrize("space", [pytest.param(space, id=f"tables-{name}") for (_, name), space in TABLES.items()])
def test_tables_are_those_of_the_sweeps(space: sweep.Space, found: list[tables.Swept]) -> None:
    """Each kernel file has the rows that the files in baselines/ give, and no row claims a measurement besides.

    Red: `python -m suites.perf.tables --write`.
    """
    rows = tables.swept(space, found)
    source = Path(space.module.__file__).read_text(encoding="utf-8")
    assert rows == {key: space.rows[key] for key in rows}
    made = tables.replaced(source, space.table, tables.lines(rows)) == source
    assert made, f"{space.table}: not the rows of the files; run `python -m suites.perf.tables --write`"
    claims = {key: row.measured for key, row in space.rows.items() if key not in rows and row.measured not in BY_HAND}
    assert claims == {}


@pytest.mark.parametrize("path", [pytest.param(path, id=f"tables-{path.parent.name}-{path.stem}") for path in FILES])
def test_files_agree_with_themselves(path: Path) -> None:
    """The compromise that a file states is the one that its rows give; its name is its op's, its sizes are fields."""
    document, one = json.loads(path.read_text(encoding="utf-8")), tables.read(path)
    assert path.name == f"sweep-{one.op}.json"
    assert {name: row["config"] for name, row in document["compromise"].items()} == {
        name: candidates[0].config for name, candidates in one.classes.items()
    }
    assert set(one.classes) == set(one.shapes)
    assert document["provenance"]["triton"]


def _row(rows: int, us: float, share: float) -> dict[str, Any]:
    return {"config": {"rows": rows, "block": 512, "num_warps": 2}, "us": us, "share_of_copy": share}


def _document(op: str = "rowwise", **more: Any) -> dict[str, Any]:
    """Two shapes of one class: 2 rows is best on the first, 4 on the second and in the mean; 8 ran on one only."""
    shapes = [
        {"shape": [64, 300], "rows": [_row(2, 10.0, 0.9), _row(4, 11.0, 0.8), _row(8, 12.0, 0.7)]},
        {"shape": [64, 400], "rows": [_row(4, 10.0, 0.9), _row(2, 13.0, 0.6)]},
    ]
    return {"op": op, "target": "gfx1201", "provenance": {}, "shapes": shapes, **more}


def _put(root: Path, document: dict[str, Any], folder: str = "here") -> Path:
    path = root / folder / f"sweep-{document['op']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    return path


KEY = ("gfx1201", "k<=512")
SPACE = sweep.SPACES["rowwise"]


def test_the_best_compromise_is_chosen(tmp_path: Path) -> None:
    """The smallest geometric mean over the shapes; the row names its file and says what share of a copy it reached."""
    _put(tmp_path, _document())
    assert tables.swept(SPACE, tables.files(tmp_path)) == {
        KEY: rowwise.RowwiseConfig(4, 512, 2, "0.80 to 0.90 of a copy: here/sweep-rowwise.json")
    }


def test_refused_rows_are_passed_over(tmp_path: Path) -> None:
    """What broke a rule of machine code makes way for the next best; with nothing left the row by hand stays."""
    refused = [{"size_class": "k<=512", "config": _row(4, 0, 0)["config"], "triton": "3.9.0", "why": "spills"}]
    _put(tmp_path, _document(refused=refused))
    assert tables.swept(SPACE, tables.files(tmp_path))[KEY].rows == 2
    refused += [{**refused[0], "config": _row(2, 0, 0)["config"]}]
    _put(tmp_path, _document(refused=refused))
    found = tables.files(tmp_path)
    assert tables.swept(SPACE, found) == {}
    assert list(tables.settle(SPACE, found, 1, every=True)) == [
        "rowwise gfx1201 k<=512: all of 2 were refused: the row by hand stays"
    ]


def test_settling_notes_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that breaks a rule goes into its file with the reason and the Triton that found it; the next one stays."""
    path = _put(tmp_path, _document())
    asked = []

    def broken(one: object, name: str, config: dict[str, int], *_: object) -> tuple[list[str], str]:
        asked.append(config["rows"])
        return (["vgpr_spills is 6; expected 0"] if config["rows"] == 4 else []), "3.9.0"

    monkeypatch.setattr(tables, "_broken", broken)
    found = tables.files(tmp_path)
    assert [line.rpartition(": ")[2] for line in tables.settle(SPACE, found, 1, every=False)] == [
        "vgpr_spills is 6; expected 0",
        "breaks no rule",
    ]
    assert asked == [4, 2]
    assert json.loads(path.read_text())["refused"] == [
        {
            "size_class": "k<=512",
            "config": {"rows": 4, "block": 512, "num_warps": 2},
            "triton": "3.9.0",
            "why": "vgpr_spills is 6; expected 0",
        }
    ]
    assert tables.swept(SPACE, found)[KEY].rows == 2


def test_a_row_has_to_suit_every_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another interpreter's Triton refuses is refused, under its version; the next one is put to all again."""
    path = _put(tmp_path, _document())
    asked = []

    def answer(jobs: list[static.Job], processes: int, python: str) -> list[static.Answer]:
        rows = jobs[0].config["rows"]
        asked.append((rows, python))
        broken = ["vgpr_spills is 1; expected 0"] if (rows, python) == (4, "new") else []
        return [static.Answer((static.Code("kernel", {}, broken),), None, f"of {python}") for _ in jobs]

    monkeypatch.setattr(static, "compile_all", answer)
    monkeypatch.setattr(tables, "files", lambda: [tables.read(path)])
    assert tables.main(["ROWWISE_CONFIGS", "--check", "--python", "old", "--python", "new"]) == 0
    here = tables.sys.executable
    assert asked == [(4, here), (4, "old"), (4, "new"), (2, here), (2, "old"), (2, "new")]
    (refused,) = json.loads(path.read_text())["refused"]
    assert (refused["config"]["rows"], refused["triton"]) == (4, "of new")
    assert refused["why"].endswith("vgpr_spills is 1; expected 0")


def test_a_row_is_judged_for_every_op_of_its_table() -> None:
    """The row of one op is launched by the others of its table too: each of their shapes of the class is compiled."""
    one = next(one for one in tables.files() if (one.op, one.target) == ("colwise", "sm_90"))
    jobs = tables._jobs(one, "e>32", one.chosen("e>32").config)
    assert {(job.op, job.shape[2]) for job in jobs} == {
        (op, e) for op in ("colwise", "colwise_pair") for e in (64, 128)
    }
    assert {(job.fmt, job.dtype) for job in jobs if job.op == "colwise_pair"} >= {
        ("e4m3fn", "bf16"),
        ("e4m3fn", "fp32"),
    }


def test_times_decide_before_ranks_and_the_first_op_before_others(tmp_path: Path) -> None:
    """Of the files for a row: times before static ranks, then the op that stands first; two files of times clash."""
    ranked = {"kind": "static", "classes": {"k<=512": {"rows": [{"config": _row(16, 0, 0)["config"]}]}}}
    _put(tmp_path, _document(**ranked), "arch")
    assert tables.swept(SPACE, tables.files(tmp_path))[KEY].measured == "not timed: arch/sweep-rowwise.json"
    shapes = [{"shape": [1, 64, 300], "rows": [_row(1, 1.0, 0.5)]}]
    _put(tmp_path, {**_document("experts"), "shapes": shapes})
    assert tables.swept(SPACE, tables.files(tmp_path))[KEY].rows == 1
    _put(tmp_path, _document())
    assert tables.swept(SPACE, tables.files(tmp_path))[KEY].rows == 4
    _put(tmp_path, _document(), "there")
    with pytest.raises(AssertionError, match="two files have times"):
        tables.files(tmp_path)


def test_other_fields_need_another_sweep(tmp_path: Path) -> None:
    """A file whose configurations lack a field of the table is refused."""
    document = _document()
    for shape in document["shapes"]:
        for row in shape["rows"]:
            del row["config"]["block"]
    _put(tmp_path, document)
    with pytest.raises(TypeError, match="block"):
        tables.swept(SPACE, tables.files(tmp_path))


def test_rows_are_replaced_in_place() -> None:
    """The block goes to the end of its own table, replaces an older one there, and goes when there are no rows."""
    source = "A: dict[str, int] = {\n    1: 2,\n}\n\nB: dict[str, int] = {\n    3: 4,\n}\n"
    rows = {KEY: rowwise.RowwiseConfig(4, 512, 2, "x" * 90)}
    block = tables.lines(rows)
    assert block[1:-1] == [
        '    ("gfx1201", "k<=512"): RowwiseConfig(',
        f'        4, 512, 2, "{"x" * 90}"',
        "    ),",
    ]
    with_rows = tables.replaced(source, "A", block)
    assert with_rows.split("\n") == [*source.split("\n")[:2], *block, *source.split("\n")[2:]]
    shorter = tables.lines({KEY: rowwise.RowwiseConfig(4, 512, 2, "x")})
    assert shorter[1] == '    ("gfx1201", "k<=512"): RowwiseConfig(4, 512, 2, "x"),'
    assert tables.replaced(with_rows, "A", shorter) == tables.replaced(source, "A", shorter)
    assert tables.replaced(with_rows, "A", []) == source


# An op, at a shape where each kernel that it launches is compiled by the codegen suite too.
COMPILED: dict[str, sweep.Shape] = {
    "rowwise": (32768, 7168),
    "blockwise_128x1": (32768, 7168),
    "mxfp8_rows": (32768, 7168),
    "tensorwise": (14336, 4096),
    "colwise": (16640, 5120, 128),
    "colwise_pair": (32768, 7168, 32),
    "rowwise_grouped": (7168, 32768, 32),
    "rowwise_and_colwise": (32768, 7168, 32),
    "experts_transposed": (32, 2048, 7168),
    "experts_both": (32, 2048, 7168),
}


def _specialised(spec: CompileSpec) -> dict[str, Any]:
    """What a kernel is compiled for.

    Without strides of 1 that a kernel asks not to specialise on, which are arguments of a launch and read by nothing,
    and without the hint on counts of blocks, which follow from the shape.
    """
    free = [name for name in spec.kernel.arg_names if name.endswith("column_stride")]
    return {
        "signature": {name: kind for name, kind in spec.signature.items() if name not in free},
        "constexprs": {name: value for name, value in spec.constexprs.items() if name not in free},
        "divisible": {name for name in spec.divisible if not name.endswith("blocks")},
        "within_2gb": set(spec.within_2gb),
        **{name: getattr(spec, name) for name in ("num_warps", "num_stages", "options", "native", "encodes", "fmt")},
    }


@pytest.mark.parametrize("arch", [pytest.param(arch, id=f"tables-launch-{arch}") for arch in ("gfx942", "sm_90")])
@pytest.mark.parametrize("op", [pytest.param(op, id=f"tables-launch-{op}") for op in COMPILED])
def test_a_launch_compiles_what_codegen_does(op: str, arch: str) -> None:
    """With the table's row, what a recorded launch specialises on is what the codegen suite compiles."""
    shape, space = COMPILED[op], sweep.SPACES[op]
    config = sweep.fields(space.rows[arch, space.size_class(shape)])
    launched = static.launched(static.Job(op, shape, "bf16", space.fmt(device.lookup(arch)), config, arch))
    assert launched
    for spec in launched:
        compiled = [one for one in space.module.compile_specs(arch) if one.kernel is spec.kernel]
        assert _specialised(spec) in [_specialised(one) for one in compiled], spec.case


def test_variants_are_those_of_codegen() -> None:
    """A configuration is judged in every format and input type that the codegen suite compiles its kernel for."""
    config = {"rows": 1, "block": 4096, "num_warps": 4}
    jobs = static.variants(static.Job("rowwise", (64, 7168), "bf16", "e4m3fnuz", config, "gfx942"))
    assert {(job.fmt, job.dtype) for job in jobs} == {
        ("e4m3fnuz", "bf16"),
        ("e4m3fnuz", "fp32"),
        ("e5m2fnuz", "bf16"),
        ("e4m3fn", "bf16"),
    }


def test_kernels_are_themselves_again() -> None:
    """After a recorded launch the modules have their kernels back, also when the launch failed."""
    before = rowwise._quantize_rowwise_kernel
    job = static.Job("rowwise", (64, 512), "bf16", "e4m3fn", {"rows": 1, "block": 512, "num_warps": 2}, "gfx942")
    assert [spec.kernel for spec in static.launched(job)] == [before]
    with pytest.raises(TypeError, match="blocks"):
        static.launched(static.Job(**{**asdict(job), "config": {"rows": 1, "blocks": 512, "num_warps": 2}}))
    assert rowwise._quantize_rowwise_kernel is before


def _python(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("read line; exit 134", [None, None]),
        ('read line; echo \'{"codes": [], "refused": null, "triton": "1"}\'; read line; kill -9 $$', ["1", None]),
    ],
    ids=["tables-child-died", "tables-child-died-later"],
)
def test_a_compiler_that_dies(tmp_path: Path, body: str, expected: list[str | None]) -> None:
    """A child that dies refuses its own job, by name and exit code, and no other: the next gets a new child."""
    job = static.Job("rowwise", (64, 512), "bf16", "e4m3fn", {}, "gfx942")
    answers = static.compile_all([job, job], python=_python(tmp_path, body))
    assert [answer.triton if answer.refused is None else None for answer in answers] == expected
    assert all("died with exit code" in str(answer.refused) for answer in answers if answer.refused)


def test_an_error_of_the_checkout_refuses_nothing(tmp_path: Path) -> None:
    """A process that ends by an exception of Python says nothing about a configuration."""
    job = static.Job("rowwise", (64, 512), "bf16", "e4m3fn", {"rows": 1, "block": 512, "num_warps": 2}, "gfx942")
    with pytest.raises(RuntimeError, match="before it compiled rowwise for gfx942; expected an answer"):
        static.compile_all([job], python=_python(tmp_path, "read line; exit 1"))


def within(limits: Callable[[Any, device.Arch], bool], arch: str) -> list[str]:
    """The configurations of all ops, at all their shapes, that go past a limit of an arch."""
    row = device.lookup(arch)
    return [
        f"{op} {config}"
        for op, space in sweep.SPACES.items()
        for shape in space.shapes
        for config in space.configs(shape, row)
        if not limits(config, row)
    ]


@pytest.mark.parametrize("arch", [pytest.param(arch, id=f"tables-limits-{arch}") for arch in ("gfx942", "sm_90")])
def test_spaces_keep_to_the_arch(arch: str) -> None:
    """No configuration has more threads than a block of the arch may have, nor a turned tile that LDS cannot hold."""
    assert within(lambda config, row: config.num_warps * row.wave_size <= row.threads, arch) == []
    exchanged = ("TransposedConfig", "BothConfig", "BlockwiseConfig", "Mxfp8Config", "TensorwiseConfig")
    assert (
        within(
            lambda config, row: (
                type(config).__name__ not in exchanged
                or config.parts == 1
                or config.rows * config.columns <= row.lds_bytes
            ),
            arch,
        )
        == []
    )


def test_a_sweep_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sweep writes is what the tables read: one sample a class, times a shape, the compromise of both.

    The GPU is a stand-in: sm_90, and a time that grows with the rows of a program.
    """
    row = device.lookup("sm_90")
    tried: dict[sweep.Shape, list[str]] = {}

    def timed(
        op: str, shape: sweep.Shape, where: object, found: object, every: Any, *_: object
    ) -> list[dict[str, Any]]:
        tried[shape] = [str(config) for config in every]
        rows = [{"config": sweep.fields(c), "us": c.rows + shape[1] / 1e4, "share_of_copy": 0.5} for c in every]
        return sorted(rows, key=lambda row: row["us"])

    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sweep.device, "detect", lambda _: device.Detected(row, row, "a stand-in", False))
    monkeypatch.setattr(sweep.kernels, "provenance", lambda *_: {"triton": "3.9.0"})
    monkeypatch.setattr(sweep, "sweep_shape", timed)
    path = tmp_path / "gpu" / "sweep-rowwise.json"
    path.parent.mkdir()
    shapes = ["16640x5120", "32768x7168", "4096x28672"]
    assert sweep.main(["rowwise", "--most", "8", "--shapes", *shapes, "--json", str(path)]) == 0
    assert tried[16640, 5120] == tried[32768, 7168] != tried[4096, 28672]
    assert len(tried[16640, 5120]) in (8, 9)
    (one,) = tables.files(tmp_path)
    document = json.loads(path.read_text())
    assert one.timed
    assert {name: found[0].config for name, found in one.classes.items()} == {
        name: best["config"] for name, best in document["compromise"].items()
    }
    assert tables.swept(SPACE, [one])["sm_90", "k<=8192"].measured == "0.50 of a copy: gpu/sweep-rowwise.json"
