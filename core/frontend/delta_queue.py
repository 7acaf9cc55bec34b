"""Deltas of requests on their way from the engine's thread to coroutines.

A queue is unbounded, and yet holds little: Deltas that have not been read are merged, so a slow reader gets fewer and
larger ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from hookline.core.errors import HooklineError
from hookline.core.outputs import Delta

NewDeltas = Delta | HooklineError


class DeltaQueue:
    """Of one prompt, on one event loop; `put` and `get` are called on that loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_cumulative: bool = False) -> None:
        self.loop = loop
        self._is_cumulative = is_cumulative
        self._deltas: dict[int, Delta] = {}
        self._error: HooklineError | None = None
        self._has_news = asyncio.Event()

    def put(self, new_deltas: NewDeltas) -> None:
        """Add a Delta; the last Delta of a completion, or an error, comes last."""
        if isinstance(new_deltas, HooklineError):
            self._error = new_deltas
        else:
            before = self._deltas.pop(new_deltas.index, None)
            self._deltas[new_deltas.index] = new_deltas if before is None else self._merged(before, new_deltas)
        self._has_news.set()

    async def get(self) -> Delta:
        """The oldest Delta, as soon as there is one.

        Raises: the error that was put, once all before it was read.
        """
        await self._has_news.wait()
        if not self._deltas:
            assert self._error is not None, "there is news, but neither a Delta nor an error"
            raise self._error
        delta = self._deltas.pop(next(iter(self._deltas)))
        if not self._deltas and self._error is None:
            self._has_news.clear()
        return delta

    def _merged(self, before: Delta, new_deltas: Delta) -> Delta:
        text = new_deltas.text if self._is_cumulative else before.text + new_deltas.text
        ids = before.token_ids + new_deltas.token_ids
        logprobs = (
            None if before.logprobs is None or new_deltas.logprobs is None else before.logprobs + new_deltas.logprobs
        )
        return replace(new_deltas, text=text, token_ids=ids, logprobs=logprobs)


def send(items: Iterable[tuple[DeltaQueue, NewDeltas]]) -> None:
    """Put Deltas into their queues: what one wake-up of an event loop does for all requests of a step."""
    for deltas, new_deltas in items:
        deltas.put(new_deltas)
