"""README.md and the pages of docs/: their blocks of code, their commands, and a command run in this process."""

import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from hookline.__main__ import main
from hookline.core import COMMANDS

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    body: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that name a language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [Block(language, body) for language, body in found]


def commands(page: Path) -> list[str]:
    """What a page has a reader type: the lines of its bash blocks, and of console blocks those behind a prompt."""
    found = []
    for language, body in blocks(page):
        if language == "bash":
            found += [line for line in body.splitlines() if line]
        if language == "console":
            found += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    return found


def run_here(command: str, monkeypatch) -> int:
    """Run `[NAME=value …] hookline X …`, or `python -m core.X …`, here, without anything on its standard input."""
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    words = command_of(words)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return main(words)


def command_of(words: list[str]) -> list[str]:
    """The command and its arguments, of the words of a line that calls Hookline in either way."""
    if words[0] == "hookline":
        given = words[1:]
    else:
        assert words[:2] == ["python", "-m"], words
        given = [words[2].removeprefix("core."), *words[3:]]
    assert given[0] in COMMANDS, words
    return given
