"""Checks of single sampling parameters: each refuses with the field, the value and what is allowed, in one line.

They take any Python value, and raise nothing but RequestError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from ctypes import c_float
from itertools import islice
from typing import Any

from core.errors import RequestError
from core.request_limits import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORD_TOKEN_IDS, MAX_BAD_WORDS, MAX_BIASES, MAX_WHOLE
from core.shown import shown, shown_key

_MAX_ID_DIGITS = 20
"""A text with more digits is no token id, and int() takes long or refuses it."""


def number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number of [low, high], or of (low, high] if `above`; as a float32 too, which the device gets."""
    found = as_float(value)
    is_inside = low <= found <= high and not (above and found == low)
    single = c_float(found).value
    if not is_inside or not math.isfinite(single) or (above and single == low):
        kind = " as a float32" if is_inside and math.isfinite(found) else ""
        raise RequestError(f"sampling.{name}={shown(value)} must be {_allowed(low, high, above)}{kind}")
    return found


def as_float(value: object) -> float:
    """An int or a float as a float: infinite if it is too large for one; NaN if it is neither, as a bool is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def _allowed(low: float, high: float, above: bool) -> str:
    if low == -math.inf and high == math.inf:
        return "a finite number"
    if high == math.inf:
        return f"a finite number {'above' if above else 'of at least'} {low:g}"
    return f"a number above {low:g} and at most {high:g}" if above else f"a number between {low:g} and {high:g}"


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number of at least `low`, and at most `high` or what an int64 holds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"sampling.{name}={shown(value)} must be a whole number")
    if low <= value <= (MAX_WHOLE if high is None else high):
        return value
    bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
    raise RequestError(f"sampling.{name}={shown(value)} must be {bounds if value < low or high else 'at most 2**63-1'}")


def flag(name: str, value: object) -> None:
    """A bool, and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise RequestError(f"sampling.{name}={shown(value)} is not a bool")


def texts(name: str, values: object, most: int, most_characters: int) -> tuple[str, ...]:
    """One text or several, none of them empty, and no more than allowed."""
    found = (values,) if isinstance(values, str) else values
    if isinstance(found, list | tuple):
        _at_most(name, len(found), most, "texts")
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) and text for text in found):
        raise RequestError(f"sampling.{name}={shown(values)} must be a text or a list of texts, none of them empty")
    _at_most(name, sum(map(len, found)), most_characters, "characters in all")
    return tuple(found)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(f"sampling.{name} has {count} {what}; at most {most} are allowed")


def token_ids(name: str, values: object, most: int) -> tuple[int, ...]:
    """At most so many token ids of at least 0; whether the vocabulary has them is the engine's matter."""
    ids = _items(values, most)
    if ids is None:
        raise RequestError(f"sampling.{name}={shown(values)} must be a list of token ids")
    if len(ids) > most:
        raise RequestError(f"sampling.{name} has more than {most} token ids, which is the most it may have")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_WHOLE:  # quicker than one by one
        for token_id in ids:
            whole(name, token_id, 0)
    return ids


def _items(values: object, most: int) -> tuple[Any, ...] | None:
    """What something holds that is no text, as far as one more than allowed; None if it holds nothing."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    try:
        return tuple(islice(values, most + 1))
    except TypeError:  # an array without dimensions says that it is iterable
        return None


def biases(name: str, values: object) -> dict[int, float]:
    """Token id -> finite number added to its logit. JSON knows keys that are texts only, so those may hold the id."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={shown(values)} must be a mapping of token ids to numbers")
    _at_most(name, len(values), MAX_BIASES, "tokens")
    found = {}
    for key, value in values.items():
        is_id = isinstance(key, str) and key.isdecimal() and len(key) <= _MAX_ID_DIGITS
        token_id = whole(f"{name} key", int(key) if is_id else key, 0)
        found[token_id] = number(f"{name}[{token_id}]", value, -math.inf)
    return found


def words(name: str, values: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or their token ids; none of them empty, and no more than allowed."""
    items = None if isinstance(values, Mapping) else _items(values, MAX_BAD_WORDS)
    if items is None:
        raise RequestError(f"sampling.{name}={shown(values)} must be a list of texts or of lists of token ids")
    if len(items) > MAX_BAD_WORDS:
        raise RequestError(f"sampling.{name} has more than {MAX_BAD_WORDS} words, which is the most it may have")
    _at_most(name, sum(len(one) for one in items if isinstance(one, str)), MAX_BAD_WORD_CHARACTERS, "characters in all")
    found = [one if isinstance(one, str) else token_ids(name, one, MAX_BAD_WORD_TOKEN_IDS) for one in items]
    _at_most(name, sum(len(one) for one in found if not isinstance(one, str)), MAX_BAD_WORD_TOKEN_IDS, "ids in all")
    if not all(one.strip() if isinstance(one, str) else one for one in found):
        raise RequestError(f"sampling.{name}={shown(values)} holds an empty word")
    return tuple(found)


def extra_args(name: str, values: object) -> dict[str, dict[str, Any]]:
    """Processor name -> its arguments; their names and types are the engine's matter."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling.{name}={shown(values)} must be a mapping of processors to their arguments")
    for key, arguments in values.items():
        if not isinstance(key, str) or not isinstance(arguments, Mapping):
            place = f"sampling.{name}.{shown_key(key)}={shown(arguments)}"
            raise RequestError(f"{place} must be a mapping of the processor's arguments")
    return {key: dict(arguments) for key, arguments in values.items()}
