"""How fast a machine was from moment to moment, as recorded; a simulated clock goes by it.

What rounds usually take says nothing of the machine's slow stretches, and long times are made of
these. A stretch lasts for many rounds and slows all rows of a step alike: a pace drawn for each
round, or each row, would average out within a request, as the machine's own does not. So nothing is
drawn but where in the recording a batch begins. From there its clock goes over the recorded rounds,
one after another and around their end: work that they usually did in so much time takes what it
took them. Stretches last, and follow one another, as they did, without a parameter that says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MachineTime:
    """Recorded rounds, one after another.

    Attributes:
        usual: seconds that all rounds up to each one's end usually take; ascending from 0.
        taken: seconds that they took; likewise.
    """

    usual: Floats
    taken: Floats

    @classmethod
    def of(cls, usual: Sequence[float], taken: Sequence[float]) -> "MachineTime":
        """Of rounds, at least one, that usually take ``usual`` and took ``taken``, each above 0."""
        return cls(*(np.concatenate([[0.0], np.cumsum(part)]) for part in (usual, taken)))

    def clock(self, work: Floats) -> Floats:
        """Seconds since the recording's start when so much work is done, in usual seconds."""
        again, rest = np.divmod(work, self.usual[-1])
        return again * self.taken[-1] + np.interp(rest, self.usual, self.taken)

    def somewhere(self, number: int, draw: np.random.Generator) -> Floats:
        """Work done at moments of the recording, as likely in its slow stretches as their share of
        all work is: users in a loop send by what was done, not by the clock."""
        return draw.random(number) * self.usual[-1]

    @property
    def slowness(self) -> float:
        """Seconds that a usual one took, over all of it."""
        return float(self.taken[-1] / self.usual[-1])
