import copy
import dataclasses
import json
import math
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip import SamplingParams
from layerskip.params import MAX_SEED


def test_the_default_is_greedy():
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 1},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": MAX_SEED},
    ],
)
def test_borders_are_allowed(settings):
    params = SamplingParams(**settings)
    assert {name: getattr(params, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -0.1, "finite and at least 0"),
        ("temperature", math.nan, "finite and at least 0"),
        ("temperature", math.inf, "finite and at least 0"),
        ("top_p", -0.5, "finite and between 0 and 1"),
        ("top_p", 1.01, "finite and between 0 and 1"),
        ("min_p", 1.01, "finite and between 0 and 1"),
        ("top_k", -1, "at least 0"),
        ("seed", -1, f"between 0 and {MAX_SEED}"),
        ("seed", MAX_SEED + 1, f"between 0 and {MAX_SEED}"),
    ],
)
def test_values_out_of_range(name, value, rule):
    with pytest.raises(ValueError, match=f"^{name} must be {rule}, got {value}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("temperature", "hot", "a number"),
        ("temperature", None, "a number"),
        ("temperature", True, "a number"),
        ("top_p", [0.9], "a number"),
        ("top_k", 1.0, "an int"),
        ("top_k", True, "an int"),
        ("seed", 1.5, "an int"),
        ("seed", "7", "an int"),
    ],
)
def test_values_of_another_type(name, value, kind):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} must be {kind}, got {value!r} ({type(value).__name__})"


def test_a_misspelt_name_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize(
    "given",
    [
        {5: -1, 2: 0.5},
        {2: 0.5, 5: -1.0},
        [(5, -1.0), (2, 0.5)],
        ([2, 0.5], [5, -1]),
        ((2, 0.5), (5, -1)),
    ],
)
def test_a_bias_is_one_value_however_it_is_written(given):
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((2, 0.5), (5, -1.0))
    assert params == SamplingParams(logit_bias={2: 0.5, 5: -1.0})
    assert hash(params) == hash(SamplingParams(logit_bias={5: -1.0, 2: 0.5}))


EVERYTHING = SamplingParams(
    temperature=0.7,
    seed=3,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=2,
    no_repeat_ngram_size=3,
    logit_bias={4: 1.5},
    bad_words_ids=[[1, 2], (3,)],
    min_new_tokens=2,
    forced_token_ids=[8, 9],
)


def test_lists_are_kept_as_tuples_that_the_caller_cannot_change():
    words = [[1, 2], [3]]
    params = SamplingParams(bad_words_ids=words, forced_token_ids=words[0])
    words[0].append(7)
    assert params.bad_words_ids == ((1, 2), (3,))
    assert params.forced_token_ids == (1, 2)


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(lambda p: pickle.loads(pickle.dumps(p)), id="pickle"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(dataclasses.replace, id="replace"),
        pytest.param(lambda p: SamplingParams(**dataclasses.asdict(p)), id="asdict"),
        pytest.param(lambda p: SamplingParams(**json.loads(json.dumps(vars(p)))), id="json"),
        pytest.param(lambda p: eval(repr(p)), id="repr"),
    ],
)
def test_settings_travel(again):
    copied = again(EVERYTHING)
    assert copied == EVERYTHING
    assert hash(copied) == hash(EVERYTHING)
    assert copied != dataclasses.replace(EVERYTHING, min_new_tokens=3)


def test_ids_named_anywhere_are_known():
    assert EVERYTHING.token_ids == {1, 2, 3, 4, 8, 9}
    assert SamplingParams().token_ids == frozenset()


@pytest.mark.parametrize(
    ("name", "value", "error", "sentence"),
    [
        (
            "temperature",
            1e-7,
            ValueError,
            " must be at least 1e-06, got 1e-07: use temperature=0.0",
        ),
        ("top_p", 1e-9, ValueError, " must be at least 1e-06, got 1e-09: use temperature=0.0"),
        ("top_p", 1e-300, ValueError, " must be at least 1e-06, got 1e-300: use temperature=0.0"),
        ("top_p", 0.0, ValueError, " must be above 0 and at most 1, got 0: use temperature=0.0"),
        ("temperature", 10**400, ValueError, " must be finite and at least 0, got 10*"),
        ("temperature", 1e39, ValueError, r" must be at most 1e\+30, got 1e\+39"),
        ("top_p", -(10**400), ValueError, " must be finite and between 0 and 1, got -10*"),
        ("repetition_penalty", 0, ValueError, r" must be finite and between .* got 0"),
        ("repetition_penalty", math.inf, ValueError, " must be finite and between .* got inf"),
        ("presence_penalty", 2.1, ValueError, " must be finite and between -2 and 2, got 2.1"),
        ("frequency_penalty", math.nan, ValueError, " must be finite and .* got nan"),
        ("frequency_penalty", "1", TypeError, r" must be a number, got '1' \(str\)"),
        ("no_repeat_ngram_size", -1, ValueError, " must be at least 0, got -1"),
        ("min_new_tokens", 1.0, TypeError, r" must be an int, got 1.0 \(float\)"),
        ("logit_bias", {3: 1e31}, ValueError, r" of token 3 must be finite .* got 1e\+31"),
        ("logit_bias", {3: -math.inf}, ValueError, " of token 3 must be finite .* got -inf"),
        ("logit_bias", {3: None}, TypeError, " of token 3 must be a number, got None .*"),
        ("logit_bias", {-3: 1.0}, ValueError, "a token id of  must be at least 0, got -3"),
        ("logit_bias", {"a": 1.0}, TypeError, "a token id of  must be an int, got 'a' .*"),
        ("logit_bias", [(1, 2), (1, 3)], ValueError, " must name each token id once, got .*"),
        ("logit_bias", 5, TypeError, " must map token ids to numbers, got 5"),
        ("logit_bias", "ab", TypeError, " must map token ids to numbers, got 'ab'"),
        ("logit_bias", [1, 2], TypeError, r" must map token ids to numbers, got \[1, 2\]"),
        ("bad_words_ids", 3, TypeError, " must be a list of lists of token ids, got 3"),
        ("bad_words_ids", [3], TypeError, "each of  must be a list of token ids, got 3"),
        ("bad_words_ids", ["ab"], TypeError, "each of  must be a list of token ids, got 'ab'"),
        ("bad_words_ids", [[1], []], ValueError, " has an empty sequence; give at least .*"),
        ("bad_words_ids", [[True]], TypeError, "a token id of each of  must be an int, got .*"),
        ("forced_token_ids", {3, 1}, TypeError, " must be a list of token ids, got .*"),
        ("forced_token_ids", b"ab", TypeError, " must be a list of token ids, got b'ab'"),
        ("forced_token_ids", 3, TypeError, " must be a list of token ids, got 3"),
        ("forced_token_ids", [-1], ValueError, "a token id of  must be at least 0, got -1"),
    ],
)
def test_bad_rules_are_one_sentence(name, value, error, sentence):
    with pytest.raises(error) as caught:
        SamplingParams(**{name: value})
    assert re.fullmatch(sentence, str(caught.value).replace(name, "", 1))


SCALARS = [st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary()]
ANYTHING = st.recursive(
    st.one_of(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.integers(-2, 9) | st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=250)
@given(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), ANYTHING)
def test_any_value_is_taken_or_refused_in_one_sentence(name, value):
    try:
        params = SamplingParams(**{name: value})
    except (TypeError, ValueError) as error:
        sentence = str(error)
    else:
        assert {params: 1}[pickle.loads(pickle.dumps(params))] == 1
        return
    assert name in sentence
    assert len(sentence.splitlines()) == 1
