"""What holds of every launch, whatever it computes: no wait for the device, no compilation for a batch size, no index
that wraps at 2^31.

pytorch/ao#4069 lost about 100 device synchronisations a step to launches that read values back and were tuned anew for
each number of tokens. What the host does is seen without a GPU, here and in unit/test_specialisation.py; whether torch
and Triton then wait, and what they compile, is asked of a GPU. So are tensors of more than 2^31 elements, contiguous:
every index of input and output passes 2^31. (Views with few rows that are far apart are in each op's own file.)

Not here: what an op computes. It is compared with its reference where the first and the last rows decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fp8stack import _triton, formats
from fp8stack import device as devices
from fp8stack.kernels import (
    blockwise,
    cast,
    colwise,
    experts,
    mxfp8,
    rowwise,
    rowwise_and_colwise,
    rowwise_grouped,
    tensorwise,
    together,
)
from suites.cases import random_normal
from suites.compare import assert_bits_equal

MODULES = (
    *(blockwise, cast, colwise, experts, mxfp8, rowwise, rowwise_and_colwise, rowwise_grouped, tensorwise, together),
)
HIDDEN = 160
EXPERT_ROWS = 16
# What holds numbers where the other rows of a tensor are zero: first a whole block of any kind, last a part of one.
FIRST, LAST = 128, 16

Tensors = tuple[torch.Tensor, ...]
Pick = Callable[[torch.Tensor, int], torch.Tensor]


# --- the ops, one a row -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What of a result the first and last rows decide. pick: that, from the result and the number of rows of x.

    rest: what all other elements are, if x is zero there; None: there are no others.
    """

    pick: Pick
    rest: float | None


def _each(rows: int, rest: float, dim: int = 0) -> Part:
    """A result with an element along `dim` for so many rows each (those of padded groups begin where x's do)."""

    def pick(result: torch.Tensor, count: int) -> torch.Tensor:
        along, end = result.movedim(dim, 0), -(-count // rows)
        return torch.cat([along[: FIRST // rows], along[end - -(-LAST // rows) : end]])

    return Part(pick, rest)


CODES, SCALES = _each(1, rest=0.0), _each(1, rest=1.0)
ALL = Part(lambda result, count: result, rest=None)


def _tensor(x: torch.Tensor) -> Tensors:
    return (x,)


def _groups(x: torch.Tensor) -> Tensors:
    """Two groups of rows, all but the last ones and these."""
    return x, _offs(x, x.shape[0] - LAST, x.shape[0])


def _pair(x: torch.Tensor) -> Tensors:
    return (x, *_groups(x))


def _groups_of_columns(x: torch.Tensor) -> Tensors:
    """Two groups of columns, the first three and all others."""
    return x, _offs(x, 3, x.shape[1])


def _offs(x: torch.Tensor, *ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=x.device)


def _experts(x: torch.Tensor) -> Tensors:
    return (x.view(-1, EXPERT_ROWS, x.shape[1]),)


def _codes(x: torch.Tensor) -> Tensors:
    """The upper byte of each number, zero where x is."""
    return ((x.view(torch.int16) >> 8).to(torch.int8).view(torch.uint8),)


@dataclass(frozen=True)
class Launch:
    """An op: its name, itself, its reference, its tensors from x (rows, columns), and parts of its results in order.

    named: further arguments. keys: for how many keys a kernel may be compiled while x has any number of rows, as in
    unit/test_specialisation.py; None: x is a weight. turned: tokens are columns. fmt: None for the device's own e4m3.
    far: rows and columns of an x with more than 2^31 elements.
    """

    op: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[torch.Tensor], Tensors]
    parts: tuple[Part | None, ...]
    named: dict[str, Any] = field(default_factory=dict)
    keys: int | None = 1
    turned: bool = False
    fmt: str | None = None
    far: tuple[int, int] = (2**19 + LAST, 4096)

    def call(self, *tensors: torch.Tensor) -> Tensors:
        """The op's results, always as a tuple."""
        return self._results(self.function, tensors)

    def call_reference(self, *tensors: torch.Tensor) -> Tensors:
        """The reference's results, always as a tuple."""
        return self._results(self.reference, tensors)

    def _results(self, function: Callable[..., Any], tensors: Tensors) -> Tensors:
        fmt = self.fmt or devices.detect(tensors[0].device).arch.e4m3
        results = function(*tensors, fmt, **self.named)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def batch(self, tokens: int, device: str) -> Tensors:
        """Tensors for a number of tokens."""
        rows = tokens if self.keys is not None else 2 * EXPERT_ROWS
        shape = (HIDDEN, rows) if self.turned else (rows, HIDDEN)
        return self.inputs(torch.ones(shape, dtype=torch.bfloat16, device=device))


def _blockwise(unit: str, scales: Part, column_major: bool, keys: int) -> Launch:
    return Launch(
        *("quantize_blockwise", blockwise.quantize_blockwise, blockwise.quantize_blockwise_reference, _tensor),
        (CODES, scales),
        {"unit": unit, "column_major": column_major},
        keys=keys,
    )


def _mxfp8(dim: int, scales: Part, keys: int) -> Launch:
    return Launch(
        *("quantize_mxfp8", mxfp8.quantize_mxfp8, mxfp8.quantize_mxfp8_reference, _tensor),
        (CODES, scales),
        {"mode": "rceil", "dim": dim},
        keys=keys,
        fmt="e4m3fn",
    )


def _of(module: Any, op: str, inputs: Callable[[torch.Tensor], Tensors], *parts: Part | None, **more: Any) -> Launch:
    return Launch(op, getattr(module, op), getattr(module, f"{op}_reference"), inputs, parts, **more)


def _quantize_together(x: torch.Tensor, offs: torch.Tensor, fmt: str, reference: bool = False) -> Tensors:
    """Rows and columns of x, flat."""
    quantise = together.quantize_together_reference if reference else together.quantize_together
    found = quantise((x,), (x,), (), offs, fmt)
    return *found.rows[0], *found.columns[0], found.padded_offs


def _quantize_together_reference(x: torch.Tensor, offs: torch.Tensor, fmt: str) -> Tensors:
    return _quantize_together(x, offs, fmt, reference=True)


_OF_EXPERTS, _SCALES_OF_EXPERTS = _each(EXPERT_ROWS, rest=0.0), _each(EXPERT_ROWS, rest=1.0)

LAUNCHES: dict[str, Launch] = {
    "cast": _of(cast, "cast_saturating", _tensor, CODES),
    "decode": Launch("decode_codes", cast.decode_codes, formats.decode, _codes, (CODES,)),
    "tensorwise": _of(tensorwise, "quantize_tensorwise", _tensor, CODES, ALL),
    "tensorwise_column": _of(
        *(tensorwise, "quantize_tensorwise", _tensor, CODES, ALL), named={"column_major": True}, keys=2
    ),
    "tensorwise_both": _of(tensorwise, "quantize_tensorwise_both", _tensor, CODES, CODES, ALL, keys=2),
    "rowwise": _of(rowwise, "quantize_rowwise", _tensor, CODES, SCALES),
    "colwise": _of(colwise, "quantize_colwise_grouped", _groups, CODES, ALL, None),
    "colwise_pair": _of(colwise, "quantize_colwise_grouped_pair", _pair, CODES, ALL, CODES, ALL, None),
    # Rows of tokens are read 16 bytes, or words, or elements at a time, as their number allows.
    "rowwise_grouped": _of(
        *(rowwise_grouped, "quantize_rowwise_grouped", _groups_of_columns, CODES, _each(1, rest=1.0, dim=1), ALL),
        keys=3,
        turned=True,
        far=(2**12 + LAST, 2**19 + 16),
    ),
    "rowwise_and_colwise": _of(
        *(rowwise_and_colwise, "quantize_rowwise_and_colwise", _groups, CODES, SCALES, CODES, ALL, None)
    ),
    "together": Launch(
        *("quantize_together", _quantize_together, _quantize_together_reference, _groups),
        (CODES, SCALES, CODES, ALL, None),
    ),
    "experts": _of(experts, "quantize_experts", _experts, _OF_EXPERTS, _SCALES_OF_EXPERTS, keys=None),
    "experts_transposed": _of(
        *(experts, "quantize_experts_transposed", _experts, _OF_EXPERTS, _SCALES_OF_EXPERTS), keys=None
    ),
    "experts_both": _of(
        *(experts, "quantize_experts_both", _experts, *(_OF_EXPERTS, _SCALES_OF_EXPERTS) * 2), keys=None
    ),
    # Codes that leave transposed are stored 16 bytes at a time where 16 divides the number of tokens; and the scales of
    # mxfp8 columns as words where 4 divides their number.
    "blockwise_1x128": _blockwise("1x128", _each(1, rest=1.0), column_major=False, keys=1),
    "blockwise_128x1": _blockwise("128x1", _each(128, rest=1.0), column_major=True, keys=2),
    "blockwise_128x128": _blockwise("128x128", _each(128, rest=1.0), column_major=False, keys=1),
    "mxfp8_rows": _mxfp8(1, _each(1, rest=0.0), keys=1),
    "mxfp8_columns": _mxfp8(0, _each(32, rest=0.0, dim=1), keys=4),
}


def each_launch(word: str, tokens: bool = False) -> pytest.MarkDecorator:
    """Every op, or every op whose x has tokens, as a case."""
    chosen = {name: row for name, row in LAUNCHES.items() if row.keys is not None or not tokens}
    return pytest.mark.parametrize("row", [pytest.param(row, id=f"{name}-{word}") for name, row in chosen.items()])


# --- no wait for the device -------------------------------------------------------------------------------------------

# Methods of a tensor that give the host a number.
READS = (
    *("item", "tolist", "cpu", "numpy", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
)


@contextmanager
def nothing_read_back() -> Iterator[None]:
    """Every method of a tensor in READS raises, and so does torch.cuda.synchronize."""

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("the launch reads a value back to the host; expected none; leave it on the device")

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(torch.cuda, "synchronize", refuse)
        yield


@each_launch("reads-nothing")
def test_reads_nothing_back(row: Launch, device: str, call_op: Callable[..., Any]) -> None:
    """Checks, allocation and launch ask no tensor for a value."""
    if device == "cpu" and not _triton.INTERPRETING:
        pytest.skip("the reference runs here, which reads offs on the host; requires a GPU or TRITON_INTERPRET=1")
    tensors = row.batch(5, device)
    with nothing_read_back():
        with pytest.raises(AssertionError, match="reads a value back"):
            bool(tensors[0][0, 0])  # what follows would be seen
        call_op(row.op, row.call, *tensors)


@pytest.mark.requires(gpus=1)
@each_launch("no-sync")
def test_does_not_synchronise(row: Launch, device: str, call_op: Callable[..., Any]) -> None:
    """Once compiled, an op of any number of tokens makes torch wait for nothing."""
    batches = [row.batch(tokens, device) for tokens in (1, 17, 256, 1000)]
    for tensors in batches:
        row.call(*tensors)
    with nothing_read_back():
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                torch.ones(1, device=device).to("cpu")  # what follows would be seen
            for tensors in batches:
                call_op(row.op, row.call, *tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- no compilation for a batch size ----------------------------------------------------------------------------------

# 50 numbers of tokens with every remainder of 16, up to 1815.
TOKENS = range(2, 2 + 50 * 37, 37)


def compilations() -> dict[str, int]:
    """Kernel -> for how many keys this process has compiled it (Triton 3.6 to 3.9: an entry a key in each cache)."""
    kernels = {
        f"{module.__name__}.{name}": kernel
        for module in MODULES
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    return {name: sum(len(cache[0]) for cache in kernel.device_caches.values()) for name, kernel in kernels.items()}


@pytest.mark.requires(gpus=1)
@each_launch("compilations", tokens=True)
def test_compiles_for_no_number_of_tokens(row: Launch, device: str) -> None:
    """While the number of tokens takes 50 values, no kernel is compiled more often than it has kinds of access."""
    before = compilations()
    for tokens in TOKENS:
        row.call(*row.batch(tokens, device))
    after = compilations()
    assert any(after.values()), "no kernel was compiled; expected the op's; does a cache still hold an entry a key?"
    grown = {name: count - before[name] for name, count in after.items() if count - before[name] > row.keys}
    assert not grown, f"compiled anew for {len(TOKENS)} numbers of tokens: {grown}; expected at most {row.keys} each"


# --- no index that wraps ----------------------------------------------------------------------------------------------


def assert_first_and_last_rows(
    row: Launch, shape: tuple[int, int], seed: int, device: str, call_op: Callable[..., Any]
) -> None:
    """An op of an x that is zero but for its first and last rows gives what its reference gives of these alone."""
    __tracebackhide__ = True
    rows, columns = shape
    few = random_normal((FIRST + LAST, columns), torch.bfloat16, seed).to(device)
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    x[:FIRST], x[-LAST:] = few[:FIRST], few[FIRST:]
    results = call_op(row.op, row.call, *row.inputs(x))
    expected = row.call_reference(*row.inputs(few))
    for place, part in enumerate(row.parts):
        if part is None:  # where groups are
            continue
        result, wanted = (
            tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            for tensor in (results[place], expected[place])
        )
        picked = part.pick(result, rows)
        assert_bits_equal(part.pick(wanted, FIRST + LAST), picked, f"{row.op} result {place}, first and last rows")
        if part.rest is not None:
            found, in_rows = (int((tensor != part.rest).sum()) for tensor in (result, picked))
            assert found == in_rows, f"{row.op} result {place}: {found - in_rows} elements of other rows are written to"


@each_launch("first-and-last")
def test_first_and_last_rows(row: Launch, seed: int, device: str, call_op: Callable[..., Any]) -> None:
    """The next test at a size for everywhere: first and last rows stay what they are with others between."""
    assert_first_and_last_rows(row, (2 * FIRST + LAST, 40), seed, device, call_op)


@pytest.mark.usefixtures("large_memory")
@pytest.mark.requires(gpus=1, memory_gib=40)
@each_launch("past-2e31")
def test_elements_past_2e31(row: Launch, seed: int, device: str, call_op: Callable[..., Any]) -> None:
    """First and last rows of a contiguous tensor of more than 2^31 elements: no index of input or output wraps."""
    rows, columns = row.far
    assert rows * columns > 2**31
    assert_first_and_last_rows(row, row.far, seed, device, call_op)
