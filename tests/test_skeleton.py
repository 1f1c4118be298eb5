"""The forward with its layers taken out: what enters once, what threads share, what is copied."""

import threading

import pytest
import torch
from toys import random_ids
from zoo import NUM_LAYERS, make_toy

from layerskip import SelfSpeculativeLM
from layerskip.cache import KVCache, Segment
from layerskip.model import DecoderStack
from layerskip.skeleton import Embedded

IDS = random_ids(20)


@pytest.fixture(scope="module", params=["gpt2", "opt", "bloom"])
def stack(request) -> DecoderStack:
    return DecoderStack(make_toy(request.param))


def run(stack: DecoderStack, cache: KVCache, *parts: tuple[int, ...]) -> torch.Tensor:
    """Hidden states of the last 6 tokens of ``IDS`` after these layers, in as many calls."""
    with torch.inference_mode():
        stack.prefill(IDS[:14], cache, 0)
        hidden = stack.embed(IDS[14:])
        for layers in parts:
            hidden = stack.run_layers(hidden, layers, cache, [Segment(0, 14, 6)])
    return hidden[:6]


def test_embedded_rows_stay_embedded_until_they_enter(stack):
    with torch.inference_mode():
        hidden = stack.embed(IDS[:3])
        rows = torch.stack([*hidden[:2], hidden[2]])
        assert isinstance(stack.run_layers(rows, (), None, []), Embedded)
        assert isinstance(torch.nn.functional.pad(rows, (0, 0, 0, 5)), Embedded)
        cache = stack.new_cache(num_rows=1, num_slots=20)
        assert type(stack.run_layers(rows, [0], cache, [Segment(0, 0, 3)])) is torch.Tensor


def test_positions_are_added_once_however_layers_are_split(stack):
    caches = [stack.new_cache(num_rows=1, num_slots=20) for _ in range(3)]
    whole = run(stack, caches[0], tuple(range(NUM_LAYERS)))
    assert torch.equal(run(stack, caches[1], (), (0, 1), (2,), (3, 4)), whole)
    assert torch.equal(run(stack, caches[2], (0,), (), (1, 2, 3, 4)), whole)


def test_positions_are_added_without_layer_0_too():
    """gpt2 by hand: token and position embeddings, layer 1, layer 3."""
    model = make_toy("gpt2")
    stack = DecoderStack(model)
    cache = stack.new_cache(num_rows=1, num_slots=20)
    with torch.inference_mode():
        hidden = stack.run_layers(stack.embed(IDS), (), cache, [Segment(0, 0, 20)])
        hidden = stack.run_layers(hidden, (1, 3), cache, [Segment(0, 0, 20)])
        body = model.transformer
        expected = (body.wte(torch.tensor(IDS)) + body.wpe(torch.arange(20)))[None]
        causal = torch.full((20, 20), -torch.inf).triu(1)[None, None]
        for i in (1, 3):
            expected = body.h[i](expected, attention_mask=causal)
    torch.testing.assert_close(hidden[:20], expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma2", "mixtral"])
def test_threads_share_one_stack(family):
    lm = SelfSpeculativeLM(make_toy(family), num_draft_tokens=0)
    prompts = [random_ids(n) for n in (3, 12, 30)]
    expected = [lm.generate(p, max_new_tokens=6).token_ids for p in prompts]
    barrier, results = threading.Barrier(len(prompts)), {}

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(3):
            results[number, turn] = lm.generate(prompts[number], max_new_tokens=6).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 9
    assert all(result == expected[number] for (number, _), result in results.items())


def test_an_exception_leaves_no_run_behind(monkeypatch):
    stack = DecoderStack(make_toy("mixtral"))
    cache = stack.new_cache(num_rows=1, num_slots=20)
    expected = run(stack, cache, tuple(range(NUM_LAYERS)))
    with monkeypatch.context() as patch:
        patch.setattr(stack.twin.model.layers[3].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(stack, cache, tuple(range(NUM_LAYERS)))
    forward = stack._forward
    assert forward._run.places is None
    assert forward._run.calls == []
    assert torch.equal(run(stack, cache, tuple(range(NUM_LAYERS))), expected)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral"])
def test_a_twin_is_a_whole_model_and_can_be_wrapped_again(family):
    model = make_toy(family)
    first = DecoderStack(model)
    second = DecoderStack(first.twin)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in first.twin.named_parameters()] == names
    runs = [run(s, s.new_cache(num_rows=1, num_slots=20), (0, 1)) for s in (first, second)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bloom"])
def test_a_prompt_goes_on_from_where_its_prefix_ends(monkeypatch, family):
    monkeypatch.setattr(DecoderStack, "prefill_chunk", 8)
    stack, ids = DecoderStack(make_toy(family)), random_ids(45)
    whole, pieces = (stack.new_cache(num_rows=2, num_slots=45) for _ in range(2))
    with torch.inference_mode():
        expected = stack.prefill(ids, whole, 1)
        stack.prefill(ids[:24], pieces, 1)
        got = stack.prefill(ids, pieces, 1, start=24)
        assert torch.equal(got, expected)  # chunks end where they always end
        assert torch.equal(pieces.keys, whole.keys)
        stack.prefill(ids[:19], pieces, 1)
        got = stack.prefill(ids, pieces, 1, start=19)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
