"""DeepSeek's models against the conformance suite, with transformers as the reference. T tokens, V vocabulary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.config.settings import validate
from hookline.core.contracts import AttentionSpec
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.worker.startup.memory import block_bytes
from hookline.plugins.models.deepseek import Deepseek
from tests.quantised_layouts import LAYOUTS, write_layout
from tests.small_models import CONFIGS, reference_logits, save_checkpoint
from tests.test_parity import transformers_greedy

NUM_TOKENS = 24

FEW: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 47, "max_position_embeddings": 64}
"""So few experts that every one of them is chosen by some token."""
CONFIG = {**CONFIGS["deepseek_v3"], **FEW, "n_group": 2, "topk_group": 2}


class TestDeepseekV3(ModelSuite):
    """Latents of queries, sigmoids with a correction, groups of experts, YaRN with mscale."""

    sizes_alike = True
    model_class = Deepseek
    ranks = (2, 3)

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIG)

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor | None:
        return reference_logits(self.hf_config(), weights, token_ids)

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["DeepseekV2ForCausalLM"]},
            {"num_key_value_heads": 2},
            {"qk_rope_head_dim": 7},
            {"num_experts_per_tok": 9},
            {"n_group": 3},
            {"topk_group": 5},
            {"scoring_func": "softmax"},
            {"topk_method": "greedy"},
            {"first_k_dense_replace": -1},
            {"moe_layer_freq": 2},
            {"hidden_act": "gelu"},
        ]
        return [*super().refused_configs(), *own]


class TestDeepseekV2(TestDeepseekV3):
    """Queries of the layer's input, softmax, groups by their best expert, every rotated number beside its partner."""

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["deepseek_v2"], **FEW}

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{"norm_topk_prob": True}, {"topk_method": "noaux_tc"}, {"scoring_func": "sigmoid"}]
        return [*ModelSuite.refused_configs(self), *own]


class TestGlm4MoeLite(TestDeepseekV3):
    """Layers with experts by a list; pairs of halves."""

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["glm4_moe_lite"], **FEW}

    def refused_configs(self) -> list[dict[str, Any]]:
        return [*ModelSuite.refused_configs(self), {"mlp_layer_types": ["sparse"]}, {"mlp_layer_types": ["wide"] * 3}]


def test_the_cache_holds_the_latents_and_nothing_else() -> None:
    """DeepSeek-V2-Lite: 512 numbers of a latent and 64 rotated ones, in each of 27 layers."""
    shape = validate({"model": "deepseek_v2_lite"}, PluginHost.load(environ={})).model.config.random_shape
    spec = Deepseek.spec(shape)
    limits = (64, 8, 512, 4096, torch.device("cpu"), torch.bfloat16)
    sizes = AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, *limits, value_dim=spec.value_dim)
    assert block_bytes(spec.num_layers, sizes) == 64 * 27 * (512 + 64) * 2


def test_sparse_attention_is_served_as_far_as_it_is_dense_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 48}
    with caplog.at_level(logging.INFO, "hookline"):
        assert Deepseek.spec(config).max_position == 48
    assert "chooses all of up to index_topk = 48 tokens" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_gives_the_tokens_of_transformers_as_far_as_it_is_dense(
    tmp_path: Path, model_type: str
) -> None:
    indexer = {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 2}
    others = {key: value for key, value in CONFIGS["deepseek_v3"].items() if key != "rope_interleave"}
    reference = save_checkpoint({**others, **indexer, "model_type": model_type, "attention_bias": False}, tmp_path)
    prompt = list(range(5, 45))
    assert tokens(tmp_path, prompt) == transformers_greedy(reference, prompt, NUM_TOKENS)[0]


@pytest.mark.slow
def test_blocks_of_fp8_give_the_tokens_of_the_dequantised_checkpoint_also_on_two_ranks(tmp_path: Path) -> None:
    """The matrix that is absorbed is dequantised while it is loaded."""
    save_checkpoint(CONFIGS["deepseek_v3"], tmp_path / "plain")
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path / "layout", LAYOUTS["fp8_blocks"])
    expected = tokens(dequantised, [5, 6, 7, 8, 9] * 6)
    assert tokens(quantised, [5, 6, 7, 8, 9] * 6) == expected
    assert tokens(quantised, [5, 6, 7, 8, 9] * 6, tp=2) == expected


def tokens(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """Greedy tokens of a checkpoint."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cpu", model="deepseek", **options) as llm:
        return llm.generate([prompt], params)[0].token_ids


def test_kimi_k2_is_read_as_its_config_json_names_it() -> None:
    config = {
        **CONFIG,
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
    }
    assert Deepseek.spec(config) == Deepseek.spec({**CONFIG, "n_group": 1, "topk_group": 1})


def test_other_kv_heads_are_refused_with_what_is_supported() -> None:
    with pytest.raises(ConfigError) as caught:
        Deepseek.spec(json.loads(json.dumps({**CONFIG, "num_key_value_heads": 2})))
    assert "num_key_value_heads = 2; supported: num_attention_heads = 6" in str(caught.value)
