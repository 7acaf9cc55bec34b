"""The output items of a response while they are generated, and the stream events about them.

Works on parts of text, and knows nothing of HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from hookline.core.contracts import Arguments, ParsedPart, Reasoning, Text, ToolCall
from hookline.core.serving import Tools
from hookline.plugins.apis.openai.client_tools import Call

Values = dict[str, Any]
dumps = msgspec.json.encode
_KINDS: dict[type, tuple[str, str, str]] = {
    Text: ("msg_", "output_text", "response.output_text"),
    Reasoning: ("rs_", "reasoning_text", "response.reasoning_text"),
}
"""Kind of a part with text -> prefix of its item's id, type of its content, and beginning of its events' types."""


class Events:
    """Makes the events of one response, which are numbered."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, type: str, **values: Any) -> bytes:
        """A server-sent event with the next sequence number."""
        self._number += 1
        body = dumps({"type": type, "sequence_number": self._number, **values})
        return b"event: " + type.encode() + b"\ndata: " + body + b"\n\n"

    def delta(self, head: bytes, text: str, tail: bytes) -> bytes:
        """A text delta's event. head, tail: its rendered bytes before and after the sequence number and the text."""
        self._number += 1
        return head + b"%d" % self._number + b',"delta":' + dumps(text) + tail


class ResponseItems:
    """The output items of one response."""

    def __init__(self, events: Events, tools: Tools) -> None:
        self._events, self._tools = events, tools
        self._call: Call | None = None
        self.items: list[Values] = []
        self._open: type | None = None
        self._texts: list[str] = []
        self._head, self._tail = b"", b""
        self._name = ""

    @property
    def is_text(self) -> bool:
        """Whether the current item is a message with text."""
        return self._open is Text

    def push(self, part: ParsedPart, logprobs: list[Any]) -> Iterator[bytes]:
        """Add a part of the answer; returns the stream events for it."""
        kind = ToolCall if isinstance(part, ToolCall | Arguments) else type(part)
        if kind is not self._open or isinstance(part, ToolCall):
            yield from self.close()
            yield from self._begin(kind, part)
        if isinstance(part, ToolCall):
            return
        self._texts.append(part.text)
        if self._call is not None:
            yield from self._call_delta(self._call.push(part.text))
            return
        if logprobs and kind is Text:
            self.items[-1]["content"][0]["logprobs"] += logprobs
            tail = b',"logprobs":' + dumps(logprobs) + b"}\n\n"
        else:
            tail = self._tail
        yield self._events.delta(self._head, part.text, tail)

    def _begin(self, kind: type, part: ParsedPart) -> Iterator[bytes]:
        self._open, self._texts = kind, []
        number = len(self.items)
        if isinstance(part, ToolCall):
            self._call = Call(self._tools.named(part.name), part.name)
            self._name, item = self._call.event or "", self._call.item
            place = {"item_id": item["id"], "output_index": number}
        else:
            self._call = None
            prefix, content, self._name = _KINDS[kind]
            item = {"type": "message" if kind is Text else "reasoning", "id": _new(prefix), "status": "in_progress"}
            item |= {"role": "assistant", "content": []} if kind is Text else {"summary": [], "content": []}
            place = {"item_id": item["id"], "output_index": number, "content_index": 0}
        self._place = place
        self._tail = b',"logprobs":[]}\n\n' if kind is Text else b"}\n\n"
        name = f"{self._name}.delta"
        body = dumps({"type": name, **place})
        self._head = b"event: " + name.encode() + b"\ndata: " + body[:-1] + b',"sequence_number":'
        self.items.append(item)
        yield self._events.event("response.output_item.added", output_index=number, item=item)
        if kind is not ToolCall:
            extra: Values = {"annotations": [], "logprobs": []} if kind is Text else {}
            item["content"] = [{"type": content, "text": "", **extra}]
            yield self._events.event("response.content_part.added", **place, part=item["content"][0])

    def _call_delta(self, text: str) -> Iterator[bytes]:
        if text and self._name:
            yield self._events.delta(self._head, text, self._tail)

    def close(self, status: str = "completed") -> Iterator[bytes]:
        """End the current item, if there is one."""
        if self._open is None:
            return
        item, text, place = self.items[-1], "".join(self._texts), self._place
        if self._call is not None:
            rest, ended = self._call.end(text, status)
            yield from self._call_delta(rest)
            if self._name:
                yield self._events.event(f"{self._name}.done", **place, **ended)
        else:
            item["status"] = status
            part = item["content"][0]
            part["text"] = text
            logprobs = {"logprobs": part["logprobs"]} if self._open is Text else {}
            yield self._events.event(f"{self._name}.done", **place, text=text, **logprobs)
            yield self._events.event("response.content_part.done", **place, part=part)
        yield self._events.event("response.output_item.done", output_index=place["output_index"], item=item)
        self._open = None


def _new(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
