"""Rows of text for the recipes: read, tokenized, divided, and what is wrong with them."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipe_modules import imported
from toys import make_tokenizer

TEXTS = [{"text": f"row {i} says {i * i}"} for i in range(60)]
QUESTION = {"question": "How many?", "answer": "3 + 4 = 7"}
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "uno"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "dos"},
]
TELLING = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)
ENDING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = (  # past answers are rendered otherwise than the last one
    "{% for m in messages %}{{ m['role'] }}: {% if loop.last and m['role'] == 'assistant' %}!"
    "{% endif %}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = (  # what asks for an answer opens a thought, and past answers have none
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
SILENT = "{% for m in messages %}{{ m['content'] | upper }} {{ messages | length }}\n{% endfor %}"
REFUSING = "{{ raise_exception('no system message, please') }}"


@pytest.fixture(scope="module")
def recipes() -> Iterator[SimpleNamespace]:
    with imported(["rows", "tokens", "data"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def encoded(recipes: SimpleNamespace, tokenizer: Any, row: Any, **options: Any) -> Any:
    return recipes.tokens.encode(recipes.rows._row(row, "some", 1), tokenizer, **options)


def texts(tokenizer: Any, samples: Sequence[Any]) -> list[str]:
    return [tokenizer.decode(s.ids, skip_special_tokens=True) for s in samples]


def learned(tokenizer: Any, sample: Any) -> list[str]:
    """The spans that are learned."""
    spans: list[list[int]] = [[]]
    for label in sample.labels:
        if label == -100:
            spans.append([])
        else:
            spans[-1].append(label)
    return [tokenizer.decode(span) for span in spans if span]


@pytest.mark.parametrize(
    ("row", "prompt", "follows"),
    [
        ({"text": "plain text"}, "", "plain text"),
        ({"messages": None, "text": "plain text"}, "", "plain text"),
        ({"prompt": "def f():", "completion": " return 1"}, "def f():", " return 1"),
        ({"prompt": "a", "canonical_solution": " b"}, "a", " b"),
        (QUESTION, "Question: How many?\nAnswer:", " 3 + 4 = 7"),
        ({"messages": CHAT[1:3]}, "user: one\nassistant: ", "uno\n"),
        ({"prompt": "", "completion": "all of it"}, "", "all of it"),
        # "et" is one token: it reaches into the prompt, and has to be predicted
        ({"prompt": "e", "completion": "te"}, "", "ete"),
    ],
)
def test_only_what_follows_a_prompt_is_learned(
    recipes: SimpleNamespace, tokenizer: Any, row: Any, prompt: str, follows: str
) -> None:
    sample = encoded(recipes, tokenizer, row)
    assert tokenizer.decode(sample.ids[: sample.num_prompt_tokens]) == prompt
    assert learned(tokenizer, sample) == [follows + "</s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ["uno\n", "dos\n</s>"]),
        (ENDING, ["uno</s>\n", "dos</s>\n"]),
        (TELLING, ["uno", "dos</s>"]),
        (FORGETFUL, ["!dos\n</s>"]),
        (THINKING, ["uno</s>\n", "dos</s>\n"]),
    ],
)
def test_of_a_chat_the_assistants_turns_are_learned(
    recipes: SimpleNamespace, template: str | None, expected: list[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    sample = encoded(recipes, tokenizer, {"messages": CHAT})
    assert learned(tokenizer, sample) == expected
    assert sample.num_prompt_tokens == sample.labels.index(
        next(label for label in sample.labels if label != -100)
    )


@pytest.mark.parametrize("answer", ["<table>", "<thinking>", "< 3", "a"])
def test_an_answer_that_begins_as_a_thought_would_is_learned_whole(
    recipes: SimpleNamespace, answer: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    chat = [*CHAT[:2], {"role": "assistant", "content": answer}]
    sample = encoded(recipes, tokenizer, {"messages": chat})
    (found,) = learned(tokenizer, sample)
    assert found.lstrip(" ") == answer + "</s>\n"  # a token may begin before the answer does


def test_a_chat_whose_turns_cannot_be_told_apart_is_learned_whole(
    recipes: SimpleNamespace,
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SILENT
    sample = encoded(recipes, tokenizer, {"messages": CHAT[1:3]})
    assert learned(tokenizer, sample) == ["ONE 2\nUNO 2\n</s>"]


def test_what_follows_the_last_answer_is_not_learned(
    recipes: SimpleNamespace, tokenizer: Any
) -> None:
    sample = encoded(recipes, tokenizer, {"messages": CHAT[:4]})
    assert learned(tokenizer, sample) == ["uno\n"]
    assert sample.ids[-1] != tokenizer.eos_token_id  # a user's turn ends no text


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "def f"}, "def f"),
        ({"turns": ["first", "second"]}, "first"),
        ({"question": "Why?"}, "Question: Why?\nAnswer:"),
        ({"messages": CHAT[:2]}, "system: Be short.\nuser: one\nassistant: "),
    ],
)
def test_a_prompt_alone_is_taken_where_the_rest_is_to_be_generated(
    recipes: SimpleNamespace, tokenizer: Any, row: Any, prompt: str
) -> None:
    sample = encoded(recipes, tokenizer, row, allow_prompts=True)
    assert tokenizer.decode(sample.ids) == prompt
    assert sample.num_prompt_tokens == len(sample.ids)
    assert not learned(tokenizer, sample)
    assert "nothing to learn" in encoded(recipes, tokenizer, row)


BAD = [
    ('{"text": "cut', "it is not JSON"),
    ("[1, 2]", "an object is expected"),
    ('{"txt": "x"}', "'messages', or 'question' and 'answer' are expected; its keys are 'txt'"),
    ('{"text": 3}', "text expected, got 3"),
    ('{"text": " \\n"}', "it holds no text"),
    ('{"text": "\\ud83d"}', "half of a surrogate pair"),
    ('{"prompt": "x"}', "nothing follows its prompt"),
    ('{"prompt": "x", "completion": null}', "nothing follows its prompt"),
    ('{"messages": []}', "'messages' must be a list of one or more"),
    ('{"messages": ["x"]}', "must have 'role' and 'content', got 'x'"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "no message is the assistant's"),
    ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}', "tool calls are not taken"),
    ("[" * 100_000, "it is not JSON"),
]


def test_bad_rows_are_reported_with_their_lines(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [line.encode() for line, _ in BAD]
    good = [json.dumps(row).encode() for row in TEXTS[:3]]
    # A byte order mark, both ends of lines, blank lines, none at the end.
    path.write_bytes(
        b"\xef\xbb\xbf" + good[0] + b"\r\n\n" + b"\n".join([*lines, b'{"text": "\xff"}', *good[1:]])
    )
    corpus = recipes.data.load(str(path), tokenizer)
    assert sorted(texts(tokenizer, [*corpus.train, *corpus.held_out])) == sorted(
        row["text"] for row in TEXTS[:3]
    )
    said = [*(reason for _, reason in BAD), "it is not UTF-8 (byte 10)"]
    assert [bad.line for bad in corpus.bad] == list(range(3, 3 + len(said)))
    for bad, reason in zip(corpus.bad, said, strict=True):
        assert reason in bad.reason
        assert len(str(bad)) < 400
    report = corpus.report(most=2)
    assert f"{path} line 3: it is not JSON" in report
    assert f"and {len(said) - 2} more" in report


@pytest.mark.parametrize("template", [REFUSING, ""])
def test_a_template_that_refuses_makes_a_bad_row(recipes: SimpleNamespace, template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    said = encoded(recipes, tokenizer, {"messages": CHAT})
    assert ("no system message, please" if template else "has no chat template") in said


def test_a_row_is_on_the_same_side_for_ever(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    def held_out(rows: Sequence[Any]) -> set[str]:
        path = write_lines(tmp_path / "rows.jsonl", rows)
        corpus = recipes.data.load(path, tokenizer, held_out_share=0.2)
        train, held = (set(texts(tokenizer, part)) for part in (corpus.train, corpus.held_out))
        assert not train & held
        assert train | held == {row["text"] for row in rows}
        return held

    first = held_out(TEXTS)
    rows = [{"id": i, "text": row["text"], "x": 1} for i, row in enumerate(TEXTS)]
    random.Random(0).shuffle(rows)
    assert held_out(rows) == first
    assert held_out([*TEXTS[:40], *TEXTS[:40]]) == first & {row["text"] for row in TEXTS[:40]}
    # Of this version and every other: whoever resumes must not learn what was held out.
    assert recipes.rows.Row("text", ("abc",), "a", 1).hash == 0xC7D8FA5FDB8E2E94


def test_the_form_of_a_row_and_its_tokens_do_not_matter(recipes: SimpleNamespace) -> None:
    asked = {"prompt": "Question: How many?\nAnswer:", "completion": " 3 + 4 = 7"}
    rows = [recipes.rows._row(row, "some", 1) for row in (QUESTION, asked)]
    assert rows[0].hash == rows[1].hash


def test_about_the_wanted_share_is_held_out(recipes: SimpleNamespace) -> None:
    rows = [recipes.rows.Row("text", (f"text {i}",), "some", i) for i in range(4000)]
    samples = [recipes.data.Sample((i, i)) for i in range(4000)]
    train, held_out = recipes.data._divided(samples, [row.hash for row in rows], 0.05)
    assert len(train) + len(held_out) == 4000
    assert 158 <= len(held_out) <= 242  # 200 expected, 3 standard deviations


@pytest.mark.parametrize("share", [1e-9, 0.5])
@pytest.mark.parametrize("count", [2, 3])
def test_of_few_rows_there_are_some_on_either_side(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path, count: int, share: float
) -> None:
    for start in range(0, 30, count):
        path = write_lines(tmp_path / "rows.jsonl", TEXTS[start : start + count])
        corpus = recipes.data.load(path, tokenizer, held_out_share=share)
        assert len(corpus.train) > 0
        assert len(corpus.held_out) > 0
        assert len(corpus.train) + len(corpus.held_out) == count


def test_of_a_single_text_the_last_part_is_held_out(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i} of the book\n" for i in range(100)))
    corpus = recipes.data.load(str(path), tokenizer, held_out_share=0.1)
    (first,), (last,) = (texts(tokenizer, part) for part in (corpus.train, corpus.held_out))
    assert first + last == path.read_text()
    assert last.startswith("line ")
    assert len(last) == pytest.approx(0.1 * len(first + last), rel=0.2)
    path.write_text("Title\n" + "one long paragraph " * 100)
    corpus = recipes.data.load(str(path), tokenizer, held_out_share=0.1)
    (first,), (last,) = (texts(tokenizer, part) for part in (corpus.train, corpus.held_out))
    assert len(last) == pytest.approx(0.1 * len(first + last), rel=0.01)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([QUESTION, QUESTION], "holds 1 different rows that can be used"),
        ([{"text": "x"}], "holds 0 different rows .* line 1: "),
        ([], "holds 0 different rows"),
    ],
)
def test_too_little_to_divide_is_refused(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path, rows: list[Any], said: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=said):
        recipes.data.load(write_lines(tmp_path / "rows.jsonl", rows), tokenizer)


def test_a_folder_is_read_file_by_file(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "inner" / ".git").mkdir(parents=True)
    for name in ("a.py", "b.md", "inner/c.txt", "inner/.git/d.txt", ".e.txt", "f.bin", "g.log"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    write_lines(tmp_path / "h.jsonl", TEXTS[:2])
    corpus = recipes.data.load(str(tmp_path), tokenizer)
    found = texts(tokenizer, [*corpus.train, *corpus.held_out])
    wanted = [f"text of {name}" for name in ("a.py", "b.md", "inner/c.txt")]
    assert sorted(found) == sorted([*wanted, *(row["text"] for row in TEXTS[:2])])
    assert [str(bad) for bad in corpus.bad] == [
        f"{tmp_path}/latin.txt line 1: it is not UTF-8 (byte 3 of the file)"
    ]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("./missing.jsonl", "there is no file or folder './missing.jsonl'"),
        ("", "data is empty; give a file"),
        ("IMAGE", "image.png is not a file of text; those that are read end in .csv, .json"),
        ("FOLDER", "holds no .jsonl, .md, .py, .txt file and no data set"),
    ],
)
def test_what_is_no_source_is_refused(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    source = {"IMAGE": str(tmp_path / "image.png"), "FOLDER": str(tmp_path)}.get(source, source)
    with pytest.raises(ValueError, match=said):
        recipes.data.load(source, tokenizer)


class FakeDatasets:
    """Stands for ``datasets``, which takes seconds to import and would ask the hub."""

    class exceptions:  # noqa: N801
        class DatasetsError(Exception):
            pass

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.calls = rows, []

    def load_dataset(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        if args[0] == "nobody/nothing":
            raise self.exceptions.DatasetsError("it is not\non the hub")
        return {"test": [], "train": self.rows}


def test_a_hub_id_goes_through_datasets(
    recipes: SimpleNamespace, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDatasets([{"text": None, "question": f"{i}?", "answer": "7"} for i in range(5)])
    monkeypatch.setitem(__import__("sys").modules, "datasets", fake)
    corpus = recipes.data.load("openai/gsm8k:main", tokenizer)
    assert fake.calls == [(("openai/gsm8k", "main"), {})]
    assert len(corpus.train) + len(corpus.held_out) == 5
    fake.rows[3] = {"text": ""}
    corpus = recipes.data.load("some/texts", tokenizer)
    assert [str(bad) for bad in corpus.bad] == ["some/texts line 4: it holds no text"]
    with pytest.raises(ValueError, match=r"^data 'nobody/nothing' is no file .*: it is not on"):
        recipes.data.load("nobody/nothing", tokenizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of datasets' own
def test_a_saved_data_set_and_a_table_are_read(
    recipes: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    import datasets

    saved = datasets.Dataset.from_list(TEXTS)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "table.parquet")
    for source in (tmp_path / "saved", tmp_path / "table.parquet"):
        corpus = recipes.data.load(str(source), tokenizer)
        assert len(corpus.train) + len(corpus.held_out) == len(TEXTS)


def test_samples_are_kept_as_they_are(recipes: SimpleNamespace) -> None:
    draw, kept, wanted = random.Random(0), recipes.data.Samples(), []
    for _ in range(50):
        ids = tuple(draw.randrange(2**31) for _ in range(draw.randrange(9)))
        spans = ((2, 3),) if draw.random() < 0.3 else ()
        wanted.append(recipes.data.Sample(ids, draw.randrange(len(ids) + 1), spans))
        kept.append(wanted[-1])
    assert list(kept) == wanted
    assert kept[-1] == wanted[-1]
    assert list(kept[3:9:2]) == wanted[3:9:2]
    with pytest.raises(IndexError):
        kept[50]


def test_prompts_are_prompts_or_places_of_texts(recipes: SimpleNamespace) -> None:
    sample = recipes.data.Sample
    asked = [sample((*range(i), 99, 98), i) for i in (3, 4, 9)]
    long, short = sample(tuple(range(100, 200))), sample((7, 8, 9))
    found = recipes.data.prompts([*asked, long, short], limit=99, max_prompt_tokens=8)
    given = [(0, 1, 2), (0, 1, 2, 3), tuple(range(1, 9)), (7,)]  # of the longest, its end
    places = [tuple(range(i, i + 8)) for i in range(100, 192, 16)]
    assert sorted(found) == sorted([*given, *places])
    some = recipes.data.prompts([*asked, long, short], limit=4, max_prompt_tokens=8, seed=1)
    assert len(some) == 4
    assert set(some) <= set(found)
    assert set(recipes.data.prompts(asked, limit=4, max_prompt_tokens=2)) == {
        (1, 2),
        (2, 3),
        (7, 8),
    }
    with pytest.raises(ValueError, match="no row has a prompt or two tokens"):
        recipes.data.prompts([sample((7,))], limit=4, max_prompt_tokens=2)
