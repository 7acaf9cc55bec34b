"""What a server's clients see when parts of it are killed, and that nothing of it is left; its end in good order.

The engine is made up, but for the test of its ranks; processes, sockets and the step loop are real.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from hookline.core.serve.processes.server_process import LOOK_S, STOPPED_LOOKS
from tests.serving import Server, Stream, server, streams_of, wait_for

pytestmark = pytest.mark.slow
LONG = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True}
MOST_S = 5.0
"""After a kill, every client hears of it within this."""


def fronts_of(running: Server) -> set[int]:
    return {pid for pid, target in running.children().items() if "front_main" in target}


def assert_told(streams: list[Stream], killed_s: float, limit_s: float = MOST_S) -> None:
    for stream in streams:
        assert stream.ended_s - killed_s < limit_s
        assert stream.error and stream.is_done and not stream.is_broken, stream


def test_killed_parts_are_replaced_and_a_sigterm_under_load_loses_nothing() -> None:
    killed_s = 0.0

    def kill(what: str) -> None:
        nonlocal killed_s
        os.kill(running.pid_of(what), signal.SIGKILL)
        killed_s = time.monotonic()

    with server("serve.processes=2", "serve.restart=true", mock={"step_s": 0.005}) as running:
        fronts = fronts_of(running)
        body = {**LONG, "max_tokens": 150}
        longer = {**LONG, "max_tokens": 400}  # not all sent before the kill, though this process reads them late
        streams = asyncio.run(streams_of(running, [longer] * 16, lambda _: kill("front_main")))
        broken = [one for one in streams if one.is_broken]
        assert broken and all(one.ended_s - killed_s < MOST_S for one in broken)
        assert all(one.is_whole for one in streams if not one.is_broken)  # the other front end's do not notice
        wait_for(lambda: running.get("/load").json()["num_running"] == 0)
        wait_for(lambda: fronts_of(running) - fronts)

        streams = asyncio.run(streams_of(running, [LONG] * 8, lambda _: kill("engine_main")))
        assert_told(streams, killed_s)
        wait_for(lambda: all(running.get("/health").status_code == 200 for _ in range(8)))

        streams = asyncio.run(streams_of(running, [body] * 16, lambda _: running.process.terminate()))
        assert all(one.is_whole for one in streams)
        assert running.process.wait(60) == 0
        assert running.left_over() == []


def test_a_killed_supervisor_takes_everything_with_it() -> None:
    with server("serve.processes=2", mock={"step_s": 0.01}) as running:
        killed_s = []

        def kill(_: list[Stream]) -> None:
            running.process.kill()
            killed_s.append(time.monotonic())

        streams = asyncio.run(streams_of(running, [LONG] * 8, kill))
        assert_told(streams, killed_s[0])
        wait_for(lambda: running.left_over() == [], MOST_S)


def test_what_is_not_done_when_the_drain_is_over_ends_with_an_error() -> None:
    with server("serve.processes=1", "serve.drain_s=0.3", mock={"step_s": 0.01}) as running:
        bodies = [LONG, {**LONG, "max_tokens": 2}]
        long, short = asyncio.run(streams_of(running, bodies, lambda _: running.process.terminate()))
        assert short.is_whole
        assert long.error == "the server is stopping" and long.is_done
        assert running.process.wait(60) == 0
        assert running.left_over() == []


def test_a_client_that_leaves_frees_its_blocks_and_faults_are_told() -> None:
    mock = {"step_s": 0.005, "fail_after": 300}
    with server("serve.processes=1", "serve.max_requests=8", mock=mock) as running:
        leave_alone(running)
        refuse_too_many(running)
        (failed,) = asyncio.run(streams_of(running, [LONG]))  # a step that raises ends its requests, not the engine
        assert failed.error and failed.is_done
        wait_for(lambda: "asked to fail" in "".join(running.errors))  # a line takes a way of its own
        assert running.get("/health").status_code == 200


def test_a_killed_engine_ends_every_stream_and_leaves_the_server_unhealthy() -> None:
    with server("serve.processes=1", mock={"step_s": 0.01}) as running:
        engine, killed_s = running.pid_of("engine_main"), []

        def kill(_: list[Stream]) -> None:
            os.kill(engine, signal.SIGKILL)
            killed_s.append(time.monotonic())

        streams = asyncio.run(streams_of(running, [LONG] * 8, kill))
        assert_told(streams, killed_s[0])
        assert [running.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [503] * 3
        assert httpx.post(running.url + "/v1/completions", json=LONG).status_code == 503
        assert running.stop() == 0
        assert "was killed by SIGKILL" in "".join(running.errors)
        assert running.left_over() == []


def test_a_stopped_engine_ends_every_stream_and_leaves_the_server_unhealthy() -> None:
    with server("serve.processes=1", mock={"step_s": 0.01}) as running:
        engine, stopped_s = running.pid_of("engine_main"), []

        def stop(_: list[Stream]) -> None:
            os.kill(engine, signal.SIGSTOP)
            stopped_s.append(time.monotonic())

        streams = asyncio.run(streams_of(running, [LONG] * 4, stop))
        assert STOPPED_LOOKS * LOOK_S < MOST_S
        assert_told(streams, stopped_s[0], 2 * MOST_S)  # which ten timers and this process's own reading are part of
        assert running.get("/health").status_code == 503
        assert "its process was stopped for 4 s, as by SIGSTOP" in "".join(running.errors)
        assert running.stop() == 0
        assert running.left_over() == []


def leave_alone(running: Server) -> None:
    """A client leaves in the middle of its stream."""

    def load(key: str) -> int:
        return int(running.get("/load").json()[key])

    with httpx.stream("POST", running.url + "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()  # kept, or the connection is closed
        next(lines)
        wait_for(lambda: load("num_running") == 1)
    # Soon: it would end by itself after 9 s.
    wait_for(lambda: load("num_running") == 0 and load("num_free_blocks") == load("num_blocks"), MOST_S)


def refuse_too_many(running: Server) -> None:
    """More completions than serve.max_requests, beside others and in one request."""
    url = running.url + "/v1/completions"
    with httpx.stream("POST", url, json={**LONG, "n": 6, "stream": True}) as stream:
        lines = stream.iter_lines()  # kept, or the connection is closed
        next(lines)
        refused = httpx.post(url, json={**LONG, "n": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    never = httpx.post(url, json={**LONG, "n": 9})
    assert never.status_code == 400 and "retry-after" not in never.headers


def test_a_killed_rank_ends_every_stream_and_leaves_nothing() -> None:
    with server("serve.processes=1", "tp=2", "engine.num_blocks=400") as running:
        killed_s = []

        def kill(_: list[Stream]) -> None:
            os.kill(next(iter(running.ranks())), signal.SIGKILL)
            killed_s.append(time.monotonic())

        streams = asyncio.run(streams_of(running, [{**LONG, "max_tokens": 1500}] * 2, kill))
        assert_told(streams, killed_s[0])
        wait_for(lambda: running.get("/health").status_code == 503, MOST_S)
        assert running.stop() == 0
        assert running.left_over() == []


def test_a_drain_says_how_many_requests_are_left_and_how_to_force_it() -> None:
    with server("serve.processes=1", mock={"step_s": 0.05}) as running:

        def _interrupt(_: object) -> None:
            running.process.send_signal(signal.SIGINT)

        def _force() -> int:
            wait_for(lambda: [line for line in running.errors if "draining: 1 request\n" in line])
            return running.stop(signal.SIGINT)

        async def _run() -> int:
            streams = asyncio.create_task(streams_of(running, [LONG], _interrupt))
            code = await asyncio.to_thread(_force)
            assert_told(await streams, time.monotonic())
            return code

        assert asyncio.run(_run()) == 0
        log = "".join(running.errors)
        assert "stopping: requests that run have up to 30 s (serve.drain_s); Ctrl-C again ends them at once" in log
        assert "ending at once: requests that still run end with an error" in log
