"""Limits of a request's `extra_args`, looked at before anything of them is converted, kept or shown.

Counts what JSON could hold; which arguments a logits processor takes is `core.requests.logits_processing`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.errors import RequestError

MAX_CHARACTERS = 65_536
"""Most characters of a request's extra_args: of all keys, texts and numbers together."""
MAX_VALUES = 1024
"""Most values of a request's extra_args: each number, text, list and mapping is one. A value costs up to 0.1 ms."""
MAX_DEPTH = 16
"""Most mappings and lists around a value of a request's extra_args, itself not counted."""


def refuse_oversized(extra_args: Mapping[str, Any]) -> None:
    """Look no further than the limits reach, however large the arguments are.

    Raises: RequestError naming the limit.
    """
    num_characters, num_values = 0, 0
    waiting: list[tuple[Any, int]] = [(extra_args, 1)]
    while waiting:
        holder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"sampling.extra_args is nested deeper than {MAX_DEPTH} levels; make it flatter")
        pairs = holder.items() if isinstance(holder, Mapping) else (("", value) for value in holder)
        for key, value in pairs:
            num_values += 1
            num_characters += _num_characters(key) + _num_characters(value)
            if num_values > MAX_VALUES:
                raise RequestError(f"sampling.extra_args holds more than {MAX_VALUES} values; send fewer")
            if num_characters > MAX_CHARACTERS:
                raise RequestError(f"sampling.extra_args holds more than {MAX_CHARACTERS} characters; send less")
            if isinstance(value, Mapping | list | tuple):
                waiting.append((value, depth + 1))


def _num_characters(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else 0
