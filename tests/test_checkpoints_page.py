"""bench/checkpoints.md: its commands are those of today, and its figures have sources."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipe_modules import RECIPES, imported

from layerskip.cli import parser

PAGE = (Path(__file__).parents[1] / "bench" / "checkpoints.md").read_text(encoding="utf-8")
LINES = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
COMMANDS = [line for line in LINES if line[0] == "layerskip"]
RUNS = [line for line in LINES if line[0] == "python"]
FIGURES = [row for row in PAGE.splitlines() if row.startswith("| ") and row.endswith("| |")]


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(["adapter_settings", "settings"]) as modules:
        yield modules


@pytest.mark.parametrize("line", COMMANDS, ids=" ".join)
def test_a_command_parses(line: list[str]) -> None:
    args = parser().parse_args(line[1:])
    assert args.command == "report" or "/" in args.model  # a hub id, not the built-in model


@pytest.mark.parametrize("line", RUNS, ids=" ".join)
def test_a_recipe_takes_its_settings(recipes: SimpleNamespace, line: list[str]) -> None:
    script, *overrides = line[1:]
    assert script == "recipes/exit_adapter.py"
    config = RECIPES / "exit_adapter.yaml"
    settings = recipes.settings.read(recipes.adapter_settings.Settings, config, overrides)
    # A block begins as a copy of a Llama layer, and of no other.
    assert settings.block_start == "next_layer" or "llama" not in settings.model.lower()
    assert settings.block_start == "nothing" or "llama" in settings.model.lower()


def test_what_a_command_reads_another_one_wrote() -> None:
    made = {"prompts.jsonl"} | {word[4:] for line in RUNS for word in line if word[:4] == "out="}
    for line in COMMANDS:
        args = vars(parser().parse_args(line[1:]))
        for name in ("plan", "exit_adapter", "runs", "prompts"):
            path = args.get(name)
            assert not path or path in made or (RECIPES.parent / path).exists(), path
        made |= {args["out"]} if args.get("out") else set()


def test_every_line_is_held_to_something() -> None:
    assert len(COMMANDS) > 20
    assert len(RUNS) == 3
    assert {line[0] for line in LINES} == {"layerskip", "python", "pip", "hf"}


def test_every_figure_has_a_source() -> None:
    given = set(re.findall(r"^(\d+)\. ", PAGE, flags=re.MULTILINE))
    assert len(FIGURES) > 10
    for row in FIGURES:
        assert set(re.findall(r"\[(\d+)\]", row)) <= given, row
        assert re.search(r"\[\d+\]", row), row
