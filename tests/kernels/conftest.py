"""What the tests of the kernels share: backends, number formats, numbers and poison.

What tests need compiled is compiled while others run, on every core.
"""

import os
from typing import Any

import cubins
import emulator
import pytest
import torch
from backends import Backend, every_kernel, make_backend

# On a GPU, torch's own products are deterministic only with this, set before the first of them.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
LAST = {"test_build.py", "test_turns.py"}  # they need what takes longest to compile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name in LAST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to compile: first for the operations' tests, then what each file asks for.

    A file's ``compile_ahead`` is told the names of all the fixtures that its tests use.
    """
    if session.config.option.collectonly:
        return
    used: dict[Any, set[str]] = {}
    for item in session.items:
        used.setdefault(getattr(item, "module", None), set()).update(
            getattr(item, "fixturenames", ())
        )
    if emulator.Toolchain.default().path and any("kernels" in names for names in used.values()):
        emulator.begin(every_kernel())
    for module, names in used.items():
        if (compile_ahead := getattr(module, "compile_ahead", None)) is not None:
            compile_ahead(names)


def pytest_unconfigure() -> None:
    emulator.stop()
    cubins.stop()


@pytest.fixture(params=["reference", "emulator", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation."""
    return make_backend(request.param)


@pytest.fixture(params=["emulator", "cuda"])
def kernels(request: pytest.FixtureRequest) -> Backend:
    """The implementations that promise bits."""
    return make_backend(request.param)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def numbers_and_poison():
    """The same numbers in every run; what a kernel leaves unwritten is NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
