"""Drafts over a part of the vocabulary: the text is that of all of it."""

import pytest
import torch
from decoding import PROMPT, SAMPLED
from speculating import GREEDY, NEW, REPEATING, WITH_RULES, run
from toys import PLANS, VOCAB_SIZE, make_model, random_ids

from layerskip import SelfSpeculativeLM
from layerskip.plan import PlanFile


@pytest.fixture(scope="module")
def plain(toy) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(), None, num_draft_tokens=0)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, WITH_RULES], ids=["greedy", "0.8", "rules"])
@pytest.mark.parametrize("size", [8, 64, VOCAB_SIZE])
@pytest.mark.one_in(3)
def test_a_trimmed_vocabulary_changes_no_token(toy, plain, sampling, size):
    kept = tuple(range(0, VOCAB_SIZE, VOCAB_SIZE // size))[:size]
    known = PlanFile(PLANS["exit"], draft_vocabulary=kept)
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=4)
    outs = lm.generate([REPEATING, PROMPT], max_new_tokens=NEW, sampling=sampling)
    for out, prompt in zip(outs, (REPEATING, PROMPT), strict=True):
        assert out.token_ids == run(plain, prompt, sampling=sampling).token_ids
        assert out.stats.num_uncovered_tokens == sum(t not in kept for t in out.token_ids)
    assert lm.coverage_meter.coverage == pytest.approx(
        1 - sum(o.stats.num_uncovered_tokens for o in outs) / sum(len(o.token_ids) for o in outs)
    )


def test_trimmed_drafts_take_kept_tokens_and_those_of_the_row(toy):
    kept = (3, 50, 99)
    known = PlanFile(PLANS["exit"], draft_vocabulary=kept)
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=4, lookup=False)
    taken, lengths = [], []
    draft = lm._drafter.draft

    def spy(requests, *rest):
        drafts = draft(requests, *rest)
        taken.extend((r.own_ids, d.tokens) for r, d in zip(requests, drafts, strict=True))
        lengths.extend(r.length for r in requests)
        return drafts

    lm._drafter.draft = spy
    (out,) = lm.generate([PROMPT], max_new_tokens=12, sampling=SAMPLED, verification="token")
    assert taken
    assert all(set(tokens) <= own | set(kept) for own, tokens in taken)
    assert set(PROMPT) - set(kept) <= taken[0][0]
    whole = (*PROMPT, *out.token_ids)
    assert [own for own, _ in taken] == [{*whole[: n + 1]} - {*kept} for n in lengths]


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_texts_over_a_trimmed_vocabulary_do_not_depend_on_neighbours(toy, verification):
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(40)))
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=3, lookup=False)
    settings = {"max_new_tokens": 24, "sampling": SAMPLED, "verification": verification}
    prompts = [PROMPT, random_ids(20, 5), random_ids(9, 6)]
    together = lm.generate(prompts, **settings)
    assert [o.token_ids for o in together] == [
        lm.generate(p, **settings).token_ids for p in prompts
    ]


def test_a_vocabulary_beyond_the_model_is_refused(toy):
    known = PlanFile(PLANS["exit"], draft_vocabulary=(1, VOCAB_SIZE))
    with pytest.raises(ValueError, match=f"names token id {VOCAB_SIZE}; the model's vocabulary"):
        SelfSpeculativeLM(toy(), None, known)


def test_a_poor_vocabulary_raises_the_alarm(toy, caplog):
    known = PlanFile(PLANS["exit"], draft_vocabulary=(0,))
    lm = SelfSpeculativeLM(toy(), None, known, num_draft_tokens=2)
    run(lm, PROMPT)
    assert "the draft vocabulary covers" in caplog.text
    run(lm, PROMPT)
    assert caplog.text.count("the draft vocabulary covers") == 1, "each request is warned of"


def test_new_weights_reach_the_trimmed_head():
    model = make_model()
    known = PlanFile(PLANS["exit"], draft_vocabulary=tuple(range(VOCAB_SIZE)))
    lm = SelfSpeculativeLM(model, None, known, num_draft_tokens=4, lookup=False)
    run(lm, PROMPT)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    trimmed = run(lm, PROMPT)
    whole = run(
        SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4, lookup=False), PROMPT
    )
    assert trimmed.token_ids == whole.token_ids
    assert trimmed.stats.num_accepted_tokens == whole.stats.num_accepted_tokens


def test_a_vocabulary_of_one_token_may_be_drafted_over():
    known = PlanFile(PLANS["exit"], draft_vocabulary=(0,))
    lm = SelfSpeculativeLM(make_model(vocab_size=1), None, known, num_draft_tokens=2)
    assert lm.generate([0], max_new_tokens=5).token_ids == (0,) * 5
