"""What Inductor generates for blocks that we compile: no loop loads what the one before stored without a barrier."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._inductor import config, exc
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering

from fp8stack import inductor, parallel
from fp8stack.config import ConfigError

WIDTH = 4096  # more than one step of a reduction loop


class NoDriver:
    """A Triton driver that names a GPU and runs nothing: kernels are generated, and not compiled."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def norm_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of a norm beside a residual, its dy gathered from the rows of experts."""
    gathered = dy[rows].float() + dy[rows + 1].float()
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    weighted = gathered * weight.float()
    along = (weighted * wide).sum(-1, keepdim=True)
    dx = residual + (weighted * scale - wide * (along * scale.pow(3) / WIDTH)).to(torch.bfloat16)
    return dx, weighted, gathered


@pytest.fixture
def unmended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor as torch ships it, until the test ends."""
    monkeypatch.setattr(TritonKernel, "load", getattr(TritonKernel.load, "__wrapped__", TritonKernel.load))


def generated(monkeypatch: pytest.MonkeyPatch, **named: Any) -> str:
    """The source that Inductor writes for norm_backward on a GPU."""
    import triton

    sources: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver())
    torch._dynamo.reset()
    sizes = {"x": (64, WIDTH), "weight": (WIDTH,), "dy": (65, WIDTH), "residual": (64, WIDTH)}
    tensors = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes.values()]
    with (
        config.patch(cpu_backend="triton", force_disable_caches=True),
        pytest.raises(exc.InductorError, match="backend"),  # there is nothing to compile the kernel for
    ):
        torch.compile(norm_backward, fullgraph=True, dynamic=False, **named)(*tensors, torch.arange(64))
    torch._dynamo.reset()
    (source,) = sources
    return source


def unguarded(source: str) -> list[str]:
    """Pointers that a kernel stores to and loads from later, with no barrier in between."""
    found, stored = [], set()
    for line in source.splitlines():
        if "tl.debug_barrier()" in line or line.startswith("def "):
            stored.clear()
        for kind, pointer in re.findall(r"tl\.(store|load)\((\w+)", line):
            if kind == "store":
                stored.add(pointer)
            elif pointer in stored:
                found.append(pointer)
    return found


@pytest.mark.usefixtures("unmended")
def test_a_loop_waits_for_what_the_one_before_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own kernel has the race; ours has not, compiled by torch.compile or by the trainer."""
    assert unguarded(generated(monkeypatch)), "torch guards it by now: see whether fp8stack.inductor is still needed"
    assert not unguarded(generated(monkeypatch, options=inductor.options()))
    assert not unguarded(generated(monkeypatch, backend=parallel.Compiler("inductor")))


@pytest.mark.usefixtures("unmended")
def test_the_cache_tells_mended_graphs_apart() -> None:
    """What a cached graph is found by differs from that of torch's own options."""
    options = inductor.options()
    assert options["triton.mix_order_reduction"] is False
    with config.patch(options):
        ours = config.save_config_portable()
    assert ours != config.save_config_portable()
    assert options["unsafe_marked_cacheable_functions"] != config.unsafe_marked_cacheable_functions
    assert inductor.options() == options  # a second call adds nothing


@pytest.mark.usefixtures("unmended")
def test_a_torch_that_guards_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kernel: Any, name: str, index: Any) -> Any:
        return name in kernel.cse.invalidated_stores

    monkeypatch.setattr(TritonKernel, "load", load)
    assert "unsafe_marked_cacheable_functions" not in inductor.options()
    assert TritonKernel.load is load


@pytest.mark.usefixtures("unmended")
def test_an_unknown_code_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import common

    monkeypatch.setattr(common, "CSE", object)
    with pytest.raises(
        RuntimeError, match=r"code generator of torch .* expected torch 2\.10 to 2\.13; .*--compile none"
    ):
        inductor.options()
    with pytest.raises(ConfigError, match="--compile none"):  # one line of the trainer's
        parallel.Compiler("inductor")
