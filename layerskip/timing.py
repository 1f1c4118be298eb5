"""Decoding the same texts in several ways, in turn: what one way takes against another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerskip.calibration import Text
from layerskip.decode import Decoder
from layerskip.draft_head import DraftHead
from layerskip.drafting import EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams
from layerskip.plan import DraftPlan
from layerskip.row import RowSpec
from layerskip.sampling import Sampler


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

    Ends of sequence are passed over, so that all decode as many tokens as the text has.
    """

    def seconds(text: Text, way: Way) -> float:
        decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan, head=way.head)
        sampler = Sampler(sampling, text.seed, stack.vocab_size)
        limit = len(text.ids) - text.start
        row = decoder.join(RowSpec(text.ids[: text.start], sampler, limit, way.num_draft_tokens))
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
