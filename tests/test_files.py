"""Files are written where their names say, and nothing else is harmed."""

import os
import stat

import pytest

from layerskip.files import check_writable, read_json, write_text


def test_a_device_is_not_replaced():
    with pytest.raises(ValueError, match=r"^/dev/null is no regular file; give the name of one$"):
        check_writable("/dev/null")


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        write_text(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("there", [True, False])
def test_the_file_behind_a_link_is_written(tmp_path, there):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    link.symlink_to(target)
    if there:
        target.write_text("old")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [f.name for f in (tmp_path / "folder").iterdir()] == ["file"]


def test_a_name_that_cannot_be_looked_at_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot be written: File name too long"):
        check_writable(tmp_path / ("a" * 300))
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    with pytest.raises(ValueError, match="ring cannot be written: "):
        check_writable(tmp_path / "ring")


def test_json_may_begin_with_a_mark_of_byte_order(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "plan.json", "plan file") == [1]


@pytest.mark.parametrize("rights", [0o600, 0o644, 0o640])
def test_a_file_written_again_keeps_its_rights(tmp_path, rights):
    file = tmp_path / "page.html"
    write_text(file, "prompts of users")
    file.chmod(rights)
    write_text(file, "others")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("others", rights)


def test_a_write_protected_file_is_left(tmp_path, monkeypatch):
    file = tmp_path / "policy.json"
    file.write_text("old")
    allowed = os.access  # root may write anything
    monkeypatch.setattr(os, "access", lambda path, how: path != file and allowed(path, how))
    with pytest.raises(ValueError, match=r"policy\.json cannot be written: it is there, and write"):
        write_text(file, "new")
    assert file.read_text() == "old"
