"""How many drafted tokens the target confirms."""

from collections.abc import Sequence


def count_matches(draft: Sequence[int], target: Sequence[int]) -> int:
    """Length of the prefix on which draft and target agree.

    Greedy and coupled verification are this alone: the emitted tokens are ``target[: n + 1]``,
    which is what decoding without a draft emits. The last of them is the recovered token if
    ``n < len(draft)``, else the bonus token.

    Args:
        draft: drafted token ids.
        target: the target's tokens at the same positions, and one more.
    """
    for i, token in enumerate(draft):
        if token != target[i]:
            return i
    return len(draft)
