"""A model that its owner holds, wrapped, beside the same one loaded, and transformers' generate.

    OMP_NUM_THREADS=1 python bench/wrapped.py --dtype float32

A random Llama; the ways take turns over the same tokens, the first turn is a warm-up, and a figure
is the median of the others, with its lowest and highest. With one thread the clock is the process's
CPU time. Drafts of a random model are right by chance: what rounds of them cost is told here, not
what they gain.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch
from paired import quiet
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from layerskip import DraftPlan, SelfSpeculativeLM

PROMPT = tuple(range(100, 140))
EXIT, DRAFTED = 2, 4
Way = Callable[[], list[int]]


def make(options: argparse.Namespace) -> PreTrainedModel:
    heads = options.width // 64
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=11 * options.width // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
        vocab_size=options.vocab,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def ways_of(model: PreTrainedModel, new_tokens: int) -> dict[str, Way]:
    """What is compared, by name."""

    def theirs() -> list[int]:
        ids = torch.tensor([PROMPT])
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        return out[0, len(PROMPT) :].tolist()

    def ours(lm: SelfSpeculativeLM, drafted: int) -> Way:
        ask = {"max_new_tokens": new_tokens, "num_draft_tokens": drafted}
        return lambda: list(lm.generate(list(PROMPT), **ask).token_ids)

    plan = DraftPlan.exiting(num_layers=model.config.num_hidden_layers, exit_layer=EXIT)
    decoders = {"wrapped": SelfSpeculativeLM(model, None, plan, lookup=False)}
    with mock.patch("layerskip.dense.read_in_place", return_value=False):
        decoders["wrapped, torch's products"] = SelfSpeculativeLM(model, None, plan, lookup=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoders["loaded"] = SelfSpeculativeLM.from_pretrained(
            folder, plan=plan, num_draft_tokens=0, lookup=False, device="cpu"
        )
    for name, lm in decoders.items():
        print(f"{name}: {lm.stack.backend}; {lm.exactness}")
    ways: dict[str, Way] = {"transformers' generate": theirs}
    for name, lm in decoders.items():
        ways[f"{name}, plain"] = ours(lm, 0)
        ways[f"{name}, {DRAFTED} drafted"] = ours(lm, DRAFTED)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", default=1024, type=int, help="a multiple of 64 (1024)")
    parser.add_argument("--layers", default=8, type=int)
    parser.add_argument("--vocab", default=32_000, type=int)
    parser.add_argument("--new-tokens", default=24, type=int)
    parser.add_argument("--turns", default=7, type=int, help="after the warm-up (7)")
    options = parser.parse_args()
    quiet()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ways = ways_of(make(options), options.new_tokens)
    texts: dict[str, list[int]] = {}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name, way in ways.items():
            began = clock()
            texts[name] = way()
            if turn:
                taken[name].append((clock() - began) / options.new_tokens * 1e3)
    first = texts["transformers' generate"]
    print("ms a token with its prompt, median (lowest to highest); text")
    for name, took in taken.items():
        told = "the same" if texts[name] == first else "another"
        print(
            f"{name:40} {statistics.median(took):7.1f} ({min(took):.1f} to {max(took):.1f})  {told}"
        )


if __name__ == "__main__":
    main()
