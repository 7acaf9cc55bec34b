"""Tries out one plugin by itself: its version, its hooks and everything it registers.

A plugin is accepted whole or not at all. `core.plugin.host` decides which plugins are tried, in which order, and keeps
the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

from hookline.core.contracts import API_VERSION, Needs
from hookline.core.contracts import hooks as hookspecs
from hookline.core.plugin.check_entry import entry_fault
from hookline.core.plugin.presets import Preset, preset_fault, presets_in
from hookline.core.plugin.problems import Phase, Rejected, with_line
from hookline.core.plugin.registry import (
    ENTRY_KINDS,
    EXTENSION_KINDS,
    Entry,
    Origin,
    Registry,
)
from hookline.core.plugin.sources import spec_of
from hookline.core.util.raising import Raising, raised_by
from hookline.core.util.text import near_miss, one_line

_HOOK_OF_KIND = {kind: f"register_{kind.removesuffix('s')}s" for kind in ENTRY_KINDS}
_HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec"))


@dataclass(frozen=True)
class Accepted:
    """The registrations of a sound plugin. `entries` come with their `replace` flag."""

    entries: tuple[tuple[Entry, bool], ...]
    presets: tuple[Preset, ...]
    config_packages: tuple[str, ...]


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows Hookline's hooks and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def check_plugin(
    plugin: Any, origin: Origin, registry: Registry, presets: list[Preset], trial: pluggy.PluginManager
) -> Accepted:
    """Check a loaded plugin, also against the entries registered so far; changes nothing.

    trial: a manager of `new_manager` without plugins, which is used again for the next plugin: making one takes 1 ms.
    Raises: Rejected with the first fault found.
    """
    _check_version(plugin)
    try:
        _register(plugin, origin, trial)
        collector = _Collector(origin, registry, presets)
        for kind in ENTRY_KINDS:
            collector.collect(kind, getattr(trial.hook, _HOOK_OF_KIND[kind]))
        collector.raise_fault()
        packages, found = _check_presets(trial, origin, registry, presets, collector)
    finally:
        if trial.is_registered(plugin):
            trial.unregister(plugin)
    return Accepted(tuple(collector.entries), tuple(found), tuple(packages))


def _check_version(plugin: Any) -> None:
    version = getattr(plugin, "API_VERSION", None)
    if version is None:
        raise Rejected(Phase.VERSION, f"it states no API_VERSION; put API_VERSION = {API_VERSION} at its top")
    if version != API_VERSION:
        raise Rejected(Phase.VERSION, f"it was written for API_VERSION {version!r}, this Hookline has {API_VERSION}")


def _register(plugin: Any, origin: Origin, trial: pluggy.PluginManager) -> None:
    _check_hook_names(plugin, trial)
    try:
        trial.register(plugin, origin.plugin)
        trial.check_pending()
    except pluggy.PluginValidationError as error:
        raise Rejected(Phase.HOOKS, " ".join(str(error).split())) from error
    if not trial.get_hookcallers(plugin):
        raise Rejected(Phase.HOOKS, f"it implements no hook; mark a function with @hookimpl: {', '.join(_HOOKS)}")


def _check_hook_names(plugin: Any, trial: pluggy.PluginManager) -> None:
    for name in dir(plugin):
        options = trial.parse_hookimpl_opts(plugin, name)
        hook = (options.get("specname") if options is not None else None) or name
        if options is not None and hook not in _HOOKS:
            raise Rejected(Phase.HOOKS, f"no hook named '{hook}'.{near_miss(hook, _HOOKS)} Hooks: {', '.join(_HOOKS)}")
        if options is None and name in _HOOKS and callable(getattr(plugin, name)):
            raise Rejected(Phase.HOOKS, f"function '{name}' is not marked with @hookimpl, so it would never be called")


class _Collector:
    """Receives a plugin's registrations, keeps every name it tried and the first fault."""

    def __init__(self, origin: Origin, registry: Registry, presets: list[Preset]) -> None:
        self.entries: list[tuple[Entry, bool]] = []
        self.wanted: list[tuple[str, str]] = []
        self._origin = origin
        self._registry = registry
        self._presets = {(preset.kind, preset.name): preset for preset in presets}
        self._fault: str | None = None

    def collect(self, kind: str, hook: Callable[..., Any]) -> None:
        """Call a registration hook with a registrar of this kind; an exception becomes the fault."""
        error = raised_by(hook, register=self._registrar(kind))
        if error is not None:
            self._fault = self._fault or f"{_HOOK_OF_KIND[kind]} raised {with_line(error)}"

    def raise_fault(self) -> None:
        """Raise Rejected with the first fault, if there was one."""
        if self._fault is not None:
            raise Rejected(Phase.REGISTER, self._fault, tuple(self.wanted))

    def _registrar(self, kind: str) -> hookspecs.Registrar:
        def register(
            name: str,
            target: str,
            *,
            config: type | None = None,
            help: str = "",
            needs: Needs = Needs(),  # noqa: B008 - frozen
            priority: int = 0,
            replace: bool = False,
            architectures: tuple[str, ...] = (),
            methods: tuple[str, ...] = (),
            arguments: type | None = None,
        ) -> None:
            """See Registrar. The TypeError of a wrong call shows this function's name to the plugin's author."""
            claims = architectures, methods, replace, arguments
            entry = Entry(kind, name, target, self._origin, config, help, needs, priority, *claims)
            self.wanted.append((kind, str(name)))
            # A fault is remembered, not raised: the names that follow are wanted too, and blamed on this plugin.
            self._fault = self._fault or entry_fault(entry) or self._name_fault(entry, replace)
            self.entries.append((entry, replace))

        register.__qualname__ = "register"
        return register

    def _name_fault(self, entry: Entry, replace: bool) -> str | None:
        if any((own.kind, own.name) == (entry.kind, entry.name) for own, _ in self.entries):
            return f"{entry.kind} '{entry.name}' is registered twice by this plugin"
        taken = self._registry.find(entry.kind, entry.name)
        if taken is not None and not replace:
            return (
                f"{entry.kind} '{entry.name}' is already registered by {taken.origin}; choose another name, or pass "
                "replace=True"
            )
        for other in EXTENSION_KINDS if entry.kind in EXTENSION_KINDS else ():
            if other != entry.kind and (holder := self._registry.find(other, entry.name)) is not None:
                return (
                    f"{entry.kind} '{entry.name}' has the name of a {other} of {holder.origin}, and requests use both "
                    "by sampling.extra_args; choose another name"
                )
        preset = self._presets.get((entry.kind, entry.name))
        return f"{entry.kind} '{entry.name}' is already a preset of {preset.distribution}" if preset else None


def _check_presets(
    trial: pluggy.PluginManager, origin: Origin, registry: Registry, presets: list[Preset], collector: _Collector
) -> tuple[list[str], list[Preset]]:
    wanted = tuple(collector.wanted)
    packages = _config_packages(trial, wanted)
    taken = {(entry.kind, entry.name) for entry in registry} | set(wanted)
    taken |= {(preset.kind, preset.name) for preset in presets}
    found = [(preset, package) for package in packages for preset in _package_presets(package, origin, wanted)]
    wanted = (*wanted, *((preset.kind, preset.name) for preset, _ in found))
    for preset, package in found:
        if (preset.kind, preset.name) in taken:
            raise Rejected(
                Phase.PRESETS, f"preset {preset.kind}/{preset.name} bears the name of an option or preset", wanted
            )
        # Without the folder of the package, for the reason that `with_line` gives.
        file = "/".join([*package.split("."), preset.kind, preset.path.name])
        if (fault := preset_fault(preset, file)) is not None:
            raise Rejected(Phase.PRESETS, fault, wanted)
        taken.add((preset.kind, preset.name))
    return packages, [preset for preset, _ in found]


def _config_packages(trial: pluggy.PluginManager, wanted: tuple[tuple[str, str], ...]) -> list[str]:
    with Raising(lambda error: Rejected(Phase.PRESETS, f"config_packages raised {with_line(error)}", wanted)):
        answers = trial.hook.config_packages()
    packages = answers[0] if answers else []
    if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
        raise Rejected(Phase.PRESETS, f"config_packages returned {packages!r}, not a list of package names", wanted)
    return packages


def _package_presets(package: str, origin: Origin, wanted: tuple[tuple[str, str], ...]) -> list[Preset]:
    spec = spec_of(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        cause = f"config_packages names '{package}', which is no importable package with an __init__.py"
        raise Rejected(Phase.PRESETS, cause, wanted)
    try:
        return presets_in(spec.submodule_search_locations[0], origin.distribution)
    except Exception as error:
        raise Rejected(Phase.PRESETS, f"config package '{package}': {one_line(error)}", wanted) from error
