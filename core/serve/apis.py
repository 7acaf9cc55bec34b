"""Which API surfaces a server's configuration names. Imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.core.config.settings import option_of
from hookline.core.errors import ConfigError, shown
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import API, Option


def chosen_apis(given: Sequence[Any] | None, host: PluginHost) -> list[Option]:
    """The options that the value of serve.apis names; none of their classes is imported.

    Raises: PluginError for an unknown name; ConfigError for a field, for a name that is given twice, or for no name.
    """
    if given is None:
        entries = sorted(host.registry.of_kind(API), key=lambda entry: -entry.priority)
        given = [entry.name for entry in entries if entry.priority > 0]
    options = [option_of(API, one, host, "serve.apis") for one in given]
    names = [option.name for option in options]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"serve.apis names '{name}' twice")
    if not options:
        known = ", ".join(host.registry.names(API)) or "none is installed"
        raise ConfigError(f"serve.apis={shown(list(given))} names no API; there are: {known}")
    return options
