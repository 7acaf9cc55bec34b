"""Checks of single sampling parameters: each refuses with the field, the value and what is allowed, in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from core.errors import RequestError


def number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number of [low, high], or of (low, high] if `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < low or value > high or (above and value == low):  # type: ignore[operator]
        raise RequestError(f"sampling.{name}={value!r} must be {_allowed(low, high, above)}")
    return float(value)  # type: ignore[arg-type]


def _allowed(low: float, high: float, above: bool) -> str:
    if low == -math.inf and high == math.inf:
        return "a finite number"
    if high == math.inf:
        return f"a finite number {'above' if above else 'of at least'} {low:g}"
    return f"a number above {low:g} and at most {high:g}" if above else f"a number between {low:g} and {high:g}"


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number of at least `low`, and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"sampling.{name}={value!r} must be a whole number")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"sampling.{name}={value} must be {bounds}")
    return value


def flag(name: str, value: object) -> None:
    """A bool, and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise RequestError(f"sampling.{name}={value!r} is not a bool")


def texts(name: str, values: object) -> tuple[str, ...]:
    """One text or several, none of them empty."""
    found = (values,) if isinstance(values, str) else values
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) and text for text in found):
        raise RequestError(f"sampling.{name}={values!r} must be a text or a list of texts, none of them empty")
    return tuple(found)


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids of at least 0; whether the vocabulary has them is the engine's matter."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise RequestError(f"sampling.{name}={values!r} must be a list of token ids")
    ids = tuple(values)
    for token_id in ids:
        whole(name, token_id, 0)
    return ids


def biases(name: str, values: object) -> dict[int, float]:
    """Token id -> finite number added to its logit. JSON knows keys that are texts only, so those may hold the id."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={values!r} must be a mapping of token ids to numbers")
    found = {}
    for key, value in values.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        whole(f"{name} key", token_id, 0)
        found[token_id] = number(f"{name}[{token_id}]", value, -math.inf)
    return found


def words(name: str, values: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or their token ids; none of them empty."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise RequestError(f"sampling.{name}={values!r} must be a list of texts or of lists of token ids")
    found: list[str | tuple[int, ...]] = []
    for value in values:
        if isinstance(value, str):
            found.append(value)
        else:
            found.append(token_ids(name, value))
        if not (value.strip() if isinstance(value, str) else found[-1]):
            raise RequestError(f"sampling.{name}={values!r} holds an empty word")
    return tuple(found)


def extra_args(name: str, values: object) -> dict[str, dict[str, Any]]:
    """Processor name -> its arguments; their names and types are the engine's matter."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={values!r} must be a mapping of processors to their arguments")
    for key, arguments in values.items():
        if not isinstance(key, str) or not isinstance(arguments, Mapping):
            raise RequestError(f"sampling.{name}.{key}={arguments!r} must be a mapping of the processor's arguments")
    return {key: dict(arguments) for key, arguments in values.items()}
