"""Journals: what was measured is kept, and no other file is taken for one."""

import json
from contextlib import closing

import pytest

from layerskip.journal import Journal, remove

SUBJECT = {"fingerprint": "abc", "threads": 2}


def test_a_journal_keeps_what_was_measured(tmp_path):
    path = tmp_path / "journal"
    with closing(Journal(path, SUBJECT)) as journal:
        assert journal.once("a", lambda: [1, 2], tuple) == (1, 2)
    with closing(Journal(path, SUBJECT)) as again:
        assert again.once("a", lambda: 1 / 0, tuple) == (1, 2)
        assert path.read_bytes().count(b"\n") == 2
        with pytest.raises(ValueError, match=r"not a whole journal \(the entry 'a'\)"):
            again.once("a", list, lambda entry: entry["x"])
    assert Journal(None, SUBJECT).once("a", lambda: [3], tuple) == (3,)


HEADER = json.dumps({"journal": 1, **SUBJECT}) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no journal\n", r"not a whole journal \(line 1\)"),
        ("no journal", r"not a whole journal \(line 1\)"),
        ('{"my": "notes"}', r"not a whole journal \(line 1\)"),
        ('{"my": "notes"}\n', "not a journal of this layerskip"),
        ("[1]\n", r"not a whole journal \(line 1\)"),
        ("\udcff\n", r"not a whole journal \(line 1\)"),
        ("[" * 100_000 + "\n", r"not a whole journal \(line 1\)"),
        (HEADER + "\n" + HEADER, r"not a whole journal \(line 2\)"),
        (HEADER + '{"what": "a"}\n', r"not a whole journal \(line 2\)"),
        (HEADER + '{"what": 3, "result": 3}\n', r"not a whole journal \(line 2\)"),
        (HEADER + '{"what": "a", "result": 3}\n{"wh\n', r"not a whole journal \(line 3\)"),
        (
            HEADER.replace("abc", "xyz"),
            r"another measurement \(fingerprint xyz, now abc\); delete it",
        ),
        (HEADER.replace("2", "4"), r"another measurement \(threads 4, now 2\); delete it"),
        (HEADER.replace('"journal": 1', '"journal": 2'), "not a journal of this layerskip"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path, content, message):
    path = tmp_path / "journal"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        Journal(path, SUBJECT)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, r"settings\.seed None, now 4"),
        ({"sizes": (1, 3)}, r"settings\.sizes \[1, 2\], now \[1, 3\]"),
        ({"within": {"deep": 2}}, r"settings\.within\.deep 1, now 2"),
        ({"within": {}}, r"settings\.within\.deep 1, now nothing"),
        ({"within": None}, r"settings\.within nothing, now None; .*\.deep 1, now nothing"),
        ({"seed": 4, "sizes": ()}, r"settings\.seed None, now 4; settings\.sizes .*, now \[\]"),
        (
            {"a": 1, "b": 2, "c": 3, "d": 4},
            r"settings\.a nothing, now 1; .*\.c .*, now 3; and 1 more",
        ),
    ],
)
def test_values_within_settings_are_named_that_differ(tmp_path, changes, named):
    path, settings = tmp_path / "journal", {"seed": None, "sizes": (1, 2), "within": {"deep": 1}}
    with closing(Journal(path, {**SUBJECT, "settings": settings})) as journal:
        journal.once("a", lambda: 1, int)
    with closing(Journal(path, {**SUBJECT, "settings": settings})) as again:
        assert again.once("a", lambda: 2, int) == 1
    with pytest.raises(ValueError, match=rf"another measurement \({named}\); delete it"):
        Journal(path, {**SUBJECT, "settings": {**settings, **changes}})


@pytest.mark.parametrize("cut", [0, 1, 20, len(HEADER) - 1])
def test_a_journal_that_was_killed_at_its_first_line_starts_again(tmp_path, cut):
    path = tmp_path / "journal"
    path.write_text(HEADER[:cut])
    with closing(Journal(path, SUBJECT)) as journal:
        journal.once("a", lambda: 1, int)
    assert path.read_text() == HEADER + '{"what": "a", "result": 1}\n'


def test_a_journal_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be written: Is a directory"):
        Journal(tmp_path, SUBJECT)
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        Journal(tmp_path / "none" / "journal", SUBJECT)


def test_work_that_fails_before_its_first_measurement_leaves_no_journal(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(ZeroDivisionError), closing(Journal(path, SUBJECT)) as journal:
        journal.once("a", lambda: 1 // 0, int)
    assert not path.exists()
    with closing(Journal(path, SUBJECT | {"threads": 4})) as journal:
        assert [journal.once(what, lambda: 1, int) for what in "ab"] == [1, 1]
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"journal": 1, **SUBJECT, "threads": 4}
    assert path.read_text().count("journal") == 1


def test_a_journal_has_one_writer_and_is_removed_by_nobody_else(tmp_path):
    path = tmp_path / "journal"
    with closing(Journal(path, SUBJECT)) as journal:
        with pytest.raises(ValueError, match="is being written by another process; wait for its"):
            Journal(path, SUBJECT)
        assert journal.once("a", lambda: 1, int) == 1
        remove(path)
        assert path.exists()
        assert journal.once("b", lambda: 2, int) == 2
    with closing(Journal(path, SUBJECT)) as again:
        assert [again.once(what, lambda: 1 // 0, int) for what in "ab"] == [1, 2]
    remove(path)
    remove(path)
    assert not path.exists()


def test_a_journal_held_for_nothing_is_removed(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(ZeroDivisionError), closing(Journal(path, SUBJECT)) as journal:
        journal.once("a", lambda: 1 // 0, int)
    assert not path.exists()
    with closing(Journal(path, SUBJECT)) as journal:
        path.unlink()  # by whoever else: the journal begins again
        journal.once("a", lambda: 1, int)
    assert len(path.read_text().splitlines()) == 2
    path.write_bytes(b"[1]\n")
    with pytest.raises(ValueError, match="not a whole journal"):
        Journal(path, SUBJECT)
    assert path.read_bytes() == b"[1]\n"
