"""Where plugins come from: entry points of installed distributions, and modules named in HOOKLINE_PLUGINS.

Imports none of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hookline.core.contracts.hooks import PROJECT
from hookline.core.plugin.registry import Origin
from hookline.core.util.raising import raised_by

BLOCK_VARIABLE = "HOOKLINE_BLOCK"
"""Names of plugins (entry points) not to load."""
DEVELOPMENT_VARIABLE = "HOOKLINE_PLUGINS"
"""Modules to load as plugins without being installed."""

EXPECTED_VARIABLE = "HOOKLINE_EXPECTED_PLUGINS"
"""The plugins that a child process must see, as JSON; set by Hookline itself for the jobs of a sweep."""


@dataclass(frozen=True)
class Source:
    """A plugin that could be loaded: where it comes from, and how to import it."""

    origin: Origin
    load: Callable[[], Any]


def installed() -> list[Source]:
    """The plugins that installed distributions declare, ours first, then by distribution and name."""
    sources, metadata = [], dict[int, Any]()
    for point in importlib.metadata.entry_points(group=PROJECT):
        if point.dist is not None and id(point.dist) not in metadata:
            metadata[id(point.dist)] = point.dist.metadata  # a property that parses a file at each access
        told = metadata[id(point.dist)] if point.dist is not None else {"Name": "unknown", "Version": "-"}
        sources.append(Source(Origin(point.name, point.value, _normalised(told["Name"]), told["Version"]), point.load))
    return sorted(sources, key=_order)


def in_development(environ: Mapping[str, str]) -> list[Source]:
    """The plugin modules that HOOKLINE_PLUGINS names, in that order; child processes inherit it.

    Modules in the working folder are found too; it is searched last, so that no file there replaces a library.
    """
    names = names_in(environ, DEVELOPMENT_VARIABLE)
    if names and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    return [
        Source(Origin(module, module, DEVELOPMENT_VARIABLE, "-"), partial(_import_module, module)) for module in names
    ]


def _import_module(name: str) -> Any:
    if "/" in name or " " in name or name.endswith(".py"):
        modules = ",".join(Path(one).stem for one in name.split())
        raise ImportError(
            f"{DEVELOPMENT_VARIABLE} takes names of modules, with commas between them; write "
            f"{DEVELOPMENT_VARIABLE}={modules}, with their folder in PYTHONPATH if it is not the working folder"
        )
    return importlib.import_module(name)


def names_in(environ: Mapping[str, str], variable: str) -> list[str]:
    """The comma-separated names in an environment variable."""
    return [name for name in (part.strip() for part in environ.get(variable, "").split(",")) if name]


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _order(source: Source) -> tuple[bool, str, str]:
    return source.origin.distribution != PROJECT, source.origin.distribution, source.origin.plugin


def spec_of(module: str) -> ModuleSpec | None:
    """How a module would be imported; None if it cannot be found.

    Looking for a submodule imports its package, which may raise anything: then the result is None too.
    """
    found: list[ModuleSpec | None] = []
    error = raised_by(lambda: found.append(importlib.util.find_spec(module)))
    return found[0] if error is None else None
