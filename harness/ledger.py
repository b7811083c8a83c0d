"""The ledger of waivers: red tests that are known, owned, explained and end on a date.

`baselines/waivers.toml`, one table a waiver:

    [[waiver]]
    id = "numerics/test_rowwise::test_rowwise_bits[rowwise-e4m3fnuz-bf16-1823x781]"
    platform = "mi300x"                      # or  where = "fp8:fnuz"  (a requirement of capabilities.py)
    reason = "one ulp off since the 7.2 compiler"
    issue = "https://github.com/org/repo/issues/12"
    owner = "octocat"
    expires = 2026-03-01                     # at most 90 days ahead

A skip that never expires reads as a pass for ever, so every field is required, an id is exact (no wildcard), and an
entry past its date or without effect turns the gate red. A predicate that only names a vendor is refused: `rocm` for a
test that needs two GPUs hides it on ROCm machines that have two; name what is missing instead.

Decoding is strict: an unknown field is an error. Not here: applying waivers to results (gate.py).
"""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path

import msgspec

from harness import capabilities, manifest, platforms
from harness.errors import ConfigError

LONGEST = datetime.timedelta(days=90)
_VENDORS = frozenset({"amd", "rocm", "hip", "nvidia", "cuda", "cpu"})


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry. Exactly one of `platform` and `where` is given."""

    id: str
    reason: str
    issue: str
    owner: str
    expires: datetime.date
    platform: str | None = None
    where: str | None = None

    def covers(self, test_id: str, here: capabilities.Capabilities) -> bool:
        """Whether this waiver speaks of this test on this machine, expired or not."""
        return self.id == test_id and self.applies(here)

    def applies(self, here: capabilities.Capabilities) -> bool:
        """Whether the platform or the predicate holds on this machine."""
        if self.platform is not None:
            return self.platform == here.platform
        assert self.where is not None
        return isinstance(capabilities.decide(capabilities.parse(self.where), here), capabilities.Run)

    def expired(self, today: datetime.date) -> bool:
        """In force up to and including its date."""
        return today > self.expires


class _Ledger(msgspec.Struct, forbid_unknown_fields=True):
    waiver: list[Waiver] = []


def load(path: Path, today: datetime.date | None = None) -> tuple[Waiver, ...]:
    """The waivers of a ledger; none when the file does not exist.

    ConfigError for anything that the file may not hold: an unknown field, a wildcard, a vendor as predicate, a date
    more than 90 days after `today`, two entries for one test and place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "a UTF-8 TOML file", "restore it from git") from error
    try:
        waivers = tuple(msgspec.convert(tomllib.loads(text), _Ledger).waiver)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML ({error})", "[[waiver]] tables", "correct it") from error
    except msgspec.ValidationError as error:
        wanted = "id, platform or where, reason, issue, owner, expires"
        raise ConfigError(f"{path}: {error}", wanted, "correct the entry") from error
    seen: set[tuple[str, str | None, str | None]] = set()
    for waiver in waivers:
        _check(path, waiver, today or datetime.date.today())
        place = (waiver.id, waiver.platform, waiver.where)
        if place in seen:
            raise ConfigError(f"{path}: {waiver.id} is waived twice", "one entry a test and place", "delete one")
        seen.add(place)
    return waivers


def _check(path: Path, waiver: Waiver, today: datetime.date) -> None:
    """ConfigError when an entry that has the right fields has wrong values."""
    where = f"{path}: {waiver.id}"
    manifest.parse(waiver.id)
    if "*" in waiver.id or "?" in waiver.id:
        raise ConfigError(f"{where} holds a wildcard", "the exact id of one test", "write one entry a test")
    for name in ("reason", "owner"):
        if not getattr(waiver, name).strip():
            raise ConfigError(f"{where} has an empty {name}", f"a {name}", "fill it in")
    if not waiver.issue.startswith("https://"):
        raise ConfigError(f"{where} has issue {waiver.issue!r}", "the URL of an issue", "open one and name it")
    if waiver.expires - today > LONGEST:
        raise ConfigError(
            f"{where} expires on {waiver.expires}", f"a date up to {today + LONGEST}", "choose an earlier date"
        )
    if (waiver.platform is None) == (waiver.where is None):
        raise ConfigError(f"{where} names {'no place' if waiver.where is None else 'two places'}", _PLACE, "correct it")
    if waiver.platform is not None:
        if waiver.platform.removeprefix("not ").strip() in _VENDORS - {"cpu"}:
            raise ConfigError(f"{where} is waived for {waiver.platform!r}, a vendor", _PLACE, _SAY_WHAT)
        if waiver.platform not in platforms.PLATFORMS:
            raise ConfigError(
                f"{where} names platform {waiver.platform!r}", f"one of {', '.join(platforms.PLATFORMS)}", "correct it"
            )
        return
    assert waiver.where is not None
    predicate = waiver.where.removeprefix("not ").strip()
    if predicate in _VENDORS or predicate.startswith("vendor"):
        raise ConfigError(f"{where} is waived where {waiver.where!r}, a vendor", _PLACE, _SAY_WHAT)
    for requirement in capabilities.parse(waiver.where):
        if requirement.operator == ">=" and not requirement.value.strip("0."):
            what = f"{where} is waived where {waiver.where!r}, which says no more than which vendor, or nothing"
            raise ConfigError(what, _PLACE, _SAY_WHAT)


_PLACE = "either a platform or a capability (where)"
_SAY_WHAT = "say what the machine lacks or has, such as gpus>=2 or fp8:fnuz"
