"""What a launch would run, without a GPU: its kernels compiled for an arch and read, one configuration after another.

A launcher is called as on a GPU, with tensors that have no memory and recorders in place of the kernels. So what is
compiled is what a launch of these sizes with this configuration specialises on (constants, strides of 1, what 16
divides), and no copy of it is kept by hand. A launch of a single program is left out: no configuration changes it.

Compilations run in child processes (`python -m suites.perf.static`: a line of JSON in, a line out). A compiler that
dies takes its child along, not the ranking; and the child may be the interpreter of another environment, whose Triton
then gives its opinion.

Not here: what is compiled and how it is ranked (sweep.py), rules of machine code (suites/codegen/machine_code.py).
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import os
import pkgutil
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8stack.kernels
from fp8stack import _triton, formats
from fp8stack._triton import CompileSpec
from harness import isa
from suites.codegen.machine_code import MachineCode, broken_rules, machine_code
from suites.perf import kernels

ROOT = Path(__file__).resolve().parents[2]
POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TWO_GIB = 2**31


@dataclass(frozen=True)
class Job:
    """One compilation: an op of sweep.SPACES at a shape, with a configuration (its fields without `measured`)."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    fmt: str
    config: Mapping[str, int]
    arch: str


@dataclass(frozen=True)
class Code:
    """One kernel of a launch. facts: harness/isa. broken: the rules of machine code that it breaks, a message each."""

    kernel: str
    facts: Mapping[str, Any]
    broken: Sequence[str]


@dataclass(frozen=True)
class Answer:
    """What became of a job: its kernels, or why there are none. triton: whose compiler said so, such as "3.9.0"."""

    codes: tuple[Code, ...]
    refused: str | None
    triton: str


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(fp8stack.kernels.__path__):
        yield importlib.import_module(f"fp8stack.kernels.{found.name}")


class _Recorder:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            if grid != (1,):
                given = dict(zip(self._kernel.arg_names, arguments, strict=False))
                self._launches.append((self._kernel, {**given, **named}))

        return launch


@contextmanager
def _recording() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Every kernel of fp8stack.kernels replaced by a recorder, and the launches that they see."""
    launches: list[tuple[Any, dict[str, Any]]] = []
    replaced = []
    for module in _modules():
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                replaced.append((module, name, kernel))
                setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


def _spec(kernel: Any, given: Mapping[str, Any], fmt: str) -> CompileSpec:
    """What a launch with these arguments compiles: Triton's own rules of specialisation."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible, within_2gb = [], []
    for parameter in kernel.params:
        name, value = parameter.name, given[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            constexprs[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                divisible.append(name)
            if value.untyped_storage().nbytes() < TWO_GIB:
                within_2gb.append(name)
        else:
            signature[name] = "i32" if -TWO_GIB <= value < TWO_GIB else "i64"
            if value % 16 == 0 and not free:
                divisible.append(name)
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    return CompileSpec(
        kernel=kernel,
        case=kernel.__name__.strip("_").removesuffix("_kernel"),
        fmt=fmt,
        signature=signature,
        constexprs=constexprs,
        num_warps=options.pop("num_warps"),
        divisible=tuple(divisible),
        within_2gb=tuple(within_2gb),
        native=constexprs.get("NATIVE") is not None,
        encodes="NATIVE" in constexprs,
        options={name: value for name, value in options.items() if name not in _triton.LAUNCH_OPTIONS},
    )


def without_memory(inputs: kernels.Inputs) -> kernels.Inputs:
    """Tensors of the same sizes, strides and types on the device "meta"."""
    return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs)


def launched(job: Job) -> list[CompileSpec]:
    """The kernels that a launch runs, in order. Compiles nothing."""
    from suites.perf import sweep  # which imports this module

    space = sweep.SPACES[job.op]
    row = kernels.Row(job.op, job.shape, DTYPES[job.dtype], None, None)
    with FakeTensorMode():
        inputs = kernels.OPS[job.op].inputs(row, torch.Generator())
    config = space.make(**job.config, measured="")
    with _recording() as launches:
        space.launch(without_memory(inputs), formats.get(job.fmt), config, job.arch)
    return [_spec(kernel, given, job.fmt) for kernel, given in launches]


def variants(job: Job) -> list[Job]:
    """The job, and the same in every other format and input type that the codegen suite compiles its kernels for."""
    ran = [spec.kernel for spec in launched(job)]
    found = {(job.fmt, job.dtype): job}
    for module in _modules():
        for spec in module.compile_specs(job.arch) if hasattr(module, "compile_specs") else ():
            if spec.encodes and any(spec.kernel is kernel for kernel in ran):
                dtype = "bf16" if "*i16" in spec.signature.values() else "fp32"
                changed = {**asdict(job), "fmt": spec.fmt, "dtype": dtype}
                found.setdefault((spec.fmt, dtype), Job(**changed))
    return list(found.values())


def _code(code: MachineCode) -> Code:
    _, inside = isa.region(code.listing)
    facts = {**code.facts, "region_instructions": len(inside)}
    return Code(code.spec.kernel.__name__, facts, broken_rules(code))


def compile_here(job: Job) -> Answer:
    """The answer of this process's Triton."""
    version = _triton.require("compiling for a rank").__version__
    try:
        return Answer(tuple(_code(machine_code(spec, job.arch)) for spec in launched(job)), None, version)
    except (ImportError, SyntaxError, NameError):  # of this checkout, not of a configuration
        raise
    except Exception as error:  # a compiler refuses in its own way each time; the rank goes on without it
        first = (str(error).strip() or "no message").splitlines()[0]
        return Answer((), f"{type(error).__name__}: {first}", version)


class _Child:
    """A process that compiles; started again after it died."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: Job) -> Answer:
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, "-m", "suites.perf.static"],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process = None
            if (code := process.wait()) == 1:  # an exception of Python; a compiler that crashes ends by a signal
                raise RuntimeError(
                    f"{self._python} ended with an error before it compiled {job.op} for {job.arch}; expected an "
                    "answer for every configuration; its traceback is above: mend that first"
                )
            return Answer((), f"{self._python} died with exit code {code}; its stderr says why", "unknown")
        told = json.loads(line)
        return Answer(tuple(Code(**code) for code in told["codes"]), told["refused"], told["triton"])

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def compile_all(jobs: Iterable[Job], processes: int = 1, python: str = sys.executable) -> list[Answer]:
    """An answer a job, in their order, from that many child processes of an interpreter."""
    children: queue.Queue[_Child] = queue.Queue()
    for _ in range(processes):
        children.put(_Child(python))

    def ask(job: Job) -> Answer:
        child = children.get()
        try:
            return child.ask(job)
        finally:
            children.put(child)

    try:
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            return list(pool.map(ask, jobs))
    finally:
        while not children.empty():
            children.get().close()


def main() -> int:
    """Answer jobs until standard input ends. What a compiler prints goes to stderr: stdout is the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        job = Job(**{**told, "shape": tuple(told["shape"])})
        print(json.dumps(asdict(compile_here(job))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
