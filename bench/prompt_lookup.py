"""Look-ups alone: tokens a pass, ours and transformers' `prompt_lookup_num_tokens`, same prompts.

Counts only, so nothing is timed. Both draft at most ten tokens and decode greedily; both texts are
the model's own, and differ only where bfloat16 makes transformers' differ. A loop in the text
flatters both: the share of repeated 8-grams is printed, and prompts below 20 % by themselves.

    OMP_NUM_THREADS=1 python bench/prompt_lookup.py [--prompts FILE.jsonl] [--limit 30] [--copying]
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from paired import quiet
from rich.progress import track
from tasks import examples_from

from layerskip import SelfSpeculativeLM
from layerskip.compare import repeated_share
from layerskip.prompts import Example

DRAFTED, LOOPS = 10, 0.2
COPIED_LINES = 3


@dataclass(frozen=True)
class Found:
    """Tokens a pass of one prompt: ours and theirs; share of the text's 8-grams that repeat."""

    ours: float
    theirs: float
    repeated: float


def copying(example: Example) -> Example:
    """A function, then the same function begun again."""
    whole = example.prompt + example.continuation
    begun = "\n".join(whole.split("\n")[:COPIED_LINES])
    return Example(f"{whole}\n# the same once more:\n{begun}\n")


def measure(lm: SelfSpeculativeLM, model: torch.nn.Module, ids: list[int], tokens: int) -> Found:
    out = lm.generate(ids, max_new_tokens=tokens)
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        theirs = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            prompt_lookup_num_tokens=DRAFTED,
            pad_token_id=0,
        )
    finally:
        handle.remove()
    new = theirs.shape[1] - len(ids)
    # The prefill, one of their calls, emits tokens too, as ours does.
    return Found(
        len(out.token_ids) / (out.stats.num_rounds + 1),
        new / len(calls),
        repeated_share([out.token_ids]),
    )


def show(name: str, found: Sequence[Found]) -> None:
    if found:
        ours, theirs = (statistics.fmean(getattr(f, n) for f in found) for n in ("ours", "theirs"))
        better = sum(f.ours >= f.theirs for f in found)
        print(
            f"{name:16} {len(found):3} prompts  ours {ours:.3f}  transformers {theirs:.3f}  "
            f"ours as good or better on {better}  repeated "
            f"{statistics.fmean(f.repeated for f in found):.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", help="JSON lines; without it, held-out library code")
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--copying", action="store_true", help="ask for what the prompt holds")
    options = parser.parse_args()
    quiet()
    model, tokenizer, _, _ = SelfSpeculativeLM.load_parts(options.model, device="cpu")
    lm = SelfSpeculativeLM(model, tokenizer, num_draft_tokens=DRAFTED)
    examples = examples_from(options.prompts, 4 * options.limit)
    if options.copying:
        examples = [copying(e) for e in examples]
    room = lm.stack.max_positions - options.tokens
    encoded = [tokenizer(e.prompt)["input_ids"] for e in examples]
    fit = [ids for ids in encoded if 0 < len(ids) <= room][: options.limit]
    found = [measure(lm, model, ids, options.tokens) for ids in track(fit, "prompts")]
    show("all", found)
    show("below 20 %", [f for f in found if f.repeated < LOOPS])


if __name__ == "__main__":
    main()
