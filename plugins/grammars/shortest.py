"""The length of the shortest text that a regular expression matches; reads the pattern once, and builds nothing."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"(?P<flags>\(\?[\w-]*\))|(?P<open>\((?:\?(?:P?<\w*>|[\w-]*:|<?[=!]))?)|(?P<close>\))|(?P<bar>\|)|(?P<nothing>[$^]|\\[bBAzZ])"
    r"|(?P<count>[*+?]|\{(?P<least>\d+)(?:,\d*)?\})|(?P<one>\\(?:[pP]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
"""The next part of a regular expression."""
MOST_READ = 2048
"""Most characters of a pattern that is read; for a longer pattern, its own length is returned, since the end of each
open bracket is searched for."""


def shortest_text(pattern: str) -> int:
    """Characters of the shortest text; approximate for syntax that neither Python's nor Rust's patterns have."""
    if len(pattern) > MOST_READ:
        return len(pattern)
    waiting: list[tuple[int | None, int]] = []
    # Of the innermost group: its shortest earlier alternative, its current one without the last part, and that part.
    shortest: int | None = None
    done, last, is_counted = 0, 0, False
    for piece in _PIECE.finditer(pattern):
        kind, counted, is_counted = piece.lastgroup, is_counted, False
        if kind == "open":
            waiting.append((shortest, done + last))
            shortest, done, last = None, 0, 0
        elif kind == "bar":
            shortest, done, last = _least(shortest, done + last), 0, 0
        elif kind == "close" and waiting:
            inside = _least(shortest, done + last)
            shortest, done = waiting.pop()
            last = inside
        elif piece["count"]:
            least = int(piece["least"]) if piece["least"] else int(piece["count"] == "+")
            last = last if counted else last * least  # a second one makes the first lazy or possessive
            is_counted = True
        elif kind == "one":
            done, last = done + last, 1
    for before, outside in [*reversed(waiting), (None, 0)]:
        shortest, done, last = before, outside, _least(shortest, done + last)
    return last


def _least(shortest: int | None, other: int) -> int:
    return other if shortest is None else min(shortest, other)
