"""The ledger takes waivers that are exact, owned, explained and short-lived, and no others."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from harness import capabilities, ledger
from harness.errors import ConfigError

TODAY = datetime.date(2026, 1, 10)
GOOD = {
    "id": '"numerics/test_rowwise::test_rowwise_bits[rowwise-e4m3fnuz-bf16-1823x781]"',
    "platform": '"mi300x"',
    "reason": '"one ulp off"',
    "issue": '"https://github.com/o/r/issues/1"',
    "owner": '"octocat"',
    "expires": "2026-03-01",
}


def write(folder: Path, *entries: dict[str, str | None]) -> Path:
    """A ledger of GOOD entries with changes; None removes a field."""
    path = folder / "waivers.toml"
    lines: list[str] = []
    for entry in entries:
        lines.append("[[waiver]]")
        lines += [f"{name} = {value}" for name, value in {**GOOD, **entry}.items() if value is not None]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def host(name: str, count: int, e4m3: str = "e4m3fnuz") -> capabilities.Capabilities:
    facts = {"vendor": "amd", "device_name": name, "device_count": count, "e4m3": e4m3}
    return capabilities.from_facts(facts)


MI300X = host("AMD Instinct MI300X", 1)


def test_no_file_is_no_waiver(tmp_path: Path) -> None:
    """A checkout without a ledger waives nothing."""
    assert ledger.load(tmp_path / "waivers.toml") == ()
    path = tmp_path / "empty.toml"
    path.write_text("# none\n", encoding="utf-8")
    assert ledger.load(path) == ()


def test_a_waiver_covers_its_test_on_its_platform(tmp_path: Path) -> None:
    """One id, one platform; in force up to and including its date."""
    (waiver,) = ledger.load(write(tmp_path, {}), TODAY)
    assert waiver.covers(GOOD["id"].strip('"'), MI300X)
    assert not waiver.covers("numerics/test_rowwise::test_rowwise_bits", MI300X)
    assert not waiver.covers(GOOD["id"].strip('"'), host("AMD Instinct MI325X", 1))
    assert not waiver.expired(datetime.date(2026, 3, 1))
    assert waiver.expired(datetime.date(2026, 3, 2))


def test_a_waiver_by_capability(tmp_path: Path) -> None:
    """The predicate is asked of the machine, not of its name."""
    (waiver,) = ledger.load(write(tmp_path, {"platform": None, "where": '"gpus>=2"'}), TODAY)
    assert not waiver.applies(MI300X)
    assert waiver.applies(host("AMD Instinct MI325X", 2))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param({"id": '"numerics/test_rowwise::*"'}, "not a test id", id="wildcard-test"),
        pytest.param({"id": '"numerics/test_rowwise::test_x[*]"'}, "holds a wildcard", id="wildcard-case"),
        pytest.param({"id": '"test_rowwise"'}, "not a test id", id="no-id"),
        pytest.param({"owner": '" "'}, "empty owner", id="anonymous"),
        pytest.param({"owner": None}, "missing required field `owner`", id="no-owner"),
        pytest.param({"reason": '""'}, "empty reason", id="no-reason"),
        pytest.param({"issue": '"see Slack"'}, "expected the URL of an issue", id="no-issue"),
        pytest.param({"expires": "2026-04-11"}, "expected a date up to 2026-04-10", id="too-long"),
        pytest.param({"expires": '"never"'}, "expires", id="no-date"),
        pytest.param({"expires": None}, "missing required field `expires`", id="for-ever"),
        pytest.param({"platform": None}, "names no place", id="nowhere"),
        pytest.param({"where": '"gpus>=2"'}, "names two places", id="two-places"),
        pytest.param({"platform": '"rocm"'}, "'rocm', a vendor", id="vendor"),
        pytest.param({"platform": '"not rocm"'}, "'not rocm', a vendor", id="not-vendor"),
        pytest.param({"platform": None, "where": '"vendor:amd"'}, "'vendor:amd', a vendor", id="vendor-predicate"),
        pytest.param({"platform": None, "where": '"not rocm"'}, "'not rocm', a vendor", id="not-vendor-predicate"),
        pytest.param({"platform": None, "where": '"gpus >= 0.0"'}, "is true everywhere", id="everywhere"),
        pytest.param({"platform": '"mi300"'}, "names platform 'mi300'", id="unknown-platform"),
        pytest.param({"platform": None, "where": '"gpu>=2"'}, "no known kind", id="unknown-capability"),
        pytest.param({"until": "2026-03-01"}, "unknown field `until`", id="unknown-field"),
    ],
)
def test_a_bad_entry_is_refused(entry: dict[str, str | None], message: str, tmp_path: Path) -> None:
    """Each is one line that names the file and the fault."""
    with pytest.raises(ConfigError, match=message) as caught:
        ledger.load(write(tmp_path, entry), TODAY)
    assert "\n" not in str(caught.value)


VENDORS = (
    *("rocm", "ROCm", "not rocm", "AMD", "hip", "cuda", "CUDA", "nvidia", "vendor:amd", "vendor:cpu"),
    *("vendor == nvidia", "Vendor:AMD", "hip>=0", "hip>=1", "hip >= 7.2", "cuda>=1", "cuda>=12.8", "HIP>=1", "hip:7.2"),
    *("arch:gfx942", "arch == sm_90", "arch:cpu", "not arch:gfx942", "gfx942", "sm_100", "SM90", "cpu", "mi300x"),
    *("not  rocm", "!rocm", "no cuda", "torch.version.hip", "platform:mi300x", "backend:hip", "device==cuda", "is_hip"),
)
PLATFORMS = {("platform", name) for name in ("cpu", "mi300x")}


@pytest.mark.parametrize(
    ("place", "written"),
    # A platform's id is what the field of that name is for.
    [(place, word) for word in VENDORS for place in ("where", "platform") if (place, word) not in PLATFORMS],
)
def test_a_vendor_is_refused_in_every_spelling(place: str, written: str, tmp_path: Path) -> None:
    """Vendor, backend, arch and their versions all say who made the machine, and the advice is to say what it lacks."""
    entry = {"platform": None, place: f'"{written}"'}
    with pytest.raises(ConfigError, match="a vendor; expected either a platform or a capability") as caught:
        ledger.load(write(tmp_path, entry), TODAY)
    assert str(caught.value).endswith("say what the machine lacks or has, such as gpus>=2 or fp8:fnuz")


@pytest.mark.parametrize("where", ["gpus>=2", "fp8:fnuz", "fp8_matmul:native", "memory_gib>=100", "triton>=3.7"])
def test_a_capability_is_taken(where: str, tmp_path: Path) -> None:
    """What the refusal of vendors leaves."""
    (waiver,) = ledger.load(write(tmp_path, {"platform": None, "where": f'"{where}"'}), TODAY)
    assert waiver.where == where


def test_two_entries_for_one_test_and_place_are_refused(tmp_path: Path) -> None:
    """The second could outlive the first unnoticed."""
    with pytest.raises(ConfigError, match="waived twice"):
        ledger.load(write(tmp_path, {}, {"expires": "2026-02-01"}), TODAY)


def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    """A merge conflict is not an empty ledger."""
    path = tmp_path / "waivers.toml"
    path.write_text("<<<<<<< HEAD\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not TOML"):
        ledger.load(path)
