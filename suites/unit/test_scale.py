"""What may not grow with the size of a run: 20,000 tests are gated in seconds, and 2,000 cost no more than with JUnit.

Also what must not depend on chance: the ids of this checkout and their order, under five hash seeds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import combine, junit_merge
from suites.unit import tiny_checkout
from suites.unit.built_evidence import Built
from suites.unit.test_plugin import run_pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS, SKIPS = 20_000, 5_000
MIB = 1 << 20

#: Judges as `fp8ci run` does at its end (junit.xml and summary.md), and says what it took.
JUDGE = """
import json, re, sys, time
from pathlib import Path
from harness import cli
started = time.monotonic()
judgement, text = cli._report(Path(sys.argv[1]))
# Not getrusage's maximum, which starts from that of the process that began this one.
kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps([judgement.exit_code, time.monotonic() - started, kib, text.splitlines()[0]]))
"""


def names() -> list[str]:
    """Ids with characters of one to four bytes; the only failure comes after everything else."""
    return [f"numerics/test_漢字::test_é🔥[größe-{number:05}-漢字🔥]" for number in range(TESTS)]


def judge_apart(evidence: Path) -> tuple[int, float, int, str]:
    """(exit code, seconds, KiB at most, first line) of a judgement in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(evidence)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    exit_code, seconds, kib, line = json.loads(done.stdout)
    return int(exit_code), float(seconds), int(kib), str(line)


def test_twenty_thousand_tests(tmp_path: Path) -> None:
    """actions/runner#4337: 5,000 skips, then passes, then the only failure: exit 1, named first, in seconds."""
    built = Built(tmp_path, ("numerics",))
    *others, last = names()
    for number, test_id in enumerate(others):
        skipped = number < SKIPS
        built.test(
            test_id, "skipped" if skipped else "passed", f"requires 漢字🔥 {number}; this is y" if skipped else ""
        )
    built.test(last, "failed", "the only failure: 漢字🔥")
    built.run["platform"] = built.run["capabilities"]["platform"] = "mi300x"  # which has no manifest yet
    evidence = built.write()
    exit_code, seconds, kib, line = judge_apart(evidence)
    assert exit_code == 1
    assert line.startswith("FAIL exit 1: numerics test_漢字::test_é🔥[größe-19999-漢字🔥] - the only failure")
    assert "20000 checks: 1 FAIL, 5000 SKIP, 14999 PASS" in line
    assert seconds < 20
    assert kib < 500 * 1024
    assert (evidence / "summary.md").stat().st_size < MIB

    # The same as anybody's JUnit file: read, judged and merged.
    started = time.monotonic()
    judgement, _ = combine.judge([evidence / "junit.xml"])
    assert (judgement.exit_code, judgement.counts) == (1, {"FAIL": 1, "PASS": 14999, "SKIP": 5000})
    junit_merge.merge([evidence / "junit.xml"], tmp_path / "merged.xml")
    assert time.monotonic() - started < 20


TRIVIAL = """
import pytest
@pytest.mark.parametrize("number", range(2000))
def test_trivial(number): pass
"""


def cpu_seconds(root: Path, *options: str, plugin: bool) -> float:
    """What a pytest session takes of a core: wall time says more about the neighbours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_pytest(root, *options, plugin=plugin)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "2000 passed" in done.stdout
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_overhead(tmp_path: Path) -> None:
    """Plugin and journal cost less than 5 % over plain pytest with JUnit, on 2,000 trivial tests, pair by pair.

    One session differs from the next by more than that on a busy machine, so it takes a sign test: red when 12 of 15
    pairs are beyond the limit (1.8 % by chance where the overhead is the limit itself), green as soon as 4 are not.
    """
    root = tiny_checkout.make(tmp_path, {"numerics/test_a": TRIVIAL})
    pairs: list[tuple[float, float]] = []
    within = 0
    while within < 4 and len(pairs) - within < 12:
        seconds: dict[bool, float] = {}
        for plugin in (True, False) if len(pairs) % 2 else (False, True):
            (tmp_path / "out" / "journal.jsonl").unlink(missing_ok=True)
            options = () if plugin else (f"--junit-xml={tmp_path}/x.xml",)
            seconds[plugin] = cpu_seconds(root, *options, plugin=plugin)
            if plugin:
                lines = (tmp_path / "out" / "journal.jsonl").read_bytes().count(b"\n")
        assert lines == 2000 * 4 + 3
        pairs.append((seconds[False], seconds[True]))
        within += seconds[True] < 1.05 * seconds[False]
    assert within >= 4, pairs


def collected(suites: Sequence[str], seed: int) -> list[str]:
    """The ids of some suites of this checkout, as pytest collects them in a process with a hash seed of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "TRITON_INTERPRET", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
    ]
    done = subprocess.run(
        [*argv, *(f"suites/{suite}" for suite in suites)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("suites/")]


GATED = ("codegen", "loss", "numerics")
OTHERS = ("engine", "perf", "unit")


def test_every_suite_is_collected() -> None:
    """The two lists above leave out no folder of tests."""
    assert {*GATED, *OTHERS} == {path.parent.name for path in (ROOT / "suites").glob("*/test_*.py")}


@pytest.mark.parametrize(
    ("suites", "seeds"), [pytest.param(GATED, 5, id="gated suites"), pytest.param(OTHERS, 2, id="other suites")]
)
def test_ids_do_not_depend_on_the_hash_seed(suites: Sequence[str], seeds: int) -> None:
    """Every process collects the same ids in the same order, each once, ASCII, readable and without an address.

    pytest-dev/pytest-xdist#432: workers must agree on the list. And an id is a key of manifests and baselines.
    """
    first = collected(suites, 0)
    assert {Path(node_id).parts[1] for node_id in first} == set(suites)
    assert len(set(first)) == len(first) > 1000
    for node_id in first:
        module, _, rest = node_id.partition("::")
        name = f"{Path(module).stem}::{rest}"
        assert name.isascii(), node_id
        assert len(name) <= 150, f"{node_id} has {len(name)} characters; expected at most 150"
        assert not re.search("0x[0-9a-f]{6}", name), f"{node_id} holds an address"
    for seed in range(1, seeds):
        assert collected(suites, seed) == first
