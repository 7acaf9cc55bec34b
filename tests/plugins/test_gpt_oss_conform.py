"""gpt-oss against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.gpt_oss import GptOss
from tests.small_models import CONFIGS, reference_logits


class TestGptOss(ModelSuite):
    model_class = GptOss
    name = "gpt_oss"

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIGS[self.name])

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        return reference_logits(self.hf_config(), weights, token_ids)

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"]},
            {"num_experts_per_tok": 7},
            {"swiglu_limit": -1},
            {"intermediate_size": 0},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestGptOssWithWindowsShorterThanThePrompt(TestGptOss):
    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["gpt_oss"], "sliding_window": 4}


class TestGptOssOnMoreRanksThanKVHeads(TestGptOss):
    dtypes = (torch.float32,)
    ranks = (4,)
