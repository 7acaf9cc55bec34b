"""The Deltas of one prompt's completions on their way to the coroutine that reads them.

A stream holds at most one unread Delta of each completion, so a slow reader gets fewer and larger Deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hookline.core.errors import HooklineError
from hookline.core.outputs import Delta

if TYPE_CHECKING:
    from hookline.core.frontend.completion import Completion


class CompletionStream:
    """An async iterator; it ends behind the last Delta of the last completion.

    Belongs to one event loop, whose thread alone may read it or call `put`, `notify` and `fail`.
    leave: called with this stream if it is closed before its end, once; ends its requests.
    Raises: while it is read, the error given to `fail`, after the Deltas before it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_completions: int,
        leave: Callable[[Any], object],
        *,
        is_cumulative: bool = False,
    ) -> None:
        self.loop, self._leave, self._is_cumulative = loop, leave, is_cumulative
        self._num_open = num_completions
        self._unread: dict[int, Delta | Completion] = {}
        self._error: HooklineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether Deltas may still come and be read: it has neither ended nor been closed."""
        return self._num_open > 0

    @property
    def is_read(self) -> bool:
        """Whether all Deltas that came were read."""
        return not self._unread

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if not self._num_open:
                raise StopAsyncIteration
            if self._error is not None:
                self._num_open = 0
                raise self._error
            if self._waiter is None:
                self._waiter = self.loop.create_future()  # asking asyncio for the loop would be a system call
            try:
                await self._waiter
            except BaseException:
                self.leave()
                raise
        unread = self._unread.pop(next(iter(self._unread)))
        delta = unread if isinstance(unread, Delta) else unread.take()
        self._num_open -= delta.output is not None
        return delta

    async def aclose(self) -> None:
        """End the requests; a second call does nothing."""
        self.leave()

    def leave(self) -> None:
        """As `aclose`, at once. May be called from other threads and destructors if the given `leave` may."""
        if self._num_open:
            self._num_open, self._unread = 0, {}
            self._leave(self)

    # ------------------------------------------------------------------------------------- from whoever has the engine

    def put(self, delta: Delta) -> None:
        """Add a Delta. An unread Delta of the same completion is joined with it and moves to the end of the queue."""
        before = self._unread.pop(delta.index, None)
        if isinstance(before, Delta):
            delta = before.joined(delta, is_cumulative=self._is_cumulative)
        self._unread[delta.index] = delta
        self._wake()

    def notify(self, completion: Completion) -> None:
        """Note that a completion has new tokens; its `take` is called when the stream is read."""
        self._unread[completion.index] = completion
        self._wake()

    def fail(self, error: HooklineError) -> None:
        """End with an error, after the Deltas that came before it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class RequestStream:
    """The Deltas of one prompt's completions, as an async iterator; ends behind the last Delta of the last one.

    Closing or dropping it, or cancelling a coroutine that waits for it, ends its requests. So the engine's thread holds
    only the CompletionStream: this object is freed as soon as the caller drops it.
    Raises: while it is read, what AsyncLLM.generate raises.
    """

    def __init__(self, stream: CompletionStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._stream.__anext__()

    async def aclose(self) -> None:
        """End the requests; a second call does nothing."""
        self._stream.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.leave()

    def __del__(self) -> None:
        self._stream.leave()
