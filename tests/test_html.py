"""The report's page: whole, safe whatever it is given, and readable by people and machines."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from layerskip.policy import Policy, Rule
from layerskip.telemetry.buckets import Bucket
from layerskip.telemetry.charts import (
    WIDTH,
    Axis,
    Chart,
    Row,
    Series,
    bar_chart,
    line_chart,
    row_chart,
    shorten,
)
from layerskip.telemetry.drift import Drift, find_drift
from layerskip.telemetry.figures import (
    acceptance,
    histograms,
    inequality,
    latencies,
    positions,
    ratios,
)
from layerskip.telemetry.html import render, write_html
from layerskip.telemetry.report import (
    AcceptanceReport,
    BucketReport,
    Distribution,
    Estimate,
    Inequality,
    Latency,
    Paired,
    Position,
)
from layerskip.telemetry.tables import drift_table, seconds

HOSTILE = "\"'><script>alert(1)</script><img src=http://x.test/a>\x00\u202e&amp;\ud800"
LENGTHS = ((0, 128), (128, 512), (512, 2048), (2048, None))


def spread(rng, scale: float, whole: bool = False) -> Distribution:
    values = np.sort(rng.gamma(4.0, scale / 4.0, 400))
    values = np.floor(values) if whole else values
    quantiles = np.quantile(values, np.linspace(0, 1, 101)).tolist()
    return Distribution(400, float(values.mean()), tuple(quantiles))


def around(value: float, requests: int, width: float = 0.1) -> Estimate:
    return Estimate(value, value - width, value + width, requests)


def latency(rng, scale: float) -> Latency:
    kinds = (spread(rng, s * scale) for s in (0.03, 0.006, 0.9, 0.02))
    return Latency(*kinds, tokens_per_second=160.0 / scale)


def bucket_report(rng, bucket: Bucket, requests: int) -> BucketReport:
    mean = rng.uniform(0.3, 3.5)
    alive = np.floor(1000 * rng.uniform(0.6, 0.9) ** np.arange(7)).astype(int).tolist()
    places = tuple(Position(i, 1000, 1000, a, b) for i, (a, b) in enumerate(pairwise(alive), 1))
    return BucketReport(
        bucket=bucket,
        num_requests=requests,
        num_plain_requests=requests,
        num_rounds=requests * 30,
        num_drafts=requests * 25,
        mean_context=300.0,
        accepted_per_round=spread(rng, mean, whole=True),
        accepted_per_request=spread(rng, mean),
        mean_accepted=around(mean, requests),
        positions=places,
        worst_positions=places[:3],
        accepted_counts=tuple(rng.integers(1, 400, 7).tolist()),
        drafted_counts=tuple(rng.integers(1, 400, 7).tolist()),
        modes={"plain": 30, "early_exit": 200},
        stops={"number": 100, "confidence": 40},
        on=latency(rng, 1.0),
        off=latency(rng, 1.3),
        paired=Paired(
            requests,
            requests,
            *(around(float(rng.uniform(0.6, 1.3)), requests, 0.05) for _ in range(5)),
            ratios=spread(rng, 0.8),
        ),
        inequality=Inequality(
            c=0.25,
            draft_passes=4.0,
            beta=0.1,
            emitted=around(mean + 1, requests),
            accepted=around(mean, requests),
            verify=(1.0, 1.01, 1.02, 1.05),
            gain=spread(rng, 1.2),
        ),
    )


def made_up(tasks: list[str], lengths=LENGTHS[:2], *, requests: int = 300) -> AcceptanceReport:
    rng = np.random.default_rng(0)
    kinds = [bucket_report(rng, Bucket(None), requests) for _ in range(5)]
    routes = tuple(
        replace(kinds[i % 4], bucket=Bucket(task, span))
        for i, (task, span) in enumerate(product(tasks, lengths))
    )
    return AcceptanceReport(
        model="a/model",
        arm="auto",
        label="category",
        prompt_edges=(128,),
        output_edges=(),
        buckets=routes,
        routes=routes,
        total=kinds[4],
        num_ignored_rounds=7,
        measured={"prompts": {"name": "mine.jsonl", "count": 300}, "seed": 0},
    )


def policy_of(report: AcceptanceReport) -> Policy:
    rules = tuple(
        Rule(
            r.bucket.task or "",
            r.bucket.prompt_tokens,
            (0, 4, None)[i % 3],
            f"the worst tenth of requests gain 0.{i}, so drafting costs them time",
        )
        for i, r in enumerate(report.routes)
    )
    return Policy(rules, report.label)


def sample(number: int, task: str, arm: str = "auto", times: int = 8) -> dict:
    pieces = [
        {"text": text, "origin": origin}
        for text, origin in (
            (" return", "accepted"),
            (" x", "accepted"),
            (" + 1", "recovered"),
            ("\n", "plain"),
            (" def", "accepted"),
            (" f", "bonus"),
        )
    ]
    return {
        "request_id": f"{number}/{arm}",
        "labels": {"category": task},
        "arm": arm,
        "prompt": "def add(x):\n    ",
        "pieces": [{"text": "#", "origin": "prefill"}, *pieces * times],
    }


class Page(HTMLParser):
    """A page's elements: (tag, attributes, tags around it), and the text of each."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.spans: list[tuple[int, int]] = []  # of ``data``
        self.data: list[str] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, "an element was never closed"

    def handle_starttag(self, tag, attrs):
        around = tuple(self.elements[i][0] for i in self.open)
        self.elements.append((tag, dict(attrs), around))
        self.spans.append((len(self.data), len(self.data)))
        if tag not in self.VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        i = self.open.pop()
        assert self.elements[i][0] == tag, "elements overlap"
        self.spans[i] = (self.spans[i][0], len(self.data))

    def handle_data(self, data):
        self.data.append(data)

    def all(self, tag: str, name: str | None = None) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of each element, of class ``name`` alone if given."""
        return [
            (attributes, "".join(self.data[start:end]))
            for (found, attributes, _), (start, end) in zip(self.elements, self.spans, strict=True)
            if found == tag and (name is None or name in (attributes.get("class") or "").split())
        ]


def usual() -> str:
    report = made_up(["code", "writing"])
    return render(report, policy_of(report), [sample(1, "code"), sample(2, "writing")])


@pytest.fixture(scope="module")
def text() -> str:
    return usual()


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def empty() -> AcceptanceReport:
    return AcceptanceReport("a/model", "auto", None, (), (), (), (), BucketReport(Bucket(None)))


def test_the_same_arguments_give_the_same_bytes(text):
    assert usual() == text


def test_it_loads_nothing(text, page):
    tags = {tag for tag, _, _ in page.elements}
    assert not tags & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "audio",
        "video",
        "use",
        "base",
    }
    loaded = [
        value
        for _, attributes, _ in page.elements
        for name in ("src", "href", "srcset", "data", "action", "xlink:href", "poster")
        if (value := attributes.get(name))
    ]
    assert all(value.startswith("#") or value == "data:," for value in loaded)
    assert not [
        name for _, attributes, _ in page.elements for name in attributes if name[:2] == "on"
    ]
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in re.sub(r"http-equiv", "", text)
    policy = next(a["content"] for a, _ in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_hostile_text_stays_text():
    def rendered(word: str) -> Page:
        report = replace(made_up([word, "b"]), model=word, label=word, measured={word: word})
        policy = Policy(tuple(replace(r, reason=word) for r in policy_of(report).rules), word)
        bad = {**sample(1, word), "prompt": word, "labels": {word: word}, "request_id": word}
        bad["pieces"] = [{"text": word, "origin": "accepted"}]
        return Page(render(report, policy, [bad]))

    tame, hostile = rendered("tame " * 12), rendered(HOSTILE)
    assert [e[0] for e in hostile.elements] == [e[0] for e in tame.elements]
    assert [sorted(e[1]) for e in hostile.elements] == [sorted(e[1]) for e in tame.elements]
    shown = re.sub("[\x00\u202e\ud800]", "\ufffd", HOSTILE)
    assert hostile.all("title")[0][1] == f"Speculation report: {shown}"
    assert hostile.all("pre")[0][1] == shown * 2
    assert any(shown in text for _, text in hostile.all("th"))


def test_it_can_be_written_whatever_it_holds(tmp_path):
    report = replace(made_up(["code"]), model=HOSTILE)
    write_html(report, policy_of(report), [sample(1, HOSTILE)], tmp_path / "report.html")
    assert b"\x00" not in (tmp_path / "report.html").read_bytes()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    report = made_up(["code"])
    with pytest.raises(ValueError, match="there is no folder"):
        write_html(report, policy_of(report), [], tmp_path / "nowhere" / "report.html")


def test_screen_readers_and_keyboards_find_their_way(page):
    assert page.all("html")[0][0]["lang"] == "en"
    assert page.all("title")[0][1] == "Speculation report: a/model"
    assert any(a.get("name") == "viewport" for a, _ in page.all("meta"))
    assert [len(page.all(tag)) for tag in ("h1", "main", "header", "footer", "nav")] == [1] * 5
    ids = [a["id"] for _, a, _ in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids
    assert page.all("a")[0][0] == {"class": "skip", "href": "#main"}
    assert all(a["href"][1:] in ids for a, _ in page.all("a"))
    assert all("aria-labelledby" in a for a, _ in page.all("section"))
    # What scrolls can be reached by keyboard, and says what it is; nothing changes the tab order.
    scrolling = [*page.all("div", "scroll"), *page.all("pre")]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a, _ in scrolling)
    assert {a.get("tabindex", "0") for _, a, _ in page.elements} == {"0", "-1"}


def test_each_chart_says_what_it_shows_and_has_its_numbers(page):
    charts = page.all("svg")
    assert len(charts) == 13
    assert all(a["role"] == "img" for a, _ in charts)
    inside = [(tag, around) for tag, _, around in page.elements]
    for tag in ("title", "desc"):
        assert sum(t == tag and around[-1] == "svg" for t, around in inside) == len(charts)
    assert all(text.strip() for _, text in page.all("desc"))
    in_figures = [around for tag, around in inside if tag == "table" and "figure" in around]
    assert len(in_figures) == len(charts)
    assert all("details" in around for around in in_figures)


def test_tables_have_captions_and_heads(page):
    tables = page.all("table")
    captions = [around for tag, _, around in page.elements if tag == "caption"]
    assert len(captions) == len(tables)
    assert all(around[-1] == "table" for around in captions)
    assert all(a["scope"] in ("col", "row") for a, _ in page.all("th"))
    assert sum(a["scope"] == "row" for a, _ in page.all("th")) == sum(
        tag == "tr" and "tbody" in around for tag, _, around in page.elements
    )


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))  # WCAG 2


def test_colours_can_be_told_from_the_ground_in_both_schemes(text):
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in schemes(text))
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ground in ("paper", "card"):
            for name in colours.keys() - {"paper", "card", "rule"}:
                pair = sorted(luminance(colours[n]) + 0.05 for n in (ground, name))
                assert pair[1] / pair[0] >= 4.5, (name, ground)


def schemes(text: str) -> list[str]:
    style = text[text.index("<style>") : text.index("</style>")]
    return re.findall(r":root \{([^}]*)\}", style)


def test_origins_differ_by_more_than_colour(text):
    lines = re.findall(r"\.o-\w+ \{ color: [^;]+; text-decoration: underline (\w+)", text)
    assert len(lines) == len(set(lines)) == 4  # the fifth, plain, has none


def test_an_empty_report_is_readable():
    page = Page(render(empty(), Policy(), []))
    assert not page.all("svg")
    assert "no request was finished" in page.all("main")[0][1]
    assert "There are no rules" in page.all("main")[0][1]
    assert not re.search(r"\b(nan|inf|None)\b", page.all("main")[0][1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"pieces": None}, "is no sample"),
        ({"labels": 3}, "is no sample"),
        ({"prompt": 3}, "no sam"),
    ],
)
def test_a_sample_that_is_none_is_said_in_a_sentence(damage, words):
    with pytest.raises(ValueError, match=words):
        render(empty(), Policy(), [sample(1, "code") | damage])
    lacking = {name: value for name, value in sample(1, "code").items() if name != "pieces"}
    with pytest.raises(ValueError, match="it has no 'pieces'"):
        render(empty(), Policy(), [lacking])


def test_figures_that_are_no_numbers_are_dashes():
    report = made_up(["code"])
    bad = replace(report.total, mean_accepted=Estimate(float("nan"), float("inf"), 1.0, 300))
    text = render(replace(report, total=bad, buckets=(bad,)), policy_of(report), [])
    assert not re.search(r"\b(nan|inf)\b", text.split("<body>")[1])


def test_one_bucket_of_one_request_is_readable():
    report = made_up(["code"], [(0, None)], requests=1)
    page = Page(render(report, policy_of(report), [sample(1, "code")]))
    assert len(page.all("svg")) == 10  # no histograms of single routes
    assert "1 of 1 buckets have under 500 requests" in page.all("main")[0][1]


@pytest.mark.parametrize(("requests", "sure"), [(5, False), (6, True)])
def test_an_interval_is_told_and_drawn_of_six_requests_or_more(requests, sure):
    report = made_up(["code"], [(0, None)], requests=requests)
    page = Page(render(report, policy_of(report), []))
    assert (len(page.all("path", "thick")) > 0) is sure
    assert ("(too few)" in page.all("main")[0][1]) is not sure


def test_a_huge_report_is_cut_and_says_so():
    report = made_up([f"task {i}" for i in range(251)])
    samples = [sample(i, f"task {i}", times=2000) for i in range(200)]
    text = render(report, policy_of(report), samples)
    assert len(text.encode()) < 3e6
    main = re.sub(r"<[^>]*>", "", text)
    assert "The 16 of 502 buckets with most requests" in main
    assert "2 of 502 buckets are left out" in main
    assert "2 of 502 rules are left out" in main
    assert "24 of 200 recorded samples are shown" in main
    assert "Left out: the text&#39;s last" in main
    assert text.count("<pre") == 24


def test_the_largest_buckets_are_drawn_in_their_order():
    report = made_up([f"task {i}" for i in range(20)], [(0, None)])
    buckets = tuple(
        replace(b, num_requests=1 if i in (0, 7, 8, 19) else 100 + 7 * i % 20)
        for i, b in enumerate(report.buckets)
    )
    page = Page(render(replace(report, buckets=buckets), Policy(), []))
    drawn = [text for _, text in page.all("text") if text.startswith("task ")]
    assert drawn[:16] == [f"task {i}" for i in range(20) if i not in (0, 7, 8, 19)]


def test_rules_stand_beside_what_was_measured(page):
    body = [text.split("\n")[0] for _, text in page.all("tr")]
    assert any(
        row.startswith("code, prompt 0-127off") and "300 (few)" in row and "costs them time" in row
        for row in body
    )
    assert any("on, at most 4 a round" in row for row in body)
    assert any("on, automatic" in row for row in body)
    assert "Drafting stays on for 2 of 4 kinds" in " ".join(page.all("main")[0][1].split())


def test_a_rule_nobody_measured_is_shown():
    policy = Policy((Rule("new", (0, None), 0, "by hand"),), "category")
    rows = [text for _, text in Page(render(made_up(["code"]), policy, [])).all("tr")]
    assert any(row.startswith("newoffby hand0 (few)") for row in rows)


def test_other_tokens_with_drafting_are_said_aloud():
    report = made_up(["code"])
    pair = replace(report.total.paired, num_identical=report.total.paired.num_prompts - 3)
    report = replace(report, total=replace(report.total, paired=pair))
    assert "3 of 300 prompts have other tokens" in render(report, Policy(), [])


def test_samples_keep_their_text_and_show_its_origins():
    one = sample(1, "code", times=1)
    page = Page(render(made_up(["code"]), Policy(), [one]))
    whole = one["prompt"] + "".join(piece["text"] for piece in one["pieces"])
    assert page.all("pre")[0][1] == whole
    runs = [(a["class"], t) for a, t in page.all("span") if "class" in a][-6:]
    assert runs == [
        ("o-prefill", "#"),
        ("o-accepted", " return x"),
        ("o-recovered", " + 1"),
        ("o-plain", "\n"),
        ("o-accepted", " def"),
        ("o-bonus", " f"),
    ]
    assert (
        "Of its text: 62 % accepted, 19 % recovered, 10 % bonus, 5 % plain, 5 % prefill."
        in page.all("main")[0][1]
    )


def test_samples_are_of_every_task_and_of_drafting():
    plain = [sample(i, "code", arm="0") for i in range(30)]
    samples = [*plain, *(sample(i, "code") for i in range(30)), sample(99, "writing")]
    report = made_up(["code", "writing"])
    names = [t for _, t in Page(render(report, Policy(), samples)).all("summary")]
    chosen = [name for name in names if "request" in name]
    assert "category writing, request 99/auto" in chosen
    assert not any(name.endswith("/0") for name in chosen)
    assert "/0" in render(report, Policy(), plain)  # better than none


def marks(chart: Chart, style: str) -> list[tuple[float, float]]:
    """Where the outlines of a style begin."""
    begins = (
        re.match(r"M(-?[\d.]+) (-?[\d.]+)", o.path) for o in chart.outlines if o.style == style
    )
    return [(float(b[1]), float(b[2])) for b in begins if b]


def written(chart: Chart) -> dict[str, float]:
    """Where along x each text of a chart is."""
    return {t.text: t.x for t in chart.texts}


def test_marks_stand_where_the_axis_says():
    unknown = float("nan")
    rows = [Row("a", ((0.5, 1.5, "thick"),), ((1.0, 0),)), Row("b", (), ((-2.0, 0), (unknown, 1)))]
    chart = row_chart("", rows, Axis.over("x", [-2.0, 1.5]), legend=("one",), line_at=0.0)
    ticks = written(chart)
    (a, _), (b, _), _ = marks(chart, "mark s0")
    assert a == pytest.approx(ticks["1"], abs=0.1)
    assert b == pytest.approx(ticks["-2"], abs=0.1)
    assert marks(chart, "strong")[0][0] == pytest.approx(ticks["0"], abs=0.1)
    assert marks(chart, "thick")[0][0] == pytest.approx((ticks["0"] + ticks["1"]) / 2, abs=0.1)
    assert not marks(chart, "mark s1")


@pytest.mark.parametrize(("count", "said"), [(6, []), (7, ["and 1 more"]), (9, ["and 3 more"])])
def test_a_chart_says_what_it_does_not_draw(count, said):
    """There are six kinds of marks."""
    lines = [Series(f"line {i}", ((0.0, 0.1 * i), (1.0, 0.5))) for i in range(count)]
    chart = line_chart("", lines, Axis.over("x", [1.0]), Axis.over("y", [1.0]))
    names = [t.text for t in chart.texts]
    assert [n for n in names if n.startswith("line")] == [f"line {i}" for i in range(6)]
    assert [n.partition(",")[0] for n in names if n.startswith("and ")] == said
    assert max(t.y for t in chart.texts) < chart.height


def test_lines_and_bars_rise_with_their_values():
    axis = Axis.over("share", [1.0], percent=True)
    points = ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0))
    chart = line_chart("", [Series("one", points)], Axis.over("x", [2.0], whole=True), axis)
    heights = [y for _, y in marks(chart, "mark s0")][:3]
    levels = {t.text: t.y - 4 for t in chart.texts}
    assert levels["100 %"] < levels["0 %"]  # y grows downwards
    assert heights == pytest.approx(
        [levels["0 %"], (levels["0 %"] + levels["100 %"]) / 2, levels["100 %"]]
    )
    bars = bar_chart("", [("0", 0.2), ("1", 1.0)], "x", axis)
    tops = [float(o.path.split("V")[1].split("H")[0]) for o in bars.outlines if o.style == "bar"]
    assert tops == pytest.approx([levels["20 %"], levels["100 %"]])


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([float("nan"), None, 3.0], ["0", "1", "2", "3"]),
        ([-0.4, 0.9], ["-0.5", "0.0", "0.5", "1.0"]),
        ([-3.0, -1.0], ["-3", "-2", "-1", "0", "1"]),
        ([0.0003], ["0.0000", "0.0001", "0.0002", "0.0003"]),
        ([12345.0], ["0", "5000", "10000", "15000"]),
    ],
)
def test_ticks_are_round(values, ticks):
    assert [text for _, text in Axis.over("x", values).ticks] == ticks


def test_all_of_a_chart_is_inside_of_it():
    report = made_up(["task " * 20, "日本語" * 20])
    charts = [acceptance(report), inequality(report), ratios(report), positions(report)]
    charts += [*latencies(report), *histograms(report)]
    for chart in (figure.chart for figure in charts):
        assert all(0 <= t.x <= WIDTH and 0 < t.y <= chart.height for t in chart.texts)
        numbers = (re.match(r"M(-?[\d.]+) (-?[\d.]+)", o.path).groups() for o in chart.outlines)
        for x, y in numbers:
            assert 0 <= float(x) <= WIDTH
            assert 0 <= float(y) <= chart.height


@pytest.mark.parametrize(
    ("draw", "values"),
    [
        (acceptance, lambda b: (b.mean_accepted.value, b.accepted_per_request.at(10))),
        (inequality, lambda b: (b.inequality.margin, b.inequality.margin_without_bonus)),
        (
            ratios,
            lambda b: (b.paired.end_to_end.value, b.paired.p90.value, b.paired.worst_decile.value),
        ),
    ],
)
def test_rows_show_what_the_report_says(draw, values):
    report = made_up(["code"])
    chart = draw(report).chart
    ticks = [(float(t.text), t.x) for t in chart.texts if re.fullmatch(r"-?[\d.]+", t.text)]
    (low, start), (high, end) = ticks[0], ticks[-1]
    for i in range(len(values(report.total))):
        for (x, _), bucket in zip(marks(chart, f"mark s{i}"), report.buckets, strict=False):
            value = low + (high - low) * (x - start) / (end - start)
            assert value == pytest.approx(values(bucket)[i], abs=0.01 * (high - low))


def test_long_samples_are_cut():
    long = {**sample(1, "code"), "prompt": "p" * 3000}
    long["pieces"] = [{"text": "x" * 10000, "origin": "plain"}]
    page = Page(render(made_up(["code"]), Policy(), [long]))
    assert page.all("pre")[0][1] == "p" * 2000 + "x" * 6000
    main = page.all("main")[0][1]
    assert "Left out: the prompt's first 1000 characters and the text's last 4000" in main


def test_long_names_keep_both_ends():
    assert shorten("x" * 50) == "x" * 50
    assert len(shorten("x" * 51)) <= 50
    assert shorten("task " * 20 + "prompt 0-127").startswith("task task")
    assert shorten("task " * 20 + "prompt 0-127").endswith("…sk prompt 0-127"[-12:])
    assert len(shorten("語" * 40)) <= 25


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (float("nan"), "\N{EN DASH}"),
        (0.0, "0.00 µs"),
        (0.000012, "12.0 µs"),
        (0.0005, "500 µs"),
        (0.00123, "1.23 ms"),
        (0.9996, "1000 ms"),
        (12.34, "12.3 s"),
    ],
)
def test_times_are_written_in_their_unit(value, text):
    assert seconds(value) == text


def drifting() -> Drift:
    """A task that falls from three accepted tokens to one, and one that does not."""
    rng = np.random.default_rng(1)
    rounds = [
        {
            "labels": {"category": task},
            "request_id": f"{task} {i}",
            "num_draft_tokens": 4,
            "num_accepted_tokens": int(rng.binomial(4, 0.3 if task == "code" and i > 60 else 0.75)),
            "finish_reason": "length" if last else None,
        }
        for i in range(90)
        for task in ("writing", "code")
        for last in (False, True)
    ]
    return find_drift(rounds, label="category", num_reference_requests=40)


def test_drift_is_shown_where_it_was_looked_for(page):
    assert "drift" not in page.all("nav")[0][1].lower()
    drift = drifting()
    found = Page(render(replace(made_up(["code"]), drift=drift), Policy(), []))
    assert drift.alarms
    assert str(drift.alarms[0]) in found.all("main")[0][1]
    titles = [text for _, text in found.all("figcaption") if "Drift" in text]
    assert titles == ["Drift, code", "Drift, writing"]  # the nearest to an alarm first
    assert ("#drift", "Drift") in [(a["href"], text) for a, text in found.all("a")]


def test_the_table_of_drift_tells_what_drafts_are_held_against():
    """Not the mean of drafts: requests are weighed."""
    state = drifting().states["code"]
    baseline = replace(state.baseline, mean=2.25, centre=3.5)
    table = drift_table(Drift({"code": replace(state, baseline=baseline)}, (), {}))
    assert table.rows[0][table.columns.index("usual")] == "3.50"


def test_drift_of_few_requests_says_that_nothing_is_known():
    drift = find_drift([], label="category")
    found = Page(render(replace(made_up(["code"]), drift=drift), Policy(), []))
    assert "No bucket had enough requests" in found.all("main")[0][1]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
MEASURE = """<!DOCTYPE html><title>frames</title>
<iframe src=report.html width=360></iframe><iframe src=report.html width=768></iframe>
<iframe src=report.html width=1280></iframe><pre id=out></pre>
<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    for (const part of page.querySelectorAll("details")) part.open = true;
    const texts = [...page.querySelectorAll("svg text")].filter(text => {
      const inner = text.getBoundingClientRect();
      const outer = text.closest("svg").getBoundingClientRect();
      return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    });
    return [page.documentElement.scrollWidth - page.documentElement.clientWidth, texts.length,
      page.querySelectorAll("svg").length];
  });
  document.getElementById("out").textContent = "measured " + JSON.stringify(found);
};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the page in")
def test_a_browser_shows_it_at_any_width_and_complains_of_nothing(tmp_path):
    report = replace(made_up(["code " * 20, HOSTILE]), model=HOSTILE, drift=drifting())
    samples = [{**sample(1, HOSTILE), "prompt": "x" * 500 + HOSTILE}]
    write_html(report, policy_of(report), samples, tmp_path / "report.html")
    (tmp_path / "frames.html").write_text(MEASURE, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}/profile", (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(re.search(r"measured (\[.*\])", done.stdout)[1])
    assert measured == [[0, 0, 15]] * 3  # nothing wider than the page, no text outside its chart
    assert "CONSOLE" not in done.stderr


def test_templates_are_beside_the_code():
    import layerskip.telemetry.html as module

    folder = Path(module.__file__).parent / "templates"
    assert {f.name for f in folder.iterdir()} >= {
        "draw.html",
        "page.css",
        "page.html",
        "report.html",
    }
