"""Baselines: what past runs measured, and what evidence of a new run looks like. Format, strict decoding, look-up.

    baselines/<platform>/loss.json     one row a run of a case: the whole curve, its gradient digests, its provenance
    baselines/<arch>/codegen.json      one block a Triton minor version; one row a kernel at one configuration

Files hold raw runs, never thresholds: bands.py and gate.py compute limits when they judge, so a change of policy needs
no new measurement. Decoding is strict because a baseline that is half understood gates nothing: an unknown field, a
missing one, a NaN, a curve printed with five decimals, a file that was copied from another platform's folder are errors
that name file, key and the way out, exit 2. `fp8ci baseline record` (record.py) writes the files and nothing else does.

One row a line, sorted by key, floats in their shortest exact form (up to 17 digits): a diff reads.

The second half reads the two evidence files that tests leave (losses/<case>.json, isa/<case>.json). Those may hold NaN:
a diverged run is a result, not a malformed file.

Not here: bands (bands.py), verdicts (gate.py), running and merging (record.py).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from harness import files
from harness.errors import ConfigError, UnreadableError

SCHEMA = 1
LOSS_FILE = "loss.json"
CODEGEN_FILE = "codegen.json"

#: A curve whose losses all survive rounding to this many decimals was printed, not recorded (pytorch/torchtitan#2156:
#: a low-precision print hid drift).
PRINTED_DECIMALS = 5

Fact = int | float | bool | str
_T = TypeVar("_T")


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a row comes from. A row without it is refused; `null` says that the thing does not exist there."""

    when: str
    """UTC, ISO 8601."""
    commit: str
    dirty: bool | None
    """Whether the checkout differed from its commit; null for a copy without .git, of which nobody can tell."""
    platform: str
    device: str
    """GPU name, or the CPU's model name."""
    python: str
    torch: str | None
    triton: str | None
    runtime: str | None = None
    """ROCm or CUDA version of the torch build."""
    image_digest: str | None = None
    partition: str | msgspec.UnsetType = msgspec.UNSET
    """Compute and memory mode of an AMD GPU, such as `SPX/NPS1`; left out where there is none."""


class LossRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training run. Series hold one value a step, from step 1."""

    case: str
    test: str
    """Harness test id: `loss/<module>::<test>[<case>]`."""
    config_hash: str
    variant: str
    """"" as configured; else what differed: `threads=2`, `isa=AVX512_CORE`."""
    nudge: int
    """0 as configured; i >= 1: last mantissa bit of one in a thousand initial weights flipped, seeded by i."""
    threads: int
    isa_limit: str | None
    recipe: str
    format: str | None
    arch: str
    seed: int
    provenance: Provenance
    config: dict[str, Any]
    loss: list[float]
    grad_norm: list[float]
    saturated: list[int]
    nan: list[int]
    digests: dict[str, dict[str, list[float]]]
    """step -> parameter -> [norm, mean, dot, dot]. Of run 0 and of nudged runs; variants have run 0's on a CPU."""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.case, self.config_hash, self.nudge, self.variant, self.provenance.when, self.provenance.commit)

    @property
    def as_configured(self) -> bool:
        return self.nudge == 0 and self.variant == ""


class LossBaseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`baselines/<platform>/loss.json`."""

    schema: Literal[1]
    suite: Literal["loss"]
    platform: str
    rows: list[LossRun]

    def of_case(self, case: str) -> tuple[LossRun, ...]:
        return tuple(row for row in self.rows if row.case == case)

    def of_config(self, case: str, config_hash: str) -> tuple[LossRun, ...]:
        return tuple(row for row in self.of_case(case) if row.config_hash == config_hash)


class CodegenRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the machine code of one kernel at one configuration shows."""

    module: str
    test: str
    case: str
    format: str
    arch: str
    kernel: str
    config: dict[str, Any]
    facts: dict[str, Fact]
    listing_hash: str
    provenance: Provenance

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return (self.module, self.test, self.case, self.format, self.arch)

    @property
    def test_id(self) -> str:
        return f"codegen/{self.module}::{self.test}[{self.case}]"


class CodegenBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All rows of one Triton minor version; listings differ between versions."""

    triton: str
    rows: list[CodegenRow]


class CodegenBaseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`baselines/<arch>/codegen.json`."""

    schema: Literal[1]
    suite: Literal["codegen"]
    arch: str
    blocks: list[CodegenBlock]

    def block(self, triton: str) -> CodegenBlock | None:
        """The block of a Triton version, matched by minor version: 3.9.1 uses the block 3.9."""
        return next((block for block in self.blocks if block.triton == minor_version(triton)), None)


def minor_version(version: str) -> str:
    """`3.9.0+git` -> `3.9`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def malformed(path: Path, what: str) -> ConfigError:
    """The one-line error of a baseline that cannot be used."""
    return ConfigError(
        f"{path}: {what}",
        "a file as `fp8ci baseline record` writes it",
        f"restore it with `git checkout -- {path}`, or delete it and record again",
    )


def decode(path: Path, kind: type[_T]) -> _T:
    """A baseline file, strictly: unknown fields and NaN are errors. Raises ConfigError."""
    try:
        raw = files.read_bytes(path)
    except OSError as error:
        raise malformed(path, f"cannot be read ({error.strerror})") from None
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise malformed(path, _one_line(str(error))) from None
    except msgspec.DecodeError as error:
        raise malformed(path, _locate(raw, str(error))) from None


def _locate(raw: bytes, message: str) -> str:
    """Turn msgspec's byte offset into a line and the text there, and name NaN, which JSON does not have."""
    text = _one_line(message)
    digits = text[text.rfind("(byte ") + 6 : -1] if text.endswith(")") and "(byte " in text else ""
    if not digits.isdigit():
        return text
    offset = int(digits)
    line = raw.count(b"\n", 0, offset) + 1
    context = raw[offset : offset + 12].decode("utf-8", "replace")
    key = _key_before(raw[:offset])
    for word in ("NaN", "Infinity", "-Infinity"):
        if context.startswith(word) or raw[max(0, offset - 1) : offset + 9].decode("utf-8", "replace").startswith(word):
            return f"line {line}: {key} holds {word}, every number must be finite"
    return f"line {line}: {text}, near {context!r}"


def _key_before(raw: bytes) -> str:
    """The last object key that opens before this point, to name the field of a bad value."""
    tail = raw[-100_000:].decode("utf-8", "replace")
    end = tail.rfind('":')
    start = tail.rfind('"', 0, end) if end > 0 else -1
    return f"key {tail[start + 1 : end]!r}" if start >= 0 else "the file"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def load_loss(path: Path, platform: str | None = None) -> LossBaseline:
    """Read `loss.json` strictly.

    Args:
        platform: the platform whose folder it lies in; another name inside means that the file was copied.

    Raises:
        ConfigError: malformed; one line naming file, key and the way out, exit 2.
    """
    baseline = decode(path, LossBaseline)
    if platform is not None and baseline.platform != platform:
        raise malformed(path, f"key 'platform' says {baseline.platform!r}, expected {platform!r}")
    seen: set[tuple[Any, ...]] = set()
    for index, row in enumerate(baseline.rows):
        where = f"$.rows[{index}] ({row.case}, nudge {row.nudge}{', ' + row.variant if row.variant else ''})"
        if row.key in seen:
            raise malformed(path, f"{where} appears twice")
        seen.add(row.key)
        problem = _row_problem(row)
        if problem:
            raise malformed(path, f"{where}: {problem}")
    return baseline


def _row_problem(row: LossRun) -> str | None:
    """What makes a decoded run unusable, or None."""
    steps = len(row.loss)
    if steps == 0:
        return "'loss' is empty, one value a step is expected"
    for name, series in (("grad_norm", row.grad_norm), ("saturated", row.saturated), ("nan", row.nan)):
        if len(series) != steps:
            return f"'{name}' has {len(series)} values but 'loss' has {steps}"
    if not all(math.isfinite(value) for value in (*row.loss, *row.grad_norm)):
        return "a value is not finite"
    if steps >= 10 and all(value == round(value, PRINTED_DECIMALS) for value in row.loss):
        return f"every loss has at most {PRINTED_DECIMALS} decimals: it was printed, not recorded"
    if row.nudge < 0:
        return f"'nudge' is {row.nudge}, expected 0 or more"
    if not row.config_hash:
        return "'config_hash' is empty"
    if not _has_provenance(row.provenance):
        return "provenance without 'when', 'commit' or 'device'"
    for step, parameters in row.digests.items():
        for name, digest in parameters.items():
            if not step.isdigit() or len(digest) != 4:
                return f"'digests' of {name} at step {step!r}: expected [norm, mean, dot, dot] under a step number"
    return None


def _has_provenance(provenance: Provenance) -> bool:
    return all(value.strip() for value in (provenance.when, provenance.commit, provenance.device))


def load_codegen(path: Path, arch: str | None = None) -> CodegenBaseline:
    """Read `codegen.json` strictly. Raises ConfigError as load_loss does."""
    baseline = decode(path, CodegenBaseline)
    if arch is not None and baseline.arch != arch:
        raise malformed(path, f"key 'arch' says {baseline.arch!r}, expected {arch!r}")
    versions: set[str] = set()
    for number, block in enumerate(baseline.blocks):
        if block.triton in versions or block.triton != minor_version(block.triton):
            raise malformed(path, f"$.blocks[{number}].triton is {block.triton!r}, expected one block a minor version")
        versions.add(block.triton)
        seen: set[tuple[str, ...]] = set()
        for index, row in enumerate(block.rows):
            where = f"$.blocks[{number}].rows[{index}] ({row.case})"
            if row.key in seen:
                raise malformed(path, f"{where} appears twice")
            seen.add(row.key)
            if row.arch != baseline.arch:
                raise malformed(path, f"{where}: arch {row.arch!r} in the file of {baseline.arch!r}")
            if not row.facts:
                raise malformed(path, f"{where}: 'facts' is empty")
            if not _has_provenance(row.provenance):
                raise malformed(path, f"{where}: provenance without 'when', 'commit' or 'device'")
    return baseline


def encode_loss(platform: str, rows: Iterable[LossRun]) -> str:
    """The text of `loss.json`: sorted, one run a line."""
    lines = [_line(row) for row in sorted(rows, key=lambda row: row.key)]
    head = f'{{"schema":{SCHEMA},"suite":"loss","platform":{json.dumps(platform)},"rows":[\n'
    return head + ",\n".join(lines) + "\n]}\n"


def encode_codegen(arch: str, blocks: Iterable[CodegenBlock]) -> str:
    """The text of `codegen.json`: blocks by version, one row a line."""
    parts: list[str] = []
    for block in sorted(blocks, key=lambda block: tuple(int(part) for part in block.triton.split("."))):
        lines = [_line(row) for row in sorted(block.rows, key=lambda row: row.key)]
        parts.append(f'{{"triton":{json.dumps(block.triton)},"rows":[\n' + ",\n".join(lines) + "\n]}")
    head = f'{{"schema":{SCHEMA},"suite":"codegen","arch":{json.dumps(arch)},"blocks":[\n'
    return head + ",\n".join(parts) + "\n]}\n"


def _line(row: LossRun | CodegenRow) -> str:
    """One row as one line. allow_nan=False: what cannot be read back is never written."""
    return json.dumps(msgspec.to_builtins(row), allow_nan=False, ensure_ascii=True, separators=(",", ":"))


def write_atomic(path: Path, text: str) -> None:
    """Write beside, flush, rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# What a run leaves -------------------------------------------------------------------------------------------------


class LossStep(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float
    grad_norm: float
    saturated: int = 0
    nan: int = 0


class LossEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """`losses/<case>.json`, written by the loss suite."""

    schema: Literal[1]
    case: str
    config_hash: str
    config: dict[str, Any]
    recipe: str
    format: str | None
    arch: str
    seed: int
    nudge: int
    threads: int
    steps: list[LossStep]
    digests: dict[str, dict[str, list[float]]] = {}
    versions: dict[str, Any] = {}


class IsaEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """`isa/<case>.json`, written by the codegen suite."""

    schema: Literal[1]
    case: str
    arch: str
    triton: str
    format: str
    kernel: str
    config: dict[str, Any]
    facts: dict[str, Fact]
    listing_hash: str
    listing: str = ""


def read_loss_evidence(path: Path) -> LossEvidence:
    """Raises UnreadableError."""
    return _read_evidence(path, LossEvidence)


def read_isa_evidence(path: Path) -> IsaEvidence:
    """Raises UnreadableError."""
    return _read_evidence(path, IsaEvidence)


def _read_evidence(path: Path, kind: type[_T]) -> _T:
    try:
        # Python's json, not msgspec's: it reads the bare NaN of a diverged run.
        return msgspec.convert(json.loads(files.read_text(path)), kind)
    except OSError as error:
        what = f"{path.name} cannot be read ({error.strerror})"
        raise UnreadableError(what, "the file that the test names") from None
    except (ValueError, RecursionError) as error:
        # msgspec.ValidationError, json.JSONDecodeError and UnicodeDecodeError are all ValueErrors.
        raise UnreadableError(f"{path.name}: {_one_line(str(error))}", "the file that the suite writes") from None


def differing_keys(now: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, ...]:
    """`key: before -> now` for each key that differs, sorted; nested tables by dotted key."""
    differences: list[str] = []
    for key in sorted({*now, *before}):
        new, old = now.get(key), before.get(key)
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            differences.extend(f"{key}.{text}" for text in differing_keys(new, old))
        elif new != old:
            differences.append(f"{key}: {old!r} -> {new!r}")
    return tuple(differences)


def reference_run(runs: Sequence[LossRun]) -> LossRun | None:
    """Run 0: the earliest run as configured."""
    return min((run for run in runs if run.as_configured), key=lambda run: (run.provenance.when, run.key), default=None)
