"""Gemma 4 against the conformance suite, with transformers as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.core.contracts import FullAttention, SharedCache, SlidingWindow, Stage
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.model_suite.driver import ModelDriver
from hookline.plugins.models.gemma4 import Gemma4
from hookline.plugins.models.gemma4_config import read_config
from tests.small_models import CONFIGS, SmallModel


class TestGemma4(SmallModel, ModelSuite):
    """Two local kv heads in an entry of a global one; keys that are values; a scaled vocabulary's logits."""

    sizes_alike = True
    model_class = Gemma4
    name = "gemma4"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_activation": "gelu"},
            {"layer_types": ["full_attention"]},
            {"intermediate_size": 0},
            {"head_dim": 7},
            {"use_bidirectional_attention": "all"},
            {"num_kv_shared_layers": 4},
            {"attention_bias": True},
            {"final_logit_softcapping": -1.0},
            {"per_layer_config": {"2": {"head_dim": 12, "num_attention_heads": 2}}},
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
        ]
        return [*super().refused_configs(), *own]


class TestGemma4WithExperts(SmallModel, ModelSuite):
    """A feed-forward and experts with norms of their own."""

    sizes_alike = True
    model_class = Gemma4
    name = "gemma4_experts"
    dtypes = (torch.float32,)

    def refused_configs(self) -> list[dict[str, Any]]:
        return [{"top_k_experts": 6}, {"num_experts": None}, {"moe_intermediate_size": None}]


class TestGemma4WithEmbeddingsPerLayer(SmallModel, ModelSuite):
    """Keys and values shared by the last layers, whose feed-forwards are twice as wide; one kv head."""

    sizes_alike = True
    model_class = Gemma4
    name = "gemma4_per_layer"
    dtypes = (torch.float32,)

    def test_each_layer_needs_the_embeddings_so_stages_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="take pp=1"):
            ModelDriver(Gemma4, self.hf_config(), stage=Stage(0, 2, 0, 3))


def test_kv_heads_share_entries_of_the_cache_or_lie_in_several() -> None:
    real = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256}
    shape = read_config({**CONFIGS["gemma4"], **real, "global_head_dim": 512})
    assert (shape.num_entries, shape.head_dim) == (4, 512)
    assert {kind: (one.lanes, one.copies) for kind, one in shape.heads.items()} == {
        "sliding_attention": (2, 1),
        "full_attention": (1, 2),
    }


def test_what_transformers_saves_means_what_the_checkpoint_said() -> None:
    saved = {key: value for key, value in CONFIGS["gemma4"].items() if "global" not in key}
    of_globals = {"head_dim": 22, "num_key_value_heads": 1}
    assert read_config({**saved, "per_layer_config": {"1": of_globals, "3": of_globals}}) == read_config(
        CONFIGS["gemma4"]
    )


def test_the_last_layers_attend_over_the_last_of_their_type() -> None:
    assert Gemma4.spec(CONFIGS["gemma4_per_layer"]).layers == (
        SlidingWindow(13),
        SlidingWindow(13),
        FullAttention(),
        SharedCache(1),
        SharedCache(2),
    )


def test_layers_without_types_are_five_with_windows_and_one_without() -> None:
    bare = {key: value for key, value in CONFIGS["gemma4"].items() if key not in ("layer_types", "rope_parameters")}
    shape = read_config({**bare, "num_hidden_layers": 8})
    local, all_tokens = "sliding_attention", "full_attention"
    assert shape.kinds == (local,) * 5 + (all_tokens, local, all_tokens)
    assert (shape.heads[local].rope.rope_theta, shape.heads[all_tokens].rope.rope_theta) == (1e4, 1e6)
