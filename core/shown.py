"""How values and names that somebody else wrote appear in an error: in one line, cut, whatever they are."""

from __future__ import annotations

import reprlib
from math import log10

MAX_SHOWN = 80
"""Most characters that an error shows of a value."""
MAX_TEXT = 200
"""Most characters that an error shows of a name or of another error's text."""
_MAX_SHOWN_BITS = 200
"""A longer whole number is not written out: Python refuses to above 4,300 digits, and takes long below."""


class _Short(reprlib.Repr):
    """Looks at the first items and characters alone, so that a large value costs no more than a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, MAX_SHOWN - 10, MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """A very large number by its length."""
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_SHOWN_BITS else f"<whole number of about {round(bits * log10(2))} digits>"


def shown(value: object) -> str:
    """The value as Python writes it, in one line of at most MAX_SHOWN characters."""
    try:
        text = clipped(_Short().repr(value))
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_key(key: object) -> str:
    """The same of a key, whose quotes are left out."""
    return shown(key).strip("'\"")


def clipped(text: str, limit: int = MAX_TEXT) -> str:
    """The text in one line of about `limit` characters: what cannot be printed is escaped, the middle left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_short_line(error: BaseException) -> str:
    """`Type: message` in one line of at most 300 characters."""
    line = " ".join(f"{type(error).__name__}: {str(error)[:1000]}".split()).removesuffix(":")
    return clipped(line if len(line) <= 300 else f"{line[:297]}...", 300)
