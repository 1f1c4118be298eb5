"""What the benchmarks share: options, one loaded checkpoint, prompts, the figures beside a time."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import layerskip
from layerskip import DecodeStats, DraftPlan, GenerationOutput, SamplingParams, SelfSpeculativeLM
from layerskip.checkpoint import held_out_modules
from layerskip.compare import Comparison, Run, repeated_share
from layerskip.params import NumDraftTokens
from layerskip.prompts import held_out_code, read_prompts

VERSIONS = {
    "layerskip": layerskip.__version__,
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}


@dataclass(frozen=True)
class Size:
    """How much is decoded, and how often a time is taken."""

    prompts: int
    new_tokens: int
    rounds: int
    warmup_rounds: int
    passes: int


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("layerskip")
    group.addoption("--model", default="builtin", help="folder, hub id or 'builtin'")
    group.addoption("--device", default="auto", help="cpu, cuda or auto")
    group.addoption("--dtype", default=None, help="bfloat16, float16 or float32")
    group.addoption("--prompts", default=None, type=Path, help="JSON lines; default: held-out code")
    group.addoption("--bench-tokens", default=64, type=int, help="new tokens per prompt (64)")
    group.addoption("--smoke", action="store_true", help="2 prompts, 8 tokens, each once")


class Lab:
    """One checkpoint and its prompts, decoded greedily in any mode.

    Every benchmark decodes all the prompts, so that times of one group can be compared whatever
    the batch size.
    """

    def __init__(self, size: Size, config: pytest.Config) -> None:
        self.size = size
        self.model, self.tokenizer, self.plan, self.num_draft_tokens = SelfSpeculativeLM.load_parts(
            config.getoption("--model"),
            device=config.getoption("--device"),
            dtype=config.getoption("--dtype"),
        )
        self.plain = SelfSpeculativeLM(self.model, self.tokenizer, num_draft_tokens=0)
        self.wrap = cache(self._wrap)
        self.prompts = self._prompts(config.getoption("--prompts"))
        self.context = round(sum(map(len, self.prompts)) / len(self.prompts) + size.new_tokens / 2)

    def _wrap(self, exit_layer: int | None = None) -> SelfSpeculativeLM:
        """The model drafting with its first layers, or None: with the checkpoint's own plan."""
        depth, plan = self.plain.stack.num_layers, self.plan.plan
        if exit_layer is not None:
            if exit_layer >= depth:
                pytest.skip(f"the model has {depth} layers")
            plan = DraftPlan.exiting(num_layers=depth, exit_layer=exit_layer)
        if plan is None:
            pytest.skip("no plan is known for this model")
        if exit_layer is not None:  # an exit by itself, without look-ups
            return SelfSpeculativeLM(self.model, self.tokenizer, plan, lookup=False)
        return SelfSpeculativeLM(self.model, self.tokenizer, self.plan)

    def _prompts(self, path: Path | None) -> list[list[int]]:
        examples = read_prompts(path) if path else held_out_code(held_out_modules(), 100)
        room = self.plain.stack.max_positions - self.size.new_tokens
        encoded = [self.tokenizer(e.prompt)["input_ids"] for e in examples]
        fit = [ids for ids in encoded if 0 < len(ids) <= room][: self.size.prompts]
        assert fit, f"no prompt leaves room for {self.size.new_tokens} tokens"
        return fit

    def comparison(self, lm: SelfSpeculativeLM) -> Comparison:
        greedy = SamplingParams()
        return Comparison(self.model, lm, sampling=greedy, max_new_tokens=self.size.new_tokens)

    def decode(
        self, lm: SelfSpeculativeLM, num_draft_tokens: NumDraftTokens, batch_size: int
    ) -> list[GenerationOutput]:
        """All prompts through our decoder, ``batch_size`` at a time."""
        outputs: list[GenerationOutput] = []
        for start in range(0, len(self.prompts), batch_size):
            outputs += lm.generate(
                self.prompts[start : start + batch_size],
                max_new_tokens=self.size.new_tokens,
                num_draft_tokens=num_draft_tokens,
            )
        return outputs

    @cached_property
    def plain_tokens(self) -> list[tuple[int, ...]]:
        """What plain decoding gives for each prompt."""
        return [out.token_ids for out in self.decode(self.plain, 0, 1)]

    def theory(self, lm: SelfSpeculativeLM, stats: DecodeStats) -> dict[str, float]:
        """Predicted speed-up over plain decoding at batch 1 (DESIGN 6), from bare passes."""
        theory = self.comparison(lm).theory(stats, context=self.context, repeats=self.size.passes)
        return {"c": theory.c, "v": theory.v, "theory_speedup": theory.speedup}


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = request.config
    size = Size(8, config.getoption("--bench-tokens"), rounds=5, warmup_rounds=1, passes=30)
    if config.getoption("--smoke"):
        size = Size(2, 8, rounds=1, warmup_rounds=0, passes=7)
    return Lab(size, config)


@pytest.fixture
def measure(lab: Lab, benchmark: Any) -> Callable[..., None]:
    """``measure(work)``: time it, and write what it decoded beside the time."""

    def run(work: Callable[[], Sequence[Any]], lm: SelfSpeculativeLM | None = None) -> None:
        outputs = benchmark.pedantic(
            work, rounds=lab.size.rounds, warmup_rounds=lab.size.warmup_rounds
        )
        benchmark.extra_info |= describe(lab, outputs, lm)
        if benchmark.stats is not None:  # None under --benchmark-disable
            seconds = benchmark.stats.stats.median
            tokens = benchmark.extra_info["tokens"]
            benchmark.extra_info["tokens_per_second"] = tokens / seconds

    return run


def describe(
    lab: Lab, outputs: Sequence[GenerationOutput | Run], lm: SelfSpeculativeLM | None
) -> dict[str, Any]:
    """What ``extra_info`` carries; None where a figure does not exist for the mode.

    Args:
        lab: where it was decoded.
        outputs: one of each prompt.
        lm: our decoder, if a prediction is wanted: it holds for batch 1 only.
    """
    stats = DecodeStats.merge(o.stats for o in outputs if o.stats is not None)
    drafted = stats.num_draft_tokens > 0
    token_ids = [o.token_ids for o in outputs]
    same = sum(a == b for a, b in zip(token_ids, lab.plain_tokens, strict=True))
    info = {
        "acceptance_rate": stats.acceptance_rate if drafted else None,
        "mean_accepted_length": stats.mean_accepted_length if drafted else None,
        "c": None,
        "v": None,
        "theory_speedup": None,
        "identical_to_plain": same / len(outputs),
        "repeated_8gram_share": repeated_share(token_ids),
        "prompts": len(outputs),
        "tokens": sum(map(len, token_ids)),
        "threads": torch.get_num_threads(),
        "dtype": str(lab.model.dtype).removeprefix("torch."),
        "device": str(lab.model.device),
        "versions": VERSIONS,
    }
    return info | (lab.theory(lm, stats) if lm is not None else {})
