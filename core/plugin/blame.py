"""Turns any error that a plugin's code raises into one line that names the plugin.

It costs nothing until something is raised: then the frames of the traceback show whose code it was.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING

from hookline.core import contracts
from hookline.core.errors import HooklineError, PluginError, is_out_of_memory, one_short_line
from hookline.core.plugin.problems import raised_at
from hookline.core.util.raising import Raising

if TYPE_CHECKING:
    from hookline.core.plugin.registry import Entry


class Blaming(Raising):
    """Around code that calls plugins; may be entered any number of times, by several threads.

    entries: the entries whose code may be called inside. doing: the end of the sentence "kernels 'x' fails ...".
    otherwise: the entry to blame if no frame belongs to any of `entries`; None lets such an error, a bug of Hookline,
    through.
    Raises: PluginError, or its subclass `kind`, in place of every error except Hookline's own, a lack of memory, and
    PASSES (e.g. KeyboardInterrupt), which are no plugin's fault.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        doing: str,
        *,
        otherwise: Entry | None = None,
        kind: type[PluginError] = PluginError,
    ) -> None:
        super().__init__(self.blamed)
        self._entries, self._doing, self._otherwise, self._kind = tuple(entries), doing, otherwise, kind

    def blamed(self, error: BaseException) -> PluginError | None:
        """The error to raise in place of `error`; None lets it through. Not called for PASSES."""
        if isinstance(error, HooklineError) or is_out_of_memory(error):
            return None
        who = self.whose([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        if who is None and self._otherwise is not None:
            who = f"{self._otherwise} fails"
        return None if who is None else self._kind(f"{who} {self._doing}: {with_place(error)}")

    def whose(self, frames: list[FrameType]) -> str | None:
        """The plugin that fails in these frames, outermost first, and its function that was called from outside."""
        for frame in reversed(frames):  # a model calls kernels: the innermost is to blame
            near = [one for one in self._entries if _is_code_of(one, frame)]
            near = near or [one for one in self._entries if _is_beside(one, frame)]
            if near:
                return _named(near, frames)
        return None


def failure(who: object, method: str, error: BaseException, when: str = "") -> str:
    """The text of a PluginError about a method that raised `error`."""
    return f"{who} fails in {method}{when}: {with_place(error)}"


def breach(who: object, method: str, fault: str, when: str = "") -> str:
    """The text of a PluginError about a method that broke its contract."""
    return f"{who} breaks its contract in {method}{when}: {fault}"


def with_place(error: BaseException) -> str:
    """An error in one short line, with its place: the innermost line in a plugin's file, if there is one."""
    place = raised_at(error)
    if place is None:
        return one_short_line(error)
    code, line = place
    return f"{one_short_line(error)} ({code.co_filename}:{line}, in {code.co_name})"


def _named(near: list[Entry], frames: list[FrameType]) -> str:
    """Entries that share a module or a package are told apart by the class of the innermost method's frame."""
    methods = [(entry, frame) for frame in frames for entry in near if _target(frame) == entry.target]
    if methods:
        entry = methods[-1][0]
        called = [frame for one, frame in methods if one is entry]
        own = [frame for frame in called if not _is_inherited(frame)] or called
        return f"{entry} fails in {own[0].f_code.co_name}"
    return f"{near[0]} fails" if len(near) == 1 else f"a {near[0].kind} of {near[0].origin} fails"


def _is_code_of(entry: Entry, frame: FrameType) -> bool:
    return _target(frame) == entry.target or _module(frame) == entry.target.partition(":")[0]


def _is_beside(entry: Entry, frame: FrameType) -> bool:
    """Whether a frame's module lies in the package of the entry's module."""
    package = entry.target.partition(":")[0].rpartition(".")[0]
    return package != "" and f"{_module(frame)}.".startswith(f"{package}.")


def _is_inherited(frame: FrameType) -> bool:
    """Whether a frame runs a contract's default method, which may call methods of the plugin's class."""
    return _module(frame).startswith(f"{contracts.__name__}.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _target(frame: FrameType) -> str:
    """The class of the object whose method a frame is, in the form of Entry.target; the method may be inherited."""
    first = frame.f_code.co_varnames[:1]
    owner = frame.f_locals.get(first[0]) if first in (("self",), ("cls",)) else None
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}:{cls.__qualname__}"
