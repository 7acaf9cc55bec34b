"""Drives an engine for many callers at once: each turn takes their commands, does a step and sends the new tokens.

Subclasses know where the callers are and how to reach them: coroutines (`engine_thread.py`), or processes behind a
socket (`core/serve/processes/engine_server.py`). Whatever breaks, each caller is told of the end of its requests.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice
from typing import ClassVar, Generic, TypeVar

from hookline.core.errors import (
    EngineError,
    HooklineError,
    RequestError,
    ends_engine,
    one_short_line,
    requests_ended_by,
)
from hookline.core.frontend.output_processor import OutputProcessor

_log = logging.getLogger("hookline")

MAX_ADMITTED = 256
"""Most prompts queued between two steps: a burst of arrivals must not hold up running requests."""

Caller = TypeVar("Caller", bound=Hashable)
"""The receiver of a prompt's results: its stream, or a front end's completion."""
Prompt = TypeVar("Prompt")
"""A submitted prompt with its parameters."""


class EngineDriver(ABC, Generic[Caller, Prompt]):
    """One engine's driver. A caller that leaves (`forget`) is told nothing more, and its prompt is not queued."""

    FATAL: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors that end the driver; any other error, which a plugin may raise, only ends requests."""

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.output_processor, self._engine = output_processor, output_processor.engine
        self._arrived: dict[Caller, Prompt] = {}
        """Prompts that are not queued yet, in their order."""
        self._open: dict[Caller, set[int]] = {}
        """The requests of each caller that are queued and have not ended."""
        self._gone: list[Caller] = []
        self._is_stopping = False
        self.death: str | None = None
        """Why the engine serves nothing more, if a fault ended it."""

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end."""
        self._engine.tell_if_stuck(tell)
        if self.output_processor.guard is not None:
            self.output_processor.guard.tell_if_stuck(tell)

    def turn(self) -> None:
        """Receive commands, waiting for one if the engine is idle; do a step; send its tokens and ends."""
        for act in self._receive, self._step, self._send:
            try:
                act()
            except self.FATAL:
                raise
            except BaseException as error:
                self._break_off(error)
                self._gone += self._flush()

    # ------------------------------------------------------------------------------------------- where callers are

    @abstractmethod
    def _take_commands(self) -> None:
        """Carry out the callers' commands, and note their prompts in `_arrived`.

        Waits for a command if the engine has no work.
        """

    @abstractmethod
    def _idle(self, seconds: float) -> None:
        """Wait as the scheduler policy asked to, but only until a command comes."""

    @abstractmethod
    def _queue(self, caller: Caller, prompt: Prompt) -> Mapping[Caller, set[int]]:
        """Queue a prompt; returns the ids of its requests by caller. An error that it raises ends this prompt alone."""

    @abstractmethod
    def _tell(self, caller: Caller, error: HooklineError) -> None:
        """Tell a caller that its prompt was not queued, or that its requests ended by a fault."""

    @abstractmethod
    def _note_refusal(self, prompt: Prompt, error: RequestError) -> None:
        """Tell observers of a prompt that was refused."""

    @abstractmethod
    def _flush(self) -> Iterable[Caller]:
        """Send all new tokens and ends; returns the callers that are gone."""

    # ------------------------------------------------------------------------------------------------ parts of a turn

    @property
    def _has_work(self) -> bool:
        return bool(self._arrived) or len(self.output_processor) > 0 or self._engine.has_work

    def _receive(self) -> None:
        self._take_commands()
        self._admit(MAX_ADMITTED)

    def _step(self) -> None:
        if self._has_work:
            self.output_processor.step()

    def _send(self) -> None:
        gone, self._gone = [*self._gone, *self._flush()], list[Caller]()
        if gone:
            self._forget(gone)

    def _admit(self, num_prompts: int) -> None:
        for caller in list(islice(self._arrived, num_prompts)):
            prompt = self._arrived.pop(caller)
            try:
                self._open.update(self._queue(caller, prompt))
            except self.FATAL:
                raise
            except BaseException as error:
                self._tell(caller, error if isinstance(error, HooklineError) else engine_error(error))
                if isinstance(error, RequestError):
                    self._note_refusal(prompt, error)

    def _note_end(self, caller: Caller, request_id: int) -> None:
        """Note that a request has ended and its caller was told."""
        ids = self._open[caller]
        ids.discard(request_id)
        if not ids:
            del self._open[caller]

    def _forget(self, callers: Iterable[Caller]) -> None:
        """End the requests of callers that are gone."""
        ids = set[int]()
        for caller in callers:
            self._arrived.pop(caller, None)
            ids |= self._open.pop(caller, set())
        self.output_processor.forget(ids)

    def _break_off(self, error: BaseException) -> None:
        """Tell the callers whose requests an error ended. Other callers get their tokens with the next turn."""
        _log.error("the engine broke off: %s", _reason(error))
        if ends_engine(error):
            self.death = _reason(error)
        ended = requests_ended_by(error)
        self._fail([caller for caller, ids in self._open.items() if ended is None or ids & ended], error)

    def _fail(self, callers: Iterable[Caller], error: BaseException) -> None:
        for caller in (failed := list(callers)):
            self._tell(caller, engine_error(error))  # a new one for each: tracebacks are not shared
        self._drop(failed)

    def _drop(self, callers: Iterable[Caller]) -> None:
        """End the requests of callers that were told of an error; a further error is only logged."""
        ids = {id_ for caller in callers for id_ in self._open.pop(caller)}
        try:
            self.output_processor.forget(ids)
        except Exception as further:
            _log.error("while ending requests after an error: %s", further)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, HooklineError) else one_short_line(error)


def engine_error(cause: BaseException) -> EngineError:
    """The error for callers whose requests end by another cause than their own parameters."""
    error = EngineError(_reason(cause))
    error.__cause__ = cause
    return error
