"""`fp8ci isa show`: hot loops with a word a line, what changed against a revision, and the command around it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import cli, isa
from harness.isa import Kernel
from harness.report import isa as report
from suites.unit import tiny_checkout
from suites.unit.test_isa import AMD_LOOP, SASS_LOOP, USAGE, amd, sass

ABOUT: dict[str, Any] = {"format": "e4m3fnuz", "num_warps": 4, "options": {}, "constants": {"BLOCK": "512"}}


def kernel(text: str, case: str = "tiny-k", **about: Any) -> Kernel:
    listing = isa.read_amdgcn(text)
    return Kernel(case, "gfx942", "3.9.0", {**ABOUT, **about}, isa.facts(listing), isa.hot(listing))


def words(parts: tuple[isa.Part, ...]) -> list[list[tuple[str, str]]]:
    return [[(line.word, line.text) for line in part.lines] for part in parts]


# Hot loops ---------------------------------------------------------------------------------------------------------


def test_hot_loop_of_amd() -> None:
    """The loop alone, its label renamed; each memory access, conversion and jump has its word, with bytes a lane."""
    parts = isa.hot(isa.read_amdgcn(amd(AMD_LOOP)))
    assert [(part.name, part.instructions) for part in parts] == [("loop 1 of 1", 7)]
    assert words(parts) == [
        [
            ("", "L0:"),
            ("load 16", "buffer_load_dwordx4 v[0:3], v9, s[20:23], 0 offen"),
            ("", "s_waitcnt vmcnt(0)"),
            ("to fp8", "v_cvt_pk_fp8_f32 v4, v0, v1"),
            ("to fp8", "v_cvt_pk_fp8_f32 v4, v2, v3 op_sel:[0,0,1]"),
            ("store 4", "buffer_store_dword v4, v9, s[24:27], 0 offen"),
            ("", "s_cmp_lt_i32 s6, s7"),
            ("jump", "s_cbranch_scc1 L0"),
        ]
    ]


def test_hot_loop_of_nvidia() -> None:
    """As on AMD; a label outside of the loop is said to be outside."""
    body = SASS_LOOP.replace("F2FP", "@P1 BRA `(.L_x_0) ;\n        /*0038*/       F2FP")
    (loop,) = isa.hot(isa.read_sass(sass(body), USAGE))
    assert words((loop,))[0][:3] == [
        ("", "L0:"),
        ("load 16", "@!P3 LDG.E.128 R12, desc[UR12][R40.64+0x10]"),
        ("jump", "@P1 BRA `(outside)"),
    ]
    assert loop.lines[1].plain == "@!P LDG.E.128 R, desc[UR][R.64+0x10]"


def test_a_kernel_without_a_loop_is_shown_whole() -> None:
    """No loop touches device memory: all of it, and narrow accesses are marked."""
    body = "    s_load_dwordx2 s[0:1], s[4:5], 0x0\n    ds_write_b8 v1, v2\n    global_store_short v8, v4, s[0:1]\n"
    (whole,) = isa.hot(isa.read_amdgcn(amd(f"{body}    s_endpgm\n")))
    assert whole.name == "kernel"
    assert [line.word for line in whole.lines] == ["constant", "lds store 1!", "store 2!", ""]


def test_plain_lines_ignore_register_numbers_and_nothing_else() -> None:
    """Two listings that differ in registers and labels are the same; a width, an opcode or a constant is not."""

    def plain(old: str, new: str) -> list[str]:
        (part,) = isa.hot(isa.read_amdgcn(amd(AMD_LOOP.replace(old, new))))
        return [line.plain for line in part.lines]

    same = plain("", "")
    assert same[1] == "buffer_load_dwordx4 v[4], v, s[4], 0 offen"
    assert plain("v[0:3]", "v[40:43]") == plain("v9", "v17") == plain(".LBB0_1", ".LBB0_7") == same
    for old, new in (("v[0:3]", "v[0:1]"), ("_dword v4", "_byte v4"), ("vmcnt(0)", "vmcnt(1)")):
        assert plain(old, new) != same


# What is printed ---------------------------------------------------------------------------------------------------


def test_show() -> None:
    """What it does comes first, then every fact with its unit and direction, then the loop."""
    lines = report.show(kernel(amd(AMD_LOOP))).splitlines()
    assert lines[0] == "tiny-k for gfx942, Triton 3.9.0"
    assert lines[1] == "launch    format e4m3fnuz, num_warps 4, BLOCK 512"
    assert "does      1 x load 16, 1 x store 4, 2 x to fp8, in bytes a lane" in lines
    assert {line.split()[0] for line in lines if line.endswith("is better")} <= set(isa.FACTS)
    (widest,) = (line for line in lines if line.startswith("widest_store_bytes"))
    assert widest.split() == ["widest_store_bytes", "4", "bytes", "higher", "is", "better"]
    assert "loop 1 of 1: 7 instructions" in lines
    assert "       store 4    buffer_store_dword v4, v9, s[24:27], 0 offen" in lines


def test_no_change() -> None:
    """Other registers and labels are no change, and that is said in a line."""
    text = report.show_change(kernel(amd(AMD_LOOP.replace("v9", "v17"))), kernel(amd(AMD_LOOP)), "main")
    assert text.splitlines()[1:] == ["the same facts and the same instructions"]


def test_change() -> None:
    """A store that got narrower: the word, the opcodes, the facts with better or worse, and the two lines."""
    worse = kernel(amd(AMD_LOOP.replace("store_dword v4", "store_byte v4")), num_warps=8)
    lines = report.show_change(worse, kernel(amd(AMD_LOOP)), "main").splitlines()
    assert lines[0] == "tiny-k for gfx942, Triton 3.9.0, against main"
    assert lines[1] == "launch    num_warps 4 -> 8"
    assert lines[2] == "does      store 1!: 0 -> 1, store 4: 1 -> 0"
    assert lines[3] == "opcodes   buffer_store_byte 0 -> 1, buffer_store_dword 1 -> 0"
    facts = [line.split() for line in lines if line.endswith(("worse", "better"))]
    assert ["widest_store_bytes", "4", "1", "bytes", "worse"] in facts
    assert ["narrow_memory_instructions", "0", "1", "instructions", "worse"] in facts
    assert [line for line in lines if line.startswith(("-", "+"))] == [
        "--- main loop 1 of 1",
        "+++ now loop 1 of 1",
        "-buffer_store_dword v, v, s[4], 0 offen",
        "+buffer_store_byte v, v, s[4], 0 offen",
    ]


def test_a_loop_more() -> None:
    """A loop that the other side has not is shown as all new."""
    second = AMD_LOOP.replace("    global_store_short", ".LBB0_9:\n    global_load_dword v5, v8, s[0:1]\n")
    second = second.replace("v8, v4, s[0:1]\n    s_endpgm", "    s_cbranch_scc0 .LBB0_9\n    s_endpgm")
    changed = report.change(kernel(amd(second)), kernel(amd(AMD_LOOP)), "main")
    assert [line for line in changed.diff if line.startswith("---")] == ["--- main no such part"]
    assert "+global_load_dword v, v, s[2]" in changed.diff


# The command -------------------------------------------------------------------------------------------------------

# Stands for suites/codegen/listings.py: the kernels are the .s files of the revision on PYTHONPATH.
LISTINGS = """
import fnmatch, json, os, pathlib, shutil, sys
glob, arch, folder = sys.argv[1:]
files = sorted(pathlib.Path(os.environ["PYTHONPATH"], "kernels").glob("*.s"))
if arch == "gfx90a":
    print("no launch configuration for target gfx90a; expected a row; add one")
    sys.exit(2)
if glob == "crash":
    print("the compiler\\nsays no")
    os.abort()
kernels = []
for file in files:
    if fnmatch.fnmatch(file.stem, glob):
        shutil.copy(file, folder)
        kernels.append({"case": file.stem, "format": "e4m3fnuz", "num_warps": 4, "options": {}, "constants": {},
                        "shared_bytes": 0, "listing": file.name, "resource_usage": None})
index = {"triton": "3.9.0", "cases": [file.stem for file in files], "kernels": kernels}
pathlib.Path(folder, "index.json").write_text(json.dumps(index))
"""


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in git: at `HEAD` kernels a and old; now a stores single bytes, old is gone and new is there."""
    root = tiny_checkout.make(tmp_path / "here", {"codegen/listings": LISTINGS})
    (root / "kernels").mkdir()
    (root / "kernels/rowwise-a.s").write_text(amd(AMD_LOOP))
    (root / "kernels/rowwise-old.s").write_text(amd(AMD_LOOP))
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    (root / "kernels/rowwise-a.s").write_text(amd(AMD_LOOP.replace("store_dword v4", "store_byte v4")))
    (root / "kernels/rowwise-old.s").rename(root / "kernels/rowwise-new.s")
    return root


def show(root: Path, *arguments: str, arch: str = "gfx942") -> int:
    return cli.main(["isa", "show", *arguments, "--arch", arch, "--root", str(root)])


def test_command(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The matching kernels of the working tree, one after the other; with --json an array of the same."""
    assert show(checkout, "rowwise*") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if " for gfx942, " in line] == [
        "rowwise-a for gfx942, Triton 3.9.0",
        "rowwise-new for gfx942, Triton 3.9.0",
    ]
    assert "store 1!" in out
    assert show(checkout, "rowwise-a", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["case"], found["facts"]["widest_store_bytes"]) == ("rowwise-a", 1)
    assert found["parts"][0]["lines"][5] == {
        "does": "store 1!",
        "text": "buffer_store_byte v4, v9, s[24:27], 0 offen",
    }


def test_against_a_revision(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The revision is compiled from a worktree that is gone afterwards; kernels on one side only are named."""
    assert show(checkout, "rowwise*", "--against", "HEAD") == 0
    out = capsys.readouterr().out
    assert "rowwise-a for gfx942, Triton 3.9.0, against HEAD" in out
    assert "+buffer_store_byte v, v, s[4], 0 offen" in out
    assert "rowwise-new: not in HEAD\n" in out
    assert "rowwise-old: only in HEAD\n" in out
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
    assert show(checkout, "rowwise-*", "--against", "HEAD", "--json") == 0
    changed, new, old = json.loads(capsys.readouterr().out)
    assert changed["facts"]["widest_store_bytes"] == {"before": 4, "now": 1, "state": "worse"}
    assert (new["only"], old["only"]) == ("now", "before")


@pytest.mark.parametrize(
    ("arguments", "arch", "code", "told"),
    [
        (
            ["rowise-a"],
            "gfx942",
            2,
            "no kernel of gfx942 matches 'rowise-a'; expected the id of a case or a glob, such as",
        ),
        (["zzz"], "gfx942", 2, "such as rowwise*; `fp8ci plan --suite codegen` lists the cases"),
        (["rowwise*"], "gfx9", 2, "there is no arch 'gfx9'; expected one of gfx90a, gfx942"),
        (["rowwise*"], "gfx90a", 2, "no launch configuration for target gfx90a; expected a row; add one"),
        (["rowwise*", "--against", "nowhere"], "gfx942", 2, "knows no revision 'nowhere'"),
        (["crash"], "gfx942", 4, "ended with SIGABRT: says no"),
    ],
    ids=["isa-near", "isa-far", "isa-arch", "isa-no-row", "isa-revision", "isa-crash"],
)
def test_mistakes(
    checkout: Path, arguments: list[str], arch: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line on stderr and nothing on stdout; a name that nearly matches is shown the real ones."""
    assert show(checkout, *arguments, arch=arch) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert captured.err.count("\n") == 1
    if arguments == ["rowise-a"]:
        assert "rowwise-a" in captured.err


def test_the_real_kernels(tmp_path: Path) -> None:
    """The child of the command: what it leaves for a kernel gives the facts that the codegen suite reads."""
    pytest.importorskip("triton")
    from harness.listings import _read
    from suites.codegen import listings
    from suites.codegen.machine_code import machine_code

    case = "rowwise-e4m3fnuz-bf16-k2048"
    assert listings.main(f"{case}-gfx94?", "gfx942", tmp_path) == 0
    index = json.loads((tmp_path / "index.json").read_text())
    assert case in index["cases"]
    (entry,) = index["kernels"]
    found = _read(tmp_path, entry, "gfx942", index["triton"])
    assert found.facts == machine_code(listings.specs("gfx942")[case], "gfx942").facts
    assert found.words["load 16"] == found.facts["load_instructions"]
    assert listings.main(case, "gfx999", tmp_path) == 2
