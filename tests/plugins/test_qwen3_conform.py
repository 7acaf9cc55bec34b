"""Qwen3 against the conformance suite, with transformers' Qwen3 as the reference. Legend: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.qwen3 import Qwen3

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


class TestQwen3(ModelSuite):
    sizes_alike = True
    model_class = Qwen3

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor | None:
        return transformers_logits(self.hf_config(), weights, token_ids)

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["Qwen3MoeForCausalLM"]},
            {"hidden_act": "gelu"},
            {"use_sliding_window": True},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestTiedQwen3WithBiases(TestQwen3):
    def hf_config(self) -> dict[str, Any]:
        return {**CONFIG, "tie_word_embeddings": True, "attention_bias": True}


class TestQwen3WithYarn(TestQwen3):
    def hf_config(self) -> dict[str, Any]:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        return {**CONFIG, "rope_scaling": scaling}


class TestQwen3OnMoreRanksThanKVHeads(ModelSuite):
    sizes_alike = True
    model_class = Qwen3
    dtypes = (torch.float32,)
    ranks = (4,)

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)


def transformers_logits(config: dict[str, Any], weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    model = Qwen3ForCausalLM(Qwen3Config(**options, attn_implementation="eager")).float().eval()
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    with torch.no_grad():
        logits_1TV = model(torch.tensor([list(token_ids)])).logits
    return logits_1TV[0]
