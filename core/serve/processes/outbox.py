"""The engine process' outgoing messages to one front end: gathers, packs and sends the tokens of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hookline.core.outputs import FinishReason, RequestOutput, TokenLogprob, Told, behind, joined_told
from hookline.core.serve.processes.messages import End, Message, StepNews, encode, end_of, packed, scored

if TYPE_CHECKING:
    from hookline.core.requests.request import Request

Send = Callable[[bytes, bytes], bool]
"""Send (name, message) without waiting; False if ZeroMQ's queue is full. Raises: LookupError if the name is gone."""


class Outbox:
    """Of one front end. Completions' watchers add tokens and ends during a step; `flush` sends them.

    While the front end does not read, the results of steps are kept; `stuck_s` is the time since it last read.
    """

    def __init__(self, name: bytes, send: Send) -> None:
        self.name, self._send = name, send
        self.handles: list[int] = []
        self.token_ids: list[int] = []
        self.last: dict[int, str] = {}
        self.scored: dict[int, list[TokenLogprob]] = {}
        self.ends: list[End] = []
        self.told: dict[int, Told] = {}
        self._messages: list[bytes] = []
        self._stuck_since_s: float | None = None

    def post(self, message: Message) -> None:
        """Send a message with the next flush, before the step's."""
        self._messages.append(encode(message))

    def flush(self) -> None:
        """Send all kept results, or as many as ZeroMQ's queue has room for.

        Raises: LookupError if the front end is gone.
        """
        while self._messages:
            if not self._sent(self._messages[0]):
                return
            self._messages.pop(0)
        if self.handles or self.ends:
            if self._sent(encode(self._step())):
                self.clear()

    def clear(self) -> None:
        """Drop the results that were sent."""
        self.handles.clear()
        self.token_ids.clear()
        self.last, self.scored, self.ends, self.told = {}, {}, [], {}

    @property
    def stuck_s(self) -> float:
        """Seconds for which the front end has not taken anything."""
        return 0.0 if self._stuck_since_s is None else time.monotonic() - self._stuck_since_s

    def _sent(self, data: bytes) -> bool:
        if self._send(self.name, data):
            self._stuck_since_s = None
            return True
        self._stuck_since_s = self._stuck_since_s or time.monotonic()
        return False

    def _step(self) -> StepNews:
        rows = {handle: [scored(one) for one in ones] for handle, ones in self.scored.items()}
        return StepNews(packed(self.handles), packed(self.token_ids), self.last, rows, self.ends, self.told)


class Outlet:
    """`core.frontend.output_processor.Receiver` that hands a completion's tokens to its front end's outbox.

    It is the completion's `core.requests.request.Watcher`, too. on_end: called with the request's id at its end.
    is_followed: whether other values may come with its tokens, such as log-probabilities.
    """

    def __init__(self, handle: int, outbox: Outbox, on_end: Callable[[int], None], *, is_followed: bool) -> None:
        self._handle, self._outbox, self._on_end, self._is_followed = handle, outbox, on_end, is_followed
        self._add_handle, self._add_token = outbox.handles.append, outbox.token_ids.append
        self._num_scored = 0
        """Tokens whose log-probabilities were handed over."""
        self._num_told = 0
        """Tokens for which step extensions' values were handed over."""

    @property
    def watcher(self) -> Outlet:
        """See Receiver."""
        return self

    def begin(self, request_id: int, on_news: Callable[[Any], object]) -> None:
        """See Receiver."""
        self.request_id, self._on_news = request_id, on_news

    def see(self, token_id: int, reason: FinishReason | None) -> str | None:
        """See Watcher. The front end looks for stop strings."""
        self._add_handle(self._handle)
        self._add_token(token_id)
        if reason is not None:
            self._outbox.last[self._handle] = reason.value
        if self._is_followed:
            self._on_news(self)
        return None

    def tell(self, request: Request) -> None:
        """See Receiver: log-probabilities and step extensions' values are known now."""
        if request.scores is not None:
            self._add_scores(request.scores.sampled(self._num_scored) or [])
        if request.extensions is not None:
            self._add_told(request.extensions.results(self._num_told))

    def end(self, output: RequestOutput) -> None:
        """See Receiver."""
        self._add_scores((output.logprobs or [])[self._num_scored :])
        self._add_told(behind(output.extensions, self._num_told))
        self._outbox.ends.append(end_of(self._handle, output))
        self._on_end(output.request_id)

    def _add_told(self, told: Told | None) -> None:
        if told and any(told.values()):
            self._outbox.told[self._handle] = joined_told(self._outbox.told.get(self._handle), told) or {}
            self._num_told += max(map(len, told.values()))

    def _add_scores(self, rows: list[TokenLogprob]) -> None:
        if rows:
            self._outbox.scored.setdefault(self._handle, []).extend(rows)
            self._num_scored += len(rows)
