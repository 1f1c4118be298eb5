"""Packages of the ``test`` extra that tests need, and what happens where one is missing."""

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """The module. Without it a test is skipped, or fails with LAYERSKIP_REQUIRE_ALL=1, as in CI."""
    if os.environ.get("LAYERSKIP_REQUIRE_ALL") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name)
