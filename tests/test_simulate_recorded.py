"""The simulation over recorded rounds, and its command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulating import KEY, POLICIES, flat, loop_of, one_cell

from layerskip.cli import main
from layerskip.commands.simulating import crossings
from layerskip.cost import SAID, Curve
from layerskip.pass_costs import Overhead
from layerskip.simulate import Crossover
from layerskip.simulated_controller import Fixed
from layerskip.telemetry.replay import VERSIONS, replay
from layerskip.workload import Recorded, RecordedText


def line(request_id, index, drafted, accepted, emitted, **more):
    """A line of rounds.jsonl."""
    mode = "prefill" if index == 0 else "early_exit" if drafted else "plain"
    return (
        {
            "request_id": request_id,
            "index": index,
            "mode": mode,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "num_emitted_tokens": emitted,
            "num_draft_passes": drafted,
            "draft_seconds": 0.5 * drafted,  # twice the table's
            "verify_seconds": 1.5,
            "sample_seconds": 0.0,
            "elapsed_seconds": 0.0,
            "rows": 1,
            "context": 10,
            "chances": [],
        }
        | ({"mode": more.pop("mode")} if "mode" in more else {})
        | more
    )


def runs(folder, recorded, *, cost=None, finished=None):
    """A runs folder: rounds of each request as (drafted, accepted, emitted), prefill first."""
    folder.mkdir(exist_ok=True)
    cost = cost or flat()
    (folder / "run.json").write_text(json.dumps({"version": 1, "cost": cost.to_dict()}))
    lines, requests = [], []
    for request_id, rounds in recorded.items():
        clock = 0.0
        for index, (drafted, accepted, emitted, more) in enumerate(rounds):
            one = line(request_id, index, drafted, accepted, emitted, **more)
            clock += one["draft_seconds"] + one["verify_seconds"] + 0.125
            lines.append(one | {"elapsed_seconds": clock})
        if finished is None or request_id in finished:
            prompt, arm = request_id.split("/")
            new_tokens = sum(r[2] for r in rounds)
            requests.append(
                {
                    "request_id": request_id,
                    "prompt_index": int(prompt),
                    "arm": arm,
                    "prompt_tokens": 100,
                    "new_tokens": new_tokens,
                    "max_new_tokens": new_tokens,
                    "tokens_sha256": f"{prompt} of {new_tokens}",
                }
            )
    for name, entries in (("rounds", lines), ("requests", requests)):
        text = "".join(json.dumps(e) + "\n" for e in entries)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


PREFILL = (0, 0, 1, {})
EXITS = {
    "0/4": [
        PREFILL,
        (3, 1, 2, {"chances": [0.75, 0.25, 0.5]}),  # emits tokens 1 and 2; 3 follows a wrong one
        (2, 2, 3, {"chances": [1.0, 1.0]}),  # 3, 4, and 5 as its bonus
        (0, 0, 1, {}),  # 6, plain
        (4, 1, 1, {"chances": [0.5] * 4}),  # 7 is the end of the sequence: what follows is cut
    ],
}


def test_what_rounds_tell_of_a_text(tmp_path):
    known = replay(runs(tmp_path / "r", EXITS), flat())
    (text,) = known.recorded.texts
    assert text.right.tolist() == [-1, 1, 0, 1, 1, -1, -1, 1]
    assert text.chances[[1, 2, 3, 4, 7]].tolist() == [0.75, 0.25, 1.0, 1.0, 0.5]
    assert np.isnan(text.chances[[0, 5, 6]]).all()
    assert known.recorded._after_wrong.tolist() == [128]
    assert (text.prompt_tokens, text.limit, text.prefill) == (100, 8, 1.5)
    assert (known.num_requests, known.of_this_table) == (1, True)


@pytest.mark.parametrize(("temperature", "sampling"), [(0.0, 0.125), (0.8, 0.5), (None, 0.5)])
def test_passes_end_as_the_recorded_ones_did(tmp_path, temperature, sampling):
    folder = runs(tmp_path / "r", EXITS)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"sampling": {"temperature": temperature}}))
    known = replay(folder, replace(flat(), sampling=0.5, greedy_sampling=0.125))
    assert known.table.sampling == sampling


def test_arms_with_the_same_output_complete_one_another(tmp_path):
    recorded = {
        "0/0": [PREFILL, *[(0, 0, 1, {})] * 4],
        "0/1": [PREFILL, (1, 1, 2, {}), (1, 0, 1, {}), (1, 0, 1, {})],
        "0/2": [PREFILL, (2, 2, 3, {}), (1, 0, 1, {})],
        "1/2": [PREFILL, (2, 0, 1, {})],
        "1/x": [PREFILL, (2, 2, 3, {})],  # another output
    }
    known = replay(runs(tmp_path / "r", recorded), flat())
    rights = [t.right.tolist() for t in known.recorded.texts]
    assert rights == [[-1, 1, 1, 0, 0], [-1, 0], [-1, 1, 1, -1]]


def test_looked_up_tokens_tell_nothing_of_the_exit(tmp_path):
    lookup = (4, 2, 3, {"mode": "lookup", "num_draft_passes": 0})
    saved = (4, 0, 1, {"num_draft_passes": 2})
    known = replay(runs(tmp_path / "r", {"0/auto": [PREFILL, lookup, saved]}), flat())
    assert known.recorded.texts[0].right.tolist() == [-1, -1, -1, -1, 0]
    assert known.passes_per_token == 0.25


def test_tokens_looked_up_behind_a_draft_tell_nothing_of_the_exit(tmp_path):
    more = {"num_draft_passes": 2, "num_lookup_tokens": 3, "chances": [0.75, 0.5]}
    all_right, wrong = (5, 4, 5, more), (5, 1, 2, more)
    known = replay(runs(tmp_path / "r", {"0/auto": [PREFILL, all_right, wrong]}), flat())
    assert known.recorded.texts[0].right.tolist() == [-1, 1, 1, -1, -1, -1, 1, 0]
    assert known.passes_per_token == 1.0


def test_recorded_rounds_give_the_overhead(tmp_path):
    """Verify took 1.5 times the table's pass, drafts twice, and 0.125 s passed between rounds."""
    known = replay(runs(tmp_path / "r", EXITS), flat())
    assert known.overhead == Overhead(1.5, 2.0, 0.125, 0.0, 0.0)
    faster = replay(runs(tmp_path / "r", EXITS), replace(flat(), key=KEY | {"device": "other"}))
    assert faster.overhead == Overhead()
    assert not faster.of_this_table
    assert faster.recorded.texts[0].prefill is None


@pytest.mark.parametrize(
    ("name", "before", "other"),
    [
        ("exit_adapter", "none", "0123456789abcdef"),
        ("draft_vocabulary", "all", "512 ids, 01234567"),
        ("passes", "by host", "recorded"),
        ("exact", False, True),
    ],
)
def test_recorded_times_are_of_one_adapter_vocabulary_exactness_and_way_to_start_passes(
    tmp_path, name, before, other
):
    """Drafts take another time with another one."""
    folder = runs(tmp_path / "r", EXITS)
    run = json.loads((folder / "run.json").read_text())
    run["cost"]["key"][name] = before
    (folder / "run.json").write_text(json.dumps(run))
    known = [
        replay(folder, replace(flat(), key=KEY | {name: value})).of_this_table
        for value in (before, other)
    ]
    assert known == [True, False]


def test_recorded_rounds_tell_the_price_of_a_token_and_of_each_further_one(tmp_path):
    sampled = [(k, 0, 1, {"sample_seconds": 0.25 + 0.0625 * k}) for k in (0, 0, 2, 3)]
    known = replay(runs(tmp_path / "r", {"0/auto": [PREFILL, *sampled]}), flat())
    assert (known.overhead.sampling, known.overhead.judging) == (0.25, 0.0625)
    drafted = [PREFILL, *[(3, 0, 1, {"sample_seconds": 1.0})] * 3]  # of one size: the mean
    known = replay(runs(tmp_path / "s", {"0/3": drafted}), flat())
    assert (known.overhead.sampling, known.overhead.judging) == (0.25, 0.25)


SLOW = {"verify_seconds": 3.0}


def test_paces_of_recorded_rounds(tmp_path):
    """Twice as long in the second request: its prefill is one of 1.5 s on a slow machine."""
    plain = [PREFILL, *[(0, 0, 1, {})] * 2]
    slow = [(*r[:3], SLOW) for r in plain]
    drafted = [PREFILL, (1, 1, 2, {"draft_seconds": 0.5})]
    recorded = {"0/0": plain, "1/0": slow, "2/0": plain, "3/1": drafted}
    known = replay(runs(tmp_path / "r", recorded), flat())
    assert known.machine.taken.tolist() == [0.0, 1.5, 3.0, 6.0, 9.0, 10.5, 12.0, 14.0]
    assert known.machine.usual.tolist() == [0.0, 1.5, 3.0, 4.5, 6.0, 7.5, 9.0, 11.0]
    assert [t.prefill for t in known.recorded.texts] == [1.5] * 4
    other = replay(runs(tmp_path / "r", recorded), replace(flat(), key=KEY | {"device": "other"}))
    assert other.machine is None


def test_what_the_table_is_wrong_about_is_no_pace(tmp_path):
    """Rounds with a draft always took longer than the table says: that is a round's price."""
    wide = (1, 0, 1, {"verify_seconds": 4.0})
    rounds = [PREFILL, (0, 0, 1, {}), wide, (0, 0, 1, {}), wide, (0, 0, 1, {})]
    known = replay(runs(tmp_path / "r", {"0/1": rounds}), flat())
    assert known.machine.usual == pytest.approx(known.machine.taken)


def test_waiting_between_rounds_is_no_pace(tmp_path):
    """Another row's prefill lay there; the simulation has its own."""
    folder = runs(tmp_path / "r", EXITS)
    lines = [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]
    for one in lines[3:]:
        one["elapsed_seconds"] += 100.0
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert replay(folder, flat()).machine.taken[-1] == sum(1.5 + 0.5 * d for d in (3, 2, 0, 4))


def test_a_recorded_request_is_simulated_as_it_went(tmp_path):
    rounds = [PREFILL, (2, 1, 2, {}), (2, 0, 1, {}), (2, 2, 3, {}), (2, 1, 2, {}), (0, 0, 1, {})]
    known = replay(runs(tmp_path / "r", {"0/2": rounds}), flat())
    cell = one_cell(flat(), known.recorded, "fixed:2", overhead=known.overhead)
    seconds = sum(1.5 + 0.5 * drafted + 0.125 for drafted, *_ in rounds[1:])
    assert cell.end_to_end.p50 - cell.first_token.p50 == pytest.approx(seconds)
    assert cell.first_token.p50 == pytest.approx(1.5 + 0.125)
    assert cell.mean_accepted_length == pytest.approx(9 / 5, rel=0.05)


def test_shares_of_right_drafts_stay_with_their_request():
    """Half of the texts are always right: their requests end in half the rounds."""
    sure = [
        RecordedText(10, 33, np.full(33, r, dtype=np.int8), np.full(33, np.nan)) for r in (0, 1)
    ]
    stream = Recorded(sure).stream(400, 0)
    loop = loop_of(flat(), stream, "fixed:1", 1)
    loop.run(Fixed(1), lambda done: None)
    times = np.round(loop._end_to_end - loop._first_token, 9)
    assert set(times) == {16 * 1.25, 31 * 1.25 + 1.0}


def test_unfinished_requests_and_cut_lines_do_not_count(tmp_path):
    folder = runs(tmp_path / "r", EXITS | {"1/4": EXITS["0/4"]}, finished={"0/4"})
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"request_id": "0/4", "ind')
    known = replay(folder, flat())
    assert (known.num_requests, known.recorded._after_wrong.tolist()) == (1, [128])


def test_new_tokens_go_over_recorded_ones_again():
    right = np.array([-1, 1, 0, 1], dtype=np.int8)
    stream = Recorded([RecordedText(5, 9, right, np.full(4, np.nan))]).stream(2, 0, new_tokens=9)
    assert stream.tokens.tolist() == stream.limits.tolist() == [9, 9]
    assert stream.runs[1:9].tolist() == [1, 0, 2, 1, 0, 2, 1, 0]


def run_command(capsys, *words):
    code = main(["simulate", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def cost_file(tmp_path):
    path = tmp_path / "cost.json"
    flat().save(path)
    return path


def test_command_over_runs(tmp_path, capsys):
    cost, folder, html = cost_file(tmp_path), runs(tmp_path / "r", EXITS), tmp_path / "sim.html"
    words = ["--cost", cost, "--runs", folder, "--requests", 20, "--concurrency", "1,2"]
    code, out, err = run_command(capsys, *words, "--html", html, "--json")
    assert code == 0
    document = json.loads(out.splitlines()[-1])
    assert not document["synthetic"]
    assert [(c["policy"], c["concurrency"]) for c in document["cells"]] == [
        (p, n) for n in (1, 2) for p in POLICIES
    ]
    assert {"policy", "on", "off"} == set(document["crossovers"][0])
    assert "1 recorded requests" in err
    assert "Prefill as recorded" in err
    assert "1.00 times as long as if no round had been slower" in err
    page = html.read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert page.count("<table>") == 7
    assert "fixed:4" in page
    assert "http" not in page.split("<body>")[1]


NOT_USED = "recorded seconds are not used, recorded acceptance is"


@pytest.mark.parametrize(
    ("changes", "differing", "end"),
    [
        (
            {"device": "x", "dtype": "float32"},
            "on another device (x, the runs' d), in another dtype (float32, the runs' bfloat16)",
            f"{NOT_USED}.",
        ),
        (
            {"draft_layers": "0,1"},
            "with other draft layers (0,1, the runs' unknown)",
            f"{NOT_USED}, though it is of another draft than the table's.",
        ),
    ],
)
def test_command_names_what_the_table_was_measured_with_instead(
    tmp_path, capsys, changes, differing, end
):
    path, folder = tmp_path / "other.json", runs(tmp_path / "r", EXITS)
    replace(flat(), key=KEY | changes).save(path)
    words = ["--cost", path, "--runs", folder, "--requests", 20, "--concurrency", "1"]
    code, out, err = run_command(capsys, *words)
    assert code == 0
    assert f"The cost table was measured {differing}: {end}" in (out + err).splitlines()


@pytest.mark.parametrize("name", sorted(SAID.keys() | {"backend"}))
def test_acceptance_is_of_the_draft_and_of_no_machine(tmp_path, name):
    known = replay(runs(tmp_path / "r", EXITS), replace(flat(), key=KEY | {name: "another"}))
    assert list(known.differing) == [name]
    of_the_draft = {"fingerprint", "draft_layers", "exit_adapter", "draft_vocabulary"}
    assert known.of_another_draft == (name in of_the_draft)


def test_times_of_other_versions_count(tmp_path):
    key = KEY | dict.fromkeys(VERSIONS, "another")
    known = replay(runs(tmp_path / "r", EXITS), replace(flat(), key=key))
    assert known.of_this_table


def test_runs_that_do_not_tell_what_they_are_of_have_no_times(tmp_path, capsys):
    folder = runs(tmp_path / "r", EXITS, cost=replace(flat(), key={}))
    words = ["--cost", cost_file(tmp_path), "--runs", folder, "--requests", 20]
    code, out, err = run_command(capsys, *words, "--concurrency", "1")
    assert code == 0
    assert "The runs do not tell what their passes were measured with: recorded" in out + err


def test_one_user_is_one():
    found = SimpleNamespace(
        crossovers=[Crossover("a", 1, None), Crossover("b", None, 1), Crossover("c", 1, 2)]
    )
    assert crossings(found) == [
        "a is never slower than off up to 1 user.",
        "b is slower than off from 1 user on.",
        "c is faster than off up to 1 user and slower at 2: the crossover lies between.",
    ]
    (many,) = crossings(SimpleNamespace(crossovers=[Crossover("a", 8, None)]))
    assert many == "a is never slower than off up to 8 users."


def test_a_table_without_draft_passes_prices_no_early_exit(tmp_path, capsys):
    """Drafts that cost nothing made any acceptance pay."""
    path = tmp_path / "bare.json"
    replace(flat(), key={"draft_layers": "none"}).save(path)
    words = ["--cost", path, "--requests", 20, "--concurrency", "1"]
    code, _, err = run_command(capsys, *words, "--runs", runs(tmp_path / "r", EXITS))
    assert code == 2
    assert "has no draft passes, and the runs' drafts are an early exit's: give layerskip" in err
    code, out, err = run_command(capsys, *words, "--acceptance", "0.8")
    assert code == 0
    assert "drafts cost what looked-up tokens do" in out + err
    code, out, err = run_command(capsys, *words, "--acceptance", "0.8", "--policies", "off")
    assert code == 0
    assert "looked-up" not in out + err


def test_synthetic_acceptance_is_called_so(tmp_path, capsys):
    cost = cost_file(tmp_path)
    words = ["--cost", cost, "--acceptance", "0.8,0.5", "--requests", 20, "--concurrency", "1"]
    words += ["--new-tokens", 9]
    code, out, err = run_command(capsys, *words)
    assert code == 0
    assert "Synthetic: acceptance and lengths are invented" in out
    assert "cost table ends" not in out
    assert err == ""
    coarse = Curve((1, 16), (0,), ((1.0, 1.5),))
    replace(flat(), verify=coarse).save(cost)
    assert "The cost table ends at 16 rows" in run_command(capsys, *words)[1]


BAD = {
    "no runs": (["--runs", "{tmp}/none"], "none is no runs folder (there is no such folder): gi"),
    "no run.json": (["--runs", "{tmp}"], "is no runs folder (it has no run.json): give"),
    "no requests": (["--runs", "{tmp}/empty"], "has no finished request"),
    "no drafts": (["--runs", "{tmp}/plain"], "measure with an arm other than 0"),
    "damaged": (["--runs", "{tmp}/damaged"], "is not complete"),
    "no number": (["--runs", "{tmp}/nan"], "rounds.jsonl is damaged (line 1)"),
    "no rounds": (["--runs", "{tmp}/lost"], "rounds.jsonl lacks the rounds of 1 of"),
    "no file of rounds": (["--runs", "{tmp}/gone"], "put it back, or measure again"),
    "users": (
        ["--acceptance", "0.5", "--concurrency", "0"],
        "concurrency must be between 1 and 1024",
    ),
    "users, words": (["--acceptance", "0.5", "--concurrency", "a"], "numbers with commas"),
    "requests": (["--acceptance", "0.5", "--requests", "0"], "the number of requests must be"),
    "tokens": (["--acceptance", "0.5", "--new-tokens", "0"], "--new-tokens must be at least 1"),
    "policy": (["--acceptance", "0.5", "--policies", "off,best"], "policy 'best' is not known"),
    "policy number": (["--acceptance", "0.5", "--policies", "fixed:0"], "allowed are off, auto"),
    "acceptance": (["--acceptance", "1.5"], "acceptance must be one or more shares"),
    "acceptance, words": (["--acceptance", "high"], "numbers with commas"),
    "memory": (["--acceptance", "0.5", "--new-tokens", "9999999"], "too many to simulate"),
    "prompt": (["--runs", "{tmp}/plain", "--prompt-tokens", "9"], "--prompt-tokens is for"),
    "both": (["--runs", "r", "--acceptance", "0.5"], "not allowed with"),
    "neither": ([], "one of the arguments"),
    "html": (["--acceptance", "0.5", "--html", "{tmp}/no/sim.html"], "there is no folder"),
    "html, no name": (["--acceptance", "0.5", "--html", ""], "--html must name a file, got ''"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence(tmp_path, capsys, words):
    options, message = BAD[words]
    runs(tmp_path / "empty", {})
    runs(tmp_path / "plain", {"0/0": [PREFILL, (0, 0, 1, {})]})
    damaged = runs(tmp_path / "damaged", EXITS)
    lost, gone = (runs(tmp_path / name, EXITS) / "rounds.jsonl" for name in ("lost", "gone"))
    first = json.loads(lost.read_text().splitlines()[0])["request_id"]
    lines = lost.read_text().splitlines(keepends=True)
    lost.write_text("".join(line for line in lines if json.loads(line)["request_id"] != first))
    gone.unlink()
    endless = runs(tmp_path / "nan", EXITS) / "rounds.jsonl"
    endless.write_text(endless.read_text().replace('_seconds": ', '_seconds": NaN, "": ', 1))
    with (damaged / "rounds.jsonl").open("a") as file:
        file.write('{"request_id": "0/4"}\n')
    try:
        code, out, err = run_command(
            capsys, "--cost", cost_file(tmp_path), *(o.format(tmp=tmp_path) for o in options)
        )
    except SystemExit as exit_:
        code, (out, err) = exit_.code, capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("layerskip: ")
    assert len(err.strip().splitlines()) == 1
