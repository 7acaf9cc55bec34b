"""The root keys of the configuration: their defaults and what they mean, from the dataclasses that are their schema."""

from __future__ import annotations

import dataclasses
from typing import Any

from hookline.core.batch.settings import BatchKeys
from hookline.core.bench.settings import BenchKeys
from hookline.core.info.sources import field_facts
from hookline.core.run.settings import RunKeys
from hookline.core.serve.settings import ServeKeys
from hookline.core.simulate.settings import SimulateKeys

COMMANDS = {"run": RunKeys, "bench": BenchKeys, "simulate": SimulateKeys, "serve": ServeKeys, "batch": BatchKeys}
"""Each command's keys: those of a later one are added to those before."""


def root_keys() -> list[dict[str, Any]]:
    """Each root key that is no kind of plugin: name, command, default, explanation, and fields if it is a mapping."""
    found: dict[str, dict[str, Any]] = {}
    for command, keys in COMMANDS.items():
        sections = {one.name: one.default_factory for one in dataclasses.fields(keys)}
        for facts in field_facts(keys):
            section = sections[facts["name"]]
            is_section = dataclasses.is_dataclass(section)
            fields = field_facts(section) if is_section else []  # type: ignore[arg-type]
            default = "" if fields else facts["default"]
            key = {"key": facts["name"], "command": command, "default": default, "doc": facts["doc"], "fields": fields}
            found.setdefault(facts["name"], key)
    return list(found.values())
