"""The completions of one prompt whose engine is in another process, as a front end follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.outputs import Delta, FinishReason, RequestOutput, TokenLogprob
from hookline.core.serve.processes.messages import End, output_of
from hookline.core.tokenizer.reader import TextReader, textless_ids

if TYPE_CHECKING:
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.serve.engine_client import ServedModel


class RemoteStream(CompletionStream):
    """The stream of one prompt; its completions have handles in a row, from `handle` on.

    leave: see CompletionStream. prompt: its text, if it is one.
    """

    def __init__(
        self,
        leave: Callable[[RemoteStream], None],
        loop: asyncio.AbstractEventLoop,
        handle: int,
        params: SamplingParams,
        prompt: str | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(loop, params.n, leave)
        self.prompt, self.handles = prompt, range(handle, handle + params.n)
        self.info = {key: options[key] for key in ("priority", "tags", "deadline_s") if key in options}
        self.prompt_token_ids: list[int] = []
        """Known once its completions begin."""


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
        self.stream.notify(self.index, self)
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
        stream.notify(self.index, self)

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
