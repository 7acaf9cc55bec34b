"""What endpoints make of requests: options of service, seeds, tools, and conversations of other APIs as messages."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Any

import httpx
import jsonschema
import pytest

from hookline.core.errors import RequestError
from hookline.core.outputs import TokenLogprob
from hookline.core.serve.endpoints import request_options
from hookline.core.serve.errors import api_error
from hookline.core.serve.http.app import surfaces_of
from hookline.core.serve.http.openapi import document
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from hookline.core.tokenizer.token_spelling import TokenSpelling
from hookline.plugins.apis.openai.logprobs import LEAST, CompletionLogprobs, chat_logprobs
from tests.core.serve.conftest import Ask

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def prompt_of(client: FakeEngineClient) -> str:
    return client.facts.codec.decode(client.asked[-1].prompt_token_ids, skip_special_tokens=False)


def test_options_come_by_field_or_by_header_and_the_header_wins(ask: Ask) -> None:
    client = FakeEngineClient()
    fields = {"priority": 5, "tags": {"a": "b"}, "cache_salt": "s", "deadline_s": 2.5, "timeout_s": 9}
    ask(client, "POST", "/v1/completions", json={"prompt": "x", **fields})
    headers = {"X-Priority": "-3", "X-Tags": "tenant=acme, class=chat", "X-Cache-Salt": "t", "X-Deadline-S": "1"}
    ask(client, "POST", "/v1/completions", json={"prompt": "x", **fields}, headers=headers)
    first, second = ({key: value for key, value in asked.options.items() if key != "trace"} for asked in client.asked)
    assert first == fields
    tags = {"tenant": "acme", "class": "chat"}
    assert second == {"priority": -3, "tags": tags, "cache_salt": "t", "deadline_s": 1.0, "timeout_s": 9}


def test_a_request_that_says_nothing_sends_no_options(ask: Ask) -> None:
    client = FakeEngineClient()
    ask(client, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert set(client.asked[0].options) == {"trace"}  # of the server's own


@pytest.mark.parametrize(("given", "taken"), [(7, 7), (-1, None), (-2, 2**63 - 2), (2**63, 0), (None, None)])
def test_a_seed_of_any_sign_is_taken(ask: Ask, given: int | None, taken: int | None) -> None:
    client = FakeEngineClient()
    ask(client, "POST", "/v1/completions", json={"prompt": "x", "seed": given})
    assert client.asked[0].params.seed == taken


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": 7}]}, "is not a tool with a type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "not a function with a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "not among the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "is not auto, none, required"),
        ({"tools": [TOOL]}, "the server has none: serve.tool_parser"),
        ({"chat_template": "{{ 1 }}"}, "a chat template from a request is not taken"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"response_format": {"type": "yaml"}}, "is not one of text, json_object"),
        ({"stream_options": {}}, "goes with stream=true only"),
    ],
)
def test_what_does_not_go_together_is_said(ask: Ask, fields: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = ask(FakeEngineClient(), "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3.0},
        {"max_tokens": "3"},
        {"model": "", "max_tokens": 3},
        {"top_logprobs": 0, "max_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 3},
    ],
)
def test_what_clients_write_in_their_own_way_is_understood(ask: Ask, fields: dict[str, Any]) -> None:
    client = FakeEngineClient()
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = ask(client, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200 and response.json()["model"] == "fake"
    assert client.asked[0].params.max_tokens == 3 and client.asked[0].params.logprobs is None


@pytest.mark.parametrize(
    ("prompt", "place", "message"),
    [
        (["x", [1], None], "prompt.2", "prompt.2=None is neither a text nor a list of token ids"),
        (["x", [1, True]], "prompt.1", "prompt.1=[1, True] is neither a text nor a list of token ids"),
        ([1, 2, "x"], "prompt.2", "prompt.2='x' is no token id"),
    ],
)
def test_of_many_prompts_the_one_that_is_none_is_named(ask: Ask, prompt: Any, place: str, message: str) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/completions", json={"prompt": prompt})
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["param"]) == (400, message, place)


@pytest.mark.parametrize("fields", [{"n": 10**400}, {"prompt_logprobs": 10**400}])
def test_a_number_without_end_is_shown_by_its_beginning_and_end(ask: Ask, fields: dict[str, int]) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400 and len(response.json()["error"]["message"]) < 400


@pytest.mark.parametrize(
    ("path", "fields", "settings", "param", "message"),
    [
        (
            "/v1/completions",
            {"prompt": ["x"] * 3, "n": 2},
            {"max_requests": 4},
            "prompt",
            "6 answers are asked for (2 for each of 3 in prompt); serve.max_requests=4 are the most at once",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "n": 5},
            {"max_requests": 4, "replicas": 2},
            "n",
            "5 answers are asked for (5 for each of 1 in prompt); serve.max_requests=4 are the most at once of each of "
            "2 replicas",
        ),
    ],
    ids=["completions", "chat"],
)
def test_more_completions_than_are_ever_made_at_once_are_no_full_queue(
    ask: Ask, path: str, fields: dict[str, Any], settings: dict[str, int], param: str, message: str
) -> None:
    client = FakeEngineClient()
    response = ask(client, "POST", path, ServeConfig(**settings), json=fields)
    assert response.status_code == 400 and "retry-after" not in response.headers and not client.asked
    error = response.json()["error"]
    assert error["param"] == param and error["message"] == message


EMPTY = "the prompt is empty; at least one token is needed"
LATE = "deadline_s=-1.0 must be a finite number of seconds above 0, or None"
TAG = "tags.tennant is unknown. Did you mean 'tenant'? engine.tag_keys allows: tenant"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Refuses(FakeEngineClient):
    """An engine that refuses all requests, at once or once it has seen them, as one in another thread does."""

    def __init__(self, message: str, is_late: bool) -> None:
        super().__init__()
        self.message, self.is_late = message, is_late

    def stream(self, prompt: Any, params: Any, **options: Any) -> Any:
        if not self.is_late:
            raise RequestError(self.message)

        async def _late() -> Any:
            raise RequestError(self.message)
            yield

        return _late()


@pytest.mark.parametrize(
    ("path", "fields", "refusal", "param", "message"),
    [
        ("/v1/completions", {"prompt": "x"}, EMPTY, "prompt", EMPTY),
        ("/v1/completions", {"prompt": ["x", "x"]}, EMPTY, "prompt.0", f"prompt.0: {EMPTY}"),
        ("/v1/embeddings", {"input": "x"}, EMPTY, "input", EMPTY),
        ("/v1/completions", {"prompt": "x"}, LATE, "deadline_s", LATE),
        ("/v1/completions", {"prompt": ["x", "x"]}, LATE, "deadline_s", LATE),
        ("/v1/chat/completions", CHAT, LATE, "deadline_s", LATE),
        ("/v1/chat/completions", CHAT, TAG, "tags", TAG),
        ("/detokenize", {}, "", "tokens", "tokens: Field required"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_refused_request_is_told_which_field_to_change(
    ask: Ask, path: str, fields: dict[str, Any], refusal: str, param: str, message: str, is_late: bool
) -> None:
    error = ask(Refuses(refusal, is_late), "POST", path, json=fields).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


def forced(ask: Ask, client: FakeEngineClient, *parameters: Any) -> httpx.Response:
    """Ask for a call of any of some functions, whose schemas these are."""
    functions = [{"name": f"f{number}", "parameters": one} for number, one in enumerate(parameters)]
    tools = [{"type": "function", "function": one} for one in functions]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    return ask(client, "POST", "/v1/chat/completions", json=body)


def test_what_the_schemas_of_functions_define_is_found_by_their_references(ask: Ask) -> None:
    client = FakeEngineClient()
    first = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "null"}}}
    second = {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}}, "$defs": {"A": {"enum": [1]}}}
    assert forced(ask, client, first, second, {"properties": {"a": {}}, "$defs": ["no mapping"]}).status_code == 200
    schema = json.loads(client.asked[0].params.structured_outputs.json)
    calls = [one["properties"]["parameters"] for one in schema["items"]["anyOf"]]
    assert [one["properties"]["a"] for one in calls] == [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A_2"}, {}]
    assert schema["$defs"] == {"A": {"type": "null"}, "A_2": {"enum": [1]}, "root": calls[1]}
    assert calls[1]["properties"]["b"] == {"$ref": "#/$defs/root"}


@pytest.mark.parametrize("kind", ["sampling", "pooling"])
def test_an_error_of_the_engine_names_the_field_as_requests_do(kind: str) -> None:
    error = api_error(RequestError(f"{kind}.name=9 must be at most 8"))
    assert (error.status, error.message, error.param) == (400, "name=9 must be at most 8", "name")


def test_a_conversation_of_items_becomes_messages(ask: Ask) -> None:
    client = FakeEngineClient()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ]
    ask(client, "POST", "/v1/responses", json={"input": items, "instructions": "Be brief."})
    wanted = "system\nBe brief.", "user\nweather?", "assistant\nLet me", "tool\nsunny", "assistant\n"
    assert prompt_of(client) == "<|im_start|>" + "<|im_end|>\n<|im_start|>".join(wanted)


def test_blocks_of_a_conversation_become_messages(ask: Ask) -> None:
    client = FakeEngineClient()
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me"}, {"type": "tool_use", "name": "f"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "sunny"}, {"type": "text", "text": "And?"}]},
    ]
    body = {"messages": messages, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 9}
    ask(client, "POST", "/v1/messages", json=body)
    wanted = "system\nBe brief.", "user\nweather?", "assistant\nLet me", "tool\nsunny", "user\nAnd?", "assistant\n"
    assert prompt_of(client) == "<|im_start|>" + "<|im_end|>\n<|im_start|>".join(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_conversation_in_very_many_pieces_takes_no_longer_than_one_in_few(ask: Ask, path: str) -> None:
    """Put together piece by piece, each of the two would copy 100 GB."""
    text, num_pieces = "x" * 700, 20_000
    if path == "/v1/responses":
        item = {"type": "message", "role": "assistant", "content": text}
        body: dict[str, Any] = {"input": [{"type": "message", "role": "user", "content": "x"}, *[item] * num_pieces]}
    else:
        blocks = [{"type": "thinking", "thinking": text}] * num_pieces
        body = {"messages": [{"role": "assistant", "content": blocks}], "max_tokens": 4}
    started_s = time.process_time()
    response = ask(FakeEngineClient(), "POST", path, json=body)
    assert response.status_code in (200, 400), response.text
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize("value", [5, "text", [], False])
def test_a_form_of_the_answer_that_is_no_object_is_400(ask: Ask, value: Any) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/responses", json={"input": "x", "text": {"format": value}})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"text.format={value!r} is not an object with a type"


@pytest.mark.parametrize("kind", [{}, [], 5, "x"])
def test_a_choice_of_tools_of_no_known_type_is_400(ask: Ask, kind: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tool_choice": {"type": kind}}
    response = ask(FakeEngineClient(), "POST", "/v1/messages", json=body)
    assert response.status_code == 400
    assert "is not of type auto, any, none, or tool with a name" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "background", "prompt"])
def test_what_needs_a_memory_is_refused(ask: Ask, name: str) -> None:
    value: Any = True if name == "background" else "resp_1"
    response = ask(FakeEngineClient(), "POST", "/v1/responses", json={"input": "x", name: value})
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_parameter"


def test_the_tokenizer_s_configuration_is_told_by_option_alone(ask: Ask) -> None:
    assert ask(FakeEngineClient(), "GET", "/tokenizer_info").status_code == 404
    told = ask(FakeEngineClient(), "GET", "/tokenizer_info", ServeConfig(tokenizer_info=True)).json()
    assert told["eos_token"] == "<|endoftext|>" and "im_start" in told["chat_template"]


def test_messages_are_tokenized_as_a_chat_would(ask: Ask) -> None:
    client, messages = FakeEngineClient(), [{"role": "user", "content": "x"}]
    tokens = ask(client, "POST", "/tokenize", json={"messages": messages}).json()["tokens"]
    ask(client, "POST", "/v1/chat/completions", json={"messages": messages})
    assert client.asked[0].prompt_token_ids == tokens


def test_the_document_has_every_header_that_says_something_of_a_request_s_service() -> None:
    headers = {value for name, value in vars(request_options).items() if name.isupper() and isinstance(value, str)}
    paths = document(surfaces_of(FakeEngineClient(), ServeConfig()))["paths"]
    parameters = paths["/v1/completions"]["post"]["parameters"]
    assert {one["name"] for one in parameters} == headers and "X-Session-Id" in headers


def test_the_page_of_the_endpoints_needs_nothing_from_elsewhere(ask: Ask) -> None:
    page = ask(FakeEngineClient(), "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text and "src=" not in page.text and "http" not in page.text
    script, style = (page.text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("script", "style"))
    for part in (script, style):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.headers["content-security-policy"]


def documented(method: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The example of an endpoint's body and the schema of its answer, with all that it refers to."""
    told = document(surfaces_of(FakeEngineClient(), ServeConfig()))
    operation = told["paths"][path][method.lower()]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    return body.get("example", {}), {**answer, "components": told["components"]}


FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}),
    ("/v1/completions", {"echo": True, "logprobs": 0, "max_tokens": 0}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
    ("/tokenize", {"return_token_strs": True}),
]


@pytest.mark.parametrize(
    ("method", "path", "further"),
    [
        ("GET", "/v1/models", {}),
        *(("POST", f"/v1/{name}", {}) for name in ("completions", "chat/completions", "responses", "messages")),
        *(("POST", path, {}) for path in ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/embeddings")),
        *(("POST", path, {}) for path in ("/score", "/rerank")),
        *(("POST", path, further) for path, further in FURTHER),
    ],
)
def test_the_document_s_examples_are_answered_as_it_says_and_all_that_is_answered_is_in_it(
    ask: Ask, method: str, path: str, further: dict[str, Any]
) -> None:
    example, schema = documented(method, path)
    client = FakeEngineClient('<think>so</think>Hello<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    parsers = ServeConfig(reasoning_parser="think", tool_parser="hermes")
    body = {"json": {**example, **further}} if method == "POST" else {}
    answer = ask(client, method, path, parsers, **body)
    assert answer.status_code == 200, answer.text
    jsonschema.Draft202012Validator(closed(schema)).validate(answer.json())


def closed(schema: Any) -> Any:
    """A schema whose objects have no fields beside those that it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    return found | {"additionalProperties": False} if "properties" in found and "title" in found else found


def test_models_of_both_apis_are_described() -> None:
    _, schema = documented("GET", "/v1/models")
    assert [one["$ref"].rpartition("/")[2] for one in schema["anyOf"]] == ["ModelList", "ModelPage"]
    fields = schema["components"]["schemas"]["ChatCompletion"]["properties"]
    assert "description" not in fields["prompt_logprobs"]  # which is no parameter of sampling here


def test_bytes_of_tokens_make_the_characters_that_no_single_token_has() -> None:
    codec = tiny_model().codec
    texts, text = TokenSpelling(codec), "naïve 🙂 <|im_end|>"
    ids = codec.encode_text(text)
    assert b"".join(texts.data(one) for one in ids).decode() == text
    assert "�" in "".join(texts.text(one) for one in ids)


def test_offsets_are_places_in_the_text_that_came() -> None:
    codec = tiny_model().codec
    texts, echoed, made = TokenSpelling(codec), "é漢 <|im_end|>x", "😀ñ <|im_end|>y"
    prompt, ids = codec.encode_text(echoed), codec.encode_text(made)
    for skips_special in (True, False):
        text = echoed + codec.decode(ids, skip_special_tokens=skips_special)
        logprobs = CompletionLogprobs(texts, prompt, echoed=echoed, skips_special=skips_special)
        first, second = (logprobs.of(part, [None] * len(part)) for part in (prompt, ids))  # in two pieces
        offsets = [*first["text_offset"], *second["text_offset"]]
        assert offsets == sorted(offsets) and set(offsets) <= set(range(len(text) + 1)) and offsets[-1] < len(text)
        for token_id, offset in zip([*prompt, *ids], offsets, strict=True):
            if "�" not in texts.text(token_id) and not (skips_special and texts.is_special(token_id)):
                assert text.startswith(texts.text(token_id), offset)


def test_two_tokens_with_one_text_are_told_apart_and_minus_infinity_is_a_number() -> None:
    texts = TokenSpelling(tiny_model().codec)
    halves = [one for one in range(4000) if texts.text(one) == "�"][:2]
    scored = TokenLogprob(halves[0], -1.5, ((halves[1], -0.5), (65, float("-inf"))))
    found = CompletionLogprobs(texts).of([halves[0]], [scored])
    assert found["top_logprobs"] == [{"�": -1.5, f"token_id:{halves[1]}": -0.5, texts.text(65): LEAST}]
    assert chat_logprobs(texts.behind([]), [scored])["content"][0]["bytes"] == list(texts.data(halves[0]))
    as_ids = CompletionLogprobs(texts, as_ids=True).of([halves[0]], [scored])
    assert as_ids["tokens"] == [f"token_id:{halves[0]}"]


@pytest.mark.parametrize(
    ("path", "body", "operation", "prefix"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "chat", "chatcmpl-"),
        ("/v1/responses", {"input": "x"}, "chat", "resp_"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}, "chat", "msg_"),
        ("/v1/completions", {"prompt": "x"}, "text_completion", "cmpl-"),
        ("/v1/embeddings", {"input": "x"}, "embeddings", "embd-"),
    ],
)
def test_a_request_brings_its_callers_trace_and_its_responses_id(
    ask: Ask, path: str, body: dict[str, Any], operation: str, prefix: str
) -> None:
    client, parent = FakeEngineClient(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"Traceparent": parent, "tracestate": "a=b", "X-Other": "c", "baggage": "x" * 9000}
    answer = ask(client, "POST", path, json=body, headers=headers).json()
    named = {"gen_ai.operation.name": operation, "gen_ai.response.id": answer.get("id", "")}
    trace = client.asked[0].options["trace"]
    assert trace["gen_ai.response.id"].startswith(prefix)
    assert trace == {"traceparent": parent, "tracestate": "a=b", **named}
