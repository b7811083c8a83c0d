"""The command line of the trainer: an option a field of TrainConfig, whose words are its help, and a few about a run.

What is wrong with a command line is a ConfigError, one line, like every other bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fp8stack.command import Parser
from fp8stack.config import ConfigError, TrainConfig
from fp8stack.device import OVERRIDE


def parser() -> Parser:
    """The options of `python -m fp8stack.train`: a field of TrainConfig each, and what is done with a run."""
    options = Parser(
        ConfigError,
        prog="python -m fp8stack.train",
        description="Train a model, in one process or under torchrun; one JSON line a step (loss, gradient norm, code "
        "counts, speed, utilisation, matrix products).",
        epilog=f"{OVERRIDE}=gfx942 trains with the formats of that arch on any machine. Exit codes: 0 done, "
        "1 stopped by a non-finite value or by something that could not be written, 2 bad input, 130 interrupted.",
    )
    for entry in dataclasses.fields(TrainConfig):
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction}
            if str(entry.type) == "bool"
            else {"type": {"int": int, "float": float, "str": str}[str(entry.type)]}
        )
        told = f"{entry.metadata['help']} (default: {'none' if entry.default == '' else entry.default})"
        options.add_argument(f"--{entry.name.replace('_', '-')}", default=entry.default, help=told, **kind)
    options.add_argument(
        "--out", type=Path, help="folder for metrics.jsonl and checkpoints; without it lines go to stdout"
    )
    options.add_argument(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="save after each so many steps, and after the last; 0: no checkpoints (default: 0)",
    )
    options.add_argument("--keep", type=int, default=2, help="how many checkpoints stay (default: 2)")
    options.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in --out")
    options.add_argument("--export", type=Path, help="folder for the trained weights: safetensors, Hugging Face names")
    options.add_argument(
        "--profile", type=Path, help="folder for a Chrome trace of three steps and kernel time by class"
    )
    dry = options.add_argument_group("dry run", "what a run on any number of ranks does, without running it")
    dry.add_argument("--dry-run", action="store_true", help="print sizes, collectives, memory and FLOPs, and stop")
    dry.add_argument("--world-size", type=int, default=1, help="ranks of the dry run (default: 1)")
    dry.add_argument("--device-name", default="cpu", help="torch's name of the device to assume (default: cpu)")
    dry.add_argument("--topology", type=Path, help="TOML file of a cluster: adds a simulated weak-scaling table")
    dry.add_argument("--json", action="store_true", help="print the dry run as JSON")
    return options
