"""What drift alarms are worth on recorded rounds.

    python bench/drift.py RUNS... --arms auto,4 --label category

Whole requests of runs folders (``layerskip measure``) are drawn again and again: each monitor
learns its baseline from a hundred of them, and watches others, as they are for false alarms, and
with the mean of accepted tokens a draft half a standard deviation lower for the delay: each
accepted token is lost with the same chance, and what was accepted behind it. So few recorded
requests stand for a whole bucket: one odd request comes back in every stream, which makes more
false alarms than traffic with as many odd ones, none twice. Each bucket is watched twice: by
monitors that are told the drafts' confidences, if there are any, and by some that are not.
"""

import argparse
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paired import as_many, circumstances, dated, part_of, write
from rich.console import Console

from layerskip.telemetry.baseline import Baseline
from layerskip.telemetry.cusum import SHIFT
from layerskip.telemetry.drift import Alarm, DriftMonitor
from layerskip.telemetry.runs import REQUESTS, ROUNDS, read_lines, read_run

REFERENCE = 100
LEAST = 20
RECORDED = {(temperature, arm) for temperature in (0.0, 0.8) for arm in ("auto", "4")}
NEVER = 10**6

Draft = tuple[int, tuple[float, ...], bool]  # accepted tokens, confidences, looked up
Request = list[Draft]


def recorded(folder: Path, arm: str, label: str | None) -> dict[str, list[Request]]:
    """The drafts of each finished request, by bucket; "" holds all of them."""
    finished = {entry["request_id"] for entry in read_lines(folder / REQUESTS)}
    requests: dict[tuple[str, str], Request] = defaultdict(list)
    for entry in read_lines(folder / ROUNDS):
        if entry["arm"] == arm and entry["num_draft_tokens"] and entry["request_id"] in finished:
            bucket = entry["labels"].get(label, "") if label else ""
            told = tuple(entry["confidences"])
            draft = (entry["num_accepted_tokens"], told, entry["mode"] == "lookup")
            requests[bucket, entry["request_id"]].append(draft)
    buckets: dict[str, list[Request]] = defaultdict(list)
    for (bucket, _), drafts in requests.items():
        buckets[""].append(drafts)
        if bucket:
            buckets[bucket].append(drafts)
    return buckets


def untold(requests: Sequence[Request]) -> list[Request]:
    """The same without confidences."""
    return [[(accepted, (), looked_up) for accepted, _, looked_up in one] for one in requests]


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


def judged(requests: Sequence[Request], monitors: int, drafts: int) -> dict[str, Any]:
    """The median delay, and how many alarms were false."""
    rng, found, watched, delays = random.Random(0), Counter[str](), 0, []
    accepted = [a for one in requests for a, *_ in one]
    each = round(drafts / monitors / (len(accepted) / len(requests)))
    chance = loss(accepted, SHIFT * statistics.pstdev(accepted))
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
    return {
        "median_delay": statistics.median(delays),
        "false_alarms": dict(found),
        "drafts_watched": watched,
        "false_alarms_per_100000": 1e5 * found.total() / watched,
    }


def report(requests: Sequence[Request], monitors: int, drafts: int) -> dict[str, Any]:
    """Of one bucket."""
    known = learnt(requests)
    told = known.surprise is not None
    return {
        "requests": len(requests),
        "drafts_per_request": known.drafts_per_request,
        "mean": known.mean,
        "deviation": known.deviation,
        "correlation": known.correlation,
        "correlation_of_surprise": known.surprise.baseline.correlation if told else None,
        "accepted_alone": judged(untold(requests), monitors, drafts),
        "with_confidences": judged(requests, monitors, drafts) if told else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--arms", default="auto", help="comma-separated (auto)")
    parser.add_argument("--label", help="whose value is the bucket")
    parser.add_argument("--monitors", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=1_000_000, help="watched for false alarms")
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    args, record = parser.parse_args(), dated("drift")
    out = args.out or part_of(record)
    console, buckets = Console(width=160), []
    for folder in args.runs:
        temperature = read_run(folder)["sampling"]["temperature"]
        for arm in args.arms.split(","):
            for bucket, requests in sorted(recorded(folder, arm, args.label).items()):
                if len(requests) < LEAST:
                    continue
                found = report(requests, args.monitors, args.drafts)
                buckets.append({"temperature": temperature, "arm": arm, "bucket": bucket} | found)
                console.print(line_of(buckets[-1]))
                asked = {"monitors": args.monitors, "drafts": args.drafts}
                write(out, {**circumstances(), **asked, "buckets": buckets})
    if args.out is None and as_many(args, parser, "monitors", "drafts") and shown(buckets):
        out = out.replace(record)
    console.print(f"written to {out}" if buckets else f"no bucket has {LEAST} requests")


def shown(buckets: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all is there that tables show: each temperature and arm, and its buckets."""
    return all(
        {(b["temperature"], b["arm"]) for b in buckets if bool(b["bucket"]) == named} >= RECORDED
        for named in (False, True)
    )


def line_of(found: Mapping[str, Any]) -> str:
    """As people read it."""
    line = f"T {found['temperature']:g}, {found['arm']}, {found['bucket'] or 'all':12}"
    line += f"{found['requests']:4} requests of {found['drafts_per_request']:.0f} drafts"
    for name in ("accepted_alone", "with_confidences"):
        if (one := found[name]) is not None:
            line += f"; {name.replace('_', ' ')}: {one['median_delay']:.0f} drafts, "
            line += f"{one['false_alarms_per_100000']:.2f} false"
    return line


if __name__ == "__main__":
    main()
