"""The registry of entries by kind and name: the options of all plugins, as data. Imports no plugin code and no torch.

An entry's target is a string; only `Entry.load` imports it, once the entry was chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import Needs
from hookline.core.errors import PluginError
from hookline.core.plugin.check_contract import contract_fault
from hookline.core.plugin.problems import with_line
from hookline.core.util.raising import Raising

AUTO = "auto"
"""Stands for "core chooses" in the groups of CHOSEN_KINDS, so no entry may bear it."""
KINDS = ("model", "scheduler", "sampler", "kernels", "grammars", "pooler", "quantization", "drafter")
"""The plugin kinds of which the configuration chooses an option, by their keys in the configuration."""
GRAMMARS = "grammars"
"""The kind that is chosen by the first request that needs it."""
MODEL, KERNELS = "model", "kernels"
POOLER = "pooler"
"""The kind of which the configuration chooses one and each pooled request may name another."""
QUANTIZATION = "quantization"
"""The kind that a checkpoint's config.json asks for."""
DRAFTER = "drafter"
"""The kind of which core chooses none unless the configuration names one."""
CHOSEN_KINDS = (MODEL, KERNELS, GRAMMARS, POOLER, QUANTIZATION, DRAFTER)
"""The kinds of which core can choose an option."""
PROCESSOR, EXTENSION = "processor", "extension"
EXTENSION_KINDS = (PROCESSOR, EXTENSION)
"""The kinds whose options are chosen by requests, not by the configuration: step extensions, and logits processors,
which are step extensions that only change logits. They differ only in how they are registered and configured."""
OBSERVER = "observer"
"""The kind of which the configuration names none, one or several."""
REASONING_PARSER, TOOL_PARSER = "reasoning_parser", "tool_parser"
"""The kinds of which a server's configuration names one or none."""
API = "api"
"""The kind of which a server's configuration names one or several."""
EXECUTOR, LOCAL = "executor", "local"
"""The kind that `engine.executor` chooses, and the value that chooses no plugin, so no entry may bear it."""
ENTRY_KINDS = (*KINDS, *EXTENSION_KINDS, OBSERVER, REASONING_PARSER, TOOL_PARSER, API, EXECUTOR)
"""All kinds of entries."""


@dataclass(frozen=True)
class Origin:
    """Where an entry comes from: the plugin's name (its entry point), its module, distribution and version."""

    plugin: str
    module: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin '{self.plugin}' ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Entry:
    """A registration: a named option of one kind."""

    kind: str
    name: str
    target: str
    origin: Origin
    config: type | None = None
    help: str = ""
    needs: Needs = field(default_factory=Needs)
    priority: int = 0
    architectures: tuple[str, ...] = ()
    """For a model: the architectures whose checkpoints it claims."""
    methods: tuple[str, ...] = ()
    """For a quantization: the values of quant_method whose checkpoints it reads."""
    replaces: bool = False
    """Whether it was registered with replace=True."""
    arguments: type | None = None
    """For a step extension: the dataclass of a request's arguments; a logits processor registers it as `config=`."""

    def __post_init__(self) -> None:
        if self.kind == PROCESSOR and self.arguments is None:
            object.__setattr__(self, "arguments", self.config)
            object.__setattr__(self, "config", None)

    @property
    def arguments_key(self) -> str:
        """The name of the registrar's parameter for `arguments`."""
        return "config" if self.kind == PROCESSOR else "arguments"

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' of {self.origin}"

    def load(self) -> Any:
        """Import the target and return its class.

        Raises: PluginError with the plugin and the cause if that fails, or if the class does not keep its contract.
        """
        module_name, _, attribute = self.target.partition(":")
        cannot = f"{self} cannot be loaded from {self.target}"
        with Raising(lambda error: PluginError(f"{cannot}: {with_line(error, is_import=True)}")):
            target = getattr(importlib.import_module(module_name), attribute)
        fault = contract_fault(self.kind, target, self.needs)
        if fault is not None:
            raise PluginError(f"{self} does not keep its contract: {fault}")
        return target


class Registry:
    """All usable entries, by kind and name, in order of registration."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def add(self, entry: Entry, *, replace: bool = False) -> None:
        """Add an entry.

        Raises: PluginError if the name is taken and `replace` is not set.
        """
        key = (entry.kind, entry.name)
        taken = self._entries.get(key)
        if taken is not None and not replace:
            raise PluginError(f"{entry.kind} '{entry.name}' is already registered by {taken.origin}; pass replace=True")
        self._entries[key] = entry

    def find(self, kind: str, name: str) -> Entry | None:
        """The entry, or None."""
        return self._entries.get((kind, name))

    def names(self, kind: str) -> list[str]:
        """Names of a kind, sorted."""
        return sorted(entry.name for entry in self if entry.kind == kind)

    def of_kind(self, kind: str) -> list[Entry]:
        """Entries of a kind, in order of registration."""
        return [entry for entry in self if entry.kind == kind]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())


@dataclass(frozen=True)
class Option:
    """A chosen option: its entry and an instance of its config dataclass (None if it has no fields).

    entry: None only for "auto", which is decided once the facts are known: `core.plugin.needs`, `core.plugin.claims`.
    """

    entry: Entry | None = None
    config: Any = None

    @property
    def name(self) -> str:
        """The entry's name, or "auto"."""
        return self.entry.name if self.entry is not None else AUTO


@dataclass(frozen=True)
class ExtensionOption(Option):
    """The engine's settings of a step extension. arguments: the defaults of requests' arguments; None if not set."""

    arguments: Any = None
