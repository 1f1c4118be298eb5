"""A grammar's masks while tokens are drafted, dropped and emitted: with lists of sentences."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from enumeration import Game, assert_same_law
from interrupting import assert_same_wherever_interrupted
from torch import Tensor

from layerskip import SamplingParams
from layerskip.constraint import AfterMarker, Constraint, Context, packed, unpacked
from layerskip.sampling import Sampler
from layerskip.verification import Case, judge

Text = tuple[int, ...]
EOS, VOCAB = 0, 5
PROMPT = (4, 4)
SENTENCES = ((1,), (1, 2), (1, 2, 3), (2, 1, 1), (3, 2, 1, 4), (3, 3))
# A marker: bytes of tokens 1 to 4 are those of "ab", "c", "bc" and "x"; 0 is the end.
BYTES = (b"", b"ab", b"c", b"bc", b"x")
ANYTHING = packed(torch.tensor(list(map(bool, BYTES))))


@dataclass
class Listed:
    """A matcher of listed sentences.

    Attributes:
        asked: texts that masks were filled for.
    """

    sentences: tuple[Text, ...] = SENTENCES
    text: Text = ()
    asked: list[Text] = field(default_factory=list)

    def following(self) -> set[int]:
        n = len(self.text)
        return {s[n] for s in self.sentences if len(s) > n and s[:n] == self.text}

    @property
    def complete(self) -> bool:
        return self.text in self.sentences

    def fill(self, mask: Tensor) -> None:
        self.asked.append(self.text)
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[sorted(self.following())] = True
        mask.copy_(packed(allowed))

    def advance(self, token: int) -> bool:
        if token not in self.following():
            return False
        self.text = (*self.text, token)
        return True

    def rollback(self, count: int) -> None:
        assert count <= len(self.text)
        self.text = self.text[: len(self.text) - count]

    def reset(self) -> None:
        self.text = ()

    def forced(self) -> Text:
        tokens: Text = ()
        ahead = Listed(self.sentences, self.text)
        while len(ahead.following()) == 1 and not ahead.complete:
            tokens += (token := ahead.following().pop(),)
            ahead.advance(token)
        return tokens


def constraint_of(
    matcher: Listed | None = None, eos: frozenset[int] = frozenset({EOS})
) -> Constraint:
    return Constraint(matcher or Listed(), prompt_length=len(PROMPT), eos_ids=eos, vocab_size=VOCAB)


def allowed(constraint: Constraint, text: Text, rows: int = 1) -> list[set[int]]:
    scores = constraint.masked(torch.zeros(rows, VOCAB), PROMPT + text)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]


ALL = set(range(VOCAB))


def test_every_row_is_masked_by_its_own_state():
    rows = allowed(constraint_of(), (3, 2, 1), 4)
    assert rows == [{1, 2, 3}, {2, 3}, {1}, {4}]


def test_the_end_is_allowed_where_the_text_is_whole_and_only_there():
    constraint = constraint_of()
    assert allowed(constraint, (1,)) == [{EOS, 2}]
    assert allowed(constraint, (2,)) == [{1}]
    assert allowed(constraint_of(eos=frozenset()), (1,)) == [{2}]


@pytest.mark.parametrize("outside", [-1, VOCAB, 5000])
def test_an_end_outside_the_vocabulary_is_none(outside):
    """A config may name one; -1 is not the last token."""
    for eos in (frozenset(), frozenset({EOS})):
        constraint, wanted = constraint_of(eos=eos | {outside}), constraint_of(eos=eos)
        for text in ((), (1,), (2,), (3, 3), (3, 2, 1)):
            assert allowed(constraint, text) == allowed(wanted, text)
            assert constraint.closed(PROMPT + text) == wanted.closed(PROMPT + text)


def test_the_end_is_never_text():
    assert allowed(constraint_of(Listed(((EOS, 1), (2,)))), ()) == [{2}]


@pytest.mark.parametrize("text", [(3, 3, 1, 1), (1, EOS, 2, 2), (2, 3, 1, 1)])
def test_rows_past_the_end_or_past_a_forbidden_token_are_left_alone(text):
    """vLLM #53777, xgrammar's "has terminated": legal to draft past the end, cut, not an error."""
    matcher = Listed()
    constraint = constraint_of(matcher)
    assert allowed(constraint, text, 3) == [ALL] * 3
    assert all(len(t) <= 2 for t in matcher.asked)
    assert allowed(constraint, (3,)) == [{2, 3}]  # and nothing is lost


def test_a_text_is_closed_where_nothing_but_the_end_may_follow():
    constraint = constraint_of()
    closed = [(3, 3), (1, 2, 3), (1, EOS), (1, 2, EOS)]
    assert all(constraint.closed(PROMPT + text) for text in closed)
    assert not any(
        constraint.closed(PROMPT + text) for text in [(), (1,), (1, 2), (3,), (2, 1), (4,)]
    )


def test_any_walk_gives_what_a_new_matcher_gives():
    """vLLM #44006, #46118: a matcher that drafts moved and one that only saw what was emitted."""
    rng, constraint, text = random.Random(5), constraint_of(), ()
    for _ in range(1200):
        keep = rng.randint(0, len(text))
        text = text[:keep] + tuple(rng.choices(range(VOCAB), k=rng.randint(0, 3)))
        text = text[:5]
        rows = rng.randint(1, len(text) + 1)
        assert allowed(constraint, text, rows) == allowed(constraint_of(), text, rows)
        assert constraint.closed(PROMPT + text) == constraint_of().closed(PROMPT + text)
        if rng.random() < 0.2:
            constraint.forget_before(len(PROMPT) + keep)


@pytest.mark.parametrize("before", [(), (3,)])
def test_an_interruption_at_any_place_changes_no_answer(before):
    """Ctrl-C, also where the matcher has moved and nobody has written it down."""

    def made() -> Constraint:
        return constraint_of(AfterMarker(Listed(), b"bc", BYTES, ANYTHING) if before else Listed())

    start, scores = (*PROMPT, *before), torch.zeros(2, VOCAB)
    questions: list[tuple[str, tuple]] = [
        ("guess", ((*start, 2), (), 4)),
        ("masked", (scores, (*start, 3, 2, 1))),
        ("closed", ((*start, 3, 3),)),
        ("guess", ((*start, 3), (2, 1, 1), 4)),
        ("few", ((*start, 1),)),
    ]
    assert_same_wherever_interrupted(made, questions)


def test_a_state_is_filled_once_for_draft_and_verify():
    matcher = Listed()
    constraint = constraint_of(matcher)
    for count in range(3):
        allowed(constraint, (3, 2, 1)[:count])
    allowed(constraint, (3, 2, 1), 4)
    assert sorted(matcher.asked) == [(), (3,), (3, 2), (3, 2, 1)]


def test_a_prepared_mask_is_not_made_again():
    matcher = Listed()
    constraint = constraint_of(matcher)
    constraint.prepare((*PROMPT, 3, 2), 3)
    made = [*matcher.asked]
    assert made == [(), (3,), (3, 2)]
    assert allowed(constraint, (3, 2), 3) == [{1, 2, 3}, {2, 3}, {1}]
    assert matcher.asked == made
    constraint.prepare((*PROMPT, 3, 3, 1, 1), 4)  # past the end: nothing to make
    assert allowed(constraint, (3, 3, 1, 1), 1) == [ALL]


def test_a_context_is_the_tokens_of_prompt_and_output():
    context, tokens = Context((4, 5)) + (6,) + [7, 8], (4, 5, 6, 7, 8)
    assert (tuple(context), len(context)) == (tokens, 5)
    for start in (None, 0, 1, 2, 4, 9, -1):
        for stop, step in ((None, None), (3, None), (None, 2)):
            assert context[start:stop:step] == tokens[start:stop:step]
    assert (context[0], context[-1]) == (4, 8)
    assert Context((), (6, 7))[:] == (6, 7)


def test_guesses_are_cut_at_the_first_forbidden_token():
    constraint = constraint_of()
    assert constraint.guess(PROMPT, (1, 2, 2), 9) == ((1, 2), False)
    assert constraint.guess(PROMPT, (4, 1), 9) == ((), False)
    assert constraint.guess((*PROMPT, 3), (3, EOS), 9) == ((3,), False)
    assert constraint.guess((*PROMPT, 2), (4,), 9) == ((1, 1), True)
    assert constraint.guess((*PROMPT, 3, 2), (1, 4), 1) == ((1,), True)
    assert constraint.guess((*PROMPT, 2), (4,), 1) == ((1,), True)
    assert constraint.guess((*PROMPT, 3, 3), (1,), 9) == ((), False)
    assert allowed(constraint, (3,)) == [{2, 3}]


def test_a_grammar_of_nothing_is_refused():
    for sentences in ((), ((),)):
        with pytest.raises(ValueError, match="no token of the vocabulary can begin"):
            constraint_of(Listed(sentences))
        behind = AfterMarker(Listed(sentences), b"go", [b"go"] * VOCAB, packed(torch.ones(VOCAB)))
        with pytest.raises(ValueError, match="no token of the vocabulary can begin"):
            constraint_of(behind)


def test_masks_survive_packing():
    for size in (1, 31, 32, 33, 100):
        mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
        words = packed(mask)
        assert words.dtype == torch.int32  # SGLang #24283: another type ends the scheduler
        assert words.shape == (-(-size // 32),)
        assert torch.equal(unpacked(words, size), mask)


def marked(text: Text, marker: bytes = b"bc") -> AfterMarker:
    matcher = AfterMarker(Listed(), marker, BYTES, ANYTHING)
    assert all(matcher.advance(token) for token in text)
    return matcher


@pytest.mark.parametrize("before", [(1, 2), (3,), (4, 4, 3), (2, 1, 2)])
def test_a_grammar_begins_behind_its_marker_however_that_is_spelt(before):
    """vLLM #31858, #34650, #43338: the marker inside a draft window, or of several tokens."""
    constraint = constraint_of(AfterMarker(Listed(), b"bc", BYTES, ANYTHING))
    rows = allowed(constraint, (*before, 3, 2), len(before) + 3)
    assert rows == [ALL - {EOS}] * len(before) + [{1, 2, 3}, {2, 3}, {1}]
    assert allowed(constraint, before[:-1]) == [ALL - {EOS}]  # the draft was wrong
    assert allowed(constraint, (*before[:-1], 4)) == [ALL - {EOS}]


def test_a_marker_matcher_rolls_back():
    rng = random.Random(2)
    for _ in range(1000):
        text = tuple(rng.choices(range(1, VOCAB), k=rng.randint(0, 4)))
        matcher, taken = AfterMarker(Listed(), b"bc", BYTES, ANYTHING), 0
        for token in text:
            if not matcher.advance(token):
                break
            taken += 1
        back = rng.randint(0, taken)
        matcher.rollback(back)
        fresh = marked(text[: taken - back])
        got, wanted = torch.zeros(1).int(), torch.zeros(1).int()
        matcher.fill(got)
        fresh.fill(wanted)
        assert torch.equal(got, wanted)
        assert matcher.complete == fresh.complete


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_law_is_plain_decoding_s(verification):
    for seed, most in ((1, 2), (2, 4), (3, 3), (4, 4)):
        game = game_of(seed, 1.0, verification)
        wanted = game.target_law()
        assert_same_law(wanted, game.round_law(most))
        assert {t[:-1] if t[-1] == EOS else t for t in wanted} == set(SENTENCES)


def game_of(seed: int, temperature: float, verification: str = "coupled") -> Game:
    params, constraint = SamplingParams(temperature=temperature), constraint_of()
    sampler = Sampler(params, 3, VOCAB, verification=verification, constraint=constraint)
    return Game(sampler, PROMPT, seed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_draft_gives_way_to_the_target_s_own_token(temperature):
    """SGLang #9187: stuck after a forced choice. A draft wrong from its first token on."""
    game = game_of(7, temperature)
    plain = judge(Case(game.sampler, game.logits(()), len(PROMPT), context=Context(PROMPT))).tokens
    for draft in ((4,), (EOS, 1), (2, 2, 2)):
        rows = torch.cat([game.logits(draft[:i]) for i in range(len(draft) + 1)])
        verdict = judge(Case(game.sampler, rows, len(PROMPT), draft, context=Context(PROMPT)))
        assert verdict.tokens[0] == plain[0]


def test_a_draft_vocabulary_without_an_allowed_token_drafts_nothing():
    for verification, temperature in (("coupled", 0.0), ("coupled", 1.0), ("block", 1.0)):
        sampler = Sampler(
            SamplingParams(temperature=temperature),
            3,
            VOCAB,
            verification=verification,
            constraint=constraint_of(),
        )
        trimmed = torch.full((1, VOCAB), float("-inf"))
        trimmed[0, 4] = 1.0
        assert sampler.draft(trimmed, len(PROMPT), len(PROMPT), PROMPT) is None


def test_warpers_come_after_the_masks_and_allow_nothing_more():
    def first_alone(ids: Tensor, scores: Tensor) -> Tensor:
        asked.append(scores.isfinite().nonzero()[:, 1].tolist())
        return torch.zeros_like(scores).masked_fill_(scores < scores.amax(), float("-inf"))

    asked: list[list[int]] = []
    sampler = Sampler(
        SamplingParams(temperature=1.0),
        3,
        VOCAB,
        constraint=constraint_of(),
        warpers=[first_alone, lambda ids, scores: scores.nan_to_num(neginf=0.0)],
    )
    assert sampler.reads_context
    logits = torch.arange(2.0 * VOCAB).view(2, VOCAB)
    kept = sampler.scores(logits, (*PROMPT, 3)).isfinite()
    assert asked == [[1, 2, 3], [2, 3]]
    assert kept.tolist() == constraint_of().masked(logits, (*PROMPT, 3)).isfinite().tolist()
