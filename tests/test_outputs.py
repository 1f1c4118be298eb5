import json

import pytest

from layerskip import DecodeStats, GenerationOutput, Round
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
    assert both.acceptance_rate == 8 / 12
    assert DecodeStats.merge([]) == DecodeStats()


def test_json_has_the_documented_fields():
    stats = DecodeStats.from_rounds(ROUNDS, prompt_tokens=11, kv_cache_bytes=640)
    out = GenerationOutput("text", (7, 1), "length", 3, stats, ROUNDS)
    content = json.loads(json.dumps(out.to_dict()))
    assert set(content) == {"text", "token_ids", "finish_reason", "seed", "stats"}
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
