"""Inductor without two faults that give wrong gradients silently: the options and the mending for torch.compile.

**A missing barrier.** A Triton kernel of Inductor that reduces in a loop may store a tensor in one loop and load it in
the next. What one warp stored another may load, and nothing makes it wait: it reads what the memory held before
(pytorch/pytorch#190517, torch up to 2.13; on AMD GPUs triton-lang/triton#9887). In a DeepSeek block (torch 2.11, H200)
the gradient of the residual stream came out 300 times too large, or 1e35, another one in each run, while the loss was
right. `options` puts a barrier before such a loop, in every kernel that this process generates from then on.

**A fusion.** Sums over rows and over columns in one kernel (`triton.mix_order_reduction`, torch 2.10 and later) leave
parts of a gradient unwritten (pytorch/pytorch#190796, #193061). `options` turns it off.

Graphs in Inductor's cache that were generated without these are not used: both are part of the cache's key.
"""

from __future__ import annotations

import functools
from typing import Any


class UnknownGenerator(RuntimeError):
    """This torch generates kernels in a way that is not known here, so nothing says that gradients would be right."""


_BARRIER = "tl.debug_barrier()"
_MARK = "fp8stack: a barrier before a loop that loads what the last one stored"


def options() -> dict[str, Any]:
    """`options` of torch.compile for a model that trains: `torch.compile(model, options=inductor.options())`.

    The first call mends the code generator of this process. Raises UnknownGenerator for a torch that generates kernels
    another way. Known: 2.11 and 2.13, where a test reads the kernels; 2.10, by its source.
    """
    from torch._inductor import config

    found: dict[str, Any] = {}
    if _mend():
        known = config.unsafe_marked_cacheable_functions
        found["unsafe_marked_cacheable_functions"] = {**known, _MARK: "1"}  # of the cache's key
    if hasattr(config.triton, "mix_order_reduction"):
        found["triton.mix_order_reduction"] = False
    return found


def _mend() -> bool:
    """Let loads wait for stores of the loop before; False where torch sees to that itself."""
    import torch
    from torch._inductor.codegen import common, triton

    load = triton.TritonKernel.load
    if hasattr(load, "__wrapped__"):
        return True
    if "invalidated_stores" in load.__code__.co_names:
        return False
    if not hasattr(common.CSE(), "invalidated_stores"):
        raise UnknownGenerator(
            f"the code generator of torch {torch.__version__} is not one that fp8stack.inductor knows; expected torch "
            "2.10 to 2.13; use one of these, or --compile none"
        )

    @functools.wraps(load)
    def waiting(kernel: Any, name: str, index: Any) -> Any:
        # The loop that stored is in the body by now, and the one that loads is not yet.
        if name in kernel.cse.invalidated_stores:
            kernel.body.writeline(_BARRIER)
        return load(kernel, name, index)

    triton.TritonKernel.load = waiting
    return True
