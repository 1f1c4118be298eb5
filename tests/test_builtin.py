"""The checkpoint inside the package: an ordinary folder, with a card that tells the truth."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import PLANS, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM
from layerskip.checkpoint import builtin_folder, held_out_modules, known_plan
from layerskip.exactness import emulates
from layerskip.prompts import held_out_code
from layerskip.teacher_forced import teacher_forced

FOLDER = builtin_folder()
CARD: dict[str, Any] = json.loads((FOLDER / "layerskip.json").read_text(encoding="utf-8"))
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
EXAMPLES = held_out_code(held_out_modules(), 16)


def load(dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def processor() -> Iterator[None]:
    """The checkpoint as people have it on this machine; other tests leave emulation out."""
    with mock.patch("layerskip.exactness.emulates", emulates):
        yield


@pytest.fixture(scope="module")
def builtin() -> SelfSpeculativeLM:
    return SelfSpeculativeLM.from_pretrained()


@pytest.fixture(scope="module")
def in_float32() -> SelfSpeculativeLM:
    """Quick enough on every processor."""
    return SelfSpeculativeLM.from_pretrained(dtype="float32")


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    """The recipe's module, from the checkout."""
    path = Path(__file__).parents[1] / "recipes" / "corpus.py"
    spec = importlib.util.spec_from_file_location("corpus_of_the_recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folder_is_small_and_whole() -> None:
    files = [p for p in FOLDER.iterdir() if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 36e6
    assert {"README.md", "config.json", "generation_config.json", "tokenizer.json"} <= {
        p.name for p in files
    }
    assert len(list(FOLDER.glob("model-*.safetensors"))) > 1


def test_transformers_loads_it_as_it_is() -> None:
    model, info = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values()), info
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.model_type == "llama"
    assert model.config.num_hidden_layers == 16
    assert model.config.max_position_embeddings >= 1024
    assert 16e6 <= sum(p.numel() for p in model.parameters()) <= 20e6
    assert len(TOKENIZER) == model.config.vocab_size <= 5000
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id


@given(st.text())
def test_the_tokenizer_loses_nothing(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < len(TOKENIZER) for i in ids)


@pytest.mark.parametrize(
    "text",
    [
        "\u2028\x00\r\n\t  x",
        "😀\U0001d54f é\u0301",
        "def f():\n\n\n        return  1234567\n",
        " " * 99,
    ],
)
def test_the_tokenizer_loses_nothing_hard(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_the_plan_is_beside_the_weights(builtin: SelfSpeculativeLM) -> None:
    known = known_plan(FOLDER)
    assert known.plan == DraftPlan.load(FOLDER / "layerskip.json") == builtin.plan
    assert known.plan.num_layers == 16
    assert known.num_draft_tokens == builtin.num_draft_tokens == "auto"
    assert builtin.trained_exits == (1, 2, 3, 4)


def test_a_folder_without_a_plan_has_none(tmp_path: Path) -> None:
    assert known_plan(tmp_path) is None


@pytest.mark.parametrize("wanted", ['"4"', "-1", "2.5"])
def test_a_draft_length_that_is_none_is_named_with_its_file(tmp_path: Path, wanted: str) -> None:
    make_model().save_pretrained(tmp_path)
    PLANS["exit"].save(tmp_path / "layerskip.json")
    content = (tmp_path / "layerskip.json").read_text(encoding="utf-8")
    content = content.replace("}", f', "num_draft_tokens": {wanted}}}')
    (tmp_path / "layerskip.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"layerskip\.json.*num_draft_tokens"):
        SelfSpeculativeLM.from_pretrained(tmp_path)


def test_questions_are_read_as_prompts_are(corpus: ModuleType, tmp_path: Path) -> None:
    path, row = tmp_path / "q.jsonl", b'{"question": "a", "answer": "b"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + row + b"  \n" + row)
    assert corpus.read_questions(path) == ["Question: a\nAnswer: b"] * 2
    path.write_bytes(row + b"\xff\n")
    with pytest.raises(ValueError, match=rf"q\.jsonl is not UTF-8 \(byte {len(row)}\)"):
        corpus.read_questions(path)


def test_held_out_modules_are_held_out_by_their_hash(corpus: ModuleType) -> None:
    modules = held_out_modules()
    assert len(modules) >= 20
    assert all(corpus.is_held_out(name) for name in modules)
    here = [name for name, _ in corpus.stdlib_files() if corpus.is_held_out(name)]
    # Another Python has a few other modules; none that it holds out was trained on here.
    assert len(set(here) & set(modules)) >= 0.7 * len(here)


def test_the_card_lists_what_was_held_out() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in card for name in held_out_modules())
    assert "What it cannot do" in card


def test_float32_tokens_are_those_of_transformers(in_float32: SelfSpeculativeLM) -> None:
    model = load(torch.float32)
    for example in EXAMPLES[:2]:
        prompt = torch.tensor([TOKENIZER(example.prompt)["input_ids"]])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
        expected = tuple(out[0, prompt.shape[1] :].tolist())
        assert in_float32.generate(example.prompt, max_new_tokens=40).token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", [e.prompt for e in EXAMPLES[2:4]], ids=["one", "two"])
@pytest.mark.one_in(2)
def test_speculation_changes_no_token(
    builtin: SelfSpeculativeLM, prompt: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    # Whether "auto" drafts hangs on the clock, which other processes may disturb.
    plain, ours, automatic = (
        builtin.generate(prompt, max_new_tokens=64, num_draft_tokens=k, sampling=sampling)
        for k in (0, 4, None)
    )
    assert ours.token_ids == automatic.token_ids == plain.token_ids
    assert ours.stats.num_rounds < plain.stats.num_rounds
    assert ours.stats.num_accepted_tokens > 0 == plain.stats.num_draft_tokens


def test_the_scores_on_the_card_are_what_it_does(in_float32: SelfSpeculativeLM) -> None:
    exits = [1, 2, 3, 4]
    document = teacher_forced(
        in_float32, EXAMPLES, sampling=SamplingParams(), exits=exits, max_new_tokens=128
    )
    assert document["positions"] > 1000
    for e in exits:
        row, scores = document["exits"][e], CARD["scores"]
        assert row["acceptance_rate"] == pytest.approx(scores[f"code_agreement_{e}"], abs=0.1)
        assert row["overlap"] == pytest.approx(scores[f"code_overlap_{e}"], abs=0.1)


def test_exits_agree_enough_to_draft() -> None:
    scores = CARD["scores"]
    rates = [scores[f"code_agreement_{e}"] for e in (1, 2, 3, 4)]
    assert rates[1] > 0.6
    assert all(0.4 < rate < 1.0 for rate in rates)
    assert rates[3] > rates[0]
    assert scores["code_bits_per_byte"] < 2.0


@pytest.mark.parametrize("damage", ["truncated", "missing tensor", "other shape"])
def test_weights_that_are_not_all_there_are_refused(tmp_path: Path, damage: str) -> None:
    model = make_model()
    state = model.state_dict()
    if damage == "missing tensor":  # transformers would put random numbers in its place
        del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "other shape":
        content = json.loads(config.read_text(encoding="utf-8")) | {"intermediate_size": 96}
        config.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^model '.*' cannot be loaded: .*\S$") as error:
        SelfSpeculativeLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
