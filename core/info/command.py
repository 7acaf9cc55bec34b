"""`hookline info`: the installed plugins, options and presets, where they come from, and why some cannot be used.

Reads the plugin host and the presets; imports no target, no torch and no Hydra, so it answers at once and works where
nothing can run. `hookline.core.info.layout` lays the facts out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from hookline.core.contracts import API_VERSION, FromSamplingParams, Needs
from hookline.core.errors import ConfigError
from hookline.core.info.group_presets import group_presets
from hookline.core.info.keys import fields_as_keys, root_keys, with_field
from hookline.core.info.sources import field_facts, module_file
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.plugin.presets import Preset, preset_values
from hookline.core.plugin.problems import Problem
from hookline.core.plugin.registry import EXECUTOR, EXTENSION_KINDS, KINDS, OBSERVER, Entry, Origin
from hookline.core.util.process import called_as
from hookline.core.util.text import near_miss


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the inventory, or one name of it, and return the exit code."""
    from hookline.core.cli.command import Arguments, guarded

    parser = Arguments(prog=called_as("info"), description="Plugins, options and presets.")
    parser.add_argument(
        "name", nargs="?", help="an option, a preset, a plugin, or a key of the configuration: shown in full"
    )
    parser.add_argument("--json", action="store_true", help="print the same as one JSON object")
    options = parser.parse_args(arguments)
    return guarded(partial(_show, options), ())


def _show(options: argparse.Namespace, _: Sequence[str]) -> int:
    from hookline.core.info.layout import show_all, show_one

    facts = inventory(PluginHost.load(), has_docs=options.json or options.name is not None)
    if options.name is not None:
        facts = only(facts, options.name)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(show_all(facts) if options.name is None else show_one(facts))
    return 0


def inventory(host: PluginHost, *, has_docs: bool = True) -> dict[str, Any]:
    """All options, presets and problems of a host, as plain data. has_docs: whether fields have their docstrings."""
    return {
        "api_version": API_VERSION,
        "plugins": [_plugin(origin, host) for origin in host.plugins],
        "options": [_option(entry, has_docs) for entry in host.registry],
        "presets": [*(_preset(preset, host) for preset in host.presets), *group_presets(host)],
        "keys": root_keys(has_docs=has_docs),
        "problems": [_problem(problem) for problem in host.problems],
    }


def only(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """The facts about a name: of an option, a preset, a plugin, a kind, a key of the configuration, a field of options,
    or of an option that a broken plugin failed to register.

    Raises: ConfigError for an unknown name, with the nearest known name and the plugins that are not loaded.
    """
    keys = [*facts["keys"], *fields_as_keys(facts["keys"])]
    found = {
        "plugins": [one for one in facts["plugins"] if name == one["plugin"]],
        "options": [one for one in facts["options"] if name in (one["name"], one["plugin"], one["kind"])],
        "presets": [one for one in facts["presets"] if name in (one["name"], one["kind"])],
        "keys": [one for one in keys if name == one["key"]],
        "problems": [one for one in facts["problems"] if name in _names_of(one)],
    }
    if not any(found.values()):
        found["options"] = [option for one in facts["options"] if (option := with_field(one, name))]
    if not any(found.values()):
        known = {one["name"] for kind in ("options", "presets") for one in facts[kind]}
        known |= {one["plugin"] for one in facts["plugins"]} | {one["key"] for one in facts["keys"]}
        known |= {other for one in facts["problems"] for other in _names_of(one)}
        names = sorted(known)
        near = [*names, *(one["key"] for one in keys)]
        message = f"nothing is named '{name}'.{near_miss(name, near)} Available: {', '.join(names) or 'none'}"
        raise ConfigError("; ".join([message, *map(_not_loaded, facts["problems"])]))
    return {"api_version": facts["api_version"], **found}


def _names_of(problem: dict[str, Any]) -> list[str]:
    return [problem["plugin"], *(name for _, name in problem["wanted"])]


def _not_loaded(problem: dict[str, Any]) -> str:
    origin = Origin(problem["plugin"], "", problem["distribution"], problem["version"])
    return f"not loaded: {origin}: {problem['cause']}"


def _plugin(origin: Origin, host: PluginHost) -> dict[str, Any]:
    return {
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
        "module": origin.module,
        "file": module_file(origin.module.partition(":")[0]),
        "hooks": host.hooks_of(origin),
    }


def _option(entry: Entry, has_docs: bool) -> dict[str, Any]:
    with Blaming((), "while its fields are listed", otherwise=entry):
        settings = field_facts(entry.config, has_docs=has_docs)
        fields = settings if entry.arguments is None else field_facts(entry.arguments, has_docs=has_docs)
    return {
        "kind": entry.kind,
        "name": entry.name,
        "key": _key(entry),
        "engine_key": f"{entry.kind}s.{entry.name}" if _key(entry).startswith("sampling.extra_args.") else "",
        "help": entry.help,
        "fields": fields,
        "settings": [] if entry.arguments is None else settings,
        "plugin": entry.origin.plugin,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "target": entry.target,
        "file": module_file(entry.target.partition(":")[0]),
        "priority": entry.priority,
        "needs": _stated(entry.needs),
        "architectures": list(entry.architectures),
        "unavailable": unavailable(entry.needs),
    }


def _key(entry: Entry) -> str:
    """The prefix of a field's name on the command line; empty for observers, which are set as items of a list."""
    if entry.kind in KINDS:
        return entry.kind
    if entry.kind == OBSERVER:
        return ""
    if entry.kind == EXECUTOR:
        return f"engine.{EXECUTOR}"
    if entry.kind not in EXTENSION_KINDS:
        return f"serve.{entry.kind}"
    by_name = entry.arguments is not None and issubclass(entry.arguments, FromSamplingParams)
    return "sampling" if by_name else f"sampling.extra_args.{entry.name}"


def _stated(needs: Needs) -> dict[str, Any]:
    stated = {field.name: getattr(needs, field.name) for field in dataclasses.fields(Needs)}
    return {name: value for name, value in stated.items() if value != getattr(Needs(), name)}


def _preset(preset: Preset, host: PluginHost) -> dict[str, Any]:
    facts = {
        "kind": preset.kind,
        "name": preset.name,
        "help": preset.help,
        "distribution": preset.distribution,
        "file": str(preset.path),
    }
    try:
        base, values = preset_values(preset, host.presets)
    except ConfigError as error:
        return {**facts, "option": None, "values": {}, "unavailable": [str(error)]}
    missing = [] if host.registry.find(preset.kind, base) else [f"its option '{base}' is not there"]
    return {**facts, "option": base, "values": values, "unavailable": missing}


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        **dataclasses.asdict(problem),
        "stage": problem.stage.value,
        "wanted": [list(one) for one in problem.wanted],
    }
