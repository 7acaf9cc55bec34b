"""News of requests on their way from the engine's thread to coroutines. Knows no engine and no text.

A mailbox is unbounded, and yet holds little: news that nobody has read are merged, so a slow reader gets fewer and
larger Deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from hookline.core.errors import HooklineError
from hookline.core.outputs import Delta

News = Delta | HooklineError


class Mailbox:
    """Of one prompt, on one event loop; `put` and `get` are called on that loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_cumulative: bool = False) -> None:
        self.loop = loop
        self._is_cumulative = is_cumulative
        self._deltas: dict[int, Delta] = {}
        self._error: HooklineError | None = None
        self._has_news = asyncio.Event()

    def put(self, news: News) -> None:
        """Add news; the last Delta of a completion, or an error, comes last."""
        if isinstance(news, HooklineError):
            self._error = news
        else:
            before = self._deltas.pop(news.index, None)
            self._deltas[news.index] = news if before is None else self._merged(before, news)
        self._has_news.set()

    async def get(self) -> Delta:
        """The oldest news, as soon as there are any.

        Raises: the error that was put, once all before it was read.
        """
        await self._has_news.wait()
        if not self._deltas:
            assert self._error is not None, "a mailbox was opened without news in it"
            raise self._error
        delta = self._deltas.pop(next(iter(self._deltas)))
        if not self._deltas and self._error is None:
            self._has_news.clear()
        return delta

    def _merged(self, before: Delta, news: Delta) -> Delta:
        text = news.text if self._is_cumulative else before.text + news.text
        ids = before.token_ids + news.token_ids
        logprobs = None if before.logprobs is None or news.logprobs is None else before.logprobs + news.logprobs
        return replace(news, text=text, token_ids=ids, logprobs=logprobs)


def deliver(items: Iterable[tuple[Mailbox, News]]) -> None:
    """Put news into their mailboxes: what one wake-up of an event loop does for all requests of a step."""
    for mailbox, news in items:
        mailbox.put(news)
