"""What launches compile for, over many token counts: a kernel must not be compiled anew because a batch is longer.

A launch makes a key of its arguments: constants as they are, of every other number whether it is 1, whether 16 divides
it and how many bits it needs, of every pointer whether 16 divides it (pytorch/ao#4069: about 100 device
synchronisations a step came from keys that followed the token count). The kernels are replaced by recorders here, so
nothing runs and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8stack import formats
from fp8stack.kernels import (
    blockwise,
    column_maxima,
    colwise,
    experts,
    grouped_kernel,
    grouped_mxfp8,
    launch,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    scaled_kernel,
    tensorwise,
    together,
)

TARGET = "sm_90"
FMT = formats.get("e4m3fn")
TOKENS = (*range(16, 16 * 26, 16), *(17, 100, 255, 1000, 1023, 4097, 5000, 8191), *(2048, 4096, 8192, 16384))
HIDDEN = 160
OFFS = torch.tensor([3, 3, 16], dtype=torch.int32)


class Recorder:
    """Stands for a kernel: collects the keys of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(kernel.arg_names)
        self.free = set(kernel.do_not_specialize or ())
        self.constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        self.keys: set[tuple[object, ...]] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, **named: Any) -> None:
        given = dict(zip(self.names, arguments, strict=False)) | named
        assert set(self.names) <= set(given), sorted(set(self.names) - set(given))
        self.keys.add(tuple((name, self._key(name, value)) for name, value in sorted(given.items())))

    def _key(self, name: str, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.data_ptr() % 16 == 0
        if name in self.constants or not isinstance(value, int) or isinstance(value, bool):
            return str(value)
        if name in self.free:
            return value.bit_length() > 31
        return value == 1, value % 16 == 0, value.bit_length() > 31


def _tensorwise(layout: str, hidden: int) -> Callable[[int], object]:
    row = launch.config(tensorwise.TENSORWISE_CONFIGS, TARGET, layout)
    return lambda tokens: tensorwise.launch_tensorwise(_x(tokens, hidden), FMT, False, None, layout, row, TARGET)


def _x(tokens: int, hidden: int) -> torch.Tensor:
    return torch.empty((tokens, hidden), dtype=torch.bfloat16)


def _blockwise(unit: str, column_major: bool, turned: bool = False) -> Callable[[int], object]:
    def call(tokens: int) -> object:
        x = _x(tokens, HIDDEN).t() if turned else _x(tokens, HIDDEN)
        return blockwise.launch_blockwise(x, FMT, unit, column_major, False, None, TARGET)

    return call


def _mxfp8(dim: int) -> Callable[[int], object]:
    return lambda tokens: mxfp8.launch_mxfp8(_x(tokens, HIDDEN), FMT, "floor", dim, None, TARGET)


def _rowwise(tokens: int) -> object:
    row = launch.config(rowwise.ROWWISE_CONFIGS, TARGET, rowwise.size_class(HIDDEN))
    return rowwise.launch_rowwise(_x(tokens, HIDDEN), FMT, True, row, TARGET)


def _colwise(pair: bool, turned: bool = False) -> Callable[[int], object]:
    row = launch.config(colwise.COLWISE_CONFIGS, TARGET, colwise.size_class(OFFS.shape[0]))

    def call(tokens: int) -> object:
        x = _x(HIDDEN, tokens).t() if turned else _x(tokens, HIDDEN)
        if pair:
            return colwise.launch_colwise_grouped_pair(x, x[:, ::2], OFFS, FMT, True, 16, row, TARGET)
        return colwise.launch_colwise_grouped(x, OFFS, FMT, True, 16, row, TARGET)

    return call


def _rowwise_grouped(tokens: int) -> object:
    row = launch.config(rowwise_grouped.ROWWISE_GROUPED_CONFIGS, TARGET, rowwise_grouped.size_class(OFFS.shape[0]))
    return rowwise_grouped.launch_rowwise_grouped(_x(HIDDEN, tokens), OFFS, FMT, True, 16, row, TARGET)


def _grouped(in_rows: bool, fp8: bool) -> Callable[[int], object]:
    """A forward or weight-gradient GEMM of 3 experts, HIDDEN by 96, of so many tokens (padded for FP8 gradients)."""
    dtype = FMT.dtype if fp8 else torch.bfloat16
    row = launch.config(
        grouped_kernel.GROUPED_CONFIGS, TARGET, grouped_kernel.size_class(in_rows, "fp8" if fp8 else "bf16")
    )

    def call(tokens: int) -> object:
        if in_rows:
            a, b = torch.empty(tokens, HIDDEN), torch.empty(3, 96, HIDDEN).transpose(1, 2)
            scales = torch.empty(tokens), torch.empty(3, 96)
        else:
            m = (tokens + 45) // 16 * 16 if fp8 else tokens
            a, b = torch.empty(96, m), torch.empty(HIDDEN, m).t()
            a, b = (a, b) if fp8 else (a.t().contiguous().t(), b.contiguous())
            scales = torch.empty(3, 96), torch.empty(3, HIDDEN)
        operands = (a.to(dtype), b.to(dtype), *(scales if fp8 else (None, None)), OFFS)
        return grouped_kernel.launch_grouped(*operands, torch.bfloat16, 16 if fp8 else 1, False, row, TARGET)

    return call


def _scaled(scales: str, gradient: bool) -> Callable[[int], object]:
    """An output or weight-gradient GEMM, HIDDEN by 96, of so many tokens, padded to 16 where they are contracted."""
    row = launch.config(scaled_kernel.SCALED_CONFIGS, TARGET, scaled_kernel.size_class(scales, wide=False))
    shared = 1 if gradient or scales != "block" else 128

    def call(tokens: int) -> object:
        m, n, k = (96, HIDDEN, -(-tokens // 16) * 16) if gradient else (tokens, 96, HIDDEN)
        a, b = torch.empty(m, k).to(FMT.dtype), torch.empty(n, k).to(FMT.dtype).t()
        if scales == "after":
            inverse = torch.empty(m), torch.empty(n)
        elif scales == "block":
            inverse = torch.empty(m, -(-k // 128)), torch.empty(-(-n // shared), -(-k // 128))
        else:
            inverse = tuple(torch.empty((rows, -(-k // 32)), dtype=torch.uint8) for rows in (m, n))
        options = (torch.bfloat16, None, scales, shared, False, True, row, TARGET)
        return scaled_kernel.launch_scaled(a, b, *inverse, *options)

    return call


def _rowwise_and_colwise(turned: bool = False) -> Callable[[int], object]:
    classes = rowwise_and_colwise.size_class(OFFS.shape[0], HIDDEN, torch.bfloat16)
    row = launch.config(rowwise_and_colwise.ROWWISE_AND_COLWISE_CONFIGS, TARGET, classes)

    def call(tokens: int) -> object:
        x = _x(HIDDEN, tokens).t() if turned else _x(tokens, HIDDEN)
        return rowwise_and_colwise.launch_rowwise_and_colwise(x, OFFS, FMT, True, 16, row, TARGET)

    return call


def _together(tokens: int) -> object:
    """Both passes of a product: rows and columns of tokens, weights by rows, and transposed."""
    row = launch.config(together.TOGETHER_CONFIGS, TARGET, colwise.size_class(OFFS.shape[0]))
    x, w = _x(tokens, HIDDEN), torch.empty((3, 96, HIDDEN), dtype=torch.bfloat16)
    dy = _x(tokens, 96)
    together.launch_together((x, w, w), (x,), (), OFFS, FMT, True, 16, row, TARGET)
    return together.launch_together((x, x), (dy, dy, x), (w, w), OFFS, FMT, True, 16, row, TARGET)


def _grouped_mxfp8(in_rows: bool) -> Callable[[int], object]:
    """As _grouped; tokens of a gradient are padded to 128."""
    row = launch.config(grouped_mxfp8.GROUPED_MXFP8_CONFIGS, TARGET, "rows" if in_rows else "contraction")

    def call(tokens: int) -> object:
        if in_rows:
            a, b = torch.empty(tokens, HIDDEN), torch.empty(3, 96, HIDDEN).transpose(1, 2)
            scales = torch.empty(tokens, HIDDEN // 32), torch.empty(3, 96, HIDDEN // 32)
        else:
            m = (tokens + 3 * 127) // 128 * 128
            a, b = torch.empty(96, m), torch.empty(HIDDEN, m).t()
            scales = torch.empty(96, m // 32), torch.empty(HIDDEN, m // 32)
        codes, byte = (x.to(torch.float8_e4m3fn) for x in (a, b)), (x.to(torch.uint8) for x in scales)
        return grouped_mxfp8.launch_grouped_mxfp8(
            *codes, *byte, OFFS, torch.bfloat16, 1 if in_rows else 128, row, TARGET
        )

    return call


# Case -> call, and how many keys a kernel may have. Codes whose rows are tokens long are stored 16 bytes wide where 16
# divides their number: two keys. Rows of tokens are also read as words where two divides it: three. MXFP8 writes its
# scales as words where four divide the blocks: four. A product that contracts tokens masks its last step unless they
# are whole steps: two; and reads E8M0 scales as words where four divide the blocks of whole steps: three.
CASES: dict[str, tuple[Callable[[int], object], int]] = {
    "rowwise": (_rowwise, 1),
    "tensorwise-row": (_tensorwise("row", HIDDEN), 1),
    "tensorwise-row-odd": (_tensorwise("row", 100), 1),
    "tensorwise-column": (_tensorwise("column", HIDDEN), 2),
    "tensorwise-both": (_tensorwise("both", HIDDEN), 2),
    "blockwise-1x128": (_blockwise("1x128", False), 1),
    "blockwise-128x128": (_blockwise("128x128", False), 1),
    "blockwise-128x1": (_blockwise("128x1", True), 2),
    "blockwise-transposed": (_blockwise("1x128", False, turned=True), 2),
    "colwise": (_colwise(pair=False), 1),
    "colwise-transposed": (_colwise(pair=False, turned=True), 1),
    "colwise-pair": (_colwise(pair=True), 1),
    "rowwise-grouped": (_rowwise_grouped, 3),
    "grouped-rows": (_grouped(in_rows=True, fp8=True), 1),
    "grouped-contraction": (_grouped(in_rows=False, fp8=True), 1),
    "grouped-bf16-rows": (_grouped(in_rows=True, fp8=False), 1),
    "grouped-bf16-contraction": (_grouped(in_rows=False, fp8=False), 1),
    "rowwise-and-colwise": (_rowwise_and_colwise(), 1),
    "rowwise-and-colwise-transposed": (_rowwise_and_colwise(turned=True), 1),
    **{f"scaled-{name}-rows": (_scaled(name, gradient=False), 1) for name in ("after", "block", "bytes")},
    "scaled-after-contraction": (_scaled("after", gradient=True), 2),
    "scaled-block-contraction": (_scaled("block", gradient=True), 2),
    "scaled-bytes-contraction": (_scaled("bytes", gradient=True), 3),
    "together": (_together, 1),
    "grouped-mxfp8-rows": (_grouped_mxfp8(in_rows=True), 1),
    "grouped-mxfp8-contraction": (_grouped_mxfp8(in_rows=False), 1),
    "mxfp8-rows": (_mxfp8(1), 1),
    "mxfp8-columns": (_mxfp8(0), 4),
}


@pytest.mark.parametrize(
    ("call", "most"), [pytest.param(*case, id=f"specialisation-{name}") for name, case in CASES.items()]
)
def test_tokens_do_not_specialise(call: Callable[[int], object], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over dozens of token counts each kernel is compiled for one key, or for as many as the case says."""
    recorders = []
    for module in (
        rowwise,
        tensorwise,
        blockwise,
        mxfp8,
        colwise,
        rowwise_grouped,
        rowwise_and_colwise,
        together,
        grouped_kernel,
        scaled_kernel,
        grouped_mxfp8,
    ):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and hasattr(kernel, "arg_names"):  # and no module
                recorders.append(Recorder(kernel))
                monkeypatch.setattr(module, name, recorders[-1])
    for tokens in TOKENS:
        call(tokens)
    counts = [len(recorder.keys) for recorder in recorders if recorder.keys]
    assert counts, "nothing was launched"
    first, *others = max((sorted(recorder.keys) for recorder in recorders), key=len)
    varying = {part[0] for other in others for part in set(other) ^ set(first)}
    assert max(counts) <= most, f"{max(counts)} keys; these arguments follow the number of tokens: {sorted(varying)}"


@pytest.mark.parametrize("shape", [pytest.param((48, 64), id="specialisation-experts")])
def test_experts_are_weights(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert weights have no tokens: any number of experts is one key a kernel, for each of the ops with kernels."""
    recorders = {name: Recorder(kernel) for name, kernel in vars(experts).items() if name.endswith("_kernel")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(experts, name, recorder)
    transposed = launch.config(experts.TRANSPOSED_CONFIGS, TARGET, experts.size_class(shape[0]))
    both = launch.config(experts.BOTH_CONFIGS, TARGET, column_maxima.width_class(shape[1], torch.bfloat16))
    for count in (1, 2, 2, 4, 33, 64):
        w = torch.empty((count, *shape), dtype=torch.bfloat16)
        experts.launch_transposed(w, FMT, True, transposed, TARGET)
        experts.launch_both(w, FMT, True, both, TARGET)
    assert {name: len(recorder.keys) for name, recorder in recorders.items()} == dict.fromkeys(recorders, 1)
