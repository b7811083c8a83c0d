"""Runs while an image is built: installs what the suites need beside the torch that is there, and nothing of torch.

    install.py cpu|rocm|cuda

A GPU base brings a torch that was built for its driver libraries; pip would replace it by one that was not, and the
image would still import. So the interpreter is found by importing torch and looking at `torch.version.hip` or `.cuda`,
torch, triton and numpy are pinned to what is there, and the build fails if torch is another one afterwards. The CPU
base brings none: it gets an environment of its own.

/wheels: where it holds wheels, pip takes everything from there and asks no index. /ca: certificates (*.crt) that pip
trusts beside its own. Writes /usr/local/bin/fp8ci-python, which is what runs in the image.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = "/opt/venv"
LAUNCHER = "/usr/local/bin/fp8ci-python"
CANDIDATES = (
    "/opt/venv/bin/python3",
    "/opt/conda/envs/py_3.12/bin/python3",
    "/opt/conda/bin/python3",
    "/usr/bin/python3",
)
KIND = {"rocm": "hip", "cuda": "cuda"}
ASK = """
import hashlib, importlib.metadata as metadata, json, torch
record = metadata.distribution("torch").read_text("RECORD") or ""
found = {"torch": torch.__version__, "file": torch.__file__, "hip": torch.version.hip, "cuda": torch.version.cuda,
         "record": hashlib.sha256(record.encode()).hexdigest()}
for name in ("triton", "pytorch-triton-rocm", "numpy"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def ask(python: str) -> dict[str, str | None] | None:
    """What torch an interpreter has; None where it has none."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def find(flavour: str) -> tuple[str, dict[str, str | None]]:
    """The interpreter whose torch is built for this flavour."""
    tried = []
    for python in ("python3", *CANDIDATES):
        found = ask(python)
        if found is not None and found[KIND[flavour]]:
            return python, found
        tried.append(f"{python}: {'no torch' if found is None else 'another build, ' + str(found['torch'])}")
    sys.exit(f"no interpreter has a torch built for {flavour}; tried {'; '.join(tried)}; take another base image")


def install(python: str, *arguments: str) -> None:
    """pip, from the wheel folder where it holds any, with the extra certificates where there are any."""
    command = [python, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", *arguments]
    if glob.glob("/wheels/*.whl"):
        command += ["--no-index", "--find-links", "/wheels"]
    environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    environment.pop("PIP_CONSTRAINT", None)  # the base's own pins speak of packages that are not ours
    certificates = sorted(glob.glob("/ca/*.crt"))
    if certificates:
        with open("/tmp/fp8ci-ca.pem", "w", encoding="utf-8") as bundle:
            for path in [*glob.glob("/etc/ssl/certs/ca-certificates.crt"), *certificates]:
                with open(path, encoding="utf-8") as one:
                    bundle.write(one.read() + "\n")
        environment["PIP_CERT"] = "/tmp/fp8ci-ca.pem"
    subprocess.run(command, env=environment, check=True)


def main(flavour: str) -> None:
    """Install, compare, and write the launcher."""
    requirements = ["-r", f"{HERE}/requirements.txt"]
    if flavour == "cpu":
        headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
        if shutil.which("g++") is None or not os.path.exists(headers):
            sys.exit(f"torch.compile needs g++ and {headers}; expected both in the base; take one that has them")
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        python = f"{VENV}/bin/python3"
        install(python, "-c", f"{HERE}/cpu-constraints.txt", "torch", "triton", "numpy", *requirements)
        before = after = ask(python)
    else:
        python, before = find(flavour)
        with open("/tmp/fp8ci-constraints.txt", "w", encoding="utf-8") as pins:
            for name in ("torch", "triton", "pytorch-triton-rocm", "numpy"):
                if before.get(name):
                    pins.write(f"{name}=={before[name]}\n")
        install(python, "-c", "/tmp/fp8ci-constraints.txt", *requirements)
        after = ask(python)
    if after is None or before != after:
        sys.exit(f"torch was {before} and is {after} after the installation; expected the same; see what pulled it in")
    expected = os.environ.get("TORCH", "")
    if not str(after["torch"]).startswith(expected):
        sys.exit(f"the base has torch {after['torch']}, docker/images.toml says {expected}; correct the row")
    resolved = subprocess.run(
        [python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True
    )
    with open(LAUNCHER, "w", encoding="ascii") as launcher:
        launcher.write(f'#!/bin/sh\nexec {resolved.stdout.strip()} "$@"\n')
    os.chmod(LAUNCHER, 0o755)
    print(json.dumps(after))


if __name__ == "__main__":
    main(sys.argv[1])
