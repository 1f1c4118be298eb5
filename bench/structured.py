"""JSON by schema: refused, valid, the same with and without drafts, and how fast.

    OMP_NUM_THREADS=1 python bench/structured.py --schemas jsonschemas_dev.jsonl

Without ``--schemas`` (JSON lines with ``id`` and ``schema``), those that tests/grammars.py makes.
Every accepted schema is written plainly, with a fixed number of drafts, and automatically; modes
must emit what plain constrained decoding does, or the script stops. ``--timed`` of them, taken
evenly, are also written by transformers and without forced text, and these alone are compared in
speed: a ratio is one schema's, by the wall and by the process's own CPU time, modes in random
order, and its figure is the median with a bootstrap 95 % interval. "transformers" is its
``generate`` with xgrammar's own logits processor, made to choose the very tokens that plain
decoding chose, so that both do the same work. "automatic, nothing forced" drafts what the grammar
forces as it does everything else. Compiling is left out everywhere. Then the grammar's share of a
round, by this thread's CPU time inside ``Constraint``, in calls of their own.
"""

import argparse
import collections
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import referencing.exceptions
import torch
import xgrammar
from paired import (
    Clock,
    Decoded,
    circumstances,
    dated,
    decode,
    geometric_mean,
    quiet,
    ratios,
    sampling_at,
    total,
    wrapped,
    write,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tasks import spread
from xgrammar.contrib.hf import LogitsProcessor

from layerskip import DecodeStats, Grammar, SamplingParams, SelfSpeculativeLM
from layerskip.constraint import Constraint
from layerskip.grammar_xgrammar import XGrammarMatcher
from layerskip.hf_modes import generate_arguments
from layerskip.params import NumDraftTokens

FIXED = 3
PROMPT_CHARACTERS = 400
GOAL = 1.3
THEIRS = "transformers + xgrammar"
UNFORCED = "automatic, nothing forced"
MODES: dict[str, NumDraftTokens] = {
    "plain": 0, f"k={FIXED}": FIXED, "automatic": "auto", UNFORCED: "auto"
}  # fmt: skip


@dataclass
class Case:
    """One schema.

    Attributes:
        grammar: None if it is refused.
        reason: why, by the keyword.
        runs: by mode.
    """

    name: str
    schema: Any
    grammar: Grammar | None = None
    reason: str = ""
    runs: dict[str, Decoded] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return f"schema = {json.dumps(self.schema)[:PROMPT_CHARACTERS]}\n\nvalue = "

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.runs["plain"].rounds)

    @property
    def complete(self) -> bool:
        return self.runs["plain"].rounds[-1].finish_reason == "stop"

    @property
    def valid(self) -> bool | None:
        """By jsonschema; None if it can't read the schema."""
        kind = jsonschema.validators.validator_for(
            self.schema, default=jsonschema.Draft202012Validator
        )
        value = json.loads(self.text)
        try:
            return bool(kind(self.schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))
        except (re.error, referencing.exceptions.Unresolvable, RecursionError):
            return None


def read(path: Path | None, limit: int) -> list[Case]:
    """Schemas of a file, or made ones."""
    if path is not None:
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [Case(row["id"], row["schema"]) for row in rows][:limit]
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from grammars import random_root

    return [Case(f"made/{seed}", random_root(seed)) for seed in range(limit)]


def admit(case: Case, lm: SelfSpeculativeLM) -> None:
    """Fill in ``grammar``, or ``reason``."""
    try:
        grammar = Grammar.json_schema(case.schema)
        lm._grammars.matcher(grammar)
        case.grammar = grammar
    except ValueError as error:
        found = re.search(r"schema's ('\w+') at", str(error))
        case.reason = found[1] if found else str(error)


class Theirs:
    """``generate`` of transformers under xgrammar's logits processor."""

    def __init__(self, model: Any, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.model = model
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer,
            vocab_size=model.config.vocab_size,
            stop_token_ids=sorted(eos_ids) or [tokenizer.eos_token_id],
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def decode(
        self, ids: Sequence[int], grammar: Grammar, tokens: Sequence[int], sampling: SamplingParams
    ) -> Decoded:
        """Write ``tokens`` and nothing else."""
        compiled = self.compiler.compile_json_schema(
            grammar.source, any_whitespace=False, strict_mode=False
        )
        chosen = iter(tokens)

        def choose(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = next(chosen)
            assert scores[0, token].isfinite(), "xgrammar forbids what layerskip wrote"
            return torch.full_like(scores, float("-inf")).index_fill_(
                1, torch.tensor([token], device=scores.device), 0.0
            )

        prompt = torch.tensor([ids], device=self.model.device)
        began = Clock.now()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(tokens),
            pad_token_id=0,
            logits_processor=[LogitsProcessor(compiled), choose],
            **generate_arguments(sampling),
        )
        return Decoded(tuple(out[0, len(ids) :].tolist()), Clock.now() - began)


@contextlib.contextmanager
def nothing_forced() -> Iterator[None]:
    """Forced text is drafted like any other, though its spelling stays."""
    guess = Constraint.guess

    def without(
        self: Constraint, context: Sequence[int], found: Sequence[int], most: int
    ) -> tuple[tuple[int, ...], bool]:
        tokens, forced = guess(self, context, found, most)
        return ((), False) if forced else (tokens, forced)

    Constraint.guess = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        Constraint.guess = guess  # type: ignore[method-assign]


class Spent:
    """CPU seconds of this thread inside methods; a call within another is the outer one's."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    @contextlib.contextmanager
    def inside(self, owner: type, *names: str) -> Iterator[None]:
        before = {name: owner.__dict__[name] for name in names}
        for name, method in before.items():
            setattr(owner, name, self._clocked(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(owner, name, method)

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside, began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1
                self._inside = False

        return clocked


class Bench:
    """All modes on all schemas at one temperature."""

    def __init__(self, model: str, tokens: int, sampling: SamplingParams) -> None:
        self.tokens, self.sampling = tokens, sampling
        loaded, tokenizer, known, _ = SelfSpeculativeLM.load_parts(model, dtype=None, device="cpu")
        self.lm = wrapped(loaded, tokenizer, known, known.cost, lookup=False)
        cost = self.lm.controller.cost
        self.unforced = wrapped(loaded, tokenizer, known, cost, lookup=False)
        self.theirs = Theirs(loaded, tokenizer, self.lm.eos_ids)
        self.tokenizer = tokenizer

    def decode(self, case: Case, mode: str) -> Decoded:
        ids = self.tokenizer(case.prompt)["input_ids"]
        if mode == THEIRS:
            wanted = case.runs["plain"].token_ids
            return self.theirs.decode(ids, case.grammar, wanted, self.sampling)
        patch = nothing_forced() if mode == UNFORCED else contextlib.nullcontext()
        with patch:
            return decode(
                self.unforced if mode == UNFORCED else self.lm,
                ids,
                MODES[mode],
                max_new_tokens=self.tokens,
                sampling=self.sampling,
                grammar=case.grammar,
            )

    def run(self, case: Case, shuffle: random.Random, *, timed: bool) -> None:
        """Every mode once; plain decoding first, for transformers follows its tokens."""
        case.runs["plain"] = self.decode(case, "plain")
        modes = [*MODES, THEIRS] if timed else [m for m in MODES if m not in ("plain", UNFORCED)]
        for mode in shuffle.sample(modes, len(modes)):
            found = self.decode(case, mode)
            if found.token_ids != case.runs["plain"].token_ids:
                raise AssertionError(f"{case.name}, {mode}: other tokens than plain decoding")
            case.runs[mode] = found

    def overhead(self, cases: Sequence[Case], mode: str) -> dict[str, float]:
        """The grammar's part of a round, in calls of their own."""
        grammar, fills, rounds, spent = Spent(), Spent(), 0, 0.0
        asked = ("masked", "closed", "guess", "prepare", "forget_before")
        for case in cases:
            with grammar.inside(Constraint, *asked), fills.inside(XGrammarMatcher, "fill"):
                run = self.decode(case, mode)
            rounds += len(run.rounds)
            spent += run.whole.cpu
        return {
            "microseconds_per_round": 1e6 * grammar.seconds / rounds,
            "share_of_time": grammar.seconds / spent,
            "fills_per_round": fills.calls / rounds,
            "microseconds_per_fill": 1e6 * fills.seconds / fills.calls,
        }


def figures(cases: Sequence[Case], mode: str) -> dict[str, Any]:
    """Speed of one mode beside plain and transformers, over the cases that were run."""
    runs = [case.runs[mode] for case in cases]
    spent = total([r.whole for r in runs])
    count = sum(len(r.token_ids) for r in runs)
    found: dict[str, Any] = {
        "tokens_per_second": count / spent.wall,
        "tokens_per_cpu_second": count / spent.cpu,
    }
    for other in ("plain", THEIRS, UNFORCED):
        found[f"to {other}"] = ratios(
            [r.whole for r in runs], [case.runs[other].whole for case in cases]
        )
        pairs = [c.runs[other].whole.cpu / c.runs[mode].whole.cpu for c in cases]
        found[f"to {other}"]["cpu_geometric_mean"] = geometric_mean(pairs)
    if mode != THEIRS:
        stats = DecodeStats.merge(r.stats for r in runs)
        found["mean_accepted_length"] = stats.mean_accepted_length
        found["acceptance_rate"] = stats.acceptance_rate
        found["rounds"] = stats.num_rounds
        found["draft_passes"] = sum(r.num_draft_passes for run in runs for r in run.rounds)
    return found


def document(cases: Sequence[Case], bench: Bench) -> dict[str, Any]:
    """The table of one temperature."""
    accepted = [c for c in cases if c.grammar is not None and c.runs]
    complete = [c for c in accepted if c.complete]
    verdicts = [c.valid for c in complete]
    timed, modes = [c for c in accepted if THEIRS in c.runs], [*MODES, THEIRS]
    return {
        "temperature": bench.sampling.temperature,
        "tried": len(cases),
        "refused": dict(collections.Counter(c.reason for c in cases if c.grammar is None)),
        "accepted": len(accepted),
        "complete": len(complete),
        "valid": sum(v is True for v in verdicts),
        "invalid": [c.name for c, v in zip(complete, verdicts, strict=True) if v is False],
        "not_judged": [c.name for c, v in zip(complete, verdicts, strict=True) if v is None],
        "token_equal": len(accepted),  # or the script has stopped
        "new_tokens": sum(len(c.runs["plain"].token_ids) for c in accepted),
        "timed": len(timed),
        "modes": {mode: figures(timed, mode) for mode in modes},
        "overhead": {mode: bench.overhead(timed[::2], mode) for mode in ("plain", "automatic")},
    }


def show(found: dict[str, Any], console: Console) -> None:
    """As people read it."""
    refused = ", ".join(f"{count} {why}" for why, count in found["refused"].items()) or "none"
    console.print(
        f"temperature {found['temperature']:g}: {found['tried']} tried, refused: {refused}; "
        f"{found['accepted']} accepted, all token-equal in {', '.join(MODES)}; "
        f"{found['complete']} complete, {found['valid']} valid, {len(found['invalid'])} invalid, "
        f"{len(found['not_judged'])} that jsonschema can't judge"
    )
    table = Table("mode", "tokens/CPU s", "plain / it", "transformers / it", "length", box=None)
    for mode, one in found["modes"].items():
        cells = []
        for other in ("plain", THEIRS):
            pair = one[f"to {other}"]
            low, high = pair["cpu_ci95"]
            cells.append(f"{pair['cpu']:.2f} ({low:.2f}-{high:.2f})")
        length = one.get("mean_accepted_length")
        speed = f"{one['tokens_per_cpu_second']:.1f}"
        table.add_row(mode, speed, *cells, "" if length is None else f"{length:.2f}")
    console.print(table)
    forced = found["modes"]["automatic"][f"to {UNFORCED}"]
    low, high = forced["cpu_ci95"]
    console.print(f"gain of forced text: {forced['cpu']:.3f} ({low:.3f}-{high:.3f})")
    for mode, one in found["overhead"].items():
        console.print(
            f"grammar, {mode}: {one['microseconds_per_round']:.0f} us a round "
            f"({one['share_of_time']:.1%} of the time), {one['fills_per_round']:.1f} masks of "
            f"{one['microseconds_per_fill']:.0f} us"
        )
    speed = found["modes"]["automatic"]
    plain, theirs = speed["to plain"]["cpu"], speed[f"to {THEIRS}"]["cpu"]
    holds = "holds" if plain >= GOAL and theirs > 1.0 else "does not hold"
    console.print(f"{GOAL}x plain and faster than transformers: {holds} (by CPU time)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--schemas", type=Path, help="JSON lines with id and schema")
    parser.add_argument("--limit", type=int, default=300, help="schemas (300)")
    parser.add_argument("--timed", type=int, default=40, help="of them compared in speed (40)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a schema (96)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--out", type=Path, default=dated("structured"))
    options = parser.parse_args()
    quiet()
    console, documents = Console(width=120), []
    for temperature in options.temperatures:
        sampling = sampling_at(temperature)
        bench = Bench(options.model, options.tokens, sampling)
        cases, shuffle = read(options.schemas, options.limit), random.Random(0)
        for case in cases:
            admit(case, bench.lm)
        accepted = [case for case in cases if case.grammar is not None]
        if not accepted:
            why = "; ".join(sorted({case.reason for case in cases})[:3]) or "there are none"
            raise SystemExit(
                f"none of {len(cases)} schemas is accepted ({why}); give other --schemas"
            )
        for mode in (*MODES, THEIRS):  # each mode's first call allocates, and imports
            accepted[0].runs["plain"] = bench.decode(accepted[0], "plain")
            bench.decode(accepted[0], mode)
        chosen = set(spread(range(len(accepted)), options.timed)[: options.timed])
        for i, case in enumerate(track(accepted, f"temperature {temperature:g}", console=console)):
            bench.run(case, shuffle, timed=i in chosen)
        documents.append(document(cases, bench))
        command = vars(options) | {"out": options.out.name, "schemas": bool(options.schemas)}
        write(
            options.out,
            {"model": options.model, **circumstances(), "command": command, "runs": documents},
        )
        show(documents[-1], console)


if __name__ == "__main__":
    main()
