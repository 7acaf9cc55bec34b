"""Random JSON schemas as people write them for tools and extraction: nested, with enums, patterns, arrays and unicode.

Every text that one allows is short, so that a completion ends by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ("id", "name", "größe", "値", "tags", "e-mail", 'a"b', "x/y", "naïve", "🙂", "zip_code", "is_open")
WORDS = ("red", "green", "blau", "черный", "赤", 'say "hi"', "back\\slash", "new\nline", "", "null", "🙂🙃", "été")
PATTERNS = (
    "^[a-z]{1,6}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(foo|bar)+[0-9]?$",
    "^[α-ω]{1,3}$",
    "^\\d{3}-\\d{4}$",
    "^#[0-9a-fA-F]{6}$",
    "^(\\+\\d{1,3} )?\\d{4,8}$",
)


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of a seed: an object or an array at its top, four levels deep at most."""
    rng = random.Random(seed)
    defs = {"thing": _schema(rng, 1), "pair": _array(rng, 1)} if rng.random() < 0.3 else {}
    schema = rng.choice([_object, _object, _array])(rng, 3)
    if defs:
        schema["$defs"] = defs
        if schema["type"] == "object":
            schema["properties"]["ref"] = {"$ref": f"#/$defs/{rng.choice(sorted(defs))}"}
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    flat: list[Callable[[random.Random, int], dict[str, Any]]]
    flat = [_string, _pattern, _integer, _number, _enum, _const, _plain, _nullable]
    deep = [_object, _array, _any_of, _tuple]
    return rng.choice(flat if depth == 0 else [*flat, *deep, *deep])(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 8)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 16}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 50), "multipleOf": 0.25}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "ü"], {"k": "v"}], rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 0, False])}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": 6}
