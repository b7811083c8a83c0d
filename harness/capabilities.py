"""What this machine can do, what a test requires, and the one function that compares them.

A skip is a value with a reason. `decide(requirement, capabilities)` answers `Run` or `Skip`, and the reason is always
`requires X; this is Y`, made from the requirement and from what the probe said, so that a skip text cannot claim
something the machine does not show. Tests state requirements as a mark:

    @pytest.mark.requires("fp8:fnuz", "triton>=3.6", gpus=2, memory_gib=40)

Kinds are rows of `KINDS`. An unknown kind is a configuration error of the test, not a skip: a typing mistake must not
remove a test. A probe that could not say (a value is None) skips nothing quietly either: the reason says `unknown`.

Not here: whether a skip is allowed (the manifest decides, gate.py), what a platform is (platforms.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from harness import files, platforms
from harness.errors import ConfigError, UnreadableError

Operator = Literal["==", ">="]


@dataclass(frozen=True)
class Capabilities:
    """What the probe found. `platform` is the platform's id, or the device's name when no platform names it.

    `raw` keeps the probe's whole answer: run.json records it, nothing decides on it.
    """

    platform: str
    vendor: str
    arch: str
    target: str
    reason: str
    simulated: bool
    device_name: str
    gpus: int
    memory_gib: float | None
    e4m3: str | None
    native_fp8_matmul: bool | None
    versions: Mapping[str, str]
    raw: Mapping[str, Any]

    def to_json(self) -> str:
        """One JSON object; `from_json` gives the same value back."""
        return json.dumps({item.name: getattr(self, item.name) for item in fields(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """The inverse of `to_json`; UnreadableError for anything else."""
        try:
            values = json.loads(text)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise UnreadableError(
                f"this is no record of capabilities ({error})", "what a run has written", "run again"
            ) from error


_VERSIONS = ("torch", "triton", "hip", "cuda", "python", "numpy")


def from_facts(facts: Mapping[str, Any], platform_id: str | None = None) -> Capabilities:
    """An answer of `platforms.ask_device` -> Capabilities. `platform_id` where the caller has named the platform."""
    vendor = str(facts.get("vendor", "cpu"))
    name = str(facts.get("device_name") or "cpu")
    named = platforms.of_device(name)
    known = platform_id or (named.id if named else ("cpu" if vendor == "cpu" else name))
    memory = facts.get("memory_gib")
    return Capabilities(
        platform=known,
        vendor=vendor,
        arch=str(facts.get("arch", "")),
        target=str(facts.get("target", "")),
        reason=str(facts.get("reason", "")),
        simulated=bool(facts.get("simulated", False)),
        device_name=name,
        gpus=0 if vendor == "cpu" else int(facts.get("device_count") or 0),
        memory_gib=None if memory is None else float(memory),
        e4m3=facts.get("e4m3"),
        native_fp8_matmul=facts.get("native_fp8_matmul"),
        versions={key: str(facts[key]) for key in _VERSIONS if facts.get(key)},
        raw=dict(facts),
    )


def probe(platform: platforms.Platform | None = None, deadline: float = platforms.PROBE_DEADLINE) -> Capabilities:
    """Ask this machine, in a process of its own with a deadline. Errors are those of `platforms.ask_device`."""
    environment = platform.environment if platform else {}
    return from_facts(platforms.ask_device(environment, deadline), platform.id if platform else None)


def load(path: Path) -> Capabilities:
    """Capabilities from a file that a run wrote; UnreadableError when it cannot be read."""
    try:
        return Capabilities.from_json(files.read_text(path))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error})", "what a run has written", "run again") from error


@dataclass(frozen=True)
class Requirement:
    """One thing a test requires: a row of `KINDS`, how to compare, and with what."""

    kind: str
    operator: Operator
    value: str

    @property
    def text(self) -> str:
        """X of `requires X`."""
        return KINDS[self.kind].needs(self.value)


@dataclass(frozen=True)
class Run:
    """The test can run here."""


@dataclass(frozen=True)
class Skip:
    """The test cannot run here; `reason` is `requires X; this is Y`."""

    reason: str


Decision = Run | Skip


@dataclass(frozen=True)
class Kind:
    """How one kind of requirement is written, compared and put in words. `has` is None where the probe cannot say."""

    operators: tuple[Operator, ...]
    has: Callable[[Capabilities], str | float | None]
    needs: Callable[[str], str]
    shows: Callable[[str | float], str]
    values: tuple[str, ...] = ()


def _family(capabilities: Capabilities) -> str | None:
    if capabilities.e4m3 is None:
        return None
    return "fnuz" if capabilities.e4m3.endswith("fnuz") else "ocp"


def _matmul(capabilities: Capabilities) -> str | None:
    if capabilities.native_fp8_matmul is None:
        return None
    return "native" if capabilities.native_fp8_matmul else "emulated"


def _version(name: str) -> Kind:
    return Kind(
        (">=",),
        lambda capabilities: capabilities.versions.get(name, "none"),
        lambda value: f"{name}>={value}",
        lambda value: f"{name} {value}",
    )


def _count(value: str) -> str:
    return f"{value} gpu" if value == "1" else f"{value} gpus"


KINDS: Mapping[str, Kind] = {
    "fp8": Kind(("==",), _family, "fp8:{}".format, "fp8:{}".format, ("fnuz", "ocp")),
    "fp8_matmul": Kind(("==",), _matmul, "{} FP8 matrix instructions".format, "{} ones".format, ("native",)),
    "vendor": Kind(("==",), lambda c: c.vendor, "vendor:{}".format, "vendor:{}".format, ("amd", "nvidia", "cpu")),
    "arch": Kind(("==",), lambda c: c.target, "arch:{}".format, "arch:{}".format),
    "gpus": Kind(
        (">=",), lambda c: c.gpus, _count, lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    ),
    "memory_gib": Kind((">=",), lambda c: c.memory_gib, "{} GiB a GPU".format, "{:g}".format),
    "torch": _version("torch"),
    "triton": _version("triton"),
    "hip": _version("hip"),
    "cuda": _version("cuda"),
}

_TEXT = re.compile(r"(?P<kind>[a-z_0-9]+)\s*(?P<operator>:|==|>=)\s*(?P<value>[A-Za-z0-9_.+]+)")


def parse(*texts: str, **amounts: int | float | str) -> tuple[Requirement, ...]:
    """The arguments of a `requires` mark -> requirements; ConfigError for a kind, operator or value that is none.

    `"fp8:fnuz"` compares for equality, `"triton>=3.6"` and every keyword (`gpus=2`) for at least.
    """
    found = [_parse_text(text) for text in texts]
    found += [_checked(name, ">=", str(amount), f"{name}={amount}") for name, amount in amounts.items()]
    return tuple(found)


def _parse_text(text: str) -> Requirement:
    match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{text!r} is not a requirement", '"fp8:fnuz", "triton>=3.6" or gpus=2', "correct the mark")
    operator: Operator = ">=" if match["operator"] == ">=" else "=="
    return _checked(match["kind"], operator, match["value"], text)


def _checked(kind: str, operator: Operator, value: str, written: str) -> Requirement:
    row = KINDS.get(kind)
    if row is None:
        raise ConfigError(
            f"requirement {written!r} has no known kind", f"one of {', '.join(KINDS)}", "correct the mark"
        )
    if operator not in row.operators:
        raise ConfigError(f"requirement {written!r} compares with {operator}", " or ".join(row.operators), "correct it")
    if row.values and value not in row.values:
        raise ConfigError(
            f"requirement {written!r} has no known value", f"one of {', '.join(row.values)}", "correct it"
        )
    if operator == ">=" and not re.fullmatch(r"\d+(\.\d+)*", value):
        raise ConfigError(f"requirement {written!r} has no number", "digits, such as 2 or 3.6", "correct the mark")
    return Requirement(kind, operator, value)


def decide(requirements: Requirement | Sequence[Requirement], capabilities: Capabilities) -> Decision:
    """Whether something with these requirements runs here. The first that does not hold gives the reason."""
    listed = (requirements,) if isinstance(requirements, Requirement) else requirements
    for requirement in listed:
        kind = KINDS[requirement.kind]
        has = kind.has(capabilities)
        if has is not None and _holds(requirement, has):
            continue
        shown = f"unknown {requirement.kind}" if has is None else kind.shows(has)
        return Skip(f"requires {requirement.text}; this is {capabilities.platform} with {shown}")
    return Run()


def _holds(requirement: Requirement, has: str | float) -> bool:
    if requirement.operator == "==":
        return str(has) == requirement.value
    return _numbers(str(has)) >= _numbers(requirement.value)


def _numbers(version: str) -> tuple[int, ...]:
    """`3.6.0+git1` -> (3, 6, 0). What is no version (`none`) is below every one."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [-1]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()  # 3 and 3.0 are the same
    return tuple(numbers)
