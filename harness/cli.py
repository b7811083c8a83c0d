"""`fp8ci`: parse, call, print. Data on stdout, talk on stderr, one line an error, the exit codes of errors.py.

Imports of the harness's own modules happen inside the commands, so that `fp8ci --help` answers at once and each command
needs only what it uses (`gate` neither torch nor pytest).
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from harness.errors import (
    EXIT_MEANINGS,
    INTERRUPTED,
    VERDICTS,
    HarnessError,
    InfraError,
    UsageError,
    Verdict,
    worst_exit,
)

if TYPE_CHECKING:
    from harness.doctor import Asked
    from harness.perturb import Outcome
    from harness.platforms import Platform
    from harness.power import Power
    from harness.result import Judgement
    from harness.run import RunRequest

POLICIES = ("pull-request", "main")
PLACES = ("local", "docker")
_EXITS = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    pytest_args: list[str] = []
    if "--" in arguments:
        position = arguments.index("--")
        arguments, pytest_args = arguments[:position], arguments[position + 1 :]
    try:
        options = _parser().parse_args(arguments)
        if pytest_args and options.command != "run":
            raise UsageError(f"`fp8ci {options.command}` takes nothing after --", "pytest arguments for run only", "")
        options.pytest_args = tuple(pytest_args)
        command: Callable[[argparse.Namespace], int] = options.call
        return command(options)
    except HarnessError as error:
        _say(f"fp8ci: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("fp8ci: interrupted")
        return INTERRUPTED
    except OSError as error:
        # A file or folder that nothing above expects to fail: a deleted working folder, a name that is too long.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "a disk with room; free space" if full else "a file system that answers; correct the path"
        _say(f"fp8ci: {error}; expected {advice}, or run it elsewhere")
        return VERDICTS[Verdict.DISK if full else Verdict.INFRA].exit_code


class _Parser(argparse.ArgumentParser):
    """argparse says `usage: ...` and two lines more; here an error is one line, like every other."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message, "", f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fp8ci",
        description="Gate FP8 training: numerics, machine code and 100-step loss against recorded baselines.",
        epilog=f"exit codes:\n{_EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run suites, judge them, write an evidence folder")
    _selection(run)
    _where(run)
    _full(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="evidence folder (default: evidence/PLATFORM-TIME-ID)")
    run.add_argument("--policy", choices=POLICIES, help="on main IMPROVED is red (default: from GITHUB_EVENT_NAME)")
    run.add_argument(
        "--retries", type=int, default=1, metavar="N", help="tries more of a suite that the machine ended (default: 1)"
    )
    run.add_argument(
        "--against", metavar="BASE", help="perf: launch this commit in turns with its merge base with BASE"
    )
    run.add_argument(
        "--speed", choices=("short", "long"), default="long", help="perf: the rows of a pull request, or all (default)"
    )
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.set_defaults(call=_run)

    plan = commands.add_parser("plan", help="print what would run, what would be skipped and why, and stop")
    _selection(plan)
    _full(plan)
    plan.add_argument("--json", action="store_true", help="one JSON object")
    plan.add_argument("--docker", action="store_true", help="print a `docker run` a suite, to be pasted; ask no test")
    _container(plan)
    plan.set_defaults(call=_plan)

    doctor = commands.add_parser("doctor", help="would a run start here, and if not, what to do about it")
    doctor.add_argument(
        "--platform", default="auto", metavar="ID", help="auto, auto:rocm, auto:cuda or a platform's id (default: auto)"
    )
    _where(doctor)
    doctor.add_argument("--json", action="store_true", help="a JSON array, an object a check")
    doctor.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
    doctor.set_defaults(call=_doctor)

    _image(commands.add_parser("image", help="the images that runs in containers use"))

    gate = commands.add_parser("gate", help="judge evidence again, on any machine, without torch")
    gate.add_argument(
        "paths",
        type=Path,
        nargs="*",
        metavar="PATH",
        help="folders that `fp8ci run` has written; anybody's JUnit files",
    )
    gate.add_argument(
        "--expect", action="append", default=[], metavar="PLATFORM,...", help="platforms that must be there, and whole"
    )
    gate.add_argument(
        "--judge-with", type=Path, metavar="CHECKOUT", help="let another checkout judge: its harness and baselines"
    )
    gate.add_argument("--base", type=Path, metavar="DIR", help="evidence of the base commit: say what changed since")
    gate.add_argument("--whole", action="store_true", help="a run that selected less than must run is MISSING")
    gate.add_argument("--json", action="store_true", help="one JSON object")
    gate.add_argument("--current", action="store_true", help="judge with this checkout's baselines; say what differs")
    gate.add_argument("--root", type=Path, metavar="DIR", help="checkout for --current (default: the nearest one)")
    gate.set_defaults(call=_gate)

    diff = commands.add_parser("diff", help="what changed between two runs: conditions, tests and numbers")
    diff.add_argument("before", type=Path, metavar="DIR_A", help="folder that `fp8ci run` has written")
    diff.add_argument("after", type=Path, metavar="DIR_B", help="another one")
    diff.add_argument("--json", action="store_true", help="one JSON object")
    diff.set_defaults(call=_diff)

    history = commands.add_parser("history", help="how each speed row moved over several runs, and near which commit")
    history.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folders that `fp8ci run` has written")
    history.add_argument("--json", action="store_true", help="a JSON array, an object a row")
    history.set_defaults(call=_history)

    merge = commands.add_parser("merge", help="merge anybody's JUnit files into one that every reader reads the same")
    merge.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="JUnit files, malformed ones too")
    merge.add_argument("--out", type=Path, metavar="FILE", required=True, help="the merged file")
    merge.set_defaults(call=_merge)

    selftest = commands.add_parser(
        "selftest", help="make evidence wrong, and seed faults into copies of the tree; each must be seen"
    )
    selftest.add_argument(
        "--platform", default="auto", metavar="ID", help="auto, auto:rocm, auto:cuda or a platform's id (default: auto)"
    )
    selftest.add_argument(
        "--only", action="append", default=[], metavar="NAME,...", help="faults, of code or of evidence (default: all)"
    )
    selftest.add_argument(
        "--evidence", type=Path, metavar="DIR", help="green evidence to make wrong (default: made from the baselines)"
    )
    selftest.add_argument("--out", type=Path, metavar="DIR", help="keep the evidence of each fault in DIR/NAME")
    selftest.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
    selftest.add_argument("--json", action="store_true", help="one JSON object")
    selftest.add_argument("--quiet", action="store_true", help="no progress on stderr")
    selftest.set_defaults(call=_selftest)

    platforms = commands.add_parser("platforms", help="list the platforms")
    platforms.add_argument("--json", action="store_true", help="a JSON array")
    platforms.add_argument(
        "--matrix", metavar="ID,...", help="lines for $GITHUB_OUTPUT: a job of a matrix for each of these platforms"
    )
    platforms.set_defaults(call=_platforms)

    _baseline(commands.add_parser("baseline", help="record or check baselines"))

    _isa(commands.add_parser("isa", help="machine code of the kernels, compiled now, without a GPU"))

    explain = commands.add_parser("explain", help="what a verdict means and what to do about it")
    explain.add_argument("verdict", nargs="?", metavar="VERDICT", help="one of the verdicts; none lists them all")
    explain.set_defaults(call=_explain)
    return parser


def _where(parser: argparse.ArgumentParser) -> None:
    """Where tests run, and in which container."""
    parser.add_argument(
        "--in", dest="where", choices=PLACES, default=None, help="where tests run (default: FP8CI_IN, else local)"
    )
    _container(parser)


def _container(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of a container run (default: 1)")
    parser.add_argument(
        "--image", metavar="TAG", help="image of a container run (default: FP8CI_IMAGE, or the checkout's)"
    )


def _image(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="image_command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="build an image of this checkout, unless the engine has it")
    tag = commands.add_parser("tag", help="print what an image of this checkout is called")
    for command in (build, tag):
        command.add_argument("name", metavar="NAME", help="a row of docker/images.toml: cpu, rocm or cuda")
        command.add_argument("--base", metavar="IMAGE", help="in place of the base that the table names")
        command.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
        command.set_defaults(call=_images)
    build.add_argument("--wheels", type=Path, metavar="DIR", help="install from these wheels, and from no index")
    build.add_argument("--ca", type=Path, metavar="FILE", help="certificates that pip must trust while it builds")


def _selection(parser: argparse.ArgumentParser) -> None:
    """The options that say what is looked at: the same words for run, plan and record."""
    parser.add_argument(
        "--platform", default="auto", metavar="ID", help="auto, auto:rocm, auto:cuda or a platform's id (default: auto)"
    )
    parser.add_argument(
        "--suite", action="append", default=[], metavar="NAME,...", help="suites (default: those that must run)"
    )
    parser.add_argument(
        "--case", metavar="GLOB,...", help="only tests whose case id matches, such as 'rowwise*', or a whole test id"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")


def _full(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="every row of the suites, those of the night too")


def _baseline(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="baseline_command", required=True, metavar="COMMAND")
    record = commands.add_parser("record", help="run the suites (or take --from DIR) and write what they measured")
    propose = commands.add_parser("propose", help="the same, and print what would change; --write writes it")
    propose.add_argument("--write", action="store_true", help="write what is printed")
    for parser in (record, propose):
        _selection(parser)
        parser.add_argument("--runs", type=int, metavar="N", help="nudged runs of the loss suite (default: 5)")
        parser.add_argument("--manifest", action="store_true", help="write the ids that ran as those that must run")
        parser.add_argument(
            "--from",
            dest="sources",
            type=Path,
            action="append",
            default=[],
            metavar="DIR",
            help="take existing evidence",
        )
        parser.add_argument("--loosen", metavar="REASON", help="allow what makes the gate more tolerant; for LOG.md")
        parser.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="folder for the evidence of all runs (default: evidence/record-PLATFORM-TIME-ID-run-0)",
        )
        parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
        parser.set_defaults(call=_record)
    calibrate = commands.add_parser(
        "calibrate", help="run the perf suite several times on one commit: noise and smallest effect of each row"
    )
    calibrate.add_argument("--platform", default="auto", metavar="ID", help="auto or a platform's id (default: auto)")
    calibrate.add_argument("--case", metavar="GLOB,...", help="only these rows, also of existing evidence")
    calibrate.add_argument("--without", metavar="GLOB,...", help="not these rows, whatever the evidence says of them")
    calibrate.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
    calibrate.add_argument("--runs", type=int, metavar="N", help="runs of three launches each (default: 4)")
    calibrate.add_argument(
        "--from", dest="sources", type=Path, action="append", default=[], metavar="DIR", help="take existing evidence"
    )
    calibrate.add_argument("--loosen", metavar="REASON", help="allow wider limits; for LOG.md")
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the evidence of all runs (default: evidence/calibrate-PLATFORM-TIME-ID-run-N)",
    )
    calibrate.add_argument("--quiet", action="store_true", help="no progress on stderr")
    calibrate.set_defaults(call=_calibrate)
    lint = commands.add_parser("lint", help="check the baselines of a checkout against each other")
    lint.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
    lint.set_defaults(call=_lint)


def _isa(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="isa_command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="a kernel's hot loop and facts, or what changed in them since a revision")
    show.add_argument("kernel", metavar="KERNEL", help="a case of the codegen suite, or a glob such as 'rowwise*'")
    show.add_argument("--arch", required=True, metavar="ARCH", help="what to compile for: gfx942, gfx950, sm_90 ...")
    show.add_argument("--against", metavar="REVISION", help="show what changed since a git revision, compiled now too")
    show.add_argument("--json", action="store_true", help="a JSON array, an object a kernel")
    show.add_argument("--root", type=Path, metavar="DIR", help="checkout (default: the nearest one upwards)")
    show.set_defaults(call=_show)


# Commands ----------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from harness import gate
    from harness import run as running

    where = _place(options)
    ours = next((item for item in options.pytest_args if item.startswith("--fp8-")), None)
    if ours is not None:
        raise UsageError(f"{ours} is set by `fp8ci run` itself", "pytest's own options after --", "use --case or --out")
    if options.retries < 0:
        raise UsageError(f"--retries is {options.retries}", "0 or more", "correct it")
    root = _root(options.root)
    if options.speed == "short" and options.case is not None:
        raise UsageError("--speed short and --case exclude each other", "one of them", "both say which rows run")
    _alone(_suites(options.suite), options.pytest_args, options.against)
    if where == "docker":
        if options.against is not None:
            raise UsageError(
                "--against compares two working trees of this machine", "a run without --in docker",
                "start it in the container's image by hand, or leave --against out",
            )  # fmt: skip
        return _run_contained(options, root)
    platform, reason = _resolve(options.platform)
    if platform.vendor == "cpu" and "perf" in _suites(options.suite):
        raise InfraError(
            f"the platform is cpu ({reason}), and the perf suite measures on a GPU", "a GPU that torch sees",
            "run it on such a machine, or leave perf out",
        )  # fmt: skip
    request = _request(options, root, platform, reason)
    gate.check_files(root / "baselines", platform)
    if options.against is None:
        evidence = running.execute(request)
    else:
        from dataclasses import replace

        from harness import against

        with against.base(root, options.against) as environment:
            evidence = running.execute(replace(request, env_overrides={**request.env_overrides, **environment}))
    judgement, text = _report(evidence)
    _print(text)
    _say(f"evidence: {evidence}")
    return judgement.exit_code


def _request(options: argparse.Namespace, root: Path, platform: Platform, reason: str) -> RunRequest:
    """What `run` was asked for, on a platform that is known."""
    from harness import deaths
    from harness import run as running

    return running.RunRequest(
        root=root,
        platform=platform,
        platform_reason=reason,
        suites=_suites(options.suite),
        case=options.case,
        speed=options.speed,
        full=options.full,
        out=options.out,
        pytest_args=options.pytest_args,
        policy=options.policy or policy_of(os.environ),
        progress=not options.quiet,
        retries=options.retries,
        machine_failed=deaths.machine_failed,
    )


def _alone(suites: Sequence[str], pytest_args: Sequence[str], against: str | None) -> None:
    """What only the perf suite takes, and what it does not."""
    if "perf" in suites and any(item.startswith(("-n", "--numprocesses", "--dist")) for item in pytest_args):
        raise UsageError(
            "the perf suite runs in one process", "no -n, --numprocesses or --dist after --",
            "two processes on one device time each other; leave it out",
        )  # fmt: skip
    if against is not None and tuple(suites) != ("perf",):
        raise UsageError("--against is for the perf suite alone", "--suite perf", "run the other suites without it")


def _run_contained(options: argparse.Namespace, root: Path) -> int:
    """As `run`, each suite in a container. What keeps it from starting is one line, and starts nothing."""
    from dataclasses import replace

    from harness import contained, gate
    from harness import run as running

    suites = _suites(options.suite)
    with contained.opened(_asked(options, root, docker=True), max(1, len(suites) or 3), _say) as opened:
        request = replace(
            _request(options, root, opened.platform, opened.reason),
            place=opened.place,
            ask=opened.ask,
            told=opened.told,
        )
        gate.check_files(root / "baselines", opened.platform)
        evidence = running.execute(request, opened.executor)
    judgement, text = _report(evidence)
    _print(text)
    _say(f"evidence: {evidence}")
    return judgement.exit_code


def _report(evidence: Path) -> tuple[Judgement, str]:
    """Judge, write junit.xml, summary.md, the charts and report.html; returns the judgement and the summary's text."""
    from harness import gate, junit
    from harness.baselines import write_atomic
    from harness.report import losschart, page, roofline, summary

    run = gate.read_run(evidence)
    judgement = gate.judge(evidence)
    junit.write(judgement, run, evidence / "junit.xml")
    text = summary.render(judgement, run)
    write_atomic(evidence / "summary.md", text)
    charts = losschart.write(evidence, judgement, str(run["platform"]))
    charts += roofline.write(evidence, judgement, str(run["platform"]))
    page.write(evidence, judgement, run, text, charts)
    return judgement, text


def _plan(options: argparse.Namespace) -> int:
    from harness import plan
    from harness.local import LocalExecutor

    root = _root(options.root)
    if options.docker:
        from harness import contained

        asked = _asked(options, root, docker=True)
        for line in contained.run_lines(asked, _suites(options.suite), options.case, (), options.full):
            _print(line + "\n")
        return 0
    platform, reason = _resolve(options.platform)
    planned = plan.collect(
        root,
        platform,
        reason,
        suites=_suites(options.suite),
        case=options.case,
        full=options.full,
        executor=LocalExecutor(),
    )
    if options.json:
        entries = [{"id": e.id, "suite": e.suite, "fate": e.fate, "reason": e.reason} for e in planned.entries]
        whole = {"platform": platform.id, "reason": reason, "suites": list(planned.suites), "tests": entries}
        _print(json.dumps({**whole, "problems": list(planned.problems)}, indent=1) + "\n")
    else:
        counts = {fate: sum(e.fate == fate for e in planned.entries) for fate in ("run", "skip", "waived", "missing")}
        told = ", ".join(f"{count} {fate}" for fate, count in counts.items() if count or fate == "run")
        lines = [f"platform {platform.id} ({reason}); {planned.machine.reason}"]
        lines.append(f"suites {', '.join(planned.suites)}: {told}")
        for entry in planned.entries:
            lines.append(f"{entry.fate:8}{entry.id}{'  (' + entry.reason + ')' if entry.reason else ''}")
        lines += [f"problem {problem}" for problem in planned.problems]
        _print("\n".join(lines) + "\n")
    if options.case is not None and not planned.entries and not planned.problems:
        raise UsageError(f"no case matches {options.case!r}", "a glob such as 'rowwise*'", "plan without --case")
    return 0


def _gate(options: argparse.Namespace) -> int:
    from harness import gate
    from harness.report import summary

    expect = _names(options.expect, "--expect", "platform") if options.expect else ()
    if not options.paths and not expect:
        raise UsageError("the following arguments are required: PATH", "a folder or a file to judge", "see --help")
    alone = options.paths[0] if len(options.paths) == 1 and not expect else None
    if alone is None or alone.is_file():
        if options.current or options.base or (options.judge_with and not expect):
            raise UsageError("--current, --judge-with and --base take one folder", "one DIR", "judge them one by one")
        return _gate_several(options.paths, expect, options.whole, options.json, options.judge_with)
    run = gate.read_run(alone)
    if options.judge_with is not None:
        from harness import judged_with

        both = judged_with.judge(alone, options.judge_with)
        _print(json.dumps(both.as_dict()) + "\n" if options.json else both.text)
        return both.exit_code
    differences: tuple[str, ...] | None = None
    if options.current:
        judgement, differences = gate.against(alone, _root(options.root) / "baselines", options.whole)
    else:
        judgement = gate.judge(alone, whole=options.whole)
    text = summary.render(judgement, run)
    if options.json:
        _print(json.dumps({**judgement.as_dict(), "summary": text}) + "\n")
        return judgement.exit_code
    if options.base is not None:
        from harness import differences as since

        changed = since.between(options.base, alone).text.replace("\n## ", "\n### ")
        text += f"\n## Against the base commit\n\n{changed}"
    if differences is not None:
        told = [f"differs: {line}" for line in differences[:15]] or ["no verdict differs from the run's own files"]
        if len(differences) > 15:
            told.append(f"... and {len(differences) - 15} more")
        text += "\n## Judged with this checkout's baselines\n\n" + "\n".join(told) + "\n"
    _print(text)
    return judgement.exit_code


def _gate_several(
    paths: Sequence[Path], expect: Sequence[str], whole: bool, as_json: bool, judge_with: Path | None
) -> int:
    from harness import combine, judged_with
    from harness.report import summary

    judgement, pieces = combine.judge(paths, expect, whole)
    rows = [(str(piece.path), piece.label, piece.judgement) for piece in pieces]
    folders = [path for path in paths if judge_with is not None and (path / "run.json").is_file()]
    both = [judged_with.judge(path, judge_with) for path in folders if judge_with is not None]
    code = worst_exit([judgement.exit_code, *(each.exit_code for each in both)])
    if as_json:
        told = {**judgement.as_dict(), "exit_code": code, "judged_with": [each.as_dict() for each in both]}
        _print(json.dumps(told if judge_with is not None else judgement.as_dict()) + "\n")
    else:
        _print("\n".join([*(each.text for each in both), summary.render_several(judgement, rows)]))
    return code


def _diff(options: argparse.Namespace) -> int:
    from harness import differences

    found = differences.between(options.before, options.after)
    _print(json.dumps(found.as_dict(), indent=1) + "\n" if options.json else found.text)
    return 0


def _history(options: argparse.Namespace) -> int:
    from harness import history

    trends = history.of(options.folders)
    _print(json.dumps(history.as_dict(trends), indent=1) + "\n" if options.json else history.render(trends))
    return 0


def _merge(options: argparse.Namespace) -> int:
    from harness import junit_merge

    judgement, repairs = junit_merge.merge(options.paths, options.out)
    for repair in repairs:
        _say(repair)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in judgement.counts.items())
    _print(f"{options.out}: {len(judgement.results)} cases of {len(options.paths)} files: {counts}\n")
    # Whether tests are red is for the gate to say; whether the files could be read is said here.
    untrue = {Verdict.UNREADABLE, Verdict.DISAGREE, Verdict.MISSING}
    for result in judgement.results:
        if result.verdict in untrue and "/report::" in result.id:  # about a file as a whole
            _say(f"{result.verdict}: {result.message}")
    return worst_exit([0, *(result.exit_code for result in judgement.results if result.verdict in untrue)])


def _selftest(options: argparse.Namespace) -> int:
    from harness import selftest

    root = _root(options.root)
    platform, _ = _resolve(options.platform)
    names = _names(options.only, "--only", "fault")
    say: Callable[[str], None] = (lambda text: None) if options.quiet else _say
    evidence, faults = selftest.named(root, names)
    perturbed, power = (
        _perturbed(root, platform, evidence, options.evidence, say) if evidence or not names else ([], ())
    )
    tested = selftest.execute(root, platform, faults, options.out, say) if faults or not names else None
    tried = [outcome for outcome in perturbed if outcome.verdict is not Verdict.SKIP]
    codes = [VERDICTS[outcome.verdict].exit_code for outcome in tried] + ([tested.exit_code] if tested else [])
    if options.json:
        rows: dict[str, object] = {"platform": platform.id}
        rows |= tested.as_dict() if tested else {}
        rows["evidence"] = [{"name": o.name, "verdict": o.verdict, "message": o.message} for o in perturbed]
        rows["power"] = [{"case": p.case, "constant": p.constant, "growing": p.growing} for p in power]
        _print(json.dumps(rows, indent=1) + "\n")
        return worst_exit(codes)
    names_shown = [outcome.name for outcome in perturbed] + [o.fault.name for o in (tested.outcomes if tested else ())]
    width = max(map(len, names_shown), default=0)
    lines = [f"{o.name:{width}}  {'' if o.verdict is Verdict.PASS else f'{o.verdict}: '}{o.message}" for o in perturbed]
    if perturbed:
        seen = sum(outcome.verdict is Verdict.PASS for outcome in perturbed)
        lines.append(f"evidence made wrong: {seen}/{len(tried)} seen by the gate")
    lines += [row.text for row in power]
    if tested:
        lines += [f"{outcome.fault.name:{width}}  {selftest.told(outcome)}" for outcome in tested.outcomes]
        lines.append(f"detection power {tested.detected}/{tested.tried} in {tested.seconds:.0f} s")
    _print("\n".join(lines) + "\n")
    return worst_exit(codes)


def _perturbed(
    root: Path, platform: Platform, names: Sequence[str], evidence: Path | None, say: Callable[[str], None]
) -> tuple[list[Outcome], tuple[Power, ...]]:
    """Good evidence made wrong, in every way or those named, and how small a drift of each curve would be seen."""
    import tempfile

    from harness import perturb, power, rebuilt

    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fp8ci-perturb-") as folder:
        if evidence is None and not (root / "baselines" / platform.id / "manifest.txt").exists():
            say(f"{platform.id} has no manifest: no evidence to make wrong; name a folder with --evidence")
            return [], ()
        good = evidence or rebuilt.rebuild(root, platform, Path(folder) / "good")
        for outcome in perturb.execute(good, Path(folder), names):
            say(f"{outcome.name}: {outcome.verdict}: {outcome.message}")
            found.append(outcome)
    return found, power.of_platform(root, platform)


def _doctor(options: argparse.Namespace) -> int:
    from harness import doctor

    asked = _asked(options, _root(options.root), docker=_place(options) == "docker")
    checks = list(doctor.examine(asked))
    _print(
        json.dumps([check.as_dict() for check in checks], indent=1) + "\n" if options.json else doctor.render(checks)
    )
    return worst_exit([0, *(check.error.exit_code for check in checks if check.error is not None)])


def _images(options: argparse.Namespace) -> int:
    from harness import engine, images

    root = _root(options.root)
    image = images.get(root, options.name, options.base)
    if options.image_command == "build":
        for path, option in ((options.wheels, "--wheels"), (options.ca, "--ca")):
            if path is not None and not path.exists():
                raise UsageError(f"{option} {path} does not exist", "what the build can read", f"correct {option}")
        in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        client = None if in_ci and not image.row.pinned and options.base is None else engine.connect()
        built = images.build(client, root, image, wheels=options.wheels, certificates=options.ca, in_ci=in_ci, say=_say)
        _say(f"{image.tag}: {'built' if built else 'the engine has it already'} from {image.base}")
    _print(f"{image.tag}\n")
    return 0


def _platforms(options: argparse.Namespace) -> int:
    from harness.platforms import PLATFORMS, matrix

    if options.matrix is not None:
        _print("".join(f"{key}={value}\n" for key, value in matrix(options.matrix).items()))
        return 0
    if options.json:
        rows = [
            {
                "id": row.id,
                "vendor": row.vendor,
                "arch": row.arch,
                "image": row.image,
                "runner_labels": list(row.runner_labels),
                "suites": list(row.suites),
                "calibrated": list(row.calibrated),
                "codegen_archs": list(row.codegen_archs),
            }
            for row in PLATFORMS.values()
        ]
        _print(json.dumps(rows) + "\n")
        return 0
    for row in PLATFORMS.values():
        calibrated = ", ".join(row.calibrated) or "nothing yet"
        _print(f"{row.id:8}{row.arch:8}{', '.join(row.suites):32}calibrated: {calibrated}\n")
    return 0


def _runs_asked(options: argparse.Namespace, default: int, expected: str, why: str) -> int:
    """How many runs a recording takes, by --runs; UsageError beside --from, and below 1."""
    if options.sources and options.runs is not None:
        raise UsageError("--runs and --from exclude each other", "one of them", "--from takes runs that exist")
    runs: int = default if options.runs is None else options.runs
    if runs < 1:
        raise UsageError(f"--runs is {runs}", expected, why)
    return runs


def _one_platform(runs: Sequence[Mapping[str, Any]], asked: str) -> Platform:
    """The platform that all of these run.json are of; UsageError where --platform names another."""
    named = sorted({str(run["platform"]) for run in runs})
    if len(named) > 1:
        raise UsageError(f"the evidence is of {' and '.join(named)}", "one platform", "take them one by one")
    if not asked.startswith("auto") and asked != named[0]:
        raise UsageError(f"--platform is {asked} and the evidence is of {named[0]}", "one platform", "leave one out")
    platform, _ = _resolve(named[0])
    return platform


def _folders(options: argparse.Namespace, root: Path, platform: Platform, verb: str) -> Callable[[str], Path]:
    """Name of a run -> its evidence folder: in --out, else beside other runs, where `fp8ci gate evidence/*` takes it.

    What no gate takes as a run as configured (nudged runs, variants) lies inside run 0's folder then.
    """
    import datetime
    import secrets

    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    default = root / "evidence" / f"{verb}-{platform.id}-{stamp}-{secrets.token_hex(4)}"
    out: Path | None = options.out

    def folder(name: str) -> Path:
        if out is not None:
            return (out / name).absolute()
        return Path(f"{default}-{name}") if name.startswith("run-") else Path(f"{default}-run-0") / name

    return folder


def _executed(
    options: argparse.Namespace,
    root: Path,
    platform: Platform,
    reason: str,
    folder: Callable[[str], Path],
    planned: Sequence[Path] = (),
) -> Callable[[tuple[str, ...], Mapping[str, str], tuple[str, ...], str], Path]:
    """A function that runs suites for a recording, with an environment and pytest's arguments, into a named folder."""
    from harness import run as running

    beside = list(planned)

    def execute(chosen: tuple[str, ...], environment: Mapping[str, str], args: tuple[str, ...], name: str) -> Path:
        evidence = running.execute(
            running.RunRequest(
                root=root,
                platform=platform,
                platform_reason=reason,
                suites=chosen,
                case=options.case,
                out=folder(name),
                beside=tuple(beside),
                pytest_args=args,
                policy="pull-request",
                env_overrides=dict(environment),
                progress=not options.quiet,
            )
        )
        _report(evidence)
        beside.append(evidence)
        return evidence

    return execute


def _record(options: argparse.Namespace) -> int:
    from harness import gate, proposal, record
    from harness.platforms import select_suites

    root = _root(options.root)
    nudged = _runs_asked(
        options, record.DEFAULT_NUDGED_RUNS, "1 or more nudged runs", "a band is made from their spread"
    )
    if options.sources:
        runs = [gate.read_run(folder) for folder in options.sources]
        platform = _one_platform(runs, options.platform)
        for folder, run in zip(options.sources, runs, strict=True):
            if options.manifest and run.get("full"):
                raise UsageError(
                    f"{folder} is a run with --full, and what the manifest names every run must have",
                    "a run without --full", "leave --manifest out, or run again",
                )  # fmt: skip
            record.check(folder, nudged=_nudged(folder))
        sources = [record.Source(folder) for folder in options.sources]
        wanted = _suites(options.suite)
        suites = wanted or tuple(dict.fromkeys(suite for run in runs for suite in run["suites"]))
        complete = all(run.get("case") is None for run in runs)
    else:
        platform, reason = _resolve(options.platform)
        suites = select_suites(platform, _suites(options.suite))
        execute = _executed(options, root, platform, reason, _folders(options, root, platform, "record"))
        sources = record.run_all(platform, suites, nudged, execute, _say)
        complete = options.case is None
    recorded = record.changes(root, platform, sources, suites, complete, options.manifest)
    proposal.add_up(root, recorded)
    if options.baseline_command == "propose":
        _print(proposal.render(root, recorded))
        if not options.write:
            return 0
    for line in record.write(root, recorded, options.loosen):
        _print(line + "\n")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from harness import calibrate, gate, proposal, record
    from harness import run as running

    root = _root(options.root)
    runs = _runs_asked(options, calibrate.DEFAULT_RUNS, "1 or more", "noise needs five launches, two runs")
    selected = calibrate.Selected(options.case, options.without)
    if options.sources:
        platform = _one_platform([gate.read_run(folder) for folder in options.sources], options.platform)
        for folder in options.sources:
            calibrate.check(folder, selected)
        evidence = list(options.sources)
    else:
        platform, reason = _resolve(options.platform)
        if platform.vendor == "cpu":
            raise UsageError("speed is not measured on a CPU", "a platform with a GPU", "calibrate on such a machine")
        folder = _folders(options, root, platform, "calibrate")
        planned = [folder(f"run-{number}") for number in range(1, runs + 1)]
        calibrate.check_checkout(str(root), *running.checkout_state(root, planned))
        execute = _executed(options, root, platform, reason, folder, planned)
        evidence = calibrate.run_all(runs, lambda name: execute((calibrate.SUITE,), {}, (), name), _say, selected)
    change, known = calibrate.changes(root, platform, evidence, selected)
    proposal.add_up(root, [change])
    for line in record.write(root, [change], options.loosen):
        _print(line + "\n")
    for row in known:
        _print(row.told + "\n")
    return 0


def _nudged(evidence: Path) -> bool:
    """Whether a folder holds nudged runs, by its own loss files."""
    from harness import baselines

    return any(baselines.read_loss_evidence(path).nudge for path in sorted((evidence / "losses").glob("*.json")))


def _lint(options: argparse.Namespace) -> int:
    from harness import across, calibrate, record

    root = _root(options.root)
    problems = [*record.lint(root), *across.lint(root), *calibrate.lint(root)]
    for problem in problems:
        _print(problem + "\n")
    if not problems:
        _say("baselines hold together")
    return 1 if problems else 0


def _show(options: argparse.Namespace) -> int:
    from harness import listings
    from harness.report import isa

    root = _root(options.root)
    listings.check_arch(options.arch)
    commit = None if options.against is None else listings.revision(root, options.against)
    sides = [listings.compile_matching(root, root, options.kernel, options.arch)]
    if commit is not None:
        with listings.worktree(root, commit) as base:
            sides.append(listings.compile_matching(root, base, options.kernel, options.arch))
    listings.check_matched(options.kernel, options.arch, sides)
    before = None if commit is None else sides[1].kernels
    _print(isa.report(sides[0].kernels, before, options.against, plain_data=options.json))
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.verdict is None:
        for verdict, rule in VERDICTS.items():
            _print(f"{verdict:16}exit {rule.exit_code:<5}{rule.meaning}\n")
        return 0
    name = options.verdict.upper().replace("-", "_")
    if name not in Verdict.__members__:
        raise UsageError(f"there is no verdict {options.verdict!r}", f"one of {', '.join(Verdict)}", "")
    rule = VERDICTS[Verdict(name)]
    lines = [
        f"{name}: {rule.meaning}.",
        f"Exit code {rule.exit_code}: {EXIT_MEANINGS[rule.exit_code]}.",
        f"In JUnit: {'no result element' if rule.junit == 'none' else rule.junit}.",
    ]
    if rule.stricter:
        lines.append(f"{rule.stricter_when.capitalize()}: exit code {rule.stricter[0]}, {rule.stricter[1]} in JUnit.")
    lines.append(f"Next: {rule.advice}.")
    _print("\n".join(textwrap.fill(line, 100) for line in lines) + "\n")
    return 0


# What the commands share -------------------------------------------------------------------------------------------


def policy_of(environment: Mapping[str, str]) -> str:
    """`main` for a push to the main branch on GitHub Actions, `pull-request` for everything else."""
    on_main = environment.get("GITHUB_REF") in ("refs/heads/main", "refs/heads/master")
    if on_main and environment.get("GITHUB_EVENT_NAME") in ("push", "schedule", "workflow_dispatch"):
        return "main"
    return "pull-request"


def _place(options: argparse.Namespace) -> str:
    """Where a run takes place. The variable wins: what runs in a container must not start another one."""
    where = os.environ.get("FP8CI_IN") or options.where or "local"
    if where not in PLACES:
        raise UsageError(f"FP8CI_IN is {where!r}", " or ".join(PLACES), "correct it, or leave it unset")
    return where


def _asked(options: argparse.Namespace, root: Path, *, docker: bool) -> Asked:
    from harness import doctor

    doctor.check_gpus(options.gpus)
    image = options.image or os.environ.get("FP8CI_IMAGE") or None
    return doctor.Asked(root, options.platform, docker, options.gpus, image, getattr(options, "out", None))


def _suites(given: Sequence[str]) -> tuple[str, ...]:
    """`--suite a,b --suite c` -> (a, b, c); an empty word is an error, not `all suites`."""
    return _names(given, "--suite", "suite")


def _names(given: Sequence[str], option: str, what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for text in given for name in text.split(","))
    if any(not name for name in names):
        raise UsageError(f"{option} names an empty {what}", "names separated by commas", f"correct {option}")
    return names


def _root(given: Path | None) -> Path:
    from harness import plan

    if given is not None:
        plan.check_root(given)
        return given.absolute()
    return plan.find_root(Path.cwd())


def _resolve(spec: str) -> tuple[Platform, str]:
    from harness import platforms

    return platforms.resolve(spec)


def _print(text: str) -> None:
    """Data. A terminal that cannot show a character gets its escape instead of a traceback.

    A reader that has gone (`fp8ci gate DIR | head`), a closed or full stdout change no verdict: the exit code says it.
    """
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = _nowhere()
        if not isinstance(error, BrokenPipeError):
            _say(f"fp8ci: stdout cannot be written ({error.strerror})")


def _say(text: str) -> None:
    """Talk. Nobody listening is no error."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = _nowhere()


def _nowhere() -> TextIO:
    """In place of a stream that broke, since Python writes what the old one still holds when it exits."""
    return open(os.devnull, "w", encoding="utf-8")
