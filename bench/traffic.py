"""The operator's five commands in a row: what traffic says, and whether the decision was right.

    python bench/traffic.py --prompts traffic.jsonl --label category --temperature 0.8

Measures every prompt without drafting, automatically and with one fixed number, interleaved; has
``layerskip report`` decide by the automatic arm and by the fixed one; simulates users; and decodes
prompts in pairs, by each policy against never drafting and against its own arm always on. The runs
folder is kept, and a measurement that was stopped goes on in it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paired import as_many, as_usual, circumstances, dated, part_of, write
from tables import RATIOS

from layerskip.params import AUTO

ONE_BUCKET = ("--prompt-edges", "", "--output-edges", "")
OFF = "0"
RECORDED_PROMPTS = 150


def layerskip(*arguments: object) -> dict[str, Any]:
    """What a command says in JSON; its progress is shown."""
    command = [sys.executable, "-m", "layerskip.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def decided(folder: Path, arm: str) -> dict[str, Any]:
    """What ``report`` makes of an arm; its policy and page are left in the folder."""
    files = ("--policy", policy_of(folder, arm), "--html", folder / f"report-{arm}.html")
    found = layerskip("report", folder, "--arm", arm, *ONE_BUCKET, *files)
    rules = {rule["task"]: rule for rule in found["policy"]["rules"]}
    report = found["report"]
    tasks = [task_of(route, rules[route["bucket"]["task"]]) for route in report["routes"]]
    drift = report["drift"] or {"alarms": []}
    return {
        "total": task_of(report["total"], None),
        "tasks": tasks,
        "drift_alarms": len(drift["alarms"]),
    }


def policy_of(folder: Path, arm: str) -> Path:
    return folder / f"policy-{arm}.json"


def task_of(route: Mapping[str, Any], rule: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures that a decision is made of."""
    paired, inequality = route["paired"], route["inequality"]
    each = route["accepted_per_request"]
    return {
        "task": route["bucket"]["task"],
        "requests": route["num_requests"],
        "accepted": route["mean_accepted"],
        "p10_request": each and each["p10"],
        "end_to_end": paired and paired["end_to_end"],
        "p90": paired and paired["p90"],
        "worst_decile": paired and paired["worst_decile"],
        **{
            name: inequality and inequality[name]
            for name in ("c", "alpha", "beta", "clock_alpha", "clock_beta")
        },
        "margin": inequality and inequality["margin"],
        "margin_without_bonus": inequality and inequality["margin_without_bonus"],
        "max_draft_tokens": rule["max_draft_tokens"] if rule else None,
        "reason": rule["reason"] if rule else "",
    }


def compared(a: str, b: str, shared: Sequence[object]) -> dict[str, Any]:
    """Two arms on the same prompts; ratios above 1: ``b`` is faster."""
    found = layerskip("ab", *shared, "--a", a, "--b", b)
    return {
        "a": Path(a).stem,
        "b": Path(b).stem,
        "prompts": found["prompts"],
        "equal_share": found["equal_share"],
        **{name: found["speedup"][name] for name in RATIOS},
        "winner": found["winner"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--label", required=True, help="whose value is the task")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--fixed", default="8", help="the number of the third arm (8)")
    parser.add_argument("--limit", type=int, help="prompts measured (all)")
    parser.add_argument("--pairs", type=int, default=60, help="prompts of each comparison (60)")
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    parser.add_argument("--users", default="1,2,4,8,16,32")
    parser.add_argument("--runs", type=Path, default=Path("runs/traffic"))
    parser.add_argument("--out", type=Path, help="default: the day's record, of a whole run")
    args, record = parser.parse_args(), dated("traffic")
    out = args.out or part_of(record)
    drawn = ("--temperature", args.temperature, "--max-new-tokens", args.max_new_tokens)
    of = (args.model, "--prompts", args.prompts, *drawn)
    limit = () if args.limit is None else ("--limit", args.limit)
    arms = ("--arms", f"{OFF},{AUTO},{args.fixed}", "--label", args.label, *limit)
    measured = layerskip("measure", *of, "--out", args.runs, "--bad-lines", "skip", *arms)
    document: dict[str, Any] = {**circumstances(), "model": args.model}
    document |= {"file": args.prompts.name, "temperature": args.temperature}
    document |= {"max_new_tokens": args.max_new_tokens, "fixed": args.fixed}
    document |= {name: measured[name] for name in ("bad_lines", "left_out", "prompts", "equal")}
    document["reports"] = {arm: decided(args.runs, arm) for arm in (AUTO, args.fixed)}
    cost = args.runs / "cost.json"
    layerskip("profile", args.model, "--out", cost, "--seconds", args.profile_seconds)
    users = ("--concurrency", args.users, "--policies", f"off,fixed:{args.fixed},auto")
    simulated = layerskip("simulate", "--cost", cost, "--runs", args.runs, *users)
    names = ("policy", "concurrency", "tokens_per_second")
    document["simulated"] = [{name: cell[name] for name in names} for cell in simulated["cells"]]
    pairs: list[dict[str, Any]] = []
    for arm in (AUTO, args.fixed):
        policy, some = str(policy_of(args.runs, arm)), (*of, "--limit", args.pairs)
        pairs += [compared(always, policy, some) for always in (OFF, arm)]
        write(out, {**document, "compared": pairs})
    usual = as_usual(args, parser, "model", "temperature", "max_new_tokens", "fixed")
    enough = document["prompts"] >= RECORDED_PROMPTS and as_many(args, parser, "pairs")
    if args.out is None and usual and enough:
        out = out.replace(record)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
