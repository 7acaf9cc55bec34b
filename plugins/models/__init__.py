"""The built-in models. Importing this package imports no torch; a model's file is imported when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import ModelConfig, Registrar, hookimpl

API_VERSION = 2


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


@hookimpl
def register_models(register: Registrar) -> None:
    """Register the models, each with the architectures whose checkpoints it claims."""
    register(
        "qwen3",
        "hookline.plugins.models.qwen3:Qwen3",
        config=Qwen3Config,
        help="Qwen3 dense: GQA, q/k norm, RoPE, SwiGLU",
        architectures=("Qwen3ForCausalLM",),
    )
    register(
        "qwen3_moe",
        "hookline.plugins.models.qwen3_moe:Qwen3Moe",
        config=Qwen3MoeConfig,
        help="Qwen3-MoE: Qwen3's attention, experts chosen by a softmax router",
        architectures=("Qwen3MoeForCausalLM",),
    )
    register(
        "transformers",
        "hookline.plugins.models.transformers_model:TransformersModel",
        config=TransformersConfig,
        help="any causal decoder of transformers, its attention over the paged KV cache",
        architectures=("*",),
    )
