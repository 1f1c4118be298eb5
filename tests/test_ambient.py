"""What a process sets for all of torch changes nothing here."""

import pytest
import torch
from toys import PLANS, make_model, make_tokenizer

from layerskip import Grammar, SamplingParams, SelfSpeculativeLM, ops
from layerskip.model import DecoderStack, pack_model
from layerskip.packed_forward import PackedModel
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
