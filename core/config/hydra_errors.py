"""Converts errors of Hydra and OmegaConf to our own: one line with the key, the near miss and the fix.

Reads their exceptions and messages, and asks the plugin host whether a broken plugin is the cause. Composes nothing.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from hookline.core.config.hydra_options import as_typed, parsed, quoted
from hookline.core.config.schema import describe, unknown_key
from hookline.core.config.settings import LIMIT_KEYS, ROOT_KEYS
from hookline.core.errors import ConfigError, HooklineError, clipped
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import yaml_fault
from hookline.core.plugin.registry import KINDS, MODEL
from hookline.core.util.process import called_as
from hookline.core.util.text import near_miss

EXTRAS = {
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
    "optuna": "optuna",
}
"""Launchers and sweepers of Hydra's ecosystem, each with the extra of ours that brings it."""
_INTERNAL_KEYS = ("name", "hydra", "experiment")


def explain(error: Exception, host: PluginHost) -> HooklineError | None:
    """The error to raise in place of an error of Hydra; None if the user did not cause it."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if isinstance(error, HooklineError):
        return error
    if isinstance(error, OverrideParseException):
        return _unparsable(as_typed(error.override))
    if isinstance(error, MissingConfigException):
        return _unknown_option(error.missing_cfg_file or "", list(error.options or []), str(error), host)
    cause = _innermost(error)
    if isinstance(cause, YAMLError):
        return ConfigError(yaml_fault(cause))
    if isinstance(cause, OmegaConfBaseException):
        return _bad_value(cause, str(error))
    return ConfigError(_plain(str(error))) if isinstance(error, HydraException | ValueError) else None


def _unparsable(override: str) -> ConfigError:
    key, equals, value = override.partition("=")
    if not equals:
        example = f", as in model={override}" if "/" in override else ""
        return ConfigError(f"cannot read argument '{override}'; arguments have the form key=value{example}")
    some = ",".join(one for one in value.split(",") if one.strip())
    if some not in ("", value) and parsed(f"{key}={some}") is not None:
        return ConfigError(f"{key}={value} has nothing at a side of a comma; write {key}={some}")
    plain = quoted(override)
    told = shlex.quote(plain) if {*plain} & {*'"$`\\!'} else f'"{plain}"'
    return ConfigError(f"cannot read the value of {key}={value}; put it in quotes: {told}")


def _unknown_option(path: str, options: list[str], message: str, host: PluginHost) -> HooklineError:
    group, _, name = path.removesuffix(".yaml").rpartition("/")
    if group == MODEL and Path(name).is_dir():
        key = shlex.quote(f"model.checkpoint=./{name}")
        return ConfigError(f"no model named '{clipped(name)}'; for the folder of this name: {key}")
    if group in KINDS:
        presets = [preset.name for preset in host.presets if preset.kind == group]
        return host.unknown(group, name, [*presets, *options])
    if not group:
        return ConfigError(_plain(message))
    extra = EXTRAS.get(name) if group.startswith("hydra/") else None
    if extra:
        return ConfigError(f"{group}: '{name}' is not installed; pip install \"hookline[{extra}]\" brings it")
    available = ", ".join(options) or "none"
    return ConfigError(f"no {group} named '{name}'.{near_miss(name, options)} Available: {available}")


def _bad_value(cause: Exception, message: str) -> ConfigError:
    overridden = re.match(r"Could not override '([^']+)'", message)
    if "list index out of range" in str(cause):
        return ConfigError(f"{getattr(cause, 'full_key', None) or message}: the list has fewer items")
    if overridden is None:
        return ConfigError(describe(cause))
    parent = getattr(cause, "parent_node", None)
    full_key = str(getattr(cause, "full_key", None) or overridden[1])
    # OmegaConf names the whole key even if the unknown part is in the middle of it.
    keys = [str(key) for key in parent] if parent is not None and hasattr(parent, "keys") else []
    available = [key for key in keys if key not in _INTERNAL_KEYS]
    inner = [f"{key}.{one}" for key in available for one in _keys_below(parent, key)] if "." not in full_key else []
    return ConfigError(unknown_key(full_key, available, (*inner, *LIMIT_KEYS, *ROOT_KEYS)))


def _keys_below(parent: Any, key: str) -> list[str]:
    node = parent._get_node(key)  # the unresolved node: reading its value would resolve interpolations
    return [str(one) for one in node if one not in _INTERNAL_KEYS] if hasattr(node, "keys") else []


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _plain(message: str) -> str:
    if message.startswith("No trials are completed"):
        return "no trial gave a figure to compare, so there is no best one"
    unused = re.match(r"Could not override '([^']+)'\. No match in the defaults list", message)
    if unused:
        hint = f"; {called_as('bench')} takes it" if unused[1] == "workload" else "; --help lists its keys"
        return f"this command takes no '{unused[1]}'{hint}"
    ambiguous = re.search(r"Ambiguous value for argument '(.*)'", message)
    if ambiguous:
        return f"{ambiguous[1]} has several values; add -m to run one job for each, or quote a value that has commas"
    return " ".join(message.split())
