"""What the client of several replicas hands on to the one that it chose, and what it says of all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hookline.core.errors import EngineError
from hookline.core.pooling_params import PoolingParams
from hookline.core.serve.processes.messages import LoadReport, Submit
from tests.core.serve.processes.test_replicas import LONG, Fakes, answering, failing, run


def test_a_prompt_that_is_pooled_goes_to_whoever_is_least_busy() -> None:
    """It finds nothing in a cache."""

    async def talk() -> None:
        fakes = Fakes()
        for _ in range(6):
            fakes.stream(pooling=PoolingParams())
        assert fakes.prompts() == [3, 3]
        asked = [one for sent in fakes.sent for one in sent if isinstance(one, Submit)]
        assert all(one.pooling is not None for one in asked)
        await fakes.client.aclose()

    run(talk)


def test_what_is_asked_of_a_request_reaches_its_replica_but_its_session() -> None:
    async def talk() -> None:
        fakes = Fakes()
        fakes.stream(cache_salt="mine", session="me", priority=3, tags={"who": "x"}, timeout_s=9.0, deadline_s=5.0)
        (asked,) = [one for sent in fakes.sent for one in sent if isinstance(one, Submit)]
        expected = {"priority": 3, "tags": {"who": "x"}, "deadline_s": 5.0, "cache_salt": "mine", "timeout_s": 9.0}
        assert asked.options == expected and asked.pooling is None
        await fakes.client.aclose()

    run(talk)


def test_requests_are_sent_to_another_replica_when_one_has_as_many_as_it_may() -> None:
    async def talk() -> None:
        fakes = Fakes(max_requests=4)
        for _ in range(7):
            fakes.stream(LONG)
        assert sorted(fakes.prompts()) == [3, 4]
        await fakes.client.aclose()

    run(talk)


def test_each_replica_has_its_own_state_and_all_have_the_model_s_facts() -> None:
    async def talk() -> None:
        fakes = Fakes()
        assert fakes.client.facts is fakes.clients[0].facts
        fakes.clients[1].receive([LoadReport((7, 0, 6, 10, 1.0, 2.5))])
        fakes.clients[1].break_off("it was killed")
        assert [(one.death, one.load.num_running) for one in fakes.client.replicas] == [
            (None, 0),
            ("it was killed", fakes.clients[1].load().num_running),
        ]
        assert fakes.client.is_ready and fakes.client.death is None
        await fakes.client.aclose()

    run(talk)


def test_without_a_living_replica_the_first_one_s_death_is_told() -> None:
    async def talk() -> None:
        fakes = Fakes()
        for number, one in enumerate(fakes.clients):
            one.break_off(f"death {number}")
            one.metrics = failing  # type: ignore[method-assign]
        for asked in (lambda: fakes.stream(), lambda: asyncio.ensure_future(fakes.client.metrics())):
            with pytest.raises(EngineError, match=r"^death 0$"):
                found = asked()
                await found
        await fakes.client.aclose()

    run(talk)


def test_metrics_say_of_each_replica_whether_it_answers() -> None:
    async def talk() -> None:
        fakes = Fakes()
        for one in fakes.clients:
            one.metrics = answering("# a remark of a collector\na 1\n")
        up = "# HELP hookline_replica_up Whether this replica's engine answers.\n# TYPE hookline_replica_up gauge\n"
        states = 'hookline_replica_up{replica="0"} 1.0\nhookline_replica_up{replica="1"} 1.0\n'
        text = await fakes.client.metrics()
        assert text.startswith(up + states) and text.endswith('a{replica="0"} 1.0\na{replica="1"} 1.0\n')
        for one in fakes.clients:
            one.metrics = failing  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"^no replica tells its metrics$"):
            await fakes.client.metrics()
        await fakes.client.aclose()

    run(talk)


def test_closing_closes_each_replica_s_client() -> None:
    async def talk() -> None:
        fakes, closed = Fakes(), list[int]()

        def closing(number: int) -> Any:
            async def close() -> None:
                closed.append(number)

            return close

        own = [one.aclose for one in fakes.clients]
        for number, one in enumerate(fakes.clients):
            one.aclose = closing(number)
        await fakes.client.aclose()
        assert closed == [0, 1]
        for close in own:
            await close()

    run(talk)
