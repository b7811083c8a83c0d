"""Checkpoints: resuming changes nothing, a killed save is no checkpoint, and torch alone can read them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import checkpoint, train
from fp8stack.checkpoint import CheckpointError, Checkpoints
from fp8stack.config import TrainConfig
from fp8stack.models import held
from fp8stack.train import Trainer
from suites.unit import ranks

SHORT = TrainConfig(steps=12, batch=2, seq=16, device="cpu", layers=1, recipe="rowwise")


def short(**changes: Any) -> TrainConfig:
    return dataclasses.replace(SHORT, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The checkpoint after step 7 of 12 of SHORT, and hashes of its weights."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = Trainer(short())
    hashes: dict[str, float] = {}
    trainer.run(
        lambda record: hashes.update(ranks.hashes(trainer.model)) if record.step == 7 else None,
        Checkpoints(folder, keep=2),
        every=7,
    )
    return folder / "step-00000007", hashes


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 1,001 tokens: 62 samples of 16, so that 24 of them are an epoch that ends nowhere in particular."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    file.write_bytes(b"".join(((i * 7919) % 768).to_bytes(2, "little") for i in range(1001)))
    return file


@pytest.mark.parametrize("workers", [pytest.param(0, id="workers-0"), pytest.param(2, id="workers-2")])
def test_resume_is_bit_exact(workers: int, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8, stopped after step 7 of 12 and resumed: every number of every step is that of the straight run."""
    common = ["--recipe", "rowwise", "--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "12"]
    common += ["--data", str(tokens), "--checkpoint-every", "7", "--workers", str(workers)]

    def lines(out: Path) -> list[dict[str, Any]]:
        read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{name: line[name] for name in ("step", "loss", "grad_norm", "saturated", "nan")} for line in read]

    assert train.main([*common, "--out", str(tmp_path / "straight")]) == 0
    straight = lines(tmp_path / "straight")
    shutil.rmtree(tmp_path / "straight" / "checkpoints" / "step-00000012")
    assert train.main([*common, "--out", str(tmp_path / "straight"), "--resume"]) == 0
    assert "resuming after step 7" in capsys.readouterr().err
    assert lines(tmp_path / "straight") == straight
    assert [line["step"] for line in straight] == list(range(1, 13))


def test_another_number_of_ranks(saved: tuple[Path, dict[str, float]]) -> None:
    """Two ranks take up what one wrote: the same weights, and the next losses of the straight run."""
    folder, hashes = saved
    trainer = Trainer(short())
    trainer.restore(folder)
    following = trainer.run().steps
    for restored, steps in ranks.run_ranks(ranks.resume_on_two, short(), str(folder)):
        assert restored == pytest.approx(hashes, rel=1e-12)
        assert [step[0] for step in steps] == [8, 9, 10, 11, 12]
        assert steps[0][1] == pytest.approx(following[0].loss, rel=1e-6)


EXPERTS = TrainConfig(model="dsv3-tiny", steps=4, batch=4, seq=16, device="cpu", layers=2, recipe="rowwise")


def test_resume_with_experts(tmp_path: Path) -> None:
    """FP8 experts, resumed after step 2 of 4, give every number of the straight run: their balancing bias is kept."""
    straight = Trainer(EXPERTS)
    steps = straight.run(None, Checkpoints(tmp_path, keep=5), every=2).steps
    trainer = Trainer(EXPERTS)
    trainer.restore(tmp_path / "step-00000002")
    bias = trainer.model.layers[1].moe.router.bias.clone()
    assert bool(bias.any())
    assert trainer.run().steps == steps[2:]
    assert ranks.hashes(trainer.model) == ranks.hashes(straight.model)
    assert torch.equal(trainer.model.layers[1].moe.router.bias, straight.model.layers[1].moe.router.bias)
    assert not torch.equal(trainer.model.layers[1].moe.router.bias, bias)


def test_experts_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What four ranks wrote, two and two of which share the experts, one rank reads: weights, moments and bias.

    Every rank has the bias that one rank alone comes to, which takes the tokens of all.
    """
    config = dataclasses.replace(EXPERTS, steps=1, expert_parallel=2)
    answers = ranks.run_ranks(ranks.save_once, config, str(tmp_path), ranks=4)
    trainer = Trainer(dataclasses.replace(config, expert_parallel=1))
    seen: list[list[float]] = []
    trainer.run(lambda record: seen.append(trainer.model.layers[1].moe.router.bias.tolist()))
    assert all(bias == seen[0] for _, bias in answers)
    trainer.restore(tmp_path / "step-00000001")
    found = ranks.sizes_of(trainer.state())
    for written, _ in answers:
        assert found == pytest.approx(written, rel=1e-12)
    assert found["model/layers.1.moe.router.bias"] > 0
    assert found["exp_avg/layers.1.moe.experts.w1"] > 0


def test_plain_tensors(saved: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    """torch alone reads it with weights_only: plain float32, names of the bf16 model (pytorch/torchtitan#651)."""
    folder, hashes = saved
    [found] = ranks.run_ranks(ranks.read_without_the_package, str(folder), str(tmp_path / "one.pt"), ranks=1)
    assert set(found) == set(Trainer(short(recipe="bf16")).state())
    assert {(kind, dtype) for kind, dtype, _ in found.values()} == {("Tensor", torch.float32)}
    assert {name: found[f"model/{name}"][2] for name in hashes} == pytest.approx(hashes, rel=1e-12)
    assert found["adam_step"][2] == 49.0


def test_save_is_of_its_moment(tmp_path: Path) -> None:
    """What changes after `save` returned is not in the checkpoint, however long the writing takes."""
    trainer = Trainer(short(steps=1, recipe="bf16"))
    trainer.run()
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = trainer.state()
    before = {name: held(tensor).clone() for name, tensor in state.items()}
    checkpoints.save(1, state, trainer.facts())
    for tensor in state.values():
        held(tensor).fill_(7.0)
    checkpoints.wait()
    trainer.restore(tmp_path / "step-00000001")
    for name, tensor in trainer.state().items():
        assert torch.equal(held(tensor), before[name]), name


def test_killed_save_is_no_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while the save of step 2 is completed: step 1 is taken, and what was ignored is named."""
    folder = tmp_path / "checkpoints"
    config = short(recipe="bf16", steps=4)
    with pytest.raises(RuntimeError, match=r"ranks died: \{0: -9\}"):
        ranks.run_ranks(ranks.killed_in_a_save, config, str(folder), ranks=1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002.partial"]
    trainer = Trainer(config)
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.newest() == folder / "step-00000001"
    assert checkpoints.ignored == ["step-00000002.partial"]
    trainer.restore(folder / "step-00000001")
    assert [record.step for record in trainer.run(None, checkpoints, every=1).steps] == [2, 3, 4]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(
    ("how", "codes", "told"),
    [
        pytest.param("not-finite", [1, 1], "step 3: the loss is not finite", id="stopped-not-finite"),
        pytest.param("metrics", [1, "RuntimeError"], "step 3 could not be written", id="stopped-metrics"),
        pytest.param("data", ["RuntimeError", 2], "the tokens are gone", id="stopped-data"),
    ],
)
def test_a_save_under_way_outlives_the_error(how: str, codes: list[Any], told: str, tmp_path: Path) -> None:
    """A run that stops while a checkpoint is being written leaves it complete, whichever rank stops first."""
    answers = ranks.run_ranks(ranks.stopped_in_a_save, how, True, str(tmp_path))
    assert [code for code, _ in answers] == codes
    errors = [line for _, err in answers for line in err.splitlines() if line.startswith("train")]
    assert len(errors) == 1, errors
    assert told in errors[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("how", [pytest.param(how, id=f"lost-{how}") for how in ("not-finite", "metrics")])
def test_a_save_that_is_lost_is_told(how: str, tmp_path: Path) -> None:
    """Where it cannot be completed a second line says so, from rank 0 alone."""
    answers = ranks.run_ranks(ranks.stopped_in_a_save, how, False, str(tmp_path))
    lines = [[line for line in err.splitlines() if line.startswith("train")] for _, err in answers]
    assert [len(told) for told in lines] == [2, 0]
    assert "step 3" in lines[0][0]
    assert "the checkpoint of step 2 could not be written" in lines[0][1]
    assert "No space left on device" in lines[0][1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.partial"]


INTERRUPTED_IN_A_SAVE = """
import signal, sys, time
import torch.distributed.checkpoint as dcp
from fp8stack import command, train
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands on one that is ignored

def slowly(*_):
    print("writing", file=sys.stderr, flush=True)
    time.sleep(5.0)
    raise OSError("too late")

dcp.FileSystemWriter.write_data = slowly
sys.exit(command.run("train", lambda: train.main(sys.argv[1:])))
"""


def test_an_interrupted_save_is_told(tmp_path: Path) -> None:
    """Ctrl-C does not wait for a save; where the group that it needs goes, one line says that it is given up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    arguments = ["--layers", "1", "--batch", "1", "--seq", "8", "--device", "cpu", "--steps", "1000000"]
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_IN_A_SAVE, *arguments, "--out", str(tmp_path), "--checkpoint-every", "2"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **place},
    )  # fmt: skip
    assert running.stderr is not None
    try:
        for line in running.stderr:
            if line == "writing\n":
                break
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, err
    told = [line for line in err.splitlines() if line.startswith("train: ")]
    assert told[-1] == "train: interrupted"
    assert "the checkpoint of step 2 is given up (it was still being written)" in told[0]
    assert len(told) == 2, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("steps", "every", "found"),
    [
        pytest.param(3, 5, [3], id="ends-before-the-first"),
        pytest.param(3, 2, [2, 3], id="ends-between"),
        pytest.param(4, 2, [2, 4], id="ends-on-one"),
    ],
)
def test_the_last_step_is_saved(steps: int, every: int, found: list[int], tmp_path: Path) -> None:
    """After the last step there is a checkpoint, written once; resuming there does nothing and is no error."""
    saved: list[int] = []

    class Counting(Checkpoints):
        def save(self, step: int, state: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
            saved.append(step)
            super().save(step, state, facts)

    common = ["--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", str(steps)]
    common += ["--out", str(tmp_path), "--checkpoint-every", str(every)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Checkpoints", Counting)
        for again in ([], ["--resume"]):
            assert train.main([*common, *again]) == 0
            assert saved == found
            names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
            assert names == [f"step-{step:08d}" for step in found]
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == steps


def test_dtype_is_checked(saved: tuple[Path, dict[str, float]]) -> None:
    """A tensor of another dtype is an error that names it, not a silent cast (pytorch/pytorch#187138)."""
    folder, _ = saved
    state = Trainer(short()).state()
    name = "model/layers.0.attention.wq.weight"
    state[name] = held(state[name]).bfloat16()
    with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' is torch\.float32 .* expected torch\.bfloat16"):
        checkpoint.load(folder, state)
    del state[name]
    with pytest.raises(CheckpointError, match=f"has '{re.escape(name)}', which the model lacks"):
        checkpoint.load(folder, state)


def test_another_configuration(saved: tuple[Path, dict[str, float]]) -> None:
    """Resuming with other options is refused and names them."""
    with pytest.raises(CheckpointError, match=r"another configuration: lr, seed differ"):
        Trainer(short(lr=1e-4, seed=3)).restore(saved[0])


def test_another_arch(saved: tuple[Path, dict[str, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 of another arch rounds otherwise: resuming is refused and says how to go on."""
    monkeypatch.setenv("FP8STACK_ARCH", "gfx942")
    with pytest.raises(CheckpointError, match=r"formats of cpu.*FP8STACK_ARCH=cpu"):
        Trainer(short()).restore(saved[0])


def test_damaged_checkpoint(saved: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    """A cut metadata file is one line that says what to do, not a traceback from inside torch."""
    (tmp_path / ".metadata").write_bytes((saved[0] / ".metadata").read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot be read.*remove the folder"):
        checkpoint.load(tmp_path, Trainer(short()).state())


def test_damaged_payload(saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: Any) -> None:
    """A cut file of tensors too is one line and exit 2."""
    folder = tmp_path / "checkpoints" / saved[0].name
    shutil.copytree(saved[0], folder)
    (folder / "__0_0.distcp").write_bytes((saved[0] / "__0_0.distcp").read_bytes()[:1000])
    common = ["--recipe", "rowwise", "--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "12"]
    assert train.main([*common, "--out", str(tmp_path), "--resume"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert re.search(r"step-00000007 cannot be read.*remove the folder", err)


@pytest.mark.parametrize("text", [pytest.param('{"digests": {"1": {', id="cut"), pytest.param("[]", id="list")])
def test_damaged_run_file(text: str, saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: Any) -> None:
    """A run.json that cannot be read is refused at --resume, not met at the last step."""
    shutil.copytree(saved[0], tmp_path / "checkpoints" / saved[0].name)
    (tmp_path / "run.json").write_text(text)
    assert train.main(["--layers", "1", "--device", "cpu", "--out", str(tmp_path), "--resume"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert "run.json cannot be read" in err


DAMAGED_FACTS = {
    "facts-empty": (b"{}", "'step' is None"),
    "facts-list": (b"[]", "no object"),
    "facts-number": (b"5", "no object"),
    "facts-no-config": (b'{"step": 7, "config_hash": "x", "arch": "cpu"}', "'config' is None"),
    "facts-step": (b'{"step": "7", "config_hash": "x", "config": {}, "arch": "cpu"}', "'step' is '7'"),
    "facts-bytes": (b"\xff", "can't decode byte 0xff"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in DAMAGED_FACTS])
def test_damaged_facts(name: str, saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: Any) -> None:
    """A facts.json that says less than a resume needs is one line and exit 2."""
    text, told = DAMAGED_FACTS[name]
    folder = tmp_path / "checkpoints" / saved[0].name
    shutil.copytree(saved[0], folder)
    (folder / checkpoint.FACTS).write_bytes(text)
    assert train.main(["--layers", "1", "--device", "cpu", "--out", str(tmp_path), "--resume"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert f"{folder} has no readable facts.json" in err
    assert told in err


def test_metrics_that_are_no_text(saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: Any) -> None:
    """A byte that is no UTF-8 in metrics.jsonl is one line and exit 2 at --resume, and nothing is removed."""
    shutil.copytree(saved[0], tmp_path / "checkpoints" / saved[0].name)
    lines = b'{"step": 1}\n{"step": \xff}\n'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    common = ["--recipe", "rowwise", "--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "12"]
    assert train.main([*common, "--out", str(tmp_path), "--resume"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: ")]
    assert len(told) == 1
    assert re.search(r"metrics\.jsonl cannot be read .*0xff.*; expected the UTF-8 lines", told[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


def test_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No room for a checkpoint is an error before the first step; a disk that fills up later stops the run."""
    common = ["--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "2", "--out", str(tmp_path)]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert train.main([*common, "--checkpoint-every", "1"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "a checkpoint takes 0.00 GiB" in err

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush_folder", full)
    assert train.main([*common, "--checkpoint-every", "1"]) == 1
    assert "the checkpoint of step 1 could not be written" in capsys.readouterr().err.splitlines()[-1]


REFUSED = {
    "resume-nothing": (["--resume"], "drop --resume"),
    "resume-nowhere": (["--resume"], "--out"),
    "negative": (["--checkpoint-every", "-1"], "--checkpoint-every"),
    "keep": (["--checkpoint-every", "1", "--keep", "0"], "--keep"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in REFUSED])
def test_bad_options(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line that names the option."""
    arguments, word = REFUSED[name]
    out = [] if name == "resume-nowhere" else ["--out", str(tmp_path)]
    assert train.main(["--steps", "1", "--layers", "1", "--device", "cpu", *out, *arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert word in err


def test_a_second_start_does_not_overwrite(saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: Any) -> None:
    """A folder with checkpoints is not begun anew by accident."""
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    common = ["--layers", "1", "--device", "cpu", "--out", str(tmp_path), "--checkpoint-every", "1"]
    assert train.main(common) == 2
    assert "--resume" in capsys.readouterr().err


REFUSED_LATE = {
    "again": ([], "already holds metrics.jsonl and run.json of a run"),
    "profile": (["--resume", "--profile", "p"], "--profile needs 6 steps"),
    "resume": (["--resume", "--seed", "1"], "seed differ"),
}


@pytest.mark.parametrize("name", [pytest.param(name, id=f"keeps-{name}") for name in REFUSED_LATE])
def test_a_refused_command_keeps_the_metrics(
    name: str, saved: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is refused in the folder of a run, every line of its metrics.jsonl is still there; so is a cut save."""
    arguments, told = REFUSED_LATE[name]
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, 10))
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "run.json").write_text("{}")
    if name != "again":
        shutil.copytree(saved[0], tmp_path / "checkpoints" / saved[0].name)
        cut = tmp_path / "checkpoints" / "step-00000011.partial" / "__0_0.distcp"
        cut.parent.mkdir()
        cut.write_text("half of it")
    common = ["--recipe", "rowwise", "--layers", "1", "--batch", "2", "--seq", "16", "--device", "cpu"]
    assert train.main([*common, "--steps", "12", "--out", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len([line for line in err.splitlines() if line.startswith("train: ")]) == 1
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert name == "again" or cut.read_text() == "half of it"


def test_room_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill left behind makes way for the next save, so it takes no room from it."""
    Trainer(short(steps=1, recipe="bf16"))  # for its process group
    file = tmp_path / "step-00000011.partial" / "deep" / "__0_0.distcp"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1 << 20))
    checkpoints = Checkpoints(tmp_path, keep=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert checkpoints.free_bytes() == 1000 + (1 << 20)


def test_resume_of_nothing_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped --out is not made; of a run killed in its first save the rest is named and left."""
    common = ["--layers", "1", "--device", "cpu", "--resume"]
    assert train.main([*common, "--out", str(tmp_path / "typo")]) == 2
    assert not (tmp_path / "typo").exists()
    cut = tmp_path / "killed" / "checkpoints" / "step-00000003.partial"
    cut.mkdir(parents=True)
    capsys.readouterr()
    assert train.main([*common, "--out", str(tmp_path / "killed")]) == 2
    assert "holds no complete checkpoint (step-00000003.partial: cut off, and left" in capsys.readouterr().err
    assert cut.is_dir()
