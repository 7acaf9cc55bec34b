"""Finds the plugins of this process, keeps the sound ones, and says why the others are not loaded.

Every process builds its own host. Core loops over the entry points itself, one `try` per plugin, all or nothing: a
broken plugin does not affect the others, and is an error only if a name that it registers is chosen. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from hookline.core.contracts.hooks import PROJECT
from hookline.core.errors import PluginError, clipped
from hookline.core.plugin.check_plugin import check_plugin, new_manager
from hookline.core.plugin.presets import CONF, Preset, presets_in
from hookline.core.plugin.problems import Phase, Problem, Rejected, with_line
from hookline.core.plugin.registry import Entry, Origin, Registry
from hookline.core.plugin.sources import (
    BLOCK_VARIABLE,
    DEVELOPMENT_VARIABLE,
    EXPECTED_VARIABLE,
    Source,
    in_development,
    installed,
    names_in,
)
from hookline.core.util.raising import Raising, raised_by
from hookline.core.util.text import near_miss, one_line

_log = logging.getLogger("hookline")


class PluginHost:
    """The entries, presets and observers of all sound plugins, and the problems of the others."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.presets: list[Preset] = presets_in(CONF, PROJECT)
        self._problems: list[Problem] = []
        self.plugins: list[Origin] = []
        self.config_packages: list[str] = []
        self.manager = new_manager()
        self._trial = new_manager()

    @classmethod
    def load(cls, sources: Iterable[Source] | None = None, environ: Mapping[str, str] = os.environ) -> PluginHost:
        """Load the plugins of this process: installed ones first, then the modules that HOOKLINE_PLUGINS names.

        Order: the hookline distribution, then by distribution and plugin name. `sources` replaces the installed ones.
        Raises: PluginError only if another distribution has put itself in the place of our own packages, or if the
                process that started this one sees other plugins (`for_children`).
        """
        host = cls()
        everything = [*(installed() if sources is None else sources), *in_development(environ)]
        blocked = names_in(environ, BLOCK_VARIABLE)
        for source in everything:
            host._add(source, source.origin.plugin in blocked)
        host._report_unknown_blocks(blocked, [source.origin.plugin for source in everything])
        if environ.get(EXPECTED_VARIABLE):
            host.check_same(json.loads(environ[EXPECTED_VARIABLE]), "this process")
        return host

    def hooks_of(self, origin: Origin) -> list[str]:
        """Names of the hooks that a loaded plugin implements, sorted."""
        callers = self.manager.get_hookcallers(self.manager.get_plugin(_key(origin))) or []
        return sorted(caller.name for caller in callers)

    def choose(self, kind: str, name: str) -> Entry:
        """The entry of that name.

        Raises: PluginError with the nearest name and all available ones, or with the fault of the broken plugin that
                registers this name.
        """
        entry = self.registry.find(kind, name)
        if entry is None:
            raise self.unknown(kind, name)
        for problem in self._wanting(kind, name):
            _log.warning("%s '%s' is taken from %s, not from broken %s", kind, name, entry.origin, problem)
        return entry

    def unknown(self, kind: str, name: str, also: Sequence[str] = ()) -> PluginError:
        """The error for a name that is not registered. also: further names that the caller accepts, such as presets."""
        for problem in self._wanting(kind, name):
            blame = f"plugin '{problem.plugin}' ({problem.distribution} {problem.version})"
            return PluginError(f"{kind} '{name}' of {blame} cannot be used: {problem.cause}")
        names = sorted({*self.registry.names(kind), *also})
        available = ", ".join(names) or "none"
        message = f"no {kind} named '{clipped(name)}'.{near_miss(name[:50], names)} Available: {available}"
        not_loaded = (f"not loaded: {problem}" for problem in self.problems)
        return PluginError("; ".join([message, *not_loaded, *self._hints()]))

    @property
    def problems(self) -> list[Problem]:
        """Why plugins are not loaded: broken plugins first, then plugins that the user blocked."""
        return sorted(self._problems, key=lambda problem: problem.stage is Phase.BLOCK)

    @property
    def description(self) -> tuple[str, ...]:
        """The plugins, entries and presets of this process, as lines of text that another process can compare."""
        return (
            *(f"{origin} in {origin.module}" for origin in self.plugins),
            *(f"broken {problem}" for problem in self.problems),
            *(f"{entry.kind} '{entry.name}' of {entry.origin} from {entry.target}" for entry in self.registry),
            *(f"preset {preset.kind} '{preset.name}' of {preset.distribution}" for preset in self.presets),
        )

    def for_children(self) -> dict[str, str]:
        """Environment variables for a process that must see the same plugins, or refuse to start."""
        return {EXPECTED_VARIABLE: json.dumps(self.description)}

    def check_same(self, expected: Sequence[str], where: str) -> None:
        """Make sure that this process has the plugins of the process that started it. where: a name of this process.

        Raises: PluginError with the first differences.
        """
        mine = self.description
        missing = [line for line in expected if line not in mine]
        surplus = [line for line in mine if line not in expected]
        if missing or surplus:
            found = [f"missing: {'; '.join(missing[:3])}"] * bool(missing)
            found += [f"not expected: {'; '.join(surplus[:3])}"] * bool(surplus)
            raise PluginError(
                f"{where} sees other plugins than the process that started it: {'. '.join(found)}. Give both the same "
                f"environment and the same {BLOCK_VARIABLE} and {DEVELOPMENT_VARIABLE}"
            )

    def log_problems(self) -> None:
        """Log each broken plugin as a warning; a blocked one at level DEBUG, since the user asked for it."""
        for problem in self.problems:
            wished = problem.stage is Phase.BLOCK and problem.distribution != BLOCK_VARIABLE
            _log.log(logging.DEBUG if wished else logging.WARNING, "not loaded: %s", problem)

    def _add(self, source: Source, blocked: bool) -> None:
        if blocked:
            self._report(source.origin, Rejected(Phase.BLOCK, f"blocked by {BLOCK_VARIABLE}"))
            return
        with redirect_stdout(sys.stderr):  # standard output may be a command's JSON, which a plugin's print would spoil
            error = raised_by(self._accept, source)
        if error is not None:  # a plugin that is not a module may raise anywhere
            known = error if isinstance(error, Rejected) else Rejected(Phase.HOOKS, one_line(error))
            self._report(source.origin, known)

    def _report(self, origin: Origin, error: Rejected) -> None:
        cause = (error.stage, error.cause, error.wanted)
        self._problems.append(Problem(origin.plugin, origin.distribution, origin.version, *cause))

    def _accept(self, source: Source) -> None:
        plugin, origin = _import(source), source.origin
        if self.manager.is_registered(plugin):
            raise Rejected(Phase.IMPORT, f"{origin.module} is already loaded as another plugin; name it once")
        accepted = check_plugin(plugin, origin, self.registry, self.presets, self._trial)
        for entry, replace in accepted.entries:
            self.registry.add(entry, replace=replace)
        self.presets.extend(accepted.presets)
        self.config_packages.extend(accepted.config_packages)
        self.plugins.append(origin)
        self.manager.register(plugin, _key(origin))

    def _wanting(self, kind: str, name: str) -> list[Problem]:
        return [problem for problem in self.problems if (kind, name) in problem.wanted]

    def _hints(self) -> list[str]:
        loaded = {origin.distribution for origin in self.plugins} | {problem.distribution for problem in self.problems}
        return [] if PROJECT in loaded else [f"the {PROJECT} distribution is not installed here: pip install -e ."]

    def _report_unknown_blocks(self, blocked: Sequence[str], known: Sequence[str]) -> None:
        for name in blocked:
            if name not in known:
                available = ", ".join(sorted(set(known))) or "none"
                cause = f"{BLOCK_VARIABLE} names no installed plugin.{near_miss(name, known)} Available: {available}"
                self._problems.append(Problem(name, BLOCK_VARIABLE, "-", Phase.BLOCK, cause))


def _import(source: Source) -> Any:
    with Raising(lambda error: Rejected(Phase.IMPORT, with_line(error, is_import=True))):
        return source.load()


def _key(origin: Origin) -> str:
    # Two distributions may give their entry points the same name, so the distribution is part of pluggy's.
    return f"{origin.distribution}:{origin.plugin}"
