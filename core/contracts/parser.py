"""What a server's parser is given and what it implements: it separates reasoning and tool calls from the answer's text.

Parsers work on text alone and know neither tokens nor HTTP. Two kinds have this contract: reasoning parsers, which see
a completion's text first, and tool parsers, which see what those leave as `Text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hookline.core.contracts.optional import optional


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer itself: `text` follows the text of the `Text` before it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before its answer: `text`, without the tags around all of it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name` begins, as the model spells it; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments: `text` is a piece of the JSON object that all pieces together are."""

    text: str


ParsedPart: TypeAlias = Text | Reasoning | ToolCall | Arguments
"""A piece of what a parser found in a completion."""


@dataclass(frozen=True)
class ParserContext:
    """What a parser may know of the request.

    prompt_end: the last characters of the rendered prompt: a chat template may open the reasoning there already.
    tools: the request's function definitions, each with name, description and parameters (a JSON schema).
    """

    prompt_end: str = ""
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call of one function.

    begin, end: the texts around its arguments, which are a JSON object. trigger: how calls of any function begin, a
    beginning of `begin`. between: what stands between two calls.
    """

    begin: str
    end: str
    trigger: str
    between: str = "\n"


class OutputParser(Protocol):
    """Takes one completion's text as it comes and gives the parts it is made of. For classes to extend.

    Constructed as `Parser(config, context)` for each completion; config is an instance of the registered dataclass, or
    None. Joined together, the parts must not depend on how the text was cut into pieces, so a parser keeps back what
    may turn out to begin a tag.
    """

    keeps_special_tokens: bool = False
    """Whether its tags are special tokens. The text that it gets then includes special tokens."""

    closing_tag: str | None = None
    """For a reasoning parser: the text after which the answer begins. If the chat template contains it, a request's
    structured output constrains the answer alone, not the reasoning."""

    is_done: bool = False
    """Set once all further text is plain `Text` and nothing is kept back: the parser is not asked again, and costs
    nothing."""

    def __init__(self, config: Any, context: ParserContext) -> None:
        """Begin a completion."""
        ...

    @classmethod
    @optional
    def call_form(cls, name: str) -> CallForm:
        """For a tool parser: how the model writes a call of this function, whose name has no quotes or backslashes.

        With it a grammar can hold calls: of functions that are strict, and beside a form of the answer. Without it
        requests with tools and a form of the answer are refused, unless they force a call.
        """
        raise AssertionError("left out")

    def push(self, text: str) -> Sequence[ParsedPart]:
        """The parts that are certain with this piece of text; none of them empty."""
        ...

    def finish(self) -> Sequence[ParsedPart]:
        """What was kept back; no more text comes. What turned out not to be a tool call is given as Text, unchanged."""
        ...
