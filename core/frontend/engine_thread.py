"""A thread that drives an engine, so that any number of coroutines can wait for their requests at once.

Callers hand in commands and never touch the engine; Deltas leave in one wake-up per event loop and step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hookline.core.errors import HooklineError, RequestError, one_short_line
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.frontend.engine_driver import EngineDriver, engine_error
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import Delta
from hookline.core.request_options import PLAIN
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.garbage import search_frozen

_log = logging.getLogger("hookline")

Command = Callable[[], None]
News = Delta | HooklineError
JOIN_S = 0.2
"""Seconds between two checks whether the thread that `stop` waits for is stuck."""
SEARCH_S, SEARCH_AGAIN_S = 60.0, 600.0
"""Seconds without work before frozen objects are searched for garbage cycles: the first time, and later ones."""


class Submitted(NamedTuple):
    """A prompt. given: arguments of OutputProcessor.add."""

    token_ids: Sequence[int]
    params: SamplingParams
    given: Mapping[str, Any]


class EngineThread(EngineDriver[CompletionStream, Submitted]):
    """Runs until `stop`. `start`, `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(self, output_processor: OutputProcessor, prepare: Command | None = None) -> None:
        super().__init__(output_processor)
        self._prepare = prepare
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outgoing: dict[asyncio.AbstractEventLoop, list[tuple[CompletionStream, News]]] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        """Completions so far; changes under the lock alone."""
        self._num_left = 0
        """Completions passed to the output processor, or left by their callers before; changes in the thread alone."""
        self._is_closed = self._is_stuck = False
        self._thread = threading.Thread(target=self._run, name="hookline-engine", daemon=True)

    def start(self) -> None:
        """Begin to run; the engine belongs to the thread from now on."""
        self.tell_if_stuck(self._give_up)
        self._thread.start()

    def submit(self, stream: CompletionStream, token_ids: Sequence[int], params: SamplingParams, **given: Any) -> None:
        """Queue a prompt, with the arguments of OutputProcessor.add. If it is refused, the stream raises the error.

        Raises: HooklineError if the thread was stopped.
        """
        self._engine.home.check()
        with self._lock:
            if self._is_closed:
                raise HooklineError("the engine is closed; make a new one")
            self._num_submitted += params.n
            self._commands.put(partial(self._arrive, stream, Submitted(token_ids, params, given)))

    def refuse(self, error: RequestError, **given: Any) -> None:
        """Tell observers of a prompt that was refused before it came here; its caller was told already."""
        self._commands.put(partial(self._refuse, (), error, given))

    def cancel(self, stream: CompletionStream) -> None:
        """End a prompt's requests without telling the caller. Takes no lock, so a destructor may call it."""
        self._commands.put(partial(self._forget, (stream,)))

    def stop(self) -> None:
        """End all requests, tell their callers, close the engine and wait for that; a second call does nothing.

        Does not wait for an engine that is stuck. In a forked child it does nothing at all.
        """
        if self._engine.home.is_elsewhere:
            return
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._commands.put(self._finish)
        if self._thread is not threading.current_thread():
            while self._thread.is_alive() and not self._is_stuck:
                self._thread.join(JOIN_S)

    @property
    def num_open(self) -> int:
        """Completions that have not ended, also of prompts that the thread has not queued yet."""
        return self._num_submitted - self._num_left + len(self.output_processor)

    def _give_up(self, error: HooklineError) -> None:
        """Fail all streams, from another thread than the engine's, which is stuck in a call that never returns."""
        self.death = str(error)
        with self._lock:
            self._is_closed = self._is_stuck = True
            waiting = [*self._open, *self._arrived]
        while not self._commands.empty():
            command = self._commands.get()
            waiting += command.args[:1] if isinstance(command, partial) and command.func == self._arrive else ()
        for stream in waiting:
            with suppress(RuntimeError):  # its loop is closed
                stream.loop.call_soon_threadsafe(stream.fail, engine_error(error))
        self._commands.put(self._finish)  # should it ever come back

    # ---------------------------------------------------------------------------------------------- inside the thread

    def _run(self) -> None:
        try:
            self._engine.state.use_sleep(self._idle)
            if self._prepare is not None:
                self._prepare()
            while not self._is_stopping:
                self.turn()
        except BaseException as error:
            self.death = one_short_line(error)
            _log.error("the engine's thread ends: %s", error)
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        try:
            self.output_processor.close()
        except Exception as error:
            _log.error("while closing the engine: %s", error)
        finally:
            self._carry_out(self._commands.qsize())
            self._admit(len(self._arrived))  # they find the engine closed, and their callers hear it
            self._fail(list(self._open), HooklineError("the engine is closed"))
            self._flush()

    def _take_commands(self) -> None:
        """See EngineDriver."""
        if not self._has_work:
            self._next_command()()
        self._carry_out(self._commands.qsize())

    def _next_command(self) -> Command:
        """Wait for a command; meanwhile collect garbage among the frozen objects, which may be this engine itself."""
        heap = self.output_processor.heap
        if heap is None:
            return self._commands.get()
        patience_s = SEARCH_S
        with heap.idling():
            while True:
                try:
                    return self._commands.get(timeout=patience_s)
                except queue.Empty:
                    search_frozen()
                    patience_s = SEARCH_AGAIN_S

    def _carry_out(self, num_commands: int) -> None:
        for _ in range(num_commands):
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _idle(self, seconds: float) -> None:
        """See EngineDriver."""
        try:
            command = self._commands.get(timeout=seconds)
        except queue.Empty:
            return
        command()

    def _finish(self) -> None:
        self._is_stopping = True

    def _arrive(self, stream: CompletionStream, prompt: Submitted) -> None:
        self._arrived[stream] = prompt

    def _queue(self, caller: CompletionStream, prompt: Submitted) -> Mapping[CompletionStream, set[int]]:
        """See EngineDriver."""
        token_ids, params, given = prompt
        try:
            return {caller: set(self.output_processor.add(token_ids, params, partial(self._post, caller), **given))}
        finally:
            self._num_left += params.n

    def _tell(self, caller: CompletionStream, error: HooklineError) -> None:
        """See EngineDriver."""
        self._put(caller, error)

    def _note_refusal(self, prompt: Submitted, error: RequestError) -> None:
        """See EngineDriver."""
        self._refuse(prompt.token_ids, error, prompt.given)

    def _refuse(self, token_ids: Sequence[int], error: RequestError, given: Mapping[str, Any]) -> None:
        self._engine.refuse(token_ids, error, given.get("prompt"), given.get("options", PLAIN))

    def _post(self, stream: CompletionStream, delta: Delta) -> None:
        if delta.output is not None:
            self._note_end(stream, delta.request_id)
        self._put(stream, delta)

    def _forget(self, callers: Iterable[CompletionStream]) -> None:
        """See EngineDriver."""
        callers = dict.fromkeys(callers)
        self._num_left += sum(self._arrived[stream].params.n for stream in callers if stream in self._arrived)
        super()._forget(callers)

    def _put(self, stream: CompletionStream, news: News) -> None:
        self._outgoing.setdefault(stream.loop, []).append((stream, news))

    def _flush(self) -> list[CompletionStream]:
        """See EngineDriver. The readers of a closed event loop count as gone."""
        outgoing, self._outgoing = self._outgoing, {}
        gone = list[CompletionStream]()
        for loop, items in outgoing.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                gone += [stream for stream, _ in items]
        return gone


def _deliver(items: Iterable[tuple[CompletionStream, News]]) -> None:
    """Put a step's Deltas into their streams: one wake-up of an event loop for all its requests."""
    for stream, news in items:
        if isinstance(news, Delta):
            stream.put(news)
        else:
            stream.fail(news)
