"""The only module that imports triton, and the cross-compiler that needs no GPU.

Why one module: Triton is supplied by the image on a GPU platform and by a constraint file on a CPU; it may be missing,
and its API moves with every minor version (3.6 to 3.9 are tried here). Everything that depends on either is in this
file: the kernels say `from fp8stack._triton import jit, tl` and import everywhere.

Three ways a kernel is used, and what this module does for each:
- launched on a GPU: `jit` is `triton.jit`.
- interpreted on a CPU (`TRITON_INTERPRET=1` set before the first import of triton): `jit` is `triton.jit` too.
- compiled for an arch that is not here: `cross_compile(spec, "gfx942")`, seconds a kernel, milliseconds from Triton's
  cache (`TRITON_CACHE_DIR`; this module never chooses, shares or purges a cache folder). Not in an interpreting
  process: Triton decides once, at import.

Floating-point fusion is an explicit option of every compilation (`LAUNCH_OPTIONS`, also for launches): its default is
on up to Triton 3.9 and off from 3.10, and a scale that is multiplied and added in one rounding is not the reference's.

Not here: which arch this machine has (device.py), what the listing says (harness/isa).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import ModuleType


class TritonUnavailable(RuntimeError):
    """Triton is not installed, or this process cannot do with it what was asked (it interprets)."""


class UnsupportedTarget(TypeError):
    """Triton cannot compile this for that arch: an unknown target, or a format the target has no instructions for."""


_INSTALL = (
    "install it with `pip install triton` (3.6 to 3.9 are tried) or use the reference implementations, "
    "which need torch alone"
)


def _refuse(what: str) -> NoReturn:
    raise TritonUnavailable(f"{what} needs triton, which cannot be imported here ({_IMPORT_ERROR}); {_INSTALL}")


class _Placeholder:
    """Stands for `tl.something` without Triton: legal in an annotation, refuses to be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse(self._name)

    def __repr__(self) -> str:
        return f"<{self._name}: triton is not installed>"


class _ConstexprPlaceholder(_Placeholder):
    """`tl.constexpr`: also called at module level to make a constant, so the value passes through."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return args[0]


class _Language:
    """Stands for `triton.language` without Triton, so that kernel signatures can be read."""

    constexpr: Any = _ConstexprPlaceholder("tl.constexpr")

    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"tl.{name}")


class UnavailableKernel:
    """What `jit` returns without Triton: keeps the function (`fn`), refuses launch and call with the reason."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: object) -> NoReturn:
        _refuse(f"launching {self.__name__}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse(f"calling {self.__name__}")


triton: ModuleType | None
tl: Any
_IMPORT_ERROR: str | None = None
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError as error:
    triton = None
    tl = _Language()
    _IMPORT_ERROR = f"{type(error).__name__}: {error}"


def _version(text: str) -> tuple[int, int]:
    """(major, minor) of '3.9.0', '3.6.0+rocm7.1', '3.8.0.post1'."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


TRITON_VERSION: tuple[int, int] | None = None if triton is None else _version(triton.__version__)
"""(major, minor) of the installed Triton, None without it. Listings and baselines are kept per minor version."""

INTERPRETING: bool = triton is not None and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
"""Whether kernels run in Triton's interpreter: decided by the environment at the first import, for the whole process."""

LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch and of every compilation: a product and a sum are rounded apart, as in the reference."""


def require(what: str = "this operation") -> ModuleType:
    """The triton module.

    Raises:
        TritonUnavailable: triton cannot be imported; names `what`, the import error and what to do next.
    """
    if triton is None:
        _refuse(what)
    return triton


def jit(fn: Callable[..., object] | None = None, **options: Any) -> Any:
    """`triton.jit` where Triton is, otherwise an `UnavailableKernel`: `@jit` and `@jit(do_not_specialize=[...])`."""
    if fn is None:
        return lambda function: jit(function, **options)
    if triton is None:
        return UnavailableKernel(fn)
    return triton.jit(fn, **options) if not options else triton.jit(**options)(fn)


@dataclass(frozen=True)
class CompileSpec:
    """One kernel at one production configuration, as data: what a launch would have specialised on.

    Attributes:
        kernel: the jitted function.
        case: case id without the arch, e.g. `rowwise-e4m3fnuz-bf16-k7168`.
        fmt: FP8 format name, e.g. `e4m3fnuz`.
        signature: argument name -> Triton type (`*bf16`, `*u8`, `fp32`, `i32`, `i64`) for every argument that is not in
            `constexprs`, in any order.
        constexprs: argument name -> value, for `tl.constexpr` arguments and for arguments a launch would fold (stride 1).
        num_warps, num_stages: of the launch.
        divisible: names of arguments that are multiples of 16 at launch (pointers and sizes): a launch derives it from
            the values, cross-compilation has to be told.
        within_2gb: names of pointers whose tensor is smaller than 2 GiB: AMD targets then use buffer instructions, as a
            launch would. Ignored on NVIDIA.
        native: the kernel casts with the target's own FP8 instruction, so `fmt` must have one there.
        wide_bytes: widest load and store that the layout allows, in bytes; what the codegen suite demands.
        options: further launch options (`waves_per_eu`, `matrix_instr_nonkdim`, ...).
    """

    kernel: Any
    case: str
    fmt: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()
    within_2gb: tuple[str, ...] = ()
    native: bool = False
    wide_bytes: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
