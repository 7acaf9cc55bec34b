"""OLMo 2 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import torch

from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.olmo2 import Olmo2
from tests.small_models import CONFIGS, SmallModel


class TestOlmo2(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Olmo2
    name = "olmo2"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"intermediate_size": None},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestOlmo2OnMoreRanksThanKVHeads(SmallModel, ModelSuite):
    """Each key head is on two ranks, and the norm over all heads counts it once."""

    sizes_alike = True
    model_class = Olmo2
    dtypes = (torch.float32,)
    ranks = (4,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["olmo2"], "attention_bias": True}
