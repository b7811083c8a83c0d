"""FP8 training on AMD Instinct and NVIDIA GPUs.

    device.py    which chip, which formats, and the reason
    formats.py   the four FP8 formats and E8M0: encode, decode, saturating cast
    scaling.py   amax -> scale -> codes in plain torch: the specification
    kernels/     one family a file: reference, kernel, launcher
    linear.py    FP8 linear layers with their autograd

This file imports nothing, so `import fp8stack` needs neither torch, triton nor a GPU.
"""

__version__ = "0.1.0"
