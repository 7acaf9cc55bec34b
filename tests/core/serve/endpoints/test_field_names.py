"""Errors name the fields and the places that the client wrote, whatever the parts behind an endpoint call them."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.contracts import ApiError
from hookline.core.errors import PromptTooLongError, QueueFullError, RequestError
from hookline.core.serve.errors import Naming
from hookline.core.testing.engine_client import FakeEngineClient
from tests.core.serve.conftest import Ask

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
USER = {"role": "user", "content": "x"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 4},
    COMPLETIONS: {"prompt": "x"},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "minProperties": 9}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"minLength": 9}}}
TEXT_FORMAT = {"type": "json_schema", "name": "x", "schema": {"minLength": 9}}


def refused(ask: Ask, path: str, client: FakeEngineClient | None = None, **fields: Any) -> tuple[str, str | None]:
    """The message and the param of what a request is refused with."""
    response = ask(client or FakeEngineClient(), "POST", path, json={**BASE[path], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error.get("param")


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 25}, "top_logprobs=25 must be between 0 and 20", "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1 must be between 0 and 20", "top_logprobs"),
        (
            RESPONSES,
            {"include": ["message.output_text.logprobs"], "top_logprobs": 25},
            "top_logprobs=25 must be",
            "top_logprobs",
        ),
        (COMPLETIONS, {"logprobs": 25}, "logprobs=25 must be between 0 and 20", "logprobs"),
        (MESSAGES, {"stop_sequences": ["x" * 20_000]}, "stop_sequences has 20000 characters", None),
        (MESSAGES, {"stop": ["x"] * 2000}, "stop has 2000 texts", None),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice forces a call, and there are no tools", None),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema=5 is not a JSON schema", None),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters=5 is not a JSON schema",
            "tools",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": 'a"b'}}]},
            "tools[0]: the name 'a\"b' of a function must be at most 256 printable characters without \" and \\",
            "tools",
        ),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice: {'type': 'function'} has no name", "tool_choice"),
        (
            MESSAGES,
            {"tools": [{"type": "computer_20250124", "name": "computer"}], "tool_choice": {"type": "any"}},
            "tool_choice forces a call, and there are no tools that can be called here; of type computer_20250124 none",
            None,
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]},
            "messages holds no message with content; it holds messages.container_upload; it needs at least 1",
            None,
        ),
        (CHAT, {"max_tokens": 5000, "max_completion_tokens": 6000}, "This model's maximum context", "max_tokens"),
        (CHAT, {"max_completion_tokens": 5000}, "This model's maximum context", "max_completion_tokens"),
        (CHAT, {"max_tokens": 5000}, "This model's maximum context", "max_tokens"),
        (RESPONSES, {"max_output_tokens": 5000}, "This model's maximum context", "max_output_tokens"),
        (COMPLETIONS, {"max_tokens": 5000}, "This model's maximum context", "max_tokens"),
        (CHAT, {"messages": [{**USER, "content": "x " * 5000}]}, "This model's maximum context", "messages"),
        (RESPONSES, {"input": "x " * 5000}, "This model's maximum context", "input"),
        (RESPONSES, {"text": {"format": {"type": "yaml"}}}, "text.format.type='yaml' is not one of", "text"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "schema": 5}}},
            "text.format.schema must be a JSON schema",
            "text",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}},
            "text.format.schema.type='nope' must be one of array, boolean,",
            "text",
        ),
        (
            CHAT,
            {"structured_outputs": {"json": {"properties": {"a": {"$ref": "#/$defs/A"}}}}},
            "structured_outputs.json.properties.a.$ref='#/$defs/A' names nothing in this schema; put it in $defs",
            "structured_outputs",
        ),
    ],
)
def test_a_field_has_the_name_that_the_request_gives_it(
    ask: Ask, path: str, fields: dict[str, Any], message: str, param: str | None
) -> None:
    told, of = refused(ask, path, **fields)
    assert told.startswith(message) and of == param


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
        (COMPLETIONS, {"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"structured_outputs": {"json": {"minLength": 9}}}, "structured_outputs.json"),
        (CHAT, {"tools": [CHAT_TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "e"}}, CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[1].function.parameters",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "e"}}, CHAT_TOOL], "tool_choice": "required"},
            "tools",
        ),
        (RESPONSES, {"text": {"format": TEXT_FORMAT}}, "text.format.schema"),
        (RESPONSES, {"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
        (
            RESPONSES,
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        (
            MESSAGES,
            {"tools": [{"name": "f", "input_schema": {"type": "nope"}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_schema_that_the_engine_refuses_is_named_by_its_place_in_the_request(
    ask: Ask, path: str, fields: dict[str, Any], place: str, num_tokens: int
) -> None:
    error = RequestError("sampling.structured_outputs.json: it is too large")
    client = FakeEngineClient(error=error, error_after=num_tokens)
    message, param = refused(ask, path, client, **fields)
    assert message == f"{place}: it is too large"
    assert param == (None if path == MESSAGES else place.partition(".")[0].partition("[")[0])


LONG = "x" * 10_000_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": [1] * 5000}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["x", LONG]}, "input.1"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * 5000]}, "prompt.1"),
        (CHAT, {"messages": [{**USER, "content": LONG}]}, "messages"),
        (RESPONSES, {"input": LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_is_named(ask: Ask, path: str, fields: dict[str, Any], param: str) -> None:
    client = FakeEngineClient(error=PromptTooLongError("it is too long") if "embeddings" in path else None)
    error = ask(client, "POST", path, json=fields).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_an_error_of_another_kind_stays_what_it_is() -> None:
    full = QueueFullError("sampling.stop", 1, 1, 1)
    with pytest.raises(QueueFullError), Naming({"stop": "stop_sequences"}):
        raise full
    with pytest.raises(RequestError, match="no field") as error, Naming({"stop": "stop_sequences"}):
        raise RequestError("no field")
    assert not isinstance(error.value, ApiError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": "s", "messages": [{"role": "user", "content": 5}]}, "messages[0].content=5 is neither"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use"}]},
                ]
            },
            "messages[1].content[1]={'type': 'tool_use'} has no name of a tool",
        ),
        (
            {
                "system": "s",
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": "r"}, {"type": "image"}]},
                ],
            },
            "messages[0].content[1]: this model reads text only",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result"}, {"type": "text", "text": "a"}]},
                    {"role": "user", "content": [5]},
                ]
            },
            "messages[1].content[0]=5 is not a part",
        ),
    ],
)
def test_a_message_of_blocks_is_named_by_its_own_index(ask: Ask, fields: dict[str, Any], message: str) -> None:
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        response = ask(FakeEngineClient(), "POST", path, json={"max_tokens": 4, **fields})
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "message", "param"),
    [
        ([{"role": "user", "content": 5}], "input[0].content=5 is neither", "input[0].content"),
        ([{"role": 5, "content": "x"}], "input[0].role=5 is not a role", "input[0].role"),
        ([USER, CALL, CALL, {"role": "user", "content": 5}], "input[3].content=5", "input[3].content"),
        ([USER, CALL, {"type": "function_call"}], "input[2]={'type': 'function_call'} has no name", "input[2]"),
    ],
)
def test_an_item_is_named_by_its_own_index(ask: Ask, items: list[Any], message: str, param: str) -> None:
    told, of = refused(ask, RESPONSES, input=items, instructions="Be brief.")
    assert told.startswith(message) and of == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_white_space_that_is_not_allowed_reaches_the_engine(ask: Ask, path: str) -> None:
    for given, taken in (({"whitespace": False}, False), ({"disable_any_whitespace": False}, True), ({}, True)):
        client = FakeEngineClient()
        fields = {**BASE[path], "structured_outputs": {"json": {"type": "object"}, **given}}
        assert ask(client, "POST", path, json=fields).status_code == 200
        assert client.asked[0].params.structured_outputs.whitespace is taken


DATA = "data:text/plain;base64,aGVsbG8="
FORM: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
CUSTOM_CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": DATA}}]}]}, None),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CUSTOM_CALL]}, USER]}, None),
        (RESPONSES, {"input": [{**USER, "foo": 1}]}, "input[0].foo"),
        (
            RESPONSES,
            {"input": [USER, {**CALL, "foo": 1}, {"type": "function_call_output", "output": "x", "bar": {}}]},
            "input[1].foo, input[2].bar",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "foo": 1}]}]},
            "input[0].content[0].foo",
        ),
        (RESPONSES, {"input": [USER, {"type": "reasoning", "encrypted_content": "x"}]}, None),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
                    },
                    {"id": "fc_1", "status": "completed", **CALL},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                    {"role": "user", "content": [{"type": "input_file", "file_data": DATA}]},
                ]
            },
            None,
        ),
        (MESSAGES, {"system": [{"type": "text", "text": "s", "foo": 1}]}, "system[0].foo"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]},
            "messages[0].content[0].foo",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "is_error": True,
                                "content": [
                                    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "foo": 1}
                                ],
                            }
                        ],
                    },
                ]
            },
            "messages[2].content[0].is_error, messages[2].content[0].content[0].foo",
        ),
    ],
)
def test_fields_within_a_conversation_that_are_not_read_are_named_and_no_others(
    ask: Ask, path: str, fields: dict[str, Any], names: str | None
) -> None:
    response = ask(FakeEngineClient(), "POST", path, json={**BASE[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers.get("X-Hookline-Ignored") == names


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (
            RESPONSES,
            {"text": {"format": FORM}, "response_format": {"type": "json_object"}},
            "response_format text.format",
        ),
        (
            MESSAGES,
            {"output_format": FORM, "response_format": {"type": "json_object"}},
            "response_format output_format",
        ),
        (
            MESSAGES,
            {"output_format": FORM, "output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}}},
            "output_config.format output_format",
        ),
    ],
)
def test_of_two_forms_by_different_names_none_is_dropped(
    ask: Ask, path: str, fields: dict[str, Any], names: str
) -> None:
    first, second = names.split()
    message, param = refused(ask, path, **fields)
    assert message == f"{first} and {second} are both set; give one"
    assert param == (None if path == MESSAGES else second.partition(".")[0])


def test_one_form_by_two_names_is_one_form(ask: Ask) -> None:
    fields = {"output_format": FORM, "output_config": {"format": dict(FORM)}}
    client = FakeEngineClient()
    assert ask(client, "POST", MESSAGES, json={**BASE[MESSAGES], **fields}).status_code == 200
    assert client.asked[0].params.structured_outputs is not None


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}]}, "tools[0].function"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0]"),
        (MESSAGES, {"tools": [{"name": "f", "strict": "yes"}]}, "tools[0]"),
        (RESPONSES, {"text": {"format": {**FORM, "strict": "true"}}}, "text.format"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "true"}}},
            "response_format.json_schema",
        ),
    ],
)
def test_strict_is_true_or_false(ask: Ask, path: str, fields: dict[str, Any], place: str) -> None:
    message, _ = refused(ask, path, **{"tool_choice": None, **fields})
    assert message.startswith(f"{place}.strict=") and message.endswith("is neither true nor false")


def test_empty_stop_sequences_stop_nothing_in_any_api(ask: Ask) -> None:
    client = FakeEngineClient()
    for path, fields in ((MESSAGES, {"stop_sequences": ["", "\n\n"]}), (CHAT, {"stop": ["", "\n\n"]})):
        assert ask(client, "POST", path, json={**BASE[path], **fields}).status_code == 200
    assert [list(one.params.stop) for one in client.asked] == [["\n\n"]] * 2
    assert ask(client, "POST", MESSAGES, json={**BASE[MESSAGES], "stop_sequences": [""]}).status_code == 200
