"""Mamba-2: its option and its registration. Imports no torch and opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import ModelConfig, Registrar, hookimpl

API_VERSION = 2

MAMBA2_7B = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 32768, "eos_token_id": 2}
MAMBA2_7B |= {"hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "n_groups": 8}
"""The sizes that transformers takes where a config.json says none."""


@dataclass
class Mamba2Config(ModelConfig):
    """Mamba-2. Has no checkpoint of its own: name a folder or hub id."""

    random_shape: dict[str, Any] = field(default_factory=lambda: dict(MAMBA2_7B))
    """The config.json to use with weights=random when no checkpoint folder is at hand."""


@hookimpl
def register_models(register: Registrar) -> None:
    options: Any = {"config": Mamba2Config, "architectures": ("Mamba2ForCausalLM",)}
    register("mamba2", "hookline_mamba2.model:Mamba2", help="Mamba-2: a state in each layer, no attention", **options)
