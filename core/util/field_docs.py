"""The docstrings under a dataclass's fields, read from its source file: what a listing shows beside the defaults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def field_docs(config: type) -> dict[str, str]:
    """Field name -> the docstring under it, in one line; a class's own over those of its bases.

    What cannot be found is left out: a listing must not fail for it.
    """
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        docs |= _own_docs(cls)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}  # a built-in class, or one whose source is not at hand
    docs = {}
    for statement, following in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        text = _text(following)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and text:
            docs[statement.target.id] = " ".join(text.split())
    return docs


def _text(statement: ast.stmt) -> str:
    """The string that a statement consists of, or nothing."""
    constant = statement.value if isinstance(statement, ast.Expr) else None
    value = constant.value if isinstance(constant, ast.Constant) else ""
    return value if isinstance(value, str) else ""
