"""The last step of plan search: over which tokens to draft, and whether leaving any out pays.

Token ids are ranked by one half of the texts (and by more text of the user's, if there is some);
coverage and acceptance are those of the other half, which the ranking has not seen.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from layerskip.api import SelfSpeculativeLM
from layerskip.bootstrap import median_interval
from layerskip.calibration import KnownTexts, Text
from layerskip.cost import CostTable, Curve
from layerskip.journal import Journal
from layerskip.plan import DraftPlan
from layerskip.prediction import Counts, Found, count, predict
from layerskip.profiling import measure_cost
from layerskip.timing import PLAIN, Way, time_in_turn
from layerskip.vocabulary import choose_vocabulary, coverage

if TYPE_CHECKING:
    from layerskip.search import SearchSettings

COVERAGES = (0.9, 0.95, 0.97, 0.99)  # of the text that is ranked: a size is tried for each
LEAST_TOKENS = 4  # of ranked text for each kept id
GAIN = 1.02  # predicted speed over that with the whole head; less is noise
DOUBT = 2.0  # standard errors that the promised coverage lies below the measured one
STEPS = len(COVERAGES) + 2
CHECKED_TEXTS = 8  # that a choice is timed on, at most


@dataclass(frozen=True)
class TriedVocabulary(Found):
    """A draft vocabulary and what was found about it along texts that it was not ranked on.

    Attributes:
        ids: kept, ascending; None: all, for comparison.
        coverage: share of the texts' emitted tokens among them.
        promised: what the coverage is to be at least, by the texts' spread.
        over_whole: speed in units of that with the whole head, timed in turn; None where it was
            not timed.
    """

    ids: tuple[int, ...] | None
    coverage: float
    promised: float
    over_whole: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "num_ids": None if self.ids is None else len(self.ids),
            "coverage": self.coverage,
            "promised_coverage": self.promised,
            **super().to_dict(),
            "measured_over_whole_head": self.over_whole,
        }


@dataclass(frozen=True)
class Trimming:
    """What came of it.

    Attributes:
        chosen: the vocabulary to draft over; None: all of it.
        cost: of passes with it; None likewise.
        tried: the whole vocabulary first, then the smallest.
        ranked_tokens: of the text that ids were ranked by.
        verdict: one sentence.
    """

    chosen: TriedVocabulary | None
    cost: CostTable | None
    tried: tuple[TriedVocabulary, ...]
    ranked_tokens: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "verdict": self.verdict,
            "ranked_tokens": self.ranked_tokens,
            "tried": [t.to_dict() for t in self.tried],
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
        }


def vocabularies(
    texts: Sequence[Sequence[int]], vocab_size: int, always: Collection[int]
) -> list[tuple[int, ...]]:
    """Vocabularies that cover a share of ``texts``, the smallest first, without the whole one;
    those that ``texts`` are too short for are left out."""
    tokens = sum(map(len, texts))
    chosen = [
        choose_vocabulary(texts, vocab_size=vocab_size, least_coverage=share, always=always)
        for share in COVERAGES
    ]
    most = min(vocab_size - 1, tokens // LEAST_TOKENS)
    return [ids for ids in dict.fromkeys(chosen) if len(ids) <= most]


def measured_coverage(ids: Collection[int], texts: Sequence[Text]) -> tuple[float, float]:
    """Of what the texts emit, over all of them; and the least to promise, by their spread."""
    emitted = [text.ids[text.start :] for text in texts]
    share = coverage(ids, [token for tokens in emitted for token in tokens])
    # Texts differ by more than their tokens' number says: whichever error is larger.
    error = math.sqrt(share * (1.0 - share) / sum(map(len, emitted)))
    if len(texts) > 1:
        shares = [coverage(ids, tokens) for tokens in emitted]
        error = max(error, statistics.stdev(shares) / math.sqrt(len(texts)))
    return share, max(0.0, share - DOUBT * error)


def with_head_of(table: CostTable, trimmed: CostTable) -> CostTable:
    """Costs with the head of another table, in units of the full passes beside it: the two were
    measured at different times, and all else is the same."""
    pace = table.verify_pass(1, 0) / trimmed.verify_pass(1, 0)
    head = trimmed.draft_head
    seconds = tuple(tuple(pace * t for t in line) for line in head.seconds)
    return replace(table, draft_head=Curve(head.rows, head.contexts, seconds), key=trimmed.key)


def _whole(verdict: str, tried: Sequence[TriedVocabulary] = (), ranked_tokens: int = 0) -> Trimming:
    return Trimming(None, None, tuple(tried), ranked_tokens, verdict)


@dataclass(frozen=True, eq=False)
class Trimmer:
    """One search for a draft vocabulary that makes a plan faster.

    Attributes:
        lm: the model.
        plan: layers of its draft.
        table: their costs, with the whole head.
        texts: to rank ids by, and to try vocabularies on: two or more.
        known_texts: these texts at full depth; asked for when something is not in the journal.
        journal: keeps every measurement.
        say: told what comes next.
        settings: of the search.
        more_texts: token ids of more of the user's text, to rank by.
    """

    lm: SelfSpeculativeLM
    plan: DraftPlan
    table: CostTable
    texts: Sequence[Text]
    known_texts: Callable[[], KnownTexts]
    journal: Journal
    say: Callable[[str], None]
    settings: "SearchSettings"
    more_texts: Sequence[Sequence[int]] = ()

    def run(self) -> Trimming:
        """Rank, try, and time the best."""
        if self.lm.stack.why_whole_head is not None:
            return _whole(f"drafts use the whole head: {self.lm.stack.why_whole_head}")
        ranked = [*(t.ids for t in self.texts[::2]), *self.more_texts]
        tokens, vocab_size = sum(map(len, ranked)), self.lm.stack.vocab_size
        special = getattr(self.lm.tokenizer, "all_special_ids", ())
        always = {i for i in (*special, *self.lm.eos_ids) if 0 <= i < vocab_size}
        found = vocabularies(ranked, vocab_size, always)
        if not found or len(self.texts) < 2:
            return _whole(
                f"the whole vocabulary of {vocab_size} ids is drafted over: too little text to "
                f"choose from ({tokens} tokens of {len(self.texts)} texts; at least "
                f"{LEAST_TOKENS} for each kept id are asked for, and two texts)",
                ranked_tokens=tokens,
            )
        tried = [self._try(ids) for ids in (None, *found)]
        whole, best = tried[0], max(tried[1:], key=lambda t: t.predicted)
        assert best.ids is not None
        name = f"a draft vocabulary of {len(best.ids)} of {vocab_size} ids"
        gain = f"{name} is predicted at {best.predicted / whole.predicted:.2f} times the speed"
        if best.predicted < GAIN * whole.predicted:
            verdict = f"the whole vocabulary is drafted over: {gain}, and {GAIN} is asked for"
            return _whole(verdict, tried, tokens)
        self.say(f"decoding with {name} and without, in turn")
        timed = self._timed(best, whole)
        tried[tried.index(best)] = timed
        assert timed.measured is not None
        assert timed.over_whole is not None
        said = f"{gain}, {timed.over_whole:.2f} measured"
        if timed.measured[1] <= 1.0 or timed.over_whole <= 1.0:
            verdict = f"{said}: not confirmed, so the whole vocabulary is drafted over"
            return _whole(verdict, tried, tokens)
        verdict = f"{said}; it covers {timed.coverage:.1%} of other texts"
        return Trimming(timed, self._costs(best.ids), tuple(tried), tokens, verdict)

    @property
    def _held(self) -> Sequence[Text]:
        """The texts that no id was ranked by."""
        return self.texts[1::2]

    def _named(self, what: str, ids: Sequence[int] | None) -> str:
        """Name of a measurement in the journal; the ids follow from the texts in it."""
        return f"{what} with {'all' if ids is None else len(ids)} ids"

    def _try(self, ids: tuple[int, ...] | None) -> TriedVocabulary:
        self.say(f"draft vocabulary: {'all' if ids is None else len(ids)} ids")
        most, context = self.settings.max_draft_tokens, self._context()
        counts = self.journal.once(
            self._named("acceptance", ids),
            lambda: count(self.known_texts().chains(self.plan, most, ids)[1::2], most).to_list(),
            Counts.from_list,
        )
        table = self.table if ids is None else with_head_of(self.table, self._costs(ids))
        table = table.of(greedy=self.settings.sampling.greedy)
        c = table.draft_pass(1, context) / table.verify_pass(1, context)
        best, speed = predict(table, counts.lengths, context)
        covered = (1.0, 1.0) if ids is None else measured_coverage(ids, self._held)
        return TriedVocabulary(
            ids, *covered, counts=counts, c=c, num_draft_tokens=best, predicted=speed
        )

    def _context(self) -> float:
        return statistics.fmean(t.start + t.window / 2 for t in self._held)

    def _costs(self, ids: tuple[int, ...]) -> CostTable:
        """With a head as rounds run it: beside the kept ids, it knows those of a text."""
        longest = max(self._held, key=lambda t: len(t.ids))

        def measure() -> dict[str, Any]:
            return measure_cost(
                self.lm.stack,
                self.plan,
                draft_vocabulary=ids,
                head=self.lm.stack.head_over(ids).including(longest.ids),
                seconds=self.settings.cost_seconds,
            ).to_dict()

        return self.journal.once(self._named("costs", ids), measure, CostTable.from_dict)

    def _timed(self, best: TriedVocabulary, whole: TriedVocabulary) -> TriedVocabulary:
        assert best.ids is not None
        ids = best.ids

        def read(entry: Sequence[Sequence[float]]) -> TriedVocabulary:
            measured = median_interval([plain / trimmed for plain, _, trimmed in entry])
            over_whole = statistics.median(w / trimmed for _, w, trimmed in entry)
            return replace(best, measured=measured, over_whole=over_whole)

        return self.journal.once(
            self._named("seconds", ids),
            lambda: time_in_turn(
                self.lm.stack,
                self.plan,
                [
                    PLAIN,
                    Way(whole.num_draft_tokens),
                    Way(best.num_draft_tokens, self.lm.stack.head_over(ids)),
                ],
                self._held[:CHECKED_TEXTS],
                sampling=self.settings.sampling,
            ),
            read,
        )
