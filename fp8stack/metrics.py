"""What a training step reports: code counts, gradient digests, and the JSON lines they are written to.

Saturation and NaN counts are read off the FP8 codes themselves, after quantisation, so they also see a fault in the
cast. With an amax-derived scale some codes at +-MAX are normal (the amax itself rounds there): a few in a thousand. A
format whose maximum is wrong shows as many times that.

Each rank counts what it quantises: codes of its own tokens, and those of every weight, which it gathers whole. Summed
over ranks, activations and gradients count once and weights once a rank. So counts of runs on different numbers of
ranks differ by themselves, and only those on equal numbers can be compared.

A gradient digest is four float64 numbers a parameter: norm, mean, and the dot products with two vectors of random
signs. A dot with random signs has the expectation 0 and the standard deviation of the norm, so two gradients with
equal norm and both dots within a small fraction of it are equal up to that fraction with high probability; unlike a
hash it moves continuously. A sign comes from the parameter's name and the element's place: it is drawn where it is
used, is not stored, and depends on no order or layout.

Not here: throughput and utilisation.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class CodeTable(Protocol):
    """What is read of an FP8 format (formats.Format has it): the bytes that are no finite number."""

    @property
    def name(self) -> str: ...
    @property
    def nan_codes(self) -> tuple[int, ...]: ...
    @property
    def inf_codes(self) -> tuple[int, ...]: ...


@torch.library.custom_op("fp8stack::count_codes", mutates_args=("total",))
def _count_codes(codes: torch.Tensor, masks: torch.Tensor, total: torch.Tensor) -> None:
    """total (2,) += how many of `codes` (uint8) each row of `masks` (int64 (2, 256)) marks.

    An op of its own, so that activation checkpointing can keep it from running again in the recomputed forward.
    """
    codes = codes.reshape(-1)
    if codes.device.type == "cpu":
        total += masks @ torch.bincount(codes, minlength=256)
    else:  # bincount synchronises on a GPU; a gather from the table does not
        total += masks.to(torch.uint8)[:, codes.int()].sum(dim=1, dtype=torch.int64)


class CodeCounter:
    """Counts codes at +-MAX and NaN codes over everything that is quantised between two calls of `take` or `drain`.

    Accumulates on the device of the codes, which must stay one: `observe` reads nothing back, `take` synchronises. The
    forward and the backward pass have totals of their own: a compiled graph may change a tensor in one of them only.
    """

    def __init__(self) -> None:
        self._masks: dict[str, torch.Tensor] = {}
        self.totals: list[torch.Tensor] = []  # of the forward and of the backward pass, int64 (2,) each

    def prepare(self, device: torch.device, *tables: CodeTable) -> None:
        """Allocate for codes of these formats on `device`; `observe` does it too, but cannot in a compiled graph."""
        for table in tables:
            self._masks[table.name] = _masks(table).to(device)
        if not self.totals:
            self.totals = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2)]

    def observe(self, codes: torch.Tensor, table: CodeTable, backward: bool = False) -> None:
        """Add `codes` (any shape, one byte an element) to the counts."""
        if table.name not in self._masks:
            self.prepare(codes.device, table)
        _count_codes(codes.detach().view(torch.uint8), self._masks[table.name], self.totals[int(backward)])

    def take(self) -> tuple[int, int]:
        """(codes at +-MAX, NaN codes) since the last call; starts again from zero."""
        if not self.totals:
            return 0, 0
        saturated, nan = drain([self])[0].tolist()
        return saturated, nan


@torch.no_grad()
def drain(counters: Sequence[CodeCounter]) -> torch.Tensor:
    """`take` of many counters, all of which have counted: int64 (counters, 2) on their device, nothing read back."""
    totals = [total for counter in counters for total in counter.totals]
    counted = torch.stack(totals).view(-1, 2, 2).sum(dim=1)
    torch._foreach_zero_(totals)
    return counted


def _masks(table: CodeTable) -> torch.Tensor:
    """int64 (2, 256): row 0 marks the codes of +-MAX, row 1 the NaN codes.

    Below the sign bit codes are ordered like their values, so MAX is the last one that is neither NaN nor infinity. It
    is found so, and not from the format's `max`: a wrong maximum must not hide from its own count.
    """
    largest = max(code for code in range(0x80) if code not in table.nan_codes and code not in table.inf_codes)
    masks = torch.zeros(2, 256, dtype=torch.int64)
    masks[0, [largest, largest | 0x80]] = 1
    masks[1, list(table.nan_codes)] = 1
    return masks


PIECE = 1 << 20
"""Elements of a gradient that are digested at once; what a piece needs beside it is a few dozen bytes an element."""


class GradientDigests:
    """Digests of every parameter's gradient: {name: [norm, mean, dot1, dot2]}, computed in float64.

    A sharded gradient is gathered first, one parameter at a time: every rank gets the digests of world size 1. Beside
    that nothing is kept, and signs and float64 values exist of PIECE elements at a time.

    Args:
        model: whose gradients.
        signs: (name, index) -> int8 (2, n) of +1 and -1 on the device of `index`, int64 (n,): those elements of the
            two vectors of the parameter called `name`.
    """

    def __init__(self, model: nn.Module, signs: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._model, self._signs = model, signs

    def take(self) -> dict[str, list[float]]:
        """Digest the gradients as they are now. A parameter without a gradient is an error: it did not take part."""
        return dict(self._digests())

    def _digests(self) -> Iterator[tuple[str, list[float]]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                raise ValueError(f"parameter '{name}' has no gradient; expected all to take part; check the model")
            gradient = parameter.grad.detach()
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            yield name, self._digest(name, whole.reshape(-1))

    def _digest(self, name: str, gradient: torch.Tensor) -> list[float]:
        """[norm, mean, dot1, dot2] of a flat gradient."""
        sums = torch.zeros(4, dtype=torch.float64, device=gradient.device)  # of squares, of values, of the two products
        for start in range(0, gradient.numel(), PIECE):
            piece = gradient[start : start + PIECE].double()
            signs = self._signs(name, torch.arange(start, start + piece.numel(), device=piece.device))
            sums += torch.cat([piece.square().sum()[None], piece.sum()[None], signs.double() @ piece])
        squares, total, *dots = sums.tolist()
        return [math.sqrt(squares), total / gradient.numel(), *dots]


def write_whole(file: Path, text: str) -> None:
    """Write `file` so that a kill leaves what it held before or all of `text`: beside it, then by one rename."""
    beside = file.with_name(file.name + ".partial")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)


class MetricsError(RuntimeError):
    """A step that could not be written. The message is one line: what, expected, what next."""


class JsonLines:
    """One JSON object a line, flushed, to a file or a stream. Refuses NaN and infinity: they are not JSON."""

    def __init__(self, target: Path | TextIO, keep: int = 0) -> None:
        """target: a file, begun anew but for the lines of steps 1 ... `keep` that it holds; or an open stream."""
        self._owned = isinstance(target, Path)
        if isinstance(target, Path):
            lines = target.read_text(encoding="utf-8").splitlines() if keep and target.exists() else []
            write_whole(target, "".join(f"{line}\n" for line in lines if _step_of(line) <= keep))
            self._stream: TextIO = target.open("a", encoding="utf-8")
        else:
            self._stream = target

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. OSError where it cannot be: a full disk, a pipe that nobody reads."""
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")
        try:
            self._stream.flush()
        except OSError:
            # What is left in the buffer would be tried again, and be a second error, when the process ends.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            raise

    def close(self) -> None:
        """Close a file that was opened here; leave a stream open."""
        if self._owned:
            self._stream.close()


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a kill cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
