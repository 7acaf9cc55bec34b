"""What a front end makes of the tokens of an engine in another process equals what an LLM gives in its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hookline import LLM, SamplingParams
from hookline.core.outputs import RequestOutput
from hookline.core.serve.engine_client import facts_of, served_model
from hookline.core.serve.processes.engine_link import EngineLink
from hookline.core.serve.processes.engine_server import EngineServer
from hookline.core.serve.processes.messages import Stop
from hookline.core.serve.processes.remote_client import RemoteClient
from hookline.core.serve.settings import ServeConfig

CASES = {
    "greedy": SamplingParams(max_tokens=24, temperature=0),
    "sampled": SamplingParams(max_tokens=24, seed=7, top_p=0.9, logit_bias={5: 2.0}, bad_words=(" the",)),
    "scored": SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=2),
    "stop string": SamplingParams(max_tokens=200, seed=3, stop=("e",), min_tokens=4, logprobs=0),
    "stop string shown": SamplingParams(max_tokens=200, seed=3, stop=("e",), include_stop_str_in_output=True),
    "two": SamplingParams(max_tokens=12, seed=9, n=2),
    "regex": SamplingParams(temperature=0, structured_outputs={"regex": "[0-9]{3}-[a-z]{2}"}),
    "choice": SamplingParams(seed=2, structured_outputs={"choice": ["yes", "no"]}, stop_token_ids=(7,)),
    "grammar and stop string": SamplingParams(temperature=0, stop=("-x",), structured_outputs={"regex": "0{2}-x{9}"}),
    "told by an extension": SamplingParams(max_tokens=9, temperature=0, extra_args={"probe": {"strength": 0.5}}),
    "schema": SamplingParams(max_tokens=60, seed=4, structured_outputs={"json": {"enum": ["one", 2]}}),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    probe = {"changed": [0], "read": [0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOKLINE_PLUGINS", "tests.probing_extension")
        with LLM(engine={"num_blocks": 256}, extensions={"probe": probe}) as found:
            yield found


@pytest.mark.parametrize("case", CASES)
def test_a_completion_over_the_socket_equals_one_in_process(case: str, llm: LLM, tmp_path: Path) -> None:
    params, prompt = CASES[case], "The first of the two"
    (expected,) = llm.generate(prompt, params)
    llm.engine.pool.reset_cache()
    assert over_the_socket(llm, tmp_path, prompt, params) == [plain(one) for one in expected.completions]


def over_the_socket(llm: LLM, folder: Path, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    over: list[bool] = []
    server = EngineServer(llm, f"ipc://{folder}/engine", 16, lambda: bool(over))
    thread = threading.Thread(target=server.run)
    thread.start()

    async def run() -> list[RequestOutput]:
        link = EngineLink(f"ipc://{folder}/engine", "front", lambda messages: client.receive(messages))
        model = served_model(facts_of(llm), (), llm.codec)
        client = RemoteClient(model, link.send, ServeConfig())
        deltas: list[Any] = [delta async for delta in client.stream(prompt, params)]
        for index in range(params.n):
            mine = [delta for delta in deltas if delta.index == index]
            output = mine[-1].output
            assert "".join(delta.text for delta in mine) == output.text
            assert [one for delta in mine for one in delta.token_ids] == output.token_ids
            assert [one for delta in mine for one in delta.logprobs or ()] == (output.logprobs or [])
            told = [one for delta in mine for one in (delta.extensions or {}).get("probe", ())]
            assert told == (output.extensions or {}).get("probe", [])
            assert [one["token"] for one in told] == (output.token_ids if params.extra_args else [])
        link.send(Stop())
        await asyncio.to_thread(thread.join)
        link.close()
        return sorted((delta.output for delta in deltas if delta.output is not None), key=lambda one: one.index)

    try:
        return [plain(one) for one in asyncio.run(run())]
    finally:
        over.append(True)
        thread.join()


def plain(output: RequestOutput) -> RequestOutput:
    """Without what differs by its nature: numbers, times, and what hangs on it."""
    return replace(output, request_id=0, timings=None, others=[])
