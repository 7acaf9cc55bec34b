"""Merging of nested mappings, for configuration and for a checkpoint's config.json alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` laid over `base`; mappings on both sides are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged
