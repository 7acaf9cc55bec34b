"""Converts plain values to an instance of a config dataclass, with OmegaConf's checks and conversions.

Values are taken literally: nothing in them is interpolated, because they may come from a request. Every error names the
full key. `core.config.settings` says which dataclass belongs to which key.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.core.errors import MAX_TEXT, BrokenConfigError, ConfigError, HooklineError, clipped, shown
from hookline.core.plugin.blame import with_place
from hookline.core.util.field_docs import field_docs
from hookline.core.util.ranges import check_ranges
from hookline.core.util.text import joined, near_miss, one_line

MISSING = "???"
"""OmegaConf's mark for a field without a default; as a value it is refused."""
_WRONG_TYPE = re.compile(r"Value '(.*)' (?:of type '(\w+)' could not be converted to|is not a valid) (\w+).*")
_STAND_IN = "⟦text {}⟧"
_STAND_INS = re.compile(_STAND_IN.format("([0-9]{1,12})"))
_TYPE_NAMES = {"Integer": "an int", "Float": "a float", "Boolean": "a bool", "String": "a str"}
_TYPE_NAMES |= {"bool": "a bool", "int": "an int", "float": "a float"}


def build(
    cls: type,
    values: Mapping[str, Any],
    prefix: str = "",
    elsewhere: Iterable[str] = (),
    *,
    reads_texts: bool = True,
) -> Any:
    """An instance of the dataclass `cls` with `values` laid over its defaults. `prefix` names it in errors.

    A text arrives exactly as it is, also with `${` in it. elsewhere: full keys that may have been meant, if an unknown
    one is near none of the dataclass's own. reads_texts: whether a text will do for a number or a bool.

    Raises: ConfigError for an unknown key (with the near miss), a wrong type, a value that is missing or `???`, outside
    its field's range, or refused by the dataclass itself.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_keys(values, (field.name for field in dataclasses.fields(cls) if field.init), prefix, elsewhere)
    texts: list[str] = []
    try:
        inert = {key: _inert(value, joined(prefix, key), texts) for key, value in values.items()}
        node = OmegaConf.merge(_writable(OmegaConf.structured(cls)), inert)
        for key in sorted(OmegaConf.missing_keys(node)):
            raise ConfigError(f"{joined(prefix, key)} has no value and no default; set {joined(prefix, key)}=...")
        if not reads_texts:
            _refuse_read_texts(values, node, prefix)
        return _instance(node, texts, prefix)
    except HooklineError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(describe(error, prefix, texts)) from error
    except ValueError as error:
        message = one_line(error).partition(": ")[2] or one_line(error)
        raise ConfigError(f"{prefix}: {clipped(message, 2 * MAX_TEXT)}") from error
    except Exception as error:
        raise BrokenConfigError(f"{prefix}: {with_place(error)}") from error


def _refuse_read_texts(given: Any, node: Any, key: str) -> None:
    """Refuse texts that OmegaConf has read as numbers or bools."""
    if isinstance(given, str) and type(node) in (bool, int, float):
        raise ConfigError(f"{clipped(key)}={shown(given)} is a text, not {_TYPE_NAMES[type(node).__name__]}")
    if isinstance(given, Mapping):
        for name, inner in given.items():
            _refuse_read_texts(inner, node[name], joined(key, name))
    elif isinstance(given, list | tuple):
        for index, inner in enumerate(given):
            _refuse_read_texts(inner, node[index], f"{key}[{index}]")


def _writable(node: Any) -> Any:
    """Make every section of a node writable: OmegaConf takes a frozen dataclass to mean that its values
    may not be set.
    """
    from omegaconf import OmegaConf

    if OmegaConf.is_dict(node):
        OmegaConf.set_readonly(node, None)
        for name in node:
            if not OmegaConf.is_missing(node, name):
                _writable(node[name])
    return node


def _inert(value: Any, key: str, texts: list[str]) -> Any:
    """Replace texts that OmegaConf would interpret by placeholders; the texts go into `texts`.

    Only a short, plain text may be a number, a bool or an enum's name, so all other texts are replaced.
    """
    if isinstance(value, str | Path):
        text = str(value)
        if text == MISSING:
            raise ConfigError(f"{clipped(key)}='{MISSING}' stands for a value that is missing; set {clipped(key)}=...")
        if len(text) <= MAX_TEXT and text.isprintable() and "${" not in text and not _STAND_INS.search(text):
            return value
        texts.append(text)
        return _STAND_IN.format(len(texts) - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _inert(inner, joined(key, name), texts) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_inert(inner, f"{key}[{index}]", texts) for index, inner in enumerate(value)]
    return value


def _with_texts(value: str, texts: Sequence[str]) -> str:
    def _text_of(stand_in: re.Match[str]) -> str:
        index = int(stand_in[1])
        return texts[index] if index < len(texts) else stand_in[0]  # a key may look like one

    return _STAND_INS.sub(_text_of, value)


def _instance(node: Any, texts: Sequence[str], key: str) -> Any:
    """Convert a node of OmegaConf to instances of dataclasses, dicts, lists and values, with the texts in place of
    placeholders.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(node, ListConfig):
        return [_instance(item, texts, f"{key}[{index}]") for index, item in enumerate(node)]
    if isinstance(node, DictConfig):
        values: dict[Any, Any] = {name: _instance(node[name], texts, joined(key, name)) for name in node}
        cls: Any = OmegaConf.get_type(node)
        if cls is dict:
            return values
        check_ranges(cls, values, key)
        return cls(**_with_tuples(cls, values))
    if isinstance(node, str):
        return _with_texts(node, texts)
    return Path(_with_texts(str(node), texts)) if isinstance(node, Path) else node


def _with_tuples(cls: Any, values: dict[Any, Any]) -> dict[Any, Any]:
    # OmegaConf reads a tuple as a list; a field gets the type of its default.
    for field in dataclasses.fields(cls):
        if isinstance(field.default, tuple) and isinstance(values.get(field.name), list):
            values[field.name] = tuple(values[field.name])
    return values


def plain_defaults(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass as plain values; a dataclass among them is a mapping, an empty mapping is None."""
    values = {one.name: _default(one) for one in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING}


def _default(one: dataclasses.Field[Any]) -> Any:
    factory = one.default_factory
    value = one.default if factory is dataclasses.MISSING else factory()
    if dataclasses.is_dataclass(value):
        return plain_defaults(type(value))
    if isinstance(value, Mapping):
        assert not value, f"{one.name}: Hydra would take no further key"
        return None
    return list(value) if isinstance(value, tuple) else value


def documented(cls: type, prefix: str = "") -> Iterator[str]:
    """Lines with each key of a dataclass, its default and its meaning."""
    docs = field_docs(cls)
    for one in dataclasses.fields(cls):
        key, factory = joined(prefix, one.name), one.default_factory
        is_section = dataclasses.is_dataclass(factory)
        yield key if is_section else f"{key}={json.dumps(_default(one))}"
        yield f"    {docs.get(one.name, '')}"
        if is_section:
            yield from documented(factory, key)  # type: ignore[arg-type]


def check_keys(
    values: Mapping[str, Any], known: Iterable[str], prefix: str = "", elsewhere: Iterable[str] = ()
) -> None:
    """Refuse unknown keys.

    Raises: ConfigError with the near miss and the known keys.
    """
    names = list(known)
    for key in values:
        if key not in names:
            raise ConfigError(unknown_key(joined(prefix, key), names, elsewhere))


def unknown_key(key: str, available: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The message for an unknown key. available: the last parts of known keys. elsewhere: full keys to suggest if the
    unknown key is the last part of one, or if none of the available ones is similar.
    """
    key = clipped(key)
    names, (prefix, _, last) = [str(name) for name in available], key.rpartition(".")
    others = {name.rpartition(".")[2]: name for name in elsewhere}
    hint = f" Did you mean '{others[last]}'?" if others.get(last, key) != key else near_miss(last, names, prefix=prefix)
    import difflib

    if not hint and (other := difflib.get_close_matches(last, others, n=1)):
        hint = f" Did you mean '{others[other[0]]}'?"
    return f"unknown key '{key}'.{hint} Available: {', '.join(names) or 'none'}"


def describe(error: Exception, prefix: str = "", texts: Sequence[str] = ()) -> str:
    """OmegaConf's error in one line: `engine.max_num_seqs='abc' is not an int`. texts: see `build`."""
    full_key = str(getattr(error, "full_key", None) or "")
    key = clipped(joined(prefix, full_key))
    text = str(error).partition("\n")[0]
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        return unknown_key(key, getattr(error, "parent_node", None) or ())
    if wrong := _WRONG_TYPE.fullmatch(text):
        value = _with_texts(wrong[1], texts)
        value = clipped(value) if wrong[2] not in ("str", None) else shown(value)
        return f"{key}={value} is not {_TYPE_NAMES.get(wrong[3], wrong[3])}"
    if "is not a ListConfig" in text:
        return f"{key} is not a list; write {key}=[...]"
    if wrong := re.fullmatch(r"Cannot assign (\w+) to Dict\[.*\]", text):
        return f"{key} is not a mapping but of type {wrong[1]}"
    if "Incompatible value 'None'" in text:
        return f"{key} must have a value; it is None"
    return f"{key}: {clipped(_with_texts(' '.join(text.split()), texts), 2 * MAX_TEXT)}"
