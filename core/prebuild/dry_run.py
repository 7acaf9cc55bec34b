"""An engine's start on a card that is not there: the model, its kernels and its graphs without memory or arithmetic.

It launches the same kernels as an engine of this configuration on such a card does until it is ready.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hookline.core.assembly.resolve import ResolvedConfig, chosen, resolve
from hookline.core.assembly.worker import finish_weights, make_kernels, make_worker, runtime_of
from hookline.core.checkpoint.checkpoint import resolve_model
from hookline.core.config.settings import Config
from hookline.core.contracts import Kernels, LayerCache, Model, SharedCache
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.worker.worker import Worker

NUM_BLOCKS = 4096
"""Blocks of the KV cache, which takes no memory either."""


def dry_worker(config: Config, host: PluginHost) -> tuple[Worker, ResolvedConfig]:
    """Make a worker and get it ready, so that all kernels are launched; to be called inside `pretended`.

    Raises: PluginError, ConfigError or CheckpointError, as an engine does that does not fit.
    """
    engine = replace(config.engine, num_blocks=config.engine.num_blocks or NUM_BLOCKS)
    resolved = resolve(on_cuda(replace(config, engine=engine)), host)
    kernels = make_kernels(resolved)
    installed = InstalledExtensions.of(host.registry, resolved.facts, config.extension_options)
    return make_worker(resolved, unloaded_model(resolved, kernels), kernels, installed), resolved


def on_cuda(config: Config) -> Config:
    """The configuration with device=cuda."""
    return replace(config, device="cuda")


def few_layers(config: Config, least: int, host: PluginHost) -> dict[str, Any] | None:
    """Overrides of the model's config.json that leave its first layers: `least`, or more to have each kind of layer.

    None if all layers are needed, or if the config does not say which layers are alike.
    """
    model = chosen(config.model).load()
    checkpoint = resolve_model(config.model.config, model, host)
    spec, hf_config = model.spec(checkpoint.config), checkpoint.config
    may_differ = any(hf_config.get(key) not in _ALIKE for key in _UNLIKE)
    kinds = [_kind(layer) for layer in spec.layers]
    count = max([least, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if may_differ or "num_hidden_layers" not in hf_config or spec.num_layers <= count:
        return None
    types = hf_config.get("layer_types")
    return {"num_hidden_layers": count, **({"layer_types": types[:count]} if isinstance(types, list) else {})}


def _kind(layer: LayerCache) -> LayerCache | type:
    """A value that is the same for layers that launch the same kernels."""
    return SharedCache if isinstance(layer, SharedCache) else layer


_UNLIKE = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace")
"""Keys of a config.json by which layers may differ outside attention, as MoE layers from dense layers."""
_ALIKE: tuple[Any, ...] = (None, [], 0, 1)
"""Values of these keys with which all layers are alike."""


def unloaded_model(resolved: ResolvedConfig, kernels: Kernels) -> Model:
    """The model with fake weights, which have a size but no memory."""
    option, runtime = resolved.config.model, runtime_of(resolved, kernels)
    with torch.inference_mode():
        model: Model = chosen(option).load()(resolved.checkpoint.config, runtime)
        model.weight_targets()  # names the linears, by which a weight learns how it is stored
        finish_weights(runtime)
    return model
