"""The command line, in this process; the start-up and the error stream also as a user runs them."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from command_line import assert_refused, run, run_apart
from optional import needed
from rich.console import Console
from toys import MAX_POSITIONS, NUM_LAYERS, PLANS, VOCAB_SIZE, make_model, make_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from layerskip import (
    DraftPlan,
    PlanFile,
    Policy,
    Rule,
    SamplingParams,
    SelfSpeculativeLM,
    __version__,
    prompts,
)
from layerskip.cli import main, parser
from layerskip.commands.facts import _facts_table
from layerskip.commands.options import print_round, sampling_of
from layerskip.hf_modes import EarlyExitSettings
from layerskip.params import Verification
from layerskip.prompts import Example
from layerskip.telemetry.measure import _pieces
from layerskip.text import TextStream

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


@pytest.fixture(scope="session")
def lm(folder: Path) -> SelfSpeculativeLM:
    return SelfSpeculativeLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def compared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison of all modes on two prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--max-new-tokens", NEW, "--repeats", 1, "--json")
    with few_settings():
        return run(*argv, "--no-lookup").document


def few_settings() -> AbstractContextManager[object]:
    """Transformers' early exit is tuned on two settings; test_compare.py sees all of them tried."""
    tried = [EarlyExitSettings(2, 2, 0.0), EarlyExitSettings(2, 4, 0.4)]
    return mock.patch("layerskip.compare.settings_to_try", return_value=tried)


def test_generate_prints_one_document(folder: Path, lm: SelfSpeculativeLM) -> None:
    result = run("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", NEW, "--json")
    document, expected = result.document, lm.generate(PROMPTS[0], max_new_tokens=NEW)
    assert len(result.out.splitlines()) == 1
    assert set(document) == {"text", "token_ids", "finish_reason", "seed", "stats", "metrics"}
    assert document["text"] == expected.text
    assert document["token_ids"] == list(expected.token_ids)
    assert document["finish_reason"] == "length"
    assert document["seed"] is None


def test_a_terminal_of_no_known_width_shows_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("generate", folder, "--prompt", "the rain", "--max-new-tokens", 3)
    monkeypatch.setenv("COLUMNS", "0")
    assert "the rain" in run(*argv).out


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


def test_generate_has_no_rate_of_drafts_that_were_not_made(folder: Path) -> None:
    argv = ("generate", folder, "--prompt", PROMPTS[1], "--max-new-tokens", NEW)
    plain = run(*argv, "--num-draft-tokens", 0)
    assert "nothing drafted, finished" in plain.out
    assert "rate" not in plain.out
    assert "nothing drafted" not in run(*argv, "--num-draft-tokens", 4).out


def test_text_that_the_terminal_cannot_show_is_spelt_out(folder: Path) -> None:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")) as out:
        code = main(["generate", str(folder), "--prompt", "é", "--max-new-tokens", "1"])
        out.flush()
    assert code == 0
    assert out.buffer.getvalue().startswith(rb"\xe9")


def test_text_that_looks_like_markup_is_printed_as_it_is(folder: Path) -> None:
    prompt = "x = [red]a[/] + [/bold]\t:smile: " + "long " * 30 + "\\"
    result = run("generate", folder, "--prompt", prompt, "--max-new-tokens", 1)
    assert result.code == 0
    assert result.out.startswith(prompt)
    console = Console(file=io.StringIO())
    console.print(_facts_table({"model": "m[final]/x[/]"}))
    assert "m[final]/x[/]" in console.file.getvalue()


class Letters:
    """Tokens are single characters."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(map(chr, token_ids))


def test_tokens_are_printed_as_the_model_wrote_them() -> None:
    text = 'r"\\d+\\s*\\(":100:\t[b] ' + "long " * 9 + "\\"
    record = SimpleNamespace(
        token_ids=tuple(map(ord, text)), origins=("accepted",) * len(text), finish_reason="length"
    )
    console = Console(file=io.StringIO(), width=20)
    print_round(console, TextStream(Letters(), ()), record)
    assert console.file.getvalue() == text


def test_an_end_of_sequence_is_no_text_whatever_its_tokenizer_writes() -> None:
    record = SimpleNamespace(
        token_ids=(65, 66, 10), origins=("plain", "accepted", "bonus"), finish_reason="stop"
    )
    console = Console(file=io.StringIO(), width=20)
    print_round(console, TextStream(Letters(), ()), record, frozenset({10}))
    assert console.file.getvalue() == "AB"
    found = _pieces(Letters(), SimpleNamespace(rounds=[record]), frozenset({10}))
    assert found == [{"text": "A", "origin": "plain"}, {"text": "B", "origin": "accepted"}]


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
    argv = ("generate", "--prompt", "import os\n", "--max-new-tokens", "8", "--json")
    assert len(run(*argv).document["token_ids"]) == 8
    parsed = [parser().parse_args(list(a)) for a in (argv, ("generate", "builtin", *argv[1:]))]
    assert parsed[0] == parsed[1]


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


def test_compare_runs_the_modes_it_is_given(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), "utf-8")
    argv = ("compare", folder, "--prompts", path, "--modes", "layerskip", "--limit", 1)
    settings = ("--max-new-tokens", 8, "--repeats", 1, "--temperature", 0.8)
    document = run(*argv, *settings, "--json").document
    assert document["prompts"] == 1
    assert tuple(document["modes"]) == ("plain", "layerskip")
    assert document["temperature"] == 0.8
    assert document["modes"]["layerskip"]["identical_to_plain"] == 1.0


def test_compare_prints_a_table_for_people(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n", encoding="utf-8")
    argv = ("compare", folder, "--prompts", path, "--max-new-tokens", 8, "--repeats", 1)
    result = run(*argv, "--modes", "plain, layerskip")
    assert result.code == 0
    assert "vs plain" in result.out
    assert "theory" in result.out


def test_demo_decodes_as_much_as_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_code(modules: object, limit: int) -> list[Example]:
        return [Example(prompt) for prompt in PROMPTS[:limit]]

    monkeypatch.setattr(prompts, "held_out_code", short_code)
    with few_settings():
        document = run("demo", folder, "--limit", 1, "--max-new-tokens", 4, "--json").document
    assert (document["prompts"], document["new_tokens"]) == (1, 4)
    assert set(document["modes"]) == {"plain", "layerskip", "hf", "hf-early-exit"}
    assert document["modes"]["layerskip"]["identical_to_plain"] == 1.0


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A checkpoint of a family that transformers cannot leave early, with learned positions."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_compare_leaves_out_what_transformers_cannot_run(gpt2: Path) -> None:
    path = gpt2 / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab" * n}) + "\n" for n in (9, 28)), "utf-8")
    argv = ("compare", gpt2, "--prompts", path, "--max-new-tokens", 4, "--num-draft-tokens", 0)
    result = run(*argv, "--repeats", 1, "--json")
    assert set(result.document["modes"]) == {"plain", "layerskip", "hf", "hf-prompt-lookup"}
    reason = "transformers' early exit does not run on gpt2"
    assert result.document["unsupported"] == {"hf-early-exit": reason}
    assert f"hf-early-exit left out: {reason}" in result.err
    # Transformers looks up beyond the last position.
    assert result.document["prompts_too_long"] == 1
    assert "4 new tokens and 10 that transformers looks up" in " ".join(result.err.split())
    result = run(*argv, "--modes", "hf-early-exit", "--limit", 1)
    assert (result.code, result.err) == (2, f"layerskip: {reason}: leave out hf-early-exit\n")


def test_demo_leaves_out_prompts_that_are_too_long(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "held_out_code", lambda *_: [Example("ab" * n) for n in (9, 31)])
    argv = ("demo", gpt2, "--num-draft-tokens", 0, "--max-new-tokens", 4, "--json")
    document = run(*argv).document
    assert (document["prompts"], document["prompts_too_long"]) == (1, 1)
    assert set(document["modes"]) == {"plain", "layerskip", "hf"}


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


def test_teacher_forced_reads_the_exit_it_is_given(folder: Path, tmp_path: Path) -> None:
    path, follows = tmp_path / "prompts.jsonl", "return the argument and more of it"
    lines = [
        {"prompt": PROMPTS[0], "continuation": follows},
        {"prompt": PROMPTS[0]},
        {"prompt": "q" * MAX_POSITIONS, "continuation": follows},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    argv = ("compare", folder, "--teacher-forced", "--prompts", path, "--max-new-tokens", 4)
    document = run(*argv, "--exit-layer", 4, "--json").document
    assert list(document["exits"]) == ["4"]
    counts = ("prompts", "prompts_left_out", "prompts_too_long", "positions")
    assert [document[name] for name in counts] == [1, 1, 1, 4]
    assert "1 of 3 prompts left out" in " ".join(run(*argv).out.split())


def test_teacher_forced_measures_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: object, **more: object) -> None:
        raise AssertionError("nothing is drafted, and costs are measured")

    monkeypatch.setattr("layerskip.api.fitting_cost", measured)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPTS[0], "continuation": "return it"}))
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    PLANS["exit"].save(tmp_path / "layerskip.json")  # with no number: automatic
    argv = ("compare", tmp_path, "--teacher-forced", "--prompts", path, "--max-new-tokens", 4)
    assert run(*argv).code == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("compare", "--modes", "layerskip", "--repeats", 1), True),
        (("compare", "--modes", "plain", "--repeats", 1, "--num-draft-tokens", 0), False),
        (("ab",), True),
        (("ab", "--b", 0), False),
    ],
)
def test_commands_that_time_drafts_say_if_no_plan_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, argv: tuple[object, ...], says: bool
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    done = run(*argv, tmp_path / "model", "--prompts", path, "--max-new-tokens", 4)
    assert done.code == 0, done.err
    assert caplog.text.count("no draft plan is known") == says


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


def test_generate_keeps_to_a_grammar(folder: Path, tmp_path: Path) -> None:
    needed("xgrammar")
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
    named = run(*argv, "--task", "code", "--num-draft-tokens", 3, "--json").document
    assert named["stats"]["num_draft_tokens"] > 0
    argv = ("generate", tmp_path / "gone")  # refused before a model is looked for
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


def test_info_of_a_model_of_one_layer_names_no_exit(tmp_path: Path) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    result = run("info", tmp_path, "--num-draft-tokens", 0, "--json")
    assert result.document["exit_layers"] == "none"


def test_info_of_a_given_exit_knows_the_trained_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained(tmp_path)
    PlanFile(PLANS["exit"], measurements={"trained_exits": [1, 2]}).save(
        tmp_path / "layerskip.json"
    )
    DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=3).save("plan[b].json")
    drafts = ("--num-draft-tokens", 0, "--json")
    for given in (("--exit-layer", 3), ("--plan", "plan[b].json")):
        result = run("info", tmp_path, *given, *drafts)
        assert result.document["trained_exits"] == [1, 2]
        assert result.document["draft_layers"] == [0, 1, 2]
    assert "plan[b].json" in result.err
