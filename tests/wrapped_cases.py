"""Small random checkpoints of models that see images, with a tower each, for tests of the language model in them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.transformers_cases import ALL_CASES, LATENT, LLAMA_4, SIZES

MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
QWEN_TOWER = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
HALF_MROPE = {**MROPE, "mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}
GLM_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
QWEN3_TOWER = {
    **{key: value for key, value in GLM_TOWER.items() if key != "image_size"},
    "out_hidden_size": 36,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
EAR = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "output_dim": 32,
    "num_mel_bins": 16,
    "n_window": 4,
}
TOKENS_OF_PARTS = tuple(f"{one}_token_id" for one in ("vision_start", "audio_start", "image", "video", "audio"))
TEXT = {**SIZES, "hidden_size": 36, "head_dim": 8, "num_attention_heads": 6}
"""With heads that are not a share of the hidden size."""
QWEN3_5 = {
    **TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**HALF_MROPE, "mrope_interleaved": True},
}
QWEN3_5_TOWER = {key: value for key, value in QWEN3_TOWER.items() if key != "deepstack_visual_indexes"}


@dataclass(frozen=True)
class Wrapped:
    """A model type and the values of its parts. served_by: a model that is ours, or transformers."""

    model_type: str
    served_by: str
    text: dict[str, Any]
    tower: dict[str, Any]
    whole: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 17
    """Of eight tokens, in a pool that is too small for all requests."""
    thinker_of: str = ""
    """The model type of the whole, of which this one is the part that writes text."""
    inner: str = ""
    """The attribute of the whole that is its causal model, where the whole's own forward fails without an image."""


CASES = {
    "qwen2_vl": Wrapped("qwen2_vl", "qwen2", {**SIZES, "rope_parameters": MROPE}, {**QWEN_TOWER, "hidden_size": 32}),
    "qwen2_5_vl": Wrapped(
        "qwen2_5_vl",
        "qwen2",
        {**SIZES, "rope_parameters": MROPE},
        {key: value for key, value in GLM_TOWER.items() if key != "image_size"},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": Wrapped(
        "qwen3_vl",
        "qwen3",
        {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_TOWER,
    ),
    "qwen3_vl_moe": Wrapped(
        "qwen3_vl_moe",
        "qwen3_moe",
        {**TEXT, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_TOWER,
    ),
    "qwen3_5": Wrapped("qwen3_5", "qwen3_5", QWEN3_5, QWEN3_5_TOWER),
    "qwen3_5_moe": Wrapped(
        "qwen3_5_moe", "qwen3_5",
        {**{key: value for key, value in QWEN3_5.items() if key != "intermediate_size"}, "num_experts": 5,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
        QWEN3_5_TOWER,
    ),
    "llava": Wrapped("llava", "llama", {**TEXT, "model_type": "llama"}, SIGLIP),
    "llava_phi3": Wrapped("llava", "transformers", {**SIZES, "model_type": "phi3"}, SIGLIP),
    "mistral3": Wrapped("mistral3", "llama", {**TEXT, "model_type": "mistral", "sliding_window": None}, SIGLIP),
    "ministral3": Wrapped(
        "mistral3",
        "transformers",
        {**TEXT, "model_type": "ministral3", "sliding_window": None,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "llama_4_scaling_beta": 0.1}},
        SIGLIP,
    ),
    "internvl": Wrapped(
        "internvl", "qwen3", {**TEXT, "model_type": "qwen3"},
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "smolvlm": Wrapped(
        "smolvlm", "llama", {**TEXT, "model_type": "llama"}, {k: v for k, v in SIGLIP.items() if k != "model_type"}
    ),
    "glm4v": Wrapped(
        "glm4v", "transformers", {**SIZES, "rope_parameters": HALF_MROPE}, GLM_TOWER,
    ),
    "glm4v_moe": Wrapped(
        "glm4v_moe",
        "transformers",
        {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
         "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "rope_parameters": HALF_MROPE},
        GLM_TOWER,
    ),
    "gemma3": Wrapped(
        "gemma3", "gemma3",
        {**TEXT, "sliding_window": 12, "query_pre_attn_scalar": 20,
         "layer_types": ["sliding_attention", "full_attention"]},
        SIGLIP, num_blocks=24,
    ),
    "kimi_k25": Wrapped(
        "kimi_k25", "deepseek",
        {**SIZES, **LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 3, "first_k_dense_replace": 1,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
         "n_group": 4, "topk_group": 2},
        {**TOWER, "patch_size": 4},
    ),
    "llama4": Wrapped(
        "llama4", "transformers", {**SIZES, **LLAMA_4},
        {**TOWER, "image_size": 16, "patch_size": 8, "projector_input_dim": 32, "projector_output_dim": 32,
         "vision_output_dim": 32},
        num_blocks=28, inner="language_model",
    ),
    "phi4_multimodal": Wrapped(
        "phi4_multimodal", "transformers", {}, {**TOWER, "image_size": 16, "patch_size": 8, "crop_size": 16},
        {**SIZES, "original_max_position_embeddings": 256, "sliding_window": None,
         "audio_config": {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2,
                          "input_size": 16, "nemo_conv_channels": 8, "ext_pw_out_channel": 16}},
    ),
    "gemma4": Wrapped(
        "gemma4", "gemma4",
        {**ALL_CASES["gemma4"].options, **SIZES, "num_hidden_layers": 6},
        {**TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        num_blocks=50,
    ),
    "aya_vision": Wrapped(
        "aya_vision", "transformers",
        {**SIZES, "model_type": "cohere2", "sliding_window": 12,
         "layer_types": ["sliding_attention", "full_attention"]},
        SIGLIP, num_blocks=28,
    ),
    "lfm2_vl": Wrapped(
        "lfm2_vl", "transformers",
        {**SIZES, "model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
         "block_auto_adjust_ff_dim": False},
        {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "voxtral": Wrapped(
        "voxtral", "llama", {**TEXT, "model_type": "llama"}, {},
        {"audio_config": {**TOWER, "num_mel_bins": 8, "max_source_positions": 8}},
    ),
    "qwen2_5_omni": Wrapped(
        "qwen2_5_omni_thinker", "transformers", {**SIZES, "rope_parameters": MROPE},
        {**{key: one for key, one in GLM_TOWER.items() if key != "image_size"}, "fullatt_block_indexes": [0]},
        {"audio_config": EAR, **dict.fromkeys(TOKENS_OF_PARTS, 96)}, thinker_of="qwen2_5_omni",
    ),
    "qwen3_omni_moe": Wrapped(
        "qwen3_omni_moe_thinker", "transformers",
        {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_TOWER,
        {"audio_config": {**EAR, "output_dim": 36, "downsample_hidden_size": 8}, **dict.fromkeys(TOKENS_OF_PARTS, 96)},
        thinker_of="qwen3_omni_moe",
    ),
    "paddleocr_vl": Wrapped(
        "paddleocr_vl", "transformers", {**SIZES, "head_dim": 8, "rope_parameters": MROPE},
        {**TOWER, "image_size": 16, "patch_size": 4},
    ),
    "deepseek_ocr2": Wrapped(
        "deepseek_ocr2", "transformers",
        {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
         "mlp_layer_types": ["dense", "sparse"]},
        {"sam_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 8,
                        "image_size": 32, "patch_size": 8, "global_attn_indexes": [0], "mlp_dim": 24,
                        "downsample_channels": [12, 16]},
         "encoder_config": {**TOWER, "num_key_value_heads": 2}},
    ),
    "granite4_vision": Wrapped(
        "granite4_vision", "transformers",
        {**SIZES, "model_type": "granite4_vision_text", "logits_scaling": 3.0, "attention_multiplier": 0.3},
        {**SIGLIP, "hidden_size": 64},
        {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]],
         "qformer_config": {**TOWER, "model_type": "blip_2_qformer", "encoder_hidden_size": 16}},
    ),
}  # fmt: skip
FEW = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "smolvlm", "mistral3", "glm4v_moe", "kimi_k25", "phi4_multimodal")
"""Cases that every run tests: each way in which such a checkpoint names its tensors; the others are nightly."""


def make_wrapped(folder: Path, case: Wrapped, *, seed: int = 0) -> Any:
    """Save a random float32 checkpoint, and return transformers' model as it loads that."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(seed)
    parts = {"text_config": case.text, "vision_config": case.tower, "initializer_range": 0.2}
    config = AutoConfig.for_model(
        case.model_type,
        **copy.deepcopy(
            {"tie_word_embeddings": False, **{key: one for key, one in parts.items() if one}, **case.whole}
        ),
    )
    is_flat = not case.text and case.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto: Any = AutoModelForCausalLM if is_flat else AutoModelForMultimodalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide a forgotten weight
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="20KB")
    loaded = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if case.thinker_of:
        _put_beside_a_talker(folder, case.thinker_of)
    return (getattr(loaded, case.inner) if case.inner else loaded).eval()


def _put_beside_a_talker(folder: Path, model_type: str) -> None:
    """Make a checkpoint of a thinker that of the whole, as released: with parts that talk."""
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    others = {"talker.model.layers.0.mlp.up_proj.weight": torch.ones(2, 2), "token2wav.scale": torch.ones(1)}
    save_file(stored | others, folder / "model.safetensors")
    thinker = json.loads((folder / "config.json").read_text())
    whole = {"model_type": model_type, "architectures": ["WholeOmniModel"], "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(whole))
