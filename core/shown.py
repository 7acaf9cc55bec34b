"""How values and names that somebody else wrote appear in an error: in one line, and never longer than is read.

Knows no configuration and no request.
"""

from __future__ import annotations

import reprlib

MAX_SHOWN = 200
"""Most characters of a text in an error; what is cut out is shown as three dots."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_SHOWN


def shown(value: object) -> str:
    """`repr(value)`, with long texts, long lists and what is nested deeply cut out of it."""
    return clipped(_REPR.repr(value), 2 * MAX_SHOWN)


def clipped(text: str, limit: int = MAX_SHOWN) -> str:
    """The text in one line of about `limit` characters: what cannot be printed is escaped, the middle left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
