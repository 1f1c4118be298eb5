"""What the command line refuses: one sentence, exit code 2, and nothing written."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from command_line import assert_refused, run, run_apart
from recorded import flat_cost, pair, write_run
from toys import MAX_POSITIONS, NUM_LAYERS, make_model
from transformers import BertConfig, MambaConfig

from layerskip import DraftPlan
from layerskip.cli import main
from layerskip.commands import facts


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder for broken things."""
    return tmp_path


def test_a_missing_folder(bad: Path) -> None:
    assert_refused(run("generate", bad / "gone", "--prompt", "x"), "gone", "is not a folder")


def test_a_folder_without_config(bad: Path) -> None:
    assert_refused(run("info", bad), str(bad), "no config.json")


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (BertConfig(), "bert", "it is not among the tested families"),
        (MambaConfig(), "mamba", "layers with a recurrent state"),
    ],
)
def test_an_unsupported_architecture(bad: Path, config: Any, name: str, reason: str) -> None:
    config.save_pretrained(bad)
    for command in (("generate", "--prompt", "x"), ("compare",)):
        assert_refused(run(command[0], bad, *command[1:]), repr(name), reason)


def test_info_says_that_a_checkpoint_is_not_supported(bad: Path) -> None:
    BertConfig().save_pretrained(bad)
    result = run("info", bad, "--json")
    assert (result.code, result.document["supported"]) == (0, False)
    assert "architecture 'bert'" in result.document["reason"]
    assert "architecture 'bert'" in " ".join(run("info", bad).out.split())


def test_a_config_that_is_no_json(bad: Path) -> None:
    (bad / "config.json").write_text("{", encoding="utf-8")
    assert_refused(run("info", bad), str(bad))


@pytest.mark.parametrize("exit_layer", ["0", "-1", "6", "99", "two", "2,3", "1.5"])
def test_an_exit_layer_that_does_not_exist(folder: Path, exit_layer: str) -> None:
    result = run("generate", folder, f"--exit-layer={exit_layer}", "--prompt", "x")
    number = exit_layer.removeprefix("-").isdigit()
    said = f"exit_layer must be between 1 and 5, got {exit_layer}" if number else exit_layer
    assert_refused(result, said)


def test_an_empty_prompt(folder: Path, bad: Path) -> None:
    (bad / "empty.txt").write_text("", encoding="utf-8")
    assert_refused(run("generate", folder, "--prompt", ""), "prompt is empty")
    assert_refused(run("generate", folder, "--prompt-file", bad / "empty.txt"), "prompt is empty")


def test_a_prompt_beyond_the_context(folder: Path) -> None:
    result = run("generate", folder, "--prompt", "q" * MAX_POSITIONS)
    assert_refused(result, f"{MAX_POSITIONS} tokens", f"{MAX_POSITIONS} positions")


def test_a_prompt_file_that_is_not_utf8(folder: Path, bad: Path) -> None:
    (bad / "prompt.txt").write_bytes(b"abc\xff")
    result = run("generate", folder, "--prompt-file", bad / "prompt.txt")
    assert_refused(result, "prompt.txt", "not UTF-8")
    assert_refused(run("generate", folder, "--prompt-file", bad / "gone.txt"), "gone.txt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers(bad: Path, value: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 7] = value
    model.save_pretrained(bad)
    result = run("generate", bad, "--exit-layer", 2, "--prompt", "x")
    assert_refused(result, "model.layers.3.mlp.up_proj.weight", "NaN")


@pytest.mark.parametrize("seed", ["abc", "1.5", "-1", str(2**63)])
def test_a_seed_that_is_none(folder: Path, seed: str) -> None:
    argv = ("generate", folder, "--prompt", "x", "--temperature", 1, f"--seed={seed}")
    assert_refused(run(*argv), "seed", seed)


def test_a_plan_for_another_depth(folder: Path, bad: Path) -> None:
    DraftPlan.exiting(num_layers=NUM_LAYERS + 1, exit_layer=2).save(bad / "plan.json")
    result = run("generate", folder, "--plan", bad / "plan.json", "--prompt", "x")
    assert_refused(result, f"{NUM_LAYERS + 1} layers", f"has {NUM_LAYERS}")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"version": 1}',
        b'{"version": 9, "num_layers": 6, "draft_layers": [0]}',
        b'{"version": 1, "num_layers": 6, "draft_layers": 3}',
        b'{"version": 1, "num_layers": 6, "draft_layers": [1, 0]}',
        b'{"version": 1, "num_layers": 6, "draft_layers": ["a"]}',
    ],
)
def test_a_broken_plan_file(folder: Path, bad: Path, content: bytes) -> None:
    (bad / "plan.json").write_bytes(content)
    assert_refused(run("generate", folder, "--plan", bad / "plan.json", "--prompt", "x"))
    assert_refused(run("info", folder, "--plan", bad / "gone.json"), "gone.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none(folder: Path) -> None:
    assert_refused(run("generate", folder, "--device", "cuda", "--prompt", "x"), "CUDA", "'cpu'")


@pytest.mark.parametrize(
    "options",
    [
        ("--max-new-tokens", "many"),
        ("--num-draft-tokens", -1),
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--top-p", 0),
        ("--min-p", 2),
        ("--dtype", "float64"),
        ("--device", "tpu"),
        ("--exit-layer", 2, "--plan", "plan.json"),
        ("--prompt-file", "prompt.txt"),
        ("--nonsense",),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_other_options_that_make_no_sense(folder: Path, options: tuple[Any, ...]) -> None:
    assert_refused(run("generate", folder, "--prompt", "x", *options))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-new-tokens", 0, "max_new_tokens must be at least 1, got 0"),
        ("--logprobs", 101, "logprobs must be between 0 and 100, got 101"),
        ("--stop", "", "stop must be one or more non-empty strings"),
        ("--stop", "\udcff", "stop is not valid Unicode"),  # what a shell makes of other bytes
        ("--num-draft-tokens", 33, "num_draft_tokens must be between 0 and 32, got 33"),
    ],
)
def test_numbers_are_checked_before_the_model_is_looked_for(
    bad: Path, option: str, value: object, words: str
) -> None:
    assert_refused(run("generate", bad / "gone", "--prompt", "x", option, value), words)


@pytest.mark.parametrize("argv", [(), ("fly",), ("generate",)])
def test_a_command_line_that_is_none(argv: tuple[str, ...]) -> None:
    assert_refused(run(*argv))


def test_compare_with_an_unknown_mode(folder: Path) -> None:
    assert_refused(run("compare", folder, "--modes", "plain,warp"), "'warp'", "hf-early-exit")
    assert_refused(run("compare", folder, "--modes", "plain,,layerskip"), "--modes has ''")


@pytest.mark.parametrize(
    "options", [("--repeats", 0), ("--limit", 0), ("--max-new-tokens", 0)], ids=str
)
def test_compare_with_nothing_to_do(options: tuple[Any, ...]) -> None:
    result = run("compare", "--modes", "plain", *options)
    assert_refused(result, options[0].strip("-").replace("-", "_").split("_")[-1])


def test_compare_with_a_share_that_is_none(folder: Path) -> None:
    result = run("compare", folder, "--modes", "plain", "--max-repeated", "nan")
    assert_refused(result, "--max-repeated must be finite and at least 0, got nan")


@pytest.mark.parametrize("line", ["not json", '{"text": "x"}', '{"prompt": 5}', "[1]"])
def test_compare_with_a_bad_line(folder: Path, bad: Path, line: str) -> None:
    path = bad / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    assert_refused(run("compare", folder, "--prompts", path), "prompts.jsonl line 2")


def test_compare_with_prompts_beyond_the_context(folder: Path, bad: Path) -> None:
    path = bad / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "q" * MAX_POSITIONS}) + "\n", encoding="utf-8")
    result = run("compare", folder, "--prompts", path, "--modes", "plain")
    assert_refused(result, "prompt", "positions")


def test_compare_says_which_prompt_is_empty(folder: Path, bad: Path) -> None:
    path = bad / "prompts.jsonl"
    path.write_text('{"prompt": "the rain"}\n{"prompt": ""}\n', encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--modes", "plain")
    assert_refused(run(*argv), "prompt 2 has no token; leave it out")


@pytest.mark.parametrize(
    "argv",
    [
        ("compare", "--prompts", ""),
        ("measure", "--out", "runs", "--prompts", ""),
        ("search", "--out", "plan.json", "--prompts", ""),
        ("search", "--out", "plan.json", "--vocabulary-texts", ""),
        ("search", "--out", ""),
        ("generate", "--prompt", "a", "--plan", ""),
        ("generate", "--prompt", "a", "--task", "a", "--policy", ""),
        ("generate", "--prompt-file", ""),
        ("generate", "--prompt", "a", "--json-schema", ""),
    ],
    ids=" ".join,
)
def test_an_empty_name_of_a_file_is_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    """It is what a variable that is not set leaves."""
    monkeypatch.chdir(tmp_path)
    assert_refused(run(argv[0], folder, *argv[1:]), f"{argv[-2]} must name a file, got ''")
    assert not list(tmp_path.iterdir())


def run_into(
    stdout: int | IO[str], argv: list[str], *, buffered: bool = True
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "layerskip.cli", *argv]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        env=usual if buffered else usual | {"PYTHONUNBUFFERED": "1"},
    )


def test_a_document_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    argv = ["report", str(write_run(tmp_path, pair(0, ((4, 2),) * 3), cost=flat_cost())), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = run_into(writing, argv)
    os.close(writing)
    assert done.returncode == 1
    assert "Error" not in done.stderr
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            done = run_into(full, argv)
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


def closed_pipe() -> int:
    """One that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("argv", [["--help"], ["compare", "--help"], ["--version"]], ids=" ".join)
def test_help_that_nobody_reads_ends_quietly(argv: list[str], buffered: bool) -> None:
    writing = closed_pipe()
    done = run_into(writing, argv, buffered=buffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            done = run_into(full, argv, buffered=buffered)
        assert (done.returncode, done.stderr) == (2, "layerskip: No space left on device\n")


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="a shell closes the streams")
@pytest.mark.parametrize(
    ("closed", "argv", "code", "words"),
    [(1, "--version", 0, "layerskip 0"), (2, "report /nowhere --json", 2, "")],
)
def test_streams_may_be_closed(
    tmp_path: Path, closed: int, argv: str, code: int, words: str
) -> None:
    said = tmp_path / "said"
    line = f'"$0" -m layerskip {argv} {3 - closed}>"$1" {closed}>&-'
    done = subprocess.run(["/bin/sh", "-c", line, sys.executable, said], timeout=120, check=False)
    assert done.returncode == code
    assert said.read_text().startswith(words)
    assert bool(words) == bool(said.read_text())


class Full(io.StringIO):
    """What holds a little, and can't write it."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ValueError("the real reason"), 2, "layerskip: the real reason\n"),
        (KeyboardInterrupt(), 130, "layerskip: interrupted\n"),
        (SystemExit(143), 143, ""),
        (None, 2, "layerskip: No space left on device\n"),
    ],
)
def test_what_cannot_be_written_hides_no_reason(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, code: int, said: str
) -> None:
    def told(*_: Any) -> dict[str, Any]:
        if raised is not None:
            raise raised
        return {}

    monkeypatch.setattr(facts, "run_info", told)
    err = io.StringIO()
    with contextlib.redirect_stdout(Full()), contextlib.redirect_stderr(err):
        if isinstance(raised, SystemExit):
            with pytest.raises(SystemExit, match=str(code)):
                main(["info"])
        else:
            assert main(["info"]) == code
    assert err.getvalue() == said


def test_a_document_is_written_though_nobody_reads_beside_it(tmp_path: Path) -> None:
    runs = write_run(tmp_path, pair(0, ((4, 2),) * 3), cost=flat_cost())
    writing = closed_pipe()
    done = subprocess.run(
        [sys.executable, "-m", "layerskip", "report", str(runs), "--json"],
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0
    assert "report" in json.loads(done.stdout)


NOBODY_READS = {
    "profile": ["profile", "{model}", "--out", "{out}", "--seconds", "0.3"],
    "report": ["report", "{runs}", "--policy", "{out}"],
    "report's page": ["report", "{runs}", "--html", "{out}"],
    "simulate": [
        *("simulate", "--cost", "{cost}", "--acceptance", "0.8", "--html", "{out}"),
        *("--requests", "20", "--concurrency", "1"),
    ],
}


@pytest.mark.parametrize("case", NOBODY_READS)
def test_what_was_found_is_saved_though_nobody_reads_what_is_said(
    folder: Path, tmp_path: Path, case: str
) -> None:
    runs = write_run(tmp_path / "runs", pair(0, ((4, 2),) * 3), cost=flat_cost())
    flat_cost().save(tmp_path / "cost.json")
    given = {"model": folder, "out": tmp_path / "out", "runs": runs, "cost": tmp_path / "cost.json"}
    argv = [word.format(**given) for word in NOBODY_READS[case]]
    reading, writing = os.pipe()
    os.close(reading)
    done = run_into(writing, argv)
    os.close(writing)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out").is_file()


OVERWRITING = {
    "prompts": (
        ["search", "./gone", "--prompts", "a.jsonl", "--out", "{}"],
        "a.jsonl",
        "--prompts",
    ),
    "texts": (
        ["search", "./gone", "--vocabulary-texts", "t", "--out", "{}"],
        "t",
        "--vocabulary-texts",
    ),
    "plan": (["profile", "./gone", "--plan", "plan.json", "--out", "{}"], "plan.json", "--plan"),
    "cost": (["simulate", "--cost", "c", "--acceptance", "1", "--html", "{}"], "c", "--cost"),
    "runs": (
        ["simulate", "--cost", "c", "--runs", "r", "--html", "{}"],
        "r/rounds.jsonl",
        "a file of the runs",
    ),
    "run": (["report", "r", "--html", "{}"], "r/run.json", "a file of the runs"),
    "requests": (["report", "r", "--policy", "{}"], "r/requests.jsonl", "a file of the runs"),
    "config": (["search", "m", "--out", "{}"], "m/config.json", "a file of the model"),
    "plan of the model": (["profile", "m", "--out", "{}"], "m/layerskip.json", "a file of the mod"),
    "adapter": (
        ["profile", "./gone", "--exit-adapter", "m", "--out", "{}"],
        "m/config.json",
        "a file of the exit adapter",
    ),
    "samples": (["report", "r", "--html", "{}"], "r/samples.jsonl", "a file of the runs"),
}


@pytest.mark.parametrize("case", OVERWRITING)
@pytest.mark.parametrize("way", ["as it is", "another spelling", "a link"])
def test_no_command_writes_over_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, name, what = OVERWRITING[case]
    write_run(tmp_path / "r", pair(0, ((4, 2),) * 3), cost=flat_cost())
    flat_cost().save("c")
    Path("m").mkdir()
    Path("m/config.json").write_text("{", encoding="utf-8")
    DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2).save("plan.json")
    for text in ("a.jsonl", "t", "r/samples.jsonl"):
        Path(text).write_text('{"prompt": "the rain in Spain stays"}\n' * 2, encoding="utf-8")
    out = name
    if way == "another spelling":
        out = str(tmp_path / "r" / ".." / name)
    elif way == "a link":
        out = "link"
        Path(out).symlink_to(name)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    result = run(*(word.format(out) for word in argv))
    assert_refused(result, f"{argv[-2]} {out} would overwrite ", what, "; give another name")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_cost_table_in_a_model_s_folder_may_be_written_again(bad: Path) -> None:
    (bad / "config.json").write_text("{", encoding="utf-8")  # which no command gets beyond
    flat_cost().save(bad / "cost.json")
    result = run("profile", bad, "--out", bad / "cost.json")
    assert_refused(result, f"model {str(bad)!r} cannot be loaded")


def test_a_search_alone_may_write_the_plan_of_its_model(bad: Path) -> None:
    (bad / "config.json").write_text("{", encoding="utf-8")  # which no command gets beyond
    result = run("search", bad, "--out", bad / "layerskip.json")
    assert_refused(result, f"model {str(bad)!r} cannot be loaded")


def test_a_page_may_lie_among_the_runs_and_be_written_again(tmp_path: Path) -> None:
    runs = write_run(tmp_path, pair(0, ((4, 2),) * 3), cost=flat_cost())
    for _ in range(2):
        result = run("report", runs, "--html", runs / "page.html", "--policy", runs / "policy.json")
        assert result.code == 0, result.err


def test_compare_says_how_many_prompts_are_too_long(folder: Path, bad: Path) -> None:
    path = bad / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": text}) for text in ("the rain in Spain stays", "q" * MAX_POSITIONS)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--modes", "plain", "--repeats", 1)
    result = run(*argv, "--max-new-tokens", 4, "--json")
    assert (result.document["prompts"], result.document["prompts_too_long"]) == (1, 1)
    said = " ".join(run(*argv, "--max-new-tokens", 4).out.split())
    assert "1 of 2 prompts left out: they leave no room for 4 new tokens" in said


@pytest.mark.parametrize(
    "options",
    [
        ("--plan", "plan.json"),
        ("--no-lookup",),
        ("--num-draft-tokens", 0),
        ("--modes", "plain"),
        ("--repeats", 1),
        ("--max-repeated", 0.2),
    ],
    ids=lambda options: options[0],
)
def test_teacher_forced_with_an_option_of_decoding(folder: Path, options: tuple[Any, ...]) -> None:
    name = options[0].replace("--no-", "--")
    result = run("compare", folder, "--teacher-forced", *options)
    assert_refused(result, f"--teacher-forced decodes nothing: leave out {name};")


def test_compare_without_a_tokenizer(bad: Path) -> None:
    make_model().save_pretrained(bad)
    result = run("compare", bad, "--exit-layer", 2, "--modes", "plain")
    assert_refused(result, "tokenizer")


def test_bad_input_leaves_no_file_behind(folder: Path, bad: Path) -> None:
    def snapshot() -> set[tuple[str, int]]:
        paths = [*folder.rglob("*"), *bad.rglob("*")]
        return {(str(p), p.stat().st_mtime_ns) for p in paths}

    (bad / "prompt.txt").write_bytes(b"\xff")
    before = snapshot()
    run("generate", folder, "--prompt-file", bad / "prompt.txt")
    run("generate", folder, "--exit-layer", 6, "--prompt", "x")
    run("compare", folder, "--prompts", bad / "gone.jsonl")
    assert snapshot() == before


def test_a_process_says_one_sentence(bad: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(bad)  # and no plan: that is no second sentence
    assert_refused(run_apart("generate", bad, "--prompt", "x"), "model.norm.weight")


def test_a_name_that_no_system_takes() -> None:
    assert_refused(run("generate", "a" * 300, "--prompt", "x"), "File name too long")
