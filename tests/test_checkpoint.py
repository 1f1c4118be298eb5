"""Checkpoints from disk: what loads, and what is refused in one sentence."""

import json
import shutil
from unittest import mock

import pytest
import torch
import transformers
from optional import needed
from toys import NUM_LAYERS, PLANS, make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from zoo import make_toy

from layerskip import DraftPlan, PlanFile, SelfSpeculativeLM, UnsupportedModelError


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A checkpoint on disk, with a tokenizer and in bfloat16."""
    path = tmp_path_factory.mktemp("saved")
    make_model("llama", "bfloat16").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_with_its_dtype_and_tokenizer(saved):
    lm = SelfSpeculativeLM.from_pretrained(saved, exit_layer=2, device="cpu")
    assert lm.stack.dtype == torch.bfloat16
    assert lm.plan == PLANS["exit"]
    out = lm.generate([5, 6, 7], max_new_tokens=12)
    assert out.text == lm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    plain = lm.generate([5, 6, 7], max_new_tokens=12, num_draft_tokens=0)
    assert out.token_ids == plain.token_ids


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_another_dtype_may_be_asked_for(saved, dtype):
    lm = SelfSpeculativeLM.from_pretrained(saved, dtype=dtype, exit_layer=2)
    assert lm.stack.dtype == torch.float32
    guest = make_model("llama", "bfloat16").float()
    expected = SelfSpeculativeLM(guest, num_draft_tokens=0).generate([5, 6, 7], max_new_tokens=12)
    assert lm.generate([5, 6, 7], max_new_tokens=12).token_ids == expected.token_ids


def test_a_folder_s_own_plan_is_used(folder):
    PLANS["skipping"].save(folder / "layerskip.json")
    content = json.loads((folder / "layerskip.json").read_text())
    (folder / "layerskip.json").write_text(json.dumps(content | {"num_draft_tokens": 7}))
    lm = SelfSpeculativeLM.from_pretrained(folder)
    assert (lm.plan, lm.num_draft_tokens) == (PLANS["skipping"], 7)
    lm = SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=2)
    assert (lm.plan, lm.num_draft_tokens) == (PLANS["skipping"], 2)
    lm = SelfSpeculativeLM.from_pretrained(folder, exit_layer=3)
    assert lm.plan == DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=3)


def test_without_a_known_plan_only_look_ups_draft_and_it_says_so(saved, caplog):
    lm = SelfSpeculativeLM.from_pretrained(saved)
    assert (lm.plan, lm.num_draft_tokens) == (None, "auto")
    assert "no draft plan is known" in caplog.text
    assert lm.generate([5, 6, 7], max_new_tokens=20).stats.num_draft_passes == 0


def test_who_gave_a_file_by_which_no_plan_pays_is_told_that(saved, caplog):
    file = PlanFile(None, 0, measurements={"verdict": "no plan pays: all are dear"})
    SelfSpeculativeLM.from_pretrained(saved, plan=file, num_draft_tokens=4)
    assert "no plan pays: all are dear; only look-ups draft" in caplog.text
    assert "no draft plan is known" not in caplog.text


def test_without_a_known_plan_and_look_ups_nothing_drafts_and_it_says_so(saved, caplog):
    SelfSpeculativeLM.from_pretrained(saved, lookup=False, num_draft_tokens=2)
    assert "nothing drafts" in caplog.text


def test_who_asked_for_plain_decoding_is_not_told_that_nothing_drafts(saved, caplog):
    SelfSpeculativeLM.from_pretrained(saved, num_draft_tokens=0)
    assert "no draft plan is known" not in caplog.text


DTYPES = "dtype must be one of bfloat16, float16, float32 or None"
DEVICES = "device must be 'cpu', 'cuda' or 'auto'"
BAD_ARGUMENTS = [
    ({"exit_layer": 0}, ValueError, "exit_layer must be between 1 and 5, got 0"),
    ({"exit_layer": -2}, ValueError, "exit_layer must be between 1 and 5, got -2"),
    ({"exit_layer": 6}, ValueError, "exit_layer must be between 1 and 5, got 6"),
    ({"exit_layer": [1, 2]}, TypeError, r"exit_layer must be an int, got \[1, 2\]"),
    ({"exit_layer": "2"}, TypeError, "exit_layer must be an int, got '2'"),
    ({"plan": DraftPlan(16, (0,))}, ValueError, "the plan is for a model of 16 layers; this one h"),
    ({"plan": DraftPlan(5, (0,))}, ValueError, "the plan is for a model of 5 layers; this one ha"),
    ({"plan": DraftPlan(6, (0,)), "exit_layer": 2}, ValueError, "give exit_layer or plan, not bo"),
    ({"dtype": "int8"}, ValueError, f"{DTYPES}, got 'int8'"),
    ({"dtype": torch.float64}, ValueError, rf"{DTYPES}, got torch\.float64"),
    ({"device": "tpu"}, ValueError, f"{DEVICES}, got 'tpu'"),
    ({"device": "mps"}, ValueError, f"{DEVICES}, got 'mps'"),
    ({"device": 0}, ValueError, f"{DEVICES}, got 0"),
    ({"num_draft_tokens": 99, "exit_layer": 2}, ValueError, "num_draft_tokens must be between"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_weights_are_read(
    saved, monkeypatch, arguments, error, message
):
    if "num_draft_tokens" not in arguments:
        forbid_loading(monkeypatch)
    with pytest.raises(error, match=f"^{message}") as caught:
        SelfSpeculativeLM.from_pretrained(saved, **arguments)
    assert "\n" not in str(caught.value)


def forbid_loading(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)


def test_cuda_that_is_not_there(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forbid_loading(monkeypatch)
    with pytest.raises(ValueError, match="device 'cuda' was asked for, but torch sees no CUDA"):
        SelfSpeculativeLM.from_pretrained(saved, device="cuda")


def test_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="is not a folder; give a checkpoint folder or a hub id"):
        SelfSpeculativeLM.from_pretrained(tmp_path / "nothing")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a checkpoint folder"):
        SelfSpeculativeLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"model_type": "bert"}, "architecture 'bert' is not supported"),
        ({"model_type": "t5"}, "architecture 't5' is not supported"),
    ],
)
def test_other_architectures(folder, monkeypatch, changes, reason):
    change_config(folder, **changes)
    forbid_loading(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=reason):
        SelfSpeculativeLM.from_pretrained(folder)


def test_an_unknown_architecture(folder):
    change_config(folder, model_type="nonsense")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*nonsense"):
        SelfSpeculativeLM.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{", b"[]"])
def test_a_damaged_config(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"model '.*checkpoint' cannot be loaded"):
        SelfSpeculativeLM.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'\xef\xbb\xbf{"eos_token_id": 2}'])
def test_a_damaged_generation_config_is_not_passed_over(folder, content):
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"model '.*checkpoint' cannot be loaded: "):
        SelfSpeculativeLM.from_pretrained(folder)
    (folder / "generation_config.json").unlink()
    SelfSpeculativeLM.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{", b"[]", b"{}"])
def test_a_damaged_plan_file(folder, content):
    (folder / "layerskip.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"layerskip\.json is not a plan file"):
        SelfSpeculativeLM.from_pretrained(folder)


def test_a_plan_file_for_another_depth(folder):
    DraftPlan(16, (0, 1)).save(folder / "layerskip.json")
    with pytest.raises(ValueError, match="plan is for a model of 16 layers; this one has 6"):
        SelfSpeculativeLM.from_pretrained(folder)


def test_damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match=r"model '.*checkpoint' cannot be loaded"):
        SelfSpeculativeLM.from_pretrained(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model '.*checkpoint' cannot be loaded"):
        SelfSpeculativeLM.from_pretrained(folder)


WRONG = {
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "a word of heads": ({"num_attention_heads": "five"}, "field 'num_attention_heads': TypeError"),
    "no key heads": ({"num_key_value_heads": 0}, "ZeroDivisionError"),
    "an activation": ({"hidden_act": "nope"}, r"KeyError\('nope'\)"),
}


@pytest.mark.parametrize(("changes", "said"), WRONG.values(), ids=WRONG)
def test_a_config_of_wrong_values(folder, changes, said):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"model '.*checkpoint' cannot be loaded: .*{said}") as e:
        SelfSpeculativeLM.from_pretrained(folder)
    assert "\n" not in str(e.value)


def test_a_config_without_layers(folder):
    change_config(folder, num_hidden_layers=0)
    with pytest.raises(ValueError, match="num_hidden_layers of the config must be at least 1"):
        SelfSpeculativeLM.from_pretrained(folder)


def test_an_index_without_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be loaded: KeyError\('weight_map'\)"):
        SelfSpeculativeLM.from_pretrained(folder)


@pytest.mark.parametrize("content", ["", '{"a": ', "[]"])
def test_a_damaged_tokenizer(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"^the tokenizer of '.*checkpoint' cannot be loaded: "):
        SelfSpeculativeLM.from_pretrained(folder)


def cached(folder, tmp_path):
    """Where transformers keeps what it has of a hub id."""
    kept, commit = tmp_path / "models--some--toy", "0" * 40
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    return shutil.copytree(folder, kept / "snapshots" / commit)


def test_a_damaged_tokenizer_of_a_hub_id(folder, tmp_path):
    (cached(folder, tmp_path) / "tokenizer.json").write_text("not JSON")
    ask = {"cache_dir": tmp_path, "local_files_only": True}
    with pytest.raises(ValueError, match=r"^the tokenizer of 'some/toy' cannot be loaded: "):
        SelfSpeculativeLM.from_pretrained("some/toy", **ask)


def test_a_hub_id_without_a_tokenizer_has_none(folder, tmp_path, monkeypatch):
    """And with ``local_files_only`` the network is asked nothing."""
    monkeypatch.setattr("socket.getaddrinfo", mock.Mock(side_effect=AssertionError("asked")))
    for path in cached(folder, tmp_path).glob("tokenizer*"):
        path.unlink()
    ask = {"cache_dir": tmp_path, "local_files_only": True, "num_draft_tokens": 0}
    assert SelfSpeculativeLM.from_pretrained("some/toy", **ask).tokenizer is None


def test_a_tokenizer_that_is_not_there_is_none(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert SelfSpeculativeLM.from_pretrained(folder, num_draft_tokens=0).tokenizer is None


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("rest", [{}, {"tokenizer_config.json": "{}"}], ids=["", "its config"])
def test_a_tokenizer_that_transformers_makes_up_is_none(tmp_path, family, rest):
    """It has no vocabulary but its special tokens: any text would be an empty prompt to it."""
    make_toy(family).save_pretrained(tmp_path)
    for name, content in rest.items():
        (tmp_path / name).write_text(content)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path) is not None
    lm = SelfSpeculativeLM.from_pretrained(tmp_path, num_draft_tokens=0)
    assert lm.tokenizer is None
    with pytest.raises(TypeError, match="this model has no tokenizer: give token ids"):
        lm.generate("the tea is hot", max_new_tokens=2)


def test_a_hub_id_s_tokenizer_is_looked_for_in_the_cache(tmp_path, monkeypatch):
    make_toy("qwen3").save_pretrained(tmp_path / "checkpoint")
    kept = cached(tmp_path / "checkpoint", tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", mock.Mock(side_effect=AssertionError("asked")))
    ask = {"cache_dir": tmp_path, "local_files_only": True, "num_draft_tokens": 0}
    assert SelfSpeculativeLM.from_pretrained("some/toy", **ask).tokenizer is None
    make_tokenizer().save_pretrained(kept)
    assert len(SelfSpeculativeLM.from_pretrained("some/toy", **ask).tokenizer) > 300


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"vocab.json": '{"a": 0, "b": 1, "ab": 2}', "merges.txt": "a b\n"}, "ab"),
        ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}'}, "a"),
    ],
    ids=["vocabulary and merges", "bytes"],
)
def test_a_tokenizer_of_another_kind(tmp_path, files, text):
    make_toy("gpt2").save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    lm = SelfSpeculativeLM.from_pretrained(tmp_path, num_draft_tokens=0)
    assert lm.tokenizer.decode(lm.encode(text)).startswith(text)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_an_adapter_has_its_checkpoint_s_tokenizer(saved, tmp_path):
    peft = needed("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(saved), config)
    adapted.save_pretrained(tmp_path)
    lm = SelfSpeculativeLM.from_pretrained(tmp_path, num_draft_tokens=0)
    assert lm.tokenizer is not None
    assert lm.generate("abc", max_new_tokens=2).text is not None


@pytest.mark.parametrize("content", ["[]", "{}", '{"base_model_name_or_path": 3}'])
def test_an_adapter_of_nobody_knows_what(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match="does not say of which checkpoint it is"):
        SelfSpeculativeLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("plan", "plan.json"), ("policy", "policy.json"), ("lookup", "yes")]
)
def test_values_of_another_type_are_refused_before_a_file_is_read(tmp_path, name, value):
    with pytest.raises(TypeError, match=f"{name} must be a"):
        SelfSpeculativeLM.from_pretrained(tmp_path / "gone", **{name: value})
