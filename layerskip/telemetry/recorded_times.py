"""What recorded rounds took: beside a cost table's passes, and from moment to moment."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layerskip.control.pass_times import SHORTEST
from layerskip.cost import CostTable
from layerskip.machine_time import MachineTime
from layerskip.pass_costs import Overhead

MOST_TIMED = 100_000  # rounds whose times are looked at


@dataclass(frozen=True)
class _Timed:
    """A recorded round of one row; seconds."""

    request_id: str
    tokens: int
    passes: int
    context: int
    draft: float
    verify: float
    sampling: float
    outside: float

    @property
    def phases(self) -> float:
        """Draft and verify. Between rounds others may have had the machine: that is no pace."""
        return max(SHORTEST, self.draft + self.verify)


class RecordedTimes:
    """What recorded rounds took beside the table's passes, and how the machine's pace changed.

    Args:
        table: of bare passes.

    Attributes:
        passes, drafted: draft passes and drafted tokens of all rounds.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._rounds: list[_Timed] = []
        self.passes = self.drafted = 0

    def add(self, line: Mapping[str, Any], before: float | None) -> None:
        """A round, and when the one before it ended."""
        if line["index"] == 0:
            return
        tokens, passes = line["num_draft_tokens"] + 1, line["num_draft_passes"]
        self.passes, self.drafted = self.passes + passes, self.drafted + tokens - 1
        if passes:  # these had none
            self.drafted -= line.get("num_lookup_tokens", 0)
        if line["rows"] != 1 or before is None or len(self._rounds) == MOST_TIMED:
            return
        draft, verify = line["draft_seconds"], line["verify_seconds"]
        outside = line["elapsed_seconds"] - before - draft - verify
        seconds = draft, verify, line["sample_seconds"], outside
        timed = _Timed(line["request_id"], tokens, passes, line["context"], *seconds)
        self._rounds.append(timed)

    @cached_property
    def overhead(self) -> Overhead:
        """By medians: whatever else the machine did is in the recorded seconds, too."""
        if not self._rounds:
            return Overhead()
        sampling, judging = self._sampling()
        table = Overhead(sampling=sampling, judging=judging).applied(self._table)
        verify = [
            r.verify / max(table.verify_pass(r.tokens, r.context), SHORTEST) for r in self._rounds
        ]
        draft = [
            r.draft / max(table.drafting(r.passes, 1, r.context), SHORTEST)
            for r in self._rounds
            if r.passes
        ]
        return Overhead(
            statistics.median(verify),
            statistics.median(draft) if draft else 1.0,
            max(0.0, statistics.median(r.outside for r in self._rounds)),
            sampling,
            judging,
        )

    def _sampling(self) -> tuple[float, float]:
        """Of a round's first token, and of each further one: what rounds of more tokens took beside
        those of the fewest. Rounds of one size tell the mean alone."""
        fewest = min(r.tokens for r in self._rounds)
        least = statistics.median(r.sampling for r in self._rounds if r.tokens == fewest)
        more = [
            (r.sampling - least) / (r.tokens - fewest) for r in self._rounds if r.tokens > fewest
        ]
        judging = max(0.0, statistics.median(more)) if more else least / fewest
        return max(0.0, least - (fewest - 1) * judging), judging

    @property
    def machine(self) -> MachineTime | None:
        """Rounds in the order of their lines; None without any."""
        if not self._rounds:
            return None
        return MachineTime.of(self._usual, [r.phases for r in self._rounds])

    def paces(self) -> dict[str, float]:
        """How many times as long as usual each request's rounds took."""
        usual, taken = dict[str, float](), dict[str, float]()
        for round_, seconds in zip(self._rounds, self._usual, strict=True):
            name = round_.request_id
            usual[name] = usual.get(name, 0.0) + seconds
            taken[name] = taken.get(name, 0.0) + round_.phases
        return {name: taken[name] / usual[name] for name in usual}

    @cached_property
    def _usual(self) -> Sequence[float]:
        """Seconds that each round's phases usually take.

        They are the table's, times the median ratio of rounds that verified as many tokens: what
        the table is wrong about, and the mean over all rounds doesn't mend, is no change of pace.
        """
        extra = self.overhead
        table = extra.applied(self._table)
        told, ratios = list[float](), dict[tuple[int, int], list[float]]()
        for r in self._rounds:
            seconds = extra.verify_ratio * table.verify_pass(r.tokens, r.context)
            seconds += extra.draft_ratio * table.drafting(r.passes, 1, r.context)
            told.append(max(SHORTEST, seconds))
            ratios.setdefault((r.tokens, r.passes), []).append(r.phases / told[-1])
        medians = {kind: statistics.median(values) for kind, values in ratios.items()}
        return [
            seconds * medians[r.tokens, r.passes]
            for r, seconds in zip(self._rounds, told, strict=True)
        ]
