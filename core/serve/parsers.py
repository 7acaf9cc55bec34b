"""The configured parsers of answers, and how they split a completion's text into parts.

Reasoning parsers and tool parsers are plugins, which the configuration chooses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.core.config.settings import option_of
from hookline.core.contracts import Arguments, OutputParser, ParsedPart, ParserContext, Text, ToolCall
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import REASONING_PARSER, TOOL_PARSER, Entry


@dataclass(frozen=True)
class Parser:
    """A configured parser: its class and its configuration."""

    entry: Entry
    cls: type[OutputParser]
    config: Any

    @property
    def keeps_special_tokens(self) -> bool:
        """See OutputParser."""
        return self.cls.keeps_special_tokens

    def make(self, context: ParserContext) -> OutputParser:
        """A parser for one completion."""
        with Blaming((), "while it parses an answer", otherwise=self.entry):
            return self.cls(self.config, context)


@dataclass(frozen=True)
class Parsers:
    """The parsers of chats; a field is None if no parser of that kind is configured."""

    reasoning: Parser | None = None
    tools: Parser | None = None


def chosen_parsers(
    reasoning: Any, tools: Any, host: Callable[[], PluginHost] = PluginHost.load, section: str = "serve"
) -> Parsers:
    """Look up parsers by name, or by a mapping with a name and fields; None chooses no parser.

    section: the key that the keys of the parsers lie in, for errors.

    Raises: PluginError for an unknown name or a class that is broken; ConfigError for a field.
    """
    if reasoning is None and tools is None:
        return Parsers()
    found = host()
    reasoning_parser = _chosen(REASONING_PARSER, reasoning, found, section)
    return Parsers(reasoning_parser, _chosen(TOOL_PARSER, tools, found, section))


def _chosen(kind: str, value: Any, host: PluginHost, section: str) -> Parser | None:
    if value is None:
        return None
    option = option_of(kind, value, host, f"{section}.{kind}")
    assert option.entry is not None
    return Parser(option.entry, option.entry.load(), option.config)


class PartsReader:
    """Splits one completion's text into parts while it is generated.

    Each parser gets the text that the parser before it left over. calls_one: drop all calls after the first.
    Raises: PluginError that names a parser which fails.
    """

    def __init__(self, parsers: Sequence[tuple[OutputParser, Entry | None]], *, calls_one: bool = False) -> None:
        self._calls_one, self._num_calls = calls_one, 0
        blames = (Blaming((), "while it parses an answer", otherwise=entry) for _, entry in parsers)
        self._levels = list(zip((parser for parser, _ in parsers), blames, strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether all further text is passed on as it comes."""
        return not self._levels

    def push(self, text: str) -> Sequence[ParsedPart]:
        """Add text; returns the parts that are certain now."""
        if not text:
            return ()
        if not self._levels:
            return [Text(text)]
        parts = self._through(text, 0)
        if self._levels[0][0].is_done:
            self._levels = [level for level in self._levels if not level[0].is_done]
        return self._wanted(parts)

    def finish(self) -> Sequence[ParsedPart]:
        """End the text; returns the parts that were kept back."""
        found: list[ParsedPart] = []
        for place, (parser, blame) in enumerate(self._levels):
            with blame:
                parts = parser.finish()
            found += self._handed_on(parts, place + 1)
        return self._wanted(found)

    def _wanted(self, parts: list[ParsedPart]) -> list[ParsedPart]:
        if not self._calls_one:
            return parts
        found: list[ParsedPart] = []
        for part in parts:
            self._num_calls += isinstance(part, ToolCall)
            if self._num_calls <= 1 or not isinstance(part, ToolCall | Arguments):
                found.append(part)
        return found

    def _through(self, text: str, place: int) -> list[ParsedPart]:
        if place == len(self._levels):
            return [Text(text)]
        parser, blame = self._levels[place]
        with blame:
            parts = parser.push(text)
        return self._handed_on(parts, place + 1)

    def _handed_on(self, parts: Sequence[ParsedPart], place: int) -> list[ParsedPart]:
        if place == len(self._levels):
            return list(parts)
        found: list[ParsedPart] = []
        for part in parts:
            found += self._through(part.text, place) if isinstance(part, Text) else [part]
        return found


def parser_context(prompt: str, tools: Sequence[Mapping[str, Any]]) -> ParserContext:
    """The facts of a request that parsers are given."""
    return ParserContext(prompt[-256:], tools)
