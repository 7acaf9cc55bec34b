"""Says which plugin is to blame when an engine cannot be started, for errors that are none of ours.

Knows plugins by the modules of their targets, and nothing of engines.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import FrameType
from typing import TypeVar

from core.config import Config
from core.entry_check import one_line
from core.errors import HooklineError, PluginError
from core.plugin_host import PluginHost
from core.registry import Entry

Result = TypeVar("Result")


def blames_plugins(start: Callable[[Config, PluginHost], Result]) -> Callable[[Config, PluginHost], Result]:
    """Turn what a chosen plugin's code raises while an engine starts into one line that names the plugin.

    Raises: PluginError with the plugin, the error and its place; other errors, which are bugs of ours, as they are.
    """

    @wraps(start)
    def guarded(config: Config, host: PluginHost) -> Result:
        try:
            return start(config, host)
        except HooklineError:
            raise
        except Exception as error:
            blame = _blame(error, list(_chosen(config, host)))
            if blame is None:
                raise
            raise PluginError(f"{blame} fails while starting: {one_line(error)} ({_place(error)})") from error

    return guarded


def _chosen(config: Config, host: PluginHost) -> Iterator[Entry]:
    for option in (config.model, config.scheduler, config.sampler, config.kernels, *config.observers):
        if option.entry is not None:
            yield option.entry
    if config.kernels.entry is None:
        yield from host.registry.of_kind("kernels")


def _blame(error: Exception, entries: Iterable[Entry]) -> str | None:
    """The entry in whose module, or else the plugin in whose package, the innermost frame lies that is a plugin's."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame in _frames(error)]
    for module in reversed(modules):
        for entry in entries:
            if module == _module(entry):
                return f"{entry.kind} '{entry.name}' of {entry.origin}"
        for entry in entries:
            package = _module(entry).rpartition(".")[0]
            if package and module.startswith(f"{package}."):
                return f"a {entry.kind} of {entry.origin}"
    return None


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _module(entry: Entry) -> str:
    return entry.target.partition(":")[0]


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}"
