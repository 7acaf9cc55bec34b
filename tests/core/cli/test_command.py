"""What commands share: how one ends when nobody reads its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [["info", "--json"], ["new", "scheduler", "mine"], ["report", "--help"]])
def test_a_command_whose_reader_left_ends_quietly(tmp_path: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", f"hookline.core.{arguments[0]}", *arguments[1:]]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environ = {**kept, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with os.fdopen(writer) as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path, env=environ, check=False)
    assert (done.returncode, done.stderr) == (141, b"")
