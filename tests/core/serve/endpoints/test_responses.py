"""Log-probabilities of /v1/responses: one for each token of the text, in whole answers and in streams."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hookline.core.contracts import ParserContext, Text
from hookline.core.outputs import Delta
from hookline.core.serve.parsers import PartsReader, chosen_parsers
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from hookline.plugins.apis.openai.logprobs import WaitingLogprobs
from hookline.plugins.apis.openai.responses import _Answer
from tests.core.serve.conftest import Ask

BODY = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 0}
PARSERS = ServeConfig(reasoning_parser="think", tool_parser="hermes")
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_of_two_limits_both_are_kept_and_fields_for_log_probabilities_that_have_no_effect_are_named(ask: Ask) -> None:
    client, include = FakeEngineClient("x"), ["reasoning.encrypted_content"]
    fields = {"max_tokens": 3, "max_output_tokens": 5, "include": include, "top_logprobs": 2}
    response = ask(client, "POST", "/v1/responses", json={**BODY, **fields})
    assert response.headers["x-hookline-ignored"] == "include.reasoning.encrypted_content, top_logprobs"
    assert client.asked[0].params.max_tokens == 3


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(frame.partition("data: ")[2]) for frame in response.text.split("\n\n") if frame]


def streamed(ask: Ask, client: FakeEngineClient, settings: ServeConfig | None, **fields: Any) -> list[Any]:
    """Log-probabilities of a stream's deltas, which are those of its last event."""
    told = events(ask(client, "POST", "/v1/responses", settings, json={**BODY, "stream": True, **fields}))
    deltas = [one for event in told if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert deltas == logprobs_of(told[-1]["response"])
    return deltas


def logprobs_of(answer: dict[str, Any]) -> list[Any]:
    texts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return [one for part in texts for one in part["logprobs"]]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("reply", "fields"),
    [
        (" Hello world", {}),
        (" Hello world", {"stop": " world and then something"}),
        (" Hello world and more", {"stop": "and"}),
        ("naïve 🙂 漢字", {}),
        ("", {}),
    ],
)
def test_each_token_has_its_log_probability_as_in_a_chat(
    ask: Ask, reply: str, fields: dict[str, Any], one_by_one: bool
) -> None:
    client = FakeEngineClient(reply, one_by_one=one_by_one)
    whole = ask(client, "POST", "/v1/responses", json={**BODY, **fields}).json()
    found = logprobs_of(whole)
    assert len(found) == whole["usage"]["output_tokens"]
    assert streamed(ask, client, None, **fields) == found
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 0, **fields}
    chat = ask(client, "POST", "/v1/chat/completions", json=body).json()
    assert len(chat["choices"][0]["logprobs"]["content"]) == len(found)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        "<think>Well, Hello?</think>\n\nHello world",
        "<think>\n\n</think>\n\nHello world",
        'Hello world<tool_call>{"name": "f", "arguments": {"a": "world"}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> Hello world',
    ],
)
def test_tokens_of_reasoning_and_of_calls_are_none_of_the_text_s(ask: Ask, reply: str, one_by_one: bool) -> None:
    client = FakeEngineClient(reply, one_by_one=one_by_one)
    whole = ask(client, "POST", "/v1/responses", PARSERS, json={**BODY, "tools": [TOOL]}).json()
    found = logprobs_of(whole)
    text = b"".join(bytes(one["bytes"]) for one in found).decode()
    assert text.removesuffix("<|endoftext|>").strip() == "Hello world"
    assert streamed(ask, client, PARSERS, tools=[TOOL]) == found


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("text", ["t", "in", "k t", "name"])
@pytest.mark.parametrize(
    "reply",
    [
        "<think>Well</think>\n\n{}",
        '{}<tool_call>{{"name": "f", "arguments": {{"a": "in name"}}}}</tool_call>',
        '<think>t</think>\n\n{}<tool_call>{{"name": "f", "arguments": {{"a": "in t"}}}}</tool_call>',
    ],
)
def test_a_text_that_a_tag_contains_has_its_own_tokens(ask: Ask, reply: str, text: str, one_by_one: bool) -> None:
    client = FakeEngineClient(reply.format(text), one_by_one=one_by_one)
    whole = ask(client, "POST", "/v1/responses", PARSERS, json={**BODY, "tools": [TOOL]}).json()
    found = logprobs_of(whole)
    assert b"".join(bytes(one["bytes"]) for one in found).decode().removesuffix("<|endoftext|>").strip() == text
    assert streamed(ask, client, PARSERS, tools=[TOOL]) == found


CALL = '<tool_call>{"name": "f", "arguments": {"a": "I am done"}}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("reply", "texts"),
    [
        (f"I will call now.{CALL}Done nicely.", ["I will call now.", "Done nicely."]),
        (f"<think>hm well</think>\n\nI am calling\n{CALL}", ["I am calling"]),
        (f"Ok{CALL}", ["Ok"]),
        ("<think>I am</think>\n\nI am", ["I am"]),
    ],
)
def test_deltas_of_several_tokens_give_each_text_its_own(reply: str, texts: list[str], size: int) -> None:
    codec, parsers = tiny_model().codec, chosen_parsers("think", "hermes")
    entries = [{"bytes": list(codec.decode([one]).encode())} for one in codec.encode_plain(reply)]
    context, answer = ParserContext("", [{"name": "f", "parameters": {}}]), _Answer.__new__(_Answer)
    chosen = [one for one in (parsers.reasoning, parsers.tools) if one is not None]
    answer._reader = PartsReader([(one.make(context), one.entry) for one in chosen])
    answer._turn, answer._has_logprobs = SimpleNamespace(is_plain=False), True  # type: ignore[assignment]
    answer._logprobs, found = WaitingLogprobs(), list[list[Any]]()
    answer._items = items = SimpleNamespace(is_text=False)  # type: ignore[assignment]
    for first in range(0, len(entries), size):
        some = entries[first : first + size]
        answer._logprobs.add(some)
        delta = Delta(0, 0, 0, b"".join(bytes(one["bytes"]) for one in some).decode(), [])
        for part, logprobs in answer._parts(delta):
            if isinstance(part, Text):
                found += [] if items.is_text else [[]]
                found[-1] += logprobs
            items.is_text = isinstance(part, Text)
    assert [b"".join(bytes(one["bytes"]) for one in each).decode().strip() for each in found] == texts


def test_what_waits_is_taken_up_to_the_end_of_a_text() -> None:
    waiting, tokens = WaitingLogprobs(), [{"bytes": list(one)} for one in (b"<a>", b"ab", b"cd", b"ef")]
    waiting.add(tokens)
    assert waiting.take("", takes_before=True) == []
    assert waiting.take("abc", takes_before=False) == tokens[1:3]
    assert waiting.take("not there", takes_before=False) == tokens[3:] and waiting.rest() == []
    waiting.add(tokens)
    assert waiting.take("ab", takes_before=True) == tokens[:2] and waiting.rest() == tokens[2:]
