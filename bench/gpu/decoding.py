"""Sections of ``bench/gpu_bench.py``: what a token and a round cost, what speculation gains.

Each takes a ``Lab``, the dictionary that it fills and the time by which it has to end.
"""

import dataclasses
import time
import traceback
from collections.abc import Sequence

import torch

from gpu.frame import Found
from gpu.lab import Lab, in_parts, label
from gpu.models import SYNTHETIC, Loaded, for_auto
from gpu.moved import round_bytes, speedup_by_bytes
from gpu.timing import GREEDY, NO_TIME, Decoded, decode, in_turns
from layerskip import Round, SamplingParams, SelfSpeculativeLM
from layerskip.params import NumDraftTokens

PLAIN_GOALS = {"Llama-3.1-8B": 0.80, "Llama-3.2-1B": 0.65}  # of the copy bandwidth
ROUND_GOAL = 1.10  # of the time that its bytes take
FORMULA_GOAL = 0.95  # of the speed-up that the formula gives
AUTO = "auto"
MOST_DRAFTED = 4


def models(lab: Lab, found: Found, until: float) -> None:
    """Make, save and load every model; acceptance by eps."""
    found |= {"ok": True, "copy_gb_per_s": lab.copy / 1e9}
    for model in lab.models:
        if time.monotonic() > until:
            found[model.name] = {"left_out": NO_TIME}
            found["ok"] = False
            continue
        entry: Found = {}
        found[model.name] = entry
        try:
            lab.load(model, entry)
        except Exception:  # noqa: BLE001  the other models can be measured
            entry["error"] = traceback.format_exc(limit=-3)
            found["ok"] = False


def plain(lab: Lab, found: Found, until: float) -> None:
    """Plain decoding: milliseconds a token, and the share of the copy bandwidth."""
    tokens = lab.extent.tokens

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        ids = [lab.prompt(loaded, lab.extent.prompt)]
        run = in_turns(
            {"plain": lambda: decode(loaded.lm, ids, 0, tokens).seconds_per_token},
            end,
            repeats=lab.extent.repeats,
        )
        moved = round_bytes(loaded.model, 0, context=lab.extent.prompt + tokens / 2)
        share = moved / lab.copy / run.median("plain")
        goal = PLAIN_GOALS.get(loaded.model.name)
        entry |= {
            "ms_per_token": run.summary("plain", 1e3),
            "bytes_per_token": moved,
            "ms_of_bytes": 1e3 * moved / lab.copy,
            "share_of_copy": lab.against(share, goal) if goal else share,
            **run.extent,
        }

    lab.each(found, until, measure)


def bits(lab: Lab, found: Found, until: float) -> None:
    """Tokens, keys and values of a long text with and without drafts: a check, no measurement."""
    wanted = lab.extent.exact_tokens

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        lab.usual(loaded)
        ids = [lab.prompt(loaded, lab.extent.prompt)]
        runs = [
            ("greedy", GREEDY, MOST_DRAFTED),
            ("temperature 0.8", SamplingParams(temperature=0.8, seed=1), MOST_DRAFTED),
            ("greedy, auto", GREEDY, AUTO),
        ]
        known: dict[SamplingParams, Decoded] = {}
        entry["ok"] = True
        for name, sampling, drafted in runs:
            if time.monotonic() > end:
                entry[name] = {"left_out": NO_TIME}
                continue
            if sampling not in known:
                half = time.monotonic() + (end - time.monotonic()) / 2
                known[sampling] = kept(loaded, ids, 0, wanted, sampling, half)
            off = known[sampling]
            entry[name] = same(off, kept(loaded, ids, drafted, wanted, sampling, end))
            entry[name] |= {"wanted_tokens": wanted}
            entry["ok"] &= entry[name]["equal"]
        entry |= {"acceptance": SYNTHETIC, "eps": loaded.eps}

    lab.each(found, until, measure)


def kept(
    loaded: Loaded,
    ids: Sequence[Sequence[int]],
    drafted: NumDraftTokens,
    tokens: int,
    sampling: SamplingParams,
    until: float,
) -> Decoded:
    return decode(loaded.lm, ids, drafted, tokens, sampling=sampling, keep=True, until=until)


def same(off: Decoded, on: Decoded) -> Found:
    """Whether two runs of one prompt have the same tokens, and the same bits in the cache."""
    (one,), (other,) = off.token_ids, on.token_ids
    count = min(len(one), len(other))
    tokens = one[:count] == other[:count]
    (left,), (right,) = off.caches, on.caches
    assert left is not None
    assert right is not None
    slots = min(len(left.token_ids), len(right.token_ids))
    cache = all(
        torch.equal(a[:, :slots].view(torch.int16), b[:, :slots].view(torch.int16))
        for a, b in ((left.keys, right.keys), (left.values, right.values))
    )
    return {
        "equal": tokens and cache,
        "tokens_equal": tokens,
        "keys_and_values_equal": cache,
        "compared_tokens": count,
        "compared_slots": slots,
        "acceptance_rate": on.acceptance_rate,
    }


def rounds(lab: Lab, found: Found, until: float) -> None:
    """Milliseconds of a round by the number of draft tokens, against its own bytes.

    At eps 0, where every draft is accepted: a round's time does not depend on that.
    """

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        loaded.scale(0.0)
        ids = [lab.prompt(loaded, lab.extent.prompt)]

        def seconds(drafted: int) -> float:
            run = decode(loaded.lm, ids, drafted, 1 + (drafted + 1) * lab.extent.rounds)
            return run.seconds / run.num_passes

        kinds = {str(k): lambda k=k: seconds(k) for k in lab.extent.drafts}
        run = in_turns(kinds, end, repeats=lab.extent.repeats)
        for k in lab.extent.drafts:
            context = lab.extent.prompt + (k + 1) * lab.extent.rounds / 2
            moved = round_bytes(loaded.model, k, context=context)
            over = run.median(str(k)) * lab.copy / moved
            entry[f"k={k}"] = {
                "ms_per_round": run.summary(str(k), 1e3),
                "bytes": moved,
                "ms_of_bytes": 1e3 * moved / lab.copy,
                "over_bytes": lab.against(over, ROUND_GOAL, at_least=False),
            }
        entry |= {**run.extent, **label(loaded, 1.0)}

    lab.each(found, until, measure)


def speedup(lab: Lab, found: Found, until: float) -> None:
    """Speed-up by acceptance and number of draft tokens, beside the formula's.

    The formula is ``mean_accepted_length / (k c + v)``, with c and v from bare passes as the
    library's own cost table has them; and with bytes in the place of seconds.
    """

    def measure(loaded: Loaded, entry: Found, end: float) -> None:
        auto = for_auto(loaded)
        ids = [lab.prompt(loaded, lab.extent.prompt)]
        fixed = {  # warmed up for all acceptances
            str(k): lambda k=k: decode(loaded.lm, ids, k, lab.extent.tokens).seconds
            for k in (0, *lab.extent.few_drafts)
        }
        in_turns(fixed, end, repeats=0)
        for name, acceptance, part in in_parts(entry, "acceptance", lab.extent.acceptances, end):
            loaded.scale(loaded.eps_for(acceptance))
            entry[name] = by_drafts(lab, loaded, auto, part)

    lab.each(found, until, measure)


def by_drafts(lab: Lab, loaded: Loaded, auto: SelfSpeculativeLM, until: float) -> Found:
    """Speed-up of each number of draft tokens, which have run before, at the model's present eps.

    Args:
        auto: the same model, which "auto" has for itself.
    """
    ids, tokens = [lab.prompt(loaded, lab.extent.prompt)], lab.extent.tokens
    seen: dict[NumDraftTokens, Decoded] = {}

    def seconds(drafted: NumDraftTokens) -> float:
        seen[drafted] = decode(auto if drafted == AUTO else loaded.lm, ids, drafted, tokens)
        return seen[drafted].seconds_per_token

    modes: tuple[NumDraftTokens, ...] = (0, *lab.extent.few_drafts, AUTO)
    kinds = {str(k): lambda k=k: seconds(k) for k in modes}
    warm_ups = {kind: int(kind == AUTO) for kind in kinds}
    run = in_turns(kinds, until, repeats=lab.extent.repeats, warm_ups=warm_ups)
    result: Found = {"plain_ms_per_token": run.summary("0", 1e3), **run.extent}
    for k in lab.extent.few_drafts:
        if k not in seen:
            result[f"k={k}"] = {"left_out": NO_TIME}
            continue
        gained, formula = run.ratio("0", str(k)), predicted(loaded, seen[k].rounds)
        result[f"k={k}"] = {
            "speedup": gained,
            "mean_accepted_length": seen[k].mean_accepted_length,
            "formula": formula,
            "by_bytes": speedup_by_bytes(loaded.model, seen[k].rounds),
            "share_of_formula": lab.against(gained / formula["speedup"], FORMULA_GOAL),
            **label(loaded, seen[k].acceptance_rate),
        }
    result[AUTO] = {"speedup": run.ratio("0", AUTO)} | run.summary(AUTO, 1e3)
    if AUTO in seen:
        result[AUTO]["drafted"] = seen[AUTO].mean_drafted
    return result


def predicted(loaded: Loaded, rounds: Sequence[Round]) -> dict[str, float]:
    """The formula over the cost table that "auto" decides by, of one sequence's rounds.

    Each round counts with what was drafted in it: the last one's room is short.
    """
    cost = dataclasses.replace(loaded.lm.controller.cost, sampling=0.0)
    drafts = sum(cost.drafting(r.num_draft_tokens, 1, r.context) for r in rounds)
    verified = sum(cost.verify_pass(r.num_draft_tokens + 1, r.context) for r in rounds)
    one = sum(cost.verify_pass(1, r.context) for r in rounds) / len(rounds)
    drafted = sum(r.num_draft_tokens for r in rounds)
    tokens = sum(len(r.token_ids) for r in rounds)
    return {
        "c": drafts / max(1, drafted) / one,
        "v": verified / len(rounds) / one,
        "speedup": tokens * one / (drafts + verified),
    }
