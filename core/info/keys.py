"""The root keys of the configuration with defaults and descriptions, from the dataclasses that are their schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.core.batch.settings import BatchKeys
from hookline.core.bench.settings import BenchKeys
from hookline.core.chat.settings import ChatKeys
from hookline.core.info.sources import field_facts
from hookline.core.run.settings import RunKeys
from hookline.core.serve.settings import ServeKeys
from hookline.core.simulate.settings import SimulateKeys
from hookline.core.util.text import joined
from hookline.core.warm.settings import WarmKeys

COMMANDS = {
    "run": RunKeys,
    "bench": BenchKeys,
    "simulate": SimulateKeys,
    "serve": ServeKeys,
    "batch": BatchKeys,
    "chat": ChatKeys,
    "warm": WarmKeys,
}
"""Each command's keys; a key that several commands have is listed with the first of them."""


def fields_as_keys(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each field of root keys as a key of its own, by its full name."""
    return [
        {
            **one,
            "key": joined(one["key"], field["name"]),
            "default": field["default"],
            "doc": field["doc"],
            "fields": [],
        }
        for one in keys
        for field in one["fields"]
    ]


def with_field(option: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The facts of an option, with only the field of this full name; None if it has no such field."""
    fields = [field for field in option["fields"] if joined(option["key"], field["name"]) == name]
    return {**option, "fields": fields} if fields else None


def root_keys(*, has_docs: bool = True) -> list[dict[str, Any]]:
    """Each root key that is no kind of plugin: name, command, default, explanation, and fields if it is a mapping.
    has_docs: whether the explanations of the fields are wanted.
    """
    found: dict[str, dict[str, Any]] = {}
    for command, keys in COMMANDS.items():
        sections = {one.name: one.default_factory for one in dataclasses.fields(keys)}
        for facts in field_facts(keys):
            section = sections[facts["name"]]
            is_section = dataclasses.is_dataclass(section)
            fields = field_facts(section, has_docs=has_docs) if is_section else []  # type: ignore[arg-type]
            default = "" if fields else facts["default"]
            key = {"key": facts["name"], "command": command, "default": default, "doc": facts["doc"], "fields": fields}
            found.setdefault(facts["name"], key)
    return list(found.values())
