"""The dry run: what it counts is what real ranks do, and what it simulates says so."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fp8stack import dryrun, train
from fp8stack.config import ConfigError, TrainConfig
from fp8stack.device import ARCHS
from fp8stack.dryrun import Measured, Topology, read_topology, weak_scaling
from fp8stack.utilisation import PEAKS
from suites.unit import ranks

SHORT = TrainConfig(steps=2, batch=4, seq=16, device="cpu", layers=2, digests=False)
FP8 = dataclasses.replace(SHORT, recipe="rowwise")
DEEP = dataclasses.replace(SHORT, layers=4)
EXPERTS = dataclasses.replace(SHORT, model="dsv3-tiny")
CASES: dict[str, tuple[TrainConfig, int, str]] = {
    "two": (SHORT, 2, "cpu"),
    "four": (FP8, 4, "cpu"),
    "gpu": (SHORT, 2, "cuda"),
    "deep": (DEEP, 4, "cpu"),
    "experts": (dataclasses.replace(EXPERTS, recipe="rowwise"), 2, "cpu"),
    "parallel": (dataclasses.replace(EXPERTS, expert_parallel=2), 2, "cpu"),
    "both": (dataclasses.replace(EXPERTS, expert_parallel=2, layers=3), 4, "cpu"),
    "full": (dataclasses.replace(SHORT, recompute="full"), 2, "cuda"),
    "selective": (dataclasses.replace(FP8, recompute="selective"), 2, "cuda"),
    "longer": (dataclasses.replace(EXPERTS, expert_parallel=2, layers=4), 4, "cpu"),
    "cut": (dataclasses.replace(EXPERTS, expert_parallel=2, recompute="full", compile="aot_eager"), 2, "cpu"),
    "codes": (dataclasses.replace(SHORT, recipe="tensorwise", fp8_all_gather=True, accumulate=2), 2, "cpu"),
    "values": (dataclasses.replace(SHORT, recipe="tensorwise", accumulate=2), 2, "cpu"),
    "kept": (dataclasses.replace(SHORT, reshard=False), 2, "cpu"),
    "kept experts": (
        dataclasses.replace(EXPERTS, expert_parallel=2, reshard=False, accumulate=2, recompute="full"),
        2,
        "cpu",
    ),
}


@pytest.fixture(scope="module")
def dry() -> dict[str, tuple[dict[Any, tuple[int, int]], dict[str, int], dict[str, Any], dict[str, int]]]:
    """The dry run of every case, in one process that has no other process group."""
    [answers] = ranks.run_ranks(ranks.dry_collectives, list(CASES.values()), ranks=1)
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two", id="2-ranks-bf16"),
        pytest.param("four", id="4-ranks-rowwise"),
        pytest.param("codes", id="2-ranks-fp8-all-gather"),
    ],
)
def test_collectives_are_those_of_real_ranks(name: str, dry: dict[str, Any]) -> None:
    """Counts, bytes and group sizes equal those of a real gloo run, on every rank."""
    config, size, _ = CASES[name]
    for found in ranks.run_ranks(ranks.real_collectives, config, ranks=size):
        assert found == dry[name][0]
    assert {op for op, _ in dry[name][0]} == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("experts", id="2-ranks-experts-rowwise"),
        pytest.param("parallel", id="2-ranks-expert-parallel"),
        pytest.param("both", id="4-ranks-expert-parallel"),
    ],
)
def test_collectives_of_experts(name: str, dry: dict[str, Any]) -> None:
    """Counts and bytes equal those of real ranks, but for the rows exchanged: there the bytes of all ranks do."""
    config, size, _ = CASES[name]
    answers = ranks.run_ranks(ranks.real_collectives, config, ranks=size)
    exchange = ("all-to-all", config.expert_parallel)
    exchanged = [answer.pop(exchange, (0, 0)) for answer in answers]
    expected = dict(dry[name][0])
    count, volume = expected.pop(exchange, (0, 0))
    assert all(answer == expected for answer in answers)
    assert all(found == count for found, _ in exchanged)
    assert sum(found for _, found in exchanged) == size * volume
    # A layer of experts: how many rows, then rows there and back, in the forward and in the backward pass.
    assert count == (5 * config.size.expert_layers if config.expert_parallel > 1 else 0)
    choices = config.batch // size * config.seq * 2
    assert volume == (config.size.expert_layers * (4 * choices * 128 * 2 + 8 * 8) if count else 0)


def test_collectives_of_a_cut_block(dry: dict[str, Any]) -> None:
    """Where blocks are cut for compile, what is played is what runs: here 7 exchanges and not the 8 of a whole block.

    The part with the exchange is recomputed by itself, and only as far as its gradient needs: rows do not come back
    once more.
    """
    config, size, _ = CASES["cut"]
    expected = dict(dry["cut"][0])
    exchange = ("all-to-all", 2)
    count, volume = expected.pop(exchange)
    assert count == 7
    answers = ranks.run_ranks(ranks.real_collectives, config, ranks=size)
    exchanged = [answer.pop(exchange) for answer in answers]
    assert all(answer == expected for answer in answers)
    assert [found for found, _ in exchanged] == [count, count]
    assert sum(found for _, found in exchanged) == size * volume


@pytest.mark.parametrize("name", ["kept", "kept experts"])
def test_weights_that_stay_gathered(name: str, dry: dict[str, Any]) -> None:
    """--no-reshard: a gather less for each unit of a block and microbatch, on real ranks and played; the same bits."""
    kept, size, _ = CASES[name]
    kept = dataclasses.replace(kept, digests=True)
    freed = dataclasses.replace(kept, reshard=True)
    for (fewer, same), (more, expected) in ranks.run_ranks(ranks.real_runs, [kept, freed], ranks=size):
        assert same == expected
        gathers = ("all-gather", 2)
        assert fewer[gathers] == dry[name][0][gathers]
        assert more[gathers][0] - fewer[gathers][0] == kept.accumulate * kept.layers
        assert {key: n for key, n in fewer.items() if key != gathers} == {
            key: n for key, n in more.items() if key != gathers
        }


def test_bytes_of_the_fp8_all_gather(dry: dict[str, Any]) -> None:
    """Weights of linears in blocks travel as one byte an element and not two, and a step has one all-reduce more."""
    config = CASES["codes"][0]
    codes, values = (dry[name][0] for name in ("codes", "values"))
    gathers = 2 * config.accumulate  # of a block, for its forward and for its backward pass
    elements = config.layers * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)
    (count, volume), (same, more) = codes["all-gather", 2], values["all-gather", 2]
    assert (count, more - volume) == (same, gathers * elements)
    (count, volume), (fewer, less) = codes["all-reduce", 2], values["all-reduce", 2]
    assert (count - fewer, volume - less) == (1, 4 * 7 * config.layers)
    assert codes["reduce-scatter", 2] == values["reduce-scatter", 2]


def test_sizes_of_experts_by_hand(dry: dict[str, Any]) -> None:
    """Two of four ranks hold the same 4 of 8 experts a layer: their gradients are reduced over two, the rest over four.

    The last but one all-reduce holds loss and norm, the last what each expert of each layer was chosen.
    """
    size = CASES["both"][0].size
    experts = size.expert_layers * 8 * 3 * 64 * 128
    collectives, memory, *_ = dry["both"]
    assert collectives["reduce-scatter", 2] == (size.expert_layers, 4 * experts // 2)
    assert collectives["reduce-scatter", 4] == (2 + size.layers, 4 * (size.parameters - experts))
    assert collectives["all-reduce", 4] == (3, 8 + 16 + 8 * 8 * size.expert_layers)
    assert memory["parameters (shard)"] == size.parameters  # 4 bytes, a quarter of them here


def test_blocks_of_experts_are_extended(dry: dict[str, Any]) -> None:
    """A further block of experts adds what the last one added."""
    [answer] = ranks.run_ranks(
        ranks.dry_collectives, [(dataclasses.replace(CASES["both"][0], layers=2), 4, "cpu")], ranks=1
    )
    extended = Measured(*answer[0]).extended(Measured(*dry["both"]), 1)
    assert extended.collectives == Measured(*dry["longer"]).collectives
    assert extended.memory["total"] == pytest.approx(dry["longer"][1]["total"], rel=0.02)


def test_sizes_by_hand(dry: dict[str, Any]) -> None:
    """Two ranks of two blocks: every gradient is reduced once, in float32; the last all-reduce holds loss and norm."""
    size = SHORT.size
    collectives, memory, *_ = dry["two"]
    assert collectives["reduce-scatter", 2] == (4, 4 * size.parameters)
    assert collectives["all-reduce", 2] == (2, 8 + 16)
    assert dry["four"][0]["all-reduce", 4] == (2, 8 + 16 + 8 * 2 * 14)
    assert memory["parameters (shard)"] == 4 * size.parameters // 2
    assert memory["optimiser"] == pytest.approx(2 * 4 * size.parameters // 2, abs=1000)


def test_the_gpu_path_is_played(dry: dict[str, Any]) -> None:
    """For a GPU the embedding is gathered as bf16, and attention is not written out in float64."""
    size = SHORT.size
    gathers = dry["two"][0]["all-gather", 2], dry["gpu"][0]["all-gather", 2]
    assert gathers[0][0] == gathers[1][0]
    assert (gathers[0][1] - gathers[1][1]) % (2 * size.vocab * size.dim) == 0
    assert gathers[0][1] > gathers[1][1]
    assert dry["gpu"][1]["activations"] < dry["two"][1]["activations"] / 2


def test_blocks_are_extended(dry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Running two and three blocks and adding the difference gives what running all four gives."""
    whole = Measured(*dry["deep"])
    cases = [(dataclasses.replace(DEEP, layers=layers), 4, "cpu") for layers in (2, 3)]
    [answers] = ranks.run_ranks(ranks.dry_collectives, cases, ranks=1)
    extended = Measured(*answers[0]).extended(Measured(*answers[1]), 1)
    assert extended.collectives == whole.collectives
    assert extended.memory["total"] == pytest.approx(whole.memory["total"], rel=0.02)


def test_the_peak_moves_with_depth() -> None:
    """Of 4 and 5 blocks the peak is where the backward pass begins, of 16 where it ends: 1,000 + 16 x 200, not x 50."""
    short, longer = (
        Measured(
            {},
            {"total": 3000 + 50 * layers},
            {"last block": {"total": 3000 + 50 * layers}, "first block": {"total": 1000 + 200 * layers}},
        )
        for layers in (4, 5)
    )
    assert short.extended(longer, 0).memory == {"total": 3250}
    assert short.extended(longer, 11).memory == {"total": 4200}


def test_moments_of_a_step(dry: dict[str, Any]) -> None:
    """The peak is the largest of them; gradients are there where the backward pass ends, not where it begins."""
    for name in ("gpu", "full", "both"):
        _, memory, moments, _ = dry[name]
        assert list(moments) == ["head", "last block", "first block", "embedding"], name
        assert memory["total"] >= max(at["total"] for at in moments.values()), name
        begins, ends = moments["head"], moments["embedding"]
        assert ends["gradients (shard)"] > begins["gradients (shard)"], name
        assert begins["activations"] > ends["activations"], name


def test_recomputed_flops_by_hand(dry: dict[str, Any]) -> None:
    """Full repeats all products of a block; selective the second, fourth and sixth linear: k, o and w3."""
    size, tokens = SHORT.size, 32
    linears = 2 * tokens * size.block_matmul_parameters
    attention = size.layers * 2 * 2 * size.heads * 16 * 16 * (2 * size.head_dim)
    assert dry["gpu"][3] == {"bf16": 0, "fp8": 0}
    assert dry["full"][3] == {"bf16": linears + attention, "fp8": 0}
    odd = size.dim * (size.kv_heads * size.head_dim + size.dim + size.ffn)
    assert dry["selective"][3] == {"bf16": 0, "fp8": size.layers * 2 * tokens * odd}


NODE = {
    "gpus_a_node": 8, "node_gb_s": 100.0, "network_gb_s": 10.0, "node_latency_us": 10.0, "network_latency_us": 20.0,
    "compute_efficiency": 0.5,
}  # fmt: skip


def test_topology_by_hand() -> None:
    """3 latencies and 7/8 of a GB at 100 GB/s within a node; beyond it the network's; an all-reduce moves twice."""
    topology = Topology(**NODE)
    assert topology.seconds("all-gather", 8, 10**9) == pytest.approx(3 * 10e-6 + 7 / 8 / 100)
    assert topology.seconds("all-gather", 16, 10**9) == pytest.approx(4 * 20e-6 + 15 / 16 / 10)
    assert topology.seconds("all-reduce", 8, 10**9) == pytest.approx(3 * 10e-6 + 2 * 7 / 8 / 100)
    assert topology.seconds("all-gather", 1, 10**9) == 0.0


def test_weak_scaling() -> None:
    """From 8 to 4,096 GPUs: where computing takes longer nothing but the first gather shows; else the network does."""
    measured = Measured({("all-gather", 16): (10, 10**10)}, {})
    rows = weak_scaling(measured, 16, 1, 5.0, 10, 1000, Topology(**NODE))
    assert [row["gpus"] for row in rows] == [8 << n for n in range(10)]
    assert rows[-1]["gpus"] == 4096
    assert rows[0]["step_s"] == pytest.approx(10.0 + rows[0]["communication_s"] / 20)
    assert rows[1]["communication_s"] == pytest.approx(10 * (4 * 20e-6 + 15 / 16 / 10))
    slow = weak_scaling(measured, 16, 1, 0.05, 10, 1000, Topology(**NODE))
    assert slow[1]["step_s"] == pytest.approx(slow[1]["communication_s"] * 1.05)
    assert slow[1]["efficiency"] < 0.2 < 0.99 < rows[1]["efficiency"] <= 1


def test_weak_scaling_of_experts() -> None:
    """The degree stays: its group exchanges rows on any cluster, the ranks that hold the same experts grow with it.

    These are as far apart as the degree: two of them, of 32 GPUs, talk through the network.
    """
    topology = Topology(**NODE)
    measured = Measured({("all-to-all", 16): (1, 10**9), ("all-gather", 4): (1, 10**9)}, {})
    rows = weak_scaling(measured, 64, 16, 1.0, 10, 1000, topology)
    assert [row["gpus"] for row in rows] == [16 << n for n in range(9)]
    for row in rows:
        shards = int(row["gpus"]) // 16
        gather = 0.0 if shards == 1 else math.log2(shards) * 20e-6 + (shards - 1) / shards / 10
        assert row["communication_s"] == pytest.approx(4 * 20e-6 + 15 / 16 / 10 + gather)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({"node_gb_s": 0}, "node_gb_s is 0", id="zero"),
        pytest.param({"node_gb_s": None}, "lacks node_gb_s", id="missing"),
        pytest.param({"extra": 1}, "has or lacks extra", id="unknown"),
        pytest.param({"compute_efficiency": 1.5}, "compute_efficiency of at most 1", id="efficiency"),
        pytest.param({"network_gb_s": math.nan}, "network_gb_s is nan", id="nan"),
    ],
)
def test_bad_topology(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    """Each wrong line of a topology file is named."""
    file = tmp_path / "cluster.toml"
    fields = {name: value for name, value in {**NODE, **change}.items() if value is not None}
    file.write_text("\n".join(f"{name} = {value}" for name, value in fields.items()))
    with pytest.raises(ConfigError, match=told):
        read_topology(file)


def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured({("all-gather", 8): (68, 10**10)}, {"total": 2**30})
    monkeypatch.setattr(dryrun, "measure", lambda *_: measured)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("AMD Instinct MI300X", "BF16 1307.4 TFLOPS, FP8 2614.9 TFLOPS"),
        ("AMD Instinct MI325X", "BF16 1307.4 TFLOPS, FP8 2614.9 TFLOPS"),
        ("AMD Instinct MI350X", "BF16 2300.0 TFLOPS, FP8 4600.0 TFLOPS"),
        ("AMD Instinct MI355X", "BF16 2500.0 TFLOPS, FP8 5000.0 TFLOPS"),
        ("NVIDIA H200", "BF16 989.0 TFLOPS, FP8 1979.0 TFLOPS"),
        ("Cray", "null: no peak rates are known for 'Cray'"),
    ],
)
def test_report(name: str, rates: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run prints the peak rates of the device, FLOPs a token worked out by hand, and no simulation unasked."""
    _measured(monkeypatch)
    arguments = ["--dry-run", "--world-size", "8", "--model", "llama3-8b", "--batch", "8", "--seq", "8192"]
    assert train.main([*arguments, "--device-name", name]) == 0
    out = capsys.readouterr().out
    assert rates in out
    assert "FLOPs a token        57,912,852,480" in out
    assert "SIMULATED" not in out


def test_every_device_has_an_arch() -> None:
    """The devices whose peak rates are known are those whose arch is."""
    assert set(dryrun.ARCH_OF) == {peaks.sku for peaks in PEAKS}
    assert set(dryrun.ARCH_OF.values()) <= set(ARCHS)


@pytest.mark.parametrize("model", [pytest.param(name, id=name) for name in ("llama3-8b", "dsv3-16b")])
def test_a_recipe_that_the_device_cannot_do(model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """MX formats on FNUZ hardware: refused with the words of a real run, exit 2; taken where the device has OCP's."""
    _measured(monkeypatch)
    arguments = ["--dry-run", "--world-size", "8", "--model", model, "--batch", "8", "--recipe", "mxfp8"]
    assert train.main([*arguments, "--device-name", "AMD Instinct MI300X"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert "recipe 'mxfp8' has E8M0 scales, which no e4m3fnuz" in err
    assert train.main([*arguments, "--device-name", "AMD Instinct MI355X"]) == 0


@pytest.mark.parametrize(
    ("name", "override", "fp8"),
    [
        pytest.param("AMD Instinct MI250X", None, False, id="no-instructions"),
        pytest.param("cpu", None, False, id="cpu"),
        pytest.param("AMD Instinct MI300X", None, True, id="native"),
        pytest.param("AMD Instinct MI300X", "sm_90", False, id="simulated"),
    ],
)
def test_flops_in_fp8(name: str, override: str | None, fp8: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """FP8 FLOPs are those of FP8 instructions: none where FP8 is simulated; the total is the same."""
    _measured(monkeypatch)
    if override:
        monkeypatch.setenv("FP8STACK_ARCH", override)
    arguments = ["--dry-run", "--world-size", "8", "--model", "llama3-8b", "--batch", "8", "--seq", "8192"]
    assert train.main([*arguments, "--recipe", "rowwise", "--json", "--device-name", name]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["flops_a_token_fp8"] > 0) == fp8
    assert report["flops_a_token"] == 57_912_852_480


def test_weak_scaling_from_ranks_that_share_nothing(tmp_path: Path) -> None:
    """One rank gathers nothing, nor are experts gathered that each rank has others of.

    The table is that of twice as many ranks, with the same tokens a rank, and says so; and what 8 ranks give.
    """
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in NODE.items()))
    few = dataclasses.replace(SHORT, batch=1)
    spread = dataclasses.replace(EXPERTS, expert_parallel=2, batch=2)
    cases = [
        (few, 1),
        (dataclasses.replace(few, batch=2), 2),
        (dataclasses.replace(few, batch=8), 8),
        (spread, 2),
        (dataclasses.replace(spread, batch=4), 4),
        (dataclasses.replace(spread, batch=8), 8),
    ]
    [reports] = ranks.run_ranks(ranks.dry_reports, cases, str(file), ranks=1)
    tables = [report["simulated"]["weak_scaling"] for report in reports]
    for first in (0, 3):
        assert tables[first] == tables[first + 1]
        for row, other in zip(tables[first], tables[first + 2], strict=True):
            assert row["communication_s"] == pytest.approx(other["communication_s"], rel=1e-3)
    assert [report["ranks"] for report in reports] == [ranks_ for _, ranks_ in cases]
    assert [entry["op"] for entry in reports[0]["collectives"]] == ["all-reduce"]
    assert [report["simulated"]["collectives_of_ranks"] for report in reports] == [2, 2, 8, 4, 4, 8]
    told = "collectives as measured at {} ranks"
    assert told.format(2) in dryrun.text(reports[0])
    assert told.format(4) in dryrun.text(reports[3])
    assert all("as measured at" not in dryrun.text(reports[n]) for n in (1, 2, 4, 5))


def test_simulation_is_labelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The weak-scaling table says that it is simulated and from which file; in JSON it is under that word."""
    _measured(monkeypatch)
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in NODE.items()))
    common = ["--dry-run", "--world-size", "8", "--batch", "8", "--topology", str(file)]
    assert train.main([*common, "--device-name", "AMD Instinct MI300X"]) == 0
    assert f"SIMULATED weak scaling, from {file}" in capsys.readouterr().out
    assert train.main([*common, "--device-name", "AMD Instinct MI300X", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"]["topology"] == str(file)
    assert len(report["simulated"]["weak_scaling"]) == 10
    assert train.main([*common, "--device-name", "Cray"]) == 2
    assert "--device-name" in capsys.readouterr().err


def test_recomputed_products_take_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """As many FLOPs repeated at the BF16 peak as a step of the rank has there take its time once more; and are told."""
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in NODE.items()))
    seconds = []
    for again in (0, 2 * 8192 * 57_912_852_480):
        measured = Measured({}, {"total": 2**30}, recomputed={"bf16": again, "fp8": 0})
        monkeypatch.setattr(dryrun, "measure", lambda *_, found=measured: found)
        arguments = ["--dry-run", "--world-size", "8", "--model", "llama3-8b", "--batch", "16", "--seq", "8192"]
        arguments += ["--json", "--topology", str(file), "--device-name", "NVIDIA H200"]
        assert train.main(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flops_a_token_recomputed"] == again / (2 * 8192)
        seconds.append(report["simulated"]["weak_scaling"][0]["compute_s"])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_bad_world_size(capsys: pytest.CaptureFixture[str]) -> None:
    """No ranks, or ranks that do not divide the batch: one line."""
    for size, option in (("0", "--world-size"), ("3", "--batch")):
        # The second check needs no process group of its own: the batch is refused first.
        assert train.main(["--dry-run", "--world-size", size, "--batch", "8"]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, err
        assert option in err
