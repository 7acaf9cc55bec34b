"""What clients of other servers rely on: prompts that only warm the cache, words of errors, offsets, odd bodies."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from hookline.core.errors import PluginFault, RequestError
from hookline.core.serve.errors import placed
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from tests.core.serve.conftest import Ask

PARSERS = ServeConfig(reasoning_parser="think", tool_parser="hermes")
USER = [{"role": "user", "content": "x"}]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("fields", [{}, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}])
def test_a_message_of_no_tokens_warms_the_cache_and_is_empty(ask: Ask, fields: dict[str, Any]) -> None:
    client = FakeEngineClient("Hello.")
    body = {"messages": USER, "max_tokens": 0, **fields}
    answer = ask(client, "POST", "/v1/messages", PARSERS, json=body).json()
    assert (answer["content"], answer["stop_reason"], answer["stop_sequence"]) == ([], "max_tokens", None)
    assert answer["usage"]["output_tokens"] == 0 and answer["usage"]["input_tokens"] > 0
    assert client.asked[0].params.max_tokens == 1
    told = events(ask(client, "POST", "/v1/messages", PARSERS, json={**body, "stream": True}).text)
    assert [event["type"] for event in told] == ["message_start", "message_delta", "message_stop"]
    assert told[1]["delta"]["stop_reason"] == "max_tokens"


def test_a_message_that_is_too_long_is_told_in_the_words_that_clients_look_for(ask: Ask) -> None:
    def refused(content: str, max_tokens: int) -> str:
        client = FakeEngineClient(facts=tiny_model(max_model_len=40))
        messages = [{"role": "user", "content": content}]
        response = ask(client, "POST", "/v1/messages", json={"messages": messages, "max_tokens": max_tokens})
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        message: str = response.json()["error"]["message"]
        return message

    counted = ask(FakeEngineClient(), "POST", "/v1/messages/count_tokens", json={"messages": USER}).json()
    length = counted["input_tokens"]
    assert refused("x x " * 50, 5).endswith("tokens > 40 maximum")
    assert refused("x x " * 50, 5).startswith("prompt is too long: ")
    assert refused("x x " * 50_000, 5).startswith(
        "prompt is too long: This model's maximum context length is 40 tokens"
    )
    exceeds = f"input length and `max_tokens` exceed context limit: {length} + 4000 > 40, "
    assert refused("x", 4000) == f"{exceeds}decrease input length or `max_tokens` and try again"


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", ["a", "b/c", "d"], False),
        ("?limit=2", ["a", "b/c"], True),
        ("?after_id=a", ["b/c", "d"], False),
        ("?before_id=d&limit=1", ["b/c"], True),
        ("?after_id=d", [], False),
    ],
)
def test_a_client_of_anthropics_api_gets_its_list_of_models(
    ask: Ask, query: str, ids: list[str], has_more: bool
) -> None:
    client = FakeEngineClient(facts=tiny_model(names=("a", "b/c", "d")))
    version = {"anthropic-version": "2023-06-01"}
    listed = ask(client, "GET", f"/v1/models{query}", headers=version).json()
    assert [one["id"] for one in listed["data"]] == ids and listed["has_more"] is has_more
    assert (listed["first_id"], listed["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    card = ask(client, "GET", "/v1/models/b/c", headers=version).json()
    assert (card["type"], card["id"], card["display_name"]) == ("model", "b/c", "b/c")
    types = pytest.importorskip("anthropic.types")
    types.ModelInfo.model_validate_json(json.dumps(card), strict=True)
    missing = ask(client, "GET", "/v1/models/e", headers=version)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert ask(client, "GET", "/v1/models?limit=0", headers=version).status_code == 400
    assert ask(client, "GET", "/v1/models/b/c").json()["object"] == "model"


@pytest.mark.parametrize("coding", ["Content-Encoding: gzip", "Transfer-Encoding: gzip, chunked"])
def test_a_compressed_body_is_refused_for_what_it_is(ask: Ask, coding: str) -> None:
    content = gzip.compress(json.dumps({"prompt": "x"}).encode())
    name, value = coding.split(": ")
    headers = {name: value, "Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/messages", "/tokenize"):
        response = ask(FakeEngineClient(), "POST", path, content=content, headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["message"] == f"{coding} is not supported; send the body as it is"
    for plain in ({"Content-Encoding": "identity"}, {"Transfer-Encoding": "Chunked"}):
        response = ask(FakeEngineClient(), "POST", "/v1/completions", json={"prompt": "x"}, headers=plain)
        assert response.status_code == 200


@pytest.mark.parametrize("size", [0, 600_000])
def test_a_body_may_begin_with_a_byte_order_mark(ask: Ask, size: int) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": "x", "user": "u" * size}).encode()
    assert ask(FakeEngineClient(), "POST", "/v1/completions", content=content).status_code == 200


@pytest.mark.parametrize(("stop", "taken"), [("", ()), ([""], ()), (["", "b"], ("b",)), ("b", ("b",)), ([], ())])
def test_an_empty_stop_string_ends_nothing_however_it_is_written(ask: Ask, stop: Any, taken: tuple[str, ...]) -> None:
    client = FakeEngineClient("a")
    assert ask(client, "POST", "/v1/completions", json={"prompt": "x", "stop": stop}).status_code == 200
    assert client.asked[0].params.stop == taken


def test_a_prompt_that_fills_the_context_is_scored(ask: Ask) -> None:
    def scored(max_model_len: int, **fields: Any) -> Any:
        facts = tiny_model(max_model_len=max_model_len)
        last = ids[-1:]
        client = FakeEngineClient(lambda prompt, index: last, facts=facts)
        body = {"prompt": ids, "echo": True, "max_tokens": 0, **fields}
        response = ask(client, "POST", "/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if fields.get("stream"):
            return [choice for event in events(response.text) for choice in event["choices"]][-1]
        (choice,) = response.json()["choices"]
        assert response.json()["usage"]["prompt_tokens"] == len(ids)
        return choice

    ids = FakeEngineClient().facts.codec.tokenizer.encode("one two three four", add_special_tokens=False)
    for fields in (
        {},
        {"logprobs": 1},
        {"logprobs": 2, "n": 1, "stop": "e", "temperature": 0.5},
        {"prompt_logprobs": 1},
    ):
        assert scored(len(ids), **fields) == scored(4096, **fields)
    assert scored(len(ids), logprobs=1, stream=True) == scored(4096, logprobs=1, stream=True)
    assert len(scored(len(ids), logprobs=1)["logprobs"]["tokens"]) == len(ids)
    over = FakeEngineClient(facts=tiny_model(max_model_len=len(ids) - 1))
    body = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert ask(over, "POST", "/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_count_from_the_prompt(ask: Ask, echo: bool) -> None:
    prompt = "Once upon"
    body = {"prompt": prompt, "echo": echo, "logprobs": 0}
    whole = ask(FakeEngineClient(" a time"), "POST", "/v1/completions", json=body).json()["choices"][0]
    told = events(ask(FakeEngineClient(" a time"), "POST", "/v1/completions", json={**body, "stream": True}).text)
    streamed = [offset for event in told for offset in event["choices"][0]["logprobs"]["text_offset"]]
    offsets = whole["logprobs"]["text_offset"]
    assert streamed == offsets
    text = prompt + " a time"
    tokens = whole["logprobs"]["tokens"][:-1]  # the last one ends the text
    assert [text[place : place + len(token)] for place, token in zip(offsets, tokens, strict=False)] == tokens
    assert (0 if echo else len(prompt)) == offsets[0]


def test_an_empty_text_among_many_is_named(ask: Ask) -> None:
    client = FakeEngineClient(error=RequestError("the prompt is empty; at least one token is needed"))
    message = "{}: the prompt is empty; at least one token is needed"
    for path, body, place in (
        ("/v1/embeddings", {"input": ["a", "b"]}, "input"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
    ):
        error = ask(client, "POST", path, json=body).json()["error"]
        named = {f"{place}.{index}" for index in (0, 1)}
        assert error["param"] in named and error["message"] == message.format(error["param"])
    (one,) = (ask(client, "POST", "/v1/embeddings", json={"input": "a"}).json()["error"],)
    assert one["message"] == "the prompt is empty; at least one token is needed"


def test_faults_and_what_all_prompts_share_have_no_place() -> None:
    for error in (PluginFault("x"), RequestError("sampling.top_p=2 must be at most 1"), ValueError("x")):
        assert placed(error, "input.1") is error


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ name + value }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["[1]", "5", '"text"', "cut off {", 7, ["a"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_arguments_that_a_template_cannot_read_are_named_by_their_place(ask: Ask, path: str, arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
    body, place = {
        "/v1/chat/completions": (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        "/v1/responses": ({"input": [*USER, item]}, "input[1].arguments"),
        "/v1/messages": (
            {"messages": [*USER, {"role": "assistant", "content": [block]}], "max_tokens": 9},
            "messages[1].content[0].input",
        ),
    }[path]
    client = FakeEngineClient()
    client.facts.codec.tokenizer.chat_template = TEMPLATE
    response = ask(client, "POST", path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{place}=") and "is not a JSON object, and the chat template refuses" in message


@pytest.mark.parametrize("name", ["self", "messages", "tools", "conversations", "tokenize", "chat_template"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_an_argument_that_is_not_the_templates_is_refused(ask: Ask, path: str, name: str) -> None:
    body = {"input": "x"} if path == "/v1/responses" else {"messages": USER}
    response = ask(FakeEngineClient(), "POST", path, json={**body, "chat_template_kwargs": {name: 1}})
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"] == f"chat_template_kwargs: '{name}' is not an argument of the chat template"
    )


@pytest.mark.parametrize("name", ["raise_exception", "options", "codec", "cls", "kwargs", "namespace", "loop", "range"])
def test_an_argument_of_any_other_name_is_no_fault_of_the_server(ask: Ask, name: str) -> None:
    body = {"messages": USER, "chat_template_kwargs": {name: 1}}
    assert ask(FakeEngineClient(), "POST", "/v1/chat/completions", json=body).status_code in (200, 400)


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_is_scored_once_for_all_choices_and_each_shows_its_scores(
    ask: Ask, fields: dict[str, Any], is_stream: bool
) -> None:
    if is_stream and "prompt_logprobs" in fields:
        return  # refused
    client = FakeEngineClient(lambda ids, index: " Hello" * (4 - index))  # the first ends last
    body = {"prompt": "one two three", "n": 3, "stream": is_stream, **fields}
    response = ask(client, "POST", "/v1/completions", json=body)
    assert [one.prompt_logprobs for one in client.asked[0].params.each()] == [2, None, None]
    if is_stream:
        choices = [choice for event in events(response.text) for choice in event["choices"]]
        choices.sort(key=lambda choice: choice["index"])
    else:
        choices = response.json()["choices"]
    num_tokens = len(client.asked[0].prompt_token_ids)
    if "echo" in fields:
        scores = [choice["logprobs"]["top_logprobs"][:num_tokens] for choice in choices]
    else:
        scores = [choice["prompt_logprobs"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and num_tokens > 1
    assert scores[0] == scores[1] == scores[2] and len(scores[0]) == num_tokens and all(scores[0][1:])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"echo": True, "logprobs": 20, "n": 200}, "logprobs"),
        ({"prompt_logprobs": 20, "n": 200}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 20, "n": 200}, "prompt_logprobs"),
    ],
)
def test_log_probabilities_of_a_prompt_for_many_choices_are_bounded_in_sum(
    ask: Ask, fields: dict[str, Any], named: str
) -> None:
    client = FakeEngineClient()
    response = ask(client, "POST", "/v1/completions", json={"prompt": [1] * 400, "max_tokens": 1, **fields})
    assert response.status_code == 400 and not client.asked
    assert response.json()["error"] == {
        "message": f"n=200 choices with 20 alternatives ({named}) for each of 400 prompt tokens are 1600000 "
        "log-probabilities; at most 1048576 are answered: ask for fewer choices or alternatives",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }
    fits = ask(client, "POST", "/v1/completions", json={"prompt": [1] * 400, "max_tokens": 1, **fields, "n": 2})
    assert fits.status_code == 200
