"""fp8stack._triton: what works without triton, what is refused before Triton is called, what compiling needs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from fp8stack import _triton
from fp8stack._triton import CompileSpec, UnsupportedTarget, cross_compile, jit, native_cast, tl

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")

needs_triton = pytest.mark.skipif(_triton.triton is None, reason="triton is not installed")
compiles = pytest.mark.skipif(
    _triton.triton is None or _triton.INTERPRETING, reason="triton is not installed, or this process interprets"
)


@jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


SPEC = CompileSpec(
    kernel=_copy_kernel,
    case="copy",
    fmt="e4m3fn",
    signature={"x_ptr": "*u8", "y_ptr": "*u8", "n": "i32"},
    constexprs={"BLOCK": 4096},
    divisible=("x_ptr", "y_ptr", "n"),
    within_2gb=("x_ptr", "y_ptr"),
)


def _python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton() -> None:
    """With triton not importable every kernel module imports; a launch says what is missing and what to do."""
    out = _python(
        """
        import sys
        sys.modules["triton"] = None
        from fp8stack import _triton
        from fp8stack._triton import TritonUnavailable, cross_compile, jit, tl

        assert _triton.triton is None and _triton.TRITON_VERSION is None and not _triton.INTERPRETING
        FOUR = tl.constexpr(4)

        @jit
        def kernel(x, BLOCK: tl.constexpr, dtype: tl.dtype = tl.float32):
            pass

        @jit(do_not_specialize=["n"])
        def other(n):
            pass

        import fp8stack.kernels.rowwise as rowwise
        assert FOUR == 4 and kernel.__name__ == "kernel" and callable(other.fn)
        for attempt in (
            lambda: kernel[(1,)](1),
            lambda: other(1),
            lambda: tl.load(1),
            lambda: _triton.require("a test"),
            lambda: cross_compile(rowwise.compile_specs("gfx942")[0], "gfx942"),
        ):
            try:
                attempt()
            except TritonUnavailable as error:
                print(error)
            else:
                raise AssertionError("not refused")
        """
    )
    lines = out.splitlines()
    assert len(lines) == 5
    assert all("needs triton, which cannot be imported here" in line and "pip install triton" in line for line in lines)
    assert lines[0].startswith("launching kernel ")
    assert lines[2].startswith("tl.load ")
    assert lines[3].startswith("a test ")


@needs_triton
def test_interpreting_process_does_not_compile() -> None:
    """A process that interprets says so instead of failing inside Triton."""
    out = _python(
        """
        from fp8stack import _triton
        from fp8stack.kernels import rowwise
        try:
            _triton.cross_compile(rowwise.compile_specs("gfx942")[0], "gfx942")
        except _triton.TritonUnavailable as error:
            print(_triton.INTERPRETING, error)
        """,
        TRITON_INTERPRET="1",
    )
    assert out.startswith("True cross-compiling rowwise-")
    assert "expected TRITON_INTERPRET unset" in out


@needs_triton
def test_cross_compile_initialises_no_gpu(tmp_path: Path) -> None:
    """Compiling for MI300X and H100 touches no device of this machine; it works with none."""
    out = _python(
        """
        import torch
        from suites.unit import test_triton
        from fp8stack import _triton
        for arch, stage in (("gfx942", "amdgcn"), ("sm_90", "cubin")):
            compiled = _triton.cross_compile(test_triton.SPEC, arch)
            print(stage in compiled.asm, compiled.metadata["enable_fp_fusion"])
        print(torch.cuda.is_initialized())
        """,
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert out.split() == ["True", "False", "True", "False", "False"]


@compiles
@pytest.mark.parametrize("arch", [pytest.param(name, id=name) for name in ("gfx942", "gfx950", "sm_90")])
@pytest.mark.parametrize("fmt", [pytest.param(name, id=name) for name in FORMATS])
def test_native_or_typed_error(monkeypatch: pytest.MonkeyPatch, fmt: str, arch: str) -> None:
    """A native cast the target lacks is a typed error before Triton is called, never its traceback or a KeyError."""

    class Called(Exception):
        pass

    def compile(*args: object, **kwargs: object) -> None:
        raise Called

    monkeypatch.setattr("triton.compiler.compile", compile)
    monkeypatch.setattr(_triton, "ONE_AMD_ARCH_A_PROCESS", ())  # or the call would happen in a child
    expected = Called if native_cast(arch, fmt) else UnsupportedTarget
    with pytest.raises(expected) as caught:
        cross_compile(replace(SPEC, fmt=fmt, native=True), arch)
    if expected is UnsupportedTarget:
        assert fmt in str(caught.value)
        assert "; expected" in str(caught.value)
        assert "native=False" in str(caught.value)


@compiles
def test_fnuz_pointer_on_nvidia_is_refused() -> None:
    """A FNUZ pointer does not exist in Triton's NVIDIA backend: said before compiling, whatever `native` is."""
    spec = replace(SPEC, signature={**SPEC.signature, "y_ptr": "*fp8e4b8"})
    with pytest.raises(UnsupportedTarget, match="e4m3fnuz has no NVIDIA instruction"):
        cross_compile(spec, "sm_90")


@compiles
@pytest.mark.parametrize(
    ("change", "arch", "error", "what"),
    [
        pytest.param({}, "gfx9-4-generic", UnsupportedTarget, "'gfx9-4-generic' is no target", id="unknown-arch"),
        pytest.param({}, "", UnsupportedTarget, "'' is no target", id="empty-arch"),
        pytest.param({"constexprs": {}}, "gfx942", ValueError, r"missing \['BLOCK'\]", id="missing-constexpr"),
        pytest.param({"constexprs": {"BLOCK": 1, "K": 2}}, "gfx942", ValueError, r"unknown \['K'\]", id="unknown-name"),
        pytest.param({"divisible": ("stride",)}, "gfx942", ValueError, r"hints on \['stride'\]", id="stray-hint"),
    ],
)
def test_bad_spec(change: dict[str, object], arch: str, error: type[Exception], what: str) -> None:
    """A spec that does not fit the kernel, or an unknown arch, is an error in three parts."""
    with pytest.raises(error, match=what) as caught:
        cross_compile(replace(SPEC, **change), arch)
    assert "; expected" in str(caught.value)


@compiles
def test_order_of_the_signature_does_not_matter() -> None:
    """Arguments are named: a spec in another order compiles to the same listing."""
    turned = replace(SPEC, signature=dict(reversed(SPEC.signature.items())))
    assert cross_compile(SPEC, "gfx942").asm["amdgcn"] == cross_compile(turned, "gfx942").asm["amdgcn"]


@compiles
def test_hints_decide_the_width() -> None:
    """Divisibility gives 16-byte accesses, and tensors below 2 GiB buffer instructions on AMD: both as in a launch."""
    hinted = str(cross_compile(SPEC, "gfx942").asm["amdgcn"])
    bare = str(cross_compile(replace(SPEC, divisible=(), within_2gb=()), "gfx942").asm["amdgcn"])
    assert "buffer_store_dwordx4" in hinted
    assert "global_store_byte" in bare


@pytest.mark.parametrize(
    ("text", "version"),
    [
        pytest.param("3.9.0", (3, 9), id="release"),
        pytest.param("3.6.0+rocm7.1.0.git1234", (3, 6), id="rocm"),
        pytest.param("3.10.0.post1", (3, 10), id="post"),
    ],
)
def test_version(text: str, version: tuple[int, int]) -> None:
    """Minor versions are numbers: 3.10 is not 3.1."""
    assert _triton._version(text) == version


@pytest.mark.parametrize(
    ("arch", "fmt", "version", "native"),
    [
        pytest.param("gfx942", "e4m3fnuz", (3, 6), True, id="gfx942-e4m3fnuz-3.6"),
        pytest.param("gfx942", "e5m2fnuz", (3, 6), True, id="gfx942-e5m2fnuz-3.6"),
        pytest.param("gfx942", "e4m3fn", (3, 9), False, id="gfx942-e4m3fn-3.9"),
        pytest.param("gfx950", "e4m3fn", (3, 6), True, id="gfx950-e4m3fn-3.6"),
        pytest.param("gfx950", "e4m3fn", (3, 7), True, id="gfx950-e4m3fn-3.7"),
        pytest.param("sm_89", "e4m3fn", (3, 8), False, id="sm_89-e4m3fn-3.8"),
        pytest.param("sm_90", "e5m2", (3, 6), True, id="sm_90-e5m2-3.6"),
        pytest.param("sm_90", "e4m3fnuz", (3, 9), False, id="sm_90-e4m3fnuz-3.9"),
        pytest.param("gfx942", "e4m3fnuz", (4, 0), False, id="untried-version"),
        pytest.param("gfx1201", "e4m3fn", (3, 9), False, id="no-row"),
    ],
)
def test_native_casts(arch: str, fmt: str, version: tuple[int, int], native: bool) -> None:
    """The table of native casts; what was not tried is not native."""
    assert native_cast(arch, fmt, version) is native


@compiles
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        pytest.param("raise ValueError('no such pass')", "refused: ValueError: no such pass", id="raises"),
        pytest.param("os.kill(os.getpid(), 9)", "died with exit code -9", id="dies"),
    ],
)
def test_compiler_fault_in_the_child(monkeypatch: pytest.MonkeyPatch, fault: str, what: str) -> None:
    """Where compilations run in a child, its death is an error of this process, with case, arch and exit code."""

    def compile(*args: object) -> None:
        exec(fault, {"os": os})

    monkeypatch.setattr(_triton, "_compile", compile)
    monkeypatch.setattr(_triton, "ONE_AMD_ARCH_A_PROCESS", (_triton.TRITON_VERSION,))
    with pytest.raises(
        _triton.CompilationFailed, match=f"copy for gfx942: Triton .* {what}; expected a compiled kernel"
    ):
        cross_compile(SPEC, "gfx942")


@compiles
def test_child_gives_the_same_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation in a child brings back what one in this process would."""
    here = cross_compile(SPEC, "gfx942")
    monkeypatch.setattr(_triton, "ONE_AMD_ARCH_A_PROCESS", (_triton.TRITON_VERSION,))
    assert cross_compile(SPEC, "gfx942") == here
