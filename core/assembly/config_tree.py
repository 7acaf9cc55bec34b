"""A configuration as a tree of plain values, from which another process builds the same one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hookline.core.config.settings import Config
from hookline.core.plugin.registry import EXTENSION_KINDS, KINDS, ExtensionOption, Option


def config_tree(config: Config, kernels: str) -> dict[str, Any]:
    """The configuration, without observers, as the plain tree that another process reads by `config.settings.validate`.

    kernels: the name of the kernels that were chosen, since one process chooses for all ranks.
    """
    options: dict[str, Option] = {kind: getattr(config, kind) for kind in KINDS}
    tree: dict[str, Any] = {kind: _option(option) for kind, option in options.items()}
    tree["kernels"]["name"] = kernels
    plain = {"tp": config.tp, "pp": config.pp, "seed": config.seed, "dtype": config.dtype, "device": config.device}
    extensions: dict[str, dict[str, Any]] = {f"{kind}s": {} for kind in EXTENSION_KINDS}
    for one in config.extension_options.values():
        assert one.entry is not None
        extensions[f"{one.entry.kind}s"][one.name] = _set_fields(one)
    return {
        **tree,
        **plain,
        **extensions,
        "engine": asdict(config.engine),
    }


def _set_fields(option: ExtensionOption) -> dict[str, Any]:
    """The fields of a step extension's settings, and of the arguments of all requests."""
    parts = [asdict(one) for one in (option.config, option.arguments) if one is not None]
    return {key: value for part in parts for key, value in part.items()}


def _option(option: Option) -> dict[str, Any]:
    return {"name": option.name, **({} if option.config is None else asdict(option.config))}
