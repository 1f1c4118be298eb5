"""How much of a draft stands, and which token follows it.

Greedy and coupled verification compare tokens. Token-level and block verification compare
distributions: p is the target's and q the draft's, each after all processors. Both emit the
target's distribution exactly; block accepts at least as many tokens in expectation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip.constraint import NO_CONTEXT, Context
from layerskip.errors import RowError
from layerskip.params import Verification
from layerskip.sampling import Sampler, noisy_scores, portions


@dataclass(frozen=True)
class Verdict:
    """What a round emits for one row, before any cut.

    Attributes:
        tokens: confirmed drafted tokens, then the recovered or bonus one.
        scores: ``(rows, vocab)`` float32 that they were chosen by, rows of rejected tokens last;
            None if only the argmax of the logits was asked for.
        logits: of the full model, likewise.
        is_cut: whether the last of ``tokens`` was drafted, too: nothing may follow it.
    """

    tokens: list[int]
    scores: Tensor | None
    logits: Tensor
    is_cut: bool = False

    @property
    def num_matches(self) -> int:
        """Drafted tokens among ``tokens``."""
        return len(self.tokens) if self.is_cut else len(self.tokens) - 1


@dataclass(frozen=True)
class Case:
    """What there is to verify of one row; without a draft its next token is picked.

    Attributes:
        sampler: of the row.
        logits: ``(len(draft) + 1, vocab)`` of the full model.
        position: absolute position of the first drafted token.
        draft: drafted ids.
        q: for token-level and block verification, ``(vocab,)`` of each drafted token.
        context: all tokens before ``position``; read by processors and grammars only.
        row: its id, for errors.
    """

    sampler: Sampler
    logits: Tensor
    position: int
    draft: Sequence[int] = ()
    q: Sequence[Tensor] = ()
    context: Context = NO_CONTEXT
    row: int | None = None


def judge_all(cases: Sequence[Case]) -> list[Verdict]:
    """As ``judge``, of each row: at once of those whose scores need nothing but their logits.

    Raises:
        RowError: as ``judge``, of one of the rows.
    """
    if len(cases) == 1:
        return [judge(cases[0])]
    found, logits = dict[int, Verdict](), cases[0].logits
    greedy = [i for i, case in enumerate(cases) if case.sampler.is_argmax]
    sampled = [i for i, case in enumerate(cases) if case.sampler.is_noisy_argmax]
    for alike in (greedy, sampled):
        counts = [len(cases[i].draft) + 1 for i in alike]
        for part in portions(counts, logits.shape[-1], logits.device):
            if len(part) > 1:
                places = [alike[i] for i in part]
                found |= zip(places, _at_once([cases[i] for i in places]), strict=True)
    return [found[i] if i in found else judge(case) for i, case in enumerate(cases)]


def _at_once(cases: Sequence[Case]) -> list[Verdict]:
    """Of rows that are all greedy, or all sampled with coupled noise."""
    counts = [len(case.draft) + 1 for case in cases]
    logits, argmax = torch.cat([case.logits for case in cases]), cases[0].sampler.is_argmax
    if argmax:
        scores = compared = logits.float()
    else:
        rows = [(case, i) for case, count in zip(cases, counts, strict=True) for i in range(count)]
        positions = [case.position + i for case, i in rows]
        scores, compared = noisy_scores([case.sampler for case, _ in rows], logits, positions)
    chosen = compared.argmax(-1, keepdim=True)
    targets, largest = chosen[:, 0].tolist(), scores.gather(-1, chosen)[:, 0].tolist()
    verdicts, start = [], 0
    for case, count in zip(cases, counts, strict=True):
        at = slice(start, start + count)
        tokens = targets[at][: count_matches(case.draft, targets[at]) + 1]
        verdict = Verdict(tokens, None if argmax else scores[at], case.logits)
        verdicts.append(_checked(verdict, largest[at][: len(tokens)], case))
        start += count
    return verdicts


def judge(case: Case) -> Verdict:
    """Verify one row's draft; without one, pick the next token.

    Raises:
        RowError: a score of the next token is NaN, or every token is ruled out; a plain ValueError
            of a row without an id.
    """
    sampler, logits, position, draft = case.sampler, case.logits, case.position, case.draft
    scores = None
    if sampler.is_argmax:
        target = sampler.pick(logits, position)
        num_matches = count_matches(draft, target)
    else:
        scores = sampler.scores(logits, case.context + draft)
        if sampler.verification == "coupled":
            target = sampler.choose(scores, position)
            num_matches = count_matches(draft, target)
        else:
            num_matches, after = _draw(sampler, scores, position, draft, case.q)
            target = [*draft[:num_matches], after]
    tokens = target[: num_matches + 1]
    if scores is None:  # the tokens' own scores are the largest, or not a number
        largest = logits[list(range(len(tokens))), tokens]
    else:
        largest = scores[: len(tokens)].amax(-1)
    return _checked(Verdict(tokens, scores, logits), largest.tolist(), case)


def _draw(
    sampler: Sampler, scores: Tensor, position: int, draft: Sequence[int], q: Sequence[Tensor]
) -> tuple[int, int]:
    """Number of accepted tokens and the token after them."""
    p, count = scores.double().softmax(-1), len(draft)
    if count:
        stacked = torch.stack(list(q)).to(p.device)  # a look-up's are made by the host
        chances = acceptance_chances(sampler.verification, p, stacked, draft)
        uniforms = sampler.uniforms(position, count)
        num_accepted = count_accepted(sampler.verification, chances, uniforms)
        if num_accepted < count:
            rest = recovered(sampler.verification, p, stacked, draft, num_accepted)
            return num_accepted, sampler.draw(rest, position + num_accepted)
    return count, sampler.choose(scores[count:], position + count)[0]


def _checked(verdict: Verdict, largest: Sequence[float], case: Case) -> Verdict:
    """A verdict whose tokens all were chosen by numbers.

    Behind the first position where that fails nothing is confirmed. The text may have ended before
    it; if not, it is the first one of the row's next round, which raises, as without a draft.

    Args:
        largest: score of each token's position: NaN if any is, -inf if all are.
    """
    bad = next((i for i, score in enumerate(largest) if not math.isfinite(score)), None)
    if bad is None:
        return verdict
    if bad:
        return replace(verdict, tokens=verdict.tokens[:bad], is_cut=True)
    message = (
        f"the scores at position {case.position} are NaN, infinite or rule out every token; "
        + (
            "look at the rules of sampling, the logits processors and the grammar"
            if largest[0] == -math.inf
            else "use bfloat16 or float32 in place of float16, and look at the logits "
            "processors and the grammar"
        )
    )
    raise ValueError(message) if case.row is None else RowError(message, case.row)


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


def acceptance_chances(
    verification: Verification, p: Tensor, q: Tensor, draft: Sequence[int]
) -> list[float]:
    """The probability with which each drafted token, or the block up to it, is accepted.

    Token-level (Leviathan et al. 2023): ``min(1, p_i(x_i) / q_i(x_i))``, each tried in turn.
    Block (Sun et al. 2025, Algorithm 2): with ``w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))`` and
    ``s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0)``, the chance of the first i tokens is
    ``s_i / (s_i + 1 - w_i)``, and ``w_k`` for all k; each is tried on its own.

    Args:
        p: ``(k + 1, vocab)`` float64, the target's distributions.
        q: ``(k, vocab)`` float64, the distributions that the draft was drawn from.
        draft: k ids.
    """
    at = (list(range(len(draft))), list(draft))
    # A NaN of the target is rejected here; if its position is reached, `judge` says so.
    ratios = (p[at] / q[at]).nan_to_num(nan=0.0).tolist()
    if verification == "token":
        return [min(1.0, ratio) for ratio in ratios]
    chances: list[float] = []
    weight, (*earlier, last) = 1.0, ratios
    for i, ratio in enumerate(earlier):
        weight = min(1.0, weight * ratio)
        left = float((weight * p[i + 1] - q[i + 1]).clamp(min=0.0).sum())
        if math.isnan(left):  # p_{i+1} is: nothing after it is accepted, so the block ends here
            chances.append(weight)
            continue
        whole = left + 1.0 - weight
        chances.append(left / whole if whole > 0.0 else 1.0)
    return [*chances, min(1.0, weight * last)]


def count_accepted(
    verification: Verification, chances: Sequence[float], uniforms: Sequence[float]
) -> int:
    """Accepted tokens: up to the first failure (token), or up to the last success (block)."""
    passed = [u <= chance for u, chance in zip(uniforms, chances, strict=True)]
    if verification == "token":
        return passed.index(False) if False in passed else len(passed)
    return max((i + 1 for i, success in enumerate(passed) if success), default=0)


def recovered(
    verification: Verification, p: Tensor, q: Tensor, draft: Sequence[int], num_accepted: int
) -> Tensor:
    """Distribution of the token after ``num_accepted`` of k drafted ones, less than k.

    Returns:
        ``(vocab,)`` float64: what p has above q, with block verification what ``w p`` has, scaled
        to sum to one; p itself where that is nothing but rounding.
    """
    weight = 1.0
    if verification == "block":
        for i in range(num_accepted):
            weight = min(1.0, weight * float(p[i, draft[i]] / q[i, draft[i]]))
    rest = (weight * p[num_accepted] - q[num_accepted]).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0.0 else p[num_accepted]
