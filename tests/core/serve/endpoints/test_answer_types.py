"""Every answer and every event of a stream is what the SDKs of OpenAI and Anthropic say it is, in their own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest

from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from tests.core.serve.conftest import Ask

pydantic = pytest.importorskip("pydantic")
chat_types, completion_types = pytest.importorskip("openai.types.chat"), pytest.importorskip("openai.types")
responses_types, anthropic_types = pytest.importorskip("openai.types.responses"), pytest.importorskip("anthropic.types")

PARSERS = ServeConfig(reasoning_parser="think", tool_parser="hermes")
CALL = (
    "<think>\nhm\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES = {"input": "x", "tools": [{"type": "function", "strict": None, **FUNCTION}]}
MESSAGES = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 100,
    "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
}
ENDPOINTS: dict[str, tuple[dict[str, Any], Any, Any, set[str]]] = {
    "/v1/completions": (
        {"prompt": "x"},
        completion_types.Completion,
        completion_types.Completion,
        {"logprobs", "finish_reason", "stop_reason"},
    ),
    "/v1/chat/completions": (
        CHAT,
        chat_types.ChatCompletion,
        chat_types.ChatCompletionChunk,
        {"logprobs", "finish_reason", "stop_reason", "content", "refusal", "usage"},
    ),
    "/v1/responses": (
        RESPONSES,
        responses_types.Response,
        responses_types.ResponseStreamEvent,
        {
            "completed_at",
            "error",
            "incomplete_details",
            "instructions",
            "max_output_tokens",
            "previous_response_id",
            "effort",
            "summary",
            "strict",
        },
    ),
    "/v1/messages": (
        MESSAGES,
        anthropic_types.Message,
        anthropic_types.RawMessageStreamEvent,
        {"stop_reason", "stop_sequence"},
    ),
}
"""Path -> a request, the types of its answer and of its events, and the keys that the API says may be null."""


def nulls(value: Any, key: str = "") -> Iterator[str]:
    """Keys that stand before null, wherever they are."""
    if value is None:
        yield key
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from nulls(inner, name)
    for inner in value if isinstance(value, list) else ():
        yield from nulls(inner, key)


@cache
def reader(kind: Any) -> Any:
    """What reads JSON as an SDK's type, and takes a long time to make."""
    return pydantic.TypeAdapter(kind)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("reply", ["Four.", CALL], ids=["text", "call"])
@pytest.mark.parametrize("max_tokens", [100, 3])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.slow
def test_the_sdks_types_take_every_answer_and_every_event(ask: Ask, path: str, max_tokens: int, reply: str) -> None:
    body, whole, event, may_be_null = ENDPOINTS[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {**body, limit: max_tokens}
    answer = ask(FakeEngineClient(reply), "POST", path, PARSERS, json=asked).json()
    told = events(ask(FakeEngineClient(reply), "POST", path, PARSERS, json={**asked, "stream": True}))
    assert set(nulls([answer, *told])) <= may_be_null
    reader(whole).validate_json(json.dumps(answer), strict=True)
    for one in told:
        if path == "/v1/completions" and one["choices"][0]["finish_reason"] is None:
            one["choices"][0]["finish_reason"] = "stop"  # OpenAI's own type leaves out that it is null until the end
        reader(event).validate_json(json.dumps(one), strict=True)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"logprobs": 1, "echo": True}),
        ("/v1/completions", {"return_token_ids": True}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", {"return_token_ids": True}),
        ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ("/v1/responses", {"metadata": {"a": "b"}, "user": "u", "instructions": "Be brief.", "tools": None}),
        ("/v1/messages", {"stop_sequences": ["our"], "tools": None}),
    ],
)
def test_an_answer_with_further_fields_has_no_key_without_a_value(ask: Ask, path: str, fields: dict[str, Any]) -> None:
    body, _, _, may_be_null = ENDPOINTS[path]
    asked = {**body, **fields}
    found = [ask(FakeEngineClient("Four."), "POST", path, PARSERS, json=asked).json()]
    found += events(ask(FakeEngineClient("Four."), "POST", path, PARSERS, json={**asked, "stream": True}))
    first = {"token_logprobs", "top_logprobs"} if fields.get("echo") else set()  # nothing is said of the first token
    assert set(nulls(found)) <= may_be_null | first


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "local_shell"}], "tool_choice": {"type": "local_shell"}},
        {"tools": [FUNCTION, {"type": "made_up"}, {"type": "mcp", "server_label": "a", "server_url": "http://a"}]},
        {"text": {"format": {"type": "regex", "pattern": "a"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
        {"reasoning": {"effort": "a little"}, "metadata": {"turn": 3}},
    ],
    ids=["choice", "tools", "regex", "schema", "effort"],
)
def test_what_a_response_repeats_of_its_request_has_the_sdks_types(ask: Ask, fields: dict[str, Any]) -> None:
    asked = {"input": "x", "max_output_tokens": 8, **fields}
    client = FakeEngineClient("a", facts=replace(tiny_model(), grammars="llguidance"))
    answer = ask(client, "POST", "/v1/responses", PARSERS, json=asked)
    assert answer.status_code == 200, answer.text
    reader(responses_types.Response).validate_json(answer.text, strict=True)
