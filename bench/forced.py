"""Decoding along a known text: what a draft is worth on text that the model did not choose.

Which drafted tokens are right is counted beforehand, at every position of the text: those on which
the exit agrees with the full model there (``layerskip.calibration``; from the second token of a
draft on an estimate). Then the text is decoded for the clock: a processor leaves only its own next
token possible, the draft passes are real, and of the drafted tokens as many are right as was
counted. The processor runs once for each token drafted and verified, which counts against drafts.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from bad_drafters import Spoiling
from modes import Turn, Way, ours
from tasks import Asked
from torch import Tensor

from layerskip import SamplingParams, SelfSpeculativeLM
from layerskip.calibration import KnownTexts, Text
from layerskip.drafting import Draft, DraftRequest


class Told(Spoiling):
    """Drafts as many right tokens as were counted, then a wrong one. One row only.

    ``text`` and ``runs`` have to be set before each request: the tokens, prompt included, and for
    each slot from the prompt's end on how many drafted tokens are right in a row.
    """

    text: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()

    def spoilt(self, request: DraftRequest, draft: Draft) -> Draft:
        at = request.length - (len(self.text) - 1 - len(self.runs))
        right = self.runs[at] if at < len(self.runs) else 0
        if right >= len(draft.tokens):
            return draft
        # The processor made every drafted token the text's own. States are kept up to the last
        # token that stays.
        wrong = (draft.tokens[right] + 1) % self.stack.vocab_size
        tokens = (*draft.tokens[:right], wrong, *draft.tokens[right + 1 :])
        return replace(draft, tokens=tokens, shared=draft.shared[: right + 1])


def only(text: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor after which the text's own next token is the only one."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        at = min(ids.shape[1], len(text) - 1)
        left = torch.full_like(scores, float("-inf"))
        left[:, text[at]] = 0.0
        return left

    return processor


def texts_of(prompts: Sequence[Asked], tokens: int) -> list[Text]:
    """Prompts with at most so many tokens of what follows; those that nothing follows left out."""
    texts = [Text((*p.ids, *p.continuation[:tokens]), len(p.ids), i) for i, p in enumerate(prompts)]
    return [t for t in texts if t.window >= 2]


def runs_of(
    lm: SelfSpeculativeLM, text: Text, sampling: SamplingParams, most: int
) -> tuple[int, ...]:
    """For each slot from the prompt's end on: drafted tokens that are right in a row."""
    assert lm.plan is not None
    (runs,) = KnownTexts(lm.stack, [text], sampling=sampling).chains(lm.plan, most)
    return runs


def along(
    ways: Mapping[str, Way],
    told: Told,
    text: Text,
    runs: tuple[int, ...],
    chance: random.Random,
) -> dict[str, Turn]:
    """The text decoded, with drafts that are right as often as counted."""
    told.text, told.runs = text.ids, runs
    turns = ours(
        ways,
        [text.ids[: text.start]],
        chance,
        sampling=SamplingParams(),
        max_new_tokens=len(text.ids) - text.start,
        logits_processor=[only(text.ids)],
        ignore_eos=True,
    )
    wanted = text.ids[text.start :]
    assert all(turn.texts[0] == wanted for turn in turns.values()), "another text than the known"
    return turns
