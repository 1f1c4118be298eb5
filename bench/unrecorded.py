"""CPU seconds of rounds that nothing records, as one line of JSON: by prompt and draft tokens.

``recording_cost.py --before`` runs it with two checkouts of layerskip, so it imports only what an
old one has, too.
"""

import argparse
import json
import time
from typing import Any

from layerskip import SelfSpeculativeLM
from layerskip.checkpoint import held_out_modules
from layerskip.prompts import held_out_code

DRAFTED: tuple[Any, ...] = (0, 5, "auto")


def seconds_per_round(
    lm: SelfSpeculativeLM, prompt: list[int], drafted: Any, tokens: int, **recording: Any
) -> float:
    """CPU seconds of a decoding over its rounds, its prefill among both."""
    began = time.process_time()
    out = lm.generate(
        prompt, max_new_tokens=tokens, num_draft_tokens=drafted, ignore_eos=True, **recording
    )
    return (time.process_time() - began) / len(out.rounds)


def loaded(args: argparse.Namespace) -> tuple[SelfSpeculativeLM, list[list[int]]]:
    lm = SelfSpeculativeLM.from_pretrained(args.model, num_draft_tokens=0)
    examples = held_out_code(held_out_modules(), args.limit)
    return lm, [lm.encode(e.prompt)[-args.context :] for e in examples]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="builtin")
    for name in ("--limit", "--tokens", "--context"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    lm, prompts = loaded(args)
    every = [(p, k) for p in prompts for k in DRAFTED]
    seconds_per_round(lm, *every[0], args.tokens)
    print(json.dumps([seconds_per_round(lm, p, k, args.tokens) for p, k in every]))


if __name__ == "__main__":
    main()
