"""The architecture against Hookline's conformance suite, with transformers' Llama as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hookline_smollm2.llama import Llama
from torch import Tensor

from hookline.core.testing.model_suite import ModelSuite

CONFIG = {
    "model_type": "llama",
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class TestLlama(ModelSuite):
    model_class = Llama
    sizes_alike = True

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        from transformers import LlamaConfig, LlamaForCausalLM

        options = {key: value for key, value in self.hf_config().items() if key != "model_type"}
        model = LlamaForCausalLM(LlamaConfig(**options, attn_implementation="eager")).float().eval()
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            return model(torch.tensor([list(token_ids)])).logits[0]

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}]
        return [*super().refused_configs(), *own, {"intermediate_size": None}, {"head_dim": 7}]
