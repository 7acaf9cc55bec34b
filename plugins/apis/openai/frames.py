"""Server-sent events of completions and chat completions, joined from parts that are encoded once per completion.

A frame costs the encoding of one JSON string and two joins; no objects are built.
"""

from __future__ import annotations

from typing import Any

import msgspec

dumps = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"


class Frames:
    """Frames of one response: `{id, object, created, model, choices: [one choice], ...}`.

    ends_with_usage: add `"usage": null` to every frame except the one with the usage, as OpenAI does.
    """

    def __init__(self, id: str, object: str, created: int, model: str, *, ends_with_usage: bool = False) -> None:
        self.end = b',"usage":null}\n\n' if ends_with_usage else _END
        named = dumps({"id": id, "object": object, "created": created, "model": model})
        self.head = b"data: " + named[:-1]

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The frame without choices."""
        return self.head + b',"choices":[],"usage":' + dumps(usage) + _END


class ChoiceFrames:
    """Frames of one completion of a response. name: the JSON key of the text, in quotes."""

    def __init__(self, frames: Frames, index: int, *, is_chat: bool) -> None:
        start = frames.head + b',"choices":[{"index":%d,' % index
        self._delta = start + b'"delta":'
        self._text = start + (b'"delta":{"content":' if is_chat else b'"text":')
        brace = b"}" if is_chat else b""
        self._close, self._end = brace, frames.end
        self._plain = brace + b',"logprobs":null,"finish_reason":null}]' + frames.end

    def plain(self, text: str) -> bytes:
        """A frame with text only, as nearly all frames are."""
        return self._text + dumps(text) + self._plain

    def text(self, text: str, choice: dict[str, Any], rest: dict[str, Any]) -> bytes:
        """A frame with text and further fields of the choice and of the response."""
        return self._text + dumps(text) + self._close + _fields(choice) + b"}]" + self._rest(rest)

    def delta(self, delta: dict[str, Any], choice: dict[str, Any], rest: dict[str, Any]) -> bytes:
        """A frame with any delta of a chat message."""
        return self._delta + dumps(delta) + _fields(choice) + b"}]" + self._rest(rest)

    def _rest(self, rest: dict[str, Any]) -> bytes:
        return _fields(rest) + (_END if "usage" in rest else self._end)


def _fields(values: dict[str, Any]) -> bytes:
    """`,"name":value` for each field."""
    return b"," + dumps(values)[1:-1] if values else b""
