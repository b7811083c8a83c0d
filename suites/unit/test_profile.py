"""Kernel time by class: names of real kernels, traces with known times, and a trace that the trainer wrote."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fp8stack import profile, train
from fp8stack.profile import TraceError, class_of, read_trace, share_recovered, table


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::...", "GEMM"),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x128_MI16x16x1", "GEMM"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("_grouped_gemm_kernel", "GEMM"),
        ("fp8stack::scaled_mm", "GEMM"),
        ("aten::mm", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("_quantize_rowwise_kernel", "quantisation"),
        ("fp8stack::quantize_tensorwise", "quantisation"),
        ("Memcpy DtoD (Device -> Device)", "memory copy"),
        ("Memset (Device)", "memory copy"),
        ("triton_poi_fused_add_mul_silu_3", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "elementwise"),
        ("triton_poi_fused__to_copy_mm_mul_silu_3", "elementwise"),
        ("triton_tem_fused_mm_2", "GEMM"),
        ("_cast_rows_kernel", "quantisation"),
        ("_scale_kernel", "quantisation"),
        ("fp8stack::cast_saturating", "quantisation"),
        ("_grouped_mxfp8_kernel", "GEMM"),
        ("_scaled_kernel", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "memory copy"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "elementwise"),
        ("aten::clamp", "elementwise"),
        ("aten::rsqrt", "elementwise"),
        ("some_vendor_kernel", "other"),
    ],
)
def test_class_of(name: str, label: str) -> None:
    """Kernels of NCCL, cuBLAS, CUTLASS, hipBLASLt, Triton and this package are where a person would look for them."""
    assert class_of(name) == label


def test_own_kernels_have_a_class() -> None:
    """Every kernel of this package is one of quantisation or of a product."""
    sources = [file.read_text(encoding="utf-8") for file in (Path(profile.__file__).parent / "kernels").glob("*.py")]
    names = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)}
    names.remove("_by_kernel")  # a question, no kernel
    assert len(names) > 15
    assert {name: class_of(name) for name in names if class_of(name) not in ("quantisation", "GEMM")} == {}


def _write(folder: Path, events: list[dict[str, Any]], steps: int = 2) -> Path:
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 1000 * n, "dur": 1000, "tid": 1}
        for n in range(steps)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "trace-rank0.json").write_text(json.dumps({"traceEvents": [*marks, *events]}))
    return folder


def _kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7}


def test_a_gpu_trace(tmp_path: Path) -> None:
    """Microseconds and launches a step; CPU operators beside kernels are not counted twice."""
    events = [
        _kernel("nvjet_a", 0, 300), _kernel("nvjet_a", 1000, 300), _kernel("_quantize_rowwise_kernel", 400, 50),
        _kernel("Memcpy DtoD", 500, 20, "gpu_memcpy"), _kernel("aten::mm", 0, 900, "cpu_op"),
    ]  # fmt: skip
    found = read_trace(_write(tmp_path / "a", events))
    assert found.on_device
    assert (found.steps, found.step_us) == (2, 1000.0)
    classes = found.classes()
    assert classes["GEMM"] == (300.0, 1.0)
    assert classes["quantisation"] == (25.0, 0.5)
    assert classes["memory copy"] == (10.0, 0.5)
    assert sum(time for time, _ in classes.values()) == 335.0


def test_communication_alone(tmp_path: Path) -> None:
    """What no kernel of another class hides, on whatever stream: 40 before, 10 between, none beside and 20 after."""
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        _kernel(nccl, 0, 100), _kernel(nccl, 20, 90), _kernel("nvjet_a", 40, 30), _kernel("_scale_kernel", 60, 20),
        _kernel("nvjet_a", 90, 60), _kernel(nccl, 120, 50),
    ]  # fmt: skip
    found = read_trace(_write(tmp_path / "a", events, steps=1))
    assert found.classes()["communication"] == (240.0, 3.0)
    assert found.alone_us == 40 + 10 + 20
    rows = [line.split() for line in table([found]).splitlines()]
    assert ["of", "it", "alone", "70.0"] in rows
    assert "alone" not in table([read_trace(_write(tmp_path / "b", events[2:5], steps=1))])


def test_kernels_of_a_quantiser(tmp_path: Path) -> None:
    """A kernel is quantisation if the operator that launched it ran inside a quantiser, on the same thread."""

    def op(name: str, ts: float, dur: float, number: int, tid: int = 1) -> dict[str, Any]:
        return {**_kernel(name, ts, dur, "cpu_op"), "tid": tid, "args": {"External id": number}}

    def launched(name: str, ts: float, dur: float, number: int) -> dict[str, Any]:
        return {**_kernel(name, ts, dur), "args": {"External id": number}}

    events = [
        op("fp8stack::quantize_rowwise", 100, 50, 1), op("aten::amax", 110, 10, 2), op("aten::mul", 130, 10, 3),
        op("aten::mul", 160, 10, 4), op("aten::mul", 120, 10, 5, tid=2),
        launched("reduce_kernel", 500, 7, 2), launched("vectorized_elementwise_kernel", 510, 11, 3),
        launched("vectorized_elementwise_kernel", 530, 13, 4), launched("vectorized_elementwise_kernel", 550, 17, 5),
        launched("_quantize_rowwise_kernel", 570, 19, 1),
    ]  # fmt: skip
    found = read_trace(_write(tmp_path / "a", events, steps=1))
    assert found.classes()["quantisation"] == (7.0 + 11.0 + 19.0, 3.0)
    assert found.classes()["elementwise"] == (13.0 + 17.0, 2.0)
    assert found.kinds["vectorized_elementwise_kernel (of a quantiser)"] == "quantisation"


def test_a_cpu_trace_is_read_by_self_time(tmp_path: Path) -> None:
    """What runs inside a quantiser belongs to it; a parent's time is without its children's."""
    events = [
        _kernel("fp8stack::quantize_rowwise", 0, 100, "cpu_op"), _kernel("aten::amax", 10, 30, "cpu_op"),
        _kernel("aten::mul", 50, 20, "cpu_op"), _kernel("aten::add", 200, 10, "cpu_op"),
    ]  # fmt: skip
    found = read_trace(_write(tmp_path / "a", events, steps=1))
    assert not found.on_device
    assert found.classes()["quantisation"] == (100.0, 3.0)
    assert found.classes()["elementwise"] == (10.0, 1.0)


def test_an_operator_of_several_classes(tmp_path: Path) -> None:
    """One name inside a product, inside a quantiser and by itself is three rows: none takes the time of another."""
    events = [
        _kernel("fp8stack::scaled_mm", 0, 100, "cpu_op"), _kernel("aten::clamp", 10, 30, "cpu_op"),
        _kernel("aten::clamp", 200, 7, "cpu_op"),
        _kernel("fp8stack::quantize_rowwise", 300, 50, "cpu_op"), _kernel("aten::clamp", 310, 20, "cpu_op"),
    ]  # fmt: skip
    found = read_trace(_write(tmp_path / "a", events, steps=1))
    assert {label: time for label, (time, _) in found.classes().items() if time} == {
        "quantisation": 50.0,
        "GEMM": 100.0,
        "elementwise": 7.0,
    }
    assert found.time_us["aten::clamp"] == 7.0
    assert found.time_us["aten::clamp (of a product)"] == 30.0


def test_three_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 10, 20 and 12.5: the fused one recovers 60 % of the gap; kernels of one trace only are named."""
    for name, length, kernel in (("bf16", 10.0, "nvjet_b"), ("unfused", 20.0, "<amax>"), ("fused", 12.5, "nvjet_b")):
        folder = _write(tmp_path / name, [_kernel(kernel, 0, 5)], steps=1)
        content = json.loads((folder / "trace-rank0.json").read_text())
        content["traceEvents"][0]["dur"] = length
        (folder / "trace-rank0.json").write_text(json.dumps(content))
    sources = [str(tmp_path / name) for name in ("bf16", "unfused", "fused")]
    assert profile.main([*sources, "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "share of the gap recovered: 60.0%" in out
    assert [line for line in out.splitlines() if line.startswith("only in")] == [
        "only in unfused: 5.0 us, quantisation: <amax>"
    ]
    page = (tmp_path / "page.html").read_text()
    assert "&lt;amax&gt;" in page
    assert "60.0%" in page
    assert "http" not in page, "the page opens without a network"
    traces = [read_trace(Path(source)) for source in sources]
    assert share_recovered(traces[:2]) is None
    assert share_recovered(traces[::-1]) is not None
    assert share_recovered([traces[1], traces[0], traces[2]]) is None, "the second is faster: there is no gap"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(None, "holds no trace", id="empty-folder"),
        pytest.param("{", "cannot be read", id="cut"),
        pytest.param('{"traceEvents": []}', "no ProfilerStep marks", id="no-steps"),
        pytest.param("[]", "cannot be read", id="not-a-trace"),
        pytest.param('{"traceEvents": [7]}', "cannot be read", id="a-number-for-an-event"),
        pytest.param('{"traceEvents": [{"ph": "X", "dur": 1, "cat": "user_annotation"}]}', "'name'", id="no-name"),
        pytest.param("[" * 99999, "cannot be read", id="deep"),
    ],
)
def test_bad_trace(content: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line."""
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    assert profile.main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert told in err
    with pytest.raises(TraceError):
        read_trace(tmp_path)


def test_steps_that_take_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three traces whose steps last 0 us have no share of a gap: one line that names the first, not a division."""
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0}
    for length in (0, -1, math.nan, math.inf):
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{**mark, "dur": length}]}))
        assert profile.main([str(tmp_path)] * 3) == 2, length
        err = capsys.readouterr().err
        told = f"profile: {re.escape(str(tmp_path / 'trace.json'))} has steps of .* us; expected .*; profile again.*\n"
        assert re.fullmatch(told, err), err


@pytest.mark.parametrize("end", [-1, 20])
def test_a_compressed_trace_that_is_cut(end: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, which names the file and ends in what to do."""
    file = tmp_path / "trace-rank0.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": list(range(999))}).encode())[:end])
    assert profile.main([str(tmp_path)]) == 2
    told = f"profile: {re.escape(str(file))} cannot be read \\(.*\\); expected a Chrome trace .*; profile again.*\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named like any other."""
    refused = PermissionError(13, "Permission denied", str(tmp_path))
    monkeypatch.setattr(Path, "is_dir", lambda _: (_ for _ in ()).throw(refused))
    with pytest.raises(TraceError, match=r"cannot be read \(Permission denied\)"):
        read_trace(tmp_path / "a")


@pytest.mark.parametrize("arguments", [[], ["--htlm", "x", "a"], ["a", "--html"], ["a", "--ht", "b"]])
def test_bad_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line, not argparse's two; an option is not guessed from its beginning."""
    assert profile.main(arguments) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("profile: ")
    assert "--help" in err


def test_the_trainer_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--profile leaves a trace of three steps and the table; forward and backward products are all in it."""
    common = ["--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu"]
    assert train.main([*common, "--steps", "6", "--profile", str(tmp_path / "p")]) == 0
    found = read_trace(tmp_path / "p")
    assert found.steps == 3
    assert found.launches["aten::mm"] == 3 * 8  # 7 linears and the head: forward, input and weight gradient
    assert (tmp_path / "p" / "kernels.txt").read_text() == table([found]) + "\n"
    assert re.search(r"^GEMM +[\d,.]+ +[\d,.]+$", capsys.readouterr().err, re.MULTILINE)
    assert train.main([*common, "--steps", "5", "--profile", str(tmp_path / "q")]) == 2
    assert "--profile needs 6 steps" in capsys.readouterr().err
