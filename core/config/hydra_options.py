"""Prepares what Hydra reads: plugin entries as typed options, a command's keys, and quoted values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hookline.core.config.schema import plain_defaults
from hookline.core.contracts import ModelConfig, QuantizationConfig
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import AUTO, CHOSEN_KINDS, EXTENSION_KINDS, KINDS, MODEL, QUANTIZATION

if TYPE_CHECKING:
    from omegaconf import DictConfig

RAW_KEYS = ("prompt", "prompts_file", "output", "result", "records", "fit", "save", "cache_salt")
"""Keys whose value is always raw text: everything after the first = is the value. The keys of single
tags are raw, too."""

_TAG = "tags."
_WORKLOAD = "workload."
_STRUCTURED = "sampling.structured_outputs."
_RAW_FIELDS = ("json", "regex", "choice", "grammar", "structural_tag", "after", "json_schema")
"""Keys below _STRUCTURED, and the workload's schema, whose value is raw text; a token id in `after` is a number."""
_FREE = (
    "sampling.extra_args.",
    *(f"{kind}s." for kind in EXTENSION_KINDS),
    "client.body.",
    "chat.template.",
    _STRUCTURED,
    _TAG,
)
"""Prefixes of keys inside of mappings with arbitrary keys (of installed extensions, of a server's body, of tags), or of
mappings that are None by default."""
_AUTO_FIELDS = {MODEL: ModelConfig, QUANTIZATION: QuantizationConfig}
"""The fields of kinds that have some whichever option is chosen."""
_ADDED = tuple(f"++{free}" for free in _FREE)


def is_raw(argument: str) -> bool:
    """True if the argument sets a raw key."""
    key, equals, value = argument.partition("=")
    key = key.lstrip("+")
    prefix, _, name = key.rpartition(".")
    if f"{prefix}." in (_STRUCTURED, _WORKLOAD) and name in _RAW_FIELDS:
        return equals == "=" and not (name == "after" and value.isdecimal())
    return equals == "=" and (key in RAW_KEYS or key.startswith(_TAG))


def quote_raw_values(arguments: Sequence[str]) -> list[str]:
    """The arguments with the values of raw keys, and paths that Hydra cannot read, quoted, so that Hydra returns these
    exactly as they were typed.
    """
    return [quoted(one) if is_raw(one) or _is_unreadable_path(one) else one for one in arguments]


def _is_unreadable_path(argument: str) -> bool:
    """Whether the value is a path with characters that Hydra reads only in quotes, as an ü or a bracket."""
    return argument.partition("=")[2].startswith(("/", "./", "../", "~/")) and parsed(argument) is None


def parsed(argument: str) -> Any:
    """Hydra's override of an argument; None if it cannot read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def quoted(argument: str) -> str:
    """The argument with its value in quotes of Hydra's."""
    key, _, value = argument.partition("=")
    # OmegaConf's escape first, since Hydra's own quotes are taken off before OmegaConf sees the text.
    plain = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    inside = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), plain)
    return f"{key}='{inside}'"


def add_free_keys(arguments: Sequence[str]) -> list[str]:
    """The arguments with keys below _FREE written as additions, because Hydra refuses keys that it does not know.

    Extensions, their fields and types are checked for every request, wherever it comes from; the members of a body are
    checked by the server.
    """
    return [f"++{argument}" if argument.startswith(_FREE) else argument for argument in arguments]


def named_in_mapping(argument: str) -> str | None:
    """The name in an argument's mapping, or the names in its mappings; None if there is none, or if it
    cannot be read.
    """
    override = parsed(argument) if "{" in argument else None
    if override is None:
        return None
    values = list(override.sweep_iterator()) if override.is_choice_sweep() else [override.value()]
    names = [str(one["name"]) for one in values if isinstance(one, dict) and "name" in one]
    return ",".join(dict.fromkeys(names)) or None


def as_typed(override: str) -> str:
    """An override as it was before `add_free_keys`."""
    return override.removeprefix("++") if override.startswith(_ADDED) else override


def store_options(host: PluginHost) -> None:
    """Offer exactly the host's entries as options of their kinds' config groups."""
    from hydra.core.config_store import ConfigNode, ConfigStore

    repo: dict[str, Any] = ConfigStore.instance().repo
    for kind in KINDS:
        repo[kind] = Options()  # otherwise the options of an earlier plugin host in this process would be left

    def store(kind: str, option: Option, provider: str) -> None:
        name = f"{option.name}.yaml"
        repo[kind][name] = ConfigNode(name, cast("DictConfig", option), kind, None, provider)

    for entry in host.registry:
        if entry.kind in KINDS:
            store(entry.kind, Option(entry.name, entry.config), entry.origin.distribution)
    for kind in CHOSEN_KINDS:
        store(kind, Option(AUTO, _AUTO_FIELDS.get(kind)), "hookline")


def store_keys(keys: type) -> None:
    """Offer the defaults of a command's root keys as `keys`, for its YAML's defaults list."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="keys", node=plain_defaults(keys), provider="hookline")


class Options(dict[str, Any]):
    """The options of a kind by their names in Hydra. Hydra copies its whole store before it composes anything; these
    are not copied with it, since nothing changes them and a copy would make all of their nodes.
    """

    def __deepcopy__(self, memo: object) -> Options:
        return self


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a kind, with the dataclass of its fields.

    Hydra copies the node of each option that it composes. A copy of this is the typed node, so that no time is spent on
    the many options that nobody chose: a node takes a millisecond to make.
    """

    name: str
    config: type | None

    def __deepcopy__(self, memo: object) -> Any:
        return option_node(self.name, self.config)


def option_node(option: str, config: type | None) -> Any:
    """An option's node: `name`, the name of the choice, and the typed fields of its dataclass."""
    from omegaconf import OmegaConf

    name = ("name", str, dataclasses.field(default=option))
    if config is None:
        return OmegaConf.structured(dataclasses.make_dataclass("NoFields", [name]))
    frozen: bool = config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    node = OmegaConf.structured(dataclasses.make_dataclass(config.__name__, [name], bases=(config,), frozen=frozen))
    OmegaConf.set_readonly(node, None)  # OmegaConf takes "frozen" to mean that no override may change a value
    for name in node:
        if OmegaConf.is_dict(node[name]) and OmegaConf.get_type(node, name) is dict:
            OmegaConf.set_struct(node[name], False)  # a mapping's keys are the user's; Hydra knows only those it saw
    return node


def search_path_overrides(arguments: list[str], packages: list[str]) -> list[str]:
    """Arguments for Hydra that let it find the plugins' presets, beside any search path that was asked for."""
    if not packages:
        return arguments
    key, ours = "hydra.searchpath=[", ",".join(f"pkg://{package}" for package in packages)
    for place, argument in enumerate(arguments):
        if argument.startswith(key):
            theirs = argument.removeprefix(key)
            merged = f"{key}{ours}]" if theirs.strip() == "]" else f"{key}{ours},{theirs}"
            return [*arguments[:place], merged, *arguments[place + 1 :]]
    return [*arguments, f"{key}{ours}]"]
