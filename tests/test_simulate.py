"""The simulation beside hand-computed cases, a plain loop, the real controller and runs."""

import time
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from controlling import table
from simulating import POLICIES, flat, loop_of, one_cell

from layerskip.control.asks import Ask
from layerskip.control.stopping import Stopper
from layerskip.controller import Controller
from layerskip.cost import Curve
from layerskip.machine_time import MachineTime
from layerskip.model import PREFILL_CHUNK
from layerskip.pass_costs import PREFILL_CHUNK as SIMULATED_CHUNK
from layerskip.pass_costs import Overhead, PassCosts
from layerskip.simulate import simulate
from layerskip.simulated_controller import Automatic, Fixed
from layerskip.workload import Recorded, RecordedText, Synthetic, run_lengths


@pytest.mark.parametrize(
    ("policy", "acceptance", "tokens", "decoding"),
    [
        ("off", 0.5, 9, 8 * 1.0),
        ("fixed:3", 1.0, 9, 2 * 1.75),  # two rounds of four tokens
        ("fixed:3", 1.0, 8, 1.75 + 1.5),  # room for two drafted tokens in the second one
        ("fixed:3", 0.0, 4, 1.5 + 1.25 + 1.0),  # the room shrinks, every round gives one token
    ],
)
def test_one_user_by_hand(policy, acceptance, tokens, decoding):
    cell = one_cell(flat(), Synthetic((acceptance,), 100, tokens), policy)
    assert cell.first_token.p50 == cell.first_token.p99 == pytest.approx(1.0)
    assert cell.token.p50 == cell.token.p99 == pytest.approx(decoding / (tokens - 1))
    assert cell.end_to_end.p90 == pytest.approx(1.0 + decoding)
    assert cell.tokens_per_second == pytest.approx(tokens / (1.0 + decoding))


def test_prefills_block_the_rounds_of_others():
    """Two users, prefill and two rounds each: in step with one another both wait for both
    prefills and then decode together (4 s); else every prefill falls into the other's round."""
    stream = Synthetic((0.5,), 10, 3).stream(600, 0)
    loop = loop_of(flat(), stream, "off", 2)
    loop.run(Fixed(0), lambda done: None)
    assert set(np.round(loop._first_token, 9)) == {2.0}
    assert set(np.round(loop._end_to_end, 9)) == {4.0, 5.0}


def test_a_request_of_one_token_ends_with_its_prefill():
    cell = one_cell(flat(), Synthetic((0.5,), 10, 1), "fixed:2")
    assert cell.prefills == 1.0
    assert one_cell(flat(), Synthetic((0.5,), 10, 1), "fixed:2", 3).prefills == 3.0
    assert cell.end_to_end == cell.first_token
    assert (cell.end_to_end.p50, cell.token.p50, cell.rows) == (1.0, 0.0, 0.0)


def test_progress_counts_what_is_named_twice_once():
    said: list[tuple[int, int]] = []
    found = simulate(
        flat(),
        Synthetic((0.5,), 10, 100),
        concurrency=[2, 1, 1],
        policies=["off", "off"],
        num_requests=600,
        on_progress=lambda *of: said.append(of),
    )
    assert {total for _, total in said} == {600 * len(found.cells)} == {1200}
    assert 600 < said[-1][0] <= 1200


def texts(draw, number: int = 12) -> list[RecordedText]:
    lengths = draw.integers(2, 40, number)
    return [
        RecordedText(
            int(draw.integers(5, 400)),
            int(n + draw.integers(0, 9)),
            (draw.random(n) < 0.7).astype(np.int8),
            np.full(n, np.nan),
            float(draw.random()),
        )
        for n in lengths
    ]


def plain_loop(cost, stream, prefill, drafted, requests, tokens):
    """One batch, row by row: seconds to the first and to the last token of counted requests."""
    size, rows = len(stream), [[r, t, 0, 0.0] for r, t in zip(requests, tokens, strict=True)]
    clock, following, first, last = 0.0, count(), {}, {}
    while len(last) < size:
        new = [row for row in rows if row[2] == 0]
        going = [row for row in rows if row[2] > 0]
        clock += sum(prefill[row[0] % size] for row in new)
        counts = []
        for row in going:
            request = row[0] % size
            counts.append(min(drafted, max(0, stream.limits[request] - row[2] - 1)))
        if going:
            contexts = [stream.prompt_tokens[r % size] + e - 1 for r, _, e, _ in going]
            mean = sum(contexts) // len(contexts)
            clock += cost.draft_start if any(counts) else 0.0
            for depth in range(1, max(counts) + 1):
                number = sum(n >= depth for n in counts)
                clock += cost.draft_pass(number, mean, sequences=number, late=True)
            clock += cost.verify_pass(sum(counts) + len(going), mean, sequences=len(going))
        for row, number in zip(going, counts, strict=True):
            run = stream.runs[stream.offsets[row[0] % size] + row[2]]
            row[2] = min(row[2] + min(number, run) + 1, row[1])
        for row in new:
            row[2] = 1
            first[row[0]] = clock - row[3]
        for row in rows:
            if row[2] == row[1]:
                last[row[0]] = clock - row[3]
                last = {r: t for r, t in last.items() if r < size}
                number = next(following)
                row[:] = [number, stream.tokens[number % size], 0, clock]
    return first, last


@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_arrays_do_what_a_plain_loop_does(drafted, rows):
    cost = replace(
        table(0.2, slope=0.03, far=0.5, start=0.1), draft_sequence=0.01, verify_sequence=0.02
    )
    stream = Recorded(texts(np.random.default_rng(1))).stream(19, 5)
    policy = f"fixed:{drafted}" if drafted else "off"
    loop = loop_of(cost, stream, policy, rows, prefill=stream.prefill)
    assert loop.shape[0] == 1
    wanted = plain_loop(
        cost,
        stream,
        stream.prefill,
        drafted,
        loop._request[0].tolist(),
        loop._tokens[0].tolist(),
    )
    loop.run(Fixed(drafted), lambda done: None)
    assert loop._first_token == pytest.approx([wanted[0][i] for i in range(len(stream))])
    assert loop._end_to_end == pytest.approx([wanted[1][i] for i in range(len(stream))])


def test_little_s_law_and_conservation():
    """Users in the loop are requests a second times their stay; every request ends once."""
    stream = Recorded(texts(np.random.default_rng(2))).stream(3000, 0)
    loop = loop_of(table(), stream, "fixed:4", 4)
    loop.run(Fixed(4), lambda done: None)
    cell = loop.cell("fixed:4")
    stay = (loop._end_to_end * cell.tokens_per_second / stream.tokens.mean()).mean()
    assert stay == pytest.approx(4.0, rel=0.03)
    assert (loop._end_to_end > 0).all()
    assert (loop._first_token <= loop._end_to_end).all()
    assert (loop._left == 0).all()


def test_the_same_seed_gives_the_same_figures():
    traffic = Recorded(texts(np.random.default_rng(3)))

    def run(seed):
        return simulate(table(), traffic, concurrency=[1, 3], num_requests=10, seed=seed)

    assert run(7) == run(7)
    assert run(7).cells != run(8).cells


def test_the_same_seed_gives_the_same_slow_stretches():
    machine = stretches((40.0, 1.0), (20.0, 2.0))

    def run(seed):
        return one_cell(table(), Synthetic((0.6,), 64, 24), "off", 3, seed=seed, machine=machine)

    assert run(7) == run(7)
    assert run(7) != run(8)


def stretches(*parts: tuple[float, float]) -> MachineTime:
    """Of so much usual work each, and how many times as long it took."""
    return MachineTime.of([work for work, _ in parts], [work * pace for work, pace in parts])


def test_a_clock_goes_over_recorded_rounds_and_again():
    machine = MachineTime.of([1.0, 1.0, 2.0], [1.0, 3.0, 2.0])
    work = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.5, 8.0])
    assert machine.clock(work).tolist() == [0.0, 0.5, 1.0, 2.5, 4.0, 5.0, 6.0, 8.5, 12.0]
    assert machine.slowness == 1.5
    begun = machine.somewhere(10_000, np.random.default_rng(0))
    assert np.quantile(begun, [0.0, 0.25, 0.75, 1.0]) == pytest.approx([0, 1, 3, 4], abs=0.1)


@pytest.mark.parametrize("users", [1, 2])
def test_slow_stretches_are_in_the_tail_and_not_in_the_median(users):
    """Three tenths of the work took three times as long: so do three tenths of the requests,
    whole, since stretches are longer than they are; independent paces would give all the same."""
    machine, traffic = stretches((6300.0, 1.0), (2700.0, 3.0)), Synthetic((0.5,), 10, 9)
    usual = one_cell(flat(), traffic, "off", users, 3000)
    cell = one_cell(flat(), traffic, "off", users, 3000, machine=machine)
    for name in ("first_token", "token", "end_to_end"):
        found, before = getattr(cell, name), getattr(usual, name)
        assert found.p50 == pytest.approx(before.p50)
        assert found.p90 == pytest.approx(3.0 * before.p90)
    assert cell.tokens_per_second == pytest.approx(usual.tokens_per_second / 1.6)


def test_all_rows_of_a_batch_have_the_same_pace():
    """Two users, as in the test of prefills, on a machine that is slow for days: what a batch's
    requests take is all of one pace."""
    machine = stretches((1e6, 1.0), (1e6, 3.0))
    stream = Synthetic((0.5,), 10, 3).stream(600, 0)
    loop = loop_of(flat(), stream, "off", 2, machine=machine)
    loop.run(Fixed(0), lambda done: None)
    count = loop.shape[0]
    of_batches = [set(np.round(loop._end_to_end[i::count], 6)) for i in range(count)]
    usual = [s <= {4.0, 5.0} for s in of_batches]
    assert set(usual) == {True, False}
    assert all(fast or s <= {12.0, 15.0} for fast, s in zip(usual, of_batches, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_steady_machine_changes_nothing(policy):
    def run(machine):
        traffic = Recorded(texts(np.random.default_rng(3)))
        cell = one_cell(table(), traffic, policy, 3, machine=machine)
        spreads = [getattr(cell, name) for name in ("first_token", "token", "end_to_end")]
        return [x for s in spreads for x in (s.p50, s.p90, s.p99)] + [cell.tokens_per_second]

    assert run(stretches((1.5, 1.0), (0.25, 1.0))) == pytest.approx(run(None), rel=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_acceptance_and_more_users(policy):
    cost = table(0.2, slope=0.02)
    found = [one_cell(cost, Synthetic((a,), 64, 24), policy, 2) for a in (0.2, 0.6, 0.9)]
    rates = [c.tokens_per_second for c in found]
    assert rates[0] == rates[2] if policy == "off" else rates == sorted(set(rates))
    loaded = [one_cell(cost, Synthetic((0.7,), 64, 24), policy, n) for n in (1, 4, 16)]
    tokens = [c.token.p50 for c in loaded]
    assert tokens == sorted(set(tokens))
    assert all(c.end_to_end.p50 <= c.end_to_end.p90 <= c.end_to_end.p99 for c in loaded)


def test_off_overtakes_where_rows_are_no_longer_free():
    """8 rows are free and 64 take 1 + 63 * 0.05: four users drafting four tokens have to pay."""
    cost = table(0.1, slope=0.05)
    users = (1, 2, 4, 8, 16, 32)
    policies = ("off", "fixed:4")
    found = simulate(
        cost, Synthetic((0.6,), 64, 24), concurrency=users, policies=policies, num_requests=200
    )
    (fixed,) = found.crossovers
    assert fixed.on in (1, 2, 4)
    assert fixed.off == 2 * fixed.on
    rates = {
        n: found.cell("fixed:4", n).tokens_per_second / found.cell("off", n).tokens_per_second
        for n in (1, fixed.on, fixed.off, 32)
    }
    assert rates[1] > 1.3
    assert rates[fixed.on] >= 1.0 > rates[fixed.off] > rates[32]
    never = simulate(cost, Synthetic((0.9,), 64, 24), concurrency=[1], num_requests=20)
    assert [(c.on, c.off) for c in never.crossovers] == [(1, None), (1, None)]
    always = simulate(cost, Synthetic((0.0,), 64, 24), concurrency=[2], num_requests=20)
    assert always.crossovers[0].on is None
    assert always.crossovers[0].off == 2


@pytest.mark.parametrize("several", [(), ((2, 0.01), (4, -0.01), (8, -0.02))])
def test_cost_of_passes_is_the_table_s(several):
    cost = replace(
        table(0.2, slope=0.03, far=0.4, start=0.1),
        draft_sequence=0.01,
        verify_sequence=0.02,
        sampling=0.003,
        judging=0.001,
        draft_sampling=0.002,
        tiles=(1, 2, 4),
        verify_tiles=several,
    )
    costs = PassCosts(cost, rows=4, most_drafted=5, longest=300)
    for rows, tokens, context in product(
        (1, 3, 4), (0, 1, 2, 5, 9, 10, 12, 20), (0, 150, 299, 300)
    ):
        if rows <= tokens <= 6 * rows:
            arrays = [np.array([n]) for n in (tokens, rows, context)]
            wanted = cost.verify_pass(tokens, context, sequences=rows)
            assert costs.verify(*arrays) == pytest.approx([wanted])
            wanted = cost.draft_pass(rows, context, sequences=rows, late=True)
            assert costs.draft(*arrays[1:]) == pytest.approx([wanted])
            wanted = cost.verify_pass(rows, context, sequences=rows)
            assert costs.plain(*arrays[1:]) == pytest.approx([wanted])
    for context in (np.array([0, 150]), np.array([299, 300])):
        up_to = [costs.verify(np.full(2, n), np.ones(2, int), context) for n in range(1, 7)]
        assert costs.alone(context) == pytest.approx(np.diff(np.stack(up_to, 1), axis=1))


def test_more_tokens_than_a_pass_takes_go_through_several():
    assert SIMULATED_CHUNK == PREFILL_CHUNK
    cost = replace(table(0.2, slope=0.02), pass_rows=64)
    costs = PassCosts(cost, rows=40, most_drafted=2, longest=10)
    forty = [np.array([n]) for n in (120, 40, 0)]
    both = [np.array([n]) for n in (64, 40, 0)], [np.array([n]) for n in (56, 40, 0)]
    assert costs.verify(*forty) == pytest.approx(sum(costs.verify(*part) for part in both))


def test_overhead_is_of_phases_and_of_rows():
    slower = Overhead(verify_ratio=1.5, draft_ratio=2.0, row=0.125)
    cell = one_cell(flat(), Synthetic((1.0,), 10, 9), "fixed:3", overhead=slower)
    assert cell.token.p50 == pytest.approx(2 * (1.5 + 3 * 0.5 + 0.125) / 8)
    assert cell.first_token.p50 == pytest.approx(1.125)
    saved = one_cell(flat(), Synthetic((1.0,), 10, 9), "fixed:3", passes_per_token=0.5)
    assert saved.token.p50 == pytest.approx(2 * (1.0 + 0.5 * 0.75) / 8)


def test_recorded_sampling_is_of_drafted_tokens_as_well():
    cost = replace(table(0.2), sampling=0.3, judging=0.1, draft_sampling=0.2)
    recorded = Overhead(sampling=0.03, judging=0.01).applied(cost)
    assert recorded.draft_pass(1, 0) == pytest.approx(cost.draft_pass(1, 0) - 0.2 + 0.03)
    assert recorded.verify_pass(2, 0) == pytest.approx(cost.verify_pass(2, 0) - 0.4 + 0.04)
    assert Overhead().applied(cost) == cost


def test_runs_of_right_drafts_end_with_their_request():
    right = np.array([1, 1, 0, 1, 1, 1, 0], dtype=bool)
    assert run_lengths(right, np.array([4, 3])).tolist() == [2, 1, 0, 1, 2, 1, 0]


def believed(cost, rows):
    """What the controller thinks of passes: any number of rows at once."""
    return PassCosts(cost, rows=rows, most_drafted=16, longest=200)


class Real:
    """The controller itself, for one batch."""

    def __init__(self, cost, stream, rows):
        prior = tuple(stream.acceptance[:16])
        self.controller = Controller(cost, prior, follows_clock=False)
        self.stream, self.states, self.stoppers = stream, [None] * rows, {}
        self.choices = {}

    def lengths(self, batches):
        drafted = np.zeros_like(batches.room)
        going = np.flatnonzero(batches.decoding[0]).tolist()
        if not going:
            return drafted
        for i in going:
            if batches.fresh[0, i]:
                self.states[i] = self.controller.row(
                    "greedy", int(self.stream.limits[batches.requests[0, i]])
                )
        context = int(batches.context[0])
        asks = [
            Ask(self.states[i], context, int(batches.room[0, i]), left=self.left(batches, i))
            for i in going
        ]
        choices = dict(zip(going, self.controller.choose(asks, drafts=True), strict=True))
        self.choices = choices
        alone = len(going) == 1
        self.stoppers = {i: Stopper(self.states[i], c, alone=alone) for i, c in choices.items()}
        asking = [i for i in going if choices[i].num_draft_tokens]
        while asking:
            if drafted.any():
                kept = self.controller.going_on(
                    [self.stoppers[i] for i in asking],
                    context,
                    rows=len(going),
                    verified=len(going) + int(drafted.sum()),
                )
                asking = [i for i, goes in zip(asking, kept, strict=True) if goes]
            for i in asking:
                drafted[0, i] += 1
            asking = [
                i
                for i in asking
                if self.stoppers[i].goes_on(self.confidence(batches, i, int(drafted[0, i]) - 1))
                and drafted[0, i] < choices[i].num_draft_tokens
            ]
        return drafted

    def left(self, batches, i):
        return int(self.stream.limits[batches.requests[0, i]] - batches.emitted[0, i])

    def confidence(self, batches, i, depth):
        stream, request = self.stream, batches.requests[0, i]
        if not len(stream.chances):
            return 0.65  # the middle of a bin: calibration learns what it is worth
        if depth > batches.right[0, i]:
            return float(np.median(stream.chances_after_wrong)) / 255
        place = min(batches.emitted[0, i] + depth, stream.tokens[request] - 1)
        return stream.chances[stream.offsets[request] + place] / 255

    def observe(self, batches, drafted):
        for i in np.flatnonzero(batches.decoding[0]).tolist():
            right, number = int(batches.right[0, i]), int(drafted[0, i])
            accepted = [True] * min(right, number) + [False] * (right < number)
            told = self.states[i], self.choices[i], int(batches.context[0])
            if number:
                confidences = [self.confidence(batches, i, depth) for depth in range(number)]
                self.controller.observe_draft(*told, accepted, confidences, num_passes=number)
            else:
                self.controller.observe_plain(*told)
            tokens = int(self.stream.tokens[batches.requests[0, i]])
            if batches.emitted[0, i] + min(right, number) + 1 >= tokens:
                self.states[i].end(tokens)


def telling(draw, shares) -> Recorded:
    """Texts of several shares of right drafts, with chances that tell some of it."""
    found = []
    for share in shares:
        right = (draw.random(64) < share).astype(np.int8)
        chances = np.clip(np.where(right == 1, 0.85, 0.45) + 0.1 * draw.standard_normal(64), 0, 1)
        found.append(RecordedText(64, 64, right, chances, 1.0))
    return Recorded(found, [0.3, 0.4, 0.5])


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("start", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["0.9", "0.6", "0.1", "mixed", "telling"])
@pytest.mark.one_in(3)
def test_automatic_is_what_the_real_controller_does(kind, start, rows):
    cost, draw = table(0.2, slope=0.02, start=start), np.random.default_rng(4)
    if kind == "telling":
        traffic = telling(draw, (0.5, 0.7, 0.9))
    elif kind == "mixed":
        rates = (0.05, 0.95, 0.5)
        known = [(draw.random(64) < rates[i % 3]).astype(np.int8) for i in range(30)]
        traffic = Recorded([RecordedText(64, 64, r, np.full(64, np.nan), 1.0) for r in known])
    else:
        traffic = Synthetic((float(kind),), 64, 64)
    stream = traffic.stream({1: 16, 4: 24, 16: 32}[rows], 0)  # one batch
    real, simulated = both(cost, stream, rows)
    # Early on the real one is cautious: it knows neither acceptance nor what confidence is worth.
    assert simulated == pytest.approx(real, rel=0.05)


def both(cost, stream, rows):
    """Tokens a second with the controller itself, and with what simulates it."""
    return [cell.tokens_per_second for cell in cells_of_both(cost, stream, rows)]


def cells_of_both(cost, stream, rows):
    cells = []
    for policy in (Real, Automatic):
        loop = loop_of(cost, stream, policy, rows)
        chosen = (
            Real(cost, stream, rows)
            if policy is Real
            else Automatic(believed(cost, rows), stream, loop.shape, 0)
        )
        loop.run(chosen, lambda done: None)
        cells.append(loop.cell("auto"))
    return cells


@pytest.mark.parametrize("acceptance", [0.7, 0.9])
def test_many_rows_draft_as_far_as_the_real_controller_lets_them(acceptance):
    """Its verify pass of twelve rows takes as long as if each had as many tokens as any."""
    sizes = (1, 4, 8, 16, 32, 64)
    verify = Curve(sizes, (0,), ((4.5, 4.7, 5.0, 5.8, 7.2, 10.5),))
    draft = Curve(sizes, (0,), ((0.75, 0.78, 0.82, 0.95, 1.2, 1.8),))
    cost = replace(table(), verify=verify, draft_layers=draft)
    stream = Synthetic((acceptance,), 64, 64).stream(36, 0)
    real, simulated = (c.mean_draft_tokens for c in cells_of_both(cost, stream, 12))
    assert simulated == pytest.approx(real, abs=0.2)


def test_a_row_that_drafts_while_all_others_prefill():
    """Costs are known for no more tokens of a row than it can draft."""
    known = [
        RecordedText(64, n, np.ones(n, dtype=np.int8), np.full(n, np.nan), 1.0) for n in (1, 60)
    ]
    cell = one_cell(table(0.1), Recorded([*60 * known[:1], known[1]]), "auto", 40, 120)
    assert 1.0 < cell.rows < 10.0
    assert cell.mean_draft_tokens > 1.0


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_where_a_text_ends_no_draft_was_wrong(share):
    """Of texts of eight tokens, recorded and invented."""
    draw = np.random.default_rng(0)
    texts = [
        RecordedText(8, 8, (draw.random(8) < share).astype(np.int8), np.full(8, np.nan), 1.0)
        for _ in range(1000)
    ]
    for traffic in (Recorded(texts), Synthetic((share,), 8, 8)):
        found = traffic.stream(4000, 0).acceptance
        assert found[:6] == pytest.approx([share] * 6, abs=0.02)
        assert found[8] == 0.0  # no text was so long


@pytest.mark.parametrize(("tile", "step", "acceptance"), [(4, 0.3, 0.9), (2, 0.4, 0.97)])
def test_it_fills_the_tiles_of_a_verify_pass_as_the_real_one_does(tile, step, acceptance):
    """One more token costs a tile, and those after it nothing there."""
    sizes = tuple(range(tile, 65, tile))
    verify = Curve(sizes, (0,), (tuple(1.0 + step * i for i in range(len(sizes))),))
    cost = replace(table(0.05, slope=0.0, quantum=tile), verify=verify)
    real, simulated = both(cost, Synthetic((acceptance,), 64, 64).stream(12, 0), 1)
    assert simulated == pytest.approx(real, rel=0.05)


def test_requests_that_end_early_give_back_what_they_had_in_advance():
    """Or each of them would try the early exit again, which is never right."""
    wrong = RecordedText(64, 128, np.array([-1, 0, 0, 0], dtype=np.int8), np.full(4, np.nan), 0.0)
    real, simulated = both(table(0.2), Recorded([wrong]).stream(19, 0), 1)
    assert simulated == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    "requests", [10_000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["part", "whole"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_requests_take_less_than_a_minute(policy, requests):
    """Of 128 tokens, 16 at a time, on one core; part of them in their share of it: they are
    62 batches side by side where all are 64."""
    began = time.process_time()
    one_cell(table(), Synthetic((0.8, 0.7), 256, 128), policy, 16, requests)
    assert time.process_time() - began < 60.0 * requests / 100_000


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"concurrency": (1, 0)}, "concurrency must be between 1 and 1024, got 0"),
        ({"num_requests": 0}, "the number of requests must be between 1 and"),
        ({"new_tokens": True}, "the number of new tokens must be an int, got True"),
        ({"passes_per_token": -1}, "passes_per_token must be finite and at least 0, got -1"),
        ({"passes_per_token": float("nan")}, "passes_per_token must be finite and at least 0"),
        ({"concurrency": 4}, r"concurrency must be a list, such as \[4\], got 4"),
        ({"policies": "auto"}, r"policies must be a list, such as \['auto'\], got 'auto'"),
    ],
)
def test_numbers_that_are_none_are_refused_before_any_round(wrong, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        simulate(flat(), Synthetic((0.5,), 10, 3), **wrong)
    with pytest.raises(TypeError, match=r"prompt_tokens must be an int, got 2.5"):
        Synthetic((0.5,), 2.5, 3)
    with pytest.raises(ValueError, match="texts must be one or more recorded requests, got none"):
        Recorded([])


def test_a_cell_that_was_not_simulated_is_named_beside_those_that_were():
    found = simulate(flat(), Synthetic((0.5,), 10, 3), concurrency=[1], policies=["off", "fixed:4"])
    assert found.cell("off", 1) is found.cells[0]
    said = r"policy 'off' was not simulated with 2 users; there are 'off' with 1, 'fixed:4' with 1"
    with pytest.raises(ValueError, match=said):
        found.cell("off", 2)
