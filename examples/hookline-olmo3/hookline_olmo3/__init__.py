"""OLMo 3: its option and its registration. Imports no torch and opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import ModelConfig, Registrar, hookimpl

API_VERSION = 2

OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "vocab_size": 100278,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    "sliding_window": 4096,
    "eos_token_id": 100257,
}
"""allenai/Olmo-3-7B-Instruct's sizes."""


@dataclass
class Olmo3Config(ModelConfig):
    """OLMo 3. Has no checkpoint of its own: name a folder or hub id."""

    random_shape: dict[str, Any] = field(default_factory=lambda: dict(OLMO3_7B))
    """The config.json to use with weights=random when no checkpoint folder is at hand."""


@hookimpl
def register_models(register: Registrar) -> None:
    register(
        "olmo3",
        "hookline_olmo3.model:Olmo3",
        config=Olmo3Config,
        help="OLMo 3: windows on three of four layers, norms behind each part, q/k norm over all heads",
        architectures=("Olmo3ForCausalLM",),
    )
