"""The content blocks of a message while it is generated, and the stream events about them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from hookline.core.contracts import Arguments, ParsedPart, Reasoning, Text, ToolCall

dumps = msgspec.json.encode
_DELTAS: dict[type, tuple[str, str, str]] = {
    Text: ("text", "text_delta", "text"),
    Reasoning: ("thinking", "thinking_delta", "thinking"),
    ToolCall: ("tool_use", "input_json_delta", "partial_json"),
}
"""Kind of a part -> type of its block, type of its deltas, and the key of their text."""


def event(type: str, **values: Any) -> bytes:
    """A stream event."""
    return b"event: " + type.encode() + b"\ndata: " + dumps({"type": type, **values}) + b"\n\n"


class Blocks:
    """The content blocks of one message."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: type | None = None
        self._texts: list[str] = []
        self._head = b""

    @property
    def has_calls(self) -> bool:
        """Whether the message contains a tool call."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def push(self, part: ParsedPart) -> Iterator[bytes]:
        """Add a part of the answer; returns the stream events for it."""
        kind = ToolCall if isinstance(part, ToolCall | Arguments) else type(part)
        if kind is not self._open or isinstance(part, ToolCall):
            yield from self.close()
            yield self._begin(kind, part)
        if not isinstance(part, ToolCall):
            self._texts.append(part.text)
            yield self._head + dumps(part.text) + b"}}\n\n"

    def _begin(self, kind: type, part: ParsedPart) -> bytes:
        type_, delta, key = _DELTAS[kind]
        index, self._open, self._texts = len(self.blocks), kind, []
        block: dict[str, Any] = {"type": type_}
        if isinstance(part, ToolCall):
            block |= {"id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
        else:
            block |= {key: ""} | ({"signature": ""} if kind is Reasoning else {})
        self.blocks.append(block)
        head = f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},'
        self._head = f'{head}"delta":{{"type":"{delta}","{key}":'.encode()
        return event("content_block_start", index=index, content_block=block)

    def close(self) -> Iterator[bytes]:
        """End the block that is being generated, if there is one."""
        if self._open is None:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        block["input" if self._open is ToolCall else _DELTAS[self._open][2]] = text
        if self._open is ToolCall:
            block["input"] = _object(text)
        self._open = None
        yield event("content_block_stop", index=len(self.blocks) - 1)


def _object(text: str) -> Any:
    """A call's arguments. Clients expect an object, so an incomplete call has an empty one."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
