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
entry past its date or without effect turns the gate red. A predicate that names a vendor is refused in every spelling,
its backend's, an arch's or a version's too: `rocm` (`hip>=1`, `arch:gfx942`) for a test that needs two GPUs hides it on
ROCm machines that have two; name what is missing instead.

Decoding is strict: an unknown field is an error. Not here: applying waivers to results (gate.py).
"""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path

import msgspec

from harness import capabilities, files, manifest, platforms
from harness.errors import ConfigError

LONGEST = datetime.timedelta(days=90)

#: Words that say who made the machine, wherever they stand in a predicate: vendors, backends, kinds, families of arch.
_VENDORS = frozenset({"amd", "rocm", "hip", "nvidia", "cuda", "cpu", "vendor", "backend", "arch", "sm", "gfx"})


def _names_vendor(predicate: str) -> bool:
    """Whether any word of a predicate is a vendor, its backend, an arch or a platform, in any case."""
    words = re.findall(r"[a-z]+[a-z0-9]*", predicate.lower())
    known = _VENDORS | platforms.PLATFORMS.keys()
    return any(word in known or re.sub(r"[0-9].*", "", word) in ("sm", "gfx") for word in words)


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

    def expired(self, day: datetime.date) -> bool:
        """In force up to and including its date."""
        return day > self.expires


class _Ledger(msgspec.Struct, forbid_unknown_fields=True):
    waiver: list[Waiver] = []


def today() -> datetime.date:
    """The present day, the same for every machine that judges."""
    return datetime.datetime.now(datetime.UTC).date()


def load(path: Path, day: datetime.date | None = None) -> tuple[Waiver, ...]:
    """The waivers of a ledger; none when the file does not exist.

    ConfigError for anything that the file may not hold: an unknown field, a wildcard, a vendor as predicate, a date
    more than 90 days after `day` (default: today), two entries for one test and place.
    """
    try:
        text = files.read_text(path)
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
        _check(path, waiver, day or today())
        place = (waiver.id, waiver.platform, waiver.where)
        if place in seen:
            raise ConfigError(f"{path}: {waiver.id} is waived twice", "one entry a test and place", "delete one")
        seen.add(place)
    return waivers


def _check(path: Path, waiver: Waiver, day: datetime.date) -> None:
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
    if waiver.expires - day > LONGEST:
        raise ConfigError(
            f"{where} expires on {waiver.expires}", f"a date up to {day + LONGEST}", "choose an earlier date"
        )
    if (waiver.platform is None) == (waiver.where is None):
        raise ConfigError(f"{where} names {'no place' if waiver.where is None else 'two places'}", _PLACE, "correct it")
    if waiver.platform is not None:
        if waiver.platform in platforms.PLATFORMS:
            return
        if _names_vendor(waiver.platform):
            raise ConfigError(f"{where} is waived for {waiver.platform!r}, a vendor", _PLACE, _SAY_WHAT)
        raise ConfigError(
            f"{where} names platform {waiver.platform!r}", f"one of {', '.join(platforms.PLATFORMS)}", "correct it"
        )
    assert waiver.where is not None
    if _names_vendor(waiver.where):
        raise ConfigError(f"{where} is waived where {waiver.where!r}, a vendor", _PLACE, _SAY_WHAT)
    for requirement in capabilities.parse(waiver.where):
        if requirement.operator == ">=" and not requirement.value.strip("0."):
            what = f"{where} is waived where {waiver.where!r}, which is true everywhere"
            raise ConfigError(what, _PLACE, _SAY_WHAT)


_PLACE = "either a platform or a capability (where)"
_SAY_WHAT = "say what the machine lacks or has, such as gpus>=2 or fp8:fnuz"
