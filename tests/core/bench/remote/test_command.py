"""A benchmark of a server from outside, against a server that streams made-up tokens over real sockets."""

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("httptools", reason="needs the extra: pip install hookline[serve]")

from hookline.core.bench.command import main, validate_bench
from hookline.core.bench.files import read_recording
from hookline.core.bench.recorder import token_times
from hookline.core.bench.remote.command import NoServer, serve_load
from hookline.core.bench.remote.recording import failures, figures
from hookline.core.bench.remote.settings import Address, ClientConfig
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.errors import ConfigError, RequestError
from hookline.core.plugin.host import PluginHost
from hookline.core.report.command import main as report
from hookline.core.simulate.command import measure as simulate
from hookline.core.sweep.results import append_line
from tests.core.bench.remote.fake_server import FakeServer

FOUR = WorkloadConfig(num_prompts=4, prompt_len=(5, 9), output_len=(3, 6))
WARM_UP = None
"""The fault of the first request: none."""


def serve(server, workload=FOUR, repeats=1, **client):
    def load(vocab_size, repetition):
        return draw_load(workload, vocab_size, repetition)

    return serve_load(Address.of(server.url), ClientConfig(**client), workload, load, repeats)


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.delenv("HOOKLINE_API_KEY", raising=False)


@pytest.mark.slow
def test_every_request_of_the_load_arrives_as_it_was_drawn(quiet):
    with FakeServer() as server:
        recording = serve(server).recording
    drawn = draw_load(FOUR, 500).requests
    sent = server.bodies[1:]  # the first warms up; the others come at once on connections of their own, in any order
    sizes = sorted((len(request.tokens), request.params.max_tokens) for request in drawn)
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in sent) == sizes
    assert all(body["stream"] and body["ignore_eos"] and body["stream_options"]["include_usage"] for body in sent)
    assert all(max(body["prompt"]) < 500 for body in sent)  # the card says how many there are
    assert [one.output_tokens for one in recording.requests] == [request.params.max_tokens for request in drawn]


@pytest.mark.slow
def test_two_runs_send_other_token_ids(quiet):
    with FakeServer() as server:
        serve(server)
        serve(server)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 10 and not set(prompts[1:5]) & set(prompts[6:])  # each run warms up first


@pytest.mark.slow
def test_an_open_loop_does_not_wait_for_answers(quiet):
    workload = WorkloadConfig(num_prompts=12, prompt_len=(4, 4), output_len=(10, 10), request_rate=200)
    with FakeServer(together=12) as server:
        recording = serve(server, workload).recording
    assert recording.requests[-1].start_s < min(one.finish_s for one in recording.requests)
    assert recording.steps["running"].max() == 12


@pytest.mark.slow
@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("usage", [True, False])
def test_tokens_are_counted_by_usage_where_there_is_one(quiet, burst, usage):
    workload = WorkloadConfig(num_prompts=2, prompt_len=(4, 4), output_len=(10, 10))
    with FakeServer(burst=burst, usage=usage) as server:
        recording = serve(server, workload).recording
    expected = 10 if usage or burst == 1 else 3  # chunks
    assert [one.output_tokens for one in recording.requests] == [expected, expected]
    times_s, starts = token_times(recording)
    assert list(starts) == [0, expected, 2 * expected]
    assert times_s.min() >= 0


@pytest.mark.slow
def test_no_request_is_sent_before_it_is_due(quiet, monkeypatch):
    begun = time.perf_counter()
    slow = SimpleNamespace(perf_counter=lambda: begun + (time.perf_counter() - begun) / 2)
    monkeypatch.setattr("hookline.core.bench.remote.driver.time", slow)  # beside it, the loop's timers are early
    with FakeServer() as server:
        recording = serve(server, WorkloadConfig(num_prompts=2, prompt_len=(4, 4), output_len=(3, 3))).recording
    assert token_times(recording)[0].min() >= 0
    assert all(one.start_s >= one.arrival_s for one in recording.requests)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", ["ids", "text", "chat"])
def test_a_conversation_goes_on_with_what_the_server_said(quiet, prompts):
    workload = WorkloadConfig(num_prompts=1, prompt_len=(5, 5), output_len=(3, 3), turns=(2, 2))
    with FakeServer() as server:
        recording = serve(server, workload, prompts=prompts).recording
    first, second = server.bodies[1:]
    assert recording.requests[1].arrival_s >= recording.requests[0].finish_s
    if prompts == "ids":
        assert second["prompt"][:8] == [*first["prompt"], 0, 1, 2] and len(second["prompt"]) == 13
    elif prompts == "text":
        assert second["prompt"].startswith(first["prompt"] + " t0 t1 t2 ")
    else:
        assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": " t0 t1 t2"}]
        assert server.paths[-1] == "/v1/chat/completions"


@pytest.mark.slow
def test_a_conversation_by_ids_needs_a_server_that_tells_them(quiet, capsys):
    workload = WorkloadConfig(num_prompts=2, prompt_len=(5, 5), output_len=(3, 3), turns=(2, 2))
    with FakeServer(ids=False) as server:
        recording = serve(server, workload).recording
    assert "take client.prompts=text or chat" in recording.requests[1].error
    assert "2 of 4 requests failed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (429, "HTTP 429"),
        (400, "HTTP 400"),
        ("hang up", "the connection closed before the end of the answer"),
        ("half", "the connection closed before the end of the answer"),
        ("error", "error in the stream"),
        ("silence", "no end within client.timeout_s=1"),
    ],
)
def test_a_failure_is_counted_and_named_and_the_others_run_on(quiet, capsys, fault, kind):
    with FakeServer(faults=[WARM_UP, None, fault]) as server:
        served = serve(server, timeout_s=1.0 if fault == "silence" else 60.0)
    metrics = figures(served.recording, Slo())
    assert metrics["refused"] == 1 and served.client["failures"] == {kind: 1}
    assert sum(one.first_token_s is not None for one in served.recording.requests) == 3
    assert f"1 of 4 requests failed: {kind}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_dies_fails_what_is_left(quiet):
    workload = WorkloadConfig(num_prompts=1, prompt_len=(4, 4), output_len=(2, 2), turns=(3, 3))
    with FakeServer() as server:
        whole = server._one

        async def one(reader, writer):
            goes_on = await whole(reader, writer)
            if len(server.bodies) == 2:  # the warm-up and the first turn
                server.server.close()
                return False
            return goes_on

        server._one = one
        recording = serve(server, workload).recording
    first, second, third = (one.error for one in recording.requests)
    assert first is None and second.startswith("no connection: ") and third == "not sent: the turn before failed"
    assert set(failures(recording)) == {"no connection", "not sent"}


@pytest.mark.slow
def test_a_connection_that_the_server_closed_meanwhile_is_replaced(quiet):
    workload = WorkloadConfig(num_prompts=2, prompt_len=(4, 4), output_len=(2, 2), request_rate=50)
    with FakeServer() as server:
        whole = server._one

        async def one(reader, writer):
            await whole(reader, writer)
            return False  # though the answer said nothing of it

        server._one = one
        recording = serve(server, workload).recording
    assert [one.error for one in recording.requests] == [None, None]


def test_a_run_without_one_served_request_is_an_error(quiet):
    with (
        FakeServer(faults=[WARM_UP, 503, 503, 503, 503]) as server,
        pytest.raises(RequestError, match="every request of the workload failed: HTTP 503: status 503"),
    ):
        serve(server)


@pytest.mark.slow
def test_answers_of_another_length_make_a_warning(quiet, capsys):
    with FakeServer(short=1) as server:
        serve(server)
    assert "does the server know ignore_eos?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_key_comes_from_the_environment_and_is_not_shown(monkeypatch, capsys):
    with FakeServer(api_key="s3cret") as server:
        monkeypatch.delenv("MY_KEY", raising=False)
        with pytest.raises(NoServer, match="the environment's MY_KEY"):
            serve(server, api_key_env="MY_KEY")
        monkeypatch.setenv("MY_KEY", "s3cret")
        assert serve(server, api_key_env="MY_KEY").recording.requests[0].error is None
        monkeypatch.setenv("MY_KEY", "s3cret\r\nX: y")
        with pytest.raises(ConfigError, match="MY_KEY is no API key") as error:
            serve(server, api_key_env="MY_KEY")
    assert "s3cret" not in str(error.value) + capsys.readouterr().err


@pytest.mark.slow
def test_a_body_can_be_changed_member_by_member(quiet):
    with FakeServer() as server:
        serve(server, body={"ignore_eos": None, "cache_salt": "me"})
    assert "ignore_eos" not in server.bodies[1] and server.bodies[1]["cache_salt"] == "me"


def test_nobody_at_the_address_is_one_line(quiet, capsys):
    with FakeServer() as server:
        pass
    assert main([f"url={server.url}", "workload=smoke"]) == 2
    assert capsys.readouterr().err.startswith("hookline: error: the server does not answer: no connection")


@pytest.fixture(scope="module")
def host():
    return PluginHost.load()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000' must be http://host:port"),
        ({"url": "http://u:p@h:1"}, "must be http://host:port"),
        ({"url": "http://h:1/?x=y"}, "must end with the server's path"),
        ({"url": "http://h:1", "scheduler": "chunked"}, "scheduler has no effect beside url="),
        ({"url": "http://h:1", "engine": {"max_num_seqs": 3}}, "engine has no effect beside url="),
        ({"url": "http://h:1", "client": {"prompts": "words"}}, "client.prompts='words' is not one of ids, text, chat"),
        ({"client": {"prompts": "chat"}}, "client has no effect without url="),
    ],
)
def test_a_mistake_is_one_line(tree, message, host):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_bench(tree, host)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h", Address("h", 80)),
        ("https://h/v1/", Address("h", 443, True)),
        ("http://[::1]:8000/proxy/v1", Address("::1", 8000, False, "/proxy")),
    ],
)
def test_an_address_is_with_or_without_v1(url, address):
    assert Address.of(url) == address


@pytest.mark.slow
def test_a_run_writes_what_every_benchmark_writes_and_never_imports_torch(quiet, tmp_path):
    records, results = tmp_path / "sweep" / "0", tmp_path / "one.jsonl"
    with FakeServer(gap_s=0.001) as server:
        arguments = [f"url={server.url}", "workload=smoke", f"records={records}", f"result={results}", "slo.ttft_s=5"]
        code = (
            "import sys; from hookline.core.bench.command import main, validate_bench\n"
            "assert main(sys.argv[1:]) == 0 and not {'torch', 'transformers'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "goodput_s" in done.stdout and "ttft_s" in done.stdout
    record = json.loads(results.read_text())
    assert record["status"] == "done" and record["server"]["model"] == "fake" and record["config"]["url"] == server.url
    assert record["metrics"]["itl_s"]["p50"] >= 0.001 and record["metrics"]["pool_usage"] is None
    assert len(read_recording(records).requests) == 8
    line = {**record, "job": 0, "folder": "0", "key": "x", "overrides": arguments, "exit_code": 0, "wall_s": 1.0}
    append_line(tmp_path / "sweep" / "results.jsonl", {**line, "started_at": "2026-11-22T00:00:00+00:00"})
    assert report([str(tmp_path / "sweep"), "png=false"]) == 0
    assert server.url in (tmp_path / "sweep" / "index.html").read_text()


@pytest.mark.slow
def test_what_requests_say_of_themselves_is_sent_and_nothing_else(quiet):
    classes = ({"tags": {"tenant": "acme"}, "priority": -1},)
    with FakeServer() as server:
        recording = serve(server, WorkloadConfig(num_prompts=2, output_len=(2, 2), classes=classes)).recording
        serve(server, FOUR)
    assert server.bodies[1]["tags"]["tenant"] == "acme" and server.bodies[1]["priority"] == -1
    assert recording.requests[0].tags["tenant"] == "acme"
    assert not {"tags", "priority", "deadline_s", "cache_salt"} & set(server.bodies[-1])


def test_a_fault_of_the_client_ends_the_benchmark(quiet, monkeypatch):
    monkeypatch.setattr("hookline.core.bench.remote.driver.Bodies.make", lambda *_: 1 / 0)
    with FakeServer() as server, pytest.raises(ZeroDivisionError):
        serve(server)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "warns"), [(100.0, True), (None, False)])
def test_a_client_that_sends_late_says_so_in_an_open_loop(quiet, monkeypatch, capsys, rate, warns):
    monkeypatch.setattr("hookline.core.bench.remote.command.LATE_S", -1.0 if warns else 0.0)
    monkeypatch.setattr("hookline.core.bench.remote.command.BUSY_PERCENT", 1000)
    with FakeServer() as server:
        serve(server, WorkloadConfig(num_prompts=3, prompt_len=(4, 4), output_len=(2, 2), request_rate=rate))
    assert ("the client was the bottleneck" in capsys.readouterr().err) is warns


def test_a_simulation_asks_no_server(host):
    with pytest.raises(ConfigError, match="url has no effect in a simulation"):
        simulate({"url": "http://h:1"}, host)
