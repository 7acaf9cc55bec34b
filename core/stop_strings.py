"""Finds stop strings in text that comes in pieces, and keeps back what may become one. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Looks for the stop string that is complete first; of two that end together, the longer one counts.

    include: the stop string stays in the text. Then nothing needs to be kept back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._tail = ""
        """The longest end of the text so far that some stop string begins with."""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string that ends it, if one is complete.

        may_stop: False lets stop strings pass that are completed by this piece.
        """
        seen, text = len(self._tail), self._tail + text
        hidden = 0 if self._include else seen
        match = self._first_match(text, seen) if may_stop else None
        if match is not None:
            end, start, stop = match
            self._tail = ""
            return text[seen - hidden : end if self._include else start], stop
        self._tail = self._partial(text)
        return text[seen - hidden : len(text) - (0 if self._include else len(self._tail))], None

    def flush(self) -> str:
        """What was kept back, when no more text comes."""
        tail, self._tail = self._tail, ""
        return "" if self._include else tail

    def _first_match(self, text: str, seen: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the match that ends first, behind what was seen before."""
        found = []
        for stop in [stop for stop in self._stops if stop in text]:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _partial(self, text: str) -> str:
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return text[-length:]
        return ""
