"""`fp8ci baseline record`: run the suites, or take evidence that exists, and write what they measured into baselines/.

A baseline is only as good as the run behind it, so evidence with a failed test is refused whole: nobody wants the curve
of a broken build as run 0. For the loss suite one recording is several runs, as the band is made from their spread:

    run 0          as configured: the reference
    nudged 1..N    the last bf16 mantissa bit of one in a thousand initial weights flipped, by i: on a CPU a run each
                   (FP8STACK_NUDGE=i); on a GPU in the process of run 0, after one compile (FP8STACK_NUDGES=N)
    variants       a row of VARIANTS each: other thread counts, a lower instruction set (CPU only)

Recording over what exists *adds* runs of the same configuration. Whatever makes the gate more tolerant needs a reason
(`--loosen "..."`), which goes into baselines/LOG.md with what it did: another configuration in a row's place, a band
that grows, a machine-code fact that gets worse, a row or a manifest line that disappears.

Not here: the files' format (baselines.py), bands (bands.py).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness import bands, baselines, gate, machinecode, manifest
from harness.baselines import CodegenBlock, CodegenRow, LossRun, Provenance
from harness.errors import ConfigError, MissingError, UsageError, Verdict
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal_reader import Journal, TestRecord
from harness.platforms import SPEED, Platform, get

LOG_FILE = "LOG.md"
NUDGE_VARIABLE = "FP8STACK_NUDGE"
NUDGES_VARIABLE = "FP8STACK_NUDGES"
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
DEFAULT_NUDGED_RUNS = 5

#: Verdicts whose cause the recording itself is there to remove.
CURABLE = frozenset(
    {Verdict.PASS, Verdict.IMPROVED, Verdict.SKIP, Verdict.WAIVED, Verdict.UNCALIBRATED}
    | {Verdict.NO_BASELINE, Verdict.STALE_BASELINE, Verdict.REGRESSION}
)


@dataclass(frozen=True)
class Variant:
    """One run of the loss suite under another circumstance that must not matter."""

    name: str
    environment: Mapping[str, str]


VARIANTS: tuple[Variant, ...] = (
    Variant("threads=1", {"OMP_NUM_THREADS": "1"}),
    Variant("threads=2", {"OMP_NUM_THREADS": "2"}),
    Variant("isa=AVX512_CORE", {ISA_VARIABLE: "AVX512_CORE"}),
)


@dataclass(frozen=True)
class Source:
    """One evidence folder and what it is a run of."""

    evidence: Path
    variant: str = ""


@dataclass
class Change:
    """What a recording does to one file, and which parts of it need `--loosen`."""

    path: Path
    text: str
    told: list[str] = field(default_factory=list)
    loosened: list[str] = field(default_factory=list)


Execute = Callable[[tuple[str, ...], Mapping[str, str], tuple[str, ...], str], Path]
"""(suites, environment, pytest arguments, name of the run) -> evidence folder."""


def run_all(
    platform: Platform, suites: Sequence[str], nudged_runs: int, execute: Execute, say: Callable[[str], None]
) -> list[Source]:
    """Run what a recording needs: the suites as configured, then the loss suite nudged and in its variants."""
    together = "loss" in suites and platform.vendor != "cpu"
    told = f"run 0, as configured{f', and {nudged_runs} nudged runs of each curve' if together else ''}"
    say(f"recording {', '.join(suites)} on {platform.id}: {told}")
    first = execute(tuple(suites), {NUDGES_VARIABLE: str(nudged_runs)} if together else {}, (), "run-0")
    check(first)
    if gate.read_run(first).get("dirty"):
        say("the checkout has local changes: the rows will say `dirty`, and their commit is not what ran")
    sources = [Source(first)]
    if "loss" not in suites or together:
        return sources
    # Tests that measure no curve (determinism, the trainer's options) say nothing new when nudged.
    records = Journal.read(first / JOURNAL_FILE).tests.values()
    idle = [record.id for record in records if record.suite == "loss" and "loss_file" not in record.properties]
    skipped = tuple(f"--deselect={manifest.to_node_id(test_id)}" for test_id in idle)
    for nudge in range(1, nudged_runs + 1):
        say(f"recording loss on {platform.id}: nudged run {nudge} of {nudged_runs}")
        evidence = execute(("loss",), {NUDGE_VARIABLE: str(nudge)}, skipped, f"nudge-{nudge}")
        check(evidence, nudged=True)
        sources.append(Source(evidence))
    for variant in VARIANTS:
        say(f"recording loss on {platform.id}: {variant.name}")
        evidence = execute(("loss",), variant.environment, skipped, variant.name.replace("=", "-"))
        check(evidence, nudged=True)
        sources.append(Source(evidence, variant.name))
    return sources


def check(evidence: Path, nudged: bool = False) -> None:
    """Refuse evidence that is no ground for a baseline.

    A run as configured is judged: anything red that the recording does not cure is refused. A nudged run is meant to
    leave its band, so only the tests' own outcomes count.

    Raises:
        ConfigError: a test failed, or did not run.
    """
    if not nudged:
        judgement = gate.judge(evidence)
        bad = [result for result in judgement.worst_first if result.verdict not in CURABLE and not _no_matter(result)]
        found = [f"{result.id}: {result.verdict} {result.message}" for result in bad]
    else:
        records = Journal.read(evidence / JOURNAL_FILE).tests.values()
        found = [f"{record.id}: {record.state}" for record in records if record.state not in ("passed", "skipped")]
        if not any("loss_file" in record.properties for record in records):
            found.append("no test measured a curve")
    if found:
        raise ConfigError(
            f"{evidence} has {len(found)} tests that are no ground for a baseline, first {found[0]}",
            "a run in which every test passed",
            f"read {evidence}/summary.md or its logs/, mend it, and record again",
        )


def _no_matter(result: gate.Result) -> bool:
    """MISSING for an id of the old manifest or an old baseline row: the merge asks for --loosen, this need not. And a
    speed that nothing can be said of: no speed is recorded here.
    """
    told = ("not collected" in result.message, "was not measured" in result.message)
    noisy = result.suite == SPEED and result.verdict is Verdict.INCONCLUSIVE
    return noisy or (result.verdict is Verdict.MISSING and any(told))


def measured(records: Iterable[TestRecord], key: str) -> list[TestRecord]:
    return [record for record in records if key in record.properties and record.state == "passed"]


def provenance(run: Mapping[str, Any]) -> Provenance:
    """From run.json.

    Raises:
        ConfigError: it does not say when, at which commit, or on which device: such a row could never be traced.
    """
    versions: Mapping[str, Any] = run.get("versions") or {}
    host: Mapping[str, Any] = run.get("host") or {}
    machine: Mapping[str, Any] = run.get("capabilities") or {}
    on_cpu = get(str(run["platform"])).vendor == "cpu"
    device = host.get("cpu") if on_cpu else machine.get("device_name")
    needed = {"when": run.get("started"), "commit": run.get("commit"), "device": device}
    for name, value in needed.items():
        if not value:
            raise ConfigError(
                f"run {run['run_id']} does not say its {name}", "a row that can be traced", "record in a git checkout"
            )

    def text(value: object) -> str | None:
        return None if value is None or value == "" else str(value)

    return Provenance(
        when=str(needed["when"]),
        commit=str(needed["commit"]),
        dirty=None if run.get("dirty") is None else bool(run["dirty"]),
        platform=str(run["platform"]),
        device=str(device),
        python=str(versions.get("python") or host.get("python") or ""),
        torch=text(versions.get("torch")),
        triton=text(versions.get("triton")),
        runtime=text(versions.get("hip") or versions.get("cuda")),
        image_digest=text(run.get("image_digest")),
        partition=text(run.get("partition")) or msgspec.UNSET,
    )


def loss_runs(source: Source) -> list[LossRun]:
    """The curves of one evidence folder as rows, with the nudged runs that the same test made of them.

    Raises:
        ConfigError: a curve has gaps, or a nudged run is not of the curve beside it.
    """
    where = provenance(gate.read_run(source.evidence))
    rows: list[LossRun] = []
    for record in measured(Journal.read(source.evidence / JOURNAL_FILE).tests.values(), "loss_file"):
        own = _loss_run(source, record, str(record.properties["loss_file"]), where)
        rows.append(own)
        for name in str(record.properties.get("nudged_files", "")).split():
            nudged = _loss_run(source, record, name, where)
            if _curve(nudged) != _curve(own) or nudged.nudge in (0, own.nudge):
                told = f"case {nudged.case}, nudge {nudged.nudge}, config {nudged.config_hash}"
                wanted = f"a nudged run of {own.case} with config {own.config_hash}"
                raise ConfigError(f"{name} is of {told}", wanted, "record again")
            rows.append(nudged)
    return rows


def _curve(run: LossRun) -> tuple[str | None, ...]:
    """What the runs of one curve have in common."""
    return (run.case, run.config_hash, run.recipe, run.format, run.arch)


def _loss_run(source: Source, record: TestRecord, name: str, where: Provenance) -> LossRun:
    evidence = baselines.read_loss_evidence(source.evidence / name)
    isa_limit = str(evidence.versions.get("onednn_max_cpu_isa") or "") or None
    variant = source.variant or (f"isa={isa_limit}" if isa_limit else "")
    steps = sorted(evidence.steps, key=lambda step: step.step)
    if [step.step for step in steps] != list(range(1, len(steps) + 1)):
        raise ConfigError(f"{name} has gaps", "every step from 1", "record again")
    return LossRun(
        case=evidence.case,
        test=record.id,
        config_hash=evidence.config_hash,
        variant=variant,
        nudge=evidence.nudge,
        threads=evidence.threads,
        isa_limit=isa_limit,
        recipe=evidence.recipe,
        format=evidence.format,
        arch=evidence.arch,
        seed=evidence.seed,
        provenance=where,
        config=evidence.config,
        loss=[step.loss for step in steps],
        grad_norm=[step.grad_norm for step in steps],
        saturated=[step.saturated for step in steps],
        nan=[step.nan for step in steps],
        digests=evidence.digests if variant == "" else {},
    )


def codegen_rows(source: Source) -> list[tuple[str, CodegenRow]]:
    """(Triton minor version, row) of each kernel of one evidence folder."""
    where = provenance(gate.read_run(source.evidence))
    rows: list[tuple[str, CodegenRow]] = []
    for record in measured(Journal.read(source.evidence / JOURNAL_FILE).tests.values(), "isa_file"):
        evidence = baselines.read_isa_evidence(source.evidence / str(record.properties["isa_file"]))
        machinecode.check_known(evidence.facts)
        test = manifest.parse(record.id)
        row = CodegenRow(
            module=test.module,
            test=test.test,
            case=test.case,
            format=evidence.format,
            arch=evidence.arch,
            kernel=evidence.kernel,
            config=evidence.config,
            facts=evidence.facts,
            listing_hash=evidence.listing_hash,
            provenance=where,
        )
        rows.append((baselines.minor_version(evidence.triton), row))
    return rows


# Merging -----------------------------------------------------------------------------------------------------------


def merge_loss(path: Path, platform: str, new: Sequence[LossRun], complete: bool) -> Change:
    """The loss baseline with new runs in it.

    Args:
        complete: the whole suite was recorded, so that a case without a new run is gone.
    """
    old = baselines.load_loss(path, platform).rows if path.exists() else []
    change = Change(path, "")
    rows: list[LossRun] = []
    for case in sorted({row.case for row in (*old, *new)}):
        before = [row for row in old if row.case == case]
        fresh = [row for row in new if row.case == case]
        if not fresh:
            if complete:
                change.loosened.append(f"{case}: dropped, with its {len(before)} runs")
            else:
                rows.extend(before)
            continue
        rows.extend(_merge_case(case, before, fresh, change))
    change.text = baselines.encode_loss(platform, rows)
    return change


def _merge_case(case: str, before: list[LossRun], fresh: list[LossRun], change: Change) -> list[LossRun]:
    hashes = {row.config_hash for row in fresh}
    if len(hashes) > 1:
        raise ConfigError(f"{case} was run with {len(hashes)} configurations", "one", "record from runs of one commit")
    same = [row for row in before if row.config_hash in hashes]
    if before and not same:
        keys = "; ".join(baselines.differing_keys(fresh[0].config, before[0].config)[:4])
        change.loosened.append(f"{case}: another configuration in place of {len(before)} runs ({keys})")
        before = []
    # A row from before digests were kept takes those of the same run made again.
    again = {_identity(row): row for row in fresh if row.digests}
    completed = [
        msgspec.structs.replace(row, digests=again[_identity(row)].digests)
        if not row.digests and _identity(row) in again
        else row
        for row in same
    ]
    known = {_identity(row) for row in same}
    added = [row for row in fresh if _identity(row) not in known]
    merged = [*completed, *added]
    if baselines.reference_run(merged) is None:
        what = f"{case} has no run as configured"
        raise MissingError(what, "run 0 without a nudge", f"record one without {NUDGE_VARIABLE}")
    reference = baselines.reference_run(merged)
    assert reference is not None
    told = (
        f"{case}: {len(added)} runs added, {len(merged)} in all, {bands.counted(reference, merged)} count for the band"
    )
    change.told.append(told)
    if same and merged != same:
        change.loosened.extend(f"{case}: {text}" for text in _wider(same, merged))
    return merged


def _identity(row: LossRun) -> str:
    """Two rows that agree in this are one run recorded twice: reruns on one machine are bit-identical."""
    return json.dumps([row.config_hash, row.nudge, row.variant, row.loss, row.grad_norm])


def _wider(before: Sequence[LossRun], after: Sequence[LossRun]) -> list[str]:
    """Bands that the new runs widen."""
    wider: list[str] = []
    old, new = _limits(before), _limits(after)
    for name, limit in new.items():
        if name in old and not (limit <= old[name]):
            wider.append(f"{name} {old[name]:.2e} -> {limit:.2e}")
    return wider


def _limits(rows: Sequence[LossRun]) -> dict[str, float]:
    reference = baselines.reference_run(rows)
    if reference is None:
        return {}
    spread = [bands.Curve.of_run(row) for row in rows if row is not reference]
    nudged = bands.counted(reference, rows)
    limits: dict[str, float] = {}
    for metric in ("loss", "grad_norm"):
        found = bands.limits(metric, bands.Curve.of_run(reference), spread, nudged)
        limits.update({f"{metric} steps {first}-{last}": limit for (first, last), limit in found.windows.items()})
        limits[f"{metric} tail"] = found.tail
    for step in bands.DIGEST_LIMITS:
        by_name = bands.digest_limits(step, bands.Curve.of_run(reference), spread)
        for part in bands.DIGEST_PARTS:
            widest = bands.worst(parts[part] for parts in by_name.values())
            limits[f"gradient digest ({part}) at step {step}, widest"] = widest
    return limits


def merge_codegen(path: Path, arch: str, new: Sequence[tuple[str, CodegenRow]], complete: bool) -> Change:
    """The machine-code baseline of one arch with new rows in it; blocks of other Triton versions stay as they are."""
    old = baselines.load_codegen(path, arch).blocks if path.exists() else []
    change = Change(path, "")
    blocks = {block.triton: {row.key: row for row in block.rows} for block in old}
    for version in sorted({version for version, _ in new}):
        block = blocks.setdefault(version, {})
        fresh = {row.key: row for found, row in new if found == version}
        for key, row in fresh.items():
            before = block.get(key)
            if before is not None:
                change.loosened.extend(f"{row.case}: {text}" for text in _worse(before, row))
            block[key] = row
        for key in sorted(set(block) - set(fresh)) if complete else ():
            change.loosened.append(f"{block.pop(key).case}: dropped from the block of Triton {version}")
        change.told.append(f"Triton {version}: {len(fresh)} rows written, {len(block)} in all")
    change.text = baselines.encode_codegen(
        arch, [CodegenBlock(triton=version, rows=list(rows.values())) for version, rows in blocks.items()]
    )
    return change


def _worse(before: CodegenRow, after: CodegenRow) -> list[str]:
    if before.kernel != after.kernel or before.config != after.config:
        keys = "; ".join(baselines.differing_keys(after.config, before.config)[:4]) or f"kernel {after.kernel}"
        return [f"another configuration ({keys})"]
    compared = machinecode.compare(after.facts, before.facts)
    return [f"{row.name} {row.before} -> {row.now}" for row in compared.rows if row.state == "worse" or row.now is None]


def merge_manifest(path: Path, executed: Iterable[str], suites: Sequence[str], complete: bool) -> Change:
    """The manifest with the ids that ran; ids of suites that were not recorded stay."""
    old = set(manifest.read(path)) if path.exists() else set()
    new = set(executed)
    kept = {test_id for test_id in old if not complete or test_id.partition("/")[0] not in suites}
    change = Change(path, "")
    gone = sorted(old - kept - new)
    change.loosened.extend(f"{test_id}: no longer must run" for test_id in gone)
    change.told.append(f"{len(new - old)} ids added, {len(kept | new)} in all")
    change.text = "\n".join(sorted(kept | new))
    return change


# Writing -----------------------------------------------------------------------------------------------------------


def changes(
    root: Path,
    platform: Platform,
    sources: Sequence[Source],
    suites: Sequence[str],
    complete: bool,
    with_manifest: bool,
) -> list[Change]:
    """What a recording would write. Nothing is written yet, so that a refusal leaves everything as it was."""
    folder = root / "baselines"
    found: list[Change] = []
    if "loss" in suites:
        runs = [row for source in sources for row in loss_runs(source)]
        if runs:
            found.append(merge_loss(folder / platform.id / baselines.LOSS_FILE, platform.id, runs, complete))
    if "codegen" in suites:
        rows = [row for source in sources for row in codegen_rows(source)]
        for arch in sorted({row.arch for _, row in rows}):
            mine = [(version, row) for version, row in rows if row.arch == arch]
            found.append(merge_codegen(folder / arch / baselines.CODEGEN_FILE, arch, mine, complete))
    if with_manifest:
        journals = [Journal.read(source.evidence / JOURNAL_FILE) for source in sources]
        executed = [test.id for journal in journals for test in journal.tests.values() if test.state == "passed"]
        found.append(merge_manifest(folder / platform.id / "manifest.txt", executed, suites, complete))
    if not found:
        raise MissingError(
            "nothing to record: no test measured a curve or machine code",
            "a suite with loss_file or isa_file properties, or --manifest",
            "choose another --suite; of speed `fp8ci baseline calibrate` makes a baseline",
        )
    return found


def write(root: Path, recorded: Sequence[Change], loosen: str | None) -> list[str]:
    """Write the changes.

    Returns:
        Lines for the person who recorded.

    Raises:
        UsageError: something becomes more tolerant and no reason was given; nothing has been written.
    """
    loosened = [text for change in recorded for text in change.loosened]
    if loosened and not (loosen and loosen.strip()):
        more = f" and {len(loosened) - 1} more" if len(loosened) > 1 else ""
        raise UsageError(
            f"this recording makes the gate more tolerant: {loosened[0]}{more}",
            "a reason for it",
            'repeat with --loosen "REASON" (and --from the same evidence), or keep the baseline',
        )
    lines: list[str] = []
    for change in recorded:
        if change.path.name == "manifest.txt":
            manifest.write(change.path, change.text.splitlines())
        else:
            baselines.write_atomic(change.path, change.text)
        lines.extend(f"{change.path}: {text}" for text in (*change.told, *change.loosened))
    if loosened:
        _log(root / "baselines" / LOG_FILE, loosen or "", recorded)
    return lines


def _log(path: Path, reason: str, recorded: Sequence[Change]) -> None:
    """Append to baselines/LOG.md: the date, the reason, what became more tolerant."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"## {day}: loosened", "", f"Reason: {' '.join(reason.split())}", ""]
    for change in recorded:
        name = change.path.relative_to(path.parent).as_posix()
        lines.extend(f"- {name}: {text}" for text in change.loosened)
    before = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n" if path.exists() else "# Log of the baselines\n\n"
    baselines.write_atomic(path, before + "\n".join(lines) + "\n")


# Lint --------------------------------------------------------------------------------------------------------------


def lint(root: Path) -> list[str]:
    """What is wrong with a checkout's baselines, one line each; malformed files raise ConfigError as when judging.

    No row without provenance, no values copied between platforms, one configuration a case across platforms, no row
    whose test the manifest does not know, no case without run 0 or without a spread.
    """
    folder = root / "baselines"
    problems: list[str] = []
    manifests = {path.parent.name: set(manifest.read(path)) for path in sorted(folder.glob("*/manifest.txt"))}
    known = set().union(*manifests.values()) if manifests else set()
    curves: dict[str, str] = {}
    hashes: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob(f"*/{baselines.LOSS_FILE}")):
        platform = get(path.parent.name)
        baseline = baselines.load_loss(path, platform.id)
        for case in sorted({row.case for row in baseline.rows}):
            rows = baseline.of_case(case)
            where = f"{platform.id}/{baselines.LOSS_FILE}: {case}"
            reference = baselines.reference_run(rows)
            if reference is None:
                problems.append(f"{where} has no run 0")
            if not any(row.nudge for row in rows):
                problems.append(f"{where} has no nudged run, so its band is the floor")
            if known and rows[0].test not in known:
                problems.append(f"{where} is orphaned: no manifest names {rows[0].test}")
            other = hashes.setdefault(case, (platform.id, rows[0].config_hash))
            if other[1] != rows[0].config_hash:
                problems.append(f"{where} has another config hash than {other[0]}")
        for row in baseline.rows:
            values = json.dumps([row.case, row.loss])
            owner = curves.setdefault(values, platform.id)
            if owner != platform.id:
                problems.append(f"{platform.id}/{baselines.LOSS_FILE}: {row.case} holds the values of {owner}")
    for path in sorted(folder.glob(f"*/{baselines.CODEGEN_FILE}")):
        arch = path.parent.name
        for block in baselines.load_codegen(path, arch).blocks:
            for codegen_row in block.rows:
                if known and codegen_row.test_id not in known:
                    problems.append(f"{arch}/{baselines.CODEGEN_FILE}: {codegen_row.test_id} is orphaned")
    return problems
