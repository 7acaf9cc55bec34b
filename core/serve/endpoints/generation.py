"""The completions of one HTTP request: the streams of its prompts merged, why each ended, and the tokens they used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TypeAlias

from hookline.core.errors import HooklineError, PluginFault, RequestError
from hookline.core.outputs import Delta, FinishReason, RequestOutput, merge_completions
from hookline.core.serve.access import ACCESS
from hookline.core.serve.engine_client import DeltaStream
from hookline.core.serve.errors import SAME_NAMES, Naming, aborted, placed, timed_out

Numbered: TypeAlias = tuple[int, Delta]
"""The number of a prompt, and a Delta of one of its completions."""


class Generation:
    """Iterates over the Deltas of a request's prompts as they come, each with the index of its prompt.

    Must be closed in any case. naming: parameter -> the request's field that errors name. places: the names of the
    prompts in errors, if they have any.
    Raises, when the next Delta is asked for: the errors of a stream; RequestError or ApiError for a completion that
    could not be served; ApiError for a completion that was aborted.
    """

    def __init__(self, streams: Sequence[DeltaStream], naming: Naming = SAME_NAMES, places: Sequence[str] = ()) -> None:
        self._streams, self._naming, self._places = streams, naming, places
        self._queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(len(streams))
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = len(streams)
        self._access = ACCESS.get()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Numbered:
        with self._naming:
            numbered = await self._next_of_one() if len(self._streams) == 1 else await self._next_of_all()
            if self._access is not None:
                self._access.add(numbered[1])
            if numbered[1].output is not None:
                self._check_end(numbered[0], numbered[1].output)
            return numbered

    def _check_end(self, number: int, output: RequestOutput) -> None:
        try:
            check_end(output)
        except RequestError as error:
            raise self._placed(number, error) from None

    def _placed(self, number: int, error: Exception) -> Exception:
        return placed(error, self._places[number]) if self._places else error

    async def _next_of_one(self) -> Numbered:
        try:
            return 0, await anext(self._streams[0])
        except RequestError as error:
            raise self._placed(0, error) from None

    async def _next_of_all(self) -> Numbered:
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._follow(*one)) for one in enumerate(self._streams)]
        while self._num_open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._num_open -= 1
        raise StopAsyncIteration

    async def _follow(self, number: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                await self._queue.put((number, delta))
            await self._queue.put(None)
        except Exception as error:  # any error must reach the caller, who would otherwise wait for ever
            await self._queue.put(self._placed(number, error))

    async def outputs(self) -> list[list[RequestOutput]]:
        """Wait for all Deltas; returns the completions of each prompt by their index."""
        found: list[list[RequestOutput]] = [[] for _ in self._streams]
        async for number, delta in self:
            if delta.output is not None:
                found[number].append(delta.output)
        return [merge_completions(outputs).completions for outputs in found]

    async def aclose(self) -> None:
        """Cancel the completions that still run; a second call does nothing."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            with suppress(HooklineError):
                await stream.aclose()


def check_end(output: RequestOutput) -> None:
    """Check why a completion ended.

    Raises: RequestError if it could not be served, PluginFault if a plugin failed; ApiError if it was ended from
    outside.
    """
    if output.finish_reason is FinishReason.ERROR:
        kind = PluginFault if output.is_fault else RequestError
        raise kind(output.error or "the request cannot be served")
    if output.finish_reason is FinishReason.ABORT:
        error = output.error or "the server ended the request"
        raise timed_out(error) if "timeout_s" in error else aborted(error)


class Usage:
    """Counts the tokens of a request while it runs."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens of a completion."""
        self.num_completion_tokens += num_tokens

    def add_reasoning(self, num_tokens: int) -> None:
        """Count a completion's reasoning tokens; they are among the tokens that `add` counts."""
        self.num_reasoning_tokens += num_tokens

    def add_end(self, output: RequestOutput) -> None:
        """Count a finished completion's cached prompt tokens, once for each prompt."""
        if output.index == 0:
            self.num_cached_tokens += output.num_cached_tokens
