"""The gate: an evidence folder -> one verdict a test, and one exit code.

Reads what a run left (run.json, the journal, losses/, isa/, samples/, logs/) and what it is judged with (baselines,
manifest, waivers: the copies in judged-with/, so that any machine reaches the same verdict, or a checkout's). It needs
neither torch nor a GPU and writes nothing.

Order, each step able only to make a verdict worse, except waivers:

1. what the journal says of each test, and what the way its process ended adds (deaths.py);
2. what tests measured against what was recorded: loss curves (bands.py), machine code (machinecode.py), speed
   (speed.py). This overrides PASS: a loss test that ran to its end proves nothing about the curve;
3. the manifest: an id that must run here, within what the run selected, and did not, is MISSING. So is a baseline row
   whose test ran without measuring it: a test that stops writing its evidence is a gate that went blind;
4. waivers: a red test covered by one in force is WAIVED, by one past its date WAIVER_EXPIRED; one without effect is
   WAIVER_UNUSED. Past its date is past it for the run or for this judgement: what run.json says of its time makes no
   waiver younger. So a later judgement of the same evidence is the same until a waiver in it ends.

A test that is in the evidence and not in the manifest is new: listed, not red.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import (
    bands,
    baselines,
    deaths,
    files,
    fingerprint,
    junit,
    ledger,
    machinecode,
    manifest,
    samples,
    speedgate,
)
from harness.capabilities import Capabilities
from harness.errors import (
    BASELINE,
    FAILED,
    SUCCESS,
    VERDICTS,
    HarnessError,
    UnreadableError,
    UsageError,
    Verdict,
    worst_exit,
)
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal_reader import Journal, TestRecord
from harness.platforms import SECOND_OPINION, SPEED, Platform, SpeedTable, case_of
from harness.platforms import get as get_platform
from harness.result import Judgement, Result, suite_rank

__all__ = ["Judgement", "Result", "judge", "read_run"]

RUN_FILE = "run.json"
JUDGED_WITH = "judged-with"
JUNIT_FILE = "junit.xml"
SCHEMA = 1
MAIN = "main"
POLICIES = ("pull-request", MAIN)

#: Verdicts that a test may give itself, by a property `verdict`: it ran, and says that it does not count as a pass.
REPORTED = frozenset({Verdict.UNMEASURABLE, Verdict.INCONCLUSIVE, Verdict.IMPLAUSIBLE})

#: Properties that name the file of a measurement.
MEASURED = frozenset({"loss_file", "isa_file", "samples_file"})

BUDGET = 0.05
"""Share of a suite's rows that may be INCONCLUSIVE; beyond it the machine is too noisy for any of them."""

#: What an exception's own name in a failure message says about its kind.
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")

#: How a test fails for want of what the machine, by the end of its process, is known to have lacked.
WANTING: Mapping[Verdict, tuple[str, ...]] = {
    Verdict.PIDS: ("Resource temporarily unavailable", "can't start new thread"),
    Verdict.DISK: ("No space left on device",),
}


def read_run(evidence: Path) -> dict[str, Any]:
    """run.json of an evidence folder.

    Raises:
        UsageError: this is no evidence folder.
        UnreadableError: it is one, and its run.json is missing or cut, or one of its files is a link to elsewhere.
    """
    wanted, following = "a folder that `fp8ci run` has written", "name one, or make one: `fp8ci run --platform cpu`"
    if not evidence.is_dir():
        raise UsageError(f"{evidence} is no folder", wanted, following)
    path = evidence / RUN_FILE
    files.check_inside(evidence, (RUN_FILE, JOURNAL_FILE, JUNIT_FILE, JUDGED_WITH, "logs"))
    if not path.exists():
        if (evidence / JOURNAL_FILE).exists():
            raise UnreadableError(f"{evidence} has a journal but no {RUN_FILE}", "both", "run again")
        raise UsageError(f"{evidence} is no evidence: it has no {RUN_FILE}", wanted, following)
    try:
        run = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read ({error})", "what a run writes first", "run again") from None
    needed = {"run_id": str, "platform": str, "suites": list}
    for key, kind in needed.items():
        if not isinstance(run, dict) or not isinstance(run.get(key), kind):
            raise UnreadableError(f"{path} lacks {key!r}", f"a {kind.__name__} there", "run again")
    case, policy, schema = run.get("case"), run.get("policy"), run.get("schema")
    full = run.get("full", False)  # older runs do not say
    for key, value, valid, expected in (
        ("schema", schema, schema == SCHEMA, str(SCHEMA)),
        ("suites", run["suites"], run["suites"] and all(isinstance(s, str) for s in run["suites"]), "names of suites"),
        ("case", case, case is None or isinstance(case, str), "a glob or null"),
        ("full", full, isinstance(full, bool), "true or false"),
        ("policy", policy, policy in POLICIES, " or ".join(POLICIES)),
    ):
        if not valid:
            raise UnreadableError(f"{path} says {key} {value!r}", expected, "run again")
    return dict(run)


def check_files(folder: Path, platform: Platform) -> None:
    """Read everything in a baselines folder that a run on this platform is judged with, before it costs a run.

    What does not exist is no error here: the verdict says what that means.

    Raises:
        ConfigError: a file is malformed.
    """
    path = folder / platform.id / "manifest.txt"
    if path.exists():
        manifest.read(path)
    ledger.load(folder / "waivers.toml")
    path = folder / platform.id / baselines.LOSS_FILE
    if path.exists():
        baselines.load_loss(path, platform.id)
    path = folder / platform.id / samples.PERF_FILE
    if path.exists():
        samples.load(path, platform.id)
    for arch in platform.codegen_archs:
        path = folder / arch / baselines.CODEGEN_FILE
        if path.exists():
            baselines.load_codegen(path, arch)


@dataclass(frozen=True)
class _Evidence:
    """Everything the steps share; read once."""

    folder: Path
    run: Mapping[str, Any]
    journal: Journal
    platform: Platform
    baselines: Path
    suites: tuple[str, ...]
    case: str | None
    speed: SpeedTable

    def selected(self, test_id: str) -> bool:
        """Whether the run was asked to run this test."""
        suite = test_id.partition("/")[0]
        return suite in self.suites and manifest.case_matches(test_id, case_of(suite, self.case, self.speed))

    @property
    def day(self) -> datetime.date:
        started = str(self.run.get("started") or "")
        try:
            moment = datetime.datetime.fromisoformat(started)
            return (moment if moment.tzinfo is None else moment.astimezone(datetime.UTC)).date()
        except (ValueError, OverflowError):
            return ledger.today()


def judge(evidence: Path, baselines_root: Path | None = None, whole: bool = False) -> Judgement:
    """Judge a run.

    Args:
        evidence: folder written by `fp8ci run`.
        baselines_root: a checkout's baselines folder; None judges with the copies in the evidence.
        whole: the run must have selected all that its platform must run; a selection is MISSING.

    Raises:
        UsageError, ConfigError: exit 2: no evidence, an unknown platform, a malformed baseline, manifest or ledger.
        UnreadableError: exit 3: run.json or the journal cannot be read at all.
    """
    run = read_run(evidence)
    found = _Evidence(
        folder=evidence,
        run=run,
        journal=Journal.read(evidence / JOURNAL_FILE),
        platform=get_platform(run["platform"]),
        baselines=baselines_root if baselines_root is not None else evidence / JUDGED_WITH,
        suites=tuple(str(suite) for suite in run["suites"]),
        case=run.get("case"),
        speed="short" if run.get("speed") == "short" else "long",
    )
    notes: list[str] = []
    results = _journaled(found)
    results = _measured(found, results, notes)
    results += _manifest_findings(found, results, notes)
    results += _agreement(found, notes)
    if whole:
        results += _narrowed(found)
    results += _idle(found, results)
    results = _waived(found, results)
    notes += _attempts(found)
    notes += _memory(found)
    policy = str(run["policy"])
    results = _strict(results, policy)
    results.sort(key=lambda result: (suite_rank(result.suite), result.id))
    counts = Counter(str(result.verdict) for result in results)
    exit_code = worst_exit([result.exit_code for result in results])
    return Judgement(tuple(results), exit_code, dict(sorted(counts.items())), tuple(notes), policy)


# 1. What the journal says ------------------------------------------------------------------------------------------


def _journaled(found: _Evidence) -> list[Result]:
    results: list[Result] = []
    for suite in found.suites:
        log = deaths.log_tail(found.folder, suite)
        _, session = deaths.last_of(found.journal, suite)
        death = deaths.of_suite(found.journal, suite, found.folder)
        if death is None and session is not None:
            death = deaths.stop_of(found.journal, suite, session)
        crashed = deaths.crashed_tests(found.journal, suite, log)
        for record in found.journal.tests.values():
            if record.suite == suite:
                results.append(_of_record(record, death, crashed.get(record.id), log))
        results.extend(deaths.findings(found.journal, suite, found.folder, found.case))
    return results


def _of_record(record: TestRecord, death: deaths.Death | None, crash: deaths.Death | None, log: str) -> Result:
    attempts = (*record.earlier, record.state) if record.earlier else ()

    def result(verdict: Verdict, message: str, detail: str = "") -> Result:
        told = dict(record.properties)
        return Result(record.id, record.suite, verdict, message, detail, record.seconds, told, attempts=attempts)

    state = record.state
    if crash is not None:  # also of a test that had passed by then: nobody knows what was still to come
        return result(crash.verdict, crash.message, log)
    if state == "running":
        if death is None:
            return result(Verdict.DISAGREE, "started, and neither it nor its process is said to have died", log)
        return result(death.verdict, f"{death.message} while it ran this test", log)
    if state == "not-run":
        idle = "started, and its call never ran" if record.started else "collected, never started"
        why = death.message if death else f"{idle}, and its session ended as if all were done"
        return result(Verdict.MISSING, f"not run: {why}")
    # Attempts that a dying process cut off say nothing; outcomes that differ do.
    outcomes = {earlier for earlier in record.earlier if earlier in ("passed", "failed")}
    if state in ("passed", "failed") and outcomes - {state}:
        told = ", ".join([*record.earlier, state])
        return result(Verdict.FLAKY, f"attempts of one run ended differently: {told}", record.detail)
    if state == "failed":
        verdict = Verdict.OOM if any(word in record.message for word in OUT_OF_MEMORY) else Verdict.FAIL
        if deaths.TIMED_OUT.match(record.message):
            verdict = Verdict.TIMEOUT
        if death is not None and any(word in record.message for word in WANTING.get(death.verdict, ())):
            verdict = death.verdict
        message = _whole_message(record)
        return result(
            verdict, message if record.failed_phase == "call" else f"{record.failed_phase}: {message}", record.detail
        )
    if state == "skipped":
        return result(Verdict.SKIP, record.message)
    said = str(record.properties.get("verdict", ""))
    if said in REPORTED:
        return result(Verdict(said), str(record.properties.get("reason", "")))
    if "verdict" in record.properties:
        allowed = ", ".join(sorted(REPORTED))
        return result(Verdict.DISAGREE, f"passed, and reports verdict {said!r}; a test may report {allowed}")
    return result(Verdict.PASS, "")


def _strict(results: list[Result], policy: str) -> list[Result]:
    """The stricter form of a verdict where it applies: IMPROVED on main, INCONCLUSIVE beyond its suite's budget."""
    rows = Counter(result.suite for result in results)
    noisy = Counter(result.suite for result in results if result.verdict is Verdict.INCONCLUSIVE)
    beyond = {suite for suite, count in noisy.items() if not count <= BUDGET * rows[suite]}

    def applies(result: Result) -> bool:
        if result.verdict is Verdict.IMPROVED:
            return policy == MAIN
        return result.verdict is Verdict.INCONCLUSIVE and result.suite in beyond

    return [replace(result, strict=True) if applies(result) else result for result in results]


def _whole_message(record: TestRecord) -> str:
    """The failure in one line; a first line that ends in a colon is completed by the next line of the traceback."""
    if not record.message.endswith(":"):
        return record.message
    lines = [line[1:].strip() for line in record.detail.splitlines() if line.startswith("E ")]
    position = next((number for number, line in enumerate(lines) if line.endswith(record.message)), None)
    following = lines[position + 1] if position is not None and position + 1 < len(lines) else ""
    return f"{record.message} {following}".rstrip()


# 2. What tests measured --------------------------------------------------------------------------------------------


def _measured(found: _Evidence, results: list[Result], notes: list[str]) -> list[Result]:
    judged: list[Result] = []
    losses = _LossJudge(found)
    codegen = _CodegenJudge(found, notes)
    speeds = speedgate.SpeedJudge(found.platform, found.baselines, found.run)
    for result in results:
        try:
            if "loss_file" in result.properties:
                result = losses.judge(result)
            if "isa_file" in result.properties:
                result = codegen.judge(result)
            if "samples_file" in result.properties:
                result = _of_speed(found, result, speeds)
        except UnreadableError as error:
            if result.verdict is Verdict.PASS:
                result = replace(result, verdict=Verdict.UNREADABLE, message=str(error))
        judged.append(result)
    judged = losses.pair(judged)
    notes += [*losses.notes, *speeds.notes]
    return [*judged, *_blind(found, judged, losses.rows, codegen.rows, speeds.rows)]


def _of_speed(found: _Evidence, result: Result, speeds: speedgate.SpeedJudge) -> Result:
    measured = samples.read(file_of(found.folder, result, "samples_file"))
    comparison = speeds.judge(result.id, result.properties, measured)
    result = _overridden(result, comparison.verdict, comparison.message, comparison.as_dict())
    told = [*comparison.notes, *speeds.targets(measured)]
    return replace(result, detail=result.detail or "\n".join(told))


def file_of(folder: Path, result: Result, key: str) -> Path:
    """The evidence file that a test names. UnreadableError for one outside of the folder."""
    name = str(result.properties[key])
    try:
        path = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a name too long, a loop of links
        raise UnreadableError(f"{key} {name!r} is no path ({error})", "a path inside of the evidence folder") from None
    if not path.is_relative_to(folder.resolve()):
        raise UnreadableError(f"{key} {name!r} lies outside of the evidence folder", "a path inside of it")
    if path.exists() and not path.is_file():  # a pipe is waited for forever
        raise UnreadableError(f"{key} {name!r} {files.NO_FILE}", "a file inside of the evidence folder")
    return path


def _overridden(result: Result, verdict: Verdict, message: str, baseline: Mapping[str, Any] | None = None) -> Result:
    """A PASS takes the verdict of what it measured; a test that is red itself keeps its own and gains the table."""
    if result.verdict is not Verdict.PASS:
        return replace(result, baseline=baseline)
    return replace(result, verdict=verdict, message=message, baseline=baseline)


class _LossJudge:
    """Loss curves of one run, against `<platform>/loss.json` and against each other."""

    def __init__(self, found: _Evidence) -> None:
        self.found = found
        self.evidence: dict[str, baselines.LossEvidence] = {}
        self.calibrated = "loss" in found.platform.calibrated
        self.path = found.baselines / found.platform.id / baselines.LOSS_FILE
        self.baseline = baselines.load_loss(self.path, found.platform.id) if self.path.exists() else None
        other = found.baselines / SECOND_OPINION / baselines.LOSS_FILE
        elsewhere = found.platform.id != SECOND_OPINION and other.exists()
        self.shared = baselines.load_loss(other, SECOND_OPINION) if elsewhere else None
        versions = found.run.get("versions")
        known = versions if isinstance(versions, Mapping) else {}
        self.fingerprint = fingerprint.of_run(found.platform.id, known, found.run)
        self.moved: dict[str, list[str]] = {}

    @property
    def notes(self) -> list[str]:
        """A line for each way in which the recorded runs were made under another fingerprint."""
        return [f"recorded otherwise: {keys}, for {len(cases)} curves" for keys, cases in self.moved.items()]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(test id, what) of each recorded curve, for the check that all were measured."""
        rows = self.baseline.rows if self.baseline else []
        return sorted({(row.test, f"loss curve {row.case}") for row in rows})

    def judge(self, result: Result) -> Result:
        evidence = baselines.read_loss_evidence(file_of(self.found.folder, result, "loss_file"))
        swapped = _swapped(result, evidence)
        if swapped:
            return _overridden(result, Verdict.DISAGREE, swapped)
        self.evidence[result.id] = evidence
        return self._second_opinion(self._against_own(result, evidence), evidence)

    def _against_own(self, result: Result, evidence: baselines.LossEvidence) -> Result:
        """Against the runs that this platform has recorded."""
        if self.baseline is None:
            if not self.calibrated:
                return _overridden(result, Verdict.UNCALIBRATED, f"no loss baseline for {self.found.platform.id}")
            where = f"{self.found.platform.id}/{baselines.LOSS_FILE}"
            return _overridden(result, Verdict.NO_BASELINE, f"baselines/{where} does not exist")
        rows = self.baseline.of_case(evidence.case)
        if not rows:
            what = f"no run of {evidence.case} in baselines/{self.found.platform.id}/{baselines.LOSS_FILE}"
            return _overridden(result, Verdict.NO_BASELINE, what)
        same = self.baseline.of_config(evidence.case, evidence.config_hash)
        if not same:
            keys = baselines.differing_keys(evidence.config, rows[0].config)
            told = "; ".join(keys[:4]) or "keys that the file does not hold"
            what = f"recorded with config {rows[0].config_hash[:12]}, this is {evidence.config_hash[:12]}: {told}"
            return _overridden(result, Verdict.STALE_BASELINE, what)
        reference = baselines.reference_run(same)
        if reference is None:
            return _overridden(result, Verdict.NO_BASELINE, f"{evidence.case} has no run 0 (nudge 0, as configured)")
        moved = fingerprint.differing(self.fingerprint, fingerprint.of_row(reference.provenance))
        if moved:
            self.moved.setdefault("; ".join(moved), []).append(evidence.case)
        known = bands.recorded(reference, same)
        return self._apply(result, bands.compare(bands.Curve.of_evidence(evidence), *known))

    def _apply(self, result: Result, comparison: bands.Comparison) -> Result:
        first = comparison.first
        table = bands.as_dict(comparison)
        if first is None:
            return replace(result, baseline=table)
        detail = "\n".join(table["findings"])
        result = _overridden(result, Verdict.REGRESSION, f"{first.layer}: {first.message}", table)
        return replace(result, detail=result.detail or detail)

    def _second_opinion(self, result: Result, evidence: baselines.LossEvidence) -> Result:
        """A curve in high precision against another platform's runs of the same configuration, where it has some."""
        runs = self.shared.of_config(evidence.case, evidence.config_hash) if self.shared else ()
        reference = baselines.reference_run(runs)
        if reference is None or not _high_precision(evidence):
            return result
        spread = [bands.Curve.of_run(run) for run in runs if run is not reference]
        measured = bands.Curve.of_evidence(evidence)
        return _with(result, bands.compare_shared(measured, bands.Curve.of_run(reference), spread))

    def _known(self, evidence: baselines.LossEvidence) -> Iterator[bands.Recorded]:
        """The recorded runs of a curve, where there are some with its configuration and a run 0 among them."""
        same = self.baseline.of_config(evidence.case, evidence.config_hash) if self.baseline else ()
        reference = baselines.reference_run(same)
        if reference is not None:
            yield bands.recorded(reference, same)

    def pair(self, results: list[Result]) -> list[Result]:
        """FP8 curves against the bf16 curve of the same model and data in this run, where there is one."""
        plain = {_pair_key(evidence): evidence for evidence in self.evidence.values() if _high_precision(evidence)}
        paired: list[Result] = []
        for result in results:
            evidence = self.evidence.get(result.id)
            if evidence is not None and not _high_precision(evidence) and _pair_key(evidence) in plain:
                other = plain[_pair_key(evidence)]
                comparison = bands.compare_paired(
                    bands.Curve.of_evidence(evidence),
                    bands.Curve.of_evidence(other),
                    [*self._known(evidence), *self._known(other)],
                )
                result = _with(result, comparison)
            paired.append(result)
        return paired


def _with(result: Result, comparison: bands.Comparison) -> Result:
    """The result with the table of a comparison that needs no baseline of its own; red if it fired and nothing had."""
    known = result.baseline or {"kind": "loss", "rows": [], "findings": [], "notes": []}
    new = bands.as_dict(comparison)
    merged = {key: [*known[key], *new[key]] for key in ("rows", "findings", "notes")}
    result = replace(result, baseline={"kind": "loss", **merged})
    if comparison.first is not None and result.verdict in (Verdict.PASS, Verdict.UNCALIBRATED):
        message = f"{comparison.first.layer}: {comparison.first.message}"
        result = replace(result, verdict=Verdict.REGRESSION, message=message)
    return result


def _high_precision(evidence: baselines.LossEvidence) -> bool:
    return evidence.recipe == "bf16"


#: Configuration that differs between an FP8 run and its bf16 twin by nature.
UNPAIRED_KEYS = frozenset({"recipe", "format", "arch", "case", "simulated_arch"})


def _pair_key(evidence: baselines.LossEvidence) -> str:
    same = {key: value for key, value in evidence.config.items() if key not in UNPAIRED_KEYS}
    return json.dumps(same, sort_keys=True, default=str)


def _swapped(result: Result, evidence: baselines.LossEvidence) -> str | None:
    """What tells that the file is not this test's, or None. A renamed curve of another case must not pass."""
    case = manifest.parse(result.id).case
    claims = {"case": (evidence.case, case)}
    for key in ("format", "arch", "recipe", "config_hash"):
        if key in result.properties:
            claims[key] = (str(getattr(evidence, key)), str(result.properties[key]))
    for key, (inside, expected) in claims.items():
        if inside != expected:
            return f"{result.properties['loss_file']} says {key} {inside!r}, the test says {expected!r}"
    if evidence.nudge != 0:
        return f"{result.properties['loss_file']} is a nudged run ({evidence.nudge}); a run as configured is judged"
    return None


class _CodegenJudge:
    """Machine code of one run, against `<arch>/codegen.json` in the block of its Triton minor version."""

    def __init__(self, found: _Evidence, notes: list[str]) -> None:
        self.found = found
        self.notes = notes
        self.calibrated = "codegen" in found.platform.calibrated
        self.loaded: dict[str, baselines.CodegenBaseline | None] = {}
        for arch in found.platform.codegen_archs:
            self._load(arch)
        # The run's own Triton counts too: a suite that stops writing evidence altogether must not escape its rows.
        versions = found.run.get("versions")
        triton = str(versions.get("triton") or "") if isinstance(versions, Mapping) else ""
        self.versions: set[str] = {baselines.minor_version(triton)} if triton else set()

    def _load(self, arch: str) -> baselines.CodegenBaseline | None:
        if arch not in self.loaded:
            path = self.found.baselines / arch / baselines.CODEGEN_FILE
            self.loaded[arch] = baselines.load_codegen(path, arch) if path.exists() else None
        return self.loaded[arch]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(test id, what) of each row that this run's Triton version should have measured."""
        rows: list[tuple[str, str]] = []
        for arch, baseline in sorted(self.loaded.items()):
            for block in baseline.blocks if baseline else ():
                if block.triton in self.versions:
                    rows.extend((row.test_id, f"machine code of {row.kernel} for {arch}") for row in block.rows)
        return rows

    def judge(self, result: Result) -> Result:
        evidence = baselines.read_isa_evidence(file_of(self.found.folder, result, "isa_file"))
        self.versions.add(baselines.minor_version(evidence.triton))
        test = manifest.parse(result.id)
        for key, inside, expected in (
            ("case", evidence.case, test.case),
            ("arch", evidence.arch, str(result.properties.get("arch", evidence.arch))),
            ("format", evidence.format, str(result.properties.get("format", evidence.format))),
        ):
            if inside != expected:
                what = f"{result.properties['isa_file']} says {key} {inside!r}, the test says {expected!r}"
                return _overridden(result, Verdict.DISAGREE, what)
        baseline = self._load(evidence.arch)
        file = f"baselines/{evidence.arch}/{baselines.CODEGEN_FILE}"
        verdict = Verdict.NO_BASELINE if self.calibrated else Verdict.UNCALIBRATED
        unjudged = machinecode.unjudged(evidence.facts)
        if baseline is None:
            return _overridden(result, verdict, f"{file} does not exist", unjudged)
        block = baseline.block(evidence.triton)
        if block is None:
            known = ", ".join(block.triton for block in baseline.blocks) or "none"
            version = baselines.minor_version(evidence.triton)
            what = f"{file} has no block for Triton {version}, only for {known}"
            return _overridden(result, verdict, what, unjudged)
        wanted = (*test.key, evidence.format, evidence.arch)
        row = next((row for row in block.rows if row.key == wanted), None)
        if row is None:
            what = f"{file} has no row for {test.case} under Triton {block.triton}"
            return _overridden(result, verdict, what, unjudged)
        if row.kernel != evidence.kernel or row.config != evidence.config:
            now = {"kernel": evidence.kernel, **evidence.config}
            keys = baselines.differing_keys(now, {"kernel": row.kernel, **row.config})
            what = f"recorded for another configuration: {'; '.join(keys[:4])}"
            return _overridden(result, Verdict.STALE_BASELINE, what, unjudged)
        comparison = machinecode.compare(evidence.facts, row.facts)
        if row.listing_hash != evidence.listing_hash and not comparison.moved:
            self.notes.append(f"changed: the listing of {test.case}, with every gated fact equal")
        result = _overridden(result, comparison.verdict, comparison.message, comparison.as_dict())
        if result.verdict is Verdict.IMPROVED:
            patch = json.dumps({"module": row.module, "test": row.test, "case": row.case, "facts": evidence.facts})
            detail = f"{file}, block {block.triton}; record it: `fp8ci baseline record`\n{comparison.patch}\n{patch}"
            result = replace(result, detail=detail)
        return result


def _blind(found: _Evidence, results: list[Result], *recorded: list[tuple[str, str]]) -> Iterator[Result]:
    """Rows of a baseline that no test measured although it ran, or although the run selected it."""
    by_id = {result.id: result for result in results}
    measured = {result.id for result in results if MEASURED & result.properties.keys()}
    for test_id, what in (row for rows in recorded for row in rows):
        if test_id in measured or not found.selected(test_id):
            continue
        known = by_id.get(test_id)
        if known is not None and known.verdict is not Verdict.PASS:
            continue  # red, skipped or missing for a reason that is already told
        suite = test_id.partition("/")[0]
        name = f"{test_id.partition('[')[0]}-evidence[{manifest.parse(test_id).case}]" if known else test_id
        told = "its test ran and wrote no evidence" if known else "no test of that id ran"
        yield Result(name, suite, Verdict.MISSING, f"{what} has a baseline and was not measured: {told}")


# 3. Manifest -------------------------------------------------------------------------------------------------------


def _manifest_findings(found: _Evidence, results: list[Result], notes: list[str]) -> list[Result]:
    """Adds MISSING for ids that must run here; turns their SKIP into MISSING in place."""
    path = found.baselines / found.platform.id / "manifest.txt"
    if not path.exists():
        what = f"baselines/{found.platform.id}/manifest.txt does not exist: nothing says which tests must run here"
        if found.platform.calibrated:
            what += f"; write it: `fp8ci baseline record --platform {found.platform.id} --manifest`"
            return [deaths.suite_result(found.suites[0], "manifest", Verdict.NO_BASELINE, what)]
        notes.append(what)
        return []
    listed_ids = manifest.read(path)
    absent: list[Result] = []
    for suite in found.suites:
        if suite in found.platform.suites and not any(test_id.startswith(f"{suite}/") for test_id in listed_ids):
            what = f"baselines/{found.platform.id}/manifest.txt lists no test of {suite}: nothing says what must run"
            measures = suite == SPEED and SPEED not in found.platform.calibrated
            verdict = Verdict.UNCALIBRATED if measures else Verdict.NO_BASELINE
            absent.append(deaths.suite_result(suite, "manifest", verdict, what))
    required = [test_id for test_id in listed_ids if found.selected(test_id)]
    positions = {result.id: position for position, result in enumerate(results)}
    died = {suite: death for suite in found.suites if (death := deaths.of_suite(found.journal, suite, found.folder))}
    for test_id in required:
        position = positions.get(test_id)
        if position is None:
            suite = test_id.partition("/")[0]
            what = f"in baselines/{found.platform.id}/manifest.txt, and not collected"
            if suite not in found.journal.collected and suite in died:
                what = f"not run: {died[suite].message}"  # nobody deleted it: its process never came so far
            absent.append(Result(test_id, suite, Verdict.MISSING, what))
        elif results[position].verdict is Verdict.SKIP:
            reason = f"must run on {found.platform.id} and was skipped: {results[position].message}"
            results[position] = replace(results[position], verdict=Verdict.MISSING, message=reason)
    listed = set(required)
    new = [test_id for test_id in found.journal.tests if test_id not in listed and found.selected(test_id)]
    if new:
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        night = " (rows of the night are in none)" if found.run.get("full") else ""
        notes.append(f"new: {len(new)} tests are not in the manifest{night}: {', '.join(sorted(new)[:3])}{more}")
    return absent


def _idle(found: _Evidence, results: list[Result]) -> Iterator[Result]:
    """MISSING for a suite that judged nothing: every test skipped, or too short to time. Under --case, for the run, and
    where no case was selected at all.
    """
    if found.case is not None and not results:
        what = f"no case of {', '.join(found.suites)} matches {found.case!r}, so nothing ran"
        yield deaths.suite_result(found.suites[0], "cases", Verdict.MISSING, what)
    parts = [found.suites] if found.case is not None else [(suite,) for suite in found.suites]
    for suites in parts:
        mine = [result for result in results if result.suite in suites]
        if mine and all(result.verdict in (Verdict.SKIP, Verdict.UNMEASURABLE) for result in mine):
            ran = any(result.verdict is Verdict.UNMEASURABLE for result in mine)
            how = (
                f"nothing counts: all {len(mine)} were unmeasurable or" if ran else f"nothing ran: all {len(mine)} were"
            )
            what = f"{how} skipped, the first because: {mine[0].message}"
            yield deaths.suite_result(mine[0].suite, "skipped", Verdict.MISSING, what)


def _attempts(found: _Evidence) -> Iterator[str]:
    """A line for each suite that ran more than once, with how the earlier attempts ended."""
    for suite in found.suites:
        for process in [process for process in found.journal.processes if process.suite == suite][:-1]:
            told = f"ended with {process.signal or f'exit {process.rc}'} after {process.seconds:.1f} s"
            yield f"retried: {suite}, attempt {process.attempt} {told} (logs/{suite}.{process.attempt}.log)"


def _memory(found: _Evidence) -> Iterator[str]:
    """A line for each suite that ended in order while the kernel killed something at the run's own memory limit."""
    for suite in found.suites:
        process, session = deaths.last_of(found.journal, suite)
        if process is not None and process.oom == "limit" and session is not None and session.rc is not None:
            yield f"memory: while {suite} ran, the kernel killed a process at the run's own limit"


def _narrowed(found: _Evidence) -> Iterator[Result]:
    """MISSING for a run that selected less than its platform must run: a gate can be emptied by its arguments too."""
    left_out = [suite for suite in found.platform.suites if suite not in found.suites]
    if left_out:
        what = f"the run selected {', '.join(found.suites)}; {', '.join(left_out)} must run on {found.platform.id} too"
        yield deaths.suite_result(left_out[0], "selection", Verdict.MISSING, what)
    if found.case is not None:
        what = f"the run selected the cases {found.case!r}; all of them must run"
        yield deaths.suite_result(found.suites[0], "cases", Verdict.MISSING, what)
        return
    short = SPEED in found.suites and found.speed == "short"
    if short and found.run["policy"] == MAIN:
        what = "the run selected the short table of speed; on main all rows must run"
        yield deaths.suite_result(SPEED, "rows", Verdict.MISSING, what)
    for suite in found.suites:
        if short and suite == SPEED and not found.run.get("pytest_args"):
            continue  # what was deselected are the other rows
        if suite in found.journal.uncounted:
            what = "nobody counted how many tests pytest's own arguments deselected; all must run"
            yield deaths.suite_result(suite, "deselected", Verdict.MISSING, what)
        if found.journal.deselected.get(suite):
            what = f"{found.journal.deselected[suite]} tests were deselected by pytest's own arguments; all must run"
            yield deaths.suite_result(suite, "deselected", Verdict.MISSING, what)


# Agreement of the run's own files ----------------------------------------------------------------------------------


def _agreement(found: _Evidence, notes: list[str]) -> Iterable[Result]:
    run_id = found.run["run_id"]
    if found.run.get("interrupted") and "interrupt" not in {process.killed_by for process in found.journal.processes}:
        yield deaths.suite_result(found.suites[0], "run", Verdict.INTERRUPTED, "the run was stopped between two suites")
    strangers = sorted(found.journal.run_ids - {run_id})
    if strangers:
        what = f"the journal is of run {strangers[0]}, {RUN_FILE} of {run_id}: one of them is from another run"
        yield deaths.suite_result(found.suites[0], "run-id", Verdict.DISAGREE, what)
    machine = found.run.get("capabilities")
    if isinstance(machine, Mapping) and machine.get("platform") != found.platform.id:
        what = f"{RUN_FILE} is of platform {found.platform.id}, and its machine is a {machine.get('platform')}"
        yield deaths.suite_result(found.suites[0], "platform", Verdict.DISAGREE, what)
    known = {test_id.partition("/")[0]: test_id for test_id in reversed(found.journal.tests)}
    begun = {str(process.suite): "a process" for process in found.journal.processes}
    for suite, what in {**begun, **known}.items():
        if suite not in found.suites:
            told = f"the journal holds {what} of {suite!r}, and the run did not select that suite"
            yield deaths.suite_result(suite, "selection", Verdict.DISAGREE, told)
            break
    yield from _asked_otherwise(found)
    yield from _report_of_another_run(found)
    if not found.journal.damage:
        return
    died = any(
        process is None or not process.ended or session is None or session.rc is None
        for process, session in (deaths.last_of(found.journal, suite) for suite in found.suites)
    )
    if died:
        notes.extend(f"journal: {damage}" for damage in found.journal.damage)
    else:
        what = f"{JOURNAL_FILE}: {found.journal.damage[0]}, though every process ended in order"
        yield deaths.suite_result(found.suites[0], "journal", Verdict.UNREADABLE, what)


def _asked_otherwise(found: _Evidence) -> Iterator[Result]:
    """What run.json says was run, against what the journal says each test process was asked for."""
    said = {"--fp8-platform": found.platform.id, "--fp8-run-id": found.run["run_id"]}
    for process in found.journal.processes:
        if process.suite not in found.suites or "--fp8-out" not in process.argv:
            continue
        asked = dict(zip(process.argv, process.argv[1:], strict=False))
        of_suite = {**said, "--fp8-case": case_of(process.suite, found.case, found.speed)}
        for option, value in of_suite.items():
            if asked.get(option) != value:
                what = f"{RUN_FILE} says {value!r}, and its test process was asked for {option} {asked.get(option)!r}"
                yield deaths.suite_result(process.suite, "arguments", Verdict.DISAGREE, what)
                return


def _report_of_another_run(found: _Evidence) -> Iterator[Result]:
    """junit.xml is what most tools look at: one beside this journal that is of another run, cut, or says otherwise.

    There is none while a run judges itself. What it says of curves and machine code depends on the files judged with;
    whether a test passed, failed or is there at all does not.
    """
    path = found.folder / JUNIT_FILE
    if not path.exists():
        return
    try:
        told = junit.run_ids(path)
    except UnreadableError as error:
        yield deaths.suite_result(found.suites[0], "junit", Verdict.UNREADABLE, str(error))
        return
    if told != {found.run["run_id"]}:
        what = f"junit.xml is of run {', '.join(sorted(told)) or 'nobody'}, {RUN_FILE} of {found.run['run_id']}"
        yield deaths.suite_result(found.suites[0], "junit", Verdict.DISAGREE, what)
        return
    contradiction = _contradiction(found, junit.verdicts(path))
    if contradiction:
        yield deaths.suite_result(found.suites[0], "junit", Verdict.DISAGREE, contradiction)


def _contradiction(found: _Evidence, reported: Mapping[tuple[str, str], str]) -> str | None:
    """The first test of which junit.xml and the journal say what cannot both be, in words."""
    names: dict[tuple[str, str], list[str]] = {}
    for record in found.journal.tests.values():
        names.setdefault((record.suite, junit.case_name(record.id)), []).append(record.state)
    for name, states in names.items():
        if name not in reported:
            return f"the journal holds {'/'.join(name)}, and junit.xml does not"
        said = reported[name]
        # Two ids of one name are told apart by a number in junit.xml; nobody knows here which is which.
        if len(states) == 1 and (said == Verdict.PASS) > (states[0] == "passed"):
            return f"junit.xml says {said} of {'/'.join(name)}, the journal says {states[0]}"
        if len(states) == 1 and (said == Verdict.FAIL) > (states[0] == "failed"):
            return f"junit.xml says {said} of {'/'.join(name)}, the journal says {states[0]}"
    return next(
        (
            f"junit.xml says PASS of {'/'.join(name)}, and the journal holds no such test"
            for name, said in reported.items()
            if said == Verdict.PASS and name not in names and not junit.numbered(name[1])
        ),
        None,
    )


# 4. Waivers --------------------------------------------------------------------------------------------------------


def _capabilities(found: _Evidence) -> Capabilities:
    raw = found.run.get("capabilities")
    if not isinstance(raw, dict):
        raise UnreadableError(f"{RUN_FILE} does not say what the machine can do", "'capabilities'", "run again")
    return Capabilities.from_json(json.dumps(raw))


def _waived(found: _Evidence, results: list[Result]) -> list[Result]:
    today = ledger.today()
    # The run's own ledger is held to 90 days from the run, a checkout's to 90 days from now.
    own = found.baselines == found.folder / JUDGED_WITH
    waivers = ledger.load(found.baselines / "waivers.toml", min(found.day, today) if own else today)
    if not waivers:
        return results
    here = _capabilities(found)
    positions = {result.id: position for position, result in enumerate(results)}
    for waiver in waivers:
        if not waiver.applies(here) or not found.selected(waiver.id):
            continue
        position = positions.get(waiver.id)
        known = results[position] if position is not None else None
        owner = f"{waiver.reason} ({waiver.issue}, {waiver.owner}, until {waiver.expires})"
        if known is None or known.verdict in (Verdict.PASS, Verdict.IMPROVED):
            told = "passes" if known else "was not run"
            unused = f"waived, and the test {told}: {owner}"
            result = Result(waiver.id, waiver.id.partition("/")[0], Verdict.WAIVER_UNUSED, unused)
            result = replace(known, verdict=Verdict.WAIVER_UNUSED, message=unused) if known else result
        elif not _waivable(found, known):
            continue
        elif waiver.expired(max(found.day, today)):
            since = "" if waiver.expired(found.day) else f", after the run of {found.day}"
            told = f"the waiver expired on {waiver.expires}{since}: {owner}; {known.verdict}: {known.message}"
            result = replace(known, verdict=Verdict.WAIVER_EXPIRED, message=told)
        elif known.red or known.verdict is Verdict.SKIP:
            result = replace(known, verdict=Verdict.WAIVED, message=f"{owner}; {known.verdict}: {known.message}")
        else:
            continue
        if position is None:
            results.append(result)
        else:
            results[position] = result
    return results


def _waivable(found: _Evidence, known: Result) -> bool:
    """Whether a waiver may speak of this result: a red or skipped test, never evidence that is missing or untrue.

    A waiver that covered MISSING would let its test be deleted, one that covered KILLED a run that nobody finished.
    """
    record = found.journal.tests.get(known.id)
    if known.id.partition("::")[0] == f"{known.suite}/suite":  # about a whole suite: nothing says what must run there
        return False
    skipped = record is not None and record.state == "skipped" and known.verdict in (Verdict.SKIP, Verdict.MISSING)
    return skipped or VERDICTS[known.verdict].exit_code in (SUCCESS, FAILED, BASELINE)


def against(evidence: Path, checkout_baselines: Path, whole: bool = False) -> tuple[Judgement, tuple[str, ...]]:
    """Judge with a checkout's baselines (`--current`) and say what differs from the judgement of the run itself.

    Returns:
        The judgement with the checkout's files, and one line for each test whose verdict differs.
    """
    current = judge(evidence, checkout_baselines, whole)
    try:
        original = judge(evidence)
    except HarnessError as error:
        return current, (f"the copies in {JUDGED_WITH}/ cannot be judged with: {error}",)
    before = {result.id: str(result.verdict) for result in original.results}
    after = {result.id: str(result.verdict) for result in current.results}
    return current, differing(before, after, "the run's own files", "these")


def differing(before: Mapping[str, str], after: Mapping[str, str], first: str, second: str) -> tuple[str, ...]:
    """One line for each test whose verdict differs between two judgements."""
    return tuple(
        f"{test_id}: {before.get(test_id, 'absent')} by {first}, {after.get(test_id, 'absent')} by {second}"
        for test_id in sorted({*before, *after})
        if before.get(test_id) != after.get(test_id)
    )
