"""Small random checkpoints of transformers' architectures, for tests of model=transformers.

Each case: a model type, options over SIZES, and whether transformers has a tensor-parallel plan for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
"""Of latent attention, whose values are narrower than its keys."""

LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 10,
    "attention_chunk_size": 12,
    "no_rope_layers": [1, 0, 1, 0],
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "floor_scale": 7,
    "attn_scale": 0.4,
}
"""Of chunks that are no whole number of blocks, and queries that are scaled by their position."""


@dataclass(frozen=True)
class Case:
    """One architecture. since: the first release of transformers in which its attention can be replaced."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    has_plan: bool = True
    since: str = "0"
    num_blocks: int = 17
    """Of eight tokens, in a pool that is too small for all requests and has room for the longest one."""
    matrix_std: float | None = None
    """Of random matrices, where transformers' own are too small to make tokens unlike; None: transformers' own."""


STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 5, "time_step_rank": 3, "tie_word_embeddings": False}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 5, "time_step_rank": 3, "tie_word_embeddings": False}),
    "mamba2": ("mamba2", {"num_heads": 6, "head_dim": 12, "hidden_size": 36, "state_size": 5, "n_groups": 2,
                          "chunk_size": 7}),
    "jamba": ("jamba", {"mamba_d_state": 5, "mamba_dt_rank": 3, "num_experts": 3, "num_hidden_layers": 4,
                        "attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "bamba": ("bamba", {"mamba_n_heads": 6, "mamba_d_head": 12, "hidden_size": 36, "mamba_d_state": 5,
                        "mamba_n_groups": 2, "mamba_chunk_size": 7, "attn_layer_indices": [1],
                        "num_hidden_layers": 3}),
    "granite_4": ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
                                       "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 6,
                                       "mamba_d_head": 12, "hidden_size": 36, "mamba_d_state": 5,
                                       "shared_intermediate_size": 48, "mamba_chunk_size": 7}),
    "falcon_h1": ("falcon_h1", {"mamba_n_heads": 6, "mamba_d_head": 12, "mamba_d_ssm": 72, "mamba_d_state": 5,
                                "mamba_chunk_size": 7, "mamba_n_groups": 2, "hidden_size": 36,
                                "lm_head_multiplier": 0.7, "num_key_value_heads": 2, "head_dim": 10}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
                                  "hidden_size": 36, "head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 12,
                                  "ssm_state_size": 5, "n_groups": 2, "chunk_size": 7, "n_routed_experts": 4,
                                  "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                  "moe_shared_expert_intermediate_size": 20}),
    "olmo_hybrid": ("olmo_hybrid", {"num_hidden_layers": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
                                    "linear_key_head_dim": 5, "linear_value_head_dim": 5}),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                      "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                              "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                              "num_dense_layers": 1}),
    "lfm3": ("lfm3", {"num_hidden_layers": 4, "sliding_window": 12}),
    "qwen3_next": ("qwen3_next", {"num_hidden_layers": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
                                  "linear_key_head_dim": 5, "linear_value_head_dim": 7, "num_experts": 4,
                                  "num_experts_per_tok": 2, "head_dim": 10, "moe_intermediate_size": 24,
                                  "shared_expert_intermediate_size": 20}),
    "zamba": ("zamba", {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba",
                                                                      "hybrid", "mamba"],
                        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_d_state": 5,
                        "mamba_dt_rank": 3, "num_key_value_heads": 4, "use_mamba_kernels": False}),
    "zamba2": ("zamba2", {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba",
                                                                        "hybrid", "mamba"],
                          "mamba_d_state": 5, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 7,
                          "num_key_value_heads": 4, "hybrid_layer_ids": [2, 4], "num_mem_blocks": 1,
                          "use_mamba_kernels": False}),
    "minimax": ("minimax", {"num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 4, "block_size": 7}),
    "zaya": ("zaya", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "lara_mini": ("lara_mini", {"num_hidden_layers": 4}),
}  # fmt: skip
"""Model types and options of cases that keep states."""
DECODERS: dict[str, dict[str, Any]] = {
    name: {"decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2, "encoder_attention_heads": 4,
           "d_model": 32, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "init_std": 0.2,
           "is_decoder": True, "is_encoder_decoder": False}
    for name in ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
} | {
    name: {"is_decoder": True}
    for name in ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta",
                 "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl")
}  # fmt: skip
"""The decoders of encoder-decoders, and encoders that are decoders, by themselves."""
ALL_CASES = {
    "llama": Case("llama"),
    "phi3": Case("phi3"),
    "gpt2": Case("gpt2", {"n_positions": 256}, has_plan=False),
    "gpt2_untied": Case("gpt2", {"n_positions": 256, "tie_word_embeddings": False}, has_plan=False),
    "bert_untied": Case("bert", {"is_decoder": True, "tie_word_embeddings": False}, has_plan=False, since="5.24"),
    "opt": Case("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}, has_plan=False),
    "stablelm": Case("stablelm", {"use_qkv_bias": True}, has_plan=False),
    "cohere": Case("cohere", {"logit_scale": 0.7}),
    "cohere_qk_norm": Case("cohere", {"use_qk_norm": True}, has_plan=False),
    "granite": Case("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "falcon": Case("falcon", {"new_decoder_architecture": False, "alibi": False}, has_plan=False),
    "falcon_groups": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": True}, has_plan=False
    ),
    "falcon_plain": Case(
        "falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}, has_plan=False
    ),
    "falcon_alibi": Case(
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "hidden_size": 36,
         "num_attention_heads": 6},
        has_plan=False, since="5.24",
    ),
    "bloom": Case("bloom", {"hidden_size": 36, "num_attention_heads": 6}, has_plan=False, since="5.24"),
    "mpt": Case("mpt", {"hidden_size": 36, "num_attention_heads": 6, "max_seq_len": 256, "expansion_ratio": 2},
                has_plan=False, since="5.24"),
    "starcoder2": Case("starcoder2"),
    "gpt_neox": Case("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "olmo": Case("olmo", {"clip_qkv": 1.5}),
    "olmo2": Case("olmo2"),
    "glm4": Case("glm4", {"head_dim": 8, "attention_bias": True}),
    "phi": Case("phi", {"qk_layernorm": False}),
    "gpt_bigcode": Case("gpt_bigcode", {"n_positions": 256}, has_plan=False),
    "biogpt": Case("biogpt", has_plan=False),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0]}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 8}),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Case("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 24}),
    "olmoe": Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": Case(
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "lm_head_bias": True,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [4.0, 4.0, 4.0, 4.0],
                "short_mscale": 1.25,
                "long_mscale": 1.5,
                "original_max_position_embeddings": 256,
            },
        },
        has_plan=False,
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {"head_dim": 8, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
        has_plan=False,
    ),
    "longrope": Case(
        "phi3",
        {
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [4.0, 4.0, 4.0, 4.0],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "dynamic": Case("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": Case("mistral", {"sliding_window": 12}),
    "gemma2": Case(
        "gemma2",
        {"head_dim": 8, "sliding_window": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
         "query_pre_attn_scalar": 20},
    ),
    "cohere2": Case("cohere2", {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    "gptj": Case("gptj", {"rotary_dim": 4, "n_positions": 256}, has_plan=False, since="5.24"),
    "codegen": Case("codegen", {"rotary_dim": 4, "n_positions": 256}, has_plan=False, since="5.24"),
    "ctrl": Case("ctrl", {"dff": 48, "n_positions": 256}, has_plan=False, since="5.24"),
    "exaone": Case("exaone", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, since="5.24"),
    "gemma3n": Case(
        "gemma3n_text",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 8, "sliding_window": 12, "altup_num_inputs": 2,
         "laurel_rank": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
         "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        since="5.24",
    ),
    "diffllama": Case("diffllama", has_plan=False),
    "granite_hybrid": Case(
        "granitemoehybrid",
        {"layer_types": ["attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 8, "shared_intermediate_size": 48,
         "attention_multiplier": 0.3, "position_embedding_type": "rope"},
        has_plan=False, since="5.24",
    ),
    "sarvam_biased": Case(
        "sarvam_moe",
        {"attention_bias": True, "head_dim": 10, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1},
        since="5.24",
    ),
    "wide_values": Case("minicpm3", {**LATENT, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 15},
                        since="5.24"),
    "hrm_text": Case("hrm_text", {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 10}, has_plan=False,
                     since="5.24"),
    "minicpm3": Case("minicpm3", {**LATENT, "scale_emb": 2, "dim_model_base": 32}, since="5.24"),
    "youtu": Case("youtu", LATENT, since="5.24"),
    "deepseek_v2": Case(
        "deepseek_v2",
        {**LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 20, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2, "routed_scaling_factor": 1.7},
        since="5.24",
    ),
    **{name: Case(name, options, has_plan=False, since="5.24") for name, options in DECODERS.items()},
    **{name: Case(model_type, options, has_plan=False, since="5.24")
       for name, (model_type, options) in STATES.items()},
    "rwkv": Case("rwkv", {"num_hidden_layers": 5, "rescale_every": 2, "hidden_size": 35, "context_length": 256},
                 has_plan=False, since="5.24", matrix_std=0.3),
    "mllama": Case("mllama_text_model", {"num_hidden_layers": 4, "cross_attention_layers": [1]}, has_plan=False,
                   since="5.24"),
    "emu3": Case("emu3_text_model", has_plan=False, since="5.24"),
    "llama4": Case("llama4_text", LLAMA_4, since="5.24"),
    "llama4_gelu": Case("llama4_text", {**LLAMA_4, "hidden_act": "gelu"}, since="5.24"),
    "gemma4": Case(
        "gemma4_text",
        {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 12, "num_kv_shared_layers": 2, "sliding_window": 12,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
        has_plan=False, since="5.24", num_blocks=28,
    ),
    "gemma4_experts": Case(
        "gemma4_text",
        {"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 12, "num_kv_shared_layers": 0, "sliding_window": 12,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20, "hidden_size_per_layer_input": 0,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        has_plan=False, since="5.24", num_blocks=28,
    ),
    "gemma4_unified": Case(
        "gemma4_unified_text",
        {"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 12, "sliding_window": 12,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        has_plan=False, since="5.24", num_blocks=28,
    ),
    "mimo_v2_flash": Case(
        "mimo_v2_flash",
        {"num_hidden_layers": 3, "head_dim": 12, "v_head_dim": 7, "sliding_window": 12, "swa_num_key_value_heads": 4,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        has_plan=False, since="5.24", num_blocks=28,
    ),
}  # fmt: skip
CASES = {name: case for name, case in ALL_CASES.items() if Version(case.since) <= Version(version("transformers"))}
"""Those that the installed transformers can serve."""
WINDOWED = (
    "mistral",
    "gemma2",
    "cohere2",
    "gpt_oss",
    "gemma3n",
    "gemma4",
    "gemma4_experts",
    "gemma4_unified",
    "mimo_v2_flash",
    "llama4",
    "llama4_gelu",
)
"""Cases with sliding windows."""
FEW = (
    "phi3",
    "gpt2",
    "opt",
    "granite",
    "mixtral",
    "gemma2",
    "exaone",
    "bloom",
    "gemma3n",
    "mamba",
    "falcon_h1",
    "lfm2",
    "minicpm3",
    "llama4",
)
"""Cases that every run tests; the others are nightly."""
FEW_AT_TP_2 = ("phi3",)
"""The same for two processes, which take seconds to start."""


def make_checkpoint(folder: Path, case: Case, *, seed: int = 0, **options: Any) -> Any:
    """Save a random float32 checkpoint and return transformers' model of it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    torch.manual_seed(seed)
    whole = case.model_type.removesuffix("_text_model")
    config_class = CONFIG_MAPPING[whole]
    if whole != case.model_type:  # of text parts that transformers lists under the whole model's type alone
        config_class = config_class.sub_configs["text_config"]
    config = config_class(**{**SIZES, **case.options, **options})
    model_class = (
        AutoModelForCausalLM if whole == case.model_type else MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[whole]]
    )
    make = model_class.from_config if whole == case.model_type else model_class._from_config
    adds_twice = case.options.get("alibi")  # Falcon's biases, where transformers' attention is eager
    model = make(config, attn_implementation="sdpa" if adds_twice else "eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide a forgotten weight
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif case.matrix_std is not None:
                parameter.normal_(0.0, case.matrix_std)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.generation_config.forced_eos_token_id = None  # of encoder-decoders: the last token of any answer
    model.save_pretrained(folder, max_shard_size="20KB")
    return model
