"""Gemma 3 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.gemma3 import Gemma3
from hookline.plugins.models.gemma3_config import read_config
from tests.small_models import CONFIGS, SmallModel


class TestGemma3(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Gemma3
    name = "gemma3"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_activation": "gelu"},
            {"layer_types": ["full_attention"]},
            {"intermediate_size": 0},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestGemma3WithWindowsShorterThanThePrompt(TestGemma3):
    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["gemma3"], "sliding_window": 4, "attention_bias": True}


def test_old_and_new_keys_of_windows_and_ropes_mean_the_same() -> None:
    sizes = {key: value for key, value in CONFIGS["gemma3"].items() if key not in ("layer_types", "rope_parameters")}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 500.0, "rope_scaling": linear, "sliding_window_pattern": 3}
    new = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {**linear, "rope_theta": 5e5},
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    }
    shape = read_config({**sizes, **old})
    assert shape == read_config({**sizes, **new})
    assert (shape.rope.rope_theta, shape.local_rope.rope_theta) == (5e5, 500.0)
    assert shape.layers == (SlidingWindow(100), SlidingWindow(100), FullAttention(), SlidingWindow(100))
    bare = read_config({**sizes, "_sliding_window_pattern": 3})  # which transformers writes beside layer_types alone
    assert bare.layers == (SlidingWindow(100),) * 4
    assert (bare.rope.rope_theta, bare.local_rope.rope_theta) == (1e6, 1e4)


def test_scores_are_plain_if_the_scalar_is_the_head_dim() -> None:
    assert Gemma3.spec(CONFIGS["gemma3"]).attention_features == {"scale", "window"}
    assert Gemma3.spec({**CONFIGS["gemma3"], "query_pre_attn_scalar": 16}).attention_features == {"window"}


def test_the_scaled_length_is_what_the_config_says() -> None:
    assert Gemma3.spec(CONFIGS["gemma3"]).max_position == 256


@pytest.mark.parametrize(
    "change",
    [{"final_logit_softcapping": 30.0}, {"attn_logit_softcapping": 50.0}, {"use_bidirectional_attention": True}],
)
def test_what_gemma_2_and_embedding_models_have_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        Gemma3.spec({**CONFIGS["gemma3"], **change})
