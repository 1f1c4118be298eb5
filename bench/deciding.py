"""What the calls that only automatic drafting makes take of its rounds.

    OMP_NUM_THREADS=1 python bench/deciding.py
    OMP_NUM_THREADS=1 python bench/deciding.py --prompts prompts.jsonl --temperature 0

Timed where they are made, between passes that streamed the weights through the caches: on paper,
one after the other, they take a fifth of that. Reading the clock is part of what is shown.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from paired import circumstances, dated, quiet, sampling_at, write
from rich.progress import track
from tasks import examples_from, spread

from layerskip import SelfSpeculativeLM, decode
from layerskip.control.stopping import Stopper
from layerskip.controller import Controller

LONGEST = 300  # tokens of a prompt
CALLS: tuple[tuple[type | ModuleType, str], ...] = (
    (Controller, "choose"),
    (Stopper, "goes_on"),
    (Controller, "going_on"),
    (Controller, "observe_draft"),
    (Controller, "observe_plain"),
    (decode, "observe_seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", help="JSON lines; default: held-out functions")
    parser.add_argument("--limit", type=int, default=24, help="prompts (24)")
    parser.add_argument("--tokens", type=int, default=64, help="of each text (64)")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=dated("deciding"))
    args = parser.parse_args()
    quiet()
    lm = SelfSpeculativeLM.from_pretrained(args.model)
    examples = examples_from(args.prompts, 8 * args.limit)
    encoded = [lm.tokenizer(e.prompt)["input_ids"] for e in examples]
    prompts = spread([ids for ids in encoded if 0 < len(ids) <= LONGEST], args.limit)[: args.limit]
    settings = {"max_new_tokens": args.tokens, "sampling": sampling_at(args.temperature)}
    found = spent(lm, prompts, settings)
    print(f"{found['rounds']} rounds of {1e3 * found['round_seconds']:.2f} ms")
    for name, seconds in found["seconds"].items():
        print(f"{name}: {1e6 * seconds:.0f} us a round")
    asked = {"tokens": args.tokens, "temperature": args.temperature}
    write(args.out, {**circumstances(), **asked, **found})


def spent(
    lm: SelfSpeculativeLM, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Mean seconds of a round, and of each of the calls in it; the first text warms up."""
    lm.generate(prompts[0], **settings)
    rounds, elapsed = 0, 0.0
    with timed() as seconds:
        for prompt in track(prompts, "decoding"):
            first, *others = lm.generate(prompt, **settings).rounds  # the first is the prefill
            if others:
                rounds += len(others)
                elapsed += others[-1].elapsed_seconds - first.elapsed_seconds
    each = {name: total / rounds for name, total in seconds.items()}
    return {"rounds": rounds, "round_seconds": elapsed / rounds, "seconds": each}


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds by call, of all that are made meanwhile."""
    seconds = {f"{owner.__name__}.{name}": 0.0 for owner, name in CALLS}

    def clocked(called: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(called)
        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return called(*given, **named)
            finally:
                seconds[name] += time.perf_counter() - began

        return call

    with ExitStack() as patches:
        for owner, name in CALLS:
            call = clocked(getattr(owner, name), f"{owner.__name__}.{name}")
            patches.enter_context(mock.patch.object(owner, name, call))
        yield seconds


if __name__ == "__main__":
    main()
