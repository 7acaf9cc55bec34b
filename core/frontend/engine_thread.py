"""A thread that drives an engine, so that any number of coroutines can wait for their requests at once.

Callers hand in commands and never touch the engine; Deltas leave in one wake-up per event loop and step. Whatever
breaks, everybody who waits is told.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from hookline.core.errors import (
    EngineError,
    HooklineError,
    RequestError,
    ends_engine,
    one_short_line,
    requests_ended_by,
)
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import Delta
from hookline.core.request_options import PLAIN
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.garbage import search_frozen

_log = logging.getLogger("hookline")

Command = Callable[[], None]
News = Delta | HooklineError
JOIN_S = 0.2
"""Between two looks at whether a thread that is waited for is stuck."""
SEARCH_S, SEARCH_AGAIN_S = 60.0, 600.0
"""Seconds without work before frozen objects are searched for cycles out of use: at first, and from then on."""
MAX_ADMITTED = 256
"""Most prompts queued between two steps: a burst of arrivals must not hold up those that run."""


class EngineThread:
    """Runs until `stop`. `start`, `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(self, output_processor: OutputProcessor, prepare: Command | None = None) -> None:
        self._output_processor, self._prepare = output_processor, prepare
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._arrived: dict[CompletionStream, tuple[Sequence[int], SamplingParams, Mapping[str, Any]]] = {}
        """Prompts that are not queued yet, in their order; a prompt whose caller leaves in the meantime is dropped."""
        self._open: dict[CompletionStream, set[int]] = {}
        self._outgoing: dict[asyncio.AbstractEventLoop, list[tuple[CompletionStream, News]]] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        """Completions so far; changes under the lock alone."""
        self._num_ended = 0
        """Of these; changes in the thread alone."""
        self._is_stopping = self._is_closed = self._is_stuck = False
        self.death: str | None = None
        """Why the engine serves nothing more, if a fault ended it."""
        self._thread = threading.Thread(target=self._run, name="hookline-engine", daemon=True)

    def start(self) -> None:
        """Begin to run; the engine belongs to the thread from now on."""
        self._output_processor.engine.tell_if_stuck(self._give_up)
        if self._output_processor.guard is not None:
            self._output_processor.guard.tell = self._give_up
        self._thread.start()

    def submit(self, stream: CompletionStream, token_ids: Sequence[int], params: SamplingParams, **given: Any) -> None:
        """Queue a prompt, with the arguments of OutputProcessor.add. What keeps it from being served comes as a Delta.

        Raises: HooklineError if the thread was stopped.
        """
        self._output_processor.engine.home.check()
        with self._lock:
            if self._is_closed:
                raise HooklineError("the engine is closed; make a new one")
            self._num_submitted += params.n
            self._commands.put(partial(self._arrive, stream, token_ids, params, given))

    def refuse(self, error: RequestError, **given: Any) -> None:
        """Let observers know of a prompt that was refused before it came here, and whose caller knows that already."""
        self._commands.put(partial(self._refuse, (), error, given))

    def cancel(self, stream: CompletionStream) -> None:
        """End a prompt's requests, whose caller hears nothing more. Takes no lock, so a destructor may call it."""
        self._commands.put(partial(self._forget, stream))

    def stop(self) -> None:
        """End all requests, tell their callers, close the engine and wait for that; a second call does nothing.

        Does not wait for an engine that is stuck. In a forked child it does nothing at all.
        """
        if self._output_processor.engine.home.is_elsewhere:
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
        """Completions whose callers wait, those among them that the thread has not come to yet."""
        return self._num_submitted - self._num_ended

    def _give_up(self, error: HooklineError) -> None:
        """Tell everybody who waits, from another thread than the engine's, which is stuck in a call that never ends."""
        self.death = str(error)
        with self._lock:
            self._is_closed = self._is_stuck = True
            waiting = [*self._open, *self._arrived]
        while not self._commands.empty():
            command = self._commands.get()
            waiting += command.args[:1] if isinstance(command, partial) and command.func == self._arrive else ()
        for stream in waiting:
            with suppress(RuntimeError):  # its loop is closed
                stream.loop.call_soon_threadsafe(stream.fail, _engine_error(error))
        self._commands.put(self._finish)  # should it ever come back

    # ---------------------------------------------------------------------------------------------- inside the thread

    def _run(self) -> None:
        try:
            self._output_processor.engine.sleep = self._idle
            if self._prepare is not None:
                self._prepare()
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            self.death = one_short_line(error)
            _log.error("the engine's thread ends: %s", error)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        try:
            self._take_commands()
            if self._has_work:
                self._output_processor.step()
            self._send()
        except BaseException as error:
            ended = requests_ended_by(error)
            if ends_engine(error):
                self.death = str(error)
            self._fail(error, [one for one, ids in self._open.items() if ended is None or ids & ended])
            self._send()

    @property
    def _has_work(self) -> bool:
        return bool(self._arrived) or len(self._output_processor) > 0 or self._output_processor.engine.has_work

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        try:
            self._output_processor.close()
        except Exception as error:
            _log.error("while closing the engine: %s", error)
        finally:
            self._carry_out(self._commands.qsize())
            self._admit(len(self._arrived))  # they find the engine closed, and their callers hear it
            self._fail(HooklineError("the engine is closed"), list(self._open))
            self._send()

    def _take_commands(self) -> None:
        """Carry out what was handed in, prompts last; waits for something if there is nothing to do."""
        if not self._has_work:
            self._next_command()()
        self._carry_out(self._commands.qsize())
        self._admit(MAX_ADMITTED)

    def _next_command(self) -> Command:
        """Wait for one; meanwhile look for what was dropped, ourselves perhaps, among the objects that are frozen."""
        heap = self._output_processor.heap
        if heap is None:
            return self._commands.get()
        heap.is_idle, patience_s = True, SEARCH_S
        try:
            while True:
                try:
                    return self._commands.get(timeout=patience_s)
                except queue.Empty:
                    search_frozen()
                    patience_s = SEARCH_AGAIN_S
        finally:
            heap.is_idle = False

    def _carry_out(self, num_commands: int) -> None:
        for _ in range(num_commands):
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _idle(self, seconds: float) -> None:
        """Wait as a policy asked to, but not while somebody hands something in."""
        try:
            command = self._commands.get(timeout=seconds)
        except queue.Empty:
            return
        command()

    def _finish(self) -> None:
        self._is_stopping = True

    def _arrive(
        self, stream: CompletionStream, token_ids: Sequence[int], params: SamplingParams, given: Mapping[str, Any]
    ) -> None:
        self._arrived[stream] = token_ids, params, given

    def _admit(self, num_prompts: int) -> None:
        for stream in list(islice(self._arrived, num_prompts)):
            self._add(stream, *self._arrived.pop(stream))

    def _add(
        self, stream: CompletionStream, token_ids: Sequence[int], params: SamplingParams, given: Mapping[str, Any]
    ) -> None:
        try:
            ids = self._output_processor.add(token_ids, params, partial(self._post, stream), **given)
            self._open[stream] = set(ids)
        except RequestError as error:
            self._turn_away(stream, params, error)
            self._refuse(token_ids, error, given)
        except HooklineError as error:
            self._turn_away(stream, params, error)
        except BaseException as error:  # it concerns this request alone
            self._turn_away(stream, params, _engine_error(error))

    def _turn_away(self, stream: CompletionStream, params: SamplingParams, error: HooklineError) -> None:
        self._num_ended += params.n
        self._put(stream, error)

    def _refuse(self, token_ids: Sequence[int], error: RequestError, given: Mapping[str, Any]) -> None:
        self._output_processor.engine.refuse(token_ids, error, given.get("prompt"), given.get("options", PLAIN))

    def _post(self, stream: CompletionStream, delta: Delta) -> None:
        if delta.output is not None:
            ids = self._open[stream]
            ids.discard(delta.request_id)
            self._num_ended += 1
            if not ids:
                del self._open[stream]
        self._put(stream, delta)

    def _forget(self, stream: CompletionStream) -> None:
        ids = self._open.pop(stream, ())
        arrived = self._arrived.pop(stream, None)
        self._num_ended += len(ids) if arrived is None else arrived[1].n
        self._output_processor.forget(ids)

    def _put(self, stream: CompletionStream, news: News) -> None:
        self._outgoing.setdefault(stream.loop, []).append((stream, news))

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        gone = list[CompletionStream]()
        for loop, items in outgoing.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed, and its readers are gone
                gone += [stream for stream, _ in items]
        for stream in gone:
            self._forget(stream)

    def _fail(self, error: BaseException, waiting: Sequence[CompletionStream]) -> None:
        """Tell these, who wait, and end their requests."""
        ids = [id_ for stream in waiting for id_ in self._open.pop(stream)]
        self._num_ended += len(ids)
        for stream in waiting:
            self._put(stream, _engine_error(error))  # one for each: tracebacks are not shared
        try:
            self._output_processor.forget(ids)
        except Exception as further:
            _log.error("while ending requests after an error: %s", further)


def _deliver(items: Iterable[tuple[CompletionStream, News]]) -> None:
    """Tell streams their news: what one wake-up of an event loop does for all requests of a step."""
    for stream, news in items:
        if isinstance(news, Delta):
            stream.put(news)
        else:
            stream.fail(news)


def _engine_error(cause: BaseException) -> EngineError:
    error = EngineError(str(cause) or type(cause).__name__)
    error.__cause__ = cause
    return error
