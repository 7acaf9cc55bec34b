"""What commands share: how one ends when nobody reads its output."""

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.cli.command import guarded


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "--json"],
        ["new", "scheduler", "mine"],
        ["report", "--help"],
        ["--help"],
        ["--version"],
        ["--completion", "bash"],
        ["--complete", "ru"],
    ],
)
def test_a_command_whose_reader_left_ends_quietly(tmp_path: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hookline", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environ = {**kept, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with os.fdopen(writer) as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path, env=environ, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_of_a_command_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert guarded(lambda arguments: 0, []) == 0
    assert os.environ["OMP_WAIT_POLICY"] == expected


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_a_command_opens_takes_no_standard_file_s_number(closed) -> None:
    """A child process would find its own standard file in the place of a socket that it was given."""
    code = (
        "import os, sys; from hookline.core.cli.command import guarded; "
        "sys.exit(guarded(lambda arguments: os.open(os.devnull, os.O_RDONLY), []))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(command, env=environ, check=False).returncode > 2


def test_what_a_command_says_of_itself_is_not_among_the_results_where_standard_error_is_closed() -> None:
    code = (
        "import logging; from hookline.core.cli.command import guarded; from hookline.core.cli.output import say; "
        "log = logging.getLogger('hookline'); "
        "guarded(lambda arguments: (say('one'), log.warning('two'), print('result'), 0)[-1], [])"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    assert subprocess.run(command, env=environ, check=False, stdout=subprocess.PIPE, text=True).stdout == "result\n"


@pytest.mark.parametrize(
    ("name", "argument"),
    [("report", "{}"), ("run", "model.checkpoint={}"), ("run", "output={}.jsonl"), ("batch", "{}")],
)
def test_a_name_that_no_file_can_have_is_told_in_one_line(
    name: str, argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module(f"hookline.core.{name}.command")
    arguments = [argument.format(tmp_path / ("x" * 300))]
    (tmp_path / "in.jsonl").write_text("{}\n")
    arguments += {"batch": [str(tmp_path / "in.jsonl")], "run": ["prompt=a"]}.get(name, [])
    assert command.main(arguments) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("hookline: error: ") and "File name too long" in told[-1]
    assert not any("Traceback" in line for line in told)


@pytest.mark.parametrize(
    ("number", "file", "told"),
    [
        (errno.ENOSPC, None, "writing a file: No space left on device"),
        (errno.EACCES, "/x/config.json", "/x/config.json: Permission denied"),
        (errno.EROFS, "/x", "/x: Read-only file system"),
    ],
)
def test_a_full_disk_and_a_file_that_cannot_be_opened_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], number: int, file: str | None, told: str
) -> None:
    def run(_: list[str]) -> int:
        raise OSError(number, os.strerror(number), file)

    assert guarded(run, []) == 2
    assert capsys.readouterr().err == f"hookline: error: {told}\n"


def test_a_fault_of_another_kind_keeps_its_traceback() -> None:
    def run(_: list[str]) -> int:
        raise OSError(errno.EBADF, "ours")

    with pytest.raises(OSError, match="ours"):
        guarded(run, [])
