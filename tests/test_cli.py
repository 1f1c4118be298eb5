"""The command line, in this process; the start-up and the error stream also as a user runs them."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import MAX_POSITIONS, NUM_LAYERS, PLANS, make_model, make_tokenizer
from transformers import BertConfig, MambaConfig

from layerskip import (
    DraftPlan,
    Policy,
    Rule,
    SamplingParams,
    SelfSpeculativeLM,
    __version__,
    prompts,
)
from layerskip.cli import main, parser
from layerskip.commands.options import sampling_of
from layerskip.params import Verification
from layerskip.prompts import Example

STATS = {
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_plain_rounds",
    "num_lookup_rounds",
    "num_draft_passes",
    "num_uncovered_tokens",
    "acceptance_rate",
    "mean_accepted_length",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "kv_cache_bytes",
    "positions_through_first_layer",  # beyond the list: what tells one prefill from two
    "num_requests",
}
MODE_KEYS = {
    "tokens_per_second",
    "speedup_vs_plain",
    "speedup_vs_plain_ci95",
    "identical_to_plain",
    "acceptance_rate",
    "mean_accepted_length",
    "kv_cache_bytes",
    "positions_through_first_layer",
}
MODES = ("plain", "layerskip", "hf", "hf-early-exit", "hf-prompt-lookup")
KV_BYTES_PER_TOKEN = 2 * NUM_LAYERS * 2 * 16 * 2  # keys and values, 2 heads of 16, bfloat16
PROMPTS = ["def first(argument):\n", "the rain in Spain stays"]
NEW = 16


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The last line of stdout."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def run(*argv: object) -> Result:
    """``layerskip ARGV`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stopped:
            code = stopped.code
    return Result(code, out.getvalue(), err.getvalue())


def run_apart(*argv: object) -> Result:
    """The same in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "layerskip.cli", *map(str, argv)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *words: str) -> None:
    """One sentence on stderr, nothing on stdout, exit code 2."""
    assert result.code == 2, result
    assert result.err.startswith("layerskip: ")
    assert len(result.err.splitlines()) == 1, result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    for word in words:
        assert word in result.err


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with tokenizer and plan: exit 2, 3 draft tokens."""
    path = tmp_path_factory.mktemp("toy")
    make_model(dtype="bfloat16").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    PLANS["exit"].save(path / "layerskip.json")
    content = json.loads((path / "layerskip.json").read_text("utf-8")) | {"num_draft_tokens": 3}
    (path / "layerskip.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def lm(folder: Path) -> SelfSpeculativeLM:
    return SelfSpeculativeLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def compared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison of all modes on two prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--max-new-tokens", NEW, "--repeats", 1, "--json")
    return run(*argv, "--no-lookup").document


def test_generate_prints_one_document(folder: Path, lm: SelfSpeculativeLM) -> None:
    result = run("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", NEW, "--json")
    document, expected = result.document, lm.generate(PROMPTS[0], max_new_tokens=NEW)
    assert len(result.out.splitlines()) == 1
    assert set(document) == {"text", "token_ids", "finish_reason", "seed", "stats", "metrics"}
    assert document["text"] == expected.text
    assert document["token_ids"] == list(expected.token_ids)
    assert document["finish_reason"] == "length"
    assert document["seed"] is None


def test_generate_stats_have_the_documented_keys(folder: Path, lm: SelfSpeculativeLM) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", NEW, "--json")
    stats, expected = run(*argv).document["stats"], lm.generate(PROMPTS[0], max_new_tokens=NEW)
    assert set(stats) == STATS
    for name in ("new_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens"):
        assert stats[name] == getattr(expected.stats, name) > 0
    assert stats["prompt_tokens"] == len(lm.tokenizer(PROMPTS[0])["input_ids"])
    rate = stats["num_accepted_tokens"] / stats["num_draft_tokens"]
    assert stats["acceptance_rate"] == pytest.approx(rate)
    length = 1 + stats["num_accepted_tokens"] / stats["num_rounds"]
    assert stats["mean_accepted_length"] == pytest.approx(length)
    assert stats["tokens_per_second"] == pytest.approx((NEW - 1) / stats["decode_seconds"])


def test_generate_prints_text_for_people(folder: Path, lm: SelfSpeculativeLM) -> None:
    result = run("generate", folder, "--prompt", PROMPTS[1], "--max-new-tokens", NEW)
    expected = lm.generate(PROMPTS[1], max_new_tokens=NEW)
    assert result.code == 0
    assert result.out.startswith(PROMPTS[1])
    assert f"{NEW} tokens" in result.out
    assert f"{expected.stats.mean_accepted_length:.2f}" in result.out


def test_text_that_looks_like_markup_is_printed_as_it_is(folder: Path) -> None:
    prompt = "x = [red]a[/] + [/bold]"
    result = run("generate", folder, "--prompt", prompt, "--max-new-tokens", 1)
    assert result.code == 0
    assert result.out.startswith(prompt)


@pytest.mark.parametrize("options", [("--num-draft-tokens", 0), ("--exit-layer", 4)])
def test_plan_and_draft_length_change_no_token(folder: Path, options: tuple[Any, ...]) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 24, "--json")
    default, other = run(*argv).document, run(*argv, *options).document
    assert other["token_ids"] == default["token_ids"]
    assert other["stats"]["num_draft_tokens"] != default["stats"]["num_draft_tokens"]


def test_a_plan_file_is_used(folder: Path, tmp_path: Path) -> None:
    PLANS["skipping"].save(tmp_path / "plan.json")
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 24, "--json")
    default, other = run(*argv).document, run(*argv, "--plan", tmp_path / "plan.json").document
    assert other["token_ids"] == default["token_ids"]
    info = run("info", folder, "--plan", tmp_path / "plan.json", "--json").document
    assert info["draft_layers"] == list(PLANS["skipping"].layers)


def test_a_prompt_file_is_read_whole(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("  é\n\nline two\n".encode())
    argv = ("--max-new-tokens", 8, "--json")
    by_file = run("generate", folder, "--prompt-file", path, *argv).document
    by_text = run("generate", folder, "--prompt", "  é\n\nline two\n", *argv).document
    assert by_file["token_ids"] == by_text["token_ids"]
    assert by_file["stats"]["prompt_tokens"] == by_text["stats"]["prompt_tokens"]


def test_chat_goes_through_the_template(folder: Path, lm: SelfSpeculativeLM) -> None:
    document = run("generate", folder, "--chat", "hi", "--max-new-tokens", 8, "--json").document
    expected = lm.generate("user: hi\nassistant: ", max_new_tokens=8)
    assert document["token_ids"] == list(expected.token_ids)


def test_stop_strings_cut_the_text(folder: Path, lm: SelfSpeculativeLM) -> None:
    text = lm.generate(PROMPTS[0], max_new_tokens=24).text
    assert len(text) > 8
    stop = text[5:7]
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 24, "--json")
    document = run(*argv, "--stop", "never in it", "--stop", stop).document
    assert document["finish_reason"] == "stop"
    assert document["text"] == text[: text.index(stop)]
    assert document["stats"]["new_tokens"] == len(document["token_ids"]) < 24


def test_sampling_repeats_with_its_seed(folder: Path, lm: SelfSpeculativeLM) -> None:
    def sampled(*options: object) -> dict[str, Any]:
        settings = ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.01)
        argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", NEW, "--json")
        return run(*argv, *settings, *options).document

    first = sampled("--seed", 3)
    sampling = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=3)
    expected = lm.generate(PROMPTS[0], max_new_tokens=NEW, sampling=sampling)
    assert first["token_ids"] == list(expected.token_ids)
    assert first["seed"] == 3
    assert sampled("--seed", 3, "--num-draft-tokens", 0)["token_ids"] == first["token_ids"]
    assert sampled("--seed", 4)["token_ids"] != first["token_ids"]
    drawn = sampled()
    assert sampled("--seed", drawn["seed"])["token_ids"] == drawn["token_ids"]


def test_rules_are_options(folder: Path, lm: SelfSpeculativeLM) -> None:
    rules = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in rules.items()]
    parsed = parser().parse_args(["generate", "--prompt", "x", *options])
    assert sampling_of(parsed) == SamplingParams(**rules)
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", NEW, "--json")
    expected = lm.generate(PROMPTS[0], max_new_tokens=NEW, sampling=SamplingParams(**rules))
    assert run(*argv, *options).document["token_ids"] == list(expected.token_ids)
    assert run(*argv).document["token_ids"] != list(expected.token_ids)


@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_verification_is_an_option(
    folder: Path, lm: SelfSpeculativeLM, verification: Verification
) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[1], "--max-new-tokens", NEW, "--json")
    options = ("--temperature", 1.2, "--seed", 6, "--verification", verification)
    sampling = SamplingParams(temperature=1.2, seed=6)
    expected = lm.generate(
        PROMPTS[1], max_new_tokens=NEW, sampling=sampling, verification=verification
    )
    assert run(*argv, *options).document["token_ids"] == list(expected.token_ids)


def test_logprobs_are_an_option(folder: Path, lm: SelfSpeculativeLM) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 3, "--logprobs", 2)
    expected = lm.generate(PROMPTS[0], max_new_tokens=3, logprobs=2)
    document = run(*argv, "--json").document
    assert document["logprobs"] == json.loads(json.dumps(expected.to_dict()["logprobs"]))
    shown = run(*argv).out
    for entry in expected.logprobs:
        for token, value in [(entry.token_id, entry.logprob), *entry.top]:
            assert f"{value:.3f} {lm.tokenizer.decode([token])!r}" in shown


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--verification", "greedy", "'coupled', 'token', 'block'"),
        ("--logprobs", "-1", "logprobs must be between 0 and 100, got -1"),
        ("--repetition-penalty", "0", "repetition_penalty must be"),
        ("--presence-penalty", "3", "presence_penalty must be"),
        ("--frequency-penalty", "nan", "frequency_penalty must be"),
        ("--no-repeat-ngram-size", "-2", "no_repeat_ngram_size must be at least 0, got -2"),
        ("--min-new-tokens", "1.5", "--min-new-tokens"),
    ],
)
def test_bad_rules_are_refused(folder: Path, option: str, value: str, words: str) -> None:
    assert_refused(run("generate", folder, "--prompt", "x", f"{option}={value}"), words)


def test_builtin_is_the_default_model() -> None:
    argv = ("generate", "--prompt", "import os\n", "--max-new-tokens", 8, "--json")
    document = run(*argv).document
    assert len(document["token_ids"]) == 8
    assert document["text"] == run("generate", "builtin", *argv[1:]).document["text"]


def test_compare_prints_the_documented_keys(compared: dict[str, Any], folder: Path) -> None:
    documented = {"model", "prompts", "new_tokens", "repeated_8gram_share", "modes", "theory"}
    assert documented <= set(compared)
    assert compared["model"] == str(folder)
    assert compared["prompts"] == len(PROMPTS)
    assert compared["new_tokens"] == NEW * len(PROMPTS)
    assert 0.0 <= compared["repeated_8gram_share"] <= 1.0
    assert tuple(compared["modes"]) == MODES
    assert all(set(row) >= MODE_KEYS for row in compared["modes"].values())


def test_compare_finds_every_mode_of_ours_identical(compared: dict[str, Any]) -> None:
    modes = compared["modes"]
    assert modes["plain"]["identical_to_plain"] == modes["layerskip"]["identical_to_plain"] == 1.0
    assert modes["plain"]["speedup_vs_plain"] == 1.0
    for row in modes.values():
        low, high = row["speedup_vs_plain_ci95"]
        assert 0 < low <= row["speedup_vs_plain"] <= high
        assert row["tokens_per_second"] > 0


def test_compare_predicts_from_what_it_measured(compared: dict[str, Any]) -> None:
    theory, ours = compared["theory"], compared["modes"]["layerskip"]
    assert 0 < theory["c"] < 1
    assert theory["v"] > 0
    rounds = len(PROMPTS) * (NEW - 1) / ours["mean_accepted_length"]
    accepted = len(PROMPTS) * (NEW - 1) - rounds
    k = accepted / ours["acceptance_rate"] / rounds
    expected = ours["mean_accepted_length"] / (k * theory["c"] + theory["v"])
    assert theory["speedup"] == pytest.approx(expected)


def test_compare_counts_positions_and_bytes(
    compared: dict[str, Any], lm: SelfSpeculativeLM
) -> None:
    modes, prompt_tokens = compared["modes"], [len(lm.tokenizer(p)["input_ids"]) for p in PROMPTS]
    fewest = sum(prompt_tokens) + len(PROMPTS) * (NEW - 1)
    outputs = [lm.generate(p, max_new_tokens=NEW).stats for p in PROMPTS]
    rejected = sum(s.num_draft_tokens - s.num_accepted_tokens for s in outputs)
    positions = {name: row["positions_through_first_layer"] for name, row in modes.items()}
    assert positions["plain"] == positions["hf"] == fewest
    assert positions["layerskip"] == fewest + rejected
    assert positions["hf-early-exit"] >= fewest + sum(prompt_tokens)  # the prompts twice
    sizes = {name: row["kv_cache_bytes"] for name, row in modes.items()}
    assert sizes["hf"] == (max(prompt_tokens) + NEW - 1) * KV_BYTES_PER_TOKEN
    slots = sizes["layerskip"] / KV_BYTES_PER_TOKEN  # in whole blocks, none for a second cache
    assert max(prompt_tokens) + NEW <= slots <= 512
    assert sizes["plain"] == sizes["layerskip"]
    assert sizes["hf-early-exit"] > sizes["hf"]  # a second cache


def test_compare_runs_the_modes_it_is_given() -> None:
    argv = ("compare", "--modes", "layerskip", "--limit", 1, "--max-new-tokens", 8, "--repeats", 1)
    document = run(*argv, "--temperature", 0.8, "--json").document
    assert tuple(document["modes"]) == ("plain", "layerskip")
    assert document["temperature"] == 0.8
    assert document["modes"]["layerskip"]["identical_to_plain"] == 1.0


def test_compare_prints_a_table_for_people(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n", encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--max-new-tokens", 8, "--repeats", 1)
    result = run(*argv, "--modes", "layerskip")
    assert result.code == 0
    assert "vs plain" in result.out
    assert "theory" in result.out


def test_demo_decodes_as_much_as_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_code(modules: object, limit: int) -> list[Example]:
        return [Example(prompt) for prompt in PROMPTS[:limit]]

    monkeypatch.setattr(prompts, "held_out_code", short_code)
    document = run("demo", folder, "--limit", 1, "--max-new-tokens", 4, "--json").document
    assert (document["prompts"], document["new_tokens"]) == (1, 4)
    assert set(document["modes"]) == {"plain", "layerskip", "hf", "hf-early-exit"}
    assert document["modes"]["layerskip"]["identical_to_plain"] == 1.0


@pytest.mark.parametrize("option", ["--limit", "--max-new-tokens"])
def test_a_demo_of_nothing(option: str) -> None:
    assert_refused(run("demo", option, 0), f"{option} must be at least 1, got 0")


def test_teacher_forced_prints_acceptance_by_exit() -> None:
    argv = ("compare", "--teacher-forced", "--limit", 2, "--max-new-tokens", 32, "--json")
    document = run(*argv).document
    assert document["model"] == "builtin"
    assert 30 < document["positions"] <= 64
    assert list(document["exits"]) == [str(e) for e in range(1, 9)]
    for row in document["exits"].values():
        assert 0.0 < row["acceptance_rate"] <= 1.0
        assert 0.0 < row["overlap"] <= 1.0


def test_info_says_what_the_checkpoint_is(folder: Path, lm: SelfSpeculativeLM) -> None:
    document = run("info", folder, "--json").document
    expected = {
        "model": str(folder),
        "supported": True,
        "architecture": "llama",
        "num_layers": NUM_LAYERS,
        "exit_layers": f"1 to {NUM_LAYERS - 1}",
        "draft_layers": [0, 1],
        "shared_depth": 2,
        "num_draft_tokens": 3,
        "max_positions": MAX_POSITIONS,
        "dtype": "bfloat16",
        "kv_cache_bytes_per_token": KV_BYTES_PER_TOKEN,
        "exactness": lm.exactness,
        "bit_identical": True,
        "version": __version__,
    }
    assert expected.items() <= document.items()
    assert document["parameters"] == sum(p.numel() for p in make_model().parameters())
    assert document["stack"].startswith("general: on a CPU")
    assert "compile" in document["kernels"]
    assert "num layers" in run("info", folder).out
    free = run("info", folder, "--no-exact", "--json").document
    assert (free["bit_identical"], "exact=False" in free["exactness"]) == (False, True)


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
    assert_refused(result, exit_layer)


@pytest.mark.parametrize("exit_layer", [0, 16])
def test_an_exit_layer_the_builtin_checkpoint_lacks(exit_layer: int) -> None:
    result = run("generate", f"--exit-layer={exit_layer}", "--prompt", "x")
    assert_refused(result, f"exit_layer must be between 1 and 15, got {exit_layer}")


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
        ("--max-new-tokens", 0),
        ("--max-new-tokens", "many"),
        ("--num-draft-tokens", -1),
        ("--num-draft-tokens", 33),
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--top-p", 0),
        ("--min-p", 2),
        ("--stop", ""),
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


@pytest.mark.parametrize("argv", [(), ("fly",), ("generate",)])
def test_a_command_line_that_is_none(argv: tuple[str, ...]) -> None:
    assert_refused(run(*argv))


def test_compare_with_an_unknown_mode(folder: Path) -> None:
    assert_refused(run("compare", folder, "--modes", "plain,warp"), "warp", "hf-early-exit")


@pytest.mark.parametrize(
    "options", [("--repeats", 0), ("--limit", 0), ("--max-new-tokens", 0)], ids=str
)
def test_compare_with_nothing_to_do(options: tuple[Any, ...]) -> None:
    result = run("compare", "--modes", "plain", *options)
    assert_refused(result, options[0].strip("-").replace("-", "_").split("_")[-1])


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


def test_compare_says_how_many_prompts_are_too_long(folder: Path, bad: Path) -> None:
    path = bad / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in (PROMPTS[0], "q" * MAX_POSITIONS)]
    path.write_text("\n".join(lines), encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--modes", "plain", "--repeats", 1)
    result = run(*argv, "--max-new-tokens", 4, "--json")
    assert (result.document["prompts"], result.document["prompts_too_long"]) == (1, 1)
    said = " ".join(run(*argv, "--max-new-tokens", 4).out.split())
    assert "1 of 2 prompts left out: they leave no room for 4 new tokens" in said


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


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("--version",),
        ("generate", "--help"),
        ("completion", "bash"),
        ("compare", "--limit", "x"),
    ],
    ids=" ".join,
)
def test_what_computes_nothing_loads_nothing_heavy(argv: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        "from layerskip.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.code == 0
    for command in ("generate", "compare", "demo", "info", "profile", "search", "completion"):
        assert re.search(rf"^    {command}\s", result.out, re.MULTILINE)


def test_version() -> None:
    result = run("--version")
    assert (result.code, result.out) == (0, f"layerskip {__version__}\n")


def test_a_process_prints_the_document_last(folder: Path, lm: SelfSpeculativeLM) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 8, "--json")
    expected = lm.generate(PROMPTS[0], max_new_tokens=8)
    assert run_apart(*argv).document["token_ids"] == list(expected.token_ids)


def test_a_process_says_one_sentence(bad: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(bad)  # and no plan: that is no second sentence
    assert_refused(run_apart("generate", bad, "--prompt", "x"), "model.norm.weight")


def test_generate_keeps_to_a_grammar(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}', "utf-8")
    rules = tmp_path / "rules.gbnf"
    rules.write_text('root ::= "(" [ab] ")"', "utf-8")
    for option, allowed in (
        (("--json-schema", schema), ('{"a": 1}', '{"a": 22}')),
        (("--ebnf", rules), ("(a)", "(b)")),
        (("--regex", "[ab]c"), ("ac", "bc")),
        (("--choice", "yes", "--choice", "no"), ("yes", "no")),
    ):
        document = run("generate", folder, "--prompt", PROMPTS[0], *option, "--json").document
        assert document["text"] in allowed
        assert document["finish_reason"] == "stop"


def test_a_bad_grammar_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"uniqueItems": true}', "utf-8")
    argv = ("generate", folder, "--prompt", "x")
    assert_refused(run(*argv, "--json-schema", schema), "'uniqueItems' at /uniqueItems")
    assert_refused(run(*argv, "--json-schema", tmp_path / "none"), "cannot be read")
    assert_refused(run(*argv, "--grammar-after", "x"), "needs a grammar")
    assert_refused(run(*argv, "--regex", "a", "--choice", "b"), "not allowed with")


def test_generate_follows_a_policy(folder: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    Policy((Rule("code", (0, None), 0),), "task").save(policy)
    argv = ("generate", folder, "--prompt", PROMPTS[0], "--policy", policy, "--max-new-tokens", 12)
    document = run(*argv, "--task", "code", "--json").document
    assert document["stats"]["num_draft_tokens"] == 0
    assert document["metrics"]["speculative_decoding"]["mode"] == "plain"
    argv = argv[:2]
    assert_refused(run(*argv, "--prompt", "x", "--task", "code"), "--task is for a policy")
    Policy().save(policy)
    assert_refused(
        run(*argv, "--prompt", "x", "--policy", policy, "--task", "code"), "knows no tasks"
    )
    policy.write_text("[]")
    assert_refused(run(*argv, "--prompt", "x", "--policy", policy), "is not a policy")


def test_a_number_of_draft_tokens_that_is_none_is_said_as_such():
    got = run("generate", "--num-draft-tokens", "many", "--prompt", "a")
    assert got.code == 2
    assert "must be a number or 'auto', got 'many'" in got.err
