"""Gemma 3's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Gemma3TextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import LayerCache
from hookline.core.layers import ConfigValues, RopeSettings, layer_caches, rope_settings


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Gemma 3 model, of all ranks together.

    scale: of attention scores. is_local: for each layer, whether it has a window and the local rope.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    scale: float
    max_position: int
    rope: RopeSettings
    local_rope: RopeSettings
    is_local: tuple[bool, ...]
    layers: tuple[LayerCache, ...]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Gemma 3")
    values.model_type({"gemma3_text": "Gemma3ForCausalLM"})
    values.refuse_quantised()
    values.only("hidden_activation", "gelu_pytorch_tanh")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        values.only(key, None)
    if values.values.get("use_bidirectional_attention"):
        values.refuse("use_bidirectional_attention", "false")
    num_heads, length = values.size("num_attention_heads", 8), values.size("max_position_embeddings", 131_072)
    windows = _windows(values)
    shape = Shape(
        vocab_size=values.size("vocab_size", 262_208),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size", 9216),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", 4),
        head_dim=values.size("head_dim", 256),
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings", True),
        attention_bias=values.flag("attention_bias"),
        scale=values.positive("query_pre_attn_scalar", 256) ** -0.5,
        max_position=length,
        rope=_rope(values, length),
        local_rope=_local_rope(values, length),
        is_local=tuple(window is not None for window in windows),
        layers=layer_caches(windows, length),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    return shape


def _windows(values: ConfigValues) -> tuple[int | None, ...]:
    """Every sixth layer sees everything, the others a window, unless the config.json says otherwise."""
    step = values.size("sliding_window_pattern", 6)
    pattern = ["sliding_attention" if (index + 1) % step else "full_attention" for index in range(values.num_layers())]
    return values.windows(pattern, values.size("sliding_window", 4096))


def _rope(values: ConfigValues, length: int) -> RopeSettings:
    """RoPE settings of layers with full attention. length: the sequence length after scaling."""
    config = {**values.values, "max_position_embeddings": length}
    return rope_settings(config, "full_attention", default_theta=1_000_000.0)


def _local_rope(values: ConfigValues, length: int) -> RopeSettings:
    """RoPE settings of layers with a window: their own, or only their base under the old key."""
    theta = values.values.get("rope_local_base_freq")
    config = {"rope_parameters": values.values.get("rope_parameters"), "max_position_embeddings": length}
    return rope_settings({**config, "rope_theta": theta}, "sliding_attention")
