"""What a launch imports of others: imported once, by the process that the launches are forks of (processes.py).

Importing torch, its compiler and Triton takes seconds, as long as timing six rows does. CUDA must not be touched
meanwhile: a fork of a process that has touched it has no device. Inductor asks for one when it is imported, and is told
that there is; a launch that is a fork of the wrong process says so (launch.py).

Not here: anything of this checkout, so that a fork takes fp8stack from the tree that it is to time.
"""

from __future__ import annotations

import contextlib
import importlib
import os

MODULES = (
    "msgspec",
    "numpy",
    "triton.compiler",
    "triton.language",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch._dynamo.backends.inductor",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.triton",
    "torch._inductor.codegen.wrapper",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics",
)


def load() -> None:
    """Import them, those that there are."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers is no thing to fork
    import torch

    asks = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        for name in MODULES:
            with contextlib.suppress(ImportError):  # of another torch
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = asks


load()
