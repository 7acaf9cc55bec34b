"""From the messages of a chat request to the text that the model reads.

Messages are checked and brought into the form that chat templates expect. A request can give arguments to the template,
but cannot set the tokenizer's own options.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import ApiError
from hookline.core.errors import RequestError, clipped, shown
from hookline.core.serve.endpoints.body import check_values
from hookline.core.serve.errors import invalid
from hookline.core.tokenizer.codec import Codec

Values = dict[str, Any]
_ROLES = {"developer": "system", "function": "tool"}
"""Roles that templates know under another name."""
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content parts with text: type -> key of the text."""
_FILES = ("file", "input_file")
"""Content parts with files. Files of text are read; all others are refused."""
_PART = dict.fromkeys(("type", *_TEXT_KEYS.values(), "file"))
_CALL = {
    **dict.fromkeys(("id", "type", "index")),
    "function": dict.fromkeys(("name", "arguments")),
    "custom": dict.fromkeys(("name", "input")),
}
MESSAGE_SHAPE = {
    **dict.fromkeys(("role", "name", "tool_call_id", "reasoning", "reasoning_content", "refusal")),
    "content": _PART,
    "tool_calls": _CALL,
}
"""Fields of a message that have an effect. Others reach the template, and hardly any template reads one."""
MAX_MESSAGES = 65_536
"""Most messages of a request."""


@dataclass(frozen=True)
class ChatPrompt:
    """The input of a chat template: messages in its form, tools, and arguments of its own."""

    messages: Sequence[Values]
    tools: Sequence[Values] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    """Leave the last message open, so that the model continues it."""
    adds_generation_prompt: bool = True
    """Open a message of the model behind the others."""
    ignored: Sequence[str] = ()
    """Places of content that the model does not read."""

    def render(self, codec: Codec) -> str:
        """Render the text that the model reads.

        Raises: RequestError if there is no chat template or it refuses the messages; ApiError if the arguments of calls
        hold too many values.
        """
        messages = _with_objects(self.messages)
        try:
            return codec.render_chat(
                messages,
                tools=list(self.tools) if self.tools else None,
                add_generation_prompt=self.adds_generation_prompt and not self.continues_last,
                continue_final_message=self.continues_last,
                **self.arguments,
            )
        except RequestError as error:
            for given, call in zip(_all_calls(self.messages), _all_calls(messages), strict=True):
                if not isinstance(call["function"]["arguments"], dict):
                    raise _no_object(given, error) from None
            raise


def checked_messages(messages: Sequence[Any], param: str = "messages") -> list[Values]:
    """Messages with texts as their content, which is the form that all templates accept. Arguments of calls stay as
    they came.

    Raises: ApiError with status 400 that names the message.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise invalid(f"{param} holds {len(messages)} messages; it needs at least 1, at most {MAX_MESSAGES}", param)
    return [checked_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]


def checked_message(message: Any, place: str) -> Values:
    """A message of `checked_messages`. place: of the message, for errors."""
    if not isinstance(message, dict):
        raise invalid(f"{place}={shown(message)} is not an object with role and content", place)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{place}.role={shown(role)} is not a role", f"{place}.role")
    found = {name: value for name, value in message.items() if value is not None}
    found |= {"role": _ROLES.get(role, role), "content": text_of(message.get("content"), f"{place}.content")}
    if "tool_calls" in found:
        found["tool_calls"] = _calls(found["tool_calls"], f"{place}.tool_calls")
    if "reasoning" in found and "reasoning_content" not in found:
        found["reasoning_content"] = found["reasoning"]
    return found


def text_of(content: Any, place: str) -> str:
    """The text of a message's content, which is a text, a list of parts, or null.

    Raises: ApiError with status 400 for any other content.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place}={shown(content)} is neither a text nor a list of parts", place)
    return "\n".join(text_of_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def text_of_part(part: Any, place: str) -> str:
    """The text of one part of a message's content.

    Raises: ApiError with status 400 for a part without text.
    """
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in _FILES and (data := _text_data(part, kind)) is not None:
        return decoded(data, place)
    if isinstance(kind, str) and kind not in _TEXT_KEYS:
        raise invalid(f"{place}: this model reads text only, and the part is of type {shown(kind)}", place)
    text = part.get(_TEXT_KEYS[kind]) if isinstance(part, dict) and isinstance(kind, str) else None
    if not isinstance(text, str):
        raise invalid(f"{place}={shown(part)} is not a part with a type and a text", place)
    return text


def _text_data(part: Values, kind: str) -> str | None:
    """The base64 data of a file's part if its media type says that it is text; else None."""
    file = part.get("file") if kind == "file" else part
    data = file.get("file_data") if isinstance(file, dict) else None
    head, _, body = data.partition(",") if isinstance(data, str) else ("", "", "")
    return body if head.startswith("data:text/") and head.endswith(";base64") else None


def decoded(data: str, place: str) -> str:
    """Decode a text that was sent as base64.

    Raises: ApiError with status 400 if the data is not base64 or not UTF-8.
    """
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"{place} is not a text in UTF-8, as base64", place) from None


def _calls(calls: Any, place: str) -> list[Values]:
    if not isinstance(calls, list):
        raise invalid(f"{place}={shown(calls)} is not a list of tool calls", place)
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, place: str) -> Any:
    custom = call.get("custom") if isinstance(call, dict) else None
    if isinstance(custom, dict):  # its text is the one argument of a function, as the model called it
        as_function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        call = {"id": call.get("id"), "type": "function", "function": as_function}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{place}={shown(call)} is not a call of a function with a name", place)
    return {PLACE: f"{place}.function.arguments", **call}


PLACE = "_place"
"""A key that is added to calls for error messages: the place of their arguments in the request. Templates do not see
it."""


def _no_object(call: Values, error: RequestError) -> ApiError:
    place = call[PLACE]
    return invalid(f"{place}={shown(_given(call))} is not a JSON object, and {error}", place)


def _with_objects(messages: Sequence[Values]) -> list[Values]:
    """The messages with the arguments of calls parsed into objects. This takes long if the arguments are large."""
    given = [_given(call) for call in _all_calls(messages)]
    texts = [one.encode(errors="replace") for one in given if isinstance(one, str)]
    check_values(texts, "the arguments of the tool calls hold", "leave old ones out")
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]} if (calls := _calls_of(message)) else message
        for message in messages
    ]


def _calls_of(message: Values) -> list[Values]:
    calls: list[Values] = message.get("tool_calls", [])
    return calls


def _all_calls(messages: Sequence[Values]) -> list[Values]:
    return [call for message in messages for call in _calls_of(message)]


def _given(call: Values) -> Any:
    return call["function"].get("arguments")


def _with_object(call: Values) -> Values:
    told = {name: value for name, value in call.items() if name != PLACE}
    return {**told, "function": {**call["function"], "arguments": _arguments(_given(call))}}


def _arguments(arguments: Any) -> Any:
    """Parse a call's arguments: clients send JSON text, templates expect an object. Text that is not JSON is returned
    as it is.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments) if arguments.strip() else {}
        return {} if value is None else value
    except (ValueError, RecursionError):
        return arguments


def effort_arguments(effort: Any) -> dict[str, Any]:
    """Arguments that tell the template how much to reason. `none` turns reasoning off in templates with
    enable_thinking.
    """
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def checked_arguments(arguments: Mapping[str, Any] | None, codec: Codec) -> Mapping[str, Any]:
    """The request's arguments for the template.

    Raises: ApiError with status 400 for a name that the tokenizer itself would take as an option.
    """
    if not arguments:
        return {}
    taken = (
        {"messages", "conversations", "self", *inspect.signature(codec.tokenizer.apply_chat_template).parameters}
        if codec.tokenizer
        else ()
    )
    for name in arguments:
        if name in taken or not name.isidentifier():
            message = f"chat_template_kwargs: {clipped(name)!r} is not an argument of the chat template"
            raise ApiError(400, message, param="chat_template_kwargs")
    return arguments
