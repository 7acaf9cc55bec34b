"""OLMo 2's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Olmo2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.layers import ConfigValues, RopeSettings, rope_settings


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one OLMo 2 model, of all ranks together."""

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
    rope: RopeSettings


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "OLMo 2")
    values.model_type({"olmo2": "Olmo2ForCausalLM"})
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    if set(values.texts("layer_types")) - {"full_attention"}:
        values.refuse("layer_types", "full_attention in every layer")
    num_heads = values.size("num_attention_heads")
    length = values.size("max_position_embeddings", 2048)
    rope = rope_settings({**hf_config, "max_position_embeddings": length})
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", max(1, values.size("hidden_size") // num_heads)),
        eps=values.eps(default=1e-5),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        rope=rope,
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    return shape
