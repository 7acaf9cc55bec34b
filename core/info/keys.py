"""The root keys of the configuration: their defaults and what they mean.

Reads the comments in the files of conf/; the fields of engine and sampling are explained by their dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.core.config.settings import EngineConfig
from hookline.core.info.sources import field_facts
from hookline.core.plugin.presets import CONF, default_tree
from hookline.core.plugin.registry import KINDS
from hookline.core.sampling_params import SamplingParams

COMMANDS = {"config": "run", "bench": "bench", "simulate": "simulate"}
"""Files of conf/, each with the command that its keys came with: those of a later one are added to those before."""
DATACLASSES = {"engine": EngineConfig, "sampling": SamplingParams}


def root_keys() -> list[dict[str, Any]]:
    """Each root key that is no kind of plugin: name, command, default, explanation, and fields if it is a mapping."""
    found: dict[str, dict[str, Any]] = {}
    for file, command in COMMANDS.items():
        path = CONF / f"{file}.yaml"
        comments = _comments(path)
        for key, value in default_tree(path).items():
            if key not in KINDS:
                found.setdefault(key, _key(key, value, command, comments))
    return list(found.values())


def _key(key: str, value: Any, command: str, comments: Mapping[str, str]) -> dict[str, Any]:
    fields = []
    if key in DATACLASSES:
        fields = field_facts(DATACLASSES[key])
    elif isinstance(value, Mapping):
        fields = [_field(name, inner, comments.get(f"{key}.{name}", "")) for name, inner in value.items()]
    default = "" if isinstance(value, Mapping) else repr(value)
    return {"key": key, "command": command, "default": default, "doc": comments.get(key, ""), "fields": fields}


def _field(name: str, value: Any, doc: str) -> dict[str, str]:
    return {"name": name, "type": "" if value is None else type(value).__name__, "default": repr(value), "doc": doc}


def _comments(path: Path) -> dict[str, str]:
    """Full key -> the comment behind it, of a file of mappings two levels deep."""
    found, root = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip().isidentifier():
            root = root if name.startswith(" ") else name
            found[f"{root}.{name.strip()}" if name.startswith(" ") else name] = rest.partition(" # ")[2].strip()
    return found
