"""What a grammar holds tool calls to, and how the JSON of forced ones is read.

Forced, a model writes bare JSON, whatever its own form of calls is: the arguments of a named function, or a list of
calls, `[{"name": ..., "parameters": {...}}]`. Where it may choose, it writes calls in its own form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline.core.contracts import Arguments, CallForm, OutputParser, ParsedPart, Text, ToolCall
from hookline.core.json_schemas import JoinedSchemas, SchemaRules
from hookline.core.parsing import JsonEnd

_HEAD = re.compile(r'[\[\s,]*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"parameters"\s*:\s*(?=\{)')
"""A call up to its arguments: the schema leaves no other form."""
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "$id", "$comment", "strict"))
"""Keywords of a function's parameters that declare none."""


def named_schema(tool: Mapping[str, Any], place: str, joined: JoinedSchemas) -> Any:
    """What a function's arguments must be, as a schema of its own. place: of its parameters.

    Raises: SchemaError for a strict function whose schema cannot be held.
    """
    return joined.whole(_arguments(tool, place, joined))


def required_schema(
    tools: Sequence[Mapping[str, Any]], places: Sequence[str], joined: JoinedSchemas, *, one_only: bool = False
) -> Any:
    """A list of at least one call, of any of the functions. places: of their parameters.

    Raises: as `named_schema`.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "parameters": _arguments(tool, place, joined)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, places, strict=True)
    ]
    most = {"maxItems": 1} if one_only else {}
    return joined.whole({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})


def call_tags(
    tools: Sequence[Mapping[str, Any]],
    places: Sequence[str],
    form: Callable[[str], CallForm],
    rules: SchemaRules,
    dropped: list[str],
) -> tuple[list[dict[str, Any]], CallForm]:
    """Calls as the model writes them, as tags of a structural tag, and how the first function is called.

    dropped: is added what the schemas leave out.
    Raises: as `named_schema`.
    """
    tags = []
    for tool, place in zip(tools, places, strict=True):
        written, joined = form(tool["name"]), JoinedSchemas(rules)
        content = {"type": "json_schema", "json_schema": named_schema(tool, place, joined)}
        tags.append({"type": "tag", "begin": written.begin, "content": content, "end": written.end})
        dropped += joined.dropped
    return tags, form(tools[0]["name"])


def _arguments(tool: Mapping[str, Any], place: str, joined: JoinedSchemas) -> Any:
    """They are an object, and it is empty if nothing is declared."""
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
    """Every text is the arguments of one function."""

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
    """A list of calls, each given as it comes."""

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
        is_call = self._has_called or kept.lstrip().startswith("[")  # one that was cut off is no text for the user
        return [] if is_call or not kept else [Text(kept)]
