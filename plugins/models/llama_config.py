"""config.json of Llama, Mistral and Phi-3, read once into plain sizes; whatever is not implemented is refused by name.

Defaults are taken from transformers' LlamaConfig, MistralConfig and Phi3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import LayerCache
from hookline.core.layers import ConfigValues, RopeSettings, layer_caches, rope_settings

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM"}
DEFAULT_LENGTHS = {"llama": 2048, "mistral": 131_072, "phi3": 4096}


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one model, of all ranks together.

    is_fused: the checkpoint holds queries, keys and values in one tensor, and gate and up in another.
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
    mlp_bias: bool
    is_fused: bool
    rope: RopeSettings
    layers: tuple[LayerCache, ...]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Llama")
    model_type = values.model_type(ARCHITECTURES)
    is_llama, is_phi3 = model_type == "llama", model_type == "phi3"
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    num_heads, num_layers = values.size("num_attention_heads"), values.num_layers()
    length = values.size("max_position_embeddings", DEFAULT_LENGTHS[model_type])
    rope = rope_settings({**hf_config, "max_position_embeddings": length}, allow_partial=is_phi3)
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", 8 if model_type == "mistral" else num_heads),
        head_dim=values.size("head_dim", max(1, values.size("hidden_size") // num_heads)),
        eps=values.eps(default=1e-5 if is_phi3 else 1e-6),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        mlp_bias=values.flag("mlp_bias"),
        is_fused=is_phi3,
        rope=rope,
        layers=layer_caches([_window(values, model_type)] * num_layers, rope.max_position),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    rope.rotary_dim(shape.head_dim)
    if not is_llama and (shape.attention_bias or shape.mlp_bias):
        values.refuse("attention_bias" if shape.attention_bias else "mlp_bias", f"false in a {model_type} model")
    return shape


def _window(values: ConfigValues, model_type: str) -> int | None:
    """The window of every layer; None without one. Mistral's default is 4096; Llama has none."""
    if set(values.texts("layer_types")) - {"full_attention"}:
        values.refuse("layer_types", "full_attention in every layer; a window of all layers is sliding_window")
    if values.values.get("sliding_window", 4096 if model_type == "mistral" else None) is None:
        return None
    if model_type == "llama":
        values.refuse("sliding_window", "null in a llama model")
    return values.size("sliding_window", 4096)
