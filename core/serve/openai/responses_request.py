"""What /v1/responses takes: its fields, and the chat turn that is made of them. Nothing is kept between requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from hookline.core.errors import shown
from hookline.core.serve.chat.template import ChatPrompt, checked_arguments, checked_message, checked_messages, text_of
from hookline.core.serve.chat.turn import Turn, checked_tools, prepared
from hookline.core.serve.endpoints.fields import SamplingFields, at_least
from hookline.core.serve.endpoints.structured import FORMAT, SCHEMA
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.errors import ApiError, invalid
from hookline.core.serve.openai.chat_request import tool_choice

_STATE = "this server keeps no responses; send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
_COLLECTED = ("content", "reasoning_content")
"""Keys of an assistant's message whose texts come from several items."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """A conversation to be gone on with."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        *SamplingFields.IGNORED,
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    )

    input: str | list[Any] | None = None
    """A text, or items: messages, function calls and their outputs, reasoning."""
    instructions: str | None = None
    """What the model is told first."""
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    """`format` is what the answer must look like."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """`effort` is handed to the chat template; `none` turns thinking off where it has enable_thinking."""
    top_logprobs: int | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raises: ApiError for what does not go together, and for what would need memory of other requests."""
        self.check_stream()
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ApiError(400, f"{name} is not supported: {_STATE}", param=name, code="unsupported_parameter")
        if self.background:
            raise invalid(f"background=true is not supported: {_STATE}", "background", "unsupported_parameter")
        if self.prompt is not None:
            raise invalid("prompt templates are not supported; send input", "prompt", "unsupported_parameter")
        if self.n not in (None, 1):
            raise invalid(f"n={shown(self.n)} is not supported: a response is one answer", "n")
        at_least("max_output_tokens", self.max_output_tokens, 1)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token; None without log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """See SamplingFields."""
        return self.response_format or self._format()

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        names = {"messages": "input", "logprobs": "top_logprobs"}
        if self.max_output_tokens is not None:
            names["max_tokens"] = "max_output_tokens"
        return names if self.response_format else names | {FORMAT: "text.format", SCHEMA: "text.format.schema"}

    def turn(self, surface: Surface) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError for what cannot be served.
        """
        functions = [_function(tool, index) for index, tool in enumerate(self.tools or [])]
        tools = checked_tools(functions, tool_choice(self.tool_choice), calls_one=self.parallel_tool_calls is False)
        arguments = dict(checked_arguments(self.chat_template_kwargs, surface.codec))
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            arguments |= {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
        chat = ChatPrompt(checked_messages(list(self._messages()), "input"), tools.for_template, arguments)
        asked = self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens
        return prepared(surface, chat, self, tools, max_tokens=asked, logprobs=self.num_logprobs)

    def _format(self) -> dict[str, Any] | None:
        """text.format as chat's response_format."""
        given = (self.text or {}).get("format")
        if given is not None and not isinstance(given, dict):
            raise invalid(f"text.format={shown(given)} is not an object with a type", "text")
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": given}

    def _messages(self) -> Iterator[Any]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        assistant: dict[str, Any] | None = None
        for index, item in enumerate(self.input or []):
            place = f"input[{index}]"
            kind = _kind(item, place)
            if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
                assistant = assistant or {"role": "assistant", "content": []}
                _add(assistant, kind, item, place)
                continue
            if assistant is not None:
                yield _joined(assistant)
                assistant = None
            if kind == "message":
                yield checked_message({"role": item.get("role"), "content": item.get("content")}, place)
            else:
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item, place)}
        if assistant is not None:
            yield _joined(assistant)


def _joined(assistant: dict[str, Any]) -> dict[str, Any]:
    """The message whose texts were collected: put together at once, for many a step by step takes their square."""
    return {name: "".join(value) if name in _COLLECTED else value for name, value in assistant.items()}


def _kind(item: Any, place: str) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind not in ("message", "reasoning", "function_call", "function_call_output"):
        known = "message, reasoning, function_call, function_call_output"
        raise invalid(f"{place}={shown(item)} is not an item of type {known}", place)
    return str(kind)


def _add(assistant: dict[str, Any], kind: str, item: dict[str, Any], place: str) -> None:
    """Reasoning, answer and calls of one turn are items of their own here, and one message for templates."""
    if kind == "message":
        assistant["content"].append(text_of(item.get("content"), f"{place}.content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        assistant.setdefault("reasoning_content", []).extend(text for text in texts if isinstance(text, str))
    else:
        if not isinstance(item.get("name"), str):
            raise invalid(f"{place}={shown(item)} has no name of a function", place)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = assistant.setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _output(item: dict[str, Any], place: str) -> str:
    output = item.get("output")
    return (
        text_of(output, f"{place}.output") if output is None or isinstance(output, str | list) else json.dumps(output)
    )


def _function(tool: Any, index: int) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise invalid(f"tools[{index}] is of type {shown(kind)}; only functions are supported", "tools")
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
