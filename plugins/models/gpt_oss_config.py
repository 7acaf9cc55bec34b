"""gpt-oss' config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' GptOssConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import LayerCache
from hookline.core.layers import ConfigValues, RopeSettings, layer_caches, rope_settings

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one gpt-oss model, of all ranks together.

    alpha, limit: of the experts' activation, see ClampedExperts.
    """

    vocab_size: int
    hidden_size: int
    expert_size: int
    num_experts: int
    num_chosen: int
    alpha: float
    limit: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    rope: RopeSettings
    layers: tuple[LayerCache, ...]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "gpt-oss")
    values.model_type({"gpt_oss": "GptOssForCausalLM"})
    values.only("hidden_act", "silu")
    values.refuse_quantised(but="mxfp4")  # that is dequantised when it is loaded
    num_heads, num_experts = values.size("num_attention_heads"), values.size("num_local_experts", 128)
    rope = _rope(values)
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        expert_size=values.size("intermediate_size", 2880),
        num_experts=num_experts,
        num_chosen=values.size("num_experts_per_tok", 4),
        alpha=values.positive("swiglu_alpha", 1.702),
        limit=values.positive("swiglu_limit", 7.0),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", 64),
        eps=values.eps(default=1e-5),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias", True),
        rope=rope,
        layers=layer_caches(_windows(values), rope.max_position),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.num_chosen > num_experts:
        values.refuse("num_experts_per_tok", f"at most num_local_experts = {num_experts}")
    return shape


def _rope(values: ConfigValues) -> RopeSettings:
    config = dict(values.values)
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config["rope_scaling"] = DEFAULT_ROPE
    length = values.size("max_position_embeddings", 131_072)
    return rope_settings({**config, "max_position_embeddings": length}, default_theta=150_000.0)


def _windows(values: ConfigValues) -> tuple[int | None, ...]:
    """Every second layer sees everything, unless the config.json says otherwise."""
    pattern = ["full_attention" if index % 2 else "sliding_attention" for index in range(values.num_layers())]
    return values.windows(pattern, values.size("sliding_window", 128))
