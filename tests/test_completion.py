"""Completion in the shells that it is for, and the words that it offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.__main__ import main
from hookline.core import COMMANDS
from hookline.core.info.completion import SCRIPTS, candidates

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("command", "word", "expected"),
    [
        ("s", "s", ["serve", "simulate"]),
        ("serve", "serve.por", ["serve.port="]),
        ("serve", "sched", ["scheduler="]),
        ("run", "scheduler=ch", ["scheduler=chunked"]),
        ("batch", "batch.max_r", ["batch.max_rows="]),
        ("run", "serve.por", []),
        ("run", "model=qwen3_0", ["model=qwen3_0_6b"]),
        ("serve", "model=au", ["model=auto"]),
        ("run", "scheduler.water", ["scheduler.watermark="]),
        ("bench", "workload=smo", ["workload=smoke"]),
        ("run", "experiment=lat", ["experiment=latency"]),
        ("run", "experim", ["experiment="]),
        ("info", "qwen3_0", ["qwen3_0_6b"]),
        ("info", "longest_f", ["longest_first"]),
        ("info", "engine.block_s", ["engine.block_size"]),
        ("new", "sch", ["scheduler"]),
        ("warm", "car", ["card="]),
        ("nothing", "x", []),
    ],
)
def test_commands_keys_and_options_are_completed(command: str, word: str, expected: list[str]) -> None:
    assert candidates(command, word, COMMANDS) == expected


def test_another_shell_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 2
    assert "--completion takes one of bash, zsh, fish" in capsys.readouterr().err


ASKS = {
    "bash": 'eval "$(hookline --completion bash)"; compopt() { :; }; COMP_WORDS=(hookline serve serve.por); '
    'COMP_CWORD=2; COMP_LINE="hookline serve serve.por"; COMP_POINT=${#COMP_LINE}; _hookline; echo "${COMPREPLY[@]}"',
    "zsh": 'compdef() { :; }; compadd() { echo "${@[4,-1]}"; }; '
    'eval "$(hookline --completion zsh)"; words=(hookline serve serve.por); PREFIX=serve.por; _hookline',
    "fish": 'hookline --completion fish | source; complete -C "hookline serve serve.por"',
}
"""What each shell does when someone types `hookline serve serve.por` and a tab, and prints what it found."""


@pytest.mark.parametrize("shell", ASKS)
def test_each_shell_offers_the_key(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command = tmp_path / "hookline"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hookline "$@"\n')
    command.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", ASKS[shell]], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["serve.port="], done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_a_path_behind_a_key() -> None:
    fakes = "compdef() { :; }; hookline() { :; }; compset() { PREFIX=${PREFIX#*=}; }; _files() { echo $PREFIX; }; "
    ask = "; words=(hookline run output=/tmp/a); PREFIX=output=/tmp/a; _hookline"
    done = subprocess.run(["zsh", "-fc", f"{fakes}{SCRIPTS['zsh']}{ask}"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "/tmp/a\n", done.stderr
