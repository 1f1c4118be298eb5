"""What drift alarms are worth on recorded rounds: ``python bench/drift.py RUNS --label category``.

Whole requests of a runs folder (``layerskip measure``) are drawn again and again: each monitor
learns its baseline from a hundred of them, and watches others, as they are for false alarms, and
with half a standard deviation of accepted tokens a draft taken away for the delay. So few
recorded requests stand for a whole bucket: one odd request comes back in every stream, which makes
more false alarms than traffic with as many odd ones, none twice.
"""

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerskip.telemetry.cusum import SHIFT, Baseline, Cusum, OpenRequest
from layerskip.telemetry.runs import REQUESTS, ROUNDS, read_lines

REFERENCE = 100
LEAST = 20
REMOVED = 2  # most tokens that are taken from a draft

Request = list[int]


def recorded(folder: Path, arm: str, label: str | None) -> dict[str, list[Request]]:
    """Accepted tokens of each draft, by bucket and finished request; "" holds all of them."""
    finished = {entry["request_id"] for entry in read_lines(folder / REQUESTS)}
    requests: dict[tuple[str, str], Request] = defaultdict(list)
    for entry in read_lines(folder / ROUNDS):
        if entry["arm"] == arm and entry["num_draft_tokens"] and entry["request_id"] in finished:
            bucket = entry["labels"].get(label, "") if label else ""
            requests[bucket, entry["request_id"]].append(entry["num_accepted_tokens"])
    buckets: dict[str, list[Request]] = defaultdict(list)
    for (bucket, _), drafts in requests.items():
        buckets[""].append(drafts)
        if bucket:
            buckets[bucket].append(drafts)
    return buckets


def alarms(cusum: Cusum, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
    """After how many drafts, and which way."""
    watched = 0
    for drafts in requests:
        state = OpenRequest()
        for accepted in drafts:
            watched += 1
            found = cusum.observe(state, accepted)
            if found is not None:
                yield watched, found[0]


def worse(requests: Sequence[Request], baseline: Baseline, rng: random.Random) -> list[Request]:
    """The same, with the mean ``SHIFT`` standard deviations lower."""
    loss = statistics.fmean(min(REMOVED, a) for drafts in requests for a in drafts)
    chance = SHIFT * baseline.deviation / loss
    return [[a - min(REMOVED, a) * (rng.random() < chance) for a in drafts] for drafts in requests]


def report(requests: list[Request], monitors: int, drafts: int) -> str:
    """One line of figures."""
    rng, found, watched, delays = random.Random(0), 0, 0, []
    known = Baseline.of(requests)
    each = round(drafts / monitors / known.drafts_per_request)
    for _ in range(monitors):
        cusum = Cusum(Baseline.of(rng.choices(requests, k=REFERENCE)))
        found += len(list(alarms(cusum, rng.choices(requests, k=each))))
        watched += cusum.num_drafts
        fresh = Cusum(cusum.baseline)
        stream = worse(rng.choices(requests, k=REFERENCE), known, rng)
        delays.append(next((n for n, way in alarms(fresh, stream) if way == "down"), 10**6))
    return (
        f"{len(requests):4} requests of {known.drafts_per_request:.0f} drafts, "
        f"mean {known.mean:.2f}, deviation {known.deviation:.2f}, "
        f"correlation {known.correlation:.3f} +- {known.correlation_error:.3f}, "
        f"expected delay {known.expected_delay():.0f}, "
        f"median delay {statistics.median(delays):.0f}, "
        f"false alarms in 100,000 drafts {1e5 * found / watched:.2f} "
        f"(of {watched / 1e6:.1f} million)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--arm", default="auto")
    parser.add_argument("--label")
    parser.add_argument("--monitors", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=2_000_000, help="watched for false alarms")
    args = parser.parse_args()
    for bucket, requests in sorted(recorded(args.runs, args.arm, args.label).items()):
        if len(requests) >= LEAST:
            print(f"{bucket or 'all':15}{report(requests, args.monitors, args.drafts)}", flush=True)


if __name__ == "__main__":
    main()
