"""What a full pass costs with 1, 2, 4 and 8 tokens: experts against a dense model of their kind.

``OMP_NUM_THREADS=1 python bench/experts.py`` prints the table of ``bench/LOG.md``: medians of
processor time, which other processes change little. Passes of all models and sizes take turns in
random order, each after an untimed one of its own that fills the caches.
"""

import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from layerskip.cache import Segment
from layerskip.model import DecoderStack

SHAPE = {
    "vocab_size": 331,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS = {
    "mistral, dense": ("mistral", {"intermediate_size": 1024}, 0, 0),
    "mixtral, 2 of 8": ("mixtral", {"intermediate_size": 512, "num_local_experts": 8}, 2, 8),
    "qwen3_moe, 8 of 64": (
        "qwen3_moe",
        {"moe_intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 8},
        8,
        64,
    ),
}
TOKENS = (1, 2, 4, 8)
REPEATS = 60


def make_pass(family: str, changes: dict[str, int]) -> Callable[[int], float]:
    """Seconds of one full pass, head included, with so many tokens of a random text."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SHAPE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(50)  # else every token asks for the same experts
    stack = DecoderStack(model)
    cache = stack.new_cache(num_rows=1, num_slots=128).written()
    text = torch.randint(331, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    stack.prefill(text, cache, 0)

    def one_pass(count: int) -> float:
        ids = torch.randint(331, (count,)).tolist()
        began = time.process_time()
        segments = [Segment(0, 100, count)]
        hidden = stack.run_layers(stack.embed(ids), range(stack.num_layers), cache, segments)
        stack.logits(hidden)
        return time.process_time() - began

    return one_pass


@torch.inference_mode()
def main() -> None:
    passes = {name: make_pass(*model[:2]) for name, model in MODELS.items()}
    seconds: dict[tuple[str, int], list[float]] = {(n, m): [] for n in MODELS for m in TOKENS}
    for _ in range(REPEATS):
        for name, m in random.sample(list(seconds), len(seconds)):
            passes[name](m)
            seconds[name, m].append(passes[name](m))
    print("| model | pass of 1 token (ms) | 2 | 4 | 8 |\n|---|---:|---:|---:|---:|")
    for name, (_, _, asked, experts) in MODELS.items():
        times = [statistics.median(seconds[name, m]) for m in TOKENS]
        cells = [f"{t / times[0]:.2f}" for t in times[1:]]
        if experts:
            touched = [experts * (1 - (1 - asked / experts) ** m) / asked for m in TOKENS[1:]]
            cells = [f"{c} ({t:.2f})" for c, t in zip(cells, touched, strict=True)]
        print(f"| {name} | {times[0] * 1e3:.2f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
