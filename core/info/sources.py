"""Where a module's file is, and which fields a dataclass has, for listings.

Imports no module that it looks for. What cannot be found is an empty text, so that no listing fails for it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from hookline.core.util.field_docs import field_docs


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


def field_facts(config: type | None, *, has_docs: bool = True) -> list[dict[str, str]]:
    """Name, type, default and docstring of each field that can be set. has_docs: whether the docstrings, for which the
    source file is parsed, are wanted; else they are empty.
    """
    if config is None:
        return []
    docs = field_docs(config) if has_docs else {}
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
