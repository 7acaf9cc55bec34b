"""What /v1/messages and /v1/messages/count_tokens take, and the chat turn that is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from hookline.core.errors import shown
from hookline.core.serve.chat.template import ChatPrompt, checked_messages, text_of, text_of_part
from hookline.core.serve.chat.turn import AUTO, NONE, REQUIRED, Tools, Turn, checked_tools, prepared
from hookline.core.serve.endpoints.fields import SamplingFields, at_least
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.errors import invalid

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


class CountRequest(SamplingFields, kw_only=True):
    """A conversation whose tokens are counted."""

    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "metadata", "service_tier")

    messages: list[Any] | None = None
    """Role and content each; content is a text or blocks."""
    system: str | list[Any] | None = None
    """What the model is told first."""
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """Type `disabled` turns thinking off where the chat template has enable_thinking."""
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
        functions = [_function(tool, index) for index, tool in enumerate(self.tools or [])]
        one = bool((self.tool_choice or {}).get("disable_parallel_tool_use"))
        return checked_tools(functions, self.choice, calls_one=one, schema_key="input_schema")

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        return {"stop": "stop_sequences"} if self.stop_sequences else {}

    def chat(self, tools: Tools) -> ChatPrompt:
        """What the chat template is asked to write.

        Raises: ApiError naming the message that cannot be read.
        """
        messages = [message for index, one in enumerate(self.messages or []) for message in _messages(one, index)]
        if not messages:
            raise invalid("messages holds no message; it needs at least 1", "messages")
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of(self.system, "system")})
        kind = (self.thinking or {}).get("type")
        arguments = {} if kind is None else {"enable_thinking": kind != "disabled"}
        return ChatPrompt(checked_messages(messages), tools.for_template, arguments)


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered."""

    def check(self) -> None:
        """Raises: ApiError for a field that lacks or is out of range."""
        if self.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        if self.n not in (None, 1):
            raise invalid(f"n={shown(self.n)} is not supported: there is one answer", "n")
        at_least("max_tokens", self.max_tokens, 1)

    def turn(self, surface: Surface) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError for what cannot be served.
        """
        tools = self.chosen_tools()
        stop = self.stop_sequences or None
        return prepared(surface, self.chat(tools), self, tools, max_tokens=self.max_tokens, stop=stop)


def _function(tool: Any, index: int) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise invalid(f"tools[{index}] is of type {shown(kind)}; only those with an input_schema are taken", "tools")
    found = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {name: value for name, value in found.items() if value is not None}


def _messages(message: Any, index: int) -> Iterator[dict[str, Any]]:
    """A message as templates know them: results of tools are messages of their own there."""
    place = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(f"{place}={shown(message)} is not an object with role and content", place)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{place}.role={shown(role)} is not user or assistant", place)
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content, f"{place}.content")}
        return
    texts: list[str] = []
    thoughts: list[Any] = []
    found: dict[str, Any] = {"role": role}
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        block_place = f"{place}.content[{number}]"
        if kind == "tool_result":
            text = text_of(block.get("content"), f"{block_place}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise invalid(f"{block_place}={shown(block)} has no name of a tool", block_place)
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            found.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(text_of_part(block, block_place))
    if thoughts:
        found["reasoning_content"] = "".join(one if isinstance(one, str) else shown(one) for one in thoughts)
    if texts or len(found) > 1:
        yield {**found, "content": "\n".join(texts)}
