"""What /v1/messages and /v1/messages/count_tokens take, and the chat turn that is made of it."""

from __future__ import annotations

from typing import Any, ClassVar

from hookline.core.errors import shown
from hookline.core.serve.anthropic.conversation import as_messages, client_tools, text_of_blocks
from hookline.core.serve.chat.template import ChatPrompt, checked_messages, effort_arguments
from hookline.core.serve.chat.turn import AUTO, NONE, REQUIRED, Tools, Turn, checked_tools, prepared
from hookline.core.serve.endpoints.body import Shape
from hookline.core.serve.endpoints.fields import SamplingFields, at_least
from hookline.core.serve.endpoints.structured import FORMAT, FORMAT_SHAPE, SCHEMA, flat_format
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.errors import invalid

_TOOL = dict.fromkeys(("type", "name", "description", "input_schema", "strict", "cache_control"))
_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


class CountRequest(SamplingFields, kw_only=True):
    """A conversation whose tokens are counted."""

    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "metadata", "service_tier")
    SHAPE: ClassVar[Shape] = {
        **SamplingFields.SHAPE,
        "messages": dict.fromkeys(("role", "content")),
        "tools": lambda tool: _TOOL if tool.get("type", "custom") in ("custom", None) else None,
        "tool_choice": dict.fromkeys(("type", "name", "disable_parallel_tool_use")),
        "thinking": {"type": None},
        "output_config": {"effort": None, "format": FORMAT_SHAPE},
        "output_format": FORMAT_SHAPE,
    }

    messages: list[Any] | None = None
    """Role and content each; content is a text or blocks."""
    system: str | list[Any] | None = None
    """What the model is told first."""
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """Type `disabled` turns thinking off where the chat template has enable_thinking."""
    output_config: dict[str, Any] | None = None
    """`format` is what the answer must look like; `effort` is handed to the chat template as reasoning_effort."""
    output_format: dict[str, Any] | None = None
    """The older name of output_config.format."""
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def choice(self) -> str:
        """Which tools to call, as `Tools` has it.

        Raises: ApiError for a choice of no known form.
        """
        given = self.tool_choice or {"type": "auto"}
        kind, name = given.get("type"), given.get("name")
        if kind == "tool" and isinstance(name, str):
            return f"={name}"
        if isinstance(kind, str) and kind in _CHOICES:
            return _CHOICES[kind]
        raise invalid(f"tool_choice={shown(given)} is not of type auto, any, none, or tool with a name", "tool_choice")

    def chosen_tools(self) -> Tools:
        """The tools, and which of them to call.

        Raises: ApiError for a tool of no known form.
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
        given, name = (self.output_config or {}).get("format"), "output_config.format"
        if given is None:
            given, name = self.output_format, "output_format"
        return self.response_format or flat_format(given, name)

    def chat(self, tools: Tools) -> ChatPrompt:
        """What the chat template is asked to write.

        Raises: ApiError naming the message that cannot be read.
        """
        ignored = [f"output_config.{name}" for name in self.output_config or {} if name not in ("effort", "format")]
        given = enumerate(self.messages or [])
        messages = [message for index, one in given for message in as_messages(one, index, ignored)]
        if not messages:
            raise invalid("messages holds no message; it needs at least 1", "messages")
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of_blocks(self.system, "system", ignored)})
        kind = (self.thinking or {}).get("type")
        arguments = effort_arguments((self.output_config or {}).get("effort"))
        arguments |= {} if kind is None else {"enable_thinking": kind != "disabled"}
        return ChatPrompt(checked_messages(messages), tools.for_template, arguments, ignored=ignored)


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered. With max_tokens 0 it is read into the cache, and the answer is empty."""

    def check(self) -> None:
        """Raises: ApiError for a field that lacks or is out of range."""
        if self.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        if self.n not in (None, 1):
            raise invalid(f"n={shown(self.n)} is not supported: there is one answer", "n")
        at_least("max_tokens", self.max_tokens, 0)

    def turn(self, surface: Surface) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError for what cannot be served.
        """
        tools, stop = self.chosen_tools(), self.stop_sequences or None
        most = None if self.max_tokens is None else max(1, self.max_tokens)
        return prepared(surface, self.chat(tools), self, tools, max_tokens=most, stop=stop)
