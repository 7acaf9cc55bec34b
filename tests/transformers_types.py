"""The config.json of every causal model type of transformers, as a checkpoint of its causal model has it.

Default sizes, with which nothing is allocated. Where a type's defaults make no model, OPTIONS say what is added.
"""

from __future__ import annotations

import json
from typing import Any

from hookline.core.checkpoint.wrapped import language_model

OPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_hidden_layers": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 64, "num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "xmod": {"default_language": "en_XX"},
}
"""What a config needs beside its defaults."""


def model_types() -> list[str]:
    """All that transformers has as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def causal_config(model_type: str) -> dict[str, Any]:
    """The config.json of a type's causal model: a decoder alone, and only the language model where there are towers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**OPTIONS.get(model_type, {}))
    values = {**json.loads(config.to_json_string(use_diff=False)), "model_type": model_type}
    values = language_model(values) or values
    for key, value in (("is_encoder_decoder", False), ("is_decoder", True)):
        if key in values or (key == "is_decoder" and hasattr(config, key)):
            values[key] = value
    return {key: value for key, value in values.items() if not key.startswith("_")}


FORMS = "attend in a form of their own, neither fully nor in a window"
MASKS = "it works on attention masks itself, and none is built here"
PLACES = "its forward takes no position_ids, as batches of several sequences need"
HOST = "its forward looks at values of tensors on the host, which a step must not wait for"
BIAS = "its attention takes position_bias"
INTERFACE = "its attention does not go through transformers' attention interface"
REFUSED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa"), FORMS),
    **dict.fromkeys(("hy_v4", "qwen4_exp", "qwen4_exp_text"), FORMS),
    **dict.fromkeys(("big_bird", "doge", "gpt_neox_japanese", "megatron-bert", "mvp", "rembert"), MASKS),
    **dict.fromkeys(("roformer", "trocr", "xglm"), MASKS),
    **dict.fromkeys(("cpmant", "prophetnet", "xlnet"), PLACES),
    **dict.fromkeys(("blt", "dbrx", "jetmoe", "longcat_flash", "whisper", "xlm", "xmod"), HOST),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text", "inkling_text"), BIAS),
    **dict.fromkeys(("git", "gpt_neo"), INTERFACE),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "transformers cannot build it"),
    **dict.fromkeys(("openai-gpt", "reformer"), "its forward cannot be computed here: RuntimeError: Tensor on device"),
    "bigbird_pegasus": "its attention is not causal",
    "dory": "its output head is a DoryLMHead, and only a plain linear is served as one",
    "xlstm": "carry a state from token to token which is not in transformers' cache of states",
    "recurrent_gemma": "conv_1d is a convolution, which mixes tokens outside of attention",
}
"""Types of transformers 5.24 that are not served, and why."""
DRAFTERS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Types that only draft tokens for another model, whose keys and values they read."""
