"""README.md and the pages of docs/: their blocks of code, their commands, and a command run in this process."""

import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from hookline.core.bench import command as bench
from hookline.core.info import command as info
from hookline.core.new import command as new
from hookline.core.report import command as report
from hookline.core.run import command as run
from hookline.core.simulate import command as simulate

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "core.run": run.main,
    "core.bench": bench.main,
    "core.info": info.main,
    "core.new": new.main,
    "core.report": report.main,
    "core.simulate": simulate.main,
}


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
    """Run `[NAME=value …] python -m core.X …` in this process, without anything on its standard input."""
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words[:2] == ["python", "-m"], command
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return PROGRAMS[words[2]](words[3:])
