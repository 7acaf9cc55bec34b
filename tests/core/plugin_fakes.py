"""Small plugins made on the spot: modules with hooks, as sources that a host can load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.core.contracts import API_VERSION, ModelConfig, Needs, hookimpl
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import Origin
from hookline.core.plugin.sources import Source


@dataclass
class TinyConfig(ModelConfig):
    checkpoint: str = "somewhere"
    num_layers: int = 2


@dataclass
class PatientConfig:
    max_wait_ms: float = 1.0
    fair: bool = True
    limit: int | None = None


def plugin_module(**attributes: Any) -> ModuleType:
    module = ModuleType("fake_plugin")
    vars(module).update({"API_VERSION": API_VERSION, **attributes})
    return module


def registering(kind: str, *names: str, target: str = "fake_package.fake:Fake", **options: Any) -> Callable[..., None]:
    """A hookimpl that registers some names of a kind."""

    def implementation(register: Any) -> None:
        for name in names:
            register(name, target, **options)

    implementation.__name__ = {"kernels": "register_kernels"}.get(kind, f"register_{kind}s")
    return hookimpl(implementation)


def source(
    plugin: ModuleType | Callable[[], Any], name: str = "theirs", distribution: str = "their-dist", version: str = "1.2"
) -> Source:
    load = plugin if not isinstance(plugin, ModuleType) else lambda: plugin
    return Source(Origin(name, f"{name}_module", distribution, version), load)


def scheduler_plugin(*names: str, **options: Any) -> ModuleType:
    return plugin_module(register_schedulers=registering("scheduler", *names, **options))


def host_with(*plugins: ModuleType, environ: Mapping[str, str] | None = None) -> PluginHost:
    sources = [source(plugin, f"plugin{number}") for number, plugin in enumerate(plugins)]
    return PluginHost.load(sources, environ or {})


def full_plugin() -> ModuleType:
    """One plugin with an option of each kind: tiny, patient and hasty, dice, slow and quick."""

    def register_kernels(register: Any) -> None:
        register("slow", "fake_package.fake:Slow", priority=0)
        register("quick", "fake_package.fake:Quick", priority=10, needs=Needs(devices=("cuda",), dtypes=("bfloat16",)))

    return plugin_module(
        register_models=registering("model", "tiny", config=TinyConfig),
        register_schedulers=registering("scheduler", "patient", "hasty", config=PatientConfig, help="waits a little"),
        register_samplers=registering("sampler", "dice"),
        register_kernels=hookimpl(register_kernels),
    )


OPTIONS = {"model": "tiny", "scheduler": "patient", "sampler": "dice", "kernels": "slow"}
"""An option of `full_plugin` for each kind."""


def preset_package(folder: Path, name: str, presets: Mapping[str, str]) -> None:
    """An importable package of presets: {"scheduler/eager": yaml text}."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    for path, text in presets.items():
        file = package / f"{path}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def offering_presets(*packages: str, **attributes: Any) -> ModuleType:
    def config_packages() -> list[str]:
        return list(packages)

    return plugin_module(config_packages=hookimpl(config_packages), **attributes)
