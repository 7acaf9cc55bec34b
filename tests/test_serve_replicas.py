"""A server with two replicas whose parts are killed: a dead replica is felt by its own streams alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import httpx
import pytest

from tests.serving import Server, Stream, server, streams_of, wait_for

pytestmark = pytest.mark.slow


def engines_of(running: Server) -> list[int]:
    return sorted(pid for pid, target in running.children().items() if "engine_main" in target)


def bodies(count: int, num_tokens: int) -> list[dict[str, object]]:
    """Prompts too short for a cache, which take turns."""
    return [
        {"prompt": f"def f{one}(", "max_tokens": num_tokens, "ignore_eos": True, "seed": one} for one in range(count)
    ]


def states(running: Server) -> list[str]:
    response = running.get("/health")
    assert response.status_code == 200
    return list(response.json()["replicas"])


def test_a_killed_replica_is_felt_by_its_own_streams_alone_and_comes_back() -> None:
    killed: list[int] = []

    def kill(_: list[Stream]) -> None:
        killed.append(engines_of(running)[0])
        os.kill(killed[0], signal.SIGKILL)
        wait_for(lambda: sorted(states(running)) == ["dead", "ready"])
        for body in bodies(4, 2):  # nobody is sent to the dead one
            assert httpx.post(running.url + "/v1/completions", json=body).status_code == 200

    arguments = ("serve.replicas=2", "serve.restart=true", "engine.num_blocks=400", "engine.max_model_len=2048")
    with server(*arguments) as running:
        streams = asyncio.run(streams_of(running, bodies(8, 600), kill))
        assert sum(one.is_whole for one in streams) == 4  # those of the other replica
        for one in streams:
            assert one.is_done and not one.is_broken and one.is_whole != (one.error is not None), one
        wait_for(lambda: states(running) == ["ready", "ready"], 60)
        assert len(engines_of(running)) == 2 and killed[0] not in engines_of(running)
        metrics = running.get("/metrics").text
        assert all(f'hookline_replica_up{{replica="{one}"}} 1.0' in metrics for one in (0, 1))
        assert len(re.findall(r"hookline_num_requests_running\{[^}]*replica=", metrics)) == 2

        streams = asyncio.run(streams_of(running, bodies(8, 200), lambda _: running.process.terminate()))
        assert all(one.is_whole for one in streams)  # both drain
        assert running.process.wait(60) == 0
        assert running.left_over() == []


@pytest.mark.nightly
def test_a_front_end_that_comes_later_knows_the_dead_and_without_replicas_the_server_is_unhealthy() -> None:
    with server("serve.replicas=2", "serve.processes=1", mock={"step_s": 0.005}) as running:
        first, second = engines_of(running)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: sorted(states(running)) == ["dead", "ready"])
        front = running.pid_of("front_main")
        os.kill(front, signal.SIGKILL)
        wait_for(lambda: front not in running.children())
        assert wait_for(lambda: sorted(states(running)) == ["dead", "ready"])
        streams = asyncio.run(streams_of(running, bodies(4, 20)))
        assert all(one.is_whole for one in streams)
        (failed,) = asyncio.run(streams_of(running, bodies(1, 1900), lambda _: os.kill(second, signal.SIGKILL)))
        assert failed.error and failed.is_done
        assert running.get("/health").status_code == 503
        assert httpx.post(running.url + "/v1/completions", json=bodies(1, 5)[0]).status_code == 503
        assert running.stop() == 0
        assert running.left_over() == []
