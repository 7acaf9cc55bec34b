"""Splits the configurations of jobs into common values and differing ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def common(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys that have the same value in all configurations."""
    first, *others = trees or [{}]
    found: dict[str, Any] = {}
    for key, value in first.items():
        values = [other.get(key) for other in others]
        groups = [one for one in (value, *values) if isinstance(one, Mapping)]
        if len(groups) == len(trees):
            found[key] = common(groups)
        elif all(one == value for one in values):
            found[key] = value
    return {key: value for key, value in found.items() if value != {}}


def own(tree: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that are not shared."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(shared.get(key), Mapping):
            value = own(value, shared[key])
        elif key in shared:
            continue
        if value != {}:
            found[key] = value
    return found
