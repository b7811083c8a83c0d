"""Test ids are one grammar everywhere; the manifest is what its command wrote, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import manifest
from harness.errors import ConfigError

ROWWISE = "numerics/test_rowwise::test_rowwise_bits[rowwise-e4m3fnuz-bf16-1823x781]"


def test_parse() -> None:
    """Suite, module, test, case; without parameters the case is the test's own name."""
    case = "rowwise-e4m3fnuz-bf16-1823x781"
    assert manifest.parse(ROWWISE) == ("numerics", "test_rowwise", "test_rowwise_bits", case)
    assert manifest.parse("loss/test_curves::test_resume").case == "resume"
    assert manifest.parse("numerics/test_a::test_b[x[0]::y/z]").case == "x[0]::y/z"
    assert manifest.parse(ROWWISE).key == ("test_rowwise", "test_rowwise_bits", case)


@pytest.mark.parametrize(
    "text", ["", "test_a", "numerics/test_a", "numerics::test_a", "numerics/test_a.py::test_b", "a/b::c["]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    """pytest's own node ids are not ours."""
    with pytest.raises(ConfigError, match="is not a test id"):
        manifest.parse(text)


@pytest.mark.parametrize(
    "node_id",
    [
        "suites/numerics/test_rowwise.py::test_x[a/b::c.py]",
        "checkout/suites/numerics/test_rowwise.py::test_x[a/b::c.py]",
        "test_rowwise.py::test_x[a/b::c.py]",
    ],
)
def test_node_ids(node_id: str) -> None:
    """Wherever pytest was started, the id is the same, and it leads back to the file."""
    test_id = manifest.from_node_id(node_id, "numerics")
    assert test_id == "numerics/test_rowwise::test_x[a/b::c.py]"
    assert manifest.to_node_id(test_id) == "suites/numerics/test_rowwise.py::test_x[a/b::c.py]"


@pytest.mark.parametrize(
    ("test_id", "glob", "expected"),
    [
        pytest.param(ROWWISE, "rowwise*", True, id="manifest-case-op"),
        pytest.param(ROWWISE, "*e4m3fnuz*", True, id="manifest-case-format"),
        pytest.param(ROWWISE, "cast*", False, id="manifest-case-other-op"),
        pytest.param(ROWWISE, "*rowwise_bits*", False, id="manifest-case-test-name"),
        pytest.param(ROWWISE, None, True, id="manifest-case-none"),
        pytest.param("loss/test_curves::test_resume", "resume", True, id="manifest-case-unit"),
        pytest.param("loss/test_curves::test_resume", "test_*", False, id="manifest-case-function"),
        pytest.param(ROWWISE, "cast*,rowwise*", True, id="manifest-case-several"),
        pytest.param(ROWWISE, "cast*,resume", False, id="manifest-case-several-others"),
        pytest.param(ROWWISE, ROWWISE, True, id="manifest-case-whole"),
        pytest.param(ROWWISE, f"cast*,{ROWWISE}", True, id="manifest-case-whole-or-glob"),
        pytest.param(ROWWISE, ROWWISE.replace("bits", "golden"), False, id="manifest-case-other-whole"),
        pytest.param(ROWWISE, "numerics/*", False, id="manifest-case-folder"),
        pytest.param("numerics/test_a::test_b[x,y]", "numerics/test_a::test_b[x,y]", True, id="manifest-case-commas"),
        pytest.param("numerics/test_a::test_b[a::b[c]]", "a::b[[]c]", True, id="manifest-case-colons"),
        pytest.param("numerics/test_a::test_b[a::b]", "b", False, id="manifest-case-behind-colons"),
    ],
)
def test_case_matches(test_id: str, glob: str | None, expected: bool) -> None:
    """The glob is over the case, not over file or function; several are joined by commas; a whole id is itself."""
    assert manifest.case_matches(test_id, glob) is expected


@pytest.mark.parametrize(
    ("glob", "modules"),
    [
        (None, set()),
        ("rowwise*", set()),
        (ROWWISE, {"test_rowwise"}),
        (f"{ROWWISE},numerics/golden/test_a::test_b,loss/test_c::test_d", {"test_rowwise", "golden/test_a"}),
        (f"{ROWWISE},cast*", set()),
        ("loss/test_c::test_d", set()),
    ],
)
def test_modules_of(glob: str | None, modules: set[str]) -> None:
    """Whole ids name the files that hold them; a glob may be in any."""
    assert manifest.modules_of(glob, "numerics") == modules


def test_write_and_read(tmp_path: Path) -> None:
    """Sorted, unique, with a header; reading gives the ids back."""
    path = tmp_path / "cpu" / "manifest.txt"
    manifest.write(path, [ROWWISE, "loss/test_a::test_b", ROWWISE])
    assert manifest.read(path) == ("loss/test_a::test_b", ROWWISE)
    assert path.read_text(encoding="ascii").startswith("# ")
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("loss/test_b::test_b\nloss/test_a::test_b\n", ":2: .* is out of order", id="order"),
        pytest.param("loss/test_a::test_b\nloss/test_a::test_b\n", ":2: .* is a duplicate", id="duplicate"),
        pytest.param("loss/test_a::test_b \n", ":1: .* is not a test id", id="trailing-space"),
        pytest.param("<<<<<<< HEAD\n", ":1: .* is not a test id", id="conflict"),
    ],
)
def test_an_edited_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The file is written by a command; what the command cannot have written is an error."""
    path = tmp_path / "manifest.txt"
    path.write_text(text, encoding="ascii")
    with pytest.raises(ConfigError, match=message):
        manifest.read(path)


def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    """It is not an empty one."""
    with pytest.raises(ConfigError, match=r"does not exist.*baseline record --manifest"):
        manifest.read(tmp_path / "manifest.txt")


@pytest.mark.parametrize("bad", ["numerics/test_a::test_b[ü]", "numerics/test_a::test_b[a\nb]", "x"])
def test_write_refuses_ids_that_would_not_come_back(bad: str, tmp_path: Path) -> None:
    """One line of ASCII an id."""
    with pytest.raises(ConfigError):
        manifest.write(tmp_path / "manifest.txt", [bad])
