"""A batch over endpoints without an engine, and once with one that is killed."""

import asyncio
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")

from hookline.core.batch import command, runner
from hookline.core.batch.command import answer_lines, main
from hookline.core.batch.rows import Done, lines_of
from hookline.core.batch.settings import split_files, validate_batch
from hookline.core.errors import ConfigError, EngineError, QueueFullError
from hookline.core.plugin.host import PluginHost
from hookline.core.serve import extra
from hookline.core.testing.engine_client import FakeEngineClient


def row(number, url="/v1/completions", **body):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in url else {"prompt": f"p{number}"}
    body = {**prompt, "max_tokens": 4, **body}
    return json.dumps({"custom_id": f"row {number}", "method": "POST", "url": url, "body": body})


@pytest.fixture(scope="module")
def host():
    return PluginHost.load()


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def answer(files, client, tree=None):
    """Answer all lines of the input by a client."""
    run = validate_batch([str(one) for one in files], tree or {}, PluginHost.load())
    descriptor = os.open(run.output, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    async def work():
        with run.input.open("rb") as input:
            return await answer_lines(client, run, lines_of(input), descriptor, 1)

    try:
        return asyncio.run(work())
    finally:
        os.close(descriptor)


def test_a_missing_library_of_the_extra_is_one_line_that_names_the_command(files, capsys, monkeypatch):
    files[0].write_text(row(1) + "\n")
    monkeypatch.setattr(extra, "NEEDED", ("zmq", "no_such_library"))
    assert main([str(one) for one in files]) == 2
    said = "hookline: error: hookline batch needs no_such_library: pip install 'hookline[serve]'\n"
    assert capsys.readouterr().err == said


def answers(path):
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_responses_scores_and_ranks_are_answered_and_their_tokens_are_counted(files):
    pair = {"query": "q", "documents": ["a", "b"]}
    bodies = [("/v1/responses", {"input": "hi"}), ("/rerank", pair), ("/score", {"text_1": "a", "text_2": "b"})]
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies]
    files[0].write_text("\n".join(map(json.dumps, lines)))
    tally = answer(files, FakeEngineClient())
    found = {name: line["response"] for name, line in answers(files[1]).items()}
    assert [one["status_code"] for one in found.values()] == [200] * 3, found
    assert tally.num_tokens == found["/v1/responses"]["body"]["usage"]["output_tokens"] > 0
    assert len(found["/rerank"]["body"]["results"]) == 2


def test_rows_are_answered_as_a_server_would(files):
    files[0].write_text("\n".join([row(1), row(2, "/v1/chat/completions"), row(3, temperature=-1), "nonsense"]))
    tally = answer(files, FakeEngineClient())
    found = answers(files[1])
    assert (tally.num_answered, tally.num_failed) == (2, 2)
    whole, chat, bad = (found[f"row {number}"]["response"] for number in (1, 2, 3))
    assert whole["status_code"] == 200 and whole["body"]["choices"][0]["text"] == " Hello w"
    assert whole["request_id"] in whole["body"]["id"]
    assert chat["body"]["object"] == "chat.completion" and chat["body"]["choices"][0]["message"]["content"]
    assert bad["status_code"] == 400 and "temperature" in bad["body"]["error"]["message"]
    assert found[None]["response"] is None and found[None]["error"]["message"].startswith("line 4: not JSON")
    assert found["row 1"]["error"] is None


@pytest.mark.slow
def test_an_output_with_failures_says_so_again_and_how_they_are_tried_again(files, capsys, monkeypatch):
    files[0].write_text("\n".join([row(1), row(2, temperature=-1), "nonsense"]))
    answer(files, FakeEngineClient())
    assert main([*map(str, files)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    retry = 'to try those again, take the lines without "status_code": 200 out of it'
    assert told == f"hookline: {files[1]} has the answers of 3 lines already, 2 of them failures; {retry}"
    left = []
    monkeypatch.setattr(command, "_answer", lambda run, host, lines, *rest: left.append(list(lines)) or runner.Tally())
    lines = files[1].read_text().splitlines(keepends=True)
    for held, exit_code in ("temperature", 2), ('"status_code": 200', 0):
        lines = [line for line in lines if (held in line) == (exit_code == 0)]
        files[1].write_text("".join(lines))
        assert main([*map(str, files)]) == exit_code
    assert [[line.number for line in one] for one in left] == [[2], [2, 3]]


def test_lines_with_the_same_custom_id_are_told_once(files, capsys):
    files[0].write_text("\n".join(row(number) for number in (1, 2, 1, 2, 2)))
    assert answer(files, FakeEngineClient()).num_answered == 5
    said = (
        "hookline: warning: lines 1 and 3 have the same custom_id='row 1'; both are answered, and further ones are not"
    )
    assert capsys.readouterr().err == f"{said} told\n"
    files[1].unlink()
    files[0].write_text("\n".join(row(number) for number in range(5)))
    assert answer(files, FakeEngineClient()).num_answered == 5 and capsys.readouterr().err == ""


def test_fields_without_an_effect_are_named_in_the_responses_and_told_once(files, capsys):
    files[0].write_text("\n".join([row(1), row(2, baz=1, store=True), row(3, baz=1, store=True)]))
    assert answer(files, FakeEngineClient()).num_answered == 3
    found = {one["custom_id"]: one["response"] for one in map(json.loads, files[1].read_text().splitlines())}
    assert "headers" not in found["row 1"]
    assert found["row 2"]["headers"] == found["row 3"]["headers"] == {"X-Hookline-Ignored": "baz, store"}
    said = capsys.readouterr().err
    assert said.startswith("hookline: warning: line 2: 'baz, store' had no effect; ") and said.count("warning") == 1


def test_no_more_rows_are_read_than_are_in_flight(files):
    files[0].write_text("\n".join(row(number) for number in range(40)))
    open_at_once = []

    class Watched(FakeEngineClient):
        def stream(self, prompt, params, **options):
            found = super().stream(prompt, params, **options)
            open_at_once.append(self.num_open)
            return found

    answer(files, Watched(pause_s=0.001), {"batch": {"max_rows": 5}})
    assert max(open_at_once) == 5 and len(answers(files[1])) == 40


def test_a_full_queue_is_waited_for(files):
    files[0].write_text("\n".join(row(number) for number in range(3)))
    full = iter([True, True])

    class Full(FakeEngineClient):
        def stream(self, prompt, params, **options):
            if next(full, False):
                raise QueueFullError("engine.max_queued_requests", 1, 1, 1)
            return super().stream(prompt, params, **options)

    assert answer(files, Full()).num_answered == 3


def test_a_dead_engine_ends_the_batch_and_what_it_did_not_answer_is_not_written(files):
    files[0].write_text("\n".join(row(number) for number in range(6)))

    class Mortal(FakeEngineClient):
        def stream(self, prompt, params, **options):
            if len(self.asked) == 3:
                self.death = "the device is lost"
            return super().stream(prompt, params, **options)

    with pytest.raises(ExceptionGroup) as group:
        answer(files, Mortal(), {"batch": {"max_rows": 1}})
    assert isinstance(group.value.exceptions[0], EngineError) and "device is lost" in str(group.value.exceptions[0])
    assert len(answers(files[1])) == 3


@pytest.mark.parametrize(
    ("names", "tree", "message"),
    [
        (["in.jsonl"], {}, "a batch has two files, and 1 are given"),
        (["nowhere.jsonl", "out.jsonl"], {}, "nowhere.jsonl is not there"),
        (["/dev/zero", "out.jsonl"], {}, "/dev/zero is neither a file nor a folder"),
        (["in.jsonl", "in.jsonl"], {}, "in.jsonl is the input"),
        (
            ["in.jsonl", "out.parquet"],
            {},
            "out.parquet: the answers to a file of JSON lines are JSON lines; give a name",
        ),
        (["in.jsonl", "no/such/folder.jsonl"], {}, "cannot be written"),
        (["in.jsonl", "out.jsonl"], {"batch": {"max_rows": 0}}, "batch.max_rows=0 must be at least 1"),
        (["in.jsonl", "out.jsonl"], {"port": 3}, "unknown key 'port'"),
    ],
)
def test_a_mistake_is_one_line(names, tree, message, host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(row(1))
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_batch(names, tree, host)


@pytest.mark.parametrize(
    ("arguments", "names", "others"),
    [
        (["in.jsonl", "out.jsonl", "tp=1"], ["in.jsonl", "out.jsonl"], ["tp=1"]),
        (["-o", "out.jsonl", "tp=1", "-i", "in.jsonl"], ["in.jsonl", "out.jsonl"], ["tp=1"]),
        (["--input-file=in", "--output", "out", "--cfg", "job"], ["in", "out"], ["--cfg", "job"]),
    ],
)
def test_files_may_be_named_by_flags_as_elsewhere(arguments, names, others):
    assert split_files(arguments) == (names, others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "in.jsonl"], "-i and -o name the two files, and both of them: usage: hookline batch "),
        (["-i", "in.jsonl", "out.jsonl"], "-i and -o name the two files, and both of them: usage"),
        (["-i", "a", "--input", "b"], "--input takes one file or folder: usage"),
        (["a", "-o"], "-o takes one file or folder: usage"),
        (["a", "b", "--max-num-seqs", "4"], "there is no flag --max-num-seqs; write engine.max_num_seqs=4"),
    ],
)
def test_flags_that_name_no_two_files_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split_files(arguments)


@pytest.mark.parametrize(
    ("more", "message"),
    [(["locked.jsonl"], "is being written by another batch"), (["out.jsonl", "-m"], "leave out -m")],
)
def test_the_command_says_so_and_ends(more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(row(1))
    with (tmp_path / "locked.jsonl").open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert main(["in.jsonl", *more]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hookline: error: ") and message in last


MORTAL = """
import os, signal, sys
from hookline.core.batch import runner
from hookline.core.batch.command import main

num_left, write = iter(range(2, -1, -1)), runner.write

def written(output, line):
    write(output, line)
    if not next(num_left):
        os.kill(os.getpid(), signal.SIGKILL)

runner.write = written
sys.exit(main())
"""
"""`hookline batch`, killed as soon as three lines are written."""


@pytest.mark.slow
def test_a_batch_that_was_killed_is_finished_by_the_next_run(files, capsys):
    files[0].write_text("".join(row(number, max_tokens=12, ignore_eos=True) + "\n" for number in range(24)))
    arguments = [*map(str, files), "batch.max_rows=2"]
    first = subprocess.run([sys.executable, "-c", MORTAL, *arguments], capture_output=True, timeout=250)
    before = files[1].read_bytes()
    assert (first.returncode, before.count(b"\n")) == (-signal.SIGKILL, 3), first.stderr
    with files[1].open("ab") as file:
        file.write(b'{"id": "batch_req_23_')  # as if it had been in the middle of a line
    assert main(arguments) == 0
    assert f"has the answers of {before.count(bytes([10]))} lines already" in capsys.readouterr().err
    after = files[1].read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 24 == len(answers(files[1]))
    assert main(arguments) == 0 and files[1].read_bytes() == after


def test_a_full_disk_is_one_line_and_half_a_line_is_answered_again(files, monkeypatch):
    files[0].write_text("\n".join([row(1), row(2)]))
    write, num_written = os.write, []

    def full(descriptor, data):
        if num_written:
            raise OSError(28, "No space left on device")
        num_written.append(write(descriptor, data[:10]))
        return 10

    with monkeypatch.context() as patched:
        patched.setattr(runner.os, "write", full)
        with pytest.raises(ExceptionGroup) as caught:
            answer(files, FakeEngineClient())
    (error, *_) = caught.value.exceptions
    assert isinstance(error, ConfigError) and "cannot be written: No space left on device; what is an" in str(error)
    with files[1].open("r+b") as file:
        assert Done.read(file, files[1]).count == 0
    assert files[1].read_bytes() == b""


def test_what_rows_hold_reaches_a_terminal_escaped(capsys):
    tally = runner.Tally()
    tally.fail_at("line 1", "no \x1b[2J")
    assert command._told(SimpleNamespace(output="out\x9b.jsonl"), tally) == 2
    shown = capsys.readouterr().err
    assert "line 1: no \\x1b[2J" in shown and "out\\x9b.jsonl" in shown and shown.replace("\n", "").isprintable()
