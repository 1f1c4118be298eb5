"""What drift alarms are worth on recorded rounds: ``python bench/drift.py RUNS --label category``.

Whole requests of a runs folder (``layerskip measure``) are drawn again and again: each monitor
learns its baseline from a hundred of them, and watches others, as they are for false alarms, and
with the mean of accepted tokens a draft half a standard deviation lower for the delay: each
accepted token is lost with the same chance, and what was accepted behind it. So few recorded
requests stand for a whole bucket: one odd request comes back in every stream, which makes more
false alarms than traffic with as many odd ones, none twice. A monitor that is not told the drafts'
confidences (``--no-confidences``) has accepted tokens alone.
"""

import argparse
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerskip.telemetry.baseline import Baseline
from layerskip.telemetry.cusum import SHIFT, Cusum
from layerskip.telemetry.drift import Alarm, DriftMonitor
from layerskip.telemetry.runs import REQUESTS, ROUNDS, read_lines

REFERENCE = 100
LEAST = 20
NEVER = 10**6

Draft = tuple[int, tuple[float, ...], bool]  # accepted tokens, confidences, looked up
Request = list[Draft]


def recorded(
    folder: Path, arm: str, label: str | None, *, confidences: bool
) -> dict[str, list[Request]]:
    """The drafts of each finished request, by bucket; "" holds all of them."""
    finished = {entry["request_id"] for entry in read_lines(folder / REQUESTS)}
    requests: dict[tuple[str, str], Request] = defaultdict(list)
    for entry in read_lines(folder / ROUNDS):
        if entry["arm"] == arm and entry["num_draft_tokens"] and entry["request_id"] in finished:
            bucket = entry["labels"].get(label, "") if label else ""
            told = tuple(entry["confidences"]) if confidences else ()
            draft = (entry["num_accepted_tokens"], told, entry["mode"] == "lookup")
            requests[bucket, entry["request_id"]].append(draft)
    buckets: dict[str, list[Request]] = defaultdict(list)
    for (bucket, _), drafts in requests.items():
        buckets[""].append(drafts)
        if bucket:
            buckets[bucket].append(drafts)
    return buckets


def watch(monitor: DriftMonitor, requests: Sequence[Request]) -> Iterator[int]:
    """Drafts so far, after each."""
    watched = 0
    for i, drafts in enumerate(requests):
        for j, (accepted, told, looked_up) in enumerate(drafts, 1):
            watched += 1
            monitor.observe(
                "",
                str(i),
                accepted,
                confidences=told,
                looked_up=looked_up,
                finished=j == len(drafts),
            )
            yield watched


def learnt(requests: Sequence[Request]) -> Baseline:
    """What a monitor takes for usual."""
    monitor = DriftMonitor(num_reference_requests=len(requests))
    for _ in watch(monitor, requests):
        pass
    return monitor.baselines()[""]


def alarms(baseline: Baseline, requests: Sequence[Request]) -> list[tuple[int, Alarm]]:
    """After how many drafts each was raised."""
    raised: list[Alarm] = []
    monitor = DriftMonitor(baselines={"": baseline}, on_alarm=raised.append)
    for _ in watch(monitor, requests):
        pass
    return [(alarm.num_drafts, alarm) for alarm in raised]


def loss(accepted: Sequence[int], wanted: float) -> float:
    """The chance of losing each token that takes ``wanted`` of a draft's."""
    counts = Counter(accepted)
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        kept = sum(n * sum((1 - chance) ** i for i in range(1, a + 1)) for a, n in counts.items())
        lost = (sum(a * n for a, n in counts.items()) - kept) / counts.total()
        low, high = (chance, high) if lost < wanted else (low, chance)
    return high


def thinned(accepted: int, chance: float, rng: random.Random) -> int:
    """Tokens before the first that is lost."""
    return next((i for i in range(accepted) if rng.random() < chance), accepted)


def report(requests: list[Request], monitors: int, drafts: int) -> str:
    """One line of figures."""
    rng, found, watched, delays = random.Random(0), Counter[str](), 0, []
    known = learnt(requests)
    each = round(drafts / monitors / known.drafts_per_request)
    chance = loss([a for one in requests for a, *_ in one], SHIFT * known.deviation)
    for _ in range(monitors):
        baseline = learnt(rng.choices(requests, k=REFERENCE))
        stream = rng.choices(requests, k=each)
        found.update(alarm.watched for _, alarm in alarms(baseline, stream))
        watched += sum(map(len, stream))
        worse = [
            [(thinned(accepted, chance, rng), *rest) for accepted, *rest in one]
            for one in rng.choices(requests, k=REFERENCE)
        ]
        fallen = (n for n, alarm in alarms(baseline, worse) if alarm.direction == "down")
        delays.append(next(fallen, NEVER))
    surprise = known.surprise.baseline.correlation if known.surprise is not None else float("nan")
    return (
        f"{len(requests):4} requests of {known.drafts_per_request:.0f} drafts, "
        f"mean {known.mean:.2f}, deviation {known.deviation:.2f}, "
        f"correlation {known.correlation:.3f}, of surprise {surprise:.3f}, "
        f"expected delay by accepted tokens alone {Cusum(known).expected_delay:.0f}, "
        f"median delay {statistics.median(delays):.0f}, "
        f"false alarms in 100,000 drafts {1e5 * found.total() / watched:.2f} "
        f"({dict(found)} of {watched / 1e6:.1f} million)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--arm", default="auto")
    parser.add_argument("--label")
    parser.add_argument("--no-confidences", dest="confidences", action="store_false")
    parser.add_argument("--monitors", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=2_000_000, help="watched for false alarms")
    args = parser.parse_args()
    buckets = recorded(args.runs, args.arm, args.label, confidences=args.confidences)
    for bucket, requests in sorted(buckets.items()):
        if len(requests) >= LEAST:
            print(f"{bucket or 'all':15}{report(requests, args.monitors, args.drafts)}", flush=True)


if __name__ == "__main__":
    main()
