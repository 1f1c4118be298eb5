"""Measuring traffic: what is recorded, what a stop leaves, and what the command says."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Result, run
from toys import MAX_POSITIONS, PLANS, make_model

from layerskip import SamplingParams, SelfSpeculativeLM, api
from layerskip.cli import main
from layerskip.controller import Controller
from layerskip.cost import CostTable, Curve
from layerskip.outputs import Round
from layerskip.policy import Policy, Rule
from layerskip.telemetry import buckets
from layerskip.telemetry import measure as measuring
from layerskip.telemetry.measure import Measurement, MeasureSettings, measure
from layerskip.telemetry.runs import JsonLines, RunsFolder, read_lines
from layerskip.telemetry.summary import summarize
from layerskip.telemetry.traffic import LeftOut, Traffic

REPO = Path(__file__).parents[1]
CURVE = Curve((1, 8), (0,), ((1.0, 1.0),))
COST = CostTable(CURVE, CURVE, CURVE, 0.0, 1, {"threads": 1})
TEXTS = ["one fish two fish", "to be or not", "a stitch 😀 in time", "as it is in rain"]
SETTINGS = MeasureSettings(arms=(0, 3), max_new_tokens=10, samples=1)
FILES = ("rounds", "requests", "samples")
REQUEST_KEYS = {
    *("request_id", "prompt_index", "arm", "labels", "prompt_tokens", "new_tokens"),
    *("max_new_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "ttft_seconds"),
    *("decode_seconds", "e2e_seconds", "finish_reason", "tokens_sha256", "metrics"),
}
RUN_KEYS = {
    *("version", "model", "arms", "label", "labels", "sampling", "seed", "max_new_tokens", "plan"),
    *("exit_layer", "exact", "lookup", "policy", "prompts", "cost", "versions", "machine"),
    *("threads", "chat_template"),
}


@pytest.fixture(scope="module")
def lm(toy: Callable[..., Any], tokenizer: Any) -> SelfSpeculativeLM:
    made = SelfSpeculativeLM(toy(), tokenizer, PLANS["exit"])
    made._controller = Controller(COST, follows_clock=False)
    return made


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    lines = [{"prompt": t, "task": "rhyme" if i % 2 else "prose"} for i, t in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Traffic.read(path, labels=["task"])


@pytest.fixture(scope="module")
def full(lm: SelfSpeculativeLM, traffic: Traffic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole measurement of the traffic."""
    out = tmp_path_factory.mktemp("runs") / "full"
    measure(lm, traffic, out, settings=SETTINGS, model="toy")
    return out


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_lines(folder / f"{name}.jsonl"))


def timeless(value: Any) -> Any:
    """Without what a clock measured."""
    if isinstance(value, list):
        return [timeless(v) for v in value]
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not k.endswith("_seconds")}
    return value


def contents(folder: Path) -> Any:
    return timeless({name: lines(folder, name) for name in FILES})


def test_every_prompt_is_decoded_in_every_arm(lm, full) -> None:
    found = {r["request_id"]: r for r in lines(full, "requests")}
    assert sorted(found) == sorted(f"{i}/{arm}" for i in range(len(TEXTS)) for arm in (0, 3))
    for index, text in enumerate(TEXTS):
        for arm in (0, 3):
            request = found[f"{index}/{arm}"]
            assert set(request) == REQUEST_KEYS
            out = lm.generate(text, max_new_tokens=10, num_draft_tokens=arm)
            digest = hashlib.sha256(",".join(map(str, out.token_ids)).encode()).hexdigest()
            assert request["tokens_sha256"] == digest
            assert request["metrics"] == out.metrics
            assert request["arm"] == str(arm)
            assert request["prompt_index"] == index
            assert request["labels"] == {"task": "rhyme" if index % 2 else "prose"}
            times = request["ttft_seconds"] + request["decode_seconds"]
            assert times == pytest.approx(request["e2e_seconds"])


def test_rounds_are_those_of_the_requests(full) -> None:
    rounds = lines(full, "rounds")
    blank = Round(0, 0, (), "", 0, 0, "plain", 0.0, 0.0, 0)
    assert all(set(r) == {*blank.to_dict(), "arm", "prompt_index"} for r in rounds)
    for request in lines(full, "requests"):
        own = [r for r in rounds if r["request_id"] == request["request_id"]]
        assert [r["index"] for r in own] == list(range(request["num_rounds"] + 1))
        assert {(r["arm"], r["prompt_index"]) for r in own} == {
            (request["arm"], request["prompt_index"])
        }
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            assert sum(r[name] for r in own) == request[name]
        assert sum(r["num_emitted_tokens"] for r in own) == request["new_tokens"] == 10


def test_run_json_says_what_was_measured(full, traffic) -> None:
    run = json.loads((full / "run.json").read_text(encoding="utf-8"))
    assert set(run) == RUN_KEYS
    assert (run["model"], run["arms"], run["label"]) == ("toy", ["0", "3"], "task")
    assert (run["exit_layer"], run["plan"]["layers"]) == (2, [0, 1])
    assert CostTable.from_dict(run["cost"]) == COST
    assert run["prompts"] == {"name": "traffic.jsonl", "sha256": traffic.sha256, "count": 4}


def test_samples_are_the_text_by_origin(lm, full) -> None:
    samples = lines(full, "samples")
    assert [(s["arm"], s["labels"]["task"]) for s in samples] == [("3", "prose"), ("3", "rhyme")]
    for sample in samples:
        out = lm.generate(sample["prompt"], max_new_tokens=10, num_draft_tokens=3)
        assert "".join(p["text"] for p in sample["pieces"]) == out.text
        origins = [o for r in out.rounds for o in r.origins]
        assert {p["origin"] for p in sample["pieces"]} <= set(origins)
        assert sample["pieces"][0]["origin"] == "prefill"


def test_no_text_is_kept_where_no_samples_are_wanted(lm, traffic, tmp_path) -> None:
    measure(lm, traffic, tmp_path, settings=replace(SETTINGS, samples=0))
    assert lines(tmp_path, "samples") == []
    everything = b"".join(f.read_bytes() for f in tmp_path.iterdir())
    assert b"fish" not in everything


def test_arms_are_in_random_order_for_each_prompt() -> None:
    settings = MeasureSettings(arms=(0, 3, "auto"))
    orders = [tuple(settings.order(i)) for i in range(600)]
    assert orders == [tuple(settings.order(i)) for i in range(600)]
    assert [tuple(replace(settings, seed=1).order(i)) for i in range(600)] != orders
    assert len(set(orders)) == 6
    assert all(70 < orders.count(order) < 130 for order in set(orders))


def test_sampled_prompts_have_noise_of_their_own(lm, tmp_path) -> None:
    same = Traffic.of(["to be or not"] * 3)
    settings = replace(SETTINGS, sampling=SamplingParams(temperature=1.0), seed=5)
    found = measure(lm, same, tmp_path, settings=settings)
    digests = {r["prompt_index"]: r["tokens_sha256"] for r in lines(tmp_path, "requests")}
    assert len(set(digests.values())) == 3
    assert found.equal == 3  # the arms of a prompt share it


def stopped(full: Path, folder: Path, requests: int, rounds: int, cut: bytes) -> None:
    """What a kill leaves: some requests, rounds of one more, a line that was being written."""
    done = lines(full, "requests")[:requests]
    known = {r["request_id"] for r in done}
    every = lines(full, "rounds")
    of_done = [r for r in every if r["request_id"] in known]
    kept = {
        "requests": done,
        "rounds": of_done + every[len(of_done) : len(of_done) + rounds],
        "samples": [s for s in lines(full, "samples") if s["request_id"] in known],
    }
    shutil.copytree(full, folder)
    for name, entries in kept.items():
        content = "".join(json.dumps(e) + "\n" for e in entries).encode()
        (folder / f"{name}.jsonl").write_bytes(content + cut)


@pytest.mark.parametrize(
    ("requests", "rounds", "cut"),
    [(0, 3, b'{"req'), (1, 0, b"{"), (3, 2, b""), (7, 5, b'{"a": 1'), (8, 0, b'{"a')],
)
def test_a_stopped_run_goes_on(lm, traffic, full, tmp_path, requests, rounds, cut) -> None:
    stopped(full, tmp_path / "runs", requests, rounds, cut)
    steps: list[tuple[int, int]] = []
    measure(
        lm,
        traffic,
        tmp_path / "runs",
        settings=SETTINGS,
        model="toy",
        on_progress=lambda *step: steps.append(step),
    )
    assert contents(tmp_path / "runs") == contents(full)
    assert steps == [(i + 1, 8) for i in range(requests, 8)]
    before = lines(full, "requests")[:requests]
    assert lines(tmp_path / "runs", "requests")[:requests] == before  # not decoded again


def test_an_interruption_leaves_whole_files(lm, traffic, full, tmp_path, monkeypatch) -> None:
    generate, left = Measurement._generate, [3 + 2]  # two of them warm up

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return generate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "_generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(lm, traffic, tmp_path, settings=SETTINGS, model="toy")
    assert len(lines(tmp_path, "requests")) == 3
    measure(lm, traffic, tmp_path, settings=SETTINGS, model="toy")
    assert contents(tmp_path) == contents(full)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": (0, 2)}, r"arms \['0', '3'\], now \['0', '2'\]"),
        ({"max_new_tokens": 11}, "max new tokens 10, now 11"),
        ({"seed": 1}, "seed 0, now 1"),
        ({"sampling": SamplingParams(temperature=0.5)}, r"sampling.temperature 0.0, now 0.5"),
    ],
)
def test_other_settings_are_refused_in_one_sentence(
    lm, traffic, full, tmp_path, changes, said
) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(ValueError, match=rf"was measured with other settings \({said}\); give"):
        measure(lm, traffic, folder, settings=replace(SETTINGS, **changes), model="toy")
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_another_way_of_decoding_is_refused_in_one_sentence(
    lm, toy, traffic, full, tmp_path
) -> None:
    """What the constructor was told counts as the settings do."""
    policy = Policy((Rule("", (0, None), 2),))
    for options, said in (
        ({"lookup": False}, "lookup True, now False"),
        ({"exact": False}, "exact True, now False"),
        ({"policy": policy}, "policy None, now 1 rules, [0-9a-f]{8}"),
    ):
        other = SelfSpeculativeLM(toy(), lm.tokenizer, lm.plan, **options)
        folder = shutil.copytree(full, tmp_path / next(iter(options)))
        with pytest.raises(ValueError, match=rf"was measured with other settings \({said}\); give"):
            measure(other, traffic, folder, settings=SETTINGS, model="toy")


def test_another_chat_template_is_refused(lm, traffic, full, tmp_path, monkeypatch) -> None:
    """Of the same messages it makes other prompts: the rest of the run would be of those."""
    folder = shutil.copytree(full, tmp_path / "runs")
    for template in ("{{ messages }}", {"default": "{{ messages }}"}):  # some have several by name
        monkeypatch.setattr(lm.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=r"\(chat template \w{8}, now \w{8}\); give"):
            measure(lm, traffic, folder, settings=SETTINGS, model="toy")


def test_other_prompts_and_machines_are_refused(lm, traffic, full, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"\(prompts.sha256 .+, now .+\)"):
        measure(lm, replace(traffic, sha256="0"), full, settings=SETTINGS, model="toy")
    other = Controller(replace(COST, key={"threads": 2}))
    monkeypatch.setattr(lm, "_controller", other)
    with pytest.raises(ValueError, match=r"\(cost.threads 1, now 2\)"):
        measure(lm, traffic, full, settings=SETTINGS, model="toy")


def test_measured_costs_may_differ_between_starts(lm, traffic, full, tmp_path, monkeypatch) -> None:
    stopped(full, tmp_path / "runs", 2, 0, b"")
    monkeypatch.setattr(lm, "_controller", Controller(replace(COST, sampling=0.5)))
    measure(lm, traffic, tmp_path / "runs", settings=SETTINGS, model="toy")
    run = json.loads((tmp_path / "runs" / "run.json").read_text(encoding="utf-8"))
    assert CostTable.from_dict(run["cost"]) == COST


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ({}, r"\(cost.threads None, now 1\)"),
        ({"cost": None}, r"\(cost.threads None, now 1\)"),
        ({"cost": {}}, r"\(cost.threads None, now 1\)"),
        ({"cost": "dear"}, r"run\.json: cost must be an object or null, got 'dear'"),
    ],
)
def test_a_run_without_its_costs_is_refused_in_one_sentence(
    lm, traffic, full, tmp_path, cost, said
) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del run["cost"]
    (folder / "run.json").write_text(json.dumps(run | cost), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        measure(lm, traffic, folder, settings=SETTINGS, model="toy")


@pytest.mark.parametrize(
    ("name", "number", "field"),
    [
        ("requests", 0, "request_id"),
        ("requests", 0, "new_tokens"),
        ("requests", -1, "tokens_sha256"),
        ("rounds", -1, "request_id"),
        ("rounds", -1, "index"),
        ("samples", 0, "labels"),
    ],
)
def test_a_line_that_lacks_a_field_is_damage(
    lm, traffic, full, tmp_path, name, number, field
) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    entries = lines(folder, name)
    del entries[number][field]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / f"{name}.jsonl").write_text(text)
    with pytest.raises(ValueError, match=rf"{name}\.jsonl is damaged \(.*\); measure again into"):
        measure(lm, traffic, folder, settings=SETTINGS, model="toy")


@pytest.mark.parametrize("lost", [1, 10_000])
def test_a_folder_that_lost_the_last_request_s_rounds_is_not_complete(
    lm, traffic, full, tmp_path, lost
) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    path, last = folder / "rounds.jsonl", lines(folder, "requests")[-1]["request_id"]
    kept = path.read_text().splitlines(keepends=True)[:-lost]
    path.write_text("".join(kept))
    with pytest.raises(ValueError, match=rf"rounds\.jsonl lacks rounds of request {last}; measure"):
        measure(lm, traffic, folder, settings=SETTINGS, model="toy")
    assert path.read_text() == "".join(kept)


def test_a_request_of_an_arm_that_was_not_measured_is_damage(full, tmp_path) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    path = folder / "requests.jsonl"
    path.write_text(path.read_text().replace('"arm": "3"', '"arm": "7"', 1))
    with pytest.raises(ValueError, match=r"requests\.jsonl is damaged \(an arm '7'\)"):
        summarize(folder)


def test_a_run_without_the_name_of_its_label_has_none(lm, traffic, full, tmp_path) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del run["label"]
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    assert list(summarize(folder).tasks) == [""]


def test_a_folder_that_holds_something_else_is_left_alone(lm, traffic, tmp_path) -> None:
    (tmp_path / "run.json").write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json is no measurement of version 1"):
        measure(lm, traffic, tmp_path, settings=SETTINGS)
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]
    (tmp_path / "run.json").rename(tmp_path / "rounds.jsonl")
    with pytest.raises(ValueError, match=r"holds records but no run\.json"):
        measure(lm, traffic, tmp_path, settings=SETTINGS)


def test_two_processes_do_not_write_one_folder(lm, traffic, tmp_path) -> None:
    run = {"cost": {"key": {}}}
    with closing(RunsFolder(tmp_path, run)):
        (tmp_path / "requests.jsonl").write_bytes(b'{"half')  # what the other one is writing
        with pytest.raises(ValueError, match="by another process"):
            measure(lm, traffic, tmp_path, settings=SETTINGS)
        assert (tmp_path / "requests.jsonl").read_bytes() == b'{"half'
    RunsFolder(tmp_path, run).close()


def test_prompts_that_do_not_fit_are_reported_and_left_out(lm, tmp_path) -> None:
    room = MAX_POSITIONS - 10
    ids = [[5] * room, [5] * (room + 1), [10**6], [6, 7]]
    reasons: list[LeftOut] = []
    out = tmp_path / "runs"
    found = measure(lm, Traffic.of(ids), out, settings=SETTINGS, on_left_out=reasons.append)
    assert found.prompts == 2
    assert [r.number for r in reasons] == [2, 3]
    assert reasons[0].reason == (
        f"{room + 1} tokens; with 10 new ones at most {room} fit the model's positions"
    )
    again: list[LeftOut] = []
    measure(lm, Traffic.of(ids), out, settings=SETTINGS, on_left_out=again.append)
    assert again == []
    assert [r["request_id"][0] for r in lines(out, "requests")] == ["0", "0", "3", "3"]


def test_chats_go_through_the_template(lm, tmp_path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    path.write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    measure(lm, Traffic.read(path), tmp_path / "runs", settings=SETTINGS)
    sample = lines(tmp_path / "runs", "samples")[0]
    assert sample["prompt"] == "user: to be\nassistant: "
    assert sample["labels"] == {}


def test_a_model_without_tokenizer_takes_ids(wrap, tmp_path) -> None:
    lm = wrap()
    found = measure(lm, Traffic.of([[5, 6, 7], "text"]), tmp_path, settings=SETTINGS)
    assert found.prompts == 1
    assert lines(tmp_path, "samples") == []


def test_where_nothing_fits_the_reason_is_said_and_the_folder_is_free(lm, tmp_path) -> None:
    much = replace(SETTINGS, max_new_tokens=MAX_POSITIONS)
    with pytest.raises(ValueError, match=r"line 1: 600 new tokens leave a prompt no room"):
        measure(lm, Traffic.of(TEXTS), tmp_path, settings=much)
    assert measure(lm, Traffic.of(TEXTS), tmp_path, settings=SETTINGS).prompts == len(TEXTS)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"arms": ()}, "arms must be one or more, each once"),
        ({"arms": (0, 0)}, "arms must be one or more, each once"),
        ({"arms": (0, 99)}, "num_draft_tokens must be between 0 and 32, got 99"),
        ({"arms": [0]}, "arms must be a tuple"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"samples": -1}, "samples must be at least 0"),
        ({"seed": -1}, "seed must be"),
        ({"sampling": SamplingParams(seed=3)}, "give the seed to measure"),
        ({"sampling": None}, "sampling must be SamplingParams, got NoneType: leave it out"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        MeasureSettings(**settings)


def test_memory_does_not_grow_with_the_traffic(lm, tmp_path, monkeypatch) -> None:
    request = next(iter(Traffic.of(["to be or not"])))
    output = lm.generate("to be or not", max_new_tokens=4, num_draft_tokens=3)
    for module in (measuring, buckets):
        monkeypatch.setattr(module, "MOST_NAMES", 10)
    monkeypatch.setattr(Measurement, "_generate", lambda *_: output)
    monkeypatch.setattr(Measurement, "_encoded", lambda *_: [5, 6])
    monkeypatch.setattr(JsonLines, "sync", lambda _: None)

    def peak(count: int, folder: Path) -> int:
        # Every request has a task of its own: as bad as labels can be.
        made = (replace(request, index=i, labels={"task": str(i)}) for i in range(count))
        traffic = replace(Traffic.of(["x"]), count=count, labels=("task",), source=lambda: made)
        tracemalloc.start()
        found = measure(lm, traffic, folder, settings=SETTINGS)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.prompts == count
        assert len(found.tasks) == 11
        assert len(lines(folder, "samples")) == 10
        return most

    assert peak(150, tmp_path / "many") < peak(11, tmp_path / "few") + 10_000


def test_totals_are_sums_over_requests(full) -> None:
    found = summarize(full)
    assert (found.prompts, found.equal) == (len(TEXTS), len(TEXTS))
    assert {task: list(arms) for task, arms in found.tasks.items()} == {
        "prose": ["0", "3"],
        "rhyme": ["0", "3"],
    }
    own = [r for r in lines(full, "requests") if r["arm"] == "3" and r["labels"]["task"] == "rhyme"]
    totals = found.tasks["rhyme"]["3"]
    drafted, accepted, rounds, seconds = (
        sum(r[name] for r in own)
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_rounds", "decode_seconds")
    )
    assert totals.num_requests == len(own) == 2
    assert totals.acceptance_rate == accepted / drafted
    assert totals.mean_accepted_length == 1 + accepted / rounds
    assert totals.tokens_per_second == pytest.approx((20 - 2) / seconds)
    assert found.to_dict()["tasks"]["rhyme"]["0"]["acceptance_rate"] is None


def test_unequal_texts_are_counted(full, tmp_path) -> None:
    folder = shutil.copytree(full, tmp_path / "runs")
    requests = lines(folder, "requests")
    requests[0]["tokens_sha256"] = "0"
    text = "".join(json.dumps(r) + "\n" for r in requests[:-1])
    (folder / "requests.jsonl").write_text(text, encoding="utf-8")
    found = summarize(folder)
    assert (found.prompts, found.equal) == (len(TEXTS) - 1, len(TEXTS) - 2)


@pytest.fixture
def command(tmp_path, tokenizer, monkeypatch) -> Callable[..., Result]:
    """``layerskip measure`` of a toy in a folder, in this process."""
    folder = tmp_path / "toy"
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    PLANS["exit"].save(folder / "layerskip.json")
    monkeypatch.setattr(api, "fitting_cost", lambda *_, **__: COST)

    options = ["--out", tmp_path / "runs", "--arms", "0, 3", "--max-new-tokens", 10]
    return lambda *argv: run("measure", folder, *options, *argv)


def test_the_command_measures_and_sums_up(command, tmp_path) -> None:
    path = tmp_path / "traffic.jsonl"
    rows = [{"prompt": "to be", "kind": "[b]"}, {"prompt": [5] * 700, "kind": "[b]"}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + "broken\n", encoding="utf-8")
    options = ("--prompts", path, "--label", "kind", "--bad-lines", "skip", "--json")
    result = command(*options)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["prompts"], document["left_out"], document["bad_lines"]) == (1, 1, 1)
    assert document["tasks"]["[b]"]["3"]["requests"] == 1
    assert "line 3 skipped: not JSON" in result.err
    assert "line 2 left out: the prompt has 700 tokens" in result.err
    assert "[b]" in result.err
    assert f"1 prompts, 1 left out, text equal in all arms for 1; records in {tmp_path}/runs" in (
        result.err
    )
    assert command(*options, "--seed", 2).err.splitlines()[-1] == (
        f"layerskip: {tmp_path}/runs was measured with other settings (seed 0, now 2); "
        "give another folder"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--arms", "0,some"], "--arms must be numbers of draft tokens or 'auto', as in '0,auto'"),
        (["--arms=-1,auto"], "each of --arms must be between 0 and 32, got -1"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be finite and at least 0"),
        (["--prompts", "/none.jsonl"], "/none.jsonl cannot be read: No such file"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(
    tmp_path, capsys, monkeypatch, options, sentence
) -> None:
    monkeypatch.setattr(measuring, "measure", None)
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    argv = ["measure", "/no/model", "--prompts", str(path), "--out", str(tmp_path / "runs")]
    assert main([*argv, *options]) == 2
    assert capsys.readouterr().err.startswith(f"layerskip: {sentence}")
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_a_name_is_refused(capsys) -> None:
    """That of the shell's working directory, if a variable was empty."""
    assert main(["measure", "/no/model", "--prompts", "p.jsonl", "--out", ""]) == 2
    assert capsys.readouterr().err.startswith("layerskip: --out must name a folder, got ''")


def test_an_interrupted_command_says_how_to_go_on(command, tmp_path, monkeypatch) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "_decode", interrupted)
    result = command("--prompts", path)
    assert result.code == 130
    assert f"the same command goes on from {tmp_path}/runs" in result.out.replace("\n", "")
    monkeypatch.setattr("layerskip.commands.measuring.load", interrupted)
    again, new = command("--prompts", path), command("--prompts", path, "--out", tmp_path / "new")
    assert (again.code, new.code) == (130, 130)
    assert "goes on from" in again.out.replace("\n", "")
    assert "goes on from" not in new.out.replace("\n", "")


@pytest.mark.slow
def test_a_killed_process_leaves_what_the_next_one_goes_on_from(tmp_path) -> None:
    path = tmp_path / "traffic.jsonl"
    rows = [{"prompt": f"def f{i}(x):\n", "task": "code"} for i in range(12)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")

    def started(out: str) -> subprocess.Popen[bytes]:
        argv = ["measure", "--prompts", path, "--out", tmp_path / out, "--arms", "0,3"]
        return subprocess.Popen(
            [sys.executable, "-m", "layerskip.cli", *map(str, argv), "--max-new-tokens", "24"],
            env=os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
        )

    assert started("whole").wait(timeout=200) == 0
    requests = tmp_path / "killed" / "requests.jsonl"
    for wanted in (4, 11):
        process = started("killed")
        while not requests.exists() or len(list(read_lines(requests))) < wanted:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        ids = {r["request_id"] for r in read_lines(requests)}
        assert wanted <= len(ids) < 24
        assert ids <= {r["request_id"] for r in lines(tmp_path / "killed", "rounds")}
    assert started("killed").wait(timeout=200) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
