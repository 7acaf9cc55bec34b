"""Qwen3-Next's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Qwen3NextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import FullAttention, LayerCache, RecurrentState, StateTensor
from hookline.core.layers import ConfigValues, RopeSettings, rope_settings
from hookline.plugins.models.qwen3_moe_config import sparse_layers


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of a gated delta net: key heads, each of which serves the same number of value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def state(self) -> RecurrentState:
        """The state of a layer: the last inputs of its convolution, and a matrix for each value head."""
        num_channels = 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        memory = StateTensor((self.num_value_heads, self.key_dim, self.value_dim), "float32", split_dim=0)
        return RecurrentState((
            ("conv", StateTensor((num_channels, self.conv_width - 1), split_dim=0)),
            ("memory", memory),
        ))  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Qwen3-Next model, of all ranks together.

    sparse_layers: which layers have experts; the others have one feed-forward of intermediate_size.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    expert_size: int
    shared_size: int
    num_experts: int
    num_chosen: int
    normalises_weights: bool
    sparse_layers: frozenset[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    delta: DeltaShape
    eps: float
    is_tied: bool
    rope: RopeSettings
    layers: tuple[LayerCache, ...]


@dataclass(frozen=True)
class Experts:
    """How many experts there are, how many a token takes, and which layers have them."""

    num_experts: int
    num_chosen: int
    layers: frozenset[int]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Qwen3-Next")
    values.model_type({"qwen3_next": "Qwen3NextForCausalLM"})
    sizes = Experts(values.size("num_experts", 512), values.size("num_experts_per_tok", 10), sparse_layers(values))
    return shape_of(values, sizes, values.flag("norm_topk_prob", True))


def shape_of(values: ConfigValues, experts: Experts, normalises_weights: bool) -> Shape:
    """Read all but the model type and the experts.

    Raises: ConfigError.
    """
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    if values.values.get("attention_bias"):
        values.refuse("attention_bias", "false")
    num_heads, delta = values.size("num_attention_heads"), _delta(values)
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size", 5632),
        expert_size=values.size("moe_intermediate_size", 512),
        shared_size=values.size("shared_expert_intermediate_size", 512),
        num_experts=experts.num_experts,
        num_chosen=experts.num_chosen,
        normalises_weights=normalises_weights,
        sparse_layers=experts.layers,
        num_layers=values.num_layers(),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", 2),
        head_dim=values.size("head_dim", 256),
        delta=delta,
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings"),
        rope=_rope(values),
        layers=_layers(values, delta.state),
    )
    values.check_heads(num_heads, shape.num_kv_heads, shape.head_dim)
    shape.rope.rotary_dim(shape.head_dim)
    if shape.num_chosen > shape.num_experts:
        values.refuse("num_experts_per_tok", f"at most num_experts = {shape.num_experts}")
    return shape


def _delta(values: ConfigValues) -> DeltaShape:
    num_key_heads, num_value_heads = values.size("linear_num_key_heads", 16), values.size("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        values.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {num_key_heads}")
    width = values.size("linear_conv_kernel_dim", 4, limit=64)
    if width < 2:
        values.refuse("linear_conv_kernel_dim", "a whole number from 2")
    sizes = values.size("linear_key_head_dim", 128), values.size("linear_value_head_dim", 128)
    return DeltaShape(num_key_heads, num_value_heads, *sizes, width)


def _rope(values: ConfigValues) -> RopeSettings:
    """A quarter of each head is rotated, unless the config.json says otherwise."""
    partial, length = values.values.get("partial_rotary_factor"), values.size("max_position_embeddings", 32768)
    config = {**values.values, "max_position_embeddings": length}
    return rope_settings({**config, "partial_rotary_factor": 0.25 if partial is None else partial}, allow_partial=True)


def _layers(values: ConfigValues, state: RecurrentState) -> tuple[LayerCache, ...]:
    """Every fourth layer attends to everything, the others keep a state, unless the config.json says otherwise."""
    num_layers, step = values.num_layers(), values.size("full_attention_interval", 4)
    pattern = ["linear_attention" if (index + 1) % step else "full_attention" for index in range(num_layers)]
    types = values.texts("layer_types") or pattern
    if len(types) != num_layers or set(types) - set(("linear_attention", "full_attention")):
        values.refuse("layer_types", f"linear_attention or full_attention for each of the {num_layers} layers")
    return tuple(FullAttention() if one == "full_attention" else state for one in types)
