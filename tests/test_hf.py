"""``model.generate(custom_generate=lm.custom_generate)`` gives what ``model.generate`` gives."""

import copy
import itertools

import peft
import pytest
import torch
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer, random_ids
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip import SelfSpeculativeLM

NEW = 14
PAD = 0


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module", params=["exit", "skipping"])
def lm(model, request) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(model, None, PLANS[request.param], num_draft_tokens=4)


@pytest.fixture(scope="module")
def exit_lm(model) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)


def one(length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.tensor([random_ids(length)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(lengths=(5, 11, 8), side: str = "left") -> dict[str, torch.Tensor]:
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width).long()
    for i, n in enumerate(lengths):
        at = slice(width - n, width) if side == "left" else slice(0, n)
        ids[i, at], mask[i, at] = torch.tensor(random_ids(n, seed=i)), 1
    return {"input_ids": ids, "attention_mask": mask}


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
SETTINGS = [
    {},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.3},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[17], [4, 5]], "renormalize_logits": True},
    {"sequence_bias": [[[7], 4.0], [[9, 8], -3.0]]},
    {"min_new_tokens": 9, "eos_token_id": list(range(40, 90))},
    {"eos_token_id": list(range(40, 90))},
    {"forced_eos_token_id": 33, "eos_token_id": 33},
    {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [60]},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 50},
    {"max_new_tokens": 1},
    {"max_length": 15, "max_new_tokens": None},
]


@pytest.mark.parametrize("inputs", [one(), padded()], ids=["one", "left-padded"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "+".join(s) or "plain")
@pytest.mark.one_in(2)
def test_greedy_search_is_transformers_own(model, lm, inputs, settings):
    wanted = model.generate(**inputs, **GREEDY | settings)
    got = model.generate(**inputs, **GREEDY | settings, custom_generate=lm.custom_generate)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("eos", [list(range(40, 90)), 61, None], ids=["several", "one", "none"])
def test_sequences_that_ended_are_padded_as_by_transformers(model, lm, eos):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos}
    wanted = model.generate(**padded(), **settings)
    assert torch.equal(
        model.generate(**padded(), **settings, custom_generate=lm.custom_generate), wanted
    )


def test_drafting_happens_and_can_be_switched_off(model, exit_lm, monkeypatch):
    drafted = []
    draft = exit_lm._drafter.draft

    def spy(requests, *rest):
        drafted.append(max(r.num_draft_tokens for r in requests))
        return draft(requests, *rest)

    monkeypatch.setattr(exit_lm._drafter, "draft", spy)
    custom = {"custom_generate": exit_lm.custom_generate}
    model.generate(**one(), **GREEDY, **custom)
    assert max(drafted) == exit_lm.num_draft_tokens
    drafted.clear()
    model.generate(**one(), **GREEDY, **custom, num_draft_tokens=2)
    assert max(drafted) == 2
    drafted.clear()
    model.generate(**one(), **GREEDY, **custom, num_draft_tokens=0)
    assert not drafted


def test_right_padding_is_left_out(model, exit_lm):
    """Transformers warns of right padding and reads it; here a row is what its mask says."""
    inputs = padded(side="right")
    got = model.generate(**inputs, **GREEDY, custom_generate=exit_lm.custom_generate)
    for row, ids, mask in zip(got, inputs["input_ids"], inputs["attention_mask"], strict=True):
        alone = ids[mask.bool()][None]
        wanted = model.generate(alone, attention_mask=torch.ones_like(alone), **GREEDY)
        assert torch.equal(row[len(ids) :], wanted[0, alone.shape[1] :])


@pytest.mark.parametrize("inputs", [one(), padded()], ids=["one", "left-padded"])
def test_the_output_object_is_transformers_own(model, lm, inputs):
    settings = {
        **GREEDY,
        "eos_token_id": list(range(40, 60)),
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    wanted = model.generate(**inputs, **settings)
    got = model.generate(**inputs, **settings, custom_generate=lm.custom_generate)
    assert isinstance(got, GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, wanted.sequences)
    width = inputs["input_ids"].shape[1]
    new = wanted.sequences[:, width:]
    last = torch.isin(new, torch.arange(40, 60)).long()
    ended = last.cumsum(1) - last > 0
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert len(ours) == len(theirs) == new.shape[1]
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            live = ~ended[:, step]
            torch.testing.assert_close(a[live], b[live], rtol=1e-4, atol=1e-4)
            assert not a[~live].any()


def test_scores_of_sampling_are_the_warped_ones(model, exit_lm):
    settings = {**GREEDY, "do_sample": True, "temperature": 0.7, "top_k": 5, "output_scores": True}
    got = model.generate(
        **one(),
        **settings,
        return_dict_in_generate=True,
        custom_generate=exit_lm.custom_generate,
        seed=3,
    )
    assert len(got.scores) == NEW
    for step, scores in enumerate(got.scores):
        kept = scores[0].isfinite().nonzero()[:, 0].tolist()
        assert len(kept) == 5
        assert int(got.sequences[0, 9 + step]) in kept


@pytest.mark.parametrize("inputs", [one(), padded()], ids=["one", "left-padded"])
def test_transformers_goes_on_from_the_returned_cache(model, exit_lm, inputs):
    first = model.generate(
        **inputs, **GREEDY, return_dict_in_generate=True, custom_generate=exit_lm.custom_generate
    )
    assert isinstance(first.past_key_values, DynamicCache)
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(first.sequences), NEW).long()], 1)
    settings = GREEDY | {"max_new_tokens": 6}
    wanted = model.generate(first.sequences, attention_mask=mask, **settings)
    got = model.generate(
        first.sequences, attention_mask=mask, past_key_values=first.past_key_values, **settings
    )
    assert torch.equal(got, wanted)


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_a_streamer_gets_prompt_and_tokens(model, exit_lm):
    ours, theirs = Collector(), Collector()
    model.generate(**one(), **GREEDY, streamer=theirs)
    model.generate(**one(), **GREEDY, streamer=ours, custom_generate=exit_lm.custom_generate)
    assert ours.pieces == theirs.pieces
    assert ours.ended


class EndsAfter(StoppingCriteria):
    """Ends a row once its last two tokens are both odd; keeps what it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids[0].tolist())
        return (input_ids[:, -2:] % 2 == 1).all(dim=1)


class Shifting(LogitsProcessor):
    """Writes in place; what it does depends on the whole context."""

    def __call__(self, input_ids, scores):
        scores[:, int(input_ids.sum()) % VOCAB_SIZE] += 6.0
        return scores


@pytest.mark.parametrize("inputs", [one(), padded((6,))], ids=["one", "padded"])
def test_processors_and_criteria_of_the_user(model, lm, inputs):
    def run(**custom):
        criterion = EndsAfter()
        out = model.generate(
            **inputs,
            **GREEDY | {"max_new_tokens": 40},
            logits_processor=LogitsProcessorList([Shifting()]),
            stopping_criteria=StoppingCriteriaList([criterion]),
            **custom,
        )
        return out.tolist(), criterion.shown

    wanted, shown = run()
    assert len(shown) < 40
    assert run(custom_generate=lm.custom_generate) == (wanted, shown)


def test_processors_and_criteria_that_know_the_row(model, lm):
    """Constraints by row number, and a criterion with a length for each row."""
    lengths = torch.tensor([4, 9, 6])

    class Lengths(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] - 11 >= lengths

    settings = {
        **GREEDY,
        "eos_token_id": 3,  # without one, transformers does not end rows by themselves
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(20 + 50 * row, 60 + 50 * row)),
        "stopping_criteria": StoppingCriteriaList([Lengths()]),
    }
    wanted = model.generate(**padded(), **settings)
    got = model.generate(**padded(), **settings, custom_generate=lm.custom_generate)
    assert torch.equal(got, wanted)
    assert wanted.shape[1] == 11 + 9


def test_a_stop_string_criterion_ends_inside_a_block(model, exit_lm):
    tokenizer = make_tokenizer()
    plain = model.generate(**one(), **GREEDY)
    word = tokenizer.decode(plain[0, 13:15])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [word])])
    settings = {**GREEDY, "stopping_criteria": criteria}
    wanted = model.generate(**one(), **settings)
    got = model.generate(**one(), **settings, custom_generate=exit_lm.custom_generate)
    assert torch.equal(got, wanted)
    assert got.shape[1] <= 15


SAMPLE = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "pad_token_id": PAD}


def test_sampling_depends_on_the_seed_alone(model, lm):
    def run(num_draft_tokens, seed, inputs=None):
        return model.generate(
            **(inputs or padded()),
            max_new_tokens=NEW,
            **SAMPLE,
            custom_generate=lm.custom_generate,
            num_draft_tokens=num_draft_tokens,
            seed=seed,
        )

    plain = run(0, 5)
    assert torch.equal(run(4, 5), plain)
    assert not torch.equal(run(4, 6), plain)


def test_torch_seed_repeats_sampling(model, exit_lm):
    def run():
        return model.generate(
            **one(),
            max_new_tokens=NEW,
            **SAMPLE,
            num_return_sequences=3,
            custom_generate=exit_lm.custom_generate,
        )

    torch.manual_seed(1)
    first, second = run(), run()
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 3
    torch.manual_seed(1)
    assert torch.equal(run(), first)


@pytest.mark.parametrize("verification", ["coupled", "block"])
def test_sampled_tokens_follow_transformers_law(model, exit_lm, verification):
    """The second token's distribution, from 300 draws of ours, against the model's own."""
    inputs = one(4)
    draws, settings = 300, {**SAMPLE, "top_k": 3, "top_p": 1.0}
    got = model.generate(
        **inputs,
        max_new_tokens=3,
        **settings,
        num_return_sequences=draws,
        custom_generate=exit_lm.custom_generate,
        verification=verification,
        seed=0,
    )
    counts: dict[tuple[int, ...], int] = {}
    for row in got[:, 4:6].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    with torch.no_grad():
        statistic = 0.0
        for pair, p in law_of_pairs(model, inputs["input_ids"], 0.9, 3).items():
            statistic += (counts.pop(pair, 0) - draws * p) ** 2 / (draws * p)
    assert not counts  # nothing outside the law
    assert statistic < 26.1  # 99.9 % of chi-square with 8 degrees of freedom


def law_of_pairs(model, ids, temperature, top_k) -> dict[tuple[int, ...], float]:
    def following(tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1].float() / temperature
        values, at = logits.topk(top_k)
        return dict(zip(at.tolist(), values.softmax(-1).tolist(), strict=True))

    prompt = ids[0].tolist()
    return {
        (a, b): p * q
        for a, p in following(prompt).items()
        for b, q in following([*prompt, a]).items()
    }


REFUSED = [
    ({"num_beams": 2}, "num_beams=2"),
    ({"use_mtp": True}, "use_mtp=True"),
    ({"force_words_ids": [[7]]}, r"force_words_ids=\[\[7\]\]"),
    ({"constraints": ["one"]}, "constraints="),
    ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    ({"return_dict_in_generate": True, "cache_implementation": "static"}, "a StaticCache was ask"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ({"verification": "guess"}, "verification must be one of"),
    ({"num_draft_tokens": -1}, "num_draft_tokens must be between"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_done_is_refused(model, exit_lm, settings, message):
    before = copy.deepcopy(model.config.to_dict())
    wanted = model.generate(**one(), **GREEDY)
    with pytest.raises(ValueError, match=message):
        model.generate(**one(), **GREEDY, **settings, custom_generate=exit_lm.custom_generate)
    assert torch.equal(model.generate(**one(), **GREEDY), wanted)
    assert model.config.to_dict() == before


def test_a_hole_in_the_mask_is_refused(model, exit_lm):
    inputs = one()
    inputs["attention_mask"][0, 3] = 0
    with pytest.raises(ValueError, match="attention_mask has a hole"):
        model.generate(**inputs, **GREEDY, custom_generate=exit_lm.custom_generate)


def test_a_mask_of_booleans_may_have_no_hole_either(model, exit_lm):
    inputs = one()
    inputs["attention_mask"] = inputs["attention_mask"].bool()
    inputs["attention_mask"][0, 3] = False
    with pytest.raises(ValueError, match="attention_mask has a hole"):
        model.generate(**inputs, **GREEDY, custom_generate=exit_lm.custom_generate)


def test_a_mask_of_floats_says_where_padding_is(model, exit_lm):
    inputs = padded((5, 8))
    wanted = model.generate(**inputs, **GREEDY, custom_generate=exit_lm.custom_generate)
    inputs["attention_mask"] = inputs["attention_mask"].float()
    got = model.generate(**inputs, **GREEDY, custom_generate=exit_lm.custom_generate)
    assert torch.equal(got, wanted)


def test_prompts_are_checked(model, exit_lm):
    custom = {**GREEDY, "custom_generate": exit_lm.custom_generate}
    with pytest.raises(ValueError, match="the prompt has 700 tokens; the model has 600 positions"):
        model.generate(**one(700), **custom)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(**padded((0, 4)), **custom)
    with pytest.raises(ValueError, match="input_ids of no rows; give it one row or more"):
        model.generate(torch.empty(0, 4, dtype=torch.long), **custom)


def test_a_streamer_of_several_rows_is_refused(model, exit_lm):
    with pytest.raises(ValueError, match="a streamer takes one sequence, and the batch has 3"):
        model.generate(
            **padded(), **GREEDY, streamer=Collector(), custom_generate=exit_lm.custom_generate
        )


def test_a_filled_cache_is_refused(model, exit_lm):
    first = model.generate(**one(), **GREEDY, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="starts from an empty cache"):
        model.generate(
            first.sequences,
            past_key_values=first.past_key_values,
            **GREEDY,
            custom_generate=exit_lm.custom_generate,
        )


def test_a_filled_cache_before_new_tokens_alone_is_refused(model, exit_lm):
    first = model.generate(**one(), **GREEDY, return_dict_in_generate=True)
    width = first.sequences.shape[1] + 2
    with pytest.raises(ValueError, match="starts from an empty cache"):
        model.generate(
            torch.tensor([[5, 6, 7]]),
            attention_mask=torch.ones(1, width).long(),
            past_key_values=first.past_key_values,
            **GREEDY,
            custom_generate=exit_lm.custom_generate,
        )


def test_another_model_is_refused(exit_lm):
    other = make_model()
    with pytest.raises(ValueError, match="belongs to another model"):
        other.generate(**one(), **GREEDY, custom_generate=exit_lm.custom_generate)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_hooks_of_one_call_are_refused():
    """PEFT takes ``adapter_names`` for itself, and hooks its layers for as long as a call takes:
    every row had the active adapter's text."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_model(), config, "first").eval()
    adapted.add_adapter("second", config)
    ours = SelfSpeculativeLM(adapted, None, PLANS["exit"], num_draft_tokens=4).custom_generate
    wanted = adapted.generate(**one(), **GREEDY)
    assert torch.equal(adapted.generate(**one(), **GREEDY, custom_generate=ours), wanted)
    with pytest.raises(
        ValueError, match=r"0\.self_attn\.q_proj has a forward hook .*adapter_names"
    ):
        adapted.generate(**one(), **GREEDY, custom_generate=ours, adapter_names=["second"])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_other_adapters_than_when_it_was_wrapped_are_refused():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_model(), config, "first").eval()
    adapted.add_adapter("second", config)
    ours = SelfSpeculativeLM(adapted, None, PLANS["exit"], num_draft_tokens=4).custom_generate
    wanted = adapted.generate(**one(), **GREEDY)
    refused = pytest.raises(ValueError, match=r"0\.self_attn\.q_proj runs other adapters")
    with refused, adapted.disable_adapter():
        adapted.generate(**one(), **GREEDY, custom_generate=ours)
    adapted.set_adapter("second")
    with refused:
        adapted.generate(**one(), **GREEDY, custom_generate=ours)
    adapted.set_adapter("first")
    assert torch.equal(adapted.generate(**one(), **GREEDY, custom_generate=ours), wanted)
    adapted.add_adapter("third", peft.LoraConfig(r=4, target_modules=["v_proj"]))  # not active
    assert torch.equal(adapted.generate(**one(), **GREEDY, custom_generate=ours), wanted)
    adapted.set_adapter("third")
    with refused:
        adapted.generate(**one(), **GREEDY, custom_generate=ours)
    adapted.set_adapter("first")
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.generate(**one(), **GREEDY, custom_generate=ours), wanted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_scaled_otherwise_than_when_it_was_wrapped_are_refused():
    """PEFT keeps scales as numbers beside the weights: the text was that of the scale before."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_model(), config).eval()
    ours = SelfSpeculativeLM(adapted, None, PLANS["exit"], num_draft_tokens=4).custom_generate
    wanted = adapted.generate(**one(), **GREEDY)
    with (
        peft.helpers.rescale_adapter_scale(adapted, 0.5),
        pytest.raises(
            ValueError,
            match=r"0\.self_attn\.q_proj runs other adapters .* or scales them otherwise",
        ),
    ):
        adapted.generate(**one(), **GREEDY, custom_generate=ours)
    assert torch.equal(adapted.generate(**one(), **GREEDY, custom_generate=ours), wanted)


class Watch(torch.nn.Module):
    def look(self, *_: object) -> None:
        pass


def test_hooks_from_before_and_those_that_let_gradients_through_stay():
    """The twin has another copy of a method of a module."""
    model = make_model()
    model.model.layers[1].mlp.register_forward_hook(Watch().look)
    ours = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4).custom_generate
    model.enable_input_require_grads()
    wanted = model.generate(**one(), **GREEDY)
    assert torch.equal(model.generate(**one(), **GREEDY, custom_generate=ours), wanted)
    model.model.layers[0].mlp.register_forward_hook(Watch().look)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp has a forward hook"):
        model.generate(**one(), **GREEDY, custom_generate=ours)


def test_a_model_that_shares_some_weights_is_another(model, exit_lm):
    student = make_model(num_hidden_layers=2)
    student.model.embed_tokens = model.model.embed_tokens
    with pytest.raises(ValueError, match="belongs to another model"):
        student.generate(**one(), **GREEDY, custom_generate=exit_lm.custom_generate)
    same = make_model()
    same.load_state_dict(model.state_dict(), assign=True)
    wanted = model.generate(**one(), **GREEDY)
    got = same.generate(**one(), **GREEDY, custom_generate=exit_lm.custom_generate)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("inputs", [one(), padded()], ids=["one", "left-padded"])
def test_a_cache_of_the_caller_is_filled(model, exit_lm, inputs):
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    text = model.generate(**inputs, **GREEDY, past_key_values=theirs)
    got = model.generate(
        **inputs, **GREEDY, past_key_values=ours, custom_generate=exit_lm.custom_generate
    )
    assert torch.equal(got, text)
    assert ours.get_seq_length() == theirs.get_seq_length() == text.shape[1] - 1
    more = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW), value=1)
    for layer, layer_of_theirs in zip(ours.layers, theirs.layers, strict=True):
        kept = more[:, None, :-1, None] == 1
        torch.testing.assert_close(
            layer.keys * kept, layer_of_theirs.keys * kept, atol=1e-4, rtol=1e-4
        )
    wanted = model.generate(text, attention_mask=more, past_key_values=theirs, **GREEDY)
    assert torch.equal(
        model.generate(text, attention_mask=more, past_key_values=ours, **GREEDY), wanted
    )


def test_a_cache_of_the_caller_that_cannot_be_filled_is_refused(model, exit_lm):
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="a StaticCache was asked for; leave out past_key_values"):
        model.generate(
            **one(), **GREEDY, past_key_values=cache, custom_generate=exit_lm.custom_generate
        )


def test_a_streamer_is_found_behind_a_function_around_ours(model, exit_lm):
    def around(*args, **kwargs):
        return exit_lm.custom_generate(*args, **kwargs)

    streamer = Collector()
    text = model.generate(**one(), **GREEDY, streamer=streamer, custom_generate=around)
    assert streamer.ended
    assert list(itertools.chain(*streamer.pieces)) == text[0].tolist()


@pytest.mark.parametrize("mask", [torch.ones(1, 11).long(), torch.tensor([[0] + [1] * 10])])
def test_a_mask_of_another_width_is_refused(model, exit_lm, mask):
    ids = one(9)["input_ids"]
    with pytest.raises(ValueError, match=r"input_ids of 9 tokens and .* of 11"):
        model.generate(ids, attention_mask=mask, **GREEDY, custom_generate=exit_lm.custom_generate)


def test_positions_that_are_counted_otherwise_are_refused(model, exit_lm):
    custom = {**GREEDY, "custom_generate": exit_lm.custom_generate}
    for inputs in (one(), padded()):
        mask = inputs["attention_mask"]
        counted = mask.cumsum(-1) - 1
        wanted = model.generate(**inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, position_ids=counted, **custom), wanted)
        with pytest.raises(ValueError, match="leave out position_ids"):
            model.generate(**inputs, position_ids=2 * counted, **custom)


def test_token_types_that_count_are_refused():
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    other = GPT2LMHeadModel(config).eval()
    lm = SelfSpeculativeLM(other, num_draft_tokens=0)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="token_type_ids that GPT2LMHeadModel adds"):
        other.generate(
            ids, token_type_ids=ids, max_new_tokens=2, custom_generate=lm.custom_generate
        )


def test_greedy_search_draws_no_random_number(model, exit_lm):
    before = torch.get_rng_state()
    model.generate(**one(), **GREEDY, custom_generate=exit_lm.custom_generate)
    assert torch.equal(torch.get_rng_state(), before)
