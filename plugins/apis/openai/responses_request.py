"""The fields of /v1/responses, and the chat turn that they ask for. Nothing is stored between requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from hookline.core.contracts import ApiError
from hookline.core.errors import clipped, shown
from hookline.core.serving import (
    FORMAT,
    FORMAT_SHAPE,
    PLACE,
    SCHEMA,
    ChatPrompt,
    SamplingFields,
    ServedEngine,
    Shape,
    Turn,
    at_least,
    checked_arguments,
    checked_message,
    checked_messages,
    effort_arguments,
    format_within,
    invalid,
    only_format,
    prepared,
    smallest_limit,
    text_of,
)
from hookline.plugins.apis.openai.client_tools import (
    CALLS,
    OUTPUTS,
    call_of,
    chosen_tools,
    defined_names,
    read_tools,
    tool_shape,
)

_STATE = "this server keeps no responses; send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
_COLLECTED = ("content", "reasoning_content")
"""Keys of an assistant message whose texts are collected from several items."""
_WITH_TOOLS = ("additional_tools", "tool_search_output")
"""Types of items that define tools."""
_PART = dict.fromkeys(("type", "text", "refusal", "file_data", "filename", "annotations", "logprobs"))
_CALL = dict.fromkeys(("name", "namespace", "arguments", "input", "action", "operation", "environment", "call_id"))
_ITEM_SHAPES: Shape = {
    "message": {"role": None, "content": _PART, "phase": None},
    "reasoning": {"summary": _PART, "content": _PART, "encrypted_content": None},
    **dict.fromkeys(CALLS, _CALL),
    **dict.fromkeys(OUTPUTS, dict.fromkeys(("call_id", "output"))),
}
"""The known fields of items that are read, by their type. What servers write into items for themselves is known."""


def _item_shape(item: dict[str, Any]) -> Shape | None:
    kind = item.get("type") or "message"
    shape = _ITEM_SHAPES.get(kind) if isinstance(kind, str) else None
    return None if shape is None else {"type": None, "id": None, "status": None, **shape}


class ResponsesRequest(SamplingFields, kw_only=True):
    """A conversation to be continued."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": "Hello", "max_output_tokens": 64}
    IGNORED: ClassVar[tuple[str, ...]] = (
        *SamplingFields.IGNORED,
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    )
    SHAPE: ClassVar[Shape] = {
        **SamplingFields.SHAPE,
        "input": _item_shape,
        "text": {"format": FORMAT_SHAPE},
        "reasoning": {"effort": None},
        "tools": tool_shape,
    }

    input: str | list[Any] | None = None
    """A text or a list of items: messages, reasoning, calls of tools and their outputs; others are ignored."""
    instructions: str | None = None
    """Instructions for the model, in front of the conversation."""
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    """`format` is the form of the answer."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """`effort` is given to the chat template; `none` turns reasoning off where a template has enable_thinking."""
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
        """Check fields that depend on each other.

        Raises: ApiError for fields that exclude each other, or that would need stored responses.
        """
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
        """Number of alternatives for each token; None without log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """See SamplingFields."""
        return only_format({FORMAT: self.response_format, "text.format": format_within(self.text, "text")})

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        names = {"messages": "input", "logprobs": "top_logprobs", "max_tokens": self._limit[0]}
        return (
            names if self.response_format is not None else names | {FORMAT: "text.format", SCHEMA: "text.format.schema"}
        )

    @property
    def _limit(self) -> tuple[str, int | None]:
        return smallest_limit(max_tokens=self.max_tokens, max_output_tokens=self.max_output_tokens)

    def turn(self, engine: ServedEngine) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError if it cannot be served.
        """
        ignored: list[str] = []
        ignored_tools: list[str] = []
        given = read_tools([*(self.tools or []), *self._later_tools()], ignored_tools)
        messages = list(self._messages(ignored, defined_names(given)))
        if not messages and ignored:
            unread = ", ".join(dict.fromkeys(clipped(one) for one in ignored[:8]))
            raise invalid(f"input holds no message that is read here; it holds {unread}: add a message", "input")
        calls_one = self.parallel_tool_calls is False
        ignored += [f"include.{one}" for one in self.include or () if one != LOGPROBS]
        if self.top_logprobs and self.num_logprobs is None:
            ignored.append("top_logprobs")
        ignored += ignored_tools
        tools = chosen_tools(given, self.tool_choice, calls_one=calls_one, schema_key="parameters", ignored=ignored)
        arguments = dict(checked_arguments(self.chat_template_kwargs, engine.codec))
        arguments |= effort_arguments((self.reasoning or {}).get("effort"))
        chat = ChatPrompt(checked_messages(messages, "input"), tools.for_template, arguments)
        return prepared(engine, chat, self, tools, max_tokens=self._limit[1], logprobs=self.num_logprobs)

    def _later_tools(self) -> Iterator[Any]:
        """Tools that items of the conversation define, such as the results of a tool search."""
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, dict) and item.get("type") in _WITH_TOOLS and isinstance(item.get("tools"), list):
                yield from item["tools"]

    def _messages(self, ignored: list[str], defined: Set[str]) -> Iterator[Any]:
        """The conversation as chat messages. ignored: gets the places of items that no model reads. defined: names of
        the functions that the request defines, which other tools' calls are not called by.
        """
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        assistant: dict[str, Any] | None = None
        for index, item in enumerate(self.input or []):
            place = f"input[{index}]"
            kind = _kind(item, place)
            if kind in ("reasoning", *CALLS) or (kind == "message" and item.get("role") == "assistant"):
                assistant = assistant or {"role": "assistant", "content": []}
                _add(assistant, kind, item, place, defined)
                continue
            if kind not in ("message", *OUTPUTS):
                if kind not in _WITH_TOOLS:
                    ignored.append(f"input.{kind}")
                continue
            if assistant is not None:
                yield _joined(assistant)
                assistant = None
            if kind == "message":
                yield checked_message({"role": item.get("role"), "content": item.get("content")}, place)
            else:
                call_id = item.get("call_id") or item.get("id")
                yield {"role": "tool", "tool_call_id": call_id, "content": _output(item, place)}
        if assistant is not None:
            yield _joined(assistant)


def _joined(assistant: dict[str, Any]) -> dict[str, Any]:
    """Join the collected texts of a message, all at once: one by one takes time with the square of their number."""
    return {name: "".join(value) if name in _COLLECTED else value for name, value in assistant.items()}


def _kind(item: Any, place: str) -> str:
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{place}={shown(item)} is not an item with a type", place)
    return kind


def _add(assistant: dict[str, Any], kind: str, item: dict[str, Any], place: str, defined: Set[str]) -> None:
    """Collects the items of one turn (reasoning, answer and calls), which chat templates expect as one message."""
    if kind == "message":
        assistant["content"].append(text_of(item.get("content"), f"{place}.content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        assistant.setdefault("reasoning_content", []).extend(text for text in texts if isinstance(text, str))
    else:
        name, arguments = call_of(item, place, defined)
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        call[PLACE] = f"{place}.arguments"
        assistant.setdefault("tool_calls", []).append(call)


def _output(item: dict[str, Any], place: str) -> str:
    output = item.get("output")
    if item["type"] == "shell_call_output" or not (output is None or isinstance(output, str | list)):
        return json.dumps(output)
    return text_of(output if output is not None else item.get("status"), f"{place}.output")
