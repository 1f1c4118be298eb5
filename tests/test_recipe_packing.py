"""Packed rows: nothing learned is lost, documents do not meet, and steps depend on nothing else."""

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from recipe_modules import imported
from torch import nn
from toys import VOCAB_SIZE, make_model, random_ids

PAD = 1
FIELDS = ("ids", "labels", "positions", "documents")


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(["tokens", "packing"]) as modules:
        yield modules


def samples_of(recipes: SimpleNamespace, lengths: Sequence[tuple[int, int]]) -> list[Any]:
    """Samples of (tokens, prompt tokens); no id comes twice."""
    ids = iter(range(1000, 10**6))
    return [
        recipes.tokens.Sample(tuple(next(ids) for _ in range(n)), min(prompt, n))
        for n, prompt in lengths
    ]


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 45)), min_size=1, max_size=30)


@given(lengths=LENGTHS, seq_len=st.integers(2, 24))
@limits(max_examples=25, deadline=None)
def test_each_token_is_learned_once_after_the_one_before_it(
    recipes: SimpleNamespace, lengths: list[tuple[int, int]], seq_len: int
) -> None:
    samples = samples_of(recipes, [*lengths, (3, 0)])
    packed = recipes.packing.pack(samples, seq_len, pad_id=PAD)
    assert all(getattr(packed, name).shape == (packed.num_rows, seq_len) for name in FIELDS)
    pairs = Counter(
        (a, b)
        for a, b in zip(
            packed.ids.flatten().tolist(), packed.labels.flatten().tolist(), strict=True
        )
        if b != -100
    )
    wanted = Counter(
        (s.ids[i], s.ids[i + 1])
        for s in samples
        for i in range(len(s.ids) - 1)
        if i + 1 >= s.num_prompt_tokens
    )
    assert pairs == wanted
    assert (packed.labels != -100).any(1).all()


@given(lengths=LENGTHS, seq_len=st.integers(2, 24))
@limits(max_examples=25, deadline=None)
def test_positions_begin_again_with_each_document(
    recipes: SimpleNamespace, lengths: list[tuple[int, int]], seq_len: int
) -> None:
    samples = samples_of(recipes, [*lengths, (3, 0)])
    packed = recipes.packing.pack(samples, seq_len, pad_id=PAD)
    owner = {token: i for i, s in enumerate(samples) for token in s.ids}
    for ids, positions, documents in zip(
        packed.ids.tolist(), packed.positions.tolist(), packed.documents.tolist(), strict=True
    ):
        assert [documents[0], positions[0]] == [0, 0]
        for i in range(1, seq_len):
            same = documents[i] == documents[i - 1]
            assert same or documents[i] == documents[i - 1] + 1
            assert positions[i] == (positions[i - 1] + 1 if same else 0)
            assert not same or owner.get(ids[i]) == owner.get(ids[i - 1])


def test_what_fits_is_not_cut_and_little_is_padded(recipes: SimpleNamespace) -> None:
    lengths = [5, 11, 16, 2, 14, 3, 7, 6]  # 64 tokens: four rows of 16
    packed = recipes.packing.pack(samples_of(recipes, [(n, 0) for n in lengths]), 16, pad_id=PAD)
    assert packed.num_rows == 4
    assert not (packed.ids == PAD).any()
    longer = recipes.packing.pack(samples_of(recipes, [(40, 0)]), 16, pad_id=PAD)
    assert [int((row == PAD).sum()) for row in longer.ids] == [0, 0, 8]
    assert longer.labels[0, -1] == longer.ids[1, 0]


def test_prompts_alone_are_refused(recipes: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="there is nothing to learn"):
        recipes.packing.pack(samples_of(recipes, [(4, 4), (1, 0)]), 16, pad_id=PAD)


@pytest.fixture(scope="module")
def packed(recipes: SimpleNamespace) -> Any:
    lengths = [(3 + i * 7 % 13, i % 3) for i in range(40)]
    return recipes.packing.pack(samples_of(recipes, lengths), 16, pad_id=PAD)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(
    recipes: SimpleNamespace, packed: Any
) -> None:
    batches = recipes.packing.Batches(packed, batch_size=4, seed=3)
    steps = [batches.at(step) for step in range(packed.num_rows)]  # four epochs
    rows = [tuple(row.tolist()) for step in steps for batch in step.batches for row in batch.ids]
    count = packed.num_rows
    epochs = [rows[i : i + count] for i in range(0, 4 * count, count)]
    everything = sorted(tuple(row.tolist()) for row in packed.ids)
    assert [sorted(epoch) for epoch in epochs] == [everything] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = recipes.packing.Batches(packed, batch_size=4, seed=4).at(0).batches[0].ids
    assert not torch.equal(other, steps[0].batches[0].ids)


def test_a_step_depends_on_its_number_alone(recipes: SimpleNamespace, packed: Any) -> None:
    first, second = (recipes.packing.Batches(packed, 6, seed=1) for _ in range(2))
    once = {step: first.at(step).batches[0].ids for step in (0, 1, 2, 30)}
    for step in (30, 2, 0, 1):
        assert torch.equal(second.at(step).batches[0].ids, once[step])


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 4), (2, 2), (4, 1), (2, 4)])
def test_processes_and_micro_batches_divide_one_step(
    recipes: SimpleNamespace, packed: Any, processes: int, accumulation: int
) -> None:
    (whole,) = recipes.packing.Batches(packed, 8, seed=5).at(7).batches
    parts = []
    for index in range(processes):
        of = recipes.packing.Batches(packed, 8, accumulation, 5, processes, index).at(7)
        assert len(of.batches) == accumulation
        assert of.num_labels == whole.num_labels == int((whole.labels != -100).sum())
        parts += of.batches
    for name in ("ids", "labels", "positions"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    # Documents are numbered on from one to the next: whatever is drawn for each stays the same.
    numbered = torch.cat([p.documents + p.first_document for p in parts])
    assert torch.equal(numbered, whole.documents)
    assert whole.first_document == 0
    assert sum(p.num_documents for p in parts) == whole.num_documents == whole.documents.max() + 1
    assert all(p.documents.min() == 0 for p in parts)
    assert sum(p.num_labels for p in parts) == whole.num_labels
    assert whole.documents.unique().tolist() == list(range(whole.num_documents))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 6, "gradient_accumulation": 2, "num_processes": 2}, "multiple of 4"),
        ({"batch_size": 0}, "batch_size .0. must"),
        ({"batch_size": 2, "num_processes": 2, "process_index": 2}, "process_index must be 0 to 1"),
    ],
)
def test_a_step_that_does_not_divide_is_refused(
    recipes: SimpleNamespace, packed: Any, options: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        recipes.packing.Batches(packed, **options)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_packed_documents_are_what_they_are_alone(recipes: SimpleNamespace, family: str) -> None:
    model = make_model(family)  # Mistral's window is 40
    texts = [random_ids(n, seed=n) for n in (50, 9, 1, 30)]
    samples = [recipes.tokens.Sample(tuple(ids)) for ids in [*texts, [5, 6]]]
    packed = recipes.packing.pack(samples, 100, pad_id=PAD)
    batch = recipes.packing.Batches(packed, packed.num_rows).at(0).batches[0].to("cpu")
    logits = model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits
    for row in range(packed.num_rows):
        for document in batch.documents[row].unique():
            inside = batch.documents[row] == document
            alone = model(batch.ids[row, inside][None]).logits[0]
            torch.testing.assert_close(logits[row, inside], alone, rtol=1e-4, atol=1e-3)


def test_a_model_that_mixes_documents_is_refused(recipes: SimpleNamespace) -> None:
    class WithCache(nn.Module):
        """Restarting positions are overlooked where there is a cache."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=True)

    model = make_model()
    recipes.packing.check_apart(model, VOCAB_SIZE)
    mixing = WithCache(model).train()
    with pytest.raises(ValueError, match="lets documents of a packed row see each other"):
        recipes.packing.check_apart(mixing, VOCAB_SIZE)
    assert mixing.training


def test_the_mask_is_causal_within_documents(recipes: SimpleNamespace) -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2], [0, 1, 1, 1, 1]])
    mask = recipes.packing.document_mask(documents)
    assert mask.shape == (2, 1, 5, 5)
    for row in range(2):
        for i in range(5):
            for j in range(5):
                seen = j <= i and documents[row, i] == documents[row, j]
                assert mask[row, 0, i, j] == seen


def test_a_batch_moves_whole(recipes: SimpleNamespace, packed: Any) -> None:
    (batch,) = recipes.packing.Batches(packed, 2).at(0).batches
    moved = batch.to("meta")
    assert all(getattr(moved, name).device.type == "meta" for name in FIELDS)
    assert moved.num_labels == batch.num_labels
