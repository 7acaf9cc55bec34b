"""Files are tried before the work and written whole or not at all."""

import stat
from pathlib import Path

import pytest

from hookline.core.errors import ConfigError
from hookline.core.util.files import check_writable, write_whole


def broken_pieces():
    yield "half"
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write", [check_writable, lambda path, key: write_whole(path, ["a"], key)])
def test_a_folder_that_is_not_there_is_named_with_the_key(tmp_path: Path, write) -> None:
    with pytest.raises(ConfigError, match=r"output=.*missing/a.jsonl cannot be written: No such file or directory"):
        write(tmp_path / "missing" / "a.jsonl", "output")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder"):
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
