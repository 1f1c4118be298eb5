"""What the tests of the kernels need from the machine, and what happens where it is missing."""

import os

import pytest


def need(found: object, what: str) -> None:
    """Skip the test unless ``found``; with LAYERSKIP_REQUIRE_KERNELS=1, as in CI, fail instead."""
    if found:
        return
    if os.environ.get("LAYERSKIP_REQUIRE_KERNELS") == "1":
        pytest.fail(f"{what} is missing, and LAYERSKIP_REQUIRE_KERNELS is set")
    pytest.skip(f"needs {what}")
