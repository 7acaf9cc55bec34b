"""The config.json of a model with multi-head latent attention, in DeepSeek's form: read, checked, and the rest refused.

Defaults of keys that a config.json may leave out are transformers'.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.layers import ConfigValues, RopeSettings, rope_settings

_log = logging.getLogger("hookline")
_MODEL = "DeepSeek"
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
"""Model types, and the architecture of each."""
_V3: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
}
_V32 = {**_V3, "max_position_embeddings": 163_840, "index_topk": 2048}
_GLM_5 = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "youtu": {**_V3, "max_position_embeddings": 131_072, "tie_word_embeddings": True},
    "deepseek_v2": {
        **_V3,
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
    "glm4_moe_lite": {
        **_V3,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202_752,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    },
    "deepseek_v32": _V32,
    "glm_moe_dsa": {**_V32, **_GLM_5, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5},
}
"""Transformers' defaults of keys that a config.json leaves out, by model type."""
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose layers attend to index_topk tokens that an indexer chooses; to all, if there are no more."""
NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class Routing:
    """How a layer's experts are chosen and weighted.

    by_softmax: scores are a softmax; else sigmoids, to which a correction is added for the choice. num_groups,
    num_chosen_groups: experts are in groups of equal size; a token takes the best groups, and experts of these alone;
    1 of 1 means no groups. normalises: whether a token's weights are scaled to add up to 1. factor: of the weights.
    """

    num_experts: int
    num_chosen: int
    expert_size: int
    num_shared: int
    by_softmax: bool
    num_groups: int
    num_chosen_groups: int
    normalises: bool
    factor: float


@dataclass(frozen=True)
class LatentShape:
    """The sizes and switches of one model, of all ranks together.

    q_rank: of the latent of queries; 0 if they are made of the layer's input. latent: of keys and values, which the
    cache holds beside rope_dim rotated numbers. plain_dim: numbers of a head's query and key that are not rotated.
    is_interleaved: rotated numbers are paired with their neighbours, and not by halves. scale: of the scores.
    routing: None if no layer has experts. sparse_layers: the layers with experts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_rank: int
    latent: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    scale: float
    max_position: int
    routing: Routing | None
    sparse_layers: frozenset[int]
    eps: float
    is_tied: bool
    attention_bias: bool
    rope: RopeSettings


def read_config(hf_config: Mapping[str, Any]) -> LatentShape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    model_type = ConfigValues(hf_config, _MODEL).model_type(ARCHITECTURES)
    values = ConfigValues({**DEFAULTS[model_type], **_known_as_one(hf_config)}, _MODEL)
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    if values.values.get("mlp_bias"):
        values.refuse("mlp_bias", "false")
    num_heads, rope_dim = values.size("num_attention_heads"), values.size("qk_rope_head_dim")
    if values.size("num_key_value_heads", num_heads) != num_heads:
        values.refuse("num_key_value_heads", f"num_attention_heads = {num_heads}, since all heads share one latent")
    if rope_dim % 2:
        values.refuse("qk_rope_head_dim", "an even number")
    plain_dim = values.size("qk_nope_head_dim")
    rope = rope_settings({**hf_config, "max_position_embeddings": values.size("max_position_embeddings")})
    is_v2, is_dense = model_type == "deepseek_v2", model_type == "youtu"
    routing = None if is_dense else _routing(values, by_softmax=is_v2)
    return LatentShape(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=values.num_layers(),
        num_heads=num_heads,
        q_rank=0 if values.values.get("q_lora_rank") is None else values.size("q_lora_rank"),
        latent=values.size("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=values.size("v_head_dim"),
        is_interleaved=is_v2 or values.flag("rope_interleave", True),
        scale=(plain_dim + rope_dim) ** -0.5 * _mscale(rope) ** 2,
        max_position=_dense_up_to(values, rope.max_position) if model_type in SPARSE else rope.max_position,
        routing=routing,
        sparse_layers=frozenset() if routing is None else _sparse_layers(values),
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        rope=rope,
    )


def _known_as_one(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the number of experts under the name that checkpoints have, whatever transformers wrote."""
    aliases = [key for key in ("num_local_experts", "num_experts") if "n_routed_experts" not in hf_config]
    return {"n_routed_experts" if key in aliases else key: value for key, value in hf_config.items()}


def _mscale(rope: RopeSettings) -> float:
    """YaRN's factor of queries and keys beyond the factor in the rotary table."""
    if not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _dense_up_to(values: ConfigValues, max_position: int) -> int:
    """Longest sequence of a model with sparse attention for which the indexer would choose every token."""
    chosen = values.size("index_topk")
    if chosen < max_position:
        _log.info(
            "the checkpoint's sparse attention chooses all of up to index_topk = %d tokens, and is dense that far; "
            "longer sequences are not served",
            chosen,
        )
    return min(max_position, chosen)


def _sparse_layers(values: ConfigValues) -> frozenset[int]:
    """The layers with experts: by mlp_layer_types, or all from the first_k_dense_replace-th on."""
    num_layers, kinds = values.num_layers(), values.texts("mlp_layer_types")
    values.only("moe_layer_freq", 1)
    if kinds:
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            values.refuse("mlp_layer_types", f"dense or sparse for each of the {num_layers} layers")
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    first = values.values.get("first_k_dense_replace")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        values.refuse("first_k_dense_replace", "a number of layers")
    return frozenset(range(first, num_layers))


def _routing(values: ConfigValues, *, by_softmax: bool) -> Routing:
    num_experts = values.size("n_routed_experts")
    num_chosen = values.size("num_experts_per_tok")
    if num_chosen > num_experts:
        values.refuse("num_experts_per_tok", f"at most n_routed_experts = {num_experts}")
    values.only("scoring_func", "softmax" if by_softmax else "sigmoid")
    num_groups, num_chosen_groups = _groups(values, num_experts, by_softmax=by_softmax)
    if num_chosen > num_experts // num_groups * num_chosen_groups:
        values.refuse("num_experts_per_tok", f"at most the experts of topk_group = {num_chosen_groups} groups")
    if by_softmax and values.flag("norm_topk_prob"):
        values.refuse("norm_topk_prob", "false, since transformers and DeepSeek's own code differ about true")
    shared = values.values.get("n_shared_experts")
    return Routing(
        num_experts,
        num_chosen,
        expert_size=values.size("moe_intermediate_size"),
        num_shared=0 if shared in (None, 0) else values.size("n_shared_experts"),
        by_softmax=by_softmax,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        normalises=not by_softmax and values.flag("norm_topk_prob", True),
        factor=values.positive("routed_scaling_factor", 1.0),
    )


def _groups(values: ConfigValues, num_experts: int, *, by_softmax: bool) -> tuple[int, int]:
    """The number of groups of experts, and the number of groups from which a token takes experts."""
    methods = ("greedy", "group_limited_greedy") if by_softmax else ("noaux_tc",)
    method = values.values.get("topk_method", methods[0])
    if method not in methods:
        values.refuse("topk_method", " or ".join(methods))
    if method == "greedy":
        return 1, 1
    num_groups, num_chosen = values.size("n_group", 1), values.size("topk_group", 1)
    if num_experts % num_groups or (not by_softmax and num_experts // num_groups < 2):
        values.refuse("n_group", f"a divisor of n_routed_experts = {num_experts}, with two experts in a group")
    if num_chosen > num_groups:
        values.refuse("topk_group", f"at most n_group = {num_groups}")
    return num_groups, num_chosen
