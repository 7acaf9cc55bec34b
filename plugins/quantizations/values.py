"""Reads a quantization_config key by key; unsupported values are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hookline.core.errors import ConfigError, shown

MAX_BLOCK = 2**20
"""Largest block or group that is accepted."""


class Stated:
    """The values of a quantization_config; `name` stands for them in errors."""

    def __init__(self, values: Mapping[str, Any], name: str = "quantization_config") -> None:
        """Keep the values."""
        self.values, self.name = values, name

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise ConfigError with the key, its value and the supported ones."""
        value = shown(self.values[key]) if key in self.values else "missing"
        raise ConfigError(
            f"{self.name}.{key} = {value} is not supported; supported: {supported}. Use another checkpoint of the model"
        )

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value that must be one of these; a missing or null one is the default."""
        value = self.values.get(key)
        value = default if value is None else value
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.refuse(key, ", ".join(map(str, allowed)))
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1; a missing or null one is the default, and refused without one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_BLOCK:
            self.refuse(key, f"a whole number from 1 to {MAX_BLOCK}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; a missing or null one is the default."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return default if value is None else value

    def texts(self, *keys: str) -> list[str]:
        """The texts of lists; missing and null ones are empty."""
        found: list[str] = []
        for key in keys:
            value = self.values.get(key) or []
            if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
                self.refuse(key, "a list of texts")
            found += value
        return found

    def inner(self, key: str) -> Stated | None:
        """The mapping under a key; None for a missing or null one."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(key, "a mapping")
        return Stated(value, f"{self.name}.{key}")

    def sizes(self, key: str, count: int) -> Sequence[int] | None:
        """A list of `count` whole numbers; None for a missing or null one."""
        value = self.values.get(key)
        if value is None:
            return None
        is_list = isinstance(value, list | tuple) and len(value) == count
        if not is_list or not all(type(one) is int and 1 <= one <= MAX_BLOCK for one in value):
            self.refuse(key, f"{count} whole numbers from 1 to {MAX_BLOCK}")
        return tuple(value)


def checked_pattern(stated: Stated, key: str, pattern: str) -> str:
    """A pattern under a key, if it is one of Python's re.

    Raises: ConfigError if it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{stated.name}.{key} has {shown(pattern)}, which is no regular expression ({error}); correct config.json"
        ) from error
    return pattern


def group_size(stated: Stated, key: str) -> int:
    """Inputs of a group; 0 for -1, which means all of a row."""
    return 0 if stated.values.get(key) == -1 else stated.size(key, 128)
