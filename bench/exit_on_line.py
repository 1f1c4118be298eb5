"""What would moving the exit while decoding gain? Counted on plain text; nothing is timed.

    OMP_NUM_THREADS=1 python bench/exit_on_line.py
    OMP_NUM_THREADS=1 python bench/exit_on_line.py --prompts test.jsonl --limit 20

A greedy or coupled draft that is right so far continues plain text, so whether an exit's next token
is right depends on the text alone: one pass over it gives every exit's hits, and any choice of exit
and number of draft tokens can be played through exactly. Seconds are the cost table's; a layer more
or less costs its share of them. Compared are, each with its best or its own number of draft tokens:

- one exit for everything, and for each prompt the best one in hindsight;
- for each round the best number of draft tokens in hindsight, with one exit and with any;
- a rule without hindsight: discounted counts of each exit's hits, the exits beside the present one
  seen in one round of ``SAMPLED``, where their heads cost a pass over the verified positions.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from paired import quiet
from tasks import CODE_CHOICE, examples_from

from layerskip import SelfSpeculativeLM
from layerskip.compare import repeated_share
from layerskip.cost import CostTable
from layerskip.params import SamplingParams
from layerskip.sampling import Sampler

MOST = 10  # draft tokens
CONTEXT = 200  # of the cost table
SAMPLED = 4  # rounds to one in which neighbouring exits are looked at
DISCOUNT, WEIGHT, HYSTERESIS = 0.97, 8.0, 0.02
PERCENT = 100.0


@dataclass(frozen=True)
class Prices:
    """Seconds of passes: a draft pass by its exit, verify by its tokens, a head over them."""

    draft: dict[int, float]
    verify: tuple[float, ...]
    head: tuple[float, ...]

    @classmethod
    def of(cls, cost: CostTable, num_layers: int, depth: int, exits: Sequence[int]) -> "Prices":
        drafted, plain = cost.draft_pass(1, CONTEXT), cost.verify_pass(1, CONTEXT)
        layer = (plain - drafted) / (num_layers - depth)
        return cls(
            {e: drafted + (e - depth) * layer for e in exits},
            tuple(cost.verify_pass(max(1, n), CONTEXT) for n in range(MOST + 2)),
            tuple(cost.draft_head.at(8 * math.ceil(n / 8), 0) for n in range(MOST + 2)),
        )

    def round(self, exit_layer: int, count: int) -> float:
        return count * self.draft[exit_layer] + self.verify[count + 1]


@dataclass(frozen=True)
class Text:
    """Of each exit and each token after the first: whether that exit would have drafted it."""

    hits: dict[int, tuple[bool, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.hits.values())))

    def accepted(self, exit_layer: int, at: int, count: int) -> int:
        line = self.hits[exit_layer][at : at + count]
        return next((i for i, hit in enumerate(line) if not hit), len(line))


def fixed(text: Text, prices: Prices, exit_layer: int, count: int) -> float:
    """Seconds with one exit and number of draft tokens."""
    at, seconds = 0, 0.0
    while at < len(text):
        drafted = min(count, len(text) - at - 1)
        seconds += prices.round(exit_layer, drafted)
        at += text.accepted(exit_layer, at, drafted) + 1
    return seconds


def clairvoyant(text: Text, prices: Prices, exits: Sequence[int]) -> float:
    """Least seconds of all ways through the text."""
    best = [0.0] * (len(text) + 1)
    for at in reversed(range(len(text))):
        best[at] = min(
            prices.round(e, k) + best[at + text.accepted(e, at, k) + 1]
            for e in exits
            for k in range(min(MOST, len(text) - at - 1) + 1)
        )
    return best[0]


@dataclass
class Counts:
    """One exit's discounted hits; ``prior`` is what earlier texts left."""

    prior: float
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hit: bool) -> None:
        self.hits = DISCOUNT * self.hits + hit
        self.trials = DISCOUNT * self.trials + 1.0

    @property
    def share(self) -> float:
        return min(0.995, (WEIGHT * self.prior + self.hits) / (WEIGHT + self.trials))


def best_round(share: float, prices: Prices, exit_layer: int) -> tuple[float, int]:
    """Tokens a second, and number of draft tokens, at so much acceptance of every position."""
    tokens, survival, best = 1.0, 1.0, (1.0 / prices.verify[1], 0)
    for k in range(1, MOST + 1):
        survival *= share
        tokens += survival
        best = max(best, (tokens / prices.round(exit_layer, k), k))
    return best


def by_rule(
    texts: Sequence[Text],
    prices: Prices,
    exits: Sequence[int],
    start: int,
    *,
    free_looks: bool = False,
) -> float:
    """Seconds of a rule that knows the past alone; of one exit it chooses the number alone.

    Args:
        free_looks: neighbouring exits are looked at in every round, at no cost: what no rule that
            has to look can be better than by looking more cheaply.
    """
    priors, seconds = dict.fromkeys(exits, 0.7), 0.0
    for text in texts:
        counts = {e: Counts(priors[e]) for e in exits}
        at, now, rounds = 0, start, 0
        while at < len(text):
            rates = {e: best_round(counts[e].share, prices, e) for e in exits if abs(e - now) < 2}
            ahead = max(rates, key=lambda e: rates[e][0])
            if rates[ahead][0] > (1.0 + HYSTERESIS) * rates[now][0]:
                now = ahead
            # A probe: without a draft nothing would be learnt, of this exit or of others.
            wanted = rates[now][1] or int(rounds % 16 == 0)
            drafted = min(wanted, len(text) - at - 1)
            seconds += prices.round(now, drafted)
            emitted = text.accepted(now, at, drafted) + 1
            for hit in text.hits[now][at : at + min(emitted, drafted)]:
                counts[now].add(hit)
            if free_looks or rounds % SAMPLED == 0:
                for e in (e for e in exits if abs(e - now) == 1):
                    seconds += 0.0 if free_looks else prices.head[drafted + 1]
                    for hit in text.hits[e][at : at + emitted]:
                        counts[e].add(hit)
            at, rounds = at + emitted, rounds + 1
        for e in exits:
            priors[e] = 0.8 * priors[e] + 0.2 * counts[e].share
    return seconds


@torch.inference_mode()
def texts_of(
    lm: SelfSpeculativeLM,
    prompts: Sequence[Sequence[int]],
    exits: Sequence[int],
    options: argparse.Namespace,
    temperature: float,
) -> list[Text]:
    """Plain texts that do not loop, and every exit's hits on them."""
    stack, texts = lm.stack, []
    sampling = SamplingParams(temperature=temperature, seed=None if temperature == 0.0 else 0)
    for prompt in prompts:
        if len(texts) == options.limit:
            break
        out = lm.generate(
            prompt, max_new_tokens=options.tokens, sampling=sampling, num_draft_tokens=0
        )
        if len(out.token_ids) < 2 or repeated_share([out.token_ids]) > options.max_repeated:
            continue
        ids, sampler = [*prompt, *out.token_ids], Sampler(sampling, 0, stack.vocab_size)
        logits = stack.all_exit_logits(ids[:-1], exits)
        hits = {}
        for e in exits:
            picked = sampler.pick(logits[e][len(prompt) :], len(prompt) + 1)
            pairs = zip(picked, out.token_ids[1:], strict=True)
            hits[e] = tuple(a == b for a, b in pairs)
        texts.append(Text(hits))
    return texts


def gains(texts: Sequence[Text], prices: Prices, exits: Sequence[int]) -> dict[str, float]:
    """Of each way to move the exit, over the best one that stays, in percent."""
    counts = range(1, MOST + 1)

    @cache
    def alone(e: int, k: int, i: int) -> float:
        return fixed(texts[i], prices, e, k)

    everything = range(len(texts))

    def per_prompt(chosen: Sequence[int]) -> float:
        return sum(min(alone(e, k, i) for e in chosen for k in counts) for i in everything)

    def per_round(chosen: Sequence[int]) -> float:
        return sum(clairvoyant(text, prices, chosen) for text in texts)

    stays = min(sum(alone(e, k, i) for i in everything) for e in exits for k in counts)
    any_number = min(per_prompt([e]) for e in exits)
    rule_stays = {e: by_rule(texts, prices, [e], e) for e in exits}
    start = min(rule_stays, key=lambda e: rule_stays[e])
    moved, seeing = (
        by_rule(texts, prices, exits, start, free_looks=free) for free in (False, True)
    )
    one_exit = min(per_round([e]) for e in exits)
    return {
        "each prompt's best exit and number": PERCENT * (stays / per_prompt(exits) - 1.0),
        "each prompt's best exit": PERCENT * (any_number / per_prompt(exits) - 1.0),
        "each round's best exit": PERCENT * (one_exit / per_round(exits) - 1.0),
        "the rule": PERCENT * (rule_stays[start] / moved - 1.0),
        "the rule, if looking were free": PERCENT * (rule_stays[start] / seeing - 1.0),
    }


def report(texts: Sequence[Text], prices: Prices, exits: Sequence[int], head: str) -> None:
    """Print the table of one workload."""
    tokens = sum(map(len, texts))
    plain = tokens * prices.verify[1]
    print(f"\n{head}: {len(texts)} texts, {tokens} tokens after the first")
    print("exit  acceptance (prompts' p10, p90)     c  best k  speed-up  by rule")
    for e in exits:
        shares = sorted(sum(t.hits[e]) / len(t) for t in texts)
        total = sum(sum(t.hits[e]) for t in texts) / tokens
        low, high = shares[len(shares) // 10], shares[-1 - len(shares) // 10]
        times = {k: sum(fixed(t, prices, e, k) for t in texts) for k in range(1, MOST + 1)}
        k = min(times, key=lambda k: times[k])
        ruled = plain / by_rule(texts, prices, [e], e)
        c = prices.draft[e] / prices.verify[1]
        line = f"{e:4}  {total:10.3f} ({low:.2f}, {high:.2f}) {c:16.3f} {k:7}"
        print(f"{line} {plain / times[k]:9.3f} {ruled:8.3f}")
    for name, gain in gains(texts, prices, exits).items():
        print(f"  {name}: {gain:+.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--limit", type=int, default=30, help="texts (30)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each (64)")
    parser.add_argument("--max-repeated", type=float, default=0.2, help="8-grams (0.2)")
    parser.add_argument("--exits", type=int, nargs="+", default=[1, 2, 3, 4])
    options = parser.parse_args()
    quiet()
    lm = SelfSpeculativeLM.from_pretrained(options.model, device="cpu")
    if lm.plan is None:
        raise SystemExit("the model has no plan, and a cost table without drafts says too little")
    examples = examples_from(options.prompts, CODE_CHOICE)
    room = lm.stack.max_positions - options.tokens
    prompts = [ids for ids in map(lm.encode, (e.prompt for e in examples)) if len(ids) <= room]
    exits = [e for e in options.exits if e < lm.stack.num_layers]
    depth = len(lm.plan.layers)
    prices = Prices.of(lm.controller.cost, lm.stack.num_layers, depth, exits)
    for temperature in (0.0, 0.8):
        texts = texts_of(lm, prompts, exits, options, temperature)
        if not texts:
            print(f"temperature {temperature:g}: every text loops")
            continue
        report(texts, prices, exits, f"temperature {temperature:g}")


if __name__ == "__main__":
    main()
