"""Qwen2 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.qwen2 import Qwen2
from tests.small_models import CONFIGS, SmallModel


class TestQwen2(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = Qwen2
    name = "qwen2"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"]},
            {"layer_types": ["full_attention", "chunked_attention"]},
            {"intermediate_size": None},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestQwen2WithWindowsFromALayerOn(TestQwen2):
    name = "qwen2_window"
    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS[self.name], "sliding_window": 5}


def test_layers_from_max_window_layers_on_have_a_window_if_windows_are_used() -> None:
    config = CONFIGS["qwen2_window"]
    assert Qwen2.spec(config).layers == (FullAttention(), SlidingWindow(13), SlidingWindow(13))
    assert not Qwen2.spec({**config, "use_sliding_window": False}).attention_features
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert Qwen2.spec({**config, "layer_types": types}).layers[0] == SlidingWindow(13)


@pytest.mark.parametrize("first", [-1, 1.5, "2", True])
def test_a_senseless_first_layer_with_a_window_is_refused(first: Any) -> None:
    with pytest.raises(ConfigError, match="max_window_layers"):
        Qwen2.spec({**CONFIGS["qwen2_window"], "max_window_layers": first})
