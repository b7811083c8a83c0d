"""Evidence folders as a run would leave them, made by hand: what the tests of gate, JUnit, summary and record judge.

The journal is written by the harness's own JournalWriter and every file has the shape that run.py and the suites write.
Curves are a smooth series with a little seeded difference, so that a band exists; machine-code facts are whole tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import baselines, manifest
from harness.baselines import CodegenBlock, CodegenRow, LossRun, Provenance
from harness.isa import FACTS
from harness.journal import JournalWriter

RUN_ID = "cafe0001"
STEPS = 100
LOSS_TEST = "loss/test_curves::test_curve[llama3-tiny-rowwise-e4m3fnuz]"
LOSS_CASE = "llama3-tiny-rowwise-e4m3fnuz"
BF16_TEST = "loss/test_curves::test_curve[llama3-tiny-bf16]"
CODEGEN_TEST = "codegen/test_rowwise::test_rowwise[rowwise-e4m3fnuz-bf16-k7168-gfx942]"
CODEGEN_CASE = "rowwise-e4m3fnuz-bf16-k7168-gfx942"
NUMERICS_TEST = "numerics/test_formats::test_golden[formats-e4m3fnuz]"
CONFIG = {"model": "llama3-tiny", "recipe": "rowwise", "steps": STEPS, "seed": 0}
CONFIG_HASH = "0123456789abcdef"
DIGESTS = {str(step): {"layers.0.w": [2.0, 0.001, 1.5, -0.5], "head.w": [0.5, 0.0, 0.1, 0.2]} for step in (1, 2, 3)}

WHERE = Provenance(
    when="2026-01-02T03:04:05+00:00",
    commit="a" * 40,
    dirty=False,
    platform="cpu",
    device="A CPU",
    python="3.11.7",
    torch="2.13.0",
    triton="3.9.0",
)


def facts(**changed: Any) -> dict[str, Any]:
    """A whole table of facts: numbers 16, texts `native-f32`, with some changed."""
    texts = {"region": "loops", "fp8_encode": "native-f32", "matrix_opcodes": "none"}
    return {**{name: texts.get(name, 16) for name in FACTS}, **changed}


def series(scale: float = 1.0, wobble: float = 0.0) -> list[float]:
    """A falling curve of STEPS values; `wobble` is the relative difference that grows linearly to the last step."""
    return [
        scale * (5.5 - 3.1 * step / STEPS + 0.0123457) * (1 + wobble * step / STEPS) for step in range(1, STEPS + 1)
    ]


def loss_run(nudge: int = 0, wobble: float = 0.0, **changed: Any) -> LossRun:
    """A recorded run of LOSS_CASE."""
    values: dict[str, Any] = {
        "case": LOSS_CASE,
        "test": LOSS_TEST,
        "config_hash": CONFIG_HASH,
        "variant": "",
        "nudge": nudge,
        "threads": 1,
        "isa_limit": None,
        "recipe": "rowwise",
        "format": "e4m3fnuz",
        "arch": "gfx942",
        "seed": 0,
        "provenance": WHERE,
        "config": dict(CONFIG),
        "loss": series(wobble=wobble),
        "grad_norm": series(0.3, wobble),
        "saturated": [10] * STEPS,
        "nan": [0] * STEPS,
        "digests": DIGESTS if nudge == 0 else {},
    }
    return LossRun(**{**values, **changed})


def loss_baseline_rows() -> list[LossRun]:
    """Run 0 and five nudged runs, 1e-5 .. 5e-5 away at the last step: K is 5, so 2.5e-4 is allowed there."""
    return [loss_run(), *(loss_run(nudge, nudge * 1e-5) for nudge in range(1, 6))]


def loss_file(wobble: float = 0.0, **changed: Any) -> dict[str, Any]:
    """What the loss suite writes for LOSS_CASE."""
    steps = zip(series(wobble=wobble), series(0.3, wobble), strict=True)
    values: dict[str, Any] = {
        "schema": 1,
        "case": LOSS_CASE,
        "config_hash": CONFIG_HASH,
        "config": dict(CONFIG),
        "recipe": "rowwise",
        "format": "e4m3fnuz",
        "arch": "gfx942",
        "seed": 0,
        "nudge": 0,
        "threads": 1,
        "versions": {"torch": "2.13.0", "onednn_max_cpu_isa": ""},
        "steps": [
            {"step": number, "loss": loss, "grad_norm": norm, "saturated": 10, "nan": 0}
            for number, (loss, norm) in enumerate(steps, 1)
        ],
        "digests": DIGESTS,
    }
    return {**values, **changed}


def isa_file(**changed: Any) -> dict[str, Any]:
    """What the codegen suite writes for CODEGEN_CASE."""
    values: dict[str, Any] = {
        "schema": 1,
        "case": CODEGEN_CASE,
        "arch": "gfx942",
        "triton": "3.9.0",
        "format": "e4m3fnuz",
        "kernel": "_quantize_rowwise_kernel",
        "config": {"BLOCK_K": 1024, "num_warps": 4},
        "facts": facts(),
        "listing_hash": "feed",
        "listing": "",
    }
    return {**values, **changed}


def codegen_row(**changed: Any) -> CodegenRow:
    """The recorded row of CODEGEN_CASE."""
    test = manifest.parse(CODEGEN_TEST)
    values: dict[str, Any] = {
        "module": test.module,
        "test": test.test,
        "case": CODEGEN_CASE,
        "format": "e4m3fnuz",
        "arch": "gfx942",
        "kernel": "_quantize_rowwise_kernel",
        "config": {"BLOCK_K": 1024, "num_warps": 4},
        "facts": facts(),
        "listing_hash": "feed",
        "provenance": WHERE,
    }
    return CodegenRow(**{**values, **changed})


class Built:
    """An evidence folder in the making. By default a good run of three suites on `cpu`, one test each."""

    def __init__(self, folder: Path, suites: Sequence[str] = ("numerics", "codegen", "loss")) -> None:
        self.folder = folder
        self.suites = tuple(suites)
        self.baselines = folder / "judged-with"
        self.run: dict[str, Any] = {
            "schema": 1,
            "run_id": RUN_ID,
            "platform": "cpu",
            "platform_reason": "cpu was named by the caller",
            "arch": "cpu",
            "suites": list(suites),
            "case": None,
            "full": False,
            "commit": "b" * 40,
            "dirty": False,
            "policy": "pull-request",
            "versions": {"torch": "2.13.0", "triton": "3.9.0", "python": "3.11.7"},
            "host": {"cpu": "A CPU", "python": "3.11.7"},
            "capabilities": {
                "platform": "cpu",
                "vendor": "cpu",
                "arch": "cpu",
                "target": "cpu",
                "reason": "no GPU",
                "simulated": False,
                "device_name": "cpu",
                "gpus": 0,
                "memory_gib": None,
                "e4m3": "e4m3fn",
                "native_fp8_matmul": False,
                "versions": {},
                "raw": {},
            },
            "started": "2026-02-03T04:05:06+00:00",
            "finished": "2026-02-03T04:06:06+00:00",
            "interrupted": False,
            "attempts": [{"suite": suite, "attempt": 1, "rc": 0, "seconds": 7.5} for suite in suites],
        }
        self.tests: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, dict[str, Any]] = {}
        self.session_rc: dict[str, int | None] = {}
        self.session_ids: dict[str, str] = {}
        self.deselected: dict[str, int | None] = {}
        self.extra_events: list[tuple[str, dict[str, Any]]] = []

    def test(self, test_id: str, outcome: str = "passed", message: str = "", **properties: Any) -> Built:
        """Add a test: passed, failed, skipped, running (started, never ended) or not-run (collected only)."""
        self.tests[test_id] = {"outcome": outcome, "message": message, "properties": properties}
        return self

    def loss(self, content: Mapping[str, Any] | None = None, test_id: str = LOSS_TEST, **properties: Any) -> Built:
        """Add a loss test with its file."""
        content = loss_file() if content is None else content
        name = f"losses/{manifest.parse(test_id).case}.json"
        self.file(name, json.dumps(content))
        return self.test(test_id, loss_file=name, **properties)

    def isa(self, content: Mapping[str, Any] | None = None, test_id: str = CODEGEN_TEST) -> Built:
        """Add a codegen test with its file."""
        name = f"isa/{manifest.parse(test_id).case}.json"
        self.file(name, json.dumps(isa_file() if content is None else content))
        return self.test(test_id, isa_file=name)

    def file(self, name: str, text: str) -> Built:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return self

    def process(self, suite: str, rc: int | None = 0, signal: str | None = None, killed_by: str | None = None) -> Built:
        """How the process of a suite ended; `rc` None and `signal` None means that the harness died first."""
        self.processes[suite] = {"rc": rc, "signal": signal, "killed_by": killed_by}
        return self

    def baseline(self, loss: bool = True, codegen: bool = True, ids: Sequence[str] | None = None) -> Built:
        """The baselines that the run is judged with, and the manifest (default: every test added so far)."""
        folder = self.baselines
        if loss:
            baselines.write_atomic(folder / "cpu/loss.json", baselines.encode_loss("cpu", loss_baseline_rows()))
        if codegen:
            block = CodegenBlock(triton="3.9", rows=[codegen_row()])
            baselines.write_atomic(folder / "gfx942/codegen.json", baselines.encode_codegen("gfx942", [block]))
        manifest.write(folder / "cpu/manifest.txt", list(self.tests) if ids is None else ids)
        return self

    def waiver(self, text: str) -> Built:
        return self.file("judged-with/waivers.toml", text)

    def write(self) -> Path:
        """Write run.json, the journal and the logs; returns the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file("run.json", json.dumps(self.run))
        (self.folder / "journal.jsonl").unlink(missing_ok=True)
        with JournalWriter(self.folder / "journal.jsonl") as journal:
            for suite in self.suites:
                self.file(f"logs/{suite}.log", f"log of {suite}\n")
                self._write_suite(journal, suite)
            for event, fields in self.extra_events:
                journal.write(event, **fields)
        return self.folder

    def _write_suite(self, journal: JournalWriter, suite: str) -> None:
        mine = {test_id: test for test_id, test in self.tests.items() if test_id.startswith(f"{suite}/")}
        failed = any(test["outcome"] == "failed" for test in mine.values())
        usual = 1 if failed else 0 if mine else 5
        end = self.processes.get(suite, {"rc": usual, "signal": None, "killed_by": None})
        journal.write("process-start", suite=suite, attempt=1, argv=["pytest"], time=1.0)
        journal.write("session", run_id=self.session_ids.get(suite, RUN_ID), suite=suite, pid=1, time=2.0)
        journal.write("collected", suite=suite, ids=list(mine), deselected=self.deselected.get(suite, 0))
        for test_id, test in mine.items():
            if test["outcome"] == "not-run":
                continue
            journal.write("start", id=test_id, time=3.0)
            if test["outcome"] == "running":
                continue
            call = {
                "outcome": test["outcome"],
                "message": test["message"],
                "detail": test.get("detail", test["message"]),
            }
            setup = call if test["outcome"] == "skipped" else {"outcome": "passed"}
            journal.write("phase", id=test_id, phase="setup", seconds=0.25, **setup)
            if test["outcome"] != "skipped":
                journal.write("phase", id=test_id, phase="call", seconds=0.5, properties=test["properties"], **call)
            journal.write("phase", id=test_id, phase="teardown", seconds=0.25, outcome="passed")
        died = end["signal"] or end["killed_by"] or end["rc"] is None
        rc = self.session_rc.get(suite, None if died else end["rc"])
        if rc is not None:
            journal.write("session-end", suite=suite, rc=rc)
        if end["rc"] is not None or end["signal"]:
            journal.write("process-end", suite=suite, attempt=1, seconds=7.5, **end)


def good(folder: Path) -> Built:
    """One test a suite, all as recorded."""
    built = Built(folder).test(NUMERICS_TEST).loss().isa()
    return built.baseline()
