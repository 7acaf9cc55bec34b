"""Between callers and the engine: turns prompts into requests, and sends the tokens of steps to their receivers.

Shared by blocking calls, AsyncLLM's thread and a server's engine process. Knows the engine's methods;
no thread, no event loop, no socket. A request that needs its text only at the end costs nothing while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.engine.engine import Engine
from hookline.core.errors import HooklineError, RequestError, shown
from hookline.core.frontend.completion import Completion
from hookline.core.outputs import Delta, FinishReason, RequestOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Codec, with_word_ids
from hookline.core.util.garbage import FrozenHeap, freeze_heap

if TYPE_CHECKING:
    from hookline.core.frontend.step_guard import StepGuard
    from hookline.core.requests.request import Request, Watcher

Send = Callable[[Delta], None]


class Receiver(Protocol):
    """Receives the tokens and the end of one completion."""

    request_id: int
    """The id given to `begin`."""

    @property
    def watcher(self) -> Watcher | None:
        """Called with each new token; None if only the end matters."""
        ...

    def begin(self, request_id: int, on_news: Callable[[Any], object]) -> None:
        """The completion is queued as this request. on_news: call it with this receiver to be told after the step."""
        ...

    def tell(self, request: Request) -> None:
        """Called after a step in which `on_news` was called; the request goes on."""
        ...

    def end(self, output: RequestOutput) -> None:
        """The request has ended. Called once, unless `forget` was called before."""
        ...


class _TextReceiver(Completion):
    """Makes Deltas and passes them to `send`. follows: a Delta with every token, and not only at the end."""

    def __init__(self, send: Send, *, follows: bool, index: int, prompt_index: int, is_cumulative: bool) -> None:
        super().__init__(index, prompt_index=prompt_index, is_cumulative=is_cumulative)
        self._send, self._follows = send, follows

    @property
    def watcher(self) -> Watcher | None:
        """See Receiver."""
        return self if self._follows or self._has_stops else None

    def tell(self, request: Request) -> None:
        """See Receiver."""
        if self._follows:
            if request.scores is not None:
                self.add_logprobs(request.scores.sampled(self.num_logprobs) or ())
            if request.extensions is not None:
                self.add_told(request.extensions.results(self.num_told) or {})
            self._send(self.take())

    def end(self, output: RequestOutput) -> None:
        """See Receiver."""
        super().end(output)
        self._send(self.take())


class OutputProcessor:
    """The open requests of one engine and their callers."""

    def __init__(self, engine: Engine, codec: Codec, guard: StepGuard | None = None) -> None:
        self.engine, self.codec, self.guard = engine, codec, guard
        self._busy = threading.Lock()
        self._receivers: dict[int, Receiver] = {}
        self._news: list[Receiver] = []
        self.heap: FrozenHeap | None = None
        """The objects that Python's full garbage collections leave out until this is closed; None leaves out none."""

    def freeze_heap(self) -> None:
        """Have Python's full garbage collections leave out all present objects, until this is closed."""
        self.heap = freeze_heap()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Reserve the engine for the calling thread.

        Raises: HooklineError if another thread is using the engine.
        """
        if not self._busy.acquire(blocking=False):
            raise HooklineError("another thread is using this LLM; take AsyncLLM, or one LLM for each thread")
        try:
            yield
        finally:
            self._busy.release()

    def __len__(self) -> int:
        return len(self._receivers)

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
        if params.stop and self.codec.tokenizer is None:
            raise RequestError(
                f"sampling.stop={shown(list(params.stop))} needs a tokenizer and the checkpoint has none"
            )

        def _make(index: int, one: SamplingParams) -> _TextReceiver:
            receiver = _TextReceiver(
                send, follows=follows, index=index, prompt_index=prompt_index, is_cumulative=is_cumulative
            )
            receiver.prepare(token_ids, one, self.codec, self.engine.limits.eos_token_ids)
            return receiver

        return self.queue(token_ids, with_word_ids(params, self.codec), _make, **given)

    def queue(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        make: Callable[[int, SamplingParams], Receiver],
        **given: Any,
    ) -> list[int]:
        """As `add`, for receivers of tokens. make: called with each completion's index and parameters for its receiver.

        Raises: as `add`.
        """
        self.engine.check_room(params.n)
        ids: list[int] = []
        try:
            for index, one in enumerate(params.each()):
                receiver = make(index, one)
                like = ids[0] if ids else None
                id_ = self.engine.add(token_ids, one, watcher=receiver.watcher, like=like, **given)
                receiver.begin(id_, self._news.append)
                self._receivers[id_] = receiver
                ids.append(id_)
        except BaseException:
            self.forget(ids)
            raise
        return ids

    def step(self) -> None:
        """Let the engine do a step and send its tokens and ends to the receivers.

        Raises: what Engine.step raises; requests that ended by it are delivered with the next step.
        """
        if self.guard is None:
            outputs = self.engine.step()
        else:
            with self.guard:
                outputs = self.engine.step()
        self._hand_out(outputs)
        if self._receivers and not self.engine.has_work:
            self._hand_out(_taken_off(id_) for id_ in list(self._receivers))

    def abort(self, ids: Iterable[int], *, reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests and tell their receivers. Ids that are unknown or whose requests have ended are ignored.

        reason: see Engine.abort.
        """
        self._hand_out(self.engine.abort([id_ for id_ in ids if id_ in self._receivers], reason=reason))

    def forget(self, ids: Iterable[int]) -> None:
        """End requests without telling their receivers."""
        known = [id_ for id_ in ids if self._receivers.pop(id_, None) is not None]
        self.engine.abort(known)

    def close(self) -> None:
        """End all requests, tell their callers, and close the engine; a second call does nothing."""
        heap, self.heap = self.heap, None
        with nullcontext() if heap is None else heap.thawed():
            try:
                self.abort(list(self._receivers))
                self._hand_out(self.engine.pop_finished())
            finally:
                if self.guard is not None:
                    self.guard.stop()
                self.engine.close()

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Send these outputs to their receivers, then tell the receivers of running requests about new tokens."""
        for output in outputs:
            receiver = self._receivers.pop(output.request_id, None)
            if receiver is not None:
                receiver.end(output)
        news, self._news[:] = list(self._news), []
        for receiver in news:
            request = self.engine.queue.live.get(receiver.request_id)
            # A request that has ended, and whose output is still to come, gets the rest with that.
            if request is not None and receiver.request_id in self._receivers:
                receiver.tell(request)


def _taken_off(id_: int) -> RequestOutput:
    """The output of a request that was ended by a call on the engine itself."""
    return RequestOutput(id_, None, [], [], FinishReason.ABORT, error="the request was taken off the engine")
