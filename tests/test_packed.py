"""The packed stack against the general one and transformers, by the operations' definitions."""

import copy
import functools
import gc
import itertools
import types

import pytest
import torch
from snapshots import hf_text
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from toys import VOCAB_SIZE, random_ids
from zoo import NUM_LAYERS, make_toy

import layerskip.ops
from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM, packed
from layerskip.cache import Segment
from layerskip.decode import Decoder
from layerskip.drafting import EarlyExitDrafter
from layerskip.model import DecoderStack, pack_model
from layerskip.ops import registry
from layerskip.ops.build import KernelBuildError
from layerskip.ops.kernels import KernelOps
from layerskip.packed import SLOT_BLOCK, Noise, PackedStack, open_stack, why_general
from layerskip.packed_forward import _embedding_of
from layerskip.packing import FAMILIES, kernels_lack
from layerskip.row import RowSpec
from layerskip.sampling import Sampler

# What the zoo's models of these families leave out.
CASES = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "granite": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {},
}
PROMPTS = [random_ids(n) for n in (2, 21, 40)]
TEXT = random_ids(70)  # longer than a sliding window
PLANS = {
    "exit": DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=3),
    "skipping": DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=[3]),
}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
ALL_LAYERS = range(NUM_LAYERS)


@functools.cache
def toy(family="llama"):
    """In fp32, its weights packed; no test may change it."""
    model = make_toy(family, **CASES[family])
    pack_model(model)
    return model


@functools.cache
def stack_of(family="llama"):
    return PackedStack(toy(family))


def wrap(family, plan, packed):
    settings = {"num_draft_tokens": 4, "lookup": False, "packed": packed}
    return SelfSpeculativeLM(toy(family), None, PLANS[plan], **settings)


def texts(outputs):
    return [out.token_ids for out in outputs]


def test_every_family_is_tried():
    assert [name.lower() for name in FAMILIES] == list(CASES)


@pytest.mark.parametrize(
    ("family", "more", "window"),
    [
        ("llama", {}, None),
        ("llama", {"layer_types": ["sliding_attention"] * NUM_LAYERS}, None),
        ("olmo2", {}, None),
        ("granite", {}, None),
        ("mistral", {"layer_types": ["full_attention"] * NUM_LAYERS}, 8),
    ],
)
def test_a_config_may_speak_of_windows_that_its_family_does_not_have(family, more, window):
    model = make_toy(family, **CASES[family], sliding_window=8, **more)
    pack_model(model)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0, -1]
    for ours in (False, True):
        lm = SelfSpeculativeLM(model, None, PLANS["exit"], lookup=False, packed=ours)
        assert lm.stack.windows == (window,) * NUM_LAYERS
        cache = lm.stack.new_cache(num_rows=1, num_slots=len(TEXT))
        with torch.inference_mode():
            got = lm.stack.prefill(TEXT, cache, 0)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_the_general_stack_and_of_transformers(family):
    general, count = wrap(family, "exit", packed=False), 12
    expected = texts([general.generate(p, max_new_tokens=count) for p in PROMPTS])
    sampled = general.generate(PROMPTS[1], max_new_tokens=count, sampling=SAMPLED)
    for plan in PLANS:
        lm = wrap(family, plan, packed=True)
        outputs = lm.generate(PROMPTS, max_new_tokens=count)
        assert texts(outputs) == expected
        assert sum(out.stats.num_accepted_tokens for out in outputs) > 0
        again = lm.generate(PROMPTS[1], max_new_tokens=count, sampling=SAMPLED)
        assert again.token_ids == sampled.token_ids
    assert tuple(hf_text(toy(family), PROMPTS[-1], count)) == expected[-1]


@pytest.mark.parametrize("family", CASES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(monkeypatch, family):
    """By chunks of prompt, and by ragged passes over a cache, tight at its end."""
    monkeypatch.setattr(PackedStack, "prefill_chunk", 16)
    stack, expected = stack_of(family), toy(family)(torch.tensor([TEXT])).logits[0]
    scale = expected.abs().max()
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    assert stack.windows == DecoderStack(toy(family)).windows
    cache = stack.new_cache(num_rows=3, num_slots=len(TEXT))
    close(stack.prefill(TEXT[:50], cache, 2) / scale, expected[49] / scale)
    whole = stack.all_exit_logits(TEXT, [NUM_LAYERS])[NUM_LAYERS]
    close(whole / scale, expected / scale)
    stack.prefill(TEXT[:9], cache, 0)
    segments = [Segment(0, 9, 3), Segment(2, 50, 7)]
    cache.keys[:, 1] = 1.0  # of a row that takes no part
    hidden = stack.embed([*TEXT[9:12], *TEXT[50:57]])
    hidden = stack.run_layers(hidden, range(2), cache, segments)
    logits = stack.logits(stack.run_layers(hidden, range(2, NUM_LAYERS), cache, segments))
    close(logits / scale, torch.cat([expected[9:12], expected[50:57]]) / scale)
    assert (cache.keys[:, 1] == 1.0).all()


class NoQuestions(TorchDispatchMode):
    """Raises where the host reads the device; an operation is a whole for it."""

    questions = frozenset({"item", "_local_scalar_dense", "is_nonzero", "nonzero"})

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.questions  # inference mode asks by "item"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", CASES)
@torch.inference_mode()
def test_rows_from_the_device_are_segments_from_the_host(family):
    """Without a question to the device; what a row that takes no part holds is left alone."""
    stack, starts, seqlen = stack_of(family), (5, -1, 12), 3
    ids = [random_ids(seqlen, seed) for seed in range(3)]
    caches = [stack.new_cache(num_rows=4, num_slots=128) for _ in range(2)]
    for cache in caches:
        for row in range(3):
            stack.prefill(PROMPTS[1][:12], cache, row)
    before = caches[0].keys[:, 1].clone()
    lengths = torch.tensor(starts, dtype=torch.int32)
    tokens = torch.tensor([*ids[0], *[-1] * seqlen, *ids[2]])
    with NoQuestions():
        hidden = stack.embed_ids(tokens)
        hidden = stack.run_rows(hidden, ALL_LAYERS, caches[0], lengths, seqlen, num_slots=16)
        chosen, likeliest = stack.choose(hidden)
    segments = [Segment(0, 5, seqlen), Segment(2, 12, seqlen)]
    want = stack.run_layers(stack.embed([*ids[0], *ids[2]]), ALL_LAYERS, caches[1], segments)
    got = hidden.view(3, seqlen, -1)[[0, 2]].flatten(0, 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[0].values, caches[1].values, atol=1e-4, rtol=1e-4)
    assert torch.equal(caches[0].keys[:, 1], before)
    logits = stack.logits(want)
    assert chosen.view(3, seqlen)[[0, 2]].flatten().tolist() == logits.argmax(-1).tolist()
    if stack.why_no_choice is None:
        top = likeliest.view(3, seqlen)[[0, 2]].flatten()
        torch.testing.assert_close(top, logits.softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)


def test_what_divides_its_logits_does_not_choose_on_the_device():
    reasons = {family: stack_of(family).why_no_choice for family in CASES}
    assert [family for family, reason in reasons.items() if reason is not None] == ["granite"]


@torch.inference_mode()
def test_a_choice_draws_as_a_sampler_does():
    stack = stack_of()
    hidden = stack.embed(random_ids(4))
    params = SamplingParams(temperature=0.8, seed=11)
    noise = Noise(
        torch.tensor([0.8, 0.8, 0.0, 0.8]),
        torch.tensor([11] * 4),
        torch.tensor([40, 41, 42, 43]),
    )
    sampler, logits = Sampler(params, 11, VOCAB_SIZE), stack.logits(hidden)
    expected = sampler.pick(logits, 40)
    expected[2] = int(logits[2].argmax())
    assert stack.choose(hidden, noise)[0].tolist() == expected
    ids = torch.arange(1, VOCAB_SIZE, 3, dtype=torch.int32)
    trimmed, _ = stack.choose(hidden, vocab_ids=ids)
    assert trimmed.tolist() == ids[logits[:, ids.long()].argmax(-1)].tolist()


def test_a_layer_is_seven_launches():
    launches = []
    launcher = types.SimpleNamespace(launch=lambda kernel, *_: launches.append(kernel))
    model = make_toy("llama", "bfloat16", head_dim=64)
    pack_model(model)
    stack = PackedStack(model, ops=KernelOps(launcher))
    cache, lengths = stack.new_cache(num_rows=2, num_slots=64), torch.zeros(2, dtype=torch.int32)
    hidden = stack.embed_ids(torch.zeros(6, dtype=torch.int64))
    stack.run_rows(hidden, [0], cache, lengths, 3)
    names = [name.partition("<")[0] for name in launches]
    attention = ["decode_attention", "combine_splits"]
    assert names == ["linear", "rope_append_kv", *attention, "linear", "swiglu", "linear"]


def test_decoding_on_a_gpu_calls_the_kernels_without_operators(monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "cuda_ops", lambda device: asked.append(device) or "kernels")
    gpu = torch.device("cuda", 1)
    assert packed.ops_on(gpu) == "kernels"
    assert packed.ops_on(torch.device("cpu")) is layerskip.ops
    assert asked == [gpu]


def test_a_stack_has_the_operations_of_its_device(monkeypatch):
    found = types.SimpleNamespace(device=None)

    def ops_on(device):
        found.device = device
        return found

    monkeypatch.setattr(packed, "ops_on", ops_on)
    stack = PackedStack(toy())
    assert stack.ops is stack._forward.ops is found
    assert found.device == torch.device("cpu")
    assert PackedStack(toy(), ops=layerskip.ops).ops is layerskip.ops


def unpacked(family):
    return make_toy(family, hidden_size=256, intermediate_size=512)


def bytes_of(model):
    """Of the storages behind all parameters, each once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in every(model)}
    return sum(storages.values())


def every(model):
    return [p.data for p in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_packing_keeps_one_copy_and_needs_room_for_one_group(family):
    model = unpacked(family)
    before, values = bytes_of(model), [p.clone() for p in every(model)]
    layer = model.model.layers[0]
    groups = [
        sum(m.weight.nbytes for m in group)
        for group in (
            (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            (layer.mlp.gate_proj, layer.mlp.up_proj),
        )
    ]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = copy.deepcopy(model)  # the profiler only knows of what it saw allocated
        with record_function("packing"):
            pack_model(model)
    events = recorded.profiler.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == "packing")
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    packing = [size for time, size in sorted(changes) if time >= began]
    held = list(itertools.accumulate(packing))
    assert sum(size for size in packing if size > 0) == NUM_LAYERS * sum(groups)
    assert max(groups) <= max(held) <= max(groups) + 64
    assert held[-1] == 0
    assert bytes_of(model) == before
    assert all(torch.equal(p, v) for p, v in zip(every(model), values, strict=True))
    stack = PackedStack(model)
    assert why_general(model, packed=True) is None
    own = {t.untyped_storage().data_ptr() for t in every(model)}
    for w in stack._forward.layers:
        used = (w.qkv, w.gate, w.up, w.out, w.down)
        assert {t.untyped_storage().data_ptr() for t in used} <= own


def test_new_values_of_a_model_s_weights_are_seen():
    model = copy.deepcopy(toy())
    pack_model(model)
    stack, cache = PackedStack(model), stack_of().new_cache(num_rows=1, num_slots=64)
    with torch.inference_mode():
        before = stack.prefill(PROMPTS[1], cache, 0)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    with torch.inference_mode():
        after, whole = stack.prefill(PROMPTS[1], cache, 0), model(torch.tensor([PROMPTS[1]]))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, whole.logits[0, -1], atol=1e-4, rtol=1e-4)


def hooked():
    model = copy.deepcopy(toy())
    model.model.norm.register_forward_hook(lambda *_: None)
    return model


def test_whose_bits_rows_keep_is_said_of_the_device_that_decodes():
    on_cpu, on_gpu = stack_of(), types.SimpleNamespace(device=torch.device("cuda"))
    assert on_cpu.exactness.reason.endswith("rows keep their bits as far as torch's products do")
    assert "by the construction of the kernels" in PackedStack._settle(on_gpu, True).reason


def test_weights_that_lie_elsewhere_are_refused():
    """Kernels know addresses: there, the old values would be read."""
    model = copy.deepcopy(toy()).half()
    pack_model(model)
    stack = PackedStack(model)
    stack.new_cache(num_rows=1, num_slots=8)
    model.double().half()  # as to another device and back
    with pytest.raises(ValueError, match="moved, cast or resized after it was wrapped; wrap it"):
        stack.new_cache(num_rows=1, num_slots=8)


@torch.inference_mode()
def test_a_model_that_is_moved_leaves_recorded_rounds_what_they_read():
    """Graphs know addresses: what lies there must not be given to anybody else."""
    with torch.inference_mode(mode=False):
        model = make_toy("llama", tie_word_embeddings=False)
        pack_model(model)
        stack = PackedStack(model)
    expected = stack.embed([1, 2, 3])
    refs = {n: StorageWeakRef(p.untyped_storage()) for n, p in model.named_parameters()}
    with torch.inference_mode(mode=False):
        model.double()
    gc.collect()
    assert [name for name, ref in refs.items() if ref.expired()] == []
    assert torch.equal(stack.embed([1, 2, 3]), expected)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def hooked_embedding():
    embedding = nn.Embedding(9, 4)
    embedding.register_forward_hook(lambda _, __, out: 2 * out)
    return embedding


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Embedding(9, 4, padding_idx=1),
        lambda: nn.Embedding(9, 4, max_norm=0.1),
        lambda: Doubled(9, 4),
        hooked_embedding,
    ],
)
@torch.no_grad()
def test_an_embedding_that_does_more_than_look_up_does_it(build):
    embedding, ids = build(), torch.tensor([1, 0, 8, 1])
    embed = _embedding_of(embedding)
    assert torch.equal(embed(ids), embedding(ids))
    embedding.weight.mul_(3)
    assert torch.equal(embed(ids), embedding(ids))


def test_a_guest_keeps_its_weights_and_the_general_stack():
    model = make_toy("llama")
    places = [p.data_ptr() for p in model.parameters()]
    reason = "its weights lie apart: only a model that from_pretrained loaded is packed"
    with pytest.raises(ValueError, match=f"packed is True, but {reason}; leave it out"):
        open_stack(model, packed=True)
    assert [p.data_ptr() for p in model.parameters()] == places
    stack, choice = open_stack(model)
    assert type(stack) is DecoderStack
    assert choice.startswith("general: on a CPU torch's own products are faster")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: make_toy("gemma"), "the operations know Llama, "),
        (lambda: make_toy("llama", hidden_act="gelu"), "or an activation that the operations lack"),
        (lambda: make_toy("llama", mlp_bias=True), "its gated product has a bias"),
        (hooked, "its head or the norm before it is not as transformers made it"),
        (lambda: "llama", "the operations know Llama, "),
    ],
)
def test_what_the_operations_cannot_run_is_named(build, reason):
    model = build()
    if not isinstance(model, str):
        pack_model(model)
    assert reason in why_general(model, packed=True)


def test_on_a_gpu_the_kernels_have_to_exist(monkeypatch):
    """Asked of a model that only says that it is on one."""
    model = copy.deepcopy(toy())
    pack_model(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    assert why_general(model) == "kernels exist for bfloat16 and float16, not for float32"
    assert why_general(model, packed=False) == "the packed stack was switched off (packed=False)"
    assert kernels_lack(torch.bfloat16, 16).startswith("kernels exist for heads of (64, 80, ")
    assert kernels_lack(torch.float16, 128) is None

    def fail(device):
        raise KernelBuildError(f"no kernels for {device}")

    monkeypatch.setattr(packed, "kernels_lack", lambda *_: None)
    monkeypatch.setattr("layerskip.ops.registry.cuda_ops", fail)
    assert why_general(model) == "no kernels for cuda:0"
    monkeypatch.setattr("layerskip.ops.registry.cuda_ops", lambda _: layerskip.ops)
    assert why_general(model) is None


def test_a_checkpoint_that_was_loaded_is_packed(tmp_path):
    make_toy("qwen3").save_pretrained(tmp_path)
    settings = {"exit_layer": 2, "num_draft_tokens": 3, "device": "cpu"}
    lm = SelfSpeculativeLM.from_pretrained(tmp_path, packed=True, **settings)
    assert lm.stack_choice == "packed: our kernels' definitions run every decode pass"
    general = SelfSpeculativeLM.from_pretrained(tmp_path, **settings)
    assert general.stack_choice.startswith("general: ")
    outputs = [m.generate(PROMPTS[1], max_new_tokens=8) for m in (lm, general)]
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize("num_draft_tokens", [0, 3, 4])
def test_a_draft_adds_no_keys_and_values_but_its_own_slots(num_draft_tokens):
    """One cache of prompt, output and drafted tokens, in whole blocks, from the first round on."""
    stack, plan, limit, prompt = stack_of(), PLANS["exit"], 20, PROMPTS[2]
    decoder = Decoder(stack, EarlyExitDrafter(stack, plan), plan)
    for seed in range(3):
        sampler = Sampler(SamplingParams(), seed, VOCAB_SIZE)
        decoder.join(RowSpec(tuple(prompt), sampler, limit, num_draft_tokens))
    assert decoder.cache.num_rows == 4  # doubled, for the third
    cache, slots = decoder.cache, len(prompt) + limit + num_draft_tokens + 1
    while any(row.finish_reason is None for row in decoder.rows.values()):
        decoder.step()
    assert decoder.cache is cache
    assert cache.num_slots - SLOT_BLOCK < slots <= cache.num_slots + 1
    assert cache.nbytes == 4 * cache.num_slots * stack.kv_bytes_per_token
    accepted = sum(r.num_accepted_tokens for row in decoder.rows.values() for r in row.rounds)
    assert (accepted > 0) == (num_draft_tokens > 0)
