"""Lays the inventory of `hookline info` out as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.core.info.group_presets import EXPERIMENT, GROUPS
from hookline.core.util.process import called_as
from hookline.core.util.text import joined

_HEAD = ("kind", "name", "available", "from", "summary")


def show_all(facts: dict[str, Any]) -> str:
    """Options with their fields, then presets, plugins, and broken or blocked plugins."""
    rows = _columns([_HEAD, *(_row(one) for one in facts["options"])])
    lines = [rows[0]]
    for option, row in zip(facts["options"], rows[1:], strict=True):
        lines += [row, *(f"    {field}" for field in _fields(option))]
    if not facts["options"]:
        lines.append("none")
    if facts["presets"]:
        lines += ["", "presets", *_columns([_preset_row(one) for one in facts["presets"]])]
    if facts["keys"]:
        lines += ["", "keys", *_columns([_key_row(one) for one in facts["keys"]])]
    if facts["plugins"]:
        lines += ["", "plugins", *_columns([_plugin_row(one) for one in facts["plugins"]])]
    return "\n".join([*lines, *_problems(facts)])


def show_one(facts: dict[str, Any]) -> str:
    """Everything that is known of the few things left in `facts`."""
    blocks = [_full_plugin(one) for one in facts["plugins"]]
    blocks += [_full_key(one) for one in facts["keys"]]
    blocks += [_full_option(one) for one in facts["options"]] + [_full_preset(one) for one in facts["presets"]]
    return "\n\n".join([*blocks, *(["\n".join(_problems(facts)).strip()] if facts["problems"] else [])])


def _row(option: dict[str, Any]) -> tuple[str, ...]:
    return (option["kind"], option["name"], _available(option), _origin(option), option["help"])


def _preset_row(preset: dict[str, Any]) -> tuple[str, ...]:
    return (preset["kind"], preset["name"], _available(preset), preset["distribution"], preset["help"])


def _plugin_row(plugin: dict[str, Any]) -> tuple[str, ...]:
    return (plugin["plugin"], _origin(plugin), plugin["module"], ", ".join(plugin["hooks"]))


def _key_row(key: dict[str, Any]) -> tuple[str, ...]:
    return (key["key"], key["command"], key["default"], key["doc"] or f"{called_as('info')} {key['key']}")


def _available(one: dict[str, Any]) -> str:
    return f"no: {'; '.join(one['unavailable'])}" if one["unavailable"] else "yes"


def _origin(one: dict[str, Any]) -> str:
    return f"{one['distribution']} {one['version']}"


def _fields(option: dict[str, Any]) -> list[str]:
    typed = {field["name"]: f": {field['type']}" if field["type"] else "" for field in option["fields"]}
    return [
        f"{joined(option['key'], field['name'])}{typed[field['name']]} = {field['default']}"
        for field in option["fields"]
    ]


def _problems(facts: dict[str, Any]) -> list[str]:
    if not facts["problems"]:
        return []
    return ["", "not loaded", *(line for one in facts["problems"] for line in _problem(one))]


def _problem(problem: dict[str, Any]) -> list[str]:
    wanted = ", ".join(f"{kind} '{name}'" for kind, name in problem["wanted"])
    lines = [f"{problem['plugin']} ({_origin(problem)}), {problem['stage']}: {problem['cause']}"]
    return [*lines, f"    wanted: {wanted}"] if wanted else lines


def _full_option(option: dict[str, Any]) -> str:
    needs = ", ".join(f"{name}={value!r}" for name, value in option["needs"].items())
    lines = [
        _title(option),
        f"  available: {_available(option)}",
        f"  from:      plugin '{option['plugin']}' of {_origin(option)}",
        f"  target:    {option['target']}",
        f"  file:      {option['file'] or 'not found'}",
        f"  priority:  {option['priority']}",
        f"  needs:     {needs or 'nothing'}",
    ]
    if option["architectures"]:
        lines.append(f"  claims:    {', '.join(option['architectures'])}")
    lines += _block(_fields_title(option), _documented(option))
    if option["settings"]:
        of_engine = {**option, "key": option["engine_key"], "fields": option["settings"]}
        lines += _block("settings of the engine's own", _documented(of_engine))
    return "\n".join(lines)


def _fields_title(option: dict[str, Any]) -> str:
    """Also where else than under their keys the fields can be set."""
    if not option["key"]:
        return f"fields, as in observers='[{{name: {option['name']}, FIELD: VALUE}}]'"
    return (
        f"fields; for all requests of an engine: {option['engine_key']}.FIELD=VALUE"
        if option["engine_key"]
        else "fields"
    )


def _title(option: dict[str, Any]) -> str:
    """An option's heading: kind=name if the command line chooses it so, else kind and name."""
    mark = "=" if option["key"] == option["kind"] else " "
    return f"{option['kind']}{mark}{option['name']}: {option['help']}"


def _documented(option: dict[str, Any]) -> list[str]:
    """Each field, and its docstring in a line of its own."""
    lines = []
    for line, field in zip(_fields(option), option["fields"], strict=True):
        lines += [line, *([f"    {field['doc']}"] if field["doc"] else [])]
    return lines


def _full_key(key: dict[str, Any]) -> str:
    default = f" = {key['default']}" if key["default"] else ""
    title = f"{key['key']}{default}: {key['doc'] or 'a mapping of fields'}"
    lines = [title, f"  command:   core.{key['command']}"]
    return "\n".join([*lines, *(_block("fields", _documented(key)) if key["fields"] else [])])


def _full_plugin(plugin: dict[str, Any]) -> str:
    lines = [
        f"plugin {plugin['plugin']}",
        f"  from:      {_origin(plugin)}",
        f"  module:    {plugin['module']}",
        f"  file:      {plugin['file'] or 'not found'}",
        f"  hooks:     {', '.join(plugin['hooks'])}",
    ]
    return "\n".join(lines)


def _full_preset(preset: dict[str, Any]) -> str:
    lines = [
        f"{preset['kind']}={preset['name']}: {preset['help']}",
        f"  available: {_available(preset)}",
        f"  from:      {preset['distribution']}",
        f"  file:      {preset['file']}",
    ]
    if preset["kind"] not in GROUPS:
        lines.append(f"  option:    {preset['option'] or 'unknown'}")
    prefix = "" if preset["kind"] == EXPERIMENT else preset["kind"]
    values = [f"{joined(prefix, name)}: {value!r}" for name, value in preset["values"].items()]
    return "\n".join([*lines, *_block("sets", values)])


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else [f"  {title}: none"]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
