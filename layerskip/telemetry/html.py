"""A report as one HTML page, which needs nothing else: no script, no network, no other file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from layerskip.files import reason_of, write_text
from layerskip.policy import Policy, task_of
from layerskip.telemetry import figures, tables
from layerskip.telemetry.charts import WIDTH
from layerskip.telemetry.report import AcceptanceReport
from layerskip.telemetry.runs import SAMPLES
from layerskip.text import NOT_TEXT

MAX_SAMPLES = 24
MAX_ALARMS = 20
MAX_SAMPLE_LETTERS = 6000
MAX_PROMPT_LETTERS = 2000
MAX_FACT_LETTERS = 400
ORIGINS = {
    "accepted": "drafted, and what the full model picks too",
    "recovered": "the full model's own, where it first disagreed with the draft",
    "bonus": "the full model's own, after a draft that was accepted to its end",
    "plain": "of a round that drafted nothing",
    "prefill": "the first token, of the prompt's pass",
}


def write_html(
    report: AcceptanceReport,
    policy: Policy,
    samples: Sequence[Mapping[str, Any]],
    path: str | Path,
) -> None:
    """Write a report as a page that can be read, mailed and printed by itself.

    The same arguments give the same bytes. Figures of at most 16 buckets are drawn, tables have at
    most 500, and 24 samples are shown; the page says what it leaves out.

    Args:
        samples: the content of ``samples.jsonl``: "request_id", "labels", "arm", "prompt" and
            "pieces", each with "text" and "origin".

    Raises:
        ValueError: the file cannot be written; an older one is left.
    """
    write_text(path, render(report, policy, samples))


def render(
    report: AcceptanceReport,
    policy: Policy,
    samples: Sequence[Mapping[str, Any]],
) -> str:
    """The page that ``write_html`` writes.

    Raises:
        ValueError: a sample lacks something.
    """
    drift = report.drift
    try:
        shown = [_sample(s) for s in _choose(samples, report.label, report.arm)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a line of {SAMPLES} is no sample ({reason_of(error)})") from None
    return page(
        "report.html",
        report=report,
        decisions=tables.decision_table(report, policy),
        on=sum(rule.max_draft_tokens != 0 for rule in policy.rules),
        num_rules=len(policy.rules),
        cautions=report.cautions,
        acceptance=figures.acceptance(report),
        positions=figures.positions(report),
        histograms=figures.histograms(report),
        reasons=tables.reason_table(report),
        inequality=figures.inequality(report),
        gains=figures.gains(report),
        ratios=figures.ratios(report),
        latencies=figures.latencies(report),
        waits=tables.latency_table(report),
        alarms=[str(alarm) for alarm in drift.alarms[-MAX_ALARMS:]] if drift else [],
        drifts=figures.drifts(drift) if drift else (),
        shifts=tables.drift_table(drift) if drift else None,
        samples=shown,
        num_samples=len(samples),
        origins=ORIGINS,
        facts=[(name, _fact(value)) for name, value in report.measured.items()],
    )


def page(template: str, **values: Any) -> str:
    """Fill one of the templates. Values are escaped, control characters replaced."""
    environment = Environment(
        loader=PackageLoader("layerskip.telemetry"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": tables.number, "interval": tables.interval}
    environment.globals["chart_width"] = round(WIDTH)
    return environment.get_template(template).render(values).translate(NOT_TEXT)


def _choose(
    samples: Sequence[Mapping[str, Any]], label: str | None, arm: str
) -> list[Mapping[str, Any]]:
    """Samples of the drafting arm: the first of every task, then the second of every task, ..."""
    drafting = [s for s in samples if s["arm"] == arm] or list(samples)
    seen: Counter[str] = Counter()
    ranked = []
    for sample in drafting:
        task = task_of(sample["labels"], label)
        ranked.append((seen[task], sample))
        seen[task] += 1
    chosen = sorted(ranked, key=itemgetter(0))[:MAX_SAMPLES]
    return [sample for _, sample in chosen]


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of one: tokens in a row of one origin as (origin, text), of the whole
    text what part has which origin, and in words what is cut off."""
    pieces, prompt = sample["pieces"], sample["prompt"]
    runs: list[tuple[str, str]] = []
    letters: Counter[str] = Counter()
    room = MAX_SAMPLE_LETTERS
    for origin, group in groupby(pieces, key=itemgetter("origin")):
        text = "".join(piece["text"] for piece in group)
        letters[origin] += len(text)
        if room > 0:
            runs.append((origin, text[:room]))
        room -= len(text)
    cut = []
    if len(prompt) > MAX_PROMPT_LETTERS:
        cut.append(f"the prompt's first {len(prompt) - MAX_PROMPT_LETTERS} characters")
    if room < 0:
        cut.append(f"the text's last {-room} characters")
    labels = [f"{name} {value}" for name, value in sample["labels"].items()]
    return {
        "name": ", ".join((*labels, f"request {sample['request_id']}")),
        "prompt": prompt[-MAX_PROMPT_LETTERS:],
        "runs": runs,
        "shares": ", ".join(
            f"{100 * n / letters.total():.0f} % {o}" for o in ORIGINS if (n := letters[o])
        ),
        "cut": " and ".join(cut),
    }


def _fact(value: Any) -> str:
    """A setting or fact of a run in words; what is empty is left out."""
    empty: tuple[Any, ...] = (None, "", [], {})
    if isinstance(value, Mapping):
        parts = [f"{name} {_fact(part)}" for name, part in value.items() if part not in empty]
    elif isinstance(value, list | tuple):
        parts = [_fact(part) for part in value]
    else:
        parts = [str(value)]
    text = ", ".join(parts) or tables.UNKNOWN
    return text if len(text) <= MAX_FACT_LETTERS else text[:MAX_FACT_LETTERS] + "…"
