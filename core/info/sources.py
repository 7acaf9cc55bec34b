"""Where a module lies. Imports nothing of what it looks at; what cannot be found is empty: no listing fails for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


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
