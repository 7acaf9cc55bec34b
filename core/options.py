"""Puts what the plugins registered before Hydra: one option per entry, typed by its dataclass.

Writes to Hydra's ConfigStore, which is Hydra's own process-wide state. Composes nothing; `core.compose` does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from core.entry_check import AUTO
from core.plugin_host import PluginHost
from core.registry import KINDS, Entry


def store_options(host: PluginHost) -> None:
    """Offer the host's entries, and none besides, as options of their kinds' config groups."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for kind in KINDS:
        store.repo.pop(kind, None)  # of an earlier host in this process
    for entry in host.registry:
        if entry.kind in KINDS:
            store.store(group=entry.kind, name=entry.name, node=option_node(entry), provider=entry.origin.distribution)
    store.store(group="kernels", name=AUTO, node={"name": AUTO}, provider="hookline")


def option_node(entry: Entry) -> Any:
    """The option's node: its `name`, which says what was chosen, and the fields of its dataclass with their types."""
    from omegaconf import OmegaConf

    name = ("name", str, dataclasses.field(default=entry.name))
    if entry.config is None:
        return OmegaConf.structured(dataclasses.make_dataclass("NoFields", [name]))
    frozen: bool = entry.config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    node = OmegaConf.structured(
        dataclasses.make_dataclass(entry.config.__name__, [name], bases=(entry.config,), frozen=frozen)
    )
    OmegaConf.set_readonly(node, None)  # OmegaConf takes "frozen" to mean that no override may change a value
    for name in node:
        if OmegaConf.is_dict(node[name]) and OmegaConf.get_type(node, name) is dict:
            OmegaConf.set_struct(node[name], False)  # a mapping's keys are the user's; Hydra knows only those it saw
    return node


def search_path_overrides(arguments: list[str], packages: list[str]) -> list[str]:
    """Arguments for Hydra that let it find the plugins' presets, beside any search path that was asked for."""
    if not packages:
        return arguments
    key, ours = "hydra.searchpath=[", ",".join(f"pkg://{package}" for package in packages)
    for place, argument in enumerate(arguments):
        if argument.startswith(key):
            theirs = argument.removeprefix(key)
            merged = f"{key}{ours}]" if theirs.strip() == "]" else f"{key}{ours},{theirs}"
            return [*arguments[:place], merged, *arguments[place + 1 :]]
    return [*arguments, f"{key}{ours}]"]
