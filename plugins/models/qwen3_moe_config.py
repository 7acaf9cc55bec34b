"""Qwen3-MoE's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Qwen3MoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.layers import ConfigValues, RopeSettings, rope_settings
from hookline.plugins.models.qwen3_config import check_architecture

BESIDE_TOWER = "qwen3_vl_moe_text"
"""The same network in a model that also sees, which always normalises weights."""
ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", BESIDE_TOWER: "Qwen3VLMoeForConditionalGeneration"}


@dataclass(frozen=True)
class MoeShape:
    """The sizes and switches of one Qwen3-MoE model, of all ranks together.

    sparse_layers: which layers have experts; the others have one feed-forward of intermediate_size.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    expert_size: int
    num_experts: int
    num_chosen: int
    normalises_weights: bool
    sparse_layers: frozenset[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    rope: RopeSettings


def read_config(hf_config: Mapping[str, Any]) -> MoeShape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Qwen3-MoE")
    model_type = check_architecture(values, ARCHITECTURES)
    num_heads, num_experts = values.size("num_attention_heads"), _num_experts(values)
    shape = MoeShape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size", 6144),
        expert_size=values.size("moe_intermediate_size", 768),
        num_experts=num_experts,
        num_chosen=values.size("num_experts_per_tok", 8),
        normalises_weights=model_type == BESIDE_TOWER or values.flag("norm_topk_prob"),
        sparse_layers=sparse_layers(values),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", 4),
        head_dim=values.size("head_dim", max(1, values.size("hidden_size") // num_heads)),
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        rope=rope_settings({**hf_config, "max_position_embeddings": values.size("max_position_embeddings", 32768)}),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.num_chosen > num_experts:
        values.refuse("num_experts_per_tok", f"at most num_experts = {num_experts}")
    return shape


def sparse_layers(values: ConfigValues) -> frozenset[int]:
    """The layers with experts: every decoder_sparse_step-th one, unless mlp_only_layers lists it.

    Raises: ConfigError.
    """
    num_layers, step = values.num_layers(), values.size("decoder_sparse_step", 1)
    dense = values.values.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or any(not isinstance(index, int) for index in dense):
        values.refuse("mlp_only_layers", "a list of layer indices")
    return frozenset(index for index in range(num_layers) if (index + 1) % step == 0) - frozenset(dense)


def _num_experts(values: ConfigValues) -> int:
    """The hub's checkpoints say num_experts; transformers 5 writes num_local_experts."""
    return values.size("num_local_experts", values.size("num_experts", 128))
