"""Decoding the same texts in several ways: what one takes against another, and how sure drafts are
that turn out right."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from layerskip.calibration import Text
from layerskip.control.experience import Calibration
from layerskip.decode import Decoder
from layerskip.draft_head import DraftHead
from layerskip.drafting import EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams
from layerskip.plan import DraftPlan
from layerskip.row import Row, RowSpec
from layerskip.sampling import Sampler
from layerskip.workbench import Workbench, open_bench


@dataclass(frozen=True, eq=False)
class Way:
    """A way to decode.

    Attributes:
        num_draft_tokens: drafted per round; 0 is plain decoding.
        head: the draft's, over a part of the vocabulary; None: the model's own.
    """

    num_draft_tokens: int
    head: DraftHead | None = None


PLAIN = Way(0)


def time_in_turn(
    stack: DecoderStack,
    plan: DraftPlan,
    ways: Sequence[Way],
    texts: Sequence[Text],
    *,
    sampling: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of each way after each text's prompt, prefill not counted; a list for each text.

    Ends of sequence are passed over, so that all decode as many tokens as the text has. Where the
    device runs rounds by itself it does so here, too, and they are recorded before.
    """
    longest = max(len(text.ids) for text in texts)
    benches = {way: _bench(stack, plan, way, longest) for way in ways}

    def seconds(text: Text, way: Way) -> float:
        decoder, row = _begun(stack, plan, text, way, sampling, bench=benches[way])
        decoder.step()
        began = clock()
        while row.finish_reason is None:
            decoder.step()
        return clock() - began

    took = []
    for i, text in enumerate((texts[0], *texts)):  # the first one twice: once to warm up
        order = ways if i % 2 else ways[::-1]
        times = [seconds(text, way) for way in order]
        took.append(times if i % 2 else times[::-1])
    return took[1:]


def time_against_plain(
    stack: DecoderStack,
    plan: DraftPlan,
    num_draft_tokens: int,
    texts: Sequence[Text],
    *,
    sampling: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Speed-up over plain decoding after each text's prompt, both in turn."""
    ways = (PLAIN, Way(num_draft_tokens))
    took = time_in_turn(stack, plan, ways, texts, sampling=sampling, clock=clock)
    return [plain / drafted for plain, drafted in took]


def confidence_points(
    stack: DecoderStack,
    plan: DraftPlan,
    way: Way,
    texts: Iterable[Text],
    *,
    sampling: SamplingParams,
) -> tuple[tuple[float, float], ...]:
    """``(confidence, share accepted)`` of what is drafted after each text's prompt in rounds with a
    fixed number of tokens, as of ``PlanFile.calibration``. Only the prompts are read: what follows
    them is what the model says."""
    learnt = Calibration()
    for text in texts:
        decoder, row = _begun(stack, plan, text, way, sampling, tells=True)
        while row.finish_reason is None:
            decoder.step()
        for r in row.rounds:
            # The first token that is wrong is judged, too; those behind it are not.
            for i, confidence in enumerate(r.confidences[: r.num_accepted_tokens + 1]):
                learnt.add(confidence, learnt.chance(confidence), i < r.num_accepted_tokens)
    return tuple((round(c, 4), round(share, 4)) for c, share in learnt.points)


def _bench(stack: DecoderStack, plan: DraftPlan, way: Way, longest: int) -> Workbench | None:
    """What lets the device run this way's rounds, with those recorded that its texts need."""
    bench, _ = open_bench(stack, plan, way.head)
    if bench is not None:
        slots = longest + way.num_draft_tokens
        bench.record_ahead([way.num_draft_tokens], num_rows=1, num_slots=slots)
    return bench


def _begun(
    stack: DecoderStack,
    plan: DraftPlan,
    text: Text,
    way: Way,
    sampling: SamplingParams,
    *,
    bench: Workbench | None = None,
    tells: bool = False,
) -> tuple[Decoder, Row]:
    """A text's prompt, about to be decoded as far as the text goes."""
    slots = len(text.ids) + way.num_draft_tokens
    drafter = EarlyExitDrafter(stack, plan)
    decoder = Decoder(stack, drafter, plan, head=way.head, bench=bench, num_slots=slots)
    sampler = Sampler(sampling, text.seed, stack.vocab_size)
    prompt, limit = text.ids[: text.start], len(text.ids) - text.start
    spec = RowSpec(prompt, sampler, limit, way.num_draft_tokens, tells=tells)
    return decoder, decoder.join(spec)
