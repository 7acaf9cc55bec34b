"""Qwen3-Next against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.contracts import FullAttention, RecurrentState
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver, stored_weights
from hookline.plugins.models.qwen3_next import Qwen3Next
from tests.small_models import CONFIGS, SmallModel, reference_logits


class TestQwen3Next(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Qwen3Next
    name = "qwen3_next"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"]},
            {"attention_bias": True},
            {"linear_num_value_heads": 5},
            {"num_experts_per_tok": 5},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


def test_the_usual_pattern_of_layers_and_other_switches_equal_transformers() -> None:
    own = {key: value for key, value in CONFIGS["qwen3_next"].items() if key != "layer_types"}
    config = {**own, "num_hidden_layers": 4, "partial_rotary_factor": 0.5, "norm_topk_prob": False}
    driver, prompt = ModelDriver(Qwen3Next, config), [5, 60, 17, 2, 9, 33, 71]
    expected_TV = reference_logits(config, stored_weights(driver.targets), prompt)
    torch.testing.assert_close(driver.logits(Chunk(0, 0, prompt)), expected_TV, rtol=1e-4, atol=1e-4)


def test_key_heads_that_ranks_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="tp=4 does not divide linear_num_key_heads 2"):
        ModelDriver(Qwen3Next, CONFIGS["qwen3_next"], LocalRanks(0, 4))


def test_layers_keep_a_state_or_keys_and_values() -> None:
    state, attention, _ = Qwen3Next.spec(CONFIGS["qwen3_next"]).layers
    assert isinstance(attention, FullAttention) and isinstance(state, RecurrentState)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors}
    assert shapes == {"conv": ((2 * 2 * 8 + 4 * 12, 3), ""), "memory": ((4, 8, 12), "float32")}
