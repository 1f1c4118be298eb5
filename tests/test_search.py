"""Plan search: replayed rounds against real ones, dynamic programming against all subsets, what the
search concludes, and going on after an interruption. Costs are given, so that nothing is timed."""

import functools
import json
import math
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from toys import MAX_POSITIONS, NUM_LAYERS, make_model, make_tokenizer, random_ids

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM, search, timing, trimming
from layerskip.cache import Segment
from layerskip.calibration import KnownTexts, Text, texts_to_draft_along, walk
from layerskip.cli import main
from layerskip.cost import CostTable, Curve
from layerskip.decode import Decoder
from layerskip.drafting import EarlyExitDrafter
from layerskip.journal import Journal
from layerskip.model import pack_model
from layerskip.packed import PackedStack
from layerskip.params import MAX_SEED
from layerskip.plan import PlanFile
from layerskip.prediction import Counts, count, draft_costs, predict
from layerskip.prompts import Example
from layerskip.row import Row, RowSpec
from layerskip.sampling import Sampler
from layerskip.search import SearchSettings
from layerskip.skipping import closest_skip_sets, neighbours
from layerskip.teacher_forced import teacher_forced

SAMPLED = SamplingParams(temperature=0.8, seed=3)
EXAMPLES = [
    Example("def first(argument):\n", "    return the argument\n    and more of it\n"),
    Example("the rain in Spain stays", " mainly in the plain, as rain in Spain does\n"),
]
SETTINGS = SearchSettings(max_texts=2, max_new_tokens=16, max_draft_tokens=4, refinements=6)
COOLER = replace(SETTINGS.sampling, temperature=0.5)
HEAD, LAYER = 0.25, 1.0


def given_cost(stack, plan, **settings) -> CostTable:
    """A table of a machine where every layer takes one second, whatever the rows."""

    def curve(seconds: float) -> Curve:
        return Curve((1, 64), (0,), ((seconds, seconds),))

    ids = settings.get("draft_vocabulary")
    share = 1.0 if ids is None else len(ids) / stack.vocab_size
    layers, head = curve(LAYER * len(plan.layers)), curve(HEAD * share)
    whole = curve(LAYER * stack.num_layers + HEAD)
    return CostTable(layers, head, whole, 0.0, 1, {"machine": "given"})


@pytest.fixture
def given(monkeypatch) -> Callable[[float], None]:
    """``given(speedup)``: costs as above, and what timing against plain decoding shows."""

    def install(speedup: float) -> None:
        monkeypatch.setattr(search, "measure_cost", given_cost)
        monkeypatch.setattr(trimming, "measure_cost", given_cost)
        took = [[speedup, 1.1, 1.0]] * 3
        monkeypatch.setattr(trimming, "time_in_turn", lambda *_, **__: took)
        monkeypatch.setattr(search, "time_against_plain", lambda *_, **__: [speedup] * 3)

    return install


@functools.cache
def unquiet(*identity: int) -> SelfSpeculativeLM:
    """A toy whose layers all matter, but for those that do nothing."""
    model = make_model()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(5)
            layer.mlp.down_proj.weight.mul_(5)
        for i in identity:
            model.model.layers[i].self_attn.o_proj.weight.zero_()
            model.model.layers[i].mlp.down_proj.weight.zero_()
    return SelfSpeculativeLM(model, make_tokenizer())


def accepted(stack, plan, text: Text, sampling, k: int, vocabulary=None) -> list[int]:
    """Accepted tokens of each round of the real decoder that drafted k."""
    head = None if vocabulary is None else stack.head_over(vocabulary)
    decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan, head=head)
    sampler = Sampler(sampling, text.seed, stack.vocab_size)
    limit = len(text.ids) - text.start
    row = decoder.join(RowSpec(text.ids[: text.start], sampler, limit, k))
    while row.finish_reason is None:
        decoder.step()
    assert tuple(row.context) == text.ids
    return [r.num_accepted_tokens for r in row.rounds[1:] if r.num_draft_tokens == k]


PLANS = {
    "exit": DraftPlan(NUM_LAYERS, (0, 1)),
    "skipping": DraftPlan(NUM_LAYERS, (0, 1, 3, 5)),
    "apart": DraftPlan(NUM_LAYERS, (0, 4)),
    "without-layer-0": DraftPlan(NUM_LAYERS, (1, 3)),
}


SOME_IDS = tuple(range(0, 331, 5))


@pytest.mark.parametrize(
    ("sampling", "drafts"),
    [
        (SAMPLED, [("exit", None), ("skipping", None), ("without-layer-0", None)]),
        (SamplingParams(), [("apart", None)]),
        (SAMPLED, [("exit", SOME_IDS), ("skipping", SOME_IDS)]),
        (SamplingParams(), [("apart", SOME_IDS)]),
    ],
    ids=["sampled", "greedy", "sampled-some-ids", "greedy-some-ids"],
)
def test_replayed_rounds_are_those_of_decoding(wrap, sampling, drafts):
    plain, k = wrap(None, "llama", "bfloat16"), 3
    stack = plain.stack
    texts = []
    for i, length in enumerate((9, 25)):  # texts of several lengths in one cache
        prompt = random_ids(length, seed=i)
        own = replace(sampling, seed=i)
        out = plain.generate(prompt, max_new_tokens=12 + 5 * i, sampling=own)
        texts.append(Text((*prompt, *out.token_ids), length, i))
    known_texts = KnownTexts(stack, texts, sampling=sampling)
    for name, ids in drafts:
        plan, vocabulary = PLANS[name], None if ids is None else sorted(ids)
        chains = known_texts.chains(plan, k, vocabulary)
        if vocabulary is not None:
            assert chains != known_texts.chains(plan, k)
        for text, lengths in zip(texts, chains, strict=True):
            real = accepted(stack, plan, text, sampling, k, vocabulary)
            assert walk(lengths, k) == real
            assert len(real) >= 3


def test_a_draft_knows_its_text_up_to_the_slot(wrap):
    texts = [Text(tuple(random_ids(30, seed=i)), 12, i) for i in range(2)]
    known_texts = KnownTexts(wrap().stack, texts, sampling=SAMPLED)
    kept = torch.zeros(331, dtype=torch.bool)
    kept[330] = True
    known = known_texts.groups[0]._known(kept, [1, 0], [20, 13])
    assert [set(row.nonzero()[:, 0].tolist()) for row in known] == [
        {330, *texts[1].ids[:21]},
        {330, *texts[0].ids[:14]},
    ]


def test_plans_leave_the_texts_as_they_were(wrap):
    stack = wrap().stack
    texts = [Text(tuple(random_ids(30, seed=i)), 12, i) for i in range(2)]
    known_texts = KnownTexts(stack, texts, sampling=SAMPLED)
    sets = closest_skip_sets(known_texts)
    first = known_texts.chains(PLANS["apart"], 4)
    assert closest_skip_sets(known_texts) == sets
    known_texts.chains(PLANS["skipping"], 4)
    assert known_texts.chains(PLANS["apart"], 4) == first


def test_all_exits_of_one_pass_are_what_replaying_each_gives(wrap):
    stack = wrap().stack
    texts = [Text(tuple(random_ids(24, seed=i)), 9, i) for i in range(9)]  # two caches
    known_texts = KnownTexts(stack, texts, sampling=SAMPLED)
    for e in (1, 4):
        plan = DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=e)
        replayed = [c for group in known_texts.groups for c in group.chains(plan, 5)]
        assert known_texts.chains(plan, 5) == known_texts.exit_chains(e, 5) == tuple(replayed)


def test_exits_are_accepted_as_often_as_teacher_forcing_says(talking):
    for example in EXAMPLES:
        said = teacher_forced(
            talking, [example], sampling=SAMPLED, exits=range(1, NUM_LAYERS), max_new_tokens=24
        )
        prompt = talking.encode(example.prompt)
        ids = talking.tokenizer(example.prompt + example.continuation)["input_ids"]
        text = Text(tuple(ids[: len(prompt) + 24]), len(prompt) - 1, SAMPLED.seed)
        known_texts = KnownTexts(talking.stack, [text], sampling=SAMPLED)
        assert text.window == said["positions"]
        for e, row in said["exits"].items():
            first = count(known_texts.exit_chains(e, 4), 4).first
            assert first == pytest.approx(row["acceptance_rate"])


def test_texts_are_continuations_or_what_the_model_writes(talking):
    examples = [EXAMPLES[0], Example(EXAMPLES[1].prompt), Example(""), Example("x" * 4000)]
    texts = texts_to_draft_along(talking, examples, sampling=SAMPLED, max_texts=4, max_tokens=12)
    known, own = texts
    whole = talking.tokenizer(EXAMPLES[0].prompt + EXAMPLES[0].continuation)["input_ids"]
    assert known.ids == tuple(whole[: known.start + 12])
    assert (known.seed, own.seed) == (3, 4)
    assert own.window == 11
    sampling = replace(SAMPLED, seed=4)
    out = talking.generate(EXAMPLES[1].prompt, max_new_tokens=12, sampling=sampling)
    assert own.ids[own.start :] == out.token_ids


def test_seeds_of_texts_begin_anew_behind_the_last_one(talking):
    last = replace(SAMPLED, seed=MAX_SEED)
    texts = texts_to_draft_along(talking, EXAMPLES[:3], sampling=last, max_texts=3, max_tokens=12)
    assert [text.seed for text in texts] == [MAX_SEED, 0]


def test_texts_have_to_be_some(talking, wrap):
    with pytest.raises(ValueError, match="no prompt leaves room for three more tokens"):
        texts_to_draft_along(
            talking, [Example("x" * 4000)], sampling=SAMPLED, max_texts=1, max_tokens=9
        )
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        texts_to_draft_along(wrap(), EXAMPLES, sampling=SAMPLED, max_texts=1, max_tokens=9)


def similarities(lm: SelfSpeculativeLM, samples) -> Callable[[DraftPlan], float]:
    """By plan: mean cosine of the draft's hidden state and the full one, over ``samples``."""
    stack, caches = lm.stack, []
    for ids in samples:
        caches.append(stack.new_cache(num_rows=1, num_slots=len(ids)))
        stack.prefill(ids[:-1], caches[-1], 0)

    def last(layers) -> list[torch.Tensor]:
        """Each sample's last slot: a pass writes it in the layers that it runs, and reads no
        other's."""
        states = []
        for ids, cache in zip(samples, caches, strict=True):
            segments = [Segment(0, len(ids) - 1, 1)]
            states.append(stack.run_layers(stack.embed(ids[-1:]), layers, cache, segments)[0])
        return states

    full = last(range(NUM_LAYERS))

    def similarity(plan: DraftPlan) -> float:
        pairs = zip(last(plan.layers), full, strict=True)
        return sum(torch.cosine_similarity(a, b, dim=-1).item() for a, b in pairs) / len(samples)

    return similarity


@pytest.mark.parametrize("identity", [(), (3, 4)], ids=["all-matter", "two-do-nothing"])
def test_skip_sets_come_close_to_the_best_of_all_subsets(identity):
    lm = unquiet(*identity)
    texts = [Text(tuple(random_ids(20, seed=i)), 8, i) for i in range(2)]
    known_texts = KnownTexts(lm.stack, texts, sampling=SAMPLED, samples=2)
    samples = [texts[r].ids[: s + 1] for r, s in known_texts.groups[0].samples]
    assert len(samples) == 4
    with torch.inference_mode():
        found = closest_skip_sets(known_texts)
        assert list(found) == [1, 2, 3, 4, 5]
        similarity = similarities(lm, samples)
        for size, plan in found.items():
            sets = combinations(range(1, NUM_LAYERS), size)
            plans = [DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=s) for s in sets]
            every = {p: similarity(p) for p in plans}
            assert every[plan] > max(every.values()) - 0.03
            assert every[plan] > sorted(every.values())[len(every) // 2] - 1e-6
    if identity:
        assert found[2] == DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=identity)


def test_rounds_are_walked_until_the_text_ends():
    assert walk([2, 0, 5, 5, 1, 0, 3, 2, 1], 3) == [2, 3]
    assert walk([2, 0, 5, 5, 1, 0, 3, 2, 1], 1) == [1, 1, 1, 1]
    assert walk([2, 0], 3) == []
    assert walk([2, 0], 2) == []  # decoding would draft one token less, with room for another
    assert walk([0, 0], 0) == [0, 0]


def test_counts_are_lengths_and_shares():
    counts = count([(2, 0, 5, 5, 1, 0, 3, 2, 1), (0, 3, 1, 0)], 3)
    assert counts.lengths == pytest.approx((1.0, 1 + 5 / 6, 1 + 8 / 5, 1 + 5 / 3))
    assert counts.acceptance == pytest.approx((2 / 3, 1.0, 1 / 2))
    assert counts.first == pytest.approx(9 / 13)
    assert Counts.from_list(json.loads(json.dumps(counts.to_list()))) == counts
    assert len(count([(1, 1, 1)], 8).lengths) == 3  # no text has room for more


def test_the_prediction_is_length_over_cost():
    flat = Curve((1, 64), (0,), ((1.0, 1.0),))
    grown = Curve((1, 3), (0,), ((10.0, 12.0),))
    table = CostTable(flat, flat, grown, 0.0, 1, {})
    assert predict(table, (1.0, 1.8, 2.4), 0) == (2, pytest.approx(2.4 * 10 / (2 * 2 + 12)))
    assert predict(table, (1.0, 1.05, 1.06), 0) == (0, 1.0)


def test_costs_lie_on_a_line_between_one_layer_and_all(wrap):
    stack = wrap().stack
    one, every = (given_cost(stack, DraftPlan(6, tuple(range(n)))) for n in (1, 6))
    slower = replace(  # measured while the machine did something else
        one,
        draft_layers=Curve((1, 64), (0,), ((2.0, 2.0),)),
        verify=Curve((1, 64), (0,), ((12.5, 12.5),)),
    )
    for shallow in (one, slower):
        assert draft_costs(shallow, every, 3, 6).draft_pass(1, 0) == pytest.approx(3 + HEAD)
    assert draft_costs(one, every, 6, 6) == every


def test_neighbours_change_one_layer():
    plan = DraftPlan(5, (0, 2))
    near = list(neighbours(plan, random.Random(0)))
    assert near[0].layers == (0,)
    assert {p.layers for p in near[1:4]} == {(0, 1, 2), (0, 2, 3), (0, 2, 4)}
    assert {p.layers for p in near[4:]} == {(0, 1), (0, 3), (0, 4)}
    assert len(near) == 7
    whole = neighbours(DraftPlan(3, (0, 1)), random.Random(0))
    assert (0, 1, 2) not in {p.layers for p in whole}  # that is no draft


def test_no_plan_pays_for_an_untrained_checkpoint(given):
    given(2.0)
    model = make_model()
    model.apply(model._init_weights)
    # Greedy: at a temperature its law is near to flat, and the noise that target and draft share
    # decides for both.
    greedy = replace(SETTINGS, sampling=SamplingParams())
    result = search.search(SelfSpeculativeLM(model, make_tokenizer()), EXAMPLES, settings=greedy)
    assert result.verdict.startswith("no plan pays: the best, draft layers ")
    assert result.verdict.endswith("1.05 is asked for; speculation is left off")
    assert (result.file.plan, result.file.num_draft_tokens) == (None, 0)
    assert len(result.tried) >= NUM_LAYERS - 1
    assert all(t.measured is None and t.predicted < 1.05 for t in result.tried)


def test_layers_that_do_nothing_are_skipped(given):
    given(1.3)
    result = search.search(unquiet(3, 4), EXAMPLES, settings=SETTINGS)
    best = result.tried[0]
    assert best.plan.layers == (0, 1, 2, 5)
    assert best.counts.lengths == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert best.predicted == pytest.approx(5 / (4 * (4 + HEAD) / (6 + HEAD) + 1))
    assert best.measured == (1.3, 1.3, 1.3)
    file = result.file
    assert (file.plan, file.num_draft_tokens) == (best.plan, "auto")
    assert file.acceptance == (1.0,) * 4
    assert file.cost == given_cost(unquiet().stack, best.plan)
    assert file.fingerprint
    assert file.measurements["chosen"]["draft_layers"] == [0, 1, 2, 5]
    assert "1.3" in result.verdict


def test_what_timing_does_not_confirm_is_left_off(given):
    given(0.97)
    result = search.search(unquiet(3, 4), EXAMPLES, settings=SETTINGS)
    assert result.verdict.endswith("not confirmed, so speculation is left off")
    assert (result.file.plan, result.file.num_draft_tokens) == (None, 0)
    assert result.tried[0].measured == (0.97, 0.97, 0.97)


def test_refinement_finds_what_similarity_misses(given, monkeypatch):
    given(1.3)
    half = {1: DraftPlan.skipping(num_layers=6, skipped=[4])}
    monkeypatch.setattr(search, "closest_skip_sets", lambda *_, **__: half)
    found = {}
    for refinements in (0, 6):
        settings = replace(SETTINGS, sampling=SamplingParams(), refinements=refinements)
        found[refinements] = search.search(unquiet(3, 4), EXAMPLES, settings=settings)
    assert found[0].file.plan == half[1]
    assert found[6].file.plan.layers == (0, 1, 2, 5)
    assert found[6].tried[0].found_by == "refinement"
    assert len(found[0].tried) == NUM_LAYERS < len(found[6].tried) <= NUM_LAYERS + 6


def test_timing_decodes_both_ways_in_turn(talking):
    ticks = iter(range(10_000))
    texts = texts_to_draft_along(talking, EXAMPLES, sampling=SAMPLED, max_texts=2, max_tokens=8)
    plan = DraftPlan(NUM_LAYERS, (0,))
    ratios = timing.time_against_plain(
        talking.stack, plan, 2, texts, sampling=SAMPLED, clock=lambda: float(next(ticks))
    )
    assert ratios == [1.0, 1.0]  # a clock that ticks once a call
    assert next(ticks) == 3 * 2 * 2


def test_each_way_gets_its_own_time_and_head(talking, monkeypatch):
    heads, now = [], [0.0]

    class GivenDecoder:
        """Decodes in one step, in as many seconds as it drafts."""

        def __init__(self, stack, drafter, plan, *, head, bench, num_slots):
            assert bench is None  # no device runs rounds of this stack by itself
            heads.append(head)
            self.prefilled = False

        def join(self, spec):
            assert not spec.tells  # which would take time
            self.row = Row(0, 0, spec, spec.stream)
            return self.row

        def step(self):
            if self.prefilled:
                now[0] += 1.0 + self.row.spec.num_draft_tokens
                self.row.finish_reason = "length"
            self.prefilled = True

    monkeypatch.setattr(timing, "Decoder", GivenDecoder)
    ways = [timing.PLAIN, timing.Way(2), timing.Way(4, talking.stack.head_over([5, 7]))]
    texts = [Text(tuple(random_ids(9, seed=i)), 4, i) for i in range(3)]
    plan = PLANS["exit"]
    took = timing.time_in_turn(
        talking.stack, plan, ways, texts, sampling=SAMPLED, clock=lambda: now[0]
    )
    assert took == [[1.0, 3.0, 5.0]] * 3
    own = [way.head for way in ways]
    assert heads == [*own[::-1], *own, *own[::-1], *own]


@pytest.mark.parametrize("ids", [None, SOME_IDS], ids=["whole", "trimmed"])
def test_rounds_that_a_device_runs_by_itself_are_what_is_timed(monkeypatch, ids):
    model = make_model()
    pack_model(model)
    stack = PackedStack(model)
    ways = [timing.PLAIN, timing.Way(3, None if ids is None else stack.head_over(ids))]
    texts = [Text(tuple(random_ids(30, seed=i)), 6, i) for i in range(2)]
    recorded = []

    class Noted(Decoder):
        def join(self, spec):
            row = super().join(spec)
            recorded.append(len(self.rounds.recordings))
            return row

        def _round(self, rows):
            raise AssertionError("the host ran a round")

    monkeypatch.setattr(timing, "Decoder", Noted)
    took = timing.time_in_turn(stack, PLANS["exit"], ways, texts, sampling=SAMPLED)
    assert [len(times) for times in took] == [2, 2]
    assert len(recorded) == 6  # the first text once more, before
    assert min(recorded) > 0
    assert set(recorded[::3]) == set(recorded[1::3])  # all of them before anything is timed


@pytest.mark.parametrize("ids", [None, SOME_IDS], ids=["whole", "trimmed"])
def test_confidences_are_held_against_what_is_accepted(talking, monkeypatch, ids):
    judged: list[tuple[float, bool]] = []
    learn = timing.Calibration.add

    def noting(self, confidence, told, accepted):
        judged.append((confidence, accepted))
        learn(self, confidence, told, accepted)

    monkeypatch.setattr(timing.Calibration, "add", noting)
    prompts = [Example(e.prompt) for e in EXAMPLES]
    texts = texts_to_draft_along(talking, prompts, sampling=SAMPLED, max_texts=2, max_tokens=24)
    head = None if ids is None else talking.stack.head_over(ids)
    found = {}
    for text in texts:
        judged.clear()
        given = talking.stack, PLANS["exit"], timing.Way(3, head), [text]
        found[text] = dict(timing.confidence_points(*given, sampling=SAMPLED))
        rounds = accepted(talking.stack, PLANS["exit"], text, SAMPLED, 3, ids)
        expected = [i < n for n in rounds for i in range(min(n + 1, 3))]
        assert [a for _, a in judged][: len(expected)] == expected
        assert len(judged) <= len(expected) + 3  # the last rounds have room for fewer than three
        confidences = [c for c, _ in judged]
        assert len(set(confidences)) > 3
        assert all(0.0 < c < 1.0 for c in confidences)
    alone = dict(timing.confidence_points(*given[:3], [], sampling=SAMPLED))
    assert all(points != alone and points.keys() == alone.keys() for points in found.values())


class Stop(KeyboardInterrupt):
    pass


def interrupted_at(step: int):
    def on_progress(done: int, total: int, what: str) -> None:
        assert done <= total
        if done == step:
            raise Stop

    return on_progress


def counting(monkeypatch) -> list[str]:
    """Names of the measurements that are made from here on."""
    made: list[str] = []

    def note(owner, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (search, "measure_cost"),
        (search, "time_against_plain"),
        (search, "confidence_points"),
        (search, "texts_to_draft_along"),
        (search, "closest_skip_sets"),
        (KnownTexts, "chains"),
    ):
        note(owner, name)
    return made


def test_an_interrupted_search_goes_on_and_measures_nothing_twice(given, monkeypatch, tmp_path):
    given(1.3)
    lm, journal = unquiet(3, 4), tmp_path / "journal"
    made = counting(monkeypatch)
    whole = search.search(lm, EXAMPLES, settings=SETTINGS)
    expected, made[:] = sorted(made), []
    for step in (1, 6, 10):
        with pytest.raises(Stop):
            search.search(
                lm, EXAMPLES, settings=SETTINGS, journal=journal, on_progress=interrupted_at(step)
            )
        with journal.open("ab") as file:  # killed in the middle of a line
            file.write(b'{"what": "draft layers 0-3", "res')
    result = search.search(lm, EXAMPLES, settings=SETTINGS, journal=journal)
    assert result == whole
    assert sorted(made) == expected
    made.clear()
    monkeypatch.setattr(search, "KnownTexts", None)
    assert search.search(lm, EXAMPLES, settings=SETTINGS, journal=journal) == whole
    assert made == []


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (EXAMPLES[:1], SETTINGS, r"prompts \w+, now \w+"),
        (
            EXAMPLES,
            replace(SETTINGS, max_new_tokens=12, sampling=COOLER),
            r"settings\.sampling\.temperature 0\.8, now 0\.5; settings\.max new tokens 16, now 12",
        ),
    ],
)
def test_a_journal_of_other_work_is_refused(given, tmp_path, prompts, settings, message):
    given(1.3)
    lm, journal = unquiet(3, 4), tmp_path / "journal"
    with pytest.raises(Stop):
        search.search(
            lm, EXAMPLES, settings=SETTINGS, journal=journal, on_progress=interrupted_at(1)
        )
    with pytest.raises(ValueError, match=rf"the journal of another measurement \({message}\);"):
        search.search(lm, prompts, settings=settings, journal=journal)


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("texts", []),
        ("texts", [[[10**9, 1, 2, 3], 1, 0]] * 2),
        ("texts", [[[1, 2], 0, 0]] * 2),
        ("texts", [[[1, 2, 3, 4], 1, 0]]),
        ("exits", []),
        ("exits", [[[1.0, 1.5], [0.5], 0.5]]),
        ("exits", [[[], [], 0.5]] * (NUM_LAYERS - 1)),
        ("speed of draft layers 0-2, 5", []),
        ("seconds with 128 ids", []),
        ("seconds with 128 ids", [[]]),
    ],
)
def test_an_entry_that_was_emptied_is_called_damage(given, tmp_path, monkeypatch, what, result):
    given(1.3)
    monkeypatch.setattr(trimming, "GAIN", 0.5)  # as below
    lm, journal = unquiet(3, 4), tmp_path / "journal"
    work = {"settings": SETTINGS, "vocabulary_texts": [VOCABULARY_TEXT], "journal": journal}
    search.search(lm, EXAMPLES, **work)
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [e for e in entries if e.get("what") == what]
    edited = [e | {"result": result} if e.get("what") == what else e for e in entries]
    journal.write_text("".join(json.dumps(e) + "\n" for e in edited))
    with pytest.raises(ValueError, match=rf"journal is not a whole journal \(the entry '{what}'\)"):
        search.search(lm, EXAMPLES, **work)


def test_examples_that_come_one_by_one_are_searched_on(given):
    given(1.3)
    said = [search.search(unquiet(3, 4), e, settings=SETTINGS) for e in (EXAMPLES, iter(EXAMPLES))]
    assert said[0] == said[1]


def test_a_second_search_on_one_journal_is_refused(given, tmp_path):
    given(1.3)
    lm, path = unquiet(3, 4), tmp_path / "journal"
    with (
        closing(Journal(path, {})),
        pytest.raises(ValueError, match="is being written by another process; wait for its end"),
    ):
        search.search(lm, EXAMPLES, settings=SETTINGS, journal=path)


@pytest.mark.parametrize("name", ["max_texts", "max_new_tokens", "max_draft_tokens"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        SearchSettings(**{name: 0})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cost_seconds": 0}, ValueError, "cost_seconds must be finite and at least 0.001, got 0"),
        ({"cost_seconds": -1.0}, ValueError, "cost_seconds must be finite and at least 0.001"),
        ({"cost_seconds": math.inf}, ValueError, "cost_seconds must be finite and at least 0.001"),
        ({"cost_seconds": math.nan}, ValueError, "cost_seconds must be finite and at least 0.001"),
        ({"cost_seconds": "4"}, TypeError, r"cost_seconds must be a number, got '4' \(str\)"),
        ({"sampling": None}, TypeError, "sampling must be SamplingParams, got None"),
        ({"sampling": 0.8}, TypeError, "sampling must be SamplingParams, got float"),
        (
            {"sampling": SamplingParams(min_new_tokens=2, top_k=3, logit_bias={1: 2.0})},
            ValueError,
            "a search samples by .* alone; leave out logit_bias, min_new_tokens",
        ),
    ],
)
def test_what_a_search_would_fail_with_later_is_refused_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        SearchSettings(**settings)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"vocabulary_texts": "hello world"}, TypeError, "must be a list of texts, got 'hello wor"),
        ({"vocabulary_texts": iter("ab")}, TypeError, "vocabulary_texts must be a list of texts"),
        ({"vocabulary_texts": [1, 2]}, TypeError, "each of vocabulary_texts must be text, got 1"),
        ({"vocabulary_texts": ["a", None]}, TypeError, "vocabulary_texts must be text, got None"),
        ({"vocabulary_texts": ["a", "\ud800"]}, ValueError, "vocabulary_texts is not valid"),
        ({"lm": make_model()}, TypeError, "lm must be a SelfSpeculativeLM, got LlamaForCausalLM"),
        ({"settings": {}}, TypeError, "settings must be SearchSettings or None, got dict"),
        ({"examples": EXAMPLES[0]}, TypeError, "examples must be a list of Example, got Example"),
        ({"examples": []}, ValueError, "examples holds no prompts; give one or more"),
        ({"examples": [EXAMPLES[0], "a"]}, TypeError, r"examples\[1\] must be an Example, got str"),
        ({"examples": [{"prompt": "a"}]}, TypeError, r"examples\[0\] must be an Example, got dict"),
        ({"examples": [Example([1, 2])]}, TypeError, r"the prompt of examples\[0\] must be text"),
        (
            {"examples": [Example("a", "\ud800")]},
            ValueError,
            r"continuation of examples\[0\] is not",
        ),
    ],
)
def test_arguments_that_are_none_are_refused_before_anything_is_measured(wrong, error, message):
    def measured(*_: object) -> None:
        raise AssertionError("it was not refused")

    arguments = {"lm": unquiet(3, 4), "examples": EXAMPLES, "settings": SETTINGS}
    with pytest.raises(error, match=message):
        search.search(**arguments | wrong, on_progress=measured)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved checkpoint whose layers 3 and 4 do nothing."""
    path = tmp_path_factory.mktemp("checkpoint")
    lm = unquiet(3, 4)
    lm.stack.twin.save_pretrained(path)
    lm.tokenizer.save_pretrained(path)
    return path


def searching(folder, tmp_path, *more: object) -> int:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(vars(e)) + "\n" for e in EXAMPLES))
    argv = ["search", folder, "--prompts", prompts, "--out", tmp_path / "plan.json"]
    argv += ["--max-new-tokens", 16, "--max-draft-tokens", 4, "--refinements", 2, *more]
    return main([str(a) for a in argv])


VOCABULARY_TEXT = "return the argument\n" * 100


def test_a_draft_vocabulary_is_chosen_for_the_plan(given, tmp_path, monkeypatch):
    given(1.3)
    monkeypatch.setattr(trimming, "GAIN", 0.5)  # the toy's text is random, and tokens are missed
    lm, journal = unquiet(3, 4), tmp_path / "journal"
    settings = replace(SETTINGS, refinements=0)
    found = [
        search.search(
            lm, EXAMPLES, settings=settings, vocabulary_texts=[VOCABULARY_TEXT], journal=journal
        )
        for _ in range(2)
    ]
    assert found[0] == found[1]
    file, chosen = found[0].file, found[0].trimming.chosen
    assert file.plan.layers == (0, 1, 2, 5)
    assert file.draft_vocabulary == chosen.ids
    assert len(chosen.ids) == 128
    assert {0, 1} <= set(chosen.ids)  # special ones
    assert file.acceptance == chosen.counts.acceptance
    way = timing.Way(settings.max_draft_tokens, lm.stack.head_over(chosen.ids))
    sampled = settings.sampling
    texts = texts_to_draft_along(lm, EXAMPLES, sampling=sampled, max_texts=2, max_tokens=16)
    for kind, sampling in (("greedy", SamplingParams()), ("sampled", sampled)):
        points = timing.confidence_points(lm.stack, file.plan, way, texts, sampling=sampling)
        assert file.calibration[kind] == points
    assert file.cost == given_cost(lm.stack, file.plan, draft_vocabulary=chosen.ids)
    assert file.measurements["coverage"] == chosen.promised < chosen.coverage
    assert file.measurements["vocabulary"]["chosen"]["num_ids"] == 128
    file.save(tmp_path / "plan.json")
    used = SelfSpeculativeLM(
        make_model(), make_tokenizer(), PlanFile.load(tmp_path / "plan.json"), num_draft_tokens=2
    )
    assert used.coverage_meter.least_coverage == chosen.promised
    with pytest.raises(ValueError, match="another measurement"):
        search.search(lm, EXAMPLES, settings=settings, journal=journal)


def test_the_command_writes_a_plan_and_shows_what_it_tried(
    given, folder, tmp_path, capsys, monkeypatch
):
    given(1.3)
    monkeypatch.setattr(trimming, "GAIN", 0.5)
    (tmp_path / "more.txt").write_text(VOCABULARY_TEXT)
    more = ["--vocabulary-texts", tmp_path / "more.txt", "--json"]
    assert searching(folder, tmp_path, *more) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out.splitlines()[-1])
    assert document["draft_layers"] == [0, 1, 2, 5]
    assert {tuple(t["draft_layers"]) for t in document["tried"]} >= {(0,), (0, 1, 2, 5)}
    assert "0-2, 5" in shown.err
    file = PlanFile.load(tmp_path / "plan.json")
    assert file.plan.layers == (0, 1, 2, 5)
    assert set(file.calibration) == {"greedy", "sampled"}
    assert document["draft_vocabulary"] == len(file.draft_vocabulary) == 128
    for words in ("draft vocabularies, ranked by", " 128 ", "a draft vocabulary of 128 of 331 ids"):
        assert words in shown.err
    left = sorted(f.name for f in tmp_path.iterdir())
    assert left == ["more.txt", "plan.json", "prompts.jsonl"]


def test_the_command_goes_on_after_an_interruption(given, folder, tmp_path, capsys, monkeypatch):
    given(1.3)
    made = counting(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(search, "closest_skip_sets", lambda *_, **__: (_ for _ in ()).throw(Stop))
        assert searching(folder, tmp_path) == 130
    assert "the same command goes on from" in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "plan.json").exists()
    assert made.count("measure_cost") == 2
    with monkeypatch.context() as patch:  # as the next one loads
        stopped = classmethod(lambda *_, **__: (_ for _ in ()).throw(Stop))
        patch.setattr(SelfSpeculativeLM, "from_pretrained", stopped)
        assert searching(folder, tmp_path) == 130
    assert "the same command goes on from" in capsys.readouterr().out.replace("\n", " ")
    assert searching(folder, tmp_path) == 0
    assert made.count("measure_cost") == 3  # and that of the plan
    assert not (tmp_path / "plan.json.journal").exists()


def test_a_search_that_read_no_text_is_no_hindrance_when_mended(
    given, folder, tmp_path, capsys, monkeypatch
):
    given(1.3)
    with monkeypatch.context() as patch:
        patch.setattr(search, "texts_to_draft_along", lambda *_, **__: (_ for _ in ()).throw(Stop))
        assert searching(folder, tmp_path) == 130
    assert "goes on from" not in capsys.readouterr().out
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "q" * MAX_POSITIONS}) + "\n")
    assert searching(folder, tmp_path, "--prompts", tmp_path / "long.jsonl") == 2
    assert "no prompt leaves room" in capsys.readouterr().err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["long.jsonl", "prompts.jsonl"]
    assert searching(folder, tmp_path) == 0


def test_one_text_is_too_few_to_search_on(given, tmp_path):
    given(1.3)
    examples = [EXAMPLES[0], Example("q" * MAX_POSITIONS)]
    with pytest.raises(ValueError, match=r"takes 2 prompts or more .* got 1; give more"):
        search.search(unquiet(3, 4), examples, settings=SETTINGS, journal=tmp_path / "journal")
    with pytest.raises(ValueError, match="max_texts must be at least 2, got 1"):
        SearchSettings(max_texts=1)
    assert list(tmp_path.iterdir()) == []


def test_a_search_knows_which_exits_were_trained(given, folder, tmp_path, capsys):
    given(1.3)
    model = shutil.copytree(folder, tmp_path / "model")
    plan = {"version": 1, "num_layers": NUM_LAYERS, "draft_layers": [0], "trained_exits": [1, 2]}
    (model / "layerskip.json").write_text(json.dumps(plan))
    assert searching(model, tmp_path, "--json") == 0
    tried = json.loads(capsys.readouterr().out.splitlines()[-1])["tried"]
    found = {tuple(t["draft_layers"]): t["found_by"] for t in tried}
    names = [found[tuple(range(e))] for e in (1, 2, 3)]
    assert names == ["trained exit", "trained exit", "exit"]
    assert PlanFile.load(tmp_path / "plan.json").measurements["trained_exits"] == [1, 2]


@pytest.mark.parametrize("own", [{"version": 9}, {"num_layers": 99, "draft_layers": [0]}, []])
def test_a_search_needs_no_plan_of_the_checkpoint_s(given, folder, tmp_path, own):
    given(1.3)
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "layerskip.json").write_text(json.dumps(own))
    assert searching(model, tmp_path) == 0
    found = PlanFile.load(tmp_path / "plan.json")
    assert found.plan is not None
    assert "trained_exits" not in found.measurements


def test_a_search_of_which_nothing_is_measured_says_so(tmp_path):
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert searching(tmp_path, tmp_path) == 0
    assert PlanFile.load(tmp_path / "plan.json").plan is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--limit", 1], "--limit must be at least 2, got 1"),
        (["--temperature", -1], "temperature must be"),
        (["--vocabulary-texts", "/nowhere/text"], "/nowhere/text cannot be read"),
        (["--out", "/nowhere/plan.json"], "there is no folder /nowhere"),
    ],
)
def test_the_command_says_what_is_wrong(folder, tmp_path, capsys, more, message):
    assert searching(folder, tmp_path, *more) == 2
    assert message in capsys.readouterr().err
