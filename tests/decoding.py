"""A drafter with known answers, and short ways to run, or break, a ``Decoder``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toys import PLANS, VOCAB_SIZE, random_ids

from layerskip import SamplingParams
from layerskip.cache import KVCache
from layerskip.decode import Decoder
from layerskip.drafting import Draft, DraftRequest, EarlyExitDrafter
from layerskip.model import DecoderStack
from layerskip.outcome import Outcome
from layerskip.row import Row, RowSpec
from layerskip.sampling import Sampler

PROMPT = random_ids(11)
LIMIT = 12
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


class CountingDecoder(Decoder):
    """Counts the rounds that the host runs."""

    host_rounds = 0

    def _round(self, rows: Sequence[Row]) -> list[Outcome]:
        self.host_rounds += 1
        return super()._round(rows)


@dataclass
class Oracle:
    """Drafts the known plain text, right for the next ``hits`` tokens, then wrong.

    Attributes:
        stack: embeds tokens: without a plan no layer is shared, so embeddings are all there is.
        plain: text after the prompt.
        hits: right guesses of each round, one round after another.
        most: drafts at most this many tokens, however many are asked for.
    """

    stack: DecoderStack
    plain: Sequence[int]
    hits: Sequence[int]
    most: int = 99
    asked: list[int] = field(default_factory=list)

    def draft(
        self,
        requests: Sequence[DraftRequest],
        cache: KVCache,
        head: None = None,
        going_on: None = None,
    ) -> list[Draft]:
        (request,) = requests
        right = self.hits[len(self.asked) % len(self.hits)]
        self.asked.append(request.num_draft_tokens)
        count = min(request.num_draft_tokens, self.most)
        done = request.length - len(PROMPT) + 1
        tokens = list(self.plain[done : done + count])
        for i in range(right, count):
            tokens[i] = (tokens[i] + 1) % VOCAB_SIZE
        states = self.stack.embed([request.pending, *tokens])[:count]
        return [Draft(tuple(tokens), tuple(states), num_positions=count)]


def join(batch: Decoder, prompt: Sequence[int] = PROMPT, **changes) -> Row:
    params = changes.pop("sampling", SamplingParams())
    settings = {"max_new_tokens": LIMIT, "num_draft_tokens": 4}
    way = changes.pop("verification", "coupled")
    sampler = Sampler(params, params.seed or 0, VOCAB_SIZE, verification=way)
    return batch.join(RowSpec(tuple(prompt), sampler, **settings | changes))


def decode(batch: Decoder, **settings) -> Row:
    row = join(batch, **settings)
    while row.finish_reason is None:
        batch.step()
    return row


def self_drafting(stack: DecoderStack, plan: str = "exit") -> Decoder:
    return Decoder(stack, EarlyExitDrafter(stack, PLANS[plan]), PLANS[plan])


class Interruption:
    """Calls through ``times`` times, then raises after the work is done, once."""

    def __init__(self, function: Callable, times: int, error: type[BaseException]) -> None:
        self.function, self.left, self.error = function, times, error

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.left -= 1
        if self.left == -1:
            raise self.error
        return result
