"""The log on standard error in its three forms, and how soon a command says its first line."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hookline.core.cli.command import guarded
from hookline.core.cli.logs import START, chosen_form, form_in, logging_to_stderr
from hookline.core.cli.output import say
from hookline.core.errors import ConfigError

_log = logging.getLogger("hookline")


def test_each_line_of_the_json_form_is_an_object_with_time_level_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr("json"):
        _log.info("two\nlines %d", 2, extra={"fields": {"status": 200}})
        try:
            raise ValueError("x")
        except ValueError:
            _log.exception("it failed")
        logging.getLogger("asyncio").error("another library's")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines 2", "info", "hookline")
    assert (
        first["status"] == 200 and first["time"].endswith("Z") and len(first["time"]) == len("2026-01-01T00:00:00.000Z")
    )
    assert second["level"] == "error" and "ValueError: x" in second["traceback"]
    assert third["logger"] == "asyncio"


def test_lines_of_the_text_form_have_time_and_level_and_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr("text"):
        _log.warning("a\nb\x1b[2J")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING hookline: a b\\x1b[2J")
    time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")


def test_an_error_of_the_user_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    def _fail(arguments: list[str]) -> int:
        raise ConfigError("tp=0 must be at least 1")

    assert guarded(_fail, [], "json") == 2
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["message"]) == ("error", "tp=0 must be at least 1")


def test_processes_that_are_started_meanwhile_write_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOKLINE_LOG", raising=False)
    with logging_to_stderr("json"):
        assert os.environ["HOOKLINE_LOG"] == "json" and chosen_form() == "json"
    assert "HOOKLINE_LOG" not in os.environ and chosen_form() == "plain"
    monkeypatch.setenv("HOOKLINE_LOG", "nonsense")
    assert chosen_form() == "plain"


def test_the_form_is_known_before_the_command_line_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOKLINE_LOG", raising=False)
    key = "serve.log_format"
    assert form_in(["model=qwen3", f"{key}=json"], key, "text") == "json"
    assert form_in([f"{key}=yaml"], key, "text") == "text"
    monkeypatch.setenv("HOOKLINE_LOG", "json")
    assert form_in([], key, "text") == "json"


def test_in_the_plain_form_only_a_terminal_is_told_what_a_start_is_doing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with logging_to_stderr("plain"):
        logging.getLogger(START).info("weights: 1.0 s")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        logging.getLogger(START).info("graphs: 1.0 s")
    assert capsys.readouterr().err == "hookline: graphs: 1.0 s\n"


@pytest.mark.parametrize("form", ["plain", "text", "json"])
def test_a_line_is_one_write_so_that_those_of_several_processes_stay_apart(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbuffered, as in images with PYTHONUNBUFFERED, the end of a line was a write of its own."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, isatty=lambda: False))
    with logging_to_stderr(form):
        _log.info("one")
        say("two")
    assert len([one for one in written if one]) == 2 and all(one.endswith("\n") for one in written if one)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-i", "a.jsonl", "-o", "my answers.jsonl"], "starting hookline batch -i a.jsonl -o 'my answers.jsonl'"),
        (["prompt=it's"], """starting hookline batch 'prompt=it'"'"'s'"""),
        (["--help"], None),
        (["--cfg=job", "model=qwen3"], None),
    ],
)
def test_the_first_line_is_the_command_as_one_would_type_it_and_is_not_said_by_what_starts_nothing(
    given: list[str], said: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert guarded(lambda arguments: 0, given, name="batch") == 0
    assert capsys.readouterr().err == (f"hookline: {said}\n" if said else "")


def test_serve_says_its_first_line_before_it_imports_anything_heavy() -> None:
    """Asked for within 0.3 s; what takes that long is told by imports, whatever else the machine does."""
    command = [sys.executable, "-X", "importtime", "-m", "hookline", "serve", "serve.port=0", "serve.log_format=json"]
    imported = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith("import time:"):
                break
            imported.append(line.rpartition("|")[2].strip())
        process.kill()
    assert json.loads(line)["message"] == "starting hookline serve serve.port=0 serve.log_format=json"
    assert "logging" in imported
    assert not {"torch", "numpy", "hydra", "omegaconf", "dataclasses", "asyncio", "importlib.metadata"} & {*imported}
