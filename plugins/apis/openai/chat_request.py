"""The fields of /v1/chat/completions, and the chat turn that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hookline.core.serving import (
    MESSAGE_SHAPE,
    ChatPrompt,
    SamplingFields,
    ServedEngine,
    Shape,
    Tools,
    Turn,
    at_least,
    checked_arguments,
    checked_messages,
    effort_arguments,
    invalid,
    prepared,
    smallest_limit,
)
from hookline.plugins.apis.openai.client_tools import chosen_tools, read_tools, tool_shape


class ChatRequest(SamplingFields, kw_only=True):
    """A conversation to be answered."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    IGNORED: ClassVar[tuple[str, ...]] = (*SamplingFields.IGNORED, "store", "metadata", "service_tier")
    SHAPE: ClassVar[Shape] = {**SamplingFields.SHAPE, "messages": MESSAGE_SHAPE, "tools": tool_shape}

    messages: list[Any] | None = None
    """Messages with a role and a content, which is a text, a list of text parts, or null."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; unset: as many as there is room for."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Given to the chat template; `none` turns reasoning off where a template has enable_thinking."""
    include_reasoning: bool | None = None
    """False leaves reasoning out of the response."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continue the last message in place of beginning a new one."""
    add_special_tokens: bool | None = None
    """Put special tokens in front of the template's text, which usually has them already."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as enable_thinking."""
    chat_template: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def check(self) -> None:
        """Check fields that depend on each other.

        Raises: ApiError for fields that exclude each other.
        """
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if self.chat_template is not None:
            raise invalid("a chat template from a request is not taken; the checkpoint's is used", "chat_template")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message and add_generation_prompt are both true", "continue_final_message")
        at_least("max_tokens", self.max_tokens, 1)
        at_least("max_completion_tokens", self.max_completion_tokens, 1)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives for each token; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def own_names(self) -> dict[str, str]:
        """See SamplingFields."""
        return {"logprobs": "top_logprobs", "max_tokens": self._limit[0]}

    @property
    def _limit(self) -> tuple[str, int | None]:
        return smallest_limit(max_tokens=self.max_tokens, max_completion_tokens=self.max_completion_tokens)

    def chosen_tools(self) -> Tools:
        """The tools and the choice among them.

        Raises: ApiError for an unknown form of tool or choice.
        """
        calls_one = self.parallel_tool_calls is False
        ignored: list[str] = []
        given = read_tools(self.tools or [], ignored)
        key = "function.parameters"
        return chosen_tools(given, self.tool_choice, calls_one=calls_one, schema_key=key, ignored=ignored)

    def turn(self, engine: ServedEngine) -> Turn:
        """The chat turn that the request asks for.

        Raises: RequestError or ApiError if it cannot be served.
        """
        tools = self.chosen_tools()
        arguments = effort_arguments(self.reasoning_effort)
        arguments |= checked_arguments(self.chat_template_kwargs, engine.codec)
        chat = ChatPrompt(
            checked_messages(self.messages or []),
            tools.for_template,
            arguments,
            continues_last=bool(self.continue_final_message),
            adds_generation_prompt=self.add_generation_prompt is not False,
        )
        return prepared(
            engine,
            chat,
            self,
            tools,
            max_tokens=self._limit[1],
            add_special_tokens=bool(self.add_special_tokens),
            logprobs=self.num_logprobs,
        )
