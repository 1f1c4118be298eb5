"""Floors of the package: imports only go down."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerskip

PACKAGE = Path(layerskip.__file__).parent
VALUES = {
    "adapter_shape",
    "ambient",
    "control.clocks",
    "control.ending",
    "control.experience",
    "control.mixture",
    "control.pace",
    "control.pass_times",
    "cost",
    "errors",
    "families",
    "files",
    "grammar",
    "grammar_lengths",
    "lookup",
    "metrics",
    "outputs",
    "params",
    "plan",
    "policy",
    "schemas.automata",
    "schemas.check",
    "schemas.formats",
    "schemas.merge",
    "schemas.negate",
    "schemas.patterns",
    "schemas.refs",
    "schemas.values",
    "schemas.write",
    "text",
    "vocabulary",
}
# From the bottom up: a module may import what stands in the lines before its own.
ENGINE = [
    {"adapter_file", "cache", "constraint", "control.estimates", "fingerprint", "graphs"},
    {"blocks", "grammar_xgrammar", "layout", "sampling", "control.stopping"},
    {"control.asks", "draft_head", "roundings", "shared"},
    {"exactness", "dense", "admission", "guest", "verification", "processors", "row", "controller"},
    {"exit_block", "guessing", "packing", "pass_sizes", "skeleton"},
    {"exit_adapter", "packed_forward"},
    {"model"},
    {"drafting", "packed"},
    {"hindsight", "seats", "verify"},
    {"attempt"},
    {"learning"},
    {"device_round", "outcome", "speculation", "stand_ins"},
    {"rounds"},
    {"workbench"},
    {"decode"},
]

KNOW_TRANSFORMERS = {"admission", "guest", "model", "processors", "skeleton"}


@functools.cache
def module_names() -> list[str]:
    """Modules of the package, dotted, without the package's own name."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(f.relative_to(PACKAGE).with_suffix("").parts) for f in files]
    return [n for n in names if not n.endswith("__init__")]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All below ``node`` but those of ``if TYPE_CHECKING:``, which never run. What is no statement
    holds none, and is most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


@functools.cache
def imported(module: str) -> set[str]:
    """Dotted names that ``module`` imports when it runs, inside functions too."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(module: str) -> set[str]:
    """The package's own modules among them."""
    known = set(module_names())
    own = {n.removeprefix("layerskip.") for n in imported(module) if n.startswith("layerskip.")}
    return {m for m in known if any(n == m or n.startswith(m + ".") for n in own)}


def floor(module: str) -> int:
    """0 values and ops, 1.. the engine's, then tools: whatever has no other place."""
    if module in VALUES or module.startswith("ops."):
        return 0
    for height, names in enumerate(ENGINE, start=1):
        if module in names:
            return height
    return len(ENGINE) + 1


def test_the_floors_name_real_modules():
    assert VALUES.union(*ENGINE) <= set(module_names())


@pytest.mark.parametrize("module", module_names())
def test_imports_only_go_down(module):
    lower = {m for m in module_names() if floor(m) <= floor(module)}
    assert imported_modules(module) <= lower


@pytest.mark.parametrize("module", sorted(set.union(*ENGINE)))
def test_modules_of_one_engine_floor_are_independent(module):
    same = {m for m in module_names() if floor(m) == floor(module)}
    assert not imported_modules(module) & same


@pytest.mark.parametrize("module", [m for m in module_names() if m.startswith("training.")])
def test_training_stands_alone(module):
    own = imported_modules(module)
    assert all(floor(m) == 0 or m.startswith("training.") for m in own)


def test_no_import_goes_round_in_a_circle():
    graph = {m: imported_modules(m) for m in module_names()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize("module", [m for m in module_names() if floor(m) <= len(ENGINE)])
def test_few_modules_know_transformers(module):
    knows = any(n.split(".")[0] == "transformers" for n in imported(module))
    assert knows == (module in KNOW_TRANSFORMERS)


def test_public_values_load_without_torch():
    names = "DraftPlan, SamplingParams, Round, DecodeStats, GenerationOutput, UnsupportedModelError"
    script = f"import sys; from layerskip import {names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent, timeout=60)


def test_public_names_are_real_and_others_are_not():
    assert all(getattr(layerskip, name) is not None for name in layerskip.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Typo'"):
        _ = layerskip.Typo


def test_public_names_are_listed_before_anything_imports_them():
    """What a prompt completes after ``layerskip.``; a module's own names stay."""
    assert {*layerskip.__all__, "__name__", "__file__"} <= set(dir(layerskip))
