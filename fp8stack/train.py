"""The trainer: config -> device -> model -> FP8 conversion -> weights -> optimiser -> data -> loop -> JSON lines.

    python -m fp8stack.train --model llama3-tiny --recipe rowwise --steps 100 --seed 0 --out DIR

One readable path, no registry and no callbacks. A run is a pure function of its configuration and its arch: weights,
tokens and nudges come from integers (data.py), the order of operations is fixed, nothing reads the clock or torch's
generators, so a rerun on one machine gives the same bits.

Two machines may not, and a baseline must know how far apart two harmless runs may be. `--nudge i` makes a harmless
difference: it flips a mantissa bit of one in a thousand initial weights, chosen by i: the last one that bf16, the dtype
of the products, keeps. (The last bit of the float32 master is rounded away before the first product: such runs came
out identical to run 0, bit by bit.) So run i begins where a harmless change of an operation's order leads: a few
results in a thousand at the other bf16 neighbour. Run 0 is the configuration as it is.

A non-finite loss or gradient norm stops the run before the optimiser sees it. The step is then repeated with a watch
on every module (the run is deterministic, so it fails the same way) and the first module whose output, or failing
that whose gradient, is not finite is named. Normal steps pay nothing for this.

Exit codes: 0 done; 1 stopped by a non-finite value; 2 bad input (one line: what, expected, what next).

Not here yet: several processes (parallel.py), checkpoints, token files, compile, throughput accounting.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from fp8stack import device as devices
from fp8stack.data import GENERATOR_VERSION, Batch, SyntheticTokens, random_bits, random_signs
from fp8stack.linear import RECIPES, Conversion, convert_to_float8, wide_dtype
from fp8stack.metrics import CodeCounter, GradientDigests, JsonLines
from fp8stack.models import HIGH_PRECISION, MODELS, Transformer, model_named

BF16 = "bf16"
DIGEST_STEPS = (1, 2, 3)
IGNORED_LABEL = -100
# One in so many weights is nudged.
NUDGE_PERIOD = 1000
# The last mantissa bit of bf16, counted in float32.
NUDGED_BIT = 16
# float32 weight, gradient and two AdamW moments.
BYTES_A_PARAMETER = 16


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line: what, expected, what next."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite. `step` counts from 1; `module` is the first that produced it."""

    def __init__(self, step: int, what: str, module: str, how: str) -> None:
        super().__init__(
            f"step {step}: {what} is not finite; the first module that produced it is '{module}' ({how}); "
            "look at that module's inputs and weights, or lower the learning rate"
        )
        self.step, self.module = step, module


# -------------------------------------------------------------------------------------------------------- configuration
def _option(default: Any, told: str, hashed: bool = True) -> Any:
    """A field of TrainConfig: its default, what --help says of it, and whether it is part of the hash."""
    return field(default=default, metadata={"help": told, "hashed": hashed})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run. Fields above the line change its numerics and make up `hash`; others do not."""

    model: str = _option("llama3-tiny", f"one of: {', '.join(MODELS)}")
    recipe: str = _option(BF16, f"one of: {', '.join((BF16, *RECIPES))}")
    steps: int = _option(100, "optimiser steps")
    seed: int = _option(0, "of weights and text")
    batch: int = _option(8, "sequences a step")
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
    # ---- not in the hash
    nudge: int = _option(0, "which harmless change of the initial weights; 0: none", hashed=False)
    device: str = _option("auto", "auto (the GPU where there is one), cpu, cuda or cuda:N", hashed=False)

    def __post_init__(self) -> None:
        """Refuse what cannot run, with one line that names the option."""
        for name, known in (("model", MODELS), ("recipe", (BF16, *RECIPES)), ("schedule", _SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} '{getattr(self, name)}' does not exist; expected one of: {', '.join(known)}; "
                    "choose one of these"
                )
        for name, low in (("steps", 1), ("batch", 1), ("seq", 1), ("warmup", 0), ("nudge", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**32:
                raise ConfigError(f"{name} is {value!r}; expected an integer from {low} to 2^32 - 1; correct --{name}")
        for name, low, high in (
            ("lr", 0.0, 1e3),
            ("min_lr_ratio", 0.0, 1.0),
            ("beta1", 0.0, 1.0 - 1e-9),
            ("beta2", 0.0, 1.0 - 1e-9),
            ("eps", 0.0, 1.0),
            ("weight_decay", 0.0, 1e3),
            ("clip", 1e-9, 1e9),
        ):
            value = getattr(self, name)
            if not (isinstance(value, float | int) and low <= value <= high):  # written so that NaN is refused
                option = name.replace("_", "-")
                raise ConfigError(
                    f"{name} is {value!r}; expected a number from {low:g} to {high:g}; correct --{option}"
                )

    def hashed(self) -> dict[str, Any]:
        """The fields that change numerics, the sizes behind the model's name and the generator's version."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("hashed", True)}
        return {**fields, "sizes": dataclasses.asdict(model_named(self.model)), "generator": GENERATOR_VERSION}

    @property
    def hash(self) -> str:
        """16 hex digits over `hashed()`: equal means the same computation was asked for."""
        text = json.dumps(self.hashed(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True)
class StepRecord:
    """One step (from 1). Loss in nats a token, before the update; gradient norm before clipping; FP8 code counts."""

    step: int
    loss: float
    grad_norm: float
    saturated: int
    nan: int


@dataclass
class Result:
    """A finished run."""

    config: TrainConfig
    arch: str
    arch_reason: str
    format: str  # the e4m3 format of the recipe, or bf16
    conversion: Conversion | None
    steps: list[StepRecord] = field(default_factory=list)
    digests: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    seconds: float = 0.0

    def loss_file(self, case: str) -> dict[str, Any]:
        """The content of losses/<case>.json: what the loss gate reads."""
        return {
            "schema": 1,
            "case": case,
            "config_hash": self.config.hash,
            "config": self.config.hashed(),
            "recipe": self.config.recipe,
            "format": self.format,
            "arch": self.arch,
            "seed": self.config.seed,
            "nudge": self.config.nudge,
            "threads": torch.get_num_threads(),
            "versions": {
                "torch": torch.__version__,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
                "aten_cpu_capability": os.environ.get("ATEN_CPU_CAPABILITY", ""),
            },
            "steps": [dataclasses.asdict(record) for record in self.steps],
            "digests": self.digests,
        }


# -------------------------------------------------------------------------------------------------------------- trainer
class Trainer:
    """A model, an optimiser and a stream of tokens, ready for step 1. `run` below is the usual way in.

    Raises ConfigError where the device is not here or too small, UnknownArch where it has no row of formats.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.device = _resolve_device(config.device)
        self.detected = devices.detect(self.device)
        _check_memory(config, self.device)
        size = model_named(config.model)
        with torch.device("meta"):
            self.model = Transformer(size)
        self.counter = CodeCounter()
        self.conversion: Conversion | None = None
        if config.recipe != BF16:
            self.conversion = convert_to_float8(
                self.model, config.recipe, filter=HIGH_PRECISION, detected=self.detected, counter=self.counter
            )
        self.model.to_empty(device=self.device)
        self.model.init_weights(config.seed)
        nudge_weights(self.model, config.nudge)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.data = SyntheticTokens(size.vocab, config.seq, config.seed)
        self.digests = GradientDigests(self.model, random_signs)

    def run(self, on_step: Callable[[StepRecord], None] | None = None) -> Result:
        """All steps of the configuration. NonFiniteError stops it."""
        result = Result(
            config=self.config,
            arch=self.detected.arch.name,
            arch_reason=self.detected.reason,
            format=self.conversion.e4m3 if self.conversion else BF16,
            conversion=self.conversion,
        )
        began = time.perf_counter()
        with _deterministic():
            for step in range(1, self.config.steps + 1):
                record = self._step(step, result)
                result.steps.append(record)
                if on_step is not None:
                    on_step(record)
        result.seconds = time.perf_counter() - began
        return result

    def _step(self, step: int, result: Result) -> StepRecord:
        batch = self.data.batch(step - 1, self.config.batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        value = _float32(loss.item())
        if not math.isfinite(value):
            raise self._blame(step, "the loss", batch)
        loss.backward()
        if step in DIGEST_STEPS:
            result.digests[str(step)] = self.digests.take()
        norm = global_norm(self.model)
        if not math.isfinite(norm):
            raise self._blame(step, "the gradient norm", batch)
        if norm > self.config.clip:
            torch._foreach_mul_([p.grad for p in self.model.parameters()], self.config.clip / norm)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimiser.step()
        saturated, nan = self.counter.take()
        return StepRecord(step, value, norm, saturated, nan)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Sum over valid tokens / number of valid tokens, () in the wide dtype."""
        tokens, labels = batch.tokens.to(self.device), batch.labels.to(self.device)
        logits = self.model(tokens)
        logits = logits.to(wide_dtype(logits))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        valid = (labels != IGNORED_LABEL).sum().clamp(min=1)  # a batch without a valid token has loss 0, not 0/0
        return total / valid

    def _blame(self, step: int, what: str, batch: Batch) -> NonFiniteError:
        """Repeat the step with a watch on every leaf module; name the first non-finite output or gradient."""
        found: list[tuple[str, str]] = []
        handles = []

        def watch(name: str, how: str) -> Callable[..., None]:
            def hook(module: torch.nn.Module, _: Any, value: Any) -> None:
                tensors = value if isinstance(value, tuple) else (value,)
                if not found and any(t is not None and not torch.isfinite(t).all() for t in tensors):
                    bad = sum(int((~torch.isfinite(p)).sum()) for p in module.parameters())
                    found.append((name, f"{how}; {bad} of its weights are not finite" if bad else how))

            return hook

        for name, module in self.model.named_modules():
            if name and not list(module.children()):
                handles.append(module.register_forward_hook(watch(name, "its output")))
                if not isinstance(module, torch.nn.Embedding):  # tokens have no gradient
                    handles.append(module.register_full_backward_hook(watch(name, "the gradient of its input")))
        try:
            self.optimiser.zero_grad(set_to_none=True)
            self._loss(batch).backward()
        finally:
            for handle in handles:
                handle.remove()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                found.append((name.rpartition(".")[0], f"the gradient of its {name.rpartition('.')[2]}"))
        return NonFiniteError(step, what, *(found[0] if found else ("loss", "every module is finite")))


def run(config: TrainConfig, on_step: Callable[[StepRecord], None] | None = None) -> Result:
    """Train `config` from scratch in this process; `on_step` gets each record as it is made.

    Raises as Trainer does, and NonFiniteError where a loss or a gradient norm is not finite.
    """
    return Trainer(config).run(on_step)


def _float32(value: float) -> float:
    """The nearest float32, as reported: the last bits of a float64 sum depend on its order."""
    return torch.tensor(value, dtype=torch.float32).item()


@torch.no_grad()
def global_norm(model: torch.nn.Module) -> float:
    """2-norm over all gradients: squares summed in float64, the root rounded to float32."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return _float32(torch.stack(squares).sum().sqrt().item())


@torch.no_grad()
def nudge_weights(model: torch.nn.Module, nudge: int) -> int:
    """Flip the last mantissa bit that bf16 keeps of one in a thousand float32 weights, chosen by `nudge` (0: none).

    Returns how many. Element j of a parameter is chosen when a hash of (nudge, name, j) is a multiple of 1000: integers
    only, so the same elements everywhere. Raises ValueError for a parameter that is not float32.
    """
    if nudge == 0:
        return 0
    flipped = 0
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter '{name}' is {parameter.dtype}; nudges flip bits of float32 masters; keep them float32"
            )
        chosen = random_bits(nudge, f"nudge/{name}", torch.arange(parameter.numel())) % NUDGE_PERIOD == 0
        bits = parameter.detach().view(torch.int32).view(-1)
        bits ^= chosen.to(device=bits.device, dtype=torch.int32) << NUDGED_BIT
        flipped += int(chosen.sum())
    return flipped


@contextmanager
def _deterministic():
    """Deterministic algorithms for the length of a run; the caller's settings afterwards.

    Without the filling of fresh memory that this mode adds by default: it took a quarter of a step on a CPU, and our
    own outputs are written in full.
    """
    algorithms, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _resolve_device(name: str) -> torch.device:
    """'auto' is the GPU if there is one; anything else must be usable here."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is unknown; expected auto, cpu, cuda or cuda:N; correct --device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device '{name}' is not here; this machine has {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    return device


def _check_memory(config: TrainConfig, device: torch.device) -> None:
    """Refuse a model, or a batch, whose tensors must exceed the memory of the device.

    Only what certainly exists is counted: weights, gradients and optimiser state; the logits of a step in bf16 and in
    the wide dtype; on a CPU, where attention is written out, the scores of one layer. A run that passes may still fail.
    """
    size = model_named(config.model)
    weights = size.parameters * BYTES_A_PARAMETER
    wide = 8 if device.type == "cpu" else 4
    step = config.batch * config.seq * size.vocab * (2 + wide)
    if device.type == "cpu":
        step += config.batch * size.heads * config.seq**2 * wide
    if device.type == "cpu":
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        have = torch.cuda.get_device_properties(device).total_memory
    if weights > have:
        raise ConfigError(
            f"model '{config.model}' needs {weights / 2**30:.1f} GiB for weights and optimiser; {device} has "
            f"{have / 2**30:.1f} GiB; choose a smaller model"
        )
    if weights + step > have:
        raise ConfigError(
            f"batch {config.batch} x seq {config.seq} needs {step / 2**30:.1f} GiB a step beside "
            f"{weights / 2**30:.1f} GiB of weights; {device} has {have / 2**30:.1f} GiB; lower --batch or --seq"
        )


# ------------------------------------------------------------------------------------------------------------------ CLI
class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors: one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for anything it cannot parse."""
        raise ConfigError(f"{message}; expected the options that --help lists; correct the command")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fp8stack.train",
        description="Train a model on a synthetic language; one JSON line a step (loss, gradient norm, code counts).",
        epilog=f"{devices.OVERRIDE}=gfx942 trains with the formats of that arch on any machine. Exit codes: 0 done, "
        "1 stopped by a non-finite value, 2 bad input.",
        allow_abbrev=False,
    )
    for entry in dataclasses.fields(TrainConfig):
        parser.add_argument(
            f"--{entry.name.replace('_', '-')}",
            type={"int": int, "float": float, "str": str}[str(entry.type)],
            default=entry.default,
            help=f"{entry.metadata['help']} (default: {entry.default})",
        )
    parser.add_argument("--out", type=Path, help="folder for metrics.jsonl; without it the lines go to stdout")
    return parser


def _open_metrics(out: Path | None) -> JsonLines:
    if out is None:
        return JsonLines(sys.stdout)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return JsonLines(out / "metrics.jsonl")
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}); expected a folder; choose another"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Parse, train, print. Returns the exit code."""
    try:
        arguments = vars(_parser().parse_args(argv))
        out = arguments.pop("out")
        trainer = Trainer(TrainConfig(**arguments))
        metrics = _open_metrics(out)
    except (ConfigError, devices.UnknownArch) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    config = trainer.config
    every = max(1, config.steps // 10)
    print(
        f"{config.model}, {config.recipe}, {config.steps} steps of {config.batch} x {config.seq} tokens on "
        f"{trainer.device}; arch {trainer.detected.arch.name} ({trainer.detected.reason}); config {config.hash}; "
        f"entropy floor {SyntheticTokens.entropy_floor_nats:.4f} nats",
        file=sys.stderr,
    )
    if trainer.conversion:
        print(trainer.conversion, file=sys.stderr)
    began = time.perf_counter()

    def report(record: StepRecord) -> None:
        seconds = time.perf_counter() - began
        metrics.write(
            {**dataclasses.asdict(record), "lr": learning_rate(config, record.step), "seconds": round(seconds, 3)}
        )
        if record.step == 1 or record.step % every == 0:
            print(
                f"step {record.step}/{config.steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
                f"saturated {record.saturated}  nan {record.nan}  {seconds:.1f} s",
                file=sys.stderr,
            )

    try:
        trainer.run(report)
    except NonFiniteError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    finally:
        metrics.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
