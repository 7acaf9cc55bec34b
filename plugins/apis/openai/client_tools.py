"""Converts tools of OpenAI's APIs into functions that any model can call, and calls into the items that clients expect.

A tool that the client runs is a function for the model, whatever its kind: a custom tool's function has one text
argument, a namespace's functions have the namespace in front of their names, a shell and a patch tool have the fields
of their items. Tools that only a provider can run (a web search, an interpreter, …) are not shown to the model, and are
named as ignored fields.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from hookline.core.errors import shown
from hookline.core.serving import (
    AUTO,
    NONE,
    REQUIRED,
    ClientTool,
    Shape,
    TextGrammar,
    Tools,
    check_names,
    checked_tools,
    invalid,
)

Values = dict[str, Any]
FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
LOCAL_SHELL, SHELL, APPLY_PATCH = "local_shell", "shell", "apply_patch"
_FUNCTION = ("name", "description", "parameters", "strict")
_OTHER_NAMES = ("input_schema", "inputSchema", "parametersJsonSchema", "json_schema", "schema", "args_schema")
"""Names that other APIs have for a function's parameters."""
_TEXT: Values = {"type": "string"}
_SECONDS: Values = {"timeout_ms": {"type": "integer", "description": "Milliseconds that the command may take."}}


def _object(properties: Values, *required: str) -> Values:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_BY_CLIENT: dict[str, Values] = {
    LOCAL_SHELL: {
        "name": LOCAL_SHELL,
        "description": "Runs a command on the user's machine and returns its output.",
        "parameters": _object(
            {
                "command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."},
                "working_directory": _TEXT,
                **_SECONDS,
            },
            "command",
        ),
    },
    SHELL: {
        "name": SHELL,
        "description": "Runs shell commands on the user's machine and returns their output.",
        "parameters": _object({"commands": {"type": "array", "items": _TEXT}, **_SECONDS}, "commands"),
    },
    APPLY_PATCH: {
        "name": APPLY_PATCH,
        "description": "Creates, updates or deletes a file; diff is in the V4A form, and a delete has none.",
        "parameters": _object(
            {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": _TEXT, "diff": _TEXT},
            "type",
            "path",
        ),
    },
}
"""Kinds of client-run tools that requests do not define -> the function for the model."""
_ITEMS: dict[str, tuple[str, str]] = {
    FUNCTION: ("function_call", "fc_"),
    CUSTOM: ("custom_tool_call", "ctc_"),
    LOCAL_SHELL: ("local_shell_call", "lsc_"),
    SHELL: ("shell_call", "sh_"),
    APPLY_PATCH: ("apply_patch_call", "apc_"),
}
"""Kind of a tool -> type of its calls, and prefix of their ids."""
CALLS = {item: kind for kind, (item, _) in _ITEMS.items()}
"""Type of an item with a call -> kind of its tool."""
OUTPUTS = frozenset(f"{item}_output" for item in CALLS)
"""Types of items with the output of a call."""


def read_tools(given: Sequence[Any], ignored: list[str]) -> list[ClientTool]:
    """The tools that a request gives, as it names them. ignored: gets the kinds of tools that no client runs.

    Raises: ApiError for an unknown form of tool.
    """
    return [tool for index, one in enumerate(given) for tool in _read(one, f"tools[{index}]", ignored)]


def chosen_tools(
    given: Sequence[ClientTool], choice: Any, *, calls_one: bool, schema_key: str, ignored: Sequence[str]
) -> Tools:
    """The tools of a request (see `read_tools`) and the choice among them.

    Raises: ApiError for an unknown form of choice.
    """
    told = list(ignored)
    chosen, allowed = _chosen(choice, _apart(given), told)
    if chosen == REQUIRED and len(allowed) == 1 and allowed[0].grammar is not None:
        chosen = f"={allowed[0].function['name']}"  # among several calls, a text could not follow its grammar
    for index, tool in enumerate(allowed):
        if tool.grammar is not None and chosen == f"={tool.function['name']}":
            allowed[index] = replace(tool, is_plain=True)
        elif tool.grammar is not None and tool.grammar.pattern is None:
            told.append(f"{tool.place}.format")
    return checked_tools(allowed, chosen, calls_one=calls_one, schema_key=schema_key, ignored=tuple(told))


def _apart(tools: Sequence[ClientTool]) -> list[ClientTool]:
    """The tools, of which those that requests do not define are called otherwise than those that they do define."""
    defined = defined_names(tools)
    return [
        replace(tool, function={**tool.function, "name": _own_name(tool.kind, defined)})
        if tool.kind in _BY_CLIENT
        else tool
        for tool in tools
    ]


def defined_names(tools: Sequence[ClientTool]) -> Set[str]:
    """The names, for the model, of those tools that a request defines itself."""
    return {str(tool.function.get("name")) for tool in tools if tool.kind not in _BY_CLIENT}


def _own_name(kind: str, defined: Set[str]) -> str:
    """The name, for the model, of a tool that requests do not define, beside the names that this request defines."""
    name = kind
    while name in defined:
        name += "_tool"
    return name


def _read(tool: Any, place: str, ignored: list[str], namespace: str | None = None) -> Iterator[ClientTool]:
    """The functions of a tool. The chat API has a tool's definition below its kind, the responses API beside it."""
    kind = (tool.get("type") or FUNCTION) if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{place}={shown(tool)} is not a tool with a type", "tools")
    own = tool[kind] if isinstance(tool.get(kind), dict) else tool
    if kind == NAMESPACE and namespace is None:
        if not isinstance(own.get("name"), str) or not isinstance(own.get("tools"), list):
            raise invalid(f"{place}={shown(tool)} is not a namespace with a name and tools", "tools")
        for index, inner in enumerate(own["tools"]):
            yield from _read(inner, f"{place}.tools[{index}]", ignored, own["name"])
    elif kind in (FUNCTION, CUSTOM):
        name = own.get("name")
        if not isinstance(name, str):
            raise invalid(f"{place}={shown(tool)} is not a function with a name", "tools")
        if kind == FUNCTION:
            own_place = place if own is tool else f"{place}.{kind}"
            check_names(own, ("type", *_FUNCTION), own_place)
            other = next((key for key in _OTHER_NAMES if own.get(key)), None)
            if other is not None and "parameters" not in own:
                raise invalid(f"{own_place}.{other} is not known; use parameters", "tools")
        found = {key: own[key] for key in _FUNCTION if own.get(key) is not None}
        grammar = None
        if kind == CUSTOM:
            of_text, grammar = _of_text(own, f"{place if own is tool else f'{place}.{kind}'}.format")
            found |= of_text
        if namespace is not None:
            found["name"] = full_name(namespace, name)
        yield ClientTool(found, place, kind, name, namespace, grammar)
    elif kind in _BY_CLIENT and (own.get("environment") or {}).get("type", "local") == "local":
        yield ClientTool(_BY_CLIENT[kind], place, kind, kind)
    else:
        ignored.append(f"tools.{kind}")


def tool_shape(tool: Mapping[str, Any]) -> Shape | None:
    """The known fields of a function tool, in the nested form of chats or the flat form of responses."""
    function = dict.fromkeys(_FUNCTION)
    if (tool.get("type") or FUNCTION) != FUNCTION:
        return None
    return {"type": None, FUNCTION: function} if FUNCTION in tool else {"type": None, **function}


def full_name(namespace: str | None, name: str) -> str:
    """The name of a namespace's function for the model."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _of_text(tool: Values, place: str) -> tuple[Values, TextGrammar | None]:
    """The description and the parameters of a custom tool's function, and the grammar of its text. place: of the tool's
    format.

    Raises: ApiError for a grammar of no known syntax.
    """
    form = tool.get("format") or {}
    kind = form.get("type") if isinstance(form, dict) else ""
    if kind not in (None, "text", "grammar"):
        raise invalid(f"{place}={shown(form)} is not of type text or grammar", "tools")
    grammar = form.get("grammar", form) if kind == "grammar" else {}
    given = grammar if isinstance(grammar, dict) else {}
    syntax, definition = given.get("syntax"), given.get("definition")
    if kind == "grammar" and not (syntax in ("lark", "regex") and isinstance(definition, str)):
        raise invalid(f"{place}={shown(form)} needs a definition, and a syntax, which is lark or regex", "tools")
    text, told, held = dict(_TEXT), [tool["description"]] if tool.get("description") else [], None
    if kind == "grammar":
        place = f"{place}.definition" if given is form else f"{place}.grammar.definition"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
            held = TextGrammar({"regex": definition}, place, text["pattern"])
        else:
            told.append(f"The input follows this grammar:\n{definition}")
            held = TextGrammar({"grammar": definition}, place)
    described = {"description": "\n\n".join(map(str, told))} if told else {}
    return described | {"parameters": _object({"input": text}, "input")}, held


def _chosen(choice: Any, tools: list[ClientTool], ignored: list[str]) -> tuple[str, list[ClientTool]]:
    """The tool choice in the form of `Tools`, and the tools that may be called. tool_choice: in the form of chats or
    responses.
    """
    if choice is None or choice in (AUTO, NONE, REQUIRED):
        return choice or AUTO, tools
    kind = choice.get("type", FUNCTION) if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = choice.get(kind, choice)
        mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        if mode not in (AUTO, REQUIRED) or not isinstance(listed, list):
            raise invalid(f"tool_choice={shown(choice)} needs a mode, auto or required, and tools", "tool_choice")
        names = {id(tool) for one in listed for tool in _named(one, tools, ignored)}
        return mode, [tool for tool in tools if id(tool) in names]
    if isinstance(kind, str) and kind in CALLABLE:
        found = _named(choice, tools, ignored)
        if len({tool.function["name"] for tool in found}) > 1:
            raise invalid(f"tool_choice={shown(choice)} names a tool of several namespaces; say which", "tool_choice")
        return f"={found[0].function['name']}", tools
    if isinstance(kind, str) and f"tools.{kind}" in ignored:
        told = f"tool_choice={shown(choice)} names a tool that only a provider runs; choose auto, or a function"
        raise invalid(told, "tool_choice")
    form = "auto, none, required, allowed_tools, or a function, a custom tool, a shell or apply_patch with its name"
    raise invalid(f"tool_choice={shown(choice)} is not {form}", "tool_choice")


CALLABLE = (FUNCTION, CUSTOM, *_BY_CLIENT)
"""Kinds of tools that the model can call."""


def _named(reference: Any, tools: Sequence[ClientTool], ignored: list[str]) -> list[ClientTool]:
    """The tools that a part of tool_choice names: at least one, unless the named tool is not run here."""
    kind = reference.get("type", FUNCTION) if isinstance(reference, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"tool_choice: {shown(reference)} is not a tool with a type", "tool_choice")
    own = reference[kind] if isinstance(reference.get(kind), dict) else reference
    name, namespace = own.get("name", kind if kind in _BY_CLIENT else None), own.get("namespace")
    if kind == NAMESPACE:
        found = [tool for tool in tools if tool.namespace == name]
    elif kind not in CALLABLE:
        ignored.append(f"tool_choice.{kind}")
        return []
    else:
        exact = [tool for tool in tools if tool.function.get("name") == name and namespace is None]
        alike = [tool for tool in tools if tool.name == name and namespace in (None, tool.namespace)]
        found = [tool for tool in exact or alike if tool.kind == kind]
        found = found or [tool for tool in alike if tool.kind == kind] or exact or alike
    if name is None:
        raise invalid(f"tool_choice: {shown(reference)} has no name of a tool", "tool_choice")
    if not isinstance(name, str) or not found:
        raise invalid(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")
    return found


def call_of(item: Mapping[str, Any], place: str, defined: Set[str]) -> tuple[str, Any]:
    """The function and the arguments of an earlier call, as the model would have written them. defined: see
    `defined_names`.

    Raises: ApiError for a call without a name.
    """
    kind = CALLS[item["type"]]
    if kind in _BY_CLIENT:
        values = item.get("operation" if kind == APPLY_PATCH else "action")
        given = values if isinstance(values, dict) else {}
        names = _BY_CLIENT[kind]["parameters"]["properties"]
        return _own_name(kind, defined), {name: given[name] for name in names if given.get(name) is not None}
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str):
        raise invalid(f"{place}={shown(item)} has no name of a {kind}", place)
    arguments = {"input": item.get("input") or ""} if kind == CUSTOM else item.get("arguments")
    return full_name(namespace if isinstance(namespace, str) else None, name), arguments


class Call:
    """A call as an item of a response, while its arguments are generated."""

    def __init__(self, tool: ClientTool | None, name: str) -> None:
        self.kind = FUNCTION if tool is None else tool.kind
        type, prefix = _ITEMS[self.kind]
        self.item: Values = {"type": type, "id": f"{prefix}{secrets.token_hex(12)}"}
        self.item |= {"call_id": f"call_{secrets.token_hex(12)}", "status": "in_progress"}
        if self.kind in (FUNCTION, CUSTOM):
            self.item["name"] = name if tool is None else tool.name
            if tool is not None and tool.namespace is not None:
                self.item["namespace"] = tool.namespace
        self._input = text_reader(tool)
        self._fill("")

    @property
    def event(self) -> str | None:
        """How the types of the events with its text begin; None without such events."""
        return {FUNCTION: "response.function_call_arguments", CUSTOM: "response.custom_tool_call_input"}.get(self.kind)

    def push(self, text: str) -> str:
        """The text that further arguments add to the item."""
        return text if self._input is None else self._input.push(text)

    def end(self, arguments: str, status: str) -> tuple[str, Values]:
        """Complete the item. Returns the rest of its text, and the fields of its last event."""
        self.item["status"] = "in_progress" if (self.kind, status) == (APPLY_PATCH, "incomplete") else status
        rest = "" if self._input is None else self._input.finish()
        self._fill(arguments)
        if self._input is not None:
            return rest, {"input": self.item["input"]}
        return "", {"name": self.item.get("name"), "arguments": arguments}

    def _fill(self, arguments: str) -> None:
        item, values = self.item, object_of(arguments)
        if self._input is not None:
            item["input"] = self._input.text
        elif self.kind == FUNCTION:
            item["arguments"] = arguments
        elif self.kind == APPLY_PATCH:
            known = values.get("type") in ("create_file", "delete_file")
            operation: Values = {
                "type": values["type"] if known else "update_file",
                "path": str(values.get("path", "")),
            }
            if operation["type"] != "delete_file":
                operation["diff"] = str(values.get("diff", "" if values else arguments))
            item["operation"] = operation
        else:
            item["action"] = _action(self.kind, values)
            item |= {"environment": {"type": "local"}} if self.kind == SHELL else {}


def _action(kind: str, values: Values) -> Values:
    key = "command" if kind == LOCAL_SHELL else "commands"
    given = values.get(key, [])
    if isinstance(given, str):  # some models ignore the schema and write this
        given = ["bash", "-lc", given] if kind == LOCAL_SHELL else [given]
    commands = [str(one) for one in given] if isinstance(given, list) else []
    timeout_ms = values["timeout_ms"] if isinstance(values.get("timeout_ms"), int) else None
    if kind == SHELL:
        return {key: commands, "timeout_ms": timeout_ms, "max_output_length": None}
    folder = values.get("working_directory")
    further = {"timeout_ms": timeout_ms, "working_directory": folder if isinstance(folder, str) else None}
    given_ones = {name: value for name, value in further.items() if value is not None}
    return {"type": "exec", key: commands, "env": {}, **given_ones}


def object_of(arguments: str) -> Values:
    """A call's arguments. Clients expect an object, so an incomplete call has an empty one."""
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class InputText:
    """Extracts the text of a custom tool's call from the arguments `{"input": "…"}` while they are generated.

    text: so far. is_plain: the arguments are the text itself, which holds as well for complete arguments of any other
    form.
    """

    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _WHOLE = re.compile(
        r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[0-9a-fA-F]{4}))*'
    )
    """The text without a surrogate at its end, whose other half may follow."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.text = ""
        self._rest = ""
        self._is_plain = is_plain
        self._has_begun = self._is_over = False

    def push(self, arguments: str) -> str:
        """Add further arguments; returns the text that they add."""
        if self._is_plain:
            self.text += arguments
            return arguments
        if self._is_over:
            return ""
        self._rest += arguments
        if not self._has_begun:
            if (head := self._HEAD.match(self._rest)) is None:
                return ""
            self._has_begun, self._rest = True, self._rest[head.end() :]
        whole = self._WHOLE.match(self._rest)
        assert whole is not None
        self._rest = self._rest[whole.end() :]
        self._is_over = self._rest.startswith('"')
        found = _unicode(json.loads(f'"{whole[0]}"', strict=False))
        self.text += found
        return found

    def finish(self) -> str:
        """The rest of the text once all arguments are known."""
        if self._is_plain:
            return ""
        if self._has_begun:
            rest = "" if self._is_over else self._rest
        else:
            values = object_of(self._rest)
            given = values.get("input", next(iter(values.values())) if len(values) == 1 else None)
            rest = given if isinstance(given, str) else self._rest
        found = _unicode(_without_escapes(rest) if self._has_begun else rest)
        self.text += found
        return found


def _without_escapes(text: str) -> str:
    """The contents of a JSON string up to its end, even if it is not quite valid or incomplete."""
    inner = re.match(r'(?:[^"\\]|\\.)*', text, re.DOTALL)
    assert inner is not None
    try:
        found: str = json.loads(f'"{re.sub(_NO_ESCAPE, _AS_IT_IS, inner[0])}"', strict=False)
    except ValueError:
        return ""
    return found


_NO_ESCAPE, _AS_IT_IS = r'(\\\\|\\["/bfnrt]|\\u[0-9a-fA-F]{4})|\\', lambda found: found[1] or "\\\\"
"""Replaces a backslash that begins no JSON escape."""


def text_reader(tool: ClientTool | None) -> InputText | None:
    """A reader of the call's text if the tool is a custom one, else None."""
    return InputText(is_plain=tool.is_plain) if tool is not None and tool.kind == CUSTOM else None


def _unicode(text: str) -> str:
    """The text without unpaired surrogates, which JSON cannot represent."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
