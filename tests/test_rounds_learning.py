"""How many tokens are drafted in rounds that the device runs, and what is learnt from them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from device_rounds import EXIT, PROMPTS, Scripted, assert_device_ran, decode, decoder_of, spec

from layerskip import SamplingParams
from layerskip.graphs import RepeatingRecorder
from layerskip.seats import Ring
from layerskip.workbench import Workbench


def test_another_number_of_draft_tokens_in_every_round(stack, bench, text):
    decoder = decoder_of(stack, bench, controller=Scripted(4, 0, 2, 1))
    rows = decode(decoder, spec(PROMPTS[0], k="auto"), spec(PROMPTS[1], k=2, limit=7))
    plain = decode(decoder_of(stack), spec(PROMPTS[1], k=0, limit=7))
    assert [row.token_ids for row in rows] == [text, plain[0].token_ids]
    assert [r.num_draft_tokens for r in rows[0].rounds[1:6]] == [0, 2, 1, 4, 0]
    assert_device_ran(decoder)


class Probing(Scripted):
    """Every other round is a probe."""

    def choose(self, asks, **more):
        choices = super().choose(asks, **more)
        for ask in asks:
            ask.state.probing = self.asked % 2 == 1
        return choices


def test_a_round_is_judged_as_the_probe_that_it_was_when_it_was_launched(stack, bench):
    """The next one, which is on its way by then, is of the other kind."""
    controller, judged = Probing(2), []
    controller.observe_draft = lambda state, *_, **__: judged.append(state.probing)
    decoder = decoder_of(stack, bench, controller=controller)
    row = decoder.join(spec(PROMPTS[0], k="auto", limit=14))
    decoder.step()
    for _ in range(5):
        decoder.step()
        assert row.state.probing == (controller.asked % 2 == 1)
    assert judged[:4] == [True, False, True, False]


class Hopeful(Scripted):
    """Lets drafts go on while they are sure, beyond what pays on the whole."""

    def choose(self, asks, **more):
        choices = super().choose(asks, **more)
        return [replace(c, num_draft_tokens=7) if c.num_draft_tokens else c for c in choices]


def test_the_device_drafts_what_pays_on_the_whole(stack, bench):
    """No confidence ends its drafts."""
    (row,) = decode(decoder_of(stack, bench, controller=Hopeful(2)), spec(PROMPTS[0], k="auto"))
    assert [r.num_draft_tokens for r in row.rounds[1:4]] == [2, 2, 2]


def test_the_controller_learns_a_round_behind(stack, bench):
    controller = Scripted(3)
    decoder = decoder_of(stack, bench, controller=controller)
    (row,) = decode(decoder, spec(PROMPTS[0], k="auto"))
    judged = sum(
        r.num_accepted_tokens + (r.num_accepted_tokens < r.num_draft_tokens) for r in row.rounds
    )
    (kind,) = controller._experiences.values()
    trials = sum(share.trials for share in kind.positions)
    assert judged * 0.8 < trials <= judged  # discounted
    assert row.rounds[1].draft_seconds > 0


@pytest.mark.parametrize("passes", ["recorded", "started by the host"])
def test_rounds_that_the_host_drives_teach_no_prices_of_recorded_passes(stack, bench, passes):
    """Beside those they look slow, and the device's rounds after them as if drafts were cheap."""
    controller, seen = Scripted(3), []
    controller.cost = replace(controller.cost, key={"passes": passes})
    for name in ("observe_phases", "observe_round"):
        setattr(controller.times, name, lambda *_, name=name: seen.append(name))
    for settings, driver in (({}, "observe_round"), ({"logprobs": 2}, "observe_phases")):
        seen.clear()
        decode(
            decoder_of(stack, bench, controller=controller), spec(PROMPTS[0], k="auto", **settings)
        )
        teaches = driver == "observe_round" or passes == "started by the host"
        assert set(seen) == ({driver} if teaches else set())


@pytest.mark.parametrize(
    ("settings", "driver"),
    [
        ({}, "device"),
        ({"logprobs": 2}, "host"),
        ({"params": SamplingParams(temperature=0.8, top_p=0.9)}, "host"),
    ],
)
def test_rounds_that_the_host_drives_are_decided_and_learnt_from_at_its_own_prices(
    stack, bench, settings, driver
):
    device, host = Scripted(3), Scripted(2)
    device.by_host, seen = host, []
    device.cost = replace(device.cost, key={"passes": "recorded"})
    for name, one in (("device", device), ("host", host)):
        for clock in ("observe_phases", "observe_round"):
            told = lambda *_, name=name, clock=clock: seen.append((name, clock))  # noqa: E731
            setattr(one.times, clock, told)
        one.observe_draft = lambda *_, name=name, **__: seen.append((name, "draft"))
    (row,) = decode(
        decoder_of(stack, bench, controller=device), spec(PROMPTS[0], k="auto", **settings)
    )
    clock = {"device": "observe_round", "host": "observe_phases"}[driver]
    assert set(seen) == {(driver, clock), (driver, "draft")}
    assert max(r.num_draft_tokens for r in row.rounds) == {"device": 3, "host": 2}[driver]
    assert {"device": host, "host": device}[driver].asked == 0


def test_the_hosts_work_is_no_price_of_a_round(stack, bench, monkeypatch):
    """Or a batch that chooses for longer than a plain round takes would never find that to rest
    pays, and each text would find drafts dear, whose first round has another launched behind it.
    Its records have all that went by."""
    now, learnt = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("layerskip.rounds.time", clock)
    monkeypatch.setattr("layerskip.decode.time", clock)
    receive = Ring.receive
    monkeypatch.setattr(Ring, "receive", lambda *given: (receive(*given)[0], 1.0))

    class Slow(Scripted):
        def choose(self, asks, **more):
            now[0] += 5.0
            return super().choose(asks, **more)

    controller = Slow(2)
    controller.times.observe_round = lambda seconds, *_: learnt.append(seconds)
    decoder = decoder_of(stack, bench, controller=controller)
    run = decoder.rounds.recordings.run

    def running(shape, function):
        now[0] += 1.0
        run(shape, function)

    monkeypatch.setattr(decoder.rounds.recordings, "run", running)
    (row,) = decode(decoder, spec(PROMPTS[0], k="auto", limit=30))
    assert len(learnt) > 5
    assert set(learnt) == {1.0}
    assert all(r.draft_seconds + r.verify_seconds == pytest.approx(6.0) for r in row.rounds[3:6])


def test_what_is_learnt_from_a_round_is_of_the_passes_that_the_device_ran(
    stack, bench, monkeypatch
):
    """Of all rows of its shape and all its drafted tokens, though rows have ended, and drafts near
    a row's end are short: or it would look as if the machine were slow at each text's end."""
    receive, shapes, learnt = Ring.receive, [], []

    def received(ring, turn, shape):
        shapes.append(shape)
        return receive(ring, turn, shape)

    monkeypatch.setattr(Ring, "receive", received)
    controller = Scripted(3)
    controller.times.observe_round = lambda *told: learnt.append((shapes[-1], told[-2:]))
    limits = zip(PROMPTS, (30, 9, 14), strict=False)
    decode(
        decoder_of(stack, bench, controller=controller),
        *(spec(prompt, k="auto", limit=limit) for prompt, limit in limits),
    )
    assert len(learnt) > 5
    for shape, told in learnt:
        rows = shape.num_rows
        assert told == (rows * (shape.num_draft_tokens + 1), rows)


def test_few_of_many_rounds_are_learnt_from(stack, bench):
    """Learning takes the host some 40 us, and a clock soon knows enough."""
    controller, asked, learnt = Scripted(3, 0), [], []
    controller.times.observe_round = lambda *told: learnt.append(told)

    def due(*, drafted):
        asked.append(drafted)
        return len(asked) == 5

    controller.times.due = due
    asks = spec(PROMPTS[0], k="auto", limit=40)
    decode(decoder_of(stack, bench, controller=controller), asks)
    assert len(learnt) == 1
    assert set(asked) == {False, True}


@pytest.mark.parametrize("patience", [0, 2])
def test_no_round_that_was_recorded_meanwhile_is_learnt_from(stack, patience, monkeypatch):
    """Nor one that the host started in the place of a recording, nor one of more passes than the
    tokens that were wanted, which ran in another's place or near the text's end."""
    monkeypatch.setattr("layerskip.stand_ins.WAITS", 1)
    bench = Workbench(stack, EXIT, lambda: RepeatingRecorder(patience))
    learnt, texts = [], []
    for _ in range(2):  # the second time all is recorded
        controller, seen = Scripted(3, 0), []
        controller.times.observe_round = lambda *_, seen=seen: seen.append(1)
        decoder = decoder_of(stack, bench, controller=controller)
        row = decoder.join(spec(PROMPTS[0], k="auto", limit=80))
        for _ in range(12):
            decoder.step()
        assert row.finish_reason is None  # near its end drafts get shorter
        decoder.leave(row.id)
        bench.give_back(decoder.rounds)
        learnt.append(len(seen))
        texts.append(row.token_ids)
    assert 0 < learnt[0] < learnt[1] == len(row.rounds) - 1
    # The first rounds drafted nothing while nothing was recorded: they emitted less.
    assert texts[0] == texts[1][: len(texts[0])]
