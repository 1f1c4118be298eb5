"""Exit adapters: their parts, their training form, their files, and how they are asked for."""

import copy
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from adapters import EXIT, KINDS, make_adapter
from command_line import assert_refused, run
from torch import Tensor
from toys import DTYPES, NUM_LAYERS, PLANS, VOCAB_SIZE, make_model, random_ids
from zoo import make_toy

from layerskip import DraftPlan, PlanFile, SelfSpeculativeLM
from layerskip.adapter_shape import AdapterShape
from layerskip.exit_adapter import ExitAdapter
from layerskip.fingerprint import cost_key, fingerprint, mismatch
from layerskip.model import DecoderStack
from layerskip.profiling import fitting_cost, measure_cost

PLAN = PLANS["exit"]
FAMILIES = ["gpt2", "gptj", "gemma2"]
SLOW_FAMILIES = ["cohere", "phi", "gpt_neox", "opt", "granite", "mixtral"]


def states_of(model, ids: list[int], exit_layer: int = EXIT) -> Tensor:
    """``(1, tokens, hidden)`` after some layers, by transformers."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[exit_layer].detach()


def finishing(model) -> Any:
    """What a Llama does after its layers."""
    return lambda x, project: project(model.model.norm(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_adapter_changes_no_bit(toy, kind, dtype):
    model = toy("llama", dtype)
    adapter = ExitAdapter.create(model, EXIT, **KINDS[kind])
    states = states_of(model, random_ids(20))
    hidden = adapter.hidden(states)
    assert torch.equal(hidden, states)
    logits = adapter.logits(hidden[0], finishing(model), model.lm_head)
    assert torch.equal(logits, model.lm_head(model.model.norm(states[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_it_can_be_trained(kind):
    """Steps against the gradient lower the loss, of a model that is not trained."""
    model = make_model().requires_grad_(requires_grad=False)
    adapter = ExitAdapter.create(model, EXIT, **KINDS[kind])
    states, wanted = states_of(model, random_ids(40)), torch.tensor(random_ids(40, seed=1))
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.02)
    losses = []
    for _ in range(6):
        hidden = adapter.hidden(states)[0]
        logits = adapter.logits(hidden, finishing(model), model.lm_head)
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters())


def test_logits_are_divided_by_the_temperature(toy):
    adapter, hidden = make_adapter(toy()), torch.randn(3, 64)
    assert adapter.temperature == 1.25
    warm = adapter.logits(hidden, finishing(toy()), toy().lm_head)
    adapter.temperature = 1.0
    torch.testing.assert_close(warm * 1.25, adapter.logits(hidden, finishing(toy()), toy().lm_head))


def test_what_a_block_may_see(toy):
    """Causal without a mask; a mask of documents with positions of their own keeps them apart."""
    adapter, states = make_adapter(toy()), states_of(toy(), random_ids(12))
    whole = adapter.hidden(states)
    torch.testing.assert_close(adapter.hidden(states[:, :7]), whole[:, :7])
    document = torch.tensor([0] * 7 + [1] * 5)
    mask = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
    positions = torch.tensor([[*range(7), *range(5)]])
    packed = adapter.hidden(states, positions, mask[None, None])
    torch.testing.assert_close(packed[:, :7], whole[:, :7])
    torch.testing.assert_close(packed[:, 7:], adapter.hidden(states[:, 7:]))
    added = torch.zeros(12, 12).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(adapter.hidden(states, positions, added[None, None]), packed)
    shifted = adapter.hidden(states, torch.arange(100, 112)[None])
    torch.testing.assert_close(shifted, whole, atol=1e-4, rtol=1e-4)  # rotary is relative
    stretched = adapter.hidden(states, 3 * torch.arange(12)[None])
    assert not torch.allclose(stretched, whole, atol=1e-3)


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FAMILIES)]
)
def test_other_families(family):
    """Their own norm, and what comes after their head, are kept around the adapter's part; drafts
    are those of the training form, and the text is the model's."""
    model = make_toy(family)
    adapter = make_adapter(model, "bridge" if family == "gptj" else "block")
    lm = SelfSpeculativeLM(model, num_draft_tokens=3, lookup=False, exit_adapter=adapter)
    prompt = random_ids(20)
    plain = lm.generate(prompt, max_new_tokens=8, num_draft_tokens=0)
    assert lm.generate(prompt, max_new_tokens=8).token_ids == plain.token_ids
    head, states = model.get_output_embeddings(), []
    with torch.inference_mode():
        got = lm.stack.all_exit_logits(prompt, (EXIT,))[EXIT]
        cache = lm.stack.new_cache(num_rows=1, num_slots=20)
        lm.stack.prefill(prompt, cache, 0, states=states)
        hidden = adapter.hidden(torch.cat(states)[None])[0]
        finish = lm.stack.head
        want = adapter.logits(hidden, lambda x, project: finish(x, len(x), project), head)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_model_with_attention_of_its_own_has_no_block():
    with pytest.raises(ValueError, match="attention code of its own; use a bridge"):
        make_adapter(make_toy("gptj"))


def test_a_fingerprint_of_the_model_is_that_of_its_stack(toy):
    for model in (toy(), make_toy("mixtral"), make_toy("gpt2")):
        stack = DecoderStack(model, exact=False)
        assert ExitAdapter.create(model, 1).backbone == fingerprint(stack.twin)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(toy, tmp_path, kind):
    adapter = make_adapter(toy(), kind)
    adapter.measurements = {"acceptance": [0.5, 0.25]}
    adapter.save(tmp_path / "new" / "out")
    loaded = ExitAdapter.load(tmp_path / "new" / "out", toy())
    assert (loaded.shape, loaded.temperature) == (adapter.shape, adapter.temperature)
    assert loaded.measurements == adapter.measurements
    assert loaded.fingerprint() == adapter.fingerprint()
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, adapter.state_dict()[name])
    half = ExitAdapter.load(tmp_path / "new" / "out", toy("llama", "bfloat16"))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.fingerprint() == adapter.fingerprint()


def other_weights() -> Any:
    model = make_model()
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.1)
    return model


OTHERS = {
    "weights": (other_weights, "was trained on another checkpoint (fingerprint"),
    "depth": (lambda: make_toy("llama"), "is for a model of 6 layers; this one has 5"),
    "width": (lambda: make_model(shape="odd"), "is for a model of 64 hidden units; this one has"),
    "tokens": (
        lambda: make_model(vocab_size=200),
        "is for a model of 331 token ids; this one has 200",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused(toy, tmp_path, other):
    make, reason = OTHERS[other]
    make_adapter(toy()).save(tmp_path)
    with pytest.raises(ValueError, match=re.escape(reason)):
        ExitAdapter.load(tmp_path, make())
    with pytest.raises(ValueError, match=re.escape(reason)):
        SelfSpeculativeLM(make(), exit_adapter=make_adapter(toy()))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


BROKEN = {
    "no folder": (lambda p: (p / "exit_adapter.json").unlink(), "has no exit_adapter.json"),
    "no json": (
        lambda p: (p / "exit_adapter.json").write_text("{"),
        "is not a file of an exit adapter",
    ),
    "version": (lambda p: edit(p / "exit_adapter.json", version=2), "has exit adapter version 2"),
    "shape": (lambda p: edit(p / "exit_adapter.json", shape={}), "is not an exit adapter"),
    "cold": (lambda p: edit(p / "exit_adapter.json", temperature=0), "must be finite and between"),
    "no tensors": (lambda p: (p / "exit_adapter.safetensors").unlink(), "cannot be read"),
    "half of them": (
        lambda p: (p / "exit_adapter.safetensors").write_bytes(
            (p / "exit_adapter.safetensors").read_bytes()[:-100]
        ),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_are_refused(toy, tmp_path, how):
    make_adapter(toy()).save(tmp_path)
    breaks, reason = BROKEN[how]
    breaks(tmp_path)
    with pytest.raises(ValueError, match=reason):
        ExitAdapter.load(tmp_path, toy())


def test_tensors_of_another_shape_are_refused(toy, tmp_path):
    make_adapter(toy()).save(tmp_path)
    shape = json.loads((tmp_path / "exit_adapter.json").read_text("utf-8"))["shape"]
    edit(tmp_path / "exit_adapter.json", shape=shape | {"head_rank": 7})
    with pytest.raises(ValueError, match="is not whole: size mismatch"):
        ExitAdapter.load(tmp_path, toy())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"exit_layer": 0}, "exit_layer must be between 1 and 5, got 0"),
        ({"exit_layer": NUM_LAYERS}, "exit_layer must be between 1 and 5, got 6"),
        ({"bridge_rank": 2, "block": True}, "a bridge or a block, not both"),
        ({"block": True, "block_width": 40}, "block_width must be a multiple of 32, got 40"),
        ({"block_width": 64}, "block_width=64 needs block=True"),
        ({"norm": False, "head_rank": 0}, "needs a part to train"),
        ({"head_rank": -1}, "head_rank must be at least 0, got -1"),
    ],
)
def test_sizes_that_make_no_sense(toy, settings, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        ExitAdapter.create(toy(), **{"exit_layer": 2} | settings)


def test_wrapping_checks_what_it_is_given(toy):
    adapter = make_adapter(toy())
    with pytest.raises(TypeError, match="exit_adapter must be an ExitAdapter or None, got str"):
        SelfSpeculativeLM(toy(), exit_adapter="out")
    with pytest.raises(
        ValueError, match="adapter goes on after layer 2, and the plan exits after 3"
    ):
        SelfSpeculativeLM(toy(), None, DraftPlan(6, (0, 1, 2)), exit_adapter=adapter)
    with pytest.raises(ValueError, match="after layer 2, and the plan runs layers 0-1, 3, 5"):
        SelfSpeculativeLM(toy(), None, PLANS["skipping"], exit_adapter=adapter)
    half = copy.deepcopy(adapter).to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"is in torch.bfloat16 on cpu, the model in torch.float32"
    ):
        SelfSpeculativeLM(toy(), exit_adapter=half)
    lm = SelfSpeculativeLM(toy(), exit_adapter=adapter)
    assert lm.plan == PLAN == adapter.shape.plan


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_adapter_with_a_weight_that_is_no_number_is_refused_by_name(toy, value):
    adapter = make_adapter(toy())
    with torch.no_grad():
        adapter.head_lora.up[3, 1] = value
    with pytest.raises(ValueError, match=r"adapter holds NaN or infinite values in head_lora\.up;"):
        SelfSpeculativeLM(toy(), exit_adapter=adapter)


def test_an_adapter_is_of_a_model_that_is_not_wrapped(toy, tmp_path):
    make_adapter(toy()).save(tmp_path)
    lm = SelfSpeculativeLM(toy())
    said = "model must be a transformers .* got SelfSpeculativeLM; give the model itself, not"
    for make in (lambda: ExitAdapter.create(lm, 2), lambda: ExitAdapter.load(tmp_path, lm)):
        with pytest.raises(TypeError, match=said):
            make()


def count_runs(monkeypatch) -> list[int]:
    """Rows of each pass through an adapter, as they happen."""
    passes: list[int] = []
    run_it = ExitAdapter.run

    def counted(self, hidden, *rest):
        passes.append(len(hidden))
        return run_it(self, hidden, *rest)

    monkeypatch.setattr(ExitAdapter, "run", counted)
    return passes


def test_a_cost_table_is_of_the_adapter(toy, monkeypatch, caplog):
    """Another adapter, or the same one trained on, needs another table; one without needs none."""
    plain = DecoderStack(toy())
    adapter = make_adapter(toy())
    stack = DecoderStack(toy(), adapter=adapter)
    passes = count_runs(monkeypatch)
    table = measure_cost(stack, PLAN, quick=True)
    assert passes  # how many depends on what else the machine does
    assert mismatch(table, stack, PLAN) is None
    assert "with another exit adapter" in mismatch(table, plain, PLAN)
    assert mismatch(replace(table, key=cost_key(plain, PLAN)), plain, PLAN) is None
    other = DraftPlan(6, (0, 1, 2))
    assert cost_key(stack, other)["exit_adapter"] == "none"
    with torch.no_grad():
        adapter.block.out[3, 3] += 0.01
    assert "with another exit adapter" in mismatch(table, stack, PLAN)
    fitting_cost(stack, PLAN, table)
    assert caplog.messages[-1].endswith("a quick measurement is used")  # search has no adapters


@pytest.fixture
def trained(folder: Path, tmp_path: Path) -> Path:
    """A folder with an adapter of the toy checkpoint, after layer 3; its own plan says 2."""
    model = make_model(dtype="bfloat16")
    make_adapter(model, exit_layer=3).save(tmp_path / "out")
    return tmp_path / "out"


def test_from_pretrained_exits_where_the_adapter_is(folder, trained, caplog):
    lm = SelfSpeculativeLM.from_pretrained(folder, exit_adapter=trained, num_draft_tokens=3)
    plain = SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=0)
    assert lm.plan == DraftPlan(NUM_LAYERS, (0, 1, 2))
    assert lm.stack.adapter.shape.exit_layer == 3
    out, want = (x.generate("def f(x):", max_new_tokens=12) for x in (lm, plain))
    assert (out.text, out.token_ids) == (want.text, want.token_ids)
    assert {r.exit_layer for r in out.rounds} >= {3}
    with pytest.raises(ValueError, match="goes on after layer 3, and the plan exits after 2"):
        SelfSpeculativeLM.from_pretrained(folder, exit_adapter=trained, exit_layer=2)
    PlanFile(lm.plan, num_draft_tokens=2, acceptance=(0.5,)).save(trained / "layerskip.json")
    with caplog.at_level(logging.WARNING):
        known = SelfSpeculativeLM.from_pretrained(folder, exit_adapter=trained)
    assert (known.num_draft_tokens, known.plan_file.acceptance) == (2, (0.5,))
    assert not caplog.records


def test_a_plan_file_without_a_plan_means_the_adapter_s_exit(folder, trained):
    """For what is loaded as for a model that is wrapped: what else the file says stays."""
    file = PlanFile(None, 2, measurements={"verdict": "no plan pays"})
    lm = SelfSpeculativeLM.from_pretrained(folder, plan=file, exit_adapter=trained)
    assert (lm.plan.exit_layer, lm.num_draft_tokens) == (3, 2)
    assert lm.plan_file.measurements["verdict"] == "no plan pays"


def test_an_adapter_s_own_plan_is_read_before_the_checkpoint_s(folder, trained, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "layerskip.json").write_text('{"version": 9}')
    given = {"exit_adapter": trained, "num_draft_tokens": 0}
    with pytest.raises(ValueError, match=r"layerskip\.json"):
        SelfSpeculativeLM.from_pretrained(model, **given)
    PlanFile(DraftPlan(NUM_LAYERS, (0, 1, 2))).save(trained / "layerskip.json")
    assert SelfSpeculativeLM.from_pretrained(model, **given).plan.exit_layer == 3


def test_commands_take_it(folder, trained):
    prompt = ("--prompt", "def f(x):", "--max-new-tokens", 8, "--json")
    got = run("generate", folder, "--exit-adapter", trained, "--num-draft-tokens", 3, *prompt)
    want = run("generate", folder, "--num-draft-tokens", 0, *prompt)
    assert got.document["text"] == want.document["text"]
    assert got.document["stats"]["num_draft_tokens"] > 0
    info = run("info", folder, "--exit-adapter", trained, "--json").document
    assert info["plan_from"] == "--exit-adapter"
    assert info["draft_layers"] == [0, 1, 2]
    assert info["cost_table"].startswith("none saved")
    assert "search" not in info["cost_table"]  # which has no adapters
    count = sum(p.numel() for p in make_adapter(make_model(), exit_layer=3).parameters())
    assert info["exit_adapter"] == (
        f"after layer 3: norm, head rank 3, block of width 96; {count} parameters, temperature 1.25"
    )
    assert run("info", folder, "--json").document["exit_adapter"] == "none"
    refused = run("generate", folder, "--exit-adapter", trained, "--exit-layer", 2, *prompt)
    assert_refused(refused, "goes on after layer 3", "exits after 2")
    assert_refused(
        run("generate", folder, "--exit-adapter", folder, *prompt), "has no exit_adapter.json"
    )


def test_compare_decodes_and_reads_with_it(folder, trained, tmp_path):
    example = {"prompt": "def f(x):\n", "continuation": "    return x + 1\n"}
    (tmp_path / "p.jsonl").write_text(json.dumps(example) + "\n", encoding="utf-8")
    argv = ("compare", folder, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 6, "--json")
    document = run(*argv, "--exit-adapter", trained, "--modes", "plain,layerskip", "--repeats", 1)
    assert document.document["modes"]["layerskip"]["identical_to_plain"] == 1.0
    plain = run(*argv, "--teacher-forced").document["exits"]
    adapted = run(*argv, "--teacher-forced", "--exit-adapter", trained).document["exits"]
    assert plain["2"] == adapted["2"]
    assert plain["3"] != adapted["3"]
    with mock.patch("layerskip.commands.comparing.MOST_EXITS", 2):  # an exit beyond them is read
        document = run(*argv, "--teacher-forced", "--exit-adapter", trained).document
    assert document["exits"] == {e: adapted[e] for e in ("1", "2", "3")}


def test_a_shape_s_json_is_checked(toy):
    shape = make_adapter(toy()).shape
    assert AdapterShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    with pytest.raises(ValueError, match="a shape has the fields"):
        AdapterShape.from_dict(shape.to_dict() | {"more": 1})
    with pytest.raises(TypeError, match="norm must be a bool"):
        AdapterShape.from_dict(shape.to_dict() | {"norm": 1})
    with pytest.raises(ValueError, match="a block cannot have 4 heads"):
        AdapterShape.from_dict(shape.to_dict() | {"num_kv_heads": 3})
    assert len(shape.frequencies) == 8
    assert shape.vocab_size == VOCAB_SIZE
