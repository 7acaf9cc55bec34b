"""Operations of a contract that a class may leave out.

A class that extends its contract inherits them: either a plain version, or a mark that tells core to do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
"""The operation, unchanged but for the mark."""


def optional(method: Method) -> Method:
    """Mark an operation of a contract that a class may leave out; its docstring says what happens then."""
    method.is_left_out = True  # type: ignore[attr-defined]
    return method


def is_offered(method: Any) -> bool:
    """Whether an object's operation is its class's own. Asked once, when an engine is put together."""
    return not getattr(method, "is_left_out", False)
