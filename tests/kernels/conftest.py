"""What the tests of the kernels share: backends, number formats, numbers and poison."""

import pytest
import torch
from backends import Backend, make_backend


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
