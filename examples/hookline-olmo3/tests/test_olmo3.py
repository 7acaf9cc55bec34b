"""The architecture against Hookline's conformance suite, with transformers as the reference; hostile configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hookline_olmo3 import OLMO3_7B
from hookline_olmo3.model import Olmo3
from torch import Tensor

from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIG = {
    "model_type": "olmo3",
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4,
    "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 20_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "pad_token_id": 0,
}
REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"layer_types": ["sliding_attention"]},
    {"layer_types": ["sliding_attention"] * 3 + ["linear_attention"]},
    {"layer_types": [["full_attention"]] * 4},
    {"layer_types": "full_attention"},
    {"sliding_window": 0},
    {"sliding_window": "4096"},
    {"num_hidden_layers": 10**9},
    {"intermediate_size": 2.5},
    {"rms_norm_eps": float("nan")},
    {"attention_bias": "no"},
    {"tie_word_embeddings": "yes"},
    {"max_position_embeddings": -1},
    {"head_dim": 7},
    {"rope_parameters": [1]},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
]


class TestOlmo3(ModelSuite):
    model_class = Olmo3

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        from transformers import Olmo3Config, Olmo3ForCausalLM

        options = {key: value for key, value in self.hf_config().items() if key != "model_type"}
        model: Any = Olmo3ForCausalLM(Olmo3Config(**options))
        model.eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            logits_1TV: Tensor = model(torch.tensor([list(token_ids)])).logits
        return logits_1TV[0]

    def refused_configs(self) -> list[dict[str, Any]]:
        return [*super().refused_configs(), *REFUSED]


class TestOlmo3WithBiasesAndATiedHead(TestOlmo3):
    """What the released checkpoints do not use; layers in an order of their own."""

    def hf_config(self) -> dict[str, Any]:
        types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
        return {**CONFIG, "attention_bias": True, "tie_word_embeddings": True, "layer_types": types}

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        return super().reference({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, token_ids)


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_what_is_refused_is_named_in_one_line(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=key) as refused:
        Olmo3.spec({**CONFIG, **change})
    assert len(str(refused.value).splitlines()) == 1


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not support sliding_window = None"):
        Olmo3.spec({**CONFIG, "sliding_window": None})
    everywhere = ["full_attention"] * 4
    spec = Olmo3.spec({**CONFIG, "sliding_window": None, "layer_types": everywhere})
    assert set(spec.layers) == {FullAttention()}


def test_the_released_models_see_everything_on_every_fourth_layer_and_64_ki_tokens() -> None:
    spec = Olmo3.spec(OLMO3_7B)
    assert spec.layers == (*(SlidingWindow(4096),) * 3, FullAttention()) * 8
    assert (spec.max_position, spec.head_dim) == (65536, 128)


def test_a_window_that_holds_every_sequence_is_none() -> None:
    assert set(Olmo3.spec({**CONFIG, "sliding_window": 64}).layers) == {FullAttention()}
    assert SlidingWindow(63) in Olmo3.spec({**CONFIG, "sliding_window": 63}).layers
