"""The table of goals: what was wanted, and what the files in bench/results say."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from figures import over_best
from gpu.tables import goals as of_gpu
from modes import BASE
from tables import PERCENT, TITLES, Files, Modes, automatic, drafter_of, rows


def goals(files: Files) -> str:
    """What was wanted, and what the files say."""
    lines = []
    exact = files.read("exactness.json")["modes"]
    for mode in (m for m in exact if m.startswith("automatic")):
        entry = exact[mode]
        found = f"{entry['equal']} of {entry['prompts']}"
        lines.append([f"text equal to plain decoding, {mode}", "all prompts", found])
    lines.append(of_bounds(files.latest("never-slower")["cases"]))
    lines += of_cells(files.quick)
    lines += of_matrix(files.cells("bench-full.json"))
    texts = [w for w in files.latest("workloads")["workloads"] if w["prompts"]]
    lines += of_workloads(texts)
    lines.append(of_confidences(files.latest("confidences")["texts"]))
    lines += of_replayed(files.latest("replayed")["temperatures"])
    lines += of_simulation(files)
    lines += of_drift(files.latest("drift")["buckets"])
    lines.append(of_recording(files.latest("recording-cost")["num_draft_tokens"]))
    adapter = files.latest("recipe-exit-adapter-builtin")
    ratio = automatic(adapter["after"])["speedup"] / automatic(adapter["before"])["speedup"]
    lines.append(["exit adapter over the built-in's own exit", "1.10", f"{ratio:.2f}"])
    lines += of_gpu(files.folder)
    return rows(["goal", "wanted", "found"], lines)


def of_bounds(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What drafting may cost, by the wall, each case against its own bound."""
    over = [
        f"{name} {case['wall']:.1f} of {case['bound']:g}"
        for name, case in cases.items()
        if case["wall"] > case["bound"]
    ]
    found = "; ".join([f"{len(cases) - len(over)} of {len(cases)}", *over])
    return ["what drafting costs at most, each case within its own 1 to 3 %", "all", found]


def of_cells(cells: Mapping[str, Modes]) -> list[list[str]]:
    """Automatic against plain decoding and against a fixed number, in the cells of `make bench`."""
    lines = []
    for other in (BASE, "fixed"):
        ratios = {
            cell: paired_ratio(modes["automatic"], modes[other])
            for cell, modes in cells.items()
            if {"automatic", other} <= set(modes)
        }
        worst = min(ratios, key=lambda cell: ratios[cell])
        held = f"{sum(r >= 0.97 for r in ratios.values())} of {len(ratios)}"
        found = f"{held}; worst {ratios[worst]:.2f}, `{worst}`"
        title = TITLES[other].removeprefix("layerskip, ")
        lines.append([f"automatic over {title}, each cell of `make bench`", "0.97", found])
    return lines


def of_matrix(cells: Mapping[str, Modes]) -> list[list[str]]:
    """Where automatic drafting is not the fastest, of the whole matrix: ratios of medians, for its
    file has no single prompts, of which a cell has one or two."""
    over_plain, over_theirs, over_fixed = {}, {}, {}
    for cell, modes in cells.items():
        speeds = {name: mode[f"speedup_vs_{BASE}"] for name, mode in modes.items()}
        theirs = [speed for name, speed in speeds.items() if name.startswith("hf")]
        if "automatic" in speeds:
            over_plain[cell] = speeds["automatic"]
        if "automatic" in speeds and theirs:
            over_theirs[cell] = speeds["automatic"] / max(theirs)
        if {"automatic", "fixed"} <= set(speeds):
            over_fixed[cell] = speeds["automatic"] / speeds["fixed"]
    return [
        _of_matrix(TITLES[BASE].removeprefix("layerskip, "), over_plain, 0.97),
        _of_matrix("transformers' fastest mode", over_theirs, 1.0),
        _of_matrix(TITLES["fixed"].removeprefix("layerskip, "), over_fixed, 0.97),
    ]


def _of_matrix(other: str, ratios: Mapping[str, float], goal: float) -> list[str]:
    worst = min(ratios, key=lambda cell: ratios[cell])
    held = f"{sum(r >= goal for r in ratios.values())} of {len(ratios)}"
    title = f"automatic over {other}, each cell of `make bench-full`"
    return [title, f"{goal:g}", f"{held}; worst {ratios[worst]:.2f}, `{worst}`"]


def paired_ratio(mode: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How many times as fast a mode is as another: the median of the prompts' own ratios."""
    pairs = zip(mode["seconds_per_token"], other["seconds_per_token"], strict=True)
    return statistics.median(b / a for a, b in pairs)


def _over_best(
    texts: Sequence[Mapping[str, Any]], mode: str, over: str, *, looking_up: bool
) -> list[list[str]]:
    """A way of leaving the number to us against every fixed one."""

    def said(title: str, ratios: Sequence[float]) -> list[str]:
        near = sum(r >= 0.97 for r in ratios)
        return [title, "0.97", f"{near} of {len(ratios)}; worst {min(ratios):.2f}"]

    found = [w[f"{mode}_to_best_{'looking_up' if looking_up else 'fixed'}"] for w in texts]
    medians, counted = ([f[name] for f in found] for name in ("wall", "counted"))
    together = [over_best(w["modes"], mode, looking_up=looking_up) for w in texts]
    return [
        said(f"automatic over {over}, each text: median of its prompts", medians),
        said("the same, all prompts of a text together, by CPU time", together),
        said("the same, by the passes that were made and the cost table", counted),
    ]


def of_workloads(texts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Automatic against every fixed number, predictions against measurements, calibration."""
    drafting = [
        m["measured_cpu_speedup"] / m["predicted_speedup"] - 1.0
        for w in texts
        for name, m in w["modes"].items()
        if "predicted_speedup" in m and name != "plain"
    ]
    close = sum(abs(off) <= 0.1 for off in drafting)
    # Adversarial drafts are sure of themselves and wrong: that is what they are.
    real = [w for w in texts if w["workload"] != "adversarial"]
    errors = [PERCENT * w["modes"]["automatic"]["calibration_error"] for w in real]
    good = f"{sum(e < 3.0 for e in errors)} of {len(errors)}; worst {max(errors):.1f} %"
    told = f"{close} of {len(drafting)}; {min(drafting):+.0%} to {max(drafting):+.0%}"
    return [
        *_over_best(texts, "automatic", "the best fixed number", looking_up=False),
        *_over_best(
            texts, "combined", "the best fixed number, both with look-ups", looking_up=True
        ),
        [
            "measured speed within 10 % of the formula's",
            "all modes of all texts",
            told,
        ],
        ["calibration error of confidences, each text", "3 %", good],
    ]


def of_confidences(texts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Calibration over all prompts of each text: of a few it is mostly chance."""
    least = min(found["prompts"] for found in texts.values())
    errors = [PERCENT * list(t["by_prompts"].values())[-1]["error"] for t in texts.values()]
    good = f"{sum(e < 3.0 for e in errors)} of {len(errors)}; worst {max(errors):.1f} %"
    return [f"the same, {least} prompts or more of each text", "3 %", good]


def of_replayed(temperatures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Calibration over many requests: how much of it is chance."""
    lines = []
    for temperature, found in temperatures.items():
        error, chance = (PERCENT * found[f"calibration_error{more}"] for more in ("", "_by_chance"))
        what = f"the same over {found['texts']} mixed texts, T {temperature}"
        lines.append([what, "3 %", f"{error:.1f} %; {chance:.1f} % by chance"])
    return lines


def of_simulation(files: Files) -> list[list[str]]:
    cells = files.latest("simulation")["cells"]
    lines = []
    for share in ("p50", "p90"):
        off = [f["wall_off"] for c in cells for n, f in c["figures"].items() if n.endswith(share)]
        held = sum(abs(o) <= 0.15 for o in off)
        worst = PERCENT * max(map(abs, off))
        found = f"{held} of {len(off)}; worst {worst:.0f} %"
        lines.append([f"simulated {share} within 15 % of real ones", "all", found])
    return lines


def of_drift(buckets: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Median drafts until an alarm, by what drafts."""
    by_drafter: dict[str, list[Mapping[str, Any]]] = {}
    for found in buckets:
        best = found["with_confidences"] or found["accepted_alone"]
        by_drafter.setdefault(drafter_of(found), []).append(best)
    lines = []
    for drafter, found in by_drafter.items():
        held = [f["median_delay"] < 200.0 and f["false_alarms_per_100000"] < 1.0 for f in found]
        slowest = max(f["median_delay"] for f in found)
        falsest = max(f["false_alarms_per_100000"] for f in found)
        told = f"{sum(held)} of {len(held)}; at most {slowest:.0f} and {falsest:.4f}"
        wanted = "under 200, under 1"
        what = f"drafts until drift is told, false alarms in 100,000: {drafter}"
        lines.append([what, wanted, told])
    return lines


def of_recording(by_number: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a sink's call takes of a round."""
    shares = {
        f"{sink}, {number} drafted": share
        for number, found in by_number.items()
        for sink, share in found["share_of_a_round"].items()
    }
    worst = max(shares, key=lambda name: shares[name])
    # With against without: also what rounds tell because somebody listens, and the noise.
    whole: dict[str, list[float]] = {}
    for number, found in by_number.items():
        ratios = [found["with_over_without"][sink] for sink in found["share_of_a_round"]]
        whole[number] = [PERCENT * (median - 1.0) for median, *_ in ratios]
    means = ", ".join(f"{number}: {statistics.fmean(w):+.1f}" for number, w in whole.items())
    most = max(map(max, whole.values()))
    said = f"a call at most {shares[worst]:.2%} ({worst}); all of it, mean of sinks, by drafted "
    said += f"tokens {means} %, one sink {most:+.1f} %"
    return ["recording a round, of its time", "1 %", said]
