"""Kernels that are wrong on purpose: each must be reported by the reader and by the rule that watches for it.

A check of machine code that no bad code has ever failed proves nothing. Every control is a known way to lose speed or
bits, compiled like the product's kernels; its good twin stands beside it and must break no rule.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fp8stack import _triton
from fp8stack._triton import CompileSpec, jit, tl
from fp8stack.kernels import scaled_kernel
from harness import isa
from suites.codegen.machine_code import broken_rules, machine_code

FORMATS = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn", "sm_90": "e4m3fn"}
TYPES = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8, "e5m2": tl.float8e5, "e5m2fnuz": tl.float8e5b16}
MAXIMUM = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "e5m2fnuz": 57344.0}


@jit
def _cast_kernel(x_ptr, q_ptr, stride, FP8: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    codes = tl.clamp(x, -MAX, MAX).to(FP8).to(tl.uint8, bitcast=True)
    tl.store(q_ptr + offsets * stride, codes)


@jit
def _cast_annotated_kernel(x_ptr, q_ptr, stride: int, FP8: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    codes = tl.clamp(x, -MAX, MAX).to(FP8).to(tl.uint8, bitcast=True)
    tl.store(q_ptr + offsets * stride, codes)


@jit
def _cast_through_float16_kernel(x_ptr, q_ptr, FP8: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    codes = tl.clamp(x, -MAX, MAX).to(tl.float16).to(FP8).to(tl.uint8, bitcast=True)
    tl.store(q_ptr + offsets, codes)


@jit
def _atomic_kernel(x_ptr, sum_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    tl.atomic_add(sum_ptr + tl.program_id(0) % 8, tl.sum(x, 0), sem=SEM)


def _cast_spec(name: str, arch: str, *, kernel=_cast_kernel, stride: int | None = 1, block: int = 4096):
    """A bare cast to the arch's format; `stride` None leaves the unit stride of the codes to run time.

    An arch whose cast is not native with this Triton compiles to software, and the spec says so.
    """
    fmt = FORMATS[arch]
    signature = {"x_ptr": "*bf16", "q_ptr": "*u8"}
    constexprs = {"FP8": TYPES[fmt], "MAX": MAXIMUM[fmt], "BLOCK": block}
    if stride is None:
        signature["stride"] = "i32"
    elif kernel is not _cast_through_float16_kernel:
        constexprs["stride"] = stride
    return CompileSpec(
        kernel=kernel,
        case=f"control-{name}",
        fmt=fmt,
        signature=signature,
        constexprs=constexprs,
        divisible=("x_ptr", "q_ptr"),
        within_2gb=("x_ptr", "q_ptr"),
        native=_triton.native_cast(arch, fmt),
    )


def _atomic_spec(sem: str) -> CompileSpec:
    return CompileSpec(
        kernel=_atomic_kernel,
        case=f"control-atomic-{sem}",
        fmt="e4m3fn",
        signature={"x_ptr": "*bf16", "sum_ptr": "*fp32"},
        constexprs={"SEM": sem, "BLOCK": 4096},
        divisible=("x_ptr", "sum_ptr"),
        within_2gb=("x_ptr", "sum_ptr"),
    )


def _cases(name: str, *archs: str):
    return [pytest.param(arch, id=f"control-{name}-{arch}") for arch in archs or FORMATS]


@pytest.mark.parametrize("arch", _cases("clean"))
def test_clean_kernel(arch: str) -> None:
    """A native, contiguous, saturating cast breaks no rule."""
    code = machine_code(_cast_spec("clean", arch), arch)
    assert broken_rules(code) == []
    assert code.facts["region"] == "kernel"


@pytest.mark.parametrize("arch", _cases("acquire-release"))
def test_acquire_release_atomic(arch: str) -> None:
    """Triton's default atomic orders memory: fences on every arch; the relaxed one has none."""
    ordered = machine_code(_atomic_spec("acq_rel"), arch)
    relaxed = machine_code(_atomic_spec("relaxed"), arch)
    assert relaxed.facts["atomic_instructions"] == ordered.facts["atomic_instructions"] == 1
    assert relaxed.facts["fence_instructions"] == 0
    assert ordered.facts["fence_instructions"] >= 2
    assert any("fence_instructions" in message for message in broken_rules(ordered))


@pytest.mark.parametrize("arch", _cases("runtime-stride"))
def test_runtime_unit_stride(arch: str) -> None:
    """A stride that is 1 but annotated int is not folded (triton#9834): one-byte stores, one a code."""
    code = machine_code(_cast_spec("stride", arch, kernel=_cast_annotated_kernel, stride=None), arch)
    lanes = code.spec.num_warps * _triton.TARGETS[arch].wave_size
    assert code.facts["narrow_memory_instructions"] == 4096 // lanes
    assert code.facts["widest_store_bytes"] == 1
    messages = broken_rules(code)
    assert any("narrow_memory_instructions is" in message for message in messages)
    assert any("widest_store_bytes is 1; expected at least 16" in message for message in messages)


@pytest.mark.parametrize(
    ("arch", "fmt"),
    [
        pytest.param("gfx942", "e4m3fn", id="control-software-e4m3fn-gfx942"),
        pytest.param("gfx942", "e5m2", id="control-software-e5m2-gfx942"),
        pytest.param("gfx950", "e4m3fnuz", id="control-software-e4m3fnuz-gfx950"),
        pytest.param("gfx950", "e5m2fnuz", id="control-software-e5m2fnuz-gfx950"),
    ],
)
def test_software_conversion(arch: str, fmt: str) -> None:
    """A format that the arch does not speak is converted in software, and the reader says so."""
    constexprs = {"FP8": TYPES[fmt], "MAX": MAXIMUM[fmt], "BLOCK": 4096, "stride": 1}
    spec = replace(_cast_spec("software", arch), fmt=fmt, constexprs=constexprs, native=False)
    code = machine_code(spec, arch)
    assert code.facts["fp8_encode"] == "software"
    assert code.facts["fp8_encode_instructions"] == 0
    claimed = replace(code, spec=replace(spec, native=True))
    assert any("fp8_encode is software; expected native-f32" in message for message in broken_rules(claimed))


@pytest.mark.parametrize("arch", _cases("scales-beside", "gfx942", "gfx950"))
def test_scales_beside_the_instruction(arch: str) -> None:
    """A product whose scales are multiplied in float32 claims in vain that its matrix instruction takes them."""
    (spec,) = (spec for spec in scaled_kernel.compile_specs(arch) if spec.case.endswith("-weight"))
    code = machine_code(spec, arch)
    assert broken_rules(code) == []
    claimed = replace(code, spec=replace(spec, multiplies="mxfp8"))
    assert any("; expected one with scale; " in message for message in broken_rules(claimed))


@pytest.mark.parametrize("arch", _cases("through-float16", "sm_90"))
def test_double_rounding(arch: str) -> None:
    """A cast that goes through float16 rounds twice: native, but not from float32."""
    code = machine_code(_cast_spec("float16", arch, kernel=_cast_through_float16_kernel), arch)
    assert code.facts["fp8_encode"] == "native-f16"
    assert any("fp8_encode is native-f16; expected native-f32" in message for message in broken_rules(code))


@pytest.mark.parametrize("arch", _cases("spills"))
def test_spills(arch: str) -> None:
    """More live values a lane than registers allowed: spills, scratch, and the lines that touch it."""
    code = machine_code(_spill_spec(arch), arch)
    assert code.facts["vgpr_spills"] > 0
    assert code.facts["scratch_bytes"] > 0
    assert code.facts["scratch_instructions"] > 0
    messages = "\n".join(broken_rules(code))
    assert "vgpr_spills is" in messages
    assert "scratch_bytes is" in messages


@jit
def _spill_kernel(x_ptr, q_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    largest = tl.max(tl.abs(x), 0)
    tl.store(q_ptr + offsets, x * (1.0 / largest))


def _spill_spec(arch: str) -> CompileSpec:
    """128 values a lane between two uses, in at most 64 registers: 8 waves of 512 on AMD, `maxnreg` on NVIDIA."""
    amd = _triton.TARGETS[arch].backend == "hip"
    return CompileSpec(
        kernel=_spill_kernel,
        case="control-spills",
        fmt="e4m3fn",
        signature={"x_ptr": "*fp32", "q_ptr": "*fp32"},
        constexprs={"BLOCK": 128 * _triton.TARGETS[arch].wave_size},
        num_warps=1,
        divisible=("x_ptr", "q_ptr"),
        options={"waves_per_eu": 8} if amd else {"maxnreg": 64},
    )


@pytest.mark.parametrize("arch", _cases("hash"))
def test_hash(arch: str) -> None:
    """The hash of a listing is the same for the same kernel and differs for a changed one; it names no path."""
    first = machine_code(_cast_spec("hash", arch), arch)
    again = machine_code(_cast_spec("hash", arch), arch)
    other = machine_code(_cast_spec("hash", arch, block=8192), arch)
    assert first.listing.digest == again.listing.digest
    assert first.listing.digest != other.listing.digest


@pytest.mark.parametrize("arch", _cases("ptx", "sm_90"))
def test_ptx_agrees(arch: str) -> None:
    """PTX and the machine code made of it name the same conversions, loads and stores."""
    code = machine_code(_cast_spec("ptx", arch), arch)
    assert code.ptx is not None
    asked = isa.read_ptx(code.ptx)
    assert isa.fp8_encode(asked) == code.facts["fp8_encode"]
    assert asked.resources["threads"] == 32 * code.spec.num_warps
    for fact in ("load_instructions", "store_instructions", "fp8_encode_instructions"):
        assert len(isa.offenders(asked, fact)) == code.facts[fact], fact


def test_archs_in_turn() -> None:
    """Two AMD archs in one process, in both orders: each as if it were the only one (3.6 mixes them up, left alone)."""
    for order in (("gfx942", "gfx950"), ("gfx950", "gfx942")):
        for arch in order:
            # A block that no other test compiles: the listing must come from the compiler, not from its cache.
            block = {"gfx942": 16384, "gfx950": 32768}[order[0]]
            code = machine_code(_cast_spec("turn", arch, block=block), arch)
            assert code.facts["fp8_encode"] == "native-f32", f"{arch} in the order {order}"


def _digests(folder: str) -> list[str]:
    os.environ["TRITON_CACHE_DIR"] = folder
    specs = [_cast_spec("cache", "gfx942", block=2048), _atomic_spec("relaxed")]
    return [machine_code(spec, "gfx942").listing.digest for spec in specs]


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Four processes that compile the same kernels into one fresh folder all get the same code (triton#2688, #4295)."""
    with warnings.catch_warnings(), ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking beside threads
        for turn in range(2):
            folder = tmp_path / str(turn)
            first, *others = [future.result(120) for future in [pool.submit(_digests, str(folder)) for _ in range(4)]]
            assert others == [first] * 3
            assert any(folder.iterdir()), "the compiler did not use the folder"
