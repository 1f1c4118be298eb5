"""What the tests share: models and wrappers are made once, hypothesis is reproducible."""

import functools
import gc
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
from device_rounds import EXIT, FIRST_SLOTS, PROMPTS, decode, decoder_of, spec
from hypothesis import settings
from known import agreed_once, measured_once, probed_once
from optional import needed
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import layerskip.model
from layerskip import SelfSpeculativeLM, pass_sizes
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.graphs import RepeatingRecorder
from layerskip.model import pack_model
from layerskip.packed import PackedStack
from layerskip.workbench import Workbench

PROOFS = (pass_sizes.attention_agrees, pass_sizes.rows_agree, pass_sizes.small_agree)

transformers.logging.set_verbosity_error()
# Examples are the same in every run: a test that fails here fails at the next desk too.
settings.register_profile("layerskip", deadline=None, derandomize=True, database=None)
settings.load_profile("layerskip")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Of the cases of a test that is marked ``one_in(n)`` those run whose place in the list has
    digits, in base n, that sum up to a multiple of n: one of n, and of parameters with n values
    each pair. The others are slow. With ``one_in(n, others=1)`` it is the next case of each n. The
    list is of all its cases, also where pytest was given the ids of some."""
    cases = yield
    for place, case in enumerate(cases if isinstance(cases, list) else []):
        if marker := case.get_closest_marker("one_in"):
            (base,), others = marker.args, marker.kwargs.get("others", 0)
            if (_sum_of_digits(place, base) - others) % base:
                case.add_marker(pytest.mark.slow)
    return cases


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no collection of garbage has to look at it."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries would find it leaked


def _sum_of_digits(number: int, base: int) -> int:
    return number and number % base + _sum_of_digits(number // base, base)


@pytest.fixture(scope="session", autouse=True)
def processor() -> Iterator[None]:
    """What a test finds must not hang on the machine: 16-bit products are never emulated, and
    weights of wrapped models are torch's to multiply by, but for the tests that say so
    (tests/test_bits.py, tests/test_blocks.py)."""
    with (
        mock.patch("layerskip.exactness.emulates", return_value=False),
        mock.patch("layerskip.dense.read_in_place", return_value=False),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def brief(request: pytest.FixtureRequest) -> Iterator[None]:
    """Quick cost tables of toys take as few rounds as they may, and are measured for the first
    wrapper of a model and known for the others: hundreds of tests need one."""
    if request.module.__name__ == "test_profiling":
        yield
        return
    with (
        mock.patch("layerskip.profiling.QUICK_SECONDS", 0.02),
        mock.patch("layerskip.profiling.measure_cost", measured_once),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def probed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bits of a model are probed, and sizes of its passes proven, for its first wrapper, and known
    for the others, which are many.
    Not in the tests of the probe, which run with all threads."""
    if request.module.__name__ in ("test_bits", "test_model"):
        yield
        return
    with (
        mock.patch.object(layerskip.model, "probe", probed_once),
        mock.patch.multiple(pass_sizes, **{f.__name__: agreed_once(f) for f in PROOFS}),
    ):
        yield


@pytest.fixture(scope="session")
def toy() -> Callable[..., PreTrainedModel]:
    """``toy(family, dtype, shape)``: a model that no test may change."""
    return functools.cache(make_model)


@pytest.fixture(scope="session")
def wrap(toy: Callable[..., PreTrainedModel]) -> Callable[..., SelfSpeculativeLM]:
    """``wrap(plan_name, family, dtype, shape)``: that model wrapped, without a tokenizer."""

    @functools.cache
    def build(plan: str | None = "exit", *model: str) -> SelfSpeculativeLM:
        # Look-ups have tests of their own; without them every pass can be counted.
        plans = PLANS[plan] if plan else None
        return SelfSpeculativeLM(
            toy(*model), None, plans, num_draft_tokens=4 if plan else 0, lookup=False
        )

    return build


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def talking(
    toy: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> SelfSpeculativeLM:
    """A wrapper with a tokenizer: text in, text out."""
    return SelfSpeculativeLM(toy(), tokenizer, PLANS["exit"], num_draft_tokens=4)


@pytest.fixture(scope="session")
def ending(tokenizer: PreTrainedTokenizerFast) -> SelfSpeculativeLM:
    """A toy whose end of sequence is the tokenizer's ``</s>``, id 1."""
    model = make_model(eos_token_id=1)
    return SelfSpeculativeLM(model, tokenizer, PLANS["exit"], num_draft_tokens=3)


@pytest.fixture(scope="session")
def backend(tokenizer: PreTrainedTokenizerFast) -> XGrammarBackend:
    """Grammars over the tokenizer's vocabulary."""
    needed("xgrammar")
    return XGrammarBackend(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with tokenizer and plan: exit 2, 3 draft tokens."""
    path = tmp_path_factory.mktemp("toy")
    make_model(dtype="bfloat16").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    PLANS["exit"].save(path / "layerskip.json")
    content = json.loads((path / "layerskip.json").read_text("utf-8")) | {"num_draft_tokens": 3}
    (path / "layerskip.json").write_text(json.dumps(content), encoding="utf-8")
    return path


# Of the tests of rounds that the device runs (device_rounds.py).


@pytest.fixture(scope="session")
def stack() -> PackedStack:
    model = make_model()
    pack_model(model)
    return PackedStack(model)


@pytest.fixture(scope="session")
def bench(stack: PackedStack) -> Workbench:
    """Shared, so that few rounds are recorded, and each decoder finds what others left."""
    return Workbench(stack, EXIT, RepeatingRecorder)


@pytest.fixture(scope="session")
def text(stack: PackedStack) -> tuple[int, ...]:
    """Plain greedy tokens after the first prompt."""
    return decode(decoder_of(stack), spec(PROMPTS[0], k=0))[0].token_ids


@pytest.fixture
def short_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few slots, which a toy's texts can outgrow."""
    monkeypatch.setattr("layerskip.seats.FIRST_SLOTS", FIRST_SLOTS)
