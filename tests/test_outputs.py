import json

import pytest

from layerskip import DecodeStats, GenerationOutput, Round
from layerskip.metrics import speculative_metrics
from layerskip.outputs import TokenLogprob


def make_round(index, tokens, *, drafted=0, accepted=0, origin="plain", **more):
    return Round(
        row=0,
        index=index,
        token_ids=tuple(tokens),
        text="",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        origin=origin,
        draft_seconds=0.25 if drafted else 0.0,
        verify_seconds=0.5,
        positions=drafted + 1,
        **more,
    )


ROUNDS = (
    make_round(0, [7], origin="prefill"),
    make_round(1, [1, 2, 3], drafted=4, accepted=2, origin="recovered"),
    make_round(2, [4, 5, 6, 7, 8], drafted=4, accepted=4, origin="bonus"),
    make_round(3, [9], finish_reason="length"),
)


def test_origins_of_tokens():
    assert [r.origins for r in ROUNDS] == [
        ("prefill",),
        ("accepted", "accepted", "recovered"),
        ("accepted",) * 4 + ("bonus",),
        ("plain",),
    ]


def test_a_block_cut_inside_its_accepted_tokens_has_no_other_origin():
    cut = make_round(1, [1, 2], drafted=4, accepted=2, origin="bonus", finish_reason="stop")
    assert cut.origins == ("accepted", "accepted")


def test_stats_of_rounds_are_as_in_vllm():
    stats = DecodeStats.from_rounds(ROUNDS, prompt_tokens=11, kv_cache_bytes=640)
    assert stats == DecodeStats(
        prompt_tokens=11,
        new_tokens=10,
        num_rounds=3,  # the prefill drafts nothing and is none of them
        num_draft_tokens=8,
        num_accepted_tokens=6,
        num_plain_rounds=1,
        prefill_seconds=0.5,
        decode_seconds=2.0,
        kv_cache_bytes=640,
        positions_through_first_layer=1 + 5 + 5 + 1,
    )
    assert stats.acceptance_rate == 6 / 8
    assert stats.mean_accepted_length == 1 + 6 / 3
    assert stats.tokens_per_second == 9 / 2.0


def test_nothing_drafted_and_nothing_decoded_divide_by_nothing():
    prefill_only = DecodeStats.from_rounds(ROUNDS[:1], prompt_tokens=1, kv_cache_bytes=0)
    assert prefill_only.acceptance_rate == 0.0
    assert prefill_only.mean_accepted_length == 1.0
    assert prefill_only.tokens_per_second == 0.0


def test_merging_adds_up_all_but_the_cache():
    one = DecodeStats.from_rounds(ROUNDS, prompt_tokens=11, kv_cache_bytes=640)
    two = DecodeStats.from_rounds(ROUNDS[:2], prompt_tokens=3, kv_cache_bytes=512)
    both = DecodeStats.merge(iter([one, two]))
    assert both.kv_cache_bytes == 640
    assert (both.prompt_tokens, both.new_tokens, both.num_rounds) == (14, 14, 4)
    assert both.num_requests == 2
    assert both.tokens_per_second == (14 - 2) / both.decode_seconds  # each has a first token
    assert both.acceptance_rate == 8 / 12
    nothing = DecodeStats.merge([])
    assert nothing == DecodeStats(num_requests=0)
    assert DecodeStats.merge([both, nothing]) == both


def test_json_has_the_documented_fields():
    stats = DecodeStats.from_rounds(ROUNDS, prompt_tokens=11, kv_cache_bytes=640)
    out = GenerationOutput("text", (7, 1), "length", 3, stats, ROUNDS)
    content = json.loads(json.dumps(out.to_dict()))
    assert set(content) == {"text", "token_ids", "finish_reason", "seed", "stats", "metrics"}
    documented = (
        "prompt_tokens new_tokens num_rounds num_draft_tokens num_accepted_tokens acceptance_rate "
        "mean_accepted_length prefill_seconds decode_seconds tokens_per_second kv_cache_bytes"
    )
    assert set(documented.split()) <= set(content["stats"])
    assert content["stats"]["acceptance_rate"] == pytest.approx(0.75)
    assert content["token_ids"] == [7, 1]


def test_tokens_from_a_cache_are_counted_and_added_up():
    one = DecodeStats.from_rounds(ROUNDS, prompt_tokens=11, kv_cache_bytes=0, cached_tokens=9)
    two = DecodeStats.from_rounds(ROUNDS, prompt_tokens=3, kv_cache_bytes=0)
    assert (one.cached_tokens, two.cached_tokens) == (9, 0)
    assert DecodeStats.merge([one, two, one]).cached_tokens == 18
    assert one.to_dict()["cached_tokens"] == 9


def test_logprobs_of_an_output_are_those_of_its_rounds():
    entries = [TokenLogprob(t, -t / 4, ((t, -t / 4), (3, -9.0))) for t in (7, 1, 2)]
    rounds = (
        make_round(0, [7], logprobs=(entries[0],)),
        make_round(1, [1, 2], drafted=4, accepted=2, logprobs=tuple(entries[1:])),
    )
    stats = DecodeStats.from_rounds(rounds, prompt_tokens=1, kv_cache_bytes=0)
    out = GenerationOutput("", (7, 1, 2), "stop", None, stats, rounds)
    assert out.logprobs == tuple(entries)
    assert json.loads(json.dumps(out.to_dict()))["logprobs"][1] == {
        "token_id": 1,
        "logprob": -0.25,
        "top": [[1, -0.25], [3, -9.0]],
    }


def test_a_round_as_json_has_counts_and_times_and_nothing_of_the_text():
    one = make_round(
        1,
        [1, 2, 3],
        drafted=4,
        accepted=2,
        origin="recovered",
        drafter="early_exit",
        num_lookup_tokens=1,
        stopped="number",
        request_id="r1",
        labels={"task": "code"},
        rows=2,
        context=9,
        exit_layer=2,
        sample_seconds=0.125,
        elapsed_seconds=3.0,
    )
    assert json.loads(json.dumps(one.to_dict())) == {
        "request_id": "r1",
        "labels": {"task": "code"},
        "index": 1,
        "mode": "early_exit",
        "num_draft_tokens": 4,
        "num_accepted_tokens": 2,
        "num_emitted_tokens": 3,
        "num_rejected_tokens": 2,
        "num_draft_passes": 0,
        "num_lookup_tokens": 1,
        "draft_seconds": 0.25,
        "verify_seconds": 0.5,
        "sample_seconds": 0.125,
        "elapsed_seconds": 3.0,
        "rows": 2,
        "context": 9,
        "exit_layer": 2,
        "stopped": "number",
        "chances": [],
        "confidences": [],
        "origin": "recovered",
        "finish_reason": None,
    }


def test_modes_of_rounds():
    modes = [make_round(0, [1], drafter="none").mode, make_round(1, [1], drafter="none").mode]
    modes += [make_round(2, [1], drafter=d).mode for d in ("early_exit", "lookup")]
    assert modes == ["prefill", "plain", "early_exit", "lookup"]


def test_metrics_of_a_request_as_vllm_reports_them():
    """The example of its documentation has 39 steps with none of three accepted, and so on."""
    steps = [(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3
    found = speculative_metrics([*steps, (0, 0)])  # a round without a draft is no step
    assert found["mean_acceptance_length"] == pytest.approx(1.2325581395348837)
    assert found["draft_acceptance_rate"] == pytest.approx(0.07751937984496124)
    assert found["acceptance_histogram"] == [39, 1, 0, 3]
    assert found["acceptance_histogram_by_draft_length"] == {"3": [39, 1, 0, 3]}
    counts = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens")
    assert [found[name] for name in counts] == [43, 10, 129, 3]
    assert (found["per_step_drafted"], found["per_step_accepted"][39:]) == ([3] * 43, [1, 3, 3, 3])
    assert (found["accepted_p10"], found["accepted_p50"], found["accepted_p90"]) == (0, 0, 0)


def test_metrics_of_ragged_drafts_and_of_none():
    found = speculative_metrics([(1, 1), (4, 2), (4, 4), (2, 0)])
    assert found["acceptance_histogram"] == [1, 1, 1, 0, 1]
    assert found["acceptance_histogram_by_draft_length"] == {
        "1": [0, 1],
        "2": [1, 0, 0],
        "4": [0, 0, 1, 0, 1],
    }
    assert (found["accepted_p10"], found["accepted_p50"], found["accepted_p90"]) == (0, 1, 4)
    assert found["mode"] == "speculative"
    none = speculative_metrics([(0, 0)] * 5)
    assert (none["mode"], none["accepted_p50"], none["acceptance_histogram"]) == (
        "plain",
        None,
        [0],
    )
    assert (none["mean_acceptance_length"], none["draft_acceptance_rate"]) == (1.0, 0.0)
