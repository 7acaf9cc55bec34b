"""Turns errors of plugins' and libraries' code, which may be of any type, into Hookline's errors, or returns them.

Interrupts by the user or by Hookline (core.errors.PASSES) are no plugin's fault and always pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from hookline.core.errors import PASSES


class Raising:
    """A context around code of plugins and libraries that replaces the error which this code raises.

    turned: returns the error to raise instead; None lets the original error through. Not called for PASSES. may_show:
    the new error has the original one as its cause. May be entered any number of times, by several threads.
    """

    def __init__(self, turned: Callable[[BaseException], BaseException | None], *, may_show: bool = True) -> None:
        self._turned, self._may_show = turned, may_show

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, PASSES):
            return
        other = self._turned(error)
        if other is not None:
            raise other from (error if self._may_show else None)


def raised_by(call: Callable[..., object], *arguments: Any, **named: Any) -> BaseException | None:
    """The error that a call of a plugin or a library raises; None if it returns.

    Raises: PASSES, unchanged.
    """
    try:
        call(*arguments, **named)
    except PASSES:
        raise
    except BaseException as error:
        return error
    return None
