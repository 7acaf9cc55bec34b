"""Qwen2's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Qwen2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import LayerCache
from hookline.core.layers import ConfigValues, RopeSettings, layer_caches, rope_settings

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration",
    # The first checkpoints have the language model's values beside the tower's.
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Qwen2 model, of all ranks together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    rope: RopeSettings
    layers: tuple[LayerCache, ...]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Qwen2")
    values.model_type(ARCHITECTURES)
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    num_heads = values.size("num_attention_heads")
    length = values.size("max_position_embeddings", 32768)
    rope = rope_settings({**hf_config, "max_position_embeddings": length})
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", min(num_heads, 32)),
        head_dim=values.size("head_dim", max(1, values.size("hidden_size") // num_heads)),
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings"),
        rope=rope,
        layers=layer_caches(_windows(values), rope.max_position),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    return shape


def _windows(values: ConfigValues) -> tuple[int | None, ...]:
    """The window of each layer; with use_sliding_window, the layers from max_window_layers on have one."""
    num_layers = values.num_layers()
    if not values.values.get("use_sliding_window"):
        return values.windows(["full_attention"] * num_layers, None)
    first = values.values.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        values.refuse("max_window_layers", "a number of layers")
    pattern = ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]
    return values.windows(pattern, values.size("sliding_window", 4096))
