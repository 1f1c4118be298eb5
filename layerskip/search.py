"""Plan search: which layers to draft with, by what was measured on text, and whether it pays.

Exits cost one pass over the texts for all of them. Skip sets come from dynamic programming on
hidden states (CLaSp), and are refined by what is measured: layers dropped, added and exchanged, as
long as the predicted speed rises (Draft & Verify and SWIFT search the same space by Bayesian and
random proposals: arXiv 2309.08168, 2410.06916). A plan whose cost leaves no room for an
improvement, were every draft accepted, is not tried. For the plan that is found a draft vocabulary
is looked for (``layerskip.trimming``).
"""

import hashlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from layerskip.api import SelfSpeculativeLM
from layerskip.bootstrap import median_interval
from layerskip.calibration import KnownTexts, Text, texts_to_draft_along
from layerskip.cost import CostTable
from layerskip.fingerprint import cost_key, fingerprint
from layerskip.journal import Journal
from layerskip.params import (
    MAX_NUM_DRAFT_TOKENS,
    SHARPNESS,
    SamplingParams,
    check_bare,
    check_integer,
    check_number,
    check_sampling,
    check_text,
)
from layerskip.plan import DraftPlan, PlanFile, ranges
from layerskip.prediction import Counts, Tried, count, draft_costs, predict
from layerskip.profiling import measure_cost
from layerskip.prompts import Example, checked_examples
from layerskip.skipping import closest_skip_sets, neighbours
from layerskip.timing import Way, confidence_points, time_against_plain
from layerskip.trimming import CHECKED_TEXTS, STEPS, Trimmer, Trimming

DEFAULT_SAMPLING = SamplingParams(temperature=0.8, seed=0)
PAYS = 1.05  # predicted speed-up below which a plan is not worth it
BETTER = 1.01  # times the best prediction so far that makes another plan the best: else it is noise
LEAST_TEXTS = 2  # of one, nobody can say how sure its speed is


@dataclass(frozen=True)
class SearchSettings:
    """How much is measured.

    Attributes:
        sampling: of the texts that the model writes, and of targets and drafts along all texts.
        max_texts, max_new_tokens: prompts taken, 2 or more, and tokens after each.
        max_draft_tokens: the most that a round may draft.
        refinements: plans that the local search may measure.
        cost_seconds: for each table of costs, a millisecond or more.
    """

    sampling: SamplingParams = DEFAULT_SAMPLING
    max_texts: int = 16
    max_new_tokens: int = 64
    max_draft_tokens: int = 8
    refinements: int = 16
    cost_seconds: float = 4.0

    def __post_init__(self) -> None:
        check_sampling(self.sampling, optional=False)
        check_bare(self.sampling, "a search")
        check_integer("max_texts", self.max_texts, LEAST_TEXTS)
        check_integer("max_new_tokens", self.max_new_tokens, 3)
        check_integer("max_draft_tokens", self.max_draft_tokens, 1, MAX_NUM_DRAFT_TOKENS)
        check_integer("refinements", self.refinements, 0)
        check_number("cost_seconds", self.cost_seconds, 1e-3, math.inf)


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        file: to be saved; without a plan, and with 0 draft tokens, if none pays.
        tried: every plan that was measured, the best prediction first.
        verdict: one sentence.
        trimming: what was found about draft vocabularies; None without a plan.
    """

    file: PlanFile
    tried: tuple[Tried, ...]
    verdict: str
    trimming: Trimming | None = None


def search(
    lm: SelfSpeculativeLM,
    examples: Iterable[Example],
    *,
    settings: SearchSettings | None = None,
    vocabulary_texts: Sequence[str] = (),
    journal: str | Path | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> SearchResult:
    """Find the layers to draft with, and the tokens to draft over.

    Args:
        lm: the model; its own plan is not looked at.
        examples: prompts, with their continuations where those are known.
        settings: how much is measured; None is the default.
        vocabulary_texts: more text like that to come, by which draft vocabularies are ranked.
        journal: a file that keeps every measurement as soon as it is made: a search that was
            interrupted goes on where it was. To be removed when the result is safe.
        on_progress: called with steps done, steps, and what comes next.

    Raises:
        TypeError: an argument is not what it has to be.
        ValueError: fewer than two usable texts, or one that is not valid Unicode; the journal is of
            another search, or another process has it; or the model was wrapped with an exit
            adapter, which belongs to one exit only.
    """
    if not isinstance(lm, SelfSpeculativeLM):
        raise TypeError(f"lm must be a SelfSpeculativeLM, got {type(lm).__name__}; wrap the model")
    if lm.stack.adapter is not None:
        raise ValueError("search looks at plain exits: wrap the model without its exit adapter")
    if isinstance(vocabulary_texts, str) or not isinstance(vocabulary_texts, Sequence):
        raise TypeError(f"vocabulary_texts must be a list of texts, got {vocabulary_texts!r}")
    for text in vocabulary_texts:  # now: they are tokenized at the end of a long measurement
        check_text("each of vocabulary_texts", text)
    settings = SearchSettings() if settings is None else settings
    if not isinstance(settings, SearchSettings):
        raise TypeError(f"settings must be SearchSettings or None, got {type(settings).__name__}")
    examples = checked_examples(examples)
    subject = cost_key(lm.stack, None) | {
        "prompts": _digest([[e.prompt, e.continuation] for e in examples]),
        "vocabulary_texts": _digest(list(vocabulary_texts)),
        "settings": asdict(settings),
    }
    with closing(Journal(journal, subject)) as kept:
        return _Search(lm, examples, settings, vocabulary_texts, kept, on_progress).run()


def _digest(work: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


class _Search:
    """One search: every measurement by its name in the journal."""

    def __init__(
        self,
        lm: SelfSpeculativeLM,
        examples: Sequence[Example],
        settings: SearchSettings,
        vocabulary_texts: Sequence[str],
        journal: Journal,
        on_progress: Callable[[int, int, str], None],
    ) -> None:
        self.lm, self.examples, self.settings = lm, examples, settings
        self.stack, self.depth = lm.stack, lm.stack.num_layers
        self.vocabulary_texts = vocabulary_texts
        self.journal, self.on_progress = journal, on_progress
        self.tried: dict[tuple[int, ...], Tried] = {}
        self.texts: list[Text] = []
        self.done = 0
        self.steps = 7 + self.depth + settings.refinements + STEPS

    def run(self) -> SearchResult:
        if self.depth < 2:
            return self._off("no plan pays: a model of one layer has no layers to leave out")
        self._prepare()
        self._say("exits")
        self._exits()
        self._say("skip sets by similarity")
        for plan in self._skip_sets():
            self._say(f"draft layers {ranges(plan.layers)}")
            if self._could_beat(plan):
                self._try(plan, "similarity")
        self._refine()
        return self._conclude()

    def _prepare(self) -> None:
        """Texts and costs, measured or remembered."""
        self._say("reading the texts")
        self.texts = self.journal.once("texts", self._read_texts, self._texts)
        self.context = statistics.fmean(t.start + t.window / 2 for t in self.texts)
        self._say("costs of passes")
        one, every = (DraftPlan(self.depth, tuple(range(n))) for n in (1, self.depth))
        greedy = self.settings.sampling.greedy
        self.shallow, self.deep = (self._own_costs(p).of(greedy=greedy) for p in (one, every))

    def _read_texts(self) -> list[list[Any]]:
        settings = self.settings
        texts = texts_to_draft_along(
            self.lm,
            self.examples,
            sampling=settings.sampling,
            max_texts=settings.max_texts,
            max_tokens=settings.max_new_tokens,
        )
        if len(texts) < LEAST_TEXTS:
            raise ValueError(
                f"a search takes {LEAST_TEXTS} prompts or more that leave room for three more "
                f"tokens, got {len(texts)}; give more"
            )
        return [[list(t.ids), t.start, t.seed] for t in texts]

    def _texts(self, entry: Sequence[Any]) -> list[Text]:
        """Of ``_read_texts``; in a file it may have become anything."""
        texts = [Text(tuple(ids), start, seed) for ids, start, seed in entry]
        known, sound = range(self.stack.vocab_size), len(texts) >= LEAST_TEXTS
        sound = sound and all(t.start >= 1 and t.window >= 2 for t in texts)
        if not sound or not all(i in known for t in texts for i in t.ids):
            raise ValueError("they are no texts of this model")
        return texts

    @cached_property
    def known_texts(self) -> KnownTexts:
        """Made when something has to be measured along the texts, not when all is remembered."""
        return KnownTexts(self.stack, self.texts, sampling=self.settings.sampling)

    def _exits(self) -> None:
        most, exits = self.settings.max_draft_tokens, range(1, self.depth)

        def measure() -> list[Any]:
            return [count(self.known_texts.exit_chains(e, most), most).to_list() for e in exits]

        def read(entry: Sequence[Any]) -> list[tuple[int, Counts]]:
            return [(e, Counts.from_list(c)) for e, c in zip(exits, entry, strict=True)]

        for layer, counts in self.journal.once("exits", measure, read):
            plan = DraftPlan.exiting(num_layers=self.depth, exit_layer=layer)
            trained = layer in self.lm.trained_exits
            self._note(plan, "trained exit" if trained else "exit", counts)

    def _skip_sets(self) -> list[DraftPlan]:
        """Of every size, by similarity; the smallest, which leave most room, first."""

        def measure() -> list[list[int]]:
            sets = closest_skip_sets(self.known_texts)
            return [list(plan.layers) for plan in sets.values()]

        plans = self.journal.once(
            "skip sets", measure, lambda entry: [DraftPlan(self.depth, tuple(x)) for x in entry]
        )
        return plans[::-1]

    def _refine(self) -> None:
        """Follow the best neighbour found, until none is better or the budget is spent."""
        rng, left = random.Random(0), self.settings.refinements
        best = self._best()
        while left:
            for plan in neighbours(best.plan, rng):
                if not left or not self._could_beat(plan):
                    continue
                self._say(f"draft layers {ranges(plan.layers)}")
                left -= 1
                self._try(plan, "refinement")
                if self._best() != best:
                    break
            else:
                return
            best = self._best()

    def _best(self) -> Tried:
        """The best prediction; one that came later has to be better by more than noise."""
        best, *others = self.tried.values()
        for tried in others:
            best = tried if tried.predicted > BETTER * best.predicted else best
        return best

    def _could_beat(self, plan: DraftPlan) -> bool:
        """Whether the plan is new and, were all its drafts accepted, would be the best."""
        if plan.layers in self.tried:
            return False
        perfect = [drafted + 1.0 for drafted in range(self.settings.max_draft_tokens + 1)]
        _, limit = predict(self._costs(plan), perfect, self.context)
        return limit > max(PAYS, BETTER * self._best().predicted)

    def _try(self, plan: DraftPlan, found_by: str) -> None:
        most = self.settings.max_draft_tokens
        counts = self.journal.once(
            f"draft layers {ranges(plan.layers)}",
            lambda: count(self.known_texts.chains(plan, most), most).to_list(),
            Counts.from_list,
        )
        self._note(plan, found_by, counts)

    def _note(self, plan: DraftPlan, found_by: str, counts: Counts) -> None:
        table = self._costs(plan)
        c = table.draft_pass(1, self.context) / table.verify_pass(1, self.context)
        best, speed = predict(table, counts.lengths, self.context)
        self.tried[plan.layers] = Tried(
            plan, found_by, counts=counts, c=c, num_draft_tokens=best, predicted=speed
        )

    def _costs(self, plan: DraftPlan) -> CostTable:
        return draft_costs(self.shallow, self.deep, len(plan.layers), self.depth)

    def _say(self, what: str) -> None:
        self.on_progress(min(self.done, self.steps), self.steps, what)
        self.done += 1

    def _conclude(self) -> SearchResult:
        """The best plan against plain decoding, if it is worth it."""
        best = self._best()
        name = f"draft layers {ranges(best.plan.layers)}"
        if best.predicted < PAYS:
            return self._off(
                f"no plan pays: the best, {name}, is predicted at {best.predicted:.2f} times the "
                f"speed of plain decoding, and {PAYS} is asked for; speculation is left off"
            )
        self._say(f"costs of {name}")
        table = self._own_costs(best.plan)
        self._say("decoding with the best plan and without, in turn")
        speed, low, high = self._time(best)
        best = replace(best, measured=(speed, low, high))
        self.tried[best.plan.layers] = best
        said = (
            f"{name} with {best.num_draft_tokens} tokens a round: "
            f"{best.predicted:.2f} times the speed of plain decoding predicted, "
            f"{speed:.2f} ({low:.2f} to {high:.2f}) measured"
        )
        if low <= 1.0:
            return self._off(f"{said}: not confirmed, so speculation is left off")
        trimming = self._trim(best.plan, table)
        found = self._measurements(said) | {"chosen": best.to_dict()}
        file = PlanFile(
            best.plan,
            cost=table,
            fingerprint=fingerprint(self.stack.twin),
            acceptance=best.counts.acceptance,
            measurements=found | {"vocabulary": trimming.to_dict()},
        )
        file = _trimmed(file, trimming)
        self._say("how sure drafts are that turn out right")
        file = replace(file, calibration=self._confidence_points(best.plan, file.draft_vocabulary))
        return SearchResult(file, self._ranked(), said, trimming)

    def _trim(self, plan: DraftPlan, table: CostTable) -> Trimming:
        tokenizer = self.lm.tokenizer
        return Trimmer(
            self.lm,
            plan,
            table,
            self.texts,
            known_texts=lambda: self.known_texts,
            journal=self.journal,
            say=self._say,
            settings=self.settings,
            more_texts=[tokenizer(text)["input_ids"] for text in self.vocabulary_texts],
        ).run()

    def _confidence_points(
        self, plan: DraftPlan, vocabulary: Sequence[int] | None
    ) -> dict[str, tuple[tuple[float, float], ...]]:
        """Of greedy drafts, and of sampled ones if the texts are."""
        head = None if vocabulary is None else self.stack.head_over(vocabulary)
        way, sampling = Way(self.settings.max_draft_tokens, head), self.settings.sampling
        kinds = {"greedy": replace(sampling, temperature=0.0)}
        if not sampling.greedy:
            kinds["sampled"] = sampling

        def measure() -> dict[str, Any]:
            return {
                kind: confidence_points(self.stack, plan, way, self.texts, sampling=s)
                for kind, s in kinds.items()
            }

        return self.journal.once(
            f"calibration of draft layers {ranges(plan.layers)}, sharpness {SHARPNESS:g}",
            measure,
            lambda entry: {kind: tuple((c, a) for c, a in entry[kind]) for kind in kinds},
        )

    def _own_costs(self, plan: DraftPlan) -> CostTable:
        return self.journal.once(
            f"costs of draft layers {ranges(plan.layers)}",
            lambda: measure_cost(self.stack, plan, seconds=self.settings.cost_seconds).to_dict(),
            CostTable.from_dict,
        )

    def _time(self, best: Tried) -> tuple[float, float, float]:
        """Median speed-up and the ends of its 95 % interval."""
        return self.journal.once(
            f"speed of draft layers {ranges(best.plan.layers)}",
            lambda: time_against_plain(
                self.stack,
                best.plan,
                best.num_draft_tokens,
                self.texts[:CHECKED_TEXTS],
                sampling=self.settings.sampling,
            ),
            median_interval,
        )

    def _off(self, verdict: str) -> SearchResult:
        measurements = self._measurements(verdict)
        file = PlanFile(
            None, 0, fingerprint=fingerprint(self.stack.twin), measurements=measurements
        )
        return SearchResult(file, self._ranked(), verdict)

    def _ranked(self) -> tuple[Tried, ...]:
        return tuple(sorted(self.tried.values(), key=lambda t: -t.predicted))

    def _measurements(self, verdict: str) -> dict[str, Any]:
        trained = list(self.lm.trained_exits)
        # The file may take the place of the only one that says which exits were trained.
        known = {"trained_exits": trained} if trained else {}
        return {
            **known,
            "verdict": verdict,
            "texts": len(self.texts),
            "positions": sum(t.window for t in self.texts),
            "temperature": self.settings.sampling.temperature,
            "tried": [t.to_dict() for t in self._ranked()],
        }


def _trimmed(file: PlanFile, trimming: Trimming) -> PlanFile:
    """The file with the draft vocabulary that was chosen, and what is known of drafts with it."""
    chosen = trimming.chosen
    if chosen is None:
        return file
    return replace(
        file,
        draft_vocabulary=chosen.ids,
        cost=trimming.cost,
        acceptance=chosen.counts.acceptance,
        measurements={**file.measurements, "coverage": chosen.promised},
    )
