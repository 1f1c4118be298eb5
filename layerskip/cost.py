"""What a pass costs: the table that decides whether, and how far, to draft.

Measured once per model, plan, device, dtype and number of threads: with a plan (``layerskip
search``), whose file brings it to the controller, or by itself (``layerskip profile``), for the
simulator. Pure numbers: nothing here runs a model.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

from layerskip.files import read_json, reason_of, write_json

COST_VERSION = 6
TILE = 8  # positions of a sequence that attention takes at once, at most
POWERS = (1, 2, 4, TILE)
NUM_SEQUENCES = 8  # in the pass that is timed for what sequences cost
DRAFTS_IN_A_ROW = 4  # that a draft pass is the mean of
MOST_PLACES = 2**31 - 1  # rows or slots of any table
# How passes are started, as the key of a table has it.
RECORDED, BY_HOST = "recorded", "started by the host"
OF_SAMPLING = ("sampling", "judging", "draft_sampling")
OPTIONAL = (*OF_SAMPLING[1:], *(f"greedy_{name}" for name in OF_SAMPLING))
# Fields that are whole numbers, and the least of each.
LEASTS = {"row_quantum": 1, "pass_rows": 0, "slot_block": 0, "large_quantum": 0}
# How a sentence names what differs; other names are said as they are.
SAID = {
    "fingerprint": "of another checkpoint",
    "device": "on another device",
    "dtype": "in another dtype",
    "threads": "with another number of threads",
    "draft_layers": "with other draft layers",
    "draft_vocabulary": "with another draft vocabulary",
    "exit_adapter": "with another exit adapter",
    "exact": "with exact set otherwise",
    "row_quantum": "with passes padded to another number of rows",
    "passes": "with passes started otherwise",
}


@dataclass(frozen=True)
class Curve:
    """Seconds of one kind of pass, by its rows and by the slots that it attends to.

    Attributes:
        rows: numbers of tokens that were measured, ascending.
        contexts: numbers of slots that were measured, ascending.
        seconds: ``seconds[i][j]`` at ``contexts[i]`` and ``rows[j]``.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("contexts", self.contexts)):
            ascends = all(a < b for a, b in pairwise((*axis, inf)))  # nor is any NaN
            if not axis or axis[0] < 0 or not ascends:
                raise ValueError(f"a cost table's {name} must ascend from 0 on, got {axis}")
        shape = [len(line) for line in self.seconds]
        if shape != [len(self.rows)] * len(self.contexts):
            raise ValueError(
                f"a cost table needs {len(self.contexts)} lines of {len(self.rows)} times, "
                f"got lines of {shape}"
            )
        if not all(0.0 <= t < float("inf") for line in self.seconds for t in line):
            raise ValueError("a cost table's times must be finite and not negative")

    def at(self, rows: float, context: float) -> float:
        """Seconds, linear between what was measured and beyond its end, flat before its start."""
        i, share = _between(self.contexts, context)
        j, part = _between(self.rows, rows)
        low = _mix(self.seconds[i], j, part)
        if share == 0.0:
            return low
        return max(0.0, low + share * (_mix(self.seconds[i + 1], j, part) - low))


def _between(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Index of the grid point below ``value``, and the share of the way to the next one."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    i = min(bisect_left(axis, value), len(axis) - 1) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _mix(line: Sequence[float], j: int, part: float) -> float:
    return line[j] if part == 0.0 else max(0.0, line[j] + part * (line[j + 1] - line[j]))


@dataclass(frozen=True)
class CostTable:
    """T(rows, context) of a decoder's passes, in seconds.

    Attributes:
        draft_layers: embedding and the plan's layers.
        draft_head: final norm and head, over the draft's vocabulary, and the draft's confidence;
            one context.
        verify: embedding, all layers and the full head.
        sampling: of the first token that a verify pass gives a sequence, the making of its noise
            included.
        row_quantum: passes are padded to a multiple of this many rows, but for ``large_quantum``.
        key: what the table is of: fingerprint of the model, plan, device, dtype, threads,
            exactness, versions.
        tiles: positions of a sequence that attention takes at once, where fewer rows than a
            quantum are rounded up to one of these; empty: to the quantum.
        draft_sequence, verify_sequence: by how much a pass of eight sequences, a token each, takes
            longer than one of eight tokens of one sequence, a seventh of it.
        pass_rows: most rows of one pass; more go through several. 0: any number go through one.
        judging: of each further token of a sequence in a verify pass, whose noise its draft made;
            None: as much as ``sampling``.
        draft_sampling: of a drafted token, the making of its noise included, which a draft pass
            leaves more of in the processor's caches; None: as much as ``sampling``.
        greedy_sampling, greedy_judging, greedy_draft_sampling: the same where a row takes the
            likeliest token; None: no other.
        slot_block: passes attend to whole blocks of this many slots, so that contexts within one
            cost the same; the curves' contexts are where blocks begin. 0: to what there is.
        draft_start: by how much a round's first draft passes together take longer than as many
            behind them, which find their weights in the processor's caches. ``draft_pass`` has it
            shared out among four.
        verify_tiles: pairs of tokens, 2 to those of a tile, ascending, and by how much a pass of
            eight sequences of so many each takes longer, or less long, than one of as many of one
            sequence. Where there is none, what a pass of one sequence grows by is each one's.
        large_quantum: what passes of more than a tile of rows are padded to a multiple of, where
            others hold no spare ones beyond ``row_quantum``; 0: all are to a multiple of that.
    """

    draft_layers: Curve
    draft_head: Curve
    verify: Curve
    sampling: float
    row_quantum: int
    key: Mapping[str, str | int]
    tiles: tuple[int, ...] = ()
    draft_sequence: float = 0.0
    verify_sequence: float = 0.0
    pass_rows: int = 0
    judging: float | None = None
    greedy_sampling: float | None = None
    greedy_judging: float | None = None
    slot_block: int = 0
    draft_sampling: float | None = None
    greedy_draft_sampling: float | None = None
    draft_start: float = 0.0
    verify_tiles: tuple[tuple[int, float], ...] = ()
    large_quantum: int = 0

    def __post_init__(self) -> None:
        for name in ("sampling", *OPTIONAL, "draft_sequence", "verify_sequence", "draft_start"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"a cost table's {name} must be finite and not negative: {value}")
        for name, least in LEASTS.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
            if getattr(self, name) > MOST_PLACES:
                raise ValueError(f"{name} must be at most {MOST_PLACES}, got {getattr(self, name)}")
        whole = all(isinstance(t, int) and 0 < t <= MOST_PLACES for t in self.tiles)
        if not whole or list(self.tiles) != sorted(set(self.tiles)):
            raise ValueError(f"a cost table's tiles must ascend from 1 on, got {self.tiles}")
        sizes = [tokens for tokens, _ in self.verify_tiles]
        fit = sizes == sorted(set(sizes) & set(POWERS[1:]))
        if not fit or not all(isfinite(seconds) for _, seconds in self.verify_tiles):
            raise ValueError(
                f"a cost table's verify_tiles must be pairs of tokens, of {POWERS[1:]}, ascending, "
                f"and finite seconds, got {self.verify_tiles}"
            )

    def of(self, *, greedy: bool) -> "CostTable":
        """The table whose passes end in greedy sampling, or in drawing from a distribution."""
        if not greedy or self.greedy_sampling is None:
            return self
        return replace(self, **{name: getattr(self, f"greedy_{name}") for name in OF_SAMPLING})

    @property
    def recorded(self) -> bool:
        """Whether it is of passes that the device runs by itself: all rows of a round go through
        all of them."""
        return self.key.get("passes") == RECORDED

    @property
    def further(self) -> float:
        """Seconds of sampling that a drafted token adds to a verify pass."""
        return self.sampling if self.judging is None else self.judging

    @property
    def drawing(self) -> float:
        """Seconds of sampling a drafted token."""
        return self.sampling if self.draft_sampling is None else self.draft_sampling

    def draft_pass(
        self, rows: int, context: float, *, sequences: int = 1, late: bool = False
    ) -> float:
        """One draft pass over ``rows`` tokens, with its head, and the sampling of a token of each
        sequence: looked-up tokens beside it are sampled where they are right, in the place of the
        pass that they save.

        Args:
            rows: tokens, of all sequences together.
            context: slots that a sequence holds, on the average.
            sequences: that the tokens are of, equally many each.
            late: behind others of a round, whose ``draft_start`` is counted by itself.
        """
        layers = self._layers(self.draft_layers, rows, context, sequences, self.draft_sequence)
        if late:
            layers = max(0.0, layers - self.draft_start / DRAFTS_IN_A_ROW)
        return layers + self._summed(self.draft_head, rows, 0) + sequences * self.drawing

    def looking_back(self, rows: int) -> float:
        """The head of a draft pass alone, over so many rows: their noise has been made."""
        return self._summed(self.draft_head, rows, 0) + self.drawing

    def drafting(self, passes: int, rows: int, context: float) -> float:
        """A round's draft passes, each over ``rows`` tokens of one sequence.

        Args:
            passes: how many.
            rows, context: as in ``draft_pass``.
        """
        if not passes:
            return 0.0
        return self.draft_start + passes * self.draft_pass(rows, context, late=True)

    def verify_pass(self, rows: int, context: float, *, sequences: int = 1) -> float:
        """One full-depth pass over ``rows`` tokens, with sampling; of one row: a plain pass.

        Args:
            rows: tokens, of all sequences together.
            context: slots that a sequence holds, on the average.
            sequences: that the tokens are of, one or more each.
        """
        alone = self.verify, rows, context
        layers = self._layers(*alone, sequences, self.verify_sequence, self.verify_tiles)
        return layers + sequences * self.sampling + max(0, rows - sequences) * self.further

    def _layers(
        self,
        curve: Curve,
        rows: int,
        context: float,
        sequences: int,
        another: float,
        apart: Sequence[tuple[int, float]] = (),
    ) -> float:
        """Layers over several sequences, from what one takes: products over all rows at once,
        attention of each sequence's own tokens over its own context."""
        if sequences == 1:
            return self._summed(curve, rows, self._block_start(context, self._padded(rows)))
        alone = self._attending(curve, self._padded(rows), another)
        total = max(0.0, self._summed(curve, rows, 0) - alone)
        for count, each in _shared_out(rows, sequences):
            if count:
                far = max(0.0, self._attention(curve, each, context))
                total += count * (self._attending(curve, each, another, apart) + far)
        return total

    def attending(self, rows: int, *, draft: bool = False, padded: bool = False) -> float:
        """What so many rows of one sequence take of a pass's layers at the start of their context,
        beside the products that all sequences share: attention.

        Args:
            padded: of as many rows as a pass of them by themselves is padded to.
        """
        rows = self._padded(rows) if padded else rows
        if draft:
            return self._attending(self.draft_layers, rows, self.draft_sequence)
        apart = () if padded else self.verify_tiles
        return self._attending(self.verify, rows, self.verify_sequence, apart)

    def _attending(
        self, curve: Curve, rows: int, another: float, apart: Sequence[tuple[int, float]] = ()
    ) -> float:
        """A sequence's rows are attended tile by tile. Within a tile products are those of the same
        padded pass, so what a curve grows by there is attention; and a pass of eight sequences
        differs from one of eight rows of a sequence by eight tiles of one row and a whole one.

        A pass of one sequence grows by more than attention, and what many sequences were to grow by
        was twice too much (bench/LOG.md, 2026-11-27): ``verify_tiles`` tell it beside others.
        """
        if self.row_quantum < TILE:
            return another
        one = another + self._within_tile(curve, TILE) / (NUM_SEQUENCES - 1)
        tile, measured = one + self._within_tile(curve, TILE), dict(apart)

        def of(size: int) -> float:
            if size not in measured:
                return one + self._within_tile(curve, size)
            # Eight such tiles, and as many rows in whole ones of one sequence. That a smaller one
            # took longer was the machine.
            return max(of(size // 2), (measured[size] + size * tile) / NUM_SEQUENCES)

        whole, rest = divmod(rows, TILE)
        return whole * of(TILE) + (of(next(t for t in POWERS if t >= rest)) if rest else 0.0)

    def _within_tile(self, curve: Curve, rows: int) -> float:
        """Of a tile of so many rows, beyond one row's. Tiles are powers of two; one that was not
        measured is taken to lie on the line between one row and a whole tile."""
        tile = next(t for t in POWERS if t >= rows)
        whole = max(0.0, curve.at(self._padded(TILE), 0) - curve.at(self._padded(1), 0))
        if tile not in self.tiles:
            return whole * (tile - 1) / (TILE - 1)
        return max(0.0, curve.at(tile, 0) - curve.at(self._padded(1), 0))

    def _attention(self, curve: Curve, rows: int, context: float) -> float:
        """Of one sequence, beyond the slots that any pass attends to."""
        padded = self._padded(rows)
        return curve.at(padded, self._block_start(context, padded)) - curve.at(padded, 0)

    def _summed(self, curve: Curve, rows: int, context: float) -> float:
        """Of all the passes that so many rows take."""
        whole, rest = divmod(rows, self.pass_rows) if self.pass_rows else (0, rows)
        seconds = whole * curve.at(self._padded(self.pass_rows), context) if whole else 0.0
        return seconds + (curve.at(self._padded(rest), context) if rest or not whole else 0.0)

    def _block_start(self, context: float, rows: int) -> float:
        """Slots before the last block that a pass attends to."""
        if self.slot_block == 0:
            return context
        return max(0.0, -(-(context + rows) // self.slot_block) - 1) * self.slot_block

    def _padded(self, rows: int) -> int:
        if rows < self.row_quantum:
            return next((t for t in self.tiles if t >= rows), self.row_quantum)
        if self.large_quantum and rows <= TILE:
            return rows
        quantum = self.large_quantum or self.row_quantum
        return -(-rows // quantum) * quantum

    def save(self, path: str | Path) -> None:
        """Write the table as a JSON file."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Read a table written by ``save``."""
        content = read_json(path, "cost table")
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path} is not a cost table ({error})") from None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it."""
        return {"version": COST_VERSION, **asdict(self), "key": dict(self.key)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "CostTable":
        """The table that ``to_dict`` wrote.

        Raises:
            ValueError: it is none, or of another version.
        """
        got = content.get("version") if isinstance(content, Mapping) else content
        if not isinstance(content, Mapping) or got != COST_VERSION:
            raise ValueError(
                f"a cost table of version {COST_VERSION} was expected, got {got!r}; "
                "layerskip profile writes one"
            )
        readers: dict[str, Callable[[Any], Any]] = dict.fromkeys(LEASTS, int)
        readers |= dict.fromkeys(("draft_layers", "draft_head", "verify"), _curve)
        readers |= dict.fromkeys(OPTIONAL, lambda told: None if told is None else float(told))
        readers |= {"key": dict, "tiles": tuple, "verify_tiles": _pairs}
        content = {"large_quantum": 0, **content}
        try:
            return cls(**{f.name: readers.get(f.name, float)(content[f.name]) for f in fields(cls)})
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the cost table is not complete ({reason_of(error)})") from None


def differences(
    key: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], whose: str = "now"
) -> dict[str, str]:
    """How the key of a table is said to differ from another, by the names that do.

    Args:
        names: that are looked at.
        whose: the other's values are, as the words before them say it.
    """
    return {
        name: f"{SAID.get(name, f'with another {name}')} "
        f"({key.get(name, 'unknown')}, {whose} {other.get(name, 'unknown')})"
        for name in names
        if key.get(name) != other.get(name)
    }


def _shared_out(rows: int, sequences: int) -> tuple[tuple[int, int], ...]:
    """How many of the sequences have how many of a pass's rows: as many as can have several, and
    those about equally many, where nothing else is known."""
    drafting = min(sequences, rows - sequences)
    each, more = divmod(rows - sequences, max(1, drafting))
    return (more, each + 2), (drafting - more, each + 1), (sequences - drafting, 1)


def _pairs(content: Any) -> tuple[tuple[int, float], ...]:
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in content):
        raise TypeError(f"pairs expected, got {content!r:.80}")
    return tuple((tokens, float(seconds)) for tokens, seconds in content)


def _curve(content: Mapping[str, Any]) -> Curve:
    seconds = tuple(tuple(float(t) for t in line) for line in content["seconds"])
    return Curve(tuple(content["rows"]), tuple(content["contexts"]), seconds)
