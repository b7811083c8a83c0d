"""Mixture of experts: routing, dispatch, experts in FP8 with their autograd, combine; and tokens sent to their experts.

Shape suffixes, used throughout: a tensor's name ends with its dimensions.

    T tokens    D model width    F width of an expert    E experts    K experts that a token chooses
    R rows = T*K, one for each choice, sorted by expert    G groups of experts    N, K of a GEMM: grouped_gemm.py

    route      scores of E experts a token, the K best with their weights
    dispatch   rows_RD in the order of experts, and offs_E: where each expert's rows end
    experts    w2(silu(w1 x) * (w3 x)), each expert on its own rows: three grouped GEMMs, nine with their gradients
    combine    the K rows of a token times their weights, summed

What is quantised when. A grouped GEMM y = x W^T needs x and W with a scale a row; the gradient of x needs dY with a
scale a row and W with a scale a *column*; the gradient of W needs dY and x with a scale a column of each group. So
every tensor is wanted in two ways, and reading it is what costs (a quantisation kernel is as slow as memory):

    x     row codes in the forward pass and column codes from the same read, kept for the backward pass in the place
          of x, at half its bytes (saved_input "codes"); or x is kept and read again ("input")
    dY    both from one read
    W     row codes forward, column codes backward; from one read if the column codes are kept ("codes"), which costs
          a byte a weight and layer until the backward pass; by default W is read again ("weight")

w1 and w3 multiply the same x, which is quantised once for both. All that one product wants is quantised in one launch
(together.py), so a layer has two launches that quantise in the forward pass, and two in the backward pass; not on an
H200, where a table says otherwise:

    forward     rows of x, w1 and w3, columns of x        then     rows of the middle and w2, columns of the middle
    backward    dY both ways, w2 transposed               then     gradients of gate and up both ways, w1, w3 transposed

Fewer is not possible: the middle is known only after the first GEMMs, its gradient only after the first of the backward
pass. A table (ONE_LAUNCH) says where a kernel for each tensor is the faster way: 2 x 3 + 3 = 9 launches forward, as
rowwise_and_colwise.py takes three, and 3 x 3 + 3 = 12 backward; another (ONE_READ), where both codes of a tensor then
come from two kernels and not from one: 7 and 9. Shared experts are dense linears and quantise for themselves
(linear.py).

The gradient of x takes W's column scales in every recipe. In a dense layer rowwise_with_gw_hp has one scale for all of
W there, to save the maxima of columns; here they come with the codes, and one scale for all experts is the coarser.

Recipes of experts: rowwise; rowwise_with_gw_hp, whose weight gradient is a bf16 GEMM of x itself; mxfp8, with a scale
for 32 elements of each contraction, on OCP archs, where tokens are copied to padded groups first and every tensor and
way is a launch. Under tensorwise they run rowwise, and convert_to_float8 says so. Weights stay plain parameters w1, w2,
w3: (E,F,D), (E,D,F), (E,F,D).

Nothing is read back to the host, but for three things: unaligned_groups "refuse" looks at the offsets; the exchange of
expert parallelism must know how many rows to receive, once a layer; and wherever a grouped GEMM runs its reference, as
float32 in high precision does on a GPU too, it reads the offsets. An expert may have no rows, or all.

Precision: router scores, the products of SwiGLU and the sum over a token's experts are wide (linear.py), rounded once.
Not here: the model around it (models.py), sharding of experts' parameters over the rest of the mesh (parallel.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8stack import formats
from fp8stack.formats import Format
from fp8stack.kernels import mxfp8
from fp8stack.kernels.colwise import quantize_colwise_grouped
from fp8stack.kernels.experts import quantize_experts, quantize_experts_both, quantize_experts_transposed
from fp8stack.kernels.grouped_gemm import CHECK, grouped_mm, grouped_scaled_mm, preferred_alignment, require_good_offs
from fp8stack.kernels.grouped_mxfp8 import grouped_mxfp8_mm, padded_groups
from fp8stack.kernels.groups import bounds_reference, require_offs
from fp8stack.kernels.rowwise import quantize_rowwise
from fp8stack.kernels.rowwise_and_colwise import quantize_rowwise_and_colwise
from fp8stack.kernels.together import (
    MOST_COLUMNS,
    MOST_ROWS,
    MOST_WEIGHTS,
    Codes,
    Together,
    quantize_together,
)
from fp8stack.linear import (
    ALIGNMENT,
    RECIPES,
    Convertible,
    Linear,
    Plan,
    Recipe,
    autocast_dtype,
    rounded,
    wide_dtype,
    without_autocast,
)
from fp8stack.metrics import CodeCounter


# -------------------------------------------------------------------------------------------------------------- recipes
@dataclass(frozen=True)
class ExpertRecipe:
    """How experts run under a recipe of linear.py.

    name: what they really run. grad_weight: whether in FP8; else in the activations' dtype. pow2: scales are powers of
    two. fast_accum: of the forward GEMM. fast_accum_gradients: of the GEMMs of both gradients. unaligned_groups: `pad`
    takes any group sizes, as the quantisers pad; `refuse` raises for a group that is no multiple of `alignment`, and
    waits for the device to do so. alignment: what groups are padded to along the contraction; None: to what is fastest
    on the target (grouped_gemm.preferred_alignment), while `refuse` asks for multiples of 16. saved_input,
    saved_weight: what is kept for the backward pass (see the header). scale_mode: how mxfp8 rounds its scales
    (mxfp8.py), None for the others.
    """

    name: str
    grad_weight: bool
    pow2: bool = True
    fast_accum: bool = True
    fast_accum_gradients: bool = False
    unaligned_groups: Literal["pad", "refuse"] = "pad"
    alignment: int | None = None
    saved_input: Literal["codes", "input"] = "codes"
    saved_weight: Literal["codes", "weight"] = "weight"
    scale_mode: str | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("unaligned_groups", ("pad", "refuse")),
            ("saved_input", ("codes", "input")),
            ("saved_weight", ("codes", "weight")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected one of: {', '.join(known)}; correct the recipe"
                )
        for name in ("grad_weight", "pow2", "fast_accum", "fast_accum_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False; correct the recipe")
        given = self.alignment
        if given is not None and (type(given) is not int or given < self.multiple or given % self.multiple):
            raise ValueError(
                f"alignment is {given!r}; expected None or a multiple of {self.multiple}; correct the recipe"
            )

    @property
    def multiple(self) -> int:
        """What K and N, and an alignment, must be multiples of."""
        return ALIGNMENT if self.scale_mode is None else mxfp8.BLOCK


# What of a recipe is about speed and memory alone, and may change after conversion.
CHANGEABLE = ("fast_accum", "fast_accum_gradients", "unaligned_groups", "alignment", "saved_input", "saved_weight")

# Recipe that was asked for -> what experts run.
EXPERT_RECIPES: dict[str, ExpertRecipe] = {
    "tensorwise": ExpertRecipe("rowwise", grad_weight=True),
    "rowwise": ExpertRecipe("rowwise", grad_weight=True),
    "rowwise_with_gw_hp": ExpertRecipe("rowwise_with_gw_hp", grad_weight=False, saved_input="input"),
    "mxfp8": ExpertRecipe("mxfp8", grad_weight=True, scale_mode="rceil"),
}


# A step of the grouped GEMM of MXFP8 is 128 deep, and reads scales a word of four at a time: groups of 32 would not
# save a step, and cost the words.
MXFP8_ALIGNMENT = 4 * mxfp8.BLOCK

# Target -> whether all that a product needs is quantised in one launch, or each tensor by kernels of its own. A target
# that is not listed takes one launch. `python -m suites.perf.moe` times both: on an H200 (torch 2.11, Triton 3.6) the
# kernels of each tensor, with tiles of their own, take 0.52 to 0.87 of the time forward and 0.92 to 0.95 backward.
ONE_LAUNCH: dict[str, bool] = {"sm_90": False}

# (target, tokens or weights) -> where each tensor has kernels of its own: whether both its codes come from an op that
# reads it once, or from two ops. A target that is not listed takes one, which on an H200 took 0.8 to 1.0 of the time.
ONE_READ: dict[tuple[str, str], bool] = {}


@dataclass(frozen=True)
class ExpertPlan:
    """What experts were told at conversion: recipe, the format of the arch, and the target that compiles for.

    Format and target stay those of the conversion if a model moves afterwards, as from a CPU to a GPU: move it first,
    or give convert_to_float8 the device as detected. backward: the codes belong to the backward pass, which has a count
    of its own.
    """

    recipe: ExpertRecipe
    fmt: Format
    target: str = ""
    counter: CodeCounter | None = field(default=None, compare=False)
    backward: bool = False

    @property
    def alignment(self) -> int:
        """What groups are padded to along the contraction."""
        if self.recipe.alignment is not None:
            return self.recipe.alignment
        if self.recipe.scale_mode is not None:
            return MXFP8_ALIGNMENT
        return preferred_alignment(self.target, self.recipe.fast_accum_gradients)

    def quantise(
        self,
        rows: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        offs: torch.Tensor,
    ) -> Together:
        """Row codes of tokens and weights, column codes of tokens, and of weights (transposed); see together.py.

        In one launch where it takes them all and the table wants it, else each tensor by itself, with the same bits.
        """
        if not (rows or columns or weights):
            return Together((), (), (), offs)
        if self.recipe.scale_mode is not None:
            return self._counted(self._quantise_mxfp8(rows, columns, weights, offs, self.recipe.scale_mode))
        fits = len(rows) <= MOST_ROWS and len(columns) <= MOST_COLUMNS and len(weights) <= MOST_WEIGHTS
        fits = fits and len({w.shape for w in weights}) <= 1 and len({x.shape[-1] for x in rows}) <= 1
        fits = fits and all(x.shape[-1] for x in (*rows, *columns, *weights))
        if fits and ONE_LAUNCH.get(self.target, True):
            found = quantize_together(rows, columns, weights, offs, self.fmt, self.recipe.pow2, self.alignment)
        else:
            found = self._quantise_each(rows, columns, weights, offs)
        return self._counted(found)

    def _counted(self, found: Together) -> Together:
        if self.counter is not None:
            for codes, _ in (*found.rows, *found.columns, *found.weights):
                self.counter.observe(codes, self.fmt, self.backward)
        return found

    def _quantise_mxfp8(
        self,
        rows: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        offs: torch.Tensor,
        mode: str,
    ) -> Together:
        """As quantise, in blocks of 32 along what is contracted: scales are E8M0 bytes, one launch a tensor and way.

        Weights are quantised as one matrix (E*N,K), both ways: N is a multiple of 32, so no block has two experts.
        """
        of_rows, of_columns, of_weights = [], [], []
        padded_offs = torch.zeros_like(offs)
        for x in rows:
            codes, scales = mxfp8.quantize_mxfp8(x.flatten(0, -2), self.fmt, mode, dim=1)
            of_rows.append((codes.view(x.shape), scales.view(*x.shape[:-1], scales.shape[1])))
        for x in columns:
            padded, padded_offs = padded_groups(x, offs, self.alignment)
            of_columns.append(mxfp8.quantize_mxfp8(padded, self.fmt, mode, dim=0))
        for w in weights:
            e, n, k = w.shape
            codes, scales = mxfp8.quantize_mxfp8(w.reshape(e * n, k), self.fmt, mode, dim=0)
            scales = scales.view(k, e, n // mxfp8.BLOCK)
            of_weights.append((codes.t().view(k, e, n).transpose(0, 1), scales.transpose(0, 1)))
        return Together(tuple(of_rows), tuple(of_columns), tuple(of_weights), padded_offs)

    def product(
        self, left: Codes, right: Codes, offs: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool
    ) -> torch.Tensor:
        """Row codes (M,K) times codes (E,N,K) of weights, in groups of rows -> (M,N)."""
        operands = left[0], right[0].transpose(1, 2), left[1], right[1], offs
        if self.recipe.scale_mode is not None:
            return grouped_mxfp8_mm(*operands, out_dtype=out_dtype)
        return grouped_scaled_mm(*operands, out_dtype=out_dtype, fast_accum=fast_accum)

    def weight_product(
        self, left: Codes, right: Codes, padded_offs: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Column codes of dY (M_pad,N) and of x (M_pad,K), in groups along the contraction -> (E,N,K)."""
        operands, alignment = (left[0].t(), right[0], left[1], right[1], padded_offs), self.alignment
        if self.recipe.scale_mode is not None:
            return grouped_mxfp8_mm(*operands, out_dtype=out_dtype, alignment=alignment)
        fast_accum = self.recipe.fast_accum_gradients
        return grouped_scaled_mm(*operands, out_dtype=out_dtype, fast_accum=fast_accum, alignment=alignment)

    def _quantise_each(
        self,
        rows: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        offs: torch.Tensor,
    ) -> Together:
        """As quantise. A tensor that is wanted both ways is read once where ONE_READ says so."""
        fmt, pow2, alignment = self.fmt, self.recipe.pow2, self.alignment
        one_read = {what: ONE_READ.get((self.target, what), True) for what in ("tokens", "weights")}
        of_rows: list[Codes | None] = [None] * len(rows)
        of_columns: list[Codes] = []
        of_weights: list[Codes] = []
        padded_offs = torch.zeros_like(offs)
        for x in columns:
            both = [place for place, other in enumerate(rows) if other is x] if one_read["tokens"] else []
            if both:
                *four, padded_offs = quantize_rowwise_and_colwise(x, offs, fmt, pow2, alignment)
                of_rows[both[0]] = four[0], four[1]
                of_columns.append((four[2], four[3]))
            else:
                codes, inverse, padded_offs = quantize_colwise_grouped(x, offs, fmt, pow2, alignment)
                of_columns.append((codes, inverse))
        for w in weights:
            both = [place for place, other in enumerate(rows) if other is w] if one_read["weights"] else []
            if both:
                codes, inverse, *transposed = quantize_experts_both(w, fmt, pow2)
                of_rows[both[0]] = codes, inverse
                of_weights.append((transposed[0], transposed[1]))
            else:
                of_weights.append(quantize_experts_transposed(w, fmt, pow2))
        each = [
            found or (quantize_rowwise if x.dim() == 2 else quantize_experts)(x, fmt, pow2)
            for x, found in zip(rows, of_rows, strict=True)
        ]
        return Together(tuple(each), tuple(of_columns), tuple(of_weights), padded_offs)


# ---------------------------------------------------------------------------------------------------------------- GEMMs
@torch.library.custom_op("fp8stack::refuse_unaligned", mutates_args=(), schema="(Tensor offs, int m, int k) -> Tensor")
def _refuse_unaligned(offs, m, k):
    require_good_offs(offs, m)
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if (end - start) % k:
            raise ValueError(
                f"group {group} has {end - start} rows along the contraction, not a multiple of {k}; unaligned_groups "
                "'refuse' takes multiples only; set unaligned_groups='pad'"
            )
    return offs.clone()


@_refuse_unaligned.register_fake
def _(offs, m, k):
    return torch.empty_like(offs)


class _Float8GroupedMM(torch.autograd.Function):
    """x (M,K), offs (E,), weights (E,N_i,K), one dtype -> (M,N_i) in it, a tuple.

    given: x, offs, plan, training and the weights. training: gradients are recorded. Asked outside: in here they never
    are, and needs_input_grad does not know.
    """

    # One parameter beside ctx: where nothing requires a gradient, dynamo (torch 2.13) leaves out ctx if as many
    # arguments are given as the signature has names, and with names before *weights two weights are as many.
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        x, offs, plan, training, *weights = given
        recipe = plan.recipe
        ctx.plan, ctx.dtype = plan, x.dtype
        need_x, need_weights = training and ctx.needs_input_grad[0], training and any(ctx.needs_input_grad[4:])
        ctx.codes_saved = recipe.grad_weight and recipe.saved_input == "codes" and need_weights
        ctx.transposed_saved = recipe.saved_weight == "codes" and need_x
        codes = plan.quantise(
            (x, *weights), (x,) if ctx.codes_saved else (), weights if ctx.transposed_saved else (), offs
        )
        saved = [*codes.columns[0], codes.padded_offs] if ctx.codes_saved else [x]
        saved += [part for pair in codes.weights for part in pair] if ctx.transposed_saved else weights
        ctx.save_for_backward(offs, *saved)
        rows, *weight_rows = codes.rows
        return tuple(plan.product(rows, weight, offs, x.dtype, recipe.fast_accum) for weight in weight_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: ExpertPlan = replace(ctx.plan, backward=True)
        recipe = plan.recipe
        need_x, need_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        offs, *saved = ctx.saved_tensors
        column: Codes | None = None
        if ctx.codes_saved:
            column, padded_offs, saved = (saved[0], saved[1]), saved[2], saved[3:]
        else:
            x, *saved = saved
        # A broadcast gradient has stride 0 and a transposed consumer gives a transposed one: settle it once.
        grads = tuple(grad.contiguous() for grad in grads)
        by_column = [grad for grad, need in zip(grads, need_weights, strict=True) if need and recipe.grad_weight]
        codes = plan.quantise(
            grads if need_x else (),
            by_column if column is not None or not by_column else [*by_column, x],
            saved if need_x and not ctx.transposed_saved else (),
            offs,
        )
        if column is None and by_column:
            column, padded_offs = codes.columns[-1], codes.padded_offs

        # First what needs codes of weights, then the gradients of weights: the ones are gone when the others come.
        grad_x: torch.Tensor | None = None
        transposed = list(zip(saved[::2], saved[1::2], strict=True)) if ctx.transposed_saved else list(codes.weights)
        rows, columns = list(codes.rows), list(codes.columns)
        del codes, saved
        while rows:
            product = plan.product(rows.pop(0), transposed.pop(0), offs, ctx.dtype, recipe.fast_accum_gradients)
            grad_x = product if grad_x is None else grad_x + product
        grad_weights: list[torch.Tensor | None] = []
        for grad, need in zip(grads, need_weights, strict=True):
            if not need:
                grad_weights.append(None)
            elif recipe.grad_weight:
                assert column is not None
                grad_weights.append(plan.weight_product(columns.pop(0), column, padded_offs, ctx.dtype))
            else:
                grad_weights.append(grouped_mm(grad.t(), x, offs))
        return grad_x, None, None, None, *grad_weights


def fp8_grouped_mm(
    x: torch.Tensor, weights: Sequence[torch.Tensor], offs: torch.Tensor, plan: ExpertPlan
) -> tuple[torch.Tensor, ...]:
    """x W^T in groups for each of the weights, in FP8, with gradients; x is quantised once for all of them.

    x: (M,K), rows sorted by expert, bfloat16 or float32, any strides. weights: (E,N,K) each, of x's dtype. offs: int32
    (E,), cumulative ends. Returns (M,N) a weight, in x's dtype; rows past offs[-1] are zero, in gradients too, and the
    gradient of an expert without rows is zero.

    Raises ValueError for shapes, offs and devices that do not fit, K or N that are no multiples of 16 (mxfp8: of 32),
    and under unaligned_groups "refuse" for a group that is no multiple; UnsupportedDtype for other dtypes.
    """
    _require_operands(x, weights, offs, "fp8_grouped_mm")
    multiple = plan.recipe.multiple
    for weight in weights:
        for label, size in (("N", weight.shape[1]), ("K", weight.shape[2])):
            if size % multiple:
                raise ValueError(
                    f"{label} is {size}; FP8 GEMMs need a multiple of {multiple}; leave these experts out with the "
                    "filter"
                )
    if plan.recipe.unaligned_groups == "refuse":
        offs = _refuse_unaligned(offs, x.shape[0], plan.recipe.alignment or plan.recipe.multiple)
    return _Float8GroupedMM.apply(x, offs, plan, torch.is_grad_enabled(), *weights)


class _HighPrecisionGroupedMM(torch.autograd.Function):
    """The twin of _Float8GroupedMM: x (M,K), offs, weights (E,N_i,K), one dtype -> (M,N_i) in it, a tuple."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:  # one parameter, as there
        x, offs, *weights = given
        ctx.save_for_backward(x, offs, *weights)
        return tuple(grouped_mm(x, weight.transpose(1, 2), offs) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, offs, *weights = ctx.saved_tensors
        grad_x: torch.Tensor | None = None
        grad_weights: list[torch.Tensor | None] = []
        for grad, weight, need in zip(grads, weights, ctx.needs_input_grad[2:], strict=True):
            grad = grad.contiguous()
            if ctx.needs_input_grad[0]:
                product = grouped_mm(grad, weight, offs)
                grad_x = product if grad_x is None else grad_x + product
            grad_weights.append(grouped_mm(grad.t(), x, offs) if need else None)
        return grad_x, None, *grad_weights


def high_precision_grouped_mm(
    x: torch.Tensor, weights: Sequence[torch.Tensor], offs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """x W^T in groups in x's dtype, as fp8_grouped_mm; N and K multiples of 8."""
    _require_operands(x, weights, offs, "high_precision_grouped_mm")
    return _HighPrecisionGroupedMM.apply(x, offs, *weights)


def _require_operands(x: torch.Tensor, weights: Sequence[torch.Tensor], offs: torch.Tensor, op: str) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise formats.UnsupportedDtype(
            f"{op} cannot take {x.dtype} on {x.device.type}; expected bfloat16 or float32; cast the input"
        )
    for weight in weights:
        if x.dim() != 2 or weight.dim() != 3 or weight.shape[2] != x.shape[1] or weight.dtype != x.dtype:
            raise ValueError(
                f"x is {x.dtype} of shape {tuple(x.shape)} and a weight {weight.dtype} of shape {tuple(weight.shape)}; "
                "expected (M, K) and (E, N, K) of one dtype; cast the weight, and flatten leading dimensions of x"
            )
        if weight.device != x.device:
            raise ValueError(
                f"a weight is on {weight.device} and x on {x.device}; expected one device; move one of them"
            )
    require_offs(offs, x, ALIGNMENT)
    for weight in weights:
        if weight.shape[0] != offs.shape[0]:
            raise ValueError(
                f"a weight has {weight.shape[0]} matrices and offs {offs.shape[0]} ends; expected one end a matrix; "
                "pass the offs of these experts"
            )


# -------------------------------------------------------------------------------------------------------------- experts
def swiglu(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in the wide dtype, rounded once."""
    wide = wide_dtype(gate_RF)
    return (F.silu(gate_RF.to(wide)) * up_RF.to(wide)).to(gate_RF.dtype)


def _as_asked(asked: Recipe) -> ExpertRecipe | str:
    """What experts run under a recipe of linear.py, with the fields that were replaced in it; or why they run none."""
    recipe = EXPERT_RECIPES.get(asked.name)
    if recipe is None:
        return f"experts do not run {asked.name}, only {', '.join(EXPERT_RECIPES)}"
    row = RECIPES[asked.name]
    # The casts that the grouped GEMMs have are those of the row; of rowwise_with_gw_hp, which has none there, rows.
    of_weight = row.grad_weight or row.output
    known = {"output": (row.output,), "grad_input": (row.grad_input,), "grad_weight": (of_weight, None)}
    other = [name for name, casts in known.items() if getattr(asked, name) not in casts]
    if other:
        return f"experts run the casts of {asked.name} alone, and {' and '.join(other)} has others"
    fields = ["fast_accum", "fast_accum_gradients", "pow2"] + ["scale_mode"] * (recipe.scale_mode is not None)
    replaced = {name: getattr(asked, name) for name in fields if getattr(asked, name) != getattr(row, name)}
    return replace(recipe, grad_weight=asked.grad_weight is not None, **replaced)


class GroupedExperts(Convertible):
    """SwiGLU experts on rows sorted by expert: w2(silu(w1 x) * (w3 x)).

    w1, w3: (E,F,D); w2: (E,D,F). Uninitialised until somebody fills them (meta construction skips them). In high
    precision until convert_to_float8; the parameters are the same before and after.
    """

    def __init__(self, experts: int, dim: int, ffn: int) -> None:
        super().__init__()
        for label, size in (("dim (D)", dim), ("ffn (F)", ffn)):
            if size % ALIGNMENT:
                raise ValueError(f"{label} is {size}; expected a multiple of {ALIGNMENT}; choose another size")
        self.w1 = nn.Parameter(torch.empty(experts, ffn, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, ffn))
        self.w3 = nn.Parameter(torch.empty(experts, ffn, dim))
        self.plan: ExpertPlan | None = None

    def forward(self, rows_RD: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
        """(R,D) -> (R,D), in the dtype of the rows; offs int32 (E,). Rows past offs[-1] come out as zero.

        Under autocast in its dtype, as a linear of torch. float16 is computed as float32, as by Float8Linear.

        Raises ValueError for offs or a device that do not fit: those of fp8_grouped_mm.
        """
        dtype = autocast_dtype(rows_RD)
        rows_RD = rows_RD.to(dtype).to(torch.float32 if dtype == torch.float16 else dtype)
        w1, w2, w3 = (_held(weight).to(rows_RD.dtype) for weight in (self.w1, self.w2, self.w3))
        if self.plan is None:
            gate_RF, up_RF = high_precision_grouped_mm(rows_RD, (w1, w3), offs_E)
            (y_RD,) = high_precision_grouped_mm(self.middle(gate_RF, up_RF), (w2,), offs_E)
        else:
            gate_RF, up_RF = fp8_grouped_mm(rows_RD, (w1, w3), offs_E, self.plan)
            (y_RD,) = fp8_grouped_mm(self.middle(gate_RF, up_RF), (w2,), offs_E, self.plan)
        return y_RD.to(dtype)

    def middle(self, gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
        """What is between the products: a method, so that it can be a graph where nothing around it is."""
        return swiglu(gate_RF, up_RF)

    def runs(self) -> str | None:
        """The name of the recipe that it runs; see Convertible."""
        return None if self.plan is None else self.plan.recipe.name

    def refuses(self, plan: Plan) -> str | None:
        """Experts have no grouped GEMM for every recipe; see Convertible."""
        recipe = _as_asked(plan.recipe)
        if isinstance(recipe, str):
            return recipe
        if recipe.scale_mode is not None and plan.e4m3.name.endswith("fnuz"):
            return f"{recipe.name} is for OCP formats, this arch has {plan.e4m3.name}"
        _, ffn, dim = self.w1.shape
        odd = [f"{label} = {size}" for label, size in (("D", dim), ("F", ffn)) if size % recipe.multiple]
        return f"{' and '.join(odd)} not a multiple of {recipe.multiple}" if odd else None

    def to_float8(self, plan: Plan) -> str | None:
        """Run in FP8 from now on; see Convertible."""
        recipe = _as_asked(plan.recipe)
        assert not isinstance(recipe, str), f"it was refused: {recipe}"
        self.plan = ExpertPlan(recipe, plan.e4m3, plan.target, plan.counter)
        if recipe.name != plan.recipe.name:
            return f"experts run {recipe.name}: {plan.recipe.name} has no grouped GEMM"
        return None

    def keep(self, **fields: Any) -> None:
        """Change fields of the recipe of converted experts, of those in CHANGEABLE.

        Raises ValueError for other fields, for values that a field does not take, and for experts in high precision.
        """
        other = sorted(set(fields) - set(CHANGEABLE))
        if other:
            raise ValueError(
                f"{', '.join(other)} cannot be changed; expected some of: {', '.join(CHANGEABLE)}; the rest is the "
                "recipe itself: convert with another one"
            )
        if self.plan is None:
            raise ValueError(
                "these experts run in high precision; expected converted ones; call convert_to_float8 first"
            )
        self.plan = replace(self.plan, recipe=replace(self.plan.recipe, **fields))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, ffn, dim = self.w1.shape
        recipe = "high precision" if self.plan is None else f"{self.plan.recipe.name}, {self.plan.fmt.name}"
        return f"experts={experts}, dim={dim}, ffn={ffn}, {recipe}"


def _held(weight: torch.Tensor) -> torch.Tensor:
    """Under expert parallelism a weight knows that it is part of a whole (parallel.py); here its own experts count."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class GatedMLP(nn.Module):
    """The shared experts: w2(silu(w1 x) * (w3 x)) on every token."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn, bias=False)
        self.w2 = Linear(ffn, dim, bias=False)
        self.w3 = Linear(dim, ffn, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T,D) -> (T,D)."""
        return self.w2(swiglu(self.w1(x_TD), self.w3(x_TD)))


# --------------------------------------------------------------------------------------------------------------- router
@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    score: of an expert, `sigmoid` of its logit or `softmax` over all. top_k: experts a token. groups, limited: only the
    experts of the `limited` best of `groups` groups are candidates; a group's score is the sum of its two best
    candidates (sigmoid) or its best one (softmax). normalise: weights of a token sum to 1 before `scale`.
    """

    experts: int
    top_k: int
    score: Literal["sigmoid", "softmax"] = "softmax"
    groups: int = 1
    limited: int = 1
    normalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in ("sigmoid", "softmax"):
            raise ValueError(f"score is {self.score!r}; expected sigmoid or softmax; choose one")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.limited <= self.groups:
            raise ValueError(
                f"{self.experts} experts in {self.groups} groups, limited to {self.limited}; expected groups that "
                "divide the experts, and a limit from 1 to their number; choose others"
            )
        candidates = self.experts // self.groups * self.limited
        if not 1 <= self.top_k <= candidates:
            raise ValueError(
                f"top_k is {self.top_k}; expected 1 to {candidates}, the experts of {self.limited} groups; choose "
                "another"
            )


class Router(nn.Module):
    """Scores of E experts a token, and the K best: DeepSeek-V3's (sigmoid, groups, balancing bias) or plain softmax.

    weight: (E,D). bias: (E,), a buffer: added to scores for the choice alone, never to weights, and moved by `balance`.
    load: (E,), how many tokens chose each expert since the last `balance`; a forward pass that is recomputed does not
    count again where the policy keeps fp8stack::count_load (parallel.py). No linear that convert_to_float8 would see:
    it costs little and decides much.
    """

    weight: nn.Parameter
    bias: torch.Tensor
    load: torch.Tensor

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, dim))
        self.register_buffer("bias", torch.zeros(routing.experts))
        self.register_buffer("load", torch.zeros(routing.experts, dtype=torch.int64), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Whatever dtype the model is cast to, the bias stays float32: steps of 1e-3 would be lost in bf16."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def reset(self) -> None:
        """Bias and load to zero: for a router that was built on the meta device."""
        self.bias.zero_()
        self.load.zero_()

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T,D) -> experts int64 (T,K) and weights (T,K), wide, under autocast too: rounded scores choose others."""
        routing, wide = self.routing, wide_dtype(x_TD)
        with without_autocast(x_TD):
            logits_TE = F.linear(x_TD.to(wide), self.weight.to(x_TD.dtype).to(wide))
        scores_TE = logits_TE.sigmoid() if routing.score == "sigmoid" else logits_TE.softmax(dim=-1)
        chosen_TK = choose(scores_TE.detach() + self.bias.to(wide), routing)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if routing.normalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20)
        if self.training:
            _count_load(chosen_TK, self.load)
        return chosen_TK, weights_TK * routing.scale

    @torch.no_grad()
    def balance(self, rate: float, group: dist.ProcessGroup | None = None) -> None:
        """Raise the bias of experts that had fewer tokens than the mean by `rate`, lower it where they had more.

        Once a step, with the tokens of all ranks of `group`. Starts counting again. DeepSeek-V3, arXiv:2412.19437.
        """
        if group is not None:
            dist.all_reduce(self.load, group=group)
        missing = self.load.sum() - self.load * len(self.load)  # to the mean, times E: exact, as load is an integer
        self.bias += rate * torch.sign(missing).to(self.bias.dtype)
        self.load.zero_()


@torch.library.custom_op("fp8stack::count_load", mutates_args=("load",))
def _count_load(chosen_TK: torch.Tensor, load: torch.Tensor) -> None:
    """load (E,) += how often each expert was chosen. An op: a compiled block that is recomputed may not assign."""
    load += counted(chosen_TK, load.shape[0])


def choose(scores_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The K best experts of each token, int64 (T,K), best first; of the best groups where they are limited."""
    if routing.limited < routing.groups:
        by_group = scores_TE.unflatten(1, (routing.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]) if routing.score == "sigmoid" else 1, dim=-1).values
        kept_TG = torch.zeros_like(best[..., 0], dtype=torch.bool)
        kept_TG.scatter_(1, best.sum(dim=-1).topk(routing.limited, dim=1).indices, True)
        scores_TE = by_group.masked_fill(~kept_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return scores_TE.topk(routing.top_k, dim=1).indices


@torch.library.custom_op(
    "fp8stack::settled_choices", mutates_args=(), schema="(Tensor chosen_TK, int experts) -> Tensor"
)
def _settled_choices(chosen_TK, experts):
    """Choices (R,), `experts` for nobody: an op, so that a compiled graph checks them too, and when it runs."""
    known = (chosen_TK >= 0) & (chosen_TK < experts)
    if os.environ.get(CHECK) == "1" and not bool((known | (chosen_TK == -1)).all()):
        token, choice = (~known & (chosen_TK != -1)).nonzero()[0].tolist()
        raise ValueError(
            f"token {token} chose expert {int(chosen_TK[token, choice])} of {experts}; expected 0 to {experts - 1}, or "
            "-1 for nobody; look at the router that chose"
        )
    return torch.where(known, chosen_TK, experts).flatten()


@_settled_choices.register_fake
def _(chosen_TK, experts):
    return torch.empty_like(chosen_TK, memory_format=torch.contiguous_format).flatten()


def _counted(flat_R: torch.Tensor, experts: int) -> torch.Tensor:
    ones = torch.ones_like(flat_R)
    return torch.zeros(experts + 1, dtype=torch.int64, device=flat_R.device).scatter_add_(0, flat_R, ones)[:experts]


def counted(chosen_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen, int64 (E,). Does not wait for the device.

    -1 stands for nobody, and so does every other number that is no expert's; where FP8STACK_CHECK=1 those raise
    ValueError, which waits.
    """
    _require_choices(chosen_TK)
    return _counted(_settled_choices(chosen_TK, experts), experts)


def _require_choices(chosen_TK: torch.Tensor) -> None:
    if chosen_TK.dtype != torch.int64 or chosen_TK.dim() != 2:
        raise ValueError(
            f"choices are {chosen_TK.dtype} of shape {tuple(chosen_TK.shape)}; expected int64 (T, K), the numbers of K "
            "experts a token; convert them with .to(torch.int64), and give one choice a token a dimension of its own"
        )


# ------------------------------------------------------------------------------------------------ dispatch and combine
@dataclass(frozen=True)
class Order:
    """Where rows went: row r is choice order_R[r] of T*K, choice c is row inverse_R[c]; offs_E: where experts end."""

    order_R: torch.Tensor
    inverse_R: torch.Tensor
    offs_E: torch.Tensor


def sort_by_expert(chosen_TK: torch.Tensor, experts: int) -> Order:
    """The order of rows: by expert, then by token; choices of nobody, as in `counted`, last, past the last end."""
    _require_choices(chosen_TK)
    flat_R = _settled_choices(chosen_TK, experts)
    order_R = flat_R.sort(stable=True).indices
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return Order(order_R, inverse_R, _counted(flat_R, experts).cumsum(0).to(torch.int32))


class _Dispatch(torch.autograd.Function):
    """x (T,D) -> rows (R,D). The gradient of a token is the wide sum of its K rows, rounded once: no atomics."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.choices = max(order_R.shape[0] // max(x_TD.shape[0], 1), 1)
        return x_TD.index_select(0, order_R // ctx.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        tokens = inverse_R.shape[0] // ctx.choices
        grad_TKD = grad_RD.index_select(0, inverse_R).view(tokens, ctx.choices, grad_RD.shape[1])
        return grad_TKD.sum(dim=1, dtype=wide_dtype(grad_RD)).to(grad_RD.dtype), None, None


class _Combine(torch.autograd.Function):
    """rows (R,D), weights (T,K) -> (T,D): the wide sum of a token's weighted rows, rounded once."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: torch.Tensor, weights_TK: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y_RD, weights_TK, order_R, inverse_R)
        wide = wide_dtype(y_RD)
        rows_TKD = y_RD.index_select(0, inverse_R).view(*weights_TK.shape, y_RD.shape[1]).to(wide)
        return rounded((rows_TKD * weights_TK.to(wide).unsqueeze(-1)).sum(dim=1), y_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y_RD, weights_TK, order_R, inverse_R = ctx.saved_tensors
        wide = wide_dtype(y_RD)
        grad_T1D = grad_TD.to(wide).unsqueeze(1)
        grad_TKD = (grad_T1D * weights_TK.to(wide).unsqueeze(-1)).to(y_RD.dtype)
        rows_TKD = y_RD.index_select(0, inverse_R).view(*weights_TK.shape, y_RD.shape[1]).to(wide)
        grad_weights_TK = (rows_TKD * grad_T1D).sum(dim=-1).to(weights_TK.dtype)
        return grad_TKD.flatten(0, 1).index_select(0, order_R), grad_weights_TK, None, None


def dispatch(x_TD: torch.Tensor, order: Order) -> torch.Tensor:
    """Tokens (T,D) as rows (R,D) in the order of experts."""
    return _Dispatch.apply(x_TD, order.order_R, order.inverse_R)


def combine(y_RD: torch.Tensor, weights_TK: torch.Tensor, order: Order) -> torch.Tensor:
    """The rows (R,D) of each token times its weights, summed: (T,D)."""
    return _Combine.apply(y_RD, weights_TK, order.order_R, order.inverse_R)


# --------------------------------------------------------------------------------------------------- expert parallelism
class _Exchange(torch.autograd.Function):
    """Rows to the ranks that want them, in blocks of `sent[r]` rows to rank r; `received[r]` come from it.

    As bytes: gloo carries no float8 and not every build bf16. The gradient goes the other way.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows_RD.new_empty(sum(received), rows_RD.shape[1])
        into, given = out.view(torch.uint8), rows_RD.contiguous().view(torch.uint8)
        dist.all_to_all_single(into, given, received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Exchange.apply(grad_RD, ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged_experts(
    rows_RD: torch.Tensor, offs_E: torch.Tensor, experts: GroupedExperts, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows (R,D), sorted by all E experts, through experts that live on the ranks of `group`: (R,D), in their order.

    Rank r holds experts r*E/size up to the next's. Its rows arrive sorted by sender, then expert, and are sorted by
    expert before they are computed. The numbers of rows are exchanged first and read on the host: the one wait. Rows
    past offs[-1] go nowhere and come out as zero. Bad ends are clamped, as where nothing is exchanged (groups.py), or
    raise ValueError where FP8STACK_CHECK=1.
    """
    require_offs(offs_E, rows_RD, ALIGNMENT)
    if os.environ.get(CHECK) == "1" and not isinstance(offs_E, FakeTensor):
        require_good_offs(offs_E, len(rows_RD))
    size = dist.get_world_size(group)
    starts_E, ends_E, _ = bounds_reference(offs_E, len(rows_RD), 1)
    counts_E = (ends_E - starts_E).to(torch.int64)
    if len(counts_E) % size:
        raise ValueError(
            f"{len(counts_E)} experts do not divide over {size} ranks; expected a multiple; choose another degree"
        )
    theirs = torch.empty_like(counts_E)
    dist.all_to_all_single(theirs, counts_E, group=group)
    sent, received = _rows_by_rank(counts_E.view(size, -1), theirs.view(size, -1), len(rows_RD))
    used = sum(sent)
    arrived = _Exchange.apply(rows_RD[:used], sent, received, group)

    local = torch.arange(len(theirs) // size, device=rows_RD.device).repeat(size)
    order = sort_by_expert(
        torch.repeat_interleave(local, theirs, output_size=sum(received))[:, None], len(local) // size
    )
    y_RD = experts(dispatch(arrived, order), order.offs_E)
    returned = _Exchange.apply(_Reorder.apply(y_RD, order.inverse_R, order.order_R), received, sent, group)
    if used == len(rows_RD):  # with nothing to add, cat would copy it all
        return returned
    return torch.cat([returned, returned.new_zeros(len(rows_RD) - used, returned.shape[1])])


def _rows_by_rank(mine: torch.Tensor, theirs: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows go to each rank and come from it; in a dry run, whose numbers nobody knows, equal shares."""
    if isinstance(mine, FakeTensor):
        size = len(mine)
        shares = [(rank + 1) * rows // size - rank * rows // size for rank in range(size)]
        return shares, shares
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    return sent, received


class _Reorder(torch.autograd.Function):
    """rows[index]; index is a permutation and inverse its inverse, so that the gradient is one too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


# ------------------------------------------------------------------------------------------------------------ the layer
class MoE(nn.Module):
    """Router, experts and shared experts: the feed-forward part of a block.

    shared: how many experts' width every token passes, 0 for none. Under expert_parallel the experts of this rank alone
    are held; router and shared experts are everybody's.
    """

    def __init__(self, dim: int, ffn: int, routing: Routing, shared: int = 0) -> None:
        super().__init__()
        self.router = Router(dim, routing)
        self.experts = GroupedExperts(routing.experts, dim, ffn)
        self.shared = GatedMLP(dim, ffn * shared) if shared else None
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D), in x's dtype. Raises ValueError for another D."""
        dim = self.router.weight.shape[1]
        if x.shape[-1:] != (dim,):
            raise ValueError(
                f"input has shape {tuple(x.shape)}; expected (..., {dim}), the model width of this layer; check the "
                "layer before it"
            )
        rows_RD, weights_TK, order = self.dispatched(x)
        return self.combined(x, self.through_experts(rows_RD, order.offs_E), weights_TK, order)

    def dispatched(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Order]:
        """The first third of a forward pass: (..., D) -> rows (R,D) in the order of experts, weights (T,K), order."""
        x_TD = x.reshape(-1, x.shape[-1])
        chosen_TK, weights_TK = self.router(x_TD)
        order = sort_by_expert(chosen_TK, self.router.routing.experts)
        return dispatch(x_TD, order), weights_TK, order

    def through_experts(self, rows_RD: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
        """The second: (R,D) -> (R,D), wherever the experts are."""
        if self.group is None:
            return self.experts(rows_RD, offs_E)
        return exchanged_experts(rows_RD, offs_E, self.experts, self.group)

    def combined(self, x: torch.Tensor, y_RD: torch.Tensor, weights_TK: torch.Tensor, order: Order) -> torch.Tensor:
        """The third: rows (R,D) that come from experts, weighted and summed, and x through the shared ones."""
        y_TD = combine(y_RD, weights_TK, order)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x.reshape(-1, x.shape[-1]))
        return y_TD.view(x.shape).to(x.dtype)

    @torch.no_grad()
    def expert_parallel(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's experts, and send tokens to theirs from now on. Parameters become new, smaller ones.

        Gradients of experts are sums over the tokens of all ranks of `group`, those of everything else over this rank's
        own: whoever averages gradients over ranks divides both by the same number, the world's.

        Raises ValueError where experts do not divide, and for a layer that was cut before.
        """
        if self.group is not None:
            raise ValueError(
                f"this layer holds {len(self.experts.w1)} of {self.router.routing.experts} experts already; expected a "
                "whole one; call expert_parallel once, before parameters are sharded further"
            )
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        count = self.router.routing.experts
        if count % size:
            raise ValueError(
                f"{count} experts do not divide over {size} ranks; expected a multiple; choose another degree"
            )
        mine = slice(rank * count // size, (rank + 1) * count // size)
        for name in ("w1", "w2", "w3"):
            whole = getattr(self.experts, name)
            setattr(self.experts, name, nn.Parameter(whole[mine].clone(), requires_grad=whole.requires_grad))
        self.group = group
