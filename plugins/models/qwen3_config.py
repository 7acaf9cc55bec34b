"""Qwen3's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Knows nothing of tensors. Defaults are those of transformers' Qwen3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from core.errors import ConfigError
from core.rope import RopeSettings, rope_settings


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Qwen3 model, of all ranks together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    rope: RopeSettings


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and what is supported.
    """
    _refuse_what_is_not_implemented(hf_config)
    num_heads = _size(hf_config, "num_attention_heads")
    shape = Shape(
        vocab_size=_size(hf_config, "vocab_size"),
        hidden_size=_size(hf_config, "hidden_size"),
        intermediate_size=_size(hf_config, "intermediate_size"),
        num_layers=_size(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(hf_config, "num_key_value_heads", num_heads),
        head_dim=_size(hf_config, "head_dim", 128),
        eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        attention_bias=bool(hf_config.get("attention_bias", False)),
        rope=rope_settings({"max_position_embeddings": 32768, **hf_config}),
    )
    if num_heads % shape.num_kv_heads:
        _refuse(hf_config, "num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    if shape.head_dim % 2 or shape.head_dim < 4:
        _refuse(hf_config, "head_dim", "an even number from 4")
    return shape


def _refuse_what_is_not_implemented(hf_config: Mapping[str, Any]) -> None:
    if hf_config.get("model_type", "qwen3") != "qwen3":
        _refuse(hf_config, "model_type", "qwen3")
    if "Qwen3ForCausalLM" not in (hf_config.get("architectures") or ["Qwen3ForCausalLM"]):
        _refuse(hf_config, "architectures", "Qwen3ForCausalLM")
    if hf_config.get("hidden_act", "silu") != "silu":
        _refuse(hf_config, "hidden_act", "silu")
    if hf_config.get("use_sliding_window"):
        _refuse(hf_config, "use_sliding_window", "false")
    if set(hf_config.get("layer_types") or ()) - {"full_attention"}:
        _refuse(hf_config, "layer_types", "full_attention in every layer")
    if hf_config.get("quantization_config"):
        _refuse(hf_config, "quantization_config", "unquantised checkpoints")


def _size(hf_config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(hf_config, key, "a positive whole number")
    return value


def _refuse(hf_config: Mapping[str, Any], key: str, supported: str) -> NoReturn:
    value = repr(hf_config[key]) if key in hf_config else "missing"
    raise ConfigError(f"Qwen3 does not support {key} = {value[:120]}; supported: {supported}")
