"""Writes small models as GGUF files, as llama.cpp's converter does, with gguf's own writer, names and quantisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""GGUF's name of a model_type, where it has another."""


def write_gguf(
    model: Any,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    tokenizer: Mapping[str, Any] | None = None,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    without: str = "",
    split_max_tensors: int = 0,
) -> Any:
    """Write a model of transformers, whose matrices become what the file's types keep of them; returns the model.

    kind: of matrices, or a function of a matrix's name in the file; others are F32. change: called with the writer, for
    keys of its own. without: a tensor left out.
    split_max_tensors: of each of several files; 0: one file.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    _write_keys(writer, config, name)
    for key, value in (tokenizer or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else _ADDERS[type(value)](writer, key, value)
    change(writer)
    with torch.no_grad():
        for stored, values in _tensors(model, name, kind):
            if stored != without:
                writer.add_tensor(stored, *values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_ADDERS: dict[type, Callable[..., None]] = {
    str: GGUFWriter.add_string,
    int: GGUFWriter.add_uint32,
    bool: GGUFWriter.add_bool,
}


def _write_keys(writer: GGUFWriter, config: Any, name: str) -> None:
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    rope = config.rope_parameters
    if name == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config.layer_types])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """By how much each frequency is divided, as the model's makers compute it."""
    found = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)
        original, low, high = (rope[f"{key}"] for key in _LLAMA3)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


_LLAMA3 = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


def _tensors(model: Any, name: str, kind: str | Callable[[str], str]) -> Any:
    """Each tensor's name in the file, and what the writer is given; the model gets the values that it stands for."""
    config = model.config

    def of(stored: str) -> str:
        return kind if isinstance(kind, str) else kind(stored)

    arch = next(key for key, one in MODEL_ARCH_NAMES.items() if one == name)
    names = get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    for theirs, parameter in model.named_parameters():
        if theirs.endswith("experts.gate_up_proj"):
            gate, up = parameter.data.chunk(2, dim=1)
            pairs = [("gate", gate), ("up", up)]
        elif theirs.endswith("experts.down_proj"):
            pairs = [("down", parameter.data)]
        else:
            stored = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert stored is not None, theirs
            yield stored, _stored(stored, parameter.data, name, config, of(stored) if parameter.ndim > 1 else "F32")
            continue
        layer = theirs.split(".")[2]
        for part, view in pairs:
            stored = f"blk.{layer}.ffn_{part}_exps.weight"
            yield stored, _stored("", view, name, config, of(stored))


def _stored(stored: str, view: torch.Tensor, name: str, config: Any, kind: str) -> tuple[Any, ...]:
    values = view.numpy().copy()
    heads = None
    if name == "llama" and (".attn_q." in stored or ".attn_k." in stored):
        heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
        pairs = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    if name == "gemma3" and "norm.weight" in stored:
        values = values + 1
    if kind == "F32":
        return (values,)
    raw_kind = GGMLQuantizationType[kind]
    raw = quantised(values, raw_kind)
    kept = dequantize(raw, raw_kind).astype(np.float32)
    if heads is not None:
        kept = kept.reshape(heads, len(kept) // heads // 2, 2, -1).swapaxes(1, 2).reshape(kept.shape)
    view.copy_(torch.from_numpy(np.ascontiguousarray(kept)))
    return raw, None, raw_kind


def quantised(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """By the package's quantiser; where it has none, any bytes, whose scales are small numbers."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        num_blocks = values.size // block
        raw = np.random.default_rng(values.size).integers(0, 256, (num_blocks, size), np.uint8)
        scale = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
        for at in _SCALES[kind.name]:
            raw[:, at : at + 2] = scale
        return raw.reshape(*values.shape[:-1], -1)


_SCALES = {
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
"""Where the float16 scales of a block lie."""
