"""Speed as files: what a row of the perf suite leaves, what is recorded of it, and what others have published.

    samples/<case>.json             evidence: every launch of one row, raw samples in ns, clocks, counts
    baselines/<platform>/perf.json  recorded rows: the same, with where they come from
    baselines/<platform>/published.json   figures of others, with their source: shown as targets, never gating

A row is (op, case, format, arch). A launch is one fresh process; it times whole blocks of `probe, reference, candidate,
candidate, reference, probe`, so that each list of a launch holds two samples a block, in the order measured. `config`
is what makes two measurements comparable: where it differs the baseline is stale.

perf.json holds raw runs and no thresholds: limits are computed from them (speed.py). Published figures have a file of
their own, because nothing that was not measured here may ever be mistaken for a measurement.

Not here: statistics and verdicts (speed.py), timing (suites/perf).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness import baselines
from harness.baselines import SCHEMA, Provenance, malformed
from harness.errors import UnreadableError

PERF_FILE = "perf.json"
PUBLISHED_FILE = "published.json"

Side = Literal["candidate", "base"]
Kind = Literal["time", "counts", "compile"]


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process that measured the row. Lists of times hold ns a call, two values a block."""

    number: int
    """From 1, in the order of the run; both sides of a pair share it."""
    stage: int = 1
    """1, or 2 for the launches that confirm a suspicion."""
    side: Side = "candidate"
    commit: str = ""
    device: str = ""
    started: str = ""
    seconds: float = 0.0
    parts: dict[str, float] = {}
    """Seconds of what these consist of: data, load (compiled code, and all called once), warm, samples, rest."""
    input_spread: float | None = None
    """Standard deviation of the data that was timed; None where a row has none."""
    calls: int = 1
    """Calls in one sample."""
    candidate: list[float] = []
    reference: list[float] = []
    probe: list[float] = []
    throttled: list[bool] = []
    """Whether the device said, during a block, that it held its clocks down; empty where it cannot say."""
    clocks: dict[str, float | str] = {}
    """Before and after: `sm_mhz_before`, ..."""
    counts: dict[str, int] = {}
    compile_seconds: float | None = None


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row and all of its launches."""

    schema: Literal[1] = 1
    kind: Kind = "time"
    case: str
    op: str
    format: str | None
    arch: str
    config: dict[str, Any]
    work: int = 0
    """What one call of the candidate must do: bytes moved beside a copy, floating-point operations beside a GEMM."""
    probe: Literal["", "copy", "bf16", "fp8"] = ""
    probe_work: int = 0
    """The same of one call of the probe."""
    reference: str = ""
    """What the reference is, in words; empty where the row has none."""
    resolution_ns: float = 0.0
    """Of the timer."""
    most: dict[str, int] = {}
    """Counts that may not be exceeded, with or without a baseline."""
    launches: list[Launch]

    def of(self, side: Side, stage: int | None = None) -> tuple[Launch, ...]:
        """The launches of one side, of one stage or of both, in their order."""
        mine = [one for one in self.launches if one.side == side and stage in (None, one.stage)]
        return tuple(sorted(mine, key=lambda one: (one.stage, one.number)))


class PerfRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One recorded run of one row."""

    test: str
    """Harness test id: `perf/<module>::<test>[<case>]`."""
    samples: Samples
    provenance: Provenance

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it this run: what it measured too, since two sessions may start in one second."""
        launches = json.dumps(msgspec.to_builtins(self.samples.launches), sort_keys=True)
        digest = hashlib.sha256(launches.encode()).hexdigest()
        return (self.test, self.provenance.when, self.provenance.commit, digest)


class PerfBaseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`baselines/<platform>/perf.json`."""

    schema: Literal[1]
    suite: Literal["perf"]
    platform: str
    rows: list[PerfRun]

    def of_test(self, test_id: str) -> tuple[PerfRun, ...]:
        return tuple(row for row in self.rows if row.test == test_id)


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure that somebody else has published. It is a target to print, and judges nothing."""

    source: Literal["published"]
    case: str
    """The case that measures the same thing here."""
    metric: str
    value: float
    unit: str
    where: str
    """Repository and number, or the name of the text."""
    conditions: str


class PublishedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`baselines/<platform>/published.json`."""

    schema: Literal[1]
    suite: Literal["perf"]
    platform: str
    rows: list[Published]


def load(path: Path, platform: str | None = None) -> PerfBaseline:
    """Read perf.json strictly. ConfigError for a file that cannot be used, as baselines.load_loss."""
    baseline = baselines.decode(path, PerfBaseline)
    if platform is not None and baseline.platform != platform:
        raise malformed(path, f"key 'platform' says {baseline.platform!r}, expected {platform!r}")
    seen: set[tuple[str, ...]] = set()
    for index, row in enumerate(baseline.rows):
        where = f"$.rows[{index}] ({row.samples.case})"
        if row.key in seen:
            raise malformed(path, f"{where} appears twice")
        seen.add(row.key)
        problem = problem_of(row, baseline.platform)
        if problem:
            raise malformed(path, f"{where}: {problem}")
    return baseline


def problem_of(row: PerfRun, platform: str) -> str | None:
    """What makes a recorded run unusable, or None."""
    where = row.provenance
    if not all(value.strip() for value in (where.when, where.commit, where.device)):
        return "provenance without 'when', 'commit' or 'device'"
    if where.platform != platform:
        return f"measured on {where.platform!r}, in the file of {platform!r}"
    if not row.samples.launches:
        return "'launches' is empty"
    if any(launch.side != "candidate" for launch in row.samples.launches):
        return "a launch of the base of a comparison is no baseline"
    values = [value for one in row.samples.launches for value in (*one.candidate, *one.reference, *one.probe)]
    if not all(math.isfinite(value) and value > 0 for value in values):
        return "a sample is not a positive number"
    if row.samples.kind == "time" and not all(one.candidate and one.probe for one in row.samples.launches):
        return "a launch lacks samples of the candidate or of the probe"
    return next((what for one in row.samples.launches if (what := _launch_problem(row.samples, one))), None)


def _launch_problem(row: Samples, one: Launch) -> str | None:
    """What leaves a row nothing to be compared with in this launch, or None."""
    if row.kind == "counts":
        return None if one.counts else "a launch counted nothing"
    if row.kind == "compile":
        seconds = one.compile_seconds
        return None if seconds and math.isfinite(seconds) and seconds > 0 else "a launch lacks its compile time"
    if bool(row.reference) != bool(one.reference):
        return "a launch has samples of the reference, or names one, and not both"
    lengths = {len(values) for values in (one.candidate, one.probe, one.reference) if values}
    if len(lengths) > 1 or len(one.candidate) % 2:
        return "a launch holds other than two samples a block of candidate, reference and probe"
    if sum(one.throttled) >= len(one.candidate) // 2:
        return "every block of a launch was throttled"
    return None


def load_published(path: Path, platform: str | None = None) -> PublishedFile:
    """Read published.json strictly. Raises ConfigError."""
    found = baselines.decode(path, PublishedFile)
    if platform is not None and found.platform != platform:
        raise malformed(path, f"key 'platform' says {found.platform!r}, expected {platform!r}")
    for index, row in enumerate(found.rows):
        if not (math.isfinite(row.value) and row.value > 0 and row.where.strip()):
            raise malformed(path, f"$.rows[{index}] ({row.case}): a positive value and where it was published")
    return found


def encode(platform: str, rows: Iterable[PerfRun]) -> str:
    """The text of perf.json: sorted, one run a line."""
    lines = [
        json.dumps(msgspec.to_builtins(row), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
        for row in sorted(rows, key=lambda row: row.key)
    ]
    head = f'{{"schema":{SCHEMA},"suite":"perf","platform":{json.dumps(platform)},"rows":[\n'
    return head + ",\n".join(lines) + "\n]}\n"


def read(path: Path) -> Samples:
    """The evidence of one row. NaN is read, so that it can be judged. Raises UnreadableError."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Samples)
    except OSError as error:
        what = f"{path.name} cannot be read ({error.strerror})"
        raise UnreadableError(what, "the file that the test names") from None
    except (ValueError, RecursionError) as error:
        what = f"{path.name}: {' '.join(str(error).split())}"
        raise UnreadableError(what, "the file that the perf suite writes") from None
