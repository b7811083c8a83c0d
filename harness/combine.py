"""Several pieces of evidence, one verdict: `fp8ci gate PATH... [--expect PLATFORM,...]`.

A piece is an evidence folder of ours, judged as always (gate.py), or a JUnit file of anybody's (junit_reader.py). Each
is judged by itself, so that one that cannot be read takes nothing of the others along, and the process exits with the
worst of all. What a file says is taken as it stands where its elements say one thing; the rest is red:

    rejected by the reader (empty, cut, HTML, entities)            UNREADABLE   the file
    counts that no element bears out                               DISAGREE     the file
    a result in an element that is not JUnit's; a suite that       DISAGREE     the file
    says `aborted`, `timedout` .. of itself, or failed for nothing
    no case at all, or all of them skipped                         MISSING      the file
    a case without a name, unless it failed                        UNREADABLE   the case
    failure or error, whatever else the case holds                 FAIL         the case
    one name, outcomes that differ; a repeated failure             FLAKY        the case
    errors of a suite, outside of any case                         FAIL         the suite
    a `verdict` property of ours and an element that contradict    DISAGREE     the case
    a case that calls itself waived: no ledger says so             FAIL         the case

`--expect` names the platforms that must be there: one that is absent, unreadable, or of which everything was skipped is
MISSING by its name, and evidence of a run that selected less than its platform must run is MISSING too. That is what
the last job of a workflow asks, since a job that was skipped or cancelled counts as a success there. Only the folder of
a run can answer: a report does not say what it leaves out, and without a manifest nobody knows what had to run. A
junit.xml beside its run stands for that run.

Evidence that is given twice counts once: the same path, the report inside of a folder that is given too, a copy. Two
folders of one run that say different things are DISAGREE, and both count.

Not here: reading XML (junit_reader.py), one evidence folder (gate.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import gate, junit_reader, platforms
from harness.errors import VERDICTS, HarnessError, Verdict, worst_exit
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.junit_reader import BAD_STATUS, IDLE_STATUS, RED, REPEATED, Case, Report, Suite
from harness.result import Judgement, Result


@dataclass(frozen=True)
class Piece:
    """One piece of evidence, judged. `label` is its platform, or the file's name.

    `platforms` are those that it speaks of, `tested` those of them of which something ran, `listed` those for which it
    holds the manifest. `run` names the run of a folder.
    """

    path: Path
    label: str
    platforms: frozenset[str]
    tested: frozenset[str]
    judgement: Judgement
    listed: frozenset[str] = frozenset()
    run: str = ""


def judge(
    paths: Sequence[Path], expect: Sequence[str] = (), whole: bool = False
) -> tuple[Judgement, tuple[Piece, ...]]:
    """Judge every piece, and what is expected of them together. UsageError for an expected platform that is none.

    With `whole`, and wherever something is expected, a selection of what must run is MISSING.
    """
    expect = tuple(dict.fromkeys(expect))
    for name in expect:
        platforms.get(name)
    kept, repeated = _once(paths, bool(expect))
    pieces, copies, contradictions = _runs([_piece(path, whole or bool(expect)) for path in kept])
    results = [replace(found, suite=f"{found.suite} on {p.label}") for p in pieces for found in p.judgement.results]
    results += [*contradictions, *_expected(pieces, expect)]
    notes = (*repeated, *copies, *(f"{piece.label}: {note}" for piece in pieces for note in piece.judgement.notes))
    strict = any(piece.judgement.policy == gate.MAIN for piece in pieces)
    return judgement_of(results, notes, gate.MAIN if strict else gate.POLICIES[0]), pieces


TWICE = "is there twice, and counts once"


def _once(paths: Sequence[Path], expected: bool) -> tuple[list[Path], list[str]]:
    """The paths without those that name the same evidence again, and a line for each of these.

    A report beside its run is that run's: where the folder is given too, and where something is expected of it.
    """
    real = {path: _resolved(path) for path in paths}
    given = set(real.values())
    kept: dict[Path, Path] = {}
    notes: list[str] = []
    for path in paths:
        place, folder = real[path], real[path].parent
        beside = place.name == "junit.xml" and all((folder / name).exists() for name in (gate.RUN_FILE, JOURNAL_FILE))
        if beside and (expected or folder in given):
            path, place = path.parent, folder
        if place in kept:
            notes.append(f"{path} {TWICE}")
        else:
            kept[place] = path
    return list(kept.values()), notes


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte: reading it says so
        return path.absolute()


def _runs(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], list[str], list[Result]]:
    """The pieces without copies of a run, a line for each copy, and DISAGREE for folders of one run that differ."""
    kept: list[Piece] = []
    notes: list[str] = []
    found: list[Result] = []
    for piece in pieces:
        same = next((known for known in kept if piece.run and known.run == piece.run), None)
        if same is None:
            kept.append(piece)
        elif _outcomes(same) == _outcomes(piece):
            notes.append(f"run {piece.run} {TWICE}: {same.path} and {piece.path}")
        else:
            kept.append(piece)
            told = f"{same.path} and {piece.path} are both of run {piece.run}, and say different things"
            found.append(Result(f"gate/run::{len(found) + 1}", "gate", Verdict.DISAGREE, told))
    return tuple(kept), notes, found


def _outcomes(piece: Piece) -> list[tuple[str, Verdict]]:
    return [(result.id, result.verdict) for result in piece.judgement.results]


Found = tuple[Result, Suite | None, Case | None]
"""A result, and where in its file it comes from: the first case of its name, a suite, or the file as a whole."""


def of_report(report: Report, label: str) -> Judgement:
    """The verdict on a JUnit file: of each case, and of the file as a whole."""
    found, notes = findings(report, label)
    return judgement_of([result for result, _, _ in found], notes)


def findings(report: Report, label: str) -> tuple[list[Found], tuple[str, ...]]:
    """Every result of a file, in its order, and what was repaired. Cases of one name in suites of one name are one."""
    found: list[Found] = []
    repairs = list(report.repairs)
    named: dict[tuple[str, str], list[tuple[Suite, Case]]] = {}
    for suite, case in report.cases:
        named.setdefault((suite.name, test_id(report, suite, case)), []).append((suite, case))
    used: set[str] = set()
    for (_, name), cases in named.items():
        if len(cases) > 1:
            repairs.append(f"{name} is there {len(cases)} times")
        own = name
        while own in used:  # in another suite: shards, or two runs in one file
            own += "+"
        used.add(own)
        found.append((_of_cases(own, cases), *cases[0]))
    for suite in report.suites:
        for number, error in enumerate(suite.errors, start=1):
            message = f"suite error: {_told(error)}"
            name = f"{suite.name}/suite::error-{number}"
            found.append((Result(name, suite.name, Verdict.FAIL, message, error.text), suite, None))

    def whole(what: str, verdict: Verdict, message: str) -> Found:
        return Result(f"{label}/report::{what}", label, verdict, f"{report.path.name}: {message}"), None, None

    if report.rejected:
        found.append(whole("readable", Verdict.UNREADABLE, report.rejected))
    elif not found:
        found.append(whole("cases", Verdict.MISSING, "holds no test case"))
    elif all(result.verdict in (Verdict.SKIP, Verdict.UNMEASURABLE) for result, _, _ in found):
        what = f"nothing ran: all {len(found)} were skipped, the first because: {found[0][0].message}"
        found.append(whole("skipped", Verdict.MISSING, what))
    found += [whole(f"agreement-{n}", Verdict.DISAGREE, lie) for n, lie in enumerate(report.lies, start=1)]
    return found, tuple(f"repaired: {repair}" for repair in repairs)


def judgement_of(results: list[Result], notes: tuple[str, ...], policy: str = gate.POLICIES[0]) -> Judgement:
    """The judgement that results add up to: their counts, and the worst of their exit codes."""
    counts = Counter(str(result.verdict) for result in results)
    exit_code = worst_exit([result.exit_code for result in results])
    return Judgement(tuple(results), exit_code, dict(sorted(counts.items())), notes, policy)


def _piece(path: Path, whole: bool) -> Piece:
    """Judge one piece; what cannot be judged is a finding of its own."""
    if path.is_dir():
        try:
            run = gate.read_run(path)
            name = str(run["platform"])
            judgement = gate.judge(path, whole=whole)
        except HarnessError as error:
            found = Result(f"{path.name}/evidence::readable", path.name, error.verdict, str(error))
            return Piece(path, path.name, frozenset(), frozenset(), judgement_of([found], ()))
        idle = {Verdict.SKIP, Verdict.MISSING}
        ran = frozenset([name] if {result.verdict for result in judgement.results} - idle else [])
        known = (path / gate.JUDGED_WITH / name / "manifest.txt").is_file()
        listed = frozenset([name] if known else [])
        return Piece(path, name, frozenset([name]), ran, judgement, listed, f"{run['run_id']} on {name}")
    report = junit_reader.read(path)
    tested = {suite.platform for suite, case in report.cases if not case.has("skipped") and not _is_missing(case)}
    named, ran = ((frozenset(name for name in names if name)) for names in (report.platforms, tested))
    label = next(iter(named)) if len(named) == 1 else path.name
    judgement = of_report(report, path.name)
    results = [_unwaived(result) for result in judgement.results]
    return Piece(
        path, label, named, ran, judgement_of([*results, *(_narrowed(report) if whole else ())], judgement.notes)
    )


def _unwaived(result: Result) -> Result:
    """A report waives nothing: what it calls waived is red."""
    if result.verdict is not Verdict.WAIVED:
        return result
    told = f"waived by the report itself ({result.message}); a waiver counts in the ledger that a run is judged with"
    return replace(result, verdict=Verdict.FAIL, message=told)


def _narrowed(report: Report) -> Iterator[Result]:
    """MISSING for a report of ours that holds less than its platform must run, as gate.py says it of a folder."""
    for name in sorted(report.platforms & platforms.PLATFORMS.keys()):
        mine = [suite for suite in report.suites if suite.platform == name]
        held = {suite.name.split(".")[1] for suite in mine if suite.name.startswith("fp8.")}
        left_out = [suite for suite in platforms.PLATFORMS[name].suites if suite not in held]
        cases = sorted({suite.properties["case"] for suite in mine if suite.properties.get("case")})
        for what, found in (("selection", ", ".join(left_out)), ("cases", ", ".join(cases))):
            told = f"holds nothing of {found}" if what == "selection" else f"holds the cases {found!r} only"
            if found:
                yield Result(f"{name}/report::{what}", name, Verdict.MISSING, f"{report.path.name} {told}")


def _is_missing(case: Case) -> bool:
    return case.properties.get("verdict") == Verdict.MISSING


def _expected(pieces: Sequence[Piece], expect: Sequence[str]) -> Iterator[Result]:
    """MISSING for each expected platform of which nobody can say that it was tested; a PASS by name for the others."""
    for name in expect:
        why = _unproven(pieces, name)
        verdict = Verdict.MISSING if why else Verdict.PASS
        yield Result(f"gate/expected::{name}", "gate", verdict, f"{name} is expected, and {why}" if why else "")


def _unproven(pieces: Sequence[Piece], name: str) -> str:
    """What is missing for saying that what must run on a platform has run; empty when nothing is."""
    mine = [piece for piece in pieces if name in piece.platforms]
    if not mine:
        return "nothing of it is there: its job was skipped, cancelled or never ran"
    ran = [piece for piece in mine if name in piece.tested]
    if not ran:
        return "nothing of it ran: what is there is skipped or missing"
    runs = [piece for piece in ran if piece.run]
    if not runs:
        files = ", ".join(sorted(piece.path.name for piece in ran))
        lacking = f"without {gate.RUN_FILE} and {JOURNAL_FILE} beside it"
        return f"of it there is only {files}, {lacking}: nothing says which tests had to run; give the run's folder"
    if not any(name in piece.listed for piece in runs):
        where = f"{gate.JUDGED_WITH}/{name}/manifest.txt is missing"
        cure = f"record it: `fp8ci baseline record --platform {name} --manifest`"
        return f"{where}: nothing says what must run there; {cure}"
    return ""


def test_id(report: Report, suite: Suite, case: Case) -> str:
    """The test's id where the report is one of ours, else its suite, class and name; unique in the report."""
    words = case.classname.split(".")
    if len(words) == 3 and words[0] == "fp8":
        return f"{words[1] if len(report.platforms) < 2 else '.'.join(words[1:])}/{case.name}"
    return f"{suite.name}/{case.classname or suite.name}::{case.name}"


def _of_cases(name: str, cases: Sequence[tuple[Suite, Case]]) -> Result:
    """The verdict on all cases of one name: the worst, FLAKY where some passed and some did not."""
    found = [_of_case(name, suite, case) for suite, case in cases]
    worst = min(found, key=lambda result: VERDICTS[result.verdict].rank)
    ran = {result.red for result in found if result.verdict is not Verdict.SKIP}
    if len(ran) > 1:
        outcomes = ", ".join("red" if result.red else str(result.verdict) for result in found)
        message = f"cases of one name ended differently: {outcomes}; {worst.message}"
        return replace(worst, verdict=Verdict.FLAKY, message=message)
    return worst


def _of_case(name: str, suite: Suite, case: Case) -> Result:
    properties = {key: value for key, value in case.properties.items() if key != "verdict"}
    own = name.partition("/")[0] if case.classname.startswith("fp8.") else suite.name

    def result(verdict: Verdict, message: str = "", detail: str = "") -> Result:
        return Result(name, own, verdict, message, detail, case.seconds or 0.0, properties)

    red = next((element for element in case.elements if element.kind in RED), None)
    skipped = next((element for element in case.elements if element.kind == "skipped"), None)
    repeated = next((element for element in case.elements if element.kind in REPEATED), None)
    said = case.properties.get("verdict", "")
    if said in Verdict.__members__:
        verdict, element = Verdict(said), red or skipped
        rule = VERDICTS[verdict]
        kind = element.kind if element is not None else "none"
        if kind in (rule.junit, rule.stricter[1] if rule.stricter else ""):
            strict = rule.stricter is not None and kind == rule.stricter[1]
            message = element.message.removeprefix(f"{verdict}: ") if element is not None else ""
            detail = element.text if element is not None else ""
            return replace(result(verdict, message, detail), strict=strict)
        return result(Verdict.DISAGREE, f"its property says {verdict}, its element is {kind}")
    if red is not None:
        return result(Verdict.FAIL, ("error: " if red.kind == "error" else "") + _told(red), red.text)
    if case.status in BAD_STATUS:
        return result(Verdict.FAIL, f"its status is {case.status!r}, without an element that says why")
    if case.status == "unnamed":
        return result(Verdict.UNREADABLE, "a testcase without a name: nobody can say what passed")
    if repeated is not None:
        return result(Verdict.FLAKY, f"{repeated.kind}: {_told(repeated)}", repeated.text)
    if skipped is not None:
        return result(Verdict.SKIP, _told(skipped))
    if case.status in IDLE_STATUS:
        return result(Verdict.SKIP, f"its status is {case.status!r}")
    return result(Verdict.PASS)


def _told(element: junit_reader.Element) -> str:
    """One line of an element: its message, else the first line of its text, else its type."""
    first = next((line.strip() for line in element.text.splitlines() if line.strip()), "")
    return " ".join((element.message or first or element.type or "no message").split())
