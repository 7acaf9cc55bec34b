"""How an error shows the value it refuses: in one line and cut, whatever the value is."""

from __future__ import annotations

import reprlib
from math import log10

MAX_SHOWN = 80
"""Most characters that an error shows of a value."""
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
        text = _Short().repr(value).replace("\n", " ")
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_key(key: object) -> str:
    """The same of a key, whose quotes are left out."""
    return shown(key).strip("'\"")


def one_short_line(error: BaseException) -> str:
    """`Type: message` in one line of at most 300 characters."""
    line = " ".join(f"{type(error).__name__}: {str(error)[:1000]}".split()).removesuffix(":")
    line = line.encode("utf-8", "backslashreplace").decode("utf-8")
    return line if len(line) <= 300 else f"{line[:297]}..."
