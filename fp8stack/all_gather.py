"""FP8 all-gather: FSDP2 sends a weight's codes, a byte an element, and not its bf16 values.

For a recipe whose weight has one tensor scale in every product, that scale can be known before the weight is gathered.
Once a step, before its forward pass, `Fp8AllGather.precompute` takes the largest |master| of every shard, rounds it to
bf16, reduces all of them over the ranks in **one** all-reduce and computes all scales. Then FSDP2's own gathers cast
each shard with its scale. Rounding keeps order, so the rounded maximum is the maximum of the rounded: codes and scales
are, byte for byte, those of `quantize_tensorwise` on the gathered bf16 weight. A NaN anywhere makes all codes NaN, a
weight of zeros has the scale 1, a rank without rows adds nothing.

The maxima are reduced as integers: their order is that of the numbers, with NaN on top, whatever a library's maximum of
floats does. Codes travel as uint8: gloo refuses every float8 type.

Masters stay plain tensors. FSDP2 asks a shard for two functions, and takes them from an instance ("allow monkey patch",
torch 2.10 to 2.13): no tensor subclass is in a state dict, a checkpoint or an optimiser. Only what arrives is one,
`GatheredWeight`, which nothing but an FP8 linear reads.

Speed is UNCALIBRATED: it has not been measured here. The published observation is that it was slower on 2 x H200,
hence off by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fp8stack import scaling
from fp8stack.formats import Format
from fp8stack.kernels.tensorwise import quantize_tensorwise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

# What masters are rounded to before they are quantised: FSDP2's param_dtype without this.
ROUNDED_TO = torch.bfloat16


class GatheredWeight(torch.Tensor):
    """A weight (N,K) of which only codes (N,K), FP8, and inverse scale (), float32, are there. Says it is `dtype`.

    An autograd leaf like the bf16 weight in whose place it stands. Raises RuntimeError where its values are asked for.
    """

    codes: torch.Tensor
    inverse_scale: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, inverse_scale: torch.Tensor, dtype: torch.dtype) -> GatheredWeight:
        """A tensor without storage of its own."""
        weight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        weight.codes, weight.inverse_scale = codes, inverse_scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        """What `print` shows: no values."""
        return f"GatheredWeight({tuple(self.shape)}, codes {self.codes.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """For torch.compile: the tensors inside, and what else makes another one."""
        return ["codes", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> GatheredWeight:
        """For torch.compile: back from `__tensor_flatten__`."""
        return GatheredWeight(inner["codes"], inner["inverse_scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same weight for ops that only pass it on, and zeros in its shape; RuntimeError for any other op."""
        weight = args[0]
        if func in _PASSED_ON and isinstance(weight, cls):
            return cls(weight.codes, weight.inverse_scale, weight.dtype)
        if func is torch.ops.aten.zeros_like.default:  # FSDP2's gradient of a weight that a rank did not use
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} asks for the values of a weight that was gathered as FP8 codes; expected an FP8 linear alone to "
            "read it; read the sharded weight instead, or switch the FP8 all-gather off"
        )


_PASSED_ON = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)


class _Shard:
    """What FSDP2 asks of one weight's shard: what it sends, and what becomes of that."""

    def __init__(self, name: str, parameter: DTensor, fmt: Format) -> None:
        self.name, self.parameter, self.fmt = name, parameter, fmt
        self.scale = torch.ones((), dtype=torch.float32, device=self.local.device)
        self.inverse_scale = torch.ones_like(self.scale)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, the very tensor that FSDP2 asks."""
        return self.parameter._local_tensor

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], None]:
        """Called by FSDP2: this rank's codes as uint8, padded to the rows of the first rank."""
        if mp_policy.param_dtype != ROUNDED_TO:
            raise ValueError(
                f"weight '{self.name}' would be gathered as {mp_policy.param_dtype} without the FP8 all-gather; "
                f"expected MixedPrecisionPolicy(param_dtype={ROUNDED_TO}); shard it so, or switch the FP8 all-gather "
                "off"
            )
        codes, _ = quantize_tensorwise(self.local.to(ROUNDED_TO), self.fmt, scale=self.scale)
        missing = -(-outer_size[0] // mesh.size()) - codes.shape[0]
        sent = codes.view(torch.uint8)
        return (nn.functional.pad(sent, (0, 0, 0, missing)) if missing else sent,), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[()]] | None:
        """Called by FSDP2: the weight of what arrived. The second time it has arrived where the first one's codes lie.

        Ranks in order have rows in order, padding is at the end.
        """
        if out is not None:
            return None
        codes = gathered[0][: self.parameter.shape[0]].view(self.fmt.dtype)
        return GatheredWeight(codes, self.inverse_scale, param_dtype), ()


class Fp8AllGather:
    """The weights of a model that travel as FP8 codes, and their scales.

    Args:
        weights: name -> weight (N,K), sharded by rows with `fully_shard` over one mesh of one dimension, on its final
            device; float32.
        fmt: of the codes.
        pow2: scales are powers of two.

    Raises:
        ValueError: a weight that is not sharded so.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], fmt: Format, pow2: bool) -> None:
        self.fmt, self.pow2 = fmt, pow2
        for name, weight in weights.items():
            mesh = weight.device_mesh if isinstance(weight, DTensor) else None
            by_rows = mesh is not None and weight.placements == (Shard(0),)
            if not by_rows or mesh != next(iter(weights.values())).device_mesh:
                raise ValueError(
                    f"weight '{name}' is {'not sharded' if mesh is None else f'{weight.placements} on {mesh}'}; the "
                    "FP8 all-gather expects the rows of all weights sharded over one mesh of one dimension; call "
                    "fully_shard so, or switch it off"
                )
        self.shards = [_Shard(name, weight, fmt) for name, weight in weights.items()]
        self.group = self.shards[0].parameter.device_mesh.get_group()

    @torch.no_grad()
    def precompute(self) -> None:
        """The scales of all weights as they are now. Collective; before the forward pass, once an update.

        Nothing notices where it was forgotten (an optimiser that is fused changes no version counter): codes then have
        the scale of an older weight, and what has grown saturates.
        """
        shards = self.shards
        maxima = torch.stack([scaling.amax(shard.local) for shard in shards])
        maxima = scaling.amax(maxima.to(ROUNDED_TO)[:, None], dim=1)
        dist.all_reduce(maxima.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        scales = scaling.scale_from_amax(maxima, self.fmt, self.pow2)
        torch._foreach_copy_([shard.scale for shard in shards], list(scales.unbind()))
        torch._foreach_copy_([shard.inverse_scale for shard in shards], list(scaling.inverse_scale(scales).unbind()))
        for shard in shards:
            # FSDP2 may have made another local tensor, as it does where it pads one.
            shard.local.fsdp_pre_all_gather = shard.fsdp_pre_all_gather
            shard.local.fsdp_post_all_gather = shard.fsdp_post_all_gather
