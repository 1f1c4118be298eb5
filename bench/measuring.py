"""One cell measured: every mode on the same prompts, then its figures.

On a CPU ours go on round by round in alternation (``paired.by_turns``), so that all see the same
machine; before or after that, in random order, each of transformers' modes. A device that works
ahead of its host would do one's work in the other's time: there all modes take turns by texts.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, Protocol

import torch
from cells import Cell
from figures import drafting, handed_out, sameness, speeds
from forced import Told, along, runs_of, texts_of
from lab import Lab
from modes import ALONE, BASE, FIXED, MODES, OURS, THEIR_BASE, TUNED, Turn, Way, ours, peak_memory
from paired import circumstances, forget

from layerskip import SamplingParams
from layerskip.calibration import Text
from layerskip.compare import repeated_share
from layerskip.params import AUTO

LEAST = 3  # prompts, or batches of them, whatever the time
MEMORY_TOKENS = 16
TABLE_SECONDS, TABLE_SHARE = 5.0, 0.1  # of the cost table that predictions are made from
REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError)


def modes_of(cell: Cell) -> list[str]:
    """The modes that a cell compares."""
    if cell.kind == "forced":
        return [BASE, "fixed"]
    return [m for m in MODES if cell.batch == 1 or m not in ALONE]


class Source(Protocol):
    """What a cell decodes: ``groups`` of prompts, in each of its modes.

    Attributes:
        ways: our modes.
        unsupported: why a mode is left out.
    """

    ways: dict[str, Way]
    groups: Sequence[Any]
    unsupported: dict[str, str]

    def prepare(self) -> None:
        """Before anything is timed."""
        ...

    def decode(
        self, modes: Sequence[str], group: Any, *, tokens: int, count: bool = False
    ) -> dict[str, Turn]:
        """One group, once in each of these modes."""
        ...

    def settings(self, mode: str) -> dict[str, Any]:
        """That were found for a mode."""
        ...


class Written:
    """What the model writes, greedily or sampled."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self.lab, self.cell, self.chance = lab, cell, random.Random(0)
        self.sampling, self.tokens = lab.sampling(cell.temperature), lab.tokens(cell)
        self.ways, self.unsupported = lab.ours(), {}
        self.theirs = lab.theirs(cell.temperature, self.ways[BASE].lm)
        prompts = [p.ids for p in lab.prompts(cell)]
        if prompts and len(prompts) < cell.batch:
            prompts = (prompts * cell.batch)[: cell.batch]
        starts = range(0, len(prompts) - cell.batch + 1, cell.batch)
        self.groups = [prompts[i : i + cell.batch] for i in starts]
        if "fixed" not in self.ways:
            self.unsupported["fixed"] = "no plan is known for this model"
        if self.theirs.draft_model is None:
            self.unsupported["hf-draft-model"] = "no independent model with this tokenizer is given"

    def prepare(self) -> None:
        for mode in TUNED:
            if mode in modes_of(self.cell) and mode not in self.unsupported:
                try:
                    self.theirs.settings[mode] = self.lab.tuned(mode, self.cell.temperature)
                except REFUSALS as error:
                    self.unsupported[mode] = reason(error)
        if self.cell.batch == 1:  # batches have no mode that is tuned
            others = [g for g in self.groups if not any(asks(g[0], s) for s in self.lab.spares)]
            self.groups = others if len(others) >= LEAST else self.groups

    def decode(
        self, modes: Sequence[str], group: Any, *, tokens: int, count: bool = False
    ) -> dict[str, Turn]:
        settings = {"sampling": self.sampling, "max_new_tokens": tokens}
        turns: dict[str, Turn] = {}
        for party in parties(modes, self.lab.model.device, self.chance):
            if party[0] in OURS:
                ways = {mode: self.ways[mode] for mode in party}
                turns |= ours(ways, group, self.chance, **settings)
            else:
                (mode,) = party
                turns[mode] = self.theirs.decode(mode, group, max_new_tokens=tokens, count=count)
        return turns

    def settings(self, mode: str) -> dict[str, Any]:
        return {"num_draft_tokens": FIXED} if mode == "fixed" else self.theirs.described(mode)


class Known:
    """The text that is known to follow a prompt."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self.lab, self.unsupported, self.chance = lab, {}, random.Random(0)
        self.groups: list[Text] = []
        if lab.known.plan is None:
            return
        self.ways = lab.ours()
        lm = self.ways["fixed"].lm
        self.told = lm._drafter = Told(lm)
        self._runs = cache(lambda text: runs_of(lm, text, SamplingParams(), FIXED))
        self.groups = texts_of(lab.prompts(cell), lab.tokens(cell))

    def prepare(self) -> None:
        pass

    def decode(
        self, modes: Sequence[str], group: Text, *, tokens: int, count: bool = False
    ) -> dict[str, Turn]:
        turns: dict[str, Turn] = {}
        for party in parties(modes, self.lab.model.device, self.chance):
            ways = {mode: self.ways[mode] for mode in party}
            turns |= along(ways, self.told, group, self._runs(group), self.chance)
        return turns

    def settings(self, mode: str) -> dict[str, Any]:
        return {"num_draft_tokens": FIXED} if mode == "fixed" else {}


def parties(
    modes: Sequence[str], device: torch.device, chance: random.Random
) -> list[Sequence[str]]:
    """Modes in random order, those together that decode by turns."""
    mine = [mode for mode in modes if mode in OURS]
    others = [[mode] for mode in modes if mode not in OURS]
    found = [*others, *([mine] if mine and device.type == "cpu" else [[mode] for mode in mine])]
    return chance.sample(found, len(found))


def asks(prompt: Sequence[int], other: Sequence[int]) -> bool:
    """Whether it is the other prompt, behind a context or without the other's beginning."""
    shared = min(len(prompt), len(other))
    return prompt[-shared:] == other[-shared:]


def reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


class Measured:
    """The runs of one cell."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self.lab, self.cell, self.tokens = lab, cell, lab.tokens(cell)
        self.source: Source = (Known if cell.kind == "forced" else Written)(lab, cell)
        self.runs: dict[str, list[Turn]] = {}
        self.counted: dict[str, dict[str, int]] = {}
        self.lengths: list[int] = []
        self.repeated: list[float] = []
        self.left_out = 0
        self.cost = lab.cost

    def run(self, seconds: float, limit: int) -> None:
        """Up to ``limit`` groups of prompts that do not loop, or as many as ``seconds`` allow."""
        longest = 0.0
        if not self.source.groups:
            return
        gc.unfreeze()  # decoders of other cells may be garbage by now
        self.source.prepare()
        if self.cell.batch == 1:  # others are not predicted
            self.cost = self.lab.cost_now(min(TABLE_SECONDS, TABLE_SHARE * seconds))
        began = now = time.monotonic()
        for group in self.source.groups:
            before, now = now, time.monotonic()
            kept = len(self.repeated)
            longest = max(longest, now - before) if kept > 1 else 0.0  # the first warms up
            late = now + longest - began > seconds
            if kept == limit or (late and (kept >= LEAST or self.left_out >= limit)):
                break
            plain = self.source.decode([BASE], group, tokens=self.tokens)[BASE]
            share = repeated_share(plain.texts)
            loops = self.cell.kind == "greedy" and share > self.lab.options.max_repeated
            if loops or min(map(len, plain.texts)) < 2:
                self.left_out += 1
                continue
            if not kept:
                self._warm_up(group)
            self.repeated.append(share)
            self.lengths.append(length_of(group))
            turns = self.source.decode(list(self.runs), group, tokens=self.tokens)
            for mode, turn in turns.items():
                if mode in OURS and turn.texts != plain.texts:
                    raise AssertionError(f"{self.cell.name}, {mode}: other tokens than plain")
                self.runs[mode].append(turn)

    def _warm_up(self, group: Any) -> None:
        """Every mode once for its caches, and once more, shorter, for its memory; then ours for
        what they learn."""
        device = self.lab.model.device
        for mode in modes_of(self.cell):
            if mode in self.source.unsupported:
                continue
            try:
                turns = self.source.decode([mode], group, tokens=self.tokens, count=True)
                few = min(MEMORY_TOKENS, self.tokens)
                with peak_memory(device) as peak:
                    self.source.decode([mode], group, tokens=few)
            except REFUSALS as error:
                if mode in (*OURS, THEIR_BASE):
                    raise
                self.source.unsupported[mode] = reason(error)
                continue
            self.runs[mode] = []
            cache = turns[mode].cache_bytes
            self.counted[mode] = {"kv_cache_bytes": cache, "peak_memory_bytes": peak[0]}
        # Counting memory slows draft passes most, and automatic drafting had learnt that of them.
        mine = [mode for mode in self.runs if mode in OURS]
        for way in (self.source.ways[mode] for mode in mine):
            if way.num_draft_tokens == AUTO:
                forget(way.lm)
        self.source.decode(mine, group, tokens=self.tokens)

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        found: dict[str, Any] = {
            **asdict(self.cell),
            "tokens": self.tokens,
            "prompts": len(self.repeated) * self.cell.batch,
            "prompts_left_out": self.left_out * self.cell.batch,
            "prompts_at_hand": len(self.source.groups) * self.cell.batch,
            "dtype": str(self.lab.model.dtype).removeprefix("torch."),
            "device": str(self.lab.model.device),
            "model": self.lab.options.model,
            **circumstances(),
        }
        if self.repeated:
            found["repeated_8gram_share"] = statistics.fmean(self.repeated)
            found["prompt_tokens"] = statistics.fmean(self.lengths)
        modes = {mode: self._figures(mode) for mode in self.runs} if self.repeated else {}
        return {"cell": found, "modes": modes, "unsupported": self.source.unsupported}

    def _figures(self, mode: str) -> dict[str, Any]:
        runs, turns = self.runs, self.runs[mode]
        bases = {name: runs[name] for name in (BASE, THEIR_BASE) if name in runs}
        found = speeds(turns, bases) | sameness(mode, runs, self.cell.temperature == 0.0)
        if mode in OURS:
            context = statistics.fmean(self.lengths) + self.tokens / 2
            cost = self.cost.of(greedy=self.cell.temperature == 0.0)
            single = cost if self.cell.batch == 1 else None
            found |= drafting(turns, runs[BASE], single, context)
        elif mode in ALONE:
            found |= handed_out(turns)
        settings = self.source.settings(mode)
        return (
            found
            | self.counted[mode]
            | {
                "settings": settings,
                "seconds_per_token": [t.wall_per_token for t in turns],
            }
        )


def length_of(group: Any) -> int:
    """Tokens of a group's longest prompt."""
    return group.start if isinstance(group, Text) else max(map(len, group))


def why_empty(cell: dict[str, Any]) -> str:
    """No prompt of the cell was kept."""
    tried, at_hand = cell["prompts_left_out"], cell["prompts_at_hand"]
    if tried:
        which = f"all {tried} prompts" if tried == at_hand else f"{tried} prompts of {at_hand}"
        more = "" if tried == at_hand else "; --seconds has no time for more"
        return f"{which} end at once, or loop in plain decoding{more}"
    return "no prompt, or no text that is known to follow one, fits the model's positions"


def measure(lab: Lab, cell: Cell) -> dict[str, Any]:
    """The document of one cell."""
    measured = Measured(lab, cell)
    measured.run(lab.options.seconds, lab.options.limit)
    return measured.document()


class Results:
    """Documents of cells, each measured once: in this run, or before an interruption of it."""

    def __init__(self, once: Callable[[str, Callable[[], Any], Callable[[Any], Any]], Any]) -> None:
        self._once = once
        self._found: dict[str, dict[str, Any] | Exception] = {}

    def of(self, lab: Lab, cell: Cell) -> dict[str, Any]:
        """A cell's document; a failure is measured once, too, and raised each time."""
        if cell.name not in self._found:
            try:
                found = self._once(cell.name, lambda: measure(lab, cell), lambda d: d)
            except (AssertionError, *REFUSALS) as error:
                found = error
            self._found[cell.name] = found
        found = self._found[cell.name]
        if isinstance(found, Exception):
            raise found
        return found
