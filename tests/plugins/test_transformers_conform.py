"""The conformance suite of models over model=transformers, with a small llama and a small phi3.

The reference is transformers' own model, with its own attention and masks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from hookline.core.testing.model_suite import ModelSuite
from tests.lazily import Lazily

TransformersModel: Any = Lazily("hookline.plugins.models.transformers.model", "TransformersModel")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
    "pad_token_id": None,
}


class TransformersSuite(ModelSuite):
    model_class = TransformersModel

    def reference(self, weights: Mapping[str, torch.Tensor], token_ids: Sequence[int]) -> torch.Tensor:
        from transformers import AutoConfig, AutoModelForCausalLM

        options = {key: value for key, value in self.hf_config().items() if key != "model_type"}
        config = AutoConfig.for_model(self.hf_config()["model_type"], **options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        model.load_state_dict(dict(weights))
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.slow
class TestLlama(TransformersSuite):
    ranks = (2, 4)

    def hf_config(self) -> dict[str, Any]:
        return dict(LLAMA)


@pytest.mark.slow
@pytest.mark.nightly
class TestPhi3(TransformersSuite):
    """Fused projections, which every rank gathers; the vocabulary is not a multiple of the ranks."""

    def hf_config(self) -> dict[str, Any]:
        kept = {key: value for key, value in LLAMA.items() if "bias" not in key}
        return {**kept, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
