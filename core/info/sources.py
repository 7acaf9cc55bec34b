"""What the source files say beyond what runs: where a module lies, and the docstrings under a dataclass's fields.

Imports nothing of what it looks at. Whatever cannot be found is empty: a listing must not fail for it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any


def module_file(module: str) -> str:
    """Path of a module's file, found without importing any of its packages; "" if there is none."""
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return ""
    if spec is None or not inner:
        return spec.origin or "" if spec is not None else ""
    for place in spec.submodule_search_locations or ():
        stem = Path(place, *inner)
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if path.is_file():
                return str(path)
    return ""


def field_facts(config: type | None) -> list[dict[str, str]]:
    """Name, type, default and docstring of each field that can be set."""
    if config is None:
        return []
    docs = field_docs(config)
    return [
        {
            "name": field.name,
            "type": _type_name(field.type),
            "default": _default(field),
            "doc": docs.get(field.name, ""),
        }
        for field in dataclasses.fields(config)
        if field.init
    ]


def _type_name(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not getattr(annotation, "__args__", ())
    return annotation.__name__ if plain else str(annotation)


def _default(field: dataclasses.Field[Any]) -> str:
    factory = field.default_factory
    return repr(field.default if factory is dataclasses.MISSING else factory())


def field_docs(config: type) -> dict[str, str]:
    """Field name -> the docstring under it, in one line, or its entry in the class's; own ones over those of bases."""
    docs = _entries(config)
    for cls in reversed(config.__mro__):
        docs |= _own_docs(cls)
    return docs


def _entries(cls: type) -> dict[str, str]:
    """What the class's docstring says in entries: `name: text`, further lines further in."""
    docs: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(cls) or "").splitlines():
        if not line.startswith(" "):
            name, colon, line = line.partition(":")
            name = name if colon and name.isidentifier() else ""
        if name:
            docs[name] = f"{docs.get(name, '')} {line.strip()}".strip()
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
