"""Vectors on their way to a caller: by AsyncLLM, by a server to the openai SDK, by messages, by a batch file."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hookline import LLM, AsyncLLM, PoolingParams, SamplingParams
from hookline.core.errors import RequestError
from hookline.core.serve.engine_client import facts_of, served_model
from hookline.core.serve.in_process import InProcessClient
from hookline.core.serve.processes.engine_link import EngineLink
from hookline.core.serve.processes.engine_server import EngineServer
from hookline.core.serve.processes.messages import Stop
from hookline.core.serve.processes.remote_client import RemoteClient
from hookline.core.serve.settings import ServeConfig
from tests.live_server import LiveServer, live_server

TEXTS = ["import os", "def walk(path):", "class Thing:\n    pass"]
YES_NO = {"name": "yes_no", "yes": "a", "no": "b"}  # the vocabulary has no token "yes"
OPTIONS: dict[str, Any] = {"device": "cpu", "engine": {"num_blocks": 256}, "pooler": YES_NO}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    return [output.vector for output in llm.embed(TEXTS)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(lambda: InProcessClient(AsyncLLM(**OPTIONS), ServeConfig())) as started:
        yield started


@pytest.mark.parametrize("name", ["embed", "classify", "score"])
def test_both_fronts_name_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(one, name)).parameters for one in (LLM, AsyncLLM))
    assert set(theirs) == {one.removesuffix("s") if one in ("prompts", "documents") else one for one in ours} - {
        "progress"
    }
    assert {*inspect.signature(AsyncLLM.generate).parameters} - {"prompt"} <= {*theirs}


@pytest.mark.slow
def test_coroutines_embed_classify_and_score_beside_generation(llm: LLM, expected: list[Any]) -> None:
    scores = [output.score for output in llm.score("q", TEXTS)]

    async def all_at_once() -> list[Any]:
        async with AsyncLLM(**OPTIONS) as found:
            generating = asyncio.ensure_future(found.generate("import", SamplingParams(max_tokens=8, ignore_eos=True)))
            vectors = await asyncio.gather(*(found.embed(text) for text in TEXTS))
            pairs = await asyncio.gather(*(found.score("q", text) for text in TEXTS))
            assert len((await generating).token_ids) == 8
            with pytest.raises(RequestError, match="there is no pooler 'nothing'"):
                await found.embed("x", PoolingParams("nothing"))
            with pytest.raises(RequestError, match=r"score compares texts, and \[1, 2\] is none"):
                await found.score("q", [1, 2])  # type: ignore[arg-type]
            refused = await found.classify("x")
            assert "does not have score.weight" in (refused.error or "")
            late = await found.embed("x" * 400, timeout_s=1e-9)
            assert "timeout_s" in (late.error or "")
            return [vectors, pairs]

    vectors, pairs = asyncio.run(all_at_once())
    assert all(np.allclose(one.vector, other, atol=1e-5) for one, other in zip(vectors, expected, strict=True))
    assert [one.score for one in pairs] == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
def test_the_openai_sdk_creates_embeddings(server: LiveServer, expected: list[Any]) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS)
        short = client.embeddings.create(
            model=found.model, input=TEXTS[0], encoding_format="float", dimensions=8, extra_body={"normalize": False}
        )
        with pytest.raises(openai.BadRequestError, match="more than the 256 numbers"):
            client.embeddings.create(model=found.model, input=TEXTS[0], dimensions=257)
    for one, other in zip(found.data, expected, strict=True):  # the SDK asks for base64
        assert np.allclose(one.embedding, other, atol=1e-5)
    assert len(short.data[0].embedding) == 8 and found.usage.prompt_tokens > 3


@pytest.mark.slow
def test_the_served_scores_are_those_of_llm_score(server: LiveServer, llm: LLM) -> None:
    import httpx

    body = {"query": "q", "documents": TEXTS}
    found = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=30).json()["results"]
    scores = [output.score for output in llm.score("q", TEXTS)]
    assert {one["index"]: one["relevance_score"] for one in found} == pytest.approx(dict(enumerate(scores)), abs=1e-5)


@pytest.mark.slow
def test_an_engine_in_another_process_gives_the_same_vectors(llm: LLM, expected: list[Any], tmp_path: Any) -> None:
    address, is_over = f"ipc://{tmp_path}/engine", threading.Event()
    server = EngineServer(llm, address, 16, is_over.is_set)
    thread = threading.Thread(target=server.run)
    thread.start()

    async def ask() -> list[Any]:
        link = EngineLink(address, "front", lambda messages: client.receive(messages))
        client = RemoteClient(served_model(facts_of(llm), ("m",), llm.codec), link.send, ServeConfig())
        try:
            assert client.facts.scored_by == "score" and client.facts.no_embeddings is None
            streams = [client.stream(text, SamplingParams(), pooling=PoolingParams()) for text in TEXTS]
            deltas = [[delta async for delta in stream] for stream in streams]
            with pytest.raises(RequestError, match="more than the 256 numbers"):
                await anext(client.stream("x", SamplingParams(), pooling=PoolingParams(dimensions=999)))
            return [only.output for (only,) in deltas]
        finally:
            link.send(Stop())
            await client.aclose()
            link.close()

    try:
        outputs = asyncio.run(ask())
    finally:
        is_over.set()
        thread.join(20)
    assert all(np.allclose(one.vector, other, atol=1e-6) for one, other in zip(outputs, expected, strict=True))
    assert [output.token_ids for output in outputs] == [[], [], []]


@pytest.mark.slow
def test_a_batch_file_may_ask_for_embeddings(tmp_path: Any, expected: list[Any]) -> None:
    from hookline.core.batch.command import main

    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl", "device=cpu"]
    assert main([*arguments, "engine.num_blocks=256"]) == 0
    answers = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    for i, vector in enumerate(expected):
        assert np.allclose(answers[str(i)]["data"][0]["embedding"], vector, atol=1e-5)
