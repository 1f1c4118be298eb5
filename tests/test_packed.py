"""The packed stack against the general one and transformers, by the operations' definitions."""

import functools

import pytest
import torch
from toys import VOCAB_SIZE, random_ids
from zoo import NUM_LAYERS, WINDOW, make_toy

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM
from layerskip.cache import Segment
from layerskip.model import DecoderStack, pack_model
from layerskip.packed import Noise, PackedStack, why_general
from layerskip.packing import FAMILIES

# What is special about a family, and what may be in others; zoo.py has the rest.
CASES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "granite": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {},
}
PROMPTS = [random_ids(n) for n in (2, 21, 40)]
PLANS = {
    "exit": DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=3),
    "skipping": DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=[3]),
}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


@functools.cache
def toy(family):
    """In fp32, its weights packed."""
    model = make_toy(family, **CASES[family])
    pack_model(model)
    return model


@functools.cache
def wrap(family, plan="exit", packed=True):
    settings = {"num_draft_tokens": 4, "lookup": False, "packed": packed}
    return SelfSpeculativeLM(toy(family), None, PLANS[plan], **settings)


def texts(outputs):
    return [out.token_ids for out in outputs]


def test_every_family_is_tried():
    assert [name.lower() for name in FAMILIES] == list(CASES)


@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_the_general_stack_and_of_transformers(family):
    general, packed = wrap(family, packed=False), wrap(family)
    expected = texts([general.generate(p, max_new_tokens=24) for p in PROMPTS])
    for plan in PLANS:
        outputs = wrap(family, plan).generate(PROMPTS, max_new_tokens=24)
        assert texts(outputs) == expected
        assert sum(out.stats.num_accepted_tokens for out in outputs) > 0
    sampled = general.generate(PROMPTS[1], max_new_tokens=24, sampling=SAMPLED)
    assert packed.generate(PROMPTS[1], max_new_tokens=24, sampling=SAMPLED).token_ids == (
        sampled.token_ids
    )
    ids = torch.tensor([PROMPTS[-1]])
    everything = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    out = toy(family).generate(ids, max_new_tokens=24, do_sample=False, **everything)
    assert tuple(out[0, len(PROMPTS[-1]) :].tolist()) == expected[-1]
