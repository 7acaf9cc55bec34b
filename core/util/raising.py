"""Errors of plugins' and libraries' code, which may be of any kind, turned into errors of ours or returned as values.

An interrupt, of the user's or ours (core.errors.PASSES), is the fault of no plugin, and always passes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from hookline.core.errors import PASSES


class Raising:
    """A context around code of plugins and libraries, which may raise anything: what it raises leaves as another error.

    turned: the error to raise in an error's place; None lets that one through. Never asked about PASSES. may_show: the
    other error has the first one as its cause. May be entered any number of times, by several threads.
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

    Raises: PASSES, as they are.
    """
    try:
        call(*arguments, **named)
    except PASSES:
        raise
    except BaseException as error:
        return error
    return None
