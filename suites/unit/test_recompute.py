"""Activation checkpointing under FP8: what is quantised again is what was, and nothing as large as a weight is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack import linear, parallel
from fp8stack.kernels import launch
from fp8stack.models import HIGH_PRECISION, Llama, Transformer
from fp8stack.train import count_codes

LINEARS = 7  # of a block of Llama


def a_block(recipe: str, mode: str, width: int = 1) -> tuple[Transformer, tuple[torch.Tensor, torch.Tensor]]:
    """A model of one block that is `width` times as wide, converted and checkpointed, and its rotary table."""
    size = Llama(dim=64 * width, layers=1, heads=2 * width, kv_heads=width, ffn=96 * width, vocab=32)
    model = Transformer(size)
    model.init_weights(0)
    linear.convert_to_float8(model, recipe, filter=HIGH_PRECISION)
    parallel.checkpoint_activations(model.layers, mode, compiled=False)
    return model, model._rope_table(16, torch.device("cpu"))


def stream(batch: int, dim: int) -> torch.Tensor:
    """What a block gets: bf16 (batch, 16, dim)."""
    x = torch.randn(batch, 16, dim, generator=torch.Generator().manual_seed(0))
    return x.bfloat16().requires_grad_()


class Quantised(TorchDispatchMode):
    """Writes down every call of an op with `part` in its name: whether a block was recomputed, op, options, results."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.calls: list[tuple[bool, tuple[Any, ...], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.part in func._schema.name:
            options = tuple(arg for arg in args if not isinstance(arg, torch.Tensor))
            parts = found if isinstance(found, tuple) else ()
            results = [part.reshape(-1).view(torch.uint8).clone() for part in parts]
            self.calls.append((parallel.recomputing(), (func._schema.name, *options), results))
        return found

    def when(self, again: bool) -> list[tuple[tuple[Any, ...], list[torch.Tensor]]]:
        """Op and options, and results, of the calls of one kind."""
        return [(what, results) for recomputed, what, results in self.calls if recomputed == again]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8"])
def test_what_is_quantised_again(recipe: str, mode: str) -> None:
    """Recompute quantises what the forward pass did, by the same recipe, to the same bits, and counts no code twice.

    NVIDIA/TransformerEngine#24, #3284: recompute ran outside the FP8 context, or updated its state twice. The only
    state here is the counters.
    """
    model, table = a_block(recipe, mode)
    counters = count_codes(model, torch.device("cpu"))
    with Quantised("quantize") as quantised, Quantised("count_codes") as counted:
        y = model.layers[0](stream(2, 64), table)
        forward = quantised.when(False)
        assert len(forward) == 2 * LINEARS
        assert len(counted.calls) == 2 * LINEARS
        totals = [counter.totals[0].clone() for counter in counters.values()]
        y.float().square().sum().backward()
    again = quantised.when(True)
    assert [what for what, _ in again] == [what for what, _ in forward]
    for (what, bits), (_, expected) in zip(again, forward, strict=True):
        assert len(bits) == len(expected) >= 2, what
        assert all(map(torch.equal, bits, expected)), what
    assert counted.when(True) == []
    assert sum(int(total[0]) for total in totals) > 0
    assert all(map(torch.equal, (counter.totals[0] for counter in counters.values()), totals))


class WithAContext(nn.Module):
    """Two linears, of which the first is quantised without kernels: the context is opened inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with launch.unfused():
            y = self.one(x)
        return self.other(y)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_context_inside_a_block(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that the checkpointed function opens is open when it is recomputed, and only there.

    NVIDIA/TransformerEngine#24, #3284: a context was latched at another time than it was read.
    """
    blocks = nn.ModuleList([WithAContext()])
    linear.convert_to_float8(blocks, "rowwise")
    parallel.checkpoint_activations(blocks, mode, compiled=False)
    ran: list[tuple[bool, str, str]] = []
    monkeypatch.setattr(launch, "record", lambda op, what: ran.append((parallel.recomputing(), op, what)))
    y = blocks[0](torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True))
    plain = launch.implementation(torch.empty(0))
    forward = [what for _, op, what in ran if op == "quantize_rowwise"]
    assert forward == ["unfused", "unfused", plain, plain]
    ran.clear()
    y.sum().backward()
    again = [what for recomputed, op, what in ran if recomputed and op == "quantize_rowwise"]
    assert again == forward
    gradients = {what for recomputed, op, what in ran if not recomputed and "quantize" in op}
    assert gradients == {plain}


class Alive(TorchDispatchMode):
    """Every storage that a call inside it made, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    def bytes(self) -> int:
        """Of those that are still there."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise"])
def test_nothing_kept_grows_with_the_weights(recipe: str) -> None:
    """Twice as wide on half the rows: activations are as many, weights four times; selective keeps the same bytes.

    pytorch/torchtitan#820: abs(weight), on the list of what is saved, kept every layer's whole weight. What selective
    checkpointing keeps passes no hook of saved tensors, so here counts what a block's forward made and has not freed.
    Without checkpointing that grows: FP8 linears save the bf16 weight, which under FSDP2 is the gathered one.
    """
    kept = {}
    for mode in ("selective", "none"):
        for width in (1, 2):
            model, table = a_block(recipe, mode, width)
            x = stream(4 // width, 64 * width)
            with Alive() as alive:
                y = model.layers[0](x, table)
            kept[mode, width] = alive.bytes()
            assert y.grad_fn is not None
            weights = 2 * sum(weight.numel() for weight in model.layers[0].parameters() if weight.ndim == 2)
            if width == 1:
                small = weights
    assert kept["selective", 1] == kept["selective", 2] > 0
    assert kept["none", 2] - kept["none", 1] >= 0.9 * (weights - small)
