"""What a training step reports: code counts, gradient digests, and the JSON lines they are written to.

Saturation and NaN counts are read off the FP8 codes themselves, after quantisation, so they also see a fault in the
cast. With an amax-derived scale some codes at +-MAX are normal (the amax itself rounds there): a few in a thousand. A
format whose maximum is wrong shows as many times that.

A gradient digest is four float64 numbers a parameter: norm, mean, and the dot products with two vectors of random
signs. A dot with random signs has the expectation 0 and the standard deviation of the norm, so two gradients with
equal norm and both dots within a small fraction of it are equal up to that fraction with high probability; unlike a
hash it moves continuously. The signs come from the parameter's name, so they need no storing and
never depend on order or layout.

Not here: throughput and utilisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import nn


class CodeTable(Protocol):
    """What is read of an FP8 format (formats.Format has it): the bytes that are no finite number."""

    @property
    def name(self) -> str: ...
    @property
    def nan_codes(self) -> tuple[int, ...]: ...
    @property
    def inf_codes(self) -> tuple[int, ...]: ...


class CodeCounter:
    """Counts codes at +-MAX and NaN codes over everything that is quantised between two calls of `take`.

    Accumulates on the device of the codes: on a GPU `observe` reads nothing back, `take` synchronises once.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._totals: dict[torch.device, torch.Tensor] = {}

    def observe(self, codes: torch.Tensor, table: CodeTable) -> None:
        """Add `codes` (any shape, one byte an element) to the counts."""
        data = codes.detach().view(torch.uint8).reshape(-1)
        key = (table.name, data.device)
        if key not in self._masks:
            self._masks[key] = _masks(table).to(data.device)
        if data.device not in self._totals:
            self._totals[data.device] = torch.zeros(2, dtype=torch.int64, device=data.device)
        if data.device.type == "cpu":
            counts = self._masks[key] @ torch.bincount(data, minlength=256)
        else:  # bincount synchronises on a GPU; a gather from the table does not
            counts = self._masks[key].to(torch.uint8)[:, data.int()].sum(dim=1, dtype=torch.int64)
        self._totals[data.device] += counts

    def take(self) -> tuple[int, int]:
        """(codes at +-MAX, NaN codes) since the last call; starts again from zero."""
        saturated = nan = 0
        for total in self._totals.values():
            counted = total.tolist()
            saturated, nan = saturated + counted[0], nan + counted[1]
            total.zero_()
        return saturated, nan


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


class GradientDigests:
    """Digests of every parameter's gradient: {name: [norm, mean, dot1, dot2]}, computed in float64.

    Args:
        model: whose gradients.
        signs: (name, count) -> int8 (2, count) of +1 and -1, the two vectors of the parameter called `name`.
    """

    def __init__(self, model: nn.Module, signs: Callable[[str, int], torch.Tensor]) -> None:
        self._model, self._draw = model, signs
        self._signs: dict[str, torch.Tensor] = {}

    def take(self) -> dict[str, list[float]]:
        """Digest the gradients as they are now. A parameter without a gradient is an error: it did not take part."""
        return dict(self._digests())

    def _digests(self) -> Iterator[tuple[str, list[float]]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                raise ValueError(f"parameter '{name}' has no gradient; expected all to take part; check the model")
            gradient = parameter.grad.detach().double().reshape(-1)
            if name not in self._signs:
                self._signs[name] = self._draw(name, gradient.numel()).to(gradient.device)
            dots = self._signs[name].double() @ gradient
            yield name, [gradient.norm().item(), gradient.mean().item(), *dots.tolist()]


class JsonLines:
    """One JSON object a line, flushed, to a file or a stream. Refuses NaN and infinity: they are not JSON."""

    def __init__(self, target: Path | TextIO) -> None:
        self._owned = isinstance(target, Path)
        self._stream: TextIO = target.open("w", encoding="utf-8") if isinstance(target, Path) else target

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close a file that was opened here; leave a stream open."""
        if self._owned:
            self._stream.close()
