"""The client over an AsyncLLM of the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from hookline.core.config.settings import validate
from hookline.core.contracts import hookimpl
from hookline.core.errors import EngineError, QueueFullError, RankError
from hookline.core.frontend.async_llm import AsyncLLM
from hookline.core.outputs import Delta, RequestOutput
from hookline.core.plugin.host import PluginHost
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.in_process import InProcessClient
from hookline.core.serve.settings import ServeConfig
from hookline.core.serve.throughput import Throughput

pytestmark = pytest.mark.slow


class Refusals:
    """Why requests were refused, as an observer hears it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def on_request_end(self, output: RequestOutput) -> None:
        if output.refusal is not None:
            self.seen.append(output.refusal)


@pytest.fixture(scope="module")
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture(scope="module")
def client(refusals: Refusals) -> Iterator[InProcessClient]:
    host, throughput = PluginHost.load(), Throughput(time.monotonic)
    host.manager.register(throughput)
    host.manager.register(refusals)
    llm = AsyncLLM.from_config(validate({"engine": {"num_blocks": 64}}, host), host)
    yield InProcessClient(llm, ServeConfig(max_requests=4), throughput)
    llm.close()


async def deltas(client: InProcessClient, params: SamplingParams) -> list[Delta]:
    return [delta async for delta in client.stream("Hello", params)]


def test_its_load_counts_the_tokens_of_its_steps(client: InProcessClient) -> None:
    asyncio.run(deltas(client, SamplingParams(max_tokens=8, ignore_eos=True)))
    load = client.load()
    assert load.tokens_s > 0 and load.prompt_tokens_s > 0
    assert (load.num_running, load.num_free_blocks) == (0, load.num_blocks)


def test_more_completions_than_allowed_are_refused(client: InProcessClient) -> None:
    with pytest.raises(QueueFullError, match=r"serve\.max_requests=4"):
        asyncio.run(deltas(client, SamplingParams(n=5)))


def test_each_completion_of_a_prompt_counts_and_observers_hear_of_who_is_refused(
    client: InProcessClient, refusals: Refusals
) -> None:
    async def check() -> None:
        first = client.stream("Hello", SamplingParams(n=3, max_tokens=1000, ignore_eos=True))
        with pytest.raises(QueueFullError, match=r"serve\.max_requests=4"):
            client.stream("Hello", SamplingParams(n=2))
        await first.aclose()
        async with asyncio.timeout(20):
            while refusals.seen[-1:] != ["queue_full"]:
                await asyncio.sleep(0.001)

    refusals.seen.clear()
    asyncio.run(check())


def test_a_lost_rank_is_the_end_of_it(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object) -> None:
        raise RankError("rank 1 was lost")

    assert client.is_ready
    monkeypatch.setattr(client._llm.llm.engine.executor, "launch", fail)
    with pytest.raises(EngineError, match="rank 1 was lost"):
        asyncio.run(deltas(client, SamplingParams(max_tokens=8)))
    assert client.death == "rank 1 was lost" and not client.is_ready
    with pytest.raises(EngineError, match="rank 1 was lost"):
        asyncio.run(deltas(client, SamplingParams(max_tokens=8)))
