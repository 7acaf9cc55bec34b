"""GGUF's architectures: their metadata as the config.json of the same model, their tensors' names as Hugging Face's.

Sources: the keys and names of ggml's docs/gguf.md, and what llama.cpp's converter does to a checkpoint's values: it
interleaves the halves of a llama's query and key heads, and stores the norms of Gemma plus one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hookline.core.errors import CheckpointError, shown, shown_key

_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor with the factor of each frequency, in place of the keys of llama3's rope."""
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BEFORE = {"ffn_norm": "post_attention_layernorm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
MAX_EXPERTS = 4096
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


@dataclass(frozen=True)
class Family:
    """How the names and values of an architecture are translated.

    names: GGUF's name of each of a layer's linears and norms -> Hugging Face's. is_paired: the rows of queries and keys
    are interleaved. norm_add: a number that GGUF adds to the weights of norms.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    is_paired: bool = False
    norm_add: float = 0.0


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", _ATTENTION | _BEFORE | _MLP, is_paired=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _ATTENTION | _BEFORE | _MLP),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _ATTENTION | _HEAD_NORMS | _BEFORE | _MLP),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _ATTENTION | _HEAD_NORMS | _BEFORE | _ROUTER),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", _ATTENTION | _HEAD_NORMS | _AFTER | _MLP),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _HEAD_NORMS | _AFTER | _MLP | {"ffn_norm": "pre_feedforward_layernorm"},
        norm_add=1.0,
    ),
}
"""The families by GGUF's name, `general.architecture`."""


def name_of(family: Family, stored: str) -> str:
    """Hugging Face's name of a stored tensor. An unknown name stays as it is."""
    layer = _LAYER.fullmatch(stored)
    if layer is None:
        return _ENDS.get(stored, stored)
    part = family.names.get(layer[2])
    return stored if part is None else f"model.layers.{int(layer[1])}.{part}.{layer[3]}"


def expert_names(family: Family, stored: str, shape: Sequence[int]) -> list[str] | None:
    """Hugging Face's name of each expert's matrix in a tensor (X, O, D); None for a tensor of another kind."""
    layer = _LAYER.fullmatch(stored)
    has_experts = family.model_type == "qwen3_moe" and len(shape) == 3 and shape[0] <= MAX_EXPERTS
    if layer is None or layer[2] not in _EXPERTS or not has_experts:
        return None
    front, part = f"model.layers.{int(layer[1])}.mlp.experts", _EXPERTS[layer[2]]
    return [f"{front}.{index}.{part}.{layer[3]}" for index in range(shape[0])]


class Metadata:
    """A file's metadata, whose sizes and numbers are checked as they are read."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        """Find the architecture.

        Raises: CheckpointError for one that is not read.
        """
        self.path, self.values = path, values
        self.architecture = values.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in FAMILIES:
            found = shown_key(self.architecture)
            raise CheckpointError(
                f"{path} holds the architecture {found}, whose tensors have no known names here; read from GGUF are "
                f"{', '.join(FAMILIES)}; give the model's own checkpoint, with config.json and *.safetensors"
            )
        self.family = FAMILIES[self.architecture]

    def get(self, key: str) -> Any:
        """The value of ARCHITECTURE.key; None if it has none."""
        return self.values.get(f"{self.architecture}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        Raises: CheckpointError.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "one whole number, of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number.

        Raises: CheckpointError.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            self.refuse(key, "a positive number")
        return float(value)

    def refuse(self, key: str, needed: str) -> NoReturn:
        """Say which key is wrong.

        Raises: CheckpointError.
        """
        value = self.get(key)
        what = "has no" if value is None else "has"
        end = "" if value is None else f" = {shown(value)}"
        raise CheckpointError(f"{self.path} {what} {self.architecture}.{key}{end}; needed: {needed}")

    def end_tokens(self) -> list[int]:
        """Ids of the tokens that end a text or a turn."""
        found = [self.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        return list(dict.fromkeys(one for one in found if one is not None))


def config_of(
    metadata: Metadata, shapes: Mapping[str, Sequence[int]], rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """The values of a config.json.

    shapes: of the tensors, by Hugging Face's names. rope_factors: of the frequencies, if the file has any.
    Raises: CheckpointError for a missing or senseless key, or for what the family does not have.
    """
    family, heads, hidden = metadata.family, metadata.size("attention.head_count"), metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.size(key, head_dim) != head_dim:
            metadata.refuse(key, f"{head_dim}, as many as a head has keys")
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.path} has no tensor token_embd.weight, which every model has")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": metadata.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.end_tokens(),
    }
    scaling = _rope_scaling(metadata)
    if rope_factors is not None:
        scaling = _llama3_scaling(metadata, config["rope_theta"], head_dim, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if family.model_type == "qwen3_moe":
        return config | _experts(metadata)
    if metadata.get("expert_count"):
        metadata.refuse("expert_count", "none: experts are read of qwen3moe alone")
    config["intermediate_size"] = metadata.size("feed_forward_length")
    if family.model_type == "gemma3_text":
        return config | _gemma3(metadata, head_dim)
    if metadata.get("attention.sliding_window"):
        metadata.refuse("attention.sliding_window", "none: windows are read of gemma3 alone")
    if family.model_type == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in shapes
    return config


def _experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.size("feed_forward_length", 1),  # of dense layers, which these files lack
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp always normalises them for this architecture
    }


def _gemma3(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    num_layers, pattern = metadata.size("block_count"), metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_local = [bool(one) for one in pattern[:num_layers]]
    else:
        step = metadata.size("attention.sliding_window_pattern", 6)
        is_local = [(index + 1) % step != 0 for index in range(min(num_layers, 2**16))]
    # The one size whose scores are scaled by hidden / heads is known by its layers, to llama.cpp as well.
    is_27b = num_layers == 62
    scalar = metadata.size("embedding_length") / metadata.size("attention.head_count") if is_27b else head_dim
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
    }


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "none"):
        linear = metadata.number("rope.scale_linear", 1.0)
        return None if linear == 1 else {"rope_type": "linear", "factor": linear}
    if kind not in ("linear", "yarn"):
        metadata.refuse("rope.scaling.type", "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
            if metadata.number(key, 1.0) != 1:
                metadata.refuse(key, "1")
        for key in ("beta_fast", "beta_slow"):
            if metadata.get(f"rope.scaling.yarn_{key}") is not None:
                scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
        if metadata.get("rope.scaling.original_context_length") is not None:
            original = metadata.size("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(metadata: Metadata, theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, Any] | None:
    """The keys of llama3's rope that give these factors; the converter keeps none of them.

    Raises: CheckpointError for factors of another kind.
    """
    largest, low, high, original = max(factors), 1.0, 4.0, 8192
    if all(one == 1 for one in factors):
        return None
    theta = min(theta, 1e30)  # larger ones are refused with the rest of the config.json
    for index, factor in enumerate(factors):
        length = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        if largest < 1 or not math.isclose(factor, 1 / ((1 - smooth) / largest + smooth), rel_tol=1e-4):
            raise CheckpointError(
                f"{metadata.path} has factors of frequencies in {ROPE_FACTORS} that llama3's rope does not give, and "
                "others are not read; give the model's own checkpoint, with config.json and *.safetensors"
            )
    return {
        "rope_type": "llama3",
        "factor": round(largest, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
