"""Which module made a number that is not finite: a step run once more, with a watch on every leaf.

The step that failed is repeated (a run is deterministic, so it fails the same way). The first module, in the order of
execution, whose output is not finite is named; failing that the first whose gradient is. Ranks may see different
data: the earliest of any rank counts, and every rank learns it.

Compiled blocks are repeated without the compiler: a graph that is there already calls no hook of the modules in it, and
the first module after the blocks would be named in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8stack.all_gather import GatheredWeight
from fp8stack.models import held
from fp8stack.parallel import World


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite. `step` counts from 1; `module` is the first that produced it."""

    def __init__(self, step: int, what: str, module: str, how: str) -> None:
        super().__init__(
            f"step {step}: {what} is not finite; the first module that produced it is '{module}' ({how}); "
            "look at that module's inputs and weights, or lower the learning rate"
        )
        self.step, self.module = step, module


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """What is there of it. Of a weight gathered as FP8 codes that is the codes, all NaN where one master is."""
    return parameter.codes.float() if isinstance(parameter, GatheredWeight) else held(parameter)


def first_non_finite(model: nn.Module, world: World, again: Callable[[], Any]) -> tuple[str, str]:
    """(name of the module, how it is known) after `again`, a forward and backward pass of `model`. Collective."""
    found: list[tuple[int, str, str]] = []
    calls = 0

    def watch(name: str, how: str) -> Callable[..., None]:
        # What a look saved for a gradient, a recomputed block would lack: it is not looked at once one is found.
        @torch.no_grad()
        def hook(module: nn.Module, _: Any, value: Any) -> None:
            nonlocal calls
            calls += 1
            tensors = value if isinstance(value, tuple) else (value,)
            if not found and any(t is not None and not torch.isfinite(t).all() for t in tensors):
                bad = sum(int((~torch.isfinite(_values(p))).sum()) for p in module.parameters())
                found.append((calls, name, f"{how}; {bad} of its weights are not finite" if bad else how))

        return hook

    handles = []
    for name, module in model.named_modules():
        if name and not list(module.children()):
            handles.append(module.register_forward_hook(watch(name, "its output")))
            if not isinstance(module, nn.Embedding):  # tokens have no gradient
                handles.append(module.register_full_backward_hook(watch(name, "the gradient of its input")))
    try:
        with torch.compiler.set_stance("force_eager"):
            again()
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(held(parameter.grad)).all():
            owner, _, attribute = name.rpartition(".")
            found.append((calls + 1, owner, f"the gradient of its {attribute}"))
    first = [rank[0] for rank in world.gather(found) if rank]
    return min(first)[1:] if first else ("loss", "every module is finite")
