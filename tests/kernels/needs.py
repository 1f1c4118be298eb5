"""What the tests of the kernels need from the machine, and what happens where it is missing."""

import os
from pathlib import Path

import pytest
from emulator import Toolchain


def need(found: object, what: str) -> None:
    """Skip the test unless ``found``; with LAYERSKIP_REQUIRE_ALL=1, as in CI, fail instead."""
    if found:
        return
    if os.environ.get("LAYERSKIP_REQUIRE_ALL") == "1":
        pytest.fail(f"{what} is missing, and LAYERSKIP_REQUIRE_ALL is set")
    pytest.skip(f"needs {what}")


def need_compiler(toolchain: Toolchain) -> None:
    """Every machine has to have g++; another compiler is tried where it is."""
    if toolchain.path is None and toolchain.compiler != "g++":
        pytest.skip(f"{toolchain.compiler} is not installed: g++ is required, it is tried beside")
    need(toolchain.path, "g++, which builds the emulator")
    if toolchain.sanitize and not Path(toolchain.sanitizers()[0]).is_absolute():
        pytest.skip(f"{toolchain.compiler} has no sanitizers' library here")
