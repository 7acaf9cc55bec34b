"""The schemas and grammars of tool calls, and parsers for calls that were forced.

A forced call is bare JSON, whatever form the model would write calls in by itself: the arguments of a named function,
or a list of calls, `[{"name": ..., "parameters": {...}}]`. Where the model may choose whether to call, it writes calls
in its own form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline.core.contracts import Arguments, CallForm, OutputParser, ParsedPart, Text, ToolCall
from hookline.core.errors import RequestError
from hookline.core.json_schemas import JoinedSchemas, SchemaError, SchemaRules
from hookline.core.parsing import JsonEnd
from hookline.core.structured_outputs import check_tree

AROUND_CALLS = 6
"""Mappings and lists around a tool's schema, below the outermost one, where it is part of a grammar of several."""
_HEAD = re.compile(r'[\[\s,]*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"parameters"\s*:\s*(?=\{)')
"""The beginning of a call, up to its arguments; the schema allows no other form."""
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "$id", "$comment", "strict"))
"""Keywords that declare a function's parameters. A schema without any of them declares no parameters."""


def named_schema(tool: Mapping[str, Any], place: str, joined: JoinedSchemas) -> Any:
    """The schema of a named function's arguments. place: of its parameters in the request.

    Raises: SchemaError for a strict function whose schema is not supported.
    """
    return joined.whole(_arguments(tool, place, joined))


def required_schema(
    tools: Sequence[Mapping[str, Any]], places: Sequence[str], joined: JoinedSchemas, *, one_only: bool = False
) -> Any:
    """The schema of a list of calls, at least one, of any of the functions. places: of their parameters in the request.

    Raises: as `named_schema`.
    """
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "parameters": _arguments(tool, place, joined)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, places, strict=True)
    ]
    for place, call in zip(places, calls, strict=True):
        _check_depth(call["properties"]["parameters"], place)
    most = {"maxItems": 1} if one_only else {}
    return joined.whole({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})


def call_tags(
    tools: Sequence[Mapping[str, Any]],
    places: Sequence[str],
    form: Callable[[str], CallForm],
    rules: SchemaRules,
    dropped: list[str],
) -> tuple[list[dict[str, Any]], CallForm]:
    """Tags of a structural tag for calls in the model's own form, and how a call of the first function begins.

    dropped: gets the places of the keywords that the schemas leave out.
    Raises: as `named_schema`.
    """
    tags = []
    for tool, place in zip(tools, places, strict=True):
        written, joined = form(tool["name"]), JoinedSchemas(rules)
        content = {"type": "json_schema", "json_schema": named_schema(tool, place, joined)}
        _check_depth(content["json_schema"], place)
        tags.append({"type": "tag", "begin": written.begin, "content": content, "end": written.end})
        dropped += joined.dropped
    return tags, form(tools[0]["name"])


def _check_depth(schema: Any, place: str) -> None:
    """Refuse a schema that would be too deep in a schema of all calls, whose error could not say which tool it is."""
    nested = schema
    for _ in range(AROUND_CALLS):
        nested = [nested]
    try:
        check_tree(place, {"": nested})
    except RequestError as error:
        told = str(error).removeprefix(place)
        raise SchemaError(place, f"{told}: a grammar of calls has {AROUND_CALLS} more around it") from None


def _arguments(tool: Mapping[str, Any], place: str, joined: JoinedSchemas) -> Any:
    """A function's parameters as a schema: an object, without properties if the function declares none."""
    given = {name: value for name, value in (tool.get("parameters") or {}).items() if value is not None}
    if _SAYS_NOTHING.issuperset(given):
        given["properties"] = {}
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        joined.leave_out("type", kind, place, "must be object", strict=tool.get("strict") is True)
    for keyword, values in (("const", [given.get("const")]), ("enum", given.get("enum"))):
        if keyword in given and not (isinstance(values, list) and any(isinstance(one, Mapping) for one in values)):
            joined.leave_out(keyword, given.pop(keyword), place, "is no object", strict=tool.get("strict") is True)
    return joined.add({**given, "type": "object"}, place, strict=tool.get("strict") is True, mends=True)


class NamedCall(OutputParser):
    """Parses an answer which is nothing but the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Sequence[ParsedPart]:
        """See OutputParser."""
        name, self._name = self._name, None
        return [ToolCall(name), Arguments(text)] if name is not None else [Arguments(text)]

    def finish(self) -> Sequence[ParsedPart]:
        """See OutputParser."""
        return []


class RequiredCalls(OutputParser):
    """Parses a list of calls, and returns each call as soon as it is complete."""

    def __init__(self) -> None:
        self._kept = ""
        self._json: JsonEnd | None = None
        self._has_called = False

    def push(self, text: str) -> Sequence[ParsedPart]:
        """See OutputParser."""
        self._kept += text
        parts: list[ParsedPart] = []
        while self._step(parts):
            pass
        return parts

    def _step(self, parts: list[ParsedPart]) -> bool:
        if self._json is None:
            head = _HEAD.match(self._kept[self._kept.find("}") + 1 :] if self._has_called else self._kept)
            if head is None:
                return False
            self._kept, self._json, self._has_called = head.string[head.end() :], JsonEnd(), True
            parts.append(ToolCall(head[1]))
        found, rest = self._json.arguments(self._kept)
        parts += found
        self._kept = rest or ""
        if rest is not None:
            self._json = None
        return rest is not None

    def finish(self) -> Sequence[ParsedPart]:
        """See OutputParser."""
        kept, self._kept = self._kept, ""
        # An incomplete call is not shown to the user as text.
        is_call = self._has_called or kept.lstrip().startswith("[")
        return [] if is_call or not kept else [Text(kept)]
