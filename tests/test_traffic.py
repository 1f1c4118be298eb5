"""Traffic files: every shape of a line, labels, and lines that are no prompts."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.prompts import read_prompts
from layerskip.telemetry.traffic import MOST_KEPT, LeftOut, Request, Traffic

USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "because"}


def write(path: Path, *lines: Any) -> Path:
    """Each line as JSON, or as the bytes that it is."""
    content = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(content))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traffic.jsonl"


@pytest.mark.parametrize(
    ("line", "prompt", "messages"),
    [
        ({"prompt": "a"}, "a", None),
        ({"prompt": "a", "completion": "b"}, "a", None),
        ({"prompt": [3, 4]}, (3, 4), None),
        ({"prompt_token_ids": [3, 4], "prompt": "a"}, (3, 4), None),
        ({"messages": [USER]}, None, (USER,)),
        ({"messages": [USER, ANSWER, ANSWER], "prompt": None}, None, (USER,)),
        ({"messages": None, "prompt": "a"}, "a", None),
        ({"turns": ["first", "second"]}, "first", None),
        ({"question": "q", "answer": "7"}, "Question: q\nAnswer:", None),
        ({"question": "q", "answer": 7}, "Question: q\nAnswer:", None),
        ({"prompt": "a", "continuation": ["b"], "answer": 7}, "a", None),
        ({"prompt": None, "question": None, "turns": ["first"]}, "first", None),
        (b'\xef\xbb\xbf{"prompt": "a"}\r', "a", None),
    ],
)
def test_a_line_may_have_any_of_the_known_shapes(
    file: Path, line: Any, prompt: Any, messages: Any
) -> None:
    assert list(Traffic.read(write(file, line))) == [Request(0, prompt, messages)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "not JSON: Expecting"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "byte 0 is not UTF-8"),
        (b"[" * 100_000, "not JSON: "),
        ([1, 2], "an object was expected, got list"),
        ({"text": "a"}, "it has none of prompt, prompt_token_ids, messages, turns, question"),
        ({"prompt": 7}, "'prompt' must be text, got 7"),
        ({"prompt": {"x": "y" * 10_000}}, "'prompt' must be text, got {'x': 'yyyy"),
        ({"turns": [7]}, "'turns' must be a list of one or more texts, got [7]"),
        ({"turns": []}, "'turns' must be a list of one or more texts"),
        ({"turns": "text"}, "'turns' must be a list"),
        ({"prompt_token_ids": []}, "token ids must be a list of one or more ints"),
        ({"prompt_token_ids": "ab"}, "token ids must be a list of one or more ints"),
        ({"prompt": [1, True]}, "token ids must be a list of one or more ints"),
        ({"prompt": [1, -1]}, "token ids must be a list of one or more ints"),
        ({"messages": "hello"}, "messages must be a list of objects, each with a role"),
        ({"messages": [{"content": "hello"}]}, "messages must be a list of objects"),
        ({"messages": [ANSWER]}, "messages hold no question"),
        ({"messages": []}, "messages hold no question"),
        ({"prompt": "a", "task": "\ud800"}, "label 'task' is not valid Unicode"),
        ({"prompt": "a", "task": ["b"]}, "label 'task' must be text or a number, got list"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_its_number(
    file: Path, line: Any, reason: str
) -> None:
    write(file, {"prompt": "a", "task": "x"}, b"", line, {"prompt": "b", "task": "x"})
    with pytest.raises(ValueError, match="line 3 is not a prompt") as caught:
        Traffic.read(file, labels=["task"])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000
    traffic = Traffic.read(file, labels=["task"], bad_lines="skip")
    assert [r.index for r in traffic] == [0, 3]
    assert (traffic.count, traffic.num_bad_lines) == (2, 1)
    assert traffic.bad_lines[0].number == 3
    assert reason in traffic.bad_lines[0].reason


def test_a_byte_order_mark_is_no_prompt(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf\n{"prompt": "a"}\n')
    assert [r.index for r in Traffic.read(file)] == [1]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a"}\r{"prompt": "b"}\r',
        b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}',
        b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n\xef\xbb\xbf\n',
    ],
)
def test_all_commands_read_the_same_lines(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert [r.prompt for r in Traffic.read(file)] == [e.prompt for e in read_prompts(file)]
    assert [e.prompt for e in read_prompts(file)] == ["a", "b"]


def test_only_the_first_bad_lines_are_kept(file: Path) -> None:
    traffic = Traffic.read(write(file, *["?"] * 50, {"prompt": "a"}), bad_lines="skip")
    assert traffic.num_bad_lines == 50
    assert len(traffic.bad_lines) == MOST_KEPT
    assert traffic.bad_lines[1] == LeftOut(2, "an object was expected, got str")


def test_labels_come_from_any_field(file: Path) -> None:
    write(
        file,
        {"prompt": "a", "task": "code", "meta": {"route": "eu", "hot": True}, "n": 3},
        {"prompt": "b", "meta": None, "meta.route": "us"},
    )
    traffic = Traffic.read(file, labels=["task", "meta.route", "meta.hot", "n", "task"])
    assert traffic.labels == ("task", "meta.route", "meta.hot", "n")
    assert [r.labels for r in traffic] == [
        {"task": "code", "meta.route": "eu", "meta.hot": "true", "n": "3"},
        {"meta.route": "us"},
    ]


def test_a_label_that_no_line_has_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"a field 'topic' to label by; the first has prompt, t"):
        Traffic.read(write(file, {"prompt": "a", "t": "x"}), labels=["topic"])


def test_the_limit_leaves_later_lines_unread(file: Path) -> None:
    write(file, {"prompt": "a"}, {"prompt": "b"}, b"damaged")
    traffic = Traffic.read(file, limit=2)
    assert [r.prompt for r in traffic] == ["a", "b"]
    assert traffic.count == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"bad_lines": "ignore"}, r"bad_lines must be one of \('fail', 'skip'\), got 'ignore'"),
    ],
)
def test_a_wrong_setting_is_refused(file: Path, settings: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Traffic.read(write(file, {"prompt": "a"}), **settings)


def test_a_file_without_prompts_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no prompts \(line 1: an object was expected"):
        Traffic.read(write(file, 5), bad_lines="skip")
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read: No such file"):
        Traffic.read(tmp_path / "none.jsonl")


def test_what_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match=r"is no regular file, and prompts are read more than"):
            Traffic.read(path)


def test_the_digest_is_of_what_was_read(file: Path) -> None:
    one = Traffic.read(write(file, {"prompt": "a"}, {"prompt": "b"}, b""))
    assert one.name == "traffic.jsonl"
    assert one.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    write(file, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert Traffic.read(file).sha256 != one.sha256
    assert Traffic.read(file, limit=2).sha256 == one.sha256
    assert Traffic.read(file, limit=1).sha256 != one.sha256


def test_a_log_that_grows_meanwhile_is_read_as_it_was_counted(file: Path) -> None:
    traffic = Traffic.read(write(file, {"prompt": "a"}, b""))
    with file.open("ab") as log:
        log.write(b'{"prompt": "b"}\n{"prom')
    assert [r.prompt for r in traffic] == ["a"]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n", b'\r\n{"prompt": "b"}'])
def test_a_last_line_may_be_ended_meanwhile(file: Path, ending: bytes) -> None:
    traffic = Traffic.read(write(file, {"prompt": "a"}))
    with file.open("ab") as log:
        log.write(ending)
    assert [r.prompt for r in traffic] == ["a"]


@pytest.mark.parametrize(
    "now",
    [
        [{"prompt": "a"}, {"prompt": "c"}],
        [{"prompt": "c"}, {"prompt": "b"}],
        [{"prompt": "a"}],
        [{"prompt": "c"}, {"prompt": "a"}, {"prompt": "b"}],
        [],
    ],
)
def test_prompts_that_were_changed_meanwhile_are_told(file: Path, now: list[Any]) -> None:
    traffic = Traffic.read(write(file, {"prompt": "a"}, b"", {"prompt": "b"}, b"", b""))
    assert [r.prompt for r in traffic] == ["a", "b"]
    write(file, *now)
    with pytest.raises(ValueError, match=r"traffic\.jsonl was changed after it was first read"):
        list(traffic)


def test_reading_holds_a_line_at_a_time(file: Path) -> None:
    write(file, *[{"prompt": f"{i} " + "x" * 500, "task": str(i)} for i in range(4000)])
    tracemalloc.start()
    traffic = Traffic.read(file, labels=["task"])
    assert sum(1 for _ in traffic) == 4000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000 < file.stat().st_size


def test_prompts_in_memory_are_traffic_too() -> None:
    traffic = Traffic.of(["a", [1, 2]], labels=[{"task": "x"}, {}])
    assert list(traffic) == [Request(0, "a", None, {"task": "x"}), Request(1, (1, 2))]
    assert (traffic.count, traffic.labels) == (2, ("task",))
    assert Traffic.of(["a", "c"]).sha256 != Traffic.of(["a", "b"]).sha256
    with pytest.raises(ValueError, match="2 prompts came with 1 labels"):
        Traffic.of(["a", "b"], labels=[{}])
    for labels in ({"task": 1}, None, {"task": None}):  # before anything is decoded
        with pytest.raises(TypeError, match="labels must map names to texts"):
            Traffic.of(["a", "b"], labels=[{"task": "x"}, labels])
    for single in ("a", [1, 2, 3], torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="prompts must be a list of them, got a single one"):
            Traffic.of(single)
    tensors = Traffic.of([torch.tensor([1, 2]), [1, 2]])
    assert [r.prompt for r in tensors] == [(1, 2), (1, 2)]
    assert tensors.sha256 == Traffic.of([[1, 2], (1, 2)]).sha256
    with pytest.raises(TypeError, match="a prompt must be text or a list of token ids, got 5"):
        Traffic.of([[1], 5])
