"""``layerskip completion``: the scripts complete in the shells themselves, and start nothing."""

import argparse
import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerskip.cli import main, parser

SHELLS = ("bash", "zsh", "fish")
NOWHERE = {"PATH": "/nonexistent", "LC_ALL": "C"}  # the shell alone: any command it starts fails


def script(shell: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", shell]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell), encoding="utf-8")
    return {shell: folder / shell for shell in SHELLS}


def in_shell(name: str, *arguments: object, cwd: Path) -> str:
    """What a shell prints that reads none of its user's files; skipped where it is not here."""
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"{name} is not here")
    command = [shell, *map(str, arguments)]
    environment = NOWHERE | {"HOME": str(cwd)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def completed(file: Path, cwd: Path, *words: str) -> set[str]:
    """What bash offers for the last of ``words`` when TAB is pressed."""
    press = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))\n'
        "read -ra spec < <(complete -p layerskip)\n"
        'for ((i = 0; i < ${#spec[@]}; i++)); do [[ ${spec[i]} == -F ]] && "${spec[i + 1]}"; done\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    shell = ("--norc", "--noprofile", "-c", press, "press", file, *words)
    return set(in_shell("bash", *shell, cwd=cwd).split("\n")) - {""}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("gen",), {"generate"}),
        (("co",), {"compare", "completion"}),
        (("generate", "--exit"), {"--exit-layer", "--exit-adapter"}),
        (("generate", "builtin", "--verification", ""), {"coupled", "token", "block"}),
        (("generate", "--prompt", "x", "--max-n"), {"--max-new-tokens"}),
        (("generate", "--no-exact", "--top-"), {"--top-k", "--top-p"}),
        (("info", "m"), {"model"}),
        (("compare", "model", "--prompts", "m"), {"model", "mine.jsonl"}),
        (("completion", ""), set(SHELLS)),
        (("fly",), set()),
    ],
)
def test_bash_completes(
    scripts: dict[str, Path], tmp_path: Path, words: tuple[str, ...], wanted: set[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.jsonl").touch()
    assert completed(scripts["bash"], tmp_path, "layerskip", *words) == wanted


def test_fish_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    for line, wanted in (
        ("gen", {"generate"}),
        ("generate --exit", {"--exit-layer", "--exit-adapter"}),
        ("generate --verification b", {"block"}),
    ):
        press = f"source {scripts['fish']}; complete -C 'layerskip {line}'"
        offered = in_shell("fish", "--no-config", "-c", press, cwd=tmp_path).splitlines()
        assert {line.split("\t")[0] for line in offered} == wanted


@pytest.mark.parametrize(("shell", "option"), [("bash", "-n"), ("zsh", "-fn"), ("fish", "-Nn")])
def test_a_script_is_of_its_shell(
    scripts: dict[str, Path], tmp_path: Path, shell: str, option: str
) -> None:
    in_shell(shell, option, scripts[shell], cwd=tmp_path)


def test_zsh_finds_the_script(scripts: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(scripts["zsh"], tmp_path / "_layerskip")
    load = "fpath=($PWD $fpath); autoload -U compinit && compinit -D -u && autoload +X _layerskip"
    shown = in_shell("zsh", "-fc", f"{load} && print $_comps[layerskip]", cwd=tmp_path)
    assert shown == "_layerskip\n"


def actions(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in command._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from actions(child)


def test_every_command_and_option_is_in_every_script(scripts: dict[str, Path]) -> None:
    found = list(actions(parser()))
    options = {o.lstrip("-") for action in found for o in action.option_strings}
    commands = {c for a in found if isinstance(a, argparse._SubParsersAction) for c in a.choices}
    assert len(options) > 30
    for shell, file in scripts.items():
        text = file.read_text(encoding="utf-8")
        assert {name for name in options | commands if name not in text} == set(), shell


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_described_by_a_whole_sentence(scripts: dict[str, Path], shell: str) -> None:
    """They show the first line of a description."""
    (shown,) = re.findall("Print what a shell reads.*", scripts[shell].read_text(encoding="utf-8"))
    assert shown.rstrip("'\"").endswith("options and file names.")


def test_options_that_name_files_say_so() -> None:
    plain = [a for a in actions(parser()) if a.option_strings and a.metavar not in ("FILE", "DIR")]
    named = [a.option_strings[0] for a in plain if a.dest in ("plan", "prompts", "out", "policy")]
    assert named == []


def test_a_shell_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "tcsh"])
    assert stopped.value.code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def said(default: object) -> tuple[str, ...]:
    """How a help text may say a default."""
    if default is True:
        return ("(the default",)
    if isinstance(default, tuple):
        return (f"(default {','.join(map(str, default))})",)
    if isinstance(default, float):
        return (f"(default {default})", f"(default {default:g})")
    return (f"(default {default})", f"{default!r} (the default)")


def test_every_default_is_said_in_its_help() -> None:
    formatter = parser()._get_formatter()
    silent, count = [], 0
    for action in actions(parser()):
        default = action.default
        if default in (None, (), [], argparse.SUPPRESS) or default is False:
            continue
        count += 1
        words = formatter._expand_help(action) if action.help else ""
        if not any(form in words for form in said(default)):
            silent.append((action.option_strings or action.dest, default, words))
    assert silent == []
    assert count > 50
