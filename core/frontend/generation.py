"""A call of the blocking LLM: its prompts, queued as the engine accepts them, and their Deltas in order."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from hookline.core.errors import QueueFullError, RequestError, shown
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import Delta, RequestOutput, merge_completions
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import CHAT_TRACE, PLAIN, RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt, is_chat

REFRESH_S = 0.5
P = TypeVar("P")
"""Parameters of requests: SamplingParams or PoolingParams."""


class ProgressBar(Protocol):
    """Shows the progress of a generate call."""

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Add a step's counts: requests finished, tokens of prompts and of decodes computed."""
        ...

    def close(self) -> None:
        """Take the bar off the screen."""
        ...


class Asked(NamedTuple):
    """A prompt of a call. pooling: if given, the prompt is pooled, and params are ignored."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = PLAIN
    pooling: PoolingParams | None = None


class Call:
    """The prompts of one call; other calls may use the same engine at the same time.

    follows, is_cumulative: see OutputProcessor.add.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        prompts: Sequence[Asked],
        *,
        follows: bool = False,
        is_cumulative: bool = False,
    ) -> None:
        self._output_processor, self._follows, self._is_cumulative = output_processor, follows, is_cumulative
        self._waiting = deque(enumerate(prompts))
        self._open: set[int] = set()
        self._new_deltas: deque[Delta] = deque()

    def run(self, progress: ProgressBar | None = None) -> Iterator[Delta]:
        """Do steps until every prompt has ended, and yield the Deltas. If it is left early, the rest is aborted."""
        try:
            while self._waiting or self._open or self._new_deltas:
                with self._output_processor.exclusively():
                    self._queue()
                    if not self._new_deltas:
                        self._output_processor.step()
                        self._show(progress)
                while self._new_deltas:
                    yield self._new_deltas.popleft()
        finally:
            self._output_processor.forget(self._open)

    def outputs(self, progress: bool | ProgressBar | None = None) -> list[RequestOutput]:
        """Run, and return one output for each prompt, in their order; the bar is closed afterwards.

        Raises: RequestError if progress is no bar.
        """
        bar, found = bar_of(progress, len(self._waiting)), dict[int, list[RequestOutput]]()
        try:
            for delta in self.run(bar):
                if delta.output is not None:
                    found.setdefault(delta.prompt_index, []).append(delta.output)
        finally:
            if bar is not None:
                bar.close()
        return [merge_completions(found[index]) for index in sorted(found)]

    def _queue(self) -> None:
        """Add prompts to the engine for as long as its queue has room; the others wait here."""
        while self._waiting and self._has_room(self._waiting[0][1].params.n):
            self._add(*self._waiting.popleft())

    def _has_room(self, num_requests: int) -> bool:
        try:
            self._output_processor.engine.check_room(num_requests)
        except QueueFullError:
            return not self._output_processor.engine.has_work  # it will never have: adding says why
        except RequestError:
            return True  # likewise
        return True

    def _add(self, index: int, asked: Asked) -> None:
        prompt, params, options, pooling = asked
        text = prompt if isinstance(prompt, str) else None
        token_ids: Sequence[int] = ()
        try:
            token_ids = self._output_processor.codec.encode(prompt)
            if is_chat(prompt):
                options = replace(options, trace=CHAT_TRACE)
            ids = self._output_processor.add(
                token_ids,
                params,
                self._receive,
                prompt_index=index,
                follows=self._follows,
                is_cumulative=self._is_cumulative,
                prompt=text,
                options=options,
                pooling=pooling,
            )
            self._open.update(ids)
        except RequestError as error:
            refusal = self._output_processor.engine.refuse(token_ids, error, text, options)
            self._new_deltas.append(Delta(refusal.request_id, index, 0, "", [], refusal))

    def _receive(self, delta: Delta) -> None:
        if delta.output is not None:
            self._open.discard(delta.request_id)
        self._new_deltas.append(delta)

    def _show(self, progress: ProgressBar | None) -> None:
        stats = self._output_processor.engine.last_stats
        if progress is not None and stats is not None:
            num_finished = sum(delta.output is not None and delta.index == 0 for delta in self._new_deltas)
            progress.update(num_finished, stats.num_prefill_tokens, stats.num_decode_tokens)


def bar_of(progress: bool | ProgressBar | None, num_prompts: int) -> ProgressBar | None:
    """The progress bar of a call; None if none is wanted. progress: True for a bar on standard error.

    Raises: RequestError if `progress` is no progress bar.
    """
    if progress is None or isinstance(progress, bool):
        return Progress(num_prompts) if progress else None
    if not callable(getattr(progress, "update", None)) or not callable(getattr(progress, "close", None)):
        raise RequestError(f"progress={shown(progress)} must be a bool, or have the methods update and close")
    return progress


def params_each(params: P | Sequence[P] | None, kind: type[P], count: int) -> list[P]:
    """The parameters of each prompt, from a list of as many or one value for all; None means kind().

    Raises: RequestError for another type, or a list of another length.
    """
    if params is None or isinstance(params, kind):
        return [kind() if params is None else params] * count
    each: list[Any] = list(params) if hasattr(params, "__iter__") else [params]
    if not all(isinstance(one, kind) for one in each):
        raise RequestError(f"params={shown(params)} must be {kind.__name__}, or a list of them")
    if len(each) != count:
        raise RequestError(f"{len(each)} {kind.__name__} for {count} prompts; pass one, or one for each prompt")
    return each


class Progress:
    """Counts finished requests, and shows the tokens per second over the last half second."""

    def __init__(self, num_requests: int) -> None:
        from tqdm import TqdmWarning

        with warnings.catch_warnings():
            # A notebook gets a bar of its own, or without ipywidgets the terminal's, which does for it.
            warnings.simplefilter("ignore", TqdmWarning)
            from tqdm.auto import tqdm

        self._bar: Any = tqdm(total=num_requests, unit="request", dynamic_ncols=True, leave=False, file=sys.stderr)
        self._since_s = time.monotonic()
        self._num_prefill = self._num_decode = 0

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """See ProgressBar."""
        self._num_prefill += num_prefill_tokens
        self._num_decode += num_decode_tokens
        elapsed_s = time.monotonic() - self._since_s
        if elapsed_s >= REFRESH_S:
            self._bar.set_postfix_str(
                f"prefill {self._num_prefill / elapsed_s:.0f} tok/s, decode {self._num_decode / elapsed_s:.0f} tok/s",
                refresh=not num_finished,
            )
            self._since_s, self._num_prefill, self._num_decode = time.monotonic(), 0, 0
        if num_finished:
            self._bar.update(num_finished)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()


def progress_bar(num_requests: int) -> Progress | None:
    """A bar on standard error, or None if that is not a terminal."""
    return Progress(num_requests) if sys.stderr is not None and sys.stderr.isatty() else None
