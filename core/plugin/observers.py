"""Calls the observers of an engine, and names the one that raised.

There are two ways to observe: a plugin implements the hooks and sees every engine, or it registers an observer, which
sees the engines whose configuration names it. Knows nothing of engines; a hook without observers costs one look-up.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from hookline.core.contracts import is_offered
from hookline.core.errors import PASSES, PluginError
from hookline.core.plugin.needs import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookline.core.plugin.registry import Option

OBSERVER_HOOKS = ("on_engine_start", "on_step_end", "on_request_end", "on_engine_stop")


class Observers:
    """The hooks of one plugin manager and the chosen observers of one engine, looked up once.

    chosen: observers by name; each has any of the observer hooks as methods.
    """

    def __init__(self, manager: pluggy.PluginManager, chosen: Mapping[str, Any] | None = None) -> None:
        self.chosen = dict(chosen or {})
        calls = {hook: self._calls_of(hook, manager) for hook in OBSERVER_HOOKS}
        self._calls = {hook: found for hook, found in calls.items() if found}

    def _calls_of(self, hook: str, manager: pluggy.PluginManager) -> list[tuple[str, Callable[..., Any]]]:
        caller = getattr(manager.hook, hook)
        methods = [(name, getattr(observer, hook)) for name, observer in self.chosen.items()]
        chosen = [(f"observer '{name}'", method) for name, method in methods if is_offered(method)]
        return [*([("", caller)] if caller.get_hookimpls() else []), *chosen]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call everybody who implements a hook.

        Raises: PluginError naming the plugin or the observer that raised.
        """
        for name, call in self._calls.get(hook, ()):
            try:
                call(**arguments)
            except PASSES:
                raise
            except BaseException as error:
                whose = name or _culprit(call, error)
                raise PluginError(f"{hook} of {whose} raised {type(error).__name__}: {error}") from error


def make_observers(options: Iterable[Option]) -> dict[str, Any]:
    """The observers that a configuration names, by name.

    Raises: PluginError for one that cannot be used here or cannot be made, with the cause.
    """
    return {option.name: _make(option) for option in options}


def _make(option: Option) -> Any:
    entry = option.entry
    assert entry is not None, "only kernels are chosen without an entry"
    reasons = unavailable(entry.needs)
    if reasons:
        raise PluginError(f"{entry} cannot be used here: {'; '.join(reasons)}")
    try:
        return entry.load()(option.config)
    except (PluginError, *PASSES):
        raise
    except BaseException as error:
        raise PluginError(f"{entry} cannot be made: {type(error).__name__}: {error}") from error


def _culprit(caller: Any, error: BaseException) -> str:
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    names = [impl.plugin_name for impl in caller.get_hookimpls() if getattr(impl.function, "__code__", None) in codes]
    return f"plugin '{names[0]}'" if names else "a plugin"
