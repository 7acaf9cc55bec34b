"""Calls the observer hooks, and says whose observer raised.

Knows pluggy and nothing of engines. A hook nobody implements costs one dictionary look-up.
"""

from __future__ import annotations

import traceback
from typing import Any

import pluggy

from core.errors import PluginError

OBSERVER_HOOKS = ("on_engine_start", "on_step_end", "on_request_end", "on_engine_stop")


class Observers:
    """The observers of one plugin manager, looked up once."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        callers = {name: getattr(manager.hook, name) for name in OBSERVER_HOOKS}
        self._callers = {name: caller for name, caller in callers.items() if caller.get_hookimpls()}

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call every implementation of a hook.

        Raises: PluginError naming the plugin whose implementation raised.
        """
        caller = self._callers.get(hook)
        if caller is None:
            return
        try:
            caller(**arguments)
        except Exception as error:
            raise PluginError(f"{hook} of {_culprit(caller, error)} raised {type(error).__name__}: {error}") from error


def _culprit(caller: Any, error: Exception) -> str:
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    names = [impl.plugin_name for impl in caller.get_hookimpls() if getattr(impl.function, "__code__", None) in codes]
    return f"plugin '{names[0]}'" if names else "a plugin"
