"""Evidence made from baselines: a run that measured exactly what was recorded, in a second instead of a quarter hour.

Every id of the manifest passes; a loss test wrote the curve of run 0, a codegen test the facts of its row in the newest
block. Such a folder is green by construction, so whatever is changed in it (perturb.py) is all that is wrong with it.

Not here: that the product measures this. A real run shows that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import baselines, gate, junit, manifest
from harness.errors import MissingError
from harness.journal import FILE_NAME as JOURNAL_FILE
from harness.journal import JournalWriter
from harness.platforms import Platform

RUN_ID = "5e1f7e57"


def rebuild(root: Path, platform: Platform, out: Path) -> Path:
    """Evidence of a run that measured what the checkout's baselines hold; returns `out`.

    MissingError where the platform has no manifest: nothing says what such a run consists of.
    """
    folder = root / "baselines"
    if not (folder / platform.id / "manifest.txt").exists():
        raise MissingError(f"{platform.id} has no manifest", "baselines to make evidence from", "use --evidence DIR")
    for name in platform.baseline_files:
        if (folder / name).is_file() and name != "waivers.toml":
            (out / gate.JUDGED_WITH / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, out / gate.JUDGED_WITH / name)
    properties: dict[str, dict[str, str]] = {}
    path = folder / platform.id / baselines.LOSS_FILE
    loss = baselines.load_loss(path, platform.id).rows if path.exists() else []
    for case in dict.fromkeys(row.case for row in loss):
        row = baselines.reference_run([row for row in loss if row.case == case])
        if row is not None:
            properties[row.test] = {"loss_file": _write(out, f"losses/{case}.json", _loss_file(row))}
    triton = ""
    for arch in platform.codegen_archs:
        path = folder / arch / baselines.CODEGEN_FILE
        blocks = baselines.load_codegen(path, arch).blocks if path.exists() else []
        for kernel in blocks[-1].rows if blocks else []:
            triton = blocks[-1].triton
            name = _write(out, f"isa/{kernel.case}.json", _isa_file(kernel, triton))
            properties[kernel.test_id] = {"isa_file": name}
    ids = manifest.read(folder / platform.id / "manifest.txt")
    suites = [suite for suite in platform.suites if any(test_id.startswith(f"{suite}/") for test_id in ids)]
    _write(out, gate.RUN_FILE, _run_file(platform, suites, triton))
    with JournalWriter(out / JOURNAL_FILE) as journal:
        for suite in suites:
            mine = [test_id for test_id in ids if test_id.startswith(f"{suite}/")]
            journal.write("process-start", suite=suite, attempt=1, argv=["pytest"], time=1.0)
            journal.write("session", run_id=RUN_ID, suite=suite, pid=1, time=2.0)
            journal.write("collected", suite=suite, ids=mine)
            for test_id in mine:
                journal.write("start", suite=suite, id=test_id, time=3.0)
                for phase in ("setup", "call", "teardown"):
                    extra = {"properties": properties[test_id]} if phase == "call" and test_id in properties else {}
                    event = {"phase": phase, "outcome": "passed", "seconds": 0.001, **extra}
                    journal.write("phase", suite=suite, id=test_id, **event)
            journal.write("session-end", suite=suite, rc=0)
            end = {"rc": 0, "signal": None, "killed_by": None, "seconds": 1.0, "pid": 1}
            journal.write("process-end", suite=suite, attempt=1, **end)
            (out / "logs").mkdir(exist_ok=True)
            (out / "logs" / f"{suite}.log").write_text("rebuilt from baselines\n", encoding="ascii")
    junit.write(gate.judge(out), gate.read_run(out), out / "junit.xml")
    return out


def _write(out: Path, name: str, content: Mapping[str, Any]) -> str:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(json.dumps(content), encoding="utf-8")
    return name


def _loss_file(row: baselines.LossRun) -> dict[str, Any]:
    series = zip(row.loss, row.grad_norm, row.saturated, row.nan, strict=True)
    keys = ("loss", "grad_norm", "saturated", "nan")
    steps = [{"step": n, **dict(zip(keys, values, strict=True))} for n, values in enumerate(series, start=1)]
    same = ("case", "config_hash", "config", "recipe", "format", "arch", "seed", "nudge", "threads", "digests")
    return {"schema": 1, **{key: getattr(row, key) for key in same}, "versions": {}, "steps": steps}


def _isa_file(row: baselines.CodegenRow, triton: str) -> dict[str, Any]:
    same = ("case", "arch", "format", "kernel", "config", "facts", "listing_hash")
    return {"schema": 1, "triton": f"{triton}.0", **{key: getattr(row, key) for key in same}}


def _run_file(platform: Platform, suites: Sequence[str], triton: str) -> dict[str, Any]:
    machine: dict[str, Any] = {"platform": platform.id, "vendor": platform.vendor, "arch": platform.arch}
    machine |= {"target": platform.arch, "reason": "rebuilt", "simulated": False, "device_name": platform.id}
    machine |= {"gpus": 0, "memory_gib": None, "e4m3": None, "native_fp8_matmul": None, "versions": {}, "raw": {}}
    return {
        "schema": gate.SCHEMA,
        "run_id": RUN_ID,
        "platform": platform.id,
        "arch": platform.arch,
        "suites": list(suites),
        "case": None,
        "policy": gate.POLICIES[0],
        "commit": None,
        "versions": {"triton": f"{triton}.0"} if triton else {},
        "capabilities": machine,
        "started": "2026-01-01T00:00:00+00:00",
        "attempts": [],
    }
