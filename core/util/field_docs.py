"""The docstrings under a dataclass's fields, read from its source file, for listings of fields and their defaults."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator, Mapping
from itertools import pairwise


def field_docs(config: type) -> dict[str, str]:
    """Field name -> the docstring under it, in one line; those of a class replace those of its bases.

    Docstrings that cannot be found are left out, so that a listing does not fail.
    """
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        docs |= _own_docs(cls)
    return docs


def _own_docs(cls: type) -> Mapping[str, str]:
    try:
        path = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return {}  # a built-in class, or one whose source is not at hand
    return _docs_by_class("".join(linecache.getlines(path or ""))).get(cls.__qualname__, {})


@functools.lru_cache(maxsize=64)
def _docs_by_class(source: str) -> dict[str, dict[str, str]]:
    """Qualified class name -> its fields' docstrings. `inspect.getsource` would parse the file once for each class."""
    try:
        return {name: _docs_in(definition) for name, definition in _classes_in(ast.parse(source), "")}
    except SyntaxError:
        return {}


def _classes_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Each class with its `__qualname__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _classes_in(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes_in(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # an expression defines no class
            yield from _classes_in(child, prefix)


def _docs_in(definition: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, following in pairwise(definition.body):
        text = _text(following)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and text:
            docs[statement.target.id] = " ".join(text.split())
    return docs


def _text(statement: ast.stmt) -> str:
    """The string that a statement consists of, or nothing."""
    constant = statement.value if isinstance(statement, ast.Expr) else None
    value = constant.value if isinstance(constant, ast.Constant) else ""
    return value if isinstance(value, str) else ""
