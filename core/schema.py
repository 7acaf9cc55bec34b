"""Turns plain values into an instance of a config dataclass, checked and converted by OmegaConf.

Every error names the full key. Knows no kind and no plugin: `core.config` says which dataclass belongs to which key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from core.entry_check import one_line
from core.errors import ConfigError, HooklineError
from core.registry import near_miss

_WRONG_TYPE = re.compile(r"Value '(.*)' (?:of type '(\w+)' could not be converted to|is not a valid) (\w+).*")
_TYPE_NAMES = {"Integer": "an int", "Float": "a float", "Boolean": "a bool", "bool": "a bool", "String": "a str"}


def build(cls: type, values: Mapping[str, Any], prefix: str, elsewhere: Iterable[str] = ()) -> Any:
    """An instance of the dataclass `cls` with `values` laid over its defaults. `prefix` names it in errors.

    elsewhere: full keys that may have been meant, if an unknown one is near none of the dataclass's own.

    Raises: ConfigError for an unknown key (with the near miss), a wrong type, a value that is missing, or one that the
    dataclass itself refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_keys(values, (field.name for field in dataclasses.fields(cls) if field.init), prefix, elsewhere)
    try:
        node = OmegaConf.merge(OmegaConf.structured(cls), dict(values))
        _refuse_missing(OmegaConf.missing_keys(node), prefix)
        return _with_tuples(OmegaConf.to_object(node))
    except HooklineError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(describe(error, prefix)) from error
    except Exception as error:
        raise ConfigError(f"{prefix}: {one_line(error).partition(': ')[2] or one_line(error)}") from error


def check_keys(
    values: Mapping[str, Any], known: Iterable[str], prefix: str = "", elsewhere: Iterable[str] = ()
) -> None:
    """Refuse keys that nothing would read.

    Raises: ConfigError with the near miss and the known keys.
    """
    names = list(known)
    for key in values:
        if key not in names:
            raise ConfigError(unknown_key(f"{prefix}.{key}" if prefix else str(key), names, elsewhere))


def unknown_key(key: str, available: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The message for a key that does not exist.

    available: the last parts of those that do. elsewhere: full keys to suggest if none of these is near.
    """
    names, last = [str(name) for name in available], key.rpartition(".")[2]
    others = {name.rpartition(".")[2]: name for name in elsewhere}
    hint = near_miss(last, names)
    if not hint and (other := difflib.get_close_matches(last, others, n=1)):
        hint = f" Did you mean '{others[other[0]]}'?"
    return f"unknown key '{key}'.{hint} Available: {', '.join(names) or 'none'}"


def describe(error: Exception, prefix: str = "") -> str:
    """One line for what OmegaConf found wrong: `engine.max_num_seqs='abc' is not an int`."""
    full_key = str(getattr(error, "full_key", None) or "")
    key = ".".join(part for part in (prefix, full_key) if part)
    text = str(error).partition("\n")[0]
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        return unknown_key(key, _keys_around(error))
    if wrong := re.fullmatch(
        r"Value '(.*)' (?:of type '(\w+)' could not be converted to|is not a valid) (\w+).*", text
    ):
        value = wrong[1] if wrong[2] not in ("str", None) else repr(wrong[1])
        return f"{key}={value} is not {_TYPE_NAMES.get(wrong[3], wrong[3])}"
    if "Incompatible value 'None'" in text:
        return f"{key} must have a value; it is None"
    return f"{key}: {' '.join(text.split())}"


def _keys_around(error: Exception) -> list[str]:
    parent = getattr(error, "parent_node", None)
    return [str(key) for key in parent] if parent is not None else []


def _refuse_missing(keys: Iterable[str], prefix: str) -> None:
    for key in sorted(keys):
        raise ConfigError(f"{prefix}.{key} has no value and no default; set {prefix}.{key}=...")


def _with_tuples(instance: Any) -> Any:
    # OmegaConf reads a tuple as a list; a plain dataclass gets back what its default says.
    for field in dataclasses.fields(instance):
        if isinstance(field.default, tuple) and isinstance(getattr(instance, field.name), list):
            object.__setattr__(instance, field.name, tuple(getattr(instance, field.name)))
    return instance
