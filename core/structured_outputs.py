"""What a completion must look like: a JSON schema, a regular expression, a choice, a grammar, or structural tags.

Checked for form and size when a request is made, before a plugin parses it; what a grammar means is up to the plugin.
Nothing in it is interpolated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hookline.core.errors import RequestError, shown, shown_key
from hookline.core.util.text import near_miss

MAX_SCHEMA_CHARACTERS = 131_072
"""Most characters of `json` and of `structural_tag`, as JSON text: of all keys, texts and numbers together."""
MAX_SCHEMA_VALUES = 16_384
"""Most values of a schema: each number, text, list and mapping is one."""
MAX_SCHEMA_DEPTH = 64
"""Most mappings and lists around a value of a schema."""
MAX_REGEX_CHARACTERS = 8192
"""Most characters of `regex`."""
MAX_GRAMMAR_CHARACTERS = 65_536
"""Most characters of `grammar`."""
MAX_CHOICES = 1024
"""Most texts of `choice`."""
MAX_CHOICE_CHARACTERS = 65_536
"""Most characters of all texts of `choice` together."""
MAX_AFTER_CHARACTERS = 64
"""Most characters of `after`: the masks of a text take 19 KB for each with 151,936 tokens."""
KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
"""The fields of which exactly one is set."""
_PLACE = "sampling.structured_outputs"
MAX_BITS = 1024
"""Most bits of a whole number in a schema."""


@dataclass(frozen=True)
class StructuredOutputs:
    """What a completion must look like: exactly one of json, regex, choice, grammar and structural_tag.

    The completion ends with finish_reason "stop" where it is complete. Until then no end-of-sequence or stop token is
    drawn, and one that is plain text in the grammar is not drawn either.

    Limits, in core/structured_outputs.py: 131,072 characters, 16,384 values and 64 levels of a schema; 8,192 characters
    of a regex and 65,536 of a grammar; 1,024 choices of 65,536 characters in all; 64 characters of `after`.
    Raises: RequestError naming the field, and the limit or the form.
    """

    json: Any = None
    """A JSON schema, as a mapping or as JSON text; true for any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: tuple[str, ...] | None = None
    """Texts of which the completion is one."""
    grammar: str | None = None
    """A grammar in Lark's form, or in GBNF (rules with ::=)."""
    structural_tag: Any = None
    """Tags in free text whose contents follow schemas, as a mapping or as JSON text:
    {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}."""
    whitespace: bool = True
    """json: allow white space between the tokens of JSON; false asks for the compact form."""
    after: str | int | None = None
    """Leave the completion free until it holds this text, or this token id; "</think>" lets a model reason first."""

    def __post_init__(self) -> None:
        """Check form and size, and keep the normal form: JSON as text, choices as a tuple without repetitions."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"{_PLACE} needs exactly one of {', '.join(KINDS)}; it has {found}")
        self._keep("json", _schema(self.json))
        self._keep("structural_tag", _tags(self.structural_tag))
        self._keep("choice", _choices(self.choice))
        _check_text("regex", self.regex, MAX_REGEX_CHARACTERS)
        _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)
        if not isinstance(self.whitespace, bool):
            raise RequestError(f"{_PLACE}.whitespace={shown(self.whitespace)} is not a bool")
        _check_after(self.after)

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The one of KINDS that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def value(self) -> Any:
        """What it is set to: a text (JSON text of json and structural_tag), of a choice its texts."""
        return getattr(self, self.kind)

    @property
    def num_characters(self) -> int:
        """Length of `value`; of all its texts together for a choice."""
        return sum(map(len, self.value)) if self.kind == "choice" else len(self.value)

    @classmethod
    def of(cls, value: object) -> StructuredOutputs | None:
        """From what a request brings: None, a mapping of the fields, or one of these.

        Raises: RequestError for anything else and for an unknown key, with the near miss.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"{_PLACE}={shown(value)} must be a mapping with one of {', '.join(KINDS)}")
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                name = shown_key(key)
                hint = near_miss(name, known, prefix=_PLACE)
                raise RequestError(f"unknown key '{_PLACE}.{name}'.{hint} Available: {', '.join(known)}")
        return cls(**value)


def _schema(value: object) -> str | None:
    """A schema as JSON text."""
    parsed = _parsed("json", value)
    if parsed is True:
        return '{"type": "object"}'
    return None if parsed is None else _dumped("json", parsed, "a JSON schema: a mapping, or true for any object")


def _tags(value: object) -> str | None:
    parsed = _parsed("structural_tag", value)
    return None if parsed is None else _dumped("structural_tag", parsed, "a mapping")


def _parsed(name: str, value: object) -> Any:
    """What JSON text says; other values as they are."""
    if not isinstance(value, str):
        return value
    _check_size(f"{_PLACE}.{name}", len(value), MAX_SCHEMA_CHARACTERS, "characters")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise RequestError(f"{_PLACE}.{name} {what}") from None


def _dumped(name: str, value: Any, what: str) -> str:
    if not isinstance(value, Mapping):
        raise RequestError(f"{_PLACE}.{name}={shown(value)} must be {what}")
    check_tree(f"{_PLACE}.{name}", value)
    text = json.dumps(value, ensure_ascii=False)
    _check_size(f"{_PLACE}.{name}", len(text), MAX_SCHEMA_CHARACTERS, "characters")
    _check_unicode(name, text)
    return text


def check_tree(place: str, root: Mapping[Any, Any]) -> None:
    """Look at a schema before it is copied or shown, and no further than the limits reach. place: names it in errors.

    Raises: RequestError with the limit, or with what JSON cannot hold.
    """
    num_values, num_characters = 0, 0
    waiting: list[tuple[Any, int]] = [(root, 1)]
    while waiting:
        holder, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"{place} is nested deeper than {MAX_SCHEMA_DEPTH} levels; make it flatter")
        for key, value in _pairs(place, holder):
            num_values, num_characters = num_values + 1, num_characters + len(key) + _num_characters(place, value)
            _check_size(place, num_values, MAX_SCHEMA_VALUES, "values")
            _check_size(place, num_characters, MAX_SCHEMA_CHARACTERS, "characters")
            if isinstance(value, dict | list | tuple):
                waiting.append((value, depth + 1))


def _pairs(place: str, holder: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(holder, dict):
        yield from (("", value) for value in holder)
        return
    for key, value in holder.items():
        if not isinstance(key, str):
            raise RequestError(f"{place} has the key {shown(key)}, which is no text")
        yield key, value


def _num_characters(place: str, value: object) -> int:
    is_plain = value is None or isinstance(value, bool | str | dict | list | tuple)
    is_number = (isinstance(value, int) and value.bit_length() <= MAX_BITS) or (
        isinstance(value, float) and math.isfinite(value)
    )
    if not is_plain and not is_number:
        raise RequestError(f"{place} holds {shown(value)}, which JSON cannot hold")
    return len(value) if isinstance(value, str) else 1


def _choices(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    found = _parsed("choice", value) if isinstance(value, str) and value.startswith("[") else value
    if isinstance(found, list | tuple):
        _check_size(f"{_PLACE}.choice", len(found), MAX_CHOICES, "texts")
    if not isinstance(found, list | tuple) or not found:
        raise RequestError(f"{_PLACE}.choice={shown(value)} must be a list of texts, none of them empty")
    for place, one in enumerate(found):
        if not isinstance(one, str) or not one:
            raise RequestError(f"{_PLACE}.choice[{place}]={shown(one)} must be a text that is not empty")
    _check_size(f"{_PLACE}.choice", sum(map(len, found)), MAX_CHOICE_CHARACTERS, "characters in all")
    _check_unicode("choice", "".join(found))
    return tuple(dict.fromkeys(found))


def _check_text(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise RequestError(f"{_PLACE}.{name}={shown(value)} must be a text that is not empty")
    _check_size(f"{_PLACE}.{name}", len(value), most, "characters")
    _check_unicode(name, value)


def _check_after(value: object) -> None:
    if value is None:
        return
    if isinstance(value, str):
        _check_text("after", value, MAX_AFTER_CHARACTERS)
    elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"{_PLACE}.after={shown(value)} must be a text or a token id")


def _check_size(place: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(f"{place} has more than {most} {what}, which is the most it may have")


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{_PLACE}.{name} holds half a surrogate pair, which is no text") from None
