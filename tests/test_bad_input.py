"""Each mistake gets one clear sentence, and leaves nothing behind."""

import pytest

from layerskip import SamplingParams

LARGE = 10**400
SAMPLING = [
    ({"temperature": -0.5}, ValueError, "temperature must be finite and at least 0, got -0.5"),
    ({"temperature": float("nan")}, ValueError, "temperature must be finite and at least 0, got n"),
    ({"temperature": float("inf")}, ValueError, "temperature must be finite and at least 0, got i"),
    ({"temperature": LARGE}, ValueError, "temperature must be finite and at least 0, got 1000"),
    ({"temperature": 1e-7}, ValueError, "temperature must be at least 1e-06, got 1e-07: use tem"),
    ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0: use temperature=0.0"),
    ({"top_p": 1e-300}, ValueError, "top_p must be at least 1e-06, got 1e-300: use temperature=0."),
    ({"top_p": 1.01}, ValueError, "top_p must be finite and between 0 and 1, got 1.01"),
    ({"top_p": -LARGE}, ValueError, "top_p must be finite and between 0 and 1, got -1000"),
]


def check_sentence(call, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("params", "error", "sentence"), SAMPLING)
def test_sampling(params, error, sentence):
    check_sentence(lambda: SamplingParams(**params), error, sentence)


def test_the_smallest_settings_leave_the_likeliest_token(talking):
    greedy = talking.generate("a", max_new_tokens=8).token_ids
    for params in ({"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-6}):
        sampled = talking.generate("a", max_new_tokens=8, sampling=SamplingParams(seed=1, **params))
        assert sampled.token_ids == greedy


@pytest.mark.parametrize("row", [[0], True, 0.0, None, "0"])
def test_rows_are_named_by_their_number(talking, row):
    batch = talking.open_batch()
    rows = [batch.add("a"), batch.add("b")]
    check_sentence(lambda: batch.remove(row), TypeError, f"row must be an int, got {row!r}")
    assert batch.unfinished == rows
