"""quantize_together: rows, column codes of groups and transposed weights from one launch, with the bits of their ops.

The reference is those ops' references, which their own rows judge (rowwise, colwise, experts); here it is decided that
each program finds its tensor, and that no kind of work touches what is another's. Groups: some of test_colwise.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fp8stack import formats
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import colwise, launch, together
from fp8stack.kernels.together import Together, quantize_together, quantize_together_reference
from suites.cases import DTYPES, FORMATS, GROUPS, contract_rows, offsets, random_normal
from suites.compare import assert_bits_equal, assert_fake_agrees

# The interpreter multiplies and divides with NumPy, which warns where a NaN row is meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

Tensors = Sequence[torch.Tensor]
Op = Callable[..., Together]

# Rows, columns, weights of a call: what a product of experts asks for in its passes, and each kind alone.
FORWARD, KEPT, BACKWARD, LAST_READ = (3, 1, 0), (3, 1, 2), (2, 2, 2), (2, 3, 2)
ALONE = {"rows": (2, 0, 0), "columns": (0, 2, 0), "weights": (0, 0, 1)}
# The places of groups that decide something for columns: see test_colwise.py.
SOME_GROUPS = ("all-empty", "empty-middle", "single-rows", "tail", "decreasing", "longer-than-the-mean")


@pytest.fixture
def quantize(device: str, call_op: Callable[..., Any]) -> Op:
    """The op on this device, with what ran on record; tensors may lie on the CPU."""

    def call(rows: Tensors, columns: Tensors, weights: Tensors, offs: torch.Tensor, *rest: Any) -> Together:
        here = [[tensor.to(device) for tensor in kind] for kind in (rows, columns, weights)]
        result: Together = call_op("quantize_together", quantize_together, *here, offs.to(device), *rest)
        return result

    return call


def operands(
    counts: tuple[int, int, int], m: int, k: int, n: int, e: int, dtype: torch.dtype, seed: int
) -> tuple[Tensors, Tensors, Tensors]:
    """As many tensors of each kind. Forward: x (m,k) and weights (e,n,k); backward: gradients (m,n), and x at last."""
    r, c, w = counts
    x = random_normal((m, k), dtype, seed)
    weights = [random_normal((e, n, k), dtype, seed + place) for place in (1, 2)]
    if r == 3:
        return (x, *weights), (x,) * c, weights[:w]
    gradients = [random_normal((m, n), dtype, seed + place) for place in (3, 4)]
    return gradients[:r], [*gradients, x][:c], weights[:w]


def assert_equals_reference(
    given: tuple[Tensors, Tensors, Tensors], offs: torch.Tensor, fmt: str, found: Together, *rest: Any
) -> None:
    """Every code and inverse scale has the bits, shape and strides of the reference; padded ends too."""
    __tracebackhide__ = True
    expected = quantize_together_reference(*given, offs, fmt, *rest)
    for kind in ("rows", "columns", "weights"):
        for place, (wanted, got) in enumerate(zip(getattr(expected, kind), getattr(found, kind), strict=True)):
            for what, one, other in zip(("inverse scale", "codes"), reversed(wanted), reversed(got), strict=True):
                assert_bits_equal(one, other, f"{fmt} {what} of {kind} {place}")
            assert wanted[0].stride() == got[0].stride(), f"strides of {kind} {place}"
    assert expected.padded_offs.tolist() == found.padded_offs.tolist()


@pytest.mark.parametrize(
    ("fmt", "dtype", "counts"),
    [
        pytest.param(fmt, dtype, counts, id=f"together-{fmt}-{dtype}-{name}")
        for name, counts in {
            "forward": FORWARD, "kept": KEPT, "backward": BACKWARD, "last-read": LAST_READ, **ALONE
        }.items()
        for fmt, dtype in (("e4m3fnuz", "bf16"), *((("e4m3fn", "fp32"),) if counts == LAST_READ else ()))
    ],
)  # fmt: skip
def test_every_part(
    fmt: str,
    dtype: str,
    counts: tuple[int, int, int],
    seed: int,
    quantize: Op,
    guarded_outputs: Callable[[], None],
) -> None:
    """Any number of tensors of each kind; more than one program, chunk and block of each; nothing around is written."""
    offs = torch.tensor([20, 20, 131], dtype=torch.int32)
    given = operands(counts, 150, 160, 144, 3, DTYPES[dtype], seed)
    found = quantize(*given, offs, fmt)
    guarded_outputs()
    assert_equals_reference(given, offs, fmt, found)


@pytest.mark.parametrize("groups", [pytest.param(name, id=f"together-e4m3fnuz-bf16-{name}") for name in SOME_GROUPS])
def test_groups(groups: str, seed: int, quantize: Op, guarded_outputs: Callable[[], None]) -> None:
    """Groups that are empty, of one row, past the rows or nonsense decide the columns alone; alignment 32."""
    m, _ = GROUPS[groups]
    offs = offsets(groups)
    given = operands(LAST_READ, m, 48, 32, len(offs), torch.bfloat16, seed)
    found = quantize(*given, offs, "e4m3fnuz", True, 32)
    guarded_outputs()
    assert_equals_reference(given, offs, "e4m3fnuz", found, True, 32)


@pytest.mark.parametrize(
    ("fmt", "mode"),
    [
        pytest.param(fmt, mode, id=f"together-{fmt}-bf16-contract-{mode}")
        for fmt, mode in (("e4m3fn", "plain"), *((fmt, "pow2") for fmt in FORMATS))
    ],
)
def test_contract_rows(fmt: str, mode: str, seed: int, quantize: Op) -> None:
    """All contract rows as rows, as columns of a group and as columns of an expert: zeros, NaN, Inf, exact maxima."""
    rows = contract_rows(torch.bfloat16, formats.get(fmt).max, 32, seed).x
    offs = torch.tensor([32], dtype=torch.int32)
    given = ((rows,), (rows.t().contiguous(),), (rows.t().contiguous()[None],))
    assert_equals_reference(given, offs, fmt, quantize(*given, offs, fmt, mode == "pow2"), mode == "pow2")


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="together-e4m3fnuz-bf16-strides")])
def test_strides(fmt: str, seed: int, quantize: Op) -> None:
    """Rows that lie apart, a transposed tensor and transposed weights give what contiguous ones give."""
    wide = random_normal((40, 100), torch.bfloat16, seed)
    offs = torch.tensor([9, 40], dtype=torch.int32)
    weights = random_normal((2, 48, 32), torch.bfloat16, seed + 1).transpose(1, 2)
    for x in (wide[:, :48], wide[:, ::2][:, :48], random_normal((48, 40), torch.bfloat16, seed).t()):
        found = quantize((x, weights), (x,), (weights,), offs, fmt)
        assert_equals_reference(((x, weights), (x,), (weights,)), offs, fmt, found)


@pytest.mark.parametrize("fmt", [pytest.param("e4m3fnuz", id="together-e4m3fnuz-opcheck")])
def test_opcheck(fmt: str, device: str) -> None:
    """The custom op passes torch's own checks; fake and real agree, without tokens and for one group too."""
    overload = torch.ops.fp8stack.quantize_together.default
    offs = torch.tensor([3, 17], dtype=torch.int32, device=device)
    given = [[x.to(device) for x in kind] for kind in operands(LAST_READ, 19, 48, 32, 2, torch.bfloat16, 0)]
    torch.library.opcheck(overload, (*given, offs, fmt, True, 32))

    def of_three(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Any:
        return overload([x, w], [x], [w], ends, fmt, True, 16)

    for m in (0, 1):
        x, w = torch.zeros((m, 48), device=device), torch.zeros((1, 32, 48), device=device)
        assert_fake_agrees(of_three, (x, w, offs[:1]))


X, W, OFFS = torch.zeros((4, 32)), torch.zeros((2, 16, 32)), torch.tensor([1, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "columns", "weights", "error", "words"),
    [
        pytest.param((X.half(),), (), (), UnsupportedDtype, "float16", id="together-refuses-fp16"),
        pytest.param((), (), (), ValueError, "expected some", id="together-refuses-nothing"),
        pytest.param((X,) * 4, (), (), ValueError, "at most", id="together-refuses-four"),
        pytest.param((X,), (), (W, W, W), ValueError, "at most", id="together-refuses-three-weights"),
        pytest.param((X, X.bfloat16()), (), (), ValueError, "one dtype", id="together-refuses-two-dtypes"),
        pytest.param((X, X[:, :16]), (), (), ValueError, "rows of one width", id="together-refuses-two-widths"),
        pytest.param((), (X, X[:3]), (), ValueError, "of the same rows", id="together-refuses-other-rows"),
        pytest.param((), (), (W, W[:, :, :16]), ValueError, "one shape", id="together-refuses-two-shapes"),
        pytest.param((), (), (W[:1],), ValueError, "one shape", id="together-refuses-other-experts"),
        pytest.param((), (), (W[:, :8],), ValueError, "multiple of 16", id="together-refuses-n-8"),
        pytest.param((X[:, :0],), (), (), ValueError, "width of 0", id="together-refuses-width-0"),
    ],
)
def test_refuses(
    rows: Tensors, columns: Tensors, weights: Tensors, error: type[Exception], words: str, device: str
) -> None:
    """Other dtypes, numbers and shapes are refused by name."""
    here = [[x.to(device) for x in kind] for kind in (rows, columns, weights)]
    with pytest.raises(error, match=words):
        quantize_together(*here, OFFS.to(device), "e4m3fn")


def test_refuses_offs(device: str) -> None:
    """offs and alignment are held to what groups take."""
    x = X.to(device)
    with pytest.raises(ValueError, match="int64"):
        quantize_together((x,), (x,), (), OFFS.long().to(device), "e4m3fn")
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_together((x,), (x,), (), OFFS.to(device), "e4m3fn", alignment=24)


def test_every_arch_has_its_launch_rows() -> None:
    """The launch table is total: every arch, every size class; parts divide rows, for float32 too."""
    from fp8stack.device import ARCHS

    for arch in ARCHS:
        for e in (1, 32, 33, 256):
            row = launch.config(together.TOGETHER_CONFIGS, arch, colwise.size_class(e))
            assert row.rows // 2 % row.parts == row.columns % 8 == 0
    with pytest.raises(LookupError, match="gfx9-4-generic"):
        launch.config(together.TOGETHER_CONFIGS, "gfx9-4-generic", "e<=32")
