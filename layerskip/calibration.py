"""Known texts that draft plans are tried on: what a plan would have drafted, and how much of it the
full model confirms.

The model's choice at every position of a text is made once. A plan's rounds are then replayed
without their verify passes: at every position its draft goes on as long as it agrees. Draft passes
are the decoder's own: each drafted token reads full-depth keys and values of the text before the
round, and the draft's own from there on. Where the text is what the model itself emits with this
noise, the counts are those of real rounds, exactly. Along any other text (a prompt's known
continuation) the text's tokens are fed in place of the model's choices, so that from the second
drafted token on the counts are an estimate.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from layerskip.ambient import Decoding
from layerskip.api import SelfSpeculativeLM
from layerskip.cache import Segment
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams, following_seed
from layerskip.plan import DraftPlan
from layerskip.prompts import Example
from layerskip.sampling import Sampler

ROWS = 8  # texts in one pass: as many rows as exact passes are padded to anyway
MAX_TOKEN_CHARACTERS = 16  # on average; more of a continuation is not tokenized

Chains = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Text:
    """A text to draft along.

    Attributes:
        ids: its tokens.
        start: slots below hold the prompt; every slot from here on is drafted from, but for the
            last token's, which nothing follows.
        seed: of the noise.
    """

    ids: tuple[int, ...]
    start: int
    seed: int

    @property
    def window(self) -> int:
        """Slots that are drafted from."""
        return len(self.ids) - 1 - self.start


def texts_to_draft_along(
    lm: SelfSpeculativeLM,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    max_texts: int,
    max_tokens: int,
) -> list[Text]:
    """Prompts with their known continuations, or with what the model writes where none is known.

    The model writes with ``sampling``, plainly; text i with the seed ``sampling.seed + i``,
    or behind the largest one from 0 on.

    Raises:
        ValueError: no prompt is left that fits into the model and has three tokens after it.
    """
    if lm.tokenizer is None:
        raise ValueError("a plan is searched on text, and this model has no tokenizer")
    texts: list[Text] = []
    for example in examples:
        if len(texts) == max_texts:
            break
        seed = following_seed(sampling.seed or 0, len(texts))
        prompt = list(lm.tokenizer(example.prompt)["input_ids"])
        room = min(max_tokens, lm.stack.max_positions - len(prompt))
        if not prompt or room < 3:
            continue
        if example.continuation:
            follows = example.continuation[: MAX_TOKEN_CHARACTERS * room]
            ids = list(lm.tokenizer(example.prompt + follows)["input_ids"])
        else:
            own = replace(sampling, seed=seed)
            out = lm.generate(prompt, max_new_tokens=room, sampling=own, num_draft_tokens=0)
            ids = [*prompt, *out.token_ids]
        # The first token after a prompt comes from the prefill and is never drafted.
        text = Text(tuple(ids[: len(prompt) + room]), len(prompt), seed)
        if text.window >= 2:
            texts.append(text)
    if not texts:
        raise ValueError(
            "no prompt leaves room for three more tokens in the model's "
            f"{lm.stack.max_positions} positions, or none is followed by as many"
        )
    return texts


class KnownTexts:
    """Texts at full depth, for trying plans on.

    Memory, of the model's device: every text's keys and values twice, its noise (window x
    vocabulary x 4 bytes), and of the exits' logits one exit and one text at a time.

    Args:
        stack: the model.
        texts: to draft along.
        sampling: how tokens are chosen; each text has its own seed.
        samples: positions of each text whose hidden states are kept.
    """

    def __init__(
        self,
        stack: DecoderStack,
        texts: Sequence[Text],
        *,
        sampling: SamplingParams,
        samples: int = 4,
    ) -> None:
        self.stack, self.texts = stack, tuple(texts)
        starts = range(0, len(texts), ROWS)
        self.groups = [_Group(stack, self.texts[i : i + ROWS], sampling, samples) for i in starts]

    def exit_chains(self, exit_layer: int, most: int) -> Chains:
        """``chains`` of an exit, from the one pass that the texts were read in.

        Shared layers leave what full depth leaves, so an exit's drafts agree or not wherever its
        round began.
        """
        agree = [a for group in self.groups for a in group.agreements[exit_layer]]
        return tuple(_runs(a, most) for a in agree)

    def chains(
        self, plan: DraftPlan, most: int, vocabulary: Collection[int] | None = None
    ) -> Chains:
        """For each text and each slot drafted from: drafted tokens until the first disagreement,
        at most ``most``.

        Args:
            plan: layers of the draft.
            most: tokens of a draft.
            vocabulary: ids that it may guess, beside those of its text so far; None: all.
        """
        if vocabulary is None and plan.shared_depth == len(plan.layers) < plan.num_layers:
            return self.exit_chains(len(plan.layers), most)
        kept = None
        if vocabulary is not None:
            kept = torch.zeros(self.stack.vocab_size, dtype=torch.bool, device=self.stack.device)
            kept[list(vocabulary)] = True
        return tuple(c for group in self.groups for c in group.chains(plan, most, kept))

    def states(self, depth: int) -> Tensor:
        """Hidden states of the samples after ``depth`` layers of the full model, 1 or more:
        ``(samples, hidden)``."""
        return torch.cat([group.states[depth - 1] for group in self.groups])

    def restore(self) -> None:
        """Full-depth keys and values again in every slot."""
        for group in self.groups:
            group.restore()

    def run_layer(self, layer: int, drafts: Sequence[Tensor]) -> list[Tensor]:
        """One layer on several drafts' hidden states of the samples, ``(samples, hidden)`` each.

        A sample attends to its text at full depth and to itself as the draft has it. Leaves
        the samples' slots of this layer overwritten.
        """
        counts = [len(group.samples) for group in self.groups]
        pieces = zip(*(draft.split(counts) for draft in drafts), strict=True)
        parts = [
            group.run_layer(layer, piece) for group, piece in zip(self.groups, pieces, strict=True)
        ]
        return [torch.cat(part) for part in zip(*parts, strict=True)]


def _runs(agree: Sequence[bool], most: int) -> tuple[int, ...]:
    """From each place on: how many agree in a row."""
    backwards = accumulate(reversed(agree), lambda run, a: run + 1 if a else 0, initial=0)
    return tuple(min(run, most) for run in [*backwards][1:][::-1])


def walk(chain: Sequence[int], num_draft_tokens: int) -> list[int]:
    """Accepted tokens of each round along one text, as decoding with ``num_draft_tokens`` has
    them; rounds that the text's end would cut are left out."""
    accepted, slot = [], 0
    while slot + num_draft_tokens < len(chain):  # a draft leaves room for the token behind it
        accepted.append(min(chain[slot], num_draft_tokens))
        slot += accepted[-1] + 1
    return accepted


class _Group:
    """Up to ``ROWS`` texts in one cache.

    Attributes:
        agreements: by exit, for each text, whether the exit's choice at each slot is the model's.
        samples: ``(text's row, slot)`` of kept hidden states; of one text from its last slot down.
        states: by depth from 1 on, ``(samples, hidden)``.
    """

    @Decoding()
    def __init__(
        self, stack: DecoderStack, texts: Sequence[Text], sampling: SamplingParams, samples: int
    ) -> None:
        self.stack, self.texts = stack, texts
        longest = max(len(t.ids) for t in texts)
        self.cache = stack.new_cache(num_rows=len(texts), num_slots=longest)
        self.samplers = [Sampler(sampling, t.seed, stack.vocab_size) for t in texts]
        self.targets: list[list[int]] = []
        self.agreements: dict[int, list[list[bool]]] = {e: [] for e in range(1, stack.num_layers)}
        read = [self._read(row, text) for row, text in enumerate(texts)]
        spread = [_spread(t, samples) for t in texts]
        # In turns: the samples that one pass takes, one of each text, follow each other.
        turns = zip_longest(*([(r, s) for s in slots] for r, slots in enumerate(spread)))
        self._turns = [[place for place in turn if place is not None] for turn in turns]
        self.samples = [place for turn in self._turns for place in turn]
        self.states = [
            torch.stack([read[r][depth][s - texts[r].start] for r, s in self.samples])
            for depth in range(stack.num_layers)
        ]
        self._whole = [self.cache.copied(r, t.ids, stack) for r, t in enumerate(texts)]

    def _read(self, row: int, text: Text) -> list[Tensor]:
        """One pass at full depth: hidden states of the window's slots after each layer."""
        stack, window, sampler = self.stack, text.window, self.samplers[row]
        stack.prefill(text.ids[: text.start], self.cache, row)
        hidden = stack.embed(text.ids[text.start : -1])
        segments = [Segment(row, text.start, window)]
        states = []
        for layer in range(stack.num_layers):
            hidden = stack.run_layers(hidden, [layer], self.cache, segments)
            states.append(hidden[:window])
        target = sampler.pick(stack.logits(states[-1])[:window], text.start + 1)
        self.targets.append(target)
        for e, agreements in self.agreements.items():
            picked = sampler.pick(stack.logits(states[e - 1])[:window], text.start + 1)
            agreements.append([a == b for a, b in zip(picked, target, strict=True)])
        return states

    @Decoding()
    def restore(self) -> None:
        """Full-depth keys and values again in every slot."""
        for row, text in enumerate(self._whole):
            self.cache.restore(row, text, len(text.token_ids))

    @Decoding()
    def chains(
        self, plan: DraftPlan, most: int, kept: Tensor | None = None
    ) -> list[tuple[int, ...]]:
        """As of ``KnownTexts``, ``kept`` being ``(vocab,)`` bool. From the last slot down: a draft
        overwrites its own slots and later ones, and those before it are at full depth still."""
        self.restore()
        lengths = [[0] * t.window for t in self.texts]
        for back in range(1, max(t.window for t in self.texts) + 1):
            going = [r for r, t in enumerate(self.texts) if back <= t.window]
            for drafted in range(min(most, back)):
                if not going:
                    break
                going = self._agreeing(plan, going, back - drafted, kept)
                for row in going:
                    lengths[row][self.texts[row].window - back] += 1
        return [tuple(chain) for chain in lengths]

    def _agreeing(
        self, plan: DraftPlan, rows: Sequence[int], back: int, kept: Tensor | None
    ) -> list[int]:
        """Those of ``rows`` whose draft from ``back`` slots before the window's end agrees."""
        stack = self.stack
        slots = [len(self.texts[r].ids) - 1 - back for r in rows]
        segments = [Segment(r, s, 1) for r, s in zip(rows, slots, strict=True)]
        hidden = stack.embed([self.texts[r].ids[s] for r, s in zip(rows, slots, strict=True)])
        logits = stack.logits(stack.run_layers(hidden, plan.layers, self.cache, segments))
        if kept is not None:
            logits = logits[: len(rows)].masked_fill(~self._known(kept, rows, slots), float("-inf"))
        return [
            r
            for i, (r, s) in enumerate(zip(rows, slots, strict=True))
            if self.samplers[r].pick(logits[i : i + 1], s + 1)[0] == self.targets[r][-back]
        ]

    def _known(self, kept: Tensor, rows: Sequence[int], slots: Sequence[int]) -> Tensor:
        """``(rows, vocab)`` bool: kept ids, and those of each text up to its slot. Drafted tokens
        before the slot are in the text, and were in the draft's vocabulary: they add none."""
        known = kept.repeat(len(rows), 1)
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            known[i, list(self.texts[row].ids[: slot + 1])] = True
        return known

    @Decoding()
    def run_layer(self, layer: int, drafts: Sequence[Tensor]) -> list[Tensor]:
        """As of ``KnownTexts``. All drafts of one turn before the next: a turn's slots lie after
        those that later turns attend to."""
        outputs: list[list[Tensor]] = [[] for _ in drafts]
        done = 0
        for turn in self._turns:
            segments = [Segment(row, slot, 1) for row, slot in turn]
            for draft, output in zip(drafts, outputs, strict=True):
                hidden = draft[done : done + len(turn)]
                hidden = self.stack.run_layers(hidden, [layer], self.cache, segments)
                output.append(hidden[: len(turn)])
            done += len(turn)
        return [torch.cat(output) for output in outputs]


def _spread(text: Text, count: int) -> list[int]:
    """``count`` slots of a text's window, evenly spread, from the last one down."""
    count = min(count, text.window)
    return [text.start + i * text.window // count for i in reversed(range(count))]
