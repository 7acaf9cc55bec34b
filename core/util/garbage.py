"""Keeps objects out of Python's full garbage collections, each of which stops a process with torch and a large heap for
0.1 s and more, in the middle of a step.

Frozen objects are still freed with their last reference; reference cycles among them are kept. gc.freeze is for the
whole process: if other code froze objects before, Hookline freezes none; engines of one process share frozen objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEWEST_FROZEN = 2_000
"""With at least this many frozen objects, other code has frozen the heap: a bare interpreter has twice as many objects.
Python 3.12 itself begins with 375 frozen ones."""


def is_frozen() -> bool:
    """Whether the heap is frozen, by an engine or by other code."""
    return gc.get_freeze_count() >= FEWEST_FROZEN


@contextmanager
def settled() -> Iterator[None]:
    """While active, the objects that existed at its beginning are left out of garbage collection.

    With torch and transformers imported a collection of all of them stops a step for 0.13 s.

    For commands, which own their process: reference cycles among those objects are kept until the end. What was frozen
    before stays so, and no more is frozen.
    """
    was_frozen = is_frozen()
    gc.collect()
    if was_frozen:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def imports_kept() -> Iterator[None]:
    """Around the imports of a child process of ours: their objects are never searched for garbage."""
    with unsearched():
        yield
        gc.freeze()


@contextmanager
def unsearched() -> Iterator[None]:
    """Around a start: no search for garbage. A start makes little, and each search goes through all of torch's objects.

    Afterwards as before: if it was switched off, it stays so.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FrozenHeap:
    """While it lives, objects that existed when its engine was ready are left out of full collections.

    See `freeze_heap`.
    """

    def __init__(self) -> None:
        self.is_idle = True
        """Whether no caller waits for the engine's steps, so that a full collection does no harm; see `idling`."""

    @contextmanager
    def idling(self) -> Iterator[None]:
        """Around a time in which no caller waits for the engine's steps; is_idle is False outside from then on."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Around the engine's end, so that its cycles can be collected; afterwards other engines' objects are frozen
        again.
        """
        froze_more = _froze_more()
        _OURS.engines.discard(self)
        gc.unfreeze()
        try:
            yield
        finally:
            _freeze_for_others(froze_more)


class _Ours:
    """The engines of this process that froze objects. Without a lock, since a collection may end a dropped engine, in
    the middle of any of these functions.
    """

    def __init__(self) -> None:
        self.engines: set[FrozenHeap] = set()
        self.num_objects = 0
        """Frozen objects after we last froze some; if there are more now, other code has frozen objects since."""


_OURS = _Ours()


def freeze_heap() -> FrozenHeap | None:
    """Collect once, then leave all existing objects out of full collections, until the last such engine has ended.

    Returns None, and does nothing, if other code of the process has frozen objects before.
    """
    if not _OURS.engines and is_frozen():
        return None
    heap = FrozenHeap()
    _OURS.engines.add(heap)
    _freeze()
    return heap


def search_frozen() -> None:
    """Collect the objects frozen for engines, too, and freeze the rest again, so that an engine which was dropped in a
    reference cycle ends. Does nothing while an engine is at work, or if other code has frozen objects.
    """
    if not _OURS.engines or _froze_more() or not all(one.is_idle for one in list(_OURS.engines)):
        return
    gc.unfreeze()
    _freeze_for_others(froze_more=False)


def _froze_more() -> bool:
    """Whether other code has frozen objects since we did."""
    return gc.get_freeze_count() > _OURS.num_objects


def _freeze_for_others(froze_more: bool) -> None:
    """Freeze all objects, if an engine is left that needs it, or if other code had frozen objects before."""
    if _OURS.engines or froze_more:
        _freeze()
    if not (_OURS.engines or froze_more):  # checked again: the last engine may have ended during the collection
        gc.unfreeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    _OURS.num_objects = gc.get_freeze_count()
