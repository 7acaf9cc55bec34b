"""Small random models of transformers, by a config.json of each architecture: as checkpoints and as references.

Knows nothing of our models and of engines. Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# A config.json for each architecture, small enough for a CPU, in which all that it can do counts.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_biased": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": None, "num_key_value_heads": 1},
    "mistral_window": {**SIZES, "model_type": "mistral", "sliding_window": 13},
    "phi3": {**SIZES, "model_type": "phi3", "sliding_window": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "qwen2": {**SIZES, "model_type": "qwen2"},
    "qwen2_window": {
        **SIZES,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 13,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "olmo2": {**SIZES, "model_type": "olmo2"},
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        },
    },
    "gemma4": {
        **SIZES,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 10,
        "num_key_value_heads": 4,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 22,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50_000.0},
        },
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 100,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "swiglu_limit": 1.0,
    },
    "qwen3_next": {
        **SIZES,
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [2],
    },
}
CONFIGS["gemma4_experts"] = {
    **CONFIGS["gemma4"],
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
CONFIGS["gemma4_per_layer"] = {
    **CONFIGS["gemma4"],
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 96,
}
_DELTA = {
    key: value for key, value in CONFIGS["qwen3_next"].items() if key.startswith("linear_") or key in ("head_dim",)
}
CONFIGS["qwen3_5"] = {
    **SIZES,
    **_DELTA,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
CONFIGS["qwen3_5_moe"] = {
    **CONFIGS["qwen3_5"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {
    **SIZES,
    "num_hidden_layers": 3,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
CONFIGS["deepseek_v2"] = {
    **_LATENT,
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}
CONFIGS["deepseek_v3"] = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
CONFIGS["glm4_moe_lite"] = {
    **_LATENT,
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "norm_topk_prob": True,
    "rope_interleave": False,
    "rms_norm_eps": 1e-5,
}
CONFIGS["gpt_oss_window"] = {**CONFIGS["gpt_oss"], "sliding_window": 13}
CONFIGS["gemma3_window"] = {**CONFIGS["gemma3"], "sliding_window": 13}


def transformers_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A random float32 model, with weights so large that each token matters, and no norm of one or bias of zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    their_config = AutoConfig.for_model(**{**config, "initializer_range": 0.3})
    model = AutoModelForCausalLM.from_config(their_config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def save_checkpoint(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Any:
    """Save a random checkpoint in several files, and return transformers' model of it."""
    model = transformers_model(config, seed)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def reference_logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
    """Logits (T, V) that transformers computes with these weights; all but a tied head must be there."""
    model = transformers_model(config)
    missing, surplus = model.load_state_dict(_with_stacked_experts(weights), strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    with torch.no_grad():
        logits_1TV: Tensor = model(torch.tensor([list(token_ids)])).logits
    return logits_1TV[0]


def _with_stacked_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint has a tensor for each expert's matrix; transformers keeps two for all experts of a layer."""
    apart = {name: weight for name, weight in weights.items() if ".experts." in name and name.endswith(".weight")}
    stacked = {name: weight for name, weight in weights.items() if name not in apart}
    for prefix in dict.fromkeys(name.split(".experts.")[0] + ".experts" for name in apart):
        num_experts = sum(name.startswith(prefix) for name in apart) // 3

        def of_all(kind: str, prefix: str = prefix, num_experts: int = num_experts) -> Tensor:
            return torch.stack([apart[f"{prefix}.{index}.{kind}_proj.weight"] for index in range(num_experts)])

        stacked[f"{prefix}.gate_up_proj"] = torch.cat([of_all("gate"), of_all("up")], 1)
        stacked[f"{prefix}.down_proj"] = of_all("down")
    return stacked


class SmallModel:
    """For conformance suites of models: the small config of the suite's name, with transformers as the reference."""

    name: ClassVar[str]

    def hf_config(self) -> dict[str, Any]:
        return dict(CONFIGS[self.name])

    def reference(self, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        return reference_logits(self.hf_config(), weights, token_ids)
