"""An engine's start on a card that is not there: the model, its kernels and its graphs without memory or arithmetic.

What it launches is what an engine of this configuration launches on such a card until it is ready.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hookline.core.assembly.resolve import ResolvedConfig, chosen, resolve
from hookline.core.assembly.worker import make_kernels, make_worker
from hookline.core.checkpoint.checkpoint import resolve_model
from hookline.core.config.settings import Config
from hookline.core.contracts import Kernels, Model, Runtime
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.logits_processing import Processing
from hookline.core.worker.worker import Worker

NUM_BLOCKS = 4096
"""Of the KV cache, which needs no memory either."""


def dry_worker(config: Config, host: PluginHost) -> tuple[Worker, ResolvedConfig]:
    """A worker that is ready; to be called inside `pretended`.

    Raises: PluginError, ConfigError or CheckpointError, as an engine does that does not fit.
    """
    engine = replace(config.engine, num_blocks=config.engine.num_blocks or NUM_BLOCKS)
    resolved = resolve(on_cuda(replace(config, engine=engine)), host)
    kernels = make_kernels(resolved)
    processing = Processing.of(host.registry, resolved.facts)
    return make_worker(resolved, unloaded_model(resolved, kernels), kernels, processing), resolved


def on_cuda(config: Config) -> Config:
    """The configuration on the first CUDA device."""
    return replace(config, device="cuda")


def num_unlike_layers(config: Config, least: int) -> int | None:
    """Fewest first layers of the model among which there is one of each kind, and at least `least`.

    None: all of them, or the layers cannot be told apart from here.
    """
    model = chosen(config.model).load()
    checkpoint = resolve_model(config.model.config, model)
    spec, hf_config = model.spec(checkpoint.config), checkpoint.config
    may_differ = any(hf_config.get(key) not in _ALIKE for key in _UNLIKE)
    if spec.layers or may_differ or "num_hidden_layers" not in hf_config or spec.num_layers <= least:
        return None
    return least


_UNLIKE = ("layer_types", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "sliding_window_pattern")
"""Keys of a config.json by which its layers may differ."""
_ALIKE: tuple[Any, ...] = (None, [], 0, 1)
"""Values of these keys with which they do not."""


def unloaded_model(resolved: ResolvedConfig, kernels: Kernels) -> Model:
    """The model with weights of which nothing but their sizes is there."""
    option = resolved.config.model
    with torch.inference_mode():
        runtime = Runtime(resolved.device, resolved.attention.dtype, resolved.ranks, kernels, option.config)
        model: Model = chosen(option).load()(resolved.checkpoint.config, runtime)
    return model
