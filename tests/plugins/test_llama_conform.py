"""Llama, Mistral and Phi-3 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.contracts import SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.llama import Llama
from tests.small_models import CONFIGS, SmallModel


class TestLlama(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Llama
    name = "llama"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"intermediate_size": None},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestLlamaWithBiases(TestLlama):
    name = "llama_biased"
    dtypes = (torch.float32,)


class TestMistralWithAWindow(TestLlama):
    name = "mistral_window"
    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS[self.name], "sliding_window": 5}


class TestPhi3(TestLlama):
    name = "phi3"
    dtypes = (torch.float32,)


class TestPhi3OnMoreRanksThanKVHeads(TestPhi3):
    ranks = (4,)


def test_a_window_is_of_every_layer_unless_it_holds_all() -> None:
    spec = Llama.spec({**CONFIGS["mistral"], "sliding_window": 16})
    assert spec.layers == (SlidingWindow(16),) * 2 and spec.attention_features == {"window"}
    assert not Llama.spec({**CONFIGS["mistral"], "sliding_window": 256}).attention_features
    assert not Llama.spec(CONFIGS["mistral"]).attention_features


def test_the_scaled_length_of_llama3_is_what_the_config_says() -> None:
    assert Llama.spec(CONFIGS["llama"]).max_position == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 16}, "sliding_window = 16; supported: null in a llama model"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias = True; supported: false in a mistral"),
        ({"model_type": "gemma"}, "model_type = 'gemma'; supported: llama, mistral, phi3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "rope_type 'longrope' is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused_with_key_and_value(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Llama.spec({**CONFIGS["llama"], **change})
    assert words in str(error.value)
