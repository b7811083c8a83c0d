"""The timing of whole steps, `python -m suites.perf.trainer`: it runs on a CPU, tiny; its verdicts are arithmetic."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import train
from fp8stack.linear import Recipe
from suites.perf import trainer
from suites.perf.trainer import Run

TINY = [
    "--device", "cpu", "--batch", "2", "--seq", "16", "--layers", "1", "--steps", "3", "--warmup", "1",
    "--compile", "none",
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_three_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16, unfused, fused, bf16: samples of the timed steps, products, kernels, the three traces side by side."""
    recipes = ["--model", "dsv3-tiny", "--experts", "4", "--recipes", "bf16,rowwise:unfused,rowwise:fused"]
    assert trainer.main([*TINY, *recipes, "--dense-layers", "0", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "trainer.json").read_text())
    runs = document["runs"]
    assert [run["variant"] for run in runs] == ["bf16", "rowwise:unfused", "rowwise", "bf16"]
    for run in runs:
        assert run["failed"] is None
        assert len(run["step_seconds"]) == len(run["forward_seconds"]) == len(run["backward_seconds"]) == 2
        assert all(
            0 < forward < step and 0 < backward < step
            for forward, backward, step in zip(
                run["forward_seconds"], run["backward_seconds"], run["step_seconds"], strict=True
            )
        )
        assert len(run["loss"]) == 3 + 1 + trainer.PROFILED
        assert run["gemms"]["recomputed"] == runs[0]["gemms"]["recomputed"] > 0
        assert run["kernels"]["GEMM"]["longest"][0]["us"] > 0
        assert run["config"]["sizes"]["routing"]["experts"] == 4
        assert run["config"]["sizes"]["dense_layers"] == 0
    assert runs[1]["gemms"] == runs[2]["gemms"] != runs[0]["gemms"]
    assert runs[0]["loss"] == runs[3]["loss"]
    assert runs[1]["kernels"]["quantisation"]["launches"] != runs[2]["kernels"]["quantisation"]["launches"]
    assert [row["variant"] for row in document["summary"]] == ["bf16", "rowwise:unfused", "rowwise"]
    assert document["provenance"]["device_name"] == "cpu"
    assert "share of the gap recovered: " in capsys.readouterr().out
    traces = [tmp_path / name / "trace-rank0.json.gz" for name in ("1-bf16", "2-rowwise-unfused", "3-rowwise")]
    assert all(trace.exists() for trace in traces)
    side_by_side = (tmp_path / "compare.txt").read_text().splitlines()
    assert side_by_side[1].split() == ["class", "1-bf16", "2-rowwise-unfused", "3-rowwise"]
    gemm = runs[2]["kernels"]["GEMM"]
    assert f"{gemm['us']:,.1f}" in next(line for line in side_by_side if line.startswith("GEMM"))
    assert "<table>" in (tmp_path / "compare.html").read_text()


def test_weights_gathered_as_codes(tmp_path: Path) -> None:
    """The same recipe with the FP8 all-gather is a variant beside the one without: other kernels, the same losses."""
    recipes = ["--model", "llama3-tiny", "--recipes", "tensorwise,tensorwise:fp8-all-gather"]
    assert trainer.main([*TINY, *recipes, "--out", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "trainer.json").read_text())["runs"]
    assert [run["variant"] for run in runs] == ["tensorwise", "tensorwise:fp8-all-gather", "tensorwise"]
    assert runs[0]["loss"] == runs[1]["loss"]
    quantised = [run["kernels"]["quantisation"]["launches"] for run in runs]
    assert quantised[1] < quantised[0] == quantised[2]


def test_a_failed_run_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are trained and written, the failed one is named, and the exit code is 1."""
    genuine = train.convert_to_float8

    def broken(model: torch.nn.Module, recipe: Recipe, **rest: Any) -> Any:
        if recipe.name == "rowwise":
            raise RuntimeError("out of memory")
        return genuine(model, recipe, **rest)

    monkeypatch.setattr(train, "convert_to_float8", broken)
    arguments = [*TINY, "--model", "llama3-tiny", "--recipes", "bf16,rowwise,tensorwise", "--no-profile"]
    assert trainer.main([*arguments, "--out", str(tmp_path)]) == 1
    runs = json.loads((tmp_path / "trainer.json").read_text())["runs"]
    assert [run["failed"] for run in runs] == [None, "RuntimeError: out of memory", None, None]
    assert "run 2, rowwise: FAILED: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_run_leaves_nothing() -> None:
    """The model of a compiled run is gone when `free` returns: two do not fit beside each other."""
    models: list[weakref.ref[torch.nn.Module]] = []
    config = train.TrainConfig(
        steps=2, batch=2, seq=16, device="cpu", layers=1, compile="aot_eager", recompute="selective"
    )

    def once() -> None:
        one = trainer.Clocked(config)
        one.run()
        assert one.compiler.graphs == 1
        models.append(weakref.ref(one.model))

    gc.disable()  # so that it is `free` that collects
    try:
        once()
        assert models[0]() is not None, "nothing is left to free: what is this test for?"
        trainer.free(torch.device("cpu"))
        assert models[0]() is None
    finally:
        gc.enable()


def run_of(variant: str, step: float, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "tokens_a_step": 8192, "step_seconds": [step, step * 1.5, step], "forward_seconds": [0.1],
        "backward_seconds": [0.2], "peak_bytes": 1000, "gemms": {"recomputed": 48}, "loss": [12.0, 9.0],
        "grad_norm": [2.0, 1.0], **changes,
    }  # fmt: skip
    return Run(variant, 1, {}, "", 0, **fields)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        pytest.param(run_of("rowwise", 1 / 1.2), [], id="just-fast-enough"),
        pytest.param(run_of("rowwise", 1 / 1.19), ["rowwise is 1.190x bf16, bar 1.20"], id="slow"),
        pytest.param(run_of("rowwise", 0.5, gemms={"recomputed": 0}), ["recomputes 0 products, bf16 48"], id="gemms"),
        pytest.param(run_of("rowwise", 0.5, loss=[12.2]), ["has loss 12.2000 in its first step"], id="loss"),
        pytest.param(run_of("rowwise", 0.5, grad_norm=[1.0]), ["has grad_norm 1.0000 in"], id="half-a-backward-pass"),
        pytest.param(run_of("rowwise", 0.5, peak_bytes=1021), ["1.021 of the peak memory of bf16"], id="more-memory"),
        pytest.param(run_of("rowwise", 0.5, peak_bytes=979), ["0.979 of the peak memory of bf16"], id="less-memory"),
        pytest.param(run_of("rowwise", 0.5, peak_bytes=1019), [], id="a-little-memory"),
    ],
)
def test_verdicts(run: Run, told: list[str]) -> None:
    """Medians of all runs of a variant against the first; what is slow, or no fair comparison, is said."""
    runs = [run_of("bf16", 0.9), run, run_of("bf16", 1.0, step_seconds=[1.0, 1.1])]
    base, row = trainer.summaries(runs, "llama3-8b")
    assert base.step_seconds == 1.0
    assert base.runs == 2
    assert [line for line in row.below if not any(words in line for words in told)] == []
    assert len(row.below) == len(told)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        pytest.param({"seq": 8192, "batch": 2}, ["bf16 has 8,300 tokens/s a GPU, bar 8,390"], id="whole"),
        pytest.param({"seq": 8192, "batch": 2, "layers": 16}, [], id="trimmed"),
        pytest.param({"seq": 4096, "batch": 4}, [], id="short"),
    ],
)
def test_verdicts_of_two_ranks(config: dict[str, int], told: list[str]) -> None:
    """Bars of their own; and bf16 itself must be fast, where model and sequence are those of the bar."""
    step = 8192 / 8300
    runs = [run_of("bf16", step), run_of("rowwise", step / 1.21), run_of("tensorwise", step / 1.30)]
    runs[0].config = config
    below = [row.below for row in trainer.summaries(runs, "llama3-8b", 2)]
    assert below == [told, ["rowwise is 1.210x bf16, bar 1.22"], []]
    assert re.search(r"^rowwise .* 1\.210 +1\.22 +1\.30 ", trainer.render(runs, "llama3-8b", 2), re.MULTILINE)


# A rank that fails in the second step of its second run, while the other waits for its gradients.
ONE_FAILS = """
import os, sys
from suites.perf import trainer

genuine = trainer.Clocked._gradients

def broken(self, parts, valid):
    if os.environ["RANK"] == "1" and self.config.recipe == "rowwise" and self.step == 1:
        raise RuntimeError("out of memory")
    return genuine(self, parts, valid)

trainer.Clocked._gradients = broken
sys.exit(trainer.main(sys.argv[1:]))
"""


def test_one_of_two_ranks_fails(tmp_path: Path) -> None:
    """All end at once with exit 1, long before a collective would give up; what was measured before is written."""
    script, out = tmp_path / "one_fails.py", tmp_path / "out"
    script.write_text(ONE_FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = [*TINY, "--batch", "1", "--model", "llama3-tiny", "--recipes", "bf16,rowwise", "--no-profile"]
    done = subprocess.run(
        [*command, *arguments, "--out", str(out)],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    document = json.loads((out / "trainer.json").read_text())
    assert document["provenance"]["ranks"] == 2
    run, *cut = document["runs"]
    assert (run["variant"], run["failed"], run["tokens_a_step"]) == ("bf16", None, 16)
    assert all(run["failed"] for run in cut), "gloo may tell rank 0 that the other is gone before torchrun ends it"
    assert (out / "FAILED-rank1").read_text() == "run 2, rowwise: RuntimeError: out of memory\n"


def test_share_of_the_gap() -> None:
    """bf16 at 8192, unfused at 4096 and fused at 7168 tokens/s: three quarters; backward 0.8 s against 0.2 s: 4x."""
    runs = [run_of("bf16", 1.0), run_of("rowwise:unfused", 2.0, backward_seconds=[0.8]), run_of("rowwise", 8 / 7)]
    recovered = trainer.gap(trainer.summaries(runs, "dsv3-671b"))
    assert recovered == {
        "share_recovered": pytest.approx(0.75),
        "backward_unfused_over_fused": pytest.approx(4.0),
    }
    text = trainer.render(runs, "dsv3-671b")
    assert "share of the gap recovered: 75.0%  (published: 89 %" in text
    assert "unfused / fused: 4.00x  (published: 4.2x" in text
    assert trainer.gap(trainer.summaries(runs[::2], "dsv3-671b")) is None


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        pytest.param(["--warmup", "3"], 2, "--warmup 3, --steps 3", id="nothing-to-time"),
        pytest.param(["--recipes", "bf16,rowwide"], 2, "recipe 'rowwide' does not exist", id="recipe"),
        pytest.param(["--recipes", "rowwise:un"], 2, "quantisation 'un' does not exist", id="quantisation"),
        pytest.param(["--layers", "99"], 2, "--layers only trims", id="layers"),
    ],
)
def test_bad_input(
    arguments: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line before anything is trained."""
    assert trainer.main([*TINY, "--model", "llama3-tiny", "--out", str(tmp_path), *arguments]) == code
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed without a GPU is none: exit 4, unless a CPU was asked for."""
    assert trainer.main(["--out", str(tmp_path)]) == 4
    assert "no GPU" in capsys.readouterr().err
