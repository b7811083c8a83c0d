"""Baselines: proposed before they are written, loosened with reasons that add up, held against other platforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import across, baselines, cli, fingerprint, gate, platforms, proposal, record
from harness.record import Change
from suites.unit import tiny_checkout
from suites.unit.built_evidence import (
    CODEGEN_TEST,
    LOSS_CASE,
    LOSS_TEST,
    NUMERICS_TEST,
    WHERE,
    Built,
    facts,
    good,
    isa_file,
    loss_baseline_rows,
    loss_run,
    series,
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the baselines of a good run, on a machine that answers at once."""
    monkeypatch.setattr(platforms, "ask_device", lambda *_, **__: dict(tiny_checkout.FACTS))
    (tmp_path / "suites").mkdir()
    built = Built(tmp_path / "unused")
    built.baselines = tmp_path / "baselines"
    built.baseline(ids=[NUMERICS_TEST, CODEGEN_TEST, LOSS_TEST])
    return tmp_path


def run_with(checkout: Path, name: str, **changed: Any) -> str:
    """Evidence of a run there, with machine code that has changed."""
    return str(good(checkout / name).isa(isa_file(facts=facts(**changed))).write())


def propose(checkout: Path, evidence: str, *more: str) -> int:
    arguments = ["baseline", "propose", "--root", str(checkout), "--from", evidence, "--suite", "codegen"]
    return cli.main([*arguments, *more])


def vgprs(checkout: Path) -> object:
    (block,) = baselines.load_codegen(checkout / "baselines/gfx942/codegen.json").blocks
    return block.rows[0].facts["vgprs"]


def test_a_proposal_writes_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would change, and a field for the reason; `--write` writes it."""
    evidence = run_with(checkout, "better", vgprs=12)
    assert propose(checkout, evidence) == 0
    text = capsys.readouterr().out
    assert text.startswith("## baselines/gfx942/codegen.json\n")
    assert '-{"module":"test_rowwise"' in text
    assert '+{"module":"test_rowwise"' in text
    assert max(map(len, text.splitlines())) <= proposal.WIDTH
    assert "Nothing becomes more tolerant" in text
    assert vgprs(checkout) == 16
    assert propose(checkout, evidence, "--write") == 0
    assert vgprs(checkout) == 12


def test_loosening_adds_up(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A little at a time is told as what it is: LOG.md and the proposal say where it stood at the first baseline."""
    for number, (value, told) in enumerate(
        [
            (18, "vgprs 16 -> 18"),
            (20, "vgprs 18 -> 20 (since the first baseline 16 -> 20, x 1.25, 2 times)"),
            (24, "vgprs 20 -> 24 (since the first baseline 16 -> 24, x 1.5, 3 times)"),
        ]
    ):
        evidence = run_with(checkout, f"worse-{number}", vgprs=value)
        before = vgprs(checkout)
        assert propose(checkout, evidence) == 0
        text = capsys.readouterr().out
        case = "rowwise-e4m3fnuz-bf16-k7168-gfx942"
        assert f"- more tolerant: {case}: {told}\n" in text
        assert "1 entries make the gate more tolerant. With the reason filled in:\n\n    reason:\n" in text
        assert propose(checkout, evidence, "--write") == 2
        assert vgprs(checkout) == before
        assert "makes the gate more tolerant" in capsys.readouterr().err
        assert propose(checkout, evidence, "--write", "--loosen", f"reason {number}") == 0
        assert vgprs(checkout) == value
        capsys.readouterr()
        log = (checkout / "baselines/LOG.md").read_text(encoding="utf-8")
        assert f"Reason: reason {number}\n" in log
        assert f"- gfx942/codegen.json: {case}: {told}\n" in log


def test_bands_add_up_too(tmp_path: Path) -> None:
    """Numbers as bands are written; what is no number, or was never loosened before, stays as it is."""
    folder = tmp_path / "baselines"
    folder.mkdir()
    entry = "cpu/loss.json: curve: loss steps 1-1"
    (folder / "LOG.md").write_text(f"- {entry} 5.00e-05 -> 1.00e-04\n- {entry} 1.00e-04 -> 1.50e-04\n- x: a -> b\n")
    loosened = ["curve: loss steps 1-1 1.50e-04 -> 2.00e-04", "curve: loss tail 1.0e-04 -> 2.0e-04", "curve: dropped"]
    change = Change(folder / "cpu/loss.json", "", loosened=list(loosened))
    proposal.add_up(tmp_path, [change])
    assert change.loosened == [
        f"{loosened[0]} (since the first baseline 5.00e-05 -> 2.00e-04, x 4, 3 times)",
        *loosened[1:],
    ]


def test_a_manifest_is_proposed_line_by_line(tmp_path: Path) -> None:
    """Ids that go and come, without the header that the command writes."""
    path = tmp_path / "manifest.txt"
    path.write_text(f"# header\n{LOSS_TEST}\n{NUMERICS_TEST}\n", encoding="ascii")
    text = proposal.render(tmp_path, [Change(path, f"{CODEGEN_TEST}\n{NUMERICS_TEST}", loosened=["gone"])])
    lines = [line for line in text.splitlines() if line.startswith(("+", "-")) and not line.startswith("- ")]
    assert sorted(lines) == sorted([f"+{CODEGEN_TEST}", f"-{LOSS_TEST}"])


# Across platforms ----------------------------------------------------------------------------------------------------


def other_platform(wobble: float = 0.0, **changed: Any) -> list[baselines.LossRun]:
    """What an MI300X recorded of the same case: run 0 a little off, and five nudged runs around it."""
    where = msgspec.structs.replace(WHERE, platform="mi300x", device="AMD Instinct MI300X", runtime="7.2.4")
    rows = []
    for nudge in range(6):
        row = loss_run(nudge, wobble + nudge * 1e-5, provenance=where)
        rows.append(msgspec.structs.replace(row, **changed))
    return rows


def write(root: Path, platform: str, rows: list[baselines.LossRun]) -> None:
    baselines.write_atomic(root / f"baselines/{platform}/loss.json", baselines.encode_loss(platform, rows))


def test_platforms_that_agree(tmp_path: Path) -> None:
    """The same case on two platforms, apart by more than a nudge and less than ten bands."""
    write(tmp_path, "cpu", loss_baseline_rows())
    write(tmp_path, "mi300x", other_platform(1e-3))
    assert across.lint(tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (other_platform(0.01), "cpu and mi300x differ by"),
        (other_platform(loss=[5.5123456] * 100), "loss is 5.5123456 at every step: a placeholder"),
        (other_platform(loss=series(2.0)), "cpu and mi300x differ by 1.00e+00 in steps 1-1"),
        (loss_baseline_rows(), "was recorded on cpu"),
    ],
    ids=["across-drift", "across-placeholder", "across-scale", "across-copied"],
)
def test_platforms_that_do_not(rows: list[baselines.LossRun], told: str, tmp_path: Path) -> None:
    """A build that is wrong from the start, a placeholder, a copied file: each is a line."""
    write(tmp_path, "cpu", loss_baseline_rows())
    write(tmp_path, "mi300x", rows)
    assert told in "\n".join(across.lint(tmp_path))


def test_runs_of_one_curve_share_their_fingerprint(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spread over two versions of torch is no noise; another device of the platform, or Python, moves no number."""
    rows = loss_baseline_rows()
    moved = msgspec.structs.replace(rows[3].provenance, device="Another CPU", python="3.13.1", torch="2.13.0+cpu")
    rows[3] = msgspec.structs.replace(rows[3], provenance=moved)
    write(checkout, "cpu", rows)
    assert cli.main(["baseline", "lint", "--root", str(checkout)]) == 0
    rows[3] = msgspec.structs.replace(rows[3], provenance=msgspec.structs.replace(moved, torch="2.14.0"))
    write(checkout, "cpu", rows)
    assert cli.main(["baseline", "lint", "--root", str(checkout)]) == 1
    told = f"cpu/loss.json: {LOSS_CASE}: 1 of 6 runs have another fingerprint (torch: '2.13.0' -> '2.14.0')"
    assert told in capsys.readouterr().out


def test_keys_apart() -> None:
    """What can move a number can move a time; the other way round there are keys that cannot."""
    assert set(fingerprint.NUMERICS) < set(fingerprint.SPEED)
    names = {field.name for field in msgspec.structs.fields(baselines.Provenance)}
    assert set(fingerprint.SPEED) <= names
    assert set(fingerprint.of_row(WHERE)) == set(fingerprint.NUMERICS)


def test_another_fingerprint_is_said_beside_the_verdict(tmp_path: Path) -> None:
    """A run under another torch is judged by the same bands, and the note says what differs."""
    assert gate.judge(good(tmp_path / "same").write()).notes == ()
    built = good(tmp_path / "other")
    built.run["versions"]["torch"] = "2.14.0"
    judgement = gate.judge(built.write())
    assert judgement.exit_code == 0
    assert judgement.notes == ("recorded otherwise: torch: '2.13.0' -> '2.14.0', for 1 curves",)


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        pytest.param("partition", "SPX/NPS1", "CPX/NPS4", id="partition"),
        pytest.param("image_digest", "sha256:1", "sha256:2", id="image"),
    ],
)
def test_machine_and_image_are_part_of_the_fingerprint(key: str, before: str, now: str, tmp_path: Path) -> None:
    """What run.json says of them goes into a row, and a later run elsewhere says that it was elsewhere."""
    built = good(tmp_path)
    assert getattr(record.provenance({**built.run, key: before}), key) == before
    where = msgspec.structs.replace(WHERE, **{key: before})
    rows = [msgspec.structs.replace(row, provenance=where) for row in loss_baseline_rows()]
    baselines.write_atomic(built.baselines / "cpu/loss.json", baselines.encode_loss("cpu", rows))
    assert gate.judge(built.write()).notes == ()  # a run that does not say it says nothing of it
    built.run[key] = before
    assert gate.judge(built.write()).notes == ()
    built.run[key] = now
    told = f"recorded otherwise: {key}: '{before}' -> '{now}', for 1 curves"
    assert gate.judge(built.write()).notes == (told,)


def test_a_row_without_partitions_does_not_name_them() -> None:
    """Files that were recorded before there were any stay as they are, byte by byte."""
    assert "partition" not in baselines.encode_loss("cpu", loss_baseline_rows())
    assert fingerprint.of_row(WHERE)["partition"] is None
