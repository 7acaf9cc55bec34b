"""YAML presets: an option under another name, with some of its fields set; and the default options.

Reads them without Hydra, for `LLM(...)` and `hookline info`, with the same result as composing them. Which presets
exist follows from the files in the folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hookline.core.errors import MAX_TEXT, ConfigError, clipped, one_short_line
from hookline.core.plugin.registry import KINDS

CONF = Path(__file__).resolve().parents[2] / "conf"
"""Folder of our own presets and of config.yaml; found beside core, wherever that is installed."""

_EXPONENT = re.compile(r"[-+.0-9][0-9_.]*[eE]")
"""The beginning of a number like 1e5, which OmegaConf reads as a number and YAML 1.1 as a text."""


@dataclass(frozen=True)
class Preset:
    """A YAML preset: its kind and name, its file and distribution, and its first comment as a summary."""

    kind: str
    name: str
    path: Path
    distribution: str
    help: str = ""


def presets_in(folder: str | Path, distribution: str) -> list[Preset]:
    """Presets of the plugin kinds in a folder laid out as conf/ is, sorted by kind and name."""
    paths = [(kind, path) for kind in KINDS for path in sorted(Path(folder, kind).glob("*.yaml"))]
    return [Preset(kind, path.stem, path, distribution, summary(path)) for kind, path in paths]


def preset_values(preset: Preset, presets: Sequence[Preset]) -> tuple[str, dict[str, Any]]:
    """The option that a preset is based on, and the preset's values, merged with those of the presets in between.

    Raises: ConfigError if the file is not of the form `defaults: [base, _self_]` plus values, or an interpolation in it
            names an unknown key.
    """
    seen: list[str] = []
    layers: list[dict[str, Any]] = []
    current: Preset | None = preset
    base = preset.name
    while current is not None:
        if current.name in seen:
            raise ConfigError(
                f"preset {preset.kind}/{preset.name} is based on itself: {' -> '.join([*seen, current.name])}"
            )
        seen.append(current.name)
        base, values = _split(current, _read(current.path))
        layers.insert(0, values)
        current = next((other for other in presets if (other.kind, other.name) == (preset.kind, base)), None)
    if len(layers) == 1 and "${" not in str(layers[0]):
        return base, layers[0]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except OmegaConfBaseException as error:
        where = f"preset {preset.kind}/{preset.name}: {getattr(error, 'full_key', None) or 'its values'}"
        raise ConfigError(f"{where}: {clipped(str(error).partition(chr(10))[0])}") from error
    assert isinstance(merged, dict)
    return base, {str(key): value for key, value in merged.items()}


def preset_fault(preset: Preset, file: str) -> str | None:
    """The fault of a preset's file, which the message calls `file`; None if Hydra can use it.

    Defaults lists of another form than [option, _self_] are refused by `preset_values`.
    """
    try:
        _check_defaults(preset, _read(preset.path))
    except ConfigError as error:
        return str(error).replace(str(preset.path), file)
    return None


def yaml_fault(error: Any, path: Path | str = "") -> str:
    """The fault of a YAML file in one line: the file, the line and the cause. error: a yaml.YAMLError."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"{path}: {one_short_line(error)}".removeprefix(": ")
    parts = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    return clipped(f"{path or mark.name}:{mark.line + 1}: broken YAML: {', '.join(parts)}", 2 * MAX_TEXT)


def default_options(path: Path = CONF / "config.yaml") -> dict[str, str]:
    """The option or preset of each kind that config.yaml's defaults list chooses.

    Raises: ConfigError if the file is missing or has no defaults list.
    """
    return dict(_defaults(path))


@cache
def _defaults(path: Path) -> dict[str, str]:
    defaults = _read(path).get("defaults")
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: no defaults list")
    items = [item for item in defaults if isinstance(item, dict)]
    return {kind: name for item in items for kind, name in item.items() if kind in KINDS}


def yaml_values(path: Path) -> Any:
    """The plain values in a YAML file, read by OmegaConf's rules. Raises: errors of YAML and OmegaConf."""
    import yaml

    # libyaml's parser is six times as fast as the parser in Python, which explains faults better. OmegaConf reads files
    # that it alone understands, with interpolations or its own types.
    if yaml.__with_libyaml__:
        with suppress(yaml.YAMLError, TypeError, ValueError), path.open(encoding="utf-8-sig") as file:
            values = yaml.load(file, Loader=_plain_loader())
            if isinstance(values, dict) and "${" not in json.dumps(values):
                return values
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))


@cache
def _plain_loader() -> Any:
    """A loader of libyaml that raises ValueError wherever OmegaConf's would read another value."""
    from yaml import CSafeLoader

    class _Loader(CSafeLoader):  # type: ignore[misc]  # PyYAML has no types of it
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if len({key.value for key, _ in node.value}) < len(node.value):
                raise ValueError("a key twice")
            return super().construct_mapping(node, deep)

        def construct_scalar(self, node: Any) -> Any:
            of = node.tag.rpartition(":")[2]
            if of == "timestamp" or (of == "str" and _EXPONENT.match(node.value)):
                raise ValueError("a text or a number")
            return super().construct_scalar(node)

    return _Loader


def _read(path: Path) -> dict[str, Any]:
    from yaml import YAMLError

    try:
        values = yaml_values(path)
    except YAMLError as error:
        raise ConfigError(yaml_fault(error, path)) from error
    except Exception as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a mapping")
    return {str(key): value for key, value in values.items()}


def _split(preset: Preset, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    _check_defaults(preset, values)
    defaults = values.pop("defaults")
    if not (
        isinstance(defaults, list) and len(defaults) == 2 and defaults[1] == "_self_" and isinstance(defaults[0], str)
    ):
        raise ConfigError(f"{preset.path}: a preset's defaults list has the form [option, _self_], not {defaults}")
    return defaults[0], values


def _check_defaults(preset: Preset, values: dict[str, Any]) -> None:
    if values.get("defaults") is None:
        raise ConfigError(f"{preset.path}: `defaults: [OPTION, _self_]` is missing, which says whose values these are")


def summary(path: Path) -> str:
    """The first comment of a preset's file, without the file's name at its beginning."""
    with path.open(encoding="utf-8-sig") as file:
        comments = [line.lstrip("# ").strip() for line in file if line.startswith("#") and "@package" not in line]
    first = comments[0] if comments else ""
    return first.partition(": ")[2] or first
