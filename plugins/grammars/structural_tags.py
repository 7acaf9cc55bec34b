"""Converts structural tags to llguidance's form: text with tags whose contents have a form, as XGrammar and vLLM write
them.

The older form has `structures` and `triggers`; in the newer form `format` is an element of one of the types below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from llguidance import LLMatcher

from hookline.core.errors import RequestError, clipped, shown

UNSATISFIABLE = "Unsatisfiable"
"""The beginning of llguidance's message about a schema that no value fits."""
TEXT = "TEXT: /(.|\\n)*/"
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def as_grammar(tags: dict[str, Any], schema: Callable[[str], str], lark: Callable[[str], str]) -> str:
    """The grammar of structural tags. schema: converts a JSON schema to a grammar's text. lark: makes a grammar of text
    in Lark's form.

    Raises: RequestError for invalid structural tags.
    """
    writer = _Writer(schema, lark)
    if "format" in tags:
        start = writer.element(tags["format"], "format", is_last=True)
    else:
        start = writer.triggered_tags(
            {"triggers": tags.get("triggers"), "tags": _of_structures(tags.get("structures"), tags.get("triggers"))},
            "",
        )
    rules = "\n".join(["%llguidance {}", f"start: {start}", TEXT, *writer.rules])
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": rules}, *writer.grammars]})


def _of_structures(structures: Any, triggers: Any) -> list[Any]:
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise RequestError('it needs "structures", a list of tags, and "triggers", a list of texts that begin them')
    for one in structures:
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str) or not isinstance(one.get("end"), str):
            raise RequestError('each of "structures" needs the texts "begin" and "end", and a "schema"')
        if not isinstance(one.get("schema"), dict | bool):
            raise RequestError('the "schema" of a tag is a mapping')
    return structures


class _AllowsNothingError(RequestError):
    """A schema that no value fits."""


class _Writer:
    """Rules in Lark's form, and the grammars that they refer to."""

    def __init__(self, schema: Callable[[str], str], lark: Callable[[str], str]) -> None:
        self._schema, self._lark = schema, lark
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._numbers = count()

    def element(self, element: Any, place: str, *, is_last: bool) -> str:
        """The right side of the rule for an element. is_last: whether nothing follows it."""
        kind = element.get("type") if isinstance(element, dict) else None
        if kind == "const_string":
            return self._rule(_literal(_text(element, "value", place)))
        if kind == "json_schema":
            made = self._schema(json.dumps(_schema_of(element, "json_schema", place)))
            if (fault := LLMatcher.validate_grammar(made)).startswith(UNSATISFIABLE):
                raise _AllowsNothingError(fault)
            return self._grammar(made)
        if kind == "regex":
            return self._grammar(LLMatcher.grammar_from_regex(ascii_regex(_text(element, "pattern", place))))
        if kind == "grammar":
            return self._grammar(
                json.dumps({"grammars": [{"lark_grammar": self._lark(_text(element, "grammar", place))}]})
            )
        if kind == "sequence":
            parts = _elements(element, "elements", place)
            last = len(parts) - 1
            return self._rule(
                " ".join(
                    self.element(one, f"{place}.elements[{number}]", is_last=is_last and number == last)
                    for number, one in enumerate(parts)
                )
            )
        if kind == "or":
            parts = _elements(element, "elements", place)
            return self._any(lambda n, one: self.element(one, f"{place}.elements[{n}]", is_last=is_last), parts)
        if kind == "tag":
            return self._rule(f"{_literal(_text(element, 'begin', place))} {self._inside(element, place)}")
        if kind == "tags_with_separator":
            return self._separated(element, place)
        if kind == "triggered_tags" and is_last:
            return self.triggered_tags(element, place)
        if kind == "any_text" and is_last:
            return "TEXT"
        if kind in ("any_text", "triggered_tags"):
            raise RequestError(f"{place}: {kind} stands in front of another element; only a tag may end free text")
        known = "const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags, "
        raise RequestError(f"{place}.type={shown(kind)} is not one of {known}tags_with_separator")

    def triggered_tags(self, element: Any, place: str) -> str:
        """Free text; after a trigger, the tag continues that begins with it."""
        triggers = element.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
            raise RequestError('it needs "structures", a list of tags, and "triggers", a list of texts that begin them')
        by_trigger: dict[str, list[str]] = {}
        fault: RequestError | None = None
        for number, tag in enumerate(_elements(element, "tags", place)):
            begin = _text(tag, "begin", f"{place}.tags[{number}]")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise RequestError(f'no trigger begins the tag "{clipped(begin)}"')
            try:
                inside = self._inside(tag, f"{place}.tags[{number}]")
            except _AllowsNothingError as error:
                fault = error
                continue
            by_trigger.setdefault(trigger, []).append(f"{_literal(begin[len(trigger) :])} {inside}".strip())
        if fault is not None and not by_trigger:
            raise fault
        calls = []
        for trigger, rests in by_trigger.items():
            head = f"r{next(self._numbers)}"
            self.rules.append(f"{head}[lazy]: TEXT {_literal(trigger)}")
            calls.append(f"{head} ({' | '.join(rests)})")
        tags = self._rule(" | ".join(calls))
        if element.get("stop_after_first"):
            return tags if element.get("at_least_one") else self._rule(f"{tags} | TEXT")
        return self._rule(f"{tags}{'+' if element.get('at_least_one') else '*'} TEXT")

    def _separated(self, element: Any, place: str) -> str:
        tags = [{**tag, "type": "tag"} if isinstance(tag, dict) else tag for tag in _elements(element, "tags", place)]
        one = self._any(lambda n, tag: self.element(tag, f"{place}.tags[{n}]", is_last=False), tags)
        separator = element.get("separator", "")
        if not isinstance(separator, str):
            raise RequestError(f"{place}.separator={shown(separator)} is not a text")
        further = "" if element.get("stop_after_first") else f" ({_literal(separator)} {one})*"
        return self._rule(f"{one}{further}" if element.get("at_least_one") else f"({one}{further})?")

    def _inside(self, tag: Any, place: str) -> str:
        """The contents of a tag after its beginning, and its end."""
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) and ends else [ends]
        if not all(isinstance(one, str) for one in ends):
            raise RequestError(f"{place}.end={shown(tag.get('end'))} is not a text")
        end = " | ".join(filter(None, map(_literal, ends)))
        content = tag.get("content", {"type": "json_schema", "json_schema": tag.get("schema")})
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            name = f"r{next(self._numbers)}"
            self.rules.append(f"{name}[lazy]: TEXT ({end})")
            return name
        inside = self.element(content, f"{place}.content", is_last=False)
        return f"{inside} ({end})" if end else inside

    def _any(self, write: Callable[[int, Any], str], alternatives: Sequence[Any]) -> str:
        """A rule for one of several elements. An element that allows nothing is left out, as among the schemas of
        `anyOf`, unless no element allows anything.
        """
        found: list[str] = []
        fault: RequestError | None = None
        for number, one in enumerate(alternatives):
            try:
                found.append(write(number, one))
            except _AllowsNothingError as error:
                fault = error
        if fault is not None and not found:
            raise fault
        return self._rule(" | ".join(found))

    def _rule(self, right: str) -> str:
        name = f"r{next(self._numbers)}"
        self.rules.append(f"{name}: {right}")
        return name

    def _grammar(self, made: str) -> str:
        name = f"g{next(self._numbers)}"
        self.grammars += [{**one, "name": name} for one in json.loads(made)["grammars"]]
        return f"@{name}"


def ascii_regex(pattern: str) -> str:
    """The pattern with ASCII digits and words alone, as in JSON schemas and with other engines."""
    return _ESCAPED.sub(lambda escaped: _CLASSES.get(escaped[1], escaped[0]), pattern)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _text(element: Any, key: str, place: str) -> str:
    value = element.get(key) if isinstance(element, dict) else None
    if not isinstance(value, str):
        raise RequestError(f"{place}.{key}={shown(value)} is not a text")
    return value


def _schema_of(element: dict[str, Any], key: str, place: str) -> Any:
    value = element.get(key)
    if not isinstance(value, dict | bool):
        raise RequestError(f"{place}.{key}={shown(value)} is not a JSON schema")
    if value is False:
        raise _AllowsNothingError(f"{place}.{key}=false is a schema that no value fits")
    return {} if value is True else value  # llguidance takes options for a mapping alone


def _elements(element: Any, key: str, place: str) -> Sequence[Any]:
    value = element.get(key)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{place}.{key}={shown(value)} is not a list with something in it")
    return value
