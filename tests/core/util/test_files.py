"""Files are tried before the work and written whole or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from hookline.core.errors import ConfigError
from hookline.core.sweep.results import append_line, check_appendable
from hookline.core.util.files import check_writable, path_of, read_bounded, write_whole


def broken_pieces():
    yield "half"
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("~/a.jsonl", "/home/me/a.jsonl"),
        ("~", "/home/me"),
        ("./~/a", "~/a"),
        ("~nobody-here/a", "~nobody-here/a"),
        ("a~", "a~"),
        (5, "5"),
    ],
)
def test_a_path_of_a_key_may_begin_with_the_home_folder(value: object, path: str, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path_of(value) == Path(path)


def test_a_folder_that_is_not_there_is_named_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.jsonl"
    with pytest.raises(ConfigError, match=r"output=.*a.jsonl: the folder .*missing does not exist; make it first"):
        check_writable(path, "output")
    with pytest.raises(ConfigError, match=r"output=.*missing/a.jsonl cannot be written: No such file or directory"):
        write_whole(path, ["a"], "output")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"result=.* is a folder; name a file"):
        check_writable(tmp_path, "result")


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "a.jsonl", "output")
    assert list(tmp_path.iterdir()) == []


def test_what_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    with pytest.raises(ConfigError, match=r"output=.* cannot be written: No space left on device"):
        write_whole(path, broken_pieces(), "output")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


def test_a_new_file_can_be_read_by_whom_any_other_new_file_can(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", ["b", "c"], "output")
    (tmp_path / "usual").touch()
    assert (tmp_path / "a").read_text() == "bc"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_file_of_lines_that_cannot_be_opened_is_named_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"result=.*missing/a.jsonl cannot be written: No such file or directory"):
        check_appendable(tmp_path / "missing" / "a.jsonl", "result")
    check_appendable(tmp_path / "a.jsonl", "result")
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_does_not_fit_is_taken_away_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    append_line(path, {"a": 1})
    write = os.write
    monkeypatch.setattr("os.write", lambda handle, data: write(handle, data[:4]))
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        append_line(path, {"b": 2})
    assert path.read_text() == '{"a": 1}\n'


def test_writing_does_not_touch_the_umask_which_all_threads_share(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "umask", lambda mask: pytest.fail("between two calls of it, other threads have another one")
    )
    write_whole(tmp_path / "a", ["text"], "output")
    assert (tmp_path / "a").read_text() == "text" and [*tmp_path.iterdir()] == [tmp_path / "a"]


@pytest.mark.parametrize("check", [check_writable, check_appendable])
@pytest.mark.parametrize("name", ["x" * 300, "é" * 140, "x" * 300 + "/a.jsonl"])
def test_a_name_that_no_file_can_have_is_told_in_one_line_before_the_work(name, check, tmp_path):
    with pytest.raises(ConfigError) as refused:
        check(tmp_path / name, "output")
    assert str(refused.value).startswith("output=") and str(refused.value).endswith(
        "cannot be written: File name too long"
    )


def test_a_file_that_never_ends_is_refused_unread(tmp_path):
    endless = tmp_path / "prompts.txt"
    endless.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"prompts_file=.*prompts.txt is neither a file nor a pipe"):
        read_bounded(endless, "prompts_file")


def test_of_a_file_and_of_a_pipe_so_much_is_read_and_no_more(tmp_path):
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_bytes(b"12345")
    os.mkfifo(pipe)
    for one in (path, pipe):
        if one is pipe:
            threading.Thread(target=pipe.write_bytes, args=(b"12345",), daemon=True).start()
        assert read_bounded(one, "key", 5) == b"12345"
        if one is pipe:
            threading.Thread(target=pipe.write_bytes, args=(b"12345",), daemon=True).start()
        with pytest.raises(ConfigError, match="holds more than 4 bytes, which is the most that is read"):
            read_bounded(one, "key", 4)
