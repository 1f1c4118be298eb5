"""What gauges show of rounds: whether drafting pays of late, and whether confidence is right."""

from layerskip.control.experience import ToldChances
from layerskip.cost import CostTable
from layerskip.outputs import Round
from layerskip.params import MAX_NUM_DRAFT_TOKENS
from layerskip.telemetry.plain_passes import in_plain_passes

WINDOW = 500  # drafts that are looked back on


class Drafts:
    """Drafts of one label: all of them, by accepted tokens, and the means of the last ones.

    Older drafts fade: each new one weighs the ones before by 1 - 1 / ``WINDOW``.
    """

    def __init__(self) -> None:
        self.accepted = [0] * (MAX_NUM_DRAFT_TOKENS + 1)
        self._weight = self._emitted = self._drafted = self._passes = 0.0
        self._context = self._rows = 0.0

    def observe(self, record: Round) -> None:
        self.accepted[record.num_accepted_tokens] += 1
        keep = 1.0 - 1.0 / WINDOW
        self._weight = keep * self._weight + 1.0
        self._emitted = keep * self._emitted + len(record.token_ids)
        self._drafted = keep * self._drafted + record.num_draft_tokens
        self._passes = keep * self._passes + record.num_draft_passes
        self._context = keep * self._context + record.context
        self._rows = keep * self._rows + record.rows

    def units(self, cost: CostTable) -> tuple[float, float]:
        """c and beta, at the mean context and the mean numbers of rows and of drafted tokens."""
        context, rows = self._context / self._weight, self._rows / self._weight
        c, verify = in_plain_passes(cost, context, rows, round(self._drafted / self._weight))
        return c, verify[-1] - 1.0

    def margin(self, cost: CostTable) -> float:
        c, beta = self.units(cost)
        return (self._emitted - self._passes * c) / self._weight - 1.0 - beta


class ToldByRounds(ToldChances):
    """How far the chances that drafted tokens were given lie from what became of them.

    A chance is held against its token if every token before was accepted: else it was of nothing.
    """

    def observe(self, record: Round) -> None:
        accepted = record.num_accepted_tokens
        # At the row's end nobody knows what would have become of the tokens behind it.
        judged = accepted + (record.origin == "recovered" and len(record.token_ids) > accepted)
        for position, chance in enumerate(record.chances[:judged]):
            self.add(chance, position < accepted)
