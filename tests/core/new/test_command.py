"""`core.new`: what it writes and what it refuses. That what it writes runs, tests/test_distributions.py shows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hookline.core.errors import ConfigError
from hookline.core.new.command import TEMPLATES, kinds, main, write_skeleton
from hookline.core.plugin.registry import ENTRY_KINDS


def test_there_is_a_skeleton_of_each_kind() -> None:
    assert set(kinds()) == set(ENTRY_KINDS)


@pytest.mark.parametrize("kind", kinds())
def test_a_skeleton_is_a_whole_distribution_with_every_placeholder_filled_in(kind: str, tmp_path: Path) -> None:
    folder = write_skeleton(kind, "two_words", tmp_path / "new")
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    package, test = "hookline_two_words/__init__.py", "tests/test_two_words.py"
    assert {"pyproject.toml", "README.md", package, test} <= set(files)
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"]["hookline"] == {"two_words": "hookline_two_words"}
    for name, text in files.items():
        assert not re.search(r"\$\{|PACKAGE|\bNAME\b|\.txt", text), name
        if name.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120, name


@pytest.mark.parametrize("name", ["My-Policy", "9lives", "a__b", "class", "", "ümlaut", "a b"])
def test_a_name_that_cannot_be_a_plugins_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"'{name}' cannot be a plugin's name: lower-case words")):
        write_skeleton("scheduler", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("scheduler", "chunked", "scheduler 'chunked' is built in; choose another name"),
        ("model", "qwen3_0_6b", "model 'qwen3_0_6b' is built in; choose another name"),
        ("kernels", "auto", "kernels=auto leaves the choice to hookline; choose another name"),
    ],
)
def test_a_name_that_hookline_uses_itself_is_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_skeleton(kind, name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already and not empty; name another with --folder"):
        write_skeleton("scheduler", "mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("arguments", [[], ["scheduler"], ["scheduler", "a", "b"]])
def test_what_it_takes_is_told_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("hookline: error: ")
    assert "usage: hookline new KIND NAME [--folder FOLDER], where KIND is one of api, drafter," in line


def test_an_unknown_kind_exits_with_2_and_the_near_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedular", "mine"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hookline: error: there is no skeleton of a 'schedular'. Did you mean 'scheduler'? Kinds: ")


def test_it_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scheduler", "my_policy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hookline-my-policy is a scheduler policy that runs. Next:"
    assert "  hookline run scheduler=my_policy" in lines
    assert (tmp_path / "hookline-my-policy" / "hookline_my_policy" / "policy.py").is_file()


def test_every_file_of_a_skeleton_is_a_template() -> None:
    assert [path for path in TEMPLATES.rglob("*") if path.is_file() and path.suffix != ".txt"] == []


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from hookline.core.new.command import main; main(['model', 'm']); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
