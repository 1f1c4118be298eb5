"""Whatever a model has been through, it is decoded exactly and left as it was, or refused
by name. What is done to it later is seen as far as it is done to its tensors."""

import copy
import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import accelerate
import peft
import pytest
import torch
import transformers
from decoding import Interruption
from snapshots import check_untouched, hf_text, snapshot
from torch import nn
from torch.nn.utils import parametrize, prune, weight_norm
from toys import DTYPES, PLANS, make_model, random_ids, without_times
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama
from zoo import make_toy

from layerskip import (
    DraftPlan,
    GenerationOutput,
    SamplingParams,
    SelfSpeculativeLM,
    UnsupportedModelError,
)
from layerskip import model as model_module
from layerskip.fingerprint import fingerprint
from layerskip.model import pack_model

PROMPTS = [random_ids(n) for n in (3, 70, 20)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
COUNT = 8


def ids_of(outputs: list[GenerationOutput]) -> list[list[int]]:
    return [list(out.token_ids) for out in outputs]


def decode(lm: SelfSpeculativeLM, k: int | None = None) -> list[list[int]]:
    return ids_of(lm.generate(PROMPTS, max_new_tokens=COUNT, num_draft_tokens=k))


def check_exact(model: nn.Module, lm: SelfSpeculativeLM, dtype: str = "float32") -> None:
    """Tokens are equal on and off, alone and together, and in float32 those of transformers."""
    plain = [lm.generate(p, max_new_tokens=COUNT, num_draft_tokens=0) for p in PROMPTS]
    assert decode(lm, 4) == ids_of(plain)
    if dtype == "float32":
        assert ids_of(plain) == [hf_text(model, p, COUNT) for p in PROMPTS]


@pytest.fixture(scope="module")
def plain_text(wrap: Callable[..., SelfSpeculativeLM]) -> list[list[int]]:
    """What the toy itself says."""
    return decode(wrap(None))


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


class Recorder:
    """Keeps what passes a layer; a lock cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.seen = threading.Lock(), 0

    def __call__(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return output * 1.5


def training() -> nn.Module:
    model = make_model(attention_dropout=0.5)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)  # layers run as modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of another name
        model.gradient_checkpointing_enable()
    return model.train()


def hooked() -> nn.Module:
    model = make_model()
    recorder = Recorder()
    for part in (model.model.layers[1].mlp, model.model.norm, model.model.embed_tokens):
        part.register_forward_hook(recorder)
    model.model.layers[2].register_full_backward_hook(lambda *_: None)
    return model


def parametrized() -> nn.Module:
    model = make_model()
    for part in (model.model.layers[1].mlp.up_proj, model.model.embed_tokens):
        parametrize.register_parametrization(part, "weight", Halved())
    return model


def pruned() -> nn.Module:
    model = make_model()
    for part in (model.model.layers[1].mlp.up_proj, model.lm_head):
        prune.l1_unstructured(part, "weight", amount=0.3)
    return model


def weight_normed() -> nn.Module:
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of another way, which is tested above
        weight_norm(model.model.layers[1].mlp.up_proj)
    return model


def asked_for_hidden_states() -> nn.Module:
    model = make_model()
    model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    return model


def namesake() -> nn.Module:
    """A module with the name and the attributes of torch's, that computes something else."""

    class Linear(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = inner.weight, inner.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight).clamp(-1, 1)

    model = make_model()
    for layer in model.model.layers:
        layer.mlp.down_proj = Linear(layer.mlp.down_proj)
    return model


def compiled(*, inside: bool) -> nn.Module:
    model = make_model()
    if not inside:
        return torch.compile(model, backend="eager")
    model.model.layers[1].compile(backend="eager")
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def frozen() -> nn.Module:
    model = make_model(tie_word_embeddings=True)
    model.enable_input_require_grads()
    return model.requires_grad_(False)


GUESTS = {
    "training": training,
    "hooked": hooked,
    "parametrized": parametrized,
    "pruned": pruned,
    "weight norm": weight_normed,
    "hidden states": asked_for_hidden_states,
    "namesake": namesake,
    "compiled": lambda: compiled(inside=False),
    "compiled inside": lambda: compiled(inside=True),
    "tied and frozen": frozen,
}


@pytest.mark.parametrize("build", GUESTS.values(), ids=GUESTS)
def test_a_model_is_decoded_as_it_is_and_left_as_it_was(build):
    model = build()
    before = snapshot(model)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    decode(lm)
    lm.generate(PROMPTS, max_new_tokens=COUNT, sampling=SAMPLED)
    stream = lm.stream(PROMPTS[0], max_new_tokens=COUNT)
    next(stream)
    stream.close()
    check_untouched(model, before)
    with torch.compiler.set_stance("force_eager"):  # to compile what we compare with takes long
        check_exact(model.eval(), lm)


def test_hooks_are_shared_and_see_the_passes():
    model, recorder = make_model(), Recorder()
    model.model.layers[1].mlp.register_forward_hook(recorder)
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    assert recorder.seen == 0  # the probe runs one layer
    decode(lm)
    assert recorder.seen > COUNT / 2


def scaled(function: Callable, by: float) -> Callable:
    def changed(*args: object, **kwargs: object) -> object:
        found = function(*args, **kwargs)
        return tuple(by * x for x in found) if isinstance(found, tuple) else by * found

    return changed


@pytest.mark.parametrize(
    "place",
    [
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama.LlamaRMSNorm, "forward"),
        (modeling_llama, "apply_rotary_pos_emb"),
    ],
    ids=lambda place: f"{place[0].__name__}.{place[1]}",
)
def test_what_others_put_into_transformers_own_classes_is_run(monkeypatch, plain_text, place):
    """As packages of faster layers do; dense layers passed it by."""
    monkeypatch.setattr(*place, scaled(getattr(*place), 1.3))
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    assert decode(lm) != plain_text
    check_exact(model, lm)


def test_functions_that_hub_kernels_stand_around_are_transformers_own(monkeypatch, wrap):
    """Where that package is installed each is a module of it."""

    class Func(nn.Module):
        __module__ = "kernels.layer.layer"

        def __init__(self, function: Callable) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: object, **kwargs: object) -> object:
            return self.function(*args, **kwargs)

    usual, around = wrap("exit").stack.backend, Func(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", around)
    lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"], num_draft_tokens=4)
    assert lm.stack.backend == usual


@pytest.mark.parametrize("method", ["lora", "loha", "ia3"])
def test_an_adapter_that_is_not_used_may_be_deleted_later(method):
    model = adapted(METHODS[method])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("other", copy.deepcopy(METHODS[method]))
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = decode(lm)
    model.delete_adapter("other")
    assert decode(lm) == expected


def test_hooks_on_all_modules_are_run(plain_text):
    def louder(module: nn.Module, _: object, output: object) -> object:
        return 1.3 * output if isinstance(module, modeling_llama.LlamaMLP) else None

    hook = nn.modules.module.register_module_forward_hook(louder)
    try:
        model = make_model()
        lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
        assert decode(lm) != plain_text
        check_exact(model, lm)
    finally:
        hook.remove()


def test_hooks_that_only_record_for_transformers_cost_nothing(wrap):
    lm = SelfSpeculativeLM(asked_for_hidden_states(), None, PLANS["exit"], num_draft_tokens=4)
    assert lm.stack.backend == wrap("exit").stack.backend


@pytest.mark.parametrize("places", ["auto", {"model": "cpu", "lm_head": "cpu"}])
def test_a_device_map_on_one_device_works(tmp_path, toy, plain_text, places):
    toy().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places)
    before = snapshot(model)
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    assert decode(lm) == plain_text
    check_untouched(model, before)


# After an exception


ROUND = 2 * 4 + 2  # four draft tokens: shared layers and the rest each; then verify, the same


@pytest.mark.parametrize(
    ("when", "calls"), [("before", 0), ("before", ROUND - 1), *(("after", n) for n in range(ROUND))]
)
def test_an_interrupted_round_changes_nothing_and_is_made_again(
    monkeypatch, toy, wrap, plain_text, when, calls
):
    model, lm = toy(), wrap("exit")
    batch = lm.open_batch(max_new_tokens=COUNT, num_draft_tokens=4)
    rows = [batch.add(p) for p in PROMPTS]
    batch.step()
    before = snapshot(model)
    work = lm.stack.run_layers if when == "after" else lambda *_: None
    broken = Interruption(work, calls, KeyboardInterrupt)

    def run_layers(*args: object) -> object:
        broken(*args)
        return lm.stack.__class__.run_layers(lm.stack, *args)

    with monkeypatch.context() as patch:
        patch.setattr(lm.stack, "run_layers", run_layers)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    check_untouched(model, before)
    while batch.unfinished:
        batch.step()
    outputs = [batch.remove(row) for row in rows]
    assert ids_of(outputs) == plain_text
    fresh = lm.generate(PROMPTS, max_new_tokens=COUNT, num_draft_tokens=4)
    assert [without_times(o.rounds) for o in outputs] == [without_times(o.rounds) for o in fresh]
    assert hf_text(model, PROMPTS[0]) == plain_text[0]


# In threads


def test_eight_threads_on_one_model(toy):
    """Two plans, both ways of sampling, streams, and transformers, all on one model at once."""
    model = toy()
    before = snapshot(model)
    first = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=3)
    second = SelfSpeculativeLM(model, None, PLANS["without-layer-0"], num_draft_tokens=5)
    prompt = PROMPTS[1]

    def streamed(lm: SelfSpeculativeLM) -> list[list[int]]:
        steps = lm.stream(prompt, max_new_tokens=COUNT)
        return [[token for step in steps for token in step.token_ids]]

    def sampled(lm: SelfSpeculativeLM) -> list[list[int]]:
        return ids_of(lm.generate(PROMPTS, max_new_tokens=COUNT, sampling=SAMPLED))

    jobs: list[Callable[[], list[list[int]]]] = [
        lambda: decode(first),
        lambda: decode(second),
        lambda: sampled(first),
        lambda: sampled(second),
        lambda: streamed(first),
        lambda: streamed(second),
        lambda: [hf_text(model, p, COUNT) for p in PROMPTS],
        lambda: decode(SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)),
    ]
    plain = SelfSpeculativeLM(model, num_draft_tokens=0)
    greedy = decode(plain)
    expected = [greedy, greedy, *[sampled(plain)] * 2, *[[greedy[1]]] * 2, greedy, greedy]
    results: dict[tuple[int, int], list[list[int]]] = {}
    barrier = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(2):
            results[number, turn] = jobs[number]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == {(i, t): expected[i] for i in range(len(jobs)) for t in range(2)}
    check_untouched(model, before)


# Adapters

TARGETS = ["q_proj", "up_proj"]
METHODS = {
    "lora": peft.LoraConfig(target_modules=TARGETS, lora_dropout=0.1),
    "dora": peft.LoraConfig(target_modules=TARGETS, use_dora=True),
    "lora of head and embedding": peft.LoraConfig(target_modules=["lm_head", "embed_tokens"]),
    "adalora": peft.AdaLoraConfig(target_modules=TARGETS, total_step=10),
    "loha": peft.LoHaConfig(target_modules=TARGETS),
    "lokr": peft.LoKrConfig(target_modules=TARGETS),
    "oft": peft.OFTConfig(target_modules=TARGETS),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["up_proj"]),
    "vera": peft.VeraConfig(target_modules=["up_proj"]),
    "fourierft": peft.FourierFTConfig(target_modules=TARGETS),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "tokens": peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=PROMPTS[1]),
}


def adapted(
    config: peft.PeftConfig | None = None, dtype: str = "float32", *, mixed: bool = False
) -> peft.PeftModel:
    """A toy with an adapter that changes its text."""
    config = copy.deepcopy(config) or peft.LoraConfig(target_modules=TARGETS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on training
        model = peft.get_peft_model(make_model("llama", dtype), config, mixed=mixed)
    shake(model)
    return model.eval()


def shake(model: nn.Module) -> None:
    """Trainable weights are the adapters'."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise.to(parameter.dtype))


COMMON = [("lora", "bfloat16"), *((n, "float32") for n in ("lora", "ia3", "tokens"))]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in COMMON else pytest.mark.slow)
        for name in METHODS
        for dtype in DTYPES
    ],
)
def test_adapted_models_decode_exactly(wrap, name, dtype):
    model = adapted(METHODS[name], dtype)
    before = snapshot(model)
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    check_exact(model, lm, dtype)
    decoded = decode(lm)
    check_untouched(model, before)
    assert decoded != decode(wrap(None, "llama", dtype))  # the adapter counts


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_of_experts_in_threads():
    """PEFT puts other attributes in the place of such parameters while their module runs: threads
    took them from each other, and what was left of the module gave other text for good."""
    torch.manual_seed(0)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_parameters=parameters, init_lora_weights=False)
    adapted = peft.get_peft_model(make_toy("mixtral"), config)
    lm = SelfSpeculativeLM(adapted, num_draft_tokens=0)
    assert not any("forward" in vars(module) for module in adapted.modules())  # it is the twin's
    expected, found = decode(lm), []
    threads = [threading.Thread(target=lambda: found.append(decode(lm))) for _ in range(4)]
    pace = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(pace)
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
        (
            peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2),
            "ADAPTION_PROMPT",
        ),
    ],
)
def test_adapters_that_are_more_than_layers_are_refused_by_name(config, method):
    model = adapted(config)
    with pytest.raises(UnsupportedModelError, match=f"PEFT method {method} is not supported; sup"):
        SelfSpeculativeLM(model)


def test_an_adapter_that_waits_for_its_tokens_is_refused_by_name():
    config = peft.LoraConfig(
        target_modules=TARGETS, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"
    )
    with pytest.raises(UnsupportedModelError, match="activated LoRA is not supported"):
        SelfSpeculativeLM(adapted(config))


def test_an_adapter_that_is_merged_and_disabled_is_refused():
    """Its first pass would take it out of the user's weights."""
    model = adapted()
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"q_proj has an adapter that is merged and di"):
        SelfSpeculativeLM(model)
    check_untouched(model, before)


# Later changes of the model


def test_weights_that_change_later_are_seen():
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    old = decode(lm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([PROMPTS[0]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    check_exact(model, lm)
    stepped = decode(lm)
    assert stepped != old
    model.load_state_dict(make_model().state_dict())
    assert decode(lm) == old


@pytest.mark.parametrize("name", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize(
    "config", ["lora", "ia3", *(pytest.param(c, marks=pytest.mark.slow) for c in ("dora", "loha"))]
)
def test_an_adapter_merged_later_does_not_count_twice(config, name):
    model = adapted(METHODS[config])
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = decode(lm)
    getattr(model, name)()
    assert decode(lm, 0) == decode(lm, 4) == expected
    if name == "merge_adapter":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft's, of rounding
            model.unmerge_adapter()
        assert decode(lm) == expected


@pytest.mark.parametrize("config", ["lora", "ia3"])
def test_a_model_merged_later_keeps_its_adapter_where_a_decoder_had_it_disabled(config):
    model = adapted(METHODS[config])
    with model.disable_adapter():
        base = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    merged = model.merge_and_unload()
    before = snapshot(merged)
    assert decode(base) == decode(SelfSpeculativeLM(merged, num_draft_tokens=0))
    check_untouched(merged, before)


def test_norms_that_are_merged_later_stay_the_tuned_ones():
    model = adapted(peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]))
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = decode(lm)
    merged = model.merge_and_unload()
    assert decode(lm) == expected == decode(SelfSpeculativeLM(merged, num_draft_tokens=0))


def test_an_adapter_trained_on_is_seen_and_one_switched_later_is_not(plain_text):
    model = adapted()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    shake(model)
    check_exact(model, lm)
    expected = decode(lm)
    model.add_adapter("other", peft.LoraConfig(target_modules=TARGETS, init_lora_weights=False))
    model.set_adapter("other")
    assert decode(lm) == expected != decode(SelfSpeculativeLM(model, num_draft_tokens=0))
    with model.disable_adapter():
        assert decode(lm) == expected
        assert (
            decode(SelfSpeculativeLM(model, num_draft_tokens=0)) == plain_text
        )  # wrapped now: disabled
    model.set_adapter("default")
    model.delete_adapter("other")
    assert decode(lm) == expected


def test_a_fingerprint_is_of_the_adapters_that_are_run():
    model = adapted()
    alone = fingerprint(model.get_base_model())
    model.add_adapter("other", peft.LoraConfig(target_modules=TARGETS, init_lora_weights=False))
    found = []
    for name in ("default", "other"):
        model.set_adapter(name)
        found.append(fingerprint(SelfSpeculativeLM(model).stack.twin))
        assert fingerprint(model.get_base_model()) == found[-1]
    with model.disable_adapter():
        found.append(fingerprint(model.get_base_model()))
    assert len({alone, *found}) == 4
    model.set_adapter("default")
    assert fingerprint(model.get_base_model()) == found[0]
    model.delete_adapter("other")
    assert fingerprint(model.get_base_model()) == alone


def test_a_fingerprint_is_of_the_scales_of_adapters():
    """No weight says by how much an adapter's output is multiplied."""
    model = adapted()
    found = {fingerprint(model.get_base_model())}
    with peft.helpers.rescale_adapter_scale(model, 0.5):
        found |= {
            fingerprint(m) for m in (model.get_base_model(), SelfSpeculativeLM(model).stack.twin)
        }
    assert len(found) == 2


def test_a_module_may_use_a_name_of_peft_s_for_itself(plain_text):
    model = make_model()
    model.model.layers[1].mlp.disable_adapters = False
    assert decode(SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)) == plain_text


def test_modules_and_settings_that_change_later_are_not_seen(plain_text):
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    model.train()
    model.config.num_hidden_layers = 1
    model.generation_config.eos_token_id = list(range(300))
    model.set_attn_implementation("eager")
    model.lm_head.register_forward_hook(lambda _m, _a, output: output.flip(-1))
    model.model.layers[0] = nn.Identity()
    assert decode(lm) == plain_text


def test_keys_and_values_of_unequal_width_are_refused_in_a_sentence():
    """StableLM's rotary part of one channel comes back as two: its keys are wider than its values.

    Widths: 4 channels a head, of which ``partial_rotary_factor`` turns one.
    """
    config = transformers.StableLmConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        partial_rotary_factor=0.25,
    )
    model = transformers.StableLmForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="in layer 0: 5 and 4 channels a head"):
        SelfSpeculativeLM(model, None)


@pytest.mark.parametrize("change", ["cast", "half cast", "resized"])
def test_a_model_cast_or_resized_later_has_to_be_wrapped_again(change):
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    if change == "resized":
        model.resize_token_embeddings(400, mean_resizing=False)
    else:
        (model if change == "cast" else model.model.layers[5].mlp).to(torch.bfloat16)
    message = "the model was moved, cast or resized after it was wrapped; wrap it again"
    with pytest.raises(ValueError, match=message):
        decode(lm)
    if change != "half cast":
        again = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
        check_exact(model, again, "float32" if change == "resized" else "bfloat16")


@pytest.mark.parametrize("change", ["cast", "shrunk"])
def test_a_model_cast_or_shrunk_during_a_batch_takes_no_rows_and_says_why(change):
    model = make_model()
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = lm.generate(PROMPTS[0], max_new_tokens=COUNT).token_ids
    batch = lm.open_batch(max_new_tokens=COUNT)
    row = batch.add(PROMPTS[0])
    batch.step()
    if change == "cast":
        model.half()
    else:
        model.resize_token_embeddings(1, mean_resizing=False)
    message = "the model was moved, cast or resized after it was wrapped; wrap it again"
    with pytest.raises(ValueError, match=message):
        batch.add(PROMPTS[1])
    with pytest.raises(ValueError, match=message) as caught:
        batch.step()
    assert isinstance(caught.value.__context__, RuntimeError | IndexError)  # torch's own
    assert batch.unfinished == [row]
    early = batch.remove(row).token_ids
    assert early == expected[: len(early)]


def test_a_packed_model_cast_between_texts_has_to_be_wrapped_again():
    """The cache of the earlier text, which is kept, has room for the next one."""
    model = make_model()
    pack_model(model)
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4, packed=True)
    lm.generate(PROMPTS[0], max_new_tokens=COUNT)
    model.half()
    with pytest.raises(ValueError, match="the model was moved, cast or resized after it was wra"):
        lm.generate(PROMPTS[0], max_new_tokens=COUNT)


def test_what_fails_in_a_model_left_alone_fails_as_it_is(monkeypatch):
    lm = SelfSpeculativeLM(make_model(), None, PLANS["exit"], num_draft_tokens=4)
    batch = lm.open_batch()
    batch.add(PROMPTS[0])
    error = RuntimeError("out of memory")
    monkeypatch.setattr(lm.stack, "prefill", Interruption(lm.stack.prefill, 0, error))
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.step()


def assign(model: nn.Module) -> None:
    state = {name: 0.6 * tensor + 0.01 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_head(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def replace_embeddings(model: nn.Module) -> None:
    model.set_input_embeddings(nn.Embedding(*model.get_input_embeddings().weight.shape))


def prune_one(model: nn.Module) -> None:
    prune.l1_unstructured(model.lm_head, "weight", 0.5)


def parametrize_one(model: nn.Module) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Halved())


REPLACED = {
    assign: r"model\.embed_tokens\.weight",
    prune_one: r"lm_head\.weight",
    parametrize_one: r"lm_head\.weight",
    replace_head: r"lm_head\.weight",
    replace_embeddings: r"model\.embed_tokens\.weight",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["own", "tied", "compiled", "adapted"])
@pytest.mark.parametrize("change", REPLACED)
def test_a_model_given_other_tensors_later_has_to_be_wrapped_again(change, kind):
    """Its weights would be two texts' worth: the twin's, and those that its owner sees."""
    model = adapted() if kind == "adapted" else make_model(tie_word_embeddings=kind == "tied")
    inner = model.get_base_model() if kind == "adapted" else model
    held = torch.compile(model, backend="eager") if kind == "compiled" else model
    lm = SelfSpeculativeLM(held, None, PLANS["exit"], num_draft_tokens=4)
    change(inner)
    message = f"^weight {REPLACED[change]} of the model is another tensor .*; wrap it again$"
    with pytest.raises(ValueError, match=message):
        decode(lm)
    check_exact(model, SelfSpeculativeLM(held, None, PLANS["exit"], num_draft_tokens=4))


@pytest.mark.parametrize("how", ["assign", "attribute", "in place"])
def test_learnt_buffers_are_watched_as_weights_are(how):
    """Some experts' biases are buffers of the checkpoint."""
    model = make_toy("glm4_moe")
    plan = DraftPlan.exiting(num_layers=model.config.num_hidden_layers, exit_layer=2)
    lm = SelfSpeculativeLM(model, None, plan, num_draft_tokens=4)
    held = lm.generate(PROMPTS[0], max_new_tokens=COUNT, return_cache=True).cache
    state = {n: b + torch.randn_like(b) for n, b in model.state_dict().items() if "e_score" in n}
    assert state
    if how == "attribute":
        name = next(iter(state))
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, state[name])
    else:
        model.load_state_dict(state, strict=False, assign=how == "assign")
    if how == "in place":
        with pytest.raises(ValueError, match="weights"):
            lm.generate([*held.token_ids, 5], max_new_tokens=COUNT, cache=held)
        assert decode(lm) == decode(SelfSpeculativeLM(model, None, plan, num_draft_tokens=0))
    else:
        with pytest.raises(ValueError, match=r"e_score_correction_bias of the model is another t"):
            decode(lm)


def test_an_adapter_whose_merging_swaps_tensors_has_to_be_wrapped_again():
    model = adapted(METHODS["norms"])
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4)
    expected = decode(lm)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"layernorm\..* is another tensor .*; wrap it again"):
        decode(lm)
    model.unmerge_adapter()
    assert decode(lm) == expected


def test_a_model_that_was_let_go_decodes_on(plain_text):
    model = make_model()
    lm, gone = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=4), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert decode(lm) == plain_text


# Refused by name


def on_device(name: str) -> nn.Module:
    """A model that says its weights are elsewhere: this machine may not have such a device."""
    model = make_model()
    model.parameters = lambda: iter([SimpleNamespace(device=torch.device(name))])
    return model


def on_several() -> nn.Module:
    model = make_model()
    places = [SimpleNamespace(device=torch.device("cuda", i)) for i in range(2)]
    model.parameters = lambda: iter(places)
    return model


def without_values() -> nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(make_model().config)


def offloaded() -> nn.Module:
    return accelerate.cpu_offload(make_model(), torch.device("cpu"))


def dispatched() -> nn.Module:
    model = make_model()
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    accelerate.hooks.add_hook_to_module(model.model.layers[1].self_attn, hook)
    return model


def of_dtype(dtype: torch.dtype, part: str = "") -> nn.Module:
    model = make_model()
    model.get_submodule(part).to(dtype)
    return model


def foreign(kind: str, module: str) -> nn.Module:
    """A weight of a class of another package."""
    model = make_model()
    cls = type(kind, (nn.Parameter,), {"__module__": module})
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = cls(weight.data, requires_grad=False)
    return model


def quantised(method: str) -> nn.Module:
    model = make_model()
    configs = {
        "bitsandbytes": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "gptq": {"quant_method": "gptq", "bits": 4},
    }
    model.config.quantization_config = configs[method]
    return model


def hooked_outside(*, body: bool) -> nn.Module:
    model = make_model()
    (model.model if body else model).register_forward_hook(lambda *_: None)
    return model


def overridden() -> nn.Module:
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    return Louder(make_model().config)


def replaced(part: str) -> nn.Module:
    model = make_model()
    module = model.get_submodule(part)
    module.forward = functools.partial(module.forward)
    return model


def other_attention() -> nn.Module:
    class Attention(type(make_model().model.layers[0].self_attn)):
        def forward(self, *args: object, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    model = make_model()
    model.model.layers[2].self_attn = Attention(model.config, 2)
    return model


def compiled_layer() -> nn.Module:
    model = make_model()
    model.model.layers[3] = torch.compile(model.model.layers[3], backend="eager")
    return model


def with_a_lock() -> nn.Module:
    model = make_model()
    model.model.lock = threading.Lock()
    return model


def own_attention(name: str = "sdpa_of_mine") -> nn.Module:
    def attend(module, query, key, value, mask, **rest):
        return sdpa_attention_forward(module, 3 * query, key, value, mask, **rest)

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, sdpa_mask)
    model = make_model()
    model.set_attn_implementation(name)
    return model


def quantised_head() -> nn.Module:
    model = make_model()
    model.lm_head = SimpleModule()
    return model


class SimpleModule(nn.Module):
    """As torch's quantised layers: the weight is a method."""

    def weight(self) -> None:
        return None


REFUSED = {
    "own attention": (own_attention, r"attention implementation 'sdpa_of_mine' is not transf"),
    "quantised head": (quantised_head, r"the head is a SimpleModule of .*, whose weight is no"),
    "mps": (
        lambda: on_device("mps"),
        r"device 'mps' is not supported; move the model to cpu or cu",
    ),
    "xpu": (lambda: on_device("xpu"), r"device 'xpu' is not supported"),
    "spread": (on_several, r"the model is spread over 2 devices; load it on one"),
    "meta": (without_values, r"some weights have no values \(device 'meta'\)"),
    "offloaded": (offloaded, r"some weights have no values \(device 'meta'\): offloaded"),
    "dispatched": (dispatched, r"layers\.1\.self_attn is moved about by accelerate; load the mo"),
    "float64": (
        lambda: of_dtype(torch.float64),
        r"weight model\.embed_tokens\.weight is torch\.fl",
    ),
    "float8": (
        lambda: of_dtype(torch.float8_e4m3fn, "model.layers.3.mlp"),
        r"3\.mlp\.gate_proj\.weight is torch\.float8_e4m3fn; supported are float32, bfloat16, flo",
    ),
    "mixed": (
        lambda: of_dtype(torch.bfloat16, "lm_head"),
        r"several dtypes \(model\.embed_tokens\.weight is torch\.float32, lm_head\.weight is torc",
    ),
    "bitsandbytes": (lambda: quantised("bitsandbytes"), r"not supported \(bitsandbytes\), but for"),
    "gptq": (lambda: quantised("gptq"), r"quantised weights are not supported \(gptq\)"),
    "bitsandbytes weight": (
        lambda: foreign("Int8Params", "bitsandbytes.nn.modules"),
        r"weight model\.layers\.0\.mlp\.up_proj\.weight is a Int8Params of bitsandbytes, which is",
    ),
    "sharded": (
        lambda: foreign("DTensor", "torch.distributed.tensor"),
        r"is a DTensor of torch, which is not supported; load .+, unsharded",
    ),
    "hook on the model": (lambda: hooked_outside(body=False), r"LlamaForCausalLM has a forward ho"),
    "hook on the body": (
        lambda: hooked_outside(body=True),
        r"LlamaModel has a forward hook, which",
    ),
    "subclass": (overridden, r"Louder\.forward is not transformers' own, and decoding would not"),
    "new forward": (lambda: replaced(""), r"LlamaForCausalLM has a forward in the place of its c"),
    "new forward of the body": (lambda: replaced("model"), r"LlamaModel has a forward in the plac"),
    "new forward of a layer": (
        lambda: replaced("model.layers.1"),
        r"model\.layers\.1 has a forward in the place of its class's; delete that attribute",
    ),
    "other attention": (other_attention, r"Attention is not a layer of transformers"),
    "compiled layer": (compiled_layer, r"model\.layers\.3 is a compiled module; give the model as"),
    "lock": (with_a_lock, r"the model's modules cannot be copied: cannot pickle '_thread\.lock'"),
    "mixed adapters": (
        lambda: adapted(mixed=True),
        r"model must be a transformers causal language model, got PeftMixedModel",
    ),
    "wrapped": (lambda: nn.DataParallel(make_model()), r"causal language model, got DataParallel"),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_name(monkeypatch, build, reason):
    model = build()
    monkeypatch.setattr(model_module, "probe", lambda _: pytest.fail("a stack was built"))
    places = [(n, id(m), sorted(vars(m))) for n, m in model.named_modules()]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        SelfSpeculativeLM(model)
    assert "\n" not in str(caught.value)
    assert [(n, id(m), sorted(vars(m))) for n, m in model.named_modules()] == places


# Quantised to 8 bits by torchao


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_weights_of_torchao_decode_exactly(dtype):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = make_model("llama", dtype)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    lm = SelfSpeculativeLM(model, None, PLANS["skipping"], num_draft_tokens=4)
    check_exact(model, lm, dtype)
    assert lm.stack.exactness.holds
    twin = lm.stack.twin.parameters()
    assert all(mine is theirs for mine, theirs in zip(twin, model.parameters(), strict=True))
