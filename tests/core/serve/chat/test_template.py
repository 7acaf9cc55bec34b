"""Messages of clients in the one form that chat templates have in common, and what is refused on the way."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.contracts import ApiError
from hookline.core.serve.chat.template import ChatPrompt, _with_objects, checked_arguments, checked_messages
from hookline.core.testing.engine_client import tiny_model


def test_content_is_text_whatever_form_it_came_in() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    found = checked_messages([{"role": "user", "content": one} for one in ("x", None, parts)])
    assert [message["content"] for message in found] == ["x", "", "a\nb\nc"]


def test_arguments_of_calls_are_objects_and_text_that_is_no_json_stays() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": one}} for one in ('{"a": 1}', "", None, "no json")]
    (message,) = _with_objects(checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}]))
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": 1}, {}, {}, "no json"]


def test_roles_and_reasoning_go_by_the_names_that_templates_know() -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "r"}]
    system, assistant = checked_messages(messages)
    assert system["role"] == "system" and assistant["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("x", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        checked_messages([message])
    assert caught.value.param == place and caught.value.status == 400


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "tools", "conversation", "messages", "return_dict", "a b"]
)
def test_arguments_of_the_tokenizer_itself_are_not_the_request_s(name: str) -> None:
    with pytest.raises(ApiError, match="is not an argument of the chat template"):
        checked_arguments({name: True}, tiny_model().codec)


def test_arguments_of_the_template_are() -> None:
    assert checked_arguments({"enable_thinking": False}, tiny_model().codec) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("given", "status"),
    [(["[" + "0," * 2**20 + "0]"], 413), (['"', "[" + "[]," * 2**18 + "0]"], 413), ([f"[{'9' * 500}]"], 400)],
    ids=["many", "behind an open quote", "digits"],
)
def test_arguments_that_take_long_to_decode_are_refused_undecoded(given: list[str], status: int) -> None:
    calls = [{"function": {"name": "f", "arguments": one}} for one in given]
    chat = ChatPrompt(checked_messages([{"role": "assistant", "tool_calls": calls}]))
    with pytest.raises(ApiError, match="the arguments of the tool calls hold") as caught:
        chat.render(tiny_model().codec)
    assert caught.value.status == status
