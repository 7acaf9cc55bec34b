"""One call of the blocking front: its prompts, queued as the engine takes them, and their Deltas in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from hookline.core.errors import QueueFullError, RequestError, shown
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.frontend.progress import Progress
from hookline.core.outputs import Delta, RequestOutput, merge_completions
from hookline.core.request_info import CHAT_TRACE, INFO_KEYS
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt, is_chat

P = TypeVar("P")
"""Parameters of requests: SamplingParams or PoolingParams."""


class ProgressBar(Protocol):
    """Shows how far a generate call is."""

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Add what one step did."""
        ...

    def close(self) -> None:
        """Take the bar off the screen."""
        ...


class Call:
    """Prompts with their parameters, on their way through an engine that others may use as well.

    own: of each prompt, the options of OutputProcessor.add that are its own. options: those for all of them.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        prompts: Sequence[tuple[Prompt, SamplingParams]],
        own: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self._output_processor, self._own, self._options = output_processor, own, options
        self._waiting = deque(enumerate(prompts))
        self._open: set[int] = set()
        self._new_deltas: deque[Delta] = deque()

    def run(self, progress: ProgressBar | None = None) -> Iterator[Delta]:
        """Do steps until every prompt has ended, and yield the Deltas. However it is left, nothing stays behind."""
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
        """Hand prompts in for as long as the engine's queue has room; the others are our own queue."""
        while self._waiting and self._has_room(self._waiting[0][1][1].n):
            self._add(*self._waiting.popleft())

    def _has_room(self, num_requests: int) -> bool:
        try:
            self._output_processor.engine.check_room(num_requests)
        except QueueFullError:
            return not self._output_processor.engine.has_work  # it will never have: adding says why
        except RequestError:
            return True  # likewise
        return True

    def _add(self, index: int, one: tuple[Prompt, SamplingParams]) -> None:
        prompt, params = one
        own = {} if self._own is None else self._own[index]
        text = prompt if isinstance(prompt, str) else None
        token_ids: Sequence[int] = ()
        said = {key: own[key] for key in INFO_KEYS if key in own}
        try:
            token_ids = self._output_processor.codec.encode(prompt)
            options = {"prompt": text, "prompt_index": index, **self._options, **own}
            if is_chat(prompt):
                options.setdefault("trace", CHAT_TRACE)
            self._open.update(self._output_processor.add(token_ids, params, self._receive, **options))
        except RequestError as error:
            self._new_deltas.append(
                _refusal(index, self._output_processor.engine.refuse(token_ids, error, text, **said))
            )

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
    """What shows how far a call is. progress: True for a bar on standard error.

    Raises: RequestError if it is none.
    """
    if progress is None or isinstance(progress, bool):
        return Progress(num_prompts) if progress else None
    if not callable(getattr(progress, "update", None)) or not callable(getattr(progress, "close", None)):
        raise RequestError(f"progress={shown(progress)} must be a bool, or have the methods update and close")
    return progress


def params_each(params: P | Sequence[P] | None, kind: type[P], count: int) -> list[P]:
    """The parameters of each prompt: one's own, or the same for all; None means kind().

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


def infos_each(infos: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The arguments of each prompt; what is a list, and no text, has one each."""
    each = [_one_each(name, value, count) for name, value in infos.items()]
    return [dict(zip(infos, values, strict=True)) for values in zip(*each, strict=True)]


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        return [value] * count
    each = list(value)
    if len(each) != count:
        raise RequestError(f"{name} has {len(each)} values for {count} prompts; pass one, or one for each prompt")
    return each


def _refusal(prompt_index: int, output: RequestOutput) -> Delta:
    return Delta(output.request_id, prompt_index, 0, "", [], output)
