"""A guest in transformers: a model is read, never changed, and refused if it does not fit."""

import gc
import threading
import weakref

import pytest
import torch
import transformers
from decoding import Interruption
from snapshots import check_untouched, hf_text, snapshot
from toys import DTYPES, FAMILIES, NUM_LAYERS, PLANS, SHAPES, VOCAB_SIZE, make_model, random_ids
from transformers import GPT2Config, GPT2LMHeadModel

from layerskip import DraftPlan, SelfSpeculativeLM, UnsupportedModelError, pass_sizes, roundings
from layerskip import exactness as exactness_module
from layerskip import layout as layout_module
from layerskip import model as model_module
from layerskip.cache import Segment
from layerskip.model import DecoderStack

PROMPTS = [random_ids(n) for n in (3, 130, 20)]
REFUSED_SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_the_user_s_model_is_untouched(family, training):
    model = make_model(family, "bfloat16")
    text = hf_text(model, PROMPTS[0])
    model.train(training)
    before = snapshot(model)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    lm.generate(PROMPTS, max_new_tokens=8)
    check_untouched(model, before)
    assert hf_text(model.eval(), PROMPTS[0]) == text


def test_the_twin_shares_every_tensor_and_no_module(toy):
    model = toy()
    twin = SelfSpeculativeLM(model).stack.twin
    assert [t.data_ptr() for t in twin.parameters()] == [t.data_ptr() for t in model.parameters()]
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    assert twin.config is not model.config


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(monkeypatch, error):
    model = make_model()
    text, before = hf_text(model, PROMPTS[0]), snapshot(model)
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = lm.generate(PROMPTS, max_new_tokens=8)
    with monkeypatch.context() as patch:  # in the middle of the layers of a later pass
        broken = Interruption(layout_module.decode_attention, 2 * NUM_LAYERS + 1, error)
        patch.setattr(layout_module, "decode_attention", broken)
        with pytest.raises(error):
            lm.generate(PROMPTS, max_new_tokens=8)
    check_untouched(model, before)
    assert hf_text(model, PROMPTS[0]) == text
    again = lm.generate(PROMPTS, max_new_tokens=8)
    assert [out.token_ids for out in again] == [out.token_ids for out in expected]


def test_two_plans_decode_side_by_side_in_threads(toy, wrap):
    """More than once each and interleaved: a shared table or module would mix them up."""
    expected = [wrap(None).generate(p, max_new_tokens=12).token_ids for p in PROMPTS]
    wrappers = [SelfSpeculativeLM(toy(), None, PLANS[name], num_draft_tokens=4) for name in PLANS]
    barrier, results = threading.Barrier(len(wrappers)), {}

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(3):
            outputs = [wrappers[number].generate(p, max_new_tokens=12) for p in PROMPTS]
            results[number, turn] = [out.token_ids for out in outputs]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(wrappers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 9
    assert all(texts == expected for texts in results.values())


def gpt1() -> torch.nn.Module:
    config = transformers.OpenAIGPTConfig(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    return transformers.OpenAIGPTLMHeadModel(config)


def t5() -> torch.nn.Module:
    config = transformers.T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def headless() -> torch.nn.Module:
    return make_model().model


def classifier() -> torch.nn.Module:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(pad_token_id=None, **REFUSED_SIZES, **sizes)
    return transformers.LlamaForSequenceClassification(config)


def dynamic_rope() -> torch.nn.Module:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return make_model(rope_parameters=rope)


def partial_rope() -> torch.nn.Module:
    model = make_model()
    model.config.rope_parameters = {"rope_type": "proportional", "rope_theta": 10_000.0}
    return model


def cut() -> torch.nn.Module:
    model = make_model()
    del model.model.layers[-1]
    return model


def quantised() -> torch.nn.Module:
    model = make_model()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def wide_head() -> torch.nn.Module:
    model = make_model()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB_SIZE + 5, bias=False)
    return model


REFUSALS = [
    (gpt1, r"architecture 'openai-gpt' is not supported: it is not among the tested families"),
    (t5, r"architecture 't5' is not supported: it is an encoder-decoder"),
    (headless, r"LlamaModel has no language-model head; load it as a causal LM"),
    (classifier, r"LlamaForSequenceClassification has no language-model head"),
    (wide_head, rf"the head gives {VOCAB_SIZE + 5} scores, .* says vocab_size={VOCAB_SIZE}; re"),
    (dynamic_rope, r"rope type 'dynamic' changes with the length of the text"),
    (partial_rope, r"rope type 'proportional' is not known; supported are default, linear, llama3"),
    (quantised, r"quantised weights are not supported"),
    (cut, r"num_hidden_layers=\d+, and no list of modules in LlamaForCausalLM has as many"),
    (lambda: torch.nn.Linear(2, 2), r"must be a transformers causal language model, got Linear"),
    (lambda: "llama", r"must be a transformers causal language model, got str"),
]


@pytest.mark.parametrize(("build", "reason"), REFUSALS)
def test_models_that_do_not_fit_are_refused_before_anything_is_built(monkeypatch, build, reason):
    forbid_building(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=reason):
        SelfSpeculativeLM(build())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_refused_with_their_name(monkeypatch, value):
    forbid_building(monkeypatch)
    model = make_model()
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 7] = value
    with pytest.raises(
        ValueError, match=r"weight model\.layers\.3\.mlp\.up_proj\.weight holds NaN"
    ):
        SelfSpeculativeLM(model)


def forbid_building(monkeypatch) -> None:
    monkeypatch.setattr(model_module, "share_twin", lambda _: pytest.fail("a twin was built"))


def test_large_float16_weights_are_not_damaged():
    """Finite weights whose sum is beyond float16."""
    model = make_model().to(torch.float16)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(8)
    assert SelfSpeculativeLM(model).stack.dtype == torch.float16


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_of_the_layers(wrap, family):
    third = NUM_LAYERS // 2
    expected = {"mistral": (40,) * NUM_LAYERS, "qwen2": (None,) * third + (50,) * third}
    assert wrap("exit", family).stack.windows == expected.get(family, (None,) * NUM_LAYERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_gives_the_logits_of_transformers(monkeypatch, toy, wrap, family):
    monkeypatch.setattr(DecoderStack, "prefill_chunk", 48)
    stack, ids = wrap("exit", family).stack, random_ids(130)
    cache = stack.new_cache(num_rows=2, num_slots=130)
    with torch.inference_mode():
        got = stack.prefill(ids, cache, 1)
        expected = toy(family)(torch.tensor([ids])).logits[0]
        exits = stack.all_exit_logits(ids, [2, NUM_LAYERS])
    assert got.shape == (VOCAB_SIZE,)
    torch.testing.assert_close(got, expected[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(exits[NUM_LAYERS], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(exits[2], expected, atol=0.1)
    assert torch.count_nonzero(cache.keys[:, 0]) == 0


@pytest.mark.parametrize("biased", [("q_proj",), ("k_proj", "v_proj")])
@pytest.mark.parametrize("fused", [False, True])
def test_some_projections_of_an_input_may_have_biases_and_others_none(biased, fused):
    """``fused``: their weights follow each other, as where they were one."""
    model = make_model()
    with torch.no_grad():
        for layer in model.model.layers:
            maps = {n: getattr(layer.self_attn, n) for n in ("q_proj", "k_proj", "v_proj")}
            rows = [len(linear.weight) for linear in maps.values()]
            parts = torch.cat([linear.weight for linear in maps.values()]).split(rows)
            for (name, linear), part in zip(maps.items(), parts, strict=True):
                if fused:
                    linear.weight = torch.nn.Parameter(part)
                if name in biased:
                    linear.bias = torch.nn.Parameter(torch.ones(len(linear.weight)))
    ids = random_ids(20)
    stack = DecoderStack(model)
    with torch.inference_mode():
        logits = stack.prefill(ids, stack.new_cache(num_rows=1, num_slots=20), 0)
        theirs = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_rows_never_agree_tokens_run_one_by_one(monkeypatch, toy, wrap, dtype):
    monkeypatch.setattr(exactness_module, "rows_agree", lambda *_: False)
    lm = SelfSpeculativeLM(toy("llama", dtype), None, PLANS["skipping"], num_draft_tokens=4)
    assert "run one by one" in lm.exactness
    assert not lm.stack.exactness.holds
    expected = [wrap(None, "llama", dtype).generate(p, max_new_tokens=8) for p in PROMPTS]
    outputs = lm.generate(PROMPTS, max_new_tokens=8, num_draft_tokens=3)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]


def hooked_model(*model: str) -> transformers.PreTrainedModel:
    """A model with a hook that does nothing: its layers run as the modules they are."""
    built = make_model(*model)
    for layer in built.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    return built


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_run_as_modules_are_exact_too(wrap, dtype):
    lm = SelfSpeculativeLM(
        hooked_model("qwen3", dtype), None, PLANS["skipping"], num_draft_tokens=4
    )
    assert lm.stack.backend != wrap("exit", "qwen3", dtype).stack.backend
    plain = [lm.generate(p, max_new_tokens=12, num_draft_tokens=0) for p in PROMPTS]
    drafted = lm.generate(PROMPTS, max_new_tokens=12, num_draft_tokens=4)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    if dtype == "float32":
        dense = wrap("exit", "qwen3", dtype).generate(PROMPTS, max_new_tokens=12)
        assert [out.token_ids for out in dense] == [out.token_ids for out in plain]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("build", [make_model, hooked_model])
@pytest.mark.one_in(2)
def test_rows_keep_their_bits_in_passes_that_were_proven(build, shape, dtype, passes):
    """The probe reads one random text. What it finds has to hold for others too."""
    stack = DecoderStack(build("llama", dtype, shape))
    size, width = passes * stack.exactness.row_quantum, SHAPES[shape]["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(25):
        hidden = torch.randn(size, width, generator=generator).to(DTYPES[dtype])
        together, apart = (stack.new_cache(num_rows=1, num_slots=64) for _ in range(2))
        with torch.inference_mode():
            got = stack.run_layers(hidden, [0], together, [Segment(0, 3, size)])
            for i in range(size):
                alone = stack.run_layers(hidden[i : i + 1], [0], apart, [Segment(0, 3 + i, 1)])
                assert torch.equal(got[i], alone[0]), f"row {i} of {size}"
        assert torch.equal(together.keys[0], apart.keys[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_sees_scores_summed_in_another_order(monkeypatch, dtype):
    """Which 16-bit outputs hide, but for one in some 100,000."""
    model, attend = make_model("llama", dtype), roundings.decode_attention

    def attend_otherwise(q, k, *rest):
        backwards = q.shape[1] == 4
        return attend(q.flip(-1), k.flip(-1), *rest) if backwards else attend(q, k, *rest)

    assert 4 in DecoderStack(model).exactness.tiles
    monkeypatch.setattr(roundings, "decode_attention", attend_otherwise)
    stack = DecoderStack(model)
    assert stack.exactness.holds
    assert 4 not in stack.exactness.tiles


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_probe_sees_values_summed_in_another_order(monkeypatch, dtype, shape):
    """Where slots are many; no pass of several rows is promised if nothing helps."""
    model, attend = make_model("llama", dtype, shape), roundings.decode_attention

    def attend_otherwise(q, k, v, mask, *rest):
        if k.shape[1] > 512:
            k, v, mask = k.flip(1), v.flip(1), mask.flip(-1)
        return attend(q, k, v, mask, *rest)

    assert DecoderStack(model).exactness.holds
    monkeypatch.setattr(roundings, "decode_attention", attend_otherwise)
    stack = DecoderStack(model)
    assert not stack.exactness.holds
    assert "run one by one" in stack.exactness.reason


def test_what_was_proven_of_attention_is_proven_again_with_other_threads(monkeypatch, caplog):
    stack = DecoderStack(make_model("llama", "bfloat16"))
    quantum = stack.exactness.row_quantum
    assert stack.pass_sizes.largest(quantum) == quantum
    monkeypatch.setattr(pass_sizes, "attention_agrees", lambda _: False)
    assert stack.pass_sizes.largest(quantum) == quantum
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert not caplog.records
    assert stack.pass_sizes.largest(quantum) == stack.pass_sizes.largest(2 * quantum) == 1
    (told,) = (r.getMessage() for r in caplog.records)
    assert "with 1000 threads" in told
    assert "run one by one" in told
    assert "exact=False" in told


def test_a_stack_that_nobody_holds_is_freed_at_once():
    """Its weights may be gigabytes: they do not wait for the collector of circles."""
    gc.collect()
    gc.disable()
    try:
        stack = DecoderStack(make_model())
        gone = weakref.ref(stack)
        with torch.inference_mode():
            stack.pass_sizes.largest(2 * stack.exactness.row_quantum)
        del stack
        assert gone() is None
    finally:
        gc.enable()


def test_heads_of_one_number_are_probed():
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=4, n_layer=2, n_head=4)
    lm = SelfSpeculativeLM(GPT2LMHeadModel(config), None, DraftPlan(2, (0,)))
    ask = {"max_new_tokens": 6, "ignore_eos": True}
    plain = lm.generate([5, 6, 7], **ask, num_draft_tokens=0)
    assert lm.generate([5, 6, 7], **ask, num_draft_tokens=3).token_ids == plain.token_ids
