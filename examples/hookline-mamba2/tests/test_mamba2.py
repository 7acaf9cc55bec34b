"""The architecture against Hookline's conformance suite, with transformers as the reference; hostile configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hookline_mamba2 import MAMBA2_7B
from hookline_mamba2.model import Mamba2
from torch import Tensor

from hookline.core.contracts import RecurrentState
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite

CONFIG = {
    "model_type": "mamba2",
    "vocab_size": 47,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 6,
    "conv_kernel": 4,
    "chunk_size": 8,
}
REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"time_step_limit": [0.0, 0.1]},
    {"num_heads": 3},
    {"n_groups": 3},
    {"conv_kernel": 1},
    {"state_size": 0},
    {"layer_norm_epsilon": -1.0},
    {"use_bias": "yes"},
]


class TestMamba2(ModelSuite):
    model_class = Mamba2
    uses_positions = False
    captures_prompts = True

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        from transformers import Mamba2Config, Mamba2ForCausalLM

        options = {key: value for key, value in self.hf_config().items() if key != "model_type"}
        model: Any = Mamba2ForCausalLM(Mamba2Config(**options))
        model.eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            logits_1TV: Tensor = model(torch.tensor([list(token_ids)])).logits
        return logits_1TV[0]

    def refused_configs(self) -> list[dict[str, Any]]:
        return [*super().refused_configs(), *REFUSED]


class TestMamba2WithOneGroup(TestMamba2):
    """Which two ranks cannot split; biases where others have none, and a tied head."""

    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIG, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        return super().reference({**weights, "lm_head.weight": weights["backbone.embeddings.weight"]}, token_ids)


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_what_is_refused_is_named_in_one_line(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=key) as refused:
        Mamba2.spec({**CONFIG, **change})
    assert len(str(refused.value).splitlines()) == 1


def test_every_layer_keeps_a_state_and_nothing_else() -> None:
    spec = Mamba2.spec(MAMBA2_7B)
    assert spec.num_layers == len(spec.layers) == 64
    (kept,) = set(spec.layers)
    assert isinstance(kept, RecurrentState)
    assert {name: tensor.shape for name, tensor in kept.tensors} == {
        "x": (8192, 3),
        "bc": (2048, 3),
        "state": (128, 64, 128),
    }
