"""Limits the rows in an engine to a tenth more than can run, so that a place that becomes free is taken at once.

Limits both requests and prompt tokens. Other rows wait here in order, where they cost the scheduler nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

AHEAD = 1.1
"""Rows in an engine relative to the rows that can run."""


class Admission:
    """Admits at most max_rows requests with at most max_tokens prompt tokens together, first come, first served. A
    request with more tokens than that is admitted alone. Belongs to one event loop.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.num_rows = self.num_tokens = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @classmethod
    def of(cls, llm: LLM, max_rows: int | None = None) -> Admission:
        """For an engine. max_rows: None: a tenth more than engine.max_num_seqs."""
        engine = llm.engine
        num_tokens = engine.num_blocks * engine.limits.plan.block_size
        return cls(max_rows or rows_in_flight(llm.config.engine.max_num_seqs), math.ceil(AHEAD * num_tokens))

    @asynccontextmanager
    async def room(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room for a request with `num_tokens` prompt tokens, and occupy it until the block is left."""
        if self._waiting or not self._has_room(num_tokens):
            await self._turn(num_tokens)
        else:
            self._take(num_tokens)
        try:
            yield
        finally:
            self._give(num_tokens)

    async def _turn(self, num_tokens: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(num_tokens)
            raise

    def _has_room(self, num_tokens: int) -> bool:
        fits = self.num_rows < self.max_rows and self.num_tokens + num_tokens <= self.max_tokens
        return fits or not self.num_rows

    def _take(self, num_tokens: int) -> None:
        self.num_rows += 1
        self.num_tokens += num_tokens

    def _give(self, num_tokens: int) -> None:
        self.num_rows -= 1
        self.num_tokens -= num_tokens
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            num_wanted, turn = self._waiting.popleft()
            if not turn.done():  # otherwise it was cancelled
                self._take(num_wanted)
                turn.set_result(None)


def rows_in_flight(max_num_seqs: int) -> int:
    """A tenth more rows than can run."""
    return math.ceil(AHEAD * max_num_seqs)
