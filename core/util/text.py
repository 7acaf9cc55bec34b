"""Small helpers for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_miss(name: str, available: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?` if something close is available, else an empty string."""
    close = difflib.get_close_matches(name, list(available), n=1, cutoff=cutoff)
    return f" Did you mean '{close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """`Type: message` with all white space collapsed."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def joined(prefix: str, key: object) -> str:
    """The full name of a key: `prefix.key`, or the one that is there if the other is empty."""
    return ".".join(filter(None, (prefix, str(key))))
