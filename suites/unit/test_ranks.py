"""Ranks of launch configurations by machine code: the rule, what is left out, and the file; nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fp8stack import device
from fp8stack.kernels import rowwise
from suites.perf import ranks, static, sweep, tables

GOOD = ranks.Rank(
    spills=0, narrow=0, bytes_an_access=16.0, waves=4.0, held=1, instructions_a_byte=2.0, registers=64, lds_bytes=0
)
FACTS: dict[str, Any] = {
    "vgpr_spills": 0,
    "sgpr_spills": 0,
    "narrow_memory_instructions": 0,
    "mean_load_bytes": 16.0,
    "load_instructions": 8,
    "mean_store_bytes": 16.0,
    "store_instructions": 4,
    "waves_per_simd": 4.0,
    "region_instructions": 256,
    "vgprs": 64,
    "lds_bytes": 1024,
}


def code(**facts: Any) -> static.Code:
    return static.Code("kernel", {**FACTS, **facts}, ())


def answer(*codes: static.Code) -> static.Answer:
    return static.Answer(codes, None, "3.9.0")


@pytest.mark.parametrize(
    "worse",
    [
        {"spills": 1, "waves": 8.0, "instructions_a_byte": 1.0},
        {"narrow": 1, "waves": 8.0, "instructions_a_byte": 1.0},
        {"bytes_an_access": 13.9, "waves": 8.0, "instructions_a_byte": 1.0},
        {"waves": 3.0, "held": 2, "instructions_a_byte": 1.0},
        {"held": 0, "instructions_a_byte": 1.0},
        {"instructions_a_byte": 2.1},
    ],
    ids=["ranks-spills", "ranks-narrow", "ranks-bytes", "ranks-waves", "ranks-held", "ranks-instructions"],
)
def test_each_criterion_in_its_turn(worse: dict[str, float]) -> None:
    """What is worse in one criterion ranks behind, however much better it is in those that come after."""
    assert replace(GOOD, **worse).key > GOOD.key


def test_small_differences_are_none() -> None:
    """Bytes a memory instruction count to the nearest 4, instructions a byte to the nearest tenth."""
    assert replace(GOOD, bytes_an_access=14.4, instructions_a_byte=2.04).key == GOOD.key


def test_rank_of_several_kernels() -> None:
    """Counts are summed, of the waves the least counts, bytes and instructions are those of all kernels together."""
    second = code(vgpr_spills=2, sgpr_spills=1, waves_per_simd=2.0, store_instructions=0, narrow_memory_instructions=3)
    assert ranks.rank([code(), second], {"held": 2}) == ranks.Rank(3, 3, 16.0, 2.0, 2, 2.0, 64, 1024)
    narrow = code(mean_store_bytes=4.0, store_instructions=8)
    assert ranks.rank([narrow], {}).bytes_an_access == 10.0


def test_the_worse_of_two_shapes() -> None:
    """A configuration is as good as at its worst shape, criterion by criterion."""
    other = ranks.Rank(1, 0, 12.0, 6.0, 2, 1.0, 128, 0)
    assert GOOD.worst(other) == ranks.Rank(1, 0, 12.0, 4.0, 1, 2.0, 128, 0)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (answer(code()), None),
        (answer(code(), code(lds_bytes=65537)), "lds_bytes above 65536"),
        (answer(code(vgprs=513)), "vgprs above 512"),
        (answer(code(waves_per_simd=0.0)), "no compute unit holds a group of it"),
        (static.Answer((), "CompilationFailed: out of registers", "3.9.0"), "the compiler: CompilationFailed: out of"),
    ],
    ids=["ranks-fits", "ranks-lds", "ranks-registers", "ranks-waves-0", "ranks-refused"],
)
def test_rejected(found: static.Answer, reason: str | None) -> None:
    """What the compiler refuses and what the arch's limits (fp8stack/device.py) exclude is left out, with a reason."""
    told = ranks.rejected(found, device.lookup("gfx942"))
    assert told is None if reason is None else str(told).startswith(reason)


def test_the_sample() -> None:
    """Today's row, and so many configurations that are allowed at every shape of the class; the same each time."""
    space = replace(
        sweep.SPACES["rowwise"],
        configs=lambda shape, arch: [rowwise.RowwiseConfig(rows, 512, 2, "") for rows in range(shape[0], 200)],
    )
    arch, shapes = device.lookup("gfx942"), [(1, 512), (100, 512), (50, 512)]
    today, *others = sweep.sampled(space, shapes, arch, 7)
    assert [today, *others] == sweep.sampled(space, shapes, arch, 7)
    assert sweep.fields(today) == sweep.fields(space.rows["gfx942", "k<=512"])
    assert len(others) == 7
    assert min(config.rows for config in others) >= 100
    assert len(sweep.sampled(space, shapes, arch, 1000)) == 101


def test_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Best first by the rule, ten a class at most, the worst shape counts; the tables read it and call it untimed.

    The compiler is a stand-in whose code is worse for larger blocks and, for the best one, spills at the second shape.
    """

    def compiled(jobs: Sequence[static.Job], processes: int = 1) -> list[static.Answer]:
        return [
            static.Answer((), "CompilationFailed: no", "3.9.0")
            if job.config["num_warps"] == 16
            else answer(
                code(
                    region_instructions=job.config["block"] * job.config["rows"] + job.config["num_warps"],
                    vgpr_spills=int(job.shape == (32768, 7168) and job.config["num_warps"] == 1),
                )
            )
            for job in jobs
        ]

    monkeypatch.setattr(static, "compile_all", compiled)
    file = tmp_path / "gfx942" / "sweep-rowwise.json"
    shapes = ["16640x5120", "32768x7168", "8192x8192"]
    assert sweep.main(["rowwise", "--static", "gfx942", "--shapes", *shapes, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert (document["kind"], document["target"], document["format"]) == ("static", "gfx942", "e4m3fnuz")
    assert {"commit", "torch", "triton", "arch"} <= set(document["provenance"])
    (found,) = document["classes"].values()
    assert len(found["rows"]) == ranks.KEPT < found["compiled"]
    assert [row["spills"] for row in found["rows"]] == sorted(row["spills"] for row in found["rows"])
    assert found["rows"][0]["spills"] == 0 < found["rows"][-1]["spills"]
    assert found["rejected"]["the compiler: CompilationFailed: no"] > 0
    best = found["rows"][0]["config"]
    assert document["compromise"] == {"k<=8192": found["rows"][0]}
    assert f"rowwise k<=8192: {best}, not timed" in out
    (swept,) = tables.files(tmp_path)
    rows = tables.swept(sweep.SPACES["rowwise"], [swept])
    assert rows["gfx942", "k<=8192"].measured == "not timed: gfx942/sweep-rowwise.json"
    assert rows["gfx942", "k<=8192"].block == best["block"]


def test_a_row_a_line() -> None:
    """The text of a sweep has each row on a line of its own, and is the same document."""
    row = {"config": {"rows": 1, "hints": True}, "us": 1.5, "why": "x; y"}
    document = {"op": "x", "shapes": [{"shape": [1, 2], "rows": [row, row]}], "refused": [row]}
    text = sweep.as_text(document)
    assert json.loads(text) == document
    assert text.count('{ "config": { "rows": 1, "hints": true }, "us": 1.5, "why": "x; y" }') == 3
