"""The listings of the kernels whose case matches, for `fp8ci isa show`: run by the harness, in a process of its own.

    python -P suites/codegen/listings.py GLOB ARCH FOLDER

A case id is matched with and without its arch. FOLDER gets the listings and `index.json`: the Triton that compiled,
every case of the arch, and for each match what the reader of machine code has to know beside the text.

Imports fp8stack alone, and that is the one on PYTHONPATH: the harness also runs this file on another revision, where
nothing of suites/ need be as it is here. One line on stderr and exit status 2 where the arch is not known.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import fp8stack.kernels
from fp8stack import _triton, device
from fp8stack._triton import CompileSpec


def specs(arch: str) -> dict[str, CompileSpec]:
    """Case id without the arch -> spec, of every kernel family, in the order of the ids."""
    found: dict[str, CompileSpec] = {}
    for module in sorted(name for _, name, _ in pkgutil.iter_modules(fp8stack.kernels.__path__)):
        compile_specs = getattr(importlib.import_module(f"fp8stack.kernels.{module}"), "compile_specs", None)
        if compile_specs is not None:
            found |= {spec.case: spec for spec in compile_specs(arch)}
    return dict(sorted(found.items()))


def write(spec: CompileSpec, arch: str, folder: Path) -> dict[str, object]:
    """Compile one kernel, write its listing; returns its entry of the index."""
    compiled = _triton.cross_compile(spec, arch)
    listing, usage = folder / f"{spec.case}.s", None
    if "amdgcn" in compiled.asm:
        listing.write_text(str(compiled.asm["amdgcn"]), encoding="utf-8")
    else:
        cubin = compiled.asm["cubin"]
        assert isinstance(cubin, bytes)
        text, resources = _triton.disassemble(cubin)
        listing.write_text(text, encoding="utf-8")
        usage = folder / f"{spec.case}.usage"
        usage.write_text(resources, encoding="utf-8")
    return {
        "case": spec.case,
        "format": spec.fmt,
        "num_warps": spec.num_warps,
        "options": {name: str(value) for name, value in spec.options.items()},
        "constants": {name: str(value) for name, value in spec.constexprs.items()},
        "shared_bytes": int(compiled.metadata["shared"]),
        "listing": listing.name,
        "resource_usage": usage and usage.name,
    }


def main(glob: str, arch: str, folder: Path) -> int:
    try:
        every = specs(arch)
    except (LookupError, device.UnknownArch) as error:
        print(error, file=sys.stderr)
        return 2
    matches = [
        spec
        for case, spec in every.items()
        if any(fnmatch.fnmatchcase(name, glob) for name in (case, f"{case}-{arch}"))
    ]
    index = {
        "triton": _triton.require("fp8ci isa show").__version__,
        "cases": list(every),
        "kernels": [write(spec, arch, folder) for spec in matches],
    }
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
