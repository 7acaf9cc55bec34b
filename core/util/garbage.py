"""Keeps objects out of Python's full garbage collections, each of which stops a process with torch and a large heap for
0.1 s and more, in the middle of a step.

Frozen objects are still freed with their last reference; reference cycles among them are kept. gc.freeze is for the
whole process: if other code froze objects before us, we leave that alone; engines of one process share what they froze.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEWEST_FROZEN = 2_000
"""Whoever freezes a heap freezes this many objects at least: a bare interpreter has twice as many. Python 3.12 begins
with 375 frozen ones of its own."""


@contextmanager
def settled() -> Iterator[None]:
    """While active, the objects that existed at its beginning are left out of garbage collection.

    With torch and transformers imported a collection of all of them stops a step for 0.13 s.

    For commands, whose process is theirs: reference cycles among those objects are kept until the end.
    """
    gc.collect()
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
    """While it lives, what existed when its engine was ready is left out of full collections; see `freeze_heap`."""

    def __init__(self) -> None:
        self.is_idle = True
        """Whether no caller waits for the engine's steps, if the engine tells: a full collection does no harm then."""

    @contextmanager
    def idling(self) -> Iterator[None]:
        """Around a time in which no caller waits for the engine's steps; from its first use on the engine tells."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Around the engine's end, whose cycles can be collected there; for other engines all is frozen again after."""
        froze_more = _froze_more()
        _OURS.engines.discard(self)
        gc.unfreeze()
        try:
            yield
        finally:
            _freeze_for_others(froze_more)


class _Ours:
    """What engines of this process have frozen. No lock: a collection may end a dropped engine in the middle of it."""

    def __init__(self) -> None:
        self.engines: set[FrozenHeap] = set()
        self.num_objects = 0
        """Frozen objects after we last froze some; if there are more now, other code has frozen objects since."""


_OURS = _Ours()


def freeze_heap() -> FrozenHeap | None:
    """Collect once, then leave all that is there out of full collections, until the last engine that asked has ended.

    None: other code of the process had frozen objects before, so this is left to it.
    """
    if not _OURS.engines and gc.get_freeze_count() >= FEWEST_FROZEN:
        return None
    heap = FrozenHeap()
    _OURS.engines.add(heap)
    _freeze()
    return heap


def search_frozen() -> None:
    """Collect also what was frozen for engines, and freeze the rest again: so an engine that was dropped in a reference
    cycle is found, and ends. Does nothing while one of the engines is at work, or where others have frozen objects.
    """
    if not _OURS.engines or _froze_more() or not all(one.is_idle for one in list(_OURS.engines)):
        return
    gc.unfreeze()
    _freeze_for_others(froze_more=False)


def _froze_more() -> bool:
    """Whether other code has frozen objects since we did."""
    return gc.get_freeze_count() > _OURS.num_objects


def _freeze_for_others(froze_more: bool) -> None:
    """Freeze what is there, if an engine is left that asked for it, or if other code had frozen objects before."""
    if _OURS.engines or froze_more:
        _freeze()
    if not (_OURS.engines or froze_more):  # asked again: the last one may have ended while this one froze
        gc.unfreeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    _OURS.num_objects = gc.get_freeze_count()
