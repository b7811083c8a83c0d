"""FP8 linear layers: which operand of which GEMM is quantised how, and the autograd around it.

A linear y = x W^T (x (M,K), W (N,K)) is three GEMMs, each contracting another dimension. FP8 needs a scale that is
constant along the contraction, so the same tensor is quantised along different dimensions in different GEMMs:

    forward      y  (M,N) = x   (M,K) . W (N,K)^T     contraction K: a scale a row of x, a scale a row of W
    grad input   dX (M,K) = dY  (M,N) . W (N,K)       contraction N: a scale a row of dY, a scale a *column* of W
    grad weight  dW (N,K) = dY^T(N,M) . x (M,K)       contraction M: a scale a column of dY, a scale a column of x

Every operand below is therefore brought into the form (rows, contraction) before it is quantised, and `scaled_mm`
gets the right one as the transposed view (column-major), which is the layout that FP8 matrix units take. `RECIPES`
says which granularity and format each of the six operands has; a GEMM that is None stays in high precision. A scale
for a block of 128 or 32 along the contraction follows the same rule, block by block; only a tensor's scale and that of
a 128x128 block are the same along both dimensions.

Weights stay plain fp32 (or bf16) `nn.Parameter`s named `weight` and `bias`: a state dict has the keys and the tensors
of `nn.Linear`. They are cast to the activations' dtype for compute, as FSDP2's mixed precision would; that dtype is
autocast's where it is on, as with torch's own linear. fp16 is widened to fp32, which holds it exactly: neither the
quantisers nor the products take it.

CPU arithmetic: a product of bf16 matrices is accumulated in float64, rounded to float32 and from there to bf16.
Products of bf16 numbers have 16 significant bits, so a float64 sum of them is exact unless their sizes span more than
2^36, and the same whatever the order: the same bits on every CPU, vector width and thread count. In float32 the order
shows, a few results in a thousand round to the other bf16 neighbour, and four layers on a gradient has moved by 1 %.
It costs twice the arithmetic, and is still many times faster than torch's own bf16 path where bf16 instructions are
missing.

Not here: experts (moe.py), fused two-way quantisation (the transposed operands are copied, then quantised row by
row).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fp8stack import device as devices
from fp8stack import formats
from fp8stack.all_gather import Fp8AllGather, GatheredWeight
from fp8stack.formats import Format
from fp8stack.kernels import mxfp8, scaled_kernel
from fp8stack.kernels.blockwise import quantize_blockwise
from fp8stack.kernels.colwise import quantize_colwise_grouped
from fp8stack.kernels.mxfp8 import quantize_mxfp8
from fp8stack.kernels.rowwise import quantize_rowwise
from fp8stack.kernels.rowwise_and_colwise import quantize_rowwise_and_colwise
from fp8stack.kernels.scaled_mm import choose_backend, scaled_mm
from fp8stack.kernels.tensorwise import quantize_tensorwise
from fp8stack.metrics import CodeCounter

# What the FP8 matrix units of every supported device ask of N, K and of a contracted M.
ALIGNMENT = 16


# -------------------------------------------------------------------------------------------------------------- recipes
@dataclass(frozen=True)
class Cast:
    """How an operand becomes FP8: what shares a scale, and the kind of format.

    granularity: a `row` (along the contraction), the `tensor`, blocks of `1x128` or `1x32` (along the contraction; the
    scales of the latter are E8M0) or `128x128`.
    """

    granularity: Literal["row", "tensor", "1x128", "128x128", "1x32"]
    kind: Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class Gemm:
    """The casts of the two operands of one GEMM."""

    left: Cast
    right: Cast


@dataclass(frozen=True)
class Recipe:
    """One row of RECIPES: the casts of the three GEMMs. A GEMM that is None is done in the activations' dtype.

    pow2: scales are powers of two. fast_accum: the hardware may accumulate the output with fewer bits;
    fast_accum_gradients: both gradients too. scale_mode: how the E8M0 scales of 1x32 are rounded (mxfp8.py, MODES).
    fp8_all_gather: weights of linears come as FP8 codes out of FSDP2's all-gathers (all_gather.py); only where
    `one_weight_scale`.
    """

    name: str
    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm | None
    pow2: bool
    fast_accum: bool = True
    fast_accum_gradients: bool = False
    scale_mode: str = "rceil"
    fp8_all_gather: bool = False

    def __post_init__(self) -> None:
        if self.scale_mode not in mxfp8.MODES:
            raise ValueError(
                f"scale_mode is {self.scale_mode!r}; expected one of: {', '.join(mxfp8.MODES)}; correct the recipe"
            )
        if self.fp8_all_gather and not self.one_weight_scale:
            raise ValueError(
                f"fp8_all_gather is set and recipe '{self.name}' has other scales of a weight; expected one scale of "
                "the whole weight in every product, as tensorwise has; take that, or leave fp8_all_gather out"
            )

    @property
    def one_weight_scale(self) -> bool:
        """Whether both products of a weight take the same codes of it, with one scale."""
        return self.output.right == self.grad_input.right and self.output.right.granularity == "tensor"

    def casts(self) -> Iterator[Cast]:
        """Those of all operands in FP8."""
        for gemm in (self.output, self.grad_input, self.grad_weight):
            if gemm is not None:
                yield from (gemm.left, gemm.right)


_ROW, _TENSOR, _TENSOR_GRAD = Cast("row", "e4m3"), Cast("tensor", "e4m3"), Cast("tensor", "e5m2")
_BLOCK, _SQUARE, _MX = Cast("1x128", "e4m3"), Cast("128x128", "e4m3"), Cast("1x32", "e4m3")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "tensorwise",
            output=Gemm(_TENSOR, _TENSOR),
            grad_input=Gemm(_TENSOR_GRAD, _TENSOR),
            grad_weight=Gemm(_TENSOR_GRAD, _TENSOR),
            pow2=False,
        ),
        Recipe(
            "rowwise",
            output=Gemm(_ROW, _ROW),
            grad_input=Gemm(_ROW, _ROW),
            grad_weight=Gemm(_ROW, _ROW),
            pow2=True,
        ),
        # FP8 hurts the weight gradient most; W has one scale in grad input, so that needs no amax of its columns.
        Recipe(
            "rowwise_with_gw_hp",
            output=Gemm(_ROW, _ROW),
            grad_input=Gemm(_ROW, _TENSOR),
            grad_weight=None,
            pow2=True,
        ),
        # DeepSeek-V3's: a weight's block serves both directions.
        Recipe(
            "blockwise",
            output=Gemm(_BLOCK, _SQUARE),
            grad_input=Gemm(_BLOCK, _SQUARE),
            grad_weight=Gemm(_BLOCK, _BLOCK),
            pow2=False,
        ),
        # OCP formats only. rceil: no code of a block saturates.
        Recipe(
            "mxfp8",
            output=Gemm(_MX, _MX),
            grad_input=Gemm(_MX, _MX),
            grad_weight=Gemm(_MX, _MX),
            pow2=True,
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name; ValueError naming those that exist."""
    if name not in RECIPES:
        raise ValueError(
            f"recipe '{name}' does not exist; expected one of: {', '.join(sorted(RECIPES))}; choose one of these"
        )
    return RECIPES[name]


# -------------------------------------------------------------------------------------------------- high-precision GEMM
_played: str | None = None


@contextmanager
def playing(device_type: str) -> Iterator[None]:
    """Inside, tensors of a CPU take the arithmetic of that device type: for a dry run, which has no other device."""
    global _played
    before, _played = _played, device_type
    try:
        yield
    finally:
        _played = before


def device_type(x: torch.Tensor) -> str:
    """Whose arithmetic x takes: its device's type, unless a dry run is `playing` another."""
    return _played or x.device.type


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """What sums and exponentials of bf16 values are computed in: float64 on a CPU, float32 elsewhere.

    On a CPU neither the order of a sum nor the last bit of an exponential then reaches a bf16 result (see the header).
    """
    return torch.float64 if device_type(x) == "cpu" else torch.float32


def widened(x: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor on a CPU as float64, exactly; any other tensor as it is: its device multiplies it well enough."""
    return x.double() if device_type(x) == "cpu" and x.dtype == torch.bfloat16 else x


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """What a linear of torch computes x in: autocast's dtype where it is on for the device of x, else that of x."""
    return torch.get_autocast_dtype(x.device.type) if x.dtype != torch.float64 and _autocasts(x) else x.dtype


def _autocasts(x: torch.Tensor) -> bool:
    # Not torch.amp.is_autocast_available, which torch.compile of 2.11 cannot trace. The meta device has no autocast.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Inside, products on the device of x are done in the dtype of their operands.

    Around products alone: a compiled backward pass is traced where its forward pass began, and dynamo (torch 2.13)
    takes no other place for it.
    """
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in dtype, as the result of an autograd.Function: `.to` is not called where it does nothing.

    torch.compile of 2.11 gives zero gradients, silently, where the last thing that a forward calls returns the very
    tensor it was given (pytorch/pytorch#180642); delete when 2.11 is not supported.
    """
    return x if x.dtype == dtype else x.to(dtype)


def product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (M,K) @ b (K,N) [+ bias (N)] -> (M,N) in out_dtype, for operands that `widened` returned."""
    with without_autocast(a):
        total = a @ b if bias is None else torch.addmm(bias.to(a.dtype), a, b)
    return rounded(total, out_dtype)


class _HighPrecisionLinear(torch.autograd.Function):
    """x (M,K), weight (N,K), bias (N) or None, one dtype -> (M,N) in it.

    On a CPU the bf16 operands are widened once and kept wide for the backward pass: each conversion costs there about
    a fifth of the product.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.dtype = x.dtype
        x, weight = widened(x), widened(weight)
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), ctx.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        wide = widened(grad)
        return (
            product(wide, weight, ctx.dtype) if need_x else None,
            product(wide.t(), x, ctx.dtype) if need_weight else None,
            _grad_bias(grad) if need_bias else None,
        )


def _grad_bias(grad: torch.Tensor) -> torch.Tensor:
    """Column sums of grad (M,N), accumulated in the device's wide dtype and rounded once."""
    return grad.sum(dim=0, dtype=wide_dtype(grad)).to(grad.dtype)


class Linear(nn.Linear):
    """nn.Linear that casts its master weight to the dtype of its input and uses the arithmetic of this file on CPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N), in x's dtype, or autocast's."""
        dtype = autocast_dtype(x)
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        y = _HighPrecisionLinear.apply(x.to(dtype).reshape(-1, self.in_features), weight, bias)
        return y.view(*x.shape[:-1], self.out_features)


# ------------------------------------------------------------------------------------------------------------- FP8 GEMM
@dataclass(frozen=True)
class Plan:
    """What one layer was told at conversion: recipe, formats of the arch, target. The hardware is not asked again."""

    recipe: Recipe
    e4m3: Format
    e5m2: Format
    counter: CodeCounter | None = field(default=None, compare=False)
    target: str = ""

    def format_of(self, cast: Cast) -> Format:
        """The arch's format of that kind."""
        return self.e4m3 if cast.kind == "e4m3" else self.e5m2


class _Operand:
    """A 2-D tensor on its way into FP8 GEMMs. A tensorwise cast is done once, its codes serve both directions.

    both_ways: contracting will be called for both dimensions with this cast. A cast of rows then reads x once for both.
    given: codes and inverse scale of x, where a tensorwise cast has been done already; of x only the shape counts then.
    """

    def __init__(
        self,
        x: torch.Tensor,
        plan: Plan,
        backward: bool = False,
        both_ways: Cast | None = None,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.x, self.plan, self.backward, self.both_ways, self.given = x, plan, backward, both_ways, given
        self._tensorwise: dict[Cast, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_columns: tuple[torch.Tensor, torch.Tensor] | None = None

    def contracting(self, dim: Literal[0, 1], cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
        """Row-major codes (rows, contraction), contracting dimension `dim` of x, and their inverse scales.

        The scales: (rows,) or (); of blocks (rows, blocks) or (blocks, blocks), as the quantisers write them.
        Contracting dimension 0 appends zero codes up to a multiple of ALIGNMENT, which change neither an amax nor a
        sum.
        """
        fmt, recipe = self.plan.format_of(cast), self.plan.recipe
        if cast.granularity == "tensor":
            return self._of_tensor(dim, cast, fmt)
        if cast.granularity == "row":
            codes, inverse_scale = self._of_rows(cast, fmt) if dim == 1 else self._turned(cast, fmt)
        elif cast.granularity == "1x32":
            codes, inverse_scale = quantize_mxfp8(self._along(dim), fmt, recipe.scale_mode)
        else:
            codes, inverse_scale = quantize_blockwise(self._along(dim), fmt, cast.granularity, pow2=recipe.pow2)
        self._count(codes, fmt)
        return codes, inverse_scale

    def _of_rows(self, cast: Cast, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
        if self.both_ways != cast:
            return quantize_rowwise(self.x, fmt, pow2=self.plan.recipe.pow2)
        codes, inverse_scale, *columns, _ = quantize_rowwise_and_colwise(
            self.x, self._one_group(), fmt, self.plan.recipe.pow2, ALIGNMENT
        )
        self._of_columns = (columns[0], columns[1])
        return codes, inverse_scale

    def _turned(self, cast: Cast, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
        """A scale a column: the rows are one group of a grouped kernel, which reads them as they lie."""
        if self._of_columns is None:
            *columns, _ = quantize_colwise_grouped(self.x, self._one_group(), fmt, self.plan.recipe.pow2, ALIGNMENT)
            self._of_columns = (columns[0], columns[1])
        (codes, inverse_scale), self._of_columns = self._of_columns, None
        contraction = self.x.shape[0] + -self.x.shape[0] % ALIGNMENT
        return codes.t()[:, :contraction], inverse_scale[0]

    def _along(self, dim: Literal[0, 1]) -> torch.Tensor:
        """x as (rows, contraction); a contracted dimension 0 ends with zeros."""
        if dim == 1:
            return self.x
        tail = -self.x.shape[0] % ALIGNMENT
        return (nn.functional.pad(self.x, (0, 0, 0, tail)) if tail else self.x).t()

    def _one_group(self) -> torch.Tensor:
        return self.x.new_full((1,), self.x.shape[0], dtype=torch.int32)

    def _of_tensor(self, dim: Literal[0, 1], cast: Cast, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
        if cast not in self._tensorwise:
            self._tensorwise[cast] = self.given or quantize_tensorwise(self.x, fmt, pow2=self.plan.recipe.pow2)
            self._count(self._tensorwise[cast][0], fmt)
        codes, inverse_scale = self._tensorwise[cast]
        if dim == 0:  # through bytes: copies of float8 tensors are not implemented everywhere
            turned, tail = codes.view(torch.uint8).t(), -self.x.shape[0] % ALIGNMENT
            codes = (nn.functional.pad(turned, (0, tail)) if tail else turned).contiguous().view(codes.dtype)
        return codes, inverse_scale

    def _count(self, codes: torch.Tensor, fmt: Format) -> None:
        if self.plan.counter is not None:
            self.plan.counter.observe(codes, fmt, self.backward)


def _gemm(
    left: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    casts: Gemm,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(L,C) codes times (R,C) codes of their casts -> (L,R). Of a row and a tensor scale, the single one is expanded.

    Where torch's product runs, a float32 layer gets bf16 values with row scales, and its bias is added afterwards: that
    product gives float32 with tensor scales only, and never with a bias.
    """
    (a, inverse_a), (b, inverse_b) = left, right
    if inverse_a.ndim == 2:  # blocks, which our own kernel multiplies: any output, with a bias
        granularity = "1x32" if inverse_a.dtype == torch.uint8 else f"1x128 {casts.right.granularity}"
        return scaled_mm(
            a,
            b.t(),
            inverse_a,
            inverse_b.t(),
            out_dtype=out_dtype,
            bias=bias,
            fast_accum=fast_accum,
            granularity=granularity,
        )
    if inverse_a.ndim != inverse_b.ndim:
        inverse_a = inverse_a.expand(a.shape[0]).contiguous()
        inverse_b = inverse_b.expand(b.shape[0]).contiguous()
    # The meta device has no backend; the shapes and the dtype are the same by each.
    if out_dtype == torch.float32 and a.device.type != "meta" and choose_backend(a, b.t()) == "torch":
        inner = torch.bfloat16 if inverse_a.ndim else torch.float32
        y = rounded(scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=inner, fast_accum=fast_accum), out_dtype)
        return y if bias is None else y + bias
    return scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)


class _Float8LinearFunction(torch.autograd.Function):
    """x (M,K), weight (N,K), bias (N) or None, one dtype (bf16 or fp32) -> (M,N) in that dtype.

    codes, inverse_scale: of a weight whose values are not there (all_gather.py). It may say another dtype than x, which
    its gradient then has.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: Plan,
        codes: torch.Tensor | None = None,
        inverse_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = None if codes is None or inverse_scale is None else (codes, inverse_scale)
        ctx.plan, ctx.weight_dtype = plan, weight.dtype
        if given is not None:
            weight = given[0]
        ctx.save_for_backward(x, weight, inverse_scale)
        if x.shape[0] == 0:
            return x.new_zeros(0, weight.shape[0])
        casts = plan.recipe.output
        return _gemm(
            _Operand(x, plan).contracting(1, casts.left),
            _Operand(weight, plan, given=given).contracting(1, casts.right),
            casts,
            x.dtype,
            plan.recipe.fast_accum,
            bias,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse_scale = ctx.saved_tensors
        plan: Plan = ctx.plan
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        if x.shape[0] == 0:  # nothing to contract: torch's GEMMs refuse it, the gradient is exactly zero
            return (
                torch.zeros_like(x),
                x.new_zeros(weight.shape, dtype=ctx.weight_dtype),
                grad.new_zeros(weight.shape[0]) if need_bias else None,
                None,
                None,
                None,
            )

        # A broadcast gradient has stride 0 and a transposed consumer gives a transposed one: settle it once.
        grad = grad.contiguous()
        of_x, of_weight = plan.recipe.grad_input, plan.recipe.grad_weight
        twice = need_x and need_weight and of_weight is not None and of_x.left == of_weight.left
        grad_operand = _Operand(grad, plan, backward=True, both_ways=of_x.left if twice else None)
        fast_accum = plan.recipe.fast_accum_gradients
        given = None if inverse_scale is None else (weight, inverse_scale)
        grad_x = grad_weight = None
        if need_x:
            casts = of_x
            grad_x = _gemm(
                grad_operand.contracting(1, casts.left),
                _Operand(weight, plan, backward=True, given=given).contracting(0, casts.right),
                casts,
                x.dtype,
                fast_accum,
            )
        if need_weight and of_weight is None:
            grad_weight = product(widened(grad).t(), widened(x), x.dtype)
        elif need_weight:
            casts = of_weight
            grad_weight = _gemm(
                grad_operand.contracting(0, casts.left),
                _Operand(x, plan, backward=True).contracting(0, casts.right),
                casts,
                x.dtype,
                fast_accum,
            )
        if grad_weight is not None:
            grad_weight = rounded(grad_weight, ctx.weight_dtype)
        return grad_x, grad_weight, _grad_bias(grad) if need_bias else None, None, None, None


# Dtype of the input -> of the operands before their quantisation, and of the products.
_COMPUTED_IN = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}


class Float8Linear(nn.Module):
    """A linear whose GEMMs run in FP8. Made by `convert_to_float8`; owns the very parameters of the layer it replaces.

    Args:
        weight: (N,K) parameter, any float dtype; cast to the input's dtype (fp32 where that is fp16), then to FP8.
        bias: (N) parameter or None, added in float32 before the one rounding.
        plan: recipe and formats.

    Raises:
        ValueError: N or K is not a multiple of 16, by name.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, plan: Plan) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for label, size in (("out_features (N)", self.out_features), ("in_features (K)", self.in_features)):
            if size % ALIGNMENT:
                raise ValueError(
                    f"{label} is {size}; FP8 GEMMs need a multiple of {ALIGNMENT}; leave this layer out with the filter"
                )
        self.weight = weight
        self.register_parameter("bias", bias)
        self.plan = plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) bf16, fp16 or fp32, any strides -> (..., N) in x's dtype; under autocast in its dtype.

        Raises ValueError for another K, and for parameters on another device; UnsupportedDtype for another dtype.
        """
        if not x.dim():
            raise ValueError(f"input is a single number; expected (..., {self.in_features}); check the layer before it")
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None and parameter.device != x.device:
                raise ValueError(
                    f"input is on {x.device} and the {name} on {parameter.device}; expected one device; move the input "
                    "there, or the layer (one on meta by to_empty, then fill it)"
                )
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"input has {x.shape[-1]} features in its last dimension; this layer takes {self.in_features}; "
                "check the layer before it"
            )
        dtype = autocast_dtype(x)
        if dtype not in _COMPUTED_IN:
            raise formats.UnsupportedDtype(
                f"input has dtype {dtype}; Float8Linear takes {', '.join(str(taken) for taken in _COMPUTED_IN)}; "
                "cast the input"
            )
        compute = _COMPUTED_IN[dtype]
        weight, codes, inverse_scale = self.weight, None, None
        if isinstance(weight, GatheredWeight):
            codes, inverse_scale = weight.codes, weight.inverse_scale
        elif self.plan.recipe.fp8_all_gather:
            raise ValueError(
                f"the recipe has fp8_all_gather and the weight is a plain {weight.dtype}; expected codes that FSDP2 "
                "gathered; call fully_shard, then precompute() of linear.fp8_all_gather(model) before each step"
            )
        else:
            weight = weight.to(compute)
        bias = None if self.bias is None else self.bias.to(compute)
        rows = x.to(dtype).to(compute).reshape(-1, self.in_features)
        y = _Float8LinearFunction.apply(rows, weight, bias, self.plan, codes, inverse_scale).to(dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def runs(self) -> str:
        """The name of its recipe; as Convertible."""
        return self.plan.recipe.name

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.plan.recipe.name}, e4m3={self.plan.e4m3.name}"
        )


# ----------------------------------------------------------------------------------------------------------- conversion
class Convertible(nn.Module):
    """A module that is no linear and can run in FP8 itself, such as the experts of moe.py."""

    def runs(self) -> str | None:
        """The recipe that this module runs in FP8 already, by name, or None."""
        raise NotImplementedError

    def refuses(self, plan: Plan) -> str | None:
        """Why this module stays in high precision under the plan, or None."""
        raise NotImplementedError

    def to_float8(self, plan: Plan) -> str | None:
        """Run in FP8 from now on, by the plan. Returns what a user must know of it, if it is not just the recipe."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conversion:
    """What `convert_to_float8` did. `left` maps the name of each module that stayed as it was to the reason.

    `experts` are those of `converted` that are no linears; `notes` maps what runs otherwise than the recipe's name says
    to how.
    """

    recipe: str
    e4m3: str
    e5m2: str
    reason: str
    converted: tuple[str, ...]
    left: dict[str, str]
    experts: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = f"{len(self.converted) - len(self.experts)} linears"
        what += f" and the experts of {len(self.experts)} layers" if self.experts else ""
        lines = [f"{what} run in FP8 ({self.recipe}, {self.e4m3}/{self.e5m2}: {self.reason})"]
        lines += [f"  {name}: {note}" for name, note in self.notes.items()]
        lines += [f"  left as it was: {name} ({why})" for name, why in self.left.items()]
        return "\n".join(lines)


def _matches(name: str, entry: str) -> bool:
    """Whether `entry` is a run of whole dotted components of `name`: 'attention.wk' of 'layers.0.attention.wk'."""
    return f".{entry}." in f".{name}."


# What of a linear the FP8 one would not have: a hook of these kinds, or a `forward` of its own.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _stays(name: str, linear: nn.Linear) -> str | None:
    """Why this linear is not replaced, or None."""
    sizes = (("N", linear.out_features), ("K", linear.in_features))
    odd = [f"{label} = {size}" for label, size in sizes if size % ALIGNMENT]
    if type(linear) not in (nn.Linear, Linear):
        return f"{type(linear).__name__} is a linear of its own kind, which a plain FP8 linear would not be"
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        return "it has hooks, which would not run; register them after the conversion"
    if "forward" in vars(linear):
        return "its forward was replaced, which would not run; replace it after the conversion"
    if odd:
        return f"{' and '.join(odd)} not a multiple of {ALIGNMENT}"
    return None if name else "the model itself is this linear; wrap it in a module"


def _without_fused_path(model: nn.Module) -> dict[str, str]:
    """Turn off what would evaluate a converted linear in high precision: torch's encoder reads its weight itself.

    Without gradients, in eval(), nn.TransformerEncoderLayer runs one fused op in place of its modules. Returns a note
    for each layer, by name.
    """
    layers = {
        module: name or "(root)"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        and any(isinstance(linear, Float8Linear) for linear in (module.linear1, module.linear2))
    }
    for layer in layers:
        layer.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not layers.keys().isdisjoint(module.layers):
            module.use_nested_tensor = False  # only that op takes what a padded batch would become
    return dict.fromkeys(layers.values(), "its fused op for evaluation, which does not run its linears, is off")


def convert_to_float8(
    model: nn.Module,
    recipe: str | Recipe,
    filter: Sequence[str] = (),
    *,
    detected: devices.Detected | None = None,
    counter: CodeCounter | None = None,
) -> Conversion:
    """Replace the `nn.Linear`s of `model`, in place, by `Float8Linear`s that own the same parameters.

    Experts (moe.py) and other Convertibles stay the modules they are and run in FP8 from then on. What runs in FP8
    already stays as it is, whatever recipe it has.

    Args:
        model: any module; its own root may not be the linear to replace.
        recipe: a key of `RECIPES`, or one of its rows with fields replaced, such as fast_accum_gradients.
        filter: names of modules to leave alone, whole dotted components each ('output', 'layers.0', 'attention.wk');
            a module that stands in several places, in all of them.
        detected: the answer of `device.detect()`; asked for the device of the first parameter when absent.
        counter: where saturated and NaN codes are counted; absent, nothing is counted.

    Returns:
        What was converted, what was left, and why.

    Raises:
        ValueError: unknown recipe; a filter that is no sequence of names, or a name in it that matches no linear;
            nothing left to convert.
        UnsupportedDtype: the recipe needs formats that the arch does not speak.
        UnknownArch: the device, or FP8STACK_ARCH, has no row of formats; a model on meta without detected.
    """
    if not isinstance(recipe, str | Recipe):
        raise ValueError(
            f"recipe is {recipe!r}; expected a Recipe or one of: {', '.join(sorted(RECIPES))}; choose one of these"
        )
    chosen = recipe_named(recipe) if isinstance(recipe, str) else recipe
    if isinstance(filter, str):
        raise ValueError(f"filter is the text '{filter}'; expected a sequence of names; pass ('{filter}',)")
    if not isinstance(filter, Collection) or not all(isinstance(entry, str) for entry in filter):
        raise ValueError(f"filter is {filter!r}; expected a sequence of names; pass () to leave nothing alone")
    # Every name of a module that stands in several places: replacing one of them would leave the others as they are.
    named = model.named_modules(remove_duplicate=False)
    linears = {name: module for name, module in named if isinstance(module, nn.Linear | Float8Linear | Convertible)}
    for entry in filter:
        if not any(_matches(name, entry) for name in linears):
            raise ValueError(
                f"filter name '{entry}' matches no linear of this model; expected whole dotted components of one of: "
                f"{', '.join(sorted(linears)) or 'none, it has no linear'}; correct or drop the name"
            )
    if detected is None:
        first = next(model.parameters(), None)
        if first is not None and first.device.type == "meta":
            raise devices.UnknownArch(
                "the model is on the meta device, which has no arch; expected the answer for the device that it will "
                "run on; pass detected=device.detect(), or convert after to_empty"
            )
        detected = devices.detect(first.device if first is not None else None)
    plan = Plan(chosen, formats.get(detected.arch.e4m3), formats.get(detected.arch.e5m2), counter, detected.target.name)
    scaled_by_bytes = {plan.format_of(cast).name for cast in chosen.casts() if cast.granularity == "1x32"}
    foreign = sorted(scaled_by_bytes - {*mxfp8.FORMATS})
    if foreign:
        raise formats.UnsupportedDtype(
            f"recipe '{chosen.name}' has E8M0 scales, which no {' or '.join(foreign)} of {detected.arch.name} has "
            f"({detected.reason}); expected an arch with {' and '.join(mxfp8.FORMATS)}: MX formats are OCP's; take "
            "rowwise or blockwise there"
        )

    converted: list[str] = []
    left: dict[str, str] = {}
    experts: list[str] = []
    notes: dict[str, str] = {}
    replacements: dict[nn.Linear, Float8Linear] = {}
    # A module that stands in several places stays in all of them where one of its names is filtered.
    filtered = {
        module: f"filter '{entry}'"
        for entry in reversed(tuple(filter))
        for name, module in linears.items()
        if _matches(name, entry)
    }
    in_fp8 = {module: module.runs() for module in linears.values() if isinstance(module, Float8Linear | Convertible)}
    for name, linear in linears.items():
        running = in_fp8.get(linear)
        why = filtered.get(linear) if running is None else f"already FP8, recipe {running}"
        if why is None and isinstance(linear, Convertible):
            why = linear.refuses(plan)
        elif why is None and isinstance(linear, nn.Linear):
            why = _stays(name, linear)
        if why is not None:
            left[name or "(root)"] = why
        elif isinstance(linear, Convertible):
            note = linear.to_float8(plan)
            notes |= {} if note is None else {name: note}
            converted.append(name)
            experts.append(name)
        elif isinstance(linear, nn.Linear):
            if linear not in replacements:
                replacements[linear] = Float8Linear(linear.weight, linear.bias, plan)
                replacements[linear].train(linear.training)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacements[linear])
            converted.append(name)
    if chosen.fp8_all_gather and replacements:
        notes["(weights)"] = "those of linears are gathered as FP8 codes"
    emulated = scaled_by_bytes and detected.target.vendor != "cpu" and not scaled_kernel.scales_in_unit(plan.target)
    for kind, some in (("(linears)", replacements), ("(experts)", experts)):
        if emulated and some:
            notes[kind] = f"E8M0 scales are emulated: {plan.target} has no matrix instruction that takes them"
    if not converted:
        stayed = "; ".join(f"{name} ({why})" for name, why in left.items())
        raise ValueError(
            f"recipe '{chosen.name}' converted nothing; expected at least one linear in high precision with N and K "
            f"multiples of {ALIGNMENT}; left: {stayed or 'the model has no linear'}"
        )
    notes |= _without_fused_path(model)
    return Conversion(
        chosen.name, plan.e4m3.name, plan.e5m2.name, detected.reason, tuple(converted), left, tuple(experts), notes
    )


# ----------------------------------------------------------------------------------------------------------- all-gather
def fp8_all_gather(model: nn.Module) -> Fp8AllGather | None:
    """The FP8 all-gather of the linears whose recipe asks for it, or None where none does; see all_gather.py.

    model: sharded with `fully_shard`, on its final device, before its first forward pass. `precompute()` of what this
    returns belongs before the first step and after every update. Raises ValueError where the weights are not all
    sharded over one mesh, or the linears have several formats or kinds of scale.
    """
    linears = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and module.plan.recipe.fp8_all_gather
    }
    if not linears:
        return None
    plans = [module.plan for module in linears.values()]
    kinds = {(plan.format_of(plan.recipe.output.right), plan.recipe.pow2) for plan in plans}
    if len(kinds) > 1:
        raise ValueError(
            f"the linears with fp8_all_gather have {len(kinds)} formats or kinds of scale; expected one; convert them "
            "with one recipe"
        )
    [(fmt, pow2)] = kinds
    return Fp8AllGather({name: module.weight for name, module in linears.items()}, fmt, pow2)
