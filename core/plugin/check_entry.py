"""Checks the form of a registration: its name, its target, and its config dataclass, which must be a schema.

Looks at one entry alone; `core.plugin.check_plugin` checks that its name is free. Imports no target and no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hookline.core.contracts import ATTENTION_FEATURES, FromSamplingParams, ModelConfig, Needs, QuantizationConfig
from hookline.core.errors import ConfigError, shown
from hookline.core.plugin.problems import with_line
from hookline.core.plugin.registry import AUTO, EXECUTOR, EXTENSION_KINDS, LOCAL, MODEL, QUANTIZATION, Entry
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.raising import Raising, raised_by
from hookline.core.util.ranges import check_ranges
from hookline.core.util.text import joined, near_miss, one_line

_BASES: dict[str, type] = {MODEL: ModelConfig, QUANTIZATION: QuantizationConfig}
"""The base class of the config dataclasses of these kinds."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PLAIN = (bool, int, float, str)
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def entry_fault(entry: Entry) -> str | None:
    """The first fault of a registration, in one line; None if it is sound."""
    what = f"{entry.kind} '{entry.name}'"
    if not _matches(_NAME, entry.name):
        return f"{what}: a name consists of letters, digits, _ and -, and starts with a letter"
    if entry.name == AUTO:
        return f"{what}: this name is reserved for the choice that core makes"
    if (entry.kind, entry.name) == (EXECUTOR, LOCAL):
        return f"{what}: this name is reserved for ranks that are processes of the engine's own host"
    if not _matches(_TARGET, entry.target):
        return f"{what}: target {entry.target!r} is not of the form 'package.module:Class'"
    for field, value, kind in (
        ("help", entry.help, str),
        ("needs", entry.needs, Needs),
        ("priority", entry.priority, int),
    ):
        if not isinstance(value, kind):
            return f"{what}: {field}={value!r} is not of type {kind.__name__}"
    fault = _needs_fault(entry.needs) or _claims_fault(entry) or _arguments_fault(entry) or _config_fault(entry)
    return f"{what}: {fault}" if fault else None


def _needs_fault(needs: Needs) -> str | None:
    """A malformed need would be compared for every entry of its kind, chosen or not."""
    for field in ("devices", "dtypes", "packages"):
        if not _all_of(str, getattr(needs, field)):
            return f"needs.{field}={getattr(needs, field)!r} is not a tuple of strings"
    for field in ("block_size_multiple", "preferred_block_size"):
        if not _all_of(int, (getattr(needs, field),)) or getattr(needs, field) < 1:
            return f"needs.{field}={getattr(needs, field)!r} is not a whole number of at least 1"
    if not _all_of(str, needs.attention):
        return f"needs.attention={needs.attention!r} is not a tuple of strings"
    if (fault := features_fault("needs.attention", needs.attention)) is not None:
        return fault
    if not _all_of(int, needs.head_dims):
        return f"needs.head_dims={needs.head_dims!r} is not a tuple of whole numbers"
    capability = needs.compute_capability
    if capability is not None and not (_all_of(int, capability) and len(capability) == 2):
        return f"needs.compute_capability={capability!r} is not a pair of whole numbers such as (8, 0)"
    return None


def _claims_fault(entry: Entry) -> str | None:
    for field in ("architectures", "methods"):
        claimed = getattr(entry, field)
        if not _all_of(str, claimed) or not all(claimed):
            return f"{field}={claimed!r} is not a tuple of names"
    if entry.methods and entry.kind != QUANTIZATION:
        return "methods are a quantization's, and it is none"
    return "architectures are a model's, and it is none" if entry.architectures and entry.kind != MODEL else None


def _all_of(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def _arguments_fault(entry: Entry) -> str | None:
    """The first fault of the dataclass of a request's arguments, which only step extensions have."""
    arguments = entry.arguments
    if entry.kind not in EXTENSION_KINDS:
        return None if arguments is None else "arguments are a step extension's, and it is none"
    if arguments is None:
        return f"{entry.arguments_key} must be the dataclass of a request's arguments; it is None"
    fault = _dataclass_fault(entry.arguments_key, arguments, has_defaults=False)
    if fault is not None or entry.config is None or not _is_dataclass(entry.config):
        return fault
    for field in dataclasses.fields(arguments):
        if field.name in {one.name for one in dataclasses.fields(entry.config)}:
            return f"config and arguments both have a field '{field.name}', and extensions.{entry.name} sets either"
    return None


def _config_fault(entry: Entry) -> str | None:
    config = entry.config
    base = _BASES.get(entry.kind)
    if config is None:
        return f"config must extend hookline.core.contracts.{base.__name__}; it is None" if base else None
    if base is not None and _is_dataclass(config) and not issubclass(config, base):
        return f"config {config.__name__} does not extend hookline.core.contracts.{base.__name__}"
    return _dataclass_fault("config", config, has_defaults=True)


def _dataclass_fault(what: str, config: Any, *, has_defaults: bool) -> str | None:
    """Why this is no schema. has_defaults: whether its defaults are valid values, which are then checked too."""
    name = getattr(config, "__name__", repr(config))
    if not _is_dataclass(config):
        return f"{what} {name} is not a dataclass"
    for field in dataclasses.fields(config):
        if field.name == "name":
            return f"{what} {name} has a field 'name', which is the option's own name"
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            return f"{what} {name} has no default for field '{field.name}'"
    return _foreign_field(config) or _schema_fault(config, has_defaults=has_defaults)


def _foreign_field(config: type) -> str | None:
    """The fault of a FromSamplingParams dataclass with a field that SamplingParams does not have."""
    if not issubclass(config, FromSamplingParams):
        return None
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    for field in dataclasses.fields(config):
        if field.name not in known:
            return f"config {config.__name__} extends FromSamplingParams, which has no field '{field.name}'"
    return None


def features_fault(what: str, features: Iterable[str]) -> str | None:
    """The first of these words that is none of ATTENTION_FEATURES, as a message; None if all are. what: the setting."""
    for feature in features:
        if feature not in ATTENTION_FEATURES:
            hint = near_miss(str(feature), ATTENTION_FEATURES)
            return f"{what} has {shown(feature)}.{hint} There is: {', '.join(ATTENTION_FEATURES)}"
    return None


def _schema_fault(config: type, *, has_defaults: bool) -> str | None:
    cannot = f"config {config.__name__} cannot be a configuration schema"
    try:
        with Raising(lambda error: ConfigError(f"{cannot}: {one_line(error)}")):
            is_complete = _is_complete_schema(config)
    except ConfigError as error:
        return str(error)
    return _defaults_fault(config) if has_defaults and is_complete else None


@cache  # plugins are checked again for each engine of a process
def _is_complete_schema(config: type) -> bool:
    """Whether all its fields have values. Raises OmegaConf's error, which is not cached, if it is no schema."""
    if is_plain_schema(config):
        return True  # as OmegaConf would find; importing it takes a third of a short command's time
    from omegaconf import OmegaConf

    return not OmegaConf.missing_keys(OmegaConf.structured(config))


def is_plain_schema(config: type) -> bool:
    """Whether OmegaConf surely accepts the dataclass, with a value for each field.

    That is so if each field is a bool, a number or a text, a list, tuple or dict of these, or such a type or None, with
    a default of exactly this type.
    Raises: any error of evaluating annotations or of a default's factory.
    """
    types = get_type_hints(config)
    return all(_is_plain(types[one.name], _default(one)) for one in dataclasses.fields(config))


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _is_plain(annotation: Any, value: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        others = [one for one in inner if one is not NoneType]
        return len(others) == 1 < len(inner) and (value is None or _is_plain(others[0], value)) and _is_known(others[0])
    if type(value) is not (origin or annotation) or not _is_known(annotation):
        return False
    if origin in (list, tuple):
        return all(_is_plain(inner[0], one) for one in value)
    # A text may be an interpolation, or OmegaConf's mark of a missing value.
    return not value if origin is dict else not isinstance(value, str) or ("${" not in value and value != "???")


def _is_known(annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return inner[0] in _PLAIN and inner[1] in (*_PLAIN, Any)
    if origin in (list, tuple):
        return inner[0] in (*_PLAIN, Any) and inner[1:] == ((...,) if origin is tuple else ())
    return annotation in _PLAIN


def _defaults_fault(config: type) -> str | None:
    """Why the dataclass refuses its own defaults, for which users would be blamed later."""
    error = raised_by(lambda: _check_ranges(config()))
    if error is None:
        return None
    why = error if isinstance(error, ConfigError) else with_line(error)
    return f"config {config.__name__} refuses its own defaults: {why}"


def _check_ranges(config: Any, prefix: str = "") -> None:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    check_ranges(type(config), values, prefix)
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            _check_ranges(value, joined(prefix, name))


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_dataclass(value: object) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)
