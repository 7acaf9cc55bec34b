"""Calls the observers of an engine; an error names the observer that raised it.

There are two ways to observe: a plugin implements the hooks and sees every engine, or it registers an observer, which
sees the engines whose configuration names it. A hook without observers costs one look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from hookline.core.contracts import Observer, is_offered
from hookline.core.errors import PluginError, show_traceback
from hookline.core.outputs import RequestOutput
from hookline.core.plugin.blame import Blaming, with_place
from hookline.core.plugin.needs import unavailable
from hookline.core.util.raising import raised_by

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookline.core.plugin.registry import Option

OBSERVER_HOOKS = tuple(name for name in vars(Observer) if name.startswith("on_"))
_ALWAYS_TOLD = {"on_engine_start", "on_engine_stop"}
_log = logging.getLogger("hookline")


class ChosenObservers(dict[str, Any]):
    """Observers by name. titles: their names in errors, which say whose plugin each is."""

    def __init__(self, made: Mapping[str, Any], titles: Mapping[str, str]) -> None:
        super().__init__(made)
        self.titles = dict(titles)


class Observers:
    """The hooks of one plugin manager and the chosen observers of one engine, looked up once.

    manager: None has no plugins. chosen: observers by name; each has any of the observer hooks as methods.
    """

    def __init__(self, manager: pluggy.PluginManager | None = None, chosen: Mapping[str, Any] | None = None) -> None:
        self.chosen = dict(chosen or {})
        self._titles = chosen.titles if isinstance(chosen, ChosenObservers) else {}
        self.faults: list[PluginError] = []
        """Why observers were switched off, in order of time."""
        calls = {hook: self._calls_of(hook, manager) for hook in OBSERVER_HOOKS}
        self._calls = {hook: found for hook, found in calls.items() if found}

    def _calls_of(self, hook: str, manager: pluggy.PluginManager | None) -> list[tuple[str, Callable[..., Any]]]:
        methods = [(name, getattr(observer, hook)) for name, observer in self.chosen.items()]
        chosen = [
            (self._titles.get(name, f"observer '{name}'"), method) for name, method in methods if is_offered(method)
        ]
        return [*(_plugins_calls(hook, manager) if manager is not None else ()), *chosen]

    def hears(self, hook: str) -> bool:
        """Whether an observer implements a hook; if none does, its arguments need not be computed."""
        return hook in self._calls

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call all observers that implement a hook. An observer that raises is switched off, except for on_engine_stop.

        Each gets a copy of a RequestOutput, so that an observer which changes its lists does not change the caller's.

        Raises: PluginError naming the plugin or the observer that raised while the engine starts or stops.
        """
        for who, call in tuple(self._calls.get(hook, ())):
            given = {name: one.copy() if isinstance(one, RequestOutput) else one for name, one in arguments.items()}
            error = raised_by(call, **given)
            if error is not None:
                fault = PluginError(f"{hook} of {who} raised {with_place(error)}")
                fault.__cause__ = error
                if hook in _ALWAYS_TOLD:
                    raise fault
                self._switch_off(who, fault)

    def _switch_off(self, who: str, fault: PluginError) -> None:
        self.faults.append(fault)
        for hook in self._calls.keys() - _ALWAYS_TOLD:
            self._calls[hook] = [(name, call) for name, call in self._calls[hook] if name != who]
        show_traceback(fault)
        _log.error("%s is switched off, the engine goes on: %s", who, " ".join(str(fault).split()))

    def check(self) -> None:
        """Raise the first fault, if an observer was switched off."""
        if self.faults:
            raise self.faults[0]


def make_observers(options: Iterable[Option]) -> ChosenObservers:
    """The observers that a configuration names, by name.

    Raises: PluginError, with the cause, for an observer that cannot be used here or whose constructor fails.
    """
    made = {option.name: (_make(option), str(option.entry)) for option in options}
    return ChosenObservers(
        {name: observer for name, (observer, _) in made.items()}, {name: title for name, (_, title) in made.items()}
    )


def _make(option: Option) -> Any:
    entry = option.entry
    assert entry is not None, "only kernels are chosen without an entry"
    reasons = unavailable(entry.needs)
    if reasons:
        raise PluginError(f"{entry} cannot be used here: {'; '.join(reasons)}")
    with Blaming((), "in __init__", otherwise=entry):
        return entry.load()(option.config)


def _plugins_calls(hook: str, manager: pluggy.PluginManager) -> list[tuple[str, Callable[..., Any]]]:
    """A call for each plugin that implements the hook, the last registered first as pluggy has it."""
    impls = reversed(getattr(manager.hook, hook).get_hookimpls())
    names = {impl.plugin_name: impl.plugin for impl in impls}
    everybody = manager.get_plugins()
    return [
        (_plugin_named(name), manager.subset_hook_caller(hook, [one for one in everybody if one is not plugin]))
        for name, plugin in names.items()
    ]


def _plugin_named(key: str) -> str:
    distribution, _, plugin = key.rpartition(":")
    return f"plugin '{plugin}'" + (f" ({distribution})" if distribution else "")
