"""What a process sets for all of torch changes nothing here."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch
from adapters import make_adapter
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer, random_ids
from zoo import NUM_LAYERS, make_toy

from layerskip import (
    DraftPlan,
    Grammar,
    SamplingParams,
    SelfSpeculativeLM,
    constraint,
    ops,
    outcome,
)
from layerskip.calibration import KnownTexts, Text
from layerskip.exactness import products_agree
from layerskip.model import DecoderStack, pack_model
from layerskip.packed_forward import PackedModel
from layerskip.plan import PlanFile
from layerskip.seats import Ring


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_nothing_to_a_decoder(dtype):
    model, packed = make_model(dtype="bfloat16"), make_model(dtype="bfloat16")
    pack_model(packed)
    plain = DecoderStack(model)
    torch.set_default_dtype(dtype)
    try:
        changed = DecoderStack(model)
        tables = PackedModel(packed, ops)._rope
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed.exactness == plain.exactness
    assert {table.dtype for table in tables} == {torch.float32}


def test_the_default_device_is_nothing_to_a_decoder():
    model = make_model()
    grammar = Grammar.regex("[ae]+")
    lm = SelfSpeculativeLM(model, make_tokenizer(), PLANS["exit"])
    ask = {"max_new_tokens": 6, "num_draft_tokens": 2}
    sampled = ask | {"verification": "block", "sampling": SamplingParams(temperature=0.1, seed=0)}
    asked = [ask, ask | {"grammar": grammar}, sampled]
    before = [lm.generate([5, 6, 7, 5, 6, 7], **one).token_ids for one in asked]
    with torch.device("meta"):
        lm = SelfSpeculativeLM(model, make_tokenizer(), PLANS["exit"], lookup=True)
        after = [lm.generate([5, 6, 7, 5, 6, 7], **one).token_ids for one in asked]
        ring = Ring(4, torch.device("cpu"))
    assert before[:2] == after[:2]
    assert len(after[2]) == 6
    assert ring._host[0].device.type == "cpu"


def test_the_default_device_is_nothing_to_proofs_and_draft_vocabularies():
    model = make_model(dtype="bfloat16")
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(0, VOCAB_SIZE, 2)))
    plain = SelfSpeculativeLM(model, None, known, num_draft_tokens=2)
    agrees = products_agree(plain.stack, (8, 16))
    with torch.device("meta"):
        lm = SelfSpeculativeLM(model, None, known, num_draft_tokens=2)
        assert products_agree(lm.stack, (8, 16)) == agrees
        found = lm.generate([5, 6, 7], max_new_tokens=6)
    assert found.token_ids == plain.generate([5, 6, 7], max_new_tokens=6).token_ids


@pytest.mark.parametrize("module", [constraint, outcome])
def test_the_default_device_is_nothing_to_an_import(module):
    spec = importlib.util.spec_from_file_location("another", module.__file__)
    another = importlib.util.module_from_spec(spec)
    with torch.device("meta"), mock.patch.dict(sys.modules, another=another):
        spec.loader.exec_module(another)
    tensors = [v for v in vars(another).values() if isinstance(v, torch.Tensor)]
    assert tensors
    assert {t.device.type for t in tensors} == {"cpu"}


def test_the_default_device_is_nothing_to_a_guest_of_transformers():
    model, ids = make_model(), torch.tensor([random_ids(9)])
    custom = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=2).custom_generate
    ask = {"max_new_tokens": 6, "pad_token_id": 0, "return_dict_in_generate": True}
    sampled = ask | {"do_sample": True, "custom_generate": custom}
    before = model.generate(ids, **ask, custom_generate=custom)
    with torch.device("meta"):
        after = model.generate(ids, **ask, custom_generate=custom)
        assert model.generate(ids, **sampled).sequences.shape == (1, 15)
    assert torch.equal(before.sequences, after.sequences)
    for one, other in zip(before.past_key_values, after.past_key_values, strict=True):
        assert torch.equal(one[0], other[0])


def wrapped(kind):
    """With each of what runs passes."""
    if kind == "skeleton":
        plan = DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=2)
        return SelfSpeculativeLM(make_toy("gpt_neox"), None, plan, num_draft_tokens=2)
    model, plan = make_model(), PLANS["exit"]
    if kind == "packed":
        pack_model(model)
    adapter = make_adapter(model) if kind == "adapter" else None
    return SelfSpeculativeLM(
        model, None, plan, num_draft_tokens=2, packed=kind == "packed", exit_adapter=adapter
    )


def decoded(lm):
    """Tokens and log-probabilities with drafts and without, alone, together, streamed, and from a
    cache that is kept."""
    ask, (one, two) = {"max_new_tokens": 6, "logprobs": 1}, (random_ids(9), random_ids(5))
    kept = lm.generate(one, **ask, return_cache=True)
    rounds = [record for out in (kept, *lm.generate([one, two], **ask)) for record in out.rounds]
    rounds += lm.generate(one, **ask, num_draft_tokens=0).rounds
    rounds += lm.generate([*one, *kept.token_ids, 3], **ask, cache=kept.cache).rounds
    rounds += lm.stream(two, **ask)
    return [(r.token_ids, r.logprobs) for r in rounds]


@pytest.mark.parametrize("kind", ["dense", "skeleton", "packed", "adapter"])
def test_autocast_is_nothing_to_a_decoder(kind):
    lm = wrapped(kind)
    before = decoded(lm)
    with torch.autocast("cpu", torch.bfloat16):
        assert decoded(lm) == before
        within = wrapped(kind)
        assert torch.is_autocast_enabled("cpu")
    assert within.exactness == lm.exactness
    assert decoded(within) == before


def test_autocast_is_nothing_to_a_guest_of_transformers():
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=2)
    ask = {
        "max_new_tokens": 6,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
        "custom_generate": lm.custom_generate,
    }
    ids = torch.tensor([random_ids(9), random_ids(9, seed=1)])
    before = model.generate(ids, **ask)
    with torch.autocast("cpu", torch.bfloat16):
        after = model.generate(ids, **ask)
    assert torch.equal(before.sequences, after.sequences)
    assert torch.equal(torch.stack(before.logits), torch.stack(after.logits))


def test_autocast_is_nothing_to_measurements():
    """Costs are measured and plans tried as they decode."""
    with torch.autocast("cpu", torch.bfloat16):
        lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"])
        assert lm.controller.cost.key["dtype"] == "float32"
        text = Text(tuple(random_ids(12)), 4, 0)
        tried = KnownTexts(lm.stack, [text], sampling=SamplingParams())
        chains = tried.chains(PLANS["skipping"], 2)
    without = KnownTexts(lm.stack, [text], sampling=SamplingParams())
    assert chains == without.chains(PLANS["skipping"], 2)
    assert torch.equal(tried.states(NUM_LAYERS - 1), without.states(NUM_LAYERS - 1))
