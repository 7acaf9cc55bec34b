"""A watchdog thread for the engine's steps, so that a stuck plugin does not keep callers waiting for ever.

A plan gets engine.stall_timeout_s. The rest of a step gets STEP_TIMEOUTS times engine.step_timeout_s from one sign of
progress, such as a layer, to the next; with several ranks, the device's part is left to their stricter monitor.
Compiling and debugging do not count. Stuck Python code is broken off, in the main thread also a sleep.
Nothing ends another thread's call into C that never returns: then the callers are told from the guard's own thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from hookline.core.distributed.heartbeat import COMPILERS
from hookline.core.errors import EngineError, HooklineError, Interrupted
from hookline.core.executor.monitor import STEP_TIMEOUTS
from hookline.core.plugin.blame import Blaming
from hookline.core.util.interrupt import raise_in

if TYPE_CHECKING:
    from hookline.core.config.settings import EngineConfig
    from hookline.core.engine.engine import Engine
    from hookline.core.plugin.registry import Entry

TICK_S = 0.25
OUT_S = 2.0
"""Seconds that a thread has to leave its step after it was broken off."""
PATIENT = (*COMPILERS, "bdb", "pdb", "pydevd", "debugpy")
"""Modules in which a thread may stay as long as it likes."""
BREAKS = (Interrupted, KeyboardInterrupt)


class StepGuard:
    """A context around each step of an engine. entries: the plugins whose code runs in steps, for errors.

    Raises: EngineError naming the stuck plugin or module, if a step was broken off.
    """

    def __init__(self, engine: Engine, config: EngineConfig, entries: Iterable[Entry]) -> None:
        self._engine = weakref.ref(engine)
        self._watch, self._leaves_steps = engine.watch, engine.executor.watches_steps
        self.plan_s, self.step_s = config.stall_timeout_s, STEP_TIMEOUTS * config.step_timeout_s
        self._blaming = Blaming(entries, "")
        self._tell: Callable[[HooklineError], None] = lambda error: None
        self._lock = threading.Lock()
        self._inside: int | None = None
        self._failure = ""
        self._pid = 0
        self._stopped = threading.Event()

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step does not even end when it is broken off."""
        self._tell = tell

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._start()
        self._watch.rest()
        self._inside = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._leave()
        if failure and isinstance(error, BREAKS):
            raise EngineError(failure) from error

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _start(self) -> None:
        """Begin to watch, with the first step of a process."""
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="hookline-guard", daemon=True).start()

    def _leave(self) -> str:
        with self._lock:
            thread, self._inside, failure, self._failure = self._inside, None, self._failure, ""
        if failure and thread is not None:  # an exception sent to this thread and still pending must not hit later code
            with suppress(*BREAKS):
                raise_in(thread, None)
                time.sleep(0.01)
        return failure

    # -------------------------------------------------------------------------------------------------- the thread's

    def _run(self) -> None:
        before: Any = None
        stuck_s, last = 0.0, time.monotonic()
        while not self._stopped.wait(TICK_S):
            engine, thread, now = self._engine(), self._inside, time.monotonic()
            passed_s, last = min(now - last, 2 * TICK_S), now
            if engine is None:
                return
            state = thread, self._watch.num_steps, self._watch.doing, getattr(engine.executor, "progress", 0)
            del engine
            limit_s = self._limit_s()
            if thread is None or state != before or limit_s is None or _is_patient(thread):
                before, stuck_s = state, 0.0
                continue
            stuck_s += passed_s
            if stuck_s > limit_s:
                self._end(thread, limit_s)
                before, stuck_s = None, 0.0

    def _limit_s(self) -> float | None:
        doing = self._watch.doing
        if self._leaves_steps and doing in ("launch", "wait"):
            return None
        return self.plan_s if doing == "plan" else self.step_s

    def _end(self, thread: int, limit_s: float) -> None:
        """Break the step off; if the thread stays in it, tell the callers."""
        frame = sys._current_frames().get(thread)
        frames = [] if frame is None else [one for one, _ in walk_stack(frame)][::-1]
        failure = self._told(frames, limit_s)
        with self._lock:
            if self._inside != thread:
                return
            self._failure = failure
            self._break_off(thread)
        until = time.monotonic() + OUT_S
        while self._inside == thread and time.monotonic() < until:
            self._stopped.wait(0.02)
        if self._inside == thread:
            self._tell(EngineError(failure))

    def _break_off(self, thread: int) -> None:
        is_main = thread == threading.main_thread().ident
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.pthread_kill(thread, signal.SIGINT)
        else:
            raise_in(thread, Interrupted)

    def _told(self, frames: list[FrameType], limit_s: float) -> str:
        is_plan = self._watch.doing == "plan"
        who = self._blaming.whose(frames) or "the engine fails"
        key = "engine.stall_timeout_s" if is_plan else f"{STEP_TIMEOUTS} times engine.step_timeout_s"
        last = frames[-1] if frames else None
        place = f" at {last.f_code.co_filename}:{last.f_lineno}, in {last.f_code.co_name}" if last is not None else ""
        return f"{who.replace(' fails', ' is stuck', 1)} for {limit_s:g} s ({key}){place}; its step was broken off"


def _is_patient(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if f"{module}.".startswith(tuple(f"{one}." for one in PATIENT)):
            return True
        frame = frame.f_back
    return False
