"""The Deltas of one prompt of an AsyncLLM, for the coroutine that reads them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from hookline.core.frontend.delta_queue import DeltaQueue
from hookline.core.frontend.engine_thread import EngineThread
from hookline.core.outputs import Delta


class RequestStream:
    """The Deltas of one prompt's completions, as an async iterator; ends behind the last Delta of the last one.

    Closing or dropping it, or cancelling a coroutine that waits for it, ends its requests.
    Raises: while it is read, what AsyncLLM.generate raises.
    """

    def __init__(self, thread: EngineThread, deltas: DeltaQueue, num_completions: int) -> None:
        self._thread, self._deltas = thread, deltas
        self._num_open = num_completions

    @property
    def is_open(self) -> bool:
        """Whether Deltas may still come."""
        return self._num_open > 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._num_open:
            raise StopAsyncIteration
        try:
            delta = await self._deltas.get()
        except BaseException:
            self._cancel()
            raise
        self._num_open -= delta.output is not None
        return delta

    async def aclose(self) -> None:
        """End the requests; a second call does nothing."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._num_open:
            self._num_open = 0
            self._thread.cancel(self._deltas)
