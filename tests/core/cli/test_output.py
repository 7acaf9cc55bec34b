"""Standard output and error of a command: full, closed, in another encoding, and with text that would act on a
terminal.
"""

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from hookline.core.cli.command import guarded
from hookline.core.cli.output import checked_output, say
from hookline.core.errors import HooklineError


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullWhenFlushed(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printing(text: str):
    def run(arguments: list[str]) -> int:
        print(text)
        return 0

    return run


@pytest.mark.parametrize(
    ("stream", "words"), [(Full(), "cannot be written: No space left on device"), (None, "is closed; redirect it")]
)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(monkeypatch, capsys, stream, words) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    assert guarded(printing("a"), []) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_a_full_disk_that_shows_when_the_stream_is_flushed_counts_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdout", FullWhenFlushed())
    assert guarded(printing("a"), []) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert guarded(printing("\xe9 \ud800"), []) == 0
    assert raw.getvalue() == b"\\xe9 \\ud800\n"


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), "\\x1b[31mred\ta\n"), (io.StringIO(), "\x1b[31mred\ta\n")])
def test_a_terminal_gets_no_control_characters_and_a_file_gets_the_text_as_it_is(monkeypatch, stream, shown) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    with checked_output():
        print("\x1b[31mred\ta")
    assert stream.getvalue() == shown


def test_an_error_is_one_line_of_bounded_length_without_control_characters(capsys) -> None:
    def run(arguments: list[str]) -> int:
        raise HooklineError("a\nb \x1b]0;title\x07 " + "x" * 1_000_000)

    assert guarded(run, []) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 5000
    assert "\x1b" not in said and "a b \\x1b]0;title\\x07" in said


def test_saying_something_to_a_closed_standard_error_is_no_error(monkeypatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say("nobody hears it")


def test_nobody_but_say_writes_a_command_s_own_lines() -> None:
    """What they quote comes from requests, files and servers, and is escaped there."""
    core = Path(__file__).parents[3] / "core"
    writers = {path.relative_to(core).as_posix() for path in core.rglob("*.py") if '"hookline: ' in path.read_text()}
    known = {"cli/output.py", "cli/logs.py", "data/generate.py"}  # what formats them; the dying word on Ray
    assert {path for path in writers if "new/templates" not in path} <= {*known, "sweep/job_status.py"}
