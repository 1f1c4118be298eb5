"""The decoding loop with drafters that never, always and sometimes guess right."""

import pytest
from decoding import LIMIT, PROMPT, Interruption, Oracle, decode, join, self_drafting
from toys import PLANS, without_times

from layerskip.decode import Decoder
from layerskip.model import DecoderStack
from layerskip.text import TextStream


@pytest.fixture(scope="module")
def stack(wrap) -> DecoderStack:
    return wrap("exit").stack


@pytest.fixture(scope="module")
def plain(stack) -> list[int]:
    return decode(Decoder(stack, None, None)).token_ids


def record(index, tokens, drafted, accepted, origin, finish_reason=None) -> dict:
    return {
        "row": 0,
        "index": index,
        "token_ids": tuple(tokens),
        "text": "",
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "origin": origin,
        "positions": drafted + 1 if index else len(PROMPT),
        "finish_reason": finish_reason,
        "logprobs": (),
        "drafter": "early_exit" if drafted else "none",
        "num_draft_passes": 0,  # the oracle runs no layer
        "num_lookup_tokens": 0,
        "chances": (),
        "confidences": (),
        "stopped": "number" if drafted else "",
        "num_uncovered_tokens": 0,
        "labels": {},
        "rows": 1,
        "context": 0,
        "exit_layer": None,
    }


def in_order(*records) -> list[dict]:
    """Records of one row with its committed slots: all it has emitted but the pending token."""
    done = len(PROMPT) - 1
    for each in records:
        each["context"] = done if each["index"] else 0
        done += len(each["token_ids"])
    return list(records)


def test_a_drafter_that_is_never_right(stack, plain):
    row = decode(
        Decoder(stack, Oracle(stack, plain, hits=[0]), None), num_draft_tokens=3, max_new_tokens=6
    )
    assert row.token_ids == plain[:6]
    assert (
        without_times(row.rounds)
        == in_order(
            record(0, plain[:1], 0, 0, "prefill"),
            record(1, plain[1:2], 3, 0, "recovered"),
            record(2, plain[2:3], 3, 0, "recovered"),
            record(3, plain[3:4], 2, 0, "recovered"),  # no more than can still be emitted
            record(4, plain[4:5], 1, 0, "recovered"),
            record(5, plain[5:6], 0, 0, "plain", "length"),
        )
    )


def test_a_drafter_that_is_always_right(stack, plain):
    row = decode(
        Decoder(stack, Oracle(stack, plain, hits=[9]), None), num_draft_tokens=3, max_new_tokens=11
    )
    assert row.token_ids == plain[:11]
    assert without_times(row.rounds) == in_order(
        record(0, plain[:1], 0, 0, "prefill"),
        record(1, plain[1:5], 3, 3, "bonus"),
        record(2, plain[5:9], 3, 3, "bonus"),
        record(3, plain[9:11], 1, 1, "bonus", "length"),
    )
    assert row.rounds[1].origins == ("accepted", "accepted", "accepted", "bonus")


def test_a_drafter_that_is_sometimes_right(stack, plain):
    oracle = Oracle(stack, plain, hits=[2, 0, 3])
    row = decode(Decoder(stack, oracle, None), num_draft_tokens=3)
    assert row.token_ids == plain
    assert without_times(row.rounds) == in_order(
        record(0, plain[:1], 0, 0, "prefill"),
        record(1, plain[1:4], 3, 2, "recovered"),
        record(2, plain[4:5], 3, 0, "recovered"),
        record(3, plain[5:9], 3, 3, "bonus"),
        record(4, plain[9:12], 2, 2, "bonus", "length"),
    )
    assert oracle.asked == [3, 3, 3, 2]


def test_a_drafter_may_draft_less_than_asked(stack, plain):
    oracle = Oracle(stack, plain, hits=[9], most=1)
    row = decode(Decoder(stack, oracle, None), num_draft_tokens=3, max_new_tokens=5)
    assert row.token_ids == plain[:5]
    assert [len(r.token_ids) for r in row.rounds] == [1, 2, 2]


@pytest.mark.parametrize("hits", [(0, 1), (0, 3), (1, 3), (3, 3)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_positions_are_what_was_decoded_and_what_was_rejected(stack, plain, hits, k):
    row = decode(Decoder(stack, Oracle(stack, plain, hits=hits), None), num_draft_tokens=k)
    rejected = sum(r.num_draft_tokens - r.num_accepted_tokens for r in row.rounds)
    assert sum(r.positions for r in row.rounds) == len(PROMPT) + LIMIT - 1 + rejected


@pytest.mark.parametrize("plan", PLANS)
def test_layer_0_sees_each_position_as_often_as_rounds_say(stack, plan, monkeypatch):
    """Counted where layers run; the last plan does not share layer 0 with verify."""
    seen = count_positions_through_layer_0(stack, monkeypatch)
    row = decode(self_drafting(stack, plan))
    assert len(seen) == sum(r.positions for r in row.rounds)


def count_positions_through_layer_0(stack, monkeypatch) -> list[int]:
    seen, drive = [], stack._drive

    def counting(hidden, layers, layout):
        layers = tuple(layers)
        if 0 in layers:
            seen.extend(range(layout.num_tokens))
        return drive(hidden, layers, layout)

    monkeypatch.setattr(stack, "_drive", counting)
    return seen


@pytest.mark.parametrize("end", range(LIMIT))
@pytest.mark.parametrize("hits", [0, 2, 9])
def test_an_end_of_sequence_inside_a_block_cuts_it(stack, plain, end, hits):
    eos_ids = frozenset([plain[end]])
    batch = Decoder(stack, Oracle(stack, plain, hits=[hits]), None)
    row = decode(batch, eos_ids=eos_ids)
    expected = plain[: plain.index(plain[end]) + 1]
    assert row.token_ids == expected
    assert row.finish_reason == "stop"
    assert batch.cache.lengths[0] == row.length == len(PROMPT) + len(expected) - 1
    last = row.rounds[-1]
    assert last.num_accepted_tokens <= len(last.token_ids) == len(last.origins)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("plan", [None, *PLANS])
def test_max_new_tokens_is_exact(stack, plain, limit, plan):
    batch = self_drafting(stack, plan) if plan else Decoder(stack, Oracle(stack, plain, [9]), None)
    row = decode(batch, max_new_tokens=limit)
    assert row.token_ids == plain[:limit]
    assert row.finish_reason == "length"
    assert batch.cache.lengths[0] == row.length == len(PROMPT) + limit - 1


def test_stop_strings_inside_a_block_cut_it(stack, plain, tokenizer):
    """Every piece of the text as a stop: inside tokens, across tokens and across rounds."""
    text = tokenizer.decode(plain, skip_special_tokens=True)
    pieces = {text[i : i + n] for i in range(len(text)) for n in (1, 3)} - {""}
    assert len(pieces) > 15
    for stop in sorted(pieces):
        oracle = Oracle(stack, plain, hits=[9, 1])
        row = decode(Decoder(stack, oracle, None), stream=TextStream(tokenizer, [stop]))
        slow = decode(Decoder(stack, None, None), stream=TextStream(tokenizer, [stop]))
        assert row.token_ids == slow.token_ids == plain[: len(row.token_ids)]
        assert row.finish_reason == slow.finish_reason
        written = "".join(r.text for r in row.rounds)
        assert written == "".join(r.text for r in slow.rounds)
        assert (text.startswith(written + stop), row.finish_reason) == (True, "stop")
        assert row.length == slow.length


def test_a_round_that_is_interrupted_while_rows_are_given_it_goes_no_further(stack, monkeypatch):
    """Some rows have it, one in part: what they would emit next is not the model's."""
    batch = Decoder(stack, None, None)
    first, second = join(batch), join(batch, PROMPT[:7])
    batch.step()
    interrupted = Interruption(batch.cache.commit, 0, KeyboardInterrupt)
    with monkeypatch.context() as patched:
        patched.setattr(batch.cache, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    with pytest.raises(RuntimeError, match="take them out, and add their prompts to another"):
        batch.step()
    assert [len(row.token_ids) for row in (first, second)] == [1, 1]
    for row in (first, second):
        batch.leave(row.id)
