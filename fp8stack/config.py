"""What decides a training run: one dataclass, its hash, and the learning rate that follows from it.

Two runs with equal hashes were asked for the same computation, whatever machine, number of ranks or way of saving
memory they used: that is what a baseline is keyed by. So a field is either in the hash (it changes numbers) or not (it
changes where and how they are computed: device, ranks, workers, activation checkpointing, which recomputes the same
bits). A field added after curves were recorded joins the hash only when it is set: at its default a configuration means
what it meant before, and keeps its hash.

`batch` counts sequences a step over *all* ranks and microbatches, so the number of ranks is no part of the
computation.

Files (tokens, initial weights) enter the hash by their content, not by their name: size, first and last megabyte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8stack.data import GENERATOR_VERSION, SYNTHETIC, TOKEN_BYTES
from fp8stack.linear import RECIPES
from fp8stack.models import MODELS, DeepSeek, Sizes, model_named

BF16 = "bf16"
RECOMPUTE = ("none", "full", "selective")
# Whose quantisers have a chain of plain operators (kernels/unfused.py).
UNFUSED_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Whose weights can travel as FP8 codes (all_gather.py).
FP8_ALL_GATHER_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.one_weight_scale)
QUANTISATIONS = ("fused", "unfused")
COMPILERS = ("none", "inductor", "aot_eager")
_MEGABYTE = 1 << 20

ALWAYS, IF_SET, NEVER = "always", "if set", "never"


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line: what, expected, what next."""


def _option(default: Any, told: str, hashed: str = ALWAYS) -> Any:
    """A field of TrainConfig: its default, what --help says of it, and when it is part of the hash."""
    return field(default=default, metadata={"help": told, "hashed": hashed})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run. Fields above the line change its numerics and make up `hash`; others do not."""

    model: str = _option("llama3-tiny", f"one of: {', '.join(MODELS)}")
    recipe: str = _option(BF16, f"one of: {', '.join((BF16, *RECIPES))}")
    steps: int = _option(100, "optimiser steps")
    seed: int = _option(0, "of weights and text")
    batch: int = _option(8, "sequences a step, over all ranks")
    seq: int = _option(128, "tokens a sequence")
    lr: float = _option(3e-3, "learning rate at the end of the warm-up")
    min_lr_ratio: float = _option(0.1, "of lr, at the last step of the cosine")
    warmup: int = _option(10, "steps of linear warm-up")
    schedule: str = _option("cosine", "after the warm-up: cosine or constant")
    beta1: float = _option(0.9, "of AdamW")
    beta2: float = _option(0.95, "of AdamW")
    eps: float = _option(1e-8, "of AdamW")
    weight_decay: float = _option(0.1, "on matrices only")
    clip: float = _option(1.0, "largest global gradient norm")
    layers: int = _option(0, "trim the model to so many layers; 0: all of them", hashed=IF_SET)
    experts: int = _option(0, "trim each layer to so many routed experts; 0: all of them", hashed=IF_SET)
    dense_layers: int = _option(-1, "of a model with experts, how many layers have none; -1: its own", hashed=IF_SET)
    accumulate: int = _option(1, "microbatches that a rank's share of a step is cut into", hashed=IF_SET)
    compile: str = _option("none", f"torch.compile of each block: {', '.join(COMPILERS)}", hashed=IF_SET)
    data: str = _option(SYNTHETIC, f"{SYNTHETIC}, or a file of raw little-endian token ids", hashed=IF_SET)
    data_dtype: str = _option("uint16", f"of the ids in that file: {', '.join(TOKEN_BYTES)}", hashed=IF_SET)
    init_from: str = _option("", "folder of safetensors with Hugging Face names to start from", hashed=IF_SET)
    balance_rate: float = _option(1e-3, "how far a step moves the balancing bias of experts", hashed=IF_SET)
    deterministic: bool = _option(True, "the same bits in every run on one machine", hashed=IF_SET)
    # ---- not in the hash
    nudge: int = _option(0, "which harmless change of the initial weights; 0: none", hashed=NEVER)
    device: str = _option("auto", "auto (the GPU where there is one), cpu, cuda or cuda:N", hashed=NEVER)
    expert_parallel: int = _option(1, "ranks that share the experts of a layer between them", hashed=NEVER)
    recompute: str = _option("none", f"activation checkpointing: {', '.join(RECOMPUTE)}", hashed=NEVER)
    reshard: bool = _option(
        True,
        "free a block's gathered weights after its forward pass, and gather them again for its backward pass",
        hashed=NEVER,
    )
    fp8_all_gather: bool = _option(
        False, "gather weights as FP8 codes, of a recipe with one scale a weight; the same bits", hashed=NEVER
    )
    quantisation: str = _option(
        "fused",
        f"by kernels, or by chains of plain operators to compare with: {', '.join(QUANTISATIONS)}",
        hashed=NEVER,
    )
    workers: int = _option(0, "processes that read data ahead; 0: this one reads it", hashed=NEVER)
    code_counts: bool = _option(True, "count saturated and NaN codes, which reads every code again", hashed=NEVER)
    digests: bool = _option(True, "gradient digests of the first three steps", hashed=NEVER)

    def __post_init__(self) -> None:
        """Refuse what cannot run, with one line that names the option."""
        for name, known in (
            ("model", MODELS),
            ("recipe", (BF16, *RECIPES)),
            ("schedule", _SCHEDULES),
            ("compile", COMPILERS),
            ("recompute", RECOMPUTE),
            ("quantisation", QUANTISATIONS),
            ("data_dtype", TOKEN_BYTES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} '{getattr(self, name)}' does not exist; expected one of: {', '.join(known)}; "
                    "choose one of these"
                )
        for name, low in (
            ("steps", 1),
            ("batch", 1),
            ("seq", 1),
            ("accumulate", 1),
            ("expert_parallel", 1),
            ("warmup", 0),
            ("nudge", 0),
            ("seed", 0),
            ("layers", 0),
            ("experts", 0),
            ("dense_layers", -1),
            ("workers", 0),
        ):
            value, option = getattr(self, name), name.replace("_", "-")
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**32:
                raise ConfigError(
                    f"{name} is {value!r}; expected an integer from {low} to 2^32 - 1; correct --{option}"
                )
        for name, low, high in (
            ("lr", 0.0, 1e3),
            ("min_lr_ratio", 0.0, 1.0),
            ("beta1", 0.0, 1.0 - 1e-9),
            ("beta2", 0.0, 1.0 - 1e-9),
            ("eps", 0.0, 1.0),
            ("weight_decay", 0.0, 1e3),
            ("clip", 1e-9, 1e9),
            ("balance_rate", 0.0, 1.0),
        ):
            value, option = getattr(self, name), name.replace("_", "-")
            if not (isinstance(value, float | int) and low <= value <= high):  # written so that NaN is refused
                raise ConfigError(
                    f"{name} is {value!r}; expected a number from {low:g} to {high:g}; correct --{option}"
                )
        if self.quantisation == "unfused" and self.recipe not in (BF16, *UNFUSED_RECIPES):
            raise ConfigError(
                f"quantisation is unfused, and recipe '{self.recipe}' has kernels only; expected one of: "
                f"{', '.join(UNFUSED_RECIPES)}; choose another --recipe or --quantisation fused"
            )
        if self.fp8_all_gather and self.recipe not in FP8_ALL_GATHER_RECIPES:
            raise ConfigError(
                f"fp8_all_gather is set and recipe '{self.recipe}' has no single scale of a weight; expected one of: "
                f"{', '.join(FP8_ALL_GATHER_RECIPES)}; choose another --recipe or drop --fp8-all-gather"
            )
        size = model_named(self.model)
        if self.layers > size.layers:
            raise ConfigError(
                f"layers is {self.layers}; model '{self.model}' has {size.layers}, and --layers only trims; lower "
                "--layers"
            )
        for name, unset in (("experts", 0), ("dense_layers", -1)):
            if getattr(self, name) != unset and not isinstance(size, DeepSeek):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and model '{self.model}' has no experts; expected it only of a "
                    f"model that has; drop --{name.replace('_', '-')}"
                )
        if isinstance(size, DeepSeek):
            self._check_trimmed(size)
        if self.expert_parallel > 1:
            self._check_expert_parallel(self.size)

    def _check_trimmed(self, size: DeepSeek) -> None:
        layers = self.layers or size.layers
        if self.experts > size.experts or self.dense_layers > layers:
            name, most = ("experts", size.experts) if self.experts > size.experts else ("dense_layers", layers)
            raise ConfigError(
                f"{name} is {getattr(self, name)}; model '{self.model}' has {most}, and the option only trims; lower "
                f"--{name.replace('_', '-')}"
            )
        try:
            _ = self.size
        except ValueError as error:  # of Routing, which knows what divides what
            raise ConfigError(f"experts is {self.experts}: {error}; correct --experts") from None

    def _check_expert_parallel(self, size: Sizes) -> None:
        if not size.experts:
            raise ConfigError(
                f"expert_parallel is {self.expert_parallel} and model '{self.model}' has no experts; expected 1 there; "
                "drop --expert-parallel"
            )
        if size.experts % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel is {self.expert_parallel}, which does not divide the {size.experts} experts of model "
                f"'{self.model}'; expected a divisor; correct --expert-parallel"
            )

    @property
    def size(self) -> Sizes:
        """The sizes of the model, trimmed to `layers`, `experts` and `dense_layers`."""
        size = model_named(self.model)
        if self.layers:
            size = dataclasses.replace(size, layers=self.layers)
        if isinstance(size, DeepSeek) and self.experts:
            size = dataclasses.replace(size, routing=dataclasses.replace(size.routing, experts=self.experts))
        if isinstance(size, DeepSeek) and self.dense_layers >= 0:
            size = dataclasses.replace(size, dense_layers=self.dense_layers)
        return size

    def hashed(self) -> dict[str, Any]:
        """The fields that change numerics, the sizes behind the model's name and the generator's version."""
        fields: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value, when = getattr(self, entry.name), entry.metadata["hashed"]
            if when == ALWAYS or (when == IF_SET and value != entry.default):
                fields[entry.name] = fingerprint(value) if entry.name in _FILES else value
        return {**fields, "sizes": dataclasses.asdict(self.size), "generator": GENERATOR_VERSION}

    @property
    def hash(self) -> str:
        """16 hex digits over `hashed()`: equal means the same computation was asked for."""
        text = json.dumps(self.hashed(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# Fields that name a file or a folder, with the option that a message about them names.
_FILES = {"data": "--data", "init_from": "--init-from"}


def fingerprint(name: str) -> str:
    """16 hex digits of a file, or of the files of a folder: names within it, sizes, first and last megabyte of each.

    Raises ConfigError where it cannot be read.
    """
    digest = hashlib.sha256()
    path = Path(name)
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if path.is_dir() and file.suffix not in (".safetensors", ".json"):
                continue
            size = file.stat().st_size
            digest.update(f"{file.name if path.is_dir() else ''}/{size}/".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_MEGABYTE))
                stream.seek(max(0, size - _MEGABYTE))
                digest.update(stream.read(_MEGABYTE))
    except OSError as error:
        raise ConfigError(
            f"'{name}' cannot be read ({error.strerror}); expected a file or a folder that exists; correct "
            f"{' or '.join(_FILES.values())}"
        ) from None
    return digest.hexdigest()[:16]


def _cosine(config: TrainConfig, step: int) -> float:
    """Factor of lr at `step` (from 1): from 1 after the warm-up to min_lr_ratio at the last step."""
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


_SCHEDULES: dict[str, Callable[[TrainConfig, int], float]] = {"cosine": _cosine, "constant": lambda config, step: 1.0}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of `step` (from 1): linear warm-up, then the schedule."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    return config.lr * _SCHEDULES[config.schedule](config, step)
