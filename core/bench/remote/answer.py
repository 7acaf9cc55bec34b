"""A streamed answer of an OpenAI-compatible server, read as it comes: when its tokens came, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hookline.core.bench.remote.body import Said
from hookline.core.errors import clipped

MAX_FRAME_BYTES = 64 * 2**20
"""Most bytes of an event, or of a response that is not a stream; more means that the server is broken."""


class Answer:
    """`connection.Reader` of one request; times are of the clock that it is given.

    ended: called once, however the request ends. times_s, counts: arrival of each chunk with tokens, and their number.
    error: why the request failed, beginning with the kind of error.
    """

    def __init__(self, clock: Callable[[], float], ended: Callable[[], None], *, keeps_text: bool = False) -> None:
        self._clock, self._ended, self._keeps_text = clock, ended, keeps_text
        self._status = 0
        self._rest = b""
        self._said: list[str] = []
        self._ids: list[int] | None = []
        self._over = False
        self.times_s: list[float] = []
        self.counts: list[int] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.ended_s: float | None = None

    @property
    def said(self) -> Said:
        """The text and tokens of the answer; empty unless it keeps its text."""
        return Said("".join(self._said), self._ids)

    def on_status(self, status: int) -> None:
        """See Reader."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See Reader."""
        if self._over:
            return
        now_s = self._clock()
        data = self._rest + data if self._rest else data
        if self._status != 200:
            self._rest = data
        else:
            *lines, self._rest = data.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
        if len(self._rest) > MAX_FRAME_BYTES:
            self.on_failure(f"not an event stream: {MAX_FRAME_BYTES} bytes without an end")

    def on_end(self) -> None:
        """See Reader."""
        if self._over:
            return
        if self._status != 200:
            self.on_failure(f"HTTP {self._status}: {_message(self._rest)}")
        elif not self.times_s:
            self.on_failure(
                f"no tokens: {_message(self._rest)}" if self._rest.strip() else "no tokens: an empty stream"
            )
        elif self.finish_reason is None and not self.usage:
            self.on_failure("cut off: the stream ended without a finish_reason")
        else:
            self._trust_usage()
            self._end()

    def on_failure(self, reason: str) -> None:
        """See Reader."""
        if self._over:
            return
        self.error = self.error or clipped(" ".join(reason.split()))
        self._end()

    def _end(self) -> None:
        self._over, self._rest = True, b""
        self.ended_s = self._clock()
        self._ended()

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]" or self.error is not None:
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            self.error = f"not JSON in the stream: {clipped(data.decode(errors='replace'))}"
            return
        if not isinstance(chunk, dict) or chunk.get("error"):
            self.error = f"error in the stream: {_message(data)}"
            return
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if _brings_token(choice):
                self.times_s.append(now_s)
                self.counts.append(1)
            if self._keeps_text:
                self._keep(choice)

    def _keep(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._said.append(choice.get("text") or delta.get("content") or "")
        ids = choice.get("token_ids")
        if ids and self._ids is not None:
            self._ids.extend(ids)
        elif _brings_token(choice):
            self._ids = None

    def _trust_usage(self) -> None:
        """Count the tokens that the server says: a chunk may bring several, or none."""
        total, chunks = self.usage.get("completion_tokens"), len(self.times_s)
        if not isinstance(total, int) or total == chunks or total < 1:
            return
        if total < chunks:
            del self.times_s[total:], self.counts[total:]
        else:
            ends = [(place + 1) * total // chunks for place in range(chunks)]
            self.counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _brings_token(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk stands for a token: not an opening with a role alone, nor a closing without text."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text") or choice.get("token_ids") or not choice.get("finish_reason"))
    if delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls"):
        return True
    return delta.get("content") == "" and "role" not in delta and not choice.get("finish_reason")


def _message(body: bytes) -> str:
    """The message of an error response, in one line."""
    try:
        error = json.loads(body)
        while isinstance(error, dict) and (inner := error.get("error") or error.get("detail") or error.get("message")):
            error = inner
        text = error if isinstance(error, str) else json.dumps(error)
    except ValueError:
        text = body[:1000].decode(errors="replace")
    return clipped(" ".join(text.split())) or "no message"
