"""The scripts of bench/ run, at a tiny size, and write what they promise."""

import gc
import itertools
import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benching import COST, bench_modules, curve, run, toy_arguments
from toys import PLANS, make_model, random_ids

from layerskip import Round, SamplingParams, SelfSpeculativeLM, layout
from layerskip.control.clocks import Clocks
from layerskip.cost import CostTable
from layerskip.drafting import EarlyExitDrafter
from layerskip.outputs import acceptance_by_position
from layerskip.plan import PlanFile
from layerskip.prompts import Example
from layerskip.telemetry.runs import RUNS_VERSION

SCRIPTS = (
    "bad_drafters",
    "batches",
    "confidences",
    "deciding",
    "drift",
    "figures",
    "never_slower",
    "paired",
    "ragged",
    "recording_cost",
    "replayed",
    "simulation",
    "structured",
    "tasks",
    "wrapped",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with bench_modules(*SCRIPTS) as modules:
        yield modules


@pytest.fixture
def arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
) -> list[str]:
    return toy_arguments(tmp_path / "toy", tokenizer, monkeypatch)


def test_works_take_turns_by_how_far_they_are(scripts: SimpleNamespace) -> None:
    told: list[tuple[str, int]] = []

    def work(name: str, steps: Sequence[int]) -> Iterator[int]:
        for step in steps:
            told.append((name, step))
            yield step

    steps = {"slow": (1, 2, 3, 4, 5), "fast": (3, 6), "none": ()}
    works = {name: work(name, some) for name, some in steps.items()}
    laps = scripts.paired.by_turns(works, random.Random(0))
    assert {name: len(taken) for name, taken in laps.items()} == {"slow": 6, "fast": 3, "none": 1}
    assert [step for name, step in told if name == "slow"] == [1, 2, 3, 4, 5]
    second = told.index(("fast", 6))  # once the other is as far as its first step went
    assert ("slow", 3) in told[:second]
    assert ("slow", 5) not in told[:second]


def test_what_is_timed_goes_through_no_old_objects(scripts: SimpleNamespace) -> None:
    """A full collection takes as long as fifty tokens, and falls on one of those compared."""
    found: list[tuple[int, int]] = []

    def work() -> Iterator[int]:
        found.append((gc.get_freeze_count(), gc.collect()))
        yield 1

    garbage: list[Any] = []
    garbage.append(garbage)
    del garbage
    scripts.paired.by_turns({"": work()}, random.Random(0))
    ((set_aside, collected),) = found
    assert set_aside > 10_000
    assert collected == 0


def test_decoding_together_is_decoding_alone(scripts: SimpleNamespace) -> None:
    paired = scripts.paired
    lm = SelfSpeculativeLM(make_model(), None, PlanFile(PLANS["exit"], cost=COST), lookup=False)
    settings = {"max_new_tokens": 12, "sampling": paired.sampling_at(0.8)}
    ways = {"plain": (lm, 0), "k=3": (lm, 3)}
    found = paired.decode_together([5, 6, 7], ways, random.Random(0), **settings)
    for name, (_, k) in ways.items():
        alone = paired.decode(lm, [5, 6, 7], k, **settings)
        assert found[name].token_ids == alone.token_ids == found["plain"].token_ids
        assert [r.num_draft_tokens for r in found[name].rounds] == [
            r.num_draft_tokens for r in alone.rounds
        ]
        assert 0.0 < found[name].first.wall < found[name].whole.wall


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.one_in(2)
def test_never_slower_measures_every_bound(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    temperature: str,
) -> None:
    out = tmp_path / "out.json"
    # The table is made up, and passes are counted by it: what the toy's really take says nothing.
    monkeypatch.setattr(Clocks, "observe", lambda *_: None)
    for name, few in (("BATCH", 3), ("FIRSTS", 2), ("SHORT", 6)):
        monkeypatch.setattr(scripts.never_slower, name, few)
    size = ["--turns", "3", "--ramp-turns", "1", "--rows", "3", "--tokens", "14"]
    size += ["--temperature", temperature]
    run(scripts.never_slower, [*arguments, *size, "--out", str(out)], monkeypatch)
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"]
    assert set(cases) == set(scripts.never_slower.BOUNDS)
    for name, case in cases.items():
        assert case["bound"] == scripts.never_slower.BOUNDS[name]
        for clock in ("wall", "cpu"):
            assert case[f"{clock}_ci95"][0] <= case[clock] <= case[f"{clock}_ci95"][1]
            assert case[f"{clock}_within"] == (case[clock] <= case["bound"])
    for name in (
        "adversarial",
        "adversarial, cold",
        "adversarial, look-ups",
    ):  # by passes, so no clock can fail it
        assert 0.0 <= cases[name]["counted"] <= cases[name]["bound"]
    batch = cases["adversarial, batch"]  # what is looked up there may be right
    assert batch["counted"] <= batch["bound"]
    assert cases["bimodal at 0.95"]["counted"] < cases["bimodal at 0.05"]["counted"]
    uncounted = {name for name, case in cases.items() if case["counted"] is None}
    assert uncounted == {"switching", "short to the first token"}


def test_the_rows_of_a_step_are_counted_as_one_pass(scripts: SimpleNamespace) -> None:
    plain, two, one = record(0, 0), record(2, 1), record(1, 1)
    looked_up = replace(two, num_draft_passes=0)
    cost = replace(COST, draft_start=0.01, draft_sequence=0.02, verify_sequence=0.03, row_quantum=8)
    count, context = scripts.never_slower.counted_step, scripts.never_slower.CONTEXT
    assert count([], cost) == count([replace(plain, index=0)], cost) == 0.0
    assert count([plain] * 3, cost) == cost.verify_pass(3, context, sequences=3)
    wanted = cost.draft_start + cost.verify_pass(8, context, sequences=3)
    wanted += cost.draft_pass(2, context, sequences=2, late=True)
    wanted += cost.draft_pass(1, context, late=True)
    assert count([two, one, looked_up], cost) == pytest.approx(wanted)


def test_structured_counts_schemas_and_compares_speed(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out, schemas = tmp_path / "out.json", tmp_path / "schemas.jsonl"
    known = [{"enum": ["one", "two"]}, {"uniqueItems": True}, {"type": "string", "format": "uri"}]
    known += [{"const": "three"}]
    rows = [json.dumps({"id": f"s{i}", "schema": schema}) for i, schema in enumerate(known)]
    schemas.write_text("\n".join(rows), encoding="utf-8")
    size = ["--tokens", "12", "--timed", "2", "--temperatures", "0.8", "--out", str(out)]
    run(scripts.structured, [*arguments[:2], "--schemas", str(schemas), *size], monkeypatch)
    (found,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert (found["tried"], found["accepted"], found["refused"]) == (4, 3, {"'uniqueItems'": 1})
    assert found["valid"] == found["complete"] >= 1
    assert (found["token_equal"], found["timed"]) == (3, 2)
    modes = found["modes"]
    assert set(modes) == {*scripts.structured.MODES, scripts.structured.THEIRS}
    assert modes["plain"]["to plain"]["cpu"] == 1.0
    assert 0.0 < found["overhead"]["automatic"]["share_of_time"] < 1.0


@pytest.mark.parametrize(
    ("schemas", "told"),
    [
        ([{"uniqueItems": True}] * 2, "none of 2 schemas is accepted ('uniqueItems'); give other"),
        ([], "none of 0 schemas is accepted (there are none); give other"),
    ],
)
def test_structured_says_that_no_schema_is_accepted(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    schemas: list[Any],
    told: str,
) -> None:
    out, file = tmp_path / "out.json", tmp_path / "schemas.jsonl"
    rows = [json.dumps({"id": f"s{i}", "schema": schema}) for i, schema in enumerate(schemas)]
    file.write_text("\n".join(rows), encoding="utf-8")
    given = [*arguments[:2], "--schemas", str(file), "--out", str(out)]
    with pytest.raises(SystemExit, match=re.escape(told)):
        run(scripts.structured, given, monkeypatch)
    assert not out.exists()


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_bad_drafter_is_right_as_often_as_told(scripts: SimpleNamespace, accuracy: float) -> None:
    lm, prompt = SelfSpeculativeLM(make_model(), None, PLANS["exit"], lookup=False), random_ids(9)
    plain = lm.generate(prompt, max_new_tokens=17, num_draft_tokens=0)
    drafter = scripts.bad_drafters.install(lm, scripts.bad_drafters.Corrupted(lm, accuracy))
    drafter.text = (*prompt, *plain.token_ids)
    out = lm.generate(prompt, max_new_tokens=17, num_draft_tokens=3)
    assert out.token_ids == plain.token_ids
    assert out.stats.acceptance_rate == accuracy
    assert all(r.num_draft_passes == r.num_draft_tokens for r in out.rounds)
    assert out.rounds[1].num_draft_passes == 3
    if drafter.may_look_back:  # nor would it have been right
        states = torch.randn(20, make_model().config.hidden_size)
        with torch.inference_mode():
            own = EarlyExitDrafter(lm.stack, lm.plan).looked_back(states).argmax(-1)
            assert not (drafter.looked_back(states).argmax(-1) == own).any()
    assert drafter.may_look_back is (accuracy == 0.0)


def record(drafted: int, accepted: int, *, ends: bool = False) -> Round:
    return Round(
        row=0,
        index=1,
        token_ids=(1,) * (accepted + 1),
        text="",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        origin="plain",
        draft_seconds=0.0,
        verify_seconds=0.0,
        positions=drafted + 1,
        finish_reason="length" if ends else None,
        num_draft_passes=drafted,
    )


def test_a_median_table_is_the_median_in_every_price(scripts: SimpleNamespace) -> None:
    single = {name for name, value in vars(COST).items() if value is None or value == 0.0}
    single -= {"pass_rows", "slot_block"}
    assert {"sampling", "greedy_judging", "draft_sequence", "draft_start"} <= single
    tables = [
        replace(COST, verify=curve(x, x, x), **dict.fromkeys(single, x)) for x in (0.9, 0.1, 0.2)
    ]
    assert scripts.simulation.median_table(tables) == tables[2]


def test_a_greedy_batch_is_simulated_by_the_greedy_prices(
    scripts: SimpleNamespace,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    simulation, asked = scripts.simulation, []
    dear = {"sampling": 0.03, "judging": 0.03}
    table = replace(COST, **dear, greedy_sampling=0.01, greedy_judging=0.02)

    def simulate(table: CostTable, *given: Any, **settings: Any) -> Any:
        asked.append(table)
        return right(table, *given, **settings)

    right = simulation.simulate
    monkeypatch.setattr(simulation, "simulate", simulate)
    monkeypatch.setattr(simulation, "cost_now", lambda *_: table)
    runs, out = tmp_path / "runs", tmp_path / "out.json"
    few = ("--turns", "--requests", "--each", "--num-prompts")
    size = [*itertools.chain(*((name, "2") for name in few)), "--tables", "1", "--new-tokens", "6"]
    cases = ["--concurrency", "1", "--policies", "off,fixed:2"]
    files = ["--keep-runs", str(runs), "--out", str(out)]
    run(simulation, [*arguments, *size, *cases, *files], monkeypatch)
    greedy = table.of(greedy=True)
    assert asked == [greedy] == [simulation.replay(runs, table).table]
    assert greedy.sampling == 0.01
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    assert [cell["policy"] for cell in cells] == ["fixed:2", "off"]
    kept = (runs / "requests.jsonl").read_bytes()
    with pytest.raises(SystemExit):  # the same requests again, under the same ids
        run(simulation, [*arguments, *size, *cases, *files], monkeypatch)
    assert "has runs already; name another folder" in capsys.readouterr().err
    assert (runs / "requests.jsonl").read_bytes() == kept


def test_acceptance_by_position_counts_what_was_judged() -> None:
    rounds = [record(3, 3), record(3, 1), record(2, 2), record(0, 0), record(3, 0, ends=True)]
    found = acceptance_by_position(rounds)
    assert found == pytest.approx([3 / 3, 2 / 3, 1 / 1])


def test_prediction_is_the_formula_over_the_table(scripts: SimpleNamespace) -> None:
    rounds = [record(3, 3), record(7, 1), record(0, 0)]
    stats = SimpleNamespace(mean_accepted_length=7 / 3)
    found = scripts.figures.prediction(rounds, stats, COST, 0)
    c, v = 0.2 / 0.5, sum(COST.verify_pass(n, 0) for n in (4, 8, 1)) / 3 / 0.5
    assert (found["c"], found["v"], found["beta"]) == pytest.approx((c, v, v - 1.0))
    assert found["draft_passes_per_round"] == pytest.approx(10 / 3)
    assert found["predicted_speedup"] == pytest.approx(7 / 3 / (10 / 3 * c + v))
    dearer, dearest = (replace(COST, draft_layers=curve(x, x, x)) for x in (0.2, 9.0))
    typical = scripts.figures.typical_prediction(rounds, stats, (dearest, COST, dearer), 0)
    assert typical == scripts.figures.prediction(rounds, stats, dearer, 0)


def test_prediction_runs_no_draft_pass_for_what_is_looked_up_behind(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    monkeypatch.setattr(
        CostTable, "drafting", lambda self, passes, each, context: widths.append(each) or 1.0
    )
    behind = replace(record(7, 1), num_draft_passes=2, num_lookup_tokens=4, positions=11)
    stats = SimpleNamespace(mean_accepted_length=2.0)
    scripts.figures.prediction([behind], stats, COST, 0)
    assert widths == [3]


def test_copying_asks_for_the_same_function_again(scripts: SimpleNamespace) -> None:
    body = "        a = x\n        b = a\n        return b\n"
    example = Example("import os\n\nclass A:\n    def f(self, x):\n", body)
    (asked,) = scripts.tasks.copying([example, Example("def g():\n", "    pass\n")])
    assert asked.prompt == f"    def f(self, x):\n{body.rstrip()}\n\n\n    def f(self, x):\n"


def test_prompts_are_taken_from_all_over_a_file(scripts: SimpleNamespace) -> None:
    prompts = [[i] for i in range(11)]
    found = scripts.tasks.spread(prompts, 3)
    assert found == [[i] for i in (0, 3, 7, 1, 4, 8, 2, 5, 9, 6, 10)]
    assert scripts.tasks.spread(prompts, 11) == scripts.tasks.spread(prompts, 99) == prompts
    assert scripts.tasks.spread([], 3) == []
    assert scripts.tasks.spread([1, 2, 3], 0) == [1, 2, 3]  # of which nobody takes one
    most = scripts.tasks.spread(range(54), 30)
    assert max(most[:30]) == 52  # most of a file is not its beginning
    assert sorted(most) == list(range(54))


def recorded_traffic(folder: Path, told: Sequence[float]) -> Path:
    """A runs folder of 24 requests of 12 drafts, some better than others."""
    rng, requests, rounds = random.Random(0), [], []
    for i in range(24):
        requests.append({"request_id": f"{i}"})
        share = 0.6 + 0.3 * rng.random()
        for _ in range(12):
            accepted = next((n for n in range(4) if rng.random() > share), 4)
            line = {"request_id": f"{i}", "arm": "auto", "labels": {"kind": "code"}}
            line |= {"num_draft_tokens": 4, "num_accepted_tokens": accepted, "mode": "early_exit"}
            rounds.append(line | {"confidences": list(told)})
    folder.mkdir()
    for name, lines in (("requests", requests), ("rounds", rounds)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    content = {"version": RUNS_VERSION, "sampling": {"temperature": 0.8}}
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_drift_is_judged_with_and_without_confidences(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [recorded_traffic(tmp_path / n, told) for n, told in (("a", [0.7] * 4), ("b", ()))]
    out = tmp_path / "drift.json"
    size = ["--monitors", "3", "--drafts", "3000", "--label", "kind", "--out", str(out)]
    run(scripts.drift, [*map(str, folders), *size], monkeypatch)
    told, all_told, untold, _ = json.loads(out.read_text(encoding="utf-8"))["buckets"]
    assert (all_told["bucket"], told["bucket"], told["temperature"]) == ("code", "", 0.8)
    assert (told["requests"], told["drafts_per_request"]) == (24, 12)
    assert untold["with_confidences"] is untold["correlation_of_surprise"] is None
    assert untold["accepted_alone"] == told["accepted_alone"]
    for found in (told["accepted_alone"], told["with_confidences"]):
        assert 10 < found["median_delay"] < 1000
        assert found["drafts_watched"] == 3 * 83 * 12
        share = sum(found["false_alarms"].values()) / found["drafts_watched"]
        assert found["false_alarms_per_100000"] == pytest.approx(1e5 * share)


def test_tokens_are_lost_as_often_as_takes_the_mean_where_it_is_wanted(
    scripts: SimpleNamespace,
) -> None:
    drift, rng, accepted = scripts.drift, random.Random(1), [0, 1, 2, 4, 4, 4, 7] * 2000
    chance = drift.loss(accepted, 0.9)
    kept = [drift.thinned(a, chance, rng) for a in accepted]
    lost = (sum(accepted) - sum(kept)) / len(accepted)
    assert lost == pytest.approx(0.9, abs=0.05)
    assert all(k <= a for k, a in zip(kept, accepted, strict=True))


def test_recording_cost_tells_every_sink_by_number_of_drafts(
    scripts: SimpleNamespace,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "recording.json"
    size = ["--limit", "1", "--turns", "1", "--tokens", "6", "--context", "8", "--out", str(out)]
    run(scripts.recording_cost, [*arguments[:2], *size], monkeypatch)
    drafts = json.loads(out.read_text(encoding="utf-8"))["num_draft_tokens"]
    assert set(drafts) == {"0", "5", "auto"}
    for found in drafts.values():
        for name, share in found["share_of_a_round"].items():
            assert share == found["seconds_per_call"][name] / found["seconds_per_round"]
            assert 0.0 < share < 1.0
        assert set(found["with_over_without"]) == {
            "nothing",
            "memory",
            "jsonl",
            "prometheus",
            "drift",
        }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_drafts_decode_as_the_decoder_does(scripts, toy, temperature):
    """Rounds of a fixed number on paper are those of the decoder, whatever passes take."""
    replayed, sampling = scripts.replayed, scripts.paired.sampling_at(temperature)
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], num_draft_tokens=3, lookup=False)
    text = replayed.record(lm, random_ids(9, seed=1), temperature, 20)
    assert [len(confidences) for _, confidences in text.drafts] == [replayed.DEPTH] * 19
    out = lm.generate(random_ids(9, seed=1), max_new_tokens=20, sampling=sampling)
    assert 0 < out.stats.num_accepted_tokens < out.stats.num_draft_tokens
    cost = replayed.truth(0.165)
    passes = [
        r.num_draft_tokens * cost.draft_pass(1, 0) + cost.verify_pass(r.num_draft_tokens + 1, 0)
        for r in out.rounds[1:]
    ]
    assert replayed.Decoder(cost, fixed=3).run([text], 1) == pytest.approx(sum(passes))


def test_replayed_drafts_are_judged_under_every_table(
    scripts, arguments, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(scripts.replayed, "STREAMS", 3)
    file, out = tmp_path / "drafts.jsonl", tmp_path / "replayed.json"
    size = ["--limit", "2", "--tokens", "12", "--drafts", str(file), "--out", str(out)]
    for _ in range(2):  # the second time the file is there
        run(scripts.replayed, [*arguments, *size], monkeypatch)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4
    first, second = capsys.readouterr().out.split("automatic over the best fixed")[1:]
    assert first.split()[-1] == second.split()[-1]
    document = json.loads(out.read_text(encoding="utf-8"))["temperatures"]
    assert [found["texts"] for found in document.values()] == [2, 2]
    for found in document.values():
        assert found["best"] in scripts.replayed.FIXED
        assert found["speedup"] > 0.3
        assert len(found["automatic_to_best_fixed"]) == len(scripts.replayed.WRONG)
        short = found["short_streams"]
        assert 0.0 < short["worst"] <= short["mean"]
        assert min(found["automatic_to_best_fixed"].values()) > 0.6  # of two texts of 12 tokens
        assert found["calibration_error"] > 0.0 < found["calibration_error_by_chance"]


def test_calibration_errors_are_told_by_number_of_prompts(
    scripts, arguments, monkeypatch, tmp_path
):
    """And a few prompts are no record."""
    record = tmp_path / "confidences.json"
    monkeypatch.setattr(scripts.confidences, "dated", lambda _: record)
    monkeypatch.setattr(scripts.confidences, "TASKS", ("code",))
    monkeypatch.setattr(scripts.confidences, "STEPS", (1, 8))
    size = ["--limit", "3", "--tokens", "24", "--dtype", "float32"]
    run(scripts.confidences, [f"--prompts=code={arguments[3]}", *size], monkeypatch)
    assert not record.exists()
    part = tmp_path / "confidences-part.json"
    texts = json.loads(part.read_text(encoding="utf-8"))["texts"]
    assert list(texts) == ["code, 0", "code, 0.8"]
    for found in texts.values():
        assert found["prompts"] == 3
        assert list(found["by_prompts"]) == ["1", "3"]
        last = found["by_prompts"]["3"]
        assert 0.0 < last["error"] < 1.0 > last["by_chance"] > 0.0


@pytest.mark.parametrize(
    ("given", "whole"),
    [([], True), (["--limit", "200"], True), (["--limit", "3"], False), (["--tokens", "8"], False)],
)
def test_only_calibration_errors_of_many_prompts_are_a_record(
    scripts, monkeypatch, tmp_path, given, whole
):
    record, found = tmp_path / "confidences.json", {"by_prompts": {}}
    monkeypatch.setattr(scripts.confidences, "dated", lambda _: record)
    monkeypatch.setattr(scripts.confidences, "prompts_of", lambda *_: [[1]])
    monkeypatch.setattr(scripts.confidences, "errors_of", lambda *_: found)
    run(scripts.confidences, given, monkeypatch)
    assert record.exists() == whole != (tmp_path / "confidences-part.json").exists()


def test_recorded_drafts_are_written_in_one_move(scripts, arguments, tmp_path):
    """A file that is there is read and not made again: half a one would count as all."""
    file = tmp_path / "drafts.jsonl"
    file.write_text("older", encoding="utf-8")
    lm = SelfSpeculativeLM.from_pretrained(arguments[1], num_draft_tokens=10, lookup=False)
    size = SimpleNamespace(prompts=arguments[3], limit=1, longest=160, tokens=4, drafts=file)
    with file.open(encoding="utf-8") as before:
        scripts.replayed.record_all(lm, size)
        assert before.read() == "older"
    assert len(file.read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_losing_drafter_loses_drafts_and_no_text(
    scripts: SimpleNamespace, temperature: float
) -> None:
    lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"], lookup=False)
    sampling = SamplingParams(temperature=temperature, seed=0)
    settings = {"max_new_tokens": 12, "sampling": sampling, "num_draft_tokens": 4}
    plain = lm.generate([5, 6, 7], **settings)
    lm._drafter = drafter = scripts.bad_drafters.Losing(lm)
    told = []
    for drafter.lost in (0.0, 1.0):
        rounds: list[Round] = []
        assert lm.generate([5, 6, 7], on_round=rounds.append, **settings).token_ids == (
            plain.token_ids
        )
        told.append(sum(r.num_accepted_tokens for r in rounds))
    assert told[0] == plain.stats.num_accepted_tokens > told[1]


def test_batches_are_compared_while_all_of_their_rows_go_on(
    scripts: SimpleNamespace, arguments: list[str]
) -> None:
    lm = SelfSpeculativeLM.from_pretrained(arguments[1], lookup=False)
    options = SimpleNamespace(tokens=9, temperature=0.8)
    prompts = [[5, 6, 7], [9, 1], [4]]
    work = scripts.batches.Full(lm, prompts, 0, options)
    assert list(work) == [3 * n for n in range(2, 10)]  # a plain round is a token of each row
    assert (work.first, work.emitted) == (3, 27)
    ways = {"plain": 0, "auto": "auto", "2": 2}
    found = scripts.batches.measured(lm, prompts, ways, options)
    assert found["plain"] == 1.0
    assert found.keys() == ways.keys()
    assert all(ratio > 0.0 for ratio in found.values())


def test_what_deciding_takes_is_part_of_the_rounds_that_do_it(
    scripts: SimpleNamespace, arguments: list[str]
) -> None:
    lm = SelfSpeculativeLM.from_pretrained(arguments[1])
    choose = scripts.deciding.Controller.choose
    found = scripts.deciding.spent(
        lm, [[5, 6, 7], [9, 1]], {"max_new_tokens": 24, "ignore_eos": True}
    )
    assert found["rounds"] > 2
    each = found["seconds"]
    assert all(
        each[name] > 0.0 for name in ("Controller.choose", "layerskip.decode.observe_seconds")
    )
    assert sum(each.values()) < found["round_seconds"]
    assert scripts.deciding.Controller.choose is choose


def test_ragged_passes_are_measured_in_few_calls_and_in_many(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = scripts.ragged
    monkeypatch.setattr(ragged, "ROWS", (2, 5))
    monkeypatch.setattr(ragged, "CONTEXTS", (3, 40))
    monkeypatch.setattr(ragged, "FAR", 40)
    asked: list[int] = []
    divided = layout.attention_calls
    monkeypatch.setattr(
        layout, "attention_calls", lambda rows, price: asked.append(price) or divided(rows, price)
    )
    passes = ragged.shapes(random.Random(0))
    assert {len(segments) for segments in passes.values()} == {2, 5}
    found = ragged.measure(SelfSpeculativeLM(make_model(), None, PLANS["exit"]), passes, 1)
    assert found.keys() == passes.keys()
    assert all(seconds > 0.0 for three in found.values() for seconds in three)
    assert min(asked.count(call) for call in ragged.CALLS) >= 2 * len(passes)


def test_a_wrapped_model_is_compared_with_the_same_one_loaded_and_transformers(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = "--width 64 --layers 3 --vocab 200 --new-tokens 5 --turns 1"
    monkeypatch.setattr("sys.argv", ["wrapped.py", *asked.split()])
    scripts.wrapped.main()
    *told, _, theirs, one, two, three, four, five, six = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == [
        "wrapped",
        "wrapped, torch's products",
        "loaded",
    ]
    figures = [line[40:].split() for line in (theirs, one, two, three, four, five, six)]
    assert all(float(figure[0]) > 0.0 for figure in figures)
    assert all(figure[-2:] == ["the", "same"] for figure in figures)


def test_a_commit_with_changed_files_is_told_apart_by_the_changes(scripts, tmp_path, monkeypatch):
    """So that a run that was stopped does not go on with other code."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(scripts.paired, "__file__", str(tmp_path / "bench" / "paired.py"))
    assert (scripts.paired.commit(), scripts.paired.changes()) == ("unknown", "unknown")
    code, result = tmp_path / "code.py", tmp_path / "bench" / "results" / "r.json"
    code.write_text("1")
    result.write_text("{}")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    result.write_text("[]")
    clean = scripts.paired.commit()
    assert not clean.endswith("+")
    assert scripts.paired.changes() == ""
    found = set()
    for text in ("2", "3", "2"):
        code.write_text(text)
        assert scripts.paired.commit() == f"{clean}+"
        found.add(scripts.paired.changes())
    assert len(found) == 2
    assert "" not in found
