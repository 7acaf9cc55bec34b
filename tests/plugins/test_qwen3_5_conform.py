"""Qwen3.5 and Qwen3.6 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.contracts import FullAttention, RecurrentState
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.qwen3_5 import Qwen3_5
from tests.small_models import CONFIGS, SmallModel


class TestQwen35(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Qwen3_5
    name = "qwen3_5"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"]},
            {"attention_bias": True},
            {"linear_num_value_heads": 5},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestQwen35WithExperts(TestQwen35):
    name = "qwen3_5_moe"

    def refused_configs(self) -> list[dict[str, Any]]:
        return [*super().refused_configs(), {"num_experts_per_tok": 6}]


def test_the_usual_pattern_has_attention_on_every_fourth_layer() -> None:
    *states, attention = Qwen3_5.spec(CONFIGS["qwen3_5"]).layers
    assert isinstance(attention, FullAttention)
    assert len(states) == 3 and all(isinstance(one, RecurrentState) for one in states)


def test_a_dense_one_must_state_the_size_of_its_feed_forward() -> None:
    config = {key: value for key, value in CONFIGS["qwen3_5"].items() if key != "intermediate_size"}
    with pytest.raises(ConfigError, match="intermediate_size"):
        Qwen3_5.spec(config)
