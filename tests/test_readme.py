"""The README tells the truth: its Python runs, its commands parse, its map is the code's."""

import re
import shlex
from pathlib import Path

import pytest

from layerskip.cli import parser

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line.split("#")[0].strip()
    for language, code in BLOCKS
    if not language
    for line in code.splitlines()
    if line.startswith("layerskip ")
]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_block_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("line", COMMANDS)
def test_command_parses(line: str) -> None:
    parser().parse_args(shlex.split(line)[1:])


def test_commands_and_code_were_found() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 3


def test_map_names_every_module_once_and_no_other() -> None:
    package = Path(__file__).parent.parent / "layerskip"
    modules = sorted(p.name for p in package.glob("*.py") if p.name != "__init__.py")
    table = README.split("| file | what it holds |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", table)) == modules
    for folder, file in re.findall(r"`(\w+)/(\w+\.py)?`", table):
        assert (package / folder / file).exists(), f"{folder}/{file}"


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for line in re.findall(r"^make ([a-z -]+)", README, flags=re.MULTILINE):
        for target in line.split():
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
