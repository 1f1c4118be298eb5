import json

import pytest
import torch
from controlling import table
from toys import PLANS, random_ids

from layerskip import Policy, Rule, SelfSpeculativeLM
from layerskip.batch import Batch
from layerskip.controller import Controller

POLICY = Policy(
    (
        Rule("code", (0, 8), 0, "p10 pays less than it costs"),
        Rule("code", (8, None), 2),
        Rule("", (0, None), None),
    ),
    "task",
    {"model": "toy"},
)


@pytest.mark.parametrize(
    ("labels", "prompt_tokens", "most"),
    [
        ({"task": "code"}, 7, 0),
        ({"task": "code"}, 8, 2),
        ({"task": "code"}, 100_000, 2),
        ({"task": "chat"}, 7, None),  # unknown: automatic
        ({"other": "code"}, 7, None),
        ({}, 7, None),
    ],
)
def test_a_request_finds_its_rule(labels, prompt_tokens, most):
    assert POLICY.max_draft_tokens(labels, prompt_tokens) == most


def test_without_a_label_all_requests_are_of_one_task():
    policy = Policy((Rule("", (4, 8), 0),))
    found = [policy.max_draft_tokens({"task": "code"}, n) for n in (3, 4, 7, 8)]
    assert found == [None, 0, 0, None]


def test_the_file_is_read_as_it_was_written(tmp_path):
    POLICY.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == POLICY
    content = json.loads((tmp_path / "policy.json").read_text())
    assert content["rules"][0] == {
        "task": "code",
        "prompt_tokens": [0, 8],
        "max_draft_tokens": 0,
        "reason": "p10 pays less than it costs",
    }
    assert len((tmp_path / "policy.json").read_text().splitlines()) > 20  # for people to read


def changed(**parts):
    return {**POLICY.to_dict(), **parts}


RULE = {"task": "code", "prompt_tokens": [0, 8], "max_draft_tokens": 0}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "a policy of version 1 was expected, got \\[\\]"),
        (changed(version=2), "a policy of version 1 was expected, got 2"),
        (changed(version=True), "a policy of version 1 was expected, got True"),
        (changed(rule=[]), "a policy has no 'rule'"),
        (changed(rules={}), "rules must be a list"),
        (changed(rules=[3]), "rule 1 needs prompt_tokens and max_draft_tokens, got 3"),
        (changed(rules=[RULE | {"": 1}]), "rule 1 has no ''"),
        (changed(rules=[RULE | {"k": 1}]), "rule 1 has no 'k'"),
        (changed(rules=[RULE | {"prompt_tokens": [0]}]), "rule 1: prompt_tokens must be two"),
        (changed(rules=[RULE | {"prompt_tokens": [8, 8]}]), "rule 1: the second of prompt_tokens"),
        (changed(rules=[RULE | {"max_draft_tokens": 99}]), "rule 1: max_draft_tokens must be"),
        (changed(rules=[RULE | {"max_draft_tokens": True}]), "rule 1: max_draft_tokens must be"),
        (changed(rules=[RULE | {"task": 3}]), "rule 1: a rule's task must be text, got 3"),
        (changed(label=3), "label must be text or None, got 3"),
        (changed(rules=[RULE, RULE]), "two rules of task 'code' cover prompts of 0 tokens"),
        (
            changed(rules=[RULE | {"prompt_tokens": [4, None]}, RULE | {"prompt_tokens": [5, 6]}]),
            "two rules of task 'code' cover prompts of 5 tokens",
        ),
    ],
)
def test_a_file_that_is_no_policy_is_refused_with_its_name(tmp_path, content, sentence):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence) as error:
        Policy.load(path)
    assert str(path) in str(error.value)


def test_what_was_measured_is_a_mapping():
    with pytest.raises(TypeError, match="measured must be a mapping, got 3"):
        Policy(measured=3)


@pytest.fixture(scope="module")
def lm(toy):
    lm = SelfSpeculativeLM(toy(), None, PLANS["exit"], lookup=False, policy=POLICY)
    # Drafts cost next to nothing and are thought to be right: the policy alone holds them back.
    lm._controller = Controller(table(1e-4, slope=0.0), [0.99], follows_clock=False)
    return lm


def drafted(out):
    return [r.num_draft_tokens for r in out.rounds[1:]]


def test_decoding_follows_the_policy(lm, wrap):
    short, long = random_ids(7), random_ids(8)
    settings = {"max_new_tokens": 24}
    off = lm.generate(short, labels={"task": "code"}, **settings)
    assert set(drafted(off)) == {0}
    capped = lm.generate(long, labels={"task": "code"}, **settings)
    assert max(drafted(capped)) <= 2
    free = lm.generate(long, labels={"task": "chat"}, **settings)
    assert max(drafted(free)) > 2  # so a cap of two cuts something off
    for prompt, out in ((short, off), (long, capped), (long, free)):
        assert out.token_ids == wrap(None).generate(prompt, **settings).token_ids


def test_a_request_that_names_a_number_gets_it(lm):
    out = lm.generate(random_ids(7), labels={"task": "code"}, max_new_tokens=24, num_draft_tokens=5)
    assert drafted(out)[0] == 5


@pytest.mark.parametrize(
    ("of_batch", "of_row", "most"),
    [({}, 5, 5), ({"num_draft_tokens": 5}, None, 5), ({"num_draft_tokens": 5}, "auto", 0)],
)
def test_a_row_that_leaves_its_number_open_follows_the_policy(lm, of_batch, of_row, most):
    """Whatever its batch says."""
    batch = lm.open_batch(max_new_tokens=12, labels={"task": "code"}, **of_batch)
    row = batch.add(random_ids(7), num_draft_tokens=of_row)
    while batch.unfinished:
        batch.step()
    assert max(drafted(batch.remove(row))) == most


def test_rows_of_a_batch_follow_their_own_rules(lm):
    batch = lm.open_batch(max_new_tokens=12, labels={"task": "code"})
    rows = [batch.add(random_ids(7)), batch.add(random_ids(7), labels={"task": "chat"})]
    while batch.unfinished:
        batch.step()
    outs = [batch.remove(row) for row in rows]
    assert [max(drafted(out)) > 0 for out in outs] == [False, True]
    assert outs[0].token_ids == outs[1].token_ids


def test_a_row_keeps_its_labels_when_the_caller_changes_them(lm):
    batch, labels = lm.open_batch(max_new_tokens=2), {"task": "code"}
    batch.add(random_ids(7), labels=labels)
    labels["task"] = "chat"
    assert [dict(r.labels) for r in batch.step()] == [{"task": "code"}]


def test_what_is_no_policy_is_refused(toy):
    with pytest.raises(TypeError, match="policy must be a Policy or None, got str"):
        SelfSpeculativeLM(toy(), None, policy="policy.json")


@pytest.mark.parametrize(("asked", "most"), [({}, 0), ({"num_draft_tokens": 3}, 3)])
def test_generating_through_transformers_follows_it_too(toy, monkeypatch, asked, most):
    model = toy()
    lm = SelfSpeculativeLM(
        model, None, PLANS["exit"], num_draft_tokens=4, policy=Policy((Rule("", (0, None), 0),))
    )
    rounds = []
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: rounds.extend(new := step(batch)) or new)
    ids = torch.tensor([random_ids(7)])
    model.generate(ids, max_new_tokens=8, custom_generate=lm.custom_generate, **asked)
    assert max(r.num_draft_tokens for r in rounds) == most
