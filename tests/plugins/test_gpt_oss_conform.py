"""gpt-oss against the conformance suite, with transformers as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hookline.core.checkpoint.load import load_checkpoint
from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.testing.model_suite import ModelSuite
from hookline.plugins.models.gpt_oss import GptOss
from hookline.plugins.models.gpt_oss_config import read_config
from tests.hf_models import build, one_prompt, run
from tests.small_models import CONFIGS, SmallModel, transformers_model


class TestGptOss(SmallModel, ModelSuite):
    sizes_alike = True
    model_class = GptOss
    name = "gpt_oss"

    def refused_configs(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"architectures": ["NoSuchForCausalLM"]},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"]},
            {"num_experts_per_tok": 7},
            {"swiglu_limit": -1},
            {"intermediate_size": 0},
            {"head_dim": 7},
        ]
        return [*super().refused_configs(), *own]


class TestGptOssWithWindowsShorterThanThePrompt(TestGptOss):
    dtypes = (torch.float32,)

    def hf_config(self) -> dict[str, Any]:
        return {**CONFIGS["gpt_oss"], "sliding_window": 4}


class TestGptOssOnMoreRanksThanKVHeads(TestGptOss):
    dtypes = (torch.float32,)
    ranks = (4,)


def test_a_checkpoint_in_mxfp4_fills_the_model_as_its_dequantised_form_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    config = {**CONFIGS["gpt_oss"], "intermediate_size": 32}
    plain = dict(transformers_model(config).state_dict())
    packed, generator = dict(plain), torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        outputs = plain[name].shape[2]
        blocks = torch.randint(0, 256, (6, outputs, 1, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 128, (6, outputs, 1), generator=generator, dtype=torch.uint8)
        plain[name] = _convert_moe_packed_tensors(blocks, scales).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    logits = []
    for folder, tensors in (("plain", plain), ("packed", packed)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        quantised = {"quantization_config": {"quant_method": "mxfp4"}} if folder == "packed" else {}
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **quantised}))
        model, kernels, cache = build(GptOss, {**config, **quantised})
        load_checkpoint(tmp_path / folder, model.weight_targets())
        logits.append(run(model, kernels, cache, one_prompt([5, 17, 60, 2, 9])))
    assert float(logits[0].abs().max()) > 0.1 and torch.equal(*logits)


def test_other_quantisations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"quantization_config = quant_method awq; supported: mxfp4, and unquantised"):
        GptOss.spec({**CONFIGS["gpt_oss"], "quantization_config": {"quant_method": "awq"}})


def test_windows_are_on_every_second_layer_and_the_rope_is_yarn_by_default() -> None:
    sizes = {key: value for key, value in CONFIGS["gpt_oss"].items() if key != "rope_parameters"}
    shape = read_config({**sizes, "max_position_embeddings": 131_072})
    assert shape.layers == (SlidingWindow(100), FullAttention(), SlidingWindow(100))
    assert (shape.rope.rope_type, shape.rope.rope_theta, shape.rope.max_position) == ("yarn", 150_000.0, 131_072)
