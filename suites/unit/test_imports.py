"""Who may import whom, read from the source of every module, and what each layer can do without.

The two chains of the architecture, as ranks: a module imports only modules of a lower rank. Modules that stand beside a
chain are listed with the rank that their work needs. A new module without a rank is a failure, so that
its place is decided and not found out.

`suites -> fp8stack`, `suites -> harness`; `harness` and `fp8stack` never import each other; nothing imports `suites`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# errors <- platforms <- capabilities <- {ledger, manifest, baselines} <- {bands, speed, junit, journal} <- gate
# <- report <- cli. What stands beside the chain has the rank that its work needs, and no more. Equal ranks may import
# each other only where BESIDE says so.
HARNESS: dict[str, int] = {
    "errors": 0,
    "isa": 0,  # machine code -> facts: text in, plain data out
    "files": 1,  # what others have left, opened with care
    "memory": 0,  # the kernel's own counters
    "platforms": 1,
    "result": 1,  # what the gate says of a test: plain data for junit and report
    "executor": 1,  # the protocol of running a command
    "capabilities": 2,
    "canary": 2,  # what to run after a suspected GPU fault: a command and words, no policy
    "local": 2,
    "forked": 2,
    "nursery": 0,  # a process of its own, which imports nothing of ours
    "inside": 0,  # runs inside a container, and imports nothing of ours
    "engine": 2,  # the container engine: reaching it, whose a container is
    "devices": 2,  # the GPUs of this host, and who has which
    "container": 3,
    "images": 3,
    "ledger": 3,
    "manifest": 3,
    "baselines": 3,
    "bands": 4,
    "fingerprint": 4,  # what a measurement was made with
    "samples": 4,  # files of speed
    "speed": 5,
    "speedgate": 6,  # which recorded runs judge a row
    "against": 9,  # a checkout of the merge base, for launches in turns
    "calibrate": 10,  # several runs of one commit, into a baseline
    "machinecode": 4,  # the gate's third comparison, beside bands and speed
    "junit": 4,
    "junit_reader": 5,  # other people's JUnit
    "journal": 3,  # writing
    "journal_reader": 4,
    "deaths": 5,  # how a process ended, from the journal
    "hooks": 5,  # inside the test process: journal, capabilities, manifest
    "plan": 5,
    "plugin": 6,
    "progress": 6,
    "run": 7,  # executes and writes the journal
    "doctor": 7,
    "contained": 8,  # a run in containers, from the preflight to the executor
    "gate": 7,
    "combine": 8,  # several folders and files, one verdict
    "junit_merge": 9,
    "differences": 8,  # two runs, side by side
    "judged_with": 8,  # another checkout's judgement, in a process of its own
    "listings": 8,  # compiles kernels on demand, in the run's cache
    "report": 8,
    "history": 8,  # rows of speed over several runs
    "power": 8,  # how small a drift the bands see
    "rebuilt": 8,  # evidence made from baselines
    "perturb": 8,  # evidence made wrong, for the self-test
    "selftest": 9,
    "record": 9,  # runs judged once more, into baselines
    "proposal": 10,  # what a recording would change
    "across": 8,  # baselines of several platforms, side by side
    "cli": 11,
    "__main__": 12,
}

# Executing and judging share data, never code: a folder of evidence is judged where nothing could run.
EXECUTES = {
    "executor",
    "local",
    "forked",
    "nursery",
    "inside",
    "engine",
    "devices",
    "container",
    "images",
    "hooks",
    "plugin",
    "plan",
    "progress",
    "run",
    "listings",
    "against",
    "doctor",
    "contained",
}
JUDGES = {"bands", "samples", "speed", "speedgate", "machinecode", "deaths", "junit", "gate", "report", "combine"}

# _triton, device <- formats <- scaling <- kernels <- {linear, moe} <- models <- config <- parallel <- train
FP8STACK: dict[str, int] = {
    "_triton": 0,
    "inductor": 0,
    "device": 1,  # reports Triton's version
    "data": 1,  # leaves: no FP8 in them
    "metrics": 1,
    "checkpoint": 1,
    "compare": 1,
    "profile": 1,
    "formats": 2,
    "scaling": 3,
    "kernels": 4,
    "all_gather": 5,
    "linear": 5,
    "moe": 5,
    "models": 6,
    "config": 7,
    "utilisation": 7,
    "weights": 7,
    "command": 0,  # argparse with one-line errors, for every program here
    "options": 8,
    "parallel": 8,
    "blame": 9,
    "dryrun": 9,
    "train": 10,
}
LAYERS = {"harness": HARNESS, "fp8stack": FP8STACK}

# Pairs of equal rank, importer first, with the reason.
BESIDE: dict[tuple[str, str], str] = {
    ("ledger", "manifest"): "a waiver names a test by its id, whose grammar is the manifest's",
    ("linear", "all_gather"): "a linear takes a weight that was gathered as codes",
    ("moe", "linear"): "experts are converted and rounded as linears are",
}

FORBIDDEN = {
    "harness": {"torch", "triton", "numpy", "scipy", "fp8stack", "suites"},
    "fp8stack": {"harness", "suites", "pytest"},
}

# Third-party modules that a harness module may import only inside a function: `import harness` must not need them.
LAZY = {"junitparser", "msgspec", "rich", "docker", "pytest", "xdist"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path, module: str) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, at module level?) of everything that a file imports, `from x import y` as x.y."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    anchor = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*anchor, *([base] if base else [])])
                yield from ((f"{base}.{alias.name}", top) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                # Names for annotations only: no import happens, no layer is crossed.
                yield from (pair for part in child.orelse for pair in walk(part, top))
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, top and not function)

    yield from walk(tree, True)


def part(module: str) -> str:
    """The second word of a dotted name: the entry of a rank table ("harness.report.summary" -> "report")."""
    words = module.split(".")
    return words[1] if len(words) > 1 else ""


MODULES = [
    pytest.param(package, name, path, id=f"imports-{name}")
    for package in sorted(LAYERS)
    for name, path in modules(package)
]


@pytest.mark.parametrize(("package", "module", "path"), MODULES)
def test_direction(package: str, module: str, path: Path) -> None:
    """A module imports only what stands below it in its chain."""
    ranks = LAYERS[package]
    own = part(module)
    if own:
        assert own in ranks, f"{module} has no rank; expected one of {sorted(ranks)}; give it a place in {__name__}"
    for name, _ in imports(path, module):
        if name.split(".")[0] != package:
            continue
        other = part(name)
        if other == own or (not (ROOT / package / other).exists() and not (ROOT / package / f"{other}.py").exists()):
            continue  # its own subpackage, or a name of the package's __init__
        allowed = not own or ranks[other] < ranks[own] or (own, other) in BESIDE
        assert allowed, f"{module} imports {name}; expected only modules below rank {ranks.get(own)}; turn it round"


def test_executing_and_judging_are_apart() -> None:
    """No module that judges imports one that executes, nor the other way round; only record and cli know both."""
    for module, path in modules("harness"):
        own = part(module)
        other_side = EXECUTES if own in JUDGES else JUDGES if own in EXECUTES else set()
        found = {name for name, _ in imports(path, module) if name.startswith("harness.") and part(name) in other_side}
        assert not found, f"{module} imports {sorted(found)}"


@pytest.mark.parametrize(("package", "module", "path"), MODULES)
def test_forbidden(package: str, module: str, path: Path) -> None:
    """harness knows neither torch nor the product, fp8stack neither harness nor pytest, nobody knows suites."""
    for name, _ in imports(path, module):
        assert name.split(".")[0] not in FORBIDDEN[package], f"{module} imports {name}"


@pytest.mark.parametrize(("package", "module", "path"), MODULES)
def test_triton_in_one_place(package: str, module: str, path: Path) -> None:
    """Triton is imported by fp8stack/_triton.py and by nothing else."""
    names = [name for name, _ in imports(path, module) if name.split(".")[0] == "triton"]
    assert not names or module == "fp8stack._triton", f"{module} imports {names}; take it from fp8stack._triton"


def test_init_is_empty_of_imports() -> None:
    """`import harness` and `import fp8stack` by themselves import nothing third-party."""
    for package in LAYERS:
        names = [name for name, top in imports(ROOT / package / "__init__.py", package) if top]
        assert [n for n in names if n.split(".")[0] in LAZY | {"torch", "triton", "numpy"}] == []


BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked in this test")
sys.meta_path.insert(0, Block())
"""


def python(code: str, *blocked: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter where the named top-level modules cannot be imported."""
    text = (BLOCK.format(blocked=set(blocked)) if blocked else "") + code
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def _listed(package: str) -> list[str]:
    return [name for name, _ in modules(package) if not name.endswith("__main__")]


def test_fp8stack_without_triton() -> None:
    """Every module of fp8stack imports where triton is not installed, and the rowwise op still runs its reference."""
    done = python(
        f"import importlib\nfor name in {_listed('fp8stack')}: importlib.import_module(name)\n"
        "import torch\nfrom fp8stack.kernels.rowwise import quantize_rowwise\n"
        "q, inverse = quantize_rowwise(torch.full((1, 2), 240.0), 'e4m3fnuz')\n"
        "assert inverse.tolist() == [1.0] and q.view(torch.uint8).tolist() == [[0x7F, 0x7F]], (q, inverse)\n",
        "triton",
        TRITON_INTERPRET="0",
    )
    assert done.returncode == 0, done.stderr


def test_fp8stack_without_a_usable_gpu_runtime() -> None:
    """Every module imports where each question to torch.cuda raises: nothing asks for a GPU at import."""
    done = python(
        "import torch\n"
        "def refuse(*args, **kwargs): raise RuntimeError('torch.cuda was asked at import')\n"
        "for name in ('is_available', 'device_count', 'current_device', 'get_device_properties',\n"
        "             'get_device_capability', 'get_device_name', 'init', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, refuse)\n"
        f"import importlib\nfor name in {_listed('fp8stack')}: importlib.import_module(name)\n",
        "triton",
    )
    assert done.returncode == 0, done.stderr


def test_import_initialises_no_gpu() -> None:
    """After importing all of fp8stack no CUDA context exists."""
    done = python(
        f"import importlib\nfor name in {_listed('fp8stack')}: importlib.import_module(name)\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
    )
    assert done.returncode == 0, done.stderr


def test_harness_without_torch() -> None:
    """Every module of harness imports where torch, triton, numpy, fp8stack, suites, docker and junitparser cannot."""
    done = python(
        f"import importlib\nfor name in {_listed('harness')}: importlib.import_module(name)\n",
        "torch",
        "triton",
        "numpy",
        "fp8stack",
        "suites",
        "docker",
        "junitparser",
    )
    assert done.returncode == 0, done.stderr


def test_harness_itself_needs_the_standard_library_only() -> None:
    """`import harness` works where no third-party package is installed."""
    done = python("import harness\n", *sorted(LAZY), "torch", "numpy", "triton")
    assert done.returncode == 0, done.stderr


def masked_loads(path: Path) -> Iterator[tuple[int, bool]]:
    """(line, has a fill value) of every masked tl.load in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "tl"):
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        if "mask" in keywords or len(node.args) > 1:
            yield node.lineno, "other" in keywords or len(node.args) > 2


KERNELS = [path for _, path in modules("fp8stack") if "kernels" in path.parts]


@pytest.mark.parametrize("path", [pytest.param(path, id=f"imports-fill-{path.stem}") for path in KERNELS])
def test_masked_loads_have_their_fill(path: Path) -> None:
    """Every masked load gives the value of its masked lanes (ROCm/aiter#4288); the interpreter's 0 hides it."""
    missing = [line for line, filled in masked_loads(path) if not filled]
    assert not missing, f"{path.name}: masked tl.load without other= in lines {missing}"


def test_the_lint_sees_a_missing_fill(tmp_path: Path) -> None:
    """The lint itself: a masked load without its fill is reported, one with it and an unmasked one are not."""
    file = tmp_path / "kernel.py"
    file.write_text("a = tl.load(p, mask=m)\nb = tl.load(p, mask=m, other=0.0)\nc = tl.load(p)\nd = tl.load(p, m)\n")
    assert list(masked_loads(file)) == [(1, False), (2, True), (4, False)]
