"""Each mistake gets one clear sentence, and leaves nothing behind."""

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from snapshots import check_untouched, snapshot
from toys import MAX_POSITIONS, PLANS, VOCAB_SIZE, make_model, make_tokenizer
from transformers import PreTrainedModel

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM
from layerskip.params import SHARPNESS

CHAT = [{"role": "user", "content": "hi"}]

PROMPTS = [
    ("", ValueError, "the prompt is empty; give at least one token"),
    ([[]], ValueError, "the prompt is empty; give at least one token"),
    ([], ValueError, "prompts must be text, token ids or a list of them, got []"),
    (None, ValueError, "give either prompts or messages"),
    (
        [3] * MAX_POSITIONS,
        ValueError,
        "the prompt has 600 tokens; the model has 600 positions, and at least one must be left to",
    ),
    ([1, VOCAB_SIZE], ValueError, "a token id must be between 0 and 330, got 331"),
    ([True], TypeError, "a token id must be an int, got True (bool)"),
    (
        torch.tensor([[1, 2], [3, 4]]),
        ValueError,
        "an array of token ids has one dimension, got shape (2, 2); give a list of them, such as",
    ),
    (
        np.zeros((1, 0), dtype=np.int64),
        ValueError,
        "an array of token ids has one dimension, got shape (1, 0); give a list of them, such as",
    ),
    (torch.tensor([1.0]), TypeError, "a token id must be an int, got 1.0 (float)"),
    (b"abc", TypeError, "a prompt must be text or a list of token ids, got b'abc'"),
    ([b"abc"], TypeError, "a prompt must be text or a list of token ids, got b'abc'"),
    (["a", 3], TypeError, "a prompt must be text or a list of token ids, got 3"),
    ([None], TypeError, "a prompt must be text or a list of token ids, got None"),
    ([{}], TypeError, "a prompt must be text or a list of token ids, got {}"),
    (
        "a\ud800",
        ValueError,
        "the prompt is not valid Unicode: 'utf-8' codec can't encode character '\\ud800' in positi",
    ),
]
CHATS = [
    ([], ValueError, "messages must be a list of one or more, got []"),
    ("hi", ValueError, "messages must be a list of one or more, got 'hi'"),
    (CHAT[0], ValueError, f"messages must be a list of one or more, got {CHAT[0]}"),
    (["hi"], TypeError, "a message must be a mapping with a role, got 'hi'"),
    ([{"content": "hi"}], TypeError, "a message must be a mapping with a role, got {'conte"),
]
WHOLE = {"version": 1, "num_layers": 6, "draft_layers": [0]}
FILES = [
    ('{"version": 2, "draft_depth": 3}', "is not a plan file (it has no 'draft_layers')"),
    (
        '{"version": 3, "num_layers": 6, "draft_layers": [0]}',
        "has plan version 3; this layerskip reads versions 1 and 2",
    ),
    ('{"version": "x"}', "has plan version x; this layerskip reads versions 1 and 2"),
    ('{"version": true, "num_layers": 6, "draft_layers": [0]}', "has plan version True; this lay"),
    ('{"num_layers": 6, "draft_layers": [0]}', "is not a plan file (it has no version)"),
    ('{"version": 2, "row_quantum": 8}', "is a cost table, not a plan file, as layerskip search"),
    (
        '{"version": 1, "num_layers": 6, "draft_layers": "ab"}',
        "is not a plan file (layers must be a tuple of ints, got 'ab')",
    ),
    (
        '{"version": 1, "num_layers": 6, "draft_layers": 4}',
        "is not a plan file (layers must be a tuple of ints, got 4)",
    ),
    (
        '{"version": 1, "num_layers": 6, "draft_layers": [0], "acceptance": 0.8}',
        "is not a plan file (acceptance must be a tuple of shares, got 0.8)",
    ),
    (
        json.dumps(WHOLE | {"sharpness": SHARPNESS, "calibration": {"greedy": 0.8}}),
        "is not a plan file (a calibration must be a tuple of pairs of numbers, got 0.8)",
    ),
    (
        '{"version": 1, "num_layers": 6, "draft_layers": [9]}',
        "is not a plan file (a draft layer must be between 0 and 5, got 9)",
    ),
    ("[" * 100_000, "is not a plan file (maximum recursion depth exceeded"),
]


def check_sentence(call, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("prompt", "error", "sentence"), PROMPTS)
def test_prompts(toy, talking, prompt, error, sentence):
    before, batch = snapshot(toy()), talking.open_batch()
    check_sentence(lambda: talking.generate(prompt), error, sentence)
    for call in (talking.stream, batch.add):
        with pytest.raises((TypeError, ValueError)):  # also "takes one prompt"
            call(prompt)
    assert batch.unfinished == []
    check_untouched(toy(), before)


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], [torch.tensor([1])], ("a",)])
def test_a_stream_of_several_prompts(talking, prompts):
    sentence = "stream takes one prompt; use generate or open_batch for several"
    check_sentence(lambda: talking.stream(prompts), TypeError, sentence)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "prompts must be text, token ids or a list of them, got []"),
        ([1.5], "a prompt must be text or a list of token ids, got 1.5"),
        ({"a": 1}, "prompts must be text, token ids or a list of them, got {'a': 1}"),
    ],
)
def test_a_stream_of_no_prompt(talking, prompt, sentence):
    check_sentence(lambda: talking.stream(prompt), (TypeError, ValueError), sentence)


@pytest.mark.parametrize("labels", [{"task": "a\ud83d"}, {"\udc00": "a"}])
def test_labels_that_no_page_of_metrics_can_hold(talking, labels):
    with pytest.raises(ValueError, match="labels must be valid Unicode, got half of a surrogate"):
        talking.generate("a", max_new_tokens=1, labels=labels)


@pytest.mark.parametrize("labels", [[], "", 0, ["x"]])
def test_labels(talking, labels):
    with pytest.raises(TypeError, match="labels must map"):
        talking.generate("a", max_new_tokens=1, labels=labels)


@pytest.mark.parametrize(("messages", "error", "sentence"), CHATS)
def test_chats(talking, messages, error, sentence):
    check_sentence(lambda: talking.generate(messages=messages), error, sentence)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only assistants speak') }}", "only assistants speak"),
        ("{{ broken", "unexpected end of template"),
        ("{{ 'a' + 3 }}", "can only concatenate str"),
    ],
)
def test_chats_that_the_template_refuses(toy, template, reason):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    lm = SelfSpeculativeLM(toy(), tokenizer)
    sentence = f"the chat template does not take these messages: {reason}"
    check_sentence(lambda: lm.generate(messages=CHAT), ValueError, sentence)


def test_the_smallest_settings_leave_the_likeliest_token(talking):
    greedy = talking.generate("a", max_new_tokens=8).token_ids
    for params in ({"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-6}):
        sampled = talking.generate("a", max_new_tokens=8, sampling=SamplingParams(seed=1, **params))
        assert sampled.token_ids == greedy


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_checkpoint_that_needs_another_package(tmp_path, toy):
    toy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": "int8_weight_only"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_sentence(
        lambda: SelfSpeculativeLM.from_pretrained(tmp_path),
        ValueError,
        f"model {str(tmp_path)!r} cannot be loaded: ",
    )


@pytest.mark.parametrize(("content", "sentence"), FILES)
def test_plan_files(tmp_path, toy, content, sentence):
    path = tmp_path / "layerskip.json"
    path.write_text(content)
    check_sentence(lambda: DraftPlan.load(path), ValueError, f"{path} {sentence}")
    toy().config.save_pretrained(tmp_path)
    check_sentence(
        lambda: SelfSpeculativeLM.from_pretrained(tmp_path), ValueError, f"{path} {sentence}"
    )


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: DraftPlan.skipping(num_layers=6, skipped=3),
            TypeError,
            "skipped must be a list of layer indices, got 3",
        ),
        (
            lambda: DraftPlan.skipping(num_layers="6", skipped=[3]),
            TypeError,
            "num_layers must be an int, got '6' (str)",
        ),
        (
            lambda: DraftPlan.exiting(num_layers=1, exit_layer=1),
            ValueError,
            "num_layers must be at least 2, got 1",
        ),
    ],
)
def test_plans(call, error, sentence):
    check_sentence(call, error, sentence)


@pytest.mark.parametrize("row", [[0], True, 0.0, None, "0"])
def test_rows_are_named_by_their_number(talking, row):
    batch = talking.open_batch()
    rows = [batch.add("a"), batch.add("b")]
    check_sentence(lambda: batch.remove(row), TypeError, f"row must be an int, got {row!r}")
    assert batch.unfinished == rows


# Tokenizers


def of_vocabulary(size: int) -> PreTrainedModel:
    model = make_model()
    model.resize_token_embeddings(size, mean_resizing=False)
    return model


def test_a_tokenizer_with_ids_that_the_model_lacks():
    model = of_vocabulary(VOCAB_SIZE - 1)
    before = snapshot(model)
    sentence = "the tokenizer has ids up to 330, the model's vocabulary only up to 329; give the"
    check_sentence(lambda: SelfSpeculativeLM(model, make_tokenizer()), ValueError, sentence)
    check_untouched(model, before)


def test_a_tokenizer_with_one_token_added():
    """Its length says nothing: what counts is the largest id."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    sentence = "the tokenizer has ids up to 331, the model's vocabulary only up to 330"
    check_sentence(lambda: SelfSpeculativeLM(make_model(), tokenizer), ValueError, sentence)


def test_a_token_that_a_tokenizer_learnt_since():
    tokenizer = make_tokenizer()
    lm = SelfSpeculativeLM(make_model(), tokenizer)
    tokenizer.add_tokens(["<new>"])
    sentence = "a token id must be between 0 and 330, got 331"
    check_sentence(lambda: lm.generate("a <new>"), ValueError, sentence)


def test_a_tokenizer_with_fewer_ids_than_a_padded_vocabulary():
    lm = SelfSpeculativeLM(
        of_vocabulary(2 * VOCAB_SIZE), make_tokenizer(), PLANS["exit"], num_draft_tokens=4
    )
    params = SamplingParams(temperature=50.0, seed=1)  # half of its tokens are padding
    settings = {"max_new_tokens": 20, "sampling": params}
    drafted = lm.generate("the tea", **settings)
    plain = lm.generate("the tea", num_draft_tokens=0, **settings)
    assert any(token >= VOCAB_SIZE for token in drafted.token_ids)
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)


@pytest.mark.parametrize("tokenizer", ["gpt2", 3, len, SimpleNamespace(decode=1, get_vocab=2)])
def test_what_is_no_tokenizer(toy, tokenizer):
    kind = type(tokenizer).__name__
    sentence = f"tokenizer must be a transformers tokenizer or None, got {kind}"
    check_sentence(lambda: SelfSpeculativeLM(toy(), tokenizer), TypeError, sentence)
