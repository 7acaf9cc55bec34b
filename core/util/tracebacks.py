"""What an error that is kept keeps alive."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType


def forget_locals(error: BaseException) -> None:
    """Drop the local variables of the functions that an error came out of, and those of the errors before it.

    A traceback refers to them for as long as somebody keeps the error. Functions that still run are left alone.
    """
    seen: set[int] = set()
    before: BaseException | None = error
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        _clear_frames(before.__traceback__)
        before = before.__cause__ or before.__context__


def _clear_frames(trace: TracebackType | None) -> None:
    """As traceback.clear_frames, and the copies of their variables, too.

    Until Python 3.13 a frame keeps a copy of them once somebody has looked at f_locals, as messages that name a plugin
    do; `clear` leaves it, and the next look renews it.
    """
    while trace is not None:
        with suppress(RuntimeError):  # of a function that still runs
            trace.tb_frame.clear()
            _ = trace.tb_frame.f_locals
        trace = trace.tb_next
