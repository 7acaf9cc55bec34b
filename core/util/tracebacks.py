"""Releases the objects that a stored error keeps alive through its traceback."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType


def forget_locals(error: BaseException) -> None:
    """Drop the local variables of the functions in the tracebacks of an error and of the errors that caused it.

    A stored error would keep them alive. Functions that still run are left alone.
    """
    seen: set[int] = set()
    before: BaseException | None = error
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        _clear_frames(before.__traceback__)
        before = before.__cause__ or before.__context__


def _clear_frames(trace: TracebackType | None) -> None:
    """traceback.clear_frames, which also drops copies of the variables.

    Until Python 3.13 a frame keeps a copy of its variables once f_locals was read, as it is to name a plugin in an
    error; `clear` leaves the copy, and reading f_locals again renews it.
    """
    while trace is not None:
        with suppress(RuntimeError):  # of a function that still runs
            trace.tb_frame.clear()
            _ = trace.tb_frame.f_locals
        trace = trace.tb_next
