"""How an answer reaches its client: its status, comments in silence, errors, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from hookline.core.contracts import ApiError
from hookline.core.errors import EngineError, RequestError
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.outputs import Delta
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.endpoints.answering import EventStream, told
from hookline.core.serve.endpoints.generation import Generation
from hookline.core.testing.engine_client import FakeEngineClient
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS


def sent(make: Callable[[], AsyncGenerator[bytes, None]], **options: Any) -> tuple[list[dict[str, Any]], int]:
    """The messages that a stream sends, and how often what it is made of was closed."""
    messages: list[Any] = []
    closed: list[None] = []

    async def close() -> None:
        closed.append(None)

    async def run() -> None:
        async def send(message: Any) -> None:
            messages.append(message)

        stream = EventStream(make(), close, OPENAI_ERRORS, 100, **options)
        await stream({"type": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return messages, len(closed)


async def two() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    yield b"data: 2\n\n"


async def refused() -> AsyncGenerator[bytes, None]:
    raise RequestError("sampling.top_p=7 is wrong")
    yield b""


async def broken() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    raise EngineError("broken")


async def slow() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.05)
    yield b"data: 1\n\n"


def test_events_are_sent_as_they_are_and_all_is_closed() -> None:
    messages, closed = sent(two, headers={"X-Hookline-Ignored": "user"})
    assert messages[0]["status"] == 200 and (b"x-hookline-ignored", b"user") in messages[0]["headers"]
    assert [message["body"] for message in messages[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
    assert [message["more_body"] for message in messages[1:]] == [True, True, False] and closed == 1


def test_an_error_before_the_first_event_decides_the_status() -> None:
    messages, closed = sent(refused)
    assert messages[0]["status"] == 400 and b'"top_p=7 is wrong"' in messages[1]["body"] and closed == 1


def test_an_error_after_the_first_event_is_an_event() -> None:
    messages, closed = sent(broken)
    assert messages[0]["status"] == 200 and closed == 1
    assert messages[2]["body"].startswith(b'data: {"error":') and messages[2]["body"].endswith(b"data: [DONE]\n\n")


def test_the_log_has_of_an_error_what_the_client_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    ended = ApiError(503, "the server ended the request", "server_error", code="aborted")
    assert told(ended, 100) is ended and not caplog.records
    assert told(ValueError("a secret"), 100).message == "internal server error"
    (record,) = caplog.records
    assert "a request ended with status 500: ValueError: a secret" in record.getMessage()


def test_a_silent_stream_gets_comments() -> None:
    messages, _ = sent(slow, keep_alive_s=0.01)
    bodies = [message["body"] for message in messages[1:]]
    assert bodies[0] == b": keep-alive\n\n" and bodies[-2:] == [b"data: 1\n\n", b""]


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_generation_that_is_closed_early_leaves_nothing(num_prompts: int) -> None:
    async def run() -> FakeEngineClient:
        client = FakeEngineClient(pause_s=0.001)
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        generation = Generation([client.stream([1, 2], params) for _ in range(num_prompts)])
        await anext(generation)
        await generation.aclose()
        async with asyncio.timeout(30):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.001)
        return client

    client = asyncio.run(run())
    assert client.num_open == 0 and all(asked.is_cancelled for asked in client.asked)


def test_a_fault_of_any_kind_ends_a_generation_of_several_prompts() -> None:
    class Fault:
        index = 0

        def take(self) -> Delta:
            raise ZeroDivisionError

    async def run() -> None:
        client = FakeEngineClient()
        streams = [client.stream([1, 2], SamplingParams(max_tokens=3)) for _ in range(2)]
        streams[1] = CompletionStream(asyncio.get_running_loop(), 1, print)
        streams[1].notify(Fault())
        generation = Generation(streams)
        try:
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(generation.outputs(), 30)
        finally:
            await generation.aclose()

    asyncio.run(run())


def test_a_generation_of_several_prompts_brings_the_whole_of_each() -> None:
    async def run() -> list[list[Any]]:
        client = FakeEngineClient(lambda ids, index: [ids[0], ids[0]])
        generation = Generation([client.stream([one], SamplingParams(n=2, max_tokens=2)) for one in (5, 6, 7)])
        return await generation.outputs()

    found = asyncio.run(run())
    assert [[output.token_ids for output in outputs] for outputs in found] == [[[one, one]] * 2 for one in (5, 6, 7)]
