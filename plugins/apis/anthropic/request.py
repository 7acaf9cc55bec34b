"""The fields of /v1/messages and /v1/messages/count_tokens, and the chat turn that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hookline.core.errors import clipped, shown
from hookline.core.serving import (
    AUTO,
    FORMAT,
    FORMAT_SHAPE,
    NONE,
    REQUIRED,
    SCHEMA,
    ChatPrompt,
    SamplingFields,
    ServedEngine,
    Shape,
    Tools,
    Turn,
    at_least,
    checked_messages,
    checked_tools,
    effort_arguments,
    format_within,
    invalid,
    only_format,
    prepared,
)
from hookline.plugins.apis.anthropic.conversation import TOOL, as_messages, block_shape, client_tools, text_of_blocks

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
_THINKING = ("enabled", "adaptive", "disabled")
"""Types of `thinking`."""


class CountRequest(SamplingFields, kw_only=True):
    """A conversation whose tokens are counted."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}]}
    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "metadata", "service_tier")
    SHAPE: ClassVar[Shape] = {
        **SamplingFields.SHAPE,
        "messages": {"role": None, "content": block_shape},
        "system": block_shape,
        "tools": lambda tool: TOOL if tool.get("type", "custom") in ("custom", None) else None,
        "tool_choice": dict.fromkeys(("type", "name", "disable_parallel_tool_use")),
        "thinking": {"type": None},
        "output_config": {"effort": None, "format": FORMAT_SHAPE},
        "output_format": FORMAT_SHAPE,
    }

    messages: list[Any] | None = None
    """Messages with a role and a content, which is a text or a list of blocks. A last one of the assistant is the begin
    of the answer, which goes on behind it."""
    system: str | list[Any] | None = None
    """Instructions for the model, in front of the messages."""
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """Type `disabled` turns reasoning off in chat templates with enable_thinking."""
    output_config: dict[str, Any] | None = None
    """`format` is the form of the answer; `effort` is given to the chat template as reasoning_effort."""
    output_format: dict[str, Any] | None = None
    """The older name of output_config.format."""
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def choice(self) -> str:
        """The choice among tools, in the form of `Tools`.

        Raises: ApiError for an unknown form of choice.
        """
        given = self.tool_choice or {"type": "auto"}
        kind, name = given.get("type"), given.get("name")
        if kind == "tool" and isinstance(name, str):
            return f"={name}"
        if isinstance(kind, str) and kind in _CHOICES:
            return _CHOICES[kind]
        raise invalid(f"tool_choice={shown(given)} is not of type auto, any, none, or tool with a name", "tool_choice")

    def chosen_tools(self) -> Tools:
        """The tools and the choice among them.

        Raises: ApiError for an unknown form of tool.
        """
        ignored: list[str] = []
        tools = list(client_tools(self.tools or [], ignored))
        one = bool((self.tool_choice or {}).get("disable_parallel_tool_use"))
        return checked_tools(tools, self.choice, calls_one=one, schema_key="input_schema", ignored=ignored)

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        names = {"stop": "stop_sequences"} if self.stop_sequences else {}
        if self.response_format is None:
            name = "output_format" if (self.output_config or {}).get("format") is None else "output_config.format"
            names |= {FORMAT: name, SCHEMA: f"{name}.schema"}
        return names

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """See SamplingFields."""
        config = format_within(self.output_config, "output_config")
        return only_format(
            {FORMAT: self.response_format, "output_config.format": config, "output_format": self.output_format}
        )

    def chat(self, tools: Tools) -> ChatPrompt:
        """The input of the chat template.

        Raises: ApiError naming the message that cannot be read.
        """
        ignored = [f"output_config.{name}" for name in self.output_config or {} if name not in ("effort", "format")]
        given = enumerate(self.messages or [])
        messages = [message for index, one in given for message in as_messages(one, index, ignored)]
        if not messages:
            unread = f"; it holds {', '.join(dict.fromkeys(map(clipped, ignored[:8])))}" if ignored else ""
            raise invalid(f"messages holds no message with content{unread}; it needs at least 1", "messages")
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of_blocks(self.system, "system", ignored)})
        kind = (self.thinking or {}).get("type")
        if kind not in (None, *_THINKING):
            raise invalid(f"thinking.type={shown(kind)} must be one of {', '.join(_THINKING)}", "thinking")
        arguments = effort_arguments((self.output_config or {}).get("effort"))
        arguments |= {} if kind is None else {"enable_thinking": kind != "disabled"}
        is_begun = _is_begun(messages[-1])
        if is_begun and (form := self.form) is not None:
            at = len(self.messages or []) - 1
            told = f"messages[{at}] begins the answer, which {form.name} then could not hold; leave out one of them"
            raise invalid(told, "messages")
        return ChatPrompt(
            checked_messages(messages), tools.for_template, arguments, continues_last=is_begun, ignored=ignored
        )


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered. With max_tokens 0 its prompt is computed and cached, and the answer is empty."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}

    def check(self) -> None:
        """Check the fields.

        Raises: ApiError for a field that is missing or out of range.
        """
        if self.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        if self.n not in (None, 1):
            raise invalid(f"n={shown(self.n)} is not supported: there is one answer", "n")
        at_least("max_tokens", self.max_tokens, 0)

    def turn(self, engine: ServedEngine) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError if it cannot be served.
        """
        tools, stop = self.chosen_tools(), list(filter(None, self.stop_sequences or ())) or None
        most = None if self.max_tokens is None else max(1, self.max_tokens)
        return prepared(engine, self.chat(tools), self, tools, max_tokens=most, stop=stop)


def _is_begun(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the begin of an answer that the model is to continue."""
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())
