"""`hookline`: the commands of core under one name, and what it does with everything else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import hookline
from hookline.__main__ import main
from hookline.core import COMMANDS

ROOT = Path(__file__).parents[1]
SHOWS = {
    "run": (["prompt=x", "--cfg", "job"], "\nprompt: x\n"),
    "batch": (["batch.max_rows=3", "--cfg", "job"], "\n  max_rows: 3\n"),
    "chat": (["chat.system=x", "--cfg", "job"], "\n  system: x\n"),
    "serve": (["serve.port=1", "--cfg", "job"], "\n  port: 1\n"),
    "bench": (["workload=smoke", "--cfg", "job"], "\nworkload:\n"),
    "simulate": (["workload=smoke", "--cfg", "job"], "\ncost: "),
    "warm": (["card=h200", "--cfg", "job"], "\ncard: h200\n"),
    "quantize": (["--help"], "quantize SOURCE TARGET"),
    "report": (["--help"], "hookline report"),
    "info": (["chunked"], "scheduler=chunked: "),
    "new": (["scheduler", "mine"], "hookline-mine is a scheduler policy that runs."),
}
"""Command -> arguments, and something that it prints for them."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_core_is_a_sub_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, shown = SHOWS[command]
    assert main([command, *arguments]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "info", "new", pytest.param("serve", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("started", "spelling"), [("bin/hookline", "hookline {}"), ("core/commands/{}.py", "python -m core.{}")]
)
def test_the_help_of_a_command_begins_with_the_way_in_which_it_was_called(
    command: str, started: str, spelling: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{started.format(command)}"])
    with suppress(SystemExit):  # argparse's
        main([command, "--help"])
    assert capsys.readouterr().out.removeprefix("usage: ").startswith(f"{spelling.format(command)} ")


@pytest.mark.parametrize(
    ("started", "spelling"),
    [
        ("bin/hookline", "hookline info"),
        ("core/commands/run.py", "python -m core.info"),
        ("core/mine/program.py", "hookline info"),
    ],
    ids=["command", "module", "program"],
)
def test_errors_name_a_command_in_the_way_in_which_this_one_was_called(
    started: str, spelling: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{started}"])
    assert main(["run", "scheduler=null"]) == 2
    error = "hookline: error: scheduler needs an option; it can be neither null nor deleted"
    assert capsys.readouterr().err == f"{error}: {spelling} lists them\n"


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_hydra_shows_of_a_command_begins_like_that_too(path: Path) -> None:
    header = path.read_text().partition("    header: |\n")[2]
    command = "run" if path.stem == "config" else path.stem
    assert header.lstrip().startswith(f"${{called_as:{command}}} ") and "python -m" not in header


def texts(path: Path) -> list[str]:
    """All texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_message_knows_by_itself_how_commands_are_called() -> None:
    modules = [path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py")]
    told = {
        str(path.relative_to(ROOT))
        for path in modules
        if "python -m core." in path.read_text()
        for text in texts(path)
        if "python -m core." in text
    }
    assert told == {"core/util/process.py"}, "what else names a command asks called_as for it"


def test_every_command_is_one_that_python_m_core_knows() -> None:
    modules = {path.stem for path in (ROOT / "core" / "commands").glob("*.py")}
    assert set(COMMANDS) == modules


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["prompt=x", "--cfg", "job"], ["--cfg", "job", "prompt=x"]])
def test_arguments_without_a_command_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    bare = capsys.readouterr().out
    assert main(["run", *arguments]) == 0
    assert capsys.readouterr().out == bare


@pytest.mark.parametrize(
    "arguments", [["--version"], ["version"], ["run", "--version"], ["bench", "--vers"], ["bench", "-m", "--version"]]
)
def test_its_version_is_hooklines_and_not_that_of_what_composes(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"hookline {hookline.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_the_commands(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: hookline ") and all(f"\n  {command} " in shown for command in COMMANDS)


def test_help_of_a_command_is_what_the_command_says_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "info"])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["becnh", "workload=smoke"], "bench"),
        (["generate", "hello"], "run"),
        (["pull", "qwen3"], "run model.checkpoint=OWNER/NAME"),
        (["run-batch", "-i", "a", "-o", "b"], "batch"),
    ],
)
def test_an_unknown_command_exits_with_2_and_what_may_be_meant(
    given: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = f"hookline: error: no command '{given[0]}'. Did you mean '{meant}'? Commands: {', '.join(COMMANDS)}\n"
    assert captured.err == expected


def test_other_words_for_commands_are_no_commands_and_lead_to_some() -> None:
    from hookline.__main__ import _OTHER_WORDS

    assert not _OTHER_WORDS.keys() & {*COMMANDS} and {one.split()[0] for one in _OTHER_WORDS.values()} <= {*COMMANDS}


@pytest.mark.parametrize(
    "arguments",
    [["modle=x"], ["run", "modle=x"], ["bench", "modle=x"], ["simulate", "modle=x"], ["report"], ["info", "no"]],
)
def test_a_mistake_exits_with_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hookline: error: ") and captured.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hookline", "core.run"])
def test_the_exit_code_is_the_process_s(module: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "modle=x"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hookline: error: ")
