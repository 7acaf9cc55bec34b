"""Interrupts Python code in this process that does not end, so that a stuck plugin cannot block its caller forever.

It can interrupt Python code that runs, and in the main thread also code that sleeps or waits, but no call into C that
never returns.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hookline.core.errors import Interrupted

LOOK_S = 0.02
"""Seconds between two checks of the memory limit."""
AGAIN_S = 0.25
"""Seconds after which code at its limit is interrupted again, since Python drops exceptions in destructors."""
SIGNAL = signal.SIGURG
"""A signal that is ignored by default, so that a late one does nothing. Other code may use it, too."""


class Interrupter:
    """Interrupts the thread that is inside its region, once, when another thread asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: int | None = None
        self._takes_signals = self._is_asked = self._is_signalled = False
        self._before: Any = None
        """The previous signal handler, while ours is installed."""

    @contextmanager
    def region(self) -> Iterator[None]:
        """Around code that may be interrupted.

        Raises: Interrupted after a call of `break_off`.
        """
        in_main = threading.current_thread() is threading.main_thread()
        self._takes_signals = in_main and signal.getsignal(SIGNAL) is not None  # None could not be put back
        try:
            if self._takes_signals:
                self._before = signal.getsignal(SIGNAL)
                signal.signal(SIGNAL, partial(self._heed, self._before))
            self._inside = threading.get_ident()
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the region, even if an interrupt comes in the middle of it; a second call does nothing.

        Also for a region that an interrupt kept from being left, since it may strike inside of `region` itself.
        """
        while True:
            try:
                return self._leave()
            except Interrupted:
                continue

    def _leave(self) -> None:
        with self._lock:
            thread, self._inside, self._is_signalled = self._inside, None, False
            if self._is_asked and not self._takes_signals and thread is not None:
                raise_in(thread, None)  # cancels an exception that was not raised yet
        if self._before is not None:
            signal.signal(SIGNAL, self._before)
            self._before = None

    def break_off(self, *, again: bool = False) -> bool:
        """Raise Interrupted in the region, if a thread is inside; returns whether it will be raised.

        A second call does nothing, except with `again`, for code that swallowed the first exception.
        """
        with self._lock:
            if self._inside is None or (self._is_asked and not again):
                return False
            self._is_asked = True
            if self._takes_signals:
                self._is_signalled = True
                signal.pthread_kill(self._inside, SIGNAL)
            else:
                raise_in(self._inside, Interrupted)
            return True

    def _heed(self, before: Any, number: int, frame: Any) -> None:
        """The signal handler in the region. A signal that is not ours goes to the handler that was there before."""
        if self._is_signalled:
            self._is_signalled = False
            raise Interrupted
        if callable(before):
            before(number, frame)


@contextmanager
def limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Around Python code that may never end, or take all memory.

    seconds: time limit. num_bytes: most memory of the whole process beyond that at the beginning.
    Raises: TimeoutError, MemoryError.
    """
    interrupter, done = Interrupter(), threading.Event()
    faults: list[Exception] = []

    def _watch() -> None:
        end_s, before = time.monotonic() + seconds, _resident_bytes()
        while not done.wait(max(0.0, min(LOOK_S, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                faults.append(TimeoutError(f"not done after {seconds:g} s"))
            elif _resident_bytes() - before > num_bytes:
                faults.append(MemoryError(f"it takes more than {num_bytes // 2**20} MiB"))
            if faults:
                break
        while not done.wait(AGAIN_S if interrupter.break_off(again=True) else LOOK_S):
            pass

    threading.Thread(target=_watch, daemon=True).start()
    try:
        try:
            with interrupter.region():
                yield
        finally:  # wherever the interrupt struck: from here on there is none
            try:
                done.set()
            finally:
                interrupter.leave()
    except Interrupted:
        raise faults[0] from None


def _resident_bytes() -> int:
    """Memory that this process holds; 0 where that cannot be read."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise `error` at its next bytecode; None cancels an exception that was not raised yet."""
    what = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
