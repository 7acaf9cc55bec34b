"""Resolves a configuration with the installed plugins, for tests that a plugin is registered correctly."""

from __future__ import annotations

from typing import Any

from hookline.core.config.settings import Config, validate
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import Facts, choose_kernels


def installed_config(**tree: Any) -> Config:
    """The checked configuration that `LLM(**tree)` would have; no model is loaded.

    Raises: ConfigError for keys and values; PluginError for an option that is not there or is broken.
    """
    return validate(tree, PluginHost.load())


def installed_kernels(name: str, *, device: str = "cpu", dtype: str = "float32") -> str:
    """Name of the kernels that `kernels=name` stands for, where the model has this dtype on this device.

    Raises: PluginError with the reasons why they do not fit, and which would.
    """
    return choose_kernels(PluginHost.load(), name, Facts(device, dtype)).name
