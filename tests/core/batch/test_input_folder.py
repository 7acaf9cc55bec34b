"""Which files of an input folder are read: regular ones, and what its links lead to, unless that is somewhere else."""

import json
import os

import pytest

from hookline.core.batch.input_folder import files_in
from hookline.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    """An input folder with a.jsonl and sub/b.jsonl, and beside it a folder of somebody else's with c.jsonl."""
    for name in ("in/a.jsonl", "in/sub/b.jsonl", "others/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    return tmp_path / "in"


def link(path, target):
    path.symlink_to(target)
    return path


def test_files_of_both_kinds_are_found_below_a_folder_but_hidden_ones(tmp_path):
    for name in ("b.jsonl", "a/c.parquet", "x.txt", ".hidden/d.jsonl", "a/.e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({}))
    assert files_in(tmp_path) == ["a/c.parquet", "b.jsonl"]


def test_a_folder_without_files_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="holds no file that ends in"):
        files_in(tmp_path)


def test_a_link_as_the_input_itself_is_the_folder_that_it_leads_to(folder, tmp_path):
    assert files_in(link(tmp_path / "link", folder)) == ["a.jsonl", "sub/b.jsonl"]


def test_links_inside_the_folder_are_followed_to_files_and_find_no_file_twice(folder):
    link(folder / "again.jsonl", "sub/b.jsonl")
    link(folder / "latest", "sub")
    link(folder / "sub" / "round", "..")
    assert files_in(folder) == ["a.jsonl", "again.jsonl", "sub/b.jsonl"]


def test_a_link_to_a_hidden_folder_inside_shows_its_files(folder):
    (folder / "sub").rename(folder / ".sub_1")
    link(folder / "sub", ".sub_1")
    assert files_in(folder) == ["a.jsonl", "sub/b.jsonl"]


@pytest.mark.parametrize("target", ["../others", "../others/c.jsonl"])
def test_a_link_out_of_the_folder_is_refused_by_name_unless_links_are_followed(target, folder):
    path = link(folder / "z.jsonl", target)
    with pytest.raises(ConfigError) as caught:
        files_in(folder)
    assert str(caught.value) == (
        f"{path} is a link out of the input folder, to {path.resolve()}; if you trust whoever filled the folder, "
        "batch.follow_links=true reads what is there, else take the link away"
    )
    found = "z.jsonl/c.jsonl" if target == "../others" else "z.jsonl"
    assert files_in(folder, follows_links=True) == ["a.jsonl", "sub/b.jsonl", found]


def test_links_that_are_followed_read_each_folder_once(folder):
    link(folder / "up", "..")
    link(folder / "others", "../others")
    found = files_in(folder, follows_links=True)
    assert [name for name in found if name.endswith("c.jsonl")] == ["others/c.jsonl"]
    assert [name for name in found if name.endswith(("a.jsonl", "b.jsonl"))] == ["a.jsonl", "sub/b.jsonl"]


@pytest.mark.parametrize("target", ["nowhere", "z.jsonl"])
def test_a_link_that_leads_nowhere_is_named(target, folder):
    link(folder / "z.jsonl", target)
    link(folder / "z.txt", target)
    with pytest.raises(ConfigError, match=r"in/z\.jsonl is a link that leads nowhere; mend it, or take it away"):
        files_in(folder)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_pipe_is_named_and_never_waited_for(is_link, folder):
    os.mkfifo(folder / ("pipe" if is_link else "z.jsonl"))
    if is_link:
        link(folder / "z.jsonl", "pipe")
    with pytest.raises(ConfigError, match=r"in/z\.jsonl is no regular file"):
        files_in(folder)


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    listdir = os.listdir

    def refusing(path):
        if path == folder / "sub":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(ConfigError, match=r"in/sub cannot be read: Permission denied"):
        files_in(folder)
