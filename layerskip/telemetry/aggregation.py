"""From a runs folder to an acceptance report."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from layerskip.control.pass_times import SHORTEST
from layerskip.cost import COST_VERSION, CostTable
from layerskip.telemetry.buckets import (
    EVERY_LENGTH,
    OUTPUT_EDGES,
    PROMPT_EDGES,
    Bucket,
    Lengths,
    lengths,
)
from layerskip.telemetry.drift import find_drift
from layerskip.telemetry.plain_passes import in_plain_passes
from layerskip.telemetry.records import MeasuredRun, measured_run, opened
from layerskip.telemetry.report import (
    AcceptanceReport,
    BucketReport,
    Estimate,
    Inequality,
    Latency,
    Paired,
    Position,
)
from layerskip.telemetry.resampling import (
    counted_distribution,
    distribution,
    estimate,
    median_ratio,
    ratio_of_p90,
    ratio_of_slowest,
    ratio_of_sums,
    ratio_of_worst,
)
from layerskip.telemetry.tallies import (
    BINS,
    BurstCount,
    Cell,
    Columns,
    RoundCount,
    Tallies,
    WorstCount,
    drafts_in_order,
    tally,
)

MEASURED = (
    "arms",
    "prompts",
    "sampling",
    "seed",
    "max_new_tokens",
    "exit_layer",
    "plan",
    "exact",
    "lookup",
    "policy",
    "versions",
    "machine",
    "threads",
)
MOST_BUCKETS = 1000

T = TypeVar("T", int, float, str)


def acceptance_report(
    folder: str | Path,
    *,
    arm: str | None = None,
    prompt_edges: Sequence[int] = PROMPT_EDGES,
    output_edges: Sequence[int] = OUTPUT_EDGES,
) -> AcceptanceReport:
    """Count up what ``layerskip measure`` recorded.

    Args:
        folder: that it wrote; requests that did not finish are left out.
        arm: that drafts; None: "auto", or the only one.
        prompt_edges, output_edges: where one bucket of lengths ends and the next begins, in tokens.

    Raises:
        ValueError: the folder is no runs folder, is damaged, or no request with drafting finished;
            or there are more than 1000 buckets.
    """
    prompts, outputs = lengths(prompt_edges, "prompt edges"), lengths(output_edges, "output edges")
    run = measured_run(folder, arm)
    unread = _unread_costs(run)
    cost = _cost_of(run) if unread is None else None
    with opened(run, prompts, outputs) as database:
        tallies = tally(database, cost)
        label = None if run.label is None else "task"
        drift = find_drift(drafts_in_order(database), label=label)
    if not len(tallies.requests["task"]):
        raise ValueError(
            f"no request of arm {run.arm} has finished in {run.folder}: give the same "
            f"`layerskip measure` command again, it goes on where it stopped"
        )

    def report(cell: Cell) -> BucketReport:
        return _report(tallies, cost, cell, _bucket(cell, prompts, outputs))

    cells = tallies.cells()
    if len(cells) > MOST_BUCKETS:
        raise ValueError(
            f"label {run.label!r} ({len(tallies.tasks)} values) and the edges make {len(cells)} "
            f"buckets; at most {MOST_BUCKETS} can be reported: measure with a label of fewer "
            f"values, or give fewer edges"
        )
    routes = sorted({Cell(cell.task, cell.prompt, None) for cell in cells})
    return AcceptanceReport(
        model=str(run.content.get("model", "")),
        arm=run.arm,
        label=run.label,
        prompt_edges=tuple(prompt_edges),
        output_edges=tuple(output_edges),
        buckets=tuple(map(report, cells)),
        routes=tuple(map(report, routes)),
        total=report(Cell(None, None, None)),
        num_ignored_rounds=tallies.num_ignored_rounds,
        drift=drift,
        measured={name: run.content[name] for name in MEASURED if name in run.content},
        unread_costs=unread,
    )


def _unread_costs(run: MeasuredRun) -> int | None:
    """Version of the run's cost table, where another layerskip wrote it: all else can be told."""
    version = (run.content.get("cost") or {}).get("version")
    return version if isinstance(version, int) and version != COST_VERSION else None


def _cost_of(run: MeasuredRun) -> CostTable | None:
    content, sampling = run.content.get("cost"), run.content.get("sampling") or {}
    if content is None:
        return None
    try:
        return CostTable.from_dict(content).of(greedy=sampling.get("temperature") == 0.0)
    except ValueError as error:
        raise ValueError(f"{run.folder}/run.json: {error}") from None


def _bucket(cell: Cell, prompts: tuple[Lengths, ...], outputs: tuple[Lengths, ...]) -> Bucket:
    return Bucket(
        cell.task,
        EVERY_LENGTH if cell.prompt is None else prompts[cell.prompt],
        EVERY_LENGTH if cell.output is None else outputs[cell.output],
    )


def _report(tallies: Tallies, cost: CostTable | None, cell: Cell, bucket: Bucket) -> BucketReport:
    requests, plain = tallies.of(tallies.requests, cell), tallies.of(tallies.plain, cell)
    drafting = {name: column[requests["drafts"] > 0] for name, column in requests.items()}
    rounds = [r for r in tallies.rounds if cell.covers(r.cell)]
    drafts = [r for r in rounds if r.drafted]
    bursts = [b for b in tallies.bursts if cell.covers(b.cell)]
    plain_bursts = [b for b in bursts if not b.is_on]
    accepted = _counter((r.accepted, r.count) for r in drafts)
    return BucketReport(
        bucket=bucket,
        num_requests=len(requests["task"]),
        num_plain_requests=len(plain["task"]),
        num_rounds=sum(r.count for r in rounds),
        num_drafts=sum(r.count for r in drafts),
        mean_context=_mean(drafts, "context"),
        accepted_per_round=counted_distribution(accepted) if drafts else None,
        accepted_per_request=distribution(drafting["accepted"] / drafting["drafts"]),
        mean_accepted=_per_draft(drafting, "accepted") if drafts else None,
        positions=_positions(drafts),
        worst_positions=_positions([w for w in tallies.worst if w.cell == cell]),
        accepted_counts=_histogram(accepted),
        drafted_counts=_histogram(_counter((r.drafted, r.count) for r in rounds)),
        modes=_counter((r.mode, r.count) for r in rounds),
        stops=_counter((r.stopped, r.count) for r in drafts),
        on=_latency(requests, [b for b in bursts if b.is_on]),
        off=_latency(plain, plain_bursts),
        paired=_paired(tallies.of(tallies.pairs, cell)),
        inequality=(
            _inequality(cost, requests, drafting, drafts, plain_bursts)
            if cost is not None and drafts
            else None
        ),
    )


def _mean(rounds: Sequence[RoundCount], name: str) -> float:
    """Of a field that is a sum over rounds."""
    return sum(getattr(r, name) for r in rounds) / max(1, sum(r.count for r in rounds))


def _per_draft(drafting: Columns, name: str) -> Estimate:
    return estimate(ratio_of_sums, drafting[name], drafting["drafts"])


def _counter(pairs: Iterable[tuple[T, int]]) -> dict[T, int]:
    """Sums by key, in the order of the keys."""
    counts: Counter[T] = Counter()
    for key, count in pairs:
        counts[key] += count
    return dict(sorted(counts.items()))


def _histogram(counts: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(counts.get(i, 0) for i in range(max(counts, default=-1) + 1))


def _positions(drafts: Sequence[RoundCount] | Sequence[WorstCount]) -> tuple[Position, ...]:
    total = sum(d.count for d in drafts)
    return tuple(
        Position(
            position=i,
            drafts=total,
            drafted=sum(d.count for d in drafts if d.drafted >= i),
            reached=sum(d.count for d in drafts if d.judged >= i),
            accepted=sum(d.count for d in drafts if d.accepted >= i),
        )
        for i in range(1, max((d.drafted for d in drafts), default=0) + 1)
    )


def _latency(requests: Columns, bursts: Sequence[BurstCount]) -> Latency | None:
    ttft, end_to_end = distribution(requests["ttft"]), distribution(requests["end_to_end"])
    if ttft is None or end_to_end is None:
        return None
    later, decode = requests["new_tokens"] - 1.0, requests["decode"]
    several = later > 0
    seconds = decode[several].sum()
    bins = _counter((math.exp(b.bin / BINS), b.count) for b in bursts)
    total = sum(b.seconds for b in bursts)
    return Latency(
        ttft=ttft,
        per_token=distribution(decode[several] / later[several]),
        end_to_end=end_to_end,
        burst=counted_distribution(bins, total / sum(bins.values())) if bins else None,
        tokens_per_second=float(later[several].sum() / seconds) if seconds > 0.0 else None,
    )


def _paired(pairs: Columns) -> Paired | None:
    on, off = (np.maximum(pairs[name], SHORTEST) for name in ("on", "off"))
    ttft = (np.maximum(pairs[name], SHORTEST) for name in ("ttft_on", "ttft_off"))
    ratios = distribution(on / off)
    if ratios is None:
        return None
    return Paired(
        num_prompts=len(on),
        num_identical=int(pairs["same"].sum()),
        end_to_end=estimate(median_ratio, on, off),
        ttft=estimate(median_ratio, *ttft),
        p90=estimate(ratio_of_p90, on, off),
        slowest_decile=estimate(ratio_of_slowest, on, off),
        worst_decile=estimate(ratio_of_worst, on, off, pairs["gain"]),
        ratios=ratios,
    )


def _inequality(
    cost: CostTable,
    requests: Columns,
    drafting: Columns,
    drafts: Sequence[RoundCount],
    plain_bursts: Sequence[BurstCount],
) -> Inequality:
    """In units of a plain pass of as many rows as shared the rounds."""
    c, verify = in_plain_passes(
        cost, _mean(drafts, "context"), _mean(drafts, "rows"), max(r.drafted for r in drafts)
    )
    num_drafts = sum(r.count for r in drafts)
    gain = distribution(requests["gain"])
    assert gain is not None
    plain_seconds = sum(b.seconds for b in plain_bursts) / max(
        1, sum(b.count for b in plain_bursts)
    )
    clock = plain_seconds > 0.0
    return Inequality(
        c=c,
        draft_passes=_mean(drafts, "passes"),
        beta=sum(r.count * verify[r.drafted] for r in drafts) / num_drafts - 1.0,
        emitted=_per_draft(drafting, "emitted"),
        accepted=_per_draft(drafting, "accepted"),
        verify=verify,
        gain=gain,
        clock_alpha=_mean(drafts, "draft_seconds") / plain_seconds if clock else None,
        clock_beta=_mean(drafts, "verify_seconds") / plain_seconds - 1.0 if clock else None,
    )
