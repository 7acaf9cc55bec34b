"""The built-in models. Importing this package imports no torch; a model's file is imported when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import ModelConfig, Needs, Registrar, hookimpl

API_VERSION = 2
SIZES_ALIKE = Needs(sizes_alike=True)
"""Needs of models that keep no tensor when a step is over."""
ROW_BY_ROW = Needs(sizes_alike=True, batch_invariant=True)
"""Needs of models that, besides, compute all products and norms by their kernels."""


@dataclass
class Qwen3Config(ModelConfig):
    """Qwen3, dense. Without further options it is the small checkpoint that comes with Hookline."""

    checkpoint: str = "package:hookline.plugins.models/qwen3_tiny"


@dataclass
class TransformersConfig(ModelConfig):
    """Any causal decoder of transformers. Has no checkpoint of its own: name a folder or hub id."""


@dataclass
class Qwen3MoeConfig(ModelConfig):
    """Qwen3 with experts. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class LlamaConfig(ModelConfig):
    """Llama, Mistral or Phi-3. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Qwen2Config(ModelConfig):
    """Qwen2 or Qwen2.5. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Olmo2Config(ModelConfig):
    """OLMo 2. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Gemma3Config(ModelConfig):
    """Gemma 3, text alone. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Gemma4Config(ModelConfig):
    """Gemma 4, text alone. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class GptOssConfig(ModelConfig):
    """gpt-oss. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Qwen3NextConfig(ModelConfig):
    """Qwen3-Next. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class Qwen3_5Config(ModelConfig):
    """Qwen3.5 or Qwen3.6. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@dataclass
class DeepseekConfig(ModelConfig):
    """A model with latent attention. Has no checkpoint of its own: take a preset, or name a folder or hub id."""


@hookimpl
def register_models(register: Registrar) -> None:
    """Register the models, each with the architectures whose checkpoints it claims."""
    register(
        "qwen3",
        "hookline.plugins.models.qwen3:Qwen3",
        config=Qwen3Config,
        help="Qwen3 dense: GQA, q/k norm, RoPE, SwiGLU",
        architectures=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
        needs=ROW_BY_ROW,
    )
    register(
        "qwen3_moe",
        "hookline.plugins.models.qwen3_moe:Qwen3Moe",
        config=Qwen3MoeConfig,
        help="Qwen3-MoE: Qwen3's attention, experts chosen by a softmax router",
        architectures=("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
        needs=ROW_BY_ROW,
    )
    register(
        "transformers",
        "hookline.plugins.models.transformers.model:TransformersModel",
        config=TransformersConfig,
        help="any causal decoder of transformers, its attention over the paged KV cache",
        architectures=("*",),
    )
    register(
        "llama",
        "hookline.plugins.models.llama:Llama",
        config=LlamaConfig,
        help="Llama 2 and 3, Mistral, Yi, SmolLM, Phi-3: GQA, RoPE, SwiGLU; windows, biases, fused weights",
        # Not Phi3ForCausalLM: most of its checkpoints have longrope, which this model refuses.
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        needs=ROW_BY_ROW,
    )
    register(
        "qwen2",
        "hookline.plugins.models.qwen2:Qwen2",
        config=Qwen2Config,
        help="Qwen2 and Qwen2.5: GQA with biases, RoPE, SwiGLU",
        architectures=(
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ),
        needs=ROW_BY_ROW,
    )
    register(
        "olmo2",
        "hookline.plugins.models.olmo2:Olmo2",
        config=Olmo2Config,
        help="OLMo 2: norms behind each part, queries and keys normalised over all heads",
        architectures=("Olmo2ForCausalLM",),
        needs=ROW_BY_ROW,
    )
    register(
        "gemma3",
        "hookline.plugins.models.gemma3:Gemma3",
        config=Gemma3Config,
        help="Gemma 3, text alone: windows with a rope of their own on most layers, norms around each part",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        needs=ROW_BY_ROW,
    )
    register(
        "gemma4",
        "hookline.plugins.models.gemma4:Gemma4",
        config=Gemma4Config,
        help="Gemma 4, text: heads by the type of layer, windows on most, per-layer embeddings in the small forms",
        architectures=(
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
        ),
        needs=ROW_BY_ROW,
    )
    register(
        "gpt_oss",
        "hookline.plugins.models.gpt_oss:GptOss",
        config=GptOssConfig,
        help="gpt-oss: attention with sinks, windows on every second layer, experts with biases; MXFP4 dequantised",
        architectures=("GptOssForCausalLM",),
        needs=SIZES_ALIKE,
    )
    register(
        "qwen3_next",
        "hookline.plugins.models.qwen3_next:Qwen3Next",
        config=Qwen3NextConfig,
        help="Qwen3-Next: gated delta nets, gated attention on every fourth layer, experts and a shared one",
        architectures=("Qwen3NextForCausalLM",),
        needs=SIZES_ALIKE,
    )
    register(
        "qwen3_5",
        "hookline.plugins.models.qwen3_5:Qwen3_5",
        config=Qwen3_5Config,
        help="Qwen3.5 and Qwen3.6, dense and with experts: gated delta nets, gated attention on every fourth layer",
        architectures=(
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        needs=SIZES_ALIKE,
    )
    register(
        "deepseek",
        "hookline.plugins.models.deepseek:Deepseek",
        config=DeepseekConfig,
        help="DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Youtu: latent attention, whose latents the cache holds",
        architectures=(
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "YoutuForCausalLM",
        ),
        needs=SIZES_ALIKE,
    )
