"""Qwen3.5's and Qwen3.6's config.json, read once into Qwen3-Next's sizes; unsupported values are refused by name.

Defaults are taken from transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.layers import ConfigValues
from hookline.plugins.models.qwen3_next_config import Experts, Shape, shape_of

DENSE, SPARSE = "qwen3_5_text", "qwen3_5_moe_text"
ARCHITECTURES = {
    DENSE: ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    SPARSE: ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
}


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json. Every layer has experts, or none has.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Qwen3.5")
    if values.model_type(ARCHITECTURES) == DENSE:
        values.size("intermediate_size")
        return shape_of(values, Experts(1, 1, frozenset()), True)
    experts = values.size("num_experts", 256), values.size("num_experts_per_tok", 8)
    return shape_of(values, Experts(*experts, frozenset(range(values.num_layers()))), True)
