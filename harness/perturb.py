"""What the self-test does to good evidence, and what the gate must then say: series, files, exit codes, waivers.

A gate that has never been seen red on a folder like this one proves nothing about it. Each row of PERTURBATIONS changes
one thing in a copy of an evidence folder, in the way in which it goes wrong in the field, and names the verdict and the
exit code that must follow. The evidence is a real run's, or made from the checkout's own baselines (rebuilt.py).

Not here: faults in the code (selftest.py, suites/mutations), how small a drift is seen (power.py).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import baselines, gate, manifest
from harness.errors import HarnessError, Verdict
from harness.journal import FILE_NAME as JOURNAL_FILE

# What is done to it --------------------------------------------------------------------------------------------------


class Nothing(Exception):
    """This evidence has nothing that the perturbation could change."""


class Copy:
    """A copy of an evidence folder, with hands to change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, **changed: Any) -> None:
        """Change keys of run.json."""
        run = gate.read_run(self.folder)
        (self.folder / gate.RUN_FILE).write_text(json.dumps({**run, **changed}), encoding="utf-8")

    def events(self, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Change every event of the journal; None drops it. Nothing where no event was changed.

        junit.xml goes: one that says what the journal said before would be the first thing that the gate sees.
        """
        path = self.folder / JOURNAL_FILE
        before = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        after = [changed for event in before if (changed := change(dict(event))) is not None]
        if after == before:
            raise Nothing
        path.write_text("".join(json.dumps(event) + "\n" for event in after), encoding="ascii")
        (self.folder / "junit.xml").unlink(missing_ok=True)

    def measured(self, key: str) -> list[str]:
        """The ids of the tests that name a file under `key`, a curve in bf16 last: FP8 is what can go wrong."""
        found = [result.id for result in gate.judge(self.folder).results if key in result.properties]
        if not found:
            raise Nothing
        return sorted(found, key=lambda test_id: "bf16" in manifest.parse(test_id).case)

    def file(self, key: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the evidence file of the first test that has one."""
        self._change(self.measured(key)[:1], key, change)

    def files(self, key: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change what every measuring test wrote, as a fault of the product would."""
        self._change(self.measured(key), key, change)

    def _change(self, ids: Sequence[str], key: str, change: Callable[[dict[str, Any]], None]) -> None:
        by_id = {result.id: result for result in gate.judge(self.folder).results}
        for test_id in ids:
            path = gate.file_of(self.folder, by_id[test_id], key)
            content = json.loads(path.read_text(encoding="utf-8"))
            change(content)
            path.write_text(json.dumps(content), encoding="utf-8")

    def row(self, kind: str, change: Callable[[dict[str, Any], float], None]) -> None:
        """Change the samples of the first good speed row of a kind that was compared with recorded runs.

        `change` gets the content and the row's limit.
        """
        by_id = {result.id: result for result in gate.judge(self.folder).results}
        for test_id in self.measured("samples_file"):
            result = by_id[test_id]
            path = gate.file_of(self.folder, result, "samples_file")
            content = json.loads(path.read_text(encoding="utf-8"))
            if result.verdict is Verdict.PASS and content.get("kind", "time") == kind:
                change(content, float((result.baseline or {}).get("limit") or 0.0))
                path.write_text(json.dumps(content), encoding="utf-8")
                return
        raise Nothing

    def steps(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Change the steps of a curve."""
        self.file("loss_file", lambda content: content.update(steps=change(content["steps"])))

    def first_test(self) -> str:
        """Some test that passed and measured nothing."""
        for result in gate.judge(self.folder).results:
            if result.verdict is Verdict.PASS and not gate.MEASURED & set(result.properties):
                return result.id
        raise Nothing


def _scaled(factor: float, first: int = 1) -> Callable[[Copy], None]:
    """The loss times a factor, from a step on."""

    def change(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**s, "loss": s["loss"] * factor} if s["step"] >= first else s for s in steps]

    return lambda copy: copy.steps(change)


def _shifted(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    later = [*steps[1:], steps[-1]]
    return [{**step, "loss": after["loss"]} for step, after in zip(steps, later, strict=True)]


def _nan(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    middle = len(steps) // 2
    return [{**step, "loss": math.nan} if number == middle else step for number, step in enumerate(steps)]


def _digest(content: dict[str, Any]) -> None:
    """The first weight, in every curve: one with experts has noise beyond 2 %, as tokens change experts."""
    if "1" not in content.get("digests", {}):
        raise Nothing
    digest = next(iter(content["digests"]["1"].values()))
    digest[:] = [value * 1.02 for value in digest]


def _swapped(copy: Copy) -> None:
    """The curves of two cases, each in the other's file."""
    ids = copy.measured("loss_file")
    if len(ids) < 2:
        raise Nothing
    by_id = {result.id: result for result in gate.judge(copy.folder).results}
    first, second = (gate.file_of(copy.folder, by_id[test_id], "loss_file") for test_id in ids[:2])
    text = first.read_text(encoding="utf-8")
    first.write_text(second.read_text(encoding="utf-8"), encoding="utf-8")
    second.write_text(text, encoding="utf-8")


def _fact(name: str, worse: Callable[[Any], Any]) -> Callable[[Copy], None]:
    return lambda copy: copy.file(
        "isa_file", lambda content: content["facts"].update({name: worse(content["facts"][name])})
    )


def _slower(content: dict[str, Any], limit: float) -> None:
    """Every launch by 10 % beyond the limit, and a second stage that shows the same."""
    first = [one for one in content["launches"] if one.get("stage", 1) == 1]
    for one in first:
        if one.get("side", "candidate") == "candidate":
            one["candidate"] = [value * 1.1 * (1 + limit) for value in one["candidate"]]
    content["launches"] = [*first, *({**one, "stage": 2} for one in first)]


def _sample(value: float) -> Callable[[Copy], None]:
    """One sample of a row becomes another value."""
    return lambda copy: copy.row(
        "time", lambda content, limit: content["launches"][0]["candidate"].__setitem__(0, value)
    )


def _waiting(content: dict[str, Any], limit: float) -> None:
    for one in content["launches"]:
        one["counts"]["synchronisations"] = one["counts"].get("synchronisations", 0) + 1


def _two_launches(content: dict[str, Any], limit: float) -> None:
    content["launches"] = [one for one in content["launches"] if one["number"] < 3]


def _constant_data(content: dict[str, Any], limit: float) -> None:
    content["launches"][0]["input_spread"] = 0.0


def _outcome(outcome: str) -> Callable[[Copy], None]:
    """The first test that measures nothing ends otherwise, and its process exits as before."""

    def change(copy: Copy) -> None:
        chosen = copy.first_test()

        def event(found: dict[str, Any]) -> dict[str, Any]:
            if (found.get("id"), found.get("phase")) == (chosen, "call"):
                found.update(outcome=outcome, message="perturbed")
            return found

        copy.events(event)

    return change


def _failed(copy: Copy) -> str:
    """The first test fails, honestly: its session and its process say so too. Returns its id."""
    chosen = copy.first_test()
    suite = chosen.partition("/")[0]

    def event(found: dict[str, Any]) -> dict[str, Any]:
        if (found.get("id"), found.get("phase")) == (chosen, "call"):
            found.update(outcome="failed", message="perturbed")
        if found["event"] in ("session-end", "process-end") and found["suite"] == suite:
            found["rc"] = 1
        return found

    copy.events(event)
    return chosen


def _waiver(copy: Copy, test_id: str, expires: str) -> None:
    """A waiver for a test, and a run of 2026-01-01."""
    text = f'[[waiver]]\nid = "{test_id}"\nplatform = "{gate.read_run(copy.folder)["platform"]}"\n'
    text += f'reason = "perturbed"\nissue = "https://example.org/1"\nowner = "selftest"\nexpires = {expires}\n'
    (copy.folder / gate.JUDGED_WITH / "waivers.toml").write_text(text, encoding="utf-8")
    copy.run(started="2026-01-01T00:00:00+00:00")


def _all_skipped(copy: Copy) -> None:
    def event(found: dict[str, Any]) -> dict[str, Any] | None:
        if found["event"] == "phase":
            return (
                {**found, "outcome": "skipped", "message": "no GPU"}
                if found["phase"] == "setup"
                else (found if found["phase"] == "teardown" else None)
            )
        return found

    copy.events(event)


def _without(chosen: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    def event(found: dict[str, Any]) -> dict[str, Any] | None:
        if found["event"] == "collected":
            return {**found, "ids": [test_id for test_id in found["ids"] if test_id != chosen]}
        return None if found.get("id") == chosen else found

    return event


def _blind(copy: Copy) -> None:
    chosen = next((copy.measured(key)[0] for key in ("loss_file", "isa_file", "samples_file") if _has(copy, key)), None)
    if chosen is None:
        raise Nothing
    copy.events(lambda found: {k: v for k, v in found.items() if k != "properties" or found.get("id") != chosen})


def _has(copy: Copy, key: str) -> bool:
    return any(key in result.properties for result in gate.judge(copy.folder).results)


def _killed(copy: Copy) -> None:
    """The last process dies of SIGKILL in its last test."""
    *_, last = [r.id for r in gate.judge(copy.folder).results if r.verdict is Verdict.PASS]
    suite = last.partition("/")[0]

    def event(found: dict[str, Any]) -> dict[str, Any] | None:
        if found["event"] == "phase" and found["id"] == last and found["phase"] != "setup":
            return None
        if found["event"] == "session-end" and found["suite"] == suite:
            return None
        if found["event"] == "process-end" and found["suite"] == suite:
            return {**found, "rc": None, "signal": "SIGKILL"}
        return found

    copy.events(event)


def _config(content: dict[str, Any]) -> None:
    content.update(config_hash="perturbed", config={**content["config"], "seed": -1})


def _remove_loss_baseline(copy: Copy) -> None:
    path = copy.folder / gate.JUDGED_WITH / str(gate.read_run(copy.folder)["platform"]) / baselines.LOSS_FILE
    if not path.exists():
        raise Nothing
    path.unlink()


def _another_platform(copy: Copy) -> None:
    copy.run(platform="mi300x" if gate.read_run(copy.folder)["platform"] != "mi300x" else "h200")


def _journal_of_another_run(copy: Copy) -> None:
    copy.events(lambda found: {**found, "run_id": "0ld"} if found["event"] == "session" else found)


@dataclass(frozen=True)
class Perturbation:
    """One way for evidence to be wrong: what is done, and the verdict and exit code that must follow."""

    name: str
    claim: str
    verdict: Verdict
    exit_code: int
    apply: Callable[[Copy], object]


PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation("shift-one-step", "a curve one step early is another curve", Verdict.REGRESSION, 1,
        lambda copy: copy.steps(_shifted)),
    Perturbation("drop-a-step", "a step that is missing is no step", Verdict.REGRESSION, 1,
        lambda copy: copy.steps(lambda steps: steps[: len(steps) // 2] + steps[len(steps) // 2 + 1 :])),
    Perturbation("short-curve", "fewer steps than the baseline", Verdict.REGRESSION, 1,
        lambda copy: copy.steps(lambda steps: steps[:-10])),
    Perturbation("nan-in-the-curve", "a comparison with NaN fails", Verdict.REGRESSION, 1,
        lambda copy: copy.steps(_nan)),
    Perturbation("ten-percent", "+10 % on one row", Verdict.REGRESSION, 1, _scaled(1.1)),
    Perturbation("one-percent-late", "+1 % in the second half only", Verdict.REGRESSION, 1, _scaled(1.01, 51)),
    Perturbation("one-weight-gradient", "one weight gradient times 1.02, in every curve", Verdict.REGRESSION, 1,
        lambda copy: copy.files("loss_file", _digest)),
    Perturbation("swapped-cases", "a curve of another case is no curve of this one", Verdict.DISAGREE, 3, _swapped),
    Perturbation("another-config", "a baseline of another configuration does not judge", Verdict.STALE_BASELINE, 5,
        lambda copy: copy.file("loss_file", _config)),
    Perturbation("no-loss-baseline", "a deleted baseline is missing", Verdict.NO_BASELINE, 5, _remove_loss_baseline),
    Perturbation("byte-stores", "a store of 16 bytes becomes one of 1", Verdict.REGRESSION, 1,
        _fact("widest_store_bytes", lambda value: 1)),
    Perturbation("more-registers", "+10 % vector registers", Verdict.REGRESSION, 1,
        _fact("vgprs", lambda value: math.ceil(value * 1.1) + 1)),
    Perturbation("slower-row", "a speed row by 10 % beyond its limit", Verdict.REGRESSION, 1,
        lambda copy: copy.row("time", _slower)),
    Perturbation("nan-sample", "a time that is no number", Verdict.FAIL, 1, _sample(math.nan)),
    Perturbation("zero-time", "a time of 0 ns", Verdict.IMPLAUSIBLE, 1, _sample(0.0)),
    Perturbation("constant-data", "timed on zeros", Verdict.FAIL, 1, lambda copy: copy.row("time", _constant_data)),
    Perturbation("two-launches", "a launch that is missing", Verdict.MISSING, 3,
        lambda copy: copy.row("time", _two_launches)),
    Perturbation("inserted-wait", "an op that waits for the device", Verdict.REGRESSION, 1,
        lambda copy: copy.row("counts", _waiting)),
    Perturbation("swapped-platforms", "evidence under another platform's name", Verdict.DISAGREE, 3, _another_platform),
    Perturbation("empty-junit", "a report of zero bytes", Verdict.UNREADABLE, 3,
        lambda copy: (copy.folder / "junit.xml").write_bytes(b"")),
    Perturbation("stale-run-id", "a journal of another run", Verdict.DISAGREE, 3, _journal_of_another_run),
    Perturbation("rc-0-with-failures", "a failed test and exit code 0", Verdict.DISAGREE, 3, _outcome("failed")),
    Perturbation("a-failure", "a failed test, honestly told", Verdict.FAIL, 1, _failed),
    Perturbation("all-skipped", "a run of which nothing ran", Verdict.MISSING, 3, _all_skipped),
    Perturbation("vanished", "a test that the manifest lists is not there", Verdict.MISSING, 3,
        lambda copy: copy.events(_without(copy.first_test()))),
    Perturbation("gone-blind", "a test that passes and measures nothing", Verdict.MISSING, 3, _blind),
    Perturbation("killed", "SIGKILL in the last test", Verdict.KILLED, 3, _killed),
    Perturbation("expired-waiver", "a red test whose waiver has expired", Verdict.WAIVER_EXPIRED, 1,
        lambda copy: _waiver(copy, _failed(copy), "2025-12-31")),
    Perturbation("unused-waiver", "a waiver for a test that passes", Verdict.WAIVER_UNUSED, 1,
        lambda copy: _waiver(copy, copy.first_test(), "2026-02-01")),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Whether the gate said what it must. PASS, FAIL with what it said instead, or SKIP with the reason."""

    name: str
    claim: str
    verdict: Verdict
    message: str


def execute(evidence: Path, folder: Path, names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Perturb copies of an evidence folder below `folder`, one after the other; all, or those named."""
    before = gate.judge(evidence).exit_code
    for row in PERTURBATIONS:
        if names and row.name not in names:
            continue
        if before != 0:
            yield Outcome(
                row.name,
                row.claim,
                Verdict.MISSING,
                f"the evidence itself is exit {before}: nothing can be shown on it",
            )
            continue
        copy = folder / row.name
        shutil.copytree(evidence, copy)
        try:
            yield _judge(row, copy)
        finally:
            shutil.rmtree(copy)


def _judge(row: Perturbation, copy: Path) -> Outcome:
    try:
        row.apply(Copy(copy))
    except Nothing:
        return Outcome(row.name, row.claim, Verdict.SKIP, "this evidence has nothing of that kind")
    try:
        judgement = gate.judge(copy)
        said = sorted({str(result.verdict) for result in judgement.red})
        exit_code = judgement.exit_code
    except HarnessError as error:
        said, exit_code = [str(error.verdict)], error.exit_code
    wanted = f"{row.verdict} and exit {row.exit_code}"
    if row.verdict in said and exit_code == row.exit_code:
        return Outcome(row.name, row.claim, Verdict.PASS, f"red as {wanted}")
    told = f"exit {exit_code} with {', '.join(said) or 'nothing red'}"
    return Outcome(row.name, row.claim, Verdict.FAIL, f"the gate must say {wanted}, and says {told}")
