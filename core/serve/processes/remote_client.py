"""An `EngineClient` for an engine in another process: a front end tokenizes prompts and detokenizes completions.

A stream joins unread tokens and text into one Delta. So a slow reader gets fewer and larger Deltas, does not hold up
other streams, and takes no more memory than its completions.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

from hookline.core.contracts import ApiError
from hookline.core.errors import EngineError, HooklineError, QueueFullError, RequestError, one_short_line
from hookline.core.outputs import FinishReason, TokenLogprob
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_client import EngineLoad, ServedModel
from hookline.core.serve.processes.messages import (
    AskMetrics,
    Broken,
    Cancel,
    End,
    Finish,
    FromEngine,
    LoadReport,
    Message,
    Metrics,
    Refused,
    StepNews,
    Submit,
    TurnedAway,
    error_of,
    packed,
    unpacked_list,
)
from hookline.core.serve.processes.remote_stream import RemoteCompletion, RemoteStream
from hookline.core.tokenizer.codec import snapshot, takes_long, with_word_ids

if TYPE_CHECKING:
    from hookline.core.request_options import OptionKeys
    from hookline.core.serve.settings import ServeConfig
    from hookline.core.tokenizer.codec import Prompt

TOKENIZER_THREADS = 2
"""Long prompts that a front end tokenizes in parallel."""
SLICE = 128
"""Tokens of a step that are handled in one turn of the event loop: some 3 ms."""
TELL_S = 0.5
"""Seconds between two reports of refused requests to the engine: a flood of requests must not become one of reports."""
METRICS_S = 5.0
"""Longest wait for the engine's metrics, in seconds."""
DEFAULTS = vars(SamplingParams())


class RemoteClient:
    """`EngineClient` over messages. send: sends a message to the engine; its messages are passed to `receive`.

    The engine enforces over all front ends together the limits that each enforces here.
    """

    replicas = ()

    def __init__(self, facts: ServedModel, send: Callable[[Message], None], settings: ServeConfig) -> None:
        self.facts, self._send, self._settings = facts, send, settings
        self.death: str | None = None
        self.is_accepting = True
        """Whether requests are taken while the engine lives."""
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, RemoteCompletion] = {}
        self._next_handle = 1
        self._load = EngineLoad()
        self._num_of_others = 0
        self._num_turned_away = 0
        """Prompts that were refused here and are not reported to the engine yet."""
        self._slices: deque[tuple[list[int], list[int], Mapping[int, str], Iterable[End]]] = deque()
        self._is_slicing = False
        self._metrics: dict[int, asyncio.Future[str]] = {}
        self._tokenizing = ThreadPoolExecutor(TOKENIZER_THREADS, "hookline-tokenizer")

    # ------------------------------------------------------------------------------------------- EngineClient

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        session: str | None = None,
        pooling: PoolingParams | None = None,
        **keys: Unpack[OptionKeys],
    ) -> RemoteStream:
        """See EngineClient."""
        self._check_open(params.n)
        options = RequestOptions(**keys).limited(self._settings.timeout_s).given()
        handle, self._next_handle = self._next_handle, self._next_handle + params.n
        stream = RemoteStream(
            self._leave, self._loop, handle, params, prompt if isinstance(prompt, str) else None, options
        )
        self._open.update((one, RemoteCompletion(stream, one)) for one in stream.handles)
        arrival_s = time.monotonic()

        def _submit(prepared: tuple[list[int], SamplingParams]) -> None:
            token_ids, params = prepared
            stream.prepare([self._open[one] for one in stream.handles], token_ids, params, self.facts)
            try:
                self._send(_submit_message(handle, token_ids, params, options, arrival_s, pooling))
            except (TypeError, ValueError, OverflowError) as error:
                raise RequestError(f"the request cannot be told to the engine: {one_short_line(error)}") from None

        if not takes_long(prompt, params):
            try:
                _submit(self._prepare(prompt, params))
            except BaseException:
                self._forget(stream)
                raise
            return stream
        prompt = snapshot(prompt)

        def _submit_prepared(done: asyncio.Future[tuple[list[int], SamplingParams]]) -> None:
            if done.cancelled():  # the server stops
                return
            done.exception()  # read, so that asyncio does not complain about it
            if handle not in self._open:  # it was left, or failed as its engine died
                return
            try:
                _submit(done.result())
            except HooklineError as error:
                self._refuse(stream, error)
            except Exception as error:
                self._refuse(stream, RequestError(f"the prompt cannot be tokenized: {one_short_line(error)}"))

        future = self._loop.run_in_executor(self._tokenizing, self._prepare_if_open, stream, prompt, params)
        future.add_done_callback(_submit_prepared)
        return stream

    def load(self) -> EngineLoad:
        """See EngineClient."""
        return self._load

    async def metrics(self) -> str:
        """See EngineClient."""
        if self.death is not None:
            raise EngineError(self.death)
        number, self._next_handle = self._next_handle, self._next_handle + 1
        self._metrics[number] = self._loop.create_future()
        try:
            self._send(AskMetrics(number))
            return await asyncio.wait_for(self._metrics[number], METRICS_S)
        except TimeoutError:
            raise EngineError(f"the engine has not told its metrics for {METRICS_S:g} s") from None
        finally:
            del self._metrics[number]

    @property
    def is_ready(self) -> bool:
        """See EngineClient."""
        return self.is_accepting and self.death is None

    async def aclose(self) -> None:
        """See EngineClient."""
        self.is_accepting = False
        self.end_all()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------- from the engine

    def receive(self, messages: Iterable[FromEngine]) -> None:
        """Handle messages from the engine."""
        for message in messages:
            match message:
                case StepNews():
                    self._take_step(message)
                case LoadReport():
                    self._load = EngineLoad(*message.values)
                    self._num_of_others = max(0, self._load.num_running + self._load.num_waiting - len(self._open))
                case Refused():
                    completion = self._open.get(message.handle)
                    if completion is not None:
                        self._lose(completion, error_of(message))
                case Broken():
                    self.break_off(message.reason)
                case Metrics():
                    waiting = self._metrics.get(message.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message.text)

    def end_all(self) -> None:
        """End all streams, since the server is stopping."""
        self._fail_all(lambda: ApiError(503, "the server is stopping", "server_error", code="stopping"))

    def break_off(self, reason: str) -> None:
        """End all streams with an error and refuse requests, since the engine is dead, until `revive`."""
        self.death = reason
        self._load, self._num_of_others = EngineLoad(), 0
        self._fail_all(lambda: EngineError(reason))

    def _fail_all(self, error: Callable[[], HooklineError]) -> None:
        """End all streams. error: makes a new error for each, since a traceback must not be shared."""
        streams = {id(one.stream): one.stream for one in self._open.values()}
        handles, self._open = list(self._open), {}
        for stream in streams.values():
            stream.fail(error())
        for waiting in self._metrics.values():
            if not waiting.done():
                waiting.set_exception(error())
        if self.death is None and handles:
            self._send(Cancel(handles))

    def revive(self) -> None:
        """Accept requests again, since a new engine has replaced the dead one."""
        self.death = None

    def _take_step(self, step: StepNews) -> None:
        """Handle a step's tokens, a large step's in slices, between which other tasks run on the event loop."""
        for handle, rows in step.scored.items():
            if handle in self._open:
                self._open[handle].add_logprobs([TokenLogprob(*row) for row in rows])
        for handle, told in step.told.items():
            if handle in self._open:
                self._open[handle].add_told(told)
        handles, token_ids = unpacked_list(step.handles), unpacked_list(step.token_ids)
        for start in range(0, max(1, len(handles)), SLICE):
            part = slice(start, start + SLICE)
            ends = step.ends if start + SLICE >= len(handles) else []
            self._slices.append((handles[part], token_ids[part], step.last, ends))
        if not self._is_slicing:
            self._take_slice()

    def _take_slice(self) -> None:
        self._is_slicing = False
        if self._slices:
            self._push(*self._slices.popleft())
        if self._slices:
            self._is_slicing = True
            self._loop.call_soon(self._take_slice)

    def _push(self, handles: list[int], token_ids: list[int], last: Mapping[int, str], ends: Iterable[End]) -> None:
        open_, stopped = self._open, []
        for handle, token_id in zip(handles, token_ids, strict=True):
            completion = open_.get(handle)
            if completion is None:
                continue
            reason = last.get(handle) if last else None
            if completion.see(token_id, None if reason is None else FinishReason(reason)) and reason is None:
                stopped.append(handle)
        for end in ends:
            completion = open_.pop(end.handle, None)
            if completion is not None:
                completion.end_with(end)
        if stopped:
            with suppress(EngineError):  # it reads nothing: then they end as without a stop string
                self._send(Finish(stopped))

    # ------------------------------------------------------------------------------------------------ streams

    def _forget(self, stream: RemoteStream) -> list[int]:
        """Remove a stream's completions from the open ones; returns the handles of the completions that were open."""
        return [one for one in stream.handles if self._open.pop(one, None) is not None]

    def _leave(self, stream: RemoteStream) -> None:
        """End completions that are not read any more."""
        handles = self._forget(stream)
        if handles and self.death is None:
            self._send(Cancel(handles))

    @property
    def num_open(self) -> int:
        """Completions of this front end that are running or waiting."""
        return len(self._open)

    @property
    def num_at_engine(self) -> int:
        """Open completions of all front ends; those of the others by the engine's last message."""
        return len(self._open) + self._num_of_others

    def _check_open(self, num_requests: int) -> None:
        if self.death is not None:
            raise EngineError(self.death)
        if not self.is_accepting:
            raise EngineError("the server is stopping")
        if len(self._open) + num_requests > self._settings.max_requests:
            self._note_turned_away()
            raise QueueFullError("serve.max_requests", self._settings.max_requests, len(self._open), 0)

    def _note_turned_away(self) -> None:
        self._num_turned_away += 1
        if self._num_turned_away == 1:
            self._loop.call_later(TELL_S, self._tell_turned_away)

    def _tell_turned_away(self) -> None:
        count, self._num_turned_away = self._num_turned_away, 0
        with suppress(EngineError):  # it reads nothing
            self._send(TurnedAway(count))

    def _lose(self, completion: RemoteCompletion, error: HooklineError) -> None:
        """End a completion that the engine refused or gave up with its error; the prompt's others end with it."""
        stream = completion.stream
        del self._open[completion.request_id]
        stream.fail(error)
        with suppress(EngineError):  # it reads nothing
            self._leave(stream)

    def _refuse(self, stream: RemoteStream, error: HooklineError) -> None:
        self._forget(stream)
        stream.fail(error)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        codec = self.facts.codec
        token_ids, params = codec.encode(prompt), with_word_ids(params, codec)
        if params.stop:
            if codec.tokenizer is None:
                raise RequestError("sampling.stop needs a tokenizer and the checkpoint has none")
            _ = params.stop_strings  # made ready here, in a thread of its own if that takes long
        return token_ids, params

    def _prepare_if_open(
        self, stream: RemoteStream, prompt: Prompt, params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        return self._prepare(prompt, params) if stream.is_open else ([], params)


def _submit_message(
    handle: int,
    token_ids: list[int],
    params: SamplingParams,
    options: dict[str, Any],
    arrival_s: float,
    pooling: PoolingParams | None,
) -> Submit:
    given = {name: getattr(params, name) for name, default in DEFAULTS.items()}
    changed = {name: value for name, value in given.items() if value != DEFAULTS[name] and name != "stop"}
    return Submit(handle, packed(token_ids), changed, options, arrival_s, None if pooling is None else asdict(pooling))
