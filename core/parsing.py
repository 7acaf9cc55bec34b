"""What parsers of a model's text are made of: tags that come in pieces, and the end of JSON values."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hookline.core.contracts import Arguments, ParsedPart, Reasoning, Text

_MARKS = re.compile(r'["\\{}\[\]]')


def num_held_back(text: str, tag: str) -> int:
    """How many characters at the end of a text may begin a tag, without being a whole one."""
    start = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while start >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start = text.find(tag[0], start + 1)
    return 0


def split_before(text: str, tag: str) -> tuple[str, str]:
    """Cut a text that has no whole tag in two: what can be shown, and its end, white space or what may begin the tag.

    The white space in front of a tag belongs to the tag.
    """
    shown = text[: len(text) - num_held_back(text, tag)].rstrip()
    return shown, text[len(shown) :]


class JsonEnd:
    """Finds where a JSON object or array ends, in text that comes in pieces. Checks nothing beside brackets."""

    def __init__(self) -> None:
        """Begin in front of a value's first bracket."""
        self._depth, self._is_text, self._is_escaped = 0, False, False

    def push(self, text: str) -> int | None:
        """Characters of this piece up to the value's end, or None if it goes on. The value begins the first piece."""
        start = 0
        if self._is_escaped and text:
            start, self._is_escaped = 1, False
        for mark in _MARKS.finditer(text, start):
            if mark.start() < start:
                continue
            if mark[0] == "\\":
                start = mark.start() + 2  # whatever is escaped marks nothing
                self._is_escaped = start > len(text)
            elif mark[0] == '"':
                self._is_text = not self._is_text
            elif not self._is_text:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    return mark.end()
        return None

    def arguments(self, text: str) -> tuple[list[ParsedPart], str | None]:
        """`push` for a call's arguments: what this piece has of them, and the text behind their end, None before it."""
        end = self.push(text)
        parts: list[ParsedPart] = [Arguments(text[:end])] if text[:end] else []
        return parts, None if end is None else text[end:]


def merged(parts: Iterable[ParsedPart]) -> list[ParsedPart]:
    """The same with neighbours of one kind joined: what the parts say, however the text was cut."""
    found: list[ParsedPart] = []
    for part in parts:
        last = found[-1] if found else None
        for kind in (Text, Reasoning, Arguments):
            if isinstance(part, kind) and isinstance(last, kind):
                found[-1] = kind(last.text + part.text)
                break
        else:
            found.append(part)
    return found
