"""Named inputs: awkward shapes, contract rows, strided views, guarded memory. Every name is a part of a case id.

Awkward comes first: one element, a prime number of rows, widths that are no multiple of anything, no rows at all. A
contract row is an input whose right answer is known by rule: zeros, -0, NaN, Inf, subnormals, the exact maximum, an
amax at a power of two and one ulp to either side, an amax too small for its quotient.

Everything random is drawn on the CPU from a seed that the caller names, in float32, then rounded to the dtype: the same
input on every device. Not here: expected values (they come from the golden tables and the reference).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

# Element dtypes of the ops' inputs by the word that a case id uses.
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

FORMATS: tuple[str, ...] = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")

# Shapes (rows, columns) that run everywhere, for every format and dtype. Few rows: the interpreter is slow.
SHAPES: dict[str, tuple[int, int]] = {
    "1x1": (1, 1),
    "1x13": (1, 13),
    "3x17": (3, 17),
    "2x100": (2, 100),
    "2x127": (2, 127),
    "2x128": (2, 128),
    "2x129": (2, 129),
    "7x781": (7, 781),
    "5x1000": (5, 1000),
    "0x64": (0, 64),
    "0x1": (0, 1),
}

# Columns of real models, and one past what a program may hold in registers: they cross the classes of the launch
# tables.
WIDE_SHAPES: dict[str, tuple[int, int]] = {
    "2x2048": (2, 2048),
    "2x5120": (2, 5120),
    "1x7168": (1, 7168),
    "2x32769": (2, 32769),
}

# Prime rows, odd columns, more rows than an accelerator has multiprocessors. Slower than all others together in the
# interpreter: for the formats that the tests name.
BIG_SHAPES: dict[str, tuple[int, int]] = {"1823x781": (1823, 781)}

# Widths at which a masked tail without its fill value gave a wrong amax (ROCm/aiter#4288).
TAIL_WIDTHS: tuple[int, ...] = (1, 13, 17, 100, 127, 129)


# (rows, offs) of tensors whose rows are in groups. offs are cumulative ends, so a repeated one is an empty group; rows
# past the last end belong to none. Sizes that no multiple of 16 divides, and sizes that one does.
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "one": (40, (40,)),
    "one-of-one-row": (1, (1,)),
    "no-rows": (0, (0, 0)),
    "all-empty": (7, (0, 0, 0)),
    "empty-first": (37, (0, 0, 17, 37)),
    "empty-middle": (40, (17, 17, 17, 40)),
    "empty-last": (40, (17, 40, 40)),
    "all-but-one-empty": (41, (0, 0, 41, 41, 41)),
    "single-rows": (4, (1, 2, 3, 4)),
    "multiples-of-16": (80, (16, 48, 80)),
    "over-tile-edges": (35, (16, 34, 35)),
    "longer-than-the-mean": (250, (1, 2, 205, 205, 206, 238, 240, 250)),
    "tail": (140, (5, 21)),
    # Clamped, and made non-decreasing: what a router writes has been checked by nobody.
    "decreasing": (40, (20, 10, 30, 29)),
    "negative": (40, (-5, 8, -1, 40)),
    "too-large": (40, (8, 1000, 2**31 - 1)),
    "nothing-right": (9, (-(2**31), 2**31 - 1, -1)),
    # 33 groups: another size class of the launch tables, and one more than a power of two.
    "many": (70, (*range(1, 11), *[10] * 12, *range(11, 21), 70)),
}


def offsets(groups: str) -> torch.Tensor:
    """The offs of GROUPS, int32 (E,), on the CPU."""
    return torch.tensor(GROUPS[groups][1], dtype=torch.int32)


def random_normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Normal values on the CPU; rows differ in size by up to 2^+-``spread``, so that scaling units differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) > 1:
        exponents = (torch.rand((*shape[:-1], 1), generator=generator) * 2 - 1) * spread
        x = x * torch.exp2(exponents)
    return x.to(dtype)


def amax_at_the_ends(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """``x`` with a largest element, 8 times any other, in the last or, by turns, the first place along each of dims.

    dims: -1 for rows, -2 for columns. Where the largest has a twin nearby, a reduction that stops early or starts late
    finds that one, and with scales that are powers of two nothing shows.
    """
    x = x.clone()
    for dim in dims if x.numel() else ():
        units = x.movedim(dim, -1)
        largest = 8 * units.abs().amax(-1)
        units[..., 0::2, -1] = largest[..., 0::2]
        units[..., 1::2, 0] = -largest[..., 1::2]
    return x


def from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    """1-D tensor of ``dtype`` from unsigned bit patterns."""
    size = dtype.itemsize
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    top = 1 << 8 * size
    signed = [p if integer is torch.uint8 or p < top // 2 else p - top for p in patterns]
    return torch.tensor(signed, dtype=integer).view(dtype)


def next_up(value: float, dtype: torch.dtype) -> float:
    """The next value of ``dtype`` above a positive one that it holds exactly."""
    return float(_step(value, dtype, 1))


def next_down(value: float, dtype: torch.dtype) -> float:
    """The next value of ``dtype`` below a positive one that it holds exactly."""
    return float(_step(value, dtype, -1))


def _step(value: float, dtype: torch.dtype, by: int) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return (torch.tensor(value, dtype=torch.float64).to(dtype).view(integer) + by).view(dtype).to(torch.float64)


@dataclass(frozen=True)
class Rows:
    """A 2-D tensor whose every row is a named contract row."""

    names: tuple[str, ...]
    x: torch.Tensor


def contract_rows(dtype: torch.dtype, maximum: float, width: int, seed: int) -> Rows:
    """All contract rows for a format with this maximum as one tensor (rows, width) of ``dtype`` on the CPU.

    Each row is seeded noise scaled to an amax that stands at a seeded place, so a kernel cannot see it in lane 0 only.
    Rows of one kind stand between ordinary rows: what a NaN does to its neighbours shows.
    """
    generator = torch.Generator().manual_seed(seed)
    names: list[str] = []
    rows: list[torch.Tensor] = []

    def place() -> int:
        return int(torch.randint(width, (1,), generator=generator))

    def noise() -> torch.Tensor:
        return torch.rand(width, generator=generator, dtype=torch.float64) * 2 - 1

    def add(name: str, row: torch.Tensor) -> None:
        names.append(name)
        rows.append(row)

    def with_amax(name: str, amax: float, sign: float = 1.0) -> None:
        row = noise() * amax * 0.99
        row[place()] = sign * amax
        add(name, row)

    def with_value(name: str, *specials: float) -> None:
        row = noise()
        for special in specials:
            row[place()] = special
        add(name, row)

    add("ones", torch.ones(width, dtype=torch.float64))
    add("zeros", torch.zeros(width, dtype=torch.float64))
    add("negzeros", torch.full((width,), -0.0, dtype=torch.float64))
    add("mixed-zeros", torch.where(noise() < 0, -0.0, 0.0).to(torch.float64))
    add("ordinary", noise())
    with_value("nan", math.nan)
    add("all-nan", torch.full((width,), math.nan, dtype=torch.float64))
    with_value("inf", math.inf)
    with_value("neginf", -math.inf)
    with_value("inf-and-nan", math.inf, math.nan)
    add("after-nan", noise())
    add("minus-three", torch.full((width,), -3.0, dtype=torch.float64))
    with_amax("maximum", maximum)
    with_amax("neg-maximum", maximum, -1.0)
    with_amax("maximum-ulp-up", next_up(maximum, dtype))
    with_amax("maximum-ulp-down", next_down(maximum, dtype))
    for exponent in (-100, -20, 0, 3, 100):
        power = 2.0**exponent
        with_amax(f"amax-2e{exponent}", power)
        with_amax(f"amax-2e{exponent}-ulp-up", next_up(power, dtype))
        with_amax(f"amax-2e{exponent}-ulp-down", next_down(power, dtype))
        with_amax(f"amax-max-2e{exponent}", maximum * power)
        with_amax(f"amax-max-2e{exponent}-ulp-up", next_up(maximum * power, dtype))
        with_amax(f"amax-max-2e{exponent}-ulp-down", next_down(maximum * power, dtype))
    for name, amax in (("1e-6", 1e-6), ("1e-12", 1e-12), ("1e-20", 1e-20), ("1e-36", 1e-36), ("1e-38", 1e-38)):
        with_amax(f"amax-{name}", amax)
    cap = maximum * 2.0**-120  # below this amax the quotient passes 2^120 and is capped
    with_amax("amax-cap", cap)
    with_amax("amax-cap-ulp-up", next_up(cap, dtype))
    with_amax("amax-cap-ulp-down", next_down(cap, dtype))
    tiny = 2.0**-133  # the smallest bf16 subnormal, a float32 subnormal too
    with_amax("subnormal-amax", 2.0**-127)
    with_amax("smallest-subnormal-amax", tiny)
    row = torch.zeros(width, dtype=torch.float64)
    row[place()] = -tiny
    add("one-subnormal", row)
    with_amax("largest", float(torch.finfo(dtype).max))
    with_amax("amax-4.28125", 4.28125)
    row = noise() * 2.0**-14
    row[place()] = maximum
    add("subnormal-codes", row)
    row = noise() * 2.0**-40
    row[place()] = maximum
    add("underflow", row)
    add("last-ordinary", noise())
    return Rows(tuple(names), torch.stack(rows).to(torch.float32).to(dtype))


# --- strides and guards -----------------------------------------------------------------------------------------------

# The value around a view: it would win every amax, so an element read from outside shows in the scale.
GUARD = math.inf


@dataclass(frozen=True)
class Guarded:
    """A view inside a larger buffer whose every other element holds GUARD."""

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def assert_untouched(self) -> None:
        """Fail if the op wrote anything into its input or around it."""
        from suites.compare import assert_bits_equal

        __tracebackhide__ = True
        assert_bits_equal(self.before, self.buffer, what="input buffer after the op")


# How a 2-D view lies in its buffer: (rows before, row step, columns before, column step, columns after, transposed).
LAYOUTS: dict[str, tuple[int, int, int, int, int, bool]] = {
    "contiguous": (1, 1, 0, 1, 0, False),
    "row-pitch": (1, 1, 3, 1, 5, False),
    "every-other-row": (1, 2, 0, 1, 0, False),
    "every-third-column": (0, 1, 1, 3, 2, False),
    "transposed": (1, 1, 1, 1, 1, True),
}


def guarded(x: torch.Tensor, layout: str, device: str | torch.device = "cpu") -> Guarded:
    """``x`` (rows, columns) copied into a view of that layout, on ``device``, with guards around and between."""
    before_rows, row_step, before_columns, column_step, after_columns, transposed = LAYOUTS[layout]
    source = x.t() if transposed else x
    rows, columns = source.shape
    buffer = torch.full(
        (before_rows + rows * row_step + 1, before_columns + columns * column_step + after_columns),
        GUARD,
        dtype=x.dtype,
        device=device,
    )
    view = buffer[
        before_rows : before_rows + rows * row_step : row_step,
        before_columns : before_columns + columns * column_step : column_step,
    ]
    view.copy_(source.to(device))
    return Guarded(view.t() if transposed else view, buffer, buffer.clone())


def far_apart(x: torch.Tensor, pitch: int, device: str | torch.device, folder: Path) -> torch.Tensor:
    """``x`` (rows, columns) in a view with ``pitch`` elements from row to row, on ``device``.

    For rows whose offset passes 2^31 elements. On a CPU the buffer is a sparse file in ``folder``.
    """
    rows, columns = x.shape
    size = (rows - 1) * pitch + columns
    if torch.device(device).type == "cpu":
        path = folder / f"sparse-{rows}x{columns}-{pitch}"
        buffer = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
    else:
        buffer = torch.zeros(size, dtype=x.dtype, device=device)
    view = buffer.as_strided((rows, columns), (pitch, 1))
    view.copy_(x.to(device))
    return view


def poison_value(dtype: torch.dtype) -> float:
    """What torch writes into uninitialised memory in deterministic mode: NaN for floats, the maximum for integers."""
    return math.nan if dtype.is_floating_point else float(torch.iinfo(dtype).max)
