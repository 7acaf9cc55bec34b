"""Turns plain values into an instance of a config dataclass, checked and converted by OmegaConf.

Every error names the full key. Knows no kind and no plugin: `core.config` says which dataclass belongs to which key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from core.entry_check import one_line
from core.errors import ConfigError, HooklineError
from core.registry import near_miss

_TYPE_NAMES = {"Integer": "an int", "Float": "a float", "Boolean": "a bool", "String": "a str"}


def build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass `cls` with `values` laid over its defaults. `prefix` names it in errors.

    Raises: ConfigError for an unknown key (with the near miss), a wrong type, a value that is missing, or one that the
    dataclass itself refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_keys(values, (field.name for field in dataclasses.fields(cls) if field.init), prefix)
    try:
        node = OmegaConf.merge(OmegaConf.structured(cls), dict(values))
        _refuse_missing(OmegaConf.missing_keys(node), prefix)
        return _with_tuples(OmegaConf.to_object(node))
    except HooklineError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(describe(error, values, prefix)) from error
    except Exception as error:
        raise ConfigError(f"{prefix}: {one_line(error).partition(': ')[2] or one_line(error)}") from error


def check_keys(values: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> None:
    """Refuse keys that nothing would read.

    Raises: ConfigError with the near miss and the known keys.
    """
    names = list(known)
    for key in values:
        if key not in names:
            raise ConfigError(unknown_key(f"{prefix}.{key}" if prefix else str(key), names))


def unknown_key(key: str, available: Iterable[str]) -> str:
    """The message for a key that does not exist; `available` are the last parts of those that do."""
    names = [str(name) for name in available]
    hint = near_miss(key.rpartition(".")[2], names)
    return f"unknown key '{key}'.{hint} Available: {', '.join(names) or 'none'}"


def describe(error: Exception, values: Any, prefix: str) -> str:
    """One line for what OmegaConf found wrong: `engine.max_num_seqs='abc' is not an int`."""
    full_key = str(getattr(error, "full_key", None) or "")
    key = ".".join(part for part in (prefix, full_key) if part)
    text = str(error).partition("\n")[0]
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        parent = getattr(error, "parent_node", None)
        return unknown_key(key, list(parent) if parent is not None else [])
    value = _lookup(values, full_key)
    if converted := re.search(r"could not be converted to (\w+)", text):
        return f"{key}={value!r} is not {_TYPE_NAMES.get(converted[1], converted[1])}"
    if "Incompatible value 'None'" in text:
        return f"{key} must have a value; it is None"
    return f"{key}={value!r}: {' '.join(text.split())}"


def _lookup(values: Any, full_key: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", full_key):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list | tuple) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            break
    return values


def _refuse_missing(keys: Iterable[str], prefix: str) -> None:
    for key in sorted(keys):
        raise ConfigError(f"{prefix}.{key} has no value and no default; set {prefix}.{key}=...")


def _with_tuples(instance: Any) -> Any:
    # OmegaConf reads a tuple as a list; a plain dataclass gets back what its default says.
    for field in dataclasses.fields(instance):
        if isinstance(field.default, tuple) and isinstance(getattr(instance, field.name), list):
            object.__setattr__(instance, field.name, tuple(getattr(instance, field.name)))
    return instance
