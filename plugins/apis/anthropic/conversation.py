"""Converts messages and tools of Anthropic's API into the form that chat templates and models expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hookline.core.errors import shown
from hookline.core.serving import PLACE, ClientTool, Shape, check_names, decoded, invalid, text_of_part

Values = dict[str, Any]
_TEXT: Values = {"type": "string"}
_COMMANDS = ("view", "create", "str_replace", "insert")
_EDIT: Values = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "The whole file, to create it."},
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer", "description": "The line behind which to insert."},
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_BY_CLIENT: dict[str, tuple[str, Values, tuple[str, ...]]] = {
    "bash": (
        "Runs a command in a shell that stays open on the user's machine, and returns its output.",
        {"command": _TEXT, "restart": {"type": "boolean", "description": "Begin with a new shell."}},
        (),
    ),
    "text_editor": (
        "Views, creates and edits files on the user's machine.",
        {"command": {"enum": list(_COMMANDS)}, **_EDIT},
        ("command", "path"),
    ),
    "memory": (
        "Views, creates, edits, deletes and renames files of a memory below /memories.",
        {"command": {"enum": [*_COMMANDS, "delete", "rename"]}, **_EDIT, "old_path": _TEXT, "new_path": _TEXT},
        ("command",),
    ),
}
"""Tools that Anthropic defines and the client runs: beginning of the type -> description, inputs, required inputs."""
_NOT_READ = ("server_tool_use", "mcp_tool_use", "container_upload", "redacted_thinking", "fallback", "browser_state")
"""Types of content blocks that only Anthropic's own servers use. Results of their tools have types of their own."""

_OTHER_NAMES = ("parameters", "inputSchema", "parametersJsonSchema", "json_schema", "schema", "args_schema")
"""Names that other APIs have for a tool's input_schema."""
TOOL = dict.fromkeys(("type", "name", "description", "input_schema", "strict", "cache_control"))
"""The known fields of a tool that has its own schema."""
_TEXT_SHAPE = dict.fromkeys(("type", "text", "cache_control"))
_SHAPES: dict[str, Shape] = {
    "text": {},
    "thinking": dict.fromkeys(("thinking", "signature")),
    "tool_use": dict.fromkeys(("id", "name", "input")),
    "tool_result": {"tool_use_id": None, "content": lambda block: _TEXT_SHAPE if block.get("type") == "text" else None},
    "document": {"title": None, "context": None, "source": dict.fromkeys(("type", "media_type", "data", "content"))},
    "search_result": {"title": None, "source": None, "content": _TEXT_SHAPE},
}
"""The known fields of blocks that are read, by their type."""


def block_shape(block: Mapping[str, Any]) -> Shape | None:
    """The known fields of a content block; None for a block of another kind, which is not looked into."""
    kind = block.get("type")
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    return None if shape is None else {**_TEXT_SHAPE, **shape}


def client_tools(tools: list[Any], ignored: list[str]) -> Iterator[ClientTool]:
    """The tools that the client runs. ignored: gets the names of the others.

    Raises: ApiError for an invalid tool.
    """
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(f"{place}={shown(tool)} is not a tool with a name and an input_schema", "tools")
        by_client = _BY_CLIENT.get(kind.rstrip("0123456789").removesuffix("_"))
        found = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        if kind == "custom":
            check_names(tool, TOOL, place)
            if not isinstance(tool.get("name"), str):
                raise invalid(f"{place}={shown(tool)} is not a tool with a name and an input_schema", "tools")
        other = next((key for key in _OTHER_NAMES if tool.get(key)), None)
        if kind == "function" or (kind == "custom" and "input_schema" not in tool and other is not None):
            raise invalid(f"{place} has its parameters where this endpoint has input_schema", "tools")
        if kind == "custom" or "input_schema" in tool:
            schema = tool.get("input_schema")
            found |= {} if schema is None else {"parameters": schema}
        elif by_client is not None:
            description, inputs, required = by_client
            schema = {"type": "object", "properties": inputs, "required": list(required), "additionalProperties": False}
            found |= {"description": description, "parameters": schema}
        else:
            ignored.append(f"tools.{kind}")
            continue
        yield ClientTool(found, place, name=found.get("name"))


def as_messages(message: Any, index: int, ignored: list[str]) -> Iterator[Values]:
    """A message in the templates' form, in which the results of tools are messages of their own.

    ignored: gets the places of blocks that no template reads.
    Raises: ApiError for a message without readable text.
    """
    place = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(f"{place}={shown(message)} is not an object with role and content", place)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{place}.role={shown(role)} is not user or assistant", place)
    if not isinstance(content, list):
        yield {"role": role, "content": text_of_blocks(content, f"{place}.content", ignored)}
        return
    texts: list[str] = []
    thoughts: list[Any] = []
    found: Values = {"role": role}
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        block_place = f"{place}.content[{number}]"
        if kind == "tool_result":
            text = text_of_blocks(block.get("content"), f"{block_place}.content", ignored)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise invalid(f"{block_place}={shown(block)} has no name of a tool", block_place)
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function, PLACE: f"{block_place}.input"}
            found.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        else:
            texts += _texts(block, block_place, ignored)
    if thoughts:
        found["reasoning_content"] = "".join(one if isinstance(one, str) else shown(one) for one in thoughts)
    if texts or len(found) > 1:
        yield {**found, "content": "\n".join(texts)}


def text_of_blocks(content: Any, place: str, ignored: list[str]) -> str:
    """The text of a content, which is a text, a list of blocks, or null. Arguments and errors as in `as_messages`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place}={shown(content)} is neither a text nor a list of blocks", place)
    return "\n".join(text for number, one in enumerate(content) for text in _texts(one, f"{place}[{number}]", ignored))


def _texts(block: Any, place: str, ignored: list[str]) -> list[str]:
    """The texts of a block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        return [text_of_part(block, place)]
    if kind in _NOT_READ or kind.endswith("_tool_result"):
        ignored.append(f"messages.{kind}")
        return []
    if kind == "document":
        head = [block[key] for key in ("title", "context") if isinstance(block.get(key), str)]
        return [*head, _text_of_source(block.get("source"), f"{place}.source", ignored)]
    if kind == "search_result":
        head = [block[key] for key in ("title", "source") if isinstance(block.get(key), str)]
        return [*head, text_of_blocks(block.get("content"), f"{place}.content", ignored)]
    if kind == "tool_reference":
        return [str(block.get("tool_name", ""))]
    if kind == "compaction":
        return [text_of_blocks(block.get("content"), f"{place}.content", ignored)]
    return [text_of_part(block, place)]


def _text_of_source(source: Any, place: str, ignored: list[str]) -> str:
    given: Mapping[str, Any] = source if isinstance(source, dict) else {}
    kind, data, is_plain = given.get("type"), given.get("data"), given.get("media_type") == "text/plain"
    if kind == "content":
        return text_of_blocks(given.get("content"), f"{place}.content", ignored)
    if kind == "text" and isinstance(data, str):
        return data
    if kind == "base64" and is_plain and isinstance(data, str):
        return decoded(data, f"{place}.data")
    of_type = given.get("media_type", kind)
    raise invalid(f"{place}: this model reads text only, and the document is of type {shown(of_type)}", place)
