"""Presets that belong to no kind of plugin: loads of benchmarks, and experiments, which set several root keys.

Reads the YAML files without Hydra, of conf/ and of the packages that plugins name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.core.contracts.hooks import PROJECT
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF, summary, yaml_values
from hookline.core.util.text import joined, one_line

EXPERIMENT = "experiment"
GROUPS = ("workload", EXPERIMENT)


def group_presets(host: PluginHost) -> list[dict[str, Any]]:
    """Each of them as facts of a preset; its `option` is empty, since it is based on none."""
    folders = {PROJECT: CONF} | {package: _folder(package) for package in host.config_packages}
    return [
        _facts(group, path, package)
        for group in GROUPS
        for package, folder in folders.items()
        for path in sorted((folder / group).glob("*.yaml"))
    ]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, "a plugin is checked for this when it is loaded"
    return Path(spec.submodule_search_locations[0])


def _facts(group: str, path: Path, package: str) -> dict[str, Any]:
    facts = {"kind": group, "name": path.stem, "help": "", "distribution": package, "file": str(path), "option": ""}
    try:
        facts["help"] = summary(path)
        values = _values(path)
    except Exception as error:  # of a plugin's file: whatever YAML and OmegaConf raise
        return {**facts, "values": {}, "unavailable": [one_line(error)]}
    return {**facts, "values": values, "unavailable": []}


def _values(path: Path) -> dict[str, Any]:
    """A preset file's values by full names, merged over the values and options of the files in its defaults list."""
    own = yaml_values(path)
    found: dict[str, Any] = {}
    for item in own.pop("defaults", []):
        if isinstance(item, Mapping):
            found |= {str(key).removeprefix("override ").removeprefix("/"): value for key, value in item.items()}
        elif item != "_self_" and (other := path.parent / f"{item}.yaml").is_file():  # Hydra finds others elsewhere
            found |= _values(other)
    return {**found, **dict(_flat(own))}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of the innermost keys by their full names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, joined(prefix, key))
        else:
            yield joined(prefix, key), value
