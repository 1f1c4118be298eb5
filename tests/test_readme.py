"""The README tells the truth: its code and its commands run, its figures are made of files.

Commands run in their order in one folder, as a reader would give them, on a toy in the place of
PATH and with fewer prompts and tokens than the defaults.
"""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState
from recipe_modules import imported
from toys import PLANS, make_model, make_tokenizer

from layerskip.cli import main
from layerskip.plan import PlanFile
from layerskip.search import SearchSettings

REPO = Path(__file__).parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
LINES = [
    line.split("#")[0].strip()
    for language, code in BLOCKS
    if not language
    for line in code.splitlines()
]
COMMANDS = [line for line in LINES if re.match(r"layerskip |python recipes/", line)]
# Run elsewhere: installing by `make test-matrix`, the targets of make by whoever runs this.
ELSEWHERE = r"pip install |make "
BRIEF = {
    "info": "",
    "generate": "--max-new-tokens 4",
    "compare": "--limit 1 --max-new-tokens 4 --repeats 1",
    "profile": "--seconds 0.2",
    "search": "--limit 2 --max-new-tokens 4 --refinements 1",
    "measure": "--max-new-tokens 12 --arms 0,auto,2",  # on a busy machine "auto" may never draft
    "report": "",
    "ab": "--limit 4 --max-new-tokens 6",
    "simulate": "--requests 8 --new-tokens 6",
    "recipes/exit_adapter.py": "steps=3 batch_size=2 seq_len=32 exit_layer=2 continuations=8 "
    "continuation_length=8 rollout_every=2 rollout_starts=2 rollout_tokens=2 save_every=3 "
    "eval_every=3 eval_tokens=64 calibration_tokens=64 max_new_tokens=4 final_tokens=60 "
    "final_prompts=2 draft_vocabulary=128 held_out_share=0.3 mixed_precision=no",
    "recipes/lora_early_exit.py": "steps=2 batch_size=2 seq_len=32 rank=2 exits=[1,2] "
    "save_every=2 eval_every=2 eval_tokens=60 final_tokens=60 final_prompts=2 max_new_tokens=4 "
    "cost_seconds=0.05 held_out_share=0.3 mixed_precision=no",
}
# Numbers in the text that nobody measured: settings, rules and limits, each with its place.
DEFINED = {
    "0.8": "temperature, and `--max-repeated`'s neighbours in the tables' names",
    "0.2": "--max-repeated in the text",
    "2 %": "layerskip.trimming's least gain of a draft vocabulary",
    "3 %": "layerskip.telemetry.decision's tolerance of the worst tenth",
    "5 %": "the chance that none of 28 prompts is of the worst tenth: 0.9**28",
    "95 %": "of intervals",
}


@dataclass(frozen=True)
class BriefSearch(SearchSettings):
    """No option says so."""

    cost_seconds: float = 0.3


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each command of the README printed."""
    folder = tmp_path_factory.mktemp("reader")
    make_model(dtype="bfloat16", eos_token_id=1).save_pretrained(folder / "PATH")
    make_tokenizer().save_pretrained(folder / "PATH")
    PlanFile(PLANS["exit"]).save(folder / "PATH" / "layerskip.json")
    lines = [
        {"prompt": f"one tie {i} is not on its rose {i * i}", "completion": f" and {i}",
         "category": "code" if i % 2 else "chat"}
        for i in range(16)
    ]  # fmt: skip
    for name in ("prompts", "mine", "traffic", "train"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    with contextlib.chdir(folder), mock.patch("layerskip.search.SearchSettings", BriefSearch):
        yield {line: answered(line) for line in COMMANDS}


def answered(line: str) -> str:
    """What a command prints."""
    program, *words = shlex.split(line)
    words += shlex.split(BRIEF[words[0]])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if program == "layerskip":
            with contextlib.redirect_stderr(io.StringIO()) as complaint:
                assert main(words) == 0, (line, complaint.getvalue())
        else:
            AcceleratorState._reset_state(reset_partial_state=True)
            name = Path(words[0]).stem
            with imported([name, "adapter_measure"]) as modules:
                modules.adapter_measure.COST_SECONDS = 0.05
                getattr(modules, name).main(words[1:])
    return printed.getvalue()


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_block_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(answers: dict[str, str], line: str) -> None:
    assert answers[line].strip()


def test_every_line_of_a_block_is_known() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 10
    others = [line for line in LINES if line and line not in COMMANDS]
    diagram = [line for line in others if not re.match(ELSEWHERE, line)]
    assert not [line for line in diagram if re.match(r"(layerskip|python|pytest|make|pip)\b", line)]


def test_figures_stand_between_markers() -> None:
    """Where `bench/readme.py` writes them from files; the rest of the text has none of its own."""
    prose = re.sub(r"```.*?```|<!-- (\S+):begin -->.*?<!-- \1:end -->", "", README, flags=re.DOTALL)
    prose = re.sub(r"\[\d{4}\.\d{5}\]\([^)]*\)|\]\([^)]*\)|`[^`]*`|\*\*0\.1\.0\*\*", "", prose)
    prose = re.sub(r"(Python|torch|transformers|xgrammar|Apache-|BY-NC) ?\d[\d.]*", "", prose)
    found = re.findall(r"\d+(?:\.\d+)? %|\d+\.\d+|\d+ times|[\d.]+x\b", prose)
    assert set(found) <= set(DEFINED), set(found) - set(DEFINED)


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 400


def test_map_names_every_module_once_and_no_other() -> None:
    package = REPO / "layerskip"
    modules = sorted(p.name for p in package.glob("*.py") if p.name != "__init__.py")
    table = README.split("| file | what it holds |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", table)) == modules
    named = re.findall(r"`(\w+)/(\w+\.py)?`", table)
    assert len(named) > 3
    for folder, file in named:
        assert (package / folder / file).exists(), f"{folder}/{file}"


def test_make_targets_exist() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for page in (REPO / "README.md", REPO / "bench" / "README.md"):
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^make ([a-z -]+)|`make ([a-z-]+)`", text, flags=re.MULTILINE)
        assert len(lines) > 2
        for line in lines:
            for target in "".join(line).split():
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
