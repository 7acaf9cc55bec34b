"""The fields of /api/chat and /api/generate, and the turns that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec

from hookline.core import serving
from hookline.core.errors import shown

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
NAMES = {**{name: name for name in _SAME}, "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Options that have an effect -> the fields of SamplingFields that mean the same."""
_REFUSED = {**dict.fromkeys(("suffix", "template", "images"), "leave it out"), "context": "send messages to /api/chat"}


class OllamaRequest(serving.SamplingFields, kw_only=True):
    """What both requests have. Sampling parameters are in `options`."""

    IGNORED: ClassVar[tuple[str, ...]] = (*serving.SamplingFields.IGNORED, "keep_alive", "truncate", "shift")
    SHAPE: ClassVar[serving.Shape] = {**serving.SamplingFields.SHAPE, "options": dict.fromkeys(NAMES)}

    options: dict[str, Any] | None = None
    """temperature, top_k, top_p, min_p, seed, stop, num_predict, repeat_penalty, presence_penalty and
    frequency_penalty; others are ignored, since the server was started with them."""
    think: bool | str | None = None
    """Whether the model reasons before it answers, or how much: low, medium, high."""
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        return {field: f"options.{name}" for name, field in NAMES.items()}

    @property
    def thinking(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think, "enable_thinking": self.think != "none"}
        return {} if self.think is None else {"enable_thinking": self.think}

    def sampled(self) -> Self:
        """The request with the options as fields of its own.

        Raises: ApiError naming the option.
        """
        given = {NAMES[name]: value for name, value in (self.options or {}).items() if name in NAMES}
        if given.get("max_tokens") in (-1, -2):
            del given["max_tokens"]  # until the model ends, or the context is full
        found = serving.checked(given, serving.SamplingFields, "options")
        fields = {name: getattr(found, name) for name in given}
        return msgspec.structs.replace(self, format=self.format or None, **fields)

    def check(self) -> None:
        """Refuse what would change the answer and is not there.

        Raises: ApiError naming the field.
        """
        for name, advice in _REFUSED.items():
            if getattr(self, name, None):
                raise serving.invalid(f"{name} is not supported; {advice}", name)


class ChatRequest(OllamaRequest, kw_only=True):
    """A conversation to be answered; without messages, the model is only looked for."""

    messages: list[Any] | None = None
    """Messages with a role and a content; calls of tools have objects as their arguments."""
    tools: list[Any] | None = None
    """Functions that the model may call."""

    def turn(self, engine: serving.ServedEngine) -> serving.Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError if it cannot be served.
        """
        tools = self._tools()
        messages = [_read(one, f"messages[{index}]") for index, one in enumerate(self.messages or [])]
        chat = serving.ChatPrompt(serving.checked_messages(messages), tools.for_template, self.thinking)
        fields = self.sampled()
        return serving.prepared(engine, chat, fields, tools, max_tokens=fields.max_tokens)

    def _tools(self) -> serving.Tools:
        found = []
        for index, tool in enumerate(self.tools or []):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict):
                raise serving.invalid(f"tools[{index}]={shown(tool)} has no function", "tools")
            found.append(serving.ClientTool(function, f"tools[{index}].function"))
        return serving.checked_tools(found, serving.AUTO)


class GenerateRequest(OllamaRequest, kw_only=True):
    """A prompt to be answered, or to go on with if `raw`; without one, the model is only looked for."""

    prompt: str | None = None
    """The text."""
    suffix: str | None = None
    system: str | None = None
    """Instructions in front of the prompt."""
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    """Give the prompt to the model as it is, without the chat template."""
    images: list[Any] | None = None

    def turn(self, engine: serving.ServedEngine) -> serving.Turn:
        """See ChatRequest."""
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        fields, chat = self.sampled(), serving.ChatPrompt(serving.checked_messages(messages), None, self.thinking)
        if self.raw:
            chat = RawPrompt(text=self.prompt or "")
        further = {"max_tokens": fields.max_tokens, "add_special_tokens": bool(self.raw)}
        return serving.prepared(engine, chat, fields, serving.Tools(), **further)


@dataclass(frozen=True)
class RawPrompt(serving.ChatPrompt):
    """A prompt without a chat template."""

    messages: Sequence[Any] = ()
    text: str = ""

    def render(self, codec: Any) -> str:
        """See ChatPrompt."""
        return self.text


def _read(message: Any, place: str) -> Any:
    """A message as OpenAI's API has it."""
    if not isinstance(message, dict):
        return message  # serving.checked_messages names it
    if message.get("images"):
        raise serving.invalid(f"{place}.images: this server reads text only; leave them out", "messages")
    found = {name: value for name, value in message.items() if name not in ("thinking", "images", "tool_name")}
    if message.get("thinking"):
        found["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        found["name"] = message["tool_name"]
    return found
