"""What a trimmed draft vocabulary costs and loses: c and acceptance against its size.

    OMP_NUM_THREADS=1 python bench/draft_vocabulary.py
    OMP_NUM_THREADS=1 python bench/draft_vocabulary.py --prompts test.jsonl --texts train.jsonl
    OMP_NUM_THREADS=1 python bench/draft_vocabulary.py --synthetic 131072

Passes of every size are timed turn by turn; a figure is the median of all turns, and c its ratio to
a plain pass. With one thread the clock is the process's CPU time. c is predicted twice: from the
times of a draft pass and of a head with all rows, less the share of those that are not kept, and by
bytes of weights alone, the draft's layers and kept rows over all of both. Acceptance is teacher-
forced along real continuations, the ids kept being the most frequent of other texts, those of the
prompt and those that came before; a random model (``--synthetic``) has none.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from paired import quiet
from tasks import CODE_CHOICE, examples_from
from torch import Tensor

from layerskip import SelfSpeculativeLM
from layerskip.admission import decoder_layers
from layerskip.cache import Segment
from layerskip.draft_head import greedy_kept
from layerskip.model import DecoderStack
from layerskip.params import SamplingParams
from layerskip.plan import DraftPlan
from layerskip.prompts import Example, read_prompts
from layerskip.sampling import Sampler, greedy_tokens
from layerskip.vocabulary import choose_vocabulary

CONTEXT = 200
MAX_DRAFTED = 7  # more would not fit in a pass of 8 rows
PASSES_IN_A_ROW = 4  # as in a round: those after the first find their weights in the caches
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "head_dim": 64}


def synthetic(vocab_size: int, dtype: torch.dtype) -> SelfSpeculativeLM:
    """A random model of 16 layers, 2 of which draft; loaded, for a user's own is never repacked and
    its whole head is slower than rows that are kept of it."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **SHAPE,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        return SelfSpeculativeLM.from_pretrained(folder, exit_layer=2, device="cpu")


@dataclass(frozen=True)
class Costs:
    """Seconds of passes over one token.

    Attributes:
        plain: all layers and the whole head.
        verify: the same, over 8 tokens.
        layers: the draft's, with the embedding.
        head: of each size, with its argmax.
        draft: the two together, as drafting does them.
    """

    plain: float
    verify: float
    layers: float
    head: dict[int, float]
    draft: dict[int, float]


@torch.inference_mode()
def measure(stack: DecoderStack, plan: DraftPlan, sizes: Sequence[int], turns: int) -> Costs:
    cache = stack.new_cache(num_rows=1, num_slots=CONTEXT + 8).written()

    def run(layers: Sequence[int], count: int = 1) -> Tensor:
        hidden = stack.embed([5] * count)
        return stack.run_layers(hidden, layers, cache, [Segment(0, CONTEXT, count)])

    state, every = run(plan.layers), range(stack.num_layers)
    passes: dict[tuple[str, int], Callable[[], object]] = {
        ("plain", 1): lambda: greedy_tokens(stack.logits(run(every))[:1]),
        ("verify", 8): lambda: greedy_tokens(stack.logits(run(every, 8))),
        ("layers", 0): lambda: run(plan.layers),
    }
    for n in sizes:
        head: Callable[[Tensor], object]
        if n == stack.vocab_size:
            head = lambda h: greedy_tokens(stack.logits(h)[:1])  # noqa: E731
        else:
            kept = stack.head_over(torch.randperm(stack.vocab_size)[:n])
            head = lambda h, kept=kept: greedy_kept(kept(h)[:1], kept.ids)  # noqa: E731
        passes["head", n] = partial(head, state)
        passes["draft", n] = lambda head=head: head(run(plan.layers))
    found = timed(passes, turns)
    return Costs(
        found["plain", 1],
        found["verify", 8],
        found["layers", 0],
        {n: found["head", n] for n in sizes},
        {n: found["draft", n] for n in sizes},
    )


def timed(
    passes: dict[tuple[str, int], Callable[[], object]], turns: int
) -> dict[tuple[str, int], float]:
    """Median seconds of each, turn by turn, after one turn that warms up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[tuple[str, int], list[float]] = {name: [] for name in passes}
    for turn in range(turns + 1):
        for name in list(passes)[:: 1 if turn % 2 else -1]:
            began = clock()
            for _ in range(PASSES_IN_A_ROW):
                passes[name]()
            times[name].append((clock() - began) / PASSES_IN_A_ROW)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def c_by_times(costs: Costs, size: int) -> float:
    """From a draft pass with the largest head that was timed, less the rows it would not have."""
    most = max(costs.head)
    return (costs.draft[most] - costs.head[most] * (1 - size / most)) / costs.plain


def c_by_bytes(stack: DecoderStack, plan: DraftPlan, size: int) -> float:
    """From the bytes of weights that a draft pass and a plain one read."""
    layers = [sum(p.nbytes for p in m.parameters()) for m in decoder_layers(stack.twin)]
    row = stack.twin.get_output_embeddings().weight[0].nbytes
    drafted = sum(layers[i] for i in plan.layers)
    return (drafted + size * row) / (sum(layers) + stack.vocab_size * row)


@dataclass(frozen=True)
class Quality:
    """Shares of the positions of real continuations.

    Attributes:
        kept: real tokens that are in the trimmed vocabulary.
        coverage: real tokens that are in it, in the prompt, or came before.
        greedy, sampled: positions where the draft's token is the target's: argmax, and at
            temperature 0.8 with common noise.
    """

    kept: float
    coverage: float
    greedy: float
    sampled: float


@torch.inference_mode()
def quality(
    lm: SelfSpeculativeLM,
    examples: Sequence[Example],
    vocabularies: dict[int, tuple[int, ...]],
    depth: int,
) -> dict[int, Quality]:
    stack, sums, positions = lm.stack, {n: [0, 0, 0, 0] for n in vocabularies}, 0
    greedy, warm = (Sampler(SamplingParams(temperature=t), 0, stack.vocab_size) for t in (0.0, 0.8))
    for example in examples:
        prompt = lm.encode(example.prompt)
        ids = lm.tokenizer(example.prompt + example.continuation)["input_ids"]
        ids = ids[: min(len(prompt) + 128, stack.max_positions)]
        if len(ids) <= len(prompt):
            continue
        exits, first = (depth, stack.num_layers), len(prompt) - 1
        logits = stack.all_exit_logits(ids[:-1], exits, since=first)
        draft, target = (logits[e].split(1) for e in exits)
        seen = torch.zeros(stack.vocab_size, dtype=torch.bool)
        seen[prompt] = True
        for at, d, t in zip(range(len(prompt), len(ids)), draft, target, strict=True):
            seen[ids[at - 1]] = True
            positions += 1
            wanted = greedy.pick(t, at), warm.pick(t, at)
            for n, vocabulary in vocabularies.items():
                allowed = seen.clone()
                allowed[list(vocabulary)] = True
                trimmed = d.masked_fill(~allowed, float("-inf"))
                got = greedy.pick(trimmed, at), warm.pick(trimmed, at)
                right = (ids[at] in vocabulary, bool(allowed[ids[at]]))
                for i, yes in enumerate((*right, got[0] == wanted[0], got[1] == wanted[1])):
                    sums[n][i] += yes
    return {n: Quality(*(s / positions for s in found)) for n, found in sums.items()}


def best_speedup(acceptance: float, c: float, v: float) -> tuple[float, int]:
    """Largest ``mean_accepted_length / (k c + v)``, every position accepted alike, and its k."""
    lengths = {k: sum(acceptance**i for i in range(k + 1)) for k in range(1, MAX_DRAFTED + 1)}
    return max((length / (k * c + v), k) for k, length in lengths.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--synthetic", type=int, help="vocabulary of a random model instead")
    parser.add_argument("--prompts", help="JSON lines with continuations (held-out code)")
    parser.add_argument("--texts", help="JSON lines to rank tokens by (other held-out code)")
    parser.add_argument("--limit", default=30, type=int, help="prompts to measure (30)")
    parser.add_argument("--turns", default=60, type=int, help="of all passes (60)")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(the model's)")
    options = parser.parse_args()
    quiet()

    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.synthetic:
        lm = synthetic(options.synthetic, dtype or torch.bfloat16)
    else:
        lm = SelfSpeculativeLM.from_pretrained(options.model, device="cpu", dtype=dtype)
    stack, vocab_size = lm.stack, lm.stack.vocab_size
    sizes = options.sizes or [vocab_size // d for d in (8, 4, 2, 1)]
    costs = measure(stack, lm.plan, sizes, options.turns)
    print(
        f"{stack.dtype}, {torch.get_num_threads()} threads, {len(lm.plan.layers)} of "
        f"{stack.num_layers} layers draft; ms: plain {1e3 * costs.plain:.2f}, verify of 8 "
        f"{1e3 * costs.verify:.2f}, draft layers {1e3 * costs.layers:.2f}"
    )
    found = {} if options.synthetic else quality_of(lm, options, sizes)
    print(
        "  size  head ms  draft ms      c  by times  by bytes  kept  covered  greedy  T=0.8  "
        "speed-up (k)"
    )
    for n in sizes:
        c, by_times = costs.draft[n] / costs.plain, c_by_times(costs, n)
        times = f"{1e3 * costs.head[n]:8.3f} {1e3 * costs.draft[n]:9.3f}"
        line = f"{n:6} {times} {c:6.3f} {by_times:9.3f} {c_by_bytes(stack, lm.plan, n):9.3f}"
        if n in found:
            q, v = found[n], costs.verify / costs.plain
            line += f" {q.kept:5.3f} {q.coverage:8.3f} {q.greedy:7.3f} {q.sampled:6.3f} "
            for acceptance in (q.greedy, q.sampled):
                speed, k = best_speedup(acceptance, c, v)
                line += f" {speed:.2f} ({k})"
        print(line, flush=True)


def quality_of(
    lm: SelfSpeculativeLM, options: argparse.Namespace, sizes: Sequence[int]
) -> dict[int, Quality]:
    examples = [e for e in examples_from(options.prompts, CODE_CHOICE) if e.continuation]
    texts = read_prompts(options.texts) if options.texts else examples[options.limit :]
    ids = [lm.tokenizer(e.prompt + e.continuation)["input_ids"] for e in texts]
    print(f"ranked by {sum(map(len, ids))} tokens of {len(ids)} texts")
    choose = partial(
        choose_vocabulary, ids, vocab_size=lm.stack.vocab_size, always=lm.tokenizer.all_special_ids
    )
    kept = {n: choose(size=n) for n in sizes}
    return quality(lm, examples[: options.limit], kept, lm.plan.shared_depth)


if __name__ == "__main__":
    main()
