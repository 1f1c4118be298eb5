import math

import pytest

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
        ("top_p", 1.5, "finite and between 0 and 1"),
        ("min_p", 1.01, "finite and between 0 and 1"),
        ("top_k", -1, "at least 0"),
        ("seed", -1, f"between 0 and {MAX_SEED}"),
        ("seed", MAX_SEED + 1, f"between 0 and {MAX_SEED}"),
    ],
)
def test_values_out_of_range(name, value, rule):
    with pytest.raises(ValueError, match=f"^{name} must be {rule}, got {value}$"):
        SamplingParams(**{name: value})


def test_top_p_of_nothing_says_what_to_do_instead():
    with pytest.raises(ValueError, match=r"top_p must be above 0 .* got 0: use temperature=0\.0"):
        SamplingParams(top_p=0.0)


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
