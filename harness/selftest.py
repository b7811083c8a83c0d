"""`fp8ci selftest`: does the gate go red for the faults it exists for? Each is seeded, and must be seen by name.

A check that no fault has ever failed proves nothing. suites/mutations/ holds faults as patches, most of them from
public bug reports, and faults.toml says of each which tests must see it:

    [[fault]]
    name = "maximum-448"                       # suites/mutations/maximum-448.patch
    claim = "amax 240 has scale 1 in e4m3fnuz" # what the product promises and the fault breaks
    archs = ["gfx942"]                         # where a product with the fault would be wrong
    red = ["numerics/test_rowwise::test_maximum_row[rowwise-e4m3fnuz-bf16-maximum-row]"]
    requires = ["arch:sm_90"]                  # what a machine must have to see it; default: a CPU
    layer = "digests"                          # the layer of the loss gate that its loss tests, if any, must name

The tests that any fault names run together on an unchanged copy of the tree and must pass. Then each patch is applied
to a copy of its own, the tests that it names run there as `fp8ci run --case ID,...` runs them, and the gate judges the
evidence. The fault is detected if the gate gives each of them FAIL, for an assertion that does not hold. Everything
else is red:

- a patch that no longer applies, and a fault that leaves a named test green: the suite, or the list, has aged;
- a named test that raises something else, is skipped, missing, killed or late: it would be red for any reason at all.

The checkout is never touched: all of it happens in temporary folders, which go however the command ends.

Not here: which faults there are (suites/mutations), verdicts (gate.py).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from harness import capabilities, gate, junit, manifest, perturb, plan, platforms, run
from harness.errors import VERDICTS, ConfigError, HarnessError, InfraError, UsageError, Verdict, worst_exit
from harness.executor import Command, Ended, Executor
from harness.forked import ForkedExecutor
from harness.platforms import Platform
from harness.result import Result

FOLDER = Path("suites", "mutations")
TABLE = "faults.toml"

COPIED = ("fp8stack", "harness", "suites", "baselines", "docker", "pyproject.toml")
"""What of a checkout its suites need."""

MOST_WORKERS = 8
"""Trees that are tested side by side. Each has processes with torch in them: half a gigabyte."""

LOSS = "loss"

DEADLINE = 120.0
"""Seconds for the named tests of one fault, which take a few: some faults make a kernel loop for ever."""

SLOW_IMPORTS = ("torch", "torch._inductor.config", "triton.language", "numpy", "pytest")
"""What test processes are forked with (forked.py): seconds each."""

#: How the message of a test begins that raised something else than an assertion: with the exception's own name.
_RAISED = re.compile(r"(?!\S*OpCheckError)(?:\w+\.)*[A-Z]\w+(?:: |$)")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the table. `red` holds exact test ids, `requires` requirements as in a mark (capabilities.py).

    `layer` is the word that the message of each test of the loss suite must begin with: the layer that fired first.
    """

    name: str
    claim: str
    archs: tuple[str, ...]
    red: tuple[str, ...]
    requires: tuple[str, ...] = ("vendor:cpu",)
    layer: str = ""

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites of its tests."""
        return tuple(dict.fromkeys(test_id.partition("/")[0] for test_id in self.red))


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault]


def patch_of(root: Path, name: str) -> Path:
    """The patch of a fault, by its name."""
    return root / FOLDER / f"{name}.patch"


def load(root: Path) -> tuple[Fault, ...]:
    """The faults of a checkout, in the table's order.

    ConfigError for anything that the table may not hold: an unknown field, what is no test id or requirement, a test
    that is named twice, an arch that no platform has; for a row without its patch and a patch without its row.
    """
    path = root / FOLDER / TABLE
    try:
        faults = tuple(msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Table).fault)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "a UTF-8 TOML file", "restore it from git") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML ({error})", "[[fault]] tables", "correct it") from error
    except msgspec.ValidationError as error:
        wanted = "name, claim, archs, red, perhaps requires and layer"
        raise ConfigError(f"{path}: {error}", wanted, "correct the entry") from error
    for fault in faults:
        _check(path, fault)
    names = [fault.name for fault in faults]
    patches = sorted(item.stem for item in path.parent.glob("*.patch"))
    if sorted(names) != patches:
        odd = sorted(set(names) ^ set(patches)) or sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"{path} and the patches beside it differ in {', '.join(odd)}", "one row a patch", "add it")
    return faults


def _check(path: Path, fault: Fault) -> None:
    """ConfigError when a row that has the right fields has wrong values."""
    where = f"{path}: {fault.name}"
    if not fault.claim.strip():
        raise ConfigError(f"{where} has an empty claim", "what the fault breaks", "fill it in")
    if not fault.red or len(set(fault.red)) < len(fault.red):
        raise ConfigError(f"{where} names {'a test twice' if fault.red else 'no test'}", "the tests that see it", "")
    for test_id in fault.red:
        manifest.parse(test_id)
    known = {platform.arch for platform in platforms.PLATFORMS.values()}
    if not fault.archs or not set(fault.archs) <= known:
        raise ConfigError(f"{where} has archs {list(fault.archs)}", f"some of {', '.join(sorted(known))}", "correct it")
    capabilities.parse(*fault.requires)
    if bool(fault.layer) != (LOSS in fault.suites):
        what = "names a test of the loss suite and no layer" if not fault.layer else "has a layer and no test of it"
        raise ConfigError(f"{where} {what}", "a layer where `red` has a loss test, and only there", "correct it")


@dataclass(frozen=True)
class Seen:
    """What became of one named test."""

    id: str
    verdict: Verdict
    message: str

    @property
    def passed(self) -> bool:
        """Whether the test saw nothing."""
        return self.verdict in (Verdict.PASS, Verdict.IMPROVED)

    @property
    def asserted(self) -> bool:
        """Whether an assertion of the test failed, and nothing else went wrong."""
        return self.verdict is Verdict.FAIL and not _RAISED.match(self.message.removeprefix("setup: "))


@dataclass(frozen=True)
class Outcome:
    """Whether a fault was detected.

    `verdict`: PASS when it was, SKIP when this machine cannot see it, FAIL when a named test did not see it or the
    patch does not apply, else that of what stood in the way. `message` says why it is not PASS.
    """

    fault: Fault
    verdict: Verdict
    message: str = ""
    seen: tuple[Seen, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class SelfTest:
    """All outcomes, in the table's order."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def tried(self) -> int:
        """How many faults this machine can see."""
        return sum(outcome.verdict is not Verdict.SKIP for outcome in self.outcomes)

    @property
    def detected(self) -> int:
        """How many of those were seen by every test that must see them."""
        return sum(outcome.verdict is Verdict.PASS for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """The worst of all outcomes. Nothing tried is not success."""
        verdicts = [outcome.verdict for outcome in self.outcomes if outcome.verdict is not Verdict.SKIP]
        return worst_exit(VERDICTS[verdict].exit_code for verdict in verdicts)

    def as_dict(self) -> dict[str, object]:
        """Plain data."""
        counts = {"detected": self.detected, "tried": self.tried, "seconds": round(self.seconds, 3)}
        return {**counts, "faults": [_row(outcome) for outcome in self.outcomes]}


def _row(outcome: Outcome) -> dict[str, object]:
    tests = [{"id": seen.id, "verdict": seen.verdict, "message": seen.message} for seen in outcome.seen]
    fault = {"name": outcome.fault.name, "claim": outcome.fault.claim, "archs": outcome.fault.archs}
    said = {"verdict": outcome.verdict, "message": outcome.message, "seconds": round(outcome.seconds, 3)}
    return {**fault, **said, "tests": tests}


def execute(
    root: Path,
    platform: Platform,
    only: Sequence[str] = (),
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    pytest_args: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> SelfTest:
    """Seed the faults of a checkout, all or `only` those named, as many side by side as there are cores.

    `out` keeps the evidence of every run, a folder a fault. `say` gets a line for each fault that has been tried.
    SIGINT, SIGTERM and SIGHUP stop the test processes; what has not been tried by then is INTERRUPTED.

    ConfigError for the table (`load`), UsageError for a fault that it does not have, InfraError where git is missing.
    """
    plan.check_root(root)
    faults = load(root)
    known = {fault.name for fault in faults}
    for name in only:
        if name not in known:
            raise _unknown(name, known)
    if shutil.which("git") is None:
        raise InfraError("git is not on the PATH", "git, which applies the patches", "install it")
    started = time.monotonic()
    chosen = [fault for fault in faults if not only or fault.name in only]
    machine = capabilities.probe(platform)
    outcomes = {
        fault.name: Outcome(fault, Verdict.SKIP, reason) for fault in chosen if (reason := _lacks(fault, machine))
    }
    tried = [fault for fault in chosen if fault.name not in outcomes]
    cores = min(plan.usable_cores(), MOST_WORKERS)
    with (
        contextlib.closing(ForkedExecutor(SLOW_IMPORTS)) as executor,
        tempfile.TemporaryDirectory(prefix="fp8ci-selftest-") as folder,
        run.stop_signals() as stopped,
        ThreadPoolExecutor(cores) as pool,  # all runs are in threads, where they leave the signals to us
    ):
        bench = _Bench(root, platform, Path(folder), out, _Stoppable(executor, stopped), pytest_args, environment or {})
        ids = sorted({test_id for fault in tried for test_id in fault.red})
        parts = [ids[first::cores] for first in range(min(cores, len(ids)))]
        unsound = {seen.id: seen for found in pool.map(bench.unsound, parts, range(cores)) for seen in found}
        for number, outcome in enumerate(pool.map(partial(bench.seed, unsound=unsound), tried), start=1):
            outcomes[outcome.fault.name] = outcome
            say(f"{number}/{len(tried)} {outcome.fault.name}: {told(outcome)}")
    return SelfTest(tuple(outcomes[fault.name] for fault in chosen), time.monotonic() - started)


def named(root: Path, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of `--only`, parted: ways to make evidence wrong, and faults of code. One that is both is in both.

    A checkout without faults of code has evidence all the same. ConfigError as `load`.
    """
    faults = {fault.name for fault in load(root)} if names and (root / FOLDER / TABLE).exists() else set()
    evidence = {row.name for row in perturb.PERTURBATIONS}
    wrong = tuple(name for name in names if name in evidence)
    return wrong, tuple(name for name in names if name in faults or name not in evidence)


def _unknown(name: str, faults: Iterable[str]) -> UsageError:
    """The error for a name that is none: those like it, and where the others are."""
    evidence = [row.name for row in perturb.PERTURBATIONS]
    like = difflib.get_close_matches(name, sorted({*faults, *evidence}), n=5)
    expected = f"names such as {', '.join(like)}" if like else "a name of the self-test"
    where = f"suites/mutations/faults.toml has those of code; of evidence: {', '.join(evidence)}"
    return UsageError(f"there is no fault {name!r}", expected, where)


def _lacks(fault: Fault, machine: capabilities.Capabilities) -> str:
    """Why this machine cannot see a fault, or nothing when it can."""
    for suite in fault.suites:
        if (machine.vendor, suite) not in platforms.EXECUTION:
            return f"its tests are of suite {suite}, which does not run on {machine.platform}"
    decision = capabilities.decide(capabilities.parse(*fault.requires), machine)
    return decision.reason if isinstance(decision, capabilities.Skip) else ""


@dataclass(frozen=True)
class _Bench:
    """Where faults are seeded: `folder` holds an unchanged copy of the tree, and one a fault while it is tried."""

    root: Path
    platform: Platform
    folder: Path
    out: Path | None
    executor: _Stoppable
    pytest_args: tuple[str, ...]
    environment: Mapping[str, str]

    def unsound(self, ids: Sequence[str], part: int) -> tuple[Seen, ...]:
        """Those of some tests that do not pass without any fault."""
        return tuple(seen for seen in self._run(self._copy(f"unchanged-{part}"), ids) if not seen.passed)

    def seed(self, fault: Fault, unsound: Mapping[str, Seen]) -> Outcome:
        """Apply the patch to a copy of its own, run the named tests there, and say what they saw."""
        started = time.monotonic()
        if self.executor.stopped.is_set():
            return Outcome(fault, Verdict.INTERRUPTED, "stopped before it was tried")
        for test_id in fault.red:
            if test_id in unsound:
                seen = unsound[test_id]
                why = f"{test_id} must pass without the fault, and is {seen.verdict}: {seen.message}"
                return Outcome(fault, _blocking(seen.verdict), why, (seen,))
        tree = self._copy(fault.name)
        try:
            refused = apply(patch_of(self.root, fault.name), tree)
            if refused:
                return Outcome(fault, Verdict.FAIL, f"the patch no longer applies: {refused}")
            found = self._run(tree, fault.red, DEADLINE)
        except HarnessError as error:
            return Outcome(fault, error.verdict, str(error), seconds=time.monotonic() - started)
        finally:
            shutil.rmtree(tree, ignore_errors=True)
        verdict, message = _verdict(found, fault.layer)
        if self.executor.stopped.is_set() and verdict is not Verdict.PASS:
            verdict, message = Verdict.INTERRUPTED, "stopped while it was tried"
        return Outcome(fault, verdict, message, found, time.monotonic() - started)

    def _copy(self, name: str) -> Path:
        tree = self.folder / "trees" / name
        tree.mkdir(parents=True)
        for part in COPIED:
            source = self.root / part
            if source.is_dir():
                shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, tree / part)
        return tree

    def _run(self, tree: Path, ids: Sequence[str], deadline: float | None = None) -> tuple[Seen, ...]:
        """What the gate says of tests in a tree, from the evidence of a run that selects exactly these."""
        request = run.RunRequest(
            root=tree,
            platform=self.platform,
            platform_reason="named by the self-test",
            suites=tuple(dict.fromkeys(test_id.partition("/")[0] for test_id in ids)),
            case=",".join(ids),
            out=(self.out or self.folder / "evidence") / tree.name,
            pytest_args=self.pytest_args,
            env_overrides=self.environment,
            progress=False,
            deadline=deadline,
            cores=1,
        )
        evidence = run.execute(request, self.executor)
        judgement = gate.judge(evidence)
        junit.write(judgement, gate.read_run(evidence), evidence / "junit.xml")
        found = {result.id: result for result in judgement.results}
        lost = Result("", "", Verdict.MISSING, "neither collected nor in the manifest")
        results = [(test_id, found.get(test_id, lost)) for test_id in ids]
        return tuple(Seen(test_id, result.verdict, result.message) for test_id, result in results)


@dataclass(frozen=True)
class _Stoppable:
    """Runs commands until `stopped`: a run that is not in the main thread sees no signal itself."""

    executor: Executor
    stopped: threading.Event

    def run(
        self, command: Command, *, cancelled: threading.Event, on_output: Callable[[str], None] | None = None
    ) -> Ended:
        """As `Executor.run` says."""
        return self.executor.run(command, cancelled=self.stopped, on_output=on_output)


def apply(patch: Path, tree: Path, check: bool = False) -> str:
    """Apply a patch to a tree, or only `check` that it would; returns why it does not apply, or nothing.

    InfraError when git does not answer.
    """
    # git must take the tree for no part of a repository that lies around it, or it skips what is outside of that.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    argv = ["git", "apply", "--whitespace=nowarn", *(["--check"] if check else []), str(patch.resolve())]
    try:
        done = subprocess.run(argv, cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfraError(f"git does not apply {patch.name} ({error})", "git on the PATH", "install it") from error
    lines = [line.removeprefix("error: ") for line in done.stderr.splitlines()] or [f"exit {done.returncode}"]
    return lines[0] if done.returncode else ""


def _verdict(seen: Sequence[Seen], layer: str = "") -> tuple[Verdict, str]:
    """PASS when every named test failed by its assertion, those of the loss suite at `layer`; else what went wrong."""
    green = [item.id for item in seen if item.passed]
    if green:
        return Verdict.FAIL, f"not seen by {', '.join(green)}"
    other = [item for item in seen if not item.asserted]
    if not other:
        elsewhere = [s for s in seen if s.id.startswith(f"{LOSS}/") and not s.message.startswith(f"{layer}: ")]
        if elsewhere:
            return Verdict.FAIL, f"seen by {elsewhere[0].id}, not at layer {layer}: {elsewhere[0].message}"
        return Verdict.PASS, ""
    worst = min(other, key=lambda item: VERDICTS[item.verdict].rank)
    return _blocking(worst.verdict), f"{worst.id} did not fail by an assertion: {worst.verdict}: {worst.message}"


def _blocking(verdict: Verdict) -> Verdict:
    """The verdict of a test that kept a fault from being tried; MISSING for one that is not red: it said nothing."""
    return verdict if VERDICTS[verdict].exit_code else Verdict.MISSING


def told(outcome: Outcome) -> str:
    """Who saw the fault, or why nobody did, on one line."""
    first, more = outcome.fault.red[0], len(outcome.fault.red) - 1
    if outcome.verdict is Verdict.PASS:
        return f"seen by {first}{f' and {more} more' if more else ''}"
    return f"{'not tried' if outcome.verdict is Verdict.SKIP else outcome.verdict}: {outcome.message}"
