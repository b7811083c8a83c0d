"""Two runs side by side: the first window outside, the layer whose gradients differ, and runs that cannot be read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fp8stack import compare, train
from fp8stack.compare import gradient_ratios, layer_of, read_run, rows


def _write(
    folder: Path, losses: list[float], told: dict[str, Any] | None = None, rates: list[float] | None = None
) -> Path:
    folder.mkdir()
    records: list[dict[str, Any]] = [
        {"step": n, "loss": loss, "grad_norm": 1.0} for n, loss in enumerate(losses, start=1)
    ]
    for record, rate in zip(records, rates or (), strict=False):
        record["tokens_a_second"] = rate
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(json.dumps({"config_hash": "a", **(told or {})}))
    return folder


def _list(folder: Path) -> Path:
    (_write(folder, [1.0]) / "run.json").write_text("[]")
    return folder


def _later(folder: Path) -> Path:
    (_write(folder, [1.0]) / "metrics.jsonl").write_text('{"step": 101, "loss": 1.0, "grad_norm": 1.0}\n')
    return folder


STRAIGHT = [7.0 - 0.03 * n for n in range(100)]


def test_the_band_of_nudged_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nudged by 1e-5, four runs allow 10 times that; a drift from step 30 on is outside in window 21-50 first."""
    a = _write(tmp_path / "a", STRAIGHT)
    nudged = [_write(tmp_path / f"n{i}", [x * (1 + i * 2.5e-6) for x in STRAIGHT]) for i in (1, 2, 3, 4)]
    near = _write(tmp_path / "near", [x * (1 + 9e-5) for x in STRAIGHT])
    far = _write(tmp_path / "far", [x * (1 + (2e-4 if n >= 30 else 0)) for n, x in enumerate(STRAIGHT)])
    with_band = ["--nudged", *map(str, nudged)]
    assert compare.main([str(a), str(near), *with_band]) == 0
    assert "first outside: none" in capsys.readouterr().out
    assert compare.main([str(a), str(far), *with_band]) == 1
    assert "first outside: step 31 (of steps 21-50, the first beyond" in capsys.readouterr().out
    judged = rows(read_run(a), read_run(near), [read_run(folder) for folder in nudged])
    assert [row.window for row in judged] == ["1-1", "2-5", "6-10", "11-20", "21-50", "51-100", "tail"]
    assert judged[0].allowed == pytest.approx(1e-4)
    assert judged[0].difference == pytest.approx(9e-5)


def test_without_a_band(tmp_path: Path) -> None:
    """Between two formats: 1e-3 everywhere is inside, 3e-3 in steps 41-60 is not; noise around zero is."""
    a = read_run(_write(tmp_path / "a", STRAIGHT))
    noise = read_run(_write(tmp_path / "noise", [x * (1 + (-1) ** n * 8e-3) for n, x in enumerate(STRAIGHT)]))
    late = read_run(
        _write(tmp_path / "late", [x * (1 + (3e-3 if 40 <= n < 60 else 0)) for n, x in enumerate(STRAIGHT)])
    )
    assert all(row.inside for row in rows(a, noise, []))
    assert [row.window for row in rows(a, late, []) if not row.inside] == ["41-60"]


def test_the_first_step_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the window's first step nor that of the largest difference: a drift from step 47, largest at step 60."""
    a = _write(tmp_path / "a", STRAIGHT)
    drift = {46: 3e-3, **dict.fromkeys(range(47, 59), 4e-3), 59: 9e-3}
    b = _write(tmp_path / "b", [x * (1 + drift.get(n, 0.0)) for n, x in enumerate(STRAIGHT)])
    same = _write(tmp_path / "same", STRAIGHT)
    assert compare.main([str(a), str(b)]) == 1
    assert "first outside: step 47 (of steps 41-60, the first beyond 2.0e-03)" in capsys.readouterr().out
    assert compare.main([str(a), str(b), "--nudged", str(same)]) == 1
    assert "first outside: step 47 (of steps 21-50, the first beyond 5.0e-05)" in capsys.readouterr().out


def test_counts_of_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That saturation counts depend on the number of ranks is said where the runs differ in it, and only there."""
    told = {"saturated_by_layer": {"1": {"layers.0.attention.wq": 5}}}
    one, two = (_write(tmp_path / str(n), STRAIGHT, {**told, "ranks": n}) for n in (1, 2))
    for other, said in ((two, True), (one, False)):
        assert compare.main([str(one), str(other)]) == 0
        assert ("other ranks, other counts" in capsys.readouterr().out) == said


def test_nan_is_outside(tmp_path: Path) -> None:
    """A loss that is no number is never inside a band, with or without nudged runs."""
    a = read_run(_write(tmp_path / "a", STRAIGHT))
    broken = read_run(_write(tmp_path / "b", [*STRAIGHT[:30], float("nan"), *STRAIGHT[31:]]))
    assert [row.window for row in rows(a, broken, [a]) if not row.inside] == ["21-50"]
    assert [row.window for row in rows(a, broken, []) if not row.inside] == ["21-40"]


def test_the_order_of_nudged_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that lacks steps of A, or has no number in one, is refused wherever it stands: a maximum would skip it."""
    a = _write(tmp_path / "a", STRAIGHT)
    b = _write(tmp_path / "b", [x * (1 + 9e-5) for x in STRAIGHT])
    full = _write(tmp_path / "full", [x * (1 + 1e-5) for x in STRAIGHT])
    short = _write(tmp_path / "short", STRAIGHT[:95])
    broken = _write(tmp_path / "broken", [*STRAIGHT[:30], math.nan, *STRAIGHT[31:]])
    assert compare.main([str(a), str(b), "--nudged", str(full)]) == 0
    for odd, told in (
        (short, f"--nudged {short} lacks 5 of the 100 steps of {a}, from step 96; expected all of them; train it to"),
        (broken, f"--nudged {broken} has loss nan in step 31, where {a} has 6.1; expected finite losses"),
    ):
        for runs in ([full, odd], [odd, full], [odd]):
            capsys.readouterr()
            assert compare.main([str(a), str(b), "--nudged", *map(str, runs)]) == 2, runs
            err = capsys.readouterr().err
            assert len(err.splitlines()) == 1, err
            assert told in err


def test_a_nudged_run_that_is_longer(tmp_path: Path) -> None:
    """Steps beyond those of A, or of B, judge nothing and refuse nothing."""
    a, b, nudged = (read_run(_write(tmp_path / str(n), STRAIGHT[:n])) for n in (60, 40, 100))
    judged = rows(a, b, [nudged])
    assert [row.window for row in judged] == ["1-1", "2-5", "6-10", "11-20", "21-40", "tail"]
    assert all(row.inside for row in judged)


def test_a_loss_of_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch without a valid label: zero in both runs is no difference, in one of them it is outside by that step."""
    of_zero = [*STRAIGHT[:30], 0.0, *STRAIGHT[31:]]
    a, zero, same = (
        _write(tmp_path / name, losses) for name, losses in (("a", STRAIGHT), ("zero", of_zero), ("same", of_zero))
    )
    none, all_zero = (_write(tmp_path / name, [0.0] * 30) for name in ("none", "all"))
    negative = _write(tmp_path / "negative", [-1.0] * 30)
    for runs, code in (
        ([zero, same], 0),
        ([zero, same, same], 0),
        ([none, all_zero], 0),
        ([none, all_zero, none], 0),
        ([a, zero], 1),
        ([zero, a], 1),
        ([zero, a, same], 1),
        ([none, a], 1),
        ([a, none], 1),
        ([a, negative], 1),
        ([zero, zero, a], 2),
    ):
        first, second, *nudged = map(str, runs)
        capsys.readouterr()
        assert compare.main([first, second, *(["--nudged", *nudged] if nudged else [])]) == code, runs
        captured = capsys.readouterr()
        if set(runs) == {a, zero} and code == 1:
            assert "first outside: step 31 " in captured.out
        assert len(captured.err.splitlines()) == (code == 2)


def test_a_run_without_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """null in run.json is none of them: the curves are compared all the same."""
    told = {"digests": {"1": {"layers.0.w": [2.0]}}, "saturated_by_layer": {"1": {"layers.0.w": 3}}}
    a = _write(tmp_path / "a", STRAIGHT, told)
    b = _write(tmp_path / "b", STRAIGHT, {"digests": None, "saturated_by_layer": None})
    assert compare.main([str(a), str(b)]) == 0
    assert "gradient norm B / A" not in capsys.readouterr().out


def test_the_layer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weight gradient x 1.02 in one layer shows in its ratio and in no other's."""
    digest = {f"layers.{n}.attention.wq.weight": [2.0, 0.0, 0.0, 0.0] for n in range(3)}
    other = {**digest, "layers.1.attention.wq.weight": [2.04, 0.0, 0.0, 0.0]}
    a = _write(tmp_path / "a", STRAIGHT, {"digests": {"1": digest}, "saturated_by_layer": {"1": {}}})
    counts = {"layers.0.attention.wq": 5, "layers.0.attention.wk": 7, "layers.2.feed_forward.w1": 1}
    b = _write(tmp_path / "b", STRAIGHT, {"digests": {"1": other}, "saturated_by_layer": {"1": counts}})
    assert gradient_ratios(read_run(a), read_run(b)) == {
        "1": {"layers.0": 1.0, "layers.1": pytest.approx(1.02), "layers.2": 1.0}
    }
    assert compare.main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "differs" in line] == ["layers.1"]
    assert "layers.0                       0          12" in out
    assert layer_of("tok_embeddings.weight") == "tok_embeddings"


def test_share_of_the_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand, with the published 5,996, 7,027 and 7,156 tokens/s: 88.9 %, by the median of warm steps."""

    def of(name: str, speed: float, told: dict[str, Any]) -> str:
        rates = [1.0] * 10 + [speed] * 60 + [speed / 7] * 30
        return str(_write(tmp_path / name, STRAIGHT, told, rates))

    bf16 = of("bf16", 7156.0, {"recipe": "bf16", "quantisation": "fused", "config_hash": "b"})
    fused = of("fused", 7027.0, {"recipe": "rowwise", "quantisation": "fused"})
    unfused = of("unfused", 5996.0, {"recipe": "rowwise", "quantisation": "unfused"})
    assert compare.main([bf16, fused, "--unfused", unfused]) == 0
    out = capsys.readouterr().out
    assert "share of the gap recovered: 88.9%" in out
    assert "-1.8% against A" in out
    fast = of("fast", 8000.0, {"recipe": "rowwise", "quantisation": "unfused"})
    assert compare.main([bf16, fused, "--unfused", fast]) == 0
    assert "none: unfused is not slower than A" in capsys.readouterr().out
    other = of("other", 5996.0, {"recipe": "rowwise", "quantisation": "unfused", "config_hash": "c"})
    for runs, told in (
        ([fused, fused, unfused], "has recipe rowwise; expected bf16"),
        ([bf16, unfused, unfused], "has quantisation unfused; expected fused"),
        ([bf16, fused, fused], "has quantisation fused; expected unfused"),
        ([bf16, fused, other], "has config_hash c; expected a"),
    ):
        assert compare.main([*runs[:2], "--unfused", runs[2]]) == 2
        assert told in capsys.readouterr().err
    short = str(_write(tmp_path / "short", STRAIGHT[:5], {}, [5.0] * 5))
    assert compare.main([short, short]) == 0
    assert "none: too few steps" in capsys.readouterr().out


def test_a_run_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What train --out wrote is read; a last line cut off by a kill is left out."""
    out = tmp_path / "run"
    common = ["--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "2"]
    assert train.main([*common, "--recipe", "rowwise", "--out", str(out)]) == 0
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    assert compare.main([str(out), str(out)]) == 0
    shown = capsys.readouterr().out
    assert "rowwise e4m3fn on cpu, 1 rank," in shown
    assert "gradient norm B / A by layer, step 2" in shown
    assert "saturated codes by layer, step 2" in shown


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(lambda a, tmp: [str(a), str(tmp / "none")], "cannot be read", id="missing"),
        pytest.param(lambda a, tmp: [str(a), str(tmp / "none")], "train --out wrote; name one, or train", id="way-out"),
        pytest.param(lambda a, tmp: [str(a), str(_write(tmp / "b", []))], "no step", id="empty"),
        pytest.param(
            lambda a, tmp: [str(a), str(_later(tmp / "b"))], "in common; expected .*; name others", id="no-common-step"
        ),
        *(
            pytest.param(
                lambda a, tmp, key=key, found=found: [str(a), str(_write(tmp / "b", STRAIGHT, {key: found}))],
                f"{key} of run.json are no numbers by step and name",
                id=f"{key}-{number}",
            )
            for key, values in (
                ("digests", ([], {"x": {}}, {"1": None}, {"1": {"w": None}}, {"1": {"w": []}}, {"1": {"w": ["2"]}})),
                ("saturated_by_layer", (5, {"1": {"w": None}}, {"1": {"w": "3"}})),
            )
            for number, found in enumerate(values)
        ),
        pytest.param(lambda a, tmp: [str(a), str(_list(tmp / "b"))], "run.json holds no object", id="list"),
        pytest.param(
            lambda a, tmp: [str(a), str(a), "--nudged", str(_write(tmp / "b", STRAIGHT, {"config_hash": "b"}))],
            "another configuration .*; train such with --nudge, or drop it",
            id="nudged",
        ),
    ],
)
def test_bad_runs(make: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line."""
    a = _write(tmp_path / "a", STRAIGHT)
    assert compare.main(make(a, tmp_path)) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(told, err), err


@pytest.mark.parametrize("arguments", [["one"], ["one", "other", "--band", "3"], ["one", "other", "--nudge", "x"]])
def test_bad_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line, not argparse's two; an option is not guessed from its beginning."""
    assert compare.main(arguments) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("compare: ")
    assert "--help" in err
