"""Small helpers for messages."""

from __future__ import annotations

from collections.abc import Iterable

from hookline.core.errors import one_line as one_line


def near_miss(name: str, available: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """` Did you mean 'x'?` if something close is available, else an empty string. prefix: of a key, named whole."""
    import difflib

    close = difflib.get_close_matches(name, list(available), n=1, cutoff=cutoff)
    return f" Did you mean '{joined(prefix, close[0])}'?" if close else ""


def joined(prefix: str, key: object) -> str:
    """The full name of a key: `prefix.key`; an empty prefix or key is left out."""
    return ".".join(filter(None, (prefix, str(key))))
