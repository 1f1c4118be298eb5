"""The exit adapter's recipe: chains, the loss, exact resumption, the model's own text."""

import json
import math
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from recipe_modules import (
    assert_full_disk_leaves_checkpoint,
    exiting,
    imported,
    killed,
    launched,
    of_other_weights,
    packed_rows,
    take,
    weights,
)
from rich.console import Console
from torch import Tensor
from toys import NUM_LAYERS, VOCAB_SIZE, make_model, make_tokenizer, random_ids
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM
from zoo import make_toy

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM
from layerskip.exit_adapter import ExitAdapter
from layerskip.fingerprint import mismatch
from layerskip.plan import PlanFile

SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
EXIT = 2


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    names = (
        "adapter_measure",
        "adapter_settings",
        "adapter_trainer",
        "continuations",
        "data",
        "draft_training",
    )
    with imported([*names, "exit_adapter", "packing", "checkpoints", "running"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(**SMALL)


@pytest.fixture(scope="module")
def packed(recipe: SimpleNamespace) -> Any:
    return packed_rows(recipe)


def some_settings(recipe: SimpleNamespace, **changes: Any) -> Any:
    base = {
        "data": "none",
        "out": "nowhere",
        "steps": 6,
        "batch_size": 4,
        "seq_len": 32,
        "learning_rate": 0.01,
        "exit_layer": EXIT,
        "head_rank": 4,
        "rollout_every": 2,
        "rollout_starts": 2,
        "rollout_tokens": 2,
        "survival_tokens": 3,
    }
    return recipe.adapter_settings.Settings(**base | changes)


@pytest.fixture(scope="module")
def make_trainer(recipe: SimpleNamespace, model: Any, packed: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        settings = some_settings(recipe, **changes)
        return recipe.adapter_trainer.Trainer(
            settings, model, packed, Accelerator(cpu=True), exit_layer=EXIT
        )

    return make


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Chains


def test_a_chain_sees_its_document_up_to_its_start_and_itself(
    recipe: SimpleNamespace, model: Any, packed: Any
) -> None:
    """States of text and chains in one pass are those of each text run by itself."""
    training = recipe.draft_training
    batch = recipe.packing.Batches(packed, 2).at(0).batches[0]
    starts = torch.tensor([[3, 20, 20], [0, 9, 30]])
    tokens = torch.tensor(random_ids(18)).view(2, 3, 3)
    sequences = training.with_chains(batch, starts, tokens)
    backbone = training.Backbone(model, EXIT)
    states = backbone.states(sequences.ids, sequences.positions, sequences.mask)
    shallow, none = backbone.states(
        sequences.ids, sequences.positions, sequences.mask, to_exit=True
    )
    assert none is None
    assert torch.equal(shallow, states[0])
    for row in range(2):
        for chain, start in enumerate(starts[row].tolist()):
            document = (batch.documents[row] == batch.documents[row, start]).nonzero()[:, 0]
            begin = int(document[0])
            alone = [*batch.ids[row, begin : start + 1].tolist(), *tokens[row, chain].tolist()]
            known = model(torch.tensor([alone]), output_hidden_states=True, use_cache=False)
            at = slice(32 + 3 * chain, 32 + 3 * chain + 3)
            expected = known.hidden_states[EXIT][0, -3:]
            torch.testing.assert_close(states[0][row, at], expected, rtol=1e-4, atol=1e-4)
            logits = backbone.finish(states[1][row, at])
            torch.testing.assert_close(logits, known.logits[0, -3:], rtol=1e-4, atol=1e-4)
            text = torch.cat([states[1][row, begin : start + 1]])
            torch.testing.assert_close(
                backbone.finish(text), known.logits[0, :-3], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_layers_and_block_see_as_far_as_in_decoding(recipe: SimpleNamespace, family: str) -> None:
    """Every layer of Mistral has a window; of Qwen2 the upper ones, and its block sees it all."""
    window, length = 8, 24
    model = make_model(family, sliding_window=window, **SMALL)
    backbone = recipe.draft_training.Backbone(model, EXIT)
    ids = torch.tensor([random_ids(length) * 2])  # two documents
    documents = torch.arange(2).repeat_interleave(length)[None]
    positions = torch.arange(length).repeat(2)[None]
    mask = recipe.packing.document_mask(documents)
    at_exit, at_end = backbone.states(ids, positions, mask)
    known = model(ids[:, :length], use_cache=False).logits[0]
    for document in at_end[0].split(length):
        torch.testing.assert_close(backbone.finish(document), known, rtol=1e-4, atol=1e-4)
    settings = some_settings(recipe, block_start="nothing")
    adapter = recipe.adapter_trainer.new_adapter(model, EXIT, settings).requires_grad_(False)
    for parameter in adapter.parameters():
        parameter.normal_(std=0.3)  # so that the block is not the plain exit
    moved = at_exit.clone()
    moved[:, 0] += 1.0
    states, others = (backbone.hidden(adapter, s, positions, mask)[0] for s in (at_exit, moved))
    changed = (states != others).any(-1)
    assert changed[:window].all()
    assert changed[window:length].any() == (family == "qwen2")
    assert not changed[length:].any()


def test_chains_are_drawn_from_the_draft(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any]
) -> None:
    """At a temperature near 0 each token is the adapter's likeliest after what was drawn."""
    trainer, training = make_trainer(), recipe.draft_training
    take(trainer, 2)  # so that the adapter is not the plain exit
    batch = trainer.batches.at(0).batches[0]
    cold = training.Rollout(starts=2, tokens=3, temperature=1e-4, seed=0)
    sequences = training.roll_out(trainer.loss, batch, cold, 5)
    backbone, adapter = trainer.loss.backbone, trainer.adapter
    at_exit, _ = backbone.states(sequences.ids, sequences.positions, sequences.mask)
    hidden = adapter.hidden(at_exit, sequences.positions, sequences.mask)
    for row in range(4):
        likeliest = adapter.logits(hidden[row], backbone.finish, backbone.head).argmax(-1)
        for chain, start in enumerate(sequences.starts[row].tolist()):
            assert batch.labels[row, start] != -100
            drawn = sequences.ids[row, 32 + 3 * chain : 35 + 3 * chain]
            before = [start, 32 + 3 * chain, 33 + 3 * chain]
            assert drawn.tolist() == likeliest[before].tolist()


def test_chains_do_not_depend_on_how_a_step_is_divided(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any]
) -> None:
    whole, halves = make_trainer(), make_trainer(gradient_accumulation=2)
    rollout = whole.settings.rollout
    for step in (0, 3):
        one, two = (
            torch.cat(
                [
                    recipe.draft_training.roll_out(t.loss, batch, rollout, step).ids
                    for batch in t.batches.at(step).batches
                ]
            )
            for t in (whole, halves)
        )
        assert torch.equal(one, two)


# Loss


def test_the_loss_is_an_average_by_survival(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row written out: chances along the text from each place, and along its chains."""
    monkeypatch.setattr(recipe.draft_training, "CHUNK_TOKENS", 7)  # chances go from chunk to chunk
    trainer = make_trainer(batch_size=1, cross_entropy=0.3)
    take(trainer, 1)
    loss, batch = trainer.loss, trainer.batches.at(1).batches[0]
    sequences = recipe.draft_training.roll_out(loss, batch, trainer.settings.rollout, 1)
    states = loss.backbone.states(sequences.ids, sequences.positions, sequences.mask)
    found, accepted = loss(*states, sequences, batch)
    hidden = trainer.adapter.hidden(states[0], sequences.positions, sequences.mask)
    draft, target = loss.logits(hidden[0], states[1][0])
    q, p = draft.double().softmax(-1), target.double().softmax(-1)
    distance = (0.5 * (q - p).abs().sum(-1)).tolist()
    entropy = (-(p * q.log()).sum(-1)).tolist()
    labels, documents = batch.labels[0].tolist(), batch.documents[0].tolist()
    arrives = []
    for at in range(32):
        total, chance = 0.0, 1.0
        for start in range(at, max(-1, at - 3), -1):  # drafts of three tokens
            if documents[start] != documents[at] or labels[start] == -100:
                break
            chance *= 1.0 if start == at else 1.0 - distance[start]
            total += chance
        arrives.append(total if labels[at] != -100 else 0.0)
    for chain, start in enumerate(sequences.starts[0].tolist()):
        first = 1.0 - distance[start]
        arrives += [first, first * (1.0 - distance[32 + 2 * chain])]
    by_token = [0.7 * d + 0.3 * e for d, e in zip(distance, entropy, strict=True)]
    expected = sum(w * x for w, x in zip(arrives, by_token, strict=True)) / sum(arrives)
    assert found.item() == pytest.approx(expected, rel=1e-4)
    counted = [1 - d for d, label in zip(distance, labels, strict=False) if label != -100]
    assert accepted.item() == pytest.approx(sum(counted) / len(counted), rel=1e-4)


def test_logits_made_again_in_the_backward_pass_change_nothing(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_trainer()
    records = take(kept, 3)
    monkeypatch.setattr(recipe.draft_training, "KEPT_LOGITS", 0)
    again = make_trainer()
    assert take(again, 3) == records
    assert same(weights(again), weights(kept))


@pytest.mark.parametrize("kept", [True, False])
def test_logits_of_a_whole_micro_batch_are_bounded(
    recipe: SimpleNamespace,
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
) -> None:
    """Each row's are few: they were kept, however many rows there were."""
    trainer = make_trainer()
    loss, batch = trainer.loss, trainer.batches.at(1).batches[0]
    bound = 8 * batch.ids.numel() * VOCAB_SIZE
    monkeypatch.setattr(recipe.draft_training, "KEPT_LOGITS", bound if kept else bound - 1)
    sequences = recipe.draft_training.roll_out(loss, batch, trainer.settings.rollout, 1)
    states = loss.backbone.states(sequences.ids, sequences.positions, sequences.mask)
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.shape[-1] if tensor.ndim else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(*states, sequences, batch)
    assert (VOCAB_SIZE in found) == kept


def test_training_raises_acceptance_and_leaves_the_model_alone(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], model: Any, packed: Any
) -> None:
    before = recipe.adapter_trainer.weights_hash(model)
    trainer = make_trainer(steps=16, block_start="nothing", rollout_every=8)
    untrained = trainer.evaluate(packed, 10_000)
    take(trainer, 16)
    trained = trainer.evaluate(packed, 10_000)
    assert trained["sampled"] > untrained["sampled"] + 0.02
    assert trained["greedy"] > untrained["greedy"] + 0.05
    recipe.exit_adapter.check_frozen(model, before)
    assert not any(p.grad is not None or p.requires_grad for p in model.parameters())


def test_a_flipped_bit_of_the_model_is_seen(recipe: SimpleNamespace) -> None:
    model = make_model(dtype="bfloat16", **SMALL)
    before = recipe.adapter_trainer.weights_hash(model)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.view(torch.int16)[5, 7] ^= 1
    with pytest.raises(RuntimeError, match="weights have changed"):
        recipe.exit_adapter.check_frozen(model, before)


@pytest.mark.parametrize(
    ("num_rows", "tokens", "fitted", "judged"),
    [(12, 64, 2, 2), (3, 64, 1, 1), (2, 64, 1, 1), (2, 8, 1, 1), (1, 64, 1, 0)],
)
def test_calibration_is_judged_on_rows_it_was_not_fitted_on(
    recipe: SimpleNamespace,
    make_trainer: Callable[..., Any],
    packed: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    tokens: int,
    fitted: int,
    judged: int,
) -> None:
    trainer, seen = make_trainer(calibration_tokens=tokens), []
    used: dict[str, set[tuple[int, ...]]] = {"fitted": set(), "judged": set()}
    states = trainer.loss.backbone.states

    def noting(ids: Tensor, *args: Any) -> Any:
        seen.extend(map(tuple, ids.tolist()))
        return states(ids, *args)

    def fit(pairs: Any) -> float:
        used["judged"] |= set(seen)
        seen.clear()
        list(pairs)
        used["fitted"] |= set(seen)
        seen.clear()
        return 1.5

    monkeypatch.setattr(trainer.loss.backbone, "states", noting)
    monkeypatch.setattr(recipe.adapter_measure, "fit_temperature", fit)
    every = [getattr(packed, n)[:num_rows] for n in ("ids", "labels", "positions", "documents")]
    found = recipe.adapter_measure.calibrate(trainer, recipe.packing.Packed(*every))
    used["judged"] |= set(seen)
    assert found["temperature of the draft's logits"] == trainer.adapter.temperature == 1.5
    assert (len(used["fitted"]), len(used["judged"])) == (fitted, judged)
    assert not used["fitted"] & used["judged"]
    assert len(found) == (5 if judged else 1)


def test_calibration_holds_the_logits_of_a_row_or_two(
    recipe: SimpleNamespace,
    make_trainer: Callable[..., Any],
    packed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(calibration_tokens=5 * 32)
    pairs, made, most = trainer.pairs, [], []

    def noting(*args: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for draft, target in pairs(*args):
            made.append(weakref.ref(target))
            most.append(sum(known() is not None for known in made))
            yield draft, target

    monkeypatch.setattr(trainer, "pairs", noting)
    recipe.adapter_measure.calibrate(trainer, packed)
    assert len(made) == 15
    assert max(most) <= 2


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    assert_full_disk_leaves_checkpoint(recipe.checkpoints, make_trainer(), "state.pt", tmp_path)


def test_ctrl_c_while_nothing_is_trained_is_one_line(
    recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    given = recipe.exit_adapter.__file__, recipe.adapter_settings.Settings, interrupted
    with pytest.raises(SystemExit) as ended:
        recipe.running.run_script(*given, ["data=none", f"out={tmp_path / 'out'}"], None)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "exit_adapter: interrupted; the same command goes on\n"


# The block's beginning


@pytest.mark.parametrize(("width", "inner"), [(0, 64), (32, 64), (96, 64), (0, 72)])
def test_a_block_begins_as_the_next_layer(
    recipe: SimpleNamespace, model: Any, packed: Any, width: int, inner: int
) -> None:
    settings = some_settings(recipe, block_width=width)
    if inner != SMALL["intermediate_size"]:  # no multiple of 32: the block's is rounded up
        model = make_model(**SMALL | {"intermediate_size": inner})
    adapter = recipe.adapter_trainer.new_adapter(model, EXIT, settings)
    backbone = recipe.draft_training.Backbone(model, EXIT)
    ids, positions = packed.ids[:2], packed.positions[:2]
    mask = recipe.packing.document_mask(packed.documents[:2])
    at_exit, _ = backbone.states(ids, positions, mask)
    deeper, _ = recipe.draft_training.Backbone(model, EXIT + 1).states(ids, positions, mask)
    found = adapter.hidden(at_exit, positions, mask)
    if width != 32:  # a narrower MLP is another
        torch.testing.assert_close(found, deeper, rtol=1e-4, atol=1e-4)
    else:
        assert not torch.allclose(found, deeper, rtol=1e-2, atol=1e-2)


def test_widths_of_a_block_are_checked_before_anything_runs(recipe: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="block_width must be a multiple of 32, got 40"):
        some_settings(recipe, block_width=40)


def test_only_layers_like_llamas_are_copied(recipe: SimpleNamespace) -> None:
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=2)
    settings = some_settings(recipe, block_width=64)
    with pytest.raises(ValueError, match=r"GPT2Block, .* give block_start=nothing"):
        recipe.adapter_trainer.new_adapter(GPT2LMHeadModel(config), 1, settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [0, 32])
@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "granite", "hunyuan_v1_dense", "helium", "ernie4_5"]
)
def test_layers_of_llamas_parts_that_do_something_else_are_not_copied(
    recipe: SimpleNamespace, family: str, width: int, dtype: str
) -> None:
    """They scale, normalise or turn otherwise."""
    settings, model = some_settings(recipe, block_width=width), make_toy(family, dtype=dtype)
    for exit_layer in (EXIT, 3):
        with pytest.raises(ValueError, match=r"DecoderLayer, .* give block_start=nothing"):
            recipe.adapter_trainer.new_adapter(model, exit_layer, settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exit_layer", [1, NUM_LAYERS - 1])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_layers_like_llamas_are_copied_in_any_dtype(
    recipe: SimpleNamespace, family: str, exit_layer: int, dtype: str
) -> None:
    """Also where hidden states are so small that a norm's epsilon, which is not the block's, tells
    in them."""
    model = make_model(family, dtype=dtype, **SMALL, rms_norm_eps=1e-3)
    model.model.embed_tokens.weight.data.mul_(0.02)
    settings = some_settings(recipe)
    assert recipe.adapter_trainer.new_adapter(model, exit_layer, settings).block is not None


def test_a_model_may_have_no_width_of_its_layers(recipe: SimpleNamespace) -> None:
    kinds = [[["global", "local"], 2]]
    config = GPTNeoConfig(
        num_layers=4, attention_types=kinds, hidden_size=64, num_heads=4, vocab_size=64
    )
    model, settings = GPTNeoForCausalLM(config), some_settings(recipe, block=False, bridge_rank=4)
    assert recipe.adapter_trainer.new_adapter(model, EXIT, settings).shape.block_width == 0


def test_a_bridge_takes_the_place_of_the_block(recipe: SimpleNamespace, model: Any) -> None:
    settings = some_settings(recipe, block=False, bridge_rank=4)
    adapter = recipe.adapter_trainer.new_adapter(model, EXIT, settings)
    assert adapter.block is None
    assert adapter.shape.bridge_rank == 4
    with pytest.raises(ValueError, match="block_width=64 needs a block; give block=true"):
        some_settings(recipe, block=False, block_width=64)


# Going on


def test_going_on_gives_the_weights_of_never_stopping(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    whole = make_trainer()
    records = take(whole, 6)
    first = make_trainer()
    parts = take(first, 3)
    first.save(tmp_path)
    second = make_trainer()
    second.load(recipe.checkpoints.checkpoints(tmp_path)[-1])
    assert parts + take(second, 3) == records
    assert same(weights(second), weights(whole))


def test_a_checkpoint_is_an_adapter_that_loads(
    make_trainer: Callable[..., Any], model: Any, tmp_path: Path
) -> None:
    trainer = make_trainer()
    take(trainer, 1)
    trainer.save(tmp_path)
    loaded = ExitAdapter.load(tmp_path / "step-1", model)
    assert same(list(loaded.parameters()), weights(trainer))


@pytest.mark.parametrize("changes", [{"seed": 1}, {"head_rank": 8}, {"rollout_every": 3}])
def test_another_run_is_not_gone_on_with(
    make_trainer: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path)
    other = make_trainer(**changes)
    (name,) = changes
    with pytest.raises(ValueError, match=f"another {name} "):
        other.load(tmp_path / "step-0")
    assert other.steps == 0


def test_a_run_over_other_weights_is_another(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], packed: Any, tmp_path: Path
) -> None:
    """The folder of a model has the same name, whatever is in it."""
    first = make_trainer()
    first.save(tmp_path)
    other = of_other_weights(**SMALL)
    written = replace(packed, ids=packed.ids.flip(0))  # other weights write other text
    trainer = recipe.adapter_trainer.Trainer(
        first.settings, other, written, Accelerator(cpu=True), exit_layer=EXIT
    )
    with pytest.raises(ValueError, match="was made with another fingerprint of model"):
        trainer.load(tmp_path / "step-0")


@pytest.mark.parametrize("content", [b"", b"cut"])
def test_a_damaged_checkpoint_is_named(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], tmp_path: Path, content: bytes
) -> None:
    trainer = make_trainer(out=str(tmp_path))
    trainer.save(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-0" / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"step-0 cannot be .*, delete it to begin again$"):
        recipe.running.go_on(trainer, Console(quiet=True))


def test_a_divided_step_is_the_same_step(make_trainer: Callable[..., Any]) -> None:
    whole, parts = (make_trainer(gradient_accumulation=n) for n in (1, 2))
    for one, two in zip(take(whole, 3), take(parts, 3), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)


# The model's own text


@pytest.fixture(scope="module")
def writer(model: Any) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(model, None, num_draft_tokens=0)


def own_text(recipe: SimpleNamespace, lm: Any, folder: Path, **changes: Any) -> list[Any]:
    prompts = [random_ids(3 + i, seed=i) for i in range(11)]
    options = {"max_new_tokens": 5, "temperature": 0.8, "seed": 4} | changes
    return recipe.continuations.written(lm, prompts, folder, **options)


def test_the_models_own_text_is_its_own_and_is_kept(
    recipe: SimpleNamespace, writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = own_text(recipe, writer, tmp_path)
    for i, sample in enumerate(samples):
        sampling = SamplingParams(temperature=0.8, seed=4 + i)
        prompt = random_ids(3 + i, seed=i)
        out = writer.generate(prompt, max_new_tokens=5, sampling=sampling)
        assert sample.ids == (*prompt, *out.token_ids)
        assert sample.num_prompt_tokens == 3 + i
    monkeypatch.setattr(SelfSpeculativeLM, "open_batch", None)  # nothing is written again
    assert own_text(recipe, writer, tmp_path) == samples


def test_writing_goes_on_where_a_crash_left_it(
    recipe: SimpleNamespace, writer: Any, tmp_path: Path
) -> None:
    samples = own_text(recipe, writer, tmp_path / "whole")
    (file,) = (tmp_path / "whole").iterdir()
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    for kept in (0, 3, 10):
        cut = tmp_path / "cut" / file.name
        cut.write_text("".join(lines[:kept]) + lines[kept][:4])
        assert own_text(recipe, writer, tmp_path / "cut") == samples
        assert cut.read_text() == file.read_text()


@pytest.mark.parametrize("line", ["[1, 2", "5", '["a"]'])
def test_damaged_text_is_named(
    recipe: SimpleNamespace, writer: Any, tmp_path: Path, line: str
) -> None:
    own_text(recipe, writer, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(f"{line}\n")
    said = rf"{file.name} cannot be loaded \(.+\); if it is damaged, delete it to have the model"
    with pytest.raises(ValueError, match=said):
        own_text(recipe, writer, tmp_path)


@pytest.mark.parametrize("changes", [{"seed": 5}, {"temperature": 0.0}, {"max_new_tokens": 6}])
def test_other_text_is_another_file(
    recipe: SimpleNamespace, writer: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    one, other = own_text(recipe, writer, tmp_path), own_text(recipe, writer, tmp_path, **changes)
    assert one != other
    assert len(list(tmp_path.iterdir())) == 2


def test_beginnings_are_prompts_and_places_of_texts(recipe: SimpleNamespace) -> None:
    sample = recipe.data.Sample
    asked, text = sample(tuple(range(9)), num_prompt_tokens=4), sample(tuple(range(100, 140)))
    found = recipe.continuations.beginnings([asked, text, sample((7,))], 20, most=6, seed=0)
    assert found.count((0, 1, 2, 3)) == 10
    rest = [f for f in found if f[0] >= 100]
    assert len(set(rest)) > 5
    assert all(len(f) <= 6 and f == tuple(range(f[0], f[-1] + 1)) for f in rest)
    with pytest.raises(ValueError, match="nothing to go on from"):
        recipe.continuations.beginnings([sample((7,))], 1, most=6, seed=0)


# The whole recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, and data: texts, and prompts alone."""
    base = tmp_path_factory.mktemp("adapter")
    tokenizer = make_tokenizer()
    make_model(dtype="bfloat16", eos_token_id=1, **SMALL).save_pretrained(base / "model")
    tokenizer.save_pretrained(base / "model")
    rows: list[dict[str, Any]] = [
        {"text": f"one tie {i} is not on its rose {i * i}"} for i in range(20)
    ]
    rows += [{"prompt": f"rose {i} on"} for i in range(20)]
    rows.append({"text": ["a [/INST] of a chat"]})  # a bad row, which rich takes for markup
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (base / "data.jsonl").write_text(lines, encoding="utf-8")
    return base


def command_line(folder: Path, out: str, **changes: Any) -> list[str]:
    values = {
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "out": folder / out,
        "held_out_share": 0.3,
        "steps": 3,
        "batch_size": 2,
        "seq_len": 32,
        "mixed_precision": "no",
        "exit_layer": EXIT,
        "continuations": 40,
        "continuation_length": 8,
        "rollout_every": 2,
        "rollout_starts": 2,
        "rollout_tokens": 2,
        "save_every": 2,
        "eval_every": 2,
        "eval_tokens": 64,
        "calibration_tokens": 64,
        "max_new_tokens": 6,
        "final_tokens": 100,
        "final_prompts": 2,
        "draft_vocabulary": 128,
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


@pytest.fixture(scope="module")
def finished(recipe: SimpleNamespace, folder: Path) -> Path:
    patch = pytest.MonkeyPatch()
    patch.setattr(recipe.adapter_measure, "COST_SECONDS", 0.05)
    try:
        recipe.exit_adapter.main(command_line(folder, "run"))
    finally:
        patch.undo()
    return folder / "run"


def tokens_of(run: Path) -> list[int]:
    """What the model wrote for its training."""
    files = sorted((run / "continuations").iterdir())
    rows = [json.loads(line) for f in files for line in f.read_text(encoding="utf-8").splitlines()]
    return [token for row in rows for token in row]


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    expected = {"settings.yaml", "metrics.jsonl", "tensorboard", "acceptance.png", "checkpoints"}
    assert expected | {"table.json", "table.md", "continuations"} <= names
    assert {"exit_adapter.json", "exit_adapter.safetensors"} <= names
    lines = (finished / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3]
    table = json.loads((finished / "table.json").read_text(encoding="utf-8"))
    assert table["before"]["exits"][0]["loss"] == pytest.approx(table["after"]["exits"][0]["loss"])
    details = table["details"]
    assert 0.25 <= details["temperature of the draft's logits"] <= 4.0
    assert math.isfinite(details["expected calibration error after"])
    plan = PlanFile.load(finished / "layerskip.json")
    assert plan.plan == DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=EXIT)
    assert len(plan.draft_vocabulary or ()) == 128
    assert set(tokens_of(finished)) & set(plan.draft_vocabulary or ())


def test_the_output_is_bit_identical_with_the_adapter(finished: Path, folder: Path) -> None:
    plain = SelfSpeculativeLM.from_pretrained(folder / "model", num_draft_tokens=0)
    lm = SelfSpeculativeLM.from_pretrained(
        folder / "model", exit_adapter=finished, num_draft_tokens=3
    )
    assert lm.draft_head is not None
    assert lm.plan_file.cost is not None
    for sampling in (None, SamplingParams(temperature=0.8, seed=3)):
        options = {"max_new_tokens": 24, "sampling": sampling, "ignore_eos": True}
        out = lm.generate("one tie", **options)
        assert out.token_ids == plain.generate("one tie", **options).token_ids
        assert out.stats.num_draft_tokens > 0


def test_the_costs_it_measured_are_those_of_a_loaded_model(finished: Path, folder: Path) -> None:
    lm = SelfSpeculativeLM.from_pretrained(folder / "model", exit_adapter=finished)
    file = lm.plan_file
    assert file.cost is not None
    assert mismatch(file.cost, lm.stack, file.plan, file.draft_vocabulary) is None


def test_a_finished_run_is_not_trained_again(
    recipe: SimpleNamespace, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = (finished / "exit_adapter.safetensors").read_bytes()
    monkeypatch.setattr(recipe.adapter_trainer.Trainer, "step", None)
    monkeypatch.setattr(recipe.exit_adapter, "conclude", lambda *args: None)
    recipe.exit_adapter.main(command_line(finished.parent, "run"))
    assert (finished / "exit_adapter.safetensors").read_bytes() == adapter


def test_a_refused_command_leaves_the_runs_settings(
    recipe: SimpleNamespace, finished: Path
) -> None:
    before = (finished / "settings.yaml").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match=r"was made with another head_rank \(16, now 8\)"):
        recipe.exit_adapter.main(command_line(finished.parent, "run", head_rank=8))
    assert (finished / "settings.yaml").read_text(encoding="utf-8") == before


def test_without_continuations_a_run_makes_its_folder(
    recipe: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.exit_adapter, "fit", lambda *args, **kwargs: signal.SIGTERM)
    with exiting(128 + signal.SIGTERM):
        recipe.exit_adapter.main(command_line(folder, "new/run", continuations=0))
    assert (folder / "new" / "run" / "settings.yaml").exists()


def test_the_exit_is_chosen_by_predicted_speed(
    recipe: SimpleNamespace, model: Any, packed: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    measure = recipe.adapter_measure
    costs = {1: 0.9, 2: 0.1}
    monkeypatch.setattr(measure, "predicted", lambda *args: 1.0 / costs[args[2].shape.exit_layer])
    settings = some_settings(recipe, exit_layer=0, exits=(1, 2), out=str(tmp_path), search_steps=1)
    texts = recipe.exit_adapter.Texts(recipe.data.Corpus([], [], ()), packed, packed)
    accelerator = Accelerator(cpu=True)
    for _ in range(2):  # the second time it is remembered
        chosen = recipe.exit_adapter.chosen_exit(settings, model, texts, accelerator)
        assert chosen == 2
        costs[2] = 2.0
    found = json.loads((tmp_path / "exits.json").read_text(encoding="utf-8"))
    assert found["predicted_speedup"]["2"] == pytest.approx(10.0)


def test_a_choice_made_with_other_settings_is_not_believed(
    recipe: SimpleNamespace, model: Any, packed: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """It is made again; where the run has checkpoints, that would be another run."""
    monkeypatch.setattr(recipe.exit_adapter, "train", lambda *args, **kwargs: False)
    monkeypatch.setattr(
        recipe.adapter_measure, "predicted", lambda *args: float(args[2].shape.exit_layer)
    )
    texts = recipe.exit_adapter.Texts(recipe.data.Corpus([], [], ()), packed, packed)
    base = some_settings(recipe, exit_layer=0, exits=(1, 2), out=str(tmp_path))

    def chosen(**changes: Any) -> int:
        settings = replace(base, **changes)
        return recipe.exit_adapter.chosen_exit(settings, model, texts, Accelerator(cpu=True))

    assert chosen() == 2
    assert chosen(exits=(3,)) == 3
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    assert chosen(exits=(3,)) == 3
    with pytest.raises(ValueError, match=r"was made with another exits \(\[3\], now \[1, 2\]\)"):
        chosen()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_layer": NUM_LAYERS}, r"exit layer 6 is none of this model's; an exit lies in"),
        ({"continuation_length": 32}, r"leaves no room for a prompt in seq_len \(32\)"),
        ({"text": "false", "continuations": 0}, r"nothing to train on; give text=true"),
        (
            {"block": "true", "bridge_rank": 4},
            r"bridge_rank=4 takes the block's place; give block=",
        ),
        ({"block": "false", "head_rank": 0, "norm": "false"}, r"there is no part to train; give"),
        ({"rollout_startz": 1}, r"rollout_starts"),
    ],
)
def test_mistakes_end_it_with_one_sentence(
    recipe: SimpleNamespace, folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=f"^exit_adapter: .*{message}"):
        recipe.exit_adapter.main(command_line(folder, "refused", **changes))


def test_drafts_take_positions_too(recipe: SimpleNamespace) -> None:
    settings = some_settings(recipe, seq_len=30, rollout_tokens=2)
    config = GPT2Config(n_positions=31, n_layer=NUM_LAYERS)
    with pytest.raises(ValueError, match="31 positions, 2 of them for drafts; give seq_len=29 or"):
        recipe.exit_adapter.check_fits(settings, config)
    recipe.exit_adapter.check_fits(replace(settings, rollout_every=0), config)


def divided(recipe: SimpleNamespace, folder: Path, rows: Sequence[str], *, text: bool) -> Any:
    """Settings of a run whose rows are divided, each prompt followed by eight tokens."""
    path = folder / "rows.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    return some_settings(
        recipe,
        data=str(path),
        out=str(folder),
        continuations=24,
        continuation_length=8,
        held_out_share=0.4,
        text=text,
    )


@pytest.mark.parametrize("data", ["prompts", "text"])
def test_what_is_trained_on_and_what_is_held_out(
    recipe: SimpleNamespace, model: Any, data: str, tmp_path: Path
) -> None:
    """Held-out prompts are followed by the model, and never trained on."""
    key = "prompt" if data == "prompts" else "text"
    rows = [json.dumps({key: f"rose {i} is on {i}"}) + "\n" for i in range(12)]
    settings = divided(recipe, tmp_path, rows, text=data == "text")
    texts = recipe.exit_adapter.read_texts(settings, model, make_tokenizer(), Console(quiet=True))
    train, held_out = texts.corpus.train, texts.corpus.held_out
    assert held_out
    if data == "text":
        own = [s for s in train if s.num_prompt_tokens]
        assert [len(s.ids) - s.num_prompt_tokens for s in own] == [8, 8, 8]
        assert len(train) - len(own) + len(held_out) == 12
        assert not any(s.num_prompt_tokens for s in held_out)
    else:
        assert all(len(s.ids) == s.num_prompt_tokens + 8 for s in (*train, *held_out))
        begun = {s.ids[: s.num_prompt_tokens] for s in train}
        assert not begun & {s.ids[: s.num_prompt_tokens] for s in held_out}


def test_of_a_held_out_prompt_that_is_too_long_its_end_is_kept(
    recipe: SimpleNamespace, model: Any, tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": f"{i}" + "rose " * 400}) + "\n" for i in range(12)]
    settings = divided(recipe, tmp_path, rows, text=False)
    texts = recipe.exit_adapter.read_texts(settings, model, make_tokenizer(), Console(quiet=True))
    assert texts.corpus.held_out
    for sample in (*texts.corpus.train, *texts.corpus.held_out):
        assert (sample.num_prompt_tokens, len(sample.ids)) == (
            settings.seq_len - 8,
            settings.seq_len,
        )


def test_other_labels_are_another_run(recipe: SimpleNamespace, packed: Any, model: Any) -> None:
    settings = some_settings(recipe)
    identity = recipe.adapter_trainer.identity
    other = replace(packed, labels=packed.labels - 1)
    assert identity(settings, packed, model) == identity(settings, replace(packed), model)
    assert identity(settings, packed, model) != identity(settings, other, model)


@pytest.mark.slow
def test_two_launched_processes_have_the_loss_curve_of_one(finished: Path, folder: Path) -> None:
    """Within 1e-4 of the loss: gradients of the two are added up in another order."""
    launched("exit_adapter.py", command_line(folder, "two"))
    one, two = (
        [json.loads(line) for line in (o / "metrics.jsonl").read_text("utf-8").splitlines()]
        for o in (finished, folder / "two")
    )
    losses = [[r["loss"] for r in records if "loss" in r] for records in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    recipe: SimpleNamespace, finished: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = command_line(folder, "killed")
    kept = partial(recipe.checkpoints.checkpoints, folder / "killed" / "checkpoints")
    killed("exit_adapter.py", argv, kept)
    monkeypatch.setattr(recipe.exit_adapter, "conclude", lambda *args: None)
    recipe.exit_adapter.main(argv)
    resumed, whole = (
        torch.load(o / "checkpoints" / "step-3" / "state.pt", weights_only=True)["adapter"]
        for o in (folder / "killed", finished)
    )
    assert same(list(resumed.values()), list(whole.values()))
