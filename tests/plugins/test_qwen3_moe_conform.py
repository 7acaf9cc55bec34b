"""Qwen3-MoE against the conformance suite, with transformers' as the reference. Legend: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.qwen3_moe import Qwen3Moe

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


class TestQwen3Moe(ModelSuite):
    sizes_alike = True
    model_class = Qwen3Moe
    ranks = (2, 4)

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor | None:
        return transformers_logits(self.hf_config(), weights, token_ids)

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["Qwen3ForCausalLM"]},
            {"num_experts_per_tok": 5},
            {"num_experts": -1},
            {"mlp_only_layers": [0.5]},
            {"use_sliding_window": True},
        ]
        return [*super().refused_configs(), *own]


class TestTiedQwen3MoeWithoutNormalisedWeights(TestQwen3Moe):
    def hf_config(self) -> dict[str, Any]:
        own = {"tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": []}
        return {**CONFIG, **own}


def transformers_logits(config: dict[str, Any], weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, attn_implementation="eager")).float().eval()
    missing, surplus = model.load_state_dict(_packed(weights, config["num_experts"]), strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    with torch.no_grad():
        logits_1TV: Tensor = model(torch.tensor([list(token_ids)])).logits
    return logits_1TV[0]


def _packed(weights: Mapping[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The weights as transformers holds them in memory: one tensor for all experts of a layer."""
    packed = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in {name.partition("experts.")[0] + "experts" for name in weights if ".experts." in name}:
        gate, up, down = (
            torch.stack([weights[f"{layer}.{index}.{part}_proj.weight"] for index in range(num_experts)])
            for part in ("gate", "up", "down")
        )
        packed |= {f"{layer}.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.down_proj": down}
    return packed
