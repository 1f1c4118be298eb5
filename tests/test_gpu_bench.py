"""`make gpu-bench` without a GPU: byte counts, and every section over toys on the CPU."""

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import gpu_bench  # noqa: E402
from gpu import (  # noqa: E402
    backends,
    decoding,
    lab,
    models,
    moved,
    overlap,
    recorded,
    serving,
    timing,
)

from layerskip import Round, SamplingParams, SelfSpeculativeLM  # noqa: E402

TOY = ["--device", "cpu", "--size", "toy", "--models", "toy"]


@pytest.fixture(scope="module")
def loaded():
    """One toy for the tests that need only a model."""
    return models.load(models.TOY[0], "cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Every section, once."""
    folder = tmp_path_factory.mktemp("record")
    # So long that the time of no toy's section runs out.
    options = ["--total", "36000", "--out", str(folder), "--commit", "abc"]
    status = gpu_bench.main([*TOY, *options])
    (file,) = folder.glob("*-decoding.json")
    assert status == 0
    return json.loads(file.read_text(encoding="utf-8"))


def bench_lab(loaded, **changes):
    extent = dataclasses.replace(lab.TOY, **{"repeats": 1, **changes})
    found = lab.Lab(backends.CpuBackend(), [loaded.model], extent, judged=False, write=lambda: None)
    found.loaded[loaded.model.name] = loaded
    loaded.curve = {0.0: 1.0, 0.1: 0.8, 1.0: 0.1}
    return found


def far():
    return time.monotonic() + 3600


# Byte counts: sums by hand, from the models' own config.json.


def test_bytes_of_a_token_are_those_of_the_checkpoint():
    llama_8b, llama_1b, qwen = models.FULL
    assert moved.layer_bytes(llama_8b) == 2 * (
        4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    )
    assert moved.layer_bytes(qwen) == 2 * (
        2560 * (4096 + 1024 + 1024 + 4096) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    )
    assert moved.head_bytes(llama_1b) == 2 * (128256 * 2048 + 2048)
    assert moved.round_bytes(llama_8b, 0, context=0) / 1e9 == pytest.approx(15.01, abs=0.005)
    assert moved.round_bytes(llama_1b, 0, context=0) / 1e9 == pytest.approx(2.47, abs=0.005)


@pytest.mark.parametrize("model", models.TOY, ids=lambda model: model.name)
def test_bytes_of_weights_are_those_of_the_model_itself(model):
    weights = sum(w.nbytes for w in model.make("cpu").parameters())
    embedding = 0 if model.tied else 2 * model.shape.vocab * model.shape.hidden
    counted = model.layers * moved.layer_bytes(model) + moved.head_bytes(model)
    assert counted == weights - embedding


def test_a_round_reads_drafting_layers_and_head_for_each_draft():
    model = models.FULL[0]
    slot = 2 * 2 * 8 * 128  # bytes of keys and values, a layer
    assert moved.kv_bytes(model, 1) == slot
    draft = 8 * moved.layer_bytes(model) + moved.head_bytes(model)
    verify = 32 * moved.layer_bytes(model) + moved.head_bytes(model)
    history = 8 * slot * (101 + 102) + 32 * slot * 103
    assert moved.round_bytes(model, 2, context=100) == 2 * draft + verify + history
    # Another sequence reads no weights, only a history of its own.
    assert moved.round_bytes(model, 2, context=100, batch=3) == (2 * draft + verify + 3 * history)


def drafted(count, accepted, context):
    return Round(
        row=0,
        index=1,
        token_ids=(1,) * (accepted + 1),
        text="",
        num_draft_tokens=count,
        num_accepted_tokens=accepted,
        origin="bonus",
        draft_seconds=0.0,
        verify_seconds=0.0,
        positions=count + 1,
        context=context,
    )


def test_speedup_by_bytes_counts_each_round_s_own():
    model = models.FULL[0]
    plain, round_ = (moved.round_bytes(model, k, context=9) for k in (0, 2))
    assert moved.speedup_by_bytes(model, [drafted(0, 0, 9)]) == 1.0
    both = moved.speedup_by_bytes(model, [drafted(2, 2, 9), drafted(0, 0, 9)])
    assert both == pytest.approx(4 * plain / (round_ + plain))


# Models whose drafts are accepted as often as wanted.


def test_a_loaded_model_has_the_weights_that_transformers_gets(loaded):
    loaded.scale(0.5)
    theirs = dict(loaded.model.make("cpu", 0.5).named_parameters())
    ours = dict(loaded.lm.stack.twin.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def test_eps_sets_how_often_drafts_are_accepted(loaded):
    prompts = [lab.prompt(loaded.model, 12, seed) for seed in range(4)]
    rates = {}
    for eps in (1.0, 0.1, 0.0):
        loaded.scale(eps)
        rates[eps] = timing.decode(loaded.lm, prompts, 1, 16).acceptance_rate
    assert rates[1.0] < 0.5 < rates[0.1] < rates[0.0] == 1.0
    loaded.scale(1.0)
    again = timing.decode(loaded.lm, prompts, 1, 16).acceptance_rate
    assert again == rates[1.0]


def test_eps_for_an_acceptance_lies_on_the_measured_curve(loaded):
    loaded.curve = {0.0: 1.0, 0.25: 0.8, 0.5: 0.4, 1.0: 0.4}
    assert loaded.eps_for(1.0) == 0.0
    assert loaded.eps_for(0.6) == pytest.approx(0.375)
    assert loaded.eps_for(0.1) == 0.5  # nothing comes nearer
    loaded.curve = {}
    with pytest.raises(RuntimeError, match="has not been measured"):
        loaded.eps_for(0.5)


def test_a_stack_that_keeps_its_weights_elsewhere_is_not_scaled_in_silence(loaded):
    deeper = dataclasses.replace(loaded.model, layers=loaded.model.layers + 1)
    other = models.Loaded(deeper, loaded.lm, {})
    with pytest.raises(RuntimeError, match="8 weights after the exit can be scaled, 10 should be"):
        other.scale(0.5)


def test_only_branches_after_the_exit_are_scaled():
    model = models.TOY[0]
    assert model.is_after_exit("model.layers.2.mlp.down_proj.weight")
    assert model.is_after_exit("model.layers.5.self_attn.o_proj.weight")
    assert not model.is_after_exit("model.layers.1.mlp.down_proj.weight")
    assert not model.is_after_exit("model.layers.3.mlp.up_proj.weight")
    assert not model.is_after_exit("lm_head.weight")


def test_a_folder_without_room_is_refused():
    with pytest.raises(RuntimeError, match="has no room for"), models.scratch(1 << 60):
        pass


# Clocks.


def test_a_run_counts_tokens_after_the_first_of_each_sequence(loaded):
    loaded.scale(0.0)
    prompts = [lab.prompt(loaded.model, n, n) for n in (5, 9)]
    run = timing.decode(loaded.lm, prompts, 2, 7)
    assert [len(tokens) for tokens in run.token_ids] == [7, 7]
    assert (run.num_tokens, run.num_passes, len(run.rounds)) == (12, 2, 4)
    assert (run.mean_accepted_length, run.acceptance_rate) == (3.0, 1.0)
    assert run.first_seconds > 0.0
    assert run.seconds_per_token == run.seconds / 12
    stopped = timing.decode(loaded.lm, prompts, 2, 7, until=0.0)
    assert [len(tokens) for tokens in stopped.token_ids] == [1, 1]


def test_a_step_that_only_starts_a_round_is_none():
    """Where the device runs ahead of the host, a record comes a step later."""
    left = [[], [drafted(0, 0, 3)], [], [drafted(2, 2, 4)]]

    class Ahead:
        unfinished = property(lambda self: left)

        def add(self, prompt):
            return 0

        def step(self):
            return left.pop(0)

        def remove(self, row):
            stats = SimpleNamespace(kv_cache_bytes=1)
            return SimpleNamespace(token_ids=(1, 2, 3, 4, 5), cache=None, stats=stats)

    lm = SimpleNamespace(open_batch=lambda **settings: Ahead())
    run = timing.decode(lm, [[1]], 2, 5)
    assert (run.num_passes, run.num_tokens) == (2, 4)


def test_kinds_take_turns_and_one_that_fails_is_left_out():
    ran = []

    def kind(name, value):
        ran.append(name)
        return value

    def broken():
        ran.append("c")
        raise RuntimeError("no compiler")

    kinds = {"a": lambda: kind("a", 2.0), "b": lambda: kind("b", 4.0), "c": broken}
    turns = timing.in_turns(kinds, far(), repeats=7)
    assert ran[:3] == ["a", "b", "c"]
    assert all(set(ran[3 + 2 * i : 5 + 2 * i]) == {"a", "b"} for i in range(7))
    assert len({tuple(ran[3 + 2 * i : 5 + 2 * i]) for i in range(7)}) == 2  # both orders
    assert turns.complete
    assert turns.ratio("b", "a") == 2.0
    assert turns.summary("b", 10.0) == {"median": 40.0, "low": 40.0, "high": 40.0, "turns": 7}
    assert turns.summary("c") == {"error": "RuntimeError: no compiler"}


def test_a_turn_that_time_cuts_short_does_not_count(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(timing.time, "monotonic", lambda: float(next(now)))
    turns = timing.in_turns({"a": lambda: 1.0, "b": lambda: 1.0}, 7.0, repeats=7)
    assert [len(turns.values[kind]) for kind in "ab"] == [2, 2]  # the clock is read for each run
    assert not turns.complete
    none = timing.in_turns({"a": lambda: 1.0}, -1.0)
    assert none.summary("a") == {"error": "there was no time for it"}
    assert none.median("a") != none.median("a")


def test_what_needs_no_warming_up_is_not_and_what_needs_more_has_it():
    ran = []
    kinds = {kind: lambda kind=kind: ran.append(kind) or 1.0 for kind in "abc"}
    turns = timing.in_turns(kinds, far(), repeats=1, warm_ups={"a": 0, "c": 2})
    assert ran[:3] == ["b", "c", "c"]
    assert sorted(ran[3:]) == ["a", "b", "c"]
    assert turns.extent == {"complete": True, "turns": 1, "wanted_turns": 1}


# The run's time.


@pytest.fixture
def allowed(monkeypatch, tmp_path):
    """What each of three sections was allowed, if the first takes no time, the second overruns."""

    def run(*options):
        seconds = {}

        def section(name, takes):
            def measure(here, found, until):
                seconds[name] = until - clock.now
                clock.now += min(takes, until + 20 - clock.now)
                found["ok"] = True

            return measure

        clock = SimpleNamespace(now=1000.0)
        clock.monotonic = lambda: clock.now
        monkeypatch.setattr(gpu_bench, "time", clock)
        sections = {"models": section("models", 0), "rounds": section("rounds", 1e9)}
        sections |= {"memory": section("memory", 5)}
        monkeypatch.setattr(gpu_bench, "SECTIONS", sections)
        assert gpu_bench.main([*TOY, "--out", str(tmp_path), *options, "--commit", "a"]) == 0
        (file,) = tmp_path.glob("*-decoding.json")
        return seconds, json.loads(file.read_text(encoding="utf-8"))["sections"]

    return run


def test_sections_share_what_is_left_of_the_total(allowed):
    seconds, record = allowed("--total", "390")
    assert seconds == {"models": 300.0, "rounds": 260.0, "memory": 110.0}
    assert record["rounds"]["allowed_seconds"] == 260.0
    assert record["rounds"]["cut_short"] == []
    few, _ = allowed("--total", "330", "--sections", "memory")
    assert few == {"models": 300.0, "memory": 330.0}


def test_seconds_of_a_section_are_its_own_while_the_total_lasts(allowed):
    seconds, _ = allowed("--total", "210", "--seconds", "170")
    assert seconds == {"models": 170.0, "rounds": 170.0, "memory": 20.0}
    seconds, record = allowed("--total", "150", "--seconds", "170")
    assert seconds == {"models": 150.0, "rounds": 150.0}
    assert record["memory"]["left_out"] == "there was no time for it"
    assert record["memory"]["cut_short"] == ["all: there was no time for it"]


def test_all_sections_end_within_nine_minutes():
    """With what is begun in the last second, and twenty for the imports."""
    total = gpu_bench.parse(TOY).total
    assert total + gpu_bench.LAST_SECONDS + 20 <= 540
    assert set(gpu_bench.PARTS) <= set(gpu_bench.SECTIONS)


def test_what_was_cut_short_is_told_by_its_place():
    out = {"left_out": timing.NO_TIME}
    few = timing.Turns({"a": [1.0], "b": [1.0, 2.0]}, {}, 3).extent | {"k=1": out}
    enough = timing.Turns({"a": [1.0], "b": []}, {"b": "no compiler"}, 1).extent
    greedy = {"compared_tokens": 5, "wanted_tokens": 9}
    found = {"ok": True, "8B": few, "1B": {"x": enough, "y": greedy, "z": out}, "4B": out}
    assert [*gpu_bench.cut_short(found)] == [
        "8B: 1 of 3 turns",
        "1B / y: 5 of 9 tokens",
        "1B / z: there was no time for it",
        "4B: there was no time for it",
    ]
    assert not [*gpu_bench.cut_short({"left_out": "it was not loaded"})]


# Sections.


def test_every_section_measures_and_is_recorded(record):
    assert list(record["sections"]) == list(gpu_bench.SECTIONS)
    assert all(section["ok"] for section in record["sections"].values())
    assert not any(section["cut_short"] for section in record["sections"].values())
    assert record["machine"]["sizes"] == "toy"
    sections = {name: section.get("toy") for name, section in record["sections"].items()}
    assert sections["models"]["stack"]
    assert [point["eps"] for point in sections["models"]["curve"]] == list(models.EPS)
    assert sections["plain"]["ms_per_token"]["turns"] == lab.TOY.repeats
    assert sections["plain"]["share_of_copy"] > 0.0
    for run in ("greedy", "temperature 0.8", "greedy, auto"):
        assert sections["bits"][run]["equal"]
        assert sections["bits"][run]["compared_tokens"] == lab.TOY.exact_tokens
        assert sections["bits"][run]["compared_slots"] == lab.TOY.exact_tokens + lab.TOY.prompt - 1
    k2 = sections["rounds"]["k=2"]
    assert k2["bytes"] == moved.round_bytes(
        models.TOY[0], 2, context=lab.TOY.prompt + 1.5 * lab.TOY.rounds
    )
    passes = sections["passes"]
    for rows in recorded.TOKENS:
        assert passes[f"verify, {rows} tokens, 0 slots"]["timings"] == recorded.TIMINGS
    for kind in ("verify", "draft"):
        together = passes[f"{kind} sequences, 8 tokens, 0 slots"]
        assert together["us"] > 0.0
        assert together["table_us"] > 0.0
    assert passes["table"]["key"]["device"]
    gained = sections["speedup"]["acceptance 0.8"]["k=2"]
    assert {"speedup", "formula", "by_bytes", "share_of_formula"} <= set(gained)
    beside = sections["transformers"]
    for name in (*serving.WAYS, *(serving.NAMES[k] for k in serving.MODES)):
        assert beside[name]["median"] > 0.0, beside[name]
    assert beside["on"]["tokens_as_off"] == beside["auto"]["tokens_as_off"] == lab.TOY.tokens
    for mode in ("off", "one", "on", "auto"):
        assert sections["batches"]["batch 3"][mode]["median"] > 0.0
    assert set(lab.TOY.batches) == {int(n.split()[1]) for n in sections["batches"]}
    assert set(lab.TOY.contexts) == {int(n.split()[1]) for n in sections["contexts"]}
    memory = sections["memory"]
    assert memory["on"]["kv_cache_bytes"] == memory["off"]["kv_cache_bytes"] > 0
    assert sections["first-tokens"]["prompt 8"]["ratio"]["value"] > 0.0
    early = record["sections"]["launches"]["programmatic_dependent_launch"]
    assert early == {
        "measured": False,
        "why_not": "a CPU ends each operation before it starts the next",
    }
    assert record["sections"]["launches"]["small_kernel_us"]["off"]["median"] > 0.0
    for what in ("plain", "round"):
        assert sections["launches"][what].keys() == {"off"}
        assert sections["launches"][what]["off"]["ms"]["median"] > 0.0


@pytest.fixture(scope="module")
def packed(loaded, tmp_path_factory):
    """The toy as a GPU has it, by the kernels' definitions."""
    folder = tmp_path_factory.mktemp("toy")
    loaded.model.make("cpu").save_pretrained(folder)
    lm = SelfSpeculativeLM.from_pretrained(
        folder, exit_layer=loaded.model.exit_layer, num_draft_tokens=0, packed=True, lookup=False
    )
    return models.Loaded(loaded.model, lm, {})


def test_what_recording_takes_is_measured(record, packed):
    assert "started by the host" in record["sections"]["recording"]["toy"]["left_out"]
    here, found = bench_lab(packed), {}
    recorded.recording(here, found, far())
    assert found["ok"]
    found = found["toy"]
    for k in recorded.DRAFTED:
        of_k = found[f"k={k}"]
        for side in (recorded.UNRECORDED, recorded.REPLAYED):
            assert of_k[side]["median"] > 0.0
        assert of_k["recordings"] >= 1
        assert of_k["ms_to_record"] > 0.0
    assert all(found["first_text"][what] > 0.0 for what in recorded.FIRSTS)
    assert found["seconds_to_warm_up"] > found["seconds_of_a_load"] > 0.0
    assert found["complete"]
    assert 0.0 <= found["acceptance_rate"] <= 1.0


def test_recording_has_a_turn_where_there_is_time_for_one(packed, monkeypatch):
    """Its warm-up is of rounds only: a first text has none."""
    runs = []
    rounds = 2 * len(recorded.DRAFTED)
    kinds = rounds + len(recorded.FIRSTS) + 1

    def decode(*args):
        runs.append(args)
        return SimpleNamespace(
            seconds=1.0, num_passes=1, seconds_per_token=1.0, acceptance_rate=1.0
        )

    def now():
        return 0.0 if len(runs) < rounds + kinds else math.inf

    clock = SimpleNamespace(monotonic=now, perf_counter=time.perf_counter)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(recorded, "decode", decode)
    monkeypatch.setattr(recorded, "warmed", lambda lm, num_slots: 1.0)
    found = {}
    recorded.recording(bench_lab(packed, repeats=3), found, far())
    assert next(gpu_bench.cut_short(found)) == "toy: 1 of 3 turns"
    assert found["toy"]["first_text"] == dict.fromkeys(recorded.FIRSTS, 1.0)
    assert len(runs) == rounds + kinds


@pytest.mark.parametrize("section", ["speedup", "transformers", "batches", "contexts"])
def test_auto_runs_no_round_that_a_fixed_number_has_recorded(packed, monkeypatch, section):
    """It has a decoder of its own, with what a load records; and a first text that is not timed."""
    lms = {}

    def noted(real):
        def decode(lm, *args, **kwargs):
            drafted = kwargs["num_draft_tokens"] if "num_draft_tokens" in kwargs else args[1]
            lms.setdefault(drafted, []).append(lm)
            return real(lm, *args, **kwargs)

        return decode

    module = decoding if section == "speedup" else serving
    if section == "transformers":
        monkeypatch.setattr(serving, "generated", lambda *args: ([1], 1.0))
        monkeypatch.setattr(SelfSpeculativeLM, "generate", noted(SelfSpeculativeLM.generate))
    else:
        monkeypatch.setattr(module, "decode", noted(module.decode))
    loads = []
    real = SelfSpeculativeLM._record_ahead
    monkeypatch.setattr(SelfSpeculativeLM, "_record_ahead", lambda lm: loads.append(lm) or real(lm))
    found = {}
    changes = {"acceptances": (0.8, 0.8), "batches": (2,), "contexts": (8,)}
    gpu_bench.SECTIONS[section](bench_lab(packed, tokens=4, **changes), found, far())
    assert found["ok"]
    (auto,) = set(lms.pop("auto"))
    assert loads[-1] is auto
    (fixed,) = {lm for of_one in lms.values() for lm in of_one}
    assert fixed is packed.lm
    assert auto.controller is fixed.controller
    assert auto._bench is not fixed._bench


def test_how_many_rounds_a_recording_is_worth():
    """The first one of a recorder warms up."""
    found = recorded.recordings([9.0, 0.03, 0.05, 0.04], 0.02)
    assert found == {
        "recordings": 4,
        "ms_to_record": pytest.approx(40.0),
        "worth_rounds": pytest.approx(2.0),
    }
    assert recorded.recordings([9.0], 0.02)["ms_to_record"] == pytest.approx(9000.0)
    assert math.isnan(recorded.recordings([0.5], -0.1)["worth_rounds"])


def test_a_side_without_recordings_has_none(packed):
    made = []
    lm = recorded.anew(packed, recorded.NEVER, made)
    timing.decode(lm, [[5, 3]], 2, 24)
    assert [len(one.seconds) for one in made] == [0]
    assert lm._bench is not packed.lm._bench


def test_a_text_behind_a_warm_up_records_nothing(packed):
    """Neither for its drafts nor for the slots that they need, at the end of a block."""
    made = []
    lm = recorded.anew(packed, None, made)
    ids = [lab.prompt(packed.model, 56, 0)]
    recorded.warmed(lm, len(ids[0]) + 6)
    (clocked,) = made  # one cache
    recordings = len(clocked.seconds)
    timing.decode(lm, ids, "auto", 6)
    assert [len(one.seconds) for one in made] == [recordings]


def test_the_cache_of_another_section_is_not_counted(packed):
    here, found = bench_lab(packed), {}
    packed.lm._bench.give_back(packed.lm._bench.take(num_rows=8, num_slots=256))
    serving.memory(here, found, far())
    off = found["toy"]["off"]["kv_cache_bytes"]
    assert off == found["toy"]["on"]["kv_cache_bytes"]
    assert off == packed.lm.stack.new_cache(num_rows=1, num_slots=16).nbytes


def test_every_acceptance_says_that_it_is_synthetic(record):
    def look(value):
        if isinstance(value, dict):
            if "acceptance_rate" in value and "drafted" not in value:
                yield value
            for inner in value.values():
                yield from look(inner)

    for name, section in record["sections"].items():
        if name in ("models", "bits"):
            assert section["toy"]["acceptance"] == models.SYNTHETIC
        else:
            assert all(v["acceptance"] == models.SYNTHETIC for v in look(section))
            assert all("eps" in v for v in look(section))


def test_goals_of_toys_are_not_judged(record):
    found = dict(gpu_bench.figures(record["sections"]))
    assert {figure["met"] for figure in found.values()} == {None}
    assert "rounds / toy / k=2 / over_bytes" in found


def test_goals_are_judged_on_a_gpu(loaded):
    judge = bench_lab(loaded)
    judge.judged = True
    assert judge.against(0.8, 0.8) == {"value": 0.8, "goal": ">= 0.8", "met": True}
    assert not judge.against(0.79, 0.8)["met"]
    assert judge.against(1.1, 1.1, at_least=False)["met"]
    assert judge.against(float("nan"), 1.1)["met"] is None  # no value, no judgement
    printed = gpu_bench.summary({"plain": {"8B": {"share": judge.against(0.79, 0.8)}}})
    assert "MISSED     plain / 8B / share: 0.79 (goal >= 0.8)" in printed


@pytest.mark.parametrize("what", ["token", "bit"])
def test_another_token_or_bit_fails_the_section(loaded, monkeypatch, what):
    real = timing.decode

    def wrong(lm, prompts, count, *args, **kwargs):
        run = real(lm, prompts, count, *args, **kwargs)
        if count == 0:
            return run
        if what == "bit":
            run.caches[0].values[-1, -1, 0, -1] += 1
            return run
        (tokens,) = run.token_ids
        return dataclasses.replace(run, token_ids=((*tokens[:-1], tokens[-1] ^ 1),))

    monkeypatch.setattr(decoding, "decode", wrong)
    found = {}
    decoding.bits(bench_lab(loaded), found, far())
    assert not found["ok"]
    greedy = found["toy"]["greedy"]
    assert greedy["tokens_equal"] == (what == "bit")
    assert greedy["keys_and_values_equal"] == (what == "token")


def test_a_model_that_fails_leaves_the_others_their_turn(loaded):
    both = bench_lab(loaded)
    other = dataclasses.replace(loaded, model=models.TOY[1])
    both.models = [loaded.model, other.model]
    both.loaded[other.model.name] = other
    found = {}

    def measure(one, entry, end):
        if one is loaded:
            raise RuntimeError("out of memory")
        entry["ms"] = 1.0

    both.each(found, far(), measure)
    assert "out of memory" in found["toy"]["error"]
    assert found["toy tied"] == {"ms": 1.0}
    assert not found["ok"]
    found = {}
    both.each(found, time.monotonic() - 1, measure)
    assert found["toy"] == {"left_out": "there was no time for it"}


def test_a_model_shares_its_section_s_time_with_those_after_it(loaded):
    both = bench_lab(loaded)
    both.models = [loaded.model, models.TOY[1]]
    both.loaded[models.TOY[1].name] = loaded
    ends = []
    start = time.monotonic()
    both.each({}, start + 100, lambda one, entry, end: ends.append(end - start))
    assert ends == pytest.approx([50, 100], abs=2)


def test_a_compiler_that_takes_too_long_costs_only_its_own_mode(loaded, monkeypatch):
    real = serving.generated

    def slow(model, ids, tokens, extra):
        if "cache_implementation" in extra:
            time.sleep(30)
        return real(model, ids, tokens, extra)

    monkeypatch.setattr(serving, "generated", slow)
    monkeypatch.setattr(serving, "COMPILE_SECONDS", 0.3)
    found = {}
    serving.beside_transformers(bench_lab(loaded, tokens=2), found, far())
    assert found["ok"]
    compiled = found["toy"]["transformers, static cache, compiled"]
    assert "TimeoutError" in compiled["error"]
    assert found["toy"]["transformers"]["median"] > 0.0


def test_transformers_early_exit_gets_its_settings(loaded):
    model = loaded.model.make("cpu", 0.0)
    ids = lab.prompt(loaded.model, 5, 0)
    tokens, _ = serving.generated(model, ids, 6, {"assistant_early_exit": 2})
    assert len(tokens) == 6
    assert model.generation_config.num_assistant_tokens == serving.DRAFTED
    assert model.generation_config.assistant_early_exit is None


def test_sampled_runs_are_the_same_too(loaded):
    loaded.scale(0.1)
    sampling = SamplingParams(temperature=0.8, seed=1)
    ids = [lab.prompt(loaded.model, 8, 0)]
    off, on = (decoding.kept(loaded, ids, k, 12, sampling, far()) for k in (0, 3))
    assert decoding.same(off, on)["equal"]
    other = decoding.kept(loaded, ids, 3, 12, SamplingParams(temperature=0.8, seed=2), far())
    assert not decoding.same(off, other)["equal"]


class Early(backends.CpuBackend):
    """A CPU that says its operations could start early; ``modes`` holds whether they may."""

    def __init__(self):
        super().__init__()
        self.modes = [False]

    def why_no_overlap(self):
        return None

    @contextlib.contextmanager
    def overlapping(self, allowed):
        self.modes.append(allowed)
        yield
        self.modes.append(False)


def overlapped(loaded, **changes):
    """The section over a toy, off and on; the rounds of "on" are its own."""
    here = bench_lab(loaded, tokens=6, **changes)
    here.backend = Early()
    found = {}
    overlap.launches(here, found, far())
    return here, found


def test_early_starts_are_measured_off_and_on(loaded, monkeypatch):
    seen = []
    real = overlap.decode

    def watched(lm, ids, drafted, tokens):
        seen.append((lm, drafted))
        return real(lm, ids, drafted, tokens)

    monkeypatch.setattr(overlap, "decode", watched)
    _, found = overlapped(loaded)
    assert found["ok"]
    assert found["programmatic_dependent_launch"] == {"measured": True, "chain_equal": True}
    assert {*found["small_kernel_us"]} == {"off", "on", "gained"}
    for what in ("plain", "round"):
        assert {*found["toy"][what]} == {"off", "on", "gained"}
        assert found["toy"][what]["gained"] > 0.0
        assert found["toy"]["bits"][what]["compared_tokens"] == 6
    decoders = {lm for lm, _ in seen}  # with rounds that were recorded before, modes are the same
    assert len(decoders) == 2
    assert loaded.lm not in decoders
    assert set(seen) == {(lm, drafted) for lm in decoders for drafted in (0, 4)}


@pytest.mark.parametrize("where", ["a chain", "a cache"])
def test_a_bit_that_an_early_start_changes_fails_the_section(loaded, monkeypatch, where):
    modes = []
    real_kept, real_chain = overlap.kept, overlap.chained

    def kept(*args):
        run = real_kept(*args)
        modes.append(len(modes) % 2)
        if modes[-1] and where == "a cache":
            run.caches[0].keys[0, 0, 0, 0] += 1
        return run

    def chained(here, mode):
        out = real_chain(here, mode)
        return out[:-1] + b"?" if where == "a chain" and mode == "on" else out

    monkeypatch.setattr(overlap, "kept", kept)
    monkeypatch.setattr(overlap, "chained", chained)
    _, found = overlapped(loaded)
    assert not found["ok"]
    assert found["programmatic_dependent_launch"]["chain_equal"] == (where == "a cache")
    assert found["toy"]["ok"] == (where == "a chain")


def test_mistakes_end_in_one_sentence(tmp_path, capsys):
    for options, said in (
        (["--sections", "plane"], "no section is called plane; there are models, plain"),
        (["--models", "8B"], "no model of this size is called 8B; there are Llama-3.1-8B"),
    ):
        with pytest.raises(SystemExit):
            gpu_bench.main(options)
        assert said in capsys.readouterr().err
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert gpu_bench.main([*TOY, "--out", str(tmp_path / "file")]) == 1
    assert "cannot be made: File exists" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert gpu_bench.main(["--out", str(tmp_path)]) == 1
        assert "--device cpu --size toy" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_by_itself_over_both_toys(tmp_path):
    """From any folder, without an installation. Slow: torch and transformers are imported again."""
    command = [sys.executable, str(BENCH / "gpu_bench.py"), *TOY[:4], "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--sections", "plain,launches"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "toy tied" in done.stdout
    assert list(tmp_path.glob("*-decoding.json"))
