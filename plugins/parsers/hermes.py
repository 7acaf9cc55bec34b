"""Tool calls as JSON between <tool_call> and </tool_call>, as Qwen2.5, Qwen3 and Hermes 2 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hookline.core.contracts import Arguments, CallForm, OutputParser, ParsedPart, ParserContext, Text, ToolCall
from hookline.core.parsing import JsonEnd, num_held_back, split_before

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The beginning of a call up to its arguments, which can be passed on from here as they come."""
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')


class Hermes(OutputParser):
    """A call in the usual order is passed on as it comes, a call in another form when its tag closes; anything else is
    text.
    """

    def __init__(self, config: None, context: ParserContext) -> None:
        self._kept = self._space = ""
        self._step: Callable[[list[ParsedPart]], bool] = self._text
        self._json = JsonEnd()
        self._has_called = self._has_shown = False

    @classmethod
    def call_form(cls, name: str) -> CallForm:
        """See OutputParser."""
        written = json.dumps(name, ensure_ascii=False)
        return CallForm(f'{OPEN}\n{{"name": {written}, "arguments": ', f"}}\n{CLOSE}", OPEN)

    def push(self, text: str) -> Sequence[ParsedPart]:
        """See OutputParser."""
        self._kept += text
        parts: list[ParsedPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> Sequence[ParsedPart]:
        """See OutputParser."""
        kept, self._kept = self._kept, ""
        if self._step == self._head:
            begun = _begun(kept)
            return _call(kept) or ([Text(self._space + OPEN + kept)] if begun is None else begun)
        # Behind a call, or instead of any text, the beginning of a tag is that of a call which was cut off.
        tag = kept.strip()
        is_tag = OPEN.startswith(tag) and (self._has_called or (not self._has_shown and len(tag) > 1))
        if self._step == self._text and kept and not is_tag and not (self._has_called and kept.isspace()):
            return [Text(kept)]
        return []

    def _text(self, parts: list[ParsedPart]) -> bool:
        """Parse text outside of calls; returns whether there is more to parse."""
        if self._has_called:
            self._kept = self._kept.lstrip()
        shown, found, rest = self._kept.partition(OPEN)
        if found:
            before, shown = shown, shown.rstrip()
            self._space, self._kept, self._step = before[len(shown) :], rest, self._head
        else:
            shown, self._kept = split_before(self._kept, OPEN)
        if shown:
            self._has_called, self._has_shown = False, self._has_shown or not shown.isspace()
            parts.append(Text(shown))
        return bool(found)

    def _head(self, parts: list[ParsedPart]) -> bool:
        """Parse a call before its arguments."""
        inside, found, rest = self._kept.partition(CLOSE)
        head = _HEAD.match(inside)
        name = _decoded(head[1]) if head is not None else None
        if head is not None and isinstance(name, str):
            self._kept, self._step, self._json = self._kept[head.end() :], self._arguments, JsonEnd()
            parts.append(ToolCall(name))
            return True
        if found:
            call = _call(inside)
            parts += call or [Text(self._space + OPEN + inside + CLOSE)]
            self._kept, self._step, self._has_called = rest, self._text, bool(call)
        return bool(found)

    def _arguments(self, parts: list[ParsedPart]) -> bool:
        found, rest = self._json.arguments(self._kept)
        parts += found
        self._kept = rest or ""
        if rest is not None:
            self._step = self._tail
        return rest is not None

    def _tail(self, parts: list[ParsedPart]) -> bool:
        """After a call's arguments: skip everything up to its closing tag."""
        _, found, rest = self._kept.partition(CLOSE)
        if found:
            self._kept, self._step, self._has_called = rest, self._text, True
        else:
            self._kept = self._kept[len(self._kept) - num_held_back(self._kept, CLOSE) :]
        return bool(found)


def _call(text: str) -> list[ParsedPart]:
    """The parts of a complete call; empty if the text is not a call."""
    call = _decoded(text)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [ToolCall(name), Arguments(written)] if written else [ToolCall(name)]


def _begun(text: str) -> list[ParsedPart] | None:
    """The parts of a call that was cut off before its arguments: none without a whole name. None if the text is not the
    beginning of a call.
    """
    named = _NAME.match(text)
    name = None if named is None else _decoded(named[1])
    if named is None or not isinstance(name, str):
        begin = "".join(text.split())
        return [] if '{"name":'.startswith(begin) or begin.startswith('{"name":"') else None
    rest = "".join(text[named.end() :].split())
    return [ToolCall(name)] if any(f',"{key}":'.startswith(rest) for key in ("arguments", "parameters")) else None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
