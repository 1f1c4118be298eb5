"""What the tests share: models and wrappers are made once, hypothesis is reproducible."""

import functools
import gc
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from device_rounds import EXIT, FIRST_SLOTS, PROMPTS, decode, decoder_of, spec
from hypothesis import settings
from optional import needed
from toys import PLANS, VOCAB_SIZE, make_model, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import layerskip.exactness
import layerskip.model
from layerskip import SelfSpeculativeLM
from layerskip.exactness import Exactness, probe
from layerskip.grammar_xgrammar import XGrammarBackend
from layerskip.graphs import RepeatingRecorder
from layerskip.model import DecoderStack, pack_model
from layerskip.packed import PackedStack
from layerskip.workbench import Workbench

transformers.logging.set_verbosity_error()
# Examples are the same in every run: a test that fails here fails at the next desk too.
settings.register_profile("layerskip", deadline=None, derandomize=True, database=None)
settings.load_profile("layerskip")


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked ``one_in(n)`` those run whose place in the list has
    digits, in base n, that sum up to a multiple of n: one of n, and of parameters with n values
    each pair. The others are slow. With ``one_in(n, others=1)`` it is the next case of each n."""
    for _, cases in itertools.groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        for place, item in enumerate(cases):
            if marker := item.get_closest_marker("one_in"):
                (base,), others = marker.args, marker.kwargs.get("others", 0)
                if (_sum_of_digits(place, base) - others) % base:
                    item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no collection of garbage has to look at it."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries would find it leaked


def _sum_of_digits(number: int, base: int) -> int:
    return number and number % base + _sum_of_digits(number // base, base)


@pytest.fixture(scope="session", autouse=True)
def processor() -> Iterator[None]:
    """What a test finds must not hang on the machine: 16-bit products are never emulated, but for
    the tests that say so (tests/test_bits.py)."""
    with mock.patch("layerskip.exactness.emulates", return_value=False):
        yield


@pytest.fixture(scope="module", autouse=True)
def brief(request: pytest.FixtureRequest) -> Iterator[None]:
    """Quick cost tables of toys take as few rounds as they may: hundreds of tests make one."""
    if request.module.__name__ == "test_profiling":
        yield
        return
    with mock.patch("layerskip.profiling.QUICK_SECONDS", 0.02):
        yield


@pytest.fixture(scope="module", autouse=True)
def probed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bits of a model are probed for its first wrapper and known for the others, which are many.
    Not in the tests of the probe, which run with all threads."""
    if request.module.__name__ in ("test_bits", "test_model"):
        yield
        return
    with mock.patch.object(layerskip.model, "probe", probed_once):
        yield


def probed_once(stack: DecoderStack) -> Exactness:
    """What ``probe`` says, kept with the weights, until they or what surrounds them change."""
    modules = list(stack.twin.modules())
    hooks = [m._forward_hooks.keys() | m._forward_pre_hooks.keys() for m in modules]
    weights = list(stack.twin.parameters())
    if any(w.is_inference() for w in weights):  # nothing counts their changes
        return probe(stack)
    now = (
        type(stack),
        type(stack._forward),
        torch.get_num_threads(),
        layerskip.exactness.emulates(stack.device, stack.dtype),
        tuple(map(type, modules)),
        tuple(map(len, hooks)),
        tuple((id(w), w._version, w.dtype) for w in weights),
    )
    known = weights[0].__dict__.setdefault("probed", {})
    if now not in known:
        known[now] = probe(stack)
    stack.exactness = known[now]
    return known[now]


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
