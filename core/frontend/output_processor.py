"""Between callers and the engine: prompts become requests, committed tokens become text, and Deltas reach their caller.

What LLM and AsyncLLM have in common. Knows text and the engine's methods; no thread, no event loop. A request that
needs its text only at the end has no TextReader and costs nothing while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from hookline.core.engine.engine import Engine
from hookline.core.errors import HooklineError, RequestError, shown
from hookline.core.frontend.step_guard import StepGuard
from hookline.core.outputs import Delta, FinishReason, RequestOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec, with_word_ids
from hookline.core.tokenizer.reader import TextReader, textless_ids
from hookline.core.util.garbage import FrozenHeap

Send = Callable[[Delta], None]


@dataclass(frozen=True)
class _Entry:
    """Where a request's Deltas go. reader: None if its text is made at the end."""

    prompt_index: int
    index: int
    send: Send
    params: SamplingParams
    reader: TextReader | None
    is_cumulative: bool


class OutputProcessor:
    """The open requests of one engine and their callers."""

    def __init__(self, engine: Engine, codec: Codec, guard: StepGuard | None = None) -> None:
        self.engine, self.codec, self.guard = engine, codec, guard
        self._busy = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._new_deltas: list[TextReader] = []
        self.heap: FrozenHeap | None = None
        """What Python's full collections leave out until this is closed, if its owner asked for that."""

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Around what one thread does with the engine.

        Raises: HooklineError if another thread is at it.
        """
        if not self._busy.acquire(blocking=False):
            raise HooklineError("another thread is using this LLM; take AsyncLLM, or one LLM for each thread")
        try:
            yield
        finally:
            self._busy.release()

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        send: Send,
        *,
        prompt_index: int = 0,
        follows: bool = False,
        is_cumulative: bool = False,
        **given: Any,
    ) -> list[int]:
        """Queue the n completions of a prompt and return their ids; `send` gets their Deltas, and each end once.

        follows: a Delta with every token, not only at the end. given: arguments of Engine.add.
        Raises: RequestError if the prompt cannot be served, or not now; none of its completions is queued then.
        """
        self.engine.check_room(params.n)
        if params.stop and self.codec.tokenizer is None:
            raise RequestError(
                f"sampling.stop={shown(list(params.stop))} needs a tokenizer and the checkpoint has none"
            )
        ids: list[int] = []
        try:
            for index, one in enumerate(with_word_ids(params, self.codec).each()):
                reader = self._reader(token_ids, one, follows) if follows or one.stop else None
                id_ = self.engine.add(token_ids, one, watcher=reader, like=ids[0] if ids else None, **given)
                if reader is not None:
                    reader.request_id = id_
                self._entries[id_] = _Entry(prompt_index, index, send, one, reader, is_cumulative)
                ids.append(id_)
        except BaseException:
            self.forget(ids)
            raise
        return ids

    def step(self) -> None:
        """Let the engine do a step and send what it brought. Whoever is still open then gets more later, or an end.

        Raises: what Engine.step raises; requests that ended by it are delivered with the next step.
        """
        if self.guard is None:
            outputs = self.engine.step()
        else:
            with self.guard:
                outputs = self.engine.step()
        self._hand_out(outputs)
        if self._entries and not self.engine.has_work:
            self._hand_out(self._orphan(id_) for id_ in list(self._entries))

    def abort(self, ids: Iterable[int]) -> None:
        """End requests; their callers hear of it. Unknown ids and those that have ended are ignored."""
        self._hand_out(self.engine.abort([id_ for id_ in ids if id_ in self._entries]))

    def forget(self, ids: Iterable[int]) -> None:
        """End requests whose caller has gone and hears nothing more."""
        known = [id_ for id_ in ids if self._entries.pop(id_, None) is not None]
        self.engine.abort(known)

    def close(self) -> None:
        """End all requests, tell their callers, and close the engine; a second call does nothing."""
        heap, self.heap = self.heap, None
        with nullcontext() if heap is None else heap.thawed():
            try:
                self.abort(list(self._entries))
                self._hand_out(self.engine.pop_finished())
            finally:
                if self.guard is not None:
                    self.guard.stop()
                self.engine.close()

    def _reader(self, prompt: Sequence[int], params: SamplingParams, follows: bool) -> TextReader:
        detokenizer = self.codec.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        stop_ids = textless_ids(params, self.engine.limits.eos_token_ids)
        return TextReader(params, detokenizer, self._new_deltas.append if follows else None, stop_ids)

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """First the ends, then the Deltas of those that go on."""
        for output in outputs:
            entry = self._entries.pop(output.request_id, None)
            if entry is not None:
                entry.send(self._last_delta(entry, output))
        new_deltas, self._new_deltas[:] = list(self._new_deltas), []
        for reader in new_deltas:
            entry, request = self._entries.get(reader.request_id), self.engine.queue.live.get(reader.request_id)
            if entry is not None and request is not None:  # of one whose end is still to be told, that brings the rest
                text, ids = reader.take()
                shown = reader.text if entry.is_cumulative else text
                scores = request.scores
                logprobs = None if scores is None else scores.sampled(reader.num_tokens - len(ids))
                entry.send(Delta(reader.request_id, entry.prompt_index, entry.index, shown, ids, logprobs=logprobs))

    def _last_delta(self, entry: _Entry, output: RequestOutput) -> Delta:
        reader = entry.reader
        output = replace(output, index=entry.index, text=self._text(entry, output))
        text, ids = output.text, output.token_ids
        if reader is not None and reader.is_followed:
            text, ids = reader.take()
        shown = output.text if entry.is_cumulative else text
        logprobs = None if output.logprobs is None else output.logprobs[len(output.token_ids) - len(ids) :]
        return Delta(output.request_id, entry.prompt_index, entry.index, shown, ids, output, logprobs)

    def _text(self, entry: _Entry, output: RequestOutput) -> str:
        if entry.reader is not None:
            return entry.reader.finish()
        ids, stop_ids = output.token_ids, textless_ids(entry.params, self.engine.limits.eos_token_ids)
        if ids and output.finish_reason is FinishReason.STOP and (stop_ids is None or ids[-1] in stop_ids):
            ids = ids[:-1]
        skips = entry.params.skip_special_tokens
        return self.codec.decode(ids, skip_special_tokens=skips, behind=output.prompt_token_ids)

    def _orphan(self, id_: int) -> RequestOutput:
        """Somebody ended this request behind our back, on the engine itself."""
        return RequestOutput(id_, None, [], [], FinishReason.ABORT, error="the request was taken off the engine")
