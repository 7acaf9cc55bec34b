"""Qwen3's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Qwen3Config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.core.layers import ConfigValues, RopeSettings, rope_settings

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_vl_text": "Qwen3VLForConditionalGeneration"}


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Qwen3 model, of all ranks together."""

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
    values = ConfigValues(hf_config, "Qwen3")
    check_architecture(values, ARCHITECTURES)
    num_heads = values.size("num_attention_heads")
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", 128),
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        rope=rope_settings({**hf_config, "max_position_embeddings": values.size("max_position_embeddings", 32768)}),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    return shape


def check_architecture(values: ConfigValues, architectures: Mapping[str, str | Sequence[str]]) -> str:
    """The model type; refuses other models, quantised checkpoints, and attention that is not causal over everything.

    Raises: ConfigError.
    """
    model_type = values.model_type(architectures)
    values.only("hidden_act", "silu")
    if values.values.get("use_sliding_window"):
        values.refuse("use_sliding_window", "false")
    if set(values.texts("layer_types")) - {"full_attention"}:
        values.refuse("layer_types", "full_attention in every layer")
    values.refuse_quantised()
    return model_type
