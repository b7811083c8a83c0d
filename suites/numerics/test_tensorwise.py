"""quantize_tensorwise: one scale for a whole 2-D tensor, bit by bit against the golden units and the reference.

The op has no kernel yet and runs its reference on every device (suites/conftest.py, REFERENCE_ONLY): until it has
one, the golden units are what decides here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels.tensorwise import quantize_tensorwise, quantize_tensorwise_reference
from suites.cases import DTYPES, FORMATS, LAYOUTS, SHAPES, contract_rows, from_bits, guarded, random_normal
from suites.compare import assert_bits_equal, assert_sqnr
from suites.numerics.golden import loader
from suites.numerics.thresholds import QUANTIZE_SQNR_DB, SIZE_CLASSES

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

MODES = {"plain": False, "pow2": True}
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; the input may lie on the CPU."""

    def call(x: torch.Tensor, fmt: str, pow2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = x if x.device.type == device else x.to(device)
        result: tuple[torch.Tensor, torch.Tensor] = call_op(
            "quantize_tensorwise", quantize_tensorwise, on_device, fmt, pow2=pow2
        )
        return result

    return call


def assert_equals_reference(
    x: torch.Tensor, fmt: str, pow2: bool, result: tuple[torch.Tensor, torch.Tensor], name: str
) -> None:
    """Codes and inverse scale have the reference's bits, shapes and dtypes; codes are row-major."""
    __tracebackhide__ = True
    expected_codes, expected_inverse = quantize_tensorwise_reference(x, fmt, pow2=pow2)
    codes, inverse = result
    assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale of {name}")
    assert_bits_equal(expected_codes, codes, f"{fmt} codes of {name}")
    assert codes.is_contiguous(), f"codes have strides {codes.stride()}; expected row-major"


def cases(*suffixes: str) -> list[Any]:
    """(format, dtype, suffix) for every combination, one id a case."""
    return [
        pytest.param(fmt, dtype, suffix, id=f"tensorwise-{fmt}-{dtype}-{suffix}")
        for fmt in FORMATS
        for dtype in DTYPES
        for suffix in suffixes
    ]


@pytest.mark.parametrize(("fmt", "dtype", "mode"), cases("golden-plain", "golden-pow2"))
def test_golden(fmt: str, dtype: str, mode: str, quantize: Op) -> None:
    """Every golden unit, a tensor each, has its golden codes and inverse scale."""
    pow2 = mode == "golden-pow2"
    for unit in loader.units("tensorwise", fmt):
        if unit.dtype != dtype or unit.pow2 != pow2:
            continue
        x = torch.stack([from_bits(list(line), DTYPES[dtype]) for line in unit.x])
        codes, inverse = quantize(x, fmt, pow2)
        expected_inverse = from_bits([unit.inverse_scale], torch.float32).reshape(())
        assert_bits_equal(expected_inverse, inverse, f"{fmt} inverse scale of {unit.name}")
        expected = torch.tensor(unit.codes, dtype=torch.uint8)
        assert_bits_equal(expected, codes.view(torch.uint8), f"{fmt} codes of {unit.name}")


@pytest.mark.parametrize(("fmt", "dtype", "mode"), cases("contract-plain", "contract-pow2"))
def test_contract_rows(fmt: str, dtype: str, mode: str, seed: int, quantize: Op) -> None:
    """Every contract row as a tensor of its own (3x17): equal to the reference bit by bit."""
    pow2 = mode == "contract-pow2"
    rows = contract_rows(DTYPES[dtype], formats.get(fmt).max, 51, seed)
    for name, row in zip(rows.names, rows.x, strict=True):
        x = row.reshape(3, 17)
        assert_equals_reference(x, fmt, pow2, quantize(x, fmt, pow2), name)


@pytest.mark.parametrize(("fmt", "dtype", "shape"), cases(*SHAPES))
def test_shapes(fmt: str, dtype: str, shape: str, seed: int, quantize: Op) -> None:
    """Awkward sizes: one element, no rows, prime rows, odd columns."""
    x = random_normal(SHAPES[shape], DTYPES[dtype], seed)
    for pow2 in MODES.values():
        assert_equals_reference(x, fmt, pow2, quantize(x, fmt, pow2), shape)


@pytest.mark.parametrize(("fmt", "dtype", "layout"), cases(*LAYOUTS))
def test_layouts(fmt: str, dtype: str, layout: str, seed: int, quantize: Op, device: str) -> None:
    """A view gives what its copy gives; infinities between and around its elements are not read, nothing is written."""
    x = random_normal((13, 129), DTYPES[dtype], seed)
    held = guarded(x, layout, device)
    for pow2 in MODES.values():
        assert_equals_reference(x, fmt, pow2, quantize(held.view, fmt, pow2), layout)
    held.assert_untouched()


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"tensorwise-{fmt}-zero-row") for fmt in FORMATS])
def test_zero_row(fmt: str, seed: int, quantize: Op) -> None:
    """A zero row and a -0 row: zero codes there, every other code as without them (pytorch/ao#4713)."""
    x = random_normal((4, 64), torch.bfloat16, seed)
    x[1], x[2] = 0.0, -0.0
    codes, inverse = quantize(x, fmt)
    others, other_inverse = quantize(x[[0, 3]], fmt)
    assert_bits_equal(other_inverse, inverse, "inverse scale")
    assert_bits_equal(others, codes[[0, 3]], "codes of the other rows")
    negative = 0x80 if formats.get(fmt).negative_zero else 0x00
    assert codes.view(torch.uint8)[1:3].unique(dim=1).tolist() == [[0x00], [negative]]
    zeros, one = quantize(torch.zeros((4, 64), dtype=torch.bfloat16), fmt)
    assert (float(one), int(zeros.view(torch.uint8).max())) == (1.0, 0)


@pytest.mark.parametrize(
    ("fmt", "value"),
    [
        pytest.param(fmt, value, id=f"tensorwise-{fmt}-{word}")
        for fmt in FORMATS
        for word, value in (("nan", torch.nan), ("inf", torch.inf), ("neginf", -torch.inf))
    ],
)
def test_non_finite(fmt: str, value: float, seed: int, quantize: Op) -> None:
    """One NaN or infinity poisons the unit, which is the whole tensor: a caller sees it at once."""
    x = random_normal((8, 64), torch.bfloat16, seed)
    x[5, 17] = value
    codes, inverse = quantize(x, fmt)
    assert_bits_equal(from_bits([0x7FC00000], torch.float32).reshape(()), inverse, "inverse scale")
    assert codes.view(torch.uint8).unique().tolist() == [formats.get(fmt).nan_code]


@pytest.mark.parametrize(
    ("fmt", "size"),
    [pytest.param(fmt, size, id=f"tensorwise-{fmt}-fp32-sqnr-{size}") for fmt in FORMATS for size in SIZE_CLASSES],
)
def test_sqnr(fmt: str, size: str, seed: int, quantize: Op, record_property: Callable[[str, object], None]) -> None:
    """Quantised normal data keeps the signal-to-noise ratio of its format, in its own row of the table."""
    x = torch.randn(SIZE_CLASSES[size], generator=torch.Generator().manual_seed(seed))
    threshold = QUANTIZE_SQNR_DB[fmt, "tensorwise", size]
    for word, pow2 in MODES.items():
        codes, inverse = quantize(x, fmt, pow2)
        measured = assert_sqnr(x, formats.decode(codes, fmt) * inverse, threshold.at_least, f"{fmt} {word}")
        record_property(f"sqnr_{word}_db", measured)


@pytest.mark.parametrize("fmt", [pytest.param(fmt, id=f"tensorwise-{fmt}-opcheck") for fmt in FORMATS])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree in shape, dtype, stride, for views and M = 0 too."""
    x = torch.randn((3, 17), device=device)
    for given in (x, x.to(torch.bfloat16).t(), x[:0], x[:1]):
        torch.library.opcheck(torch.ops.fp8stack.quantize_tensorwise.default, (given, fmt, False))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        pytest.param(
            torch.zeros((2, 2), dtype=torch.float16), UnsupportedDtype, "float16", id="tensorwise-refuses-fp16"
        ),
        pytest.param(torch.zeros((2, 2), dtype=torch.int32), UnsupportedDtype, "int32", id="tensorwise-refuses-int32"),
        pytest.param(torch.zeros(4), ValueError, "two dimensions", id="tensorwise-refuses-1d"),
        pytest.param(torch.zeros((1, 2, 3)), ValueError, "two dimensions", id="tensorwise-refuses-3d"),
    ],
)
def test_refuses(x: torch.Tensor, error: type[Exception], words: str, device: str) -> None:
    """Other dtypes and ranks are refused by name."""
    with pytest.raises(error, match=words):
        quantize_tensorwise(x.to(device), "e4m3fn")


# --- the thresholds ---------------------------------------------------------------------------------------------------


def test_thresholds_are_one_a_key() -> None:
    """Every (format, granularity, size class) has its own row above its floor: relaxing one leaves the rest."""
    from suites.numerics import thresholds

    expected = {(f, g, s) for f in FORMATS for g in ("rowwise", "tensorwise") for s in SIZE_CLASSES}
    assert expected == set(QUANTIZE_SQNR_DB)
    for (fmt, _, _), row in QUANTIZE_SQNR_DB.items():
        assert thresholds.FLOORS[fmt] <= row.at_least == pytest.approx(row.worst - thresholds.MARGIN_DB)
    assert len({id(row) for row in QUANTIZE_SQNR_DB.values()}) == len(QUANTIZE_SQNR_DB)
