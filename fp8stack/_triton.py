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

import hashlib
import multiprocessing
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import ModuleType


class TritonUnavailable(RuntimeError):
    """Triton is not installed, or this process cannot do with it what was asked (it interprets)."""


class CompilationFailed(RuntimeError):
    """Triton's compiler died or refused a kernel for an arch."""


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

# What Triton itself takes for true.
_TRUE = ("1", "y", "yes", "on", "true")
INTERPRETING: bool = triton is not None and os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
"""Whether kernels run in Triton's interpreter: decided by the environment at the first import, for good."""

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
        constexprs: argument name -> value, for `tl.constexpr` arguments and for those a launch would fold (stride 1).
        num_warps, num_stages: of the launch.
        divisible: names of arguments that are multiples of 16 at launch (pointers and sizes): a launch derives it from
            the values, cross-compilation has to be told.
        within_2gb: names of pointers whose tensor is smaller than 2 GiB: AMD targets then use buffer instructions, as a
            launch would. Ignored on NVIDIA.
        native: the kernel casts with the target's own FP8 instruction, so `fmt` must have one there.
        wide_bytes: widest load and store that the layout allows, in bytes; what the codegen suite demands.
        encodes: the kernel writes codes. One that only reduces has no conversion and no wide store to show.
        multiplies: `fp8`, `bf16`, or `mxfp8` (scales in the instruction), where the kernel multiplies matrices: the
            target's instruction for it must be used.
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
    encodes: bool = True
    multiplies: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What Triton calls an arch: backend, its name or number there, lanes a wave."""

    backend: str
    triton_arch: str | int
    wave_size: int


TARGETS: dict[str, Target] = {
    **{name: Target("hip", name, 64) for name in ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")},
    **{name: Target("hip", name, 32) for name in ("gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")},
    **{f"sm_{number}": Target("cuda", number, 32) for number in (80, 86, 89, 90, 100, 103, 120)},
}
"""Arch name -> target. Lanes a wave: 64 on CDNA, 32 on RDNA (AMD ISA manuals) and on NVIDIA."""

_EVERY = ((3, 6), (3, 7), (3, 8), (3, 9))
_ONLY_3_9 = _EVERY[3:]
NATIVE_CASTS: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    **{("gfx942", fmt): _EVERY for fmt in ("e4m3fnuz", "e5m2fnuz")},
    **{("gfx950", fmt): _EVERY for fmt in ("e4m3fn", "e5m2")},
    ("sm_89", "e4m3fn"): _ONLY_3_9,
    ("sm_89", "e5m2"): _ONLY_3_9,
    **{(f"sm_{number}", fmt): _EVERY for number in (90, 100, 120) for fmt in ("e4m3fn", "e5m2")},
}
"""(arch, format) -> Triton minor versions whose float32 cast to that format is one hardware instruction, rounded once.

Found by cross-compiling with 3.6.0, 3.7.1, 3.8.0 and 3.9.0, each pair in a process of its own, and reading the listing
(suites/codegen asserts it for the installed version). What is not here goes through the integer encoder of
kernels/cast.py: FNUZ on NVIDIA does not compile at all, OCP on gfx942 is a software sequence, and on sm_89 before 3.9
the cast goes through float16 and rounds twice.
"""

ONE_AMD_ARCH_A_PROCESS = ((3, 6),)
"""Triton versions that remember the first AMD arch a process compiles for.

3.6.0 decides once a process which FP8 conversions the hardware has: after gfx942, gfx950 gets software sequences
(fp8_encode software, 5,380 bytes of code instead of 1,956 for the same kernel), and after gfx950, gfx942 aborts in an
assertion (Fp32_to_Fp8E4M3FNUZ_SW). A launch never meets this: a process drives one arch. Cross-compiling does, so with
these versions each AMD compilation runs in a forked child. Delete this with support for 3.6; 3.7.1 is cured.
"""

_TYPE_FORMATS = {"fp8e4nv": "e4m3fn", "fp8e4b8": "e4m3fnuz", "fp8e5": "e5m2", "fp8e5b16": "e5m2fnuz"}
_FNUZ = ("e4m3fnuz", "e5m2fnuz")


def native_cast(arch_name: str, fmt: str, version: tuple[int, int] | None = None) -> bool:
    """Whether a Triton cast float32 -> `fmt` on `arch_name` is the hardware's own instruction, rounding once.

    Args:
        arch_name: e.g. `gfx942`, `sm_90`; an arch without a row has no native cast.
        fmt: format name.
        version: (major, minor) of Triton; the installed one by default. An untried version is False: the integer
            encoder is right everywhere.
    """
    return (TRITON_VERSION if version is None else version) in NATIVE_CASTS.get((arch_name, fmt), ())


@dataclass(frozen=True)
class Compiled:
    """What a cross-compilation gives.

    Attributes:
        asm: stage -> text or bytes; `ttir`, `ttgir`, `llir` and `amdgcn`, `hsaco` or `ptx`, `cubin`.
        metadata: Triton's own record (name, shared, num_warps, ...).
    """

    asm: Mapping[str, str | bytes]
    metadata: Mapping[str, Any]


def _target(arch_name: str) -> Target:
    try:
        return TARGETS[arch_name]
    except KeyError:
        raise UnsupportedTarget(
            f"{arch_name!r} is no target that this module can compile for; expected one of {', '.join(TARGETS)}; "
            "a new one is a row of fp8stack/_triton.py TARGETS"
        ) from None


def _refuse_unsupported(spec: CompileSpec, arch_name: str, target: Target) -> None:
    """Raise before Triton does: its own error for an FP8 type is a traceback out of the code generator."""
    wanted = {spec.fmt} if spec.native else set()
    wanted |= {_TYPE_FORMATS[kind.lstrip("*")] for kind in spec.signature.values() if kind.lstrip("*") in _TYPE_FORMATS}
    for fmt in sorted(wanted):
        if target.backend == "cuda" and fmt in _FNUZ:
            raise UnsupportedTarget(
                f"{spec.case}: {fmt} has no NVIDIA instruction and no Triton type on {arch_name}; expected e4m3fn or "
                f"e5m2 there; compile with native=False (integer encoder, uint8 codes) to get {fmt} codes"
            )
    if spec.native and not native_cast(arch_name, spec.fmt):
        having = [
            name for (name, fmt), versions in NATIVE_CASTS.items() if fmt == spec.fmt and TRITON_VERSION in versions
        ]
        raise UnsupportedTarget(
            f"{spec.case}: Triton {'.'.join(map(str, TRITON_VERSION or ()))} has no native cast to {spec.fmt} on "
            f"{arch_name}; expected one of {', '.join(having) or 'no arch'}; compile with native=False "
            "(integer encoder) or choose the format of that arch"
        )


def _compile(source: Any, target: Target, options: Mapping[str, Any]) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    compiled = compile(source, GPUTarget(target.backend, target.triton_arch, target.wave_size), dict(options))
    stages = ("ttir", "ttgir", "llir", "amdgcn", "hsaco", "ptx", "cubin")
    metadata = {name: value for name, value in compiled.metadata._asdict().items() if name != "target"}
    return Compiled({stage: compiled.asm[stage] for stage in stages if stage in compiled.asm}, metadata)


def _compile_in_child(what: str, *arguments: Any) -> Compiled:
    """`_compile` in a forked child, which sees this process's kernels and leaves no trace in it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(_compile(*arguments))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=work, daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at every fork; the child compiles, which needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    child.join()
    if isinstance(answer, Compiled):
        return answer
    raise CompilationFailed(
        f"{what}: Triton {'.'.join(map(str, TRITON_VERSION or ()))} "
        f"{'died with exit code ' + str(child.exitcode) if answer is None else 'refused: ' + answer}; expected a "
        "compiled kernel; its messages on stderr say where, and another Triton version may do better"
    )


def cross_compile(spec: CompileSpec, arch_name: str) -> Compiled:
    """Compile `spec` for an arch that need not be here; initialises no GPU.

    Raises:
        CompilationFailed: Triton's compiler died or refused, where it runs in a child (ONE_AMD_ARCH_A_PROCESS).
        TritonUnavailable: no triton, or this process interprets (TRITON_INTERPRET=1).
        UnsupportedTarget: unknown arch, FNUZ on NVIDIA, or a native cast that the target lacks; before compiling.
        ValueError: signature and constexprs do not name the kernel's arguments exactly.
    """
    require(f"cross-compiling {spec.case}")
    if INTERPRETING:
        raise TritonUnavailable(
            f"cross-compiling {spec.case} for {arch_name} was asked of a process that interprets kernels; expected "
            "TRITON_INTERPRET unset before the first import of triton; run the codegen suite in a process of its own"
        )
    target = _target(arch_name)
    _refuse_unsupported(spec, arch_name, target)

    names = list(spec.kernel.arg_names)
    given = [*spec.signature, *spec.constexprs]
    if sorted(given) != sorted(names):
        raise ValueError(
            f"{spec.case}: signature and constexprs name {sorted(given)}; expected each argument of "
            f"{spec.kernel.__name__} once: {names}; missing {sorted(set(names) - set(given))}, "
            f"unknown {sorted(set(given) - set(names))}"
        )
    hinted = {*spec.divisible, *spec.within_2gb}
    if stray := sorted(hinted - set(spec.signature)):
        raise ValueError(
            f"{spec.case}: hints on {stray}, which are no runtime arguments; expected names of {sorted(spec.signature)}"
        )

    from triton.compiler import ASTSource

    attrs: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(names):
        hints: list[list[Any]] = []
        if name in spec.divisible:
            hints.append(["tt.divisibility", 16])
        if name in spec.within_2gb and target.backend == "hip":
            hints.append(["tt.pointer_range", 32])
        if hints:
            attrs[(index,)] = hints
    # In the order of the kernel's arguments: 3.6 to 3.9 number the parameters by the order of this dict.
    source = ASTSource(
        fn=spec.kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constexprs.items()},
        attrs=attrs,
    )
    options = {**LAUNCH_OPTIONS, "num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    if target.backend == "hip" and TRITON_VERSION in ONE_AMD_ARCH_A_PROCESS:
        return _compile_in_child(f"{spec.case} for {arch_name}", source, target, options)
    return _compile(source, target, options)


def disassemble(cubin: bytes) -> tuple[str, str]:
    """Machine code of a cubin as text: (`nvdisasm -c`, `cuobjdump --dump-resource-usage`).

    Kept in Triton's cache beside the kernels, by the hash of cubin and Triton version: a disassembler takes longer to
    start than a kernel to come out of that cache.

    Raises:
        TritonUnavailable: as nvidia_tool.
        subprocess.CalledProcessError: the tool refused the cubin.
    """
    require("disassembling a cubin")
    from triton.runtime.cache import get_cache_manager

    assert triton is not None
    commands = {"sass": ("nvdisasm", "-c"), "resources": ("cuobjdump", "--dump-resource-usage")}
    key = hashlib.sha256(repr((triton.__version__, commands)).encode() + cubin).hexdigest()
    manager = get_cache_manager(key)
    texts: list[str] = []
    for name, (tool, option) in commands.items():
        kept = manager.get_file(f"{name}.txt")
        if kept is None:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin)
                file.flush()
                command = [str(nvidia_tool(tool)), option, file.name]
                text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
            kept = manager.put(text, f"{name}.txt", binary=False)
        texts.append(Path(kept).read_text(encoding="utf-8"))
    return texts[0], texts[1]


def nvidia_tool(name: str) -> Path:
    """Path of a tool that the Triton wheel carries for NVIDIA: `nvdisasm`, `cuobjdump`, `ptxas`.

    `TRITON_NVDISASM_PATH` and the like come first, as in Triton itself.

    Raises:
        TritonUnavailable: no triton, or a wheel without NVIDIA tools (ROCm builds have none).
    """
    require(f"looking for {name}")
    assert triton is not None
    override = os.environ.get(f"TRITON_{name.upper()}_PATH")
    path = Path(override) if override else Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise TritonUnavailable(
            f"{name} is not at {path}; expected a Triton wheel with the NVIDIA backend's tools; "
            f"set TRITON_{name.upper()}_PATH to the one of a CUDA toolkit"
        )
    return path
