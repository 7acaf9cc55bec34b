"""Operations of a contract that a class may leave out.

A class that extends the contract inherits either a plain version of such an operation, or a mark that tells core not to
call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
"""The operation, unchanged but for the mark."""


def optional(method: Method) -> Method:
    """Mark an operation of a contract that a class may leave out; its docstring names the consequence."""
    method.is_left_out = True  # type: ignore[attr-defined]
    return method


def is_offered(method: Any) -> bool:
    """Whether a class implements an optional operation. method: the operation, as an attribute of class or object."""
    return not getattr(method, "is_left_out", False)
