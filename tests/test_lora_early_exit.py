"""The LoRA recipe: losses, dropout and curricula as they are meant, exact resumption, results."""

import contextlib
import io
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from recipe_modules import (
    RECIPES,
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
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from toys import NUM_LAYERS, VOCAB_SIZE, make_model, make_tokenizer, random_ids
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedModel,
)

from layerskip import SelfSpeculativeLM

MODULES = (
    *("checkpoints", "data", "early_exit_model", "early_exit_settings", "early_exit_trainer"),
    *("evaluation", "lora_early_exit", "memory", "packing", "run_log", "running"),
    *("settings", "table"),
)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with imported(MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def packed(recipe: SimpleNamespace) -> Any:
    return packed_rows(recipe)


def some_settings(recipe: SimpleNamespace, **changes: Any) -> Any:
    base = {
        "data": "none",
        "out": "nowhere",
        "steps": 8,
        "batch_size": 4,
        "seq_len": 32,
        "learning_rate": 0.01,
        "rank": 4,
        "alpha": 8.0,
        "exits": (1, 2, 4),
        "curriculum": "gradual",
        "layer_dropout": 0.5,
        "chunk_tokens": 20,
    }
    return recipe.early_exit_settings.Settings(**base | changes)


@pytest.fixture(scope="module")
def make_trainer(recipe: SimpleNamespace, packed: Any) -> Callable[..., Any]:
    model = make_model(**SMALL)

    def make(**changes: Any) -> Any:
        accelerator = Accelerator(cpu=True)
        settings = some_settings(recipe, **changes)
        return recipe.early_exit_trainer.Trainer(settings, deepcopy(model), packed, accelerator)

    return make


# Losses


def truncated(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """The model whose last layer is the ``depth``-th."""
    shallow = deepcopy(model)
    shallow.model.layers = shallow.model.layers[:depth]
    shallow.config.num_hidden_layers = depth
    return shallow


def test_each_exit_has_the_loss_of_the_model_cut_off_there(
    recipe: SimpleNamespace, packed: Any
) -> None:
    model = make_model(**SMALL)
    early = recipe.early_exit_model.EarlyExitModel(model, recipe.early_exit_model.ExitLosses())
    ids, labels = packed.ids[:3], packed.labels[:3]
    losses = early(ids, packed.positions[:3], labels, (2, 4, NUM_LAYERS), 10)
    for depth, loss in losses.items():
        logits = truncated(model, depth)(
            input_ids=ids, position_ids=packed.positions[:3], use_cache=False
        ).logits
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert loss.item() == pytest.approx(summed.item() / 10, rel=1e-4)


def test_documents_of_a_row_do_not_see_each_other(recipe: SimpleNamespace, packed: Any) -> None:
    """torchtune's layer dropout does not know the masks of packed rows; here there are both."""
    early = recipe.early_exit_model.EarlyExitModel(
        make_model(**SMALL), recipe.early_exit_model.ExitLosses()
    )
    row = next(i for i in range(packed.num_rows) if packed.documents[i].max() >= 2)
    ids, positions = packed.ids[row : row + 1], packed.positions[row : row + 1]
    only = packed.labels[row : row + 1].clone()
    only[packed.documents[row : row + 1] != 1] = -100
    others = torch.where(packed.documents[row : row + 1] == 1, ids, (ids + 5) % VOCAB_SIZE)
    exits = (2, NUM_LAYERS)
    given, changed = (early(i, positions, only, exits, 5) for i in (ids, others))
    for e in exits:
        assert given[e].item() == pytest.approx(changed[e].item(), rel=1e-5)
    assert early(others, positions, packed.labels[row : row + 1], exits, 5)[2] != given[2]


def test_the_head_of_one_chunk_and_one_exit_runs_at_a_time(
    make_trainer: Callable[..., Any],
) -> None:
    """torchtune stacks the logits of all exits: (exits, batch, length, vocabulary)."""
    trainer = make_trainer(curriculum="none")
    sizes: list[int] = []
    head = trainer.peft.get_base_model().get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    trainer.step()
    assert max(sizes) == 20
    assert sum(sizes) > 4 * 4 * 32


def test_a_model_with_more_than_a_norm_and_a_head_is_refused(recipe: SimpleNamespace) -> None:
    config = Gemma2Config(
        vocab_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        final_logit_softcapping=3.0,
        **SMALL,
    )
    with pytest.raises(ValueError, match="more than a norm and a head after its last layer"):
        recipe.early_exit_model.final_norm(Gemma2ForCausalLM(config))


def test_lora_is_on_every_linear_layer_but_the_head_and_the_rest_stands_still(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer()
    model = trainer.peft.get_base_model()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer.step()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(trained) == NUM_LAYERS * len(linear) * 2
    assert all(".lora_" in name and any(part in name for part in linear) for name in trained)
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())


# Curricula, dropout, scales: what torchtune and trl do otherwise (each defect a test)


def test_a_run_that_goes_on_late_trains_every_exit(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """torchtune's gradual curriculum begins anew: at step 80 of 100 it trains one layer."""
    first = make_trainer(steps=100)
    first.steps = 80
    first.save(tmp_path)
    second = make_trainer(steps=100)
    second.load(tmp_path / "step-80")
    assert set(second.step()["exit_losses"]) == {1, 2, 4}
    assert set(make_trainer(steps=100).step()["exit_losses"]) == set()


def test_micro_batches_and_evaluation_do_not_turn_the_rotation(
    make_trainer: Callable[..., Any],
) -> None:
    """trl's rotates at every call of its loss: in each micro-batch, and in evaluation."""
    trainer = make_trainer(curriculum="rotational", rotation=3, gradient_accumulation=4, steps=6)
    turns = [set(trainer.step()["exit_losses"]) for _ in range(4)]
    assert turns == [{1}, {2}, {4}, {1}]


def test_shallow_exits_get_their_share(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any]
) -> None:
    """torchtune's default gives the fourth of 32 layers 1 % of the weight, the paper's rule 0.1 %;
    the gradient of the shallow exit reaches the first layer with the floor, and hardly without."""
    norms = {}
    for floor in (0.0, 0.6):
        trainer = make_trainer(curriculum="none", exits=(1,), floor=floor, layer_dropout=0.0)
        early = trainer.module
        batch = trainer.batches.at(0).batches[0]
        scales = recipe.early_exit_trainer.exit_loss_scales((1, 6), 6, floor=floor)
        losses = early(batch.ids, batch.positions, batch.labels, (1, 6), batch.num_labels)
        (scales[1] * losses[1]).backward()
        grads = [p.grad for p in trainer.trained if p.grad is not None]
        norms[floor] = torch.stack([g.norm() for g in grads]).norm().item()
    assert norms[0.0] == 0.0  # exit 1 of the paper's rule
    assert norms[0.6] > 1e-3


@pytest.mark.parametrize("key", ["layer_dropout_scale=exp", "layers_scale=one"])
def test_a_key_that_nobody_reads_is_refused(recipe: SimpleNamespace, key: str) -> None:
    """torchtune's own commands set ``layer_dropout.scale=exp``, which nothing reads."""
    with pytest.raises(ValueError, match="there is no setting"):
        recipe.settings.read(
            recipe.early_exit_settings.Settings, RECIPES / "lora_early_exit.yaml", [key]
        )


def test_every_documented_schedule_and_key_works(recipe: SimpleNamespace) -> None:
    """Two documented values of torchtune's end in a KeyError."""
    settings = recipe.early_exit_settings.Settings
    shipped = recipe.settings.read(settings, RECIPES / "lora_early_exit.yaml", ["data=x"])
    assert shipped.curriculum == "rotational"
    written = (RECIPES / "lora_early_exit.yaml").read_text(encoding="utf-8")
    for field in settings.__dataclass_fields__:
        assert f"\n{field}:" in written, field
    for curriculum in ("none", "rotational", "gradual"):
        assert replace(shipped, curriculum=curriculum).curriculum == curriculum


def test_layers_are_dropped_in_training_per_document_and_never_in_evaluation(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any]
) -> None:
    """trl's recipe drops no layers at all."""
    plain, dropping = (make_trainer(layer_dropout=rate).step()["loss"] for rate in (0.0, 0.5))
    assert plain != dropping
    trainer = make_trainer()
    batch = trainer.batches.at(0).batches[0]
    everything = torch.ones(NUM_LAYERS, batch.num_documents, dtype=torch.bool)
    with recipe.early_exit_trainer.in_evaluation(trainer):
        exits = (2, NUM_LAYERS)
        given = trainer.module(batch.ids, batch.positions, batch.labels, exits, 9)
        with recipe.early_exit_trainer.dropping(trainer.layers, everything, batch.documents):
            dropped = trainer.module(batch.ids, batch.positions, batch.labels, exits, 9)
    assert [given[e].item() for e in exits] == [dropped[e].item() for e in exits]


# A step, however it is divided


def test_accumulated_micro_batches_give_what_one_batch_gives(
    make_trainer: Callable[..., Any],
) -> None:
    whole, parts = make_trainer(), make_trainer(gradient_accumulation=4)
    for one, other in zip(take(whole, 4), take(parts, 4), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


def test_two_processes_add_up_to_one(make_trainer: Callable[..., Any]) -> None:
    """Losses and gradients of both halves, each as a process of its own would compute them: up to
    1e-5 of what one process gives, the order of additions."""

    def gradients(index: int, count: int) -> tuple[float, list[Tensor]]:
        trainer = make_trainer(curriculum="none")
        trainer.batches = replace(trainer.batches, num_processes=count, process_index=index)
        for p in trainer.trained:  # LoRA's second half is zero at first, and its gradients too
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        work = trainer.batches.at(3)
        scales = {1: 0.3, 2: 0.2, 4: 0.1, 6: 0.4}
        losses = trainer._backward(work.batches[0], scales, work.num_labels, 3)
        loss = sum(scales[e] * v.item() for e, v in losses.items())
        return loss, [p.grad for p in trainer.trained]

    whole, expected = gradients(0, 1)
    halves = [gradients(i, 2) for i in range(2)]
    assert sum(loss for loss, _ in halves) == pytest.approx(whole, rel=1e-5)
    for grad, first, second in zip(expected, *(g for _, g in halves), strict=True):
        torch.testing.assert_close(first + second, grad, rtol=1e-3, atol=1e-5)


def test_layers_that_are_run_again_drop_the_same(make_trainer: Callable[..., Any]) -> None:
    kept, again = make_trainer(), make_trainer(gradient_checkpointing=True)
    assert take(kept, 5) == take(again, 5)
    assert all(map(torch.equal, weights(kept), weights(again)))


def test_any_seed_takes_a_step(make_trainer: Callable[..., Any]) -> None:
    take(make_trainer(seed=2**60), 1)


def test_a_step_that_cannot_be_divided_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"batch_size \(4\) must be a multiple of"):
        make_trainer(gradient_accumulation=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exits": (2, 1)}, "exits must be ascending"),
        ({"exits": ()}, "exits must be ascending"),
        ({"floor": 1.0}, "floor must"),
        ({"layer_dropout": 1.0}, "layer_dropout must"),
        ({"rank": 0}, "rank must"),
        ({"cost_seconds": 0.0015}, "cost_seconds must be finite and between 0.002 and"),
        ({"clip": 0.0}, "clip must be finite and between 1e-06 and"),
        ({"dtype": "int8"}, "dtype must be auto, float32 or bfloat16, got 'int8'"),
    ],
)
def test_bad_settings_are_refused(
    recipe: SimpleNamespace, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        some_settings(recipe, **changes)


def test_an_exit_that_the_model_has_not_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"exits name layer 6; .* lies in \[1, 5\]"):
        make_trainer(exits=(2, 6))


# Going on


@pytest.mark.parametrize("changes", [{}, {"curriculum": "rotational", "distil": 1.0}])
def test_going_on_gives_the_weights_of_never_stopping(
    make_trainer: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole, first = make_trainer(**changes), make_trainer(**changes)
    expected = take(whole, 8)
    begun = take(first, 5)
    first.save(tmp_path)
    second = make_trainer(**changes)
    second.load(tmp_path / "step-5")
    assert begun + take(second, 3) == expected
    assert all(map(torch.equal, weights(whole), weights(second)))
    assert not all(map(torch.equal, weights(whole), weights(first)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"steps": 9}, "steps"), ({"seed": 1}, "seed"), ({"exits": (1, 2)}, "exits")],
)
def test_another_runs_checkpoint_is_refused(
    make_trainer: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    make_trainer().save(tmp_path)
    with pytest.raises(ValueError, match=f"made with another {name} "):
        make_trainer(**changes).load(tmp_path / "step-0")


def test_checkpoints_of_other_text_are_refused(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], packed: Any, tmp_path: Path
) -> None:
    make_trainer().save(tmp_path)
    other = make_trainer()
    assert replace(packed, labels=packed.labels - 1).digest != packed.digest
    other._data = replace(packed, ids=packed.ids + 1).digest
    with pytest.raises(ValueError, match="another content of data"):
        other.load(tmp_path / "step-0")


def test_checkpoints_over_other_weights_are_refused(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], packed: Any, tmp_path: Path
) -> None:
    """The folder of a model has the same name, whatever is in it."""
    first = make_trainer()
    first.save(tmp_path)
    other = of_other_weights(**SMALL)
    trainer = recipe.early_exit_trainer.Trainer(
        first.settings, other, packed, Accelerator(cpu=True)
    )
    with pytest.raises(ValueError, match="was made with another fingerprint of model"):
        trainer.load(tmp_path / "step-0")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_model.safetensors", b""),
        ("optimiser.pt", b"cut"),
        ("optimiser.pt", b"PK\x03\x04 half of one"),
        ("run.json", b'{"a": 1}'),
        ("run.json", b""),
    ],
)
def test_a_damaged_checkpoint_is_named(
    recipe: SimpleNamespace,
    make_trainer: Callable[..., Any],
    tmp_path: Path,
    file: str,
    content: bytes,
) -> None:
    trainer, kept = make_trainer(out=str(tmp_path)), tmp_path / "checkpoints"
    trainer.save(kept)
    (kept / "step-0").rename(kept / "step-4")
    trainer.save(kept)
    damaged = kept / "step-4" / file
    right = damaged.read_bytes()
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"step-4 cannot be .*, delete it to go on from step-0$"):
        recipe.running.go_on(trainer, Console(quiet=True))
    damaged.write_bytes(right)
    other = make_trainer(out=str(tmp_path), seed=1)
    with pytest.raises(ValueError, match="step-4 was made with another seed"):
        recipe.running.go_on(other, Console(quiet=True))
    shutil.rmtree(kept / "step-0")
    damaged.unlink()
    with pytest.raises(ValueError, match=r"step-4 cannot be .*, delete it to begin again$"):
        recipe.running.go_on(trainer, Console(quiet=True))


def test_one_run_at_a_time_writes_into_a_folder(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two took each other's checkpoints away, and noted each step twice."""
    alone_in, out = recipe.checkpoints.alone_in, tmp_path / "of" / "mine"
    with alone_in(out):
        with (
            pytest.raises(
                ValueError, match=r"another run is writing into .*mine; wait for its end"
            ),
            alone_in(out),
        ):
            pass
        real, answers = Path.is_dir, iter([False])  # both began at once: nobody had made it yet
        monkeypatch.setattr(Path, "is_dir", lambda path: all(answers) and real(path))
        with pytest.raises(ValueError, match="another run"), alone_in(out):
            pass
        monkeypatch.undo()
        assert out.exists()
        with alone_in(tmp_path / "other"):
            pass
        monkeypatch.setenv("RANK", "1")
        with alone_in(out):  # the first process holds it for this one
            pass
        monkeypatch.delenv("RANK")
    assert not out.exists(), "nothing came into it"
    with alone_in(out):
        (out / "kept").touch()
    assert (out / "kept").exists()


def test_processes_that_do_not_work_together_are_refused(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them on CPUs: each trained everything, into one folder."""
    settings = some_settings(recipe, out=str(tmp_path))
    monkeypatch.setattr(recipe.running, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe.running.accelerator_of(settings)  # a cluster's, for something else
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="2 processes were started, and accelerate has joined 1"):
        recipe.running.accelerator_of(settings)


def test_a_crash_while_saving_leaves_the_checkpoint_before(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    checkpoints = recipe.checkpoints

    def crash(folder: Path) -> None:
        (folder / "half").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt

    for step in (5, 10, 15):
        checkpoints.write_checkpoint(
            tmp_path, step, lambda folder: (folder / "state").write_text("whole", encoding="utf-8")
        )
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_checkpoint(tmp_path, 20, crash)
    names = [path.name for path in checkpoints.checkpoints(tmp_path)]
    assert names == ["step-10", "step-15"]  # two are kept, in the order of their numbers
    assert (tmp_path / "partial-20").exists()
    checkpoints.write_checkpoint(tmp_path, 20, lambda folder: None)
    assert {path.name for path in tmp_path.iterdir()} == {"step-15", "step-20"}


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    assert_full_disk_leaves_checkpoint(recipe.checkpoints, make_trainer(), "optimiser.pt", tmp_path)


@pytest.fixture
def ctrl_c_acts() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background is born deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_acts")
def test_the_first_signal_is_noted_and_the_second_acts(recipe: SimpleNamespace) -> None:
    with recipe.checkpoints.StopRequest() as request:
        assert request.number == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_the_last_step_stops_the_run(recipe: SimpleNamespace) -> None:
    """What comes after it is minutes of measuring."""
    accelerator = SimpleNamespace(device="cpu", reduce=lambda value, _: value)
    taken: list[Any] = []
    for stopping in (0, signal.SIGINT, signal.SIGTERM):
        trainer = SimpleNamespace(steps=1, accelerator=accelerator)

        def step(trainer: Any = trainer) -> dict[str, Any]:
            trainer.steps += 1
            return {"step": trainer.steps}

        trainer.step = step
        stopped = recipe.running.train(
            trainer, until=2, stopping=lambda asked=stopping: asked, on_step=taken.append
        )
        assert stopped == stopping
    assert taken == [{"step": 2}] * 3


def test_a_signal_while_the_last_step_is_saved_stops_the_run(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    trainer = SimpleNamespace(
        settings=SimpleNamespace(out=tmp_path, steps=1, eval_every=5, save_every=5),
        accelerator=SimpleNamespace(
            device="cpu",
            is_main_process=False,
            reduce=lambda value, _: value,
            init_trackers=lambda name: None,
        ),
        steps=0,
        save=lambda folder: signal.raise_signal(signal.SIGTERM),
    )

    def step() -> dict[str, Any]:
        trainer.steps += 1
        return {"step": trainer.steps}

    trainer.step = step
    stopped = recipe.running.fit(trainer, Console(quiet=True), evaluate=dict, said=str)
    assert stopped == signal.SIGTERM


def test_a_signal_to_one_process_stops_all(recipe: SimpleNamespace) -> None:
    """``reduce`` adds what came to another one."""
    accelerator = SimpleNamespace(
        device="cpu", reduce=lambda value, _: value + torch.tensor([0.0, 1.0])
    )
    trainer = SimpleNamespace(steps=0, accelerator=accelerator, step=dict)
    stopped = recipe.running.train(
        trainer, until=2, stopping=lambda: 0, on_step=lambda record: None
    )
    assert stopped == signal.SIGTERM


# Memory


@pytest.mark.parametrize("checkpointing", [False, True])
def test_arithmetic_of_memory_bounds_what_torch_keeps(
    recipe: SimpleNamespace, make_trainer: Callable[..., Any], checkpointing: bool
) -> None:
    trainer = make_trainer(gradient_checkpointing=checkpointing, layer_dropout=0.0, distil=0.0)
    config = trainer.peft.config
    shape = recipe.memory.StepShape(4, 32, 4, 20, 4, 4, False, checkpointing)
    memory = recipe.memory.step_memory(config, shape)
    assert memory.adapter == 16 * sum(p.numel() for p in trainer.trained)
    model = trainer.peft.get_base_model()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert memory.weights == 4 * frozen
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = trainer.batches.at(0).batches[0]
    trainer.module.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = trainer.module(batch.ids, batch.positions, batch.labels, (NUM_LAYERS,), 9)
    assert losses
    measured = sum(kept.values())
    inputs, one = memory.layer_inputs, memory.activations // (2 if checkpointing else 7)
    bound = inputs if checkpointing else inputs + NUM_LAYERS * one
    assert 0.6 * bound < measured < 1.2 * bound  # masks and rotary tables are in it, too


def test_memory_is_told_of_what_it_knows_alone(
    recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sentence; and of the built-in checkpoint by its name, as everywhere."""
    recipe.memory.main(["builtin", "rows=1"])
    assert "total" in capsys.readouterr().out
    recipe.memory.main(["--help"])
    assert "seq_len=2048" in capsys.readouterr().out
    for wrong in ("rows=0", "rows=-3", "seq_len=0"):
        with pytest.raises(SystemExit, match=f"^memory: {wrong.split('=')[0]} must be"):
            recipe.memory.main(["builtin", wrong])
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(
        SystemExit, match="is not like a Llama: its config has no intermediate_size"
    ):
        recipe.memory.main([str(tmp_path)])


def test_a_model_of_a_billion_fits_into_24_gigabytes(recipe: SimpleNamespace) -> None:
    """Of Llama-3.2-1B's shape, with the settings that the YAML names."""
    config = SimpleNamespace(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        tie_word_embeddings=True,
    )
    memory = recipe.memory.step_memory(config, recipe.memory.StepShape())
    assert recipe.memory.num_weights(config) == 1_235_814_400
    written = (RECIPES / "lora_early_exit.yaml").read_text(encoding="utf-8")
    names = {"one layer": "activations"}
    for said in ("weights", "adapter", "layer inputs", "one layer", "logits"):
        value = getattr(memory, names.get(said, said.replace(" ", "_")))
        line = next(x for x in written.split("\n") if x.startswith(f"#   {said}"))
        assert line.split()[-2:] == [f"{value / 1e9:.1f}", "GB"]
    assert memory.total < 10e9


# What it reads


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("weight", r"1 weights are missing .*, the first of them model\.layers\.1\.mlp\.up_proj"),
        ("vocabulary", "the tokenizer has ids up to 331, the model's vocabulary only up to 330"),
        ("end", r"eos_token_id in generation_config\.json.* must be .*, got '</s>'$"),
        ("tokenizer", "has no tokenizer, which the data is read with"),
    ],
)
def test_what_decoding_refuses_is_not_trained(
    recipe: SimpleNamespace, tmp_path: Path, damage: str, said: str
) -> None:
    """Transformers makes up weights that are missing, and goes on with the others."""
    make_model(**SMALL | {"num_hidden_layers": 2}).save_pretrained(tmp_path)
    tokenizer, weights_file = make_tokenizer(), tmp_path / "model.safetensors"
    if damage == "weight":
        kept = load_file(weights_file)
        del kept["model.layers.1.mlp.up_proj.weight"]
        save_file(kept, weights_file, metadata={"format": "pt"})
    elif damage == "vocabulary":
        tokenizer.add_tokens(["<extra>"])
    elif damage == "end":
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    if damage != "tokenizer":
        tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        recipe.running.load_model(tmp_path, "auto")


def test_held_out_texts_of_their_own_are_left_out_whole(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    """A single one, too, which would be cut in two as data."""
    tokenizer, data = make_tokenizer(), tmp_path / "data"
    data.mkdir()
    for name in ("a", "b", "c"):
        (data / f"{name}.txt").write_text(f"text {name}\nhas a line more\n")
    asked, useless = tmp_path / "asked.jsonl", tmp_path / "useless.jsonl"
    asked.write_text('{"question": "How many?", "answer": "7"}\n')
    useless.write_text("{}\n")

    def corpus(source: Path, held_out: Path) -> Any:
        settings = some_settings(recipe, data=str(source), held_out=str(held_out))
        return recipe.running.read_corpus(settings, tokenizer)

    one = corpus(data, data / "b.txt")
    assert [tokenizer.decode(s.ids) for s in one.held_out] == ["text b\nhas a line more\n</s>"]
    assert {tokenizer.decode(s.ids)[5] for s in one.train} == {"a", "c"}
    other = corpus(data / "a.txt", asked)
    assert (len(other.train), len(other.held_out)) == (1, 1)
    with pytest.raises(ValueError, match=r"a\.txt holds out every row of .*a\.txt$"):
        corpus(data / "a.txt", data / "a.txt")
    with pytest.raises(
        ValueError, match=r"useless\.jsonl holds no row that can be used; the first"
    ):
        corpus(data, useless)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq_len": 17}, r"too long for this model's 16 positions; give seq_len=16 or less"),
        ({"seq_len": 14, "behind": 3}, r"16 positions, 3 of them for drafts; give seq_len=13"),
    ],
)
def test_rows_longer_than_a_table_of_positions_are_refused(
    recipe: SimpleNamespace, options: dict[str, int], said: str
) -> None:
    table, check = GPT2Config(n_positions=16), recipe.running.check_positions
    with pytest.raises(ValueError, match=said):
        check(table, **options)
    check(table, **options | {"seq_len": 13})
    check(LlamaConfig(max_position_embeddings=16), **options)


def test_prompts_leave_a_model_of_few_positions_room(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"vocab_size": VOCAB_SIZE, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**few)).save_pretrained(tmp_path)
    sample = recipe.data.Sample(tuple(random_ids(40)), 39)
    corpus = recipe.data.Corpus([], [sample], ())

    def measure(*given: Any, **options: Any) -> None:
        raise InterruptedError(*given[4])

    monkeypatch.setattr(recipe.lora_early_exit, "measure", measure)
    with pytest.raises(InterruptedError) as seen:
        recipe.lora_early_exit.compare(some_settings(recipe), tmp_path, tmp_path, corpus, None)
    assert seen.value.args == (sample.ids[31:39],)


# A whole run


WORDS = (
    "def",
    "return",
    "if",
    "else",
    "for",
    "in",
    "not",
    "with",
    "print",
    "self",
    "value",
    "name",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model's folder, and text."""
    base = tmp_path_factory.mktemp("sources")
    make_model(**SMALL).save_pretrained(base / "model")
    make_tokenizer().save_pretrained(base / "model")
    rows = [
        {"text": " ".join(WORDS[(i * 5 + j * j) % len(WORDS)] for j in range(30 + i))}
        for i in range(40)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    bad = '{"text": ["a [/INST] of a chat"]}\n'  # rich takes it for markup
    (base / "data.jsonl").write_text("".join([*lines[:9], bad, *lines[9:]]), encoding="utf-8")
    return SimpleNamespace(model=base / "model", data=base / "data.jsonl")


def arguments(sources: SimpleNamespace, out: Path, *overrides: str) -> list[str]:
    small = "steps=6 batch_size=4 seq_len=32 rank=4 exits=[1,2] save_every=2 eval_every=3"
    brief = "eval_tokens=60 final_tokens=90 final_prompts=2 max_new_tokens=6 cost_seconds=0.05"
    given = (f"model={sources.model}", f"data={sources.data}", f"out={out}", "mixed_precision=no")
    return [*given, *small.split(), *brief.split(), *overrides]


def run(recipe: SimpleNamespace, argv: list[str], *, ends_with: int = 0) -> str:
    """What a run prints."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed, exiting(ends_with):
        recipe.lora_early_exit.main(argv)
    return " ".join(printed.getvalue().split())


@pytest.fixture(scope="module")
def runs(
    recipe: SimpleNamespace, sources: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """One run with Ctrl-C at step 3, gone on with and merged; and one without, its adapter kept."""
    base = tmp_path_factory.mktemp("runs")
    merged, kept = base / "merged", base / "kept"

    class Interrupted(recipe.run_log.RunLog):
        def add(self, record: Any) -> None:
            super().add(record)
            if record["step"] == 3 and "loss" in record:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.running, "RunLog", Interrupted)
        first = run(recipe, arguments(sources, merged), ends_with=128 + signal.SIGINT)
    second = run(recipe, arguments(sources, merged))
    run(recipe, arguments(sources, kept, "merge=false"))
    return SimpleNamespace(merged=merged, kept=kept, first=first, second=second)


def test_ctrl_c_saves_and_the_same_command_goes_on(runs: SimpleNamespace) -> None:
    assert "stopped at step 3; the same command goes on from there" in runs.first
    assert "going on from step 3 of 6" in runs.second
    adapters = [
        load_file(out / "checkpoints" / "step-6" / "adapter_model.safetensors")
        for out in (runs.merged, runs.kept)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


@pytest.mark.parametrize(("step", "kept"), [(0, []), (3, [0, 3])])
def test_records_of_a_start_without_a_checkpoint_are_taken_out(
    recipe: SimpleNamespace, tmp_path: Path, step: int, kept: list[int]
) -> None:
    lines = '{"step": 0}\n{"step": 3}\n7\n{"loss": 1.0}\n{"step": 4}\n{"st'
    (tmp_path / "metrics.jsonl").write_text(lines, "utf-8")
    accelerator = SimpleNamespace(is_main_process=True, init_trackers=lambda _: None)
    recipe.run_log.RunLog(tmp_path, accelerator, step=step)
    assert [r["step"] for r in recipe.run_log.read_records(tmp_path / "metrics.jsonl")] == kept


def test_a_run_leaves_its_records(recipe: SimpleNamespace, runs: SimpleNamespace) -> None:
    for out in (runs.merged, runs.kept):
        records = recipe.run_log.read_records(out / "metrics.jsonl")
        assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
        assert {r["step"] for r in records if "acceptance" in r} == {0, 3, 6}
        assert (out / "acceptance.png").read_bytes()[:4] == b"\x89PNG"
        assert list((out / "tensorboard").iterdir())
        assert {p.name for p in (out / "checkpoints").iterdir()} == {"step-4", "step-6"}
        table = json.loads((out / "table.json").read_text(encoding="utf-8"))
        assert table["details"]["steps"] == 6
        assert (out / "settings.yaml").exists()
    assert "line 10" in runs.first  # the bad row
    assert "[/INST]" in runs.first


def test_the_merged_model_loads_as_usual_and_drafts(runs: SimpleNamespace) -> None:
    folder = runs.merged / "model"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["early_exit_layers"] == [1, 2]
    lm = SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=3)
    assert lm.trained_exits == (1, 2)
    assert lm.plan is not None
    assert lm.plan_file.measurements["before"]
    plain = lm.generate("def value", max_new_tokens=16, num_draft_tokens=0)
    assert lm.generate("def value", max_new_tokens=16).token_ids == plain.token_ids


def test_merged_and_kept_are_one_model(sources: SimpleNamespace, runs: SimpleNamespace) -> None:
    ids = torch.tensor([random_ids(12)])
    base = AutoModelForCausalLM.from_pretrained(sources.model)
    before = base(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(runs.merged / "model")(ids).logits
    kept = AutoModelForCausalLM.from_pretrained(runs.kept / "model")(ids).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        peft = PeftModel.from_pretrained(base, runs.kept / "model")(ids).logits
    torch.testing.assert_close(kept, merged, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(peft, merged, rtol=1e-4, atol=1e-4)
    assert (merged - before).abs().max() > 1e-2


def test_a_kept_adapter_decodes_by_its_folder(runs: SimpleNamespace) -> None:
    folder = runs.kept / "model"
    assert not (folder / "config.json").exists()
    lm = SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=3)
    assert lm.trained_exits == (1, 2)
    assert lm.plan is not None
    merged = SelfSpeculativeLM.from_pretrained(runs.merged / "model", num_draft_tokens=0)
    expected = merged.generate("for name in", max_new_tokens=12).token_ids
    assert lm.generate("for name in", max_new_tokens=12).token_ids == expected


def test_a_kept_adapter_is_not_trained_on_unmerged(
    recipe: SimpleNamespace, sources: SimpleNamespace, runs: SimpleNamespace, tmp_path: Path
) -> None:
    kept = SimpleNamespace(model=runs.kept / "model", data=sources.data)
    with pytest.raises(
        SystemExit, match=r"kept/model' is an adapter over another .*; merge it first"
    ):
        run(recipe, arguments(kept, tmp_path / "out"))


def test_without_a_plan_the_first_trained_exit_drafts(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    """As from a hub, where ``layerskip.json`` is not looked for."""
    folder = tmp_path / "model"
    shutil.copytree(runs.merged / "model", folder)
    (folder / "layerskip.json").unlink()
    lm = SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=3)
    assert lm.plan is not None
    assert lm.plan.exit_layer == 1
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for said in ([9, "x", 0], "all", 3):
        path.write_text(json.dumps(config | {"early_exit_layers": said}), encoding="utf-8")
        assert SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=0).trained_exits == ()


def test_a_run_begun_is_not_overwritten(
    recipe: SimpleNamespace, sources: SimpleNamespace, runs: SimpleNamespace
) -> None:
    with pytest.raises(SystemExit, match=r"^lora_early_exit: .* holds checkpoints; give resume"):
        run(recipe, arguments(sources, runs.merged, "resume=false"))
    with pytest.raises(SystemExit, match=r"was made with another rank \(4, now 5\)"):
        run(recipe, arguments(sources, runs.merged, "rank=5"))


@pytest.mark.slow
def test_two_launched_processes_have_the_loss_curve_of_one(
    recipe: SimpleNamespace, sources: SimpleNamespace, runs: SimpleNamespace, tmp_path: Path
) -> None:
    """Within 1e-4 of the loss: gradients of the two are added up in another order."""
    out = tmp_path / "two"
    launched("lora_early_exit.py", arguments(sources, out, "merge=false"))
    one, two = (
        [r["loss"] for r in recipe.run_log.read_records(o / "metrics.jsonl") if "loss" in r]
        for o in (runs.kept, out)
    )
    assert two == pytest.approx(one, rel=1e-4)
    assert (out / "table.json").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    recipe: SimpleNamespace, sources: SimpleNamespace, runs: SimpleNamespace, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    argv = arguments(sources, out, "merge=false")
    kept = partial(recipe.checkpoints.checkpoints, out / "checkpoints")
    killed("lora_early_exit.py", argv, kept)
    run(recipe, argv)
    resumed, whole = (
        load_file(o / "checkpoints" / "step-6" / "adapter_model.safetensors")
        for o in (out, runs.kept)
    )
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
