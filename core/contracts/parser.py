"""The contract of a server's parsers, which separate reasoning and tool calls from the answer's text.

Parsers work on text alone and know neither tokens nor HTTP. Two kinds have this contract: reasoning parsers, which see
a completion's text first, and tool parsers, which see the parts that the reasoning parser returned as `Text`.
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
    """More of the model's reasoning before its answer: `text`, without the tags around the whole reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name` begins, as the model spells it; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments: `text` is a piece of a JSON object; all pieces joined are the whole object."""

    text: str


ParsedPart: TypeAlias = Text | Reasoning | ToolCall | Arguments
"""A part of a completion, as a parser returns it."""


@dataclass(frozen=True)
class ParserContext:
    """The facts about a request that its parser gets.

    prompt_end: the last characters of the rendered prompt, where a chat template may have opened the reasoning already.
    tools: the request's function definitions, each with name, description and parameters (a JSON schema).
    """

    prompt_end: str = ""
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call of one function.

    begin, end: the texts around its arguments, which are a JSON object. trigger: the text with which calls of any
    function begin, a prefix of `begin`. between: the text between two calls.
    """

    begin: str
    end: str
    trigger: str
    between: str = "\n"


class OutputParser(Protocol):
    """Splits one completion's text, piece by piece, into its parts. For classes to extend.

    Constructed as `Parser(config, context)` for each completion; config is an instance of the registered dataclass, or
    None. Joined together, the parts must not depend on how the text was cut into pieces, so a parser keeps back text
    that may be the beginning of a tag.
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

        With it a grammar can constrain calls: of strict functions, and beside a response format. Without it requests
        with tools and a response format are refused, unless they force a call.
        """
        raise AssertionError("left out")

    def push(self, text: str) -> Sequence[ParsedPart]:
        """The parts that are certain with this piece of text; none of them empty."""
        ...

    def finish(self) -> Sequence[ParsedPart]:
        """The end of the text: return the parts that were kept back, as unchanged Text if they are no tool call."""
        ...
