"""What an error that is kept keeps alive."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException) -> None:
    """Drop the local variables of the functions that an error came out of, and those of the errors before it.

    A traceback refers to them for as long as somebody keeps the error. Functions that still run are left alone.
    """
    seen: set[int] = set()
    before: BaseException | None = error
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        traceback.clear_frames(before.__traceback__)
        before = before.__cause__ or before.__context__
