"""Every verdict and every error kind of the harness, in one table: exit code, JUnit element, severity, meaning, advice.

A CI harness in this field mostly fails by reading *absence* as success. The cure starts here: a verdict that is not in
`VERDICTS` cannot be given, a verdict has exactly one exit code, and the process exits with the worst one in the fixed
order 2, 3, 1, 5, 4 (our own misuse first, then evidence that is missing or contradicts itself, then red tests, then
baselines, then the machine). 130 stands apart: a person or the CI stopped the run.

Two verdicts depend on more than themselves, and the table says so beside them: IMPROVED is red on the main branch
(`on main`), INCONCLUSIVE is red once it covers more than its suite's budget (`beyond budget`).

Not here: who gives which verdict (gate.py), how one is written (junit.py, report/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

JUnitElement = Literal["none", "skipped", "failure", "error"]


class Verdict(StrEnum):
    """What is said about one test (or about a whole suite, when there is no test to say it of)."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    SKIP = "SKIP"
    WAIVED = "WAIVED"
    UNCALIBRATED = "UNCALIBRATED"
    UNMEASURABLE = "UNMEASURABLE"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    REGRESSION = "REGRESSION"
    IMPLAUSIBLE = "IMPLAUSIBLE"
    FLAKY = "FLAKY"
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"
    OOM = "OOM"
    WAIVER_EXPIRED = "WAIVER_EXPIRED"
    WAIVER_UNUSED = "WAIVER_UNUSED"
    USAGE = "USAGE"
    CONFIG = "CONFIG"
    MISSING = "MISSING"
    KILLED = "KILLED"
    DISAGREE = "DISAGREE"
    UNREADABLE = "UNREADABLE"
    HOST_OOM = "HOST_OOM"
    GPU_HANG = "GPU_HANG"
    DISK = "DISK"
    SHM = "SHM"
    PIDS = "PIDS"
    DIRTY_GPU = "DIRTY_GPU"
    PULL = "PULL"
    INFRA = "INFRA"
    NO_BASELINE = "NO_BASELINE"
    STALE_BASELINE = "STALE_BASELINE"
    INTERRUPTED = "INTERRUPTED"


@dataclass(frozen=True)
class Rule:
    """What a verdict means to the process, to JUnit and to the person who reads it.

    `rank` orders findings: 0 is the worst, so sorting by rank ascending lists worst first. Ranks follow `EXIT_ORDER`.
    `stricter` is (exit code, JUnit element) where the circumstance named in `stricter_when` holds.
    """

    exit_code: int
    junit: JUnitElement
    rank: int
    meaning: str
    advice: str
    stricter: tuple[int, JUnitElement] | None = None
    stricter_when: str = ""


SUCCESS = 0
FAILED = 1
USAGE = 2
EVIDENCE = 3
MACHINE = 4
BASELINE = 5
INTERRUPTED = 130

EXIT_ORDER: tuple[int, ...] = (USAGE, EVIDENCE, FAILED, BASELINE, MACHINE)
"""The process exits with the first of these that any finding has; 130 comes before all of them, 0 after."""

EXIT_MEANINGS: dict[int, str] = {
    SUCCESS: "every test that must run here ran and none is red",
    FAILED: "a test is red: wrong numbers, worse machine code, a loss outside its band, a crash or a time-out",
    USAGE: "the command or a configuration file is wrong; nothing was judged",
    EVIDENCE: "evidence is missing, unreadable or contradicts itself",
    MACHINE: "the machine failed, not the code; may be retried",
    BASELINE: "there is no usable baseline to judge against",
    INTERRUPTED: "the run was stopped before it ended",
}

_N: JUnitElement = "none"
_S: JUnitElement = "skipped"
_F: JUnitElement = "failure"
_E: JUnitElement = "error"

# Worst first: a row's position is its rank.
_ROWS: tuple[tuple[Verdict, int, JUnitElement, str, str], ...] = (
    (Verdict.INTERRUPTED, INTERRUPTED, _E, "stopped by Ctrl-C or a cancelled job", "run again"),
    (Verdict.USAGE, USAGE, _E, "the command cannot be carried out as given", "correct the command"),
    (Verdict.CONFIG, USAGE, _E, "a configuration file cannot be used", "correct the named file"),
    (
        Verdict.UNREADABLE,
        EVIDENCE,
        _E,
        "a piece of evidence cannot be read",
        "look at the named file; if a process died while writing it, run again",
    ),
    (
        Verdict.DISAGREE,
        EVIDENCE,
        _E,
        "exit code, journal and JUnit do not tell the same story",
        "read logs/<suite>.log: something ended the test process outside pytest's control",
    ),
    (
        Verdict.KILLED,
        EVIDENCE,
        _E,
        "the test process was killed from outside while this test ran",
        "look for the killer (kernel OOM log, operator, CI agent), then run again",
    ),
    (
        Verdict.MISSING,
        EVIDENCE,
        _E,
        "this test must run here and did not",
        "restore the test; if it was meant to go, `fp8ci baseline record --manifest --loosen REASON`",
    ),
    (
        Verdict.IMPLAUSIBLE,
        FAILED,
        _F,
        "a measurement is better than the hardware can be",
        "the timing or the kernel skips work: check synchronisation and outputs",
    ),
    (Verdict.FAIL, FAILED, _F, "the test's assertion does not hold", "the message names the first difference"),
    (
        Verdict.CRASH,
        FAILED,
        _F,
        "the test ended its process: a signal it raised, or its own exit",
        "read logs/<suite>.log and repeat with `--case` to get a core dump or a debugger on it",
    ),
    (
        Verdict.TIMEOUT,
        FAILED,
        _F,
        "the test did not end within its deadline",
        "the log holds the stack of every thread",
    ),
    (Verdict.OOM, FAILED, _F, "the test asked for more memory than its run may have", "reduce the case or its workers"),
    (
        Verdict.REGRESSION,
        FAILED,
        _F,
        "worse than the baseline by more than its band: slower, other loss, worse machine code",
        "fix it, or record a new baseline with `fp8ci baseline record` and say why in the change",
    ),
    (Verdict.FLAKY, FAILED, _F, "attempts of one run ended differently", "find the nondeterminism; a retry hides it"),
    (
        Verdict.WAIVER_EXPIRED,
        FAILED,
        _F,
        "the waiver for this test is past its date",
        "fix the test, or renew the entry in baselines/waivers.toml with a reason",
    ),
    (
        Verdict.WAIVER_UNUSED,
        FAILED,
        _F,
        "a waiver covers a test that passes or no longer exists",
        "delete the entry from baselines/waivers.toml",
    ),
    (
        Verdict.NO_BASELINE,
        BASELINE,
        _E,
        "the platform is calibrated for this suite and this row has no baseline",
        "`fp8ci baseline record --platform PLATFORM --suite SUITE` (of speed: `calibrate`) on a good commit",
    ),
    (
        Verdict.STALE_BASELINE,
        BASELINE,
        _E,
        "the baseline was recorded under conditions that matter and differ",
        "record (of speed: `calibrate`) again under the present conditions; the message names the key that differs",
    ),
    (Verdict.GPU_HANG, MACHINE, _E, "the GPU does not answer, nor does a known-good kernel", "take the runner offline"),
    (Verdict.HOST_OOM, MACHINE, _E, "the host ran out of memory", "free the host; lower the run's memory limit"),
    (Verdict.DISK, MACHINE, _E, "no space left on a disk that the run writes to", "free space and run again"),
    (Verdict.SHM, MACHINE, _E, "/dev/shm is full or too small", "give the container a larger --shm-size"),
    (Verdict.PIDS, MACHINE, _E, "no more processes may be started", "raise the pids limit of the container"),
    (Verdict.DIRTY_GPU, MACHINE, _E, "somebody else uses the GPU", "stop the listed processes or take another GPU"),
    (Verdict.PULL, MACHINE, _E, "the image could not be pulled", "check the registry and run again"),
    (Verdict.INFRA, MACHINE, _E, "the machine failed in another way", "read the log; run again on another runner"),
    (
        Verdict.IMPROVED,
        SUCCESS,
        _N,
        "better than the baseline by more than its band",
        "commit the printed baseline patch, so that the gain is kept",
    ),
    (Verdict.INCONCLUSIVE, SUCCESS, _S, "too noisy to judge", "quieten the machine; see the clocks in the report"),
    (Verdict.UNMEASURABLE, SUCCESS, _S, "too short for the timer to measure", "time a larger case"),
    (
        Verdict.UNCALIBRATED,
        SUCCESS,
        _S,
        "no baseline, and the platform declares none for this suite: not judged, not a pass",
        "`fp8ci baseline record` (of speed: `calibrate`) there, then declare it calibrated in harness/platforms.py",
    ),
    (Verdict.WAIVED, SUCCESS, _S, "red, and covered by a waiver in force", "see the waiver's issue"),
    (Verdict.SKIP, SUCCESS, _S, "this machine lacks what the test requires", "the reason says what it requires"),
    (Verdict.PASS, SUCCESS, _N, "ran and held", "nothing to do"),
)

_STRICTER: dict[Verdict, tuple[int, JUnitElement, str]] = {
    Verdict.IMPROVED: (FAILED, _F, "on main"),
    Verdict.INCONCLUSIVE: (EVIDENCE, _E, "beyond budget"),
}


def _rule(position: int, row: tuple[Verdict, int, JUnitElement, str, str]) -> Rule:
    verdict, exit_code, junit, meaning, advice = row
    extra = _STRICTER.get(verdict)
    if extra is None:
        return Rule(exit_code, junit, position, meaning, advice)
    return Rule(exit_code, junit, position, meaning, advice, stricter=extra[:2], stricter_when=extra[2])


VERDICTS: dict[Verdict, Rule] = {row[0]: _rule(position, row) for position, row in enumerate(_ROWS)}
assert len(_ROWS) == len(VERDICTS) == len(Verdict), "every verdict has exactly one row"


def worst_exit(codes: Iterable[int]) -> int:
    """The exit code of a process whose findings have `codes`: 130 first, then `EXIT_ORDER`, 0 only if all are 0.

    No codes at all means that nothing was judged, which is not success: 3. ValueError for a code the table lacks.
    """
    present = set(codes)
    unknown = present - EXIT_MEANINGS.keys()
    if unknown:
        raise ValueError(f"exit codes {sorted(unknown)} are not in the table; expected some of {sorted(EXIT_MEANINGS)}")
    if not present:
        return EVIDENCE
    return next((code for code in (INTERRUPTED, *EXIT_ORDER) if code in present), SUCCESS)


class HarnessError(Exception):
    """An error the harness reports in one line and ends with: what happened, what was expected, what to do next."""

    verdict: ClassVar[Verdict] = Verdict.INFRA

    def __init__(self, what: str, expected: str = "", next_step: str = "") -> None:
        self.what = what
        self.expected = expected
        self.next_step = next_step
        parts = [what, f"expected {expected}" if expected else "", next_step]
        super().__init__("; ".join(part for part in parts if part))

    @property
    def exit_code(self) -> int:
        """The exit code of this kind of error, from `VERDICTS`."""
        return VERDICTS[self.verdict].exit_code


class UsageError(HarnessError):
    """The command line is wrong, or names something that does not exist."""

    verdict = Verdict.USAGE


class ConfigError(HarnessError):
    """A file that people write (ledger, manifest, baseline, images) cannot be used."""

    verdict = Verdict.CONFIG


class UnreadableError(HarnessError):
    """A file that a run wrote cannot be read."""

    verdict = Verdict.UNREADABLE


class MissingError(HarnessError):
    """Something that a run must have produced is not there."""

    verdict = Verdict.MISSING


class NoBaselineError(HarnessError):
    """A baseline that must exist does not."""

    verdict = Verdict.NO_BASELINE


class StaleBaselineError(HarnessError):
    """A baseline was recorded under conditions that matter and differ from the present ones."""

    verdict = Verdict.STALE_BASELINE


class InfraError(HarnessError):
    """The machine failed: a probe that does not answer, a process that cannot be started."""

    verdict = Verdict.INFRA


class DiskError(HarnessError):
    """A file cannot be written because its disk is full or refuses."""

    verdict = Verdict.DISK


class DirtyGpuError(HarnessError):
    """A GPU that this run needs is somebody else's at the moment."""

    verdict = Verdict.DIRTY_GPU


class GpuHangError(HarnessError):
    """A GPU or its driver does not answer."""

    verdict = Verdict.GPU_HANG


class PullError(HarnessError):
    """An image is not there and could not be had."""

    verdict = Verdict.PULL


class InterruptedRun(HarnessError):
    """The run was stopped from outside; what there is has been written."""

    verdict = Verdict.INTERRUPTED
