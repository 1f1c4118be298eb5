"""Anything at all is given to the public API. It answers what plain decoding answers, or says in
one sentence of its own what is wrong; and it leaves the model as it was."""

import functools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from snapshots import snapshot
from toys import NUM_LAYERS, PLANS, VOCAB_SIZE, make_model, make_tokenizer
from transformers import PreTrainedModel

import layerskip
from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM

PACKAGE = str(Path(layerskip.__file__).parent)
LONGEST = 12

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([10**400, -(10**30)])
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda some: (
        st.lists(some, max_size=3)
        | st.lists(some, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), some, max_size=2)
    ),
    max_leaves=4,
)
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
TEXT = st.text(min_size=1, max_size=8)
PROMPT = IDS | TEXT
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.5, 1e6]),
    top_k=st.sampled_from([0, 1, 5, 10**6]),
    top_p=st.sampled_from([1e-6, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 9),
)
LIMIT = st.integers(1, LONGEST)
NUM_DRAFT_TOKENS = st.integers(0, 6)
COUNTS = st.integers(1, 2)
STOP = st.lists(TEXT, max_size=2) | TEXT


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is expected, and now and then something else."""
    return st.integers(0, 7).flatmap(lambda n: ANYTHING if n == 0 else good)


@st.composite
def spoiled(draw: st.DrawFn, good: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    """Arguments, in half of the cases with one of them spoiled."""
    arguments = {name: draw(strategy) for name, strategy in good.items()}
    if draw(st.booleans()):
        arguments[draw(st.sampled_from(sorted(good)))] = draw(ANYTHING.filter(is_small))
    return arguments


def is_small(value: object) -> bool:
    """Whether a number of tokens or sequences could be this in a test."""
    return not isinstance(value, int) or value < LONGEST


def many(default: int, slow: int) -> pytest.MarkDecorator:
    """How many examples: few in every run, more in a slow one."""
    return pytest.mark.parametrize("count", [default, pytest.param(slow, marks=pytest.mark.slow)])


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def answer(call: Callable[[], Any]) -> Any:
    """What ``call`` gives, or None if it raised a sentence of ours."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        caught = error
    raised = traceback.extract_tb(caught.__traceback__)[-1]
    ours = raised.filename.startswith(PACKAGE) and (raised.line or "").startswith("raise ")
    assert ours, f"{raised.filename}:{raised.lineno} {caught!r}"
    assert str(caught)
    assert "\n" not in str(caught)
    return None


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    """A model of these tests alone, which is the same after each of them."""
    return make_model()


@pytest.fixture(scope="module")
def lm(model: PreTrainedModel) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(model, make_tokenizer(), PLANS["skipping"], num_draft_tokens=4)


@pytest.fixture(autouse=True)
def _untouched(model: PreTrainedModel, lm: SelfSpeculativeLM) -> Iterator[None]:
    before = snapshot(model)
    before.pop("generators")  # hypothesis sets seeds
    yield
    after = snapshot(model)
    after.pop("generators")
    assert {k for k, v in after.items() if v != before[k]} == set()


@many(60, 3000)
def test_values(tmp_path, count):
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        names = st.sampled_from(["temperature", "top_k", "top_p", "min_p", "seed"])
        extremes = st.sampled_from([10**400, -(10**30), 1e-300, math.nan, math.inf])
        numbers = extremes | st.floats() | st.integers() | ANYTHING
        params = data.draw(st.dictionaries(names, numbers, max_size=3))
        made = answer(lambda: SamplingParams(**params))
        if made is not None:
            assert {n: getattr(made, n) for n in params} == params
            assert math.isfinite(made.temperature)
            assert 0 < made.top_p <= 1
        depth = data.draw(mostly(st.integers(1, 9)).filter(is_small))
        layers = data.draw(ANYTHING)
        builders = (
            lambda: DraftPlan(depth, layers),
            lambda: DraftPlan.exiting(num_layers=depth, exit_layer=layers),
            lambda: DraftPlan.skipping(num_layers=depth, skipped=layers),
        )
        for plan in filter(None, map(answer, builders)):
            assert plan.layers == tuple(sorted(set(plan.layers) & set(range(depth))))
            assert plan.layers
            plan.save(tmp_path / "plan.json")
            assert DraftPlan.load(tmp_path / "plan.json") == plan
        content = st.binary(max_size=20) | st.sampled_from(
            [b'{"version": %s}', b'{"version": 1, "num_layers": 3, "draft_layers": %s}']
        ).flatmap(lambda text: st.binary(max_size=6).map(lambda part: text.replace(b"%s", part)))
        (tmp_path / "fuzzed.json").write_bytes(data.draw(content))
        answer(lambda: DraftPlan.load(tmp_path / "fuzzed.json"))

    check()


@many(20, 300)
def test_the_constructor(model, count):
    tokenizer, plain = make_tokenizer(), SelfSpeculativeLM(model, num_draft_tokens=0)
    plans = st.none() | st.sampled_from([*PLANS.values(), DraftPlan(NUM_LAYERS + 1, (0,))])

    arguments = {
        "model": st.just(model),
        "tokenizer": st.none() | st.just(tokenizer),
        "plan": plans,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
    }

    @examples(count)
    @given(spoiled(arguments), IDS)
    def check(arguments: dict[str, Any], ids: list[int]) -> None:
        made = answer(lambda: SelfSpeculativeLM(**arguments))
        if made is not None:
            out = made.generate(ids, max_new_tokens=LONGEST)
            assert out.token_ids == plain_text(plain, ids, LONGEST)

    check()


@many(60, 1500)
def test_requests(lm, count):
    message = st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": TEXT})
    common = {
        "max_new_tokens": LIMIT,
        "sampling": st.none() | SAMPLING,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "stop": STOP,
        "ignore_eos": st.booleans(),
        "num_return_sequences": COUNTS,
    }
    prompts = mostly(PROMPT | st.lists(mostly(PROMPT), min_size=1, max_size=3))
    chats = mostly(st.lists(mostly(message), min_size=1, max_size=2))
    asked = {"prompts": prompts}, {"messages": chats}

    @examples(count)
    @given(st.sampled_from(asked).flatmap(lambda what: spoiled(what | common)))
    def check(given: dict[str, Any]) -> None:
        made = answer(lambda: lm.generate(**given))
        sequences = given.pop("num_return_sequences")
        single = {"prompt" if name == "prompts" else name: v for name, v in given.items()}
        streamed = answer(lambda: list(lm.stream(**single)))
        if made is None:
            return
        outputs = made if isinstance(made, list) else [made]
        seed = outputs[0].seed
        if seed is not None:
            given = given | {"sampling": replace(given["sampling"], seed=seed)}
        plainly = given | {"num_draft_tokens": 0, "num_return_sequences": sequences}
        plain = lm.generate(**plainly)
        plain = plain if isinstance(plain, list) else [plain]
        fields = ("token_ids", "text", "finish_reason", "seed")
        for out, expected in zip(outputs, plain, strict=True):
            assert [getattr(out, f) for f in fields] == [getattr(expected, f) for f in fields]
        if streamed is not None:
            assert "".join(step.text for step in streamed) == outputs[0].text

    check()


@functools.lru_cache(maxsize=4096)
def plain_of(
    lm: SelfSpeculativeLM, ids: tuple[int, ...], limit: int, sampling: SamplingParams | None
) -> tuple[int, ...]:
    return lm.generate(
        ids, max_new_tokens=limit, num_draft_tokens=0, sampling=sampling, ignore_eos=True
    ).token_ids


def plain_text(
    lm: SelfSpeculativeLM, ids: list[int], limit: int, sampling: SamplingParams | None = None
) -> tuple[int, ...]:
    """What plain decoding gives: the one answer that is right."""
    return plain_of(lm, tuple(ids), limit, sampling)


class Rows(RuleBasedStateMachine):
    """A batch to which rows come, good and bad, and from which they go at any time."""

    lm: SelfSpeculativeLM

    def __init__(self) -> None:
        super().__init__()
        self.batch = self.lm.open_batch(max_new_tokens=LONGEST, ignore_eos=True)
        self.rows: dict[int, tuple[list[int], int, SamplingParams | None]] = {}

    @rule(ids=IDS, k=NUM_DRAFT_TOKENS, limit=LIMIT, sampling=st.none() | SAMPLING)
    def add(self, ids: list[int], k: int, limit: int, sampling: SamplingParams | None) -> None:
        row = self.batch.add(ids, num_draft_tokens=k, max_new_tokens=limit, sampling=sampling)
        assert row not in self.rows
        self.rows[row] = (ids, limit, sampling)

    @rule(
        prompt=ANYTHING,
        settings=st.dictionaries(
            st.sampled_from(["max_new_tokens", "num_draft_tokens", "sampling", "messages"]),
            ANYTHING,
        ),
    )
    def add_anything(self, prompt: Any, settings: dict[str, Any]) -> None:
        before = self.batch.unfinished
        row = answer(lambda: self.batch.add(prompt, **settings))
        if row is not None:
            self.batch.remove(row)
        assert self.batch.unfinished == before

    @rule()
    def step(self) -> None:
        going = self.batch.unfinished
        assert sorted(record.row for record in self.batch.step()) == sorted(going)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        ids, limit, sampling = self.rows.pop(row)
        finished = row not in self.batch.unfinished
        out = self.batch.remove(row)
        expected = plain_text(self.lm, ids, limit, sampling)
        assert out.token_ids == (expected if finished else expected[: len(out.token_ids)])
        assert (out.finish_reason == "length") is finished

    @rule(row=ANYTHING)
    def remove_anything(self, row: Any) -> None:
        if type(row) is not int or row not in self.rows:
            assert answer(lambda: self.batch.remove(row)) is None

    def teardown(self) -> None:
        while self.batch.unfinished:
            self.batch.step()
        for row, asked in self.rows.items():
            assert self.batch.remove(row).token_ids == plain_text(self.lm, *asked)


@many(12, 300)
def test_rows_in_any_order(lm, count):
    machine = type("RowsOfToy", (Rows,), {"lm": lm})
    run_state_machine_as_test(machine, settings=settings(examples(count), stateful_step_count=15))
