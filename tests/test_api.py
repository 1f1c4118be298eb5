import inspect
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace
from typing import get_overloads

import numpy as np
import pytest
import torch
from decoding import Interruption
from hypothesis import given
from hypothesis import strategies as st
from toys import MAX_POSITIONS, PLANS, VOCAB_SIZE, make_model, random_ids, without_times

from layerskip import DraftPlan, GenerationOutput, Round, SamplingParams, SelfSpeculativeLM
from layerskip.batch import MAX_ROWS
from layerskip.errors import RowError
from layerskip.loading import eos_ids_of
from layerskip.params import MAX_NUM_DRAFT_TOKENS, MAX_SEED
from layerskip.request import GenerateArguments

SAMPLED = SamplingParams(temperature=0.8, seed=5)
TEXT = "the tea 😀"


def ids_of(outputs: list[GenerationOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


def test_text_gives_one_output_and_a_list_a_list(talking, tokenizer):
    out = talking.generate(TEXT, max_new_tokens=8)
    assert isinstance(out, GenerationOutput)
    assert out.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert out.stats.new_tokens == len(out.token_ids) == 8
    assert out.stats.prompt_tokens == len(tokenizer(TEXT)["input_ids"])
    (same,) = talking.generate([TEXT], max_new_tokens=8)
    assert (same.text, without_times(same.rounds)) == (out.text, without_times(out.rounds))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_ids_are_taken_as_they_come(talking, tokenizer, kind):
    ids = tokenizer(TEXT)["input_ids"]
    out = talking.generate(kind(ids), max_new_tokens=8)
    assert out.token_ids == talking.generate(TEXT, max_new_tokens=8).token_ids
    short = talking.generate(ids[:1], max_new_tokens=8)
    outputs = talking.generate([kind(ids), kind(ids[:1]), TEXT], max_new_tokens=8)
    assert ids_of(outputs) == ids_of([out, short, out])


def test_more_prompts_than_rows_keep_their_order(wrap):
    prompts = [random_ids(1 + n % 3, seed=n) for n in range(35)]
    outputs = wrap("exit").generate(prompts, max_new_tokens=3)
    assert ids_of(outputs) == [wrap(None).generate(p, max_new_tokens=3).token_ids for p in prompts]
    assert max(r.rows for out in outputs for r in out.rounds) == MAX_ROWS


def test_several_sequences_of_each_prompt_use_the_seeds_that_follow(talking):
    many = talking.generate(["a", "t"], max_new_tokens=5, sampling=SAMPLED, num_return_sequences=3)
    assert [out.seed for out in many] == [5, 6, 7, 5, 6, 7]
    for out, prompt in zip(many, "aaattt", strict=True):
        alone = SamplingParams(temperature=0.8, seed=out.seed)
        assert out.token_ids == talking.generate(prompt, max_new_tokens=5, sampling=alone).token_ids
    assert len(talking.generate("a", max_new_tokens=1, num_return_sequences=2)) == 2
    last = SamplingParams(temperature=0.8, seed=MAX_SEED)
    many = talking.generate("a", max_new_tokens=2, sampling=last, num_return_sequences=2)
    assert [out.seed for out in many] == [MAX_SEED, 0]


def test_messages_go_through_the_chat_template(talking):
    chat = [{"role": "user", "content": "hi"}]
    out = talking.generate(messages=chat, max_new_tokens=5)
    assert out.token_ids == talking.generate("user: hi\nassistant: ", max_new_tokens=5).token_ids
    steps = list(talking.stream(messages=chat, max_new_tokens=5))
    assert tuple(t for step in steps for t in step.token_ids) == out.token_ids


@given(st.integers(1, 30), st.integers(0, 6), st.sampled_from([None, SAMPLED]), st.integers(1, 9))
def test_streaming_equals_generating(talking, length, k, sampling, limit):
    settings = {"max_new_tokens": limit, "num_draft_tokens": k, "sampling": sampling}
    out = talking.generate(random_ids(length), **settings)
    steps = list(talking.stream(random_ids(length), **settings))
    assert "".join(step.text for step in steps) == out.text
    assert tuple(t for step in steps for t in step.token_ids) == out.token_ids
    assert without_times(steps) == without_times(out.rounds)


def test_a_consumer_may_stop_a_stream(talking):
    expected = talking.generate(TEXT, max_new_tokens=20, num_draft_tokens=0)
    stream = talking.stream(TEXT, max_new_tokens=20)
    first, second = next(stream), next(stream)
    stream.close()
    got = first.token_ids + second.token_ids
    assert got == expected.token_ids[: len(got)]
    assert list(stream) == []
    assert talking.generate(TEXT, max_new_tokens=20).token_ids == expected.token_ids


@pytest.mark.parametrize("length", [1, 2])
def test_stop_strings_are_cut_and_end_the_text(talking, length):
    whole = talking.generate(TEXT, max_new_tokens=16).text
    for start in range(0, len(whole) - length, 3):
        stop = whole[start : start + length]
        out = talking.generate(TEXT, max_new_tokens=16, stop=[stop, "not in it"])
        assert (out.finish_reason, out.text) == ("stop", whole[: whole.index(stop)])
        slow = talking.generate(TEXT, max_new_tokens=16, stop=stop, num_draft_tokens=0)
        assert slow.token_ids == out.token_ids


@pytest.mark.parametrize(
    "eos", [50, [50, 51], torch.tensor(50), torch.tensor([50, 51]), np.int64(50), {50}, (), None]
)
def test_ends_of_sequence_may_be_all_that_transformers_takes(eos):
    wanted = [*eos] if isinstance(eos, set) else () if eos is None else np.atleast_1d(eos).tolist()
    assert eos_ids_of(SimpleNamespace(eos_token_id=eos)) == set(wanted)


@pytest.mark.parametrize("eos", ["</s>", "12", 1.0, [1, "</s>"], [1.5]])
def test_an_end_of_sequence_that_is_no_token_is_refused(eos):
    with pytest.raises(ValueError, match=r"eos_token_id in generation_config\.json, .* got "):
        eos_ids_of(SimpleNamespace(eos_token_id=eos))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_special_token_ends_the_text_if_its_name_is_a_stop_string(talking, ignore_eos):
    forced = SamplingParams(forced_token_ids=(40, 41, 1, 42, 43))
    how = {"max_new_tokens": 8, "sampling": forced, "ignore_eos": ignore_eos}
    out = talking.generate([5, 6], stop=["</s>", "not in it"], **how)
    assert (out.token_ids, out.finish_reason) == ((40, 41, 1), "stop")
    assert out.text == talking.tokenizer.decode([40, 41])
    assert len(talking.generate([5, 6], stop="not in it", **how).token_ids) == 8


def test_end_of_sequence_is_the_generation_config_s():
    model = make_model()
    whole = SelfSpeculativeLM(model, num_draft_tokens=0).generate([7], max_new_tokens=16).token_ids
    model.generation_config.eos_token_id = [whole[9], VOCAB_SIZE - 1]
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    out = lm.generate([7], max_new_tokens=16)
    assert out.token_ids == whole[: whole.index(whole[9]) + 1]
    assert out.finish_reason == "stop"
    assert lm.generate([7], max_new_tokens=16, ignore_eos=True).token_ids == whole


def test_a_seed_gives_its_text_again(talking):
    first, other = (
        talking.generate(TEXT, max_new_tokens=16, sampling=SamplingParams(temperature=1.0, seed=s))
        for s in (1, 2)
    )
    assert (first.seed, other.seed) == (1, 2)
    assert first.token_ids != other.token_ids


def test_a_drawn_seed_is_returned_and_gives_the_text_again(talking):
    drawn = [
        talking.generate(TEXT, max_new_tokens=16, sampling=SamplingParams(temperature=1.0))
        for _ in range(2)
    ]
    assert drawn[0].seed != drawn[1].seed
    params = SamplingParams(temperature=1.0, seed=drawn[0].seed)
    again = talking.generate(TEXT, max_new_tokens=16, sampling=params)
    assert again.token_ids == drawn[0].token_ids
    assert talking.generate(TEXT, max_new_tokens=2).seed is None  # greedy uses none


def test_rows_of_an_open_batch_have_settings_of_their_own(talking):
    batch = talking.open_batch(max_new_tokens=12)
    plain = batch.add(TEXT)
    own = batch.add("a", max_new_tokens=3, num_draft_tokens=0, sampling=SAMPLED)
    while own in batch.unfinished:
        batch.step()
    out = batch.remove(own)
    expected = talking.generate("a", max_new_tokens=3, sampling=SAMPLED)
    assert (out.token_ids, out.text, out.seed) == (expected.token_ids, expected.text, 5)
    early = batch.remove(plain)
    assert early.finish_reason == "cancelled"
    whole = talking.generate(TEXT, max_new_tokens=12)
    assert whole.token_ids[: len(early.token_ids)] == early.token_ids
    assert batch.unfinished == batch.step() == []


def test_rows_are_verified_each_in_its_own_way(talking):
    """A row's text depends on its own drafts at most, not on its neighbours'."""
    hot = SamplingParams(temperature=1.2, seed=2)
    batch = talking.open_batch(max_new_tokens=20, sampling=hot, verification="block")
    ways = [None, "token", "coupled", "block", "token"]
    rows = [batch.add("the tea", verification=way, num_draft_tokens=5) for way in ways]
    while batch.unfinished:
        batch.step()
    texts = {
        way or "block": batch.remove(row).token_ids for row, way in zip(rows, ways, strict=True)
    }
    for way, tokens in texts.items():
        settings = {"max_new_tokens": 20, "sampling": hot, "verification": way}
        assert talking.generate("the tea", num_draft_tokens=5, **settings).token_ids == tokens
    assert len(set(texts.values())) == 3
    plain = talking.generate("the tea", max_new_tokens=20, sampling=hot, num_draft_tokens=0)
    assert texts["coupled"] == plain.token_ids


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize(
    "settings", [{"sampling": None}, {"sampling": SAMPLED, "num_draft_tokens": 0}]
)
def test_without_sampling_or_drafts_there_is_one_way_to_verify(talking, verification, settings):
    out = talking.generate(TEXT, max_new_tokens=12, verification=verification, **settings)
    assert out.token_ids == talking.generate(TEXT, max_new_tokens=12, **settings).token_ids


def test_text_ends_where_the_model_s_positions_end(wrap):
    for k in (0, 4):
        out = wrap("exit").generate([3] * (MAX_POSITIONS - 5), num_draft_tokens=k)
        assert (len(out.token_ids), out.finish_reason) == (5, "length")


def test_without_a_plan_decoding_is_plain(wrap):
    out = wrap(None).generate([1, 2], max_new_tokens=5, num_draft_tokens=4)
    assert out.stats.num_draft_tokens == 0
    assert {r.origin for r in out.rounds} == {"prefill", "plain"}


def test_settings_are_keywords_and_named():
    for method in ("generate", "stream", "open_batch", "from_pretrained", "__init__"):
        parameters = inspect.signature(getattr(SelfSpeculativeLM, method)).parameters.values()
        kinds = {p.name: p.kind for p in parameters}
        assert inspect.Parameter.VAR_KEYWORD not in kinds.values()
        settings = [
            n for n in kinds if n not in ("self", "prompts", "prompt", "model", "tokenizer")
        ]
        assert all(kinds[n] == inspect.Parameter.KEYWORD_ONLY for n in settings if n != "plan")


def test_a_misspelt_setting_is_an_error(talking):
    for method in (talking.generate, talking.stream):
        with pytest.raises(TypeError, match="max_tokens"):
            method("a", max_tokens=3)
    with pytest.raises(TypeError, match="max_tokens"):
        talking.open_batch(max_tokens=3)


BAD_REQUESTS = [
    (("a",), {"messages": []}, ValueError, "give either prompts or messages"),
    ((7,), {}, ValueError, "prompts must be text, token ids or a list of them, got 7"),
    (([-1],), {}, ValueError, "a token id must be between 0 and 330, got -1"),
    (([1, "a"],), {}, TypeError, "a token id must be an int, got 'a'"),
    (("a",), {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
    (("a",), {"max_new_tokens": 2.5}, TypeError, r"max_new_tokens must be an int, got 2\.5"),
    (("a",), {"num_draft_tokens": 33}, ValueError, "num_draft_tokens must be between 0 and 32"),
    (("a",), {"num_draft_tokens": -1}, ValueError, "num_draft_tokens must be between 0 and 32"),
    (("a",), {"num_draft_tokens": "4"}, ValueError, "num_draft_tokens must be 'auto' or between"),
    (("a",), {"num_return_sequences": 0}, ValueError, "num_return_sequences must be at least 1"),
    (("a",), {"sampling": 0.8}, TypeError, "sampling must be SamplingParams, got float"),
    (("a",), {"verification": "greedy"}, ValueError, "verification must be one of 'coupled', 't"),
    (("a",), {"verification": None}, ValueError, "verification must be one of .*, got None"),
    (("a",), {"logits_processor": [3]}, TypeError, r"must be a list of callables .*, got \(3,\)"),
    (("a",), {"logits_processor": print}, TypeError, "logits_processor must be a list, got <"),
    (("a",), {"stop": ""}, ValueError, "stop must be one or more non-empty strings, got ''"),
    (("a",), {"stop": [3]}, ValueError, r"stop must be one or more non-empty strings, got \[3\]"),
    (("a",), {"stop": "\udcff"}, ValueError, "stop is not valid Unicode: .*surrogates not allowed"),
    (("a",), {"stop": 3}, (TypeError, ValueError), "stop must be one or more non-empty strings"),
]


@pytest.mark.parametrize(("args", "settings", "error", "message"), BAD_REQUESTS)
def test_bad_requests(talking, args, settings, error, message):
    with pytest.raises(error, match=message):
        talking.generate(*args, **settings)
    if "num_return_sequences" not in settings:
        with pytest.raises((TypeError, ValueError)):
            talking.stream(*args, **settings)  # at the call, before the first step


def test_ids_may_come_as_arrays(talking):
    ids = [5, 6, 7]
    expected = talking.generate(ids, max_new_tokens=4).token_ids
    for prompt in (np.array(ids), torch.tensor(ids), list(np.array(ids)), [np.array(ids)] * 2):
        out = talking.generate(prompt, max_new_tokens=4)
        many = out if isinstance(out, list) else [out]
        assert [o.token_ids for o in many] == [expected] * len(many)
    steps = list(talking.stream(np.array(ids), max_new_tokens=4))
    assert tuple(t for step in steps for t in step.token_ids) == expected


def test_a_stream_without_a_prompt_is_told_so(talking):
    with pytest.raises(ValueError, match="give either prompts or messages"):
        talking.stream()


def test_bad_rows_leave_a_batch_as_it_was(talking):
    batch = talking.open_batch(max_new_tokens=4)
    row = batch.add("a")
    for prompt, settings, error, message in [
        ("", {}, ValueError, "the prompt is empty"),
        (["a", "b"], {}, TypeError, "a row takes one prompt"),
        ("a", {"num_draft_tokens": 40}, ValueError, "num_draft_tokens must be between 0 and 32"),
        ("a", {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
        ("a", {"sampling": "hot"}, TypeError, "sampling must be SamplingParams, got str"),
        ("a", {"verification": "none"}, ValueError, "verification must be one of"),
        ("a", {"cache": "old"}, TypeError, "cache must be the cache of an earlier output, got str"),
    ]:
        with pytest.raises(error, match=message):
            batch.add(prompt, **settings)
    assert batch.unfinished == [row]
    with pytest.raises(ValueError, match=r"the batch has no row 9; its rows are \[0\]"):
        batch.remove(9)


def test_without_a_tokenizer_only_ids_are_understood(wrap):
    assert wrap("exit").generate([1], max_new_tokens=2).text == ""
    with pytest.raises(TypeError, match="no tokenizer: give token ids instead of text"):
        wrap("exit").generate("text")
    with pytest.raises(ValueError, match="messages need a tokenizer with a chat template"):
        wrap("exit").generate(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        wrap("exit").generate([1], stop="x")


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (DraftPlan(16, (0, 1)), ValueError, "plan is for a model of 16 layers; this one has 6"),
        ((0, 1), TypeError, "plan must be a DraftPlan, a PlanFile or None, got tuple"),
    ],
)
def test_a_plan_has_to_fit(toy, plan, error, message):
    with pytest.raises(error, match=message):
        SelfSpeculativeLM(toy(), None, plan)


def test_on_round_gets_each_record_as_the_output_has_it(wrap):
    got = []
    prompts = [random_ids(5), random_ids(9)]
    outputs = wrap("exit").generate(
        prompts, max_new_tokens=7, labels={"task": "code"}, on_round=got.append
    )
    ids = [out.rounds[0].request_id for out in outputs]
    assert len(set(ids)) == 2
    for request_id, out in zip(ids, outputs, strict=True):
        assert tuple(r for r in got if r.request_id == request_id) == out.rounds
        assert {tuple(r.labels.items()) for r in out.rounds} == {(("task", "code"),)}
    steps = list(wrap("exit").stream(prompts[0], max_new_tokens=7, on_round=got.append))
    assert steps == got[-len(steps) :]


def test_rows_of_a_batch_have_labels_and_names_of_their_own(wrap):
    got = []
    batch = wrap("exit").open_batch(max_new_tokens=5, labels={"a": "1"}, on_round=got.append)
    rows = [batch.add([5]), batch.add([6], labels={"b": "2"}, request_id="mine")]
    while batch.unfinished:
        batch.step()
    one, two = ([r for r in got if r.row == row] for row in rows)
    assert ({r.request_id for r in two}, dict(two[0].labels)) == ({"mine"}, {"b": "2"})
    assert dict(one[0].labels) == {"a": "1"}
    assert {r.rows for r in got if r.index == 0} == {1}
    assert {r.rows for r in got if r.index == 1} == {2}


def test_times_of_a_round_lie_within_those_of_its_request(wrap):
    out = wrap("exit").generate(random_ids(9), max_new_tokens=9)
    ends = [r.elapsed_seconds for r in out.rounds]
    assert ends == sorted(ends)
    assert ends[-1] >= sum(r.draft_seconds + r.verify_seconds for r in out.rounds)
    assert all(0.0 < r.sample_seconds < r.verify_seconds for r in out.rounds)
    drafting = [r for r in out.rounds if r.num_draft_tokens]
    assert {(r.mode, r.exit_layer, r.stopped) for r in drafting} == {("early_exit", 2, "number")}


def test_what_on_round_raises_of_one_row_takes_no_record_of_another(wrap):
    told = []

    def refuse(record):
        told.append(record.row)
        if record.row == 0:
            raise OSError("disk full")

    batch = wrap("exit").open_batch(max_new_tokens=9, on_round=refuse)
    rows = [batch.add(random_ids(5)) for _ in range(3)]
    with pytest.raises(OSError, match="disk full"):
        batch.step()
    assert told == rows


def test_what_on_round_raises_comes_through_and_the_batch_goes_on(wrap):
    def refuse(record):
        if record.index == 1:
            raise OSError("disk full")

    batch = wrap("exit").open_batch(max_new_tokens=9, on_round=refuse)
    row = batch.add(random_ids(5))
    batch.step()
    with pytest.raises(OSError, match="disk full"):
        batch.step()
    while batch.unfinished:
        batch.step()
    expected = wrap("exit").generate(random_ids(5), max_new_tokens=9)
    assert batch.remove(row).token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"on_round": 3}, "on_round must be callable with a Round, got 3"),
        ({"labels": {"task": 3}}, "labels must map names to texts"),
        ({"labels": "code"}, "labels must map names to texts"),
    ],
)
def test_bad_labels_and_callbacks_are_refused(wrap, settings, sentence):
    with pytest.raises(TypeError, match=sentence):
        wrap("exit").generate([5], **settings)
    with pytest.raises(TypeError, match="request_id must be non-empty text, got ''"):
        wrap("exit").open_batch().add([5], request_id="")


def test_threads_may_share_a_batch(wrap):
    """Two go on with its rows while a third adds some, and takes one out."""
    lm = wrap("exit")
    prompts = [random_ids(6, seed=seed) for seed in range(9)]
    batch = lm.open_batch(max_new_tokens=24)
    rows = [batch.add(prompt) for prompt in prompts[:3]]
    records, joined = [], Event()

    def go_on() -> None:
        while batch.unfinished or not joined.is_set():
            records.extend(batch.step())

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(go_on) for _ in range(2)]
        try:
            rows += [batch.add(prompt) for prompt in prompts[3:]]
            cancelled = batch.remove(rows.pop())
        finally:
            joined.set()
        for one in both:
            one.result()
    expected = [lm.generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]
    assert ids_of([batch.remove(row) for row in rows]) == expected[:-1]
    assert cancelled.token_ids == expected[-1][: len(cancelled.token_ids)]
    for row, ids in zip(rows, expected, strict=False):
        told = [list(record.token_ids) for record in records if record.row == row]
        assert sum(map(len, told)) == len(ids)


def test_threads_wait_for_no_callback_of_another(wrap):
    """What ``on_round`` waits for may be a row that another thread adds."""
    added = []

    def wait_for_another(_: Round) -> None:
        if not added:
            other = Thread(target=lambda: added.append(batch.add([7, 8])), daemon=True)
            other.start()
            other.join(timeout=20)

    batch = wrap("exit").open_batch(max_new_tokens=4, on_round=wait_for_another)
    first = batch.add([5, 6])
    batch.step()
    assert batch.unfinished == [first, *added]
    assert len(added) == 1


@pytest.mark.parametrize("seen", [3, 6], ids=["a prompt", "a decoded token"])
@pytest.mark.parametrize("call", ["add", "step", "remove"])
def test_what_a_round_calls_changes_no_batch_meanwhile(wrap, call, seen):
    """A pass is half done, in a cache that another row might need to grow."""
    lm, refused = wrap("exit"), []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == seen and not refused:
            refused.append(call)
            getattr(batch, call)(*{"add": [[7] * 520], "step": [], "remove": [0]}[call])
        return scores

    def decode() -> None:
        while batch.unfinished:
            batch.step()

    settings = {"max_new_tokens": 12, "num_draft_tokens": 3}
    batch = lm.open_batch(logits_processor=[processor], **settings)
    row = batch.add([5, 6, 7])
    with pytest.raises(RuntimeError, match=rf"^{call} was called by something that a round"):
        decode()
    other = batch.add([7] * 520)
    decode()
    outputs = [batch.remove(one) for one in (row, other)]
    assert ids_of(outputs) == ids_of(lm.generate([[5, 6, 7], [7] * 520], **settings))


def test_a_row_whose_adding_is_interrupted_is_not_in(wrap, monkeypatch):
    """Nobody was told its number; what it would decode, nobody could take out."""
    batch = wrap("exit").open_batch(max_new_tokens=4)
    first = batch.add([5, 6])
    decoder = batch._rows
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "join", Interruption(decoder.join, 0, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.add([7, 8])
    assert batch.unfinished == [first]
    second = batch.add([7, 8])
    while batch.unfinished:
        batch.step()
    outputs = [batch.remove(row) for row in (first, second)]
    assert outputs[1].token_ids == wrap("exit").generate([7, 8], max_new_tokens=4).token_ids


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_row_that_fails_to_join_leaves_its_slots_empty(wrap, monkeypatch, error):
    """Though they had been given what an earlier text shares with its prompt."""
    prompt = random_ids(20)
    kept = wrap("exit").generate(prompt, max_new_tokens=4, return_cache=True).cache
    batch = wrap("exit").open_batch(max_new_tokens=4)
    first = batch.add([5, 6])
    decoder = batch._rows
    with monkeypatch.context() as patch:
        patch.setattr(decoder.speculator, "admit", Interruption(lambda _: None, 0, error))
        with pytest.raises(error):
            batch.add([*prompt, 7, 8], cache=kept)
    assert decoder.rows.keys() == {first}
    assert decoder.cache.lengths.tolist()[1:] == [0] * (decoder.cache.num_rows - 1)
    assert decoder.cache.adapter_lengths[1:] == [0] * (decoder.cache.num_rows - 1)


@pytest.mark.parametrize("num_draft_tokens", [0, 3, 32])
@pytest.mark.parametrize("plan", ["exit", "skipping", None])
def test_a_row_that_was_taken_out_leaves_nothing_in_the_cache(
    wrap, monkeypatch, plan, num_draft_tokens
):
    batch = wrap(plan).open_batch(max_new_tokens=500, num_draft_tokens=num_draft_tokens)
    first, second = batch.add([5, 6] * 8), batch.add(random_ids(30))
    for _ in range(6):
        batch.step()
    cache, ends = batch._rows.cache, []
    sweep = cache.sweep
    monkeypatch.setattr(cache, "sweep", lambda *place: (ends.append(place[2]), sweep(*place)))
    for row in (first, second):
        written = batch._rows.row(row).length + MAX_NUM_DRAFT_TOKENS + 1
        batch.remove(row)
        assert cache._both.any() == (row == first)
        assert ends.pop() == written < cache.num_slots  # no memory is touched for what is not


@pytest.mark.parametrize("interrupted", ["prefill", "verify"])
def test_an_interrupted_pass_leaves_nothing_in_the_cache(wrap, monkeypatch, interrupted):
    lm = wrap("exit")
    batch = lm.open_batch(max_new_tokens=40, num_draft_tokens=32)
    row, cache = batch.add(random_ids(510)), batch._rows.cache
    runs = lm.stack if interrupted == "prefill" else batch._rows.verifier
    with monkeypatch.context() as patch:
        patch.setattr(
            runs, interrupted, Interruption(getattr(runs, interrupted), 0, KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            [batch.step() for _ in range(2)]
    assert cache._both[:, :, 0, 509].all()
    assert cache._both[:, :, 0, 510 + 32].all() == (interrupted == "verify")
    batch.remove(row)
    assert not cache._both.any()


def nothing_follows_8(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * float("nan") if ids[0, 0] == 8 else scores


@pytest.mark.parametrize("grows", [False, True])
def test_a_row_that_fails_costs_the_others_no_second_prefill(wrap, monkeypatch, grows):
    """Unless a row that joins then makes the cache larger: it takes what is committed alone."""
    lm, prefilled = wrap("exit"), []

    def counted(ids, *arguments, **settings):
        prefilled.append(tuple(ids[:2]))
        return prefill(ids, *arguments, **settings)

    prefill = lm.stack.prefill
    monkeypatch.setattr(lm.stack, "prefill", counted)
    batch = lm.open_batch(max_new_tokens=9, logits_processor=[nothing_follows_8])
    prompts = [[5, 6, 7], [8, 9], [5, 7], [8, 8], [6, 7, 8]]
    rows = [batch.add(prompt) for prompt in prompts]
    for _ in range(2):
        with pytest.raises(RowError) as failed:
            batch.step()
        rows.remove(failed.value.row)
        batch.remove(failed.value.row)
    if grows:
        rows.append(batch.add([7] * 520))
    while batch.unfinished:
        batch.step()
    outputs = [batch.remove(row) for row in rows]
    assert prefilled.count((5, 6)) == prefilled.count((5, 7)) == 1 + grows
    good = [prompts[0], prompts[2], prompts[4], *[[7] * 520] * grows]
    assert ids_of(outputs) == ids_of(lm.generate(good, max_new_tokens=9))


@pytest.mark.parametrize("changes", [False, True])
def test_a_kept_prefill_is_of_the_weights_that_are_decoded_with(changes):
    """And the time that it took ends when it is given out."""
    model = make_model("llama")
    lm = SelfSpeculativeLM(model, num_draft_tokens=0)
    settings = {"max_new_tokens": 8, "return_cache": True}
    batch = lm.open_batch(logits_processor=[nothing_follows_8], **settings)
    row, bad = batch.add([5, 6, 7] * 5), batch.add([8, 9])
    with pytest.raises(RowError):
        batch.step()
    batch.remove(bad)
    time.sleep(0.1)
    if changes:
        with torch.no_grad():
            [weight.mul_(1.1) for weight in model.parameters()]
    (record,) = batch.step()
    assert record.elapsed_seconds > 0.1
    while batch.unfinished:
        batch.step()
    out, alone = batch.remove(row), lm.generate([5, 6, 7] * 5, **settings)
    assert out.token_ids == alone.token_ids
    assert torch.equal(out.cache.keys, alone.cache.keys)
    lm.generate([5, 6, 7] * 6, cache=out.cache, **settings)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_fork_that_may_hang_is_told_of_once(toy, monkeypatch, caplog, num_threads):
    lm = SelfSpeculativeLM(toy("llama"), num_draft_tokens=0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    lm.generate([5], max_new_tokens=1)
    assert not caplog.messages
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for _ in range(2):
        lm.generate([5], max_new_tokens=1)
    told = [message for message in caplog.messages if "before this process was forked" in message]
    assert len(told) == num_threads - 1


@pytest.mark.parametrize("asked", [lambda lm: lm.controller, lambda lm: lm.warm_up(num_rows=2)])
def test_a_fork_is_told_of_before_any_pass(toy, monkeypatch, caplog, asked):
    lm = SelfSpeculativeLM(toy("llama"), plan=PLANS["exit"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    asked(lm)
    assert "before this process was forked" in caplog.messages[0]


def test_type_checkers_know_every_argument_of_generate():
    """``tests/typed_use.py`` has what they make of them, which `make lint` looks at."""
    described = set(GenerateArguments.__annotations__)
    named = set(inspect.signature(SelfSpeculativeLM.generate).parameters)
    assert named - described == {"self", "prompts", "num_return_sequences"}
    assert described <= named
    for one in get_overloads(SelfSpeculativeLM.generate):
        assert {"prompts", "num_return_sequences", "arguments"} < set(one.__annotations__)
    assert len(get_overloads(SelfSpeculativeLM.generate)) == 3
