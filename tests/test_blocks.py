"""Weights copied in the order that a processor's products read: the same decoding, only faster."""

import copy
import platform
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from toys import DTYPES, FAMILIES, SHAPES, make_model, random_ids
from transformers import PreTrainedModel

import layerskip.blocks as blocks_module
from layerskip.blocks import (
    Blocks,
    fewest_rows,
    memory_bytes,
    multiplied_in_place,
    read_in_place,
    why_not,
)
from layerskip.model import DecoderStack, pack_model

COPIED = "weights packed, and copied in blocks"
available = pytest.mark.skipif(
    why_not([torch.zeros(1, 1)]) is not None, reason="this torch has no blocked products"
)
dtypes = pytest.mark.parametrize(
    "dtype",
    [d for d, kind in DTYPES.items() if why_not([torch.zeros(1, 1, dtype=kind)]) is None],
)


def loaded(family: str = "llama", shape: str = "even", dtype: str = "float32") -> PreTrainedModel:
    """As ``from_pretrained`` leaves a model."""
    model = make_model(family, dtype, shape)
    pack_model(model)
    return model


def logits(stack: DecoderStack) -> torch.Tensor:
    ids = random_ids(9)
    with torch.inference_mode():
        return stack.prefill(ids, stack.new_cache(num_rows=1, num_slots=9), 0)


@available
@dtypes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_weights(family, shape, dtype):
    model = loaded(family, shape, dtype)
    copied = DecoderStack(model)
    with mock.patch("layerskip.dense.why_not", return_value="for once"):
        plain = DecoderStack(model)
    assert (copied.backend, plain.backend) == (
        f"dense layers by torch, {COPIED}",
        "dense layers by torch, weights packed",
    )
    got, want = logits(copied), logits(plain)
    rounding = 0.05 if dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(got, want, atol=rounding * float(want.abs().max()), rtol=0.0)
    assert want.abs().max() > 1.0


def in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[0, 0] += 50.0


def past_the_counter(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(-1.0)


def elsewhere(weight: torch.nn.Parameter) -> None:
    weight.data = -weight.data.clone()


def otherwise(weight: torch.nn.Parameter) -> None:
    weight.data = -weight.data.t().contiguous().t()


@available
@pytest.mark.parametrize("change", [in_place, past_the_counter, elsewhere, otherwise])
@pytest.mark.parametrize("name", ["q_proj", "up_proj", "down_proj", "lm_head"])
def test_a_prompt_sees_weights_that_have_changed(change: Callable, name: str):
    model = loaded()
    stack = DecoderStack(model)
    before = logits(stack)
    weight = next(p for n, p in model.named_parameters() if name in n)
    change(weight)
    after = logits(stack)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(DecoderStack(model)))
    assert stack._forward._blocks is None or not stack._forward._blocks.stale()


@pytest.mark.parametrize("move", [elsewhere, otherwise])
@pytest.mark.parametrize("name", ["up_proj", "v_proj"])
def test_a_prompt_sees_packed_weights_that_moved_without_copies(move: Callable, name: str):
    """Side by side when the model was wrapped: a view over where they were shows old values."""
    model = make_model().half()
    pack_model(model)
    stack = DecoderStack(model)
    assert stack.backend == "dense layers by torch, weights packed"
    before = logits(stack)
    move(next(p for n, p in model.named_parameters() if name in n))
    after = logits(stack)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(DecoderStack(model)))


@available
def test_what_was_proven_of_copies_is_forgotten_with_them():
    stack = DecoderStack(loaded())
    with torch.inference_mode():
        assert stack.pass_sizes.largest(16) == 16
    proofs = stack.pass_sizes.num_proofs
    otherwise(stack.twin.model.layers[0].mlp.up_proj.weight)
    logits(stack)
    assert stack.backend == "dense layers by torch, weights packed"
    with torch.inference_mode():
        assert stack.pass_sizes.largest(16) == 16
    assert stack.pass_sizes.num_proofs > proofs


@available
def test_weights_that_stay_are_copied_once(monkeypatch):
    stack = DecoderStack(loaded())
    monkeypatch.setattr(Blocks, "__init__", lambda *_: pytest.fail("copied again"))
    assert torch.equal(logits(stack), logits(stack))


@available
def test_all_who_decode_with_a_model_share_the_copies(tmp_path):
    model = loaded()
    first, second = DecoderStack(model), DecoderStack(model)
    assert first._forward._blocks is second._forward._blocks is not None
    before = logits(first)
    in_place(model.lm_head.weight)
    after = logits(first)
    assert not torch.equal(after, before)
    assert torch.equal(logits(second), after)
    assert first._forward._blocks is second._forward._blocks
    twin = copy.deepcopy(model)
    past_the_counter(twin.lm_head.weight)
    assert not torch.equal(logits(DecoderStack(twin)), after)
    assert torch.equal(logits(second), after)
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(DecoderStack(read)), after)


def test_what_gets_no_copies(monkeypatch):
    assert "bfloat16 and float32" in str(why_not([torch.zeros(4, 4, dtype=torch.float16)]))
    held = DecoderStack(make_model("llama", "bfloat16"))  # its owner may do what he likes with it
    assert held.backend == "dense layers by torch, weights where they lie"
    assert memory_bytes() > 2**28
    monkeypatch.setattr(blocks_module, "memory_bytes", lambda: 200_000)
    weights = [torch.zeros(50, 50)] * 3
    if why_not(weights[:2]) is None:
        assert "an eighth of the machine's memory" in str(why_not(weights))


IN_PLACE = "dense layers by torch, weights where they lie, multiplied by oneDNN"


@pytest.fixture
def in_place_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose float32 products are oneDNN's of weights where they lie."""
    monkeypatch.setattr("layerskip.dense.read_in_place", read_in_place)
    monkeypatch.setattr(blocks_module, "LARGE", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(blocks_module, "by_amd", lambda: True)


@available
@pytest.mark.usefixtures("in_place_here")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_place_are_those_of_torch(family, shape):
    model = make_model(family, "float32", shape)
    held, free = DecoderStack(model), DecoderStack(model, exact=False)
    assert held.backend == IN_PLACE
    assert free.backend == "dense layers by torch, weights where they lie"  # a row alone is faster
    got, want = logits(held), logits(free)
    torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=0.0)


@available
@pytest.mark.usefixtures("in_place_here")
@pytest.mark.parametrize("change", [in_place, past_the_counter])
def test_a_prompt_sees_weights_in_place_that_have_changed(change: Callable):
    model = make_model()
    stack = DecoderStack(model)
    before = logits(stack)
    change(model.model.layers[1].mlp.up_proj.weight)
    change(model.lm_head.weight)
    after = logits(stack)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(DecoderStack(model)))


@available
@pytest.mark.usefixtures("in_place_here")
def test_chunks_of_a_prompt_are_left_to_torch(monkeypatch):
    rows = []
    multiplied = blocks_module.multiplied
    monkeypatch.setattr(
        blocks_module, "multiplied", lambda x, *rest: rows.append(len(x)) or multiplied(x, *rest)
    )
    stack = DecoderStack(make_model())
    for length, met in ((65, {2}), (64, {2, 64})):  # 2: the head of the last position
        rows.clear()
        with torch.inference_mode():
            stack.prefill(random_ids(length), stack.new_cache(num_rows=1, num_slots=length), 0)
        assert set(rows) == met


@available
def test_a_row_alone_is_multiplied_beside_itself(monkeypatch):
    rows = []
    multiplied = blocks_module.multiplied
    monkeypatch.setattr(
        blocks_module, "multiplied", lambda x, *rest: rows.append(len(x)) or multiplied(x, *rest)
    )
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(3, 24)
    alone = [multiplied_in_place(row, weight, bias) for row in x.split(1)]
    whole = multiplied_in_place(x, weight, bias)
    assert rows == [2, 2, 2, 3]  # a single one has a kernel of its own
    torch.testing.assert_close(torch.cat(alone), whole)
    assert [len(row) for row in alone] == [1, 1, 1]
    torch.testing.assert_close(whole, x @ weight.t() + bias, atol=1e-4, rtol=0.0)


@available
@pytest.mark.usefixtures("in_place_here")
def test_which_weights_are_read_in_place(monkeypatch):
    weight = torch.zeros(4, 3)
    assert read_in_place([weight, weight])
    assert not read_in_place([weight, torch.zeros(3, 4).t()])
    assert not read_in_place([weight.bfloat16()])
    assert not read_in_place([weight.to("meta")])
    assert DecoderStack(loaded()).backend == f"dense layers by torch, {COPIED}"
    for ours, capability, known in (
        (True, "AVX512", True),
        (True, "DEFAULT", False),
        (False, "AVX512", False),  # nobody has measured it
        (False, "AVX2", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
            patch.setattr(blocks_module, "by_amd", lambda ours=ours: ours)
            assert read_in_place([weight]) == known
    monkeypatch.setattr(blocks_module, "LARGE", 12)
    small = torch.zeros(4, 2)
    assert read_in_place([weight, weight, small])  # 24 of 32 elements
    assert not read_in_place([weight, small])


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="torch has oneDNN's products on these processors",
)
def test_a_usual_processor_has_such_products():
    """Or the tests above would all be left out, and nobody would see it."""
    assert why_not([torch.zeros(4, 4)]) is None


def test_a_container_has_the_memory_that_it_may_use(monkeypatch, tmp_path):
    limits = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    monkeypatch.setattr(blocks_module, "LIMITS", limits)
    whole = memory_bytes()
    limits[0].write_text("max\n", encoding="utf-8")
    assert memory_bytes() == whole
    limits[1].write_text("1048576\n", encoding="utf-8")
    assert memory_bytes() == 2**20


@pytest.mark.parametrize("name", ["_is_mkldnn_bf16_supported", "_reorder_linear_weight"])
def test_a_torch_without_such_products_makes_no_copies(monkeypatch, name):
    def lacks(*_: object) -> bool:
        raise RuntimeError("bf16 path needs the cpu support avx512")

    monkeypatch.setattr(blocks_module, "works", blocks_module.works.__wrapped__)
    monkeypatch.setattr(torch.ops.mkldnn, name, lacks)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert why_not([weight]) == "this processor or this torch has no such products"
    assert not blocks_module.works(torch.complex64)


def test_the_fewest_rows_of_a_pass(monkeypatch):
    monkeypatch.setattr(blocks_module, "works", lambda dtype: dtype == torch.bfloat16)
    kinds = [(False, False), (False, True), (True, False)]
    for capability, copied in (("AVX2", 1), ("AVX512", 4)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        for dtype, plain in ((torch.float32, 0), (torch.bfloat16, 2)):
            got = [fewest_rows(dtype, copied=c, in_place=i) for c, i in kinds]
            assert got == [plain, 1, copied]
