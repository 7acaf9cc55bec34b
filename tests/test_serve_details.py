"""The details that make or break a client, each against a running server with the bundled checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hookline.core.errors import EngineError, QueueFullError
from hookline.core.frontend.async_llm import AsyncLLM
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.in_process import InProcessClient
from hookline.core.testing.engine_client import FakeEngineClient
from tests.live_server import PARSERS, LiveServer, live_server

pytestmark = pytest.mark.slow
MAX_LEN = 256
CODE = "def fibonacci(n):\n"


def engine() -> InProcessClient:
    llm = AsyncLLM(device="cpu", engine={"cpu_cache_gib": 0.05, "max_model_len": MAX_LEN, "max_num_seqs": 16})
    return InProcessClient(llm, PARSERS)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(engine) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def fake() -> Iterator[Callable[..., Any]]:
    """Makes a server around a fake engine, and a client of it."""
    with ExitStack() as stack:

        def make(**options: Any) -> httpx.Client:
            started = stack.enter_context(live_server(lambda: FakeEngineClient(**options)))
            return stack.enter_context(httpx.Client(base_url=started.url, timeout=30))

        yield make


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, path: str, **fields: Any) -> list[Any]:
    """The data of a stream's events; the last one must be [DONE], which is left out."""
    response = http.post(path, json={"temperature": 0, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


CHAT = [{"role": "user", "content": "hi"}]


def test_1_null_is_unset_and_unknown_fields_are_reported(http: httpx.Client) -> None:
    nulls = dict.fromkeys(("stop", "seed", "logprobs", "n", "stream", "logit_bias", "max_tokens", "user", "echo"))
    response = http.post("/v1/completions", json={"prompt": CODE, **nulls, "temperature": 0, "wild": 1, "store": True})
    assert response.status_code == 200
    assert response.headers["x-hookline-ignored"] == "user, wild, store"
    assert response.json()["choices"][0]["text"] == complete(http, prompt=CODE)["choices"][0]["text"]


def test_2_max_tokens_is_16_for_completions_and_the_rest_of_the_context_for_chats(http: httpx.Client) -> None:
    assert complete(http, prompt=CODE, ignore_eos=True)["usage"]["completion_tokens"] == 16
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "ignore_eos": True}).json()
    assert chat["usage"]["total_tokens"] == MAX_LEN
    short = {"messages": CHAT, "ignore_eos": True, "max_tokens": 9, "max_completion_tokens": 3}
    assert http.post("/v1/chat/completions", json=short).json()["usage"]["completion_tokens"] == 3
    assert http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 0}).status_code == 400


def test_2_no_token_with_echo_scores_the_prompt_alone(http: httpx.Client) -> None:
    found = complete(http, prompt=CODE, max_tokens=0, echo=True, logprobs=1)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (CODE, "length")
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 0


def test_3_prompts_have_four_forms_and_choices_their_number(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": CODE}).json()["tokens"]
    other = http.post("/tokenize", json={"prompt": "import"}).json()["tokens"]
    text, texts, tokens, lists = (
        complete(http, prompt=prompt, n=2, max_tokens=4)["choices"]
        for prompt in (CODE, [CODE, "import"], ids, [ids, other])
    )
    assert [one["index"] for one in text] == [0, 1] and [one["index"] for one in texts] == [0, 1, 2, 3]
    assert texts == lists and text == tokens == texts[:2] and texts[2]["text"] != texts[0]["text"]


def test_4_echoed_logprobs_are_those_of_prompt_and_completion(http: httpx.Client) -> None:
    found = complete(http, prompt=CODE, max_tokens=1, logprobs=1, echo=True)
    logprobs = found["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == found["usage"]["prompt_tokens"] + 1
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert "".join(logprobs["tokens"]) == found["choices"][0]["text"]
    for token, value, top in list(
        zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value <= max(top.values())
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())  # it was drawn greedily


def test_5_usage_comes_last_without_choices_or_always(http: httpx.Client) -> None:
    options = {"include_usage": True}
    *chunks, last = events(http, "/v1/completions", prompt=CODE, max_tokens=4, ignore_eos=True, stream_options=options)
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    counts = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts["completion_tokens"] == 4 and counts["total_tokens"] == counts["prompt_tokens"] + 4
    options["continuous_usage_stats"] = True
    *chunks, last = events(
        http, "/v1/chat/completions", messages=CHAT, max_tokens=4, ignore_eos=True, stream_options=options
    )
    seen = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert seen == sorted(seen) and seen[-1] == last["usage"]["completion_tokens"] == 4
    refused = http.post("/v1/completions", json={"prompt": CODE, "stream_options": {"include_usage": True}})
    assert refused.status_code == 400 and "stream_options" in refused.json()["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_6_role_id_and_name_come_once_and_calls_have_their_index(fake: Callable[..., httpx.Client]) -> None:
    chunks = events(fake(reply=f"Sure.{CALL}\n{CALL}"), "/v1/chat/completions", messages=CHAT, tools=TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index in (0, 1):
        mine = [call for call in calls if call["index"] == index]
        assert [("id" in call, "name" in call["function"]) for call in mine] == [(True, True)] + [(False, False)] * (
            len(mine) - 1
        )
        assert json.loads("".join(call["function"]["arguments"] for call in mine)) == {"a": 1}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_6_a_client_that_wants_one_call_gets_the_first(fake: Callable[..., httpx.Client]) -> None:
    http, fields = fake(reply=CALL * 3), {"messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False}
    message = http.post("/v1/chat/completions", json=fields).json()["choices"][0]["message"]
    deltas = [one["choices"][0]["delta"] for one in events(http, "/v1/chat/completions", **fields)]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["".join(pieces)] == ['{"a": 1}']


def test_7_a_completion_has_a_chunk_for_each_token_and_a_chat_one_for_each_that_has_a_text(
    fake: Callable[..., httpx.Client],
) -> None:
    http = fake(reply=" Hello world", one_by_one=True)
    chunks = events(http, "/v1/completions", prompt="x", max_tokens=3)
    assert len(chunks) == 3 and chunks[-1]["choices"][0]["finish_reason"] == "length"
    num_tokens = http.post("/tokenize", json={"prompt": " Hello world"}).json()["count"]
    deltas = [one["choices"][0]["delta"] for one in events(http, "/v1/chat/completions", messages=CHAT, tools=TOOLS)]
    assert sum("content" in delta and "role" not in delta for delta in deltas) == num_tokens
    assert {"content": ""} not in deltas


def test_8_a_model_card_is_whole_and_another_name_is_404(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "vocab_size"}
    assert card["object"] == "model" and card["max_model_len"] == MAX_LEN
    assert http.get(f"/v1/models/{card['id']}").json() == card
    assert http.get("/v1/models/").json()["data"] == [card]
    unknown = http.post("/v1/completions", json={"model": "gpt-9", "prompt": "x"})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert http.get("/v1/models/gpt-9").status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 7},
        {"prompt": []},
        {"prompt": [1, "x"]},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "n": 0},
        {"prompt": [10**6]},
        {"prompt": "x", "logprobs": 99},
        {"prompt": "x", "stop": [1]},
        {"prompt": "x", "suffix": "y"},
    ],
)
def test_9_what_is_invalid_is_400_and_nested(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post("/v1/completions", json=fields)
    error = response.json()["error"]
    assert (
        response.status_code == 400
        and error["type"] == "invalid_request_error"
        and set(error) == {"message", "type", "param", "code"}
    )
    assert "\n" not in error["message"] and "sampling." not in error["message"]


@pytest.mark.parametrize(("prompt", "max_tokens"), [("x " * 20_000, 1), ("x", MAX_LEN), ("x " * 300, 1)])
def test_9_an_overflow_says_so_in_the_words_that_clients_look_for(
    http: httpx.Client, prompt: str, max_tokens: int
) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {MAX_LEN} tokens")


def test_10_a_full_queue_is_429_and_says_when_to_come_back(fake: Callable[..., httpx.Client]) -> None:
    http = fake(error=QueueFullError("engine.max_queued_requests", 8, 8, 100))
    for fields in ({}, {"stream": True}):
        response = http.post("/v1/completions", json={"prompt": "x", **fields})
        assert response.status_code == 429 and 0 < int(response.headers["retry-after"]) <= 5


def test_11_an_error_in_a_stream_is_an_event_before_done(fake: Callable[..., httpx.Client]) -> None:
    http = fake(error=EngineError("/secret/path broke"), error_after=2, pause_s=0.005)
    *chunks, last = events(http, "/v1/completions", prompt="x", max_tokens=8)
    assert len(chunks) >= 1 and set(last) == {"error"} and last["error"]["code"] == "engine_error"
    assert "secret" not in json.dumps(last)


@pytest.mark.parametrize("field", ["both", "reasoning", "reasoning_content"])
def test_12_reasoning_has_either_name_and_its_tags_never_show(field: str) -> None:
    settings = replace(PARSERS, reasoning_field=field)
    reply = "<think>Let me think</think>Four"
    with live_server(lambda: FakeEngineClient(reply), settings) as started, httpx.Client(base_url=started.url) as http:
        names = {"reasoning", "reasoning_content"} if field == "both" else {field}
        message = http.post("/v1/chat/completions", json={"messages": CHAT}).json()["choices"][0]["message"]
        assert {name: message[name] for name in names} == dict.fromkeys(names, "Let me think")
        assert message["content"] == "Four" and not ({"reasoning", "reasoning_content"} - names) & set(message)
        deltas = [one["choices"][0]["delta"] for one in events(http, "/v1/chat/completions", messages=CHAT)]
    for name in names:
        assert "".join(delta.get(name, "") for delta in deltas) == "Let me think"
    assert "".join(delta.get("content", "") for delta in deltas) == "Four"


def test_13_many_stops_negative_seeds_and_text_keys_are_fine(http: httpx.Client) -> None:
    (token,) = http.post("/tokenize", json={"prompt": "#"}).json()["tokens"]
    found = complete(http, prompt=CODE, stop=[*"ABCDEFG", "\n"], logit_bias={str(token): 100}, max_tokens=3)
    assert found["choices"][0]["text"].startswith("#")
    drawn = [complete(http, prompt=CODE, temperature=1, seed=-7)["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    text = complete(http, prompt=CODE)["choices"][0]["text"]
    stopped = complete(http, prompt=CODE, stop=["~~1", "~~2", "~~3", "~~4", text[4:7]])["choices"][0]
    assert stopped["text"] == text[: text.index(text[4:7])] and stopped["stop_reason"] == text[4:7]


def test_14_a_client_that_leaves_frees_its_blocks(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, steps = server.client._llm.llm.engine.executor, []
    launch = executor.launch
    # Slow enough that nothing here comes after the end of 200 tokens by itself.
    monkeypatch.setattr(executor, "launch", lambda step: (time.sleep(0.02), steps.append(step), launch(step))[-1])

    def is_idle() -> bool:
        load = server.run(load_of)
        return (load.num_running, load.num_waiting) == (0, 0)

    async def load_of() -> Any:
        return server.client.load()

    body = {"prompt": [CODE] * 4, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept, or the connection is closed
        next(lines)
        assert not is_idle()
    wait_until(is_idle)
    assert len(steps) < 180, "it ended by itself"
    steps.clear()
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**body, "stream": False}, timeout=0.05)
    wait_until(is_idle)
    assert len(steps) < 180, "it ended by itself"


def test_14_a_time_limit_is_an_error_and_never_a_finish_reason(http: httpx.Client) -> None:
    body = {"prompt": CODE, "max_tokens": 200, "ignore_eos": True, "timeout_s": 0.02}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 408 and response.headers["x-should-retry"] == "false"
    assert "abort" not in response.text


needs_structured = pytest.mark.skipif(
    "structured_outputs" not in SamplingParams.__dataclass_fields__, reason="the engine has no structured output"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@needs_structured
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(http: httpx.Client, fields: dict[str, Any]) -> None:
    choice = http.post("/v1/chat/completions", json={"messages": CHAT, **fields}).json()["choices"][0]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


@needs_structured
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_comes_from_any_model(http: httpx.Client, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"messages": CHAT, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["a"] in (1, 2)
    assert answer["finish_reason"] == "tool_calls"


@needs_structured
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_is_400(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": CODE, "structured_outputs": {"regex": "(["}, "stream": stream}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400 and "regex" in response.json()["error"]["message"]


@needs_structured
@pytest.mark.parametrize("template", ["", "{# </think> #}"])
def test_a_form_is_asked_of_the_answer_where_the_template_knows_of_reasoning(template: str) -> None:
    client = FakeEngineClient('<think>Well</think>{"a": 1}')
    client.facts.codec.tokenizer.chat_template += template
    body = {"messages": CHAT, "response_format": {"type": "json_object"}}
    with live_server(lambda: client) as started, httpx.Client(base_url=started.url) as http:
        answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (answer["reasoning_content"], answer["content"]) == ("Well", '{"a": 1}')
    assert client.asked[0].params.structured_outputs.after == ("</think>" if template else None)


def test_token_ids_are_given_on_request(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": CODE}).json()["tokens"]
    (choice,) = complete(http, prompt=CODE, max_tokens=5, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) <= 5
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": CODE}
    chunks = events(http, "/v1/completions", prompt=CODE, max_tokens=5, return_token_ids=True)
    assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == choice["token_ids"]


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = complete(http, prompt=[CODE, "import"], max_tokens=12, logprobs=2, echo=True)["choices"]
    chunks = events(http, "/v1/completions", prompt=[CODE, "import"], max_tokens=12, logprobs=2, echo=True)
    for choice in whole:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for key in choice["logprobs"]:
            assert [value for one in mine for value in one["logprobs"][key]] == choice["logprobs"][key]


def test_logprobs_of_a_chat_have_bytes_and_alternatives(http: httpx.Client) -> None:
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 4, "temperature": 0}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode().startswith(choice["message"]["content"])
    assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= one["top_logprobs"][0]["logprob"] for one in content)


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.005)
