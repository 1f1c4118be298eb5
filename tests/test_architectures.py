"""Every family that is let in, against transformers; every other kind, refused and left alone.

The README's table is what these tests find. ``make table`` writes it again.
"""

import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from snapshots import hf_text
from toys import DTYPES, random_ids
from transformers import PreTrainedModel
from zoo import NUM_LAYERS, SHAPE, VARIANTS, WINDOW, ZOO, make_config, make_toy

from layerskip import DraftPlan, SamplingParams, SelfSpeculativeLM, UnsupportedModelError
from layerskip import model as model_module
from layerskip.cache import Segment
from layerskip.families import FAMILIES, unsuitable
from layerskip.model import DecoderStack

PROMPTS = [random_ids(n) for n in (2, 21, 40, 58)]
TEXT = random_ids(70)  # longer than a sliding window, nearly as long as a table of positions
COUNT = 6
PLANS = {
    "exit": DraftPlan.exiting(num_layers=NUM_LAYERS, exit_layer=3),
    "skipping": DraftPlan.skipping(num_layers=NUM_LAYERS, skipped=[3]),
    "without-layer-0": DraftPlan(NUM_LAYERS, (1, 2)),
}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- architectures:begin -->\n", "<!-- architectures:end -->"


@functools.cache
def toy(family: str, dtype: str) -> PreTrainedModel:
    """A model that no test may change."""
    return make_toy(family, dtype)


@functools.cache
def wrap(family: str, dtype: str, plan: str) -> SelfSpeculativeLM:
    return SelfSpeculativeLM(toy(family, dtype), None, PLANS[plan], num_draft_tokens=4)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text])
    return model(ids, attention_mask=torch.ones_like(ids)).logits[0].float()


def tokens(outputs: list) -> list[list[int]]:
    return [list(out.token_ids) for out in outputs]


def places(model: PreTrainedModel) -> list:
    """Where a model's tensors lie, which modules and settings it has."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = [(id(m), type(m), sorted(vars(m))) for m in model.modules()]
    settings = [model.config.to_dict(), model.config._attn_implementation]
    return [[(n, id(t), t.data_ptr(), t._version) for n, t in tensors], modules, settings]


def test_the_table_and_the_zoo_hold_the_same_families():
    assert list(FAMILIES) == list(ZOO)
    assert len(FAMILIES) >= 24


@pytest.mark.parametrize("family", ZOO)
@pytest.mark.one_in(2)
def test_greedy_tokens_are_those_of_generate(family):
    """In fp32, from a ragged batch and alone; and the model is as it was."""
    model = toy(family, "float32")
    expected, before = hf_text(model, PROMPTS[-1], COUNT), places(model)
    lm = wrap(family, "float32", "exit")
    outputs = lm.generate(PROMPTS, max_new_tokens=COUNT, num_draft_tokens=3)
    assert list(outputs[-1].token_ids) == expected
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        logits = reference_logits(model, [*prompt, *out.token_ids])
        assert list(out.token_ids) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    alone = lm.generate(PROMPTS[1], max_new_tokens=COUNT, num_draft_tokens=2)
    assert alone.token_ids == outputs[1].token_ids
    assert places(model) == before
    assert hf_text(model, PROMPTS[-1], COUNT) == expected
    places_of_twin = {t.data_ptr() for t in lm.stack.twin.parameters()}
    assert places_of_twin == {t.data_ptr() for t in model.parameters()}


@pytest.mark.parametrize("family", [*ZOO, *VARIANTS])
def test_logits_are_those_of_the_model(family):
    """Teacher-forced, by chunks of prompt and by passes over a cache."""
    name, changes = VARIANTS.get(family, (family, {}))
    model = make_toy(name, **changes) if changes else toy(name, "float32")
    stack = DecoderStack(model) if changes else wrap(name, "float32", "exit").stack
    expected = reference_logits(model, TEXT)
    cache = stack.new_cache(num_rows=2, num_slots=len(TEXT))
    with torch.inference_mode():
        whole = stack.all_exit_logits(TEXT, [NUM_LAYERS])[NUM_LAYERS]
        last = stack.prefill(TEXT[:50], cache, 1)
        hidden = stack.run_layers(
            stack.embed(TEXT[50:58]), range(2), cache, [segment := Segment(1, 50, 8)]
        )
        hidden = stack.run_layers(hidden, range(2, NUM_LAYERS), cache, [segment])
        passed = stack.logits(hidden)[:8].float()
    scale = expected.abs().max()
    torch.testing.assert_close(whole / scale, expected / scale, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last / scale, expected[49] / scale, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(passed / scale, expected[50:58] / scale, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ZOO)
@pytest.mark.one_in(2, others=1)
def test_bf16_text_does_not_depend_on_drafts_and_rows(family):
    """Drafted in a ragged batch, against plain and alone; every second row is sampled."""
    lm = wrap(family, "bfloat16", "skipping")
    prompts, samplings = PROMPTS[:3:2], (SAMPLED, SamplingParams())
    batch = lm.open_batch(max_new_tokens=COUNT)
    for prompt, sampling in zip(prompts, samplings, strict=True):
        batch.add(prompt, sampling=sampling, num_draft_tokens=3)
    while batch.unfinished:
        batch.step()
    for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        settings = {"max_new_tokens": COUNT, "sampling": sampling, "num_draft_tokens": 0}
        assert batch.remove(row).token_ids == lm.generate(prompt, **settings).token_ids


# In fp32 an expert that multiplied only the rows that ask for it would change their bits.
BITS = dict.fromkeys(ZOO, "bfloat16").items() | {
    (family, "float32") for family in ZOO if "expert" in FAMILIES[family]
}


@pytest.mark.parametrize(("family", "dtype"), sorted(BITS))
def test_rows_keep_their_bits(family, dtype):
    """All layers and the head on another text than the probe's: eight tokens, and each alone."""
    stack = wrap(family, dtype, "exit" if dtype == "float32" else "skipping").stack
    assert stack.exactness.holds
    together, apart = (stack.new_cache(num_rows=1, num_slots=60) for _ in range(2))
    ids = random_ids(8, seed=5)
    with torch.inference_mode():
        for cache in (together, apart):
            stack.prefill(PROMPTS[2], cache, 0)
        got = run(stack, ids, together, 40)
        for i, token in enumerate(ids):
            alone = run(stack, [token], apart, 40 + i)
            assert torch.equal(got[0][i], alone[0][0]), f"hidden state {i}"
            assert torch.equal(got[1][i], alone[1][0]), f"logits {i}"
    assert torch.equal(together.keys, apart.keys)
    assert torch.equal(together.values, apart.values)


def run(stack: DecoderStack, ids: list[int], cache, start: int) -> tuple:
    segments = [Segment(0, start, len(ids))]
    hidden = stack.run_layers(stack.embed(ids), range(NUM_LAYERS), cache, segments)
    return hidden, stack.logits(hidden)


def test_drafts_are_right_now_and_then():
    """A draft that is never right, or always, tests half of the loop."""
    rates = []
    for family in ("gpt2", "bloom", "gemma2", "mixtral", "gpt_oss"):
        lm = wrap(family, "bfloat16", "skipping")
        stats = lm.generate(PROMPTS[3], max_new_tokens=12, num_draft_tokens=2).stats
        rates.append(stats.acceptance_rate)
    assert 0.2 < sum(rates) / len(rates) < 1


EFFECTS = [
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("mistral", {"sliding_window": None}),
    ("cohere2", {"layer_types": ["full_attention"] * NUM_LAYERS}),
    ("falcon", {"alibi": False}),
    ("granite", {"logits_scaling": 1.0}),
    ("ministral3", {"rope_parameters": None}),
    ("smollm3", {"no_rope_layers": [1] * NUM_LAYERS}),
]


@pytest.mark.parametrize(("family", "change"), EFFECTS)
def test_what_is_special_shows_in_the_toy(family, change):
    expected = reference_logits(toy(family, "float32"), TEXT)
    other = reference_logits(make_toy(family, **change), TEXT)
    assert (other - expected).abs().max() > 1e-2 * expected.abs().max()


def test_sinks_show_in_the_toy():
    model = make_toy("gpt_oss")
    expected = reference_logits(model, TEXT)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    other = reference_logits(model, TEXT)
    assert (other - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "granite_swa", "olmo3"])
def test_windows_are_those_of_the_masks(family):
    windows = wrap(family, "float32", "exit").stack.windows
    assert set(windows) == {WINDOW, None}
    assert windows[0] == WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ZOO)
def test_every_plan_with_every_family(family, plan, dtype):
    lm = wrap(family, dtype, plan)
    for sampling in (SamplingParams(), SAMPLED):
        settings = {"max_new_tokens": 12, "sampling": sampling}
        plain = tokens([lm.generate(p, num_draft_tokens=0, **settings) for p in PROMPTS])
        if dtype == "float32" and sampling is not SAMPLED:
            assert plain == [hf_text(toy(family, dtype), p, 12) for p in PROMPTS]
        for k in (1, 3, 6):
            assert tokens(lm.generate(PROMPTS, num_draft_tokens=k, **settings)) == plain
            alone = [lm.generate(p, num_draft_tokens=k, **settings) for p in PROMPTS]
            assert tokens(alone) == plain


# Models that are refused: how to build one, and why.
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 5,
    "head_dim": 8,
}
LINEAR = {
    "num_experts": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SMALL_T5 = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
SMALL_BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 32,
    "encoder_layers": 2,
    "encoder_ffn_dim": 32,
}
VISION = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [1.0] * 8,
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 36,
}
STATE = "layers with a recurrent state cannot take back a rejected draft"
LATENTS = "multi-latent attention keeps latents in the cache, not keys and values"
ENCODER = "it is an encoder-decoder, and only decoders are driven"
REFUSED: dict[str, tuple[str, dict, str]] = {
    "mamba": ("mamba", {"state_size": 8}, STATE),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, STATE),
    "qwen3_next": ("qwen3_next", LINEAR, STATE),
    "t5": ("t5", {**SMALL_T5, "decoder_start_token_id": 0}, ENCODER),
    "bart": ("bart", {**SMALL_BART, "decoder_start_token_id": 0}, ENCODER),
    "deepseek_v3": ("deepseek_v3", LATENT, LATENTS),
    "qwen2_vl": (
        "qwen2_vl",
        {"text_config": SHAPE | {"rope_parameters": MROPE}, "vision_config": VISION},
        "it reads more than text; load its language model by itself",
    ),
    "diffllama": (
        "diffllama",
        {},
        "its attention reads the values of other heads after they are cached",
    ),
    "xglm": (
        "xglm",
        {"ffn_dim": 64},
        "it is not among the tested families, which the README lists",
    ),
    "gpt2 with cross-attention": (
        "gpt2",
        {"add_cross_attention": True},
        "it attends to an encoder",
    ),
    "phi3 with longrope": (
        "phi3",
        {"rope_parameters": LONGROPE},
        "rope type 'longrope' changes with the length of the text",
    ),
}


@pytest.mark.parametrize("packed", [False, True])
def test_positions_that_yarn_adds_are_decoded_in(packed):
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0}
    rope["original_max_position_embeddings"] = 32
    model = make_toy("qwen3", rope_parameters=rope, max_position_embeddings=32)
    prompt = random_ids(40)
    expected = hf_text(model, prompt, 64 - len(prompt))
    model_module.pack_model(model)
    lm = SelfSpeculativeLM(model, None, PLANS["exit"], num_draft_tokens=3, packed=packed)
    out = lm.generate(prompt, max_new_tokens=60)
    assert (len(out.token_ids), out.finish_reason) == (64 - len(prompt), "length")
    assert list(out.token_ids) == expected


def make_refused(name: str) -> PreTrainedModel:
    family, changes, _ = REFUSED[name]
    config = make_config(family, **changes)
    torch.manual_seed(0)
    for auto in (
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
    ):
        if type(config) in auto._model_mapping:
            return auto.from_config(config).eval()
    raise AssertionError(f"no class for {name}")


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_before_anything_is_touched(monkeypatch, name):
    monkeypatch.setattr(model_module, "share_twin", lambda _: pytest.fail("a twin was built"))
    model, reason = make_refused(name), REFUSED[name][-1]
    text, before = whole_text(model), places(model)
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        SelfSpeculativeLM(model)
    assert places(model) == before
    assert whole_text(model) == text


def whole_text(model: PreTrainedModel) -> list[int]:
    """With its beginning: some have a decoder apart, which does not repeat the prompt."""
    ids = torch.tensor([PROMPTS[1]])
    everything = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=6, do_sample=False, **everything)[0].tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": None}, "not among the tested families"),
        ({"is_causal": False}, "looks ahead"),
        ({"use_bidirectional_attention": True}, "looks ahead"),
        ({"layer_types": ["chunked_attention"]}, "layers of the type chunked_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
    ],
)
def test_settings_that_change_a_family_are_seen(changes, reason):
    config = make_config("llama")
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    assert reason in unsuitable(config)


def table() -> str:
    """The README's lists: what the tests above prove, and how rows keep their bits in bf16, on a
    processor that has it."""
    supported: dict[str, list[str]] = {}
    for family in FAMILIES:
        with mock.patch("layerskip.exactness.emulates", return_value=False):
            stack = wrap(family, "bfloat16", "skipping").stack
        bits = "" if stack.exactness.holds else "token by token: "
        supported.setdefault(bits + why(stack), []).append(f"`{family}`")
    refused: dict[str, list[str]] = {}
    for name, (_, _, reason) in REFUSED.items():
        refused.setdefault(reason, []).append(name)
    lists = ("Supported, with the same bits in bf16 by", supported), ("Refused, because", refused)
    return "\n".join(line for title, groups in lists for line in listed(title, groups))


def listed(title: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """A Markdown list of names under what they have in common."""
    lines = [title, ""]
    for common, names in groups.items():
        item = f"- *{common}*: {', '.join(names)}"
        lines += textwrap.wrap(
            item, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return [*lines, ""]


def why(stack: DecoderStack) -> str:
    """What it is that keeps the bits of a row."""
    if not stack.exactness.holds:
        return "rows influence each other"
    if stack.one_row:
        return "padded rows; one sequence a pass, attention is the model's own code"
    if any("expert" in name for name, _ in stack.twin.named_modules()):
        return "padded rows; an expert multiplies all of them"
    return "padded rows"


def test_the_readme_has_the_table():
    text = README.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), "run `make table`"


def test_passes_are_measured_where_embeddings_are_narrower_than_layers():
    model = make_toy("opt")
    lm = SelfSpeculativeLM(model, None, PLANS["exit"])
    out = lm.generate(PROMPTS[0], max_new_tokens=COUNT)  # drafts "auto"
    assert list(out.token_ids) == hf_text(model, PROMPTS[0], COUNT)


@pytest.mark.slow
def test_a_slow_case_is_slow_where_its_id_is_given():
    """Whether a case runs every time hangs on its place among all cases of its test."""
    slow = f"{__file__}::test_greedy_tokens_are_those_of_generate[{list(ZOO)[1]}]"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "slow", slow]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=README.parent, check=False)
    assert "1 test collected" in ran.stdout, ran.stdout


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:start] + table() + text[end:], encoding="utf-8")
