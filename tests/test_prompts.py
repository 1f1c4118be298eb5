"""Prompt files of every shape, and held-out functions of the standard library."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from layerskip import prompts
from layerskip.checkpoint import held_out_modules
from layerskip.prompts import Example, held_out_code, read_prompts, read_text


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    return path


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("é\n\n  def f():\n".encode())
    assert read_text(path) == "é\n\n  def f():\n"


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert read_text(tmp_path / "text") == '{"prompt": "a"}\n'
    assert read_prompts(tmp_path / "text") == [Example("a")]


def test_what_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"prompt\.txt is not UTF-8 \(byte 3\)"):
        read_text(path)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: .+"):
        read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "a"}, Example("a")),
        ({"prompt": "a", "continuation": "b"}, Example("a", "b")),
        ({"prompt": "a", "completion": "b"}, Example("a", "b")),
        ({"prompt": "a", "canonical_solution": "b"}, Example("a", "b")),
        ({"question": "q", "answer": "7"}, Example("Question: q\nAnswer:", " 7")),
        ({"question": "q"}, Example("Question: q\nAnswer:")),
        ({"turns": ["first", "second"], "category": "qa"}, Example("first")),
        ({"prompt": "one\u2028line", "id": 3}, Example("one\u2028line")),
        ({"prompt": "a", "question": "q", "turns": ["first"]}, Example("a")),
        ({"prompt": "a", "question": None}, Example("a")),
        ({"prompt": None, "question": "q"}, Example("Question: q\nAnswer:")),
        ({"prompt": "a", "continuation": None, "answer": None}, Example("a")),
        ({"prompt": "a", "continuation": None, "completion": "b"}, Example("a", "b")),
        ({"question": "q", "answer": None}, Example("Question: q\nAnswer:")),
        ({"question": None, "turns": ["first"]}, Example("first")),
    ],
)
def test_a_line_may_have_any_of_the_known_shapes(
    tmp_path: Path, row: dict[str, Any], example: Example
) -> None:
    assert read_prompts(write_lines(tmp_path / "p.jsonl", [row])) == [example]


def test_order_stays_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "b"}\r\n\n  \n{"prompt": "a"}', encoding="utf-8")
    assert read_prompts(path) == [Example("b"), Example("a")]


@pytest.mark.parametrize(
    "row",
    [
        {},
        [1, 2],
        "a question",
        7,
        {"text": "a"},
        {"turns": []},
        {"turns": "one string"},
        {"turns": [5]},
        {"prompt": 5},
        {"prompt": None},
        {"prompt": None, "question": None, "turns": None},
        {"prompt": "a", "continuation": 5},
        {"question": ["q"], "answer": "7"},
        {"question": "q", "answer": 7},
    ],
    ids=json.dumps,
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, row: Any) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ValueError, match=r"p\.jsonl line 2 is not a prompt"):
        read_prompts(path)


def test_turns_without_a_text_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"turns": []}])
    with pytest.raises(
        ValueError, match=r"\('turns' must be a list of one or more texts, got \[\]\)"
    ):
        read_prompts(path)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl line 3 is not a prompt"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)


def function(name: str, lines: int = 8) -> str:
    return f"def {name}(x):\n" + "".join(f"    x += {i}\n" for i in range(lines)) + "\n\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of our own; ``a.py`` has 30 lines before its functions."""
    monkeypatch.setattr(prompts.sysconfig, "get_path", lambda name: str(tmp_path))
    above = "".join(f"# line {i}\n" for i in range(30))
    (tmp_path / "a.py").write_text(above + function("a1") + function("a2"), encoding="utf-8")
    (tmp_path / "b.py").write_text(above + function("b1"), encoding="utf-8")
    return tmp_path


def test_a_prompt_is_the_lines_up_to_the_body(library: Path) -> None:
    above = "".join(f"# line {i}\n" for i in range(30 - prompts.CONTEXT_LINES, 30))
    body = "".join(f"    x += {i}\n" for i in range(8))
    assert held_out_code(["b.py"], 5) == [Example(above + "def b1(x):\n", body)]


def test_modules_take_turns_until_the_limit(library: Path) -> None:
    def names(limit: int) -> list[str]:
        found = held_out_code(["b.py", "a.py"], limit)
        return sorted(e.prompt.rstrip("\n").split("\n")[-1][4:6] for e in found)

    assert names(2) in (["a1", "b1"], ["a2", "b1"])
    assert names(3) == names(99) == ["a1", "a2", "b1"]


def test_modules_this_python_lacks_are_passed_over(library: Path) -> None:
    assert held_out_code(["gone.py", "gone/b.py"], 3) == []
    assert len(held_out_code(["gone.py", "b.py"], 3)) == 1


def test_modules_this_python_cannot_parse_are_passed_over(library: Path) -> None:
    (library / "old.py").write_text("print 'Python 2'\n", encoding="utf-8")
    assert len(held_out_code(["old.py", "b.py"], 3)) == 1


def test_short_functions_and_short_contexts_are_left_out(library: Path) -> None:
    above = "".join(f"# line {i}\n" for i in range(30))
    (library / "short.py").write_text(above + function("f", lines=4), encoding="utf-8")
    (library / "top.py").write_text(function("f"), encoding="utf-8")
    long = "".join(f"# {'word ' * 50}{i}\n" for i in range(30))
    (library / "long.py").write_text(long + function("f"), encoding="utf-8")
    assert held_out_code(["short.py", "top.py", "long.py"], 3) == []


def test_prompts_of_the_real_library_are_pieces_of_it() -> None:
    root, modules = Path(sysconfig.get_path("stdlib")), held_out_modules()
    sources = [(root / m).read_text("utf-8") for m in modules if (root / m).is_file()]
    examples = held_out_code(modules, 12)
    assert len({e.prompt for e in examples}) == 12
    for e in examples:
        assert any(e.prompt + e.continuation in source for source in sources)
        assert "\n" in e.continuation.strip()
        assert len(e.prompt) <= prompts.MAX_PROMPT_CHARACTERS
    assert held_out_code(modules, 12) == examples


def test_a_line_with_half_a_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\\ud800"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl line 2 is not valid Unicode: 'utf-8' codec"):
        read_prompts(path)


def test_a_line_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl line 1 is not a prompt \(maximum recursion"):
        read_prompts(path)
