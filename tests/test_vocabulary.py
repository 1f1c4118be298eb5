"""A draft over a part of the vocabulary: which part, the head's columns, and exactness."""

import copy
import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verification import (
    BEFORE,
    DRAWN,
    NEARLY_0,
    NEVER,
    Models,
    Stopping,
    Tables,
    make_models,
    outcome,
)
from test_verification import decode as decode_tables
from torch import Tensor, nn
from toys import FAMILIES, VOCAB_SIZE, random_ids
from zoo import make_toy

from layerskip import SamplingParams, draft_head
from layerskip.cache import Segment
from layerskip.draft_head import DraftHead, HeadRows, greedy_kept, spread
from layerskip.model import DecoderStack
from layerskip.processors import processors_of
from layerskip.sampling import Sampler, greedy_tokens
from layerskip.vocabulary import CoverageMeter, choose_vocabulary, coverage

TEXTS = st.lists(st.lists(st.integers(0, 19), max_size=30), max_size=4)
KEPT = [1, 4, 5, 17, 100, 101, 102, 200, 300, 330]
EXTRA = [0, 5, 99, 329]


@settings(max_examples=40)
@given(TEXTS)
def test_ranks_are_frequencies_and_ties_go_to_the_lowest_id(texts):
    joined = [token for text in texts for token in text]
    ranked = sorted(set(joined), key=lambda token: (-joined.count(token), token))
    for size in range(1, len(ranked) + 1):
        kept = choose_vocabulary(texts, vocab_size=20, size=size, multiple=1)
        assert kept == tuple(sorted(ranked[:size]))


@settings(max_examples=60)
@given(TEXTS, st.floats(0, 1), st.integers(1, 4), st.sets(st.integers(0, 19), max_size=3))
def test_the_smallest_set_that_covers(texts, least, multiple, always):
    joined = [token for text in texts for token in text]
    rest = {"vocab_size": 20, "always": always, "multiple": multiple}
    kept = choose_vocabulary(texts, least_coverage=least, **rest)
    assert list(kept) == sorted(set(kept))
    assert always <= set(kept)
    assert len(kept) == 20 or len(kept) % multiple == 0
    if joined:
        assert coverage(kept, joined) >= least - 1e-9
    if len(kept) - multiple >= max(1, len(always)):
        fewer = choose_vocabulary(texts, size=len(kept) - multiple, **rest)
        assert coverage(fewer, joined) < least
        assert set(fewer) < set(kept)


def test_a_vocabulary_of_a_size_is_filled_from_below():
    assert choose_vocabulary([[7, 7, 9]], vocab_size=12, size=4, multiple=1) == (0, 1, 7, 9)
    assert choose_vocabulary([[7, 7, 9]], vocab_size=12, size=1, multiple=1) == (7,)
    assert len(choose_vocabulary([[7]], vocab_size=200, size=3)) == 128
    assert choose_vocabulary([[7]], vocab_size=9, size=3) == tuple(range(9))


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([[5]], {}, "least_coverage or size"),
        ([[5]], {"size": 3, "least_coverage": 0.5}, "least_coverage or size"),
        ([[12]], {"size": 3}, "between 0 and 11, got 12"),
        ([[5]], {"size": 3, "always": [-1]}, "between 0 and 11, got -1"),
        ([[5]], {"least_coverage": 1.5}, "between 0 and 1"),
        ([[5]], {"size": 3, "multiple": 0}, "at least 1"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(texts, changes, message):
    with pytest.raises(ValueError, match=message):
        choose_vocabulary(texts, vocab_size=12, **changes)


def test_coverage_is_a_share():
    assert coverage([1, 2], [1, 2, 3, 1]) == 0.75
    assert coverage([], []) == 1.0


def test_an_alarm_rings_when_texts_change_and_not_by_chance():
    meter = CoverageMeter(range(10), least_coverage=0.9, window=200)
    assert meter.coverage == 1.0
    meter.observe([10])
    assert meter.alarm is None  # one token says nothing
    meter.observe([*range(10), *range(9), 10] * 20)
    assert meter.coverage == pytest.approx(0.95)
    assert meter.alarm is None
    meter.observe([*range(8), 10, 11] * 20)
    assert meter.coverage == pytest.approx(0.8)
    assert "covers 80.0% of the last 200 tokens, and was chosen for 90.0%" in meter.alarm
    assert meter.news() == meter.alarm
    assert meter.news() is None  # it is known
    meter.observe([*range(10)] * 20)
    assert meter.news() is None
    meter.observe([10] * 100)
    assert meter.news() == meter.alarm


def hidden_of(stack: DecoderStack, count: int = 3) -> Tensor:
    """Hidden states of some tokens after two layers, without spare rows."""
    cache, ids = stack.new_cache(num_rows=1, num_slots=count), random_ids(count)
    with torch.inference_mode():
        return stack.run_layers(stack.embed(ids), (0, 1), cache, [Segment(0, 0, count)])[:count]


def check_columns(stack: DecoderStack) -> None:
    """Rows of few and of many ids, with and without extra ones, against the whole head."""
    assert stack.why_whole_head is None
    with torch.inference_mode():
        hidden = hidden_of(stack)
        whole = stack.logits(hidden)
        for ids, extra in ((KEPT, []), (KEPT, EXTRA), (range(VOCAB_SIZE - 2), EXTRA)):
            head = stack.head_over(reversed(ids)).including(extra)
            assert head.ids.tolist() == sorted({*ids, *extra})
            logits = head(hidden)
            assert logits.dtype == whole.dtype
            assert logits.shape == (len(whole), len(head.ids))
            tolerance = 4 * torch.finfo(stack.dtype).eps * whole.abs().max()
            torch.testing.assert_close(logits, whole[:, head.ids], rtol=0, atol=float(tolerance))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_columns_of_dense_layers(wrap, family, dtype):
    check_columns(wrap("exit", family, dtype).stack)


@pytest.mark.parametrize("family", ["cohere", "gemma2", "gpt2", "gptj", "granite", "opt"])
def test_columns_whatever_the_family_does_around_its_head(family):
    """A scale, a cap, a tied weight, a bias, a division, a projection."""
    check_columns(DecoderStack(make_toy(family)))


def copied_bytes(head: DraftHead) -> int:
    rows = [r for r in (head._base, head._extra) if r is not None]
    return sum(t.nbytes for r in rows for t in (r.weight, r.bias) if t is not None)


def test_only_the_chosen_rows_are_copied():
    stack = DecoderStack(make_toy("gptj"))
    tensors = {t.data_ptr() for t in stack.twin.parameters()}
    head = stack.head_over(KEPT)
    head(hidden_of(stack))
    row = (64 + 1) * 4  # a float32 weight of width 64 and its bias
    assert copied_bytes(head) == len(KEPT) * row
    assert copied_bytes(head.including(EXTRA)) == (len(KEPT) + 16) * row
    assert head.including(KEPT) is head
    trimmed = stack._forward._trimmed
    assert {t.data_ptr() for t in trimmed.parameters()} <= tensors


def test_extra_ids_add_up(wrap):
    stack = wrap("exit").stack
    head = stack.head_over(KEPT)
    once, twice = head.including([0, 99, 329]), head.including([99]).including([329, 0])
    hidden = hidden_of(stack)
    assert torch.equal(once.ids, twice.ids)
    assert torch.equal(once(hidden), twice(hidden))
    assert head.ids.tolist() == KEPT


def test_only_new_ids_are_looked_at(wrap, monkeypatch):
    """A row brings all of its text's in every round."""
    asked, checked = [], draft_head._checked_ids

    def recorded(ids, head):
        asked.append(sorted(ids))
        return checked(ids, head)

    head = wrap("exit").stack.head_over(KEPT).including([0, 99])
    monkeypatch.setattr(draft_head, "_checked_ids", recorded)
    assert head.including(frozenset({0, 99})) is head
    assert asked == []
    assert head.including(frozenset({0, 99, 329})).extra_ids == {0, 99, 329}
    assert asked == [[329]]


@pytest.mark.parametrize("extra", [[], EXTRA])
def test_rows_of_a_trimmed_head_keep_their_bits(wrap, extra):
    for dtype in ("float32", "bfloat16"):
        stack = wrap("exit", "llama", dtype).stack
        head, hidden = stack.head_over(range(256)).including(extra), hidden_of(stack, 19)
        with torch.inference_mode():
            together = head(hidden)
            for i in range(19):
                assert torch.equal(head(hidden[i : i + 1])[0], together[i])


def add(head: nn.Linear) -> None:
    with torch.no_grad():
        head.weight.add_(1.0)


def step(head: nn.Linear) -> None:
    head.weight.grad = torch.ones_like(head.weight)
    torch.optim.AdamW([head.weight]).step()


def load(head: nn.Linear) -> None:
    head.load_state_dict({"weight": head.weight.detach() * 2})


def copy_data(head: nn.Linear) -> None:
    head.weight.data.copy_(head.weight.data * 2)  # torch counts no change of this tensor


def swap_data(head: nn.Linear) -> None:
    head.weight.data = head.weight.data * 2


def edit_a_row(head: nn.Linear) -> None:
    with torch.no_grad():
        head.weight[1] += 1.0  # not one of the rows that are watched


@pytest.mark.parametrize("change", [add, step, load, copy_data, swap_data, edit_a_row])
def test_new_values_of_the_weights_are_seen(toy, change):
    model = copy.deepcopy(toy())
    stack = DecoderStack(model)
    head = stack.head_over(range(300)).including([310])
    assert head.fresh() is head
    hidden, before = hidden_of(stack), copied_bytes(head)
    change(model.lm_head)
    fresh = head.fresh()
    assert fresh.fresh() is fresh
    assert copied_bytes(fresh) == before
    with torch.inference_mode():
        torch.testing.assert_close(fresh(hidden), stack.logits(hidden)[:, fresh.ids])
        assert not torch.equal(fresh(hidden), head(hidden))


def test_tensors_without_a_counter_are_watched_too():
    with torch.inference_mode():
        stack = DecoderStack(make_toy("llama"))
    assert stack.twin.lm_head.weight.is_inference()
    head = stack.head_over(KEPT)
    assert head.fresh() is head
    with torch.inference_mode():
        stack.twin.lm_head.weight.mul_(2)
    assert head.fresh() is not head


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def other_class(model):
    class Head(nn.Linear):
        pass

    model.lm_head.__class__ = Head


def no_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "its head has hooks"),
        (other_class, "its head is Head, not a plain Linear"),
        (no_head, "its head is Sequential"),
    ],
)
def test_a_head_that_cannot_be_trimmed_is_refused(change, reason):
    model = make_toy("granite")
    change(model)
    stack = DecoderStack(model)
    assert reason in stack.why_whole_head
    with pytest.raises(ValueError, match=f"cannot be trimmed: {reason}"):
        stack.head_over(KEPT)


@pytest.mark.parametrize(
    "after",
    [
        lambda logits: logits + torch.arange(logits.shape[-1]),
        lambda logits: logits + logits.std(-1, keepdim=True),
        lambda logits: nn.functional.pad(logits, (0, max(0, VOCAB_SIZE - logits.shape[-1]))),
    ],
    ids=["place", "all", "width"],
)
def test_a_head_whose_columns_are_not_apart_is_refused(monkeypatch, after):
    stack = DecoderStack(make_toy("granite"))
    head = stack._forward.head
    monkeypatch.setattr(stack._forward, "head", lambda *args: after(head(*args)))
    with pytest.raises(ValueError, match="what follows its head depends on all columns"):
        stack.head_over(KEPT)


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE]])
def test_ids_outside_the_vocabulary_are_refused(wrap, ids):
    stack = wrap("exit").stack
    with pytest.raises(ValueError, match=r"between 0 and 330, got"):
        stack.head_over(ids)
    with pytest.raises(ValueError, match=r"between 0 and 330, got"):
        stack.head_over(KEPT).including(ids)
    with pytest.raises(ValueError, match="at least one id"):
        stack.head_over([])


def test_threads_and_errors_leave_the_whole_head_alone():
    stack = DecoderStack(make_toy("gemma2"))
    head, hidden = stack.head_over(KEPT), hidden_of(stack)
    with torch.inference_mode():
        whole, part = stack.logits(hidden), head(hidden)
        with pytest.raises(ZeroDivisionError):
            stack.logits(hidden, lambda _: 1 / 0)
        assert stack._forward._run.project is None
        assert torch.equal(stack.logits(hidden), whole)
    wrong = []

    def work(number: int) -> None:
        with torch.inference_mode():
            for _ in range(10):
                trimmed = number % 2
                got = head(hidden) if trimmed else stack.logits(hidden)
                if not torch.equal(got, part if trimmed else whole):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong


def test_ties_go_to_the_lowest_kept_id():
    ids = torch.tensor([2, 5, 9])
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 0.0, 4.0]]).bfloat16()
    assert greedy_kept(logits, ids) == [5, 2, 9] == greedy_tokens(spread(logits, ids, 12))


def subsets(vocab: int) -> list[Tensor]:
    sizes = range(1, vocab)
    return [torch.tensor(s) for n in sizes for s in itertools.combinations(range(vocab), n)]


@pytest.mark.parametrize("verification", DRAWN)
def test_the_law_is_the_target_s_whatever_is_kept(verification):
    """Every set of kept ids, another one at each position too."""
    for vocab, length, seed in itertools.product((2, 3, 4), (1, 2, 3), range(2)):
        models = make_models("any", vocab, length, seed)
        for i, kept in enumerate(choices := subsets(vocab)):
            q = []
            for at, table in enumerate(models.q):
                ids = choices[(i + at * seed) % len(choices)]
                rows = table.log().reshape(-1, vocab)
                q.append(spread(rows[:, ids], ids, vocab).double().softmax(-1).view(table.shape))
            trimmed = replace(models, q=q)
            assert float(q[0].sum()) == pytest.approx(1.0)
            for stopping in (NEVER, BEFORE):
                error = outcome(trimmed, verification, stopping).error
                assert error < NEARLY_0, f"{vocab}, {length}, {seed}, {kept.tolist()}"


VOCAB, PROMPT = 5, (0, 3)
RULES = {
    "temperature": {"temperature": 0.5},
    "top-k of more than is kept": {"top_k": 4},
    "top-k of less": {"top_k": 1},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "no token twice": {"no_repeat_ngram_size": 1},  # in the end nothing kept is left
    "bias": {"logit_bias": {0: 3.0, 2: -4.0}},
    "bad words": {"bad_words_ids": ((1,), (3, 4))},
    "end later": {"min_new_tokens": 2},
    "forced": {"forced_token_ids": (2, 1)},  # 2 is not kept
}
# A distribution that is not finite ends the draft before anything is drawn.
ENDED = Stopping(math.isnan, "before")


def sampler_with(rules: dict, verification: str = "token") -> Sampler:
    params = SamplingParams(**{"temperature": 1.0} | rules)
    processors = processors_of(
        params,
        prompt_length=len(PROMPT),
        eos_ids=frozenset({4}),
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    return Sampler(params, 0, VOCAB, verification=verification, processors=processors)


def models_under(rules: dict, length: int, kept: Tensor) -> Models:
    """Laws after every text, as decoding makes them of random logits."""
    sampler, generator = sampler_with(rules), torch.Generator().manual_seed(3)
    laws: list[list[Tensor]] = [[], []]
    for place, count in ((0, length + 1), (1, length)):
        for n in range(count):
            rows = []
            for text in itertools.product(range(VOCAB), repeat=n):
                logits = 1.5 * torch.randn(1, VOCAB, generator=generator)
                if place:
                    logits = spread(logits[:, kept], kept, VOCAB)
                rows.append(sampler.scores(logits, (*PROMPT, *text)).double().softmax(-1))
            laws[place].append(torch.cat(rows).view((VOCAB,) * (n + 1)))
    return Models(*laws)


@pytest.mark.parametrize("kept", [[1, 4], [0, 1, 3]])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_after_every_processor(rule, kept):
    models = models_under(RULES[rule], 2, torch.tensor(kept))
    outside = [i for i in range(VOCAB) if i not in kept]
    for q in models.q:
        sums = q.sum(-1)
        assert torch.allclose(sums[sums.isfinite()], torch.ones(()).double())
        if rule != "forced":
            assert float(q[..., outside].nan_to_num().sum()) == 0.0
    if rule == "forced":  # its score is finite whatever is kept: drafted, and right
        assert [float(q[..., t].min()) for q, t in zip(models.q, (2, 1), strict=True)] == [1, 1]
    for verification in DRAWN:
        assert outcome(models, verification, ENDED).error < NEARLY_0


@pytest.mark.parametrize("verification", DRAWN)
def test_a_draft_ends_where_nothing_kept_is_allowed(verification):
    sampler = sampler_with({"bad_words_ids": ((1,), (4,))}, verification)
    kept = torch.tensor([1, 4])
    row = spread(torch.zeros(1, 2), kept, VOCAB)
    assert sampler.draft(row, 5, 5, (*PROMPT, 2, 2, 2)) is None


class TrimmedTables(Tables):
    """A draft that may guess some ids, others at every position."""

    def _logits(self, text, *, draft):
        whole = super()._logits(text, draft=draft)
        if not draft:
            return whole
        choices = subsets(self.vocab)
        ids = choices[(self.seed + len(text)) % len(choices)]
        return spread(whole[:, ids], ids, self.vocab)


@pytest.mark.parametrize("rule", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.7}])
def test_coupled_texts_are_those_without_a_draft(rule):
    params = SamplingParams(**{"temperature": 0.8} | rule)
    accepted = 0
    for seed in range(25):
        tables, sampler = TrimmedTables(5, seed), Sampler(params, seed, 5)
        plain = decode_tables(tables, sampler, 8, 0)
        assert decode_tables(tables, sampler, 8, 3) == plain
        first = sampler.draft(tables.logits((), draft=True), 5, 5).token
        accepted += first == plain[0]
    assert accepted > 3  # a draft that is never right would pass as well


def test_rows_that_were_added_keep_their_logits_in_passes_without_spare_rows():
    """They are too few and change too often to be copied in blocks."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(512, 64, bias=True)
    x = torch.randn(8, 512, generator=generator)
    added = HeadRows.of(head, torch.arange(5), multiple=16)
    for count in (1, 3, 8):
        assert torch.equal(added(x[:count]), added(x)[:count])
        assert torch.equal(added(x[None, :count])[0], added(x)[:count])
