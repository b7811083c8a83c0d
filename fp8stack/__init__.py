"""FP8 training on AMD Instinct and NVIDIA GPUs.

    device.py    which chip, which formats, and the reason
    formats.py   the four FP8 formats and E8M0: encode, decode, saturating cast
    scaling.py   amax -> scale -> codes in plain torch: the specification
    kernels/     one family a file: reference, kernel, launcher
    linear.py    FP8 linear layers with their autograd, convert_to_float8
    models.py    Llama 3 and DeepSeek-V3 from one table of sizes
    parallel.py  ranks, FSDP2, activation checkpointing, compile
    train.py     the trainer; config.py decides a run, data.py its tokens, metrics.py what a step reports
    _triton.py   the only module that imports triton; compiles for an arch that is not here

This file imports nothing, so `import fp8stack` needs neither torch, triton nor a GPU.
"""

__version__ = "0.1.0"

import os as _os

# Read when torch is imported: torch's profiler, which counts matrix products in a training step, otherwise prints two
# lines of its own on stderr each time (seen with torch 2.13).
_os.environ.setdefault("KINETO_LOG_LEVEL", "99")
