"""The pytest plugin: options, the `requires` mark, and nothing else. What it does with them is in hooks.py.

pytest loads this module into every session of an environment where the distribution is installed, also into sessions
that have nothing to do with us. So it imports only pytest, and without `--fp8-out` it registers no hook: such a
session's outcome and output are what they would be without it.

    pytest suites/numerics --fp8-out DIR --fp8-suite numerics --fp8-platform cpu --fp8-run-id ID
        [--fp8-case GLOB,...] [--fp8-capabilities FILE]
"""

from __future__ import annotations

import pytest

OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--fp8-out", "DIR", "evidence folder: append the journal there (without it, the other options do nothing)"),
    ("--fp8-suite", "NAME", "suite that the tests belong to"),
    ("--fp8-platform", "ID", "platform that the tests run on"),
    ("--fp8-run-id", "ID", "run id written into the journal"),
    ("--fp8-case", "GLOB,...", "run only the tests whose case id matches, or whose whole id is given"),
    ("--fp8-capabilities", "FILE", "what this machine can do, as `fp8ci run` wrote it; probed when left out"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options, in a group of their own."""
    group = parser.getgroup("fp8", "FP8 evidence")
    for name, metavar, help_text in OPTIONS:
        group.addoption(name, metavar=metavar, help=help_text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest can import triton: a cache folder and, with several GPUs, a GPU of its own a worker."""
    if early_config.known_args_namespace.fp8_out:
        from harness import hooks

        hooks.separate_worker()


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; with `--fp8-out`, the hooks."""
    config.addinivalue_line(
        "markers", 'requires(*requirements, **amounts): what the machine must have, e.g. requires("fp8:fnuz", gpus=2)'
    )
    if config.getoption("--fp8-out"):
        from harness import hooks

        hooks.install(config)
