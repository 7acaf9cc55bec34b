"""The three files that every process expects to have: standard input, output and error."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Open the null device for each of the descriptors 0 to 2 that is closed.

    Else the next file that is opened gets its number, and a child process would use that file as its standard input or
    output. Python has no `sys.stderr` then, and text printed to None would appear among the results on standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
