"""The completions of one prompt whose engine is in another process, as a front end follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from hookline.core.errors import HooklineError
from hookline.core.outputs import Delta, FinishReason, RequestOutput, TokenLogprob
from hookline.core.serve.processes.messages import End, output_of
from hookline.core.tokenizer.reader import TextReader, textless_ids

if TYPE_CHECKING:
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.serve.engine_client import ServedModel


class RemoteStream:
    """`DeltaStream` of one prompt; its completions have handles in a row, from `handle` on.

    leave: ends completions that are left before their end.
    """

    def __init__(
        self,
        leave: Callable[[Sequence[RemoteCompletion]], None],
        loop: asyncio.AbstractEventLoop,
        handle: int,
        params: SamplingParams,
        prompt: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._leave, self._loop, self.prompt = leave, loop, prompt
        self.info = {key: options[key] for key in ("priority", "tags", "deadline_s") if key in options}
        self.completions = [RemoteCompletion(self, handle + index, index) for index in range(params.n)]
        self.prompt_token_ids: list[int] = []
        self._num_open = params.n
        self._news: dict[int, RemoteCompletion] = {}
        self._error: HooklineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, token_ids: list[int], params: SamplingParams, model: ServedModel) -> None:
        """The prompt's tokens are known; those of its completions come from now on."""
        self.prompt_token_ids = token_ids
        for completion, one in zip(self.completions, params.each(), strict=True):
            completion.begin(token_ids, one, model)

    @property
    def is_open(self) -> bool:
        """Whether somebody may still read."""
        return self._num_open > 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._news:
            if not self._num_open:
                raise StopAsyncIteration
            if self._error is not None:
                self._num_open, self.completions = 0, []
                raise self._error
            waiter = self._waiter = self._loop.create_future()  # asking asyncio for the loop would be a system call
            try:
                await waiter
            except BaseException:
                await self.aclose()
                raise
        completion = self._news.pop(next(iter(self._news)))
        delta = completion.take()
        self._num_open -= delta.output is not None
        if not self._num_open:
            self.completions = []  # no circle of references is left for Python to find
        return delta

    async def aclose(self) -> None:
        """End the requests; a second call does nothing."""
        if self._num_open:
            self._num_open = 0
            self._leave(self.completions)
            self.completions, self._news = [], {}

    def notify(self, completion: RemoteCompletion) -> None:
        """A completion has something to be read."""
        self._news[completion.index] = completion
        self._wake()

    def fail(self, error: HooklineError) -> None:
        """End with an error, behind what came before it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class RemoteCompletion:
    """One completion as it grows."""

    __slots__ = (
        "_ended",
        "_has_stops",
        "_logprobs",
        "_num_taken",
        "_reader",
        "_reason",
        "_stop",
        "_token_ids",
        "handle",
        "index",
        "stream",
    )

    def __init__(self, stream: RemoteStream, handle: int, index: int) -> None:
        self.stream, self.handle, self.index = stream, handle, index
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._num_taken = 0
        self._has_stops = False
        """Whether stop strings are looked for: else tokens become text when they are taken, and not before."""
        self._reason: FinishReason | None = None
        """Why the last token is the last."""
        self._stop: str | None = None
        self._ended: RequestOutput | None = None
        self._reader: TextReader

    def begin(self, prompt: list[int], params: SamplingParams, model: ServedModel) -> None:
        """Be ready for tokens."""
        detokenizer = model.codec.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        self._reader = TextReader(params, detokenizer, None, textless_ids(params, model.eos_token_ids))
        self._has_stops = bool(params.stop)
        self._logprobs = None if params.logprobs is None else []

    def push(self, token_id: int, reason: FinishReason | None) -> bool:
        """Add a token; returns whether it completed a stop string, behind which tokens are ignored."""
        if self._stop is not None:
            return False
        self._token_ids.append(token_id)
        if self._has_stops:
            self._stop = self._reader.see(token_id, reason)
        else:
            self._reason = reason
        self.stream.notify(self)
        return self._stop is not None

    def add_logprobs(self, rows: list[TokenLogprob]) -> None:
        """Those of tokens that are pushed next."""
        if self._logprobs is not None and self._stop is None:
            self._logprobs += rows

    def end(self, end: End) -> None:
        """Nothing more comes."""
        stream = self.stream
        output = output_of(end, stream.prompt, stream.prompt_token_ids, self._token_ids, self.index)
        output = replace(output, **stream.info)
        if self._stop is not None:
            output = replace(
                output, finish_reason=FinishReason.STOP, stop_reason=self._stop, error=None, is_fault=False
            )
        self._ended = output
        stream.notify(self)

    def take(self) -> Delta:
        """What came since the last call."""
        first, self._num_taken = self._num_taken, len(self._token_ids)
        ids, ended = self._token_ids[first:], self._ended
        if ended is None and self._reason is None and not self._has_stops:
            text = self._reader.read(ids)
        else:
            text, ended = self._last_text(ids)
        return Delta(self.handle, 0, self.index, text, ids, ended, self._taken_logprobs(first))

    def _last_text(self, token_ids: list[int]) -> tuple[str, RequestOutput | None]:
        """The text that is new with these tokens, and the output once there is one."""
        if not self._has_stops:
            for number, token_id in enumerate(token_ids, 1):
                self._reader.see(token_id, self._reason if number == len(token_ids) else None)
        ended = self._ended
        if ended is not None:
            ended = replace(ended, text=self._reader.finish(), logprobs=self._taken_logprobs(0))
        return self._reader.take()[0], ended

    def _taken_logprobs(self, first: int) -> list[TokenLogprob] | None:
        return None if self._logprobs is None else self._logprobs[first : len(self._token_ids)]
