"""Tool calls that a request forces: what the completion is held to, and how its JSON is read.

Forced, a model writes bare JSON, whatever its own form of calls is: the arguments of a named function, or a list of
calls, `[{"name": ..., "parameters": {...}}]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.core.contracts import Arguments, OutputParser, ParsedPart, Text, ToolCall
from hookline.core.errors import shown
from hookline.core.parsing import JsonEnd
from hookline.core.serve.errors import invalid

_HEAD = re.compile(r'[\[\s,]*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"parameters"\s*:\s*(?=\{)')
"""A call up to its arguments: the schema leaves no other form."""
_DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps what its references name, from its root."""


def named_schema(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """What a function's arguments must be."""
    return next(_parameters(tool) for tool in tools if tool["name"] == name)


def required_schema(tools: Sequence[Mapping[str, Any]], *, one_only: bool = False) -> dict[str, Any]:
    """A list of at least one call, of any of the functions.

    Raises: ApiError with status 400 if two of them define different things under one name.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "parameters": _parameters(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    most = {"maxItems": 1} if one_only else {}
    definitions = {place: found for place in _DEFINITIONS if (found := _definitions(tools, place))}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions}


def _definitions(tools: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """What all functions' schemas define there, for the root of one schema."""
    found: dict[str, Any] = {}
    for tool in tools:
        defined = _parameters(tool).get(place)
        for name, schema in defined.items() if isinstance(defined, Mapping) else ():
            if found.setdefault(name, schema) != schema:
                raise invalid(f"tools: two of them define {shown(name)} in {place}, and not alike; rename one", "tools")
    return found


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool.get("parameters") or {"type": "object", "properties": {}}


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
