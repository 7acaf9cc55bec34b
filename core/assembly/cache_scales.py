"""The calibrated scales of keys and values that a checkpoint states for a KV cache in 8 bits.

Compressed-tensors names them `X.self_attn.k_scale` and `v_scale`, modelopt `X.self_attn.k_proj.k_scale` and
`v_proj.v_scale`, older FP8 checkpoints `k_proj.output_scale`, or `kv_scale` for both: a number times the scale is the
key. Every rank reads all scales, since a scale is shared by all heads.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import torch

from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.checkpoint.safetensors_files import FLOAT_DTYPES, StoredTensor, open_file
from hookline.core.contracts import SharedCache
from hookline.core.errors import CheckpointError
from hookline.core.worker.runner.wrapped_attention import LayerScale

logger = logging.getLogger("hookline")
_NAME = re.compile(
    r"(?:^|\.)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?:\w+\.)*?"
    r"(?:(?P<half>[kv])_scale|(?P<both>kv_scale)|(?P<of>[kv])_proj\.output_scale)$"
)


def cache_scales(resolved: ResolvedConfig) -> dict[int, LayerScale]:
    """The scales of this rank's layers, by the layer's index; layers whose scales are 1 are left out.

    Raises: CheckpointError naming a tensor that is no scale.
    """
    attention, spec = resolved.attention, resolved.spec
    if attention.kv_dtype is None:
        return {}
    is_random = resolved.config.model.config.weights == "random"
    stated = stated_scales({} if is_random else resolved.checkpoint.stored)
    if resolved.ranks.number == 0:
        logger.info(
            "KV cache in %s: %d of %d layers have scales of the checkpoint, the others 1",
            *(resolved.config.engine.kv_dtype, len(stated), spec.num_layers),
        )
    found = {}
    for index in resolved.stage.layers(spec.num_layers):
        layer = spec.cache_layers[index]
        k, v = stated.get(layer.layer if isinstance(layer, SharedCache) else index, (1.0, 1.0))
        if (k, v) != (1.0, 1.0):
            found[index] = LayerScale(k, v, attention)
    return found


def stated_scales(stored: Mapping[str, StoredTensor]) -> dict[int, tuple[float, float]]:
    """For each layer of which a checkpoint states any: the scales of its keys and of its values, as powers of two.

    Scaling by a power of two rounds nothing. Each is at least the checkpoint's scale, so values in range stay in range.

    Raises: CheckpointError naming a tensor that is no scale.
    """
    found: dict[int, dict[str, float]] = {}
    for name, tensor in stored.items():
        match = _NAME.search(name)
        if match is not None:
            scale = _read(name, tensor)
            for half in "kv" if match["both"] else match["half"] or match["of"]:
                found.setdefault(int(match["layer"]), {})[half] = scale
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in found.items()}


def _read(name: str, tensor: StoredTensor) -> float:
    tensor.check(name, FLOAT_DTYPES)
    scales = open_file(tensor.path).get_tensor(tensor.name or name).float()
    if not scales.numel() or not bool(((scales > 0) & torch.isfinite(scales)).all()):
        raise CheckpointError(
            f"tensor {name} is the scale of a KV cache in 8 bits and must hold numbers above 0; it has "
            f"{scales.flatten()[:3].tolist()}. Leave engine.kv_dtype out, or mend the checkpoint"
        )
    return 2.0 ** math.ceil(math.log2(float(scales.max())))
