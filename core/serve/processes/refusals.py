"""Prompts that are not served: the engine's error as it is sent and as it was, and how many its front end refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from hookline.core.errors import (
    EngineError,
    HooklineError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    one_short_line,
)
from hookline.core.serve.processes.messages import Message, Refused, TurnedAway

TELL_S = 0.5
"""Between two reports of what a front end refused: whoever floods it must not flood the engine with that."""


def refusal_of(handle: int, error: Exception) -> Refused:
    """What a front end is told."""
    if isinstance(error, QueueFullError):
        counts = error.num_waiting_requests, error.num_waiting_tokens
        return Refused(handle, str(error), QueueFullError.__name__, (error.key, error.limit, *counts))
    for kind in (PromptTooLongError, RequestError):
        if isinstance(error, kind):
            return Refused(handle, str(error), kind.__name__)
    return Refused(handle, one_short_line(error), EngineError.__name__)


def error_of(refused: Refused) -> HooklineError:
    """What the request's client is told."""
    if refused.queue is not None:
        return QueueFullError(*refused.queue)
    known = (PromptTooLongError, RequestError)
    kind = next((one for one in known if one.__name__ == refused.error), EngineError)
    return kind(refused.message)


class TurnedAwayCount:
    """Prompts that a front end refused by itself, told to the engine in one message at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[Message], None]) -> None:
        self._loop, self._send = loop, send
        self._count = 0

    def add(self) -> None:
        """Count one; the engine hears of it soon."""
        self._count += 1
        if self._count == 1:
            self._loop.call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        count, self._count = self._count, 0
        with suppress(EngineError):  # it reads nothing
            self._send(TurnedAway(count))
